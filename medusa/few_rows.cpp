// y = x w^T + b for few rows x, at the speed at which w is read: in fp32, and in bf16 with sums in fp32.
//
// w lies in blocks of COLUMNS columns, [blocks, words, COLUMNS], zeros behind the last column, so that it is read once
// and a block at a time, from several places of it at once: a processor asks for more of what it will need the more
// places it is read at. A word is what is summed at once: a number of fp32, or two neighbours of bf16. A tile of rows
// keeps its sums in registers, so that each vector of w that is loaded serves all of its rows; where there are more,
// several tiles go over a block in turn while the next one is fetched. Every number of y is one chain of sums over the
// words, whatever the number of rows or threads: a row's bits are its own.
//
// Dimensions: M rows, N columns, K words of a row.

#include <cstdint>
#include <cstring>
#include <memory>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16, TILE = 12 };  // words in a vector; rows whose sums the registers hold
#elif defined(__AVX__)
enum { LANES = 8, TILE = 6 };
#elif defined(__aarch64__)
enum { LANES = 4, TILE = 12 };
#else
enum { LANES = 4, TILE = 6 };
#endif
enum {
    WORD = 4,  // bytes
    COLUMNS = 2 * LANES,
    STREAMS = 4,  // places of a block that are read in turns
    AHEAD = 2048 / WORD,  // that w is fetched before it is used
    LINE = 64 / WORD,
    HELD = 131072,  // words of x that stay in a processor's own memory while w goes by
};

typedef float Sums __attribute__((vector_size(WORD * LANES), aligned(WORD)));
typedef int32_t Words __attribute__((vector_size(WORD * LANES), aligned(WORD), may_alias));
typedef int32_t Word __attribute__((aligned(2), may_alias));

static float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

struct Full {
    typedef float Number;
    typedef float Factor;  // what a word of x is multiplied as
    static Sums add(Sums sums, Factor x, Words w) { return sums + x * (Sums)w; }
    static float read(float value) { return value; }
    static float written(float value) { return value; }
};

struct Half {
    typedef uint16_t Number;
#if defined(__AVX512BF16__) && !defined(TILES)
    enum { WIDE = 0 };
    typedef Word Factor;
    static Sums add(Sums sums, Factor x, Words w) {
        return (Sums)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(x), (__m512bh)(__m512i)w);
    }
#else  // Intel's with AMX have the instruction too: a Sapphire Rapids took as long over it as over five of the others
    enum { WIDE = 1 };
    struct Factor {
        float first, second;
    };
    static Sums add(Sums sums, Factor x, Words w) {
        sums += x.first * (Sums)(w << 16);
        return sums + x.second * (Sums)(w & ~0xffff);
    }
#endif
    static float read(uint16_t value) { return as_float((uint32_t)value << 16); }
    static uint16_t written(float value) {  // the nearest, of two the even one; what is no number stays none
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 64;
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
};

// Not put into its callers: a compiler would take seven times as long over them.
template <typename Kind>
__attribute__((noinline)) static void write(
    const float* sums, const void* bias, typename Kind::Number* y, long columns
) {
    const auto* b = (const typename Kind::Number*)bias;
    for (long n = 0; n < columns; n++) y[n] = Kind::written(b ? sums[n] + Kind::read(b[n]) : sums[n]);
}

// y of the first `rows` of M rows and one block. ALONE: they are all there are, and lie one behind the other; else they
// lie word by word, and what is at `soon` is fetched meanwhile, a line per word. Loops over the rows are unrolled by
// order: Clang would leave the sums in memory.
template <typename Kind, int M, bool ALONE>
static void tile(
    const typename Kind::Factor* x, const Word* w, const Word* soon, const void* bias, void* y, long rows, long K,
    long N, long columns
) {
    Sums sums[M][2] = {};
    const auto add = [&](long k) __attribute__((always_inline)) {
        const Word* at = w + k * COLUMNS;
        if constexpr (ALONE)
            for (int line = 0; line < COLUMNS; line += LINE) __builtin_prefetch(at + AHEAD + line);
        else __builtin_prefetch(soon + k * LINE, 0, 2);
        const Words left = *(const Words*)at, right = *(const Words*)(at + LANES);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
            const typename Kind::Factor factor = x[ALONE ? m * K + k : k * M + m];
            sums[m][0] = Kind::add(sums[m][0], factor, left);
            sums[m][1] = Kind::add(sums[m][1], factor, right);
        }
    };
    const long part = K / STREAMS;
    for (long k = 0; k < part; k++)
        for (int stream = 0; stream < STREAMS; stream++) add(stream * part + k);
    for (long k = STREAMS * part; k < K; k++) add(k);
    auto* to = (typename Kind::Number*)y;
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
        const Sums both[] = {sums[m][0], sums[m][1]};  // a copy: what has an address may stay in no register
        if (m < rows) write<Kind>((const float*)both, bias, to + m * N, columns);
    }
}

template <typename Kind, bool ALONE, int M = TILE>
static auto tile_of(long rows) -> decltype(&tile<Kind, 1, ALONE>) {
    if constexpr (M == (ALONE ? 1 : TILE / 2 + 1)) return tile<Kind, M, ALONE>;  // parts of many rows have no less
    else return rows == M ? tile<Kind, M, ALONE> : tile_of<Kind, ALONE, M - 1>(rows);
}

// As many rows as parts of about one size make of `rows`.
static long even(long rows, long most) {
    const long parts = (rows + most - 1) / most;
    return (rows + parts - 1) / parts;
}

// M rows in tiles of `rows`, each tile word by word, zeros for rows that are missing in the last.
template <typename Kind>
static void lay(const typename Kind::Factor* x, typename Kind::Factor* laid, long M, long K, long rows) {
    for (long m = 0; m < M || m % rows; m++) {
        auto* to = laid + (m - m % rows) * K + m % rows;
        for (long k = 0; k < K; k++) to[k * rows] = m < M ? x[m * K + k] : typename Kind::Factor();
    }
}

template <typename Kind, bool ALONE>
static void all(
    const typename Kind::Factor* x, const Word* w, const char* b, char* y, long M, long rows, long K, long N,
    int threads
) {
    const long blocks = (N + COLUMNS - 1) / COLUMNS, size = sizeof(typename Kind::Number);
    const long turns = COLUMNS < LINE ? 1 : COLUMNS / LINE;  // of tiles, until all of a block is fetched
    const auto sum = tile_of<Kind, ALONE>(rows);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long block = 0; block < blocks; block++) {
        const long from = block * COLUMNS, columns = N - from < COLUMNS ? N - from : COLUMNS;
        const Word *now = w + from * K, *next = now + COLUMNS * K;
        const char* bias = b ? b + from * size : nullptr;
        for (long m = 0, turn = 0; m < M; m += rows, turn++) {
            const long some = M - m < rows ? M - m : rows;
            sum(x + m * K, now, next + turn % turns * K * LINE, bias, y + (m * N + from) * size, some, K, N, columns);
        }
    }
}

template <typename Kind>
static void any(const void* x, const Word* w, const char* b, char* y, long M, long K, long N, int threads) {
    typedef typename Kind::Factor Factor;
    const Factor* rows = (const Factor*)x;
    if (M <= TILE) return all<Kind, true>(rows, w, b, y, M, M, K, N, threads);
    const long chunk = even(M, HELD / K < TILE ? TILE : HELD / K), tall = even(chunk, TILE);
    const std::unique_ptr<Factor[]> laid(new Factor[(chunk + tall) * K]);
    for (long first = 0; first < M; first += chunk) {
        const long some = M - first < chunk ? M - first : chunk;
        lay<Kind>(rows + first * K, laid.get(), some, K, tall);
        all<Kind, false>(laid.get(), w, b, y + first * N * sizeof(typename Kind::Number), some, tall, K, N, threads);
    }
}

#if defined(TILES)
// Matrices that a processor keeps in registers (AMX), multiplied at once. Rows go in two halves of up to ROWS: sums of
// the upper one in 0 and 1, for LANES columns each, of the lower in 2 and 3; DEEP words of x in 4 and 5; the same words
// of w, for either LANES, in 6 and 7.
enum { ROWS = 16, DEEP = 16 };

static bool may_use_tiles() {  // Linux gives their memory to programs that ask for it
    static const bool may = !syscall(SYS_arch_prctl, 0x1023, 18);
    return may;
}

// What was written lies in memory now: compilers are not told that tiles read it.
static void settle(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

static void shape_tiles(long upper, long lower) {
    struct {
        uint8_t palette = 1, unused[15] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shapes;
    const long rows[] = {upper, upper, lower, lower, upper, lower, DEEP, DEEP};
    for (int tile = 0; tile < 8; tile++)
        if (rows[tile]) shapes.rows[tile] = rows[tile], shapes.bytes[tile] = 64;
    settle(&shapes);
    _tile_loadconfig(&shapes);
}

template <bool BOTH>
static void add_tiles(const Word* upper, const Word* lower, long stride, const Word* w) {
    for (int line = 0; line < DEEP * COLUMNS; line += LINE) __builtin_prefetch(w + AHEAD + line);
    _tile_loadd(4, upper, stride);
    _tile_loadd(6, w, COLUMNS * WORD);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + LANES, COLUMNS * WORD);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (BOTH) {
        _tile_loadd(5, lower, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// `rest`: the words of x behind the last DEEP, and zeros, [M, DEEP].
template <bool BOTH>
static void by_tiles(
    const Word* x, const Word* rest, const Word* w, const void* bias, uint16_t* y, long M, long upper, long K, long N,
    long columns
) {
    const long whole = K / DEEP, part = whole / STREAMS;
    const auto add = [&](long deep) {
        const Word* from = x + deep * DEEP;
        add_tiles<BOTH>(from, from + upper * K, K * WORD, w + deep * DEEP * COLUMNS);
    };
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (BOTH) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long deep = 0; deep < part; deep++)
        for (int stream = 0; stream < STREAMS; stream++) add(stream * part + deep);
    for (long deep = STREAMS * part; deep < whole; deep++) add(deep);
    if (K % DEEP) {
        Word last[DEEP * COLUMNS] = {};
        memcpy(last, w + whole * DEEP * COLUMNS, K % DEEP * COLUMNS * WORD);
        settle(last);
        add_tiles<BOTH>(rest, rest + upper * DEEP, DEEP * WORD, last);
    }
    float sums[2 * ROWS][COLUMNS];
    _tile_stored(0, sums[0], sizeof sums[0]);
    _tile_stored(1, sums[0] + LANES, sizeof sums[0]);
    if constexpr (BOTH) {
        _tile_stored(2, sums[upper], sizeof sums[0]);
        _tile_stored(3, sums[upper] + LANES, sizeof sums[0]);
    }
    for (long m = 0; m < M; m++) write<Half>(sums[m], bias, y + m * N, columns);
}

static void all_by_tiles(const Word* x, const Word* w, const char* b, char* y, long M, long K, long N, int threads) {
    const long blocks = (N + COLUMNS - 1) / COLUMNS, whole = K - K % DEEP, size = sizeof(uint16_t);
    const long chunk = even(M, HELD / K < 2 * ROWS ? 2 * ROWS : HELD / K);
    const std::unique_ptr<int32_t[]> rest(K % DEEP ? new int32_t[M * DEEP]() : nullptr);
    for (long m = 0; m < M && rest; m++) memcpy(&rest[m * DEEP], x + m * K + whole, (K - whole) * WORD);
    settle(rest.get());
    for (long first = 0; first < M; first += chunk) {
        const long last = first + chunk < M ? first + chunk : M;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            long shaped = 0;
#pragma omp for schedule(static)
            for (long block = 0; block < blocks; block++) {
                const long from = block * COLUMNS, some = N - from < COLUMNS ? N - from : COLUMNS;
                for (long m = first; m < last; m += 2 * ROWS) {
                    const long rows = last - m < 2 * ROWS ? last - m : 2 * ROWS;
                    const long upper = rows > ROWS ? (rows + 1) / 2 : rows;
                    if (shaped != rows) shape_tiles(upper, rows - upper);
                    shaped = rows;
                    const auto product = rows > ROWS ? by_tiles<true> : by_tiles<false>;
                    product(
                        x + m * K, rest.get() + m * DEEP, w + from * K, b ? b + from * size : nullptr,
                        (uint16_t*)y + m * N + from, rows, upper, K, N, some
                    );
                }
            }
            if (shaped) _tile_release();
        }
    }
}
#endif

static void half(const void* x, const Word* w, const char* b, char* y, long M, long K, long N, int threads) {
#if defined(TILES)
    if (may_use_tiles()) return all_by_tiles((const Word*)x, w, b, y, M, K, N, threads);
#endif
    if constexpr (!Half::WIDE) return any<Half>(x, w, b, y, M, K, N, threads);
    const long numbers = 2 * M * K;
    const std::unique_ptr<float[]> wide(new float[numbers]);
    for (long each = 0; each < numbers; each++) wide[each] = Half::read(((const uint16_t*)x)[each]);
    any<Half>(wide.get(), w, b, y, M, K, N, threads);
}

extern "C" int columns() { return COLUMNS; }

// `is_half`: bf16. K: words, at least one.
extern "C" void product(
    const void* x, const void* w, const void* b, void* y, long M, long K, long N, int is_half, int threads
) {
    if (M) (is_half ? half : any<Full>)(x, (const Word*)w, (const char*)b, (char*)y, M, K, N, threads);
}

// y = x w^T + b for few rows x, at the speed at which w is read: in fp32, and in bf16 with sums in fp32.
//
// w lies in blocks of COLUMNS columns, [blocks, words, COLUMNS], zeros behind the last column, so that it is read once and
// a block at a time, from several places of it at once: a processor asks for more of what it will need the more places it
// is read at. A word is what is summed at once: a number of fp32, or two neighbours of bf16. A tile of rows keeps its sums
// in registers, so that each vector of w that is loaded serves all of its rows. Every number of y is one chain of sums
// over the words, whatever the number of rows or threads: a row's bits are its own.
//
// Dimensions: M rows, N columns, K words of a row.

#include <cstdint>
#include <cstring>
#if defined(__AVX512BF16__)
#include <immintrin.h>
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
    static Sums add(Sums sums, int32_t x, Words w) { return sums + as_float(x) * (Sums)w; }
    static float read(float value) { return value; }
    static float written(float value) { return value; }
};

struct Half {
    typedef uint16_t Number;
    static Sums add(Sums sums, int32_t x, Words w) {
#if defined(__AVX512BF16__)
        return (Sums)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(x), (__m512bh)(__m512i)w);
#else
        const int32_t upper = ~0xffff;
        sums += as_float((uint32_t)x << 16) * (Sums)(w << 16);
        return sums + as_float(x & upper) * (Sums)(w & upper);
#endif
    }
    static float read(uint16_t value) { return as_float((uint32_t)value << 16); }
    static uint16_t written(float value) {  // the nearest, of two the even one; what is no number stays none
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 64;
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
};

template <typename Kind, int M>
static void tile(const Word* x, const Word* w, const void* bias, void* output, long K, long N, long columns) {
    typedef typename Kind::Number Number;
    Sums sums[M][2] = {};
    const auto add = [&](long k) {
        const Word* at = w + k * COLUMNS;
        for (int line = 0; line < COLUMNS; line += LINE) __builtin_prefetch(at + AHEAD + line);
        const Words left = *(const Words*)at, right = *(const Words*)(at + LANES);
        for (int m = 0; m < M; m++) {
            const int32_t word = x[m * K + k];
            sums[m][0] = Kind::add(sums[m][0], word, left);
            sums[m][1] = Kind::add(sums[m][1], word, right);
        }
    };
    const long part = K / STREAMS;
    for (long k = 0; k < part; k++)
        for (int stream = 0; stream < STREAMS; stream++) add(stream * part + k);
    for (long k = STREAMS * part; k < K; k++) add(k);
    for (int m = 0; m < M; m++) {
        const float* sum = (const float*)sums[m];
        const Number* b = (const Number*)bias;
        Number* y = (Number*)output + m * N;
        for (long n = 0; n < columns; n++) y[n] = Kind::written(b ? sum[n] + Kind::read(b[n]) : sum[n]);
    }
}

typedef void (*Tile)(const Word*, const Word*, const void*, void*, long, long, long);

template <typename Kind, int M>
static Tile tile_of(long rows) {
    if constexpr (M == 1) return tile<Kind, 1>;
    else return rows == M ? tile<Kind, M> : tile_of<Kind, M - 1>(rows);
}

// As many rows as parts of about one size make of `rows`.
static long even(long rows, long most) {
    const long parts = (rows + most - 1) / most;
    return (rows + parts - 1) / parts;
}

template <typename Kind>
static void all(const Word* x, const Word* w, const char* b, char* y, long M, long K, long N, int threads) {
    const long blocks = (N + COLUMNS - 1) / COLUMNS, most = HELD / K < TILE ? TILE : HELD / K;
    const long chunk = even(M, most), rows = even(chunk, TILE), size = sizeof(typename Kind::Number);
    for (long first = 0; first < M; first += chunk) {
        const long last = first + chunk < M ? first + chunk : M;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (long block = 0; block < blocks; block++) {
            const long from = block * COLUMNS, some = N - from < COLUMNS ? N - from : COLUMNS;
            for (long m = first; m < last; m += rows) {
                const Tile sum = tile_of<Kind, TILE>(m + rows < last ? rows : last - m);
                sum(x + m * K, w + from * K, b ? b + from * size : nullptr, y + (m * N + from) * size, K, N, some);
            }
        }
    }
}

extern "C" int columns() { return COLUMNS; }

// `half`: bf16. K: words.
extern "C" void product(
    const void* x, const void* w, const void* b, void* y, long M, long K, long N, int half, int threads
) {
    const auto sum = half ? all<Half> : all<Full>;
    if (M) sum((const Word*)x, (const Word*)w, (const char*)b, (char*)y, M, K, N, threads);
}

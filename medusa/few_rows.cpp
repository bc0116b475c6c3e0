// y = x w^T + b for few rows x, in fp32, at the speed at which w is read.
//
// w [N, K] lies in blocks of COLUMNS columns, [blocks, K, COLUMNS], zeros behind the last one, so that it is read once and
// in order. A tile of rows keeps its sums in registers: each vector of w that is loaded serves all of its rows. Every
// number of y is one chain of fused sums along K, whatever the number of rows or threads: a row's bits are its own.
//
// Dimensions: M rows, N columns, K what is summed over.

#if defined(__AVX512F__)
enum { LANES = 16, TILE = 12 };  // floats in a vector; rows whose sums the registers hold
#elif defined(__AVX__)
enum { LANES = 8, TILE = 6 };
#elif defined(__aarch64__)
enum { LANES = 4, TILE = 12 };
#else
enum { LANES = 4, TILE = 6 };
#endif
enum {
    COLUMNS = 2 * LANES,
    AHEAD = 2048 / sizeof(float),    // that w is fetched before it is used
    LINE = 64 / sizeof(float),
    HELD = 131072,                   // numbers of x that stay in a processor's own memory while w goes by
};

typedef float Lanes __attribute__((vector_size(sizeof(float) * LANES), aligned(sizeof(float))));

template <int M>
static void tile(const float* x, const float* w, const float* b, float* y, long K, long N, long columns) {
    Lanes sums[M][2] = {};
    for (long k = 0; k < K; k++, w += COLUMNS) {
        for (int line = 0; line < COLUMNS; line += LINE) __builtin_prefetch(w + AHEAD + line);
        const Lanes left = *(const Lanes*)w, right = *(const Lanes*)(w + LANES);
        for (int m = 0; m < M; m++) {
            const float value = x[m * K + k];
            sums[m][0] += value * left;
            sums[m][1] += value * right;
        }
    }
    for (int m = 0; m < M; m++) {
        const float* sum = (const float*)sums[m];
        for (long n = 0; n < columns; n++) y[m * N + n] = b ? sum[n] + b[n] : sum[n];
    }
}

typedef void (*Tile)(const float*, const float*, const float*, float*, long, long, long);

template <int M>
static Tile tile_of(long rows) {
    if constexpr (M == 1) return tile<1>;
    else return rows == M ? tile<M> : tile_of<M - 1>(rows);
}

// As many rows as tiles of about one size make of `rows`.
static long even(long rows, long most) {
    const long parts = (rows + most - 1) / most;
    return (rows + parts - 1) / parts;
}

extern "C" int columns() { return COLUMNS; }

extern "C" void product(const float* x, const float* w, const float* b, float* y, long M, long K, long N, int threads) {
    if (!M) return;
    const long blocks = (N + COLUMNS - 1) / COLUMNS, most = HELD / K < TILE ? TILE : HELD / K, chunk = even(M, most);
    const long rows = even(chunk, TILE);
    for (long first = 0; first < M; first += chunk) {
        const long last = first + chunk < M ? first + chunk : M;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (long block = 0; block < blocks; block++) {
            const long from = block * COLUMNS, some = N - from < COLUMNS ? N - from : COLUMNS;
            for (long m = first; m < last; m += rows) {
                const Tile sum = tile_of<TILE>(m + rows < last ? rows : last - m);
                sum(x + m * K, w + from * K, b ? b + from : nullptr, y + m * N + from, K, N, some);
            }
        }
    }
}

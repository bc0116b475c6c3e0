// Attention of few queries to a long cache: softmax(scale q k^T + mask) v, keys and values read once, in place. In
// fp32, and in bf16 with all sums in fp32.
//
// Keys are taken a span at a time, at fixed slots, each span by itself: the scores, their largest, the sum of their
// exponentials below it, and the values weighed by those. Spans are what threads share out; at the end a query's spans
// are put together by their largest scores (Dao et al. 2022, FlashAttention, section 3.1; the split over keys is that
// of Flash-Decoding). What is computed for a query goes by its own numbers alone: its bits are the same whatever other
// rows, queries, hidden slots or threads there are. A key whose mask is -inf or the least number has no part in it, and
// a span of such keys is not read.
//
// All query heads of a head of keys go together: keys are turned (to vectors of one column each) once for G x N
// queries, and each vector of keys or values that is loaded serves a tile of queries, whose sums stay in registers.
// What is read next is fetched meanwhile: left to itself, the processor stops at the end of each page.
//
// Dimensions: B rows, H heads of keys, G query heads for each of them, N queries, T keys, D head size.

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
enum { LANES = 16, SCORED = 12, SUMMED = 6 };  // floats in a vector; queries whose scores, or sums, the registers hold
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX__)
enum { LANES = 8, SCORED = 6, SUMMED = 3 };
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#if defined(__aarch64__)
enum { LANES = 4, SCORED = 12, SUMMED = 6 };
#else
enum { LANES = 4, SCORED = 6, SUMMED = 3 };
#endif
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif
enum {
    SPAN = 256,        // keys of a span, a multiple of PAIR
    PAIR = 2 * LANES,  // keys that are turned at once
    ACROSS = 4,        // vectors of values in a tile
    MOST_ROWS = 96,    // queries of a task, all heads of a group counted
    MOST_SIZE = 256,   // D
    LINE = 64,         // bytes
    SHARES = 4,        // of the tasks, for each thread: one that was held up leaves its last ones to others
};

typedef float Lanes __attribute__((vector_size(sizeof(float) * LANES), aligned(sizeof(float)), may_alias));
typedef int Ints __attribute__((vector_size(sizeof(int) * LANES), aligned(sizeof(int)), may_alias));

typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

static const float NEVER = -__builtin_inff();

struct Problem {
    const void *q, *k, *v, *mask;  // mask: null where every query sees every key
    void* output;                  // [B, N, H, G, D]
    long B, H, G, N, T, D;
    long q_row, q_head, q_node, k_row, k_head, k_slot, v_row, v_head, v_slot, mask_row, mask_node;
    float scale;
    int half, threads;  // half: all numbers are bf16
};

static Lanes load(const float* from) { return *(const Lanes*)from; }
static Lanes load(const uint16_t* from) {
    return (Lanes)(__builtin_convertvector(*(const Halves*)from, Ints) << 16);
}

static float read(float value) { return value; }
static float read(uint16_t value) {
    const uint32_t bits = (uint32_t)value << 16;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

static void write(float value, float* to) { *to = value; }
static void write(float value, uint16_t* to) {  // the nearest, of two the even one; what is no number stays none
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    *to = value != value ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static const float LEAST = -__FLT_MAX__, LEAST_HALF = read((uint16_t)0xff7f);

static long least(long a, long b) { return a < b ? a : b; }
static long parts_of(long count, long most) { return (count + most - 1) / most; }
static long even(long count, long most) { return parts_of(count, parts_of(count, most)); }  // parts of about one size

static Lanes all(float value) { return value - Lanes{}; }

static float largest(Lanes values) {
    float found = values[0];
    for (int i = 1; i < LANES; i++) found = values[i] > found ? values[i] : found;
    return found;
}

static float sum(Lanes values) {
    float lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = values[i];
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

// e^x for x <= 0, to about a unit in the last place; 0 below the normal numbers, NaN of NaN. Polynomial: Cephes' expf.
static Lanes exponential(Lanes x) {
    const float lowest = -87.3f, rounder = 12582912.0f;  // 1.5 x 2^23: adding it leaves a whole number in the low bits
    const Lanes bounded = x < lowest ? all(lowest) : x;
    const Lanes shifted = bounded * 1.44269504f + rounder, power = shifted - rounder;
    const Lanes rest = bounded - power * 0.693359375f + power * 2.12194440e-4f;
    Lanes series = all(1.9875691500e-4f);
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * (rest * rest) + rest + 1.0f;
    const Lanes scaled = (Lanes)((Ints)series + ((Ints)shifted << 23));
    return x < lowest ? Lanes{} : x == x ? scaled : x;  // the sum of bits could be a number
}

#if defined(__clang__)
static Lanes low(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, LOW); }
static Lanes high(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, HIGH); }
#else
static Lanes low(Lanes a, Lanes b) { return __builtin_shuffle(a, b, Ints{LOW}); }
static Lanes high(Lanes a, Lanes b) { return __builtin_shuffle(a, b, Ints{HIGH}); }
#endif

template <typename Number>
static inline void fetch(const Number* from, long count) {
    for (long i = 0; i < count; i += LINE / (long)sizeof(Number)) __builtin_prefetch(from + i, 0, 2);
}

// A square transposed: its upper and its lower half zipped, log2(LANES) times.
static inline void transpose(Lanes* square) {
    Lanes zipped[LANES];
    for (int done = 1; done < LANES; done *= 2) {
        for (int i = 0; i < LANES / 2; i++) {
            zipped[2 * i] = low(square[i], square[i + LANES / 2]);
            zipped[2 * i + 1] = high(square[i], square[i + LANES / 2]);
        }
        for (int i = 0; i < LANES; i++) square[i] = zipped[i];
    }
}

// PAIR keys as [D, PAIR]; behind the last one it stands again.
template <typename Number>
static void turn(const Number* keys, long stride, long count, long D, float* to) {
    for (int half = 0; half < PAIR; half += LANES) {
        const Number* at[LANES];
        for (long i = 0; i < LANES; i++) at[i] = keys + least(half + i, count - 1) * stride;
        Lanes square[LANES];
        long column = 0;
        for (; column + LANES <= D; column += LANES) {
            for (int i = 0; i < LANES; i++) square[i] = load(at[i] + column);
            transpose(square);
            for (int i = 0; i < LANES; i++) *(Lanes*)(to + (column + i) * PAIR + half) = square[i];
        }
        for (; column < D; column++)
            for (int i = 0; i < LANES; i++) to[column * PAIR + half + i] = read(at[i][column]);
    }
}

// Scores of M queries with PAIR keys; meanwhile as many values are fetched from `soon` on.
template <typename Number, int M>
static void score(const float* q, const float* turned, float* scores, long D, const Number* soon) {
    Lanes sums[M][2] = {};
    for (long d = 0; d < D; d++, turned += PAIR) {
        const Lanes left = load(turned), right = load(turned + LANES);
        fetch(soon + d * PAIR, PAIR);
        for (int m = 0; m < M; m++) {
            const float value = q[m * D + d];
            sums[m][0] += value * left;
            sums[m][1] += value * right;
        }
    }
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) *(Lanes*)(scores + m * SPAN + half * LANES) = sums[m][half];
}

// C vectors of each value, weighed for M queries; meanwhile as many keys are fetched from `soon` on.
template <typename Number, int M, int C>
static void weigh(const float* weights, const Number* v, long stride, long count, float* to, long to_stride,
                  const Number* soon) {
    Lanes sums[M][C] = {};
    for (long t = 0; t < count; t++, v += stride) {
        Lanes values[C];
        for (int c = 0; c < C; c++) values[c] = load(v + c * LANES);
        fetch(soon + t * stride, C * LANES);
        for (int m = 0; m < M; m++)
            for (int c = 0; c < C; c++) sums[m][c] += weights[m * SPAN + t] * values[c];
    }
    for (int m = 0; m < M; m++)
        for (int c = 0; c < C; c++) *(Lanes*)(to + m * to_stride + c * LANES) = sums[m][c];
}

template <typename Number>
using Score = void (*)(const float*, const float*, float*, long, const Number*);
template <typename Number>
using Weigh = void (*)(const float*, const Number*, long, long, float*, long, const Number*);

template <typename Number, int M = SCORED>
static Score<Number> score_of(long rows) {
    if constexpr (M == 1) return score<Number, 1>;
    else return rows == M ? score<Number, M> : score_of<Number, M - 1>(rows);
}

template <typename Number, int M = SUMMED, int C = ACROSS>
static Weigh<Number> weigh_of(long rows, long vectors) {
    if constexpr (M > 1) {
        if (rows < M) return weigh_of<Number, M - 1, C>(rows, vectors);
    }
    if constexpr (C > 1) {
        if (vectors < C) return weigh_of<Number, M, C - 1>(rows, vectors);
    }
    return weigh<Number, M, C>;
}

// `columns` of the values, whole vectors of them, weighed for all rows.
template <typename Number>
static void weigh_all(const float* weights, long rows, const Number* v, long stride, long count, long columns,
                      float* to, long to_stride, const Number* next) {
    const long some = even(rows, SUMMED), width = even(columns / LANES, ACROSS) * LANES;
    for (long c = 0; c < columns; c += width) {
        const long vectors = least(width, columns - c) / LANES;
        const Number* soon = next + c;
        for (long r = 0; r < rows; r += some, soon = v + c)
            weigh_of<Number>(least(some, rows - r), vectors)(
                weights + r * SPAN, v + c, stride, count, to + r * to_stride + c, to_stride, soon);
    }
}

enum Sight { NONE, SOME, ALL };  // of a span's keys, that a query sees; ALL: each with a mask of 0

// The span's mask of one query, -inf for keys without a part in it; left out where it sees all.
template <typename Number>
static Sight sight(const Number* mask, long count, long width, float* bias) {
    const float lowest = sizeof(Number) == sizeof(float) ? LEAST : LEAST_HALF;
    Ints any = {}, less = {};
    long t = 0;
    for (; t + LANES <= count; t += LANES) {
        const Lanes value = mask ? load(mask + t) : Lanes{};
        const Ints seen = value > lowest;
        any |= seen;
        less |= value != 0.0f;
        *(Lanes*)(bias + t) = seen ? value : all(NEVER);
    }
    for (; t < width; t++) {
        const float value = t >= count ? NEVER : mask ? read(mask[t]) : 0.0f;
        const bool seen = value > lowest;
        any[0] |= seen;
        less[0] |= value != 0.0f;
        bias[t] = seen ? value : NEVER;
    }
    bool some = false, not_all = false;
    for (int i = 0; i < LANES; i++) some |= any[i] != 0, not_all |= less[i] != 0;
    return !some ? NONE : not_all ? SOME : ALL;
}

// Scores to exponentials below the largest, in place; the two numbers that a part ends with.
static void soften(float* scores, const float* bias, Sight seen, long width, float* end) {
    Lanes top = all(NEVER), total = {};
    for (long t = 0; t < width; t += LANES) {
        Lanes score = load(scores + t);
        if (seen != ALL) {
            const Lanes own = load(bias + t);
            score = own > NEVER ? score + own : all(NEVER);
            *(Lanes*)(scores + t) = score;
        }
        top = score > top ? score : top;
    }
    const float peak = largest(top), base = peak > NEVER ? peak : 0.0f;
    end[0] = seen == NONE ? NEVER : base;  // scores of NaN have no largest, and are not hidden
    for (long t = 0; t < width; t += LANES) {
        const Lanes weight = exponential(load(scores + t) - base);
        *(Lanes*)(scores + t) = weight;
        total += weight;
    }
    end[1] = sum(total);
}

// What a thread does at once: a span of keys for a block of queries.
template <typename Number>
struct Task {
    long row, head, first, nodes, span, count;  // of the queries' nodes: the first and how many; how many keys
    const Number *k, *v, *next;                 // where the span begins; the keys that this thread reads after it
    bool cold;                                  // nothing fetched its keys
};

template <typename Number>
struct Attention : Problem {
    typedef ::Task<Number> Task;
    const long spans, nodes, blocks;  // of keys; of a block of queries; these blocks
    float* parts;                     // what spans leave: [B, H, N, G, spans, D + 2]

    explicit Attention(const Problem& problem)
        : Problem(problem), spans(parts_of(T, SPAN)), nodes(even(N, MOST_ROWS / G)), blocks(parts_of(N, nodes)),
          parts((float*)__builtin_malloc(sizeof(float) * B * H * N * G * spans * (D + 2))) {}
    ~Attention() { __builtin_free(parts); }
    Attention(const Attention&) = delete;

    // What a span leaves of one query: the weighed values [D], the largest score, the sum of exponentials.
    float* part(long row, long head, long query, long span) const {
        return parts + (((row * H + head) * N * G + query) * spans + span) * (D + 2);
    }

    const Number* mask_of(long row, long node) const {
        return mask ? (const Number*)mask + row * mask_row + node * mask_node : nullptr;
    }

    void scores_of(const Task& task, long rows, float* scores) const {
        alignas(64) float scaled[MOST_ROWS * MOST_SIZE], turned[PAIR * MOST_SIZE];
        for (long r = 0; r < rows; r++) {
            const long head = task.head * G + r % G, node = task.first + r / G;
            const Number* from = (const Number*)q + task.row * q_row + head * q_head + node * q_node;
            for (long d = 0; d < D; d++) scaled[r * D + d] = read(from[d]) * scale;
        }
        const long some = even(rows, SCORED);
        for (long t = 0; t < task.count; t += PAIR) {
            turn(task.k + t * k_slot, k_slot, task.count - t, D, turned);
            if (task.cold) fetch(task.k + (t + PAIR) * k_slot, PAIR * D);
            const Number* soon = task.v + t * v_slot;
            for (long r = 0; r < rows; r += some, soon = (const Number*)turned)
                score_of<Number>(least(some, rows - r))(scaled + r * D, turned, scores + r * SPAN + t, D, soon);
        }
    }

    void values_of(const Task& task, long rows, const float* weights, float* to, long to_stride) const {
        const long whole = D / LANES * LANES, rest = D - whole, count = task.count;
        if (whole) weigh_all(weights, rows, task.v, v_slot, count, whole, to, to_stride, task.next);
        if (!rest) return;
        alignas(64) float last[SPAN * LANES] = {}, sums[MOST_ROWS * LANES];  // columns that fill no vector
        for (long t = 0; t < count; t++)
            for (long d = 0; d < rest; d++) last[t * LANES + d] = read(task.v[t * v_slot + whole + d]);
        weigh_all<float>(weights, rows, last, LANES, count, LANES, sums, LANES, last);
        for (long r = 0; r < rows; r++)
            for (long d = 0; d < rest; d++) to[r * to_stride + whole + d] = sums[r * LANES + d];
    }

    void attend(const Task& task) const {
        alignas(64) float scores[MOST_ROWS * SPAN], bias[MOST_ROWS * SPAN];
        const long rows = task.nodes * G, width = parts_of(task.count, LANES) * LANES, to_stride = spans * (D + 2);
        float* to = part(task.row, task.head, task.first * G, task.span);
        Sight seen[MOST_ROWS];
        bool any = false;
        for (long n = 0; n < task.nodes; n++) {
            const Number* own = mask_of(task.row, task.first + n);
            seen[n] = sight(own ? own + task.span * SPAN : nullptr, task.count, width, bias + n * SPAN);
            any |= seen[n] != NONE;
        }
        if (any) scores_of(task, rows, scores);
        for (long r = 0; r < rows; r++) {
            float* end = to + r * to_stride + D;
            if (any) soften(scores + r * SPAN, bias + r / G * SPAN, seen[r / G], width, end);
            else end[0] = NEVER;
        }
        if (any) values_of(task, rows, scores, to, to_stride);
    }

    // A query that sees nothing: the mean of the values at the mask's largest, as softmax has it; 0 where that is -inf.
    void blind(long row, long head, long node, float* sums) const {
        const Number* own = mask_of(row, node);
        float top = NEVER, count = 0.0f;
        for (long t = 0; t < T; t++) top = read(own[t]) > top ? read(own[t]) : top;
        for (long t = 0; t < T && top > NEVER; t++) {
            if (read(own[t]) < top) continue;
            const Number* value = (const Number*)v + row * v_row + head * v_head + t * v_slot;
            count += 1.0f;
            for (long d = 0; d < D; d++) sums[d] += read(value[d]);
        }
        for (long d = 0; d < D && count > 0.0f; d++) sums[d] /= count;
    }

    void join(long row, long head, long query) const {
        const float* left = part(row, head, query, 0);
        float sums[MOST_SIZE] = {}, top = NEVER, total = 0.0f;
        for (long s = 0; s < spans; s++) {
            const float peak = left[s * (D + 2) + D];
            top = peak > top ? peak : top;
        }
        if (!(top > NEVER)) blind(row, head, query / G, sums);
        for (long s = 0; s < spans && top > NEVER; s++) {
            const float* each = left + s * (D + 2);
            const float share = exponential(all(each[D] - top))[0];
            if (share == 0.0f) continue;
            total += share * each[D + 1];
            for (long d = 0; d < D; d++) sums[d] += share * each[d];
        }
        Number* to = (Number*)output + (((row * N + query / G) * H + head) * G + query % G) * D;
        for (long d = 0; d < D; d++) write(top > NEVER ? sums[d] / total : sums[d], to + d);
    }

    // Heads come first, then spans: what follows a task is mostly as long.
    Task task_of(long index) const {
        const long head = index % H, span = index / H % spans, block = index / (H * spans) % blocks;
        const long row = index / (H * spans * blocks), first = block * nodes, from = span * SPAN;
        const Number* keys = (const Number*)k + row * k_row + head * k_head + from * k_slot;
        const Number* values = (const Number*)v + row * v_row + head * v_head + from * v_slot;
        return {row, head, first, least(nodes, N - first), span, least(SPAN, T - from), keys, values, values, true};
    }

    // Tasks one after the other, each of which fetches keys for the next one.
    void run(long from, long to) const {
        bool cold = true;
        for (long i = from; i < to; i++) {
            Task task = task_of(i);
            const Task next = task_of(least(i + 1, to - 1));
            const bool fetches = next.count >= task.count;
            task.cold = cold;
            if (fetches) task.next = next.k;
            attend(task);
            cold = !fetches;
        }
    }

    int run() const {
        const long tasks = B * H * blocks * spans;
        const long share = threads > 1 ? parts_of(tasks, SHARES * threads) : tasks;
        if (!parts || !tasks) return 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
#pragma omp for schedule(dynamic)
            for (long i = 0; i < parts_of(tasks, share); i++) run(i * share, least(tasks, (i + 1) * share));
#pragma omp for schedule(static)
            for (long i = 0; i < B * H * N * G; i++) join(i / (H * N * G), i / (N * G) % H, i % (N * G));
        }
        return 1;
    }
};

extern "C" long most_rows() { return MOST_ROWS; }
extern "C" long most_size() { return MOST_SIZE; }

// Whether there was anything to do, and memory for it.
extern "C" int attention(const Problem* problem) {
    return problem->half ? Attention<uint16_t>(*problem).run() : Attention<float>(*problem).run();
}

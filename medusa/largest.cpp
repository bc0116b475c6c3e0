// Where the largest values of a row stand, and by what they lie below the row's whole mass: one look at each value.
//
// A row is gone through by blocks. Of a block only the largest value is taken at first, many values at a time; its values
// are looked at one by one only where that one belongs to the row's largest. Of equals the first counts, and NaN is the
// largest, as torch has it. Half-precision values are widened on the way, which leaves their order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

enum { LANES = 16, BLOCK = 8 * LANES };
enum Kind { FLOAT, DOUBLE, BFLOAT16 };

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Half __attribute__((vector_size(2 * LANES)));

static float widened(uint16_t value) {
    const uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}
static float widened(float value) { return value; }
static double widened(double value) { return value; }

static Lanes load(const float* from) {
    Lanes values;
    memcpy(&values, from, sizeof values);
    return values;
}
static Lanes load(const uint16_t* from) {
    Half half;
    memcpy(&half, from, sizeof half);
    const Bits bits = __builtin_convertvector(half, Bits) << 16;
    Lanes values;
    memcpy(&values, &bits, sizeof values);
    return values;
}

// Whether a value comes before another one.
template <typename Wide>
static bool ahead(Wide a, Wide b) { return a > b || (a != a && b == b); }

// The largest value of a block, NaN where there is one.
template <typename T>
static float most_of_block(const T* block) {
    Lanes most = Lanes{} - INFINITY;
    Whole broken = {};
    for (int at = 0; at < BLOCK; at += LANES) {
        const Lanes values = load(block + at);
        most = values > most ? values : most;
        broken |= values != values;
    }
    float found = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) found = ahead(most[lane], found) ? most[lane] : found;
    for (int lane = 0; lane < LANES; lane++) found = broken[lane] ? NAN : found;
    return found;
}
static double most_of_block(const double* block) {
    double found = -INFINITY;
    for (int at = 0; at < BLOCK; at++) found = ahead(block[at], found) ? block[at] : found;
    return found;
}

// The `ranks` largest of `columns` values, the largest first: the values to `found`, where they stand to `at`.
template <typename T, typename Wide>
static void top_of_row(const T* row, long columns, long ranks, Wide* found, long* at) {
    long held = 0;
    for (long start = 0; start < columns; start += BLOCK) {
        const bool whole = start + BLOCK <= columns;
        if (held == ranks && whole && !ahead<Wide>(most_of_block(row + start), found[ranks - 1])) continue;
        const long end = whole ? start + BLOCK : columns;
        for (long column = start; column < end; column++) {
            const Wide value = widened(row[column]);
            if (held == ranks && !ahead(value, found[ranks - 1])) continue;
            long place = held < ranks ? held++ : ranks - 1;
            for (; place && ahead(value, found[place - 1]); place--) {
                found[place] = found[place - 1];
                at[place] = at[place - 1];
            }
            found[place] = value;
            at[place] = column;
        }
    }
}

// e to the power of x at most 0, to some units in the last place: 2^n times a polynomial (Cephes, expf).
static Lanes exponential(Lanes x) {
    const Lanes least = Lanes{} - 87.0f, magic = Lanes{} + 12582912.0f;
    x = x > least ? x : least;
    const Lanes n = (x * 1.44269504f + magic) - magic;
    const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Lanes p = Lanes{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Whole power = (__builtin_convertvector(n, Whole) + 127) << 23;
    Lanes scale;
    memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

// The logarithm of the sum of exp((value - most) / temperature).
template <typename T>
static double log_mass(const T* row, long columns, float most, double temperature) {
    Lanes sums = {};
    const float scale = (float)(1 / temperature);
    long column = 0;
    for (; column + LANES <= columns; column += LANES) sums += exponential((load(row + column) - most) * scale);
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    for (; column < columns; column++) sum += exp(((double)widened(row[column]) - most) / temperature);
    return log(sum);
}
static double log_mass(const double* row, long columns, double most, double temperature) {
    double sum = 0;
    for (long column = 0; column < columns; column++) sum += exp((row[column] - most) / temperature);
    return log(sum);
}

template <typename T, typename Wide>
static void top_of(const T* values, long rows, long columns, long stride, long ranks, long* at, double* logs,
                   const double* temperatures, long kinds) {
    Wide* found = new Wide[ranks];
    for (long row = 0; row < rows; row++, values += stride, at += ranks) {
        top_of_row(values, columns, ranks, found, at);
        if (!logs) continue;
        const double temperature = temperatures[row % kinds];
        const double mass = log_mass(values, columns, found[0], temperature);
        for (long rank = 0; rank < ranks; rank++) *logs++ = ((double)found[rank] - found[0]) / temperature - mass;
    }
    delete[] found;
}

// Of each of `rows` rows of values, `stride` apart, where the `ranks` largest stand: to `at` [rows, ranks]. To `logs`,
// unless that is null, the logarithms of their probabilities, by `kinds` temperatures for the rows in turns.
extern "C" void largest(const void* values, int kind, long rows, long columns, long stride, long ranks, long* at,
                        double* logs, const double* temperatures, long kinds) {
    if (kind == FLOAT)
        top_of<float, float>((const float*)values, rows, columns, stride, ranks, at, logs, temperatures, kinds);
    if (kind == DOUBLE)
        top_of<double, double>((const double*)values, rows, columns, stride, ranks, at, logs, temperatures, kinds);
    if (kind == BFLOAT16)
        top_of<uint16_t, float>((const uint16_t*)values, rows, columns, stride, ranks, at, logs, temperatures, kinds);
}

template <typename T, typename Wide>
static long walk_of(const T* values, long nodes, long columns, const long* parents, const long* tokens,
                    const unsigned char* valid, long* path, long* choices) {
    long length = 1, at = 0;
    Wide most;
    path[0] = 0;
    top_of_row(values, columns, 1, &most, choices);
    for (long node = 1; node < nodes; node++) {
        if (parents[node] != at || tokens[node] != choices[length - 1] || !valid[node]) continue;
        path[length] = at = node;
        top_of_row(values + node * columns, columns, 1, &most, choices + length++);
    }
    return length;
}

// From a tree's root downwards to the child that holds the largest value of its parent's row: the nodes to `path`, what
// is the largest after each to `choices`; returns how many. No other node's row is looked at.
extern "C" long walk(const void* values, int kind, long nodes, long columns, const long* parents, const long* tokens,
                     const unsigned char* valid, long* path, long* choices) {
    if (kind == FLOAT)
        return walk_of<float, float>((const float*)values, nodes, columns, parents, tokens, valid, path, choices);
    if (kind == DOUBLE)
        return walk_of<double, double>((const double*)values, nodes, columns, parents, tokens, valid, path, choices);
    return walk_of<uint16_t, float>((const uint16_t*)values, nodes, columns, parents, tokens, valid, path, choices);
}

// A level of a tree that is filled from its parents' logits: what of it is the same in every step.
struct Level {
    long kind, rows, ranks;  // of the logits: a row for each parent, whose `ranks` largest are looked for
    const long* cells;       // which of all these its children hold [children]
    const long* inner;       // which children are parents of the next level [ways]
    const long* above;       // and which parent is theirs [ways]
    long children, ways;
    const char* table;  // what a token adds to what its parent's logits were made of: bytes, by column
    long piece, width;  // bytes of that, and of what a parent's logits were made of
    char* next;         // what those of the next level are made of [ways, width + piece]
};

// Fills a level: its children's columns to `found`, and what the next level's logits are made of.
extern "C" void fill(const Level* level, const void* values, long columns, long stride, const char* read, long* found) {
    long* best = new long[level->rows * level->ranks];
    largest(values, (int)level->kind, level->rows, columns, stride, level->ranks, best, nullptr, nullptr, 1);
    for (long child = 0; child < level->children; child++) found[child] = best[level->cells[child]];
    char* to = level->next;
    for (long way = 0; way < level->ways; way++, to += level->width + level->piece) {
        memcpy(to, read + level->above[way] * level->width, level->width);
        memcpy(to + level->width, level->table + found[level->inner[way]] * level->piece, level->piece);
    }
    delete[] best;
}

// A tree under way: see medusa.drafters.best_first, whose grown_by_host it does for one row.
struct Node { double score; long parent, rank, column, depth; };  // parent: a place among those found, -1 for the root
struct Parent { double score; long found; };                     // whose children are looked at next

struct Growth {
    long most, width, ranks;
    std::vector<double> best;  // a heap, the least on top: the scores of the likeliest candidates so far
    std::vector<Node> found;
    std::vector<Parent> parents;
    std::vector<long> at;
    std::vector<double> logs;
};

static const double STEP = 1e-9, LEAST = -100.0;  // as best_first has them

extern "C" Growth* new_growth(long most, long width, long ranks) {
    Growth* growth = new Growth{most, width, ranks, {}, {}, {}, {}, {}};
    return growth;
}
extern "C" void drop_growth(Growth* growth) { delete growth; }

extern "C" void begin(Growth* growth) {
    growth->best.clear();
    growth->found.clear();
    growth->parents.assign(1, Parent{0.0, -1});
}

// Whether a candidate of this score is among the likeliest so far.
static bool counts(Growth& growth, double score) {
    std::vector<double>& best = growth.best;
    const std::greater<double> least;
    if ((long)best.size() == growth.most) {
        if (score <= best.front()) return false;
        std::pop_heap(best.begin(), best.end(), least);
        best.pop_back();
    }
    best.push_back(score);
    std::push_heap(best.begin(), best.end(), least);
    return true;
}

// Look at the candidates behind the parents by their logits, and choose the next level's parents; return their number.
// What their logits are made of goes to `next`: what those of their own parent were made of, of `width` bytes at `read`,
// and the token's own, of `piece` bytes in `table`.
extern "C" long grow(Growth* growth, const void* values, int kind, long columns, long stride, double temperature,
                     const char* read, long width, const char* table, long piece, char* next) {
    const long rows = growth->parents.size(), ranks = growth->ranks;
    growth->at.resize(rows * ranks);
    growth->logs.resize(rows * ranks);
    largest(values, kind, rows, columns, stride, ranks, growth->at.data(), growth->logs.data(), &temperature, 1);
    struct Candidate { double score; long row, rank; };
    std::vector<Candidate> level;
    for (long row = 0; row < rows; row++) {
        for (long rank = 0; rank < ranks; rank++) {
            double log = growth->logs[row * ranks + rank];
            log = log > LEAST ? (log < 0 ? log : 0) : LEAST;  // NaN too
            const double score = growth->parents[row].score + log - (rank + 1) * STEP;
            if (!counts(*growth, score)) break;  // so many others are likelier, also than what follows here
            level.push_back({score, row, rank});
        }
    }
    std::stable_sort(level.begin(), level.end(), [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
    std::vector<Parent> parents;
    for (const Candidate& each : level) {
        const long column = growth->at[each.row * ranks + each.rank], above = growth->parents[each.row].found;
        const bool open = (long)growth->best.size() < growth->most || each.score > growth->best.front();
        if ((long)parents.size() < growth->width && open) {
            parents.push_back({each.score, (long)growth->found.size()});
            memcpy(next, read + each.row * width, width);
            memcpy(next + width, table + column * piece, piece);
            next += width + piece;
        }
        growth->found.push_back({each.score, above, each.rank, column, above < 0 ? 1 : growth->found[above].depth + 1});
    }
    growth->parents = parents;
    return parents.size();
}

// The likeliest nodes: the number of all, the root included.
extern "C" long grown(const Growth* growth) {
    const long found = growth->found.size();
    return (found < growth->most ? found : growth->most) + 1;
}

// Their parents, depths and columns, of the root 0, to `numbers` [3, nodes]; the nodes from the root to each, -1 beyond,
// to `paths` [nodes, levels].
extern "C" void read_off(const Growth* growth, long levels, long* numbers, long* paths) {
    const long nodes = grown(growth), none = -1;
    std::vector<long> order(growth->found.size()), number(growth->found.size());
    for (size_t place = 0; place < order.size(); place++) order[place] = place;
    std::stable_sort(order.begin(), order.end(), [&](long a, long b) {
        return growth->found[a].score > growth->found[b].score;
    });
    numbers[0] = numbers[nodes] = numbers[2 * nodes] = 0;
    std::fill_n(paths, nodes * levels, none);
    paths[0] = 0;
    for (long node = 1; node < nodes; node++) {
        const Node& each = growth->found[order[node - 1]];
        number[order[node - 1]] = node;
        const long parent = each.parent < 0 ? 0 : number[each.parent];
        numbers[node] = parent;
        numbers[nodes + node] = each.depth;
        numbers[2 * nodes + node] = each.column;
        std::copy_n(paths + parent * levels, each.depth, paths + node * levels);
        paths[node * levels + each.depth] = node;
    }
}

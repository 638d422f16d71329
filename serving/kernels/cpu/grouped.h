// INT8 products of rows that lie anywhere with the weights of their experts as a checkpoint has them, [outputs, inputs]:
// rows are not gathered, and weights, which others may put in a slot's place between two steps, not packed.
//
// A row and an output's weights are multiplied side by side, each lane adding up its part of the inputs, and lanes are
// added up at the end: sums of integers are exact in any order. So bits depend neither on the form nor on tiles.
#pragma once

#include "rows.h"
#include "workspace.h"

namespace {

constexpr long SIDE = 4 * LANES;              // inputs that are multiplied at once
constexpr long COLUMNS = 4;                   // outputs of a tile
constexpr long BLOCK_ROWS = 64;               // rows of one expert that stay in a core's cache beside an item's weights
constexpr long GROUPED_ITEM_BYTES = 256 << 10;  // of those
#if defined(__AVX512F__)
constexpr int SIDE_ROWS = 6;  // 6 x 4 accumulators of 32 registers
#else
constexpr int SIDE_ROWS = 2;  // 2 x 4 of 16
#endif

INLINE vi load_bytes(const int8_t* p) { return load(reinterpret_cast<const int32_t*>(p)); }

// The last n of a row's bytes, and zeros.
INLINE vi load_bytes(const int8_t* p, long n) {
    alignas(64) int8_t part[SIDE] = {};
    __builtin_memcpy(part, p, n);
    return load_bytes(part);
}

// acc += a . w, four products to a lane. With VNNI weights are taken for unsigned: 128 more than they are each, so that
// a sum is `surplus` of its row too large.
INLINE vi multiply_bytes(vi acc, vi a, vi w) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)(w ^ splat(int32_t(0x80808080u))), (__m512i)a);
#elif defined(__AVX2__)
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), _mm256_sign_epi8((__m256i)a, (__m256i)w));
    return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    for (int byte = 0; byte < 32; byte += 8) acc += ((a << (24 - byte)) >> 24) * ((w << (24 - byte)) >> 24);
    return acc;
#endif
}

// Modulo 2^32, as the products are added.
INLINE uint32_t sum_lanes(vi v) {
#if defined(__AVX512F__)
    return uint32_t(_mm512_reduce_add_epi32((__m512i)v));
#else
    uint32_t sum = 0;
    for (int i = 0; i < LANES; ++i) sum += uint32_t(v[i]);
    return sum;
#endif
}

// Of so many vectors at once.
template <int COLS>
INLINE void sum_lanes(const vi* v, uint32_t* out) {
#if defined(__AVX512F__)
    if (COLS == 4) {
        const auto half = [](vi a, vi b) {  // in each 128 bits a0 + a2, b0 + b2, a1 + a3, b1 + b3
            return _mm512_add_epi32(_mm512_unpacklo_epi32((__m512i)a, (__m512i)b),
                                    _mm512_unpackhi_epi32((__m512i)a, (__m512i)b));
        };
        const __m512i left = half(v[0], v[1]), right = half(v[2], v[3]);
        const __m512i four = _mm512_add_epi32(_mm512_unpacklo_epi64(left, right), _mm512_unpackhi_epi64(left, right));
        const __m256i two = _mm256_add_epi32(_mm512_castsi512_si256(four), _mm512_extracti64x4_epi64(four, 1));
        const __m128i one = _mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), one);
        return;
    }
#endif
    for (int c = 0; c < COLS; ++c) out[c] = sum_lanes(v[c]);
}

// What is done to the outputs of a tile's row at once, whatever the form.
struct Quad {
    using Floats = float __attribute__((vector_size(4 * COLUMNS)));
    using Words = uint32_t __attribute__((vector_size(4 * COLUMNS)));
    using Integers = int32_t __attribute__((vector_size(4 * COLUMNS)));
    using Halves = uint16_t __attribute__((vector_size(2 * COLUMNS)));
};

template <class Vector>
INLINE Vector taken(const void* from) {
    Vector found;
    __builtin_memcpy(&found, from, sizeof found);
    return found;
}

INLINE uint32_t surplus_of(const int8_t* row, long n) {
#if defined(__AVX512VNNI__)
    uint32_t sum = 0;
    for (long i = 0; i < n; ++i) sum += uint32_t(int32_t(row[i]));
    return sum * 128u;
#else
    return (void)row, (void)n, 0u;
#endif
}

// out[r][c] = rows r . weights c. While it computes, as many weights from `ahead` on are fetched; null: none.
template <int ROWS, int COLS>
void side_by_side(const int8_t* const* rows, const int8_t* weights, long inputs, const int8_t* ahead, uint32_t* out) {
    vi acc[ROWS][COLS] = {};
    long k = 0;
    for (; k + SIDE <= inputs; k += SIDE) {
        if (ahead)
            for (int c = 0; c < COLS; ++c) __builtin_prefetch(ahead + c * inputs + k, 0, 2);
        vi w[COLS];
#pragma GCC unroll 4
        for (int c = 0; c < COLS; ++c) w[c] = load_bytes(weights + c * inputs + k);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
            const vi a = load_bytes(rows[r] + k);
#pragma GCC unroll 4
            for (int c = 0; c < COLS; ++c) acc[r][c] = multiply_bytes(acc[r][c], a, w[c]);
        }
    }
    if (k < inputs)
        for (int r = 0; r < ROWS; ++r) {
            const vi a = load_bytes(rows[r] + k, inputs - k);
            for (int c = 0; c < COLS; ++c)
                acc[r][c] = multiply_bytes(acc[r][c], a, load_bytes(weights + c * inputs + k, inputs - k));
        }
    for (int r = 0; r < ROWS; ++r) sum_lanes<COLS>(acc[r], out + r * COLS);
}

typedef void (*SideTile)(const int8_t* const*, const int8_t*, long, const int8_t*, uint32_t*);

template <int COLS, int... ROWS_LESS_1>
INLINE SideTile pick_side(long rows, std::integer_sequence<int, ROWS_LESS_1...>) {
    static constexpr SideTile tiles[] = {side_by_side<ROWS_LESS_1 + 1, COLS>...};
    return tiles[rows - 1];
}

INLINE SideTile side_tile(long rows, long columns) {
    constexpr auto all = std::make_integer_sequence<int, SIDE_ROWS>();
    return columns == COLUMNS ? pick_side<COLUMNS>(rows, all) : pick_side<1>(rows, all);
}

// What a row's numbers become before they are multiplied, and how the products are cut.
struct GroupedWork {
    const Grouped& g;
    int threads;
    int8_t* values;          // [N, inputs], where rows are quantized here
    const int8_t** rows;     // [N]
    float* scale;            // [N]
    float* wide;             // [threads, inputs]
    uint32_t* surplus;       // [N]
    int32_t *start, *active;  // [slots + 1] the first row of each; [slots] those that have rows
    int* counter;

    GroupedWork(const Grouped& grouped, int threads, Arena& arena) : g(grouped), threads(threads) {
        const long n = g.rows_count, own = g.x_kind == KIND_INT8 ? 0 : n;
        values = arena.take<int8_t>(own * g.inputs);
        rows = arena.take<const int8_t*>(n);
        scale = arena.take<float>(n);
        wide = arena.take<float>(g.x_kind == KIND_BF16 ? threads * long(g.inputs) : 0);
        surplus = arena.take<uint32_t>(n);
        start = arena.take<int32_t>(g.slots + 1);
        active = arena.take<int32_t>(g.slots);
        counter = arena.take<int>(1);
    }

    // How many slots have rows.
    long find_slots() const {
        long count = 0;
        start[0] = 0;
        for (long slot = 0; slot < g.slots; ++slot) {
            if (g.counts[slot]) active[count++] = int32_t(slot);
            start[slot + 1] = start[slot] + g.counts[slot];
        }
        *counter = 0;
        return count;
    }

    // This thread's share of the rows.
    void enter(int thread) const {
        const Span mine = share(g.rows_count, thread, threads);
        for (long i = mine.first; i < mine.last; ++i) {
            if (g.x_kind == KIND_INT8) {
                rows[i] = reinterpret_cast<const int8_t*>(g.places[i]);
                scale[i] = g.row_scale[i];
            } else {
                rows[i] = values + i * g.inputs;
                scale[i] = quantize(floats(i, wide + thread * g.inputs), g.inputs, values + i * g.inputs, 0);
            }
            surplus[i] = surplus_of(rows[i], g.inputs);
        }
    }

    const float* floats(long row, float* room) const {
        if (g.x_kind == KIND_F32) return static_cast<const float*>(g.x) + row * g.inputs;
        const uint16_t* x = static_cast<const uint16_t*>(g.x) + row * g.inputs;
        for (long i = 0; i < g.inputs; ++i) room[i] = from_bf16(x[i]);
        return room;
    }

    // Items, some outputs of one expert for all of its rows, until none is left.
    void multiply_all(long count) const {
        const long fair = count * g.outputs / (threads * 4L);
        const long each = round_up(most(1, least(GROUPED_ITEM_BYTES / g.inputs, fair)), COLUMNS);
        const long pieces = (g.outputs + each - 1) / each;
        for (long taken = next(counter); taken < count * pieces; taken = next(counter)) {
            const long slot = active[taken / pieces], first = taken % pieces * each;
            for (long row = start[slot]; row < start[slot + 1]; row += BLOCK_ROWS)
                block(slot, row, least(row + BLOCK_ROWS, start[slot + 1]), first, least(first + each, g.outputs));
        }
    }

    void block(long slot, long row0, long row1, long column0, long column1) const {
        const long count = row1 - row0, tiles = (count + SIDE_ROWS - 1) / SIDE_ROWS;
        uint32_t sums[SIDE_ROWS * COLUMNS];
        for (long column = column0, columns; column < column1; column += columns) {
            columns = column + COLUMNS <= column1 ? COLUMNS : 1;
            const int8_t* weights = static_cast<const int8_t*>(g.weight[slot]) + column * g.inputs;
            for (long t = 0; t < tiles; ++t) {
                const long first = row0 + count * t / tiles, height = row0 + count * (t + 1) / tiles - first;
                side_tile(height, columns)(rows + first, weights, g.inputs, t ? nullptr : weights + columns * g.inputs,
                                           sums);
                for (long r = 0; r < height; ++r) {
                    const uint32_t* own = sums + r * columns;
                    columns == COLUMNS ? deliver(slot, first + r, column, own) : last(slot, first + r, column, *own);
                }
            }
        }
    }

    // serving.kernels.int8.scaled, and then the type of what comes out.
    void deliver(long slot, long row, long column, const uint32_t* sums) const {
        const auto exact = reinterpret_cast<Quad::Integers>(taken<Quad::Words>(sums) - surplus[row]);
        const auto scales = taken<Quad::Floats>(static_cast<const float*>(g.scale[slot]) + column);
        Quad::Floats value = __builtin_convertvector(exact, Quad::Floats) * (scales * scale[row]);
        if (g.bias_kind)
            for (long c = 0; c < COLUMNS; ++c) value[c] += bias(slot, column + c);
        const long at = row * g.outputs + column;
        if (g.out_kind == KIND_F32) {
            __builtin_memcpy(static_cast<float*>(g.out) + at, &value, sizeof value);
            return;
        }
        const auto bits = reinterpret_cast<Quad::Words>(value);
        const auto rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        const auto number = reinterpret_cast<Quad::Words>(value == value);
        const auto halves = __builtin_convertvector((rounded & number) | (~number & 0x7fc0u), Quad::Halves);
        __builtin_memcpy(static_cast<uint16_t*>(g.out) + at, &halves, sizeof halves);
    }

    // One of the outputs after the last whole tile.
    void last(long slot, long row, long column, uint32_t sum) const {
        const float own = static_cast<const float*>(g.scale[slot])[column] * scale[row];
        float value = float(int32_t(sum - surplus[row])) * own;
        if (g.bias_kind) value += bias(slot, column);
        const long at = row * g.outputs + column;
        if (g.out_kind == KIND_F32)
            static_cast<float*>(g.out)[at] = value;
        else
            static_cast<uint16_t*>(g.out)[at] = value == value ? to_bf16(value) : 0x7fc0;
    }

    float bias(long slot, long column) const {
        return g.bias_kind == KIND_F32 ? static_cast<const float*>(g.bias[slot])[column]
                                       : from_bf16(static_cast<const uint16_t*>(g.bias[slot])[column]);
    }
};

}  // namespace

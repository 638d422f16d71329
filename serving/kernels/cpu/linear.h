// Linear layers over packed weights: one register tile for INT8, bfloat16 and float32, streamed or cache-blocked.
//
// Every output is one accumulator that walks the inputs in order, whatever the tile around it: a row's result depends
// neither on its neighbours nor on how rows and panels are shared out among threads. Shapes: A rows of `ld` 32-bit
// words, B panels of 32 columns.
#pragma once

#include <utility>

#include "abi.h"
#include "soon.h"

namespace {

constexpr int PANEL = 32;             // output channels a panel
constexpr int NV = PANEL / LANES;     // vectors a panel row
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12;         // 12 x 2 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 3;          // 3 x 4 of 16
#else
constexpr int TILE_ROWS = 2;
#endif

// Encoded activation rows, ready to multiply: `words` 32-bit words a row.
struct Rows {
    int32_t* data;
    float* scale;  // [rows], int8 only
    long words;

    int32_t* row(long i) const { return data + i * words; }
};

INLINE int per_word(int kind) { return kind == KIND_INT8 ? 4 : kind == KIND_BF16 ? 2 : 1; }
INLINE long words_of(int kind, long n) { return (n + per_word(kind) - 1) / per_word(kind); }

// ---- the three dot products: acc[j] += a_word . b_word[j] ----------------------------------------------------------

struct DotF32 {
    struct Left { vf value; };
    static INLINE Left left(int32_t word) { return {bits(splat(word))}; }
    static INLINE vi step(vi acc, Left a, vi b) { return bits(fma(a.value, bits(b), bits(acc))); }
};

struct DotBf16 {
#if defined(__AVX512BF16__)
    struct Left { vi value; };
    static INLINE Left left(int32_t word) { return {splat(word)}; }
    static INLINE vi step(vi acc, Left a, vi b) {
        return (vi)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a.value, (__m512bh)b);
    }
#else
    struct Left { vf low, high; };
    static INLINE Left left(int32_t word) {
        return {bits(splat(int32_t(uint32_t(word) << 16))), bits(splat(int32_t(word & 0xffff0000)))};
    }
    static INLINE vi step(vi acc, Left a, vi b) {
        const vf sum = fma(a.low, bits(b << 16), bits(acc));
        return bits(fma(a.high, bits(b & int32_t(0xffff0000)), sum));
    }
#endif
};

struct DotInt8 {
#if defined(__AVX512VNNI__)
    struct Left { vi value; };  // activations shifted by +128 to unsigned bytes
    static INLINE Left left(int32_t word) { return {splat(word)}; }
    static INLINE vi step(vi acc, Left a, vi b) {
        return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a.value, (__m512i)b);
    }
#elif defined(__AVX2__)
    struct Left { __m256i value; };
    static INLINE Left left(int32_t word) { return {_mm256_set1_epi32(word)}; }
    static INLINE vi step(vi acc, Left a, vi b) {  // |b| <= 128 and |a| <= 127 keep each pair of products in int16
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)b), _mm256_sign_epi8(a.value, (__m256i)b));
        return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
#else
    struct Left { int32_t byte[4]; };
    static INLINE Left left(int32_t word) {
        return {{int8_t(word), int8_t(word >> 8), int8_t(word >> 16), int8_t(word >> 24)}};
    }
    static INLINE vi step(vi acc, Left a, vi b) {
        acc += ((b << 24) >> 24) * a.byte[0] + ((b << 16) >> 24) * a.byte[1];
        return acc + ((b << 8) >> 24) * a.byte[2] + (b >> 24) * a.byte[3];
    }
#endif
};

#if defined(__AVX512VNNI__)
constexpr int32_t UNSIGNED_SHIFT = 128;  // what int8 activations are stored with added
#else
constexpr int32_t UNSIGNED_SHIFT = 0;
#endif

constexpr long AHEAD = 2048;              // words of weights fetched ahead of use; panels follow one another
constexpr int PAIR_ROWS = TILE_ROWS / 2;  // up to here two panels at a time keep the multipliers busy

// out[r][0:32] = A[r] . panel for ROWS rows; raw accumulators (int32, or float32 bits). With PANELS = 2 the next panel,
// `apart` words further on, goes to out[r][32:64]. Meanwhile LINES cache lines for each word of inputs are fetched from
// `ahead` on, into the second cache: what is on its way there leaves the first one's few places to what is used now.
template <class Dot, int ROWS, int PANELS, int LINES>
void tile(const int32_t* a, long lda, const int32_t* b, long apart, long words, const int32_t* ahead, int32_t* out,
          long ldo) {
    vi acc[ROWS][PANELS * NV] = {};
    for (long k = 0; k < words; ++k, b += PANEL, ++a, ahead += LINES * 16) {
        for (int line = 0; line < LINES; ++line) __builtin_prefetch(ahead + line * 16, 0, 2);
        vi right[PANELS * NV];
#pragma GCC unroll 16
        for (int j = 0; j < PANELS * NV; ++j) right[j] = load(b + (j / NV) * apart + (j % NV) * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const typename Dot::Left left = Dot::left(a[r * lda]);
#pragma GCC unroll 16
            for (int j = 0; j < PANELS * NV; ++j) acc[r][j] = Dot::step(acc[r][j], left, right[j]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < PANELS * NV; ++j) *reinterpret_cast<vi_at*>(out + r * ldo + j * LANES) = acc[r][j];
}

typedef void (*Tile)(const int32_t*, long, const int32_t*, long, long, const int32_t*, int32_t*, long);

// The tile of so many rows; of more than PAIR_ROWS there is only that of one panel.
template <class Dot, int PANELS, int LINES, int... ROWS_LESS_1>
INLINE Tile pick(long rows, std::integer_sequence<int, ROWS_LESS_1...>) {
    static constexpr Tile tiles[] = {tile<Dot, ROWS_LESS_1 + 1, (ROWS_LESS_1 < PAIR_ROWS ? PANELS : 1), LINES>...};
    return tiles[rows - 1];
}

template <class Dot, int PANELS, int LINES>
INLINE Tile pick(long rows) {
    return pick<Dot, PANELS, LINES>(rows, std::make_integer_sequence<int, TILE_ROWS>());
}

template <int LINES>
Tile tile_for(int kind, long rows) {
    if (kind == KIND_INT8) return pick<DotInt8, 1, LINES>(rows);
    return kind == KIND_BF16 ? pick<DotBf16, 1, LINES>(rows) : pick<DotF32, 1, LINES>(rows);
}

// out [rows][32 * panels] = A . panels, `apart` words from one to the next; rows at most TILE_ROWS. For float kinds.
INLINE void multiply(int kind, long rows, const int32_t* a, long lda, const int32_t* b, long apart, long words,
                     long panels, float* out, long ldo) {
    int32_t* raw = reinterpret_cast<int32_t*>(out);
    long panel = 0;
    if (rows <= PAIR_ROWS) {
        const Tile pair = kind == KIND_BF16 ? pick<DotBf16, 2, 0>(rows) : pick<DotF32, 2, 0>(rows);
        for (; panel + 2 <= panels; panel += 2)
            pair(a, lda, b + panel * apart, apart, words, nullptr, raw + panel * PANEL, ldo);
    }
    const Tile one = tile_for<0>(kind, rows);
    for (; panel < panels; ++panel) one(a, lda, b + panel * apart, 0, words, nullptr, raw + panel * PANEL, ldo);
}

// ---- from accumulators to outputs ----------------------------------------------------------------------------------

enum Finish {
    FINISH_STORE,   // out[row][n] = value
    FINISH_ADD,     // out[row][n] += value: the residual
    FINISH_SWIGLU,  // panels interleave 16 gate and 16 up channels: out[row][n / 2] = silu(gate) * up
    FINISH_NARROW,  // like FINISH_SWIGLU, in bfloat16: `out` has numbers of two bytes
    FINISH_LOGITS,  // like FINISH_STORE where out or the row's place in `kept` is not null; each row's best in `best`
};

struct Best {
    float value;
    int64_t token;
};

struct Target {
    Finish finish;
    float* out;
    long ld;
    Best* best = nullptr;           // [rows], FINISH_LOGITS only
    float* const* kept = nullptr;   // [rows], FINISH_LOGITS only: where a row goes that `out` does not have
};

// What takes accumulators of a panel's columns to float32.
struct Columns {
    vi shifted[NV];  // what UNSIGNED_SHIFT has added
    vf scale[NV], bias[NV];

    INLINE Columns(const Linear& w, long panel) {
        for (int v = 0; v < NV; ++v) {
            const long first = panel * PANEL + v * LANES;
            const bool exact = w.kind == KIND_INT8;
            shifted[v] = exact && UNSIGNED_SHIFT ? load(w.sums + first) : vi{};
            scale[v] = exact ? load(w.scale + first) : vf{};
            bias[v] = w.bias ? load(w.bias + first) : vf{};
        }
    }
};

// One tile row of a panel as float32. Padding columns hold zero weights and are never written out.
INLINE void to_values(const Columns& c, bool exact, bool biased, float row_scale, const int32_t* raw, vf* value) {
    for (int v = 0; v < NV; ++v) {
        const vi sum = load(raw + v * LANES);
        value[v] = exact ? to_float(sum - c.shifted[v]) * (c.scale[v] * row_scale) : bits(sum);
        if (biased) value[v] = value[v] + c.bias[v];
    }
}

// A greater value wins, and of equal ones the lowest token id, in whatever order panels come.
INLINE bool better(const Best& a, const Best& b) {
    return a.value > b.value || (a.value == b.value && a.token < b.token);
}

INLINE void keep_best(const float* value, long first, long columns, Best& best) {
    for (long j = 0; j < columns; ++j)
        if (better({value[j], first + j}, best)) best = {value[j], first + j};
}

// One tile row of a panel of which not all columns are wanted, or not of it alone.
INLINE void deliver_part(const Linear& w, long panel, const vf* values, const Target& target, long row) {
    const long columns = least(PANEL, w.outputs - panel * PANEL);
    float* out = target.out ? target.out + row * target.ld : nullptr;
    float value[PANEL];
    for (int v = 0; v < NV; ++v) store(value + v * LANES, values[v]);
    if (target.finish == FINISH_LOGITS) {
        vf top = values[0];
        for (int v = 1; v < NV; ++v) top = maximum(top, values[v]);
        if (max_lanes(top) >= target.best[row].value) keep_best(value, panel * PANEL, columns, target.best[row]);
        if (!out && target.kept) out = target.kept[row];
        if (!out) return;
    }
    out += panel * PANEL;
    for (long j = 0; j < columns; ++j) out[j] = target.finish == FINISH_ADD ? out[j] + value[j] : value[j];
}

INLINE bool gates(Finish finish) { return finish == FINISH_SWIGLU || finish == FINISH_NARROW; }

// One tile row of a whole panel.
template <Finish FINISH>
INLINE void deliver(const vf* value, const Target& target, long panel, long row) {
    const long at = row * target.ld + panel * (gates(FINISH) ? PANEL / 2 : PANEL);
    float* out = target.out + at;
    uint16_t* narrow = reinterpret_cast<uint16_t*>(target.out) + at;
    if (FINISH == FINISH_NARROW)
        for (int v = 0; v < NV / 2; ++v) store_bf16(narrow + v * LANES, silu(value[v]) * value[NV / 2 + v]);
    else if (FINISH == FINISH_SWIGLU)
        for (int v = 0; v < NV / 2; ++v) store(out + v * LANES, silu(value[v]) * value[NV / 2 + v]);
    else
        for (int v = 0; v < NV; ++v)
            store(out + v * LANES, FINISH == FINISH_ADD ? load(out + v * LANES) + value[v] : value[v]);
}

// Rows from `first` on of a panel's outputs from a tile's accumulators [rows][PANEL].
template <Finish FINISH, bool EXACT>
INLINE void finish_rows(const Linear& w, long panel, const float* scale, const int32_t* raw, long rows,
                        const Target& target, long first) {
    const Columns columns(w, panel);
    const bool biased = w.bias;
    for (long r = 0; r < rows; ++r) {
        vf value[NV];
        to_values(columns, EXACT, biased, EXACT ? scale[r] : 1.0f, raw + r * PANEL, value);
        if (FINISH == FINISH_LOGITS)
            deliver_part(w, panel, value, target, first + r);
        else
            deliver<FINISH>(value, target, panel, first + r);
    }
}

template <bool EXACT>
INLINE void finish_tile(const Linear& w, long panel, const float* scale, const int32_t* raw, long rows,
                        const Target& target, long first) {
    const bool part = !gates(target.finish) && (panel + 1) * PANEL > w.outputs;
    if (part || target.finish == FINISH_LOGITS)
        finish_rows<FINISH_LOGITS, EXACT>(w, panel, scale, raw, rows, target, first);
    else if (target.finish == FINISH_SWIGLU)
        finish_rows<FINISH_SWIGLU, EXACT>(w, panel, scale, raw, rows, target, first);
    else if (target.finish == FINISH_NARROW)
        finish_rows<FINISH_NARROW, EXACT>(w, panel, scale, raw, rows, target, first);
    else if (target.finish == FINISH_ADD)
        finish_rows<FINISH_ADD, EXACT>(w, panel, scale, raw, rows, target, first);
    else
        finish_rows<FINISH_STORE, EXACT>(w, panel, scale, raw, rows, target, first);
}

// A tile of rows that fetches so many lines for each word of inputs.
INLINE Tile tile_for(int kind, long rows, long lines) {
    return lines == 0 ? tile_for<0>(kind, rows) : lines == 1 ? tile_for<1>(kind, rows) : tile_for<2>(kind, rows);
}

// Rows [row0, row1) of A against panels [panel0, panel1). The rows are cut into tiles of nearly equal height. One tile
// reads its panel from memory; of several, the first two fetch a half each of the next panel, and the others what will
// be read soon. Panels up to `until` are likely to be next.
void linear_block(const Linear& w, const Rows& a, long row0, long row1, long panel0, long panel1, const Target& target,
                  Soon* soon = nullptr, long until = 0) {
    const long words = words_of(w.kind, w.inputs), count = row1 - row0;
    if (count <= 0) return;
    const long tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
    alignas(64) int32_t raw[TILE_ROWS * PANEL];
    for (long panel = panel0; panel < panel1; ++panel) {
        const int32_t* b = static_cast<const int32_t*>(w.packed) + panel * words * PANEL;
        for (long t = 0; t < tiles; ++t) {
            const long first = row0 + count * t / tiles, rows = row0 + count * (t + 1) / tiles - first;
            Soon::Part ahead = {b + AHEAD, 2};
            if (tiles > 1 && t < 2)
                ahead = {b + words * (PANEL + 16 * t), panel + 1 < most(panel1, until)};
            else if (tiles > 1)
                ahead = soon ? soon->take(words) : Soon::Part{nullptr, 0};
            tile_for(w.kind, rows, ahead.lines)(a.data + first * a.words, a.words, b, 0, words, ahead.from, raw, PANEL);
            if (w.kind == KIND_INT8)
                finish_tile<true>(w, panel, a.scale + first, raw, rows, target, first);
            else
                finish_tile<false>(w, panel, nullptr, raw, rows, target, first);
        }
    }
}

INLINE long panels_of(const Linear& w) { return (w.outputs + PANEL - 1) / PANEL; }

}  // namespace

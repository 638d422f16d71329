// Linear layers over packed weights: one register tile for INT8, bfloat16 and float32, streamed or cache-blocked.
//
// Every output is one accumulator that walks the inputs in order, whatever the tile around it: a row's result depends
// neither on its neighbours nor on how rows and panels are shared out among threads. Shapes: A rows of `ld` 32-bit
// words, B panels of 32 columns.
#pragma once

#include "tile.h"

namespace {

// Encoded activation rows, ready to multiply: `words` 32-bit words a row.
struct Rows {
    int32_t* data;
    float* scale;  // [rows], int8 only
    long words;

    int32_t* row(long i) const { return data + i * words; }
};

constexpr long AHEAD = 2048;  // words of weights fetched ahead of use; panels follow one another

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
        vf top = splat(-__builtin_inff());  // of the numbers: what is none must not hide them
        for (int v = 0; v < NV; ++v) top = maximum(choose(values[v] == values[v], values[v], top), top);
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

// Whether tiles of a kind may be AMX's, and fetch any number of lines; others fetch one or two for each word, or none.
INLINE bool fetches_any(int kind) { return TILED && kind != KIND_F32; }

constexpr long FETCHING_TILES = 2;  // of a panel's, where they are vectors'

// What tile t of several fetches: of vectors the first two a half each of the panel that comes next, and the others what
// will be read soon; by AMX all as much each of that panel. `next` is null where no panel comes.
INLINE Fetched fetched(int kind, const int32_t* next, long words, long t, long tiles, Soon* soon) {
    const bool any = fetches_any(kind);
    const long fetching = any ? tiles : FETCHING_TILES;
    if (t >= fetching) return soon ? soon->take(words) : Fetched{nullptr, 0};
    if (!next) return {nullptr, 0};
    if (!any) return {next + words * 16 * t, FETCH_WORDS};
    const long all = 2 * FETCH_WORDS, lines = (all + fetching - 1) / fetching, first = lines * t;
    if (first >= all) return {nullptr, 0};
    return {next + words / FETCH_WORDS * first * 16, least(lines, all - first)};
}

constexpr long WAITING_TILES = 4;  // of a panel; more multiply for longer than memory takes

// Of what a tile of so many words and rows fetches, the last part, for memory to bring while its rows become outputs: at
// most a line for each. `tile` has the others then.
INLINE Fetched leave_some(Fetched& tile, long words, long rows) {
    const long groups = words / FETCH_WORDS, less = groups ? least(rows / groups, tile.lines) : 0;
    tile.lines -= less;
    return {tile.from + groups * tile.lines * 16, groups * less};
}

INLINE void fetch_all(const Fetched& rest) {
    for (long line = 0; line < rest.lines; ++line) __builtin_prefetch(rest.from + line * 16, 0, 2);
}

// Rows [row0, row1) of A against panels [panel0, panel1). The rows are cut into tiles of nearly equal height. One tile
// reads its panel from memory; of several, some fetch what comes next. Panels up to `until` are likely to be next.
void linear_block(const Linear& w, const Rows& a, long row0, long row1, long panel0, long panel1, const Target& target,
                  Soon* soon = nullptr, long until = 0) {
    const long words = words_of(w.kind, w.inputs), count = row1 - row0;
    if (count <= 0) return;
    const long height = tile_rows(w.kind), tiles = (count + height - 1) / height;
    alignas(64) int32_t raw[MOST_ROWS * PANEL];
    for (long panel = panel0; panel < panel1; ++panel) {
        const int32_t* b = static_cast<const int32_t*>(w.packed) + panel * words * PANEL;
        const int32_t* next = panel + 1 < most(panel1, until) ? b + words * PANEL : nullptr;
        for (long t = 0; t < tiles; ++t) {
            const long first = row0 + count * t / tiles, rows = row0 + count * (t + 1) / tiles - first;
            Fetched ahead = {b + AHEAD, 2 * FETCH_WORDS}, rest = {nullptr, 0};
            if (tiles > 1) ahead = fetched(w.kind, next, words, t, tiles, soon);
            if (by_amx(w.kind, int(rows)) && tiles <= WAITING_TILES) rest = leave_some(ahead, words, rows);
            tile_for(w.kind, rows, ahead.lines)(a.data + first * a.words, a.words, b, 0, words, ahead, raw, PANEL);
            fetch_all(rest);
            if (w.kind == KIND_INT8)
                finish_tile<true>(w, panel, a.scale + first, raw, rows, target, first);
            else
                finish_tile<false>(w, panel, nullptr, raw, rows, target, first);
        }
    }
}

INLINE long panels_of(const Linear& w) { return (w.outputs + PANEL - 1) / PANEL; }

}  // namespace

// The best token of a few rows without reading the whole head: int8 weights bound every score, and only what may be the
// best is multiplied by the head itself. The choice is the head's own, to the bit.
//
// For inputs x and a channel's weights w let x' and w' be what int8 holds of them. Then by Cauchy and Schwarz
//   |x . w - x' . w'| = |x . (w - w') + (x - x') . w'| <= |x| |w - w'| + |x - x'| |w'|.
// A row of x is held twice over, as what int8 has of it and as what that leaves: x - x' is next to nothing.
#pragma once

#include "softmax.h"

namespace {

// Of more rows products take longer than reading the head, and a screen has two of int8 for each of bfloat16: not even
// as quick without VNNI, and several times as quick by AMX.
#if defined(__AMX_TILE__)
constexpr long SCREENED_ROWS = 64;
#elif defined(__AVX512VNNI__)
constexpr long SCREENED_ROWS = 8;
#else
constexpr long SCREENED_ROWS = 4;
#endif
constexpr int PARTS = 2;           // int8 rows for a row
constexpr int ROWS_A_TILE = MOST_ROWS / PARTS;
constexpr float ROUNDING = 0x1p-22f;  // of a sum of products, for each of them: more than any form's
constexpr float NOTHING = 1e-30f;     // more than what products lose that are too small to be numbers
constexpr float LARGE = 1e37f;        // |x| |w| below it: no sum of products is infinite on the way, and bounds hold
constexpr float SMALL = 1e-10f;       // |x| above it: no square that counts is too small to be a number, as they need

// One row of inputs as the screen multiplies it.
struct Screened {
    float scale[PARTS];
    float missed;  // what a channel's `missed` counts times, and its `kept`
    float kept;
    float most;    // bounds hold for channels whose `kept` is less
    float least;   // no best score lies below
};

INLINE float length_of(const float* x, long n) {
    vf square = {};
    long i = 0;
    for (; i + LANES <= n; i += LANES) square = fma(load(x + i), load(x + i), square);
    float sum = sum_lanes(square);
    for (; i < n; ++i) sum += x[i] * x[i];
    return __builtin_sqrtf(sum);
}

// What a row's bfloat16 inputs are to the screen: PARTS int8 rows of words, one after the other. `room` is of n floats.
INLINE Screened screen_row(const uint16_t* x, long n, int32_t* words, long ld, float* room) {
    Screened s = {};
    for (long i = 0; i < n; ++i) room[i] = from_bf16(x[i]);
    const float length = length_of(room, n), slack = float(n) * ROUNDING;
    for (int part = 0; part < PARTS; ++part) {
        int32_t* const to = words + part * ld;
        encode_row(KIND_INT8, room, n, to, &s.scale[part]);
        const int8_t* held = reinterpret_cast<const int8_t*>(to);
        for (long i = 0; i < n; ++i) room[i] -= float(int8_t(held[i] - UNSIGNED_SHIFT)) * s.scale[part];
    }
    s.missed = length * (1.0f + slack);
    s.kept = length_of(room, n) * (1.0f + slack) + length * slack;
    s.most = length > SMALL ? LARGE / s.missed : 0.0f;
    s.least = -__builtin_inff();
    return s;
}

// Bounds of all rows' scores for panels [panel0, panel1): highest[panel][row], and each row's `least` is raised to the
// best of the lower bounds. `x` holds PARTS int8 rows for each of `rows`.
INLINE void screen_panels(const Screen& screen, const Rows& x, long rows, long panel0, long panel1,
                          Screened* row, float* highest) {
    const Linear& w = screen.coarse;
    const long words = words_of(KIND_INT8, w.inputs), tiles = (rows + ROWS_A_TILE - 1) / ROWS_A_TILE;
    const vf none = splat(-__builtin_inff());
    alignas(64) int32_t raw[MOST_ROWS * PANEL];
    vf lowest[SCREENED_ROWS], high[LANES] = {};
    for (long i = 0; i < rows; ++i) lowest[i] = none;
    for (long panel = panel0; panel < panel1; ++panel) {
        const int32_t* b = static_cast<const int32_t*>(w.packed) + panel * words * PANEL;
        const int32_t* next = panel + 1 < panel1 ? b + words * PANEL : nullptr;
        for (long t = 0; t < tiles; ++t) {
            const long first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
            Fetched ahead = {b + AHEAD, t ? 0 : 2 * FETCH_WORDS}, rest = {nullptr, 0};
            if (TILED && tiles > 1) ahead = fetched(KIND_INT8, next, words, t, tiles, nullptr);
            if (by_amx(KIND_INT8, int(count * PARTS))) rest = leave_some(ahead, words, count * PARTS);
            tile_for(KIND_INT8, count * PARTS, ahead.lines)(x.row(first * PARTS), x.words, b, 0, words, ahead, raw, PANEL);
            fetch_all(rest);
            for (long r = 0; r < count; ++r) {
                const Screened& s = row[first + r];
                vf top = none, low = lowest[first + r];
                for (int j = 0; j < PANEL; j += LANES) {
                    const long at = panel * PANEL + j;
                    vf sum = {};
                    for (int part = 0; part < PARTS; ++part) {
                        vi exact = load(raw + (r * PARTS + part) * PANEL + j);
                        if (UNSIGNED_SHIFT) exact = exact - load(w.sums + at);
                        sum = fma(to_float(exact), splat(s.scale[part]), sum);
                    }
                    const vf value = sum * load(w.scale + at);
                    const vf kept = load(screen.kept + at);
                    const vf error = load(screen.missed + at) * s.missed + kept * s.kept + NOTHING;
                    const auto known = kept < splat(s.most);
                    top = maximum(choose(known, value + error, -none), top);
                    low = maximum(choose(known, value - error, none), low);
                }
                high[r] = top;
                lowest[first + r] = low;
            }
            store_first(highest + panel * rows + first, count, max_of_rows(high, count));
        }
    }
    for (long i = 0; i < rows; ++i) row[i].least = __builtin_fmaxf(row[i].least, max_lanes(lowest[i]));
}

// visit(first, last, panel, end) for panels [panel, end) side by side, each of which may have the best token of some row
// of [first, last): what lies between is multiplied too, so that a panel is read once for all rows.
template <class Visit>
INLINE void each_left(const float* highest, const float* bound, long rows, long panel0, long panel1,
                      const Visit& visit) {
    long begin = panel0, low = rows, high = 0;  // of the panels side by side so far
    for (long panel = panel0; panel <= panel1; ++panel) {
        long first = 0, last = panel < panel1 ? rows : 0;
        const float* const top = highest + panel * rows;
        while (first < last && top[first] < bound[first]) ++first;
        while (first < last && top[last - 1] < bound[last - 1]) --last;
        if (first < last) {
            low = least(low, first), high = most(high, last);
            continue;
        }
        if (low < high) visit(low, high, begin, panel);
        begin = panel + 1, low = rows, high = 0;
    }
}

}  // namespace

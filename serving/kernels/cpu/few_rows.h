// Attention of few rows of all heads over one chunk: what decode does.
//
// There is less to compute than to read, so keys and values are read in the order they lie in memory, of all heads
// together, and what comes a little later is fetched meanwhile, a few lines for each step of arithmetic. Every addition
// is that of `attend_tile`, in the same order.
#pragma once

#include "item.h"

namespace {

constexpr long UNIT = 16;  // keys that lie side by side, where blocks have so many
constexpr long UNIT_WORDS = UNIT / 2;
constexpr long KEYS_AT_ONCE = PANEL;  // a group
constexpr long UNITS_AT_ONCE = KEYS_AT_ONCE / UNIT;
constexpr long FETCHED_AHEAD = 12 << 10;  // bytes of a plane, so few that the first cache holds them; at least one unit

INLINE bool few_rows(const KvPlanes& kv, const Item& item, long rows) {
    return kv.kind == KIND_BF16 && item.heads == kv.kv_heads && values_in_place(kv, rows) &&
           rows * item.heads <= SCORE_ROWS;
}

// Where the units are that lie a little further on than those of a chunk: its keys come first, then its values, then
// the coming chunk.
struct UnitsAhead {
    const char* keys[CHUNK / UNIT];
    const char* values[CHUNK / UNIT];

    UnitsAhead(const KvPlanes& kv, const Places& now, const Places& coming) {
        const long units = (now.count + UNIT - 1) / UNIT, later = (coming.count + UNIT - 1) / UNIT;
        const long ahead = most(1, FETCHED_AHEAD / (UNIT * kv.kv_heads * kv.row_bytes));
        const auto unit = [&](long at) {
            const bool next = at >= 2 * units;
            const long count = next ? later : units, i = next ? at - 2 * units : at;
            if (i >= 2 * count) return static_cast<const char*>(kv.v) + now.offset[0];  // nothing comes: it is there
            const void* plane = i < count ? kv.k : kv.v;
            return static_cast<const char*>(plane) + (next ? coming : now).offset[(i < count ? i : i - count) * UNIT];
        };
        for (long i = 0; i < units; ++i) {
            keys[i] = unit(i + ahead);
            values[i] = unit(units + i + ahead);
        }
        if (units % UNITS_AT_ONCE) keys[units] = keys[units - 1], values[units] = values[units - 1];
    }
};

// What one head fetches of the units ahead of a group while it is computed: the h-th of all heads' shares, which follow
// one another in memory. It has as many lines for each unit as a head has words.
struct Share {
    const char* part[UNITS_AT_ONCE];

    Share(const char* const* ahead, long h, long heads, long words) {
        for (long i = 0; i < UNITS_AT_ONCE; ++i) {
            const long at = UNITS_AT_ONCE * h + i;
            part[i] = ahead[at / heads] + at % heads * words * LINE;
        }
    }
};

// Where a plane's rows of the group at `key` lie, for KV head 0; past the last key its row again.
INLINE void group_rows(const void* plane, const Places& places, long key, const int32_t** rows) {
    for (long i = 0; i < KEYS_AT_ONCE; ++i)
        rows[i] = reinterpret_cast<const int32_t*>(static_cast<const char*>(plane) +
                                                   places.offset[least(key + i, places.count - 1)]);
}

// Scores of one head's rows over a group of keys, whose words begin at `at`: out [rows][CHUNK].
INLINE void score_group(const int32_t* const* keys, long units, long at, long words, const Share& share, Tile tile,
                        const int32_t* q, int32_t* panel, float* out) {
    const char* from = share.part[0];
    for (long u = 0; u < units; ++u)
        for (long w = 0; w < words; w += 16) {
#pragma GCC unroll 16
            for (int line = 0; line < 16 / UNITS_AT_ONCE; ++line, from += LINE) __builtin_prefetch(from, 0, 3);
            transpose_16(keys + u * UNIT, at + w, panel + w * PANEL + u * UNIT);
        }
    tile(q, words, panel, 0, words, reinterpret_cast<const int32_t*>(share.part[1]), reinterpret_cast<int32_t*>(out),
         CHUNK);
}

// out[r][0:32 PANELS] += p[r] . values of a group from byte `at` of each row on, for its first `keys` keys. Of each
// part of `share` 16 PANELS lines are fetched, from `line0` on.
template <int ROWS, int PANELS>
__attribute__((noinline)) void add_values(const int32_t* p, const int32_t* const* values, long at, long keys,
                                          const Share& share, long line0, int32_t* out, long ldo) {
    constexpr int LINES = 2 * PANELS;
    const long words = words_of(KIND_BF16, keys);
    vi acc[ROWS][PANELS * NV];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < PANELS * NV; ++j) acc[r][j] = load(out + r * ldo + j * LANES);
    for (long unit = 0; unit < words; unit += UNIT_WORDS) {
        const char* from = share.part[unit / UNIT_WORDS] + line0 * LINE;
        for (long k = unit; k < least(unit + UNIT_WORDS, words); ++k, from += LINES * LINE) {
            for (int line = 0; line < LINES; ++line) __builtin_prefetch(from + line * LINE, 0, 3);
            const auto half = [&](long key) {
                return reinterpret_cast<const uint16_t*>(reinterpret_cast<const char*>(values[key]) + at);
            };
            const uint16_t *even = half(2 * k), *odd = 2 * k + 1 < keys ? half(2 * k + 1) : NO_VALUES;
            vi right[PANELS * NV];
#pragma GCC unroll 2
            for (int j = 0; j < PANELS; ++j) pair_values(even, odd, j * PANEL, right + j * NV);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) {
                const DotBf16::Left left = DotBf16::left(p[r * CHUNK + k]);
#pragma GCC unroll 16
                for (int j = 0; j < PANELS * NV; ++j) acc[r][j] = DotBf16::step(acc[r][j], left, right[j]);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < PANELS * NV; ++j) *reinterpret_cast<vi_at*>(out + r * ldo + j * LANES) = acc[r][j];
}

typedef void (*AddValues)(const int32_t*, const int32_t* const*, long, long, const Share&, long, int32_t*, long);

template <int PANELS, int... ROWS_LESS_1>
INLINE AddValues pick_add(long rows, std::integer_sequence<int, ROWS_LESS_1...>) {
    static constexpr AddValues tiles[] = {add_values<ROWS_LESS_1 + 1, (ROWS_LESS_1 < PAIR_ROWS ? PANELS : 1)>...};
    return tiles[rows - 1];
}

// One head's rows times a group of values, added to out [rows][dim].
INLINE void value_group(const int32_t* p, const int32_t* const* values, long row_bytes, long h, long keys, long rows,
                        long dim, const Share& share, float* out) {
    constexpr auto all = std::make_integer_sequence<int, TILE_ROWS>();
    const bool pairs = rows <= PAIR_ROWS;
    for (long panel = 0, panels; panel < dim / PANEL; panel += panels) {
        panels = pairs && panel + 2 <= dim / PANEL ? 2 : 1;
        const AddValues add = panels == 2 ? pick_add<2>(rows, all) : pick_add<1>(rows, all);
        add(p, values, h * row_bytes + panel * PANEL * 2, keys, share, panel * 16,
            reinterpret_cast<int32_t*>(out) + panel * PANEL, dim);
    }
}

// One chunk for all heads of an item of few rows; where its keys and those of the coming one lie is in s.chunk.
void attend_few(const KvPlanes& kv, const AttentionShape& shape, const Item& item, long chunk, AttentionScratch& s,
                const Parts& parts) {
    const Places& places = s.chunk.places;
    const long rows = item.segment.tokens * group_of(kv, shape), keys = places.count, heads = item.heads;
    const long words = words_of(KIND_BF16, kv.head_dim), dim = kv.head_dim;
    const UnitsAhead ahead(kv, places, s.chunk.coming);
    const Tile tile = tile_for<1>(KIND_BF16, rows);
    const int32_t* lie[KEYS_AT_ONCE];
    for (long key = 0; key < keys; key += KEYS_AT_ONCE) {
        group_rows(kv.k, places, key, lie);
        for (long h = 0; h < heads; ++h)
            score_group(lie, key + UNIT < keys ? 2 : 1, h * kv.row_bytes / 4, words,
                        Share(ahead.keys + key / UNIT, h, heads, words), tile, s.q + h * rows * words, s.chunk.k,
                        s.scores + h * rows * CHUNK + key);
    }
    Weights weights[SCORE_ROWS];
    const auto head = [&](long h) { return HeadRows{0, rows, h * rows, h * rows}; };
    for (long h = 0; h < heads; ++h) weigh_rows(kv, shape, item, head(h), chunk * CHUNK, keys, s, weights + h * rows);
    __builtin_memset(s.part, 0, heads * rows * dim * sizeof(float));
    for (long key = 0; key < keys; key += KEYS_AT_ONCE) {
        group_rows(kv.v, places, key, lie);
        const long count = least(KEYS_AT_ONCE, keys - key);
        for (long h = 0; h < heads; ++h)
            value_group(s.p + h * rows * CHUNK + key / 2, lie, kv.row_bytes, h, count, rows, dim,
                        Share(ahead.values + key / UNIT, h, heads, words), s.part + h * rows * dim);
    }
    for (long h = 0; h < heads; ++h) take_parts(head(h), weights + h * rows, dim, s, parts);
}

}  // namespace

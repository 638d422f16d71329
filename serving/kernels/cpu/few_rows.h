// Attention of few rows of all heads over one chunk: what decode does.
//
// There is less to compute than to read, so keys and values are read in the order they lie in memory, of all heads
// together, and what comes a little later is fetched meanwhile, a few lines for each step of arithmetic, or while int8
// numbers are widened, a group of keys at a time. Every addition is that of `attend_tile`, in the same order.
#pragma once

#include "item.h"

namespace {

constexpr long UNIT = 16;  // keys that lie side by side, where blocks have so many
constexpr long UNIT_WORDS = UNIT / 2;
constexpr long KEYS_AT_ONCE = PANEL;  // a group
constexpr long UNITS_AT_ONCE = KEYS_AT_ONCE / UNIT;
constexpr long FETCHED_AHEAD = 12 << 10;  // bytes of a plane, so few that the first cache holds them; at least one unit
constexpr int NEAR = TILED ? 2 : 3;       // where to: by AMX the first cache's places are for tiles

INLINE bool few_rows(const KvPlanes& kv, const Item& item, long rows) {
    return item.heads == kv.kv_heads && one_tile(kv, rows) && rows * item.heads <= SCORE_ROWS;
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
        for (long i = units; i < CHUNK / UNIT; ++i) keys[i] = keys[units - 1], values[i] = values[units - 1];
    }
};

// What one head fetches of the units ahead of a group while it is computed: the h-th of all heads' shares, which follow
// one another in memory, so many lines of each unit.
template <long UNITS>
struct ShareOf {
    const char* part[UNITS];

    ShareOf(const char* const* ahead, long h, long heads, long lines) {
        for (long i = 0; i < UNITS; ++i) {
            const long at = UNITS * h + i;
            part[i] = ahead[at / heads] + at % heads * lines * LINE;
        }
    }
};

typedef ShareOf<UNITS_AT_ONCE> Share;

// One head's int8 rows of a group as bfloat16 in `wide` [KEYS_AT_ONCE][dim]; all of `share` is fetched meanwhile.
INLINE void widen_rows(const KvPlanes& kv, const int32_t* const* lie, long h, const Share& share, uint16_t* wide,
                       const int32_t** rows) {
    const long dim = kv.head_dim;
    for (long i = 0; i < KEYS_AT_ONCE; ++i) {
        const long key = i % UNIT;
        for (long line = key * dim / LINE; line < (key + 1) * dim / LINE; ++line)
            __builtin_prefetch(share.part[i / UNIT] + line * LINE, 0, NEAR);
        widen_int8(reinterpret_cast<const int8_t*>(lie[i]) + h * kv.row_bytes, dim, wide + i * dim);
        rows[i] = reinterpret_cast<const int32_t*>(wide + i * dim);
    }
}

// One head's scales of int8 keys and values.
INLINE void take_scales(const KvPlanes& kv, const Places& places, long h, PackedChunk& s) {
    for (long i = 0; i < places.count; ++i) {
        const long at = (places.at[i] + h) * kv.scale_stride;
        s.k_scale[i] = kv.k_scale[at];
        s.v_scale[i] = kv.v_scale[at];
    }
}

// Those of all heads of the coming chunk, fetched.
INLINE void fetch_scales(const KvPlanes& kv, const Places& coming) {
    const long floats = kv.kv_heads * kv.scale_stride, each = LINE / long(sizeof(float));
    for (long i = 0; i < coming.count; i += UNIT)
        for (long at = 0; at < least(UNIT, coming.count - i) * floats; at += each) {
            __builtin_prefetch(kv.k_scale + coming.at[i] * kv.scale_stride + at, 0, 2);
            __builtin_prefetch(kv.v_scale + coming.at[i] * kv.scale_stride + at, 0, 2);
        }
}

// Where a plane's rows of the group at `key` lie, for KV head 0; past the last key its row again.
template <long KEYS = KEYS_AT_ONCE>
INLINE void group_rows(const void* plane, const Places& places, long key, const int32_t** rows) {
    for (long i = 0; i < KEYS; ++i)
        rows[i] = reinterpret_cast<const int32_t*>(static_cast<const char*>(plane) +
                                                   places.offset[least(key + i, places.count - 1)]);
}

// What attention of one chunk works with. NARROW: its numbers are int8. DIM: dimensions of a head, or 0 for as many as
// there are.
template <bool NARROW, int DIM>
struct FewRows {
    const KvPlanes& kv;
    AttentionScratch& s;
    UnitsAhead ahead;
    long rows, heads, keys;  // rows of a head

    FewRows(const KvPlanes& kv, AttentionScratch& s, long rows, long heads)
        : kv(kv), s(s), ahead(kv, s.chunk.places, s.chunk.coming), rows(rows), heads(heads),
          keys(s.chunk.places.count) {}

    INLINE long dim() const { return DIM ? DIM : kv.head_dim; }
    INLINE long words() const { return dim() / 2; }                       // of a head's row as bfloat16
    INLINE long lines() const { return NARROW ? words() / 2 : words(); }  // of each part of a share
    INLINE long units(long key) const { return key + UNIT < keys ? UNITS_AT_ONCE : 1; }
    INLINE const int32_t* queries(long h) const { return s.q + h * rows * words(); }
    INLINE float* scores(long h, long key) const { return s.scores + h * rows * CHUNK + key; }
    INLINE const int32_t* weights(long h, long key) const { return s.p + h * rows * CHUNK + key / 2; }
    INLINE float* sums(long h) const { return s.part + h * rows * dim(); }

    // Lines [first, last) of a share's two parts; of int8 all are fetched as they are widened.
    INLINE void fetch(const Share& share, long first, long last) const {
#pragma GCC unroll 16
        for (long i = first; !NARROW && i < last; ++i)
            __builtin_prefetch(share.part[i / lines()] + i % lines() * LINE, 0, NEAR);
    }
};

// visit(key, head, share, rows, at) for every head of every group of a plane's keys: `rows` lie where the group's do,
// and the head's numbers begin at byte `at` of each. int8 ones are widened first.
template <bool NARROW, int DIM, class Visit>
INLINE void each_group(const FewRows<NARROW, DIM>& w, const void* plane, const char* const* ahead, const Visit& visit) {
    const int32_t *lie[KEYS_AT_ONCE], *wide[KEYS_AT_ONCE];
    for (long key = 0; key < w.keys; key += KEYS_AT_ONCE) {
        group_rows(plane, w.s.chunk.places, key, lie);
        for (long h = 0; h < w.heads; ++h) {
            const Share share(ahead + key / UNIT, h, w.heads, w.lines());
            if (NARROW) widen_rows(w.kv, lie, h, share, w.s.chunk.wide, wide);
            visit(key, h, share, NARROW ? wide : lie, NARROW ? 0 : h * w.kv.row_bytes);
        }
    }
}

#if defined(__AMX_TILE__)
// A tile takes what it multiplies from memory, and waits until that is written. So a group's product is computed while
// the next group is laid out, in another place than the one before it.

// A group's keys across, words from byte `at` of each on; 3 of 4 lines of the share are fetched. Before the last 16 words
// of the last unit `middle` is called.
template <bool NARROW, int DIM, class Middle>
INLINE void lay_keys(const FewRows<NARROW, DIM>& w, const int32_t* const* keys, long units, long at, const Share& share,
                     int32_t* panel, const Middle& middle) {
    long line = 0;
    for (long u = 0; u < units; ++u)
#pragma GCC unroll 4
        for (long k = 0; k < w.words(); k += 16) {
            if (u == units - 1 && k + 16 == w.words()) middle();
            for (long i = units; i <= UNITS_AT_ONCE; ++i, line += 12) w.fetch(share, line, line + 12);
            transpose_16(keys + u * UNIT, at / 4 + k, panel + k * PANEL + u * UNIT);
        }
}

// A group's values, pairs of them side by side, from byte `at` of each row: room [16][dim]; 3 of 4 lines of the share are
// fetched. Halfway `middle` is called.
template <bool NARROW, int DIM, class Middle>
INLINE void lay_values(const FewRows<NARROW, DIM>& w, const int32_t* const* values, long at, long keys,
                       const Share& share, int32_t* room, const Middle& middle) {
    const auto half = [&](long key) {
        return key < keys ? reinterpret_cast<const uint16_t*>(reinterpret_cast<const char*>(values[key]) + at)
                          : NO_VALUES;
    };
    const long lines = w.dim() * 3 / 4;
#pragma GCC unroll 16
    for (long k = 0; k < AMX_WORDS; ++k) {
        if (k == AMX_WORDS / 2) middle();
        w.fetch(share, lines * k / AMX_WORDS, lines * (k + 1) / AMX_WORDS);
        const uint16_t *even = half(2 * k), *odd = half(2 * k + 1);
#pragma GCC unroll 4
        for (long d = 0; d < w.dim(); d += PANEL)
            for (int v = 0; v < NV; ++v)
                *reinterpret_cast<vi_at*>(room + k * w.dim() + d + v * LANES) = pair_values(even, odd, d, v);
    }
}

// A group of one head whose product is still to be computed, and where it is laid out.
struct Laid {
    int32_t* room = nullptr;
    long key = 0, head = 0;
};

// Scores of all heads' rows over a chunk.
template <bool NARROW, int DIM>
INLINE void score_chunk(const FewRows<NARROW, DIM>& w) {
    Laid last;
    const auto product = [&](const auto& fetch) __attribute__((always_inline)) {
        const int32_t* const panel = last.room;
        amx_products<KIND_BF16, false, 2, false>(
            w.rows, w.queries(last.head), w.words(), [=](int j) { return panel + j * AMX_COLUMNS; }, PANEL, w.words(),
            reinterpret_cast<int32_t*>(w.scores(last.head, last.key)), CHUNK, fetch);
    };
    each_group(w, w.kv.k, w.ahead.keys, [&](long key, long h, const Share& share, const auto& rows, long at) {
        int32_t* const room = last.room == w.s.chunk.k ? w.s.chunk.k + PANEL * w.words() : w.s.chunk.k;
        lay_keys(w, rows, w.units(key), at, share, room, [&]() __attribute__((always_inline)) {
            const long from = 3 * w.dim() / 4;
            if (!last.room) return w.fetch(share, from, w.dim());
            product([&](long k, int i) { w.fetch(share, from + k / 2 + i * 4, from + k / 2 + i * 4 + 4); });
        });
        last = {room, key, h};
    });
    product([](long, int) {});
}

// All heads' weights times a chunk's values, added to s.part.
template <bool NARROW, int DIM>
INLINE void multiply_chunk(const FewRows<NARROW, DIM>& w) {
    Laid last;
    const auto add = [&](auto tiles, long d, const auto& fetch) __attribute__((always_inline)) {
        const int32_t* const room = last.room + d;
        amx_products<KIND_BF16, false, tiles(), true>(
            w.rows, w.weights(last.head, last.key), CHUNK, [=](int j) { return room + j * AMX_COLUMNS; }, w.dim(),
            AMX_WORDS, reinterpret_cast<int32_t*>(w.sums(last.head)) + d, w.dim(), fetch);
    };
    const auto product = [&](const auto& fetch) __attribute__((always_inline)) {
        long d = 0;
        for (; d + 2 * PANEL <= w.dim(); d += 2 * PANEL)
            add(std::integral_constant<int, 4>(), d, [&](long, int i) { fetch(d / 4 + i * 8, 8); });
        if (d < w.dim()) add(std::integral_constant<int, 2>(), d, [&](long, int i) { fetch(d / 4 + i * 4, 4); });
    };
    each_group(w, w.kv.v, w.ahead.values, [&](long key, long h, const Share& share, const auto& rows, long at) {
        int32_t* const room = last.room == w.s.chunk.v ? w.s.chunk.v + AMX_WORDS * w.dim() : w.s.chunk.v;
        const long keys = least(KEYS_AT_ONCE, w.keys - key);
        lay_values(w, rows, at, keys, share, room, [&]() __attribute__((always_inline)) {
            const long from = 3 * w.dim() / 4;
            if (!last.room) return w.fetch(share, from, w.dim());
            product([&](long line, long count) { w.fetch(share, from + line, from + line + count); });
        });
        last = {room, key, h};
    });
    product([](long, long) {});
}
#else
// Scores of one head's rows over a group of keys, whose words begin at `at`: out [rows][CHUNK]. With FETCHES a line of
// `share` is fetched for each word, of both parts.
template <bool FETCHES>
INLINE void score_group(const int32_t* const* keys, long units, long at, long words, const Share& share, Tile tile,
                        const int32_t* q, int32_t* panel, float* out) {
    const char* from = share.part[0];
    for (long u = 0; u < units; ++u)
        for (long w = 0; w < words; w += 16) {
#pragma GCC unroll 16
            for (int line = 0; FETCHES && line < 16 / UNITS_AT_ONCE; ++line, from += LINE)
                __builtin_prefetch(from, 0, NEAR);
            transpose_16(keys + u * UNIT, at + w, panel + w * PANEL + u * UNIT);
        }
    const Fetched ahead = {reinterpret_cast<const int32_t*>(share.part[1]), FETCHES ? FETCH_WORDS : 0};
    tile(q, words, panel, 0, words, ahead, reinterpret_cast<int32_t*>(out), CHUNK);
}

// out[r][0:32 PANELS] += p[r] . values of a group from byte `at` of each row on, for its first `keys` keys. With
// FETCHES 16 PANELS lines of each part of `share` are fetched, from `line0` on.
template <bool FETCHES, int ROWS, int PANELS>
__attribute__((noinline)) void add_values(const int32_t* p, const int32_t* const* values, long at, long keys,
                                          const Share& share, long line0, int32_t* out, long ldo) {
    constexpr int LINES = FETCHES ? 2 * PANELS : 0;
    const auto half = [&](long key) {
        return reinterpret_cast<const uint16_t*>(reinterpret_cast<const char*>(values[key]) + at);
    };
    walk<DotBf16, ROWS, PANELS * NV, true>(
        p, CHUNK, words_of(KIND_BF16, keys), out, ldo,
        [&](long k) {
            const uint16_t *even = half(2 * k), *odd = 2 * k + 1 < keys ? half(2 * k + 1) : NO_VALUES;
            return [=](int j) { return pair_right(even, odd, (j / NV) * PANEL, j % NV); };
        },
        [&](long k) {
            const char* const from = share.part[k / UNIT_WORDS] + (line0 + k % UNIT_WORDS * LINES) * LINE;
            for (int line = 0; line < LINES; ++line) __builtin_prefetch(from + line * LINE, 0, NEAR);
        });
}

typedef void (*AddValues)(const int32_t*, const int32_t* const*, long, long, const Share&, long, int32_t*, long);

template <bool FETCHES, int PANELS, int... ROWS_LESS_1>
INLINE AddValues pick_add(long rows, std::integer_sequence<int, ROWS_LESS_1...>) {
    static constexpr AddValues tiles[] = {
        add_values<FETCHES, ROWS_LESS_1 + 1, (ROWS_LESS_1 < pair_rows(KIND_BF16) ? PANELS : 1)>...};
    return tiles[rows - 1];
}

// One head's rows times a group of values, which begin at byte `at` of each row, added to out [rows][dim].
template <bool FETCHES>
INLINE void value_group(const int32_t* p, const int32_t* const* values, long at, long keys, long rows, long dim,
                        const Share& share, float* out) {
    constexpr auto all = std::make_integer_sequence<int, TILE_ROWS>();
    const bool pairs = rows <= pair_rows(KIND_BF16);
    for (long panel = 0, panels; panel < dim / PANEL; panel += panels) {
        panels = pairs && panel + 2 <= dim / PANEL ? 2 : 1;
        const AddValues add = panels == 2 ? pick_add<FETCHES, 2>(rows, all) : pick_add<FETCHES, 1>(rows, all);
        add(p, values, at + panel * PANEL * 2, keys, share, panel * 16,
            reinterpret_cast<int32_t*>(out) + panel * PANEL, dim);
    }
}

template <bool NARROW, int DIM>
INLINE void score_chunk(const FewRows<NARROW, DIM>& w) {
    const Tile tile = tile_for<NARROW ? 0 : 1>(KIND_BF16, w.rows);
    each_group(w, w.kv.k, w.ahead.keys, [&](long key, long h, const Share& share, const auto& rows, long at) {
        score_group<!NARROW>(rows, w.units(key), at / 4, w.words(), share, tile, w.queries(h), w.s.chunk.k,
                             w.scores(h, key));
    });
}

template <bool NARROW, int DIM>
INLINE void multiply_chunk(const FewRows<NARROW, DIM>& w) {
    each_group(w, w.kv.v, w.ahead.values, [&](long key, long h, const Share& share, const auto& rows, long at) {
        value_group<!NARROW>(w.weights(h, key), rows, at, least(KEYS_AT_ONCE, w.keys - key), w.rows, w.dim(), share,
                             w.sums(h));
    });
}
#endif

// One chunk for all heads of an item of few rows; where its keys and those of the coming one lie is in s.chunk.
template <bool NARROW, int DIM>
void attend_few(const KvPlanes& kv, const AttentionShape& shape, const Item& item, long chunk, AttentionScratch& s,
                const Parts& parts) {
    const FewRows<NARROW, DIM> w(kv, s, item.segment.tokens * group_of(kv, shape), item.heads);
    const auto head = [&](long h) { return HeadRows{0, w.rows, h * w.rows, h * w.rows}; };
    if (NARROW) fetch_scales(kv, s.chunk.coming);
    score_chunk(w);
    Weights weights[SCORE_ROWS];
    for (long h = 0; h < w.heads; ++h) {
        if (NARROW) take_scales(kv, s.chunk.places, h, s.chunk);
        weights[h] = weigh_rows(kv, shape, item, head(h), chunk * CHUNK, w.keys, s);
    }
    __builtin_memset(s.part, 0, w.heads * w.rows * w.dim() * sizeof(float));
    multiply_chunk(w);
    for (long h = 0; h < w.heads; ++h) take_parts(head(h), weights[h], w.dim(), s, parts);
}

typedef void (*AttendFew)(const KvPlanes&, const AttentionShape&, const Item&, long, AttentionScratch&, const Parts&);

// The usual dimensions of a head have loops of their own by AMX, where memory would wait for counting.
INLINE AttendFew attend_few_of(const KvPlanes& kv) {
    if (kv.kind == KIND_INT8) return attend_few<true, 0>;
    if (TILED && kv.head_dim == 64) return attend_few<false, 64>;
    if (TILED && kv.head_dim == 128) return attend_few<false, 128>;
    return attend_few<false, 0>;
}

}  // namespace

// `few_rows.h` for int8 keys and values that AMX multiplies as they are (bytes.h): a group of 64 keys at a time.
#pragma once

#include "bytes.h"
#include "few_rows.h"

namespace {

#if defined(__AMX_TILE__)
constexpr long BYTE_UNITS = BYTE_KEYS / UNIT;

// What attention of one chunk works with; DIM as of `FewRows`.
template <int DIM>
struct FewBytes {
    const KvPlanes& kv;
    AttentionScratch& s;
    UnitsAhead ahead;
    long rows, heads, keys;  // rows of a head

    typedef ShareOf<BYTE_UNITS> Share;

    FewBytes(const KvPlanes& kv, AttentionScratch& s, long rows, long heads)
        : kv(kv), s(s), ahead(kv, s.chunk.places, s.chunk.coming), rows(rows), heads(heads),
          keys(s.chunk.places.count) {}

    INLINE long dim() const { return DIM ? DIM : kv.head_dim; }
    INLINE long words() const { return dim() / 4; }  // of a head's row, and lines of each part of a share
    INLINE HeadRows head(long h) const { return {0, rows, h * rows, h * rows}; }

    // Lines [first, last) of a share, which has `dim` of them.
    INLINE void fetch(const Share& share, long first, long last) const {
#pragma GCC unroll 16
        for (long i = first; i < last; ++i)
            __builtin_prefetch(share.part[i / words()] + i % words() * LINE, 0, NEAR);
    }
};

// Where a group of one head is laid out whose product is still to be computed (`Laid`), and the next one's place.
INLINE int32_t* other_room(const Laid& last, int32_t* rooms, long size) {
    return last.room == rooms ? rooms + size : rooms;
}

// A group's keys across, as two panels; 3 of 4 lines of the share are fetched. Before the last 16 words of the last unit
// `middle` is called.
template <int DIM, class Middle>
INLINE void lay_key_bytes(const FewBytes<DIM>& w, const int32_t* const* keys, long units, long at,
                          const typename FewBytes<DIM>::Share& share, int32_t* room, const Middle& middle) {
    const long lines = 3 * w.dim() / 4, pieces = units * (w.words() / 16);
    long piece = 0;
    for (long u = 0; u < units; ++u)
#pragma GCC unroll 4
        for (long k = 0; k < w.words(); k += 16, ++piece) {
            if (piece == pieces - 1) middle();
            if (units == BYTE_UNITS)
                w.fetch(share, piece * 12, piece * 12 + 12);
            else
                w.fetch(share, lines * piece / pieces, lines * (piece + 1) / pieces);
            transpose_16(keys + u * UNIT, at / 4 + k, room + (u / 2 * w.words() + k) * PANEL + u % 2 * UNIT);
        }
}

// A group's values, four keys side by side: room [16][dim]; 3 of 4 lines of the share are fetched. Halfway `middle` is
// called. Past the last key its values come again, whose weights are 0.
template <int DIM, class Middle>
INLINE void lay_value_bytes(const FewBytes<DIM>& w, const int32_t* const* values, long at,
                            const typename FewBytes<DIM>::Share& share, int32_t* room, const Middle& middle) {
    const long lines = 3 * w.dim() / 4;
#pragma GCC unroll 16
    for (long quad = 0; quad < BYTE_WORDS; ++quad) {
        if (quad == BYTE_WORDS / 2) middle();
        w.fetch(share, lines * quad / BYTE_WORDS, lines * (quad + 1) / BYTE_WORDS);
        const char* rows[4];
        for (int i = 0; i < 4; ++i) rows[i] = reinterpret_cast<const char*>(values[4 * quad + i]) + at;
        lay_quad<false>(rows, w.dim(), room + byte_word(quad) * w.dim());
    }
}

// visit(key, head, share, rows, at) as `each_group` does.
template <int DIM, class Visit>
INLINE void each_byte_group(const FewBytes<DIM>& w, const void* plane, const char* const* ahead, const Visit& visit) {
    const int32_t* lie[BYTE_KEYS];
    for (long key = 0; key < w.keys; key += BYTE_KEYS) {
        group_rows<BYTE_KEYS>(plane, w.s.chunk.places, key, lie);
        for (long h = 0; h < w.heads; ++h)
            visit(key, h, typename FewBytes<DIM>::Share(ahead + key / UNIT, h, w.heads, w.words()), lie,
                  h * w.kv.row_bytes);
    }
}

template <int DIM>
INLINE void score_bytes(const FewBytes<DIM>& w) {
    Laid last;
    const long words = w.words();
    const auto product = [&](const auto& fetch) __attribute__((always_inline)) {
        const int32_t* const room = last.room;
        amx_64_columns<KIND_SIGNED, false>(
            2 * w.rows, byte_queries(w.head(last.head), words, w.s), words,
            [=](int j) { return room + j / 2 * words * PANEL + j % 2 * AMX_COLUMNS; }, PANEL, words,
            byte_scores(w.head(last.head), w.s) + last.key, CHUNK, fetch);
    };
    each_byte_group(w, w.kv.k, w.ahead.keys, [&](long key, long h, const auto& share, const auto& rows, long at) {
        int32_t* const room = other_room(last, w.s.chunk.k, BYTE_KEYS * words);
        const long units = least(BYTE_UNITS, (w.keys - key + UNIT - 1) / UNIT), from = 3 * w.dim() / 4;
        lay_key_bytes(w, rows, units, at, share, room, [&]() __attribute__((always_inline)) {
            if (!last.room) return w.fetch(share, from, w.dim());
            product([&](long k, int i) { w.fetch(share, from + k + i * 8, from + k + i * 8 + 8); });
        });
        last = {room, key, h};
    });
    product([](long, int) {});
}

template <int DIM>
INLINE void multiply_bytes(const FewBytes<DIM>& w) {
    Laid last;
    const auto add = [&](auto adds, long d, const auto& fetch) __attribute__((always_inline)) {
        const int32_t* const room = last.room + d;
        const HeadRows h = w.head(last.head);
        amx_64_columns<KIND_INT8, adds()>(
            2 * w.rows, byte_weights(h, w.s) + last.key / 4, P_WORDS, [=](int j) { return room + j * AMX_COLUMNS; },
            w.dim(), BYTE_WORDS, byte_parts(h, w.dim(), w.s) + d, w.dim(), fetch);
    };
    const auto product = [&](const auto& fetch) __attribute__((always_inline)) {
        for (long d = 0; d < w.dim(); d += BYTE_DIMS) {
            const auto some = [&](long, int i) { fetch(d / 4 + i * 8, 8); };
            if (last.key)
                add(std::true_type(), d, some);
            else
                add(std::false_type(), d, some);
        }
    };
    each_byte_group(w, w.kv.v, w.ahead.values, [&](long key, long h, const auto& share, const auto& rows, long at) {
        int32_t* const room = other_room(last, w.s.chunk.v, BYTE_WORDS * w.dim());
        const long from = 3 * w.dim() / 4;
        lay_value_bytes(w, rows, at, share, room, [&]() __attribute__((always_inline)) {
            if (!last.room) return w.fetch(share, from, w.dim());
            product([&](long line, long count) { w.fetch(share, from + line, from + line + count); });
        });
        last = {room, key, h};
    });
    product([](long, long) {});
}

// `attend_few`.
template <int DIM>
void attend_few_bytes(const KvPlanes& kv, const AttentionShape& shape, const Item& item, long chunk,
                      AttentionScratch& s, const Parts& parts) {
    const FewBytes<DIM> w(kv, s, item.segment.tokens * group_of(kv, shape), item.heads);
    fetch_scales(kv, s.chunk.coming);
    score_bytes(w);
    Weights weights[SCORE_ROWS];
    float value_scale[SCORE_ROWS];
    for (long h = 0; h < w.heads; ++h) {
        take_scales(kv, s.chunk.places, h, s.chunk);
        weights[h] = weigh_bytes(kv, shape, item, w.head(h), chunk * CHUNK, w.keys, nullptr, s, value_scale + h * w.rows);
    }
    multiply_bytes(w);
    for (long h = 0; h < w.heads; ++h)
        take_byte_parts<false>(w.head(h), weights[h], w.dim(), value_scale + h * w.rows, s, parts);
}

INLINE AttendFew attend_few_bytes_of(const KvPlanes& kv) {
    if (kv.head_dim == 64) return attend_few_bytes<64>;
    if (kv.head_dim == 128) return attend_few_bytes<128>;
    return attend_few_bytes<0>;
}
#else
INLINE AttendFew attend_few_bytes_of(const KvPlanes&) { return nullptr; }
#endif

}  // namespace

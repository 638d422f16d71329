// One chunk of paged keys and values of one KV head, gathered and laid out as the right side of a register tile.
//
// INT8 values are widened exactly to bfloat16, so that every stored kind but float32 multiplies as bfloat16 pairs.
#pragma once

#include "rows.h"

namespace {

constexpr long CHUNK = 128;  // keys

// Where the keys of a chunk lie in a plane, counted in rows of one head, for KV head 0.
struct Places {
    long count;
    long at[CHUNK];
};

struct PackedChunk {
    int32_t* k;      // [CHUNK / 32][words][32], keys across
    int32_t* v;      // [padded dim / 32][CHUNK / per word][32], dimensions across
    uint16_t* wide;  // [CHUNK][padded dim], int8 values as bfloat16
    float k_scale[CHUNK], v_scale[CHUNK];
    const int32_t* rows[CHUNK];
    Places places;  // of this chunk
    Places coming;  // of the one packed after it
};

// The part of the coming chunk that is fetched while one head of this chunk is packed: its keys [first, last), with all
// the heads that will be packed of it, which lie side by side.
struct Ahead {
    long head, heads, first, last;
};

INLINE long padded_dim(const KvPlanes& kv) { return round_up(kv.head_dim, PANEL); }

INLINE void find_places(const KvPlanes& kv, const int32_t* table, long key0, long count, Places& places) {
    long block = key0 / kv.block_size, offset = key0 % kv.block_size;
    for (long i = 0; i < count; ++block, offset = 0) {
        const long stop = least(count, i + kv.block_size - offset);
        long place = (long(table[block]) * kv.block_size + offset) * kv.kv_heads;
        for (; i < stop; ++i, place += kv.kv_heads) places.at[i] = place;
    }
    places.count = count;
}

// Fetches the share of the coming chunk that belongs to packing keys [i, i + n) of this one, so that memory need not
// wait for arithmetic. Whole rows in order let the hardware's own prefetcher run further ahead.
INLINE void prefetch(const KvPlanes& kv, const void* plane, const PackedChunk& s, const Ahead& ahead, long i, long n) {
    const long wide = ahead.last - ahead.first, bytes = kv.row_bytes, count = s.places.count;
    const long stop = ahead.first + wide * least(i + n, count) / count;
    for (long key = ahead.first + wide * i / count; key < stop; ++key) {
        const char* row = static_cast<const char*>(plane) + (s.coming.at[key] + ahead.head) * bytes;
        for (long at = 0; at < bytes * ahead.heads; at += 64) __builtin_prefetch(row + at);
    }
}

// Points s.rows at one head's rows of a plane; int8 rows are widened to bfloat16 and their scales collected.
INLINE void gather(const KvPlanes& kv, const void* plane, const float* scales, long head, PackedChunk& s,
                   float* scale_out) {
    const Places& places = s.places;
    const long dim = kv.head_dim, padded = padded_dim(kv), bytes = kv.row_bytes;
    if (kv.kind != KIND_INT8) {
        const char* first = static_cast<const char*>(plane) + head * bytes;
        for (long i = 0; i < places.count; ++i)
            s.rows[i] = reinterpret_cast<const int32_t*>(first + places.at[i] * bytes);
        return;
    }
    for (long i = 0; i < places.count; ++i) {
        uint16_t* row = s.wide + i * padded;
        const int8_t* from = static_cast<const int8_t*>(plane) + (places.at[i] + head) * bytes;
        long d = 0;
        for (; d + LANES <= dim; d += LANES) store_bf16(row + d, load_int8(from + d));
        for (; d < dim; ++d) row[d] = to_bf16(from[d]);
        s.rows[i] = reinterpret_cast<const int32_t*>(row);
        scale_out[i] = scales[(places.at[i] + head) * kv.scale_stride];
    }
}

#if defined(__AVX512F__)
// 16 rows of 16 words, transposed: out[j][i] = rows[i][j], out rows 32 words apart.
INLINE void transpose_16(const int32_t* const* rows, long at, int32_t* out) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + at);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
        b[4 + i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
        b[8 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        b[12 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        _mm512_storeu_si512(out + i * PANEL, _mm512_shuffle_i32x4(b[i], b[8 + i], 0x88));
        _mm512_storeu_si512(out + (8 + i) * PANEL, _mm512_shuffle_i32x4(b[i], b[8 + i], 0xdd));
        _mm512_storeu_si512(out + (4 + i) * PANEL, _mm512_shuffle_i32x4(b[4 + i], b[12 + i], 0x88));
        _mm512_storeu_si512(out + (12 + i) * PANEL, _mm512_shuffle_i32x4(b[4 + i], b[12 + i], 0xdd));
    }
}
#endif

// Keys across: panel p, word w, column c holds word w of key 32 p + c. Columns past `count` are left as they are: the
// mask throws their scores away.
INLINE void pack_keys(const KvPlanes& kv, const PackedChunk& s, const Ahead& ahead, long words) {
    const long count = s.places.count;
    for (long i = 0; i < count; i += 16) {
        prefetch(kv, kv.k, s, ahead, i, 16);
        int32_t* out = s.k + (i / PANEL) * words * PANEL + i % PANEL;
#if defined(__AVX512F__)
        if (words % 16 == 0 && i + 16 <= count) {
            for (long w = 0; w < words; w += 16) transpose_16(s.rows + i, w, out + w * PANEL);
            continue;
        }
#endif
        for (long r = 0; r < least(16, count - i); ++r)
            for (long w = 0; w < words; ++w) out[w * PANEL + r] = s.rows[i + r][w];
    }
}

// Dimensions across: panel p, word w, column c holds dimension 32 p + c of the keys that share word w.
INLINE void pack_values_bf16(const KvPlanes& kv, const PackedChunk& s, const Ahead& ahead) {
    static const uint16_t zeros[1024] = {};
    const long count = s.places.count, dim = kv.head_dim;
    for (long i = 0; i < count; i += 2) {
        if (i % 16 == 0) prefetch(kv, kv.v, s, ahead, i, 16);
        const uint16_t* even = reinterpret_cast<const uint16_t*>(s.rows[i]);
        const uint16_t* odd = i + 1 < count ? reinterpret_cast<const uint16_t*>(s.rows[i + 1]) : zeros;
        int32_t* out = s.v + (i / 2) * PANEL;
        long d = 0;
        for (; d + LANES <= dim; d += LANES) {
            const vu low = load_halves(even + d), high = load_halves(odd + d) << 16;
            *reinterpret_cast<vi_at*>(out + (d / PANEL) * (CHUNK / 2) * PANEL + d % PANEL) = (vi)(low | high);
        }
        for (; d < dim; ++d)
            out[(d / PANEL) * (CHUNK / 2) * PANEL + d % PANEL] = int32_t(even[d] | uint32_t(odd[d]) << 16);
    }
}

INLINE void pack_values_f32(const KvPlanes& kv, const PackedChunk& s, const Ahead& ahead) {
    const long count = s.places.count, dim = kv.head_dim;
    for (long i = 0; i < count; ++i) {
        if (i % 16 == 0) prefetch(kv, kv.v, s, ahead, i, 16);
        for (long d = 0; d < dim; d += PANEL)
            __builtin_memcpy(s.v + ((d / PANEL) * CHUNK + i) * PANEL, s.rows[i] + d, least(PANEL, dim - d) * 4);
    }
}

// Packs one head of the chunk at s.places.
INLINE void pack_head(const KvPlanes& kv, long head, const Ahead& ahead, PackedChunk& s) {
    gather(kv, kv.k, kv.k_scale, head, s, s.k_scale);
    pack_keys(kv, s, ahead, words_of(product_kind(kv), kv.head_dim));
    gather(kv, kv.v, kv.v_scale, head, s, s.v_scale);
    if (product_kind(kv) == KIND_BF16)
        pack_values_bf16(kv, s, ahead);
    else
        pack_values_f32(kv, s, ahead);
}

}  // namespace

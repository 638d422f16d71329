// One chunk of paged keys and values of one KV head as the right side of a register tile: keys gathered and laid out
// so, values too unless they are multiplied where they lie.
//
// INT8 values are widened exactly to bfloat16, so that every stored kind but float32 multiplies as bfloat16 pairs.
#pragma once

#include "rows.h"

namespace {

constexpr long CHUNK = 128;  // keys

// Where the keys of a chunk lie in a plane, for KV head 0: counted in rows of one head, and in bytes.
struct Places {
    long count;
    long at[CHUNK];
    long offset[CHUNK];
};

struct PackedChunk {
    int32_t* k;      // [CHUNK / 32][words][32], keys across
    int32_t* v;      // [padded dim / 32][CHUNK / per word][32], dimensions across
    uint16_t* wide;  // [CHUNK][padded dim], int8 values as bfloat16
    float k_scale[CHUNK], v_scale[CHUNK];
    float v_top[CHUNK];  // of packed bytes: the largest of `value_bits` so far
    const int32_t* rows[CHUNK];
    Places places;  // of this chunk
    Places coming;  // of the one packed after it
};

INLINE long padded_dim(const KvPlanes& kv) { return round_up(kv.head_dim, PANEL); }

INLINE void find_places(const KvPlanes& kv, const int32_t* table, long key0, long count, Places& places) {
    long block = key0 / kv.block_size, offset = key0 % kv.block_size;
    for (long i = 0; i < count; ++block, offset = 0) {
        const long stop = least(count, i + kv.block_size - offset);
        long place = (long(table[block]) * kv.block_size + offset) * kv.kv_heads;
        for (; i < stop; ++i, place += kv.kv_heads) {
            places.at[i] = place;
            places.offset[i] = place * kv.row_bytes;
        }
    }
    places.count = count;
}

// The part of the coming chunk that is fetched while one head of this chunk is computed: its keys [at, last), with all
// the heads that will be used of it, which lie side by side. A few keys at a time between pieces of arithmetic, and
// into the second cache: the first waits for two dozen lines at most, and what is used now has to wait behind them.
struct Ahead {
    const KvPlanes& kv;
    const Places& places;
    long head, heads, at, last;

    INLINE void fetch(long keys) {
        const long stop = least(at + keys, last), bytes = kv.row_bytes * heads;
        for (; at < stop; ++at) {
            const long first = places.offset[at] + head * kv.row_bytes;
            for (long byte = first; byte < first + bytes; byte += 64) {
                __builtin_prefetch(static_cast<const char*>(kv.k) + byte, 0, 2);
                __builtin_prefetch(static_cast<const char*>(kv.v) + byte, 0, 2);
            }
        }
    }
    // Keys that are left, for each of so many pieces.
    INLINE long each(long pieces) const { return (last - at + pieces - 1) / pieces; }
};

// Points s.rows at one head's rows of a plane; of int8 rows scales are collected, and those that are not multiplied as they
// are are widened to bfloat16.
INLINE void gather(const KvPlanes& kv, const void* plane, const float* scales, long head, PackedChunk& s,
                   float* scale_out) {
    const Places& places = s.places;
    const long dim = kv.head_dim, padded = padded_dim(kv), bytes = kv.row_bytes;
    if (kv.kind != KIND_INT8 || by_bytes(kv)) {
        const char* first = static_cast<const char*>(plane) + head * bytes;
        for (long i = 0; i < places.count; ++i)
            s.rows[i] = reinterpret_cast<const int32_t*>(first + places.offset[i]);
        for (long i = 0; kv.kind == KIND_INT8 && i < places.count; ++i)
            scale_out[i] = scales[(places.at[i] + head) * kv.scale_stride];
        return;
    }
    for (long i = 0; i < places.count; ++i) {
        uint16_t* row = s.wide + i * padded;
        const int8_t* from = static_cast<const int8_t*>(plane) + (places.at[i] + head) * bytes;
        widen_int8(from, dim, row);
        s.rows[i] = reinterpret_cast<const int32_t*>(row);
        scale_out[i] = scales[(places.at[i] + head) * kv.scale_stride];
    }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// 8 rows of 8 words from `at` on, transposed: out[j][i] = rows[i][at + j], out rows 32 words apart.
INLINE void transpose_8(const int32_t* const* rows, long at, int32_t* out) {
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {  // words 0 to 3 of rows i and i + 4, then words 4 to 7
        const float* const row = reinterpret_cast<const float*>(rows[i % 4] + at + i / 4 * 4);
        const float* const other = reinterpret_cast<const float*>(rows[i % 4 + 4] + at + i / 4 * 4);
        a[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row)), _mm_loadu_ps(other), 1);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
        const __m256d left = (__m256d)b[j / 4 * 4 + j / 2 % 2], right = (__m256d)b[j / 4 * 4 + j / 2 % 2 + 2];
        _mm256_storeu_pd(reinterpret_cast<double*>(out + j * PANEL),
                         j % 2 ? _mm256_unpackhi_pd(left, right) : _mm256_unpacklo_pd(left, right));
    }
}
#endif

// 16 rows of 16 words from `at` on, transposed: out[j][i] = rows[i][at + j], out rows 32 words apart.
INLINE void transpose_16(const int32_t* const* rows, long at, int32_t* out) {
#if defined(__AVX512F__)
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
#elif defined(__AVX2__)
    for (int w = 0; w < 16; w += 8)
        for (int r = 0; r < 16; r += 8) transpose_8(rows + r, at + w, out + w * PANEL + r);
#else
    for (long r = 0; r < 16; ++r)
        for (long w = 0; w < 16; ++w) out[w * PANEL + r] = rows[r][at + w];
#endif
}

// Keys across: panel p, word w, column c holds word w of key 32 p + c. Columns past `count` are left as they are: the
// mask throws their scores away.
INLINE void pack_keys(const PackedChunk& s, Ahead& ahead, long words) {
    const long count = s.places.count, fetched = ahead.each(count / 8 + 1);
    for (long i = 0; i < count; i += 16) {
        ahead.fetch(fetched);
        int32_t* out = s.k + (i / PANEL) * words * PANEL + i % PANEL;
        if (words % 16 == 0 && i + 16 <= count) {
            for (long w = 0; w < words; w += 16) transpose_16(s.rows + i, w, out + w * PANEL);
            continue;
        }
        for (long r = 0; r < least(16, count - i); ++r)
            for (long w = 0; w < words; ++w) out[w * PANEL + r] = s.rows[i + r][w];
    }
}

// Stands for the values of a key past the last.
alignas(64) const uint16_t NO_VALUES[1024] = {};

#if defined(__AVX512BW__)
// Which of two vectors' 64 halves go side by side to the words of the first 16 dimensions, and of the second.
struct Interleaved {
    alignas(64) uint16_t half[2][32];
    constexpr Interleaved() : half() {
        for (int i = 0; i < 32; ++i) {
            half[i / 16][i % 16 * 2] = uint16_t(i);
            half[i / 16][i % 16 * 2 + 1] = uint16_t(32 + i);
        }
    }
};
constexpr Interleaved INTERLEAVED;
#endif

// Vector v of dimensions [d, d + 32) of two keys side by side: lane j holds dimension d + v LANES + j of both.
INLINE vi pair_values(const uint16_t* even, const uint16_t* odd, long d, int v) {
#if defined(__AVX512BW__)
    return (vi)_mm512_permutex2var_epi16(_mm512_loadu_si512(even + d), _mm512_load_si512(INTERLEAVED.half[v]),
                                         _mm512_loadu_si512(odd + d));
#else
    return (vi)(load_halves(even + d + v * LANES) | load_halves(odd + d + v * LANES) << 16);
#endif
}

// The same as the right side of a product.
INLINE DotBf16::Right pair_right(const uint16_t* even, const uint16_t* odd, long d, int v) {
#if defined(__AVX512BW__)
    return DotBf16::right(pair_values(even, odd, d, v));
#else
    return {bits((vi)(load_halves(even + d + v * LANES) << 16)), bits((vi)(load_halves(odd + d + v * LANES) << 16))};
#endif
}

INLINE const uint16_t* values_of(const PackedChunk& s, long key) {
    return key < s.places.count ? reinterpret_cast<const uint16_t*>(s.rows[key]) : NO_VALUES;
}

// Dimensions across: panel p, word w, column c holds dimension 32 p + c of the keys that share word w.
INLINE void pack_values_bf16(const KvPlanes& kv, const PackedChunk& s, Ahead& ahead) {
    const long count = round_up(s.places.count, 2 * VALUE_WORDS), dim = kv.head_dim;
    const long fetched = ahead.each(count / 16 + 1);
    for (long i = 0; i < count; i += 2) {
        if (i % 16 == 0) ahead.fetch(fetched);
        const uint16_t *even = values_of(s, i), *odd = values_of(s, i + 1);
        int32_t* out = s.v + (i / 2) * PANEL;
        long d = 0;
        for (; d + PANEL <= dim; d += PANEL, out += (CHUNK / 2) * PANEL)
            for (int v = 0; v < NV; ++v) *reinterpret_cast<vi_at*>(out + v * LANES) = pair_values(even, odd, d, v);
        for (; d + LANES <= dim; d += LANES)
            *reinterpret_cast<vi_at*>(out + d % PANEL) = (vi)(load_halves(even + d) | load_halves(odd + d) << 16);
        for (; d < dim; ++d) out[d % PANEL] = int32_t(even[d] | uint32_t(odd[d]) << 16);
    }
}

// out[r][0:32 PANELS] = p[r] . values from dimension d on, for the keys of `words` words, as they lie: what a tile over
// packed values gives, for rows so few that packing would cost more.
template <int ROWS, int PANELS>
void tile_values(const int32_t* p, const PackedChunk& s, long d, long words, Ahead& ahead, int32_t* out, long ldo) {
    const long fetched = ahead.each(words);
    walk<DotBf16, ROWS, PANELS * NV, false>(
        p, CHUNK, words, out, ldo,
        [&](long k) {
            const uint16_t *even = values_of(s, 2 * k) + d, *odd = values_of(s, 2 * k + 1) + d;
            return [=](int j) { return pair_right(even, odd, (j / NV) * PANEL, j % NV); };
        },
        [&](long) {
            if (fetched) ahead.fetch(fetched);
        });
}

typedef void (*ValueTile)(const int32_t*, const PackedChunk&, long, long, Ahead&, int32_t*, long);

template <int PANELS, int... ROWS_LESS_1>
INLINE ValueTile pick_values(long rows, std::integer_sequence<int, ROWS_LESS_1...>) {
    static constexpr ValueTile tiles[] = {
        tile_values<ROWS_LESS_1 + 1, (ROWS_LESS_1 < pair_rows(KIND_BF16) ? PANELS : 1)>...};
    return tiles[rows - 1];
}

// `multiply` by the chunk's values in place: out [rows][32 * panels] = p . values.
INLINE void multiply_values(long rows, const int32_t* p, const PackedChunk& s, long words, long panels, Ahead& ahead,
                            float* out, long ldo) {
    constexpr auto all = std::make_integer_sequence<int, TILE_ROWS>();
    int32_t* raw = reinterpret_cast<int32_t*>(out);
    long panel = 0;
    if (rows <= pair_rows(KIND_BF16))
        for (; panel + 2 <= panels; panel += 2)
            pick_values<2>(rows, all)(p, s, panel * PANEL, words, ahead, raw + panel * PANEL, ldo);
    for (; panel < panels; ++panel)
        pick_values<1>(rows, all)(p, s, panel * PANEL, words, ahead, raw + panel * PANEL, ldo);
}

// Bytes: a word holds one dimension of four keys, and its place among 16 is where weights end up when they are packed.
constexpr long BYTE_WORDS = 16, BYTE_KEYS = 4 * BYTE_WORDS;  // multiplied at once

INLINE long byte_word(long quad) { return quad / BYTE_WORDS * BYTE_WORDS + quad % 4 * 4 + quad % BYTE_WORDS / 4; }

// Four vectors of four blocks each with rows and columns exchanged.
#if defined(__AVX512F__)
INLINE void exchange_blocks(const __m512i (&in)[4], __m512i (&out)[4]) {
    const __m512i ab = _mm512_shuffle_i32x4(in[0], in[1], 0x44), AB = _mm512_shuffle_i32x4(in[0], in[1], 0xee);
    const __m512i ce = _mm512_shuffle_i32x4(in[2], in[3], 0x44), CE = _mm512_shuffle_i32x4(in[2], in[3], 0xee);
    out[0] = _mm512_shuffle_i32x4(ab, ce, 0x88);
    out[1] = _mm512_shuffle_i32x4(ab, ce, 0xdd);
    out[2] = _mm512_shuffle_i32x4(AB, CE, 0x88);
    out[3] = _mm512_shuffle_i32x4(AB, CE, 0xdd);
}
#endif

// One word of keys whose rows are given, [dim]. Dimensions come in order, or, for less work, each 64 of them as four
// blocks of a vector that `exchange_blocks` puts in order.
template <bool IN_ORDER>
INLINE void lay_quad(const char* const* rows, long dim, int32_t* out) {
#if defined(__AVX512BW__)
#pragma GCC unroll 2
    for (long d = 0; d < dim; d += BYTE_DIMS) {
        const auto row = [&](int i) { return _mm512_loadu_si512(rows[i] + d); };
        const __m512i a = row(0), b = row(1), c = row(2), e = row(3);
        const __m512i ab = _mm512_unpacklo_epi8(a, b), AB = _mm512_unpackhi_epi8(a, b);
        const __m512i ce = _mm512_unpacklo_epi8(c, e), CE = _mm512_unpackhi_epi8(c, e);
        const __m512i blocks[4] = {_mm512_unpacklo_epi16(ab, ce), _mm512_unpackhi_epi16(ab, ce),
                                   _mm512_unpacklo_epi16(AB, CE), _mm512_unpackhi_epi16(AB, CE)};
        __m512i ordered[4];
        if (IN_ORDER) exchange_blocks(blocks, ordered);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) _mm512_storeu_si512(out + d + i * LANES, IN_ORDER ? ordered[i] : blocks[i]);
    }
#endif
}

// A key's scale of values as bits, in their order; NaN where that or its scale of keys is infinite, less than 0 or no
// number: no row that sees such a key has a result.
constexpr uint32_t INFINITE_BITS = 0x7f800000, NAN_BITS = 0x7fc00000;
INLINE uint32_t value_bits(float k_scale, float v_scale) {
    uint32_t k, v;
    __builtin_memcpy(&k, &k_scale, 4);
    __builtin_memcpy(&v, &v_scale, 4);
    return k >= INFINITE_BITS || v >= INFINITE_BITS ? NAN_BITS : v;
}

// Dimensions across: word w of [CHUNK / 4][dim]. Keys past the last have weights of 0, and any values.
INLINE void pack_value_bytes(const KvPlanes& kv, PackedChunk& s, Ahead& ahead) {
    const long count = s.places.count, fetched = ahead.each(count / 16 + 1);
    for (long i = 0; i < count; i += 4) {
        if (i % 16 == 0) ahead.fetch(fetched);
        const char* rows[4];
        for (long j = 0; j < 4; ++j) rows[j] = reinterpret_cast<const char*>(s.rows[least(i + j, count - 1)]);
        lay_quad<true>(rows, kv.head_dim, s.v + byte_word(i / 4) * kv.head_dim);
    }
    uint32_t top = 0;
    for (long i = 0; i < count; ++i) {
        top = value_bits(s.k_scale[i], s.v_scale[i]) > top ? value_bits(s.k_scale[i], s.v_scale[i]) : top;
        __builtin_memcpy(s.v_top + i, &top, 4);
    }
}

INLINE void pack_values_f32(const KvPlanes& kv, const PackedChunk& s, Ahead& ahead) {
    const long count = s.places.count, dim = kv.head_dim, fetched = ahead.each(count / 16 + 1);
    for (long i = 0; i < count; ++i) {
        if (i % 16 == 0) ahead.fetch(fetched);
        for (long d = 0; d < dim; d += PANEL)
            __builtin_memcpy(s.v + ((d / PANEL) * CHUNK + i) * PANEL, s.rows[i] + d, least(PANEL, dim - d) * 4);
    }
}

// Values of one head of the chunk at s.places, where its keys have been packed. `in_place`: only s.rows of them.
INLINE void take_values(const KvPlanes& kv, long head, bool in_place, Ahead& ahead, PackedChunk& s) {
    gather(kv, kv.v, kv.v_scale, head, s, s.v_scale);
    if (in_place) return;
    if (product_kind(kv) == KIND_BF16)
        pack_values_bf16(kv, s, ahead);
    else if (product_kind(kv) == KIND_INT8)
        pack_value_bytes(kv, s, ahead);
    else
        pack_values_f32(kv, s, ahead);
}

// Packs one head's keys of the chunk at s.places; its values are taken next.
INLINE void take_keys(const KvPlanes& kv, long head, Ahead& ahead, PackedChunk& s) {
    gather(kv, kv.k, kv.k_scale, head, s, s.k_scale);
    pack_keys(s, ahead, words_of(product_kind(kv), kv.head_dim));
}

}  // namespace

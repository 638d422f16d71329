// Attention's products of int8 keys and values as they are, by AMX: what they are multiplied by has 16 bits, whose high
// and low bytes are rows of one product. It knows neither chunks nor where keys lie.
//
// A query is 2^e (256 high + low), both signed. A weight and its value's scale are a share of what the largest may be of
// the keys a row sees in a chunk, (256 high + low) / WHOLE, both unsigned. So what a chunk sums up errs by 1e-4 of the
// largest value there as a rule, where bfloat16 weights err by 4e-3 of each value: more than they only in sums that are
// less than a hundredth of that value. Sums of such products are exact, and do not depend on the rows and keys beside them.
#pragma once

#include "item.h"

namespace {

#if defined(__AMX_TILE__)
constexpr float WHOLE = 65500.0f;       // less than 2^16 by more than a weight exceeds 1
constexpr long P_WORDS = CHUNK / 4;     // of a row's high bytes, and of its low ones

// Products of a tile: its rows' high bytes, then their low ones, in rows that lie side by side.
INLINE int32_t* byte_scores(const HeadRows& h, const AttentionScratch& s) {
    return reinterpret_cast<int32_t*>(s.scores) + 2 * h.scored * CHUNK;
}
INLINE int32_t* byte_parts(const HeadRows& h, long dim, const AttentionScratch& s) {
    return reinterpret_cast<int32_t*>(s.part) + 2 * h.scored * dim;
}
INLINE int32_t* byte_weights(const HeadRows& h, const AttentionScratch& s) { return s.p + h.scored * CHUNK; }
INLINE const int32_t* byte_queries(const HeadRows& h, long words, const AttentionScratch& s) {
    return s.q + 2 * h.at * words;
}

// The item's encoded queries from q [T, heads, query_words] to where `byte_queries` has them.
INLINE void take_byte_queries(const KvPlanes& kv, const AttentionShape& shape, const Item& item, const int32_t* q,
                              AttentionScratch& s) {
    const long group = group_of(kv, shape), rows = item.segment.tokens * group, words = kv.head_dim / 4;
    for (long h = 0; h < item.heads; ++h)
        for (long i = 0; i < rows; ++i) {
            const long row0 = i / TILE_ROWS * TILE_ROWS, count = least(TILE_ROWS, rows - row0);
            const long token = item.segment.row + i / group, head = (item.head + h) * group + i % group;
            const int32_t* const from = q + (token * shape.heads + head) * query_words(kv);
            int32_t* const high = s.q + 2 * (h * rows + row0) * words + (i - row0) * words;
            __builtin_memcpy(high, from, words * 4);
            __builtin_memcpy(high + count * words, from + words, words * 4);
            __builtin_memcpy(s.q_scale + h * rows + i, from + 2 * words, 4);
        }
}

// The largest of `value_bits` of the keys [low, high).
INLINE float largest_scale(const PackedChunk& s, long low, long high) {
    const __m512i infinite = _mm512_set1_epi32(INFINITE_BITS);
    __m512i best = _mm512_setzero_si512();
    for (long j = low / LANES * LANES; j < high; j += LANES) {
        const long first = most(low - j, 0), count = least(high - j, LANES);
        const __mmask16 seen = __mmask16((1u << count) - (1u << first));
        const __m512i k = _mm512_maskz_loadu_epi32(seen, s.k_scale + j), v = _mm512_maskz_loadu_epi32(seen, s.v_scale + j);
        const __mmask16 wrong = _mm512_cmpge_epu32_mask(k, infinite) | _mm512_cmpge_epu32_mask(v, infinite);
        best = _mm512_max_epi32(best, _mm512_mask_blend_epi32(wrong, v, _mm512_set1_epi32(NAN_BITS)));
    }
    return bits(splat(max_lanes((vi)best)))[0];
}

// Numbers for each of 64 keys as their high and their low bytes, in the order of `byte_word`. What is below 0 or no
// number becomes 0.
INLINE void store_bytes(const vf* numbers, int32_t* high, int32_t* low) {
    const auto whole = [&](int i) { return _mm512_cvtps_epi32((__m512)numbers[i]); };
    const __m512i ab = _mm512_packus_epi32(whole(0), whole(1)), ce = _mm512_packus_epi32(whole(2), whole(3));
    const __m512i byte = _mm512_set1_epi16(0xff);
    _mm512_storeu_si512(low, _mm512_packus_epi16(_mm512_and_si512(ab, byte), _mm512_and_si512(ce, byte)));
    _mm512_storeu_si512(high, _mm512_packus_epi16(_mm512_srli_epi16(ab, 8), _mm512_srli_epi16(ce, 8)));
}

// `mask_scores` of sums of bytes: scores take the place of those of high bytes.
INLINE vf mask_byte_scores(int32_t* high, const int32_t* low, long first, long last, long padded, const float* k_scale) {
    float* const score = reinterpret_cast<float*>(high);
    vf best = splat(-__builtin_inff());
    for (long j = 0; j < padded; j += LANES) {
        const vf sum = to_float((load(high + j) << 8) + load(low + j)) * load(k_scale + j);
        store(score + j, sum);
        best = maximum(sum, best);  // what is no number counts for nothing, wherever it is
    }
    return first <= 0 && last >= padded ? best : mask_scores(score, first, last, padded, nullptr);
}

// The power of two, from 2^-100 on, that no scale up to `top` exceeds; NaN for what is no number.
INLINE float whole_scale(float top) {
    if (!(top < __builtin_inff())) return __builtin_nanf("");
    const float up = bits(splat((bits(splat(top))[0] + 0x7fffff) & ~0x7fffff))[0];
    return up > 0x1p-100f ? up : 0x1p-100f;
}

// Scores of a tile's rows, each masked to the keys it sees, and the largest of each as `max_of_rows` wants them;
// `whole` [rows] is the scale that a whole weight stands for. `v_top`: of the chunk, or null.
INLINE void see_keys(const KvPlanes& kv, const AttentionShape& shape, const Item& item, const HeadRows& h, long key0,
                     long keys, const float* v_top, const AttentionScratch& s, vf* largest, float* whole) {
    const long group = group_of(kv, shape), padded = round_up(keys, BYTE_KEYS);
    for (long r = 0, before = -1; r < h.rows; ++r) {
        const long position = item.segment.position + (h.row0 + r) / group;
        const long low = first_visible(shape, position) - key0, high = least(keys, position + 1 - key0);
        int32_t* const score = byte_scores(h, s) + r * CHUNK;
        const int32_t* const others = score + h.rows * CHUNK;
        largest[r] = padded == CHUNK ? mask_byte_scores(score, others, low, high, CHUNK, s.chunk.k_scale)
                                     : mask_byte_scores(score, others, low, high, padded, s.chunk.k_scale);
        if (position == before)
            whole[r] = whole[r - 1];
        else if (v_top && low <= 0 && high > 0)
            whole[r] = whole_scale(v_top[high - 1]);
        else
            whole[r] = whole_scale(largest_scale(s.chunk, most(low, 0), high));
        before = position;
    }
}

// `weigh_rows`; `value_scale` [rows] is what sums of weights' bytes by values are multiplied by.
INLINE Weights weigh_bytes(const KvPlanes& kv, const AttentionShape& shape, const Item& item, const HeadRows& h,
                           long key0, long keys, const float* v_top, AttentionScratch& s, float* value_scale) {
    const long padded = round_up(keys, BYTE_KEYS);
    alignas(64) float factor[LANES] = {}, best[LANES], share[CHUNK], share_of = 0.0f;  // of a whole weight, by key
    vf folded[LANES] = {};
    see_keys(kv, shape, item, h, key0, keys, v_top, s, folded, value_scale);
    for (long r = 0; r < h.rows; ++r) factor[r] = shape.scale * 1.44269504f * s.q_scale[h.at + r];  // to log2 units
    const vf top = max_of_rows(folded, h.rows);
    store(best, choose(top > -__builtin_inff(), top, vf{}));
    for (long r = 0; r < h.rows; ++r) {
        if (r == 0 || value_scale[r] != share_of) {
            share_of = value_scale[r];
            for (long j = 0; j < padded; j += LANES) store(share + j, load(s.chunk.v_scale + j) * (WHOLE / value_scale[r]));
        }
        const float* const score = reinterpret_cast<const float*>(byte_scores(h, s) + r * CHUNK);
        int32_t* const p = byte_weights(h, s) + r * P_WORDS;
        vf total = {};
        for (long key = 0; key < padded; key += BYTE_KEYS) {
            vf number[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const long j = key + i * LANES;
                const vf weight = exp2_product(load(score + j) - splat(best[r]), splat(factor[r]));
                total = total + weight;
                number[i] = weight * load(share + j);
            }
            store_bytes(number, p + key / 4, p + h.rows * P_WORDS + key / 4);
        }
        folded[r] = total;
        value_scale[r] /= WHOLE;
        if (value_scale[r] != value_scale[r]) factor[r] = value_scale[r];  // so that no join takes it for nothing seen
    }
    return {top * load(factor), sum_of_rows(folded, h.rows)};
}

// Sums of a row's values in 64 dimensions from those of its bytes, in order whichever they lie in.
template <bool IN_ORDER>
INLINE void byte_sums(const int32_t* high, const int32_t* low, float scale, vf (&out)[4]) {
    __m512i sum[4], ordered[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sum[i] = (__m512i)((load(high + i * LANES) << 8) + load(low + i * LANES));
    if (!IN_ORDER) exchange_blocks(sum, ordered);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) out[i] = to_float((vi)(IN_ORDER ? sum[i] : ordered[i])) * splat(scale);
}

// `take_parts` of a tile's products.
template <bool IN_ORDER>
INLINE void take_byte_parts(const HeadRows& h, const Weights& weights, long dim, const float* value_scale,
                            AttentionScratch& s, const Parts& parts) {
    const int32_t* const sums = byte_parts(h, dim, s);
    const Joined to(h, weights, dim, s, parts);
    for (long r = 0; r < h.rows; ++r)
        for (long d = 0; d < dim; d += BYTE_DIMS) {
            const int32_t* const high = sums + r * dim + d;
            vf part[4];
            byte_sums<IN_ORDER>(high, high + h.rows * dim, value_scale[r], part);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) to.take(r, d + i * LANES, part[i]);
        }
}

// `attend_tile`, of a chunk whose keys and values are packed.
INLINE void attend_tile_bytes(const KvPlanes& kv, const AttentionShape& shape, const Item& item, const HeadRows& h,
                              long key0, long keys, AttentionScratch& s, const Parts& parts) {
    const long dim = kv.head_dim, words = dim / 4;
    const auto nothing = [](long, int) {};
    for (long key = 0; key < keys; key += BYTE_KEYS) {
        const int32_t* const packed = s.chunk.k + key * words;
        amx_64_columns<KIND_SIGNED, false>(
            2 * h.rows, byte_queries(h, words, s), words,
            [=](int j) { return packed + j / 2 * words * PANEL + j % 2 * AMX_COLUMNS; }, PANEL, words,
            byte_scores(h, s) + key, CHUNK, nothing);
    }
    float value_scale[TILE_ROWS];
    const Weights weights = weigh_bytes(kv, shape, item, h, key0, keys, s.chunk.v_top, s, value_scale);
    for (long d = 0; d < dim; d += BYTE_DIMS) {
        const int32_t* const packed = s.chunk.v + d;
        amx_64_columns<KIND_INT8, false>(
            2 * h.rows, byte_weights(h, s), P_WORDS, [=](int j) { return packed + j * AMX_COLUMNS; }, dim,
            round_up(keys, BYTE_KEYS) / 4, byte_parts(h, dim, s) + d, dim, nothing);
    }
    take_byte_parts<true>(h, weights, dim, value_scale, s, parts);
}
#else
INLINE void take_byte_queries(const KvPlanes&, const AttentionShape&, const Item&, const int32_t*, AttentionScratch&) {}
INLINE void attend_tile_bytes(const KvPlanes&, const AttentionShape&, const Item&, const HeadRows&, long, long,
                              AttentionScratch&, const Parts&) {}
#endif

}  // namespace

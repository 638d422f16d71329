// The softmax of a tile's rows over one chunk of keys, and how chunks are joined: a lane for each row where that saves
// work. It knows neither queries nor where keys lie.
//
// A row's sums and maxima are folded as `sum_lanes` and `max_lanes` fold them, so that its bits do not depend on how many
// rows there are.
#pragma once

#include "chunk.h"

namespace {

static_assert(TILE_ROWS <= LANES, "a lane for each row of a tile");

// Of up to LANES rows: lane r is row r.
struct Weights {
    vf top, total;  // maximum in log2 units, sum of 2^(score - top)
};

// The first `count` lanes; the others are 0.
INLINE vf load_first(const float* p, long count) {
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p);
#else
    vf v = {};
    for (long i = 0; i < count; ++i) v[i] = p[i];
    return v;
#endif
}

INLINE void store_first(float* p, long count, vf v) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1), (__m512)v);
#else
    for (long i = 0; i < count; ++i) p[i] = v[i];
#endif
}

#if defined(__AVX512F__)
constexpr long FEW_FOLDED = 4;  // up to so many rows are folded one by one

// Lane r is rows[r] folded by `op` [LANES], whose halves meet: four steps for all rows instead of four for each.
template <class Op>
INLINE vf fold_rows(const vf* rows, Op op) {
    __m512 quarter[4];  // of four rows, i and i + 4 and so on, four numbers each
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        __m512 half[2];
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            const __m512 a = (__m512)rows[i + 8 * j], b = (__m512)rows[i + 8 * j + 4];
            half[j] = op(_mm512_shuffle_f32x4(a, b, 0xee), _mm512_shuffle_f32x4(a, b, 0x44));
        }
        quarter[i] = op(_mm512_shuffle_f32x4(half[0], half[1], 0xdd), _mm512_shuffle_f32x4(half[0], half[1], 0x88));
    }
    __m512 pair[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const __m512d a = (__m512d)quarter[i], b = (__m512d)quarter[i + 2];
        pair[i] = op((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
    }
    const __m512 low = _mm512_unpacklo_ps(pair[0], pair[1]), high = _mm512_unpackhi_ps(pair[0], pair[1]);
    return (vf)op((__m512)_mm512_unpacklo_pd((__m512d)low, (__m512d)high),
                  (__m512)_mm512_unpackhi_pd((__m512d)low, (__m512d)high));
}
#endif

// Lane r is the largest of rows[r] [LANES], for the first `count`.
INLINE vf max_of_rows(const vf* rows, long count) {
#if defined(__AVX512F__)
    if (count > FEW_FOLDED) return fold_rows(rows, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
#endif
    vf out = {};
    for (long r = 0; r < count; ++r) out[r] = max_lanes(rows[r]);
    return out;
}

// Lane r is the sum of rows[r] [LANES], for the first `count`.
INLINE vf sum_of_rows(const vf* rows, long count) {
#if defined(__AVX512F__)
    if (count > FEW_FOLDED) return fold_rows(rows, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
#endif
    vf out = {};
    for (long r = 0; r < count; ++r) out[r] = sum_lanes(rows[r]);
    return out;
}

// Scores of one row over the first `padded` keys of a chunk, masked outside [low, high); the largest is the largest of
// what returns. For int8 KV the scale of each key goes into its score.
INLINE vf mask_scores(float* score, long low, long high, long padded, const float* k_scale) {
    const vf nothing = splat(-__builtin_inff());
    if (k_scale)
        for (long j = 0; j < padded; j += LANES) store(score + j, load(score + j) * load(k_scale + j));
    if (low > 0 || high < padded) {
        vi key;
        for (int i = 0; i < LANES; ++i) key[i] = i;
        for (long j = 0; j < padded; j += LANES, key += LANES)
            store(score + j, choose((key >= int32_t(low)) & (key < int32_t(high)), load(score + j), nothing));
    }
    vf best = nothing;
    for (long j = 0; j < padded; j += LANES) best = maximum(best, load(score + j));
    return best;
}

// Weights 2^(score * factor + base) of masked scores, exactly 0 for masked ones, encoded to p as `kind`; returns what
// their sum is the sum of. For int8 KV the scale of each value goes into its weight. A constant `padded` unrolls it.
INLINE vf weigh(const float* score, float base, long padded, float factor, int kind, const float* v_scale, int32_t* p) {
    uint16_t* const narrow = reinterpret_cast<uint16_t*>(p);
    vf total = {};
    const auto weight = [&](long j, auto exp2) {
        vf w = exp2(fma(load(score + j), splat(factor), splat(base)));
        total = total + w;
        if (v_scale) w = choose(w > 0.0f, w * load(v_scale + j), vf{});  // stale past the end
        return w;
    };
    const auto narrow_weight = [&](long j) { return weight(j, [](vf x) { return exp2_narrow(x); }); };
    long j = 0;
    for (; kind == KIND_BF16 && j + 2 * LANES <= padded; j += 2 * LANES) {
        const vf first = narrow_weight(j), second = narrow_weight(j + LANES);
        store_bf16_pair(narrow + j, first, second);
    }
    for (; j < padded; j += LANES) {
        if (kind == KIND_BF16)
            store_bf16(narrow + j, narrow_weight(j));
        else
            store(reinterpret_cast<float*>(p) + j, weight(j, [](vf x) { return exp2_vector(x); }));
    }
    return total;
}

// What a running result and one chunk's are multiplied by before they are added: one of both is always 1.
struct Factors {
    vf keep, add;
};

// The online-softmax join of a chunk's weights to running ones.
INLINE Factors join(const Weights& chunk, Weights& running) {
    const vi greater = chunk.top > running.top;
    const vf apart = choose(greater, running.top - chunk.top, chunk.top - running.top);
    const vf smaller = exp2_vector(apart), one = splat(1.0f);  // 0 where either has nothing
    const Factors factors = {choose(greater, smaller, one), choose(greater, one, smaller)};
    running.total = running.total * factors.keep + chunk.total * factors.add;
    running.top = choose(greater, chunk.top, running.top);
    return factors;
}

// Sums of values, joined to the running ones.
INLINE vf join_sums(vf part, float keep, float add, vf running) { return fma(part, splat(add), running * splat(keep)); }

}  // namespace

// Hadamard transforms of neighbouring inputs: what spreads a few huge activations over a block before it is quantized.
//
// y = x H, where H has the entries 1 and -1 in Sylvester's order, not divided by the root of their number. Inputs meet
// at a distance of 1 first, then of 2, 4 and so on, in every form and in serving.kernels.hadamard: all give the same
// bits.
#pragma once

#include "vector.h"

namespace {

#if defined(__AVX512F__)
constexpr int HELD = 16;  // vectors of a block that stay in registers
#else
constexpr int HELD = 8;
#endif

// Lane i becomes lane i ^ APART.
template <int APART>
INLINE vf swapped(vf v) {
#if defined(__AVX512F__)
    if constexpr (APART == 1) return (vf)_mm512_permute_ps((__m512)v, 0xb1);
    if constexpr (APART == 2) return (vf)_mm512_permute_ps((__m512)v, 0x4e);
    if constexpr (APART == 4) return (vf)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1);
    return (vf)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e);
#elif defined(__AVX2__)
    if constexpr (APART == 1) return (vf)_mm256_permute_ps((__m256)v, 0xb1);
    if constexpr (APART == 2) return (vf)_mm256_permute_ps((__m256)v, 0x4e);
    return (vf)_mm256_permute2f128_ps((__m256)v, (__m256)v, 0x01);
#else
    vf out;
    for (int i = 0; i < LANES; ++i) out[i] = v[i ^ APART];
    return out;
#endif
}

// Lanes APART from each other become their sum and their difference; so do, after them, those of all larger distances.
template <int APART>
INLINE vf within_lanes(vf v) {
    if constexpr (APART < LANES) {
        vf sign;
        for (int i = 0; i < LANES; ++i) sign[i] = i & APART ? -1.0f : 1.0f;
        return within_lanes<2 * APART>(fma(v, sign, swapped<APART>(v)));
    }
    return v;
}

// Vectors APART from each other become their sum and their difference; so do, after them, those of all larger distances.
template <int COUNT, int APART>
INLINE void across(vf (&v)[COUNT]) {
    if constexpr (APART < COUNT) {
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; ++i)
            if (!(i & APART)) {
                const vf a = v[i], b = v[i + APART];
                v[i] = a + b;
                v[i + APART] = a - b;
            }
        across<COUNT, 2 * APART>(v);
    }
}

// All distances within COUNT vectors.
template <int COUNT>
INLINE void hadamard_of(const float* x, float* out) {
    vf v[COUNT];
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; ++i) v[i] = within_lanes<1>(load(x + i * LANES));
    across<COUNT, 1>(v);
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; ++i) store(out + i * LANES, v[i]);
}

// One block of a power of two of inputs, LANES or more.
INLINE void hadamard_block(const float* x, long block, float* out) {
    long done = least(block, HELD * LANES);  // distances below are dealt with
    for (long i = 0; i < block; i += done) switch (done / LANES) {
        case 1: hadamard_of<1>(x + i, out + i); break;
        case 2: hadamard_of<2>(x + i, out + i); break;
        case 4: hadamard_of<4>(x + i, out + i); break;
        case 8: hadamard_of<8>(x + i, out + i); break;
        default: hadamard_of<HELD>(x + i, out + i);
    }
    for (; done < block; done *= 2)
        for (long first = 0; first < block; first += 2 * done)
            for (long i = first; i < first + done; i += LANES) {
                const vf a = load(out + i), b = load(out + i + done);
                store(out + i, a + b);
                store(out + i + done, a - b);
            }
}

// n inputs in blocks of a power of two from 16 on, which n is a multiple of; `out` may be x.
INLINE void hadamard(const float* x, long n, long block, float* out) {
    for (long i = 0; i < n; i += block) hadamard_block(x + i, block, out + i);
}

}  // namespace

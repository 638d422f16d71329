// Vector types of the form being compiled and the few operations every kernel needs. It knows nothing of tensors.
//
// Each form (AVX-512 with VNNI and BF16, AVX2, plain) is one translation unit over the same sources, told apart by
// the compiler's own feature macros. Everything lives in an unnamed namespace: an inline function compiled for
// AVX-512 must never be the one the linker keeps for the plain form.
#pragma once

#include <stdint.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

#define VECTOR(type, bytes, name)                                                 \
    typedef type name __attribute__((vector_size(bytes)));                        \
    typedef type name##_at __attribute__((vector_size(bytes), aligned(1), may_alias));

VECTOR(float, 4 * LANES, vf)       // float32 lanes
VECTOR(int32_t, 4 * LANES, vi)     // int32 lanes
VECTOR(uint32_t, 4 * LANES, vu)    // the same bits, shifted without sign
VECTOR(uint16_t, 2 * LANES, vh)    // bfloat16 bits
VECTOR(int8_t, LANES, vb)          // int8 lanes
#undef VECTOR

#define INLINE inline __attribute__((always_inline))

INLINE vf load(const float* p) { return *reinterpret_cast<const vf_at*>(p); }
INLINE void store(float* p, vf v) { *reinterpret_cast<vf_at*>(p) = v; }
INLINE vi load(const int32_t* p) { return *reinterpret_cast<const vi_at*>(p); }
INLINE vf splat(float x) { return x - vf{}; }
INLINE vi splat(int32_t x) { return x - vi{}; }
INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }
INLINE vf bits(vi v) { return (vf)v; }
INLINE vi bits(vf v) { return (vi)v; }
INLINE vf choose(vi mask, vf yes, vf no) { return bits((mask & bits(yes)) | (~mask & bits(no))); }

// The larger of two; b where either is not a number.
INLINE vf maximum(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// The larger of two.
INLINE vi maximum(vi a, vi b) {
#if defined(__AVX512F__)
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return a > b ? a : b;
#endif
}

// a * b + c in one rounding where the form has it. Contraction is off elsewhere, so that the same formula gives the
// same bits wherever it is inlined.
INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
INLINE vi magnitude(vf a) { return bits(a) & 0x7fffffff; }  // as bits, in the order of magnitudes; then NaN

constexpr float WHOLES = 12582912.0f;  // 1.5 2^23: a number added to it is rounded to a whole one, its lowest bits

// Round to the nearest integer, ties to even, for |x| < 2^22: the constant pushes the fraction out of the mantissa.
INLINE vi round_to_int(vf x) { return bits(x + WHOLES) - bits(splat(WHOLES)); }

// Halves are folded onto each other until one lane is left, in the same order in every form of a width.
INLINE float sum_lanes(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) v[i] += v[i + width];
    return v[0];
#endif
}

INLINE float max_lanes(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int i = 1; i < LANES; ++i) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

INLINE int32_t max_lanes(vi v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t best = v[0];
    for (int i = 1; i < LANES; ++i) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

// fraction 2^n, where `shifted` is n + WHOLES; 0 where x is less than `least` or not a number.
INLINE vf exp2_times(vf fraction, vf shifted, vf x, float least) {
#if defined(__AVX512F__)
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least), _CMP_GE_OQ);
    return (vf)_mm512_maskz_add_epi32(normal, (__m512i)fraction, _mm512_slli_epi32((__m512i)shifted, 23));
#else
    return choose(x >= least, bits(bits(fraction) + (bits(shifted) << 23)), vf{});
#endif
}

// 2^x for x <= 127; anything below -126, and what is not a number, gives 0. Relative error below 2e-7 (minimax
// polynomial, held to exactly 1 at 0).
INLINE vf exp2_vector(vf x) {
    const vf shifted = x + WHOLES;
    const vf r = x - (shifted - WHOLES);
    vf p = splat(1.3276472e-3f);
    p = fma(p, r, splat(9.6755410e-3f));
    p = fma(p, r, splat(5.5507131e-2f));
    p = fma(p, r, splat(2.4022120e-1f));
    p = fma(p, r, splat(6.9314694e-1f));
    return exp2_times(fma(p, r, splat(1.0f)), shifted, x, -126.0f);
}

// 2^r for r in [-0.5, 0.5] with a relative error below 1.1e-4: for what is rounded to bfloat16, whose error is up to 4e-3,
// or to 16 bits of the largest.
INLINE vf exp2_fraction(vf r) {
    vf p = splat(5.5009058e-2f);
    p = fma(p, r, splat(2.4221098e-1f));
    p = fma(p, r, splat(6.9328290e-1f));
    return fma(p, r, splat(1.0f));
}

// `exp2_vector` with that error.
INLINE vf exp2_narrow(vf x) {
    const vf shifted = x + WHOLES;
    return exp2_times(exp2_fraction(x - (shifted - WHOLES)), shifted, x, -126.0f);
}

// The same of a product, which is not rounded.
INLINE vf exp2_product(vf x, vf factor) {
    const vf shifted = fma(x, factor, splat(WHOLES));
    return exp2_times(exp2_fraction(fma(x, factor, WHOLES - shifted)), shifted, shifted, WHOLES - 126.0f);
}

INLINE float exp2_scalar(float x) { return exp2_vector(splat(x))[0]; }

INLINE vf silu(vf x) {
    const vf e = exp2_vector(maximum(x, splat(-87.0f)) * -1.44269504f);
    return x / (e + 1.0f);
}

// ---- bfloat16: kept as raw 16-bit patterns, rounded to nearest even ------------------------------------------------

INLINE float from_bf16(uint16_t h) {
    const uint32_t u = uint32_t(h) << 16;
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
}

INLINE uint16_t to_bf16(float f) {
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// LANES 16-bit patterns as the low halves of 32-bit lanes.
INLINE vu load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
    return __builtin_convertvector(*reinterpret_cast<const vh_at*>(p), vu);
#endif
}

// In the low halves of lanes.
INLINE vu rounded_bf16(vf v) {
    const vu u = (vu)v;
    return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

INLINE void store_bf16(uint16_t* p, vf v) {
#if defined(__AVX512BF16__)
    *reinterpret_cast<vh_at*>(p) = (vh)_mm512_cvtneps_pbh((__m512)v);
#else
    *reinterpret_cast<vh_at*>(p) = __builtin_convertvector(rounded_bf16(v), vh);
#endif
}

// The low halves of one vector's lanes after the other's, whose high halves are zero.
INLINE void store_halves_pair(uint16_t* p, vu first, vu second) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i halves = _mm256_packus_epi32((__m256i)first, (__m256i)second);  // of 128 bits each, in turns
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(halves, 0xd8));
#else
    *reinterpret_cast<vh_at*>(p) = __builtin_convertvector(first, vh);
    *reinterpret_cast<vh_at*>(p + LANES) = __builtin_convertvector(second, vh);
#endif
}

// One vector after the other.
INLINE void store_bf16_pair(uint16_t* p, vf first, vf second) {
#if defined(__AVX512BF16__)
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
    store_halves_pair(p, rounded_bf16(first), rounded_bf16(second));
#endif
}

// The low byte of each lane. GCC 12 takes __builtin_convertvector to and from int8 apart lane by lane.
INLINE void store_int8(int8_t* p, vi v) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
#else
    *reinterpret_cast<vb_at*>(p) = __builtin_convertvector(v, vb);
#endif
}

INLINE vf load_int8(const int8_t* p) {
#if defined(__AVX512F__)
    return to_float((vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return to_float((vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    return __builtin_convertvector(*reinterpret_cast<const vb_at*>(p), vf);
#endif
}

// int8 numbers as bfloat16, which holds them exactly.
INLINE void widen_int8(const int8_t* from, long n, uint16_t* to) {
    long i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        const vf first = load_int8(from + i), second = load_int8(from + i + LANES);
#if defined(__AVX512BF16__)
        store_bf16_pair(to + i, first, second);
#else
        store_halves_pair(to + i, (vu)first >> 16, (vu)second >> 16);
#endif
    }
    for (; i + LANES <= n; i += LANES) store_bf16(to + i, load_int8(from + i));
    for (; i < n; ++i) to[i] = to_bf16(from[i]);
}

INLINE long round_up(long n, long step) { return (n + step - 1) / step * step; }
INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long most(long a, long b) { return a > b ? a : b; }

}  // namespace

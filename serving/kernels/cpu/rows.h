// What happens to one row between two linear layers: norm, quantizing, rotary embedding, the write into KV.
//
// A row's result is a function of that row alone, in a fixed order of additions.
#pragma once

#include "hadamard.h"
#include "linear.h"

namespace {

// NaN where any is not a number, so that a row's scale tells of it, and what is computed with it.
INLINE float max_magnitude(const float* x, long n) {
    vi best = {};
    long i = 0;
    for (; i + LANES <= n; i += LANES) best = maximum(best, magnitude(load(x + i)));
    for (; i < n; ++i) best = maximum(best, magnitude(splat(x[i])));
    return bits(splat(max_lanes(best)))[0];
}

// Symmetric int8 of n values, each stored with `shift` added modulo 256; returns the scale. Largest magnitude -> 127.
INLINE float quantize(const float* x, long n, int8_t* out, int32_t shift) {
    const float top = max_magnitude(x, n);
    const float inverse = top > 0.0f ? 127.0f / top : 0.0f;
    long i = 0;
    for (; i + LANES <= n; i += LANES) store_int8(out + i, round_to_int(load(x + i) * inverse) + shift);
    for (; i < n; ++i) out[i] = int8_t(round_to_int(splat(x[i] * inverse))[0] + shift);
    return top / 127.0f;
}

INLINE void to_bf16_row(const float* x, long n, uint16_t* out) {
    long i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) store_bf16_pair(out + i, load(x + i), load(x + i + LANES));
    for (; i + LANES <= n; i += LANES) store_bf16(out + i, load(x + i));
    for (; i < n; ++i) out[i] = to_bf16(x[i]);
}

// One row of n float32 values as the words a linear layer of `kind` multiplies; the last word is padded with zeros.
INLINE void encode_row(int kind, const float* x, long n, int32_t* words, float* scale) {
    if (n % per_word(kind)) words[words_of(kind, n) - 1] = 0;
    if (kind == KIND_INT8)
        *scale = quantize(x, n, reinterpret_cast<int8_t*>(words), UNSIGNED_SHIFT);
    else if (kind == KIND_BF16)
        to_bf16_row(x, n, reinterpret_cast<uint16_t*>(words));
    else
        __builtin_memcpy(words, x, n * sizeof(float));
}

// `encode_row` for `next`, whose inputs are transformed first where it wants them so: into `room` [n], which may be x.
INLINE void encode_input(const Linear& next, const float* x, float* room, int32_t* words, float* scale) {
    if (next.rotation) {
        hadamard(x, next.inputs, next.rotation, room);
        x = room;
    }
    encode_row(next.kind, x, next.inputs, words, scale);
}

// out = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, "Root Mean Square Layer Normalization").
INLINE void rms_norm(const float* x, const float* weight, long n, float eps, float* out) {
    vf square = {};
    long i = 0;
    for (; i + LANES <= n; i += LANES) square = fma(load(x + i), load(x + i), square);
    float sum = sum_lanes(square);
    for (; i < n; ++i) sum += x[i] * x[i];
    const float inverse = 1.0f / __builtin_sqrtf(sum / float(n) + eps);
    for (i = 0; i + LANES <= n; i += LANES) store(out + i, load(x + i) * inverse * load(weight + i));
    for (; i < n; ++i) out[i] = x[i] * inverse * weight[i];
}

// Rotates pairs (i, i + half) of one head in place by the angles of its position.
INLINE void rotate(float* head, const float* cos, const float* sin, long half) {
    long i = 0;
    for (; i + LANES <= half; i += LANES) {
        const vf a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
        store(head + i, a * c - b * s);
        store(head + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        const float a = head[i], b = head[half + i];
        head[i] = a * cos[i] - b * sin[i];
        head[half + i] = b * cos[i] + a * sin[i];
    }
}

// Queries, keys and values of one token, from the qkv projection to where attention reads them.
struct Rotary {
    long heads, rotary_dim;
    const float* q_norm;  // [head_dim] or null
    const float* k_norm;
    float eps;
    const float* cos;  // [positions, rotary_dim / 2]
    const float* sin;
};

// Whether int8 keys and values are multiplied as they are: by AMX, where whole vectors hold them. What they are multiplied
// by has 16 bits then, whose high and low bytes are rows of one product (bytes.h).
constexpr long BYTE_DIMS = 64;
INLINE bool by_bytes(const KvPlanes& kv) {
    return TILED && kv.kind == KIND_INT8 && kv.head_dim % BYTE_DIMS == 0 && kv.head_dim <= 512;  // sums fit in int32
}

// Keys and values take part in products of this kind, whatever the KV stores.
INLINE int product_kind(const KvPlanes& kv) {
    return kv.kind == KIND_F32 ? KIND_F32 : by_bytes(kv) ? KIND_INT8 : KIND_BF16;
}

// Words of one head's encoded query.
INLINE long query_words(const KvPlanes& kv) {
    return by_bytes(kv) ? 2 * words_of(KIND_INT8, kv.head_dim) + 1 : words_of(product_kind(kv), kv.head_dim);
}

// A query as 2^e (256 high + low): words of the high bytes, of the low ones, and 2^e, or NaN where a number is none. The
// largest has 13 or 14 bits, so that what is decoded and encoded again is the same.
INLINE void encode_bytes(const float* x, long dim, int32_t* words) {
    constexpr int32_t BITS = 13, EXPONENT = 23, BIAS = 127, NO_NUMBER = 255;
    constexpr float UP = 1.0f + 0.75f / (2 << BITS);  // what would round up to a power of two counts as that
    int8_t* const high = reinterpret_cast<int8_t*>(words);
    const vi top = bits(splat(max_magnitude(x, dim) * UP));
    const int32_t exponent = int32_t(most(BITS + 1, top[0] >> EXPONENT & NO_NUMBER));
    const vf inverse = bits(splat((2 * BIAS + BITS - exponent) << EXPONENT));
    for (long d = 0; d < dim; d += LANES) {
        const vi number = round_to_int(load(x + d) * inverse);
        store_int8(high + d, (number + 128) >> 8);
        store_int8(high + dim + d, number);
    }
    const float scale = exponent == NO_NUMBER ? __builtin_nanf("") : bits(splat((exponent - BITS) << EXPONENT))[0];
    __builtin_memcpy(words + dim / 2, &scale, 4);
}

// One query [head_dim] as attention multiplies it, and back.
INLINE void encode_query(const KvPlanes& kv, const float* x, int32_t* words) {
    if (by_bytes(kv))
        encode_bytes(x, kv.head_dim, words);
    else
        encode_row(product_kind(kv), x, kv.head_dim, words, nullptr);
}

INLINE void decode_query(const KvPlanes& kv, const int32_t* words, float* x) {
    const long dim = kv.head_dim;
    const int8_t* const high = reinterpret_cast<const int8_t*>(words);
    float scale = 1.0f;
    if (by_bytes(kv)) __builtin_memcpy(&scale, words + dim / 2, 4);
    for (long d = 0; d < dim; ++d)
        if (by_bytes(kv))
            x[d] = float(256 * high[d] + high[dim + d]) * scale;
        else if (kv.kind == KIND_F32)
            x[d] = reinterpret_cast<const float*>(words)[d];
        else
            x[d] = from_bf16(reinterpret_cast<const uint16_t*>(words)[d]);
}

INLINE void write_plane(const KvPlanes& kv, void* plane, float* scales, long place, const float* x) {
    char* row = static_cast<char*>(plane) + place * kv.row_bytes;
    if (kv.kind == KIND_INT8)
        scales[place * kv.scale_stride] = quantize(x, kv.head_dim, reinterpret_cast<int8_t*>(row), 0);
    else if (kv.kind == KIND_BF16)
        to_bf16_row(x, kv.head_dim, reinterpret_cast<uint16_t*>(row));
    else
        __builtin_memcpy(row, x, kv.head_dim * sizeof(float));
}

// qkv [heads + 2 kv_heads, head_dim] is used up; q [heads, words] comes out encoded for the products of attention.
void rotate_and_write(const Rotary& r, const KvPlanes& kv, float* qkv, long position, long slot, int32_t* q) {
    const long half = r.rotary_dim / 2, dim = kv.head_dim, words = query_words(kv);
    const float *cos = r.cos + position * half, *sin = r.sin + position * half;
    for (long h = 0; h < r.heads + kv.kv_heads; ++h) {
        const float* norm = h < r.heads ? r.q_norm : r.k_norm;
        if (norm) rms_norm(qkv + h * dim, norm, dim, r.eps, qkv + h * dim);
        rotate(qkv + h * dim, cos, sin, half);
        if (h < r.heads) encode_query(kv, qkv + h * dim, q + h * words);
    }
    for (long h = 0; h < kv.kv_heads; ++h) {
        const float* k = qkv + (r.heads + h) * dim;
        write_plane(kv, kv.k, kv.k_scale, slot * kv.kv_heads + h, k);
        write_plane(kv, kv.v, kv.v_scale, slot * kv.kv_heads + h, k + kv.kv_heads * dim);
    }
}

}  // namespace

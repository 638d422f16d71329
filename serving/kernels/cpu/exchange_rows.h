// What the exchange does to the numbers of a row: quantize them, change their type, add them up. It knows no ranks.
#pragma once

#include <stdint.h>
#include <stdlib.h>  // says whether this is glibc
#include <string.h>

// Compiled for several CPUs, one of which is chosen when the library is loaded. All of them compute the same bits.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
#endif
#ifndef FOR_EACH_CPU
#define FOR_EACH_CPU
#endif

namespace {

enum Kind { INT8 = 1, BF16 = 2, F32 = 3 };

constexpr float LARGEST = 127.0f;     // as serving/kernels/int8.py
constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, half to even

int64_t item_bytes(int kind) { return kind == INT8 ? 1 : kind == BF16 ? 2 : 4; }

__attribute__((always_inline)) inline float widened(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

__attribute__((always_inline)) inline float widened(float value) { return value; }

uint16_t narrowed(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);  // NaN stays one
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// serving.kernels.int8.quantize_rows of one row, to the bit.
template <class Number>
__attribute__((always_inline)) inline float quantized(const Number* x, int64_t n, int8_t* out) {
    int32_t most = 0;  // magnitudes order as their bits do
    for (int64_t i = 0; i < n; ++i) {
        const float value = widened(x[i]);
        int32_t bits;
        memcpy(&bits, &value, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float largest;
    memcpy(&largest, &most, 4);
    const float inverse = largest > 0 ? LARGEST / largest : 0.0f;
    for (int64_t i = 0; i < n; ++i) {
        const float shifted = widened(x[i]) * inverse + ROUND;
        int32_t bits;
        memcpy(&bits, &shifted, 4);
        out[i] = static_cast<int8_t>(bits);  // the low byte of 0x4b400000 + integer
    }
    return largest / LARGEST;
}

FOR_EACH_CPU float quantize(const float* x, int64_t n, int8_t* out) { return quantized(x, n, out); }
FOR_EACH_CPU float quantize(const uint16_t* x, int64_t n, int8_t* out) { return quantized(x, n, out); }

void convert(const void* from, int kind, int64_t n, void* to, int to_kind) {
    if (kind == to_kind) {
        memcpy(to, from, n * item_bytes(kind));
    } else if (kind == F32) {
        const float* x = static_cast<const float*>(from);
        uint16_t* out = static_cast<uint16_t*>(to);
        for (int64_t i = 0; i < n; ++i) out[i] = narrowed(x[i]);
    } else {
        const uint16_t* x = static_cast<const uint16_t*>(from);
        float* out = static_cast<float*>(to);
        for (int64_t i = 0; i < n; ++i) out[i] = widened(x[i]);
    }
}

// sums = or += weight * row, each product rounded before it is added.
template <class Number>
__attribute__((always_inline)) inline void added(const Number* row, float weight, int64_t n, bool first, float* sums) {
    if (first)
        for (int64_t i = 0; i < n; ++i) sums[i] = widened(row[i]) * weight;
    else
        for (int64_t i = 0; i < n; ++i) sums[i] += widened(row[i]) * weight;
}

FOR_EACH_CPU void add_up(const float* row, float weight, int64_t n, bool first, float* sums) {
    added(row, weight, n, first, sums);
}

FOR_EACH_CPU void add_up(const uint16_t* row, float weight, int64_t n, bool first, float* sums) {
    added(row, weight, n, first, sums);
}

}  // namespace

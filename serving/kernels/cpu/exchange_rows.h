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

// What is done to eight numbers at once. Of 16 bfloat16 in eight words, the even ones are the low halves.
using Floats = float __attribute__((vector_size(32)));
using Words = uint32_t __attribute__((vector_size(32)));
using Halves = uint16_t __attribute__((vector_size(16)));
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half of a word lies first");

constexpr int64_t LANES = 8;
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

// The largest magnitude of a row. Magnitudes order as their bits do.
__attribute__((always_inline)) inline float largest_of(const float* x, int64_t n) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; ++i) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float largest;
    memcpy(&largest, &most, 4);
    return largest;
}

__attribute__((always_inline)) inline float largest_of(const uint16_t* x, int64_t n) {
    uint16_t most = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint16_t bits = x[i] & 0x7fff;
        most = bits > most ? bits : most;
    }
    return widened(most);
}

// The first numbers of a row times `inverse`, as integers, many at once: how many they are.
__attribute__((always_inline)) inline int64_t scaled(const float*, int64_t, float, int8_t*) { return 0; }

__attribute__((always_inline)) inline int64_t scaled(const uint16_t* x, int64_t n, float inverse, int8_t* out) {
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        Words words;
        memcpy(&words, x + i, sizeof words);
        const Floats even = reinterpret_cast<Floats>(words << 16) * inverse + ROUND;
        const Floats odd = reinterpret_cast<Floats>(words & 0xffff0000u) * inverse + ROUND;
        const Words low = reinterpret_cast<Words>(even) & 0xffu, high = (reinterpret_cast<Words>(odd) & 0xffu) << 8;
        const Halves pairs = __builtin_convertvector(low | high, Halves);
        memcpy(out + i, &pairs, sizeof pairs);
    }
    return i;
}

// serving.kernels.int8.quantize_rows of one row, to the bit.
template <class Number>
__attribute__((always_inline)) inline float quantized(const Number* x, int64_t n, int8_t* out) {
    const float largest = largest_of(x, n);
    const float inverse = largest > 0 ? LARGEST / largest : 0.0f;
    for (int64_t i = scaled(x, n, inverse, out); i < n; ++i) {
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

// Sums of numbers that lie one after the other; as many as fit registers together with a row of them.
struct FloatSums {
    static constexpr int64_t NUMBERS = 8 * LANES;
    Floats held[8];

    __attribute__((always_inline)) inline void add(const float* row, float weight, bool first) {
        for (int h = 0; h < 8; ++h) {
            Floats value;
            memcpy(&value, row + h * LANES, sizeof value);
            held[h] = first ? value * weight : held[h] + value * weight;
        }
    }

    __attribute__((always_inline)) inline void store(float* sums) const { memcpy(sums, held, sizeof held); }
};

// The same of bfloat16: sums of the even numbers, and of the odd ones, which need no shift.
struct HalfSums {
    static constexpr int64_t NUMBERS = 8 * LANES;
    Floats even[4], odd[4];

    __attribute__((always_inline)) inline void add(const uint16_t* row, float weight, bool first) {
        for (int h = 0; h < 4; ++h) {
            Words words;
            memcpy(&words, row + h * 2 * LANES, sizeof words);
            const Floats low = reinterpret_cast<Floats>(words << 16), high = reinterpret_cast<Floats>(words & 0xffff0000u);
            even[h] = first ? low * weight : even[h] + low * weight;
            odd[h] = first ? high * weight : odd[h] + high * weight;
        }
    }

    __attribute__((always_inline)) inline void store(float* sums) const {
        for (int h = 0; h < 4; ++h)
            for (int64_t i = 0; i < LANES; ++i) {
                sums[h * 2 * LANES + 2 * i] = even[h][i];
                sums[h * 2 * LANES + 2 * i + 1] = odd[h][i];
            }
    }
};

// sums = the rows times their weights, added in the order given, each product rounded before it is added.
template <class Sums, class Number>
__attribute__((always_inline)) inline void summed(const Number* const* rows, const float* weights, int64_t top_k,
                                                  int64_t n, float* sums) {
    int64_t i = 0;
    for (; i + Sums::NUMBERS <= n; i += Sums::NUMBERS) {
        Sums held;
        held.add(rows[0] + i, weights[0], true);
        for (int64_t k = 1; k < top_k; ++k) held.add(rows[k] + i, weights[k], false);
        held.store(sums + i);
    }
    for (; i < n; ++i) {
        float held = widened(rows[0][i]) * weights[0];
        for (int64_t k = 1; k < top_k; ++k) held += widened(rows[k][i]) * weights[k];
        sums[i] = held;
    }
}

FOR_EACH_CPU void add_up(const float* const* rows, const float* weights, int64_t top_k, int64_t n, float* sums) {
    summed<FloatSums>(rows, weights, top_k, n, sums);
}

FOR_EACH_CPU void add_up(const uint16_t* const* rows, const float* weights, int64_t top_k, int64_t n, float* sums) {
    summed<HalfSums>(rows, weights, top_k, n, sums);
}

}  // namespace

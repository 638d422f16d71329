// What the exchange does to the numbers of a row: quantize them, change their type, add them up. It knows no ranks.
#pragma once

#include <stdint.h>
#include <stdlib.h>  // says whether this is glibc
#include <string.h>

// Compiled for several CPUs, one of which is chosen when it is called. All of them compute the same bits. FOR_WIDE_CPUS
// are those whose registers have 64 bytes: where they are smaller, vectors of that size take three times as long.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define FOR_WIDE_CPUS __attribute__((target("arch=x86-64-v4")))
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v3", "default")))
#endif
#endif
#ifndef FOR_EACH_CPU
#define FOR_EACH_CPU
#endif

namespace {

enum Kind { INT8 = 1, BF16 = 2, F32 = 3 };

// What is done to eight or to sixteen numbers at once. Of bfloat16 in words, the even ones are the low halves.
struct Narrow {
    using Floats = float __attribute__((vector_size(32)));
    using Words = uint32_t __attribute__((vector_size(32)));
    using Halves = uint16_t __attribute__((vector_size(16)));
    static constexpr int64_t LANES = 8;
};

struct Wide {
    using Floats = float __attribute__((vector_size(64)));
    using Words = uint32_t __attribute__((vector_size(64)));
    using Halves = uint16_t __attribute__((vector_size(32)));
    static constexpr int64_t LANES = 16;
};

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half of a word lies first");

constexpr int64_t SUMMED = 64;        // numbers whose sums fit registers together with a row of them
constexpr int64_t LINE_BYTES = 64;    // that one prefetch brings
constexpr int64_t AHEAD_BYTES = 512;  // of a row between what is added and what is fetched
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
template <class V>
__attribute__((always_inline)) inline int64_t scaled(const float*, int64_t, float, int8_t*) {
    return 0;
}

template <class V>
__attribute__((always_inline)) inline int64_t scaled(const uint16_t* x, int64_t n, float inverse, int8_t* out) {
    int64_t i = 0;
    for (; i + 2 * V::LANES <= n; i += 2 * V::LANES) {
        typename V::Words words;
        memcpy(&words, x + i, sizeof words);
        const auto even = reinterpret_cast<typename V::Floats>(words << 16) * inverse + ROUND;
        const auto odd = reinterpret_cast<typename V::Floats>(words & 0xffff0000u) * inverse + ROUND;
        const auto low = reinterpret_cast<typename V::Words>(even) & 0xffu;
        const auto high = (reinterpret_cast<typename V::Words>(odd) & 0xffu) << 8;
        const auto pairs = __builtin_convertvector(low | high, typename V::Halves);
        memcpy(out + i, &pairs, sizeof pairs);
    }
    return i;
}

// serving.kernels.int8.quantize_rows of one row, to the bit.
template <class V, class Number>
__attribute__((always_inline)) inline float quantized(const Number* x, int64_t n, int8_t* out) {
    const float largest = largest_of(x, n);
    const float inverse = largest > 0 ? LARGEST / largest : 0.0f;
    for (int64_t i = scaled<V>(x, n, inverse, out); i < n; ++i) {
        const float shifted = widened(x[i]) * inverse + ROUND;
        int32_t bits;
        memcpy(&bits, &shifted, 4);
        out[i] = static_cast<int8_t>(bits);  // the low byte of 0x4b400000 + integer
    }
    return largest / LARGEST;
}

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

// Sums of SUMMED numbers that lie one after the other.
template <class V>
struct FloatSums {
    static constexpr int64_t COUNT = SUMMED / V::LANES;
    typename V::Floats held[COUNT];

    __attribute__((always_inline)) inline void add(const float* row, float weight, bool first) {
        for (int64_t h = 0; h < COUNT; ++h) {
            typename V::Floats value;
            memcpy(&value, row + h * V::LANES, sizeof value);
            held[h] = first ? value * weight : held[h] + value * weight;
        }
    }

    __attribute__((always_inline)) inline void store(float* sums) const { memcpy(sums, held, sizeof held); }
};

// The same of bfloat16: sums of the even numbers, and of the odd ones, which need no shift.
template <class V>
struct HalfSums {
    static constexpr int64_t COUNT = SUMMED / 2 / V::LANES;
    typename V::Floats even[COUNT], odd[COUNT];

    __attribute__((always_inline)) inline void add(const uint16_t* row, float weight, bool first) {
        for (int64_t h = 0; h < COUNT; ++h) {
            typename V::Words words;
            memcpy(&words, row + h * 2 * V::LANES, sizeof words);
            const auto low = reinterpret_cast<typename V::Floats>(words << 16);
            const auto high = reinterpret_cast<typename V::Floats>(words & 0xffff0000u);
            even[h] = first ? low * weight : even[h] + low * weight;
            odd[h] = first ? high * weight : odd[h] + high * weight;
        }
    }

    __attribute__((always_inline)) inline void store(float* sums) const {
        for (int64_t h = 0; h < COUNT; ++h)
            for (int64_t i = 0; i < V::LANES; ++i) {
                sums[(h * V::LANES + i) * 2] = even[h][i];
                sums[(h * V::LANES + i) * 2 + 1] = odd[h][i];
            }
    }
};

// Lines that are added soon: those a little further on in the row, and at its end the first of `next`. Processors fetch
// by themselves up to the end of a page, and a row has several. For rows of more than AHEAD_BYTES.
template <class Number>
__attribute__((always_inline)) inline void fetch(const Number* row, const Number* next, int64_t i, int64_t n) {
    constexpr int64_t ahead = AHEAD_BYTES / sizeof(Number);
    const char* first = reinterpret_cast<const char*>(i + ahead < n ? row + (i + ahead) : next + (i + ahead - n));
    for (size_t byte = 0; byte < SUMMED * sizeof(Number); byte += LINE_BYTES) __builtin_prefetch(first + byte);
}

// SUMMED sums, by non-temporal stores: past the caches, without reading what they overwrite. `sums` is at the beginning
// of a line. Needs registers of 64 bytes.
template <class Sums>
__attribute__((always_inline)) inline void store_past_caches(const Sums& held, float* sums) {
#ifdef FOR_WIDE_CPUS
    alignas(LINE_BYTES) float line[SUMMED];
    held.store(line);
    for (int64_t i = 0; i < SUMMED; i += Wide::LANES) {
        Wide::Floats values;
        memcpy(&values, line + i, sizeof values);
        asm volatile("vmovntps %1, %0" : "=m"(*reinterpret_cast<Wide::Floats*>(sums + i)) : "v"(values));
    }
#else
    held.store(sums);
#endif
}

// sums = the rows times their weights, added in the order given, each product rounded before it is added. `next` are
// the rows that are added after these.
template <class Sums, bool PAST_CACHES, class Number>
__attribute__((always_inline)) inline void summed(const Number* const* rows, const Number* const* next,
                                                  const float* weights, int64_t top_k, int64_t n, float* sums) {
    const bool fetches = n * static_cast<int64_t>(sizeof(Number)) > AHEAD_BYTES;
    int64_t i = 0;
    for (; i + SUMMED <= n; i += SUMMED) {
        Sums held;
        held.add(rows[0] + i, weights[0], true);
        if (fetches) fetch(rows[0], next[0], i, n);
        for (int64_t k = 1; k < top_k; ++k) {
            held.add(rows[k] + i, weights[k], false);
            if (fetches) fetch(rows[k], next[k], i, n);
        }
        if constexpr (PAST_CACHES) {
            store_past_caches(held, sums + i);
        } else {
            held.store(sums + i);
        }
    }
    for (; i < n; ++i) {
        float held = widened(rows[0][i]) * weights[0];
        for (int64_t k = 1; k < top_k; ++k) held += widened(rows[k][i]) * weights[k];
        sums[i] = held;
    }
}

// ---- for each CPU ----------------------------------------------------------------------------------------------------

using Half = uint16_t;  // bfloat16

FOR_EACH_CPU float quantize(const float* x, int64_t n, int8_t* out) { return quantized<Narrow>(x, n, out); }
FOR_EACH_CPU float quantize_narrow(const Half* x, int64_t n, int8_t* out) { return quantized<Narrow>(x, n, out); }

FOR_EACH_CPU void add_up(const float* const* rows, const float* const* next, const float* weights, int64_t top_k,
                         int64_t n, float* sums) {
    summed<FloatSums<Narrow>, false>(rows, next, weights, top_k, n, sums);
}

FOR_EACH_CPU void add_up_narrow(const Half* const* rows, const Half* const* next, const float* weights, int64_t top_k,
                                int64_t n, float* sums) {
    summed<HalfSums<Narrow>, false>(rows, next, weights, top_k, n, sums);
}

#ifdef FOR_WIDE_CPUS
FOR_WIDE_CPUS float quantize_wide(const Half* x, int64_t n, int8_t* out) { return quantized<Wide>(x, n, out); }

FOR_WIDE_CPUS void add_up_wide(const Half* const* rows, const Half* const* next, const float* weights, int64_t top_k,
                               int64_t n, float* sums) {
    summed<HalfSums<Wide>, false>(rows, next, weights, top_k, n, sums);
}

FOR_WIDE_CPUS void add_up_wide_past_caches(const Half* const* rows, const Half* const* next, const float* weights,
                                           int64_t top_k, int64_t n, float* sums) {
    summed<HalfSums<Wide>, true>(rows, next, weights, top_k, n, sums);
}

// Whether it has all of x86-64-v4.
bool is_wide() {
    static const bool found = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                              __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                              __builtin_cpu_supports("avx512vl");
    return found;
}
#else
constexpr auto quantize_wide = quantize_narrow;
constexpr auto add_up_wide = add_up_narrow, add_up_wide_past_caches = add_up_narrow;

bool is_wide() { return false; }
#endif

float quantize(const Half* x, int64_t n, int8_t* out) {
    return is_wide() ? quantize_wide(x, n, out) : quantize_narrow(x, n, out);
}

// With `past_caches` sums go to memory without a place in the caches where that can be: true where they did. Whoever
// reads them in another thread has to come after `order_stores` then.
bool add_up(const Half* const* rows, const Half* const* next, const float* weights, int64_t top_k, int64_t n,
            float* sums, bool past_caches) {
    if (!is_wide()) {
        add_up_narrow(rows, next, weights, top_k, n, sums);
        return false;
    }
    if (past_caches && n >= SUMMED && reinterpret_cast<uintptr_t>(sums) % LINE_BYTES == 0) {
        add_up_wide_past_caches(rows, next, weights, top_k, n, sums);
        return true;
    }
    add_up_wide(rows, next, weights, top_k, n, sums);
    return false;
}

// Sums of float32 results are stored as usual.
bool add_up(const float* const* rows, const float* const* next, const float* weights, int64_t top_k, int64_t n,
            float* sums, bool) {
    add_up(rows, next, weights, top_k, n, sums);
    return false;
}

// Stores after this come after those past the caches before it: x86-64 does not order them by itself.
void order_stores() {
#ifdef FOR_WIDE_CPUS
    asm volatile("sfence" ::: "memory");
#endif
}

}  // namespace

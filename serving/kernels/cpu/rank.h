// Finding tokens of one row by rank or by share of probability, without sorting the row.
//
// Everything is a function of the row alone, in a fixed order of additions. Shares are exp(y) in float32, 1 for the
// best token, and their sums float64. Values beyond a row's end read as -inf, and weigh nothing.
#pragma once

#include <float.h>

#include "vector.h"

namespace {

constexpr long GROUP = 16 * LANES;  // tokens whose maxima, a lane each, and whose sum of weights are remembered
constexpr float LOG2_E = 1.44269504f;
constexpr float INFINITE = __builtin_inff();

INLINE long groups_of(long n) { return (n + GROUP - 1) / GROUP; }

INLINE vf load_part(const float* p, long left) {
    if (left >= LANES) return load(p);
    vf v = splat(-INFINITE);
    for (long i = 0; i < left; ++i) v[i] = p[i];
    return v;
}

INLINE unsigned valid_lanes(long left) { return left >= LANES ? (1u << LANES) - 1 : (1u << left) - 1; }

// The mask's lanes as bits.
INLINE unsigned lanes(vi mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
    return unsigned(_mm256_movemask_ps((__m256)mask));
#else
    unsigned found = 0;
    for (int i = 0; i < LANES; ++i) found |= unsigned(mask[i] & 1) << i;
    return found;
#endif
}

// Stores the lanes of `mask` one after another and returns how many; may write LANES elements.
INLINE long append(float* to, vf v, unsigned mask) {
#if defined(__AVX512F__)
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(__mmask16(mask), (__m512)v));
#else
    for (unsigned left = mask; left; left &= left - 1) *to++ = v[__builtin_ctz(left)];
#endif
    return __builtin_popcount(mask);
}

INLINE long append(int32_t* to, vi v, unsigned mask) {
    return append(reinterpret_cast<float*>(to), bits(v), mask);
}

// float64 sums of float32 lanes.
struct Sum {
#if defined(__AVX512F__)
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    INLINE void add(vf v) {
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1)));
    }
    INLINE double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(low, high)); }
#elif defined(__AVX2__)
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
    INLINE void add(vf v) {
        low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)));
        high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1)));
    }
    INLINE double total() const {
        const __m256d both = _mm256_add_pd(low, high);
        return (both[0] + both[2]) + (both[1] + both[3]);
    }
#else
    double lane[LANES] = {};
    INLINE void add(vf v) {
        for (int i = 0; i < LANES; ++i) lane[i] += double(v[i]);
    }
    INLINE double total() const { return (lane[0] + lane[2]) + (lane[1] + lane[3]); }
#endif
};

// The highest of x [n], NaN if one is; `maxima` [groups, LANES] receives those of each group's lanes.
float peak_of(const float* x, long n, float* maxima) {
    vf top = splat(-INFINITE);
    vi odd = {};
    for (long first = 0; first < n; first += GROUP, maxima += LANES) {
        vf best = splat(-INFINITE);
        for (long i = first; i < least(first + GROUP, n); i += LANES) {
            const vf v = load_part(x + i, n - i);
            best = maximum(v, best);
            odd |= v != v;
        }
        store(maxima, best);
        top = maximum(top, best);
    }
    return lanes(odd) ? __builtin_nanf("") : max_lanes(top);
}

// The lowest id whose value is x's highest, `peak`.
long first_best(const float* x, float peak, const float* maxima) {
    long first = 0;
    for (; !lanes(load(maxima) == peak); maxima += LANES) first += GROUP;
    while (x[first] != peak) ++first;
    return first;
}

// ---- weights -------------------------------------------------------------------------------------------------------

struct Shares {
    const float* x;
    long n;
    float peak;   // weighs 1
    float scale;  // log2(e) / temperature
    INLINE vf at(long i) const { return exp2_vector((load_part(x + i, n - i) - peak) * scale); }
};

INLINE float weight_of(float y) { return exp2_scalar(y * LOG2_E); }

// The sum of all weights; `sums` [groups] receives those of the groups.
double weigh(const Shares& w, double* sums) {
    double total = 0;
    for (long first = 0; first < w.n; first += GROUP) {
        Sum sum;
        for (long i = first; i < least(first + GROUP, w.n); i += LANES) sum.add(w.at(i));
        total += *sums++ = sum.total();
    }
    return total;
}

// The place where the running sum of weights first passes `number`, in [0, 1), of the whole. `sums` are weigh's.
long invert(const Shares& w, const double* sums, double total, double number) {
    // Rounding must not carry the target to the total: past the last weight there is no token.
    const double target = __builtin_fmin(number * total, __builtin_nextafter(total, 0.0));
    double passed = 0;
    long first = 0;
    for (; passed + *sums <= target; first += GROUP) passed += *sums++;
    long last = first;
    for (long i = first; i < least(first + GROUP, w.n); i += LANES) {
        const vf weights = w.at(i);
        for (long lane = 0; lane < LANES; ++lane) {
            if (weights[lane] == 0.0f) continue;
            last = i + lane;
            passed += weights[lane];
            if (passed > target) return last;
        }
    }
    return last;  // one by one the group's weights came to a little less than its sum
}

// ---- cuts ----------------------------------------------------------------------------------------------------------

// Ranked by value, best first: values above `value` measure `above`, less than what was wanted; with it, enough.
struct Cut {
    float value;
    double above;
};

// Quickselect over y [n]: a value measures 1, or its weight. Where all together are not enough, the cut is the lowest.
// `a` and `b` have room for n + LANES. Pivots are drawn by a fixed random sequence, so no order of values is bad.
template <bool WEIGHTS>
Cut find_cut(const float* y, long n, double wanted, float* a, float* b) {
    uint32_t random = 1;
    double above = 0;
    const auto any = [&] {
        random = random * 1664525u + 1013904223u;
        return y[(uint64_t(random) * uint64_t(n)) >> 32];
    };
    for (;;) {
        const float one = any(), two = any(), three = any();
        const float low = one < two ? one : two, high = one < two ? two : one;
        const float pivot = three < low ? low : three > high ? high : three;
        float* const more = y == b ? b : a;  // what is written over y has been read by then
        float* const less = more == a ? b : a;
        long greater = 0, lesser = 0, same = 0;
        Sum weights;
        for (long i = 0; i < n; i += LANES) {
            const vf v = load_part(y + i, n - i);
            const vi over = v > pivot;
            const unsigned up = lanes(over), level = lanes(v == pivot) & valid_lanes(n - i);
            if (WEIGHTS) weights.add(choose(over, exp2_vector(v * LOG2_E), vf{}));
            same += __builtin_popcount(level);
            lesser += append(less + lesser, v, ~(up | level) & valid_lanes(n - i));
            greater += append(more + greater, v, up);
        }
        const double over = WEIGHTS ? weights.total() : double(greater);
        if (greater && above + over >= wanted) {
            y = more;
            n = greater;
            continue;
        }
        const double level = WEIGHTS ? double(same) * weight_of(pivot) : double(same);
        if (!lesser || above + over + level >= wanted) return {pivot, above + over};
        above += over + level;
        y = less;
        n = lesser;
    }
}

// ---- candidates ----------------------------------------------------------------------------------------------------

// Some tokens of a row in order of id, with their tempered logits. Both arrays have room for LANES more.
struct Candidates {
    float* y;
    int32_t* ids;
    long n;
};

struct Tempering {
    float peak, temperature;
    INLINE vf of(vf x) const { return (x - peak) / temperature; }
};

// Of x [n] whose maxima are given, those of at least `floor`, and of at least `lowest` once tempered.
void gather(const float* x, long n, const float* maxima, float floor, const Tempering& t, float lowest, Candidates& to) {
    vi places;
    for (int i = 0; i < LANES; ++i) places[i] = i;
    to.n = 0;
    for (long first = 0; first < n; first += GROUP, maxima += LANES) {
        if (!lanes(load(maxima) >= floor)) continue;
        for (long i = first; i < least(first + GROUP, n); i += LANES) {
            const vf v = load_part(x + i, n - i);
            if (!lanes(v >= floor)) continue;
            const vf y = t.of(v);
            const unsigned found = lanes((v >= floor) & (y >= lowest)) & valid_lanes(n - i);
            append(to.ids + to.n, places + int32_t(i), found);
            to.n += append(to.y + to.n, y, found);
        }
    }
}

// Leaves those above the cut and, of those equal to it, the `room` of lowest id.
void keep(Candidates& c, float cut, long room) {
    long kept = 0;
    for (long i = 0; i < c.n; i += LANES) {
        const vf y = load_part(c.y + i, c.n - i);
        unsigned level = lanes(y == cut) & valid_lanes(c.n - i);
        while (__builtin_popcount(level) > room) level &= ~(1u << (31 - __builtin_clz(level)));
        room -= __builtin_popcount(level);
        const unsigned found = lanes(y > cut) | level;
        append(c.ids + kept, load(c.ids + i), found);
        kept += append(c.y + kept, y, found);
    }
    c.n = kept;
}

}  // namespace

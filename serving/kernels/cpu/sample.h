// Sampling tokens, and log-probabilities: rows shared out over the threads, each worked on by one of them.
//
// What is sampled is written in serving/sampling/sampler.py, and serving/sampling/torch_sampling.py does the same with
// torch.
// The kept tokens in order of id are each as wide as their weight, and a uniform number of (seed, position) falls on
// one. A tempered logit y = (x - highest) / temperature is float32, so equal ranks are the same as there.
#pragma once

#include <math.h>

#include "form.h"
#include "rank.h"
#include "workspace.h"

namespace {

struct SampleScratch {
    float* maxima;
    double* sums;
    float* edited;  // [V]
    Candidates kept;
    float *a, *b;  // of find_cut
};

INLINE SampleScratch take_sample(Arena& arena, long vocab) {
    const long room = round_up(vocab, GROUP) + LANES;
    SampleScratch s;
    s.maxima = arena.take<float>(groups_of(vocab) * LANES);
    s.sums = arena.take<double>(groups_of(vocab));
    s.edited = arena.take<float>(room);
    s.kept = {arena.take<float>(room), arena.take<int32_t>(room), 0};
    s.a = arena.take<float>(room);
    s.b = arena.take<float>(room);
    return s;
}

// Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011), as in sampling/randomness.py:
// the seed is the key, the counter (position, 0, 0); a number in [0, 1) with 53 random bits.
double uniform(uint64_t seed, uint64_t position) {
    uint32_t c0 = uint32_t(position), c1 = uint32_t(position >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t even = uint64_t(0xD2511F53) * c0, odd = uint64_t(0xCD9E8D57) * c2;
        c0 = uint32_t(odd >> 32) ^ c1 ^ k0;
        c1 = uint32_t(odd);
        c2 = uint32_t(even >> 32) ^ c3 ^ k1;
        c3 = uint32_t(even);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return double(uint64_t(c0 >> 5) * (1 << 26) + (c1 >> 6)) * 0x1p-53;
}

// Tokens that are not allowed become -inf.
void forbid(const uint32_t* allowed, long tokens, const float* __restrict x, long n, float* __restrict out) {
    const long known = least(tokens, n);
    for (long i = 0; i < known; ++i) out[i] = allowed[i / 32] >> (i % 32) & 1 ? x[i] : -INFINITE;
    for (long i = known; i < n; ++i) out[i] = -INFINITE;
}

// Bias and masks, then penalties, in the order and the float32 arithmetic of sampling/penalties.py.
void edit(const Order& o, const int32_t* ids, const float* changes, long n, float* __restrict out) {
    for (long i = o.first_change; i < o.first_change + o.changes; ++i) out[ids[i]] += changes[i];
    if (!o.counts) return;
    const float* __restrict counts = o.counts;
    const uint8_t* __restrict seen = o.seen;
    for (long i = 0; i < n; ++i) {
        const float v = out[i], repeated = v > 0.0f ? v / o.repetition : v * o.repetition;
        const float fresh = (seen[i] ? repeated : v) - counts[i] * o.frequency;
        out[i] = fresh - (counts[i] > 0.0f ? o.presence : 0.0f);
    }
}

// The k-th highest of a row whose lanes' maxima are given is at least this: k of those are.
INLINE float highest_at_least(long k, const float* maxima, long count, SampleScratch& s) {
    return k > count ? -INFINITE : find_cut<false>(maxima, count, double(k), s.a, s.b).value;
}

// A logit below this is tempered to less than `lowest`: two roundings change y by less than a millionth.
INLINE float floor_of(const Tempering& t, double lowest) {
    const double floor = double(t.peak) + lowest * double(t.temperature) * (1 + 1e-6);
    if (!(floor > -FLT_MAX)) return -FLT_MAX;
    return float(floor) > floor ? nextafterf(float(floor), -INFINITE) : float(floor);
}

// The least float32 that is no less than x.
INLINE float at_least(double x) { return float(x) < x ? nextafterf(float(x), INFINITE) : float(x); }

// The candidates of a row that pass min-p, top-k and top-p. Before any of them is ranked, a bound that no token to be
// kept lies under leaves most of the row out.
void filter(const Order& o, const float* x, long n, float peak, SampleScratch& s) {
    const Tempering t = {peak, o.temperature};
    const long count = groups_of(n) * LANES, k = o.top_k > 0 && o.top_k < n ? o.top_k : 0;
    const bool bounded = k > 0 || o.min_p > 0.0;
    double lowest = o.min_p > 0.0 ? log(o.min_p) : -INFINITE, total = 0;
    const float floor = at_least(lowest);
    if (k) lowest = fmax(lowest, t.of(splat(highest_at_least(k, s.maxima, count, s)))[0]);
    if (!bounded) {
        total = weigh({x, n, peak, LOG2_E / o.temperature}, s.sums);
        // All tokens under this together weigh half of what top-p leaves out.
        if (1.0 - o.top_p > 1e-5) lowest = log(0.5 * (1.0 - o.top_p) * total / double(n));
    }
    gather(x, n, s.maxima, floor_of(t, lowest), t, floor, s.kept);
    if (k && s.kept.n > k) {
        const Cut cut = find_cut<false>(s.kept.y, s.kept.n, double(k), s.a, s.b);
        keep(s.kept, cut.value, k - long(cut.above));
    }
    if (o.top_p >= 1.0) return;
    if (bounded) total = weigh({s.kept.y, s.kept.n, 0.0f, LOG2_E}, s.sums);
    const double wanted = o.top_p * total;
    const Cut cut = find_cut<true>(s.kept.y, s.kept.n, wanted, s.a, s.b);
    const double each = weight_of(cut.value);
    double passed = cut.above + each;
    long room = 1;
    for (; room < s.kept.n && passed < wanted; ++room) passed += each;
    keep(s.kept, cut.value, room);
}

int64_t sample_row(const Samples& all, long row, SampleScratch& s) {
    const Order& o = all.order[row];
    const long n = all.vocab;
    const float* x = all.logits + row * all.stride;
    if (o.allowed) {
        forbid(o.allowed, o.allowed_tokens, x, n, s.edited);
        x = s.edited;
    }
    float peak = peak_of(x, n, s.maxima);
    if ((o.changes || o.counts) && __builtin_isfinite(peak)) {
        if (x != s.edited) __builtin_memcpy(s.edited, x, n * sizeof(float));
        edit(o, all.ids, all.changes, n, s.edited);
        x = s.edited;
        peak = peak_of(x, n, s.maxima);
    }
    if (!__builtin_isfinite(peak)) return peak == -INFINITE ? ALL_MASKED : NOT_NUMBERS;
    if (o.temperature == 0.0f) return first_best(x, peak, s.maxima);
    const double number = uniform(o.seed, o.position);
    if (o.top_k <= 0 && o.top_p >= 1.0 && o.min_p <= 0.0) {
        const Shares all = {x, n, peak, LOG2_E / o.temperature};
        const double total = weigh(all, s.sums);
        return invert(all, s.sums, total, number);
    }
    filter(o, x, n, peak, s);
    const Shares kept = {s.kept.y, s.kept.n, 0.0f, LOG2_E};
    const double total = weigh(kept, s.sums);
    return s.kept.ids[invert(kept, s.sums, total, number)];
}

void logprobs_row(const Logprobs& all, long row, SampleScratch& s) {
    const long n = all.vocab, k = all.best;
    const float* x = all.logits + row * all.stride;
    const float peak = peak_of(x, n, s.maxima);
    all.whole[row] = __builtin_nan("");
    if (!__builtin_isfinite(peak)) return;
    const double whole = all.whole[row] = double(peak) + log(weigh({x, n, peak, LOG2_E}, s.sums));
    all.of_chosen[row] = float(double(x[all.chosen[row]]) - whole);
    if (!k) return;
    const Tempering none = {0.0f, 1.0f};
    const float floor = highest_at_least(k, s.maxima, groups_of(n) * LANES, s);
    gather(x, n, s.maxima, floor, none, -INFINITE, s.kept);
    const Cut cut = find_cut<false>(s.kept.y, s.kept.n, double(k), s.a, s.b);
    keep(s.kept, cut.value, k - long(cut.above));
    for (long i = 0; i < k; ++i) {
        all.ids[row * k + i] = s.kept.ids[i];
        all.best_logits[row * k + i] = s.kept.y[i];
    }
}

// each(row, scratch) for every row, by whichever thread is free; one row is not worth waking another thread.
template <class Each>
void each_row(Context& c, long rows, long vocab, Each each) {
    const Turn turn(c);
    const long threads = least(team_threads(c.team), rows);
    struct {
        int* counter;
        SampleScratch* scratch;
    } mine;
    const auto lay_out = [&](Arena arena) {
        mine.counter = arena.take<int>(1);
        mine.scratch = arena.take<SampleScratch>(threads);
        for (long t = 0; t < threads; ++t) {
            const SampleScratch s = take_sample(arena, vocab);
            if (arena.base) mine.scratch[t] = s;
        }
        return arena.used;
    };
    lay_out({c.scratch.reserve(lay_out({nullptr}))});
    *mine.counter = 0;
    const auto work = [&](int thread) {
        if (thread >= threads) return;
        for (long row = next(mine.counter); row < rows; row = next(mine.counter)) each(row, mine.scratch[thread]);
    };
    if (threads > 1)
        team_each(c.team, work);
    else
        work(0);
}

}  // namespace

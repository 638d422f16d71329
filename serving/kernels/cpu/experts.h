// A mixture of experts in place of a layer's MLP: who goes where, and the products of all experts as one list of work.
//
// The slots of a chunk of tokens (token t's k-th choice) are sorted by expert. An item of work is some panels of one
// expert's weights times all of its rows; threads take items from a counter until none is left. A slot's numbers are
// functions of its own row, and a token's slots are added in the order of its choices: neither other rows nor threads
// change a bit.
//
// Shapes: T tokens of a chunk, E experts, K choices of a token, S = T * K slots, H hidden width, I an expert's width.
#pragma once

#include "workspace.h"

namespace {

constexpr long MOE_TOKENS = 512;        // T at most: bounds the buffers of S rows
constexpr long GATHERED_ROWS = 64;      // rows of one expert that lie side by side for its first product
constexpr long ITEM_PANELS = 8;         // at most; an item's weights should also fit into the core's cache:
constexpr long ITEM_BYTES = 256 << 10;

// One of a token's experts.
struct Choice {
    int32_t expert;
    float weight;
};

struct ExpertSizes {
    long hidden, inner, experts, top_k;  // inner: I, padded as FINISH_SWIGLU writes it
    long here;                           // experts whose weights are here
};

// A row as an expert's first layer multiplies it.
struct EncodedRow {
    const void* words;
    float scale;  // int8 only
};

// What all threads share: rows between the phases of a chunk.
struct ExpertBuffers {
    Choice* choices;     // [T, K]
    int32_t* words;      // [T] encoded inputs of gate_up
    float* scale;
    float* h;            // [S, I]
    int32_t* h_words;    // [S] encoded inputs of down
    float* h_scale;
    float* parts;        // [S, H] what an expert makes of a token
};

// One thread's own.
struct ExpertScratch {
    int32_t* router_words;  // one encoded input of the router
    float* shares;          // [E], padded to panels
    int32_t* gathered;      // [GATHERED_ROWS] encoded inputs
    float* gathered_scale;
    int32_t* start;         // [experts here + 1] first slot of each
    int32_t* active;        // [experts here] those that have slots
    int32_t* token;         // [S] whose slot it is
    int32_t* slot;          // [T, K]
};

INLINE ExpertSizes sizes_of(const Experts& e) {
    return {e.router.inputs, panels_of(e.gate_up[0]) * PANEL / 2, e.router.outputs, e.top_k, e.count};
}

INLINE long expert_chunks(long tokens) { return (tokens + MOE_TOKENS - 1) / MOE_TOKENS; }

INLINE ExpertBuffers take_buffers(Arena& arena, const ExpertSizes& s, long tokens) {
    const long slots = tokens * s.top_k;
    ExpertBuffers b;
    b.choices = arena.take<Choice>(slots);
    b.words = arena.take<int32_t>(tokens * s.hidden);
    b.scale = arena.take<float>(tokens);
    b.h = arena.take<float>(slots * s.inner);
    b.h_words = arena.take<int32_t>(slots * s.inner);
    b.h_scale = arena.take<float>(slots);
    b.parts = arena.take<float>(slots * s.hidden);
    return b;
}

INLINE ExpertScratch take_scratch(Arena& arena, const ExpertSizes& s, long tokens) {
    ExpertScratch local;
    local.router_words = arena.take<int32_t>(s.hidden);
    local.shares = arena.take<float>(round_up(s.experts, PANEL));
    local.gathered = arena.take<int32_t>(GATHERED_ROWS * s.hidden);
    local.gathered_scale = arena.take<float>(GATHERED_ROWS);
    local.start = arena.take<int32_t>(s.here + 1);
    local.active = arena.take<int32_t>(s.here);
    local.token = arena.take<int32_t>(tokens * s.top_k);
    local.slot = arena.take<int32_t>(tokens * s.top_k);
    return local;
}

// ---- routing ---------------------------------------------------------------------------------------------------------

// The router's scores [E], with room for a panel's end, become shares of 1 (softmax).
INLINE void softmax(float* score, long count) {
    const long padded = round_up(count, LANES);
    for (long i = count; i < padded; ++i) score[i] = -__builtin_inff();
    vf best = load(score);
    for (long i = LANES; i < padded; i += LANES) best = maximum(best, load(score + i));
    const float top = max_lanes(best);
    vf sum = {};
    for (long i = 0; i < padded; i += LANES) {
        store(score + i, exp2_vector((load(score + i) - top) * 1.44269504f));
        sum = sum + load(score + i);
    }
    const float total = sum_lanes(sum);
    for (long i = 0; i < count; ++i) score[i] /= total;
}

// The K largest of shares [E], best first, the lower expert first among equals; shares are used up. Shares that are not
// numbers still give experts that exist, each once.
INLINE void choose_best(float* share, long count, long top_k, bool normalized, Choice* out) {
    constexpr float TAKEN = -1.0f;
    float sum = 0.0f;
    for (long k = 0; k < top_k; ++k) {
        long best = -1;
        for (long i = 0; i < count; ++i)
            if (share[i] != TAKEN && (best < 0 || share[i] > share[best])) best = i;
        out[k] = {int32_t(best), share[best]};
        sum += share[best];
        share[best] = TAKEN;
    }
    for (long k = 0; normalized && k < top_k; ++k) out[k].weight /= sum;
}

// serving.model.moe.route for one row of H.
INLINE void route(const Experts& e, const float* row, ExpertScratch& s, Choice* out) {
    float scale;
    encode_row(e.router.kind, row, e.router.inputs, s.router_words, &scale);
    const Rows a = {s.router_words, &scale, words_of(e.router.kind, e.router.inputs)};
    linear_block(e.router, a, 0, 1, 0, panels_of(e.router), {FINISH_STORE, s.shares, 0});
    softmax(s.shares, e.router.outputs);
    choose_best(s.shares, e.router.outputs, e.top_k, e.normalized, out);
}

// ---- the order of the work ------------------------------------------------------------------------------------------

// Counting sort of the slots by expert, tokens in order within one; every thread does it for itself. Returns how many
// experts have slots.
INLINE long sort_slots(const Choice* choices, long tokens, long top_k, long experts, ExpertScratch& s) {
    const long slots = tokens * top_k;
    for (long x = 0; x <= experts; ++x) s.start[x] = 0;
    for (long i = 0; i < slots; ++i) ++s.start[choices[i].expert + 1];
    long active = 0;
    for (long x = 0; x < experts; ++x) {
        if (s.start[x + 1]) s.active[active++] = int32_t(x);
        s.start[x + 1] += s.start[x];
    }
    for (long i = 0; i < slots; ++i) {
        s.slot[i] = s.start[choices[i].expert]++;  // start[x] ends where x + 1 began
        s.token[s.slot[i]] = int32_t(i / top_k);
    }
    for (long x = experts; x > 0; --x) s.start[x] = s.start[x - 1];
    s.start[0] = 0;
    return active;
}

// body(expert, first panel, last panel) for each item that this thread gets of `active` experts' layers like `like`.
template <class Body>
INLINE void each_item(const Linear& like, long active, const ExpertScratch& s, int* counter, int threads, Body body) {
    const long panels = panels_of(like), bytes = words_of(like.kind, like.inputs) * PANEL * 4;
    const long fair = active * panels / (threads * 4L);
    const long each = most(1, least(least(ITEM_PANELS, ITEM_BYTES / bytes), fair));
    const long pieces = (panels + each - 1) / each;
    for (long taken = next(counter); taken < active * pieces; taken = next(counter)) {
        const long first = taken % pieces * each;
        body(s.active[taken / pieces], first, least(first + each, panels));
    }
}

// ---- a team's work on one chunk of tokens ---------------------------------------------------------------------------

struct ExpertTeam {
    ThreadTeam* team;
    int threads;
    ExpertSizes sizes;
    ExpertBuffers all;
    ExpertScratch* local;  // [threads]

    static ExpertTeam take(Arena& arena, ThreadTeam* team, const ExpertSizes& sizes, long tokens) {
        const int threads = team_threads(team);
        const long chunk = least(tokens, MOE_TOKENS);
        ExpertTeam t = {team, threads, sizes, take_buffers(arena, sizes, chunk), arena.take<ExpertScratch>(threads)};
        for (int i = 0; i < threads; ++i) {
            const ExpertScratch s = take_scratch(arena, sizes, chunk);
            if (arena.base) t.local[i] = s;
        }
        return t;
    }

    // Adds what the chosen experts make of rows [T, H] to x [T, H]; every thread calls it, and may read x after it.
    // row(t) gives a row, choose(t, row, scratch, choices) its K experts; both are called once for a token. Two
    // counters at zero for each chunk of MOE_TOKENS.
    template <class Row, class Choose>
    void add(const Experts& e, long tokens, int thread, int* counters, float* x, Row row, Choose choose) const {
        for (long first = 0; first < tokens; first += MOE_TOKENS, counters += 2) {
            const long count = least(MOE_TOKENS, tokens - first);
            ExpertScratch& s = local[thread];
            enter(e, count, thread, all.words, all.scale, [&](long t) { return row(first + t); },
                  [&](long t, const float* values, Choice* out) { choose(first + t, values, s, out); });
            team_barrier(team);
            const long active = sort_slots(all.choices, count, sizes.top_k, e.count, s);
            const long words = words_of(e.gate_up[0].kind, sizes.hidden);
            gate_up(e, active, counters, s, [&](long slot) {
                return EncodedRow{all.words + s.token[slot] * words, all.scale[s.token[slot]]};
            });
            team_barrier(team);
            encode_inner(e, count * sizes.top_k, thread);
            team_barrier(team);
            down(e, active, counters + 1, s, all.parts);
            team_barrier(team);
            combine(count, thread, x + first * sizes.hidden,
                    [&](long choice) { return all.parts + s.slot[choice] * sizes.hidden; });
            team_barrier(team);
        }
    }

    // This thread's rows: chosen for, and encoded.
    template <class Row, class Choose>
    void enter(const Experts& e, long tokens, int thread, int32_t* encoded, float* scale, Row row,
               Choose choose) const {
        const Linear& w = e.gate_up[0];
        const long words = words_of(w.kind, w.inputs);
        const Span mine = share(tokens, thread, threads);
        for (long t = mine.first; t < mine.last; ++t) {
            const float* values = row(t);
            choose(t, values, all.choices + t * sizes.top_k);
            encode_row(w.kind, values, w.inputs, encoded + t * words, scale + t);
        }
    }

    // input(slot) is an EncodedRow.
    template <class Input>
    void gate_up(const Experts& e, long active, int* counter, ExpertScratch& s, Input input) const {
        const long words = words_of(e.gate_up[0].kind, e.gate_up[0].inputs);
        each_item(e.gate_up[0], active, s, counter, threads, [&](long expert, long panel0, long panel1) {
            for (long slot = s.start[expert]; slot < s.start[expert + 1]; slot += GATHERED_ROWS) {
                const long rows = least(GATHERED_ROWS, s.start[expert + 1] - slot);
                for (long r = 0; r < rows; ++r) {
                    const EncodedRow from = input(slot + r);
                    __builtin_memcpy(s.gathered + r * words, from.words, words * sizeof(int32_t));
                    s.gathered_scale[r] = from.scale;
                }
                linear_block(e.gate_up[expert], {s.gathered, s.gathered_scale, words}, 0, rows, panel0, panel1,
                             {FINISH_SWIGLU, all.h + slot * sizes.inner, sizes.inner});
            }
        });
    }

    void encode_inner(const Experts& e, long slots, int thread) const {
        const Linear& w = e.down[0];
        const long words = words_of(w.kind, w.inputs);
        const Span mine = share(slots, thread, threads);
        for (long i = mine.first; i < mine.last; ++i)
            encode_row(w.kind, all.h + i * sizes.inner, w.inputs, all.h_words + i * words, all.h_scale + i);
    }

    // out [slots, H]
    void down(const Experts& e, long active, int* counter, ExpertScratch& s, float* out) const {
        const Rows a = {all.h_words, all.h_scale, words_of(e.down[0].kind, e.down[0].inputs)};
        each_item(e.down[0], active, s, counter, threads, [&](long expert, long panel0, long panel1) {
            linear_block(e.down[expert], a, s.start[expert], s.start[expert + 1], panel0, panel1,
                         {FINISH_STORE, out, sizes.hidden});
        });
    }

    // x += the parts of a token times their weights, added one after the other (serving.model.moe.weighted_sum).
    // part(choice) is what became of a token's choice, counted through all tokens.
    template <class Part>
    void combine(long tokens, int thread, float* x, Part part) const {
        const long n = sizes.hidden, top_k = sizes.top_k;
        const Span mine = share(tokens, thread, threads);
        for (long t = mine.first; t < mine.last; ++t) {
            const Choice* choice = all.choices + t * top_k;
            float* row = x + t * n;
            long i = 0;
            for (; i + LANES <= n; i += LANES) {
                vf total = load(part(t * top_k) + i) * choice[0].weight;
                for (long k = 1; k < top_k; ++k) total = total + load(part(t * top_k + k) + i) * choice[k].weight;
                store(row + i, load(row + i) + total);
            }
            for (; i < n; ++i) {
                float total = part(t * top_k)[i] * choice[0].weight;
                for (long k = 1; k < top_k; ++k) total += part(t * top_k + k)[i] * choice[k].weight;
                row[i] += total;
            }
        }
    }
};

}  // namespace

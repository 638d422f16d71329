// The experts of a layer that the ranks of a group share: rows go to the ranks that hold their experts, and results come
// back, within the call that computes the rest of the layer. It knows neither processes nor memory: see exchange.h.
//
// Rows travel as the experts' first layer multiplies them and results in float32, and a token's are added where it is
// computed, in the order of its choices: the bits are those of ExpertTeam::add, wherever the experts lie.
//
// Shapes: as in experts.h; N rows received, each as often as experts here take it, slot after slot.
#pragma once

#include "exchange.h"
#include "experts.h"

namespace {

constexpr long SPREAD_ROWS = 512;  // of those received, which are computed together: they come slot after slot

// What thread 0 finds out for all.
struct SpreadState {
    bool lost, unreturned;              // a rank is, before rows are here and before results are: each is written once
    int counters[2];
    long received;                      // N
    const uint8_t* const* rows;         // [N] encoded, in the segments of their senders
    const float* row_scale;             // [N], int8 only
    float* results;                     // [N, H], in this rank's segment
    const uint8_t* const* parts;        // [T, K] the results of the own rows
};

struct SpreadTeam {
    ExpertTeam team;
    SpreadState* state;
    int32_t* physical;  // [T, K]
    int32_t* counts;    // [slots] rows received

    // For `tokens` rows of this rank, and any number that it receives.
    static SpreadTeam take(Arena& arena, ThreadTeam* of, const ExpertSizes& sizes, long tokens) {
        const int threads = team_threads(of);
        SpreadTeam t = {{of, threads, sizes, {}, arena.take<ExpertScratch>(threads)}, nullptr, nullptr, nullptr};
        for (int i = 0; i < threads; ++i) {
            const ExpertScratch s = take_scratch(arena, sizes, 0);
            if (arena.base) t.team.local[i] = s;
        }
        t.team.all.h = arena.take<float>(SPREAD_ROWS * sizes.inner);
        t.team.all.h_words = arena.take<int32_t>(SPREAD_ROWS * sizes.inner);
        t.team.all.h_scale = arena.take<float>(SPREAD_ROWS);
        t.team.all.choices = arena.take<Choice>(tokens * sizes.top_k);
        t.physical = arena.take<int32_t>(tokens * sizes.top_k);
        t.counts = arena.take<int32_t>(sizes.here);
        t.state = arena.take<SpreadState>(1);
        return t;
    }

    // Adds what the chosen experts make of rows [T, H] to x [T, H]; every thread calls it, and may read x after it. `row`
    // and `choose` as for ExpertTeam::add. arrived() is called by thread 0 once all ranks have come this far. False
    // where a rank is lost: the step has no result.
    template <class Row, class Choose, class Arrived>
    bool add(const Experts& e, long tokens, int thread, float* x, Row row, Choose choose, Arrived arrived) const {
        Exchange* const exchange = static_cast<Exchange*>(e.spread.exchange);
        ExpertScratch& s = team.local[thread];
        float* scale;
        int32_t* const encoded = static_cast<int32_t*>(millrace_exchange_room(exchange, &scale));
        team.enter(e, tokens, thread, encoded, scale, row,
                   [&](long t, const float* values, Choice* out) { choose(t, values, s, out); });
        team_barrier(team.team);
        if (thread == 0) {
            state->lost = !dispatch(e, exchange, encoded, scale, tokens);
            if (!state->lost) arrived();
        }
        team_barrier(team.team);
        if (state->lost) return false;
        compute(e, thread, s);
        if (thread == 0) {
            const bool begun = millrace_exchange_begin_combine(exchange, state->results, KIND_F32) >= 0;
            state->parts = begun ? millrace_exchange_arrived(exchange) : nullptr;
            state->unreturned = !state->parts;
        }
        team_barrier(team.team);
        if (state->unreturned) return false;
        team.combine(tokens, thread, x,
                     [&](long choice) { return reinterpret_cast<const float*>(state->parts[choice]); });
        team_barrier(team.team);
        return true;
    }

    // Sends the rows, and finds those that all ranks have sent here.
    bool dispatch(const Experts& e, Exchange* exchange, const int32_t* encoded, const float* scale, long tokens) const {
        const Spread& spread = e.spread;
        for (long i = 0; i < tokens * e.top_k; ++i) {
            const long expert = team.all.choices[i].expert, row = i / e.top_k;
            physical[i] = spread.physical[expert * spread.most_copies + row % spread.copies[expert]];
            if (spread.taken) ++spread.taken[expert];
        }
        const int32_t kind = e.gate_up[0].kind;
        if (millrace_exchange_begin_dispatch(exchange, encoded, scale, kind, tokens, physical) < 0) return false;
        int32_t region;
        state->received = millrace_exchange_finish_dispatch(exchange, counts, &region);
        if (state->received < 0) return false;
        state->rows = millrace_exchange_rows(exchange, region);
        state->row_scale = millrace_exchange_scales(exchange, region);
        state->results = static_cast<float*>(millrace_exchange_results(exchange, region));
        state->counters[0] = state->counters[1] = 0;
        return true;
    }

    // The results of all rows received. Counters start at zero again while no thread takes items.
    void compute(const Experts& e, int thread, ExpertScratch& s) const {
        for (long first = 0; first < state->received; first += SPREAD_ROWS) {
            const long count = least(SPREAD_ROWS, state->received - first);
            const long active = find_block(first, count, s);
            team.gate_up(e, active, state->counters, s,
                         [&](long slot) { return EncodedRow{state->rows[first + slot], scale_of(e, first + slot)}; });
            team_barrier(team.team);
            if (thread == 0) state->counters[0] = state->counters[1] = 0;
            team.encode_inner(e, count, thread);
            team_barrier(team.team);
            team.down(e, active, state->counters + 1, s, state->results + first * team.sizes.hidden);
            team_barrier(team.team);
        }
    }

    float scale_of(const Experts& e, long place) const {
        return e.gate_up[0].kind == KIND_INT8 ? state->row_scale[place] : 1.0f;
    }

    // Which of rows [first, first + count) are for which slot; how many slots have some.
    long find_block(long first, long count, ExpertScratch& s) const {
        long active = 0, end = -first;
        s.start[0] = 0;
        for (long slot = 0; slot < team.sizes.here; ++slot) {
            end += counts[slot];
            s.start[slot + 1] = int32_t(least(most(end, 0), count));
            if (s.start[slot + 1] > s.start[slot]) s.active[active++] = int32_t(slot);
        }
        return active;
    }
};

}  // namespace

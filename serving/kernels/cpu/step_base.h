// What both ways of a decoder step share: its memory, what is computed row by row, and attention that is shared out.
#pragma once

#include "screen.h"
#include "spread_experts.h"
#include "tokens.h"

namespace {

constexpr long REDUNDANT_ROWS = 4;  // up to here each thread prepares all rows itself rather than wait for another

INLINE Rows rows_for(const Linear& next, const RowBuffers& to) {
    return {to.words, to.scale, words_of(next.kind, next.inputs)};
}

struct StepBase {
    ThreadTeam* team;
    const Model& model;
    const Batch& batch;
    const Results& results;
    int threads;
    Sizes sizes;
    long window;      // the widest of all layers'; 0: all
    long block_rows;  // rows of a block when the step is cut by rows, else 0
    long blocks;
    float* x;          // [T, hidden], the residual stream
    int32_t* q;        // [T, q_words], encoded queries
    RowBuffers shared; // of T rows, when cut by panels; else of those of logits, attention's of those that are planned
    Lengths planned = ANY_LENGTH;  // of sequences whose attention threads share out; others' is their block's
    ItemPlan plan;
    ThreadScratch* local;  // [threads]
    int* counters;         // [layers + 1]
    Portions portions;     // of planned attention, and of linear layers' panels where not cut by rows
    ExpertTeam experts;    // where a layer has some
    int* expert_counters;  // [layers][chunks of tokens][2]
    SpreadTeam spread;     // where ranks share them
    bool spreads;
    Rows coarse;           // [threads][PARTS R], where the head is screened
    Screened* screened;    // [threads][R]
    float* highest;        // [panels of the head][R]

    StepBase(ThreadTeam* team, const Model& model, const Batch& batch, const Results& results, Arena& arena)
        : team(team), model(model), batch(batch), results(results), threads(team_threads(team)),
          sizes(sizes_of(model)), window(widest_window(model)) {
        const long tokens = batch.tokens_count;
        const Layer* const sparse = sparse_layer(model);
        const bool rows_mode = tokens >= rows_mode_tokens(model.layer[0].qkv.kind) * threads && !sparse;
        const long most_rows = block_tokens(tokens, threads);
        blocks = rows_mode ? round_up((tokens + most_rows - 1) / most_rows, threads) : 0;
        block_rows = rows_mode ? (tokens + blocks - 1) / blocks : 0;
        x = arena.take<float>(tokens * model.hidden);
        q = arena.take<int32_t>(tokens * sizes.q_words);
        if (rows_mode) planned.longest = short_tokens(model.layer[0].kv);
        plan = plan_items(arena, batch, model.layer[0].kv, {model.heads, window, 0.0f}, threads, planned);
        const long shared_rows = most(rows_mode ? 0 : tokens, results.hidden ? 0 : batch.logits_count);
        shared = take_rows(arena, sizes, shared_rows, rows_mode && plan.split ? 0 : plan.tokens);
        counters = arena.take<int>(model.layers + 1);
        portions = Portions::take(arena, threads, 5 * model.layers + 1);
        spreads = sparse && sparse->experts.spread.exchange;
        const long expert_items = sparse && !spreads ? model.layers * expert_chunks(tokens) * 2 : 0;
        expert_counters = arena.take<int>(expert_items);
        if (spreads)
            spread = SpreadTeam::take(arena, team, sizes_of(sparse->experts), tokens);
        else if (sparse)
            experts = ExpertTeam::take(arena, team, sizes_of(sparse->experts), tokens);
        const long rows = screens() ? batch.logits_count : 0, words = words_of(KIND_INT8, model.hidden);
        coarse = {arena.take<int32_t>(threads * rows * PARTS * words), nullptr, words};
        screened = arena.take<Screened>(threads * rows);
        highest = arena.take<float>(rows * panels_of(model.head));
        local = arena.take<ThreadScratch>(threads);
        for (int t = 0; t < threads; ++t) {
            ThreadScratch s;
            take_attention(arena, most(ITEM_TOKENS, block_rows), sizes.group, sizes.head_words, sizes.padded_head,
                           s.attention);
            s.rows = take_rows(arena, sizes, rows_mode ? least(block_rows, PART_TOKENS) : REDUNDANT_ROWS,
                               most(block_rows, REDUNDANT_ROWS));
            s.normed = arena.take<float>(most(sizes.widest, sizes.padded_head));
            s.best = arena.take<Best>(batch.logits_count);
            s.runs = arena.take<Run>(fetches_kv() ? largest_share(batch.sequences, threads) * batch.table_width : 0);
            s.runs_count = s.shared = 0;
            if (arena.base) local[t] = s;
        }
        if (!arena.base) return;
        portions.clear();
        for (long i = 0; i <= model.layers; ++i) counters[i] = 0;
        for (long i = 0; i < expert_items; ++i) expert_counters[i] = 0;
    }

    AttentionShape shape(const Layer& layer) const { return {model.heads, layer.window, model.attention_scale}; }
    Rotary rotary(const Layer& layer) const {
        return {model.heads, model.rotary_dim, layer.q_norm, layer.k_norm, model.eps, model.cos, model.sin};
    }
    float* x_row(long row) const { return x + row * model.hidden; }
    void report(long layers_done, int thread) const {
        if (thread == 0 && results.progress) __atomic_store_n(results.progress, int32_t(layers_done), __ATOMIC_RELEASE);
    }

    // Once every thread has written the layer's new KV: whether the rest of it is there too. One thread waits, for all.
    bool arrived(long layer, int thread) const {
        if (!results.barrier) return true;
        if (thread == 0) team_wait_at(results.barrier, layer);
        team_barrier(team);
        return !results.barrier->left;
    }

    // Whether linear layers have tiles enough to fetch some of the KV that attention will read. Those of AMX wait for memory
    // as it is, and attention fetches as it goes.
    bool fetches_kv() const {
        const int kind = model.layer[0].qkv.kind;
        return !fetches_any(kind) && !blocks && batch.tokens_count > FETCHING_TILES * tile_rows(kind);
    }

    // Whether only the best tokens of a few rows are wanted, and there is what finds them in less than the whole head.
    bool screens() const {
        return model.screen.coarse.packed && results.greedy && !results.logits && !results.kept &&
               batch.logits_count <= SCREENED_ROWS;
    }

    // ---- rows -------------------------------------------------------------------------------------------------------

    void embed(long row0, long row1) const {
        for (long row = row0; row < row1; ++row) embed_token(model, batch.tokens[row], x_row(row));
    }

    // Rows of x, normed, as input of `next`; `base` is the batch row that row 0 of `a` stands for.
    void normed(const float* weight, const Linear& next, long row0, long row1, const Rows& a, long base,
                float* row) const {
        for (long i = row0; i < row1; ++i) {
            rms_norm(x_row(i), weight, model.hidden, model.eps, row);
            encode_input(next, row, row, a.row(i - base), a.scale + (i - base));
        }
    }

    // `room` is for one row: values are not changed, for other threads may read them too.
    void encoded(const float* values, long ld, const Linear& next, long row0, long row1, const Rows& a,
                 float* room) const {
        for (long i = row0; i < row1; ++i) encode_input(next, values + i * ld, room, a.row(i), a.scale + i);
    }

    void rotate_rows(const Layer& layer, long row0, long row1, float* qkv, long base) const {
        const long words = model.heads * query_words(layer.kv);
        for (long row = row0; row < row1; ++row)
            rotate_and_write(rotary(layer), layer.kv, qkv + (row - base) * layer.qkv.outputs, batch.positions[row],
                             batch.slots[row], q + row * words);
    }

    // What is shared out next: every thread comes here as often.
    Portions portions_now(int thread) const { return portions.at(local[thread].shared++); }

    void attend_planned(const Layer& layer, int thread) const {
        AttentionScratch& scratch = local[thread].attention;
        attend_items(layer.kv, shape(layer), plan, q, portions_now(thread), thread, scratch, shared.attn);
    }
};

}  // namespace

// A whole decoder step in one call: embedding, every layer, final norm and logits for a ragged batch.
//
// Two ways to share the work out. Few tokens: every linear layer is cut by panels of its weights, so each byte of
// weight is read by one thread, and threads meet between phases. Many tokens: a thread takes a block of rows through
// everything between two attentions, so they meet once a layer, or twice where sequences decode beside prompts: a
// decode may read as much as many rows of a prompt take, so decodes' attention is shared out by itself. Each output has
// the same order of additions in both. Layers with experts are always of the first way: an expert's weights are read
// once for all tokens that go to it.
#pragma once

#include "step_base.h"

namespace {

constexpr int PANELS_OF_FEW = 4;  // that a thread takes at once where one tile has all rows

struct Step : StepBase {
    using StepBase::StepBase;

    // ---- cut by rows ------------------------------------------------------------------------------------------------

    // Rows of what is planned, once every thread has attended its share, in s.rows.attn, whose first row is `row0`.
    void take_planned(const Layer& layer, long row0, long row1, ThreadScratch& s) const {
        const long width = sizes.q_width;
        float* const rows = s.rows.attn - row0 * width;
        if (plan.split) return join_rows(layer.kv, shape(layer), plan, row0, row1, s.normed, rows);
        for (long i = 0; i < plan.count; ++i) {
            const Item& item = plan.items[i];
            const long at = item.segment.row, first = most(row0, at), last = least(row1, at + item.segment.tokens);
            if (item.head || first >= last) continue;
            const float* const from = shared.attn + (item.at + first - at) * width;
            __builtin_memcpy(rows + first * width, from, (last - first) * width * sizeof(float));
        }
    }

    // Attention of rows [row0, row1) in s.rows.attn.
    void attend_block(const Layer& layer, long row0, long row1, ThreadScratch& s) const {
        take_planned(layer, row0, row1, s);
        const KVRange all = {layer.kv, 0, 1, nullptr, s.rows.attn};
        const Lengths others = {planned.longest + 1, ANY_LENGTH.longest};
        each_segment(batch, row0, row1, others, most(ITEM_TOKENS, block_rows), [&](const Segment& segment) {
            const long heads = item_heads(layer.kv, segment.tokens);
            for (long head = 0; head < layer.kv.kv_heads; head += heads)
                attend_item(all, shape(layer), {segment, head, heads}, q, {nullptr, 0}, s.attention, row0);
        });
    }

    void part_to_attention(const Layer& layer, long row0, long row1, ThreadScratch& s) const {
        const Rows a = rows_for(layer.qkv, s.rows);
        normed(layer.attention_norm, layer.qkv, row0, row1, a, row0, s.normed);
        linear_block(layer.qkv, a, 0, row1 - row0, 0, panels_of(layer.qkv),
                     {FINISH_STORE, s.rows.qkv, layer.qkv.outputs});
        rotate_rows(layer, row0, row1, s.rows.qkv, row0);
    }

    // `attn` is what attention returned for these rows.
    void part_from_attention(const Layer& layer, const float* attn, long row0, long row1, ThreadScratch& s) const {
        const long rows = row1 - row0;
        const Rows attended = rows_for(layer.o, s.rows);
        encoded(attn, sizes.q_width, layer.o, 0, rows, attended, s.normed);
        linear_block(layer.o, attended, 0, rows, 0, panels_of(layer.o), {FINISH_ADD, x_row(row0), model.hidden});
        const Rows a = rows_for(layer.gate_up, s.rows);
        normed(layer.mlp_norm, layer.gate_up, row0, row1, a, row0, s.normed);
        const Gated gated(layer, s.rows, sizes);
        linear_block(layer.gate_up, a, 0, rows, 0, panels_of(layer.gate_up), gated.target);
        if (!gated.encoded) encoded(s.rows.h, sizes.h_width, layer.down, 0, rows, gated.rows, s.normed);
        const Target residual = {FINISH_ADD, x_row(row0), model.hidden};
        linear_block(layer.down, gated.rows, 0, rows, 0, panels_of(layer.down), residual);
    }

    // A block's rows from attention of the layer before to that of layer `index`, which may be past the last.
    void compute_block(long index, long row0, long row1, ThreadScratch& s) const {
        if (index == 0)
            embed(row0, row1);
        else
            attend_block(model.layer[index - 1], row0, row1, s);
        const long parts = (row1 - row0 + PART_TOKENS - 1) / PART_TOKENS;
        for (long i = 0; i < parts; ++i) {
            const long first = row0 + (row1 - row0) * i / parts, last = row0 + (row1 - row0) * (i + 1) / parts;
            const float* const attn = s.rows.attn + (first - row0) * sizes.q_width;
            if (index > 0) part_from_attention(model.layer[index - 1], attn, first, last, s);
            if (index < model.layers) part_to_attention(model.layer[index], first, last, s);
        }
    }

    // False where the step left at the barrier, as layer_by_panels.
    bool by_rows(int thread) {
        ThreadScratch& s = local[thread];
        for (long index = 0; index <= model.layers; ++index) {
            if (index > 0 && plan.count && (index < model.layers || batch.logits_count)) {
                attend_planned(model.layer[index - 1], thread);
                team_barrier(team);
            }
            // The last rows of a prompt see the most keys, so their blocks go first.
            for (long taken = next(counters + index); taken < blocks; taken = next(counters + index)) {
                const long row0 = (blocks - 1 - taken) * block_rows;
                const long row1 = least(row0 + block_rows, batch.tokens_count);
                const Span rows = index == model.layers ? wanted(batch, row0, row1) : Span{row0, row1};
                if (rows.first < rows.last) compute_block(index, rows.first, rows.last, s);
            }
            team_barrier(team);
            if (index == model.layers) break;
            if (!arrived(index, thread)) return false;
            report(index + 1, thread);
        }
        return true;
    }

    // ---- cut by panels ----------------------------------------------------------------------------------------------

    // rows(row0, row1, a, scratch) encodes rows of `a` for `next`; returns all T, once every thread may read them.
    template <class Encode>
    Rows prepare(const Linear& next, int thread, Encode rows) {
        const long tokens = batch.tokens_count;
        if (tokens <= REDUNDANT_ROWS) {
            const Rows a = rows_for(next, local[thread].rows);
            rows(0, tokens, a, local[thread]);
            return a;
        }
        const Rows a = rows_for(next, shared);
        const Span mine = share(tokens, thread, threads);
        rows(mine.first, mine.last, a, local[thread]);
        team_barrier(team);
        return a;
    }

    // Every thread multiplies panels; the barrier after it makes the outputs everyone's.
    void panels(const Linear& w, const Rows& a, long rows, const Target& target, int thread,
                Soon* soon = nullptr) const {
        const long count = panels_of(w), until = share(count, thread, threads).last;
        const int at_once = rows > tile_rows(w.kind) ? 1 : PANELS_OF_FEW;
        const Portions now = portions_now(thread);
        for (Span mine = now.next(count, at_once, thread); mine.first < mine.last;
             mine = now.next(count, at_once, thread))
            linear_block(w, a, 0, rows, mine.first, mine.last, target, soon, until);
        team_barrier(team);
    }

    // Where this thread's share of the KV lies.
    void find_kv(int thread) const {
        ThreadScratch& s = local[thread];
        if (!fetches_kv()) return;
        const Span mine = share(batch.sequences, thread, threads);
        s.runs_count = find_runs(batch, model.layer[0].kv, {model.heads, window, 0.0f}, mine, s.runs);
    }

    // This thread's share of the KV that a layer's attention will read.
    Soon kv_soon(long index, int thread) const {
        if (index >= model.layers || model.layer[index].window != window) return {};
        const KvPlanes& kv = model.layer[index].kv;
        const ThreadScratch& s = local[thread];
        return {{static_cast<char*>(kv.k), static_cast<char*>(kv.v)}, s.runs, s.runs_count, FETCHED_BEFORE / LINE};
    }

    Rows encode_gated(const Layer& layer, int thread) {
        return prepare(layer.down, thread, [&](long row0, long row1, const Rows& a, ThreadScratch& s) {
            encoded(shared.h, sizes.h_width, layer.down, row0, row1, a, s.normed);
        });
    }

    // `soon` is what attention of this layer will read; on return, what that of the next will.
    // False where the step left: at the barrier, or since a rank is lost.
    bool layer_by_panels(const Layer& layer, long index, int thread, Soon& soon) {
        const long tokens = batch.tokens_count;
        const Span mine = share(tokens, thread, threads);
        const auto norm = [&](const float* weight, const Linear& next) {
            return prepare(next, thread, [&](long row0, long row1, const Rows& a, ThreadScratch& s) {
                normed(weight, next, row0, row1, a, 0, s.normed);
            });
        };
        const Rows entering = norm(layer.attention_norm, layer.qkv);
        panels(layer.qkv, entering, tokens, {FINISH_STORE, shared.qkv, layer.qkv.outputs}, thread, &soon);
        rotate_rows(layer, mine.first, mine.last, shared.qkv, 0);
        team_barrier(team);
        if (!arrived(index, thread)) return false;
        if (!spreads) report(index + 1, thread);
        attend_planned(layer, thread);
        team_barrier(team);
        const Rows attended = prepare(layer.o, thread, [&](long row0, long row1, const Rows& a, ThreadScratch& s) {
            encode_attended(layer, row0, row1, a, s);
        });
        soon = kv_soon(index + 1, thread);
        panels(layer.o, attended, tokens, {FINISH_ADD, x, model.hidden}, thread, &soon);
        if (layer.experts.count) return add_experts(layer, index, thread);
        const Rows halfway = norm(layer.mlp_norm, layer.gate_up);
        const Gated direct(layer, shared, sizes);
        panels(layer.gate_up, halfway, tokens, direct.target, thread, &soon);
        const Rows gated = direct.encoded ? direct.rows : encode_gated(layer, thread);
        panels(layer.down, gated, tokens, {FINISH_ADD, x, model.hidden}, thread, &soon);
        return true;
    }

    // Of experts that ranks share, all ranks have written a layer's KV once their rows are here. False: one is lost.
    bool add_experts(const Layer& layer, long index, int thread) const {
        const long tokens = batch.tokens_count;
        float* const normed = local[thread].normed;
        const auto row = [&](long t) {
            rms_norm(x_row(t), layer.mlp_norm, model.hidden, model.eps, normed);
            return normed;
        };
        const auto choose = [&](long, const float* values, ExpertScratch& s, Choice* out) {
            route(layer.experts, values, s, out);
        };
        if (spreads)
            return spread.add(layer.experts, tokens, thread, x, row, choose, [&] { report(index + 1, thread); });
        experts.add(layer.experts, tokens, thread, expert_counters + index * expert_chunks(tokens) * 2, x, row, choose);
        return true;
    }

    // Rows of attention's output, whose split chunks are joined here: into the thread's own copy when every thread does
    // all rows, for two threads must not write one buffer.
    void encode_attended(const Layer& layer, long row0, long row1, const Rows& a, ThreadScratch& s) const {
        const long width = model.heads * layer.kv.head_dim;
        float* from = shared.attn;
        if (plan.split && batch.tokens_count <= REDUNDANT_ROWS) from = s.rows.attn;
        join_rows(layer.kv, shape(layer), plan, row0, row1, s.normed, from);
        encoded(from, width, layer.o, row0, row1, a, s.normed);
    }

    // ---- logits and the whole ---------------------------------------------------------------------------------------

    // `panels` of the head, those alone that may have a row's best token.
    void screened_panels(const Rows& a, long rows, const Target& target, int thread) {
        const long count = panels_of(model.head);
        const Span mine = share(count, thread, threads);
        Screened* const own = screened + thread * rows;
        const Rows x = {coarse.row(thread * rows * PARTS), nullptr, coarse.words};
        for (long i = 0; i < rows; ++i)  // each thread its own, and waits for nobody
            own[i] = screen_row(reinterpret_cast<const uint16_t*>(a.row(i)), model.hidden, x.row(i * PARTS), x.words,
                                local[thread].normed);
        screen_panels(model.screen, x, rows, mine.first, mine.last, own, highest);
        team_barrier(team);
        float bound[SCREENED_ROWS];
        for (long i = 0; i < rows; ++i) {
            bound[i] = own[i].least;
            for (int t = 0; t < threads; ++t) bound[i] = __builtin_fmaxf(bound[i], screened[t * rows + i].least);
        }
        each_left(highest, bound, rows, mine.first, mine.last, [&](long first, long last, long panel, long end) {
            linear_block(model.head, a, first, last, panel, end, target);
        });
        team_barrier(team);
    }

    void logits(int thread) {
        const long rows = batch.logits_count;
        if (rows == 0) return;
        const Rows a = rows_for(model.head, shared);
        const Span mine = share(rows, thread, threads);
        for (long i = mine.first; i < mine.last; ++i) {
            const long row = batch.logits_rows[i];
            normed(model.final_norm, model.head, row, row + 1, a, row - i, local[thread].normed);
        }
        for (long i = 0; i < rows; ++i) local[thread].best[i] = {-__builtin_inff(), 0};
        team_barrier(team);
        const Target target = {FINISH_LOGITS, results.logits, model.head.outputs, local[thread].best, results.kept};
        if (screens())
            screened_panels(a, rows, target, thread);
        else
            panels(model.head, a, rows, target, thread);
        if (thread == 0 && results.greedy) choose_best(local, threads, rows, results.greedy);
    }

    void run(int thread) {
        if (blocks) {
            if (!by_rows(thread)) return;
        } else {
            const Span mine = share(batch.tokens_count, thread, threads);
            embed(mine.first, mine.last);
            team_barrier(team);
            find_kv(thread);
            Soon soon = kv_soon(0, thread);
            for (long i = 0; i < model.layers; ++i)
                if (!layer_by_panels(model.layer[i], i, thread, soon)) return;
        }
        if (results.residual)
            take_residual(model, batch, x, share(batch.logits_count, thread, threads), results.residual);
        else if (results.hidden)
            take_hidden(model, batch, x, share(batch.logits_count, thread, threads), results.hidden);
        else
            logits(thread);
    }
};

}  // namespace

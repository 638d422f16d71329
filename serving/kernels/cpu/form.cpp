// One form of the kernels: compiled once per instruction set, with MILLRACE_FORM naming it. Each KERNEL is a function
// millrace_<name>_<form> that Python calls by address; its signature for ctypes is in structures.py.
#include "form.h"

#include "decoder.h"
#include "grouped.h"
#include "sample.h"

#define JOINED(name, form) millrace_##name##_##form
#define NAMED(name, form) JOINED(name, form)
#define KERNEL(name) extern "C" __attribute__((visibility("default"))) void NAMED(name, MILLRACE_FORM)

namespace {

// Up to this many rows each byte of weight is read by one thread only; beyond, threads take blocks of rows.
constexpr long PANEL_ROWS = 64;

// What a call for one layer's attention works with, besides its items.
struct AttentionCall {
    AttentionShape shape;
    int threads;
    long words, rows;  // of an encoded query; queries times heads
    int32_t* encoded;
    Portions portions;
    AttentionScratch* scratch;

    // `take_items(arena)` takes the items' room.
    template <class TakeItems>
    AttentionCall(Context& c, const Model& m, const Layer& layer, const KvPlanes& kv, const Batch& batch,
                  TakeItems take_items)
        : shape{m.heads, layer.window, m.attention_scale}, threads(team_threads(c.team)), words(query_words(kv)),
          rows(batch.tokens_count * m.heads) {
        const auto lay_out = [&](Arena arena) {
            encoded = arena.take<int32_t>(rows * words);
            portions = Portions::take(arena, threads, 1);
            scratch = arena.take<AttentionScratch>(threads);
            take_items(arena, shape, threads);
            for (int t = 0; t < threads; ++t) {
                AttentionScratch s;
                take_attention(arena, ITEM_TOKENS, group_of(kv, shape), words, padded_dim(kv), s);
                if (arena.base) scratch[t] = s;
            }
            return arena.used;
        };
        lay_out({c.scratch.reserve(lay_out({nullptr}))});
        portions.clear();
    }

    // This thread's share of q [T, heads, head_dim].
    void encode(const KvPlanes& kv, const float* q, int thread) const {
        const Span mine = share(rows, thread, threads);
        for (long i = mine.first; i < mine.last; ++i) encode_query(kv, q + i * kv.head_dim, encoded + i * words);
    }
};

// The experts of one layer, all of them here, for the operations that call them alone.
template <class Choose>
void add_experts(Context& c, const Experts& e, const ExpertSizes& sizes, const float* x, long rows, float* out,
                 Choose choose) {
    ExpertTeam work;
    int* counters;
    const long items = expert_chunks(rows) * 2;
    const auto lay_out = [&](Arena arena) {
        work = ExpertTeam::take(arena, c.team, sizes, rows);
        counters = arena.take<int>(items);
        return arena.used;
    };
    lay_out({c.scratch.reserve(lay_out({nullptr}))});
    for (long i = 0; i < items; ++i) counters[i] = 0;
    each_with_tiles(c.team, [&](int thread) {
        work.add(e, rows, thread, counters, out, [&](long t) { return x + t * sizes.hidden; }, choose);
    });
}

// The same where ranks share them; the exchange tells of a loss.
template <class Choose>
void add_spread_experts(Context& c, const Experts& e, const float* x, long rows, float* out, Choose choose) {
    SpreadTeam work;
    const auto lay_out = [&](Arena arena) {
        work = SpreadTeam::take(arena, c.team, sizes_of(e), rows);
        return arena.used;
    };
    lay_out({c.scratch.reserve(lay_out({nullptr}))});
    const long n = e.router.inputs;
    each_with_tiles(c.team, [&](int thread) {
        work.add(e, rows, thread, out, [&](long t) { return x + t * n; }, choose, [] {});
    });
}

}  // namespace

KERNEL(linear)(Context& c, const Linear& w, int finish, const float* x, long rows, float* out) {
    const Turn turn(c);
    const int threads = team_threads(c.team);
    const long words = words_of(w.kind, w.inputs), count = panels_of(w);
    const long ld = finish == FINISH_SWIGLU ? count * PANEL / 2 : w.outputs;
    Arena measure = {nullptr};
    measure.take<int32_t>(rows * words);
    measure.take<float>(rows);
    const long room = w.rotation ? round_up(w.inputs, 16) : 0;  // floats a thread
    measure.take<float>(threads * room);
    Arena arena = {c.scratch.reserve(measure.used)};
    int32_t* const encoded = arena.take<int32_t>(rows * words);
    const Rows a = {encoded, arena.take<float>(rows), words};
    float* const rooms = arena.take<float>(threads * room);
    const Target target = {Finish(finish), out, ld};
    each_with_tiles(c.team, [&](int thread) {
        const Span mine = share(rows, thread, threads);
        for (long i = mine.first; i < mine.last; ++i)
            encode_input(w, x + i * w.inputs, rooms + thread * room, a.row(i), a.scale + i);
        team_barrier(c.team);
        const Span panels = share(count, thread, threads);
        if (rows <= PANEL_ROWS) return linear_block(w, a, 0, rows, panels.first, panels.last, target);
        for (long row = thread * PANEL_ROWS; row < rows; row += threads * PANEL_ROWS)
            linear_block(w, a, row, least(row + PANEL_ROWS, rows), 0, count, target);
    });
}

// out [rows, H] += what the experts that x [rows, H], a layer's normed input, is routed to make of it.
KERNEL(experts)(Context& c, const Experts& e, const float* x, long rows, float* out) {
    const Turn turn(c);
    const auto choose = [&](long, const float* row, ExpertScratch& s, Choice* choices) { route(e, row, s, choices); };
    if (e.spread.exchange) return add_spread_experts(c, e, x, rows, out, choose);
    add_experts(c, e, sizes_of(e), x, rows, out, choose);
}

// out [rows, H] += what expert chosen[row] makes of each row of x.
KERNEL(expert_rows)(Context& c, const Experts& e, const float* x, const int32_t* chosen, long rows, float* out) {
    const Turn turn(c);
    ExpertSizes sizes = sizes_of(e);
    sizes.top_k = 1;
    add_experts(c, e, sizes, x, rows, out,
                [&](long t, const float*, ExpertScratch&, Choice* choices) { *choices = {chosen[t], 1.0f}; });
}

KERNEL(grouped)(Context& c, const Grouped& g) {
    const Turn turn(c);
    const int threads = team_threads(c.team);
    Arena measure = {nullptr};
    (void)GroupedWork(g, threads, measure);
    Arena arena = {c.scratch.reserve(measure.used)};
    const GroupedWork work(g, threads, arena);
    const long active = work.find_slots();
    each_with_tiles(c.team, [&](int thread) {
        work.enter(thread);
        team_barrier(c.team);
        work.multiply_all(active);
    });
}

KERNEL(rms_norm)(Context& c, const float* x, const float* weight, long rows, long n, float eps, float* out) {
    const Turn turn(c);
    each_with_tiles(c.team, [&](int thread) {
        const Span mine = share(rows, thread, team_threads(c.team));
        for (long i = mine.first; i < mine.last; ++i) rms_norm(x + i * n, weight, n, eps, out + i * n);
    });
}

// Decodes the encoded queries again, so that q [T, heads, head_dim] float32 can be looked at and handed to `attention`.
KERNEL(rotate_and_write)(Context& c, const Model& m, int index, const Batch& batch, const float* qkv, float* q) {
    const Turn turn(c);
    const Layer& layer = m.layer[index];
    const long width = layer.qkv.outputs, dim = layer.kv.head_dim, words = query_words(layer.kv);
    const int threads = team_threads(c.team);
    const long each = round_up(width, 16) + m.heads * words;
    float* const local = reinterpret_cast<float*>(c.scratch.reserve(threads * each * 4));
    const Rotary rotary = {m.heads, m.rotary_dim, layer.q_norm, layer.k_norm, m.eps, m.cos, m.sin};
    each_with_tiles(c.team, [&](int thread) {
        float* row = local + thread * each;
        int32_t* encoded = reinterpret_cast<int32_t*>(row + round_up(width, 16));
        const Span mine = share(batch.tokens_count, thread, threads);
        for (long i = mine.first; i < mine.last; ++i) {
            __builtin_memcpy(row, qkv + i * width, width * sizeof(float));
            rotate_and_write(rotary, layer.kv, row, batch.positions[i], batch.slots[i], encoded);
            for (long h = 0; h < m.heads; ++h)
                decode_query(layer.kv, encoded + h * words, q + (i * m.heads + h) * dim);
        }
    });
}

KERNEL(attention)(Context& c, const Model& m, int index, const Batch& batch, const float* q, float* out) {
    const Turn turn(c);
    const Layer& layer = m.layer[index];
    const KvPlanes& kv = layer.kv;
    ItemPlan plan;
    const auto take_items = [&](Arena& arena, const AttentionShape& shape, int threads) {
        plan = plan_items(arena, batch, kv, shape, threads);
    };
    const AttentionCall call(c, m, layer, kv, batch, take_items);
    each_with_tiles(c.team, [&](int thread) {
        call.encode(kv, q, thread);
        team_barrier(c.team);
        AttentionScratch& s = call.scratch[thread];
        attend_items(kv, call.shape, plan, call.encoded, call.portions, thread, s, out);
        team_barrier(c.team);
        const Span tokens = share(batch.tokens_count, thread, call.threads);
        join_rows(kv, call.shape, plan, tokens.first, tokens.last, s.part, out);
    });
}

// Shared out by segments and heads, never by chunks: the thread that has an item joins its chunks in order.
KERNEL(attend_range)(Context& c, const Model& m, int index, const Batch& batch, const KVRange& range, const float* q) {
    const Turn turn(c);
    const Layer& layer = m.layer[index];
    const KvPlanes& kv = range.kv;
    const long most_items = (batch.tokens_count / ITEM_TOKENS + batch.sequences) * kv.kv_heads;
    Item* items;
    const auto take_items = [&](Arena& arena, const AttentionShape&, int) { items = arena.take<Item>(most_items); };
    const AttentionCall call(c, m, layer, kv, batch, take_items);
    long count = 0;
    each_segment(batch, 0, batch.tokens_count, ANY_LENGTH, ITEM_TOKENS, [&](const Segment& segment) {
        for (long head = 0; head < kv.kv_heads; ++head) items[count++] = {segment, head, 1};
    });
    each_with_tiles(c.team, [&](int thread) {
        call.encode(kv, q, thread);
        team_barrier(c.team);
        const auto next = [&] { return call.portions.next(count, 1, thread).first; };
        for (long i = next(); i < count; i = next())
            attend_item(range, call.shape, items[i], call.encoded, {nullptr, 0}, call.scratch[thread]);
    });
}

KERNEL(step)(Context& c, const Model& model, const Batch& batch, const Results& results) {
    const Turn turn(c);
    Arena measure = {nullptr};
    (void)Step(c.team, model, batch, results, measure);
    Arena arena = {c.scratch.reserve(measure.used)};
    Step step(c.team, model, batch, results, arena);
    each_with_tiles(c.team, [&](int thread) { step.run(thread); });
}

KERNEL(sample)(Context& c, const Samples& all) {
    each_row(c, all.rows, all.vocab, [&](long row, SampleScratch& s) { all.tokens[row] = sample_row(all, row, s); });
}

KERNEL(logprobs)(Context& c, const Logprobs& all) {
    each_row(c, all.rows, all.vocab, [&](long row, SampleScratch& s) { logprobs_row(all, row, s); });
}

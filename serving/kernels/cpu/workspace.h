// The memory of one decoder step and how its work is cut: buffers, attention items, counters. It computes nothing.
#pragma once

#include "attention.h"
#include "threads.h"

namespace {

constexpr long PARTS_LIMIT = 64L << 20;  // bytes of split-attention results

// Of many tokens, those that attend together at most, and that go through an MLP together: the second cache holds them.
// The more they are the more seldom weights come from memory, which AMX waits for where it has fewer.
constexpr long BLOCK_TOKENS = TILED ? 256 : 128;
constexpr long PART_TOKENS = TILED ? 256 : 64;
constexpr long FETCHED_BEFORE = 2L << 20;  // bytes of KV a thread fetches before attention, for caches to keep

// Tokens a thread from which blocks of rows beat panels of weights, by kind of these. By AMX rows are multiplied in less
// time than it takes each thread to read all weights, so it takes more of them.
INLINE long rows_mode_tokens(int kind) {
    if (!TILED || kind == KIND_F32) return 32;
    return kind == KIND_BF16 ? 96 : 40;
}

// Hands out aligned pieces of one allocation; with a null base it only measures.
struct Arena {
    char* base;
    long used = 0;

    template <class T>
    T* take(long count) {
        const long at = used;
        used += round_up(count * long(sizeof(T)), 64);
        return reinterpret_cast<T*>(base + at);
    }
};

// What one thread does of `count` like things.
struct Span {
    long first, last;
};

INLINE Span share(long count, int thread, int threads) {
    return {count * thread / threads, count * (thread + 1) / threads};
}

// What a thread has of them at most.
INLINE long largest_share(long count, int threads) { return (count + threads - 1) / threads; }

// Things that threads share out among them: each takes its own share in order, and then what others have not begun of
// theirs, so that a thread whose core is taken holds the others up for no longer than what it has begun.
struct Portions {
    int threads;
    long stride;
    int* begun;  // [threads][stride]: of each thread's share, for each time things are shared out

    static Portions take(Arena& arena, int threads, long times) {
        const long stride = round_up(times, LINE / long(sizeof(int)));
        return {threads, stride, arena.take<int>(threads * stride)};
    }

    void clear() const { __builtin_memset(begun, 0, threads * stride * sizeof(int)); }

    Portions at(long time) const { return {threads, stride, begun + time}; }

    // The next of `count` things, up to `at_once` of them; none (first >= last) once all are begun.
    INLINE Span next(long count, int at_once, int thread) const {
        for (int i = 0; i < threads; ++i) {
            const int owner = (thread + i) % threads;
            const Span all = share(count, owner, threads);
            int* const counter = begun + owner * stride;
            if (all.first + __atomic_load_n(counter, __ATOMIC_RELAXED) >= all.last) continue;
            const long first = all.first + __atomic_fetch_add(counter, at_once, __ATOMIC_RELAXED);
            if (first < all.last) return {first, least(first + at_once, all.last)};
        }
        return {count, count};
    }
};

// Buffers of consecutive rows between linear layers.
struct RowBuffers {
    int32_t* words;  // encoded input of the next linear layer
    float* scale;
    float* qkv;   // [rows, (heads + 2 kv_heads) * head_dim]
    float* attn;  // [rows or more, heads * head_dim]
    float* h;     // [rows, padded intermediate]
};

struct ThreadScratch {
    AttentionScratch attention;
    RowBuffers rows;  // of `local_rows` rows
    float* normed;    // one row
    Best* best;       // [R]
    Run* runs;        // of the KV of this thread's share of sequences
    long runs_count;
    long shared;      // how many times things were shared out in portions so far
};

struct Sizes {
    long q_width, qkv_width, h_width, widest;  // in elements
    long q_words;                              // of one token's encoded queries
    long group, padded_head, head_words;
};

// Every layer has the sizes of the first, and all that have an MLP one width: `CpuDecoder` makes sure of it.
INLINE Sizes sizes_of(const Model& m) {
    const Layer& layer = m.layer[0];
    Sizes s = {};
    s.q_width = m.heads * layer.kv.head_dim;
    s.qkv_width = layer.qkv.outputs;
    for (long i = 0; i < m.layers; ++i) s.h_width = most(s.h_width, panels_of(m.layer[i].gate_up) * PANEL / 2);
    s.widest = most(m.hidden, most(s.q_width, s.h_width));
    s.head_words = query_words(layer.kv);
    s.q_words = m.heads * s.head_words;
    s.group = m.heads / layer.kv.kv_heads;
    s.padded_head = padded_dim(layer.kv);
    return s;
}

// Where a layer's gate and up deliver to: at once as inputs of `down` where these are bfloat16 as they come.
struct Gated {
    bool encoded;
    Target target;
    Rows rows;  // inputs of `down`; where not `encoded`, to be

    Gated(const Layer& layer, const RowBuffers& to, const Sizes& s)
        : encoded(layer.down.kind == KIND_BF16 && !layer.down.rotation && layer.down.inputs % 2 == 0),
          target{encoded ? FINISH_NARROW : FINISH_SWIGLU, to.h, s.h_width},
          rows(encoded ? Rows{reinterpret_cast<int32_t*>(to.h), nullptr, s.h_width / 2}
                       : Rows{to.words, to.scale, words_of(layer.down.kind, layer.down.inputs)}) {}
};

// 0 when any layer sees everything. Layers share the KV shape, so one plan of items serves them all.
INLINE long widest_window(const Model& model) {
    long widest = model.layer[0].window;
    for (long i = 0; i < model.layers; ++i)
        widest = model.layer[i].window == 0 || widest == 0 ? 0 : most(widest, model.layer[i].window);
    return widest;
}

// The first layer that has experts, or null.
INLINE const Layer* sparse_layer(const Model& model) {
    for (long i = 0; i < model.layers; ++i)
        if (model.layer[i].experts.count) return &model.layer[i];
    return nullptr;
}

INLINE void take_attention(Arena& arena, long item_tokens, long group, long head_words, long padded_head,
                           AttentionScratch& a) {
    const long rows = item_tokens * group;
    a.chunk.k = arena.take<int32_t>(CHUNK * head_words);
    a.chunk.v = arena.take<int32_t>(CHUNK * padded_head);
    a.chunk.wide = arena.take<uint16_t>(CHUNK * padded_head);
    a.q = arena.take<int32_t>(rows * head_words);
    a.q_scale = arena.take<float>(rows);
    a.scores = arena.take<float>(PRODUCT_ROWS * CHUNK);
    a.p = arena.take<int32_t>(SCORE_ROWS * CHUNK);
    a.part = arena.take<float>(PRODUCT_ROWS * padded_head);
    a.acc = arena.take<float>(rows * padded_head);
    a.top = arena.take<float>(rows);
    a.total = arena.take<float>(rows);
}

// Of `rows` rows; what attention returns may have more.
INLINE RowBuffers take_rows(Arena& arena, const Sizes& s, long rows, long attended) {
    RowBuffers b;
    b.words = arena.take<int32_t>(rows * s.widest);
    b.scale = arena.take<float>(rows);
    b.qkv = arena.take<float>(rows * s.qkv_width);
    b.attn = arena.take<float>(attended * s.q_width);
    b.h = arena.take<float>(rows * s.h_width);
    return b;
}

// Rows that a block has at most when a step is cut by rows: many share the keys that are packed for them, and by AMX
// weights too; else as long as every thread has two blocks and the first to be done takes what is left.
INLINE long block_tokens(long tokens, int threads) {
    return TILED || tokens >= 2 * BLOCK_TOKENS * threads ? BLOCK_TOKENS : ITEM_TOKENS;
}

INLINE Segment segment_of(const Batch& batch, long sequence, long row, long tokens) {
    const long ahead = batch.query_start[sequence + 1] - row;  // of the sequence's end
    return {row, tokens, batch.context_lens[sequence] - ahead, batch.block_tables + sequence * batch.table_width};
}

// How many new tokens the sequences have that are meant.
struct Lengths {
    long shortest, longest;
};

constexpr Lengths ANY_LENGTH = {0, INT32_MAX};

// Calls visit(segment) for each range of at most `most_tokens` rows of one sequence within rows [row0, row1).
template <class Visit>
INLINE void each_segment(const Batch& batch, long row0, long row1, const Lengths& lengths, long most_tokens,
                         Visit visit) {
    for (long b = 0; b < batch.sequences; ++b) {
        const long tokens = batch.query_start[b + 1] - batch.query_start[b];
        if (tokens < lengths.shortest || tokens > lengths.longest) continue;
        const long end = least(batch.query_start[b + 1], row1);
        for (long row = most(batch.query_start[b], row0); row < end; row += most_tokens)
            visit(segment_of(batch, b, row, least(most_tokens, end - row)));
    }
}

// Attention of sequences of a batch as items, and whether their chunks are shared out one by one.
struct ItemPlan {
    Item* items;
    long count, tokens, chunks;  // tokens: of all segments; chunks: of the longest item
    bool split;
    float* parts;  // [heads * tokens][chunks][stride] when split
    long stride;
};

// Splits by chunk, and by head, when whole sequences would leave threads idle: fewer than two for each, or one far
// longer than the rest.
INLINE ItemPlan plan_items(Arena& arena, const Batch& batch, const KvPlanes& kv, const AttentionShape& shape,
                           int threads, const Lengths& lengths = ANY_LENGTH) {
    ItemPlan plan = {};
    long total = 0, segments = 0;
    each_segment(batch, 0, batch.tokens_count, lengths, ITEM_TOKENS, [&](const Segment& segment) {
        const Item item = {segment, 0, 1};
        const long chunks = chunks_end(item) - first_chunk(shape, item);
        plan.chunks = most(plan.chunks, chunks);
        plan.tokens += segment.tokens;
        total += chunks;
        ++segments;
    });
    plan.items = arena.take<Item>(segments * kv.kv_heads);
    plan.stride = padded_dim(kv) + PANEL;
    const long floats = plan.tokens * shape.heads * plan.chunks * plan.stride;
    plan.split = plan.chunks > 1 && plan.chunks * 2 * threads > total && floats * long(sizeof(float)) <= PARTS_LIMIT;
    if (plan.split) plan.parts = arena.take<float>(floats);
    if (!arena.base) return plan;
    long at = 0;
    each_segment(batch, 0, batch.tokens_count, lengths, ITEM_TOKENS, [&](const Segment& segment) {
        const long heads = plan.split ? 1 : item_heads(kv, segment.tokens);
        for (long head = 0; head < kv.kv_heads; head += heads) plan.items[plan.count++] = {segment, head, heads, at};
        at += segment.tokens;
    });
    return plan;
}

// The parts of item row 0, chunk 0; rows lie plan.chunks * plan.stride apart.
INLINE float* parts_of(const ItemPlan& plan, const Item& item, long heads, long group) {
    const long row = item.at * heads + item.head * item.segment.tokens * group;
    return plan.parts + row * plan.chunks * plan.stride;
}

// Where the KV of sequences [mine.first, mine.last) lies in a plane, blocks that follow one another together.
INLINE long find_runs(const Batch& batch, const KvPlanes& kv, const AttentionShape& shape, const Span& mine,
                      Run* runs) {
    const long block_bytes = long(kv.block_size) * kv.kv_heads * kv.row_bytes;
    long count = 0;
    for (long b = mine.first; b < mine.last; ++b) {
        const int32_t* table = batch.block_tables + b * batch.table_width;
        const long stop = (batch.context_lens[b] + kv.block_size - 1) / kv.block_size;
        for (long i = first_visible(shape, batch.context_lens[b] - 1) / kv.block_size, end; i < stop; i = end) {
            for (end = i + 1; end < stop && table[end] == table[end - 1] + 1; ++end) {}
            runs[count++] = {table[i] * block_bytes, (end - i) * block_bytes / LINE};
        }
    }
    return count;
}

INLINE int next(int* counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

// The next unit of attention work that no thread has taken: an item from its first chunk on, or one chunk of it when
// the plan is split. No item past the last.
INLINE Coming take_unit(const AttentionShape& shape, const ItemPlan& plan, const Portions& units, int thread) {
    const long each = plan.split ? plan.chunks : 1;
    for (;;) {
        const Span taken = units.next(plan.count * each, 1, thread);
        if (taken.first == taken.last) return {nullptr, 0};
        const Item* item = &plan.items[taken.first / each];
        const long chunk = first_chunk(shape, *item) + taken.first % each;
        if (chunk < chunks_end(*item)) return {item, chunk};
    }
}

// Attention of a batch shared out over the team; every thread calls it, and join_rows after a barrier. A thread takes
// its next unit before it works on one, so as to fetch the keys and values it will need. `out` has a row for each token
// of the plan.
INLINE void attend_items(const KvPlanes& kv, const AttentionShape& shape, const ItemPlan& plan, const int32_t* q,
                         const Portions& units, int thread, AttentionScratch& s, float* out) {
    const KVRange all = {kv, 0, 1, nullptr, out};
    Coming unit = take_unit(shape, plan, units, thread);
    while (unit.item) {
        const Item& item = *unit.item;
        const Coming coming = take_unit(shape, plan, units, thread);
        if (plan.split) {
            take_queries(kv, shape, item, q, s);
            float* parts = parts_of(plan, item, shape.heads, group_of(kv, shape));
            parts += (unit.chunk - first_chunk(shape, item)) * plan.stride;
            attend_chunk(kv, shape, item, unit.chunk, coming, s, Parts{parts, plan.chunks * plan.stride});
        } else {
            attend_item(all, shape, item, q, coming, s, item.segment.row - item.at);
        }
        unit = coming;
    }
}

// After a barrier: finishes rows [row0, row1) of out [T, heads * head_dim] when their chunks were split.
INLINE void join_rows(const KvPlanes& kv, const AttentionShape& shape, const ItemPlan& plan, long row0, long row1,
                      float* acc, float* out) {
    if (!plan.split) return;
    const long group = group_of(kv, shape), apart = plan.chunks * plan.stride;
    for (long i = 0; i < plan.count; ++i) {
        const Item& item = plan.items[i];
        const Segment& seg = item.segment;
        for (long t = most(0, row0 - seg.row); t < least(seg.tokens, row1 - seg.row); ++t)
            for (long g = 0; g < group; ++g)
                join_parts(kv, parts_of(plan, item, shape.heads, group) + (t * group + g) * apart, plan.stride,
                           (seg.position + t) / CHUNK + 1 - first_chunk(shape, item), acc,
                           out + ((seg.row + t) * shape.heads + item.head * group + g) * kv.head_dim);
    }
}

}  // namespace

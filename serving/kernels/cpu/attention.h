// Attention over paged KV for rows of a ragged batch, decode and prefill alike.
//
// Keys are taken in chunks of 128 counted from position 0. Within a chunk the softmax is plain; chunks are joined one
// after the other with the online-softmax rule (Milakov and Gimelshein; Dao et al., FlashAttention). The order of every
// addition follows from the row's own position, so a token gets the same bits as one row of a long prefill and alone in
// decode, and a long context may be split over threads at chunk borders without changing them.
//
// One work item is up to 64 tokens of one sequence with one or all KV heads. The query heads that share a KV head read
// it once: of each KV head, row i is token i / group and query head i % group.
#pragma once

#include "chunk.h"

namespace {

constexpr long ITEM_TOKENS = 64;  // tokens an item has at most
constexpr long STATE_EXTRA = 32;  // floats after the padded head_dim in a range's state; two are used

struct AttentionShape {
    long heads;
    long window;  // 0: all
    float scale;
};

// Rows [row, row + tokens) of the batch: tokens of one sequence, the first at `position`.
struct Segment {
    long row, tokens, position;
    const int32_t* table;
};

INLINE long first_visible(const AttentionShape& shape, long position) {
    return shape.window > 0 ? most(0, position - shape.window + 1) : 0;
}

// Scratch of one thread. `acc`, `top` and `total` are the running result of the item's rows.
struct AttentionScratch {
    PackedChunk chunk;
    int32_t* q;      // [ITEM_TOKENS * group][words]
    float* scores;   // [TILE_ROWS][CHUNK]
    int32_t* p;      // [TILE_ROWS][CHUNK]
    float* part;     // [TILE_ROWS][padded dim]
    float* acc;      // [ITEM_TOKENS * group][padded dim]
    float* top;      // [ITEM_TOKENS * group], running maximum in log2 units
    float* total;    // [ITEM_TOKENS * group], running sum of weights
};

INLINE long group_of(const KvPlanes& kv, const AttentionShape& shape) { return shape.heads / kv.kv_heads; }

// ---- softmax of one row over one chunk -----------------------------------------------------------------------------

struct Weights {
    float top, total;  // maximum in log2 units, sum of 2^(score - top)
};

// Scores of one row over the first `padded` keys of a chunk, masked outside [low, high); returns their maximum. For
// int8 KV the scale of each key goes into its score.
INLINE float mask_scores(float* score, long low, long high, long padded, const float* k_scale) {
    const float nothing = -__builtin_inff();
    if (k_scale)
        for (long j = 0; j < padded; j += LANES) store(score + j, load(score + j) * load(k_scale + j));
    for (long j = 0; j < least(low, padded); ++j) score[j] = nothing;
    for (long j = most(high, 0); j < padded; ++j) score[j] = nothing;
    vf best = splat(nothing);
    for (long j = 0; j < padded; j += LANES) best = maximum(best, load(score + j));
    return max_lanes(best);
}

// Weights 2^(score * factor - top) of masked scores, exactly 0 for masked ones, encoded to p as `kind`; returns their
// sum. For int8 KV the scale of each value goes into its weight. A constant `padded` unrolls it.
INLINE float weigh(const float* score, float top, long padded, float factor, int kind, const float* v_scale,
                   int32_t* p) {
    const vf base = splat(top > -__builtin_inff() ? -top : 0.0f), scale = splat(factor);
    vf total = {};
#pragma GCC unroll 8
    for (long j = 0; j < padded; j += LANES) {
        vf weight = exp2_vector(fma(load(score + j), scale, base));
        total = total + weight;
        if (v_scale) weight = choose(weight > 0.0f, weight * load(v_scale + j), vf{});  // stale past the end
        if (kind == KIND_BF16)
            store_bf16(reinterpret_cast<uint16_t*>(p) + j, weight);
        else
            store(reinterpret_cast<float*>(p) + j, weight);
    }
    return sum_lanes(total);
}

// The online-softmax join of one chunk's result to a running one; of the two factors one is always 1.
INLINE void join(Weights chunk, const float* part, long dim, float* top, float* total, float* acc) {
    if (chunk.top == -__builtin_inff()) return;  // nothing visible
    const bool greater = chunk.top > *top;
    const float smaller = exp2_scalar(greater ? *top - chunk.top : chunk.top - *top);
    const float keep = greater ? smaller : 1.0f, add = greater ? 1.0f : smaller;
    for (long d = 0; d < dim; d += LANES) store(acc + d, fma(load(part + d), splat(add), load(acc + d) * keep));
    *total = *total * keep + chunk.total * add;
    *top = greater ? chunk.top : *top;
}

// ---- items ---------------------------------------------------------------------------------------------------------

struct Item {
    Segment segment;
    long head, heads;  // KV heads; all of them only where the rows of all fit the scratch of ITEM_TOKENS tokens
};

INLINE long item_heads(const KvPlanes& kv, long tokens) {
    return tokens * kv.kv_heads <= ITEM_TOKENS ? kv.kv_heads : 1;
}

INLINE long first_chunk(const AttentionShape& shape, const Item& item) {
    return first_visible(shape, item.segment.position) / CHUNK;
}

INLINE long chunks_end(const Item& item) {
    return (item.segment.position + item.segment.tokens - 1) / CHUNK + 1;
}

// What a thread packs after its present chunk; no item: nothing.
struct Coming {
    const Item* item;
    long chunk;
};

// Where the results of one chunk go: joined to the running ones of the scratch, or kept apart for `join_parts`.
struct Parts {
    float* out = nullptr;  // [rows][stride]: padded dim of acc, then top and total; top -inf when nothing is visible
    long stride = 0;
};

// Copies the item's encoded queries from q [T, heads, words] to s.q [heads][tokens * group][words].
void take_queries(const KvPlanes& kv, const AttentionShape& shape, const Item& item, const int32_t* q,
                  AttentionScratch& s) {
    const long words = group_of(kv, shape) * words_of(product_kind(kv), kv.head_dim);
    for (long h = 0; h < item.heads; ++h)
        for (long t = 0; t < item.segment.tokens; ++t)
            __builtin_memcpy(s.q + (h * item.segment.tokens + t) * words,
                             q + ((item.segment.row + t) * kv.kv_heads + item.head + h) * words, words * 4);
}

// So many rows of a head multiply the values where they lie: one tile has them all, and whole panels of dimensions.
INLINE bool values_in_place(const KvPlanes& kv, long rows) {
    return rows <= TILE_ROWS && product_kind(kv) == KIND_BF16 && kv.head_dim % PANEL == 0;
}

// Rows [row0, row0 + rows) of one head, at most TILE_ROWS, over the first `keys` keys of the chunk at key0, whose keys
// are packed, and its values too unless they are multiplied in place. The head's rows begin at `base` in s.q and in the
// running results.
void attend_tile(const KvPlanes& kv, const AttentionShape& shape, const Item& item, long key0, long keys, long row0,
                 long rows, long base, bool in_place, Ahead& ahead, AttentionScratch& s, const Parts& parts) {
    const int kind = product_kind(kv);
    const long group = group_of(kv, shape), words = words_of(kind, kv.head_dim), dim = padded_dim(kv);
    multiply(kind, rows, s.q + (base + row0) * words, words, s.chunk.k, words * PANEL, words,
             round_up(keys, PANEL) / PANEL, s.scores, CHUNK);
    Weights weights[TILE_ROWS];
    const float factor = shape.scale * 1.44269504f;  // to log2 units
    const float* k_scale = kv.kind == KIND_INT8 ? s.chunk.k_scale : nullptr;
    const float* v_scale = kv.kind == KIND_INT8 ? s.chunk.v_scale : nullptr;
    const long padded = round_up(keys, LANES);
    for (long r = 0; r < rows; ++r) {
        const long position = item.segment.position + (row0 + r) / group;
        const long low = most(0, first_visible(shape, position) - key0), high = least(keys, position + 1 - key0);
        weights[r].top = factor * mask_scores(s.scores + r * CHUNK, low, high, padded, k_scale);
    }
    for (long r = 0; r < rows; ++r) {
        float* score = s.scores + r * CHUNK;
        int32_t* p = s.p + r * CHUNK;
        if (padded == CHUNK && kind == KIND_BF16 && !v_scale)
            weights[r].total = weigh(score, weights[r].top, CHUNK, factor, KIND_BF16, nullptr, p);
        else
            weights[r].total = weigh(score, weights[r].top, padded, factor, kind, v_scale, p);
    }
    if (in_place)
        multiply_values(rows, s.p, s.chunk, words_of(kind, keys), dim / PANEL, ahead, s.part, dim);
    else
        multiply(kind, rows, s.p, CHUNK, s.chunk.v, words_of(kind, CHUNK) * PANEL, words_of(kind, keys), dim / PANEL,
                 s.part, dim);
    for (long r = 0; r < rows; ++r) {
        if (parts.out) {
            float* out = parts.out + (row0 + r) * parts.stride;
            __builtin_memcpy(out, s.part + r * dim, dim * sizeof(float));
            out[dim] = weights[r].top;
            out[dim + 1] = weights[r].total;
        } else {
            const long at = base + row0 + r;
            join(weights[r], s.part + r * dim, dim, s.top + at, s.total + at, s.acc + at * dim);
        }
    }
}

INLINE void find_chunk(const KvPlanes& kv, const Item& item, long chunk, Places& places) {
    const Segment& segment = item.segment;
    const long key0 = chunk * CHUNK;
    find_places(kv, segment.table, key0, least(CHUNK, segment.position + segment.tokens - key0), places);
}

// One chunk for all heads of an item.
void attend_chunk(const KvPlanes& kv, const AttentionShape& shape, const Item& item, long chunk, const Coming& coming,
                  AttentionScratch& s, const Parts& parts) {
    const Segment& segment = item.segment;
    const long group = group_of(kv, shape), rows = segment.tokens * group, key0 = chunk * CHUNK;
    find_chunk(kv, item, chunk, s.chunk.places);
    s.chunk.coming.count = 0;
    if (coming.item) find_chunk(kv, *coming.item, coming.chunk, s.chunk.coming);
    const long ahead = s.chunk.coming.count;
    const bool in_place = values_in_place(kv, rows);
    for (long h = 0; h < item.heads; ++h) {
        Ahead share = {kv, s.chunk.coming, 0, 0, ahead * h / item.heads, ahead * (h + 1) / item.heads};
        if (coming.item) share.head = coming.item->head, share.heads = coming.item->heads;
        take_keys(kv, item.head + h, share, s.chunk);
        take_values(kv, item.head + h, in_place, share, s.chunk);
        for (long row0 = 0; row0 < rows; row0 += TILE_ROWS) {
            const long count = least(TILE_ROWS, rows - row0);
            const long keys = least(s.chunk.places.count, segment.position + (row0 + count - 1) / group + 1 - key0);
            if (keys > 0) attend_tile(kv, shape, item, key0, keys, row0, count, h * rows, in_place, share, s, parts);
        }
    }
}

INLINE void write_out(const float* acc, float total, long dim, float* out) {
    const float inverse = 1.0f / total;
    long d = 0;
    for (; d + LANES <= dim; d += LANES) store(out + d, load(acc + d) * inverse);
    for (; d < dim; ++d) out[d] = acc[d] * inverse;
}

// All chunks of an item that lie in `range`, on one thread, joined in order to the state that earlier ranges left: the
// same additions whether one range holds all chunks or several follow one another. Row 0 of the range's state and
// output is row `row0` of the batch; every head's rows of the state lie `heads` strides apart.
void attend_item(const KVRange& range, const AttentionShape& shape, const Item& item, const int32_t* q,
                 const Coming& coming, AttentionScratch& s, long row0 = 0) {
    const KvPlanes& kv = range.kv;
    const long group = group_of(kv, shape), each = item.segment.tokens * group, dim = padded_dim(kv);
    const auto place = [&](long r) {
        const long token = r % each / group, head = (item.head + r / each) * group + r % group;
        return (item.segment.row - row0 + token) * shape.heads + head;
    };
    const long rows = item.heads * each, stride = dim + STATE_EXTRA;
    take_queries(kv, shape, item, q, s);
    for (long r = 0; r < rows; ++r) {
        const float* from = range.begins ? nullptr : range.state + place(r) * stride;
        for (long d = 0; d < dim; ++d) s.acc[r * dim + d] = from ? from[d] : 0.0f;
        s.top[r] = from ? from[dim] : -__builtin_inff();
        s.total[r] = from ? from[dim + 1] : 0.0f;
    }
    const long end = range.chunks ? least(range.chunks, chunks_end(item)) : chunks_end(item);
    for (long c = first_chunk(shape, item); c < end; ++c)
        attend_chunk(kv, shape, item, c, c + 1 < end ? Coming{&item, c + 1} : coming, s, Parts{});
    for (long r = 0; r < rows; ++r) {
        if (range.out) {
            write_out(s.acc + r * dim, s.total[r], kv.head_dim, range.out + place(r) * kv.head_dim);
            continue;
        }
        float* to = range.state + place(r) * stride;
        __builtin_memcpy(to, s.acc + r * dim, dim * sizeof(float));
        to[dim] = s.top[r];
        to[dim + 1] = s.total[r];
    }
}

// Joins the parts [chunks][stride] of one query head of a token at `position`, and writes out [head_dim].
void join_parts(const KvPlanes& kv, const float* parts, long stride, long chunks, float* acc, float* out) {
    const long dim = padded_dim(kv);
    float top = -__builtin_inff(), total = 0.0f;
    for (long d = 0; d < dim; ++d) acc[d] = 0.0f;
    for (long c = 0; c < chunks; ++c)
        join({parts[c * stride + dim], parts[c * stride + dim + 1]}, parts + c * stride, dim, &top, &total, acc);
    write_out(acc, total, kv.head_dim, out);
}

}  // namespace

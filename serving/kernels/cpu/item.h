// What one piece of attention's work is and what it is computed with: items of a ragged batch, the scratch of a thread,
// and the softmax of a row over one chunk of keys. It knows neither batches nor threads.
#pragma once

#include "chunk.h"

namespace {

constexpr long ITEM_TOKENS = 64;  // tokens an item has at most
constexpr long SCORE_ROWS = 64;   // rows whose scores a thread holds at once, of one head or of several
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
    float* scores;   // [SCORE_ROWS][CHUNK]
    int32_t* p;      // [SCORE_ROWS][CHUNK]
    float* part;     // [SCORE_ROWS][padded dim]
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

// The rows of one head of an item over one chunk.
struct HeadRows {
    long row0, rows;  // of the head's rows in the item, at most TILE_ROWS
    long at;          // where row0 lies in s.q and in the running results
    long scored;      // where it lies in s.scores, s.p and s.part
};

// Weights of the rows from their scores over the first `keys` keys of the chunk at key0; `out` [rows].
INLINE void weigh_rows(const KvPlanes& kv, const AttentionShape& shape, const Item& item, const HeadRows& h, long key0,
                       long keys, AttentionScratch& s, Weights* out) {
    const int kind = product_kind(kv);
    const long group = group_of(kv, shape), padded = round_up(keys, LANES);
    const float factor = shape.scale * 1.44269504f;  // to log2 units
    const float* k_scale = kv.kind == KIND_INT8 ? s.chunk.k_scale : nullptr;
    const float* v_scale = kv.kind == KIND_INT8 ? s.chunk.v_scale : nullptr;
    for (long r = 0; r < h.rows; ++r) {
        const long position = item.segment.position + (h.row0 + r) / group;
        const long low = most(0, first_visible(shape, position) - key0), high = least(keys, position + 1 - key0);
        out[r].top = factor * mask_scores(s.scores + (h.scored + r) * CHUNK, low, high, padded, k_scale);
    }
    for (long r = 0; r < h.rows; ++r) {
        float* score = s.scores + (h.scored + r) * CHUNK;
        int32_t* p = s.p + (h.scored + r) * CHUNK;
        if (padded == CHUNK && kind == KIND_BF16 && !v_scale)
            out[r].total = weigh(score, out[r].top, CHUNK, factor, KIND_BF16, nullptr, p);
        else
            out[r].total = weigh(score, out[r].top, padded, factor, kind, v_scale, p);
    }
}

// The rows' sums of values in s.part, joined to the running results or put where parts go.
INLINE void take_parts(const HeadRows& h, const Weights* weights, long dim, AttentionScratch& s, const Parts& parts) {
    for (long r = 0; r < h.rows; ++r) {
        const float* part = s.part + (h.scored + r) * dim;
        if (parts.out) {
            float* out = parts.out + (h.row0 + r) * parts.stride;
            __builtin_memcpy(out, part, dim * sizeof(float));
            out[dim] = weights[r].top;
            out[dim + 1] = weights[r].total;
        } else {
            const long at = h.at + r;
            join(weights[r], part, dim, s.top + at, s.total + at, s.acc + at * dim);
        }
    }
}

// So many rows of a head multiply the values where they lie: one tile has them all, and whole panels of dimensions.
INLINE bool values_in_place(const KvPlanes& kv, long rows) {
    return rows <= TILE_ROWS && product_kind(kv) == KIND_BF16 && kv.head_dim % PANEL == 0;
}

INLINE void find_chunk(const KvPlanes& kv, const Item& item, long chunk, Places& places) {
    const Segment& segment = item.segment;
    const long key0 = chunk * CHUNK;
    find_places(kv, segment.table, key0, least(CHUNK, segment.position + segment.tokens - key0), places);
}

}  // namespace

// What one piece of attention's work is and what it is computed with: items of a ragged batch, the scratch of a thread,
// and the weights of a tile's rows over one chunk of keys. It knows neither batches nor threads.
#pragma once

#include "softmax.h"

namespace {

constexpr long ITEM_TOKENS = 64;  // tokens an item has at most, but in blocks of rows
constexpr long SCORE_ROWS = 64;   // rows whose scores a thread holds at once, of one head or of several
constexpr long PRODUCT_ROWS = (TILED ? 2 : 1) * SCORE_ROWS;  // rows of products: two where they are bytes
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
    int32_t* q;      // [tokens of an item * group][words]
    float* q_scale;  // [tokens of an item * group], of bytes
    float* scores;   // [PRODUCT_ROWS][CHUNK]
    int32_t* p;      // [SCORE_ROWS][CHUNK]
    float* part;     // [PRODUCT_ROWS][padded dim]
    float* acc;      // [tokens of an item * group][padded dim]
    float* top;      // [tokens of an item * group], running maximum in log2 units
    float* total;    // [tokens of an item * group], running sum of weights
};

INLINE long group_of(const KvPlanes& kv, const AttentionShape& shape) { return shape.heads / kv.kv_heads; }

// ---- items ---------------------------------------------------------------------------------------------------------

struct Item {
    Segment segment;
    long head, heads;  // KV heads; all of them only where the rows of all fit the scratch of ITEM_TOKENS tokens
    long at = 0;       // tokens of the plan's segments before it
};

INLINE long item_heads(const KvPlanes& kv, long tokens) {
    return tokens * kv.kv_heads <= ITEM_TOKENS ? kv.kv_heads : 1;
}

// New tokens of a sequence up to which an item has all heads, and one at least: decodes and their drafts, and little more.
INLINE long short_tokens(const KvPlanes& kv) { return most(1, ITEM_TOKENS / kv.kv_heads); }

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

// Weights of the rows from their scores over the first `keys` keys of the chunk at key0.
INLINE Weights weigh_rows(const KvPlanes& kv, const AttentionShape& shape, const Item& item, const HeadRows& h,
                          long key0, long keys, AttentionScratch& s) {
    const int kind = product_kind(kv);
    const long group = group_of(kv, shape), padded = round_up(keys, most(LANES, 2 * VALUE_WORDS));
    const float factor = shape.scale * 1.44269504f;  // to log2 units
    const float* k_scale = kv.kind == KIND_INT8 ? s.chunk.k_scale : nullptr;
    const float* v_scale = kv.kind == KIND_INT8 ? s.chunk.v_scale : nullptr;
    vf folded[LANES] = {};
    for (long r = 0; r < h.rows; ++r) {
        const long position = item.segment.position + (h.row0 + r) / group;
        const long low = first_visible(shape, position) - key0, high = least(keys, position + 1 - key0);
        float* score = s.scores + (h.scored + r) * CHUNK;
        if (padded == CHUNK && low <= 0 && high == CHUNK && !k_scale)
            folded[r] = mask_scores(score, 0, CHUNK, CHUNK, nullptr);
        else
            folded[r] = mask_scores(score, low, high, padded, k_scale);
    }
    Weights weights;
    weights.top = max_of_rows(folded, h.rows) * factor;
    alignas(64) float base[LANES];
    store(base, choose(weights.top > -__builtin_inff(), -weights.top, vf{}));
    for (long r = 0; r < h.rows; ++r) {
        const float* score = s.scores + (h.scored + r) * CHUNK;
        int32_t* p = s.p + (h.scored + r) * CHUNK;
        if (padded == CHUNK && kind == KIND_BF16 && !v_scale)
            folded[r] = weigh(score, base[r], CHUNK, factor, KIND_BF16, nullptr, p);
        else
            folded[r] = weigh(score, base[r], padded, factor, kind, v_scale, p);
    }
    weights.total = sum_of_rows(folded, h.rows);
    return weights;
}

// Where a tile's sums of values go: joined to the running results, or put where parts go.
struct Joined {
    alignas(64) float top[LANES], keep[LANES], add[LANES];
    float* to;
    long stride;
    bool apart;

    INLINE Joined(const HeadRows& h, const Weights& weights, long dim, AttentionScratch& s, const Parts& parts)
        : to(parts.out ? parts.out + h.row0 * parts.stride : s.acc + h.at * dim),
          stride(parts.out ? parts.stride : dim), apart(parts.out) {
        store(top, weights.top);
        if (apart) {
            alignas(64) float total[LANES];
            store(total, weights.total);
            for (long r = 0; r < h.rows; ++r) to[r * stride + dim] = top[r], to[r * stride + dim + 1] = total[r];
            return;
        }
        Weights running = {load_first(s.top + h.at, h.rows), load_first(s.total + h.at, h.rows)};
        const Factors factors = join(weights, running);
        store_first(s.top + h.at, h.rows, running.top);
        store_first(s.total + h.at, h.rows, running.total);
        store(keep, factors.keep);
        store(add, factors.add);
    }

    // Sums of row r in LANES dimensions from d on.
    INLINE void take(long r, long d, vf part) const {
        float* const out = to + r * stride + d;
        if (apart)
            store(out, part);
        else if (top[r] != -__builtin_inff())
            store(out, join_sums(part, keep[r], add[r], load(out)));
    }
};

// Those of the rows in s.part.
INLINE void take_parts(const HeadRows& h, const Weights& weights, long dim, AttentionScratch& s, const Parts& parts) {
    const float* const part = s.part + h.scored * dim;
    const Joined to(h, weights, dim, s, parts);
    for (long r = 0; r < h.rows; ++r)
        for (long d = 0; d < dim; d += LANES) to.take(r, d, load(part + r * dim + d));
}

// One tile has so many rows of a head, and whole panels of dimensions.
INLINE bool one_tile(const KvPlanes& kv, long rows) {
    return rows <= TILE_ROWS && product_kind(kv) != KIND_F32 && kv.head_dim % PANEL == 0;
}

// So many rows of a head multiply the values where they lie, as AMX cannot.
INLINE bool values_in_place(const KvPlanes& kv, long rows) { return !TILED && one_tile(kv, rows); }

INLINE void find_chunk(const KvPlanes& kv, const Item& item, long chunk, Places& places) {
    const Segment& segment = item.segment;
    const long key0 = chunk * CHUNK;
    find_places(kv, segment.table, key0, least(CHUNK, segment.position + segment.tokens - key0), places);
}

}  // namespace

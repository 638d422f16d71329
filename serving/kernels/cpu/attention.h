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

#include "few_bytes.h"

namespace {

// Copies the item's encoded queries from q [T, heads, words] to s.q [heads][tokens * group][words].
void take_queries(const KvPlanes& kv, const AttentionShape& shape, const Item& item, const int32_t* q,
                  AttentionScratch& s) {
    if (by_bytes(kv)) return take_byte_queries(kv, shape, item, q, s);
    const long words = group_of(kv, shape) * query_words(kv);
    for (long h = 0; h < item.heads; ++h)
        for (long t = 0; t < item.segment.tokens; ++t)
            __builtin_memcpy(s.q + (h * item.segment.tokens + t) * words,
                             q + ((item.segment.row + t) * kv.kv_heads + item.head + h) * words, words * 4);
}

// Some rows of one head over the first `keys` keys of the chunk at key0, whose keys are packed, and its values too unless
// they are multiplied in place.
void attend_tile(const KvPlanes& kv, const AttentionShape& shape, const Item& item, const HeadRows& h, long key0,
                 long keys, bool in_place, Ahead& ahead, AttentionScratch& s, const Parts& parts) {
    if (by_bytes(kv)) return attend_tile_bytes(kv, shape, item, h, key0, keys, s, parts);
    const int kind = product_kind(kv);
    const long words = words_of(kind, kv.head_dim), dim = padded_dim(kv);
    multiply(kind, h.rows, s.q + h.at * words, words, s.chunk.k, words * PANEL, words, round_up(keys, PANEL) / PANEL,
             s.scores, CHUNK);
    const Weights weights = weigh_rows(kv, shape, item, h, key0, keys, s);
    if (in_place)
        multiply_values(h.rows, s.p, s.chunk, words_of(kind, keys), dim / PANEL, ahead, s.part, dim);
    else
        multiply(kind, h.rows, s.p, CHUNK, s.chunk.v, words_of(kind, CHUNK) * PANEL, value_words(kind, keys),
                 dim / PANEL, s.part, dim);
    take_parts(h, weights, dim, s, parts);
}

// One chunk for all heads of an item.
void attend_chunk(const KvPlanes& kv, const AttentionShape& shape, const Item& item, long chunk, const Coming& coming,
                  AttentionScratch& s, const Parts& parts) {
    const Segment& segment = item.segment;
    const long group = group_of(kv, shape), rows = segment.tokens * group, key0 = chunk * CHUNK;
    find_chunk(kv, item, chunk, s.chunk.places);
    s.chunk.coming.count = 0;
    if (coming.item) find_chunk(kv, *coming.item, coming.chunk, s.chunk.coming);
    if (few_rows(kv, item, rows)) {
        const AttendFew attend = by_bytes(kv) ? attend_few_bytes_of(kv) : attend_few_of(kv);
        return attend(kv, shape, item, chunk, s, parts);
    }
    const long ahead = s.chunk.coming.count;
    const bool in_place = values_in_place(kv, rows);
    const long height = TILED && product_kind(kv) == KIND_F32 ? TILE_ROWS_F32 : TILE_ROWS;
    for (long h = 0; h < item.heads; ++h) {
        Ahead share = {kv, s.chunk.coming, 0, 0, ahead * h / item.heads, ahead * (h + 1) / item.heads};
        if (coming.item) share.head = coming.item->head, share.heads = coming.item->heads;
        take_keys(kv, item.head + h, share, s.chunk);
        take_values(kv, item.head + h, in_place, share, s.chunk);
        for (long row0 = 0; row0 < rows; row0 += height) {
            const long count = least(height, rows - row0);
            const long keys = least(s.chunk.places.count, segment.position + (row0 + count - 1) / group + 1 - key0);
            const HeadRows tile = {row0, count, h * rows + row0, 0};
            if (keys > 0) attend_tile(kv, shape, item, tile, key0, keys, in_place, share, s, parts);
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
    Weights running = {splat(-__builtin_inff()), vf{}};
    for (long d = 0; d < dim; ++d) acc[d] = 0.0f;
    for (long c = 0; c < chunks; ++c) {
        const float* part = parts + c * stride;
        if (part[dim] == -__builtin_inff()) continue;  // nothing visible
        const Factors factors = join({splat(part[dim]), splat(part[dim + 1])}, running);
        for (long d = 0; d < dim; d += LANES)
            store(acc + d, join_sums(load(part + d), factors.keep[0], factors.add[0], load(acc + d)));
    }
    write_out(acc, running.total[0], kv.head_dim, out);
}

}  // namespace

// What a step begins and ends with: rows of the embedding, which rows are read, and the best tokens of its threads.
#pragma once

#include "workspace.h"

namespace {

// A token's row of the embedding, [hidden].
INLINE void embed_token(const Model& model, long token, float* out) {
    const long n = model.hidden;
    const float* wide = static_cast<const float*>(model.embedding) + token * n;
    const uint16_t* narrow = static_cast<const uint16_t*>(model.embedding) + token * n;
    const bool is_wide = model.embedding_kind == KIND_F32;
    for (long i = 0; i < n; ++i) out[i] = is_wide ? wide[i] : from_bf16(narrow[i]);
}

// From the first to the last of rows [row0, row1) whose output of the last layer is read; KV of all of them is written
// by then. Empty (first >= last) where none is, and of a block that begins past the batch (row0 >= row1).
INLINE Span wanted(const Batch& batch, long row0, long row1) {
    Span rows = {most(row0, row1), row0};
    for (long i = 0; i < batch.logits_count; ++i) {
        const long row = batch.logits_rows[i];
        if (row >= row0 && row < row1) rows = {least(rows.first, row), most(rows.last, row + 1)};
    }
    return rows;
}

// Of logits rows `mine` of x [T, hidden]: after the final norm, and as they are.
INLINE void take_hidden(const Model& model, const Batch& batch, const float* x, const Span& mine, float* out) {
    for (long i = mine.first, n = model.hidden; i < mine.last; ++i)
        rms_norm(x + batch.logits_rows[i] * n, model.final_norm, n, model.eps, out + i * n);
}

INLINE void take_residual(const Model& model, const Batch& batch, const float* x, const Span& mine, float* out) {
    for (long i = mine.first, n = model.hidden; i < mine.last; ++i)
        __builtin_memcpy(out + i * n, x + batch.logits_rows[i] * n, n * sizeof(float));
}

// The best token of each row over what each thread has found in its panels.
INLINE void choose_best(const ThreadScratch* local, int threads, long rows, int64_t* greedy) {
    for (long i = 0; i < rows; ++i) {
        Best best = local[0].best[i];
        for (int t = 1; t < threads; ++t)
            if (better(local[t].best[i], best)) best = local[t].best[i];
        // no score above -inf, or one beyond all numbers: the caller must not take id 0 for a choice
        const bool finite = best.value > -__builtin_inff() && best.value < __builtin_inff();
        greedy[i] = finite ? best.token : -1;
    }
}

}  // namespace

// What Python asks of the sampling kernels: plain C structures. `structures.py` reads their fields from here, so each
// is a line of its own; `Order` is packed by ORDER in `sampling.py`. Nothing computes here.
//
// Shapes: R rows of logits, V vocabulary, K alternatives.
#pragma once

#include <stdint.h>

// Instead of a token, where none can be sampled.
enum NoToken { NOT_NUMBERS = -1, ALL_MASKED = -2 };

// How one row's token is chosen. Edits come first: logits of tokens not allowed become -inf,
// `changes` are added, then penalties are taken off.
struct Order {
    uint64_t seed;
    uint64_t position;
    const float* counts;   // [V] occurrences in the output, or null without penalties
    const uint8_t* seen;   // [V] whether a token occurs in prompt or output
    const uint32_t* allowed;  // the tokens that may be chosen, as bits; null for all of them
    double top_p;          // 1 keeps all
    double min_p;          // 0 keeps all
    float temperature;     // 0: the best-ranked token
    float repetition;
    float presence;
    float frequency;
    int32_t top_k;         // 0 keeps all
    int32_t first_change;
    int32_t changes;
    int32_t allowed_tokens;  // bits of `allowed`; no token beyond them may be chosen
};

struct Samples {
    const float* logits;     // [R, V], left unchanged
    int64_t stride;          // elements from row to row
    int32_t rows;
    int32_t vocab;
    const Order* order;      // [R]
    const int32_t* ids;      // of all rows' changes; -inf masks a token
    const float* changes;
    int64_t* tokens;         // [R], or what NoToken says
};

struct Logprobs {
    const float* logits;     // [R, V]
    int64_t stride;
    int32_t rows;
    int32_t vocab;
    int32_t best;            // K, at most V
    const int64_t* chosen;   // [R] tokens
    double* whole;           // [R] log of the sum of exp(logit): logits less this are log-probabilities. NaN for a bad row
    float* of_chosen;        // [R] log-probabilities
    int32_t* ids;            // [R, K] of the best-ranked, in order of id
    float* best_logits;      // [R, K]
};

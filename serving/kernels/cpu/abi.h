// The plain C structures Python fills in. `structures.py` reads their fields from here, so each is a line of its own.
// Nothing here computes.
//
// Shapes: T new tokens of the step, B sequences, M blocks of the widest block table, R rows whose logits are wanted.
#pragma once

#include <stdint.h>

enum Kind { KIND_INT8 = 1, KIND_BF16 = 2, KIND_F32 = 3 };

// A linear layer's packed weight: panels of 32 output channels, each [ceil(k / per)][32][per] with per = 4 / element
// bytes, so that one 32-bit word holds the inputs a dot-product instruction takes at once. Padding is zero.
struct Linear {
    int32_t kind;
    int32_t outputs;
    int32_t inputs;
    int32_t rotation;     // inputs that a Hadamard transform joins before they are quantized; 0: none. int8 only
    const void* packed;
    const float* scale;   // [outputs], int8 only
    const float* bias;    // [outputs] or null
    const int32_t* sums;  // [padded outputs], int8 only: 128 * sum over inputs, what the unsigned shift adds
};

// One layer's KV planes, each [num_blocks, block_size, kv_heads, head_dim]; scales [num_blocks, block_size, kv_heads].
// Rows, a head's numbers for a token, follow one another at equal distances, and so do their scales.
struct KvPlanes {
    int32_t kind;
    int32_t block_size;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t row_bytes;     // from one row to the next
    int32_t scale_stride;  // floats from one scale to the next
    void* k;
    void* v;
    float* k_scale;  // int8 only
    float* v_scale;
};

// A ragged batch, as serving.batch.ragged.RaggedBatch holds it.
struct Batch {
    int32_t tokens_count;   // T
    int32_t sequences;      // B
    int32_t table_width;    // M
    int32_t logits_count;   // R
    const int64_t* tokens;         // [T]
    const int64_t* positions;      // [T]
    const int64_t* slots;          // [T]
    const int32_t* query_start;    // [B + 1]
    const int32_t* context_lens;   // [B]
    const int32_t* block_tables;   // [B, M]
    const int64_t* logits_rows;    // [R]
};

// A range of the KV of a batch's sequences, attended to by itself: the batch's context_lens and block_tables count from
// its first key, which lies at a multiple of 128.
struct KVRange {
    KvPlanes kv;
    int32_t chunks;  // of 128 keys it has; 0: up to each query's own
    int32_t begins;  // 1: nothing was attended to before, so `state` is not read
    float* state;    // [T, heads][stride]: sums of values, then the maximum and the sum of weights; see STATE_EXTRA
    float* out;      // [T, heads, head_dim]: the result, when this is the last range; else null
};

// Where the experts of a layer are that the ranks of a group share: rows travel to them by an exchange (exchange.h), as
// the experts' first layer multiplies them, and results come back in float32.
struct Spread {
    void* exchange;           // an Exchange; null: all experts are here
    const int32_t* copies;    // [E] how many ranks' slots a row may go to
    const int32_t* physical;  // [E, most_copies] those: rank * slots + slot
    int64_t* taken;           // [E] the rows of this rank that an expert was chosen for are added; or null
    int32_t most_copies;
};

// The routed experts of a layer: gated MLPs of one shape and kind. The router has a score for each of all E, of which a
// token takes `top_k`.
struct Experts {
    int32_t count;          // whose weights are here: all E, or those behind this rank's slots. 0: the layer has an MLP
    int32_t top_k;
    int32_t normalized;     // 1: the weights of a token's experts sum to 1
    Linear router;          // E outputs
    const Linear* gate_up;  // [count], as `gate_up` of Layer
    const Linear* down;     // [count]
    Spread spread;
};

// INT8 linear layers of one shape, one for each slot, and rows for them: those of the first slot, then of the next.
// Weights lie as in a checkpoint, [outputs, inputs].
struct Grouped {
    int32_t slots;
    int32_t inputs;
    int32_t outputs;
    int32_t rows_count;             // N
    int32_t x_kind;                 // KIND_INT8: rows are at `places`; else in `x`, and are quantized one by one
    int32_t out_kind;               // KIND_BF16 or KIND_F32
    int32_t bias_kind;              // KIND_BF16 or KIND_F32; 0: there is none
    const void* x;                  // [N, inputs], but for int8
    const int64_t* places;          // [N] the address of each row [inputs], int8 only
    const float* row_scale;         // [N], int8 only
    const int32_t* counts;          // [slots] rows
    const void* const* weight;      // [slots]
    const void* const* scale;       // [slots], each float [outputs]
    const void* const* bias;        // [slots], each [outputs]
    void* out;                      // [N, outputs]
};

struct Layer {
    const float* attention_norm;  // [hidden]
    const float* mlp_norm;        // [hidden]
    const float* q_norm;          // [head_dim] or null
    const float* k_norm;
    Linear qkv;      // outputs q heads, then k heads, then v heads
    Linear o;
    Linear gate_up;  // 16 gate channels, 16 up channels, and so on: see FINISH_SWIGLU; all zero where there are experts
    Linear down;
    Experts experts;
    KvPlanes kv;
    int32_t window;  // tokens a query sees, itself included; 0 means all
};

// What bounds the scores of a bfloat16 head without reading it: see screen.h.
struct Screen {
    Linear coarse;        // the head's weights in int8; `packed` null: there is none
    const float* missed;  // [padded outputs]: length of what int8 misses of a channel's weights; infinite for padding
    const float* kept;    // [padded outputs]: length of what it has of them
};

// A decoder of the Llama shape.
struct Model {
    int32_t layers;
    int32_t hidden;
    int32_t heads;
    int32_t rotary_dim;      // leading dimensions of a head that rotate
    int32_t intermediate;
    int32_t embedding_kind;  // KIND_BF16 or KIND_F32
    float eps;
    float attention_scale;
    const Layer* layer;      // [layers]
    const float* cos;        // [positions, rotary_dim / 2]
    const float* sin;
    const void* embedding;   // [vocab, hidden]
    const float* final_norm;
    Linear head;
    Screen screen;
};

// KV of earlier tokens that others write while the step runs, layer by layer; serving.batch.layer_barrier mirrors it.
struct LayerBarrier {
    int64_t arrived;  // leading layers that are there; below 0: no more will come
    int64_t hurried;  // not 0: others wait for the step, so it is not to wait here
    int64_t left;     // out: 1 when the step left at a layer that was not there; its results mean nothing
    int64_t waited;   // out: nanoseconds
};

// Where a step's results go; null pointers are skipped.
struct Results {
    float* logits;      // [R, vocab]
    int64_t* greedy;    // [R]: the best token, the lowest id among equals
    float* const* kept; // [R]: where the logits [vocab] of a row are kept besides, null where they are not
    float* hidden;      // [R, hidden]: the rows after the final norm; alone, the head is left out
    float* residual;    // [R, hidden]: the rows before the final norm; alone
    int32_t* progress;  // one int32: layers whose KV of this step is written, stored with release order
    LayerBarrier* barrier;  // where the step waits for each layer's earlier KV before it counts or reads it
};

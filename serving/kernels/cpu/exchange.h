// The exchange of MoE rows between the ranks of one host, over memory that they share: structures and functions.
//
// Each rank owns one segment, which it alone writes and all others map for reading. It holds the rank's flags and, for
// each of two dispatches under way, its rows (dispatch) and the results of those it received (combine), each once,
// with a list for every peer of what of them is for that one; all as large as a step may ever need. A flag is a sequence
// number: its release store makes what was written before visible to the acquire load that sees it, on x86 (TSO) as on
// aarch64.
#pragma once

#include <stdint.h>

struct ExchangeShape {
    int32_t ranks;
    int32_t rank;
    int32_t slots;       // experts that one rank holds
    int32_t top_k;       // experts of a row
    int32_t hidden;
    int32_t max_tokens;  // of one rank in one dispatch
    int32_t wire;        // Kind of the rows that travel
    int32_t back;        // Kind of the results that travel
};

struct ExchangeTraffic {
    int64_t dispatches;
    int64_t rows;            // sent to other ranks
    int64_t dispatch_bytes;  // values and scales of those
    int64_t routing_bytes;   // their counts and slots
    int64_t combine_bytes;   // results sent to other ranks
    int64_t uncached_sums;   // rows whose sums were stored past the caches
};

struct ExchangeLoss {
    int32_t rank;
    int32_t reason;  // 0 none, 1 its process has ended, 2 it is late, 3 it has left, 4 what it sent makes no sense
};

struct Exchange;

#pragma GCC visibility push(default)
extern "C" {

// Whether sums can be stored past the caches: compiled by g++ for glibc, on a CPU of x86-64-v4.
int32_t millrace_exchange_wide(void);

// Bytes of one rank's segment.
int64_t millrace_exchange_bytes(const ExchangeShape* shape);

// `segments` are where each rank's begins, the own one writable and zeroed; `pidfds` and process
// numbers one for each rank, -1 for none. Where all ranks' results of a round are more than `cached_bytes`, as
// far as this one can tell, rows of sums of bfloat16 ones that begin with a line of memory are stored
// past the caches, where millrace_exchange_wide says so. Who adds up for himself (arrived) is not affected.
Exchange* millrace_exchange_create(const ExchangeShape* shape, uint8_t* const* segments, const int32_t* pidfds,
                                   const int32_t* pids, int64_t deadline_ns, int64_t spin_ns, int64_t cached_bytes);
void millrace_exchange_destroy(Exchange* exchange);

// Tells the others that this rank takes part no longer.
void millrace_exchange_leave(Exchange* exchange);

// Where the rows of the next dispatch, in the kind that travels, and for int8 their scales may be written beforehand: they
// need no copy then.
void* millrace_exchange_room(Exchange* exchange, float** scales);

// Sends rows [tokens, hidden] of `kind` to the ranks of their `physical` experts [tokens, top_k] (rank * slots + slot).
// 0; -1 where a rank is lost.
int64_t millrace_exchange_begin_dispatch(Exchange* exchange, const void* rows, const float* row_scales, int32_t kind,
                                         int64_t tokens, const int32_t* physical);

// Waits for the rows of all others, of the oldest dispatch that has begun: how many are for each slot, and the region,
// 0 or 1, by which they and their results are known until these are combined. Their number; -1 where a rank is lost.
int64_t millrace_exchange_finish_dispatch(Exchange* exchange, int32_t* counts, int32_t* region);

// The most rows that are gathered at once: all of any one slot.
int64_t millrace_exchange_portion(const ExchangeShape* shape);

// Where each row received for a region lies, in its sender's segment, slot by slot, and for int8 its scale: tables that
// stay where they are, and whose numbers hold as the rows do, until their results are sent.
const uint8_t* const* millrace_exchange_rows(const Exchange* exchange, int32_t region);
const float* millrace_exchange_scales(const Exchange* exchange, int32_t region);

// Copies the rows of slot `first`, and of as many after it as fit a portion, in `values` and `scales`, slot by slot,
// each slot's by rank and then as they came. The number of rows; `end` is the slot after the last.
int64_t millrace_exchange_gather(const Exchange* exchange, int32_t region, int32_t first, void* values, float* scales,
                                 int32_t* end);

// From now on every dispatch tells all ranks this number.
void millrace_exchange_announce(Exchange* exchange, int32_t number);

// The least number that a rank has told with the last dispatch: the same on every rank after the same dispatch.
int32_t millrace_exchange_agreed(const Exchange* exchange);

// Where results of a region's rows may be written, so that they need no copy.
void* millrace_exchange_results(Exchange* exchange, int32_t region);

// Gives results [rows received, hidden] of `kind`, of the oldest dispatch without any, to the ranks of their rows.
// 0; -1 where a rank is lost.
int64_t millrace_exchange_begin_combine(Exchange* exchange, const void* results, int32_t kind);

// Waits for the results of the own rows, and adds them up times `weights` [tokens, top_k], in the order of k, in `sums`
// float32 [tokens, hidden]. 0; -1 where a rank is lost.
int64_t millrace_exchange_finish_combine(Exchange* exchange, const float* weights, float* sums);

// The same for who adds up for himself: where each result [tokens, top_k] of the own rows is, until the next dispatch
// begins; null where a rank is lost.
const uint8_t* const* millrace_exchange_arrived(Exchange* exchange);

const ExchangeTraffic* millrace_exchange_traffic(const Exchange* exchange);
const ExchangeLoss* millrace_exchange_loss(const Exchange* exchange);

}
#pragma GCC visibility pop

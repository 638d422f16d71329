// Dispatch and combine over shared segments: see exchange.h. It allocates when it is made, and never again.
//
// Two dispatches may be under way before the first is combined, each in a region of its own. One alone takes the first
// region again and again, so that as little memory as possible is used, and stays in the caches.
#include "exchange.h"

#include "exchange_layout.h"
#include "exchange_rows.h"
#include "exchange_waits.h"

#include <string.h>

#include <algorithm>
#include <vector>

namespace {

// One dispatch until it is combined.
struct Trip {
    int region = 0;
    int64_t tokens = 0, received = 0, others = 0;  // rows, results, and results of these for other ranks
    std::vector<int32_t> physical;                 // [tokens, top_k]
    std::vector<int64_t> ends;                     // of each slot among the rows received
    std::vector<const uint8_t*> rows;              // each one received, where its sender has it
    std::vector<const uint8_t*> results;           // [tokens, top_k] of the own rows, each where its rank has it
    std::vector<float> scales;                     // of these
};

}  // namespace

struct Exchange : Waits {
    uint32_t dispatched = 0, received = 0, returned = 0, combined = 0;  // sequence numbers of what was begun and finished
    Trip trips[2];                         // of each region
    int region_of[2] = {};                 // of the dispatches with even and with odd numbers
    std::vector<int64_t> counts;           // of each rank: rows, or results, so far
    std::vector<const uint8_t*> summands;  // results of one row, in the order of its experts, and of the next
    ExchangeTraffic traffic{};
    int32_t announced = 0, agreed = 0;
    int64_t cached_bytes = 0;

    explicit Exchange(const ExchangeShape& given) : Waits(given) {}

    int64_t nonsense(int rank) {
        lose(rank, SENSELESS);
        return -1;
    }

    // Where the next dispatch lies. All ranks begin and finish in one order, so that all choose alike. Of the dispatch
    // before in the same region nobody reads anything any more: this rank has its results, and so its peers, which read
    // its rows where they lie, had computed with them; and before it writes results, its peers have begun this dispatch,
    // and so they had the results before.
    int free_region() const { return dispatched == combined ? 0 : 1 - region_of[dispatched & 1]; }
    Trip& trip(uint32_t sequence) { return trips[region_of[sequence & 1]]; }

    uint8_t* part(int region, int rank) { return segments[rank] + layout.regions + region * layout.region; }
    List list(int region, int from, int to) { return {part(region, from) + to * layout.list, layout}; }
    uint8_t* values(int region, int rank) { return part(region, rank) + layout.values; }
    float* scales(int region, int rank) { return reinterpret_cast<float*>(part(region, rank) + layout.scales); }
    uint8_t* results(int region, int rank) { return part(region, rank) + layout.results; }
    int32_t* places(int region, int from, int to) {
        return reinterpret_cast<int32_t*>(part(region, from) + layout.places + to * layout.lists);
    }

    int64_t row_bytes() const { return shape.hidden * item_bytes(shape.wire); }

    void put_rows(int region, const void* rows, const float* row_scales, int kind, int64_t tokens) {
        const int64_t hidden = shape.hidden;
        uint8_t* out = values(region, shape.rank);
        float* out_scales = scales(region, shape.rank);
        if (rows == out) return;
        if (shape.wire != INT8 || kind == INT8) {
            memcpy(out, rows, tokens * hidden * item_bytes(kind));
            if (shape.wire == INT8) memcpy(out_scales, row_scales, tokens * 4);
            return;
        }
        for (int64_t t = 0; t < tokens; ++t) {
            int8_t* row = reinterpret_cast<int8_t*>(out) + t * hidden;
            out_scales[t] = kind == F32 ? quantize(static_cast<const float*>(rows) + t * hidden, hidden, row)
                                        : quantize(static_cast<const uint16_t*>(rows) + t * hidden, hidden, row);
        }
    }

    // Tells each rank once of a row that it has experts for.
    void put_lists(const Trip& trip, uint32_t sequence) {
        const int64_t top_k = shape.top_k;
        std::fill(counts.begin(), counts.end(), 0);
        for (int64_t t = 0; t < trip.tokens; ++t) {
            const int32_t* physical = &trip.physical[t * top_k];
            for (int64_t k = 0; k < top_k; ++k) {
                const int peer = physical[k] / shape.slots;
                const List told = list(trip.region, shape.rank, peer);
                int64_t& count = counts[peer];
                if (!count || told.rows()[count - 1] != t) {
                    told.rows()[count] = static_cast<int32_t>(t);
                    std::fill_n(told.slots() + count * top_k, top_k, int16_t{-1});
                    ++count;
                }
                told.slots()[(count - 1) * top_k + k] = static_cast<int16_t>(physical[k] % shape.slots);
            }
        }
        for (int peer = 0; peer < shape.ranks; ++peer) {
            const int64_t count = list(trip.region, shape.rank, peer).count() = static_cast<int32_t>(counts[peer]);
            list(trip.region, shape.rank, peer).announced() = announced;
            list(trip.region, shape.rank, peer).sequence() = sequence;
            if (peer == shape.rank) continue;
            traffic.rows += count;
            traffic.dispatch_bytes += count * (row_bytes() + (shape.wire == INT8 ? 4 : 0));
            traffic.routing_bytes += 4 + count * (4 + top_k * 2);
        }
    }

    // Finds the rows of all ranks, expert by expert, each expert's by rank and then as they came. Their number, or -1.
    int64_t receive(Trip& trip, uint32_t sequence, int32_t* out_counts) {
        std::vector<int64_t>& ends = trip.ends;
        std::fill(ends.begin(), ends.end(), 0);
        agreed = INT32_MAX;
        for (int peer = 0; peer < shape.ranks; ++peer) {
            const List told = list(trip.region, peer, shape.rank);
            const int32_t count = told.count();
            agreed = std::min(agreed, told.announced());
            if (told.sequence() != sequence || count < 0 || count > shape.max_tokens) return nonsense(peer);
            counts[peer] = count;
            const int32_t* rows = told.rows();
            const int16_t* slots = told.slots();
            for (int64_t i = 0; i < count; ++i) {
                if (rows[i] < 0 || rows[i] >= shape.max_tokens) return nonsense(peer);
                for (const int16_t* end = slots + shape.top_k; slots < end; ++slots) {
                    if (*slots >= shape.slots) return nonsense(peer);
                    if (*slots >= 0) ++ends[*slots];
                }
            }
        }
        int64_t total = 0;
        for (int slot = 0; slot < shape.slots; ++slot) {
            const int64_t count = ends[slot];
            if (count > layout.portion) return nonsense(shape.rank);
            out_counts[slot] = static_cast<int32_t>(count);
            ends[slot] = total;
            total += count;
        }
        if (total > layout.most) return nonsense(shape.rank);
        trip.received = total;
        trip.others = 0;
        for (int peer = 0; peer < shape.ranks; ++peer) {
            const int64_t results = find(trip, peer);
            if (peer != shape.rank) trip.others += results;
        }
        return total;
    }

    // Where one rank's rows lie, and for that rank where the results of them will be; their number.
    int64_t find(Trip& trip, int peer) {
        const List told = list(trip.region, peer, shape.rank);
        const int32_t* rows = told.rows();
        const int16_t* slots = told.slots();
        const float* row_scales = scales(trip.region, peer);
        int32_t* const first = places(trip.region, shape.rank, peer);
        int32_t* place_of = first;
        for (int64_t i = 0; i < counts[peer]; ++i) {
            const uint8_t* row = values(trip.region, peer) + rows[i] * row_bytes();
            for (const int16_t* end = slots + shape.top_k; slots < end; ++slots) {
                if (*slots < 0) continue;
                const int64_t place = trip.ends[*slots]++;
                trip.rows[place] = row;
                if (shape.wire == INT8) trip.scales[place] = row_scales[rows[i]];
                *place_of++ = static_cast<int32_t>(place);
            }
        }
        return place_of - first;
    }

    // Copies the rows of `first` slot and of as many after it as fit a portion; how many rows.
    int64_t gather(const Trip& trip, int first, uint8_t* out, float* out_scales, int32_t* end) const {
        const int64_t begin = first ? trip.ends[first - 1] : 0, row = row_bytes();
        int slot = first + 1;
        while (slot < shape.slots && trip.ends[slot] - begin <= layout.portion) ++slot;
        const int64_t count = trip.ends[slot - 1] - begin;
        for (int64_t i = 0; i < count; ++i) memcpy(out + i * row, trip.rows[begin + i], row);
        if (shape.wire == INT8) std::copy_n(&trip.scales[begin], count, out_scales);
        *end = slot;
        return count;
    }

    bool sum(const Trip& trip, const float* weights, float* sums) {
        return shape.back == F32 ? sum_of<float>(trip, weights, sums) : sum_of<uint16_t>(trip, weights, sums);
    }

    // While a row's results are added up, the next ones are fetched. Where the results of all ranks are more than the
    // caches hold, sums would not be found there either, and memory need not be read before they are written. Others are
    // taken to have made as many results as this rank.
    template <class Number>
    bool sum_of(const Trip& trip, const float* weights, float* sums) {
        const int64_t hidden = shape.hidden, top_k = shape.top_k;
        const bool past_caches = shape.ranks * trip.received * hidden * item_bytes(shape.back) > cached_bytes;
        const uint8_t **these = summands.data(), **next = these + top_k;
        std::fill(counts.begin(), counts.end(), 0);
        if (trip.tokens && !find_results(trip, 0, these)) return false;
        for (int64_t t = 0; t < trip.tokens; ++t) {
            const bool last = t + 1 == trip.tokens;
            if (!last && !find_results(trip, t + 1, next)) return false;
            traffic.uncached_sums +=
                add_up(reinterpret_cast<const Number* const*>(these),
                       reinterpret_cast<const Number* const*>(last ? these : next), weights + t * top_k, top_k, hidden,
                       sums + t * hidden, past_caches);
            std::swap(these, next);
        }
        if (past_caches) order_stores();
        return true;
    }

    // Where the results of one row are, in the order of its experts. Rows come one after the other.
    bool find_results(const Trip& trip, int64_t token, const uint8_t** found) {
        for (int64_t k = 0; k < shape.top_k; ++k) {
            const int peer = trip.physical[token * shape.top_k + k] / shape.slots;
            const int64_t place = places(trip.region, peer, shape.rank)[counts[peer]++];
            if (place < 0 || place >= layout.most) return lose(peer, SENSELESS);
            found[k] = results(trip.region, peer) + place * shape.hidden * item_bytes(shape.back);
        }
        return true;
    }
};

extern "C" {

int32_t millrace_exchange_wide() { return is_wide(); }

int64_t millrace_exchange_bytes(const ExchangeShape* shape) { return Layout(*shape).bytes(); }

Exchange* millrace_exchange_create(const ExchangeShape* shape, uint8_t* const* segments, const int32_t* pidfds,
                                   const int32_t* pids, int64_t deadline_ns, int64_t spin_ns,
                                   int64_t cached_bytes) {
    Exchange* exchange = new Exchange(*shape);
    exchange->segments.assign(segments, segments + shape->ranks);
    for (int rank = 0; rank < shape->ranks; ++rank) exchange->processes.push_back({pidfds[rank], POLLIN, 0});
    exchange->pids.assign(pids, pids + shape->ranks);
    exchange->deadline_ns = deadline_ns;
    exchange->spin_ns = spin_ns;
    exchange->cached_bytes = cached_bytes;
    exchange->counts.resize(shape->ranks);
    exchange->summands.resize(2 * shape->top_k);
    for (int region = 0; region < 2; ++region) {
        Trip& trip = exchange->trips[region];
        trip.region = region;
        trip.physical.resize(static_cast<int64_t>(shape->max_tokens) * shape->top_k);
        trip.ends.resize(shape->slots);
        trip.rows.resize(exchange->layout.most);
        trip.results.resize(trip.physical.size());
        trip.scales.resize(exchange->layout.most);
    }
    return exchange;
}

void millrace_exchange_destroy(Exchange* exchange) { delete exchange; }

void millrace_exchange_leave(Exchange* exchange) {
    const int rank = exchange->shape.rank;
    exchange->state(rank).left.store(1);
    for (int peer = 0; peer < exchange->shape.ranks; ++peer)
        if (peer != rank && exchange->state(peer).sleeping.load()) exchange->wake(peer);
}

void* millrace_exchange_room(Exchange* exchange, float** scales) {
    const int region = exchange->free_region(), rank = exchange->shape.rank;
    *scales = exchange->scales(region, rank);
    return exchange->values(region, rank);
}

int64_t millrace_exchange_begin_dispatch(Exchange* exchange, const void* rows, const float* row_scales, int32_t kind,
                                         int64_t tokens, const int32_t* physical) {
    if (exchange->loss.reason != NONE) return -1;
    const ExchangeShape& shape = exchange->shape;
    const uint32_t sequence = exchange->dispatched + 1;
    const int region = exchange->region_of[sequence & 1] = exchange->free_region();
    exchange->dispatched = sequence;
    Trip& trip = exchange->trips[region];
    trip.tokens = tokens;
    std::copy(physical, physical + tokens * shape.top_k, trip.physical.begin());
    exchange->traffic.dispatches += 1;
    exchange->put_rows(region, rows, row_scales, kind, tokens);
    exchange->put_lists(trip, sequence);
    exchange->tell(DISPATCH, sequence);
    return 0;
}

int64_t millrace_exchange_finish_dispatch(Exchange* exchange, int32_t* counts, int32_t* region) {
    if (exchange->loss.reason != NONE) return -1;
    const uint32_t sequence = ++exchange->received;
    if (!exchange->wait(DISPATCH, sequence)) return -1;
    Trip& trip = exchange->trip(sequence);
    *region = trip.region;
    return exchange->receive(trip, sequence, counts);
}

int64_t millrace_exchange_portion(const ExchangeShape* shape) { return Layout(*shape).portion; }

const uint8_t* const* millrace_exchange_rows(const Exchange* exchange, int32_t region) {
    return exchange->trips[region].rows.data();
}

const float* millrace_exchange_scales(const Exchange* exchange, int32_t region) {
    return exchange->trips[region].scales.data();
}

int64_t millrace_exchange_gather(const Exchange* exchange, int32_t region, int32_t first, void* values, float* scales,
                                 int32_t* end) {
    return exchange->gather(exchange->trips[region], first, static_cast<uint8_t*>(values), scales, end);
}

void millrace_exchange_announce(Exchange* exchange, int32_t number) {
    exchange->announced = number;
}

int32_t millrace_exchange_agreed(const Exchange* exchange) { return exchange->agreed; }

void* millrace_exchange_results(Exchange* exchange, int32_t region) {
    return exchange->results(region, exchange->shape.rank);
}

int64_t millrace_exchange_begin_combine(Exchange* exchange, const void* results, int32_t kind) {
    if (exchange->loss.reason != NONE) return -1;
    const ExchangeShape& shape = exchange->shape;
    const uint32_t sequence = ++exchange->returned;
    const Trip& trip = exchange->trip(sequence);
    uint8_t* own = exchange->results(trip.region, shape.rank);
    if (results != own) convert(results, kind, trip.received * shape.hidden, own, shape.back);
    exchange->traffic.combine_bytes += trip.others * shape.hidden * item_bytes(shape.back);
    exchange->tell(COMBINE, sequence);
    return 0;
}

int64_t millrace_exchange_finish_combine(Exchange* exchange, const float* weights, float* sums) {
    if (exchange->loss.reason != NONE) return -1;
    const uint32_t sequence = ++exchange->combined;
    if (!exchange->wait(COMBINE, sequence)) return -1;
    return exchange->sum(exchange->trip(sequence), weights, sums) ? 0 : -1;
}

const uint8_t* const* millrace_exchange_arrived(Exchange* exchange) {
    if (exchange->loss.reason != NONE) return nullptr;
    const uint32_t sequence = ++exchange->combined;
    if (!exchange->wait(COMBINE, sequence)) return nullptr;
    Trip& trip = exchange->trip(sequence);
    std::fill(exchange->counts.begin(), exchange->counts.end(), 0);
    for (int64_t t = 0; t < trip.tokens; ++t)
        if (!exchange->find_results(trip, t, &trip.results[t * exchange->shape.top_k])) return nullptr;
    return trip.results.data();
}

const ExchangeTraffic* millrace_exchange_traffic(const Exchange* exchange) { return &exchange->traffic; }

const ExchangeLoss* millrace_exchange_loss(const Exchange* exchange) { return &exchange->loss; }

}

// Dispatch and combine over shared segments: see exchange.h. It allocates when it is made, and never again.
//
// Two dispatches may be under way before the first is combined. A region is written again two sequence numbers later:
// by then its reader has answered the number before, which it did after it had read the region.
#include "exchange.h"

#include "exchange_layout.h"
#include "exchange_rows.h"
#include "process_end.h"
#include "relax.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <vector>

namespace {

enum Phase { DISPATCH = 0, COMBINE = 1 };
enum Reason { NONE = 0, DEAD = 1, LATE = 2, LEFT = 3, SENSELESS = 4 };

constexpr int64_t SLICE_NS = 5'000'000;  // asleep between looks at the processes of the others

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

bool reached(uint32_t value, uint32_t sequence) { return static_cast<int32_t>(value - sequence) >= 0; }

// One dispatch until it is combined.
struct Trip {
    int64_t tokens = 0, received = 0, others = 0;  // rows, results, and results of these for other ranks
    std::vector<int32_t> physical;                 // [tokens, top_k]
};

}  // namespace

struct Exchange {
    ExchangeShape shape;
    Layout layout;
    std::vector<uint8_t*> segments;
    std::vector<pollfd> processes;
    std::vector<int32_t> pids;
    int64_t deadline_ns, spin_ns;
    uint32_t dispatched = 0, received = 0, returned = 0, combined = 0;  // sequence numbers of what was begun and finished
    Trip trips[2];
    std::vector<int64_t> counts;  // of each rank: rows, or results, so far
    std::vector<int64_t> ends;    // of each slot
    std::vector<const uint8_t*> summands;  // results of one row, in the order of its experts
    ExchangeTraffic traffic{};
    ExchangeLoss loss{-1, NONE};
    int32_t announced = 0, agreed = 0;

    explicit Exchange(const ExchangeShape& given) : shape(given), layout(given) {}

    State& state(int rank) { return *reinterpret_cast<State*>(segments[rank]); }

    // What `from` tells `to`.
    Flag& flag(Phase phase, int from, int to) {
        uint8_t* first = segments[from] + layout.flags;
        return reinterpret_cast<PaddedFlag*>(first)[phase * shape.ranks + to].value;
    }

    void tell(Phase phase, uint32_t sequence) {
        for (int peer = 0; peer < shape.ranks; ++peer) {
            Flag& own = flag(phase, shape.rank, peer);
            own.store(sequence);  // sequentially consistent with `sleeping`: either we see it or the sleeper sees this
            if (peer != shape.rank && state(peer).sleeping.load()) wake(own);
        }
    }

    static void wake(Flag& flag) { syscall(SYS_futex, &flag, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

    static void sleep(Flag& flag, uint32_t seen, int64_t ns) {
        const timespec wait{ns / 1'000'000'000, ns % 1'000'000'000};
        syscall(SYS_futex, &flag, FUTEX_WAIT, seen, &wait, nullptr, 0);
    }

    bool lose(int rank, Reason reason) {
        loss = {rank, reason};
        return false;
    }

    int64_t nonsense(int rank) {
        lose(rank, SENSELESS);
        return -1;
    }

    bool wait(Phase phase, int peer, uint32_t sequence) {
        Flag& awaited = flag(phase, peer, shape.rank);
        if (reached(awaited.load(std::memory_order_acquire), sequence)) return true;
        const int64_t began = now_ns();
        while (now_ns() - began < spin_ns)
            for (int i = 0; i < 64; ++i) {
                if (reached(awaited.load(std::memory_order_acquire), sequence)) return true;
                RELAX();
            }
        return wait_asleep(phase, peer, sequence, began);
    }

    bool wait_asleep(Phase phase, int peer, uint32_t sequence, int64_t began) {
        State& own = state(shape.rank);
        Flag& awaited = flag(phase, peer, shape.rank);
        own.waiting_phase.store(phase, std::memory_order_relaxed);
        own.waiting_sequence.store(sequence, std::memory_order_relaxed);
        own.waiting_for.store(peer + 1, std::memory_order_release);
        own.sleeping.store(1);
        int64_t looked = began;
        bool there;
        while (!(there = reached(awaited.load(), sequence))) {
            const uint32_t seen = awaited.load();
            const int64_t now = now_ns(), left = began + deadline_ns - now;
            if (reached(seen, sequence)) continue;
            if (state(peer).left.load(std::memory_order_acquire)) {
                there = reached(awaited.load(), sequence) || gone(peer);
                break;
            }
            if (now - looked >= SLICE_NS && !all_alive()) break;
            if (now - looked >= SLICE_NS) looked = now;
            if (left <= 0) {
                lose(culprit(peer), LATE);
                break;
            }
            sleep(awaited, seen, std::min(left, SLICE_NS));
        }
        own.sleeping.store(0, std::memory_order_relaxed);
        // Of a rank that gives up, the others still learn whom it waited for.
        if (there) own.waiting_for.store(0, std::memory_order_relaxed);
        return there;
    }

    // `peer` has left: with somebody else to blame if it gave up on that one.
    bool gone(int peer) {
        if (!all_alive()) return false;
        const int other = culprit(peer);
        return lose(other, other == peer ? LEFT : LATE);
    }

    bool all_alive() {
        poll(processes.data(), processes.size(), 0);
        for (int rank = 0; rank < shape.ranks; ++rank)
            if ((processes[rank].revents || is_ending(pids[rank])) && !state(rank).left.load(std::memory_order_acquire))
                return lose(rank, DEAD);
        return true;
    }

    // Whom the late `peer` waits for in its turn, and so on: the one that waits for nobody, or for what it has already.
    int culprit(int peer) {
        for (int steps = 0; steps < shape.ranks; ++steps) {
            const int next = state(peer).waiting_for.load(std::memory_order_acquire) - 1;
            if (next < 0 || next >= shape.ranks) break;
            const Phase phase = state(peer).waiting_phase.load(std::memory_order_relaxed) ? COMBINE : DISPATCH;
            const uint32_t sequence = state(peer).waiting_sequence.load(std::memory_order_relaxed);
            if (reached(flag(phase, next, peer).load(std::memory_order_acquire), sequence)) break;
            peer = next;
        }
        return peer;
    }

    uint8_t* half(int parity, int rank) { return segments[rank] + layout.parities + parity * layout.parity; }
    List list(int parity, int from, int to) { return {half(parity, from) + to * layout.list, layout}; }
    uint8_t* values(int parity, int rank) { return half(parity, rank) + layout.values; }
    float* scales(int parity, int rank) { return reinterpret_cast<float*>(half(parity, rank) + layout.scales); }
    uint8_t* results(int parity, int rank) { return half(parity, rank) + layout.results; }
    int32_t* places(int parity, int from, int to) {
        return reinterpret_cast<int32_t*>(half(parity, from) + layout.places + to * layout.lists);
    }

    void put_rows(int parity, const void* rows, const float* row_scales, int kind, int64_t tokens) {
        const int64_t hidden = shape.hidden;
        uint8_t* out = values(parity, shape.rank);
        float* out_scales = scales(parity, shape.rank);
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
    void put_lists(int parity, const Trip& trip) {
        const int64_t top_k = shape.top_k;
        std::fill(counts.begin(), counts.end(), 0);
        for (int64_t t = 0; t < trip.tokens; ++t) {
            const int32_t* physical = &trip.physical[t * top_k];
            for (int64_t k = 0; k < top_k; ++k) {
                const int peer = physical[k] / shape.slots;
                const List told = list(parity, shape.rank, peer);
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
            const int64_t count = list(parity, shape.rank, peer).count() = static_cast<int32_t>(counts[peer]);
            list(parity, shape.rank, peer).announced() = announced;
            if (peer == shape.rank) continue;
            traffic.rows += count;
            traffic.dispatch_bytes += count * (shape.hidden * item_bytes(shape.wire) + (shape.wire == INT8 ? 4 : 0));
            traffic.routing_bytes += 4 + count * (4 + top_k * 2);
        }
    }

    // The rows of all ranks, expert by expert, each expert's by rank and then as they came. Their number, or -1.
    int64_t receive(int parity, Trip& trip, uint8_t* out, float* out_scales, int32_t* out_counts) {
        std::fill(ends.begin(), ends.end(), 0);
        agreed = INT32_MAX;
        for (int peer = 0; peer < shape.ranks; ++peer) {
            const List told = list(parity, peer, shape.rank);
            const int32_t count = told.count();
            agreed = std::min(agreed, told.announced());
            if (count < 0 || count > shape.max_tokens) return nonsense(peer);
            counts[peer] = count;
            for (int64_t i = 0; i < count * shape.top_k; ++i) {
                if (told.slots()[i] >= shape.slots || told.rows()[i / shape.top_k] < 0 ||
                    told.rows()[i / shape.top_k] >= shape.max_tokens)
                    return nonsense(peer);
                if (told.slots()[i] >= 0) ++ends[told.slots()[i]];
            }
        }
        int64_t total = 0;
        for (int slot = 0; slot < shape.slots; ++slot) {
            const int64_t count = ends[slot];
            out_counts[slot] = static_cast<int32_t>(count);
            ends[slot] = total;
            total += count;
        }
        if (total > layout.most) return nonsense(shape.rank);
        trip.received = total;
        trip.others = 0;
        for (int peer = 0; peer < shape.ranks; ++peer) {
            const int64_t results = gather(parity, peer, out, out_scales);
            if (peer != shape.rank) trip.others += results;
        }
        return total;
    }

    // One rank's rows, and for that rank where the results of them will be; their number.
    int64_t gather(int parity, int peer, uint8_t* out, float* out_scales) {
        const List told = list(parity, peer, shape.rank);
        const int16_t* slots = told.slots();
        const uint8_t* from = values(parity, peer);
        const int64_t row = shape.hidden * item_bytes(shape.wire);
        int32_t* place_of = places(parity, shape.rank, peer);
        int64_t results = 0;
        for (int64_t i = 0; i < counts[peer] * shape.top_k; ++i) {
            if (slots[i] < 0) continue;
            const int64_t place = ends[slots[i]]++, t = told.rows()[i / shape.top_k];
            memcpy(out + place * row, from + t * row, row);
            if (shape.wire == INT8) out_scales[place] = scales(parity, peer)[t];
            place_of[results++] = static_cast<int32_t>(place);
        }
        return results;
    }

    bool sum(int parity, const Trip& trip, const float* weights, float* sums) {
        const int64_t hidden = shape.hidden, top_k = shape.top_k;
        std::fill(counts.begin(), counts.end(), 0);
        for (int64_t t = 0; t < trip.tokens; ++t) {
            for (int64_t k = 0; k < top_k; ++k) {
                const int peer = trip.physical[t * top_k + k] / shape.slots;
                const int64_t place = places(parity, peer, shape.rank)[counts[peer]++];
                if (place < 0 || place >= layout.most) return lose(peer, SENSELESS);
                summands[k] = results(parity, peer) + place * hidden * item_bytes(shape.back);
            }
            if (shape.back == F32)
                add_up(reinterpret_cast<const float* const*>(summands.data()), weights + t * top_k, top_k, hidden,
                       sums + t * hidden);
            else
                add_up(reinterpret_cast<const uint16_t* const*>(summands.data()), weights + t * top_k, top_k, hidden,
                       sums + t * hidden);
        }
        return true;
    }
};

extern "C" {

int64_t millrace_exchange_bytes(const ExchangeShape* shape) { return Layout(*shape).bytes(); }

Exchange* millrace_exchange_create(const ExchangeShape* shape, uint8_t* const* segments, const int32_t* pidfds,
                                   const int32_t* pids, int64_t deadline_ns, int64_t spin_ns) {
    Exchange* exchange = new Exchange(*shape);
    exchange->segments.assign(segments, segments + shape->ranks);
    for (int rank = 0; rank < shape->ranks; ++rank) exchange->processes.push_back({pidfds[rank], POLLIN, 0});
    exchange->pids.assign(pids, pids + shape->ranks);
    exchange->deadline_ns = deadline_ns;
    exchange->spin_ns = spin_ns;
    exchange->counts.resize(shape->ranks);
    exchange->ends.resize(shape->slots);
    exchange->summands.resize(shape->top_k);
    for (Trip& trip : exchange->trips) trip.physical.resize(static_cast<int64_t>(shape->max_tokens) * shape->top_k);
    return exchange;
}

void millrace_exchange_destroy(Exchange* exchange) { delete exchange; }

void millrace_exchange_leave(Exchange* exchange) {
    const int rank = exchange->shape.rank;
    exchange->state(rank).left.store(1);
    for (int peer = 0; peer < exchange->shape.ranks; ++peer)
        for (Phase phase : {DISPATCH, COMBINE}) Exchange::wake(exchange->flag(phase, rank, peer));
}

int64_t millrace_exchange_begin_dispatch(Exchange* exchange, const void* rows, const float* row_scales, int32_t kind,
                                         int64_t tokens, const int32_t* physical) {
    if (exchange->loss.reason != NONE) return -1;
    const ExchangeShape& shape = exchange->shape;
    const uint32_t sequence = ++exchange->dispatched;
    const int parity = sequence & 1;
    Trip& trip = exchange->trips[parity];
    trip.tokens = tokens;
    std::copy(physical, physical + tokens * shape.top_k, trip.physical.begin());
    exchange->traffic.dispatches += 1;
    exchange->put_rows(parity, rows, row_scales, kind, tokens);
    exchange->put_lists(parity, trip);
    exchange->tell(DISPATCH, sequence);
    return 0;
}

int64_t millrace_exchange_finish_dispatch(Exchange* exchange, void* values, float* scales, int32_t* counts) {
    if (exchange->loss.reason != NONE) return -1;
    const uint32_t sequence = ++exchange->received;
    const int parity = sequence & 1;
    for (int peer = 0; peer < exchange->shape.ranks; ++peer)
        if (peer != exchange->shape.rank && !exchange->wait(DISPATCH, peer, sequence)) return -1;
    return exchange->receive(parity, exchange->trips[parity], static_cast<uint8_t*>(values), scales, counts);
}

void millrace_exchange_announce(Exchange* exchange, int32_t number) {
    exchange->announced = number;
}

int32_t millrace_exchange_agreed(const Exchange* exchange) { return exchange->agreed; }

void* millrace_exchange_results(Exchange* exchange, int32_t parity) {
    return exchange->results(parity, exchange->shape.rank);
}

int64_t millrace_exchange_begin_combine(Exchange* exchange, const void* results, int32_t kind) {
    if (exchange->loss.reason != NONE) return -1;
    const ExchangeShape& shape = exchange->shape;
    const uint32_t sequence = ++exchange->returned;
    const int parity = sequence & 1;
    const Trip& trip = exchange->trips[parity];
    uint8_t* own = exchange->results(parity, shape.rank);
    if (results != own) convert(results, kind, trip.received * shape.hidden, own, shape.back);
    exchange->traffic.combine_bytes += trip.others * shape.hidden * item_bytes(shape.back);
    exchange->tell(COMBINE, sequence);
    return 0;
}

int64_t millrace_exchange_finish_combine(Exchange* exchange, const float* weights, float* sums) {
    if (exchange->loss.reason != NONE) return -1;
    const uint32_t sequence = ++exchange->combined;
    const int parity = sequence & 1;
    for (int peer = 0; peer < exchange->shape.ranks; ++peer)
        if (peer != exchange->shape.rank && !exchange->wait(COMBINE, peer, sequence)) return -1;
    return exchange->sum(parity, exchange->trips[parity], weights, sums) ? 0 : -1;
}

const ExchangeTraffic* millrace_exchange_traffic(const Exchange* exchange) { return &exchange->traffic; }

const ExchangeLoss* millrace_exchange_loss(const Exchange* exchange) { return &exchange->loss; }

}

// How the ranks of an exchange wait for each other, and find out that one is lost. It knows no rows.
#pragma once

#include "exchange.h"
#include "exchange_layout.h"
#include "process_end.h"
#include "relax.h"

#include <linux/futex.h>
#include <limits.h>
#include <poll.h>
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

struct Waits {
    ExchangeShape shape;
    Layout layout;
    std::vector<uint8_t*> segments;
    std::vector<pollfd> processes;
    std::vector<int32_t> pids;
    int64_t deadline_ns = 0, spin_ns = 0;
    ExchangeLoss loss{-1, NONE};

    explicit Waits(const ExchangeShape& given) : shape(given), layout(given) {}

    State& state(int rank) { return *reinterpret_cast<State*>(segments[rank]); }

    // What `from` tells `to`.
    Flag& flag(Phase phase, int from, int to) {
        uint8_t* first = segments[from] + layout.flags;
        return reinterpret_cast<PaddedFlag*>(first)[phase * shape.ranks + to].value;
    }

    // Whose flag is still behind, the lowest from `first` on, of those that `to` waits for; as many as ranks for none.
    int missing(Phase phase, int to, uint32_t sequence, int first = 0) {
        for (int rank = first; rank < shape.ranks; ++rank)
            if (rank != to && !reached(flag(phase, rank, to).load(), sequence)) return rank;
        return shape.ranks;
    }

    // A rank that sleeps is woken by the last that it waits for: as often as ranks tell would cost a switch each time.
    // Flags and what a sleeper says are sequentially consistent: either the last to tell sees that it sleeps and on
    // whose flag, or it sees all flags; and of two that are last at once, one sees the other's.
    void tell(Phase phase, uint32_t sequence) {
        for (int peer = 0; peer < shape.ranks; ++peer) flag(phase, shape.rank, peer).store(sequence);
        for (int peer = 0; peer < shape.ranks; ++peer) {
            if (peer == shape.rank || !state(peer).sleeping.load()) continue;
            const Phase awaited = phase_of(state(peer));
            if (missing(awaited, peer, state(peer).waiting_sequence.load()) == shape.ranks) wake(peer);
        }
    }

    // Whatever it waits for.
    void wake(int peer) {
        const int watched = state(peer).waiting_for.load() - 1;
        if (watched < 0 || watched >= shape.ranks) return;
        syscall(SYS_futex, &flag(phase_of(state(peer)), watched, peer), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }

    static Phase phase_of(const State& of) { return of.waiting_phase.load() ? COMBINE : DISPATCH; }

    static void sleep(Flag& flag, uint32_t seen, int64_t ns) {
        const timespec wait{ns / 1'000'000'000, ns % 1'000'000'000};
        syscall(SYS_futex, &flag, FUTEX_WAIT, seen, &wait, nullptr, 0);
    }

    bool lose(int rank, Reason reason) {
        loss = {rank, reason};
        return false;
    }

    // Until all others have told this.
    bool wait(Phase phase, uint32_t sequence) {
        int late = missing(phase, shape.rank, sequence);
        if (late == shape.ranks) return true;
        const int64_t began = now_ns();
        while (now_ns() - began < spin_ns)
            for (int i = 0; i < 64; ++i) {
                if ((late = missing(phase, shape.rank, sequence, late)) == shape.ranks) return true;
                RELAX();
            }
        return wait_asleep(phase, sequence, late, began);
    }

    bool wait_asleep(Phase phase, uint32_t sequence, int late, int64_t began) {
        State& own = state(shape.rank);
        own.waiting_phase.store(phase, std::memory_order_relaxed);
        own.waiting_sequence.store(sequence, std::memory_order_relaxed);
        own.waiting_for.store(late + 1);
        own.sleeping.store(1);
        int64_t looked = began;
        while ((late = missing(phase, shape.rank, sequence, late)) != shape.ranks) {
            own.waiting_for.store(late + 1);  // before its flag is seen, see tell
            Flag& watched = flag(phase, late, shape.rank);
            const uint32_t seen = watched.load();
            if (reached(seen, sequence)) continue;
            const int64_t now = now_ns(), left = began + deadline_ns - now;
            if (const int leaver = has_left(phase, sequence, late); leaver != shape.ranks) {
                gone(leaver);
                break;
            }
            if (now - looked >= SLICE_NS && !all_alive()) break;
            if (now - looked >= SLICE_NS) looked = now;
            if (left <= 0) {
                lose(culprit(late), LATE);
                break;
            }
            sleep(watched, seen, std::min(left, SLICE_NS));
        }
        own.sleeping.store(0, std::memory_order_relaxed);
        // Of a rank that gives up, the others still learn whom it waited for.
        if (late == shape.ranks) own.waiting_for.store(0, std::memory_order_relaxed);
        return late == shape.ranks;
    }

    // One that has left and has not told this before, the lowest from `first` on; as many as ranks for none.
    int has_left(Phase phase, uint32_t sequence, int first) {
        for (int rank = first; rank < shape.ranks; ++rank)
            if (rank != shape.rank && state(rank).left.load() &&
                !reached(flag(phase, rank, shape.rank).load(), sequence))
                return rank;
        return shape.ranks;
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
            const Phase phase = phase_of(state(peer));
            const uint32_t sequence = state(peer).waiting_sequence.load();
            if (reached(flag(phase, next, peer).load(std::memory_order_acquire), sequence)) break;
            peer = next;
        }
        return peer;
    }
};

}  // namespace

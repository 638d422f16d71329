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
};

}  // namespace

// The threads of a team wait by spinning for a moment and then sleep, because a decode step follows the last one within
// microseconds while an idle server must not burn a core. Barriers spin too, and sleep once a peer seems to have lost
// its core: it may be this one that it waits for. How long they spin follows from how long it would have taken lately:
// on a quiet machine peers are late by their larger share of the work, on a busy one by a turn of the scheduler.
#include "threads.h"

#include "abi.h"
#include "relax.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace {
constexpr int SPINS_BEFORE_SLEEP = 500;  // some 10 microseconds; yielding instead starves both threads on a busy host
constexpr int MOST_SPINS = 2000;
constexpr std::chrono::microseconds LATE{50};  // who slept less at a barrier had better spun on
constexpr std::chrono::microseconds IDLE_SPIN{50};      // awake for the next job: a decode step follows within that
constexpr std::chrono::microseconds BARRIER_PAUSE{50};  // between looks: the threads that write the KV need the cores
}

struct ThreadTeam {
    int threads = 1;
    void (*job)(void*, int) = nullptr;
    void* context = nullptr;
    bool closing = false;
    std::mutex turn;   // one caller at a time
    std::mutex mutex;  // guards sleeping
    std::condition_variable wake;
    std::vector<std::thread> workers;
    alignas(64) std::atomic<unsigned> epoch{0};  // grows with each job
    alignas(64) std::atomic<int> sleepers{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<unsigned> round{0};  // grows with each full barrier
    std::atomic<int> late{0};                    // threads asleep at the barrier
    std::condition_variable met;
    std::chrono::steady_clock::time_point met_at;  // when peers asleep were last called
    std::atomic<int> patience{SPINS_BEFORE_SLEEP};  // spins at a barrier before sleep

    void wait_for_job(unsigned seen) {
        const auto until = std::chrono::steady_clock::now() + IDLE_SPIN;
        while (std::chrono::steady_clock::now() < until)
            for (int i = 0; i < 64; ++i) {
                if (epoch.load(std::memory_order_acquire) != seen) return;
                RELAX();
            }
        std::unique_lock<std::mutex> lock(mutex);
        sleepers.fetch_add(1);
        wake.wait(lock, [&] { return epoch.load() != seen; });
        sleepers.fetch_sub(1);
    }

    void work(int thread) {
        for (unsigned seen = 0;;) {
            wait_for_job(seen);
            seen = epoch.load(std::memory_order_acquire);
            if (closing) return;
            job(context, thread);
            team_barrier(this);
        }
    }

    void publish() {
        epoch.fetch_add(1);  // sequentially consistent with sleepers: either we see the sleeper or it sees the epoch
        if (sleepers.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex);
            wake.notify_all();
        }
    }
};

ThreadTeam* team_create(int threads) {
    ThreadTeam* team = new ThreadTeam;
    team->threads = threads < 1 ? 1 : threads;
    for (int i = 1; i < team->threads; ++i) team->workers.emplace_back([team, i] { team->work(i); });
    return team;
}

void team_destroy(ThreadTeam* team) {
    team->closing = true;
    team->publish();
    for (std::thread& worker : team->workers) worker.join();
    delete team;
}

void team_begin(ThreadTeam* team) { team->turn.lock(); }

void team_end(ThreadTeam* team) { team->turn.unlock(); }

int team_threads(const ThreadTeam* team) { return team->threads; }

void team_run(ThreadTeam* team, void (*job)(void*, int), void* context) {
    team->job = job;
    team->context = context;
    if (team->threads > 1) team->publish();
    job(context, 0);
    team_barrier(team);
}

void team_barrier(ThreadTeam* team) {
    if (team->threads == 1) return;
    const unsigned round = team->round.load(std::memory_order_relaxed);
    if (team->arrived.fetch_add(1, std::memory_order_acq_rel) == team->threads - 1) {
        team->arrived.store(0, std::memory_order_relaxed);
        team->round.store(round + 1);  // sequentially consistent with `late`, as in publish
        if (team->late.load() > 0) {
            std::lock_guard<std::mutex> lock(team->mutex);
            team->met_at = std::chrono::steady_clock::now();
            team->met.notify_all();
        }
        return;
    }
    const int patience = team->patience.load(std::memory_order_relaxed);
    for (int spins = 0; spins < patience; ++spins) {
        if (team->round.load(std::memory_order_acquire) != round) return;
        RELAX();
    }
    const auto asleep = std::chrono::steady_clock::now();
    std::unique_lock<std::mutex> lock(team->mutex);
    team->late.fetch_add(1);
    team->met.wait(lock, [&] { return team->round.load() != round; });
    team->late.fetch_sub(1);
    const int next = team->met_at - asleep < LATE ? patience + patience / 32 : patience / 2;
    team->patience.store(std::min(std::max(next, SPINS_BEFORE_SLEEP), MOST_SPINS), std::memory_order_relaxed);
}

bool team_wait_at(LayerBarrier* barrier, long layer) {
    const auto arrived = [barrier] { return __atomic_load_n(&barrier->arrived, __ATOMIC_ACQUIRE); };
    if (arrived() > layer) return true;
    const auto began = std::chrono::steady_clock::now();
    int64_t seen = arrived();
    for (int looks = 0; seen >= 0 && seen <= layer; ++looks, seen = arrived()) {
        if (__atomic_load_n(&barrier->hurried, __ATOMIC_RELAXED)) break;
        if (looks < SPINS_BEFORE_SLEEP)
            RELAX();
        else
            std::this_thread::sleep_for(BARRIER_PAUSE);
    }
    const auto waited = std::chrono::steady_clock::now() - began;
    barrier->waited += std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count();
    barrier->left = seen <= layer;
    return seen > layer;
}

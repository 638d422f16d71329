// The pool's threads wait by spinning for a moment and then sleep, because a decode step follows the last one within
// microseconds while an idle server must not burn a core. Barriers spin too, and sleep once a peer seems to have lost
// its core: it may be this one that it waits for.
#include "pool.h"

#include "abi.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() asm volatile("yield")
#else
#define RELAX() ((void)0)
#endif

namespace {
constexpr int SPINS_BEFORE_SLEEP = 500;  // some 10 microseconds; yielding instead starves both threads on a busy host
constexpr std::chrono::microseconds GATE_PAUSE{50};  // between looks: those who bring the KV need the cores
}

struct Pool {
    int threads = 1;
    int spin_microseconds = 50;
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

    void wait_for_job(unsigned seen) {
        const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_microseconds);
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
            pool_barrier(this);
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

Pool* pool_create(int threads, int spin_microseconds) {
    Pool* pool = new Pool;
    pool->threads = threads < 1 ? 1 : threads;
    pool->spin_microseconds = spin_microseconds;
    for (int i = 1; i < pool->threads; ++i) pool->workers.emplace_back([pool, i] { pool->work(i); });
    return pool;
}

void pool_destroy(Pool* pool) {
    pool->closing = true;
    pool->publish();
    for (std::thread& worker : pool->workers) worker.join();
    delete pool;
}

int pool_threads(const Pool* pool) { return pool->threads; }

void pool_run(Pool* pool, void (*job)(void*, int), void* context) {
    std::lock_guard<std::mutex> lock(pool->turn);
    pool->job = job;
    pool->context = context;
    if (pool->threads > 1) pool->publish();
    job(context, 0);
    pool_barrier(pool);
}

void pool_barrier(Pool* pool) {
    if (pool->threads == 1) return;
    const unsigned round = pool->round.load(std::memory_order_relaxed);
    if (pool->arrived.fetch_add(1, std::memory_order_acq_rel) == pool->threads - 1) {
        pool->arrived.store(0, std::memory_order_relaxed);
        pool->round.store(round + 1);  // sequentially consistent with `late`, as in publish
        if (pool->late.load() > 0) {
            std::lock_guard<std::mutex> lock(pool->mutex);
            pool->met.notify_all();
        }
        return;
    }
    for (int spins = 0; spins < SPINS_BEFORE_SLEEP; ++spins) {
        if (pool->round.load(std::memory_order_acquire) != round) return;
        RELAX();
    }
    std::unique_lock<std::mutex> lock(pool->mutex);
    pool->late.fetch_add(1);
    pool->met.wait(lock, [&] { return pool->round.load() != round; });
    pool->late.fetch_sub(1);
}

bool pool_wait_at(Gate* gate, long layer) {
    const auto arrived = [gate] { return __atomic_load_n(&gate->arrived, __ATOMIC_ACQUIRE); };
    if (arrived() > layer) return true;
    const auto began = std::chrono::steady_clock::now();
    int64_t seen = arrived();
    for (int looks = 0; seen >= 0 && seen <= layer; ++looks, seen = arrived()) {
        if (__atomic_load_n(&gate->hurried, __ATOMIC_RELAXED)) break;
        if (looks < SPINS_BEFORE_SLEEP)
            RELAX();
        else
            std::this_thread::sleep_for(GATE_PAUSE);
    }
    const auto waited = std::chrono::steady_clock::now() - began;
    gate->waited += std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count();
    gate->left = seen <= layer;
    return seen > layer;
}

// A small pool of threads that run one function together and meet at barriers inside it. It knows nothing of kernels.
#pragma once

struct Gate;
struct Pool;

Pool* pool_create(int threads, int spin_microseconds);
void pool_destroy(Pool* pool);
int pool_threads(const Pool* pool);

// Calls job(context, thread) once on every thread, 0 being the caller, and returns when all have. Callers on several
// threads take turns.
void pool_run(Pool* pool, void (*job)(void* context, int thread), void* context);

// Inside a job: returns once every thread of the pool has come here.
void pool_barrier(Pool* pool);

// Waits until the gate's layer is there. False when the step is to leave instead; the gate then says so too.
bool pool_wait_at(Gate* gate, long layer);

// Lambda form of pool_run: body(thread).
template <class Body>
inline void pool_each(Pool* pool, Body body) {
    pool_run(pool, [](void* context, int thread) { (*static_cast<Body*>(context))(thread); }, &body);
}

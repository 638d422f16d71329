// A team of threads that run one function together and meet at barriers inside it. It knows nothing of kernels.
#pragma once

struct LayerBarrier;
struct ThreadTeam;

ThreadTeam* team_create(int threads);
void team_destroy(ThreadTeam* team);
int team_threads(const ThreadTeam* team);

// A caller works with the team between these two; others wait for their turn.
void team_begin(ThreadTeam* team);
void team_end(ThreadTeam* team);

// Calls job(context, thread) once on every thread, 0 being the caller, and returns when all have.
void team_run(ThreadTeam* team, void (*job)(void* context, int thread), void* context);

// Inside a job: returns once every thread of the team has come here.
void team_barrier(ThreadTeam* team);

// Waits until the barrier's layer is there. False when the step is to leave instead; the barrier then says so too.
bool team_wait_at(LayerBarrier* barrier, long layer);

// Lambda form of team_run: body(thread).
template <class Body>
inline void team_each(ThreadTeam* team, Body body) {
    team_run(team, [](void* context, int thread) { (*static_cast<Body*>(context))(thread); }, &body);
}

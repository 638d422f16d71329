// The plain C interface that Python loads: contexts, packing, and calls into the form this CPU can run.
#include <mutex>
#include <new>
#include <stdlib.h>
#include <string.h>

#include "form.h"

#define FORM(name) extern "C" const Form millrace_form_##name;
#if defined(__x86_64__)
FORM(avx512_bf16)
FORM(avx512_vnni)
FORM(avx2)
#endif
FORM(plain)
#undef FORM

namespace {

struct Candidate {
    const Form* form;
    bool (*runs)();
};

#if defined(__x86_64__)
bool avx512_vnni() {
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
#endif

// Best first.
const Candidate CANDIDATES[] = {
#if defined(__x86_64__)
    {&millrace_form_avx512_bf16, [] { return avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }},
    {&millrace_form_avx512_vnni, avx512_vnni},
    {&millrace_form_avx2, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
    {&millrace_form_plain, [] { return true; }},
};

constexpr long PANEL = 32;

}  // namespace

char* Scratch::reserve(long bytes) {
    if (bytes <= size) return data;
    free(data);
    size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    data = static_cast<char*>(aligned_alloc(4096, size));
    if (!data) abort();
    memset(data, 0, size);
    return data;
}

struct Context {
    const Form* form;
    ThreadTeam* team;
    Scratch scratch;
    std::mutex turn;
};

#pragma GCC visibility push(default)
extern "C" {

// The name of the i-th form this CPU runs, best first; null past the last.
const char* millrace_form_name(int i) {
    for (const Candidate& candidate : CANDIDATES)
        if (candidate.runs() && i-- == 0) return candidate.form->name;
    return nullptr;
}

Context* millrace_create(const char* form, int threads) {
    for (const Candidate& candidate : CANDIDATES)
        if (candidate.runs() && strcmp(candidate.form->name, form) == 0)
            return new Context{candidate.form, team_create(threads), {}, {}};
    return nullptr;
}

void millrace_destroy(Context* context) {
    team_destroy(context->team);
    free(context->scratch.data);
    delete context;
}

// Packs a row-major weight [outputs, inputs] of 1, 2 or 4 byte elements into panels; `packed` is zeroed by the caller.
void millrace_pack(const void* weight, long outputs, long inputs, int item_bytes, void* packed) {
    const long per = 4 / item_bytes, words = (inputs + per - 1) / per;
    for (long n = 0; n < outputs; ++n) {
        const char* row = static_cast<const char*>(weight) + n * inputs * item_bytes;
        char* out = static_cast<char*>(packed) + ((n / PANEL) * words * PANEL + n % PANEL) * 4;
        for (long w = 0; w < words; ++w) {
            const long left = (inputs - w * per) * item_bytes;
            memcpy(out + w * PANEL * 4, row + w * 4, left < 4 ? left : 4);
        }
    }
}

void millrace_linear(Context* c, const Linear* w, int finish, const float* x, long rows, float* out) {
    std::lock_guard<std::mutex> lock(c->turn);
    c->form->linear(c->team, c->scratch, *w, finish, x, rows, out);
}

void millrace_rms_norm(Context* c, const float* x, const float* weight, long rows, long n, float eps, float* out) {
    c->form->rms_norm(c->team, x, weight, rows, n, eps, out);
}

void millrace_rotate_and_write(Context* c, const Model* m, int layer, const Batch* batch, const float* qkv, float* q) {
    std::lock_guard<std::mutex> lock(c->turn);
    c->form->rotate_and_write(c->team, c->scratch, *m, m->layer[layer], *batch, qkv, q);
}

void millrace_attention(Context* c, const Model* m, int layer, const Batch* batch, const float* q, float* out) {
    std::lock_guard<std::mutex> lock(c->turn);
    c->form->attention(c->team, c->scratch, *m, m->layer[layer], *batch, q, out);
}

void millrace_attend_range(Context* c, const Model* m, int layer, const Batch* batch, const KVRange* range,
                           const float* q) {
    std::lock_guard<std::mutex> lock(c->turn);
    c->form->attend_range(c->team, c->scratch, *m, m->layer[layer], *batch, *range, q);
}

void millrace_step(Context* c, const Model* m, const Batch* batch, const Results* results) {
    std::lock_guard<std::mutex> lock(c->turn);
    c->form->step(c->team, c->scratch, *m, *batch, *results);
}

void millrace_sample(Context* c, const Samples* all) {
    std::lock_guard<std::mutex> lock(c->turn);
    c->form->sample(c->team, c->scratch, *all);
}

void millrace_logprobs(Context* c, const Logprobs* all) {
    std::lock_guard<std::mutex> lock(c->turn);
    c->form->logprobs(c->team, c->scratch, *all);
}

}
#pragma GCC visibility pop

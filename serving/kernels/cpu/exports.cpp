// What Python calls besides the operations of form.cpp: the forms this CPU runs, contexts, and packing.
#include <stdlib.h>
#include <string.h>

#include "form.h"

namespace {

struct Candidate {
    const char* name;
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
    {"avx512_bf16", [] { return avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }},
    {"avx512_vnni", avx512_vnni},
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
    {"plain", [] { return true; }},
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

#pragma GCC visibility push(default)
extern "C" {

// The name of the i-th form this CPU runs, best first; null past the last.
const char* millrace_form_name(int i) {
    for (const Candidate& candidate : CANDIDATES)
        if (candidate.runs() && i-- == 0) return candidate.name;
    return nullptr;
}

Context* millrace_create(int threads) { return new Context{team_create(threads), {}}; }

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

}
#pragma GCC visibility pop

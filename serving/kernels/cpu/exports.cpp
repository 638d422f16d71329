// What Python calls besides the operations of form.cpp: the forms this CPU runs, contexts, and packing.
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "form.h"

namespace {

struct Candidate {
    const char* name;
    bool (*runs)();
};

#if defined(__x86_64__)
[[maybe_unused]] bool avx512_vnni() {
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

// The system keeps tiles for a process only once it asks. Its threads and forks may then use them too.
[[maybe_unused]] bool amx() {
    constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25, ALL = BF16 | TILE | INT8;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = [] {
        unsigned a, b, c, d;
        return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & ALL) == ALL &&
               syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    }();
    return allowed;
}
#endif

// Best first, those that build.py has compiled.
const Candidate CANDIDATES[] = {
#if defined(MILLRACE_HAS_avx512_amx)
    {"avx512_amx", [] { return avx512_vnni() && __builtin_cpu_supports("avx512bf16") && amx(); }},
#endif
#if defined(MILLRACE_HAS_avx512_bf16)
    {"avx512_bf16", [] { return avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }},
#endif
#if defined(MILLRACE_HAS_avx512_vnni)
    {"avx512_vnni", avx512_vnni},
#endif
#if defined(MILLRACE_HAS_avx2)
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

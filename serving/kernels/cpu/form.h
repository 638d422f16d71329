// What each form of the kernels offers to exports.cpp: one table of functions per instruction set.
#pragma once

#include "abi.h"
#include "orders.h"
#include "threads.h"

// Scratch that only grows; `reserve` returns at least `bytes`, aligned to 64.
struct Scratch {
    char* data = nullptr;
    long size = 0;
    char* reserve(long bytes);
};

struct Form {
    const char* name;
    void (*linear)(ThreadTeam*, Scratch&, const Linear&, int finish, const float* x, long rows, float* out);
    void (*rms_norm)(ThreadTeam*, const float* x, const float* weight, long rows, long n, float eps, float* out);
    void (*rotate_and_write)(ThreadTeam*, Scratch&, const Model&, const Layer&, const Batch&, const float* qkv,
                             float* q);
    void (*attention)(ThreadTeam*, Scratch&, const Model&, const Layer&, const Batch&, const float* q, float* out);
    void (*attend_range)(ThreadTeam*, Scratch&, const Model&, const Layer&, const Batch&, const KVRange&,
                         const float* q);
    void (*step)(ThreadTeam*, Scratch&, const Model&, const Batch&, const Results&);
    void (*sample)(ThreadTeam*, Scratch&, const Samples&);
    void (*logprobs)(ThreadTeam*, Scratch&, const Logprobs&);
};

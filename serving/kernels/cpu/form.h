// What every call works with: a team of threads and its scratch. exports.cpp makes it, form.cpp computes with it.
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

struct Context {
    ThreadTeam* team;
    Scratch scratch;
};

namespace {

// While it lives nobody else works with the context: callers on several threads take turns.
struct Turn {
    ThreadTeam* team;
    explicit Turn(const Context& c) : team(c.team) { team_begin(team); }
    ~Turn() { team_end(team); }
};

}  // namespace

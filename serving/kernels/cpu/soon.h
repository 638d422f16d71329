// Memory that will be read soon, in runs, for whoever has time to fetch it while it computes. It knows no tensors.
#pragma once

#include "vector.h"

namespace {

constexpr long LINE = 64;  // bytes fetched at once

constexpr long FETCH_WORDS = 16;

// What a product fetches from memory while it walks over its words, so many lines for every FETCH_WORDS of them.
struct Fetched {
    const int32_t* from;
    long lines;
};

struct Run {
    long offset, lines;  // bytes from a plane's first, and cache lines
};

// The same runs of two planes, all of the first before any of the second.
struct Soon {
    const char* plane[2];
    const Run* runs;
    long count;            // 0: nothing
    long budget;           // lines: as many as caches hold until they are read
    long run = 0, at = 0;  // where it goes on: one of both planes' 2 count runs, and a line of it

    // The next part for so many words. What is left of a run that is too short for them is not fetched at all.
    INLINE Fetched take(long words) {
        if (run == 2 * count || budget <= 0) return {nullptr, 0};
        const bool second = run >= count;
        const Run& now = runs[run - second * count];
        const long left = now.lines - at, lines = left >= 2 * words ? 2 : 2 * left >= words ? 1 : 0;
        const char* from = plane[second] + now.offset + at * LINE;
        at += lines * words;
        budget -= lines * words;
        if (lines == 0 || at >= now.lines) at = 0, ++run;
        return {reinterpret_cast<const int32_t*>(from), lines * FETCH_WORDS};
    }
};

}  // namespace

// Where things lie in a rank's segment, and what of them is a flag. It waits for nothing and copies nothing.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <atomic>

#include "exchange.h"
#include "exchange_rows.h"

namespace {

constexpr int64_t LINE = 64, PAGE = 4096;
constexpr int64_t PORTION = 512 * 1024;  // bytes of rows that are gathered at once: they stay in the caches

using Flag = std::atomic<uint32_t>;
static_assert(Flag::is_always_lock_free && sizeof(Flag) == 4, "a flag is a futex");

// What a rank says of itself; the others read it.
struct alignas(LINE) State {
    std::atomic<uint32_t> sleeping;  // others that set a flag wake this rank
    std::atomic<uint32_t> left;
    alignas(LINE) std::atomic<int32_t> waiting_for;  // a rank + 1, or 0
    std::atomic<int32_t> waiting_phase;
    std::atomic<uint32_t> waiting_sequence;
};

struct alignas(LINE) PaddedFlag {
    Flag value;
};

int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Where things lie in a segment, in bytes from its beginning.
struct Layout {
    int64_t ranks, flags, regions, lists, list_rows, list_slots, list, scales, values, places, results, region, most;
    int64_t portion;  // rows that are gathered at once

    explicit Layout(const ExchangeShape& shape) {
        const int64_t tokens = shape.max_tokens, hidden = shape.hidden;
        const int64_t each = std::min(shape.top_k, shape.slots);  // results of one row from one rank
        ranks = shape.ranks;
        most = ranks * tokens * each;
        portion = std::min(most, std::max(ranks * tokens, PORTION / (hidden * item_bytes(shape.wire))));
        flags = sizeof(State);
        regions = up(flags + 2 * ranks * static_cast<int64_t>(sizeof(PaddedFlag)), PAGE);
        list_rows = LINE;  // after their number
        list_slots = up(list_rows + tokens * 4, LINE);
        list = up(list_slots + tokens * shape.top_k * 2, LINE);
        scales = ranks * list;
        values = up(scales + tokens * 4, PAGE);
        places = up(values + tokens * hidden * item_bytes(shape.wire), PAGE);
        lists = up(tokens * each * 4, LINE);  // of places, one for each rank
        results = up(places + ranks * lists, PAGE);
        region = up(results + most * hidden * item_bytes(shape.back), PAGE);
    }

    int64_t bytes() const { return regions + 2 * region; }
};

// What a rank says of its rows to one other.
struct List {
    uint8_t* at;
    const Layout& layout;

    int32_t& count() const { return *reinterpret_cast<int32_t*>(at); }
    uint32_t& sequence() const { return *reinterpret_cast<uint32_t*>(at + 8); }
    int32_t& announced() const { return *reinterpret_cast<int32_t*>(at + 4); }
    int32_t* rows() const { return reinterpret_cast<int32_t*>(at + layout.list_rows); }
    int16_t* slots() const { return reinterpret_cast<int16_t*>(at + layout.list_slots); }
};

}  // namespace

// Products by AMX tiles (Intel, "Architecture Instruction Set Extensions", chapter 3): up to 16 rows of words times 16
// words of 16 columns with one instruction. It knows neither layers nor attention.
//
// A panel of packed weights is the right side of such products as it lies: 16 of its words are 16 rows of a tile, of 16
// columns each. Words are taken 16 at a time from the first on, and what is left last; of bfloat16 the sum of each 16
// is added to an output at once, so that outputs depend neither on the rows beside them nor on who adds which words.
#pragma once

#include "abi.h"
#include "threads.h"
#include "vector.h"

namespace {

#if defined(__AMX_TILE__)

constexpr int AMX_ROWS = 16, AMX_WORDS = 16, AMX_COLUMNS = 16;
constexpr int TALL_ROWS = 2 * AMX_ROWS;  // of two left sides
constexpr int KIND_SIGNED = -1;          // int8 by int8; KIND_INT8 is by AMX uint8 by int8

struct TileShapes {
    uint8_t palette, first_row, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

// The compiler does not know what instructions for tiles read from memory, nor all of what they write.
INLINE void settle(const void* what) { asm volatile("" ::"r"(what) : "memory"); }

// Of this thread; 0: none. Nobody else's shapes are in place while `Tiles` lives.
thread_local int32_t shaped = 0;

// Tiles 0 to 3 are outputs, 4 and 5 left sides, 6 and 7 right ones of so many words. Where there are two left sides, 4
// has AMX_ROWS rows, whose outputs are 0 and 1, and 5 the others.
INLINE void shape_tiles(long rows, long words) {
    const int32_t wanted = int32_t(rows | words << 8);
    if (shaped == wanted) return;
    alignas(64) TileShapes s = {};
    s.palette = 1;
    const auto set = [&](int tile, long height, long width) {
        s.rows[tile] = uint8_t(height);
        s.bytes[tile] = uint16_t(width * 4);
    };
    const long first = rows > AMX_ROWS ? AMX_ROWS : rows, second = rows > AMX_ROWS ? rows - AMX_ROWS : rows;
    for (int tile = 0; tile < 4; ++tile) set(tile, tile < 2 ? first : second, AMX_COLUMNS);
    set(4, first, words);
    set(5, second, words);
    set(6, words, AMX_COLUMNS);
    set(7, words, AMX_COLUMNS);
    settle(&s);
    _tile_loadconfig(&s);
    shaped = wanted;
}

// A thread's tiles while it works on a call. They are given back for whoever computes with some next, and for the
// system, which keeps them for the thread otherwise.
struct Tiles {
    Tiles() { shaped = 0; }
    ~Tiles() {
        if (shaped) _tile_release();
    }
    Tiles(const Tiles&) = delete;
};

#define TILE_STEP(out, left, right)                      \
    do {                                                 \
        if (KIND == KIND_SIGNED)                         \
            _tile_dpbssd(out, left, right);              \
        else if (KIND == KIND_INT8)                      \
            _tile_dpbusd(out, left, right);              \
        else                                             \
            _tile_dpbf16ps(out, left, right);            \
    } while (0)

// `amx_products` of words in groups of `each`, at most AMX_WORDS.
template <int KIND, bool TALL, int RIGHTS, bool ADDS, class RightSide, class Fetch>
INLINE void amx_groups(long rows, const int32_t* a, long lda, const RightSide& b, long stride, long words, long each,
                       int32_t* out, long ldo, const Fetch& fetch) {
    static_assert(RIGHTS == 2 || (RIGHTS == 4 && !TALL), "there are tiles for four outputs");
    constexpr bool FOUR = TALL || RIGHTS == 4;
    const int32_t* const lower = a + AMX_ROWS * lda;
    int32_t* const second = TALL ? out + AMX_ROWS * ldo : out + 2 * AMX_COLUMNS;
    shape_tiles(rows, each);
    settle(out);
    if (ADDS) {
        _tile_loadd(0, out, ldo * 4);
        _tile_loadd(1, out + AMX_COLUMNS, ldo * 4);
        if (FOUR) _tile_loadd(2, second, ldo * 4);
        if (FOUR) _tile_loadd(3, second + AMX_COLUMNS, ldo * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (FOUR) _tile_zero(2);
        if (FOUR) _tile_zero(3);
    }
    for (long k = 0; k < words; k += each) {
        _tile_loadd(4, a + k, lda * 4);
        fetch(k, 0);
        _tile_loadd(6, b(0) + k * stride, stride * 4);
        TILE_STEP(0, 4, 6);
        fetch(k, 1);
        _tile_loadd(7, b(1) + k * stride, stride * 4);
        TILE_STEP(1, 4, 7);
        if (TALL) {
            _tile_loadd(5, lower + k, lda * 4);
            TILE_STEP(2, 5, 6);
            TILE_STEP(3, 5, 7);
        } else if (RIGHTS == 4) {
            _tile_loadd(6, b(2) + k * stride, stride * 4);
            TILE_STEP(2, 4, 6);
            _tile_loadd(7, b(3) + k * stride, stride * 4);
            TILE_STEP(3, 4, 7);
        }
    }
    _tile_stored(0, out, ldo * 4);
    _tile_stored(1, out + AMX_COLUMNS, ldo * 4);
    if (FOUR) _tile_stored(2, second, ldo * 4);
    if (FOUR) _tile_stored(3, second + AMX_COLUMNS, ldo * 4);
    settle(out);
}

#undef TILE_STEP

// out[r][0:16 RIGHTS] = or, where ADDS, += A[r] . B for so many rows and words: up to AMX_ROWS, or more, and up to
// TALL_ROWS, where TALL. B is RIGHTS times 16 columns: `b(j)` is where the words of columns 16 j on begin, which lie
// `stride` words apart. `fetch(k, i)` is called for every whole group of words, with i 0 and 1.
template <int KIND, bool TALL, int RIGHTS, bool ADDS, class RightSide, class Fetch>
INLINE void amx_products(long rows, const int32_t* a, long lda, const RightSide& b, long stride, long words,
                         int32_t* out, long ldo, const Fetch& fetch) {
    const long left = words % AMX_WORDS, whole = words - left;
    if (whole || !left) amx_groups<KIND, TALL, RIGHTS, ADDS>(rows, a, lda, b, stride, whole, AMX_WORDS, out, ldo, fetch);
    if (!left) return;
    const auto last = [&](int j) { return b(j) + whole * stride; };
    const auto nothing = [](long, int) {};
    if (ADDS || whole)
        amx_groups<KIND, TALL, RIGHTS, true>(rows, a + whole, lda, last, stride, left, left, out, ldo, nothing);
    else
        amx_groups<KIND, TALL, RIGHTS, false>(rows, a, lda, last, stride, left, left, out, ldo, nothing);
}

// `amx_products` with 64 columns for up to TALL_ROWS rows; more than AMX_ROWS take two passes, the first of which fetches.
template <int KIND, bool ADDS, class RightSide, class Fetch>
INLINE void amx_64_columns(long rows, const int32_t* a, long lda, const RightSide& b, long stride, long words,
                           int32_t* out, long ldo, const Fetch& fetch) {
    if (rows <= AMX_ROWS) return amx_products<KIND, false, 4, ADDS>(rows, a, lda, b, stride, words, out, ldo, fetch);
    amx_products<KIND, true, 2, ADDS>(rows, a, lda, b, stride, words, out, ldo, fetch);
    amx_products<KIND, true, 2, ADDS>(
        rows, a, lda, [&](int j) { return b(j + 2); }, stride, words, out + 2 * AMX_COLUMNS, ldo, [](long, int) {});
}

#else

struct Tiles {
    Tiles() {}
    Tiles(const Tiles&) = delete;
};

#endif

// body(thread) on every thread, each with tiles of its own.
template <class Body>
INLINE void each_with_tiles(ThreadTeam* team, Body body) {
    team_each(team, [&](int thread) {
        const Tiles tiles;
        body(thread);
    });
}

}  // namespace

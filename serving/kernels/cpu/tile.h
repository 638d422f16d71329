// The register tile: some rows times a panel of 32 columns, for INT8, bfloat16 and float32.
//
// Every output is one accumulator that walks the inputs in order, whatever the tile around it. Shapes: rows of `lda`
// 32-bit words, panels of 32 columns.
#pragma once

#include <type_traits>
#include <utility>

#include "abi.h"
#include "amx.h"
#include "soon.h"

namespace {

constexpr int PANEL = 32;             // output channels a panel
constexpr int NV = PANEL / LANES;     // vectors a panel row
#if defined(__AVX512F__)
constexpr int VECTOR_ROWS = 12;       // 12 x 2 accumulators of 32 registers
constexpr int TILE_ROWS_F32 = 12;
constexpr int ACCUMULATORS = 24;
#elif defined(__AVX2__)
constexpr int VECTOR_ROWS = 5;        // 5 x 2 of 16, one half of the panel after the other
constexpr int TILE_ROWS_F32 = 3;      // 3 x 4: a panel of these is too large to be read twice
constexpr int ACCUMULATORS = 12;
#else
constexpr int VECTOR_ROWS = 2;
constexpr int TILE_ROWS_F32 = 2;
constexpr int ACCUMULATORS = 16;
#endif

#if defined(__AMX_TILE__)
constexpr bool TILED = true;  // INT8 and bfloat16 multiply by AMX
constexpr int FEW_INT8 = 4;            // rows of INT8 that do not
constexpr int TILE_ROWS = AMX_ROWS;
constexpr int MOST_ROWS = TALL_ROWS;     // of a tile of a linear layer
constexpr long VALUE_WORDS = AMX_WORDS;  // of attention's weights and values that are multiplied together
#else
constexpr bool TILED = false;
constexpr int FEW_INT8 = 0;
constexpr int TILE_ROWS = VECTOR_ROWS;
constexpr int MOST_ROWS = VECTOR_ROWS;
constexpr long VALUE_WORDS = 1;
#endif

INLINE long tile_rows(int kind) { return kind == KIND_F32 ? TILE_ROWS_F32 : MOST_ROWS; }
INLINE int per_word(int kind) { return kind == KIND_INT8 ? 4 : kind == KIND_BF16 ? 2 : 1; }
INLINE long words_of(int kind, long n) { return (n + per_word(kind) - 1) / per_word(kind); }

// Words of so many keys' weights that are multiplied by their values; past the keys weights are 0.
INLINE long value_words(int kind, long keys) {
    return kind == KIND_BF16 ? round_up(words_of(kind, keys), VALUE_WORDS) : words_of(kind, keys);
}

// ---- the three dot products: acc[j] += a_word . b_word[j] ----------------------------------------------------------

struct DotF32 {
    static constexpr int KIND = KIND_F32;
    static constexpr bool WIDENS = false;
    struct Left { vf value; };
    typedef vi Right;
    static INLINE Left left(int32_t word) { return {bits(splat(word))}; }
    static INLINE Right right(vi words) { return words; }
    static INLINE vi step(vi acc, Left a, Right b) { return bits(fma(a.value, bits(b), bits(acc))); }
};

struct DotBf16 {
    static constexpr int KIND = KIND_BF16;
#if defined(__AVX512BF16__)
    static constexpr bool WIDENS = false;
    struct Left { vi value; };
    typedef vi Right;
    static INLINE Left left(int32_t word) { return {splat(word)}; }
    static INLINE Right right(vi words) { return words; }
    static INLINE vi step(vi acc, Left a, Right b) {
        return (vi)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a.value, (__m512bh)b);
    }
#else
    static constexpr bool WIDENS = true;
    static constexpr int32_t HIGH = int32_t(0xffff0000);
    struct Left { vf low, high; };
    typedef Left Right;
    static INLINE Left left(int32_t word) { return right(splat(word)); }
    static INLINE Right right(vi words) { return {bits(words << 16), bits(words & HIGH)}; }
    static INLINE vi step(vi acc, Left a, Right b) { return bits(fma(a.high, b.high, fma(a.low, b.low, bits(acc)))); }
#endif
};

struct DotInt8 {
    static constexpr int KIND = KIND_INT8;
    static constexpr bool WIDENS = false;
    typedef vi Right;
    static INLINE Right right(vi words) { return words; }
#if defined(__AVX512VNNI__)
    struct Left { vi value; };  // activations shifted by +128 to unsigned bytes
    static INLINE Left left(int32_t word) { return {splat(word)}; }
    static INLINE vi step(vi acc, Left a, Right b) {
        return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a.value, (__m512i)b);
    }
#elif defined(__AVX2__)
    struct Left { __m256i value; };
    static INLINE Left left(int32_t word) { return {_mm256_set1_epi32(word)}; }
    static INLINE vi step(vi acc, Left a, Right b) {  // |b| <= 128 and |a| <= 127 keep each pair of products in int16
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)b), _mm256_sign_epi8(a.value, (__m256i)b));
        return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
#else
    struct Left { int32_t byte[4]; };
    static INLINE Left left(int32_t word) {
        return {{int8_t(word), int8_t(word >> 8), int8_t(word >> 16), int8_t(word >> 24)}};
    }
    static INLINE vi step(vi acc, Left a, Right b) {
        acc += ((b << 24) >> 24) * a.byte[0] + ((b << 16) >> 24) * a.byte[1];
        return acc + ((b << 8) >> 24) * a.byte[2] + (b >> 24) * a.byte[3];
    }
#endif
};

#if defined(__AVX512VNNI__)
constexpr int32_t UNSIGNED_SHIFT = 128;  // what int8 activations are stored with added
#else
constexpr int32_t UNSIGNED_SHIFT = 0;
#endif

// ---- what a tile walks over ------------------------------------------------------------------------------------------

// The left side of a tile: rows of words as they are.
template <class Dot, int ROWS>
struct WordRows {
    static constexpr bool IN_PARTS = false;
    const int32_t* a;
    long lda;

    INLINE WordRows(const int32_t* a, long lda) : a(a), lda(lda) {}
    INLINE long take(long, long words) { return words; }
    INLINE typename Dot::Left at(int r, long k) const { return Dot::left(a[r * lda + k]); }
};

// The same where a dot product takes both halves of a word as float32: some words at a time are widened once for all
// the vectors they are multiplied by.
template <class Dot, int ROWS>
struct WideRows {
    static constexpr bool IN_PARTS = true;
    static constexpr long WORDS = 64;  // at a time
    const int32_t* a;
    long lda, first = 0;
    alignas(64) float low[ROWS][WORDS], high[ROWS][WORDS];

    INLINE WideRows(const int32_t* a, long lda) : a(a), lda(lda) {}

    // Words from k on, of so many in all. Returns where those end that can be asked for now.
    INLINE long take(long k, long words) {
        const long count = least(WORDS, words - k);
        first = k;
        for (int r = 0; r < ROWS; ++r) {
            const int32_t* const row = a + r * lda + k;
            long i = 0;
            for (; i + LANES <= count; i += LANES) {
                const auto wide = Dot::right(load(row + i));
                store(low[r] + i, wide.low);
                store(high[r] + i, wide.high);
            }
            for (; i < count; ++i) {
                low[r][i] = from_bf16(uint16_t(row[i]));
                high[r][i] = from_bf16(uint16_t(uint32_t(row[i]) >> 16));
            }
        }
        return k + count;
    }
    INLINE typename Dot::Left at(int r, long k) const { return {splat(low[r][k - first]), splat(high[r][k - first])}; }
};

template <class Dot, int ROWS>
using LeftRows = std::conditional_t<Dot::WIDENS && (ROWS > 1), WideRows<Dot, ROWS>, WordRows<Dot, ROWS>>;

// How many of so many vectors of columns a pass over the words takes: what registers have room for. A widened right
// side needs two for each.
template <class Dot>
constexpr int vectors_a_pass(int rows, int vectors) {
    const int room = Dot::WIDENS ? ACCUMULATORS - ACCUMULATORS / 6 : ACCUMULATORS;
    while (rows * vectors > room && vectors % 2 == 0) vectors /= 2;
    return vectors;
}

// out[r][j] = sum over words k of a[r][k] . right(k)(j), for vectors j of columns, added to what is there where ADDS.
// `fetch(k)` is called once for each word.
template <class Dot, int ROWS, int VECTORS, bool ADDS, class RightSide, class Fetch>
INLINE void walk(const int32_t* a, long lda, long words, int32_t* out, long ldo, const RightSide& right,
                 const Fetch& fetch) {
    typedef LeftRows<Dot, ROWS> Lefts;
    constexpr int WIDTH = vectors_a_pass<Dot>(ROWS, VECTORS);
    Lefts left(a, lda);
    long k0 = 0;
    do {
        const long end = left.take(k0, words);
#pragma GCC unroll 8
        for (int first = 0; first < VECTORS; first += WIDTH) {
            int32_t* const to = out + first * LANES;
            vi acc[ROWS][WIDTH] = {};
            if (ADDS || (Lefts::IN_PARTS && k0 > 0))
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
                    for (int j = 0; j < WIDTH; ++j) acc[r][j] = load(to + r * ldo + j * LANES);
            for (long k = k0; k < end; ++k) {
                if (first == 0) fetch(k);
                const auto word = right(k);
                typename Dot::Right b[WIDTH];
#pragma GCC unroll 16
                for (int j = 0; j < WIDTH; ++j) b[j] = word(first + j);
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r) {
                    const typename Dot::Left l = left.at(r, k);
#pragma GCC unroll 16
                    for (int j = 0; j < WIDTH; ++j) acc[r][j] = Dot::step(acc[r][j], l, b[j]);
                }
            }
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
                for (int j = 0; j < WIDTH; ++j) *reinterpret_cast<vi_at*>(to + r * ldo + j * LANES) = acc[r][j];
        }
        k0 = end;
    } while (Lefts::IN_PARTS && k0 < words);
}

// Whether tiles multiply so many rows. INT8 has the same bits either way, and few rows are as quickly done by vectors.
constexpr bool by_amx(int kind, int rows) {
    return TILED && (kind == KIND_BF16 || (kind == KIND_INT8 && rows > FEW_INT8));
}

// Up to so many rows two panels at a time keep the multipliers busy.
constexpr int pair_rows(int kind) { return TILED && kind != KIND_F32 ? TILE_ROWS : VECTOR_ROWS / 2; }

// out[r][0:32] = A[r] . panel for ROWS rows; raw accumulators (int32, or float32 bits). With PANELS = 2 the next panel,
// `apart` words further on, goes to out[r][32:64]. Meanwhile `ahead` is fetched into the second cache: what is on its way
// there leaves the first one's few places to what is used now. Vector forms take LINES lines for each word.
template <class Dot, int ROWS, int PANELS, int LINES>
void tile(const int32_t* a, long lda, const int32_t* b, long apart, long words, const Fetched& ahead, int32_t* out,
          long ldo) {
#if defined(__AMX_TILE__)
    if constexpr (by_amx(Dot::KIND, ROWS))
        return amx_products<Dot::KIND, (ROWS > AMX_ROWS), 2 * PANELS, false>(
            ROWS, a, lda, [=](int j) { return b + j / 2 * apart + j % 2 * AMX_COLUMNS; }, PANEL, words, out, ldo,
            [&](long k, int half) {
                const long lines = ahead.lines, first = k / FETCH_WORDS * lines;
                for (long i = lines * half / 2; i < lines * (half + 1) / 2; ++i)
                    __builtin_prefetch(ahead.from + (first + i) * 16, 0, 2);
            });
#endif
    walk<Dot, ROWS, PANELS * NV, false>(
        a, lda, words, out, ldo,
        [&](long k) {
            const int32_t* const row = b + k * PANEL;
            return [=](int j) { return Dot::right(load(row + (j / NV) * apart + (j % NV) * LANES)); };
        },
        [&](long k) {
            for (int line = 0; line < LINES; ++line) __builtin_prefetch(ahead.from + (k * LINES + line) * 16, 0, 2);
        });
}

typedef void (*Tile)(const int32_t*, long, const int32_t*, long, long, const Fetched&, int32_t*, long);

// The tile of so many rows; of more than `pair_rows` there is only that of one panel.
template <class Dot, int PANELS, int LINES, int... ROWS_LESS_1>
INLINE Tile pick(long rows, std::integer_sequence<int, ROWS_LESS_1...>) {
    static constexpr Tile tiles[] = {
        tile<Dot, ROWS_LESS_1 + 1, (ROWS_LESS_1 < pair_rows(Dot::KIND) ? PANELS : 1),
             (by_amx(Dot::KIND, ROWS_LESS_1 + 1) ? 0 : LINES)>...};
    return tiles[rows - 1];
}

template <class Dot, int PANELS, int LINES>
INLINE Tile pick(long rows) {
    return pick<Dot, PANELS, LINES>(rows, std::make_integer_sequence<int, Dot::KIND == KIND_F32 ? TILE_ROWS : MOST_ROWS>());
}

template <int LINES>
INLINE Tile tile_for(int kind, long rows) {
    if (kind == KIND_INT8) return pick<DotInt8, 1, LINES>(rows);
    return kind == KIND_BF16 ? pick<DotBf16, 1, LINES>(rows) : pick<DotF32, 1, LINES>(rows);
}

// A tile of rows that fetches so many lines for every FETCH_WORDS words, of vector forms 0, 1 or 2 for each.
INLINE Tile tile_for(int kind, long rows, long lines) {
    if (lines == 0) return tile_for<0>(kind, rows);
    return lines == FETCH_WORDS ? tile_for<1>(kind, rows) : tile_for<2>(kind, rows);
}

// out [rows][32 * panels] = A . panels, `apart` words from one to the next; rows at most TILE_ROWS. For float kinds.
INLINE void multiply(int kind, long rows, const int32_t* a, long lda, const int32_t* b, long apart, long words,
                     long panels, float* out, long ldo) {
    int32_t* raw = reinterpret_cast<int32_t*>(out);
    long panel = 0;
    if (rows <= pair_rows(kind)) {
        const Tile pair = kind == KIND_BF16 ? pick<DotBf16, 2, 0>(rows) : pick<DotF32, 2, 0>(rows);
        for (; panel + 2 <= panels; panel += 2)
            pair(a, lda, b + panel * apart, apart, words, {}, raw + panel * PANEL, ldo);
    }
    const Tile one = tile_for<0>(kind, rows);
    for (; panel < panels; ++panel) one(a, lda, b + panel * apart, 0, words, {}, raw + panel * PANEL, ldo);
}

}  // namespace

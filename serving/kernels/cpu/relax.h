// What a thread does while it spins: the core gives its twin the units, and draws less power.

#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() asm volatile("yield")
#else
#define RELAX() ((void)0)
#endif

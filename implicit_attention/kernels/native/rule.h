// How a solve ends, and what it is allowed: codes of `status.py`, which a test compares, and the numbers of
// `_safeguard.py`, which setup.py defines.
#pragma once

#include <cstdint>

constexpr int8_t CONVERGED = 0, EXPLICIT = 1, BUDGET = 2, UNSTABLE = 3, MAX_STEPS = 4, STALLED = 5, DIVERGED = 6,
                 NONFINITE = 7;
#if !defined(DESCENT) || !defined(ENERGY_SLACK) || !defined(STRETCH) || !defined(SLOPE) || !defined(LONGEST)
#error "define the numbers of implicit_attention/_safeguard.py, as setup.py does"
#endif

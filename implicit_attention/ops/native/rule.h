// How a solve ends, and what it is allowed: codes and constants of `status.py` and `ops/rule.py`, which a test compares.
#pragma once

#include <cstdint>

constexpr int8_t CONVERGED = 0, EXPLICIT = 1, BUDGET = 2, UNSTABLE = 3, MAX_STEPS = 4, STALLED = 5, DIVERGED = 6,
                 NONFINITE = 7;
constexpr double DESCENT = 0.25, ENERGY_SLACK = 4.0, STRETCH = 4.0, SLOPE = 0.5, LONGEST = 30.0;

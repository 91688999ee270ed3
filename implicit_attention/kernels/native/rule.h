// Written by `python tests/native_rule.py` from kernels/rule.py and `Status`, which are what to change.
#pragma once

#include "simd.h"

constexpr int8_t CONVERGED = 0, EXPLICIT = 1, BUDGET = 2, UNSTABLE = 3, MAX_STEPS = 4, STALLED = 5, DIVERGED = 6,
    NONFINITE = 7, OUT_OF_RANGE = 8;
constexpr double DESCENT = 0.25, ENERGY_SLACK = 4.0, STRETCH = 4.0, SLOPE = 0.5, LONGEST = 30.0;

// The rounding of a difference of two energies.
template <typename T>
IA_INLINE Vec<T> rounding_of(Vec<T> energy, Vec<T> before, T eps) {
  const Vec<T> here = absolute(energy);
  const Vec<T> there = absolute(before);
  return eps * ((here > there) ? here : there);
}

// Whether E fell by what is required: E tells, or where rounding hides that, its gradient by the trapezoid rule.
template <typename T>
IA_INLINE Mask<T> descends(Vec<T> energy, Vec<T> before, Vec<T> required, Vec<T> trapezoid, T eps) {
  const Vec<T> rounding = rounding_of<T>(energy, before, eps);
  const Mask<T> resolved = required > (T(ENERGY_SLACK) * rounding);
  return (resolved & ((before - energy) >= (required - rounding))) | (~resolved & (trapezoid >= required));
}

// The factor that makes a step of length `reach` no longer than `most` |r|; its gradient is never 0/0.
template <typename T>
IA_INLINE Vec<T> shortened(Vec<T> residual, Vec<T> reach, T most) {
  const Vec<T> longest = most * residual;
  return (reach > longest) ? (longest / ((reach > longest) ? reach : all(T(1.0)))) : all(T(1.0));
}

// Whether a step s of length `reach` may be tried: the slope <r, s> is at least `part` of the plain one, |r|^2.
template <typename T>
IA_INLINE Mask<T> promises(Vec<T> square, Vec<T> slope, Vec<T> reach, T part) {
  return (reach < T(__builtin_inf())) & (slope >= (part * square));
}

template <typename T>
struct DecideResult {
  Mask<T> accepted;
  Mask<T> tries;
  Vec<T> by_r;
  Vec<T> by_df;
};

// Decide what follows an evaluation at z = z' + dz from the last accepted point z'; f(z) = z + r and df = dz + dr.
template <typename T>
IA_INLINE DecideResult<T> decide(Vec<T> square, Vec<T> residual, Vec<T> energy, Vec<T> trapezoid, Vec<T> across,
    Vec<T> turned, Vec<T> along, Vec<T> span, Vec<T> bent, Vec<T> before, Vec<T> residual_before, Mask<T> finite,
    Mask<T> tried, Mask<T> may, T eps, T tiny, T least) {
  const Vec<T> required = (T(DESCENT) * residual_before) * residual_before;
  const Mask<T> accepted = ~tried | (finite & descends<T>(energy, before, required, trapezoid, eps));
  const Vec<T> gamma = across / ((turned > tiny) ? turned : all(tiny));
  const Vec<T> slope = square - (gamma * along);
  const Vec<T> reach_square = (slope - (gamma * along)) + ((gamma * gamma) * span);
  const Vec<T> reach = root((reach_square > T(0.0)) ? reach_square : all(T(0.0)));
  const Vec<T> cut = shortened<T>(residual, reach, T(LONGEST));
  const Mask<T> downward = (bent >= T(0.0)) & (residual_before >= least);
  const Mask<T> tries = (accepted & may) & (downward | promises<T>(square, cut * slope, reach, T(SLOPE)));
  const Vec<T> by_r = tries ? (downward ? all(T(STRETCH)) : cut) : all(T(1.0));
  const Vec<T> by_df = (tries & ~downward) ? cut * gamma : all(T(0.0));
  return {accepted, tries, by_r, by_df};
}

// What the general loop of the solvers does with one evaluation of a map: residuals of rows, and which of them are done.
#pragma once

#include <cmath>
#include <limits>

#include "rule.h"
#include "simd.h"

// |x| where squares overflow, or lose digits.
template <typename T>
double scaled_length(const T *x, int64_t count) {
  double most = 0, sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double size = std::fabs(static_cast<double>(x[i]));
    if (std::isnan(size)) return size;
    most = size > most ? size : most;
  }
  if (most == 0 || most == std::numeric_limits<double>::infinity()) return most;
  for (int64_t i = 0; i < count; ++i) {
    const double part = static_cast<double>(x[i]) / most;
    sum += part * part;
  }
  return most * std::sqrt(sum);
}

template <typename T>
T length_of(const Vec<T> *sums, const T *x, int64_t count, T rest) {
  using Limits = std::numeric_limits<T>;
  const Vec<T> lanes = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  T sum = rest;
  for (int i = 0; i < LANES<T>; ++i) sum += lanes[i];
  const bool whole = sum >= Limits::min() / Limits::epsilon() && sum < Limits::infinity();
  return whole ? std::sqrt(sum) : static_cast<T>(scaled_length(x, count));
}

// r = f - z of one row, |r|, and the tolerance atol + rtol |f|.
template <typename T>
void measure(const T *z, const T *f, T *r, int64_t count, T rtol, T atol, T *residual, T *tolerance) {
  constexpr int PARTS = 4;
  Vec<T> of_r[PARTS] = {}, of_f[PARTS] = {};
  T rest_of_r = 0, rest_of_f = 0;
  int64_t i = 0;
  const auto add = [&](int64_t at, int part) {
    const Vec<T> image = load(f + at), moved = image - load(z + at);
    store(r + at, moved);
    of_r[part] = fma(moved, moved, of_r[part]);
    of_f[part] = fma(image, image, of_f[part]);
  };
  for (; i + PARTS * LANES<T> <= count; i += PARTS * LANES<T>)
    for (int part = 0; part < PARTS; ++part) add(i + part * LANES<T>, part);
  for (; i + LANES<T> <= count; i += LANES<T>) add(i, 0);
  for (; i < count; ++i) {
    r[i] = f[i] - z[i];
    rest_of_r += r[i] * r[i];
    rest_of_f += f[i] * f[i];
  }
  *residual = length_of<T>(of_r, r, count, rest_of_r);
  *tolerance = atol + rtol * length_of<T>(of_f, f, count, rest_of_f);
}

// The tensors of the loop with an entry for each row.
template <typename T>
struct Progress {
  bool *active;
  T *residual, *tolerance;
  int32_t *steps, *evaluations;
  int8_t *status;
  bool *better;
};

// How many rows are unfinished, and how many have a better state, after a step.
struct Counts {
  int64_t active, better;
};

// `accepted` is 0 where all are. A fixed budget tests no residual; where steps descend each one is better.
template <typename T>
Counts decide(int64_t rows, int64_t step, bool fixed, bool descends, const T *residual, const T *tolerance,
              const bool *accepted, const Progress<T> &p) {
  constexpr T inf = std::numeric_limits<T>::infinity();
  Counts counts{0, 0};
  for (int64_t i = 0; i < rows; ++i) {
    const bool candidate = p.active[i] && (!accepted || accepted[i]);
    const bool finite = residual[i] < inf && tolerance[i] < inf;
    const bool converged = !fixed && candidate && finite && residual[i] <= tolerance[i];
    const bool broken = candidate && !finite;
    const bool improved = fixed || step == 0 || (descends ? residual[i] < inf : residual[i] < p.residual[i]);
    const bool better = (candidate && improved) || converged;
    p.evaluations[i] += p.active[i];
    if (better) {
      p.residual[i] = residual[i];
      p.tolerance[i] = tolerance[i];
      p.steps[i] = static_cast<int32_t>(step);
    }
    if (converged) p.status[i] = CONVERGED;
    if (broken) p.status[i] = step == 0 ? NONFINITE : DIVERGED;
    p.active[i] = p.active[i] && !(converged || broken);
    p.better[i] = better;
    counts.active += p.active[i];
    counts.better += better;
  }
  return counts;
}

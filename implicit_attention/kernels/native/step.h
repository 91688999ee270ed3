// What comes between two evaluations of a user's map, row by row: residual and tolerance, safeguard, best state, status,
// and the next state, by Picard or by Anderson's method, as solvers/ has them.
#pragma once

#include <cmath>
#include <limits>

#include "rule.h"
#include "simd.h"

// Changes that are mixed at most.
constexpr int MOST_MIXED = 8;

// growth: how much |r| may grow in a mixed step; fixed: whether the budget is; mixes: whether the next steps may be mixed.
struct StepRule {
  double rtol, atol, ridge, growth;
  int64_t number;
  bool fixed, mixes;
};

// Of all rows: states, images, r = f - z and the next states (rows, n), |r| and the tolerance there; the records of the
// best states; and with a `history` the last accepted z, r and |r|, changes of r and f (rows, history, n), the products
// of the former (rows, history, history), and how many may be mixed and were made (rows, 2).
template <typename T>
struct Steps {
  int64_t n, history;
  const T *z, *f;
  T *to, *r, *residual, *tolerance;
  bool *active, *better;
  T *best_residual, *best_tolerance;
  int32_t *steps, *evaluations;
  int8_t *status;
  bool *accelerated;
  T *last_z, *last_r, *last_residual, *dr, *df, *gram;
  int32_t *counts;
};

template <typename T>
T dot(const T *a, const T *b, int64_t n) {
  Vec<T> sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * LANES<T> <= n; i += 4 * LANES<T>)
    for (int k = 0; k < 4; ++k) sums[k] = fma(load(a + i + k * LANES<T>), load(b + i + k * LANES<T>), sums[k]);
  for (; i + LANES<T> <= n; i += LANES<T>) sums[0] = fma(load(a + i), load(b + i), sums[0]);
  const Vec<T> lanes = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  T sum = 0;
  for (int k = 0; k < LANES<T>; ++k) sum += lanes[k];
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// |x| of any size: where squares overflow, or lose digits, anew in units of the largest entry.
template <typename T>
T length(const T *x, int64_t n) {
  using Limits = std::numeric_limits<T>;
  const T square = dot(x, x, n);
  if (square >= Limits::min() / Limits::epsilon() && square < Limits::infinity()) return std::sqrt(square);
  double most = 0, sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double size = std::fabs(static_cast<double>(x[i]));
    if (std::isnan(size)) return x[i];
    most = size > most ? size : most;
  }
  if (most == 0 || most == std::numeric_limits<double>::infinity()) return static_cast<T>(most);
  for (int64_t i = 0; i < n; ++i) sum += x[i] / most * (x[i] / most);
  return static_cast<T>(most * std::sqrt(sum));
}

// Whether all numbers are finite.
template <typename T>
bool finite(const T *x, int64_t n) {
  int64_t i = 0;
  Mask<T> bad = Mask<T>{};
  for (; i + LANES<T> <= n; i += LANES<T>) {
    const Vec<T> part = load(x + i);
    bad |= part - part != T(0);
  }
  bool found = any<T>(bad);
  for (; i < n; ++i) found |= x[i] - x[i] != 0;
  return !found;
}

// The weights by an L D L^T factorisation of the products A, newest change first; columns that are dependent to rounding
// get none.
template <typename T>
void least_squares(int m, T ridge, T (&A)[MOST_MIXED][MOST_MIXED], T (&rest)[MOST_MIXED], T (&weights)[MOST_MIXED]) {
  using Limits = std::numeric_limits<T>;
  T sum = 0, least[MOST_MIXED], lower[MOST_MIXED][MOST_MIXED];
  for (int i = 0; i < m; ++i) sum += A[i][i];
  const T shift = ridge * sum / m + Limits::min();
  for (int i = 0; i < m; ++i) {
    least[i] = shift / 2 + 4 * Limits::epsilon() * A[i][i];
    A[i][i] += shift;
  }
  for (int i = 0; i < m; ++i) {
    const T pivot = i == 0 || A[i][i] > least[i] ? A[i][i] : Limits::infinity();
    weights[i] = rest[i] / pivot;
    for (int j = i + 1; j < m; ++j) {
      const T factor = lower[i][j] = A[i][j] / pivot;
      rest[j] -= factor * rest[i];
      for (int k = j; k < m; ++k) A[j][k] -= factor * A[i][k];
    }
  }
  for (int i = m - 2; i >= 0; --i)
    for (int j = i + 1; j < m; ++j) weights[i] -= lower[i][j] * weights[j];
}

// The next state of a row, from its evaluation where that was accepted, else the plain step from the memory.
template <typename T>
void mix(const Steps<T> &all, int64_t row, bool accepted, const StepRule &rule) {
  const int64_t n = all.n, m = all.history;
  const T *const z = all.z + row * n, *const r = all.r + row * n;
  T *const to = all.to + row * n, *const last_z = all.last_z + row * n, *const last_r = all.last_r + row * n;
  T *const dr = all.dr + row * m * n, *const df = all.df + row * m * n, *const gram = all.gram + row * m * m;
  int32_t &valid = all.counts[2 * row], &made = all.counts[2 * row + 1];
  if (!accepted) {
    valid = 0;
  } else {
    if (rule.number > 0) {
      const int64_t slot = made % m;
      T *const new_r = dr + slot * n, *const new_f = df + slot * n;
      for (int64_t i = 0; i < n; ++i) {
        new_r[i] = r[i] - last_r[i];
        new_f[i] = (z[i] - last_z[i]) + new_r[i];
      }
      ++made;
      valid = valid < m ? valid + 1 : valid;
      for (int k = 0; k < valid; ++k) {
        const int64_t old = (made - 1 - k) % m;
        gram[slot * m + old] = gram[old * m + slot] = dot(new_r, dr + old * n, n);
      }
    }
    std::memcpy(last_z, z, n * sizeof(T));
    std::memcpy(last_r, r, n * sizeof(T));
    all.last_residual[row] = all.residual[row];
  }
  bool usable = false;
  if (rule.mixes && valid > 0) {
    T A[MOST_MIXED][MOST_MIXED], rest[MOST_MIXED], weights[MOST_MIXED];
    const T *mixed[MOST_MIXED];
    for (int i = 0; i < valid; ++i) {
      const int64_t slot = (made - 1 - i) % m;
      rest[i] = dot(dr + slot * n, last_r, n);
      mixed[i] = df + slot * n;
      for (int j = i; j < valid; ++j) A[i][j] = gram[slot * m + (made - 1 - j) % m];
    }
    least_squares(valid, static_cast<T>(rule.ridge), A, rest, weights);
    std::memcpy(to, last_r, n * sizeof(T));
    for (int k = 0; k < valid; ++k)
      for (int64_t i = 0; i < n; ++i) to[i] -= weights[k] * mixed[k][i];
    usable = finite(to, n);
  }
  const T *const direction = usable ? to : last_r;
  for (int64_t i = 0; i < n; ++i) to[i] = last_z[i] + direction[i];
  all.accelerated[row] = usable;
}

// All that a row needs after one more evaluation.
template <typename T>
void step(const Steps<T> &all, int64_t row, const StepRule &rule) {
  constexpr T inf = std::numeric_limits<T>::infinity();
  const int64_t n = all.n;
  const T *const z = all.z + row * n, *const f = all.f + row * n;
  T *const r = all.r + row * n, &best = all.best_residual[row];
  for (int64_t i = 0; i < n; ++i) r[i] = f[i] - z[i];
  const T residual = all.residual[row] = length(r, n);
  const T tolerance = all.tolerance[row] = static_cast<T>(rule.atol) + static_cast<T>(rule.rtol) * length(f, n);
  all.better[row] = false;
  if (!all.active[row]) return;
  const bool finite = residual < inf && tolerance < inf, converged = !rule.fixed && finite && residual <= tolerance;
  // A plain step needs no test.
  const bool grown = !(residual == 0 || residual < static_cast<T>(rule.growth) * all.last_residual[row]);
  const bool accepted = !(all.accelerated[row] && grown);
  all.evaluations[row] += 1;
  if (accepted && (rule.fixed || rule.number == 0 || residual < best || converged)) {
    all.better[row] = true;
    best = residual;
    all.best_tolerance[row] = tolerance;
    all.steps[row] = static_cast<int32_t>(rule.number);
  }
  if (accepted && converged) all.status[row] = CONVERGED;
  if (accepted && !finite) all.status[row] = rule.number == 0 ? NONFINITE : DIVERGED;
  all.active[row] = !(accepted && (converged || !finite));
  if (all.active[row] && all.history) mix(all, row, accepted, rule);
}

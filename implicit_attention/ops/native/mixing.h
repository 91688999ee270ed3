// Anderson's steps of the general loop, row by row: the last changes of r and f(z) are mixed so that they cancel r best.
#pragma once

#include <cmath>
#include <limits>

#include "simd.h"

// Steps that are mixed at most.
constexpr int MOST_MIXED = 8;

// The memory of all rows. The last accepted z and r are (rows, n), changes (rows, history, n), their products (rows,
// history, history); `count` has for each row how many changes may be mixed, and how many were made.
template <typename T>
struct Mixing {
  int64_t history, n;
  T *z, *r, *residual;
  bool *accelerated;
  T *dr, *df, *gram;
  int32_t *count;
};

struct MixingRule {
  double ridge;
  bool mixes, learns;
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

// The weights by an L D L^T factorisation of the products A, newest change first; columns that are dependent to rounding
// get none.
template <typename T>
void least_squares(int m, T ridge, T (&A)[MOST_MIXED][MOST_MIXED], T (&rest)[MOST_MIXED], T (&weights)[MOST_MIXED]) {
  using Limits = std::numeric_limits<T>;
  T sum = 0, least[MOST_MIXED];
  for (int i = 0; i < m; ++i) sum += A[i][i];
  const T shift = ridge * sum / m + Limits::min();
  for (int i = 0; i < m; ++i) {
    least[i] = shift / 2 + 4 * Limits::epsilon() * A[i][i];
    A[i][i] += shift;
  }
  T lower[MOST_MIXED][MOST_MIXED];
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

// The next candidate of one row, from its evaluation where that was accepted, else from the memory.
template <typename T>
void mix_row(int64_t row, const T *z, const T *r, T residual, bool accepted, const MixingRule &rule, const Mixing<T> &all, T *to) {
  const int64_t n = all.n, m = all.history;
  T *const last_z = all.z + row * n, *const last_r = all.r + row * n;
  T *const dr = all.dr + row * m * n, *const df = all.df + row * m * n, *const gram = all.gram + row * m * m;
  int32_t &valid = all.count[2 * row], &made = all.count[2 * row + 1];
  if (!accepted) {
    valid = 0;
  } else {
    if (rule.learns) {
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
    all.residual[row] = residual;
  }
  bool usable = false;
  if (rule.mixes && valid > 0) {
    T A[MOST_MIXED][MOST_MIXED], rest[MOST_MIXED], weights[MOST_MIXED];
    int64_t slots[MOST_MIXED];
    for (int i = 0; i < valid; ++i) slots[i] = (made - 1 - i) % m;
    for (int i = 0; i < valid; ++i) {
      rest[i] = dot(dr + slots[i] * n, last_r, n);
      for (int j = i; j < valid; ++j) A[i][j] = gram[slots[i] * m + slots[j]];
    }
    least_squares(valid, static_cast<T>(rule.ridge), A, rest, weights);
    T sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      T s = last_r[i];
      for (int k = 0; k < valid; ++k) s -= weights[k] * df[slots[k] * n + i];
      to[i] = s;
    }
    Vec<T> sums{};
    int64_t i = 0;
    for (; i + LANES<T> <= n; i += LANES<T>) sums += load(to + i);
    for (int k = 0; k < LANES<T>; ++k) sum += sums[k];
    for (; i < n; ++i) sum += to[i];
    usable = std::fabs(sum) < std::numeric_limits<T>::infinity();
  }
  const T *const direction = usable ? to : last_r;
  for (int64_t i = 0; i < n; ++i) to[i] = last_z[i] + direction[i];
  all.accelerated[row] = usable;
}

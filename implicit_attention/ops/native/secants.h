// Broyden's steps of the general loop, row by row: minus the inverse Jacobian of r is I - sum_i u_i v_i^T.
#pragma once

#include <cmath>
#include <limits>

#include "mixing.h"

// Of all rows: the last accepted z and r (rows, n), the pairs (rows, history, n), which of them hold, and how many were
// made.
template <typename T>
struct Secants {
  int64_t history, n;
  T *z, *r, *residual;
  bool *accelerated;
  T *u, *v;
  bool *valid;
  int32_t *made;
};

// to = x - sum_i left_i <right_i, x>.
template <typename T>
void apply_pairs(const T *left, const T *right, const bool *valid, int64_t history, int64_t n, const T *x, T *to) {
  std::memcpy(to, x, n * sizeof(T));
  for (int64_t k = 0; k < history; ++k)
    if (valid[k]) {
      const T part = dot(right + k * n, x, n);
      for (int64_t i = 0; i < n; ++i) to[i] -= part * left[k * n + i];
    }
}

// The next candidate of one row, from its evaluation where that was accepted, else the plain step from the memory.
template <typename T>
void secant_row(int64_t row, const T *z, const T *r, T residual, bool accepted, bool learns, const Secants<T> &all, T *to) {
  using Limits = std::numeric_limits<T>;
  const int64_t n = all.n, history = all.history;
  T *const last_z = all.z + row * n, *const last_r = all.r + row * n;
  T *const u = all.u + row * history * n, *const v = all.v + row * history * n;
  bool *const valid = all.valid + row * history, usable = false;
  if (!accepted) {
    std::memset(valid, 0, history * sizeof(bool));
  } else {
    bool newest = false;
    if (learns) {
      // The changes take the place of the last point, which is not read again.
      for (int64_t i = 0; i < n; ++i) {
        last_z[i] = z[i] - last_z[i];
        last_r[i] = r[i] - last_r[i];
      }
      // A pair more than the history has is the oldest one, which goes.
      const int64_t slot = all.made[row]++ % history;
      apply_pairs(v, u, valid, history, n, last_z, to);
      const T below = dot(to, last_r, n), size = std::sqrt(dot(to, to, n)) * std::sqrt(dot(last_r, last_r, n));
      newest = std::fabs(below) > Limits::epsilon() * size;
      if (newest) {
        // B dr, by the old pairs, before one of them is overwritten.
        T *const old_v = v + slot * n, *const old_u = u + slot * n;
        T sum_of_oldest = valid[slot] ? dot(old_v, last_r, n) : T(0);
        for (int64_t i = 0; i < n; ++i) {
          const T oldest = valid[slot] ? sum_of_oldest * old_u[i] : T(0);
          old_u[i] = last_z[i] + last_r[i] - oldest;
        }
        for (int64_t k = 0; k < history; ++k)
          if (valid[k] && k != slot) {
            const T part = dot(v + k * n, last_r, n);
            for (int64_t i = 0; i < n; ++i) old_u[i] -= part * u[k * n + i];
          }
        for (int64_t i = 0; i < n; ++i) old_u[i] /= below;
        std::memcpy(old_v, to, n * sizeof(T));
      }
      valid[slot] = newest;
    }
    std::memcpy(last_z, z, n * sizeof(T));
    std::memcpy(last_r, r, n * sizeof(T));
    all.residual[row] = residual;
    if (newest) {
      apply_pairs(u, v, valid, history, n, r, to);
      T sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += to[i];
      usable = std::fabs(sum) < Limits::infinity();
    }
  }
  const T *const direction = usable ? to : last_r;
  for (int64_t i = 0; i < n; ++i) to[i] = last_z[i] + direction[i];
  all.accelerated[row] = usable;
}

// Anderson's steps with one change, on an energy that plain steps lower, row by row: as `Safeguarded` has them.
#pragma once

#include <cmath>
#include <limits>

#include "krylov.h"
#include "mixing.h"
#include "rule.h"

// The last accepted point of every row, (rows, n) and (rows), and the step that was tried from it.
template <typename T>
struct Descent {
  int64_t n;
  T *z, *r, *direction, *residual, *energy;
  bool *accelerated;
};

// learns: whether there is a step before to learn from; mixes: whether steps may be accelerated; last: whether the
// budget ends after the next one; stretches: whether steps are long where E curves downwards.
struct DescentRule {
  double ridge;
  bool learns, mixes, last, stretches;
};

// Whether E falls by a part of |r|^2, or of what the step promised; by the trapezoid rule where E cannot resolve that.
template <typename T>
bool descends(int64_t row, const T *r, T residual, T energy, const Descent<T> &all) {
  if (!all.accelerated[row]) return true;
  const T *const direction = all.direction + row * all.n;
  const T required = static_cast<T>(DESCENT) * all.residual[row] * all.residual[row], before = all.energy[row];
  const T larger = std::fabs(energy) > std::fabs(before) ? std::fabs(energy) : std::fabs(before);
  const T rounding = std::numeric_limits<T>::epsilon() * larger;
  const bool resolved = required > static_cast<T>(ENERGY_SLACK) * rounding;
  const bool good = resolved ? before - energy >= required - rounding
                             : (dot(all.r + row * all.n, direction, all.n) + dot(r, direction, all.n)) / 2 >= required;
  return good && residual < std::numeric_limits<T>::infinity();
}

// The next candidate of one row, from its evaluation where that was accepted, else the plain step from the memory.
template <typename T>
void descend_row(int64_t row, const T *z, const T *r, T residual, T energy, bool accepted, const DescentRule &rule,
                 const Descent<T> &all, T *to) {
  using Limits = std::numeric_limits<T>;
  const int64_t n = all.n;
  T *const last_z = all.z + row * n, *const last_r = all.r + row * n, *const direction = all.direction + row * n;
  bool usable = false;
  if (accepted) {
    bool downward = false;
    if (rule.learns) {
      // `direction` holds the change of r, `to` that of z and then of f.
      bool moved = false;
      for (int64_t i = 0; i < n; ++i) {
        to[i] = z[i] - last_z[i];
        moved |= to[i] != 0;
        direction[i] = r[i] - last_r[i];
      }
      const T curvature = dot(to, direction, n), square = dot(direction, direction, n), along = dot(direction, r, n);
      downward = moved && curvature >= 0 && all.residual[row] >= std::sqrt(Limits::min() / Limits::epsilon());
      if (rule.mixes) {
        const T weight = along / (square + (static_cast<T>(rule.ridge) * square + Limits::min()));
        for (int64_t i = 0; i < n; ++i) direction[i] = r[i] - weight * (to[i] + direction[i]);
        const T size = length_of_row(direction, n), most = static_cast<T>(LONGEST) * residual;
        usable = size < Limits::infinity();
        if (size > most)
          for (int64_t i = 0; i < n; ++i) direction[i] *= most / size;
        usable = usable && dot(r, direction, n) >= static_cast<T>(SLOPE) * residual * residual;
      }
    }
    std::memcpy(last_z, z, n * sizeof(T));
    std::memcpy(last_r, r, n * sizeof(T));
    all.residual[row] = residual;
    all.energy[row] = energy;
    if (rule.last) {
      usable = false;
    } else if (downward && rule.stretches) {
      usable = true;
      for (int64_t i = 0; i < n; ++i) direction[i] = static_cast<T>(STRETCH) * r[i];
    }
  }
  if (!usable) std::memcpy(direction, last_r, n * sizeof(T));
  for (int64_t i = 0; i < n; ++i) to[i] = last_z[i] + direction[i];
  all.accelerated[row] = usable;
}

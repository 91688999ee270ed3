// Steps of restarted GMRES, row by row: Arnoldi's basis, and the least-squares problem by one rotation a step.
#pragma once

#include <cmath>
#include <limits>

#include "loop.h"
#include "mixing.h"
#include "rule.h"

// glibc 2.35 has another version of these two, of the same numbers, which leaves errno alone. The version that every glibc
// has lets a library that was linked there load on older systems.
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver hypot, hypot@GLIBC_2.2.5\n.symver hypotf, hypotf@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver hypot, hypot@GLIBC_2.17\n.symver hypotf, hypotf@GLIBC_2.17");
#endif

// A relative quantity below this times the precision is rounding noise, and where a remainder is smaller than its vector
// by more than this its parts along the basis are removed a second time: as in linear/_vectors.py.
constexpr double ROUNDOFF = 10.0, LOST = 0.1;

// Of all rows: vectors of the basis, (steps + 1, rows, n); columns of the triangle, rotations and targets, each with
// `capacity` entries a row.
template <typename T>
struct Krylov {
  int64_t rows, n, capacity, most;
  T *basis, *triangle, *cosine, *sine, *target, *pending, *stiffness;
  T *residual;
  const T *tolerance;
  int8_t *verdict;
  int64_t *steps;
  const bool *live;
  bool *active;
};

// Whether a row goes on.
template <typename T>
bool goes_on(const Krylov<T> &all, int64_t row) {
  return all.live[row] && all.residual[row] > all.tolerance[row] && all.verdict[row] < 0 && all.steps[row] < all.most;
}

template <typename T>
void divide_row(const T *from, T by, T *to, int64_t n) {
  int64_t i = 0;
  for (; i + LANES<T> <= n; i += LANES<T>) store(to + i, load(from + i) / all(by));
  for (; i < n; ++i) to[i] = from[i] / by;
}

template <typename T>
T length_of_row(const T *x, int64_t n) {
  Vec<T> sums[4] = {};
  int64_t i = 0;
  for (; i + LANES<T> <= n; i += LANES<T>) {
    const Vec<T> v = load(x + i);
    sums[0] = fma(v, v, sums[0]);
  }
  T rest = 0;
  for (; i < n; ++i) rest += x[i] * x[i];
  return length_of<T>(sums, x, n, rest);
}

// The first vector of the basis of a row, from its residual.
template <typename T>
void begin_row(const Krylov<T> &all, int64_t row, const T *residual) {
  const T size = length_of_row(residual, all.n);
  divide_row(residual, size == 0 ? T(1) : size, all.basis + row * all.n, all.n);
  all.residual[row] = all.pending[row] = size;
  all.stiffness[row] = 0;
  all.verdict[row] = -1;
  all.active[row] = goes_on(all, row);
}

// One step of a row, of whose basis w is the last vector's product. A row that rests gets a unit column.
template <typename T>
void step_row(const Krylov<T> &all, int64_t row, int64_t step, T *w) {
  const int64_t n = all.n, stride = all.rows * n;
  T *const column = all.triangle + (row * all.capacity + step) * all.capacity, *const vectors = all.basis + row * n;
  T *const cosine = all.cosine + row * all.capacity, *const sine = all.sine + row * all.capacity;
  T *const next = vectors + (step + 1) * stride;
  T &pending = all.pending[row], &target = all.target[row * all.capacity + step];
  bool used = all.active[row];
  T height = 0, pivot = 0, diagonal = 0;
  if (used) {
    const T size = length_of_row(w, n);
    all.stiffness[row] = size > all.stiffness[row] || std::isnan(size) ? size : all.stiffness[row];
    const T tiny = static_cast<T>(ROUNDOFF) * std::numeric_limits<T>::epsilon() * all.stiffness[row];
    for (int64_t j = 0; j <= step; ++j) column[j] = 0;
    height = size;
    for (int pass = 0; pass < 2 && (pass == 0 || height < static_cast<T>(LOST) * size); ++pass) {
      for (int64_t j = 0; j <= step; ++j) {
        const T *const vector = vectors + j * stride;
        const T part = dot(vector, w, n);
        column[j] += part;
        int64_t i = 0;
        for (; i + LANES<T> <= n; i += LANES<T>) store(w + i, fma(::all(-part), load(vector + i), load(w + i)));
        for (; i < n; ++i) w[i] -= part * vector[i];
      }
      height = length_of_row(w, n);
    }
    const bool invariant = height <= tiny;
    if (invariant) height = 0;
    for (int64_t j = 0; j < step; ++j) {
      const T above = column[j], below = column[j + 1];
      column[j] = cosine[j] * above + sine[j] * below;
      column[j + 1] = cosine[j] * below - sine[j] * above;
    }
    diagonal = column[step];
    pivot = std::hypot(diagonal, height);
    if (pivot <= tiny) {
      all.verdict[row] = STALLED;
      used = false;
    }
  }
  if (!used) {
    for (int64_t j = 0; j < step; ++j) column[j] = 0;
    column[step] = cosine[step] = 1;
    target = sine[step] = 0;
  } else {
    column[step] = pivot;
    cosine[step] = diagonal / pivot;
    sine[step] = height / pivot;
    target = cosine[step] * pending;
    pending = -sine[step] * pending;
  }
  if (used && height > 0)
    divide_row(w, height, next, n);
  else if (used && height != 0)
    for (int64_t i = 0; i < n; ++i) next[i] = height;
  else
    std::memset(next, 0, n * sizeof(T));
  all.residual[row] = std::fabs(pending);
  all.steps[row] += all.active[row];
  all.active[row] = goes_on(all, row);
}

// The sum of the basis whose weights solve R y = target.
template <typename T>
void answer_row(const Krylov<T> &all, int64_t row, int64_t steps, T *to) {
  T *const target = all.target + row * all.capacity;
  std::memset(to, 0, all.n * sizeof(T));
  for (int64_t k = steps - 1; k >= 0; --k) {
    const T *const column = all.triangle + (row * all.capacity + k) * all.capacity;
    const T weight = target[k] / column[k];
    for (int64_t j = 0; j < k; ++j) target[j] -= weight * column[j];
    const T *const vector = all.basis + (k * all.rows + row) * all.n;
    // A row that rests adds nothing, whatever its vectors hold.
    if (weight == 0) continue;
    int64_t i = 0;
    for (; i + LANES<T> <= all.n; i += LANES<T>) store(to + i, fma(::all(weight), load(vector + i), load(to + i)));
    for (; i < all.n; ++i) to[i] += weight * vector[i];
  }
}

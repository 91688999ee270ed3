// Products of matrices whose columns lie across the lanes of vectors. Every sum is made in the same order by all of
// them: one term after the other, from zero.
#pragma once

#include "simd.h"

// C (R, V vectors) = A (R, n) B (n, V vectors), or C += that. A's entries lie `row` and `step` numbers apart.
template <typename T, int R, int V, bool Add>
static void product_rows(const T *a, ptrdiff_t row, ptrdiff_t step, const T *b, ptrdiff_t next, ptrdiff_t n, T *c,
                         ptrdiff_t c_row) {
  constexpr int L = LANES<T>;
  Vec<T> sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = all(T(0));
  for (ptrdiff_t k = 0; k < n; ++k) {
    Vec<T> right[V];
    for (int v = 0; v < V; ++v) right[v] = load(b + k * next + v * L);
    for (int r = 0; r < R; ++r) {
      const Vec<T> left = all(a[r * row + k * step]);
      for (int v = 0; v < V; ++v) sums[r][v] = fma(left, right[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      T *to = c + r * c_row + v * L;
      store(to, Add ? load(to) + sums[r][v] : sums[r][v]);
    }
}

// The same for any number of rows.
template <typename T, int V, bool Add>
static void product(ptrdiff_t rows, const T *a, ptrdiff_t row, ptrdiff_t step, const T *b, ptrdiff_t next, ptrdiff_t n,
                    T *c, ptrdiff_t c_row) {
  for (; rows >= IA_ROWS; rows -= IA_ROWS, a += IA_ROWS * row, c += IA_ROWS * c_row)
    product_rows<T, IA_ROWS, V, Add>(a, row, step, b, next, n, c, c_row);
  switch (rows) {
#define IA_CASE(R)                                                          \
  case R:                                                                   \
    if (R < IA_ROWS) product_rows<T, (R < IA_ROWS ? R : 1), V, Add>(a, row, step, b, next, n, c, c_row); \
    break;
    IA_CASE(1)
    IA_CASE(2)
    IA_CASE(3)
    IA_CASE(4)
    IA_CASE(5)
    IA_CASE(6)
    IA_CASE(7)
#undef IA_CASE
    default:
      break;
  }
}

// C (rows, whole columns) = A (rows, n) B, or C += that, for few rows: with one or two of them four vectors at once are
// needed for as many sums as a processor can work on side by side.
template <typename T, bool Add>
static void product_of_few(int rows, const T *a, ptrdiff_t row, const T *b, ptrdiff_t next, ptrdiff_t n, T *c,
                           ptrdiff_t c_row, ptrdiff_t whole) {
  constexpr int L = LANES<T>;
  ptrdiff_t j = 0;
  for (; rows <= 2 && j + 4 * L <= whole; j += 4 * L) {
    if (rows == 1)
      product_rows<T, 1, 4, Add>(a, row, 1, b + j, next, n, c + j, c_row);
    else
      product_rows<T, 2, 4, Add>(a, row, 1, b + j, next, n, c + j, c_row);
  }
  for (; j + 2 * L <= whole; j += 2 * L) product<T, 2, Add>(rows, a, row, 1, b + j, next, n, c + j, c_row);
  if (j < whole) product<T, 1, Add>(rows, a, row, 1, b + j, next, n, c + j, c_row);
}

// One step of a transposition: lanes of a and b whose numbers differ in the bit S are exchanged.
template <typename T, int S>
IA_INLINE void exchange(Vec<T> &a, Vec<T> &b) {
  Mask<T> first, second;
  for (int i = 0; i < LANES<T>; ++i) {
    first[i] = i & S ? LANES<T> + i - S : i;
    second[i] = i & S ? LANES<T> + i : i + S;
  }
#if defined(__clang__)
  Vec<T> x, y;
  for (int i = 0; i < LANES<T>; ++i) {
    x[i] = i & S ? b[i - S] : a[i];
    y[i] = i & S ? b[i] : a[i + S];
  }
#else
  const Vec<T> x = __builtin_shuffle(a, b, first), y = __builtin_shuffle(a, b, second);
#endif
  a = x;
  b = y;
}

template <typename T, int S>
IA_INLINE void exchange_all(Vec<T> (&rows)[LANES<T>]) {
  if constexpr (S > 0) {
    for (int i = 0; i < LANES<T>; ++i)
      if (!(i & S)) exchange<T, S>(rows[i], rows[i + S]);
    exchange_all<T, S / 2>(rows);
  }
}

// `to` (columns, LANES) = the transpose of `from` (LANES, columns), columns a multiple of LANES.
template <typename T>
static void transpose(const T *from, ptrdiff_t row, ptrdiff_t columns, T *to, ptrdiff_t to_row) {
  constexpr int L = LANES<T>;
  for (ptrdiff_t c = 0; c < columns; c += L) {
    Vec<T> block[L];
    for (int i = 0; i < L; ++i) block[i] = load(from + i * row + c);
    exchange_all<T, L / 2>(block);
    for (int i = 0; i < L; ++i) store(to + (c + i) * to_row, block[i]);
  }
}

// Rows of memory into the lanes of vectors: to (dim, LANES) = the numbers that rows[i] points to, `step` apart.
template <typename T>
static void gather_lanes(const T *const *rows, ptrdiff_t step, int64_t dim, T *to, ptrdiff_t to_row) {
  constexpr int L = LANES<T>;
  for (int64_t c = 0; c < dim; c += L) {
    const int64_t size = dim - c < L ? dim - c : L;
    Vec<T> block[L];
    for (int i = 0; i < L; ++i) {
      if (step == 1 && size == L) {
        block[i] = load(rows[i] + c);
      } else {
        block[i] = all(T(0));
        for (int64_t d = 0; d < size; ++d) block[i][d] = rows[i][(c + d) * step];
      }
    }
    exchange_all<T, L / 2>(block);
    for (int64_t d = 0; d < size; ++d) store(to + (c + d) * to_row, block[d]);
  }
}

// The way back, to rows whose numbers lie side by side; a null row is left out.
template <typename T>
static void scatter_lanes(const T *from, ptrdiff_t from_row, int64_t dim, T *const *rows) {
  constexpr int L = LANES<T>;
  for (int64_t c = 0; c < dim; c += L) {
    const int64_t size = dim - c < L ? dim - c : L;
    Vec<T> block[L];
    for (int d = 0; d < L; ++d) block[d] = d < size ? load(from + (c + d) * from_row) : all(T(0));
    exchange_all<T, L / 2>(block);
    for (int i = 0; i < L; ++i) {
      if (!rows[i]) continue;
      if (size == L)
        store(rows[i] + c, block[i]);
      else
        for (int64_t d = 0; d < size; ++d) rows[i][c + d] = block[i][d];
    }
  }
}

// Where the numbers of a problem lie, and the queries that share keys.
#pragma once

#include "simd.h"

constexpr int AXES = 16;

// A tensor (*batch, A, B): one step for each axis of the batch, then two for its own axes, in numbers.
struct Operand {
  const void *data;
  ptrdiff_t step[AXES + 2];
};

// The axes of the batch: first `kept`, along which keys differ, then `folded`, along which queries share them. A row is
// a query among those that share keys, numbered through the folded axes and the queries of each.
struct Axes {
  int kept, folded;
  int64_t size[AXES];
  int64_t sets, shares;

  ptrdiff_t offset(const ptrdiff_t *step, int64_t set, int64_t share) const {
    ptrdiff_t sum = 0;
    for (int i = kept + folded - 1; i >= kept; --i) {
      sum += share % size[i] * step[i];
      share /= size[i];
    }
    for (int i = kept - 1; i >= 0; --i) {
      sum += set % size[i] * step[i];
      set /= size[i];
    }
    return sum;
  }
};

enum MaskKind { NO_MASK, BOOLEAN, ADDED };

struct Problem {
  Axes axes;
  int64_t queries, count, dim;
  MaskKind mask_kind;
  bool causal;
  int64_t first;
  Operand field, keys, beta, anchor, mask;
  // Where outputs lie, which are contiguous: steps of their axes, in queries.
  ptrdiff_t out[AXES];

  int64_t rows() const { return axes.shares * queries; }
  int own() const { return axes.kept + axes.folded; }
};

// Reads what Python packed: numbers in the order of these calls.
struct Reader {
  const int64_t *at;
  int64_t next() { return *at++; }
  Operand operand(const void *data, int axes) {
    Operand found;
    found.data = data;
    for (int i = 0; i < axes; ++i) found.step[i] = next();
    return found;
  }
};

// Keys of one set, their dimension contiguous.
template <typename T>
struct Keys {
  const T *data;
  ptrdiff_t row;
  int64_t count, dim;
};

// Which pairs a lane reads: its row of the mask, and the last key that it may attend to.
struct Pairs {
  const char *mask;
  int64_t last;
};

template <typename T>
static T number(const Problem &p, const Operand &operand, int64_t set, int64_t share) {
  return static_cast<const T *>(operand.data)[p.axes.offset(operand.step, set, share)];
}

template <typename T>
static Pairs pairs_of(const Problem &p, int64_t set, int64_t share, int64_t query) {
  Pairs found = {nullptr, p.causal ? p.first + query : p.count};
  if (p.mask_kind != NO_MASK) {
    const ptrdiff_t at = p.axes.offset(p.mask.step, set, share) + query * p.mask.step[p.own()];
    found.mask = static_cast<const char *>(p.mask.data) + at * ptrdiff_t(p.mask_kind == BOOLEAN ? 1 : sizeof(T));
  }
  return found;
}

// What is added to the scores of some lanes with the keys from `start` on; `lane` and `key` are the steps of `to`.
template <typename T>
static void lay_pairs(const Problem &p, const Pairs *pairs, int lanes, int64_t start, int64_t keys, T *to,
                      ptrdiff_t lane, ptrdiff_t key) {
  const T hidden = -__builtin_inf();
  const ptrdiff_t step = p.mask.step[p.own() + 1];
  for (int q = 0; q < lanes; ++q) {
    T *at = to + q * lane;
    if (p.mask_kind == BOOLEAN) {
      const char *from = pairs[q].mask + start * step;
      for (int64_t j = 0; j < keys; ++j) at[j * key] = from[j * step] ? T(0) : hidden;
    } else if (p.mask_kind == ADDED) {
      const T *from = reinterpret_cast<const T *>(pairs[q].mask) + start * step;
      for (int64_t j = 0; j < keys; ++j) at[j * key] = from[j * step];
    } else {
      for (int64_t j = 0; j < keys; ++j) at[j * key] = 0;
    }
    for (int64_t j = pairs[q].last < start ? 0 : pairs[q].last - start + 1; j < keys; ++j) at[j * key] = hidden;
  }
}

// Whether a query of the set attends to each key.
template <typename T>
static void mark_attended(const Problem &p, int64_t set, bool *attended) {
  if (p.mask_kind == NO_MASK) {
    for (int64_t j = 0; j < p.count; ++j) attended[j] = !p.causal || j < p.first + p.queries;
    return;
  }
  for (int64_t j = 0; j < p.count; ++j) attended[j] = false;
  const ptrdiff_t step = p.mask.step[p.own() + 1];
  const T *last = nullptr;
  const bool one_row = !p.causal && p.mask.step[p.own()] == 0;
  for (int64_t share = 0; share < p.axes.shares; ++share)
    for (int64_t query = 0; query < (one_row ? 1 : p.queries); ++query) {
      const Pairs pairs = pairs_of<T>(p, set, share, query);
      // Shares of one row look once.
      if (one_row && reinterpret_cast<const T *>(pairs.mask) == last) continue;
      last = reinterpret_cast<const T *>(pairs.mask);
      const int64_t end = pairs.last + 1 < p.count ? pairs.last + 1 : p.count;
      for (int64_t j = 0; j < end; ++j)
        attended[j] |= p.mask_kind == BOOLEAN ? pairs.mask[j * step] != 0 : last[j * step] != T(-__builtin_inf());
    }
}

// Softmax attention of some queries over keys, with the log-sum-exp: a tile of queries across the lanes of vectors, or
// few queries with keys across the lanes. Both make the same sums in the same order, so that an answer does not depend
// on which of them made it.
#pragma once

#include "elementary.h"
#include "layout.h"
#include "products.h"

// Keys that are read at once; the running maximum is brought up to date after so many.
constexpr int BLOCK = 128;
template <typename T>
constexpr int WIDTH = 2 * LANES<T>;
// Up to so many queries are cheaper one by one than as a vector: that costs two operations for each number of the keys,
// rows one for turning the keys and two for as many queries as a vector has lanes.
template <typename T>
constexpr int FEW_LANES = LANES<T> * 27 / 32;
// Smaller weights count as zero: they are invisible beside the largest, and subnormal numbers are slow.
template <typename T>
constexpr T LEAST = sizeof(T) == 4 ? T(-64) : T(-300);

constexpr int64_t padded(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

// Memory that is cut off a piece allocated before.
struct Arena {
  char *at;
  template <typename T>
  T *take(int64_t count) {
    T *found = reinterpret_cast<T *>(at);
    at += padded(count * sizeof(T), 64);
    return found;
  }
};

// What an evaluation needs beside states and answers.
template <typename T>
struct Work {
  T *scores, *bias, *partial, *rows, *sums;
  // A block of keys, with zeros up to whole vectors, and turned; or all keys turned, where few queries read them.
  T *keys, *turned;
  bool all_turned;

  static int64_t bytes(int64_t dim, int64_t count, bool all_turned) {
    const int64_t wide = padded(dim, LANES<T>), w = WIDTH<T>;
    return sizeof(T) * (2 * BLOCK * w + LANES<T> * w + (BLOCK + turned_keys(count, all_turned)) * wide + 2 * w * wide) +
           7 * 64;
  }

  static int64_t turned_keys(int64_t count, bool all_turned) { return all_turned ? padded(count, BLOCK) : BLOCK; }

  static Work of(Arena &arena, int64_t dim, int64_t count, bool all_turned) {
    const int64_t wide = padded(dim, LANES<T>), w = WIDTH<T>;
    Work work;
    work.all_turned = all_turned;
    work.scores = arena.take<T>(BLOCK * w);
    work.bias = arena.take<T>(BLOCK * w);
    work.partial = arena.take<T>(LANES<T> * w);
    work.rows = arena.take<T>(w * wide);
    work.sums = arena.take<T>(w * wide);
    work.keys = arena.take<T>(BLOCK * wide);
    work.turned = arena.take<T>(turned_keys(count, all_turned) * wide);
    return work;
  }

  // The block of keys from `start` on, row by row in whole vectors, and the step of its rows.
  const T *whole_rows(const Keys<T> &from, int64_t start, int64_t size, bool complete, ptrdiff_t &row) const {
    const int64_t wide = padded(from.dim, LANES<T>), whole = padded(size, LANES<T>);
    const T *const block = from.data + start * from.row;
    row = from.row;
    if (from.dim == wide && !(complete && size < whole)) return block;
    // What is beyond the keys is zero, and not in the memory of others.
    for (int64_t j = 0; j < whole; ++j)
      for (int64_t d = 0; d < wide; ++d)
        keys[j * wide + d] = j < size && d < from.dim ? block[j * from.row + d] : T(0);
    row = wide;
    return keys;
  }

  void turn(const Keys<T> &from, int64_t start, int64_t size, T *to) const {
    ptrdiff_t row;
    const T *const block = whole_rows(from, start, size, true, row);
    for (int64_t j = 0; j < size; j += LANES<T>)
      transpose(block + j * row, row, padded(from.dim, LANES<T>), to + j, BLOCK);
  }

  void turn_all(const Keys<T> &from) const {
    for (int64_t start = 0; all_turned && start < from.count; start += BLOCK)
      turn(from, start, from.count - start < BLOCK ? from.count - start : BLOCK, turned + start * padded(from.dim, LANES<T>));
  }
};

// beta s + bias; a pair that is hidden stays so, whatever its score.
template <typename T>
IA_INLINE Vec<T> scaled(Vec<T> score, Vec<T> beta) {
  return score * beta;
}
template <typename T>
IA_INLINE Vec<T> biased(Vec<T> score, Vec<T> bias) {
  return bias == T(-__builtin_inf()) ? bias : score + bias;
}

// The maximum that is subtracted: 0 where no key was attended to yet.
template <typename T>
IA_INLINE Vec<T> finite_top(Vec<T> top) {
  return top == T(-__builtin_inf()) ? all(T(0)) : top;
}

static int64_t last_of(const Pairs *pairs, int lanes, int64_t count) {
  int64_t last = -1;
  for (int q = 0; q < lanes; ++q) last = pairs[q].last > last ? pairs[q].last : last;
  return last + 1 < count ? last + 1 : count;
}

static int64_t first_of(const Pairs *pairs, int lanes) {
  int64_t first = pairs[0].last;
  for (int q = 1; q < lanes; ++q) first = pairs[q].last < first ? pairs[q].last : first;
  return first;
}

// For V vectors of queries z (D, lanes): sum (D, lanes) = sum_j exp(s_j - top) k_j, total (lanes) = sum_j exp(s_j - top),
// top (lanes). Rows of z and of sum lie WIDTH apart.
template <typename T, int V>
static void evaluate_tile(const Problem &p, const Keys<T> &keys, const Work<T> &work, const T *z, const T *beta,
                          const Pairs *pairs, T *sum, T *total, T *top) {
  constexpr int L = LANES<T>, W = WIDTH<T>;
  T *const scores = work.scores, *const partial = work.partial;
  Vec<T> most[V], scale[V];
  for (int v = 0; v < V; ++v) {
    most[v] = all(T(-__builtin_inf()));
    scale[v] = load(beta + v * L);
    for (int i = 0; i < L; ++i) store(partial + i * W + v * L, all(T(0)));
    for (int64_t d = 0; d < keys.dim; ++d) store(sum + d * W + v * L, all(T(0)));
  }
  const int64_t end = last_of(pairs, V * L, keys.count), bare = p.mask_kind == NO_MASK ? first_of(pairs, V * L) : -1;
  for (int64_t start = 0; start < end; start += BLOCK) {
    const int64_t size = end - start < BLOCK ? end - start : BLOCK;
    const T *block = keys.data + start * keys.row;
    product<T, V, false>(size, block, keys.row, 1, z, W, keys.dim, scores, W);
    const bool hides = start + size - 1 > bare;
    if (hides) lay_pairs(p, pairs, V * L, start, size, work.bias, 1, W);
    Vec<T> before[V];
    for (int v = 0; v < V; ++v) {
      before[v] = most[v];
      for (int64_t j = 0; j < size; ++j) {
        T *at = scores + j * W + v * L;
        Vec<T> score = scaled<T>(load(at), scale[v]);
        if (hides) score = biased<T>(score, load(work.bias + j * W + v * L));
        most[v] = larger(most[v], score);
        store(at, score);
      }
    }
    for (int v = 0; v < V; ++v) {
      const Vec<T> shift = finite_top<T>(most[v]);
      if (any<T>(before[v] != most[v])) {
        const Vec<T> factor = exponential<T>(before[v] - shift, LEAST<T>);
        for (int i = 0; i < L; ++i) {
          T *at = partial + i * W + v * L;
          store(at, load(at) * factor);
        }
        for (int64_t d = 0; d < keys.dim; ++d) {
          T *at = sum + d * W + v * L;
          store(at, load(at) * factor);
        }
      }
      // A block is summed by itself: a weight beside the sum of very many of them would lose its last digits.
      for (int64_t i = 0; i < L; ++i) {
        Vec<T> sum_of_block = all(T(0));
        for (int64_t j = i; j < size; j += L) {
          T *at = scores + j * W + v * L;
          const Vec<T> weight = exponential<T>(load(at) - shift, LEAST<T>);
          store(at, weight);
          sum_of_block = sum_of_block + weight;
        }
        T *part = partial + i * W + v * L;
        store(part, load(part) + sum_of_block);
      }
    }
    product<T, V, true>(keys.dim, block, 1, keys.row, scores, W, size, sum, W);
  }
  for (int v = 0; v < V; ++v) {
    Vec<T> whole = all(T(0));
    for (int i = 0; i < L; ++i) whole = whole + load(partial + i * W + v * L);
    store(total + v * L, whole);
    store(top + v * L, most[v]);
  }
}

// The same for `lanes` queries, with keys, and then dimensions, across the lanes.
template <typename T>
static void evaluate_rows(const Problem &p, const Keys<T> &keys, const Work<T> &work, int lanes, const T *z,
                          const T *beta, const Pairs *pairs, T *sum, T *total, T *top) {
  constexpr int L = LANES<T>, W = WIDTH<T>;
  const int64_t wide = padded(keys.dim, L);
  T most[W];
  Vec<T> partial[W];
  for (int q = 0; q < lanes; ++q) {
    most[q] = -__builtin_inf();
    partial[q] = all(T(0));
    T *row = work.rows + q * wide;
    for (int64_t d = 0; d < keys.dim; ++d) row[d] = z[d * W + q];
    for (int64_t d = keys.dim; d < wide; ++d) row[d] = 0;
    for (int64_t d = 0; d < wide; d += L) store(work.sums + q * wide + d, all(T(0)));
  }
  const int64_t end = last_of(pairs, lanes, keys.count), bare = p.mask_kind == NO_MASK ? first_of(pairs, lanes) : -1;
  for (int64_t start = 0; start < end; start += BLOCK) {
    const int64_t size = end - start < BLOCK ? end - start : BLOCK, whole = padded(size, L);
    if (!work.all_turned) work.turn(keys, start, size, work.turned);
    const T *const turned = work.turned + (work.all_turned ? start * wide : 0);
    ptrdiff_t row;
    const T *const block = work.whole_rows(keys, start, size, false, row);
    product_of_few<T, false>(lanes, work.rows, wide, turned, BLOCK, keys.dim, work.scores, BLOCK, whole);
    const bool hides = start + size - 1 > bare;
    if (hides) lay_pairs(p, pairs, lanes, start, size, work.bias, BLOCK, 1);
    for (int q = 0; q < lanes; ++q) {
      T *scores = work.scores + q * BLOCK;
      const T *bias = work.bias + q * BLOCK;
      const Vec<T> scale = all(beta[q]);
      for (int64_t j = size; j < whole; ++j) scores[j] = -__builtin_inf();
      Vec<T> highest = all(most[q]);
      for (int64_t j = 0; j < whole; j += L) {
        Vec<T> score = load(scores + j);
        score = scaled<T>(score, scale);
        if (hides && j + L <= size) score = biased<T>(score, load(bias + j));
        else if (hides)
          for (int64_t i = j; i < size; ++i) score[i - j] = bias[i] == T(-__builtin_inf()) ? bias[i] : score[i - j] + bias[i];
        highest = larger(highest, score);
        store(scores + j, score);
      }
      T best = most[q];
      for (int i = 0; i < L; ++i) best = best > highest[i] ? best : highest[i];
      const Vec<T> shift = finite_top<T>(all(best));
      if (best != most[q]) {
        const Vec<T> factor = exponential<T>(all(most[q]) - shift, LEAST<T>);
        partial[q] = partial[q] * factor;
        for (int64_t d = 0; d < wide; d += L) {
          T *at = work.sums + q * wide + d;
          store(at, load(at) * factor);
        }
        most[q] = best;
      }
      Vec<T> sum_of_block = all(T(0));
      for (int64_t j = 0; j < whole; j += L) {
        const Vec<T> weight = exponential<T>(load(scores + j) - shift, LEAST<T>);
        store(scores + j, weight);
        sum_of_block = sum_of_block + weight;
      }
      partial[q] = partial[q] + sum_of_block;
    }
    product_of_few<T, true>(lanes, work.scores, BLOCK, block, row, size, work.sums, wide, wide);
  }
  for (int q = 0; q < lanes; ++q) {
    T whole = 0;
    for (int i = 0; i < L; ++i) whole += partial[q][i];
    total[q] = whole;
    top[q] = most[q];
    for (int64_t d = 0; d < keys.dim; ++d) sum[d * W + q] = work.sums[q * wide + d];
  }
}

// The same for the first `lanes` of a tile, in the cheapest way.
template <typename T>
static void evaluate(const Problem &p, const Keys<T> &keys, const Work<T> &work, int lanes, const T *z, const T *beta,
                     const Pairs *pairs, T *sum, T *total, T *top) {
  constexpr int L = LANES<T>, FEW = FEW_LANES<T>;
  if (lanes > L + FEW) return evaluate_tile<T, 2>(p, keys, work, z, beta, pairs, sum, total, top);
  if (lanes > FEW) {
    evaluate_tile<T, 1>(p, keys, work, z, beta, pairs, sum, total, top);
    if (lanes <= L) return;
    return evaluate_rows(p, keys, work, lanes - L, z + L, beta + L, pairs + L, sum + L, total + L, top + L);
  }
  evaluate_rows(p, keys, work, lanes, z, beta, pairs, sum, total, top);
}

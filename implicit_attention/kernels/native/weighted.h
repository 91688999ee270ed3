// The attention weights of a tile of queries over the keys of a set, and products with them: formed once, they serve all
// steps of an adjoint solve.
#pragma once

#include "evaluate.h"

// Smaller attention weights count as zero: products of subnormal numbers are slow.
template <typename T>
constexpr T LEAST_WEIGHT = sizeof(T) == 4 ? T(-40) : T(-300);

template <typename T>
struct WeightedKeys {
  static constexpr int L = LANES<T>, W = WIDTH<T>, FEW = FEW_LANES<T>;
  const Problem &p;
  const int64_t wide;
  Work<T> work;
  // The keys without what they have in common, and that, with zeros up to whole vectors; blocks of them turned.
  T *own_keys, *common, *turned;
  Keys<T> keys;
  // (M, lanes): weights of the keys, and at the end weights times centred scores; of the first `read` keys, beyond which
  // no lane attends to any.
  T *weights, *centred;
  int64_t read = 0;

  static int64_t bytes(const Problem &p) {
    const int64_t wide = padded(p.dim, L), count = padded(p.count, L);
    return Work<T>::bytes(p.dim, 0, false) +
           sizeof(T) * ((count + padded(count, BLOCK) + 1) * wide + 2 * p.count * W) + 6 * 64;
  }

  WeightedKeys(const Problem &p, Arena &arena) : p(p), wide(padded(p.dim, L)) {
    work = Work<T>::of(arena, p.dim, 0, false);
    own_keys = arena.take<T>(padded(p.count, L) * wide);
    common = arena.take<T>(wide);
    turned = arena.take<T>(padded(p.count, BLOCK) * wide);
    weights = arena.take<T>(p.count * W);
    centred = arena.take<T>(p.count * W);
  }

  // Weights and covariances do not change when all keys are shifted, but their rounding, which grows with the square of
  // the shift, does. A key that is far off is no guide and counts by the inverse square of its length; one that nobody
  // attends to changes no bit, whatever it holds.
  void take_keys(int64_t set) {
    const T *from = static_cast<const T *>(p.keys.data) + p.axes.offset(p.keys.step, set, 0);
    const ptrdiff_t row = p.keys.step[p.own()];
    const int64_t count = padded(p.count, L);
    keys = {own_keys, static_cast<ptrdiff_t>(wide), p.count, p.dim};
    bool *attended = reinterpret_cast<bool *>(weights);
    mark_attended<T>(p, set, attended);
    T *const lengths = centred, least = __builtin_inf();
    for (int64_t j = 0; j < count; ++j) {
      T *const to = own_keys + j * wide;
      if (j < p.count) std::memcpy(to, from + j * row, p.dim * sizeof(T));
      for (int64_t d = j < p.count ? p.dim : 0; d < wide; ++d) to[d] = 0;
    }
    for (int64_t start = 0; start < count; start += L) {
      Vec<T> block[L], sum = all(T(0));
      for (int i = 0; i < L; ++i) {
        block[i] = all(T(0));
        for (int64_t d = 0; d < wide; d += L) {
          const Vec<T> part = load(own_keys + (start + i) * wide + d);
          block[i] = fma(part, part, block[i]);
        }
      }
      exchange_all<T, L / 2>(block);
      for (int i = 0; i < L; ++i) sum = sum + block[i];
      store(lengths + start, sum);
    }
    for (int64_t j = 0; j < p.count; ++j)
      if (attended[j] && lengths[j] < least) least = lengths[j];
    for (int64_t d = 0; d < wide; d += L) store(common + d, all(T(0)));
    T whole = 0;
    for (int64_t j = 0; j < p.count; ++j) {
      if (!attended[j] || !(lengths[j] > 0) || !(lengths[j] < T(__builtin_inf()))) continue;
      const T part = least / lengths[j];
      whole += part;
      for (int64_t d = 0; d < wide; d += L) store(common + d, fma(all(part), load(own_keys + j * wide + d), load(common + d)));
    }
    for (int64_t d = 0; d < wide && whole > 0; d += L) store(common + d, load(common + d) / whole);
    for (int64_t j = 0; j < p.count && whole > 0; ++j)
      for (int64_t d = 0; d < wide; d += L) {
        T *const at = own_keys + j * wide + d;
        store(at, load(at) - load(common + d));
      }
    for (int64_t j = 0; j < count; j += L)
      transpose(own_keys + j * wide, wide, wide, turned + j / BLOCK * BLOCK * wide + j % BLOCK, BLOCK);
  }

  // softmax(beta K z) of every lane, without what is invisible; where nothing is attended to, weights and mean are zero.
  void weigh(int lanes, const T *z, const T *beta, const Pairs *pairs, T *mean) {
    read = last_of(pairs, lanes, p.count);
    Mask<T> all_lanes[2];
    for (int q = 0; q < W; ++q) all_lanes[q / L][q % L] = q < lanes ? -1 : 0;
    scores_of(all_lanes, lanes, z, beta);
    for (int64_t start = 0; start < read; start += BLOCK) {
      const int64_t size = read - start < BLOCK ? read - start : BLOCK;
      if (p.mask_kind == NO_MASK && start + size - 1 <= first_of(pairs, lanes)) continue;
      lay_pairs(p, pairs, lanes, start, size, work.bias, 1, W);
      for (int64_t j = 0; j < size; ++j)
        for (int q = 0; q < lanes; ++q) {
          T &score = weights[(start + j) * W + q];
          const T bias = work.bias[j * W + q];
          score = bias == T(-__builtin_inf()) ? bias : score + bias;
        }
    }
    for (int group = 0; group * L < lanes; ++group) {
      T *const at = weights + group * L;
      Vec<T> top = all(T(-__builtin_inf())), total = all(T(0));
      for (int64_t j = 0; j < read; ++j) top = larger(top, load(at + j * W));
      const Vec<T> shift = finite_top<T>(top);
      for (int64_t j = 0; j < read; ++j) {
        const Vec<T> weight = exponential<T>(load(at + j * W) - shift, LEAST_WEIGHT<T>);
        store(at + j * W, weight);
        total = total + weight;
      }
      const Mask<T> empty = total == T(0);
      const Vec<T> inverse = empty ? all(T(0)) : T(1) / total;
      for (int64_t d = 0; d < p.dim; ++d) {
        T *const of = mean + d * W + group * L;
        store(of, empty ? all(T(0)) : load(of));
      }
      for (int64_t j = 0; j < read; ++j) store(at + j * W, load(at + j * W) * inverse);
    }
  }

  // beta K z of the chosen lanes, in the place of the weights.
  void scores_of(const Mask<T> *chosen, int lanes, const T *state, const T *beta) {
    Plan plan = planned(chosen);
    for (int64_t start = 0; start < read; start += BLOCK) {
      const int64_t size = read - start < BLOCK ? read - start : BLOCK;
      const T *block = keys.data + start * wide;
      T *const to = weights + start * W;
      if (plan.both)
        product<T, 2, false>(size, block, wide, 1, state, W, p.dim, to, W);
      else
        for (int group = 0; group < 2; ++group)
          if (plan.whole[group]) product<T, 1, false>(size, block, wide, 1, state + group * L, W, p.dim, to + group * L, W);
      if (plan.few > 0) {
        if (start == 0) gather(plan, state);
        row_scores(plan, start, size);
        for (int i = 0; i < plan.few; ++i)
          for (int64_t j = 0; j < size; ++j) to[j * W + plan.lane[i]] = work.scores[i * BLOCK + j];
      }
      for (int64_t j = 0; j < size; ++j)
        for (int group = 0; group * L < lanes; ++group) {
          T *const at = to + j * W + group * L;
          store(at, load(at) * load(beta + group * L));
        }
    }
  }

  // Which lanes are worked on as whole vectors, and which one by one.
  struct Plan {
    bool whole[2], both;
    int few, lane[W];
  };

  static Plan planned(const Mask<T> *chosen) {
    Plan plan{};
    for (int group = 0; group < 2; ++group) {
      int count = 0;
      for (int i = 0; i < L; ++i) count += chosen[group][i] != 0;
      plan.whole[group] = count > FEW;
      for (int i = 0; i < L && !plan.whole[group]; ++i)
        if (chosen[group][i]) plan.lane[plan.few++] = group * L + i;
    }
    plan.both = plan.whole[0] && plan.whole[1];
    return plan;
  }

  // The few lanes of a plan as rows, and zeros for their sums.
  void gather(const Plan &plan, const T *from) {
    for (int i = 0; i < plan.few; ++i)
      for (int64_t d = 0; d < wide; ++d) {
        work.rows[i * wide + d] = d < p.dim ? from[d * W + plan.lane[i]] : T(0);
        work.sums[i * wide + d] = 0;
      }
  }

  // Scores of the few with a block of keys, in work.scores (few, BLOCK).
  void row_scores(const Plan &plan, int64_t start, int64_t size) {
    const T *const from = turned + start * wide;
    const int64_t whole = padded(size, L);
    int64_t j = 0;
    for (; j + 2 * L <= whole; j += 2 * L)
      product<T, 2, false>(plan.few, work.rows, wide, 1, from + j, BLOCK, p.dim, work.scores + j, BLOCK);
    if (j < whole) product<T, 1, false>(plan.few, work.rows, wide, 1, from + j, BLOCK, p.dim, work.scores + j, BLOCK);
  }

  // spread = K^T (p (K v)) of the chosen lanes; Centred: spread = K^T c with c = p (K v - offset), which is kept.
  template <bool Centred>
  void spread_of(const Mask<T> *chosen, const T *vector, const T *offset, T *spread) {
    const Plan plan = planned(chosen);
    for (int group = 0; group < 2; ++group)
      if (plan.whole[group])
        for (int64_t d = 0; d < p.dim; ++d) store(spread + d * W + group * L, all(T(0)));
    if (plan.few > 0) gather(plan, vector);
    for (int64_t start = 0; start < read; start += BLOCK) {
      const int64_t size = read - start < BLOCK ? read - start : BLOCK;
      const T *block = keys.data + start * wide;
      if (plan.both)
        product<T, 2, false>(size, block, wide, 1, vector, W, p.dim, work.scores, W);
      else
        for (int group = 0; group < 2; ++group)
          if (plan.whole[group])
            product<T, 1, false>(size, block, wide, 1, vector + group * L, W, p.dim, work.scores + group * L, W);
      for (int group = 0; group < 2; ++group) {
        if (!plan.whole[group]) continue;
        const Vec<T> from = Centred ? load(offset + group * L) : all(T(0));
        for (int64_t j = 0; j < size; ++j) {
          T *const at = work.scores + j * W + group * L;
          const int64_t pair = (start + j) * W + group * L;
          const Vec<T> score = load(at), product = (Centred ? score - from : score) * load(weights + pair);
          store(at, product);
          if (Centred) store(centred + pair, product);
        }
      }
      if (plan.both)
        product<T, 2, true>(p.dim, block, 1, wide, work.scores, W, size, spread, W);
      else
        for (int group = 0; group < 2; ++group)
          if (plan.whole[group])
            product<T, 1, true>(p.dim, block, 1, wide, work.scores + group * L, W, size, spread + group * L, W);
      if (plan.few == 0) continue;
      row_scores(plan, start, size);
      for (int i = 0; i < plan.few; ++i) {
        const int q = plan.lane[i];
        const T from = Centred ? offset[q] : T(0);
        for (int64_t j = 0; j < size; ++j) {
          T &score = work.scores[i * BLOCK + j];
          const int64_t pair = (start + j) * W + q;
          score = (Centred ? score - from : score) * weights[pair];
          if (Centred) centred[pair] = score;
        }
      }
      int64_t d = 0;
      for (; d + 2 * L <= wide; d += 2 * L)
        product<T, 2, true>(plan.few, work.scores, BLOCK, 1, block + d, wide, size, work.sums + d, wide);
      if (d < wide) product<T, 1, true>(plan.few, work.scores, BLOCK, 1, block + d, wide, size, work.sums + d, wide);
    }
    for (int i = 0; i < plan.few; ++i)
      for (int64_t d = 0; d < p.dim; ++d) spread[d * W + plan.lane[i]] = work.sums[i * wide + d];
  }
};

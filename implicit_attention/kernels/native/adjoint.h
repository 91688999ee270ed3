// The adjoint solve A u = g of every query, A = I - (1 - anchor) beta Cov(z), by conjugate gradients, and the gradients
// that u carries. The weights of a tile of queries are formed once and serve all products.
#pragma once

#include <cmath>

#include "rule.h"
#include "weighted.h"

// Curvature up to NOISE eps |p|^2 is rounding or negative; rounding may leave SLACK times the tolerance.
constexpr double NOISE = 10.0, SLACK = 10.0;
template <typename T>
struct AdjointOperands {
  Operand state, mean, cotangent;
  double rtol;
  int64_t max_steps;
  // Per query, contiguous.
  T *value, *residual, *tolerance, *by_beta;
  int8_t *status;
  int32_t *steps;
  bool *negative;
};

template <typename T>
struct AdjointTile {
  static constexpr int L = LANES<T>, W = WIDTH<T>;
  const Problem &p;
  const AdjointOperands<T> &given;
  const int64_t wide;
  WeightedKeys<T> held;
  // (D, lanes).
  T *z, *mean, *g, *u, *r, *v, *spread;
  // (lanes, D): what the gradient of the keys is made of.
  T *left, *right;
  // Per lane.
  T *beta, *share, *by_cov, *unit, *square, *length, *limit, *tolerance, *residual, *offset, *steps;
  Mask<T> active[2], blocked[2];
  Pairs pairs[W];
  int64_t out[W];
  int lanes;

  static int64_t bytes(const Problem &p) {
    const int64_t wide = padded(p.dim, L);
    return WeightedKeys<T>::bytes(p) + sizeof(T) * (7 * p.dim * W + 2 * W * wide + 11 * W) + 20 * 64;
  }

  AdjointTile(const Problem &p, const AdjointOperands<T> &given, Arena arena)
      : p(p), given(given), wide(padded(p.dim, L)), held(p, arena) {
    for (T **t : {&z, &mean, &g, &u, &r, &v, &spread}) *t = arena.take<T>(p.dim * W);
    left = arena.take<T>(W * wide);
    right = arena.take<T>(W * wide);
    for (T **t : {&beta, &share, &by_cov, &unit, &square, &length, &limit, &tolerance, &residual, &offset, &steps})
      *t = arena.take<T>(W);
  }

  // Rows begin .. end of a set; the gradient of its keys is added to by_keys (M, wide), that of biases to by_bias
  // (*batch, M).
  void run(int64_t set, int64_t begin, int64_t end, T *by_keys, T *by_bias) {
    held.take_keys(set);
    int64_t rows[W];
    lanes = 0;
    for (int64_t row = begin; row < end; ++row) {
      if (rests(set, row)) continue;
      rows[lanes++] = row;
      if (lanes == W) solve_lanes(set, rows, by_keys, by_bias);
    }
    if (lanes > 0) solve_lanes(set, rows, by_keys, by_bias);
  }

 private:
  void solve_lanes(int64_t set, const int64_t *rows, T *by_keys, T *by_bias) {
    enter(set, rows);
    held.weigh(lanes, z, beta, pairs, mean);
    iterate();
    finish();
    add_gradients(by_keys, by_bias);
    lanes = 0;
  }

  // Whether the cotangent of a query is zero: then so is its answer, whatever the query holds.
  bool rests(int64_t set, int64_t row) {
    const int64_t at = row / p.queries, query = row % p.queries;
    const ptrdiff_t step = given.cotangent.step[p.own() + 1];
    const T *from = static_cast<const T *>(given.cotangent.data) + p.axes.offset(given.cotangent.step, set, at) +
                    query * given.cotangent.step[p.own()];
    for (int64_t d = 0; d < p.dim; ++d)
      if (!(from[d * step] == 0)) return false;
    const int64_t to = p.axes.offset(p.out, set, at) + query;
    std::memset(given.value + to * p.dim, 0, p.dim * sizeof(T));
    given.by_beta[to] = 0;
    given.residual[to] = 0;
    given.tolerance[to] = 0;
    given.status[to] = CONVERGED;
    given.steps[to] = 0;
    given.negative[to] = false;
    return true;
  }

  int groups() const { return (lanes + L - 1) / L; }

  // A lane without a query has the state zero and rests.
  void enter(int64_t set, const int64_t *rows) {
    const T *states[W], *means[W], *cotangents[W];
    const auto row_of = [&](const Operand &of, int64_t share, int64_t query) {
      return static_cast<const T *>(of.data) + p.axes.offset(of.step, set, share) + query * of.step[p.own()];
    };
    for (int q = 0; q < W; ++q) {
      const int64_t row = rows[q < lanes ? q : 0], at = row / p.queries, query = row % p.queries;
      out[q] = p.axes.offset(p.out, set, at) + query;
      pairs[q] = pairs_of<T>(p, set, at, query);
      beta[q] = number<T>(p, p.beta, set, at);
      share[q] = T(1) - number<T>(p, p.anchor, set, at);
      by_cov[q] = share[q] * beta[q];
      steps[q] = 0;
      states[q] = row_of(given.state, at, query);
      means[q] = row_of(given.mean, at, query);
      cotangents[q] = row_of(given.cotangent, at, query);
    }
    const int inner = p.own() + 1;
    for (int group = 0; group < groups(); ++group) {
      const int at = group * L;
      gather_lanes(cotangents + at, given.cotangent.step[inner], p.dim, g + at, W);
      gather_lanes(states + at, given.state.step[inner], p.dim, z + at, W);
      gather_lanes(means + at, given.mean.step[inner], p.dim, mean + at, W);
      Vec<T> peak = all(T(0)), sum = all(T(0));
      Mask<T> sound = peak == peak;
      for (int64_t d = 0; d < p.dim; ++d) {
        const Vec<T> size = absolute(load(g + d * W + at));
        sound &= size < T(__builtin_inf());
        peak = larger(size, peak);
      }
      Mask<T> busy;
      for (int i = 0; i < L; ++i) {
        const int q = at + i;
        busy[i] = q < lanes ? -1 : 0;
        // The power of two that brings the largest entry into [1/2, 1).
        int exponent = 0;
        if (sound[i] && peak[i] > 0) __builtin_frexp(static_cast<double>(peak[i]), &exponent);
        constexpr int most = sizeof(T) == 4 ? 127 : 1023;
        unit[q] = static_cast<T>(__builtin_ldexp(1.0, exponent < most ? exponent : most));
        if (unit[q] == 0) unit[q] = 1;
      }
      const Vec<T> power = load(unit + at), zero = all(T(0));
      for (int64_t d = 0; d < p.dim; ++d) {
        const int64_t i = d * W + at;
        const Vec<T> right = busy ? load(g + i) / power : zero;
        store(z + i, busy ? load(z + i) : zero);
        store(mean + i, busy ? load(mean + i) - held.common[d] : zero);
        store(g + i, right);
        store(u + i, zero);
        store(r + i, right);
        store(v + i, right);
        sum = fma(right, right, sum);
      }
      const Vec<T> bound = T(given.rtol) * root(sum);
      store(square + at, sum);
      store(length + at, sum);
      store(tolerance + at, bound);
      store(limit + at, bound * bound);
      active[group] = busy & (sum > bound * bound);
      blocked[group] = Mask<T>{};
    }
    for (int group = groups(); group < 2; ++group) active[group] = blocked[group] = Mask<T>{};
  }

  Vec<T> along_mean(const T *vector, int group) const {
    Vec<T> sum = all(T(0));
    for (int64_t d = 0; d < p.dim; ++d) sum = fma(load(mean + d * W + group * L), load(vector + d * W + group * L), sum);
    return sum;
  }

  void iterate() {
    for (int64_t step = 0; step < given.max_steps; ++step) {
      if (!any<T>(active[0] | active[1])) return;
      held.template spread_of<false>(active, v, nullptr, spread);
      for (int group = 0; group < groups(); ++group) {
        const int at = group * L;
        if (!any<T>(active[group])) continue;
        const Vec<T> zero = all(T(0)), along = along_mean(v, group), scale = load(by_cov + at);
        Vec<T> curvature = zero;
        for (int64_t d = 0; d < p.dim; ++d) {
          const int64_t i = d * W + at;
          const Vec<T> direction = load(v + i);
          const Vec<T> product = direction - scale * (load(spread + i) - along * load(mean + i));
          store(spread + i, product);
          curvature = fma(direction, product, curvature);
        }
        Mask<T> now = active[group];
        store(steps + at, load(steps + at) + (now ? all(T(1)) : zero));
        constexpr T eps = sizeof(T) == 4 ? T(1.1920928955078125e-07) : T(2.220446049250313e-16);
        // A NaN is not blocked: it goes on into the residual and is seen there.
        const Mask<T> negative = now & (curvature <= T(NOISE) * eps * load(length + at));
        blocked[group] |= negative;
        now &= ~negative;
        const Vec<T> old = load(square + at), rate = now ? old / curvature : zero;
        Vec<T> reached = zero;
        for (int64_t d = 0; d < p.dim; ++d) {
          const int64_t i = d * W + at;
          store(u + i, now ? fma(rate, load(v + i), load(u + i)) : load(u + i));
          const Vec<T> rest = now ? load(r + i) - rate * load(spread + i) : load(r + i);
          store(r + i, rest);
          reached = fma(rest, rest, reached);
        }
        const Vec<T> ratio = now ? reached / old : zero;
        for (int64_t d = 0; d < p.dim; ++d) {
          const int64_t i = d * W + at;
          store(v + i, now ? fma(ratio, load(v + i), load(r + i)) : load(v + i));
        }
        // |v|^2, as r is orthogonal to the directions before.
        store(length + at, reached + ratio * ratio * load(length + at));
        store(square + at, now ? reached : old);
        active[group] = now & (reached > load(limit + at));
      }
    }
  }

  // The residual at u, by a product of its own, and how each solve ended.
  void finish() {
    Mask<T> busy[2];
    for (int q = 0; q < W; ++q) busy[q / L][q % L] = q < lanes ? -1 : 0;
    for (int group = 0; group < groups(); ++group) store(offset + group * L, along_mean(u, group));
    held.template spread_of<true>(busy, u, offset, spread);
    for (int group = 0; group < groups(); ++group) {
      const int at = group * L;
      Vec<T> sum = all(T(0)), along = sum, scale = load(by_cov + at), part = load(share + at), power = load(unit + at);
      for (int64_t d = 0; d < p.dim; ++d) {
        const int64_t i = d * W + at;
        const Vec<T> spread_here = load(spread + i), rest = load(g + i) - load(u + i) + scale * spread_here;
        sum = fma(rest, rest, sum);
        along = fma(spread_here, load(z + i), along);
      }
      const Mask<T> finite = sum < T(__builtin_inf());
      // What stalled adds nothing.
      Mask<T> out_of_sums = Mask<T>{};
      const Vec<T> left_over = root(sum);
      T *values[L], *lefts[L], *rights[L];
      for (int i = 0; i < L; ++i) {
        const int q = at + i;
        values[i] = lefts[i] = rights[i] = nullptr;
        if (q >= lanes) continue;
        const bool stopped = blocked[group][i] != 0;
        const bool solved = finite[i] && left_over[i] <= T(SLACK) * tolerance[q] && !stopped;
        const bool stalled = stopped || (finite[i] && !solved && steps[q] < T(given.max_steps));
        const int8_t status = solved ? CONVERGED : stalled ? STALLED : finite[i] ? MAX_STEPS : NONFINITE;
        if (stalled) out_of_sums[i] = -1;
        const int64_t to = out[q];
        values[i] = given.value + to * p.dim;
        lefts[i] = left + q * wide;
        rights[i] = right + q * wide;
        // Zero times what is not finite would not be zero.
        for (int64_t j = 0; stalled && j < held.read; ++j) held.weights[j * W + q] = held.centred[j * W + q] = 0;
        given.by_beta[to] = stalled ? T(0) : share[q] * along[i] * unit[q];
        given.residual[to] = left_over[i] * unit[q];
        given.tolerance[to] = tolerance[q] * unit[q];
        given.status[to] = status;
        given.steps[to] = static_cast<int32_t>(steps[q]);
        given.negative[to] = stopped;
      }
      const Vec<T> zero = all(T(0));
      for (int64_t d = 0; d < p.dim; ++d) {
        const int64_t i = d * W + at;
        const Vec<T> value = finite ? load(u + i) * power : all(T(__builtin_nan("")));
        store(u + i, value);
        store(v + i, out_of_sums ? zero : part * value);
        store(r + i, out_of_sums ? zero : scale * power * load(z + i));
      }
      scatter_lanes(u + at, W, p.dim, values);
      scatter_lanes(v + at, W, p.dim, lefts);
      scatter_lanes(r + at, W, p.dim, rights);
    }
    // Vectors are read whole.
    for (int q = 0; q < lanes; ++q)
      for (int64_t d = p.dim; d < wide; ++d) left[q * wide + d] = right[q * wide + d] = 0;
  }

  // p u^T and c (by_cov z)^T, summed over the queries of the tile.
  void add_gradients(T *by_keys, T *by_bias) {
    int64_t d = 0;
    for (; d + 2 * L <= wide; d += 2 * L) {
      product<T, 2, true>(held.read, held.weights, W, 1, left + d, wide, lanes, by_keys + d, wide);
      product<T, 2, true>(held.read, held.centred, W, 1, right + d, wide, lanes, by_keys + d, wide);
    }
    if (d < wide) {
      product<T, 1, true>(held.read, held.weights, W, 1, left + d, wide, lanes, by_keys + d, wide);
      product<T, 1, true>(held.read, held.centred, W, 1, right + d, wide, lanes, by_keys + d, wide);
    }
    for (int q = 0; by_bias && q < lanes; ++q) {
      T *const to = by_bias + out[q] / p.queries * p.count;
      for (int64_t j = 0; j < held.read; ++j) to[j] += share[q] * unit[q] * held.centred[j * W + q];
    }
  }
};

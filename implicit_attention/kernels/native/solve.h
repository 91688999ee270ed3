// The equilibrium of every query, by the tolerances of `FusedRule` and the steps of `rule.py`. Every lane of a tile
// has a query of its own at a step of its own; a lane that is done takes the next query.
#pragma once

#include <limits>

#include "evaluate.h"
#include "rule.h"

struct SolveRule {
  double rtol, atol;
  int64_t max_steps, plain_steps;
  bool fixed() const { return rtol == 0 && atol == 0; }
  int8_t exhausted() const { return max_steps == 0 ? EXPLICIT : fixed() ? BUDGET : MAX_STEPS; }
};

// Squares of smaller numbers have lost digits; times POWER they are far from underflow, divided by it from overflow.
template <typename T>
constexpr T LEAST_LENGTH = sizeof(T) == 4 ? T(0x1p-51) : T(0x1p-485);
template <typename T>
constexpr T LEAST_SQUARE = LEAST_LENGTH<T> * LEAST_LENGTH<T>;
template <typename T>
constexpr T POWER = sizeof(T) == 4 ? T(0x1p80) : T(0x1p640);

// Where answers are written; those that nobody wants are null.
template <typename T>
struct Answers {
  T *state, *mean, *logsumexp, *residual, *tolerance;
  int8_t *status;
  int32_t *steps;
};

template <typename T>
struct SolveTile {
  static constexpr int L = LANES<T>, W = WIDTH<T>;
  const Problem &p;
  const Operand &initial;
  const SolveRule &rule;
  const Answers<T> &answers;
  Work<T> work;
  // (D, lanes): the state, the field, sums and then means of the keys, the last accepted r = f - z, the step from there.
  T *z, *x, *sum, *r, *dz;
  // Per lane.
  T *beta, *anchor, *total, *top, *index, *length, *square, *energy, *tried_square, *tried_slope;
  Mask<T> tried[2];
  Pairs pairs[W];
  int64_t out[W];
  int lanes = 0;
  int64_t failed = 0;

  // Few queries read all keys turned, again and again; as long as those stay in a cache.
  static bool turns(const Problem &p) { return p.rows() <= FEW_LANES<T> && p.count * p.dim <= 1 << 18; }

  static int64_t bytes(const Problem &p) {
    return Work<T>::bytes(p.dim, p.count, turns(p)) + 5 * (p.dim * W * sizeof(T) + 64) + 10 * (W * sizeof(T) + 64);
  }

  SolveTile(const Problem &p, const Operand &initial, const SolveRule &rule, const Answers<T> &answers, void *memory)
      : p(p), initial(initial), rule(rule), answers(answers) {
    Arena arena = {static_cast<char *>(memory)};
    work = Work<T>::of(arena, p.dim, p.count, turns(p));
    for (T **t : {&z, &x, &sum, &r, &dz}) {
      *t = arena.take<T>(p.dim * W);
      std::memset(*t, 0, p.dim * W * sizeof(T));
    }
    for (T **t : {&beta, &anchor, &total, &top, &index, &length, &square, &energy, &tried_square, &tried_slope}) {
      *t = arena.take<T>(W);
      for (int q = 0; q < W; ++q) (*t)[q] = 1;
    }
    for (int v = 0; v < 2; ++v) tried[v] = Mask<T>{};
  }

  // Rows begin .. end of a set, through the lanes.
  void run(int64_t set, int64_t begin, int64_t end) {
    const Keys<T> keys = {static_cast<const T *>(p.keys.data) + p.axes.offset(p.keys.step, set, 0), p.keys.step[p.own()],
                          p.count, p.dim};
    work.turn_all(keys);
    int64_t next = begin;
    for (; lanes < W && next < end; ++next) enter(lanes++, set, next);
    for (int q = lanes; q < W; ++q) pairs[q] = {pairs[0].mask, -1};
    while (lanes > 0) {
      evaluate<T>(p, keys, work, lanes, z, beta, pairs, sum, total, top);
      Mask<T> done[2] = {};
      for (int v = 0; v * L < lanes; ++v) done[v] = judge(v);
      for (int q = lanes - 1; q >= 0; --q) {
        if (!done[q / L][q % L]) continue;
        if (next < end) {
          enter(q, set, next++);
        } else if (q < --lanes) {
          move(lanes, q);
        }
      }
      for (int q = lanes; q < W; ++q) pairs[q].last = -1;
    }
  }

 private:
  void enter(int q, int64_t set, int64_t row) {
    const int64_t share = row / p.queries, query = row % p.queries;
    const int own = p.own();
    beta[q] = number<T>(p, p.beta, set, share);
    anchor[q] = number<T>(p, p.anchor, set, share);
    const T *from = static_cast<const T *>(p.field.data) + p.axes.offset(p.field.step, set, share) + query * p.field.step[own];
    const T *start = static_cast<const T *>(initial.data) + p.axes.offset(initial.step, set, share) + query * initial.step[own];
    // Without an anchor the field is not read, whatever it holds.
    const bool read = anchor[q] != 0;
    for (int64_t d = 0; d < p.dim; ++d) {
      x[d * W + q] = read ? from[d * p.field.step[own + 1]] : T(0);
      z[d * W + q] = start[d * initial.step[own + 1]];
    }
    // What r, dz and the numbers of the last accepted point hold is not used before the lane has one.
    pairs[q] = pairs_of<T>(p, set, share, query);
    index[q] = 0;
    tried[q / L][q % L] = 0;
    out[q] = p.axes.offset(p.out, set, share) + query;
  }

  void move(int from, int to) {
    for (T *t : {z, x, r, dz})
      for (int64_t d = 0; d < p.dim; ++d) t[d * W + to] = t[d * W + from];
    for (T *t : {beta, anchor, index, length, square, energy, tried_square, tried_slope}) t[to] = t[from];
    tried[to / L][to % L] = tried[from / L][from % L];
    pairs[to] = pairs[from];
    out[to] = out[from];
  }

  // f = x + (1 - anchor)(mean - x), exact at both ends.
  static IA_INLINE Vec<T> mixed(Vec<T> mean, Vec<T> x, Vec<T> anchor) {
    const Vec<T> difference = x - mean;
    return anchor < T(0.5) ? mean + anchor * difference : x - difference * (T(1) - anchor);
  }

  // Where a square has lost digits by underflow, or has overflown.
  static IA_INLINE Mask<T> unresolved(Vec<T> square) {
    return ~((square >= LEAST_SQUARE<T>) & (square < T(__builtin_inf())));
  }

  static IA_INLINE Vec<T> unit_of(Vec<T> square) {
    const Vec<T> one = all(T(1));
    return square < LEAST_SQUARE<T> ? all(POWER<T>) : square < T(__builtin_inf()) ? one : all(T(1) / POWER<T>);
  }

  // |f - z| and |f| once more, in units in which their squares can be held; the other lanes keep their bits.
  void measure(int v, Vec<T> rr, Vec<T> ff, Vec<T> &residual, Vec<T> &size) const {
    const int at = v * L;
    const Vec<T> share = load(anchor + at), of_r = unit_of(rr), of_f = unit_of(ff);
    rr = ff = all(T(0));
    for (int64_t d = 0; d < p.dim; ++d) {
      const int64_t i = d * W + at;
      const Vec<T> f = mixed(load(sum + i), load(x + i), share), by_r = (f - load(z + i)) * of_r, by_f = f * of_f;
      rr = fma(by_r, by_r, rr);
      ff = fma(by_f, by_f, ff);
    }
    residual = root(rr) / of_r;
    size = root(ff) / of_f;
  }

  // What was found at the states of one vector of lanes: which are done, whose answers are written; the others step.
  Mask<T> judge(int v) {
    const int at = v * L;
    const Vec<T> zero = all(T(0)), share = load(anchor + at), steps = load(index + at), whole = load(total + at);
    const Vec<T> most = load(top + at);
    const Mask<T> empty = most == T(-__builtin_inf());
    const Vec<T> logsumexp = empty ? zero : most + logarithm<T>(whole);
    const Vec<T> inverse = empty ? zero : T(1) / whole;
    Vec<T> rr = zero, ff = zero, zz = zero, zx = zero, rdz = zero, drdr = zero;
    for (int64_t d = 0; d < p.dim; ++d) {
      const int64_t i = d * W + at;
      const Vec<T> mean = load(sum + i) * inverse, state = load(z + i), field = load(x + i);
      store(sum + i, mean);
      const Vec<T> f = mixed(mean, field, share), residual = f - state, change = residual - load(r + i);
      rr = fma(residual, residual, rr);
      ff = fma(f, f, ff);
      zz = fma(state, state, zz);
      zx = fma(state, field, zx);
      rdz = fma(residual, load(dz + i), rdz);
      drdr = fma(change, change, drdr);
    }
    Vec<T> residual = root(rr), size = root(ff);
    Mask<T> used;
    for (int q = 0; q < L; ++q) used[q] = at + q < lanes ? -1 : 0;
    if (any<T>(used & (unresolved(rr) | unresolved(ff)))) measure(v, rr, ff, residual, size);
    const Vec<T> tolerance = T(rule.rtol) * size + T(rule.atol);
    const Mask<T> finite = residual + tolerance < T(__builtin_inf());
    const Mask<T> unsolved = rule.fixed() ? finite : finite & (residual > tolerance);
    const Vec<T> value = zz / 2 - share * zx + (share - T(1)) / load(beta + at) * logsumexp;
    // The last accepted point is known from step `plain_steps` on, which is at least 2.
    const Mask<T> based = rule.plain_steps < rule.max_steps ? steps >= T(rule.plain_steps) : Mask<T>{};
    const Vec<T> base_length = load(length + at), base_square = load(square + at), base_energy = load(energy + at);
    const Vec<T> slope_there = load(tried_slope + at), across = (rr + drdr - base_square) / 2, along = rdz + across;
    const Vec<T> bent = rdz - slope_there, span = load(tried_square + at) + 2 * bent + drdr;
    const Mask<T> may = based & (steps + T(1) < T(rule.max_steps));
    using Limits = std::numeric_limits<T>;
    const auto [accepted, tries, by_r, by_df] = decide<T>(
        rr, residual, value, (slope_there + rdz) / 2, across, drdr, along, span, bent, base_energy, base_length, finite,
        tried[v], may, Limits::epsilon(), Limits::min(), LEAST_LENGTH<T>);
    const Mask<T> last = steps == T(rule.max_steps);
    const Mask<T> done = last | (accepted & ~unsolved);
    const Mask<T> back = based & ~finite;
    residual = back ? base_length : residual;
    for (int q = at; q < at + L && q < lanes; ++q)
      if (done[q - at])
        write(q, finite[q - at], back[q - at], residual[q - at], tolerance[q - at], logsumexp[q - at]);

    const Vec<T> there = accepted ? rr : base_square;
    const Mask<T> to_f = accepted & ~tries;
    Vec<T> reached = zero;
    for (int64_t d = 0; d < p.dim; ++d) {
      const int64_t i = d * W + at;
      const Vec<T> f = mixed(load(sum + i), load(x + i), share), old = load(r + i), step = load(dz + i);
      Vec<T> state = load(z + i);
      const Vec<T> now = accepted ? f - state : old;
      state = accepted ? state : state - step;
      Vec<T> direction = by_r * now;
      direction = tries ? fma(-by_df, step + (now - old), direction) : direction;
      store(z + i, to_f ? f : state + direction);
      store(r + i, now);
      store(dz + i, direction);
      reached = fma(direction, direction, reached);
    }
    store(length + at, accepted ? residual : base_length);
    store(square + at, there);
    store(energy + at, accepted ? value : base_energy);
    store(tried_square + at, reached);
    store(tried_slope + at, tries ? by_r * rr - by_df * along : there);
    store(index + at, steps + T(1));
    tried[v] = tries;
    return done;
  }

  void write(int q, bool finite, bool back, T residual, T tolerance, T logsumexp) {
    const int64_t at = out[q];
    T *to = answers.state + at * p.dim;
    const bool born = !finite && index[q] == 0;
    for (int64_t d = 0; d < p.dim; ++d)
      to[d] = born ? T(__builtin_nan("")) : back ? z[d * W + q] - dz[d * W + q] : z[d * W + q];
    if (answers.mean)
      for (int64_t d = 0; d < p.dim; ++d) answers.mean[at * p.dim + d] = sum[d * W + q];
    int8_t status = rule.exhausted();
    if (!rule.fixed() && residual <= tolerance) status = CONVERGED;
    if (!finite) status = index[q] == 0 ? NONFINITE : DIVERGED;
    failed += status > UNSTABLE;
    if (answers.logsumexp) answers.logsumexp[at] = logsumexp;
    if (answers.residual) answers.residual[at] = residual;
    if (answers.tolerance) answers.tolerance[at] = tolerance;
    if (answers.status) answers.status[at] = status;
    if (answers.steps) answers.steps[at] = static_cast<int32_t>(index[q]);
  }
};

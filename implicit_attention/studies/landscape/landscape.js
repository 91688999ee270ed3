"use strict";

// E(z) = |z|^2/2 - anchor <x, z> - (1 - anchor) Phi(z), Phi(z) = (1/beta) log sum_j exp(beta <k_j, z>).

// The plain step from a state, anchor x + (1 - anchor) softmax(beta z K^T) K, with its Jacobian and the energy before.
// A frame takes a hundred thousand of them: arrays are flat, and results are fields.
class Step {
  constructor({ keys, query, beta, anchor }) {
    this.keys = Float64Array.from(keys.flat());
    this.scores = new Float64Array(keys.length);
    this.pull = [anchor * query[0], anchor * query[1]];
    this.beta = beta;
    this.rest = 1 - anchor;
  }

  from(x, y) {
    const { keys, scores, pull, beta, rest } = this;
    let top = -Infinity;
    for (let j = 0; j < scores.length; j += 1) {
      scores[j] = beta * (keys[2 * j] * x + keys[2 * j + 1] * y);
      if (scores[j] > top) top = scores[j];
    }
    let [total, mx, my, xx, xy, yy] = [0, 0, 0, 0, 0, 0];
    for (let j = 0; j < scores.length; j += 1) {
      const [kx, ky] = [keys[2 * j], keys[2 * j + 1]];
      const weight = Math.exp(scores[j] - top);
      total += weight;
      mx += weight * kx;
      my += weight * ky;
      xx += weight * kx * kx;
      xy += weight * kx * ky;
      yy += weight * ky * ky;
    }
    mx /= total;
    my /= total;
    this.x = pull[0] + rest * mx;
    this.y = pull[1] + rest * my;
    this.xx = rest * beta * (xx / total - mx * mx);
    this.xy = rest * beta * (xy / total - mx * my);
    this.yy = rest * beta * (yy / total - my * my);
    this.energy = (x * x + y * y) / 2 - pull[0] * x - pull[1] * y - (rest * (top + Math.log(total))) / beta;
    return this;
  }

  // Whether steps from around come nearer: both eigenvalues of the Jacobian are below 1.
  get attracts() {
    return this.xx < 1 && (1 - this.xx) * (1 - this.yy) > this.xy * this.xy;
  }
}

function energyOf(problem, z) {
  return new Step(problem).from(...z).energy;
}

// Plain steps from the query, until they move no more.
function equilibrium(problem, { tolerance = 1e-9, steps = 20000 } = {}) {
  const step = new Step(problem);
  // Ends may be at 0, so that a tolerance relative to them would ask for too much.
  const size = Math.max(...[problem.query, ...problem.keys].flat().map(Math.abs));
  let [x, y] = problem.query;
  const path = [[x, y]];
  let converged = false;
  while (!converged && path.length <= steps) {
    step.from(x, y);
    converged = Math.hypot(step.x - x, step.y - y) <= tolerance * size;
    [x, y] = [step.x, step.y];
    path.push([x, y]);
  }
  const { energy, attracts } = step.from(x, y);
  return { value: [x, y], path, converged, energy, attracts };
}

// The end of plain steps from every pixel of a square: energies, and numbers of attractors.
function basins(problem, reach, side) {
  const LONGEST = 300;
  const LEVELS = 4096;
  const step = new Step(problem);
  const width = (2 * reach) / side;
  const energies = new Float64Array(side * side);
  const after = new Float64Array(2 * side * side);
  let [low, high] = [Infinity, -Infinity];
  for (let pixel = 0; pixel < energies.length; pixel += 1) {
    const column = pixel % side;
    const row = (pixel - column) / side;
    step.from((column + 0.5) * width - reach, reach - (row + 0.5) * width);
    energies[pixel] = step.energy;
    after[2 * pixel] = step.x;
    after[2 * pixel + 1] = step.y;
    if (step.energy < low) low = step.energy;
    if (step.energy > high) high = step.energy;
  }

  const ends = new Int16Array(side * side).fill(-1);
  const attractors = [];
  const within = (index) => Math.max(0, Math.min(side - 2, Math.floor(index)));
  const near = (x, y) => attractors.findIndex((a) => Math.hypot(a[0] - x, a[1] - y) < width);

  // The end that the four pixels around a state have in common.
  function around(x, y) {
    const at = within((reach - y) / width - 0.5) * side + within((x + reach) / width - 0.5);
    const end = ends[at];
    return end === ends[at + 1] && end === ends[at + side] && end === ends[at + side + 1] ? end : -1;
  }

  // Newton's steps from a state at which plain ones are short, for they may be short far from the end.
  function settled(x, y) {
    let [u, v] = [x, y];
    for (let turn = 0; turn < 8; turn += 1) {
      const { x: nx, y: ny, xx, xy, yy, attracts } = step.from(u, v);
      if (!attracts || Math.hypot(u - x, v - y) > 3 * width) return null;
      if (Math.hypot(nx - u, ny - v) < 1e-9 * reach) return [u, v];
      const determinant = (1 - xx) * (1 - yy) - xy * xy;
      const [dx, dy] = [nx - u, ny - v];
      u += ((1 - yy) * dx + xy * dy) / determinant;
      v += ((1 - xx) * dy + xy * dx) / determinant;
    }
    return null;
  }

  function follow(x, y) {
    for (let count = 0; count < LONGEST; count += 1) {
      const known = around(x, y);
      if (known >= 0) return known;
      step.from(x, y);
      const length = Math.hypot(step.x - x, step.y - y);
      [x, y] = [step.x, step.y];
      if (length < width / 4) {
        const trapped = near(x, y);
        if (trapped >= 0) return trapped;
        const end = settled(x, y);
        if (end !== null) {
          const same = near(...end);
          return same >= 0 ? same : attractors.push(end) - 1;
        }
      }
    }
    return -1;
  }

  // From the lowest pixel up: a plain step never climbs, so the end of where it leads is mostly known.
  const level = (energy) => Math.floor(((LEVELS - 1) * (energy - low)) / (high - low || 1));
  const begins = new Uint32Array(LEVELS + 1);
  for (const energy of energies) begins[level(energy) + 1] += 1;
  for (let index = 0; index < LEVELS; index += 1) begins[index + 1] += begins[index];
  const order = new Uint32Array(side * side);
  energies.forEach((energy, pixel) => {
    order[begins[level(energy)]++] = pixel;
  });
  for (const pixel of order) ends[pixel] = follow(after[2 * pixel], after[2 * pixel + 1]);
  return { energies, low, high, ends, attractors };
}

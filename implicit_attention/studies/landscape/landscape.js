"use strict";

// E(z) = |z|^2/2 - anchor <x, z> - (1 - anchor) Phi(z), Phi(z) = (1/beta) log sum_j exp(beta <k_j, z>).

function attend(keys, z, beta) {
  const scores = keys.map((k) => beta * (k[0] * z[0] + k[1] * z[1]));
  const top = Math.max(...scores);
  const weights = scores.map((s) => Math.exp(s - top));
  const total = weights.reduce((a, b) => a + b, 0);
  const mean = [0, 1].map((axis) => keys.reduce((sum, k, j) => sum + weights[j] * k[axis], 0) / total);
  return { mean, value: (top + Math.log(total)) / beta };
}

function energyOf(problem, z) {
  const { keys, query, beta, anchor } = problem;
  const pull = anchor * (query[0] * z[0] + query[1] * z[1]);
  return (z[0] * z[0] + z[1] * z[1]) / 2 - pull - (1 - anchor) * attend(keys, z, beta).value;
}

// Plain steps z <- anchor x + (1 - anchor) softmax(beta z K^T) K from the query, until they move no more.
function equilibrium(problem, { tolerance = 1e-9, steps = 20000 } = {}) {
  const { keys, query, beta, anchor } = problem;
  let z = [...query];
  const path = [z];
  for (let step = 0; step < steps; step += 1) {
    const { mean } = attend(keys, z, beta);
    const next = [0, 1].map((axis) => anchor * query[axis] + (1 - anchor) * mean[axis]);
    const residual = Math.hypot(next[0] - z[0], next[1] - z[1]);
    z = next;
    path.push(z);
    if (residual <= tolerance * Math.hypot(...next)) return { value: z, path, converged: true };
  }
  return { value: z, path, converged: false };
}

function show(figure, problem) {
  const SIDE = 140;
  const BANDS = 16;
  const LOW = [8, 69, 128];
  const HIGH = [240, 246, 251];
  const SVG = "http://www.w3.org/2000/svg";
  const { reach } = problem;
  const part = (name) => figure.querySelector(`[data-part="${name}"]`);
  const canvas = part("ground");
  const context = canvas.getContext("2d");
  canvas.width = canvas.height = SIDE;
  const plot = part("points");
  const line = part("path");
  const end = part("end");
  const said = part("said");

  function paint() {
    const energies = new Float64Array(SIDE * SIDE);
    for (let row = 0; row < SIDE; row += 1) {
      for (let column = 0; column < SIDE; column += 1) {
        const z = [reach * ((2 * column + 1) / SIDE - 1), -reach * ((2 * row + 1) / SIDE - 1)];
        energies[row * SIDE + column] = energyOf(problem, z);
      }
    }
    let [low, high] = [Infinity, -Infinity];
    for (const e of energies) [low, high] = [Math.min(low, e), Math.max(high, e)];
    const image = context.createImageData(SIDE, SIDE);
    energies.forEach((e, index) => {
      // Bands are nearer to each other at the bottom, where minima are shallow.
      const part = Math.floor(BANDS * Math.cbrt((e - low) / (high - low || 1))) / BANDS;
      const color = LOW.map((dark, channel) => dark + part * (HIGH[channel] - dark));
      image.data.set([...color, 255], 4 * index);
    });
    context.putImageData(image, 0, 0);
  }

  function tell() {
    const found = equilibrium(problem);
    line.setAttribute("points", found.path.map(([x, y]) => `${x},${-y}`).join(" "));
    end.setAttribute("transform", `translate(${found.value[0]} ${-found.value[1]})`);
    const [x, y] = found.value.map((n) => n.toFixed(3));
    const how = found.converged ? `after ${found.path.length - 1} steps` : "not reached, too many steps";
    part("beta-value").textContent = problem.beta.toPrecision(3);
    part("anchor-value").textContent = problem.anchor.toFixed(2);
    said.textContent = `Equilibrium (${x}, ${y}) ${how}, energy ${energyOf(problem, found.value).toFixed(4)}.`;
  }

  let waiting = false;
  function refresh() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      paint();
      tell();
    });
  }

  function addPoint(at, name, kind) {
    const dot = document.createElementNS(SVG, "circle");
    const place = () => {
      dot.setAttribute("cx", at[0]);
      dot.setAttribute("cy", -at[1]);
      dot.setAttribute("aria-label", `${name} at ${at.map((n) => n.toFixed(2)).join(", ")}; arrow keys move it`);
    };
    const move = (x, y) => {
      [at[0], at[1]] = [x, y].map((n) => Math.max(-reach, Math.min(reach, n)));
      place();
      refresh();
    };
    dot.setAttribute("r", 0.055 * reach);
    dot.setAttribute("class", kind);
    dot.setAttribute("tabindex", "0");
    dot.setAttribute("role", "img");
    dot.addEventListener("pointerdown", (event) => dot.setPointerCapture(event.pointerId));
    dot.addEventListener("pointermove", (event) => {
      if (!dot.hasPointerCapture(event.pointerId)) return;
      const box = plot.getBoundingClientRect();
      move(
        reach * ((2 * (event.clientX - box.left)) / box.width - 1),
        -reach * ((2 * (event.clientY - box.top)) / box.height - 1),
      );
    });
    dot.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      if (!by) return;
      event.preventDefault();
      move(at[0] + (by[0] * reach) / 40, at[1] + (by[1] * reach) / 40);
    });
    place();
    plot.append(dot);
  }

  problem.keys.forEach((key, index) => addPoint(key, `Stored pattern ${index + 1}`, "key"));
  addPoint(problem.query, "Query", "query");
  const beta = part("beta");
  // The slider is the logarithm of beta in units of where it begins.
  const begin = problem.beta;
  beta.addEventListener("input", () => {
    problem.beta = begin * 10 ** Number(beta.value);
    refresh();
  });
  const anchor = part("anchor");
  anchor.value = problem.anchor;
  anchor.addEventListener("input", () => {
    problem.anchor = Number(anchor.value);
    refresh();
  });
  figure.hidden = false;
  paint();
  tell();
}

if (typeof document !== "undefined") {
  show(document.getElementById("touch"), JSON.parse(document.getElementById("touch-problem").textContent));
}

// The scene that a reader touches: the query, its way and its basin.

function show(figure, problem) {
  // Pixels along a side at rest, and the fewest while something moves; milliseconds of a frame, and of a rest.
  const FINE = 280;
  const COARSE = 70;
  const FRAME = 14;
  const REST = 120;
  // What is said aloud waits until nothing has moved for so long.
  const ALOUD = 600;
  const BANDS = 16;
  // An end within this part of half a side is near a pattern.
  const NEAR = 0.1;
  // The lowest and the highest energy: in the basin of the query, elsewhere, and borders of basins.
  const LIGHT = {
    own: [[8, 69, 128], [226, 239, 250]],
    other: [[104, 108, 112], [246, 246, 244]],
    border: [27, 39, 51],
  };
  const DARK = {
    own: [[8, 52, 100], [110, 160, 208]],
    other: [[34, 38, 43], [112, 117, 122]],
    border: [230, 236, 241],
  };
  const SVG = "http://www.w3.org/2000/svg";
  const { reach } = problem;
  const begin = JSON.parse(JSON.stringify(problem));
  const part = (name) => figure.querySelector(`[data-part="${name}"]`);
  const canvas = part("ground");
  // All pixels are computed here: they stay in memory.
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const plot = part("points");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const places = [];
  let coarse = FINE / 2;
  let [found, sentence, waiting] = [null, "", false];
  let [rest, aloud] = [0, 0];

  function paint(side) {
    const { energies, low, high, ends, attractors } = basins(problem, reach, side);
    const distance = ([x, y]) => Math.hypot(x - found.value[0], y - found.value[1]);
    // A saddle, which a query on a border reaches, has no basin.
    const closest = () => attractors.reduce((best, a, i) => (distance(a) < distance(attractors[best]) ? i : best), 0);
    const own = found.attracts ? closest() : -2;
    const colors = dark.matches ? DARK : LIGHT;
    canvas.width = canvas.height = side;
    const image = context.createImageData(side, side);
    let count = 0;
    for (let pixel = 0; pixel < ends.length; pixel += 1) {
      const end = ends[pixel];
      if (end === own) count += 1;
      const border = (pixel % side && ends[pixel - 1] !== end) || (pixel >= side && ends[pixel - side] !== end);
      // Bands are nearer to each other at the bottom, where minima are shallow.
      const height = Math.floor(BANDS * Math.cbrt((energies[pixel] - low) / (high - low || 1))) / BANDS;
      const [deep, pale] = end === own ? colors.own : colors.other;
      for (let channel = 0; channel < 3; channel += 1) {
        const between = deep[channel] + height * (pale[channel] - deep[channel]);
        image.data[4 * pixel + channel] = border ? colors.border[channel] : between;
      }
      image.data[4 * pixel + 3] = 255;
    }
    context.putImageData(image, 0, 0);
    const others = attractors.filter((_, index) => index !== own);
    part("others").setAttribute("d", others.map(([x, y]) => `M${x} ${-y}h0`).join(""));
    tell(found.attracts ? { share: count / ends.length, all: attractors.length } : null);
  }

  function trace() {
    found = equilibrium(problem);
    // Of steps too short to see, those are drawn that lead a visible way.
    let last = [Infinity, Infinity];
    const seen = found.path.filter((z, index) => {
      const far = Math.hypot(z[0] - last[0], z[1] - last[1]) > reach / 400 || index === found.path.length - 1;
      if (far) last = z;
      return far;
    });
    const line = seen.map(([x, y]) => `${x},${-y}`).join(" ");
    for (const name of ["path", "casing"]) part(name).setAttribute("points", line);
    part("steps").setAttribute("d", seen.slice(1, -1).map(([x, y]) => `M${x} ${-y}h0`).join(""));
    part("end").setAttribute("transform", `translate(${found.value[0]} ${-found.value[1]})`);
    const beta = problem.beta.toPrecision(3);
    part("beta-value").textContent = beta;
    part("beta").setAttribute("aria-valuetext", beta);
    part("anchor-value").textContent = problem.anchor.toFixed(2);
  }

  function tell(basin) {
    const [x, y] = found.value;
    const away = problem.keys.map((k) => Math.hypot(k[0] - x, k[1] - y));
    const nearest = away.indexOf(Math.min(...away));
    const where = away[nearest] < NEAR * reach ? `near pattern ${nearest + 1}` : `nearest to pattern ${nearest + 1}`;
    const steps = found.path.length - 1;
    const how = found.converged ? `after ${steps} plain steps` : `and still moves after ${steps} plain steps`;
    const energy = `energy ${found.energy.toFixed(4)}`;
    const share = basin && `Its basin is ${Math.round(100 * basin.share)} % of the plane`;
    const one = basin && (basin.all === 1 ? "; there is no other." : `; there are ${basin.all} basins.`);
    sentence = `The query ends at (${x.toFixed(3)}, ${y.toFixed(3)}), ${where}, ${how}; ${energy}. `;
    sentence += basin ? share + one : "This is a saddle: starts around it end elsewhere.";
    part("said").textContent = sentence;
  }

  function refresh() {
    if (!waiting) {
      waiting = true;
      requestAnimationFrame(() => {
        waiting = false;
        trace();
        const since = performance.now();
        paint(coarse);
        const ratio = Math.sqrt(FRAME / Math.max(performance.now() - since, 1));
        // A little too much or too little is no reason to change the pixels.
        if (Math.abs(ratio - 1) > 0.25) coarse = Math.round(Math.max(COARSE, Math.min(FINE, coarse * ratio)));
      });
    }
    clearTimeout(rest);
    clearTimeout(aloud);
    rest = setTimeout(() => paint(FINE), REST);
    aloud = setTimeout(() => {
      part("aloud").textContent = sentence;
    }, ALOUD);
  }

  function addPoint(at, name, kind, label) {
    const radius = (kind === "query" ? 0.075 : 0.065) * reach;
    const [spot, dot, ring, text] = ["g", "circle", "circle", "text"].map((tag) => document.createElementNS(SVG, tag));
    const place = () => {
      spot.setAttribute("transform", `translate(${at[0]} ${-at[1]})`);
      dot.setAttribute("aria-label", `${name} at ${at.map((n) => n.toFixed(2)).join(", ")}; arrow keys move it`);
    };
    const move = (x, y) => {
      [at[0], at[1]] = [x, y].map((n) => Math.max(-reach, Math.min(reach, n)));
      place();
      refresh();
    };
    const follow = (event) => {
      const box = plot.getBoundingClientRect();
      move(
        reach * ((2 * (event.clientX - box.left)) / box.width - 1),
        -reach * ((2 * (event.clientY - box.top)) / box.height - 1),
      );
    };
    dot.setAttribute("r", radius);
    dot.setAttribute("class", kind);
    dot.setAttribute("tabindex", "0");
    dot.setAttribute("role", "img");
    // A finger on a point scrolls nothing; the style's touch-action does not reach into a picture everywhere.
    dot.addEventListener("touchstart", (event) => event.preventDefault(), { passive: false });
    dot.addEventListener("pointerdown", (event) => dot.setPointerCapture(event.pointerId));
    dot.addEventListener("pointermove", (event) => {
      if (dot.hasPointerCapture(event.pointerId)) follow(event);
    });
    dot.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      if (!by) return;
      event.preventDefault();
      const length = event.shiftKey ? reach / 8 : reach / 40;
      move(at[0] + by[0] * length, at[1] + by[1] * length);
    });
    // An outline of a point would be measured in units of the plane: a ring shows the focus.
    ring.setAttribute("r", 1.3 * radius);
    ring.setAttribute("class", "ring");
    text.textContent = label;
    text.setAttribute("font-size", 0.075 * reach);
    text.setAttribute("aria-hidden", "true");
    place();
    places.push(place);
    spot.append(dot, ring, text);
    plot.append(spot);
    return follow;
  }

  // The first in the order of Tab is the query.
  const follow = addPoint(problem.query, "Query", "query", "");
  problem.keys.forEach((key, index) => addPoint(key, `Stored pattern ${index + 1}`, "key", String(index + 1)));
  plot.addEventListener("click", (event) => {
    if (event.target === plot) follow(event);
  });

  const beta = part("beta");
  // The slider is the logarithm of beta in units of where it begins.
  beta.addEventListener("input", () => {
    problem.beta = begin.beta * 10 ** Number(beta.value);
    refresh();
  });
  const anchor = part("anchor");
  anchor.value = problem.anchor;
  anchor.addEventListener("input", () => {
    problem.anchor = Number(anchor.value);
    refresh();
  });
  part("again").addEventListener("click", () => {
    [problem.beta, problem.anchor, beta.value, anchor.value] = [begin.beta, begin.anchor, 0, begin.anchor];
    [problem.query, ...problem.keys].forEach((at, index) => {
      [at[0], at[1]] = [begin.query, ...begin.keys][index];
      places[index]();
    });
    refresh();
  });
  dark.addEventListener("change", () => paint(FINE));
  figure.hidden = false;
  trace();
  // The page is there first, and its pixels then get finer.
  paint(coarse);
  rest = setTimeout(() => paint(FINE), REST);
  part("aloud").textContent = sentence;
}

show(document.getElementById("touch"), JSON.parse(document.getElementById("touch-problem").textContent));

"""Measure how tokens collapse under self-attention: `python docs/self_attention/measure.py` (some 40 seconds).

Writes `collapse.json` and `collapse.png` beside this file and the tables of `docs/self_attention.md`, which
`--check` only compares with the committed JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from implicit_attention import Anderson, Picard, Status, solve
from implicit_attention.diagnostics import distinct_fixed_points
from implicit_attention.energies import RepeatedSelfAttention, SelfAttentionEnergy
from implicit_attention.plotting.style import COLORS, DASHES, DPI, MARKERS
from implicit_attention.solvers import Solver

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "self_attention.md"
START, END = "<!-- tables: python docs/self_attention/measure.py -->\n", "<!-- end of tables -->"

SAMPLES, TOKENS, DIM, SEED = 8, 64, 64, 0
SHARPNESS = (0.25, 0.5, 1.0, 2.0, 4.0)  # beta sqrt(D)
ANCHORS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
# The anchors and the sharpness of equilibria on the page; the JSON has all, and steps that miss them.
SHOWN, COLUMNS = (0.1, 0.5, 0.9), (0.25, 1.0, 2.0)
STEPS = 1000
REPEATED, HALF, WHOLE = "repeated", "energy, weight 1/2", "energy, weight 1"
# Accelerated steps often miss the equilibrium of repeated attention, which has no energy to test them by.
PLAIN, ACCELERATED = Picard(rtol=1e-6, max_steps=2000), Anderson(rtol=1e-6, max_steps=500)
SOLVED = ((REPEATED, PLAIN), (REPEATED, ACCELERATED), (HALF, ACCELERATED), (WHOLE, ACCELERATED))


def tokens(samples: int = SAMPLES) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(samples, TOKENS, DIM, generator=generator, dtype=torch.float64)


def make(problem: str, x: Tensor, sharpness: float, anchor: float) -> RepeatedSelfAttention | SelfAttentionEnergy:
    beta = sharpness / DIM**0.5
    if problem == REPEATED:
        return RepeatedSelfAttention(x, beta, anchor)
    return SelfAttentionEnergy(x, beta, anchor, weight=0.5 if problem == HALF else 1.0)


def describe(x: Tensor) -> dict[str, float | None]:
    """Means over the samples: distinct tokens, mean cosine of two tokens, effective rank exp(entropy of variances)."""
    if not len(x):
        return {"distinct": None, "cosine": None, "rank": None}
    unit = torch.nn.functional.normalize(x, dim=-1)
    cosine = (unit.sum(-2).square().sum(-1) - TOKENS) / (TOKENS * (TOKENS - 1))
    share = torch.linalg.svdvals(x).square()
    rank = torch.special.entr(share / share.sum(-1, keepdim=True)).sum(-1).exp()
    means = {"distinct": distinct_fixed_points(x).double(), "cosine": cosine, "rank": rank}
    return {name: round(float(values.mean()), 4) for name, values in means.items()}


def repeat(sharpness: float, x: Tensor) -> dict[str, Any]:
    """Self-attention on its own output, without anchor: what is left after some of the steps."""
    problem = make(REPEATED, x, sharpness, 0.0)
    shown = {0} | {round(10 ** (i / 8)) for i in range(8 * 3 + 1)}
    own = problem.probabilities(x).diagonal(dim1=-2, dim2=-1).mean()
    first = torch.linalg.vector_norm(problem.fixed_point_map(x) - x) / torch.linalg.vector_norm(x)
    course = []
    one = torch.full((len(x),), torch.inf)
    for step in range(STEPS + 1):
        if one.isinf().any():
            one = torch.where(one.isinf() & (distinct_fixed_points(x) == 1), float(step), one)
        if step in shown:
            course.append({"step": step, **describe(x)})
        x = problem.fixed_point_map(x)
    median = float(one.median())
    return {
        "sharpness": sharpness,
        "attention to itself": round(float(own), 4),
        "first step": float(f"{float(first):.2g}"),
        "steps to one token": int(median) if median <= STEPS else None,
        "course": course,
    }


def equilibrium(problem: str, solver: Solver, sharpness: float, anchor: float, x: Tensor) -> dict[str, Any]:
    """What a solver makes of it, started at the tokens; means over the samples that it has an answer for."""
    solution = solve(make(problem, x, sharpness, anchor), x, solver=solver, on_failure="ignore")
    status = Counter(next(s.name for s in Status if s == code) for code in solution.status.tolist())
    return {
        "problem": problem,
        "solver": type(solver).__name__,
        "sharpness": sharpness,
        "anchor": anchor,
        "status": dict(status),
        **describe(solution.value[~solution.failed]),
    }


def measure() -> dict[str, Any]:
    x = tokens()
    repeated, equilibria = [], []
    for sharpness in SHARPNESS:
        print(f"beta sqrt(D) = {sharpness:g}: {STEPS} steps", flush=True)
        repeated.append(repeat(sharpness, x))
        for problem, solver in SOLVED:
            print(f"beta sqrt(D) = {sharpness:g}: {problem} by {type(solver).__name__}", flush=True)
            # Without anchor repeated attention ends where its steps lead: see above.
            anchors = [a for a in ANCHORS if a > 0 or problem != REPEATED]
            equilibria += [equilibrium(problem, solver, sharpness, anchor, x) for anchor in anchors]
    settings = {"samples": SAMPLES, "tokens": TOKENS, "dim": DIM, "seed": SEED, "steps": STEPS, "rtol": PLAIN.rtol}
    return {"settings": settings, "repeated": repeated, "equilibria": equilibria}


# What is shown of it.


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def tables(run: dict[str, Any]) -> str:
    steps = run["settings"]["steps"]
    rows = []
    for row in run["repeated"]:
        after = {point["step"]: point for point in row["course"]}
        rows.append(
            [
                f"{row['sharpness']:g}",
                f"{row['attention to itself']:.3f}",
                f"{row['first step']:.2g}",
                "more" if row["steps to one token"] is None else str(row["steps to one token"]),
                *(f"{after[step]['distinct']:.3g}, {after[step]['cosine']:.2f}" for step in (10, 100, 1000)),
            ]
        )
    head = ["β√D", "attention to itself", "first step", f"steps to one token (of {steps})"]
    first = table([*head, *(f"tokens, cosine after {step}" for step in (10, 100, 1000))], rows)
    return first + "\n" + equilibrium_table(run["equilibria"])


def equilibrium_table(found: list[dict[str, Any]]) -> str:
    cells = {(row["problem"], row["solver"], row["anchor"], row["sharpness"]): cell(row) for row in found}
    misses = (REPEATED, type(ACCELERATED).__name__)
    lines = list(dict.fromkeys(key[:3] for key in cells if key[2] in SHOWN and key[:2] != misses))
    lines.sort(key=lambda line: [(problem, type(solver).__name__) for problem, solver in SOLVED].index(line[:2]))
    rows, last = [], None
    for line in lines:
        # A problem and its solver are named in their first line.
        named = ("", "") if line[:2] == last else line[:2]
        rows.append([*named, f"{line[2]:g}", *(cells[(*line, s)] for s in COLUMNS)])
        last = line[:2]
    return table(["equilibrium", "solver", "anchor", *(f"β√D = {s:g}" for s in COLUMNS)], rows)


def cell(row: dict[str, Any]) -> str:
    """Cosine and effective rank of the answers, and how many samples have none, by status."""
    failed = [f"{n} {name}" for name, n in row["status"].items() if Status[name].failed]
    answer = [] if row["cosine"] is None else [f"{row['cosine']:.2f} / {row['rank']:.3g}"]
    return ", ".join([*answer, *failed])


def figure(run: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(12.5, 3.7), dpi=DPI, layout="constrained")
    panels = drawing.subplots(1, 4, width_ratios=(1.2, 1.2, 1, 1))
    equilibria = ((REPEATED, PLAIN), (HALF, ACCELERATED))
    for index, row in enumerate(run["repeated"]):
        style = {"color": COLORS[index], "ls": DASHES[index % len(DASHES)], "lw": 1.6, "ms": 4, "clip_on": False}
        style |= {"marker": MARKERS[index], "label": f"{row['sharpness']:g}", "zorder": 3}
        steps = [point["step"] for point in row["course"]]
        for axes, name in zip(panels, ("distinct", "cosine"), strict=False):
            axes.plot(steps, [point[name] for point in row["course"]], **style)
        for axes, (problem, solver) in zip(panels[2:], equilibria, strict=True):
            wanted = (problem, type(solver).__name__, row["sharpness"])
            same = [r for r in run["equilibria"] if (r["problem"], r["solver"], r["sharpness"]) == wanted]
            known = [r for r in same if r["cosine"] is not None]
            axes.plot([r["anchor"] for r in known], [r["cosine"] for r in known], **style)
    decorate(panels, run["settings"])
    handles, labels = panels[0].get_legend_handles_labels()
    drawing.legend(handles, labels, title="β√D", loc="outside right center", fontsize=8, frameon=False)
    drawing.savefig(path)


def decorate(panels: Any, settings: dict[str, Any]) -> None:
    titles = ("repeated self-attention, anchor 0",) * 2 + ("repeated, equilibrium", "energy of weight 1/2, equilibrium")
    labels = ("distinct tokens", *("mean cosine of two tokens",) * 3)
    for axes, title, label in zip(panels, titles, labels, strict=True):
        axes.set_title(title, fontsize=9)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.set_ylim(0, 1)
    panels[0].set_ylim(0, settings["tokens"])
    panels[0].set_yticks(range(0, settings["tokens"] + 1, 16))
    for axes in panels[:2]:
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(0, settings["steps"])
        axes.set_xticks([0, 1, 10, 100, 1000], ["0", "1", "10", "100", "1000"])
        axes.set_xlabel("steps")
    for axes in panels[2:]:
        axes.set_xlim(0, 1)
        axes.set_xlabel("anchor")
    certain = 1 - 2 / (1 + settings["tokens"] ** 0.5)
    panels[3].axvline(certain, color="0.4", lw=1, ls=(0, (1, 2)))
    panels[3].text(certain - 0.02, 0.97, "bounded\nbelow →", fontsize=7, color="0.3", va="top", ha="right")


def updated(page: str, content: str) -> str:
    before, rest = page.split(START)
    return f"{before}{START}\n{content}\n{END}{rest.split(END)[1]}"


def main() -> int:
    if "--check" not in sys.argv:
        torch.set_num_threads(1)
        run = measure()
        (HERE / "collapse.json").write_text(json.dumps(run, indent=1, allow_nan=False) + "\n")
        figure(run, HERE / "collapse.png")
    page = PAGE.read_text()
    new = updated(page, tables(json.loads((HERE / "collapse.json").read_text())))
    if "--check" in sys.argv:
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The suite `native`: what attention costs in short calls, on more threads, beside a neighbour, by instruction set.

`python -m benchmarks.native METRIC SETTING REPEATS SECONDS` measures one row of CONTENDED or SETS in a process of its
own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from implicit_attention import equilibrium_attention

from . import baselines, guard, native_layers
from .compare import CONVERGED, GRADIENT_ERROR, prepared, ratios, statuses
from .environment import environment, native_status
from .measure import TURN_SECONDS, TURNS, Timing, apart, interleaved, interleaved_clocks, once, summary
from .memory import NOT_COUNTED
from .native_tables import tables
from .problems import Data, Setting, Shape, draw, evidence, exact_adjoint, setting_of
from .targets import NATIVE as TARGETS
from .targets import Row

__all__ = ["METRICS", "NOTES", "TARGETS", "run", "settings_of", "tables"]

METRICS = ("SHORT", "LAYER", "THREADS", "CONTENDED", "NEIGHBOUR", "SETS")
#: What `equilibrium_attention` is held to beside the tests of `solve`.
TESTS = (*baselines.OURS, "tests/attention/test_function.py")
#: Which call is over which, by the ratios of SHORT.
SHORT = {
    "explicit": ("explicit", "sdpa_forward"),
    "forward": ("ours_forward", "sdpa_forward"),
    "training": ("ours_training", "sdpa_training"),
    "solution": ("ours_solution", "ours_forward"),
}
#: Turns of a short call, for each round of other rows: their median is what counts.
TURNS_PER_ROUND = 10
#: What is timed with more threads, by the names of its ratios.
THREADED = {
    "SDPA": "sdpa_forward",
    "solve": "ours_forward",
    "SDPA training": "sdpa_training",
    "training": "ours_training",
}
#: Heads, tokens and head dimension of the layers.
LAYERS = ((1, 8, 16), (4, 16, 16), (8, 64, 16))
SETS = {"x86_64": ("avx2", "avx512"), "AMD64": ("avx2", "avx512"), "aarch64": ("neon",), "arm64": ("neon",)}
#: Evaluations between which one more is measured.
FEW, MANY = 2, 12

NOTES = (
    "SHORT: `equilibrium_attention(q, k, v)` over `scaled_dot_product_attention(q, k, v)`, one thread, beta*sqrt(D) 1, "
    "anchor .5, D 64, medians of process time over turns of 10 ms each; `wall` is the same by the clock, "
    "and `spread` is between quartiles. Training steps: gradients for queries, keys and values.",
    "LAYER: `ImplicitAttention(dim, heads)` over the same layer of SDPA with four projections (`packed`: with one for "
    "queries, keys and values), both without autograd, their training steps, and loops of 16 tokens over a cache, by "
    "medians of process time on one thread; and how many frames of Python a call makes. `explicit by hand`, where it "
    "was run: the operations that an explicit step of it needs, and nothing else; what `explicit` takes beyond that is "
    "the library's own.",
    "THREADS: time on one thread / on two. CONTENDED: time of two threads pinned to one core / of one thread there. "
    "NEIGHBOUR: time on two threads while another process spins on one of the two cores / without it.",
    "SETS: the library for one instruction set, forced by IMPLICIT_ATTENTION_NATIVE, and `off`, what an install "
    "without a compiler runs: the solvers' loop over torch's attention kernels (before 2026-11-29 tiles of products); "
    "`evaluation` is what one more evaluation costs in SDPA forwards.",
    "Every query must be CONVERGED, and 99.9 % in float64, or there is no ratio (before 2026-11-29 all, but 2 % off).",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """What one row measures: a metric, the problem, and for SETS what IMPLICIT_ATTENTION_NATIVE is."""

    metric: str
    problem: Setting
    native: str | None = None

    @property
    def name(self) -> str:
        s = self.problem.shape
        forced = "" if self.native is None else f", {self.native}"
        return f"{self.metric}: B {s.batch}, H {s.heads}, N {s.length}, M {s.num_keys or s.length}{forced}"


def settings_of(quick: bool) -> tuple[Case, ...]:
    sizes: tuple[tuple[int, int, int | None], ...] = ((1, 16, None), (8, 64, None))
    if not quick:
        sizes += ((8, 128, None), (8, 256, None), (8, 1, 512), (8, 1, 2048))
    large, sharper = (
        Setting("gaussian", sharpness, anchor, Shape(2, 8, 128 if quick else 512))
        for sharpness, anchor in ((1.0, 0.5), (2.0, 0.0))
    )
    return (
        *(Case("SHORT", Setting("gaussian", 1.0, 0.5, Shape(1, heads, n, 64, m))) for heads, n, m in sizes),
        *(Case("LAYER", Setting("gaussian", 1.0, 0.5, Shape(1, *size))) for size in LAYERS),
        *(Case(metric, large) for metric in ("THREADS", "CONTENDED", "NEIGHBOUR")),
        *(Case("SETS", sharper, native) for native in (*SETS.get(platform.machine(), ()), "off")),
    )


def run(
    settings: Iterable[Case],
    *,
    metrics: Iterable[str] = METRICS,
    repeats: int = 5,
    max_seconds: float = 4.0,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Measure every setting of these metrics; `progress` is called with each finished row."""
    wanted, rows, usual = set(metrics), [], torch.get_num_threads()
    for case in settings:
        if case.metric not in wanted:
            continue
        begin = time.perf_counter()
        row: Row = {"name": case.name, "metric": case.metric, "native": case.native}
        row |= dataclasses.asdict(case.problem) | {"beta": case.problem.beta}
        red, lacking = guard.red(TESTS), unable(case.metric)
        if red is not None or lacking is not None:
            # What is red misses its targets; what cannot be measured here is not measured.
            names = NAMES[case.metric] if red is not None else ()
            row |= {"evidence": {"ours": {"error": red or lacking}}, "seconds": {}, "ratios": dict.fromkeys(names)}
        else:
            row |= MEASURES[case.metric](case, repeats=repeats, max_seconds=max_seconds)
            torch.set_num_threads(usual)
        rows.append({**row, "wall_seconds": time.perf_counter() - begin})
        progress(rows[-1])
    return rows


def unable(metric: str) -> str | None:
    """Why threads and neighbours cannot be measured here."""
    if metric in ("SHORT", "LAYER", "SETS"):
        return None
    if not hasattr(os, "sched_getaffinity"):
        return "not measured: processes cannot be pinned to a core on this system"
    cores = len(os.sched_getaffinity(0))
    return None if cores >= 2 else f"not measured: two cores are needed, got {cores}"


# Short calls.


def short(case: Case, *, repeats: int, max_seconds: float) -> Row:
    """Calls of attention by one thread, by process time and by the clock."""
    torch.set_num_threads(1)
    data = draw(case.problem)
    values = torch.randn(data.keys.shape, generator=torch.Generator().manual_seed(case.problem.seed + 1))
    ours = partial(equilibrium_attention, anchor=case.problem.anchor)
    attentions: dict[str, Callable[..., Any]] = {"sdpa": F.scaled_dot_product_attention, "ours": ours}
    explicit = partial(equilibrium_attention, max_steps=0)
    functions: dict[str, Callable[[], Any]] = {"explicit": partial(explicit, data.queries, data.keys, values)}
    functions["ours_solution"] = partial(ours, data.queries, data.keys, values, return_solution=True)
    found: dict[str, Any] = {
        "explicit": {"output_error": output_error(data, values, data.queries, functions["explicit"]())}
    }
    for name, attention in attentions.items():
        functions[f"{name}_forward"] = partial(attention, data.queries, data.keys, values)
        functions[f"{name}_training"] = training(attention, data, values)
        if name != "sdpa":
            found[name] = answered(attention, data, values, functions[f"{name}_training"])
    for name, evidence_for in found.items():
        if not sound(evidence_for):
            evidence_for["error"] = "not timed, the answer is wrong: see status, residuals and errors"
            functions = {key: function for key, function in functions.items() if key.rsplit("_", 1)[0] != name}
    process, wall = interleaved_clocks(functions, rounds=TURNS_PER_ROUND * repeats, max_seconds=max_seconds)
    return {
        "evidence": found,
        "seconds": _plain(wall),
        "process_seconds": _plain(process),
        "ratios": quotients(SHORT, process),
        "wall_ratios": quotients(SHORT, wall),
    }


def layers(case: Case, *, repeats: int, max_seconds: float) -> Row:
    """Calls of a layer."""
    return native_layers.layer_row(case.problem, rounds=TURNS_PER_ROUND * repeats, max_seconds=max_seconds)


def training(attention: Callable[..., Any], data: Data, values: Tensor) -> Callable[[], tuple[Any, ...]]:
    """Forward, the fixed loss, and its gradients for queries, keys and values."""
    leaves = [t.clone().requires_grad_() for t in (data.queries, data.keys, values)]

    def run() -> tuple[Any, ...]:
        for leaf in leaves:
            leaf.grad = None
        output = attention(*leaves)
        (output * data.cotangent).sum().backward()
        return (output.detach(), *(leaf.grad for leaf in leaves))

    return run


def answered(
    attention: Callable[..., Any], data: Data, values: Tensor, step: Callable[[], tuple[Any, ...]]
) -> dict[str, Any]:
    """Status and float64 errors of an equilibrium, and of the output and gradients of its training step."""
    _, solution = attention(data.queries, data.keys, values, return_solution=True)
    output, *gradients = step()
    evaluations = solution.num_evals.double()
    return {
        "evaluations_mean": float(evaluations.mean()),
        "evaluations_max": int(evaluations.max()),
        "status": statuses(solution.status),
        **evidence(data, solution.value),
        "output_error": output_error(data, values, solution.value, output),
        "gradient_error": gradient_error(data, values, solution.value, gradients),
    }


def sound(found: dict[str, Any]) -> bool:
    """Whether every query is CONVERGED, float64 agrees, and output and gradients are right."""
    solved = "status" not in found or (set(found["status"]) == {"CONVERGED"} and found["converged"] >= CONVERGED)
    right = found["output_error"] <= 1e-4 and found.get("gradient_error", 0.0) <= GRADIENT_ERROR["float32"]
    return solved and right


def output_error(data: Data, values: Tensor, state: Tensor, output: Tensor) -> float:
    """Relative error of what was read out at the state, against float64."""
    weights = (data.setting.beta * state.double() @ data.keys.double().mT).softmax(-1)
    exact = weights @ values.double()
    return float((output.double() - exact).norm() / exact.norm())


def gradient_error(data: Data, values: Tensor, state: Tensor, gradients: list[Tensor]) -> float:
    """Relative error of the gradients for queries, keys and values, the largest, in one head against float64."""
    head = (-1, -1)
    z, keys, values = (t[head].detach().double().requires_grad_() for t in (state, data.keys, values))
    read = (data.setting.beta * z @ keys.T).softmax(-1) @ values
    by_state, direct, by_values = torch.autograd.grad((read * data.cotangent[head].double()).sum(), (z, keys, values))
    u, by_keys = exact_adjoint(data.setting, z.detach(), keys.detach(), by_state)
    exact = (data.setting.anchor * u, by_keys + direct, by_values)
    return max(float((g[head].double() - e).norm() / e.norm()) for g, e in zip(gradients, exact, strict=True))


def quotients(pairs: dict[str, tuple[str, str]], times: dict[str, Timing]) -> dict[str, float | None]:
    return {name: times[a].median / times[b].median if a in times else None for name, (a, b) in pairs.items()}


def _plain(times: dict[str, Timing]) -> dict[str, dict[str, float]]:
    return {name: dataclasses.asdict(timing) for name, timing in times.items()}


# Threads and neighbours.


def threads(case: Case, *, repeats: int, max_seconds: float, guarded: bool = True) -> Row:
    """Times on one and two threads, in turns."""
    torch.set_num_threads(1)
    functions, found, _ = prepared(THREADED.values(), draw(case.problem), NOT_COUNTED, guarded=guarded)
    counted = {f"{name}, {n}": partial(_on, n, f) for name, f in functions.items() for n in (1, 2)}
    # The first calls, by one thread, say nothing of two.
    times = interleaved(counted, dict.fromkeys(counted, 0.0), repeats=repeats, max_seconds=max_seconds)
    above, below = (2, 1) if case.metric == "CONTENDED" else (1, 2)
    pairs = {label: (f"{name}, {above}", f"{name}, {below}") for label, name in THREADED.items()}
    return {"evidence": found, "seconds": _plain(times), "ratios": quotients(pairs, times)}


def _on(count: int, function: Callable[[], Any]) -> Any:
    torch.set_num_threads(count)
    return function()


def neighbour(case: Case, *, repeats: int, max_seconds: float) -> Row:
    """Times on two threads beside a process that spins on one of two cores, and without it, in turns."""
    torch.set_num_threads(2)
    functions, found, _ = prepared(THREADED.values(), draw(case.problem), NOT_COUNTED)
    turns: dict[str, list[float]] = {}
    with spinning() as wake:
        for _ in range(repeats):
            for name, function in functions.items():
                for kind in ("alone", "beside"):
                    past = turns.setdefault(f"{name}, {kind}", [])
                    if past and sum(past) + past[-1] > max_seconds:
                        continue
                    wake(kind == "beside")
                    past.append(TURNS["cpu"](function, 2 * TURN_SECONDS))
                wake(False)
    times = {name: summary(seconds) for name, seconds in turns.items()}
    pairs = {label: (f"{name}, beside", f"{name}, alone") for label, name in THREADED.items()}
    return {"evidence": found, "seconds": _plain(times), "ratios": quotients(pairs, times)}


@contextlib.contextmanager
def spinning() -> Iterator[Callable[[bool], None]]:
    """A process that keeps one of this process's cores busy while what is yielded was last called with True."""
    core = max(os.sched_getaffinity(0))
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield lambda busy: process.send_signal(signal.SIGCONT if busy else signal.SIGSTOP)
    finally:
        process.kill()
        process.communicate()


# In processes of their own.


def apart_from_this(case: Case, *, repeats: int, max_seconds: float) -> Row:
    """The row of a fresh process: with other variables, or pinned to a core."""
    variables = {} if case.native is None else {"IMPLICIT_ATTENTION_NATIVE": case.native}
    problem = json.dumps(dataclasses.asdict(case.problem))
    found = apart("benchmarks.native", case.metric, problem, str(repeats), str(max_seconds), variables=variables)
    if "error" in found:
        found = {"evidence": {"ours": {"error": f"not measured: {found['error']}"}}, "seconds": {}}
        return {**found, "ratios": dict.fromkeys(NAMES[case.metric])}
    return found


def by_set(case: Case, *, repeats: int, max_seconds: float) -> Row:
    """One evaluation, a solve and a training step by what IMPLICIT_ATTENTION_NATIVE has chosen, over SDPA."""
    forced, status = os.environ.get("IMPLICIT_ATTENTION_NATIVE", "off"), native_status()
    if getattr(status, "isa", None) != (None if forced == "off" else forced):
        raise RuntimeError(f"{forced!r} was forced, and this answers: {status}")
    torch.set_num_threads(1)
    data = draw(case.problem)
    names = ("sdpa_forward", "ours_forward", "sdpa_training", "ours_training")
    functions, found, first = prepared(names, data, NOT_COUNTED, guarded=False)
    counts = {}
    for number in (FEW, MANY):
        functions[f"{number}"] = baselines.limited(data, number, training=False)
        result, first[f"{number}"] = once(functions[f"{number}"])
        counts[number] = float(result.evaluations.double().mean())
    times = interleaved(functions, first, repeats=repeats, max_seconds=max_seconds)
    more = (times[f"{MANY}"].median - times[f"{FEW}"].median) / (counts[MANY] - counts[FEW])
    wanted = {"solve": ("ours_forward", "sdpa_forward"), "training": ("ours_training", "sdpa_training")}
    made = {"evaluation": more / times["sdpa_forward"].median, **ratios(wanted, times)}
    return {
        "evidence": found,
        "seconds": _plain(times),
        "ratios": made,
        "implementation": environment().get("native"),
    }


def main(metric: str, argument: str, repeats: str, max_seconds: str) -> None:
    """Measure one row and print it. A process is pinned once torch is loaded, whose threads know of two cores."""
    case = Case(metric, setting_of(argument))
    if metric == "CONTENDED":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        row = threads(case, repeats=int(repeats), max_seconds=float(max_seconds), guarded=False)
    else:
        row = by_set(case, repeats=int(repeats), max_seconds=float(max_seconds))
    print(json.dumps(row))


MEASURES: dict[str, Callable[..., Row]] = {
    "SHORT": short,
    "LAYER": layers,
    "THREADS": threads,
    "CONTENDED": apart_from_this,
    "NEIGHBOUR": neighbour,
    "SETS": apart_from_this,
}
#: The ratios of a row, which are None where nothing could be measured.
NAMES = dict.fromkeys(METRICS, tuple(THREADED)) | {
    "SHORT": tuple(SHORT),
    "LAYER": native_layers.NAMES,
    "SETS": ("evaluation", "solve", "training"),
}

if __name__ == "__main__":
    main(*sys.argv[1:])

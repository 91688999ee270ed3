"""The suite `spins`: C6, scaling with sites, failures on random systems, forwards of small ones, and graphs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

from . import guard, spin_graphs, spin_random, spin_scaling, spin_small, spin_timed
from .spin_problems import Many, OnGraph, Sized, Timed
from .spin_small import Frames, Small
from .spin_tables import GRAPH_RATIOS, tables
from .targets import SPINS as TARGETS
from .targets import Row

__all__ = ["COMPOSED", "METRICS", "NOTES", "TARGETS", "run", "settings_of", "tables"]

Setting = Timed | Sized | Many | Small | Frames | OnGraph
METRICS = ("C6", "SCALING", "RANDOM", "SMALL", "FRAMES", "GRAPHS")
#: Each metric comes from its own newest run.
COMPOSED = True
#: What must pass before a metric is measured, and the ratios that it has no answer for otherwise.
TESTS = {
    "C6": ("tests/spins/test_minimum.py", "tests/spins/test_saddle_point_samples.py"),
    "SCALING": ("tests/spins/test_support.py",),
    "RANDOM": ("tests/spins/test_support.py",),
    "SMALL": ("tests/spins/test_support.py",),
    "FRAMES": ("tests/spins/test_support.py",),
    "GRAPHS": ("tests/spins/test_bethe.py",),
}
REFUSED: dict[str, dict[str, None]] = {
    "C6": {"C6": None, "C6 failures": None},
    "SCALING": {},
    "RANDOM": {"failures": None},
    "SMALL": {"forward / by hand": None},
    "FRAMES": {},
    "GRAPHS": dict.fromkeys(("seconds", *GRAPH_RATIOS)),
}

NOTES = (
    "C6: one step is `free_energy(system, SaddlePoint())` and the gradient of its sum by field, couplings and beta. "
    "The rival minimises the same convex function to the same tolerance, with torch.linalg.inv of A and of the Hessian "
    "at every step, all samples until the slowest is done, steps halved by a Cholesky test and where phi does not "
    "fall, and its gradient by one Newton step through autograd of the same inverses. It starts from Gershgorin's "
    "discs; `same start`: from the library's guess. `constant`: at constant multipliers instead, right for first "
    "derivatives only. `forward`: F without a gradient.",
    "`matrices`: the part of our time that LAPACK and BLAS take for the Cholesky factors, inverses and products of our "
    "steps when nothing else is done, in the same run: 2 n + 1 factors, n + 1 inverses and 2 n + 2 products for n "
    "evaluations. It bounds what fewer passes over matrices could bring.",
    "float32 is solved to what the dtype resolves, as the library reports it, by both.",
    "Scaling: seconds for F, U, S, C and m of one sample in float64 (m, delayed correlations and entropy production of "
    "the two closures of dynamics); the exponent is fitted over sizes from 128 that take at least 0.02 s. A size that "
    "by the growth so far takes longer than the cap is left out.",
    "Random systems: N 2 to 64, D 1, 3 and 8, beta 0.01 to 100, eight kinds of couplings, fields 0 to 10. An answer "
    "of the saddle point counts as a failure if its status says so, or if an explicit inverse at its multipliers "
    "finds a length off by more than its tolerance or A not positive definite. Other methods may have "
    "several solutions or none: their failures are what their status says, until their time is up.",
    "Small systems: one thread, float64, process time, lower quartiles; `magnetization` in a method's defaults over "
    "the faster of two loops by hand, plain steps and Anderson's over five, that start where it does, read the same "
    "map and end at the residual that its answer has. The loops check nothing, report nothing and go on until the "
    "slowest sample is done. `evidence`: over the faster of two such loops that give each sample's state, residual, "
    "status and evaluations at its end, Anderson's with the safeguard of the solver, in as few calls of torch and "
    "numpy as they need. `published`: the law of large D, `LargeDResponse()`, over the same loops with the formula "
    "of the published module. Frames: how many frames of Python one call of `thermodynamics` makes.",
    "Graphs: `magnetization` of one sample, two threads, medians of a few calls after the first; from 10,000 sites on "
    "in a process of its own. Couplings 1 on a torus, standard normal on random 3-regular graphs, fields a tenth of a "
    "standard normal. `plain`: steps of messages alone, to the same relative tolerance. A sweep is one step of "
    "messages, NumPy's on one thread with what does not change prepared. Gradient: for fields and values, beyond the "
    "forward. GB: resident memory of the first call above its inputs. Products: the same number of products of a "
    "vector with torch's sparse CSR matrices, two for each evaluation of `TAP()`. pgmax: its steps, 60 in a call, "
    "where it is installed: `pip install --no-deps pgmax==0.6.1 jax==0.4.30 jaxlib==0.4.30 ml_dtypes opt_einsum numba "
    "llvmlite`.",
)


def settings_of(quick: bool) -> tuple[Setting, ...]:
    timed = spin_timed.QUICK if quick else spin_timed.SETTINGS
    # Short calls take up to twice their time in a process in which large ones ran.
    parts = (
        spin_small.settings(quick=quick),
        timed,
        spin_scaling.settings(quick=quick),
        spin_random.settings(quick=quick),
        spin_graphs.settings(quick=quick),
    )
    return tuple(setting for settings in parts for setting in settings)


def run(
    settings: Iterable[Setting],
    *,
    metrics: Iterable[str] = METRICS,
    repeats: int = 5,
    max_seconds: float = 4.0,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Measure every setting of these metrics; `progress` is called with each finished row."""
    wanted, rows = set(metrics), []
    for setting in settings:
        if setting.metric in wanted:
            begin = time.perf_counter()
            row: dict[str, Any] = {"name": setting.name, "metric": setting.metric}
            if (reason := guard.red(TESTS[setting.metric])) is not None:
                row |= dataclasses.asdict(setting)
                row |= {"error": reason, "evidence": {}, "seconds": {}, "ratios": REFUSED[setting.metric]}
            else:
                row |= _measured(setting, repeats, max_seconds)
            rows.append({**row, "wall_seconds": time.perf_counter() - begin})
            progress(rows[-1])
    return rows


def _measured(setting: Setting, repeats: int, max_seconds: float) -> Row:
    if isinstance(setting, Timed):
        return spin_timed.measured(setting, repeats=repeats, max_seconds=max_seconds)
    if isinstance(setting, Sized):
        return spin_scaling.measured(setting, repeats=repeats, max_seconds=max_seconds)
    if isinstance(setting, OnGraph):
        return spin_graphs.measured(setting, repeats=repeats, max_seconds=max_seconds)
    if isinstance(setting, Small | Frames):
        return spin_small.measured(setting, repeats=repeats, max_seconds=max_seconds)
    return spin_random.measured(setting)

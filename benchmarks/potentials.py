"""The suite `potentials`: the other potentials over keys beside `LogSumExp`, in time, memory, and trained on digits.

`python -m benchmarks.potentials SETTING STEP` measures the peak memory of one evaluation in a process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from implicit_attention import AnchoredEnergy, Anderson, LogSumExp, Potential, solve
from implicit_attention.potentials import (
    DistanceLogSumExp,
    Entmax,
    KernelPotential,
    NormalisedScores,
    Polynomial,
    Softmax1,
)

from . import guard, memory
from .measure import apart, interleaved, once
from .potentials_trained import BESIDE, TRAINED, Factory, cells, learned, positive
from .report import HERE, RESULTS, Table, between, markdown_table, newest_by_metric, number, spread
from .targets import POTENTIALS as TARGETS
from .targets import Row

__all__ = ["COMPOSED", "METRICS", "NOTES", "TARGETS", "run", "settings_of", "tables"]

COMPOSED = True
METRICS = ("FUSED", "UNFUSED", "KERNEL", "DIGITS")
TESTS = tuple(f"tests/potentials/test_{name}.py" for name in ("entmax", "distance", "softmax1", "over_keys"))
PAGE = HERE.parent / "docs" / "potentials.md"
#: Of DIGITS, what the page shows: the references, the default, the best, and the one with most failures.
SHOWN = (
    *("one explicit step", "no attention", "LogSumExp", "DistanceLogSumExp"),
    *("KernelPotential, elu + 1", "KernelPotential, ReLU"),
)

NOTES = (
    "FUSED: solve (relative residual 1e-4, anchor .5) and training step, Gaussian keys, beta 1/sqrt(D), over those of "
    "`LogSumExp`, both by its operations. UNFUSED: value and mean at one state over those of `LogSumExp` written out "
    "(`written_out()`); `solve`: to 1e-6 over its solve with impl='reference', with anchor .5 and beta 1/sqrt(D), and "
    "(`retrieval`) with anchor 0 and beta 1 from keys with noise.",
    "KERNEL: the mean at one state, 64 features, N = M = 4096, over that of `LogSumExp`, fused and written out; peak "
    "memory above the inputs, each in a process of its own; the answer alone is all that the fused one needs.",
    "DIGITS: one block around `ImplicitAttention(readout='state')` trained on digits with each potential, as in "
    "`usefulness`: learning rate by validation, three seeds. `gradient`: mean norm of all gradients before clipping in "
    "training. `evaluations` of a query and `converged` on held-out digits; failures in training, of so many "
    "solves. The quadratic ones have beta .001 and anchor .95: with those of the others they are not bounded below.",
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The metric, the potential and the sizes of one row."""

    metric: str
    potential: str
    batch: int = 2
    heads: int = 8
    length: int = 512
    dim: int = 64
    rtol: float = 1e-4
    seed: int = 0
    device: str = "cpu"
    steps: int = 400

    @property
    def name(self) -> str:
        return f"{self.metric}: {self.potential}"


#: Timed: name -> factory.
FACTORIES: dict[str, Factory] = {
    "Softmax1": Softmax1,
    "DistanceLogSumExp": DistanceLogSumExp,
    "Entmax, alpha 1.5": Entmax,
    "Entmax, alpha 2": partial(Entmax, alpha=2.0),
    "Entmax, alpha 1.3": partial(Entmax, alpha=1.3),
    "Entmax, alpha per head": lambda keys, beta, **pairs: Entmax(
        keys, beta, alpha=torch.linspace(1.2, 1.8, keys.shape[-3]), **pairs
    ),
    "Polynomial, degree 2": Polynomial,
    "Polynomial, degree 3": partial(Polynomial, degree=3),
    "NormalisedScores": NormalisedScores,
}
FUSED = ("Softmax1", "DistanceLogSumExp")


def settings_of(quick: bool, device: str | None = None) -> tuple[Setting, ...]:
    """The rows of a run; all on a CPU."""
    size = {"length": 64, "heads": 2, "steps": 10} if quick else {}
    long = 512 if quick else 4096
    return (
        *(Setting("FUSED", name, **size) for name in FUSED),
        *(Setting("UNFUSED", name, **size) for name in FACTORIES if name not in FUSED),
        Setting("KERNEL", "KernelPotential, positive features", batch=1, heads=1, length=long),
        *(Setting("DIGITS", name, **size) for name in (*BESIDE, *TRAINED)),
    )


def run(
    settings: Iterable[Setting],
    *,
    metrics: Iterable[str] = METRICS,
    repeats: int = 5,
    max_seconds: float = 4.0,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Measure every setting of these metrics; `progress` is called with each finished row."""
    wanted, threads = set(metrics), torch.get_num_threads()
    chosen = [setting for setting in settings if setting.metric in wanted]
    red, rows = guard.red(TESTS) if chosen else None, []
    torch.set_num_threads(1)
    timers = {"FUSED": fused, "UNFUSED": unfused, "KERNEL": kernel}
    for setting in chosen:
        if setting.metric == "DIGITS":
            continue
        begin = time.perf_counter()
        found = _failed(red) if red else timers[setting.metric](setting, repeats=repeats, max_seconds=max_seconds)
        rows.append(_row(setting, found, begin))
        progress(rows[-1])
    trained = [setting for setting in chosen if setting.metric == "DIGITS"]
    if trained:
        # Trainings take no time of each other on two cores, and none is timed.
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            begin = time.perf_counter()
            for setting, found in zip(trained, pool.imap(_learned, trained), strict=True):
                rows.append(_row(setting, found, begin))
                progress(rows[-1])
                begin = time.perf_counter()
    torch.set_num_threads(threads)
    return rows


def _row(setting: Setting, found: Row, begin: float) -> Row:
    return {"name": setting.name, **dataclasses.asdict(setting), **found, "wall_seconds": time.perf_counter() - begin}


def _learned(setting: Setting) -> Row:
    return learned(setting.potential, setting.steps)


def _failed(reason: str) -> Row:
    return {"evidence": {"ours": {"error": reason}}, "seconds": {}, "ratios": {}}


# Times.


def tensors(setting: Setting, *, noise: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and one beta per head; with `noise` the queries are keys with so much of it."""
    torch.manual_seed(setting.seed)
    shape = (setting.batch, setting.heads, setting.length, setting.dim)
    keys, other = torch.randn(shape), torch.randn(shape)
    query = other if noise is None else keys + noise * other
    return query, keys, torch.full((setting.heads,), setting.dim**-0.5)


def _timed(functions: dict[str, Callable[[], Any]], repeats: int, max_seconds: float) -> tuple[dict[str, Any], Any]:
    for function in functions.values():
        function()
    first = {name: once(function, "cpu")[1] for name, function in functions.items()}
    times = interleaved(functions, first, repeats=repeats, max_seconds=max_seconds)
    return {name: dataclasses.asdict(timing) for name, timing in times.items()}, {n: t.median for n, t in times.items()}


def _solved(make: Factory, given: tuple[Tensor, Tensor, Tensor], anchor: float, **options: Any) -> Any:
    query, keys, beta = given
    return solve(AnchoredEnergy(make(keys, beta), query, anchor), query.detach(), on_failure="ignore", **options)


def _evidence(solution: Any) -> dict[str, float]:
    return {
        "evaluations": float(solution.num_evals.double().mean()),
        "converged": float(solution.converged.double().mean()),
        "residual / tolerance": float((solution.residual / solution.tolerance).max()),
    }


#: Rounds of FUSED for each of the others, whose ratios are not asked for to a tenth.
ROUNDS = 8


def fused(setting: Setting, *, repeats: int, max_seconds: float) -> Row:
    """Solve and training step of a potential that is a `LogSumExp` of others, over those of `LogSumExp`."""
    given, make, functions, found = tensors(setting), FACTORIES[setting.potential], {}, {}
    for name, each in (("ours", make), ("log-sum-exp", LogSumExp)):
        solution = torch.no_grad()(_solved)(each, given, 0.5, solver=Anderson(rtol=setting.rtol))
        found[name] = _evidence(solution)

        def training(each: Factory = each) -> None:
            leaves = tuple(t.detach().requires_grad_() for t in given)
            _solved(each, leaves, 0.5, solver=Anderson(rtol=setting.rtol)).value.sum().backward()

        functions[f"{name}, solve"] = partial(
            torch.no_grad()(_solved), each, given, 0.5, solver=Anderson(rtol=setting.rtol)
        )
        functions[f"{name}, training"] = training
    seconds, ms = _timed(functions, ROUNDS * repeats, ROUNDS * max_seconds)
    ratios = {kind: ms[f"ours, {kind}"] / ms[f"log-sum-exp, {kind}"] for kind in ("solve", "training")}
    return {"evidence": found, "seconds": seconds, "ratios": ratios}


def unfused(setting: Setting, *, repeats: int, max_seconds: float) -> Row:
    """One evaluation, and for `Entmax` a solve to 1e-6, over those of `LogSumExp` written out."""
    query, keys, beta = given = tensors(setting)
    make = FACTORIES[setting.potential]
    ours, theirs = make(keys, beta), LogSumExp(keys, beta).written_out()
    functions: dict[str, Callable[[], Any]] = {
        "ours, evaluation": torch.no_grad()(lambda: ours.evaluate(query)),
        "log-sum-exp, evaluation": torch.no_grad()(lambda: theirs.evaluate(query)),
    }
    found: dict[str, Any] = {}
    if setting.potential.startswith("Entmax"):
        noisy, stored, _ = tensors(setting, noise=0.5)
        retrieval = (noisy, stored, torch.ones(setting.heads))
        exact = Anderson(rtol=1e-6)
        for kind, data, anchor in (("solve", given, 0.5), ("retrieval", retrieval, 0.0)):
            for name, each, impl in (("ours", make, "auto"), ("log-sum-exp", LogSumExp, "reference")):
                call = partial(torch.no_grad()(_solved), each, data, anchor, solver=exact, impl=impl)
                functions[f"{name}, {kind}"] = call
                found[f"{name}, {kind}"] = _evidence(call())
    seconds, ms = _timed(functions, repeats, max_seconds)
    kinds = [name.removeprefix("ours, ") for name in functions if name.startswith("ours")]
    ratios = {kind: ms[f"ours, {kind}"] / ms[f"log-sum-exp, {kind}"] for kind in kinds}
    return {"evidence": found, "seconds": seconds, "ratios": ratios}


# Time and memory of feature maps.


def kernel(setting: Setting, *, repeats: int, max_seconds: float) -> Row:
    """The mean by features over that of `LogSumExp`, in time and memory."""
    steps = {name: step_of(name, setting) for name in ("features", "log-sum-exp", "written out")}
    seconds, ms = _timed(steps, repeats, max_seconds)
    peaks = {name: apart("benchmarks.potentials", _argument(setting), name) for name in steps}
    ratios: dict[str, float | None] = {}
    for other, label in (("log-sum-exp", "fused"), ("written out", "written out")):
        ratios[f"evaluation / {label}"] = ms["features"] / ms[other]
        ours, theirs = (peaks[name].get("peak_bytes") for name in ("features", other))
        ratios[f"memory / {label}"] = ours / theirs if ours and theirs else None
    return {"evidence": peaks, "seconds": seconds, "ratios": ratios}


def step_of(name: str, setting: Setting) -> Callable[[], Any]:
    """One evaluation of the mean: by `features`, by `log-sum-exp`, or by that `written out`."""
    query, keys, beta = tensors(setting)
    if name == "features":
        phi: Potential = KernelPotential(keys, beta, features=positive(keys))
    else:
        softmax = LogSumExp(keys, beta)
        phi = softmax.written_out() if name == "written out" else softmax
    return torch.no_grad()(lambda: phi.mean(query))


def _argument(setting: Setting) -> str:
    return json.dumps(dataclasses.asdict(setting))


def main(argument: str, name: str) -> None:
    """Warm up on a few tokens, take the step once, and print what it needed."""
    setting = Setting(**json.loads(argument))
    step_of(name, dataclasses.replace(setting, length=64))()
    step = step_of(name, setting)
    before = memory.begin(setting.device)
    step()
    print(json.dumps({"peak_bytes": memory.peak(setting.device) - before, "baseline_bytes": before}))


# Tables.


def tables(run: dict[str, Any]) -> list[Table]:
    """Ratios of times and memory, and what was learned."""
    timed, made = [row for row in run["rows"] if row["metric"] in ("FUSED", "UNFUSED", "KERNEL")], []
    for metric in ("FUSED", "UNFUSED", "KERNEL"):
        rows = [row for row in timed if row["metric"] == metric]
        if rows:
            columns = list(dict.fromkeys(key for row in rows for key in row["ratios"]))
            lines = [
                [row["potential"], *(number(row["ratios"].get(key)) for key in columns), spread(row["seconds"])]
                for row in rows
            ]
            row = rows[0]
            sizes = f"B {row['batch']}, H {row['heads']}, N = M = {row['length']}, D {row['dim']}"
            title = f"{metric}: over `LogSumExp`; {sizes}, float32, one thread:"
            made.append(Table(metric.lower(), title, ["potential", *columns, "spread"], lines))
    trained = [row for row in run["rows"] if row["metric"] == "DIGITS"]
    if trained:
        header = [
            "potential",
            "accuracy, %",
            "+-",
            "gradient",
            "evaluations",
            "converged, %",
            "failed forward",
            "backward",
        ]
        lines = [[row["potential"], *cells(row["evidence"])] for row in trained]
        made.append(Table("digits", "DIGITS: trained with each potential, held-out digits:", header, lines))
    return made


def rewrite(page: Path = PAGE, folder: Path = RESULTS) -> None:
    """Put what the newest run of DIGITS says into the page of potentials."""
    content = "Not run yet."
    for path, run in newest_by_metric("potentials", ("DIGITS",), folder):
        (table,) = tables(run)
        rows = [table.header, *(line for line in table.lines if line[0] in SHOWN)]
        header, *lines = ([name, accuracy, error, failed] for name, accuracy, error, _, _, _, failed, _ in rows)
        content = f"{markdown_table(header, lines)}\n\nFrom `benchmarks/results/{path.name}`."
    between(page, "<!-- potentials: python -m benchmarks report -->", "<!-- end of potentials -->", content)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The suite `spin_layers`: `SpinAttention` beside explicit attention, its evaluations and unrolled steps; its memory.

`python -m benchmarks.spin_layers SETTING STEP` measures the peak memory of one step in a process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from implicit_attention import Picard
from implicit_attention.layers import SpinAttention
from implicit_attention.layers.couplings import LowRankCouplings
from implicit_attention.spins import (
    AmosResponse,
    GaussianClosure,
    MeanField,
    SaddlePoint,
    SpinSystem,
    free_energy,
    magnetization,
)

from . import guard, memory
from .environment import default_device
from .measure import Timing, apart, interleaved, once
from .report import Table, number, spread
from .targets import SPIN_LAYERS as TARGETS
from .targets import Row

__all__ = ["METRICS", "NOTES", "TARGETS", "run", "settings_of", "tables"]

METRICS = ("SPIN", "GROWTH", "LONG")
TESTS = ("tests/layers/test_spin.py",)
#: More steps than any unrolled layer takes here.
MOST_STEPS = 200
#: Sites of the saddle point, whose steps are cubic in them.
SADDLE_SITES = 128
RANK = 32
#: Names of the steps whose memory is compared: the larger over the smaller one.
PAIRS = {"GROWTH": ("evaluations 40", "evaluations 5"), "LONG": ("low_rank", "dense")}

NOTES = (
    "SPIN: one thread, softmax couplings between all pairs of tokens, MeanField(AmosResponse()) at beta .5. SDPA: "
    "forward, and its gradients for queries, keys and values. `solve`: magnetizations of given couplings, with all "
    "checks, over evaluations x one evaluation. Training steps are of the layer with projections. "
    "`unrolled`: the layer with as many `steps` as reach the same residual.",
    "`saddle point`: its answer / its free energy with the gradient (what C6 times), 128 sites.",
    "GROWTH: peak memory of a training step above its inputs with 40 evaluations / with 5. LONG: of a forward with "
    "low-rank couplings, rank 32 / with symmetric ones of every pair. Each in a process of its own.",
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one row measures: a metric, the sizes of the layer, and its relative tolerance."""

    metric: str
    length: int
    batch: int = 2
    heads: int = 4
    dim: int = 64
    rtol: float = 1e-4
    seed: int = 0
    device: str = "cpu"

    @property
    def name(self) -> str:
        return f"{self.metric}: B {self.batch}, H {self.heads}, N {self.length}, D {self.dim}, to {self.rtol:g}"


def settings_of(quick: bool, device: str | None = None) -> tuple[Setting, ...]:
    """The rows of a run, on the GPU if there is one."""
    device = default_device() if device is None else device
    lengths, growth, long = ((64,), 64, 256) if quick else ((256, 1024), 256, 4096)
    return (
        *(Setting("SPIN", length, device=device) for length in lengths),
        Setting("GROWTH", growth, device=device),
        Setting("LONG", long, batch=1, heads=1, device=device),
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
    wanted, rows, threads = set(metrics), [], torch.get_num_threads()
    for setting in settings:
        if setting.metric in wanted:
            begin = time.perf_counter()
            row: Row = {"name": setting.name, **dataclasses.asdict(setting)}
            if (reason := guard.red(TESTS)) is not None:
                row |= {"evidence": {"ours": {"error": reason}}, "seconds": {}, "ratios": {setting.metric: None}}
            elif setting.metric == "SPIN":
                torch.set_num_threads(1)
                row |= timed(setting, repeats=repeats, max_seconds=max_seconds)
                torch.set_num_threads(threads)
            else:
                row |= remembered(setting)
            rows.append({**row, "wall_seconds": time.perf_counter() - begin})
            progress(rows[-1])
    return rows


def layer_of(setting: Setting, **options: Any) -> SpinAttention:
    torch.manual_seed(setting.seed)
    if "steps" not in options and "solver" not in options:
        options = {"method": MeanField(response=AmosResponse(), rtol=setting.rtol), **options}
    layer = SpinAttention(setting.heads * setting.dim, setting.heads, on_failure="ignore", **options)
    return layer.to(setting.device)


def tokens_of(setting: Setting) -> Tensor:
    torch.manual_seed(setting.seed + 1)
    return torch.randn(setting.batch, setting.length, setting.heads * setting.dim).to(setting.device)


def training(layer: SpinAttention, x: Tensor) -> Callable[[], None]:
    """Forward pass and gradients for the weights."""

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        layer(x).sum().backward()

    return step


def residual(system: SpinSystem, m: Tensor) -> float:
    """The largest |response(h + J m) - m| / |response(h + J m)| over the samples, measured anew."""
    mapped = AmosResponse().magnetization(system.live_field + system.couplings @ m, system.beta, system.radius)
    sizes = [torch.linalg.vector_norm(t.double().flatten(-2), dim=-1) for t in (mapped - m, mapped)]
    return float((sizes[0] / sizes[1]).max())


def timed(setting: Setting, *, repeats: int, max_seconds: float) -> Row:
    """Times of the layer and its parts in turns with explicit attention."""
    layer, total, x = layer_of(setting), layer_of(setting, derivative="total"), tokens_of(setting)
    shape = (setting.batch, setting.heads, setting.length, setting.dim)
    field = F.rms_norm(torch.randn(shape), shape[-1:]).to(setting.device)
    q, k, v = (torch.randn(shape).to(setting.device).requires_grad_() for _ in range(3))
    pairs = ~torch.eye(setting.length, dtype=torch.bool, device=setting.device)
    with torch.no_grad():
        system = SpinSystem(layer.couplings(field, pairs), field, layer.beta().detach())
        method: Any = layer.method
        problem, start = method.problem(system), method.start(system)
        answer = method.answer(system)
        found = {
            "evaluations": int(answer.report.num_evals.max()),
            "residual": residual(system, answer.magnetization),
            "converged": float(answer.report.converged.double().mean()),
        }
        steps, m = 0, start
        while residual(system, m) > found["residual"] and steps < MOST_STEPS:
            steps, m = steps + 1, problem.fixed_point_map(m)
    if found["residual"] > setting.rtol:
        found["error"] = "not timed, the measured residual is above the tolerance"
        return {"evidence": {"ours": found}, "seconds": {}, "ratios": {"evaluation": None, "training": None}}
    unrolled = layer_of(setting, steps=max(steps, 1))
    closure = GaussianClosure(response=AmosResponse(), rtol=setting.rtol)
    small, saddle = field[..., :SADDLE_SITES, :], SaddlePoint()
    cubic = SpinSystem(layer.couplings(small, pairs[:SADDLE_SITES, :SADDLE_SITES]).detach(), small.detach(), 0.5)

    def explicit() -> None:
        for each in (q, k, v):
            each.grad = None
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    def slope() -> None:
        leaf = small.detach().requires_grad_()
        free_energy(SpinSystem(cubic.couplings, leaf, 0.5), saddle).sum().backward()

    def answered(method: Any, system: SpinSystem) -> Callable[[], Any]:
        return torch.no_grad()(lambda: magnetization(system, method, on_failure="ignore"))

    functions: dict[str, Callable[[], Any]] = {
        "sdpa": torch.no_grad()(lambda: F.scaled_dot_product_attention(q, k, v)),
        "sdpa training": explicit,
        "evaluation": torch.no_grad()(lambda: problem.fixed_point_map(start)),
        "couplings": torch.no_grad()(lambda: layer.couplings(field, pairs)),
        "solve": answered(method, system),
        "layer": torch.no_grad()(lambda: layer(x)),
        "training": training(layer, x),
        "total training": training(total, x),
        "unrolled training": training(unrolled, x),
        "closure": answered(closure, system),
        "saddle point": answered(saddle, cubic),
        "saddle point, slope of F": slope,
    }
    for function in functions.values():
        # The first call of all loads what is loaded once.
        function()
    first = {name: once(function, setting.device)[1] for name, function in functions.items()}
    times = interleaved(functions, first, repeats=repeats, max_seconds=max_seconds, device=setting.device)
    return {
        "evidence": {"ours": found, "unrolled": {"evaluations": steps}},
        "seconds": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "ratios": _ratios(times, found["evaluations"]),
    }


def _ratios(times: dict[str, Timing], evaluations: int) -> dict[str, float | None]:
    ms = {name: timing.median for name, timing in times.items()}
    return {
        "evaluation": ms["evaluation"] / ms["sdpa"],
        "couplings": ms["couplings"] / ms["sdpa"],
        "solve": ms["solve"] / (evaluations * ms["evaluation"]),
        "forward": ms["layer"] / ms["sdpa"],
        "training": ms["training"] / ms["sdpa training"],
        "total training": ms["total training"] / ms["sdpa training"],
        "unrolled / ours": ms["unrolled training"] / ms["training"],
        "closure / mean field": ms["closure"] / ms["solve"],
        "saddle point / slope of F": ms["saddle point"] / ms["saddle point, slope of F"],
    }


def remembered(setting: Setting) -> Row:
    """The ratio of the peaks of two steps."""
    names = PAIRS[setting.metric]
    found = {name: peak_of(setting, name) for name in names}
    larger, smaller = (part.get("peak_bytes") for part in found.values())
    ratio = larger / smaller if larger and smaller else None
    return {"evidence": found, "seconds": {}, "ratios": {setting.metric: ratio}}


def peak_of(setting: Setting, name: str) -> dict[str, Any]:
    """Peak bytes of the step above the inputs, measured in a process of its own; or the error that it ended with."""
    return apart("benchmarks.spin_layers", json.dumps(dataclasses.asdict(setting)), name)


def step_of(name: str, setting: Setting) -> Callable[[], Any]:
    """The training step `evaluations K`, or the forward of a layer with couplings `low_rank` or `dense`."""
    x = tokens_of(setting)
    kind, _, count = name.partition(" ")
    if kind == "evaluations":
        # A tolerance that is never reached: converged or not, the adjoint is solved where the steps end.
        exactly = Picard(rtol=0.0, atol=1e-30, max_steps=int(count) - 1)
        return training(layer_of(setting, solver=exactly, method=MeanField(response=AmosResponse())), x)
    couplings = LowRankCouplings(setting.heads, setting.dim, rank=RANK) if kind == "low_rank" else "symmetric"
    layer = layer_of(setting, couplings=couplings)
    return torch.no_grad()(lambda: layer(x))


def main(argument: str, name: str) -> None:
    """Warm up on a few tokens, take the step once, and print what it needed."""
    setting = Setting(**json.loads(argument))
    step_of(name, dataclasses.replace(setting, length=16))()
    step = step_of(name, setting)
    before = memory.begin(setting.device)
    step()
    print(json.dumps({"peak_bytes": memory.peak(setting.device) - before, "baseline_bytes": before}))


def tables(run: dict[str, Any]) -> list[Table]:
    """Times by length, and memory."""
    timed, made = [row for row in run["rows"] if row["metric"] == "SPIN"], []
    if timed:
        columns = list(timed[0]["ratios"])
        lines = []
        for row in timed:
            found = row["evidence"]["ours"]
            evidence = [str(found.get("evaluations", "-")), f"{found['residual']:.0e}" if "residual" in found else "-"]
            unrolled = str(row["evidence"].get("unrolled", {}).get("evaluations", "-"))
            ratios = [number(row["ratios"].get(name)) for name in columns]
            lines.append([str(row["length"]), *evidence, unrolled, *ratios, spread(row["seconds"])])
        header = ["N", "evaluations", "max residual", "unrolled steps", *columns, "spread"]
        row = timed[0]
        sizes = f"B {row['batch']}, H {row['heads']}, D {row['dim']}, float32, to {row['rtol']:g}"
        made.append(Table("spin layers", f"SPIN: the spin layer, in units as said below; {sizes}:", header, lines))
    peaks = [row for row in run["rows"] if row["metric"] in PAIRS]
    if peaks:
        lines = []
        for row in peaks:
            parts = [
                f"{name}: {part['peak_bytes'] / 2**20:.0f} MiB" if "peak_bytes" in part else f"{name}: {part['error']}"
                for name, part in row["evidence"].items()
            ]
            lines.append([row["name"], ", ".join(parts), number(row["ratios"][row["metric"]])])
        made.append(Table("memory", "Peak memory of a step:", ["step", "peaks", "ratio"], lines))
    return made


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The forward pass of a block as a fixed point, over a bare loop of as many evaluations: what a solver costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from implicit_attention import Anderson, Equilibrium, Picard
from implicit_attention.studies.measure import one_thread

from . import by_hand, guard
from .block_equilibrium import HISTORY, TEN, TESTS, Data, EquilibriumSetting, draw, relative_residual
from .by_hand import Ends
from .measure import interleaved_clocks
from .targets import Row

RATIOS = {
    "picard / bare": ("picard", "bare picard"),
    "by hand / bare": ("by hand", "bare picard"),
    "anderson / bare": ("anderson", "bare anderson"),
    "anderson by hand / bare": ("anderson by hand", "bare anderson"),
    "picard by torch / bare": ("picard by torch", "bare picard"),
    "anderson by torch / bare": ("anderson by torch", "bare anderson"),
}


class TorchPicard(Picard):
    """Plain steps by torch: the native function `step` makes those of the library's own class alone."""


class TorchAnderson(Anderson):
    """The same of Anderson's steps."""


BY_TORCH = {"picard": TorchPicard, "anderson": TorchAnderson}
#: Evaluations after which a loop by hand is given up, as the layer is.
MOST = 201


@dataclasses.dataclass(frozen=True)
class ForwardSetting(EquilibriumSetting):
    """Sizes of the block whose forward pass is timed, without a graph."""

    @property
    def name(self) -> str:
        return f"forward of a {super().name}"


SETTINGS = tuple(ForwardSetting(**dataclasses.asdict(TEN[i])) for i in (0, 1, 2, 3, 7))


def loops(data: Data, rtol: float) -> dict[str, Callable[[], Ends]]:
    """Loops by hand with the evidence of the layer: plain steps and Anderson's."""
    step, start = partial(_step, data), partial(torch.zeros_like, data.x)
    return {
        "by hand": lambda: by_hand.plain(step, start(), rtol, most=MOST),
        "anderson by hand": lambda: by_hand.anderson(step, start(), rtol, history=HISTORY, most=MOST),
    }


def _step(data: Data, z: Tensor) -> Tensor:
    return data.block(z, data.x)


def bare(data: Data, evaluations: int) -> Tensor:
    """The state after so many evaluations, at which nobody looks."""
    z = torch.zeros_like(data.x)
    for _ in range(evaluations):
        z = data.block(z, data.x)
    return z


def forward_row(setting: ForwardSetting, *, repeats: int, max_seconds: float) -> Row:
    """Process time of forward passes in turns, over a bare loop of as many evaluations as the slowest sample has."""
    if (reason := guard.red(TESTS)) is not None:
        return {"evidence": {"picard": {"error": reason}}, "seconds": {}, "ratios": dict.fromkeys(RATIOS)}
    with one_thread(), torch.no_grad():
        return _timed(draw(setting), setting.rtol, repeats, max_seconds)


def _timed(data: Data, rtol: float, repeats: int, max_seconds: float) -> Row:
    found: dict[str, Any] = {}
    functions: dict[str, Callable[[], Any]] = {}
    solvers: dict[str, Any] = {"picard": Picard(rtol=rtol), "anderson": Anderson(history=HISTORY, rtol=rtol)}
    for (name, solver), (hand, loop) in zip(solvers.items(), loops(data, rtol).items(), strict=True):
        layer = Equilibrium(data.block, solver=solver, on_failure="ignore")
        state = layer(data.x)
        assert layer.last_solve is not None
        evaluations = int(layer.last_solve.num_evals.max())
        found[name] = {"evaluations": evaluations, "state_residual": relative_residual(data, state)}
        end = loop()
        found[hand] = {"evaluations": int(end.evaluations.max()), "state_residual": relative_residual(data, end.value)}
        functions[name], functions[f"bare {name}"] = partial(layer, data.x), partial(bare, data, evaluations)
        functions[hand] = loop
        by_torch = BY_TORCH[name](**vars(solver))
        functions[f"{name} by torch"] = partial(Equilibrium(data.block, solver=by_torch, on_failure="ignore"), data.x)
    wrong = [evidence for evidence in found.values() if not evidence["state_residual"] <= rtol]
    for evidence in wrong:
        evidence["error"] = "not timed, the measured residual is above the tolerance"
    if wrong:
        return {"evidence": found, "seconds": {}, "ratios": dict.fromkeys(RATIOS)}
    process, wall = interleaved_clocks(functions, rounds=8 * repeats, max_seconds=max_seconds)
    return {
        "evidence": found,
        "seconds": {name: dataclasses.asdict(timing) for name, timing in wall.items()},
        "process_seconds": {name: dataclasses.asdict(timing) for name, timing in process.items()},
        "ratios": {name: process[one].median / process[other].median for name, (one, other) in RATIOS.items()},
    }

"""The forward pass of a block as a fixed point, over a bare loop of as many evaluations: what a solver costs."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor

from implicit_attention import Anderson, Equilibrium, Picard

from . import guard
from .block_equilibrium import HISTORY, SLACK, TEN, TESTS, Data, EquilibriumSetting, draw
from .measure import interleaved_clocks
from .targets import Row

RATIOS = ("picard / bare", "by hand / bare", "anderson / bare")


@dataclasses.dataclass(frozen=True)
class ForwardSetting(EquilibriumSetting):
    """Sizes of the block whose forward pass is timed, without a graph."""

    @property
    def name(self) -> str:
        return f"forward of a {super().name}"


SETTINGS = tuple(ForwardSetting(**dataclasses.asdict(TEN[i])) for i in (0, 1, 2, 3, 7))


def by_hand(data: Data, rtol: float) -> tuple[Tensor, Tensor, Tensor]:
    """Plain steps with the evidence of the layer: state, residual and evaluations of each sample at its end.

    All samples make as many steps as the slowest one, and no test is made but whether each has converged.
    """
    z, shape = torch.zeros_like(data.x), (-1, *(1,) * (data.x.ndim - 1))
    active = torch.ones(len(z), dtype=torch.bool)
    value, residual, count = z, torch.full((len(z),), torch.inf), torch.zeros(len(z), dtype=torch.int32)
    while True:
        mapped = data.block(z, data.x)
        size = torch.linalg.vector_norm((mapped - z).flatten(1), dim=-1)
        done = size <= 1e-8 + rtol * torch.linalg.vector_norm(mapped.flatten(1), dim=-1)
        better = active & ((size < residual) | done)
        count += active
        value, residual = torch.where(better.view(shape), z, value), torch.where(better, size, residual)
        active = active & ~done
        if not bool(active.any()):
            return value, residual, count
        z = mapped


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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return _timed(draw(setting), setting.rtol, repeats, max_seconds)
    finally:
        torch.set_num_threads(threads)


def _timed(data: Data, rtol: float, repeats: int, max_seconds: float) -> Row:
    found, functions, made = {}, {}, {}
    solvers: dict[str, Any] = {"picard": Picard(rtol=rtol), "anderson": Anderson(history=HISTORY, rtol=rtol)}
    for name, solver in solvers.items():
        layer = Equilibrium(data.block, solver=solver, on_failure="ignore")
        state = layer(data.x)
        assert layer.last_solve is not None
        evaluations = int(layer.last_solve.num_evals.max())
        mapped = data.block(state, data.x)
        sizes = (torch.linalg.vector_norm(t.double().flatten(1), dim=-1) for t in (mapped - state, mapped))
        residual = float(torch.div(*sizes).max())
        found[name] = {"evaluations": evaluations, "state_residual": residual}
        if residual > SLACK * rtol:
            found[name]["error"] = "not timed, the measured residual is above the tolerance"
            return {"evidence": found, "seconds": {}, "ratios": dict.fromkeys(RATIOS)}
        functions[name], functions[f"bare {name}"] = partial(layer, data.x), partial(bare, data, evaluations)
    functions["by hand"] = partial(by_hand, data, rtol)
    process, wall = interleaved_clocks(functions, rounds=8 * repeats, max_seconds=max_seconds)
    pairs = (("picard", "bare picard"), ("by hand", "bare picard"), ("anderson", "bare anderson"))
    for ratio, (one, other) in zip(RATIOS, pairs, strict=True):
        made[ratio] = process[one].median / process[other].median
    return {
        "evidence": found,
        "seconds": {name: dataclasses.asdict(timing) for name, timing in wall.items()},
        "process_seconds": {name: dataclasses.asdict(timing) for name, timing in process.items()},
        "ratios": made,
    }

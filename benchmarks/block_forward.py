"""The forward pass of a block as a fixed point, over a bare loop of as many evaluations: what a solver costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicit_attention import Anderson, Equilibrium, Picard

from . import guard
from .block_equilibrium import HISTORY, SLACK, TEN, TESTS, Data, EquilibriumSetting, draw
from .measure import interleaved_clocks
from .targets import Row

RATIOS = {
    "picard / bare": ("picard", "bare picard"),
    "by hand / bare": ("by hand", "bare picard"),
    "anderson / bare": ("anderson", "bare anderson"),
    "anderson by hand / bare": ("anderson by hand", "bare anderson"),
}
#: Evaluations after which a loop by hand is given up; how much the residual may grow in a mixed step.
MOST, GROWTH = 201, 20.0
#: Rounding, and the smallest number.
EPS, TINY = np.finfo(np.float32).eps, np.finfo(np.float32).tiny


@dataclasses.dataclass(frozen=True)
class ForwardSetting(EquilibriumSetting):
    """Sizes of the block whose forward pass is timed, without a graph."""

    @property
    def name(self) -> str:
        return f"forward of a {super().name}"


SETTINGS = tuple(ForwardSetting(**dataclasses.asdict(TEN[i])) for i in (0, 1, 2, 3, 7))


class Ends:
    """The evidence of a loop by hand: of each sample the best state, its residual, its evaluations, whether it ended.

    Numbers of samples are numpy's, whose calls are shorter than torch's.
    """

    def __init__(self, z: Tensor) -> None:
        count = len(z)
        self.active, self.evaluations = np.ones(count, dtype=bool), np.zeros(count, dtype=np.int32)
        self.value, self.residual = z, np.full(count, np.inf)

    def unfinished(self, z: Tensor, size: Any, tolerance: Any, accepted: Any = True) -> bool:
        """Take note of |f(z) - z| and the tolerances; whether a sample is unfinished. A broken one ends, too."""
        candidates = self.active & accepted
        done = size <= tolerance
        better = candidates & ((size < self.residual) | done)
        self.evaluations += self.active
        if better.all():
            self.value, self.residual = z, size
        elif better.any():
            self.value = torch.where(rows(better, z), z, self.value)
            self.residual = np.where(better, size, self.residual)
        self.active &= ~(candidates & (done | ~(size + tolerance < np.inf)))
        return bool(self.active.any())

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.value, torch.from_numpy(self.residual), torch.from_numpy(self.evaluations)


def rows(chosen: Any, like: Tensor) -> Tensor:
    """Truth values of samples as a mask of states."""
    return torch.from_numpy(chosen).view(-1, *(1,) * (like.ndim - 1))


def lengths(t: Tensor) -> Any:
    return torch.linalg.vector_norm(t.flatten(1), dim=-1).numpy()


def by_hand(data: Data, rtol: float) -> tuple[Tensor, Tensor, Tensor]:
    """Plain steps with the evidence of the layer: state, residual and evaluations of each sample at its end.

    All samples make as many steps as the slowest one.
    """
    z = torch.zeros_like(data.x)
    ends = Ends(z)
    for _ in range(MOST):
        mapped = data.block(z, data.x)
        if not ends.unfinished(z, lengths(mapped - z), 1e-8 + rtol * lengths(mapped)):
            break
        z = mapped
    return ends.result()


def anderson_by_hand(data: Data, rtol: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same by Anderson's steps over the last two changes, with the safeguards of the layer.

    A mixed step whose residual grows by more than `GROWTH` is taken back: that sample makes a plain step from its state
    before, and its changes are forgotten. One product finds all lengths and products of residuals and their changes.
    """
    x, count, n = data.x, len(data.x), data.x[0].numel()
    # The last two changes of r, and r at the last two states; the changes of f(z).
    of_r, of_f = x.new_zeros(count, 4, n), x.new_zeros(count, 2, n)
    transposed, places = of_r.mT, [of_r[:, i].view_as(x) for i in range(4)]
    changes = [of_f[:, i].view_as(x) for i in range(2)]
    z, kept = torch.zeros_like(x), x
    ends, mixed, valid = Ends(z), np.zeros(count, dtype=bool), np.zeros(count, dtype=np.int32)
    before, weights = np.full(count, np.inf), x.new_zeros(count, 1, 2)
    numbers = weights.numpy()
    for step in range(MOST):
        new, old, r, last = step % 2, (step + 1) % 2, 2 + step % 2, 2 + (step + 1) % 2
        mapped = data.block(z, x)
        torch.sub(mapped, z, out=places[r])
        torch.sub(places[r], places[last], out=places[new])
        products = torch.bmm(of_r, transposed).numpy()
        size = np.sqrt(products[:, r, r])
        accepted = ~mixed | (size <= GROWTH * before)
        if not ends.unfinished(z, size, 1e-8 + rtol * lengths(mapped), accepted):
            break
        whole = accepted.all()
        if not whole:
            mask = rows(accepted, x)
            places[new].masked_fill_(~mask, 0.0)
            torch.where(mask, places[r], places[last], out=places[r])
            mapped, size = torch.where(mask, mapped, kept), np.where(accepted, size, before)
        if step:
            torch.sub(mapped, kept, out=changes[new])
            valid = np.minimum(valid + 1, HISTORY) if whole else np.where(accepted, np.minimum(valid + 1, HISTORY), 0)
        z = kept = mapped
        before = size
        if step < HISTORY:
            continue
        square, across = products[:, new, new] + TINY, products[:, new, old]
        factor, rest = across / square, products[:, new, r]
        pivot = products[:, old, old] - factor * across
        # Changes that are dependent to rounding get no weight.
        both = (valid == 2) & (pivot > 4 * EPS * products[:, old, old])
        second = np.where(both, (products[:, old, r] - factor * rest) / np.where(both, pivot, 1), 0)
        first = np.where(valid > 0, rest / square - factor * second, 0)
        mixed = (valid > 0) & np.isfinite(first)
        numbers[:, 0, new], numbers[:, 0, old] = first, second
        z = torch.baddbmm(mapped.view(count, 1, n), weights, of_f, alpha=-1).view_as(x)
    return ends.result()


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
    found: dict[str, Any] = {}
    functions: dict[str, Callable[[], Any]] = {}
    solvers: dict[str, Any] = {"picard": Picard(rtol=rtol), "anderson": Anderson(history=HISTORY, rtol=rtol)}
    loops = {"by hand": partial(by_hand, data, rtol), "anderson by hand": partial(anderson_by_hand, data, rtol)}
    for (name, solver), (hand, loop) in zip(solvers.items(), loops.items(), strict=True):
        layer = Equilibrium(data.block, solver=solver, on_failure="ignore")
        state = layer(data.x)
        assert layer.last_solve is not None
        evaluations = int(layer.last_solve.num_evals.max())
        found[name] = {"evaluations": evaluations, "state_residual": _residual(data, state)}
        end, _, count = loop()
        found[hand] = {"evaluations": int(count.max()), "state_residual": _residual(data, end)}
        functions[name], functions[f"bare {name}"] = partial(layer, data.x), partial(bare, data, evaluations)
        functions[hand] = loop
    wrong = [evidence for evidence in found.values() if not evidence["state_residual"] <= SLACK * rtol]
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


def _residual(data: Data, state: Tensor) -> float:
    """The largest |f(z) - z| / |f(z)| over the samples."""
    mapped = data.block(state, data.x)
    sizes = (torch.linalg.vector_norm(t.double().flatten(1), dim=-1) for t in (mapped - state, mapped))
    return float(torch.div(*sizes).max())

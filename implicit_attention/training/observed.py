"""The results of `watch`: one `Observation` for each layer and one of all, as rows, a line of text, and a table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..diagnostics.diagnosis import table
from ..solution import Status
from .tally import BACKWARD, BINS, CALLS, EVALUATIONS, FORWARD, LOST, STATUSES

FAILURES = tuple(status for status in Status if status.failed)


@dataclasses.dataclass(frozen=True)
class Side:
    """Forward or backward solves of a layer.

    Not for making by hand: `Watch.take` makes it.

    Attributes:
        calls: how often the layer solved.
        problems: how many problems that were.
        mean, p99, most: evaluations of a problem (matrix-vector products of a backward solve): the mean, the number
            that 99 of 100 stay at or below, and the largest.
        failures: how many problems ended with each failing status, by its name.
        worst: the largest residual in units of its tolerance: at most 1 where all converged, `inf` where one was not
            finite, 0 where nothing had a tolerance to reach.
        lost: how many cotangents were not finite. These are no failures.

    Examples:
        >>> from implicit_attention.training.observed import Side
        >>> Side(1, 8, 4.5, 6.0, 6, {"MAX_STEPS": 2, "STALLED": 0}, 0.9, 0).failed
        2
    """

    calls: int
    problems: int
    mean: float
    p99: float
    most: int
    failures: dict[str, int]
    worst: float
    lost: int

    @property
    def failed(self) -> int:
        """Return the number of problems that failed."""
        return sum(self.failures.values())

    @classmethod
    def of(cls, counts: Tensor, peaks: Tensor) -> Side:
        """From a row of a `Tally`, on the host."""
        statuses, spent = counts[:STATUSES], counts[STATUSES:CALLS]
        problems = int(statuses.sum())
        mean = p99 = math.nan
        if problems:
            mean = int(counts[EVALUATIONS]) / problems
            p99 = float(torch.searchsorted(spent.cumsum(0), math.ceil(0.99 * problems)))
            # Numbers beyond the last bin were not counted one by one.
            p99 = p99 if p99 < BINS - 1 else float(peaks[STATUSES])
        failures = {status.name: int(statuses[status]) for status in FAILURES}
        # A fixed budget, and lost cotangents, aimed at no tolerance.
        aimed = [code for code in Status if code not in (Status.EXPLICIT, Status.BUDGET)]
        worst = float(peaks[aimed].amax())
        calls, most = int(counts[CALLS]), int(peaks[STATUSES])
        return cls(calls, problems, mean, p99, most, failures, worst, int(statuses[LOST]))


@dataclasses.dataclass(frozen=True)
class Observation:
    """A summary of the solves of one layer, or of all layers together.

    Not for one call: read `last_solve` of the layer.

    Attributes:
        layer: the name of the layer in the model, or "all".
        forward: how the solves went.
        backward: how the linear solves behind gradients went.
        anchor: the mean over heads at the time of `take`; NaN for a layer without.
        beta: likewise.
        spectral_radius: the largest of df/dz at some states of the last call, with `watch(..., spectral=True)`; below
            1 plain iteration converges there. NaN otherwise.

    Examples:
        >>> import torch
        >>> from implicit_attention import ImplicitAttention
        >>> from implicit_attention.training import watch
        >>> layer = ImplicitAttention(8, heads=2, anchor=0.75)
        >>> seen = watch(layer)
        >>> output = layer(torch.randn(3, 5, 8))
        >>> found = seen.take().total
        >>> found.forward.calls, found.forward.problems, found.forward.failed
        (1, 30, 0)
    """

    layer: str
    forward: Side
    backward: Side
    anchor: float = math.nan
    beta: float = math.nan
    spectral_radius: float = math.nan

    @classmethod
    def of(cls, layer: str, counts: Tensor, peaks: Tensor, **settings: float) -> Observation:
        """From the counts and peaks of a `Tally`, on the host."""
        forward, backward = (Side.of(counts[side], peaks[side]) for side in (FORWARD, BACKWARD))
        return cls(layer, forward, backward, **settings)

    def row(self) -> dict[str, Any]:
        """All numbers by the names of columns: `forward_mean`, `backward_failed_MAX_STEPS`, ..."""
        row: dict[str, Any] = {"layer": self.layer}
        for name, side in (("forward", self.forward), ("backward", self.backward)):
            fields = ("calls", "problems", "mean", "p99", "most", "worst", "failed")
            row |= {f"{name}_{field}": getattr(side, field) for field in fields}
            row |= {f"{name}_failed_{status}": count for status, count in side.failures.items()}
        row["backward_lost"] = self.backward.lost
        return row | {name: getattr(self, name) for name in ("anchor", "beta", "spectral_radius")}


@dataclasses.dataclass(frozen=True, repr=False)
class Observed:
    """The observations of `watch` between two looks; printed, they are a table.

    Not for making by hand: `Watch.take` makes it.

    Attributes:
        layers: one `Observation` for each layer, in the order of the model.
        total: of all layers together.
        step: the argument of `take`.

    Examples:
        >>> import torch
        >>> from implicit_attention import ImplicitAttention
        >>> from implicit_attention.training import watch
        >>> model = torch.nn.Sequential(ImplicitAttention(8, heads=2), ImplicitAttention(8, heads=2))
        >>> seen = watch(model)
        >>> output = model(torch.randn(3, 5, 8))
        >>> observed = seen.take(step=1)
        >>> [row["layer"] for row in observed.rows()], observed.rows()[0]["step"]
        (['0', '1', 'all'], 1)
    """

    layers: tuple[Observation, ...]
    total: Observation
    step: int | None = None

    def rows(self) -> list[dict[str, Any]]:
        """One row for each layer and one of all, with the step, by the names of columns."""
        return [{"step": self.step, **seen.row()} for seen in (*self.layers, self.total)]

    def line(self) -> str:
        """One line over all layers, for a terminal."""
        forward, backward = self.total.forward, self.total.backward
        step, parts = "" if self.step is None else f"step {self.step}: ", []
        if forward.problems:
            parts.append(f"evaluations {forward.mean:.1f}, p99 {forward.p99:.0f}, max {forward.most}")
            # A fixed budget measures no residual.
            worst = f", worst residual {forward.worst:.2g} of its tolerance" if forward.worst else ""
            parts.append(f"failed {_share(forward)}{worst}")
        if backward.problems:
            parts.append(f"backward failed {_share(backward)}")
        return step + ("; ".join(parts) or "nothing was solved")

    def __repr__(self) -> str:
        return table([_HEAD, *(_cells(seen) for seen in (*self.layers, self.total))])


_HEAD = (
    *("layer", "problems", "evals", "p99", "max", "failed", "worst"),
    *("backward", "failed", "anchor", "beta", "radius"),
)


def _cells(seen: Observation) -> tuple[str, ...]:
    forward, backward = seen.forward, seen.backward
    counts = (f"{forward.problems:,}", or_dash(forward.mean), or_dash(forward.p99), f"{forward.most}")
    sides = (f"{forward.failed:,}", f"{forward.worst:.2g}", f"{backward.problems:,}", f"{backward.failed:,}")
    return (seen.layer or "(model)", *counts, *sides, *map(or_dash, (seen.anchor, seen.beta, seen.spectral_radius)))


def or_dash(value: float, style: str = ".3g") -> str:
    """A number in this style; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:{style}}"


def _share(side: Side) -> str:
    return f"{side.failed:,} of {side.problems:,}"


def mean(values: Iterable[float]) -> float:
    """The mean of the values that are numbers; NaN for none."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan

"""What a run is held against: statistics over its rows with a bound, as data, and their verdicts."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any, Literal

Row = dict[str, Any]


def geometric_mean(values: list[float]) -> float:
    return statistics.geometric_mean(values)


@dataclasses.dataclass(frozen=True)
class Target:
    """A statistic of the ratio `ratio` over the rows that `where` admits, which must be at most or at least `bound`."""

    id: str
    claim: str
    ratio: str
    statistic: Literal["geometric mean", "worst"]
    sense: Literal["<=", ">="]
    bound: float
    where: Callable[[Row], bool] = lambda row: True

    def judge(self, rows: list[Row]) -> dict[str, Any]:
        """The measured statistic with its verdict; "not measured" where no row has the ratio.

        A row whose answer was wrong has the ratio None: it is counted in `wrong`, and the target is missed.
        """
        concerned = [row["ratios"][self.ratio] for row in rows if self.where(row) and self.ratio in row["ratios"]]
        values = [value for value in concerned if value is not None]
        wrong = len(concerned) - len(values)
        measured = None
        if values and self.statistic == "geometric mean":
            measured = geometric_mean(values)
        elif values:
            measured = max(values) if self.sense == "<=" else min(values)
        met = (
            measured is not None
            and not wrong
            and (measured <= self.bound if self.sense == "<=" else measured >= self.bound)
        )
        return {
            "id": self.id,
            "claim": self.claim,
            "statistic": self.statistic,
            "sense": self.sense,
            "bound": self.bound,
            "measured": measured,
            "rows": len(concerned),
            "wrong": wrong,
            "verdict": "met" if met else "missed" if concerned else "not measured",
        }


def _gaussian(row: Row) -> bool:
    return row["keys"] == "gaussian"


def _clustered(row: Row) -> bool:
    return row["keys"] == "clustered"


def _gaussian_without_anchor(row: Row) -> bool:
    return _gaussian(row) and row["anchor"] == 0


_C1 = "forward solve / (Picard's mean evaluations x one SDPA forward)"
_C2 = "torchdeq's {} / ours, forward, a row per {}"
_C3 = "training step with the exact gradient / explicit SDPA training step"
_C5 = "unrolled autograd / ours, training step"

SOLVE = (
    Target("C1", f"{_C1}, Gaussian, anchor 0", "C1", "worst", "<=", 1.4, _gaussian_without_anchor),
    Target("C1", f"{_C1}, Gaussian, anchor 0", "C1", "geometric mean", "<=", 1.25, _gaussian_without_anchor),
    Target("C1", f"{_C1}, all", "C1", "worst", "<=", 1.8),
    Target("C2", _C2.format("Anderson", "query"), "C2 anderson", "geometric mean", ">=", 4.0),
    Target("C2", _C2.format("fixed-point iteration", "query"), "C2 fpi", "geometric mean", ">=", 2.3),
    Target("C2", _C2.format("Anderson", "batch entry"), "C2 anderson entry", "geometric mean", ">=", 4.0),
    Target("C2", _C2.format("fixed-point iteration", "batch entry"), "C2 fpi entry", "geometric mean", ">=", 2.3),
    Target("C3", f"{_C3}, Gaussian", "C3", "geometric mean", "<=", 4.0, _gaussian),
    Target("C3", f"{_C3}, Gaussian", "C3", "worst", "<=", 8.0, _gaussian),
    Target("C3", f"{_C3}, clustered", "C3", "geometric mean", "<=", 8.0, _clustered),
    Target("C3", f"{_C3}, clustered", "C3", "worst", "<=", 16.0, _clustered),
    Target("C5", f"{_C5}, time, all queries converged", "C5", "geometric mean", ">=", 5.0),
    Target("C5", f"{_C5}, time, all queries converged", "C5", "worst", ">=", 1.6),
    Target("C5", f"{_C5}, peak memory, 32 steps", "C5 memory", "worst", ">=", 4.0),
    Target("C7", "import of the package / import of torch", "C7", "worst", "<=", 1.05),
)

_C6 = "saddle point and its gradient, Newton with explicit inverses / ours, float64"


def _double(row: Row) -> bool:
    return row.get("dtype") == "float64"


SPINS = (
    Target("C6", _C6, "C6", "worst", ">=", 3.0, _double),
    Target("C6", _C6, "C6", "geometric mean", ">=", 3.0, _double),
    Target("C6", "failures of the saddle point in these settings", "C6 failures", "worst", "<=", 0.0),
    Target("RANDOM", "failures of the saddle point on the random systems", "failures", "worst", "<=", 0.0),
)

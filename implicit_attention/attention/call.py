"""One call of equilibrium attention: the request and the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor

from ..failure_policy import FailurePolicy, FailureSite, Located, Word
from ..options import SolveOptions
from ..potentials import LogSumExp
from ..solution import Record, Solution, SolveReport
from .read_out import PotentialFactory


class Attended(NamedTuple):
    """The read-out of an attention call, and the solve behind it.

    Attributes:
        output: (*batch, H, N, E), or (*batch, N, E) without heads.
        state: the equilibrium that was read at, in the precision of the solve.
        report: the report that a layer may remember; from a compiled graph the `Record`, at which the host has not
            looked. None inside torch.vmap, which no tensor may leave, and if the caller wants none.
        solution: the `Solution`, if the caller wants it or it was made on the way.
        weights: (*batch, H, N, M), if the caller wants them.
    """

    output: Tensor
    state: Tensor
    report: SolveReport | Record | None
    solution: Solution | None
    weights: Tensor | None = None

    @property
    def num_evals(self) -> Tensor:
        """(*batch, H, N), evaluations of the map."""
        report = self.solution if self.report is None else self.report
        assert report is not None
        return report.num_evals


class Learned(NamedTuple):
    """Numbers of the heads that a formula makes of a parameter.

    numbers: (H,), without a graph.
    columns: the same, (H, 1, 1).
    parameter: (H,), of the same precision.
    source: (H,), the values of the parameter that the numbers were made of.
    formula: makes the numbers of the parameter.
    pull: the gradient of the parameter by that of the numbers.
    """

    numbers: Tensor
    columns: Tensor
    parameter: Tensor
    source: Tensor
    formula: Callable[[Tensor], Tensor]
    pull: Callable[[Tensor], Tensor]

    def leaf(self) -> Tensor:
        """Return the values of `source` with a graph that leads to the parameter, which may have changed since."""
        return self.parameter - self.parameter.detach() + self.source

    def recorded(self) -> Tensor:
        """Return the numbers with a graph that leads to the parameter."""
        return self.formula(self.leaf())


class Sources(NamedTuple):
    """The sources of beta and anchor of a call, each `Learned`, or None for a number that the caller gave."""

    beta: Learned | None
    anchor: Learned | None

    def recorded(self, beta: Any, anchor: Any) -> tuple[Any, Any]:
        """Return both numbers with graphs that lead to their parameters."""
        return (
            beta if self.beta is None else self.beta.recorded(),
            anchor if self.anchor is None else self.anchor.recorded(),
        )


class Call(NamedTuple):
    """The inputs and options of an attention call.

    Attributes:
        query: (*batch, N, D), or (*batch, H, N, D) with heads.
        keys: (*batch, M, D), or (*batch, Hkv, M, D).
        values: (*batch, M, E) to read softmax attention out, None to return the state.
        beta, anchor: numbers, or tensors that broadcast to the leading axes of `query`.
        options: how the equilibria are found and differentiated.
        mask, bias: boolean and additive, each None or broadcasting to (*batch, N, M).
        first: None, or beside them: query i attends to keys up to first + i only.
        potential: what makes the potential of the keys.
        dropout_p: part of the weights dropped in the read-out.
        grouped: whether fewer heads of keys are shared by heads of queries: head h reads key head h // (H / Hkv), or
            h mod Hkv if "tiled".
        initial: where the solves start, by default at the query.
        trace: keep the course of the iteration in the solution.
        return_solution: evaluate the residual also where nothing is solved; implied by `trace`.
        return_weights: whether the caller wants the attention weights.
        unbounded: see `AnchoredEnergy`; where nothing is solved it does not matter.
        site: the layer that calls.
        sources: where beta and anchor come from, if they are learned and have no graph.
    """

    query: Tensor
    keys: Tensor
    values: Tensor | None
    beta: float | Tensor
    anchor: float | Tensor
    options: SolveOptions
    mask: Tensor | None = None
    bias: Tensor | None = None
    first: int | None = None
    potential: PotentialFactory = LogSumExp
    dropout_p: float = 0.0
    grouped: bool | Literal["tiled"] = False
    initial: Tensor | None = None
    trace: bool = False
    return_solution: bool = False
    return_weights: bool = False
    unbounded: Word = "raise"
    site: FailureSite | None = None
    sources: Sources | None = None

    def recorded(self) -> Call:
        """Return the call with numbers that have graphs."""
        if self.sources is None:
            return self
        beta, anchor = self.sources.recorded(self.beta, self.anchor)
        return self._replace(beta=beta, anchor=anchor, sources=None)

    @property
    def on_failure(self) -> Any:
        """Return the failure policy of its solves."""
        given, site = self.options.on_failure, self.site
        if site is None and isinstance(given, FailurePolicy):
            site = given._site
        return given if site is None else Located(given, site)

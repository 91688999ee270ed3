"""The status of a problem, as codes that all iterative methods of the library share."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Status(enum.IntEnum):
    """The status of one problem of a batch.

    Tensors of status hold the integer codes. Codes up to `UNSTABLE` are answers, larger ones failures. `sentence`
    states the fact; what to do about it is known to the method that failed, whose `remedies` say it by status. Not for
    a whole batch: print the `Solution` or the `SolveReport`, which count the codes.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, Picard, Status, solve
        >>> problem = FixedPointMap(torch.cos, event_ndim=1)
        >>> solution = solve(problem, torch.zeros(1, 1), solver=Picard(max_steps=3), on_failure="ignore")
        >>> status = Status(int(solution.status[0]))
        >>> status.name, status.failed
        ('MAX_STEPS', True)
    """

    CONVERGED = 0
    EXPLICIT = 1
    BUDGET = 2
    UNSTABLE = 3
    MAX_STEPS = 4
    STALLED = 5
    DIVERGED = 6
    NONFINITE = 7
    OUT_OF_RANGE = 8

    @property
    def sentence(self) -> str:
        """Return the message of the status, with places for `residual`, `tolerance` and `steps`."""
        return _SENTENCES[self]

    @property
    def failed(self) -> bool:
        """Whether the value that carries this status is not an answer."""
        return self > Status.UNSTABLE


_SENTENCES = {
    Status.CONVERGED: "converged: residual {residual:.1e} <= {tolerance:.1e} after {steps} steps",
    Status.EXPLICIT: "no step was asked for (max_steps=0), the initial state is returned; residual {residual:.1e}",
    Status.BUDGET: "fixed budget of {steps} steps used as asked (rtol = atol = 0); residual {residual:.1e}",
    Status.UNSTABLE: "converged to a stationary point with negative curvature (a saddle): residual {residual:.1e}",
    Status.MAX_STEPS: "residual {residual:.1e} > {tolerance:.1e} after {steps} steps",
    Status.STALLED: "residual {residual:.1e} > {tolerance:.1e} and no step improves it after {steps} steps",
    Status.DIVERGED: "the iteration left the finite numbers, or an energy without a lower bound fell without end; the "
    "best state, after {steps} steps, has residual {residual:.1e}",
    Status.NONFINITE: "the problem reads a NaN or an infinity: its map is not finite at the initial state",
    Status.OUT_OF_RANGE: "solved (residual {residual:.1e}), but out of the range of the approximation or energy",
}

#: The remedy that helps plain steps, and with them every method; the problem adds which of its numbers do it.
CONTRACT = "make f contract more"
#: The remedies by the attributes that hold these numbers.
LEVERS = {"beta": "lower beta", "anchor": "raise the anchor"}
OF_ATTENTION = " or ".join(LEVERS.values())


def advice(remedies: Mapping[Status, str], to_contract: str) -> dict[Status, str]:
    """The remedies of a solver, with what makes f of the problem at hand contract more, where that is known."""
    if not to_contract:
        return dict(remedies)
    return {status: text.replace(CONTRACT, f"{CONTRACT} ({to_contract})") for status, text in remedies.items()}

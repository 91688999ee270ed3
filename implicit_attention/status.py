"""Per-problem outcome codes, shared by every iterative method of the library."""

from __future__ import annotations

import enum


class Status(enum.IntEnum):
    """How one problem of a batch ended; `sentence` says it in words.

    Tensors of status hold the integer codes. Codes up to `UNSTABLE` are answers, larger ones failures.
    """

    sentence: str

    def __new__(cls, code: int, sentence: str) -> Status:
        member = int.__new__(cls, code)
        member._value_ = code
        member.sentence = sentence
        return member

    CONVERGED = 0, "converged: residual {residual:.1e} <= {tolerance:.1e} after {steps} steps"
    EXPLICIT = (
        1,
        "explicit: no step was asked for (max_steps=0), the initial state is returned; residual {residual:.1e}",
    )
    BUDGET = 2, "fixed budget of {steps} steps used as asked (rtol = atol = 0); residual {residual:.1e}"
    UNSTABLE = (
        3,
        (
            "converged to a stationary point with negative curvature (a saddle): residual {residual:.1e}; "
            "start elsewhere or use a solver with guard='energy'"
        ),
    )
    MAX_STEPS = (
        4,
        (
            "residual {residual:.1e} > {tolerance:.1e} after {steps} steps; "
            "raise max_steps, add damping, lower beta or raise the anchor"
        ),
    )
    STALLED = (
        5,
        (
            "residual {residual:.1e} > {tolerance:.1e} and no step improves it after {steps} steps; "
            "use a larger rtol or a wider dtype"
        ),
    )
    DIVERGED = (
        6,
        (
            "the iteration left the finite numbers; the best state, after {steps} steps, has residual {residual:.1e}; "
            "add damping, lower beta or raise the anchor"
        ),
    )
    NONFINITE = (
        7,
        "the problem reads a NaN or an infinity: its map is not finite at the initial state; check its inputs",
    )
    OUT_OF_RANGE = (
        8,
        (
            "solved (residual {residual:.1e}), but where the approximation does not hold; "
            "lower beta, or use a method that holds there"
        ),
    )

    @property
    def failed(self) -> bool:
        """Whether the value that carries this status is not an answer."""
        return self > Status.UNSTABLE

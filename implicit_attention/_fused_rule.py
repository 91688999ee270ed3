"""The rule of a fused solve, the same for all solvers that offer and operations that implement one."""

from __future__ import annotations

from typing import NamedTuple

from .status import Status


class FusedRule(NamedTuple):
    """Tolerances of |f(z) - z|_2 <= atol + rtol |f(z)|_2, the budget, and the steps before acceleration.

    From step `plain_steps` on, steps are those of `Anderson(history=1)` on an energy that plain steps lower;
    `plain_steps > max_steps` is Picard's iteration. With rtol = atol = 0 exactly `max_steps` steps are made.
    """

    rtol: float
    atol: float
    max_steps: int
    plain_steps: int

    @property
    def fixed_budget(self) -> bool:
        return self.rtol == 0 and self.atol == 0

    @property
    def exhausted(self) -> Status:
        """Return the status of a problem that has used up its budget."""
        if self.max_steps == 0:
            return Status.EXPLICIT
        return Status.BUDGET if self.fixed_budget else Status.MAX_STEPS

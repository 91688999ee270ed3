"""SciPy's root finders as solvers: an oracle in float64, one problem after another."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import _validate
from ..problem import Problem
from ..solution import Remedies
from ..status import Status
from ._recorder import Finished, Options, Recorder, check_plain, needed
from .loop import Outcome, Solver

REQUIREMENT = "scipy>=1.11"
# The option that bounds the work of each method, and the tolerances of its own, set so that they never end a run.
_BY_EVALUATIONS = {
    "hybr": ("maxfev", {"xtol": 0.0}),
    "lm": ("maxiter", {"xtol": 0.0, "ftol": 0.0}),
    "df-sane": ("maxfev", {"ftol": 0.0, "fatol": 0.0}),
}
_BY_STEPS = ("broyden1", "broyden2", "anderson", "linearmixing", "diagbroyden", "excitingmixing", "krylov")
METHODS = (*_BY_EVALUATIONS, *_BY_STEPS)


@dataclasses.dataclass(frozen=True)
class SciPy(Solver):
    """`scipy.optimize.root` on f(z) - z, each problem alone and in float64: slow, and independent of our solvers.

    Not for batches of any size: use `Anderson()` or `NewtonKrylov()`, to which this is an oracle.

    A run ends at the first evaluated state with |f(z) - z| <= atol + rtol |f(z)| (half of that for other precisions
    than float64), else with the best state evaluated. The value is cast back to the initial state's precision and
    judged there, by one more evaluation: tolerances below that precision end as STALLED. SciPy's vectors are on the
    CPU; the map is evaluated on its own device.

    Ends as MAX_STEPS when the budget is spent, as STALLED when SciPy gives up before, as DIVERGED at the first
    non-finite evaluation. `num_steps` counts evaluations for 'hybr' and 'lm', which do not tell their steps.
    `check_every` has no effect.

    Args:
        method: 'hybr', 'lm', 'df-sane' (for which max_steps bounds the evaluations, finite differences included),
            'broyden1', 'broyden2', 'anderson', 'linearmixing', 'diagbroyden', 'excitingmixing' or 'krylov'.
        options: further options of that method, as in `scipy.optimize.show_options("root", method)`.

    Raises:
        ImportError: SciPy is not installed.
        ValueError: a method that there is none of; in the run, an option that SciPy does not know.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, solve
        >>> from implicit_attention.solvers import SciPy
        >>> cosine = FixedPointMap(torch.cos, event_ndim=1)
        >>> solution = solve(cosine, torch.zeros(3, 1, dtype=torch.float64), solver=SciPy("krylov", rtol=1e-10))
        >>> bool(solution.converged.all()), round(float(solution.value[0]), 6)
        (True, 0.739085)
    """

    method: str = "hybr"
    options: Mapping[str, Any] | None = None

    differentiable: ClassVar[bool] = False
    remedies: ClassVar[Remedies] = {
        **Solver.remedies,
        Status.STALLED: "SciPy gave up: use a larger rtol, or a solver of this library such as Anderson()",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.check_choice("method", self.method, METHODS)
        object.__setattr__(self, "options", Options(self.options))
        self._options.check_reserved({"maxiter": "max_steps", "maxfev": "max_steps"})

    @property
    def _options(self) -> Options:
        assert isinstance(self.options, Options)
        return self.options

    def run(self, problem: Problem, initial: Tensor, *, trace: bool = False, graph: bool = False) -> Outcome:
        check_plain(self, problem, initial, graph)
        exact = initial.dtype == torch.float64
        with torch.no_grad():
            wide = problem.replace(*(t.double() if t.is_floating_point() else t for t in problem.tensors()))
            recorder = Recorder(self, wide, initial.double(), trace=trace, strictness=1.0 if exact else 0.5)
            if self.max_steps > 0:
                for row in recorder.unsettled(recorder.rows).tolist():
                    self._solve(recorder, row)
            if not exact:
                recorder.round_to(problem, initial.dtype)
            return recorder.outcome()

    def _solve(self, recorder: Recorder, row: int) -> None:
        part = recorder.alone(row)
        calls = steps = 0

        def residual(x: Any) -> Any:
            nonlocal calls
            z = torch.as_tensor(x, dtype=torch.float64).to(recorder.initial.device)
            step = calls if self._steps_unknown else min(calls, steps + 1)
            calls += 1
            r = (recorder.evaluate(part, z, step)[0] - z).cpu().numpy()
            if len(recorder.unsettled(part.rows)) == 0:
                raise Finished
            return r

        def count(*_: Any) -> None:
            nonlocal steps
            steps += 1

        start = recorder.initial[row].cpu().numpy().copy()
        try:
            result = self._root(residual, start, None if self._steps_unknown else count)
            answer = torch.as_tensor(result.x, dtype=torch.float64).to(recorder.initial.device)
            recorder.evaluate(part, answer, calls if self._steps_unknown else steps, last=True)
        except Finished:
            return
        except ValueError as error:  # a LinAlgError of numpy is one
            cannot_go_on = isinstance(error, np.linalg.LinAlgError) or "inversion yielded zero vector" in str(error)
            if recorder.in_map or not cannot_go_on:
                raise
            recorder.stalled[row] = True
            return
        exhausted = result.nfev >= self.max_steps if self.method in _BY_EVALUATIONS else result.status == 2
        if not exhausted:
            recorder.stalled[recorder.unsettled(part.rows)] = True

    @property
    def _steps_unknown(self) -> bool:
        return self.method in ("hybr", "lm")

    def _root(self, residual: Any, start: Any, callback: Any) -> Any:
        optimize = needed("scipy.optimize", REQUIREMENT, "SciPy")
        budget, tolerances = _BY_EVALUATIONS.get(self.method, ("maxiter", {"fatol": 0.0}))
        options = {budget: self.max_steps, **tolerances, **self._options.copy()}
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.filterwarnings("ignore", module=r"scipy\.")
            warnings.filterwarnings("error", category=optimize.OptimizeWarning)
            try:
                return optimize.root(residual, start, method=self.method, callback=callback, options=options)
            except optimize.OptimizeWarning as warning:
                raise ValueError(
                    _validate.message(
                        "options",
                        f"hold options of scipy.optimize.root(method={self.method!r})",
                        f"{self._options!r} ({warning})",
                        f"see scipy.optimize.show_options('root', {self.method!r})",
                    )
                ) from warning

"""C6: the saddle point and its gradient against Newton's method with explicit inverses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicit_attention.spins import SaddlePoint, SpinSystem, free_energy
from implicit_attention.spins._multipliers import Multipliers

from . import spin_baseline as baseline
from .measure import interleaved, once
from .spin_baseline import Answer, Convex
from .spin_problems import Data, Timed, draw
from .targets import Row

#: Numerator and denominator of every ratio.
RATIOS = {
    "C6": ("inverses", "ours"),
    "C6 same start": ("inverses_guess", "ours"),
    "C6 constant": ("inverses_constant", "ours"),
    "C6 forward": ("inverses_forward", "ours_forward"),
    "C6 matrices": ("matrices", "ours"),
}
SETTINGS = tuple(Timed(beta, dtype) for dtype in ("float64", "float32") for beta in (0.5, 1.0, 2.0))
QUICK = (Timed(1.0),)

METHOD = SaddlePoint()
#: What an answer may be off by, as a part, to be timed.
WRONG = {
    "float64": {"value_error": 1e-10, "gradient_error": 1e-7, "residual_max": 1e-8},
    "float32": {"value_error": 1e-4, "gradient_error": 1e-3, "residual_max": 1e-3},
}


class Contender(NamedTuple):
    """Label for the table, and how to make the timed function."""

    label: str
    make: Callable[[Data, float], Callable[[], Answer]]


def _training(data: Data, forward: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], Answer]:
    """F and the gradient of its sum by field, couplings and beta."""
    leaves = tuple(t.clone().requires_grad_() for t in data[1:])

    def run() -> Answer:
        for leaf in leaves:
            leaf.grad = None
        free = forward(*leaves)
        free.sum().backward()
        return Answer(free.detach(), tuple(leaf.grad for leaf in leaves))  # type: ignore[arg-type]

    return run


def _forward(data: Data, forward: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], Answer]:
    def run() -> Answer:
        with torch.no_grad():
            return Answer(forward(*data[1:]))

    return run


def _ours(field: Tensor, couplings: Tensor, beta: Tensor) -> Tensor:
    return free_energy(SpinSystem(couplings, field, beta), METHOD, on_failure="ignore")


def _inverses(tolerance: float, *, attach: bool, guess: bool = False) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def forward(field: Tensor, couplings: Tensor, beta: Tensor) -> Tensor:
        problem = Convex.of(field, couplings, beta)
        held = Convex(*(t.detach() for t in problem))
        start = Multipliers(*held, tie=1, live=None).guess() if guess else None
        found = baseline.newton(held, tolerance, start)
        return baseline.free_energy(problem, found.multipliers, beta, field.shape[-1], attach=attach)

    return forward


def _matrices(data: Data, evaluations: int) -> Callable[[], Tensor]:
    """Nothing but the factors, inverses and products that a solve of so many evaluations makes of its matrices.

    Every evaluation needs A^{-1}, log det A and A^{-1} g, and its step the factor of a Hessian made of m m^T. The
    gradient takes an inverse more, where the last step has led, and m m^T.
    """
    problem = Convex.of(*(t.double() for t in data[1:]))
    matrix = problem.matrix(baseline.newton(problem, 1e-6).multipliers)

    def run() -> Tensor:
        for index in range(evaluations + 1):
            factor = torch.linalg.cholesky_ex(matrix).L
            mean = torch.cholesky_inverse(factor) @ problem.field
            product = mean @ mean.mT
            if index < evaluations:
                # Of another matrix of this size: what is factored does not matter.
                torch.linalg.cholesky_ex(matrix)
        return product

    return run


# Lengths are known to about so many times eps.
RESOLVED = 32

CONTENDERS = {
    "ours": Contender("free_energy and its gradient", lambda data, tolerance: _training(data, _ours)),
    "ours_forward": Contender("free_energy", lambda data, tolerance: _forward(data, _ours)),
    "inverses": Contender(
        "explicit inverses, gradient by an attached Newton step",
        lambda data, tolerance: _training(data, _inverses(tolerance, attach=True)),
    ),
    "inverses_guess": Contender(
        "the same from the library's guess",
        lambda data, tolerance: _training(data, _inverses(tolerance, attach=True, guess=True)),
    ),
    "inverses_constant": Contender(
        "explicit inverses, gradient at constant multipliers, first derivatives only",
        lambda data, tolerance: _training(data, _inverses(tolerance, attach=False)),
    ),
    "inverses_forward": Contender(
        "explicit inverses, F only", lambda data, tolerance: _forward(data, _inverses(tolerance, attach=False))
    ),
}


def measured(setting: Timed, *, repeats: int, max_seconds: float) -> Row:
    """The row of one setting: evidence first, then times in turns, then ratios."""
    data = draw(setting)
    truth = baseline.reference(data)
    evidence = METHOD.log_partition(SpinSystem(data.couplings, data.field, data.beta)).report
    # What the library asks for, or what the rival, which stays in the dtype, can resolve there.
    tolerance = max(float(evidence.tolerance.max()), RESOLVED * torch.finfo(data.field.dtype).eps)
    rival = baseline.newton(Convex.of(*data[1:]), tolerance)
    functions: dict[str, Callable[[], Any]] = {}
    found: dict[str, dict[str, Any]] = {}
    first: dict[str, float] = {}
    for name, contender in CONTENDERS.items():
        function = contender.make(data, tolerance)
        answer, first[name] = once(function)
        found[name] = {"label": contender.label, **baseline.evidence(data, answer, truth)}
        if any(not found[name].get(key, 0.0) <= bound for key, bound in WRONG[setting.dtype].items()):
            found[name]["error"] = "the answer is wrong: see residual and gradient error"
        else:
            functions[name] = function
    found["ours"] |= {
        "failed": int(evidence.failed.sum()),
        "steps": evidence.num_steps.tolist(),
        "evaluations": evidence.num_evals.tolist(),
    }
    matrices = _matrices(data, int(evidence.num_evals.max()))
    functions["matrices"], found["matrices"] = matrices, {"label": "factors, inverses and products of ours alone"}
    first["matrices"] = once(matrices)[1]
    found["inverses"] |= {"failed": 0 if rival.solved else setting.batch, "steps": rival.steps, "trials": rival.trials}
    times = interleaved(functions, first, repeats=repeats, max_seconds=max_seconds)
    ratios: dict[str, float | None] = {
        name: times[above].median / times[below].median if below in times else None
        for name, (above, below) in RATIOS.items()
        if above in times or below not in times
    }
    return {
        "dtype": setting.dtype,
        **dataclasses.asdict(setting),
        "tolerance": tolerance,
        "evidence": found,
        "seconds": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "ratios": {**ratios, "C6 failures": float(found["ours"]["failed"])},
    }

"""Contenders side by side: their tests, then their answers, then their times in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from implicit_attention import Status

from . import guard
from .baselines import CONTENDERS, Contender, PicardCounts, Run
from .measure import Timing, interleaved, once
from .problems import Data, evidence, gradient_error

#: The part of the queries that an answer must have solved, by float64. Of those that float32 stopped within the
#: tolerance, rounding put one in 2,700 above it at most, by .4 %, over 16 problems of 8,192 queries.
CONVERGED = 0.999
#: The library is timed only with so small a gradient error.
GRADIENT_ERROR = {"float32": 1e-2, "float16": 2e-2, "bfloat16": 2e-2}


class Compared(NamedTuple):
    """SolveReport of all contenders, by name, and times of those that may be timed."""

    evidence: dict[str, dict[str, Any]]
    times: dict[str, Timing]


class Prepared(NamedTuple):
    """The functions to time, the evidence for all contenders, and the seconds of the first calls."""

    functions: dict[str, Callable[[], Run]]
    evidence: dict[str, dict[str, Any]]
    first: dict[str, float]


def compared(names: Iterable[str], data: Data, counts: PicardCounts, *, repeats: int, max_seconds: float) -> Compared:
    """Run these `CONTENDERS` on one problem; one that is red or breaks off has an `error` and no time.

    Rivals answer as well as they can; a wrong answer of the library is an error as well.
    """
    functions, found, first = prepared(names, data, counts)
    times = interleaved(functions, first, repeats=repeats, max_seconds=max_seconds, device=data.setting.device)
    return Compared(found, times)


def prepared(names: Iterable[str], data: Data, counts: PicardCounts, *, guarded: bool = True) -> Prepared:
    """The `CONTENDERS` with these names, each made and tried once: `compared` without its times.

    Their tests need not run again where the process that started this one has run them (`guarded`).
    """
    made = Prepared({}, {}, {})
    for name in names:
        contender = CONTENDERS[name]
        if guarded and (reason := guard.red(contender.tests)) is not None:
            made.evidence[name] = {"label": contender.label, "error": reason}
            continue
        function = contender.make(data, counts)
        result, made.evidence[name], made.first[name] = attempt(contender, function, data.setting.device)
        if result is not None and contender.solves:
            made.evidence[name] |= checked(name, data, result)
        if "error" not in made.evidence[name]:
            made.functions[name] = function
    return made


def attempt(
    contender: Contender, function: Callable[[], Run], device: str = "cpu"
) -> tuple[Run | None, dict[str, Any], float]:
    """One run, the evaluations it took or the error it raised, and its seconds."""
    try:
        result, seconds = once(function, device)
    except (RuntimeError, ValueError) as error:
        return None, {"label": contender.label, "error": f"{type(error).__name__}: {error}"}, 0.0
    evaluations = result.evaluations.double()
    found = {
        "label": contender.label,
        "evaluations_mean": float(evaluations.mean()),
        "evaluations_max": int(evaluations.max()),
    }
    return result, found, seconds


def checked(name: str, data: Data, result: Run) -> dict[str, Any]:
    """The evidence for an answer; a wrong one of the library gets an `error`.

    On a CPU every query of it must be CONVERGED as the library says itself.
    """
    found = evidence(data, result.state)
    wrong = found["converged"] < CONVERGED
    if result.status is not None:
        found["status"] = statuses(result.status)
        wrong |= data.setting.device == "cpu" and set(found["status"]) != {Status.CONVERGED.name}
    if result.gradients is not None:
        found["gradient_error"] = gradient_error(data, result.state, *result.gradients)
        wrong |= not found["gradient_error"] <= GRADIENT_ERROR[data.setting.dtype]
    if wrong and name.startswith("ours"):
        found["error"] = "not timed, the answer is wrong: see status, residuals and gradient error"
    return found


def statuses(status: Tensor) -> dict[str, int]:
    """Count the queries of each status."""
    return {Status(int(code)).name: int((status == code).sum()) for code in status.unique()}


def ratios(wanted: dict[str, tuple[str, str]], times: dict[str, Timing]) -> dict[str, float | None]:
    """Quotients of medians. A rival that breaks off has no ratio; ours without an answer has the ratio None."""
    made: dict[str, float | None] = {}
    for name, pair in wanted.items():
        if all(contender in times for contender in pair):
            made[name] = times[pair[0]].median / times[pair[1]].median
        elif all(contender in times or contender.startswith("ours") for contender in pair):
            made[name] = None
    return made

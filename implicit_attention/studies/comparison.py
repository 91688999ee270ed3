"""Several solvers on one problem: the residual that each of them reached, and its cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._solve import solve
from ..diagnostics import is_saddle
from ..problem import Problem
from ..solution import Solution, Trace, status_counts
from ..solvers import Anderson, Broyden, GradientDescent, NewtonKrylov, Picard, Solver
from .measure import median_times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SolverComparison", "SolverRecord", "compare_solvers"]

#: The columns of a table of records.
HEADERS = ("solver", "evaluations\nmedian/max", "residual\nmax", "converged", "saddles", "seconds", "status")
MISSING = "-"


@dataclasses.dataclass(frozen=True)
class SolverRecord:
    """The results of one solver on all problems together, and their cost.

    Attributes:
        name: of the solver.
        solver: itself, with its options.
        solution: of all problems; None where the solver refuses them, and then all numbers are None, too.
        evaluations_median: of the map, for one problem; those of problems that finish early count no further.
        evaluations_max: for the problem that needed most.
        residual_median: |f(z) - z| at the solution, of the problems where that is finite.
        residual_max: the largest of these.
        converged: share of the problems that met the solver's tolerance, in [0, 1].
        saddles: how many of these ended where the energy curves downwards; None where there is no energy.
        seconds: median time of a solve, without gradients.
        status: how many problems ended with which status, by its name.
        trace: the course of the residuals, if it was asked for.
        refused: why the solver does not take such a problem; empty if it does.

    Not for one solver alone, whose `Solution` says more.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, compare_solvers
        >>> energy = AnchoredEnergy(LogSumExp(torch.eye(4), beta=2.0), torch.ones(3, 4), anchor=0.5)
        >>> record = compare_solvers(energy, torch.ones(3, 4)).records[0]
        >>> record.name, record.converged, record.saddles, record.status
        ('Picard', 1.0, 0, {'CONVERGED': 3})
    """

    name: str
    solver: Solver
    solution: Solution | None = None
    evaluations_median: float | None = None
    evaluations_max: float | None = None
    residual_median: float | None = None
    residual_max: float | None = None
    converged: float | None = None
    saddles: int | None = None
    seconds: float | None = None
    status: dict[str, int] = dataclasses.field(default_factory=dict)
    trace: Trace | None = None
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class SolverComparison:
    """Records of several solvers on one problem; `print` shows them as a table.

    Attributes:
        records: one for each solver, in their order.

    Not for the solvers of the retrieval task on data of your own, which `implicit-attention compare` compares with
    gradients and memory.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, Picard, compare_solvers
        >>> energy = AnchoredEnergy(LogSumExp(torch.eye(4), beta=2.0), torch.ones(3, 4), anchor=0.5)
        >>> comparison = compare_solvers(energy, torch.ones(3, 4), [Picard()])
        >>> [record.name for record in comparison.records]
        ['Picard']
        >>> comparison.plot().axes[0].get_ylabel()
        'residual |f(z) - z|'
    """

    records: tuple[SolverRecord, ...]

    def __str__(self) -> str:
        rows = [tuple(header.replace("\n", " ") for header in HEADERS), *map(_cells, self.records)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def table(self) -> Any:
        """A `rich.table.Table` where rich is installed, else the text of `print`."""
        try:
            from rich import box
            from rich.table import Table
        except ImportError:
            return str(self)
        table = Table(box=box.SIMPLE_HEAD)
        for header in HEADERS:
            table.add_column(header, justify="left" if header in ("solver", "status") else "right", no_wrap=True)
        for record in self.records:
            table.add_row(*_cells(record))
        return table

    def __rich__(self) -> Any:
        return self.table()

    def plot(self, **options: Any) -> Figure:
        """`plotting.convergence_figure` of all solvers that took the problem.

        Args:
            **options: its `tolerance` and `title`.

        Raises:
            TypeError: a comparison made with trace=False.
        """
        from ..plotting import convergence_figure

        return convergence_figure({r.name: r.trace for r in self.records if not r.refused}, **options)


def compare_solvers(
    problem: Problem,
    initial: Float[Tensor, "..."],
    solvers: Mapping[str, Solver] | Sequence[Solver] | None = None,
    *,
    trace: bool = True,
    min_seconds: float = 0.1,
) -> SolverComparison:
    """Compare several solvers on a problem: evaluations, residuals, saddles, time.

    Each solver solves z = f(z) from `initial` without gradients, as `solve` does: by a fused operation where there is
    one. It is then timed over and over. A solver that does not take such a problem has a record that says why.

    Args:
        problem: as in `solve`.
        initial: as in `solve`, (*lead, *event).
        solvers: by name, or in a sequence; by default all methods of this library, with their default options:
            `Picard`, `GradientDescent`, `Anderson`, `Broyden` and `NewtonKrylov`. Those of other libraries are
            `solvers.TorchDEQ` and `solvers.SciPy`.
        trace: whether to solve once more with the states of all steps kept, which `plot` needs.
        min_seconds: for how long each solver is timed; a solve that takes longer is timed once or twice.

    Returns:
        A `SolverComparison`; `print` shows it.

    Raises:
        TypeError, ValueError: arguments that do not fit, as in `solve`; something that is no solver, or none at all.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, Anderson, LogSumExp, Picard, compare_solvers
        >>> keys, queries = torch.eye(8), torch.ones(3, 8) + torch.arange(3.0)[:, None]
        >>> energy = AnchoredEnergy(LogSumExp(keys, beta=4.0), queries, anchor=0.2)
        >>> comparison = compare_solvers(energy, queries, {"plain": Picard(), "mixed": Anderson(history=3)})
        >>> str(comparison).splitlines()[0].split()[:3]
        ['solver', 'evaluations', 'median/max']

    Not for what a solver's gradient costs: time `solve(...).value.sum().backward()`.
    """
    remedy = "wrap a function as FixedPointMap(f, *tensors, event_ndim=...)"
    _validate.check_instance("problem", problem, Problem, "be an instance of Problem", remedy)
    problem.check_state(initial)
    _validate.check_number("min_seconds", min_seconds, low=0.0)
    chosen = _named(solvers)
    return SolverComparison(tuple(_record(n, s, problem, initial, trace, min_seconds) for n, s in chosen.items()))


def _named(solvers: Any) -> dict[str, Solver]:
    if solvers is None:
        solvers = [Picard(), GradientDescent(), Anderson(), Broyden(), NewtonKrylov()]
    if not isinstance(solvers, Mapping):
        if isinstance(solvers, Solver | str) or not isinstance(solvers, Sequence):
            remedy = "for example [Picard(), Anderson()]"
            raise TypeError(_validate.message("solvers", "be several, in a list or by name", repr(solvers), remedy))
        kinds = [type(solver).__name__ for solver in solvers]
        # The options tell two solvers of one kind apart.
        solvers = {k if kinds.count(k) == 1 else repr(s): s for k, s in zip(kinds, solvers, strict=True)}
    _validate.require(len(solvers) > 0, "solvers", "name one solver at least", "none", "leave it out for all")
    for name, solver in solvers.items():
        required, remedy = "be an instance of Solver", "for example Anderson()"
        _validate.check_instance(f"solvers[{name!r}]", solver, Solver, required, remedy)
    return dict(solvers)


def _record(
    name: str, solver: Solver, problem: Problem, initial: Tensor, trace: bool, min_seconds: float
) -> SolverRecord:
    try:
        solver.check_problem(problem)
        problem.check_solver(solver)
    except (TypeError, ValueError) as error:
        return SolverRecord(name, solver, refused=str(error))

    @torch.no_grad()
    def run(trace: bool = False) -> Solution:
        return solve(problem, initial, solver=solver, on_failure="ignore", trace=trace)

    solution = run()
    saddle = is_saddle(problem, solution.value) & solution.converged if problem.has_energy else None
    reached = summary(solution, solution.converged, saddle)
    course = run(trace=True).trace if trace else None
    # The time ends the runs, not their number.
    (seconds,) = median_times(run, device=initial.device, repeats=10**9, max_seconds=min_seconds)
    return SolverRecord(name, solver, solution, seconds=seconds, trace=course, **reached)


def summary(
    solution: Solution, converged: Tensor, saddle: Tensor | None, part: slice | tuple[()] = ()
) -> dict[str, Any]:
    """Summarise a solution over its problems, or over a `part` of them; None for numbers that do not exist.

    Args:
        solution: of several problems, (*lead).
        converged: which of them count as converged, (*lead).
        saddle: which of them are saddles, (*lead), or None.
        part: rows of *lead.
    """
    evaluations, residual = solution.num_evals[part].double().flatten(), solution.residual[part].double().flatten()
    reached = residual[residual.isfinite()]
    return {
        "evaluations_median": median(evaluations),
        "evaluations_max": float(evaluations.max()) if len(evaluations) else None,
        "residual_median": median(reached),
        "residual_max": float(reached.max()) if len(reached) else None,
        "converged": float(converged[part].double().mean()) if len(evaluations) else None,
        "saddles": None if saddle is None else int(saddle[part].sum()),
        "status": status_counts(solution.status[part]),
    }


def median(values: Tensor) -> float | None:
    """The lower median of a vector; None of an empty one."""
    return float(values.sort().values[(len(values) - 1) // 2]) if len(values) else None


def _cells(record: SolverRecord) -> tuple[str, ...]:
    if record.refused:
        return (record.name, *(MISSING,) * 5, f"refused: {record.refused}")
    counts = " ".join(name if len(record.status) == 1 else f"{count} {name}" for name, count in record.status.items())
    return (
        record.name,
        f"{_text(record.evaluations_median, '.0f')}/{_text(record.evaluations_max, '.0f')}",
        _text(record.residual_max, ".1e"),
        _text(record.converged, ".1%"),
        _text(record.saddles, "d"),
        _text(record.seconds, ".2e"),
        counts or MISSING,
    )


def _text(number: float | None, form: str) -> str:
    return MISSING if number is None else format(number, form)

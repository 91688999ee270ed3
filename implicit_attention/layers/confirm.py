"""Further solves of the same problems, to tighter tolerances, from other starts or by another solver: do they agree?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import _validate
from .._torch import norm
from ..failure import Located
from ..options import SolveOptions
from ..solution import SolveReport
from ..solvers import Picard, Solver
from .block_call import EXACT, BlockCall
from .block_state import StateLayout

#: States that differ by fewer of their tolerances than this are the same fixed point.
SAME = 100.0
#: The smallest relative tolerance to solve on to, in units of the rounding of a state.
ROUNDING = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confirm:
    """Further solves of each sample of an `Equilibrium` in evaluation mode, to see whether they give the same answer.

    A small residual says that a state changes little, not that it stays, nor that it is the only fixed point. By
    default the solve goes on from its answer to a tenth of its tolerance, which turns up states that drift on. Damped
    steps from its start, `Confirm(around="start")`, take another way, and turn up wrong fixed points that rest, too, at
    about twice the evaluations of the solve. Starts with noise turn up other fixed points; where the noise does
    not fade, as in parts that the problem leaves free, they refuse right answers too (measured in `python -m benchmarks
    usefulness --only PATHS,MAZES_IMAGE`).

    Args:
        count: the number of further solves; 1 without noise, as others would be the same.
        around: where they start: at the "answer", or at the "start" of the solve.
        noise: the size of the normal numbers that are added to it, in units of the root mean square of the answer, in
            which padding counts as 0.
        readout: a function of a state, or a module, whose results, the classes of an answer, are compared: integers or
            booleans; None compares states, which are the same where they differ by less than 100 tolerances.
        solver: of the further solves; None is that of the first with noise; without, from the answer the same to a
            tenth of its tolerance (to the same one where autocast rounds to half precision), and from the start steps
            that are damped by half, at most twice as many.
        seed: of the noise, which leaves torch's random numbers as they are.

    Raises:
        TypeError, ValueError: arguments that do not fit.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers import Confirm
        >>> from implicit_attention.models.reasoners import ConvolutionalReasoner
        >>> layer = ConvolutionalReasoner(8, inputs=1, axes=1, confirm=Confirm(count=2, noise=0.1)).eval()
        >>> with torch.no_grad():
        ...     z = layer(torch.randn(3, 1, 12))
        >>> layer.last_solve.agreement.shape, layer.last_solve.confirmed.dtype
        (torch.Size([3]), torch.bool)

    Not for maps that contract, whose residual bounds how far the one fixed point is.
    """

    count: int = 1
    around: Literal["start", "answer"] = "answer"
    noise: float = 0.0
    readout: Callable[[Any], Tensor] | None = None
    solver: Solver | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _validate.check_integer("count", self.count, low=1)
        _validate.check_choice("around", self.around, ("start", "answer"))
        noise = _validate.check_number("noise", self.noise, low=0.0)
        required, remedy = "be 1 without noise, as further solves would be the same", "for example noise=0.1"
        _validate.require(self.count == 1 or noise > 0, "count", required, self.count, remedy)
        _validate.check_integer("seed", self.seed, low=0)
        _validate.require(self.seed < 2**63, "seed", "be below 2^63", self.seed)
        solver: Any = self.solver
        readout: Any = self.readout
        if solver is not None:
            _validate.check_instance("solver", solver, Solver, "be a solver", "for example Picard(damping=0.5)")
            required = "have a tolerance, without which no solve converges"
            _validate.require(not solver.fixed_budget, "solver", required, repr(solver), "set rtol")
        if readout is not None and not callable(readout):
            received = type(readout).__name__
            raise TypeError(_validate.message("readout", "be a function of states, or a module", received))


#: The further solves of which a layer is told the number alone; behind these start others, beside the answer.
FIRST, NOISE = (Confirm(), Confirm(around="start")), 0.1

#: How a layer is told of further solves: by their number, a `Confirm`, or several.
Confirmation: TypeAlias = int | Confirm | tuple[Confirm, ...] | None


def checked_confirm(given: Any, causal: bool = False) -> tuple[Confirm, ...]:
    """The further solves of an argument `confirm`; 0 and None are none."""
    if given is None:
        return ()
    remedy = "compare calls with other values of `start`"
    _validate.require(not causal, "confirm", "be None for a layer with causal=True", given, remedy)
    several = given if isinstance(given, tuple) else (given,)
    if all(isinstance(each, Confirm) for each in several):
        return several
    count: int = _validate.check_integer("confirm", given, low=0, remedy="or pass a Confirm")
    others = count - len(FIRST)
    return (*FIRST, Confirm(count=others, noise=NOISE)) if others > 0 else FIRST[:count]


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class ConfirmReport(SolveReport):
    """The report of a solve that further solves were held against.

    Attributes:
        agreement: the share of the further solves that have settled at the same answer, (*lead).
        confirm_evals: evaluations that they made, beside `num_evals`, (*lead).

    Examples:
        >>> import torch
        >>> from implicit_attention.models.reasoners import ConvolutionalReasoner
        >>> layer = ConvolutionalReasoner(8, inputs=1, axes=1).eval()
        >>> with torch.no_grad():
        ...     z = layer(torch.randn(3, 1, 12), confirm=1)
        >>> bool((layer.last_solve.confirm_evals > 0).all())
        True

    Not for solves without `confirm`, whose `SolveReport` says all.
    """

    agreement: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0))
    confirm_evals: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))

    @property
    def confirmed(self) -> Tensor:
        """(*lead), True where the solve and all further ones have settled at the same answer."""
        return self.converged & (self.agreement == 1)

    def __repr__(self) -> str:
        text = super().__repr__()[:-1]
        return f"{text}; {int(self.confirmed.sum())} confirmed by further solves)"


@torch.no_grad()
def confirmed(further: tuple[Confirm, ...], call: BlockCall, state: Any, report: SolveReport) -> ConfirmReport:
    """The report of a solve, with what further solves of the same call say."""
    agreement = torch.zeros(call.map.layout.lead, device=call.map.layout.device)
    evaluations = torch.zeros_like(report.num_evals)
    # A further solve that fails confirms nothing, and is no failure of the call.
    call = dataclasses.replace(call, on_failure=Located("ignore", call.on_failure.site))
    for how in further:
        for same, made in _held_against(how, call, state, report):
            agreement += same
            evaluations += made
    count = sum(how.count for how in further)
    return ConfirmReport(**report._parts, agreement=agreement / count, confirm_evals=evaluations)


def _held_against(how: Confirm, call: BlockCall, state: Any, report: SolveReport) -> Iterator[tuple[Tensor, Tensor]]:
    """For each further solve whether it ends where the first one did, and its evaluations, both (*lead)."""
    layout = call.map.layout
    begin = state if how.around == "answer" else call.initial
    generator = torch.Generator(layout.device).manual_seed(how.seed)
    own = _flat(layout, state), _classes(how, state, layout.lead)
    options, solver = _options(how, call), how.solver or _damped(how, call)
    call = dataclasses.replace(call, options=options)
    for _ in range(how.count):
        start = _beside(begin, state, how.noise, len(layout.lead), generator)
        # Nobody differentiates it, by an adjoint that may ask for another solver.
        other, found = dataclasses.replace(call, initial=start).solved(solver, EXACT)
        if how.readout is None:
            apart = norm(_flat(layout, other) - own[0])
            same = found.converged & (apart <= SAME * report.tolerance)
        else:
            same = found.converged & (_classes(how, other, layout.lead) == own[1]).all(-1)
        yield same, found.num_evals


def _damped(how: Confirm, call: BlockCall) -> Solver | None:
    """The damped steps of further solves from the start, unless there is noise."""
    if how.noise > 0 or how.around == "answer":
        return None
    solver = call.options.effective_solver
    damping = (1 + getattr(solver, "damping", 0.0)) / 2
    return Picard(rtol=solver.rtol, atol=solver.atol, max_steps=2 * solver.max_steps, damping=damping)


def _options(how: Confirm, call: BlockCall) -> SolveOptions:
    """The options of the further solves: from the answer, without noise, to a tenth of the tolerance."""
    if how.noise > 0 or how.around == "start":
        return call.options
    solver = call.options.effective_solver
    # A tolerance below the rounding of a block's results would never be reached.
    least = ROUNDING * torch.finfo(call.problem().function.rounding).eps
    rtol, atol = (max(given / 10, min(given, least)) for given in (solver.rtol, solver.atol))
    return dataclasses.replace(call.options, solver=dataclasses.replace(solver, rtol=rtol, atol=atol))


def _flat(layout: StateLayout, state: Any) -> Tensor:
    return _rows(layout.pack(state), len(layout.lead))


def _rows(t: Tensor, lead: int) -> Tensor:
    """One row a sample, (*lead, n), of no samples too."""
    return t.reshape(*t.shape[:lead], math.prod(t.shape[lead:]))


def _classes(how: Confirm, state: Any, lead: torch.Size) -> Tensor:
    """The classes that the read-out gives each sample, (*lead, n)."""
    if how.readout is None:
        return torch.zeros(0)
    read: Any = how.readout(state)
    fits = isinstance(read, Tensor) and read.shape[: len(lead)] == lead
    received = f"shape {tuple(read.shape)}" if isinstance(read, Tensor) else type(read).__name__
    required, remedy = f"return a tensor whose first axes are {tuple(lead)}", "for example head(z).argmax(-1)"
    _validate.require(fits, "readout", required, received, remedy)
    required = "return classes, integers or booleans, which are compared one by one"
    _validate.require(not read.is_floating_point(), "readout", required, f"dtype {read.dtype}", remedy)
    return _rows(read, len(lead))


def _beside(begin: Any, state: Any, noise: float, lead: int, generator: torch.Generator) -> Any:
    """The states `begin` plus noise of the size of `state`, the same for each sample: its answer has no company."""

    def moved(z: Tensor, settled: Tensor) -> Tensor:
        size = _rows(settled.nan_to_num(0.0, 0.0, 0.0), lead).square().mean(-1).sqrt()
        drawn = torch.randn(z.shape[lead:], generator=generator, dtype=torch.float32, device=z.device).to(z)
        return z + noise * size.reshape(*size.shape, *(1,) * (z.ndim - lead)).to(z) * drawn

    return pytree.tree_map(moved, begin, state)

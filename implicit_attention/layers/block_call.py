"""One call of an `Equilibrium`: its map, solved for a fixed point, or iterated for some steps by a bare loop."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._solve import by_adjoint, solve
from .._torch import HALF, is_batched, is_exporting, norm
from ..adjoints import Adjoint, Implicit, Request, Reversible, Unrolled
from ..adjoints.reversible import coupled_steps
from ..linear import GMRES
from ..options import SolveOptions
from ..problem import PerSample, Shared
from ..solution import AdjointReport, Record, Solution, Status
from ..solvers import Picard, Solver
from ..solvers.loop import plain_steps
from .block_map import BlockMap, BlockProblem
from .compiled_graphs import CompiledPicard, Graphs

#: The adjoint of a layer without one of its own.
EXACT = Implicit()
#: The tolerance of the adjoint where autocast makes its products in half precision.
HALF_RTOL = 1e-2


@dataclasses.dataclass(frozen=True, eq=False)
class BlockCall:
    """One call of the layer.

    Attributes:
        map: the map of the block.
        initial: the state where it starts.
        inputs: the tensors among its arguments.
        options: how it is solved.
        on_failure: the treatment of failures by the layer.
        checked: the modes of the block in which `BlockProblem` passed its checks.
        graphs: what the compiler made of the block, for a layer that is compiled.
    """

    map: BlockMap
    initial: Any
    inputs: tuple[PerSample | Shared, ...]
    options: SolveOptions
    on_failure: Any
    checked: set[tuple[Any, str]]
    graphs: Graphs | None = None

    def solved(
        self, solver: Solver | None = None, adjoint: Adjoint | None = None, measured: bool = True
    ) -> tuple[Any, Solution]:
        """The fixed point by the solver and adjoint of the layer, or by these.

        measured: whether the residual is measured where that costs an evaluation of its own.
        """
        layout, options = self.map.layout, self.options
        problem, packed = self.problem(), self._packed()
        # Products in half precision carry no more.
        exact = Implicit(GMRES(rtol=HALF_RTOL)) if problem.function.rounding in HALF else EXACT
        wanted, adjoint = options.effective_solver, adjoint or options.effective_adjoint or exact
        to_tolerance = solver is None and not wanted.fixed_budget
        if isinstance(adjoint, Reversible) and to_tolerance and not self.map.block.training:
            # What its steps have trained can be solved; in training they are meant, and the adjoint says so.
            adjoint = exact
        solver = solver or (wanted if self.graphs is None else CompiledPicard.like(wanted, self.graphs))
        if is_exporting():
            solution = solve(problem, packed, solver=solver, adjoint=adjoint, on_failure=self.on_failure)
        else:
            problem.check_axes(packed)
            # The layer has checked its options.
            solution = by_adjoint(self._request(problem, packed, solver, measured), adjoint)
        found, wide = solution.value, layout.widened()
        state = wide.unpack(found)
        if not layout.single:
            solution = BlockSolution(**vars(solution) | {"value": state, "packed": found})
        return state if wide == layout else layout.unpack(found), solution

    def problem(self) -> BlockProblem:
        """The fixed points of the map, in the precision that the block takes."""
        return self._problem().in_precision(self._packed())

    def _problem(self) -> BlockProblem:
        return BlockProblem(self.map, *self.inputs, event_ndim=self.map.layout.event_ndim, checked=self.checked)

    def _packed(self) -> Tensor:
        return self.map.layout.pack(self.initial)

    def _request(self, problem: BlockProblem, packed: Tensor, solver: Solver, measured: bool) -> Request:
        report = AdjointReport(on_failure=self.on_failure.on_failure, site=self.on_failure.site)
        return Request(problem, packed, solver, "auto", False, report, measured=measured)

    def looped(self, steps: int, measured: bool) -> tuple[Any, Solution | Record]:
        """The state after plain steps, by a bare loop at the cost of a loop written by hand."""
        layout = self.map.layout
        solver = self.options.effective_solver
        damping = solver.damping if isinstance(solver, Picard) else 0.0
        adjoint = self.options.adjoint
        if isinstance(adjoint, Reversible):
            adjoint.check_damping(damping)
            if not (torch.compiler.is_compiling() or is_exporting()):
                return self.solved(Picard(rtol=0, atol=0, max_steps=steps), adjoint, measured)
            state = self._coupled(steps, adjoint)
        else:
            state = self._stepped(steps, damping)
        detached = pytree.tree_map(lambda z: z.detach(), state)
        finite = layout.finite(detached)
        if not torch.compiler.is_compiling() and not is_batched(finite) and not bool(finite.all()):
            # Their gradient, 0 * NaN, must not reach the tensors that all samples share.
            return self.solved(Picard(rtol=0, atol=0, max_steps=steps, damping=damping), Unrolled())
        unknown = finite.new_full(finite.shape, torch.nan, dtype=torch.float32)
        residual = self._residual(detached) if measured else unknown
        count = torch.full_like(finite, steps, dtype=torch.int32)
        status = torch.full_like(count, int(Status.BUDGET if steps else Status.EXPLICIT), dtype=torch.int8)
        status = status.masked_fill(~finite, int(Status.DIVERGED))
        # Two evaluations make a reversible step.
        evaluations = 2 * count if isinstance(adjoint, Reversible) else count
        record = Record(status, residual, torch.zeros_like(residual), count, evaluations + int(measured))
        if torch.compiler.is_compiling():
            return state, record
        return state, self._solution(record, state, layout.pack(state))

    def _solution(self, record: Record, state: Any, packed: Tensor) -> Solution:
        """The solution of plain steps."""
        report = AdjointReport(on_failure=self.options.on_failure, site=self.on_failure.site)
        given = record, report, self.options.effective_solver.remedies
        if self.map.layout.single:
            return Solution(*given, value=state)
        return BlockSolution(*given, value=state, packed=packed)

    def _stepped(self, steps: int, damping: float) -> Any:
        # The start may be a tensor of the caller.
        state = self.initial if steps else pytree.tree_map(torch.clone, self.initial)
        arguments = self._arguments()
        return plain_steps(lambda z: self.map.step(z, arguments), state, steps, damping)

    def _coupled(self, steps: int, adjoint: Reversible) -> Any:
        """The state after the steps of the adjoint, as operations that a compiler records."""
        layout, arguments = self.map.layout, self._arguments()

        def mapped(z: Tensor) -> Tensor:
            return layout.pack(self.map.step(layout.unpack(z), arguments))

        return layout.unpack(coupled_steps(mapped, layout.pack(self.initial), steps, adjoint.fraction))

    def _arguments(self) -> Any:
        return self.map.frame.filled(tuple(wrapped.value for wrapped in self.inputs))

    @torch.no_grad()
    def _residual(self, state: Any) -> Tensor:
        """|f(z) - z| of every sample at a state without graph."""
        layout = self.map.layout
        with self.map.precision():
            mapped = self.map.step(state, self._arguments())
        change = layout.pack(mapped) - layout.pack(state)
        return norm(change.reshape(*layout.lead, math.prod(change.shape[len(layout.lead) :])))


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True, eq=False)
class BlockSolution(Solution):
    """The `Solution` of a state that is a tuple, list or dict of tensors, which is its `value`.

    Attributes:
        packed: the same as one vector per sample, (*lead, n).
    """

    value: Any
    packed: Tensor

    @property
    def _size(self) -> Tensor:
        return norm(self.packed.detach())

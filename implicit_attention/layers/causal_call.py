"""One call of a causal `Equilibrium`: tokens that are lost stay out of it, and each token has evidence of its own."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _validate
from .._torch import along, host_may_look, is_batched, is_exporting, refusing, transforms_active
from ..adjoints import Adjoint, Request, Reversible
from ..failure import report_failures
from ..problem import counted
from ..solution import Record, Solution, Status
from ..solvers import Picard, Solver
from ..solvers.loop import plain_steps
from .block_call import BlockCall, BlockSolution
from .block_map import BlockProblem
from .block_state import StateLayout
from .cache import check_owned, joined_key_mask
from .past import BlockCache
from .past_check import check_past, check_update
from .token_solve import TokenSolve
from .token_window import (
    CausalProblem,
    Reads,
    only_existing,
    per_token,
)


@dataclasses.dataclass(frozen=True, eq=False)
class CausalCall(BlockCall):
    """One call of a causal layer.

    Attributes:
        tokens: how all tokens are solved.
        exists: which tokens of the call exist, (*batch, N), or None for all.
        lost: tokens, (*batch, N), that are not finite, or read such ones; None for none.
        kinds: which inputs have an entry for each token; None where that is unclear.
        solves: holds an entry once the call was a solve.
    """

    tokens: TokenSolve = dataclasses.field(kw_only=True)
    exists: Tensor | None = None
    lost: Tensor | None = None
    kinds: tuple[bool | None, ...] = ()
    solves: list[bool] = dataclasses.field(default_factory=list)

    def _problem(self) -> CausalProblem:
        layout = self.map.layout
        problem = CausalProblem(self.map, *self.inputs, event_ndim=layout.event_ndim + 1, checked=self.checked)
        problem.exists, problem.token_order = self.exists, self.tokens.order
        masked = self.tokens.exist()
        if masked is not None:
            problem.in_mask = masked[..., -layout.lead[-1] :].expand(layout.lead)
        problem.of_tokens = tuple(kind is True for kind in self.kinds)
        return problem

    def _packed(self) -> Tensor:
        return only_existing(super()._packed(), self.exists)

    def _request(self, problem: BlockProblem, packed: Tensor, solver: Solver, measured: bool) -> Request:
        assert isinstance(problem, CausalProblem)
        self._check_windows(problem, packed)
        if self.tokens.cache is None:
            problem.check_causal(packed)
        return dataclasses.replace(super()._request(problem, packed, solver, measured), by_token=self.tokens)

    def _check_windows(self, problem: CausalProblem, packed: Tensor) -> None:
        """Raise where the call asks for what a block that gets all tokens at once cannot do."""
        if self.tokens.past and self.tokens.reads is None and None in self.kinds:
            required = "say whether they have an entry for each token, for calls with a cache or by chunks"
            received = "one whose first axes are as long as those of samples and tokens"
            remedy = "wrap what all tokens read in Shared or PerSample, and make what each has its own a part of x"
            fits = self.tokens.cache is None and self.tokens.chunk is None
            _validate.require(fits, "arguments", required, received, remedy)
            self.tokens.past = False
        if self.tokens.past:
            return
        block = type(self.map.block).__name__
        for name, given in (("cache", self.tokens.cache), ("chunk", self.tokens.chunk)):
            required = f"be None for {block}, which does not read settled tokens by a keyword argument `past`"
            remedy = "see `implicit_attention.layers.Past`, and give it tensors with an entry for each token alone"
            _validate.require(given is None, name, required, "one", remedy)

    def solved(
        self, solver: Solver | None = None, adjoint: Adjoint | None = None, measured: bool = True
    ) -> tuple[Any, Solution]:
        tokens = self.tokens
        self.solves.append(True)
        if self.map.layout.lead.numel() == 0 and not is_exporting():
            return self._nothing()
        with torch.set_grad_enabled(torch.is_grad_enabled() and tokens.differentiable):
            state, solution = super().solved(solver, adjoint, measured)
        packed = solution.packed if isinstance(solution, BlockSolution) else solution.value
        if packed.requires_grad and not (transforms_active() or is_batched(packed) or is_exporting()):
            bad = ~packed.detach().flatten(len(self.map.layout.lead)).isfinite().all(-1)
            if bool(bad.any()):
                return self._without(bad, solution.record, solver, adjoint, measured)
        if tokens.cache is not None:
            lead = packed.shape[: packed.ndim - self.map.layout.event_ndim]
            tokens.cache.commit(tokens.exist(), solution.status, solution.num_evals, packed.reshape(*lead, -1))
        record = solution.record
        if tokens.record is None:
            # Transforms, and adjoints with steps of their own, have a record of whole samples.
            within = is_batched(record.status) or transforms_active()
            count = self.map.layout.lead[-1]
            spread = record if within else record.map(lambda t: t.unsqueeze(-1).expand(*t.shape, count))
            record = self._judged(spread)
        if self.lost is not None:
            state = self._with_lost(state)
        return state, dataclasses.replace(solution, record=record, value=state)

    def _without(
        self, bad: Tensor, record: Record, solver: Solver | None, adjoint: Adjoint | None, measured: bool
    ) -> tuple[Any, Solution]:
        """The answer once more without tokens that are not finite, and those behind them, but with its first record.

        In gradients of tensors that all tokens share 0 * NaN would be NaN.
        """
        bad = self.tokens.order.behind(bad)
        lost = bad if self.lost is None else bad | self.lost
        exists = ~lost if self.exists is None else self.exists & ~lost
        inputs = tuple(
            type(given)(only_existing(given.value, ~lost)) if own and given.value.is_floating_point() else given
            for given, own in zip(self.inputs, self.kinds, strict=True)
        )
        initial = pytree.tree_map(lambda t: only_existing(t, ~lost), self.initial)
        tokens = TokenSolve(self.tokens.reads, self.tokens.past, chunk=self.tokens.chunk, _order=self.tokens.order)
        parts: dict[str, Any] = {"inputs": inputs, "initial": initial, "exists": exists, "lost": lost, "tokens": tokens}
        state, solution = dataclasses.replace(self, **parts).solved(solver, adjoint, measured)
        return state, dataclasses.replace(solution, record=record)

    def _nothing(self) -> tuple[Any, Solution]:
        """The answer where there are no tokens."""
        lead, layout = self.map.layout.lead, self.map.layout
        count = torch.zeros(lead, dtype=torch.int32, device=layout.device)
        none = torch.zeros(lead, device=layout.device)
        record = Record(count.to(torch.int8), none, none, count, count)
        if self.tokens.cache is not None and lead[-1]:
            self.tokens.cache.commit(self.tokens.exist(), record.status, count, self._packed().flatten(len(lead)))
        return self.initial, self._solution(record, self.initial, self._packed())

    def looped(self, steps: int, measured: bool) -> tuple[Any, Solution | Record]:
        if self.tokens.cache is not None:
            return self._looped_behind(steps, self.tokens.cache)
        if not (torch.compiler.is_compiling() or is_exporting()):
            self._problem().check_causal(self._packed())
        state, solution = super().looped(steps, measured)
        if self.lost is None or self.solves:
            return state, solution
        state = self._with_lost(state)
        if isinstance(solution, Record):
            return state, self._judged(solution)
        return state, dataclasses.replace(solution, record=self._judged(solution.record), value=state)

    def _stepped(self, steps: int, damping: float) -> Any:
        return self._existing(super()._stepped(steps, damping))

    def _coupled(self, steps: int, adjoint: Reversible) -> Any:
        return self._existing(super()._coupled(steps, adjoint))

    def _existing(self, state: Any) -> Any:
        """The state after plain steps with 0 for tokens that do not exist, as a solve has it."""
        return pytree.tree_map(lambda z: only_existing(z, self.exists), state)

    def _judged(self, record: Record) -> Record:
        """The record with tokens that are lost, or samples that hold some, after an error or a warning about them."""
        if self.lost is None:
            return record
        record = record.nonfinite_at(self.lost if record.status.ndim == self.lost.ndim else self.lost.any(-1))
        if not (torch.compiler.is_compiling() or is_batched(record.status) or transforms_active()):
            remedies = self.options.effective_solver.remedies
            report_failures(self.on_failure, type(self.map.block).__name__, record, remedies)
        return record

    @torch.no_grad()
    def _looped_behind(self, steps: int, cache: BlockCache) -> tuple[Any, Solution]:
        """The state after plain steps beside the tokens of a cache, which keeps the keys of the last step."""
        if self.map.layout.lead.numel() == 0:
            return self._nothing()
        required = "be at least 1 with a cache, which keeps the keys of the last step"
        _validate.require(steps > 0, "steps", required, steps)
        layout, solver, problem, z = self.map.layout, self.options.effective_solver, self._problem(), self._packed()
        self._check_windows(problem, z)
        check_past(problem, z, self.tokens.reads, cache)
        damping = solver.damping if isinstance(solver, Picard) else 0.0
        step, start, lead = self.tokens.window(problem, z), z, z.shape[: z.ndim - layout.event_ndim]
        z = plain_steps(lambda z: step(counted(z)), start, steps, damping)
        check_update(problem, cache)
        count = torch.full(lead, steps, dtype=torch.int32, device=z.device)
        finite = z.reshape(*lead, -1).isfinite().all(-1)
        if not bool(finite.all()):
            # Once more: a token that is not finite must not reach those before it by a weight of 0.
            finite = torch.ones_like(finite)

            def existing(z: Tensor) -> Tensor:
                nonlocal finite
                finite = finite & ~self.tokens.order.behind(~z.reshape(*lead, -1).isfinite().all(-1))
                return only_existing(z, finite)

            z = existing(plain_steps(lambda z: step(existing(z)), start, steps, damping))
            z = torch.where(finite.reshape(*lead, *(1,) * layout.event_ndim), z, torch.nan)
        status = torch.full_like(count, int(Status.BUDGET), dtype=torch.int8)
        status = status.masked_fill(~finite, int(Status.DIVERGED))
        if self.lost is not None:
            status = status.masked_fill(self.lost, int(Status.NONFINITE))
        unknown = torch.full(lead, torch.nan, device=z.device)
        record = self.tokens.judged(Record(status, unknown, torch.zeros_like(unknown), count, count))
        if bool(record.failed.any()):
            report_failures(self.on_failure, type(self.map.block).__name__, record, solver.remedies)
        cache.commit(self.tokens.exist(), record.status, count, z.reshape(*lead, -1))
        state = layout.unpack(z) if self.lost is None else self._with_lost(layout.unpack(z))
        return state, self._solution(record, state, z)

    def _with_lost(self, state: Any) -> Any:
        """The state with NaN where tokens are lost."""
        lost = self.lost
        assert lost is not None
        return pytree.tree_map(lambda tensor: torch.where(along(lost, tensor), torch.nan, tensor), state)


def begin_tokens(
    tokens: TokenSolve, x: Any, initial: Any, layout: StateLayout, owner: object, *, warm: bool
) -> tuple[Any, Any, dict[str, Any]]:
    """Input and start of a causal call, and what a `CausalCall` knows beyond a `BlockCall`.

    warm: whether a cache may say where its tokens start.
    """
    lead, event = layout.lead, layout.events[0]
    required = "number tokens on the axis after those of samples, with causal=True"
    _validate.require(len(event) > 1, "start", required, f"a state of one sample with shape {tuple(event)}")
    count = event[0]
    for shape in layout.events:
        fits = shape[:1] == event[:1] and len(shape) > 1
        _validate.require(
            fits, "start", f"have tensors with {count} tokens each", f"shape {tuple(shape)} of one sample"
        )
    reads, cache, exists = tokens.reads or Reads(), tokens.cache, None
    if cache is not None:
        check_owned(cache, BlockCache, owner, tuple(lead))
        given = [x] if isinstance(x, Tensor) else [t for t in pytree.tree_leaves(x) if isinstance(t, Tensor)]
        if not any(per_token(tensor, lead, count) for tensor in given):
            required, shapes = "have as many tokens as x beside a cache", [tuple(tensor.shape) for tensor in given]
            remedy = "pass the start of the new tokens alone"
            raise ValueError(_validate.message("start", required, f"{count} for x {shapes}", remedy))
        key_mask = joined_key_mask(cache.exists, reads.exists, tuple(lead), cache.length, count)
        reads = reads._replace(exists=key_mask)
        tokens.reads = reads if tokens.reads is not None or key_mask is not None else None
        if warm and cache.warm_start and cache.state is not None:
            initial = _from_last(cache.state, initial, layout)
    if reads.exists is not None:
        exists = reads.exists[..., reads.exists.shape[-1] - count :].expand(*lead, count)
        # What stands in their places may overflow in the block, and 0 * NaN would reach shared tensors.
        x, initial = (_filled(t, ~exists, lead, count) for t in (x, initial))
    x, own = _without_nonfinite(x, lead, count)
    initial, unknown = _without_nonfinite(initial, lead, count)
    if unknown is not None:
        own = unknown if own is None else own | unknown
        x = _filled(x, own, lead, count)
    if cache is not None and cache.failed is not None:
        # Behind a token that was lost all are.
        earlier = (cache.failed == Status.NONFINITE).expand(*lead, count)
        own = earlier if own is None else own | earlier
    lost = None
    if own is not None:
        own = own if exists is None else own & exists
        lost = tokens.order.behind(own.expand(*lead, count))
        exists = ~lost if exists is None else exists & ~lost
        tokens.lost = lost
    return x, initial, {"tokens": tokens, "exists": exists, "lost": lost}


def _without_nonfinite(x: Any, lead: torch.Size, count: int) -> tuple[Any, Tensor | None]:
    """The input with 0 for tokens that are not finite, and these tokens (*batch, N); None where there are none."""
    leaves = [x] if isinstance(x, Tensor) else pytree.tree_leaves(x)
    leaves = [leaf.detach() for leaf in leaves if _has_numbers(leaf, lead, count)]
    # A sum is finite where all its terms are, unless it overflows.
    if not leaves or (host_may_look(*leaves) and all(bool(leaf.sum().isfinite()) for leaf in leaves)):
        return x, None
    lost = functools.reduce(torch.logical_or, (~_flat(leaf, lead).isfinite().all(-1) for leaf in leaves))
    if host_may_look(lost) and not bool(lost.any()):
        return x, None
    return _filled(x, lost, lead, count), lost


def _has_numbers(leaf: Any, lead: torch.Size, count: int) -> bool:
    """Whether a part of an input is a tensor of floating-point numbers for each token."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and per_token(leaf, lead, count)


def _flat(tensor: Tensor, lead: torch.Size) -> Tensor:
    """A tensor (*lead, N, ...) as (*lead, N, n)."""
    return tensor.flatten(len(lead) + 1) if tensor.ndim > len(lead) + 1 else tensor.unsqueeze(-1)


def _filled(x: Any, lost: Tensor, lead: torch.Size, count: int) -> Any:
    """An input, or a start, with 0 for tokens (*batch, N) that are lost or do not exist."""

    def filled(leaf: Any) -> Any:
        if not _has_numbers(leaf, lead, count):
            return leaf
        return leaf.masked_fill(along(lost, leaf), 0.0)

    return pytree.tree_map(filled, x)


def _from_last(state: Tensor, initial: Any, layout: StateLayout) -> Any:
    """The start of new tokens at the last state (*batch, 1, n) of a cache."""
    tokens = StateLayout.of(initial, len(layout.events[0]) - 1)
    packed = tokens.pack(initial)
    last = state.to(packed.dtype).reshape(*state.shape[:-1], *packed.shape[len(tokens.lead) :]).expand(packed.shape)
    return tokens.unpack(torch.where(last.isfinite(), last, packed))


def refusing_gradient(state: Any, arguments: Any, layer: nn.Module) -> Any:
    """The state, with a backward pass that raises where somebody could expect a gradient.

    arguments: of the call, its start among them.
    """
    if not torch.is_grad_enabled():
        return state
    leaves = pytree.tree_leaves(arguments)
    tensors = [t for leaf in leaves for t in pytree.tree_leaves(getattr(leaf, "value", leaf)) if isinstance(t, Tensor)]
    anchor = next((t for t in (*tensors, *layer.parameters()) if t.requires_grad), None)
    if anchor is None:
        return state
    message = (
        "the states of a call with a cache have no gradient, as keys of earlier tokens are kept without their graph, "
        "nor have those of a call with `exit`; train by calls on all tokens without both, or decode inside "
        "torch.no_grad()"
    )
    return pytree.tree_map(lambda z: refusing(z, RuntimeError, message, anchor), state)

"""`Equilibrium`: any module z = block(z, x, *args), iterated until its answer settles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .. import _validate
from .._torch import is_batched, is_exporting, uncompiled
from ..adjoints import Adjoint, Reversible
from ..failure import ConvergenceError, OnFailure
from ..options import SolveOptions
from ..solution import Record, Solution
from ..solvers import Picard, Solver
from ..solvers.loop import check_no_evidence, is_budget
from .block_arguments import (
    Steps,
    check_block,
    check_cachable,
    check_causal,
    checked_chunk,
    checked_steps,
    solve_of_tokens,
)
from .block_call import BlockCall
from .block_map import BlockMap, Draws
from .block_state import Frame, Start, StateLayout, StoredStart, check_word, initial_state, structure, widened
from .calls import StateCall
from .causal_call import CausalCall, begin_tokens, refusing_gradient
from .compiled_graphs import Graphs, check_compiled
from .confirm import Confirm, Confirmation, checked_confirm, confirmed
from .exits import Exit
from .past import BlockCache
from .remembering import Remembering
from .token_solve import TokenSolve
from .token_window import Reads, kinds_of, takes_past

#: The solver of a block without a solver of its own.
DEFAULT_SOLVER = Picard(rtol=1e-3, max_steps=200)


class Equilibrium(Remembering):
    """A layer around any module: the state z = block(z, x, *args), iterated from a start, per sample.

    One weight-tied block does the work of a stack whose depth is chosen per sample, by a solver that says whether the
    answer has settled. The block returns the next state, with the shape, dtype and device of the state before.

    Samples: all axes of the state but the first are one sample, (B, *event): rows (B, D), sequences (B, N, D), images
    (B, C, H, W). For a state without an axis of samples, or with several, pass `event_ndim`; the first solve with
    several then tries whether each leaves the others alone, and raises if not. Each sample is solved on its own, and
    leaves the work when it is done. For that the layer must know which tensors have an entry for each sample: those
    whose first axes number the samples, and all that are wrapped in `PerSample`; the others, and all that are wrapped
    in `Shared`, are shared. The axes leave one case open, a floating-point argument where the first axis of the event
    is as long as there are samples: it is shared unless it is wrapped. A tensor of the wrong kind, and a block that
    mixes samples, cost work and change no answer: after some have left, the residuals of all are measured together, and
    samples above their tolerance go on.

    Default start: a state like x (of its shapes, and of its structure where x is a tuple or dict of tensors). Pass a
    state of another shape or structure as `start`.

    Default solver: `Picard(rtol=1e-3, max_steps=200)`, the loop of training, run to its end. An accelerated one,
    `Anderson(history=1)`, converges on more samples, and may end at another fixed point than the trained one: on mazes,
    the longer its history, the fewer answers were right.

    Training: `steps=k` makes k plain steps, differentiated as a loop is; the same weights are solved without it. With
    `adjoint=Reversible()` they are its steps, of two evaluations each, whose gradient takes the memory of one; solves
    in evaluation mode then have the exact gradient of `Implicit()`, and those in training mode are refused.
    `steps=range(a, b)` makes a number of steps that each call draws in training mode, and solves in evaluation mode. A
    gradient through a solve is the adjoint's, exact where the solve has converged.

    Compilers: with `compiled=True` torch.compile makes graphs of up to 8 evaluations each. The host looks once per
    graph; statuses, counts and, up to rounding, states are those of eager calls, and the backward solve is theirs. Each
    length and each shape is compiled once, for seconds to a minute: it is for many calls of few shapes, where
    evaluations are short, and not for shapes that vary or few calls. Samples leave the work in batches of powers of
    two. It takes `Picard` with a tolerance and a block that torch.compile makes one graph of; one that draws random
    numbers or keeps statistics is solved eagerly, with a warning, and so are plain steps and transforms. A compiled
    model around the layer changes none of this.

    Random numbers: a block that draws some (dropout) is one function within a call: all its evaluations, in the
    backward pass too, draw the same ones, and the next call draws others. Numbers that do not come from torch's default
    generators cannot be repeated.

    Args:
        block: module with forward(z, x, *args) -> z; the attribute `block`.
        event_ndim: number of trailing axes of the state (of its first tensor) that form one sample; None is all but the
            first.
        start: "zeros", "input" (x itself), "random" (normal numbers, drawn at each call), or the state to start from: a
            tensor, or a tuple, list or dict of them, which becomes a buffer (a parameter where it is one). If the first
            tensor has exactly the axes of one sample it is the state of one sample, the same for all, and axes of size
            1 grow to those of x.
        solver: the method that finds the fixed point.
        adjoint: how it is differentiated; default `Implicit()`, the exact gradient.
        steps: None to solve; k >= 0 or a range of such numbers for plain steps (damped as `solver` says, if that is a
            `Picard`).
        on_failure: what to do about samples without an answer, and gradients that did not converge: "raise", "warn" or
            "ignore".
        compiled: whether torch.compile makes graphs of several evaluations each.
        causal: promise that token t of the block's result reads tokens <= t of its arguments, on the first axis of the
            event; tried at the first call. Each token is then a problem of its own: it has converged when its residual
            and those of all tokens before it are within the tolerance, and `last_solve` has an entry for each, (B, N).
            Where the block takes a keyword argument `past` (see `Past`), settled tokens leave the work and later ones
            read their keys, which `new_cache` keeps for decoding. `Picard` or `Anderson`; not with `compiled`.
        chunk: of a causal layer: how many tokens are solved at a time, each chunk beside the settled tokens before it.
        confirm: further solves of each sample in evaluation mode, by a `Confirm`, several, or their number: the first
            goes on from the answer to a tenth of the tolerance, the second takes damped steps from the start, others
            start beside the answer. `last_solve.agreement` is the share of them that gave the same answer. Not with a
            fixed number of `steps`.

    Attributes:
        last_solve: the `SolveReport` of the last call, detached, one entry a sample, or a token of a causal layer. Not
            part of the state dict, of copies and of pickles.

    Raises:
        TypeError, ValueError: arguments that do not fit; a block that changes structure, shape, dtype or device.

    Gradients: to x, to each tensor among `args`, and to the parameters of the block; to `start` with `steps` or
    `adjoint=Unrolled()`.

    Precision: each tensor of the state keeps the dtype of its start, which is given or made like x; the block converts
    what it reads of others. Under autocast it runs in autocast's precision and the state stays in float32. In a solve
    states, arguments and weights of half precision are float32, and states are returned in half precision. A block that
    takes no dtypes but its own gets those, and rounds the states: give it a tolerance above that (1e-2 for bfloat16).

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from implicit_attention import Equilibrium
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.mix, self.read = nn.Linear(8, 8), nn.Linear(8, 8)
        ...     def forward(self, z, x):
        ...         return torch.tanh(0.3 * self.mix(z) + self.read(x))
        >>> layer, x = Equilibrium(Block()), torch.randn(4, 8)
        >>> layer(x).shape, bool(layer.last_solve.converged.all())
        (torch.Size([4, 8]), True)
        >>> z, solution = layer(x, steps=3, return_solution=True)
        >>> solution.status.unique().tolist(), bool((solution.residual > 0).all())
        ([2], True)

    Not for a function without parameters, or an energy: use `solve` with a `FixedPointMap`. Not for attention over
    fixed keys: use `ImplicitAttention`.
    """

    if TYPE_CHECKING:
        __call__: StateCall

    def __init__(
        self,
        block: nn.Module,
        *,
        event_ndim: int | None = None,
        start: Start = "zeros",
        solver: Solver | None = None,
        adjoint: Adjoint | None = None,
        steps: Steps = None,
        on_failure: OnFailure = "warn",
        compiled: bool = False,
        causal: bool = False,
        chunk: int | None = None,
        confirm: Confirmation = None,
    ) -> None:
        super().__init__()
        check_block(block)
        self.block = block
        self.event_ndim = None if event_ndim is None else _validate.check_integer("event_ndim", event_ndim, low=0)
        if isinstance(start, str):
            check_word(start)
        self.start = start if isinstance(start, str) else StoredStart(start)
        self.steps = checked_steps(steps)
        self.options = SolveOptions(
            solver=DEFAULT_SOLVER if solver is None else solver, adjoint=adjoint, on_failure=on_failure
        )
        _validate.check_instance("compiled", compiled, bool, "be True or False")
        self.compiled = compiled
        if compiled:
            check_compiled(self.options)
        self._graphs = Graphs()
        check_causal(causal, self.event_ndim, compiled, chunk)
        self.causal, self.chunk = causal, checked_chunk(chunk)
        self.confirm = checked_confirm(confirm, causal)
        self._check_solves(self.confirm, self.steps)
        #: What the caches of this layer know it by.
        self._identity = object()
        #: Modes (training or not) in which the block passed its checks, and in which it draws random numbers.
        self._checked: set[tuple[Any, str]] = set()
        self._drawing: set[bool] = set()

    @staticmethod
    def _check_solves(further: tuple[Confirm, ...], steps: Steps) -> None:
        required, remedy = "be None beside a fixed number of steps, whose end is no solution", "solve: pass a solver"
        _validate.require(not (further and isinstance(steps, int)), "confirm", required, repr(further), remedy)

    def forward(
        self,
        x: Any,
        *args: Any,
        steps: Steps = None,
        solver: Solver | None = None,
        adjoint: Adjoint | None = None,
        on_failure: OnFailure | None = None,
        start: Start | None = None,
        confirm: Confirmation = None,
        cache: BlockCache | None = None,
        chunk: int | None = None,
        exit: Exit | float | None = None,
        return_solution: bool = False,
        reads: Reads | None = None,
    ) -> Any:
        """The state that the block settles in, or the one after some steps.

        Args:
            x: the input of the block at every evaluation: a tensor, or a tuple or dict of tensors.
            *args: further arguments of the block: tensors such as masks, numbers, None.
            steps: as for the layer, for this call. A call that names a `solver` and no steps solves.
            solver: replaces the layer's for this call.
            adjoint: the same.
            on_failure: the same.
            start: replaces the layer's: a word, or a state, as the one that was returned before (a warm start).
            confirm: replaces the layer's for this call; 0 for none. What further solves say is in `last_solve`.
            cache: of a causal layer, from `new_cache`: x are the tokens that follow those of the cache, and become a
                part of it. The state then has no gradient.
            chunk: the same as for the layer, for this call; plain steps go by all tokens at once. With `exit` chunks
                are another computation than one call: see `Exit`.
            exit: of a causal layer: rules that end tokens before they settle, or a relative tolerance. The state then
                has no gradient, and `last_solve` says which rule ended each token.
            reads: masks beside causality, for layers built on this one.
            return_solution: return (state, `Solution`). With `steps` that costs one evaluation more, at which the
                residual of the returned state is measured; without it the residual of `last_solve` is NaN.

        Returns:
            The state, of the structure and shapes of the start.
        """
        options = self.options.override(solver=solver, adjoint=adjoint, on_failure=on_failure)
        steps = checked_steps(steps)
        required, remedy = "be None beside `exit`, which ends a solve", "pass Exit(evaluations=steps)"
        _validate.require(steps is None or exit is None, "steps", required, steps, remedy)
        if steps is None and solver is None and exit is None:
            steps = self.steps
        if isinstance(steps, range) and not self.training:
            steps = None
        chunk = self.chunk if chunk is None else chunk
        further = self.confirm
        if confirm is not None:
            further = checked_confirm(confirm, self.causal)
            self._check_solves(further, steps)
        if self.training or is_exporting():
            further = ()
        tokens = solve_of_tokens(self.block, self.causal, cache, chunk, exit, reads)
        if is_exporting():
            check_no_evidence(return_solution, "return_solution")
            budget = options.effective_solver
            if steps is None and type(budget) is Picard and is_budget(budget):
                # The same steps, without the copies of modules that a problem makes.
                steps = budget.max_steps
        if isinstance(steps, int) and not self.training and not return_solution and cache is None:
            # Operations alone, which a compiler may have as they are: no loop that the host ends, no random numbers.
            return self._answer(x, args, start, steps, options, False, tokens)[0]
        return self._on_host(x, args, start, steps, options, return_solution, tokens, further)

    @uncompiled
    def _on_host(
        self,
        x: Any,
        args: tuple[Any, ...],
        start: Start | None,
        steps: Steps,
        options: SolveOptions,
        measured: bool,
        tokens: TokenSolve | None,
        further: tuple[Confirm, ...],
    ) -> Any:
        if isinstance(steps, range):
            # By torch's generator, so that a checkpoint draws the same number again.
            steps = steps[int(torch.randint(len(steps), ()))]
        if tokens is not None and not torch.compiler.is_compiling():
            # Not in `solve_of_tokens`, which a compiler of the model around the layer traces.
            tokens.past = takes_past(self.block)
        answer = self._answer(x, args, start, steps, options, measured, tokens, further)
        return answer if measured else answer[0]

    def _answer(
        self,
        x: Any,
        args: tuple[Any, ...],
        start: Start | None,
        steps: int | None,
        options: SolveOptions,
        measured: bool = False,
        tokens: TokenSolve | None = None,
        further: tuple[Confirm, ...] = (),
    ) -> tuple[Any, Solution | Record]:
        """The state and its evidence, which the layer keeps."""
        given = x
        initial = initial_state(self.start if start is None else start, self._like(x), self.event_ndim)
        layout = StateLayout.of(initial, self.event_ndim)
        kind, autocast = layout.device.type, None
        if kind != "meta" and torch.is_autocast_enabled(kind):
            # Arguments are as wide as the state: autocast chooses the precision inside the map.
            autocast, layout = torch.get_autocast_dtype(kind), layout.widened()
            initial, x, args = (pytree.tree_map(widened, t) for t in (initial, x, args))
        of_tokens: dict[str, Any] = {}
        if tokens is not None:
            x, initial, of_tokens = begin_tokens(tokens, x, initial, layout, self._identity, warm=start is None)
            of_tokens["kinds"] = tuple(kinds_of(x, args, layout.lead, layout.events[0][0]))
        frame, inputs = Frame.of(x, args, layout)
        mode = self.training
        draws = Draws(layout.device, known=mode in self._drawing)
        if tokens is not None:
            layout = StateLayout.of(initial, len(layout.events[0]) - 1)
        function = BlockMap(self.block, layout, frame, autocast, draws)
        graphs = self._graphs if self.compiled and steps is None and not is_exporting() else None
        if graphs is not None:
            check_compiled(options)
        policy = self._on_failure(options)
        kind_of_call = BlockCall if tokens is None else CausalCall
        if tokens is not None and not tokens.differentiable and isinstance(options.adjoint, Reversible):
            required = "not be Reversible() for a fixed number of steps beside a cache or `exit`"
            fits = steps is None and not options.effective_solver.fixed_budget
            _validate.require(fits, "adjoint", required, repr(options.adjoint), "solve, with steps=None")
        call = kind_of_call(function, initial, inputs, options, policy, self._checked, graphs, **of_tokens)
        try:
            state, solution = call.solved() if steps is None else call.looped(steps, measured)
        except (RuntimeError, TypeError, AttributeError, ValueError) as error:
            call._problem().refuse_dtypes(error, layout.pack(initial).to(function.rounding))
            self._check_start(error, start, initial, x)
            raise
        report = None if isinstance(solution, Record) or is_batched(solution.status) else solution.report
        if further and steps is None and report is not None:
            report = confirmed(further, call, state, report)
        draws.finish()
        if steps is None and draws.repeated:
            self._drawing.add(mode)
        if isinstance(solution, Record):
            self._remember(solution)
        else:
            eager = steps is None and not is_exporting()
            report = report if tokens is None or report is None else tokens.report(report)
            self._remember(report, eager=eager)
        if tokens is not None and not tokens.differentiable:
            state = refusing_gradient(state, (given, args, start, tokens.reads), self)
        return state, solution

    def _check_start(self, error: Exception, start: Start | None, initial: Any, x: Any) -> None:
        """Raise an error about a `start` of this call where the block failed on its structure."""
        # An error of torch about sizes comes in words of the map.
        cause = error.__cause__ or error
        named = isinstance(cause, ValueError) or isinstance(error, ConvergenceError)
        if named or start is None or isinstance(start, str):
            return
        begun = initial_state(self.start, self._like(x), self.event_ndim)
        received, own = (structure(state) for state in (initial, begun))
        if received != own:
            failed = f"{type(self.block).__name__} takes, which raised {type(cause).__name__}"
            required = f"be a state that {failed} (its own start has the structure {own})"
            raise ValueError(_validate.message("start", required, received)) from error

    def _like(self, x: Any) -> Any:
        """The tensors whose kind a start has that is a word: those of x."""
        return x

    def segments(
        self,
        x: Any,
        *args: Any,
        count: int,
        steps: Steps = None,
        noise: float = 0.0,
        start: Start | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        """States after one segment of steps after the other, each with the graph of its own segment only.

        A segment starts at the detached state before it, to which normal numbers times `noise` are added. A loss at
        each state trains a long course at the memory of one segment, as public recursive reasoners are trained.

        Args:
            x: as for a call.
            *args: as for a call.
            count: how many segments, >= 1.
            steps: of each, as for a call: a number, or a range to draw from; None is the layer's.
            noise: >= 0.
            start: of the first segment.
            **options: of each call: `solver=Picard(damping=...)` damps the steps.

        Examples:
            >>> import torch
            >>> from torch import nn
            >>> from implicit_attention import Equilibrium
            >>> class Block(nn.Linear):
            ...     def forward(self, z, x):
            ...         return torch.tanh(super().forward(z) + x)
            >>> layer, x = Equilibrium(Block(8, 8)), torch.randn(3, 5, 8)
            >>> for z in layer.segments(x, count=2, steps=4, noise=0.1):
            ...     (z - 1).square().mean().backward()

        An x with a graph of its own is read by every segment: add the losses up for one backward pass, or compute it
        anew for each.
        """
        _validate.check_integer("count", count, low=1)
        noise = _validate.check_number("noise", noise, low=0.0)
        required, remedy = "be None for segments, each of which would add the tokens once more", "call the layer"
        _validate.require(options.get("cache") is None, "cache", required, "one", remedy)
        state = start
        for _ in range(count):
            state = self(x, *args, steps=steps, start=state, **options)
            yield state
            state = pytree.tree_map(lambda z: z.detach() + noise * torch.randn_like(z) if noise else z.detach(), state)

    def new_cache(self, *, warm_start: bool = False) -> BlockCache:
        """An empty cache for decoding with a causal layer: keys and values of settled tokens, kept once.

        Calls with one token or some at a time answer as one call with all tokens, to the tolerance of the solves. With
        `exit` or `steps` they are another computation than one call: tokens read earlier ones as they ended, not as
        they are after as many steps.

        Args:
            warm_start: start the tokens of a call at the last state of the cache, the one before them.

        Raises:
            ValueError: for a layer that is not causal, or whose block does not read settled tokens.
        """
        check_cachable(self.block, self.causal)
        return BlockCache(self._identity, warm_start=warm_start)

    # Housekeeping.

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_checked": set(),
            "_drawing": set(),
            "_graphs": Graphs(),
            "_identity": object(),
        }

    def extra_repr(self) -> str:
        solver = self.options.solver
        shown = [f"event_ndim={self.event_ndim}"] if self.event_ndim is not None else []
        shown += [f"start={self.start!r}"] if self.start in ("input", "random") else []
        shown += [f"steps={self.steps}"] if self.steps is not None else []
        shown += [f"solver={solver}"] if solver != DEFAULT_SOLVER else []
        shown += [f"{name}=True" for name in ("compiled", "causal") if getattr(self, name)]
        named = ("chunk", "confirm")
        shown += [f"{name}={getattr(self, name)}" for name in named if getattr(self, name)]
        return ", ".join(shown)

"""The Energy Transformer: one energy of all tokens, descended for a few steps or to its minimum."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from .. import _validate
from .._solve import solve
from .._torch import at_least_single, backward_running, host_may_look, is_batched, is_exporting, is_fake, uncompiled
from ..adjoints import Unrolled
from ..attention.function import PotentialFactory, made_by
from ..attention.masks import check_key_mask
from ..energies.causal_tokens import CausalTokens
from ..energies.legendre import LegendreEnergy
from ..failure import policy_of
from ..options import SolveKeywords, SolveOptions
from ..potentials import LogSumExp, Potential, TokenAttention, TokenMemory
from ..potentials.summed_scores import Polynomial
from ..problem import Problem
from ..solution import Solution
from ..solvers.loop import check_no_evidence
from .cache import KeyValueCache
from .calls import plain
from .causal_tokens import check_cachable, check_causal_call, pairs_that_exist, solve_tokens, without_nonfinite
from .energy_layer_norm import EnergyLayerNorm, check_tokens
from .projections import Fixed, LearnedBeta, Scalar, anchor_or_beta, per_head
from .published_steps import CausalSteps, PublishedSteps, published_solver, report_rise
from .reference_weights import Layout, read_reference
from .remembering import Remembering

Mode: TypeAlias = Literal["equilibrium", "published"]
Memory: TypeAlias = Literal["rectified", "softmax"] | PotentialFactory

_MEMORIES: dict[str, PotentialFactory] = {"rectified": Polynomial, "softmax": LogSumExp}


class EnergyTransformer(Remembering):
    """A transformer block that is one energy: attention and memory, descended by all tokens together.

    With g = LN(x), an `EnergyLayerNorm`, and Phi(g) = attention + memory, minus the published energy:

    - mode "equilibrium" returns the x that solves x = b + grad Phi(LN(x)) for the input b, a minimum of
      E(x) = L*(g) - <b, g> - Phi(g), with its exact gradient; E is bounded below for all weights (`LegendreEnergy`).
    - mode "published" makes `steps` steps x <- x + step_size grad Phi(LN(x)) from the input, differentiated through
      (`PublishedDynamics`). There the energy is -Phi(g), and x would grow for ever.

    attention = sum_h (1/beta_h) sum_C log sum_B exp(beta_h <k_hB, q_hC>) with q_h = g w_query_h^T, k_h = g w_key_h^T;
    rectified memory = (memory_beta/2) sum_C sum_m relu(<xi_m, g_C>)^2. There are no values: the output is the
    tokens x. Positions, residual streams and the layer norm of the output, `layer.norm(x)`, are the caller's.

    Args:
        dim: width of a token, D.
        heads: number of heads, H.
        head_dim: width of queries and keys, Y.
        memories: number of stored patterns, M.
        mode: "equilibrium" or "published".
        memory: "rectified", "softmax" (log-sum-exp) or (memories, beta, mask=) -> Potential with one problem per row.
        beta: inverse temperature of the attention: None is 1/sqrt(head_dim), fixed; a number > 0; a tensor (heads,),
            fixed; "learned" per head, from 1/sqrt(head_dim).
        memory_beta: inverse temperature of the memory, > 0.
        exclude_self: no token attends to itself. A single token then has no attention.
        causal: a token reads itself (unless `exclude_self`) and those before it, as a query alone: there is no energy
            (`CausalTokens`, `CausalDynamics`), and the default solver is `Picard(max_steps=1000)`. Changing the last
            token changes earlier outputs by no bit. In an equilibrium each token is a problem of its own: it has
            converged when its residual and those of all tokens before it are within the tolerance.
        steps: number of steps, >= 0, in published mode. The option `max_steps` replaces it for a call.
        step_size: > 0, in published mode.
        checkpoint: published mode keeps the state of each step alone and computes the step again in the backward pass.
            Inside torch.func nothing is computed again.
        device: of the parameters.
        dtype: of the parameters.
        **options: how equilibria are found and differentiated, see `SolveOptions`. Published mode takes no solver, and
            no adjoint but `Unrolled()`.

    Attributes:
        norm: the `EnergyLayerNorm`.
        w_query: (H, Y, D), from N(0, .002^2), as w_key.
        memories: the patterns xi, (M, D), from N(0, .02^2).
        beta: a module that returns the inverse temperature.
        last_solve: the `SolveReport` of the last call, one problem per sample, of a causal equilibrium per token,
            detached. Not part of the state dict, of copies and of pickles.

    A `ConvergenceWarning` says where the energy rises during published steps, as it does by steps that are too long;
    with `on_failure="raise"` that is an error, with "ignore" nothing. Only on a CPU, where the host need not wait, are
    energies measured for that; they cost about a tenth of the steps, which "ignore" saves.

    Raises:
        TypeError, ValueError: arguments that do not fit, with the remedy.

    Gradients: with respect to x and all parameters, to second order; energies are detached. In an equilibrium the
    gradient to x of a loss that reads LN(x) alone has mean zero over the entries of every token.

    A NaN in a token makes its sample NaN, status NONFINITE, and changes no other; in a causal equilibrium it makes the
    token and those behind it NaN. Half precision, and autocast, solve and measure energies in float32; the dtype of the
    output is that of x.

    Reference: Hoover et al. (2023), Energy Transformer: mode "published".

    Examples:
        >>> import torch
        >>> from implicit_attention import EnergyTransformer
        >>> layer, x = EnergyTransformer(16, heads=2, head_dim=8, memories=32), torch.randn(3, 5, 16)
        >>> layer(x).shape, bool(layer.last_solve.converged.all())
        (torch.Size([3, 5, 16]), True)
        >>> published = EnergyTransformer(16, heads=2, head_dim=8, memories=32, mode="published")
        >>> tokens, energies = published(x, return_energies=True)
        >>> energies.shape, bool((energies.diff(dim=0) < 0).all())
        (torch.Size([13, 3]), True)

    Not for attention that reads values: use `ImplicitAttention`. Not for any block of one's own: use `Equilibrium`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        memories: int,
        *,
        mode: Mode = "equilibrium",
        memory: Memory = "rectified",
        beta: Scalar | Tensor | None = None,
        memory_beta: float = 1.0,
        exclude_self: bool = False,
        causal: bool = False,
        steps: int = 12,
        step_size: float = 0.1,
        checkpoint: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[SolveKeywords],
    ) -> None:
        super().__init__()
        sizes = {"dim": dim, "heads": heads, "head_dim": head_dim, "memories": memories}
        self.dim, self.heads, self.head_dim, count = (
            _validate.check_integer(name, size, low=1) for name, size in sizes.items()
        )
        _validate.check_choice("mode", mode, ("equilibrium", "published"))
        if isinstance(memory, str) or not callable(memory):
            required, remedy = "be 'rectified', 'softmax' or a factory of potentials", "for example LogSumExp"
            _validate.require(memory in _MEMORIES, "memory", required, repr(memory), remedy)
        for name, flag in (("exclude_self", exclude_self), ("causal", causal), ("checkpoint", checkpoint)):
            _validate.check_flag(name, flag)
        self.mode, self.memory, self.exclude_self, self.causal = mode, memory, exclude_self, causal
        self.memory_beta: float = _validate.check_number("memory_beta", memory_beta, low=0.0, open_low=True)
        self.steps: int = _validate.check_integer("steps", steps, low=0)
        self.step_size: float = _validate.check_number("step_size", step_size, low=0.0, open_low=True)
        fits, remedy = not checkpoint or mode == "published", "leave it out: an implicit gradient keeps no steps"
        _validate.require(fits, "checkpoint", "be False for equilibria", checkpoint, remedy)
        self.checkpoint = checkpoint
        if causal and mode == "published":
            required, remedy = "be <= 1 for causal steps", "make more and shorter steps"
            _validate.require(self.step_size <= 1, "step_size", required, self.step_size, remedy)
        self.options = self._checked(SolveOptions().override(**options))
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm = EnergyLayerNorm(dim, **place)
        self.w_query = nn.Parameter(torch.empty(heads, head_dim, dim, **place))
        self.w_key = nn.Parameter(torch.empty(heads, head_dim, dim, **place))
        self.memories = nn.Parameter(torch.empty(count, dim, **place))
        for weight, std in ((self.w_query, 0.002), (self.w_key, 0.002), (self.memories, 0.02)):
            nn.init.normal_(weight, std=std)
        usual = self.head_dim**-0.5
        if isinstance(beta, Tensor):
            self.beta: nn.Module = Fixed(per_head(beta, self.heads).to(self.w_query))
        else:
            self.beta = anchor_or_beta("beta", usual if beta is None else beta, LearnedBeta((heads,), usual, **place))
        # Identifies the caches of this layer. A copy of the layer has its own, copied together with its caches.
        self._identity = object()

    @classmethod
    def from_reference(
        cls,
        weights: Mapping[str, Any] | str | os.PathLike[str],
        layout: Layout | None = None,
        **options: Any,
    ) -> Self:
        """A layer with the weights of a public implementation.

        Args:
            weights: arrays or tensors by name, or the path of a .npz (read without pickles) or .safetensors file.
                Layout "npz": Wq, Wk (H, Y, D), Xi (D, M), LNORM_gamma (), LNORM_bias (D,). Layout "tutorial": Wq, Wk
                (H, D, Y), Xi (M, D), gamma (), delta (D,). The arrays of an image model may stand beside them.
            layout: None derives it from names and shapes, and refuses D = Y, which both fit.
            **options: of the layer, beside its sizes. The default dtype is that of the weights.

        Raises:
            TypeError, ValueError: gamma <= 0, arrays that are missing or unknown, shapes that contradict each other, or
                are those of the other layout.
        """
        read = read_reference(weights, layout)
        heads, head_dim, dim = read["w_query"].shape
        options.setdefault("dtype", read["w_query"].dtype)
        layer = cls(dim, heads, head_dim, read["memories"].shape[0], **options)
        with torch.no_grad():
            for name in ("w_query", "w_key", "memories"):
                getattr(layer, name).copy_(read[name])
            assert layer.norm.delta is not None
            layer.norm.delta.copy_(read["delta"])
            layer.norm.set_gamma(float(read["gamma"]))
        return layer

    def potential(self, mask: Tensor | None = None, key_mask: Tensor | None = None) -> Potential:
        """Phi, minus the published energy, of the normalised tokens g (*batch, N, D); the masks are those of a call."""
        required = "be False for a potential: a pull of queries alone is the gradient of none"
        _validate.require(not self.causal, "causal", required, True)
        return self._attention(mask, key_mask) + TokenMemory(self._memory(key_mask))

    def new_cache(self, *, warm_start: bool = False) -> KeyValueCache:
        """An empty cache for decoding a causal equilibrium, a few tokens at a time: it keeps the keys of those so far.

        Args:
            warm_start: start every token's solve at the equilibrium of the token before.

        Raises:
            ValueError: for a layer that is not causal, or in published mode.
        """
        check_cachable(self)
        return KeyValueCache(self._identity, warm_start=warm_start)

    @uncompiled
    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
        return_energies: bool = False,
        return_solution: bool = False,
        **options: Unpack[SolveKeywords],
    ) -> Any:
        """The tokens after the steps, or at the minimum of their energy.

        Args:
            x: (*batch, N, dim), or (N, dim).
            mask: boolean, (N, N) or (*batch, N, N): True = the token of the row attends to that of the column. A token
                that attends to none adds nothing to the attention.
            key_mask: which tokens exist, boolean, (*batch, N). The others change nothing and are returned as they are.
            cache: of a causal equilibrium, from `new_cache`; the tokens of x follow those in it, and are added.
            return_energies: return (x, energies) with the energy of every sample, detached: (steps + 1, *batch) in
                published mode, of every iteration, (iterations, *batch), in an equilibrium.
            return_solution: return the `Solution` as well, last, in which missing tokens are 0.
            **options: replace the layer's for this call, see `SolveOptions`.

        Returns:
            (*batch, N, dim) in the dtype of x, or a tuple (x, energies, solution) of the parts that were requested.
        """
        self._check_call(x, mask, key_mask)
        check_causal_call(self, x, mask, cache, return_energies)
        chosen, state = self._checked(self.options.override(**options)), at_least_single(x)
        if key_mask is not None:
            # 0 * NaN is NaN: a number at a missing token must reach no gradient.
            state = state.masked_fill(~key_mask[..., None], 0.0)
        own = None
        if self.causal and self.mode == "equilibrium":
            state, own = without_nonfinite(state)
        problem = self._problem(state, mask, key_mask, cache)
        if is_exporting():
            check_no_evidence(return_energies or return_solution, "return_energies` and `return_solution")
        elif is_fake(x):
            # Shapes are answered with shapes, but not where they are recorded as the operations of a program.
            shapes = x.device.type == "meta" and not torch.compiler.is_compiling()
            if not shapes or return_energies or return_solution:
                remedy = "on the device meta there are no energies and no solution"
                _validate.check_numbers("x", x, remedy)
            return problem.fixed_point_map(state).to(x.dtype)
        energies = None
        if isinstance(problem, CausalTokens) and own is not None:
            solution = solve_tokens(problem, state, own, chosen, self._on_failure(chosen), cache, key_mask)
        else:
            solution, energies = self._solved(problem, state, chosen, return_energies)
        self._remember(None if is_batched(solution.status) else solution.report)
        tokens = solution.value.to(x.dtype)
        results: list[Any] = [tokens if key_mask is None else tokens.where(key_mask[..., None], x)]
        if return_energies:
            assert energies is not None
            results.append(energies - self._of_missing(key_mask))
        if return_solution:
            results.append(solution)
        return tuple(results) if len(results) > 1 else results[0]

    if TYPE_CHECKING:
        _call = plain(forward)
        __call__ = _call

    # Parts of the forward.

    def _problem(
        self, x: Tensor, mask: Tensor | None, key_mask: Tensor | None, cache: KeyValueCache | None = None
    ) -> Problem:
        """Return the problem of the tokens x, which have the precision of the solve and are 0 where missing."""
        lagrangian = self.norm.lagrangian()
        if not self.causal:
            potential = self.potential(mask, key_mask)
            if self.mode == "published":
                return PublishedSteps(lagrangian, potential, recompute=self.checkpoint)
            return LegendreEnergy(lagrangian, potential, x)
        rows, pairs = pairs_that_exist(x, mask, key_mask, cache)
        attention, memory = self._attention(pairs, None), self._memory(rows)
        if self.mode == "published":
            return CausalSteps(lagrangian, attention, memory, recompute=self.checkpoint)
        contents = None if cache is None else cache.held
        return CausalTokens(lagrangian, attention, memory, x, keys=None if contents is None else contents.keys)

    def _solved(
        self, problem: Problem, x: Tensor, options: SolveOptions, return_energies: bool
    ) -> tuple[Solution, Tensor | None]:
        """The solution from x, and the energies (iterations, *batch) if the solve measured them."""
        solver, adjoint, watched = options.effective_solver, options.effective_adjoint, False
        if options.explicit:
            adjoint = Unrolled()
        if self.mode == "published":
            steps = self.steps if options.max_steps is None else options.max_steps
            solver, adjoint = published_solver(self.step_size, steps, causal=self.causal), Unrolled()
            silent = self.causal or policy_of(options.on_failure).over == "ignore"
            watched = not silent and not is_exporting() and host_may_look(x)
        solution = solve(
            problem,
            x,
            solver=solver,
            adjoint=adjoint,
            impl=options.impl,
            on_failure=self._on_failure(options),
            trace=return_energies or watched,
        )
        if solution.trace is None or solution.trace.energy is None:
            return solution, None
        energies = solution.trace.energy
        if self.mode == "published":
            # The loop ends as soon as no sample is left that is finite.
            short = solver.max_steps + 1 - len(energies)
            energies = torch.cat([energies, energies[-1:].expand(short, *energies.shape[1:])])
            # Steps that checkpointing computes again were reported before.
            if watched and not backward_running():
                report_rise(energies, self.step_size, self._on_failure(options))
        return solution, energies

    def _attention(self, mask: Tensor | None, key_mask: Tensor | None) -> TokenAttention:
        pairs = mask
        if key_mask is not None:
            exist = key_mask[..., :, None] & key_mask[..., None, :]
            pairs = exist if mask is None else mask & exist
        w_query, w_key, beta = (at_least_single(t) for t in (self.w_query, self.w_key, self.beta()))
        return TokenAttention(w_query, w_key, beta, mask=pairs, exclude_self=self.exclude_self)

    def _memory(self, key_mask: Tensor | None) -> Potential:
        make = _MEMORIES[self.memory] if isinstance(self.memory, str) else self.memory
        mask, named = None if key_mask is None else key_mask[..., None], ("memory", "(memories, beta, mask=)")
        return made_by(make, at_least_single(self.memories), self.memory_beta, named=named, mask=mask)

    def _of_missing(self, key_mask: Tensor | None) -> Tensor | float:
        """The energy, L*(delta), that each missing token would have as a token of zeros."""
        if key_mask is None or self.mode == "published":
            return 0.0
        each = self.norm.lagrangian().conjugate_at(at_least_single(self.w_query).new_zeros(1, self.dim))
        return each.detach() * (~key_mask).sum(-1)

    def _check_call(self, x: Tensor, mask: Any, key_mask: Any) -> None:
        check_tokens(x, self.dim, self.w_query)
        *batch, count, _ = x.shape
        if mask is not None:
            required = "be boolean, True = the row attends to the column"
            _validate.check_boolean("mask", mask, required, "there are no additive masks")
            remedy = "pass which tokens exist as `key_mask`"
            _validate.require(mask.ndim > 1, "mask", "have two axes or more", f"shape {tuple(mask.shape)}", remedy)
            _validate.check_broadcast("mask", mask.shape, (*batch, count, count), "(*batch, N, N)")
        if key_mask is not None:
            check_key_mask(key_mask, tuple(batch), count)
        named = (("x", x), ("mask", mask), ("key_mask", key_mask))
        _validate.check_same_kind((name, t) for name, t in named if t is not None)

    # Housekeeping.

    def _checked(self, options: SolveOptions) -> SolveOptions:
        """The options, or an error if published mode cannot have them."""
        if self.mode == "published":
            required = "be None in mode='published', whose steps are `steps` of size `step_size`"
            remedy = "use mode='equilibrium'"
            _validate.require(options.solver is None, "solver", required, type(options.solver).__name__, remedy)
            required = "be Unrolled() in mode='published', which reaches no equilibrium"
            unrolls = options.adjoint is None or isinstance(options.adjoint, Unrolled)
            _validate.require(unrolls, "adjoint", required, type(options.adjoint).__name__, remedy)
        return options

    def extra_repr(self) -> str:
        shown = [str(self.dim)]
        sizes = {"heads": self.heads, "head_dim": self.head_dim, "memories": len(self.memories), "mode": self.mode}
        shown += [f"{name}={value!r}" for name, value in sizes.items()]
        if self.memory != "rectified":
            shown.append(f"memory={getattr(self.memory, '__name__', self.memory)!s}")
        if self.memory_beta != 1:
            shown.append(f"memory_beta={self.memory_beta:g}")
        if self.mode == "published":
            shown += [f"steps={self.steps}", f"step_size={self.step_size:g}"]
        shown += [name for name in ("exclude_self", "causal", "checkpoint") if getattr(self, name)]
        chosen = {name: getattr(self.options, name) for name in ("solver", "adjoint", "max_steps")}
        return ", ".join(shown + [f"{name}={value}" for name, value in chosen.items() if value is not None])

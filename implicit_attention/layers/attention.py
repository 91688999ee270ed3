"""`ImplicitAttention`: multi-head attention whose heads answer with the equilibrium of an energy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import _validate
from ..attention.function import PotentialFactory, attend, eager
from ..attention.masks import check_causal, check_order, mask_and_bias
from ..failure import Word
from ..kernels.problem import Attention
from ..options import SolveKeywords, SolveOptions
from ..potentials import LogSumExp, ReadsOut
from .cache import CachedKeys, KeyValueCache, check_cache
from .projections import Fixed, LearnedAnchor, LearnedBeta, Rotary, Scalar, anchor_or_beta, merge_heads
from .remembering import Remembering
from .sharding import called, head_shard, projected, weight_of

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    from .calls import plain

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

Readout: TypeAlias = Literal["values", "state"]


class ImplicitAttention(Remembering):
    r"""Multi-head self- or cross-attention in which every query settles into an equilibrium before values are read.

    ```math
    \begin{align*}
    z &= a\,q + (1 - a)\, \operatorname{softmax}(\beta z K^\top)\, K \\
    \text{output} &= W_o \operatorname{softmax}(\beta z K^\top)\, V
    \end{align*}
    ```

    Per head, with q = W_q x, K = W_k context, V = W_v context and a the anchor. With `max_steps=0` that is
    ordinary multi-head attention, with the same parameters.

    Tensor parallel: `parallelize_module(layer, mesh, layer.parallel_plan())` gives each process an equal part of the
    heads, whose solution and weights it returns. Other ways to shard heads, and `context_parallel`, are refused.

    Args:
        dim: width of input and output.
        heads: number of heads.
        head_dim: width of a head, default dim / heads.
        kv_heads: heads of keys and values, dividing `heads`; fewer ones are shared by groups of queries.
        context_dim: width of the context, default `dim`.
        potential: (keys, beta, mask=, bias=) -> Potential; `LogSumExp` is softmax attention.
        anchor: "learned" (per head, from .5, inside (0, 1)) or a number in [0, 1]. With 0 the query projection gets no
            gradient from the solve.
        beta: inverse temperature, "learned" (per head, from 1/sqrt(head_dim)) or a number > 0.
        readout: "values", or "state": the equilibrium z itself, in the space of the keys.
        causal: a token attends to itself and the tokens before it; in a context, to tokens up to its own index.
        dropout: part of the attention weights dropped in the read-out while training.
        qk_norm: None, "rms" or "layer": normalise queries and keys per head.
        rotary: None, or `Rotary()` to turn queries and keys by their positions (a state that is read out is turned
            back).
        projection_bias: whether the projections have biases.
        bare: no projections and one head: the energy itself, over raw inputs; values are the context.
        unbounded: what to do about keys and a potential whose energy falls without end, see `AnchoredEnergy`. Asked at
            every call, as each has its keys; potentials that grow like |z|, as softmax attention, cost nothing.
        device: of the parameters.
        dtype: of the parameters.
        **options: how equilibria are found and differentiated, see `SolveOptions`.

    Attributes:
        options: the `SolveOptions` of the layer, which a call may override.
        last_solve: the `SolveReport` of the last call, detached: status, residual and evaluations per query, and the
            report of the backward solve once it has run. Not part of the state dict, of copies and of pickles.

    Raises:
        TypeError, ValueError: arguments that do not fit, with the remedy.

    Gradients: with respect to inputs and parameters, in training and in evaluation mode, to any order.

    Examples:
        >>> import torch
        >>> from implicit_attention import ImplicitAttention
        >>> layer, x = ImplicitAttention(16, heads=4), torch.randn(2, 5, 16)
        >>> layer(x).shape
        torch.Size([2, 5, 16])
        >>> bool(layer.last_solve.converged.all())
        True
        >>> output, weights = layer(x, max_steps=0, return_weights=True)
        >>> weights.shape
        torch.Size([2, 4, 5, 5])

    Not for heads that are projected already: use `equilibrium_attention`. Inside a model of another library use that
    library's module in `integrations`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        context_dim: int | None = None,
        potential: PotentialFactory = LogSumExp,
        anchor: Scalar = "learned",
        beta: Scalar = "learned",
        readout: Readout = "values",
        causal: bool = False,
        dropout: float = 0.0,
        qk_norm: Literal["rms", "layer"] | None = None,
        rotary: Rotary | None = None,
        projection_bias: bool = False,
        bare: bool = False,
        unbounded: Word = "raise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[SolveKeywords],
    ) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.context_dim = dim if context_dim is None else context_dim
        self.bare = bare
        self._check_sizes(head_dim, projection_bias)
        self.head_dim = dim // heads if head_dim is None else head_dim
        _validate.check_choice("readout", readout, ("values", "state"))
        dropout = _validate.check_number("dropout", dropout, low=0.0, high=1.0)
        if readout == "state":
            required = "be 0 with readout='state', which has no weights"
            remedy = "put nn.Dropout behind the layer, or use readout='values'"
            _validate.require(dropout == 0, "dropout", required, dropout, remedy)
        elif isinstance(potential, type):
            required = f"be 'state' with {potential.__name__}, which has no weights"
            _validate.require(issubclass(potential, ReadsOut), "readout", required, "'values'", "pass it so")
        if rotary is not None:
            _validate.check_instance("rotary", rotary, Rotary, "be None or a Rotary", "for example Rotary()")
        self.potential, self.readout = potential, readout
        self.causal, self.dropout, self.rotary = causal, dropout, rotary
        _validate.check_choice("unbounded", unbounded, ("raise", "warn", "ignore"))
        self.unbounded: Word = unbounded
        self.options = SolveOptions().override(**options)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.anchor = anchor_or_beta("anchor", anchor, LearnedAnchor((heads,), **made))
        self.beta = anchor_or_beta("beta", beta, LearnedBeta((heads,), self.head_dim**-0.5, **made))
        _validate.check_choice("qk_norm", qk_norm, (None, "rms", "layer"))
        self.q_norm = self.k_norm = None
        if qk_norm is not None:
            norm = nn.RMSNorm if qk_norm == "rms" else nn.LayerNorm
            self.q_norm, self.k_norm = (norm(self.head_dim, **made) for _ in range(2))
        self.q_proj = self.k_proj = self.v_proj = self.out_proj = None
        if not bare:
            inner, shared = heads * self.head_dim, self.kv_heads * self.head_dim
            self.q_proj = nn.Linear(dim, inner, projection_bias, **made)
            self.k_proj = nn.Linear(self.context_dim, shared, projection_bias, **made)
            if readout == "values":
                self.v_proj = nn.Linear(self.context_dim, shared, projection_bias, **made)
            self.out_proj = nn.Linear(inner, dim, projection_bias, **made)
        # Caches hold the identity of their layer. A copy of the layer has an identity of its own, as have its caches.
        self._identity = object()

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        values: Tensor | None = None,
        mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        positions: Tensor | None = None,
        causal: bool | None = None,
        cache: KeyValueCache | None = None,
        return_solution: bool = False,
        return_trajectory: bool = False,
        return_weights: bool = False,
        **options: Unpack[SolveKeywords],
    ) -> Any:
        """Attend from every token of x to the context.

        Args:
            x: (*batch, N, dim).
            context: the tokens to attend to, (*batch, M, context_dim); default x.
            values: tokens from which the values are projected, (*batch, M, context_dim); default the context.
            mask: boolean (True = attend) or additive: (N, M), (*batch, N, M), or (*batch, heads, N, M).
            key_mask: which tokens of the context exist, boolean, (*batch, M); with a cache, which of all tokens or of
                the new ones. A cache remembers it.
            positions: of the tokens of x, for `rotary`: (N,) or (*batch, N); default 0, 1, ... behind the cache.
            causal: overrides the layer's.
            cache: from `new_cache`; the tokens of x are added to it, and attend to all that it holds, by the causal
                rule.
            return_solution: return (output, Solution): states (*batch, heads, N, head_dim), and how each solve went.
            return_trajectory: the same, with the states of all iterations in `solution.trace`.
            return_weights: return the attention weights at the equilibrium as well, last, (*batch, heads, N, M).
            **options: replace the layer's for this call, see `SolveOptions`.

        Returns:
            (*batch, N, dim), or a tuple (output, solution, weights) without the parts that were not asked for.
        """
        self._check_call(x, context, values, positions, cache)
        causal, plain_call = self.causal if causal is None else causal, eager()
        first, rotary = 0 if cache is None else cache.num_queries, self.rotary
        # `nn.Module` would search for each attribute.
        parts: dict[str, Any] = self._modules
        get = parts.get
        q_proj, k_proj, v_proj, out_proj = projections = [get("q_proj"), get("k_proj"), get("v_proj"), get("out_proj")]
        query = projected(q_proj, self.q_norm, x, self.head_dim, self.heads, eager=plain_call)
        if rotary is not None:
            positions = torch.arange(first, first + x.shape[-2], device=x.device) if positions is None else positions
            query = rotary(query, positions)
        chosen = self.options.override(**options) if options else self.options
        # The values that an explicit step reads do not depend on the anchor: only gradients and residuals do.
        measured = torch.is_grad_enabled() or return_solution or return_trajectory
        unread = plain_call and not measured and self.readout == "values" and chosen.plan.solver.max_steps == 0
        context_keys = self._held(
            x, context, values, key_mask, positions, cache, k_proj, v_proj, plain_call, once=unread
        )
        keys, read = context_keys.keys, context_keys.values
        shard = head_shard((query, keys, read), projections, self.heads, self.kv_heads)
        if causal:
            check_order("causal", self.potential)
            check_causal("mask", mask, "causal")
        pairs = bias = None
        if mask is not None or context_keys.key_mask is not None:
            shape = (*x.shape[:-2], self.heads, x.shape[-2], keys.shape[-2])
            if isinstance(mask, Tensor) and mask.ndim == x.ndim > 2:
                mask = mask.unsqueeze(-3)
            pairs, bias = mask_and_bias(mask, shape=shape, like=keys, key_mask=context_keys.key_mask)
        beta, anchor = parts["beta"](), 1.0 if unread else parts["anchor"]()
        if shard is not None:
            beta, anchor, pairs, bias = shard.own(beta), shard.own(anchor), shard.own(pairs, -3), shard.own(bias, -3)
        dropout = self.dropout if self.training else 0.0
        call = Attention(query, keys, beta, anchor, pairs, bias, first if causal else None, read, dropout)
        attended = attend(
            call,
            chosen,
            initial=None if cache is None else cache.start(query),
            grouped=True,
            plain=plain_call,
            potential=self.potential,
            trace=return_trajectory,
            return_solution=return_solution,
            return_weights=return_weights,
            unbounded=self.unbounded,
            site=self._site,
        )
        self._remember(attended.report, eager=plain_call)
        if cache is not None:
            assert attended.report is not None
            cache.commit(context_keys, attended.state, attended.report.num_evals)
        output = attended.output
        if self.readout == "state" and rotary is not None:
            output = rotary(output, positions, inverse=True)
        output = output.squeeze(-3) if self.bare else merge_heads(output)
        output = called(out_proj, output, eager=plain_call)
        if not (return_solution or return_trajectory or return_weights):
            return output
        results: list[Any] = [output]
        if return_solution or return_trajectory:
            results.append(attended.solution)
        if return_weights:
            results.append(attended.weights)
        return tuple(results)

    if TYPE_CHECKING:
        _call = plain(forward)
        __call__ = _call

    def new_cache(
        self, context: Tensor | None = None, *, key_mask: Tensor | None = None, warm_start: bool = False
    ) -> KeyValueCache:
        """A cache for decoding: empty, or, with a context to attend to, holding that context's keys and values.

        Args:
            context: (*batch, M, context_dim), for cross-attention.
            key_mask: which tokens of the context exist, (*batch, M).
            warm_start: start every token's solve at the equilibrium of the token before. That saves evaluations where
                neighbours are alike. A query with several equilibria may end in another one than from a cold start;
                with large scores and small anchors it usually does.
        """
        no_field = isinstance(self.anchor, Fixed) and self.anchor.value == 0
        required = "be False with anchor=0, where the query is only where a solve starts"
        _validate.require(not (warm_start and no_field), "warm_start", required, True)
        cache = KeyValueCache(self._identity, warm_start=warm_start)
        if context is None:
            _validate.require(key_mask is None, "key_mask", "come with a context", "no context")
        else:
            parts = self.k_proj, self.v_proj, eager()
            cache.held, cache.fixed = self._held(context, context, None, key_mask, None, cache, *parts), True
        return cache

    def parallel_plan(self) -> dict[str, ParallelStyle]:
        """The plan by which `torch.distributed.tensor.parallel.parallelize_module` spreads the heads over processes.

        Query, key and value projections are sharded by columns, learned anchors and temperatures by head, the output
        projection by rows. Inputs and masks are whole on every process, and so are the parameters of `qk_norm`.

        Returns:
            Styles by the names of the layer's parts, for a mesh of one dimension. For a layer inside a module, put its
            name and a dot before each.

        Raises:
            ValueError: for one head, or one of keys that all queries share. A number of processes that does not divide
                the heads is refused in the first call.

        Gradients: those of one process; each parameter's is sharded as the parameter is.

        Examples:
            >>> from implicit_attention import ImplicitAttention
            >>> sorted(ImplicitAttention(16, heads=4, anchor=0.5).parallel_plan())
            ['beta', 'k_proj', 'out_proj', 'q_proj', 'v_proj']

        Not for tokens spread over processes, nor for samples: use `DistributedDataParallel` or FSDP for these.
        """
        from .parallel import head_plan

        return head_plan(self, heads=self.heads, kv_heads=self.kv_heads)

    # Parts of the forward.

    def _check_call(self, x: Tensor, context: Tensor | None, values: Tensor | None, positions: Any, cache: Any) -> None:
        _check_tokens("x", x, self.dim)
        projection = self._modules.get("q_proj")
        if type(projection) is nn.Linear and x.dtype != weight_of(projection).dtype:
            _check_dtype(x, projection)
        if context is values is positions is cache is None:
            return
        for name, given in (("context", context), ("values", values)):
            if given is not None:
                _check_tokens(name, given, self.context_dim)
                _validate.check_broadcast(name, given.shape[:-2], x.shape[:-2], "the leading axes of `x`")
        required = "be None with readout='state', which reads no values"
        remedy = "make the layer with readout='values'"
        _validate.require(values is None or self.readout == "values", "values", required, "a tensor", remedy)
        if positions is not None:
            fits = isinstance(positions, Tensor) and positions.shape in (x.shape[-2:-1], x.shape[:-1])
            received = f"shape {tuple(positions.shape)}" if isinstance(positions, Tensor) else type(positions).__name__
            _validate.require(fits, "positions", "be a tensor of shape (N,) or (*batch, N)", received)
            remedy = "pass rotary=Rotary()"
            _validate.require(self.rotary is not None, "positions", "be None without rotary", "a tensor", remedy)
        if cache is not None:
            required = "come without context and values: it holds what was computed from them"
            received = "values" if context is None else "a context"
            remedy = "make it with layer.new_cache(context) to attend to a context"
            _validate.require(context is None and values is None, "cache", required, received, remedy)
            check_cache(cache, self._identity, tuple(x.shape[:-2]))

    def _held(
        self,
        x: Tensor,
        context: Tensor | None,
        values: Tensor | None,
        key_mask: Tensor | None,
        positions: Tensor | None,
        cache: KeyValueCache | None,
        k_proj: nn.Module | None,
        v_proj: nn.Module | None,
        eager: bool,
        *,
        once: bool = False,
    ) -> CachedKeys:
        """The keys and values (None if the state is read out) of the context, and which of them exist.

        positions: of the tokens of x, for `rotary`.
        once: whether nothing but one kernel reads them.
        """
        if cache is not None and cache.fixed:
            assert cache.held is not None
            return cache.held if key_mask is None else cache.held._replace(key_mask=key_mask)
        source = x if context is None else context
        if context is not None or self.context_dim != self.dim:
            _check_tokens("context", source, self.context_dim)
        if values is None:
            values = source
        elif values.shape[-2] != source.shape[-2]:
            # The message is built in this branch only: torch.compile would make a graph for every number in it.
            required = f"have one row for each of the {source.shape[-2]} tokens attended to"
            raise ValueError(_validate.message("values", required, f"shape {tuple(values.shape)}"))
        keys = projected(k_proj, self.k_norm, source, self.head_dim, self.kv_heads, eager=eager)
        if self.rotary is not None:
            own = context is None
            keys = self.rotary(keys, positions if own else torch.arange(source.shape[-2], device=source.device))
        read = None
        if self.readout == "values":
            read = projected(v_proj, None, values, self.head_dim, self.kv_heads, eager=eager)
        if not once:
            # Every evaluation reads them: they are laid out here.
            keys, read = keys.contiguous(), None if read is None else read.contiguous()
        return CachedKeys(keys, read, key_mask) if cache is None else cache.with_new(keys, read, key_mask)

    # Housekeeping.

    def _check_sizes(self, head_dim: int | None, projection_bias: bool) -> None:
        for name in ("dim", "heads", "kv_heads", "context_dim"):
            _validate.check_integer(name, getattr(self, name), low=1)
        if head_dim is None:
            remedy = f"use a divisor of {self.dim}, or pass head_dim"
            _validate.require(self.dim % self.heads == 0, "heads", f"divide dim = {self.dim}", self.heads, remedy)
        else:
            head_dim = _validate.check_integer("head_dim", head_dim, low=1)
        remedy = f"use a divisor of {self.heads}"
        fits = self.heads % self.kv_heads == 0
        _validate.require(fits, "kv_heads", f"divide heads = {self.heads}", self.kv_heads, remedy)
        if self.bare:
            _validate.require(not projection_bias, "projection_bias", "be False with bare=True", projection_bias)
            remedy = "without bare=True there are projections to make heads with"
            _validate.require(self.heads == 1, "heads", "be 1 with bare=True", self.heads, remedy)
            for name, size in (("head_dim", head_dim or self.dim), ("context_dim", self.context_dim)):
                _validate.require(size == self.dim, name, f"be dim = {self.dim} with bare=True", size, remedy)

    def __setstate__(self, state: dict[str, Any]) -> None:
        required, remedy = "be False in a layer that was pickled: it is gone", "train a layer without it"
        _validate.require(not state.get("values_inside"), "values_inside", required, True, remedy)
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        parts = [f"{self.dim}", f"heads={self.heads}", f"head_dim={self.head_dim}"]
        usual = {
            "kv_heads": self.heads,
            "context_dim": self.dim,
            "readout": "values",
            "dropout": 0.0,
            "unbounded": "raise",
        }
        parts += [
            f"{name}={getattr(self, name)!r}" for name, default in usual.items() if getattr(self, name) != default
        ]
        parts += [name for name in ("causal", "bare") if getattr(self, name)]
        if self.potential is not LogSumExp:
            parts.append(f"potential={getattr(self.potential, '__name__', self.potential)}")
        options = (
            ("solver", self.options.solver),
            ("adjoint", self.options.adjoint),
            ("max_steps", self.options.max_steps),
        )
        return ", ".join(parts + [f"{name}={value}" for name, value in options if value is not None])


def _check_dtype(x: Tensor, projection: nn.Linear) -> None:
    # Autocast converts both sides.
    if not torch.is_autocast_enabled(x.device.type):
        required, remedy = f"have the dtype of the layer ({projection.weight.dtype})", "convert one by .to(dtype)"
        raise ValueError(_validate.message("x", required, x.dtype, remedy))


def _check_tokens(argument: str, x: Tensor, size: int) -> None:
    # A short test for the most frequent kind.
    usual = type(x) is Tensor and x.dtype in _DTYPES and x.layout == torch.strided and not x.is_nested
    if usual and x.ndim > 1 and x.shape[-1] == size:
        return
    _validate.check_float_tensor(argument, x, min_ndim=2)
    _validate.require(x.shape[-1] == size, argument, f"have width {size} on its last axis", f"shape {tuple(x.shape)}")

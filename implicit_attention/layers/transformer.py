"""`EquilibriumTransformer`: transformer layers with their input added at every step, run until the tokens settle."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import _validate
from ..attention.masks import mask_and_bias, triangle
from ..problem import PerSample, Shared
from .attention import ImplicitAttention
from .block import Equilibrium
from .calls import PlainCall, StepKeywords
from .past import BlockCache, Past
from .projections import Rotary, merge_heads, split_heads
from .sharding import check_whole
from .token_window import Reads, takes_past

Injection: TypeAlias = Literal["add", "concat", "film"]
Norm: TypeAlias = Literal["post", "pre"]
Attention: TypeAlias = Literal["softmax", "equilibrium"] | nn.Module


class SoftmaxAttention(nn.Module):
    """Multi-head self-attention by torch's fused kernels.

    Args:
        dim, heads: width, and number of heads.
        causal: whether a token attends to itself and the tokens before it, in calls without a mask.
        rotary: None, or `Rotary()`.
    """

    def __init__(self, dim: int, heads: int, *, causal: bool = False, rotary: Rotary | None = None) -> None:
        super().__init__()
        self.heads, self.causal, self.rotary = heads, causal, rotary
        self.qkv_proj, self.out_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None, past: Past | None = None) -> Tensor:
        """x (*batch, N, dim); mask boolean or additive, broadcasting to (*batch, heads, N, N), or that of `past`."""
        packed = check_whole("qkv_proj", self.qkv_proj(x), 3 * x.shape[-1])
        query, key, value = (split_heads(part, self.heads) for part in packed.chunk(3, -1))
        if (rotary := self.rotary) is not None:
            if past is None:
                turns = rotary.turns(query, torch.arange(x.shape[-2], device=x.device))
            else:
                turns = past.once((rotary, query.shape[-1]), lambda: rotary.turns(query, past.positions))
            query, key = rotary.turned(query, *turns), rotary.turned(key, *turns)
        causal = self.causal and mask is None
        if past is not None:
            key, value = past.update(key, value)
            mask, causal = past.mask, past.is_causal
        if mask is not None and mask.is_floating_point():
            mask = mask.to(query.dtype)
        read = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        return self.out_proj(merge_heads(read))  # type: ignore[no-any-return]


class Inject(nn.Module):
    """Join the state z and the input x of a step, (*batch, N, dim) each."""

    def __init__(self, dim: int, kind: Injection) -> None:
        super().__init__()
        self.kind = kind
        widths = {"concat": (2 * dim, dim), "film": (dim, 2 * dim)}
        self.map = nn.Linear(*widths[kind]) if kind in widths else None

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        if self.map is None:
            return z + x
        if self.kind == "concat":
            return self.map(torch.cat([z, x], -1))  # type: ignore[no-any-return]
        scale, shift = self.map(x).chunk(2, -1)
        return z + z * scale + shift  # type: ignore[no-any-return]


class TransformerLayer(nn.Module):
    """Attention and a feed-forward part, each added to its input, with a norm behind ("post") or before ("pre")."""

    def __init__(self, dim: int, attention: nn.Module, norm: Norm, inner: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention = norm, attention
        self.mlp = nn.Sequential(nn.Linear(dim, inner), nn.GELU(), nn.Linear(inner, dim))
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, mask: Tensor | None = None, past: Past | None = None) -> Tensor:
        masks: dict[str, Any] = {"mask": mask} if past is None else {"past": past}
        if self.norm == "post":
            h = self.attention_norm(h + self.dropout(self.attention(h, **masks)))
            return self.mlp_norm(h + self.dropout(self.mlp(h)))  # type: ignore[no-any-return]
        h = h + self.dropout(self.attention(self.attention_norm(h), **masks))
        return h + self.dropout(self.mlp(self.mlp_norm(h)))  # type: ignore[no-any-return]


class TransformerStack(nn.Module):
    """Transformer layers in turn, h -> h, whose result a norm keeps bounded: a part of a block that repeats.

    Its arguments are those of `EquilibriumTransformer` of the same names.

    Raises:
        TypeError, ValueError: arguments that do not fit, with the remedy.

    Examples:
        >>> import torch
        >>> from implicit_attention.models.reasoners import TransformerStack
        >>> stack, exists = TransformerStack(16, heads=2, depth=2), torch.tensor([[True] * 4 + [False]])
        >>> stack(torch.randn(3, 5, 16), exists[:, None, None, :]).shape
        torch.Size([3, 5, 16])

    Not for a whole model that settles: `EquilibriumTransformer` has the input and the solve.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        depth: int = 1,
        *,
        attention: Attention = "softmax",
        norm: Norm = "post",
        causal: bool = False,
        rotary: Rotary | None = None,
        mlp_ratio: float = 2.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("heads", heads), ("depth", depth)):
            _validate.check_integer(name, value, low=1)
        _validate.require(dim % heads == 0, "heads", f"divide dim = {dim}", heads, f"use a divisor of {dim}")
        _validate.check_choice("norm", norm, ("post", "pre"))
        ratio = _validate.check_number("mlp_ratio", mlp_ratio, low=0.0, open_low=True)
        dropout = _validate.check_number("dropout", dropout, low=0.0, high=1.0)
        if rotary is not None:
            _validate.check_instance("rotary", rotary, Rotary, "be None or a Rotary", "for example Rotary()")
        attentions = [_attention(attention, dim, heads, causal, rotary) for _ in range(depth)]
        inner = max(int(ratio * dim), 1)
        self.dim = dim
        self.layers = nn.ModuleList(TransformerLayer(dim, each, norm, inner, dropout) for each in attentions)
        # A post-norm layer ends with one.
        self.outer_norm = nn.LayerNorm(dim) if norm == "pre" else nn.Identity()
        #: Whether all attentions read settled tokens by their keys.
        self.takes_past = all(map(takes_past, attentions))

    def forward(self, h: Tensor, mask: Tensor | None = None, past: Past | None = None) -> Tensor:
        """h (*batch, N, dim); mask None, or boolean or additive, broadcasting to (*batch, heads, N, N)."""
        for layer in self.layers:
            h = layer(h, mask=mask, past=past)
        return self.outer_norm(h)  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """One step: join the input to the state, and apply the layers of a stack in turn."""

    def __init__(self, stack: TransformerStack, injection: Injection) -> None:
        super().__init__()
        self.inject = Inject(stack.dim, injection)
        self.layers, self.outer_norm, self.takes_past = stack.layers, stack.outer_norm, stack.takes_past

    def forward(self, z: Tensor, x: Tensor, mask: Tensor | None = None, past: Past | None = None) -> Tensor:
        h = self.inject(z, x)
        for layer in self.layers:
            h = layer(h, mask=mask, past=past)
        return self.outer_norm(h)  # type: ignore[no-any-return]


class EquilibriumTransformer(Equilibrium):
    """A transformer block with weights of its own for one step, run until the tokens settle.

    A step is z <- norm(h + mlp(h)) with h = norm(i + attention(i)) and i = z (1 + W x) + W' x: the input is read at
    every step, and a norm at the end keeps the state bounded. With `depth` that many layers make a step.

    Trained by `steps=range(...)` on small problems it may be solved on larger ones: see the guide on equilibrium
    blocks, and `docs/examples/mazes.py`.

    Args:
        dim: width of tokens, and of the state.
        heads: of attention, dividing `dim`.
        depth: layers of a step.
        attention: "softmax" (torch's fused kernels), "equilibrium" (`ImplicitAttention`: each query settles in an
            equilibrium of its own inside of every step), or a module with forward(h, mask=) -> (*batch, N, dim), whose
            mask is None or broadcasts to (*batch, heads, N, N); a copy of it serves in every layer.
        norm: "post", behind every part, or "pre", before every part and once at the end of a step.
        injection: how a step joins z and x: "add" z + x, "film" z (1 + W x) + W' x, "concat" W [z; x].
        causal: a token attends to itself and the tokens before it, and is solved on its own: `last_solve` has an entry
            for each token, settled tokens leave the work, and `new_cache` keeps their keys for decoding.
        rotary: None, or `Rotary()` for positions 0, 1, ...; without it, and without masks, tokens have no order.
        mlp_ratio: width of the feed-forward part in units of `dim`.
        dropout: of the outputs of attention and feed-forward part; one mask serves for a whole call.
        chunk: of a causal model: how many tokens are solved at a time, each chunk beside the settled ones before it.
        **options: `start`, `solver`, `adjoint`, `steps` and `on_failure`, as of `Equilibrium`.

    Attributes:
        block: the module of one step.
        last_solve: the `SolveReport` of the last call, one entry a sample, or a token of a causal model.

    Raises:
        TypeError, ValueError: arguments that do not fit, with the remedy.

    Gradients: to x, additive masks and parameters; of the first order where the attention is "softmax", as torch's
    fused kernels have no others (solvers that need products with the Jacobian, such as `NewtonKrylov`, neither).

    Examples:
        >>> import torch
        >>> from implicit_attention import EquilibriumTransformer
        >>> model, x = EquilibriumTransformer(16, heads=2), torch.randn(2, 5, 16)
        >>> model(x, steps=8).shape
        torch.Size([2, 5, 16])
        >>> exists = torch.tensor([[True, True, True, False, False], [True] * 5])
        >>> z = model(x, key_mask=exists, on_failure="ignore")
        >>> model.last_solve.status.shape
        torch.Size([2])

    Not for keys that do not move with the state: use `ImplicitAttention`. Not for a pretrained model: see `tie`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        depth: int = 1,
        *,
        attention: Attention = "softmax",
        norm: Norm = "post",
        injection: Injection = "add",
        causal: bool = False,
        rotary: Rotary | None = None,
        mlp_ratio: float = 2.0,
        dropout: float = 0.0,
        chunk: int | None = None,
        **options: Unpack[StepKeywords],
    ) -> None:
        _validate.check_choice("injection", injection, ("add", "concat", "film"))
        parts: dict[str, Any] = {"attention": attention, "norm": norm, "causal": causal, "rotary": rotary}
        stack = TransformerStack(dim, heads, depth, **parts, mlp_ratio=mlp_ratio, dropout=dropout)
        super().__init__(TransformerBlock(stack, injection), event_ndim=2, causal=causal, chunk=chunk, **options)
        self.dim, self.heads = dim, heads
        # Torch's kernels know the causal triangle themselves.
        self._draws_triangle = causal and attention != "softmax"

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        cache: BlockCache | None = None,
        **options: Any,
    ) -> Any:
        """The settled tokens, or those after some steps.

        Args:
            x: (*batch, N, dim).
            mask: boolean (True = attend) or additive: (N, N), (*batch, N, N), or (*batch, heads, N, N). A causal model
                reads no later token by it: packed documents need no triangle of their own.
            key_mask: which tokens exist, boolean, (*batch, N); beside a cache those of x, or of all tokens. In a causal
                model other tokens have the state 0, and nothing of x is read there.
            cache: of a causal model, from `new_cache`: x are the tokens that follow those of the cache.
            **options: `steps`, `solver`, `adjoint`, `start`, `on_failure`, `confirm` and `return_solution`, as of
                `Equilibrium`.

        Returns:
            (*batch, N, dim); with `return_solution` a tuple (tokens, `Solution`).
        """
        _validate.check_float_tensor("x", x, min_ndim=2)
        fits = x.shape[-1] == self.dim
        _validate.require(fits, "x", f"have width {self.dim} on its last axis", f"shape {tuple(x.shape)}")
        if not self.causal:
            return super().forward(x, self._merged(x, mask, key_mask), cache=cache, **options)
        if cache is not None:
            required, remedy = "be None beside a cache", "use key_mask, or call the model on all tokens"
            _validate.require(mask is None, "mask", required, "a mask", remedy)
            reads = None if key_mask is None else Reads(exists=key_mask)
            return super().forward(x, cache=cache, reads=reads, **options)
        merged = self._merged(x, mask, key_mask)
        return super().forward(x, merged, reads=self._reads(x, mask, key_mask), **options)

    if TYPE_CHECKING:
        __call__: PlainCall[...]

    def _reads(self, x: Tensor, mask: Tensor | None, key_mask: Tensor | None) -> Reads | None:
        """The masks beside causality, for tokens that are solved on their own."""
        count = x.shape[-2]
        pairs, bias = (
            t if t is None or t.ndim < 2 else t.expand(*t.shape[:-2], count, count)
            for t in self._pairs_and_bias(x, mask, None)
        )
        return Reads(pairs, bias, key_mask)

    def _merged(self, x: Tensor, mask: Tensor | None, key_mask: Tensor | None) -> PerSample | Shared | None:
        """All masks as one, computed once for all steps."""
        lead, count = x.shape[:-2], x.shape[-2]
        causal = self._draws_triangle or (self.causal and (mask is not None or key_mask is not None))
        pairs, bias = self._pairs_and_bias(x, mask, key_mask)
        if causal:
            lower = triangle(count, count, 0, x.device)
            pairs = lower if pairs is None else pairs & lower
        if bias is not None:
            bias = bias.to(x.dtype) if pairs is None else bias.to(x.dtype).masked_fill(~pairs, -torch.inf)
        merged = pairs if bias is None else bias
        if merged is None:
            return None
        # Torch's kernels take no mask of keys alone.
        merged = merged if merged.ndim > 1 else merged[None]
        own = merged.ndim == x.ndim + 1 and merged.shape[: len(lead)] == lead
        return PerSample(merged) if own else Shared(merged)

    def _pairs_and_bias(
        self, x: Tensor, mask: Tensor | None, key_mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        if isinstance(mask, Tensor) and mask.ndim == x.ndim > 2:
            mask = mask.unsqueeze(-3)
        shape = (*x.shape[:-2], self.heads, x.shape[-2], x.shape[-2])
        return mask_and_bias(mask, shape=shape, like=x, key_mask=key_mask)

    def extra_repr(self) -> str:
        # The tokens of a sample form one problem in every `EquilibriumTransformer`.
        others = super().extra_repr().removeprefix("event_ndim=2").removeprefix(", ")
        shown = [f"{self.dim}", f"heads={self.heads}", *(["causal"] if self.causal else []), others]
        return ", ".join(text for text in shown if text)


def _attention(choice: Any, dim: int, heads: int, causal: bool, rotary: Rotary | None) -> nn.Module:
    if isinstance(choice, nn.Module):
        remedy = "give the module its own rotary positions"
        _validate.require(rotary is None, "rotary", "be None with an attention module", "a Rotary", remedy)
        return copy.deepcopy(choice)
    if isinstance(choice, type):
        _validate.check_instance("attention", choice, nn.Module, "be 'softmax', 'equilibrium' or an nn.Module")
    _validate.check_choice("attention", choice, ("softmax", "equilibrium"))
    if choice == "softmax":
        return SoftmaxAttention(dim, heads, causal=causal, rotary=rotary)
    return ImplicitAttention(dim, heads, rotary=rotary, on_failure="ignore")

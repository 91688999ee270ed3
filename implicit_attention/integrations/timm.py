"""Equilibrium attention for timm: what a block of a vision transformer takes as `attn_layer`. timm is not imported."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import _validate
from .._types import Impl, OnFailure
from ..adjoints import Adjoint
from ..attention.core import attend
from ..attention.heads import merge_heads
from ..attention.masks import mask_and_bias
from ..layers.projections import LearnedAnchor, Scalar, anchor_or_beta
from ..layers.remembering import Remembering
from ..options import SolveOptions
from ..solvers import Solver


class EquilibriumAttention(Remembering):
    """The `Attention` of timm whose queries first settle into the equilibrium of their energy over the keys.

    Per head, z = anchor q + (1 - anchor) softmax(z K^T / sqrt(D)) K, then softmax(z K^T / sqrt(D)) V is read. With
    `max_steps=0` it is timm's `Attention`, whose arguments (up to `dtype`) and state dict it has; a learned anchor adds
    `anchor.logit`. A block takes a class, so that options are given by a subclass:

        class MyAttention(EquilibriumAttention):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, anchor=0.5, **kwargs)

        model = VisionTransformer(attn_layer=MyAttention)

    `solver`, `adjoint`, `impl`, `max_steps` and `on_failure` are those of `equilibrium_attention`.

    Args:
        dim: width of the tokens.
        num_heads: number of heads.
        attn_head_dim: width of a head, default dim / num_heads.
        dim_out: width of the output, default `dim`.
        qkv_bias: whether queries, keys and values (and the gate) have biases.
        qk_norm: whether queries and keys are normalised per head, by `norm_layer`.
        scale_norm: whether the output is normalised before its projection, by `norm_layer`.
        proj_bias: whether the output projection has a bias.
        gated: whether a sigmoid of the tokens multiplies the output before its projection.
        attn_drop: part of the attention weights dropped in the read-out while training.
        proj_drop: part of the output dropped while training.
        norm_layer: makes a norm from its width.
        anchor: "learned" (per head, from .5) or a number in [0, 1]. With 0 the queries get no gradient from the solve.

    Attributes:
        last_solve: the `SolveReport` of the last call, (B, heads, N), detached.

    Raises:
        TypeError, ValueError: arguments that do not fit, with the remedy.

    Gradients: with respect to inputs and parameters, to any order.

    Reference: timm's `layers.attention.Attention` (Wightman, 2019) for names and order of operations.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        attn_head_dim: int | None = None,
        dim_out: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        gated: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Callable[..., nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        anchor: Scalar = "learned",
        solver: Solver | None = None,
        adjoint: Adjoint | None = None,
        impl: Impl = "auto",
        max_steps: int | None = None,
        on_failure: OnFailure = "warn",
    ) -> None:
        super().__init__()
        for name, size in (("dim", dim), ("num_heads", num_heads)):
            _validate.check_integer(name, size, low=1)
        if attn_head_dim is None:
            remedy = f"use a divisor of {dim}, or pass attn_head_dim"
            _validate.require(dim % num_heads == 0, "num_heads", f"divide dim = {dim}", num_heads, remedy)
        if qk_norm or scale_norm:
            required = "be given with qk_norm or scale_norm"
            _validate.require(norm_layer is not None, "norm_layer", required, None, "for example nn.LayerNorm")
        norm = norm_layer or nn.Identity
        self.num_heads = num_heads
        self.head_dim = dim // num_heads if attn_head_dim is None else attn_head_dim
        inner = self.attn_dim = num_heads * self.head_dim
        self.qkv = nn.Linear(dim, 3 * inner, bias=qkv_bias, device=device, dtype=dtype)
        self.q_norm = norm(self.head_dim, device=device, dtype=dtype) if qk_norm else nn.Identity()
        self.k_norm = norm(self.head_dim, device=device, dtype=dtype) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = norm(inner, device=device, dtype=dtype) if scale_norm else nn.Identity()
        self.gate = nn.Linear(dim, inner, bias=qkv_bias, device=device, dtype=dtype) if gated else None
        self.proj = nn.Linear(inner, dim if dim_out is None else dim_out, bias=proj_bias, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)
        self.anchor = anchor_or_beta("anchor", anchor, LearnedAnchor((num_heads,), device=device, dtype=dtype))
        self.options = SolveOptions(
            solver=solver, adjoint=adjoint, impl=impl, max_steps=max_steps, on_failure=on_failure
        )

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend from every token to all.

        Args:
            x: (B, N, dim).
            attn_mask: boolean (True = attend) or additive, (N, N) or broadcasting to (B, heads, N, N); with `is_causal`
                it may only say which tokens exist, (B, 1, 1, N).
            is_causal: whether a token attends to itself and those before it only.

        Returns:
            (B, N, dim_out); a token that attends to nothing reads zeros.
        """
        _validate.check_float_tensor("x", x)
        received = f"shape {tuple(x.shape)}"
        _validate.require(x.ndim == 3 and x.shape[-1] == self.qkv.in_features, "x", "be (B, N, dim)", received)
        if isinstance(attn_mask, Tensor):
            required, received = "have two or four axes", f"shape {tuple(attn_mask.shape)}"
            _validate.require(attn_mask.ndim in (2, 4), "attn_mask", required, received, "add an axis for the heads")
        batch, count, _ = x.shape
        q, k, v = self.qkv(x).view(batch, count, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        shape = (batch, self.num_heads, count, count)
        pairs, bias = mask_and_bias(attn_mask, causal=is_causal, shape=shape, like=q, names=("attn_mask", "is_causal"))
        found = attend(
            q,
            k,
            v,
            beta=self.head_dim**-0.5,
            anchor=self.anchor(),
            mask=pairs,
            bias=bias,
            options=self.options,
            dropout_p=self.attn_drop.p if self.training else 0.0,
        )
        self._last = found.report
        output = self.norm(merge_heads(found.output))
        if self.gate is not None:
            output = output * self.gate(x).sigmoid()
        projected: Tensor = self.proj_drop(self.proj(output))
        return projected

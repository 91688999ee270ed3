"""Equilibrium attention that blocks of timm's vision transformers take as `attn_layer`. timm is not imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import _validate
from ..attention.masks import check_causal, mask_and_bias
from ..layers.projections import Scalar, merge_heads
from ..layers.sharding import check_whole
from ..options import SolveKeywords
from ._base import HostAttention, check_shape


class EquilibriumAttention(HostAttention):
    """The `Attention` of timm whose queries first settle into the equilibrium of their energy over the keys.

    Per head, z = anchor q + (1 - anchor) softmax(z K^T / sqrt(D)) K, then softmax(z K^T / sqrt(D)) V is read. With
    `max_steps=0` this is timm's `Attention`. Arguments (up to `dtype`) and state dict are timm's; a learned anchor adds
    `anchor.logit`, and stays where timm's are loaded. A block takes a class as `attn_layer`: a subclass gives options.

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
        attn_drop: share of the attention weights that are dropped in the read-out while training.
        proj_drop: share of the output that is dropped while training.
        norm_layer: makes a norm of a given width.
        device: of the parameters.
        dtype: of the parameters.
        anchor: "learned" (per head, from 0.5) or a number in [0, 1]. With 0 the solve gives queries no gradient.
        **options: solver, adjoint, impl, max_steps and on_failure, as in `SolveOptions`.

    Attributes:
        last_solve: the `SolveReport` of the last call, (B, heads, N), detached.

    Raises:
        TypeError, ValueError: arguments that do not fit, with the remedy.

    Gradients: with respect to inputs and parameters, to any order.

    Reference: timm's `layers.attention.Attention` (Wightman, 2019) for names and order of operations.

    Examples:
        >>> import torch
        >>> from implicit_attention.integrations.timm import EquilibriumAttention
        >>> class MyAttention(EquilibriumAttention):
        ...     def __init__(self, *args, **kwargs):
        ...         super().__init__(*args, anchor=0.5, **kwargs)
        >>> attention = MyAttention(16, num_heads=4)  # as timm.create_model(..., attn_layer=MyAttention) makes it
        >>> attention(torch.randn(2, 9, 16)).shape
        torch.Size([2, 9, 16])

    Not for models outside timm: use `ImplicitAttention`.
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
        **options: Unpack[SolveKeywords],
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
        self.num_heads = num_heads
        self.head_dim = dim // num_heads if attn_head_dim is None else attn_head_dim
        self.attn_dim = inner = num_heads * self.head_dim
        placement: dict[str, Any] = {"device": device, "dtype": dtype}

        def norm(wanted: bool, width: int) -> nn.Module:
            return norm_layer(width, **placement) if wanted and norm_layer is not None else nn.Identity()

        self.qkv = nn.Linear(dim, 3 * inner, qkv_bias, **placement)
        self.q_norm, self.k_norm = norm(qk_norm, self.head_dim), norm(qk_norm, self.head_dim)
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = norm(scale_norm, inner)
        self.gate = nn.Linear(dim, inner, qkv_bias, **placement) if gated else None
        self.proj = nn.Linear(inner, dim if dim_out is None else dim_out, proj_bias, **placement)
        self.proj_drop = nn.Dropout(proj_drop)
        self._set_up(num_heads, anchor, options, **placement)

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
        check_shape(x.ndim == 3 and x.shape[-1] == self.qkv.in_features, "x", x, "be (B, N, dim)")
        if isinstance(attn_mask, Tensor):
            remedy = "add an axis for the heads"
            check_shape(attn_mask.ndim in (2, 4), "attn_mask", attn_mask, "have two or four axes", remedy)
        batch, count, _ = x.shape
        packed = check_whole("qkv", self.qkv(x), 3 * self.attn_dim)
        q, k, v = packed.view(batch, count, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        shape = (batch, self.num_heads, count, count)
        if is_causal:
            check_causal("attn_mask", attn_mask, "is_causal")
        masks = mask_and_bias(attn_mask, shape=shape, like=q, name="attn_mask")
        scale, first = self.head_dim**-0.5, 0 if is_causal else None
        attended = self._attend(q, k, v, scale, masks, self.attn_drop.p, first=first)
        output: Tensor = self.norm(merge_heads(attended.output))
        if self.gate is not None:
            output = output * self.gate(x).sigmoid()
        output = self.proj_drop(self.proj(output))
        return output

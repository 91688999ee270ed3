"""`nn.MultiheadAttention` with an equilibrium, and `replace_attention`, which puts it into the models of torch.nn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import _validate
from ..layers.projections import LearnedBeta, Scalar, anchor_or_beta, merge_heads, split_heads
from ..options import SolveKeywords
from ._base import HostAttention
from ._multihead_input import check_tokens, mask_and_bias

_Old = TypeVar("_Old", bound=nn.Module)
_New = TypeVar("_New", bound=nn.Module)

_SIZES = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")
_PARAMETERS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v")
_KEPT = (*_SIZES, *_PARAMETERS, "out_proj")


class ImplicitMultiheadAttention(HostAttention):
    """`nn.MultiheadAttention` whose queries settle into an equilibrium before values are read.

    Per head, with q, K, V as torch projects them (and extends them by `add_bias_kv` and `add_zero_attn`):
    z = anchor q + (1 - anchor) softmax(beta z K^T + mask) K, output = W_o softmax(beta z K^T + mask) V. With
    `max_steps=0` and beta 1/sqrt(head_dim) that is `nn.MultiheadAttention`.

    Positional arguments, initialisation (from the same random numbers) and parameters are torch's. A learned anchor or
    beta adds `anchor.logit` or `beta.log_scale` to the state dict. The state dict of an `nn.MultiheadAttention` loads
    as well and leaves these two as they are. This class is not a subclass of `nn.MultiheadAttention`, because torch's
    transformer layers do not call the forward of a subclass in evaluation.

    There are four differences from torch. A query whose keys are all masked gives zeros before the output projection
    (torch gives NaN if weights are asked for). The returned weights are those before dropout. `is_causal` changes
    nothing, as `attn_mask` must be given beside it. A boolean mask may be combined with an additive one.

    Args:
        embed_dim: width of queries and output.
        num_heads: number of heads, dividing `embed_dim`.
        dropout: share of the attention weights that are dropped in the read-out while training.
        bias: whether the projections have biases.
        add_bias_kv: whether to attend to one more key and value, which are learned.
        add_zero_attn: whether to attend to one more key and value, which are zeros.
        kdim: width of `key`, default `embed_dim`.
        vdim: width of `value`, default `embed_dim`.
        batch_first: whether inputs and output are (B, N, E) instead of (N, B, E).
        device: of the parameters.
        dtype: of the parameters.
        anchor: "learned" (per head, from 0.5) or a number in [0, 1]. With 0 the solve gives queries no gradient.
        beta: inverse temperature, "learned" (per head, from 1/sqrt(head_dim)), a number > 0, or None for a fixed
            1/sqrt(head_dim).
        **options: solver, adjoint, impl, max_steps and on_failure, as in `SolveOptions`.

    Attributes:
        options: the `SolveOptions`; the next call reads them, so that they may be replaced.
        last_solve: the `SolveReport` of the last call, as in `ImplicitAttention`.

    Raises:
        TypeError, ValueError: arguments that do not fit, with the remedy.

    Gradients: with respect to inputs, additive masks and parameters, in training and in evaluation, to any order.

    Examples:
        >>> import torch
        >>> from implicit_attention.integrations.multihead import ImplicitMultiheadAttention
        >>> attention = ImplicitMultiheadAttention(8, 2, batch_first=True, anchor=0.5)
        >>> x = torch.randn(3, 5, 8)
        >>> output, weights = attention(x, x, x)
        >>> output.shape, weights.shape
        (torch.Size([3, 5, 8]), torch.Size([3, 5, 5]))
        >>> bool(attention.last_solve.converged.all())
        True

    Not for new models, which have no parameters of torch's to keep: `ImplicitAttention` has caches and grouped heads.
    """

    # nn.TransformerEncoderLayer and nn.TransformerEncoder compute ordinary attention themselves where this is True.
    _qkv_same_embed_dim = False

    embed_dim: int
    num_heads: int
    dropout: float
    add_zero_attn: bool
    kdim: int
    vdim: int
    batch_first: bool
    in_proj_weight: Tensor | None
    q_proj_weight: Tensor | None
    k_proj_weight: Tensor | None
    v_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    out_proj: nn.Linear
    beta: nn.Module
    _original: tuple[nn.MultiheadAttention] | None = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        anchor: Scalar = "learned",
        beta: Scalar | None = "learned",
        **options: Unpack[SolveKeywords],
    ) -> None:
        super().__init__()
        for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads), ("kdim", kdim), ("vdim", vdim)):
            if size is not None:
                _validate.check_integer(name, size, low=1)
        remedy = f"use a divisor of {embed_dim}"
        _validate.require(embed_dim % num_heads == 0, "num_heads", f"divide embed_dim = {embed_dim}", num_heads, remedy)
        _validate.check_number("dropout", dropout, low=0.0, high=1.0)
        torchs = nn.MultiheadAttention(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self._take(torchs, anchor, beta, **options)

    @classmethod
    def from_torch(cls, mha: nn.MultiheadAttention, **options: Any) -> ImplicitMultiheadAttention:
        """This module in place of `mha`, with the same parameters: they are shared, so that an optimizer keeps them.

        Precision, device, mode and `requires_grad` stay. A learned anchor or beta is a new parameter: add it to an
        optimizer that exists already (`optimizer.add_param_group`).

        Args:
            mha: an `nn.MultiheadAttention`.
            **options: `anchor`, `beta` and those of `SolveOptions`.

        Raises:
            TypeError: if `mha` is no `nn.MultiheadAttention`, or an option is unknown.
            ValueError: if `mha` computes something else (a forward of its own, hooks, other parameters).
        """
        _validate.check_instance("mha", mha, nn.MultiheadAttention, "be an nn.MultiheadAttention")
        reason = _peculiarity(mha)
        _validate.require(not reason, "mha", "be a plain nn.MultiheadAttention", f"one with {reason}")
        new = cls(**{name: getattr(mha, name) for name in _SIZES}, device="meta")
        new._take(mha, **options)
        # In a tuple, so that `mha` is no submodule of its replacement.
        new._original = (mha,)
        return new.train(mha.training)

    def to_torch(self) -> nn.MultiheadAttention:
        """An `nn.MultiheadAttention` with copied parameters that computes what this module does with `max_steps=0`.

        A factor beta sqrt(head_dim) per head in the query projection stands for beta. The anchor is lost, and with it
        the equilibrium, as torch's module has neither.
        """
        like, head_dim = self.out_proj.weight, self.embed_dim // self.num_heads
        sizes: dict[str, Any] = {name: getattr(self, name) for name in _SIZES}
        sizes |= {"bias": self.in_proj_bias is not None, "add_bias_kv": self.bias_k is not None, "dtype": like.dtype}
        # Without memory first, as its parameters need no random numbers.
        mha = nn.MultiheadAttention(**sizes, device="meta").to_empty(device=like.device)
        with torch.no_grad():
            for name, parameter in mha.named_parameters():
                own = self.get_parameter(name)
                parameter.copy_(own).requires_grad_(own.requires_grad)
            single = torch.promote_types(like.dtype, torch.float32)
            factor = torch.as_tensor(self.beta() / head_dim**-0.5, dtype=single, device=like.device)
            factor = factor.expand(self.num_heads).repeat_interleave(head_dim)
            weight = mha.q_proj_weight if mha.in_proj_weight is None else mha.in_proj_weight[: self.embed_dim]
            weight.mul_(factor[:, None])
            if mha.in_proj_bias is not None:
                mha.in_proj_bias[: self.embed_dim].mul_(factor)
        return mha.train(self.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from every query to the keys, with the arguments of `nn.MultiheadAttention`.

        Args:
            query: (N, B, embed_dim), (B, N, embed_dim) with `batch_first`, or (N, embed_dim) without a batch. In
                self-attention without masks it may be nested.
            key: the same with M tokens of width `kdim`.
            value: the same with M tokens of width `vdim`.
            key_padding_mask: (B, M), or (M,) without a batch: boolean (True = ignore this key) or added to the scores.
            need_weights: whether to return the attention weights at the equilibrium, before dropout.
            attn_mask: (N, M) or (B * num_heads, N, M): boolean (True = ignore this key) or added to the scores.
            average_attn_weights: whether these weights are averaged over the heads.
            is_causal: a hint that `attn_mask` is the causal one, which must be passed all the same.

        Returns:
            (output, weights). The output has the shape of the query. The weights are None, (B, N, M), or
            (B, num_heads, N, M), without B for an input without a batch. M counts the keys of `add_bias_kv` and
            `add_zero_attn`, which come last.
        """
        remedy = "pass nn.Transformer.generate_square_subsequent_mask(N), or is_causal=False"
        explicit = attn_mask is not None or not is_causal
        _validate.require(explicit, "attn_mask", "be given with is_causal=True, which is a hint", "None", remedy)
        batch_first, samples = self.batch_first, None
        if isinstance(query, Tensor) and query.is_nested:
            # nn.TransformerEncoder makes nested tensors of padded samples in evaluation, whatever `batch_first` says.
            fits = query is key and key is value and key_padding_mask is None and attn_mask is None
            remedy = "pad it with to_padded_tensor and pass key_padding_mask"
            required = "be nested in self-attention without masks only"
            _validate.require(fits, "query", required, "a nested tensor", remedy)
            batch_first, layout, samples = True, query.layout, query.unbind()
            query = key = value = query.to_padded_tensor(0.0)
            lengths = torch.tensor([len(sample) for sample in samples], device=query.device)
            key_padding_mask = torch.arange(query.shape[1], device=query.device) >= lengths[:, None]
        check_tokens(query, key, value, (self.embed_dim, self.kdim, self.vdim), batch_first)
        batched = query.ndim == 3
        if not batched:
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
        elif not batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        count = key.shape[-2]
        queries, keys, values = (split_heads(t, self.num_heads) for t in self._projected(query, key, value))
        more = keys.shape[-2] - count
        masks = mask_and_bias(attn_mask, key_padding_mask, queries, count=count, more=more, batched=batched)
        # Keys are read at every evaluation: they are laid out once.
        keys, values = keys.contiguous(), values.contiguous()
        attended = self._attend(queries, keys, values, self.beta(), masks, self.dropout, return_weights=need_weights)
        output, weights = self.out_proj(merge_heads(attended.output)), attended.weights
        if weights is not None:
            weights = (weights.mean(-3) if average_attn_weights else weights).to(query.dtype)
        if samples is not None:
            kept = [row[: len(sample)] for row, sample in zip(output, samples, strict=True)]
            return torch.nested.as_nested_tensor(kept, layout=layout), weights
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if batch_first else output.transpose(0, 1), weights

    # Parts.

    def _restored(self) -> nn.MultiheadAttention:
        """The module that this one was made from, with the parameters, the settings and the mode of this one."""
        assert self._original is not None
        (mha,) = self._original
        for name in _KEPT:
            # Moved or loaded since, a parameter may be another object; a dropout may be another number.
            setattr(mha, name, getattr(self, name))
        return mha.train(self.training)

    def _take(
        self, mha: nn.MultiheadAttention, anchor: Scalar = "learned", beta: Scalar | None = "learned", **options: Any
    ) -> None:
        """Take the parameters of `mha` and add, on their device and in their precision, an anchor and a beta."""
        for name in _KEPT:
            setattr(self, name, getattr(mha, name))
        like, usual = self.out_proj.weight, (self.embed_dim // self.num_heads) ** -0.5
        placement: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        self._set_up(self.num_heads, anchor, cast(SolveKeywords, options), **placement)
        learned = LearnedBeta((self.num_heads,), usual, **placement)
        self.beta = anchor_or_beta("beta", usual if beta is None else beta, learned)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights: tuple[Tensor, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)  # type: ignore[assignment]
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        for name, weight in (("in_proj_weight", weights[0]), ("out_proj.weight", self.out_proj.weight)):
            _validate.check_local(name, weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        query, key, value = map(F.linear, (query, key, value), weights, biases)
        if self.bias_k is not None and self.bias_v is not None:
            pairs = ((key, self.bias_k), (value, self.bias_v))
            key, value = (torch.cat([t, b.expand(len(t), 1, -1)], dim=1) for t, b in pairs)
        if self.add_zero_attn:
            key, value = (F.pad(t, (0, 0, 0, 1)) for t in (key, value))
        return query, key, value

    # Housekeeping.

    def extra_repr(self) -> str:
        usual = [name for name in ("kdim", "vdim") if getattr(self, name) == self.embed_dim]
        settings = {name: getattr(self, name) for name in _SIZES[1:] if name not in usual}
        return f"{self.embed_dim}, {self._shown(**settings, add_bias_kv=self.bias_k is not None)}"


def replace_attention(
    module: nn.Module, *, anchor: Scalar = "learned", beta: Scalar | None = "learned", **options: Unpack[SolveKeywords]
) -> dict[str, ImplicitMultiheadAttention]:
    """Put an `ImplicitMultiheadAttention` in the place of every `nn.MultiheadAttention` in a model.

    The model changes in place, by `ImplicitMultiheadAttention.from_torch`: its parameters stay the same objects, and a
    module that is used in several places is still shared afterwards. On an error nothing is replaced. For options that
    differ by layer, call it on parts of the model.

    Args:
        module: a model that holds an `nn.MultiheadAttention` at any depth.
        anchor: as in `ImplicitMultiheadAttention`.
        beta: as in `ImplicitMultiheadAttention`.
        **options: solver, adjoint, impl, max_steps and on_failure, as in `SolveOptions`.

    Returns:
        {qualified name: new module}. Learned anchors and betas are new parameters for an optimizer.

    Raises:
        TypeError, ValueError: options that do not fit.
        ValueError: a model without `nn.MultiheadAttention`, one that is itself an `nn.MultiheadAttention`, and one
            that holds some with a forward, hooks or parameters of their own, which are named.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from implicit_attention.integrations.multihead import replace_attention
        >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)
        >>> replaced = replace_attention(encoder, anchor=0.9)
        >>> list(replaced)
        ['layers.0.self_attn', 'layers.1.self_attn']
        >>> encoder(torch.randn(3, 5, 8)).shape
        torch.Size([3, 5, 8])

    Not for models of transformers, timm or x-transformers, which have attention modules of their own.
    """
    parts = _parts(module, nn.MultiheadAttention)
    remedy = "it cannot be replaced in place: use ImplicitMultiheadAttention.from_torch(module)"
    _validate.require("" not in parts, "module", "hold the attention to replace", type(module).__name__, remedy)
    _validate.require(bool(parts), "module", "have an nn.MultiheadAttention", f"{type(module).__name__} without any")
    peculiar = "; ".join(f"`{name}` with {reason}" for name, part in parts.items() if (reason := _peculiarity(part)))
    remedy = "call replace_attention on parts of the model that have none of these"
    _validate.require(not peculiar, "module", "have plain nn.MultiheadAttention only", peculiar, remedy)
    make = partial(ImplicitMultiheadAttention.from_torch, anchor=anchor, beta=beta, **options)
    return _exchanged(module, parts, make)


def restore_attention(module: nn.Module) -> dict[str, nn.MultiheadAttention]:
    """Put every `nn.MultiheadAttention` that `replace_attention` took out of a model back into its place.

    The modules are the same objects that they were, with the parameters and the dropout that the model has now, so that
    nothing that was trained, moved, loaded or set meanwhile is lost. The keys of the state dict and the bits of the
    answers are those of a model that was never replaced. Learned anchors and betas are lost;
    `ImplicitMultiheadAttention.to_torch` keeps a beta.

    Args:
        module: a model with modules from `replace_attention` or `from_torch`.

    Returns:
        {qualified name: `nn.MultiheadAttention`}.

    Raises:
        TypeError: no nn.Module.
        ValueError: a model without such modules, one that is one itself, or one that holds some with hooks, which would
            be lost. Nothing is restored then.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from implicit_attention.integrations.multihead import replace_attention, restore_attention
        >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)
        >>> first = encoder.layers[0].self_attn
        >>> _ = replace_attention(encoder, anchor=0.9)
        >>> list(restore_attention(encoder)), encoder.layers[0].self_attn is first
        (['layers.0.self_attn', 'layers.1.self_attn'], True)

    Not for an `ImplicitMultiheadAttention` that replaced no other module: it stays as it is.
    """
    parts = {name: part for name, part in _parts(module, ImplicitMultiheadAttention).items() if part._original}
    received = f"{type(module).__name__} without any"
    _validate.require(bool(parts), "module", "hold attention that replace_attention has replaced", received)
    remedy = "it cannot be replaced in place: restore the model that holds it"
    _validate.require("" not in parts, "module", "hold the attention to restore", type(module).__name__, remedy)
    hooked = ", ".join(f"`{name}`" for name, part in parts.items() if _has_hooks(part))
    remedy = "remove them, and register them afterwards"
    _validate.require(not hooked, "module", "have no hooks on what is restored", f"some on {hooked}", remedy)
    return _exchanged(module, parts, ImplicitMultiheadAttention._restored)


def _parts(module: nn.Module, kind: type[_Old]) -> dict[str, _Old]:
    """The parts of a model that are of this kind, each under all of its names."""
    _validate.check_instance("module", module, nn.Module, "be an nn.Module")
    return {name: part for name, part in module.named_modules(remove_duplicate=False) if isinstance(part, kind)}


def _exchanged(module: nn.Module, parts: dict[str, _Old], make: Callable[[_Old], _New]) -> dict[str, _New]:
    """Put `make(part)` into the place of each part; return the new modules by name."""
    new = {part: make(part) for part in dict.fromkeys(parts.values())}
    for name, part in parts.items():
        module.set_submodule(name, new[part])
    return {name: new[part] for name, part in parts.items()}


def _has_hooks(module: nn.Module) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks)


def _peculiarity(mha: nn.MultiheadAttention) -> str:
    """List the peculiarities that a replacement of this module would lose; empty if it has none."""
    if type(mha).forward is not nn.MultiheadAttention.forward:
        return f"a forward of its own ({type(mha).__name__})"
    if _has_hooks(mha):
        return "hooks, which would be lost; register them afterwards"
    others = {name for name, _ in mha.named_parameters()} - {*_PARAMETERS, "out_proj.weight", "out_proj.bias"}
    return f"other parameters ({', '.join(sorted(others))})" if others else ""

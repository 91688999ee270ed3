"""`torch.nn.MultiheadAttention` that answers with an equilibrium, and `replace_attention` for models that hold some."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _validate
from .._types import Impl, OnFailure
from ..adjoints import Adjoint
from ..attention.core import attend
from ..layers.projections import LearnedAnchor, LearnedBeta, Scalar, anchor_or_beta, merge_heads, split_heads
from ..layers.remembering import Remembering
from ..options import SolveOptions
from ..solvers import Solver
from ._multihead_input import check_nested, check_tokens, pairs_and_bias

_SIZES = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")
_PARAMETERS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v")
_OPTIONS = ("anchor", "beta", "solver", "adjoint", "impl", "max_steps", "on_failure")


class ImplicitMultiheadAttention(Remembering):
    """`nn.MultiheadAttention` whose queries settle into an equilibrium before values are read.

    Per head, with q, K, V as torch projects them (and extends them by `add_bias_kv` and `add_zero_attn`):
    z = anchor q + (1 - anchor) softmax(beta z K^T + mask) K, output = W_o softmax(beta z K^T + mask) V. With
    `max_steps=0` that is `nn.MultiheadAttention`, if beta is 1/sqrt(head_dim).

    Positional arguments, initialisation (from the same random numbers) and parameters are torch's; the state dict has
    `anchor.logit` and `beta.log_scale` besides, where these are learned. That of an `nn.MultiheadAttention` loads, too,
    and leaves them as they are. The transformer layers of torch.nn call this module in evaluation as in training: it
    is no subclass of `nn.MultiheadAttention`, which they bypass there.

    What differs: a query that may attend to nothing gives zeros before the output projection (torch: NaN if weights are
    asked for); the weights that are returned are those before dropout; `is_causal` changes nothing, as `attn_mask`
    says it all; a boolean mask may come with an additive one.

    Args:
        embed_dim: width of queries and output.
        num_heads: number of heads, dividing `embed_dim`.
        dropout: part of the attention weights dropped in the read-out while training.
        bias: whether the projections have biases.
        add_bias_kv: attend to one more, learned key, with a value.
        add_zero_attn: attend to one more key which is zero, as is its value.
        kdim: width of `key`, default `embed_dim`.
        vdim: width of `value`, default `embed_dim`.
        batch_first: whether inputs and output are (B, N, E) instead of (N, B, E).
        device: of the parameters.
        dtype: of the parameters.
        anchor: "learned" (per head, from .5) or a number in [0, 1]; with 0 a solve gives queries no gradient.
        beta: inverse temperature, "learned" (per head, from 1/sqrt(head_dim)), a number > 0, or None for a fixed
            1/sqrt(head_dim).
        solver: default `Anderson()`.
        adjoint: default `Implicit()`, the exact gradient of the equilibrium.
        impl: "auto", "reference", "tiled" or "triton".
        max_steps: the solver's in short; 0 is ordinary attention.
        on_failure: "raise", "warn" or "ignore".

    Attributes:
        options: the `SolveOptions` made of the last five; replaced, they count from the next call on.
        last_solve: the `SolveReport` of the last call, as in `ImplicitAttention`.

    Raises:
        TypeError, ValueError: arguments that do not fit, with the remedy.

    Gradients: with respect to inputs, additive masks and parameters, in training and in evaluation, to any order.
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
    anchor: nn.Module
    beta: nn.Module

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
        solver: Solver | None = None,
        adjoint: Adjoint | None = None,
        impl: Impl = "auto",
        max_steps: int | None = None,
        on_failure: OnFailure = "warn",
    ) -> None:
        super().__init__()
        for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads), ("kdim", kdim), ("vdim", vdim)):
            if size is not None:
                _validate.check_integer(name, size, low=1)
        remedy = f"use a divisor of {embed_dim}"
        _validate.require(embed_dim % num_heads == 0, "num_heads", f"divide embed_dim = {embed_dim}", num_heads, remedy)
        _validate.check_number("dropout", dropout, low=0.0, high=1.0)
        self.options = SolveOptions(
            solver=solver, adjoint=adjoint, impl=impl, max_steps=max_steps, on_failure=on_failure
        )
        theirs = nn.MultiheadAttention(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self._take(theirs, anchor, beta)

    @classmethod
    def from_torch(cls, mha: nn.MultiheadAttention, **options: Any) -> ImplicitMultiheadAttention:
        """This module in place of `mha`, with the very same parameters (shared, so that an optimizer keeps them).

        Precision, device, what is trained and the mode stay. A learned anchor or beta is new: an optimizer that was
        made before must be given it (`optimizer.add_param_group`).

        Args:
            mha: an `nn.MultiheadAttention`.
            **options: `anchor`, `beta`, `solver`, `adjoint`, `impl`, `max_steps`, `on_failure`.

        Raises:
            TypeError: if `mha` is none, or an option is unknown.
            ValueError: if `mha` computes something else (a forward of its own, hooks, other parameters).
        """
        if not isinstance(mha, nn.MultiheadAttention):
            raise TypeError(_validate.message("mha", "be an nn.MultiheadAttention", type(mha).__name__))
        if reason := _peculiarity(mha):
            raise ValueError(_validate.message("mha", "be a plain nn.MultiheadAttention", f"one with {reason}"))
        if unknown := sorted(set(options) - set(_OPTIONS)):
            raise TypeError(_validate.message("options", f"be among {', '.join(_OPTIONS)}", ", ".join(unknown)))
        made = cls(**{name: getattr(mha, name) for name in _SIZES}, device="meta", **options)
        made._take(mha, options.get("anchor", "learned"), options.get("beta", "learned"))
        return made.train(mha.training)

    def to_torch(self) -> nn.MultiheadAttention:
        """The `nn.MultiheadAttention` that computes what this module computes with `max_steps=0`, of copied parameters.

        What beta has become is folded into the query projection, by a factor beta sqrt(head_dim) per head. What torch's
        module cannot hold is lost: the anchor, and with it the equilibrium.
        """
        sizes = {name: getattr(self, name) for name in _SIZES}
        like, width = self.out_proj.weight, self.embed_dim // self.num_heads
        made: nn.MultiheadAttention = nn.utils.skip_init(  # type: ignore[no-untyped-call]
            nn.MultiheadAttention,
            **sizes,
            bias=self.in_proj_bias is not None,
            add_bias_kv=self.bias_k is not None,
            device=like.device,
            dtype=like.dtype,
        )
        own = dict(self.named_parameters())
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                parameter.copy_(own[name])
            single = torch.promote_types(like.dtype, torch.float32)
            factor = torch.as_tensor(self.beta() / width**-0.5, dtype=single, device=like.device)
            factor = factor.expand(self.num_heads).repeat_interleave(width)
            weight = made.q_proj_weight if made.in_proj_weight is None else made.in_proj_weight[: self.embed_dim]
            weight.copy_(factor[:, None] * weight)
            if made.in_proj_bias is not None:
                bias = made.in_proj_bias[: self.embed_dim]
                bias.copy_(factor * bias)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(own[name].requires_grad)
        return made.train(self.training)

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
            query: (N, B, embed_dim), (B, N, embed_dim) with `batch_first`, or (N, embed_dim) without a batch.
            key: the same with M tokens of width `kdim`.
            value: the same with M tokens of width `vdim`.
            key_padding_mask: (B, M), or (M,) without a batch: boolean (True = ignore this key) or added to the scores.
            need_weights: whether to return the attention weights at the equilibrium, before dropout.
            attn_mask: (N, M) or (B * num_heads, N, M): boolean (True = ignore this key) or added to the scores.
            average_attn_weights: whether these weights are averaged over the heads.
            is_causal: a hint that `attn_mask` is the causal one, which must be passed all the same.

        Returns:
            (output, weights): output like the query; weights None, (B, N, M), or (B, num_heads, N, M), without B for
            an input without a batch. M counts the keys of `add_bias_kv` and `add_zero_attn`, which come last.
        """
        remedy = "pass nn.Transformer.generate_square_subsequent_mask(N), or is_causal=False"
        given = attn_mask is not None or not is_causal
        _validate.require(given, "attn_mask", "be given with is_causal=True, which is a hint", "None", remedy)
        if isinstance(query, Tensor) and query.is_nested:
            check_nested(query, key, value, key_padding_mask, attn_mask)
            return self._nested(query, need_weights, average_attn_weights)
        check_tokens(query, key, value, (self.embed_dim, self.kdim, self.vdim), self.batch_first)
        return self._dense(query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights)

    # Parts.

    def _dense(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.ndim == 3
        if not batched:
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        given = key.shape[-2]
        queries, keys, values = (split_heads(t, self.num_heads) for t in self._projected(query, key, value))
        # Read at every evaluation: laid out once.
        keys, values = keys.contiguous(), values.contiguous()
        more = keys.shape[-2] - given
        mask, bias = pairs_and_bias(attn_mask, key_padding_mask, queries, given=given, more=more, batched=batched)
        output, _, self._last, weights = attend(
            queries,
            keys,
            values,
            beta=self.beta(),
            anchor=self.anchor(),
            mask=mask,
            bias=bias,
            options=self.options,
            dropout_p=self.dropout if self.training else 0.0,
            measure=False,
            weigh=need_weights,
        )
        output = self.out_proj(merge_heads(output))
        if weights is not None:
            weights = (weights.mean(-3) if average_attn_weights else weights).to(query.dtype)
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _nested(self, query: Tensor, need_weights: bool, average_attn_weights: bool) -> tuple[Tensor, Tensor | None]:
        """Self-attention in a nested tensor, which nn.TransformerEncoder makes of padded samples in evaluation."""
        samples = query.unbind()
        dense, lengths = query.to_padded_tensor(0.0), torch.tensor([len(t) for t in samples], device=query.device)
        padding = torch.arange(dense.shape[1], device=query.device) >= lengths[:, None]
        dense = dense if self.batch_first else dense.transpose(0, 1)
        output, weights = self._dense(dense, dense, dense, padding, need_weights, None, average_attn_weights)
        output = output if self.batch_first else output.transpose(0, 1)
        kept = [row[: len(sample)] for row, sample in zip(output, samples, strict=True)]
        return torch.nested.as_nested_tensor(kept, layout=query.layout), weights

    def _take(self, theirs: nn.MultiheadAttention, anchor: Scalar, beta: Scalar | None) -> None:
        """Hold the parameters of `theirs` and, made to fit them, an anchor and a beta."""
        for name in _SIZES:
            setattr(self, name, getattr(theirs, name))
        for name in _PARAMETERS:
            self.register_parameter(name, getattr(theirs, name))
        self.out_proj = theirs.out_proj
        like, usual = self.out_proj.weight, (self.embed_dim // self.num_heads) ** -0.5
        made: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        self.anchor = anchor_or_beta("anchor", anchor, LearnedAnchor((self.num_heads,), **made))
        beta = usual if beta is None else beta
        self.beta = anchor_or_beta("beta", beta, LearnedBeta((self.num_heads,), usual, **made))

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights: tuple[Tensor, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)  # type: ignore[assignment]
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        query, key, value = (F.linear(*given) for given in zip((query, key, value), weights, biases, strict=True))
        if self.bias_k is not None and self.bias_v is not None:
            key, value = (
                torch.cat([t, b.expand(len(t), 1, -1)], dim=1) for t, b in ((key, self.bias_k), (value, self.bias_v))
            )
        if self.add_zero_attn:
            key, value = (F.pad(t, (0, 0, 0, 1)) for t in (key, value))
        return query, key, value

    # Housekeeping.

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if not any(name.startswith((f"{prefix}anchor.", f"{prefix}beta.")) for name in state_dict):
            # It is torch's: what that does not know stays.
            for name in ("anchor", "beta"):
                state_dict.update(getattr(self, name).named_parameters(prefix + name))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        parts = [f"{self.embed_dim}, num_heads={self.num_heads}"]
        usual = {"kdim": self.embed_dim, "vdim": self.embed_dim, "dropout": 0.0, "add_zero_attn": False}
        for name, size in {**usual, "batch_first": False}.items():
            if getattr(self, name) != size:
                parts.append(f"{name}={getattr(self, name)}")
        parts += ["add_bias_kv=True"] if self.bias_k is not None else []
        options = self.options
        parts += [f"{n}={v}" for n in ("solver", "adjoint", "max_steps") if (v := getattr(options, n)) is not None]
        return ", ".join(parts)


def replace_attention(
    module: nn.Module,
    *,
    anchor: Scalar = "learned",
    beta: Scalar | None = "learned",
    solver: Solver | None = None,
    adjoint: Adjoint | None = None,
    impl: Impl = "auto",
    max_steps: int | None = None,
    on_failure: OnFailure = "warn",
) -> dict[str, ImplicitMultiheadAttention]:
    """Put an `ImplicitMultiheadAttention` in the place of every `nn.MultiheadAttention` in a model.

    In place, by `ImplicitMultiheadAttention.from_torch`: parameters stay the objects that they are, a module that is
    used in several places is so afterwards. All are replaced or, on an error, none. Called on a part of a model it
    replaces in that part, for options by layer.

    Args:
        module: a model that has any, at any depth.
        anchor: as in `ImplicitMultiheadAttention`, with the options that follow.
        beta: the same.
        solver: the same.
        adjoint: the same.
        impl: the same.
        max_steps: the same.
        on_failure: the same.

    Returns:
        {qualified name: the new module}. Learned anchors and betas are new parameters for an optimizer.

    Raises:
        TypeError, ValueError: options that do not fit.
        ValueError: if there is none to replace, `module` itself is one, or some compute something else (named).
    """
    if not isinstance(module, nn.Module):
        raise TypeError(_validate.message("module", "be an nn.Module", type(module).__name__))
    if isinstance(module, nn.MultiheadAttention):
        remedy = "it cannot be replaced in place: use ImplicitMultiheadAttention.from_torch(module)"
        raise ValueError(_validate.message("module", "hold the attention to replace", type(module).__name__, remedy))
    modules = module.named_modules(remove_duplicate=False)
    found = {name: part for name, part in modules if isinstance(part, nn.MultiheadAttention)}
    _validate.require(bool(found), "module", "have an nn.MultiheadAttention", f"{type(module).__name__} without any")
    peculiar = {name: reason for name, part in found.items() if (reason := _peculiarity(part))}
    if peculiar:
        received = "; ".join(f"`{name}` with {reason}" for name, reason in peculiar.items())
        remedy = "call replace_attention on parts of the model that have none of these"
        raise ValueError(_validate.message("module", "have plain nn.MultiheadAttention only", received, remedy))
    replacements = {
        part: ImplicitMultiheadAttention.from_torch(
            part,
            anchor=anchor,
            beta=beta,
            solver=solver,
            adjoint=adjoint,
            impl=impl,
            max_steps=max_steps,
            on_failure=on_failure,
        )
        for part in dict.fromkeys(found.values())
    }
    for name, part in found.items():
        module.set_submodule(name, replacements[part])
    return {name: replacements[part] for name, part in found.items()}


def _peculiarity(mha: nn.MultiheadAttention) -> str:
    """What it would lose by being replaced, or nothing."""
    if type(mha).forward is not nn.MultiheadAttention.forward:
        return f"a forward of its own ({type(mha).__name__})"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(mha, name) for name in hooks):
        return "hooks, which would be lost; register them afterwards"
    others = {name for name, _ in mha.named_parameters()} - {*_PARAMETERS, "out_proj.weight", "out_proj.bias"}
    return f"other parameters ({', '.join(sorted(others))})" if others else ""

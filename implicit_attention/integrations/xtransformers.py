"""Equilibrium attention inside x-transformers: what `Attention.attend` is replaced by."""

from __future__ import annotations

import dataclasses
import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _validate
from .._types import Impl, OnFailure
from ..adjoints import Adjoint
from ..attention.core import Measured, attend, split_mask
from ..attention.read_out import PotentialFactory, at_least_single
from ..layers.projections import LearnedAnchor, Scalar, anchor_or_beta
from ..layers.remembering import Remembering
from ..options import SolveOptions
from ..potentials import LogSumExp
from ..potentials.softcap import SoftcapLogSumExp
from ..solution import SolveReport
from ..solvers import Solver
from ._zero_key import with_zero_key

try:
    from x_transformers.attend import Attend, Intermediates
    from x_transformers.x_transformers import Attention, AttentionLayers
except ImportError as error:
    raise ImportError(
        "implicit_attention.integrations.xtransformers needs x-transformers; "
        'in the checkout: pip install -e ".[x-transformers]"'
    ) from error

# Settings of `Attend` that are carried over, under its names; what a setting must be otherwise, and why.
_CARRIED = ("scale", "causal", "dropout", "l2_distance", "add_zero_kv", "softclamp_logits", "logit_softclamp_value")
_REFUSED = {
    "pre_softmax_talking_heads": (None, "talking heads mix the scores of heads, which then solve no problem each"),
    "post_softmax_talking_heads": (None, "talking heads mix the weights of heads, which then solve no problem each"),
    "pre_scale_post_talking_heads": (None, "talking heads mix heads, which then solve no problem each"),
    "selective": (False, "selective attention couples the queries"),
    "cog_signed": (False, "signed weights are no softmax"),
    "cope": (None, "contextual positions make a score depend on all other scores"),
    "inverted_attention": (False, "inverted attention couples the queries"),
    "flash_pack_seq": (False, "packed sequences are not carried; use one sequence per batch entry with a mask"),
}
# Arguments of Attend's constructor that the above accounts for under another name, or that change no result.
_ACCOUNTED = {
    *("heads", "head_learned_sink", "pre_talking_heads", "post_talking_heads", "qk_norm", "flash", "sdp_kwargs"),
    *("sparse_topk", "sparse_topk_straight_through", "sigmoid", "hard", "custom_attn_fn", "onnxable"),
    *("gumbel_softmax", "gumbel_softmax_temp", "gumbel_softmax_hard"),
}


class EquilibriumAttend(Remembering):
    """The `Attend` of x-transformers whose queries first settle into the equilibrium of their energy over the keys.

    z = anchor q + (1 - anchor) softmax(scale z K^T + bias) K, solved for every query on its own, then
    softmax(scale z K^T + bias) V is read. With `max_steps=0` it is `Attend`.

    Arguments up to `logit_softclamp_value` mean what they mean in `Attend`, `solver` and those behind it what they mean
    in `equilibrium_attention`. Talking heads, selective, inverted, signed, packed attention, contextual positions and
    what replaces the softmax are not there.

    Args:
        heads: of the queries.
        scale: inverse temperature, default 1/sqrt(D).
        causal: a query attends to keys up to its own index, both counted from the end.
        dropout: part of the attention weights dropped in the read-out while training.
        l2_distance: scores are -scale |z - k|^2, so that plain steps are those of mean shift.
        add_zero_kv: one more key and value, zeros.
        head_learned_sink: one more key and value, zeros, with a learned score per head, `head_attn_sink`.
        softclamp_logits: scores s are capped to cap tanh(s / cap). The solve is that of `SoftcapLogSumExp`, whose map
            weighs a key near the cap less; the read-out is capped attention as it is.
        logit_softclamp_value: the cap.
        anchor: "learned" (per head, from .5) or a number in [0, 1]. With 0 the queries get no gradient from the solve.

    Attributes:
        last_solve: the `SolveReport` of the last call, (*batch, heads, N), detached.

    Raises:
        TypeError, ValueError: arguments that do not fit, with the remedy.

    Gradients: with respect to q, k, v, attn_bias and parameters, to any order.

    Reference: `Attend` of x-transformers (Wang, 2020) for arguments and the order of operations.
    """

    def __init__(
        self,
        heads: int,
        *,
        scale: float | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        l2_distance: bool = False,
        add_zero_kv: bool = False,
        head_learned_sink: bool = False,
        softclamp_logits: bool = False,
        logit_softclamp_value: float = 50.0,
        anchor: Scalar = "learned",
        solver: Solver | None = None,
        adjoint: Adjoint | None = None,
        impl: Impl = "auto",
        max_steps: int | None = None,
        on_failure: OnFailure = "warn",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _validate.check_integer("heads", heads, low=1)
        if scale is not None:
            _validate.check_number("scale", scale, low=0.0, open_low=True)
        _validate.check_number("dropout", dropout, low=0.0, high=1.0)
        _validate.check_number("logit_softclamp_value", logit_softclamp_value, low=0.0, open_low=True)
        _validate.require(
            not (softclamp_logits and l2_distance),
            "softclamp_logits",
            "be False with l2_distance=True: capped distances have no energy here",
            True,
        )
        self.heads, self.scale, self.causal, self.dropout = heads, scale, causal, dropout
        self.l2_distance, self.add_zero_kv = l2_distance, add_zero_kv
        self.softclamp_logits, self.logit_softclamp_value = softclamp_logits, logit_softclamp_value
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.head_attn_sink = nn.Parameter(torch.zeros(heads, **made)) if head_learned_sink else None
        self.anchor = anchor_or_beta("anchor", anchor, LearnedAnchor((heads,), **made))
        self.options = SolveOptions(
            solver=solver, adjoint=adjoint, impl=impl, max_steps=max_steps, on_failure=on_failure
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        prev_attn: Tensor | None = None,
        attn_delta: Tensor | None = None,
        row_mask: Tensor | None = None,
        flash_pack_seq_kwargs: dict[str, Any] | None = None,
        causal: bool | None = None,
    ) -> tuple[Tensor, Any]:
        """Attend, with the arguments that `Attention` passes.

        Args:
            q: (B, H, N, D).
            k: (B, Hkv, M, D), Hkv dividing H; query head h reads key head h mod Hkv, which is not repeated.
            v: (B, Hkv, M, E).
            mask: boolean, True = attend, (B, M) or broadcasting to (B, H, N, M).
            attn_bias: added to the scores, broadcasts to (B, H, N, M).
            prev_attn: must be None: scores of the layer before are not kept.
            attn_delta: must be None: weights that are changed behind the softmax belong to no energy.
            row_mask: which queries exist, (B, N); not looked at, as queries do not see each other.
            flash_pack_seq_kwargs: must be None.
            causal: overrides the module's.

        Returns:
            (B, H, N, E), and empty `Intermediates`, as with flash=True. A query that attends to nothing gives zeros, as
            with flash=True, also where only the mask and causality together leave it nothing.
        """
        _refuse_arguments(prev_attn=prev_attn, attn_delta=attn_delta, flash_pack_seq_kwargs=flash_pack_seq_kwargs)
        self._check_call(q, k, v, attn_bias)
        batch, (rows, count), kv_heads = q.shape[0], (q.shape[-2], k.shape[-2]), k.shape[1]
        causal = self.causal if causal is None else causal
        pairs = _pairs(mask, causal, (batch, self.heads, rows, count), q.device)
        if attn_bias is not None:
            _validate.check_broadcast("attn_bias", attn_bias.shape, (*q.shape[:-1], count), "(B, H, N, M)")
        bias = split_mask("attn_bias", attn_bias, q)[1]
        anchor, sink = self.anchor(), self.head_attn_sink
        if tiled := kv_heads < self.heads:
            # Head h = r Hkv + g reads key head g: an axis before the key heads along which the keys broadcast.
            tiles = (self.heads // kv_heads, kv_heads)
            q, k, v = q.unflatten(1, tiles), k.unsqueeze(1), v.unsqueeze(1)  # type: ignore[no-untyped-call]
            pairs, bias = _tiled(pairs, tiles, -3), _tiled(bias, tiles, -3)
            anchor, sink = (_tiled(t, tiles, -1) if isinstance(t, Tensor) else t for t in (anchor, sink))
        beta = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        if self.l2_distance:
            # -beta |z - k|^2 is 2 beta <z, k> - beta |k|^2, up to what all keys share.
            distant = -beta * at_least_single(k).square().sum(-1)[..., None, :]
            bias, beta = distant if bias is None else bias + distant, 2 * beta
        if self.add_zero_kv:
            k, v, pairs, bias = with_zero_key(k, v, pairs, bias, None)
        if sink is not None:
            k, v, pairs, bias = with_zero_key(k, v, pairs, bias, sink[..., None, None].to(at_least_single(q).dtype))
        output, _, evidence, _ = attend(
            q,
            k,
            v,
            beta=beta,
            anchor=anchor,
            mask=pairs,
            bias=bias,
            potential=self._potential(),
            options=self.options,
            dropout_p=self.dropout if self.training else 0.0,
            measure=False,
        )
        self._last = _untiled(evidence) if tiled else evidence
        return output.flatten(1, 2) if tiled else output, Intermediates()

    def _potential(self) -> PotentialFactory:
        return partial(SoftcapLogSumExp, cap=self.logit_softclamp_value) if self.softclamp_logits else LogSumExp

    def _check_call(self, q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None) -> None:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            _validate.check_float_tensor(name, tensor)
            _validate.require(tensor.ndim == 4, name, "have the axes (B, heads, N, D)", f"shape {tuple(tensor.shape)}")
        _validate.require(
            q.shape[1] == self.heads, "q", f"have {self.heads} heads on its second axis", f"shape {tuple(q.shape)}"
        )
        required = f"have a number of heads that divides the {self.heads} of `q`"
        _validate.require(k.shape[1] > 0 and self.heads % k.shape[1] == 0, "k", required, f"shape {tuple(k.shape)}")
        required = f"have the {k.shape[1]} heads and {k.shape[2]} rows of `k`"
        _validate.require(v.shape[1:3] == k.shape[1:3], "v", required, f"shape {tuple(v.shape)}")
        remedy = "use rotary positions, or a model without softclamp_logits"
        _validate.require(
            attn_bias is None or not self.softclamp_logits,
            "attn_bias",
            "be None with softclamp_logits=True, where it would be capped with the scores",
            "a tensor",
            remedy,
        )

    def extra_repr(self) -> str:
        parts = [f"heads={self.heads}"] + ([] if self.scale is None else [f"scale={self.scale:g}"])
        parts += [name for name in ("causal", "l2_distance", "add_zero_kv") if getattr(self, name)]
        parts += [f"softclamp={self.logit_softclamp_value:g}"] if self.softclamp_logits else []
        parts += [f"dropout={self.dropout:g}"] if self.dropout else []
        options = self.options
        parts += [f"{n}={v}" for n in ("solver", "adjoint", "max_steps") if (v := getattr(options, n)) is not None]
        return ", ".join(parts)


def replace_attend(
    model: nn.Module,
    *,
    anchor: Scalar = "learned",
    max_steps: int | None = None,
    solver: Solver | None = None,
    adjoint: Adjoint | None = None,
    impl: Impl = "auto",
    on_failure: OnFailure = "warn",
) -> dict[str, EquilibriumAttend]:
    """Put an `EquilibriumAttend` into every `Attention` of a model of x-transformers, with that attention's settings.

    The model changes in place; its parameters stay, and with `max_steps=0` its results do. As with flash=True there are
    no attention maps any more (`return_attn`, z-loss). A replacement may be replaced again, by other options.

    Args:
        model: a TransformerWrapper, AutoregressiveWrapper, Encoder, Decoder, CrossAttender, ViTransformerWrapper, ...
        anchor: "learned" (per head, from .5; new parameters `attend.anchor.logit`) or a number in [0, 1].
        max_steps: replaces the solver's; 0 is the model as it was.
        solver: default `Anderson()`.
        adjoint: default `Implicit()`, and `Unrolled()` for a fixed budget of steps.
        impl: "auto", "reference", "tiled" or "triton".
        on_failure: "raise", "warn" or "ignore".

    Returns:
        The new modules by their names in the model.

    Raises:
        ValueError: a model without `Attention`, or with one whose settings have no equilibrium; nothing is replaced.
    """
    new: dict[str, EquilibriumAttend] = {}
    owners = [(name, module) for name, module in model.named_modules() if isinstance(module, Attention)]
    kind = type(model).__name__
    _validate.require(bool(owners), "model", "hold an Attention of x-transformers", f"{kind} without one")
    for name, module in model.named_modules():
        if isinstance(module, AttentionLayers):
            _refuse_residual_attention(name or kind, module)
    for prefix, owner in owners:
        name, attend = f"{prefix}.attend".lstrip("."), owner.attend
        if not isinstance(attend, EquilibriumAttend):
            _refuse_settings(name, attend)
        weight = owner.to_q.weight
        sink = attend.head_attn_sink
        new[name] = EquilibriumAttend(
            owner.heads,
            **{setting: getattr(attend, setting) for setting in _CARRIED},
            head_learned_sink=sink is not None,
            anchor=anchor,
            max_steps=max_steps,
            solver=solver,
            adjoint=adjoint,
            impl=impl,
            on_failure=on_failure,
            device=weight.device,
            dtype=weight.dtype,
        ).train(attend.training)
        new[name].head_attn_sink = sink
    for (_, owner), module in zip(owners, new.values(), strict=True):
        owner.attend = module
    return new


# What is refused.


def _refuse_settings(name: str, attend: Any) -> None:
    remedy = "build the model without it"
    _validate.require(type(attend) is Attend, name, "be x-transformers' own Attend", type(attend).__name__)
    for setting, (plain, reason) in _REFUSED.items():
        value = getattr(attend, setting, plain)
        received = f"{setting}={value if isinstance(value, bool) else type(value).__name__}"
        _validate.require(value is plain, name, f"have {setting}={plain} ({reason})", received, remedy)
    function = attend.attn_fn
    softmax = isinstance(function, partial) and function.func is F.softmax and function.keywords.get("dim") == -1
    received = getattr(getattr(function, "func", function), "__name__", repr(function))
    required = "weigh by the softmax over keys, whose equilibrium is known"
    _validate.require(softmax, name, required, received, remedy)
    # A later release may know more: what is not known here must be left as it comes.
    known = {*_CARRIED, *_REFUSED, *_ACCOUNTED}
    for setting, parameter in inspect.signature(Attend.__init__).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and setting not in known:
            value = getattr(attend, setting, parameter.default)
            received = f"{setting}={value!r}"
            required = f"have {setting}={parameter.default!r}, which is not known here"
            _validate.require(value is parameter.default or value == parameter.default, name, required, received)


def _refuse_residual_attention(name: str, layers: Any) -> None:
    for setting in ("residual_attn", "cross_residual_attn"):
        reason = "the scores of the layer before are not kept"
        _validate.require(not getattr(layers, setting, False), name, f"have {setting}=False ({reason})", True)


def _refuse_arguments(**given: Any) -> None:
    reasons = {
        "prev_attn": "scores of the layer before are not kept",
        "attn_delta": "weights that are changed behind the softmax belong to no energy",
        "flash_pack_seq_kwargs": "packed sequences would attend to each other",
    }
    for name, value in given.items():
        _validate.require(value is None, name, f"be None: {reasons[name]}", type(value).__name__)


# Which query attends to which key.


def _pairs(mask: Tensor | None, causal: bool, shape: tuple[int, int, int, int], device: torch.device) -> Tensor | None:
    """One boolean mask, or None, broadcasting to (B, H, N, M)."""
    batch, _, rows, count = shape
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            received = getattr(mask, "dtype", type(mask).__name__)
            raise TypeError(_validate.message("mask", "be a boolean tensor (True = attend)", received))
        if mask.ndim == 2:
            _validate.require(mask.shape == (batch, count), "mask", f"be (B, M) = {(batch, count)}", tuple(mask.shape))
            mask = mask[:, None, None, :]
        _validate.check_broadcast("mask", mask.shape, shape, "(B, H, N, M)")
    if causal:
        remedy = "pass causal=False to attend to a context"
        _validate.require(count >= rows, "k", f"hold the {rows} queries' own keys if causal", f"{count} keys", remedy)
        before = torch.ones(rows, count, dtype=torch.bool, device=device).tril(count - rows)
        mask = before if mask is None else mask & before
    return mask


# Tiled heads.


def _tiled(tensor: Tensor | None, tiles: tuple[int, int], axis: int) -> Any:
    """The axis of heads as (H / Hkv, Hkv); one of size 1 as (1, 1); none stays none."""
    if tensor is None or tensor.ndim < -axis:
        return tensor
    return tensor.unflatten(axis, (1, 1) if tensor.shape[axis] == 1 else tiles)  # type: ignore[no-untyped-call]


def _untiled(evidence: SolveReport | Measured | None) -> SolveReport | Measured | None:
    """With one axis of heads again."""
    if evidence is None:
        return None
    if isinstance(evidence, Measured):
        return Measured(*(t.flatten(1, 2) for t in evidence))
    found = {name: getattr(evidence, name).flatten(1, 2) for name in Measured._fields}
    evidence.adjoint.lead = found["status"].shape
    return dataclasses.replace(evidence, **found)

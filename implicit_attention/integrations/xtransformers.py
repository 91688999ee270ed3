"""Equilibrium attention inside x-transformers, in the place of `Attention.attend`."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import _validate
from .._torch import at_least_single
from ..layers.projections import Scalar
from ..options import SolveKeywords
from ._base import HostAttention, capped, check_shape, joined_masks, with_zero_key
from ._hosts import library_of

with library_of("xtransformers"):
    from x_transformers.attend import Attend, Intermediates
    from x_transformers.x_transformers import Attention, AttentionLayers

# Settings of `Attend` that are carried over, under its names; those of it, and of the layers around it, that are not.
_CARRIED = ("scale", "causal", "dropout", "l2_distance", "add_zero_kv", "softclamp_logits", "logit_softclamp_value")
_TALKING = ("pre_softmax_talking_heads", "post_softmax_talking_heads", "pre_scale_post_talking_heads")
_REFUSED = {
    **dict.fromkeys(_TALKING, "talking heads mix scores or weights of heads, which then solve no problem each"),
    "selective": "selective attention couples the queries",
    "cog_signed": "signed weights are no softmax",
    "cope": "contextual positions make a score depend on all other scores",
    "inverted_attention": "inverted attention couples the queries",
    "flash_pack_seq": "packed sequences are not carried; use one sequence per batch entry with a mask",
}
_REFUSED_ARGUMENTS = {
    "prev_attn": "scores of the layer before are not kept",
    "attn_delta": "weights that are changed behind the softmax belong to no energy",
    "flash_pack_seq_kwargs": "packed sequences would attend to each other",
}
_REFUSED_BESIDE = dict.fromkeys(("residual_attn", "cross_residual_attn"), "the scores of the layer before are not kept")
# Arguments of Attend's constructor that the above accounts for under another name, or that change no result.
_ACCOUNTED = {
    *("heads", "head_learned_sink", "pre_talking_heads", "post_talking_heads", "qk_norm", "flash", "sdp_kwargs"),
    *("sparse_topk", "sparse_topk_straight_through", "sigmoid", "hard", "custom_attn_fn", "onnxable"),
    *("gumbel_softmax", "gumbel_softmax_temp", "gumbel_softmax_hard"),
}


class EquilibriumAttend(HostAttention):
    """The `Attend` of x-transformers whose queries first settle into the equilibrium of their energy over the keys.

    z = anchor q + (1 - anchor) softmax(scale z K^T + bias) K, solved for every query on its own, then
    softmax(scale z K^T + bias) V is read. With `max_steps=0` it is `Attend`.

    Arguments up to `logit_softclamp_value` mean what they mean in `Attend`. There are no talking heads, no selective,
    inverted, signed or packed attention, no contextual positions, and no other function than the softmax.

    Args:
        heads: the number of heads of the queries.
        scale: inverse temperature, default 1/sqrt(D).
        causal: whether a query attends to keys up to its own index only, both counted from the end.
        dropout: share of the attention weights that are dropped in the read-out while training.
        l2_distance: whether scores are -scale |z - k|^2. Plain steps are then those of mean shift.
        add_zero_kv: whether there is one more key and value, which are zeros.
        head_learned_sink: whether there is one more key and value, which are zeros, with a learned score per head,
            `head_attn_sink`.
        softclamp_logits: whether scores s are capped to cap tanh(s / cap). The solve is then that of
            `SoftcapLogSumExp`, in whose map a key near the cap weighs less; the read-out is capped attention.
        logit_softclamp_value: the cap.
        anchor: "learned" (per head, from 0.5) or a number in [0, 1]. With 0 the solve gives queries no gradient.
        device: of the parameters.
        dtype: of the parameters.
        **options: solver, adjoint, impl, max_steps and on_failure, as in `SolveOptions`.

    Attributes:
        last_solve: the `SolveReport` of the last call, (B, heads, N), detached.

    Raises:
        TypeError, ValueError: arguments that do not fit, with the remedy.

    Gradients: with respect to q, k, v, attn_bias and parameters, to any order.

    Reference: `Attend` of x-transformers (Wang, 2020) for arguments and the order of operations.

    Examples:
        >>> import torch
        >>> from implicit_attention.integrations.xtransformers import EquilibriumAttend
        >>> attend = EquilibriumAttend(heads=4, causal=True, anchor=0.5)
        >>> q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)  # two heads of keys for four of queries
        >>> output, _ = attend(q, k, k)
        >>> output.shape
        torch.Size([2, 4, 6, 8])

    Not for use outside `Attention` of x-transformers, where `equilibrium_attention` does the same.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[SolveKeywords],
    ) -> None:
        super().__init__()
        _validate.check_integer("heads", heads, low=1)
        if scale is not None:
            _validate.check_number("scale", scale, low=0.0, open_low=True)
        _validate.check_number("dropout", dropout, low=0.0, high=1.0)
        _validate.check_number("logit_softclamp_value", logit_softclamp_value, low=0.0, open_low=True)
        required = "be False with l2_distance=True: capped distances have no energy here"
        _validate.require(not (softclamp_logits and l2_distance), "softclamp_logits", required, True)
        self.heads, self.scale, self.causal, self.dropout = heads, scale, causal, dropout
        self.l2_distance, self.add_zero_kv = l2_distance, add_zero_kv
        self.softclamp_logits, self.logit_softclamp_value = softclamp_logits, logit_softclamp_value
        placement: dict[str, Any] = {"device": device, "dtype": dtype}
        self.head_attn_sink = nn.Parameter(torch.zeros(heads, **placement)) if head_learned_sink else None
        self._set_up(heads, anchor, options, **placement)

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
            prev_attn: must be None, as scores of the layer before are not kept.
            attn_delta: must be None, as weights that are changed after the softmax belong to no energy.
            row_mask: which queries exist, (B, N). It changes nothing, as queries do not see each other.
            flash_pack_seq_kwargs: must be None.
            causal: replaces the module's `causal` for this call.

        Returns:
            (B, H, N, E), and empty `Intermediates`, as with flash=True. A query without a key to attend to gives zeros,
            as with flash=True, also where only mask and causality together leave it no key.
        """
        refused = (prev_attn, attn_delta, flash_pack_seq_kwargs)
        for (name, reason), value in zip(_REFUSED_ARGUMENTS.items(), refused, strict=True):
            _validate.require(value is None, name, f"be None: {reason}", type(value).__name__)
        self._check_call(q, k, v, attn_bias)
        shape = (*q.shape[:-1], k.shape[-2])
        mask = _four_axes(mask, shape)
        if attn_bias is not None:
            _validate.check_broadcast("attn_bias", attn_bias.shape, shape, "(B, H, N, M)")
        first = None
        if self.causal if causal is None else causal:
            rows, count = shape[2:]
            received, remedy = f"{count} keys", "pass causal=False to attend to a context"
            _validate.require(count >= rows, "k", f"hold the {rows} queries' own keys if causal", received, remedy)
            first = count - rows
        mask, bias = joined_masks({"mask": mask, "attn_bias": attn_bias}, q)
        beta = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        if self.l2_distance:
            # -beta |z - k|^2 is 2 beta <z, k> - beta |k|^2, up to a term that all keys share.
            distant = -beta * at_least_single(k).square().sum(-1)[..., None, :]
            distant = distant.repeat(1, self.heads // k.shape[1], 1, 1)
            bias, beta = distant if bias is None else bias + distant, 2 * beta
        if self.add_zero_kv:
            k, v, mask, bias = with_zero_key(k, v, mask, bias, None)
        if self.head_attn_sink is not None:
            k, v, mask, bias = with_zero_key(k, v, mask, bias, self.head_attn_sink)
        if first is not None:
            # Added keys lie before those of the tokens.
            first += k.shape[2] - shape[3]
        others: dict[str, Any] = {"first": first, "grouped": "tiled"}
        others["potential"] = capped(self.logit_softclamp_value if self.softclamp_logits else None)
        return self._attend(q, k, v, beta, (mask, bias), self.dropout, **others).output, Intermediates()

    def _check_call(self, q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None) -> None:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            _validate.check_float_tensor(name, tensor)
            check_shape(tensor.ndim == 4, name, tensor, "have the axes (B, heads, N, D)")
        check_shape(q.shape[1] == self.heads, "q", q, f"have {self.heads} heads on its second axis")
        fits = k.shape[1] > 0 and self.heads % k.shape[1] == 0
        check_shape(fits, "k", k, f"have a number of heads that divides the {self.heads} of `q`")
        required = f"have the {k.shape[1]} heads and {k.shape[2]} rows of `k`"
        check_shape(v.shape[1:3] == k.shape[1:3], "v", v, required)
        fits, remedy = attn_bias is None or not self.softclamp_logits, "use rotary positions, or no softclamp_logits"
        required = "be None with softclamp_logits=True, where it would be capped with the scores"
        _validate.require(fits, "attn_bias", required, "a tensor", remedy)

    def extra_repr(self) -> str:
        settings = {name: getattr(self, name) for name in _CARRIED}
        cap = settings.pop("logit_softclamp_value")
        return self._shown(heads=self.heads, **settings, logit_softclamp_value=cap if self.softclamp_logits else None)


def replace_attend(
    model: nn.Module, *, anchor: Scalar = "learned", **options: Unpack[SolveKeywords]
) -> dict[str, EquilibriumAttend]:
    """Put an `EquilibriumAttend` into every `Attention` of a model of x-transformers, with that attention's settings.

    The model changes in place. Its parameters stay, and with `max_steps=0` it computes what it did. As with flash=True
    there are no attention maps any more (`return_attn`, z-loss). Call it again to change the options.

    Args:
        model: a TransformerWrapper, AutoregressiveWrapper, Encoder, Decoder, CrossAttender, ViTransformerWrapper, ...
        anchor: "learned" (per head, from 0.5; new parameters `attend.anchor.logit`) or a number in [0, 1].
        **options: solver, adjoint, impl, max_steps and on_failure, as in `SolveOptions`.

    Returns:
        The new modules by their names in the model.

    Raises:
        ValueError: a model without `Attention`, or with one whose settings have no equilibrium; nothing is replaced.

    Examples:
        >>> import torch
        >>> from x_transformers import Decoder, TransformerWrapper
        >>> from implicit_attention.integrations.xtransformers import replace_attend
        >>> layers = Decoder(dim=16, depth=1, heads=2, attn_dim_head=8)
        >>> model = TransformerWrapper(num_tokens=10, max_seq_len=8, attn_layers=layers)
        >>> list(replace_attend(model, anchor=0.9))
        ['attn_layers.layers.0.1.attend']
        >>> model(torch.randint(10, (2, 5))).shape
        torch.Size([2, 5, 10])

    Not for models whose attention is not one softmax per head (talking heads, sigmoid, top-k): they are refused.
    """
    new: dict[str, EquilibriumAttend] = {}
    owners = [(name, module) for name, module in model.named_modules() if isinstance(module, Attention)]
    kind = type(model).__name__
    _validate.require(bool(owners), "model", "hold an Attention of x-transformers", f"{kind} without one")
    for name, module in model.named_modules():
        if isinstance(module, AttentionLayers):
            _refuse(name or kind, module, _REFUSED_BESIDE)
    for prefix, owner in owners:
        name, attend = f"{prefix}.attend".lstrip("."), owner.attend
        if not isinstance(attend, EquilibriumAttend):
            _refuse_settings(name, attend)
        settings: dict[str, Any] = {setting: getattr(attend, setting) for setting in _CARRIED}
        settings |= {"device": owner.to_q.weight.device, "dtype": owner.to_q.weight.dtype}
        new[name] = EquilibriumAttend(owner.heads, **settings, anchor=anchor, **options).train(attend.training)
        new[name].head_attn_sink = attend.head_attn_sink
    for (_, owner), module in zip(owners, new.values(), strict=True):
        owner.attend = module
    return new


# What is refused.


def _refuse_settings(name: str, attend: Any) -> None:
    remedy = "build the model without it"
    _validate.require(type(attend) is Attend, name, "be x-transformers' own Attend", type(attend).__name__)
    _refuse(name, attend, _REFUSED)
    function = attend.attn_fn
    softmax = isinstance(function, partial) and function.func is F.softmax and function.keywords.get("dim") == -1
    received = getattr(getattr(function, "func", function), "__name__", repr(function))
    required = "weigh by the softmax over keys, whose equilibrium is known"
    _validate.require(softmax, name, required, received, remedy)
    # A later release may have more settings, which must keep their defaults.
    known = {*_CARRIED, *_REFUSED, *_ACCOUNTED}
    for setting, parameter in inspect.signature(Attend.__init__).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and setting not in known:
            value = getattr(attend, setting, parameter.default)
            received = f"{setting}={value!r}"
            required = f"have {setting}={parameter.default!r}, which is not known here"
            _validate.require(value is parameter.default or value == parameter.default, name, required, received)


def _refuse(name: str, module: Any, reasons: dict[str, str]) -> None:
    for setting, reason in reasons.items():
        value = getattr(module, setting, None)
        received = f"{setting}={value if isinstance(value, bool) else type(value).__name__}"
        plain = value is None or value is False
        _validate.require(plain, name, f"be without {setting}: {reason}", received, "build the model without it")


def _four_axes(mask: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """A boolean mask that broadcasts to (B, H, N, M)."""
    if mask is None:
        return None
    _validate.check_boolean("mask", mask, "be a boolean tensor (True = attend)")
    if mask.ndim == 2:
        keys = shape[0], shape[3]
        _validate.require(mask.shape == keys, "mask", f"be (B, M) = {keys}", tuple(mask.shape))
        mask = mask[:, None, None, :]
    _validate.check_broadcast("mask", mask.shape, shape, "(B, H, N, M)")
    return mask

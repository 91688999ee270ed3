"""The attention function that models of transformers call."""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers.loss import loss_utils
from transformers.utils import output_capturing

from ... import _validate
from ..._torch import at_least_single, host_may_look_at_constant, is_exporting
from ...attention.function import PotentialFactory, attend, made_by
from ...attention.masks import mask_and_bias
from ...energies import AnchoredEnergy
from ...failure import FailureSite, outside
from ...kernels.problem import Attention
from ...layers.remembering import is_repetition
from ...solution import Record, SolveReport
from .._base import capped, check_shape, with_zero_key
from .anchors import anchor_of_call
from .saved import settings_of
from .settings import OPTIONS, SAYS_CAUSAL, Given, Settings

#: Where an attention module keeps its `Last`.
LAST = "_equilibrium_last"

#: Where it keeps its `FailureSite`.
SITE = "_equilibrium_site"

#: An attention module with this attribute measures the distance of its answer from softmax attention on its inputs.
COMPARE = "_equilibrium_compare"

# The number of queries of the first sample whose states are kept for the report.
SAMPLE = 64

# Arguments of models that change nothing about attention, or nothing that the mask does not say.
_HARMLESS = {
    *("cache_position", "past_key_values", "position_embeddings", "position_ids", "sliding_window", "token_type_ids"),
    *("output_hidden_states", "output_router_logits", "return_dict", "use_cache", "logits_to_keep"),
    "deterministic",
}
# Models hand the options of their losses to attention, too: those of the losses that several kinds of models share.
_LOSSES: list[Any] = [loss for loss in loss_utils.LOSS_MAPPING.values() if loss.__module__ == loss_utils.__name__]
_HARMLESS |= {
    option.name
    for loss in [*_LOSSES, loss_utils.fixed_cross_entropy]
    for option in inspect.signature(loss).parameters.values()
    if option.default is not option.empty
}

_APART = "pass position_ids that restart, without a mask and with use_cache=False"
_PACKED = f"a packed batch would attend across its sequences; {_APART}"
_MIXED = f"`position_ids` restart, but documents of a row attend to each other; {_APART}, or a mask (B, 1, N, N)"
# Arguments that change the attention, with the reason why they are refused.
_REFUSED = {
    "cache": "paged caches (continuous batching) hold keys that this function is not given; use generate()",
    "block_table": "paged caches hold keys that this function is not given; use a dynamic or a static cache",
    **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"), _PACKED),
    "head_mask": "heads cannot be masked; prune them",
    "indices": "sparse attention over chosen keys has no equilibrium here; use another attention for this model",
    "sinks": "sinks of every query are not known here, only one for each head (s_aux)",
    "block_indices": "sparse attention over chosen blocks has no equilibrium here; use another attention",
}


class Sample(NamedTuple):
    """Some states of the first sample, and their keys, for diagnostics."""

    make: PotentialFactory
    state: Tensor
    keys: Tensor
    beta: float | Tensor
    mask: Tensor | None
    bias: Tensor | None

    def problem(self, anchor: float | Tensor) -> AnchoredEnergy:
        """An energy with the Jacobian of the map that was solved, which does not depend on the queries."""
        keys = at_least_single(self.keys)
        keys = keys.repeat_interleave(self.state.shape[1] // keys.shape[1], dim=1)
        potential = made_by(self.make, keys, self.beta, mask=self.mask, bias=self.bias)
        if isinstance(anchor, Tensor):
            anchor = anchor.to(self.state)
        return AnchoredEnergy(potential, self.state, anchor, unbounded="ignore")


# Sites of modules that no `attach` gave one. A site on the module would make torch.compile compile its graph again.
_SITES: WeakKeyDictionary[nn.Module, FailureSite] = WeakKeyDictionary()


def site_of(module: nn.Module) -> FailureSite:
    """The site of an attention module, which it keeps from now on."""
    site: FailureSite | None = getattr(module, SITE, None)
    if site is None:
        site = _SITES.pop(module, None) or FailureSite()
        setattr(module, SITE, site)
    return site


def _site(module: nn.Module) -> FailureSite | None:
    site: FailureSite | None = getattr(module, SITE, None)
    return site if site is not None or torch.compiler.is_compiling() else _SITES.setdefault(module, FailureSite())


@dataclasses.dataclass(eq=False)
class Last:
    """The record of an attention module's last call; its copies and pickles are empty."""

    report: SolveReport | Record | None = None
    sample: Sample | None = None
    settings: Settings | None = None
    change: Tensor | None = None
    anchor: float | Tensor = math.nan
    site: FailureSite | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (Last, ())


class EquilibriumForward:
    """The attention function of a registered name."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self._seen: Any = lambda: None
        self._by: Any = self._seen

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.settings)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        output_attentions: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Equilibrium attention in the convention of transformers.

        Args:
            module: the attention module that asks.
            query: (B, H, N, D), turned by rotary positions if the model has them.
            key: (B, Hkv, M, D), Hkv dividing H; with a cache, all of its keys.
            value: (B, Hkv, M, E).
            attention_mask: boolean (True = attend) or additive, (B, 1 or H, N, M).
            scaling: the inverse temperature, default 1/sqrt(D).
            dropout: share of the weights that are dropped in the read-out; 0 in evaluation.
            is_causal: without a mask: whether the last query attends to all keys, the one before to all but the last,
                and each only to keys of its own document where `position_ids` restart; default `module.is_causal`.
            position_bias: added to the scores, (1 or B, H, N, M).
            softcap: scores s become softcap tanh(s / softcap).
            s_aux: (H,), scores of one more key, an attention sink, whose value is zero.
            output_attentions: whether to return the weights of the read-out, (B, H, N, M).
            **others: options for this call, and other arguments that models hand on.

        Returns:
            (B, N, H, E) and the weights or None.
        """
        # Settings of `attach` or `convert`, else those of the model's file, else those registered for the name.
        general = settings_of(module, self.name, self.settings)
        settings = general.of(module, _call_options(module, others, general))
        positions = others.get("position_ids")
        causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
        mask, bias, first = _mask_and_bias(module, query, key, attention_mask, causal, positions)
        if causal and bias is None and positions is not None:
            self._look(module, positions, query, key, mask)
        if position_bias is not None:
            bias = position_bias if bias is None else bias + position_bias
        if s_aux is not None:
            heads = query.shape[1]
            _validate.require(s_aux.numel() == heads, "s_aux", "have one logit for each head", tuple(s_aux.shape))
            key, value, mask, bias = with_zero_key(key, value, mask, bias, s_aux)
            first = None if first is None else first + 1
        site, beta = _site(module), query.shape[-1] ** -0.5 if scaling is None else scaling
        anchor = anchor_of_call(module, settings.anchor, others, query)
        make, weights_wanted = capped(softcap), _weights_wanted(module, output_attentions)
        call = Attention(query, key, beta, anchor, mask, bias, first, value, dropout)
        given: dict[str, Any] = {"grouped": True, "potential": make, "site": site}
        attended = attend(call, settings.options, return_weights=weights_wanted, **given)
        output, weights = attended.output.transpose(1, 2).contiguous(), attended.weights
        if weights is not None:
            weights = (weights if s_aux is None else weights[..., 1:]).to(query.dtype)
        if attended.report is not None and site is not None and site.tally is not None:
            site.tally.add(attended.report)
        if is_exporting():
            # Nothing of a program is remembered: its tensors have shapes alone, which may be open.
            return output, weights
        change = None
        if getattr(module, COMPARE, False):
            with torch.no_grad():
                options = settings.options.override(max_steps=0)
                explicit = attend(call._replace(dropout=0.0), options, **given).output
                change = torch.linalg.vector_norm(attended.output - explicit) / torch.linalg.vector_norm(explicit)
        sample = _sample(call, make, attended.state)
        # A graph that looked at the tensors of the last call would be compiled again for each of their shapes.
        if torch.compiler.is_compiling() or not is_repetition(getattr(module, LAST, Last()).report):
            anchor = anchor.detach() if isinstance(anchor, Tensor) else anchor
            setattr(module, LAST, Last(attended.report, sample, settings, change, anchor, site))
        return output, weights

    def _look(self, module: nn.Module, positions: Tensor, query: Tensor, key: Tensor, mask: Tensor | None) -> None:
        """Warn where causal attention reads documents before a token's own; the first layer of a forward looks."""
        if not host_may_look_at_constant(positions, query) or (self._seen() is positions and self._by() is not module):
            return
        self._seen, self._by, rows = ref(positions), ref(module), query.shape[-2]
        if positions.ndim == 2 and positions.shape[-1] == rows == key.shape[-2] and bool((positions.diff() < 0).any()):
            mask = torch.ones(1, 1, dtype=torch.bool) if mask is None else mask
            # Padding, at whose end positions restart, too, does not attend to itself.
            read = mask & mask.diagonal(dim1=-2, dim2=-1)[..., None] & ~_same_document(positions, rows)
            if bool(read.any()):
                warnings.warn(_MIXED, stacklevel=outside())


def _call_options(module: nn.Module, others: dict[str, Any], settings: Settings) -> Given:
    """Options for this call among the arguments; other arguments that might change attention are refused."""
    options = {}
    for name, argument in others.items():
        if name in OPTIONS:
            options[name] = argument
        elif argument is not None and name not in _HARMLESS and name not in settings.ignore:
            who = type(module).__name__
            if name in _REFUSED:
                raise ValueError(f"`{name}` must be None for equilibrium attention in {who}: {_REFUSED[name]}")
            raise ValueError(
                f"`{name}` is neither an option of equilibrium attention ({', '.join(OPTIONS)}) nor known not to "
                f"change the attention of {who}; if it does not, register with ignore=({name!r},)"
            )
    return options


def _mask_and_bias(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, positions: Tensor | None
) -> tuple[Tensor | None, Tensor | None, int | None]:
    """(mask, bias), each None or broadcasting to (B, H, N, M), and which key the first query is, if causal."""
    rows, count = query.shape[-2], key.shape[-2]
    if mask is not None and mask.ndim != 4:
        check_shape(False, "attention_mask", mask, "have four axes (B, 1 or H, N, M) here")
    causal = causal and mask is None and rows != 1
    mask, bias = mask_and_bias(mask, shape=(*query.shape[:-1], count), like=query, name="attention_mask")
    # Where transformers leave causality to the module, they have looked for several documents.
    looked = getattr(getattr(module, "config", None), SAYS_CAUSAL, False)
    if causal and not looked and positions is not None and positions.ndim == 2 and positions.shape[-1] == rows:
        mask = _same_document(positions.to(query.device), count)
    return mask, bias, count - rows if causal else None


def _same_document(position_ids: Tensor, count: int) -> Tensor:
    """(N, M) or (B, 1, N, M), True where query and key belong to one document: each document's positions start anew.

    Keys of a cache, which come first, belong to the first query's document.
    """
    step = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1)
    queries = (step != 1).cumsum(-1)
    keys = nn.functional.pad(queries, (count - queries.shape[-1], 0))
    same = queries[:, None, :, None] == keys[:, None, None, :]
    return same[0, 0] if len(same) == 1 else same


def _weights_wanted(module: nn.Module, output_attentions: bool | None) -> bool:
    if output_attentions is None:
        output_attentions = getattr(getattr(module, "config", None), "output_attentions", False)
    if output_attentions:
        return True
    # Some models keep the flag to themselves and collect the weights that their attention modules return.
    collector: Any = output_capturing._active_collector
    if torch.compiler.is_compiling() and not collector.compiling:
        return False
    collected = collector.get()
    return collected is not None and ("attentions" in collected or "cross_attentions" in collected)


def _sample(call: Attention, make: PotentialFactory, state: Tensor) -> Sample:
    """Evenly spaced states of the first sequence, with keys and masks. All are copies, as caches change and go."""
    count, keys = state.shape[-2], call.keys
    step = -(-count // SAMPLE) if count else 1

    def rows(pairs: Tensor | None) -> Tensor | None:
        if pairs is None:
            return None
        pairs = pairs.detach()[:1] if pairs.ndim == 4 else pairs.detach()
        return (pairs if pairs.shape[-2] == 1 else pairs[..., ::step, :]).clone()

    mask = rows(call.mask)
    if call.first is not None:
        places = torch.arange(call.first, call.first + count, step, device=keys.device)
        lower = places[:, None] >= torch.arange(keys.shape[-2], device=keys.device)
        mask = lower if mask is None else mask & lower
    states, keys = state.detach()[:1, :, ::step].clone(), keys.detach()[:1].clone()
    return Sample(make, states, keys, call.beta, mask, rows(call.bias))

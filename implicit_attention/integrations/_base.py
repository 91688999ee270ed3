"""The base of modules that replace a host's attention: an anchor, options of a solve, masks, an added key."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _validate
from .._torch import state_dtype
from ..attention.function import Attended, PotentialFactory, attend
from ..attention.masks import split_mask
from ..kernels.problem import Attention
from ..layers.projections import LearnedAnchor, Scalar, anchor_or_beta
from ..layers.remembering import Remembering
from ..options import SolveKeywords, SolveOptions
from ..potentials import LogSumExp
from ..potentials.softcap import SoftcapLogSumExp

#: (mask, bias), each None or broadcasting to (B, H, N, M): True means attend, and the bias is added to the scores.
Masks: TypeAlias = tuple[Tensor | None, Tensor | None]


class HostAttention(Remembering):
    """Base of a module that stands where a host's attention stood, with the host's parameters and arguments."""

    anchor: nn.Module

    def _set_up(self, heads: int, anchor: Scalar, options: SolveKeywords, **placement: Any) -> None:
        self.anchor = anchor_or_beta("anchor", anchor, LearnedAnchor((heads,), **placement))
        self.options = SolveOptions().override(**options)

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        beta: Any,
        masks: Masks,
        dropout: float,
        first: int | None = None,
        **others: Any,
    ) -> Attended:
        """`attend` with the anchor and options of this module, which remembers the solve; weights drop in training."""
        dropped = dropout if self.training else 0.0
        call = Attention(query, keys, beta, self.anchor(), *masks, first, values, dropped)
        attended = attend(call, self.options, site=self._site, **others)
        self._remember(attended.report)
        return attended

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        own = {prefix + name: p for name, p in self.named_parameters() if name.startswith(("anchor.", "beta."))}
        if not own.keys() & state_dict.keys():
            # A state dict of the host's attention, without anchor and beta: ours stay, or start where they lie on meta.
            device = next((t.device for t in state_dict.values() if isinstance(t, Tensor)), "cpu")
            state_dict |= {name: torch.zeros_like(p, device=device) if p.is_meta else p for name, p in own.items()}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _shown(self, **settings: Any) -> str:
        """Settings that are not None, False or 0, and the options of the solve that were passed, for `extra_repr`."""
        options = {name: getattr(self.options, name) for name in ("solver", "adjoint", "max_steps")}
        shown = [item for item in settings.items() if item[1]]
        shown += [item for item in options.items() if item[1] is not None]
        return ", ".join(f"{name}={value}" for name, value in shown)


def check_shape(fits: bool, argument: str, tensor: Tensor, requirement: str, remedy: str = "") -> None:
    """Raise ValueError with the shape of the tensor unless it fits."""
    if not fits:  # The shape is written out in errors alone: torch.compile would fix sizes that it keeps open.
        raise ValueError(_validate.message(argument, requirement, f"shape {tuple(tensor.shape)}", remedy))


def capped(cap: float | None) -> PotentialFactory:
    """The potential of softmax attention, with scores s capped to cap tanh(s / cap) if there is a cap."""
    return LogSumExp if cap is None else partial(SoftcapLogSumExp, cap=cap)


def joined_masks(masks: Mapping[str, Tensor | None], like: Tensor) -> Masks:
    """The pairs that all boolean masks allow, and the sum of the additive ones, for masks by their arguments' names."""
    pairs = bias = None
    for name, argument in masks.items():
        mask, added = split_mask(name, argument, like)
        if mask is not None:
            pairs = mask if pairs is None else pairs & mask
        if added is not None:
            bias = added if bias is None else bias + added
    return pairs, bias


def with_zero_key(
    k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, score: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys and values with zeros in front, to which all queries attend: the weight of that key reads nothing.

    Args:
        k: (B, H, M, D), or with fewer heads.
        v: (B, H, M, E), or with fewer heads.
        mask: True where a query attends to a key, or None; broadcasts to (B, H, N, M).
        bias: added to the scores, or None; broadcasts to (B, H, N, M).
        score: of the new key, one for each head, (H,): an attention sink. None is 0, the score of a key of zeros.

    Returns:
        All four with M + 1 keys; a score makes a bias where there was none.
    """
    count = k.shape[-2]
    k, v = (F.pad(t, (0, 0, 1, 0)) for t in (k, v))
    if mask is not None:
        mask = F.pad(mask.expand(*mask.shape[:-1], count), (1, 0), value=True)
    if score is not None:
        score = score.reshape(-1, 1, 1).to(state_dtype(k.dtype))
        others = k.new_zeros(1, count, dtype=score.dtype) if bias is None else bias.to(score.dtype)
        lead = torch.broadcast_shapes(others.shape[:-1], score.shape[:-1])  # type: ignore[no-untyped-call]
        bias = torch.cat([score.expand(*lead, 1), others.expand(*lead, count)], dim=-1)
    elif bias is not None:
        bias = F.pad(bias.expand(*bias.shape[:-1], count), (1, 0))
    return k, v, mask, bias

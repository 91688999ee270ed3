"""Learned anchors of attention modules: their making, their values in a call, their reading from a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from transformers import PreTrainedModel

from ... import _validate
from ...layers.projections import LearnedAnchor, logit_of
from ...layers.sharding import HeadShard
from .reach import reach
from .saved import entry
from .settings import ANCHORS, LEARNED, OVERRIDES, Given

Per: TypeAlias = Literal["head", "layer"]

#: The part of an attention module that is its learned anchor.
PART = "anchor"

# Where attention modules, and then their configurations, say how many heads they have.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")


def anchor_of_call(module: nn.Module, anchor: float | Tensor, call: Given, query: Tensor) -> float | Tensor:
    """The anchor of a call: the learned one, unless the call or an `override` replaces it, for the heads of `query`.

    Args:
        module: the attention module.
        anchor: of the settings of this call.
        call: the arguments of this call by name.
        query: (B, heads that the module sees, N, D).
    """
    learned: nn.Module | None = getattr(module, PART, None)
    replaced = any(options.get(PART) is not None for options in (call, getattr(module, OVERRIDES, None) or {}))
    anchor = anchor if learned is None or replaced else learned()
    return _of_heads(anchor.to(query.device), module, query.shape[1]) if isinstance(anchor, Tensor) else anchor


def _of_heads(anchor: Tensor, module: nn.Module, heads: int) -> Tensor:
    """Return the anchors of a module's own heads where tensor parallelism splits them."""
    shared = anchor.ndim == 0 or len(anchor) == 1
    if (shared and not anchor.requires_grad) or (not shared and len(anchor) == heads):
        return anchor
    mesh = _mesh(module)
    if shared and mesh is None:
        return anchor
    if mesh is None or (not shared and heads * mesh.size() != len(anchor)):
        required = f"be one number, or one for each of the {heads} heads that {type(module).__name__} has here"
        raise ValueError(_validate.message("anchor", required, f"{len(anchor)} numbers"))
    shard = HeadShard(mesh, mesh.get_local_rank(), mesh.size())
    # The gradient of an anchor that all heads share is the sum over processes.
    return shard.shared(anchor) if shared else shard.own(anchor)


def _mesh(module: nn.Module) -> Any:
    """The processes over which the heads of an attention module are spread, or None."""
    for parameter in module.parameters():
        if _validate.is_distributed(parameter):
            placed: Any = parameter
            if placed.device_mesh.ndim == 1 and placed.placements[0].is_shard():
                return placed.device_mesh
    return None


def has_learned(model: nn.Module) -> bool:
    """Whether any attention module of a model has a learned anchor."""
    return any(getattr(model.get_submodule(key), PART, None) is not None for key in reach(model).asks)


def learned_per(model: PreTrainedModel, name: str) -> str | None:
    """ "head" or "layer" for a model with learned anchors, else None, also where its configuration was another's."""
    per: str | None = entry(model.config, LEARNED, name) if has_learned(model) else None
    return per


def check_none_learned(model: nn.Module) -> None:
    """Refuse a model whose learned anchors would replace the fixed ones that it is to get."""
    if isinstance(model, nn.Module) and has_learned(model):
        remedy = "give it options before learn_anchors; to fix its anchors where they are, use requires_grad_(False)"
        raise ValueError(_validate.message("model", "have fixed anchors", "learned ones", remedy))


def put_anchors(model: nn.Module, names: Iterable[str], per: Per, logit: Tensor) -> dict[str, LearnedAnchor]:
    """Learned anchors that start at `logit`, in the attention modules of these names; those that have one keep it."""
    modules = {name: model.get_submodule(name) for name in names}
    # All are counted before any is changed.
    counts = {name: 1 if per == "layer" else _heads(name, module) for name, module in modules.items()}
    for count in counts.values():
        _validate.check_broadcast("initial", logit.shape, (count,), f"one for each {per}")
    for name, module in modules.items():
        if getattr(module, PART, None) is None:
            like = next((p for p in module.parameters() if p.is_floating_point()), None)
            placement: dict[str, Any] = {} if like is None else {"device": like.device, "dtype": like.dtype}
            # FSDP takes no parameters without an axis.
            module.add_module(PART, anchor := LearnedAnchor((counts[name],), **placement))
            anchor.logit.data.copy_(logit)
    return {name: getattr(module, PART) for name, module in modules.items()}


@contextmanager
def with_learned() -> Iterator[None]:
    """A context in which models get the learned anchors that their configuration names, to read them from a file.

    Transformers read a file into the parameters that a model has at the end of its construction.
    """
    original = PreTrainedModel.post_init

    def post_init(model: PreTrainedModel) -> None:
        for per in set((getattr(model.config, LEARNED, None) or {}).values()):
            put_anchors(model, reach(model).asks, per, logit_of("anchor", 0.5, ""))
        original(model)  # type: ignore[no-untyped-call]

    PreTrainedModel.post_init = post_init  # type: ignore[method-assign]
    try:
        yield
    finally:
        PreTrainedModel.post_init = original  # type: ignore[method-assign]


def check_read(config: Any, name: str, missing: Iterable[str]) -> None:
    """Raise unless a file has all learned anchors that its configuration names."""
    absent = sorted(key for key in missing if key.endswith(f"{PART}.logit"))
    if entry(config, LEARNED, name) is not None and absent:
        required = f"hold the learned anchors that its configuration names (config.{LEARNED})"
        received = f"a file without {', '.join(absent[:3])}{' and more' if len(absent) > 3 else ''}"
        remedy = f"save the model by save_pretrained, or delete that entry for the fixed ones of config.{ANCHORS}"
        raise ValueError(_validate.message("path", required, received, remedy))


def _heads(name: str, module: nn.Module) -> int:
    config = getattr(module, "config", None)
    for owner in (module, config):
        for attribute in _HEADS:
            try:
                count = getattr(owner, attribute, None)
            except RuntimeError:  # a configuration whose layers differ
                continue
            if isinstance(count, int) and not isinstance(count, bool):
                return count
    required = f"be 'layer' for {type(module).__name__} ({name}), which does not say how many heads it has"
    raise ValueError(_validate.message("per", required, "'head'"))

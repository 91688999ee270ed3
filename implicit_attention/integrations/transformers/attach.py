"""`attach`: equilibria in one model, with options of its own that are saved with it; `load` brings them back."""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ... import _validate
from ..._types import Impl, OnFailure
from ...adjoints import Adjoint
from ...solvers import Solver
from . import saved
from .reach import Reach, attention_names, listed, reach
from .registration import is_ours, register, registered, settings_from, takes_masks
from .settings import ANCHORS, SETTINGS, SOLVERS, Layers, Settings, check_fixed

_Model = TypeVar("_Model", bound=PreTrainedModel)
Partial: TypeAlias = Literal["refuse", "warn"]


def attach(
    model: _Model,
    *,
    partial: Partial = "refuse",
    name: str = "equilibrium",
    anchor: float | Tensor = 0.5,
    max_steps: int | None = None,
    solver: Solver | None = None,
    adjoint: Adjoint | None = None,
    impl: Impl = "auto",
    on_failure: OnFailure = "warn",
    layers: Layers | None = None,
    ignore: Iterable[str] = (),
) -> _Model:
    """The model itself, its softmax attention replaced by equilibrium attention; an error names what cannot be.

    The options belong to this model: neither another `attach` nor `register` changes them. Anchors and solver are
    written into its configuration, so that `save_pretrained` keeps them and `load` finds them.

    Args:
        model: a model of transformers. Its parameters stay as they are.
        partial: what to do if some attention does not ask transformers' attention interface, so that it stays what it
            is: "refuse" or "warn". Both name it. A model of which nothing asks is refused in any case.
        name: the name of the attention; registered if it is not.
        anchor: options from here on as in `register`. A tensor is fixed: it must not require a gradient.
        max_steps: see there.
        solver: see there; default `Anderson()`. It is part of the model: where attention has several equilibria,
            another solver may find another.
        adjoint: see there.
        impl: see there.
        on_failure: see there.
        layers: see there; indices that the model does not have are refused.
        ignore: see there.

    Returns:
        `model`.

    Raises:
        TypeError, ValueError: options that do not fit; a model that attends by itself, with its modules named.
    """
    settings = settings_from(anchor, max_steps, solver, adjoint, impl, on_failure, layers, ignore)
    _put(model, name, settings, partial)
    return model


def load(
    cls: Any,
    path: str | os.PathLike[str],
    *,
    partial: Partial = "refuse",
    name: str | None = None,
    solver: Solver | None = None,
    adjoint: Adjoint | None = None,
    impl: Impl = "auto",
    on_failure: OnFailure = "warn",
    ignore: Iterable[str] = (),
    **loading: Any,
) -> Any:
    """`cls.from_pretrained(path, **loading)` with the attention that `attach` or `convert` gave to the saved model.

    Name, anchors and solver come from its configuration: on the same machine the logits are the same, bit for bit.

    Args:
        cls: a class of models, or an auto class: `AutoModelForCausalLM`.
        path: what `from_pretrained` takes.
        partial: as in `attach`.
        name: which attention, if the configuration holds several.
        solver: instead of the saved one: for a class of your own, which a configuration can only name.
        adjoint: options from here on belong to a run, are not saved, and are those of `attach`.
        impl: see there.
        on_failure: see there.
        ignore: see there.
        **loading: what else `from_pretrained` takes.

    Raises:
        ValueError: a configuration without anchors, or without a solver that can be read.
    """
    # Without the name, which a class that chooses its attention modules by it would not know.
    model = cls.from_pretrained(path, **{**loading, "attn_implementation": None})
    known = saved.names(model.config)
    received = f"anchors for {', '.join(map(repr, known))}" if known else "none"
    remedy = (
        "say which by name=" if known else "save a model after attach or convert, or use from_pretrained and attach"
    )
    if name is None:
        _validate.require(len(known) == 1, "path", f"hold one model's anchors (config.{ANCHORS})", received, remedy)
        (name,) = known
    _validate.require(name in known, "name", f"be among those of config.{ANCHORS}", repr(name), f"there are {received}")
    solvers = getattr(model.config, SOLVERS, None) or {}
    if solver is None and name not in solvers:
        required, remedy = f"be given where the configuration has none (config.{SOLVERS})", "pass load(..., solver=...)"
        raise ValueError(_validate.message("solver", required, None, remedy))
    general = settings_from(0.5, None, None, adjoint, impl, on_failure, None, ignore)
    settings = saved.of_config(model.config, name, general, solver)
    _put(model, name, settings, partial)
    return model


def _put(model: PreTrainedModel, name: str, settings: Settings, partial: Partial) -> None:
    found = checked(model, partial, stacklevel=4)
    settings = resolved(settings, model, found)
    saved.written(settings)  # what cannot be saved is refused before anything is changed
    saved.keep(model, seated(model, name, found), name, settings)


def checked(model: Any, partial: Partial, stacklevel: int) -> Reach:
    """What of a model can be reached; it is refused, or warned of, with the names of what cannot."""
    _validate.check_choice("partial", partial, ("refuse", "warn"))
    _check_model(model)
    found = reach(model)
    message, usable = _unreached(model, found, partial)
    if message and (partial == "refuse" or not usable):
        raise ValueError(message)
    if message:
        warnings.warn(message, UserWarning, stacklevel=stacklevel)
    return found


def seated(model: PreTrainedModel, name: str, found: Reach) -> list[PreTrainedConfig]:
    """Give a model this attention; its configurations, which are its own from here on."""
    if not is_ours(name):
        register(name)
    configs = own_configs(model)
    before = [(config, config._attn_implementation) for config in configs]
    model.set_attn_implementation(name)
    deaf = {key: kind for key, kind in found.asks.items() if _asked(model.get_submodule(key)) not in (name, None)}
    if deaf:
        for config, attention in before:
            config._attn_implementation_internal = attention
        raise ValueError(
            f"{type(model).__name__}.set_attn_implementation does not reach all attention: {listed(deaf)}; attach to "
            "the parts that it reaches"
        )
    return configs


def settings_of(model: PreTrainedModel, name: str) -> Settings:
    """What holds for a model before it is told otherwise: its own, those of its file, those of the name."""
    held: dict[str, Settings] = getattr(model, SETTINGS, None) or {}
    if name in held:
        return held[name]
    return saved.of_config(model.config, name, registered(name) if is_ours(name) else Settings())


def resolved(settings: Settings, model: nn.Module, found: Reach) -> Settings:
    """Settings whose layers are those of the model, so that they can be saved and copied."""
    layers = settings.layers
    if layers is None:
        return settings
    indices = sorted(
        {i for key in found.asks if (i := getattr(model.get_submodule(key), "layer_idx", None)) is not None}
    )
    if callable(layers):
        layers = {index: layers(index) for index in indices}
        for given in layers.values():
            check_fixed(given.get("anchor"))
    unknown = [index for index in layers if index not in indices]
    required = f"hold indices of layers of {type(model).__name__} ({', '.join(map(str, indices)) or 'it has none'})"
    _validate.require(not unknown, "layers", required, unknown)
    return dataclasses.replace(settings, layers=dict(layers))


def own_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configurations of a model and its parts, made its own: other models may have been built from the same."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                # Parts of one configuration stay parts of its copy.
                setattr(module, attribute, copy.deepcopy(value, copies))
    configs = [value for value in copies.values() if isinstance(value, PreTrainedConfig)]
    return list({id(config): config for config in configs}.values())


def _check_model(model: Any) -> None:
    if isinstance(model, PreTrainedModel):
        return
    required, remedy = "be a PreTrainedModel of transformers", ""
    if isinstance(model, nn.Module):
        inside = next((key for key, part in model.named_modules() if isinstance(part, PreTrainedModel)), None)
        remedy = (
            "for models of torch.nn use integrations.multihead.replace_attention"
            if inside is None
            else f"it wraps one (adapters, engines): pass model.{inside}, and go on with the wrapper"
        )
    raise TypeError(_validate.message("model", required, type(model).__name__, remedy))


def _unreached(model: PreTrainedModel, found: Reach, partial: Partial) -> tuple[str, bool]:
    """What is to be said of attention that cannot be replaced, and whether the model can be used all the same."""
    who, own = type(model).__name__, listed(found.own)
    if not found.asks:
        own = own or listed(attention_names(model))
        reason = "does not take its attention from transformers' attention interface, so that it cannot be replaced"
        where = f"It attends by itself in {own}" if own else "It has no module that calls itself attention"
        return f"{who} {reason}; choose another architecture. {where}", False
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not all(takes_masks(part.config) for part in parts if part._can_set_attn_implementation()):
        reason = "and adds the masks of the rest to its scores, where they are misread; choose another architecture"
        return f"{who} computes some attention by itself, {reason}: {own}", False
    remedies = ['partial="warn" accepts that'] if partial == "refuse" else []
    if any(issubclass(kind, nn.MultiheadAttention) for kind in found.own.values()):
        remedies.append("integrations.multihead.replace_attention(model) replaces nn.MultiheadAttention")
    remedy = "".join(f"; {each}" for each in remedies)
    return (f"{who} computes some attention by itself, which stays what it is: {own}{remedy}" if own else ""), True


def _asked(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)

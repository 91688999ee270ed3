"""`register`: a name for equilibrium attention; `attach`: equilibria in one model; `load`: a saved one again."""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, TypeVar

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typing_extensions import Unpack

from ... import _validate
from ..._types import Impl, OnFailure
from ...adjoints import Adjoint
from ...options import SolveKeywords
from ...solvers import Solver
from .attention import EquilibriumForward
from .reach import Reach, attention_names, listed, reach, takes_masks
from .saved import held, keep, names, of_config, written
from .settings import ANCHORS, SOLVERS, Layers, Settings, check_fixed

_Model = TypeVar("_Model", bound=PreTrainedModel)
Partial: TypeAlias = Literal["refuse", "warn"]

# Transformers read names with these words as attention of their own.
_MISREAD = ("flash", "sdpa", "flex", "paged", "/", "|", ":")

# The functions that `register` has made.
_REGISTERED: dict[str, EquilibriumForward] = {}


def register(
    name: str = "equilibrium",
    *,
    anchor: float | Tensor = 0.5,
    layers: Layers | None = None,
    ignore: Iterable[str] = (),
    **options: Unpack[SolveKeywords],
) -> None:
    """Make equilibrium attention known to transformers under `name`, with the masks it needs.

    Then `model.set_attn_implementation(name)`, or `from_pretrained(..., attn_implementation=name)`, gives every
    attention of the model z = anchor q + (1 - anchor) softmax(scaling z K^T + mask) K, read out as
    softmax(scaling z K^T + mask) V: with `max_steps=0` (or anchor 1) what the model computed before, with the same
    parameters. Registering a name again changes the models that use it, but for what `attach`, `convert` or `override`
    has set in one of them. A call may override each option but `layers`: `model(**inputs, max_steps=0, anchor=0.8)`,
    where a model hands its arguments down to attention. Some do not (StableLM, vision towers, `generate`): `override`
    always does.

    `attach` does this for one model, and looks first whether all its attention asks for the name: transformers accept
    it for classes that attend by themselves, which then go on with softmax attention. They do not save the name either,
    but for models of `attach` and `convert`. A model that multiplies its queries by the scale before attention (OPT,
    Whisper) anchors those short queries.

    Args:
        name: how models ask for it; not one of transformers' own.
        anchor: in [0, 1], how much of the query stays: 1 is softmax attention. A tensor has one for each head and is
            fixed: it must not require a gradient.
        max_steps: the solver's `max_steps` in short; 0 solves nothing.
        solver: default `Anderson()`.
        adjoint: default `Implicit()`, and `Unrolled()` for a fixed budget of steps (rtol = atol = 0).
        impl: "auto", "reference", "tiled" or "triton", as in `equilibrium_attention`.
        on_failure: "raise", "warn" or "ignore", for queries without an answer and for gradients.
        layers: other options for some layers, `{3: {"anchor": 0.9}}`, or a function from the index of a layer to its
            options. Indices are those of the stack: encoder and decoder count from 0 each. Attention that has no index
            (`layer_idx`) takes the general options.
        ignore: names of arguments of a model's own that are known not to change its attention. What is neither known
            nor named here is refused.

    Raises:
        TypeError, ValueError: options that do not fit, a name that is taken; unknown options name the valid ones.

    Gradients: with respect to the model's parameters and inputs as `equilibrium_attention` says; anchor 0 gives none to
    query projections from the solve.
    """
    _validate.require(isinstance(name, str) and bool(name), "name", "be a string", repr(name))
    settings = Settings.of_model(anchor, layers, ignore, options)
    taken = name == "eager" or (name in ALL_ATTENTION_FUNCTIONS.valid_keys() and name not in _REGISTERED)
    _validate.require(not taken, "name", "not be one that transformers know already", repr(name), "say 'equilibrium'")
    misread = [word for word in _MISREAD if word in name]
    required = f"hold none of {', '.join(map(repr, _MISREAD))}, which transformers read as attention of their own"
    _validate.require(not misread, "name", required, repr(name), "say 'equilibrium'")
    if is_ours(name):
        # What stands under the name may be a wrapper that an engine has put around the function: that stays.
        _REGISTERED[name].settings = settings
        return
    _REGISTERED[name] = EquilibriumForward(name, settings)
    AttentionInterface.register(name, _REGISTERED[name])
    AttentionMaskInterface.register(name, explicit_mask)


def attach(
    model: _Model,
    *,
    partial: Partial = "refuse",
    name: str = "equilibrium",
    anchor: float | Tensor = 0.5,
    layers: Layers | None = None,
    ignore: Iterable[str] = (),
    **options: Unpack[SolveKeywords],
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
    _put(model, name, Settings.of_model(anchor, layers, ignore, options), partial)
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
    known = names(model.config)
    wanted = [each for each in known if name in (each, None)]
    received = f"anchors for {', '.join(map(repr, known))}" if known else "none"
    remedy = "say which by name=" if known else "save a model after attach, or use from_pretrained and attach"
    _validate.require(len(wanted) == 1, "path", f"hold one model's anchors (config.{ANCHORS})", received, remedy)
    (name,) = wanted
    if solver is None and held(model.config, SOLVERS, name) is None:
        required, remedy = f"be given where the configuration has none (config.{SOLVERS})", "pass load(..., solver=...)"
        raise ValueError(_validate.message("solver", required, None, remedy))
    options: SolveKeywords = {"adjoint": adjoint, "impl": impl, "on_failure": on_failure}
    settings = of_config(model.config, name, Settings.of_model(0.5, None, ignore, options), solver)
    _put(model, name, settings, partial)
    return model


def is_ours(name: str | None) -> bool:
    """Whether `register` made this name, whatever has been wrapped around its function since."""
    return name in _REGISTERED and name in ALL_ATTENTION_FUNCTIONS.valid_keys()


def registered(name: str) -> Settings:
    """What a name was registered with, or the defaults."""
    return _REGISTERED[name].settings if is_ours(name) else Settings()


def explicit_mask(config: Any = None, **given: Any) -> Tensor | None:
    """Which query attends to which key, (B, 1, N, M), True = attend.

    Without a mask of their own, attention functions get None: padding, sliding windows and the unwritten part of a
    static cache would be forgotten. It is written out where transformers would leave causality to a flag, too: the flag
    does not say where in a cache the queries begin.

    Raises:
        ValueError: for a model that computes its attention by itself: it would add the mask to its scores.
    """
    if config is not None and not takes_masks(config):
        raise ValueError(
            f"models of type {config.model_type!r} compute attention by themselves, not by transformers' attention "
            "interface, so that it cannot be replaced; choose another architecture"
        )
    # Informer halves its sequences between layers, and would hand a mask of the first length to all of them.
    skip = given.get("allow_is_bidirectional_skip", False) and getattr(config, "model_type", None) == "informer"
    mask: Tensor | None = sdpa_mask(**{**given, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": skip})
    return mask


def _put(model: PreTrainedModel, name: str, settings: Settings, partial: Partial) -> None:
    found = checked(model, partial, stacklevel=4)
    settings = resolved(settings, model, found)
    written(settings)  # what cannot be saved is refused before anything is changed
    keep(model, seated(model, name, found), name, settings)


def checked(model: Any, partial: Partial, stacklevel: int) -> Reach:
    """The attention of a model that can be reached; the rest is refused, or warned of, by the names of its modules."""
    _validate.check_choice("partial", partial, ("refuse", "warn"))
    _check_model(model)
    found, who = reach(model), type(model).__name__
    own = listed(found.own)
    if not found.asks:
        own = own or listed(attention_names(model))
        where = f"It attends by itself in {own}" if own else "It has no module that calls itself attention"
        raise ValueError(
            f"{who} does not take its attention from transformers' attention interface, so that it cannot be replaced; "
            f"choose another architecture. {where}"
        )
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not all(takes_masks(part.config) for part in parts if part._can_set_attn_implementation()):
        raise ValueError(
            f"{who} computes some attention by itself, and adds the masks of the rest to its scores, where they are "
            f"misread; choose another architecture: {own}"
        )
    if own:
        message = f"{who} computes some attention by itself, which stays what it is: {own}"
        message += '; partial="warn" accepts that' if partial == "refuse" else ""
        if any(issubclass(kind, nn.MultiheadAttention) for kind in found.own.values()):
            message += "; integrations.multihead.replace_attention(model) replaces nn.MultiheadAttention"
        if partial == "refuse":
            raise ValueError(message)
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


def resolved(settings: Settings, model: nn.Module, found: Reach) -> Settings:
    """Settings whose layers are those of the model, so that they can be saved and copied."""
    layers = settings.layers
    if layers is None:
        return settings
    numbers = (getattr(model.get_submodule(key), "layer_idx", None) for key in found.asks)
    indices = sorted({index for index in numbers if index is not None})
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
    remedy = ""
    if isinstance(model, nn.Module):
        inside = next((key for key, part in model.named_modules() if isinstance(part, PreTrainedModel)), None)
        remedy = f"it wraps one (adapters, engines): pass model.{inside}, and go on with the wrapper"
        if inside is None:
            remedy = "for models of torch.nn use integrations.multihead.replace_attention"
    raise TypeError(_validate.message("model", "be a PreTrainedModel of transformers", type(model).__name__, remedy))


def _asked(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)

"""`register`: a name for equilibrium attention; `attach`: equilibria in one model; `load`: a saved one again."""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typing_extensions import Unpack

from ... import _validate
from ..._torch import host_may_look
from ...adjoints import Adjoint
from ...failure import OnFailure
from ...kernels.problem import Impl
from ...options import SolveKeywords
from ...solvers import Solver
from .anchors import check_none_learned, check_read, learned_per, with_learned
from .attention import EquilibriumForward, site_of
from .reach import Reach, attention_names, listed, reach, takes_masks
from .saved import entry, keep, names, of_config, written
from .settings import ANCHORS, SAYS_CAUSAL, SOLVERS, Layers, Settings, check_fixed

_Model = TypeVar("_Model", bound=PreTrainedModel)
Partial: TypeAlias = Literal["refuse", "warn"]

# Transformers read names with these words as attention of their own.
_MISREAD = ("flash", "sdpa", "flex", "paged", "/", "|", ":")

#: Where a model of transformers, or a part that is one, keeps the name of the attention that it had before.
BEFORE = "_equilibrium_before"

# The functions of all registered names.
_REGISTERED: dict[str, EquilibriumForward] = {}


def register(
    name: str = "equilibrium",
    *,
    anchor: float | Tensor = 0.5,
    layers: Layers | None = None,
    ignore: Iterable[str] = (),
    **options: Unpack[SolveKeywords],
) -> None:
    """Make equilibrium attention known to transformers under `name`, with the masks that it needs.

    Then `model.set_attn_implementation(name)`, or `from_pretrained(..., attn_implementation=name)`, gives every
    attention of the model z = anchor q + (1 - anchor) softmax(scaling z K^T + mask) K, read out as
    softmax(scaling z K^T + mask) V. With `max_steps=0` or anchor 1 the model computes what it did before, with the same
    parameters. Registering a name again changes the models that use it, except for what `attach`, `convert` or
    `override` has set in one of them. A call may replace each option but `layers`,
    `model(**inputs, max_steps=0, anchor=0.8)`, where a model hands its arguments down to attention. Some models do not
    (StableLM, vision towers, `generate`): `override` reaches these, too.

    A model that multiplies its queries by the scale before attention (OPT, Whisper) anchors the scaled queries.

    Args:
        name: how models ask for it; not one of transformers' own.
        anchor: in [0, 1], how much of the query stays: 1 is softmax attention. A tensor has one number for each head
            and is fixed: it must not require a gradient (`learn_anchors` trains them).
        layers: other options for some layers, `{3: {"anchor": 0.9}}`, or a function from the index of a layer to its
            options. Indices are those of the stack: encoder and decoder count from 0 each. Attention that has no index
            (`layer_idx`) takes the general options.
        ignore: names of arguments of a model that are known not to change its attention. An argument that is neither
            known nor named here is refused.
        **options: solver, adjoint, impl, max_steps and on_failure, as in `SolveOptions`.

    Raises:
        TypeError, ValueError: options that do not fit, a name that is taken; unknown options name the valid ones.

    Gradients: with respect to the model's parameters and inputs as `equilibrium_attention` says; with anchor 0 the
    solve gives query projections none.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from implicit_attention.integrations.transformers import register
        >>> register(anchor=0.9)
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes))
        >>> model.set_attn_implementation("equilibrium")
        >>> model(torch.randint(10, (1, 5))).logits.shape
        torch.Size([1, 5, 10])

    Not for a model at hand: `attach` also checks that all its attention asks for the name, and keeps the options with
    the model. Transformers accept the name for classes that attend by themselves, which go on with softmax attention.
    """
    _validate.require(isinstance(name, str) and bool(name), "name", "be a string", repr(name))
    settings = Settings.of_model(anchor, layers, ignore, options)
    taken = name == "eager" or (name in ALL_ATTENTION_FUNCTIONS.valid_keys() and name not in _REGISTERED)
    _validate.require(not taken, "name", "not be one that transformers know already", repr(name), "say 'equilibrium'")
    misread = [word for word in _MISREAD if word in name]
    required = f"hold none of {', '.join(map(repr, _MISREAD))}, which transformers read as attention of their own"
    _validate.require(not misread, "name", required, repr(name), "say 'equilibrium'")
    if is_ours(name):
        # An engine may have put a wrapper around the function of this name: it stays.
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
    """Replace the softmax attention of a model by equilibrium attention, in place; return the model.

    The options belong to this model: neither another `attach` nor `register` changes them. Anchors and solver are
    written into its configuration, so that `save_pretrained` keeps them and `load` finds them.

    Args:
        model: a model of transformers. Its parameters stay as they are.
        partial: the treatment of modules that compute attention by themselves instead of asking transformers' attention
            interface: "refuse" the model, or "warn" and leave them as they are. Both name the modules. A model without
            any attention that asks is always refused.
        name: the name of the attention, which is registered if it is not yet.
        anchor: as in `register`; see `learn_anchors` to train them.
        layers: as in `register`; indices that the model does not have are refused.
        ignore: as in `register`.
        **options: solver, adjoint, impl, max_steps and on_failure, as in `SolveOptions`. The solver is part of the
            model: where attention has several equilibria, another solver may find another one.

    Raises:
        TypeError, ValueError: options that do not fit; a model that attends by itself, with its modules named.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from implicit_attention.integrations.transformers import attach
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes))
        >>> attach(model, anchor=0.9, layers={0: {"max_steps": 0}}) is model
        True
        >>> model(torch.randint(10, (1, 5))).logits.shape
        torch.Size([1, 5, 10])

    Not for a trained model that should stay as good as it is, which `convert` moves by small steps, and not for models
    outside transformers: `integrations.multihead.replace_attention` serves those of torch.nn.
    """
    check_none_learned(model)
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

    Name, anchors and solver come from its configuration, and anchors of `learn_anchors` from its weights: on the same
    machine the logits are the same, bit for bit.
    The other options belong to a run, are not saved, and are arguments of this call.

    Args:
        cls: a class of models, or an auto class such as `AutoModelForCausalLM`.
        path: of the saved model, as in `from_pretrained`.
        partial: as in `attach`.
        name: which attention, if the configuration holds several.
        solver: replaces the saved one, as for a solver class of your own, which a configuration can only name.
        adjoint: as in `attach`.
        impl: as in `attach`.
        on_failure: as in `attach`.
        ignore: as in `attach`.
        **loading: other arguments of `from_pretrained`.

    Raises:
        ValueError: a configuration without anchors, or without a solver that can be read; weights without the learned
            anchors that the configuration names.

    Examples:
        >>> import tempfile
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from implicit_attention.integrations.transformers import attach, load
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes))
        >>> with tempfile.TemporaryDirectory() as path:
        ...     attach(model, anchor=0.9).save_pretrained(path)
        ...     loaded = load(LlamaForCausalLM, path)
        >>> loaded.config.equilibrium_anchors
        {'equilibrium': 0.9}

    Not for models that were saved without equilibria: use `from_pretrained` and `attach`.
    """
    # A class that chooses its attention modules by the name of the attention would not know this one.
    with with_learned():
        loading_all = {**loading, "attn_implementation": None, "output_loading_info": True}
        model, info = cls.from_pretrained(path, **loading_all)
    known = names(model.config)
    wanted = [each for each in known if name in (each, None)]
    received = f"anchors for {', '.join(map(repr, known))}" if known else "none"
    remedy = "say which by name=" if known else "save a model after attach, or use from_pretrained and attach"
    _validate.require(len(wanted) == 1, "path", f"hold one model's anchors (config.{ANCHORS})", received, remedy)
    (name,) = wanted
    if solver is None and entry(model.config, SOLVERS, name) is None:
        required, remedy = f"be given where the configuration has none (config.{SOLVERS})", "pass load(..., solver=...)"
        raise ValueError(_validate.message("solver", required, None, remedy))
    options: SolveKeywords = {"adjoint": adjoint, "impl": impl, "on_failure": on_failure}
    settings = of_config(model.config, name, Settings.of_model(0.5, None, ignore, options), solver)
    check_read(model.config, name, info["missing_keys"])
    _put(model, name, settings, partial)
    return (model, info) if loading.get("output_loading_info") else model


def is_ours(name: str | None) -> bool:
    """Whether `register` made this name, also if an engine has wrapped its function since."""
    return name in _REGISTERED and name in ALL_ATTENTION_FUNCTIONS.valid_keys()


def registered(name: str) -> Settings:
    """The settings that a name was registered with, or the defaults."""
    return _REGISTERED[name].settings if is_ours(name) else Settings()


def explicit_mask(config: Any = None, **arguments: Any) -> Tensor | None:
    """The mask that transformers make for a registered name, (B, 1, N, M), True = attend.

    Transformers give an attention function None if there is no mask function of its name, so that padding, sliding
    windows and the unwritten part of a static cache would be forgotten. This function returns None to models whose
    attention says by itself that it is causal, if the queries are the last tokens and attend to all before them.

    Raises:
        ValueError: for a model that computes attention by itself and would add the mask to its scores.
    """
    if config is not None and not takes_masks(config):
        raise ValueError(
            f"models of type {config.model_type!r} compute attention by themselves, not by transformers' attention "
            "interface, so that it cannot be replaced; choose another architecture"
        )
    if getattr(config, SAYS_CAUSAL, False) and _is_plainly_causal(arguments):
        return None
    # Informer halves its sequences between layers, and would give a mask of the first length to all of them.
    skip = arguments.get("allow_is_bidirectional_skip", False) and getattr(config, "model_type", None) == "informer"
    arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": skip}
    mask: Tensor | None = sdpa_mask(**arguments)
    return mask


def _is_plainly_causal(arguments: dict[str, Any]) -> bool:
    """Whether the queries are the last of all tokens, none of which is missing or beyond a window."""
    rows, count, offset = arguments["q_length"], arguments["kv_length"], arguments.get("q_offset", 0)
    if not arguments.get("allow_is_causal_skip", True) or torch.compiler.is_compiling() or not isinstance(offset, int):
        # A graph would keep the answer for the lengths that it was made with.
        return False
    window, mask = arguments.get("local_size"), arguments.get("attention_mask")
    if arguments.get("kv_offset", 0) != 0 or offset + rows != count or (window is not None and count >= window):
        return False
    return mask is None or (mask.shape[-1] == count and host_may_look(mask) and bool(mask.all()))


def _put(model: PreTrainedModel, name: str, settings: Settings, partial: Partial) -> None:
    reachable = checked(model, partial, stacklevel=4)
    settings = resolved(settings, model, reachable)
    written(settings)  # Settings that cannot be saved are refused before anything changes.
    keep(model, seated(model, name, reachable), name, settings, learned_per(model, name))


def checked(model: Any, partial: Partial, stacklevel: int) -> Reach:
    """The attention of a model that can be reached; the rest is refused, or warned of, by the names of its modules."""
    _validate.check_choice("partial", partial, ("refuse", "warn"))
    check_model(model)
    reachable, who = reach(model), type(model).__name__
    own = listed(reachable.own)
    if not reachable.asks:
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
        if any(issubclass(kind, nn.MultiheadAttention) for kind in reachable.own.values()):
            message += "; integrations.multihead.replace_attention(model) replaces nn.MultiheadAttention"
        if partial == "refuse":
            raise ValueError(message)
        warnings.warn(message, UserWarning, stacklevel=stacklevel)
    return reachable


def seated(model: PreTrainedModel, name: str, reachable: Reach) -> list[PreTrainedConfig]:
    """Give a model this attention; return its configurations, which it shares with no other model from here on."""
    if not is_ours(name):
        register(name)
    configs = own_configs(model)
    before = {id(config): config._attn_implementation for config in configs}
    model.set_attn_implementation(name)
    modules = {key: model.get_submodule(key) for key in reachable.asks}
    unreached = {key: type(module) for key, module in modules.items() if attention_of(module) not in (name, None)}
    if unreached:
        for config in configs:
            config._attn_implementation_internal = before[id(config)]
        raise ValueError(
            f"{type(model).__name__}.set_attn_implementation does not reach all attention: {listed(unreached)}; attach "
            "to the parts that it reaches"
        )
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    for part in parts:
        if not is_ours(before[id(part.config)]):
            setattr(part, BEFORE, before[id(part.config)])
    says_causal = all(isinstance(getattr(module, "is_causal", None), bool) for module in modules.values())
    for config in configs:
        # Where torch's own attention is supported, transformers themselves leave causality to the modules.
        setattr(config, SAYS_CAUSAL, says_causal and all(part._supports_sdpa for part in parts))
    for module in modules.values():
        # Not at the first call: a compiler may trace that, and cannot make sites.
        site_of(module)
    return configs


def resolved(settings: Settings, model: nn.Module, reachable: Reach) -> Settings:
    """Settings with the options of each layer written out, so that they can be saved and copied."""
    layers = settings.layers
    if layers is None:
        return settings
    numbers = (getattr(model.get_submodule(key), "layer_idx", None) for key in reachable.asks)
    indices = sorted({index for index in numbers if index is not None})
    if callable(layers):
        layers = {index: layers(index) for index in indices}
        for options in layers.values():
            check_fixed(options.get("anchor"))
    unknown = [index for index in layers if index not in indices]
    required = f"hold indices of layers of {type(model).__name__} ({', '.join(map(str, indices)) or 'it has none'})"
    _validate.require(not unknown, "layers", required, unknown)
    return dataclasses.replace(settings, layers=dict(layers))


def own_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Copy the configurations of a model and its parts, from which other models may have been built; return these."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                # `copies` keeps the parts of one configuration parts of its copy.
                setattr(module, attribute, copy.deepcopy(value, copies))
    return list({id(value): value for value in copies.values() if isinstance(value, PreTrainedConfig)}.values())


def check_model(model: Any) -> None:
    """Raise unless `model` is a model of transformers."""
    if isinstance(model, PreTrainedModel):
        return
    remedy = ""
    if isinstance(model, nn.Module):
        inside = next((key for key, part in model.named_modules() if isinstance(part, PreTrainedModel)), None)
        remedy = f"it wraps one (adapters, engines): pass model.{inside}, and go on with the wrapper"
        if inside is None:
            remedy = "for models of torch.nn use integrations.multihead.replace_attention"
    raise TypeError(_validate.message("model", "be a PreTrainedModel of transformers", type(model).__name__, remedy))


def attention_of(module: nn.Module) -> str | None:
    """The name of the attention that a module asks for."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None)

"""`register`: a name under which models of transformers find equilibrium attention, and its masks."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ... import _validate
from ..._types import Impl, OnFailure
from ...adjoints import Adjoint
from ...options import SolveOptions
from ...solvers import Solver
from .attention import EquilibriumForward
from .settings import Layers, Settings, check_fixed

_MISREAD = ("flash", "sdpa", "flex", "paged", "/", "|", ":")

# The functions that this module has registered.
_REGISTERED: dict[str, EquilibriumForward] = {}

# Models that ask for some of their attention only, and add the mask themselves to the scores of the rest.
_PARTLY = frozenset({"git", "bigbird_pegasus"})


def register(
    name: str = "equilibrium",
    *,
    anchor: float | Tensor = 0.5,
    max_steps: int | None = None,
    solver: Solver | None = None,
    adjoint: Adjoint | None = None,
    impl: Impl = "auto",
    on_failure: OnFailure = "warn",
    layers: Layers | None = None,
    ignore: Iterable[str] = (),
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
    settings = settings_from(anchor, max_steps, solver, adjoint, impl, on_failure, layers, ignore)
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


def settings_from(
    anchor: float | Tensor,
    max_steps: int | None,
    solver: Solver | None,
    adjoint: Adjoint | None,
    impl: Impl,
    on_failure: OnFailure,
    layers: Layers | None,
    ignore: Iterable[str],
) -> Settings:
    """The options of `register` and `attach`, checked."""
    if isinstance(ignore, str):
        raise TypeError(_validate.message("ignore", "be a collection of names", repr(ignore), f"({ignore!r},)"))
    options = SolveOptions(solver=solver, adjoint=adjoint, impl=impl, max_steps=max_steps, on_failure=on_failure)
    settings = Settings(anchor=anchor, options=options, layers=layers, ignore=frozenset(ignore))
    check_fixed(anchor)
    for given in () if layers is None or callable(layers) else layers.values():
        check_fixed(given.get("anchor"))
    return settings


def is_ours(name: str | None) -> bool:
    """Whether `register` made this name, whatever has been wrapped around its function since."""
    return name in _REGISTERED and name in ALL_ATTENTION_FUNCTIONS.valid_keys()


def registered(name: str) -> Settings:
    """What a name was registered with."""
    return _REGISTERED[name].settings


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


def takes_masks(config: Any) -> bool:
    """Whether the models of a configuration hand the masks of this name to nothing but attention that asks for it."""
    if getattr(config, "attention_type", None) == "prob" and config.model_type == "informer":
        return False
    return bool(_asks(type(config).__module__, config.model_type))


# The compiler calls it instead of following it, so that a compiled model is refused as well.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _asks(configuration: str, model_type: str) -> bool:
    """Whether the models beside this module of configurations ask the interface for all their attention."""
    modeling = configuration.replace("configuration_", "modeling_")
    return model_type not in _PARTLY and (modeling not in sys.modules or _source_asks(modeling))


@functools.cache
def _source_asks(modeling: str) -> bool:
    try:
        source = inspect.getsource(sys.modules[modeling])
    except (OSError, TypeError):
        return True
    own = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE)
    return own is None or "ALL_ATTENTION_FUNCTIONS" in source

"""The options of one model: held by its modules, and written into its configuration, which is saved with it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ... import _validate, solvers
from ...solvers import Solver
from .settings import ANCHORS, LAYERS, LEARNED, SETTINGS, SOLVERS, Settings

#: The attribute from which transformers read the name of a model's attention. They do not write it. A file that has it
#: is loaded with that attention, or not at all.
NAME = "attn_implementation"


def keep(
    model: nn.Module, configs: Iterable[PreTrainedConfig], name: str, settings: Settings, learned: str | None = None
) -> None:
    """Give settings for a name to the modules of a model, and the saved part of them to its configurations.

    `learned` says whether anchors are parameters, per "head" or "layer".
    """
    saved = {**written(settings), LEARNED: learned}
    for config in configs:
        for attribute, value in saved.items():
            known = {key: other for key, other in (getattr(config, attribute, None) or {}).items() if key != name}
            if value is not None or known != (getattr(config, attribute, None) or {}):
                setattr(config, attribute, known if value is None else {**known, name: value})
        setattr(config, NAME, name)
    for module in model.modules():
        setattr(module, SETTINGS, {**(getattr(module, SETTINGS, None) or {}), name: settings})


def settings_of(module: nn.Module, name: str, general: Settings) -> Settings:
    """The settings that a module has for a name: those of `keep`, or of its configuration, or the general ones."""
    own: dict[str, Settings] = getattr(module, SETTINGS, None) or {}
    if name in own:
        return own[name]
    config = getattr(module, "config", None)
    if not torch.compiler.is_compiling() and name in names(config) and not hasattr(config, NAME):
        # Transformers forget the name when they read a file, and it would not be there when the model is saved again.
        setattr(config, NAME, name)
    if held(config, LEARNED, name) is not None:
        required = f"be loaded by `load`, which reads its learned anchors (config.{LEARNED})"
        raise ValueError(_validate.message("model", required, "one by from_pretrained", "load(cls, path)"))
    return of_config(config, name, general)


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """The configurations that a model and its modules hold."""
    values = (value for module in model.modules() for value in vars(module).values())
    return list({id(value): value for value in values if isinstance(value, PreTrainedConfig)}.values())


def names(config: Any) -> list[str]:
    """The names for which a configuration holds anchors."""
    return list(getattr(config, ANCHORS, None) or ())


def held(config: Any, attribute: str, name: str) -> Any:
    """The entry of a name in `attribute` (ANCHORS, ...) of a configuration, or None."""
    return (getattr(config, attribute, None) or {}).get(name)


def of_config(config: Any, name: str, general: Settings, instead: Solver | None = None) -> Settings:
    """General settings with what a configuration holds for a name; `instead` replaces the solver of all layers."""
    anchor, layers = held(config, ANCHORS, name), held(config, LAYERS, name)
    if anchor is None:
        return general
    found = general.override(_read(anchor, held(config, SOLVERS, name), instead), ANCHORS)
    if not layers:
        return found
    read = {int(i): _read(given["anchor"], given.get("solver"), instead) for i, given in layers.items()}
    return dataclasses.replace(found, layers=read)


def written(settings: Settings) -> dict[str, Any]:
    """Anchors and solvers as a configuration holds them."""
    layers = settings.layers
    assert not callable(layers)
    own = {str(i): _written(settings.override(given, "layers")) for i, given in (layers or {}).items() if given}
    general = _written(settings)
    return {ANCHORS: general["anchor"], SOLVERS: general["solver"], LAYERS: own or None}


def _written(settings: Settings) -> dict[str, Any]:
    anchor = settings.anchor
    numbers = anchor.detach().tolist() if isinstance(anchor, Tensor) else float(anchor)
    return {"anchor": numbers, "solver": _plain(settings.options.effective_solver)}


def _plain(solver: Solver) -> dict[str, Any]:
    fields = {"name": type(solver).__name__, **dataclasses.asdict(solver)}
    try:
        plain: dict[str, Any] = json.loads(json.dumps(fields))
    except TypeError as error:
        required = "be made of numbers, texts and lists of them, to be saved with the model"
        raise ValueError(_validate.message("solver", required, repr(solver), "use one without such options")) from error
    return plain


def _read(anchor: Any, solver: Mapping[str, Any] | None, instead: Solver | None) -> dict[str, Any]:
    # In double precision, so that no anchor is rounded before it meets its queries.
    found = {"anchor": torch.tensor(anchor, dtype=torch.float64) if isinstance(anchor, list) else anchor}
    if solver is not None and instead is None:
        instead = solver_of(solver)
    return found if instead is None else {**found, "solver": instead}


def solver_of(saved: Mapping[str, Any]) -> Solver:
    """The solver that a configuration names."""
    options = dict(saved)
    kind = getattr(solvers, options.pop("name", ""), None)
    with suppress(TypeError):
        if isinstance(kind, type) and issubclass(kind, Solver):
            return kind(**options)
    required = "be one of implicit_attention.solvers with its options"
    remedy = "load the model with load(..., solver=...)"
    raise ValueError(_validate.message(f"config.{SOLVERS}", required, dict(saved), remedy))

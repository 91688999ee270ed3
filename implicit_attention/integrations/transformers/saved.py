"""The options of one model: kept by its modules, and written into its configuration, which is saved with it."""

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
            entries = getattr(config, attribute, None) or {}
            if value is not None or name in entries:
                others = {key: other for key, other in entries.items() if key != name}
                setattr(config, attribute, others if value is None else {**others, name: value})
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
        # Transformers forget the name when they read a file, and would save the model without it.
        setattr(config, NAME, name)
    if entry(config, LEARNED, name) is not None:
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


def entry(config: Any, attribute: str, name: str) -> Any:
    """The entry of a name in `attribute` (ANCHORS, ...) of a configuration, or None."""
    return (getattr(config, attribute, None) or {}).get(name)


def of_config(config: Any, name: str, general: Settings, instead: Solver | None = None) -> Settings:
    """General settings with those of a configuration for a name; `instead` replaces the solver of all layers."""
    anchor, layers = entry(config, ANCHORS, name), entry(config, LAYERS, name)
    if anchor is None:
        return general
    settings = general.override(_read(anchor, entry(config, SOLVERS, name), instead), ANCHORS)
    if not layers:
        return settings
    read = {int(i): _read(saved["anchor"], saved.get("solver"), instead) for i, saved in layers.items()}
    return dataclasses.replace(settings, layers=read)


def written(settings: Settings) -> dict[str, Any]:
    """Anchors and solvers as a configuration holds them."""
    layers = settings.layers
    assert not callable(layers)
    own = {str(i): _written(settings.override(some, "layers")) for i, some in (layers or {}).items() if some}
    general = _written(settings)
    return {ANCHORS: general["anchor"], SOLVERS: general["solver"], LAYERS: own or None}


def _written(settings: Settings) -> dict[str, Any]:
    anchor, solver = settings.anchor, settings.options.effective_solver
    numbers = anchor.detach().tolist() if isinstance(anchor, Tensor) else float(anchor)
    try:
        fields = json.loads(json.dumps({"name": type(solver).__name__, **dataclasses.asdict(solver)}))
    except TypeError as error:
        required = "be made of numbers, texts and lists of them, to be saved with the model"
        raise ValueError(_validate.message("solver", required, repr(solver), "use one without such options")) from error
    return {"anchor": numbers, "solver": fields}


def _read(anchor: Any, solver: Mapping[str, Any] | None, instead: Solver | None) -> dict[str, Any]:
    # In double precision, so that no anchor is rounded before it meets its queries.
    options = {"anchor": torch.tensor(anchor, dtype=torch.float64) if isinstance(anchor, list) else anchor}
    if solver is not None and instead is None:
        instead = solver_of(solver)
    return options if instead is None else {**options, "solver": instead}


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

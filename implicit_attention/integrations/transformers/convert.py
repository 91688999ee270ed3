"""`convert`: a trained model moved from softmax attention to equilibria, by steps of the anchor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ... import _validate
from ..._types import Impl, OnFailure
from ...adjoints import Adjoint
from ...solution import SolveReport
from ...solvers import Solver
from . import saved
from .attach import Partial, checked, resolved, seated, settings_of
from .attention import COMPARE, LAST, Last
from .override import override
from .report import aligned, last_calls, last_solves
from .settings import OPTIONS, Settings

SCHEDULE = (0.9, 0.8, 0.7, 0.6, 0.5)


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one anchor of the schedule changes, before anything is trained with it.

    Attributes:
        anchor: the anchor.
        layers: by name of the attention module, how far its answer is from softmax attention on the same queries, keys
            and values: |difference| / |softmax attention|.
        output: the same for the model's first output (logits or last hidden state), against itself with softmax
            attention in all layers and the same parameters.
        converged: share of the queries that reached their tolerance; NaN with a fixed budget.
    """

    anchor: float
    layers: dict[str, float]
    output: float
    converged: float


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The stages of a conversion; printed, it is a table."""

    stages: list[Stage]

    def __str__(self) -> str:
        names = list(self.stages[0].layers)
        head = ("anchor", *(f"{stage.anchor:.3g}" for stage in self.stages))
        rows = [(name, *(f"{stage.layers[name]:.3f}" for stage in self.stages)) for name in names]
        outputs = ("output", *(f"{stage.output:.3f}" for stage in self.stages))
        shares = ("converged", *(_percent(stage.converged) for stage in self.stages))
        return aligned([head, *rows, outputs, shares])


def convert(
    model: PreTrainedModel,
    *,
    schedule: Sequence[float] = SCHEDULE,
    inputs: Mapping[str, Any] | None = None,
    fine_tune: Callable[[PreTrainedModel, Stage], object] | None = None,
    partial: Partial = "refuse",
    name: str = "equilibrium",
    max_steps: int | None = None,
    solver: Solver | None = None,
    adjoint: Adjoint | None = None,
    impl: Impl | None = None,
    on_failure: OnFailure | None = None,
) -> Conversion:
    """Move a trained model from softmax attention to equilibria, by steps of the anchor, and report what changes.

    At every anchor the model is measured on `inputs`, then given to `fine_tune`, so that it can follow. It keeps the
    last anchor and the solver as `attach` does, in its configuration too, which is saved with it: `load` brings them
    back. `schedule=[1.0]` takes it back to softmax attention.

    A fixed budget of steps (`Picard(max_steps=2, rtol=0, atol=0)`) is differentiated through its steps, everything else
    by the implicit function theorem, unless `adjoint` says otherwise.

    Args:
        model: a model of transformers that takes its attention from their interface.
        schedule: anchors in [0, 1], in order; 1 is softmax attention.
        inputs: the arguments of the model's forward to measure on; default `model.dummy_inputs`, which tell little.
        fine_tune: called with the model and the `Stage` at every anchor.
        partial: as in `attach`: what to do if some of its attention cannot be replaced.
        name: of `register`; it is registered if it is not.
        max_steps: options from here on are those of `attach`; those that are not given stay what they are for this
            model, or for the name.
        solver: see there.
        adjoint: see there.
        impl: see there.
        on_failure: see there.

    Returns:
        The `Conversion`; `print` it.

    Raises:
        TypeError, ValueError: arguments that do not fit; a model whose attention cannot be replaced, by its name.
    """
    given = {
        "max_steps": max_steps,
        "solver": solver,
        "adjoint": adjoint,
        "impl": impl,
        "on_failure": on_failure,
    }
    given = {option: value for option, value in given.items() if value is not None}
    anchors = _checked(schedule, inputs)
    for anchor in anchors:
        Settings().override({**given, "anchor": anchor}, "options")
    found = checked(model, partial, stacklevel=3)
    before = resolved(settings_of(model, name), model, found)
    assert not callable(before.layers)
    configs = seated(model, name, found)
    inputs = _inputs(model) if inputs is None else inputs
    stages: list[Stage] = []
    for anchor in anchors:
        options = {**given, "anchor": anchor}
        # What is given here holds in all layers.
        layers = {i: {k: v for k, v in own.items() if k not in options} for i, own in (before.layers or {}).items()}
        settings = dataclasses.replace(before.override(options, "options"), layers=layers or None)
        saved.keep(model, configs, name, settings)
        # Again at every stage: what softmax attention would make of the parameters is to be compared with.
        with override(model, max_steps=0):
            softmax, _ = _measured(model, inputs)
        with _comparing(model):
            output, last = _measured(model, inputs)
        stages.append(
            Stage(anchor, _changes(last), _distance(output, softmax), _converged(last_solves(model).values()))
        )
        if fine_tune is not None:
            fine_tune(model, stages[-1])
    return Conversion(stages)


def _checked(schedule: Any, inputs: Any) -> list[float]:
    if not isinstance(schedule, Sequence):
        raise TypeError(_validate.message("schedule", "be a sequence of anchors", repr(schedule), "(0.9, 0.7, 0.5)"))
    _validate.require(len(schedule) > 0, "schedule", "hold at least one anchor", schedule)
    for anchor in schedule:
        _validate.check_number("schedule", anchor, low=0.0, high=1.0)
    if inputs is not None and not isinstance(inputs, Mapping):
        received = type(inputs).__name__
        raise TypeError(_validate.message("inputs", "be arguments by name", received, "{'input_ids': input_ids}"))
    options = [name for name in inputs or () if name in OPTIONS]
    _validate.require(not options, "inputs", "hold no options, which would not stay", options, "pass them to convert")
    return [float(anchor) for anchor in schedule]


def _inputs(model: PreTrainedModel) -> Mapping[str, Any]:
    given: Mapping[str, Any] = model.dummy_inputs
    return {argument: value.to(model.device) for argument, value in given.items()}


@torch.no_grad()
def _measured(model: PreTrainedModel, inputs: Mapping[str, Any]) -> tuple[Tensor, list[tuple[str, Last]]]:
    """The model's first output in evaluation, and what its attention modules remember of it."""
    for module in model.modules():
        if hasattr(module, LAST):
            delattr(module, LAST)
    training = {module: module.training for module in model.modules()}
    model.train(False)
    try:
        # Models that draw at random (masked image models) draw the same.
        with torch.random.fork_rng(devices=[] if model.device.type == "cpu" else [model.device]):
            torch.manual_seed(0)
            found = model(**inputs)
    finally:
        for module, was in training.items():
            module.training = was
    return _output(found), last_calls(model)


def _output(found: Any) -> Tensor:
    """Logits, or the first output that is no loss."""
    if getattr(found, "logits", None) is not None:
        logits: Tensor = found.logits
        return logits
    values = found.values() if isinstance(found, Mapping) else found
    return next(value for value in values if isinstance(value, Tensor) and value.ndim > 1)


@contextmanager
def _comparing(model: nn.Module) -> Iterator[None]:
    modules = list(model.modules())
    for module in modules:
        setattr(module, COMPARE, True)
    try:
        yield
    finally:
        for module in modules:
            delattr(module, COMPARE)


def _changes(last: list[tuple[str, Last]]) -> dict[str, float]:
    return {name: math.nan if call.change is None else float(call.change) for name, call in last}


def _converged(found: Iterable[SolveReport]) -> float:
    """Of the queries that were to converge."""
    met = wanted = 0
    for layer in found:
        asked = ~((layer.tolerance == 0) | layer.tolerance.isnan())
        met += int(layer.converged[asked].sum())
        wanted += int(asked.sum())
    return met / wanted if wanted else math.nan


def _distance(output: Tensor, reference: Tensor) -> float:
    # Not in half precision; never a copy of all logits in float64.
    output, reference = output.float(), reference.float()
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in (output - reference, reference)]
    return float(norms[0] / norms[1])


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.4g} %"

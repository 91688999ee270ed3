"""`convert`: a trained model moved from softmax attention to equilibria, by steps of the anchor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import Unpack

from ... import _validate
from ...options import SolveKeywords, SolveOptions
from ...solution import SolveReport
from .attach import Partial, checked, registered, resolved, seated
from .attention import COMPARE, LAST, Last
from .report import aligned, last_calls, last_solves, percent
from .saved import keep, settings_of
from .settings import OPTIONS, marked, override

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
        shares = ("converged", *(percent(stage.converged) for stage in self.stages))
        return aligned([head, *rows, outputs, shares])


def convert(
    model: PreTrainedModel,
    *,
    schedule: Sequence[float] = SCHEDULE,
    inputs: Mapping[str, Any] | None = None,
    fine_tune: Callable[[PreTrainedModel, Stage], object] | None = None,
    partial: Partial = "refuse",
    name: str = "equilibrium",
    **options: Unpack[SolveKeywords],
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
    SolveOptions().override(**options)  # what does not fit is refused before anything is changed
    given = {option: value for option, value in options.items() if value is not None}
    anchors = _checked(schedule, inputs)
    found = checked(model, partial, stacklevel=3)
    before = resolved(settings_of(model, name, registered(name)), model, found)
    assert not callable(before.layers)
    configs = seated(model, name, found)
    if inputs is None:
        inputs = {argument: value.to(model.device) for argument, value in model.dummy_inputs.items()}
    stages: list[Stage] = []
    for anchor in anchors:
        changes = {**given, "anchor": anchor}
        # What is given here holds in all layers.
        layers = {i: {k: v for k, v in own.items() if k not in changes} for i, own in (before.layers or {}).items()}
        settings = dataclasses.replace(before.override(changes, "options"), layers=layers or None)
        keep(model, configs, name, settings)
        # Softmax attention is measured at every stage, as `fine_tune` has changed the parameters.
        with override(model, max_steps=0):
            softmax, _ = _measured(model, inputs)
        with marked(model, COMPARE, True):
            output, last = _measured(model, inputs)
        moved = {key: math.nan if call.change is None else float(call.change) for key, call in last}
        stages.append(Stage(anchor, moved, _distance(output, softmax), _converged(last_solves(model).values())))
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


def _converged(found: Iterable[SolveReport]) -> float:
    """The share of converged queries among those that had a tolerance to reach."""
    asked = [solve.converged[solve.tolerance > 0].cpu() for solve in found]
    return float(torch.cat(asked).double().mean())


def _distance(output: Tensor, reference: Tensor) -> float:
    # Not in half precision; never a copy of all logits in float64.
    output, reference = output.float(), reference.float()
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in (output - reference, reference)]
    return float(norms[0] / norms[1])

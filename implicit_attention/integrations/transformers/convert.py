"""`convert` moves a trained model from softmax attention to equilibria, by steps of the anchor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import Unpack

from ... import _validate
from ...diagnostics.diagnosis import table
from ...options import SolveKeywords, SolveOptions
from .anchors import check_none_learned
from .attach import Partial, checked, registered, resolved, seated
from .attention import COMPARE, LAST, Last
from .report import last_calls, last_solves, percent
from .saved import keep, settings_of
from .settings import OPTIONS, marked, override

SCHEDULE = (0.9, 0.8, 0.7, 0.6, 0.5)


@dataclasses.dataclass(frozen=True)
class Stage:
    """The changes by one anchor of the schedule, before `fine_tune` trains with it.

    Attributes:
        anchor: the anchor.
        layers: {name of the attention module: |difference| / |softmax attention|}, where the difference is between its
            answer and softmax attention on the same queries, keys and values.
        output: the relative difference of the model's first output (logits or last hidden state) from that of the same
            model with softmax attention in all layers.
        converged: share of the queries that reached their tolerance; NaN with a fixed budget of steps.

    Examples:
        >>> from implicit_attention.integrations.transformers import Stage
        >>> Stage(anchor=0.9, layers={"model.layers.0.self_attn": 0.05}, output=0.02, converged=1.0).output
        0.02

    Not for making by hand: `convert` measures them, and hands each to `fine_tune`.
    """

    anchor: float
    layers: dict[str, float]
    output: float
    converged: float


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The stages of a conversion; `print` shows them as a table.

    Examples:
        >>> from implicit_attention.integrations.transformers import Conversion, Stage
        >>> print(Conversion([Stage(0.9, {"layer 0": 0.05}, 0.02, 1.0), Stage(0.7, {"layer 0": 0.125}, 0.0625, 1.0)]))
        anchor       0.9    0.7
        -----------------------
        layer 0    0.050  0.125
        output     0.020  0.062
        converged  100 %  100 %

    Not for making by hand: `convert` returns it.
    """

    stages: list[Stage]

    def __str__(self) -> str:
        names = list(self.stages[0].layers)
        head = ("anchor", *(f"{stage.anchor:.3g}" for stage in self.stages))
        rows = [(name, *(f"{stage.layers[name]:.3f}" for stage in self.stages)) for name in names]
        outputs = ("output", *(f"{stage.output:.3f}" for stage in self.stages))
        shares = ("converged", *(percent(stage.converged) for stage in self.stages))
        return table([head, *rows, outputs, shares])


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
    """Move a trained model from softmax attention to equilibria, by steps of the anchor, and report the changes.

    At every anchor the model is measured on `inputs`, then given to `fine_tune`, which may train it. The model keeps
    the last anchor and the solver as with `attach`, also in its configuration, so that `load` finds them.
    `schedule=[1.0]` takes it back to softmax attention.

    Args:
        model: a model of transformers that takes its attention from their interface.
        schedule: anchors in [0, 1], in order; 1 is softmax attention.
        inputs: arguments of the model's forward to measure with; default `model.dummy_inputs`, which are few tokens.
        fine_tune: called with the model and the `Stage` at every anchor.
        partial: as in `attach`: what to do about attention that cannot be replaced.
        name: the name of the attention, which is registered if it is not yet.
        **options: solver, adjoint, impl, max_steps and on_failure, as in `SolveOptions`. Other options
            keep their values of this model, or of the name.

    Returns:
        The `Conversion`; `print` shows it.

    Raises:
        TypeError, ValueError: arguments that do not fit; a model whose attention cannot be replaced, by its name.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from implicit_attention.integrations.transformers import convert
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes))
        >>> conversion = convert(model, schedule=(0.9, 0.7))
        >>> [stage.anchor for stage in conversion.stages], conversion.stages[-1].converged
        ([0.9, 0.7], 1.0)

    Not for a model that is trained from the start with equilibria, which needs no schedule: use `attach`.
    """
    SolveOptions().override(**options)  # Options that do not fit are refused before anything changes.
    replaced = {option: value for option, value in options.items() if value is not None}
    anchors = _checked(schedule, inputs)
    check_none_learned(model)
    reachable = checked(model, partial, stacklevel=3)
    before = resolved(settings_of(model, name, registered(name)), model, reachable)
    assert not callable(before.layers)
    configs = seated(model, name, reachable)
    if inputs is None:
        inputs = {argument: value.to(model.device) for argument, value in model.dummy_inputs.items()}
    stages: list[Stage] = []
    for anchor in anchors:
        changes = {**replaced, "anchor": anchor}
        # Options of this call hold in all layers.
        layers = {i: {k: v for k, v in own.items() if k not in changes} for i, own in (before.layers or {}).items()}
        settings = dataclasses.replace(before.override(changes, "options"), layers=layers or None)
        keep(model, configs, name, settings)
        # Softmax attention is measured at every stage, as `fine_tune` has changed the parameters.
        with override(model, max_steps=0):
            softmax, _ = _measured(model, inputs)
        with marked(model, COMPARE, True):
            output, last = _measured(model, inputs)
        moved = {key: math.nan if call.change is None else float(call.change) for key, call in last}
        # Queries without a tolerance to reach are left out.
        converged = [solve.converged[solve.tolerance > 0].cpu() for solve in last_solves(model).values()]
        stages.append(Stage(anchor, moved, _distance(output, softmax), float(torch.cat(converged).double().mean())))
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
    """The model's first output in evaluation, and the records of its attention modules."""
    for module in model.modules():
        if hasattr(module, LAST):
            delattr(module, LAST)
    # Models that draw random numbers (masked image models) draw the same ones every time.
    devices = [] if model.device.type == "cpu" else [model.device]
    with marked(model, "training", False), torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        answer = model(**inputs)
    # The logits, or the first output that is not a loss.
    outputs = (getattr(answer, "logits", None), *(answer.values() if isinstance(answer, Mapping) else answer))
    return next(t for t in outputs if isinstance(t, Tensor) and t.ndim > 1), last_calls(model)


def _distance(output: Tensor, reference: Tensor) -> float:
    # Half precision would be too coarse; a copy of all logits in float64 would be too large.
    output, reference = output.float(), reference.float()
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in (output - reference, reference)]
    return float(norms[0] / norms[1])

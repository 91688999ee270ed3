"""The options of a registered attention: for all layers, for some of them, for one model, for one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn
from typing_extensions import Self

from ... import _validate
from ...options import SolveKeywords, SolveOptions

#: Options of one layer, by name.
Given: TypeAlias = Mapping[str, Any]
#: Options of some layers: by index, or computed from it.
Layers: TypeAlias = Mapping[int, Given] | Callable[[int], Given]

OPTIONS = ("anchor", *SolveKeywords.__annotations__)

#: Where the configuration of a model holds its anchors, its solver, and both for layers that differ, by registered
#: name; saved with it.
ANCHORS, SOLVERS, LAYERS = "equilibrium_anchors", "equilibrium_solver", "equilibrium_layers"
#: Where a configuration says that all attention of its model knows by itself whether it is causal, so that no mask
#: needs to be written for that.
SAYS_CAUSAL = "equilibrium_says_causal"
#: Where an attention module holds the settings of its model, by registered name.
SETTINGS = "_equilibrium_settings"
#: Where it holds the options of an `override`, for all names.
OVERRIDES = "_equilibrium_options"
#: Where a configuration says that anchors are parameters, one per "head" or "layer", by registered name.
LEARNED = "equilibrium_learned"

_COUNTS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a registered attention.

    Args:
        anchor: in [0, 1]; 1 is softmax attention. A tensor has one for each head.
        options: how the equilibrium is found and differentiated.
        layers: other options for some layers.
        ignore: names of arguments of the model that are known not to change attention.
    """

    anchor: float | Tensor = 0.5
    options: SolveOptions = dataclasses.field(default_factory=SolveOptions)
    layers: Layers | None = None
    ignore: frozenset[str] = frozenset()

    @classmethod
    def of_model(
        cls, anchor: float | Tensor, layers: Layers | None, ignore: Iterable[str], options: SolveKeywords
    ) -> Self:
        """The settings that `register` and `attach` are called with; their anchors must be fixed."""
        if isinstance(ignore, str):
            raise TypeError(_validate.message("ignore", "be a collection of names", repr(ignore), f"({ignore!r},)"))
        solve = SolveOptions().override(**options)
        settings = cls(anchor=anchor, options=solve, layers=layers, ignore=frozenset(ignore))
        of_layers = layers.values() if isinstance(layers, Mapping) else ()
        for each in (anchor, *(given.get("anchor") for given in of_layers)):
            check_fixed(each)
        return settings

    def __post_init__(self) -> None:
        if isinstance(self.anchor, Tensor):
            _validate.check_float_tensor("anchor", self.anchor)
            received = f"shape {tuple(self.anchor.shape)}"
            _validate.require(self.anchor.ndim <= 1, "anchor", "be a number or one for each head", received)
            _validate.check_range("anchor", self.anchor, low=0.0, high=1.0, remedy="parametrise it by a sigmoid")
        else:
            _validate.check_number("anchor", self.anchor, low=0.0, high=1.0)
        if self.layers is None or (not isinstance(self.layers, Mapping) and callable(self.layers)):
            return
        required = "be a dict from layer index to options, or a function of the index"
        _check_mapping("layers", self.layers, required, "{3: {'anchor': 0.8}}")
        for index, given in self.layers.items():
            _validate.check_integer("layers", index, low=0, remedy="its keys are indices of layers")
            self.override(given, f"layers[{index}]")

    def override(self, given: Given, argument: str) -> Self:
        """These settings with some replaced; another solver comes with its own `max_steps`."""
        _check_mapping(argument, given, "be a dict of options", "{'anchor': 0.8}")
        for name in given:
            _validate.require(name in OPTIONS, argument, f"hold options among {', '.join(OPTIONS)}", repr(name))
        if not given:
            return self
        rest = dict(given)
        anchor = rest.pop("anchor", None)
        options = self.options.override(**rest)
        return dataclasses.replace(self, anchor=self.anchor if anchor is None else anchor, options=options, layers=None)

    def of(self, module: nn.Module, call: Given) -> Self:
        """The settings of one attention module in one call: general, layer, override and call; the last wins."""
        found = self
        if self.layers is not None:
            given = self._of_layer(module, self.layers)
            check_fixed(given.get("anchor"))
            found = found.override(given, "layers")
        held: Given | None = getattr(module, OVERRIDES, None)
        if held:
            found = found.override(held, "options")
        return found.override(call, "options") if call else found

    @staticmethod
    def _of_layer(module: nn.Module, layers: Layers) -> Given:
        index = getattr(module, "layer_idx", None)
        if index is None:
            return {}
        if not isinstance(layers, Mapping):
            return layers(index)
        config = getattr(module, "config", None)
        count = index + 1
        # Not max() of them, which torch.compile does not follow.
        for name in _COUNTS:
            layers_there = getattr(config, name, None)
            if isinstance(layers_there, int) and layers_there > count:
                count = layers_there
        unknown = [i for i in layers if i >= count]
        if unknown:
            required = f"hold indices of {type(module).__name__} among 0 to {count - 1}"
            raise ValueError(_validate.message("layers", required, unknown))
        return layers.get(index, {})


@contextmanager
def override(model: nn.Module, **options: Any) -> Iterator[None]:
    """A context in which all attention of a model has these options, also where it hands no arguments down.

    Args:
        model: the model, or a part of it.
        **options: anchor, solver, adjoint, impl, max_steps and on_failure, as in `register`.

    Raises:
        TypeError, ValueError: options that do not fit; for an unknown one the valid options are named.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from implicit_attention.integrations.transformers import attach, last_solves, override
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> model = attach(LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes)), anchor=0.9)
        >>> with override(model, max_steps=0):
        ...     logits = model(torch.randint(10, (1, 5))).logits
        >>> {int(solve.num_evals.max()) for solve in last_solves(model).values()}
        {0}

    Not for options that are to stay: give these to `attach`.
    """
    Settings().override(options, "options")
    check_fixed(options.get("anchor"))
    with marked(model, OVERRIDES, options):
        yield


@contextmanager
def marked(model: nn.Module, attribute: str, value: Any) -> Iterator[None]:
    """A context in which all modules of a model have this attribute; at its end they have what they had before."""
    before = [(module, getattr(module, attribute, None)) for module in model.modules()]
    for module, _ in before:
        setattr(module, attribute, value)
    try:
        yield
    finally:
        for module, held in before:
            if held is None:
                delattr(module, attribute)
            else:
                setattr(module, attribute, held)


def check_fixed(anchor: Any) -> None:
    """Refuse an anchor that requires a gradient where it is held beside the parameters of a model.

    No optimiser would train it, no file would hold it, and no engine would keep it alike on all ranks.
    """
    if isinstance(anchor, Tensor) and anchor.requires_grad:
        remedy = (
            "to train anchors, call learn_anchors(model) after attach, or hand a parameter of yours to each call, "
            "model(**inputs, anchor=parameter); to keep it fixed, pass anchor.detach()"
        )
        raise ValueError(_validate.message("anchor", "not require grad here", "a tensor that does", remedy))


def _check_mapping(argument: str, given: Any, required: str, example: str) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(_validate.message(argument, required, repr(given), f"for example {example}"))

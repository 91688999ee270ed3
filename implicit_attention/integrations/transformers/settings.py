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

#: Where the configuration of a model has its anchors, its solver, and both for layers that differ, by registered
#: name; saved with it.
ANCHORS, SOLVERS, LAYERS = "equilibrium_anchors", "equilibrium_solver", "equilibrium_layers"
#: Where a configuration says that all attention of its model knows by itself whether it is causal, so that no mask
#: needs to be written for that.
SAYS_CAUSAL = "equilibrium_says_causal"
#: Where an attention module keeps the settings of its model, by registered name.
SETTINGS = "_equilibrium_settings"
#: Where it keeps the options of an `override`, for all names.
OVERRIDES = "_equilibrium_options"
#: Where a configuration says that anchors are parameters, one per "head" or "layer", by registered name.
LEARNED = "equilibrium_learned"

_COUNTS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a registered attention.

    Args:
        anchor: in [0, 1]; 1 is softmax attention. A tensor has one for each head.
        options: how to solve for the equilibrium and how to differentiate it.
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
        for each in ({"anchor": anchor}, *(layers.values() if isinstance(layers, Mapping) else ())):
            check_fixed(each.get("anchor"))
        return settings

    def __post_init__(self) -> None:
        _validate.check_per_batch("anchor", self.anchor, low=0.0, high=1.0, remedy="parametrise it by a sigmoid")
        if isinstance(self.anchor, Tensor):
            received = f"shape {tuple(self.anchor.shape)}"
            _validate.require(self.anchor.ndim <= 1, "anchor", "be a number or one for each head", received)
        if self.layers is None or (not isinstance(self.layers, Mapping) and callable(self.layers)):
            return
        required = "be a dict from layer index to options, or a function of the index"
        _validate.check_instance("layers", self.layers, Mapping, required, "for example {3: {'anchor': 0.8}}")
        for index, options in self.layers.items():
            _validate.check_integer("layers", index, low=0, remedy="its keys are indices of layers")
            self.override(options, f"layers[{index}]")

    def override(self, changes: Given, argument: str) -> Self:
        """These settings with some replaced; another solver comes with its own `max_steps`."""
        _validate.check_instance(argument, changes, Mapping, "be a dict of options", "for example {'anchor': 0.8}")
        for name in changes:
            _validate.require(name in OPTIONS, argument, f"hold options among {', '.join(OPTIONS)}", repr(name))
        if not changes:
            return self
        rest = dict(changes)
        anchor = rest.pop("anchor", None)
        options = self.options.override(**rest)
        return dataclasses.replace(self, anchor=self.anchor if anchor is None else anchor, options=options, layers=None)

    def of(self, module: nn.Module, call: Given) -> Self:
        """The settings of one attention module in one call: general, layer, override and call; the last wins."""
        settings = self
        if self.layers is not None:
            options = self._of_layer(module, self.layers)
            check_fixed(options.get("anchor"))
            settings = settings.override(options, "layers")
        for changes in (getattr(module, OVERRIDES, None), call):
            settings = settings.override(changes, "options") if changes else settings
        return settings

    @staticmethod
    def _of_layer(module: nn.Module, layers: Layers) -> Given:
        index = getattr(module, "layer_idx", None)
        if index is None:
            return {}
        if not isinstance(layers, Mapping):
            return layers(index)
        config, count = getattr(module, "config", None), index + 1
        # Not max() of them, which torch.compile does not follow.
        for name in _COUNTS:
            number = getattr(config, name, None)
            if isinstance(number, int) and number > count:
                count = number
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
    """A context in which all modules of a model have this attribute; at its end they get their old ones back."""
    before = [(module, getattr(module, attribute, None)) for module in model.modules()]
    for module, _ in before:
        setattr(module, attribute, value)
    try:
        yield
    finally:
        for module, old in before:
            if old is None:
                delattr(module, attribute)
            else:
                setattr(module, attribute, old)


def check_fixed(anchor: Any) -> None:
    """Refuse an anchor that requires a gradient where it is kept beside the parameters of a model.

    No optimiser would train it, no file would have it, and no engine would keep it alike on all ranks.
    """
    if isinstance(anchor, Tensor) and anchor.requires_grad:
        remedy = (
            "to train anchors, call learn_anchors(model) after attach, or hand a parameter of yours to each call, "
            "model(**inputs, anchor=parameter); to keep it fixed, pass anchor.detach()"
        )
        raise ValueError(_validate.message("anchor", "not require grad here", "a tensor that does", remedy))

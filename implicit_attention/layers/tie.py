"""`tie`: layers of a pretrained model, composed, as the block of an equilibrium."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from .. import _validate
from .block import Equilibrium
from .calls import TieKeywords
from .slots import find_cache
from .tied_call import EVERY, StepTokens, TiedCall, TokenEquilibrium, absent_tokens, injection


class Composed(nn.Module):
    """One step of tied layers: z <- layers(z + W x), with W = 0 at first.

    Attributes:
        layers: applied in turn, with the weights that they had.
        inject: W.
    """

    def __init__(self, layers: list[nn.Module], dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.inject = injection(dim, next(layers[0].parameters()))

    def forward(
        self,
        z: Tensor,
        x: Tensor,
        args: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
        tokens: StepTokens = EVERY,
    ) -> Tensor:
        tokens.enter(z)
        h: Tensor = z + self.inject(x)
        for layer in self.layers:
            output = layer(h, *args, **(options or {}))
            h = output[0] if isinstance(output, tuple) else output
        left: Tensor = tokens.leave(h)
        return left


class TiedLayers(nn.Module):
    """The module that replaces tied layers in their model, and is called as one of them."""

    def __init__(self, equilibrium: TokenEquilibrium) -> None:
        super().__init__()
        self.equilibrium = equilibrium
        first: Any = equilibrium.block.layers
        #: The names of the arguments of a layer behind the hidden states, which some models pass by their places.
        self.names = tuple(inspect.signature(first[0].forward).parameters)[1:]

    def forward(self, hidden: Tensor, *args: Any, **options: Any) -> Tensor:
        for name in ("output_attentions", "output_hidden_states"):
            remedy = "ask the layers that are kept outside"
            _validate.require(not options.get(name), name, "be False in a model with tied layers", True, remedy)
        cache = find_cache(args, options)
        mask = {**dict(zip(self.names, args, strict=False)), **options}.get("attention_mask")
        absent = absent_tokens(mask, hidden, cache, self.equilibrium.block)

        def with_slots(slots: Any) -> tuple[Any, ...]:
            def swapped(value: Any) -> Any:
                return slots if cache is not None and value is cache else value

            return tuple(map(swapped, args)), {name: swapped(value) for name, value in options.items()}

        state: Tensor = self.equilibrium.settled(hidden, TiedCall(cache, absent), with_slots)
        return state

    def __getattr__(self, name: str) -> Any:
        # Models read settings of their layers, such as the kind of a layer's attention.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "equilibrium" not in self._modules:
                raise
            first: Any = self.equilibrium.block.layers
            return getattr(first[0], name)


def tie(
    model: nn.Module,
    layers: str = "model.layers",
    *,
    keep: int | tuple[int, int] = 0,
    dim: int | None = None,
    causal: bool | None = None,
    **options: Unpack[TieKeywords],
) -> Equilibrium:
    """Make consecutive layers of a model the block of an equilibrium, in place and with their weights.

    The layers, composed, are one step z <- layers(z + W x) of a state that starts at their input x, with a learned W
    that is 0 at first: one step (`steps=1`) is the model as it was. More steps, and a solve, are another model, which
    is to be trained from there: nothing says that the answers of a pretrained model are fixed points of its layers.
    Layers that only add to their input (Llama, GPT-2) have no norm that keeps the state bounded, and settle slowly
    before training.

    Args:
        model: a model of transformers, an `nn.TransformerEncoder`, or another one whose layers lie in an
            `nn.ModuleList` and are called in turn, with the hidden states first and the same further arguments.
        layers: where that list is, as an attribute path: "model.layers" (Llama and its kin), "transformer.h" (GPT-2),
            "bert.encoder.layer" (BERT), "layers" (`nn.TransformerEncoder`).
        keep: how many layers at the beginning and at the end stay as they are, outside: one number for both ends, or
            (at the beginning, at the end).
        dim: width of the hidden states; None reads it off models of transformers and of torch.
        causal: whether no token reads later ones; None reads `is_causal` of the layers' attention. A mask by which
            tokens read later ones, as in a bidirectional prefix, needs False.
        **options: `solver`, `adjoint`, `steps` and `on_failure`, as of `Equilibrium`.

    Returns:
        The `Equilibrium`, a part of the model now: its `last_solve` says how the last call went, its `steps` may be
        set. W is a new parameter for an optimizer.

    Raises:
        TypeError, ValueError: a path that leads to no layers, layers of different kinds, too few of them.

    Caches: those of transformers hold the keys of the settled states, one slot for each layer of the block, whatever
    the number of evaluations; a call costs at most one evaluation more. A call that raises leaves them as they were.
    `generate` gives the tokens of `use_cache=False` as far as the tolerance of the solve decides them, and those of the
    model as it was for one step. With two steps or more it needs `use_cache=False`. Quantized and offloaded caches and
    those of encoders with decoders are refused.

    Tokens that do not exist (left padding) are 0, take no part and get no gradient. A token that is not finite makes
    those NaN that may read it: with `causal` those after it, else its sample.

    Gradients: to all parameters, by the adjoint or through the steps. None flows into tokens that a cache holds: the
    backward pass of a call beside such a cache raises.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from implicit_attention import tie
        >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True, dropout=0.0), 4)
        >>> x = torch.randn(2, 5, 8)
        >>> before = encoder(x)
        >>> equilibrium = tie(encoder, "layers", keep=1, steps=1)
        >>> len(encoder.layers), torch.allclose(encoder(x), before, atol=1e-6)
        (3, True)

    Not for making a pretrained model better without training: a fixed point of its layers is none of its answers. Not
    for equilibria of single attentions: see `integrations`.
    """
    parent, name, listed = _list_of_layers(model, layers)
    first, last = _kept(keep, len(listed))
    tied = list(listed)[first : len(listed) - last]
    _check_alike(tied)
    if causal is None:
        causal = all(any(getattr(part, "is_causal", None) is True for part in layer.modules()) for layer in tied)
    _validate.check_instance("causal", causal, bool, "be True, False or None")
    equilibrium = TokenEquilibrium(Composed(tied, _width(model, tied[0], dim)), causal=causal, **options)
    equilibrium.train(tied[0].training)
    outside = [*list(listed)[:first], TiedLayers(equilibrium), *list(listed)[len(listed) - last :]]
    setattr(parent, name, nn.ModuleList(outside))
    if isinstance(parent, nn.TransformerEncoder):
        # Its own fast path would hand nested tensors to the layers.
        parent.use_nested_tensor = False
    return equilibrium


def _list_of_layers(model: Any, path: Any) -> tuple[Any, str, nn.ModuleList]:
    """The list of layers, with its owner and the name of its attribute there."""
    _validate.check_instance("model", model, nn.Module, "be an nn.Module")
    if not isinstance(path, str):
        raise TypeError(_validate.message("layers", "be an attribute path", repr(path), "for example 'model.layers'"))
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    remedy = f"this model has lists at {', '.join(map(repr, lists))}" if lists else "this model has none"
    *before, name = path.split(".")
    try:
        parent = functools.reduce(getattr, before, model)
        listed = getattr(parent, name)
    except AttributeError:
        received = f"{path!r}, which the model has not"
        raise ValueError(_validate.message("layers", "lead to an nn.ModuleList", received, remedy)) from None
    if not isinstance(listed, nn.ModuleList):
        raise TypeError(_validate.message("layers", "lead to an nn.ModuleList", type(listed).__name__, remedy))
    return parent, name, listed


def _kept(keep: Any, count: int) -> tuple[int, int]:
    ends = keep if isinstance(keep, tuple) else (keep, keep)
    _validate.require(len(ends) == 2, "keep", "be a number, or two: at the beginning and at the end", repr(keep))
    first, last = (_validate.check_integer("keep", end, low=0) for end in ends)
    _validate.require(first + last < count, "keep", f"leave at least one of the {count} layers to tie", repr(keep))
    return first, last


def _check_alike(layers: list[nn.Module]) -> None:
    """Raise unless one call can serve all layers: a model chooses its arguments by settings that must be the same."""
    for layer in layers:
        same = type(layer) is type(layers[0])
        _validate.require(same, "layers", f"all be {type(layers[0]).__name__}", type(layer).__name__, "use keep")
        _validate.require(not isinstance(layer, TiedLayers), "layers", "not be tied already", "a tied layer")
        for name in ("attention_type", "layer_type", "is_sliding", "sliding_window"):
            of_first, of_this = (getattr(one, name, None) for one in (layers[0], layer))
            fits = of_first == of_this
            _validate.require(fits, "layers", f"have one {name} ({of_first!r})", repr(of_this), "use keep")
    if isinstance(layers[0], nn.TransformerEncoderLayer):
        first = layers[0].self_attn.batch_first
        _validate.require(first, "model", "number samples on its first axis", "batch_first=False", "build it with True")


def _width(model: nn.Module, layer: nn.Module, dim: int | None) -> int:
    if dim is None:
        dim = getattr(getattr(model, "config", None), "hidden_size", None)
        if isinstance(layer, nn.TransformerEncoderLayer):
            dim = layer.linear1.in_features
        remedy = "pass the width of the hidden states"
        _validate.require(isinstance(dim, int), "dim", "be given for a model that does not tell it", "None", remedy)
    width: int = _validate.check_integer("dim", dim, low=1)
    return width

"""The state and the arguments of a block: their structure, and the tensors that a solver sees of them."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _validate
from .._torch import at_least_single, state_dtype
from ..problem import PerSample, Shared, counted

Start: TypeAlias = Literal["zeros", "input", "random"] | Any


#: The structure of one tensor.
_ONE = pytree.tree_structure(0)


class StateLayout(NamedTuple):
    """The structure of a state, and how it is one tensor for a solver.

    A single tensor stays as it is, (*lead, *event). The tensors of a tuple or dict become one vector per sample, side
    by side, (*lead, n).

    Attributes:
        spec: the structure, as torch's pytrees have it.
        events: the shape of each tensor of one sample.
        lead: the axes that number samples.
        dtypes, device: of the tensors of the state.
        single: whether the state is one tensor.
    """

    spec: pytree.TreeSpec
    events: tuple[torch.Size, ...]
    lead: torch.Size
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    single: bool

    @classmethod
    def of(cls, state: Any, event_ndim: int | None) -> StateLayout:
        """The layout of a state, or an error about the object that is no state."""
        leaves, spec = ([state], _ONE) if isinstance(state, Tensor) else pytree.tree_flatten(state)
        if not leaves:
            raise ValueError(_validate.message("start", "hold at least one tensor", repr(state)))
        for leaf in leaves:
            _check_leaf("start", leaf)
        first = leaves[0]
        if event_ndim is None:
            required, remedy = "have at least 2 axes, samples first", "a state that is one sample: event_ndim=1"
            _validate.require(first.ndim > 1, "start", required, f"shape {tuple(first.shape)}", remedy)
            event_ndim = first.ndim - 1
        required = f"have at least event_ndim = {event_ndim} axes"
        _validate.require(first.ndim >= event_ndim, "start", required, f"shape {tuple(first.shape)}")
        lead = first.shape[: first.ndim - event_ndim]
        for leaf in leaves[1:]:
            required = f"have tensors of one device ({first.device})"
            _validate.require(leaf.device == first.device, "start", required, leaf.device, "move them with .to()")
            required = f"have tensors whose first axes are {tuple(lead)}, one entry a sample"
            _validate.require(leaf.shape[: len(lead)] == lead, "start", required, f"shape {tuple(leaf.shape)}")
        events = tuple(leaf.shape[len(lead) :] for leaf in leaves)
        return cls(spec, events, lead, tuple(leaf.dtype for leaf in leaves), first.device, spec.is_leaf())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the solver's tensor: the widest of the state, and at least float32."""
        return functools.reduce(torch.promote_types, self.dtypes, torch.float32)

    def widened(self) -> StateLayout:
        """The same layout of states in float32 where they have half precision."""
        return self._replace(dtypes=tuple(map(state_dtype, self.dtypes)))

    @property
    def event_ndim(self) -> int:
        """The number of axes of the solver's tensor that are one sample."""
        return len(self.events[0]) if self.single else 1

    def pack(self, state: Any) -> Tensor:
        """The solver's tensor of a state."""
        if self.single:
            tensor: Tensor = at_least_single(state)
            return tensor
        leaves = pytree.tree_leaves(state)
        return torch.cat([_flat(t, event).to(self.dtype) for t, event in zip(leaves, self.events, strict=True)], dim=-1)

    def unpack(self, z: Tensor) -> Any:
        """The inverse of `pack`; z may have fewer samples."""
        if self.single:
            return z if z.dtype == self.dtypes[0] else z.to(self.dtypes[0])
        parts = zip(torch.split(z, list(map(math.prod, self.events)), dim=-1), self.events, self.dtypes, strict=True)
        leaves = [part.reshape(*z.shape[:-1], *event).to(dtype) for part, event, dtype in parts]
        return pytree.tree_unflatten(leaves, self.spec)

    def check_output(self, name: str, result: Any, before: Any, *, cast: bool) -> Any:
        """Return the block's output for `before`, in its dtype where autocast chose another (`cast`), or raise."""
        if self.single and is_like(result, before):
            return result
        name, required = f"block {name}", f"return the structure of its state, {_shown(self.spec)}"
        remedy = "return the next state alone"
        try:
            leaves = self.spec.flatten_up_to(result)
        except (ValueError, TypeError):
            received = _shown(pytree.tree_structure(result))
            raise TypeError(_validate.message(name, required, received, remedy)) from None
        olds = pytree.tree_leaves(before)
        for leaf, old in zip(leaves, olds, strict=True):
            if not isinstance(leaf, Tensor):
                received = f"a {type(leaf).__name__} in the place of a tensor"
                raise TypeError(_validate.message(name, required, received, remedy))
            for kind in ("shape", "device", "dtype"):
                new, expected = getattr(leaf, kind), getattr(old, kind)
                if new == expected or (kind == "dtype" and cast and leaf.is_floating_point()):
                    continue
                remedy = "convert what it returns with .to()" if kind == "dtype" else ""
                required = f"return the {kind} of its state ({expected})"
                raise ValueError(_validate.message(name, required, new, remedy))
        leaves = [leaf.to(old.dtype) for leaf, old in zip(leaves, olds, strict=True)]
        return pytree.tree_unflatten(leaves, self.spec)

    def finite(self, state: Any) -> Tensor:
        """Which samples have finite numbers alone, (*lead)."""
        leaves = zip(pytree.tree_leaves(state), self.events, strict=True)
        parts = (_flat(tensor, event).isfinite().all(-1) for tensor, event in leaves)
        return functools.reduce(torch.logical_and, parts)


def _check_leaf(argument: str, leaf: Any) -> None:
    """Raise unless a part of a state is a dense floating-point tensor."""
    if not isinstance(leaf, Tensor):
        required = "be a tensor, or a tuple, list or dict of tensors"
        raise TypeError(_validate.message(argument, required, type(leaf).__name__))
    _validate.check_float_tensor(argument, leaf)


def _flat(tensor: Tensor, event: torch.Size) -> Tensor:
    return tensor.reshape(*tensor.shape[: tensor.ndim - len(event)], math.prod(event))


def _shown(spec: pytree.TreeSpec) -> str:
    if spec.is_leaf():
        return "one tensor"
    return str(pytree.tree_unflatten(["*"] * spec.num_leaves, spec)).replace("'*'", "tensor")


def structure(state: Any) -> str:
    """The structure of a state with the shapes of its tensors."""
    return str(pytree.tree_map(lambda leaf: tuple(getattr(leaf, "shape", ())), state))


# Starts.


class StoredStart(nn.Module):
    """A state to start from, as buffers or parameters of the layer."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        leaves, spec = pytree.tree_flatten(state)
        # The structure with a number for each tensor: a `TreeSpec` cannot be copied without a warning.
        self.numbered = pytree.tree_unflatten(list(range(len(leaves))), spec)
        for i, leaf in enumerate(leaves):
            _check_leaf("start", leaf)
            if isinstance(leaf, nn.Parameter):
                self.register_parameter(str(i), leaf)
            else:
                self.register_buffer(str(i), leaf.detach().clone())

    def forward(self) -> Any:
        return pytree.tree_map(lambda i: getattr(self, str(i)), self.numbered)


def check_word(start: str) -> None:
    """Raise unless `start` is one of the words for a start."""
    _validate.check_choice("start", start, ("zeros", "input", "random"))


def initial_state(start: Start, x: Any, event_ndim: int | None) -> Any:
    """The state that a solve for the input x starts from."""
    if not isinstance(start, str):
        return _for_samples(start() if isinstance(start, StoredStart) else start, x, event_ndim)
    check_word(start)
    for leaf in (x,) if isinstance(x, Tensor) else pytree.tree_leaves(x):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            received = str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__
            required = f"be a tensor, or a tuple or dict of tensors, with start={start!r}"
            remedy = "pass the state to start from as `start`"
            raise TypeError(_validate.message("x", f"{required}, of a floating-point dtype", received, remedy))
    make: Any = {"zeros": torch.zeros_like, "input": torch.clone, "random": torch.randn_like}[start]
    return make(x) if isinstance(x, Tensor) else pytree.tree_map(make, x)


def _for_samples(state: Any, x: Any, event_ndim: int | None) -> Any:
    """The state for each sample of x; if its first tensor has the axes of one sample, it is expanded to all of them."""
    first, like = (next(iter(pytree.tree_leaves(tree)), None) for tree in (state, x))
    if not isinstance(first, Tensor) or not isinstance(like, Tensor):
        return state
    event_ndim = max(like.ndim - 1, 0) if event_ndim is None else event_ndim
    if first.ndim != event_ndim or like.ndim <= event_ndim:
        return state
    lead, event = like.shape[: like.ndim - event_ndim], like.shape[like.ndim - event_ndim :]

    def expanded(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        own = leaf.shape
        if leaf.ndim == event_ndim:
            own = torch.Size(b if a == 1 else a for a, b in zip(own, event, strict=True))
        return leaf.expand(*lead, *own)

    return pytree.tree_map(expanded, state)


# Arguments.

#: Arguments that hold no others, as None does not.
_LEAVES = (Tensor, bool, int, float, str)


class Frame(NamedTuple):
    """Arguments without their tensors: the other arguments in their places, and the places of the tensors.

    spec: the structure of the arguments; None where each is a tensor, a number, a text or None.
    """

    spec: pytree.TreeSpec | None
    others: tuple[Any, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, x: Any, args: tuple[Any, ...], layout: StateLayout) -> tuple[Frame, tuple[PerSample | Shared, ...]]:
        """The frame of (x, *args), and their tensors, each of them wrapped in its kind."""
        arguments = (x, *args)
        leaves, wrappers = list(map(_unwrapped, arguments)), [_wrapper(argument) for argument in arguments]
        spec, of_x = None, 1
        if not all(leaf is None or isinstance(leaf, _LEAVES) for leaf in leaves):
            leaves, spec = pytree.tree_flatten(pytree.tree_map(_unwrapped, arguments))
            wrappers = pytree.tree_leaves(pytree.tree_map(_wrappers, arguments))
            of_x = len(pytree.tree_leaves(pytree.tree_map(_unwrapped, x)))
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        tensors = tuple((wrappers[i] or _kind(leaves[i], layout, i < of_x))(counted(leaves[i])) for i in places)
        return cls(spec, tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves), places), tensors

    @property
    def flat(self) -> bool:
        """Whether no argument holds others."""
        return self.spec is None

    def filled(self, tensors: tuple[Tensor, ...]) -> Any:
        """The arguments with these tensors."""
        leaves = list(self.others)
        for i, tensor in zip(self.places, tensors, strict=True):
            leaves[i] = tensor
        return tuple(leaves) if self.spec is None else pytree.tree_unflatten(leaves, self.spec)


def widened(leaf: Any) -> Any:
    """A tensor, wrapped or not, in float32 where it has half precision."""
    if isinstance(leaf, PerSample | Shared):
        return type(leaf)(pytree.tree_map(at_least_single, leaf.value))
    return at_least_single(leaf)


def _unwrapped(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, PerSample | Shared) else leaf


def _wrapper(argument: Any) -> type[PerSample | Shared] | None:
    return type(argument) if isinstance(argument, PerSample | Shared) else None


def _wrappers(leaf: Any) -> Any:
    """The class of the wrapper in the place of each leaf inside one; None for a leaf without a wrapper."""
    wrapper = _wrapper(leaf)
    return None if wrapper is None else pytree.tree_map(lambda _: wrapper, leaf.value)


def _kind(tensor: Tensor, layout: StateLayout, is_x: bool) -> type[PerSample] | type[Shared]:
    """The kind of a tensor without a wrapper by its first axes."""
    lead, event = layout.lead, layout.events[0]
    if not lead or tensor.shape[: len(lead)] != lead:
        return Shared
    # With as many samples as tokens (N, N) looks like (B, N). A tensor that is not floating-point is only ever left out
    # of the work, which is tried before.
    unclear = event[:1] == lead[-1:] and tensor.is_floating_point() and not is_x
    return Shared if unclear else PerSample


def is_like(result: Any, z: Tensor) -> bool:
    """Whether the result of a map is a plain tensor of the kind of its state."""
    if type(result) is not Tensor:
        return False
    return result.shape == z.shape and result.dtype == z.dtype and result.device == z.device

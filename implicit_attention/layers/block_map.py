"""A block z = block(z, x, *args) as the map of one tensor that solvers iterate."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import Self

from .. import _validate
from .._autograd import same, transforms_active
from ..fixed_point_map import FixedPointMap, PerSample, Shared
from ..problem import counted_copy, writes_to
from ..solvers._rows import stay_where
from ..status import Status


class StateLayout(NamedTuple):
    """The structure of a state, and how it is one tensor for a solver.

    A single tensor stays as it is, (*lead, *event). The tensors of a tuple or dict become one vector per sample, side
    by side, (*lead, n).

    Attributes:
        spec: the structure, as torch's pytrees have it.
        events: the shape of each tensor of one sample.
        lead: the axes that number samples.
        dtype, device: of all tensors of the state.
    """

    spec: pytree.TreeSpec
    events: tuple[torch.Size, ...]
    lead: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, state: Any, event_ndim: int | None) -> StateLayout:
        """The layout of a state, or an error that says why it is none."""
        leaves, spec = pytree.tree_flatten(state)
        if not leaves:
            raise ValueError(_validate.message("start", "hold at least one tensor", repr(state)))
        for leaf in leaves:
            check_leaf("start", leaf)
        first = leaves[0]
        if event_ndim is None:
            required, remedy = "have at least 2 axes, samples first", "a state that is one sample: event_ndim=1"
            _validate.require(first.ndim > 1, "start", required, f"shape {tuple(first.shape)}", remedy)
            event_ndim = first.ndim - 1
        required = f"have at least event_ndim = {event_ndim} axes"
        _validate.require(first.ndim >= event_ndim, "start", required, f"shape {tuple(first.shape)}")
        lead = first.shape[: first.ndim - event_ndim]
        for leaf in leaves[1:]:
            for what in ("dtype", "device"):
                fits = getattr(leaf, what) == getattr(first, what)
                required = f"have tensors of one {what} ({getattr(first, what)})"
                _validate.require(fits, "start", required, getattr(leaf, what), "convert them with .to()")
            required = f"have tensors whose first axes are {tuple(lead)}, one entry a sample"
            _validate.require(leaf.shape[: len(lead)] == lead, "start", required, f"shape {tuple(leaf.shape)}")
        return cls(spec, tuple(leaf.shape[len(lead) :] for leaf in leaves), lead, first.dtype, first.device)

    @property
    def single(self) -> bool:
        """Whether the state is one tensor."""
        return self.spec.is_leaf()

    @property
    def event_ndim(self) -> int:
        """Return the number of axes of the solver's tensor that are one sample."""
        return len(self.events[0]) if self.single else 1

    def pack(self, state: Any) -> Tensor:
        """The solver's tensor of a state."""
        if self.single:
            tensor: Tensor = state
            return tensor
        leaves = pytree.tree_leaves(state)
        return torch.cat([_flat(t, event) for t, event in zip(leaves, self.events, strict=True)], dim=-1)

    def unpack(self, z: Tensor) -> Any:
        """The state that `pack` made a tensor of; of as many samples as there are."""
        if self.single:
            return z
        parts = torch.split(z, [math.prod(event) for event in self.events], dim=-1)
        leaves = [part.reshape(*z.shape[:-1], *event) for part, event in zip(parts, self.events, strict=True)]
        return pytree.tree_unflatten(leaves, self.spec)

    def check_output(self, name: str, result: Any, before: Any, *, cast: bool) -> Any:
        """Return the block's output for `before`, in its dtype where autocast chose another (`cast`), or raise."""
        if self.single and isinstance(result, Tensor) and _same_kind(result, before):
            return result
        name = f"block {name}"
        try:
            leaves = self.spec.flatten_up_to(result)
        except (ValueError, TypeError):
            required, remedy = f"return the structure of its state, {_told(self.spec)}", "return the next state alone"
            raise TypeError(_validate.message(name, required, _told(pytree.tree_structure(result)), remedy)) from None
        changed, olds = False, pytree.tree_leaves(before)
        for leaf, old in zip(leaves, olds, strict=True):
            if not isinstance(leaf, Tensor):
                required = f"return the structure of its state, {_told(self.spec)}"
                received = f"a {type(leaf).__name__} in the place of a tensor"
                raise TypeError(_validate.message(name, required, received, "return the next state alone"))
            for what, remedy in (("shape", ""), ("device", ""), ("dtype", "convert what it returns with .to()")):
                new, expected = getattr(leaf, what), getattr(old, what)
                if new == expected:
                    continue
                if what == "dtype" and cast and leaf.is_floating_point():
                    changed = True
                    continue
                required = f"return the {what} of its state ({expected})"
                raise ValueError(_validate.message(name, required, new, remedy))
        if changed:
            leaves = [leaf.to(old.dtype) for leaf, old in zip(leaves, olds, strict=True)]
        return result if self.single and not changed else pytree.tree_unflatten(leaves, self.spec)

    def per_sample(self, function: Callable[[Tensor], Tensor], state: Any) -> Tensor:
        """A boolean of each entry of a state, over all entries of a sample, (*lead)."""
        leaves = zip(pytree.tree_leaves(state), self.events, strict=True)
        parts = [function(_flat(tensor, event)).all(-1) for tensor, event in leaves]
        return parts[0] if len(parts) == 1 else torch.stack(parts).all(0)


def _same_kind(new: Tensor, old: Tensor) -> bool:
    return new.shape == old.shape and new.dtype == old.dtype and new.device == old.device


def check_leaf(argument: str, leaf: Any) -> None:
    """A dense floating-point tensor, as a part of a state."""
    if not isinstance(leaf, Tensor):
        required = "be a tensor, or a tuple, list or dict of tensors"
        raise TypeError(_validate.message(argument, required, type(leaf).__name__))
    _validate.check_float_tensor(argument, leaf)


def _flat(tensor: Tensor, event: torch.Size) -> Tensor:
    return tensor.reshape(*tensor.shape[: tensor.ndim - len(event)], math.prod(event))


def _told(spec: pytree.TreeSpec) -> str:
    if spec.is_leaf():
        return "one tensor"
    return str(pytree.tree_unflatten(["*"] * spec.num_leaves, spec)).replace("'*'", "tensor")


class DrawsNumbers(Exception):
    """A block that was taken for a function draws random numbers: solve again, with the numbers held."""


class Draws:
    """The random numbers of a block, which are the same at every evaluation of one call, its backward pass included.

    Whether the block draws any is found out at the first evaluation, after which the generators of torch (of the CPU
    and of the state's device) have moved or not. As torch.utils.checkpoint does, every later evaluation starts them
    where the first one did. Generators of one's own, of numpy or of Python are not seen.

    Args:
        device: of the state.
        held: whether it is known that the block draws.
        told: raise `DrawsNumbers` at the first evaluation of a block that was not known to draw.
    """

    def __init__(self, device: torch.device, *, held: bool, told: bool) -> None:
        self.device, self.told = device, told
        self.watching = not held
        self.before = _generators(device) if held else None
        self.after: list[Tensor] | None = None

    @property
    def held(self) -> bool:
        """Whether numbers are drawn, the same ones at each evaluation."""
        return self.before is not None

    def evaluate(self, function: Callable[..., Any], *given: Any) -> Any:
        """function(*given) with the numbers of this call."""
        if torch.compiler.is_compiling():
            return function(*given)
        if self.watching:
            before = _generators(self.device)
            result = function(*given)
            after = _generators(self.device)
            self.watching = False
            if not all(torch.equal(old, new) for old, new in zip(before, after, strict=True)):
                self.before, self.after = before, after
                if self.told:
                    raise DrawsNumbers
            return result
        if self.before is None:
            return function(*given)
        with _generators_kept(self.device):
            _set_generators(self.device, self.before)
            result = function(*given)
            if self.after is None:
                self.after = _generators(self.device)
        return result

    def restart(self) -> None:
        """Leave the generators where they were before the first evaluation."""
        if self.before is not None:
            _set_generators(self.device, self.before)

    def finish(self) -> None:
        """Leave the generators where one evaluation leaves them, so that the next call draws other numbers."""
        if self.after is not None:
            _set_generators(self.device, self.after)


def _accelerated(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta")


def _generators(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if _accelerated(device):
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def _set_generators(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if _accelerated(device):
        torch.get_device_module(device).set_rng_state(states[1], device)


@contextlib.contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    kept = _generators(device)
    try:
        yield
    finally:
        _set_generators(device, kept)


class Frame(NamedTuple):
    """Arguments without their tensors: the others, in their places, and where the tensors belong."""

    spec: pytree.TreeSpec
    others: tuple[Any, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, x: Any, args: tuple[Any, ...], layout: StateLayout) -> tuple[Frame, tuple[PerSample | Shared, ...]]:
        """The frame of (x, *args), and their tensors, each told to be per sample or shared."""
        arguments = (x, *args)
        leaves, spec = pytree.tree_flatten(pytree.tree_map(_unwrapped, arguments))
        told = pytree.tree_leaves(pytree.tree_map(_kinds, arguments))
        own = len(pytree.tree_leaves(pytree.tree_map(_unwrapped, x)))
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        kinds = [told[i] if told[i] in (PerSample, Shared) else _kind(leaves[i], layout, i < own) for i in places]
        others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(spec, others, places), tuple(kind(leaves[i]) for kind, i in zip(kinds, places, strict=True))

    def filled(self, tensors: tuple[Tensor, ...]) -> Any:
        """The arguments with these tensors."""
        leaves = list(self.others)
        for i, tensor in zip(self.places, tensors, strict=True):
            leaves[i] = tensor
        return pytree.tree_unflatten(leaves, self.spec)


def _unwrapped(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, PerSample | Shared) else leaf


def _kinds(leaf: Any) -> Any:
    """Return the wrapper's class for each leaf inside one, `object` for others."""
    return pytree.tree_map(lambda _: type(leaf), leaf.value) if isinstance(leaf, PerSample | Shared) else object


def _kind(tensor: Tensor, layout: StateLayout, is_x: bool) -> type[PerSample] | type[Shared]:
    """Whether a tensor that is not wrapped has an entry for each sample: its first axes tell."""
    lead, event = layout.lead, layout.events[0]
    if not lead or tensor.shape[: len(lead)] != lead:
        return Shared
    # With as many samples as tokens, (N, N) is told from (B, N) by nobody. What is not floating-point is only ever left
    # out of the work, which is tried before.
    unclear = event[:1] == lead[-1:] and tensor.is_floating_point() and not is_x
    return Shared if unclear else PerSample


class BlockMap(nn.Module):
    """f(z, *tensors) of one tensor z: the state is unpacked, and the arguments are put in their places.

    Args:
        block: z, x, *args -> z.
        layout: of the state.
        frame: of (x, *args), whose tensors are arguments of the map.
        autocast: the dtype in which autocast runs the block, or None.
        draws: the random numbers of the call.
    """

    def __init__(
        self, block: nn.Module, layout: StateLayout, frame: Frame, autocast: torch.dtype | None, draws: Draws
    ) -> None:
        super().__init__()
        self.block, self.layout, self.frame, self.autocast, self.draws = block, layout, frame, autocast, draws
        self.__name__ = type(block).__name__
        #: Whether the block was evaluated, which copies of this module know too.
        self.evaluated: list[bool] = []

    def forward(self, z: Tensor, *tensors: Tensor) -> Tensor:
        """The map in a solve, where the precision of the surroundings is exact."""
        if self.autocast is None:
            precision: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        else:
            # A weight that is cast without a graph, and kept, would have none where one is asked for.
            precision = torch.autocast(z.device.type, self.autocast, cache_enabled=False)
        with precision:
            return self.layout.pack(self.step(self.layout.unpack(z), self.frame.filled(tensors)))

    def step(self, state: Any, arguments: tuple[Any, ...]) -> Any:
        """The next state for (x, *args), in the precision of the surroundings."""
        result = self._kept(state, arguments)
        return self.layout.check_output(self.__name__, result, state, cast=self.autocast is not None)

    def _kept(self, state: Any, arguments: tuple[Any, ...]) -> Any:
        """Return the block's output, or raise where it writes to its arguments; at first those are copies."""
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return self.draws.evaluate(self.block, state, *arguments)
        own = pytree.tree_map_only(Tensor, lambda t: t, (state, arguments))
        first = not self.evaluated
        given = pytree.tree_map_only(Tensor, counted_copy, own) if first else own
        pairs = [
            (what, old, new, writes_to(new))
            for what, olds, news in zip(("state", "arguments"), own, given, strict=True)
            for old, new in zip(pytree.tree_leaves(olds), pytree.tree_leaves(news), strict=True)
            if isinstance(new, Tensor)
        ]
        result = self.draws.evaluate(self.block, given[0], *given[1])
        for what, old, new, before in pairs:
            # What is written past torch (by numpy, through `.data`) is not counted.
            visible = first and new.device.type == "cpu" and not transforms_active()
            if writes_to(new) != before or (visible and not same(new, old)):
                required, received = f"leave its {what} as they are", f"a block that works on its {what} in place"
                if what == "state":
                    required, received = "leave its state as it is", "a map that works on it in place"
                remedy = "use operations that are not in place (nn.ReLU(), not inplace=True), or clone what it changes"
                raise ValueError(_validate.message(self.__name__, required, received, remedy))
        if first:
            self.evaluated.append(True)
        return result


#: What helps a block that failed, and what is to be held against the loop that it was trained as.
TRAINED = (
    "train it with numbers of steps that are drawn (steps=range(a, b)), or hold Anderson(history=1) against the loop "
    "first: it may settle elsewhere"
)
LEVERS = {
    Status.MAX_STEPS: "raise max_steps, ",
    Status.STALLED: "use a larger rtol or a wider dtype, ",
    Status.DIVERGED: "",
}


class BlockProblem(FixedPointMap):
    """The fixed points of a `BlockMap`. That it reads nothing undeclared is asked once per layer and mode."""

    if_random = (
        "numbers that come from numpy or a Generator of its own cannot be held: draw them from torch's default "
        "generators, which are held for a call, or call eval()"
    )

    def __init__(self, function: BlockMap, *inputs: Any, event_ndim: int, asked: set[tuple[bool, str]]) -> None:
        super().__init__(function, *inputs, event_ndim=event_ndim)
        self.asked, self.mode, self.draws = asked, function.block.training, function.draws

    def select(self, index: Tensor) -> Self | None:
        # Of fewer samples the block would draw other numbers.
        return None if self.draws.held else super().select(index)

    def advice(self, remedies: Mapping[Status, str]) -> dict[Status, str]:
        # An accelerated method may settle elsewhere than the loop that the block was trained as.
        told = super().advice(remedies)
        return told | {status: f"{levers}{TRAINED}" for status, levers in LEVERS.items() if status in told}

    @torch.no_grad()
    def check_axes(self, z: Tensor) -> None:
        """Raise where an axis of several that are to number samples mixes them: one moves, and others follow."""
        lead = z.shape[: z.ndim - self.event_ndim]
        known = (self.mode, f"{len(lead)} axes")
        if len(lead) < 2 or z.numel() == 0 or known in self.asked or transforms_active():
            return
        mapped = self.apart().fixed_point_map(z)
        for axis, count in enumerate(lead):
            at = torch.arange(count, device=z.device) < (count + 1) // 2
            moved = at.reshape((count, *(1,) * (len(lead) - axis - 1))).expand(lead)
            if count > 1 and not stay_where(self, moved, ~moved, z, mapped):
                required = f"leave to the samples what their entries read of each other along axis {axis} of the state"
                received = f"event_ndim={self.event_ndim} for the shape {tuple(z.shape)}"
                remedy = f"pass event_ndim={z.ndim - axis}, or leave it out for all axes but the first"
                raise ValueError(_validate.message("event_ndim", required, received, remedy))
        self.asked.add(known)

    def check_undeclared(self, z: Tensor) -> None:
        # What the block closes over may have come to require grad since.
        known = (self.mode, self._read_by())
        if known not in self.asked or transforms_active():
            super().check_undeclared(z)
            self.asked.add(known)

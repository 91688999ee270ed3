"""The map of an `Equilibrium`: its block as a function of one tensor, and the problem of its fixed points."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import Self

from .. import _validate
from .._torch import HALF, at_least_single, is_exporting, length, same, transforms_active
from ..problem import FixedPointMap, Problem, closed_over, counted, parts_of, takes_statistics, writes_to
from ..solution import Status
from ..solvers.loop import flat, unflat
from .block_state import Frame, StateLayout


class BlockMap(nn.Module):
    """f(z, *tensors) of one tensor z: the state is unpacked, and the arguments are put in their places.

    Args:
        block: z, x, *args -> z.
        layout: of the state.
        frame: of (x, *args), whose tensors are arguments of the map.
        autocast: the dtype in which autocast runs the block, or None.
        draws: the random numbers of the call.
    """

    __name__: str
    layout: StateLayout
    frame: Frame
    autocast: torch.dtype | None
    draws: Draws
    #: Holds an entry once the block was evaluated; copies of this module share the list.
    evaluated: list[bool]
    #: Whether neither the state nor an argument holds others.
    flat: bool

    def __init__(
        self, block: nn.Module, layout: StateLayout, frame: Frame, autocast: torch.dtype | None, draws: Draws
    ) -> None:
        super().__init__()
        self.block = block
        parts: dict[str, Any] = {"layout": layout, "frame": frame, "autocast": autocast, "draws": draws}
        parts |= {"__name__": type(block).__name__, "evaluated": [], "flat": layout.single and frame.flat}
        # Past the tests by which `nn.Module` looks for parameters.
        self.__dict__ |= parts

    def forward(self, z: Tensor, *tensors: Tensor) -> Tensor:
        """The map in a solve, around which autocast is off."""
        state, arguments = self.layout.unpack(z), self.frame.filled(tensors)
        with self.precision():
            return self.layout.pack(self.step(state, arguments))

    # Without the search for hooks: only the layer sees this module.
    __call__ = forward

    @property
    def rounding(self) -> torch.dtype:
        """The coarsest dtype of the block's results, which is half precision where the solver's is not."""
        return self.autocast or max(self.layout.dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    def precision(self) -> contextlib.AbstractContextManager[object]:
        """A context in which autocast runs the block as it would around the call."""
        if self.autocast is None:
            return contextlib.nullcontext()
        # A weight that is cast without a graph, and kept, would have none where one is needed.
        return torch.autocast(self.layout.device.type, self.autocast, cache_enabled=False)

    def step(self, state: Any, arguments: tuple[Any, ...]) -> Any:
        """The next state for (x, *args); an error where the block writes to them, which at first are copies."""
        cast = self.autocast is not None
        if torch.compiler.is_compiling() or is_exporting():
            result = self.draws.evaluate(self.block, state, *arguments)
            return self.layout.check_output(self.__name__, result, state, cast=cast)
        state = counted(state) if self.layout.single else pytree.tree_map(counted, state)
        first, passed = not self.evaluated, (state, *arguments)
        olds = news = self._tensors(passed)
        if first or not self.flat:
            # The block may keep tuples, lists and dicts, or change them.
            own = _copied if first else _itself
            passed = tuple(map(own, passed)) if self.flat else pytree.tree_map(own, passed)
            news = self._tensors(passed)
        before = [writes_to(tensor) for tensor in news]
        result = self.draws.evaluate(self.block, *passed)
        written = [writes_to(new) != count for new, count in zip(news, before, strict=True)]
        if first:
            # Torch does not count writes past it (by numpy, through `.data`).
            for i, (old, new) in enumerate(zip(olds, news, strict=True)):
                visible = new.device.type == "cpu" and not transforms_active()
                written[i] = written[i] or (visible and not same(new, old))
        if True in written:
            self._refuse_writes(written)
        if first:
            self.evaluated.append(True)
        return self.layout.check_output(self.__name__, result, state, cast=cast)

    def _refuse_writes(self, written: list[bool]) -> NoReturn:
        """Raise because the block has written to some of its tensors, those of the state first."""
        required, received = "leave its arguments as they are", "a block that works on its arguments in place"
        if True in written[: len(self.layout.events)]:
            required, received = "leave its state as it is", "a map that works on it in place"
        remedy = "use operations that are not in place (nn.ReLU(), not inplace=True), or clone what it changes"
        raise ValueError(_validate.message(self.__name__, required, received, remedy))

    def _tensors(self, passed: tuple[Any, ...]) -> list[Tensor]:
        """The tensors in (state, x, *args), those of the state first."""
        parts = passed if self.flat else pytree.tree_leaves(passed)
        return [part for part in parts if isinstance(part, Tensor)]


def _copied(leaf: Any) -> Any:
    return counted(leaf, copy=True) if isinstance(leaf, Tensor) else leaf


def _itself(leaf: Any) -> Any:
    return leaf


#: The remedies for a block that failed: an accelerated method may settle elsewhere than the loop of its training.
TRAINED = (
    "train it with numbers of steps that are drawn (steps=range(a, b)), or hold Anderson(history=1) against the loop "
    "first: it may settle elsewhere"
)
LEVERS = {
    Status.MAX_STEPS: "raise max_steps, ",
    Status.STALLED: "use a larger rtol or a wider dtype, ",
    Status.DIVERGED: "",
}


@torch.no_grad()
def stay_where(problem: Problem, moved: Tensor, wanted: Tensor, z: Tensor, mapped: Tensor) -> bool:
    """Whether f of the problems `wanted` (*lead) stays as it is when the states of those `moved` are others.

    But for rounding, which may be another for another number of rows in torch's kernels.

    z, mapped: (*lead, *event), a state of all problems and f of it.
    """
    event = z.shape[wanted.ndim :]
    rows, mapped = flat(z.detach(), event), flat(mapped.detach(), event)
    rows = rows.where(torch.isfinite(rows), 0.0)
    size = length(rows)[..., None] / math.sqrt(max(rows.shape[-1], 1))
    # A constant change would be all taken away by a normalisation.
    wave = torch.arange(rows.shape[-1], device=z.device, dtype=z.dtype).cos() + 0.5
    other = torch.where(moved[..., None], rows + size.where(size > 0, 1.0) * wave, flat(z.detach(), event))
    again = flat(problem.apart().fixed_point_map(unflat(other, event)), event)
    off, size = length(again - mapped), length(mapped)
    return bool(((off <= torch.finfo(z.dtype).eps ** (2 / 3) * size) | ~(wanted & (size < torch.inf))).all())


class BlockProblem(FixedPointMap):
    """The fixed points of a `BlockMap`. Whether it reads undeclared tensors is checked once per layer and its modes."""

    if_random = (
        "numbers that come from numpy or a Generator of its own cannot be held: draw them from torch's default "
        "generators, which are held for a call, or call eval()"
    )

    function: BlockMap
    dtypes = "kept"
    #: A problem is made for each call.
    mixes: bool = False

    def __init__(self, function: BlockMap, *inputs: Any, event_ndim: int, checked: set[tuple[Any, str]]) -> None:
        super().__init__(function, *inputs, event_ndim=event_ndim)
        self.checked, self.draws = checked, function.draws
        parts = parts_of(function.block)
        self.mode, self.mixes = tuple(part.training for part in parts), takes_statistics(parts)

    def _check_output(self, result: Any, z: Tensor, shape: torch.Size, meaning: str, remedy: str = "") -> Tensor:
        # The map has checked what the block returned.
        mapped: Tensor = result
        return mapped

    def select(self, index: Tensor) -> Self | None:
        # For fewer samples the block would draw other numbers.
        return None if self.draws.repeated else super().select(index)

    def in_precision(self, z: Tensor) -> Self:
        """The problem in float32 where it has half precision; as it is for a block that takes its own dtypes alone."""
        layout, kinds = self.function.layout, {t.dtype for t in self.tensors() if t.is_floating_point()}
        if kinds.union(layout.dtypes).isdisjoint(HALF):
            return self
        problem, pure = self.settled(), kinds.issubset(HALF)
        wide = problem.replace(*(counted(at_least_single(t)) for t in problem.tensors()))
        wide.function.layout = layout.widened()
        tried, kept = ((self.mode, f"{word} {layout.dtypes} {sorted(map(str, kinds))}") for word in ("tried", "kept"))
        if tried not in self.checked and not is_exporting():
            with torch.no_grad():
                if not pure:
                    # What a loop refuses is refused.
                    problem.apart().fixed_point_map(z.to(self.function.rounding))
                try:
                    wide.apart().fixed_point_map(z)
                except (AssertionError, RuntimeError, TypeError, ValueError) as error:
                    if not (isinstance(error, AssertionError) or _validate.OF_DTYPES.search(str(error))):
                        raise
                    problem.apart().fixed_point_map(z.to(self.function.rounding))
                    self.checked.add(kept)
            self.checked.add(tried)
        return problem if kept in self.checked else wide

    def advice(self, remedies: Mapping[Status, str]) -> dict[Status, str]:
        advice = super().advice(remedies)
        return advice | {status: f"{levers}{TRAINED}" for status, levers in LEVERS.items() if status in advice}

    @torch.no_grad()
    def check_axes(self, z: Tensor) -> None:
        """Raise where one of several axes that number samples mixes them: some samples move, and others follow."""
        lead = z.shape[: z.ndim - self.event_ndim]
        key = (self.mode, f"{len(lead)} axes")
        if len(lead) < 2 or z.numel() == 0 or key in self.checked or transforms_active():
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
        self.checked.add(key)

    def check_undeclared(self, z: Tensor) -> None:
        # A tensor that the block closes over may require grad since.
        key = (self.mode, closed_over(self.function))
        if key not in self.checked or transforms_active():
            super().check_undeclared(z)
            self.checked.add(key)


class Draws:
    """The random numbers of a block, which are the same at every evaluation of one call, its backward pass included.

    A block that draws some moves the generators of torch (of the CPU and of the state's device) at its first
    evaluation. As torch.utils.checkpoint does, every later evaluation starts them where the first one did. Generators
    of the block's own, of numpy or of Python are not seen.

    Args:
        device: of the state.
        known: whether the block is known to draw.
    """

    def __init__(self, device: torch.device, *, known: bool) -> None:
        self.device = device
        #: Where the first evaluation starts the generators, and where it leaves them; None for a block that draws none.
        self.before = _generators(device) if known else None
        self.after: list[Tensor] | None = None
        self.watching = not known

    @property
    def repeated(self) -> bool:
        """Whether the block draws numbers, the same ones at each evaluation."""
        return self.before is not None

    def evaluate(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(*arguments) with the numbers of this call."""
        if torch.compiler.is_compiling() or (self.before is None and not self.watching):
            return function(*arguments)
        outside = _generators(self.device)
        if self.before is None:
            result, after = function(*arguments), _generators(self.device)
            self.watching = False
            if not all(map(torch.equal, outside, after)):
                self.before, self.after = outside, after
                _set_generators(self.device, outside)
            return result
        try:
            _set_generators(self.device, self.before)
            result = function(*arguments)
            self.after = self.after or _generators(self.device)
        finally:
            _set_generators(self.device, outside)
        return result

    def finish(self) -> None:
        """Leave the generators where one evaluation leaves them, so that the next call draws other numbers."""
        if self.after is not None:
            _set_generators(self.device, self.after)


class SameNumbers:
    """A context in which a block draws the numbers that it drew in the first one; outside nothing is repeated."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = torch.device("cpu") if device is None else device
        self.before: list[Tensor] | None = None
        self.outside: list[Tensor] | None = None

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            return
        now = _generators(self.device)
        if self.before is None:
            self.before = now
        else:
            self.outside = now
            _set_generators(self.device, self.before)

    def __exit__(self, *raised: object) -> None:
        if self.outside is not None:
            _set_generators(self.device, self.outside)


def _generators(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type not in ("cpu", "meta"):
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def _set_generators(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)

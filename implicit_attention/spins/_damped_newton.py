"""Newton's method on functions of independent samples, whose steps are halved until the function falls."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_map
from typing_extensions import Self

from .._torch import along, looks_every, unwrapped
from ..linear._vectors import choose
from ..solution import Status

# Finished samples leave the working set when no more than this part of it is running.
COMPACT_BELOW = 2 / 3
#: The status of a sample that is still on its way.
RUNNING = -1


@dataclasses.dataclass(frozen=True)
class SampleFunction(abc.ABC):
    """A function of one axis of samples to go down on, given by a problem.

    A point is a tuple of tensors (samples, ...), the first of them the place z. `descend` owns the order of things:
    what is tried, taken, halved, and when a sample leaves.
    """

    problem: Any

    @abc.abstractmethod
    def point(self, z: Tensor, before: Any) -> tuple[Any, Any]:
        """The point at z, tried from the point before, and what its step needs beyond that."""

    @abc.abstractmethod
    def step(self, point: Any, more: Any, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """The direction of the next step and the part of it to try first, (samples); read where `wanted` only."""

    @abc.abstractmethod
    def accepts(self, point: Any, trial: Any, step: Tensor, size: Tensor) -> Tensor:
        """Whether the function falls enough by a step of this size, (samples)."""

    @abc.abstractmethod
    def done(self, point: Any) -> Tensor:
        """Whether a sample needs no other step, (samples)."""

    def take(self, samples: Tensor) -> Self:
        """The function of some of the samples."""
        return dataclasses.replace(self, problem=self.problem.replace(*(x[samples] for x in self.problem.tensors())))


class Descent(NamedTuple):
    """State of every sample: its point, the next step and its size, RUNNING or a status, and what was spent."""

    point: Any
    step: Tensor
    size: Tensor
    status: Tensor
    num_steps: Tensor
    num_evals: Tensor


def descend(
    function: SampleFunction, point: Any, more: Any, status: Tensor, num_evals: Tensor, max_steps: int
) -> Descent:
    """The course from a point after at most so many trials of one axis of samples, each on its own; status RUNNING
    becomes CONVERGED, STALLED where no step is short enough, or MAX_STEPS."""
    step, size = function.step(point, more, status == RUNNING)
    course = Descent(point, step, size, status, torch.zeros_like(num_evals), num_evals)
    # Steps are few and long, and no residual tells how many follow.
    every, record = min(looks_every(None, course.status), 4), course
    places = torch.arange(len(course.status), device=course.status.device)
    for index in range(max_steps + 1):
        running = course.status == RUNNING
        status = course.status.masked_fill(running & function.done(course.point), int(Status.CONVERGED))
        if index == max_steps:
            status = status.masked_fill(status == RUNNING, int(Status.MAX_STEPS))
        course = course._replace(status=status)
        if index % every == 0 or index == max_steps:
            left = (course.status == RUNNING).nonzero()[:, 0]
            if len(left) <= COMPACT_BELOW * len(running):
                record = tree_map(lambda old, new, places=places: old.index_copy(0, places, new), record, course)
                if len(left) == 0:
                    break
                function, places = function.take(left), places[left]
                course = tree_map(lambda x, left=left: x[left], course)
        course = _tried(function, course)
    return record


def _tried(function: SampleFunction, course: Descent) -> Descent:
    """After one trial: a step is taken where the function accepts it, and is halved where not."""
    point, step, size, status, num_steps, num_evals = course
    active = status == RUNNING
    z = point[0] + along(size, step) * step
    trial, more = function.point(z, point)
    good = active & function.accepts(point, trial, step, size)
    # A step too short to change z cannot improve it.
    stalled = active & ~good & (z == point[0]).flatten(1).all(-1)
    taken = tree_map(lambda new, old: choose(good, new, old), trial, point)
    following, first = function.step(taken, more, good)
    return Descent(
        taken,
        choose(good, following, step),
        torch.where(good, first, size / 2),
        torch.where(stalled, int(Status.STALLED), status).to(torch.int8),
        num_steps + good,
        num_evals + active,
    )


def of_samples(function: Callable[..., tuple[Tensor, ...]], axes: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """function(*tensors) with one axis of samples in the place of the first `axes`, constants to all derivatives.

    It is called outside of all transforms of torch.func, where the host may look at numbers. Axes that torch.vmap maps
    join those of the samples.
    """
    taken, sizes = [], dict[int, int]()
    with torch.no_grad(), temporarily_clear_interpreter_stack():
        for tensor in tensors:
            tensor, *wrappers = reversed(unwrapped(tensor))
            tensor, own = tensor.detach(), list[int]()
            for wrapper in filter(_functorch.is_batchedtensor, wrappers):
                tensor = tensor.movedim(len(own) + _functorch.maybe_get_bdim(wrapper), len(own))
                sizes[_functorch.maybe_get_level(wrapper)] = tensor.shape[len(own)]
                own.append(_functorch.maybe_get_level(wrapper))
            taken.append((tensor, own))
        levels = sorted(sizes)
        batch = torch.Size([*(sizes[level] for level in levels), *tensors[0].shape[:axes]])
        plain = []
        for tensor, own in taken:
            for place, level in enumerate(levels):
                if level not in own:
                    tensor = tensor.unsqueeze(place)
            rest = tensor.shape[len(batch) :]
            plain.append(tensor.expand(batch + rest).reshape(batch.numel(), *rest))
        results = tuple(result.reshape(batch + result.shape[1:]) for result in function(*plain))
    for level in levels:
        results = tuple(_functorch._add_batch_dim(result, 0, level) for result in results)
    return results

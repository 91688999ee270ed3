"""Training of a block that repeats, so that its states come to rest where they are right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import _validate
from .._torch import at_least_single
from ..layers.block import Equilibrium
from ..layers.block_map import SameNumbers

#: The size of a state in units of the next one, below which a change is relative to the latter.
SMALLEST = 0.01


class SettlingLoss:
    """The loss by which a block learns to answer in a loop of drawn length, and then to stay where it is.

    With a number k of steps that each call draws, the loss is the mean of loss(readout(z), target) over some states z
    of the later half of k steps from the layer's start, plus rest(done) times the mean over samples of |f(z) - z| / |z|
    at the last one, where |z| is at least a hundredth of |f(z)|. Weights that were trained so are to be solved: see the
    guide on equilibrium blocks. A block that draws random numbers, as dropout does, has the same ones at each step.

    Args:
        layer: the block, in `Equilibrium` or a layer that is one.
        readout: of a state, such as the head of the model: logits.
        loss: of logits and targets; None is the mean cross-entropy, where targets below 0 are not asked for; 0 if none
            is.
        steps: the numbers to draw from; the longest should answer the largest training problems.
        every: a loss at the last state and every so many before it, in the later half; None is at half of the steps and
            at the end. Training collapsed for some seeds with the last state alone.
        rest: the weight of the last change, in the end.
        late: the parts of the training between which this weight grows from 0 to `rest`. From the beginning it teaches
            a block to rest before it answers.
        axis: that of logits which numbers classes: -1 for tokens (B, N, C), 1 for images (B, C, H, W).

    Raises:
        TypeError, ValueError: arguments that do not fit, with the remedy.

    Gradients: of the loop, as plain steps have them, to x, the block and the readout.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from implicit_attention.models.reasoners import ConvolutionalReasoner
        >>> from implicit_attention.training import SettlingLoss
        >>> layer, readout = ConvolutionalReasoner(8, inputs=1, axes=1), nn.Conv1d(8, 2, 1)
        >>> objective = SettlingLoss(layer, readout, axis=1)
        >>> optimizer = torch.optim.AdamW([*layer.parameters(), *readout.parameters()])
        >>> for update in range(3):
        ...     bits = torch.randint(2, (16, 1, 12))
        ...     objective(bits.float(), target=bits[:, 0].cumsum(-1) % 2, done=update / 3).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()

    Reference: measured in `python -m benchmarks usefulness --only MAZES,PREFIX,RECIPES`.

    Not for a layer that is to be used with the number of steps of its training: a loss of the last state is as good.
    """

    def __init__(
        self,
        layer: Equilibrium,
        readout: Callable[[Any], Tensor],
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        *,
        steps: range = range(8, 17),
        every: int | None = None,
        rest: float = 0.5,
        late: tuple[float, float] = (0.5, 0.75),
        axis: int = -1,
    ) -> None:
        _validate.check_instance("layer", layer, Equilibrium, "be an Equilibrium", "wrap the block: Equilibrium(block)")
        for name, function in (("readout", readout), ("loss", loss)):
            if function is not None and not callable(function):
                raise TypeError(_validate.message(name, "be a function, or a module", type(function).__name__))
        _validate.check_instance("steps", steps, range, "be a range", "for example range(8, 17)")
        fits = len(steps) > 0 and min(steps[0], steps[-1]) > 0
        _validate.require(fits, "steps", "be a range that holds numbers above 0", repr(steps))
        if every is not None:
            _validate.check_integer("every", every, low=1)
        fits = isinstance(late, (tuple, list)) and len(late) == 2
        _validate.require(fits, "late", "be two parts of the training", late, "for example (0.5, 0.75)")
        begin, end = (_validate.check_number(f"late[{i}]", part, low=0.0, high=1.0) for i, part in enumerate(late))
        _validate.require(begin <= end, "late", "be two parts of the training in order", late)
        self.layer, self.readout, self.loss, self.steps, self.every = layer, readout, loss, steps, every
        self.rest, self.late = _validate.check_number("rest", rest, low=0.0), (begin, end)
        self.axis = axis

    def __call__(self, x: Any, *args: Any, target: Tensor, done: float, **options: Any) -> Tensor:
        """The loss of a batch.

        Args:
            x: as for a call of the layer.
            *args: the same.
            **options: the same, but `steps` and `return_solution`.
            target: what `loss` compares logits with: for cross-entropy the classes, logits without their axis.
            done: the part of the training that has been made, in [0, 1], such as update / updates.

        Returns:
            A scalar.
        """
        done = _validate.check_number("done", done, low=0.0, high=1.0)
        for name in ("steps", "return_solution"):
            remedy = "pass the range of steps to SettlingLoss" if name == "steps" else "read layer.last_solve"
            _validate.require(
                name not in options, name, "not be given to a call of the loss", options.get(name), remedy
            )
        # By torch's generator, so that a checkpoint draws the same number again.
        steps, z, losses = self.steps[int(torch.randint(len(self.steps), ()))], options.pop("start", None), []
        repeated = SameNumbers(next((t.device for t in pytree.tree_leaves(x) if isinstance(t, Tensor)), None))
        for count in self._counts(steps):
            with repeated:
                z = self.layer(x, *args, start=z, steps=count, **options)
            losses.append(self._loss(self.readout(z), target))
        total = torch.stack(losses).mean()
        weight = self._weight(done)
        if weight == 0:
            return total
        with repeated:
            after = self.layer(x, *args, start=z, steps=1, **options)
        change = relative_change(after, z, self.layer.event_ndim)
        return total + weight * change.sum() / max(change.numel(), 1)

    def _counts(self, steps: int) -> list[int]:
        """The numbers of steps to the states that have a loss."""
        if self.every is None:
            return [steps - steps // 2, steps // 2] if steps > 1 else [steps]
        later = steps // 2 // self.every
        return [steps - later * self.every, *[self.every] * later]

    def _weight(self, done: float) -> float:
        begin, end = self.late
        share = (done - begin) / (end - begin) if end > begin else float(done >= begin)
        weight: float = self.rest * min(max(share, 0.0), 1.0)
        return weight

    def _loss(self, logits: Tensor, target: Tensor) -> Tensor:
        if self.loss is not None:
            return self.loss(logits, target)
        logits = classes_last(logits, target, self.axis)
        # Torch knows one number that is not asked for.
        asked = target.long().masked_fill(target < 0, -100).flatten()
        # The sum of many is beyond float16.
        wrong = F.cross_entropy(at_least_single(logits).flatten(0, -2), asked, reduction="sum")
        return wrong / (asked >= 0).sum().clamp(min=1)


def classes_last(logits: Any, target: Tensor, axis: int) -> Tensor:
    """Logits with classes on their last axis, or an error where the other axes are not those of the targets."""
    _validate.check_float_tensor("readout(z)", logits, min_ndim=2)
    shape = tuple(logits.shape)
    _validate.require(-logits.ndim <= axis < logits.ndim, "axis", f"be an axis of logits of shape {shape}", axis)
    moved: Tensor = logits.movedim(axis, -1)
    required = f"return logits whose axes but the classes (axis={axis}) are those of the targets, {tuple(target.shape)}"
    fits = moved.shape[:-1] == target.shape
    _validate.require(fits, "readout", required, f"shape {shape}", "pass axis=1 for images (B, C, H, W)")
    return moved


def relative_change(new: Any, old: Any, event_ndim: int | None = None) -> Tensor:
    """|new - old| / |old| of each sample, over all tensors of a state; the size has no gradient.

    The size is a hundredth of |new| at least: a state that leaves 0 has a bounded change.
    """
    pairs = [
        (at_least_single(a), at_least_single(b))
        for a, b in zip(pytree.tree_leaves(new), pytree.tree_leaves(old), strict=True)
    ]
    lead = 1 if event_ndim is None else pairs[0][1].ndim - event_ndim

    def size(parts: list[Tensor]) -> Tensor:
        rows = [part.reshape(*part.shape[:lead], math.prod(part.shape[lead:])) for part in parts]
        found: Tensor = torch.cat(rows, -1).norm(dim=-1)
        return found

    change, *sizes = size([a - b for a, b in pairs]), *(size([pair[i].detach() for pair in pairs]) for i in (1, 0))
    relative: Tensor = change / sizes[0].maximum(SMALLEST * sizes[1]).clamp(min=torch.finfo(change.dtype).tiny)
    return relative

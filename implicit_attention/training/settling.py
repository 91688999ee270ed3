"""Training of a block that repeats, so that its states come to rest where they are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import _validate
from ..layers.block import Equilibrium


class SettlingLoss:
    """The loss by which a block learns to answer in a loop of drawn length, and then to stay where it is.

    With a number k of steps that each call draws, the loss is the mean of loss(readout(z), target) over some states z
    of the later half of k steps from the layer's start, plus rest(done) times the mean over samples of |f(z) - z| / |z|
    at the last one. Weights that were trained so are to be solved: see the guide on equilibrium blocks.

    Args:
        layer: the block, in `Equilibrium` or a layer that is one.
        readout: of a state, such as the head of the model: logits.
        loss: of logits and targets; None is the mean cross-entropy, where targets below 0 are not asked for.
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
        begin, end = (_validate.check_number(f"late[{i}]", part, low=0.0, high=1.0) for i, part in enumerate(late))
        _validate.require(begin <= end, "late", "be two parts of the training in order", late)
        self.layer, self.readout, self.loss, self.steps, self.every = layer, readout, loss, steps, every
        self.rest, self.late, self.axis = _validate.check_number("rest", rest, low=0.0), (begin, end), axis

    def __call__(self, x: Any, *args: Any, target: Tensor, done: float, **options: Any) -> Tensor:
        """The loss of a batch.

        Args:
            x: as for a call of the layer.
            *args: the same.
            **options: the same.
            target: what `loss` compares logits with: for cross-entropy the classes, logits without their axis.
            done: the part of the training that has been made, in [0, 1], such as update / updates.

        Returns:
            A scalar.
        """
        done = _validate.check_number("done", done, low=0.0, high=1.0)
        # By torch's generator, so that a checkpoint draws the same number again.
        steps, z, losses = self.steps[int(torch.randint(len(self.steps), ()))], options.pop("start", None), []
        for count in self._counts(steps):
            z = self.layer(x, *args, start=z, steps=count, **options)
            losses.append(self._loss(self.readout(z), target))
        total = torch.stack(losses).mean()
        weight = self._weight(done)
        if weight == 0:
            return total
        change = relative_change(self.layer(x, *args, start=z, steps=1, **options), z)
        return total + weight * change.mean()

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
        asked = target.masked_fill(target < 0, -100).flatten()
        return F.cross_entropy(logits.flatten(0, -2), asked)


def classes_last(logits: Any, target: Tensor, axis: int) -> Tensor:
    """Logits with classes on their last axis, or an error where the other axes are not those of the targets."""
    _validate.check_float_tensor("readout(z)", logits, min_ndim=2)
    moved: Tensor = logits.movedim(axis, -1)
    required = f"return logits whose axes but the classes (axis={axis}) are those of the targets, {tuple(target.shape)}"
    fits = moved.shape[:-1] == target.shape
    _validate.require(fits, "readout", required, f"shape {tuple(logits.shape)}", "pass axis=1 for images (B, C, H, W)")
    return moved


def relative_change(new: Any, old: Any) -> Tensor:
    """|new - old| / |old| of each sample, (B,), over all tensors of a state; the size has no gradient."""
    pairs = zip(pytree.tree_leaves(new), pytree.tree_leaves(old), strict=True)
    parts = [(a - b, b.detach()) for a, b in pairs]
    change, size = (torch.cat([part[i].flatten(1) for part in parts], 1).norm(dim=1) for i in (0, 1))
    relative: Tensor = change / size.clamp(min=torch.finfo(size.dtype).tiny)
    return relative

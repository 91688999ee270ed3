"""A deep-thinking network's block: convolutions that read their input at every step, until the image settles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ... import _validate
from ..._torch import at_least_single
from ...layers.block import Equilibrium
from ...layers.calls import PlainCall, StepKeywords
from ...problem import PerSample
from .existing import check_exists


class GroupNorm(nn.GroupNorm):
    """The norm of groups of channels, over the cells that exist."""

    def forward(self, h: Tensor, exists: Tensor | None = None) -> Tensor:
        """h (B, C, *space); exists (B, 1, *space), or None for all."""
        if exists is None:
            return super().forward(h)
        # As torch's own norm does, half precision is summed in single.
        grouped = at_least_single(h).reshape(len(h), self.num_groups, h.shape[1] // self.num_groups, *h.shape[2:])
        cells = exists.unsqueeze(1)
        axes = tuple(range(2, grouped.ndim))
        count = cells.sum(axes, keepdim=True).clamp(min=1) * grouped.shape[2]
        mean = grouped.masked_fill(~cells, 0.0).sum(axes, keepdim=True) / count
        centred = (grouped - mean).masked_fill(~cells, 0.0)
        variance = centred.square().sum(axes, keepdim=True) / count
        normed = (centred * (variance + self.eps).rsqrt()).flatten(1, 2)
        weight, bias = (t.reshape(-1, *(1,) * (h.ndim - 2)) for t in (self.weight, self.bias))
        scaled: Tensor = (normed * weight + bias).masked_fill(~exists, 0.0)
        return scaled.to(h.dtype)


class ResidualConvolutions(nn.Module):
    """relu(h + N(W2 relu(N(W1 h)))) with convolutions W1, W2 and norms N."""

    def __init__(self, channels: int, axes: int, kernel: int, groups: int | None) -> None:
        super().__init__()
        self.first, self.second = (convolution(axes, channels, channels, kernel) for _ in range(2))
        self.norms = nn.ModuleList([GroupNorm(groups, channels) for _ in range(2)] if groups else [])

    def forward(self, h: Tensor, exists: Tensor | None = None) -> Tensor:
        inner = self._normed(0, self.first(h), exists).relu()
        return (h + self._normed(1, self.second(inner), exists)).relu()

    def _normed(self, number: int, h: Tensor, exists: Tensor | None) -> Tensor:
        # Cells that do not exist are what lies beyond the border.
        h = h if exists is None else h.masked_fill(~exists, 0.0)
        return self.norms[number](h, exists) if self.norms else h


class ConvolutionalBlock(nn.Module):
    """One step: a convolution of state and input side by side, and residual ones."""

    def __init__(
        self, channels: int, inputs: int, axes: int, depth: int, kernel: int, recall: bool, groups: int | None
    ) -> None:
        super().__init__()
        self.axes = axes
        self.recall = convolution(axes, channels + inputs, channels, kernel) if recall else None
        self.layers = nn.ModuleList(ResidualConvolutions(channels, axes, kernel, groups) for _ in range(depth))

    def forward(self, z: Tensor, x: Tensor, exists: Tensor | None = None) -> Tensor:
        lead, space = z.shape[: -1 - self.axes], z.shape[-self.axes :]
        h = z if self.recall is None else torch.cat([z, x], -1 - self.axes)
        h = h.reshape(-1, *h.shape[-1 - self.axes :])
        cells = None if exists is None else exists.expand(*lead, *space).reshape(-1, 1, *space)
        if cells is not None:
            h = h.masked_fill(~cells, 0.0)
        if self.recall is not None:
            h = self.recall(h)
            h = h if cells is None else h.masked_fill(~cells, 0.0)
        for layer in self.layers:
            h = layer(h, cells)
        return h.reshape(z.shape)


def convolution(axes: int, inputs: int, channels: int, kernel: int) -> nn.Module:
    """A convolution that keeps the size, without a bias."""
    kind = nn.Conv1d if axes == 1 else nn.Conv2d
    return kind(inputs, channels, kernel, padding=kernel // 2, bias=False)


class ConvolutionalReasoner(Equilibrium):
    """A deep-thinking network without its ends: convolutions that repeat until every cell of an image has settled.

    A step is h = R [z; x], and then `depth` times h <- relu(h + W2 relu(W1 h)), with convolutions R (the recall), W1
    and W2 without biases; with norm="group" a group norm stands behind W1 and W2. Weights that were trained on small
    images, or short sequences, serve for larger ones.

    Args:
        channels: of the state.
        inputs: channels of x; None is as many.
        axes: of space: 2 for images (B, C, H, W), 1 for sequences (B, C, N).
        depth: residual parts of a step.
        kernel: width of the convolutions, odd.
        recall: whether each step reads x. Without it x counts by the start alone, and a settled state has forgotten it.
        norm: None, as published, or "group".
        groups: of channels, for norm="group".
        compiled: as of `Equilibrium`.
        **options: `start`, `solver`, `adjoint`, `steps` and `on_failure`, as of `Equilibrium`.

    Attributes:
        block: the module of one step.
        last_solve: the `SolveReport` of the last call, one entry a sample.

    Raises:
        TypeError, ValueError: arguments that do not fit, with the remedy.

    Gradients: to x and to the parameters, of any order.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from implicit_attention.models.reasoners import ConvolutionalReasoner
        >>> layer, readout = ConvolutionalReasoner(8, inputs=3, steps=range(6, 13)), nn.Conv2d(8, 2, 1)
        >>> maze = torch.rand(4, 3, 9, 9)
        >>> readout(layer(maze)).shape
        torch.Size([4, 2, 9, 9])
        >>> z = layer.eval()(maze, on_failure="ignore")
        >>> layer.last_solve.status.shape
        torch.Size([4])

    Reference: Bansal et al. (2022), whose networks begin at a convolution of x: pass it as `start` of a call.

    Not for pictures whose distant parts decide together in few steps: a step carries news 1 + 2 `depth` cells far at
    kernel=3. Use `EquilibriumTransformer`.
    """

    def __init__(
        self,
        channels: int,
        inputs: int | None = None,
        *,
        axes: Literal[1, 2] = 2,
        depth: int = 2,
        kernel: int = 3,
        recall: bool = True,
        norm: Literal["group"] | None = None,
        groups: int = 4,
        compiled: bool = False,
        **options: Unpack[StepKeywords],
    ) -> None:
        inputs = channels if inputs is None else inputs
        numbers = {"channels": channels, "inputs": inputs, "depth": depth, "kernel": kernel, "groups": groups}
        for name, value in numbers.items():
            _validate.check_integer(name, value, low=1)
        _validate.check_choice("axes", axes, (1, 2))
        _validate.check_choice("norm", norm, (None, "group"))
        _validate.check_instance("recall", recall, bool, "be True or False")
        _validate.require(kernel % 2 == 1, "kernel", "be odd, so that cells stay where they are", kernel)
        fits = norm is None or channels % groups == 0
        _validate.require(fits, "groups", f"divide channels = {channels}", groups, "pass another number")
        block = ConvolutionalBlock(channels, inputs, axes, depth, kernel, recall, groups if norm else None)
        super().__init__(block, event_ndim=axes + 1, compiled=compiled, **options)
        self.channels, self.inputs, self.axes, self.recall = channels, inputs, axes, recall

    def forward(self, x: Tensor, exists: Tensor | None = None, **options: Any) -> Any:  # type: ignore[override]
        """The settled state of every cell, or that after some steps.

        Args:
            x: (*batch, inputs, *space).
            exists: which cells exist, boolean, (*batch, *space); None for all. The state of others is 0, as beyond the
                border, so that a batch of padded images answers as each of them does alone.
            **options: `steps`, `solver`, `adjoint`, `start`, `on_failure`, `confirm` and `return_solution`, as of
                `Equilibrium`.

        Returns:
            (*batch, channels, *space); with `return_solution` a tuple (state, `Solution`).
        """
        _validate.check_float_tensor("x", x, min_ndim=self.axes + 1)
        fits, place = (
            x.shape[-1 - self.axes] == self.inputs,
            f"(*batch, {self.inputs}, {'N' if self.axes == 1 else 'H, W'})",
        )
        _validate.require(fits, "x", f"have the shape {place}", f"shape {tuple(x.shape)}")
        start = options.get("start")
        start = self.start if start is None else start
        if isinstance(start, str) and start == "input":
            required = f"not be 'input' for x of {self.inputs} channels and states of {self.channels}"
            _validate.require(self.inputs == self.channels, "start", required, "input", "use 'zeros', or pass a state")
        fits = self.recall or not (isinstance(start, str) and start == "zeros")
        required = "not be 'zeros' with recall=False, where 0 stays 0"
        _validate.require(fits, "start", required, "'zeros'", "pass a state: start=projection(x)")
        if exists is None:
            return super().forward(x, **options)
        check_exists(exists, (*x.shape[: -1 - self.axes], *x.shape[-self.axes :]))
        return super().forward(x, PerSample(exists), **options)

    if TYPE_CHECKING:
        __call__: PlainCall[...]

    def _like(self, x: Any) -> Any:
        if self.inputs == self.channels:
            return x
        return x.new_empty(()).expand(*x.shape[: -1 - self.axes], self.channels, *x.shape[-self.axes :])

    def extra_repr(self) -> str:
        others = super().extra_repr().removeprefix(f"event_ndim={self.axes + 1}").removeprefix(", ")
        return ", ".join(text for text in (f"{self.channels}, inputs={self.inputs}, axes={self.axes}", others) if text)

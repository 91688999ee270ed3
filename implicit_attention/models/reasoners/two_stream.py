"""A recursive reasoner's block: a fast stream is refined some times for each step of a slow one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from ... import _validate
from ...layers.block import Equilibrium
from ...layers.calls import StepKeywords
from ...layers.token_window import only_existing
from ...problem import PerSample
from .existing import check_exists


class TwoStreamBlock(nn.Module):
    """One step of the pair (high, low), with `cycles` steps of the low stream inside."""

    def __init__(self, high: nn.Module, low: nn.Module, cycles: int) -> None:
        super().__init__()
        self.high, self.low, self.cycles = high, low, cycles

    def forward(
        self, state: tuple[Tensor, Tensor], x: Tensor, exists: Tensor | None = None, *args: Any
    ) -> tuple[Tensor, Tensor]:
        x = only_existing(x, exists)
        high, low = (only_existing(z, exists) for z in state)
        for _ in range(self.cycles):
            low = only_existing(self.low(low + high + x, *args), exists)
        return only_existing(self.high(high + low, *args), exists), low


class TwoStreamReasoner(Equilibrium):
    """A recursive reasoner with two streams (high, low), which repeat until both have settled.

    A step is `cycles` times low <- L(low + high + x), and then high <- H(high + low). H and L are any modules that keep
    the shape: stacks of attention, mixers, convolutions. What the answer is read from is high, the first of the pair.

    Args:
        high: H, a module with forward(h, *args).
        low: L, the same; None is H itself, with one set of weights.
        cycles: steps of the low stream for each of the high one.
        event_ndim: axes of x that are one sample; None is all but the first.
        compiled: as of `Equilibrium`.
        **options: `start`, `solver`, `adjoint`, `steps` and `on_failure`, as of `Equilibrium`; `start` is a word for
            both streams, or a pair of states.

    Attributes:
        block: the module of one step.
        last_solve: the `SolveReport` of the last call, one entry a sample.

    Raises:
        TypeError, ValueError: arguments that do not fit, with the remedy.

    Gradients: to x, tensors among `args`, and the parameters, as the modules have them.

    Examples:
        >>> import torch
        >>> from implicit_attention.models.reasoners import TransformerStack, TwoStreamReasoner
        >>> layer = TwoStreamReasoner(TransformerStack(16, heads=2), TransformerStack(16, heads=2), steps=range(2, 7))
        >>> high, low = layer(torch.randn(4, 9, 16))
        >>> high.shape, low.shape
        (torch.Size([4, 9, 16]), torch.Size([4, 9, 16]))

    References: Wang et al. (2025), hierarchical reasoning; Jolicoeur-Martineau (2025), tiny recursion, with low=None.
    They detach the state between segments: see `segments`.

    Not for one stream: an `EquilibriumTransformer` has half the cost a step.
    """

    def __init__(
        self,
        high: nn.Module,
        low: nn.Module | None = None,
        *,
        cycles: int = 2,
        event_ndim: int | None = None,
        compiled: bool = False,
        **options: Unpack[StepKeywords],
    ) -> None:
        _validate.check_instance("high", high, nn.Module, "be an nn.Module", "for example TransformerStack(dim, heads)")
        _validate.check_instance("low", low, (nn.Module, type(None)), "be None or an nn.Module")
        _validate.check_integer("cycles", cycles, low=1)
        block = TwoStreamBlock(high, high if low is None else low, cycles)
        super().__init__(block, event_ndim=event_ndim, compiled=compiled, **options)

    def forward(self, x: Tensor, *args: Any, exists: Tensor | None = None, **options: Any) -> Any:
        """The settled pair (high, low), or that after some steps.

        Args:
            x: (*batch, *event), the input of every step of the low stream.
            *args: further arguments of H and L, such as masks.
            exists: which tokens exist, boolean: the first axes of x, such as (B, N) for (B, N, D); None for all. The
                states of others are 0, which attention would read, so that H and L need an argument that tells them,
                attention the mask exists[:, None, None, :]; it may be None where they read no other token.
            **options: `steps`, `solver`, `adjoint`, `start`, `on_failure`, `confirm` and `return_solution`, as of
                `Equilibrium`.

        Returns:
            (high, low), of the shape of x; with `return_solution` a tuple (pair, `Solution`).
        """
        _validate.check_float_tensor("x", x, min_ndim=1)
        if exists is not None:
            count = exists.ndim if isinstance(exists, Tensor) else 0
            check_exists(exists, tuple(x.shape[:count]))
            lead = 1 if self.event_ndim is None else x.ndim - self.event_ndim
            required = f"have more than the {lead} axes of samples"
            _validate.require(count > lead, "exists", required, f"shape {tuple(exists.shape)}")
            required = "come with an argument behind x by which H and L know what not to read"
            remedy = "pass exists[:, None, None, :] to attention, None to modules that read no other token"
            _validate.require(len(args) > 0, "exists", required, "none", remedy)
        return super().forward(x, None if exists is None else PerSample(exists), *args, **options)

    def _like(self, x: Any) -> Any:
        return x, x

    def extra_repr(self) -> str:
        return ", ".join(text for text in (f"cycles={self.block.cycles}", super().extra_repr()) if text)

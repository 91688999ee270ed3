"""Parts of layers: learned and fixed anchors and temperatures, rotary positions, and heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from typing_extensions import Self

from .. import _validate
from .._torch import HALF, at_least_single

Scalar: TypeAlias = float | Literal["learned"]

# A learned anchor stays this far from 0 and 1, where its gradient would stay zero.
MARGIN = 1e-4
# A learned temperature stays within e to this power, either way, of the initial one.
MOST_LOG = 20.0


class Fixed(nn.Module):
    """A number that is not learned, or one per head as a buffer, with the call of `LearnedAnchor` and `LearnedBeta`."""

    value: float | Tensor

    def __init__(self, value: float | Tensor) -> None:
        super().__init__()
        if isinstance(value, Tensor):
            self.register_buffer("value", value)
        else:
            self.value = value

    def forward(self) -> float | Tensor:
        return at_least_single(self.value)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{self.value:g}" if not isinstance(self.value, Tensor) else f"({len(self.value)},)"


def is_called_plainly(module: nn.Module) -> bool:
    """Whether a call of a module is its `forward` alone: there are no hooks, and no method replaces forward."""
    own = module.__dict__
    return not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
        or module._compiled_call_impl is not None
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


class LearnedNumbers(nn.Module):
    """Numbers of one parameter, which start where it is 0: the base of `LearnedAnchor` and `LearnedBeta`."""

    #: Name of the parameter.
    source: ClassVar[str]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        was_meta = getattr(self, self.source).is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if was_meta:  # `to_empty` leaves what lay in memory, and a state dict of a host does not replace it.
            nn.init.zeros_(getattr(self, self.source))
        return self


def logit_of(argument: str, anchor: float | Tensor, remedy: str) -> Tensor:
    """The parameter of learned anchors, in double precision on the CPU."""
    numbers = torch.as_tensor(anchor, dtype=torch.float64, device="cpu")
    inside, required = (numbers > MARGIN) & (numbers < 1 - MARGIN), f"lie in ({MARGIN:g}, {1 - MARGIN:g}) to be learned"
    _validate.require(bool(inside.all()), argument, required, anchor, remedy)
    return torch.logit((numbers - MARGIN) / (1 - 2 * MARGIN))


class LearnedAnchor(LearnedNumbers):
    """Anchors in (0, 1): a sigmoid that is kept off both ends.

    Args:
        shape: of the anchors, (heads,) for one per head.
        **made: device and dtype.
    """

    source = "logit"

    def __init__(self, shape: tuple[int, ...], **made: Any) -> None:
        super().__init__()
        # A sigmoid of 0 is the anchor 1/2.
        self.logit = nn.Parameter(torch.zeros(shape, **made))

    def forward(self) -> Tensor:
        # float32 in a half-precision model, too: a whole solve depends on this one number per head.
        logit = self.logit
        return MARGIN + (1 - 2 * MARGIN) * torch.sigmoid(logit if logit.dtype not in HALF else logit.float())

    @torch.no_grad()
    def set(self, value: float) -> None:
        """Move all of them to `value`."""
        value = _validate.check_number("anchor", value, low=0.0, high=1.0)
        self.logit.copy_(logit_of("anchor", value, f"pass anchor={value:g} when the layer is made to fix it there"))


class LearnedBeta(LearnedNumbers):
    """Inverse temperatures initial * exp(log_scale): weight decay pulls them to the initial one.

    Args:
        shape: of the temperatures, (heads,) for one per head.
        initial: where to start.
        **made: device and dtype.
    """

    source = "log_scale"

    def __init__(self, shape: tuple[int, ...], initial: float, **made: Any) -> None:
        super().__init__()
        self.initial = initial
        self.log_scale = nn.Parameter(torch.zeros(shape, **made))

    def forward(self) -> Tensor:
        # float32 in a half-precision model, too. Beyond e^+-20 nothing is left to learn, and 0 and inf are no betas.
        log_scale = self.log_scale
        wide = log_scale if log_scale.dtype not in HALF else log_scale.float()
        return self.initial * torch.exp(wide.clamp(-MOST_LOG, MOST_LOG))

    @torch.no_grad()
    def set(self, value: float) -> None:
        """Move all of them to `value`."""
        value = _validate.check_number("beta", value, low=0.0, open_low=True)
        self.log_scale.fill_(math.log(value / self.initial))

    def extra_repr(self) -> str:
        return f"initial={self.initial:g}"


def anchor_or_beta(name: str, given: Scalar, learned: nn.Module) -> nn.Module:
    """The module `learned` for "learned", else a module that returns the given number."""
    if isinstance(given, str):
        _validate.require(given == "learned", name, "be 'learned' or a number", repr(given))
        return learned
    given = _validate.check_number(
        name, given, low=0.0, high=1.0 if name == "anchor" else math.inf, open_low=name == "beta"
    )
    return Fixed(float(given))


class Rotary(nn.Module):
    """Rotary positions: pairs of entries turn by an angle proportional to the position.

    Entries d and d + D/2 form a pair and turn by position * base^(-2 d / D).

    Args:
        base: wavelength of the slowest pair, over 2 pi.

    Reference: Su et al. (2021), eq. 34, in the half-split order that Llama-type models use.

    Examples:
        >>> import torch
        >>> from implicit_attention import ImplicitAttention, Rotary
        >>> layer, x = ImplicitAttention(16, heads=2, rotary=Rotary()), torch.randn(1, 4, 16)
        >>> torch.allclose(layer(x, positions=torch.arange(4) + 7), layer(x), atol=1e-3)
        True

    Not for queries and keys that a model has turned already, nor for heads of odd width.
    """

    if TYPE_CHECKING:
        __call__: Callable[..., Tensor]

    def __init__(self, base: float = 10000.0) -> None:
        super().__init__()
        base = _validate.check_number("base", base, low=0.0, open_low=True)
        self.base = base

    def forward(self, x: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
        """x (*batch, H, N, D) turned to its `positions`, (N,) or (*batch, N); with `inverse` turned back."""
        cos, sin = self.turns(x, positions)
        return self.turned(x, cos, -sin if inverse else sin)

    def turns(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles of tokens, for heads of the width of x."""
        half = x.shape[-1] // 2
        _validate.require(
            x.shape[-1] % 2 == 0, "head_dim", "be even for rotary positions", x.shape[-1], "pass another head_dim"
        )
        exponent = torch.arange(half, device=x.device, dtype=torch.float32) / half
        wide = torch.promote_types(x.dtype, torch.float32)
        angle = positions.to(wide)[..., None] * self.base ** -exponent.to(wide)
        if positions.ndim > 1:
            angle = angle.unsqueeze(-3)
        return angle.cos(), angle.sin()

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (*batch, H, N, D) turned by angles of this cosine and sine."""
        half = x.shape[-1] // 2
        first, second = x[..., :half].to(cos.dtype), x[..., half:].to(cos.dtype)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    def extra_repr(self) -> str:
        return f"base={self.base:g}"


def check_sizes(dim: int, heads: int, head_dim: int | None, bare: bool) -> None:
    """Raise unless a layer can have these sizes."""
    _validate.check_integer("dim", dim, low=1)
    _validate.check_integer("heads", heads, low=1)
    if head_dim is None:
        remedy = f"use a divisor of {dim}, or pass head_dim"
        _validate.require(dim % heads == 0, "heads", f"divide dim = {dim}", heads, remedy)
    else:
        _validate.check_integer("head_dim", head_dim, low=1)
    if bare:
        remedy = "without bare=True there are projections to make heads with"
        _validate.require(heads == 1, "heads", "be 1 with bare=True", heads, remedy)
        _validate.require(head_dim in (None, dim), "head_dim", f"be dim = {dim} with bare=True", head_dim, remedy)


def per_head(beta: Tensor, heads: int) -> Tensor:
    """Inverse temperatures (heads,) > 0 that are given."""
    _validate.check_float_tensor("beta", beta)
    _validate.require(beta.shape == (heads,), "beta", f"have shape ({heads},)", f"shape {tuple(beta.shape)}")
    _validate.check_per_batch("beta", beta, low=0.0, open_low=True)
    return beta.detach().clone()


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(*batch, N, heads * D) -> (*batch, heads, N, D)."""
    *lead, width = x.shape
    return x.reshape(*lead, heads, width // heads).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """(*batch, heads, N, D) -> (*batch, N, heads * D)."""
    return x.transpose(-3, -2).flatten(-2)

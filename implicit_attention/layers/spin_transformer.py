"""`SpinTransformerBlock` and `SpinTransformer`: a transformer block as the answer of a spin system to its tokens."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import _validate
from .._torch import at_least_single, uncompiled
from ..failure import OnFailure, tell
from ..solution import SolveReport
from ..spins import Decomposition, DynamicalMethod, SaddlePoint, decompose
from .calls import TokenMasks, plain
from .projections import merge_heads, split_heads
from .spin import SpinAttention


class SpinTransformerBlock(nn.Module):
    """One transformer block whose token mixing is the magnetization of a spin system, and perhaps all of the block.

    With spins(h) = m, of energy E(s) = -1/2 sum_ij J_ij(h) s_i.s_j - sum_i h_i.s_i per head, as in `SpinAttention`:

        input="field":          y = x + W_o spins(norm(W_v norm(x))),  then y + feed_forward(norm(y))
        input="magnetization":  y = spins(h) + feed_forward(norm(h)),  h = response^{-1}(x)

    As a field a token enters twice: by the residual x, and by gain_i h_i, the part of m that answers the spin's own
    field, which is bounded and passes W_v and W_o. As a magnetization it enters once: h_i is the field in which a lone
    spin has the mean x_i, so that its own answer is the residual, and a block without couplings is the identity.

    The exact response in total, derivative="total", also has the contribution of J(h), a function of the fields of all
    tokens. The feed-forward part, dim -> width -> dim with GELU, stands for it, as a function of the token alone.

    Args:
        dim: width of tokens.
        heads: dividing `dim`.
        input: whether tokens are the field ("field") or the magnetizations of spins that nothing couples
            ("magnetization"). In the latter there are no projections: heads are parts of x, each of which must be
            shorter than R = sqrt(dim / heads), and field_norm="rms" norms the fields that enter the couplings, as h
            itself must keep its length.
        feed_forward: width of the feed-forward part, None for none. For magnetizations it begins at zero.
        clip: for magnetizations, a number in (0, 1): heads of x longer than clip R are cut to that length, which has
            a gradient except where the length is clip R. None: a token with |x| >= R in some head, which no finite
            field gives, or with a NaN, is left out of the system; its output is NaN, and `on_failure` applies to it.
        **options: of `SpinAttention`, such as method, derivative, beta, causal, on_failure. The default of `couplings`
            is "symmetric", so that `MeanField` answers, which has a free energy; "softmax" where causal.

    Attributes:
        spins: the `SpinAttention` inside.
        last_solve: its `SolveReport`.

    Raises:
        TypeError, ValueError: arguments that do not fit, with the remedy.
        ConvergenceError: with on_failure="raise", for tokens that no field gives, and for solves that fail.

    Gradients: with respect to x and parameters, to second order; none with respect to `initial`.

    Not for a block that is repeated until it settles: use `EquilibriumTransformer`. Magnetizations plus a feed-forward
    part, or in total, may be longer than R: `clip` them for the next block.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers import SpinTransformerBlock
        >>> block, x = SpinTransformerBlock(16, heads=4, feed_forward=64), torch.randn(2, 5, 16)
        >>> block(x).shape, block.decompose(x).total.shape  # per head
        (torch.Size([2, 5, 16]), torch.Size([2, 4, 5, 4]))
        >>> alone = SpinTransformerBlock(
        ...     16, heads=4, input="magnetization", clip=0.9, couplings=lambda h: torch.zeros(5, 5)
        ... )
        >>> torch.allclose(alone(0.4 * x), 0.4 * x, atol=1e-6)
        True
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        input: Literal["field", "magnetization"] = "field",
        feed_forward: int | None = None,
        clip: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        _validate.check_choice("input", input, ("field", "magnetization"))
        self.input, self.clip = input, _checked_clip(clip, input)
        options = {"couplings": "softmax" if options.get("causal") else "symmetric"} | options
        place: dict[str, Any] = {name: options.get(name) for name in ("device", "dtype")}
        as_field = input == "field"
        self.spins = SpinAttention(dim, heads, **options) if as_field else _InverseResponse(dim, heads, **options)
        self.norm = nn.RMSNorm(dim, **place) if as_field else None
        self.feed_forward = None
        if feed_forward is not None:
            width = _validate.check_integer("feed_forward", feed_forward, low=1, remedy="use None for no such part")
            last = nn.Linear(width, dim, **place)
            if not as_field:
                # Otherwise it would leave the ball of magnetizations before training.
                nn.init.zeros_(last.weight)
                nn.init.zeros_(last.bias)
            first = nn.Linear(dim, width, **place)
            self.feed_forward = nn.Sequential(nn.RMSNorm(dim, **place), first, nn.GELU(), last)

    @property
    def last_solve(self) -> SolveReport | None:
        """The `SolveReport` of the last call, one problem per sample and head."""
        return self.spins.last_solve

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        initial: Tensor | None = None,
        return_state: bool = False,
    ) -> Any:
        """The tokens behind the block.

        Args:
            x: (*batch, N, dim).
            mask: which tokens a token may read, as in `SpinAttention`.
            key_mask: which tokens exist, boolean, (*batch, N). The others change nothing, and their output is 0.
            initial: magnetizations that the solve starts from, (*batch, heads, N, head_dim).
            return_state: return <s_i> as well, of that shape, detached.

        Returns:
            (*batch, N, dim), or a tuple (tokens, state).
        """
        x, read, exists, lost = self._read(x, key_mask, self.spins._on_failure(self.spins.options))
        spun, state = self.spins(read, mask=mask, key_mask=exists, initial=initial, return_state=True)
        y = spun if self.norm is None else x + spun
        if self.feed_forward is not None:
            field = y if self.norm is not None else merge_heads(self.spins._field(read)).to(x.dtype)
            y = y + self.feed_forward(field)
        y = y.to(x.dtype)
        if key_mask is not None:
            y = y.masked_fill(~key_mask[..., None], 0.0)
        if lost is not None:
            y = y.masked_fill(lost[..., None], torch.nan)
        return (y, state) if return_state else y

    if TYPE_CHECKING:
        _call = plain(forward)
        __call__ = _call

    def decompose(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        on_failure: OnFailure | None = None,
    ) -> Decomposition:
        """Return the parts of the spins' answer to x: own field, couplings, self-correction and J(h).

        The sum, `total`, is -dF/dh whatever `derivative` the block answers with: the output of its spins with "total",
        before W_o. At missing tokens the parts are 0, at tokens that no field gives NaN.

        Args:
            x: (*batch, N, dim).
            mask: as in `forward`.
            key_mask: as in `forward`.
            on_failure: for samples whose solve failed, and for tokens that no field gives; None is the layer's.

        Returns:
            A `Decomposition` of parts (*batch, heads, N, head_dim), to the tolerance of the method.

        Raises:
            TypeError: for a method without a free energy. ValueError: for a fixed number of steps.
        """
        name, method = type(self.spins.method).__name__, self.spins.method
        if isinstance(method, DynamicalMethod):
            remedy = "use MeanField, TAP, AdaTAP or SaddlePoint, with couplings='symmetric'"
            received = f"{name}, which describes dynamics"
            raise TypeError(_validate.message("method", "have a free energy to be decomposed", received, remedy))
        required, remedy = "be None to decompose an answer, which has to be solved for", "make the block without steps"
        _validate.require(self.spins.steps is None, "steps", required, self.spins.steps, remedy)
        on_failure = on_failure or self.spins._on_failure(self.spins.options)
        _, read, exists, lost = self._read(x, key_mask, on_failure)
        system = self.spins.system(read, mask=mask, key_mask=exists)
        parts = decompose(system, method, on_failure=on_failure)
        if lost is None:
            return parts
        nowhere = lost.unsqueeze(-2)
        masks = {name: nowhere if name == "gain" else nowhere[..., None] for name in vars(parts)}
        return Decomposition(**{name: part.masked_fill(masks[name], torch.nan) for name, part in vars(parts).items()})

    def _read(
        self, x: Tensor, key_mask: Tensor | None, on_failure: OnFailure
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """x, the input of the spins, the tokens that exist for them, and the tokens that no field gives."""
        self.spins._check_tokens(x)
        x = self.spins._live(x, key_mask)
        if self.norm is not None:
            return x, self.norm(x), key_mask, None
        parts = at_least_single(split_heads(x, self.spins.heads))
        radius = math.sqrt(self.spins.head_dim)
        if self.clip is not None:
            parts = _cut(parts, self.clip * radius)
        inside = ((parts / radius).square().sum(-1) < 1).all(-2)
        _report(inside, on_failure)
        read = merge_heads(parts).masked_fill(~inside[..., None], 0.0)
        return x, read, inside if key_mask is None else inside & key_mask, ~inside

    def extra_repr(self) -> str:
        return f"input={self.input!r}" + ("" if self.clip is None else f", clip={self.clip:g}")


class SpinTransformer(nn.Module):
    """A stack of `SpinTransformerBlock`s of their own weights: the magnetizations of one drive the next.

    y = block_K(... block_2(block_1(x))), without a norm at the end.

    Args:
        dim: width of tokens.
        heads: of every block.
        blocks: K.
        **options: of `SpinTransformerBlock`; a module among them is copied for every block.

    Attributes:
        blocks: the `SpinTransformerBlock`s.

    Gradients: as of the blocks.

    Not for one block with a fixed point through depth: use `EquilibriumTransformer`. No block starts from the state of
    another, nor from that of the call before unless `initial` says so.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers import SpinTransformer
        >>> model, x = SpinTransformer(16, heads=4, blocks=3), torch.randn(2, 5, 16)
        >>> y, states = model(x, return_state=True)
        >>> len(states), len(model.decompose(x))
        (3, 3)
        >>> bool((model(x, initial=states) - y).abs().max() < 1e-2)
        True
    """

    def __init__(self, dim: int, heads: int, *, blocks: int, **options: Any) -> None:
        super().__init__()
        count = _validate.check_integer("blocks", blocks, low=1)
        self.blocks = nn.ModuleList(SpinTransformerBlock(dim, heads, **copy.deepcopy(options)) for _ in range(count))

    def forward(
        self, x: Tensor, *, initial: list[Tensor] | None = None, return_state: bool = False, **masks: Unpack[TokenMasks]
    ) -> Any:
        """The tokens behind the last block.

        Args:
            x: (*batch, N, dim).
            initial: magnetizations that the solves start from, one tensor for each block.
            return_state: return the list of these as well.
            **masks: `mask` and `key_mask`, for all blocks, as in `SpinAttention`.

        Returns:
            (*batch, N, dim), or a tuple (tokens, states).
        """
        count = len(self.blocks)
        starts: list[Tensor | None] = [None] * count
        if initial is not None:
            received = f"{len(initial)} of them" if isinstance(initial, list | tuple) else type(initial).__name__
            fits = isinstance(initial, list | tuple) and len(initial) == count
            _validate.require(fits, "initial", f"be a list of {count} states, one for each block", received)
            starts = list(initial)
        states = []
        for block, start in zip(self.blocks, starts, strict=True):
            x, state = block(x, initial=start, return_state=True, **masks)
            states.append(state)
        return (x, states) if return_state else x

    if TYPE_CHECKING:
        _call = plain(forward)
        __call__ = _call

    def decompose(
        self, x: Tensor, *, on_failure: OnFailure | None = None, **masks: Unpack[TokenMasks]
    ) -> list[Decomposition]:
        """`SpinTransformerBlock.decompose` of every block, at the tokens that reach it.

        Args:
            x: (*batch, N, dim), the input of the first block.
            on_failure: as in `SpinTransformerBlock.decompose`.
            **masks: `mask` and `key_mask`, as in `forward`.
        """
        parts: list[Decomposition] = []
        for block in self.blocks:
            assert isinstance(block, SpinTransformerBlock)
            parts.append(block.decompose(x, on_failure=on_failure, **masks))
            x = block(x, **masks)
        return parts


class _InverseResponse(SpinAttention):
    """Spins in the field in which each of them alone would have its part of x as magnetization."""

    def __init__(self, dim: int, heads: int, **options: Any) -> None:
        remedy = "leave it out, or use input='field'"
        _validate.require(not options.get("bare"), "bare", "be left out for input='magnetization'", True, remedy)
        super().__init__(dim, heads, **options)
        required = "be dim / heads for input='magnetization', which has no projections"
        _validate.require(self.head_dim * heads == dim, "head_dim", required, self.head_dim, remedy)
        self.in_proj = self.out_proj = None
        if isinstance(self.method, SaddlePoint) and (self.method.one_loop or self.method.shared):
            required = "have spins that answer their own field by a response of their own for input='magnetization'"
            remedy = "use SaddlePoint() without one_loop and shared, or MeanField()"
            raise ValueError(_validate.message("method", required, repr(self.method), remedy))
        self.law = self.method.site_response()

    def _field(self, x: Tensor) -> Tensor:
        return self.law.inverse(at_least_single(split_heads(x, self.heads)), self.beta(), math.sqrt(self.head_dim))

    def _seen(self, field: Tensor) -> Tensor:
        return field if self.norm is None else self.norm(field.to(self.norm.weight.dtype))


def _checked_clip(clip: float | None, input: str) -> float | None:
    if clip is None:
        return None
    required = "be None for input='field', which may have any length"
    _validate.require(input == "magnetization", "clip", required, clip, "use input='magnetization'")
    clip = float(_validate.check_number("clip", clip))
    _validate.require(0 < clip < 1, "clip", "be in (0, 1), in units of R", clip, "for example 0.95")
    return clip


def _cut(x: Tensor, limit: float) -> Tensor:
    """x with vectors that are longer than `limit` cut to that length; NaN where the length is not finite."""
    # The square of a large number is infinite. The NaN in its place has no gradient.
    x = x.masked_fill(~x.square().sum(-1, keepdim=True).isfinite(), torch.nan)
    square = x.square().sum(-1, keepdim=True)
    longer = square > limit**2
    return torch.where(longer, limit * torch.where(longer, square, 1.0).rsqrt() * x, x)


@uncompiled
def _report(inside: Tensor, on_failure: OnFailure) -> None:
    """Raise or warn about tokens that no field gives."""
    lost = ~inside

    def message() -> str:
        return (
            f"no finite field gives {int(lost.sum())} of {lost.numel()} tokens: `x` must be shorter than "
            "R = sqrt(head_dim) in every head for input='magnetization'; use clip=0.95, or shorten x"
        )

    tell(on_failure, lost, message, received="NaN for them", but=". Their output is NaN.")

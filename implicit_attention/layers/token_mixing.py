"""Base of `SpinAttention` and `MeanFieldAttention`: sizes, projections and checks of tokens that answer one another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import TypedDict

from .. import _validate
from ..adjoints import Adjoint
from ..attention.masks import check_key_mask
from ..failure import OnFailure
from ..options import SolveOptions
from ..solvers import Solver
from .causal_tokens import Lost, without_nonfinite
from .projections import check_sizes, merge_heads, split_heads
from .remembering import Remembering
from .sharding import check_whole


class TokenOptions(TypedDict, total=False):
    """The options that all layers of tokens that answer one another have."""

    head_dim: int | None
    causal: bool
    steps: int | None
    bare: bool
    solver: Solver | None
    adjoint: Adjoint | None
    on_failure: OnFailure
    device: torch.device | str | None
    dtype: torch.dtype | None


class TokenMixing(Remembering):
    """The options of a layer whose tokens are sites, head by head, and the maps into heads and back."""

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        causal: bool = False,
        steps: int | None = None,
        bare: bool = False,
        solver: Solver | None = None,
        adjoint: Adjoint | None = None,
        on_failure: OnFailure = "warn",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(dim, heads, head_dim, bare)
        self.dim, self.heads, self.head_dim = dim, heads, dim // heads if head_dim is None else head_dim
        self.causal, self.bare = causal, bare
        self.steps = None if steps is None else _validate.check_integer("steps", steps, low=1, remedy="None solves")
        self.options = SolveOptions(solver=solver, adjoint=adjoint, on_failure=on_failure)
        for option in ("solver", "adjoint") if steps is not None else ():
            required = "be None beside steps, which are plain ones"
            _validate.require(getattr(self.options, option) is None, option, required, "one", "leave it out")

    def _make_projections(self, place: dict[str, Any]) -> None:
        self.in_proj = self.out_proj = None
        if not self.bare:
            self.in_proj = nn.Linear(self.dim, self.heads * self.head_dim, False, **place)
            self.out_proj = nn.Linear(self.heads * self.head_dim, self.dim, False, **place)

    def _check_tokens(self, x: Tensor) -> None:
        _validate.check_float_tensor("x", x, min_ndim=2)
        _validate.require(x.shape[-1] == self.dim, "x", f"have width {self.dim} on its last axis", tuple(x.shape))

    def _live(self, x: Tensor, key_mask: Tensor | None, before: int = 0) -> Tensor:
        """x with 0 where there is no token; the mask may begin with `before` tokens of a cache."""
        if key_mask is None:
            return x
        count = x.shape[-2]
        of_all = isinstance(key_mask, Tensor) and key_mask.shape[-1:] == (before + count,)
        check_key_mask(key_mask, x.shape[:-2], before + count if of_all else count)
        # 0 * NaN is NaN: a number at a missing token must not reach the weights' gradients.
        return x.masked_fill(~key_mask[..., -count:, None], 0.0)

    def _field(self, x: Tensor) -> Tensor:
        """x projected, (*batch, heads, N, head_dim)."""
        if self.in_proj is not None:
            x = check_whole("in_proj", self.in_proj(x), self.heads * self.head_dim)
        return split_heads(x, self.heads)

    def _finite_field(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The field; of a causal layer also the tokens, (*batch, heads, N), that are not finite, and are 0 in it."""
        if not self.causal:
            return self._field(x), None
        x, lost = without_nonfinite(x)
        field, strong = without_nonfinite(self._field(x))
        return field, lost[..., None, :] | strong

    def _output(self, state: Tensor, lost: Lost | None) -> Tensor:
        """The state of all heads as tokens (*batch, N, dim), NaN for those that are lost."""
        output = merge_heads(state)
        output = output if self.out_proj is None else self.out_proj(output)
        return output if lost is None else output.masked_fill(lost.tokens.any(-2)[..., None], torch.nan)

    def _text(self, *parts: str) -> str:
        """The sizes, these parts and the flags of the layer, for `extra_repr`."""
        flags = [name for name in ("symmetric", "causal", "bare") if getattr(self, name, False)]
        return ", ".join([f"{self.dim}", f"heads={self.heads}", f"head_dim={self.head_dim}", *parts, *flags])


def pairs_that_read(
    x: Tensor,
    mask: Any,
    sites: Tensor | None,
    *,
    causal: bool,
    own: bool = False,
    symmetric: str = "",
    remedy: str = "",
) -> Tensor:
    """Which site reads which, (*#batch, #heads, N, N): every other one, or with `causal` itself and those before it.

    Args:
        x: (*batch, N, dim).
        mask: the user's, boolean, (N, N) or (*batch, N, N), or None.
        sites: which sites exist, (*batch, 1, N), or None for all.
        causal: see above.
        own: whether a site reads itself without `causal`, too.
        symmetric: what needs a mask that is its own transpose, for the error; empty if nothing does.
        remedy: for that error.
    """
    count = x.shape[-2]
    everything = torch.ones(count, count, dtype=torch.bool, device=x.device)
    others = everything if own else ~torch.eye(count, dtype=torch.bool, device=x.device)
    pairs = everything.tril() if causal else others
    if mask is not None:
        _validate.check_boolean("mask", mask, "be boolean, True = i may read j")
        _validate.check_broadcast("mask", mask.shape, (*x.shape[:-2], count, count), "(*batch, N, N)")
        if symmetric and not bool((mask == mask.mT).all()):
            _validate.refuse("mask", f"be symmetric for {symmetric}", "a pair in one order only", remedy)
        pairs = pairs & (mask if mask.ndim == 2 else mask.unsqueeze(-3))
    return pairs if sites is None else pairs & sites[..., :, None] & sites[..., None, :]


def for_heads(key_mask: Tensor) -> Tensor:
    """(*batch, N) with an axis for heads."""
    return key_mask.unsqueeze(-2) if key_mask.ndim > 1 else key_mask

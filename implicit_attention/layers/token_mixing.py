"""Base of `SpinAttention` and `MeanFieldAttention`: sizes, projections and checks of tokens that answer one another."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import _validate
from ..attention.heads import merge_heads, split_heads
from .causal_tokens import Lost
from .projections import check_sizes
from .remembering import Remembering
from .sharding import check_whole


class TokenMixing(Remembering):
    """Sizes of a layer whose tokens are sites, head by head, and the maps into heads and back."""

    def __init__(self, dim: int, heads: int, head_dim: int | None, *, causal: bool, bare: bool) -> None:
        super().__init__()
        check_sizes(dim, heads, head_dim, bare)
        self.dim, self.heads, self.head_dim = dim, heads, dim // heads if head_dim is None else head_dim
        self.causal, self.bare = causal, bare

    def _make_projections(self, made: dict[str, Any]) -> None:
        self.in_proj = self.out_proj = None
        if not self.bare:
            self.in_proj = nn.Linear(self.dim, self.heads * self.head_dim, False, **made)
            self.out_proj = nn.Linear(self.heads * self.head_dim, self.dim, False, **made)

    def _check_tokens(self, x: Tensor) -> None:
        _validate.check_float_tensor("x", x, min_ndim=2)
        _validate.require(x.shape[-1] == self.dim, "x", f"have width {self.dim} on its last axis", tuple(x.shape))

    def _in_heads(self, x: Tensor) -> Tensor:
        """x projected, (*batch, heads, N, head_dim)."""
        if self.in_proj is not None:
            x = check_whole("in_proj", self.in_proj(x), self.heads * self.head_dim)
        return split_heads(x, self.heads)

    def _output(self, state: Tensor, lost: Lost | None) -> Tensor:
        """The state of all heads as tokens (*batch, N, dim), NaN for those that are lost."""
        output = merge_heads(state)
        output = output if self.out_proj is None else self.out_proj(output)
        return output if lost is None else lost.in_output(output)

"""Couplings between tokens for `SpinAttention`: functions of the field h, (*batch, heads, N, D), with values J."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import _validate
from .projections import Rotary


class Couplings(nn.Module):
    """Base of the couplings that `SpinAttention` makes: `forward(field, pairs)` -> J, (*batch, heads, N, N).

    `pairs`, boolean, broadcasts to J: True = site i reads site j. J is zero elsewhere.

    Not for a function at hand: any callable h -> J may be given to the layer as it is.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers.couplings import Couplings, FreeCouplings
        >>> isinstance(FreeCouplings(heads=2, sites=3), Couplings)
        True
    """

    #: Whether J_ij = J_ji, whatever the weights.
    symmetric: bool = False


class SoftmaxCouplings(Couplings):
    """J = softmax(scale q k^T) over the sites that may be read, with q = h W_q and k = h W_k in every head.

    Rows add up to 1: a ferromagnet, in which tokens of weak fields align.

    Args:
        heads: number of heads.
        head_dim: D.
        scale: of the scores, default 1/sqrt(D).
        rotary: turns q and k by their positions 0, 1, ...
        mean_of_orders: J = (A + A^T)/2 in place of A, symmetric, over pairs that may be read in both orders; its rows
            add up to 1 in the mean only.

    Not for couplings that do not depend on the input: use `FreeCouplings`.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers.couplings import SoftmaxCouplings
        >>> couplings, field = SoftmaxCouplings(heads=2, head_dim=4), torch.randn(3, 2, 5, 4)
        >>> others = ~torch.eye(5, dtype=torch.bool)
        >>> torch.allclose(couplings(field, others).sum(-1), torch.ones(3, 2, 5))
        True
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        rotary: Rotary | None = None,
        mean_of_orders: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.scale = head_dim**-0.5 if scale is None else _validate.check_number("scale", scale)
        self.rotary, self.symmetric = rotary, mean_of_orders
        self.q_weight, self.k_weight = (
            nn.Parameter(_drawn(heads, head_dim, device=device, dtype=dtype)) for _ in range(2)
        )

    def scores(self, field: Tensor) -> Tensor:
        # Outside autocast the field may be in a lower precision than the weights.
        field = field.to(self.q_weight.dtype)
        q, k = field @ self.q_weight, field @ self.k_weight
        if self.rotary is not None:
            positions = torch.arange(field.shape[-2], device=field.device)
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        scores: Tensor = self.scale * q @ k.mT
        return scores

    def forward(self, field: Tensor, pairs: Tensor) -> Tensor:
        pairs = pairs & pairs.mT if self.symmetric else pairs
        scores = self.scores(field).masked_fill(~_normalised_over(pairs), -torch.inf)
        rows = torch.softmax(scores, -1).masked_fill(~pairs, 0.0)
        return (rows + rows.mT) / 2 if self.symmetric else rows

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}" + (", (A + A^T)/2" if self.symmetric else "")


class SymmetricCouplings(Couplings):
    """J_ij = exp(s_ij)/sqrt(Z_i Z_j), s = scale q q^T with q = h W, Z_i = sum_j exp(s_ij): symmetric, of norm <= 1.

    It is the softmax of `SoftmaxCouplings` with W_q = W_k, up to a change of basis: its eigenvalues are the same.

    Args:
        heads: number of heads.
        head_dim: D.
        scale: of the scores, default 1/sqrt(D).
        rotary: turns q by its positions 0, 1, ...

    Not for tokens that may be read without reading: only pairs that exist in both orders are coupled.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers.couplings import SymmetricCouplings
        >>> couplings, field = SymmetricCouplings(heads=2, head_dim=4), torch.randn(3, 2, 5, 4)
        >>> found = couplings(field, ~torch.eye(5, dtype=torch.bool))
        >>> torch.equal(found, found.mT), bool((torch.linalg.matrix_norm(found, 2) < 1.0001).all())
        (True, True)
    """

    symmetric = True

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        rotary: Rotary | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.scale = head_dim**-0.5 if scale is None else _validate.check_number("scale", scale)
        self.rotary = rotary
        self.weight = nn.Parameter(_drawn(heads, head_dim, device=device, dtype=dtype))

    def forward(self, field: Tensor, pairs: Tensor) -> Tensor:
        pairs = pairs & pairs.mT
        q = field.to(self.weight.dtype) @ self.weight
        if self.rotary is not None:
            q = self.rotary(q, torch.arange(field.shape[-2], device=field.device))
        scores = self.scale * q @ q.mT
        # Of both orders the same bits, whatever the kernel's order of sums.
        scores = (scores + scores.mT) / 2
        log_z = torch.logsumexp(scores.masked_fill(~_normalised_over(pairs), -torch.inf), -1) / 2
        return torch.exp((scores - (log_z[..., :, None] + log_z[..., None, :])).masked_fill(~pairs, -torch.inf))

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}"


class FreeCouplings(Couplings):
    """J is a parameter, (heads, sites, sites), which no input changes.

    Args:
        heads: number of heads.
        sites: N.
        scale: standard deviation at the start, default 1/sqrt(sites), at which fields do not grow with N.

    Not for inputs of different lengths.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers.couplings import FreeCouplings
        >>> couplings = FreeCouplings(heads=2, sites=3)
        >>> couplings(torch.randn(5, 2, 3, 4), torch.ones(3, 3, dtype=torch.bool)).shape
        torch.Size([2, 3, 3])
    """

    def __init__(
        self,
        heads: int,
        sites: int,
        *,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sites = _validate.check_integer("sites", sites, low=1)
        scale = sites**-0.5 if scale is None else _validate.check_number("scale", scale, low=0.0)
        self.weight = nn.Parameter(scale * torch.randn(heads, sites, sites, device=device, dtype=dtype))

    def forward(self, field: Tensor, pairs: Tensor) -> Tensor:
        required = f"have as many tokens as sites={self.sites}, which have couplings of their own"
        remedy = "make the layer for that length, or use couplings='softmax'"
        _validate.require(field.shape[-2] == self.sites, "x", required, f"{field.shape[-2]} tokens", remedy)
        couplings: Tensor = self.weight.masked_fill(~pairs, 0.0)
        return couplings

    def extra_repr(self) -> str:
        return f"sites={self.sites}"


def _drawn(heads: int, head_dim: int, *, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    """Maps of heads, (heads, D, D), that keep lengths in the mean."""
    drawn: Tensor = head_dim**-0.5 * torch.randn(heads, head_dim, head_dim, device=device, dtype=dtype)
    return drawn


def _normalised_over(pairs: Tensor) -> Tensor:
    """`pairs`, and all of them for a site that reads nobody, whose weights count nowhere."""
    return pairs | ~pairs.any(-1, keepdim=True)

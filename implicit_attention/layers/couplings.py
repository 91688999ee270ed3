"""Couplings between tokens for `SpinAttention`: functions of the field h, (*batch, heads, N, D), with values J."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import _validate
from .._torch import at_least_single, host_may_look_at_constant
from ..spins import Bonds, LowRank
from ..spins.system import TILE
from .calls import Place
from .projections import Rotary

#: Couplings by name, or any function of the field (*batch, heads, N, head_dim) with values (*batch, heads, N, N).
CouplingChoice: TypeAlias = Literal["softmax", "symmetric", "free", "low_rank"] | Callable[..., Tensor]


class Couplings(nn.Module):
    """Base of the couplings that `SpinAttention` makes: `forward(field, pairs)` -> J, (*batch, heads, N, N).

    `pairs`, boolean, broadcasts to J: True = site i reads site j. J is zero elsewhere. Where `pairwise` is False it is
    `forward(field, sites)` -> `LowRank`, and `sites`, boolean or None, says which sites exist.

    Not for a function at hand: the layer takes any callable h -> J as it is.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers.couplings import Couplings, FreeCouplings
        >>> isinstance(FreeCouplings(heads=2, sites=3), Couplings)
        True
    """

    #: Whether J_ij = J_ji, whatever the weights.
    symmetric: bool = False
    #: Whether there is a number for each pair.
    pairwise: bool = True


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
        **place: device and dtype of the parameters.

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
        **place: Unpack[Place],
    ) -> None:
        super().__init__()
        self.scale = head_dim**-0.5 if scale is None else _validate.check_number("scale", scale)
        self.rotary, self.symmetric = rotary, mean_of_orders
        self.q_weight, self.k_weight = (_weight(heads, head_dim, head_dim, **place) for _ in range(2))

    def keys(self, field: Tensor, first: int = 0) -> Tensor:
        """k of sites that begin at the position `first`."""
        return _projected(field, self.k_weight, self.rotary, first)

    def forward(self, field: Tensor, pairs: Tensor, keys: Tensor | None = None) -> Tensor:
        """J; with the `keys` of earlier sites and of these it is (*batch, heads, N, M), as are the `pairs` (N, M)."""
        keys = self.keys(field) if keys is None else keys
        q = _projected(field, self.q_weight, self.rotary, keys.shape[-2] - field.shape[-2])
        pairs = pairs & pairs.mT if self.symmetric else pairs
        scores = self.scale * q @ keys.mT
        if host_may_look_at_constant(pairs) and bool(pairs.any(-1).all()):
            rows = torch.softmax(scores.masked_fill_(~pairs, -torch.inf), -1)
        else:
            rows = torch.softmax(scores.masked_fill(~_normalised_over(pairs), -torch.inf), -1).masked_fill(~pairs, 0.0)
        return mean_of_orders(rows) if self.symmetric else rows

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}" + (", (A + A^T)/2" if self.symmetric else "")


class SymmetricCouplings(Couplings):
    r"""Symmetric couplings of norm <= 1, from q = h W.

    ```math
    J_{ij} = \frac{e^{s_{ij}}}{\sqrt{Z_i Z_j}}, \qquad s = \text{scale} \cdot q\, q^\top, \qquad Z_i = \sum_j e^{s_{ij}}
    ```

    It is the softmax of `SoftmaxCouplings` with W_q = W_k, up to a change of basis: its eigenvalues are the same.

    Args:
        heads: number of heads.
        head_dim: D.
        scale: of the scores, default 1/sqrt(D).
        rotary: turns q by its positions 0, 1, ...
        **place: device and dtype of the parameters.

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
        **place: Unpack[Place],
    ) -> None:
        super().__init__()
        self.scale = head_dim**-0.5 if scale is None else _validate.check_number("scale", scale)
        self.rotary = rotary
        self.weight = _weight(heads, head_dim, head_dim, **place)

    def forward(self, field: Tensor, pairs: Tensor) -> Tensor:
        pairs = pairs & pairs.mT
        q = _projected(field, self.weight, self.rotary)
        # Both orders get the same bits, whatever the kernel's order of sums.
        scores = mean_of_orders(self.scale * q @ q.mT)
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
        **place: device and dtype of the parameters.

    Not for inputs of different lengths.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers.couplings import FreeCouplings
        >>> couplings = FreeCouplings(heads=2, sites=3)
        >>> couplings(torch.randn(5, 2, 3, 4), torch.ones(3, 3, dtype=torch.bool)).shape
        torch.Size([2, 3, 3])
    """

    def __init__(self, heads: int, sites: int, *, scale: float | None = None, **place: Unpack[Place]) -> None:
        super().__init__()
        self.sites = _validate.check_integer("sites", sites, low=1)
        scale = sites**-0.5 if scale is None else _validate.check_number("scale", scale, low=0.0)
        self.weight = nn.Parameter(scale * torch.randn(heads, sites, sites, **place))

    def forward(self, field: Tensor, pairs: Tensor) -> Tensor:
        required = f"have as many tokens as sites={self.sites}, which have couplings of their own"
        remedy = "make the layer for that length, or use couplings='softmax'"
        _validate.require(field.shape[-2] == self.sites, "x", required, f"{field.shape[-2]} tokens", remedy)
        couplings: Tensor = self.weight.masked_fill(~pairs, 0.0)
        return couplings

    def extra_repr(self) -> str:
        return f"sites={self.sites}"


class LowRankCouplings(Couplings):
    """J = U U^T without its diagonal, U = q/|q^T q|_F^(1/2) with q = h W: symmetric, of norm <= 1.

    There is no (N, N) tensor: memory and time grow with N rank. Between N sites that are all alike J_ij is 1/N.

    Args:
        heads: number of heads.
        head_dim: D.
        rank: width of q, default D.
        **place: device and dtype of the parameters.

    Not for couplings that a mask or an order of tokens limits: use `SymmetricCouplings` or `SoftmaxCouplings`.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers.couplings import LowRankCouplings
        >>> couplings = LowRankCouplings(heads=2, head_dim=8, rank=4)
        >>> couplings(torch.randn(3, 2, 5, 8)).dense().shape
        torch.Size([3, 2, 5, 5])
    """

    symmetric, pairwise = True, False

    def __init__(self, heads: int, head_dim: int, *, rank: int | None = None, **place: Unpack[Place]) -> None:
        super().__init__()
        self.rank = head_dim if rank is None else _validate.check_integer("rank", rank, low=1)
        self.weight = _weight(heads, head_dim, self.rank, **place)

    def forward(self, field: Tensor, sites: Tensor | None = None) -> LowRank:
        q = at_least_single(field.to(self.weight.dtype) @ self.weight)
        if sites is not None:
            q = q.masked_fill(~sites[..., None], 0.0)
        size = torch.linalg.matrix_norm(q.mT @ q).clamp(min=torch.finfo(q.dtype).tiny)
        return LowRank(q / size.sqrt()[..., None, None])

    def extra_repr(self) -> str:
        return f"rank={self.rank}"


class GivenCouplings(Couplings):
    """Couplings by a function or a module of the field, which are zero where `pairs` says so.

    Args:
        function: h, (*batch, heads, N, D), to J, (*batch, heads, N, N), or to `Bonds`, which become that tensor. Its
            attribute `symmetric` says whether J is.

    Not needed to give a function to `SpinAttention`, which makes this of it.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers.couplings import GivenCouplings
        >>> couplings, all_pairs = GivenCouplings(lambda h: h @ h.mT), torch.ones(3, 3, dtype=torch.bool)
        >>> couplings(torch.ones(3, 2), all_pairs).diagonal()
        tensor([2., 2., 2.])
    """

    def __init__(self, function: Callable[..., Tensor | Bonds]) -> None:
        super().__init__()
        self.function = function
        self.symmetric = bool(getattr(function, "symmetric", False))

    def forward(self, field: Tensor, pairs: Tensor) -> Tensor:
        found = self.function(field)
        couplings = found.dense() if isinstance(found, Bonds) else found
        _validate.check_float_tensor("couplings", couplings, min_ndim=2)
        count, shape = field.shape[-2], couplings.shape
        _validate.check_broadcast("couplings", shape, (*field.shape[:-1], count), "(*batch, heads, N, N)")
        required, received = f"end with the axes (N, N) = {(count, count)}", f"shape {tuple(shape)}"
        _validate.require(shape[-2:] == (count, count), "couplings", required, received)
        return couplings.masked_fill(~pairs, 0.0)


def chosen(
    choice: Any,
    method: Any,
    heads: int,
    head_dim: int,
    *,
    causal: bool,
    rotary: Rotary | None,
    sites: int | None,
    **place: Unpack[Place],
) -> Couplings:
    """The couplings that a `CouplingChoice` means, for a method, or None where that is still to be chosen."""
    if choice == "free":
        remedy = "pass sites=N"
        _validate.require(sites is not None, "sites", "be the number of tokens for couplings='free'", None, remedy)
        _validate.require(rotary is None, "rotary", "be None for couplings='free', which make no queries", rotary)
        assert sites is not None
        return FreeCouplings(heads, sites, **place)
    _validate.require(sites is None, "sites", "be None unless couplings='free'", sites)
    if choice == "softmax":
        # Without a method, softmax is a mean of both orders, unless it is causal.
        twofold = not causal and getattr(method, "symmetric", True)
        return SoftmaxCouplings(heads, head_dim, rotary=rotary, mean_of_orders=twofold, **place)
    if choice in ("low_rank", "symmetric"):
        read = "all tokens read each other" if choice == "low_rank" else "both tokens of a pair read each other"
        required = f"be False for couplings={choice!r}, by which {read}"
        _validate.require(not causal, "causal", required, causal, "use couplings='softmax'")
        if choice == "symmetric":
            return SymmetricCouplings(heads, head_dim, rotary=rotary, **place)
        remedy = "use couplings='symmetric'"
        _validate.require(rotary is None, "rotary", "be None for couplings='low_rank'", rotary, remedy)
        return LowRankCouplings(heads, head_dim, **place)
    if isinstance(choice, str) or not callable(choice):
        required = "be 'softmax', 'symmetric', 'free', 'low_rank', or a function of the field"
        raise TypeError(_validate.message("couplings", required, repr(choice)))
    _validate.require(rotary is None, "rotary", "be None for couplings of one's own", rotary, "turn them there")
    if not isinstance(choice, Couplings):
        return GivenCouplings(choice)
    required = "be False for couplings that are symmetric, by which a token is read by those that it reads"
    _validate.require(not (causal and choice.symmetric), "causal", required, causal)
    return choice


def mean_of_orders(matrices: Tensor) -> Tensor:
    """(A + A^T)/2, of the same bits in both orders."""
    large = matrices.device.type == "cpu" and matrices.shape[-1] > TILE and not torch.compiler.is_compiling()
    return _MeanOfOrders.apply(matrices) if large else (matrices + matrices.mT) / 2  # type: ignore[no-untyped-call]


class _MeanOfOrders(torch.autograd.Function):
    """The same in tiles that stay in the processor's cache, where a matrix read along its columns does not."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrices: Tensor) -> Tensor:
        mean, starts = torch.empty_like(matrices), range(0, matrices.shape[-1], TILE)
        for i, j in itertools.combinations_with_replacement((slice(k, k + TILE) for k in starts), 2):
            mean[..., i, j] = (matrices[..., i, j] + matrices[..., j, i].mT).mul_(0.5)
            mean[..., j, i] = mean[..., i, j].mT
        return mean

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Linear and its own transpose: nothing is saved."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return mean_of_orders(gradient)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return mean_of_orders(tangent)


def _weight(heads: int, rows: int, columns: int, **place: Unpack[Place]) -> nn.Parameter:
    """Maps of heads, (heads, rows, columns), of which square ones keep lengths in the mean."""
    return nn.Parameter(rows**-0.5 * torch.randn(heads, rows, columns, **place))


def _projected(field: Tensor, weight: Tensor, rotary: Rotary | None, first: int = 0) -> Tensor:
    """The fields of sites that begin at the position `first`, projected by `weight` and turned by their positions."""
    # Outside autocast the field may be in a lower precision than the weights.
    projected = field.to(weight.dtype) @ weight
    if rotary is None:
        return projected
    return rotary(projected, torch.arange(first, first + projected.shape[-2], device=projected.device))


def _normalised_over(pairs: Tensor) -> Tensor:
    """`pairs`, with all pairs of a site that reads no site: its weights are set to 0 later."""
    return pairs | ~pairs.any(-1, keepdim=True)

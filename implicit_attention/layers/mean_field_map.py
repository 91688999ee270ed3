"""The map of `MeanFieldAttention`, z -> sum_j J_ij z_j - f(z_i) + x_i: its parts, and bounds of their norms."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import _validate
from .._torch import at_least_single, jvp_by_vjp
from ..linear import spectral_radius
from ..potentials import SaddlePointResponse
from ..problem import Problem
from .calls import Place
from .contractive import bounded, norm_bound

#: The largest slope of GELU, rounded up.
GELU_SLOPE = 1.13
#: Krylov vectors by which the spectral radius of a map of unknown slope is estimated.
KRYLOV = 16


class BlockCouplings(nn.Module):
    """J is a parameter, a matrix for each pair of sites, (heads, sites, sites, D, D), which no input changes.

    Args:
        heads: number of heads.
        sites: N.
        head_dim: D.
        scale: standard deviation at the start.
        **place: device and dtype of the parameters.

    Not for many sites: it has (N D)^2 numbers per head.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers.mean_field_map import BlockCouplings
        >>> couplings = BlockCouplings(heads=2, sites=3, head_dim=4, scale=0.1)
        >>> couplings(torch.randn(5, 2, 3, 4), torch.ones(3, 3, dtype=torch.bool)).shape
        torch.Size([2, 3, 3, 4, 4])
    """

    def __init__(self, heads: int, sites: int, head_dim: int, *, scale: float, **place: Unpack[Place]) -> None:
        super().__init__()
        self.weight = nn.Parameter(scale * torch.randn(heads, sites, sites, head_dim, head_dim, **place))

    def forward(self, field: Tensor, pairs: Tensor) -> Tensor:
        couplings: Tensor = self.weight.masked_fill(~pairs[..., None, None], 0.0)
        return couplings

    def extra_repr(self) -> str:
        return f"sites={self.weight.shape[1]}"


class Perceptron(nn.Module):
    """v W_1 -> gelu(v W_1 + b) W_2 in every head, of a Lipschitz constant of at most `limit`.

    Args:
        heads: number of heads.
        width: of input and output.
        hidden: width between them.
        limit: of the Lipschitz constant; W_2 is scaled where the product of the norms would be larger.
        zero: start as the zero function, W_2 = 0; else at about half of the limit.
        **place: device and dtype of the parameters.

    Not for layers whose slope need not be bounded: use `nn.Linear` and an activation.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers.mean_field_map import Perceptron
        >>> net = Perceptron(heads=2, width=4, hidden=16, limit=0.5, zero=True)
        >>> net(torch.randn(3, 2, 5, 4)).abs().max().item()
        0.0
    """

    def __init__(
        self, heads: int, width: int, hidden: int, *, limit: float, zero: bool, **place: Unpack[Place]
    ) -> None:
        super().__init__()
        self.limit = limit
        drawn = [torch.randn(heads, *shape, **place) for shape in ((width, hidden), (hidden, width))]
        self.first = nn.Parameter(width**-0.5 * drawn[0])
        self.bias = nn.Parameter(torch.zeros(heads, 1, hidden, **place))
        # The norm of a random matrix is about its scale times the sum of the roots of its sides.
        norms = (1 + math.sqrt(hidden / width)) * (math.sqrt(hidden) + math.sqrt(width))
        self.second = nn.Parameter((0.0 if zero else limit / (2 * GELU_SLOPE * norms)) * drawn[1])

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """W_1, b and W_2 of the function, which obey the limit."""
        first, bias, second = (at_least_single(t) for t in (self.first, self.bias, self.second))
        return first, bias, second * (self.limit / self._product(first, second).clamp(min=self.limit))[:, None, None]

    def lipschitz(self) -> Tensor:
        """A Lipschitz constant of every head, (heads)."""
        first, _, second = self.weights()
        return self._product(first, second)

    def forward(self, v: Tensor) -> Tensor:
        return perceptron(v, *self.weights())

    def extra_repr(self) -> str:
        return f"width={self.first.shape[1]}, hidden={self.first.shape[2]}, Lipschitz constant <= {self.limit:g}"

    @staticmethod
    def _product(first: Tensor, second: Tensor) -> Tensor:
        return GELU_SLOPE * norm_bound(first) * norm_bound(second)


def perceptron(v: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> Tensor:
    """The function of a `Perceptron`, (*batch, heads, n, width) -> the same."""
    hidden: Tensor = nn.functional.gelu(v @ first + bias)
    return hidden @ second


# Couplings.


def as_matrix(couplings: Tensor) -> Tensor:
    """(*batch, N, N, D, D) as (*batch, N D, N D)."""
    return couplings.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def squared(couplings: Tensor, *, block: bool) -> Tensor:
    """K_ij, the mean of |J_ij v|^2 over unit vectors v, (*batch, N, N)."""
    return couplings.square().sum((-2, -1)) / couplings.shape[-1] if block else couplings.square()


def spent(couplings: Tensor, *, block: bool, rows: bool) -> Tensor:
    """A bound of |J| per matrix: |J|_2, or with `rows` the largest sum of a row, which all |z_i|_2 obey."""
    matrix = as_matrix(couplings) if block else couplings
    return matrix.abs().sum(-1).amax(-1) if rows else norm_bound(matrix)


def within(couplings: Tensor, limit: float, *, block: bool, rows: bool, reaction: bool) -> Tensor:
    """t J with the largest t <= 1 for which t |J| <= limit, or, with a reaction to them, t |J| + 3 t^2 k <= limit.

    k is the largest row sum of K. The reaction r_i(z) = z_i sum_j K_ij (1 - |z_j|^2/D) has the Jacobian
    delta_ij s_i - (2/D) K_ij z_i z_j^T with 0 <= s_i <= k, where all |z_i|^2 <= D; the norm of the second part is at
    most 2 k, in the Euclidean norm (K is symmetric) and in the largest |z_i|_2.
    """
    if not (block or rows or reaction):
        return bounded(couplings, limit)
    norm = spent(couplings, block=block, rows=rows)
    if reaction:
        curved = squared(couplings, block=block).sum(-1).amax(-1)
        root = (norm.square() + 12 * limit * curved).clamp(min=torch.finfo(norm.dtype).tiny).sqrt()
        norm = (norm + root) / 2
    share = limit / norm.clamp(min=limit)
    return couplings * share.reshape(*share.shape, *(1,) * (couplings.ndim - share.ndim))


def certain(couplings: Tensor, *, block: bool, rows: bool, reaction: bool) -> Tensor:
    """The Lipschitz constant that `within` bounds, of these couplings."""
    norm = spent(couplings, block=block, rows=rows)
    return norm + 3 * squared(couplings, block=block).sum(-1).amax(-1) if reaction else norm


# The map.


def reaction(z: Tensor, weights: Tensor, live: Tensor | None) -> Tensor:
    """r_i = z_i sum_j K_ij (1 - |z_j|^2/D), read at the nearest point at which all |z_i|^2 <= D.

    All solutions lie there, so that none is changed, and its Lipschitz constant holds everywhere.
    """
    z = z / (z.square().mean(-1, keepdim=True)).clamp(min=1.0).sqrt()
    variance = 1 - z.square().mean(-1, keepdim=True)
    if live is not None:
        variance = variance.masked_fill(~live, 0.0)
    return z * (weights @ variance)


def next_state(
    z: Tensor,
    x: Tensor,
    live: Tensor | None,
    mixing: str | Callable[..., Tensor],
    mixed_by: Any,
    correction: str | Callable[..., Tensor] | None,
    corrected_by: Any,
) -> Tensor:
    """The map, (*batch, heads, N, D) -> the same; missing sites are zero in z, in x and in the result.

    Args:
        z: state.
        x: field.
        live: which sites exist, (*batch, 1, N, 1), or None.
        mixing: "numbers", "blocks" or "mixer", with the tensors `mixed_by`; or a function of z.
        mixed_by: couplings, or the weights of a perceptron.
        correction: None, "exact" (with K) or "learned" (with the weights of a perceptron); or a function of z.
        corrected_by: the tensors of the correction.
    """
    others: Tensor
    if mixing == "numbers":
        others = mixed_by @ z
    elif mixing == "blocks":
        # Sample by sample, so that the bits of one depend on no other: a product of all at once would be less work.
        others = (mixed_by @ z.flatten(-2)[..., None]).reshape(z.shape)
    elif mixing == "mixer":
        others = perceptron(z.mT, *mixed_by).mT
    else:
        others = _checked("mixing", mixing, z)
    result = x + others
    if correction == "exact":
        # The fixed point of x + J z - f(z), f(z) = response^{-1}(z) - z + r(z), solved for the response's argument.
        radius = math.sqrt(z.shape[-1])
        result = SaddlePointResponse().magnetization(result - reaction(z, corrected_by, live), 1.0, radius)
    elif correction == "learned":
        result = result - perceptron(z, *corrected_by)
    elif correction is not None:
        result = result - _checked("correction", correction, z)
    return result if live is None else result.masked_fill(~live, 0.0)


def _checked(name: str, function: Any, z: Tensor) -> Tensor:
    result: Any = function(z)
    required = f"return the shape of z, (*batch, heads, N, head_dim) = {tuple(z.shape)}"
    _validate.check_instance(name, result, Tensor, required)
    _validate.require(result.shape == z.shape, name, required, f"shape {tuple(result.shape)}")
    return result  # type: ignore[no-any-return]


@torch.no_grad()
def watch(problem: Problem, z: Tensor, contraction: float) -> None:
    """Warn where the spectral radius of the map at z, which bounds its slope from below, exceeds `contraction`."""

    def product(v: Tensor) -> Tensor:
        return jvp_by_vjp(problem.fixed_point_map, (z,), (v.reshape(z.shape),)).flatten(-3)

    radius = spectral_radius(product, torch.ones_like(z).flatten(-3), KRYLOV)
    largest = float(radius.nan_to_num(0.0).max()) if radius.numel() else 0.0
    if largest > contraction:
        warnings.warn(
            f"with the mixing and correction that were given, the map of MeanFieldAttention has a spectral radius of "
            f"about {largest:.3g} at its solution, above contraction={contraction:g}: its Lipschitz constant is no "
            "smaller; scale them down, for example by `contractive`, or raise contraction",
            UserWarning,
            stacklevel=5,
        )


def check_choices(
    mixing: Any, correction: Any, requested: Any, symmetric: bool, causal: bool, sites: Any, expansion: Any
) -> None:
    """Raise unless the options of a `MeanFieldAttention` go together; `requested` is its argument `symmetric`."""
    for name, choice, words in (
        ("mixing", mixing, ("softmax", "free", "blocks", "mixer")),
        ("correction", correction, (None, "exact", "learned")),
    ):
        known = choice in words if choice is None or isinstance(choice, str) else callable(choice)
        if not known:
            required = f"be {', '.join(map(repr, words))} or a function of z"
            raise TypeError(_validate.message(name, required, repr(choice)))
    matrix = mixing in ("softmax", "free", "blocks")
    own = "a function of one's own" if callable(mixing) else f"mixing={mixing!r}"
    if mixing in ("free", "blocks", "mixer"):
        required = f"be the number of tokens for {own}"
        _validate.require(sites is not None, "sites", required, None, "pass sites=N")
    else:
        _validate.require(sites is None, "sites", "be None unless mixing is 'free', 'blocks' or 'mixer'", sites)
    if not matrix:
        required, remedy = f"be False for {own}, which is no matrix of pairs", "use 'softmax', 'free' or 'blocks'"
        _validate.require(not causal, "causal", required, causal, remedy)
        _validate.require(not requested, "symmetric", required, requested, remedy)
        required = f"be no 'exact' one for {own}, which has no couplings"
        _validate.require(correction != "exact", "correction", required, repr(correction), "use 'learned'")
    required = "be False for symmetric couplings, by which a token is read by those that it reads"
    _validate.require(not (causal and symmetric), "causal", required, causal)
    required = "be True or None for correction='exact', the reaction to symmetric couplings"
    _validate.require(correction != "exact" or symmetric, "symmetric", required, requested)
    used = mixing == "mixer" or correction == "learned"
    required = "be None unless mixing='mixer' or correction='learned'"
    _validate.require(used or expansion is None, "expansion", required, expansion)

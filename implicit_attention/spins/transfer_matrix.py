"""The exact log-partition function of open chains of vector spins in fields along one direction."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .. import _validate
from .._torch import host_may_look, is_plain
from ..potentials import SphereUnits
from ..solution import Remedies, Status
from ._request import closed_form
from .approximation import Approximation, LogPartition, require_numbers
from .enumeration import log_mean_exp
from .system import SpinSystem

# Relative size, in units of eps, up to which fields off the axis and couplings beyond neighbours are rounding.
SLACK = 64.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferMatrix(Approximation):
    """log Z of spins of which only neighbours i, i + 1 are coupled, by numbers, and whose fields lie on one axis.

    Summed site by site: the sum over the sites before i is a function of x = cos(angle between s_i and the axis),
    held at Gauss-Gegenbauer nodes; a bond is averaged over the angle around the axis in closed form. Masked sites cut
    the chain. D = 1 has two nodes and is exact at any temperature.

    Args:
        nodes: how many. They have to resolve functions such as exp(beta R^2 J x): the lower the temperature, and the
            further spins of many dimensions are aligned, the more it takes. A result that changes with three quarters
            of the nodes has the status MAX_STEPS; then raise `nodes`. float32 is summed in float64, too.

    Raises:
        ValueError: couplings between others than neighbours, matrices as couplings, fields along several directions.
            Where the host cannot look, the sample is NaN instead.

    Gradients: with respect to field, couplings and beta; to any order along the axis and for the chain's own couplings.
    Across the axis derivatives of log Z are exact up to the third, so that m and chi are right in all directions and
    can be differentiated once; for couplings between others than neighbours up to the first, so that correlations of
    all pairs are right.

    Reference: Stanley (1969) for the chain without a field.

    Not for rings, of which `Bethe()` is good, or for couplings between others than neighbours: use `Enumeration()`,
    `AdaTAP()` or samples.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import SpinSystem, TransferMatrix, thermodynamics
        >>> chain = SpinSystem(torch.ones(5, 5).tril(1).triu(-1) - torch.eye(5), torch.zeros(5, 3))
        >>> thermodynamics(chain, TransferMatrix()).correlations[0].round(decimals=2)
        tensor([3.0000, 2.0100, 1.3500, 0.9100, 0.6100])
    """

    exact = True
    remedies: ClassVar[Remedies] = {
        **Approximation.remedies,
        Status.MAX_STEPS: "raise `nodes`, which do not resolve the weights of the bonds",
        Status.NONFINITE: "look for NaN, infinities, bonds beyond neighbours and fields off the axis in this sample",
    }

    nodes: int = 80

    def __post_init__(self) -> None:
        _validate.check_integer("nodes", self.nodes, low=8)

    def check(self, system: SpinSystem) -> None:
        require_numbers("TransferMatrix", system, "use MeanField or SaddlePoint")
        super().check(system)
        if not host_may_look(system.field, system.couplings):
            return
        beyond, across = _foreign(system)
        required = "be zero except between neighbours i, i + 1 for TransferMatrix"
        remedy = "put the sites in the order of the chain, or use MeanField, SaddlePoint or Enumeration"
        _require_small("couplings", beyond, required, "one of size {:.2g} between others", remedy)
        required, remedy = "lie along one direction in every sample for TransferMatrix", "use MeanField or SaddlePoint"
        _require_small("field", across, required, "a part of {:.2g} of the largest across it", remedy)

    def log_partition(self, system: SpinSystem) -> LogPartition:
        dtype = system.field.dtype
        chain = _Chain.of(system)
        nodes = _nodes(system.dim, self.nodes, chain.along)
        kernels, cosine = _kernels(chain, nodes)
        sums = _sums(chain, nodes, kernels)
        value = log_mean_exp(sums[-1], -1, nodes.log_weight)
        if not is_plain(chain.across, chain.beyond):
            value = value + _first_orders(chain, nodes, sums, kernels, cosine)
        value = value + chain.constant
        fixed = _Chain(*(t.detach() for t in chain))
        fewer = _nodes(system.dim, 3 * self.nodes // 4, chain.along)
        last = _sums(fixed, fewer, _kernels(fixed, fewer)[0])[-1]
        coarse = log_mean_exp(last, -1, fewer.log_weight) + fixed.constant
        residual = (value.detach() - coarse).abs().to(dtype)
        value = value.to(dtype)
        tolerance = torch.finfo(dtype).eps ** 0.75 * (1 + value.detach().abs())
        report = closed_form(value, residual, tolerance)
        count = torch.full_like(report.num_steps, len(nodes.x))
        return LogPartition(value, report.amended(num_steps=count, num_evals=count))


class _Chain(NamedTuple):
    """A system as a chain, in units of 1/beta and R, in float64.

    along: (*batch, N), fields on the axis. across: (*batch, N, D), the rest, numbers that are zero with derivatives
    that are not. bonds: (*batch, N - 1). beyond: (*batch, N, N), couplings of i < j - 1, also zero. constant:
    (*batch), from a diagonal, NaN where fields or couplings are not of this kind.
    """

    along: Tensor
    across: Tensor
    bonds: Tensor
    beyond: Tensor
    constant: Tensor

    @classmethod
    def of(cls, system: SpinSystem) -> _Chain:
        slack = SLACK * torch.finfo(system.field.dtype).eps
        far, aside = ((sizes > slack).any(-1) for sizes in _foreign(system))
        system = system.wide()
        beta = system.beta_over(2)
        field = beta * system.radius * system.live_field
        couplings = (beta * system.radius**2 * system.live_couplings).expand(*system.batch, -1, -1)
        axis = _axis(field)
        along = (field * axis).sum(-1)
        # Both orders of a pair count half.
        pairs = (couplings + couplings.mT) / 2
        constant = couplings.diagonal(0, -2, -1).sum(-1) / 2
        return cls(
            along,
            field - along[..., None] * axis,
            pairs.diagonal(1, -2, -1),
            pairs.triu(2),
            torch.where(far | aside, torch.nan, constant),
        )


class _Nodes(NamedTuple):
    """Gauss nodes x for functions of the cosine on the sphere, (n), sqrt(1 - x^2) and logs of weights that sum to 1."""

    x: Tensor
    sin: Tensor
    log_weight: Tensor


@functools.lru_cache(maxsize=64)
def _gauss(dim: int, count: int) -> tuple[Any, Any, Any]:
    import numpy as np
    from scipy.linalg import eigh_tridiagonal

    if dim == 1:
        return np.array([-1.0, 1.0]), np.zeros(2), np.log([0.5, 0.5])
    # x p_n = b_(n+1) p_(n+1) + b_n p_(n-1) for Gegenbauer polynomials p_n that are orthonormal on the sphere.
    n = np.arange(2, count)
    b = np.sqrt(np.append(1 / dim, n * (n + dim - 3) / ((2 * n + dim - 2) * (2 * n + dim - 4))))
    x = eigh_tridiagonal(np.zeros(count), b, eigvals_only=True)
    x = (x - x[::-1]) / 2
    # The weight of a node is 1/sum_n p_n^2; as components of eigenvectors small ones, which fields make large, would be
    # lost. They outgrow all numbers, and are carried along with the logarithm of a factor.
    before, now, total, scale = np.zeros(count), np.ones(count), np.ones(count), np.zeros(count)
    for k in range(count - 1):
        before, now = now, (x * now - (b[k - 1] * before if k else 0)) / b[k]
        total += now**2
        factor = np.maximum(np.abs(now), 1)
        before, now, total, scale = before / factor, now / factor, total / factor**2, scale + np.log(factor)
    log_weight = -np.log(total) - 2 * scale
    return x, np.sqrt(1 - x**2), log_weight - np.log(np.exp(log_weight).sum())


def _nodes(dim: int, count: int, like: Tensor) -> _Nodes:
    return _Nodes(*(torch.as_tensor(a, dtype=like.dtype, device=like.device) for a in _gauss(dim, count)))


def _kernels(chain: _Chain, nodes: _Nodes) -> tuple[Tensor, Tensor]:
    """Log of the weight of a bond, averaged over the angle around the axis, and the mean cosine of that angle.

    Both (*batch, N - 1, n, n). s . s' = x x' + sin sin' u . u' with units u across the axis: a spin in D - 1 dimensions
    in the field of another.
    """
    bonds = chain.bonds[..., None, None]
    exponent = bonds * (nodes.x[:, None] * nodes.x)
    dim = chain.across.shape[-1]
    if dim == 1:
        return exponent, torch.zeros_like(exponent)
    around = bonds * (nodes.sin[:, None] * nodes.sin)
    response, square = SphereUnits(), around.square()
    kernel = exponent + response.scaled_log_partition(square, dim - 1)
    return kernel, around * response.gain(square, dim - 1)


def _sums(chain: _Chain, nodes: _Nodes, kernels: Tensor) -> list[Tensor]:
    """Log of the mean over sites 1 to i - 1 with s_i at a node, in its own field: (*batch, n) for every site i.

    In logarithms all along: where spins of many dimensions are aligned, only a part of the nodes that is far from the
    largest weights and the largest kernels matters.
    """
    sites = chain.along[..., None] * nodes.x
    sums = [sites[..., 0, :]]
    for i in range(1, sites.shape[-2]):
        pairs = sums[-1][..., :, None] + kernels[..., i - 1, :, :]
        sums.append(log_mean_exp(pairs, -2, nodes.log_weight[:, None]) + sites[..., i, :])
    return sums


def _first_orders(chain: _Chain, nodes: _Nodes, sums: list[Tensor], kernels: Tensor, cosine: Tensor) -> Tensor:
    """Add small fields across the axis and couplings beyond neighbours: 0, with the right derivatives.

    To lowest order that is sum_ij a_i . a_j <s_i . s_j>_across/(2 (D - 1)) + sum_{i<j} J_ij <s_i . s_j>.
    """
    along, across = _pair_correlations(chain, nodes, sums, kernels, cosine)
    products = chain.across @ chain.across.mT
    # The first of both orders of a pair stands for both. For D = 1 nothing is across.
    twice = (products.triu() + products.triu(1)) / (2 * max(chain.across.shape[-1] - 1, 1))
    return (chain.beyond * (along + across) + twice * across).sum((-2, -1))


def _pair_correlations(
    chain: _Chain, nodes: _Nodes, sums: list[Tensor], kernels: Tensor, cosine: Tensor
) -> tuple[Tensor, ...]:
    """<s_i . s_j>/R^2 of i <= j, the parts along and across the axis, (*batch, N, N) each."""
    last = len(sums) - 1
    # The sums over the sites behind, each in its own field, which counts once.
    rest = _sums(chain._replace(along=chain.along.flip(-1)), nodes, kernels.flip(-3))
    # Row i: the averages of x_i, and of sin_i times its unit across the axis along that of s_j, for a fixed s_j.
    own = torch.stack([nodes.x, nodes.sin])[:, None].expand(*sums[0].shape[:-1], 2, 1, -1)
    mean, columns = own, []
    for j in range(last + 1):
        if j:
            # The law of s_(j-1) for a fixed s_j, from the sites up to j: columns that sum to 1.
            law = ((sums[j - 1] + nodes.log_weight)[..., :, None] + kernels[..., j - 1, :, :]).softmax(-2)
            mean = torch.cat([mean @ torch.stack([law, law * cosine[..., j - 1, :, :]], -3), own], -2)
        own_field = chain.along[..., j, None] * nodes.x
        weight = (sums[j] + rest[last - j] - own_field + nodes.log_weight).softmax(-1)
        columns.append(functional.pad((mean * own * weight[..., None, None, :]).sum(-1), (0, last - j)))
    return torch.stack(columns, -1).unbind(-3)


def _axis(field: Tensor) -> Tensor:
    """The direction of the largest field of every sample, (*batch, 1, D); some direction where there is none."""
    field = field.detach()
    size = torch.linalg.vector_norm(field, dim=-1)
    axis = field.take_along_dim(size.argmax(-1, keepdim=True)[..., None], -2)
    norm = torch.linalg.vector_norm(axis, dim=-1, keepdim=True)
    first = torch.eye(field.shape[-1], dtype=field.dtype, device=field.device)[0]
    return torch.where(norm == 0, first, axis / torch.where(norm == 0, 1.0, norm))


def _foreign(system: SpinSystem) -> tuple[Tensor, Tensor]:
    """Sizes of couplings of other pairs than neighbours, (*batch, N^2), and of the part of every field across the axis,
    relative to the largest field, (*batch, N)."""
    couplings, field = system.live_couplings.detach(), system.live_field.detach()
    axis = _axis(field)
    across = field - (field * axis).sum(-1, keepdim=True) * axis
    largest = torch.linalg.vector_norm(field, dim=-1).amax(-1, keepdim=True)
    part = torch.linalg.vector_norm(across, dim=-1) / largest.where(largest != 0, 1.0)
    return (couplings.triu(2) + couplings.tril(-2)).abs().flatten(-2), part


def _require_small(argument: str, sizes: Tensor, requirement: str, received: str, remedy: str) -> None:
    worst = float(sizes.nan_to_num().amax()) if sizes.numel() else 0.0
    slack = SLACK * torch.finfo(sizes.dtype).eps
    _validate.require(worst <= slack, argument, requirement, received.format(worst), remedy)

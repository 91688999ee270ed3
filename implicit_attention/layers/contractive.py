"""Linear maps whose norm is bounded, for blocks that are to contract."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import _validate

M = TypeVar("M", bound=nn.Module)

#: Squarings of W^T W: s is too large by a factor of at most n^(1/128), 3 % for n = 64.
SQUARINGS = 5


class _Bounded(nn.Module):
    """W -> W min(1, bound / s), without a state, in training and evaluation alike."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, weight: Tensor) -> Tensor:
        return bounded(weight, self.bound)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


def bounded(weight: Tensor, bound: float) -> Tensor:
    """W min(1, bound / s) of matrices W, with s >= |W|_2: none has a norm above `bound`."""
    # At a norm of zero the quotient would have no gradient.
    return weight * (bound / norm_bound(weight).clamp(min=bound))[..., None, None]


def norm_bound(weight: Tensor) -> Tensor:
    """Numbers s with |W|_2 <= s <= n^(1/128) |W|_2, n the smaller side of the matrices W: differentiable.

    s = |G^(2^k)|_F^(1 / 2^(k + 1)) for the Gram matrix G, whose largest eigenvalue is |W|_2^2. Each power is scaled by
    its norm, so that none overflows.

    Args:
        weight: (*batch, rows, columns).

    Returns:
        (*batch).

    Reference: Delattre et al. (2023), Gram iteration.
    """
    tiny = torch.finfo(weight.dtype).tiny
    scale = weight.detach().abs().amax((-2, -1), keepdim=True).clamp(min=tiny)
    unit = weight / scale
    gram = unit @ unit.mT if weight.shape[-2] <= weight.shape[-1] else unit.mT @ unit
    log, share = torch.zeros_like(scale), 0.5
    for _ in range(SQUARINGS):
        size = torch.linalg.vector_norm(gram, dim=(-2, -1), keepdim=True).clamp(min=tiny)
        log = log + share * size.log()
        gram = gram / size
        gram, share = gram @ gram, share / 2
    size = torch.linalg.vector_norm(gram, dim=(-2, -1), keepdim=True).clamp(min=tiny)
    # Rounded up, so that rounding exceeds no bound.
    norm: Tensor = scale * torch.exp(log + share * size.log()) * (1 + 16 * torch.finfo(weight.dtype).eps)
    return norm[..., 0, 0]


def contractive(module: M, bound: float = 0.9, name: str = "weight") -> M:
    """Keep the spectral norm of a linear map at or below `bound`, by a parametrization of torch.

    W -> W min(1, bound / s) with s >= |W|_2, and s <= 1.04 |W|_2 for up to 128 channels: a map that is within the bound
    stays as it is, one beyond is scaled to just below it. The bound has no state, so that every evaluation of a block
    reads the same weight; the power iteration of `torch.nn.utils.parametrizations.spectral_norm` writes to its buffers
    while training, and its norm is estimated from below.

    Args:
        module: an `nn.Linear`, or a module with a matrix for a weight; it is changed in place.
        bound: > 0; below 1 the map alone contracts.
        name: of the weight.

    Returns:
        The module.

    Raises:
        TypeError, ValueError: a module without such a matrix; a bound that is not positive.

    Gradients: to the weight, through the bound where it acts.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from implicit_attention.layers import contractive
        >>> linear = contractive(nn.Linear(8, 8), bound=0.5)
        >>> with torch.no_grad():
        ...     linear.weight = 10 * torch.eye(8)
        >>> bool(torch.linalg.matrix_norm(linear.weight, 2) <= 0.5)
        True

    Not for making a whole block contract: attention and norms have Lipschitz constants of their own; watch
    `last_solve`, or train with random numbers of steps.
    """
    bound = _validate.check_number("bound", bound, low=0.0, open_low=True)
    weight = getattr(module, name, None)
    if not isinstance(module, nn.Module) or not isinstance(weight, Tensor) or weight.ndim != 2:
        received = "none" if weight is None else f"shape {tuple(getattr(weight, 'shape', ()))}"
        raise TypeError(_validate.message("module", f"be a module with a matrix `{name}`", received))
    parametrize.register_parametrization(module, name, _Bounded(bound))
    return module

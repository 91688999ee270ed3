"""Features phi whose products <phi(x), phi(y)> are the kernels of `KernelPotential`, and sums of their logarithms."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from ..problem import Declared


class Features(Declared, general=True):
    """Base of the features in closed form: what overrides a method defines those that were derived from it, or None."""

    _follows: ClassVar[dict[str, tuple[str, ...]]] = {
        "__call__": ("log", "log_parts", "pullback"),
        "log": ("log_parts", "pullback"),
        "log_parts": ("pullback",),
    }


class PositiveFeatures(Features):
    """phi(x) = exp(<w, x> - |x|^2/2)/sqrt(m) for m random w: <phi(x), phi(y)> is exp(<x, y>) on average.

    With them `KernelPotential` approximates `LogSumExp`. Its error falls like m^-1/2 once m is large for the lengths of
    the x; for |x| about 0.5 that holds from m = 64 on, for |x| about 1.6 not even at 4096.

    Args:
        dim: D, the dimension of x, which is that of a head.
        count: m, how many features.
        orthogonal: whether each D of the w are orthogonal to each other, with a smaller error than that of independent
            ones; each w by itself has the same law, the standard normal.
        generator: where the random numbers come from; by default torch's.

    Attributes:
        directions: the w, (m, D) in float64; used in the precision and on the device of x. Where they require grad,
            they are learned.

    Raises:
        TypeError, ValueError: dim or count that are no integers >= 1; an x that has not dim entries.

    Gradients: with respect to x and directions, to any order.

    Reference: Choromanski et al. (2021), lemma 1 and section 3.

    Not for states and keys with sqrt(beta) times their length far above 1: the number of features that a fixed error
    needs grows exponentially with its square. Use `LogSumExp`.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import PositiveFeatures
        >>> phi = PositiveFeatures(3, 4096, generator=torch.Generator().manual_seed(0))
        >>> x, y = torch.tensor([0.5, -0.2, 0.1]), torch.tensor([0.3, 0.4, -0.6])
        >>> bool(((phi(x) * phi(y)).sum() / (x * y).sum().exp() - 1).abs() < 0.02)
        True
    """

    declares_all = True

    def __init__(
        self, dim: int, count: int, *, orthogonal: bool = True, generator: torch.Generator | None = None
    ) -> None:
        dim = _validate.check_integer("dim", dim, low=1)
        count = _validate.check_integer("count", count, low=1)
        device = None if generator is None else generator.device
        blocks = -(-count // dim)
        drawn = torch.randn(blocks, dim, dim, dtype=torch.float64, generator=generator, device=device)
        self.directions = (_orthogonal(drawn) if orthogonal else drawn).flatten(0, 1)[:count]

    def __call__(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch m"]:
        """phi(x), (..., D) -> (..., m)."""
        return self.log(x).exp()

    def log(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch m"]:
        """log phi(x), which is finite where phi(x) overflows."""
        logs, common = self.log_parts(x)
        return logs + common

    def log_parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """log phi(x) as <w, x>, and -|x|^2/2 - log(m)/2, (..., 1), beside which the former would lose its digits."""
        count, dim = self.directions.shape
        _validate.require(x.shape[-1] == dim, "x", f"have {dim} entries on its last axis", f"shape {tuple(x.shape)}")
        return x @ self.directions.to(x).mT, -(x.square().sum(-1, keepdim=True) + math.log(count)) / 2

    def pullback(self, x: Tensor, u: Tensor) -> Tensor:
        """(d log phi/dx)^T u = sum_i u_i (w_i - x)."""
        return u @ self.directions.to(x) - u.sum(-1, keepdim=True) * x


class EluFeatures(Features):
    """phi(x) = elu(x) + 1 per entry, which is exp(x) for x < 0 and 1 + x above: the features of linear attention.

    Gradients: with respect to x, to any order; the second derivative jumps at 0.

    Reference: Katharopoulos et al. (2020), eq. 7.

    Not for attention that is to be near softmax attention: use `PositiveFeatures`.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import EluFeatures
        >>> EluFeatures()(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([0.3679, 1.0000, 3.0000])
    """

    declares_all = True

    def __call__(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """phi(x), (..., D) -> (..., D)."""
        return F.elu(x) + 1

    def log(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """log phi(x), which is x for x < 0 and log(1 + x) above."""
        return torch.where(x > 0, (1 + x.relu()).log(), x)

    def pullback(self, x: Tensor, u: Tensor) -> Tensor:
        """(d log phi/dx)^T u."""
        return u / (1 + x.relu())


class ReluFeatures(Features):
    """phi(x) = max(x, 0) per entry; the kernel of two vectors without a common positive entry is 0.

    Gradients: with respect to x, to any order away from the kinks at 0.

    Reference: Kasai et al. (2021), section 3, without the learned map before it.

    Not for states that should feel a pull wherever they are: where the kernel with all keys is 0, there is none. Use
    `EluFeatures`.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import ReluFeatures
        >>> ReluFeatures()(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([0., 0., 2.])
    """

    declares_all = True

    def __call__(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """phi(x), (..., D) -> (..., D)."""
        return x.relu()

    def pullback(self, x: Tensor, u: Tensor) -> Tensor:
        """(d phi/dx)^T u."""
        return u * (x > 0)


#: The features of which Phi is known to grow no faster than log |z|: see `KernelPotential.bounded_below`.
OWN = (PositiveFeatures, EluFeatures, ReluFeatures)


def _orthogonal(drawn: Tensor) -> Tensor:
    """Turn normal matrices (blocks, D, D) into others whose rows are orthogonal, each by itself normal as before."""
    q, r = torch.linalg.qr(drawn)
    # With these signs the rotation is uniform (Mezzadri 2007), and independent of R, which alone decides the lengths of
    # the columns: those are lengths of independent normal vectors.
    rotation = q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    independent: Tensor = rotation * drawn.square().sum(-2).sqrt()[..., None]
    return independent


def running_logsumexp(logs: Tensor) -> Tensor:
    """Log of the sums of the exponentials of rows 1 to n, (*, N, m), by doubling.

    Unlike a running sum with one shift it loses no row beside a later one that is far larger; unlike
    torch.logcumsumexp it has second derivatives.
    """
    step = 1
    while step < logs.shape[-2]:
        before = F.pad(logs[..., :-step, :], (0, 0, step, 0), value=torch.finfo(logs.dtype).min)
        logs = torch.stack((logs, before)).logsumexp(0)
        step *= 2
    return logs

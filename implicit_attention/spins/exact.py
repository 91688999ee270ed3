"""The exact stationary law of synchronous dynamics of a few Ising spins, to measure approximations by, in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._torch import in_own_precision
from ..linear import _matrices
from .enumeration import states

# 2^12 states have a transition matrix of 128 MiB.
LARGEST = 12


class StationaryLaw(NamedTuple):
    """The stationary law of synchronous Ising dynamics.

    probabilities: (2^N), of the states; bit i of a state's number says whether s_i = +1.
    magnetization: <s_i>, (N).
    correlations: <s_i s_j> - <s_i><s_j> at one time, (N, N).
    delayed: D_ij = <s_i(t + 1) s_j(t)> - <s_i><s_j>, (N, N).
    entropy_production: per step, sum over transitions of p log(forward/backward) >= 0.
    second_eigenvalue: the size of the transition matrix's second eigenvalue, which says how fast the law is reached.

    Not for equilibrium, whose law is Boltzmann's: use `Enumeration()`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import stationary_law
        >>> law = stationary_law(torch.zeros(2, 2), torch.ones(2))
        >>> law.probabilities.shape, round(law.second_eigenvalue, 6)
        (torch.Size([4]), 0.0)
    """

    probabilities: Tensor
    magnetization: Tensor
    correlations: Tensor
    delayed: Tensor
    entropy_production: float
    second_eigenvalue: float


@in_own_precision
def stationary_law(couplings: Float[Tensor, "N N"], field: Float[Tensor, "N"], beta: float = 1.0) -> StationaryLaw:
    """The exact law that the chain p(s' | s) = prod_i exp(beta s'_i f_i)/(2 cosh beta f_i), f = h + J s, settles in.

    Args:
        couplings: J, (N, N) with N <= 12, not necessarily symmetric; a diagonal counts.
        field: h, (N).
        beta: inverse temperature > 0.

    Not for more than 12 sites: use `synchronous`; not for equilibrium: use `Enumeration()`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import stationary_law
        >>> law = stationary_law(torch.tensor([[0.0, 0.8], [-0.4, 0.0]]), torch.zeros(2))
        >>> law.entropy_production > 0, law.magnetization.abs().max().item() < 1e-12
        (True, True)
    """
    _validate.check_float_tensor("couplings", couplings, min_ndim=2)
    _validate.check_float_tensor("field", field, min_ndim=1)
    _validate.check_number("beta", beta, low=0.0, open_low=True)
    n = field.shape[-1]
    _validate.require(field.shape == (n,), "field", "have shape (N,)", f"shape {tuple(field.shape)}")
    received = f"shape {tuple(couplings.shape)}"
    _validate.require(couplings.shape == (n, n), "couplings", f"have shape (N, N) = {(n, n)}", received)
    _validate.require(1 <= n <= LARGEST, "field", f"have 1 to {LARGEST} sites", n, "sample the dynamics")
    couplings, field = couplings.detach().cpu().double(), field.detach().cpu().double()
    spins = states(0, 2**n, n, field)
    forces = beta * (field + spins @ couplings.mT)
    log_rate = forces @ spins.mT - torch.logaddexp(forces, -forces).sum(-1, keepdim=True)
    rate = log_rate.exp()
    # p (T - 1) = 0 with sum p = 1: adding the same to every entry makes that one regular system.
    system = rate.mT - torch.eye(len(spins), dtype=rate.dtype) + 1.0
    law = _matrices.solve(system, torch.ones(len(spins), 1, dtype=rate.dtype))[:, 0]
    mean = law @ spins
    products = torch.outer(mean, mean)
    flow = law[:, None] * rate
    return StationaryLaw(
        probabilities=law,
        magnetization=mean,
        correlations=spins.mT @ (law[:, None] * spins) - products,
        delayed=(flow @ spins).mT @ spins - products,
        entropy_production=float((flow * (log_rate - log_rate.mT)).sum()),
        second_eigenvalue=_second_eigenvalue(rate),
    )


def _second_eigenvalue(rate: Tensor) -> float:
    if len(rate) <= 2**8:
        return float(torch.linalg.eigvals(rate).abs().sort(descending=True).values[1])
    from scipy.sparse.linalg import eigs

    values = eigs(rate.numpy(), k=4, which="LM", return_eigenvectors=False)
    return float(sorted(abs(values), reverse=True)[1])

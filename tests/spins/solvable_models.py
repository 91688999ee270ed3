"""Systems of which numbers are known, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_attention.spins import SpinSystem


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pairs(*values: float) -> Tensor:
    """Symmetric couplings of four sites from J12, J13, J14, J23, J24, J34."""
    couplings = torch.zeros(4, 4, dtype=torch.float64)
    couplings[tuple(torch.triu_indices(4, 4, 1))] = double(values)
    return couplings + couplings.mT


COUPLINGS = pairs(0.30, -0.20, 0.10, 0.25, -0.15, 0.40)
STAR = pairs(0.7, -0.5, 0.9, 0, 0, 0)
CHAIN = pairs(0.6, 0, 0, -0.5, 0, 0.8)
FIELD = double([[0.20], [-0.10], [0.30], [0.05]])
#: Fields of a chain, and of four vectors, in units of sqrt(D).
ALONG = double([0.4, -0.2, 0.3, 0.1])
VECTORS = double([[0.20, -0.10, 0.30], [0.05, 0.40, -0.20], [-0.30, 0.10, 0.15], [0.25, 0, -0.35]])
#: Spins that are updated all at once, and their fields.
ASYMMETRIC = double([[0, 0.5, -0.3, 0.2], [-0.1, 0, 0.4, 0.3], [0.6, -0.2, 0, 0.1], [0.2, 0.5, -0.4, 0]])
DRIVE = double([0.2, -0.1, 0.3, 0.05])


def four(beta: float = 1.0, couplings: Tensor = COUPLINGS, scale: float = 1.0) -> SpinSystem:
    """Four Ising spins."""
    return SpinSystem(scale * couplings, FIELD, beta, measure="counting")


def four_vectors(beta: float = 1.5) -> SpinSystem:
    return SpinSystem(COUPLINGS, VECTORS * 3**0.5, beta)


def chain(dim: int, field: Tensor = ALONG) -> SpinSystem:
    """Four spins in fields along the first axis."""
    return SpinSystem(CHAIN, dim**0.5 * field[:, None] * torch.eye(dim, dtype=torch.float64)[0], 1.2)


def one_spin(dim: int) -> SpinSystem:
    return SpinSystem(torch.zeros(1, 1).double(), 0.8 * dim**0.5 * torch.eye(1, dim).double())


def two_spins(dim: int, beta: float = 1.3) -> SpinSystem:
    return SpinSystem(double([[0, 0.7], [0.7, 0]]), torch.zeros(2, dim).double(), beta)


def curie_weiss(sites: int, dim: int, beta: float, field: float, **options: str) -> SpinSystem:
    """All pairs coupled by 1/N, the diagonal included, in a field along the first axis in units of sqrt(D)."""
    couplings = torch.full((sites, sites), 1 / sites, dtype=torch.float64)
    return SpinSystem(couplings, field * dim**0.5 * torch.eye(1, dim).double().expand(sites, dim), beta, **options)


def ising_states(sites: int) -> Tensor:
    """All states; bit i of a state's number says whether s_i = +1."""
    return 2.0 * (torch.arange(2**sites)[:, None] >> torch.arange(sites) & 1).double() - 1


def peretto(couplings: Tensor, field: Tensor, beta: float = 1.0) -> Tensor:
    """The stationary law of synchronous dynamics with symmetric couplings: pi(s) ~ exp(beta h . s) prod 2 cosh(f_i(s)).

    It is not Boltzmann's. Reference: Peretto (1984).
    """
    spins = ising_states(len(field))
    force = beta * (field + spins @ couplings.mT)
    return (beta * spins @ field + torch.logaddexp(force, -force).sum(-1)).softmax(0)

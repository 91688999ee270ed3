"""The parts of a magnetization, which correspond to residual connection, token mixing and local layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._torch import in_own_precision
from ..failure import OnFailure
from ..problem import widened
from ._curvature import local_field
from .approximation import Approximation
from .system import SpinSystem
from .thermodynamics import free_energy, magnetization


@dataclasses.dataclass(frozen=True)
class Decomposition:
    """The terms of m = -dF/dh, each (*batch, N, D); their sum is the magnetization in total.

    Attributes:
        field: gain_i h_i, the answer to the spin's own input: the residual connection.
        coupling: gain_i sum_j J_ij m_j, the answer to the other spins, whatever D is: token mixing.
        onsager: gain_i o_i, the correction for a spin's own effect on the others: a local function of the spin.
        coupling_function: 1/2 sum_mn <s_m . s_n> dJ_mn/dh_i: the part of couplings that are a function of the field.
        gain: how a lone spin in the same local field answers to its parts, (*batch, N).

    Not for the magnetization alone: use `magnetization`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import MeanField, SpinSystem, decompose
        >>> couplings = 0.5 * (torch.ones(3, 3) - torch.eye(3))
        >>> system = SpinSystem(couplings, torch.tensor([[0.3], [0.0], [-0.1]]), beta=0.8)
        >>> parts = decompose(system, MeanField())
        >>> bool((parts.onsager.abs() < 1e-5).all())  # mean field has no such correction
        True
    """

    field: Tensor
    coupling: Tensor
    onsager: Tensor
    coupling_function: Tensor
    gain: Tensor

    @property
    def total(self) -> Tensor:
        """m = -dF/dh."""
        return self.field + self.coupling + self.onsager + self.coupling_function


@in_own_precision
def decompose(system: SpinSystem, method: Approximation, *, on_failure: OnFailure = "raise") -> Decomposition:
    """Split the magnetization of a method into the answers to field, couplings, self-correction and J(h).

    A lone spin with <s_i> needs the local field f_i = h_i + sum_j J_ij <s_j> + o_i. This defines the Onsager term o_i
    of any method, zero in naive mean field. As <s_i> = gain_i f_i, with a number gain_i = R A(beta R |f_i|)/|f_i|, the
    magnetization falls into the same parts. Where |<s_i>| is R to rounding, it is the weakest field, or, if h_i + sum_j
    J_ij <s_j> is strong enough, that.

    Args:
        system: the spins. A diagonal counts to the couplings (and is taken back by the Onsager term).
        method: such as `TAP()`; the lone spin answers as `method.site_response` does.
        on_failure: for samples whose solve failed: "raise", "warn" or "ignore".

    Returns:
        A `Decomposition`; NaN at sites where the method gives |<s_i>| > R beyond rounding.

    Raises:
        ConvergenceError: with on_failure="raise". TypeError, ValueError: a system that the method cannot treat.

    Gradients: with respect to field, couplings and beta, to first order beyond those of the magnetization.

    Not for the magnetization alone, which it solves for in the same way: use `magnetization`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import TAP, SpinSystem, decompose, magnetization
        >>> couplings = 0.5 * (torch.ones(3, 3) - torch.eye(3))
        >>> system = SpinSystem(couplings, torch.tensor([[0.3], [0.0], [-0.1]]), beta=0.8)
        >>> parts = decompose(system, TAP())
        >>> torch.allclose(parts.total, magnetization(system, TAP()), atol=1e-5)
        True
    """
    direct, through = magnetization(system, method, split=True, on_failure=on_failure)
    system = widened(system)[0]
    response, radius, beta, rows = method.site_response(), system.radius, system.beta_over(0), system.beta_over(1)
    others = system.coupled(direct)
    bare = system.live_field + others
    local, saturated = local_field(response, direct, beta, radius)
    # A mean of length R belongs to all strong fields. Where the bare field is one of them, it needs no correction.
    apart = torch.linalg.vector_norm(response.magnetization(bare, beta, radius).detach() - direct.detach(), dim=-1)
    # The mean was solved for to more than rounding.
    enough = saturated & (apart <= torch.finfo(direct.dtype).eps ** (2 / 3) * radius)
    local = torch.where(enough[..., None], bare, local)
    gain = rows * radius**2 * response.gain((rows * radius) ** 2 * local.square().sum(-1), system.dim)
    field, coupling, onsager = (gain[..., None] * part for part in (system.live_field, others, local - bare))
    if system.mask is not None:
        # `live_field` is zero at a missing site; its parts are made zero, too.
        field, coupling, onsager = (x.masked_fill(~system.mask[..., None], 0.0) for x in (field, coupling, onsager))
    return Decomposition(field, coupling, onsager, through, gain)


def extensivity(
    make: Callable[[int], SpinSystem], method: Approximation, sizes: Sequence[int], *, on_failure: OnFailure = "raise"
) -> Float[Tensor, "sizes"]:
    """F/N for systems of several sizes, which is constant up to fluctuations where F is extensive.

    With couplings of order 1/sqrt(N D) F grows like N, so that inputs of any length can be answered alike; with
    couplings of order one it grows faster.

    Args:
        make: N -> a system of N sites.
        method: such as `SaddlePoint()`.
        sizes: numbers of sites, at least two.
        on_failure: "raise", "warn" or "ignore".

    Returns:
        (sizes), the mean over samples.

    Not for systems of one size: use `free_energy`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import MeanField, SpinSystem, extensivity
        >>> def uniform(n):
        ...     return SpinSystem(torch.ones(n, n) / n, torch.ones(n, 1))
        >>> per_site = extensivity(uniform, MeanField(), [4, 16])
        >>> torch.allclose(per_site[0], per_site[1])
        True
    """
    _validate.require(len(sizes) > 1, "sizes", "have at least two entries", list(sizes))
    values = []
    for size in sizes:
        system = make(size)
        _validate.require(system.num_sites == size, "make", f"return {size} sites for N = {size}", system.num_sites)
        values.append((free_energy(system, method, on_failure=on_failure) / size).mean())
    return torch.stack(values)

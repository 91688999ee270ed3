"""The Jacobian of a map at one state: contraction, curvature, and its size as a term of a loss."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import _validate
from .._torch import LinearMap, check_graph, exact_precision, vjp
from ..linear import extreme_eigenvalues
from ..linear import spectral_radius as arnoldi_radius
from ..problem import Problem, widened
from ..solvers.loop import flat, unflat


@torch.no_grad()
def spectral_radius(problem: Problem, z: Tensor, *, steps: int = 30) -> Float[Tensor, "*lead"]:
    """Estimate max |eigenvalue| of df/dz at z, per problem.

    Not for a guarantee: use `certified_error`.

    A local number: it says how plain iteration behaves near z and certifies nothing (see `certified_error`).

    Args:
        problem: any problem.
        z: states, (*lead, *event).
        steps: number of Krylov vectors; exact from the number of entries of one problem on.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, solve
        >>> from implicit_attention.diagnostics import spectral_radius
        >>> energy = AnchoredEnergy(LogSumExp(torch.eye(4), beta=0.5), field=torch.ones(2, 4), anchor=0.5)
        >>> solution = solve(energy, energy.field)
        >>> spectral_radius(energy, solution.value).round(decimals=3)
        tensor([0.0620, 0.0620])
    """
    matvec, start = _jacobian(problem, z)
    if has_curvature(problem):
        low, high = extreme_eigenvalues(matvec, start, steps)
        return torch.maximum(low.value.abs(), high.value.abs())
    return arnoldi_radius(matvec, start, steps)


@torch.no_grad()
def smallest_curvature(problem: Problem, z: Tensor, *, steps: int = 30) -> Float[Tensor, "*lead"]:
    """Estimate the smallest eigenvalue of I - df/dz, for an energy of its Hessian, per problem.

    Of an energy with a metric M, where df/dz = H M, it is that of I - M^(1/2) H M^(1/2), the Hessian in the metric.

    Not for maps that are no gradient: use `spectral_radius`.

    From above: a negative number proves a direction of negative curvature, so a saddle at a stationary point.

    Args:
        problem: a problem whose Jacobian is symmetric.
        z: states, (*lead, *event).
        steps: number of Lanczos vectors; exact from the number of entries of one problem on.

    Raises:
        ValueError: for a map whose Jacobian is not symmetric.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, solve
        >>> from implicit_attention.diagnostics import smallest_curvature
        >>> energy = AnchoredEnergy(LogSumExp(torch.eye(4), beta=0.5), field=torch.ones(2, 4), anchor=0.5)
        >>> solution = solve(energy, energy.field)
        >>> bool((smallest_curvature(energy, solution.value) > 0.9).all())
        True
    """
    _validate.require(
        has_curvature(problem),
        "problem",
        "have a symmetric Jacobian (an energy)",
        type(problem).__name__,
        "use spectral_radius for other maps",
    )
    matvec, start = _jacobian(problem, z)
    return 1 - extreme_eigenvalues(matvec, start, steps)[1].value


def is_saddle(problem: Problem, z: Tensor, *, steps: int = 30) -> Bool[Tensor, "*lead"]:
    """Whether the energy has negative curvature at z beyond rounding, per problem; at a solution that is a saddle.

    Not for states that are no solution: there the sign of the curvature says nothing of stability.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, solve
        >>> from implicit_attention.diagnostics import is_saddle
        >>> energy = AnchoredEnergy(LogSumExp(torch.eye(4), beta=0.5), field=torch.ones(2, 4), anchor=0.5)
        >>> solution = solve(energy, energy.field)
        >>> is_saddle(energy, solution.value)
        tensor([False, False])
    """
    return smallest_curvature(problem, z, steps=steps) < -negligible(z)


def jacobian_penalty(
    problem: Problem, z: Float[Tensor, "*lead_event"], samples: int = 1, *, generator: torch.Generator | None = None
) -> Tensor:
    """Estimate |df/dz|_F^2 / n at z, the mean square of the Jacobian's singular values, per problem: a term of a loss.

    mean over e of |J^T e|^2 / n with J = df/dz, e of `samples` draws of random signs and n the entries of a problem.

    Not for a certificate: a map may have a small mean and one singular value above 1; see `spectral_radius`.

    It keeps a map that is trained by `Implicit()` from drifting out of convergence: add a small multiple of its mean.

    Args:
        problem: any problem.
        z: states, (*lead, *event), such as `solution.value` or, cheaper, `solution.value.detach()`.
        samples: draws of e, >= 1; each costs one product with J^T and its derivative.
        generator: where the signs are drawn from; None is torch's own.

    Returns:
        (*lead), float32 where z is half precision.

    Gradients: with respect to z and every tensor of the problem. They differentiate f twice: attention in f is done by
    torch's plain products here, as its fused kernels have no second derivative.

    Raises:
        TypeError, ValueError: arguments that do not fit.

    Reference: Hutchinson (1990); Bai, Koltun and Kolter (2021).

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap
        >>> from implicit_attention.diagnostics import jacobian_penalty
        >>> scale = torch.tensor(0.5, requires_grad=True)
        >>> problem = FixedPointMap(lambda z, scale: scale * z, scale, event_ndim=1)
        >>> penalty = jacobian_penalty(problem, torch.ones(3, 4))
        >>> penalty.tolist(), round(torch.autograd.grad(penalty.mean(), scale)[0].item(), 4)
        ([0.25, 0.25, 0.25], 1.0)
    """
    samples = _validate.check_integer("samples", samples, low=1)
    problem.check_state(z)
    problem, (z,) = widened(problem, z)
    lead = z.shape[: z.ndim - problem.event_ndim]

    def mapped(z: Tensor) -> Tensor:
        result = problem.fixed_point_map(z)
        check_graph(problem._name(), result, problem.fixed_point_map, z)
        return result

    total = torch.zeros(lead, dtype=z.dtype, device=z.device)
    with exact_precision(z), sdpa_kernel(SDPBackend.MATH):
        _, transposed = vjp(mapped, z)
        for _ in range(samples):
            where = z.device if generator is None else generator.device
            signs = 2 * torch.randint(0, 2, z.shape, generator=generator, device=where).to(z) - 1
            (product,) = transposed(signs)
            total = total + product.reshape(*lead, z.shape[len(lead) :].numel()).square().mean(-1)
    return total / samples


def has_curvature(problem: Problem) -> bool:
    """Whether I - df/dz is a Hessian, at least in a metric."""
    return problem.symmetric or problem.has_metric


def negligible(z: Tensor) -> float:
    """Curvature that rounding alone can make."""
    return 1e3 * torch.finfo(z.dtype).eps


def _jacobian(problem: Problem, z: Tensor) -> tuple[LinearMap, Tensor]:
    """v -> J v on (*lead, n), symmetric where the problem has a metric, and a fixed random start."""
    problem, (z,) = widened(problem, z.detach())
    event = z.shape[z.ndim - problem.event_ndim :]
    with exact_precision(z):
        linear = problem.linearize(z)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(event.numel(), generator=generator, dtype=torch.float64).to(z)
    lead = z.shape[: z.ndim - problem.event_ndim]

    def jacobian(v: Tensor) -> Tensor:
        if linear.outer is None:
            return linear.jvp(v)
        # M^(1/2) H M^(1/2), symmetric and with the eigenvalues of J = H M.
        return problem.metric_root_product(z, linear.outer(problem.metric_root_product(z, v)))

    def product(v: Tensor) -> Tensor:
        with exact_precision(v):
            return flat(jacobian(unflat(v, event)), event)

    return product, start.expand(*lead, event.numel())

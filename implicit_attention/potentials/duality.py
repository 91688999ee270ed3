"""Potentials as log-partition functions: divergence, Fisher information, loss, bound, and particles of set moments."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._torch import host_may_look, in_own_precision, transforms_active
from ..linear import _matrices
from ._shapes import PerRow, States
from .base import Potential
from .gaussian_mixture import GaussianMixture

# Gauss-Legendre points of [0, 1]: exact for polynomials of degree 7.
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(4)
_QUADRATURE = tuple(zip(((1 + _POINTS) / 2).tolist(), (_WEIGHTS / 2).tolist(), strict=True))
# How many units of rounding a difference of potentials may be off.
_ROUNDING = 16.0
# Each attached step towards a root makes one more order of its derivatives exact.
_ROOT_STEPS = 3


@in_own_precision
def bregman(potential: Potential, a: States, b: States) -> Tensor:
    """The Bregman divergence Phi(a) - Phi(b) - <grad Phi(b), a - b>, also where a is near b.

    Of a log-partition function G it is the relative entropy KL(p_b || p_a); `LogSumExp` has Phi = G/beta, so that beta
    times this is the relative entropy of the attention weights. It is 0 at a = b and not negative for convex Phi.

    The difference loses its digits where a is near b. There the integral of (1 - s) <d, Hess Phi(b + s d) d> over s in
    [0, 1], d = a - b, by four Gauss-Legendre points takes its place: wherever both agree within the rounding error of
    the difference. The result is therefore never worse than the difference, and has its relative precision down to
    d = 0 where Phi is smooth (where Phi has kinks in its gradient between a and b, the absolute error is that of the
    difference). For convex Phi the integral is not negative; the difference may be by its rounding error.

    Args:
        potential: of rows (event_ndim 1) or of samples (event_ndim 2).
        a: natural parameters, (*batch, N, D).
        b: as a.

    Returns:
        In units of Phi, (*batch, N), or (*batch) with event_ndim 2. It costs two values, a mean and four products with
        the covariance.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit.

    Gradients: with respect to a, b and the tensors of the potential, to the orders that the potential has.

    Not for a training loss towards data points: `contrastive_loss` differs by a term that does not depend on eta.

    Examples:
        >>> import torch
        >>> from implicit_attention import LogSumExp
        >>> from implicit_attention.potentials import bregman
        >>> phi, b = LogSumExp(torch.eye(2), beta=1.0), torch.zeros(1, 2)
        >>> bregman(phi, torch.tensor([[2.0, 0.0]]), b).round(decimals=4)
        tensor([0.4338])
        >>> bregman(phi, torch.tensor([[1e-6, 0.0]]), b)  # a^2/8
        tensor([1.2500e-13])
    """
    for name, state in (("a", a), ("b", b)):
        potential.check_state(name, state)
    _validate.require(a.shape == b.shape, "a", f"have the shape of `b`, {tuple(b.shape)}", tuple(a.shape))
    axes = tuple(range(-potential.event_ndim, 0))
    change = a - b
    start, mean = potential.evaluate(b)
    end, along = potential.value(a), (mean * change).sum(axes)
    difference = end - start - along
    integral = torch.zeros_like(difference)
    for node, weight in _QUADRATURE:
        bent = (change * potential.covariance_product(b + node * change, change)).sum(axes)
        integral = integral + weight * (1 - node) * bent
    with torch.no_grad():
        # The values are sums that may cancel: their terms count, too.
        size = end.abs() + start.abs() + (mean.abs() * (a.abs() + b.abs())).sum(axes)
        rounding = _ROUNDING * torch.finfo(a.dtype).eps * size
        agree = (integral - difference).abs() <= rounding
    return torch.where(agree, integral, difference)


@in_own_precision
def fisher(potential: Potential, eta: States) -> Float[Tensor, "*batch N D D"]:
    """The dense Hessian of Phi at eta: of a log-partition function the Fisher information, which is the covariance.

    I = Hess Phi(eta) = E[x x^T] - E[x] E[x]^T, centred (for `LogSumExp` beta times the covariance of the keys).

    Args:
        potential: of rows (event_ndim 1).
        eta: natural parameters, (*batch, N, D).

    Returns:
        Symmetric matrices, (*batch, N, D, D), from D products with the covariance.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit; a potential whose rows are coupled.

    Gradients: with respect to eta and the tensors of the potential, to the orders that the potential has.

    Reference: Shim (2022), section 3.2, prints the second moment E[x x^T], which is the Fisher information only where
    the mean is 0.

    Not for products with a vector: `Potential.covariance_product` costs one of the D.

    Examples:
        >>> import torch
        >>> from implicit_attention import LogSumExp
        >>> from implicit_attention.potentials import fisher
        >>> fisher(LogSumExp(torch.eye(2), beta=1.0), torch.zeros(1, 2))
        tensor([[[ 0.2500, -0.2500],
                 [-0.2500,  0.2500]]])
    """
    _check_rows(potential, eta)
    units = torch.eye(eta.shape[-1], dtype=eta.dtype, device=eta.device)
    columns = [potential.covariance_product(eta, unit.expand_as(eta)) for unit in units]
    hessian = torch.stack(columns, dim=-1)
    return (hessian + hessian.mT) / 2


@in_own_precision
def contrastive_loss(potential: Potential, eta: States, x: Float[Tensor, "*#batch N D"]) -> PerRow:
    """Phi(eta) - <x, eta>, the loss of natural parameters eta for data x; its gradient is mean(eta) - x.

    Of a log-partition function it is -log p(x; eta) without log h(x), the weight of x itself. For `LogSumExp` with
    beta = 1 and no bias, and x one of the keys, it is the cross-entropy of attention (InfoNCE). It is never below
    -conjugate(potential, x), its value at the eta whose mean is x.

    Args:
        potential: of rows (event_ndim 1).
        eta: natural parameters, (*batch, N, D).
        x: data, broadcasts to (*batch, N, D).

    Returns:
        In units of Phi, (*batch, N).

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit; a potential whose rows are coupled.

    Gradients: with respect to eta, x and the tensors of the potential, to any order.

    Not for x outside the closure of the means, where the loss has no lower bound: `conjugate` finds out.

    Examples:
        >>> import torch
        >>> from implicit_attention import LogSumExp
        >>> from implicit_attention.potentials import contrastive_loss
        >>> keys, eta = torch.eye(3), torch.tensor([[2.0, 0.0, 0.0]])
        >>> contrastive_loss(LogSumExp(keys, beta=1.0), eta, x=keys[:1])
        tensor([0.2395])
        >>> torch.nn.functional.cross_entropy(eta @ keys.T, torch.tensor([0]))
        tensor(0.2395)

        Weights of the points are `log_weights`. Boosting: examples x_i with labels t_i = +-1, of which the model so far
        makes the scores f_i, are the points -t_i x_i of weight exp(-t_i f_i); Phi(eta) is the log of the exponential
        loss after a step eta of a linear model, its responsibilities AdaBoost's next weights. A conjugate prior
        exp(<xi, eta> - nu G(eta)) over points eta_n: n data points of sum s tilt it by s, and raise nu by n.

        >>> from implicit_attention.potentials import GaussianMixture
        >>> x, t, f = torch.tensor([[1.0], [2.0], [-1.0]]), torch.tensor([1.0, -1.0, -1.0]), torch.zeros(3)
        >>> boosting = GaussianMixture(-t[:, None] * x, torch.zeros(1, 1), log_weights=-t * f)
        >>> boosting.responsibilities(torch.tensor([[0.5]])).round(decimals=3)
        tensor([[0.1540, 0.6910, 0.1540]])
        >>> etas, xi, nu = torch.tensor([[-1.0], [0.0], [1.0]]), torch.tensor([0.5]), 2.0
        >>> coin = LogSumExp(torch.tensor([[0.0], [1.0]]), beta=1.0)
        >>> prior = GaussianMixture(etas, torch.zeros(1, 1), log_weights=etas @ xi - nu * coin.value(etas))
        >>> prior.responsibilities(torch.zeros(1, 1)).round(decimals=3)
        tensor([[0.4670, 0.3610, 0.1720]])
    """
    _check_rows(potential, eta)
    _validate.check_same_kind([("eta", eta), ("x", x)])
    _validate.check_broadcast("x", x.shape, eta.shape, "the shape of `eta`")
    return potential.value(eta) - (x * eta).sum(-1)


@in_own_precision
def jensen_bound(potential: Potential, eta: States) -> PerRow:
    """A lower bound of G(eta): the average of the components' exponents in place of the log of their average.

    G(eta) >= log W + sum_n (pi_n/W) (<mu_n, eta> + <eta, Sigma_n eta>/2), W = sum_n pi_n, by Jensen's inequality. It is
    exact for one component and at eta = 0; G itself costs the same.

    Args:
        potential: a `GaussianMixture`.
        eta: natural parameters, (*batch, N, D).

    Returns:
        (*batch, N).

    Raises:
        TypeError, ValueError: another potential; shapes, dtypes or devices that do not fit.

    Gradients: with respect to eta, means, covariances and log_weights, to any order.

    Reference: Shim (2022), appendix A, where sum_n pi_n = 1.

    Not for anything but comparison: `GaussianMixture.value` is exact.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import GaussianMixture, jensen_bound
        >>> mixture = GaussianMixture(torch.eye(2), torch.zeros(2, 2), log_weights=torch.tensor([0.5, 0.5]).log())
        >>> eta = torch.tensor([[2.0, 0.0]])
        >>> jensen_bound(mixture, eta), mixture.value(eta)
        (tensor([1.]), tensor([1.4338]))
    """
    remedy = "write points as components of covariance 0"
    _validate.check_instance("potential", potential, GaussianMixture, remedy=remedy)
    assert isinstance(potential, GaussianMixture)
    potential.check_state("eta", eta)
    exponents = potential._scores(eta, potential._pushed(eta)) - potential.log_weights[..., None, :]
    weights = potential.log_weights.softmax(-1)[..., None, :]
    # A component of no weight has the exponent -inf - -inf.
    average = (weights * exponents.where(weights > 0, 0.0)).sum(-1)
    return average + potential.log_weights.logsumexp(-1, keepdim=True)


@in_own_precision
def renormalise(x: States, mean: Float[Tensor, "*#batch D"], covariance: Float[Tensor, "*#batch D D"]) -> States:
    """Move the particles x by an affine map, so that they have the requested mean and covariance.

    x -> mean + C^(1/2) S^(-1/2) (x - average), C the requested covariance, S the centred covariance of the N particles
    (divided by N), both roots symmetric. Attention of an exponential family with a Gaussian base measure N(mu, Sigma),
    eta -> eta + mu + Sigma eta, on particles of mean Sigma^-1 mu and covariance Sigma^-1, followed by `renormalise` to
    these two, moves no particle: all matrices commute.

    Args:
        x: particles, (*batch, N, D), with a covariance of full rank (at least D + 1 particles).
        mean: of the result, broadcasts to (*batch, D), in units of x.
        covariance: of the result, broadcasts to (*batch, D, D), positive definite, in units of x^2; of a matrix that is
            not symmetric the symmetric part counts.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit; a covariance, the requested one or that of x,
            that has no inverse within rounding (on an accelerator and inside torch.func: NaN).

    A sample with a number that is not finite becomes NaN, and no other.

    Gradients: with respect to x, mean and covariance, exact to the third order, at repeated eigenvalues too.

    Reference: Shim (2022), theorem 1, which prints the second moment for S: then the result would have another
    covariance wherever the average is not 0.

    Not for the mean and variance of each token by itself: use torch.nn.LayerNorm.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import renormalise
        >>> x = torch.randn(100, 2, dtype=torch.float64) @ torch.tensor([[3.0, 1.0], [0.0, 0.1]]).double() + 5
        >>> white = renormalise(x, torch.zeros(2).double(), torch.eye(2).double())
        >>> torch.allclose(white.mean(0), torch.zeros(2).double(), atol=1e-9)
        True
        >>> torch.allclose(white.T.cov(correction=0), torch.eye(2).double())
        True
    """
    _validate.check_float_tensor("x", x, min_ndim=2)
    _validate.require(x.shape[-1] > 0, "x", "have at least one entry per particle", f"shape {tuple(x.shape)}")
    _validate.check_float_tensor("mean", mean, min_ndim=1)
    _validate.check_float_tensor("covariance", covariance, min_ndim=2)
    _validate.check_same_kind([("x", x), ("mean", mean), ("covariance", covariance)])
    *batch, count, dim = x.shape
    required = f"end in the particles' dimension {dim}"
    _validate.require(mean.shape[-1] == dim, "mean", required, f"shape {tuple(mean.shape)}")
    required = f"be matrices of {dim} x {dim}"
    _validate.require(covariance.shape[-2:] == (dim, dim), "covariance", required, f"shape {tuple(covariance.shape)}")
    _validate.check_broadcast("mean", mean.shape, (*batch, dim), "(*batch, D)")
    _validate.check_broadcast("covariance", covariance.shape, (*batch, dim, dim), "(*batch, D, D)")
    if x.numel() == 0 and count:
        return x.clone()
    centred = x - x.mean(-2, keepdim=True)
    remedy = f"give more than D = {dim} particles, or renormalise their coordinates in the subspace that they span"
    old = _root("x", "have a covariance of full rank", centred.mT @ centred / count, remedy)
    new = _root("covariance", "be positive definite", covariance, "parametrise it, for example as A A^T + I")
    # Rows times (C^(1/2) S^(-1/2))^T = S^(-1/2) C^(1/2).
    moved: Tensor = _matrices.solve(old, centred.mT).mT @ new
    return mean[..., None, :] + moved


def _root(argument: str, requirement: str, matrices: Tensor, remedy: str) -> Tensor:
    """The symmetric square root of positive definite matrices, NaN for others where the host cannot raise.

    Derivatives of eigenvectors are infinite at repeated eigenvalues, those of the root are not. The eigenvectors are
    therefore constants that solve R X + X R = Y for X. Each step R <- R + X(S - R R) from the root itself leaves its
    value and makes one more order of its derivatives exact.
    """
    matrices = (matrices + matrices.mT) / 2
    finite = matrices.detach().isfinite().all(-1).all(-1)
    unit = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    # LAPACK raises for numbers that are not finite.
    eigenvalues, basis = torch.linalg.eigh(matrices.detach().where(finite[..., None, None], unit))
    smallest, largest = eigenvalues[..., 0], eigenvalues[..., -1]
    bad = smallest <= matrices.shape[-1] * torch.finfo(matrices.dtype).eps * largest
    if not transforms_active() and host_may_look(matrices) and bool(bad.any()):
        low, high = (e[bad].flatten()[0].item() for e in (smallest, largest))
        received = f"eigenvalues from {low:.3g} to {high:.3g}"
        raise ValueError(_validate.message(argument, requirement, received, remedy))
    roots = eigenvalues.sqrt().where((finite & ~bad)[..., None], torch.nan)
    sums = roots[..., :, None] + roots[..., None, :]
    root: Tensor = basis @ (roots[..., None] * basis.mT)
    for _ in range(_ROOT_STEPS):
        root = root + basis @ ((basis.mT @ (matrices - root @ root) @ basis) / sums) @ basis.mT
    return (root + root.mT) / 2


def _check_rows(potential: Potential, eta: Tensor) -> None:
    required = "compute each row by itself (event_ndim 1)"
    received = f"{type(potential).__name__} with event_ndim {potential.event_ndim}"
    _validate.require(potential.event_ndim == 1, "potential", required, received)
    potential.check_state("eta", eta)

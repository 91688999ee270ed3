"""Expectation consistency between sites and a Gaussian: its equations, and a descent that solves them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._torch import LinearMap, uncompiled
from ..potentials import SiteLaw
from ..problem import Linearization, pullback
from ..solution import Status
from ._damped_newton import RUNNING, SampleFunction, descend, of_samples
from ._matrix_inverse import inverse_and_logdet
from ._multipliers import Multipliers, minimise
from .approximation import SampleProblem

#: A step must lower G by at least this part of what its slope predicts (Armijo's rule).
ARMIJO = 1e-4
#: Rounding error of the free energy, in units of eps times its terms.
ROUNDING = 16.0
#: Error of the Gaussian's variances in units of eps.
ACCURACY = 1e3
#: Longest step of theta, in units of 1/R, on top of twice the largest change that the Gaussian asks for.
LONGEST = 10.0
#: Largest numbers of steps tried, halved ones included, and of products with the Hessian for one.
STEPS, PRODUCTS = 400, 100


class SiteEquations(SampleProblem):
    """theta = g + K m - V m and V = Lambda - 1/C_ii with C = (Lambda - K)^{-1}: all sites of a sample are one problem.

    m and c are mean and variance of the prior tilted by theta and V, Lambda = V + 1/c, g = beta h and K = beta J. A
    state is theta with V as one more component, (*batch, N, D + 1).

    Args:
        field: g, (*batch, N, D).
        couplings: K, symmetric, (*batch, n, n): n = N for numbers, and n = N D for matrices, C_ii then being the mean
            of the D diagonal entries of a site.
        prior: of a site.
        radius: R, the prior's scale.
    """

    def __init__(self, field: Tensor, couplings: Tensor, prior: SiteLaw, radius: float) -> None:
        self.field = field
        self.couplings = couplings
        self.prior = prior
        self.radius = radius
        self.own_axes = {"field": 2, "couplings": 2}

    @property
    def tie(self) -> int:
        """Rows of the couplings that belong to a site."""
        return self.field.shape[-1] if self.couplings.shape[-1] != self.field.shape[-2] else 1

    @property
    def copies(self) -> int:
        """Equal Gaussians that the components of the spins are."""
        return self.field.shape[-1] // self.tie

    def coupled(self, m: Tensor) -> Tensor:
        """K m."""
        return (self.couplings @ m.reshape(*m.shape[:-2], self.couplings.shape[-1], self.copies)).reshape(m.shape)

    def spread(self, sites: Tensor) -> Tensor:
        """(*batch, N) -> (*batch, n), a site's number on all its rows."""
        return sites[..., None].expand(*sites.shape, self.tie).flatten(-2)

    def pool(self, rows: Tensor) -> Tensor:
        """(*batch, n) -> (*batch, N), means of a site's rows."""
        return rows.reshape(*rows.shape[:-1], rows.shape[-1] // self.tie, self.tie).mean(-1)

    def moments(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """(m, c) of the sites."""
        theta, v = z[..., :-1], z[..., -1]
        m, c = self.prior.tilted_moments(theta, v, self.radius)
        # A variance below this bound does not change the result, but the derivative of its root must stay finite.
        return m, c.clamp(min=torch.finfo(c.dtype).tiny ** (1 / 3))

    def scaled(self, c: Tensor) -> Tensor:
        """sqrt(c) K sqrt(c)."""
        s = self.spread(c.sqrt())
        return s[..., :, None] * self.couplings * s[..., None, :]

    def cavity(self, x: Tensor, c: Tensor) -> Tensor:
        """Lambda - 1/C_ii for C = sqrt(c) x sqrt(c), which is (K C)_ii/C_ii and so needs no difference."""
        s = self.spread(c.sqrt())
        reaction = (self.couplings * x * s[..., None, :]).sum(-1) / s
        return self.pool(reaction) / self.pool(x.diagonal(dim1=-2, dim2=-1))

    def gaussian(self, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(x, log det x^{-1}, whether it is positive) of the covariance C = sqrt(c) x sqrt(c) at Lambda = V + 1/c."""
        own, scaled = self.spread(v * c), self.scaled(c)
        return inverse_and_logdet(torch.diag_embed(1 + own) - scaled, own - scaled.diagonal(dim1=-2, dim2=-1))

    def fixed_point_map(self, z: Tensor) -> Tensor:
        m, c = self.moments(z)
        x, _, positive = self.gaussian(z[..., -1], c)
        v = self.cavity(x, c)
        mapped = torch.cat([self.field + self.coupled(m) - v[..., None] * m, v[..., None]], dim=-1)
        return mapped.masked_fill(~_events(positive), torch.nan)

    def answering(self, z: Tensor) -> LinearMap:
        """The derivative of (m, <|s|^2>/2) by z, a symmetric map."""
        covariance = self.prior.tilted_covariance(z[..., :-1], z[..., -1], self.radius)

        def answered(change: Tensor) -> Tensor:
            mean, half_square = covariance(change[..., :-1], change[..., -1])
            return torch.cat([mean, half_square[..., None]], dim=-1)

        return answered

    def overlap(self, x: Tensor) -> Tensor:
        """(N, N) sums of x^2 over the rows of two sites, for one site less those of its mean, divided by rows per site.

        As C_ii = c_i pool(x)_ii changes by -sum_j c_i c_j sum(x^2)_ij dLambda_j, it gives d(Lambda - 1/C_ii).
        """
        own = x.diagonal(dim1=-2, dim2=-1)
        off = x - torch.diag_embed(self.spread(self.pool(own)))
        return self.pool(self.tie * self.pool(off.square()).mT).mT

    def linearize(self, z: Tensor) -> Linearization:
        m, c = self.moments(z)
        x, _, _ = self.gaussian(z[..., -1], c)
        v, overlap, answered = self.cavity(x, c)[..., None], self.overlap(x), self.answering(z)
        scale = c * self.pool(x.diagonal(dim1=-2, dim2=-1)).square()

        def product(change: Tensor) -> Tensor:
            answer = answered(change)
            mean, half_square = answer[..., :-1], answer[..., -1]
            spread = 2 * (half_square - (m * mean).sum(-1)) / m.shape[-1]
            by_v = -(overlap @ (c * change[..., -1] - spread / c)[..., None]) / scale[..., None]
            return torch.cat([self.coupled(mean) - v * mean - by_v * m, by_v], dim=-1)

        def transposed(cotangent: Tensor) -> Tensor:
            u = cotangent[..., :-1]
            by_v = (cotangent[..., -1] - (m * u).sum(-1)) / scale
            multiplier = -(overlap @ by_v[..., None])
            spread = -2 / m.shape[-1] * multiplier / c[..., None]
            answer = answered(torch.cat([self.coupled(u) - v * u - spread * m, spread], dim=-1))
            return torch.cat([answer[..., :-1], answer[..., -1:] + c[..., None] * multiplier], dim=-1)

        return Linearization(product, transposed, lambda u: pullback(self, z, u))

    def log_partition(self, z: Tensor) -> Tensor:
        """log Z, stationary in z at a solution; NaN where there is no Gaussian."""
        theta, v = z[..., :-1], z[..., -1]
        m, c = self.moments(z)
        _, logdet, positive = self.gaussian(v, c)
        sites = self.prior.tilted_log_partition(theta, v, self.radius) - v * m.square().sum(-1) / 2
        pairs = _dot(m, self.field - theta + self.coupled(m) / 2)
        return (sites.sum(-1) + pairs - self.copies * logdet / 2).masked_fill(~positive, torch.nan)


class _Point(NamedTuple):
    """The free energy G as a function of the sites' natural parameters, the Gaussian having their moments, per sample.

    z: (theta, V). value: G, NaN where there is no such Gaussian. noise: its rounding error. force: z' - z, where z' is
    what the Gaussian asks of the sites; minus the gradient of G with respect to (m, <|s|^2>/2). answer: of the sites to
    the force. mean, c, v: m, c and the V of z'. square: of the force, in the metric of the sites' covariance. distance:
    between the means at z and z', in units of R. overlap: as in `SiteEquations`. factor: Cholesky's, of 1 + overlap.
    """

    z: Tensor
    value: Tensor
    noise: Tensor
    force: Tensor
    answer: Tensor
    mean: Tensor
    c: Tensor
    v: Tensor
    square: Tensor
    distance: Tensor
    overlap: Tensor
    factor: Tensor


def _point(problem: SiteEquations, z: Tensor) -> _Point:
    theta, own = z[..., :-1], z[..., -1]
    m, c = problem.moments(z)
    scaled = problem.scaled(c)
    gauss = Multipliers(scaled, scaled[..., :0], problem.tie, None)
    # An error of t changes G to second order and the slope of G to first.
    t, report = minimise(gauss, rtol=ACCURACY * torch.finfo(z.dtype).eps, max_steps=STEPS)
    x, logdet, positive = inverse_and_logdet(torch.diag_embed(problem.spread(t)) - scaled)
    v = problem.cavity(x, c)
    square = m.square().sum(-1)
    terms = [
        (theta * m).sum(-1),
        own * (square + theta.shape[-1] * c) / 2,
        -problem.prior.tilted_log_partition(theta, own, problem.radius),
        -(m * (problem.field + problem.coupled(m) / 2)).sum(-1),
        -theta.shape[-1] * (t - 1) / 2,
    ]
    value = torch.stack(terms).sum((0, -1)) + problem.copies * logdet / 2
    size = torch.stack(terms).abs().sum((0, -1)) + problem.copies * logdet.abs() / 2
    overlap = problem.overlap(x)
    target = problem.field + problem.coupled(m) - v[..., None] * m
    force = torch.cat([target - theta, (v - own)[..., None]], dim=-1)
    answer = problem.answering(z)(force)
    return _Point(
        z,
        value.masked_fill(~(report.converged & positive), torch.nan),
        ROUNDING * torch.finfo(z.dtype).eps * size,
        force,
        answer,
        m,
        c,
        v,
        _dot(force, answer),
        torch.linalg.vector_norm((problem.moments(z + force)[0] - m).flatten(-2), dim=-1) / problem.radius,
        overlap,
        torch.linalg.cholesky_ex(overlap + torch.diag_embed(torch.ones_like(c))).L,
    )


def _requested(problem: SiteEquations, point: _Point, change: Tensor) -> Tensor:
    """The derivative of z' by (m, <|s|^2>/2): minus the Gaussian's part of the Hessian."""
    m, half_square = change[..., :-1], change[..., -1]
    c = 2 * (half_square - (point.mean * m).sum(-1)) / m.shape[-1]
    # dV = dLambda + dc/c^2 with 1 + overlap joining them, less the 1 that cancels: c may be small.
    moved = point.overlap @ (c / point.c)[..., None]
    v = torch.cholesky_solve(moved, point.factor)[..., 0] / point.c
    theta = problem.coupled(m) - point.v[..., None] * m - v[..., None] * point.mean
    return torch.cat([theta, v[..., None]], dim=-1)


def _direction(problem: SiteEquations, point: _Point, wanted: Tensor) -> Tensor:
    """Newton's step by conjugate gradients in the metric of the sites' covariance.

    The Hessian in (m, <|s|^2>/2) is Cov^{-1} - P with P of `_requested`; the step solves x - P Cov x = force. It is cut
    off where curvature is negative, and is the force itself if the first curvature is.
    """
    x, residual, p, square = torch.zeros_like(point.force), point.force, point.force, point.square
    answer, answered = point.answer, problem.answering(point.z)
    goal = square * square.clamp(max=1e-2)
    going = wanted & (square > 0)
    for index in range(PRODUCTS):
        if not bool(going.any()):
            break
        hessian = p - _requested(problem, point, answer)
        curvature = _dot(answer, hessian)
        fit = going & (curvature > 0)
        rate = torch.where(fit, square / torch.where(fit, curvature, 1.0), 1.0 if index == 0 else 0.0)
        x = x + _events(rate) * p
        residual = residual - _events(rate) * hessian
        response = answered(residual)
        new = _dot(residual, response)
        going = fit & (new > goal)
        ratio = torch.where(going, new / square, 0.0)
        p = torch.where(_events(going), residual + _events(ratio) * p, p)
        answer = torch.where(_events(going), response + _events(ratio) * answer, answer)
        square = torch.where(going, new, square)
    return x


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1))


def _events(samples: Tensor) -> Tensor:
    return samples[..., None, None]


class _FreeEnergy(SampleFunction):
    """The free energy G of a `_Point`."""

    def point(self, z: Tensor, before: object) -> tuple[_Point, None]:
        return _point(self.problem, z), None

    def step(self, point: _Point, more: None, wanted: Tensor) -> tuple[Tensor, Tensor]:
        x = _direction(self.problem, point, wanted & ~self.done(point))
        # In very strong fields sites are saturated and G is flat, so that a step that long would not find back.
        largest, longest = (t[..., :-1].abs().amax((-2, -1)) for t in (point.force, x))
        return x, ((LONGEST / self.problem.radius + 2 * largest) / longest).clamp(max=1.0)

    def accepts(self, point: _Point, trial: _Point, step: Tensor, size: Tensor) -> Tensor:
        return trial.value - point.value <= point.noise - ARMIJO * size * _dot(point.answer, step)

    def done(self, point: _Point) -> Tensor:
        # The slope is small, too, where a site is saturated in a wrong direction; the distance distinguishes these.
        away = torch.maximum(point.square, point.distance.square()) > torch.finfo(point.z.dtype).eps
        return ~(away & torch.isfinite(point.value))


@uncompiled
def descended(problem: SiteEquations, theta: Tensor, *, steps: int = STEPS) -> tuple[Tensor, Tensor, Tensor]:
    """A state near a minimum of the free energy, downhill from theta, and the numbers of steps and of evaluations.

    At every step the Gaussian gets the moments of the sites, by a convex problem that has one solution, and what it
    asks of them is, in the metric of their covariance, the direction of steepest descent of G. G has a minimum, and
    Newton steps that are shortened until it falls end at one. `steps` = 0 gives a state to start from. Constants to all
    derivatives.
    """

    def solved(field: Tensor, couplings: Tensor, theta: Tensor) -> tuple[Tensor, ...]:
        energy = _FreeEnergy(problem.replace(field, couplings))
        point, more = energy.point(torch.cat([theta, torch.zeros_like(theta[..., :1])], dim=-1), None)
        going = RUNNING if steps else int(Status.MAX_STEPS)
        status = torch.where(energy.done(point), int(Status.CONVERGED), going).to(torch.int8)
        course = descend(energy, point, more, status, torch.ones_like(status, dtype=torch.int32), steps)
        # The V that the Gaussian asks for: where |s| is fixed, the sites' own has no meaning.
        z = torch.cat([course.point.z[..., :-1], course.point.v[..., None]], dim=-1)
        return z, course.num_steps, course.num_evals

    z, num_steps, num_evals = of_samples(solved, theta.ndim - 2, problem.field, problem.couplings, theta)
    return z, num_steps, num_evals

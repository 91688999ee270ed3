"""The saddle point without the library: Newton's method with explicit inverses, and closed forms to check answers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .spin_problems import Data

#: What a step must keep of the slope's promise; rounding errors of phi, in units of eps times its terms.
ARMIJO, ROUNDING = 0.1, 4.0
MAX_STEPS, MAX_HALVINGS = 100, 60


class Convex(NamedTuple):
    """phi(l) = 1/2 sum l - N/2 - 1/2 log det A + 1/2 Tr g^T A^{-1} g with A = diag(l) - K.

    Of K = beta J and g = beta h/sqrt(D) the minimum is log Z/D: there every spin has its length.
    """

    couplings: Tensor
    field: Tensor

    @classmethod
    def of(cls, field: Tensor, couplings: Tensor, beta: Tensor) -> Convex:
        beta = beta[:, None, None]
        return cls(beta * couplings, beta * field / field.shape[-1] ** 0.5)

    def start(self) -> Tensor:
        """Inside by Gershgorin's discs, and exact without couplings: where the library starts if its guess is far."""
        own = self.couplings.diagonal(dim1=-2, dim2=-1)
        others = self.couplings.abs().sum(-1) - own.abs()
        return others + own + (1 + (1 + 4 * self.field.square().sum(-1)).sqrt()) / 2

    def matrix(self, multipliers: Tensor) -> Tensor:
        return torch.diag_embed(multipliers) - self.couplings

    def moments(self, multipliers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A^{-1}, the mean spin A^{-1} g, and by how much squared lengths exceed 1."""
        inverse = torch.linalg.inv(self.matrix(multipliers))
        mean = inverse @ self.field
        return inverse, mean, inverse.diagonal(dim1=-2, dim2=-1) + mean.square().sum(-1) - 1

    def value(self, multipliers: Tensor, mean: Tensor, logdet: Tensor) -> Tensor:
        work = (self.field * mean).sum((-2, -1))
        return (multipliers.sum(-1) - multipliers.shape[-1] - logdet + work) / 2


def hessian(inverse: Tensor, mean: Tensor) -> Tensor:
    return inverse * (inverse / 2 + mean @ mean.mT)


class Found(NamedTuple):
    """Multipliers (B, N); steps, evaluations of a trial's Cholesky factor, and whether all samples are solved."""

    multipliers: Tensor
    steps: int
    trials: int
    solved: bool


@torch.no_grad()
def newton(problem: Convex, tolerance: Tensor | float, start: Tensor | None = None) -> Found:
    """Damped Newton steps by inverses of A and of the Hessian, all samples until the slowest is done.

    A step is halved where A is not positive definite (by Cholesky, which also gives log det A) or phi does not fall.
    They begin at `start`, (B, N), where A must be positive definite, or at `problem.start()`.
    """
    multipliers, trials = problem.start() if start is None else start, 1
    inverse, mean, excess = problem.moments(multipliers)
    value = problem.value(multipliers, mean, _logdet(problem.matrix(multipliers))[0])
    for index in range(MAX_STEPS):
        done = excess.abs().amax(-1) <= tolerance
        if bool(done.all()):
            return Found(multipliers, index, trials, True)
        step = (torch.linalg.inv(hessian(inverse, mean)) @ excess[..., None] / 2).squeeze(-1)
        slope = (excess * step).sum(-1) / 2
        noise = ROUNDING * torch.finfo(value.dtype).eps * (multipliers.abs().sum(-1) + multipliers.shape[-1])
        size = torch.ones_like(value)
        for _ in range(MAX_HALVINGS):
            trial = multipliers + size[:, None] * step
            logdet, good = _logdet(problem.matrix(trial))
            trials += 1
            # The inverse is paid for once all samples are inside.
            if bool(good.all()):
                inverse, mean, excess = problem.moments(trial)
                there = problem.value(trial, mean, logdet)
                good = done | (there - value <= noise - ARMIJO * size * slope)
                if bool(good.all()):
                    break
            size = torch.where(good, size, size / 2)
        else:
            return Found(multipliers, index, trials, False)
        multipliers, value = trial, there
    return Found(multipliers, MAX_STEPS, trials, False)


def _logdet(matrix: Tensor) -> tuple[Tensor, Tensor]:
    factor, info = torch.linalg.cholesky_ex(matrix)
    return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1), info == 0


def free_energy(problem: Convex, found: Tensor, beta: Tensor, dim: int, *, attach: bool) -> Tensor:
    """F of couplings, field and beta through autograd of the inverses.

    attach: make the multipliers a function of them by one Newton step, so that F has three derivatives and not one.
    """
    multipliers = found
    if attach:
        inverse, mean, excess = problem.moments(found)
        step = torch.linalg.inv(hessian(inverse, mean).detach()) @ excess[..., None] / 2
        multipliers = found + step.squeeze(-1)
    mean = problem.moments(multipliers)[1]
    return -dim / beta * problem.value(multipliers, mean, torch.linalg.slogdet(problem.matrix(multipliers)).logabsdet)


class Answer(NamedTuple):
    """F of every sample, (B,), and perhaps the gradient of its sum by field, couplings and beta."""

    free_energy: Tensor
    gradients: tuple[Tensor, Tensor, Tensor] | None = None


def reference(data: Data) -> Answer:
    """To rounding, with derivatives in closed form: -dF/dh = m, -2 dF/dJ = <s.s>, dF/dbeta = (U - F)/beta."""
    field, couplings, beta = (t.detach().double() for t in data[1:])
    problem, dim = Convex.of(field, couplings, beta), field.shape[-1]
    found = newton(problem, 1e-12)
    if not found.solved:
        raise RuntimeError(f"no reference for {data.setting.name}")
    inverse, mean, _ = problem.moments(found.multipliers)
    value = problem.value(found.multipliers, mean, torch.linalg.slogdet(problem.matrix(found.multipliers)).logabsdet)
    free = -dim * value / beta
    pairs, magnetization = dim * (inverse + mean @ mean.mT), dim**0.5 * mean
    energy = -(couplings * pairs).sum((-2, -1)) / 2 - (field * magnetization).sum((-2, -1))
    return Answer(free, (-magnetization, -pairs / 2, (energy - free) / beta))


def evidence(data: Data, answer: Answer, truth: Answer) -> dict[str, float]:
    """Relative error of F; of the gradients; and of a squared length over R^2, as the gradient has it."""
    value = (answer.free_energy.double() - truth.free_energy).abs() / truth.free_energy.abs()
    found = {"value_error": float(value.max())}
    if answer.gradients is None or truth.gradients is None:
        return found
    squares = -2 * answer.gradients[1].diagonal(dim1=-2, dim2=-1).double() / data.field.shape[-1]
    errors = [
        float((given.double() - exact).norm() / exact.norm())
        for given, exact in zip(answer.gradients, truth.gradients, strict=True)
    ]
    return {**found, "gradient_error": max(errors), "residual_max": float((squares - 1).abs().max())}

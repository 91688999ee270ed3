"""Tokens as samples of a Gaussian, and their moments under repeated attention: of samples, and in closed form."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from .. import LogSumExp
from ..linear import _matrices
from ..potentials import renormalise

#: Attention alone, plus the token itself, and that moved back to the first mean and covariance.
ATTENTION, RESIDUAL, RENORMALISED = "attention", "+ residual", "+ renormalise"
WAYS = (ATTENTION, RESIDUAL, RENORMALISED)
#: Numbers of tokens, and steps that they are moved.
COUNTS, STEPS = (100, 400, 1600), 3


@dataclasses.dataclass(frozen=True)
class Law:
    """Tokens eta ~ N(mean, covariance) whose keys are x = Sigma eta, scored by <eta, x>.

    Attributes:
        name: in tables and pictures.
        mean: (D,).
        covariance: (D, D), a multiple of Sigma^-1; once Sigma^-1 itself it is the law of Shim (2022), theorem 1.
        sigma: (D, D), symmetric.
    """

    name: str
    mean: Tensor
    covariance: Tensor
    sigma: Tensor


def law(name: str, mu: Tensor, sigma: Tensor, spread: float = 1.0) -> Law:
    """Return the law N(Sigma^-1 mu, spread Sigma^-1)."""
    return Law(name, _matrices.solve(sigma, mu[:, None])[:, 0], spread * _matrices.inverse(sigma), sigma)


def laws(seed: int) -> list[Law]:
    """Return the law with the theorem's own numbers, and one of narrow tokens in four dimensions, with small scores."""
    mu = torch.tensor([0.5, -1.0], dtype=torch.float64)
    sigma = torch.tensor([[1.2, 0.3], [0.3, 0.8]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64)).Q
    spectrum = torch.tensor([0.5, 0.8, 1.2, 2.0], dtype=torch.float64)
    centre = 0.1 * torch.randn(4, generator=generator, dtype=torch.float64)
    return [
        law("D = 2, covariance Sigma^-1", mu, sigma),
        law("D = 4, covariance Sigma^-1 / 4", centre, basis @ torch.diag(spectrum) @ basis.mT, 0.25),
    ]


def sample(law: Law, *, seeds: int, count: int, seed: int) -> Tensor:
    """Draw tokens (seeds, count, D), float64."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(seeds, count, len(law.mean), generator=generator, dtype=torch.float64)
    tokens: Tensor = law.mean + noise @ torch.linalg.cholesky(law.covariance).mT
    return tokens


def step(law: Law, x: Tensor, way: str) -> Tensor:
    """Move tokens by one attention over all of them: softmax(<eta_i, Sigma eta_j>) times Sigma eta_j."""
    moved: Tensor = LogSumExp(x @ law.sigma, 1.0).mean(x)
    if way != ATTENTION:
        moved = x + moved
    return renormalise(moved, law.mean, law.covariance) if way == RENORMALISED else moved


def start(law: Law) -> tuple[Tensor, Tensor]:
    """Return the mean, and variances along the eigenvectors of Sigma in ascending order of its eigenvalues."""
    basis = torch.linalg.eigh(law.sigma)[1]
    return law.mean, (basis * (law.covariance @ basis)).sum(0)


def closed_form(law: Law, mean: Tensor, variances: Tensor, way: str) -> tuple[Tensor, Tensor]:
    """Return mean and variances, as `start` does, of infinitely many Gaussian tokens after a step.

    Keys are N(Sigma m, Sigma C Sigma), so attention is the affine map eta -> Sigma m + Sigma C Sigma eta; its matrix
    commutes with C. As eigenvalues, no variance is lost to rounding beside a larger one.
    """
    if way == RENORMALISED:
        return start(law)
    eigenvalues, basis = torch.linalg.eigh(law.sigma)
    factors = eigenvalues.square() * variances + (0.0 if way == ATTENTION else 1.0)
    matrix = basis @ torch.diag(factors) @ basis.mT
    return law.sigma @ mean + matrix @ mean, factors.square() * variances


def spread(law: Law, variances: Tensor) -> Tensor:
    """Return the covariance that has these variances along the eigenvectors of Sigma."""
    basis = torch.linalg.eigh(law.sigma)[1]
    covariance: Tensor = basis @ torch.diag(variances) @ basis.mT
    return covariance


def moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean (*batch, D) and covariance (*batch, D, D) of tokens (*batch, N, D), over N, and its eigenvalues."""
    mean = x.mean(-2)
    centred = (x - mean[..., None, :]) / math.sqrt(x.shape[-2])
    # Beside large eigenvalues the roots of small ones keep their digits, the eigenvalues themselves would not.
    return mean, centred.mT @ centred, torch.linalg.svdvals(centred).square()


def entropy(eigenvalues: Tensor) -> Tensor:
    """Return 1/2 log det(2 pi e C) in nats, from the eigenvalues of C; -inf where one of them is 0."""
    values: Tensor = (2 * math.pi * math.e * eigenvalues).log().sum(-1) / 2
    return values


@torch.no_grad()
def move(law: Law, way: str, count: int, seeds: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for every step from 0 on, over samples of `count` tokens."""
    first = sample(law, seeds=seeds, count=count, seed=seed)
    x, mean, variances, rows = first, *start(law), list[dict[str, Any]]()
    for number in range(STEPS + 1):
        if number:
            # One sample after the other: a batch of them would hold all pairs of tokens at once.
            x = torch.stack([step(law, one, way) for one in x])
            mean, variances = closed_form(law, mean, variances, way)
        means, covariances, eigenvalues = moments(x)
        covariance, size = spread(law, variances), torch.linalg.matrix_norm
        measured = {
            "mean_shift": (means - law.mean).norm(dim=-1),
            "mean_error": (means - mean).norm(dim=-1),
            "covariance_error": size(covariances - covariance) / size(covariance),
            "entropy": entropy(eigenvalues),
            # In units of the width of the tokens.
            "moved": ((x - first).square().sum(-1).mean(-1) / law.covariance.trace()).sqrt(),
        }
        place = {"law": law.name, "way": way, "tokens": count, "step": number}
        closed = {
            "closed_mean_shift": float((mean - law.mean).norm()),
            "closed_eigenvalues": sorted(variances.tolist(), reverse=True),
            "closed_entropy": float(entropy(variances)),
        }
        rows.append(place | summary(measured) | {"eigenvalues": eigenvalues.mean(0).tolist()} | closed)
    return rows


def summary(measured: dict[str, Tensor]) -> dict[str, float]:
    """Return means over seeds, and as NAME_std standard deviations."""
    means = {name: float(values.mean()) for name, values in measured.items()}
    return means | {f"{name}_std": float(values.std()) for name, values in measured.items()}


def gain(law: Law, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the gain of entropy by one step with residual, from the law's own, in the largest sample."""
    before, after = [row for row in rows if row["way"] == RESIDUAL and row["tokens"] == COUNTS[-1]][:2]
    factors = torch.linalg.eigvalsh(law.sigma).square() * start(law)[1]
    return {
        "law": law.name,
        "tokens": COUNTS[-1],
        "measured": after["entropy"] - before["closed_entropy"],
        "std": after["entropy_std"],
        "closed": float(factors.log1p().sum()),
    }


def slope(law: Law, way: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Fit the exponent of N in the error of the covariance after one step, or in the way of renormalised tokens."""
    quantity = "moved" if way == RENORMALISED else "covariance_error"
    errors = [row[quantity] for row in rows if (row["way"], row["step"]) == (way, 1)]
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (COUNTS, errors))
    x = x - x.mean()
    return {"law": law.name, "way": way, "quantity": quantity, "slope": float((x * y).sum() / x.square().sum())}

"""The energies of retrieval, by name. Adding one is a line of `POTENTIALS`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import potentials
from ..energies import AnchoredEnergy, Energy, Epanechnikov, SphereEnergy

#: The potential of softmax attention.
LOG_SUM_EXP = "log-sum-exp"
#: Random features of `PositiveFeatures`, and the seed of their directions.
FEATURES, FEATURE_SEED = 256, 0
#: Scores beyond this are cut by `SoftcapLogSumExp`.
SOFTCAP = 50.0
#: The similarities of patterns from which `--beta auto` is found, by the potentials that have one.
SIMILARITIES = {LOG_SUM_EXP: "dot", "distance": "distance"}


class Choice(NamedTuple):
    """An energy to choose.

    Attributes:
        energy: (keys, queries, beta, anchor, mask or None) to the energy of retrieval.
        beta: about where it works for 200 patterns whose length is about 8: sweeps begin around it.
    """

    energy: Callable[[Tensor, Tensor, float, float, Tensor | None], Energy]
    beta: float = 8.0


def _anchored(
    factory: Callable[..., Any], keys: Tensor, queries: Tensor, beta: float, anchor: float, mask: Tensor | None
) -> Energy:
    options = {} if mask is None else {"mask": mask}
    return AnchoredEnergy(factory(keys, beta, **options), queries, anchor)


def _of(factory: Callable[..., Any], beta: float = 8.0) -> Choice:
    """Choose the anchored energy of a factory (keys, beta, *, mask) of potentials."""
    return Choice(partial(_anchored, factory), beta)


def _random_features(keys: Tensor, beta: float, **options: Any) -> potentials.KernelPotential:
    generator = torch.Generator().manual_seed(FEATURE_SEED)
    features = potentials.PositiveFeatures(keys.shape[-1], FEATURES, generator=generator)
    return potentials.KernelPotential(keys, beta, features=features, **options)


def _plain(keys: Tensor, beta: float, mask: Tensor | None) -> potentials.LogSumExp:
    return potentials.LogSumExp(keys, beta, mask=mask)


#: By name. To add one: its line, and its name in docs/compare.md.
POTENTIALS: dict[str, Choice] = {
    LOG_SUM_EXP: _of(potentials.LogSumExp),
    "softmax1": _of(potentials.Softmax1),
    "distance": _of(potentials.DistanceLogSumExp),
    "entmax": _of(potentials.Entmax),
    "sparsemax": _of(partial(potentials.Entmax, alpha=2.0)),
    "softcap": _of(partial(potentials.SoftcapLogSumExp, cap=SOFTCAP), 2.0**-3),
    "normalised-scores": _of(potentials.NormalisedScores),
    "squared-scores": _of(potentials.SquaredScores, 2.0**-13),
    "polynomial-2": _of(potentials.Polynomial, 2.0**-13),
    "polynomial-3": _of(partial(potentials.Polynomial, degree=3), 2.0**-16),
    "exponential": _of(potentials.Exponential, 2.0**-5),
    "units-bernoulli": _of(potentials.units_potential(potentials.BernoulliUnits(0.5)), 2.0**-3),
    "units-sign": _of(potentials.units_potential(potentials.SignUnits()), 2.0**-7),
    "units-sphere": _of(potentials.units_potential(potentials.SphereUnits(5)), 2.0**-7),
    "units-gaussian": _of(potentials.units_potential(potentials.GaussianUnits()), 2.0**-13),
    "units-poisson": _of(potentials.units_potential(potentials.PoissonUnits(1.0)), 2.0**-5),
    "units-exponential": _of(potentials.units_potential(potentials.ExponentialUnits(1.0)), 2.0**-10),
    "units-laplace": _of(potentials.units_potential(potentials.LaplaceUnits(1.0)), 2.0**-10),
    "units-constant": _of(potentials.units_potential(potentials.ConstantUnits(1.0))),
    "kernel-positive": _of(_random_features, 2.0**-5),
    "kernel-elu": _of(partial(potentials.KernelPotential, features=potentials.EluFeatures())),
    "kernel-relu": _of(partial(potentials.KernelPotential, features=potentials.ReluFeatures())),
    # States as long as a typical pattern.
    "sphere": Choice(lambda k, x, b, a, m: SphereEnergy(_plain(k, b, m), x, a, radius=float(k.norm(dim=-1).median()))),
    "epanechnikov": Choice(lambda k, x, b, a, m: Epanechnikov(k, b, mask=m), 2.0**-5),
}


def energy_of(
    keys: Tensor, queries: Tensor, usable: Tensor, *, beta: float, anchor: float, potential: str = LOG_SUM_EXP
) -> Energy:
    """Return the energy of retrieval, in which patterns that are not usable are masked."""
    mask = None if bool(usable.all()) else usable[..., None, :]
    return POTENTIALS[potential].energy(keys, queries, beta, anchor, mask)

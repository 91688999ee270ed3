"""The energies of retrieval, by name. Adding one is a line of `POTENTIALS`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..energies import AnchoredEnergy, Energy, Epanechnikov, SphereEnergy
from ..potentials import (
    BernoulliUnits,
    ConstantUnits,
    DistanceLogSumExp,
    EluFeatures,
    Entmax,
    Exponential,
    ExponentialUnits,
    GaussianUnits,
    KernelPotential,
    LaplaceUnits,
    LogSumExp,
    NormalisedScores,
    PoissonUnits,
    Polynomial,
    PositiveFeatures,
    ReluFeatures,
    SignUnits,
    SoftcapLogSumExp,
    Softmax1,
    SphereUnits,
    SquaredScores,
    units_potential,
)

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
    """The anchored energy of a factory (keys, beta, *, mask) of potentials."""
    return Choice(partial(_anchored, factory), beta)


def _random_features(keys: Tensor, beta: float, **options: Any) -> KernelPotential:
    generator = torch.Generator().manual_seed(FEATURE_SEED)
    features = PositiveFeatures(keys.shape[-1], FEATURES, generator=generator)
    return KernelPotential(keys, beta, features=features, **options)


def _plain(keys: Tensor, beta: float, mask: Tensor | None) -> LogSumExp:
    return LogSumExp(keys, beta, mask=mask)


#: By name. To add one: its line, and its name in docs/compare.md.
POTENTIALS: dict[str, Choice] = {
    LOG_SUM_EXP: _of(LogSumExp),
    "softmax1": _of(Softmax1),
    "distance": _of(DistanceLogSumExp),
    "entmax": _of(Entmax),
    "sparsemax": _of(partial(Entmax, alpha=2.0)),
    "softcap": _of(partial(SoftcapLogSumExp, cap=SOFTCAP), 2.0**-3),
    "normalised-scores": _of(NormalisedScores),
    "squared-scores": _of(SquaredScores, 2.0**-13),
    "polynomial-2": _of(Polynomial, 2.0**-13),
    "polynomial-3": _of(partial(Polynomial, degree=3), 2.0**-16),
    "exponential": _of(Exponential, 2.0**-5),
    "units-bernoulli": _of(units_potential(BernoulliUnits(0.5)), 2.0**-3),
    "units-sign": _of(units_potential(SignUnits()), 2.0**-7),
    "units-sphere": _of(units_potential(SphereUnits(5)), 2.0**-7),
    "units-gaussian": _of(units_potential(GaussianUnits()), 2.0**-13),
    "units-poisson": _of(units_potential(PoissonUnits(1.0)), 2.0**-5),
    "units-exponential": _of(units_potential(ExponentialUnits(1.0)), 2.0**-10),
    "units-laplace": _of(units_potential(LaplaceUnits(1.0)), 2.0**-10),
    "units-constant": _of(units_potential(ConstantUnits(1.0))),
    "kernel-positive": _of(_random_features, 2.0**-5),
    "kernel-elu": _of(partial(KernelPotential, features=EluFeatures())),
    "kernel-relu": _of(partial(KernelPotential, features=ReluFeatures())),
    # States as long as a typical pattern.
    "sphere": Choice(lambda k, x, b, a, m: SphereEnergy(_plain(k, b, m), x, a, radius=float(k.norm(dim=-1).median()))),
    "epanechnikov": Choice(lambda k, x, b, a, m: Epanechnikov(k, b, mask=m), 2.0**-5),
}


def energy_of(
    keys: Tensor, queries: Tensor, usable: Tensor, *, beta: float, anchor: float, potential: str = LOG_SUM_EXP
) -> Energy:
    """The energy of retrieval; patterns that are not usable are masked, so that no query reads them."""
    mask = None if bool(usable.all()) else usable[..., None, :]
    return POTENTIALS[potential].energy(keys, queries, beta, anchor, mask)

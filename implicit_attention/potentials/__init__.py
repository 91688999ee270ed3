"""Potentials Phi with their gradient (mean) and Hessian (covariance), and the laws of the units that make them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base import CovarianceMap as CovarianceMap
from .base import Potential as Potential
from .log_sum_exp import LogSumExp as LogSumExp
from .scored_keys import ReadsOut as ReadsOut
from .self_attention import SelfAttention as SelfAttention
from .softmax1 import Softmax1 as Softmax1
from .squared_scores import SquaredScores as SquaredScores

if TYPE_CHECKING:
    from .boltzmann import RestrictedBoltzmannMachine as RestrictedBoltzmannMachine
    from .boltzmann_learning import LikelihoodGradient as LikelihoodGradient
    from .boltzmann_learning import LogPartitionEstimate as LogPartitionEstimate
    from .boltzmann_learning import annealed_importance_sampling as annealed_importance_sampling
    from .boltzmann_learning import contrastive_divergence as contrastive_divergence
    from .boltzmann_learning import exact_gradient as exact_gradient
    from .boltzmann_learning import persistent_gradient as persistent_gradient
    from .bounded_tilts import ExponentialUnits as ExponentialUnits
    from .bounded_tilts import LaplaceUnits as LaplaceUnits
    from .distance import DistanceLogSumExp as DistanceLogSumExp
    from .duality import bregman as bregman
    from .duality import contrastive_loss as contrastive_loss
    from .duality import fisher as fisher
    from .duality import jensen_bound as jensen_bound
    from .duality import renormalise as renormalise
    from .entmax import Entmax as Entmax
    from .gaussian_mixture import GaussianMixture as GaussianMixture
    from .hidden_units import HiddenUnits as HiddenUnits
    from .kernel import KernelPotential as KernelPotential
    from .kernel_features import EluFeatures as EluFeatures
    from .kernel_features import PositiveFeatures as PositiveFeatures
    from .kernel_features import ReluFeatures as ReluFeatures
    from .laws import BernoulliUnits as BernoulliUnits
    from .laws import ConstantUnits as ConstantUnits
    from .laws import DiscreteUnits as DiscreteUnits
    from .laws import GaussianUnits as GaussianUnits
    from .laws import PoissonUnits as PoissonUnits
    from .layer_norm import LayerNormPotential as LayerNormPotential
    from .mixture import as_distribution as as_distribution
    from .normalised_scores import NormalisedScores as NormalisedScores
    from .softcap import SoftcapLogSumExp as SoftcapLogSumExp
    from .sphere import SignUnits as SignUnits
    from .sphere import SphereUnits as SphereUnits
    from .spherical import AmosResponse as AmosResponse
    from .spherical import LargeDResponse as LargeDResponse
    from .spherical import SaddlePointResponse as SaddlePointResponse
    from .spherical import SphericalLaw as SphericalLaw
    from .summed_scores import Exponential as Exponential
    from .summed_scores import Polynomial as Polynomial
    from .summed_scores import units_potential as units_potential
    from .tilted import Tilted as Tilted
    from .token_attention import TokenAttention as TokenAttention
    from .token_memory import TokenMemory as TokenMemory
    from .unit import SiteLaw as SiteLaw
    from .unit import Units as Units

#: The modules that load when one of their names is first used.
_LAZY = {
    "distance": ("DistanceLogSumExp",),
    "entmax": ("Entmax",),
    "softcap": ("SoftcapLogSumExp",),
    "summed_scores": ("Polynomial", "Exponential", "units_potential"),
    "normalised_scores": ("NormalisedScores",),
    "token_attention": ("TokenAttention",),
    "token_memory": ("TokenMemory",),
    "layer_norm": ("LayerNormPotential",),
    "kernel": ("KernelPotential",),
    "kernel_features": ("PositiveFeatures", "EluFeatures", "ReluFeatures"),
    "gaussian_mixture": ("GaussianMixture",),
    "hidden_units": ("HiddenUnits",),
    "tilted": ("Tilted",),
    # Potentials as log-partition functions of laws.
    "mixture": ("as_distribution",),
    "duality": ("bregman", "contrastive_loss", "fisher", "jensen_bound", "renormalise"),
    # This module calls `solve`: the package knows it by name alone.
    "legendre": ("conjugate", "natural_parameter"),
    # Boltzmann machines, and their learning.
    "boltzmann": ("RestrictedBoltzmannMachine",),
    "boltzmann_learning": (
        "LikelihoodGradient",
        "LogPartitionEstimate",
        "annealed_importance_sampling",
        "contrastive_divergence",
        "exact_gradient",
        "persistent_gradient",
    ),
    # Laws of one unit, for `HiddenUnits(weights, units)` and, of those that are a `SiteLaw`, `AdaTAP(prior=)`.
    "unit": ("Units", "SiteLaw"),
    "laws": ("BernoulliUnits", "ConstantUnits", "DiscreteUnits", "GaussianUnits", "PoissonUnits"),
    "bounded_tilts": ("ExponentialUnits", "LaplaceUnits"),
    # Spins of fixed length, for `MeanField(response=)`: `SphereUnits`, `SignUnits`, and approximations of them.
    "sphere": ("SignUnits", "SphereUnits"),
    "spherical": ("SphericalLaw", "AmosResponse", "SaddlePointResponse", "LargeDResponse"),
}
_PLACES = {name: module for module, names in _LAZY.items() for name in names}

__all__ = [
    *("CovarianceMap", "Potential", "ReadsOut", "LogSumExp", "Softmax1", "SelfAttention", "SquaredScores"),
    *_PLACES,
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)

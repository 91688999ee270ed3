"""Potentials Phi with their gradient (mean) and Hessian (covariance), and the laws of the units that make them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base import CovarianceMap, Potential
from .log_sum_exp import LogSumExp
from .scored_keys import ReadsOut
from .self_attention import SelfAttention
from .softmax1 import Softmax1
from .squared_scores import SquaredScores

if TYPE_CHECKING:
    from .boltzmann import RestrictedBoltzmannMachine
    from .boltzmann_learning import (
        LikelihoodGradient,
        LogPartitionEstimate,
        annealed_importance_sampling,
        contrastive_divergence,
        exact_gradient,
        persistent_gradient,
    )
    from .bounded_tilts import ExponentialUnits, LaplaceUnits
    from .distance import DistanceLogSumExp
    from .duality import bregman, contrastive_loss, fisher, jensen_bound, renormalise
    from .entmax import Entmax
    from .gaussian_mixture import GaussianMixture
    from .hidden_units import HiddenUnits
    from .kernel import KernelPotential
    from .kernel_features import EluFeatures, PositiveFeatures, ReluFeatures
    from .laws import (
        BernoulliUnits,
        ConstantUnits,
        DiscreteUnits,
        GaussianUnits,
        PoissonUnits,
    )
    from .layer_norm import LayerNormPotential
    from .mixture import as_distribution
    from .normalised_scores import NormalisedScores
    from .softcap import SoftcapLogSumExp
    from .sphere import SignUnits, SphereUnits
    from .spherical import AmosResponse, LargeDResponse, SaddlePointResponse, SphericalLaw
    from .summed_scores import Exponential, Polynomial, units_potential
    from .tilted import Tilted
    from .token_attention import TokenAttention
    from .token_memory import TokenMemory
    from .unit import SiteLaw, Units

__all__ = [
    "CovarianceMap",
    "Potential",
    "ReadsOut",
    "LogSumExp",
    "Softmax1",
    "DistanceLogSumExp",
    "Entmax",
    "SoftcapLogSumExp",
    "SquaredScores",
    "Polynomial",
    "Exponential",
    "units_potential",
    "NormalisedScores",
    "SelfAttention",
    "TokenAttention",
    "TokenMemory",
    "LayerNormPotential",
    "KernelPotential",
    "PositiveFeatures",
    "EluFeatures",
    "ReluFeatures",
    "GaussianMixture",
    "HiddenUnits",
    "Tilted",
    # Potentials as log-partition functions of laws.
    "as_distribution",
    "bregman",
    "conjugate",
    "contrastive_loss",
    "fisher",
    "jensen_bound",
    "natural_parameter",
    "renormalise",
    # Boltzmann machines, and their learning.
    "RestrictedBoltzmannMachine",
    "LikelihoodGradient",
    "LogPartitionEstimate",
    "annealed_importance_sampling",
    "contrastive_divergence",
    "exact_gradient",
    "persistent_gradient",
    # Laws of one unit, for `HiddenUnits(weights, units)` and, of those that are a `SiteLaw`, `AdaTAP(prior=)`.
    "Units",
    "SiteLaw",
    "BernoulliUnits",
    "ConstantUnits",
    "DiscreteUnits",
    "ExponentialUnits",
    "GaussianUnits",
    "LaplaceUnits",
    "PoissonUnits",
    "SignUnits",
    "SphereUnits",
    # Spins of fixed length, for `MeanField(response=)`: `SphereUnits`, `SignUnits`, and approximations of them.
    "SphericalLaw",
    "AmosResponse",
    "SaddlePointResponse",
    "LargeDResponse",
]

_LAZY = {
    "distance": ("DistanceLogSumExp",),
    # By `solve`, and therefore above this package: known here by name alone.
    ".legendre": ("conjugate", "natural_parameter"),
    "duality": ("bregman", "contrastive_loss", "fisher", "jensen_bound", "renormalise"),
    "boltzmann": ("RestrictedBoltzmannMachine",),
    "boltzmann_learning": (
        "LikelihoodGradient",
        "LogPartitionEstimate",
        "annealed_importance_sampling",
        "contrastive_divergence",
        "exact_gradient",
        "persistent_gradient",
    ),
    "bounded_tilts": ("ExponentialUnits", "LaplaceUnits"),
    "entmax": ("Entmax",),
    "gaussian_mixture": ("GaussianMixture",),
    "hidden_units": ("HiddenUnits",),
    "kernel": ("KernelPotential",),
    "kernel_features": ("EluFeatures", "PositiveFeatures", "ReluFeatures"),
    "layer_norm": ("LayerNormPotential",),
    "mixture": ("as_distribution",),
    "normalised_scores": ("NormalisedScores",),
    "softcap": ("SoftcapLogSumExp",),
    "summed_scores": ("Exponential", "Polynomial", "units_potential"),
    "tilted": ("Tilted",),
    "token_attention": ("TokenAttention",),
    "token_memory": ("TokenMemory",),
    "unit": ("SiteLaw", "Units"),
    "sphere": ("SignUnits", "SphereUnits"),
    "spherical": ("AmosResponse", "LargeDResponse", "SaddlePointResponse", "SphericalLaw"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in _LAZY.items() if name in names), "laws")
    return getattr(import_module(f".{module}", __name__), name)

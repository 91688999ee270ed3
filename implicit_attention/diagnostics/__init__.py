"""Properties of fixed points: contraction, curvature, number and kind of different ones, keys attended to, distance."""

from .certificate import certified_error
from .curvature import is_saddle, jacobian_penalty, smallest_curvature, spectral_radius
from .diagnosis import Diagnosis, diagnose
from .distinct import distinct_fixed_points, effective_keys, first_fixed_points
from .stationary import StationaryPoints, stationary_points

__all__ = [
    "Diagnosis",
    "StationaryPoints",
    "certified_error",
    "diagnose",
    "distinct_fixed_points",
    "effective_keys",
    "first_fixed_points",
    "is_saddle",
    "jacobian_penalty",
    "smallest_curvature",
    "spectral_radius",
    "stationary_points",
]

"""Spins drawn from Boltzmann's law, or from synchronous dynamics: averages with standard errors."""

from .estimates import Samples
from .heat_bath import heat_bath
from .synchronous import synchronous
from .von_mises_fisher import sample_spins

__all__ = ["Samples", "heat_bath", "synchronous", "sample_spins"]

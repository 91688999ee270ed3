"""Adjoints: how a solution is differentiated. An argument of `solve`, not a property of a solver."""

from .base import Adjoint, Request
from .implicit import Implicit
from .reversible import Reversible
from .unrolled import OneStep, Phantom, Unrolled

__all__ = ["Adjoint", "Implicit", "OneStep", "Phantom", "Request", "Reversible", "Unrolled"]

"""Figures, made with matplotlib's `Figure` objects: no global state, no display needed. Save them with `savefig`."""

from .convergence import convergence_figure
from .retrieval import retrieval_figure

__all__ = ["convergence_figure", "retrieval_figure"]

"""Figures, made with matplotlib's `Figure` objects: no global state, no display needed. Save them with `savefig`."""

from .convergence import convergence_figure
from .couplings import couplings_figure, site_places
from .descents import descent_figure
from .distribution import distribution_figure
from .driven import driven_figure
from .inpainting import energies_figure, reconstruction_figure
from .landscapes import landscape_figure
from .mazes import maze_figure, save_maze_gif, sizes_figure
from .potentials import potentials_figure
from .retrieval import rates_figure, retrieval_figure
from .spin_blocks import decomposition_figure
from .spins import configuration_figure, phase_figure
from .training import training_figure

__all__ = [
    "configuration_figure",
    "convergence_figure",
    "couplings_figure",
    "decomposition_figure",
    "descent_figure",
    "distribution_figure",
    "driven_figure",
    "energies_figure",
    "landscape_figure",
    "maze_figure",
    "phase_figure",
    "potentials_figure",
    "rates_figure",
    "reconstruction_figure",
    "retrieval_figure",
    "save_maze_gif",
    "site_places",
    "sizes_figure",
    "training_figure",
]

"""Figures, made with matplotlib's `Figure` objects: no global state, no display needed. Save them with `savefig`."""

from .attraction import Basins, basins, basins_figure
from .convergence import convergence_figure
from .couplings import couplings_figure, site_places
from .courses import save_course_gif
from .descents import descent_figure
from .distribution import distribution_figure
from .driven import driven_figure
from .evaluations import evaluations_figure
from .inpainting import energies_figure, reconstruction_figure
from .landscape import landscape_figure
from .mazes import maze_figure, save_maze_gif, sizes_figure
from .panels import panels_figure
from .potentials import potentials_figure
from .principal import principal_figure
from .retrieval import rates_figure, retrieval_figure
from .risk import risk_figure
from .spectrum import spectrum_figure
from .spin_blocks import decomposition_figure
from .spins import configuration_figure, phase_figure
from .steps import step_norm_figure, step_norms
from .text import text_figure
from .training import training_figure

__all__ = [
    "Basins",
    "basins",
    "basins_figure",
    "configuration_figure",
    "convergence_figure",
    "couplings_figure",
    "decomposition_figure",
    "descent_figure",
    "distribution_figure",
    "driven_figure",
    "energies_figure",
    "evaluations_figure",
    "landscape_figure",
    "maze_figure",
    "panels_figure",
    "phase_figure",
    "potentials_figure",
    "principal_figure",
    "rates_figure",
    "reconstruction_figure",
    "retrieval_figure",
    "risk_figure",
    "save_course_gif",
    "save_maze_gif",
    "site_places",
    "sizes_figure",
    "spectrum_figure",
    "step_norm_figure",
    "step_norms",
    "text_figure",
    "training_figure",
]

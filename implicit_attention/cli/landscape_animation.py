"""The animation of `landscape`: queries that descend the energy of the patterns, as a GIF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..plotting import landscape_figure
from ..plotting.style import BAD
from .landscape_plane import Plane
from .landscape_steps import VALLEYS, moved

#: Steps of the descent, their size, frames in a second, and frames for which the last one stays.
STEPS, STEP_SIZE, RATE, LAST = 40, 0.25, 10, 20


def write_gif(file: Path, plane: Plane) -> None:
    """Write the descent of the queries, step by step, to `file`; the last frame stays for two seconds."""
    from matplotlib.animation import PillowWriter
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    it = moved(plane.patterns, plane.queries, plane.starts, VALLEYS * plane.beta, STEP_SIZE, STEPS)
    path = it.numbers["path"]
    title = f"Steps of size {STEP_SIZE:g} down the energy, beta {it.numbers['beta']:.3g}"
    figure = landscape_figure(it.energy, path[0], fixed_points=it.points, reach=plane.reach, title=title)
    FigureCanvasAgg(figure)
    axes: Any = figure.axes[0]
    lines = [axes.plot([], [], color=BAD, lw=1.4, zorder=5)[0] for _ in plane.queries]
    (dots,) = axes.plot([], [], ls="", marker="o", ms=6, color=BAD, mec="w", zorder=6)
    writer = PillowWriter(fps=RATE)
    with writer.saving(figure, str(file), dpi=80):
        for step in (*range(len(path)), *[len(path) - 1] * LAST):
            for query, line in enumerate(lines):
                line.set_data(*path[: step + 1, query].T.numpy())
            dots.set_data(*path[step].T.numpy())
            writer.grab_frame()

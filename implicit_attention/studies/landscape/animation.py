"""The animation of `landscape`: queries that descend the energy of the patterns, as a GIF."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

from ...plotting import landscape_figure
from ...plotting.style import BAD
from .plane import Plane
from .steps import COLD, moved

#: Steps of the descent and their size; milliseconds of a frame, and of the last one.
STEPS, STEP_SIZE, STAYS, LAST_STAYS = 40, 0.15, 100, 2000
DPI, COLOURS = 90, 200


def write_gif(file: Path | BinaryIO, plane: Plane) -> None:
    """Write the descent of the queries, step by step, to `file`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    it = moved(plane.patterns, plane.queries, plane.starts, COLD * plane.beta, STEP_SIZE, STEPS)
    path = it.numbers["path"]
    title = f"Steps of size {STEP_SIZE:g} down the energy, beta {it.numbers['beta']:.3g}"
    figure = landscape_figure(it.energy, path[0], fixed_points=it.points, reach=plane.reach, title=title)
    figure.set_dpi(DPI)
    axes: Any = figure.axes[0]
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    # The landscape does not move, and is drawn once.
    still = canvas.copy_from_bbox(figure.bbox)
    lines = [axes.plot([], [], color=BAD, lw=1.4, animated=True)[0] for _ in plane.queries]
    (dots,) = axes.plot([], [], ls="", marker="D", ms=6, color=BAD, mec="w", animated=True)
    frames = []
    for step in range(len(path)):
        for query, line in enumerate(lines):
            line.set_data(*path[: step + 1, query].T.numpy())
        dots.set_data(*path[step].T.numpy())
        canvas.restore_region(still)
        for artist in (*lines, dots):
            axes.draw_artist(artist)
        frames.append(Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB"))
    # One palette for all: frames then differ only where something moves.
    palette = frames[-1].quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    first, *others = (frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames)
    stays = [*[STAYS] * len(others), LAST_STAYS]
    first.save(file, "GIF", save_all=True, append_images=others, duration=stays, loop=0, optimize=True)

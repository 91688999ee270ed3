"""Animated pictures of an answer that grows, evaluation by evaluation, beside the residual by which it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _validate
from .style import COLORS, finish, hide_ticks, new_figure

#: Colours from "not on the path" to "on the path", and those of walls, start and goal.
SHADES = ("#ffffff", "#cfe6f5", "#56B4E9", "#0072B2")
WALL, START, GOAL = "#1b2733", "#009E73", "#D55E00"


def save_course_gif(
    path: Path | str,
    frames: Sequence[Tensor],
    *,
    residuals: Sequence[float],
    tolerance: float,
    marks: Sequence[tuple[int, int]] = (),
    texts: Sequence[Sequence[Sequence[str]]] | None = None,
    title: str = "Solving a puzzle",
    fps: int = 12,
    every: int = 1,
) -> None:
    """Write an animated GIF of an answer whose places are the squares of a picture, beside the residual.

    Not for mazes as graphs, whose cells have walls between them: use `save_maze_gif`.

    Args:
        path: of the file.
        frames: numbers (H, W) in [0, 1] after 1, 2, ... evaluations, drawn as shades; NaN for walls and what is given.
        residuals: relative residual after each evaluation, > 0.
        tolerance: at which the answer counts as settled.
        marks: rows and columns of start and goal.
        texts: for every frame H rows of W words, which are written on the squares; None for none.
        title: above the picture.
        fps: frames in a second. The last one stays for two seconds.
        every: how many evaluations lie between two frames; the last evaluation is always drawn.

    Raises:
        ValueError: no frames, frames of several shapes, or another number of residuals or texts than of frames.

    Examples:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from implicit_attention.plotting import save_course_gif
        >>> frames = [torch.tensor([[0.4, torch.nan]]), torch.tensor([[0.9, torch.nan]])]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "course.gif"
        ...     texts = [[["1", "[4]"]], [["2", "[4]"]]]
        ...     save_course_gif(file, frames, residuals=[0.5, 1e-4], tolerance=1e-3, texts=texts)
        ...     file.read_bytes()[:3]
        b'GIF'
    """
    check_frames(frames, residuals)
    if texts is not None:
        required = f"hold {len(frames)} pictures in words, one for each frame"
        _validate.require(len(texts) == len(frames), "texts", required, len(texts))
    required, received = "have the shape (H, W)", f"shape {tuple(frames[0].shape)}"
    _validate.require(frames[0].ndim == 2, "frames[0]", required, received)
    for index, frame in enumerate(frames):
        required, received = f"have the shape {tuple(frames[0].shape)}", f"shape {tuple(frame.shape)}"
        _validate.require(frame.shape == frames[0].shape, f"frames[{index}]", required, received)
    frames = [frame.detach().float().cpu() for frame in frames]
    height, width = frames[0].shape

    def draw(axes: Any) -> Callable[[int], None]:
        image = axes.imshow(shaded(frames[0]), interpolation="nearest")
        hide_ticks(axes)
        axes.spines[:].set_visible(False)
        points = 230 / max(height, width)
        for (row, column), color in zip(marks, (START, GOAL), strict=False):
            axes.plot(column, row, "o", color=color, ms=0.85 * points, mec="white", mew=0.6)
        places = [(row, column) for row in range(height) for column in range(width)] if texts is not None else []
        size = min(0.5 * points, 24)
        words = [axes.text(c, r, "", ha="center", va="center_baseline", fontsize=size) for r, c in places]

        def update(index: int) -> None:
            image.set_data(shaded(frames[index]))
            for word, (row, column) in zip(words, places, strict=True):
                value = float(frames[index][row, column])
                assert texts is not None
                word.set_text(texts[index][row][column])
                word.set_color("white" if value != value or value > 0.5 else WALL)

        return update

    animate(path, draw, residuals, tolerance=tolerance, title=title, fps=fps, every=every)


def check_frames(frames: Sequence[Tensor], residuals: Sequence[float]) -> None:
    """Raise unless there are frames, and as many residuals."""
    _validate.require(len(frames) > 0, "frames", "hold at least one frame", "none")
    required = f"hold {len(frames)} numbers, one for each frame"
    _validate.require(len(residuals) == len(frames), "residuals", required, len(residuals))


def animate(
    path: Path | str,
    draw: Callable[[Any], Callable[[int], None]],
    residuals: Sequence[float],
    *,
    tolerance: float,
    title: str,
    fps: int,
    every: int,
) -> None:
    """Write an animated GIF: `draw` draws on the upper axes, and returns what changes them to an evaluation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    figure = new_figure(5.4, 6.2, title, fontsize=11)
    figure.set_dpi(80)
    canvas: Any = FigureCanvasAgg(figure)
    picture, curve = figure.subplots(2, 1, height_ratios=(5, 1))
    update = draw(picture)
    x, y = list(range(1, len(residuals) + 1)), [max(float(r), 1e-12) for r in residuals]
    curve.axhline(tolerance, color="0.5", lw=1, ls=(0, (2, 2)))
    curve.plot(x, y, color="0.85", lw=1.5)
    (line,) = curve.plot([], [], color=COLORS[0], lw=1.8)
    (dot,) = curve.plot([], [], "o", color=COLORS[0], ms=5)
    curve.set_yscale("log")
    curve.set_xlim(0, len(residuals) + 1)
    finish(curve, "evaluations of the block", "residual", grid=0)
    curve.set_title(" ", fontsize=9)
    # The places of all parts are found once, and not for every frame.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    last, images = len(residuals) - 1, []
    for index in (*range(0, last, every), last):
        update(index)
        line.set_data(x[: index + 1], y[: index + 1])
        dot.set_data(x[index : index + 1], y[index : index + 1])
        words, color = (", settled", COLORS[2]) if y[index] <= tolerance else ("", "0.2")
        curve.set_title(f"evaluation {x[index]}, residual {y[index]:.1e}{words}", fontsize=9, color=color)
        canvas.draw()
        images.append(Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB"))
    durations = [*[1000 // fps] * (len(images) - 1), 2000]
    images[0].save(path, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0)


def shaded(levels: Tensor) -> Any:
    """Return (H, W, 3) in [0, 1] for numbers (H, W) in [0, 1]; NaN is a wall."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    shade = LinearSegmentedColormap.from_list("path", SHADES)
    image = torch.from_numpy(shade(levels.nan_to_num().numpy())[..., :3])
    image[levels.isnan()] = torch.tensor(to_rgb(WALL), dtype=image.dtype)
    return image.numpy()

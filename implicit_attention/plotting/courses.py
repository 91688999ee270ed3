"""Animated pictures of an answer that grows, evaluation by evaluation, beside the residual by which it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from .. import _validate
from .style import COLORS, finish, hide_ticks, new_figure

#: Colours from "not on the path" to "on the path", and those of walls, start and goal.
SHADES = ("#ffffff", "#cfe6f5", "#56B4E9", "#0072B2")
WALL, START, GOAL = "#1b2733", "#009E73", "#D55E00"


def save_course_gif(
    path: Path | str | IO[bytes],
    frames: Sequence[Tensor],
    *,
    residuals: Sequence[float],
    tolerance: float,
    marks: Sequence[tuple[int, int]] = (),
    texts: Sequence[Sequence[Sequence[str]]] | None = None,
    name: str = "",
    beside: Mapping[str, Sequence[Tensor]] | None = None,
    title: str = "Solving a puzzle",
    fps: int = 12,
    every: int = 1,
) -> None:
    """Write an animated GIF of an answer whose places are the squares of a picture, beside the residual.

    Not for mazes as graphs, whose cells have walls between them: use `save_maze_gif`.

    Args:
        path: of the file, or a file that is open for bytes.
        frames: numbers (H, W) in [0, 1] after 1, 2, ... evaluations, drawn as shades; NaN for walls and what is given.
        residuals: relative residual after each evaluation, > 0.
        tolerance: at which the answer counts as settled.
        marks: rows and columns of start and goal.
        texts: for every frame H rows of W words, which are written on the squares; None for none.
        name: above the picture.
        beside: other answers to the same puzzle, by their names: their frames, drawn to the left. One that has fewer
            frames rests at its last one.
        title: above all of it.
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
    shape = frames[0].shape
    _validate.require(len(shape) == 2, "frames[0]", "have the shape (H, W)", f"shape {tuple(shape)}")
    others = {} if beside is None else beside
    for part, several in (("frames", frames), *((f"beside[{key!r}]", several) for key, several in others.items())):
        _validate.require(len(several) > 0, part, "hold at least one frame", "none")
        for index, frame in enumerate(several):
            required, received = f"have the shape {tuple(shape)}", f"shape {tuple(frame.shape)}"
            _validate.require(frame.shape == shape, f"{part}[{index}]", required, received)
    height, width = shape
    courses = [(key, list(map(_on_cpu, several)), None) for key, several in others.items()]
    own = (name, list(map(_on_cpu, frames)), texts)

    def draw_one(
        axes: Any, heading: str, frames: list[Tensor], texts: Sequence[Sequence[Sequence[str]]] | None
    ) -> Callable[[int], None]:
        image = axes.imshow(shaded(frames[0]), interpolation="nearest")
        axes.set_title(heading, fontsize=10)
        hide_ticks(axes)
        axes.spines[:].set_visible(False)
        points = 230 / max(height, width)
        for (row, column), color in zip(marks, (START, GOAL), strict=False):
            axes.plot(column, row, "o", color=color, ms=0.85 * points, mec="white", mew=0.6)
        places = [(row, column) for row in range(height) for column in range(width)] if texts is not None else []
        size = min(0.5 * points, 24)
        words = [axes.text(c, r, "", ha="center", va="center_baseline", fontsize=size) for r, c in places]

        def update(index: int) -> None:
            index = min(index, len(frames) - 1)
            image.set_data(shaded(frames[index]))
            for word, (row, column) in zip(words, places, strict=True):
                value = float(frames[index][row, column])
                assert texts is not None
                word.set_text(texts[index][row][column])
                word.set_color("white" if value != value or value > 0.5 else WALL)

        return update

    def draw(*axes: Any) -> Callable[[int], None]:
        updates = [draw_one(each, *course) for each, course in zip(axes, (*courses, own), strict=True)]

        def update(index: int) -> None:
            for change in updates:
                change(index)

        return update

    animate(path, draw, residuals, 1 + len(courses), tolerance=tolerance, title=title, fps=fps, every=every)


def _on_cpu(frame: Tensor) -> Tensor:
    return frame.detach().float().cpu()


def check_frames(frames: Sequence[Tensor], residuals: Sequence[float]) -> None:
    """Raise unless there are frames, and as many residuals."""
    _validate.require(len(frames) > 0, "frames", "hold at least one frame", "none")
    required = f"hold {len(frames)} numbers, one for each frame"
    _validate.require(len(residuals) == len(frames), "residuals", required, len(residuals))


def animate(
    path: Path | str | IO[bytes],
    draw: Callable[..., Callable[[int], None]],
    residuals: Sequence[float],
    pictures: int = 1,
    *,
    tolerance: float,
    title: str,
    fps: int,
    every: int,
) -> None:
    """Write an animated GIF: `draw` draws on the upper axes, so many `pictures`, and returns what changes them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    figure = new_figure(5.4 if pictures == 1 else 4.4 * pictures, 6.2, title, fontsize=11)
    figure.set_dpi(80)
    canvas: Any = FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, pictures, height_ratios=(5, 1))
    upper = [figure.add_subplot(grid[0, column]) for column in range(pictures)]
    update = draw(*upper)
    curve: Any = figure.add_subplot(grid[1, :])
    x, y = list(range(1, len(residuals) + 1)), [max(float(r), 1e-12) for r in residuals]
    curve.axhline(tolerance, color="0.5", lw=1, ls=(0, (2, 2)))
    curve.plot(x, y, color="0.85", lw=1.5)
    (line,) = curve.plot([], [], color=COLORS[0], lw=1.8)
    (dot,) = curve.plot([], [], "o", color=COLORS[0], ms=5)
    curve.set_yscale("log")
    curve.set_xlim(0, len(residuals) + 1)
    finish(curve, "evaluations of the block", "residual", grid=0)
    curve.set_title(" ", fontsize=9)
    # The places of all parts are found once, and what never changes is drawn once.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    canvas.draw()
    ground = canvas.copy_from_bbox(figure.bbox)
    last, images = len(residuals) - 1, []
    for index in (*range(0, last, every), last):
        update(index)
        line.set_data(x[: index + 1], y[: index + 1])
        dot.set_data(x[index : index + 1], y[index : index + 1])
        words, color = (", settled", COLORS[2]) if y[index] <= tolerance else ("", "0.2")
        curve.set_title(f"evaluation {x[index]}, residual {y[index]:.1e}{words}", fontsize=9, color=color)
        canvas.restore_region(ground)
        for axes in upper:
            for artist in (*axes.images, *axes.lines, *axes.texts):
                axes.draw_artist(artist)
        for artist in (line, dot, curve.title):
            curve.draw_artist(artist)
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

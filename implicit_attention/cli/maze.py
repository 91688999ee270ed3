"""`implicit-attention maze`: a maze that is solved, evaluation by evaluation, until the answer has settled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from torch import Tensor

from .errors import InputError
from .maze_model import RTOL, TRAIN_GENERATOR, TRAIN_SIZE, MazeModel, SolvedMaze, train
from .mazes import Mazes, mazes
from .progress import Progress, make_console
from .settings import MazeSettings

SMALLEST, LARGEST = 3, 40
#: Colours of the view: from "not on the path" to "on the path", and three marks.
OFF, ON, WALL, START, GOAL = (238, 240, 242), (0, 114, 178), (27, 39, 51), (0, 158, 115), (213, 94, 0)
#: Lines that the view needs beside the maze; updates between two that plain text tells of; most frames of a GIF.
BESIDE, EVERY, FRAMES = 5, 100, 150

Colour = tuple[int, int, int]


def check(settings: MazeSettings) -> list[int]:
    """The sizes that are asked for; raise `InputError` for the first option that cannot be used."""
    sizes = []
    for word in settings.size.split(","):
        if not word.strip().isdecimal() or not SMALLEST <= int(word) <= LARGEST:
            required = f"be whole numbers from {SMALLEST} to {LARGEST} with commas between them"
            raise InputError(f"`--size` must {required}, got {settings.size!r}; try --size 9,17")
        sizes.append(int(word))
    if settings.gif is not None and settings.gif.suffix.lower() != ".gif":
        raise InputError(f"`--gif` must end in .gif, got {settings.gif.name!r}; try --gif maze.gif")
    if settings.gif is not None and not settings.gif.absolute().parent.is_dir():
        folder = str(settings.gif.parent)
        raise InputError(f"`--gif` must lie in a folder that exists, got {folder!r}; make it, or choose another")
    return sizes


def run(settings: MazeSettings) -> None:
    """Train, then show one maze of every size."""
    sizes = check(settings)
    console = make_console()
    before = torch.get_num_threads()
    # At these sizes threads wait for each other longer than they work.
    torch.set_num_threads(1)
    try:
        model = trained(settings)
        for size in sizes:
            maze = mazes(settings.generator, size, 1, f"to watch, {settings.seed}")
            found = model.solved(maze)
            show(console, maze, found, settings, size)
            if settings.gif is not None:
                name = f"{settings.gif.stem}-{size}.gif" if len(sizes) > 1 else settings.gif.name
                write_gif(settings.gif.with_name(name), maze, found, settings, size)
                console.print(f"{name} written", markup=False)
    finally:
        torch.set_num_threads(before)


def trained(settings: MazeSettings) -> MazeModel:
    """The model, trained with a line of progress; always the same one, whatever `--seed`."""
    with torch.random.fork_rng(devices=[]), Progress(lambda row: row["line"]) as progress:
        torch.manual_seed(0)
        model = MazeModel()
        count = sum(p.numel() for p in model.parameters())
        name = f"training {count} parameters on {TRAIN_SIZE} x {TRAIN_SIZE} mazes"
        progress.begin(name, 0, settings.updates)

        def told(update: int, loss: float) -> None:
            progress.begin(f"{name}, loss {loss:.3f}", update, settings.updates)
            if (update % EVERY == 0 and not progress.console.is_terminal) or update == settings.updates:
                progress.end(name, {"line": f"update {update} of {settings.updates}, loss {loss:.3f}"})

        train(model, settings.updates, told)
    return model


def show(console: Console, maze: Mazes, found: SolvedMaze, settings: MazeSettings, size: int) -> None:
    """The maze while it is solved, where there is a terminal that holds it; else as text."""
    learnt = f"trained on {TRAIN_GENERATOR} ones of {TRAIN_SIZE} x {TRAIN_SIZE}"
    title = f"{settings.generator} maze of {size} x {size} ({learnt})"
    if not console.is_terminal:
        console.print(title, markup=False)
        for line in (*progress_lines(maze, found), *drawn(maze, found.paths[-1])):
            console.print(line, markup=False)
    elif (columns := 2 * size + 1) > console.width or size + 1 + BESIDE > console.height:
        needed = f"{columns} columns and {size + 1 + BESIDE} lines, this one has {console.width} and {console.height}"
        console.print(f"{title}: to watch it a terminal needs {needed}; enlarge it, or choose a smaller --size")
        for line in progress_lines(maze, found):
            console.print(line, markup=False)
    else:
        with Live(console=console, auto_refresh=False) as live:
            for index, path in enumerate(found.paths):
                live.update(Group(Text(title), view(maze, path), Text(state_line(maze, found, index))), refresh=True)
                time.sleep(1 / settings.speed)
    console.print(verdict(maze, found), style="bold", markup=False)
    console.print()


def state_line(maze: Mazes, found: SolvedMaze, index: int) -> str:
    """Return the line that is printed after an evaluation."""
    wrong = wrong_cells(maze, found.paths[index])
    residual = f"residual {found.residuals[index]:.1e}"
    return f"evaluation {index + 1:>3}, {residual}, {wrong} of {maze.cells} cells wrong"


def progress_lines(maze: Mazes, found: SolvedMaze) -> Iterator[str]:
    """After 1, 2, 4, ... evaluations and the last one."""
    last, shown = len(found.paths) - 1, 1
    while shown - 1 < last:
        yield state_line(maze, found, shown - 1)
        shown *= 2
    yield state_line(maze, found, last)


def wrong_cells(maze: Mazes, path: Tensor) -> int:
    """Count the cells that are wrongly on or off the path."""
    return int(((path > 0.5) != (maze.targets[0, : maze.cells] == 1)).sum())


def verdict(maze: Mazes, found: SolvedMaze) -> str:
    """Return the outcome: settled or not, right or not."""
    solution = found.solution
    wrong, length = wrong_cells(maze, found.paths[-1]), int((maze.targets == 1).sum())
    name = "settled" if bool(solution.converged) else "not settled"
    answer = f"the whole path of {length} cells is right" if wrong == 0 else f"{wrong} cells are wrong"
    what = f"relative residual {found.residuals[-1]:.1e}, tolerance {RTOL:g}"
    return f"{name} after {int(solution.num_evals)} evaluations ({what}): {answer}"


# ------------------------------------------------------------------ drawing


def raster(maze: Mazes, path: Tensor) -> list[list[float]]:
    """A maze as pixels, (2 size + 1)^2: cells and open ways have a number in [0, 1], walls -1, start -2, goal -3."""
    size = round(maze.cells**0.5)
    pixels = [[-1.0] * (2 * size + 1) for _ in range(2 * size + 1)]
    values = path.clamp(0, 1).tolist()
    for cell, (_, down, _, right) in enumerate(maze.ways[0].tolist()):
        row, column = divmod(cell, size)
        pixels[2 * row + 1][2 * column + 1] = values[cell]
        # An open way is as dark as the fainter of its two cells.
        if down:
            pixels[2 * row + 2][2 * column + 1] = min(values[cell], values[cell + size])
        if right:
            pixels[2 * row + 1][2 * column + 2] = min(values[cell], values[cell + 1])
    pixels[1][1], pixels[-2][-2] = -2.0, -3.0
    return pixels


def view(maze: Mazes, path: Tensor) -> Text:
    """The maze in colours: every character is two pixels, one above the other."""
    pixels = raster(maze, path)
    text = Text(no_wrap=True)
    for upper, lower in zip(pixels[::2], [*pixels[1::2], None], strict=True):
        for index, value in enumerate(upper):
            style = f"rgb({_rgb(value)})"
            text.append("▀", f"{style} on rgb({_rgb(lower[index])})" if lower else style)
        text.append("\n")
    text.right_crop(1)
    return text


def _rgb(value: float) -> str:
    marks: dict[float, Colour] = {-1.0: WALL, -2.0: START, -3.0: GOAL}
    mixed = (round(off + (on - off) * max(value, 0.0)) for off, on in zip(OFF, ON, strict=True))
    return ",".join(map(str, marks.get(value, tuple(mixed))))


def drawn(maze: Mazes, path: Tensor) -> list[str]:
    """The maze in plain characters: walls #, the path that was found with dots, start S, goal G."""

    def character(value: float) -> str:
        return {-1.0: "#", -2.0: "S", -3.0: "G"}.get(value, "." if value > 0.5 else " ")

    return ["".join(map(character, row)) for row in raster(maze, path)]


def write_gif(file: Path, maze: Mazes, found: SolvedMaze, settings: MazeSettings, size: int) -> None:
    """The same as an animated GIF."""
    from ..plotting import save_maze_gif

    try:
        save_maze_gif(
            file,
            found.paths,
            maze.ways[0],
            start=0,
            goal=maze.cells - 1,
            residuals=found.residuals,
            tolerance=RTOL,
            every=-(-len(found.paths) // FRAMES),
            title=f"A {size} x {size} maze, solved by a block trained on {TRAIN_SIZE} x {TRAIN_SIZE}",
        )
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(f"`--gif` must be a writable file, got {file.name!r} ({reason}); choose another") from None

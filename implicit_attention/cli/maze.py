"""`implicit-attention maze`: a maze that is solved, evaluation by evaluation, until the answer has settled."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from rich.text import Text
from torch import Tensor
from typer import Option

from ..studies.errors import InputError
from ..studies.mazes import Mazes, mazes
from ..studies.measure import one_thread
from .command import Command, Console, Progress, seed_option

if TYPE_CHECKING:
    from ..studies.maze_model import MazeModel, SolvedMaze

SMALLEST, LARGEST = 3, 40
#: Colours of the view: from "not on the path" to "on the path", and those of walls, start and goal.
OFF, ON, WALL, START, GOAL = (238, 240, 242), (0, 114, 178), (27, 39, 51), (0, 158, 115), (213, 94, 0)
#: Lines that the view needs beside the maze, and the most frames of a GIF.
BESIDE, FRAMES = 5, 150

Colour = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Maze(Command):
    """Watch a maze while it is solved: a block, trained on 5 x 5 ones for a minute, is repeated until it settles.

    The block is repeated as often as the maze needs, and its residual says when the answer has settled. Where there
    is no terminal, the solve is described in plain text.
    """

    name: ClassVar[str] = "maze"

    size: Annotated[
        str, Option(help="Cells along a side, 3 to 40; several, such as 9,17,25, are shown one after the other.")
    ] = "17"
    generator: Annotated[
        Literal["depth-first", "Prim", "Wilson"],
        Option(help="How mazes to solve are made; those to learn from are depth-first."),
    ] = "depth-first"
    seed: Annotated[int, seed_option("the maze")] = 0
    gif: Annotated[Path | None, Option(help="Write an animated GIF to this file, too.", show_default=False)] = None
    speed: Annotated[float, Option(min=0.1, max=1000, help="Evaluations shown in a second.")] = 10.0
    quick: Annotated[bool, Option("--quick", help="Hardly train: a look at the command, with a wrong answer.")] = False

    @property
    def modules(self) -> tuple[str, ...]:
        return () if self.gif is None else ("matplotlib",)

    @property
    def updates(self) -> int:
        return 10 if self.quick else 600

    @property
    def sizes(self) -> list[int]:
        """Return the sizes of the mazes to solve."""
        words = self.size.split(",")
        if not all(word.strip().isdecimal() and SMALLEST <= int(word) <= LARGEST for word in words):
            required = f"be whole numbers from {SMALLEST} to {LARGEST} with commas between them"
            raise InputError(f"`--size` must {required}, got {self.size!r}; try --size 9,17")
        return [int(word) for word in words]

    def check(self) -> None:
        _ = self.sizes
        if self.gif is not None and self.gif.suffix.lower() != ".gif":
            raise InputError(f"`--gif` must end in .gif, got {self.gif.name!r}; try --gif maze.gif")
        if self.gif is not None and not self.gif.absolute().parent.is_dir():
            folder = str(self.gif.parent)
            raise InputError(f"`--gif` must lie in a folder that exists, got {folder!r}; make it, or choose another")

    def run(self, progress: Progress) -> MazeModel:
        from ..studies.maze_model import trained

        # At these sizes threads wait for each other longer than they work.
        with one_thread():
            return trained(self.updates, progress)

    def show(self, model: MazeModel, console: Console) -> None:
        """Solve one maze of every size, and show it."""
        with one_thread():
            for size in self.sizes:
                maze = mazes(self.generator, size, 1, f"to watch, {self.seed}")
                solved = model.solved(maze)
                show(console, maze, solved, self, size)
                if self.gif is not None:
                    name = f"{self.gif.stem}-{size}.gif" if len(self.sizes) > 1 else self.gif.name
                    write_gif(self.gif.with_name(name), maze, solved, size)
                    console.print(f"{name} written", markup=False)


def show(console: Console, maze: Mazes, solved: SolvedMaze, settings: Maze, size: int) -> None:
    """Show the maze while it is solved on a terminal that is large enough, and elsewhere as text."""
    from rich.console import Group
    from rich.live import Live

    from ..studies.maze_model import TRAIN_GENERATOR, TRAIN_SIZE

    learnt = f"trained on {TRAIN_GENERATOR} ones of {TRAIN_SIZE} x {TRAIN_SIZE}"
    title = f"{settings.generator} maze of {size} x {size} ({learnt})"
    if not console.is_terminal:
        console.print(title, markup=False)
        for line in (*progress_lines(maze, solved), *drawn(maze, solved.paths[-1])):
            console.print(line, markup=False)
    elif (columns := 2 * size + 1) > console.width or size + 1 + BESIDE > console.height:
        needed = f"{columns} columns and {size + 1 + BESIDE} lines, this one has {console.width} and {console.height}"
        console.print(f"{title}: to watch it a terminal needs {needed}; enlarge it, or choose a smaller --size")
        for line in progress_lines(maze, solved):
            console.print(line, markup=False)
    else:
        with Live(console=console, auto_refresh=False) as live:
            for index, path in enumerate(solved.paths):
                live.update(Group(Text(title), view(maze, path), Text(state_line(maze, solved, index))), refresh=True)
                time.sleep(1 / settings.speed)
    console.print(verdict(maze, solved), style="bold", markup=False)
    console.print()


def state_line(maze: Mazes, solved: SolvedMaze, index: int) -> str:
    """Return the line that is printed after an evaluation."""
    wrong = wrong_cells(maze, solved.paths[index])
    residual = f"residual {solved.residuals[index]:.1e}"
    return f"evaluation {index + 1:>3}, {residual}, {wrong} of {maze.cells} cells wrong"


def progress_lines(maze: Mazes, solved: SolvedMaze) -> Iterator[str]:
    """Describe the states after 1, 2, 4, ... evaluations and the last one."""
    last = len(solved.paths) - 1
    for index in (*(2**power - 1 for power in range(last.bit_length())), last):
        yield state_line(maze, solved, index)


def wrong_cells(maze: Mazes, path: Tensor) -> int:
    """Count the cells that are wrongly on or off the path."""
    return int(((path > 0.5) != (maze.targets[0, : maze.cells] == 1)).sum())


def verdict(maze: Mazes, solved: SolvedMaze) -> str:
    """Return the outcome: settled or not, right or not."""
    from ..studies.maze_model import RTOL

    solution = solved.solution
    wrong, length = wrong_cells(maze, solved.paths[-1]), int((maze.targets == 1).sum())
    name = "settled" if bool(solution.converged) else "not settled"
    answer = f"the whole path of {length} cells is right" if wrong == 0 else f"{wrong} cells are wrong"
    what = f"relative residual {solved.residuals[-1]:.1e}, tolerance {RTOL:g}"
    return f"{name} after {int(solution.num_evals)} evaluations ({what}): {answer}"


# ------------------------------------------------------------------ drawing


def raster(maze: Mazes, path: Tensor) -> list[list[float]]:
    """Return (2 size + 1)^2 pixels: cells and open ways have a number in [0, 1], walls -1, start -2, goal -3."""
    from ..plotting.mazes import maze_levels

    pixels = maze_levels(path, maze.ways[0]).nan_to_num(-1.0)
    pixels[1, 1], pixels[-2, -2] = -2.0, -3.0
    rows: list[list[float]] = pixels.tolist()
    return rows


def view(maze: Mazes, path: Tensor) -> Text:
    """Return the maze in colours: every character is two pixels, one above the other."""
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
    """Return the maze in plain characters: walls #, the path of the model with dots, start S, goal G."""

    def character(value: float) -> str:
        return {-1.0: "#", -2.0: "S", -3.0: "G"}.get(value, "." if value > 0.5 else " ")

    return ["".join(map(character, row)) for row in raster(maze, path)]


def write_gif(file: Path, maze: Mazes, solved: SolvedMaze, size: int) -> None:
    """Write the course of a solve as an animated GIF."""
    from ..plotting import save_maze_gif
    from ..studies.maze_model import RTOL, TRAIN_SIZE

    try:
        save_maze_gif(
            file,
            solved.paths,
            maze.ways[0],
            start=0,
            goal=maze.cells - 1,
            residuals=solved.residuals,
            tolerance=RTOL,
            every=-(-len(solved.paths) // FRAMES),
            title=f"A {size} x {size} maze, solved by a block trained on {TRAIN_SIZE} x {TRAIN_SIZE}",
        )
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(f"`--gif` must be a writable file, got {file.name!r} ({reason}); choose another") from None

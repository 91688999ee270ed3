"""`implicit-attention maze`: a maze that is solved, evaluation by evaluation, until the answer has settled."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from typer import Option

from ..studies.errors import InputError
from .command import Command, Console, Progress, seed_option
from .errors import writable
from .watching import (
    FRAMES,
    GOAL_LEVEL,
    START_LEVEL,
    WALL_LEVEL,
    Watched,
    check_file,
    pixels,
    show,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..studies.maze_model import MazeModel, SolvedMaze
    from ..studies.mazes import Mazes

SMALLEST, LARGEST = 3, 40


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
        check_file("--gif", self.gif, ".gif")

    def run(self, progress: Progress) -> MazeModel:
        from ..studies.maze_model import trained
        from ..studies.measure import one_thread

        # At these sizes threads wait for each other longer than they work.
        with one_thread():
            return trained(self.updates, progress)

    def show(self, model: MazeModel, console: Console) -> None:
        """Solve one maze of every size, and show it."""
        from ..studies.mazes import mazes
        from ..studies.measure import one_thread

        with one_thread():
            for size in self.sizes:
                maze = mazes(self.generator, size, 1, f"to watch, {self.seed}")
                solved = model.solved(maze)
                show(console, watched(maze, solved, self, size), self.speed)
                if self.gif is not None:
                    name = f"{self.gif.stem}-{size}.gif" if len(self.sizes) > 1 else self.gif.name
                    write_gif(self.gif.with_name(name), maze, solved, size)
                    console.print(f"{name} written", markup=False)


def watched(maze: Mazes, solved: SolvedMaze, settings: Maze, size: int) -> Watched:
    """Return what is shown of a solve."""
    from ..studies.maze_model import TRAIN_GENERATOR, TRAIN_SIZE

    learnt = f"trained on {TRAIN_GENERATOR} ones of {TRAIN_SIZE} x {TRAIN_SIZE}"

    def line(index: int) -> str:
        wrong = wrong_cells(maze, solved.paths[index])
        residual = f"residual {solved.residuals[index]:.1e}"
        return f"evaluation {index + 1:>3}, {residual}, {wrong} of {maze.cells} cells wrong"

    return Watched(
        title=f"{settings.generator} maze of {size} x {size} ({learnt})",
        evaluations=len(solved.paths),
        line=line,
        view=lambda index: pixels(raster(maze, solved.paths[index])),
        drawn=drawn(maze, solved.paths[-1]),
        verdict=verdict(maze, solved),
        size=(2 * size + 1, size + 1),
    )


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

    levels = maze_levels(path, maze.ways[0]).nan_to_num(WALL_LEVEL)
    levels[1, 1], levels[-2, -2] = START_LEVEL, GOAL_LEVEL
    rows: list[list[float]] = levels.tolist()
    return rows


def drawn(maze: Mazes, path: Tensor) -> list[str]:
    """Return the maze in plain characters: walls #, the path of the model with dots, start S, goal G."""

    def character(value: float) -> str:
        return {WALL_LEVEL: "#", START_LEVEL: "S", GOAL_LEVEL: "G"}.get(value, "." if value > 0.5 else " ")

    return ["".join(map(character, row)) for row in raster(maze, path)]


def write_gif(file: Path, maze: Mazes, solved: SolvedMaze, size: int) -> None:
    """Write the course of a solve as an animated GIF."""
    from ..plotting import save_maze_gif
    from ..studies.maze_model import RTOL, TRAIN_SIZE

    with writable("--gif", file):
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

"""`implicit-attention demo`: what the library does, in under a minute, as a page."""

from __future__ import annotations

import dataclasses
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typer import Option

from .command import Command, Console, Files, Progress, seed_option

if TYPE_CHECKING:
    from ..studies.demo.experiment import Experiment
    from ..studies.demo.maze import Shown

PAGE, CONTENT = "index.html", "demo.json"
#: Evaluations shown in a second.
SPEED = 20.0


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """The result of `demo`: its parts, the maze that the terminal shows, and the seconds that all of it took."""

    parts: list[Experiment]
    shown: Shown
    seconds: float


@dataclasses.dataclass(frozen=True)
class Demo(Command):
    """See in a minute what the library does: three experiments, computed now, and a page that shows them.

    A block that is repeated until its answer settles, on mazes and bit strings larger than those of its training,
    beside the loop that was trained. Solvers and their exact gradients, beside unrolled descent, on digits.
    Magnetizations of a small magnet against temperature, beside the sum over all of its states.

    The page is index.html in the folder `--out`; it opens without a network. The weights of the blocks are shipped, and
    --train makes them anew, in minutes.
    """

    name: ClassVar[str] = "demo"

    out: Annotated[Path, Option(help="Folder for index.html, demo.json and the pictures.")] = Path("demo")
    seed: Annotated[int, seed_option("the maze that is shown")] = 0
    train: Annotated[bool, Option("--train", help="Train the weights of the blocks anew, for minutes.")] = False

    @property
    def modules(self) -> tuple[str, ...]:
        return ("matplotlib", "PIL", "safetensors", "sklearn")

    def run(self, progress: Progress) -> Demonstration:
        """Compute all parts."""
        from ..studies.demo.magnet import magnet_experiment
        from ..studies.demo.maze import PUZZLE, SIZES, maze_experiment, shown
        from ..studies.measure import one_thread
        from ..studies.thinking.puzzles import PUZZLES
        from ..studies.thinking.weights import shipped, trained

        begin = time.perf_counter()
        # At these sizes threads wait for each other longer than they work.
        with one_thread():
            weights = {
                name: trained(PUZZLES[name], PUZZLES[name].recipe.updates, progress)
                if self.train
                else shipped(PUZZLES[name])
                for name in SIZES
            }
            progress.begin("a maze to watch")
            found = shown(weights[PUZZLE.name], self.seed)
            parts = [
                maze_experiment(weights, found, self.seed, progress),
                self._solvers(progress),
                magnet_experiment(progress),
            ]
        return Demonstration(parts, found, time.perf_counter() - begin)

    def _solvers(self, progress: Progress) -> Experiment:
        """Run a short `compare`."""
        from ..studies.demo.solvers import solvers_experiment
        from . import compare_solvers
        from .compare import Compare

        found = compare_solvers.run(Compare(quick=True), progress)
        _, content, figures = compare_solvers.files(found)
        settings = content["settings"]
        picture = figures["convergence.png"]
        assert not isinstance(picture, bytes)
        return solvers_experiment(found.rows, picture, settings, content["summary"])

    def line(self, row: dict[str, Any]) -> str:
        from . import compare_solvers

        return str(row["line"]) if "line" in row else compare_solvers.line(row)

    def files(self, result: Demonstration) -> Files:
        import torch

        from ..kernels import native_status
        from ..studies.demo.page import page
        from .commands import commands_in_words
        from .landscape import picture

        pictures = {
            part.name: part.picture if isinstance(part.picture, bytes) else picture(part.picture)
            for part in result.parts
        }
        made = (
            f"in {result.seconds:.0f} seconds, by torch {torch.__version__} on a {platform.machine()} CPU, "
            f"{native_status()}"
        )
        others = {f"{part.name}.{part.ending}": pictures[part.name] for part in result.parts}
        text = page(result.parts, pictures, commands_in_words(), made)
        content = {"seed": self.seed, "trained": self.train, "parts": {p.name: p.numbers for p in result.parts}}
        return CONTENT, content, {PAGE: text.encode(), **others}

    def show(self, result: Demonstration, console: Console) -> None:
        """Show the maze where there is a terminal, then the table of every part."""
        from ..studies.demo.maze import PUZZLE
        from . import table, think, watching

        found = result.shown
        if watching.shows_colours(console):
            views = [PUZZLE.view(found.asked.problem, answer) for answer in found.thought.answers]
            watching.show(console, think.watched(PUZZLE, found.asked, found.thought, views), SPEED)
        for part in result.parts:
            console.print(part.title, style="bold", markup=False)
            console.print(part.text, markup=False)
            table.print_tables(console, table.cut_tables(None, part.headers, part.rows, console.width))

    def listed(self, names: list[str]) -> str:
        """Return the name of the page, and the number of the other files."""
        return f"{PAGE}, to open in a browser, and {len(names) - 1} files beside it"

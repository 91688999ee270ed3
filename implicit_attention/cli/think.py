"""`implicit-attention think`: puzzles that a block solves, evaluation by evaluation, until the answer has settled."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from rich.text import Text
from typer import Argument, Option

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
    tiles,
)

if TYPE_CHECKING:
    from ..studies.thinking.puzzle import Asked, Puzzle, Thought, View
    from ..studies.thinking.weights import Weights

#: Updates with --quick.
QUICK_UPDATES = 5
#: Squares of a picture in a GIF that have characters, at most: more take long and are too small to read.
WORDS = 64
#: So many times as many problems has a calibration that is drawn.
MORE = 10


@dataclasses.dataclass(frozen=True)
class Think(Command):
    """Watch a block think: a maze of pixels, parities of a bit string, or a Sudoku, solved until the answer settles.

    The weights are shipped; they were trained on small problems in minutes, and --train makes them anew. The block is
    repeated as often as a problem needs, its residual says when the answer has settled, and an algorithm says whether
    it is right. A table says how often settled answers are, by size. Where there is no terminal, the solve is described
    in plain text.
    """

    name: ClassVar[str] = "think"

    puzzle: Annotated[Literal["maze", "prefix", "sudoku"], Argument(help="The puzzle.")] = "maze"
    size: Annotated[
        int | None,
        Option(
            help="Squares along a side of a maze, bits, or givens of a Sudoku.",
            show_default="17 squares, 128 bits, 4 givens",
        ),
    ] = None
    seed: Annotated[int, seed_option("the problem")] = 0
    file: Annotated[
        Path | None,
        Option(
            help="A problem of one's own: a maze as text (# walls, spaces, S and G) or as a PNG with a pixel for each "
            "square (dark walls, a green start, a red goal); bits; 16 digits, 0 or . for empty cells.",
            show_default=False,
        ),
    ] = None
    start: Annotated[str | None, Option(help="ROW,COLUMN of the start in --file, from 0.", show_default=False)] = None
    goal: Annotated[str | None, Option(help="ROW,COLUMN of the goal in --file, from 0.", show_default=False)] = None
    gif: Annotated[Path | None, Option(help="Write an animated GIF to this file, too.", show_default=False)] = None
    speed: Annotated[float, Option(min=0.1, max=1000, help="Evaluations shown in a second.")] = 10.0
    calibration: Annotated[
        Path | None, Option(help="Draw risk against coverage, by size, into this PNG file.", show_default=False)
    ] = None
    train: Annotated[bool, Option("--train", help="Train the weights anew, on one core, for minutes.")] = False
    quick: Annotated[bool, Option("--quick", help="With --train: hardly train, with a wrong answer.")] = False
    weights: Annotated[
        Path | None, Option("--out", help="With --train: write the weights to this file.", show_default=False)
    ] = None

    @property
    def modules(self) -> tuple[str, ...]:
        drawn = self.gif is not None or self.calibration is not None
        images = self.file is not None and self.file.suffix.lower() == ".png"
        return ("safetensors", *["matplotlib"] * drawn, *["PIL"] * images)

    @property
    def chosen(self) -> Puzzle:
        from ..studies.thinking.puzzles import PUZZLES

        return PUZZLES[self.puzzle]

    def check(self) -> None:
        puzzle = self.chosen
        if self.size is not None and self.file is not None:
            raise InputError("`--size` must be left out beside --file, got both; give one of them")
        if self.size is not None and not puzzle.fits(self.size):
            raise InputError(f"`--size` must be {puzzle.usage}, got {self.size}; try --size {puzzle.size}")
        for option, value in (("--start", self.start), ("--goal", self.goal)):
            if value is not None and (self.file is None or self.puzzle != "maze"):
                raise InputError(f"`{option}` must stand beside --file with a maze, got {value!r} alone; leave it out")
        for option, given in (("--quick", self.quick), ("--out", self.weights is not None)):
            if given and not self.train:
                raise InputError(f"`{option}` must stand beside --train, got it alone; add --train, or leave it out")
        check_file("--gif", self.gif, ".gif")
        check_file("--calibration", self.calibration, ".png")
        check_file("--out", self.weights, ".safetensors")
        _ = self.asked

    @property
    def asked(self) -> Asked:
        """Return the problem to watch."""
        puzzle = self.chosen
        if self.file is None:
            return puzzle.watched(puzzle.size if self.size is None else self.size, self.seed)
        named = (("start", self.start), ("goal", self.goal))
        return puzzle.read(self.file, **{name: _square(f"--{name}", text) for name, text in named if text is not None})

    def run(self, progress: Progress) -> Weights:
        from ..studies.measure import one_thread
        from ..studies.thinking.weights import shipped, trained, write

        puzzle = self.chosen
        if not self.train:
            return shipped(puzzle)
        updates = QUICK_UPDATES if self.quick else puzzle.recipe.updates
        # At these sizes threads wait for each other longer than they work.
        with one_thread():
            found = trained(puzzle, updates, progress)
        if self.weights is not None:
            with writable("--out", self.weights):
                sha256 = write(self.weights, puzzle, found.model, updates)
            progress.end(self.weights.name, {"line": f"written, sha256 {sha256}"})
        return found

    def show(self, weights: Weights, console: Console) -> None:
        """Solve the problem and show it, then the table."""
        from ..studies.measure import one_thread
        from ..training import calibration_table

        puzzle, asked = self.chosen, self.asked
        with one_thread():
            thought = weights.model.solved(asked.problem.inputs)
            views = [puzzle.view(asked.problem, answer) for answer in thought.answers]
            for note in asked.notes:
                console.print(f"note: {note}", markup=False)
            show(console, watched(puzzle, asked, thought, views), self.speed)
            if self.gif is not None:
                self.write_gif(self.gif, thought, views)
                console.print(f"{self.gif.name} written", markup=False)
            found = puzzle.calibrated(weights.model, 1 if self.calibration is None else MORE)
        tables = [calibration_table(found)]
        if max(map(len, tables[0].splitlines())) > console.width:
            tables = [calibration_table({name: row}) for name, row in found.items()]
        for line in (*weights.told, "how often answers are right, in % (interval of 95 %):", *tables):
            console.print(line, markup=False, soft_wrap=True)
        if self.calibration is not None:
            from ..plotting import risk_figure

            title = f"Risk against coverage: {puzzle.kind}, trained on {puzzle.learnt}"
            figure = risk_figure({name: row.risk() for name, row in found.items()}, title=title)
            with writable("--calibration", self.calibration):
                figure.savefig(self.calibration)
            console.print(f"{self.calibration.name} written", markup=False)

    def write_gif(self, file: Path, thought: Thought, views: list[View]) -> None:
        """Write the course of a solve as an animated GIF."""
        from ..plotting import save_course_gif
        from ..studies.thinking.puzzle import RTOL

        words = [view.cells for view in views] if views[0].levels.numel() <= WORDS else None
        with writable("--gif", file):
            save_course_gif(
                file,
                [view.levels for view in views],
                residuals=thought.course.residuals,
                tolerance=RTOL,
                marks=views[0].marks,
                texts=words,
                every=-(-len(views) // FRAMES),
                title=f"{self.chosen.kind}, solved by a block trained on {self.chosen.learnt}",
            )


def watched(puzzle: Puzzle, asked: Asked, thought: Thought, views: list[View]) -> Watched:
    """Return what is shown of a solve."""
    places = asked.problem.target.numel()

    def line(index: int) -> str:
        wrong = puzzle.wrong(asked.problem, thought.classes(index))
        residual = f"residual {thought.course.residuals[index]:.1e}"
        return f"evaluation {index + 1:>3}, {residual}, {wrong} of {places} {puzzle.places} wrong"

    last = views[-1]
    columns, lines = sum(map(len, last.cells[0])), len(last.cells)
    return Watched(
        title=f"{puzzle.kind}, {asked.title} (trained on {puzzle.learnt})",
        evaluations=len(views),
        line=line,
        view=lambda index: picture(views[index], halved=not puzzle.lettered),
        drawn=["".join(row) for row in last.cells],
        verdict=verdict(puzzle, asked, thought),
        size=(columns, lines if puzzle.lettered else -(-lines // 2)),
    )


def picture(view: View, *, halved: bool) -> Text:
    """Return an answer in colours: with its characters, or two squares for each character."""
    levels = view.levels.nan_to_num(WALL_LEVEL)
    for (row, column), level in zip(view.marks, (START_LEVEL, GOAL_LEVEL), strict=False):
        levels[row, column] = level
    return pixels(levels.tolist()) if halved else tiles(levels.tolist(), view.cells)


def verdict(puzzle: Puzzle, asked: Asked, thought: Thought) -> str:
    """Return the outcome: settled or not, right or not."""
    from ..solution import Status
    from ..studies.thinking.puzzle import RTOL

    course = thought.course
    wrong, places = puzzle.wrong(asked.problem, thought.classes()), asked.problem.target.numel()
    name, status = "settled" if course.settled else "not settled", Status(int(course.solution.status)).name
    answer = f"all {places} {puzzle.places} are right" if wrong == 0 else f"{wrong} of {places} {puzzle.places} wrong"
    what = f"{status}, relative residual {course.residuals[-1]:.1e}, tolerance {RTOL:g}"
    return f"{name} after {len(course.residuals)} evaluations ({what}): {answer}\nchecked by {puzzle.judge}"


def _square(option: str, text: str) -> tuple[int, int]:
    words = text.split(",")
    if len(words) != 2 or not all(word.strip().isdecimal() and len(word) < 10 for word in words):
        raise InputError(f"`{option}` must be two whole numbers with a comma between them, got {text!r}; try 0,0")
    return int(words[0]), int(words[1])

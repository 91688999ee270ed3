"""A block that repeats until its answer settles, beside the loop of so many steps as its training had."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...plotting import save_course_gif
from ..progress import Listener
from ..thinking.pixels import LEARNT
from ..thinking.puzzle import RTOL, Asked, Problems, Puzzle, Thought
from ..thinking.puzzles import PUZZLES
from ..thinking.weights import Weights
from .experiment import Experiment

PUZZLE = PUZZLES["maze"]
#: Squares along a side of the maze that is shown.
SIZE = 25
#: The sizes of the table, by puzzle: the first is that of the training. Of each so many problems are solved.
SIZES, COUNT = {"maze": (9, 17, SIZE), "prefix": (32, 128, 512)}, 25
#: The seed of the problems of the table.
SEED = 2**61
#: Frames of the picture, at most, and in a second.
FRAMES, SPEED = 40, 8

CODE = """\
from implicit_attention.studies.thinking.puzzles import PUZZLES
from implicit_attention.studies.thinking.weights import shipped
maze = PUZZLES["maze"].watched({size}, seed={seed}).problem
thought = shipped(PUZZLES["maze"]).model.solved(maze.inputs)  # repeats z = block(z, maze)
print(thought.course.solution, PUZZLES["maze"].wrong(maze, thought.classes()), "squares are wrong")
"""


class Shown(NamedTuple):
    """The maze of the picture: solved, and by the loop."""

    asked: Asked
    thought: Thought
    loop: list[Tensor]
    wrong: int
    wrong_loop: int


def shown(weights: Weights, seed: int) -> Shown:
    """Solve a maze, and keep the answers on the way."""
    asked = PUZZLE.watched(SIZE, seed)
    thought = weights.model.solved(asked.problem.inputs)
    # The loop's answers are the first ones of the solve, as Picard's steps are plain.
    loop = thought.answers[: PUZZLE.recipe.steps[-1]]
    wrong = [PUZZLE.wrong(asked.problem, answers[-1].argmax(-1)) for answers in (thought.answers, loop)]
    return Shown(asked, thought, loop, *wrong)


def maze_experiment(weights: Mapping[str, Weights], found: Shown, seed: int, progress: Listener) -> Experiment:
    """Solve problems of several sizes in both ways, and draw one maze; the weights are by puzzle."""
    rows: list[dict[str, Any]] = []
    for name, sizes in SIZES.items():
        for size in sizes:
            title = f"{name}, {PUZZLES[name].sized.format(size)}"
            progress.begin(title, len(rows), sum(map(len, SIZES.values())))
            rows.append({"problem": title} | _row(PUZZLES[name], weights[name], size))
            told = f"{rows[-1]['solved']} of {COUNT} right when solved, {rows[-1]['loop']} by the loop of its training"
            progress.end(title, {"line": told})
    progress.begin("picture of a maze")
    largest, spent, steps = rows[len(SIZES["maze"]) - 1], len(found.thought.answers), len(found.loop)
    outcome = "it settles after" if found.thought.course.settled else "it has not settled after"
    shown = {
        "size": SIZE,
        "evaluations": spent,
        "residual": found.thought.course.residuals[-1],
        "settled": found.thought.course.settled,
        "wrong": found.wrong,
        "wrong_loop": found.wrong_loop,
    }
    return Experiment(
        name="maze",
        title="A block that repeats until its answer settles",
        text=f"The block was trained on mazes of {LEARNT} x {LEARNT} squares; this one has {SIZE} x {SIZE}. On the "
        f"left it makes {steps} steps, as many as its training made at most. On the right the same weights are "
        f"repeated until the state settles: {outcome} {spent} evaluations, with {found.wrong} squares wrong. "
        f"Of {COUNT} other mazes of this size {largest['solved']} are right when solved, "
        f"and {largest['loop']} by the loop. The block erases dead ends, which takes longer the longer they are. "
        "Another says of every bit of a string whether the number of ones up to it is odd, and is asked the same.",
        picture=_picture(found),
        ending="gif",
        description=f"A maze of {SIZE} by {SIZE} squares, twice. On the left a path grows for {steps} steps and stops, "
        f"with {found.wrong_loop} squares wrong. On the right it grows on: {outcome} {spent} evaluations, with "
        f"{found.wrong} squares wrong.",
        headers=(
            "problem",
            "solved: right",
            "settled",
            "settled and right",
            "evaluations",
            "as a loop: right",
        ),
        rows=[
            (
                row["problem"],
                *(f"{row[name]} of {COUNT}" for name in ("solved", "settled", "settled_right")),
                f"{row['evaluations']}",
                f"{row['loop']} of {COUNT}",
            )
            for row in rows
        ],
        notes=(
            f"the first size of each puzzle is that of the training, which made {PUZZLE.recipe.steps[0]} to "
            f"{PUZZLE.recipe.steps[-1]} steps; as a loop: after the best number of these steps",
            "evaluations: the median; right: all of an answer, checked by breadth-first search and by cumulative sums",
            f"settled: relative residual at most {RTOL:g}; a state that does not is reported, and counts as it ends",
            *(line for each in weights.values() for line in each.told),
        ),
        code=CODE.format(size=SIZE, seed=seed),
        further=("implicit-attention think prefix --size 512", "implicit-attention think maze --file YOURS.png"),
        numbers={
            "rows": rows,
            "count": COUNT,
            "loop_steps": steps,
            "shown": shown,
            "weights": [line for each in weights.values() for line in each.told],
        },
    )


@torch.no_grad()
def _row(puzzle: Puzzle, weights: Weights, size: int) -> dict[str, Any]:
    """Solve problems of one size, and make every number of steps that the training made."""
    problems, model, steps = puzzle.ask(size, COUNT, SEED), weights.model, puzzle.recipe.steps
    told = model.told(problems.inputs)
    state, solution = model.layer(*told, return_solution=True, on_failure="ignore")
    right = _right(puzzle, problems, model.readout(state).argmax(model.axis))
    loops, z = [], model.layer(*told, steps=steps[0])
    for step in steps:
        loops.append(int(_right(puzzle, problems, model.readout(z).argmax(model.axis)).sum()))
        if step != steps[-1]:
            z = model.layer(*told, start=z, steps=1)
    return {
        "solved": int(right.sum()),
        "settled": int(solution.converged.sum()),
        "settled_right": int((right & solution.converged).sum()),
        "loop": max(loops),
        "by_steps": loops,
        "evaluations": int(solution.num_evals.median()),
    }


def _right(puzzle: Puzzle, problems: Problems, classes: Tensor) -> Tensor:
    """(B,): whether every square of an answer is right."""
    each = (Problems(x[None], y[None]) for x, y in zip(*problems, strict=True))
    return torch.tensor([puzzle.wrong(one, found) == 0 for one, found in zip(each, classes, strict=True)])


def _picture(found: Shown) -> bytes:
    """Draw both courses side by side."""
    film = io.BytesIO()
    views = [PUZZLE.view(found.asked.problem, answer) for answer in found.thought.answers]
    loop = [view.levels for view in views[: len(found.loop)]]
    save_course_gif(
        film,
        [view.levels for view in views],
        residuals=found.thought.course.residuals,
        tolerance=RTOL,
        marks=views[0].marks,
        name="repeated until it settles",
        beside={f"the loop of its training: {len(loop)} steps": loop},
        title=f"One block, trained on mazes of {LEARNT} x {LEARNT}, on one of {SIZE} x {SIZE}",
        fps=SPEED,
        every=-(-len(views) // FRAMES),
    )
    return film.getvalue()

"""The pictures of docs/examples.md: `python docs/puzzles/pictures.py` trains for a minute and draws them.

`sizes.png` is drawn from `docs/examples/puzzles.json`, which `python docs/examples/run_all.py --puzzles` writes;
`--sizes` draws that one only.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from implicit_attention.cli.maze import FRAMES, Maze
from implicit_attention.cli.progress import Progress
from implicit_attention.plotting import maze_figure, save_maze_gif, sizes_figure
from implicit_attention.studies.maze_model import RTOL
from implicit_attention.studies.mazes import mazes

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "examples" / "puzzles.json"
SIZE, SHOWN = 17, (1, 8, 24, 48)


def sizes() -> None:
    """Share of mazes that are wholly right against their size, with binomial standard errors."""
    result = json.loads(RESULTS.read_text())["examples"]["mazes"]
    curves: dict[str, list[tuple[float, float, float]]] = {}
    for row in result["rows"]:
        for key, name in (("solved", "solved, at most 500 steps"), ("loop", f"loop of {result['loop']} steps")):
            error = math.sqrt(row[key] * (1 - row[key]) / row["puzzles"])
            curves.setdefault(name, []).append((float(row["set"].split()[0]), row[key], error))
    title = f"The same {result['parameters']} weights, trained on 5 x 5: a loop, and going on until it settles"
    sizes_figure(curves, trained=5, title=title, what="share of mazes wholly right").savefig(HERE / "sizes.png")


def course() -> None:
    """One large maze while it is solved: as an animation, and in five pictures."""
    command = Maze()
    with Progress(command.line) as progress:
        model = command.run(progress)
    maze = mazes("depth-first", SIZE, 1, "to watch, 0")
    found = model.solved(maze)
    last = len(found.paths)
    drawn = {"ways": maze.ways[0], "start": 0, "goal": maze.cells - 1}
    title = f"A {SIZE} x {SIZE} maze, solved by a block that was trained on 5 x 5"
    shown = [*(count for count in SHOWN if count < last), last]
    panels = [(f"after {n} evaluation{'s' * (n > 1)}", found.paths[n - 1]) for n in shown]
    maze_figure(panels, **drawn, title=title).savefig(HERE / "maze.png")
    save_maze_gif(
        HERE / "maze.gif",
        found.paths,
        **drawn,
        residuals=found.residuals,
        tolerance=RTOL,
        every=-(-last // FRAMES),
        title=title,
    )


if __name__ == "__main__":
    sizes()
    if "--sizes" not in sys.argv:
        course()

"""`implicit-attention landscape`: energies in the plane, scene by scene, as pictures, numbers and a page."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import io
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typer import Option

from ..studies.errors import InputError
from .command import Command, Console, Files, Progress, seed_option

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..studies.landscape.plane import Plane, PlaneScene

#: Pixels per inch of the pictures, and their colours.
DPI, COLOURS = 100, 200
PAGE, CONTENT, ANIMATION = "index.html", "landscape.json", "descent.gif"
STORY = ("title", "sentence", "description")


@dataclasses.dataclass(frozen=True)
class Landscape(Command):
    """Look at energies of attention in the plane: contours, where steps lead, which fixed points there are.

    Seventeen scenes, from one step of softmax attention to basins of every solver, each a picture with a sentence, its
    numbers and a description. Without a file: six patterns.
    """

    name: ClassVar[str] = "landscape"

    patterns: Annotated[
        Path | None,
        Option(help="Your stored patterns, .npy, .npz or .pt of shape (M, 2).", show_default="six patterns"),
    ] = None
    seed: Annotated[int, seed_option("five of the eight queries, and of the maps")] = 0
    beta: Annotated[
        float | None,
        Option(
            help="Inverse temperature, > 0, of most scenes; the others have .2 to 10 times of it.",
            show_default="1/sqrt 2; for your patterns by their size",
        ),
    ] = None
    out: Annotated[Path, Option(help="Folder for landscape.json and the pictures.")] = Path("landscape")
    html: Annotated[bool, Option("--html", help="Write everything as one page, index.html, too.")] = False
    animate: Annotated[bool, Option("--animate", help="Write the descent as an animated GIF, too.")] = False
    quick: Annotated[bool, Option("--quick", help="Four scenes.")] = False

    @property
    def modules(self) -> tuple[str, ...]:
        return ("matplotlib",)

    @functools.cached_property
    def plane(self) -> Plane:
        """Return the plane with the patterns and the temperature of the options.

        Raises:
            InputError: an inverse temperature or patterns that cannot be used.
        """
        from ..studies.landscape.plane import plane_of
        from .files import load_patterns

        if self.beta is not None and not 0 < self.beta < math.inf:
            raise InputError(f"`--beta` must be > 0 and finite, got {self.beta:g}; leave it out for the default")
        file = self.patterns
        patterns, name = (None, "") if file is None else (load_patterns(file, "--patterns"), file.name)
        return plane_of(patterns, f"`--patterns` {name}", beta=self.beta, seed=self.seed)

    def check(self) -> None:
        _ = self.plane
        if self.animate and not _has_pillow():
            raise InputError("`--animate` needs pillow, not installed here; pip install pillow")

    def run(self, progress: Progress) -> dict[str, tuple[PlaneScene, bytes]]:
        """Make every scene, and its picture."""
        from ..studies.landscape import QUICK, SCENES

        scenes, drawn = QUICK if self.quick else SCENES, {}
        for index, make in enumerate(scenes):
            since = time.perf_counter()
            progress.begin(f"scene {index + 1}", index, len(scenes))
            scene = make(self.plane)
            drawn[scene.name] = scene, picture(scene.draw())
            progress.end(scene.name, {"line": f"{time.perf_counter() - since:.1f} s"})
        return drawn

    def files(self, result: dict[str, tuple[PlaneScene, bytes]]) -> Files:
        from ..studies.landscape.animation import write_gif
        from ..studies.landscape.page import page
        from .report import options_of

        plane, source = self.plane, {} if self.patterns is None else {"patterns": self.patterns.name}
        content: dict[str, Any] = {
            "settings": options_of(self, "patterns") | source | {"beta": plane.beta},
            "patterns": plane.patterns,
            "queries": plane.queries,
            "reach": plane.reach,
            "scenes": {
                name: {part: getattr(scene, part) for part in STORY} | {"picture": f"{name}.png"} | scene.numbers
                for name, (scene, _) in result.items()
            },
        }
        pictures = {name: drawn for name, (_, drawn) in result.items()}
        others: dict[str, Figure | bytes] = {f"{name}.png": drawn for name, drawn in pictures.items()}
        if self.animate:
            film = io.BytesIO()
            write_gif(film, plane)
            others[ANIMATION] = film.getvalue()
        if self.html:
            others[PAGE] = page(plane, [scene for scene, _ in result.values()], pictures).encode()
        return CONTENT, content, others

    def show(self, result: dict[str, tuple[PlaneScene, bytes]], console: Console) -> None:
        """Print the sentence of every scene."""
        from rich.table import Table

        table = Table("scene", "what it shows", title="Energies of attention in the plane", title_justify="left")
        for scene, _ in result.values():
            table.add_row(scene.name, scene.sentence)
        console.print(table)

    def listed(self, names: list[str]) -> str:
        """Return the number of pictures, and the names of the other files."""
        others = [name for name in names if not name.endswith(".png")]
        return f"{len(names) - len(others)} pictures, {', '.join(others)}"


def _has_pillow() -> bool:
    return importlib.util.find_spec("PIL") is not None


def picture(figure: Figure) -> bytes:
    """Return a figure as PNG; with pillow, of few colours and a third of the bytes."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI)
    if not _has_pillow():
        return drawn.getvalue()
    from PIL import Image

    small = io.BytesIO()
    with Image.open(drawn) as image:
        # This method keeps the colours of small marks.
        few = image.convert("RGB").quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(small, "PNG", optimize=True)
    return small.getvalue()

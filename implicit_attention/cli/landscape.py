"""`implicit-attention landscape`: energies in the plane, scene by scene, as pictures, numbers and a page."""

from __future__ import annotations

import importlib.util
import io
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from . import landscape_points as energies
from . import landscape_steps as steps
from .errors import InputError, writable
from .landscape_animation import write_gif
from .landscape_page import page
from .landscape_plane import Plane, PlaneScene, plane_of
from .progress import Progress, make_console
from .report import options_of, write
from .settings import LandscapeSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Pixels per inch of the pictures, and their colours.
DPI, COLOURS = 100, 200
PAGE, CONTENT, ANIMATION = "index.html", "landscape.json", "descent.gif"
SCENES: tuple[Callable[[Plane], PlaneScene], ...] = (
    steps.one_step,
    steps.small_steps,
    steps.many_steps,
    steps.higher_temperature,
    steps.lower_temperature,
    steps.critical,
    steps.surface,
    *(partial(energies.anchored, anchor=anchor) for anchor in energies.ANCHORS),
    energies.by_distance,
    energies.sparse,
    energies.by_solver,
    steps.with_maps,
    steps.self_frozen,
    steps.self_moving,
    steps.norms,
)
QUICK = (SCENES[0], SCENES[2], SCENES[4], SCENES[8])


def run(settings: LandscapeSettings) -> None:
    """Make every scene, write the files and say what each of them shows.

    Raises:
        InputError: an option or the file of patterns cannot be used, pillow is missing for `--animate`, the folder
            cannot be written.
    """
    begun = time.perf_counter()
    plane = plane_of(settings)
    if settings.animate and not _has_pillow():
        raise InputError("`--animate` needs pillow, not installed here; pip install pillow")
    out = settings.out
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
    scenes = QUICK if settings.quick else SCENES
    made: list[PlaneScene] = []
    pictures: dict[str, bytes] = {}
    with Progress(lambda row: row["line"]) as progress:
        for index, make in enumerate(scenes):
            since = time.perf_counter()
            progress.begin(f"scene {index + 1}", index, len(scenes))
            scene = make(plane)
            made.append(scene)
            pictures[scene.name] = picture(scene.draw())
            progress.end(scene.name, {"line": f"{time.perf_counter() - since:.1f} s"})
        progress.begin("files", len(scenes), len(scenes))
        with writable(out):
            content = content_of(settings, plane, made, time.perf_counter() - begun)
            written = write(out, CONTENT, content, {})
            for name, data in pictures.items():
                (out / f"{name}.png").write_bytes(data)
            if settings.animate:
                write_gif(out / ANIMATION, plane)
                written.append(ANIMATION)
            if settings.html:
                (out / PAGE).write_text(page(plane, made, pictures), encoding="utf-8")
                written.append(PAGE)
    console = make_console()
    table = Table("scene", "what it shows", title="Energies of attention in the plane", title_justify="left")
    for scene in made:
        table.add_row(scene.name, scene.sentence)
    console.print(table)
    seconds = time.perf_counter() - begun
    console.print(
        f"{len(pictures)} pictures, {', '.join(written)} written to {out} after {seconds:.1f} s", markup=False
    )


def content_of(settings: LandscapeSettings, plane: Plane, scenes: list[PlaneScene], seconds: float) -> dict[str, Any]:
    """Every number, for the JSON file."""
    source = {} if settings.patterns is None else {"patterns": settings.patterns.name}
    return {
        "command": "landscape",
        "settings": options_of(settings, "patterns") | source | {"beta": plane.beta},
        "patterns": plane.patterns,
        "queries": plane.queries,
        "reach": plane.reach,
        "scenes": {
            scene.name: {
                "title": scene.title,
                "sentence": scene.sentence,
                "description": scene.description,
                "picture": f"{scene.name}.png",
                **scene.numbers,
            }
            for scene in scenes
        },
        "threads": torch.get_num_threads(),
        "seconds": seconds,
    }


def _has_pillow() -> bool:
    return importlib.util.find_spec("PIL") is not None


def picture(figure: Figure) -> bytes:
    """A figure as PNG; of few colours, a third of the bytes, where pillow is there to choose them."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI)
    if not _has_pillow():
        return drawn.getvalue()
    from PIL import Image

    small = io.BytesIO()
    with Image.open(drawn) as image:
        # The method that keeps the colours of small marks.
        few = image.convert("RGB").quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(small, "PNG", optimize=True)
    return small.getvalue()

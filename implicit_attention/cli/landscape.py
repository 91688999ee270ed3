"""`implicit-attention landscape`: energies in the plane, scene by scene, as pictures, numbers and a page."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from . import landscape_points as energies
from . import landscape_steps as steps
from .errors import InputError, writable
from .landscape_animation import write_gif
from .landscape_page import page
from .landscape_plane import Plane, Scene, plane_of
from .progress import Progress, make_console
from .report import options_of, write
from .settings import LandscapeSettings

#: Pixels per inch of the pictures, so that the width of the page holds them, and their colours.
DPI, COLOURS = 100, 64
PAGE, CONTENT, ANIMATION = "index.html", "landscape.json", "descent.gif"
SCENES: tuple[Callable[[Plane], Scene], ...] = (
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
    made: list[Scene] = []
    figures = {}
    with Progress(lambda row: row["line"]) as progress:
        for index, make in enumerate(scenes):
            since = time.perf_counter()
            progress.begin(f"scene {index + 1}", index, len(scenes))
            scene = make(plane)
            made.append(scene)
            figure = figures[f"{scene.name}.png"] = scene.draw()
            figure.set_dpi(DPI)
            progress.end(scene.name, {"line": f"{time.perf_counter() - since:.1f} s"})
        progress.begin("files", len(scenes), len(scenes))
        with writable(out):
            content = content_of(settings, plane, made, time.perf_counter() - begun)
            written = write(out, CONTENT, content, figures)
            for name in figures:
                shrink(out / name)
            if settings.animate:
                write_gif(out / ANIMATION, plane)
                written.append(ANIMATION)
            if settings.html:
                (out / PAGE).write_text(page(plane, made, pictures(out, made)), encoding="utf-8")
                written.append(PAGE)
    console = make_console()
    table = Table("scene", "what it shows", title="Energies of attention in the plane", title_justify="left")
    for scene in made:
        table.add_row(scene.name, scene.sentence)
    console.print(table)
    named = ", ".join(name for name in written if not name.endswith(".png"))
    seconds = time.perf_counter() - begun
    console.print(f"{len(figures)} pictures, {named} written to {out} after {seconds:.1f} s", markup=False)


def content_of(settings: LandscapeSettings, plane: Plane, scenes: list[Scene], seconds: float) -> dict[str, Any]:
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


def shrink(picture: Path) -> None:
    """Store a picture with few colours, a quarter of its bytes, where pillow is there to do it."""
    if _has_pillow():
        from PIL import Image

        with Image.open(picture) as image:
            few = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        few.save(picture, optimize=True)


def pictures(out: Path, scenes: list[Scene]) -> dict[str, bytes]:
    """The pictures that were written, by scene."""
    return {scene.name: (out / f"{scene.name}.png").read_bytes() for scene in scenes}

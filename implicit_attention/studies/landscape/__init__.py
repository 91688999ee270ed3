"""Scenes of energies of attention in the plane: numbers, pictures, sentences and a page."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from . import points, steps
from .plane import Plane, PlaneScene

SCENES: tuple[Callable[[Plane], PlaneScene], ...] = (
    steps.one_step,
    steps.small_steps,
    steps.many_steps,
    steps.higher_temperature,
    steps.lower_temperature,
    steps.critical,
    steps.surface,
    *(partial(points.anchored, anchor=anchor) for anchor in points.ANCHORS),
    points.by_distance,
    points.sparse,
    points.by_solver,
    steps.with_maps,
    steps.self_frozen,
    steps.self_moving,
    steps.norms,
)
QUICK = (SCENES[0], SCENES[2], SCENES[4], SCENES[8])

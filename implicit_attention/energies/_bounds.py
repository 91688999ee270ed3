"""Whether an anchored energy certainly has no lower bound: asked once per potential, as far as the host can look."""

from __future__ import annotations

import warnings
import weakref
from typing import TypeAlias

import torch
from torch import Tensor

from .. import _validate
from .._autograd import host_may_look
from ..errors import ConvergenceWarning, outside
from ..failure_policy import Word
from ..potentials import Potential
from ..potentials._rays import Ray

# Scales this near to the limit may be on either side of it by rounding, and there the field decides.
MARGIN = 1e-6
#: Tensors as they were: which objects, and how often torch had written to each.
Versions: TypeAlias = tuple[tuple["weakref.ref[Tensor]", int], ...]

# Up to which scale, and what was answered.
_asked: weakref.WeakKeyDictionary[Potential, tuple[Versions, float, Ray]] = weakref.WeakKeyDictionary()


def falls(potential: Potential, anchor: float | Tensor) -> Tensor | None:
    """Whether |z|^2/2 - (1 - anchor) Phi certainly falls without end, (*batch); None if no entry can be known to."""
    ray = potential.falling_ray() if potential.event_ndim == 1 else None
    return None if ray is None else _beyond(ray, anchor) > 1 + MARGIN


def check_bounded(potential: Potential, anchor: float | Tensor, unbounded: Word) -> bool:
    """Raise or warn if an entry's energy certainly falls without end; return whether it is certain that none does so.

    Certain only of what is known: where no ray is found there may be one.
    """
    _validate.check_choice("unbounded", unbounded, ("raise", "warn", "ignore"))
    ray, tensors = None, [*potential.tensors(), *([anchor] if isinstance(anchor, Tensor) else [])]
    if potential.event_ndim == 1 and host_may_look(*tensors):
        ray = _remembered(potential, _largest_scale(anchor))
    if ray is None:
        return False
    if not _any_falls(ray, anchor):
        return True
    # Torch does not count what is written past it (by numpy, through `.data`).
    ray = potential.falling_ray()
    if ray is None or not _any_falls(ray, anchor):
        return True
    if unbounded != "ignore":
        told = _told(potential, ray, anchor)
        if unbounded == "raise":
            raise ValueError(f"{told}. Pass unbounded='warn' or 'ignore' to look for a local minimum all the same.")
        warnings.warn(told, ConvergenceWarning, stacklevel=outside())
    return False


def _any_falls(ray: Ray, anchor: float | Tensor) -> bool:
    return bool((_beyond(ray, anchor) > 1 + MARGIN).any())


def _beyond(ray: Ray, anchor: float | Tensor) -> Tensor:
    """(1 - anchor)/limit, (*batch): above 1 the energy falls."""
    pull = 1 - (anchor.detach().to(ray.limit) if isinstance(anchor, Tensor) else anchor)
    # Not 0/0 for a potential that is not read, whatever it is.
    return torch.where(torch.as_tensor(pull, device=ray.limit.device) > 0, pull / ray.limit, 0.0).nan_to_num(0.0)


def _largest_scale(anchor: float | Tensor) -> float:
    if not isinstance(anchor, Tensor):
        return 1 - anchor
    return float(1 - anchor.detach().amin()) if anchor.numel() else 0.0


def _remembered(potential: Potential, scale: float) -> Ray | None:
    tensors = potential.tensors()
    if any(t.is_inference() for t in tensors):
        # What is written to these is not counted.
        return potential.falling_ray(scale)
    known = _asked.get(potential)
    if known is not None:
        versions, asked, ray = known
        same = len(versions) == len(tensors) and all(
            held() is t and count == t._version for (held, count), t in zip(versions, tensors, strict=True)
        )
        if same and scale <= asked:
            return ray
    found = potential.falling_ray(scale)
    if found is not None:
        _asked[potential] = tuple((weakref.ref(t), t._version) for t in tensors), scale, found
    return found


def _told(potential: Potential, ray: Ray, anchor: float | Tensor) -> str:
    beyond = _beyond(ray, anchor)
    entry = tuple(int(i) for i in torch.unravel_index(beyond.argmax(), beyond.shape))
    limit = float(ray.limit.expand(beyond.shape)[entry])
    direction = ray.direction.expand(*beyond.shape, -1)[entry].tolist()
    shown = ", ".join(f"{x:.3g}" for x in direction[:4]) + (", ..." if len(direction) > 4 else "")
    given = float(anchor.detach().expand(beyond.shape)[entry]) if isinstance(anchor, Tensor) else anchor
    where = f" in batch entry {entry}" if entry else ""
    required = "leave |z|^2/2 - (1 - anchor) Phi(z) a lower bound"
    received = f"{type(potential).__name__} with anchor {given:.6g}, which falls without end along [{shown}]{where}"
    fixed = "or keep the states at a fixed length (SphereEnergy)"
    if limit == 0:
        remedy = f"no anchor below 1 helps: use a potential that grows no faster than |z|^2, {fixed}"
        return _validate.message("potential", required, received, remedy)
    sure = potential.bounded_below(limit * (1 - MARGIN))
    raised = f"raise the anchor above {1 - limit:.6g}" + ("" if sure else " (at least)")
    return _validate.message("potential", required, received, f"{raised}, lower beta, normalise the keys, {fixed}")

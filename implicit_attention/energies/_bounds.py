"""Checks whether an anchored energy certainly has no lower bound, once per potential, where the host can look."""

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

# Within this distance of the limit rounding decides on which side a scale lies, and the field on the bound.
MARGIN = 1e-6
#: The state of tensors: the objects, and how often torch had written to each.
Versions: TypeAlias = tuple[tuple["weakref.ref[Tensor]", int], ...]

# For each potential its tensors, the scale up to which a ray was looked for, and the ray.
_rays: weakref.WeakKeyDictionary[Potential, tuple[Versions, float, Ray]] = weakref.WeakKeyDictionary()


def falls(potential: Potential, anchor: float | Tensor) -> Tensor | None:
    """Whether |z|^2/2 - (1 - anchor) Phi certainly falls without end, (*batch); None if no entry can be known to."""
    ray = potential.falling_ray() if potential.event_ndim == 1 else None
    return None if ray is None else _beyond(ray, anchor) > 1 + MARGIN


def check_bounded(potential: Potential, anchor: float | Tensor, unbounded: Word) -> bool:
    """Raise or warn if an entry's energy certainly falls without end; return whether it is certain that none does so.

    The check knows only rays that potentials report: without such a ray the energy may fall all the same.
    """
    _validate.check_choice("unbounded", unbounded, ("raise", "warn", "ignore"))
    ray, tensors = None, [*potential.tensors(), *([anchor] if isinstance(anchor, Tensor) else [])]
    if potential.event_ndim == 1 and host_may_look(*tensors):
        ray = _remembered(potential, _largest_scale(anchor))
    if ray is None:
        return False
    if not _any_falls(ray, anchor):
        return True
    # Torch does not count writes that bypass it (by numpy, through `.data`), so the ray is computed again.
    ray = potential.falling_ray()
    if ray is None or not _any_falls(ray, anchor):
        return True
    if unbounded != "ignore":
        message = _message(potential, ray, anchor)
        if unbounded == "raise":
            raise ValueError(f"{message}. Pass unbounded='warn' or 'ignore' to look for a local minimum all the same.")
        warnings.warn(message, ConvergenceWarning, stacklevel=outside())
    return False


def _any_falls(ray: Ray, anchor: float | Tensor) -> bool:
    return bool((_beyond(ray, anchor) > 1 + MARGIN).any())


def _beyond(ray: Ray, anchor: float | Tensor) -> Tensor:
    """(1 - anchor)/limit, (*batch): above 1 the energy falls."""
    pull = 1 - (anchor.detach().to(ray.limit) if isinstance(anchor, Tensor) else anchor)
    # At anchor 1 the potential is not read, and 0/0 must not count.
    return torch.where(torch.as_tensor(pull, device=ray.limit.device) > 0, pull / ray.limit, 0.0).nan_to_num(0.0)


def _largest_scale(anchor: float | Tensor) -> float:
    if not isinstance(anchor, Tensor):
        return 1 - anchor
    return float(1 - anchor.detach().amin()) if anchor.numel() else 0.0


def _remembered(potential: Potential, scale: float) -> Ray | None:
    tensors = potential.tensors()
    if any(t.is_inference() for t in tensors):
        # Torch counts no writes to these.
        return potential.falling_ray(scale)
    if (known := _rays.get(potential)) is not None:
        versions, largest, ray = known
        same = len(versions) == len(tensors) and all(
            tensor() is t and count == t._version for (tensor, count), t in zip(versions, tensors, strict=True)
        )
        if same and scale <= largest:
            return ray
    new = potential.falling_ray(scale)
    if new is not None:
        _rays[potential] = tuple((weakref.ref(t), t._version) for t in tensors), scale, new
    return new


def _message(potential: Potential, ray: Ray, anchor: float | Tensor) -> str:
    beyond = _beyond(ray, anchor)
    entry = tuple(int(i) for i in torch.unravel_index(beyond.argmax(), beyond.shape))
    limit = float(ray.limit.expand(beyond.shape)[entry])
    direction = ray.direction.expand(*beyond.shape, -1)[entry].tolist()
    shown = ", ".join(f"{x:.3g}" for x in direction[:4]) + (", ..." if len(direction) > 4 else "")
    number = float(anchor.detach().expand(beyond.shape)[entry]) if isinstance(anchor, Tensor) else anchor
    where = f" in batch entry {entry}" if entry else ""
    required = "leave |z|^2/2 - (1 - anchor) Phi(z) a lower bound"
    received = f"{type(potential).__name__} with anchor {number:.6g}, which falls without end along [{shown}]{where}"
    fixed = "or keep the states at a fixed length (SphereEnergy)"
    if limit == 0:
        remedy = f"no anchor below 1 helps: use a potential that grows no faster than |z|^2, {fixed}"
        return _validate.message("potential", required, received, remedy)
    sure = potential.bounded_below(limit * (1 - MARGIN))
    raised = f"raise the anchor above {1 - limit:.6g}" + ("" if sure else " (at least)")
    return _validate.message("potential", required, received, f"{raised}, lower beta, normalise the keys, {fixed}")

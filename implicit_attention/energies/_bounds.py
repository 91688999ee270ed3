"""Checks whether an anchored energy certainly has no lower bound, where the host can look."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from .. import _validate
from .._torch import host_may_look
from ..failure import ConvergenceWarning, Word, outside
from ..potentials import Potential
from ..potentials._rays import Ray

# Within this distance of the limit rounding decides on which side a scale lies, and the field on the bound.
MARGIN = 1e-6


def falls(ray: Ray, anchor: float | Tensor) -> Tensor:
    """Whether |z|^2/2 - (1 - anchor) Phi certainly falls without end along a ray of the potential, (*batch)."""
    return _beyond(ray, anchor) > 1 + MARGIN


def check_bounded(potential: Potential, anchor: float | Tensor, unbounded: Word) -> bool:
    """Raise or warn if an entry's energy certainly falls without end; return whether it is certain that none does so.

    The check knows only rays that potentials report: without such a ray the energy may fall all the same.
    """
    _validate.check_choice("unbounded", unbounded, ("raise", "warn", "ignore"))
    tensors = [*potential.tensors(), *([anchor] if isinstance(anchor, Tensor) else [])]
    if potential.event_ndim != 1 or not host_may_look(*tensors):
        return False
    lowest = anchor
    if isinstance(anchor, Tensor):
        lowest = float(anchor.detach().amin()) if anchor.numel() else 1.0
    # No ray is looked for above the largest scale.
    ray = potential.falling_ray(1 - lowest)
    if ray is None or not bool(falls(ray, anchor).any()):
        return ray is not None
    ray = potential.falling_ray()
    if ray is not None and unbounded != "ignore":
        message = _message(potential, ray, anchor)
        if unbounded == "raise":
            raise ValueError(f"{message}. Pass unbounded='warn' or 'ignore' to look for a local minimum all the same.")
        warnings.warn(message, ConvergenceWarning, stacklevel=outside())
    return False


def _beyond(ray: Ray, anchor: float | Tensor) -> Tensor:
    """(1 - anchor)/limit, (*batch): above 1 the energy falls."""
    pull = 1 - (anchor.detach().to(ray.limit) if isinstance(anchor, Tensor) else anchor)
    # At anchor 1 the potential is not read, and 0/0 must not count.
    return torch.where(torch.as_tensor(pull, device=ray.limit.device) > 0, pull / ray.limit, 0.0).nan_to_num(0.0)


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

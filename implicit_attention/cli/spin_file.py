"""What `magnetize` reads: a user's couplings, fields and temperatures, and the words of its options."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from ..spins import SpinSystem
from .data import check_archive, check_size
from .errors import InputError

ARRAYS = ("J", "h", "beta")
SHAPES = "J is (N, N), (B, N, N) or (N, N, D, D), h is (N,), (N, D) or (B, N, D), beta is a number or (B,)"
LARGEST_SWEEP = 1000


class Sweep(NamedTuple):
    """Inverse temperatures from `low` to `high`, so many at equal distances."""

    low: float
    high: float
    points: int

    def betas(self, dtype: torch.dtype) -> Tensor:
        return torch.linspace(self.low, self.high, self.points, dtype=torch.float64).to(dtype)


def parse_sweep(text: str) -> Sweep:
    """`beta=LOW:HIGH:COUNT`."""
    remedy = "write for example --sweep beta=0.1:3:40"
    match = re.fullmatch(r"\s*beta\s*=\s*([^:]+):([^:]+):([^:]+)", text)
    try:
        low, high, count = (float(match[1]), float(match[2]), int(match[3])) if match else (math.nan, math.nan, 0)
    except ValueError:
        match = None
    if match is None:
        raise InputError(f"`--sweep` must be beta=LOW:HIGH:COUNT, got {text!r}; {remedy}")
    if not (0 < low < high < math.inf):
        raise InputError(f"`--sweep` must go from a beta > 0 to a larger one, got {low:g}:{high:g}; {remedy}")
    if not 2 <= count <= LARGEST_SWEEP:
        raise InputError(f"`--sweep` must have 2 to {LARGEST_SWEEP} points, got {count}; {remedy}")
    return Sweep(low, high, count)


def parse_radius(text: str) -> Literal["sqrt_dim", "bessel"] | float:
    if text in ("sqrt_dim", "bessel"):
        return cast('Literal["sqrt_dim", "bessel"]', text)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise InputError(f"`--radius` must be sqrt_dim, bessel or a number > 0, got {text!r}; try sqrt_dim")
    return value


def load_system(
    path: Path,
    *,
    radius: Literal["sqrt_dim", "bessel"] | float,
    measure: Literal["uniform", "counting"] | None,
    dtype: torch.dtype,
) -> SpinSystem:
    """The system in an .npz file with the arrays J, h and beta; states are counted for D = 1 unless `measure` is given.

    Raises:
        InputError: a file that is missing, of another kind, or whose arrays do not fit.
    """
    name = f"`FILE` {path.name}"
    arrays = {key: value.to(dtype) for key, value in _read(name, path).items()}
    couplings, field, beta = (arrays[key] for key in ARRAYS)
    field = field[:, None] if field.ndim == 1 else field
    if not (couplings.ndim in (2, 3, 4) and field.ndim in (2, 3) and beta.ndim in (0, 1)):
        raise _unfit(name, arrays, "axes that fit")
    n, d = field.shape[-2:]
    if n == 0 or d == 0:
        raise _unfit(name, arrays, "at least one spin of at least one dimension")
    square = (n, n, d, d) if couplings.ndim == 4 else (n, n)
    if couplings.shape[-len(square) :] != square:
        raise _unfit(name, arrays, f"couplings J for the N = {n} spins in D = {d} dimensions of h")
    leads = [couplings.shape[:1] if couplings.ndim == 3 else (), field.shape[:-2], beta.shape]
    try:
        batch = torch.broadcast_shapes(*leads)  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise _unfit(name, arrays, "the same number B of samples in all arrays") from None
    wrong = beta[~(beta > 0) & ~beta.isnan()]
    if wrong.numel():
        raise InputError(f"{name} must have beta > 0 everywhere, got {float(wrong.flatten()[0]):g}; beta is 1/T")
    kind = measure or ("counting" if d == 1 else "uniform")
    try:
        return SpinSystem(couplings, field.expand(*batch, n, d), beta, radius=radius, measure=kind)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: {error}") from None


def _unfit(name: str, arrays: dict[str, Tensor], requirement: str) -> InputError:
    shapes = ", ".join(f"{key} {tuple(arrays[key].shape)}" for key in ARRAYS)
    return InputError(f"{name} must have {requirement}, got {shapes}; {SHAPES}")


def _read(name: str, path: Path) -> dict[str, Tensor]:
    import numpy as np

    remedy = "save one with numpy.savez(FILE, J=J, h=h, beta=beta)"
    if path.suffix != ".npz":
        raise InputError(f"{name} must end in .npz, got {path.suffix!r}; {remedy}")
    if not path.is_file():
        raise InputError(f"{name} must be an existing file, got {str(path)!r}; check the path")
    arrays: dict[str, Any] = {}
    try:
        check_archive(name, path)
        with path.open("rb") as file:  # numpy leaves a damaged archive open
            loaded = np.load(file, allow_pickle=False)
            found = list(loaded.files)
            absent = [key for key in ARRAYS if key not in found]
            if not absent:
                arrays = {key: loaded[key] for key in ARRAYS}
    except InputError:
        raise
    except Exception as error:  # a damaged file may end anywhere in what reads it
        raise InputError(
            f"{name} must hold plain arrays, got a file that is not ({type(error).__name__}); {remedy}"
        ) from (None)
    if absent:
        held = ", ".join(found) or "no array"
        raise InputError(f"{name} must hold the arrays J, h and beta, got {held}; add {' and '.join(absent)}")
    for key, array in arrays.items():
        check_size(name, 8 * array.size)
        if array.dtype.kind not in "biuf":
            raise InputError(f"{name} must hold real numbers, got dtype {array.dtype} in {key}; use .astype(float)")
    return {
        key: torch.from_numpy(np.ascontiguousarray(a, dtype=np.float64).reshape(a.shape)) for key, a in arrays.items()
    }

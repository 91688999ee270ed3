"""Files of users, read without running code from them: patterns for `compare`, spin systems for `magnetize`."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from ..studies.errors import InputError

if TYPE_CHECKING:
    from ..spins import SpinSystem

#: The most bytes that are read from a file, of an expanded archive and of its numbers as float64.
LARGEST = 2**31
SHAPES = (
    "J is (N, N), (B, N, N) or (N, N, D, D), h is (N,), (N, D) or (B, N, D), beta is a number or (B,), with N, D >= 1"
)
LARGEST_SWEEP = 1000


def load_patterns(path: Path, option: str = "--data") -> Tensor:
    """Read a user's patterns, (count, D) as float64; `option` names the file in messages.

    Raises:
        InputError: a file that is missing, of another kind, or holds something else than one real (count, D) array.
    """
    name = f"`{option}` {path.name}"
    (array,) = _read(name, path, (".npy", ".npz", ".pt"), _only, "save numbers with numpy.save or torch.save(tensor)")
    shape = tuple(array.shape)
    if len(shape) != 2 or shape[1] == 0:
        raise InputError(f"{name} must have shape (count, D), got {shape}; flatten every pattern to one row")
    return array


def load_system(path: Path, *, radius: str, measure: Literal["uniform", "counting"] | None, dtype: str) -> SpinSystem:
    """Read the system in an .npz file with the arrays J, h and beta; by default states are counted for D = 1.

    Raises:
        InputError: a file that is missing, of another kind, or whose arrays do not fit.
    """
    from ..spins import SpinSystem

    name, wanted = f"`FILE` {path.name}", ["J", "h", "beta"]

    def all_three(names: list[str]) -> list[str]:
        if absent := [key for key in wanted if key not in names]:
            received = ", ".join(names) or "no array"
            raise InputError(f"the arrays J, h and beta, got {received}; add {' and '.join(absent)}")
        return wanted

    arrays = _read(name, path, (".npz",), all_three, "save one with numpy.savez(FILE, J=J, h=h, beta=beta)")
    couplings, field, beta = (array.to(getattr(torch, dtype)) for array in arrays)
    wrong = beta[~(beta > 0) & ~beta.isnan()]
    if wrong.numel():
        raise InputError(f"{name} must have beta > 0 everywhere, got {float(wrong.flatten()[0]):g}; beta is 1/T")
    field = field[:, None] if field.ndim == 1 else field
    try:
        n, d = field.shape[-2:]
        pair = (n, n, d, d) if couplings.ndim == 4 else (n, n)
        lead = couplings.shape[: -len(pair)]
        batch = torch.broadcast_shapes(lead, field.shape[:-2], beta.shape)  # type: ignore[no-untyped-call]
        if couplings.shape != (*lead, *pair) or len(batch) > 1 or n * d == 0:
            raise ValueError
    except (ValueError, RuntimeError):
        shapes = ", ".join(f"{key} {tuple(array.shape)}" for key, array in zip(wanted, arrays, strict=True))
        raise InputError(f"{name} must have arrays of shapes that fit, got {shapes}; {SHAPES}") from None
    length = parse_radius(radius)
    try:
        usual: Literal["counting", "uniform"] = "counting" if d == 1 else "uniform"
        return SpinSystem(couplings, field.expand(*batch, n, d), beta, radius=length, measure=measure or usual)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: {error}") from None


def load_fields(path: Path, system: SpinSystem) -> Tensor:
    """Read the fields (T, *batch, N, D) of T steps, for the spins of a system, in its precision.

    Raises:
        InputError: a file that is missing, of another kind, or whose array does not fit.
    """
    name, n, d = f"`--drive` {path.name}", system.num_sites, system.dim
    (array,) = _read(name, path, (".npy", ".npz"), _only, "save the fields with numpy.save")
    fields = array[..., None] if array.ndim == 2 and d == 1 else array
    samples = (*system.batch, n, d)
    if fields.ndim == 3:
        fields = fields.reshape(len(fields), *(1,) * len(system.batch), *fields.shape[1:])
    if fields.ndim == 0 or len(fields) == 0 or fields.shape[1:] not in (samples, (*(1,) * len(system.batch), n, d)):
        wanted = f"(T, N, D) = (T, {n}, {d})" + (f" or (T, B, N, D) = (T, {samples[0]}, {n}, {d})" * bool(system.batch))
        remedy = "save the field of every step, T >= 1"
        raise InputError(f"{name} must have shape {wanted}, got {tuple(array.shape)}; {remedy}")
    return fields.expand(len(fields), *samples).to(system.field.dtype)


def _only(names: list[str]) -> list[str]:
    """Return the name of an array that is alone in its file."""
    if len(names) != 1:
        listed = ", ".join(map(str, names)) or "none"
        raise InputError(f"exactly one array, got {len(names)}: {listed}; save the wanted one alone")
    return names


def _read(
    name: str, path: Path, suffixes: tuple[str, ...], choose: Callable[[list[str]], list[str]], remedy: str
) -> list[Tensor]:
    """Read the arrays of a file that `choose` picks by their names, as float64. An array alone has the name "".

    `choose` and the readers raise an `InputError` that says what the file must hold.
    """
    if path.suffix not in suffixes:
        raise InputError(f"{name} must end in {' or '.join(suffixes)}, got {path.suffix!r}; {remedy}")
    if not path.is_file():
        raise InputError(f"{name} must be an existing file, got {str(path)!r}; check the path")
    try:
        arrays = _read_tensors(path, choose) if path.suffix == ".pt" else _read_numpy(path, choose)
        return [_as_float64(key, array) for key, array in arrays.items()]
    except InputError as error:
        raise InputError(f"{name} must hold {error}") from None
    except Exception as error:  # a damaged file may raise anything
        received = f"a file that is damaged or could be read only by running its code ({type(error).__name__})"
        raise InputError(f"{name} must hold plain arrays, got {received}; {remedy}") from None


def _check_size(size: int) -> None:
    if size > LARGEST:
        required = f"at most {LARGEST / 2**20:.3g} MiB, expanded and as float64"
        raise InputError(f"{required}, got {size / 2**20:.3g} MiB; store fewer or shorter arrays")


def _check_archive(path: Path) -> bool:
    """Return whether the file is a zip archive; nothing of one that would expand to too much is expanded."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        _check_size(sum(member.file_size for member in archive.infolist()))
    return True


def _read_numpy(path: Path, choose: Callable[[list[str]], list[str]]) -> dict[str, Any]:
    import numpy as np

    if _check_archive(path):
        with path.open("rb") as file:  # numpy leaves a damaged archive open
            archive = np.load(file, allow_pickle=False)
            return {key: archive[key] for key in choose(list(archive.files))}
    # Mapped: a header that promises more than the file holds is refused before anything is allocated.
    array = np.lib.format.open_memmap(path, mode="r")
    return dict.fromkeys(choose([""]), array)


def _read_tensors(path: Path, choose: Callable[[list[str]], list[str]]) -> dict[str, Any]:
    _check_archive(path)
    loaded = torch.load(path, weights_only=True, map_location="cpu")
    named = loaded if isinstance(loaded, dict) else {"": loaded}
    return {key: named[key] for key in choose(list(named))}


def _as_float64(key: str, array: Any) -> Tensor:
    import numpy as np

    where = f" in {key}" if key else ""
    if isinstance(array, np.ndarray):
        _check_size(8 * array.size)
        if array.dtype.kind not in "biuf":
            raise InputError(f"real numbers, got dtype {array.dtype}{where}; convert it with .astype(float)")
        return torch.from_numpy(np.array(array, dtype=np.float64, order="C"))
    if not isinstance(array, Tensor):
        raise InputError(f"a tensor, got {type(array).__name__}{where}; save it with torch.save(tensor)")
    if array.is_complex() or array.is_quantized or array.layout != torch.strided:
        kind = f"dtype {array.dtype}, layout {array.layout}{where}"
        raise InputError(f"dense real numbers, got {kind}; convert it with .to_dense() and .float()")
    _check_size(8 * array.numel())  # an expanded tensor is small in the file only
    return array.detach().to(torch.float64)


def parse_sweep(text: str) -> Tensor:
    """Return the inverse temperatures of `beta=LOW:HIGH:COUNT`, at equal distances, float64."""
    remedy = "write for example --sweep beta=0.1:3:40"
    match = re.fullmatch(r"\s*beta\s*=\s*([^:]+):([^:]+):([^:]+)", text)
    try:
        low, high, count = float(match[1]), float(match[2]), int(match[3])  # type: ignore[index]
    except (TypeError, ValueError):
        raise InputError(f"`--sweep` must be beta=LOW:HIGH:COUNT, got {text!r}; {remedy}") from None
    if not (0 < low < high < math.inf):
        raise InputError(f"`--sweep` must go from a beta > 0 to a larger one, got {low:g}:{high:g}; {remedy}")
    if not 2 <= count <= LARGEST_SWEEP:
        raise InputError(f"`--sweep` must have 2 to {LARGEST_SWEEP} points, got {count}; {remedy}")
    return torch.linspace(low, high, count, dtype=torch.float64)


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

"""Patterns and queries of the retrieval task: scikit-learn's digits, or a user's file."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import InputError, require_modules

TASKS = ("half-masked", "noisy")
#: Standard deviation of the noise; for a user's data in units of the data's own.
NOISE = 0.5
SUFFIXES = (".npy", ".npz", ".pt")
#: Bytes that are read from a file: of what an archive expands to, and of its numbers as float64.
LARGEST = 2**31


def load_digits() -> Tensor:
    """The 1797 digits of scikit-learn, (1797, 64) float64 in [-1, 1]."""
    require_modules("sklearn")
    from sklearn import datasets

    images: Tensor = torch.from_numpy(datasets.load_digits().data)
    return images.to(torch.float64) / 8 - 1


def load_file(path: Path) -> Tensor:
    """A user's patterns, (count, D) as float64, read without running code from the file.

    Raises:
        InputError: a file that is missing, of another kind, or holds something else than one real (count, D) array.
    """
    name = f"`--data` {path.name}"
    if path.suffix not in SUFFIXES:
        raise InputError(f"{name} must end in .npy, .npz or .pt, got {path.suffix!r}; save it with numpy.save")
    if not path.is_file():
        raise InputError(f"{name} must be an existing file, got {str(path)!r}; check the path")
    try:
        array = _read_tensor(name, path) if path.suffix == ".pt" else _read_numpy(name, path)
    except InputError:
        raise
    except Exception as error:  # a damaged file may end anywhere in what reads it
        raise InputError(
            f"{name} must hold one plain array, got a file that is damaged or could be read only by running its code "
            f"({type(error).__name__}); save numbers with numpy.save or torch.save(tensor)"
        ) from None
    if array.ndim != 2 or array.shape[1] == 0:
        raise InputError(
            f"{name} must have shape (count, D), got {tuple(array.shape)}; flatten every pattern to one row"
        )
    return array.to(torch.float64)


def check_size(name: str, size: int) -> None:
    if size > LARGEST:
        required = f"at most {LARGEST / 2**20:.3g} MiB, expanded and as float64"
        raise InputError(f"{name} must hold {required}, got {size / 2**20:.3g} MiB; store fewer or shorter arrays")


def check_archive(name: str, path: Path) -> None:
    """Look at what a zip archive says it expands to, of which no more is read, before it is expanded."""
    with zipfile.ZipFile(path) as archive:
        check_size(name, sum(member.file_size for member in archive.infolist()))


def _read_numpy(name: str, path: Path) -> Tensor:
    import numpy as np

    loaded: Any
    if zipfile.is_zipfile(path):
        check_archive(name, path)
        with path.open("rb") as file:  # numpy leaves a damaged archive open
            archive = np.load(file, allow_pickle=False)
            loaded = archive[_only(name, list(archive.files))]
    else:
        # Mapped: a header that promises more than the file holds is refused before anything is allocated.
        loaded = np.lib.format.open_memmap(path, mode="r")
    check_size(name, 8 * loaded.size)
    if loaded.dtype.kind not in "biuf":
        raise InputError(f"{name} must hold real numbers, got dtype {loaded.dtype}; convert it with .astype('float32')")
    return torch.from_numpy(np.array(loaded, dtype=np.float64, order="C"))


def _read_tensor(name: str, path: Path) -> Tensor:
    if zipfile.is_zipfile(path):
        check_archive(name, path)
    loaded = torch.load(path, weights_only=True, map_location="cpu")
    if isinstance(loaded, dict):
        loaded = loaded[_only(name, list(loaded))]
    if not isinstance(loaded, Tensor):
        raise InputError(f"{name} must hold a tensor, got {type(loaded).__name__}; save it with torch.save(tensor)")
    if loaded.is_complex() or loaded.is_quantized or loaded.layout != torch.strided:
        kind = f"dtype {loaded.dtype}, layout {loaded.layout}"
        raise InputError(f"{name} must hold dense real numbers, got {kind}; convert it with .to_dense() and .float()")
    check_size(name, 8 * loaded.numel())  # an expanded tensor is small in the file only
    return loaded.detach()


def _only(name: str, found: list[Any]) -> Any:
    if len(found) != 1:
        listed = ", ".join(map(str, found)) or "none"
        raise InputError(f"{name} must hold exactly one array, got {len(found)}: {listed}; save the wanted one alone")
    return found[0]


@dataclasses.dataclass(frozen=True)
class Sample:
    """Draws of a retrieval task; rows of `queries` and `targets` are first all half-masked ones, then all noisy ones.

    Attributes:
        keys: stored patterns, (*draws, M, D).
        queries: what is presented, (*draws, N, D), N even.
        targets: the patterns that the queries were made from, (*draws, N, D).
        usable: (*draws, M), patterns without NaN or infinity; only these are stored.
    """

    keys: Tensor
    queries: Tensor
    targets: Tensor
    usable: Tensor

    @property
    def finite(self) -> Tensor:
        """(*draws, N), queries without NaN or infinity."""
        return self.queries.isfinite().all(-1)

    def first(self) -> Sample:
        """The first draw alone."""
        return Sample(self.keys[0], self.queries[0], self.targets[0], self.usable[0])

    def limited(self, count: int) -> Sample:
        """The first `count` queries of each task."""
        half = self.queries.shape[-2] // 2
        rows = torch.cat([torch.arange(count), half + torch.arange(count)]).to(self.queries.device)
        queries_, targets = (t.index_select(-2, rows) for t in (self.queries, self.targets))
        return dataclasses.replace(self, queries=queries_, targets=targets)

    def to(self, device: torch.device, dtype: torch.dtype) -> Sample:
        """The sample as the solvers see it; what overflows in `dtype` is not usable."""
        keys, queries, targets = (t.to(device, dtype) for t in (self.keys, self.queries, self.targets))
        return Sample(keys, queries, targets, keys.isfinite().all(-1))


def draw(data: Tensor, *, patterns: int, queries: int, noise: float, draws: int, seed: int) -> Sample:
    """`draws` independent choices of `patterns` rows of `data`, with `queries` queries of each task.

    Half-masked: the second half of the entries (for an image the lower half) is 0. Noisy: Gaussian noise of standard
    deviation `noise` is added.
    """
    generator = torch.Generator().manual_seed(seed)
    keys = torch.stack([data[torch.randperm(len(data), generator=generator)[:patterns]] for _ in range(draws)])
    targets = keys[:, :queries]
    masked = targets.clone()
    masked[..., (data.shape[1] + 1) // 2 :] = 0
    noisy = targets + noise * torch.randn(targets.shape, generator=generator, dtype=targets.dtype)
    return Sample(keys, torch.cat([masked, noisy], -2), torch.cat([targets, targets], -2), keys.isfinite().all(-1))


def noise_of(data: Tensor | None) -> float:
    """The noise for a user's data, or for the digits (None)."""
    if data is None:
        return NOISE
    finite = data[data.isfinite()]
    return NOISE * float(finite.std(correction=0)) if finite.numel() else NOISE

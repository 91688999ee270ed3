"""Checkpoints of a training: written whole or not at all, read without running code, resumed bit for bit."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from .. import _validate

_FORMAT = 2
_KEYS = {"format", "step", "model", "optimizer", "scheduler", "random", "generators", "extra"}
# Format 1 had no "made".
_FORMATS = {1: _KEYS, _FORMAT: _KEYS | {"made"}}


class Stateful(Protocol):
    """The interface that optimizers and learning rate schedulers have in common."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Stateful,
    scheduler: Stateful | None = None,
    step: int,
    generators: Mapping[str, torch.Generator] | None = None,
    extra: Any = None,
) -> None:
    """Write the whole state of a training to one file, which replaces the old one at once.

    The file is written beside `path` under the name of `path` with ".partial", forced to the disk, read back, and put
    in the place of `path`. A process that is killed, or a disk that is full, leaves the old checkpoint.

    Args:
        path: of the file. Its folder exists.
        model: whose state dict is saved.
        optimizer: whose state dict is saved.
        scheduler: of the learning rate, if there is one.
        step: number of updates so far, >= 0.
        generators: by name, the generators of data and masks. The states of torch's own generators, of the CPU and of
            CUDA if it is in use, are always saved. Those of numpy and of Python's `random` are not.
        extra: numbers, strings, tensors, and dicts and lists of them, such as the settings of the run.

    Raises:
        TypeError: `extra`, or a state dict, contains objects that only running code could read back.
        OSError: the file cannot be written. In both cases the old checkpoint stays.

    Examples:
        >>> import tempfile, torch
        >>> from implicit_attention.models import load_checkpoint, save_checkpoint
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(f"{folder}/last.pt", model=model, optimizer=optimizer, step=7, extra={"dim": 2})
        ...     load_checkpoint(f"{folder}/last.pt", model=model, optimizer=optimizer)
        (7, {'dim': 2})

    Not for several processes at once, which would write one file: let one of them save.
    """
    step = _validate.check_integer("step", step, low=0)
    generators = _checked(generators)
    path = Path(path).resolve()  # a link stays one
    contents = {
        "format": _FORMAT,
        "made": _kinds(model, optimizer, scheduler),
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "random": {"cpu": torch.get_rng_state(), "cuda": _cuda_states()},
        "generators": {name: generator.get_state() for name, generator in generators.items()},
        "extra": extra,
    }
    partial = path.with_name(path.name + ".partial")
    checksums = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(True)  # `_loaded` compares them
        with partial.open("wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
        _read_back(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        torch.serialization.set_crc32_options(checksums)
    if os.name == "posix":
        # The new name is on the disk once its folder is.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Stateful | None = None,
    scheduler: Stateful | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
) -> tuple[int, Any]:
    """Put a training back to where it was saved; (step, extra) of that time.

    With an optimizer the training goes on as if it had never stopped, to the bit where its operations are
    deterministic: torch's own generators are put back as well. Without one the weights alone are read.

    Args:
        path: of a file by `save_checkpoint`.
        model: gets the weights, on the devices where its parameters are.
        optimizer: of the kind of the saved one, with the same parameters in the same groups and order.
        scheduler: of the kind of the saved one, or None if none was saved; beside an optimizer only.
        generators: with the names that were saved; beside an optimizer only.

    Returns:
        The number of updates, and `extra`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is truncated or no checkpoint, the model has other parameters, or optimizer, scheduler and
            generators are others than the saved ones. Nothing is changed then. Files from before kinds were saved show
            them by the options of parameter groups alone, which `Adam` and `AdamW` share.

    Warns: where states of CUDA generators were saved for more devices than there are.

    Examples:
        >>> import tempfile, torch
        >>> from implicit_attention.models import load_checkpoint, save_checkpoint
        >>> model, masks = torch.nn.Linear(2, 1), torch.Generator()
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> parts = {"model": model, "optimizer": optimizer, "generators": {"masks": masks}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(f"{folder}/last.pt", **parts, step=7)
        ...     drawn = torch.rand(2, generator=masks)
        ...     step, _ = load_checkpoint(f"{folder}/last.pt", **parts)
        >>> step, torch.equal(torch.rand(2, generator=masks), drawn)
        (7, True)

    Not for weights of other libraries: use `ImageEnergyTransformer.from_reference`.
    """
    generators, path = _checked(generators), Path(path)
    saved = _loaded(path)
    _check_fits(saved["model"], model, path)
    if optimizer is None:
        passed = [name for name, value in (("scheduler", scheduler), ("generators", generators or None)) if value]
        _validate.require(not passed, "optimizer", f"be given with `{'` and `'.join(passed)}`, to resume", None)
    else:
        required = "be None, as none was saved" if saved["scheduler"] is None else "be given, as one was saved"
        fits, received = (scheduler is None) == (saved["scheduler"] is None), "one" if scheduler is not None else None
        _validate.require(fits, "scheduler", required, received)
        required = f"have the names that were saved, {sorted(saved['generators'])}"
        _validate.require(set(generators) == set(saved["generators"]), "generators", required, sorted(generators))
        _check_kinds(saved, _kinds(model, optimizer, scheduler), optimizer)
        # Only an optimizer checks a state before it changes.
        optimizer.load_state_dict(saved["optimizer"])
        if scheduler is not None:
            scheduler.load_state_dict(saved["scheduler"])
    model.load_state_dict(saved["model"])
    if optimizer is not None:
        for name, generator in generators.items():
            generator.set_state(saved["generators"][name])
        _restore_random(saved["random"])
    return saved["step"], saved["extra"]


def _checked(generators: Any) -> dict[str, torch.Generator]:
    generators = {} if generators is None else generators
    if not isinstance(generators, Mapping) or not all(isinstance(g, torch.Generator) for g in generators.values()):
        required, remedy = "map names to torch.Generator", "for example {'data': generator}"
        raise TypeError(_validate.message("generators", required, type(generators).__name__, remedy))
    return dict(generators)


def _cuda_states() -> list[torch.Tensor]:
    # Reading the states would start CUDA in a process that does not use it.
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def _restore_random(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    present = torch.cuda.device_count() if states["cuda"] else 0
    if len(states["cuda"]) > present:
        counts = f"generators of {len(states['cuda'])} CUDA devices were saved, and {present} are here"
        warnings.warn(f"{counts}: the run goes on with other random numbers there", stacklevel=3)
    for device, state in enumerate(states["cuda"][:present]):
        torch.cuda.set_rng_state(state, device)


def _read_back(partial: Path) -> None:
    """Raise where the file could not be read later. Its tensors are mapped and not read."""
    try:
        torch.load(partial, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:
        required = "be numbers, strings, tensors, and dicts and lists of them, in `extra` and in all state dicts"
        remedy = "leave out or convert what the cause names"
        raise TypeError(_validate.message("extra", required, type(error).__name__, remedy)) from error


def _loaded(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(_validate.message("path", "be a checkpoint that exists", str(path)))
    required, remedy = "be a whole checkpoint by save_checkpoint", "use an earlier one"
    try:
        with zipfile.ZipFile(path) as file:  # torch itself compares no checksums
            if (member := file.testzip()) is not None:
                raise ValueError(f"the checksum of {member} is another than that of its bytes")
        saved = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged file may raise anything
        received = f"{path.name}, which is truncated, damaged or another kind of file"
        raise ValueError(_validate.message("path", required, received, remedy)) from error
    known = isinstance(saved, dict) and any(
        saved.keys() == keys and saved["format"] == number for number, keys in _FORMATS.items()
    )
    _validate.require(known, "path", required, f"{path.name}, which holds something else", remedy)
    return saved  # type: ignore[no-any-return]


def _check_fits(saved: dict[str, Any], model: nn.Module, path: Path) -> None:
    """Refuse weights of another model before any of them is copied."""
    shapes, wanted = _shapes(saved), _shapes(model.state_dict())
    differing = sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name))
    shown = ", ".join(f"{name} {shapes.get(name)} instead of {wanted.get(name)}" for name in differing[:3])
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    required = f"have the parameters in {path.name}"
    _validate.require(not differing, "model", required, f"{shown}{more} (saved, model)", "make it with the same sizes")


def _shapes(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}


def _kinds(model: nn.Module, optimizer: Stateful, scheduler: Stateful | None) -> dict[str, Any]:
    """The kinds of optimizer and scheduler, and the parameters of each group of the optimizer."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = getattr(optimizer, "param_groups", [])
    return {
        "optimizer": type(optimizer).__name__,
        "scheduler": type(scheduler).__name__,
        "parameters": [[names.get(id(parameter)) for parameter in group["params"]] for group in groups],
    }


def _check_kinds(saved: dict[str, Any], kinds: dict[str, Any], optimizer: Stateful) -> None:
    """Refuse states of other kinds or parameters, which optimizers and schedulers load without an error."""
    remedy = "make it as it was made for the saved run"
    if "made" in saved:
        for name in ("optimizer", "scheduler"):
            required = f"be {saved['made'][name]}, as the saved one was"
            _validate.require(kinds[name] == saved["made"][name], name, required, kinds[name], remedy)
        own, wanted = _places(kinds["parameters"]), _places(saved["made"]["parameters"])
        for place in sorted(own.keys() | wanted.keys()):
            expected = f"{wanted.get(place)!r} as number {place[1]} of group {place[0]}"
            required = f"have the parameters that were saved, in their order: {expected}"
            fits = own.get(place) == wanted.get(place)
            _validate.require(fits, "optimizer", required, repr(own.get(place)), remedy)
    groups = [state.get("param_groups", []) for state in (saved["optimizer"], optimizer.state_dict())]
    for old, new in zip(*groups, strict=False):
        # New versions of torch add options, which then have their defaults.
        required = f"have groups with the options {sorted(old)}"
        _validate.require(old.keys() <= new.keys(), "optimizer", required, sorted(new), remedy)


def _places(parameters: list[list[str | None]]) -> dict[tuple[int, int], str | None]:
    return {(group, place): name for group, names in enumerate(parameters) for place, name in enumerate(names)}

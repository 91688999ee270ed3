"""The weights of public Energy Transformers, read from a mapping or a file and converted to our layout."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .. import _validate

Layout: TypeAlias = Literal["npz", "tutorial"]

#: The names of gain and shift of the layer norm, in which the layouts differ.
_NORM = {"npz": ("LNORM_gamma", "LNORM_bias"), "tutorial": ("gamma", "delta")}
_SHAPES = {
    "npz": "Wq, Wk (H, Y, D), Xi (D, M), LNORM_gamma (), LNORM_bias (D,)",
    "tutorial": "Wq, Wk (H, D, Y), Xi (M, D), gamma (), delta (D,)",
}
#: The arrays of an image model beside those of its block.
IMAGE_ARRAYS = ("Wenc", "Benc", "Wdec", "Bdec", "CLS_token", "MASK_token", "POS_embed")


def read_reference(
    weights: Mapping[str, Any] | str | os.PathLike[str], layout: Layout | None = None
) -> dict[str, Tensor]:
    """The arrays of a public Energy Transformer as tensors of our layout.

    Args:
        weights: arrays or tensors by name, or the path of a .npz or .safetensors file. Layout "npz": Wq, Wk (H, Y, D),
            Xi (D, M), LNORM_gamma (), LNORM_bias (D,). Layout "tutorial": Wq, Wk (H, D, Y), Xi (M, D), gamma (),
            delta (D,).
        layout: None derives it from names and shapes, and refuses D = Y, which both fit.

    Returns:
        "w_query", "w_key" (H, Y, D), "memories" (M, D), "gamma" (), "delta" (D,), all of the dtype of Wq; and those of
        the arrays of an image model (`IMAGE_ARRAYS`) in the file, by their own names, as they are. All are copies.

    Raises:
        TypeError, ValueError: a file that holds pickles, or is of another kind; arrays that are missing, unknown or not
            floating-point; gamma <= 0; shapes that contradict each other; names or shapes of the other layout.

    Not for weights that this library saved: use `load_state_dict`.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers.reference_weights import read_reference
        >>> arrays = {"Wq": torch.ones(2, 3, 5), "Wk": torch.ones(2, 3, 5), "Xi": torch.ones(5, 7)}
        >>> read = read_reference({**arrays, "LNORM_gamma": torch.tensor(1.0), "LNORM_bias": torch.zeros(5)})
        >>> read["w_query"].shape, read["memories"].shape
        (torch.Size([2, 3, 5]), torch.Size([7, 5]))
    """
    _validate.check_choice("layout", layout, ("npz", "tutorial", None))
    _validate.check_instance("weights", weights, (Mapping, str, os.PathLike), "be a mapping or a path")
    arrays = weights if isinstance(weights, Mapping) else _loaded(Path(weights))
    named = _named(arrays)
    tensors = {name: _tensor(name, array) for name, array in arrays.items()}
    block = {name: tensors.pop(name) for name in ("Wq", "Wk", "Xi", *_NORM[named])}
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in block.items())
    w_query, w_key, memories, gamma, delta = block.values()
    one = w_query.ndim == 3 and memories.ndim == 2 and delta.ndim == 1 and gamma.numel() == 1
    contradicts = f"have shapes that fit together: {_SHAPES[named]}"
    _validate.require(one and w_key.shape == w_query.shape, "weights", contradicts, shapes)
    width = delta.shape[0]
    fits = {
        "npz": w_query.shape[2] == width and memories.shape[0] == width,
        "tutorial": w_query.shape[1] == width and memories.shape[1] == width,
    }
    if layout is None:
        required = f"be given where tokens are as wide as heads, D = Y = {width}: the shapes fit both"
        both = w_query.shape[1] == w_query.shape[2]
        _validate.require(not both, "layout", required, "None", f"pass layout={named!r}, as the names are, if it is so")
        layout = named
    other: Layout = "tutorial" if layout == "npz" else "npz"
    remedy = f"pass layout={other!r}"
    _validate.require(named == layout, "weights", f"be in the layout {layout!r}", f"names of {other!r}", remedy)
    remedy = f"swap the last two axes of Wq and Wk, and the axes of Xi, or name the norm {', '.join(_NORM[other])}"
    swapped = fits[other] and not fits[layout]
    required = f"have shapes of the layout {layout!r}, as the names say: {_SHAPES[layout]}"
    _validate.require(not swapped, "weights", required, f"shapes of {other!r}, {shapes}", remedy)
    _validate.require(fits[layout], "weights", contradicts, shapes)
    _validate.check_same_kind((name, tensor) for name, tensor in block.items() if tensor is not gamma)
    gamma = gamma.reshape(()).to(w_query.dtype)
    _validate.check_number(_NORM[named][0], gamma.item(), low=0.0, open_low=True)
    if layout == "npz":
        memories = memories.mT
    else:
        w_query, w_key = w_query.mT, w_key.mT
    block = {"w_query": w_query, "w_key": w_key, "memories": memories, "gamma": gamma, "delta": delta}
    return {**{name: tensor.contiguous() for name, tensor in block.items()}, **tensors}


def _loaded(path: Path) -> dict[str, Any]:
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            try:
                return {name: file[name] for name in file.files}
            except ValueError as error:
                required, remedy = "hold arrays of numbers", "save it again without objects"
                raise ValueError(_validate.message("weights", required, f"{path.name} with pickles", remedy)) from error
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ModuleNotFoundError as error:
            raise ImportError("reading .safetensors files needs safetensors: pip install safetensors") from error
        return load_file(path)
    required = "be a mapping, or the path of a .npz or .safetensors file"
    raise ValueError(_validate.message("weights", required, path.name))


def _named(arrays: Mapping[str, Any]) -> Layout:
    """The layout with these names."""
    layouts: list[Layout] = [layout for layout in ("npz", "tutorial") if set(_NORM[layout]) & set(arrays)]
    names = ", ".join(map(str, sorted(arrays))) or "none"
    required = f"hold either {' and '.join(_NORM['npz'])} or {' and '.join(_NORM['tutorial'])}"
    _validate.require(len(layouts) == 1, "weights", required, f"the arrays {names}")
    needed = ("Wq", "Wk", "Xi", *_NORM[layouts[0]])
    missing = [name for name in needed if name not in arrays]
    _validate.require(not missing, "weights", f"hold {', '.join(needed)}", f"none called {', '.join(missing)}")
    unknown = sorted(set(arrays) - set(needed) - set(IMAGE_ARRAYS))
    required = f"hold no arrays but {', '.join(needed)} and those of an image model, {', '.join(IMAGE_ARRAYS)}"
    _validate.require(not unknown, "weights", required, ", ".join(map(str, unknown)), "leave them out")
    return layouts[0]


def _tensor(name: str, array: Any) -> Tensor:
    """A copy of an array as a tensor of numbers."""
    if isinstance(array, Tensor):
        tensor = array.detach().clone()
    else:
        array = np.asarray(array)
        if array.dtype.kind not in "fiu":
            required, remedy = "hold real numbers that numpy knows", "convert it to float32"
            raise TypeError(_validate.message(name, required, array.dtype, remedy))
        tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))
    _validate.check_float_tensor(name, tensor)
    return tensor

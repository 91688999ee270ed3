"""Weights of public Energy Transformers: both layouts, files, and what is refused."""

import math

import numpy as np
import pytest
import torch

from implicit_attention import EnergyTransformer, Picard
from implicit_attention.layers.reference_weights import read_reference
from implicit_attention.testing.numerics import random

H, Y, D, M = 2, 3, 5, 7
GAMMA = 1.3


def arrays(layout, *, width=Y, dtype=np.float64, memories=M):
    """Weights of one model, in a layout."""
    w_query, w_key, xi = (
        random(*s, seed=i).numpy() for i, s in enumerate(((H, width, D), (H, width, D), (memories, D)))
    )
    norm = {"npz": ("LNORM_gamma", "LNORM_bias"), "tutorial": ("gamma", "delta")}[layout]
    if layout == "npz":
        xi = xi.T
    else:
        w_query, w_key = (w.transpose(0, 2, 1) for w in (w_query, w_key))
    found = {"Wq": w_query, "Wk": w_key, "Xi": xi, norm[0]: np.array(GAMMA), norm[1]: random(D, seed=3).numpy()}
    return {name: array.astype(dtype) for name, array in found.items()}


def image_arrays():
    sizes = {"Wenc": (4, D), "Benc": (D,), "Wdec": (D, 4), "Bdec": (4,), "CLS_token": (D,), "MASK_token": (D,),
             "POS_embed": (10, D)}  # fmt: skip
    return {name: random(*size, seed=9).numpy() for name, size in sizes.items()}


def written(made, layout):
    """The arrays of a layer, in a layout."""
    norm = {"npz": ("LNORM_gamma", "LNORM_bias"), "tutorial": ("gamma", "delta")}[layout]
    swap = (lambda t: t) if layout == "npz" else (lambda t: t.mT)
    memories = made.memories.mT if layout == "npz" else made.memories
    norm_arrays = {norm[0]: made.norm.gamma, norm[1]: made.norm.delta}
    return {"Wq": swap(made.w_query), "Wk": swap(made.w_key), "Xi": memories, **norm_arrays}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("layout", ["npz", "tutorial"])
def test_both_layouts_are_the_same_weights(layout, named):
    read = read_reference(arrays(layout), layout if named else None)
    assert set(read) == {"w_query", "w_key", "memories", "gamma", "delta"}
    for name, seed, shape in (
        ("w_query", 0, (H, Y, D)),
        ("w_key", 1, (H, Y, D)),
        ("memories", 2, (M, D)),
        ("delta", 3, (D,)),
    ):
        assert torch.equal(read[name], random(*shape, seed=seed))
        assert read[name].is_contiguous()
    assert float(read["gamma"]) == GAMMA


@pytest.mark.parametrize("layout", ["npz", "tutorial"])
def test_the_energy_is_that_of_the_published_formula(layout):
    weights = arrays(layout)
    made, x = EnergyTransformer.from_reference(weights, mode="published"), random(4, D, seed=4)
    assert (made.dim, made.heads, made.head_dim, len(made.memories)) == (D, H, Y, M)
    assert float(made.norm.gamma.detach()) == pytest.approx(GAMMA, abs=1e-15)
    # As the sources write it, in numpy.
    centred = x.numpy() - x.numpy().mean(-1, keepdims=True)
    gamma, delta = (
        weights[name] for name in (("LNORM_gamma", "LNORM_bias") if layout == "npz" else ("gamma", "delta"))
    )
    g = gamma * centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) + delta
    how = ("nd,hyd->nhy", "nd,dm->nm") if layout == "npz" else ("nd,hdy->nhy", "nd,md->nm")
    q, k = (np.einsum(how[0], g, weights[name]) for name in ("Wq", "Wk"))
    beta = 1 / math.sqrt(Y)
    attention = -(1 / beta) * np.log(np.exp(beta * np.einsum("qhy,khy->hqk", q, k)).sum(-1)).sum()
    memory = -0.5 * (np.maximum(np.einsum(how[1], g, weights["Xi"]), 0) ** 2).sum()
    _, energies = made(x, return_energies=True)
    assert float(energies[0]) == pytest.approx(attention + memory, rel=1e-12)


@pytest.mark.parametrize("layout", ["npz", "tutorial"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_go_round(layout, dtype):
    torch.manual_seed(1)
    made = EnergyTransformer(D, H, Y, M, dtype=dtype, exclude_self=True, solver=Picard())
    with torch.no_grad():
        made.norm.set_gamma(0.37)
        made.norm.delta.normal_()
    given = written(made, layout)
    twin = EnergyTransformer.from_reference(given, layout, exclude_self=True, solver=Picard())
    x = random(2, 3, D, dtype=dtype)
    for name, parameter in made.named_parameters():
        found = dict(twin.named_parameters())[name]
        assert found.dtype == dtype
        assert found.requires_grad
        if name != "norm.raw_gamma":
            assert torch.equal(found, parameter)
            assert found.data_ptr() != parameter.data_ptr()
    torch.testing.assert_close(twin.norm.gamma, made.norm.gamma, rtol=4 * torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(twin(x), made(x))
    wide = EnergyTransformer.from_reference(given, layout, dtype=torch.float32, beta="learned", memory="softmax")
    assert wide.w_query.dtype == torch.float32
    assert wide.memory == "softmax"


@pytest.mark.parametrize("layout", ["npz", "tutorial"])
@pytest.mark.parametrize("kind", ["npz", "safetensors", "compressed"])
def test_files_are_read(layout, kind, tmp_path):
    given = {**arrays(layout, dtype=np.float32), **image_arrays()}
    if kind == "safetensors":
        save = pytest.importorskip("safetensors.torch").save_file
        path = tmp_path / "weights.safetensors"
        save({name: torch.tensor(array).contiguous() for name, array in given.items()}, path)
    else:
        path = tmp_path / "weights.npz"
        (np.savez if kind == "npz" else np.savez_compressed)(path, **given)
    found, expected = read_reference(str(path), layout), read_reference(given)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert set(image_arrays()) < set(found)
    assert found["POS_embed"].shape == (10, D)
    made = EnergyTransformer.from_reference(path)
    assert torch.equal(made.w_query.detach(), expected["w_query"])
    assert made.w_query.dtype == torch.float32


def test_arrays_of_any_kind_are_copied():
    given = arrays("npz", dtype=np.float32)
    swapped = {name: array.astype(array.dtype.newbyteorder()) for name, array in given.items()}
    frozen = {name: array.copy() for name, array in given.items()}
    for array in frozen.values():
        array.flags.writeable = False
    lists = {name: array.astype(np.float64).tolist() for name, array in given.items()}
    learned = {name: torch.tensor(array, requires_grad=True) for name, array in given.items()}
    expected = read_reference(given)
    for other in (swapped, frozen, lists, learned, {**given, "LNORM_gamma": np.array([GAMMA], dtype=np.float32)}):
        found = read_reference(other)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], check_dtype=other is not lists)
            assert not tensor.requires_grad
    own = {name: torch.tensor(array) for name, array in given.items()}
    for source in (given, own):
        read_reference(source)["w_query"].zero_()
        assert np.array_equal(source["Wq"], random(H, Y, D).numpy().astype(np.float32))


def test_what_holds_no_numbers_is_refused(tmp_path):
    path = tmp_path / "pickled.npz"
    np.savez(path, **{**arrays("npz"), "Wq": np.array([{"a": 1}], dtype=object)})
    with pytest.raises(ValueError, match=r"hold arrays of numbers, got pickled.npz with pickles"):
        read_reference(path)


@pytest.mark.parametrize("layout", ["npz", "tutorial"])
def test_named_layouts_take_heads_as_wide_as_tokens(layout):
    made = EnergyTransformer.from_reference(arrays(layout, width=D), layout)
    assert torch.equal(made.w_key.detach(), random(H, D, D, seed=1))
    square = read_reference(arrays(layout, width=D, memories=D), layout)
    assert torch.equal(square["memories"], random(D, D, seed=2))

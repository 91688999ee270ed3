"""Weights of the public image model: its predictions by loops over its arrays."""

import numpy as np
import pytest
import torch
from image_cases import cut, images

from implicit_attention import EnergyTransformer
from implicit_attention.models import ImageEnergyTransformer


def reference(dim=5, seed=0, width=12, count=6):
    rng = np.random.default_rng(seed)
    made = {name: rng.normal(size=(2, 3, dim)) for name in ("Wq", "Wk")}
    made |= {"Xi": rng.normal(size=(dim, 7)), "LNORM_gamma": np.array(1.3), "LNORM_bias": rng.normal(size=dim)}
    made |= {"Wenc": rng.normal(size=(width, dim)), "Benc": rng.normal(size=dim)}
    made |= {"Wdec": rng.normal(size=(dim, width)), "Bdec": rng.normal(size=width)}
    made |= {"CLS_token": rng.normal(size=dim), "MASK_token": rng.normal(size=dim)}
    return {**made, "POS_embed": rng.normal(size=(1 + count, dim))}


def by_the_arrays(arrays, pictures, masked, steps=12, step_size=0.1):
    """The published model as loops over numpy arrays, one image."""
    a = arrays
    tokens = []
    for patch, hidden in zip(cut(pictures, 2).numpy(), masked, strict=True):
        tokens.append(a["MASK_token"].reshape(-1) if hidden else patch @ a["Wenc"] + a["Benc"])
    x = np.stack([a["CLS_token"].reshape(-1), *tokens]) + a["POS_embed"]

    def norm(x):
        centred = x - x.mean(-1, keepdims=True)
        return a["LNORM_gamma"] * centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) + a["LNORM_bias"]

    for _ in range(steps):
        g = norm(x)
        pull = np.maximum(g @ a["Xi"], 0) @ a["Xi"].T
        for wq, wk in zip(a["Wq"], a["Wk"], strict=True):
            q, k = g @ wq.T, g @ wk.T
            p = np.exp(q @ k.T / 3**0.5)
            p = p / p.sum(-1, keepdims=True)
            pull = pull + p @ k @ wq + p.T @ q @ wk
        x = x + step_size * pull
    return torch.from_numpy((norm(x) @ a["Wdec"] + a["Bdec"])[1:])


@pytest.mark.parametrize("file", [None, ".npz", ".safetensors"])
@pytest.mark.parametrize("flat", [True, False])
def test_weights_of_the_public_model_give_its_predictions(tmp_path, file, flat):
    arrays = reference()
    if not flat:
        arrays |= {name: arrays[name][None] for name in ("CLS_token", "MASK_token")}
    given = arrays
    if file == ".npz":
        given = tmp_path / "weights.npz"
        np.savez(given, **arrays)
    elif file == ".safetensors":
        from safetensors.torch import save_file

        given = tmp_path / "weights.safetensors"
        save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, given)
    made = ImageEnergyTransformer.from_reference(given, image_size=(4, 6), patch_size=2, mode="published")
    assert made.embedding.channels == 3
    assert made.decoder.weight.dtype == torch.float64
    masked = torch.tensor([True, False, False, True, False, False])
    pictures = images()
    torch.testing.assert_close(made(pictures, masked), by_the_arrays(arrays, pictures, masked), rtol=1e-10, atol=1e-10)


def test_weights_as_wide_as_patches_multiply_from_the_right():
    """C * patch_size^2 = D, as published (768): no shape tells which side they multiply from."""
    arrays = reference(dim=12, width=12)
    made = ImageEnergyTransformer.from_reference(arrays, image_size=(4, 6), patch_size=2, mode="published", steps=2)
    masked, pictures = torch.tensor([True, False, False, True, False, False]), images()
    torch.testing.assert_close(
        made(pictures, masked), by_the_arrays(arrays, pictures, masked, 2), rtol=1e-10, atol=1e-10
    )


def test_the_block_alone_is_read_beside_image_arrays():
    arrays = reference()
    block = EnergyTransformer.from_reference(arrays, mode="published")
    made = ImageEnergyTransformer.from_reference(arrays, image_size=(4, 6), patch_size=2, mode="published")
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    assert torch.equal(block(x), made.block(x))

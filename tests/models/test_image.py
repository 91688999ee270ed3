"""Image models: patches, what a mask hides, the parts that are shared, and that they learn."""

import copy

import numpy as np
import pytest
import torch
from image_cases import MODES, cut, images, model
from torch.nn import functional as F

from implicit_attention import Picard
from implicit_attention.models import ImageClassifier, scatter_mask

LAYOUTS = {
    "contiguous": lambda x: x.clone(),
    "channels last": lambda x: x.clone(memory_format=torch.channels_last),
    "height and width swapped": lambda x: x.mT.clone().mT,
    "batch last": lambda x: x.permute(1, 2, 3, 0).clone().permute(3, 0, 1, 2),
    "every other column": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "one channel expanded": lambda x: x[:, :1].expand(x.shape),
    "one image expanded": lambda x: x[:1].expand(x.shape),
    "one number": lambda x: x[:1, :1, :1, :1].expand(x.shape),
    "a window": lambda x: F.pad(x, (1, 2, 3, 1))[..., 3:-1, 1:-2],
    "numpy, from height, width, channels": lambda x: torch.from_numpy(x.numpy().transpose(0, 2, 3, 1).copy()).permute(
        0, 3, 1, 2
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_patches_of_every_layout_are_the_slices_and_go_back(layout, dtype):
    made, pictures = model(dtype=dtype), layout(images(2)).to(dtype)
    patches = made.patches(pictures)
    assert patches.shape == (2, 6, 12)
    assert torch.equal(patches, cut(pictures, 2))
    assert torch.equal(made.images(patches), pictures)
    assert torch.equal(made.images(patches.mT.clone().mT), pictures)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_predictions_and_gradients_do_not_depend_on_the_layout(layout):
    made = model(scale=0.5)
    masked = torch.tensor([[True, False] * 3, [False, False, True] * 2])
    strided = layout(images(2)).requires_grad_()
    dense = strided.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    out, expected = made(strided, masked), made(dense, masked)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(out.shape, dtype=out.dtype)
    (a,) = torch.autograd.grad((out * weights).sum(), strided)
    (b,) = torch.autograd.grad((expected * weights).sum(), dense)
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("batch", [(), (1,), (2, 3), (0,)])
@pytest.mark.parametrize("mode", MODES)
def test_any_leading_axes(batch, mode):
    made, pictures = model(mode=mode, scale=0.4), images(*batch)
    masked = torch.rand(*batch, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    out = made(pictures, masked)
    assert out.shape == (*batch, 6, 12)
    assert made.reconstruct(pictures, masked).shape == pictures.shape
    for index in np.ndindex(*batch):
        torch.testing.assert_close(out[index], made(pictures[index], masked[index]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_the_model_is_its_parts_in_their_order(mode):
    """Encoder, MASK where masked, CLS in front, positions, block, layer norm once, decoder, CLS dropped."""
    made = model(mode=mode, scale=0.5)
    with torch.no_grad():
        made.block.norm.delta.normal_()
        made.embedding.positions.normal_()
        made.embedding.cls_token.normal_()
    pictures = images(2)
    masked = torch.tensor([[True, False, False, True, False, False], [False] * 6])
    embedding = made.embedding
    tokens = cut(pictures, 2) @ embedding.encoder.weight.T + embedding.encoder.bias
    tokens[0, 0] = tokens[0, 3] = made.mask_token
    tokens = torch.cat([embedding.cls_token.expand(2, 1, 5), tokens], 1) + embedding.positions
    x = tokens

    def norm(x):
        return F.layer_norm(x, (5,)) + made.block.norm.delta

    def pull(g):
        q, k = (torch.einsum("hyd,bnd->bhny", w, g) for w in (made.block.w_query, made.block.w_key))
        p = (q @ k.mT / 3**0.5).softmax(-1)
        attention = (p @ k).transpose(1, 2).flatten(-2) @ made.block.w_query.flatten(0, 1)
        attention = attention + (p.mT @ q).transpose(1, 2).flatten(-2) @ made.block.w_key.flatten(0, 1)
        return attention + (g @ made.block.memories.T).relu() @ made.block.memories

    for _ in range(12 if mode == "published" else 400):
        x = x + 0.1 * pull(norm(x)) if mode == "published" else tokens + pull(norm(x))
    expected = (norm(x) @ made.decoder.weight.T + made.decoder.bias)[:, 1:]
    torch.testing.assert_close(made(pictures, masked), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_masked_pixels_are_not_read_to_the_bit(mode):
    made, pictures = model(mode=mode, scale=0.5), images(2)
    masked = torch.tensor([[True, False, False, True, False, False], [False, True, True, True, True, True]])

    def changed(value):
        return made.images(made.patches(pictures).masked_fill(masked[..., None], value))

    def gradients(given):
        given = given.clone().requires_grad_()
        out = made(given, masked)
        return out, torch.autograd.grad(out.square().sum(), [given, *made.parameters()])

    out, grads = gradients(pictures)
    assert all(bool(g.isfinite().all()) for g in grads)
    assert not made.patches(grads[0])[masked].any()
    assert made.patches(grads[0])[~masked].all()
    for value in (0.0, 1e300, float("inf"), float("nan")):
        other, others = gradients(changed(value))
        assert torch.equal(out, other)
        assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
    # Were the encoder to read them, this would be seen: the visible ones are read.
    assert not torch.equal(made(pictures + 1e-3, masked), out)


def test_a_nan_that_is_visible_stays_in_its_image():
    made, pictures = model(scale=0.5, on_failure="ignore"), images(3)
    masked = torch.zeros(3, 6, dtype=torch.bool)
    masked[:, 0] = True
    clean = made(pictures, masked)
    pictures[1, 0, -1, -1] = torch.nan
    out = made(pictures, masked)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


def test_reconstruct_keeps_visible_pixels_to_the_bit():
    made, pictures = model(scale=0.5), images(2)
    masked = torch.tensor([[True, False, False, True, False, False], [False] * 6])
    filled, patches = made.reconstruct(pictures, masked), made(pictures, masked)
    assert torch.equal(cut(filled, 2)[~masked], cut(pictures, 2)[~masked])
    assert torch.equal(cut(filled, 2)[masked], patches[masked])
    shared = masked[0]
    assert torch.equal(made.reconstruct(pictures, shared), made.reconstruct(pictures, shared.expand(2, 6)))


@pytest.mark.parametrize("mode", MODES)
def test_loss_is_the_root_mean_square_error_over_scored_pixels(mode):
    made, pictures = model(mode=mode, scale=0.5), images(2)
    masked = torch.tensor([[True, False, False, True, False, False], [False, True, True, False, True, False]])
    scored = masked.clone()
    scored[0, 1] = True
    out, patches = made(pictures, masked), cut(pictures, 2)
    for chosen, given in ((masked, None), (scored, scored)):
        wrong = [(out[b, p] - patches[b, p]).square().sum() for b in range(2) for p in range(6) if chosen[b, p]]
        expected = (sum(wrong) / (12 * len(wrong))).sqrt()
        torch.testing.assert_close(made.loss(pictures, masked, given), expected, rtol=1e-12, atol=0)
    # The published one, with zeros for the others, has another scale.
    published = ((out - patches) * scored[..., None]).square().mean().sqrt()
    ours = made.loss(pictures, masked, scored) * scored.double().mean().sqrt()
    torch.testing.assert_close(ours, published, rtol=1e-12, atol=0)


def test_loss_without_an_error_has_a_gradient_and_pixels_not_scored_have_none():
    made, pictures = model(), torch.zeros(2, 3, 4, 6, dtype=torch.float64)
    with torch.no_grad():
        made.decoder.weight.zero_()
        made.decoder.bias.zero_()
    masked = torch.tensor([True, False, False, False, False, False])
    loss = made.loss(pictures, masked)
    loss.backward()
    assert loss == 0
    assert all(bool(p.grad.isfinite().all()) for p in made.parameters())
    pictures[..., -1] = torch.nan  # a patch that is masked, and not scored
    hidden = torch.tensor([True, False, True, False, False, True])
    assert made.loss(pictures, hidden, masked) == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("classify", [False, True])
def test_gradients_reach_every_parameter(mode, classify):
    made, pictures = model(mode=mode, scale=0.5, beta="learned"), images(2)
    masked = torch.tensor([[True, False, False, True, False, False], [False] * 6])
    classifier = ImageClassifier(made, 4)
    loss = classifier(pictures).square().sum() if classify else made.loss(pictures, masked)
    loss.backward()
    parameters = dict((classifier if classify else made).named_parameters())
    assert len(parameters) == (14 if classify else 13)
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert float(parameter.grad.abs().max()) > 1e-9, name


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_differences(mode):
    made = model((2, 4), 2, 1, dim=3, mode=mode, scale=0.6, steps=3)
    pictures = images(2, size=(2, 4), channels=1).requires_grad_()
    masked = torch.tensor([[True, False], [False, True]])
    names = ["mask_token", "embedding.positions", "embedding.cls_token", "decoder.weight"]
    values = [made.get_parameter(name).detach().clone().requires_grad_() for name in names]

    def loss(pictures, *values):
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(made, given, (pictures, masked))

    assert torch.autograd.gradcheck(loss, (pictures, *values), atol=1e-6)
    if mode == "published":  # of an equilibrium the block's own tests do it, at length
        assert torch.autograd.gradgradcheck(lambda p: loss(p, *values).sum(0), (pictures,), atol=1e-5)


def test_evidence_is_returned_beside_the_patches():
    pictures, masked = images(2), torch.tensor([True] + [False] * 5)
    made = model(mode="published", scale=0.3)
    patches, energies, solution = made(pictures, masked, return_energies=True, return_solution=True)
    assert torch.equal(patches, made(pictures, masked))
    assert energies.shape == (13, 2)
    assert (energies.diff(dim=0) < 0).all()
    torch.testing.assert_close(made.decoder(made.block.norm(solution.value))[:, 1:], patches)
    made = model(scale=0.3)
    patches, solution = made(pictures, masked, return_solution=True)
    assert solution.converged.all()
    assert made.block.last_solve is not None
    rough = made(pictures, masked, solver=Picard(max_steps=1), on_failure="ignore")
    assert not torch.equal(rough, patches)


def test_scatter_masks_are_exact_random_and_repeatable():
    masked, scored = scatter_mask(2000, 10, 3, 2, torch.Generator().manual_seed(0))
    assert masked.shape == scored.shape == (2000, 10)
    assert (masked.sum(-1) == 3).all()
    assert (scored.sum(-1) == 5).all()
    assert (scored | ~masked).all()
    # Five standard deviations of a share over 2000 images.
    assert (masked.double().mean(0) - 0.3).abs().max() < 5 * (0.3 * 0.7 / 2000) ** 0.5
    assert ((scored & ~masked).double().mean(0) - 0.2).abs().max() < 5 * (0.2 * 0.8 / 2000) ** 0.5
    again = scatter_mask(2000, 10, 3, 2, torch.Generator().manual_seed(0))
    assert torch.equal(again[0], masked)
    assert torch.equal(again[1], scored)
    published = scatter_mask(1, 196)
    assert [int(m.sum()) for m in published] == [90, 100]
    assert scatter_mask(0, 4, 1, 0)[0].shape == (0, 4)
    assert scatter_mask(1, 4, 4, 0)[0].all()


def test_half_precision_autocast_and_copies():
    made, masked = model(dtype=torch.float32, scale=0.3), torch.tensor([True] + [False] * 5)
    pictures = images(2, dtype=torch.float32)
    expected = made(pictures, masked)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = made(pictures, masked)
    torch.testing.assert_close(mixed.float(), expected, rtol=0.1, atol=0.05)
    half = copy.deepcopy(made).bfloat16()
    out = half(pictures.bfloat16(), masked)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)
    other = model(dtype=torch.float32, seed=9)
    other.load_state_dict(made.state_dict())
    assert torch.equal(other(pictures, masked), expected)

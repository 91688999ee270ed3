"""What one sample of an `Equilibrium` is, what samples read of each other, and what a block may not do."""

import numpy as np
import pytest
import torch
from torch import nn

import implicit_attention as ia
from implicit_attention import Equilibrium, Implicit, OneStep, Phantom, Unrolled
from implicit_attention.linear import GMRES

TIGHT = ia.Picard(rtol=1e-13, atol=1e-13, max_steps=1000)
#: Exact where all samples that are mixed are one problem.
EXACT = Implicit(GMRES(rtol=1e-12, max_steps=500))


class Convolution(nn.Module):
    def __init__(self, axes=2):
        super().__init__()
        self.mix = (nn.Conv2d, nn.Conv3d)[axes - 2](3, 3, 3, padding=1)

    def forward(self, z, x):
        return torch.tanh(0.5 * self.mix(z) + x)


class Rows(nn.Module):
    """Reads nothing but its own entries."""

    def forward(self, z, x):
        return 0.5 * z.sin() + x


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(5, 5)

    def forward(self, z, x):
        return torch.tanh(0.5 * self.mix(z - z.mean(0)) + x)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)

    def forward(self, z, x):
        return torch.tanh(0.3 * self.norm(self.mix(z) + 2 * x) + x)


def made(block, *shape, **options):
    torch.manual_seed(0)
    return Equilibrium(block(), **options).double(), torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(8, 3), (8, 4, 3), (8, 3, 5, 5), (2, 3, 4, 4, 4)])
def test_by_default_all_axes_but_the_first_are_one_sample(shape):
    block = {4: Convolution, 5: lambda: Convolution(3)}.get(len(shape), Rows)
    layer, x = made(block, *shape)
    z = layer(x)
    assert layer.last_solve.status.shape == shape[:1]
    for i in range(2):
        torch.testing.assert_close(layer(x[i : i + 1])[0], z[i], atol=1e-10, rtol=0)


def test_a_state_of_one_axis_says_what_a_sample_is():
    layer, x = made(Rows, 6)
    with pytest.raises(ValueError, match=r"at least 2 axes.*event_ndim=1"):
        layer(x)
    assert made(Rows, 6, event_ndim=1)[0](x).shape == (6,)
    assert made(Rows, 6, event_ndim=0)[0](x).shape == (6,)


@pytest.mark.parametrize("grad", [True, False])
def test_axes_that_do_not_number_samples_are_told_at_the_first_solve(grad):
    layer, x = made(Convolution, 4, 3, 5, 5, event_ndim=2)
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=r"`event_ndim` must .*axis 1.*event_ndim=3"):
        layer(x)
    layer, x = made(Rows, 4, 3, 5, 5, event_ndim=2)
    with torch.set_grad_enabled(grad):
        layer(x)
    assert layer.last_solve.status.shape == (4, 3)


@pytest.mark.parametrize("block", [Centred, Normed])
def test_unrolled_and_implicit_gradients_agree_where_a_block_mixes_samples(block):
    found = []
    for adjoint, event_ndim in ((EXACT, 2), (Unrolled(), 1)):
        layer, x = made(block, 12, 5, solver=TIGHT, adjoint=adjoint, event_ndim=event_ndim)
        x[:6] *= 0.01
        x.requires_grad_()
        z = layer(x)
        assert bool(layer.last_solve.converged.all())
        found.append(torch.autograd.grad((z * torch.arange(5)).square().sum(), [x, *layer.parameters()]))
    for exact, *others in zip(*found, strict=True):
        for other in others:
            torch.testing.assert_close(other, exact, atol=1e-8, rtol=0)


@pytest.mark.parametrize("adjoint", [Phantom(300), OneStep()])
def test_phantom_gradients_keep_all_samples_where_a_block_mixes_them(adjoint):
    found = []
    for event_ndim in (2, 1):
        layer, x = made(Centred, 12, 5, solver=TIGHT, adjoint=adjoint, event_ndim=event_ndim)
        x.requires_grad_()
        found.append(torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()]))
    for together, apart in zip(*found, strict=True):
        torch.testing.assert_close(apart, together, atol=1e-8, rtol=0)


class Writes(nn.Module):
    def __init__(self, which):
        super().__init__()
        self.which = which

    def forward(self, z, x, shift):
        (z, x, shift)[self.which].mul_(0.9)
        return 0.5 * z.sin() + x + shift


@pytest.mark.parametrize("steps", [None, 0, 3])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_a_block_that_writes_to_what_it_is_given_is_refused_and_changes_nothing(which, steps, training):
    layer, x = made(lambda: Writes(which), 4, 5, start="input", event_ndim=1)
    layer.train(training)
    shift, kept = torch.ones_like(x), x.clone()
    if steps == 0:
        assert torch.equal(layer(x, shift, steps=0), kept)
        return
    with pytest.raises(ValueError, match=r"leave its (state|arguments) as .*in place"):
        layer(x, shift, steps=steps)
    assert torch.equal(x, kept)
    assert torch.equal(shift, torch.ones_like(x))


class WritesLater(nn.Module):
    """Works in place from its fourth evaluation on."""

    def __init__(self, which):
        super().__init__()
        self.which, self.count = which, [0]

    def forward(self, z, shifts):
        self.count[0] += 1
        if self.count[0] > 3:
            (z if self.which == "state" else shifts[1] if isinstance(shifts, tuple) else shifts).mul_(0.9)
        return 0.5 * z.sin() + (sum(shifts) if isinstance(shifts, tuple) else shifts)


@pytest.mark.parametrize("steps", [None, 8])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("which", ["state", "arguments"])
def test_a_block_that_writes_later_is_refused(which, nested, steps):
    layer, x = made(lambda: WritesLater(which), 4, 5, event_ndim=1, solver=TIGHT)
    with torch.no_grad(), pytest.raises(ValueError, match=rf"`WritesLater` must leave its {which} as .*in place"):
        layer((x, x.clone()) if nested else x, start=torch.zeros_like(x), steps=steps)


def test_a_failed_block_is_told_the_remedies_of_the_guide():
    layer, x = made(Centred, 4, 5, solver=ia.Picard(rtol=1e-9, max_steps=2))
    with pytest.warns(ia.ConvergenceWarning, match=r"raise max_steps.*steps=range.*Anderson\(history=1\)") as told:
        layer(x)
    assert not any("Anderson()" in str(warning.message) for warning in told)


class Noisy(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.own, self.numpy = kind, torch.Generator().manual_seed(0), np.random.default_rng(0)

    def forward(self, z, x):
        if self.kind == "numpy":
            noise = torch.from_numpy(self.numpy.standard_normal(tuple(z.shape)))
        elif self.kind == "global numpy":
            noise = torch.from_numpy(np.random.standard_normal(tuple(z.shape)))  # noqa: NPY002
        else:
            noise = torch.randn(z.shape, generator=self.own, dtype=z.dtype)
        return 0.5 * z.sin() + x + 0.1 * noise


@pytest.mark.parametrize("kind", ["numpy", "global numpy", "generator"])
@pytest.mark.parametrize("adjoint", [None, Unrolled()])
@pytest.mark.parametrize("shape", [(6, 5), (6, 4, 5)])
def test_numbers_of_numpy_or_of_an_own_generator_are_named(kind, adjoint, shape):
    layer, x = made(lambda: Noisy(kind), *shape, solver=ia.Picard(rtol=1e-6, max_steps=20), adjoint=adjoint)
    with pytest.warns(ia.ConvergenceWarning, match="is random.*numpy or a Generator of its own.*default generators"):
        layer(x.requires_grad_())

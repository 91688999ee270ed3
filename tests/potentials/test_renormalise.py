"""renormalise: attention that moves no particle, scipy's roots, derivatives at repeated eigenvalues."""

import functools
import math

import numpy as np
import scipy.linalg
import torch
from torch.autograd import gradcheck, gradgradcheck

from implicit_attention.potentials import GaussianMixture, renormalise
from implicit_attention.testing.numerics import random, relative_error

tensor = functools.partial(torch.tensor, dtype=torch.float64)
close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)
printed = functools.partial(torch.testing.assert_close, rtol=0, atol=5.1e-13)

MU, SIGMA = tensor([0.5, -1.0]), tensor([[1.2, 0.3], [0.3, 0.8]])


def attention(x):
    return x + GaussianMixture(MU[None], SIGMA, torch.zeros(1, dtype=torch.float64)).mean(x)


def moments(x):
    centred = x - x.mean(-2, keepdim=True)
    return x.mean(-2), centred.mT @ centred / x.shape[-2]


def test_renormalised_attention_moves_no_particle():
    mean, covariance = torch.linalg.solve(SIGMA, MU), torch.linalg.inv(SIGMA)
    printed(mean, tensor([0.804597701149, -1.551724137931]))
    x = renormalise(random(50, 2), mean, covariance)
    close(moments(x)[0], mean)
    close(moments(x)[1], covariance)
    moved = attention(x)
    assert (moved - x).norm(dim=-1).min() > 0.1
    after_mean, after = moments(moved)
    printed(after_mean, tensor([1.804597701149, -3.551724137931]))
    printed(after, tensor([[4.119540229885, -0.044827586207], [-0.044827586207, 4.179310344828]]))
    # Twice the entropy gain is the log of the ratio of the determinants.
    gain = (torch.logdet(after) - torch.logdet(covariance)) / 2
    printed(gain, tensor(1.353254507042))
    close(gain, torch.logdet(torch.eye(2, dtype=torch.float64) + SIGMA))
    close(renormalise(moved, mean, covariance), x)
    # With the second moment about 0, as it is printed, the covariance is another.
    second = after + torch.outer(after_mean, after_mean)
    map_ = torch.from_numpy(scipy.linalg.sqrtm(covariance) @ np.linalg.inv(scipy.linalg.sqrtm(second)))
    assert abs(relative_error(map_ @ after @ map_.mT, covariance) - 0.715) < 5e-4


def test_renormalise_against_scipy_per_batch_entry():
    x, mean = random(2, 3, 9, 4), random(3, 4, seed=1)
    roots = random(2, 1, 4, 4, seed=2)
    covariance = roots @ roots.mT + torch.eye(4, dtype=torch.float64)
    result = renormalise(x, mean, covariance)
    close(moments(result)[0], mean.expand(2, 3, 4))
    close(moments(result)[1], covariance.expand(2, 3, 4, 4), rtol=1e-11, atol=1e-12)
    for i in range(2):
        for j in range(3):
            own, spread = moments(x[i, j])
            map_ = scipy.linalg.sqrtm(covariance[i, 0].numpy()) @ np.linalg.inv(scipy.linalg.sqrtm(spread.numpy()))
            close(result[i, j], mean[j] + (x[i, j] - own) @ torch.from_numpy(map_).mT, rtol=1e-10, atol=1e-11)
    single = renormalise(x.float(), mean.float(), covariance.float())
    assert relative_error(single.double(), result) < 1e-5


def test_renormalise_is_differentiable_at_repeated_eigenvalues():
    white = renormalise(random(6, 3), torch.zeros(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64))
    twice = torch.diag(tensor([2.0, 2.0, 1.0]))
    for x in (white, random(6, 3)):
        inputs = tuple(t.detach().clone().requires_grad_() for t in (x, random(3, seed=1), twice))
        assert gradcheck(renormalise, inputs)
        assert gradgradcheck(renormalise, inputs)
    # The third order, against the derivatives of a root of a number.
    x, scale = tensor([[-1.0], [1.0]]), tensor(4.0).requires_grad_()
    result = renormalise(x, tensor([0.0]), scale[None, None])[1, 0]
    for expected in (2.0, 1 / 4, -1 / 32, 3 / 256):
        close(result, tensor(expected))
        (result,) = torch.autograd.grad(result, scale, create_graph=True)


def test_bad_data_reaches_no_other_sample():
    mean, unit = torch.zeros(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    # Inside torch.func a sample without full rank is NaN too.
    x = random(2, 6, 3)
    bad = x.clone()
    bad[0, 1, 2] = math.inf
    result = renormalise(bad, mean, unit)
    assert result[0].isnan().all()
    assert torch.equal(result[1], renormalise(x, mean, unit)[1])
    flat = torch.func.vmap(renormalise, in_dims=(0, None, None))(torch.stack([x[0], x[0] * mean]), mean, unit)
    assert flat[1].isnan().all()
    close(flat[0], renormalise(x[0], mean, unit))
    assert renormalise(x[:0], mean, unit).shape == (0, 6, 3)

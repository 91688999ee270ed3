"""What potentials over keys answer depends neither on how tensors lie in memory nor on what differentiates them."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from implicit_attention import AnchoredEnergy, Anderson, LogSumExp, solve
from implicit_attention.energies import Epanechnikov, SphereEnergy
from implicit_attention.potentials import (
    DistanceLogSumExp,
    EluFeatures,
    Entmax,
    KernelPotential,
    NormalisedScores,
    Polynomial,
    RestrictedBoltzmannMachine,
    SignUnits,
    Softmax1,
    Tilted,
    as_distribution,
    bregman,
    conjugate,
    fisher,
    renormalise,
    units_potential,
)
from implicit_attention.testing.numerics import random


def anchored(make):
    return lambda q, k: AnchoredEnergy(make(k), q, 0.7)


#: The energy of a field q over keys k.
ENERGIES = {
    "Entmax": anchored(lambda keys: Entmax(keys, 0.7)),
    "Entmax, alpha 1.3": anchored(lambda keys: Entmax(keys, 0.7, alpha=1.3)),
    "Polynomial": anchored(lambda keys: Polynomial(0.2 * keys, 0.3)),
    "NormalisedScores": anchored(lambda keys: NormalisedScores(keys, 0.3)),
    "SignUnits": anchored(lambda keys: units_potential(SignUnits())(0.2 * keys, 0.3)),
    "KernelPotential": anchored(lambda keys: KernelPotential(keys, 0.7, features=EluFeatures())),
    "Softmax1": anchored(lambda keys: Softmax1(keys, 0.7)),
    "DistanceLogSumExp": anchored(lambda keys: DistanceLogSumExp(keys, 0.7)),
    "Tilted": anchored(lambda keys: Tilted(LogSumExp(keys, 0.7), keys[..., :1, :])),
    "SphereEnergy": lambda q, k: SphereEnergy(LogSumExp(k, 0.7), q, 0.5, radius=1.5),
    "Epanechnikov": lambda q, k: Epanechnikov(k, 0.1),
}
#: Numbers of rows q and keys k that are no solutions.
FUNCTIONS = {
    "as_distribution": lambda q, k: as_distribution(LogSumExp(k, 0.7), q).log_prob(0.1 * q),
    "bregman": lambda q, k: bregman(LogSumExp(k, 0.7), q, 0.5 * q),
    "conjugate": lambda q, k: conjugate(LogSumExp(k, 0.7), LogSumExp(k, 0.7).mean(q)),
    "fisher": lambda q, k: fisher(LogSumExp(k, 0.7), q),
    "renormalise": lambda q, k: renormalise(k, q[..., 0, :], torch.eye(6, dtype=q.dtype)),
    "effective energy": lambda q, k: RestrictedBoltzmannMachine(
        0.1 * q.sum(tuple(range(q.ndim - 2))).mT, 0.1 * k.flatten(0, -2)[0], SignUnits(), SignUnits()
    ).effective_energy(k.sign()),
}
WAYS = {
    "transposed": lambda f, q, k: f(q.mT.contiguous().mT, k.mT.contiguous().mT),
    "another batch axis": lambda f, q, k: f(*(t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k))),
    "strided": lambda f, q, k: f(*(t.repeat_interleave(2, -1)[..., ::2] for t in (q, k))),
    "checkpointed": lambda f, q, k: checkpoint(f, q, k, use_reentrant=False),
    "vmap": lambda f, q, k: torch.vmap(f)(q, k),
}


def with_gradients(call):
    q, k = (0.5 * random(2, 4, 6)).requires_grad_(), random(2, 7, 6, seed=1).requires_grad_()
    found = call(q, k)
    gradients = torch.autograd.grad(found.square().sum(), (q, k), allow_unused=True)
    return found.detach(), *(torch.zeros(()) if g is None else g for g in gradients)


def check(answer, way, tolerance):
    expected = with_gradients(answer)
    for ours, theirs in zip(with_gradients(lambda q, k: WAYS[way](answer, q, k)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ENERGIES)
def test_equilibria_are_those_of_contiguous_tensors(name, way):
    # On a sphere gradients are those of the equilibrium up to its residual, and differ with the way by as much.
    exact = Anderson(rtol=1e-11, atol=1e-12) if name == "SphereEnergy" else Anderson()
    answer = lambda q, k: solve(ENERGIES[name](q, k), q, solver=exact, on_failure="raise").value  # noqa: E731
    check(answer, way, 1e-9 if name == "SphereEnergy" else 1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_those_of_contiguous_tensors(name, way):
    if (name, way) == ("effective energy", "vmap"):
        pytest.skip("weights have no batch axes, and vmap would see one machine per entry")
    # A mean and a covariance of seven particles in six dimensions are nearly singular.
    check(FUNCTIONS[name], way, 1e-8 if name == "renormalise" else 1e-11)

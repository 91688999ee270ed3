"""Equilibria of potentials over keys do not depend on how tensors lie in memory, nor on what differentiates them."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from implicit_attention import AnchoredEnergy, solve
from implicit_attention.potentials import (
    EluFeatures,
    Entmax,
    KernelPotential,
    NormalisedScores,
    Polynomial,
    SignUnits,
    units_potential,
)
from implicit_attention.testing.numerics import random

POTENTIALS = {
    "Entmax": lambda keys: Entmax(keys, 0.7),
    "Entmax, alpha 1.3": lambda keys: Entmax(keys, 0.7, alpha=1.3),
    "Polynomial": lambda keys: Polynomial(0.2 * keys, 0.3),
    "NormalisedScores": lambda keys: NormalisedScores(keys, 0.3),
    "SignUnits": lambda keys: units_potential(SignUnits())(0.2 * keys, 0.3),
    "KernelPotential": lambda keys: KernelPotential(keys, 0.7, features=EluFeatures()),
}
WAYS = {
    "transposed": lambda f, q, k: f(q.mT.contiguous().mT, k.mT.contiguous().mT),
    "another batch axis": lambda f, q, k: f(*(t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k))),
    "strided": lambda f, q, k: f(*(t.repeat_interleave(2, -1)[..., ::2] for t in (q, k))),
    "checkpointed": lambda f, q, k: checkpoint(f, q, k, use_reentrant=False),
    "vmap": lambda f, q, k: torch.vmap(f)(q, k),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", POTENTIALS)
def test_answers_and_gradients_are_those_of_contiguous_tensors(name, way):
    def answer(q, k):
        return solve(AnchoredEnergy(POTENTIALS[name](k), q, 0.7), q, on_failure="raise").value

    def with_gradients(call):
        q, k = ((0.5 * random(2, 4, 6)).requires_grad_(), random(2, 7, 6, seed=1).requires_grad_())
        found = call(q, k)
        return found.detach(), *torch.autograd.grad(found.square().sum(), (q, k))

    expected = with_gradients(answer)
    for ours, theirs in zip(with_gradients(lambda q, k: WAYS[way](answer, q, k)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)

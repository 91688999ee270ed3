"""Boltzmann machines of 12 + 8 units against sums over all their 2^20 joint states, by numpy alone."""

import numpy as np
import pytest
import torch

from implicit_attention.potentials import (
    BernoulliUnits,
    RestrictedBoltzmannMachine,
    SignUnits,
    contrastive_divergence,
    exact_gradient,
    persistent_gradient,
)

VISIBLE, HIDDEN = 12, 8


class Joint:
    """Weights, field and the law of all joint states (v, h), p ~ base(h) exp(v^T W h + b v)."""

    def __init__(self, kind, seed=0, scale=0.4):
        numbers = np.random.default_rng(seed)
        self.weights = scale * numbers.standard_normal((VISIBLE, HIDDEN))
        self.field = 0.3 * numbers.standard_normal(VISIBLE)
        low, log_base = {"sign": (-1.0, 2 * [np.log(0.5)]), "bernoulli": (0.0, [np.log(0.7), np.log(0.3)])}[kind]
        self.unit = SignUnits() if kind == "sign" else BernoulliUnits(0.3)
        bits = (np.arange(2**HIDDEN)[:, None] >> np.arange(HIDDEN)) & 1
        self.hidden, base = np.where(bits, 1.0, low), np.where(bits, log_base[1], log_base[0]).sum(-1)
        self.visible = np.where((np.arange(2**VISIBLE)[:, None] >> np.arange(VISIBLE)) & 1, 1.0, -1.0)
        exponent = self.visible @ self.weights @ self.hidden.T + (self.visible @ self.field)[:, None] + base
        self.log_z = float(np.log(np.exp(exponent - exponent.max()).sum()) + exponent.max())
        self.law = np.exp(exponent - self.log_z)
        self.of_visible = self.law.sum(1)
        self.h_given_v = self.law / self.of_visible[:, None]
        self.v_given_h = self.law / self.law.sum(0)

    @property
    def machine(self):
        weights, field = torch.tensor(self.weights), torch.tensor(self.field)
        return RestrictedBoltzmannMachine(weights, field, SignUnits(), self.unit)

    def moments(self, law_of_visible):
        """<v h^T> and <v> where v has a law and h its conditional one."""
        mean_h = self.h_given_v @ self.hidden
        return (self.visible * law_of_visible[:, None]).T @ mean_h, law_of_visible @ self.visible

    def drawn(self, count, seed=1):
        """Data of a flatter law than the machine's, and their empirical law."""
        flat = np.sqrt(self.of_visible)
        index = np.random.default_rng(seed).choice(len(flat), size=count, p=flat / flat.sum())
        return torch.tensor(self.visible[index]), np.bincount(index, minlength=len(flat)) / count


@pytest.fixture(scope="module", params=["sign", "bernoulli"])
def joint(request):
    return Joint(request.param)


def close(value, truth, allowed):
    error = np.abs(value.numpy() - truth).max()
    assert error <= allowed, f"off by {error:.3g}, allowed {allowed:.3g}"


def test_probabilities_and_the_partition_function(joint):
    log_prob = joint.machine.log_prob(torch.tensor(joint.visible))
    close(log_prob, np.log(joint.of_visible), 1e-10)
    assert abs(float(joint.machine.log_partition()) - joint.log_z) < 1e-10


def test_conditional_means_of_both_layers(joint):
    machine = joint.machine
    close(machine.hidden_mean(torch.tensor(joint.visible)), joint.h_given_v @ joint.hidden, 1e-12)
    close(machine.visible_mean(torch.tensor(joint.hidden)), joint.v_given_h.T @ joint.visible, 1e-12)


def test_the_exact_gradient(joint):
    data, law = joint.drawn(50)
    found = exact_gradient(joint.machine, data)
    for value, ours, theirs in zip(found, joint.moments(law), joint.moments(joint.of_visible), strict=True):
        close(value, ours - theirs, 1e-10)


def test_contrastive_divergence_in_the_mean(joint):
    """CD-1 of many copies of the data, against the exact step of Gibbs sampling from each."""
    data, law = joint.drawn(10)
    copies = 4000
    found = contrastive_divergence(joint.machine, data.repeat(copies, 1), generator=torch.Generator().manual_seed(0))
    after = joint.v_given_h @ (joint.h_given_v.T @ law)
    for value, ours, theirs in zip(found, joint.moments(law), joint.moments(after), strict=True):
        # Every entry is a mean of numbers in [-1, 1].
        close(value, ours - theirs, 5 / np.sqrt(10 * copies))
        assert np.abs(ours - theirs).max() > 10 / np.sqrt(10 * copies)


def test_persistent_chains_that_start_in_the_law_stay_there(joint):
    data, law = joint.drawn(10)
    index = np.random.default_rng(3).choice(len(joint.visible), size=40_000, p=joint.of_visible)
    found, chains = persistent_gradient(
        joint.machine, data, torch.tensor(joint.visible[index]), steps=3, generator=torch.Generator().manual_seed(0)
    )
    for value, ours, theirs in zip(found, joint.moments(law), joint.moments(joint.of_visible), strict=True):
        close(value, ours - theirs, 5 / np.sqrt(40_000))
    close(chains.mean(0), joint.moments(joint.of_visible)[1], 5 / np.sqrt(40_000))

"""Learning of Boltzmann machines: gradients of the log-likelihood, and log Z where states cannot be enumerated."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._torch import in_own_precision
from .boltzmann import RestrictedBoltzmannMachine, Visible
from .unit import check_generator


class LikelihoodGradient(NamedTuple):
    """The derivatives of the mean log-likelihood, without graph: `weights` (D, H), `field` (D,).

    Not for minimisers as it is: they subtract a gradient of the negative log-likelihood.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import LikelihoodGradient
        >>> LikelihoodGradient(weights=torch.zeros(2, 1), field=torch.ones(2)).field
        tensor([1., 1.])
    """

    weights: Tensor
    field: Tensor


class LogPartitionEstimate(NamedTuple):
    """log Z by samples: `value`, its standard `error`, and the `effective_samples` behind both.

    effective_samples = (sum w)^2/sum w^2 of the chains' weights w. Where it is a few, or a small share of the chains,
    neither number can be trusted: the error is then too small.

    Not for machines with a small discrete layer: `log_partition` is exact.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import LogPartitionEstimate
        >>> estimate = LogPartitionEstimate(torch.tensor(2.0), torch.tensor(0.1), torch.tensor(50.0))
        >>> estimate.value - 2 * estimate.error
        tensor(1.8000)
    """

    value: Tensor
    error: Tensor
    effective_samples: Tensor


@in_own_precision
def exact_gradient(machine: RestrictedBoltzmannMachine, v: Visible) -> LikelihoodGradient:
    """The gradient of the mean log p(v) over data, with all states of the smaller discrete layer.

        d/dW = <v <h|v>^T>_data - <v h^T>_machine,    d/da = <v>_data - <v>_machine

    Args:
        machine: whose `log_partition` is exact.
        v: data, (*batch, N, D); the mean is over all rows.

    Raises:
        TypeError, ValueError: no machine; data that do not fit, or without rows; too many states.

    Gradients: none; `machine.log_prob` has a graph.

    Not for layers of more than 2^24 states: use `persistent_gradient`.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import RestrictedBoltzmannMachine, SignUnits, exact_gradient
        >>> machine = RestrictedBoltzmannMachine(torch.zeros(2, 1), torch.zeros(2), SignUnits(), SignUnits())
        >>> exact_gradient(machine, torch.tensor([[1.0, 1.0], [1.0, -1.0]])).field
        tensor([1., 0.])
    """
    _check(machine, v)
    with torch.enable_grad():
        weights, field = (x.detach().requires_grad_() for x in (machine.weights, machine.field))
        copy = RestrictedBoltzmannMachine(weights, field, machine.visible, machine.hidden)
        return LikelihoodGradient(*torch.autograd.grad(copy.log_prob(v.detach()).mean(), (weights, field)))


@in_own_precision
@torch.no_grad()
def contrastive_divergence(
    machine: RestrictedBoltzmannMachine, v: Visible, *, steps: int = 1, generator: torch.Generator | None = None
) -> LikelihoodGradient:
    """CD-k: `exact_gradient` with k steps of Gibbs sampling from the data in place of the machine's averages.

    It is biased: at few steps it does not vanish at the largest likelihood, and misses patterns of the machine that
    are far from the data. In the limit of many steps it is the gradient, up to noise.

    Args:
        machine: any.
        v: data, (*batch, N, D); the mean is over all rows.
        steps: k >= 1.
        generator: where randomness comes from, on the device of `v`; None is torch's own.

    Raises:
        TypeError, ValueError: as `exact_gradient`, and steps < 1.

    Gradients: none.

    Reference: Hinton (2002), Training products of experts by minimizing contrastive divergence.

    Not for machines that are small enough for `exact_gradient`, nor for likelihoods to the last digit.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import RestrictedBoltzmannMachine, SignUnits, contrastive_divergence
        >>> machine = RestrictedBoltzmannMachine(torch.zeros(2, 1), torch.full((2,), 9.0), SignUnits(), SignUnits())
        >>> generator = torch.Generator().manual_seed(0)
        >>> contrastive_divergence(machine, -torch.ones(4, 2), generator=generator).field
        tensor([-2., -2.])
    """
    _check(machine, v)
    _validate.check_integer("steps", steps, low=1)
    return _difference(machine, v, machine.gibbs(v, steps=steps, generator=generator))


@in_own_precision
@torch.no_grad()
def persistent_gradient(
    machine: RestrictedBoltzmannMachine,
    v: Visible,
    chains: Float[Tensor, "chains D"],
    *,
    steps: int = 1,
    generator: torch.Generator | None = None,
) -> tuple[LikelihoodGradient, Float[Tensor, "chains D"]]:
    """The gradient with averages over chains that go on from one call to the next, and the chains.

    Args:
        machine: any.
        v: data, (*batch, N, D); the mean is over all rows.
        chains: states (chains, D) that the last call returned, at first those of `machine.sample`.
        steps: of Gibbs sampling, >= 1.
        generator: where randomness comes from, on the device of `v`; None is torch's own.

    Raises:
        TypeError, ValueError: as `contrastive_divergence`; no chains.

    Gradients: none.

    Reference: Tieleman (2008), Training restricted Boltzmann machines using approximations to the likelihood gradient.

    Not for learning rates so large that the machine changes faster than its chains.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import RestrictedBoltzmannMachine, SignUnits, persistent_gradient
        >>> machine = RestrictedBoltzmannMachine(torch.zeros(2, 1), torch.full((2,), 9.0), SignUnits(), SignUnits())
        >>> generator = torch.Generator().manual_seed(0)
        >>> chains = machine.sample(8, steps=1, generator=generator)
        >>> gradient, chains = persistent_gradient(machine, -torch.ones(4, 2), chains, generator=generator)
        >>> gradient.field
        tensor([-2., -2.])
    """
    _check(machine, v)
    _validate.check_float_tensor("chains", chains, min_ndim=2)
    _validate.require(len(chains) > 0, "chains", "hold at least one chain", f"shape {tuple(chains.shape)}")
    _validate.check_integer("steps", steps, low=1)
    chains = machine.gibbs(chains, steps=steps, generator=generator)
    return _difference(machine, v, chains), chains


@in_own_precision
@torch.no_grad()
def annealed_importance_sampling(
    machine: RestrictedBoltzmannMachine,
    *,
    chains: int = 256,
    steps: int = 1000,
    generator: torch.Generator | None = None,
) -> LogPartitionEstimate:
    """log Z by chains that are drawn while the weights grow from 0 to W, with its standard error.

    At weights b W a chain gains E_b(v) - E_b'(v) for the next b' = b + 1/steps, and is moved by one step of Gibbs
    sampling at b'. The mean of the exponentials of these gains is Z over the Z of b = 0, which is a product of single
    units. The mean is without bias; its logarithm and its error hold for errors well below 1.

    Args:
        machine: any.
        chains: >= 2, independent.
        steps: >= 1, values of b.
        generator: where randomness comes from, on the device of the weights; None is torch's own.

    Raises:
        TypeError, ValueError: no machine; numbers out of range.

    Gradients: none.

    Reference: Neal (2001), Annealed importance sampling; Salakhutdinov and Murray (2008) for Boltzmann machines.

    Not for a discrete layer of at most 2^24 states: `machine.log_partition()` is exact.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import (
        ...     RestrictedBoltzmannMachine, SignUnits, annealed_importance_sampling
        ... )
        >>> weights, field = torch.full((4, 2), 0.3), torch.zeros(4)
        >>> machine = RestrictedBoltzmannMachine(weights, field, SignUnits(), SignUnits())
        >>> generator = torch.Generator().manual_seed(0)
        >>> estimate = annealed_importance_sampling(machine, chains=64, steps=50, generator=generator)
        >>> bool((estimate.value - machine.log_partition()).abs() < 5 * estimate.error)
        True
    """
    _validate.check_instance("machine", machine, RestrictedBoltzmannMachine)
    _validate.check_integer("chains", chains, low=2)
    _validate.check_integer("steps", steps, low=1)
    check_generator(generator, "weights", machine.weights)
    v = machine.visible.sample(machine.field.detach().expand(chains, -1), generator=generator)
    gain = torch.zeros_like(v[:, 0])
    for step in range(1, steps + 1):
        t, cumulant = v @ machine.weights, machine.hidden.cumulant
        gain += (cumulant(t * (step / steps)) - cumulant(t * ((step - 1) / steps))).sum(-1)
        if step < steps:
            v = machine._gibbs(v, 1, generator, step / steps)
    weights = (gain - gain.amax()).exp()
    mean = weights.mean()
    start = machine._log_mass() + machine.visible.cumulant(machine.field).sum()
    return LogPartitionEstimate(
        value=start + gain.logsumexp(0) - math.log(chains),
        # The logarithm of a mean moves by a relative error of it.
        error=weights.std() / (mean * math.sqrt(chains)),
        effective_samples=weights.sum().square() / weights.square().sum(),
    )


def _difference(machine: RestrictedBoltzmannMachine, data: Tensor, drawn: Tensor) -> LikelihoodGradient:
    """Return <v <h|v>^T> and <v> of the data, less those of states that the machine drew."""
    rows = (v.flatten(0, -2) for v in (data, drawn))
    moments = [(v.mT @ machine.hidden_mean(v) / len(v), v.mean(0)) for v in rows]
    return LikelihoodGradient(*(ours - theirs for ours, theirs in zip(*moments, strict=True)))


def _check(machine: RestrictedBoltzmannMachine, v: Tensor) -> None:
    _validate.check_instance("machine", machine, RestrictedBoltzmannMachine)
    machine.potential.check_state("v", v)
    _validate.require(v.shape[:-1].numel() > 0, "v", "hold at least one row of data", f"shape {tuple(v.shape)}")

"""Gradients that are taken inside a context of autocast are, by bits, those that are taken outside of it."""

import pytest
import torch

import implicit_attention as ia
from implicit_attention.energies import AnchoredEnergy
from implicit_attention.layers import EnergyTransformer, MeanFieldAttention, MemoryLookup, SpinAttention
from implicit_attention.potentials import LogSumExp, bregman, conjugate, natural_parameter
from implicit_attention.spins import (
    AdaTAP,
    KineticPlefka,
    LowRank,
    MeanField,
    SaddlePoint,
    SpinSystem,
    decompose,
    drive,
    extensivity,
    fit_ising,
    fit_ising_moments,
    free_energy,
    heat_bath,
    magnetization,
    stability,
    stationary_law,
    stationary_state,
    sweep,
    synchronous,
    thermodynamics,
)


def _numbers(*shape, seed, scale=0.5):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


KEYS, X, V = _numbers(24, 16, seed=0), _numbers(2, 5, 16, seed=1), _numbers(24, 16, seed=2)
COUPLINGS = _numbers(6, 6, seed=3, scale=0.1)
COUPLINGS, FIELD = COUPLINGS + COUPLINGS.mT, _numbers(2, 6, 3, seed=4)
STEPS = {"solver": ia.Picard(rtol=0, atol=0, max_steps=12), "adjoint": ia.Unrolled()}


def _made(layer, **options):
    torch.manual_seed(0)
    return layer(16, **options)


def _map(z, w, x):
    return torch.tanh(z @ w) / 2 + x


def _steps(x):
    weights = (0.2 * KEYS[:16]).requires_grad_()
    problem = ia.FixedPointMap(_map, weights, ia.PerSample(x), event_ndim=1)
    return ia.solve(problem, torch.zeros_like(x), **STEPS).value


PHI = LogSumExp(KEYS, beta=2.0)
MEMORY = MemoryLookup(16, beta=2.0, anchor=0.5)
MEMORY.store(KEYS)
DOORS = {
    "potential: value": (X, lambda x: PHI.value(x)),
    "potential: mean": (X, lambda x: PHI.mean(x)),
    "potential: readout": (X, lambda x: PHI.readout(x, V)),
    "energy": (X, lambda x: AnchoredEnergy(PHI, x, 0.7).energy(x)),
    "energy: map": (X, lambda x: AnchoredEnergy(PHI, X, 0.7).fixed_point_map(x)),
    "conjugate": (X, lambda x: conjugate(PHI, PHI.mean(x))),
    "bregman": (X, lambda x: bregman(PHI, x, X.flip(1))),
    "solve": (X, lambda x: ia.solve(AnchoredEnergy(PHI, x, 0.7), x).value),
    "solve, unrolled": (X, _steps),
    "attention": (X, lambda x: ia.equilibrium_attention(x, KEYS, V, anchor=0.7)),
    "attention, unrolled": (X, lambda x: ia.equilibrium_attention(x, KEYS, V, anchor=0.7, **STEPS)),
    "memory": (X, lambda x: MEMORY.retrieve(x)),
    "memory: energy": (X, lambda x: MEMORY.energy(x)),
    "published": (X, _made(EnergyTransformer, heads=2, head_dim=8, memories=32, mode="published", steps=4)),
    "energy transformer": (X, _made(EnergyTransformer, heads=2, head_dim=8, memories=32, on_failure="ignore")),
    "spin layer, bare": (X, _made(SpinAttention, heads=1, bare=True, steps=3)),
    "mean-field layer, bare": (X, _made(MeanFieldAttention, heads=1, bare=True, steps=3)),
    "magnetization": (FIELD, lambda h: magnetization(SpinSystem(COUPLINGS, h), MeanField())),
    "couplings of the field": (FIELD, lambda h: magnetization(SpinSystem(lambda h: h @ h.mT / 20, h), SaddlePoint())),
    "free energy": (FIELD, lambda h: free_energy(SpinSystem(COUPLINGS, h), AdaTAP())),
    "thermodynamics": (FIELD, lambda h: thermodynamics(SpinSystem(COUPLINGS, h), MeanField()).correlations),
    "decompose": (FIELD, lambda h: decompose(SpinSystem(COUPLINGS, h), MeanField()).onsager),
    "stationary": (FIELD, lambda h: stationary_state(SpinSystem(COUPLINGS, h), KineticPlefka()).entropy_production),
    "drive": (FIELD, lambda h: drive(KineticPlefka(), COUPLINGS, h[:, None]).entropy_production),
}


@pytest.mark.parametrize("name", DOORS)
def test_a_backward_pass_inside_of_autocast_is_that_outside(name):
    given, door = DOORS[name]
    found = []
    for inside in (False, True):
        x = given.clone().requires_grad_()
        weights = list(door.parameters()) if isinstance(door, torch.nn.Module) else []
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = door(x).float()
            loss = (out * out.detach().cos()).sum()
            if inside:
                found.append(torch.autograd.grad(loss, [x, *weights], allow_unused=True))
            assert torch.is_autocast_enabled("cpu")
        if not inside:
            found.append(torch.autograd.grad(loss, [x, *weights], allow_unused=True))
    for outside, within in zip(*found, strict=True):
        assert (outside is None and within is None) or torch.equal(outside, within)


def _law():
    law = stationary_law(COUPLINGS, FIELD[0, :, 0])
    return torch.as_tensor(law.magnetization)


def _drawn(sampler, **options):
    generator = torch.Generator().manual_seed(0)
    return sampler(SpinSystem(COUPLINGS, FIELD), generator=generator, chains=4, burn_in=5, sweeps=20, **options)


SPINS = (torch.rand(2, 200, 6, generator=torch.Generator().manual_seed(5)) < 0.5).float() * 2 - 1
COVARIANCE = torch.stack([x.T.cov() for x in SPINS])
ASKED = {
    "fit_ising": lambda: fit_ising(SPINS).couplings,
    "fit_ising_moments": lambda: fit_ising_moments(SPINS.mean(-2), COVARIANCE).couplings,
    "stationary_law": _law,
    "stability": lambda: stability(SpinSystem(COUPLINGS, FIELD), MeanField(), starts=2).free_energies,
    "sweep": lambda: sweep(SpinSystem(COUPLINGS, FIELD), [MeanField()], beta=torch.ones(2)).curves,
    "extensivity": lambda: extensivity(lambda n: SpinSystem(torch.eye(n) / n, torch.ones(n, 2)), MeanField(), [2, 4]),
    "heat_bath": lambda: _drawn(heat_bath).magnetization,
    "synchronous": lambda: _drawn(synchronous).magnetization,
    "coupled": lambda: SpinSystem(COUPLINGS, FIELD).coupled(FIELD),
    "low rank": lambda: LowRank(KEYS).dense(),
    "correlations": lambda: thermodynamics(SpinSystem(COUPLINGS, FIELD), MeanField()).susceptibility(),
    "natural_parameter": lambda: natural_parameter(PHI, PHI.mean(X)),
}


def _leaves(found):
    if isinstance(found, torch.Tensor):
        return [found]
    parts = found.values() if isinstance(found, dict) else vars(found).values() if hasattr(found, "__dict__") else found
    return [leaf for part in parts if not isinstance(part, str | float | int) for leaf in _leaves(part)]


@pytest.mark.parametrize("name", ASKED)
def test_autocast_changes_no_bit_of_what_has_no_gradient(name):
    plain = ASKED[name]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = ASKED[name]()
    for one, other in zip(_leaves(plain), _leaves(lowered), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


# The layers are built of products that autocast lowers, as it does those of torch.
LOWERED = {"published", "energy transformer", "spin layer, bare", "mean-field layer, bare"}


@pytest.mark.parametrize("name", sorted(set(DOORS) - LOWERED))
def test_autocast_changes_no_bit(name):
    given, door = DOORS[name]
    found = []
    for enabled in (False, True):
        x = given.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = door(x)
            found.append([out, *torch.autograd.grad(out.sum(), x)])
    for plain, lowered in zip(*found, strict=True):
        assert plain.dtype == lowered.dtype
        assert torch.equal(plain, lowered)

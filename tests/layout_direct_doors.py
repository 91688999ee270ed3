"""Doors whose reference is the same call with dense tensors of float64, outside of autocast.

What is asked of potentials, energies, spins and blocks directly.
"""

import warnings

import torch
from layout_doors import HALF, POTENTIALS, door, fewer, leaf, same, sizes
from layout_reference import copied

import implicit_attention as ia
from implicit_attention import potentials, spins

# Of solves that are compared in float32: what their tolerance leaves.
TIGHT = {torch.float32: 1e-6, torch.float64: 1e-11}


def agrees(draw, function, leaves, *, by=True):
    """`function(*leaves)`, tensors by name, and their gradients, are those of dense float64 numbers."""
    dense = [copied(t).requires_grad_() for t in leaves]
    found = function(*leaves)
    with torch.autocast("cpu", enabled=False):
        wanted = function(*dense)
    for name, got in found.items():
        want = wanted[name]
        same(name, got, copied(want), draw.dtype)
        if by and want.requires_grad:
            cotangent = draw.tensor(*got.shape, dtype=got.dtype)
            found_by = torch.autograd.grad(got, leaves, cotangent, retain_graph=True, allow_unused=True)
            wanted_by = torch.autograd.grad(want, dense, copied(cotangent), retain_graph=True, allow_unused=True)
            for i, (mine, other) in enumerate(zip(found_by, wanted_by, strict=True)):
                assert (mine is None) == (other is None), f"{name} by {i}: a gradient is missing"
                if mine is not None:
                    same(f"{name} by {i}", mine, copied(other), draw.dtype)


def single(draw):
    if draw.dtype in HALF:
        draw.dtype = torch.float32


@door
def potential_asked_directly(draw):
    single(draw)
    lead, n, m, d = sizes(draw)
    make = POTENTIALS[draw.rng.choice(list(POTENTIALS))][0]
    beta = draw.rng.uniform(0.2, 2.0) / d**0.5
    z, keys, v = (leaf(draw.tensor(*lead, n, d)), leaf(draw.tensor(m, d, scale=0.5)), leaf(draw.tensor(*lead, n, d)))

    def asked(z, keys, v):
        phi = make(keys, beta, None)
        value, mean = phi.evaluate(z)
        return {
            "value": phi.value(z),
            "mean": phi.mean(z),
            "evaluated value": value,
            "evaluated mean": mean,
            "covariance": phi.covariance_product(z, v),
        }

    agrees(draw, asked, [z, keys, v])


@door
def energy_asked_directly(draw):
    single(draw)
    lead, n, m, d = sizes(draw)
    beta = draw.rng.uniform(0.2, 2.0) / d**0.5
    kind = draw.rng.choice(("anchored", "self-attention", "epanechnikov", "distance"))
    z, x, keys = (leaf(draw.tensor(*shape)) for shape in ((*lead, n, d), (*lead, n, d), (m, d)))

    def asked(z, x, keys):
        if kind == "anchored":
            energy = ia.AnchoredEnergy(ia.LogSumExp(keys, beta), x, 0.7)
        elif kind == "distance":
            energy = ia.AnchoredEnergy(potentials.DistanceLogSumExp(keys, beta), x, 0.7)
        elif kind == "self-attention":
            energy = ia.SelfAttentionEnergy(x, beta=beta, anchor=0.7, weight=0.5)
        else:
            energy = ia.energies.Epanechnikov(keys, beta=0.05)
        return {
            "energy": energy.energy(z),
            "gradient": energy.gradient(z),
            "map": energy.fixed_point_map(z),
            "hessian": energy.hessian_product(z, x),
        }

    agrees(draw, asked, [z, x, keys], by=kind != "epanechnikov")


@door
def duality(draw):
    single(draw)
    lead, n, m, d = sizes(draw)
    beta = draw.rng.uniform(0.2, 1.0) / d**0.5
    z, other, keys = (leaf(draw.tensor(*shape)) for shape in ((*lead, n, d), (*lead, n, d), (max(m, d + 2), d)))

    def asked(z, other, keys):
        phi = ia.LogSumExp(keys, beta)
        return {
            "bregman": potentials.bregman(phi, z, other),
            "conjugate": potentials.conjugate(phi, phi.mean(z)),
            "fisher": potentials.fisher(phi, z),
            "contrastive": potentials.contrastive_loss(phi, z, other),
        }

    agrees(draw, asked, [z, other, keys], by=False)


@door
def boltzmann_machine(draw):
    single(draw)
    h, v = draw.rng.choice((2, 5)), draw.rng.choice((3, 4))
    weights, bias, states = leaf(draw.tensor(v, h, scale=0.5)), leaf(draw.tensor(v)), draw.tensor(7, v).sign()

    def asked(weights, bias):
        units = potentials.SignUnits()
        machine = potentials.RestrictedBoltzmannMachine(weights, bias, units, units)
        given = states.to(weights.dtype)
        gradient = potentials.exact_gradient(machine, given)
        return {
            "energy": machine.effective_energy(given),
            "hidden": machine.hidden_mean(given),
            "log_partition": machine.log_partition(),
            "weights": gradient.weights,
        }

    agrees(draw, asked, [weights, bias], by=False)


METHODS = {
    "mean field": (spins.MeanField, {}, (1, 3)),
    "TAP": (spins.TAP, {}, (1, 3)),
    "AdaTAP": (spins.AdaTAP, {}, (1, 3)),
    "saddle point": (spins.SaddlePoint, {}, (1, 3)),
    "one loop": (spins.SaddlePoint, {"one_loop": True}, (1, 3)),
    "Bethe": (spins.Bethe, {}, (1,)),
    "enumeration": (spins.Enumeration, {}, (1,)),
}


def _spins(draw, dims, *, symmetric=True):
    single(draw)
    lead, n, dim = draw.rng.choice(((), (1,), (3,), (2, 2))), draw.rng.choice((3, 6)), draw.rng.choice(dims)
    scale = 0.2 / n**0.5
    given = fewer(draw, lead)
    if symmetric:
        couplings = leaf(draw.symmetric(*given, n, n, scale=scale))
    else:
        couplings = leaf(draw.tensor(*given, n, n, scale=scale))
    return couplings, leaf(draw.tensor(*lead, n, dim))


@door
def spins_thermodynamics(draw):
    cls, options, dims = METHODS[draw.rng.choice(list(METHODS))]
    couplings, field = _spins(draw, dims)
    v = draw.tensor(*field.shape)

    def asked(couplings, field):
        system = spins.SpinSystem((couplings + couplings.mT) / 2, field, 0.7)
        found = spins.thermodynamics(system, cls(**options))
        return {
            "F": found.free_energy,
            "U": found.internal_energy,
            "m": found.magnetization,
            "chi": found.susceptibility_product(v.to(field.dtype)),
        }

    agrees(draw, asked, [couplings, field])


@door
def spins_decomposed(draw):
    couplings, field = _spins(draw, (1, 3))

    def asked(couplings, field):
        system = spins.SpinSystem((couplings + couplings.mT) / 2, field, 0.7)
        parts = spins.decompose(system, spins.TAP())
        return {"field": parts.field, "coupling": parts.coupling, "onsager": parts.onsager}

    agrees(draw, asked, [couplings, field], by=False)


@door
def spins_stationary(draw):
    couplings, field = _spins(draw, (1, 3), symmetric=False)
    method = draw.rng.choice((spins.KineticPlefka(), spins.KineticPlefka(order=2), spins.GaussianClosure()))

    def asked(couplings, field):
        found = spins.stationary_state(spins.SpinSystem(couplings, field, 0.7), method)
        return {"m": found.magnetization, "D": found.delayed_correlations}

    agrees(draw, asked, [couplings, field])


@door
def spins_driven(draw):
    couplings, field = _spins(draw, (1, 3), symmetric=False)
    times = leaf(draw.tensor(4, *field.shape))

    def asked(couplings, times):
        path = spins.drive(spins.KineticPlefka(), couplings, times, beta=0.7)
        return {"states": path.states, "sigma": path.entropy_production}

    agrees(draw, asked, [couplings, times])


def _with_numbers_of(layer, like, x):
    """The layer in the precision of x."""
    made = like()
    made.load_state_dict(layer.state_dict())
    return made.to(x.dtype)


@door
def spin_layers(draw):
    """Layers of several heads over raw fields, causal or not: and what stands behind a causal token changes no bit."""
    single(draw)
    lead, n, d = draw.rng.choice(((1,), (3,))), draw.rng.choice((3, 6)), 4
    kind = draw.rng.choice(("mean field", "mean field", "spins"))
    causal, seed = draw.rng.random() < 0.6, draw.rng.randrange(100)
    solver = ia.Anderson(history=1, rtol=TIGHT[draw.dtype], atol=1e-12, max_steps=1000)

    def like():
        torch.manual_seed(seed)
        made = ia.layers.SpinAttention if kind == "spins" else ia.layers.MeanFieldAttention
        return made(d, 1, bare=True, causal=causal, solver=solver, on_failure="raise")

    layer, x = like(), leaf(draw.tensor(*lead, n, d))

    def asked(x):
        return {"tokens": _with_numbers_of(layer, like, x)(x)}

    # Couplings of layers are products that autocast lowers, as it does those of torch's layers.
    with torch.autocast("cpu", enabled=False):
        agrees(draw, asked, [x])
    if causal:
        made, cut = _with_numbers_of(layer, like, x), n // 2 + 1
        behind = x.detach().clone(memory_format=torch.preserve_format)
        behind[:, cut:] = draw.rng.choice((torch.nan, 3.0))
        made.options = made.options.override(on_failure="ignore")
        first, other = made(x.detach()), made(behind)
        assert torch.equal(first[:, :cut], other[:, :cut]), "tokens behind were read"


class Convolution(torch.nn.Module):
    """A convolutional step of a grid."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, z, x):
        return torch.tanh(torch.nn.functional.conv2d(z, self.weight, padding=1) + x)


class Mixing(torch.nn.Module):
    """A step that takes the mean over samples away."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, z, x):
        return torch.tanh((z - z.mean(0)) @ self.weight + x)


@door
def blocks_of_grids(draw):
    """All axes but the first are a sample; autocast lowers what is inside a block, as it does elsewhere."""
    single(draw)
    samples, channels = draw.rng.choice((1, 3)), draw.rng.choice((1, 2))
    weight = 0.3 * draw.normal((channels, channels, 3, 3)) / (9 * channels)
    x = leaf(draw.tensor(samples, channels, 3, 4))
    unrolled = draw.rng.random() < 0.5
    solver = ia.Picard(rtol=TIGHT[draw.dtype], atol=1e-12, max_steps=500)

    def asked(x):
        block = ia.Equilibrium(
            Convolution(weight.to(x.dtype)), solver=solver, adjoint=ia.Unrolled() if unrolled else ia.Implicit()
        )
        value, solution = block(x, return_solution=True)
        assert solution.status.shape == (samples,)
        assert bool(solution.converged.all())
        return {"grid": value}

    with torch.autocast("cpu", enabled=False):
        agrees(draw, asked, [x])


@door
def blocks_that_mix_samples(draw):
    single(draw)
    d = draw.rng.choice((2, 4))
    weight, x = 0.4 * draw.normal((d, d)) / d**0.5, leaf(draw.tensor(5, 3, d))
    unrolled = draw.rng.random() < 0.5
    solver = ia.Picard(rtol=TIGHT[draw.dtype], atol=1e-12, max_steps=500)

    def asked(x):
        adjoint = ia.Unrolled() if unrolled else ia.Implicit()
        block = ia.Equilibrium(Mixing(weight.to(x.dtype)), solver=solver, adjoint=adjoint, event_ndim=2)
        return {"tokens": block(x)}

    with torch.autocast("cpu", enabled=False), warnings.catch_warnings():
        # The adjoint solve of samples one by one does not converge, and is made for all of them together.
        warnings.simplefilter("error", ia.ConvergenceWarning)
        agrees(draw, asked, [x])

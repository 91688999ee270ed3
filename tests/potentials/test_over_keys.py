"""What holds of all potentials over keys: printed numbers, masks, blocks, layouts, equilibria, layers."""

import warnings
from functools import partial

import pytest
import torch
from key_pairs import KEYS, LAWS, some_keys
from torch.utils.checkpoint import checkpoint

from implicit_attention import AnchoredEnergy, Anderson, Implicit, ImplicitAttention, LogSumExp, SquaredScores, solve
from implicit_attention.energies import Epanechnikov, SphereEnergy
from implicit_attention.linear import CG
from implicit_attention.potentials import (
    DistanceLogSumExp,
    EluFeatures,
    Entmax,
    Exponential,
    HiddenUnits,
    KernelPotential,
    NormalisedScores,
    Polynomial,
    RestrictedBoltzmannMachine,
    SignUnits,
    SoftcapLogSumExp,
    Softmax1,
    Tilted,
    as_distribution,
    fisher,
    renormalise,
    units_potential,
)
from implicit_attention.testing.numerics import check_close, random, relative_error

tensor = partial(torch.tensor, dtype=torch.float64)
tight = Anderson(rtol=1e-13, atol=1e-13)
pytestmark = pytest.mark.cases(12)


def by_learned_orders(keys, beta, **pairs):
    """Entmax of an order per set of keys."""
    return Entmax(keys, beta, alpha=torch.linspace(1.2, 1.8, keys.shape[-3], dtype=keys.dtype), **pairs)


def scaled(keys, beta, **pairs):
    return LogSumExp(keys, beta, **pairs) * tensor([0.06, 0.12])


def added(keys, beta, **pairs):
    return 0.1 * LogSumExp(keys, beta, **pairs) + HiddenUnits(0.3 * random(5, 4, seed=2), SignUnits())


def mapped(keys, beta, **pairs):
    squares = SquaredScores(0.2 * keys[..., :4], beta)
    return 0.1 * (squares.of(random(2, 4, 5, seed=2)) + LogSumExp(keys, beta))


FACTORIES = {
    "LogSumExp": LogSumExp,
    "SoftcapLogSumExp": partial(SoftcapLogSumExp, cap=1.5),
    "Softmax1": Softmax1,
    "DistanceLogSumExp": DistanceLogSumExp,
    "Entmax": Entmax,
    "Entmax 1.3": partial(Entmax, alpha=1.3),
    "Sparsemax": partial(Entmax, alpha=2.0),
    "Entmax of learned orders": by_learned_orders,
    "NormalisedScores": NormalisedScores,
    "Polynomial": Polynomial,
    "Cubes": partial(Polynomial, degree=3),
    "Exponential": Exponential,
    **{type(units).__name__: units_potential(units) for units in LAWS},
}
each = pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)


# Printed numbers.

#: Value, mean, covariance product and, where it was printed, equilibrium of a potential over four keys.
NUMBERS = """
LogSumExp 1.056325512801 0.391204117751 -0.168394524133 0.102241420 -0.827617778 0.353115500501 -0.097287651525
Softmax1 1.180674378675 0.324636522853 -0.139740381815 0.115004917 -0.699772544 0.290757987043 -0.100732140029
DistanceLogSumExp 0.457000683716 0.395525522636 -0.241124333075 0.048858706 -0.761042695 0.340076372782 -0.287366143760
Entmax 0.725588161270 0.638864477803 -0.273861833278 -0.426753607 -0.914472016 0.807911417820 0.125226769428
Sparsemax 0.632004166667 0.634250 -0.283750 -0.603750 -1.293750 0.88 0.26
NormalisedScores 2.086041972519 2.672045947987 -1.609267715714 -1.567538955 -3.135238344
Polynomial 0.324675 0.891 -0.3825 0.5175 -1.725
Cubes 0.1008585 0.40743 -0.193725 0.4968 -1.656
Exponential 3.251196755731 1.907822337692 -0.821225595816 1.540271676 -4.484507317
""".strip().splitlines()


@pytest.mark.parametrize("line", NUMBERS)
def test_printed_numbers(line):
    name, *numbers = line.split()
    value, *rows = map(float, numbers)
    mean, product, *equilibrium = tensor(rows).view(-1, 1, 2)
    z, v = tensor([[0.6, -0.3]]), tensor([[0.5, -1.0]])
    for make in FACTORIES[name], *([partial(Entmax, alpha=tensor(1.5))] if name == "Entmax" else []):
        potential = make(tensor([[1, 0.5], [-0.5, 1.2], [0.3, -1], [-1, -0.4]]), 1.5)
        check_close(potential.value(z), tensor([value]), 0, 5.2e-13)
        check_close(potential.mean(z), mean, 0, 5.2e-13)
        check_close(potential.covariance_product(z, v), product, 0, 5.2e-10)
        if equilibrium:
            found = solve(AnchoredEnergy(potential, z, 0.3), z, solver=tight).value
            check_close(found, equilibrium[0], 0, 1e-12)


# Masks and bad data.


@each
def test_a_query_that_reads_no_key_is_zero_with_finite_gradients(make):
    keys, z = 0.3 * random(*KEYS), random(2, 3, 5, seed=1).requires_grad_()
    keys.requires_grad_()
    mask = some_keys()
    for options in ({"mask": mask}, {"bias": torch.zeros(2, 3, 7).double().where(mask, -torch.inf)}):
        potential = make(keys, 0.7, **options)
        value, mean = potential.evaluate(z)
        assert value[0, 1] == 0
        for found in (mean, potential.mean(z.detach()), potential.covariance_product(z, z)):
            assert found[0, 1].eq(0).all()
        gradients = torch.autograd.grad(value.sum() + mean.square().sum(), (keys, z), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in gradients), (keys, z), materialize_grads=True)
        assert all(g.isfinite().all() for g in (*gradients, *second))
        assert gradients[1][0, 1].eq(0).all()


@each
def test_what_is_not_read_changes_nothing(make):
    """Whatever a masked key holds, and a score that would overflow: the row, and its gradients."""
    keys, z = 0.3 * random(*KEYS), random(2, 3, 5, seed=1).requires_grad_()
    mask = torch.ones(2, 3, 7, dtype=torch.bool)
    mask[:, 1:, 4] = False
    plain = make(keys, 0.7, mask=mask)
    expected, by_z = plain.evaluate(z), torch.autograd.grad(plain.mean(z)[:, 1:].square().sum(), z)[0]
    for poison in (torch.nan, torch.inf, 1e6):
        poisoned = keys.clone()
        poisoned[:, 4] = poison
        potential = make(poisoned, 0.7, mask=mask)
        for got, want in zip(potential.evaluate(z), expected, strict=True):
            assert torch.equal(got[:, 1:], want[:, 1:])
            assert not torch.equal(got[:, 0], want[:, 0])
        mean = potential.mean(z)
        assert poison == 1e6 or mean[:, 0].isnan().all()
        assert torch.equal(torch.autograd.grad(mean[:, 1:].square().sum(), z)[0][:, 1:], by_z[:, 1:])
        if make is Polynomial or make is NormalisedScores:
            assert make(poisoned, 0.7, mask=mask[:, 1:2]).lipschitz().isfinite().all()


@each
def test_what_is_said_of_bounds_is_so(make):
    """Whether |z|^2/2 - scale Phi(z) falls without end along a key, seen far out."""
    keys, far = 0.3 * random(*KEYS), 1e4
    potential, directions = make(keys, 0.7), keys / keys.norm(dim=-1, keepdim=True)
    for scale in (0.05, 0.3, 1.0, 4.0):
        near, further = (s**2 / 2 - scale * potential.value(s * directions) for s in (far, 2 * far))
        falls = bool(((further < near) & (near < -far)).any() or further.eq(-torch.inf).any())
        answer = potential.bounded_below(scale)
        assert answer is None or answer != falls
    assert potential.bounded_below(0.0) is True


READ_OUT = ("LogSumExp", "SoftcapLogSumExp", "Softmax1", "DistanceLogSumExp", "Entmax", "Entmax of learned orders")


@pytest.mark.parametrize("count", [7, 70])
@pytest.mark.parametrize("name", READ_OUT)
def test_values_are_read_out_by_the_weights(name, count):
    keys, values, z = random(2, count, 5), random(2, count, 4, seed=3), random(2, 3, 5, seed=1)
    bias = random(3, count, seed=4)
    phi = FACTORIES[name](keys, tensor([0.5, 1.3]), mask=some_keys(count), bias=bias)
    out = phi.readout(z, values)
    check_close(out, phi.probabilities(z) @ values, 1e-12)
    assert phi.readout(z, values, dropout_p=1.0).eq(0).all()
    torch.manual_seed(0)
    assert relative_error(phi.readout(z.expand(3000, 2, 3, 5), values, dropout_p=0.3).mean(0), out) < 0.05
    half = phi.replace(*(t.bfloat16() if t.is_floating_point() else t for t in phi.tensors()))
    assert relative_error(half.readout(z.bfloat16(), values.bfloat16()), out) < 0.05


# Of many pairs the work is done in blocks where nothing differentiates it.

#: States, leading axes of the keys and shapes of a mask and a bias.
BLOCKS = [
    ((2, 3, 256, 8), (2, 3), None, None),
    ((2, 3, 256, 8), (1, 3), (256, 400), None),
    ((2, 3, 256, 8), (2, 1), (3, 1, 400), (400,)),
    ((2, 3, 256, 8), (1, 1), (2, 3, 256, 400), (3, 256, 1)),
    ((1, 1024, 8), (1,), None, (1024, 400)),
]


@pytest.mark.cases(6)
@pytest.mark.parametrize("make", [Polynomial, NormalisedScores, Entmax, by_learned_orders])
@pytest.mark.parametrize(("states", "lead", "mask", "bias"), BLOCKS)
def test_blocks_are_the_whole(make, states, lead, mask, bias):
    keys, z = random(*lead, 400, 8), random(*states, seed=1)
    beta = 0.5 + random(lead[-1], seed=5).sigmoid()
    given = {} if mask is None else {"mask": random(*mask, seed=2) > -0.5}
    given |= {} if bias is None else {"bias": random(*bias, seed=3)}
    phi = make(keys, beta, **given)
    with torch.profiler.profile(profile_memory=True) as seen:
        found = (phi.value(z), phi.mean(z), *phi.evaluate(z))
    # Bytes of float64.
    assert max(event.self_cpu_memory_usage for event in seen.events()) <= 8 * 2**18
    # What is differentiated is one block.
    tracked = z.clone().requires_grad_()
    for got, want in zip(found, (phi.value(tracked), phi.mean(tracked), *phi.evaluate(tracked)), strict=True):
        check_close(got, want.detach(), 1e-12, 1e-13)


def test_potentials_that_hold_more_are_one_block():
    class Own(Polynomial):
        def __init__(self, keys, beta):
            super().__init__(keys, beta)
            self.scale = torch.ones(2)

    keys, z = random(2, 400, 8), random(2, 512, 8, seed=1)
    check_close(Own(keys, 0.5).mean(z), Polynomial(keys, 0.5).mean(z), 1e-12)


# Layouts and transforms.


def anchored(make):
    return lambda q, k: AnchoredEnergy(make(k), q, 0.7)


#: The energy of a field q over keys k; tests/layout_fuzz.py asks further potentials.
ENERGIES = {
    **{name: anchored(partial(FACTORIES[name], beta=0.7)) for name in ("Entmax", "Entmax 1.3")},
    "Polynomial": anchored(lambda keys: Polynomial(0.2 * keys, 0.3)),
    "NormalisedScores": anchored(lambda keys: NormalisedScores(keys, 0.3)),
    "SignUnits": anchored(lambda keys: units_potential(SignUnits())(0.2 * keys, 0.3)),
    "KernelPotential": anchored(lambda keys: KernelPotential(keys, 0.7, features=EluFeatures())),
    "Tilted": anchored(lambda keys: Tilted(LogSumExp(keys, 0.7), keys[..., :1, :])),
    "SphereEnergy": lambda q, k: SphereEnergy(LogSumExp(k, 0.7), q, 0.5, radius=1.5),
    "Epanechnikov": lambda q, k: Epanechnikov(k, 0.1),
}
#: Numbers of rows q and keys k that are no solutions.
FUNCTIONS = {
    "as_distribution": lambda q, k: as_distribution(LogSumExp(k, 0.7), q).log_prob(0.1 * q),
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


def equilibrium(name, q, k):
    # On a sphere gradients are those of the equilibrium up to its residual, and differ with the way by as much.
    exact = Anderson(rtol=1e-11, atol=1e-12) if name == "SphereEnergy" else Anderson()
    return solve(ENERGIES[name](q, k), q, solver=exact, on_failure="raise").value


#: A function of q and k, and how near two ways are. Seven particles in six dimensions are nearly singular.
ANSWERS = {
    **{name: (partial(equilibrium, name), 1e-9 if name == "SphereEnergy" else 1e-12) for name in ENERGIES},
    **{name: (function, 1e-8 if name == "renormalise" else 1e-11) for name, function in FUNCTIONS.items()},
}


def with_gradients(call):
    q, k = (0.5 * random(2, 4, 6)).requires_grad_(), random(2, 7, 6, seed=1).requires_grad_()
    found = call(q, k)
    gradients = torch.autograd.grad(found.square().sum(), (q, k), allow_unused=True)
    return found.detach(), *(torch.zeros(()) if g is None else g for g in gradients)


# Weights of a machine have no batch axes: vmap would see one machine per entry.
@pytest.mark.parametrize(
    ("name", "way"), [(a, w) for a in ANSWERS for w in WAYS if (a, w) != ("effective energy", "vmap")]
)
def test_answers_are_those_of_contiguous_tensors(name, way):
    answer, tolerance = ANSWERS[name]
    check_close(with_gradients(partial(WAYS[way], answer)), with_gradients(answer), tolerance)


# Equilibria and layers.

#: Potentials over keys (2, M, 5), how many keys and how large.
EQUILIBRIA = [
    (Softmax1, 7, 1.0),
    (Softmax1, 70, 1.0),
    (FACTORIES["SoftcapLogSumExp"], 7, 1.0),
    (by_learned_orders, 7, 0.6),
    (NormalisedScores, 7, 1.0),
    (Polynomial, 7, 0.3),
    (units_potential(SignUnits()), 7, 0.3),
    (scaled, 7, 1.0),
    (added, 7, 1.0),
    (mapped, 7, 1.0),
]


@pytest.mark.parametrize(("make", "count", "size"), EQUILIBRIA)
def test_equilibria_are_those_of_plain_steps(make, count, size):
    """And their gradients those of autograd through so many steps."""
    bias, query = random(count, seed=4), random(2, 3, 5).requires_grad_()
    potential = make(size * random(2, count, 5, seed=1), tensor([0.5, 0.8]), bias=bias, mask=some_keys(count))
    tensors = [query, *(t.requires_grad_() for t in potential.tensors() if t.is_floating_point())]
    energy = AnchoredEnergy(potential, query, 0.4)
    found = solve(energy, query.detach(), solver=tight, adjoint=Implicit(CG(rtol=1e-12)))
    assert found.converged.all()
    z = found.value.detach()
    for _ in range(300):
        z = 0.4 * query + 0.6 * potential.mean(z)
    assert relative_error(found.value, z) < 1e-11
    cotangent = random(2, 3, 5, seed=8)
    got, expected = (torch.autograd.grad(v, tensors, cotangent) for v in (found.value, z))
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) < 1e-8


@pytest.mark.parametrize("make", [LogSumExp, Softmax1, DistanceLogSumExp])
@pytest.mark.parametrize(("lead", "rows", "masked"), [((3, 2), 4, True), ((3, 1), 4, False), ((3, 1), 1200, False)])
def test_kernels_have_the_gradients_of_plain_solves(make, lead, rows, masked):
    """Also with keys that queries share, and in more than one tile."""
    tensors = [random(3, 2, rows, 5), random(*lead, 70, 5, seed=1), tensor([0.5, 1.3]), random(70, seed=6)]
    mask = random(rows, 70, seed=7) > 0 if masked else None

    def found(impl):
        query, keys, beta, bias = leaves = [t.clone().requires_grad_() for t in tensors]
        energy = AnchoredEnergy(make(keys, beta, mask=mask, bias=bias), query, 0.4)
        solution = solve(energy, query.detach(), solver=Anderson(history=1, rtol=1e-12), impl=impl)
        assert solution.converged.all()
        return solution.value, *torch.autograd.grad(solution.value.square().sum(), leaves)

    for got, expected in zip(found("auto"), found("reference"), strict=True):
        assert relative_error(got, expected) < 1e-8


LAYERS = [
    (Softmax1, "values", torch.float32),
    (Softmax1, "state", torch.bfloat16),
    (DistanceLogSumExp, "values", torch.bfloat16),
    (partial(Entmax, alpha=2.0), "values", torch.bfloat16),
    (partial(Entmax, alpha=2.0), "state", torch.float32),
    (NormalisedScores, "state", torch.float32),
    # With inputs so small that degree 2 is bounded below.
    (Polynomial, "state", torch.float32),
    (units_potential(SignUnits()), "state", torch.float32),
]


@pytest.mark.parametrize(("make", "readout", "dtype"), LAYERS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_trains_a_step_without_a_warning(make, readout, dtype, causal):
    torch.manual_seed(0)
    layer = ImplicitAttention(8, 2, potential=make, readout=readout, causal=causal, dtype=dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    x, losses = 0.5 * random(2, 30, 8, dtype=dtype), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            loss = (layer(x) - x).float().square().mean()
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
            optimizer.step()
    assert layer.last_solve.converged.all()
    assert losses[1] < losses[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("make", [Softmax1, DistanceLogSumExp])
def test_a_layer_compiles(make):
    torch._dynamo.reset()
    layer, x = ImplicitAttention(8, 2, potential=make), random(2, 70, 8, dtype=torch.float32)
    compiled = torch.compile(layer, backend="eager")
    gradients = (torch.autograd.grad(f(x).sum(), list(layer.parameters())) for f in (compiled, layer))
    torch.testing.assert_close(*gradients)
    layer.requires_grad_(False)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))

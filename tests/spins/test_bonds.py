"""Couplings on the bonds of a graph: the numbers of the same couplings as a tensor, in memory linear in the bonds."""

import copy
import pickle
from itertools import combinations

import networkx
import numpy as np
import pytest
import scipy.sparse
import torch
from work import Work

from implicit_attention import Status
from implicit_attention.potentials import AmosResponse, GaussianUnits, SphereUnits
from implicit_attention.spins import (
    TAP,
    AdaTAP,
    Bethe,
    Bonds,
    Enumeration,
    GaussianClosure,
    KineticPlefka,
    MeanField,
    SaddlePoint,
    SpinSystem,
    TransferMatrix,
    drive,
    free_energy,
    magnetization,
    stability,
    stationary_state,
    sweep,
    thermodynamics,
)
from implicit_attention.spins import bonds as bonds_module
from implicit_attention.spins.bonds import Graph
from implicit_attention.testing.numerics import random

METHODS = [MeanField(), MeanField(response=AmosResponse()), TAP(), TAP(response=AmosResponse()), Bethe()]
#: Asked of spins of dimension 1.
EXACT_ON_CHAINS = [Bethe(), Enumeration(), TransferMatrix()]
ISING = [TAP(order=3), *EXACT_ON_CHAINS]
METHODS += [TAP(order=3), TAP(order=3, response=AmosResponse())]
METHODS += [KineticPlefka(), GaussianClosure()]
#: Those that make a tensor of the bonds.
READERS = [AdaTAP(), AdaTAP(prior=GaussianUnits()), SaddlePoint(), SaddlePoint(one_loop=True)]
READERS += [SaddlePoint(shared=True), Enumeration()]
EQUILIBRIUM = [method for method in METHODS if method.symmetric]
DYNAMICS = [KineticPlefka(), KineticPlefka(order=2), KineticPlefka(order=2, response=AmosResponse()), GaussianClosure()]
#: A ring with a chord that closes a triangle, a loop, and a site that nothing joins.
PAIRS = torch.tensor([[0, 1], [2, 1], [2, 3], [3, 4], [4, 5], [5, 0], [1, 5], [4, 4]])
SITES = 7
#: Pairs that read each other, some in one direction, one of them twice, and a loop.
ONE_WAY = torch.cat([PAIRS, torch.tensor([[1, 0], [1, 2], [5, 2], [6, 0], [3, 2], [1, 0]])])


def torus(length):
    """The bonds of a square lattice of length x length sites that is closed in itself."""
    sites = torch.arange(length**2).reshape(length, length)
    return torch.cat([torch.stack([sites, sites.roll(-1, axis)], -1).flatten(0, 1) for axis in (0, 1)])


def numbers(method, *batch, own=False, matrices=False):
    """Values, a field and a temperature that require grad."""
    dim = 1 if method in ISING else 3
    values = 0.25 * random(*(batch if own else ()), len(PAIRS), *((dim, dim) if matrices else ()), seed=1)
    beta = 0.5 + random(*batch, seed=3).abs() / 4
    return values.requires_grad_(), random(*batch, SITES, dim, seed=2).requires_grad_(), beta.requires_grad_()


def compared(pairs, given, method, mask=None):
    """The answers and derivatives by bonds and by the tensor of the same couplings."""
    values, field, beta = given

    def answer(couplings):
        m = magnetization(SpinSystem(couplings, field, beta, mask=mask), method)
        found = (m, free_energy(SpinSystem(couplings, field, beta), method)) if method.symmetric else (m,)
        return found, torch.autograd.grad(sum(part.cos().sum() for part in found), given)

    bonds = Bonds(pairs, values, SITES)
    return answer(bonds), answer(bonds.dense())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("method", [*METHODS, *READERS], ids=repr)
def test_bonds_give_what_the_tensor_gives(method, own, masked):
    mask = random(2, 3, SITES, seed=4) > -1 if masked else None
    (found, by), (right, by_right) = compared(PAIRS, numbers(method, 2, 3, own=own), method, mask)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-10)
    torch.testing.assert_close(by, by_right, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", [MeanField(), KineticPlefka(), AdaTAP(), SaddlePoint()], ids=repr)
def test_matrices_of_bonds(method):
    (found, by), (right, by_right) = compared(PAIRS, numbers(method, 2, matrices=True), method)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-10)
    torch.testing.assert_close(by, by_right, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", EQUILIBRIUM, ids=repr)
@pytest.mark.parametrize("doubled", [False, True])
def test_what_a_value_is_does_not_depend_on_the_batch(method, doubled):
    """As many samples, components and bonds as each other, also once two of three bonds are one."""
    pairs = torch.tensor([[0, 1], [1, 2], [0, 1]] if doubled else [[0, 1], [1, 2]])
    for dim in (1,) if method in ISING else (1, 2):
        field = random(2, 2, 3, dim, seed=2)
        for batch in ((), (2,), (2, 2)) if doubled else ((),):
            bonds = Bonds(pairs, 0.3 * random(*batch, len(pairs), seed=1), 3)
            found, right = (thermodynamics(SpinSystem(given, field), method) for given in (bonds, bonds.dense()))
            torch.testing.assert_close(found.free_energy, right.free_energy, rtol=0, atol=1e-10)
            torch.testing.assert_close(found.magnetization, right.magnetization, rtol=0, atol=1e-10)
    whole = 0.3 * random(2, 2, 3, 3, seed=4)
    whole = torch.where(torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]]) > 0, whole + whole.mT, 0.0)
    torch.testing.assert_close(Bonds.of(whole).dense(), whole, rtol=0, atol=1e-15)


def test_matrices_of_bonds_have_thermodynamics():
    field = random(4, 3, 2, seed=2)
    for values in (0.3 * random(2, 2, 2, seed=1), 0.3 * random(4, 2, 2, 2, seed=1)):
        bonds = Bonds(torch.tensor([[0, 1], [1, 2]]).expand(*values.shape[:-3], 2, 2), values, 3)
        found = thermodynamics(SpinSystem(bonds, field), MeanField())
        assert found.correlations.shape == (4, 2, 2, 2)
        for k in range(4):
            one = SpinSystem(bonds.dense() if values.ndim == 3 else bonds.dense()[k], field[k])
            right = thermodynamics(one, MeanField()).free_energy
            torch.testing.assert_close(found.free_energy[k], right, rtol=0, atol=1e-10)
    single = Bonds(torch.tensor([[0, 1]]), torch.full((1, 1, 1), 0.3).double(), 2)
    for method in (MeanField(), TAP(), Bethe()):
        found, right = (
            thermodynamics(SpinSystem(given, random(4, 2, 1, seed=2)), method).free_energy
            for given in (single, single.dense())
        )
        torch.testing.assert_close(found, right, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_mask_of_samples_and_none_of_sites(method):
    values, field, _ = numbers(method, 2)
    mask = torch.tensor([[True], [False]])
    m = magnetization(SpinSystem(Bonds(PAIRS, values, SITES), field, mask=mask), method)
    assert bool((m[0] != 0).all())
    assert not m[1].any()


def test_precision_is_that_of_the_values():
    values = torch.full((len(PAIRS),), 0.1)
    system = SpinSystem(Bonds(PAIRS, values, SITES), torch.full((SITES, 1), 0.3))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert Bonds(PAIRS, values, SITES).dense().dtype == torch.float32
        assert thermodynamics(system, Bethe()).correlations.dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def dynamical_numbers(directed, dim, *batch, own=False, matrices=False):
    """Pairs, values, a field and a temperature."""
    pairs = ONE_WAY if directed else PAIRS
    values = 0.2 * random(*(batch if own else ()), len(pairs), *((dim, dim) if matrices else ()), seed=1)
    given = (values, random(*batch, SITES, dim, seed=2), 0.7 + random(*batch, seed=3).abs() / 4)
    return pairs, [tensor.requires_grad_() for tensor in given]


def assert_dynamics_agree(directed, method, pairs, given, mask=None):
    """Every output and its derivatives, of delayed correlations those of the pairs."""
    bonds = Bonds(pairs, given[0], SITES, directed=directed)

    def outputs(couplings):
        state = stationary_state(SpinSystem(couplings, *given[1:], mask=mask), method)
        delayed = state.delayed_correlations
        if isinstance(couplings, torch.Tensor):
            both = torch.stack([bonds.graph.ends, bonds.graph.ends.flip(-2)], -2).expand(*delayed.shape[:-2], 2, 2, -1)
            places = (both[..., 0, :, :] * SITES + both[..., 1, :, :]).flatten(-2)
            delayed = delayed.flatten(-2).gather(-1, places).unflatten(-1, (2, -1))
        return state.magnetization, state.entropy_production, delayed

    found, right = outputs(bonds), outputs(bonds.dense())
    torch.testing.assert_close(found, right, rtol=0, atol=1e-10)
    assert directed or not found[1].any()
    for a, b in zip(found, right, strict=True):
        by = [
            torch.autograd.grad(part.cos().sum(), given, materialize_grads=True, retain_graph=True) for part in (a, b)
        ]
        torch.testing.assert_close(*by, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("method", DYNAMICS, ids=repr)
def test_dynamics_on_bonds_is_that_of_the_tensor(method, directed, dim):
    if method == GaussianClosure() or dim == 3 or method.response != AmosResponse():
        pairs, given = dynamical_numbers(directed, dim, 2, 3, own=True)
        assert_dynamics_agree(directed, method, pairs, given, random(2, 3, SITES, seed=4) > -1)
        assert_dynamics_agree(directed, method, *dynamical_numbers(directed, dim, 2))


@pytest.mark.parametrize("method", [KineticPlefka(order=2), GaussianClosure()], ids=repr)
def test_dynamics_on_graphs_of_their_own(method):
    """Of which the second has bonds of value 0 in addition, between any sites."""
    _, (values, *given) = dynamical_numbers(True, 2, 3)
    pairs = torch.stack([ONE_WAY, ONE_WAY.flip(0), ONE_WAY.roll(1, -1)])
    values = (values * torch.tensor([[1.0], [0.0], [-1.0]]).double()).detach().requires_grad_()
    assert_dynamics_agree(True, method, pairs, [values, *given])
    shared = values.detach()[0].requires_grad_()
    assert_dynamics_agree(True, method, pairs, [shared, *given])


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("dim", [1, 2])
def test_dynamics_with_matrices_of_bonds(directed, dim):
    assert_dynamics_agree(directed, KineticPlefka(), *dynamical_numbers(directed, dim, 2, matrices=True))
    pairs, given = dynamical_numbers(directed, dim, 2, own=True, matrices=True)
    assert_dynamics_agree(directed, KineticPlefka(), pairs.expand(2, -1, -1), given) if dim > 1 else None


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("method", [KineticPlefka(), GaussianClosure()], ids=repr)
def test_driven_paths_on_bonds_are_those_of_the_tensor(method, directed):
    for matrices in (False, True) if method == KineticPlefka() else (False,):
        pairs, (values, *_) = dynamical_numbers(directed, 2, matrices=matrices)
        fields = random(4, 3, SITES, 2, seed=5).requires_grad_()
        bonds = Bonds(pairs, values, SITES, directed=directed)
        found, right = (drive(method, couplings, fields) for couplings in (bonds, bonds.dense()))
        for name in ("states", "entropy_production", "housekeeping", "field_change", "stationary", "mismatch"):
            a, b = getattr(found, name), getattr(right, name)
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
            by = [torch.autograd.grad(x.cos().sum(), (values, fields), retain_graph=True) for x in (a, b)]
            torch.testing.assert_close(*by, rtol=0, atol=1e-8)
        torch.testing.assert_close(found.relaxation_time, right.relaxation_time, rtol=1e-6, atol=0)


def test_a_path_on_a_graph_that_follows_the_field():
    """At every step each sample reads the sites in an order of its own."""
    order = random(5, 2, 4, seed=6).argsort(-1)
    fields = random(5, 2, 4, 1, seed=5)

    def made(h):
        pairs = torch.stack([order, order.roll(-1, -1)], -1)
        return Bonds(pairs, 0.4 * torch.tanh(h[..., 0]), 4, directed=True)

    found, right = (drive(KineticPlefka(), f, fields) for f in (made, lambda h: made(h).dense()))
    torch.testing.assert_close(found.states, right.states, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.housekeeping, right.housekeeping, rtol=0, atol=1e-9)


def test_temperatures_of_dynamics_on_bonds():
    bonds, field = Bonds(ONE_WAY, 0.1 * random(len(ONE_WAY), seed=1), SITES, directed=True), random(SITES, 1, seed=2)
    methods = [MeanField(), *DYNAMICS[:2], GaussianClosure()]
    found, right = (sweep(SpinSystem(c, field), methods, beta=torch.tensor([0.5, 1.0])) for c in (bonds, bonds.dense()))
    assert list(found.curves) == list(right.curves)
    for name, curves in found.curves.items():
        torch.testing.assert_close(curves, right.curves[name], rtol=0, atol=1e-6)
    assert "got directed Bonds; symmetrise" in found.refused["MeanField"]


def test_a_directed_ring_produces_entropy():
    """Every spin reads the one before: to first order sigma = N (beta J)^2 (1 - m^2)^2 for Ising spins."""
    sites = torch.arange(50)
    pairs = torch.stack([sites, sites.roll(1)], -1)
    ring = Bonds(pairs, torch.full((50,), 0.3).double(), 50, directed=True)
    state = stationary_state(SpinSystem(ring, torch.full((50, 1), 0.2).double()), KineticPlefka(), check="stability")
    m = state.magnetization
    torch.testing.assert_close(m, torch.tanh(0.2 + 0.3 * m))
    assert float(state.entropy_production) == pytest.approx(50 * float((0.3 * (1 - m[0] ** 2)) ** 2))
    assert bool((state.delayed_correlations[0] != state.delayed_correlations[1]).all())


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("method", DYNAMICS[:2] + DYNAMICS[3:], ids=repr)
def test_dynamics_of_one_site_and_of_none_that_are_joined(method, directed):
    field = random(2, 3, 1, seed=2)
    none = Bonds(torch.empty(0, 2).long(), torch.empty(0).double(), 3, directed=directed)
    state = stationary_state(SpinSystem(none, field), method, check="stability")
    torch.testing.assert_close(state.magnetization, torch.tanh(field), rtol=0, atol=1e-12)
    assert (state.delayed_correlations.shape, state.entropy_production.tolist()) == ((2, 2, 0), [0, 0])
    assert not SpinSystem(none, field).asymmetric().any()
    loop = Bonds(torch.tensor([[0, 0]]), torch.tensor([0.4]).double(), 1, directed=directed)
    found, right = (stationary_state(SpinSystem(c, field[:, :1]), method) for c in (loop, loop.dense()))
    torch.testing.assert_close(found.magnetization, right.magnetization, rtol=0, atol=1e-10)
    delayed = right.delayed_correlations.expand(2, 2, 1)
    torch.testing.assert_close(found.delayed_correlations, delayed, rtol=0, atol=1e-10)


def test_directed_bonds_as_they_are_read_back():
    """The pair of the last site comes first with its larger end; J_41 is given twice."""
    values = random(5, seed=1).requires_grad_()
    bonds = Bonds(torch.tensor([[4, 1], [0, 1], [1, 4], [4, 1], [2, 2]]), values, 5, directed=True)
    assert repr(bonds) == "Bonds(N = 5, E = 3, directed)"
    assert bonds.pairs.tolist() == [[0, 1], [1, 4], [2, 2]]
    v = values.detach()
    right = torch.stack([v[[1, 2, 4]], torch.stack([0 * v[0], v[0] + v[3], v[4]])])
    torch.testing.assert_close(bonds.values.detach(), right, rtol=0, atol=1e-15)
    dense = torch.zeros(5, 5).double()
    dense[4, 1], dense[0, 1], dense[1, 4], dense[2, 2] = v[0] + v[3], v[1], v[2], v[4]
    torch.testing.assert_close(bonds.dense().detach(), dense, rtol=0, atol=1e-15)
    assert torch.autograd.grad(bonds.dense()[4, 1], values)[0].tolist() == [1, 0, 0, 1, 0]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_directed_bonds_of_matrices_and_graphs():
    dense = Bonds(ONE_WAY, random(len(ONE_WAY), seed=1), SITES, directed=True).dense()
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(SITES))
    graph.add_weighted_edges_from((int(i), int(j), float(dense[i, j])) for i, j in dense.nonzero())
    for couplings in (dense, dense.to_sparse(), dense.to_sparse_csr(), scipy.sparse.csr_array(dense.numpy()), graph):
        bonds = Bonds.of(couplings, dtype=torch.float64, directed=True)
        torch.testing.assert_close(bonds.dense(), dense, rtol=0, atol=1e-15)
    samples = torch.stack([dense, dense.mT])
    torch.testing.assert_close(Bonds.of(samples, directed=True).dense(), samples, rtol=0, atol=1e-15)
    assert Bonds.of(networkx.path_graph(3), directed=True).values.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("matrices", [False, True])
def test_both_orders_of_directed_bonds_are_those_of_a_pair(matrices):
    values, field = 0.1 * random(len(ONE_WAY), *((2, 2) if matrices else ()), seed=1), random(SITES, 2, seed=2)
    bonds = Bonds(ONE_WAY, values, SITES, directed=True)
    found, right = (magnetization(SpinSystem.from_full(c, field), MeanField()) for c in (bonds, bonds.dense()))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-10)


def test_asymmetric_samples_of_bonds():
    values = random(len(ONE_WAY), seed=1) * torch.tensor([[0.0], [1.0]]).double()
    system = SpinSystem(Bonds(ONE_WAY, values, SITES, directed=True), random(2, SITES, 1, seed=2))
    assert system.asymmetric().tolist() == [False, True]


def chain(sites):
    """Its bonds, both directions of a pair in turn."""
    first = torch.arange(sites - 1)
    pairs = torch.stack([first, first + 1], -1)
    return torch.where(first[:, None] % 2 == 0, pairs, pairs.flip(-1))


def test_a_chain_is_exact_by_all_methods_that_say_so():
    """Of 12 sites, by a sum over all states of the test's own."""
    values, field, beta = 0.6 * random(3, 11, seed=1), random(3, 12, 1, seed=2), 0.7
    bonds = Bonds(chain(12), values, 12)
    spins = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * 12)
    energies = -torch.einsum("si,bij,sj->bs", spins, bonds.dense(), spins) / 2 - field[..., 0] @ spins.mT
    weights = (-beta * energies).softmax(-1)
    pairs = (spins[:, chain(12)[:, 0]] * spins[:, chain(12)[:, 1]]).to(weights)
    for method in EXACT_ON_CHAINS:
        found = thermodynamics(SpinSystem(bonds, field, beta), method)
        free = -((-beta * energies).logsumexp(-1) - 12 * np.log(2)) / beta
        torch.testing.assert_close(found.free_energy, free, rtol=0, atol=1e-10)
        torch.testing.assert_close(found.magnetization[..., 0], weights @ spins, rtol=0, atol=1e-10)
        torch.testing.assert_close(found.correlations, weights @ pairs, rtol=0, atol=1e-9)


def test_a_batch_of_graphs_is_one_after_the_other_where_pairs_are_read():
    graphs = torch.stack([PAIRS, torch.tensor([[0, 1], [1, 2], [2, 0], [3, 4], [5, 6], [4, 6], [3, 3], [1, 6]])])
    values, field = 0.3 * random(2, len(PAIRS), seed=1), random(2, SITES, 1, seed=2)
    for method in READERS:
        m = magnetization(SpinSystem(Bonds(graphs, values, SITES), field, 0.6), method)
        for k in range(2):
            alone = magnetization(SpinSystem(Bonds(graphs[k], values[k], SITES).dense(), field[k], 0.6), method)
            torch.testing.assert_close(m[k], alone, rtol=0, atol=1e-9)


def test_dynamics_on_bonds_has_its_entropy_production():
    """Also where every step has a graph of its own."""
    values, fields = 0.2 * random(3, len(PAIRS), seed=1), random(3, 2, SITES, 1, seed=2)
    graphs = torch.stack([PAIRS, PAIRS.roll(1, 0), (PAIRS + 1) % SITES])[:, None]
    couplings = Bonds(graphs, values[:, None], SITES)
    for method in (KineticPlefka(), GaussianClosure()):
        found, right = (drive(method, lambda h, c=c: c, fields) for c in (couplings, couplings.dense()))
        for name in ("states", "entropy_production", "housekeeping", "stationary", "mismatch", "relaxation_time"):
            torch.testing.assert_close(getattr(found, name), getattr(right, name), rtol=0, atol=1e-8)
    system = SpinSystem(Bonds(PAIRS, values[0], SITES), fields[0, 0])
    found = sweep(system, [MeanField(), KineticPlefka(), KineticPlefka(order=2)], beta=torch.tensor([0.5]))
    assert not found.refused


@pytest.mark.parametrize(
    ("method", "dim", "matrices"),
    [(MeanField(), 1, False), (MeanField(), 2, False), (MeanField(), 2, True), (TAP(), 1, False), (Bethe(), 1, False)],
    ids=repr,
)
def test_stability_is_that_of_the_tensor(method, dim, matrices):
    values, field = 0.3 * random(len(PAIRS), *((dim, dim) if matrices else ()), seed=1), random(2, SITES, dim, seed=2)
    bonds, mask = Bonds(PAIRS, values, SITES), torch.tensor([[3], [SITES]]) != torch.arange(SITES)
    systems = (SpinSystem(given, field, 0.8, mask=mask) for given in (bonds, bonds.dense()))
    found, right = (stability(system, method, starts=2, steps=6) for system in systems)
    for name in ("spectral_radius", "smallest_eigenvalue", "susceptibility", "almeida_thouless", "free_energies"):
        torch.testing.assert_close(getattr(found, name), getattr(right, name), rtol=0, atol=1e-9)
    assert torch.equal(found.branches, right.branches)
    assert found.recommended_method == right.recommended_method


def recommended(pairs, sites, dim=1, values=None):
    values = torch.full((len(pairs),), 0.1).double() if values is None else values
    system = SpinSystem(Bonds(pairs, values, sites), random(*values.shape[:-1], sites, dim, seed=1))
    return stability(system, MeanField(), starts=0, steps=2).recommended_method


def test_the_method_to_trust_takes_the_graph():
    tree = torch.stack([torch.arange(1, 40), torch.arange(1, 40) // 3], -1)
    assert recommended(tree, 40) == Bethe()
    assert recommended(torch.cat([tree, torch.tensor([[20, 30], [5, 5]])]), 40) == SaddlePoint(one_loop=True)
    # As many bonds as a tree has, but a loop and a site that nothing joins.
    assert recommended(torch.cat([tree[:38], torch.tensor([[20, 30]])]), 40) == SaddlePoint(one_loop=True)
    # A sample in which the bond that closes a loop has no value, and one in which it has.
    values = torch.full((2, 40), 0.1).double()
    values[0, -1] = 0
    assert recommended(torch.cat([tree, torch.tensor([[20, 30]])]), 40, values=values) == SaddlePoint(one_loop=True)
    assert recommended(torch.cat([tree, torch.tensor([[20, 30]])]), 40, values=values[:1]) == Bethe()
    assert recommended(torch.combinations(torch.arange(24)), 24) == AdaTAP()
    assert recommended(torus(46), 2116) == Bethe()
    assert recommended(torus(46), 2116, dim=2) == MeanField()


@pytest.mark.by_name(slow=r"\[(TAP|Bethe)")
@pytest.mark.parametrize("method", [MeanField(), TAP(), Bethe()], ids=repr)
def test_stability_makes_no_tensor_of_all_pairs(method):
    system = SpinSystem(Bonds(torus(16), 0.1 * random(512, seed=1), 256), random(256, 1, seed=2))
    with Work() as work:
        stability(system, method, starts=1, steps=2)
    assert 0 < work.largest < 256**2 / 2


def test_as_many_bonds_as_components_are_matrices():
    values, field = 0.3 * random(2, 2, 2, seed=1), random(3, 2, seed=2)
    bonds = Bonds(torch.tensor([[0, 1], [1, 2]]), values, 3)
    assert bonds.dense().shape == (3, 3, 2, 2)
    m, right = (magnetization(SpinSystem(given, field), MeanField()) for given in (bonds, bonds.dense()))
    torch.testing.assert_close(m, right, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", EQUILIBRIUM, ids=repr)
def test_correlations_are_those_of_the_bonds(method):
    values, field, beta = (t.detach() for t in numbers(method, 2))
    bonds = Bonds(PAIRS, values, SITES)
    found, right = (thermodynamics(SpinSystem(c, field, beta), method) for c in (bonds, bonds.dense()))
    assert found.correlations.shape == (2, len(PAIRS))
    i, j = PAIRS.unbind(-1)
    torch.testing.assert_close(found.correlations, right.correlations[:, i, j], rtol=0, atol=1e-9)
    for name in ("entropy", "heat_capacity", "internal_energy"):
        torch.testing.assert_close(getattr(found, name), getattr(right, name), rtol=0, atol=1e-9)
    torch.testing.assert_close(found.susceptibility(), right.susceptibility(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_graphs_of_different_sizes_are_one_batch(method):
    """Of which the smaller ones are padded by bonds of value 0 and by sites that do not exist."""
    dim = 1 if method in ISING else 3
    counts, sites = (8, 3, 0), (7, 4, 2)
    graphs = [PAIRS[:8], torch.tensor([[0, 1], [1, 2], [3, 1]]), PAIRS[:0]]
    values = [0.3 * random(count, seed=count) for count in counts]
    fields = [random(count, dim, seed=count + 20) for count in sites]
    pairs, padded, field = torch.zeros(3, 8, 2).long(), torch.zeros(3, 8).double(), torch.zeros(3, 7, dim).double()
    for k, (graph, own, h) in enumerate(zip(graphs, values, fields, strict=True)):
        pairs[k, : len(graph)], padded[k, : len(own)], field[k, : len(h)] = graph, own, h
    mask = torch.arange(7) < torch.tensor(sites)[:, None]
    together = magnetization(SpinSystem(Bonds(pairs, padded, 7), field, 0.8, mask=mask), method)
    for k, (graph, own, h) in enumerate(zip(graphs, values, fields, strict=True)):
        alone = magnetization(SpinSystem(Bonds(graph, own, len(h)), h, 0.8), method)
        torch.testing.assert_close(together[k, : len(h)], alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dim", [1, 2])
def test_the_third_order_on_graphs_with_different_numbers_of_triangles(dim):
    """Complete graphs, a graph whose bonds of 0 close triangles, and one without any, next to loops."""
    whole = torch.combinations(torch.arange(5))
    pairs = torch.stack([whole, whole, torch.tensor([[0, k % 4 + 1] for k in range(9)] + [[2, 2]])])
    values = 0.15 * random(3, 10, seed=1)
    values[1, ::2] = 0
    field, beta = random(3, 5, dim, seed=2), torch.tensor([0.2, 1.0, 0.5]).double()
    given = values.requires_grad_(), field.requires_grad_(), beta.requires_grad_()
    method = TAP(order=3, response=AmosResponse() if dim > 1 else SphereUnits())
    bonds = Bonds(pairs, values, 5)
    found, right = (thermodynamics(SpinSystem(c, field, beta), method) for c in (bonds, bonds.dense()))
    for name in ("heat_capacity",) if dim == 1 else ("free_energy", "magnetization"):
        numbers = [getattr(answer, name) for answer in (found, right)]
        torch.testing.assert_close(*numbers, rtol=0, atol=1e-10)
        by = [torch.autograd.grad(number.cos().sum(), given, retain_graph=True) for number in numbers]
        torch.testing.assert_close(*by, rtol=0, atol=1e-9)
    few = SpinSystem(Bonds(whole, values[0], 5), field[0], beta[0])
    assert not torch.equal(free_energy(few, method), free_energy(few, TAP(response=method.response)))


def test_triangles_are_those_of_the_graph():
    graphs = [networkx.gnp_random_graph(15, 0.4, seed=seed) for seed in range(4)] + [networkx.star_graph(14)]
    for graph in graphs:
        pairs = torch.tensor([*graph.edges, (3, 3), (3, 3), (8, 8)])
        with torch.inference_mode():
            corners, sides = (part.ends.mT for part in Graph(pairs.mT, 15, loops=True).triangles())
        corners = corners - 1
        triangles = {frozenset(three) for three in combinations(range(15), 3) if graph.subgraph(three).size() == 3}
        assert {frozenset(three) for three in corners.tolist()} == triangles
        assert len(corners) == len(triangles)
        for three, opposite in zip(corners.tolist(), pairs[sides].tolist(), strict=True):
            assert [set(three) - {corner} for corner in three] == [set(bond) for bond in opposite]


def test_triangles_are_found_once_and_serve_all_calls():
    values, field, method = (0.1 * random(8, seed=1)).requires_grad_(), random(SITES, 1, seed=2), TAP(order=3)
    system = SpinSystem(Bonds(PAIRS, values, SITES), field)

    def grads(system):
        return torch.autograd.grad(magnetization(system, method).sum(), values)[0]

    torch.func.hessian(lambda h: method.log_partition(system.at(h, values.detach(), 1.0)).value)(field)
    torch.func.grad(lambda h: method.log_partition(system.at(h, values.detach(), 1.0)).value)(field)
    with torch.inference_mode():
        magnetization(system, method)
    known = system.graph.triangles()
    for _ in range(2):
        thermodynamics(system, method)
    torch.testing.assert_close(grads(system), grads(SpinSystem(Bonds(PAIRS, values, SITES).dense(), field)))
    assert system.graph.triangles() is known


def test_a_bond_that_is_given_twice_is_summed():
    values = random(5, seed=1).requires_grad_()
    bonds = Bonds(torch.tensor([[3, 1], [0, 1], [3, 1], [2, 2], [2, 2]]), values, 4)
    assert sorted(bonds.pairs.tolist()) == [[0, 1], [2, 2], [3, 1]]
    dense = torch.zeros(4, 4).double()
    dense[0, 1] = dense[1, 0] = values[1].detach()
    dense[1, 3] = dense[3, 1] = (values[0] + values[2]).detach()
    dense[2, 2] = (values[3] + values[4]).detach()
    torch.testing.assert_close(bonds.dense().detach(), dense, rtol=0, atol=1e-15)
    assert torch.autograd.grad(bonds.dense()[3, 1], values)[0].tolist() == [1, 0, 1, 0, 0]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_bonds_of_matrices_and_graphs():
    dense = Bonds(PAIRS, random(len(PAIRS), seed=1), SITES).dense()
    graph = networkx.Graph()
    graph.add_nodes_from(range(SITES))
    graph.add_weighted_edges_from((int(i), int(j), float(dense[i, j])) for i, j in PAIRS)
    matrix = scipy.sparse.csr_array(dense.numpy())
    given = (dense, dense.to_sparse(), dense.to_sparse_csr(), matrix, graph)
    for couplings in given:
        bonds = Bonds.of(couplings, dtype=torch.float64)
        assert bonds.values.dtype == torch.float64
        torch.testing.assert_close(bonds.dense(), dense, rtol=0, atol=1e-15)
    assert Bonds.of(networkx.path_graph(3)).values.tolist() == [1, 1]
    field = random(SITES, 1, seed=2)
    found, right = (magnetization(SpinSystem(c, field), MeanField()) for c in (dense.to_sparse(), dense))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-10)
    samples = torch.stack([dense, 0 * dense])
    torch.testing.assert_close(Bonds.of(samples).dense(), samples, rtol=0, atol=1e-15)


def test_sparse_couplings_have_gradients():
    values = random(2, seed=1).requires_grad_()
    places = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    sparse = torch.sparse_coo_tensor(places, values.repeat_interleave(2), (3, 3), check_invariants=True)
    dense = Bonds(torch.tensor([[0, 1], [1, 2]]), values, 3).dense()
    by = [
        torch.autograd.grad(magnetization(SpinSystem(c, random(3, 1, seed=2)), Bethe()).sum(), values)[0]
        for c in (sparse, dense)
    ]
    torch.testing.assert_close(*by, rtol=0, atol=1e-10)


def test_sparse_couplings_may_be_a_function_of_the_field():
    places, field = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), random(3, 1, seed=2)

    def made(h):
        numbers = 0.3 * torch.tanh(h[1:, 0] * h[:-1, 0]).repeat_interleave(2)
        return torch.sparse_coo_tensor(places, numbers, (3, 3), check_invariants=False)

    for make in (SpinSystem, SpinSystem.from_full):
        found = magnetization(make(made, field), Bethe())
        right = magnetization(make(lambda h: made(h).to_dense(), field), Bethe())
        torch.testing.assert_close(found, right, rtol=0, atol=1e-9)
    whole = made(field)
    found, right = (magnetization(SpinSystem.from_full(c, field), Bethe()) for c in (whole, whole.to_dense()))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-10)


def test_couplings_that_are_a_function_of_the_field():
    pairs, field = torch.tensor([[0, 1], [1, 2]]), random(2, 3, 1, seed=2)

    def made(h):
        return Bonds(pairs, 0.3 * torch.tanh(h[..., 1:, 0] * h[..., :-1, 0]), 3)

    for make in (SpinSystem, SpinSystem.from_full):
        found = magnetization(make(made, field), Bethe())
        right = magnetization(make(lambda h: made(h).dense(), field), Bethe())
        torch.testing.assert_close(found, right, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_no_tensor_of_all_pairs_is_made(method):
    pairs = torus(20)
    values = (0.1 * random(len(pairs), seed=1)).requires_grad_()
    system = SpinSystem(Bonds(pairs, values, 400), random(400, 1 if method in ISING else 2, seed=2))
    with Work() as work:
        magnetization(system, method).sum().backward()
    # The largest are the coefficients of a law, 98 for a component.
    assert 0 < work.largest < 400**2 / 2


@pytest.mark.parametrize("matrices", [False, True])
@pytest.mark.parametrize("method", [KineticPlefka(), KineticPlefka(order=2), GaussianClosure()], ids=repr)
def test_dynamics_makes_no_tensor_of_all_pairs(method, matrices):
    if matrices and method != KineticPlefka():
        return
    pairs = torus(20)
    values = (0.1 * random(len(pairs), *((2, 2) if matrices else ()), seed=1)).requires_grad_()
    bonds = Bonds(pairs, values, 400, directed=True)
    with Work() as work:
        state = stationary_state(SpinSystem(bonds, random(400, 2, seed=2)), method, check="stability")
        (state.entropy_production + state.delayed_correlations.sum()).backward()
        if method != KineticPlefka(order=2):
            drive(method, bonds, random(2, 400, 2, seed=3))
    assert 0 < work.largest < 400**2


def test_bethe_knows_what_is_unstable_on_a_large_graph():
    """A regular graph of degree 4 without a field: m = 0 is stable up to tanh(beta J) = 1/3."""
    pairs, critical = torus(12), np.arctanh(1 / 3)
    field, beta = torch.zeros(3, 144, 1).double(), torch.tensor([0.5, 1 - 1e-3, 1 + 1e-3]).double() * critical
    for sign in (1.0, -1.0):
        system = SpinSystem(Bonds(pairs, torch.full((288,), sign).double(), 144), field, beta)
        found = thermodynamics(system, Bethe(), on_failure="ignore").report
        assert found.status.tolist() == [Status.CONVERGED, Status.CONVERGED, Status.UNSTABLE]


def test_a_column_of_chi_of_a_tree_is_one_solve_by_messages():
    """The correlation of two sites is the product of those of the bonds between them, over the variances inside."""
    sites = 400
    parents = (random(sites - 1, seed=1).abs() * torch.arange(sites - 1)).long() % torch.arange(1, sites)
    pairs = torch.stack([parents, torch.arange(1, sites)], -1)
    system = SpinSystem(Bonds(pairs, 0.8 * random(sites - 1, seed=2), sites), random(sites, 1, seed=3), 1.2)
    found = thermodynamics(system, Bethe())
    m, (i, j) = found.magnetization[:, 0], pairs.unbind(-1)
    variance = 1 - m.square()
    column = [variance[0]]
    for parent, factor in zip(parents, (found.correlations - m[i] * m[j]) / variance[i], strict=True):
        column.append(column[parent] * factor)
    with Work() as work:
        chi = found.susceptibility_product((torch.arange(sites) == 0).double()[:, None])[:, 0]
    torch.testing.assert_close(chi / 1.2, torch.stack(column), rtol=0, atol=1e-12)
    assert int(found.report.adjoint.num_steps) < 100
    # The directions of the solve are the most that is kept.
    assert work.largest < 50 * 2 * sites


def test_bethe_of_a_lattice_without_disorder_is_one_equation():
    """u = atanh(tanh K tanh(h + 3 u)) for all messages, and the free energy of a tree with four neighbours."""
    k, h, u = 0.3, 0.1, 0.0
    for _ in range(200):
        u = np.arctanh(np.tanh(k) * np.tanh(h + 3 * u))
    field, m = (torch.full((81, 1), number, dtype=torch.float64) for number in (h / k, np.tanh(h + 4 * u)))
    system = SpinSystem(Bonds(torus(9), torch.ones(162).double(), 81), field, k)
    torch.testing.assert_close(magnetization(system, Bethe()), m, rtol=0, atol=1e-10)
    c = h + 3 * u
    pair = np.log((np.exp(k) * np.cosh(2 * c) + np.exp(-k)) / (2 * np.cosh(h + 4 * u) ** 2))
    site = np.log(np.cosh(h + 4 * u)) + 2 * pair
    assert float(free_energy(system, Bethe())) == pytest.approx(-81 * site / k, rel=1e-12)


def test_a_graph_without_bonds():
    bonds, field = Bonds(torch.empty(0, 2).long(), torch.empty(0).double(), 3), random(3, 1, seed=1)
    for method in (MeanField(), TAP(), TAP(order=3), Bethe()):
        found = magnetization(SpinSystem(bonds, field, 0.7), method)
        torch.testing.assert_close(found, torch.tanh(0.7 * field), rtol=0, atol=1e-12)


def test_a_sample_that_is_not_finite_changes_no_other():
    values = 0.3 * random(3, len(PAIRS), seed=1)
    broken = values.clone()
    broken[1, 2] = torch.nan
    field = random(3, SITES, 1, seed=2)
    for method in (MeanField(), TAP(), Bethe()):
        systems = (SpinSystem(Bonds(PAIRS, given, SITES), field) for given in (values, broken))
        sound, found = (magnetization(system, method, on_failure="ignore") for system in systems)
        assert found[1].isnan().all()
        torch.testing.assert_close(found[[0, 2]], sound[[0, 2]], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("pairs", "values", "error", "message"),
    [
        ([[0, 3]], 1, ValueError, r"`pairs` must be in \[0, 2\], got 3; sites are counted from 0"),
        ([[-1, 0]], 1, ValueError, r"`pairs` must be in \[0, 2\], got -1"),
        ([[0.0, 1.0]], 1, TypeError, "`pairs` must be a tensor of integers, got torch.float32; pass pairs.long"),
        ([0, 1], 1, ValueError, r"`pairs` must have shape \(E, 2\) or \(\*batch, E, 2\), got shape \(2,\)"),
        ([[0, 1], [1, 0]], 2, ValueError, r"give a bond in one direction, got \(0, 1\) and \(1, 0\); .* directed=True"),
        ([[0, 1]], 3, ValueError, r"`values` must have the shape .* with E = 1, the number of pairs, got shape \(3,\)"),
    ],
)
def test_wrong_bonds_are_refused(pairs, values, error, message):
    with pytest.raises(error, match=message):
        Bonds(torch.tensor(pairs), torch.ones(values), 3)


def test_what_bonds_cannot_be_is_refused():
    bonds, field = Bonds(torch.tensor([[0, 1]]), torch.ones(1), 2), torch.zeros(2, 1)
    with pytest.raises(
        ValueError, match=r"a number for each pair, .* for TAP on bonds, .*; use MeanField\(\), or Bonds"
    ):
        magnetization(SpinSystem(Bonds(bonds.pairs, torch.ones(1, 2, 2), 2), torch.zeros(2, 2)), TAP(order=3))
    many, sites = Bonds(chain(2049), torch.ones(2048), 2049), torch.zeros(2049, 1)
    required = "at most 2,048 sites for AdaTAP, which reads every pair, got Bonds of 2,049 sites, which are 0.017 GB"
    with pytest.raises(ValueError, match=required + r" as a tensor; use MeanField\(\), TAP\(\) or Bethe\(\)"):
        magnetization(SpinSystem(many, sites), AdaTAP())
    with pytest.raises(ValueError, match=r"sites for SaddlePoint, .* use MeanField\(\) or TAP\(\)"):
        magnetization(SpinSystem(many, sites.expand(2049, 2)), SaddlePoint())
    with pytest.raises(ValueError, match=r"for SaddlePoint, .* 0.067 GB as a tensor; use MeanField\(\)$"):
        magnetization(SpinSystem(Bonds(chain(2049), torch.ones(2048, 2, 2), 2049), torch.zeros(2049, 2)), SaddlePoint())
    with pytest.raises(ValueError, match=r"sites where every pair is read, .* use MeanField\(\)$"):
        assert SpinSystem(many, sites).flat_couplings
    with pytest.raises(ValueError, match="have at most 20 sites, got 2049"):
        magnetization(SpinSystem(many, sites), Enumeration())
    with pytest.raises(ValueError, match="between N = 3 sites, those of `field`, got N = 2"):
        SpinSystem(bonds, torch.zeros(3, 1))
    with pytest.raises(ValueError, match=r"a number or a \(3, 3\) matrix for each bond, got values of shape \(1, 2, 2"):
        SpinSystem(Bonds(torch.tensor([[0, 1]]), torch.ones(1, 2, 2), 2), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="`couplings` must be symmetric, got a difference of"):
        Bonds.of(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    with pytest.raises(ValueError, match=r"`couplings` must be symmetric, .*Bonds.of\(..., directed=True\)"):
        SpinSystem(torch.tensor([[0.0, 1.0], [0.0, 0.0]]).to_sparse(), field)
    with pytest.raises(ValueError, match=r"`couplings` must be undirected, got a directed graph; .* or directed=True"):
        Bonds.of(networkx.DiGraph([(0, 1)]))
    with pytest.raises(TypeError, match="`directed` must be"):
        Bonds(torch.tensor([[0, 1]]), torch.ones(1), 2, directed=None)
    with pytest.raises(TypeError, match="`directed` must be"):
        Bonds.of(torch.ones(2, 2), directed="yes")
    one_way = SpinSystem(Bonds(torch.tensor([[0, 1]]), torch.ones(1), 2, directed=True), field)
    for method in EQUILIBRIUM:
        with pytest.raises(ValueError, match=r"symmetric \(J_ij = J_ji\^T\) for .*, got directed Bonds; symm"):
            thermodynamics(one_way, method)
    matrices = SpinSystem(Bonds(torch.tensor([[0, 1]]), torch.ones(1, 2, 2), 2, directed=True), torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"a number for each pair, \(E,\) or \(\*batch, E\), for KineticPlefka"):
        stationary_state(matrices, KineticPlefka(order=2))
    with pytest.raises(TypeError, match="`couplings` must be a matrix or a graph, got list; pass a tensor"):
        Bonds.of([[0, 1]])
    with pytest.raises(TypeError, match="`couplings` must have a floating-point dtype, got torch"):
        Bonds.of(torch.tensor([[0, 1], [1, 0]]).to_sparse())
    with pytest.raises(ValueError, match="`couplings` must have at least one site, got an empty graph"):
        Bonds.of(networkx.Graph())
    with pytest.raises(TypeError, match=r"a tensor or a function of the field, got Graph; pass Bonds.of\(couplings\)"):
        SpinSystem(networkx.path_graph(2), field)
    with pytest.raises(TypeError, match=r"`pairs` must be a tensor of integers, got list; pass torch.as_tensor"):
        Bonds([[0, 1]], torch.ones(1), 2)
    with pytest.raises(ValueError, match="`values` must broadcast with the leading axes of `pairs`"):
        Bonds(torch.zeros(3, 1, 2).long(), torch.ones(2, 1), 2)
    with pytest.raises(ValueError, match=r"`couplings` must broadcast to the leading axes of `field`"):
        SpinSystem(Bonds(torch.zeros(3, 1, 2).long(), torch.ones(1), 2), torch.zeros(2, 2, 1))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_messages_of_a_linear_system_follow_from_sums_at_sites(own, transpose):
    """At a solution; the dense system of the Jacobian is the other route."""
    pairs = torch.stack([PAIRS, PAIRS.roll(1, 0)]) if own else PAIRS
    system = SpinSystem(Bonds(pairs, random(2, len(PAIRS), seed=1), SITES), random(2, SITES, 1, seed=2), 0.7)
    problem, solution = Bethe().problem(system), Bethe().answer(system).state
    rhs = random(*solution.shape, seed=3)
    found, spent = problem.linearize(solution).guess(rhs, 1e-13, transpose)
    for sample in range(2):
        part = problem.select(torch.tensor([sample]))
        jacobian = torch.autograd.functional.jacobian(part.fixed_point_map, solution[sample : sample + 1])
        matrix = torch.eye(2 * len(PAIRS)).double() - jacobian.reshape(2 * len(PAIRS), -1)
        right = torch.linalg.solve(matrix.mT if transpose else matrix, rhs[sample].flatten())
        torch.testing.assert_close(found[sample].flatten(), right, rtol=0, atol=1e-8)
    assert bool((spent > 0).all())
    # A system of nothing is solved by nothing, beside one that is not.
    alone = rhs * torch.tensor([1.0, 0.0]).double()[:, None, None]
    found, spent = problem.linearize(solution).guess(alone, 1e-13, transpose)
    assert not found[1].any()
    assert spent.tolist()[1] == 0


@pytest.mark.parametrize(("coupling", "field"), [(0.37, 1e-4), (0.39, 1e-4), (0.8, 0.1), (0.3466, -1e-3)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_small_field_leads_to_the_minimum(coupling, field, sign):
    """Below the transition, at tanh K = 1/3, and near it; with the sign of an antiferromagnet in a staggered field."""
    length = 12
    u = np.sign(field) * 10.0
    for _ in range(200_000):
        u = np.arctanh(np.tanh(coupling) * np.tanh(field + 3 * u))
    staggered = (torch.arange(length)[:, None] + torch.arange(length)).flatten() % 2 * (sign - 1) + 1
    bonds = Bonds(torus(length), torch.full((2 * length**2,), sign * coupling, dtype=torch.float64), length**2)
    m, answer = magnetization(
        SpinSystem(bonds, field * staggered[:, None].double()), Bethe(), check="stability", return_answer=True
    )
    assert bool(answer.report.converged)
    expected = float(np.tanh(field + 4 * u)) * staggered[:, None].double()
    torch.testing.assert_close(m, expected, rtol=0, atol=1e-8)


def test_no_newton_step_leads_to_a_saddle():
    """Just below the transition steps of messages leave m = 0 by a part in a thousand each."""
    bonds = Bonds(torus(12), torch.full((288,), 0.3473, dtype=torch.float64), 144)
    system = SpinSystem(bonds, torch.zeros(144, 1).double())
    m, answer = magnetization(
        system, Bethe(), initial=torch.full((144, 1), 0.03).double(), check="stability", return_answer=True
    )
    assert bool(answer.report.converged)
    u = 1.0
    for _ in range(200_000):
        u = np.arctanh(np.tanh(0.3473) * np.tanh(3 * u))
    torch.testing.assert_close(m, torch.full((144, 1), np.tanh(4 * u)).double(), rtol=0, atol=1e-8)


def test_the_answer_of_plain_messages_may_be_a_saddle():
    """Spins of an antiferromagnet in a uniform field that is weak: the one solution of plain messages is a saddle."""
    bonds = Bonds(torus(6), torch.full((72,), -0.5).double(), 36)
    system = SpinSystem(bonds, torch.full((36, 1), 0.1).double())
    assert thermodynamics(system, Bethe(), on_failure="ignore").report.status.tolist() == Status.UNSTABLE
    start = 0.5 * torch.tensor([1.0, -1.0])[(torch.arange(6)[:, None] + torch.arange(6)) % 2].reshape(36, 1)
    found = thermodynamics(system, Bethe(), initial=start)
    assert bool(found.report.converged)
    assert float(found.magnetization.abs().min()) > 0.5


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_products_by_rows_are_those_by_bonds(monkeypatch, own, directed):
    monkeypatch.setattr(bonds_module, "SHORT", 0)
    ends = torch.stack([PAIRS, PAIRS.roll(1, 0), PAIRS.flip(0)]).mT if own else PAIRS.mT.contiguous()
    graph, values = Graph(ends, SITES, True, 0, directed), random(3, *(2,) * directed, len(PAIRS), seed=1)
    if not own:
        values = values[0]
    twin = graph.replace(*graph.tensors())
    none = torch.zeros(0, 3, SITES, 1).double()
    for vectors in (none, random(3, SITES, 2, seed=2), random(4, 3, SITES, 1, seed=3)):
        for factor in (1, 2, -1):
            change = values if factor > 0 else -values
            values.mul_(abs(factor))
            found = graph.product(change, vectors)
            right = graph.product(change.clone().requires_grad_(), vectors).detach()
            torch.testing.assert_close(found, right, rtol=0, atol=1e-12)
            torch.testing.assert_close(twin.product(change, vectors), right, rtol=0, atol=1e-12)
            squares = graph.product(change.square().requires_grad_(), vectors).detach()
            torch.testing.assert_close(graph.product(change, vectors, squares=True), squares, rtol=0, atol=1e-12)
            with torch.inference_mode():
                again = change.clone()
                torch.testing.assert_close(graph.product(again, vectors), right, rtol=0, atol=1e-12)
                again.mul_(3)
                torch.testing.assert_close(graph.product(again, vectors), 3 * right, rtol=0, atol=1e-12)
    assert graph._found.rows is not None
    assert graph._found is twin._found
    # Numbers that are changed in place are read again, as are those of a tensor in the place of one that is gone.
    torch.testing.assert_close(graph.product(values.mul_(3), vectors), -3 * right, rtol=0, atol=1e-12)
    torch.testing.assert_close(graph.product(values.mul_(2), vectors), -6 * right, rtol=0, atol=1e-12)
    if own:
        part, some = graph.select(torch.tensor([1])), vectors[0, 1:2]
        right = part.product(values[1:2].clone().requires_grad_(), some).detach()
        torch.testing.assert_close(part.product(values[1:2], some), right, rtol=0, atol=1e-12)


def test_what_was_found_of_a_graph_is_no_part_of_it():
    """Triangles and rows that one method has found change nothing for others, nor for files and copies."""
    pairs = torch.stack([PAIRS, PAIRS.roll(1, 0)])[:, None]
    bonds, fields = Bonds(pairs, 0.2 * random(2, 1, len(PAIRS), seed=1), SITES), random(2, 3, SITES, 1, seed=2)
    before = drive(KineticPlefka(), lambda h: bonds, fields).states
    magnetization(SpinSystem(bonds, fields), TAP(order=3))
    assert bonds.graph._found.triangles is not None
    assert torch.equal(drive(KineticPlefka(), lambda h: bonds, fields).states, before)
    for copied in (pickle.loads(pickle.dumps(bonds)), copy.deepcopy(bonds)):
        assert copied.graph._found.triangles is None
        assert len(copied.tensors()) == 2
        assert torch.equal(copied.dense(), bonds.dense())

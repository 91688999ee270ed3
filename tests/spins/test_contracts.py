"""What every method has to do, for every method."""

import pytest
import torch
from work import Work

from implicit_attention import Picard, spins
from implicit_attention.potentials import AmosResponse, DiscreteUnits, GaussianUnits
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
    free_energy,
    magnetization,
    stationary_state,
)
from implicit_attention.testing.approximation import ApproximationContract
from implicit_attention.testing.numerics import check_close, dense_jacobian, random

pytestmark = pytest.mark.by_name(
    slow=r"test_(second_derivatives\[(?!mag)|derivatives_of_every_output\[(?!free_energy|mag|correlations))",
    # The second derivatives of what is a second derivative of the free energy already.
    nightly=r"test_second_derivatives\[(susceptibility|heat_capacity)",
)
THREE = DiscreteUnits((-1, 0, 2), (1.0, 2.0, 0.5))
#: Of methods for numbers each is asked of its derivatives once, for vectors or by another class.
ISING = pytest.mark.by_name(slow=r"test_(magnetization_has|derivatives|second|outputs_are|a_sample)")


@ISING
class TestMeanFieldOfIsingSpins(ApproximationContract):
    def make(self):
        return MeanField()


@pytest.mark.by_name(slow=r"test_(second|derivatives_of_every_output\[(mag|cor))")
class TestMeanField(ApproximationContract):
    dim = 3

    def make(self):
        return MeanField()


@pytest.mark.by_name(slow=r"test_derivatives_of_every_output\[(mag|cor)")
class TestMeanFieldWithAmosResponse(ApproximationContract):
    dim = 4

    def make(self):
        return MeanField(response=AmosResponse())


@ISING
class TestTAPOfIsingSpins(ApproximationContract):
    def make(self):
        return TAP()


@pytest.mark.by_name(slow=r"test_(second|derivatives)")
class TestTAPOfThirdOrder(ApproximationContract):
    def make(self):
        return TAP(order=3)


@pytest.mark.by_name(
    slow=r"test_(autocast|derivatives|second|susceptibility|what|magnetization_has|the_order|parts|a_sample)"
)
class TestTAP(ApproximationContract):
    dim = 2

    def make(self):
        return TAP(response=AmosResponse())


@ISING
class TestAdaTAPOfIsingSpins(ApproximationContract):
    def make(self):
        return AdaTAP()


@pytest.mark.by_name(
    slow=r"test_(autocast|derivatives|outputs|susceptibility|what|magnetization_has|the_order|parts|a_sample|a_masked)"
)
class TestAdaTAP(ApproximationContract):
    dim = 3
    # Fourth derivatives of Bessel functions take long; those of magnetizations are the third.
    test_second_derivatives = None

    def make(self):
        return AdaTAP()


@ISING
class TestAdaTAPOfSpinsOfThreeValues(ApproximationContract):
    # Their length is not fixed: no lone spin on a sphere answers like them.
    test_spins_without_couplings_answer_alone = None

    def make(self):
        return AdaTAP(prior=THREE)


class TestAdaTAPOfGaussianSpins(ApproximationContract):
    dim = 2
    # Their length is not fixed: no lone spin on a sphere answers like them.
    test_spins_without_couplings_answer_alone = None

    def make(self):
        return AdaTAP(prior=GaussianUnits())


class TestSaddlePoint(ApproximationContract):
    dim = 3

    def make(self):
        return SaddlePoint()


class TestOneLoop(ApproximationContract):
    dim = 3
    # The loop around a lone spin is beyond its response.
    test_spins_without_couplings_answer_alone = None

    def make(self):
        return SaddlePoint(one_loop=True)


class TestSphericalModel(ApproximationContract):
    dim = 3
    # All parts share one multiplier.
    test_spins_without_couplings_answer_alone = None
    test_parts_without_couplings_between_them_add_up = None

    def make(self):
        return SaddlePoint(shared=True)


@pytest.mark.by_name(slow=r"test_derivatives_of_every_output\[(mag|cor)")
class TestBethe(ApproximationContract):
    def make(self):
        return Bethe()


class TestEnumeration(ApproximationContract):
    def make(self):
        return Enumeration()


@ISING
class TestChainOfIsingSpins(ApproximationContract):
    chain = True

    def make(self):
        return TransferMatrix()


@pytest.mark.by_name(
    slow=r"test_(autocast|derivatives_of_every_output\[(?!free)|second|susceptibility|what|the_order|parts|a_sample)"
)
class TestChain(ApproximationContract):
    chain = True
    dim = 3

    def make(self):
        return TransferMatrix()


class Matrices(ApproximationContract):
    """Vectors that are coupled by one matrix, turned around in the other order of a pair."""

    dim = 2
    # All samples share their couplings, which are no numbers and do not turn with the fields.
    test_autocast_changes_no_bit = None
    test_a_sample_does_not_depend_on_its_company = None
    test_parts_without_couplings_between_them_add_up = None
    test_a_rotation_of_all_fields_rotates_all_magnetizations = None

    def couplings(self, weights):
        turned = weights.triu(1)[..., None, None] * (torch.eye(2) + 0.5 * random(2, 2, seed=7)).to(weights)
        return turned + turned.permute(1, 0, 3, 2)


class OnBonds:
    """First base of a contract: the same couplings are on the bonds of a graph."""

    def given(self, couplings):
        return Bonds.of(couplings)


@ISING
class TestMeanFieldOnBonds(OnBonds, TestMeanFieldOfIsingSpins):
    pass


@ISING
class TestTAPOnBonds(OnBonds, TestTAPOfIsingSpins):
    pass


@pytest.mark.by_name(slow=r"test_(autocast|derivatives|second|susceptibility|what|magnetization_has|parts|a_sample)")
class TestTAPOfVectorsOnBonds(OnBonds, ApproximationContract):
    dim = 3

    def make(self):
        return TAP()


@pytest.mark.by_name(slow=r"test_(second|derivatives)")
class TestTAPOfThirdOrderOnBonds(OnBonds, TestTAPOfThirdOrder):
    pass


class TestBetheOnBonds(OnBonds, TestBethe):
    pass


#: Of methods that make a tensor of bonds little more than its derivatives is new.
AS_TENSOR = pytest.mark.by_name(slow=r"test_(?!derivatives_of_every_output\[(mag|cor)|outputs_are|a_masked|spins|vmap)")


@AS_TENSOR
class TestAdaTAPOnBonds(OnBonds, TestAdaTAPOfIsingSpins):
    pass


@AS_TENSOR
class TestAdaTAPOfGaussianSpinsOnBonds(OnBonds, TestAdaTAPOfGaussianSpins):
    pass


@AS_TENSOR
class TestSaddlePointOnBonds(OnBonds, TestSaddlePoint):
    pass


@AS_TENSOR
class TestOneLoopOnBonds(OnBonds, TestOneLoop):
    pass


@AS_TENSOR
class TestEnumerationOnBonds(OnBonds, TestEnumeration):
    pass


@AS_TENSOR
class TestChainOnBonds(OnBonds, TestChainOfIsingSpins):
    pass


@pytest.mark.by_name(slow=r"test_(magnetization_has|outputs_are|what|the_order|single)")
class TestTAPOfMatrices(Matrices):
    # They take long; second derivatives of magnetizations are third ones of log Z.
    test_derivatives_of_every_output = None
    test_second_derivatives = None

    def make(self):
        return TAP(order=3, response=AmosResponse())


@ISING
class TestOneLoopOfMatrices(Matrices):
    test_spins_without_couplings_answer_alone = None

    def make(self):
        return SaddlePoint(one_loop=True)


def test_every_method_with_a_free_energy_is_asked():
    contracts = set(ApproximationContract.__subclasses__()) - {Matrices}
    asked, on_bonds = ({type(one().make()) for one in kinds} for kinds in (contracts, OnBonds.__subclasses__()))
    known = {kind for kind in vars(spins).values() if isinstance(kind, type) and issubclass(kind, spins.Approximation)}
    dynamics = {kind for kind in known if issubclass(kind, spins.DynamicalMethod)}
    assert asked == on_bonds == known - dynamics - {spins.Approximation, spins.FixedPointApproximation}


# What holds for all methods, those of dynamics included.

THIRD = TAP(order=3, response=AmosResponse())
OF_MATRICES = [MeanField(), TAP(response=AmosResponse()), THIRD, AdaTAP(), SaddlePoint(), KineticPlefka()]
OF_VECTORS = [*OF_MATRICES, SaddlePoint(one_loop=True), SaddlePoint(shared=True), AdaTAP(prior=GaussianUnits())]
OF_VECTORS += [KineticPlefka(order=2), GaussianClosure()]
OF_NUMBERS = [Bethe(), Enumeration(), TransferMatrix()]


def symmetric(dim=None, seed=1):
    """Couplings of four sites as numbers, or as matrices."""
    drawn = 0.4 * random(4, 4, *(() if dim is None else (dim, dim)), seed=seed)
    return (drawn + (drawn.mT if dim is None else drawn.permute(1, 0, 3, 2))) / 2


def asymmetric_bonds(*of_one):
    """Couplings in one direction or in both, with a loop."""
    pairs = torch.tensor([[0, 1], [1, 0], [3, 1], [1, 2], [2, 2]])
    return Bonds(pairs, 0.4 * random(5, *of_one, seed=1), 4, directed=True)


def answers(system, method):
    """The magnetization, and the free energy or the entropy production."""
    if isinstance(method, spins.DynamicalMethod):
        state = stationary_state(system, method)
        return state.magnetization, state.entropy_production
    return magnetization(system, method), free_energy(system, method)


@pytest.mark.parametrize("method", [*OF_MATRICES, Bethe(), Enumeration()], ids=repr)
def test_matrices_that_are_numbers_are_numbers(method):
    dim = 1 if method in OF_NUMBERS else 3
    couplings, field = symmetric(), random(2, 4, dim, seed=2)
    blocks = couplings[..., None, None] * torch.eye(dim).double()
    found, truth = (answers(SpinSystem(given, field, 0.8, radius=1.2), method) for given in (blocks, couplings))
    check_close(found, truth, 1e-9)


@pytest.mark.parametrize("method", [*OF_MATRICES, SaddlePoint(one_loop=True)], ids=repr)
def test_axes_of_every_site_may_be_turned_where_couplings_are_matrices(method):
    blocks, field, turns = symmetric(2), random(4, 2, seed=2), torch.linalg.qr(random(4, 2, 2, seed=3))[0]
    turned = torch.einsum("iab,ijbc,jdc->ijad", turns, blocks, turns)
    moved, value = answers(SpinSystem(turned, (turns @ field[..., None])[..., 0], 0.8), method)
    m, truth = answers(SpinSystem(blocks, field, 0.8), method)
    check_close((moved, value), ((turns @ m[..., None])[..., 0], truth), 1e-8)


@pytest.mark.parametrize("method", [*OF_VECTORS, Bethe(), Enumeration()], ids=repr)
def test_the_radius_is_a_unit(method):
    couplings, field = symmetric(), random(4, 1 if method in OF_NUMBERS else 3, seed=2)
    m, value = answers(SpinSystem(couplings, field, 1.1, radius=1.0), method)
    scaled = answers(SpinSystem(couplings / 4, field / 2, 1.1, radius=2.0), method)
    check_close(scaled, (2 * m, value), 1e-8)


@pytest.mark.parametrize("method", [*OF_VECTORS, *OF_NUMBERS], ids=repr)
def test_an_empty_batch_has_empty_results(method):
    field = torch.zeros(0, 4, 1 if method in OF_NUMBERS else 3).double()
    m, value = answers(SpinSystem(0 * symmetric(), field), method)
    assert (m.shape, value.shape) == (field.shape, (0,))


@pytest.mark.parametrize(
    ("method", "couplings", "dim"),
    [
        (MeanField(), symmetric(), 3),
        (MeanField(), symmetric(3), 3),
        (MeanField(response=AmosResponse()), symmetric(3), 3),
        (TAP(), symmetric(), 1),
        (TAP(), symmetric(), 3),
        (TAP(order=3), symmetric(), 1),
        (TAP(order=3), symmetric(3), 3),
        (TAP(order=3, response=AmosResponse()), symmetric(), 1),
        (AdaTAP(), symmetric(), 1),
        (AdaTAP(), symmetric(), 3),
        (AdaTAP(), symmetric(2), 2),
        (AdaTAP(prior=THREE), symmetric(), 1),
        (MeanField(), Bonds.of(symmetric()), 3),
        (KineticPlefka(), asymmetric_bonds(), 3),
        (KineticPlefka(), asymmetric_bonds(3, 3), 3),
        (KineticPlefka(order=2), asymmetric_bonds(), 3),
        (GaussianClosure(), asymmetric_bonds(), 1),
        (GaussianClosure(), asymmetric_bonds(), 3),
    ],
    ids=repr,
)
def test_the_linearization_is_the_jacobian(method, couplings, dim):
    problem = method.problem(SpinSystem(couplings, random(4, dim, seed=3), 1.1, radius=1.3))
    start = method.start(SpinSystem(couplings, random(4, dim, seed=3), 1.1, radius=1.3))
    z, u = start + 0.1 * random(*start.shape, seed=4), random(*start.shape, seed=5)
    linear, jacobian = problem.linearize(z), dense_jacobian(problem, z)
    check_close(linear.jvp(u).flatten(), jacobian @ u.flatten(), 1e-9)
    check_close(linear.vjp(u).flatten(), u.flatten() @ jacobian, 1e-9)
    tensors = [t.detach().requires_grad_(t.is_floating_point()) for t in problem.tensors()]
    floating = [t for t in tensors if t.requires_grad]
    truth = torch.autograd.grad(problem.replace(*tensors).fixed_point_map(z), floating, u, allow_unused=True)
    found = [v for v, t in zip(linear.vjp_tensors(u), tensors, strict=True) if t.requires_grad]
    for fast, slow in zip(found, truth, strict=True):
        check_close(fast, slow, 1e-9)


PLAIN = Picard(rtol=1e-12, atol=1e-12, max_steps=1000)


@pytest.mark.parametrize("bonds", [False, True], ids=["tensor", "bonds"])
@pytest.mark.parametrize("own", [True, False], ids=["couplings per sample", "shared couplings"])
@pytest.mark.parametrize(
    ("method", "dim"),
    [
        (MeanField(), 3),
        (TAP(solver=PLAIN), 1),
        (Bethe(solver=PLAIN), 1),
        (KineticPlefka(solver=PLAIN), 3),
        (KineticPlefka(solver=PLAIN, order=2), 1),
        (GaussianClosure(solver=PLAIN), 3),
        (AdaTAP(solver=PLAIN), 1),
    ],
    ids=repr,
)
def test_samples_that_are_done_are_left_out_of_the_work(method, dim, own, bonds):
    """Two of twelve samples are near a transition, in a batch with two axes, a mask and a beta per sample."""
    if bonds and not method.by_bonds:
        return
    couplings = torch.ones(*(2, 6) * own, 7, 7).double() / 7
    couplings = couplings - torch.diag_embed(couplings.diagonal(dim1=-2, dim2=-1))
    if bonds:
        couplings = Bonds.of(couplings, directed=not method.symmetric)
    field = 0.01 * random(2, 6, 7, dim, seed=2)
    mask = torch.ones(2, 1, 7, dtype=torch.bool)
    mask[0, 0, 6] = False

    def solved(*beta):
        system = SpinSystem(couplings, field, torch.tensor(beta).double(), mask=mask)
        with Work() as work:
            _, answer = magnetization(system, method, check="none", return_answer=True)
        return work.numbers, answer.magnetization, answer.report

    easy, m, report = solved(*6 * [0.1])
    hard = solved(*6 * [1.0])[0]
    mixed, found, evidence = solved(0.1, 0.1, 0.1, 0.1, 1.0, 0.1)
    assert hard > 2 * easy
    assert mixed <= 1.15 * (10 * easy + 2 * hard) / 12
    others = torch.arange(6) != 4
    assert torch.equal(found[:, others], m[:, others])
    for name in ("residual", "num_evals", "status"):
        check_close(getattr(evidence, name)[:, others], getattr(report, name)[:, others], 0)

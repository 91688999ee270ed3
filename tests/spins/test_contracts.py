"""What every method has to do, for every method."""

import pytest
import torch

from implicit_attention import Picard
from implicit_attention.potentials import AmosResponse, GaussianUnits
from implicit_attention.spins import (
    TAP,
    AdaTAP,
    Bethe,
    DynamicalMethod,
    Enumeration,
    GaussianClosure,
    KineticPlefka,
    MeanField,
    SaddlePoint,
    SpinSystem,
    TransferMatrix,
)
from implicit_attention.spins.methods import METHODS
from implicit_attention.testing.approximation import ApproximationContract
from implicit_attention.testing.numerics import random

pytestmark = pytest.mark.by_name(
    slow=r"test_(second_derivatives\[(?!mag)|derivatives_of_every_output\[(?!free_energy|mag|correlations))",
    # The second derivatives of what is a second derivative of the free energy already.
    nightly=r"test_second_derivatives\[(susceptibility|heat_capacity)",
)
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
    # In test_adaptive_tap.py, where fewer fourth derivatives of Bessel functions are taken.
    test_second_derivatives = None

    def make(self):
        return AdaTAP()


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


# A method of the table without a class of its own above has the contract as it is.
OWN = {repr(contract().make()) for contract in ApproximationContract.__subclasses__()}
for row in METHODS:
    if repr(row.method) not in OWN and not issubclass(row.kind, DynamicalMethod):
        name = "Test" + "".join(filter(str.isalnum, row.text))
        globals()[name] = type(name, (ApproximationContract,), {"make": lambda self, row=row: row.method})


PLAIN = Picard(rtol=1e-12, atol=1e-12, max_steps=1000)


@pytest.mark.parametrize("own", [True, False], ids=["couplings per sample", "shared couplings"])
@pytest.mark.parametrize(
    ("method", "dim"),
    [
        (MeanField(), 3),
        (TAP(solver=PLAIN), 1),
        (TAP(solver=PLAIN, order=3, response=AmosResponse()), 2),
        (Bethe(solver=PLAIN), 1),
        (KineticPlefka(solver=PLAIN), 3),
        (KineticPlefka(solver=PLAIN, order=2), 1),
        (GaussianClosure(solver=PLAIN), 3),
        (AdaTAP(solver=PLAIN), 1),
    ],
    ids=repr,
)
def test_samples_that_are_done_are_left_out_of_the_work(method, dim, own, monkeypatch):
    """Two of twelve samples are near a transition, in a batch with two axes, a mask and a beta per sample."""
    couplings = torch.ones(*(2, 6) * own, 7, 7).double() / 7
    couplings = couplings - torch.diag_embed(couplings.diagonal(dim1=-2, dim2=-1))
    field, beta = 0.01 * random(2, 6, 7, dim, seed=2), torch.full((6,), 0.1).double()
    mask = torch.ones(2, 1, 7, dtype=torch.bool)
    mask[0, 0, 6] = False
    worked, held = [], type(method.problem(SpinSystem(couplings, field))).fixed_point_map

    def counted(problem, z):
        worked.append(z.shape[:-2].numel())
        return held(problem, z)

    def solved(beta):
        system = SpinSystem(couplings, field, beta, mask=mask)
        return method.solution(system, method.start(system))

    # Verdicts on stability evaluate the map, too.
    monkeypatch.setattr(type(method), "unstable", lambda *_: None)
    easy = solved(beta)
    beta[4] = 1.0
    monkeypatch.setattr(type(method.problem(SpinSystem(couplings, field))), "fixed_point_map", counted)
    found = solved(beta)
    others = torch.arange(6) != 4
    evals = found.num_evals[:, 4].amax(), easy.num_evals.amax()
    assert evals[0] > 2 * evals[1]
    assert sum(worked) <= 2 * int(evals[0]) + 12 * (int(evals[1]) + 3)
    for name in ("value", "residual", "num_evals", "status"):
        torch.testing.assert_close(getattr(found, name)[:, others], getattr(easy, name)[:, others], rtol=0, atol=0)

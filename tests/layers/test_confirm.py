"""Further solves of an `Equilibrium`, which say whether its answer is the only one."""

import copy
import warnings

import pytest
import torch
from torch import nn

from implicit_attention import Equilibrium, EquilibriumTransformer, Picard
from implicit_attention.adjoints import Phantom, Reversible
from implicit_attention.layers import Confirm, ConfirmReport
from implicit_attention.models.reasoners import TransformerStack, TwoStreamReasoner
from implicit_attention.solvers import Anderson

SOLVER = Picard(rtol=1e-5, max_steps=300)


class Wells(nn.Module):
    """z -> tanh(3 z + x): where x is small each sign has a fixed point of its own."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(3.0))

    def forward(self, z, x):
        return torch.tanh(self.gain * z + x)


#: One answer for the first two samples, two for the others.
X = torch.tensor([[4.0], [-4.0], [0.05], [-0.05]])


def settled(x=X, block=None, **options):
    layer = Equilibrium(block or Wells(), solver=SOLVER, on_failure="ignore", **options).eval()
    with torch.no_grad():
        layer(x)
    return layer.last_solve


def ends(x, how, count=40):
    """How many of many starts end where the first solve did, by a loop."""
    z, generator = torch.zeros_like(x), torch.Generator().manual_seed(3)
    for _ in range(300):
        z = torch.tanh(3 * z + x)
    begin, agree = z if how.around == "answer" else torch.zeros_like(x), torch.zeros(len(x))
    for _ in range(count):
        other = begin + how.noise * z.abs() * torch.randn(x.shape, generator=generator)
        for _ in range(300):
            other = torch.tanh(3 * other + x)
        agree += (other - z).abs()[:, 0] < 1e-3
    return agree / count


@pytest.mark.parametrize("around", ["start", "answer"])
def test_agreement_is_the_share_of_starts_that_end_at_the_answer(around):
    how = Confirm(count=40, around=around, noise=0.8)
    found = settled(confirm=how)
    assert isinstance(found, ConfirmReport)
    torch.testing.assert_close(found.agreement, ends(X, how), atol=0.25, rtol=0)
    assert found.agreement[:2].tolist() == [1, 1]
    assert (found.agreement[2:] < 1).all()
    assert found.confirmed.tolist() == [True, True, False, False]
    assert "2 confirmed by further solves" in repr(found)


def test_the_answer_and_its_record_are_those_without_further_solves():
    layer, x = Equilibrium(Wells(), solver=SOLVER).eval(), X
    plain = layer(x)
    record = layer.last_solve
    torch.manual_seed(0)
    random = torch.rand(1)
    torch.manual_seed(0)
    answer = layer(x, confirm=3)
    assert torch.equal(torch.rand(1), random)
    assert torch.equal(answer, plain)
    found = layer.last_solve
    assert all(torch.equal(a, b) for a, b in zip(found.record, record.record, strict=True))
    # Gradients are those of the answer.
    (own,) = torch.autograd.grad(answer.sum(), layer.block.gain)
    (expected,) = torch.autograd.grad(plain.sum(), layer.block.gain)
    assert torch.equal(own, expected)
    assert found.adjoint.status is not None


def test_evaluations_of_further_solves_are_counted():
    class Counted(Wells):
        calls = 0

        def forward(self, z, x):
            Counted.calls += 1
            return super().forward(z, x)

    x = X[:1]
    layer = Equilibrium(Counted(), solver=SOLVER).eval()
    with torch.no_grad():
        layer(x)
        Counted.calls = 0
        layer(x, confirm=2)
    found = layer.last_solve
    assert int(found.num_evals + found.confirm_evals) == Counted.calls
    assert found.confirm_evals > found.num_evals


def test_a_layer_in_training_and_plain_steps_are_not_confirmed():
    layer = Equilibrium(Wells(), solver=SOLVER, confirm=2)
    layer(X)
    assert not isinstance(layer.last_solve, ConfirmReport)
    layer.eval()
    layer(X, steps=3)
    assert not isinstance(layer.last_solve, ConfirmReport)
    layer(X, confirm=0)
    assert not isinstance(layer.last_solve, ConfirmReport)
    layer(X)
    assert isinstance(layer.last_solve, ConfirmReport)
    assert copy.deepcopy(layer).confirm == (Confirm(), Confirm(around="start"))
    assert "confirm=(Confirm(count=1" in repr(layer)
    assert "confirm" not in repr(Equilibrium(Wells()))


def test_a_number_stands_for_the_first_of_all_checks():
    checks = Confirm(), Confirm(around="start"), Confirm(count=3, noise=0.1)
    for number, several in ((1, checks[:1]), (2, checks[:2]), (5, checks)):
        assert Equilibrium(Wells(), confirm=number).confirm == several
        found, one_by_one = settled(confirm=number), [settled(confirm=how) for how in several]
        agreement = sum(how.count * each.agreement for how, each in zip(several, one_by_one, strict=True)) / number
        torch.testing.assert_close(found.agreement, agreement)
        assert torch.equal(found.confirm_evals, sum(each.confirm_evals for each in one_by_one))


def test_a_readout_says_what_is_compared():
    # Both wells have the same square; the sign tells them apart.
    same = settled(confirm=Confirm(count=20, around="start", noise=0.8, readout=lambda z: z.abs() > 0.5))
    assert same.agreement.tolist() == [1, 1, 1, 1]
    apart = settled(confirm=Confirm(count=20, around="start", noise=0.8, readout=lambda z: z > 0))
    assert torch.equal(apart.agreement, settled(confirm=Confirm(count=20, around="start", noise=0.8)).agreement)


class Overshoot(nn.Module):
    """From 0 plain steps end at x, which damped steps do not reach: they stop at the fixed point before it."""

    def forward(self, z, x):
        return torch.where(z < 0.1, x, torch.where(z < 0.8, 0.5 * z + 0.2, x))


def test_another_solver_takes_another_way():
    x = torch.tensor([[1.0], [0.05]])
    damped = Picard(rtol=1e-5, max_steps=600, damping=0.5)
    found = settled(x, Overshoot(), confirm=Confirm(around="start", solver=damped))
    assert found.converged.all()
    assert found.agreement.tolist() == [0, 1]
    # The same way again says nothing.
    assert settled(x, Overshoot(), confirm=Confirm(around="start", solver=SOLVER)).agreement.tolist() == [1, 1]
    # Damped steps are the way that is taken unless there is noise or another solver.
    own = settled(x, Overshoot(), confirm=Confirm(around="start"))
    assert torch.equal(own.agreement, found.agreement)
    assert torch.equal(own.confirm_evals, found.confirm_evals)


class Tilted(nn.Module):
    def forward(self, z, x):
        return x - 0.9 * z


@pytest.mark.parametrize("solver", [Picard(rtol=1e-5), Picard(rtol=1e-5, damping=0.2), Anderson(rtol=1e-5)])
@pytest.mark.parametrize("adjoint", [None, Reversible(damping=0.5), Phantom(3)])
def test_damped_steps_beside_any_solver_and_adjoint(solver, adjoint):
    layer = Equilibrium(Tilted(), solver=solver, adjoint=adjoint, confirm=2).eval()
    layer(X)
    assert layer.last_solve.confirmed.all()


class Drift(nn.Module):
    """The first entry of x is where the state rests; past 1 it moves on by what the second says."""

    def forward(self, z, x):
        return torch.where(z < 1, 0.5 * z + 0.5 * x[:, :1], z + x[:, 1:])


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_solving_on_turns_up_states_that_drift(compiled):
    x = torch.tensor([[0.9, 0.0], [2.0, 5e-4], [2.0, 0.0]])
    layer = Equilibrium(Drift(), solver=Picard(rtol=1e-3, max_steps=400), on_failure="ignore", compiled=compiled).eval()
    with torch.no_grad():
        layer(x, confirm=1, start=torch.zeros(3, 1))
    found = layer.last_solve
    assert found.converged.all()
    assert found.agreement.tolist() == [1, 0, 1]
    # It goes on from the answer: where that rests to the tighter tolerance, a look is enough.
    assert found.confirm_evals[2] <= 2
    assert found.confirm_evals[1] > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_tighter_tolerance_can_be_reached(dtype):
    x = X.to(dtype)
    layer = Equilibrium(Wells().to(dtype), solver=Picard(rtol=1e-6, atol=0.0, max_steps=500)).eval()
    with torch.no_grad():
        layer(x, confirm=1)
    assert layer.last_solve.confirmed.all()


class Cycle(nn.Module):
    def forward(self, z, x):
        return torch.where(x > 0, 1 - z, 0.5 * z + x)


def test_a_further_solve_that_does_not_settle_confirms_nothing_and_warns_of_nothing():
    # From .5 the first sample rests; from anywhere else it goes to and fro.
    x = torch.tensor([[1.0], [-1.0], [torch.nan]])
    layer = Equilibrium(Cycle(), solver=Picard(rtol=1e-5, max_steps=50), on_failure="ignore").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        z = layer(x, confirm=Confirm(count=2, noise=0.1), start=torch.tensor([[0.5], [0.5], [0.5]]))
    found = layer.last_solve
    assert found.converged.tolist() == [True, True, False]
    assert found.agreement.tolist() == [0, 1, 0]
    assert z[2].isnan().all()
    strict = Equilibrium(Cycle(), solver=Picard(rtol=1e-5, max_steps=50), on_failure="raise").eval()
    strict(x[:2], confirm=Confirm(count=2, noise=0.1), start=torch.full((2, 1), 0.5))
    assert strict.last_solve.agreement.tolist() == [0, 1]


def test_several_streams_and_transformers():
    torch.manual_seed(0)
    x = torch.randn(3, 4, 8)
    for layer in (
        TwoStreamReasoner(TransformerStack(8, heads=2), TransformerStack(8, heads=2), confirm=2),
        EquilibriumTransformer(8, heads=2, confirm=2),
    ):
        layer.eval()
        with torch.no_grad():
            layer(x)
        found = layer.last_solve
        assert found.agreement.shape == (3,)
        assert torch.equal(found.confirmed, found.converged & (found.agreement == 1))
        assert found.confirmed.any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_compiled_layers():
    how = Confirm(count=20, around="start", noise=0.8)
    eager, compiled = settled(confirm=how), settled(confirm=how, compiled=True)
    assert torch.equal(eager.agreement, compiled.agreement)
    assert settled(confirm=2, compiled=True).confirmed.all()


@pytest.mark.parametrize("how", [1, Confirm(count=2, noise=0.1), Confirm(readout=lambda z: z > 0)])
def test_a_batch_of_no_samples(how):
    found = settled(X[:0], confirm=how)
    assert found.agreement.shape == found.confirm_evals.shape == (0,)


def test_a_sample_is_confirmed_as_it_is_alone():
    how = Confirm(count=9, around="start", noise=0.8)
    together, beside_nan = settled(confirm=how), X.clone()
    beside_nan[1] = torch.nan
    spoiled = settled(beside_nan, confirm=how)
    for i in range(len(X)):
        alone = settled(X[i : i + 1], confirm=how)
        assert together.agreement[i] == alone.agreement[0]
        assert together.confirm_evals[i] == alone.confirm_evals[0]
        assert i == 1 or spoiled.agreement[i] == alone.agreement[0]
    assert 0 < together.agreement[2] < 1


def test_several_axes_or_none_of_samples():
    one = settled(X[2], event_ndim=1, confirm=3)
    assert one.agreement.shape == ()
    grid = settled(X.reshape(2, 2, 1), event_ndim=1, confirm=3)
    assert grid.agreement.shape == (2, 2)
    assert grid.agreement[0].tolist() == [1, 1]


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(32, 32)

    def forward(self, z, x):
        return torch.tanh(0.3 * self.mix(z) + x)


def test_autocast_is_not_asked_for_more_than_it_rounds_to():
    torch.manual_seed(0)
    layer, x = Equilibrium(Mixed(), confirm=1).eval(), torch.randn(64, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layer(x)
    found = layer.last_solve
    assert found.converged.all()
    assert found.confirmed.all()
    assert (found.confirm_evals <= found.num_evals).all()


def test_inside_transforms_no_further_solve_is_made():
    layer = Equilibrium(Wells(), solver=SOLVER, confirm=2).eval()
    z = torch.vmap(lambda x: layer(x))(X[:, None])
    assert torch.equal(z[:, 0], layer(X))

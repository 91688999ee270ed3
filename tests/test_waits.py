"""How often the host would wait for a card, counted on a CPU: looks at numbers beside those that a CPU alone takes."""

import collections
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from implicit_attention import (
    Anderson,
    Equilibrium,
    FixedPointMap,
    Implicit,
    ImplicitAttention,
    PerSample,
    Picard,
    solve,
)
from implicit_attention.linear import CG, GMRES
from implicit_attention.spins import MeanField, SpinSystem, thermodynamics

#: Operations whose result the host needs before it goes on.
WAITS = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select"}
#: What is looked at on a CPU only: whether a map writes to its state, or draws numbers.
OF_A_CPU = {"same", "evaluate"}


class Waits(TorchDispatchMode):
    """The looks of the host by the function that takes them. Under a mode the host looks at nothing in passing."""

    def __init__(self):
        super().__init__()
        self.by = collections.Counter()

    def __torch_dispatch__(self, function, types, given=(), named=None):
        name = function._schema.name.removeprefix("aten::")
        of_truths = name in ("index", "index_put_") and any(t is not None and t.dtype == torch.bool for t in given[1])
        if name in WAITS or of_truths:
            frame = sys._getframe(1)
            while "implicit_attention" not in frame.f_code.co_filename:
                frame = frame.f_back
            self.by[frame.f_code.co_name] += 1
        return function(*given, **(named or {}))

    def counted(self):
        return collections.Counter({place: count for place, count in self.by.items() if place not in OF_A_CPU})

    def __enter__(self):
        # Torch shows no mode that a tensor becomes a list.
        def tolist(tensor, kept=torch.Tensor.tolist):
            self.by[sys._getframe(1).f_code.co_name] += 1
            return kept(tensor)

        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(torch.Tensor, "tolist", tolist)
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.undo()
        return super().__exit__(*error)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        nn.init.orthogonal_(self.linear.weight, 0.9)

    def forward(self, z, x):
        return 0.8 * torch.tanh(self.linear(z)) + x


def block(solver):
    return Equilibrium(Block(), solver=solver, adjoint=Implicit(GMRES(rtol=1e-4, check_every=8)))


def attention(solver):
    adjoint = Implicit(CG(rtol=1e-4, check_every=8))
    return ImplicitAttention(8, 2, solver=solver, adjoint=adjoint, impl="reference")


@pytest.mark.parametrize("solver", [Picard(check_every=8), Anderson(check_every=8)], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("made", [block, attention])
def test_a_solve_looks_where_it_expects_to_have_ended(made, solver):
    torch.manual_seed(0)
    layer, x, calls = made(solver), torch.randn(4, 8, 8), []
    layer(x)
    if made is block:
        layer.block.register_forward_hook(lambda *_: calls.append(None))
    with Waits() as forward:
        y = layer(x)
    evaluated = len(calls)
    # Autograd's own thread would be under no mode.
    with torch.autograd.set_multithreading_enabled(False), Waits() as backward:
        y.sum().backward()
    report = layer.last_solve
    assert report.converged.all()
    # One evaluation of all judges problems that may read each other, and one estimate lets problems leave the work.
    ends = {"tell": 1} | ({"judged": 1} if made is block else {})
    looks = forward.counted()
    assert 2 <= looks.pop("_look") <= 4
    assert looks == ends
    # No evaluation is made after all have ended.
    assert made is attention or evaluated == int(report.num_evals.max()) > 12
    # At the end of a sweep, at what is rare of an answer, and at the error of the gradient.
    looks = backward.counted()
    assert 2 <= looks.pop("_look") <= 3
    assert looks == {"isolated": 1, "solve": 1, "_solve": 1, "_gradient_error": 1}


def test_thermodynamics_looks_as_little():
    torch.manual_seed(0)
    couplings, field = torch.randn(4, 16, 16) / 8, torch.randn(4, 16, 1, requires_grad=True)
    method = MeanField(solver=Anderson(check_every=8), adjoint=Implicit(GMRES(rtol=1e-6, check_every=8)))
    with torch.autograd.set_multithreading_enabled(False), Waits() as forward:
        found = thermodynamics(SpinSystem(couplings + couplings.mT, field, 1.0), method)
    with torch.autograd.set_multithreading_enabled(False), Waits() as backward:
        found.magnetization.square().sum().backward()
    assert found.report.converged.all()
    # Of the states and of three linear systems, of which the last two are those of second derivatives, and of two.
    looks = forward.counted(), backward.counted()
    assert looks[0].pop("_look") <= 4 * 3
    assert looks[1].pop("_look") <= 2 * 3
    # At the end of a linear system, at what is rare of it, and at its status.
    assert [[of[place] for place in ("solve", "_solve")] for of in looks] == [[3, 3], [2, 2]]
    # Couplings, whether they contract, whether they are stable, what is left out of a system, and failures.
    assert [looks[0].total() - 6, looks[1].total() - 4] == [12, 3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("made", [block, attention])
def test_a_card_is_waited_for_no_more_often(made):
    torch.manual_seed(0)
    layer, x = made(Anderson()).cuda(), torch.randn(4, 8, 8, device="cuda")
    layer(x).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        layer(x).sum().backward()
        torch.cuda.set_sync_debug_mode("default")
    # Turning the mode on warns, too.
    assert sum("called a synchronizing" in str(warning.message) for warning in caught) <= 4 + 2 + 3 + 4


def test_problems_that_have_ended_spoil_no_look():
    # The second is solved where it starts, where its tolerance is 0, too; the fourth reads a NaN.
    rate, image = torch.linspace(0.3, 0.8, 6), torch.tensor([1.0, 0.0, 1.0, torch.nan, 1.0, 1.0])
    calls, solver = [], Picard(check_every=50, rtol=1e-3, atol=0.0, max_steps=60)
    problem = FixedPointMap(lambda z: calls.append(None) or rate[:, None] * z + image[:, None], event_ndim=1)
    solution = solve(problem, torch.zeros(6, 1), solver=solver, on_failure="ignore")
    assert solution.converged.tolist() == [True, True, True, False, True, True]
    assert len(calls) <= int(solution.num_evals.max()) + 2 < 40


@pytest.mark.nightly
def test_none_of_very_many_problems_is_lost():
    # More are unfinished after the first look than float32 can count, and fewer than are worth to keep all.
    count, left = 2**24 + 2**23 + 2**22, 2**24 + 1
    rate = torch.zeros(count, 1)
    rate[:left] = 0.5
    start = 3 * (rate > 0).float()
    problem = FixedPointMap(lambda z, rate: rate * z + rate, PerSample(rate), event_ndim=1)
    solution = solve(problem, start, solver=Picard(check_every=2, rtol=0.1), on_failure="ignore")
    assert solution.converged.all()
    assert solution.value[left - 2 : left].flatten().tolist() == [1.125, 1.125]

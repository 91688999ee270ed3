"""How often the host would wait for a card, counted on a CPU: looks at numbers beside those that a CPU alone takes."""

import collections
import math
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from implicit_attention import Anderson, Equilibrium, Implicit, ImplicitAttention, Picard
from implicit_attention.linear import CG, GMRES

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
    return Equilibrium(Block(), solver=solver, adjoint=Implicit(GMRES(rtol=1e-4, check_every=4)))


def attention(solver):
    adjoint = Implicit(CG(rtol=1e-4, check_every=4))
    return ImplicitAttention(8, 2, solver=solver, adjoint=adjoint, impl="reference")


@pytest.mark.parametrize("solver", [Picard(check_every=4), Anderson(check_every=4)], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("made", [block, attention])
def test_a_solve_looks_every_four_evaluations_and_at_its_end(made, solver):
    torch.manual_seed(0)
    layer, x = made(solver), torch.randn(4, 8, 8)
    layer(x)
    with Waits() as forward:
        y = layer(x)
    # Autograd's own thread would be under no mode.
    with torch.autograd.set_multithreading_enabled(False), Waits() as backward:
        y.sum().backward()
    report = layer.last_solve
    assert report.converged.all()
    evaluations, products = int(report.num_evals.max()), int(report.adjoint.num_steps.max())
    # One evaluation of all judges problems that may read each other, and one estimate lets problems leave the work.
    ends = {"tell": 1} | ({"judged": 1} if made is block else {})
    assert (
        forward.counted() - collections.Counter(steps_left=1)
        == {"unfinished": 1 + math.ceil((evaluations - 1) / 4)} | ends
    )
    # At the end of a sweep, at what is rare of an answer, and at the error of the gradient.
    ends = {"isolated": 1, "solve": 1, "_solve": 1, "_gradient_error": 1}
    assert backward.counted() == {"_sweep": math.ceil(products / 4)} | ends

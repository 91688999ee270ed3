"""Native steps of GMRES in a backward pass are the steps of torch, for every kind of system and of failure."""

import pytest
import torch
from torch.testing import assert_close

from implicit_attention import FixedPointMap, Implicit, PerSample, Picard, Status, solve
from implicit_attention.linear import GMRES
from implicit_attention.ops import native_status
from implicit_attention.testing.numerics import random

pytestmark = pytest.mark.skipif(native_status().isa is None, reason="there is no native library")


class Written(GMRES):
    """A subclass may make other steps than those of the library."""


def answers(matrix, b, **options):
    """A^{-1} b and the report of the backward pass by the library and by torch: db of z <- (I - A^T) z + b."""
    found = []
    for method in (GMRES, Written):
        field = torch.zeros_like(b).requires_grad_()
        problem = FixedPointMap(
            lambda z, a, field: z - (z[..., None, :] @ a).squeeze(-2) + field,
            PerSample(matrix), PerSample(field), event_ndim=1,
        )  # fmt: skip
        adjoint = Implicit(method(**options))
        solution = solve(problem, field.detach(), solver=Picard(), adjoint=adjoint, on_failure="ignore")
        found.append((torch.autograd.grad(solution.value, field, b)[0], solution.adjoint))
    return found


def system(lead, n, dtype=torch.float64):
    matrix = torch.eye(n) + 0.5 * random(*lead, n, n) / max(n, 1) ** 0.5
    return matrix.to(dtype), random(*lead, n, seed=1, dtype=dtype)


def agree(native, torch_, rtol=1e-9, atol=1e-10):
    assert native[1].status.tolist() == torch_[1].status.tolist()
    assert native[1].num_steps.tolist() == torch_[1].num_steps.tolist()
    assert_close(native[0], torch_[0], rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("lead", "n"), [((), 7), ((1,), 40), ((5,), 33), ((2, 3), 16), ((4,), 1), ((3,), 1500)], ids=str
)
@pytest.mark.parametrize("restart", [30, 4])
def test_answers_and_evidence_are_those_of_torch(lead, n, dtype, restart):
    close = {"rtol": 2e-4, "atol": 1e-5} if dtype == torch.float32 else {}
    agree(*answers(*system(lead, n, dtype), rtol=1e-5, restart=restart, max_steps=60), **close)


def test_systems_of_every_kind_end_alike():
    matrix, b = system((7,), 12)
    alone = answers(matrix, b, rtol=1e-9)[0][0]
    # One is singular, one closes its space after two steps, the others have sides of other sizes.
    matrix[2] = torch.diag(torch.tensor([0.0] + [1.0] * 11))
    matrix[3] = torch.diag(torch.tensor([1.0] * 6 + [3.0] * 6))
    b = b * torch.tensor([1e-20, 1.0, 1.0, 1.0, 0.0, 1e20, 1e-9], dtype=b.dtype)[:, None]
    native, written = answers(matrix, b, rtol=1e-9)
    scale = b.abs().amax(-1, keepdim=True).clamp(min=1e-300)
    agree((native[0] / scale, native[1]), (written[0] / scale, written[1]))
    assert native[1].status[2] == Status.STALLED
    assert native[1].num_steps[3] == 2
    assert native[0][4].eq(0).all()
    assert torch.equal(native[0][1], alone[1])


@pytest.mark.parametrize("options", [{"max_steps": 7, "restart": 3}, {"max_steps": 1}, {"restart": 50}], ids=str)
def test_a_budget_ends_both_alike(options):
    agree(*answers(*system((3,), 50), rtol=1e-10, **options))


def test_two_threads_find_the_numbers_of_one():
    matrix, b = system((64,), 400, torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(answers(matrix, b, rtol=1e-5)[0])
    finally:
        torch.set_num_threads(before)
    agree(*found, rtol=1e-5, atol=1e-6)


def test_a_product_of_a_subclass_is_solved_by_torch():
    class Marked(torch.Tensor):
        pass

    class Marking(torch.autograd.Function):
        """The identity, whose cotangents are of a subclass."""

        @staticmethod
        def forward(ctx, z):
            return z.clone()

        @staticmethod
        def backward(ctx, u):
            return u.as_subclass(Marked)

    field, b = random(3, 5).requires_grad_(), random(3, 5, seed=1)
    problem = FixedPointMap(lambda z, x: torch.tanh(Marking.apply(z) / 2 + x), field, event_ndim=1)
    solution = solve(problem, torch.zeros(3, 5).double(), solver=Picard(rtol=1e-12), adjoint=Implicit(GMRES(rtol=1e-9)))
    (found,) = torch.autograd.grad(solution.value, field, b)
    slope = 1 - solution.value.detach().square()
    assert_close(found.as_subclass(torch.Tensor), b * slope / (1 - slope / 2), rtol=1e-8, atol=1e-9)

"""Native steps of GMRES are the steps of torch, for every kind of system and of failure."""

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from implicit_attention import Status
from implicit_attention.adjoints import native_gmres
from implicit_attention.adjoints.native_gmres import natively
from implicit_attention.linear import CG, GMRES
from implicit_attention.ops.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no native library")


def system(lead, n, dtype, scale=1.0, seed=0):
    draw = torch.Generator().manual_seed(seed)
    matrix = torch.eye(n, dtype=dtype) + 0.5 * torch.randn(*lead, n, n, dtype=dtype, generator=draw) / max(n, 1) ** 0.5
    return matrix, scale * torch.randn(*lead, n, dtype=dtype, generator=draw)


def both(method, matrix, b):
    """The answers of torch and of the library, and how often the library was asked."""
    calls = []

    def product(v):
        calls.append(1)
        return (matrix @ v[..., None]).squeeze(-1)

    expected = method.solve(product, b)
    by_torch = len(calls)
    found = natively(method).solve(product, b)
    return expected, found, by_torch, len(calls) - by_torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("lead", "n"), [((), 7), ((1,), 40), ((5,), 33), ((2, 3), 16), ((4,), 1), ((3,), 1500)], ids=str
)
@pytest.mark.parametrize("restart", [30, 4])
def test_answers_and_evidence_are_those_of_torch(lead, n, dtype, restart):
    matrix, b = system(lead, n, dtype)
    expected, found, *_ = both(GMRES(rtol=1e-5, restart=restart, max_steps=60), matrix, b)
    assert found.status.tolist() == expected.status.tolist()
    assert found.num_steps.tolist() == expected.num_steps.tolist()
    assert_close(
        found.value,
        expected.value,
        rtol=1e-9 if dtype == torch.float64 else 2e-4,
        atol=1e-5 if dtype == torch.float32 else 1e-10,
    )
    assert bool((found.residual <= 10 * found.tolerance).all() or (expected.residual > expected.tolerance).any())


def test_sizes_of_every_kind_are_solved():
    matrix, b = system((4,), 12, torch.float64)
    b = b * torch.tensor([1e-300, 1e-20, 1e20, 1e300], dtype=b.dtype)[:, None]
    expected, found, *_ = both(GMRES(rtol=1e-8), matrix, b)
    assert bool(found.converged.all())
    assert_close(
        found.value / b.abs().amax(-1, keepdim=True),
        expected.value / b.abs().amax(-1, keepdim=True),
        rtol=1e-9,
        atol=1e-9,
    )


def test_a_problem_that_fails_changes_no_other():
    matrix, b = system((6,), 10, torch.float64)
    alone = natively(GMRES(rtol=1e-9)).solve(lambda v: (matrix @ v[..., None]).squeeze(-1), b)
    broken, rhs = matrix.clone(), b.clone()
    broken[1] = torch.nan
    broken[2] = 0.0
    broken[3, 0, 0] = torch.inf
    rhs[4] = 0.0
    expected, found, *_ = both(GMRES(rtol=1e-9), broken, rhs)
    assert found.status.tolist() == expected.status.tolist()
    assert found.status[2] == Status.STALLED
    assert found.value[1].isnan().all()
    assert (found.value[4] == 0).all()
    for i in (0, 5):
        assert torch.equal(found.value[i], alone.value[i])


def test_a_space_that_closes_is_solved_exactly():
    # Two eigenvalues: two steps.
    matrix = torch.diag(torch.tensor([1.0, 1.0, 3.0, 3.0], dtype=torch.float64)).expand(2, 4, 4)
    b = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    expected, found, *_ = both(GMRES(rtol=1e-12), matrix, b)
    assert found.num_steps.tolist() == expected.num_steps.tolist()
    assert_close(found.value, expected.value, rtol=1e-14, atol=1e-15)


def test_a_budget_ends_both_alike():
    matrix, b = system((3,), 50, torch.float64)
    expected, found, by_torch, native = both(GMRES(rtol=1e-12, max_steps=7, restart=3), matrix, b)
    assert found.status.tolist() == expected.status.tolist()
    assert found.num_steps.tolist() == expected.num_steps.tolist()
    assert native <= by_torch
    assert_close(found.value, expected.value, rtol=1e-10, atol=1e-12)


def test_two_threads_find_the_bits_of_one():
    matrix, b = system((64,), 400, torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            # The products are those of one thread.
            found.append(natively(GMRES(rtol=1e-5)).solve(lambda v: torch.einsum("bij,bj->bi", matrix, v), b))
    finally:
        torch.set_num_threads(before)
    assert found[0].num_steps.tolist() == found[1].num_steps.tolist()
    assert_close(found[0].value, found[1].value, rtol=1e-5, atol=1e-6)


def test_other_methods_are_left_as_they_are_and_without_a_library_torch_makes_the_steps(monkeypatch):
    method = CG()
    assert natively(method) is method
    assert dataclasses.asdict(natively(GMRES(restart=3))) == dataclasses.asdict(GMRES(restart=3))
    monkeypatch.setattr(native_gmres, "library_for", lambda *_: None)
    monkeypatch.setattr(native_gmres.Arnoldi, "of", lambda *_: pytest.fail("the library was asked"))
    expected, found, *_ = both(GMRES(), *system((2,), 4, torch.float64))
    assert torch.equal(found.value, expected.value)


def test_a_product_of_a_subclass_is_solved_by_torch():
    class Marked(torch.Tensor):
        pass

    matrix, b = system((3,), 5, torch.float64)
    expected = GMRES().solve(lambda v: (matrix @ v[..., None]).squeeze(-1), b)
    found = natively(GMRES()).solve(
        lambda v: (matrix @ v.as_subclass(torch.Tensor)[..., None]).squeeze(-1).as_subclass(Marked), b
    )
    assert_close(found.value.as_subclass(torch.Tensor), expected.value, rtol=1e-10, atol=1e-12)

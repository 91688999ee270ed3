"""Policies in compiled graphs, under checkpointing, and over so many rows that they are worked off in tiles."""

import functools

import pytest
import torch
from failure_reference import NAMES, SOLVER, B, D, E, H, M, N, gradients, inputs, partly
from torch.utils.checkpoint import checkpoint

from implicit_attention import (
    AnchoredEnergy,
    ConvergenceError,
    ConvergenceWarning,
    FailurePolicy,
    Implicit,
    ImplicitAttention,
    LogSumExp,
    Picard,
    Status,
    equilibrium_attention,
    solve,
)
from implicit_attention.linear import CG
from implicit_attention.testing.numerics import random

pytestmark = pytest.mark.cases(3)

ZERO = FailurePolicy(backward="zero", over="ignore")
EXPLICIT = FailurePolicy(forward="explicit", over="ignore")
BOTH = FailurePolicy(forward="explicit", backward="zero", over="ignore")
POLICIES = [pytest.param(policy, id=name) for name, policy in (("zero", ZERO), ("explicit", EXPLICIT), ("both", BOTH))]
CLOSE = {"rtol": 1e-7, "atol": 1e-8}
ENOUGH = Picard(rtol=1e-10, atol=1e-12, max_steps=3000)


@pytest.fixture(autouse=True)
def same_parameters():
    torch.manual_seed(0)


def attention(leaves, policy, **options):
    query, key, value, scale, anchor = leaves
    options = {"solver": SOLVER, **options}
    return equilibrium_attention(query, key, value, scale=scale, anchor=anchor, on_failure=policy, **options)


@functools.cache
def some_fail():
    with torch.no_grad():
        _, solution = attention(inputs(), "ignore", return_solution=True)
    return solution.value, partly(solution.failed)


def compare(found, expected, names=NAMES):
    for name, ours, theirs in zip(names, found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE, msg=lambda told, name=name: f"{name}: {told}")


# Graphs of a compiler, and checkpointing.


def engine(name, function):
    if name == "compiled":
        return torch.compile(function, backend="aot_eager", fullgraph=True)
    return lambda *leaves: checkpoint(function, *leaves, use_reentrant=name == "reentrant")


@pytest.mark.by_name(slow=r"\[compiled-(explicit|both)")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["compiled", "checkpoint", "reentrant"])
def test_engines_give_what_the_reference_gives(name, policy):
    leaves, cotangent = inputs(), random(B, H, N, E, seed=7)
    state, failed = some_fail()
    expected, expected_gradients = gradients(
        leaves,
        state,
        cotangent,
        failed=failed,
        explicit=policy.forward == "explicit",
        zero=failed if policy.backward == "zero" else None,
    )
    output = engine(name, lambda *leaves: attention(leaves, policy))(*leaves)
    torch.testing.assert_close(output, expected, **CLOSE)
    output.backward(cotangent)
    compare([t.grad for t in leaves], expected_gradients)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["warn", "ignore"])
def test_a_compiled_call_with_a_word_is_one_graph(word):
    leaves = inputs()
    output = engine("compiled", lambda *leaves: attention(leaves, word, solver=ENOUGH))(*leaves)
    torch.testing.assert_close(output, attention(leaves, word, solver=ENOUGH), rtol=1e-9, atol=1e-9)
    found, expected = (torch.autograd.grad(o.sum(), leaves) for o in (output, attention(leaves, word, solver=ENOUGH)))
    compare(found, expected)


@pytest.mark.slow
def test_a_failed_backward_solve_in_a_compiled_graph_is_left_out_and_counted(monkeypatch):
    leaves, cotangent = inputs(), random(B, H, N, E, seed=7)
    # The number of products is kept for every solver: this one asks for it here.
    solver = Picard(rtol=1e-10, atol=1e-12, max_steps=2000)
    monkeypatch.setattr(CG, "default_max_steps", lambda self, size: 3)
    monkeypatch.setattr("implicit_attention.kernels.operations.MAX_STEPS", 3)
    output, solution = attention(leaves, "ignore", solver=solver, return_solution=True)
    torch.autograd.grad(output, leaves, cotangent)
    failed = partly(solution.adjoint.status > Status.UNSTABLE)
    _, expected = gradients(leaves, solution.value.detach(), cotangent, failed=torch.zeros_like(failed), zero=failed)
    count, of = int(failed.sum()), failed.numel()
    policy = FailurePolicy(backward="zero", tolerate=0.75 * count / of, window=2, over="warn")
    compiled = engine("compiled", lambda *leaves: attention(leaves, policy, solver=solver))
    compare(torch.autograd.grad(compiled(*leaves), leaves, cotangent), expected)
    with pytest.warns(ConvergenceWarning, match=f"{2 * count} problems failed in a window of 2 calls") as caught:
        compare(torch.autograd.grad(compiled(*leaves), leaves, cotangent), expected)
    assert len(caught) == 1
    # Another policy that is equal has seen nothing of it.
    other = FailurePolicy(backward="zero", tolerate=0.75 * count / of, window=2, over="warn")
    assert other == policy
    compiled = engine("compiled", lambda *leaves: attention(leaves, other, solver=solver))
    torch.autograd.grad(compiled(*leaves), leaves, cotangent)
    with pytest.warns(ConvergenceWarning, match="failing backward call 1 of this policy"):
        torch.autograd.grad(compiled(*leaves), leaves, cotangent)


def test_a_compiled_layer_tells_and_counts_where_it_is_asked():
    policy = FailurePolicy(tolerate=0.75, window=2, over="warn", forward="explicit")
    layer = ImplicitAttention(8, 2, solver=Picard(max_steps=1, rtol=1e-6), on_failure=policy)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = random(2, 5, 8, dtype=torch.float32)
    torch.testing.assert_close(compiled(x), layer(x, max_steps=0), rtol=1e-5, atol=1e-6)
    compiled(x)
    assert layer.last_solve.failed.all()
    assert layer.last_solve.failed.all()
    compiled(x)
    with pytest.warns(ConvergenceWarning, match="40 problems failed in a window of 2 calls") as caught:
        assert layer.last_solve.failed.all()
    assert len(caught) == 1


@pytest.mark.slow
@pytest.mark.parametrize("on_failure", ["raise", FailurePolicy(window=1, tolerate=0.0)], ids=["word", "policy"])
def test_what_raises_breaks_the_graph_and_its_last_solve_warns(on_failure):
    layer = ImplicitAttention(8, 2, solver=Picard(max_steps=1, rtol=1e-6), on_failure=on_failure)
    x = random(2, 5, 8, dtype=torch.float32)
    with torch.no_grad():
        with pytest.raises(ConvergenceError):
            torch.compile(layer, backend="eager")(x)
        torch.compile(lambda x: layer(x, on_failure="ignore"), backend="eager", fullgraph=True)(x)
    with pytest.warns(ConvergenceWarning, match="the compiled solve failed for 20 of 20"):
        assert layer.last_solve.failed.all()


# Many rows, which are worked off in tiles.


@pytest.mark.parametrize("policy", ["ignore", ZERO], ids=["keep", "zero"])
@pytest.mark.parametrize("adjoint", [Implicit(), Implicit(CG(rtol=1e-10, max_steps=3))], ids=["all", "few steps"])
def test_rows_of_several_tiles(adjoint, policy):
    rows = 1500
    query, key, _, _, _ = inputs(rows=rows)
    leaves = [query[:1, :1].detach().requires_grad_(), key[:1, :1].detach().requires_grad_()]
    leaves += [torch.empty(1, 1, M, 0).double().requires_grad_()]
    leaves += [torch.tensor([number]).double().requires_grad_() for number in (0.9, 0.35)]
    solver = SOLVER if adjoint.linear_solver is None else ENOUGH
    energy = AnchoredEnergy(LogSumExp(leaves[1], leaves[3]), leaves[0], leaves[4])
    solution = solve(energy, leaves[0], solver=solver, adjoint=adjoint, impl="reference", on_failure=policy)
    cotangent = random(1, 1, rows, D, seed=7)
    used = [leaves[i] for i in (0, 1, 3, 4)]
    found = torch.autograd.grad(solution.value, used, cotangent)
    failed = partly(solution.failed | (solution.adjoint.status > Status.UNSTABLE))
    assert failed[..., :1024].any()
    assert failed[..., 1024:].any() or adjoint.linear_solver is None
    if policy == "ignore" and adjoint.linear_solver is not None:
        return
    zero = failed if policy is ZERO else None
    _, expected = gradients(leaves, solution.value, cotangent, failed=torch.zeros_like(failed), zero=zero, read=False)
    compare(found, [expected[i] for i in (0, 1, 3, 4)], [NAMES[i] for i in (0, 1, 3, 4)])

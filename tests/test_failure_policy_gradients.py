"""What stands in for failed problems, and what they teach: values and gradients against dense linear algebra."""

import functools

import pytest
import torch
from failure_reference import NAMES, SOLVER, B, E, H, M, N, gradients, inputs

from implicit_attention import (
    AnchoredEnergy,
    FailurePolicy,
    Implicit,
    LogSumExp,
    OneStep,
    Phantom,
    Picard,
    Status,
    Unrolled,
    equilibrium_attention,
    solve,
)
from implicit_attention.kernels import native_status
from implicit_attention.linear import CG
from implicit_attention.testing.numerics import random

pytestmark = pytest.mark.cases(3)

ZERO = FailurePolicy(backward="zero", tolerate=1.0)
EXPLICIT = FailurePolicy(forward="explicit", tolerate=1.0)
BOTH = FailurePolicy(forward="explicit", backward="zero", tolerate=1.0)
POLICIES = {"zero": ZERO, "explicit": EXPLICIT, "both": BOTH, "best, keep": FailurePolicy(tolerate=1.0)}
native = pytest.mark.skipif(native_status().isa is None, reason="there is no native operation here")
#: Ways to an answer: options, and how many keys they want.
DOORS = {
    "auto": ({}, M),
    "native": ({"impl": "native"}, M),
    "reference": ({"impl": "reference"}, M),
    "linear solver": ({"adjoint": Implicit(CG(rtol=1e-12))}, M),
}
CLOSE = {"rtol": 1e-7, "atol": 1e-8}


def doors():
    return [pytest.param(*DOORS[name], id=name, marks=native if name == "native" else ()) for name in DOORS]


def attention(leaves, policy, *, mask=None, **options):
    query, key, value, scale, anchor = leaves
    options = {"solver": SOLVER, **options}
    return equilibrium_attention(
        query, key, value, mask, scale=scale, anchor=anchor, on_failure=policy, enable_gqa=key.shape[-3] != H, **options
    )


@functools.cache
def some_fail(keys=M):
    """The states of a solve, and where it failed: for some of the queries of a head, at other places in others."""
    with torch.no_grad():
        _, solution = attention(inputs(keys=keys), "ignore", return_solution=True)
    assert 0 < int(solution.failed.sum()) < solution.failed.numel()
    return solution.value, solution.failed


def lower():
    return torch.ones(N, M, dtype=torch.bool).tril(1)


def compare(found, expected, names=NAMES):
    for name, ours, theirs in zip(names, found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE, msg=lambda told, name=name: f"{name}: {told}")


def parts(policy, failed):
    """What the reference is told of a policy."""
    return {"explicit": policy.forward == "explicit", "zero": failed if policy.backward == "zero" else None}


@pytest.mark.parametrize(("options", "keys"), doors())
@pytest.mark.parametrize("name", POLICIES)
def test_values_and_gradients_are_those_of_the_reference(name, options, keys):
    policy, leaves = POLICIES[name], inputs(keys=keys)
    state, failed = some_fail(keys)
    cotangent = random(B, H, N, E, seed=7)
    output = attention(leaves, policy, **options)
    expected, expected_gradients = gradients(leaves, state, cotangent, failed=failed, **parts(policy, failed))
    torch.testing.assert_close(output, expected, **CLOSE)
    compare(torch.autograd.grad(output, leaves, cotangent), expected_gradients)


@pytest.mark.parametrize("kind", ["mask", "causal", "groups", "groups and mask", "additive mask"])
@pytest.mark.parametrize("policy", [ZERO, EXPLICIT], ids=["zero", "explicit"])
def test_so_they_are_with_masks_and_groups_of_heads(policy, kind):
    leaves = inputs(kv_heads=1 if "groups" in kind else H)
    mask = {"causal": torch.ones(N, M, dtype=torch.bool).tril(), "groups": None}.get(kind, lower())
    given = {"is_causal": True} if kind == "causal" else {"mask": mask}
    if kind == "additive mask":
        given = {"mask": torch.zeros(N, M).double().masked_fill(~mask, -torch.inf)}
    with torch.no_grad():
        _, solution = attention(leaves, "ignore", return_solution=True, **given)
    state, failed = solution.value, solution.failed
    assert 0 < int(failed.sum()) < failed.numel()
    cotangent = random(B, H, N, E, seed=7)
    output = attention(leaves, policy, **given)
    expected, expected_gradients = gradients(
        leaves, state, cotangent, failed=failed, mask=mask, **parts(policy, failed)
    )
    torch.testing.assert_close(output, expected, **CLOSE)
    compare(torch.autograd.grad(output, leaves, cotangent), expected_gradients)


def test_explicit_queries_have_what_no_steps_give_and_others_the_bits_of_the_solve():
    leaves = inputs()
    _, failed = some_fail()
    found = attention(leaves, EXPLICIT)
    explicit, solved = attention(leaves, "ignore", max_steps=0), attention(leaves, "ignore")
    torch.testing.assert_close(found[failed], explicit[failed], rtol=1e-12, atol=1e-12)
    assert torch.equal(found[~failed], solved[~failed])
    assert float((explicit - solved)[failed].abs().max().detach()) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("policy", [EXPLICIT, ZERO, BOTH], ids=["explicit", "zero", "both"])
def test_in_other_precisions(policy, dtype):
    """The reference in float64 has what half precision rounds, up to that rounding."""
    leaves = inputs(dtype=dtype)
    solver = Picard(rtol=1e-4, atol=1e-6, max_steps=9)
    with torch.no_grad():
        solved, solution = attention(leaves, "ignore", solver=solver, return_solution=True)
        explicit = attention(leaves, "ignore", max_steps=0)
    failed = solution.failed
    assert 0 < int(failed.sum()) < failed.numel()
    output = attention(leaves, policy, solver=solver)
    assert output.dtype == dtype
    eps = torch.finfo(dtype).eps
    instead = explicit if policy.forward == "explicit" else solved
    torch.testing.assert_close(output[failed], instead[failed], rtol=4 * eps, atol=4 * eps)
    assert torch.equal(output[~failed], solved[~failed])
    cotangent = random(B, H, N, E, seed=7).to(dtype)
    wide = [t.detach().double() for t in leaves]
    _, expected = gradients(wide, solution.value.double(), cotangent.double(), failed=failed, **parts(policy, failed))
    for ours, theirs in zip(torch.autograd.grad(output, leaves, cotangent), expected, strict=True):
        assert ours.dtype == dtype
        bound = 20 * max(eps, 1e-4)
        torch.testing.assert_close(ours.double(), theirs, rtol=bound, atol=bound * float(theirs.abs().max()))


@pytest.mark.parametrize("adjoint", [Unrolled(), Phantom(3), OneStep(), Implicit(fallback=Phantom(2))])
def test_zero_holds_for_every_adjoint(adjoint):
    """No gradient reaches failed queries, and that of others is what it is without them."""
    leaves = inputs()
    _, failed = some_fail()
    cotangent = random(B, H, N, E, seed=7)

    def found(policy, cotangent):
        return torch.autograd.grad(attention(leaves, policy, adjoint=adjoint), leaves, cotangent)

    kept, others = (found("ignore", cotangent.masked_fill(where[..., None], 0.0)) for where in (~failed, failed))
    mine = found(ZERO, cotangent)
    assert not mine[0][failed].any()
    assert kept[0][failed].any()
    torch.testing.assert_close(mine[0][~failed], others[0][~failed], rtol=1e-12, atol=1e-12)
    # Values are read by failed queries too.
    torch.testing.assert_close(mine[2], kept[2] + others[2], rtol=1e-9, atol=1e-12)


def test_states_of_a_course_teach_no_more():
    query, key, _, scale, anchor = inputs()
    energy = AnchoredEnergy(LogSumExp(key, scale), query, anchor)
    options = {"solver": SOLVER, "adjoint": Unrolled(), "trace": True}
    kept, zero = (solve(energy, query, on_failure=on_failure, **options) for on_failure in ("ignore", ZERO))
    failed = zero.failed
    assert 0 < int(failed.sum()) < failed.numel()
    for taught, whole in ((zero, False), (kept, True)):
        (by_query,) = torch.autograd.grad(taught.states([2, 5]).sum(), query, retain_graph=True)
        assert bool(by_query[failed].any()) == whole
        assert by_query[~failed].any()


# Backward solves that fail.

ENOUGH = Picard(rtol=1e-10, atol=1e-12, max_steps=3000)
FEW = Implicit(CG(rtol=1e-10, max_steps=3))


def backward_fails(leaves, cotangent, adjoint=FEW, solver=ENOUGH, **options):
    """States that are solutions, and where the backward solve needs more steps: for some of the queries."""
    output, solution = attention(leaves, "ignore", solver=solver, adjoint=adjoint, return_solution=True, **options)
    assert not solution.failed.any()
    torch.autograd.grad(output, leaves, cotangent)
    failed = solution.adjoint.status > Status.UNSTABLE
    assert 0 < int(failed.sum()) < failed.numel()
    return solution.value.detach(), failed


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_failed_backward_solve_leaves_its_query_out(impl, create_graph):
    leaves, cotangent = inputs(), random(B, H, N, E, seed=7)
    state, failed = backward_fails(leaves, cotangent, impl=impl)
    output = attention(leaves, ZERO, impl=impl, adjoint=FEW, solver=ENOUGH)
    found = torch.autograd.grad(output, leaves, cotangent, create_graph=create_graph)
    nowhere = torch.zeros_like(failed)
    _, expected = gradients(leaves, state, cotangent, failed=nowhere, zero=failed)
    compare([t.detach() for t in found], expected)


@pytest.mark.parametrize(("options", "keys"), doors()[:-1])
def test_so_do_the_fused_operations(monkeypatch, options, keys):
    leaves, cotangent = inputs(keys=keys), random(B, H, N, E, seed=7)
    # The number of products is kept for every solver: this one asks for it here.
    solver = Picard(rtol=1e-10, atol=1e-12, max_steps=2999)
    monkeypatch.setattr(CG, "default_max_steps", lambda self, size: 3)
    state, failed = backward_fails(leaves, cotangent, None, solver, **options)
    output = attention(leaves, ZERO, solver=solver, **options)
    found = torch.autograd.grad(output, leaves, cotangent)
    _, expected = gradients(leaves, state, cotangent, failed=torch.zeros_like(failed), zero=failed)
    compare(found, expected)


def test_a_query_that_is_left_out_has_no_second_derivative():
    """Not even where the second backward solve would find its answer."""
    query, key, _, scale, anchor = inputs()
    energy = AnchoredEnergy(LogSumExp(key, scale), query, anchor)
    once = Implicit(CG(rtol=1e-10, max_steps=1))
    found = []
    for policy in ("ignore", ZERO):
        solution = solve(energy, query, solver=ENOUGH, adjoint=once, on_failure=policy)
        z, k, beta = solution.value.detach(), key.detach(), scale.detach()[:, None, None]
        p = torch.softmax(beta * z @ k.mT, -1)
        centred = k[..., None, :, :] - (p @ k)[..., None, :]
        covariance = torch.einsum("bhnm,bhnmd,bhnme->bhnde", p, centred, centred)
        # For an eigenvector of the Jacobian one step is enough.
        direction = torch.linalg.eigh(covariance).eigenvectors[..., -1]
        cotangent = random(*z.shape, seed=8).requires_grad_()
        (first,) = torch.autograd.grad(solution.value, query, cotangent, create_graph=True)
        failed = solution.adjoint.status > Status.UNSTABLE
        assert failed.any()
        (second,) = torch.autograd.grad(first, cotangent, direction)
        found.append((bool(first[failed].any()), bool(second[failed].any())))
    assert found == [(True, True), (False, False)]


def test_second_derivatives_are_those_without_failed_queries():
    leaves = inputs()
    _, failed = some_fail()
    cotangents = [random(*t.shape, seed=20 + i) for i, t in enumerate(leaves)]

    def second(left_out):
        query, key, value, scale, anchor = leaves
        energy = AnchoredEnergy(LogSumExp(key, scale), query, anchor)
        state = solve(energy, query, solver=SOLVER, on_failure="ignore" if left_out else ZERO).value
        if left_out:
            state = torch.where(failed[..., None], state.detach(), state)
        output = torch.softmax(scale[:, None, None] * state @ key.mT, -1) @ value
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(first, leaves, cotangents)

    compare(second(False), second(True))


# Transforms, graphs and engines.


def by_transform(name, policy):
    """The gradient of the query by a transform of torch.func."""
    query, key, value, scale, anchor = (t.detach() for t in inputs())

    def loss(query, key, value):
        options = {"scale": scale, "anchor": anchor, "solver": SOLVER, "on_failure": policy}
        return equilibrium_attention(query, key, value, **options).square().sum()

    func = torch.func
    if name == "grad":
        return func.grad(loss)(query, key, value)
    if name == "vmap of grad":
        return func.vmap(func.grad(loss))(query, key, value)
    if name == "grad of vmap":
        return func.grad(lambda q: func.vmap(loss)(q, key, value).sum())(query)
    basis = torch.eye(query.numel(), dtype=query.dtype).reshape(-1, *query.shape)
    tangents = [func.jvp(lambda q: loss(q, key, value), (query,), (b,))[1] for b in basis]
    return torch.stack(tangents).reshape(query.shape)


@pytest.mark.by_name(slow=r"\[jvp-(explicit|both)")
@pytest.mark.parametrize("policy", [ZERO, EXPLICIT, BOTH], ids=["zero", "explicit", "both"])
@pytest.mark.parametrize("name", ["grad", "vmap of grad", "grad of vmap", "jvp"])
def test_inside_transforms(name, policy):
    leaves = inputs()
    state, failed = some_fail()
    output, _ = gradients(leaves, state, torch.zeros(B, H, N, E).double(), failed=failed, **parts(policy, failed))
    _, expected = gradients(leaves, state, 2 * output, failed=failed, **parts(policy, failed))
    torch.testing.assert_close(by_transform(name, policy), expected[0], **CLOSE)

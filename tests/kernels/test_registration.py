"""The operations as torch knows them: autograd, torch.vmap, torch.compile."""

import warnings

import pytest
import torch
from hopfield_cases import NATIVE, make, written_out

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    ConvergenceWarning,
    ImplicitAttention,
    LogSumExp,
    UnsupportedImplementation,
    equilibrium_attention,
)
from implicit_attention.kernels import hopfield_adjoint, hopfield_solve
from implicit_attention.testing.numerics import dense_gradients, random, relative_error

IMPLEMENTATIONS = pytest.mark.parametrize("impl", ["reference", NATIVE])
TIGHT = {"rtol": 0.0, "atol": 1e-12, "max_steps": 500}


def small(keys_lead=(1, 1), *, grad=False):
    """(query, keys, beta, anchor): 2 heads, 3 queries, 64 keys of 4 dimensions."""
    tensors = (
        random(1, 2, 3, 4),
        random(*keys_lead, 64, 4, seed=1),
        torch.tensor([0.4, 0.6], dtype=torch.float64),
        torch.tensor([0.3, 0.5], dtype=torch.float64),
    )
    return tuple(t.requires_grad_(grad) for t in tensors)


def masks():
    return [None, random(1, 1, 3, 64, seed=2) > -1, random(2, 1, 64, seed=2)]


# What torch checks of a registration.


@IMPLEMENTATIONS
@pytest.mark.parametrize("first", [None, 0, 2])
@pytest.mark.parametrize("mask", masks(), ids=["no mask", "boolean", "added"])
@pytest.mark.parametrize("operation", ["solve", "adjoint"])
def test_opcheck(operation, mask, first, impl):
    query, keys, *numbers = small(grad=operation == "solve")
    problem = query, keys, *(number[None, :, None, None] for number in numbers)
    problem = *problem, None if mask is None else mask[(None,) * (4 - mask.ndim)], first
    state, vector = random(*query.shape, seed=3), random(*query.shape, seed=4)
    there = random(*query.shape, seed=5), random(*query.shape[:-1], seed=6)
    known = torch.ops.implicit_attention
    if operation == "solve":
        call = known.hopfield_solve.default, (*problem, state, 1e-6, 1e-8, 50, 3, impl, "warn")
    else:
        call = known.hopfield_adjoint.default, (*problem, state, vector, 1e-6, 50, impl, "ignore", None, *there)
    # The last test compiles; one compiled call is tested below.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(*call, test_utils=tests)


def test_exported_programs_of_before_name_what_is_gone_and_get_the_loop():
    query, keys, *numbers = small(grad=True)
    problem = query, keys, *(number[None, :, None, None] for number in numbers), None, None
    found = []
    for impl in ("tiled", "reference"):
        state = torch.ops.implicit_attention.hopfield_solve(*problem, query, 1e-8, 1e-8, 50, 3, impl, "warn")[0]
        found.append((state, *torch.autograd.grad(state.square().sum(), (query, keys))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


# Derivatives.


@IMPLEMENTATIONS
@pytest.mark.parametrize("lead", [(1, 1), (1, 2)], ids=["shared keys", "keys of each head"])
@pytest.mark.parametrize("mask", masks(), ids=["no mask", "boolean", "added"])
def test_gradcheck_of_the_solve(mask, lead, impl):
    def function(query, keys, beta, anchor):
        return hopfield_solve(query, keys, beta=beta, anchor=anchor, mask=mask, **TIGHT, impl=impl).state

    assert torch.autograd.gradcheck(function, small(lead, grad=True), rtol=1e-4, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize(
    "case", ["plain", "grouped and padded", "one memory", "causal and padded", "beta as a tensor", "no batch"]
)
def test_gradients_are_those_of_the_repeated_map(case):
    """Autograd through so many plain steps that no more change anything."""
    query, keys, options = make(case)
    beta, anchor = (torch.as_tensor(options.pop(n), dtype=torch.float64).clone() for n in ("beta", "anchor"))
    leaves = [t.requires_grad_() for t in (query, keys, beta * 0.3, anchor * 0 + 0.4)]
    leaves = [t.detach().requires_grad_() for t in leaves]
    query, keys, beta, anchor = leaves
    z = query
    for _ in range(120):
        z = written_out(z, query, keys, beta=beta, anchor=anchor, **options)[0]
    cotangent = random(*z.shape, seed=3)
    expected = torch.autograd.grad(z, leaves, cotangent)
    for impl in ("auto", "reference"):
        found = hopfield_solve(query, keys, beta=beta, anchor=anchor, **options, **TIGHT, impl=impl)
        assert found.state.requires_grad
        assert not any(t.requires_grad for t in found[1:])
        gradients = torch.autograd.grad(found.state, leaves, cotangent)
        for one, other in zip(gradients, expected, strict=True):
            assert one.shape == other.shape
            assert relative_error(one, other) < 1e-8


def test_gradients_have_the_precision_of_their_tensors():
    query, keys = (t.half().requires_grad_() for t in small()[:2])
    beta = torch.tensor(0.5, requires_grad=True)
    state = hopfield_solve(query, keys, beta=beta, anchor=0.5).state
    assert state.dtype == torch.float32
    gradients = torch.autograd.grad(state.sum(), (query, keys, beta))
    assert [g.dtype for g in gradients] == [torch.float16, torch.float16, torch.float32]
    assert all(g.isfinite().all() for g in gradients)


def test_only_what_is_asked_for_is_derived():
    query, keys, beta, anchor = small()
    assert not hopfield_solve(query, keys, beta=beta, anchor=anchor).state.requires_grad
    query.requires_grad_()
    (gradient,) = torch.autograd.grad(hopfield_solve(query, keys, beta=beta, anchor=anchor).state.sum(), query)
    assert gradient.shape == query.shape
    with torch.no_grad():
        assert not hopfield_solve(query, keys, beta=beta, anchor=anchor).state.requires_grad


def test_there_is_no_gradient_to_the_start():
    query, keys, beta, anchor = small()
    initial = query.clone().requires_grad_()
    state = hopfield_solve(query.requires_grad_(), keys, beta=beta, anchor=anchor, initial=initial).state
    by_query, by_initial = torch.autograd.grad(state.sum(), (query, initial), allow_unused=True)
    assert by_query is not None
    assert by_initial is None or (by_initial == 0).all()


@IMPLEMENTATIONS
def test_a_second_derivative_is_refused(impl):
    query, keys, beta, anchor = small(grad=True)
    state = hopfield_solve(query, keys, beta=beta, anchor=anchor, impl=impl).state
    gradients = torch.autograd.grad(state.square().sum(), (query, keys, beta, anchor), create_graph=True)
    for first in gradients:
        with pytest.raises(RuntimeError):
            torch.autograd.grad(first.square().sum(), (query, keys, beta, anchor))


def test_the_adjoint_solve_has_no_derivative():
    query, keys, beta, anchor = small(grad=True)
    found = hopfield_adjoint(query, keys, query.detach(), query.detach(), beta=beta, anchor=anchor)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(found.value.sum(), query)


# torch.vmap.

DIMS = pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0), (1, None), (2, 1), (-1, None)], ids=str)


def stacked(tensor, count, seed, dim):
    """`tensor` and others like it, along a new axis."""
    if dim is None:
        return tensor, [tensor] * count
    others = [tensor + 0.3 * random(*tensor.shape, seed=seed + i) for i in range(count)]
    return torch.stack(others, dim), others


def apply(operation, impl):
    if operation == "solve":
        return lambda q, k: hopfield_solve(q, k, beta=0.5, anchor=0.3, rtol=1e-8, impl=impl)
    return lambda q, k: hopfield_adjoint(q, k, 0.5 * q, q + 1, beta=0.3, anchor=0.5, rtol=1e-12, impl=impl)


@IMPLEMENTATIONS
@DIMS
@pytest.mark.parametrize("operation", ["solve", "adjoint"])
@pytest.mark.parametrize("lead", [(), (2,)], ids=["no batch", "heads"])
def test_vmap_is_a_loop(lead, operation, dims, impl):
    query, queries = stacked(random(*lead, 3, 4), 3, 10, dims[0])
    keys, each = stacked(random(*lead, 64, 4, seed=1), 3, 20, dims[1])
    function = apply(operation, impl)
    found = torch.vmap(function, in_dims=dims)(query, keys)
    expected = [function(q, k) for q, k in zip(queries, each, strict=True)]
    for name, one, *others in zip(expected[0]._fields, found, *expected, strict=True):
        torch.testing.assert_close(one, torch.stack(others), rtol=1e-8, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@IMPLEMENTATIONS
def test_vmap_over_beta_anchor_and_mask(impl):
    query, keys, _, _ = small()
    betas, anchors = torch.tensor([0.3, 0.5, 0.9]).double(), torch.tensor([0.2, 0.5, 0.9]).double()
    masks = random(3, 3, 64, seed=2) > -1

    def function(beta, anchor, mask):
        return hopfield_solve(query, keys, beta=beta, anchor=anchor, mask=mask, rtol=1e-8, impl=impl)

    found = torch.vmap(function)(betas, anchors, masks)
    for i in range(3):
        for one, other in zip(found, function(betas[i], anchors[i], masks[i]), strict=True):
            torch.testing.assert_close(one[i], other, rtol=1e-8, atol=1e-9)


# torch.compile.


def test_compiled_without_a_break_it_is_the_same():
    query, keys, beta, anchor = (t.detach().float().requires_grad_() for t in small())

    def function(query, keys, beta, anchor):
        return 2 * hopfield_solve(query, keys, beta=beta, anchor=anchor, rtol=1e-6).state

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for run in (function, compiled):
        state = run(query, keys, beta, anchor)
        results.append((state, *torch.autograd.grad(state.square().sum(), (query, keys, beta, anchor))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# Forward mode: torch has no rule for operations, and takes the derivative for 0.

FORWARD = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jvp of vmap": lambda f, x: torch.func.jvp(torch.vmap(f), (x[None],), (x[None],)),
    "vmap of jvp": lambda f, x: torch.vmap(lambda t: torch.func.jvp(f, (t,), (t,)))(x[None]),
    "hessian": lambda f, x: torch.func.hessian(lambda t: f(t).square().sum())(x),
    "compiled": lambda f, x: torch.compile(lambda t: torch.func.jvp(f, (t,), (t,)), backend="eager")(x),
}


@pytest.mark.parametrize("mode", FORWARD)
@pytest.mark.parametrize("operation", ["solve", "adjoint"])
def test_forward_mode_is_refused_and_never_zero(operation, mode):
    keys = random(64, 4, seed=1)
    calls = {
        "solve": lambda x: hopfield_solve(x, keys, beta=0.5, anchor=0.3).state,
        "adjoint": lambda x: hopfield_adjoint(x, keys, x, x, beta=0.5, anchor=0.3).value,
    }
    with pytest.raises(Exception, match=r"has no forward-mode derivative.*use solve") as error:
        FORWARD[mode](calls[operation], random(3, 4))
    assert mode == "compiled" or isinstance(error.value, UnsupportedImplementation)


@pytest.mark.parametrize("argument", ["query", "keys", "beta", "anchor", "mask", "cotangent"])
def test_a_tangent_of_any_argument_is_refused(argument):
    query, keys, beta, anchor = small(grad=True)
    given = {"query": query, "keys": keys, "beta": beta, "anchor": anchor, "mask": random(3, 64)}
    with torch.autograd.forward_ad.dual_level():
        if argument != "cotangent":
            given[argument] = torch.autograd.forward_ad.make_dual(given[argument].detach(), given[argument].detach())
            with pytest.raises(UnsupportedImplementation, match="`hopfield_solve` has no forward-mode derivative"):
                hopfield_solve(**given)
        else:
            state = hopfield_solve(**given).state
            cotangent = torch.autograd.forward_ad.make_dual(torch.ones_like(state), torch.ones_like(state))
            with pytest.raises(UnsupportedImplementation, match="`hopfield_solve` has no forward-mode derivative"):
                torch.autograd.grad(state, query, cotangent)


def test_a_tangent_of_something_else_disturbs_nothing():
    query, keys, beta, anchor = small()
    expected = hopfield_solve(query, keys, beta=beta, anchor=anchor).state
    with torch.autograd.forward_ad.dual_level():
        torch.autograd.forward_ad.make_dual(query.clone(), query)
        assert torch.equal(hopfield_solve(query, keys, beta=beta, anchor=anchor).state, expected)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_has_forward_mode_and_compiled_never_zero(compiled):
    query, keys = random(2, 3, 4), random(2, 64, 4, seed=1)

    def attention(x):
        return equilibrium_attention(x, keys, keys, scale=0.5, anchor=0.4, solver=Anderson(rtol=1e-12))

    def slope(x, t):
        return torch.func.jvp(attention, (x,), (t,))[1]

    tangent = random(2, 3, 4, seed=2)
    step = 1e-5
    truth = (attention(query + step * tangent) - attention(query - step * tangent)) / (2 * step)
    try:
        found = torch.compile(slope, backend="aot_eager")(query, tangent) if compiled else slope(query, tangent)
    except Exception:
        # The compiler of torch fails at what it leaves out inside torch.func.
        assert compiled
    else:
        assert relative_error(found, truth) < 1e-7


# Saddles, and systems without an answer, where the backward pass is an operation.


def between(curvature, dtype=torch.float64):
    """Two clusters of keys and queries half-way, where the energy has that curvature along their difference."""
    keys = torch.zeros(70, 6, dtype=dtype)
    keys[:35, 0], keys[35:, 0] = 2.0, -2.0
    query = random(2, 6, dtype=dtype)
    query[:, 0] = 0.0
    return query, keys, {"anchor": 0.1, "beta": (1 - curvature) / (4 * 0.9)}


@IMPLEMENTATIONS
def test_the_gradient_at_a_saddle_is_that_of_the_solution(impl):
    query, keys, options = between(-0.5)
    query, keys = query.requires_grad_(), keys.requires_grad_()
    state = hopfield_solve(query, keys, **options, **TIGHT, impl=impl).state
    assert (state[:, 0].abs() < 1e-12).all()
    found = torch.autograd.grad(state, (query, keys), random(2, 6, seed=3))
    energy = AnchoredEnergy(LogSumExp(keys, options["beta"]), query, options["anchor"])
    by_keys, by_query = dense_gradients(energy, state.detach(), random(2, 6, seed=3))
    assert relative_error(found[0], by_query) < 1e-8
    assert relative_error(found[1], by_keys) < 1e-8


def compiled_attention(on_failure="warn"):
    def attention(query, keys, beta, anchor):
        return equilibrium_attention(query, keys, keys, scale=beta, anchor=anchor, on_failure=on_failure)

    return attention, torch.compile(attention, fullgraph=True, backend="aot_eager")


def test_a_compiled_graph_has_the_eager_gradient_at_a_saddle():
    query, keys, options = between(-0.5)
    found = []
    for attention in compiled_attention():
        leaves = query.clone().requires_grad_(), keys.clone().requires_grad_()
        found.append(torch.autograd.grad(attention(*leaves, **options), leaves, random(2, 6, seed=3)))
    for eager, compiled in zip(*found, strict=True):
        assert eager.abs().max() > 1e-3
        assert relative_error(compiled, eager) < 1e-8


@pytest.mark.by_name(slow=r"\[compiled-ignore")
@pytest.mark.parametrize("on_failure", ["warn", "ignore"])
@pytest.mark.parametrize("where", ["operation", "compiled"])
def test_a_backward_pass_without_an_answer_is_told(where, on_failure):
    if (where, on_failure) == ("operation", "ignore"):
        return
    query, keys, options = between(0.0)
    query = query.requires_grad_()
    if where == "operation":
        out = hopfield_solve(query, keys, **options).state
    else:
        out = compiled_attention(on_failure)[1](query, keys, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.autograd.grad(out[:, 0].sum(), query)
    told = [w for w in caught if issubclass(w.category, ConvergenceWarning)]
    assert len(told) == (on_failure == "warn")
    assert all("adjoint solve of `hopfield_solve`, whose gradient is therefore wrong, failed" in str(w) for w in told)


def test_a_compiled_solve_says_that_it_keeps_no_evidence_of_its_backward_pass():
    layer = ImplicitAttention(8, 2, anchor=0.5)
    x = random(1, 64, 8, dtype=torch.float32)
    torch.compile(layer, fullgraph=True, backend="eager")(x).sum().backward()
    assert "no backward pass yet" not in repr(layer.last_solve.adjoint)
    assert "compiled graph" in repr(layer.last_solve.adjoint)
    layer(x)
    assert "no backward pass yet" in repr(layer.last_solve.adjoint)

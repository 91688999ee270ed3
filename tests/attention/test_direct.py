"""One native call answers attention over plain tensors: what it says, and its derivatives, are those of the loop."""

import copy
import re
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import implicit_attention as ia
from implicit_attention.kernels import hopfield_solve, native_status
from implicit_attention.linear import CG
from implicit_attention.potentials import DistanceLogSumExp, Softmax1
from implicit_attention.testing.numerics import random

native = pytest.mark.skipif(native_status().isa is None, reason=native_status().reason)
B, H, N, M, D = 2, 3, 5, 7, 8
TIGHT = ia.Anderson(rtol=1e-12, atol=1e-13)


def told(run, impl):
    """What `run` returns, or the error of a solve that failed, and what it warns of; words without their numbers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            found, error = run(impl), ""
        except ia.ConvergenceError as raised:
            found, error = torch.zeros(0), str(raised)
    return found, [re.sub(r"\d[\d.e+-]*", "#", text) for text in (error, *(str(w.message) for w in caught))]


def agree(run, **tolerance):
    """`run` gives the same by the native call and by the loop; returns that, and the words."""
    mine, theirs = told(run, "auto"), told(run, "reference")
    torch.testing.assert_close(mine[0], theirs[0], **({"rtol": 5e-4, "atol": 5e-5} | tolerance), equal_nan=True)
    assert mine[1] == theirs[1]
    return mine


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


def tensors(*, n=N, m=M, dtype=torch.float32, d=D, e=D, lead=(B, H), shared=(B, H)):
    shapes = ((*lead, n, d), (*shared, m, d), (*shared, m, e))
    return [leaf(random(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes)]


def gradients(output, leaves, seed=5):
    return torch.autograd.grad(output, leaves, random(*output.shape, seed=seed, dtype=output.dtype))


def attended(leaves, impl, **options):
    """An output and its gradients."""
    output = ia.equilibrium_attention(*leaves, impl=impl, **options)
    return output, gradients(output, leaves)


# Values and gradients.

SHAPES = {
    "few keys": {},
    "many keys": {"m": 80},
    "one query": {"n": 1, "m": 130},
    "more tiles than one": {"n": 70, "m": 140, "lead": (1, 2), "shared": (1, 2)},
    "values of another width": {"e": 5},
    "no multiple of the lanes": {"d": 7, "e": 7},
    "one entry": {"d": 1, "e": 1},
    "no batch": {"lead": (), "shared": ()},
    "three axes": {"lead": (2, 1, 3), "shared": (2, 1, 3)},
    "keys shared by the batch": {"shared": (1, H)},
    "keys shared by all": {"shared": ()},
    "one key": {"m": 1},
}
OPTIONS = {
    "as they are": {},
    "explicit": {"max_steps": 0},
    "plain steps": {"solver": ia.Picard(rtol=1e-3)},
    "exact gradients named": {"adjoint": ia.Implicit(), "max_steps": 50},
    "failures ignored": {"on_failure": "ignore", "solver": ia.Anderson(rtol=1e-6)},
}


@native
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("grad", [True, False], ids=["with a graph", "without"])
def test_function(shape, options, grad):
    leaves = tensors(**SHAPES[shape])

    def run(impl):
        if grad:
            return attended(leaves, impl, anchor=0.4, **OPTIONS[options])
        with torch.no_grad():
            found = ia.equilibrium_attention(*leaves, anchor=0.4, impl=impl, return_solution=True, **OPTIONS[options])
        return found[0], found[1].status

    agree(run)


@native
@pytest.mark.parametrize("anchor", [0.0, 0.5, 1.0, "per head", "per entry"])
@pytest.mark.parametrize("scale", [None, 0.3, 2, "per head", "per entry"])
def test_numbers_and_tensors_of_them(anchor, scale):
    named = {"per head": random(H, seed=8, dtype=torch.float32), "per entry": random(B, H, seed=9, dtype=torch.float32)}
    made = {name: leaf(t.sigmoid()) for name, t in named.items()}
    others = {name: leaf(t.sigmoid()) for name, t in named.items()}
    anchor, scale = made.get(anchor, anchor), others.get(scale, scale)
    leaves = tensors() + [t for t in (anchor, scale) if isinstance(t, torch.Tensor)]

    def run(impl):
        output = ia.equilibrium_attention(*leaves[:3], anchor=anchor, scale=scale, impl=impl)
        return output, torch.autograd.grad(output.square().sum(), leaves, allow_unused=True, materialize_grads=True)

    agree(run, rtol=2e-3, atol=2e-4)


@native
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"is_causal": True, "query_offset": 2},
        {"is_causal": True, "query_offset": 2, "max_steps": 0},
        {"enable_gqa": True},
        {"enable_gqa": True, "max_steps": 0},
        {"enable_gqa": True, "is_causal": True},
    ],
    ids=str,
)
def test_causal_and_grouped_heads(options):
    leaves = tensors(lead=(B, 4), shared=(B, 2 if "enable_gqa" in options else 4))
    agree(lambda impl: attended(leaves, impl, **options))


@native
@pytest.mark.parametrize("options", [{}, {"max_steps": 0}, {"solver": ia.Anderson(max_steps=2, rtol=1e-6)}])
@pytest.mark.parametrize("made", [{}, {"kv_heads": 1}, {"causal": True}, {"readout": "state"}, {"qk_norm": "rms"}])
def test_layer(made, options):
    torch.manual_seed(0)
    layer = ia.ImplicitAttention(8, 2, **made)
    x = random(B, N, 8, seed=1, dtype=torch.float32)

    def run(impl):
        # A copy has told nothing yet.
        own = copy.deepcopy(layer)
        output = own(x, **options, impl=impl)
        found = torch.autograd.grad(output.square().sum(), list(own.parameters()), materialize_grads=True)
        report = own.last_solve
        return output, found, report.status, report.num_evals, report.adjoint.status

    agree(run)


# Masks, biases and the causal order, which are parts of one record.


def joined(kind, mask, bias):
    """The output of an energy with a mask and a bias, and its gradients."""
    query, key, _ = tensors(dtype=torch.float64)
    beta, anchor = (leaf(random(B, H, seed=s).sigmoid()) for s in (8, 9))
    bias = leaf(random(*bias, seed=6)) if kind == "learned bias" else random(*bias, seed=6)
    leaves = [t for t in (query, key, beta, anchor, bias) if t.requires_grad]

    def run(impl):
        potential = ia.LogSumExp(key, beta, mask=mask, bias=bias)
        solution = ia.solve(ia.AnchoredEnergy(potential, query, anchor), query, impl=impl, solver=TIGHT)
        return solution.value, gradients(solution.value, leaves), solution.energy, solution.status

    return run


@native
@pytest.mark.parametrize("kind", ["bias", "learned bias"])
@pytest.mark.parametrize("mask", [(M,), (B, 1, 1, M), (B, H, N, M)], ids=["mask", "mask per key", "mask per pair"])
@pytest.mark.parametrize("bias", [(M,), (B, 1, 1, M), (N, M)], ids=["bias", "bias per key", "bias per pair"])
def test_a_mask_and_a_bias_together(kind, mask, bias):
    agree(joined(kind, random(*mask, seed=2) > -0.8, bias), rtol=1e-9, atol=1e-9)


@native
@pytest.mark.parametrize("mask", [(M,), (B, 1, 1, M)], ids=["1-D", "per sample"])
@pytest.mark.parametrize("potential", [ia.LogSumExp, Softmax1, DistanceLogSumExp])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "query_offset": 2}], ids=str)
def test_masked_keys_may_be_anything(options, potential, mask):
    mask = random(*mask, seed=2) > -0.5
    query, key, value = (t.detach() for t in tensors(dtype=torch.float64))
    hidden = ~mask.expand(B, 1, 1, M).mT
    key, value = key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.inf)
    leaves = [*map(leaf, (query, key, value)), *(leaf(random(H, seed=s).sigmoid()) for s in (8, 9))]

    def run(impl):
        given = {"scale": leaves[3], "anchor": leaves[4], "potential": potential, "solver": TIGHT, "impl": impl}
        output, solution = ia.equilibrium_attention(*leaves[:3], mask, return_solution=True, **options, **given)
        return output, gradients(output, leaves), solution.status

    output, found, _ = agree(run, rtol=1e-9, atol=1e-9)[0]
    assert all(bool(t.isfinite().all()) for t in (output, *found))


LAID_OUT = {
    "columns first": lambda t: t.mT.contiguous().mT,
    "every other": lambda t: torch.stack([t, t], -1)[..., 0],
    "expanded": lambda t: t[:1].expand(t.shape),
    "heads last": lambda t: t.movedim(1, 2).contiguous().movedim(2, 1),
}


@native
@pytest.mark.parametrize("layout", LAID_OUT.values(), ids=LAID_OUT)
@pytest.mark.parametrize("mask", [None, "boolean", "added", "learned"])
def test_tensors_may_lie_in_any_way(layout, mask):
    leaves, added = tensors(dtype=torch.float64), leaf(random(B, H, N, M, seed=2))
    given = {"boolean": added > -0.8, "added": added.detach(), "learned": added}.get(mask)
    leaves += [added] if mask == "learned" else []

    def run(impl):
        laid = [layout(t) for t in (*leaves[:3], given) if t is not None]
        output = ia.equilibrium_attention(*laid, anchor=0.4, solver=TIGHT, impl=impl)
        return output, gradients(output, leaves)

    agree(run, rtol=1e-9, atol=1e-9)


# Derivatives.


@native
def test_derivatives_of_both_orders():
    anchor, scale = (leaf(random(2, seed=s, dtype=torch.float64).sigmoid()) for s in (3, 4))
    leaves = [*tensors(n=3, m=4, d=3, e=2, lead=(1, 2), shared=(1, 2), dtype=torch.float64), anchor, scale]
    options = {"solver": ia.Anderson(rtol=1e-12, atol=1e-13), "impl": "native", "on_failure": "raise"}

    def call(query, key, value, anchor, scale):
        return ia.equilibrium_attention(query, key, value, anchor=anchor, scale=scale, **options)

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@native
def test_a_graph_of_the_gradient_is_that_of_the_loop():
    leaves = tensors(m=70)

    def run(impl):
        output = ia.equilibrium_attention(*leaves, impl=impl)
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), leaves, retain_graph=True)
        again = torch.autograd.grad(output.sum(), leaves, retain_graph=True)
        last = torch.autograd.grad(output.sum(), leaves)
        return first, second, again, last

    agree(run, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"max_steps": 0, "impl": "reference"}])
def test_a_graph_is_used_up_by_a_backward_pass(options):
    leaves = tensors(m=70)
    output = ia.equilibrium_attention(*leaves, **options)
    gradients(output, leaves)
    with pytest.raises(RuntimeError, match="a second time"):
        gradients(output, leaves)


@native
@pytest.mark.parametrize("options", [{}, {"max_steps": 0}])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant, options):
    leaves = tensors()

    def call(*leaves):
        return ia.equilibrium_attention(*leaves, **options)

    expected = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    checkpoint(call, *leaves, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(t.grad, by) for t, by in zip(leaves, expected, strict=True))


@native
@pytest.mark.parametrize("options", [{}, {"max_steps": 0}])
def test_what_is_saved_has_no_axis_of_queries_and_keys(options):
    leaves = tensors(n=96, m=112)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        output = ia.equilibrium_attention(*leaves, **options)
    assert max(sizes) == B * H * 112 * D
    # The read-out keeps three tensors, the solve state, mean, log-sum-exp, query and keys.
    assert len(sizes) == (3 if options else 8)
    gradients(output, leaves)


@pytest.mark.parametrize("count", [M, 80])
def test_an_output_may_be_written_to_before_the_backward_pass(count):
    leaves = tensors(m=count)
    expected = gradients(2 * ia.equilibrium_attention(*leaves), leaves)
    output = ia.equilibrium_attention(*leaves)
    output *= 2
    assert all(map(torch.equal, gradients(output, leaves), expected))


def by_solve(query, key, value):
    return ia.solve(ia.AnchoredEnergy(ia.LogSumExp(key, 0.4), query, 0.5), query.detach()).value


DOORS = {
    "function": ia.equilibrium_attention,
    "solution": lambda *given: ia.equilibrium_attention(*given, return_solution=True)[0],
    "masked": lambda *given: ia.equilibrium_attention(*given, torch.ones(N, N, dtype=torch.bool).tril()),
    "solve": by_solve,
    "operation": lambda query, key, value: hopfield_solve(query, key, beta=0.4, anchor=0.5)[0],
}


@native
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_one_tensor_in_several_places_has_the_sum_of_their_gradients(door, create_graph):
    x = leaf(random(B, H, N, D, seed=3, dtype=torch.float32))
    run = DOORS[door]
    (found,) = torch.autograd.grad(run(x, x, x).square().sum(), x, create_graph=create_graph)
    apart = [leaf(x) for _ in range(3)]
    given = torch.autograd.grad(run(*apart).square().sum(), apart, allow_unused=True)
    torch.testing.assert_close(found.detach(), sum(g for g in given if g is not None), rtol=1e-4, atol=1e-5)


@native
@pytest.mark.parametrize("shared", [(), (H,), (1, H), (B, H)], ids=str)
def test_one_call_takes_few_of_the_operations_of_torch_that_a_loop_takes(shared):
    counts = []
    with torch.no_grad():
        for impl in ("auto", "reference"):
            with torch.profiler.profile() as seen:
                ia.equilibrium_attention(*tensors(shared=shared), anchor=0.4, impl=impl)
            counts.append(sum(event.name.startswith("aten::") for event in seen.events()))
    assert 20 * counts[0] < counts[1]


# Failures.


@native
@pytest.mark.parametrize("on_failure", ["raise", "warn", "ignore"])
@pytest.mark.parametrize("what", ["a query of NaN", "a key of inf", "too few steps"])
@pytest.mark.parametrize("door", ["function", "solve", "layer"])
def test_failures_are_told_alike(door, what, on_failure):
    query, key, value = (t.detach() for t in tensors())
    if what == "a query of NaN":
        query[0, 1, 2] = torch.nan
    if what == "a key of inf":
        key[1, 0, 3] = torch.inf
    leaves = [t.requires_grad_() for t in (query, key, value)]
    solver = ia.Anderson(max_steps=1, rtol=1e-7) if what == "too few steps" else ia.Anderson()
    layer = ia.ImplicitAttention(D, 1, bare=True)

    def run(impl):
        options = {"solver": solver, "on_failure": on_failure, "impl": impl}
        if door == "function":
            output = ia.equilibrium_attention(*leaves, **options)
        elif door == "layer":
            output = copy.deepcopy(layer)(query[:, 1], key[:, 0], **options)
        else:
            output = ia.solve(ia.AnchoredEnergy(ia.LogSumExp(key, 0.4), query, 0.5), query, **options).value
        return output, torch.autograd.grad(output.square().sum(), leaves, materialize_grads=True)

    _, (error, *messages) = agree(run)
    assert bool(error) == (on_failure == "raise")
    assert bool(messages) == (on_failure == "warn")


@native
@pytest.mark.parametrize("on_failure", ["raise", "warn", "ignore"])
def test_backward_solves_that_fail_are_told_alike(on_failure):
    # Half-way between two clusters of keys the energy is flat along their difference: there is no gradient.
    key = torch.zeros(1, 1, 6, D)
    key[..., :3, 0], key[..., 3:, 0] = 2.0, -2.0
    query = random(1, 1, 2, D, dtype=torch.float32)
    query[..., 0] = 0.0
    leaves = [leaf(t) for t in (query, key, random(1, 1, 6, D, seed=1, dtype=torch.float32))]

    def run(impl):
        attended(leaves, impl, scale=0.3125, anchor=0.2, on_failure=on_failure)
        return torch.zeros(0)

    _, (error, *messages) = agree(run)
    assert ("the adjoint solve" in error) == (on_failure == "raise")
    assert any("the adjoint solve" in message for message in messages) == (on_failure == "warn")


@native
def test_a_failed_query_changes_no_gradient_of_others():
    query, key, value = (t.detach() for t in tensors())
    cotangent = random(B, H, N, D, seed=5, dtype=torch.float32)
    cotangent[0, 1, 2] = 0
    anchor = leaf(torch.full((H,), 0.4))

    def run(impl):
        leaves = [*map(leaf, (query, key, value)), anchor]
        output = ia.equilibrium_attention(*leaves[:3], anchor=anchor, on_failure="ignore", impl=impl)
        return torch.autograd.grad(output, leaves, cotangent)

    expected = run("auto")
    query[0, 1, 2] = torch.nan
    for a, b in zip(agree(run)[0][1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b)


@native
@pytest.mark.parametrize("mask", [None, torch.ones(3, 2, dtype=torch.bool)], ids=["bare", "mask"])
def test_a_saddle_among_others_is_told_and_differentiated_alike(mask):
    # Both keys are as near: the state in the middle is stationary, and E curves down there.
    key = leaf(torch.stack([torch.ones(D), -torch.ones(D)])[None, None])
    query = leaf(torch.stack([torch.zeros(D), torch.linspace(0.5, 1.5, D), torch.zeros(D)])[None, None])
    beta, anchor = leaf(torch.tensor(1.0)), leaf(torch.tensor([0.5]))

    def run(impl):
        energy = ia.AnchoredEnergy(ia.LogSumExp(key, beta, mask=mask), query, anchor)
        solution = ia.solve(energy, query, on_failure="warn", impl=impl)
        found = gradients(solution.value, [query, key, beta, anchor])
        return solution.energy, found, solution.adjoint.status, solution.adjoint.negative_curvature

    _, _, status, curved = agree(run)[0]
    assert curved.tolist() == [[[True, False, True]]]
    unstable, converged = int(ia.Status.UNSTABLE), int(ia.Status.CONVERGED)
    assert status.tolist() == [[[unstable, converged, unstable]]]


def test_true_is_no_number_of_steps_after_one_was():
    leaves = tensors()
    ia.equilibrium_attention(*leaves, max_steps=1, on_failure="ignore")
    with pytest.raises(TypeError, match="`max_steps` must be an integer, got True"):
        ia.equilibrium_attention(*leaves, max_steps=True)


# Calls that it leaves to the loop.


class Mine(ia.Anderson):
    pass


class Peculiar(ia.LogSumExp):
    pass


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Labelled(torch.Tensor):
    pass


def unusual(leaves, impl):
    query, key, value = leaves

    def call(query=query, key=key, value=value, **options):
        return ia.equilibrium_attention(query, key, value, impl=impl, **options)

    def solved(potential, **options):
        with torch.no_grad():
            return ia.solve(ia.AnchoredEnergy(potential, query, 0.5), query, impl=impl, **options)

    def with_an_attribute():
        potential = ia.LogSumExp(key, 0.3)
        potential.shift = torch.ones(1)
        return solved(potential).value

    def learned_mask():
        bias = leaf(random(N, M, seed=4, dtype=torch.float32))
        output = call(attn_mask=bias)
        return output, gradients(output, [bias])

    def in_a_mode():
        with Passing():
            return call()

    def under_autocast():
        with torch.autocast("cpu", torch.bfloat16):
            output = call()
            return output, gradients(output, leaves)

    def in_inference():
        with torch.inference_mode():
            return call(*(t.detach().clone() for t in leaves))

    return {
        "vmap": lambda: torch.vmap(call)(query, key, value),
        "func.grad": lambda: torch.func.grad(lambda q: call(q).sum())(query),
        "jvp": lambda: torch.func.jvp(call, (query.detach(),), (torch.ones_like(query),)),
        "inside func.grad of something else": lambda: torch.func.grad(lambda x: (x * call()).sum())(torch.ones(D)),
        "a mode that sees every operation": in_a_mode,
        "autocast": under_autocast,
        "inference mode": in_inference,
        "compile": lambda: torch.compile(lambda q: call(q, on_failure="ignore"), backend="eager")(query),
        "a tensor to be negated": lambda: call(torch.complex(torch.zeros_like(query), query).conj().imag),
        "a subclass of tensor": lambda: call(query.detach().as_subclass(Labelled)).as_subclass(torch.Tensor),
        "a subclass of solver": lambda: call(solver=Mine()),
        "a subclass of potential": lambda: solved(Peculiar(key, 0.3)).value,
        "a potential with an attribute": with_an_attribute,
        "another linear solver": lambda: call(adjoint=ia.Implicit(CG())),
        "trace": lambda: solved(ia.LogSumExp(key, 0.3), trace=True).trace.residual,
        "an additive mask that requires grad": learned_mask,
        "no queries": lambda: call(query[..., :0, :]),
        "no keys": lambda: call(key=key[..., :0, :], value=value[..., :0, :]),
        "an anchor that float32 does not carry": lambda: call(anchor=1 - 1e-5),
    }


@pytest.mark.parametrize("case", unusual([torch.zeros(1, 1, 1, 1)] * 3, "auto"))
def test_other_calls_get_the_answer_of_the_loop(case):
    agree(lambda impl: unusual(tensors(), impl)[case]())


@pytest.mark.parametrize("options", [{"on_failure": "ignore"}, {"max_steps": 0}])
def test_shapes_alone_get_a_shape(options):
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t.detach()) for t in tensors()]
        assert ia.equilibrium_attention(*fake, **options).shape == (B, H, N, D)
    output = ia.equilibrium_attention(*(t.detach().to("meta") for t in tensors()), **options)
    assert output.is_meta
    assert output.shape == (B, H, N, D)


def test_an_explicit_query_that_is_not_finite_reads_nan():
    for number, count in ((torch.nan, 3), (torch.inf, 3), (torch.nan, 80)):
        query, key, value = (t.detach() for t in tensors(m=count))
        query[0, 0, 1] = number
        output = ia.equilibrium_attention(query, key, value, max_steps=0)
        assert output.isnan().any(-1).sum() == 1
        assert output[0, 0, 1].isnan().all()
    query, key, value = (t.detach() for t in tensors())
    assert ia.equilibrium_attention(query, key * torch.nan, value, max_steps=0).isnan().all()


WRONG = {
    "another width": lambda q, k, v: ia.equilibrium_attention(q, k[..., :3], v),
    "heads that do not fit": lambda q, k, v: ia.equilibrium_attention(q, k[:, :2], v[:, :2]),
    "scales of another shape": lambda q, k, v: ia.equilibrium_attention(q, k, v, scale=torch.ones(5)),
    "anchors above 1": lambda q, k, v: ia.equilibrium_attention(q, k, v, anchor=2 * torch.ones(H)),
    "another shape to start at": lambda q, k, v: ia.solve(ia.AnchoredEnergy(ia.LogSumExp(k, 0.3), q, 0.5), q[0]),
    "explicit steps of a solve": lambda q, k, v: ia.equilibrium_attention(q, k, v, max_steps=0, impl="native"),
}


@pytest.mark.parametrize("case", WRONG)
def test_plain_tensors_that_do_not_fit_are_refused(case):
    with pytest.raises((ValueError, ia.UnsupportedImplementation), match=r"must|`impl='native'`"):
        WRONG[case](*tensors())

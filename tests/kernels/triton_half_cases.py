"""Cases for half precision behind the doors: what stays in it on a card, in the interpreter as if the CPU were one."""

import contextlib
import copy
import functools
import pickle

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from triton_harness import BF16, DEVICE, FP16, FP32, case, cases

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    FailurePolicy,
    ImplicitAttention,
    LogSumExp,
    UnsupportedImplementation,
    _solve,
    equilibrium_attention,
    solve,
)
from implicit_attention.kernels import hopfield_solve
from implicit_attention.solution import Status

HALF = {"fp16": dict(dtype=FP16), "bf16": dict(dtype=BF16)}
# A number of keys that divides no other size.
N, M, D, E = 21, 83, 12, 10
FINE = Anderson(rtol=1e-5)


@contextlib.contextmanager
def card(is_one=True):
    """The Triton kernels answer where the CPU's would, as on a card."""
    before, _solve.TRITON_DEVICES = _solve.TRITON_DEVICES, ("cpu", "cuda") if is_one else ()
    try:
        yield
    finally:
        _solve.TRITON_DEVICES = before


def widens(given, made):
    """Whether float32 or float64 is made of as many keys or values in half precision."""

    def some(tensors, *dtypes):
        tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
        return any(t.dtype in dtypes and t.numel() and t.numel() % M == 0 for t in tensors)

    return some(given, FP16, BF16) and some(made, FP32, torch.float64)


class Widened(TorchDispatchMode):
    """The operations that `widens`."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if widens(tree_leaves((args, kwargs)), tree_leaves(result)):
            self.found.append(f"{function} of {[tuple(t.shape) for t in args if isinstance(t, torch.Tensor)]}")
        return result


@contextlib.contextmanager
def nothing_widened():
    mode = Widened()
    with card(), mode:
        yield
    assert not mode.found, mode.found


def drawn(*shape, dtype, seed=0, grad=True):
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    return numbers.requires_grad_(grad)


def inputs(dtype, heads=2, kv_heads=2):
    sizes = ((heads, N, D), (kv_heads, M, D), (kv_heads, M, E))
    return [drawn(*size, dtype=dtype, seed=seed) for seed, size in enumerate(sizes)]


MASKED = {
    "none": {},
    "keys": {"attn_mask": lambda dtype: torch.arange(M) % 3 > 0},
    "pairs": {"attn_mask": lambda dtype: torch.arange(M) % 3 != torch.arange(N)[:, None] % 3},
    "bias": {"attn_mask": lambda dtype: drawn(N, M, dtype=dtype, grad=False)},
    "causal": {"is_causal": True, "query_offset": 50},
    "grouped": {"enable_gqa": True},
}


def arguments(name, dtype):
    made = {key: value(dtype) if callable(value) else value for key, value in MASKED[name].items()}
    return inputs(dtype, kv_heads=1 if name == "grouped" else 2), made


@cases(**{name: {"name": name, "dtype": dtype} for name, dtype in zip(MASKED, 4 * (FP16, BF16), strict=False)})
def half_function_widens_nothing(name, dtype):
    tensors, options = arguments(name, dtype)
    beta, anchor = (torch.full((2,), number, requires_grad=True) for number in (0.3, 0.4))
    with nothing_widened():
        output, solution = equilibrium_attention(*tensors, scale=beta, anchor=anchor, return_solution=True, **options)
        output.backward(torch.ones_like(output))
    assert output.dtype == dtype
    assert solution.route.floor == 2e-6
    assert bool(solution.converged.all())
    assert all(t.grad.dtype == t.dtype for t in (*tensors, beta, anchor))


@cases(**HALF)
def half_solve_widens_nothing(dtype):
    query, keys, _ = inputs(dtype)
    with nothing_widened():
        solution = solve(AnchoredEnergy(LogSumExp(keys, 0.3), query, 0.4), query.detach())
        solution.value.sum().backward()
    assert solution.value.dtype == FP32
    assert solution.adjoint.status is not None
    assert keys.grad.dtype == query.grad.dtype == dtype


@cases(**HALF, autocast=dict(dtype=BF16, autocast=True), state=dict(dtype=FP16, readout="state"))
def half_layer_widens_nothing(dtype, autocast=False, **options):
    torch.manual_seed(0)
    layer = ImplicitAttention(2 * D, 2, **options).to(FP32 if autocast else dtype)
    x = drawn(2, N, 2 * D, dtype=FP32 if autocast else dtype, grad=False)
    context = drawn(2, M, 2 * D, dtype=x.dtype, seed=1, grad=False)
    with nothing_widened(), torch.autocast(DEVICE, dtype, enabled=autocast):
        layer(x, context).sum().backward()
    assert layer.last_solve.route.floor == 2e-6
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())


# Tolerances, and what is refused.


def energy_of(dtype, beta=0.3, anchor=0.4):
    query, keys, _ = inputs(dtype)
    return AnchoredEnergy(LogSumExp(keys, beta), query, anchor), query.detach()


@cases(**HALF)
def half_tolerance_of_its_own(dtype):
    """1e-3 where nobody named a solver and a card's kernel answers; elsewhere and to others what it was."""
    problem, start = energy_of(dtype)
    tensors = inputs(dtype)
    for is_card, rtol in ((True, 1e-3), (False, 1e-4)):
        with card(is_card):
            single = problem.replace(*(t.float() for t in problem.tensors()))
            found = [solve(problem, start), solve(single, start.float())]
            found += [equilibrium_attention(*tensors, return_solution=True, max_steps=n)[1] for n in (None, 50)]
            named = solve(problem, start, solver=Anderson())
            operation = hopfield_solve(start, problem.potential.keys, beta=0.3)
        assert [s.tolerances[0] for s in found] == [rtol, 1e-4, rtol, rtol]
        assert named.tolerances[0] == 1e-4
        # The backward solve of products in half precision takes three times that.
        for solution, of_adjoint in ((found[0], 3e-3 if is_card else 1e-4), (named, 3e-4 if is_card else 1e-4)):
            solution.value.sum().backward()
            assert float(solution.adjoint.tolerance.amax()) == pytest.approx(of_adjoint * D**0.5, rel=1e-3)
        for solution in (*found, named):
            size = solution.value.norm(dim=-1)
            torch.testing.assert_close(solution.tolerance, 1e-8 + solution.tolerances[0] * size, rtol=2e-3, atol=0)
            assert bool(solution.converged.all())
        torch.testing.assert_close(operation.tolerance, rtol * operation.state.norm(dim=-1), rtol=2e-3, atol=1e-8)


@cases(**HALF)
def half_tolerance_that_is_too_fine(dtype):
    problem, start = energy_of(dtype)
    fine = Anderson(rtol=9e-6)
    with card():
        exact = solve(problem, start, solver=FINE)
        words = r"residuals are known to 2e-06 \|f\(z\)\|; use rtol >= 1e-05, got 9e-06, float32 keys"
        with pytest.raises(UnsupportedImplementation, match=words):
            solve(problem, start, solver=fine, impl="triton")
        finer = solve(problem, start, solver=fine)
    assert exact.route.floor == 2e-6
    assert finer.route.floor is None
    assert bool((exact.converged & finer.converged).all())
    assert bool(((exact.value - finer.value).norm(dim=-1) < 5e-5 * finer.value.norm(dim=-1)).all())


@case
def half_floor_is_said():
    query, keys, values = inputs(BF16)
    said = "products in float16: residuals known to 2e-06 |f(z)|"
    with card():
        for dtype in (BF16, FP16, FP32):
            given = (t.detach().to(dtype) for t in (query, keys, values))
            report = equilibrium_attention(*given, return_solution=True)[1].report
            assert (said in str(report.route)) == (report.route.floor == 2e-6) == (dtype != FP32), report.route
            assert pickle.loads(pickle.dumps(report)).route.floor == report.route.floor
        layer = ImplicitAttention(2 * D, 2).bfloat16()
        layer(drawn(2, N, 2 * D, dtype=BF16))
        assert str(layer.last_solve.route) == f"triton: evaluate, step, product; float32; {said}; 2 heads"
    with card(False):
        layer(drawn(2, N, 2 * D, dtype=BF16))
    assert layer.last_solve.route.floor is None


# Against the same call with everything in float32.


def check_route(solution):
    """In half precision on a card, and there alone."""
    assert (solution.route.floor is not None) == bool(_solve.TRITON_DEVICES)


def both(call, *tensors, tolerance):
    """Results and gradients of `call` on a card, near those that are widened."""
    found = []
    for is_card in (True, False):
        own = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        with card(is_card):
            results = call(*own)
        results = results if isinstance(results, tuple) else (results,)
        scalar = sum((r.float() * torch.linspace(0.5, 1.5, r.numel()).view(r.shape)).sum() for r in results)
        gradients = torch.autograd.grad(scalar, [t for t in own if t.requires_grad])
        found.append([*(r.detach() for r in results), *gradients])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        off = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert float(off) < tolerance, (float(off), tuple(ours.shape))


@cases(**HALF)
def half_mixed_dtypes(dtype):
    """A bias, betas and anchors in float32 or float64 beside keys in half precision, of which none is rounded."""
    tensors = inputs(dtype)
    bias = 2 * drawn(N, M, dtype=FP32, seed=5, grad=False)
    bias[:, ::4] = -torch.inf
    bias[3] = torch.finfo(FP32).min
    beta, anchor = drawn(2, dtype=FP32, seed=6).abs() / 3, torch.tensor([0.3, 0.5], dtype=torch.float64)

    def call(query, keys, values, beta, anchor):
        options = {"attn_mask": bias, "scale": beta, "anchor": anchor, "solver": FINE, "return_solution": True}
        output, solution = equilibrium_attention(query, keys, values, **options)
        check_route(solution)
        return output

    given = (*tensors, beta.detach().requires_grad_(), anchor.requires_grad_())
    both(call, *given, tolerance=0.001 if dtype == FP16 else 0.008)


@cases(**HALF)
def half_second_derivatives(dtype):
    query, keys, _ = inputs(dtype)

    def call(query, keys):
        solution = solve(AnchoredEnergy(LogSumExp(keys, 0.3), query, 0.4), query.detach(), solver=FINE)
        check_route(solution)
        return torch.autograd.grad(solution.value.sin().sum(), (query, keys), create_graph=True)

    both(call, query, keys, tolerance=0.003 if dtype == FP16 else 0.02)


@case
def half_torch_func():
    query, keys, _ = (t.detach() for t in inputs(BF16))

    def loss(query, keys):
        energy = AnchoredEnergy(LogSumExp(keys, 0.3), query, 0.4)
        return solve(energy, query, on_failure="ignore").value.sum()

    tangents = drawn(*query.shape, dtype=BF16, grad=False), torch.zeros_like(keys)
    for transformed in (
        torch.func.grad(loss),
        torch.func.jacrev(loss),
        lambda *given: torch.func.jvp(loss, given, tangents)[1],
        lambda *given: torch.func.vmap(loss)(*given),
    ):
        with card():
            ours = transformed(query, keys)
        with card(False):
            theirs = transformed(query, keys)
        assert torch.equal(ours, theirs)


@cases(**HALF, wide=dict(dtype=BF16, dim=200))
def half_saddles_are_finished(dtype, dim=D):
    """Zero is a solution between two keys; the backward solve by the kernel stalls there."""
    keys = torch.zeros(2, dim)
    keys[0, 0], keys[1, 0] = 1.0, -1.0
    keys, query = keys.to(DEVICE, dtype), torch.zeros(3, dim, dtype=dtype, device=DEVICE)
    query[2, 0] = 0.9

    def call(query, keys):
        energy = AnchoredEnergy(LogSumExp(keys, 3.0), query, 0.1)
        found = solve(energy, query.detach(), impl="triton" if _solve.TRITON_DEVICES else "auto")
        check_route(found)
        found.value.sum().backward(retain_graph=True)
        assert found.adjoint.negative_curvature.tolist() == [True, True, False]
        assert found.adjoint.status.tolist() == [Status.UNSTABLE, Status.UNSTABLE, Status.CONVERGED]
        return found.value + 0

    both(call, query.requires_grad_(), keys.requires_grad_(), tolerance=0.01)


@case
def half_queries_that_fail_add_nothing():
    query, keys, values = (t.detach() for t in inputs(BF16))
    query[0, 3] = torch.nan
    tensors = [t.requires_grad_() for t in (query, keys, values)]
    anchor = torch.tensor([0.3, 0.4], requires_grad=True)
    with card():
        output, solution = equilibrium_attention(*tensors, anchor=anchor, return_solution=True, on_failure="ignore")
        output[:, 4:].sum().backward()
    assert int(solution.failed.sum()) == 1
    assert bool(output[0, 3].isnan().all())
    assert int(output.isnan().any(-1).sum()) == 1
    assert all(bool(t.grad.isfinite().all()) for t in (*tensors, anchor))


@case
def half_failures_by_policy():
    """With forward="explicit" the values of a query that failed are read at the query."""
    query, keys, values = inputs(BF16)
    policy = FailurePolicy(over="ignore", forward="explicit")
    with card():
        output, solution = equilibrium_attention(
            query, keys, values, return_solution=True, max_steps=1, on_failure=policy, scale=2.0
        )
        explicit = equilibrium_attention(query, keys, values, max_steps=0, scale=2.0)
    failed = solution.failed
    assert 0 < int(failed.sum()) < failed.numel()
    assert torch.equal(output[failed], explicit[failed])


@cases(reentrant=dict(reentrant=True), hooks=dict(reentrant=False))
def half_checkpointed(reentrant):
    tensors, found = inputs(BF16), []
    with card():
        for wrapped in (False, True):
            options = {"use_reentrant": reentrant} if wrapped else {}
            call = functools.partial(checkpoint, equilibrium_attention) if wrapped else equilibrium_attention
            call(*tensors, **options).float().square().sum().backward()
            found.append([t.grad for t in tensors])
            for tensor in tensors:
                tensor.grad = None
    assert all(map(torch.equal, *found))


@case
def half_arguments_that_do_not_fit():
    """Errors are those of other precisions."""
    problem, start = energy_of(BF16)
    with card():
        for initial, error, words in (
            (start[:1], ValueError, "`initial` must have the field's shape"),
            (start.double(), ValueError, "`initial` must have the dtype"),
            (start.int(), TypeError, "`initial` must have a floating-point dtype"),
            (None, TypeError, "`initial` must be a torch.Tensor"),
        ):
            with pytest.raises(error, match=words):
                solve(problem, initial)
        wide = drawn(2, 3, 300, dtype=BF16)
        with pytest.raises(UnsupportedImplementation, match="head dimension of 300; use at most 256"):
            equilibrium_attention(wide, wide, wide, impl="triton")
        assert equilibrium_attention(wide, wide, wide).dtype == BF16
        with pytest.raises(UnsupportedImplementation, match="no step is kept"):
            solve(problem, start, impl="triton", trace=True)


@case
def half_masked_keys_that_are_not_finite():
    query, keys, values = (t.detach() for t in inputs(FP16))
    mask = torch.arange(M) > 4
    clean = [query, keys.clone(), values]
    keys[:, :4] = torch.nan
    with card():
        found = [equilibrium_attention(query, k, values, attn_mask=mask) for k in (keys, clean[1])]
    torch.testing.assert_close(*found)


@case
def half_bias_with_a_gradient_is_widened():
    query, keys, values = inputs(BF16)
    bias = drawn(N, M, dtype=BF16, seed=5)
    both(
        lambda *given: equilibrium_attention(*given[:3], attn_mask=given[3], solver=FINE),
        *(query, keys, values, bias),
        tolerance=1e-3,
    )


@case
def half_compiled():
    """One graph, whose operation takes the keys as they are."""
    torch.manual_seed(0)
    layer = ImplicitAttention(2 * D, 2).bfloat16()
    x, context = (drawn(2, n, 2 * D, dtype=BF16, grad=False) for n in (N, M))
    nodes = []

    def kept(graph, example):
        nodes.extend(node for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    with card():
        expected = layer(x, context)
        expected.sum().backward()
        gradients = [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        found = torch.compile(layer, backend=aot_autograd(fw_compiler=kept, bw_compiler=kept), fullgraph=True)(
            x, context
        )
        found.sum().backward()
    assert torch.equal(found, expected)
    for ours, theirs in zip((p.grad for p in layer.parameters()), gradients, strict=True):
        assert float((ours - theirs).float().norm()) <= 0.02 * float(theirs.float().norm())
    for operation in ("hopfield_solve", "hopfield_adjoint"):
        (call,) = (node for node in nodes if operation in str(node.target))
        assert call.args[1].meta["val"].dtype == BF16
    for node in nodes:
        made, given = node.meta.get("val"), [n.meta.get("val") for n in node.all_input_nodes]
        assert not widens(given, [made]) or "hopfield" in str(node.target), node.format_node()


@case
def half_decoding_with_a_cache():
    torch.manual_seed(0)
    layer = ImplicitAttention(2 * D, 2, causal=True).bfloat16().eval()
    x = drawn(2, M, 2 * D, dtype=BF16, grad=False)
    with card(), torch.no_grad():
        whole, cache = layer(x), layer.new_cache()
        parts = torch.cat([layer(x[:, :70], cache=cache), layer(x[:, 70:], cache=cache)], 1)
        assert layer.last_solve.route.floor == 2e-6
    assert cache.held.keys.dtype == BF16
    assert float((whole - parts).float().norm()) < 0.01 * float(whole.float().norm())


@case
def half_nothing_to_solve():
    with card():
        for n, m, d in ((0, M, D), (N, 0, D), (N, M, 0)):
            query, keys = (torch.zeros(2, size, d, dtype=BF16).requires_grad_() for size in (n, m))
            output = equilibrium_attention(query, keys, torch.zeros(2, m, E, dtype=BF16))
            assert output.shape == (2, n, E)
            assert output.dtype == BF16
            output.sum().backward()


@case
def half_weights_and_the_course_are_as_before():
    torch.manual_seed(0)
    layer = ImplicitAttention(2 * D, 2).bfloat16()
    x, context = (drawn(2, n, 2 * D, dtype=BF16, grad=False) for n in (N, M))
    with card():
        output, weights = layer(x, context, return_weights=True)
        traced, solution = layer(x, context, return_trajectory=True)
    assert weights.dtype == FP32
    assert solution.route.floor is None
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, N))
    torch.testing.assert_close(output, traced, rtol=0.02, atol=0.02)


# A model of another library.


@case
def half_llama():
    """Logits in bfloat16 are as far from those in float64 as with a solve in float32, which solves ten times finer."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    from implicit_attention.integrations.transformers import attach, last_solves

    sizes = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.1)
    ids = torch.randint(2, 50, (1, 70))
    # The same rounded weights in both precisions.
    narrow = attach(model.bfloat16(), anchor=0.5, on_failure="raise")
    exact = attach(copy.deepcopy(model).double(), anchor=0.5, solver=Anderson(rtol=1e-10), on_failure="raise")
    with torch.no_grad():
        right = exact(input_ids=ids).logits
        widened = narrow(input_ids=ids).logits.double()
        with card():
            found = narrow(input_ids=ids).logits
    assert found.dtype == BF16
    assert [solve.route.floor for solve in last_solves(narrow).values()] == [2e-6, 2e-6]
    errors = [float((logits.double() - right).norm() / right.norm()) for logits in (found, widened)]
    assert errors[0] < 1.2 * errors[1] < 0.1, errors


@case
def half_reads_out_where_scores_are_large():
    """A temperature that takes states beyond the numbers of float16."""
    keys, values = 20 * drawn(M, D, dtype=FP16, grad=False), drawn(M, E, dtype=FP16, grad=False)
    with card():
        found = equilibrium_attention(keys[:9], keys, values, scale=torch.tensor(2000.0, device=DEVICE))
        expected = equilibrium_attention(keys[:9], keys, values, scale=2000.0)
    assert torch.equal(found, expected)

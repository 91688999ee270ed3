"""Policies in layers of every kind, memories and decoding."""

import pytest
import torch
from failure_reference import D, E, M, gradients, inputs, partly, some_steps
from torch import nn

from implicit_attention import (
    Equilibrium,
    EquilibriumTransformer,
    FailurePolicy,
    Implicit,
    ImplicitAttention,
    MemoryLookup,
    Picard,
    Rotary,
    Status,
    equilibrium_attention,
)
from implicit_attention.integrations.multihead import ImplicitMultiheadAttention
from implicit_attention.layers import EnergyTransformer, MeanFieldAttention, SpinAttention
from implicit_attention.linear import CG, GMRES
from implicit_attention.testing.numerics import random

pytestmark = pytest.mark.cases(3)

ZERO = FailurePolicy(backward="zero", over="ignore")
EXPLICIT = FailurePolicy(forward="explicit", over="ignore")
BOTH = FailurePolicy(forward="explicit", backward="zero", over="ignore")
POLICIES = [pytest.param(policy, id=name) for name, policy in (("zero", ZERO), ("explicit", EXPLICIT), ("both", BOTH))]
CLOSE = {"rtol": 1e-7, "atol": 1e-8}


@pytest.fixture(autouse=True)
def same_parameters():
    torch.manual_seed(0)


def few(steps, rtol=1e-6):
    return Picard(rtol=rtol, atol=1e-12, max_steps=steps)


# Memories, decoding and weights.


@pytest.mark.parametrize("similarity", ["dot", "distance"])
@pytest.mark.parametrize("read", [False, True], ids=["retrieve", "targets"])
@pytest.mark.parametrize("anchor", [0.0, 0.4])
def test_a_memory_answers_failed_queries_by_one_step(similarity, read, anchor):
    memory = MemoryLookup(D, similarity=similarity, beta=0.9, anchor=anchor, dtype=torch.float64)
    memory.store(random(M, D), random(M, E, seed=1))
    queries = random(40, D, seed=2)
    ask = memory if read else memory.retrieve
    solver = few(some_steps(lambda n: ask(queries, solver=few(n), on_failure="ignore", return_solution=True)[1].failed))
    solved, solution = ask(queries, on_failure="ignore", solver=solver, return_solution=True)
    failed, explicit = partly(solution.failed), ask(queries, max_steps=0)
    found = ask(queries, on_failure=EXPLICIT, solver=solver)
    torch.testing.assert_close(found[failed], explicit[failed], rtol=1e-12, atol=1e-12)
    assert torch.equal(found[~failed], solved[~failed])
    assert torch.equal(memory.last_solve.failed, failed)


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_of_a_state_that_is_returned(policy):
    query, key, *_ = inputs(rows=30)
    query, key = query[:1, :1].detach().requires_grad_(), key[:1, :1].detach()
    memory = MemoryLookup(D, learned=True, size=M, similarity="dot", beta=0.9, anchor=0.35, dtype=torch.float64)
    with torch.no_grad():
        memory.patterns.copy_(key[0, 0])
    output, solution = memory.retrieve(query, return_solution=True, solver=few(20, 1e-9), on_failure=policy)
    failed, cotangent = partly(solution.failed), random(1, 1, 30, D, seed=7)
    found = torch.autograd.grad(output, [query, memory.patterns], cotangent)
    leaves = [query, memory.patterns[None, None], torch.empty(1, 1, M, 0).double()]
    leaves += [torch.tensor([number]).double() for number in (0.9, 0.35)]
    zero, explicit = failed if policy.backward == "zero" else None, policy.forward == "explicit"
    expected, (by_query, by_key, *_) = gradients(
        leaves, solution.value, cotangent, failed=failed, zero=zero, explicit=explicit, read=False
    )
    torch.testing.assert_close(output, expected, **CLOSE)
    torch.testing.assert_close(found, (by_query, by_key[0, 0]), **CLOSE)


@pytest.mark.parametrize("made", [{}, {"readout": "state"}, {"rotary": Rotary()}], ids=str)
def test_decoding_with_a_cache_gives_the_whole_sequence(made):
    options = {"beta": 2.0, "anchor": 0.3, "causal": True, "dtype": torch.float64, "on_failure": EXPLICIT}
    layer = ImplicitAttention(8, 1, **options, **made)
    x = 2 * random(2, 9, 8)

    def fails(steps):
        layer(x, solver=few(steps))
        return layer.last_solve.failed

    with torch.no_grad():
        solver = few(some_steps(fails))
        whole, explicit, solved = layer(x, solver=solver), layer(x, max_steps=0), layer(x, solver=few(99))
        layer(x, solver=solver, on_failure="ignore")
        failed = partly(layer.last_solve.failed)[:, 0]
        cache = layer.new_cache()
        steps = [layer(x[:, place : place + 1], cache=cache, solver=solver) for place in range(9)]
    torch.testing.assert_close(torch.cat(steps, -2), whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(whole[failed], explicit[failed], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(whole[~failed], solved[~failed], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(explicit[failed], solved[failed], rtol=1e-3)


def test_weights_are_those_that_were_read_with():
    layer = ImplicitAttention(8, 2, beta=2.0, anchor=0.3, dtype=torch.float64)
    x = 2 * random(2, 9, 8)

    def fails(steps):
        layer(x, on_failure="ignore", solver=few(steps))
        return layer.last_solve.failed

    with torch.no_grad():
        solver = few(some_steps(fails))
        _, explicit = layer(x, max_steps=0, return_weights=True)
        _, solved = layer(x, on_failure="ignore", solver=solver, return_weights=True)
        failed = partly(layer.last_solve.failed)
        _, found = layer(x, on_failure=EXPLICIT, solver=solver, return_weights=True)
    torch.testing.assert_close(found[failed], explicit[failed], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[~failed], solved[~failed], rtol=1e-9, atol=1e-9)


# Layers of every kind.

WIDTH = 8


class Contraction(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, z, x):
        return torch.tanh(self.linear(z) + x)


#: What makes a layer, whether its linear systems are symmetric, and parts of it behind the solve.
LAYERS = {
    "block": (lambda **o: Equilibrium(Contraction(), **o), GMRES, ()),
    "rows of a block": (lambda **o: Equilibrium(Contraction(), event_ndim=1, **o), GMRES, ()),
    "transformer": (lambda **o: EquilibriumTransformer(WIDTH, 2, **o), GMRES, ("norm",)),
    "energy transformer": (lambda **o: EnergyTransformer(WIDTH, 2, 4, 6, **o), CG, ()),
    "spins": (lambda **o: SpinAttention(WIDTH, 1, **o), GMRES, ("out_proj",)),
    "mean field": (lambda **o: MeanFieldAttention(WIDTH, 1, **o), GMRES, ("out_proj",)),
}


def tokens():
    sizes = torch.tensor([0.01, 0.3, 2.0, 0.05], dtype=torch.float64)[:, None, None]
    x = random(4, 5, WIDTH) * sizes
    # Layers that normalise see no sizes, but that there is nothing.
    x[3] = 0.0
    return x.requires_grad_()


class Case:
    """One kind of layer, with the numbers of steps at which some of its problems fail."""

    def __init__(self, name):
        self.make, self.linear, self.behind = LAYERS[name]

    def layer(self, on_failure, solver, adjoint=None):
        torch.manual_seed(0)
        return self.make(solver=solver, adjoint=adjoint, on_failure=on_failure).double()

    def gradients(self, layer, *, without=None):
        """Gradients of the input and of what is in the solve, by a loss that does not read the problems `without`."""
        x = tokens()
        output = layer(x)
        cotangent = random(*output.shape, seed=5)
        if without is not None:
            cotangent = cotangent.masked_fill(without.reshape(*without.shape, *(1,) * (3 - without.ndim)), 0.0)
        inside = [p for n, p in layer.named_parameters() if not n.startswith(self.behind)]
        return torch.autograd.grad(output, [x, *inside], cotangent, allow_unused=True)

    def compare(self, layer, expected):
        for ours, theirs in zip(self.gradients(layer), expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", LAYERS)
def test_problems_without_an_answer_teach_nothing(name):
    case = Case(name)

    def fails(steps):
        layer = case.layer("ignore", few(steps))
        layer(tokens())
        return problems(layer.last_solve.failed)

    solver = few(some_steps(fails))
    ignoring = case.layer("ignore", solver)
    kept = case.gradients(ignoring)
    failed = problems(ignoring.last_solve.failed)
    expected = case.gradients(ignoring, without=failed)
    assert not torch.allclose(kept[0], expected[0])
    case.compare(case.layer(ZERO, solver), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_nor_do_those_whose_backward_solve_fails(name):
    case, solver = Case(name), few(3000, 1e-9)

    def fails(steps):
        layer = case.layer("ignore", solver, Implicit(case.linear(max_steps=steps, rtol=1e-8)))
        case.gradients(layer)
        assert not layer.last_solve.failed.any()
        return problems(layer.last_solve.adjoint.status > Status.UNSTABLE)

    adjoint = Implicit(case.linear(max_steps=some_steps(fails), rtol=1e-8))
    ignoring = case.layer("ignore", solver, adjoint)
    kept = case.gradients(ignoring)
    failed = problems(ignoring.last_solve.adjoint.status > Status.UNSTABLE)
    expected = case.gradients(ignoring, without=failed)
    assert not torch.allclose(kept[0], expected[0])
    case.compare(case.layer(ZERO, solver, adjoint), expected)


def problems(failed):
    """By sample, or by sample and token; a head is a problem of its own, and there is one."""
    return failed[:, 0] if failed.shape == (4, 1) else failed


# Tensors of every kind.

LAYOUTS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every second": lambda x: torch.stack([x, x], -1)[..., 0],
    "other axes": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_layouts_change_nothing(policy, layout, impl):
    given = inputs(dtype=torch.float32)
    laid_out = [*(LAYOUTS[layout](t.detach()).requires_grad_() for t in given[:3]), *given[3:]]
    found = []
    for query, key, value, scale, anchor in (given, laid_out):
        options = {"solver": few(9, 1e-4), "on_failure": policy, "impl": impl, "return_solution": True}
        output, solution = equilibrium_attention(query, key, value, scale=scale, anchor=anchor, **options)
        partly(solution.failed)
        found.append((output, *torch.autograd.grad(output.square().sum(), (query, key, value, scale, anchor))))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast_failed_queries_have_what_no_steps_give(dtype):
    layer = ImplicitAttention(8, 1, beta=3.0, anchor=0.3)
    x = 2 * random(2, 9, 8, dtype=torch.float32)

    def fails(steps):
        layer(x, on_failure="ignore", solver=few(steps, 1e-5))
        return layer.last_solve.failed

    with torch.autocast("cpu", dtype), torch.no_grad():
        solver = few(some_steps(fails), 1e-5)
        found = layer(x, on_failure=EXPLICIT, solver=solver)
        failed = partly(layer.last_solve.failed)[:, 0]
        explicit, solved = layer(x, max_steps=0), layer(x, on_failure="ignore", solver=solver)
    assert found.dtype == dtype
    close = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found[failed], explicit[failed], rtol=close, atol=close)
    assert torch.equal(found[~failed], solved[~failed])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("queries", "keys"), [(0, 4), (3, 0), (0, 0)])
def test_where_there_is_nothing_to_fail(queries, keys, policy):
    query = random(queries, 8).requires_grad_()
    key = random(keys, 8)
    output = equilibrium_attention(query, key, key, on_failure=policy, solver=few(1))
    output.sum().backward()
    assert output.shape == (queries, 8)
    assert not output.any()
    raising = FailurePolicy(forward=policy.forward, backward=policy.backward, window=1)
    equilibrium_attention(query, key, key, on_failure=raising, solver=few(1000)).sum().backward()


@pytest.mark.parametrize("policy", POLICIES)
def test_queries_that_attend_to_nothing_give_zeros(policy):
    query, key = random(3, 8).requires_grad_(), random(4, 8, seed=1).requires_grad_()
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    output = equilibrium_attention(query, key, key, mask, on_failure=policy, solver=few(1, 1e-12))
    assert not output[1].any()
    output.sum().backward()
    assert query.grad.isfinite().all()
    assert key.grad.isfinite().all()


@pytest.mark.by_name(slow=r"\[True-(explicit|both)")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_query_that_is_nan_spoils_no_other(compiled, policy):
    query, key = random(3, 8), random(4, 8, seed=1).requires_grad_()
    query[0] = torch.nan
    query.requires_grad_()

    def attend(query, key):
        return equilibrium_attention(query, key, key, on_failure=policy)

    output = (torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend)(query, key)
    assert output.isnan().all(-1).tolist() == [True, False, False]
    output[1:].sum().backward()
    assert query.grad.isfinite().all()
    assert key.grad.isfinite().all()


# Attention of other libraries.


@pytest.mark.parametrize("policy", [EXPLICIT, BOTH], ids=["explicit", "both"])
def test_multihead_attention_falls_back_to_that_of_torch(policy):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, batch_first=True)
    ours = ImplicitMultiheadAttention(8, 2, batch_first=True, solver=few(1, 1e-12), on_failure=policy, anchor=0.5)
    ours.load_state_dict(theirs.state_dict(), strict=False)
    x = random(2, 5, 8, dtype=torch.float32).requires_grad_()
    found, expected = (module(x, x, x)[0] for module in (ours, theirs))
    assert ours.last_solve.failed.all()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    by_ours, by_theirs = (torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(by_ours, by_theirs, rtol=1e-4, atol=1e-6)

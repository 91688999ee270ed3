"""The native operations: what their answers may depend on, every layout, size and number, and their memory."""

import contextlib
import copy
import ctypes
import hashlib
import math
import os
import pickle
import platform
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hopfield_cases import counted, without_kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    Broyden,
    FixedPointMap,
    Implicit,
    ImplicitAttention,
    LogSumExp,
    OneStep,
    Phantom,
    Picard,
    Reversible,
    Status,
    Unrolled,
    UnsupportedImplementation,
    equilibrium_attention,
    solve,
)
from implicit_attention.kernels import Attention, hopfield_adjoint, hopfield_solve, kernel_checks
from implicit_attention.kernels import rule as rule_in_torch
from implicit_attention.kernels.native import library
from implicit_attention.linear import CG, GMRES
from implicit_attention.problem import Problem
from implicit_attention.testing.numerics import random, relative_error
from implicit_attention.testing.potential import Allocations

SETS = library.SETS.get(platform.machine(), ())
SOURCE = Path(library.__file__).parent / "kernels.cpp"
#: As setup.py gives them to the compiler.
FLAGS = {"avx512": "-mavx512f -mavx512vl -mavx512dq -mavx512bw", "avx2": "-mavx2 -mfma", "neon": ""}


@pytest.fixture(autouse=True, params=SETS)
def instruction_set(request, monkeypatch):
    """Each instruction set that this processor has."""
    loaded, reason = library._loaded(request.param)
    if loaded is None:
        pytest.skip(reason)
    monkeypatch.setattr(library, "found", lambda: (loaded, ""))
    return request.param


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def solved(query, keys, *, beta=0.4, anchor=0.3, impl="native", **options):
    return hopfield_solve(query, keys, beta=beta, anchor=anchor, impl=impl, **options)


def adjoint(query, keys, state, cotangent, *, beta=0.4, anchor=0.3, impl="native", **options):
    return hopfield_adjoint(query, keys, state, cotangent, beta=beta, anchor=anchor, impl=impl, **options)


def problem(*lead, n=40, m=150, dim=20, dtype=torch.float32):
    """Queries, keys and cotangents; queries need from 3 to some 30 evaluations."""
    query, keys, cotangent = (random(*lead, size, dim, seed=seed) for seed, size in enumerate((n, m, n)))
    return (3 * query).to(dtype), (2 * keys).to(dtype), cotangent.to(dtype)


def check_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


# Numbers that are not finite.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 7, 16, 67])
def test_each_number_that_is_not_finite_is_found(count, dtype):
    query, keys, _ = problem(1, n=1, m=3, dim=count, dtype=dtype)
    assert equilibrium_attention(query, keys, keys, max_steps=0).isfinite().all()
    for place in range(count):
        for number in (torch.nan, torch.inf, -torch.inf):
            given = query.clone()
            given[..., place] = number
            assert equilibrium_attention(given, keys, keys, max_steps=0).isnan().all(), (place, number)


# What bits depend on.

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
MASKS = {
    "no mask": lambda n, m: {},
    "causal": lambda n, m: {"is_causal": True},
    "causal from a place on": lambda n, m: {"is_causal": True, "query_offset": 40},
    "per pair": lambda n, m: {"mask": random(n, m, seed=5) > -0.5},
    "added": lambda n, m: {"mask": random(n, m, seed=5).float()},
}


@DTYPES
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rows", [1, 3, 6, 7, 8, 13, 14, 16, 17, 29, 30, 33, 70])
def test_a_query_has_the_same_bits_among_others_and_among_few(rows, mask, dtype):
    """Different kernels work on few queries and on many, and on the last ones of many."""
    n, m = 100, 150
    query, keys, cotangent = problem(n=n, m=m, dtype=dtype)
    options = MASKS[mask](n, m)
    pairs = options.get("mask")
    whole = solved(query, keys, **options)
    there = adjoint(query, keys, whole.state, cotangent, **options)
    some = slice(0, rows) if "is_causal" in options else slice(n - rows, n)
    own = options if pairs is None else {"mask": pairs[some]}
    check_equal(solved(query[some], keys, **own), [t[some] for t in whole])
    part = adjoint(query[some], keys, whole.state[some], cotangent[some], **own)
    if mask in ("no mask", "added"):
        check_equal(part[:-1], [t[some] for t in there[:-1]])
    # Elsewhere keys are shifted by what those have in common that somebody attends to.
    torch.testing.assert_close(part.value, there.value[some], rtol=1e-4, atol=1e-3)


@DTYPES
def test_neither_order_nor_place_nor_threads_change_a_bit(dtype):
    query, keys, cotangent = problem(3, 4, n=130, dtype=dtype)
    order = torch.randperm(130, generator=torch.Generator().manual_seed(3))
    with threads(1):
        one = solved(query, keys)
        there = adjoint(query, keys, one.state, cotangent)
    with threads(2):
        check_equal(solved(query, keys), one)
        check_equal(adjoint(query, keys, one.state, cotangent), there)
    check_equal(solved(query[..., order, :], keys), [t[:, :, order] for t in one])
    check_equal(solved(query[1:2, 2], keys[1:2, 2]), [t[1:2, 2] for t in one])
    back = adjoint(query[..., order, :], keys, one.state[..., order, :], cotangent[..., order, :])
    check_equal(back[:-1], [t[:, :, order] for t in there[:-1]])
    torch.testing.assert_close(back.by_keys, there.by_keys, rtol=1e-4, atol=1e-5)


@DTYPES
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_the_gradient_of_one_set_of_keys_is_a_sum_in_the_same_order_for_any_number_of_threads(rows, dtype):
    query, keys, cotangent = problem(n=64 * rows, dtype=dtype)
    state = solved(query, keys).state
    sums = []
    for count in (1, 2):
        with threads(count):
            sums.append(adjoint(query, keys, state, cotangent).by_keys)
    assert torch.equal(*sums)


@DTYPES
def test_shared_keys_are_those_that_were_copied(dtype):
    query, keys, cotangent = problem(2, 5, n=9, dtype=dtype)
    keys = keys[:, :1]
    copied = keys.expand(2, 5, 150, 20).contiguous()
    shared = solved(query, keys)
    check_equal(solved(query, copied), shared)
    found, of_copies = (adjoint(query, k, shared.state, cotangent) for k in (keys, copied))
    check_equal(of_copies[:-1], found[:-1])
    torch.testing.assert_close(of_copies.by_keys.sum(1, keepdim=True), found.by_keys, rtol=1e-4, atol=1e-4)


def test_as_many_steps_as_anybody_allows():
    query, keys, _ = problem(n=5)
    expected = solved(query, keys, rtol=1e-4)
    check_equal(solved(query, keys, rtol=1e-4, max_steps=2**31), expected)
    check_equal(
        solved(query, keys, rtol=1e-4, max_steps=2**31, plain_steps=2**40), solved(query, keys, plain_steps=201)
    )


# Layouts.


@DTYPES
def test_transposed_memory_changes_no_bit(dtype):
    query, keys, cotangent = problem(2, 3, dtype=dtype)
    expected = solved(query, keys)
    across = [t.mT.contiguous().mT for t in (query, keys, expected.state, cotangent)]
    check_equal(solved(*across[:2]), expected)
    check_equal(adjoint(*across), adjoint(query, keys, expected.state, cotangent))


def test_axes_of_size_one_and_expanded_tensors():
    query, keys, cotangent = problem(2, 1, 3, dtype=torch.float64)
    mask = random(3, 1, 150, seed=4) > -0.5
    beta = torch.tensor(0.4, dtype=torch.float64)
    options = {"mask": mask, "beta": beta.expand(2, 1, 3), "anchor": beta.view(1, 1, 1)}
    found = solved(query, keys, **options)
    written = {"mask": mask.expand(2, 1, 3, 40, 150).contiguous(), "beta": 0.4, "anchor": 0.4}
    check_equal(solved(query, keys, **written), found)
    there, again = (adjoint(query, keys, found.state, cotangent, **o) for o in (options, written))
    check_equal(again, there)


def test_leading_axes_are_up_to_sixteen():
    query, keys, _ = problem(2, n=3, m=5, dim=4)
    for more, impl in ((14, "native"), (15, "auto")):
        query, keys = (t.view(2, *(1,) * more, 1, *t.shape[-2:]) for t in (query, keys))
        found, expected = solved(query, keys, impl=impl), solved(query.squeeze(), keys.squeeze())
        torch.testing.assert_close(found.state.squeeze(), expected.state)


# Sizes and numbers, against the loop in float64.


def check_as_the_loop(query, keys, cotangent, *, alike=1.0, **options):
    """The same courses in at least the part `alike` of the queries, and the same numbers at the same states."""
    found, expected = (solved(query, keys, impl=impl, rtol=1e-7, **options) for impl in ("native", "reference"))
    assert torch.equal(found.status, expected.status)
    same = found.num_evals == expected.num_evals
    assert same.double().mean() >= alike
    torch.testing.assert_close(found.state[same], expected.state[same], rtol=1e-5, atol=1e-5)
    stop = {name: value for name, value in options.items() if name != "plain_steps"}
    there = solved(query, keys, initial=found.state, impl="reference", max_steps=0, **stop)
    for name in ("mean", "logsumexp"):
        torch.testing.assert_close(getattr(found, name), getattr(there, name), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.residual, there.residual, rtol=1e-3, atol=1e-4 * float(there.tolerance.max()))
    u, v = (adjoint(query, keys, found.state, cotangent, impl=impl, **stop) for impl in ("native", "reference"))
    assert torch.equal(u.status, v.status)
    assert torch.equal(u.negative_curvature, v.negative_curvature)
    if (v.status == Status.CONVERGED).all():
        assert relative_error(u.value, v.value) < 1e-6
        assert relative_error(u.by_keys, v.by_keys) < 1e-6
        torch.testing.assert_close(u.by_beta, v.by_beta, rtol=1e-4, atol=1e-9 + 1e-8 * float(v.by_beta.abs().max()))


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 8, 16, 17, 64, 65, 128, 200])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 15, 16, 17, 127, 128, 129, 300])
def test_sizes(count, dim):
    query, keys, cotangent = problem(2, n=11, m=count, dim=dim, dtype=torch.float64)
    check_as_the_loop(query, keys, cotangent, beta=1 / dim**0.5, anchor=0.6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_mask_and_rule(data):
    sizes = st.integers(1, 5)
    lead = data.draw(st.lists(st.integers(1, 3), max_size=3))
    n, m, dim = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 160)), data.draw(st.integers(1, 24))
    of_keys = [data.draw(st.sampled_from([1, size])) for size in lead][data.draw(st.integers(0, len(lead))) :]
    query, cotangent = random(*lead, n, dim), random(*lead, n, dim, seed=2)
    keys = random(*of_keys, m, dim, seed=1)
    shapes = [(n, m), (1, m), (n, 1), (*lead, 1, m), (*lead, n, m), (1,) * len(lead) + (n, m)]
    shape = data.draw(st.sampled_from(shapes))
    kind = data.draw(st.sampled_from(["none", "boolean", "added"]))
    options = {"is_causal": data.draw(st.booleans())}
    options["query_offset"] = data.draw(st.integers(0, 50)) if options["is_causal"] else 0
    if kind != "none":
        numbers = random(*shape, seed=3)
        options["mask"] = numbers > -0.8 if kind == "boolean" else numbers.masked_fill(numbers < -0.8, -torch.inf)
    batch = data.draw(st.sampled_from([(), tuple(lead)]))
    options["beta"] = random(*batch, seed=4).sigmoid()
    options["anchor"] = data.draw(st.sampled_from([0.0, 0.5, 1.0, random(*batch, seed=5).sigmoid()]))
    # Near a fold the rounding of one step decides how many follow.
    check_as_the_loop(query, keys, cotangent, alike=0.9, plain_steps=data.draw(sizes) + 1, **options)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_small_weights_of_very_many_keys_are_not_lost_beside_a_large_one(count):
    """Each is below the rounding of the sum; together they are a hundredth of it."""
    keys = torch.zeros(320_000, 8).index_fill_(0, torch.tensor([0]), 17 / 8)
    found = solved(torch.ones(count, 8), keys, beta=1.0, anchor=0.0, max_steps=0)
    exact = torch.tensor(17 + math.log1p(319_999 * math.exp(-17)))
    torch.testing.assert_close(found.logsumexp, exact.expand(count), rtol=0, atol=2e-4)
    torch.testing.assert_close(found.mean, (17 / 8 * (17 - exact).exp()).expand(count, 8), rtol=2e-4, atol=0)


@pytest.mark.parametrize("budget", [5, 8, 16])
def test_steps_are_cut_where_two_solutions_part(budget):
    """At z = 0 of z = tanh z accelerated steps would be 1.5/z^2 times as long as r."""
    keys = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    query = torch.linspace(0.1, 1.5, 8, dtype=torch.float64)[:, None]
    options = {"beta": 1.0, "anchor": 0.0, "rtol": 0.0, "atol": 0.0, "max_steps": budget}
    found, expected = (solved(query, keys, impl=impl, **options).state for impl in ("native", "reference"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("where", ["query", "keys", "mask", "beta", "anchor", "initial", "cotangent"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_where_it_was_born(where, bad):
    query, keys, cotangent = problem(2, 3, n=20)
    held = {"mask": torch.zeros(2, 3, 20, 150), "beta": torch.full((2, 3), 0.4), "anchor": torch.full((2, 3), 0.3)}
    tensors = {"query": query, "keys": keys, "cotangent": cotangent, "initial": query.clone(), **held}

    def run(tensors):
        options = {name: tensors[name] for name in held}
        found = solved(tensors["query"], tensors["keys"], initial=tensors["initial"], **options)
        return found, adjoint(
            tensors["query"], tensors["keys"], found.state.nan_to_num(), tensors["cotangent"], **options
        )

    clean, there = run(tensors)
    of_set = where in ("keys", "beta", "anchor")
    spoiled = tensors[where].clone()
    spoiled[(1, 1) if where in ("beta", "anchor") else (1, 1, 4, 2)] = bad if where != "anchor" else torch.nan
    found, back = run(tensors | {where: spoiled})
    others = torch.ones(2, 3, 20, dtype=torch.bool)
    others[1, 1, slice(None) if of_set else 4] = False
    for before, after in zip((*clean, *there[:-1]), (*found, *back[:-1]), strict=True):
        assert torch.equal(before[others], after[others])
    if where == "cotangent":
        assert (back.status[~others] == Status.NONFINITE).all()
        assert back.by_keys[1, 1].isnan().all()
    elif (where, bad) != ("mask", torch.inf):
        assert (found.status[~others] == Status.NONFINITE).all()
    assert back.by_keys[0].isfinite().all()


@pytest.mark.parametrize("size", [1e-43, 1e-30, 1e30])
def test_cotangents_of_any_size(size):
    query, keys, cotangent = problem(n=20)
    state = solved(query, keys, rtol=1e-6).state
    found, expected = (adjoint(query, keys, state, factor * cotangent) for factor in (size, 1.0))
    assert torch.equal(found.status, expected.status)
    torch.testing.assert_close(
        found.value.double() / size, expected.value.double(), rtol=1e-4 if size > 1e-40 else 0.2, atol=1e-2
    )


# What it keeps out of, and what it costs.


def test_modes_of_torch_see_the_operations_of_torch():
    query, keys, _ = problem(n=70, m=80)
    energy = AnchoredEnergy(LogSumExp(keys, 0.4), query, 0.3)
    expected = solve(energy, query, impl="native")
    with Allocations() as seen:
        found = solve(energy, query)
    assert any("scaled_dot_product" in operator for operator in seen.operators)
    torch.testing.assert_close(found.value, expected.value, rtol=1e-3, atol=1e-3)
    with FlopCounterMode(display=False), pytest.raises(UnsupportedImplementation, match="a mode is active"):
        solve(energy, query, impl="native")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_is_what_answers_on_a_cpu(dtype, instruction_set):
    # Nobody else has keys of this dimension, whose first use is checked.
    dim = 37 + 2 * SETS.index(instruction_set) + 8 * dtype.itemsize
    query, keys, _ = problem(dim=dim, m=60, dtype=dtype)
    solved(query, keys, impl="auto", rtol=1e-3)
    assert any(f"head_dim {dim}," in check.use and "(native)" in check.use for check in kernel_checks())


# What a solve says ran.

BUDGET = Picard(rtol=0, atol=0, max_steps=4)
NATIVE, TORCH, BY_TORCH = "native: evaluate, step", "torch: evaluate, step", "; torch: product"
ROUTES = {
    "plain": ({}, NATIVE + ", product"),
    "impl native": ({"impl": "native"}, NATIVE + ", product"),
    "impl reference": ({"impl": "reference"}, TORCH + ", product"),
    "Picard": ({"solver": Picard()}, NATIVE + ", product"),
    "Anderson of more states": ({"solver": Anderson(history=3)}, TORCH + "; native: product"),
    "Broyden": ({"solver": Broyden()}, TORCH + "; native: product"),
    "trace": ({"trace": True}, TORCH + "; native: product"),
    "callback": ({"callback": lambda *told: None}, TORCH + "; native: product"),
    "budget": ({"solver": BUDGET, "adjoint": Unrolled()}, TORCH + ", product"),
    "reversible": ({"solver": BUDGET, "adjoint": Reversible()}, TORCH + ", product"),
    "unrolled": ({"adjoint": Unrolled()}, TORCH + ", product"),
    "phantom": ({"adjoint": Phantom(3)}, NATIVE + BY_TORCH),
    "one step": ({"adjoint": OneStep()}, NATIVE + BY_TORCH),
    "GMRES": ({"adjoint": Implicit(linear_solver=GMRES())}, NATIVE + BY_TORCH),
    "CG": ({"adjoint": Implicit(linear_solver=CG())}, NATIVE + BY_TORCH),
}


def ran(ask, backward=torch.Tensor.backward):
    """What a solution says before and after a backward pass, once `ask` has made it; compared with what is called."""
    ask()[1].sum().backward()  # Kernels earn trust by calls of their own.
    with counted() as calls:
        found, value = ask()
        told, forward = str(found.route), set(calls)
        calls.clear()
        backward(value.sum())
        product = set(calls)
    last = str(found.route)
    native = " ".join(part for part in last.split("; ") if part.startswith("native"))
    assert ("evaluate" in native) == ("solve" in forward), last
    assert ("step" in native) == bool(forward), last
    assert ("product" in native) == ("adjoint" in product), last
    # The backward pass reads the evaluation of the forward pass.
    assert "solve" not in product or "solve" not in forward, last
    return told, last


def over_keys(dtype=torch.float32, **options):
    """The solution of an energy, and its value."""
    query, keys = (t.to(dtype).requires_grad_() for t in problem(2, n=3, m=5, dim=8)[:2])
    found = solve(AnchoredEnergy(LogSumExp(keys, 0.3, bias=options.pop("bias", None)), query, 0.5), query, **options)
    return found, found.value


@pytest.mark.parametrize("case", ROUTES)
def test_a_route_says_what_ran(case):
    options, expected = ROUTES[case]
    assert ran(lambda: over_keys(**options)) == (f"{expected}; float32",) * 2


@pytest.mark.parametrize(
    ("shape", "expected"), [((3, 5), NATIVE + BY_TORCH), ((1, 5), NATIVE + ", product")], ids=["per pair", "per key"]
)
def test_a_route_says_who_has_the_gradient_of_a_bias(shape, expected):
    bias = torch.zeros(2, *shape, requires_grad=True)
    assert ran(lambda: over_keys(bias=bias)) == (f"{expected}; float32",) * 2


def by_function():
    query, keys = (t.requires_grad_() for t in problem(2, n=3, m=5, dim=8)[:2])
    return solved(query, keys, impl="auto").state


def by_layer(compiled=False, checkpointed=False):
    layer = ImplicitAttention(16, heads=2, on_failure="warn")
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    x = random(1, 3, 16, dtype=torch.float32).requires_grad_()
    return checkpoint(call, x, use_reentrant=False) if checkpointed else call(x)


BACKWARD = {
    "half precision": (lambda: over_keys(torch.bfloat16)[1], 0),
    "bias per key": (lambda: over_keys(bias=torch.zeros(2, 1, 5, requires_grad=True))[1], 0),
    "fallback": (lambda: over_keys(adjoint=Implicit(fallback=OneStep()))[1], 0),
    "saddles": (lambda: at_saddles()[0], 0),
    "deterministic": (lambda: over_keys()[1], 0),
    "hopfield_solve": (by_function, 0),
    "vmap": (lambda: torch.vmap(lambda keys: solved(keys[:3], keys).state)(random(2, 5, 8).requires_grad_()), 0),
    "compiled": (lambda: by_layer(compiled=True), 0),
    "checkpointed": (lambda: by_layer(checkpointed=True), 1),
    "compiled and checkpointed": (lambda: by_layer(compiled=True, checkpointed=True), 1),
    "solved by torch": (lambda: over_keys(solver=Broyden())[1], 1),
}


@pytest.mark.parametrize("case", BACKWARD)
def test_a_backward_pass_repeats_no_evaluation(case, monkeypatch):
    make, expected = BACKWARD[case]
    make().sum().backward()  # Kernels earn trust by calls of their own, and compilers by theirs.
    value = make()
    if case == "deterministic":
        monkeypatch.setattr(torch._C, "_get_deterministic_algorithms", lambda: True)
    with counted() as calls:
        value.sum().backward()
    assert calls["adjoint"] > 0
    assert calls["solve"] == expected


def at_saddles():
    """States half-way between two clusters of keys, and what they are made of."""
    keys = torch.zeros(20, 6)
    keys[:10, 0], keys[10:, 0] = 2.0, -2.0
    query = random(2, 6, dtype=torch.float32)
    query[:, 0] = 0.0
    query.requires_grad_()
    return solve(AnchoredEnergy(LogSumExp(keys, 0.4), query, 0.1), query, on_failure="ignore").value, query


@pytest.mark.parametrize("max_steps", [200, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_those_of_an_evaluation_at_the_state(dtype, max_steps):
    query, keys, cotangent = (t.to(dtype) for t in problem(2))
    query[0, 1] = torch.nan
    cotangent = cotangent.float() if dtype == torch.bfloat16 else cotangent
    query, keys = query.requires_grad_(), keys.requires_grad_()
    state = solved(query, keys, max_steps=max_steps, rtol=1e-3).state
    for read in (False, True):
        cotangent[0, 1] = float(read)
        known = state.detach().nan_to_num(nan=torch.nan if read else 0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.autograd.grad(state, (query, keys), cotangent, retain_graph=True)
        rtol = None if dtype == torch.bfloat16 else 1e-3
        there = adjoint(query.detach(), keys.detach(), known, cotangent, rtol=rtol)
        expected = (0.3 * there.value).to(dtype), there.by_keys.to(dtype)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0))
        assert found[1].isfinite().all() != read


@pytest.mark.filterwarnings("ignore:the adjoint solve of `hopfield_solve`")
def test_a_query_that_diverged_is_evaluated_at_its_state():
    # Scores overflow after a few steps, and the state before is returned.
    torch.manual_seed(2)
    keys, query = 7e19 * torch.randn(2, 2), (7e19 * torch.randn(64, 2)).requires_grad_()
    found = solved(query, keys, beta=1e-38, plain_steps=2, rtol=1e-6)
    back = (found.status == Status.DIVERGED) & found.state.isfinite().all(-1) & ~found.mean.isfinite().all(-1)
    cotangent = back[:, None].float().expand(64, 2)
    (gradient,) = torch.autograd.grad(found.state, query, cotangent)
    there = adjoint(query.detach(), keys, found.state.detach(), cotangent, beta=1e-38)
    assert gradient[back].isfinite().any()
    assert torch.equal(gradient.nan_to_num(nan=7.0), (0.3 * there.value).nan_to_num(nan=7.0))


def test_hooks_see_the_evaluation_that_a_graph_keeps():
    query, keys = (t.requires_grad_() for t in problem(2, n=3, m=5, dim=8)[:2])
    seen = []

    def ask():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            energy = AnchoredEnergy(LogSumExp(keys, 0.3), query, 0.5)
            return solve(energy, query, adjoint=Implicit(fallback=OneStep())).value

    with torch.no_grad():
        mean = (0.3 * ask() @ keys.mT).softmax(-1) @ keys
    assert not seen
    ask()
    assert any(t.shape == mean.shape and torch.allclose(t, mean, atol=1e-2) for t in seen)


def test_a_derivative_that_is_differentiated_again_is_that_of_torch():
    query, keys, _ = problem(2, n=3, m=5, dim=8)
    query.requires_grad_()

    def ask():
        found = solve(AnchoredEnergy(LogSumExp(keys, 0.3), query, 0.5), query)
        return found, found.value

    told, last = ran(ask, lambda loss: torch.autograd.grad(loss, query, create_graph=True))
    assert told == "native: evaluate, step, product; float32"
    assert last == "native: evaluate, step; torch: product; float32"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_route_says_in_which_precision(dtype):
    wide = "float64" if dtype == torch.float64 else "float32"
    assert ran(lambda: over_keys(dtype)) == (f"native: evaluate, step, product; {wide}",) * 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "native: step"),
        ({"solver": Picard()}, "native: step"),
        ({"impl": "reference"}, ""),
        ({"trace": True}, ""),
        ({"solver": Broyden()}, ""),
    ],
    ids=str,
)
def test_a_route_of_a_map_of_the_users(options, expected):
    x = problem(3, n=1, dim=8)[0].requires_grad_()

    def ask():
        found = solve(FixedPointMap(lambda z, x: z.sin() / 2 + x, x, event_ndim=1), torch.zeros_like(x), **options)
        return found, found.value

    torchs = "torch: evaluate, product; " if expected else "torch: evaluate, step, product"
    assert ran(ask) == (f"{torchs}{expected}; float32",) * 2


def test_a_route_of_a_problem_that_says_that_it_is_attention():
    class Scaled(Problem):
        event_ndim = 1

        def __init__(self, x, scale):
            self.x, self.scale = x, scale

        def fixed_point_map(self, z):
            raise AssertionError("a kernel reads the tensors")

        def as_attention(self):
            return Attention(self.x, self.scale * self.x, 0.3, 0.5)

    x, scale = problem(2, n=5, dim=8)[0].requires_grad_(), torch.tensor(0.7, requires_grad=True)

    def ask():
        found = solve(Scaled(x, scale), x)
        return found, found.value

    assert ran(ask) == ("native: evaluate, step, product; float32",) * 2


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("solution", [True, False])
def test_a_route_counts_the_heads_of_the_queries(kv_heads, solution):
    query, key, value = (random(2, h, n, 8, dtype=torch.float32) for h, n in ((8, 4), (kv_heads, 6), (kv_heads, 6)))
    layer = ImplicitAttention(64, heads=8, kv_heads=kv_heads)
    x = random(2, 4, 64, dtype=torch.float32)

    def by_function():
        output, found = equilibrium_attention(query, key, value, enable_gqa=True, return_solution=True)
        return found, output

    def by_layer():
        output = layer(x)
        return layer.last_solve, output

    query.requires_grad_()
    assert ran(by_function if solution else by_layer) == ("native: evaluate, step, product; float32; 8 heads",) * 2


def test_a_route_without_the_library():
    x = problem(3, n=1, dim=8)[0]
    with without_kernels():
        found, value = over_keys()
        value.sum().backward()
        assert str(found.route) == "torch: evaluate, step, product; float32"
        free = solve(FixedPointMap(torch.cos, event_ndim=1), x)
        assert str(free.route) == "torch: evaluate, step, product; float32"


def test_a_route_inside_transforms():
    seen = []
    query, keys, _ = problem(2, n=3, m=5, dim=8)

    def total(query):
        seen.append(solve(AnchoredEnergy(LogSumExp(keys, 0.3), query, 0.5), query))
        return seen[-1].value.sum()

    over_keys()[1].sum().backward()
    for transform, asked, expected in (
        (torch.func.grad, query, NATIVE + BY_TORCH),
        (torch.func.vmap, query[None], TORCH + ", product"),
    ):
        with counted() as calls:
            transform(total)(asked)
        assert str(seen[-1].route) == f"{expected}; float32; inside torch.func"
        assert set(calls) == ({"solve"} if "native" in expected else set())


def test_a_compiled_graph_solves_by_an_operation():
    layer = ImplicitAttention(16, heads=2, on_failure="warn")
    torch.compile(layer, fullgraph=True, backend="eager")(random(1, 3, 16, dtype=torch.float32)).sum().backward()
    assert str(layer.last_solve.route) == "operation: evaluate, step, product; float32; in a compiled graph"
    assert layer.last_solve.converged.all()


def test_what_carries_a_route_can_be_copied_and_saved():
    class Local(Picard):
        """A solver that cannot be saved."""

    found = over_keys(solver=Local())[0]
    layer = ImplicitAttention(16, heads=2)
    layer(random(1, 3, 16, dtype=torch.float32)).sum().backward()
    for told in (found.report, layer.last_solve, over_keys()[0].map(torch.Tensor.detach).report):
        for again in (copy.copy(told), copy.deepcopy(told), pickle.loads(pickle.dumps(told))):
            assert str(again.route) == repr(again.route) == str(told.route) != "None"
    with torch.no_grad():
        solution = over_keys()[0]
    assert str(pickle.loads(pickle.dumps(solution)).route) == str(copy.deepcopy(solution).route) == str(solution.route)
    assert copy.deepcopy(layer).last_solve is None


@pytest.mark.slow
def test_no_matrix_of_queries_by_keys_is_stored():
    """Scores of 8,192 queries with as many keys are 256 MB; a quarter of that would be seen."""
    script = """
import resource, torch
from implicit_attention.kernels import hopfield_solve
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
torch.manual_seed(0)
def step(n):
    query, keys = (torch.randn(n, 16).requires_grad_() for _ in range(2))
    hopfield_solve(query, keys, beta=0.1, anchor=0.5).state.sum().backward()
step(256)
before = peak()
step(8192)
print(peak() - before)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 64


#: The rule of accelerated steps, for numbers (11, count), truths (3, count) and counts of whole vectors.
RULE = r"""
#include <limits>
#include "rule.h"

template <typename T>
void all_of(const T *in, const T *truths, T *out, int64_t count) {
  using Limits = std::numeric_limits<T>;
  for (int64_t i = 0; i < count; i += LANES<T>) {
    Vec<T> x[11];
    Mask<T> t[3];
    for (int k = 0; k < 11; ++k) x[k] = load(in + k * count + i);
    for (int k = 0; k < 3; ++k) t[k] = load(truths + k * count + i) != T(0);
    const auto [accepted, tries, by_r, by_df] =
        decide<T>(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], t[0], t[1], t[2],
                  Limits::epsilon(), Limits::min(), T(LEAST));
    store(out + i, accepted ? all(T(1)) : all(T(0)));
    store(out + count + i, tries ? all(T(1)) : all(T(0)));
    store(out + 2 * count + i, by_r);
    store(out + 3 * count + i, by_df);
  }
}
extern "C" void decide_float32(const float *x, const float *t, float *out, int64_t n) { all_of(x, t, out, n); }
extern "C" void decide_float64(const double *x, const double *t, double *out, int64_t n) { all_of(x, t, out, n); }
"""
LEAST = 2.0**-51


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ compiles the rule")
def test_the_rule_of_steps_is_that_of_torch(instruction_set, tmp_path):
    """Of random sums as evaluations have them, and of all kinds of numbers in all places."""
    (tmp_path / "rule.cpp").write_text(RULE)
    flags = (
        f"-O3 -std=c++17 -fno-math-errno -fno-trapping-math -ffp-contract=off {FLAGS[instruction_set]} -fPIC -shared"
    )
    given = [f"-DLEAST={LEAST}", f"-I{SOURCE.parent}", str(tmp_path / "rule.cpp"), "-o", str(tmp_path / "rule.so")]
    subprocess.run(["g++", *flags.split(), *given], check=True)
    compiled = ctypes.CDLL(str(tmp_path / "rule.so"))
    draw, count = torch.Generator().manual_seed(0), 1 << 14
    for dtype in (torch.float32, torch.float64):
        info = torch.finfo(dtype)
        ordinal = torch.arange(count)
        before, r, dz = torch.randn(3, count, 4, dtype=dtype, generator=draw)
        dz = dz * 2.0 ** torch.randn(count, 1, dtype=dtype, generator=draw)
        # Half of them as of a potential that is nearly quadratic, curved by 1/256 to 1.
        curvature = 2.0 ** (-8 * torch.rand(count, 1, dtype=dtype, generator=draw))
        r = torch.where(ordinal[:, None] % 2 == 0, r, before + curvature * (0.1 * r - dz))
        dr = r - before
        pairs = ((r, r), (r + before, dz / 2), (dr, r), (dr, dr), (r, dr + dz), (dr + dz, dr + dz), (dz, dr))
        square, trapezoid, *sums = ((one * other).sum(-1) for one, other in pairs)
        length, (energy, fall) = before.norm(dim=-1), torch.randn(2, count, dtype=dtype, generator=draw)
        # A third of the energies fall by nearly what is required, which their rounding nearly hides.
        near = rule_in_torch.DESCENT * length.square() * (1 + 0.1 * fall)
        third = ordinal % 3 == 0
        energy, fall = torch.where(third, near / (8 * info.eps), energy), torch.where(third, near, fall)
        likely = (square, square.sqrt(), energy, trapezoid, *sums, energy + fall, length)
        odd = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, -1.0, info.tiny, info.tiny / 8, info.max, info.eps]
        among = torch.tensor(odd, dtype=dtype)[torch.randint(len(odd), (11, count), generator=draw)]
        numbers = torch.where(torch.rand(11, count, generator=draw) < ordinal / count, among, torch.stack(likely))
        lengths = [0, 1, 5, 10]
        numbers[lengths] = numbers[lengths].abs()
        truths = torch.rand(3, count, generator=draw) < 0.8
        expected = rule_in_torch.decide(*numbers, *truths, eps=info.eps, tiny=info.tiny, least=LEAST)
        found, asked = torch.empty(4, count, dtype=dtype), truths.to(dtype)
        function = getattr(compiled, f"decide_{str(dtype).removeprefix('torch.')}")
        function(*(ctypes.c_void_p(t.data_ptr()) for t in (numbers, asked, found)), ctypes.c_int64(count))
        for one, other in zip(found, expected, strict=True):
            # Roots of torch may differ in the last bit. None is NaN.
            torch.testing.assert_close(one, other.to(dtype), rtol=4 * info.eps if other.dtype == dtype else 0, atol=0)
        accepted, tries, by_r, by_df = expected
        for each in (accepted, tries, by_r == 1, by_r == rule_in_torch.STRETCH, by_r < 1, by_df == 0):
            assert 100 < each.sum() < count - 100


@pytest.mark.slow
@pytest.mark.by_name(nightly=r"\[avx512")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ compiles the kernels with sanitizers")
def test_sanitizers_find_nothing(instruction_set, tmp_path):
    sanitizers = "-fsanitize=address,undefined -fno-sanitize-recover=all"
    command = f"g++ -O1 -g -std=c++17 -ffp-contract=off -fPIC -shared {FLAGS[instruction_set]} {sanitizers}".split()
    package = tmp_path / "implicit_attention"
    shutil.copytree(SOURCE.parents[2], package, ignore=shutil.ignore_patterns("*.library", "__pycache__"))
    target = package / "kernels" / "native" / f"{instruction_set}.library"
    subprocess.run([*command, f'-DIA_ISA="{instruction_set}"', str(SOURCE), "-o", str(target)], check=True)
    made = target.read_bytes()
    # As setup.py writes it.
    target.write_bytes(made + hashlib.sha256(made).digest())
    preload = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = os.environ | {
        "LD_PRELOAD": preload.stdout.strip(),
        # Python frees nothing at its end.
        "ASAN_OPTIONS": "detect_leaks=0",
        library.VARIABLE: instruction_set,
        "PYTHONPATH": str(tmp_path),
    }
    script = [sys.executable, str(Path(__file__).with_name("native_sanitized.py"))]
    found = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == f"clean {instruction_set}", found.stderr[-3000:]

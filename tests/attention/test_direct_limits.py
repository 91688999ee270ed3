"""What fails is told alike by native answers and the general path, and what is left to the general path."""

import copy
import functools

import pytest
import torch
from direct_ways import B, D, H, M, N, agree, gradients, leaf, native, tensors, ways
from torch.utils._python_dispatch import TorchDispatchMode

import implicit_attention as ia
import implicit_attention._solve as solve_module
import implicit_attention.adjoints.native as native_module
import implicit_attention.attention.core as core
from implicit_attention.ops import hopfield_solve
from implicit_attention.testing.numerics import random

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

    def run():
        if door == "function":
            output = ia.equilibrium_attention(*leaves, solver=solver, on_failure=on_failure)
        elif door == "layer":
            # A copy has told nothing yet.
            output = copy.deepcopy(layer)(query[:, 1], key[:, 0], solver=solver, on_failure=on_failure)
        else:
            energy = ia.AnchoredEnergy(ia.LogSumExp(key, 0.4), query, 0.5)
            output = ia.solve(energy, query, solver=solver, on_failure=on_failure).value
        return output, gradients(output, leaves)

    _, messages, (kind, _) = agree(run)
    assert (kind is ia.ConvergenceError) == (on_failure == "raise")
    assert bool(messages) == (on_failure == "warn")


@native
@pytest.mark.parametrize("on_failure", ["raise", "warn", "ignore"])
def test_backward_solves_that_fail_are_told_alike(on_failure, monkeypatch):
    leaves = tensors()
    of = native_module.AdjointRule
    for module in (native_module, core, solve_module):
        if hasattr(module, "AdjointRule"):
            monkeypatch.setattr(module, "AdjointRule", lambda rtol, steps: of(rtol, 1))
    # Rules are kept by solver, precision and dimension.
    monkeypatch.setattr(native_module, "_adjoint_rule", native_module._adjoint_rule.__wrapped__)
    import implicit_attention.linear.base as base

    monkeypatch.setattr(base.LinearSolver, "default_max_steps", lambda self, n: 1)

    def run():
        return gradients(ia.equilibrium_attention(*leaves, scale=2.0, on_failure=on_failure), leaves)

    _, messages, (kind, text) = agree(run)
    assert (kind is ia.ConvergenceError and "the adjoint solve" in text) == (on_failure == "raise")
    assert any("the adjoint solve" in message for message in messages) == (on_failure == "warn")


def wrong(leaves):
    query, key, value = leaves
    return {
        "no tensor": lambda: ia.equilibrium_attention(query.tolist(), key, value),
        "integers": lambda: ia.equilibrium_attention(query, key.long(), value),
        "two dtypes": lambda: ia.equilibrium_attention(query, key.double(), value),
        "other widths": lambda: ia.equilibrium_attention(query, key[..., :3], value),
        "other counts": lambda: ia.equilibrium_attention(query, key, value[..., :3, :]),
        "heads that do not fit": lambda: ia.equilibrium_attention(query, key[:, :2], value[:, :2]),
        "one axis": lambda: ia.equilibrium_attention(query[0, 0, 0], key, value),
        "scale 0": lambda: ia.equilibrium_attention(query, key, value, scale=0.0),
        "scale inf": lambda: ia.equilibrium_attention(query, key, value, scale=float("inf")),
        "scale NaN": lambda: ia.equilibrium_attention(query, key, value, scale=float("nan")),
        "scale a word": lambda: ia.equilibrium_attention(query, key, value, scale="1"),
        "scale of another shape": lambda: ia.equilibrium_attention(query, key, value, scale=torch.ones(5)),
        "scales below 0": lambda: ia.equilibrium_attention(query, key, value, scale=-torch.ones(H)),
        "anchor 2": lambda: ia.equilibrium_attention(query, key, value, anchor=2.0),
        "anchors above 1": lambda: ia.equilibrium_attention(query, key, value, anchor=2 * torch.ones(H)),
        "anchor True": lambda: ia.equilibrium_attention(query, key, value, anchor=True),
        "dropout 2": lambda: ia.equilibrium_attention(query, key, value, dropout_p=2),
        "an option that is none": lambda: ia.equilibrium_attention(query, key, value, steps=3),
        "max_steps a float": lambda: ia.equilibrium_attention(query, key, value, max_steps=0.0),
        "max_steps a bool": lambda: ia.equilibrium_attention(query, key, value, max_steps=False),
        "max_steps a list": lambda: ia.equilibrium_attention(query, key, value, max_steps=[0]),
        "explicit steps of a solve": lambda: ia.equilibrium_attention(query, key, value, max_steps=0, impl="native"),
        "words": lambda: ia.equilibrium_attention(query, key, value, on_failure="tell"),
        "another shape to start at": lambda: ia.solve(ia.AnchoredEnergy(ia.LogSumExp(key, 0.3), query, 0.5), query[0]),
        "another dtype to start at": lambda: ia.solve(
            ia.AnchoredEnergy(ia.LogSumExp(key, 0.3), query, 0.5), query.double()
        ),
        "a fixed budget": lambda: ia.solve(
            ia.AnchoredEnergy(ia.LogSumExp(key, 0.3), query, 0.5), query, solver=ia.Picard(rtol=0, atol=0)
        ),
    }


@pytest.mark.parametrize("case", wrong([torch.zeros(1, 1, 1, 1)] * 3))
def test_wrong_arguments_raise_what_the_general_path_raises(case):
    _, _, (kind, text) = agree(wrong(tensors())[case], takes=False)
    assert issubclass(kind, TypeError | ValueError | ia.UnsupportedImplementation), (kind, text)


def test_true_is_no_number_of_steps_after_one_was():
    leaves = tensors()
    ia.equilibrium_attention(*leaves, max_steps=1, on_failure="ignore")
    with pytest.raises(TypeError, match="`max_steps` must be an integer, got True"):
        ia.equilibrium_attention(*leaves, max_steps=True)


# What does not take it.


class Mine(ia.Anderson):
    pass


class Peculiar(ia.LogSumExp):
    pass


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Labelled(torch.Tensor):
    pass


def general(leaves):
    query, key, value = leaves

    def call(query=query, key=key, value=value, **options):
        return ia.equilibrium_attention(query, key, value, **options)

    def compiled():
        # The breaks of its graph are what the general path has, too.
        return torch.compile(lambda q: call(q, on_failure="ignore"), backend="eager")(query)

    def deterministic():
        torch.use_deterministic_algorithms(True)
        try:
            return call()
        finally:
            torch.use_deterministic_algorithms(False)

    def negated():
        return call(torch.complex(torch.zeros_like(query), query).conj().imag)

    def traced():
        with torch.no_grad():
            energy = ia.AnchoredEnergy(ia.LogSumExp(key, 0.3), query, 0.5)
            return tuple(ia.solve(energy, query, trace=True).trace)

    def own_potential():
        return ia.solve(ia.AnchoredEnergy(Peculiar(key, 0.3), query, 0.5), query).value

    def added_attribute():
        potential = ia.LogSumExp(key, 0.3)
        potential.shift = torch.ones(1)
        return ia.solve(ia.AnchoredEnergy(potential, query, 0.5), query).value

    def learned_mask():
        bias = leaf(random(N, M, seed=4, dtype=torch.float32))
        output = call(attn_mask=bias)
        return output, gradients(output, [bias])

    def jvp():
        return torch.func.jvp(lambda q: call(q), (query.detach(),), (torch.ones_like(query),))

    def dual():
        with torch.autograd.forward_ad.dual_level():
            made = torch.autograd.forward_ad.make_dual(query.detach(), torch.ones_like(query))
            return tuple(torch.autograd.forward_ad.unpack_dual(call(made)))

    def beside_a_transform():
        return torch.func.grad(lambda x: (x * call()).sum())(torch.ones(D))

    def in_a_mode():
        with Passing():
            return call()

    def dropped():
        torch.manual_seed(0)
        return ia.solve(ia.AnchoredEnergy(ia.Softmax1(key, 0.3), query, 0.5), query).value

    return {
        "vmap": lambda: torch.vmap(call)(query, key, value),
        "func.grad": lambda: torch.func.grad(lambda q: call(q).sum())(query),
        "jvp": jvp,
        "inside func.grad of something else": beside_a_transform,
        "a mode that sees every operation": in_a_mode,
        "dual numbers": dual,
        "compile": compiled,
        "deterministic": deterministic,
        "a tensor to be negated": negated,
        "a subclass of tensor": lambda: call(query.detach().as_subclass(Labelled)).as_subclass(torch.Tensor),
        "a subclass of solver": lambda: call(solver=Mine()),
        "a subclass of potential": own_potential,
        "a potential with an attribute": added_attribute,
        "another potential": dropped,
        "another adjoint": lambda: call(adjoint=ia.OneStep()),
        "another linear solver": lambda: call(adjoint=ia.Implicit(ia.CG())),
        "a fallback": lambda: call(adjoint=ia.Implicit(fallback=ia.OneStep())),
        "another history": lambda: call(solver=ia.Anderson(history=3)),
        "a fixed budget": lambda: call(solver=ia.Picard(rtol=0, atol=0, max_steps=3)),
        "impl reference": lambda: call(impl="reference"),
        "float64": lambda: call(query.double(), key.double(), value.double()),
        "trace": traced,
        "an additive mask that requires grad": learned_mask,
        "no queries": lambda: call(query[..., :0, :]),
        "no keys": lambda: call(key=key[..., :0, :], value=value[..., :0, :]),
        "an anchor that float32 does not carry": lambda: call(anchor=1 - 1e-5),
    }


@pytest.mark.parametrize("case", general([torch.zeros(1, 1, 1, 1)] * 3))
def test_other_calls_get_the_general_answer(case):
    agree(general(tensors())[case], takes=False)


def test_shapes_alone_get_the_general_answer():
    query, key, value = (t.detach().to("meta") for t in tensors())
    for options in ({"on_failure": "ignore"}, {"max_steps": 0}):
        with ways() as taken:
            output = ia.equilibrium_attention(query, key, value, **options)
        assert output.is_meta
        assert output.shape == (B, H, N, D)
        assert not taken
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode, ways() as taken:
        made = [mode.from_tensor(t.detach()) for t in tensors()]
        assert ia.equilibrium_attention(*made, on_failure="ignore").shape == (B, H, N, D)
    assert not taken


def test_explicit_dropout_is_random():
    leaves = tensors()

    def run():
        torch.manual_seed(0)
        return ia.equilibrium_attention(*leaves, max_steps=0, dropout_p=0.5)

    agree(run, takes=False)


def test_attention_that_was_replaced_is_what_is_called(monkeypatch):
    calls = []
    own = torch.nn.functional.scaled_dot_product_attention

    def counted(*args, **options):
        calls.append(1)
        return own(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    with ways() as taken:
        ia.equilibrium_attention(*tensors(), max_steps=0)
    assert calls
    assert not taken


def test_an_explicit_query_that_is_not_finite_reads_nan():
    for number, count in ((torch.nan, 3), (torch.inf, 3), (torch.nan, 80)):
        query, key, value = (t.detach() for t in tensors(m=count))
        query[0, 0, 1] = number
        call = functools.partial(ia.equilibrium_attention, query, key, value, max_steps=0)
        output = agree(call, takes=False)[0]
        assert output.isnan().any(-1).sum() == 1
        assert output[0, 0, 1].isnan().all()


def test_explicit_keys_that_are_all_nan_are_read_as_nan():
    query, key, value = (t.detach() for t in tensors())
    key[:] = torch.nan
    assert ia.equilibrium_attention(query, key, value, max_steps=0).isnan().all()


@pytest.mark.parametrize("by_solve", [True, False], ids=["solve", "attention"])
def test_autocast_is_switched_off_before_plain_tensors_are_answered(by_solve):
    query, key, value = tensors()

    def call():
        with torch.autocast("cpu", torch.bfloat16):
            if by_solve:
                output = ia.solve(ia.AnchoredEnergy(ia.LogSumExp(key, 0.3), query, 0.5), query).value
            else:
                output = ia.equilibrium_attention(query, key, value)
            return output, gradients(output, [query, key])

    agree(call)


@native
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("door", ["function", "solution", "masked", "reference", "solve", "operation"])
def test_one_tensor_in_several_places_has_the_sum_of_their_gradients(door, create_graph):
    x = leaf(random(B, H, N, D, seed=3, dtype=torch.float32))

    def run(query, key, value):
        if door == "solve":
            return ia.solve(ia.AnchoredEnergy(ia.LogSumExp(key, 0.4), query, 0.5), query.detach()).value
        if door == "operation":
            return hopfield_solve(query, key, beta=0.4, anchor=0.5)[0]
        options = {"solution": {"return_solution": True}, "reference": {"impl": "reference"}}.get(door, {})
        mask = torch.ones(N, N, dtype=torch.bool).tril() if door == "masked" else None
        found = ia.equilibrium_attention(query, key, value, mask, anchor=0.5, **options)
        return found[0] if door == "solution" else found

    (found,) = torch.autograd.grad(run(x, x, x).square().sum(), x, create_graph=create_graph)
    apart = [leaf(x) for _ in range(3)]
    given = torch.autograd.grad(run(*apart).square().sum(), apart, allow_unused=True)
    torch.testing.assert_close(found.detach(), sum(g for g in given if g is not None), rtol=1e-4, atol=1e-5)

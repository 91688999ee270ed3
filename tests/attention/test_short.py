"""The short way of attention and of solves gives every bit, message and derivative of the general path."""

import contextlib
import dataclasses
import functools
import random as python_random
import warnings

import pytest
import torch
from layouts import MATRICES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import implicit_attention as ia
import implicit_attention._short as short_solve
import implicit_attention._solve as solve_module
import implicit_attention.attention.core as core
import implicit_attention.attention.short as short
from implicit_attention.ops.native.library import library
from implicit_attention.testing.numerics import random

native = pytest.mark.skipif(library() is None, reason="there is no native operation here")
B, H, N, M, D = 2, 3, 5, 7, 8
DOORS = ((short, "attention"), (core, "_shortly"), (solve_module, "_shortly"))


@contextlib.contextmanager
def ways(*, general=False):
    """Which doors took the short way, in order; with `general` none may."""
    taken, before = [], [getattr(*door) for door in DOORS]

    def watched(name, function):
        def call(*args):
            if general:
                return None
            before = len(taken)
            taken.append(name)
            found = function(*args)
            if found is None:
                del taken[before:]
            return found

        return call

    for (module, name), function in zip(DOORS, before, strict=True):
        setattr(module, name, watched(f"{module.__name__.split('.')[-1]}.{name}", function))
    try:
        yield taken
    finally:
        for (module, name), function in zip(DOORS, before, strict=True):
            setattr(module, name, function)


def told(run):
    """What `run` returns, what it warns of, and what it raises."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            found, error = run(), None
        except Exception as raised:
            found, error = None, raised
    return found, [str(w.message) for w in caught], (type(error), str(error))


def same(a, b):
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        return torch.equal(a.detach().nan_to_num(7.5), b.detach().nan_to_num(7.5)) and torch.equal(a.isnan(), b.isnan())
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[name], b[name]) for name in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def agree(run, *, takes=True):
    """`run` gives the same by both ways; the short one is taken, or not, as `takes` says."""
    with ways() as taken:
        mine = told(run)
    with ways(general=True):
        theirs = told(run)
    assert bool(taken) == takes, taken
    assert same(mine[0], theirs[0])
    assert mine[1:] == theirs[1:]
    return mine


def evidence(report):
    """All fields of a `SolveReport` and its adjoint's."""
    return {
        "record": tuple(report.record),
        "remedies": dict(report.remedies),
        "adjoint": {field.name: getattr(report.adjoint, field.name) for field in dataclasses.fields(report.adjoint)},
    }


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


def tensors(*, n=N, m=M, dtype=torch.float32, d=D, e=D, lead=(B, H), shared=(B, H)):
    shapes = ((*lead, n, d), (*shared, m, d), (*shared, m, e))
    return [leaf(random(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes)]


def gradients(output, leaves, seed=5):
    cotangent = random(*output.shape, seed=seed, dtype=output.dtype)
    return torch.autograd.grad(output, leaves, cotangent, allow_unused=True)


# The same bits.

SHAPES = {
    "few keys": {},
    "many keys": {"m": 80},
    "one query": {"n": 1, "m": 130},
    "more tiles than one": {"n": 70, "m": 140, "lead": (1, 2), "shared": (1, 2)},
    "values of another width": {"e": 5},
    "no multiple of the lanes": {"d": 7, "e": 7},
    "one entry": {"d": 1, "e": 1},
    "no batch": {"lead": (), "shared": ()},
    "one axis": {"lead": (3,), "shared": (3,)},
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

    def run():
        with torch.set_grad_enabled(grad):
            output = ia.equilibrium_attention(*leaves, anchor=0.4, **OPTIONS[options])
        return output, gradients(output, leaves) if grad else None

    agree(run)


@native
@pytest.mark.parametrize("layout", MATRICES)
@pytest.mark.parametrize("explicit", [True, False])
def test_every_layout(layout, explicit):
    rng = python_random.Random(3)

    def make(shape):
        return 0.6 * random(*shape, seed=rng.randrange(1000), dtype=torch.float32)

    make.scale, make.dtype = 0.6, torch.float32
    draws = [MATRICES[layout](make, shape, rng) for shape in ((B, H, N, D), (B, H, M, D), (B, H, M, D))]
    query, key, value = (t.requires_grad_() for t in draws)
    cotangent = MATRICES[layout](make, (B, H, N, D), rng).detach()

    def run():
        output = ia.equilibrium_attention(query, key, value, max_steps=0 if explicit else None)
        return output, torch.autograd.grad(output, (query, key, value), cotangent)

    # A copy of such a query has other bits than the query itself: the general path knows which it reads.
    agree(run, takes=not (explicit and layout == "at an offset"))


@native
@pytest.mark.parametrize("anchor", [0.0, 0.5, 1.0, "per head", "per entry"])
@pytest.mark.parametrize("scale", [None, 0.3, 2, "per head", "per entry"])
def test_numbers_and_tensors_of_them(anchor, scale):
    named = {"per head": random(H, seed=8, dtype=torch.float32), "per entry": random(B, H, seed=9, dtype=torch.float32)}
    made = {name: leaf(t.sigmoid()) for name, t in named.items()}
    others = {name: leaf(t.sigmoid()) for name, t in named.items()}
    anchor, scale = made.get(anchor, anchor), others.get(scale, scale)
    leaves = tensors() + [t for t in (anchor, scale) if isinstance(t, torch.Tensor)]

    def run():
        output = ia.equilibrium_attention(*leaves[:3], anchor=anchor, scale=scale)
        return output, gradients(output, leaves)

    agree(run)


def pairs():
    boolean = random(N, M, seed=7) > -0.3
    empty = boolean.clone()
    empty[2] = False
    added = random(H, N, M, seed=6, dtype=torch.float32)
    return {
        "boolean": boolean,
        "of keys": boolean[:1],
        "of samples": random(B, 1, N, M, seed=5) > -0.3,
        "a query without keys": empty,
        "added": added,
        "added, of keys": added[:, :1],
        "added, with -inf": added.masked_fill(~boolean, -torch.inf),
        "added, a query without keys": added.masked_fill(~empty, -torch.inf),
    }


@native
@pytest.mark.parametrize("kind", pairs())
@pytest.mark.parametrize("count", [M, 80])
def test_masks(kind, count):
    mask = pairs()[kind]
    mask = torch.cat([mask] * 12, -1)[..., :count] if count > M else mask
    leaves = tensors(m=count)

    def run():
        output = ia.equilibrium_attention(*leaves, attn_mask=mask)
        return output, gradients(output, leaves)

    agree(run)


@native
def test_causal_and_grouped_heads():
    for options in ({"is_causal": True}, {"enable_gqa": True}, {"enable_gqa": True, "max_steps": 0}):
        lead, shared = ((B, 4), (B, 2)) if "enable_gqa" in options else ((B, H), (B, H))
        leaves = tensors(lead=lead, shared=shared)

        def run(leaves=leaves, options=options):
            output = ia.equilibrium_attention(*leaves, **options)
            return output, gradients(output, leaves)

        agree(run)


@native
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_solved_in_single(dtype):
    leaves = tensors(dtype=dtype)

    def run():
        output = ia.equilibrium_attention(*leaves)
        assert output.dtype == dtype
        return output, gradients(output, leaves)

    agree(run)


@native
@pytest.mark.parametrize("options", [{}, {"max_steps": 0}, {"solver": ia.Anderson(max_steps=2, rtol=1e-6)}])
@pytest.mark.parametrize("made", [{}, {"kv_heads": 1}, {"causal": True}, {"readout": "state"}, {"qk_norm": "rms"}])
def test_layer(made, options):
    torch.manual_seed(0)
    layer = ia.ImplicitAttention(8, 2, **made)
    x = random(B, N, 8, seed=1, dtype=torch.float32)
    takes = not (options.get("max_steps") == 0 and {"causal", "readout"} & set(made))

    def run():
        layer._remembered = None
        output = layer(x, **options)
        before = evidence(layer.last_solve)
        found = gradients(output, list(layer.parameters()))
        return output, before, evidence(layer.last_solve), found

    agree(run, takes=takes)


@native
def test_solve_with_a_mask_and_its_whole_report():
    query, key, _ = tensors(m=70)
    anchor, beta = (leaf(random(H, seed=s, dtype=torch.float32).sigmoid()) for s in (3, 4))
    mask = random(N, 70, seed=2) > 0

    def run():
        energy = ia.AnchoredEnergy(ia.LogSumExp(key, beta, mask=mask), query, anchor)
        solution = ia.solve(energy, random(*query.shape, seed=11, dtype=torch.float32))
        found = gradients(solution.value, [query, key, beta, anchor])
        return solution.value, solution.energy, repr(solution), evidence(solution), found

    value, _, text, *_ = agree(run)[0]
    assert "30 CONVERGED" in text
    residual = ia.AnchoredEnergy(ia.LogSumExp(key, beta, mask=mask), query, anchor).fixed_point_map(value) - value
    assert float((residual.norm(dim=-1) / value.norm(dim=-1)).max().detach()) < 2e-4


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
            output = layer(query[:, 1], key[:, 0], solver=solver, on_failure=on_failure)
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
    of = short_solve.AdjointRule
    for module in (short_solve, core, solve_module):
        if hasattr(module, "AdjointRule"):
            monkeypatch.setattr(module, "AdjointRule", lambda rtol, steps: of(rtol, 1))
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

    def with_autocast():
        with torch.autocast("cpu", torch.bfloat16):
            return ia.solve(ia.AnchoredEnergy(ia.LogSumExp(key, 0.3), query, 0.5), query).value

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
        "autocast": with_autocast,
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


# Derivatives.


@native
def test_derivatives_of_both_orders():
    anchor, scale = (leaf(random(2, seed=s, dtype=torch.float64).sigmoid()) for s in (3, 4))
    leaves = [*tensors(n=3, m=4, d=3, e=2, lead=(1, 2), shared=(1, 2), dtype=torch.float64), anchor, scale]
    solver = ia.Anderson(rtol=1e-12, atol=1e-13)

    def call(query, key, value, anchor, scale):
        return ia.equilibrium_attention(
            query, key, value, anchor=anchor, scale=scale, solver=solver, impl="native", on_failure="raise"
        )

    with ways() as taken:
        assert torch.autograd.gradcheck(call, leaves)
        assert torch.autograd.gradgradcheck(call, leaves)
    assert taken


@native
def test_a_graph_of_the_gradient_is_that_of_the_general_path():
    leaves = tensors(m=70)

    def run():
        output = ia.equilibrium_attention(*leaves)
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), leaves)
        again = torch.autograd.grad(output.sum(), leaves, retain_graph=True)
        return first, second, again, torch.autograd.grad(output.sum(), leaves)

    agree(run)


@native
@pytest.mark.parametrize("options", [{}, {"max_steps": 0}])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant, options):
    leaves = tensors()

    def run(wrapped=True):
        def call(*leaves):
            return ia.equilibrium_attention(*leaves, **options)

        output = checkpoint(call, *leaves, use_reentrant=reentrant) if wrapped else call(*leaves)
        for t in leaves:
            t.grad = None
        output.square().sum().backward()
        return [t.grad for t in leaves]

    assert same(agree(run)[0], run(wrapped=False))


@native
@pytest.mark.parametrize("options", [{}, {"max_steps": 0}])
def test_what_is_saved_has_no_axis_of_queries_and_keys(options):
    n, m = 96, 112
    leaves = tensors(n=n, m=m)
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), ways() as taken:
        output = ia.equilibrium_attention(*leaves, **options)
    assert taken
    assert max(sizes) == B * H * m * D
    # The read-out keeps three tensors, the solve state, mean, query and keys.
    assert len(sizes) == (3 if options else 7)
    gradients(output, leaves)


@pytest.mark.parametrize("count", [M, 80])
def test_an_output_may_be_written_to_before_the_backward_pass(count):
    leaves = tensors(m=count)
    expected = gradients(2 * ia.equilibrium_attention(*leaves), leaves)
    output = ia.equilibrium_attention(*leaves)
    output *= 2
    assert same(gradients(output, leaves), expected)


@native
def test_a_failed_query_changes_no_gradient_of_others():
    query, key, value = (t.detach() for t in tensors())
    expected_leaves = [leaf(t) for t in (query, key, value)]
    cotangent = random(B, H, N, D, seed=5, dtype=torch.float32)
    cotangent[0, 1, 2] = 0
    anchor = leaf(torch.full((H,), 0.4))

    def call(*leaves):
        output = ia.equilibrium_attention(*leaves, anchor=anchor, on_failure="ignore")
        return torch.autograd.grad(output, [*leaves, anchor], cotangent)

    expected = call(*expected_leaves)
    query[0, 1, 2] = torch.nan
    leaves = [leaf(t) for t in (query, key, value)]
    found = agree(lambda: call(*leaves))[0]
    for a, b in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b)


@native
def test_a_saddle_is_told_and_differentiated_alike():
    # Both keys are as near: the state in the middle is stationary, and E curves down there.
    key = leaf(torch.stack([torch.ones(D), -torch.ones(D)])[None, None])
    query = leaf(torch.zeros(1, 1, 3, D))

    def run():
        energy = ia.AnchoredEnergy(ia.LogSumExp(key, 1.0), query, 0.5)
        solution = ia.solve(energy, query, on_failure="warn")
        return evidence(solution), gradients(solution.value, [query, key]), evidence(solution)

    _, _, after = agree(run)[0]
    assert after["adjoint"]["negative_curvature"].all()
    assert (after["adjoint"]["status"] == ia.Status.UNSTABLE).all()


@native
def test_a_masked_key_of_nan_reaches_only_the_queries_that_attend_to_it():
    query, key, value = (t.detach() for t in tensors())
    key[0, 0, 2] = torch.nan
    mask = torch.ones(N, M, dtype=torch.bool)
    mask[1:, 2] = False

    def run():
        energy = ia.AnchoredEnergy(ia.LogSumExp(key, 0.4, mask=mask), query, 0.5)
        state = ia.solve(energy, query, on_failure="ignore").value
        return state, ia.equilibrium_attention(query, key, value, attn_mask=mask, on_failure="ignore")

    state, output = agree(run, takes=False)[0]
    for found in (state, output):
        assert found[0, 0, 0].isnan().all()
        assert found.isnan().sum() == D


@native
def test_what_changes_torch_between_the_passes_gives_the_general_gradient():
    leaves = tensors()

    def run():
        output = ia.equilibrium_attention(*leaves)
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(output, leaves)

    agree(run)


@native
def test_inference_mode():
    with torch.inference_mode():
        made = [t.detach().clone() for t in tensors()]
        agree(lambda: ia.equilibrium_attention(*made))
        agree(lambda: ia.equilibrium_attention(*made, max_steps=0))


@native
def test_parameters_are_plain():
    made = [torch.nn.Parameter(t.detach()) for t in tensors()]
    agree(lambda: gradients(ia.equilibrium_attention(*made), made))

"""Maps of one's own: what they may do to memory, and what they may read."""

import functools
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    ConvergenceError,
    ConvergenceWarning,
    FixedPointMap,
    Implicit,
    LogSumExp,
    PerSample,
    Picard,
    Unrolled,
    UnsupportedImplementation,
    equilibrium_attention,
    solve,
)
from implicit_attention.kernels import Attention, native_status
from implicit_attention.layers import SpinAttention
from implicit_attention.linear import GMRES
from implicit_attention.problem import Problem
from implicit_attention.solvers import SciPy
from implicit_attention.testing.numerics import random

SHIFT = random(3, 4)
WEIGHT = 0.3 * random(4, 4, seed=1)


def halves_in_place(z):
    return z.mul_(0.5).add_(SHIFT)


def writes_past_torch(z):
    z.data.mul_(0.5)
    return z + SHIFT


def numpy_in_place(z):
    array = z.detach().numpy()
    np.tanh(array, out=array)
    return torch.from_numpy(array)


class Buffered:
    """Tanh(W z + b), always written into the same tensor."""

    def __init__(self, by_numpy):
        self.buffer, self.by_numpy = torch.empty(3, 4, dtype=torch.float64), by_numpy
        self.__name__ = "buffered"

    def __call__(self, z):
        arguments = z.detach() @ WEIGHT.mT + SHIFT
        if not self.by_numpy:
            return torch.tanh(arguments, out=self.buffer)
        np.tanh(arguments.numpy(), out=self.buffer.numpy())
        return torch.from_numpy(self.buffer.numpy())


def relu_block():
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)).double()


@pytest.mark.parametrize(
    "make", [lambda: halves_in_place, lambda: writes_past_torch, lambda: numpy_in_place, relu_block]
)
@pytest.mark.parametrize("solver", [Picard(), Anderson()])
def test_a_map_that_works_in_place_is_refused_and_leaves_the_initial_state(make, solver):
    initial = random(3, 4, seed=2)
    before = initial.clone()
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with (
            context,
            pytest.raises(ValueError, match="must leave its state as it is, got a map that works on it in place"),
        ):
            solve(FixedPointMap(make(), event_ndim=1), initial, solver=solver)
        assert torch.equal(initial, before)


@pytest.mark.parametrize("call", ["vmap", "unrolled", "compiled", "foreign"])
def test_a_map_that_works_in_place_is_found_wherever_it_runs(call):
    def answer(z):
        solver = SciPy("anderson") if call == "foreign" else Picard()
        adjoint = Unrolled() if call == "unrolled" else Implicit()
        return solve(FixedPointMap(halves_in_place, event_ndim=1), z, solver=solver, adjoint=adjoint).value

    asked = {"vmap": torch.vmap(answer), "compiled": torch.compile(answer, backend="eager")}.get(call, answer)
    initial = random(2, 3, 4) if call == "vmap" else random(3, 4)
    before = initial.clone()
    with pytest.raises(ValueError, match="works on it in place"):
        asked(initial)
    assert torch.equal(initial, before)


@pytest.mark.parametrize("by_numpy", [False, True])
@pytest.mark.parametrize("solver", [Picard(), Anderson()])
def test_a_map_that_returns_the_same_buffer_again_is_refused(by_numpy, solver):
    for context in (torch.enable_grad(), torch.inference_mode()):
        with context, pytest.raises(ValueError, match=r"`buffered` must return new memory .*; return buffer.clone\(\)"):
            solve(FixedPointMap(Buffered(by_numpy), event_ndim=1), torch.zeros(3, 4).double(), solver=solver)


def test_memory_that_is_shared_and_not_overwritten_is_no_error():
    for function, event_ndim in ((lambda z: z, 1), (lambda z: SHIFT, 1), (lambda z: z.mT, 2)):
        initial = random(4, 4, seed=3)
        initial = initial[:3] if event_ndim == 1 else (initial + initial.mT) / 2
        solution = solve(FixedPointMap(function, event_ndim=event_ndim), initial)
        assert solution.converged.all()
        torch.testing.assert_close(solution.value, function(initial))


class Halved(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.Sequential(*parts, nn.Tanh())

    def forward(self, z):
        return self.parts(z) / 2


def seeded(make, *parts):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(*(part() for part in parts)).double()


def normalised():
    module = seeded(Halved, lambda: nn.Linear(4, 4), lambda: nn.BatchNorm1d(4)).eval()
    norm = module.parts[1]
    norm.running_mean.copy_(random(4))
    norm.running_var.copy_(1 + random(4, seed=1).square())
    module.parts[0].bias.requires_grad_(False)
    return module


def parametrised(kind):
    return seeded(Halved, lambda: kind(nn.Linear(4, 4))).eval()


class KeptTwice(nn.Module):
    """A module whose weight is a buffer, too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("again", self.linear.weight)

    def forward(self, z):
        return torch.tanh(self.linear(z) + z @ self.again.T) / 4


@pytest.mark.parametrize(
    "make",
    [normalised, lambda: seeded(KeptTwice)]
    + [
        lambda kind=kind: parametrised(kind)
        for kind in (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal)
    ],
)
def test_modules_with_buffers_or_parametrised_weights_are_differentiated(make):
    module = make()
    parameters = [p for p in module.parameters() if p.requires_grad]
    buffers = {name: b.clone() for name, b in module.named_buffers()}

    def gradients(adjoint, solver, *, create_graph=False):
        value = solve(FixedPointMap(module, event_ndim=1), SHIFT, solver=solver, adjoint=adjoint).value
        first = torch.autograd.grad(value.square().sum(), parameters, create_graph=create_graph)
        if not create_graph:
            return first
        return torch.autograd.grad(sum(g.square().sum() for g in first), parameters)

    # The other route: 60 steps of torch's own graph, twice.
    z = SHIFT
    for _ in range(60):
        z = module(z)
    expected = torch.autograd.grad(z.square().sum(), parameters, create_graph=True)
    torch.testing.assert_close(
        gradients(Implicit(GMRES(rtol=1e-13)), Anderson(rtol=1e-13, atol=0)), expected, rtol=1e-8, atol=1e-9
    )
    twice = torch.autograd.grad(sum(g.square().sum() for g in expected), parameters)
    found = gradients(Implicit(GMRES(rtol=1e-13)), Anderson(rtol=1e-13, atol=0), create_graph=True)
    torch.testing.assert_close(found, twice, rtol=1e-7, atol=1e-8)
    unrolled = gradients(Unrolled(), Picard(rtol=0, atol=0, max_steps=60))
    torch.testing.assert_close(unrolled, expected, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(b, buffers[name]) for name, b in module.named_buffers())


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.array(0.5), Fraction(1, 2)])
def test_numbers_of_other_libraries_are_numbers(number):
    keys, field = random(2, 70, 4), random(2, 3, 4, seed=1)
    energy = AnchoredEnergy(LogSumExp(keys, number), field, number)
    plain = AnchoredEnergy(LogSumExp(keys, 0.5), field, 0.5)
    assert type(energy.anchor) is type(energy.potential.beta) is float
    tight = Anderson(rtol=number / 2**30, max_steps=np.int64(50))
    assert tight == Anderson(rtol=2.0**-31, max_steps=50)
    assert type(tight.rtol) is float
    assert torch.equal(solve(energy, field, solver=tight).value, solve(plain, field, solver=tight).value)
    found = equilibrium_attention(field, keys, keys, scale=number, anchor=number)
    assert torch.equal(found, equilibrium_attention(field, keys, keys, scale=0.5, anchor=0.5))


@pytest.mark.parametrize("number", [True, np.bool_(True), 0.5j, "0.5", np.array([0.5]), None])
def test_what_is_no_number_is_refused(number):
    with pytest.raises(TypeError, match="`beta` must be a number"):
        LogSumExp(SHIFT, number)


# Maps that are random.


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.outer = nn.ModuleDict({"a": nn.BatchNorm1d(3), "b": nn.Linear(3, 3), "empty": nn.Identity()})
        self.again, self.none, self.lone = self.outer["b"], None, nn.Parameter(torch.ones(3))
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.again.weight
        self.register_buffer("kept", self.lone.detach())
        self.register_buffer("same", self.kept)
        self.register_parameter("missing", None)


def test_tensors_of_a_module_are_named_as_the_module_names_them():
    module = Tied()
    expected = [(f"function.{n}", t) for n, t in [*module.named_parameters(), *module.named_buffers()]]
    found = list(FixedPointMap(module, event_ndim=1).named_tensors())
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(a is b for (_, a), (_, b) in zip(found, expected, strict=True))
    assert len(found) == 9


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)

    def forward(self, z, x):
        return torch.tanh(0.3 * self.drop(self.norm(self.linear(z))) + x)


def test_a_failure_says_that_the_map_is_random():
    torch.manual_seed(0)
    module, x = Dropped().double(), random(6, 4)
    words = r"Picard failed for . of 6 .*; `Dropped` is random: two evaluations at one state differ by \d\.\de-0[12]"
    for wrap in (PerSample, lambda x: x):
        problem = FixedPointMap(module, wrap(x), event_ndim=1)
        with pytest.raises(ConvergenceError, match=words + r" of its size.*; call model.eval\(\), or hold the dropout"):
            solve(problem, torch.zeros_like(x), solver=Picard(max_steps=20))
        with pytest.warns(ConvergenceWarning, match=words):
            solve(problem, torch.zeros_like(x), solver=Picard(max_steps=20), on_failure="warn")
    assert module.norm.num_batches_tracked == 4 * 21
    solve(FixedPointMap(module.eval(), x, event_ndim=1), torch.zeros_like(x))
    with pytest.raises(ConvergenceError) as raised:
        solve(FixedPointMap(module, x, event_ndim=1), torch.zeros_like(x), solver=Picard(max_steps=1))
    assert "random" not in str(raised.value)


def test_whether_a_map_is_random_is_asked_after_failures_alone():
    calls = []

    def f(z):
        calls.append(1)
        return z.cos() + 0.1 * torch.rand_like(z) * (len(calls) > 5)

    def count(z, **options):
        calls.clear()
        solution = solve(FixedPointMap(f, event_ndim=1), z, **options)
        return len(calls) - int(solution.num_evals.max())

    z = torch.zeros(2, 3)
    with torch.no_grad():
        hasty = Picard(max_steps=9)
        # The best states of both are judged together.
        assert count(z, solver=hasty, on_failure="ignore") == 1
        with pytest.warns(ConvergenceWarning, match="`f` is random"):
            assert count(z, solver=hasty, on_failure="warn") == 3
        assert count(z, solver=Picard(rtol=0.9), on_failure="warn") == 0

    def value(z):
        return solve(FixedPointMap(f, event_ndim=1), z, solver=hasty).value.sum()

    with pytest.raises(ConvergenceError) as raised:
        torch.func.grad(value)(z)
    assert "random" not in str(raised.value)


def test_a_problem_has_at_most_twenty_methods():
    methods = {name for name, value in vars(Problem).items() if callable(value) or isinstance(value, property)}
    assert len(methods) <= 20


# What a map reads without declaring it is asked in every solve.


class Calls(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.count, self.hidden = 0, None

    def forward(self, z, *inputs):
        self.seen.append(torch.is_grad_enabled())
        z = torch.tanh(0.3 * super().forward(z) + sum(inputs))
        return z if self.hidden is None else z + self.hidden


def test_undeclared_tensors_are_looked_for_once_in_a_solve():
    module, x = Calls().double(), random(3, 4)
    seen = module.seen = []

    def looks(*inputs):
        seen.clear()
        solve(FixedPointMap(module, *inputs, event_ndim=1), torch.zeros(3, 4).double())
        return sum(seen)

    assert [looks(x), looks(x), looks(PerSample(x)), looks(x.clone().requires_grad_())] == [1, 1, 1, 1]
    with torch.no_grad():
        assert looks(x) == 0


def test_a_new_function_is_asked_even_if_it_is_like_another():
    hidden = random(4).requires_grad_()
    makers = (
        lambda t: lambda z: z.cos() / 2 + t,
        lambda t: functools.partial(lambda t, z: z.cos() / 2 + t, t),
        lambda t: Hiding(t),
        lambda t: Hiding(t).forward,
    )
    for make in makers:
        for _ in range(2):
            solve(FixedPointMap(make(hidden.detach()), event_ndim=1), torch.zeros(3, 4).double())
        with pytest.raises(ValueError, match="is not declared"):
            solve(FixedPointMap(make(hidden), event_ndim=1), torch.zeros(3, 4).double())
        with pytest.raises(ValueError, match="is not declared"):
            solve(FixedPointMap(make(hidden), event_ndim=1), torch.zeros(3, 4).double())


class Hiding(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.hidden = [hidden]

    def forward(self, z, *inputs):
        return z.cos() / 2 + self.hidden[0]


def test_what_a_known_function_reads_anew_is_found():
    held = {"t": random(4)}
    hidden = random(4)

    def f(z, *objects):
        return z.cos() / 2 + hidden + sum(o["t"] if isinstance(o, dict) else o.hidden[0] for o in objects)

    z = torch.zeros(3, 4).double()
    solve(FixedPointMap(f, Hiding(random(4)), event_ndim=1), z)
    with pytest.raises(ValueError, match="is not declared"):
        solve(FixedPointMap(f, Hiding(random(4).requires_grad_()), event_ndim=1), z)
    solve(FixedPointMap(f, held, event_ndim=1), z)
    hidden.requires_grad_()
    with pytest.raises(ValueError, match="reads `hidden`, which requires grad but is not declared"):
        solve(FixedPointMap(f, held, event_ndim=1), z)


# One tensor where there are several.


@pytest.mark.parametrize("kind", ["sparse", "documents", "window"])
def test_nan_reaches_the_tokens_that_read_it_directly_or_through_others(kind):
    i, j = torch.arange(17)[:, None], torch.arange(17)
    sparse = torch.rand(17, 17, generator=torch.Generator().manual_seed(0)) < 0.12
    pairs = {"sparse": sparse | (i == j), "documents": i // 5 == j // 5, "window": (i - j).abs() < 3}[kind].tril()
    torch.manual_seed(0)
    layer, x = SpinAttention(4, 2, causal=True, on_failure="ignore").double(), random(1, 17, 4)
    clean, x[0, 6] = layer(x, mask=pairs), torch.nan
    reached = j == 6
    for token in range(17):
        reached[token] |= (pairs[token] & reached).any()
    found = layer(x, mask=pairs)[0]
    assert torch.equal(found.isnan().any(-1), reached)
    torch.testing.assert_close(found[~reached], clean[0, ~reached])


def test_a_map_converts_what_it_reads_or_is_told_to():
    weight, table = random(4, 4).float().requires_grad_(), random(4).requires_grad_()

    def converting(z, weight, table):
        return torch.tanh(0.2 * z @ weight.to(z.dtype) + table.to(z.dtype))

    found = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        solution = solve(FixedPointMap(converting, weight, table, event_ndim=1), torch.zeros(3, 4, dtype=dtype))
        assert solution.value.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
        grads = torch.autograd.grad(solution.value.sum(), (weight, table), create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in grads), (weight, table))
        assert [grad.dtype for grad in (*grads, *second)] == [torch.float32, torch.float64] * 2
        found.append((*grads, *second))
    for others in found[1:]:
        torch.testing.assert_close(found[0], others, rtol=2e-3, atol=2e-3)
    plain = FixedPointMap(lambda z, weight: torch.tanh(0.2 * z @ weight), weight, event_ndim=1)
    with pytest.raises(ValueError, match=r"^`initial` must have the dtype of `inputs\[0\]` \(torch.float32\)"):
        solve(plain, torch.zeros(3, 4, dtype=torch.float64))
    half = FixedPointMap(lambda z, weight: torch.tanh(z @ weight.bfloat16()), weight, event_ndim=1)
    with pytest.raises(ValueError, match=r"must take states of torch.float32, got one that raised: .*\.to\(z.dtype\)$"):
        solve(half, torch.zeros(3, 4, dtype=torch.bfloat16))


# Problems that are attention.

native = pytest.mark.skipif(native_status().isa is None, reason="there is no native library")
TIGHT = Anderson(rtol=1e-12, atol=1e-13)


class Projected(Problem):
    """Attention of states over keys W x, with a learned temperature."""

    event_ndim = 1

    def __init__(self, weight, x, log_beta, first=None):
        self.weight, self.x, self.log_beta, self.first = weight, x, log_beta, first

    def fixed_point_map(self, z):
        keys = self.x @ self.weight.mT
        scores = self.log_beta.exp() * z @ keys.mT
        if self.first is not None:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(self.first + 1)
            scores = scores.masked_fill(ahead, -torch.inf)
        return 0.4 * self.x + 0.6 * scores.softmax(-1) @ keys


class Told(Projected):
    """The same, which says so."""

    def as_attention(self):
        return Attention(self.x, self.x @ self.weight.mT, self.log_beta.exp(), 0.4, first=self.first)


def projected():
    # So weak that each query has one equilibrium.
    return [t.requires_grad_() for t in (0.3 * random(4, 4), random(2, 5, 4, seed=1), random(seed=2) - 1)]


def at_equilibrium(kind, first=None, **options):
    def value(*tensors):
        return solve(kind(*tensors, first), tensors[1].detach(), solver=TIGHT, **options).value

    return value


@native
@pytest.mark.parametrize("first", [None, 0], ids=["all keys", "causal"])
@pytest.mark.parametrize("impl", ["auto", "native"])
def test_a_problem_that_is_attention_is_solved_by_its_kernel(impl, first):
    tensors = projected()
    found, expected = (
        solve(kind(*tensors, first), tensors[1].detach(), solver=TIGHT, impl=impl)
        for kind, impl in ((Told, impl), (Projected, "auto"))
    )
    torch.testing.assert_close(found.value, expected.value, rtol=1e-10, atol=1e-10)
    assert torch.equal(found.status, expected.status)
    by = [torch.autograd.grad(solution.value.sin().sum(), tensors) for solution in (found, expected)]
    torch.testing.assert_close(*by, rtol=1e-10, atol=1e-10)
    assert str(found.route) == "native: evaluate, step, product; float64"
    assert "native: evaluate" not in str(expected.route)


@native
@pytest.mark.parametrize("impl", ["auto", "native"])
def test_derivatives_of_a_problem_that_is_attention(impl):
    tensors = projected()
    value = at_equilibrium(Told, impl=impl)
    assert torch.autograd.gradcheck(value, tensors)
    assert torch.autograd.gradgradcheck(value, tensors, fast_mode=True)


def test_a_problem_that_is_attention_inside_transforms():
    tensors = projected()
    plain = [t.detach() for t in tensors]

    def loss(kind):
        return lambda *tensors: at_equilibrium(kind)(*tensors).sin().sum()

    expected = torch.autograd.grad(loss(Projected)(*tensors), tensors)
    found = torch.func.grad(loss(Told), argnums=(0, 1, 2))(*plain)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    batched = torch.func.vmap(at_equilibrium(Told), (None, 0, None))(*plain)
    torch.testing.assert_close(batched, at_equilibrium(Projected)(*plain), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [
        {"impl": "reference"},
        {"trace": True},
        {"solver": Picard(rtol=1e-12, atol=1e-13)},
        {"solver": Anderson(history=4, rtol=1e-12, atol=1e-13)},
        {"adjoint": Unrolled(), "solver": Picard(rtol=0, atol=0, max_steps=60)},
        {"adjoint": Implicit(linear_solver=GMRES(rtol=1e-12))},
    ],
    ids=["reference", "trace", "Picard", "history", "unrolled", "GMRES"],
)
def test_options_of_a_problem_that_is_attention(options):
    tensors = projected()
    for kind in (Told, Projected):
        solution = solve(kind(*tensors), tensors[1].detach(), **{"solver": TIGHT, **options})
        found = solution.value, *torch.autograd.grad(solution.value.sin().sum(), tensors)
        expected = found if kind is Told else expected
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"keys": torch.zeros(2, 5, 3, dtype=torch.float64)}, "`field` must have the keys' dimension 3"),
        ({"keys": torch.zeros(3, 5, 4, dtype=torch.float64)}, "`keys` must broadcast"),
        ({"keys": torch.zeros(2, 5, 4)}, "`beta` must have the dtype of `keys`"),
        ({"query": torch.zeros(2, 3, 4, dtype=torch.float64)}, "`initial` must have the field's shape"),
        ({"beta": -1.0}, "`beta` must be > 0, got -1.0"),
        ({"beta": torch.ones(7, dtype=torch.float64)}, "`beta` must broadcast"),
        ({"anchor": 1.5}, r"`anchor` must be in \[0, 1\], got 1.5"),
        ({"mask": torch.ones(7, dtype=torch.bool)}, "`mask` must broadcast"),
        ({"bias": torch.zeros(7, dtype=torch.float64)}, "`bias` must broadcast"),
    ],
    ids=["dimension", "batch", "dtype", "queries", "beta", "betas", "anchor", "mask", "bias"],
)
def test_parts_of_attention_that_do_not_fit_are_named(given, words):
    class Wrong(Projected):
        def as_attention(self):
            return Told.as_attention(self)._replace(**given)

    tensors = [t.detach() for t in projected()]
    with pytest.raises(ValueError, match=words):
        solve(Wrong(*tensors), tensors[1])


@pytest.mark.parametrize("impl", ["native", "triton"])
def test_a_kernel_is_refused_to_a_problem_that_does_not_say_what_it_is(impl):
    tensors = projected()
    words = f"`impl='{impl}'`: it exists for AnchoredEnergy of LogSumExp, not for Projected"
    with pytest.raises(UnsupportedImplementation, match=words):
        solve(Projected(*tensors), tensors[1].detach(), impl=impl)

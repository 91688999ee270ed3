"""`watch`: what it counts is what the layers' reports say, and a watched layer computes what it did before."""

import collections
import contextlib
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from watched_layers import DIM, HEADS, LAYERS, ROWS, TOKENS, Gathered, layer_of, model_of, tokens

from implicit_attention import Equilibrium, Implicit, OneStep, Picard, Status, Unrolled
from implicit_attention.layers import SpinAttention
from implicit_attention.linear import CG
from implicit_attention.spins import TAP
from implicit_attention.training import watch

QUIET = {"on_failure": "ignore"}
every = pytest.mark.parametrize("name", LAYERS)


# What is counted.


@every
def test_it_counts_what_the_reports_of_every_call_say(name):
    model = nn.ModuleDict({"first": layer_of(name), "second": layer_of(name, seed=1)})
    gathered = Gathered(model)
    with watch(model) as seen:
        for look in range(2):
            for step in range(3):
                for layer in (*model.values(), model["first"])[: 2 if step else 3]:
                    layer(tokens(10 * look + step, rows=ROWS + step, scale=2.0)).square().sum().backward()
                    own = Gathered(layer)
                    own.forward()
                    own.backward()
                    key = "first" if layer is model["first"] else "second"
                    for (inner, side), found in own.found.items():
                        gathered.found[f"{key}.{inner}".strip("."), side] += found
            gathered.check(seen.take(look))
            # The counts begin anew.
            gathered.found = {key: [] for key in gathered.found}


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "published"])  # whose budget is fixed
def test_failures_are_counted_by_their_status(name):
    options = {"solver": Picard(rtol=1e-12, atol=1e-14, max_steps=1), "on_failure": "ignore"}
    model = layer_of(name, **options)
    gathered = Gathered(model)
    seen = watch(model)
    for step in range(2):
        gathered.step(model, tokens(step, scale=2.0))
    observed = seen.take()
    gathered.check(observed)
    # A first token that reads itself alone is solved at once.
    alone = 2 * HEADS * ROWS if "causal attention" in name else 0
    assert observed.total.forward.failures["MAX_STEPS"] == observed.total.forward.problems - alone > 0
    assert observed.total.forward.worst > 1


class Growing(nn.Module):
    """z -> 2 z + x + 1, which plain steps leave."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, z, x):
        return self.factor * z + x + 1


def critical():
    """A pair of spins at a temperature that the method knows to be too low for it (`TAP`)."""

    def pair(field):
        return torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=field.dtype)

    options = {"couplings": pair, "method": TAP(), "beta": 1.01, "field_norm": None, **QUIET}
    return SpinAttention(DIM, 1, **options).double(), torch.zeros(3, 2, DIM, dtype=torch.float64)


@pytest.mark.parametrize("status", ["DIVERGED", "OUT_OF_RANGE"])
def test_so_are_failures_of_layers(status):
    if status == "DIVERGED":
        model, given = Equilibrium(Growing(), event_ndim=1, solver=Picard(max_steps=300), **QUIET), tokens()
    else:
        model, given = critical()
    gathered = Gathered(model)
    seen = watch(model)
    model(given)
    gathered.forward()
    observed = seen.take()
    gathered.check(observed)
    assert observed.total.forward.failures[status] == observed.total.forward.problems > 0


def test_failures_of_backward_solves_are_counted():
    model = layer_of(adjoint=Implicit(CG(rtol=1e-12, max_steps=1)), **QUIET).double()
    gathered = Gathered(model)
    seen = watch(model)
    gathered.step(model, tokens(scale=2.0, dtype=torch.float64))
    observed = seen.take()
    gathered.check(observed)
    assert observed.total.forward.failed == 0
    assert observed.total.backward.failures["MAX_STEPS"] == observed.total.backward.problems == ROWS * HEADS * TOKENS


@pytest.mark.parametrize("adjoint", [OneStep(), Unrolled()])
def test_without_a_backward_solve_none_is_counted(adjoint):
    model = layer_of(adjoint=adjoint)
    seen = watch(model)
    model(tokens()).sum().backward()
    observed = seen.take().total
    assert (observed.forward.calls, observed.backward.calls, observed.backward.problems) == (1, 0, 0)
    assert math.isnan(observed.backward.mean)


def test_no_steps_and_budgets_are_no_failures_and_have_no_worst():
    for options, status in (
        ({"max_steps": 0}, "EXPLICIT"),
        ({"solver": Picard(rtol=0, atol=0, max_steps=2)}, "BUDGET"),
    ):
        model = layer_of(**options)
        gathered = Gathered(model)
        seen = watch(model)
        gathered.step(model, tokens())
        assert set(model.last_solve.status.flatten().tolist()) == {int(Status[status])}
        observed = seen.take()
        gathered.check(observed)
        assert (observed.total.forward.failed, observed.total.forward.worst) == (0, 0.0)
        assert "failed 0 of 20" in observed.line()
        assert "worst" not in observed.line()


def test_a_nan_that_comes_in_is_a_failure_and_the_others_are_counted_as_they_are():
    model = layer_of(**QUIET)
    gathered = Gathered(model)
    seen = watch(model)
    given = tokens()
    given[0, 0] = math.nan
    output = model(given)
    gathered.forward()
    output.nan_to_num().sum().backward()
    gathered.backward()
    observed = seen.take()
    gathered.check(observed)
    assert observed.total.forward.failures["NONFINITE"] == HEADS * TOKENS
    assert observed.total.forward.worst == math.inf


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_cotangents_that_are_not_finite_are_lost_and_not_failed(value, impl):
    model, count = layer_of(impl=impl), 70
    seen = watch(model)
    output = model(tokens(count=count))
    cotangent = torch.ones_like(output)
    cotangent[0, 0] = value
    output.backward(cotangent)
    backward = seen.take().total.backward
    # One token of one row, whose heads meet in the output.
    assert (backward.lost, backward.failed, backward.problems) == (HEADS, 0, HEADS * ROWS * count)
    assert backward.worst < 1


@every
def test_a_cotangent_of_nan_is_no_failure_of_any_layer(name):
    model = layer_of(name)
    seen = watch(model)
    output = model(tokens())
    output.backward(torch.full_like(output, math.nan))
    backward = seen.take().total.backward
    assert (backward.failed, backward.lost) == (0, backward.problems)
    assert backward.worst == 0


class Count(nn.Module):
    """As many steps as the input says: z -> min(z + 1, x)."""

    def forward(self, z, x):
        return torch.minimum(z + 1, x)


def counted(steps):
    """What is told of one call whose samples take so many steps."""
    model = Equilibrium(Count(), event_ndim=1, solver=Picard(rtol=0.0, atol=0.5, max_steps=3000))
    gathered = Gathered(model)
    with watch(model) as seen, torch.no_grad():
        model(torch.tensor(steps, dtype=torch.float32)[:, None])
        gathered.forward()
        observed = seen.take()
    gathered.check(observed)
    return observed.total.forward


@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 199, 200, 201, 1000])
@pytest.mark.parametrize("high", [0, 1, 2, 10])
def test_p99_is_the_smallest_that_99_of_100_reach(count, high):
    few = min(high, count)
    assert counted([7] * few + [3] * (count - few)).calls == 1


def test_beyond_what_is_counted_one_by_one_p99_is_the_largest():
    forward = counted([4] * 980 + list(range(1000, 1040)) + [2000] * 20)
    assert forward.p99 == forward.most > 2000 - 1
    assert counted([4] * 980 + [1020] * 50 + [2000] * 10).p99 < 1023


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@every
def test_every_precision_and_layout(name, dtype):
    model = layer_of(name, **QUIET).to(dtype)
    gathered = Gathered(model)
    seen = watch(model)
    plain = tokens(scale=2.0, dtype=dtype)
    layouts = (
        plain,
        plain.transpose(0, 1).contiguous().transpose(0, 1),
        plain[:1].expand(3, -1, -1),
        tokens(scale=2.0, dtype=dtype, count=2 * TOKENS)[:, ::2],
    )
    for given in layouts:
        output = model(given)
        gathered.forward()
        output.float().square().sum().backward()
        gathered.backward()
    gathered.check(seen.take())


def test_no_problems_are_no_calls():
    model = layer_of()
    seen = watch(model)
    model(tokens()[:0]).sum().backward()
    observed = seen.take()
    assert observed.layers == ()
    assert (observed.total.forward.calls, observed.total.backward.calls) == (0, 0)
    assert observed.line() == "nothing was solved"


def test_a_layer_that_has_solved_once_stays_in_the_list():
    model = model_of()
    seen = watch(model)
    model[0](tokens())
    assert [layer.layer for layer in seen.take().layers] == ["0"]
    model[1](tokens())
    observed = seen.take()
    assert [(layer.layer, layer.forward.calls) for layer in observed.layers] == [("0", 0), ("1", 1)]
    assert "nothing was solved" in seen.take(3).line()


# On the device.


class Recorder(TorchDispatchMode):
    """How often operations of each name reach a device."""

    def __init__(self):
        super().__init__()
        self.names = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names[function.name()] += 1
        return function(*args, **(kwargs or {}))


def added(rows=ROWS, calls=1, **options):
    """The operations that a watch adds to a step of training, which some steps may precede."""
    found = []
    for watched in (False, True):
        model, given = layer_of(**options), tokens(rows=rows)
        with watch(model) if watched else contextlib.nullcontext():
            for _ in range(calls):
                with Recorder() as recorder:
                    model(given).square().sum().backward()
        found.append(recorder.names)
    return found[1] - found[0]


def test_counting_is_a_constant_number_of_operations_and_no_look():
    names = added()
    assert 20 <= names.total() <= 80
    waits = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal")
    assert not [name for name in names if any(word in name for word in waits)]
    for changed in ({"rows": 1}, {"rows": 300}, {"solver": Picard(rtol=1e-6, max_steps=500)}, {"calls": 20}):
        assert added(**changed) == names, changed


@every
def test_outputs_and_gradients_are_the_same_bits(name):
    found = []
    for watched in (False, True):
        model = layer_of(name)
        seen = watch(model) if watched else None
        steps = []
        for step in range(2):
            model.zero_grad()
            given = tokens(step, scale=2.0).requires_grad_()
            torch.manual_seed(step)
            output = model(given)
            output.square().sum().backward()
            steps += [output, given.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
        if seen is not None:
            assert seen.take().total.forward.problems > 0
        found.append(steps)
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

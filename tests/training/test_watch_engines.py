"""`watch` in engines: compiled, checkpointed and accumulated training, transforms, and modes of torch."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from watched_layers import HEADS, LAYERS, ROWS, TOKENS, Gathered, assert_counts, layer_of, model_of, observed, tokens

from implicit_attention import Picard
from implicit_attention.training import FailurePolicy, watch

every = pytest.mark.parametrize("name", LAYERS)
# The kinds with an operation for compiled graphs; the others run between graphs.
IN_GRAPH = ("pooling", "causal attention, shared keys", "timm", "x-transformers")
BREAKS = ["equilibrium", "equilibrium transformer", "energy transformer", "published", "causal energy transformer"]
BREAKS += ["spins", "memory", "multihead"]
ZERO = FailurePolicy(over="ignore", forward="explicit", backward="zero")
# What torch warns of where a graph breaks between two layers.
broken = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Stack(nn.Module):
    """Layers with residuals, each inside a checkpoint if that is asked for."""

    def __init__(self, reentrant=None, count=2, **options):
        super().__init__()
        self.layers, self.reentrant = model_of(count, **options), reentrant

    def forward(self, x):
        for layer in self.layers:
            x = x + (layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant))
        return x


def train(call, steps=(0, 1)):
    """Steps on inputs of other shapes."""
    for step in steps:
        call(tokens(step, rows=ROWS + step, count=TOKENS + step).requires_grad_()).square().sum().backward()


def compiled(model, backend="aot_eager", **options):
    """Of any shape from the first call on, which is one graph for each mode."""
    return torch.compile(model, **{"fullgraph": True, "dynamic": True, "backend": backend, **options})


# Compiled.


@functools.cache
def plainly():
    return observed(Stack(), train)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_compiled_model_is_one_graph_with_the_counts_of_eager_calls(backend):
    model = Stack()
    with watch(model) as seen:
        # The shapes of the second step make it a graph of any shape.
        train(compiled(model, backend, dynamic=None))
        assert_counts(seen.take(), plainly())


def graphs_of(watched):
    """How many graphs and graph breaks the steps of a training take."""
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = Stack(count=1)
    seen = watch(model) if watched else None
    call = compiled(model, "eager")
    # Two graphs, for lengths that are multiples of four and for others, take every other shape.
    train(call, (0, 3))
    with torch.compiler.set_stance("fail_on_recompile"):
        for steps in ((1, 2), (4, 7, 0)):
            train(call, steps)
            if seen is not None:
                assert seen.take().total.forward.calls == {2: 4, 3: 3}[len(steps)]
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.slow
def test_the_watch_adds_neither_graphs_nor_breaks_nor_recompilations():
    assert graphs_of(True) == graphs_of(False) == (2, {})


@pytest.mark.parametrize("name", ["pooling", *(pytest.param(name, marks=pytest.mark.slow) for name in IN_GRAPH[1:])])
def test_every_kind_with_an_operation_is_counted_inside_one_graph(name):
    expected = observed(layer_of(name), train)
    model = layer_of(name)
    with watch(model) as seen:
        train(compiled(model, "eager"))
        assert_counts(seen.take(), expected)


@broken
@pytest.mark.parametrize("name", ["mean field", *(pytest.param(n, marks=pytest.mark.slow) for n in BREAKS)])
def test_the_other_kinds_are_counted_between_graphs(name):
    expected = observed(layer_of(name), train)
    model = layer_of(name)
    with watch(model) as seen:
        train(torch.compile(model, backend="eager"))
        assert_counts(seen.take(), expected)


@pytest.mark.parametrize("on_failure", ["ignore", pytest.param(ZERO, marks=pytest.mark.slow)])
def test_failures_and_lost_cotangents_of_a_graph_are_counted(on_failure):
    found = []
    for graph in (False, True):
        model = layer_of(solver=Picard(rtol=1e-5, max_steps=1), on_failure=on_failure)
        call = compiled(model, dynamic=None) if graph else model
        with watch(model) as seen:
            given = tokens(scale=2.0)
            given[0, 0, 0] = math.nan
            output = call(given.requires_grad_())
            cotangent = torch.zeros_like(output)
            cotangent[1, 0] = math.inf
            output.backward(cotangent)
            found.append(seen.take())
    assert_counts(*found)
    assert found[0].total.forward.failures["NONFINITE"] == HEADS * TOKENS
    assert found[0].total.forward.failures["MAX_STEPS"] == HEADS * TOKENS
    # The policy gives what failed no part in gradients, and so nothing to lose.
    assert found[0].total.backward.lost == (HEADS if on_failure == "ignore" else 0)


@pytest.mark.slow
def test_watched_after_it_was_compiled_and_closed_again():
    model = layer_of()
    expected = observed(layer_of(), train)
    call = compiled(model, "eager")
    train(call)
    for _ in range(2):
        with watch(model) as seen:
            train(call)
            assert_counts(seen.take(), expected)
        train(call)


# Checkpointed and accumulated.


@broken
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("graphs", [False, True])
def test_checkpointing_counts_once(graphs, reentrant):
    model = Stack(reentrant)
    # A layer remembers its last call, which dynamo does not take into a graph: these layers run between graphs.
    call = torch.compile(model, backend="aot_eager") if graphs else model
    with watch(model) as seen:
        train(call)
        assert_counts(seen.take(), plainly())


@pytest.mark.parametrize("reentrant", [True, False])
@every
def test_every_kind_is_counted_once_under_checkpointing(name, reentrant):
    expected = observed(layer_of(name), train)
    model = layer_of(name)
    with watch(model) as seen:
        train(functools.partial(checkpoint, model, use_reentrant=reentrant))
        found = seen.take()
    assert_counts(found, expected)


def test_accumulated_batches_are_all_counted():
    model = Stack()
    gathered = Gathered(model)
    with watch(model) as seen:
        for _ in range(2):
            for step in range(3):
                gathered.step(model, tokens(step, rows=1 + step))
        gathered.check(seen.take())


def test_several_backward_passes_of_one_forward_pass_are_all_counted():
    model = layer_of()
    with watch(model) as seen:
        output = model(tokens())
        for _ in range(3):
            output.sum().backward(retain_graph=True)
        total = seen.take().total
    assert (total.forward.calls, total.backward.calls) == (1, 3)


def test_second_derivatives_are_counted_as_backward_solves():
    model = layer_of().double()
    given = tokens(dtype=torch.float64).requires_grad_()
    with watch(model) as seen:
        (slope,) = torch.autograd.grad(model(given).square().sum(), given, create_graph=True)
        first = seen.take().total
        slope.square().sum().backward()
        second = seen.take().total
    assert (first.forward.calls, first.backward.calls) == (1, 1)
    assert second.forward.calls == 0
    assert second.backward.calls > 1
    assert second.backward.failed == 0

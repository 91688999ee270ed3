"""Reasoners: a step is what its equation says, gradients are those of a long loop, and padding changes no answer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from implicit_attention import Equilibrium, Picard
from implicit_attention.models.reasoners import (
    ConvolutionalReasoner,
    GraphReasoner,
    TransformerStack,
    TwoStreamReasoner,
)

TIGHT = Picard(rtol=1e-13, atol=1e-13, max_steps=2000)
RING, PATH = [[0, 1], [1, 2], [2, 3], [3, 0], [0, 2]], [[0, 1], [1, 2], [2, 1], [-1, -1], [-1, -1]]


class Case(NamedTuple):
    """A reasoner, its input of two samples, its other arguments, and which parts of the samples exist."""

    make: Callable[..., Equilibrium]
    x: tuple[int, ...]
    args: Callable[[torch.Tensor | None], tuple[Any, ...]]
    exists: torch.Tensor
    #: z, x, *args -> f(z), written out anew.
    step: Callable[..., Any]
    scale: float = 0.5


def prefix(shape, *sizes):
    """A mask of 2 samples, whose last one has all parts and whose first one has the first `sizes` of each axis."""
    exists = torch.ones(2, *shape, dtype=torch.bool)
    exists[0] = False
    exists[0][tuple(slice(size) for size in sizes)] = True
    return exists


def convolved(layer, z, x, exists=None):
    block, kind = layer.block, (F.conv1d, F.conv2d)[layer.axes - 1]
    h = kind(torch.cat([z, x], 1), block.recall.weight, padding=1)
    for part in block.layers:
        inner = kind(h, part.first.weight, padding=1)
        if part.norms:
            inner = F.group_norm(inner, 4, part.norms[0].weight, part.norms[0].bias)
        change = kind(inner.relu(), part.second.weight, padding=1)
        if part.norms:
            change = F.group_norm(change, 4, part.norms[1].weight, part.norms[1].bias)
        h = (h + change).relu()
    return h


def two_streams(layer, state, x, exists=None, *args):
    high, low = state
    low = layer.block.low(low + high + x, *args)
    low = layer.block.low(low + high + x, *args)
    return layer.block.high(high + low, *args), low


def messages(layer, z, x, edges, features=None, exists=None):
    block, result = layer.block, torch.zeros_like(z)
    h = z + x
    for b in range(len(x)):
        heard = [[] for _ in range(x.shape[1])]
        for number, (j, i) in enumerate(edges[b].tolist()):
            if j >= 0:
                inner = block.source(h[b, j]) + block.target(h[b, i]) + block.edge(features[b, number])
                heard[i].append(block.message(inner.relu()))
        for i, several in enumerate(heard):
            m = h.new_zeros(6) if not several else reduced(block.reduction, torch.stack(several))
            result[b, i] = block.norm(h[b, i] + block.update(torch.cat([h[b, i], m])))
    return result


def reduced(how, several):
    return {"amax": several.amax(0), "sum": several.sum(0), "mean": several.mean(0)}[how]


def stack(**options):
    return TransformerStack(8, 2, **options)


def of_graphs(exists):
    features = torch.arange(30.0, dtype=torch.float64).reshape(2, 5, 3).sin()
    edges = torch.tensor([PATH, RING])
    if exists is not None:
        # From a node that does not exist.
        edges[0, -1] = torch.tensor([3, 1])
        features = features.clone()
        features[0, 3:] = torch.nan
    return edges, features, exists


CASES = {
    "images": Case(
        lambda **o: ConvolutionalReasoner(6, inputs=3, **o),
        (2, 3, 5, 7),
        lambda exists: (exists,),
        prefix((5, 7), 3, 4),
        convolved,
        0.4,
    ),
    "sequences": Case(
        lambda **o: ConvolutionalReasoner(8, axes=1, depth=1, norm="group", **o),
        (2, 8, 9),
        lambda exists: (exists,),
        prefix((9,), 5),
        convolved,
        0.2,
    ),
    "two streams": Case(
        lambda **o: TwoStreamReasoner(stack(), stack(depth=2, norm="pre"), **o),
        (2, 5, 8),
        lambda exists: (None,) if exists is None else (exists[:, None, None, :],),
        prefix((5,), 3),
        two_streams,
    ),
    "one network": Case(
        lambda **o: TwoStreamReasoner(stack(), cycles=2, **o),
        (2, 5, 8),
        lambda exists: (None,) if exists is None else (exists[:, None, None, :],),
        prefix((5,), 3),
        two_streams,
    ),
    **{
        f"graphs, {name}": Case(
            lambda name=name, **o: GraphReasoner(8, 6, edge_features=3, aggregation=name, **o),
            (2, 4, 8),
            of_graphs,
            prefix((4,), 3),
            messages,
        )
        for name in ("max", "sum", "mean")
    },
}


def made(name, dtype=torch.float64, **options):
    torch.manual_seed(0)
    case = CASES[name]
    layer = case.make(solver=TIGHT, on_failure="raise", **options).to(dtype).eval()
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            if "norm" not in key or "norms" in key:
                parameter.mul_(case.scale)
    return layer, torch.randn(case.x, dtype=dtype)


def called(layer, name, x, exists=None, **options):
    """The state as a list of tensors, and the arguments behind x."""
    args = CASES[name].args(exists)
    if isinstance(layer, TwoStreamReasoner):
        return list(layer(x, *args, exists=exists, **options))
    return [layer(x, *args, **options)]


def first(layer, name, x):
    """The start, and the arguments of the written out step."""
    args = CASES[name].args(None)
    if isinstance(layer, TwoStreamReasoner):
        return (torch.zeros_like(x), torch.zeros_like(x)), (None, *args)
    channels = layer.channels if isinstance(layer, ConvolutionalReasoner) else x.shape[1]
    return x.new_zeros(x.shape[0], channels, *x.shape[2:]), args


def looped(layer, name, x, count):
    z, args = first(layer, name, x)
    for _ in range(count):
        z = CASES[name].step(layer, z, x, *args)
    return list(z) if isinstance(z, tuple) else [z]


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_a_loop_written_out(name):
    layer, x = made(name)
    torch.testing.assert_close(called(layer, name, x, steps=3), looped(layer, name, x, 3))


@pytest.mark.parametrize("name", CASES)
def test_solution_and_gradients_are_those_of_400_steps(name):
    layer, x = made(name)
    x.requires_grad_()
    inputs = [x, *layer.parameters()]
    found = called(layer, name, x)
    assert layer.last_solve.converged.all()
    assert layer.last_solve.num_evals.min() > 5
    loop = called(layer, name, x, steps=400)
    torch.testing.assert_close(found, loop, rtol=1e-9, atol=1e-9)
    weights = [torch.randn_like(z) for z in found]
    grads = [
        torch.autograd.grad(sum((z * w).sum() for z, w in zip(states, weights, strict=True)), inputs)
        for states in (found, loop)
    ]
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_a_padded_sample_answers_as_alone(name):
    layer, x = made(name)
    case, exists = CASES[name], CASES[name].exists
    where = exists.reshape(*exists.shape, *(1,) * (x.ndim - exists.ndim))
    if isinstance(layer, ConvolutionalReasoner):
        where = exists.unsqueeze(1)
    padded = x.masked_fill(~where, torch.nan).requires_grad_()
    states = called(layer, name, padded, exists)
    sizes = [int(exists[0].any(-1).sum()), int(exists[0].any(0).sum())] if exists.ndim == 3 else [int(exists[0].sum())]
    part = tuple(slice(size) for size in sizes)
    index = (slice(None), slice(None), *part) if isinstance(layer, ConvolutionalReasoner) else (slice(None), *part)
    small = x[:1][index]
    if isinstance(layer, GraphReasoner):
        edges, features, _ = case.args(None)
        alone = [layer(small, edges[:1], features[:1])]
    else:
        alone = called(layer, name, small)
    whole = called(layer, name, x)
    for z, own, every in zip(states, alone, whole, strict=True):
        torch.testing.assert_close(z[:1][index], own, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(z[1], every[1], rtol=1e-9, atol=1e-10)
        assert (z[:1].masked_select(~where[:1]) == 0).all()
    grads = torch.autograd.grad(sum(z.square().sum() for z in states), [padded, *layer.parameters()])
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0].masked_select(~where) == 0).all()


def test_two_streams_want_the_mask_of_their_layers_beside_exists():
    layer, x = TwoStreamReasoner(TransformerStack(8, 2), solver=TIGHT, on_failure="ignore"), torch.randn(2, 4, 8)
    exists = prefix((4,), 3)
    with pytest.raises(ValueError, match=r"`exists` must come with an argument .* pass exists\[:, None, None, :\]"):
        layer(x, exists=exists)
    padded = layer(x, exists[:, None, None, :], exists=exists)[0][:1, :3]
    torch.testing.assert_close(padded, layer(x[:1, :3])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_axes_of_samples(name, lead):
    layer, x = made(name)
    if isinstance(layer, TwoStreamReasoner):
        layer.event_ndim = 2
    args = CASES[name].args(None)
    rows = x[:1].expand(6, *x.shape[1:]) + torch.arange(6.0).reshape(6, *(1,) * (x.ndim - 1)) / 10
    if isinstance(layer, GraphReasoner):
        args = args[0][1], args[1][1]
    found = layer(rows.reshape(*lead, *x.shape[1:]) if lead else rows[0], *args)
    for i, row in enumerate(rows[: 6 if lead else 1]):
        alone = layer(row[None], *args)
        for z, own in zip(found, alone, strict=True) if isinstance(found, tuple) else [(found, alone)]:
            torch.testing.assert_close(z.reshape(-1, *own.shape[1:])[i], own[0], rtol=1e-9, atol=1e-10)
    assert layer.last_solve.status.shape == (1,)


@pytest.mark.parametrize("name", CASES)
def test_loops_are_compiled_checkpointed_and_saved(name):
    layer, x = made(name)
    expected = called(layer, name, x, steps=4)
    compiled = torch.compile(lambda x: called(layer, name, x, steps=4), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    x.requires_grad_()
    inputs = [x, *layer.parameters()]
    layer.train()
    grads = []
    for states in (
        called(layer, name, x, steps=4),
        checkpoint(lambda x: called(layer, name, x, steps=4), x, use_reentrant=False),
    ):
        grads.append(torch.autograd.grad(sum(z.square().sum() for z in states), inputs))
    torch.testing.assert_close(*grads)
    other = CASES[name].make().double()
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(called(other, name, x, steps=4), expected)


@pytest.mark.parametrize("name", CASES)
def test_autocast_keeps_the_state_in_single_precision(name):
    layer, x = made(name, torch.float32, steps=6)
    layer.float()
    args = tuple(t.float() if torch.is_tensor(t) and t.is_floating_point() else t for t in CASES[name].args(None))
    exact = layer(x, *args)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x, *args)
    for z, wide in zip(found, exact, strict=True) if isinstance(found, tuple) else [(found, exact)]:
        assert z.dtype == torch.float32
        torch.testing.assert_close(z, wide, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", ["images", "graphs, max", "two streams"])
def test_finished_samples_leave_and_change_no_other(name):
    layer, x = made(name)
    x = torch.cat([x, 0.01 * x[:1], x[1:]])[[0, 2, 1]]
    args = tuple(t if not torch.is_tensor(t) else t[[0, 0, 1]] for t in CASES[name].args(None))
    layer(x, *args)
    counts = layer.last_solve.num_evals
    for i in range(3):
        layer(x[i : i + 1], *(t if not torch.is_tensor(t) else t[i : i + 1] for t in args))
        assert layer.last_solve.num_evals == counts[i]


def test_a_pair_with_one_end_is_no_edge_and_batches_may_be_empty():
    layer, x = made("graphs, max")
    edges, features, _ = of_graphs(None)
    expected = layer(x, edges, features)
    for half in ([-1, 2], [2, -1]):
        other = edges.clone()
        other[0, -1] = torch.tensor(half)
        torch.testing.assert_close(layer(x, other, features), expected, rtol=0, atol=0)
    assert layer(x[:0], edges[:0], features[:0]).shape == (0, 4, 8)
    assert layer(x, edges[:, :0], features[:, :0]).isfinite().all()
    image, pixels = made("images")
    assert image(pixels[:0]).shape == (0, 6, 5, 7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_single_beside_a_mask(dtype):
    """Squares of cells above 255 are beyond float16; so is the sum of many."""
    torch.manual_seed(0)
    norm = ConvolutionalReasoner(32, norm="group").block.layers[0].norms[0]
    h = (300 + 8 * torch.randn(2, 32, 32, 32)).to(dtype)
    expected = norm(h.float())
    masked = norm.to(dtype)(h, torch.ones(2, 1, 32, 32, dtype=torch.bool))
    assert masked.dtype == dtype
    torch.testing.assert_close(masked.float(), expected, atol=0.03, rtol=0.01)
    layer = ConvolutionalReasoner(8, norm="group")
    assert layer(torch.zeros(0, 8, 5, 5), torch.ones(0, 5, 5, dtype=torch.bool)).shape == (0, 8, 5, 5)


def test_starts_are_of_the_states_kind():
    layer, x = made("images")
    assert layer(x, start="random", steps=0).shape == (2, 6, 5, 7)
    begun = nn.Conv2d(3, 6, 3, padding=1).double()(x)
    torch.testing.assert_close(layer(x, start=begun, steps=2), convolved(layer, convolved(layer, begun, x), x))
    forgetful = ConvolutionalReasoner(6, recall=False, on_failure="ignore")
    assert forgetful(torch.randn(1, 6, 5, 5), start=torch.randn(1, 6, 5, 5), steps=2).shape == (1, 6, 5, 5)
    pair = made("two streams")[0]
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    high, low = pair(x, start="input", steps=0)
    assert torch.equal(high, x)
    assert torch.equal(low, x)

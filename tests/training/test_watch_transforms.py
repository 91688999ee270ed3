"""`watch` under transforms of torch.func, and modes of torch."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from watched_layers import DIM, HEADS, LAYERS, Gathered, assert_counts, layer_of, observed, tokens

from implicit_attention import ImplicitAttention
from implicit_attention.training import watch

every = pytest.mark.parametrize("name", LAYERS)


# Transforms and modes.


def test_the_gradient_of_a_functional_call_is_counted():
    model = layer_of()
    expected = observed(model, lambda model: model(tokens()).square().sum().backward())
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (tokens(),)).square().sum()

    def steps(model):
        slopes = torch.func.grad(loss)(parameters)
        for name, value in model.named_parameters():
            torch.testing.assert_close(slopes[name], value.grad)

    found = observed(model, steps)
    assert_counts(found, expected)
    assert_counts(observed(model, lambda model: torch.func.vjp(loss, parameters)[1](torch.ones(()))), expected)


@every
def test_forward_mode_is_counted_and_leaves_no_tangent_behind(name):
    model = layer_of(name)
    with watch(model) as seen, sdpa_kernel(SDPBackend.MATH):  # torch's others have no forward mode
        torch.func.jvp(model, (tokens(),), (tokens(1),))
        with forward_ad.dual_level():
            model(forward_ad.make_dual(tokens(), tokens(1)))
        assert seen.take().total.forward.calls == 2
        gathered = Gathered(model)
        gathered.step(model, tokens())
        gathered.check(seen.take())


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of torch's attention, in a block
@every
def test_nothing_is_seen_inside_vmap(name):
    model = layer_of(name)
    given = tokens()[:, None]
    with watch(model) as seen:
        torch.func.vmap(model)(given)
        torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(given)
        assert (seen.take().total.forward.calls, seen.take().total.backward.calls) == (0, 0)
        torch.func.vmap(model)(given.clone().requires_grad_()).sum().backward()
        found = seen.take()
    assert found.total.forward.calls == 0
    # This backward pass runs outside.
    if name != "published":
        assert found.total.backward.problems > 0
        assert found.line().startswith("backward failed 0 of")


def test_a_compiled_vmap_neither_counts_nor_raises():
    model = layer_of()
    call = torch.compile(torch.func.vmap(model), backend="eager", fullgraph=True)
    with watch(model) as seen:
        call(tokens())
        assert seen.take().total.forward.calls == 0


def test_inference_and_then_training():
    model = layer_of()
    gathered = Gathered(model)
    with torch.inference_mode():
        seen = watch(model)
        model(tokens())
        gathered.forward()
        gathered.check(seen.take())
    gathered = Gathered(model)
    with torch.inference_mode():
        model(tokens())
        gathered.forward()
    with torch.no_grad():
        model(tokens())
        gathered.forward()
    gathered.step(model, tokens())
    gathered.check(seen.take())


@pytest.mark.parametrize("graph", [False, True])
def test_autocast_and_a_gradient_scaler(graph):
    torch.compiler.reset()
    model = layer_of()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**122)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if graph else model
    with watch(model) as seen:
        for _ in range(8):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = 100 * call(tokens(scale=4.0)).float().square().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        total = seen.take().total
    assert (total.forward.calls, total.backward.calls, total.forward.failed, total.backward.failed) == (8, 8, 0, 0)
    # The first scale is too large for float32: what came from above was infinite, and the step is skipped.
    assert 0 < total.backward.lost < total.backward.problems
    assert scaler.get_scale() < 2.0**122


def test_programs_hold_no_trace_of_it():
    model = layer_of().eval()
    with watch(model) as seen:
        program = torch.export.export(model, (tokens(),))
        assert "tally" not in str(program.graph)
        program.module()(tokens())
        assert seen.take().total.forward.calls == 0
        model(tokens())
        assert seen.take().total.forward.calls == 1


def test_shapes_alone_are_not_counted():
    with torch.device("meta"):
        model = ImplicitAttention(DIM, HEADS)
    with watch(model) as seen:
        model(tokens().to("meta"))
        assert seen.take().total.forward.calls == 0
    model = layer_of()
    with watch(model) as seen:
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model(mode.from_tensor(tokens()))
        assert seen.take().total.forward.calls == 0

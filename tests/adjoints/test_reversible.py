"""`Reversible`: the gradient of the steps as autograd has it, at the memory of one, and bit for bit on the way back."""

import pytest
import torch
from torch import nn

from implicit_attention import (
    ConvergenceError,
    ConvergenceWarning,
    Equilibrium,
    FixedPointMap,
    PerSample,
    Picard,
    Reversible,
    Status,
    solve,
)
from implicit_attention.testing.adjoint import AdjointContract
from implicit_attention.testing.numerics import random, relative_error


class TestReversible(AdjointContract):
    adjoint = Reversible(damping=0.1)
    solver = Picard(rtol=0.0, atol=0.0, max_steps=60)
    through_initial = True

    def equilibrium(self, problem, initial, on_failure="raise"):
        return solve(problem, initial, solver=self.solver, adjoint=self.adjoint, on_failure=on_failure).value


def by_hand(mapped, start, steps, damping):
    y = z = start
    for _ in range(steps):
        y = damping * y + (1 - damping) * mapped(z)
        z = damping * z + (1 - damping) * mapped(y)
    return z


def budget(steps, **options):
    return Picard(rtol=0, atol=0, max_steps=steps, **options)


def problem_of(dtype=torch.float64):
    weight, shift, start = 0.6 * random(5, 5), random(2, 3, 5, seed=1), random(2, 3, 5, seed=2)
    return tuple(t.to(dtype).requires_grad_() for t in (start, weight, shift))


def tanh(z, weight, shift):
    return torch.tanh(z @ weight + shift)


def both(steps, damping, inputs, function=tanh):
    """Value and gradients of the adjoint, those of autograd through the same steps, and the solution."""
    start, *tensors = inputs
    problem = FixedPointMap(function, *tensors, event_ndim=2)
    solution = solve(problem, start, solver=budget(steps), adjoint=Reversible(damping))
    expected = by_hand(lambda z: function(z, *tensors), start, steps, damping)
    cotangent = random(*expected.shape, seed=7, dtype=expected.dtype)
    ours, theirs = (torch.autograd.grad(v, inputs, cotangent) for v in (solution.value, expected))
    return (solution.value, *ours), (expected, *theirs), solution


@pytest.mark.parametrize("steps", [1, 8, 64, 256])
@pytest.mark.parametrize("damping", [0.5, 0.8, 0.9, 0.25, 0.75, 0.02, 1 / 3, 0.999, 123 / 457])
def test_gradients_are_those_of_autograd_through_the_same_steps(steps, damping):
    ours, theirs, solution = both(steps, damping, problem_of())
    for got, truth in zip(ours, theirs, strict=True):
        # The gradient of the start falls by the steps, and is held to that of one.
        assert (got - truth).norm() < 1e-10 * max(truth.norm(), 1e-2)
    assert solution.adjoint.reconstruction_error.eq(0).all()
    assert solution.status.eq(Status.BUDGET).all()
    assert solution.num_steps.eq(steps).all()
    assert solution.num_evals.eq(2 * steps + 1).all()
    assert "start reconstructed to 0.0e+00" in repr(solution.adjoint)


def test_tensors_that_are_made_of_each_other_get_their_own_part():
    start, weight, _ = problem_of()
    for create_graph in (False, True):
        shift = weight.sum() * random(2, 3, 5, seed=1)
        problem = FixedPointMap(tanh, weight, shift, event_ndim=2)
        value = solve(problem, start, solver=budget(4), adjoint=Reversible()).value
        expected = by_hand(lambda z, shift=shift: tanh(z, weight, shift), start, 4, 0.5)
        options = {"create_graph": create_graph, "retain_graph": True}
        got, truth = (torch.autograd.grad(v.square().sum(), weight, **options)[0] for v in (value, expected))
        assert relative_error(got, truth) < 1e-10


def test_a_start_of_other_size_than_f_and_states_that_grow():
    for scale in (1e-30, 1e-6, 1e6, 1e30):
        start, weight, shift = (t.detach() for t in problem_of())
        inputs = [(scale * start).requires_grad_(), weight.requires_grad_(), (scale * shift).requires_grad_()]
        ours, theirs, _ = both(8, 0.5, inputs, lambda z, w, b: z @ w + b)
        for got, truth in zip(ours, theirs, strict=True):
            assert relative_error(got, truth) < 1e-10
    start = torch.full((1, 1), 1e-3, dtype=torch.float64, requires_grad=True)
    problem = FixedPointMap(lambda z: 2 * z, event_ndim=1)
    value = solve(problem, start, solver=budget(6), adjoint=Reversible()).value
    expected = by_hand(lambda z: 2 * z, start, 6, 0.5)
    assert relative_error(value, expected) < 1e-10
    (gradient,) = torch.autograd.grad(value.sum(), start)
    assert relative_error(gradient, expected / start) < 1e-10


def test_states_that_outgrow_their_integers_are_diverged_and_get_no_gradient():
    factor = torch.tensor([[0.5], [8.0]], dtype=torch.float64, requires_grad=True)
    start = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
    shared = torch.ones((), dtype=torch.float64, requires_grad=True)
    problem = FixedPointMap(lambda z, a, s: a * z * s, PerSample(factor), shared, event_ndim=1)
    with pytest.warns(ConvergenceWarning, match="failed for 1 of 2 problems, first at 1"):
        solution = solve(problem, start, solver=budget(20), adjoint=Reversible(), on_failure="warn")
    assert solution.status.tolist() == [Status.BUDGET, Status.DIVERGED]
    solution.value[0].sum().backward()
    alone = by_hand(lambda z: factor[:1] * z * shared, start[:1], 20, 0.5)
    expected = torch.autograd.grad(alone.sum(), (factor, start, shared))
    for got, truth in zip((factor.grad, start.grad, shared.grad), expected, strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-10, atol=1e-12)
    assert solution.adjoint.reconstruction_error.eq(0).all()
    with pytest.raises(ConvergenceError):
        solve(problem, start, solver=budget(20), adjoint=Reversible())


def test_where_all_problems_diverge_the_gradient_is_there_and_zero():
    factor = torch.full((2, 1), 8.0, dtype=torch.float64, requires_grad=True)
    start, problem = random(2, 2000), FixedPointMap(lambda z, a: a * z, PerSample(factor), event_ndim=1)
    value = solve(problem, start, solver=budget(30), adjoint=Reversible(), on_failure="ignore").value
    (gradient,) = torch.autograd.grad(value.sum(), factor)
    assert gradient.eq(0).all()


def test_infinities_of_a_problem_that_diverged_reach_no_shared_tensor():
    factor, shared = torch.tensor([[0.3], [3.0]]).double(), torch.ones((), dtype=torch.float64, requires_grad=True)

    def value_of(shared):
        problem = FixedPointMap(lambda z, a, s: a * torch.exp(z * s), PerSample(factor), shared, event_ndim=1)
        start = torch.zeros(2, 1).double()
        return solve(problem, start, solver=budget(20), adjoint=Reversible(), on_failure="ignore").value

    alone = by_hand(lambda z: factor[:1] * torch.exp(z * shared), torch.zeros(1, 1).double(), 20, 0.5)
    (truth,) = torch.autograd.grad(alone.sum(), shared)
    (got,) = torch.autograd.grad(value_of(shared)[0].sum(), shared)
    torch.testing.assert_close(got, truth, rtol=1e-10, atol=0)


# f that is not the same each time.


class Counting(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.mix, self.size, self.count = nn.Linear(5, 5).double(), size, 0

    def forward(self, z, x):
        self.count += 1
        return torch.tanh(self.mix(z) + x + self.size * self.count)


@pytest.mark.parametrize("on_failure", ["raise", "warn", "ignore"])
def test_a_block_that_is_another_function_each_time_is_reported(on_failure):
    layer = Equilibrium(Counting(1e-3), steps=8, adjoint=Reversible(), on_failure=on_failure)
    loss = layer(random(4, 5)).square().sum()
    words = r"by Reversible, whose gradient is therefore wrong.* failed for 4 of 4.*not the same each time"
    if on_failure == "raise":
        with pytest.raises(ConvergenceError, match=words):
            loss.backward()
    elif on_failure == "warn":
        with pytest.warns(ConvergenceWarning, match=words):
            loss.backward()
    else:
        loss.backward()
    assert layer.last_solve.adjoint.reconstruction_error.gt(1e-6).all()
    assert layer.last_solve.adjoint.failed.all()


# The layer.


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.mix, self.read, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.again, self.dropout = self.mix, nn.Dropout(dropout)

    def forward(self, z, x, scale=1.0):
        return self.norm(z + self.dropout(torch.tanh(self.again(torch.tanh(self.mix(z))) * scale + self.read(x))))


def gradients(block, value, *others):
    cotangent = random(*value.shape, seed=7, dtype=value.dtype)
    return torch.autograd.grad(value, (*block.parameters(), *others), cotangent)


@pytest.mark.parametrize("training", [True, False])
def test_layer_with_shared_weights_and_arguments_that_require_grad(training):
    block = Block().double().train(training)
    x, scale = random(3, 4, 6).requires_grad_(), random(6, seed=3).requires_grad_()
    layer = Equilibrium(block, steps=8, adjoint=Reversible(0.8)).train(training)
    value = layer(x, scale)
    assert torch.isnan(layer.last_solve.residual).all()
    assert layer.last_solve.num_evals.eq(16).all()
    expected = by_hand(lambda z: block(z, x, scale), torch.zeros_like(x), 8, 0.8)
    assert relative_error(value, expected) < 1e-10
    for got, truth in zip(gradients(block, value, x, scale), gradients(block, expected, x, scale), strict=True):
        assert relative_error(got, truth) < 1e-10
    _, solution = layer(x, scale, return_solution=True)
    assert solution.num_evals.eq(17).all()
    assert solution.residual.gt(0).all()
    with torch.no_grad():
        assert relative_error(layer(x, scale), expected) < 1e-10


def test_a_start_that_is_a_parameter_gets_its_gradient():
    block, x = Block().double(), random(3, 4, 6)
    layer = Equilibrium(block, steps=2, adjoint=Reversible(), start=nn.Parameter(random(4, 6, seed=5)))
    (start,) = layer.start.parameters()
    (got,) = torch.autograd.grad(layer(x).square().sum(), start)
    value = by_hand(lambda z: block(z, x), start.expand(3, 4, 6), 2, 0.5)
    (truth,) = torch.autograd.grad(value.square().sum(), start)
    assert relative_error(got, truth) < 1e-10


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(5, 5).double()

    def forward(self, state, x):
        fast, slow = state["fast"], state["slow"]
        new = torch.tanh(self.mix(torch.cat([fast.mean(1), slow], -1)) + x)
        return {"fast": fast / 2 + new[:, None, :3] / 2, "slow": new[:, 3:]}


def test_states_of_several_tensors():
    block, x = Pair(), random(4, 5).requires_grad_()
    start = {"fast": random(4, 2, 3, seed=1), "slow": random(4, 2, seed=2)}
    value = Equilibrium(block, start="zeros", steps=8, adjoint=Reversible())(x, start=start)
    y = z = start
    for _ in range(8):
        y = {name: (y[name] + part) / 2 for name, part in block(z, x).items()}
        z = {name: (z[name] + part) / 2 for name, part in block(y, x).items()}
    pairs = [gradients(block, torch.cat([v["fast"].flatten(1), v["slow"]], 1), x) for v in (value, z)]
    for got, truth in zip(*pairs, strict=True):
        assert relative_error(got, truth) < 1e-10


def test_dropout_is_held_within_a_call():
    block, x = Block(0.5).double(), random(3, 4, 6)
    layer = Equilibrium(block, steps=8, adjoint=Reversible())
    values = []
    for _ in range(2):
        torch.manual_seed(3)
        value = layer(x)
        # Numbers that are drawn between the passes.
        torch.randn(7)
        got = gradients(block, value)
        assert layer.last_solve.adjoint.reconstruction_error.eq(0).all()
        torch.manual_seed(3)
        state = torch.get_rng_state()

        def mapped(z, state=state):
            torch.set_rng_state(state)
            return block(z, x)

        expected = by_hand(mapped, torch.zeros_like(x), 8, 0.5)
        assert relative_error(value, expected) < 1e-10
        for one, truth in zip(got, gradients(block, expected), strict=True):
            assert relative_error(one, truth) < 1e-10
        values.append(layer(x))
    torch.manual_seed(3)
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second)


def test_modules_with_a_fast_path_without_gradients_are_run_back_exactly():
    torch.manual_seed(0)
    inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, z, x):
            return self.inner(z + x)

    layer = Equilibrium(Encoder(), steps=64, adjoint=Reversible(), on_failure="raise").eval()
    layer(random(3, 4, 8).float()).sum().backward()
    assert layer.last_solve.adjoint.reconstruction_error.eq(0).all()


def test_statistics_count_the_evaluations_of_the_forward_pass():
    class Normed(Block):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, z, x):
            return torch.tanh(self.norm(self.mix(z) + x))

    layer = Equilibrium(Normed().double(), steps=4, adjoint=Reversible(), on_failure="raise")
    for create_graph in (False, True):
        loss = layer(random(7, 6)).square().sum()
        before = {name: t.clone() for name, t in layer.block.named_buffers()}
        torch.autograd.grad(loss, tuple(layer.block.norm.parameters()), create_graph=create_graph)
        assert all(torch.equal(t, before[name]) for name, t in layer.block.named_buffers())
    assert int(before["norm.num_batches_tracked"]) > 8


def test_inside_a_checkpoint_and_around_one():
    block, x = Block(0.3).double(), random(3, 4, 6).requires_grad_()
    layer = Equilibrium(block, steps=4, adjoint=Reversible(), on_failure="raise")
    torch.manual_seed(1)
    expected = gradients(block, layer(x), x)
    torch.manual_seed(1)
    value = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    for got, truth in zip(gradients(block, value, x), expected, strict=True):
        torch.testing.assert_close(got, truth)

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, z, x):
            return torch.utils.checkpoint.checkpoint(self.block, z, x, use_reentrant=False)

    torch.manual_seed(1)
    value = Equilibrium(Inside(), steps=4, adjoint=Reversible(), on_failure="raise")(x)
    for got, truth in zip(gradients(block, value, x), expected, strict=True):
        torch.testing.assert_close(got, truth)


def test_ranges_of_steps_are_drawn_in_training_and_solved_in_evaluation():
    block, x = Block().double(), random(3, 4, 6)
    layer = Equilibrium(block, steps=range(2, 6), adjoint=Reversible(), solver=Picard(rtol=1e-8, max_steps=2000))
    counts = set()
    for _ in range(20):
        layer(x).sum().backward()
        counts |= set(layer.last_solve.num_steps.tolist())
    assert counts == {2, 3, 4, 5}
    with torch.no_grad():
        settled = layer.eval()(x)
    assert layer.last_solve.converged.all()
    assert relative_error(block(settled, x), settled) < 1e-6
    # The steps have the same fixed point.
    assert relative_error(layer(x, steps=400), settled) < 1e-5
    # A solve is differentiated as ever.
    implicit = gradients(block, layer(x))
    assert all(relative_error(*p) < 1e-5 for p in zip(implicit, gradients(block, layer(x, steps=400)), strict=True))


def test_compilers_and_programs_record_the_same_steps():
    block, x = Block().eval(), random(3, 4, 6).float()
    layer = Equilibrium(block, steps=3, adjoint=Reversible()).eval()
    with torch.no_grad():
        expected = layer(x)
        program = torch.export.export(layer, (x,)).module()
        torch.testing.assert_close(program(x), expected)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)


def test_torch_func_of_a_layer():
    block, x = Block().double(), random(3, 4, 6)
    layer, parameters = Equilibrium(block, steps=4, adjoint=Reversible()), dict(block.named_parameters())

    def loss(parameters):
        given = {f"block.{name}": t for name, t in parameters.items()}
        value = torch.func.functional_call(layer, given, (x,), tie_weights=False)
        return (value * random(3, 4, 6, seed=7)).sum()

    got = torch.func.grad(loss)({name: t.detach() for name, t in parameters.items()})
    for pair in zip(got.values(), gradients(block, layer(x)), strict=True):
        assert relative_error(*pair) < 1e-10


# What is refused.


def test_the_damping_may_be_named_twice():
    start, weight, shift = problem_of()
    problem = FixedPointMap(tanh, weight, shift, event_ndim=2)
    values = [solve(problem, start, solver=budget(3, damping=d), adjoint=Reversible()).value for d in (0.0, 0.5)]
    assert torch.equal(*values)


def test_maps_that_hide_their_derivatives_are_refused():
    start, weight, _ = problem_of()
    problem = FixedPointMap(lambda z, w: (z @ w).detach(), weight, event_ndim=2)
    value = solve(problem, start, solver=budget(3), adjoint=Reversible()).value
    with pytest.raises(ValueError, match="must record the derivatives"):
        value.sum().backward()


def test_what_would_keep_steps_is_refused():
    start, weight, shift = problem_of()
    problem = FixedPointMap(tanh, weight, shift, event_ndim=2)
    for options in ({"trace": True}, {"callback": print}):
        (name,) = options
        with pytest.raises(ValueError, match=f"`{name}` must be left out with adjoint=Reversible"):
            solve(problem, start, solver=budget(3), adjoint=Reversible(), **options)
    value = solve(problem, start, solver=budget(3), adjoint=Reversible()).value
    with pytest.raises(RuntimeError, match="steps cannot run backwards with is_grads_batched=True"):
        torch.autograd.grad(value, weight, torch.ones(2, *value.shape), is_grads_batched=True)


def test_no_step_is_no_step():
    start, weight, shift = problem_of()
    solution = solve(FixedPointMap(tanh, weight, shift, event_ndim=2), start, solver=budget(0), adjoint=Reversible())
    assert solution.status.eq(Status.EXPLICIT).all()
    (gradient,) = torch.autograd.grad(solution.value.sum(), start)
    assert gradient.eq(1).all()


# Memory, and the integers.


def kept_bytes(steps):
    """Bytes that autograd keeps between the passes."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    layer = Equilibrium(Block(), steps=steps, adjoint=Reversible())
    x = torch.randn(16, 32, 6)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = layer(x)
    assert value.requires_grad
    return sum(sizes.values()) / value.numel()


def test_what_is_kept_grows_by_the_bits_that_are_dropped_alone():
    few, many = kept_bytes(8), kept_bytes(64)
    # Two integers and the start, x, and one word of dropped digits; 2 bits a step fill three.
    assert few < 8 * 3 + 4 * 2 + 4
    assert many - few == pytest.approx(16, abs=0.1)
    assert kept_bytes(256) - many == pytest.approx(6 * 8, abs=8.1)

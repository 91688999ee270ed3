"""`Equilibrium`: a block is iterated to its fixed point, whatever its state is made of, and the evidence is true."""

import copy
import io
import os
import pickle
import warnings

import pytest
import torch
from processes import spawn
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import implicit_attention as ia
from implicit_attention import Equilibrium, Status

TIGHT = ia.Anderson(rtol=1e-12, atol=1e-12)


class Block(nn.Module):
    """Mixes tokens and channels; contracts."""

    def __init__(self, dim=6, dropout=0.0):
        super().__init__()
        self.mix, self.read = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, z, x, mask=None, scale=1.0):
        pooled = z.mean(-2, keepdim=True)
        if mask is not None:
            pooled = (z * mask[..., None]).sum(-2, keepdim=True) / mask.sum(-1)[..., None, None]
        return torch.tanh(0.4 * self.mix(self.drop(z)) + 0.3 * pooled + scale * self.read(x))


class TwoStreams(nn.Module):
    """A latent state z per token and an answer y per sample."""

    def __init__(self, dim=6):
        super().__init__()
        self.of_z, self.of_y, self.read = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, state, x):
        z, y = state
        z = torch.tanh(0.3 * self.of_z(z) + 0.2 * y[..., None, :] + self.read(x))
        return z, torch.tanh(0.3 * self.of_y(y) + 0.3 * z.mean(-2))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = TwoStreams()

    def forward(self, state, x):
        z, y = self.inner((state["z"], state["y"]), x)
        return {"y": y, "z": z}


def made(block=None, **options):
    torch.manual_seed(0)
    layer = Equilibrium(Block() if block is None else block, **{"solver": TIGHT, **options}).double()
    return layer, torch.randn(3, 4, 6, dtype=torch.float64)


def unrolled(block, z, *args, steps=400):
    for _ in range(steps):
        z = block(z, *args)
    return z


def gradients(loss, layer, *inputs):
    return torch.autograd.grad(loss, [*layer.parameters(), *inputs])


def assert_close(left, right, atol=1e-8):
    torch.testing.assert_close([*left], [*right], atol=atol, rtol=0)


# What is returned.


def test_value_and_gradients_are_those_of_400_steps():
    layer, x = made()
    x.requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    z = layer(x, mask, 0.5)
    want = unrolled(layer.block, torch.zeros_like(x), x, mask, 0.5)
    assert_close([z], [want], atol=1e-11)
    assert_close(gradients(z.square().sum(), layer, x), gradients(want.square().sum(), layer, x))
    assert bool(layer.last_solve.converged.all())


def test_two_streams_are_solved_as_one_state():
    layer, x = made(TwoStreams(), start=(torch.zeros(1, 6), torch.zeros(6)))
    x.requires_grad_()
    (z, y), solution = layer(x, return_solution=True)
    want = unrolled(layer.block, (torch.zeros_like(x), x.new_zeros(3, 6)), x)
    assert_close((z, y), want, atol=1e-10)
    assert solution.value == (z, y)
    mapped = layer.block((z, y), x)
    change = torch.cat([(a - b).flatten(1) for a, b in zip(mapped, (z, y), strict=True)], 1)
    torch.testing.assert_close(solution.residual, change.norm(dim=1), atol=1e-14, rtol=1e-3)
    size = torch.cat([z.flatten(1), y], 1).norm(dim=1)
    torch.testing.assert_close(solution.relative_residual, solution.residual / size)
    assert "3 CONVERGED" in repr(solution)
    loss, wanted = (s[0].sum() + s[1].square().sum() for s in ((z, y), want))
    assert_close(gradients(loss, layer, x), gradients(wanted, layer, x))


def test_a_dict_is_a_state_in_any_order():
    layer, x = made(Named())
    start = {"z": torch.zeros_like(x), "y": x.new_zeros(3, 6)}
    found = layer(x, start=start)
    z, y = unrolled(layer.block.inner, (start["z"], start["y"]), x)
    assert_close((found["z"], found["y"]), (z, y), atol=1e-10)


def test_x_may_be_a_tuple_which_then_is_what_the_state_looks_like():
    class Pair(nn.Module):
        def forward(self, state, x):
            return 0.5 * state[1].cos() + x[0], 0.5 * state[0].sin() + x[1]

    layer = Equilibrium(Pair(), event_ndim=1, solver=TIGHT)
    x = (torch.randn(5, 2, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)[:, :2])
    found = layer(x)
    assert_close(found, unrolled(layer.block, (x[0] * 0, x[1] * 0), x), atol=1e-10)


def test_one_sample_alone_and_several_axes_of_samples():
    layer, x = made(event_ndim=2)
    every = layer(x.expand(2, 3, 4, 6))
    assert layer.last_solve.status.shape == (2, 3)
    assert_close([layer(x[1]), every[1]], [every[0, 1], every[0]], atol=1e-11)
    assert layer(x[:0]).shape == (0, 4, 6)


# Where it starts.


@pytest.mark.parametrize(
    ("start", "first"),
    [
        ("zeros", lambda x: x * 0),
        ("input", lambda x: x),
        (torch.full((1, 6), 0.5), lambda x: torch.full_like(x, 0.5)),
        (torch.full((3, 4, 6), 0.25), lambda x: torch.full_like(x, 0.25)),
    ],
)
def test_start_is_what_no_steps_return(start, first):
    layer, x = made(start=start)
    assert_close([layer(x, steps=0)], [first(x)], atol=0)
    assert layer.last_solve.status.tolist() == [Status.EXPLICIT] * 3
    other, x = made()
    assert_close([other(x, steps=0, start=start if isinstance(start, str) else start.double())], [first(x)], atol=0)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_no_steps_return_no_tensor_of_the_caller(mode):
    layer, x = made()
    start = torch.randn_like(x).requires_grad_()
    with mode():
        z = layer(x, steps=0, start=start)
        assert torch.equal(z, start)
        z.mul_(2.0)
    assert not torch.equal(z, start)
    assert z.requires_grad == (mode is torch.enable_grad)


def test_random_starts_differ_and_lead_to_one_answer():
    layer, x = made(start="random")
    first, second = layer(x, steps=0), layer(x, steps=0)
    assert float((first - second).detach().abs().min()) > 0
    assert_close([layer(x)], [layer(x)], atol=1e-10)


def test_a_state_that_was_returned_is_a_warm_start():
    layer, x = made(TwoStreams(), start=(torch.zeros(1, 6), torch.zeros(6)))
    state = layer(x)
    layer(x, start=state)
    assert layer.last_solve.num_evals.tolist() == [1, 1, 1]


def test_a_learned_start_learns_from_steps():
    layer, x = made(start=nn.Parameter(torch.zeros(1, 6)))
    assert [name for name, _ in layer.named_parameters() if "start" in name] == ["start.0"]
    layer(x, steps=2).sum().backward()
    assert float(layer.start.get_parameter("0").grad.abs().min()) > 0


# Steps.


def test_steps_are_a_loop_written_by_hand_bit_for_bit():
    layer, x = made()
    x.requires_grad_()
    z = layer(x, steps=7)
    want = unrolled(layer.block, torch.zeros_like(x), x, steps=7)
    assert_close([z], [want], atol=0)
    assert_close(gradients(z.sum(), layer, x), gradients(want.sum(), layer, x), atol=0)
    assert layer.last_solve.status.tolist() == [Status.BUDGET] * 3
    assert bool(layer.last_solve.residual.isnan().all())
    assert "nan" not in repr(layer.last_solve)


def test_the_residual_of_steps_is_measured_at_what_is_returned():
    layer, x = made()
    z, solution = layer(x, steps=7, return_solution=True)
    change = layer.block(z, x) - z
    torch.testing.assert_close(solution.residual, change.flatten(1).norm(dim=1))
    assert solution.num_evals.tolist() == [8] * 3
    assert solution.value is z


def test_steps_are_damped_as_the_solver_says():
    layer, x = made(solver=ia.Picard(damping=0.25))
    want = torch.zeros_like(x)
    for _ in range(5):
        want = 0.75 * layer.block(want, x) + 0.25 * want
    assert_close([layer(x, steps=5)], [want], atol=1e-15)
    other, x = made()
    assert_close([other(x, steps=5, solver=ia.Picard(damping=0.25))], [want], atol=1e-15)


def test_a_range_of_steps_draws_a_number_in_training_and_solves_in_evaluation():
    layer, x = made(steps=range(2, 9, 3))
    counts = set()
    for _ in range(30):
        layer(x)
        counts.add(int(layer.last_solve.num_steps[0]))
    assert counts == {2, 5, 8}
    layer.eval()(x)
    assert bool(layer.last_solve.converged.all())


def test_a_call_that_names_a_solver_solves_a_layer_of_fixed_steps():
    layer, x = made(steps=3)
    layer(x)
    assert layer.last_solve.status.tolist() == [Status.BUDGET] * 3
    layer(x, solver=TIGHT)
    assert bool(layer.last_solve.converged.all())


def test_segments_continue_from_the_detached_state():
    layer, x = made()
    states = list(layer.segments(x, count=3, steps=2))
    assert_close(states[-1:], [layer(x, steps=6)], atol=0)
    carried = layer(x, steps=4).detach()
    want = gradients(layer(x, steps=2, start=carried).sum(), layer)
    assert_close(gradients(states[-1].sum(), layer), want, atol=0)


def test_segments_are_moved_by_noise_and_damped():
    layer, x = made()
    torch.manual_seed(1)
    states = list(layer.segments(x, count=2, steps=1, noise=0.1, solver=ia.Picard(damping=0.5)))
    torch.manual_seed(1)
    first = 0.5 * layer.block(x * 0, x)
    second = first + 0.1 * torch.randn_like(first)
    assert_close(states, [first, 0.5 * (layer.block(second, x) + second)], atol=1e-15)


# Random numbers.


@pytest.mark.parametrize("known", [False, True])
def test_dropout_holds_its_mask_through_a_solve_and_its_gradient(known):
    layer, x = made(Block(dropout=0.3))
    x.requires_grad_()
    if known:
        layer(x)
    torch.manual_seed(3)
    z = layer(x)
    assert bool(layer.last_solve.converged.all())
    other = layer(x)
    assert float((z - other).detach().abs().max()) > 1e-2, "the next call draws another mask"
    found = gradients(z.square().sum(), layer, x)
    gradients(other.sum(), layer, x)
    torch.manual_seed(3)
    want = layer(x, steps=400)
    assert_close([z], [want], atol=1e-10)
    assert_close(found, gradients(want.square().sum(), layer, x))


def test_evaluation_mode_holds_nothing_and_leaves_the_generator_alone():
    layer, x = made(Block(dropout=0.3))
    layer.eval()
    before = torch.get_rng_state()
    layer(x)
    assert torch.equal(before, torch.get_rng_state())


def test_a_call_advances_the_generator_once():
    layer, x = made(Block(dropout=0.3))
    torch.manual_seed(5)
    layer(x)
    after = torch.rand(3)
    torch.manual_seed(5)
    layer.block(x * 0, x)
    assert torch.equal(after, torch.rand(3))


# Bad input.


def halved(block):
    block.mix = nn.Linear(6, 6).double()


def renewed(block):
    block.read.weight = nn.Parameter(0.5 * block.read.weight.detach())


def parametrised(block):
    parametrizations.weight_norm(block.mix)
    with torch.no_grad():
        block.mix.parametrizations.weight.original0.mul_(0.5)


def hooked(block):
    block.read.register_forward_hook(lambda module, inputs, output: 0.5 * output)


def trained(block):
    block.drop.p = 0.5
    block.train()


def moved(block):
    for parameter in block.parameters():
        parameter.data = 0.5 * parameter.data


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("change", [halved, renewed, parametrised, hooked, trained, moved])
def test_a_block_that_changes_between_calls_is_read_anew(change, record):
    layer, x = made()
    x = x[:1]
    with torch.set_grad_enabled(record):
        before = layer(x)
        change(layer.block)
        torch.manual_seed(3)
        after = layer(x)
        torch.manual_seed(3)
        expected = Equilibrium(layer.block, solver=TIGHT)(x)
    assert torch.equal(after, expected)
    assert not torch.allclose(after, before)
    assert after.requires_grad == record


def test_parameters_of_another_dtype_are_refused_at_any_call():
    layer, x = made()
    with torch.no_grad():
        layer(x)
        layer.block.read.weight.data = layer.block.read.weight.data.float()
        with pytest.raises(ValueError, match=r"`function.block.read.weight` must have the dtype of"):
            layer(x)


class Keeps(nn.Module):
    """Keeps what it reads of x at its first evaluation."""

    def __init__(self):
        super().__init__()
        self.mix, self.read = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, z, x):
        if not hasattr(self, "kept"):
            self.kept = self.read(x)
        return torch.tanh(0.3 * self.mix(z) + self.kept)


def test_what_a_block_keeps_in_a_solve_is_not_read_by_its_backward_pass():
    layer, x = made(Keeps())
    found = gradients(layer(x).square().sum(), layer)
    block = copy.deepcopy(layer.block)
    expected = torch.autograd.grad(unrolled(block, torch.zeros_like(x), x).square().sum(), [*block.parameters()])
    assert_close(found, expected)


class Notes(nn.Module):
    def __init__(self):
        super().__init__()
        self.notes = []

    def forward(self, z, x):
        self.notes.append(self)
        return 0.5 * z.sin() + x


def test_a_solve_that_nobody_differentiates_copies_no_module():
    layer, x = made(Notes())
    layer.eval()(x)
    layer.block.notes.clear()
    layer(x)
    assert layer.block.notes
    assert all(seen is layer.block for seen in layer.block.notes)


@pytest.mark.parametrize("steps", [-1, 1.5, range(-1, 3), range(3, 3), True, "many"])
def test_steps_that_are_no_number_are_refused(steps):
    layer, x = made()
    with pytest.raises((ValueError, TypeError), match="steps"):
        layer(x, steps=steps)
    with pytest.raises((ValueError, TypeError), match="steps"):
        made(steps=steps)


def test_a_block_must_be_a_module_and_x_say_what_a_state_is():
    with pytest.raises(TypeError, match="must be an nn"):
        Equilibrium(torch.tanh)
    layer, _ = made()
    with pytest.raises(TypeError, match="pass the state to start from"):
        layer(torch.zeros(3, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="count"):
        next(layer.segments(torch.zeros(3, 4, 6), count=0))


@pytest.mark.parametrize("steps", [None, 5])
def test_a_sample_that_is_not_finite_reaches_no_other(steps):
    layer, x = made()
    want = layer(x, steps=steps)
    bad = x.clone()
    bad[1, 0, 0] = torch.nan
    with pytest.warns(ia.ConvergenceWarning, match="1 of 3 problems, first at 1"):
        z = layer(bad, steps=steps)
    assert layer.last_solve.status.tolist()[1] == Status.NONFINITE
    assert bool(z[1].isnan().all())
    assert_close([z[0], z[2]], [want[0], want[2]], atol=1e-10)
    found = gradients(z[::2].square().sum(), layer)
    assert_close(found, gradients(want[::2].square().sum(), layer))


def test_a_sample_without_an_answer_is_told_with_the_remedy():
    layer, x = made(solver=ia.Picard(rtol=1e-9, max_steps=3))
    with pytest.warns(ia.ConvergenceWarning, match="3 of 3 problems.*raise max_steps"):
        layer(x).sum().backward()
    assert layer.last_solve.status.tolist() == [Status.MAX_STEPS] * 3
    with pytest.raises(ia.ConvergenceError):
        layer(x, on_failure="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x, on_failure="ignore")


# A module among modules.


def test_copies_pickles_and_state_dicts_keep_the_weights_and_not_the_report():
    layer, x = made(TwoStreams(), start=(torch.zeros(1, 6), torch.zeros(6)))
    want = layer(x)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh, _ = made(TwoStreams(), start=(torch.ones(1, 6), torch.ones(6)))
    torch.manual_seed(9)
    for p in fresh.parameters():
        nn.init.normal_(p)
    fresh.load_state_dict(torch.load(file))
    for other in (*copies, fresh):
        assert other.last_solve is None
        assert_close(other(x), want, atol=0)


def test_samples_of_a_block_that_draws_end_at_different_times_at_the_first_call():
    layer, x = made(Block(dropout=0.5))
    layer.train()
    torch.manual_seed(3)
    with torch.no_grad():
        assert layer(x).isfinite().all()
    steps = layer.last_solve.num_steps
    assert bool(layer.last_solve.converged.all())
    assert len(steps.unique()) > 1, steps


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("steps", [None, 3, range(2, 9)])
def test_checkpointing_gives_the_same_gradients(dropout, reentrant, steps):
    layer, x = made(Block(dropout=dropout), steps=steps)
    x.requires_grad_()
    torch.manual_seed(6)
    want = gradients(layer(x).square().sum(), layer, x)
    torch.manual_seed(6)
    checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    assert_close([p.grad for p in (*layer.parameters(), x)], want, atol=1e-12)


@pytest.mark.parametrize("steps", [None, 4])
def test_autocast_runs_the_block_in_its_precision_and_keeps_the_state_wide(steps):
    seen = []

    class Watched(Block):
        def forward(self, z, x):
            out = self.mix(z)
            seen.append((z.dtype, out.dtype))
            return torch.tanh(0.4 * out) + x

    torch.manual_seed(0)
    layer, x = Equilibrium(Watched(), solver=ia.Picard(rtol=1e-2)), torch.randn(3, 4, 6)
    want = layer(x, steps=steps)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        z = layer(x.bfloat16(), steps=steps)
        solution = layer(x, steps=4, return_solution=True)[1]
        again = layer(x, steps=4)
    z.sum().backward()
    assert set(seen) == {(torch.float32, torch.bfloat16)}
    assert z.dtype == again.dtype == torch.float32
    assert bool(solution.residual.isfinite().all())
    torch.testing.assert_close(z, want, atol=0.05, rtol=0.05)
    assert float(layer.block.mix.weight.grad.abs().sum()) > 0


def test_a_residual_that_is_measured_first_leaves_a_graph_to_autocast():
    torch.manual_seed(0)
    layer, x = Equilibrium(Block()), torch.randn(3, 4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x, steps=0, return_solution=True)
        layer(x, steps=3).sum().backward()
    assert float(layer.block.mix.weight.grad.abs().sum()) > 0


def test_a_model_in_half_precision_is_solved_in_single():
    layer, x = made(solver=ia.Picard(rtol=1e-4))
    layer, x = layer.bfloat16(), x.bfloat16()
    z, solution = layer(x, return_solution=True)
    assert (z.dtype, solution.value.dtype) == (torch.bfloat16, torch.float32)
    assert bool(solution.converged.all())
    assert layer(x, steps=3).dtype == torch.bfloat16
    z.sum().backward()
    assert layer.block.mix.weight.grad.dtype == torch.bfloat16


class Mixed(nn.Module):
    """Weights of float32 and bfloat16 and a table of float64, all cast to the dtype `inside`, or that of the state."""

    def __init__(self, inside=None, returned=None):
        super().__init__()
        self.mix, self.inside, self.returned = nn.Linear(6, 6), inside, returned
        self.narrow, self.table = nn.Linear(6, 6).bfloat16(), nn.Parameter(torch.randn(6, dtype=torch.float64))

    def forward(self, z, x):
        dtype = self.inside or z.dtype
        h = z.to(dtype) @ self.mix.weight.to(dtype) + z.to(dtype) @ self.narrow.weight.to(dtype)
        return torch.tanh(0.1 * h + self.table.to(dtype) + x.to(dtype)).to(self.returned or z.dtype)


def of_kind(dtype, inside=None, **options):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    return Equilibrium(Mixed(inside), **options), x.to(dtype)


@pytest.mark.parametrize("inside", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_solve_takes_the_dtypes_of_its_loop(dtype, inside):
    rounding = torch.finfo(inside or dtype).eps
    # A finer tolerance than the rounding of all products may not be reached.
    layer, x = of_kind(dtype, inside, solver=ia.Picard(rtol=rounding if inside else 1e-6))
    found = []
    for options in ({}, {"steps": 40}, {"adjoint": ia.Unrolled()}, {"adjoint": ia.Phantom(20)}):
        z = layer(x, **options)
        grads = torch.autograd.grad(z.double().square().sum(), (layer.block.mix.weight, layer.block.table))
        assert (z.dtype, grads[0].dtype, grads[1].dtype) == (dtype, torch.float32, torch.float64)
        found.append((z.double(), *(grad.double() for grad in grads)))
    for others in found[1:]:
        for own, other in zip(found[0], others, strict=True):
            assert float((own - other).detach().norm() / other.detach().norm()) < max(8 * rounding, 1e-4)


def test_operations_that_half_precision_lacks_are_made_in_single():
    class Inverting(Block):
        def forward(self, z, x):
            return super().forward(z, x) @ torch.linalg.inv(torch.eye(6).to(z))

    layer, x = made(Inverting(), solver=ia.Picard(rtol=1e-3))
    want = layer(x)
    torch.testing.assert_close(layer.bfloat16()(x.bfloat16()).double(), want, rtol=2e-2, atol=2e-2)


class Tabled(Block):
    """Keeps a table in the dtype of its first state, and fails until it is ready."""

    ready, error = True, RuntimeError("out of memory")

    def __init__(self):
        super().__init__()
        self.tables = {}

    def forward(self, z, x):
        if not self.ready:
            raise self.error
        table = self.tables.setdefault(6, torch.linspace(0.5, 1, 6).to(z.dtype))
        return torch.tanh(torch.lerp(0.3 * table * super().forward(z, x).to(z.dtype), x, 0.2))


def test_a_solve_in_single_precision_reads_no_table_of_half():
    layer, x = made(Tabled(), solver=ia.Picard(rtol=1e-6))
    layer, x = layer.bfloat16(), x.bfloat16()
    same = copy.deepcopy(layer).float()
    want = same(x.float())
    assert torch.equal(layer(x), want.bfloat16())
    assert layer.block.tables[6].dtype == torch.float32


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ia.ConvergenceError("use a wider dtype")])
def test_a_first_call_that_fails_leaves_the_next_ones_as_they_are(error):
    layer, x = made(Tabled(), solver=ia.Picard(rtol=1e-6))
    layer, x = layer.bfloat16(), x.bfloat16()
    want = copy.deepcopy(layer)(x)
    layer.block.ready, layer.block.error = False, error
    with pytest.raises(type(error), match=str(error)):
        layer(x)
    layer.block.ready = True
    assert torch.equal(layer(x), want)
    assert bool(layer.last_solve.converged.all())


def test_under_autocast_what_a_block_reads_is_as_wide_as_its_state():
    layer, x = made(Tabled(), solver=ia.Picard(rtol=1e-2))
    with torch.autocast("cpu", torch.bfloat16):
        for steps in (None, 3):
            assert layer.float()(x.bfloat16(), steps=steps).dtype == torch.float32


class Own(nn.Module):
    """A bfloat16 layer beside a float32 table, which takes and returns bfloat16 alone."""

    def __init__(self):
        super().__init__()
        self.mix, self.table = nn.Linear(6, 6).bfloat16(), nn.Parameter(torch.randn(6))

    def forward(self, z, x):
        assert z.dtype == x.dtype == torch.bfloat16
        return torch.tanh(0.3 * self.mix((z.float() + self.table).bfloat16()) + x)


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("steps", [None, range(30, 31)])
def test_a_block_that_takes_its_own_dtypes_alone_is_solved_in_them(pure, steps):
    torch.manual_seed(0)
    layer = Equilibrium(Own(), solver=ia.Picard(rtol=2e-2), steps=steps, confirm=1)
    if pure:
        layer.bfloat16()
    x = torch.randn(3, 4, 6).bfloat16()
    looped = layer(x, steps=30, confirm=0)
    for mode in (True, False, False):
        layer.train(mode)
        z = layer(x)
        torch.testing.assert_close(z, looped, rtol=2e-2, atol=2e-2)
        found, expected = (
            torch.autograd.grad(state.float().square().sum(), tuple(layer.parameters()), retain_graph=True)
            for state in (z, looped)
        )
        for grad, other in zip(found, expected, strict=True):
            assert float((grad - other).float().norm() / other.float().norm()) < 0.05
    assert layer.last_solve.confirmed.all()


def test_a_half_state_beside_single_ones_is_solved_in_single():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(6, 6)

        def forward(self, state, x):
            a, b = state
            new = torch.tanh(0.3 * self.mix(a.float()).to(a.dtype) + 0.2 * b.to(a.dtype) + x.to(a.dtype))
            return new, torch.tanh(0.3 * b + 0.3 * a.to(b.dtype))

    torch.manual_seed(0)
    layer, x = Equilibrium(Pair(), solver=ia.Picard(rtol=1e-4)), torch.randn(3, 4, 6, dtype=torch.float64)
    for a, b in ((torch.float64, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.float64)):
        start = (torch.zeros(3, 4, 6, dtype=a), torch.zeros(3, 4, 6, dtype=b))
        state, solution = layer(x, start=start, return_solution=True)
        looped = layer(x, start=state, steps=20)
        assert [t.dtype for t in (*state, *looped)] == [a, b, a, b]
        assert solution.converged.all()
        assert solution.packed.dtype == torch.promote_types(torch.promote_types(a, b), torch.float32)
        for own, other in zip(state, looped, strict=True):
            torch.testing.assert_close(own.double(), other.double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_block_of_one_dtype_refuses_others_and_names_them(dtype, steps):
    torch.manual_seed(0)
    layer, x = Equilibrium(Block()), torch.randn(3, 4, 6)
    with pytest.raises(ValueError, match=r"^`inputs\[0\]` must have the dtype of `function.block.mix.weight`"):
        layer(x.to(dtype), steps=steps)
    with pytest.raises(ValueError, match=rf"^`initial` must have the dtype of .* got {dtype}; convert it"):
        layer(x, start=torch.zeros(3, 4, 6, dtype=dtype), steps=steps)


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_a_block_that_returns_another_dtype_is_refused_by_solves_and_loops(weights, steps):
    layer, x = of_kind(torch.bfloat16)
    layer.block.returned = torch.float32
    layer.to(weights)
    if weights == torch.bfloat16 and steps is None:
        # In a solve all of it is float32.
        assert layer(x).dtype == torch.bfloat16
        assert bool(layer.last_solve.converged.all())
        return
    with pytest.raises(ValueError, match=r"`block Mixed` must return the dtype of its state \(torch.bfloat16\)"):
        layer(x, steps=steps)


# Which tensors belong to a sample, and samples that leave the work.


class Counting(Block):
    """Notes how many samples it is called with."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def forward(self, z, x, *args):
        self.counts.append(len(z))
        return super().forward(z, x, *args)


def mixed(layer, samples=12, tokens=4):
    """Most samples start where they end."""
    x = torch.randn(samples, tokens, 6, dtype=torch.float64)
    start = layer(x).detach()
    start[-2:] = 5.0
    layer.block.counts.clear()
    return x, start


@pytest.mark.parametrize(
    ("args", "leave"),
    [
        ((), True),
        ((torch.ones(12, 4, dtype=torch.bool),), True),
        ((torch.ones(4, dtype=torch.bool), torch.ones(6, dtype=torch.float64)), True),
        ((None, torch.ones(12, 1, 1, dtype=torch.float64)), True),
        ((None, ia.PerSample(torch.ones(12, 1, 1, dtype=torch.float64))), True),
        ((None, ia.Shared(torch.ones(12, 1, 1, dtype=torch.float64))), False),
    ],
)
def test_samples_that_are_done_leave_the_work(args, leave):
    layer, _ = made(Counting())
    x, start = mixed(layer)
    z = layer(x, *args, start=start)
    assert bool(layer.last_solve.converged.all())
    # One call tries whether they may.
    assert (layer.block.counts.count(2) > 1) == leave
    plain = tuple(a.value if isinstance(a, ia.PerSample | ia.Shared) else a for a in args)
    assert_close([z], [unrolled(layer.block, start, x, *plain)], atol=1e-10)


def test_with_as_many_samples_as_tokens_values_are_right_whatever_an_argument_numbers():
    class Pairs(Counting):
        def forward(self, z, x, bias):
            self.counts.append(len(z))
            return torch.tanh(0.3 * self.mix(bias @ z) + self.read(x))

    layer, _ = made(Pairs())
    bias = torch.randn(5, 5, dtype=torch.float64).softmax(-1).requires_grad_()
    x = torch.randn(5, 5, 6, dtype=torch.float64)
    x[3, 0] = torch.nan
    good = [0, 1, 2, 4]
    for argument in (bias, ia.Shared(bias)):
        z = layer(x, argument, on_failure="ignore")[good]
        want = unrolled(layer.block, x[good] * 0, x[good], bias)
        assert_close([z], [want], atol=1e-10)
        assert_close(gradients(z.square().sum(), layer, bias), gradients(want.square().sum(), layer, bias))


def test_dropout_keeps_all_samples_to_the_end():
    layer, _ = made(Counting())
    layer.block.drop.p = 0.3
    x, start = mixed(layer)
    layer(x, start=start)
    assert set(layer.block.counts) == {12}


# Random numbers that cannot be held, compilers, transforms, several processes.


@pytest.mark.parametrize("wrap", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_computed_weights_are_solved_and_differentiated(wrap):
    block = Block()
    wrap(block.mix)
    layer, x = made(block)
    layer(x).sum().backward()
    assert bool(layer.last_solve.converged.all())
    layer.eval()
    found = gradients(layer(x).square().sum(), layer)
    assert_close(found, gradients(layer(x, steps=400).square().sum(), layer))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("steps", [None, 3, range(4, 5)])
def test_a_compiled_layer_gives_the_same_values(steps, training):
    layer, x = made()
    layer.train(training)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=steps == 3 and not training)
    want = layer(x, steps=steps)
    report = layer.last_solve
    assert_close([compiled(x, steps=steps)], [want], atol=0)
    assert layer.last_solve.status.tolist() == report.status.tolist()
    assert layer.last_solve.num_steps.tolist() == report.num_steps.tolist()


def test_transforms_of_torch_func():
    # Inside of vmap a state is that of one sample.
    layer, x = made(event_ndim=2)
    weights = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(weights, x, **options):
        return torch.func.functional_call(layer, weights, (x,), options).square().sum()

    want = gradients(layer(x).square().sum(), layer)
    assert_close(torch.func.grad(loss)(weights, x).values(), want, atol=1e-9)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    assert_close([g.sum(0) for g in each(weights, x).values()], want, atol=1e-9)
    each = torch.func.vmap(torch.func.grad(lambda w, x: loss(w, x, steps=5)), in_dims=(None, 0))
    want = gradients(layer(x, steps=5).square().sum(), layer)
    assert_close([g.sum(0) for g in each(weights, x).values()], want, atol=1e-9)


def test_second_derivatives():
    layer, x = made()
    x = x[:1, :2].clone().requires_grad_()
    assert torch.autograd.gradgradcheck(layer, x, atol=1e-5)


def test_what_fails_for_another_cause_than_its_start_keeps_its_error():
    layer, x = made()
    with pytest.raises(ia.ConvergenceError):
        layer(x, solver=ia.Picard(max_steps=1), start=x.clone(), on_failure="raise")
    with pytest.raises(TypeError):
        layer(x, "no mask", start=x.clone())


def work(rank, folder):
    layer, x = made(Block(dropout=0.2))
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=1)
    parallel, found = nn.parallel.DistributedDataParallel(layer), []
    for steps in (None, 4):
        torch.manual_seed(2)
        layer.zero_grad()
        parallel(x, steps=steps).square().sum().backward()
        theirs = [p.grad.clone() for p in layer.parameters()]
        torch.manual_seed(2)
        found.append((theirs, gradients(layer(x, steps=steps).square().sum(), layer)))
    torch.save(found, f"{folder}/found.pt")
    # Its end is torch's own: threads of gloo that free Python's objects wait for the lock of what waits for them.
    os._exit(0)


def test_parameters_are_used_through_the_module_as_data_parallel_training_needs(tmp_path):
    spawn(work, (str(tmp_path),), 1)
    found = torch.load(tmp_path / "found.pt")
    assert len(found) == 2
    for theirs, ours in found:
        assert_close(theirs, ours, atol=1e-10)


def test_an_implicit_gradient_where_a_sample_has_not_converged_is_told_of():
    layer, x = made(solver=ia.Picard(rtol=1e-10, max_steps=12))
    start = layer(x, solver=TIGHT).detach()
    start[1] += 1.0
    with pytest.warns(ia.ConvergenceWarning) as told:
        layer(x, start=start).sum().backward()
    assert layer.last_solve.status.tolist() == [Status.CONVERGED, Status.MAX_STEPS, Status.CONVERGED]
    assert any("1 of 3 problems, first at 1" in str(warning.message) for warning in told)

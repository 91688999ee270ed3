"""`Equilibrium(compiled=True)`: what eager solves answer, by graphs of several evaluations each."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import implicit_attention as ia
from implicit_attention import Equilibrium, Status
from implicit_attention.layers import compiled_graphs
from implicit_attention.linear import GMRES

TIGHT = ia.Picard(rtol=1e-12, atol=1e-12, max_steps=300)
ADJOINT = ia.Implicit(GMRES(rtol=1e-12))
EXACT = {"atol": 1e-9, "rtol": 0}


@pytest.fixture(autouse=True)
def graphs(request, monkeypatch):
    """The names of the graphs that were called, compiled by nobody, as that takes seconds, or as a test asks for."""
    chosen, compiler, calls = getattr(request, "param", None), torch.compile, []

    def compiled(function, **options):
        if options["backend"] == "inductor" and chosen != "inductor":
            function = compiler(function, backend=chosen, fullgraph=True, dynamic=False) if chosen else function
        else:
            function = compiler(function, **options)

        def called(*given):
            calls.append(getattr(function, "__name__", ""))
            return function(*given)

        return called

    monkeypatch.setattr(torch, "compile", compiled)
    return calls


traced = pytest.mark.parametrize("graphs", ["eager"], indirect=True)


class Block(nn.Module):
    """Mixes tokens and channels; contracts, each sample as fast as its `scale` is small."""

    def __init__(self, dim=6, dropout=0.0):
        super().__init__()
        self.mix, self.read, self.norm = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, z, x, mask=None, scale=0.4):
        pooled = z.mean(-2, keepdim=True)
        if mask is not None:
            pooled = (z * mask[..., None]).sum(-2, keepdim=True) / mask.sum(-1)[..., None, None]
        return torch.tanh(scale * self.mix(self.drop(z)) + 0.3 * pooled + self.norm(self.read(x)))


class Streams(nn.Module):
    """A latent state per token and an answer per sample, in a dict."""

    def __init__(self, dim=6):
        super().__init__()
        self.of_z, self.of_y, self.read = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, state, x):
        z, y = state["z"], state["y"]
        z = torch.tanh(0.3 * self.of_z(z) + 0.2 * y[..., None, :] + self.read(x))
        return {"y": torch.tanh(0.3 * self.of_y(y) + 0.3 * z.mean(-2)), "z": z}


def pair(block=None, dtype=torch.float64, **options):
    """The same layer, eager and compiled."""
    torch.manual_seed(0)
    block = (Block() if block is None else block).to(dtype)
    given = {"solver": TIGHT, "adjoint": ADJOINT, **options}
    return Equilibrium(block, **given).to(dtype), Equilibrium(block, compiled=True, **given).to(dtype)


def inputs(batch=5, dtype=torch.float64):
    return torch.randn(batch, 4, 6, dtype=dtype, generator=torch.Generator().manual_seed(1))


def alike(left, right):
    torch.testing.assert_close([*left], [*right], **EXACT)


def trained(layer, *given):
    """A state, and the gradients of the sum of its squares."""
    z = layer(*given)
    return [z, *gradients(layer, z.square().sum())]


def gradients(layer, loss, *more):
    return torch.autograd.grad(loss, [*layer.parameters(), *more])


def same_evidence(left, right):
    for name in ("status", "num_steps", "num_evals"):
        assert torch.equal(getattr(left.last_solve, name), getattr(right.last_solve, name)), name
    torch.testing.assert_close(
        right.last_solve.residual, left.last_solve.residual, rtol=1e-3, atol=1e-14, equal_nan=True
    )


# The same answers.


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("rtol", [1e-2, 1e-8])
def test_states_counts_and_gradients_are_those_of_eager_calls(damping, rtol, graphs):
    eager, compiled = pair(solver=ia.Picard(rtol=rtol, damping=damping))
    x, scale = inputs().requires_grad_(), torch.tensor([0.1, 0.2, 0.4, 0.7, 0.9], dtype=torch.float64).reshape(5, 1, 1)
    scale.requires_grad_()
    wanted = None
    for layer in (eager, compiled, compiled):
        z = layer(x, None, scale)
        found = (z, *gradients(layer, z.square().sum(), x, scale))
        wanted = found if wanted is None else wanted
        alike(found, wanted)
        same_evidence(eager, layer)
    assert set(graphs) == {"evaluations"}


@pytest.mark.parametrize("rtol", [1e-3, 1e-12])
def test_the_evidence_of_a_backward_solve_is_that_of_the_loop(rtol):
    layers, found = pair(adjoint=ia.Implicit(GMRES(rtol=rtol))), []
    scale = torch.tensor([0.1, 0.2, 0.4, 0.7, 0.9], dtype=torch.float64).reshape(5, 1, 1)
    for layer in layers:
        z, solution = layer(inputs(), None, scale, return_solution=True)
        z.square().sum().backward()
        found.append(solution.adjoint)
    eager, compiled = found
    assert compiled.status.tolist() == [Status.CONVERGED] * 5
    assert compiled.num_steps.tolist() == eager.num_steps.tolist()
    assert len(set(eager.num_steps.tolist())) > 1
    assert bool((compiled.residual <= compiled.tolerance).all())
    torch.testing.assert_close(compiled.tolerance, eager.tolerance)
    torch.testing.assert_close(compiled.gradient_error, eager.gradient_error, rtol=1e-2, atol=1e-14)


@pytest.mark.parametrize("budget", [0, 1, 5, 11])
def test_a_budget_is_never_exceeded(budget):
    for solver in (ia.Picard(rtol=1e-13, max_steps=budget), ia.Picard(rtol=0, atol=0, max_steps=budget)):
        eager, compiled = pair(solver=solver, on_failure="ignore")
        with torch.no_grad():
            alike([compiled(inputs())], [eager(inputs())])
            assert len(sizes_of(compiled, inputs())) == budget + 1
            same_evidence(eager, compiled)
            start = torch.zeros_like(inputs())
            assert compiled(inputs(), start=start).data_ptr() != start.data_ptr()


def sizes_of(layer, *given):
    """How many samples each evaluation of a further call had."""
    sizes = []
    hook = layer.block.register_forward_pre_hook(lambda block, given: sizes.append(len(given[0])))
    layer(*given)
    hook.remove()
    return sizes


def test_what_diverges_or_reads_nan_stays_in_its_sample():
    class Squares(nn.Module):
        def forward(self, z, x):
            return z.square() + x

    eager, compiled = pair(Squares(), solver=ia.Picard(rtol=1e-10, max_steps=60), on_failure="ignore", start="input")
    x = torch.full((5, 4, 6), 0.1, dtype=torch.float64)
    x[1], x[2, 0, 0], x[3] = 3.0, torch.nan, 0.2499
    for layer in (eager, compiled):
        torch.testing.assert_close(layer(x), eager(x), **EXACT, equal_nan=True)
    same_evidence(eager, compiled)
    codes = [Status.CONVERGED, Status.DIVERGED, Status.NONFINITE, Status.MAX_STEPS, Status.CONVERGED]
    assert compiled.last_solve.status.tolist() == codes


def test_samples_of_tiny_and_huge_numbers_are_measured_as_in_eager_calls():
    class Scaled(nn.Module):
        def forward(self, z, x):
            return 0.5 * z.flip(-1) + x

    for damping in (0.0, 0.5):
        solver = ia.Picard(rtol=1e-4, atol=0, damping=damping)
        eager, compiled = pair(Scaled(), torch.float32, solver=solver)
        x = inputs(3, torch.float32) * torch.tensor([1e-25, 1.0, 1e25]).reshape(3, 1, 1)
        for layer in (eager, compiled):
            torch.testing.assert_close(layer(x), eager(x), rtol=1e-5, atol=0)
        same_evidence(eager, compiled)


def test_settled_samples_leave_the_work_in_few_sizes():
    eager, compiled = pair(solver=ia.Picard(rtol=1e-10, max_steps=400))
    x, scale = inputs(12), torch.full((12, 1, 1), 0.05, dtype=torch.float64)
    scale[5], scale[2], scale[9] = 0.95, 0.95, 0.93
    with torch.no_grad():
        alike([compiled(x, None, scale)], [eager(x, None, scale)])
        same_evidence(eager, compiled)
        sizes = sizes_of(compiled, x, None, scale)
    # Three are left until the end, when all are judged.
    assert sizes[-2:] == [4, 12]
    assert set(sizes) <= {12, 8, 4}


def test_the_next_solve_looks_when_the_last_one_was_done():
    _, compiled = pair(solver=ia.Picard(rtol=1e-2))
    with torch.no_grad():
        compiled(inputs())
        assert len(sizes_of(compiled, inputs())) == int(compiled.last_solve.num_evals.max()) > 2


def test_masks_tuples_of_states_and_axes_of_samples():
    eager, compiled = pair(Streams(), start={"z": torch.zeros(1, 6), "y": torch.zeros(6)}, event_ndim=2)
    for layer in (eager, compiled):
        state = layer(inputs())
        wanted = eager(inputs())
        alike(state.values(), wanted.values())
        alike(*(gradients(eager, s["z"].sum() + s["y"].square().sum()) for s in (state, wanted)))
    eager, compiled = pair(event_ndim=2)
    x = inputs(6).reshape(2, 3, 4, 6)
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    mask[0, 1, 2:] = False
    torch.testing.assert_close(compiled(x, mask), eager(x, mask), **EXACT)
    same_evidence(eager, compiled)


@pytest.mark.slow
@traced
def test_half_precision_and_autocast_are_those_of_eager_calls():
    eager, compiled = pair(dtype=torch.bfloat16, solver=ia.Picard(rtol=1e-3), adjoint=None)
    x = inputs(dtype=torch.bfloat16)
    z = compiled(x)
    assert z.dtype == torch.bfloat16
    torch.testing.assert_close(z, eager(x))
    eager, compiled = pair(dtype=torch.float32, solver=ia.Picard(rtol=1e-2), adjoint=None)
    x = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        z, wanted = compiled(x), eager(x)
        found, known = (gradients(eager, s.square().sum()) for s in (z, wanted))
    torch.testing.assert_close(z, wanted)
    torch.testing.assert_close(found, known, rtol=0.1, atol=0.1)


# Training.


@traced
def test_weights_that_change_are_read_by_the_same_graphs():
    eager, compiled = pair(solver=ia.Picard(rtol=1e-4))
    optimizer, made = torch.optim.SGD(compiled.parameters(), lr=0.1), []
    for _ in range(4):
        optimizer.zero_grad()
        alike(trained(compiled, inputs()), trained(eager, inputs()))
        compiled(inputs()).square().sum().backward()
        optimizer.step()
        made.append(counters["stats"]["unique_graphs"])
    # After the first step the number of evaluations is known.
    assert made[1] == made[3]


def test_gradients_are_differences():
    _, compiled = pair()
    x = inputs(2)[:, :1].clone().requires_grad_()
    assert torch.autograd.gradcheck(compiled, (x,), atol=1e-6)
    assert torch.autograd.gradgradcheck(compiled, (x[:1].detach().requires_grad_(),), atol=1e-5)


def tied(block):
    block.read.weight = block.mix.weight
    block.norm.requires_grad_(False)


@pytest.mark.parametrize("change", [tied, lambda block: nn.utils.parametrizations.spectral_norm(block.mix)])
def test_shared_frozen_and_computed_weights(change):
    block = Block()
    change(block)
    layers = [layer.eval() for layer in pair(block)]
    wanted = [p for p in block.parameters() if p.requires_grad]
    alike(*(torch.autograd.grad(layer(inputs()).square().sum(), wanted) for layer in layers))


@pytest.mark.parametrize("power", [-90, 80])
def test_a_loss_in_other_units_changes_no_digit_of_a_gradient(power):
    _, compiled = pair(dtype=torch.float32, solver=ia.Picard(rtol=1e-5), adjoint=None)
    x = inputs(dtype=torch.float32)
    # The first call learns how many steps are needed.
    gradients(compiled, compiled(x).sum())
    scaled = gradients(compiled, compiled(x).sum() * 2.0**power)
    wanted = gradients(compiled, compiled(x).sum())
    for left, right in zip(scaled, wanted, strict=True):
        assert torch.equal(left, right * 2.0**power)


def test_samples_without_a_loss_and_a_loss_that_is_nan_stay_apart():
    eager, compiled = pair()
    found, known = [], []
    for layer, kept in ((compiled, found), (eager, known)):
        kept += gradients(layer, layer(inputs())[:2].square().sum())
    alike(found, known)
    x = inputs().requires_grad_()
    weights = torch.ones(5, 1, 1, dtype=torch.float64)
    weights[3] = torch.nan
    found, known = (torch.autograd.grad((layer(x) * weights).sum(), x)[0] for layer in (compiled, eager))
    torch.testing.assert_close(found, known, **EXACT, equal_nan=True)
    assert bool(found[:3].isfinite().all())


def test_a_block_whose_gradient_is_lost_raises_as_in_eager_calls():
    class Detached(Block):
        def forward(self, z, x):
            return super().forward(z.detach(), x)

    for layer in pair(Detached()):
        with pytest.raises(ValueError, match="must record the derivatives"):
            layer(inputs().requires_grad_()).sum().backward()


def test_other_adjoints_take_the_states_of_graphs():
    for adjoint in (ia.OneStep(), ia.Phantom(3), ia.Implicit(ia.linear.Neumann(rtol=1e-10))):
        eager, compiled = pair(adjoint=adjoint)
        alike(trained(compiled, inputs()), trained(eager, inputs()))


# Where no graph can stand for the block.


def test_a_block_that_draws_numbers_is_told_of_once_and_solved_eagerly(graphs):
    eager, compiled = pair(Block(dropout=0.2))
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="compiled.*draws random numbers.*eval"):
        z = compiled(inputs())
    torch.manual_seed(3)
    torch.testing.assert_close(z, eager(inputs()), **EXACT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(inputs()).sum().backward()
        assert not graphs
        compiled.eval()(inputs())
        assert graphs


def test_a_block_that_keeps_statistics_is_solved_eagerly_while_it_trains(graphs):
    class Statistics(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(6, momentum=0.5)

        def forward(self, z, x):
            return 0.2 * self.norm(z.flatten(0, 1)).reshape(z.shape) + x

    _, compiled = pair(Statistics(), on_failure="ignore")
    eager = Equilibrium(copy.deepcopy(compiled.block), solver=TIGHT, on_failure="ignore")
    with pytest.warns(UserWarning, match="compiled.*writes to its buffers"):
        compiled(inputs())
    eager(inputs())
    assert torch.equal(compiled.block.norm.running_mean, eager.block.norm.running_mean)
    assert not graphs
    torch.testing.assert_close(compiled.eval()(inputs()), eager.eval()(inputs()), **EXACT)
    assert graphs


def test_a_block_that_works_in_place_raises():
    class InPlace(nn.Module):
        def forward(self, z, x):
            return z.mul_(0.5) + x

    with pytest.raises(ValueError, match="in place"):
        pair(InPlace())[1](inputs())


@traced
def test_a_block_that_branches_on_numbers_raises_with_the_remedy():
    class Branches(nn.Module):
        def forward(self, z, x):
            return 0.5 * z + x if bool(z.sum() > 0) else 0.4 * z + x

    with pytest.raises(
        RuntimeError, match=r"(?s)`compiled` must be False where torch.compile cannot.*Branches.*leave `comp"
    ):
        pair(Branches())[1](inputs())


@traced
def test_numbers_that_change_from_call_to_call_are_named_in_the_error():
    _, compiled = pair(solver=ia.Picard(rtol=1e-2))

    def called():
        for i in range(12):
            compiled(inputs(), None, 0.1 + 0.01 * i)

    with pytest.raises(RuntimeError, match=r"(?s)`compiled` must be False.*pass numbers that change.*as tensors"):
        called()


def test_many_shapes_are_told_of():
    _, compiled = pair(solver=ia.Picard(rtol=1e-2))
    with torch.no_grad(), pytest.warns(UserWarning, match="made 100 graphs.*pad inputs to few shapes"):
        [compiled(inputs(batch)) for batch in range(1, 101)]


@pytest.mark.parametrize("graphs", ["inductor"], indirect=True)
def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    class InvalidCxxCompiler(RuntimeError):
        __module__ = "torch._inductor.exc"

    def failing(*_, **__):
        raise InvalidCxxCompiler("No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: failing)
    with pytest.raises(RuntimeError, match=r"`compiled` must be False.*no C\+\+ compiler.*install one"):
        pair()[1](inputs())


# Surroundings.


@pytest.mark.slow
@traced
def test_transforms_differentiate_what_graphs_solved(graphs):
    eager, compiled = pair()
    x = inputs(2)
    found, wanted = (torch.func.grad(lambda x, layer=layer: layer(x).square().sum())(x) for layer in (compiled, eager))
    torch.testing.assert_close(found, wanted, **EXACT)
    assert set(graphs) == {"evaluations"}
    graphs.clear()
    found, wanted = (torch.func.vmap(layer)(torch.stack([x, 2 * x])) for layer in (compiled, eager))
    torch.testing.assert_close(found, wanted, **EXACT)
    assert not graphs


def test_inference_mode():
    eager, compiled = pair()
    with torch.inference_mode():
        alike([compiled(inputs())], [eager(inputs())])


def test_copies_pickles_and_state_dicts_compute_the_same():
    eager, compiled = pair()
    compiled(inputs()).sum().backward()
    assert compiled.state_dict().keys() == eager.state_dict().keys()
    for twin in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert "compiled=True" in repr(twin)
        alike([twin(inputs())], [compiled(inputs())])


# Compilers of torch before 2.13 say so where they come upon the text of a dataclass.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@traced
def test_inside_a_compiled_model_the_layer_keeps_its_graphs(graphs):
    eager, compiled = pair(solver=ia.Picard(rtol=1e-4), adjoint=None)
    head = nn.Linear(6, 6).double()
    model = torch.compile(nn.Sequential(compiled, head), backend="eager")
    x = inputs()
    torch.testing.assert_close(model(x), head(eager(x)), **EXACT)
    model(x).sum().backward()
    assert graphs


@pytest.mark.parametrize("graphs", ["inductor"], indirect=True)
def test_a_gpu_records_each_graph_as_one_launch(monkeypatch):
    given, begun, memory = {}, [], torch.ones(2)
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.update(options) or function)
    compiled_graphs._compiled(lambda z: z, torch.device("cuda"))
    assert given == {"backend": "inductor", "fullgraph": True, "dynamic": False, "mode": "reduce-overhead"}
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    (answer,) = compiled_graphs._answer(lambda z: (z,), torch.device("cuda"), memory)
    assert begun
    assert answer.data_ptr() != memory.data_ptr()


class Converting(nn.Module):
    """float32 weights in the dtype of the state, or in bfloat16 alone."""

    def __init__(self, inside):
        super().__init__()
        self.mix, self.inside = nn.Linear(6, 6), inside

    def forward(self, z, x):
        dtype = self.inside or z.dtype
        return torch.tanh(0.3 * z.to(dtype) @ self.mix.weight.to(dtype) + x.to(dtype)).to(z.dtype)


@traced
@pytest.mark.parametrize("inside", [None, torch.bfloat16])
def test_graphs_hold_blocks_of_several_dtypes(graphs, inside):
    solver = ia.Picard(rtol=1e-2 if inside else 1e-4)
    eager, compiled = pair(Converting(inside), torch.float32, solver=solver, adjoint=None)
    x = torch.randn(3, 4, 6).bfloat16()
    answers = [layer(x) for layer in (eager, compiled)]
    grads = [
        torch.autograd.grad(z.float().square().sum(), layer.block.mix.weight)[0]
        for z, layer in zip(answers, (eager, compiled), strict=True)
    ]
    assert set(graphs) == {"evaluations"}
    assert {z.dtype for z in answers} == {torch.bfloat16}
    torch.testing.assert_close(*answers, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-2)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("graphs", ["inductor"], indirect=True)
def test_compiled_code_gives_the_numbers_of_eager_calls():
    eager, compiled = pair(solver=ia.Picard(rtol=1e-5))
    for _ in range(2):
        alike(trained(compiled, inputs()), trained(eager, inputs()))
    same_evidence(eager, compiled)

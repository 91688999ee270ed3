"""Cases for the step of users' maps: evaluations, statuses and states are those of the solvers' loop by torch."""

import collections
import functools
from unittest import mock

import torch
import triton_harness as harness
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton_harness import case, cases

from implicit_attention import Equilibrium, FixedPointMap, PerSample, Status, _solve, solve
from implicit_attention.kernels import trust
from implicit_attention.kernels.triton.step import TritonStep
from implicit_attention.solvers import Anderson, Picard

DOUBLE, SINGLE = torch.float64, torch.float32


def drawn(*shape, dtype=DOUBLE, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(harness.DEVICE, dtype)


def by_kernel(f, start, solver, **options):
    with mock.patch.object(_solve, "TRITON_DEVICES", (torch.device(harness.DEVICE).type,)), torch.no_grad():
        found = solve(f, start, solver=solver, on_failure="ignore", **options)
    assert found.route.step == "triton"
    return found


def agree(f, start, solver, rtol=1e-11, atol=1e-12):
    found = by_kernel(f, start, solver)
    with torch.no_grad():
        expected = solve(f, start, solver=solver, on_failure="ignore", impl="reference")
    for name in ("status", "num_steps", "num_evals"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
    for name in ("value", "residual", "tolerance"):
        assert_close(getattr(found, name), getattr(expected, name), rtol=rtol, atol=atol, equal_nan=True)
    return found


def contraction(lead, n, dtype=DOUBLE, size=0.6):
    """A map of rows, each of which leaves when it has finished."""
    weight, x = size / n**0.5 * drawn(n, n, dtype=dtype, seed=1), drawn(*lead, n, dtype=dtype)
    return FixedPointMap(lambda z, x: torch.tanh(z @ weight + x), PerSample(x), event_ndim=1), x


@cases(
    picard={"solver": Picard(), "lead": (), "n": 33},
    picard_in_parts={"solver": Picard(rtol=1e-9), "lead": (2, 3), "n": 1030},
    picard_fails={"solver": Picard(max_steps=3), "lead": (7,), "n": 5},
    anderson={"solver": Anderson(rtol=1e-8), "lead": (3,), "n": 33},
    anderson_in_parts={"solver": Anderson(rtol=1e-8), "lead": (2,), "n": 1500},
    history_1={"solver": Anderson(history=1), "lead": (2, 5), "n": 33},
    history_2={"solver": Anderson(history=2, rtol=1e-6), "lead": (12,), "n": 12},
    history_8={"solver": Anderson(history=8, plain_steps=1, rtol=1e-6), "lead": (7,), "n": 33},
    budget={"solver": Anderson(rtol=0, atol=0, max_steps=7), "lead": (3,), "n": 33},
    no_step={"solver": Anderson(max_steps=0), "lead": (3,), "n": 33},
)
def step_is_that_of_the_loop(solver, lead, n):
    f, x = contraction(lead, n)
    agree(f, torch.zeros_like(x), solver)


@cases(picard={"solver": Picard()}, anderson={"solver": Anderson(history=2)})
def step_in_single_precision(solver):
    f, x = contraction((6,), 1030, SINGLE)
    found = agree(f, torch.zeros_like(x), solver, rtol=1e-3, atol=1e-5)
    assert bool(found.converged.all())


@cases(picard={"solver": Picard()}, anderson={"solver": Anderson(rtol=1e-6)}, history_1={"solver": Anderson(history=1)})
def step_measures_states_of_any_size(solver):
    # Their squares are no float32: they overflow, or lose their digits.
    sizes = torch.tensor([1e-30, 1e-22, 1e20, 1e30, 0.0], dtype=SINGLE)[:, None]
    shift = (sizes * torch.linspace(1, 2, 20)).to(harness.DEVICE)
    f = FixedPointMap(lambda z, x: z / 2 + x, PerSample(shift), event_ndim=1)
    found = agree(f, torch.zeros_like(shift), type(solver)(**{**vars(solver), "atol": 0.0}), rtol=1e-3, atol=0)
    assert_close(found.value, 2 * shift, rtol=1e-3, atol=0)


@cases(picard={"solver": Picard(max_steps=30)}, anderson={"solver": Anderson(history=2, max_steps=30)})
def step_ends_rows_that_fail_alone(solver):
    rows = [[0.1, 0.2], [torch.nan, 0.1], [3.0, 0.1], [torch.inf, 0.0], [0.24, 0.1]]
    x = torch.tensor(rows, dtype=DOUBLE, device=harness.DEVICE)
    f = FixedPointMap(lambda z, x: z * z + x, PerSample(x), event_ndim=1)
    found = by_kernel(f, torch.zeros_like(x), solver)
    with torch.no_grad():
        expected = solve(f, torch.zeros_like(x), solver=solver, on_failure="ignore", impl="reference")
    assert found.status.tolist() == expected.status.tolist()
    assert (found.status == Status.NONFINITE).tolist() == [False, True, False, True, False]
    assert_close(found.value[[0, 4]], expected.value[[0, 4]], rtol=1e-11, atol=1e-12)
    assert found.value[[1, 3]].isnan().all()


@cases(picard={"solver": Picard(rtol=1e-8)}, anderson={"solver": Anderson(history=2, rtol=1e-8)})
def step_gives_a_row_the_bits_of_any_neighbours(solver):
    x = drawn(7, 33)
    others = torch.cat([x[:4], 20 * x[4:6], x[6:] * torch.nan])

    def solved(own):
        f = FixedPointMap(lambda z, x: (z.roll(1, -1) / 2 + x).clamp(-2, 2), PerSample(own), event_ndim=1)
        return by_kernel(f, torch.zeros_like(own), solver)

    one, two = solved(x), solved(others)
    for name in ("value", "status", "num_evals"):
        assert torch.equal(getattr(one, name)[:4], getattr(two, name)[:4]), name
    assert not torch.equal(one.num_evals, two.num_evals)


@case
def step_keeps_the_best_state_of_steps_that_grow():
    x = torch.tensor([[0.0, 1.0], [0.5, -1.0], [2.0, 0.3]], dtype=DOUBLE, device=harness.DEVICE)
    f = FixedPointMap(lambda z, x: 1.2 * z.flip(-1) + x, PerSample(x), event_ndim=1)
    for solver in (Picard(max_steps=6), Anderson(max_steps=6, plain_steps=7)):
        assert bool((agree(f, x.clone(), solver).num_steps < 6).all())


@cases(history_1={"history": 1}, history_2={"history": 2})
def step_rejects_a_residual_that_grows(history):
    x = torch.linspace(-2, 2, 14, dtype=DOUBLE, device=harness.DEVICE).reshape(7, 2)
    f = FixedPointMap(lambda z, x: x * torch.exp(-z.flip(-1)), PerSample(x), event_ndim=1)
    found = agree(f, torch.full_like(x, 0.1), Anderson(history=history, max_steps=14), rtol=1e-6, atol=1e-6)
    assert len(set(found.status.tolist())) > 1


@case
def step_shows_others_no_nan_of_a_row_that_has_ended():
    x = drawn(5, 3)
    x[1, 0] = torch.nan
    f = FixedPointMap(lambda z, x: x + 0.3 * z.mean(0), x, event_ndim=1)
    found = agree(f, torch.zeros_like(x), Picard(rtol=1e-9))
    assert found.converged.tolist() == [True, False, True, True, True]


@case
def step_takes_changes_that_depend_on_each_other():
    # Two numbers, of which three changes cannot be independent, and a rotation that plain steps do not solve.
    x = drawn(6, 2)
    turned = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=DOUBLE, device=harness.DEVICE)
    f = FixedPointMap(lambda z, x: z @ turned + x, PerSample(x), event_ndim=1)
    found = agree(f, torch.zeros_like(x), Anderson(history=5, rtol=1e-8), rtol=1e-6, atol=1e-6)
    assert bool(found.converged.all())
    assert_close(found.value @ (torch.eye(2, dtype=DOUBLE, device=harness.DEVICE) - turned), x, rtol=1e-6, atol=1e-6)


@case
def step_reads_states_and_images_of_any_strides():
    x = drawn(5, 4, 3)
    f = FixedPointMap(lambda z, x: (z.cos() / 2 + x).transpose(1, 2).contiguous().transpose(1, 2), x, event_ndim=2)
    agree(f, torch.zeros_like(x.transpose(1, 2).contiguous()).transpose(1, 2), Anderson(history=2))


@case
def step_of_a_block_has_its_gradient():
    block = torch.nn.Linear(8, 8, dtype=DOUBLE, device=harness.DEVICE)
    torch.nn.init.orthogonal_(block.weight, 0.5)
    layer, x = Equilibrium(Mixed(block), solver=Anderson(rtol=1e-10)), drawn(3, 4, 8)
    gradients = []
    for devices in ((torch.device(harness.DEVICE).type,), ()):
        with mock.patch.object(_solve, "TRITON_DEVICES", devices):
            layer(x).square().sum().backward()
        gradients.append(block.weight.grad)
        block.weight.grad = None
    assert_close(*gradients, rtol=1e-8, atol=1e-10)


class Mixed(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, z, x):
        return torch.tanh(self.linear(z)) + x


class Launched(TorchDispatchMode):
    """The names of the operations that write numbers."""

    WRITING_NONE = ("empty", "view", "expand", "select", "slice", "transpose", "alias", "detach", "reshape")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = str(function).removeprefix("aten.")
        if not any(word in name for word in self.WRITING_NONE):
            self.names.append(name)
        return function(*arguments, **(options or {}))


@cases(picard={"method": Picard}, anderson={"method": functools.partial(Anderson, history=2)})
def step_is_all_between_two_evaluations(method):
    x, right = drawn(6, 9), TritonStep.__call__
    f = FixedPointMap(lambda z, x: z / 2 + x, PerSample(x), event_ndim=1)

    def unseen(self, *given):
        with _disable_current_modes():
            return right(self, *given)

    found = []
    with mock.patch.object(_solve, "unobserved", return_value=True), mock.patch.object(TritonStep, "__call__", unseen):
        for steps in (4, 24):
            with Launched() as launched:
                by_kernel(f, torch.zeros_like(x), method(rtol=0, atol=0, max_steps=steps, check_every=100))
            found.append(collections.Counter(launched.names))
    more = found[1] - found[0]
    # Of each of 20 evaluations the map's own.
    assert more == {"div.Tensor": 20, "add.Tensor": 20}, more


@case
def step_that_is_wrong_is_not_used():
    (f, x), right = contraction((3,), 9), TritonStep.__call__

    def wrong(self, z, mapped, number):
        to = right(self, z, mapped, number)
        self.memory.best_residual.mul_(0.5)
        return to

    with mock.patch.object(TritonStep, "__call__", wrong), mock.patch.dict(trust._found, clear=True):
        with mock.patch.object(_solve, "TRITON_DEVICES", (torch.device(harness.DEVICE).type,)):
            found = solve(f, torch.zeros_like(x), solver=Picard())
        (refused,) = (known for use, known in trust._found.items() if "step" in use.kernel)
        assert refused.verdict == "refused"
        assert "residual is off by" in refused.reason
    assert found.route.step == "torch"
    assert bool(found.converged.all())

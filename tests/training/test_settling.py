"""The loss that makes blocks settle, and what settled answers are worth."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from implicit_attention import Equilibrium, Picard
from implicit_attention.layers import Confirm
from implicit_attention.models.reasoners import TransformerStack, TwoStreamReasoner
from implicit_attention.training import Calibration, SettlingLoss, calibrate, calibration_table
from implicit_attention.training.calibration import Share

TIGHT = Picard(rtol=1e-6, max_steps=500)


class Tanh(nn.Module):
    """z -> tanh(gain z + x): one fixed point below gain 1, three above it where x is small."""

    def __init__(self, gain: float):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))

    def forward(self, z, x):
        return torch.tanh(self.gain * z + x)


def problem(gain=0.5):
    torch.manual_seed(0)
    layer, readout = Equilibrium(Tanh(gain), solver=TIGHT).double(), nn.Linear(6, 3).double()
    return layer, readout, torch.randn(4, 5, 6, dtype=torch.float64), torch.randint(3, (4, 5))


def by_hand(layer, readout, x, target, counts, weight):
    z, states = torch.zeros_like(x), []
    for step in range(1, max(counts) + 1):
        z = layer.block(z, x)
        if step in counts:
            states.append(z)
    wrong = sum(F.cross_entropy(readout(z).flatten(0, 1), target.flatten()) for z in states) / len(states)
    change = (layer.block(z, x) - z).flatten(1).norm(dim=1) / z.detach().flatten(1).norm(dim=1)
    return wrong + weight * change.mean()


@pytest.mark.parametrize(("every", "counts"), [(None, [4, 7]), (1, [4, 5, 6, 7]), (2, [5, 7]), (3, [4, 7]), (9, [7])])
@pytest.mark.parametrize(("done", "weight"), [(0.0, 0.0), (0.5, 0.0), (0.6, 0.12), (0.75, 0.3), (1.0, 0.3)])
def test_the_loss_is_that_of_a_loop_written_out(every, counts, done, weight):
    layer, readout, x, target = problem()
    inputs = [x.requires_grad_(), layer.block.gain, *readout.parameters()]
    objective = SettlingLoss(layer, readout, steps=range(7, 8), every=every, rest=0.3)
    found = objective(x, target=target, done=done)
    expected = by_hand(layer, readout, x, target, counts, weight)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, inputs) for loss in (found, expected)))


def test_numbers_of_steps_are_drawn_from_the_range():
    layer, readout, x, target = problem()
    counts, objective = [], SettlingLoss(layer, readout, rest=0.0)
    layer.block.register_forward_hook(lambda *_: counts.append(1))
    seen = set()
    for _ in range(200):
        counts.clear()
        objective(x, target=target, done=0.0)
        seen.add(len(counts))
    assert seen == set(range(8, 17))


def test_targets_below_0_are_not_asked_for_and_images_number_classes_on_axis_1():
    layer, readout, x, target = problem()
    masked = target.masked_fill(torch.rand(4, 5) < 0.3, -1)
    losses = [
        SettlingLoss(layer, read, steps=range(4, 5), axis=axis)(x, target=masked, done=0.0)
        for read, axis in ((readout, -1), (lambda z: readout(z).movedim(-1, 1), 1))
    ]
    torch.testing.assert_close(*losses)
    z = layer(x, steps=4), layer(x, steps=2)
    expected = sum(F.cross_entropy(readout(s)[masked >= 0], masked[masked >= 0]) for s in z) / 2
    torch.testing.assert_close(losses[0], expected)


def test_a_loss_of_ones_own_and_states_of_two_streams():
    torch.manual_seed(0)
    layer, x = TwoStreamReasoner(TransformerStack(8, 2)), torch.randn(3, 4, 8)
    objective = SettlingLoss(layer, lambda z: z[0], lambda z, y: (z - y).square().mean(), steps=range(3, 4), every=1)
    found = objective(x, target=x, done=1.0)
    pairs = [layer(x, steps=count) for count in (2, 3, 4)]
    joined = [torch.cat(pair, -1).flatten(1) for pair in pairs]
    change = (joined[2] - joined[1]).norm(dim=1) / joined[1].norm(dim=1)
    expected = sum((high - x).square().mean() for high, _ in pairs[:2]) / 2 + 0.5 * change.mean()
    torch.testing.assert_close(found, expected)


def test_shares_have_wilsons_interval():
    # Newcombe (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for hits, count, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert Share(hits, count).interval == pytest.approx((low, high), abs=6e-5)
    # Rounding alone would put bounds below 0 and above 1.
    bounds = [(Share(0, count).interval[0], Share(count, count).interval[1]) for count in range(1, 200)]
    assert all(low >= 0 and high <= 1 for low, high in bounds)
    assert not any("-" in str(Share(0, count)) for count in range(1, 200))
    assert math.isnan(Share(0, 0).value)
    assert str(Share(0, 0)) == "-"


def signs(layer, x, **options):
    """A set whose right answers are the signs of x."""
    return calibrate(layer, lambda z: torch.stack([-z, z], -1), {"all": [((x,), (x > 0).long())]}, **options)["all"]


def test_answers_are_compared_sample_by_sample():
    layer, _, x, _ = problem()
    x = x[:, 0]
    found = signs(layer, x)
    assert found.settled.all()
    assert found.exact.all()
    assert found.agreement is None
    layer(x)
    assert torch.equal(found.evaluations, layer.last_solve.num_evals)
    target = (x > 0).long()
    target[0, 0] ^= 1
    target[1, :] = -1
    both = {"some": [((x[:2],), target[:2]), ({"x": x[2:]}, target[2:])]}
    assert calibrate(layer, lambda z: torch.stack([-z, z], -1), both)["some"].exact.tolist() == [
        False,
        True,
        True,
        True,
    ]
    short = signs(layer, x, solver=Picard(max_steps=1))
    assert not short.settled.any()
    assert str(short.given(short.settled)) == "-"


def test_other_starts_turn_up_fixed_points_that_are_one_of_several():
    # At gain 3 and small inputs each sign has a fixed point of its own, and noise decides.
    layer, _, x, _ = problem(3.0)
    x = torch.cat([0.05 * x[:, 0, :1], 3 * x[:, 0, :1].sign()])
    found = signs(layer, x, confirm=Confirm(count=20, around="start", noise=0.8))
    assert found.settled.all()
    assert found.exact.all()
    assert (found.agreement[:4] < 1).all()
    assert (found.agreement[4:] == 1).all()
    assert torch.equal(found.confirmed, found.agreement == 1)
    near = signs(layer, x, confirm=Confirm(count=20, noise=0.3))
    assert (near.agreement == 1).all()
    again = signs(layer, x, confirm=Confirm(count=20, around="start", noise=0.8))
    assert torch.equal(found.agreement, again.agreement)


def test_logits_that_are_not_numbers_are_wrong():
    layer, readout, x, target = problem()
    lost = torch.full_like(x, torch.nan)
    assert not calibrate(layer, readout, {"a": [((lost,), 0 * target)]})["a"].exact.any()
    with torch.no_grad():
        readout.weight.fill_(torch.nan)
    found = calibrate(layer, readout, {"a": [((x,), 0 * target)], "not asked": [((x,), 0 * target - 1)]})
    assert found["a"].settled.all()
    assert not found["a"].exact.any()
    assert found["not asked"].exact.all()


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, z, x):
        return torch.tanh(0.3 * self.norm(self.mix(z)) + x)


def test_modes_are_restored_also_of_a_part_that_is_kept_in_evaluation_mode():
    layer, readout = Equilibrium(Normed(), steps=4).train(), nn.Linear(6, 3).eval()
    layer.block.norm.eval()
    before = layer.block.norm.running_var.clone()
    x = torch.randn(4, 6)
    calibrate(layer, readout, {"a": [((x,), torch.zeros(4).long())]})
    assert layer.block.training
    assert not layer.block.norm.training
    assert not readout.training
    layer(x)
    assert torch.equal(layer.block.norm.running_var, before)


def test_a_layer_of_fixed_steps_is_solved():
    layer, readout, x, target = problem()
    fixed = Equilibrium(layer.block, steps=3, solver=TIGHT)
    found = calibrate(fixed, readout, {"a": [((x,), target)]}, confirm=1)["a"]
    expected = calibrate(layer, readout, {"a": [((x,), target)]}, confirm=1)["a"]
    assert found.settled.all()
    assert torch.equal(found.evaluations, expected.evaluations)
    assert torch.equal(found.agreement, expected.agreement)


def test_batches_of_no_samples():
    layer, readout, x, target = problem()
    sets = {"some": [((x[:0],), target[:0]), ((x,), target)], "rows": [((x[:0, 0],), target[:0, 0])]}
    found = calibrate(layer, readout, sets)
    assert [len(row.exact) for row in found.values()] == [4, 0]
    assert SettlingLoss(layer, readout)(x[:0], target=target[:0], done=1.0) == 0


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, z, x):
        return torch.tanh(0.3 * self.mix(self.drop(z)) + x)


def test_random_numbers_of_a_block_are_the_same_at_each_step_and_others_at_the_next_call():
    layer, x = Equilibrium(Dropping()).train(), torch.randn(64, 6)
    seen = []

    def read(z):
        seen.append(z.detach())
        return z * torch.rand(())  # The read-out draws numbers of its own.

    objective = SettlingLoss(layer, read, lambda logits, target: 0 * logits.sum(), steps=range(60, 61), rest=1.0)
    torch.manual_seed(0)
    assert objective(x, target=None, done=1.0) < 1e-6
    first, after = seen[1], torch.rand(())
    assert objective(x, target=None, done=1.0) < 1e-6
    assert not torch.allclose(seen[3], first, atol=1e-3)
    assert after != torch.rand(())


class Flip(nn.Module):
    """0, x, 0, x, ..."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, z, x):
        return torch.relu(self.gain * (x - z))


def test_a_state_that_leaves_0_has_a_bounded_change():
    layer, readout = Equilibrium(Flip()), nn.Linear(6, 3)
    objective = SettlingLoss(layer, readout, steps=range(8, 9))
    found = objective(torch.rand(4, 6), target=torch.zeros(4).long(), done=1.0)
    found.backward()
    assert found < 100
    assert layer.block.gain.grad.abs().max() < 1e3


class Added(nn.Module):
    def forward(self, z, x):
        return z + x


def test_changes_of_half_precision_are_summed_in_single():
    """The sum of their squares is beyond float16."""
    z = torch.full((1, 32, 48, 48), 300.0).half()
    objective = SettlingLoss(
        Equilibrium(Added()), lambda z: z, lambda logits, target: 0 * logits.float().mean(), steps=range(1, 2), rest=1.0
    )
    found = objective(0.01 * z, target=None, done=1.0, start=z)
    torch.testing.assert_close(found, torch.tensor(0.01), atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_loss_of_many_tokens_is_finite_in_half_precision(dtype):
    """The sum of their losses is beyond float16."""
    torch.manual_seed(0)
    layer, readout, x = Equilibrium(Tanh(0.5)).to(dtype), nn.Linear(6, 10).to(dtype), torch.randn(64, 1000, 6)
    target = torch.randint(10, (64, 1000))
    found = SettlingLoss(layer, readout, steps=range(3, 4))(x.to(dtype), target=target, done=1.0)
    layer, readout = layer.float(), readout.float()
    expected = SettlingLoss(layer, readout, steps=range(3, 4))(x, target=target, done=1.0)
    torch.testing.assert_close(found, expected, atol=0.01, rtol=0.01)


@pytest.mark.parametrize(
    ("index", "expected"), [((), (1 / 2 + 1 / 101) / 2), (0, (1 / 2 + 1 / 101) / 2), ((0, 0), 1 / 2)]
)
def test_changes_are_those_of_samples_on_any_number_of_axes(index, expected):
    x, start = torch.ones(1, 2, 4), torch.tensor([1.0, 100.0])[None, :, None].expand(1, 2, 4)
    layer = Equilibrium(Added(), event_ndim=1)
    objective = SettlingLoss(layer, lambda z: z, lambda logits, target: 0 * logits.sum(), steps=range(1, 2), rest=1.0)
    found = objective(x[index], target=None, done=1.0, start=start[index])
    assert float(found) == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
def test_targets_are_of_any_integer_type(dtype):
    layer, readout, x, target = problem()
    objective, target = SettlingLoss(layer, readout, steps=range(3, 4)), target.clamp(max=1)
    assert objective(x, target=target.to(dtype), done=1.0) == objective(x, target=target, done=1.0)
    assert objective(x, target=0 * target - 1, done=0.0) == 0


def test_risk_keeps_the_surest_answers_first():
    settled = torch.tensor([True, False, True, True])
    exact = torch.tensor([True, False, False, True])
    found = Calibration(settled, exact, torch.tensor([9, 3, 20, 5]), torch.tensor([1.0, 1.0, 0.5, 1.0]))
    coverage, risk = found.risk()
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    torch.testing.assert_close(risk, torch.tensor([0, 0, 1 / 3, 1 / 2], dtype=torch.double))
    # Without the second check the number of evaluations decides, and unsettled ones come last.
    assert Calibration(settled, exact, torch.tensor([9, 3, 4, 5])).risk()[1][0] == 1
    assert found.given(found.confirmed).hits == found.given(found.confirmed).count == 2
    # Any difference of agreement counts more than all evaluations.
    agreement = torch.tensor([1.0, 2 / 3])
    other = Calibration(settled[2:], torch.tensor([True, False]), torch.tensor([99, 1]), agreement)
    assert other.risk()[1].tolist() == [0, 0.5]
    wide = calibration_table({(9, 9): other, "a name that is longer than a column": other, 17: other})
    assert len({line.rindex("  ") for line in wide.splitlines()[2:4]}) == 1
    assert wide.splitlines()[0].split("  ")[-1] == "17"
    table = calibration_table({"few": found, "none": Calibration(*(t[:0] for t in (settled, exact, settled.int())))})
    assert "confirmed" in table
    assert "nan, at most 0" in table


LAYER, READ, X, Y = problem()


def asked(target=Y, done=0.0, axis=-1, **options):
    return SettlingLoss(LAYER, READ, axis=axis)(X, target=target, done=done, **options)


def measured(batches=(((X,), Y),), **options):
    return calibrate(LAYER, READ, {"a": list(batches)}, **options)


WRONG = {
    "no readout": (lambda: SettlingLoss(LAYER, 3), TypeError, "`readout` must be a function"),
    "a number of steps": (lambda: SettlingLoss(LAYER, READ, steps=8), TypeError, r"range\(8, 17\)"),
    "no steps": (lambda: SettlingLoss(LAYER, READ, steps=range(3, 3)), ValueError, "numbers above 0"),
    "late": (lambda: SettlingLoss(LAYER, READ, late=(0.8, 0.2)), ValueError, "in order"),
    "one part": (lambda: SettlingLoss(LAYER, READ, late=0.5), ValueError, "`late` must be two parts"),
    "three parts": (lambda: SettlingLoss(LAYER, READ, late=(0, 0.1, 1)), ValueError, "`late` must be two parts"),
    "done": (lambda: asked(done=1.5), ValueError, "`done`"),
    "targets": (lambda: asked(Y[:2]), ValueError, "axis=1 for images"),
    "axis": (lambda: asked(axis=7), ValueError, "`axis` must be an axis"),
    "steps of a call": (
        lambda: asked(steps=3),
        ValueError,
        "`steps` must not be given.*range of steps to SettlingLoss",
    ),
    "a solution": (lambda: asked(return_solution=True), ValueError, "`return_solution` must not be given"),
    "no batch": (lambda: measured([]), ValueError, "hold at least one batch"),
    "a list": (lambda: calibrate(LAYER, READ, [((X,), Y)]), TypeError, "`sets` must be a dict"),
    "exact": (lambda: measured(exact=lambda z, y: z.sum()), ValueError, r"`exact` .* booleans of shape \(4,\)"),
    "inputs": (lambda: measured([(X, Y)]), TypeError, r"`inputs` must be a tuple.*\(\(x,\), target"),
    "confirm": (lambda: measured(confirm=-1), ValueError, "`confirm`"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name):
    call, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        call()

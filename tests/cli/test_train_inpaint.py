import json

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from implicit_attention.cli import main
from implicit_attention.cli.inpaint import Inpaint
from implicit_attention.cli.progress import Progress
from implicit_attention.models import load_checkpoint
from implicit_attention.studies import inpainting, inpainting_data, training
from implicit_attention.studies.inpainting_data import harmonic, hidden_pixels, rmse, scattered, visible_mean


def invoke(*arguments):
    return CliRunner().invoke(main.app, ["train", "inpaint", *map(str, arguments)], env={"COLUMNS": "120"})


@pytest.fixture
def small(monkeypatch):
    """Models and batches of a size that trains in no time."""
    for name in ("digits", "photos"):
        monkeypatch.setitem(inpainting.RECIPES, name, inpainting.Recipe(8, 2, 4, 8, batch=4, rate=3e-3))
    monkeypatch.setattr(inpainting, "QUICK_IMAGES", 6)


# Data.


def test_digits_are_trained_on_or_held_out():
    task = inpainting_data.load("digits")
    assert task.regions.shape == (1400, 1, 8, 8)
    assert task.held_out.shape == (397, 1, 8, 8)
    assert (task.side, task.patch, task.patches, task.epoch) == (8, 2, 16, 1400)
    together = torch.cat([task.regions, task.held_out]).flatten(1)
    from sklearn.datasets import load_digits

    every = torch.from_numpy(load_digits().data / 16).float()
    assert torch.equal(together.sort(dim=0).values, every.sort(dim=0).values)
    assert len({tuple(image.tolist()) for image in together}) == len({tuple(image.tolist()) for image in every})


def test_photographs_are_cut_so_that_no_crop_to_train_on_reaches_the_held_out_ones():
    task = inpainting_data.load("photos")
    from sklearn.datasets import load_sample_images

    photos = [torch.from_numpy(photo / 255).float() for photo in load_sample_images().images]
    assert task.regions.shape == (2, 3, 427, 427)
    for region, photo in zip(task.regions, photos, strict=True):
        assert torch.equal(region, photo[:, :427].permute(2, 0, 1))
    assert (task.side, task.patch, task.patches, task.epoch) == (32, 4, 64, 356)
    # 13 rows of 6 crops from the right 213 columns.
    assert task.held_out.shape == (2 * 13 * 6, 3, 32, 32)
    expected = [
        photo[32 * row : 32 * row + 32, 427 + 32 * column : 427 + 32 * column + 32].permute(2, 0, 1)
        for photo in photos
        for row in range(13)
        for column in range(6)
    ]
    assert torch.equal(task.held_out, torch.stack(expected))


def test_images_are_drawn_from_every_place_of_every_region():
    # Every pixel says where it is.
    regions = torch.arange(2 * 3 * 5 * 6, dtype=torch.float32).view(2, 3, 5, 6)
    task = inpainting_data.ImageTask("photos", regions, torch.zeros(1, 3, 4, 4), 2, {})
    drawn = task.draw(200, torch.Generator().manual_seed(0))
    assert drawn.shape == (200, 3, 4, 4)
    seen = set()
    for image in drawn:
        which, rest = divmod(int(image[0, 0, 0]), 90)
        top, left = divmod(rest, 6)
        assert torch.equal(image, regions[which, :, top : top + 4, left : left + 4])
        seen.add((which, top, left))
    assert seen == {(which, top, left) for which in (0, 1) for top in (0, 1) for left in (0, 1, 2)}
    again = task.draw(200, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, again)


def test_half_of_the_patches_of_every_image_are_hidden():
    masked = scattered(50, 16, torch.Generator().manual_seed(0))
    assert masked.sum(-1).tolist() == 50 * [8]
    assert int(masked.sum(0).min()) > 10
    hidden = hidden_pixels(masked, 8, 2)
    assert hidden.shape == (50, 1, 8, 8)
    for row in range(8):
        for column in range(8):
            assert torch.equal(hidden[:, 0, row, column], masked[:, (row // 2) * 4 + column // 2])


# What learns nothing.


def dense_harmonic(image, hidden):
    """By a dense solve of "each hidden pixel is the mean of its neighbours", (H, W)."""
    height, width = image.shape
    matrix, right = np.eye(height * width), image.astype(float).flatten()
    for row, column in zip(*hidden.nonzero(), strict=True):
        here = row * width + column
        beside = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        beside = [r * width + c for r, c in beside if 0 <= r < height and 0 <= c < width]
        matrix[here, beside] = -1 / len(beside)
        right[here] = 0
    return np.linalg.solve(matrix, right).reshape(height, width)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_harmonic_interpolation_is_that_of_a_dense_solve_for_every_image_and_channel(dtype):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(4, 3, 5, 7, generator=generator, dtype=torch.float64).to(dtype)
    hidden = torch.rand(4, 1, 5, 7, generator=generator) < 0.6
    hidden[1] = True
    hidden[1, 0, 4, 6] = False
    hidden[2] = False
    found = harmonic(images, hidden)
    assert found.dtype == dtype
    assert torch.equal(found.where(~hidden, images), images)
    for image, mask, filled in zip(images, hidden, found, strict=True):
        for channel, answer in zip(image, filled, strict=True):
            expected = dense_harmonic(channel.double().numpy(), mask[0].numpy())
            tolerance = 1e-12 if dtype == torch.float64 else 1e-6
            np.testing.assert_allclose(answer.double().numpy(), expected, atol=tolerance, rtol=0)
    # One visible pixel makes all the others equal to it; the layout of the images does not matter.
    torch.testing.assert_close(found[1], images[1, :, 4:, 6:].expand(3, 5, 7))
    turned = images.to(memory_format=torch.channels_last)
    assert torch.equal(harmonic(turned, hidden), found)
    assert torch.equal(harmonic(images, torch.zeros_like(hidden)), images)


def test_a_linear_ramp_is_harmonic():
    ramp = torch.linspace(0, 1, 9, dtype=torch.float64).expand(1, 1, 9, 9)
    hidden = torch.zeros(1, 1, 9, 9, dtype=torch.bool)
    hidden[..., 1:-1, 1:-1] = True
    torch.testing.assert_close(harmonic(ramp, hidden), ramp)


def test_the_visible_mean_is_that_of_each_image_and_channel():
    images = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    hidden = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    filled = visible_mean(images, hidden)
    for image, mask, answer in zip(images, hidden, filled, strict=True):
        for channel, got in zip(image, answer, strict=True):
            torch.testing.assert_close(got[mask[0]], channel[~mask[0]].mean().expand(int(mask.sum())))
            assert torch.equal(got[~mask[0]], channel[~mask[0]])


def test_the_error_is_that_of_hidden_pixels():
    images, answers = torch.zeros(2, 3, 2, 2), torch.full((2, 3, 2, 2), 5.0)
    hidden = torch.zeros(2, 1, 2, 2, dtype=torch.bool)
    hidden[0, 0, 0, 0] = hidden[1, 0, 1, 1] = True
    answers[0, :, 0, 0], answers[1, :, 1, 1] = 3.0, 4.0
    assert rmse(images, answers, hidden) == pytest.approx(12.5**0.5)


# The model.


@pytest.mark.parametrize("data", ["digits", "photos"])
@pytest.mark.parametrize("mode", ["published", "equilibrium"])
def test_hidden_pixels_are_answered_without_being_read(small, data, mode):
    task = inpainting_data.load(data)
    torch.manual_seed(0)
    net = inpainting.Inpainter(task, inpainting.RECIPES[data], mode)
    images = task.held_out[:3]
    masked = scattered(3, task.patches, torch.Generator().manual_seed(0))
    hidden = hidden_pixels(masked, task.side, task.patch)
    with torch.no_grad():
        filled = net(images, masked)
        other = net(torch.where(hidden, 0.25, images), masked)
        # Harmonic interpolation is the same whether it is given or computed.
        assert torch.equal(filled, net(images, masked, harmonic(images, hidden)))
    assert torch.equal(filled.where(~hidden, images), images)
    assert torch.equal(filled.masked_select(hidden), other.masked_select(hidden))
    error = rmse(images, filled, hidden)
    told = float(inpainting.loss(net, images, masked).detach())
    assert told == pytest.approx(error, rel=1e-5 if mode == "published" else 1e-2)


# The command.


@pytest.mark.parametrize(
    ("data", "mode"), [("digits", "published"), ("digits", "equilibrium"), ("photos", "published")]
)
def test_the_command_writes_what_it_found(small, tmp_path, data, mode):
    out = tmp_path / "made" / "here"
    before = torch.random.get_rng_state()
    result = invoke("--quick", "--updates", 3, "--data", data, "--mode", mode, "--out", out)
    assert result.exit_code == 0, result.output
    assert torch.equal(torch.random.get_rng_state(), before)
    assert {path.name for path in out.iterdir()} == {
        "metrics.json",
        "reconstruction.png",
        "energy.png",
        "checkpoint.pt",
    }
    for name in ("reconstruction.png", "energy.png"):
        with Image.open(out / name) as image:
            assert min(image.size) > 300
            assert len(np.unique(np.asarray(image.convert("L")))) > 20
    found = json.loads((out / "metrics.json").read_text())
    assert found["settings"]["data"] == data
    assert found["training"]["updates"] == 3
    assert len(found["training"]["losses"]) == 1
    assert {"python", "torch", "scikit-learn"} <= set(found["versions"])
    answer = "equilibrium" if mode == "equilibrium" else "published, 12 steps"
    assert found["answer"] == answer
    stages = [f"{mode}, {steps} step{'s' * (steps > 1)}" for steps in (1, 4, 12)]
    assert list(found["rmse"]) == ["visible mean", "harmonic", *stages, "equilibrium"]
    for name, error in found["rmse"].items():
        assert name in result.stdout
        assert f"{error:.4f}" in result.stdout
    for verdict in found["verdicts"]:
        part = found["rmse"][answer] / found["rmse"][verdict["baseline"]]
        assert verdict["part"] == pytest.approx(part)
        assert verdict["holds"] == (part <= verdict["at_most"])
        assert f"at most {verdict['at_most']:g} of the error of {verdict['baseline']}" in result.stdout
    # The errors again, from the checkpoint alone.
    task = inpainting_data.load(data)
    net = inpainting.Inpainter(task, inpainting.RECIPES[data], mode)
    step, _ = load_checkpoint(out / "checkpoint.pt", model=net)
    assert step == 3
    images = task.held_out[:6]
    masked = scattered(6, task.patches, torch.Generator().manual_seed(0))
    hidden = hidden_pixels(masked, task.side, task.patch)
    with torch.no_grad():
        assert rmse(images, net(images, masked), hidden) == pytest.approx(found["rmse"][answer], rel=1e-6)
    assert rmse(images, visible_mean(images, hidden), hidden) == pytest.approx(found["rmse"]["visible mean"])


class Killed(BaseException):
    pass


def weights(folder):
    net = inpainting.Inpainter(inpainting_data.load("digits"), inpainting.RECIPES["digits"], "published")
    step, held = load_checkpoint(folder / "checkpoint.pt", model=net)
    return step, held, net.state_dict()


def run(out, **options):
    with Progress(lambda row: row["line"]) as progress:
        return Inpaint(quick=True, out=out, **options).run(progress)


def test_a_killed_training_goes_on_to_the_same_bits(small, tmp_path, monkeypatch):
    # Four updates make an epoch; the kill comes in the third one.
    monkeypatch.setattr(inpainting_data.ImageTask, "epoch", 16)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    expected = run(whole, updates=14)
    calls, update = [], training.make_update

    def killed(*arguments):
        calls.append(1)
        if len(calls) == 11:
            raise Killed
        return update(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training, "make_update", killed)
        with pytest.raises(Killed):
            run(cut, updates=14)
    assert weights(cut)[0] == 8
    found = run(cut, resume=True)
    (_, held, state), (step, held_whole, state_whole) = weights(cut), weights(whole)
    assert step == 14
    assert held == held_whole
    assert len(held["losses"]) == 4
    for name, weight in state.items():
        assert torch.equal(weight, state_whole[name]), name
    assert found.errors == expected.errors
    assert found.trained.losses == expected.trained.losses
    assert (expected.trained.resumed_after, found.trained.resumed_after) == (0, 8)
    # What has ended is measured again.
    assert run(cut, resume=True).errors == expected.errors


@pytest.mark.slow
def test_a_training_learns_and_its_rate_rises_and_falls(small, tmp_path, monkeypatch):
    monkeypatch.setitem(inpainting.RECIPES, "digits", inpainting.Recipe(16, 2, 8, 16, batch=16, rate=1e-2))
    found = run(tmp_path, updates=100)
    losses = found.trained.losses
    assert found.errors["published, 12 steps"] < 0.85 * found.errors["visible mean"], losses
    model = torch.nn.Linear(1, 1)
    optimizer, schedule = training._optimizer(model, training.TrainingPlan(100, 10, 0.5))
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:2] == [0.25, 0.5]
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[-1] < 0.002


def test_minutes_become_updates(small, tmp_path, monkeypatch):
    # A clock by which every update takes half a second.
    ticks = iter(range(10_000))
    update = training.make_update
    now = [0.0]
    monkeypatch.setattr(training, "make_update", lambda *arguments: (now.append(now[-1] + 0.5), update(*arguments))[1])
    monkeypatch.setattr(training.time, "perf_counter", lambda: now[-1] + 1e-9 * next(ticks))
    # Four of them are timed, and 10 of 12 seconds are left.
    assert run(tmp_path, minutes=0.2).trained.plan.updates == 19


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "1", "--updates", "5"], "`--minutes` must be left out beside --updates"),
        (["--rate", "0"], "`--rate` must be > 0 and finite, got 0"),
        (["--rate", "inf"], "`--rate` must be > 0 and finite, got inf"),
        (["--resume"], "`--resume` must find a checkpoint of an earlier run in --out, got no checkpoint.pt there"),
        (["--resume", "--updates", "5"], "`--minutes` and `--updates` must be left out beside --resume"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(small, tmp_path, arguments, message):
    result = invoke("--out", tmp_path, *arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr


@pytest.mark.parametrize("arguments", [["--data", "faces"], ["--mode", "both"], ["--updates", "0"], ["--seed", "-1"]])
def test_options_out_of_range_are_refused(arguments):
    assert invoke(*arguments).exit_code == 2


def test_checkpoints_of_other_trainings_and_damaged_ones_are_refused(small, tmp_path):
    options = ["--quick", "--out", tmp_path]
    assert invoke("--updates", 2, *options).exit_code == 0
    for arguments, message in (
        (["--updates", 2], "`--out` must hold no checkpoint of another training, got checkpoint.pt there"),
        (["--resume", "--seed", 1], "which has seed 0 instead of 1; give the same ones"),
        (["--resume", "--mode", "equilibrium"], "which has mode published instead of equilibrium"),
        (["--resume", "--data", "photos"], "`--resume` cannot use checkpoint.pt in --out"),
    ):
        result = invoke(*arguments, *options)
        assert result.exit_code == 2, arguments
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1
    whole = (tmp_path / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(whole[: len(whole) // 2])
    result = invoke("--resume", *options)
    assert result.exit_code == 2
    assert "`--resume` cannot use checkpoint.pt in --out" in result.stderr
    assert "truncated" in result.stderr


def test_a_loss_that_is_not_finite_stops_the_training(small, tmp_path, monkeypatch):
    monkeypatch.setattr(inpainting_data.ImageTask, "epoch", 8)
    update, calls = training.make_update, []
    monkeypatch.setattr(
        training, "make_update", lambda *a: (calls.append(1), update(*a) if len(calls) < 6 else np.nan)[1]
    )
    result = invoke("--quick", "--updates", 9, "--out", tmp_path)
    assert result.exit_code == 2
    assert "training stopped at update 6: the loss must be finite, got nan" in result.stderr
    assert weights(tmp_path)[0] == 4

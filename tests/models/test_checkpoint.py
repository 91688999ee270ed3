"""Checkpoints: whole or not at all, nothing that runs code, and the same bits after a stop as without one."""

import copy
import os
import pickle
import warnings

import pytest
import torch
from torch import nn

from implicit_attention.models import ImageEnergyTransformer, load_checkpoint, save_checkpoint, scatter_mask


class Run:
    """A small training that draws images and masks from a generator of its own, and noise from torch's."""

    def __init__(self, seed=0, dim=6, mode="published"):
        torch.manual_seed(seed)
        self.model = ImageEnergyTransformer(
            4, 2, 1, dim=dim, heads=2, head_dim=2, memories=5, mode=mode, on_failure="ignore"
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.generator = torch.Generator().manual_seed(seed + 1)
        self.step = 0

    def train(self, steps):
        losses = []
        for _ in range(steps):
            images = torch.randn(3, 1, 4, 4, generator=self.generator) + 0.1 * torch.randn(3, 1, 4, 4)
            masked, scored = scatter_mask(3, 4, 2, 1, self.generator)
            loss = self.model.loss(images, masked, scored)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def parts(self):
        made = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {**made, "generators": {"data": self.generator}}

    def save(self, path, **given):
        save_checkpoint(path, **{**self.parts(), "step": self.step, **given})

    def load(self, path):
        self.step, extra = load_checkpoint(path, **self.parts())
        return extra


def bits(run):
    return [t.clone() for t in run.model.state_dict().values()]


def assert_same(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("mode", ["equilibrium", "published"])
def test_three_steps_and_three_after_a_stop_are_six_to_the_bit(tmp_path, mode):
    path = tmp_path / "last.pt"
    whole = Run(mode=mode)
    losses = whole.train(6)
    first = Run(mode=mode)
    assert first.train(3) == losses[:3]
    first.save(path, extra={"sizes": [1, 2], "best": torch.tensor(0.5)})
    # Nothing that the second process begins with is the same.
    second = Run(seed=5, mode=mode)
    second.train(2)
    torch.manual_seed(99)
    extra = second.load(path)
    assert second.step == 3
    assert extra["sizes"] == [1, 2]
    assert second.train(3) == losses[3:]
    assert_same(bits(second), bits(whole))
    assert second.scheduler.get_last_lr() == whole.scheduler.get_last_lr()


@pytest.mark.parametrize("part", ["optimizer", "random", "generators", "scheduler"])
def test_each_part_of_a_checkpoint_is_needed_for_the_same_bits(tmp_path, part):
    """The test above would miss a part that changes nothing: none of them is such a one."""
    path = tmp_path / "last.pt"
    whole = Run()
    losses = whole.train(6)
    first, other = Run(), Run(seed=5)
    first.train(3)
    first.save(path)
    saved = torch.load(path, weights_only=True)
    other.train(1)
    other.save(tmp_path / "other.pt")
    saved[part] = torch.load(tmp_path / "other.pt", weights_only=True)[part]
    torch.save(saved, path)
    resumed = Run()
    resumed.load(path)
    assert resumed.train(3) != losses[3:] or any(
        not torch.equal(a, b) for a, b in zip(bits(resumed), bits(whole), strict=True)
    )


def test_every_truncation_is_refused_and_changes_nothing(tmp_path):
    path = tmp_path / "last.pt"
    run = Run()
    run.train(1)
    run.save(path)
    data = path.read_bytes()
    before, generator, torch_state = bits(run), run.generator.get_state(), torch.get_rng_state()
    moments = [s["exp_avg"].clone() for s in run.optimizer.state_dict()["state"].values()]
    for length in [0, 1, 10, *range(100, len(data), 997), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"`path` must be a whole checkpoint.*last\.pt, which is truncated"):
            run.load(path)
    assert_same(bits(run), before)
    assert torch.equal(run.generator.get_state(), generator)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert_same([s["exp_avg"] for s in run.optimizer.state_dict()["state"].values()], moments)


@pytest.mark.parametrize("checksums", [True, False])
def test_a_flipped_byte_of_a_weight_is_refused(tmp_path, checksums):
    path = tmp_path / "last.pt"
    run = Run()
    try:
        torch.serialization.set_crc32_options(checksums)
        run.save(path)
        assert torch.serialization.get_crc32_options() == checksums
    finally:
        torch.serialization.set_crc32_options(True)
    run.load(path)
    data = bytearray(path.read_bytes())
    weights = run.model.decoder.weight.detach().numpy().tobytes()
    at = bytes(data).index(weights)
    data[at] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="truncated, damaged"):
        run.load(path)


@pytest.mark.parametrize("stage", ["write", "flush", "replace"])
def test_a_write_that_is_killed_leaves_the_checkpoint_before(tmp_path, monkeypatch, stage):
    """The process ends in the middle, without a chance to clean up."""
    path = tmp_path / "last.pt"
    run = Run()
    run.train(1)
    run.save(path)
    before = path.read_bytes()
    run.train(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
        process = os.fork()
    if process == 0:
        original = torch.save

        def half(contents, file):
            original(contents, file)
            file.flush()
            file.truncate(file.tell() // 2)
            os._exit(0)

        targets = {"write": (torch, "save", half), "flush": (os, "fsync", lambda _: os._exit(0))}
        targets["replace"] = (os, "replace", lambda *_: os._exit(0))
        monkeypatch.setattr(*targets[stage])
        try:
            run.save(path)
        finally:
            os._exit(1)
    assert os.waitpid(process, 0)[1] == 0
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.pt", "last.pt.partial"]
    again = Run(seed=3)
    again.load(path)
    assert again.step == 1
    # What was left behind is in nobody's way.
    again.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_a_full_disk_leaves_the_checkpoint_before_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    run = Run()
    run.save(path)
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_what_could_not_be_read_back_is_refused_when_it_is_saved(tmp_path):
    path = tmp_path / "last.pt"
    run = Run()
    run.save(path)
    before = path.read_bytes()
    with pytest.raises(TypeError, match="`extra` must be numbers, strings, tensors"):
        run.save(path, extra={"when": Run})
    assert path.read_bytes() == before


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harmed",)


def test_a_file_that_runs_code_is_refused_unrun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, write in (("a.pt", lambda f: torch.save({"step": Harmful()}, f)), ("b.pt", lambda f: _pickled(f))):
        write(tmp_path / name)
        with pytest.raises(ValueError, match="another kind of file"):
            Run().load(tmp_path / name)
    assert not (tmp_path / "harmed").exists()


def _pickled(path):
    path.write_bytes(pickle.dumps(Harmful()))


def test_another_kind_of_file_and_none_are_told_apart(tmp_path):
    with pytest.raises(FileNotFoundError, match="`path` must be a checkpoint that exists"):
        Run().load(tmp_path / "none.pt")
    torch.save(Run().model.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="holds something else"):
        Run().load(tmp_path / "weights.pt")


def test_weights_of_another_model_are_refused_before_any_is_copied(tmp_path):
    path = tmp_path / "last.pt"
    Run().save(path)
    other = Run(seed=2, dim=8)
    before = bits(other)
    with pytest.raises(ValueError, match=r"`model` must have the parameters in last\.pt.*\(6,\) instead of \(8,\)"):
        other.load(path)
    assert_same(bits(other), before)


def test_without_an_optimizer_the_weights_alone_are_read(tmp_path):
    path = tmp_path / "last.pt"
    run = Run()
    run.save(path, extra="best")
    other = Run(seed=2)
    state = torch.get_rng_state()
    assert load_checkpoint(path, model=other.model) == (0, "best")
    assert_same(bits(other), bits(run))
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="`optimizer` must be given with `scheduler` and `generators`"):
        load_checkpoint(path, model=run.model, scheduler=run.scheduler, generators={"data": run.generator})


def test_what_was_saved_and_what_is_given_must_agree(tmp_path):
    path = tmp_path / "last.pt"
    run = Run()
    run.save(path)
    both = {"model": run.model, "optimizer": run.optimizer}
    with pytest.raises(ValueError, match="`scheduler` must be given, as one was saved"):
        load_checkpoint(path, **both, generators={"data": run.generator})
    with pytest.raises(ValueError, match=r"`generators` must have the names that were saved, \['data'\], got \[\]"):
        load_checkpoint(path, **both, scheduler=run.scheduler)
    run.save(path, scheduler=None, generators=None)
    with pytest.raises(ValueError, match="`scheduler` must be None, as none was saved"):
        load_checkpoint(path, **both, scheduler=run.scheduler)
    with pytest.raises(TypeError, match=r"`generators` must map names to torch\.Generator"):
        load_checkpoint(path, **both, generators=[run.generator])


OPTIMIZERS = ("Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "Adafactor")


@pytest.mark.parametrize("saved", OPTIMIZERS)
def test_the_state_of_an_optimizer_goes_to_none_of_another_kind(tmp_path, saved):
    torch.manual_seed(0)
    path, model = tmp_path / "last.pt", nn.Linear(3, 2)

    def stepped(name):
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return optimizer

    save_checkpoint(path, model=model, optimizer=stepped(saved), step=1)
    weights = [p.clone() for p in model.parameters()]
    for name in sorted({*OPTIMIZERS} - {saved}):
        other = stepped(name)
        model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError, match=f"`optimizer` must be {saved}, .*got {name}; make"):
            load_checkpoint(path, model=model, optimizer=other)
        assert str(other.state_dict()) == str(before)
    assert load_checkpoint(path, model=model, optimizer=stepped(saved)) == (1, None)


def format_1(path):
    """The file as it was before kinds and names were written."""
    saved = torch.load(path, weights_only=True)
    del saved["made"]
    torch.save({**saved, "format": 1}, path)


def test_files_of_format_1_are_read_and_tell_kinds_by_the_options_of_their_groups(tmp_path):
    path, losses = tmp_path / "last.pt", Run().train(6)
    run = Run()
    assert run.train(3) == losses[:3]
    run.save(path)
    format_1(path)
    resumed = Run(seed=4)
    resumed.load(path)
    assert resumed.train(3) == losses[3:]
    for make in (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adadelta):
        resumed.optimizer = make(resumed.model.parameters(), lr=1e-2)
        resumed.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(resumed.optimizer, 10)
        with pytest.raises(ValueError, match=r"`optimizer` must have groups with the options .*'betas'.*'eps'"):
            resumed.load(path)


def test_a_scheduler_of_another_kind_is_refused(tmp_path):
    path, run = tmp_path / "last.pt", Run()
    run.save(path)
    before = bits(run)
    run.scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
    with pytest.raises(ValueError, match=r"`scheduler` must be CosineAnnealingLR, .*got ExponentialLR"):
        run.load(path)
    assert_same(bits(run), before)


def groups_of(model, *names):
    parameters = dict(model.named_parameters())
    return [{"params": [parameters[name] for name in group]} for group in names]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([["0.weight", "0.bias", "1.bias", "1.weight"]], "'1.weight' as number 2 of group 0, got '1.bias'"),
        ([["1.weight", "0.bias", "0.weight", "1.bias"]], "'0.weight' as number 0 of group 0, got '1.weight'"),
        ([["0.weight", "1.weight"], ["0.bias", "1.bias"]], "'0.bias' as number 1 of group 0, got '1.weight'"),
        ([["0.weight", "0.bias", "1.weight"]], "'1.bias' as number 3 of group 0, got None"),
    ],
)
def test_parameters_in_another_order_or_grouping_are_refused(tmp_path, names, told):
    """Also where all shapes fit: moments of another parameter would be taken silently."""
    path, model = tmp_path / "last.pt", nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    save_checkpoint(path, model=model, optimizer=torch.optim.AdamW(model.parameters()), step=0)
    other = torch.optim.AdamW(groups_of(model, *names))
    with pytest.raises(ValueError, match=rf"`optimizer` must have the parameters that were saved, .*: {told}"):
        load_checkpoint(path, model=model, optimizer=other)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "last.pt"
    link.symlink_to(tmp_path / "real" / "one.pt")
    Run().save(link)
    assert link.is_symlink()
    assert (tmp_path / "real" / "one.pt").is_file()


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 5]),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.CosineAnnealingLR(o, 8)],
            milestones=[2],
        ),
    ],
    ids=["one cycle", "lambda", "steps", "sequence"],
)
def test_schedulers_that_people_use_go_through(tmp_path, make):
    model = nn.Linear(2, 1)

    def fresh():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return optimizer, make(optimizer)

    def rates(optimizer, scheduler, count):
        seen = []
        for _ in range(count):
            optimizer.step()
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"])
        return seen

    expected = rates(*fresh(), 6)
    first = fresh()
    rates(*first, 3)
    save_checkpoint(tmp_path / "a.pt", model=model, optimizer=first[0], scheduler=first[1], step=3)
    second = fresh()
    load_checkpoint(tmp_path / "a.pt", model=model, optimizer=second[0], scheduler=second[1])
    assert rates(*second, 3) == expected[3:]

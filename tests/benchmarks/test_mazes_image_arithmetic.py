"""The data of MAZES_IMAGE and ARITHMETIC, their models and those of SUDOKU9_STREAMS, and a quick run of all."""

import functools
import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as command  # noqa: E402
from benchmarks.puzzles import arithmetic, mazes_image, paths, prefix, sudoku, two_streams  # noqa: E402
from benchmarks.puzzles.models import Shape  # noqa: E402
from implicit_attention.models.reasoners import ConvolutionalReasoner, TwoStreamReasoner  # noqa: E402


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Some mazes and grids to learn from; no test waits for thousands."""
    monkeypatch.setattr(mazes_image, "LEARNT", 60)
    monkeypatch.setattr(mazes_image, "CROSSED", 6)
    monkeypatch.setattr(mazes_image, "learnt", functools.cache(mazes_image.learnt.__wrapped__))
    monkeypatch.setattr(sudoku, "POOL", 100)
    vars(two_streams.TASK).pop("pool", None)
    yield
    vars(two_streams.TASK).pop("pool", None)


def beside(pixel, side):
    row, column = divmod(pixel, side)
    return [
        (row + down) * side + column + right
        for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1))
        if 0 <= row + down < side and 0 <= column + right < side
    ]


def by_breadth(free, start, goal, side):
    """Pixels of the shortest path, and all pixels that a search reaches."""
    before, front = {start: start}, [start]
    for pixel in front:
        for other in beside(pixel, side):
            if other in free and other not in before:
                before[other] = pixel
                front.append(other)
    way = [goal]
    while way[-1] != start:
        way.append(before[way[-1]])
    return set(way), set(front)


@pytest.mark.parametrize("side", [9, 17])
def test_paths_through_images_are_those_of_a_search(side):
    drawn = mazes_image.images(side, 20, "a test", test=True)
    ends = set()
    for inputs, edges, targets in zip(*drawn, strict=True):
        free, (start,), (goal,) = (part.nonzero().flatten().tolist() for part in inputs.unbind(-1))
        assert start != goal
        assert edges[:, 0].nonzero().flatten().tolist() == free
        way, reached = by_breadth(set(free), start, goal, side)
        assert reached == set(free)
        # A tree: as many ways between two pixels as pixels, less one.
        assert sum(other in reached for pixel in free for other in beside(pixel, side)) == 2 * (len(free) - 1)
        assert set(targets.nonzero().flatten().tolist()) == way
        ends |= {start, goal}
    assert len(ends) > 10


def held_out(examples):
    return [mazes_image.held_out(free.tolist()) for free in mazes_image.square(examples.edges[..., 0])]


def test_mazes_to_test_with_are_not_learnt_from_in_any_turn():
    task, pixels = mazes_image.PLAN.task, torch.arange(81)[None]
    assert len({tuple(mazes_image.turned(pixels, way)[0].tolist()) for way in range(8)}) == 8
    asked = task.test("9 x 9", 20)
    for way in range(8):
        turned = asked._replace(edges=mazes_image.turned(asked.edges, way))
        assert all(held_out(turned))
    generator = torch.Generator().manual_seed(0)
    assert not any(found for _ in range(8) for found in held_out(task.draw(10, generator)))


def test_a_third_of_a_batch_has_crossings():
    inputs = mazes_image.PLAN.task.draw(30, torch.Generator().manual_seed(0)).inputs[..., 0]
    free = [{*row.nonzero().flatten().tolist()} for row in inputs]
    crossed = [any(len({*beside(pixel, 9)} & row) == 4 for pixel in row) for row in free]
    assert all(crossed[:10])
    assert sum(crossed[10:]) < 5


def numbers(digits):
    """Numbers whose last digit comes first."""
    return [int("".join(map(str, reversed(row)))) for row in digits.tolist()]


@pytest.mark.parametrize("length", [8, 40])
def test_sums_are_those_of_python(length):
    asked = arithmetic.PLAN.task.test(f"{length} digits", 50)
    digits = asked.inputs[..., :20].unflatten(-1, (2, 10)).argmax(-1)
    first, second, sums = (numbers(part) for part in (*digits.unbind(-1), asked.targets))
    assert [a + b for a, b in zip(first, second, strict=True)] == sums
    assert asked.inputs[..., :20].sum(-1).eq(2).all()
    assert asked.inputs[..., 20].argmax(-1).eq(0).all()
    assert digits[:, -1].eq(0).all()
    wrong = (arithmetic.no_carries(asked) != asked.targets).double().mean()
    assert 0.3 < wrong < 0.7
    # Carries run through several times as many places as between digits drawn at random, where one of ten hands on.
    assert digits[:, :-1].sum(-1).eq(9).double().mean() > 1 - 5 / length


def test_additions_to_test_with_are_not_learnt_from():
    drawn, asked = (
        arithmetic.PLAN.task.draw(100, torch.Generator().manual_seed(0)),
        arithmetic.PLAN.task.test("8 digits", 100),
    )
    for examples, test in ((drawn, False), (asked, True)):
        digits = examples.inputs[:, :8, :20].unflatten(-1, (2, 10)).argmax(-1).permute(0, 2, 1)
        assert (arithmetic.held_out(digits) == test).all()
        assert len(digits) == 100


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("suite", [mazes_image, arithmetic, prefix, paths, two_streams])
def test_flops_are_those_that_torch_counts(suite, blocks):
    task = suite.PLAN.task
    examples = task.draw(1, torch.Generator().manual_seed(0))
    made = suite.LARGER.make(task.shape, blocks=blocks)
    # Attention as two products of matrices, which are counted.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        x = made.embed(examples.inputs)
        made.head(made.steps(torch.zeros_like(x), x, examples.edges, 3))
    tokens, edges = examples.inputs.shape[1], examples.edges.shape[-1]
    assert counter.get_total_flops() == made.flops(tokens, edges, 3)


def test_steps_of_images_are_those_of_the_reasoner():
    torch.manual_seed(0)
    examples = mazes_image.PLAN.task.draw(2, torch.Generator().manual_seed(0))
    model = mazes_image.Convolutional(mazes_image.PLAN.task.shape)
    reasoner = ConvolutionalReasoner(24, axes=2, depth=mazes_image.DEPTH)
    reasoner.block.load_state_dict(model.blocks[0].block.state_dict())
    x = model.embed(examples.inputs)
    image = x.mT.reshape(2, 24, 9, 9)
    exists = examples.inputs[..., 0].bool().view(2, 9, 9)
    expected = reasoner(image, exists, steps=4)
    torch.testing.assert_close(model.steps(torch.zeros_like(x), x, examples.edges, 4), expected.flatten(2).mT)


def test_steps_of_additions_are_those_of_the_reasoner():
    torch.manual_seed(0)
    examples = arithmetic.PLAN.task.draw(2, torch.Generator().manual_seed(0))
    model = arithmetic.MODEL(arithmetic.PLAN.task.shape)
    reasoner = ConvolutionalReasoner(32, axes=1, depth=arithmetic.DEPTH)
    reasoner.block.load_state_dict(model.blocks[0].block.state_dict())
    x = model.embed(examples.inputs)
    torch.testing.assert_close(
        model.steps(torch.zeros_like(x), x, examples.edges, 4), reasoner(x.mT.contiguous(), steps=4).mT
    )
    assert prefix.Convolutional(prefix.PLAN.task.shape).depth == prefix.DEPTH != arithmetic.DEPTH


def test_steps_of_two_streams_are_those_of_the_reasoner():
    torch.manual_seed(0)
    shape = Shape(features=5, classes=4, dim=8, heads=2)
    model = two_streams.Reasoner(shape, cycles=3)
    reasoner = TwoStreamReasoner(two_streams.Net(shape), cycles=3)
    reasoner.block.load_state_dict(model.blocks[0].block.state_dict())
    inputs, edges = torch.randn(2, 16, 5), torch.ones(2, 16, 16, dtype=torch.bool)
    x = model.embed(inputs)
    found = model.steps(torch.zeros_like(x), x, edges, 4)
    high, low = reasoner(inputs @ model.embed.weight.T + model.embed.bias, edges, steps=4)
    torch.testing.assert_close(found, torch.cat([high, low], -1))
    torch.testing.assert_close(model.head(found), high @ model.head.weight.T + model.head.bias)


def test_a_wall_is_what_lies_beyond_the_border():
    """A maze within a larger one of walls alone has the same states."""
    torch.manual_seed(0)
    model = mazes_image.Convolutional(mazes_image.PLAN.task.shape)
    inputs = mazes_image.square(mazes_image.images(9, 2, "a test", test=True).inputs)
    wide = torch.nn.functional.pad(inputs, (0, 0, 3, 3, 3, 3))

    def state(image):
        tokens = image.flatten(1, 2)
        x = model.embed(tokens)
        return mazes_image.square(model.steps(torch.zeros_like(x), x, tokens[..., :1] > 0, 5))

    torch.testing.assert_close(state(wide)[:, 3:-3, 3:-3], state(inputs))


@pytest.mark.parametrize("suite", [mazes_image, arithmetic, two_streams])
def test_stacks_have_the_parameters_of_the_tied_block(suite):
    tied, stack = (
        next(c for c in suite.PLAN.contenders if end(c.name)).make(suite.PLAN.task.shape)
        for end in (lambda name: name == suite.LARGER.tied, lambda name: name.endswith("the same parameters"))
    )
    counts = [sum(p.numel() for p in model.parameters()) for model in (tied, stack)]
    assert counts[1] == pytest.approx(counts[0], rel=0.15)


@pytest.mark.slow
def test_a_quick_run_has_every_contender(tmp_path):
    asked = ["usefulness", "--quick", "--only", "mazes_image,arithmetic,sudoku9_streams", "--out", str(tmp_path)]
    done = CliRunner().invoke(command.app, asked)
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("usefulness-partial-*.json")
    rows = json.loads(path.read_text())["rows"]
    for suite in (mazes_image, arithmetic, two_streams):
        found = [row for row in rows if row["metric"] == suite.PLAN.metric]
        assert [row["contender"] for row in found] == [contender.name for contender in suite.PLAN.contenders]
        for row, contender in zip(found, suite.PLAN.contenders, strict=True):
            ways = {way.name for way in contender.ways} or {"guess"}
            assert set(row["runs"][0]["ways"]) == ways

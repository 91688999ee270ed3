"""The data of PREFIX and PATHS, and the progressive loss."""

import random
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.puzzles import paths, prefix  # noqa: E402
from benchmarks.puzzles.training import Progressive, loss  # noqa: E402


def by_breadth(edges, source):
    """Lengths from the source, -1 for nodes that no path reaches."""
    length, front = {source: 0}, [source]
    while front:
        front = [
            j
            for i in front
            for j in edges[i].tolist()
            if j >= 0 and j not in length and not length.update({j: length[i] + 1})
        ]
    return [length.get(i, -1) for i in range(len(edges))]


def test_path_lengths_are_those_of_a_search():
    drawn = paths.graphs(30, 40, torch.Generator().manual_seed(0))
    for inputs, edges, targets in zip(*drawn, strict=True):
        (source,) = inputs[:, 0].nonzero().flatten().tolist()
        assert edges[:, 0].tolist() == list(range(40))
        lists = [{j for j in row[1:].tolist() if j >= 0} for row in edges]
        assert all(i in lists[j] for i, own in enumerate(lists) for j in own)
        assert not any(i in own for i, own in enumerate(lists))
        assert all(lists)
        lengths = by_breadth(edges, source)
        assert targets.tolist() == [3 if length < 0 else length % 3 for length in lengths]
        assert 10 < lengths.count(-1) + 10 < 35
    # Large graphs have paths that are longer than the loop of the training.
    large = paths.graphs(50, 128, torch.Generator().manual_seed(0))
    ends = [max(by_breadth(edges, int(inputs[:, 0].argmax()))) for inputs, edges, _ in zip(*large, strict=True)]
    assert min(ends) > paths.STEPS[-1]


def test_parities_are_those_of_a_running_sum_and_test_strings_are_not_learnt_from():
    drawn, asked = prefix.Prefix().draw(50, torch.Generator().manual_seed(0)), prefix.Prefix().test("64 bits", 20)
    for bits, targets in zip(asked.inputs[..., 0].long(), asked.targets, strict=True):
        assert targets.tolist() == [int(bits[: i + 1].sum()) % 2 for i in range(64)]
    # The first 16 bits tell to which of both a string belongs.
    learnt, held_out = (
        (examples.inputs[:, :16, 0].long() * 2 ** torch.arange(16)).sum(-1) % 5 == 0 for examples in (drawn, asked)
    )
    assert not learnt.any()
    assert held_out.all()


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_progressive_loss_is_that_of_the_last_steps_alone(share):
    torch.manual_seed(0)
    task = prefix.PLAN.task
    model, batch = prefix.Convolutional(task.shape), task.draw(4, torch.Generator().manual_seed(0))
    (state,) = Progressive(9, share).states(model, batch, random.Random(1), 0.0)
    draw = random.Random(1)
    begun = draw.randrange(9)
    counted = draw.randint(1, 9 - begun)
    x = model.embed(batch.inputs)
    z = model.steps(torch.zeros_like(x), x, batch.edges, begun).detach()
    z = model.steps(z, x, batch.edges, counted)
    expected = loss(model, z, batch.targets)
    if share == 0.5:
        last = model.steps(torch.zeros_like(x), x, batch.edges, 9)
        expected = (expected + loss(model, last, batch.targets)) / 2
    weights = list(model.parameters())
    found = loss(model, state, batch.targets)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(part, weights) for part in (found, expected)))

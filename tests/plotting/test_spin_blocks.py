import dataclasses

import pytest
import torch
from figure_files import png

from implicit_attention.plotting import decomposition_figure
from implicit_attention.spins import Decomposition
from implicit_attention.testing.numerics import random

PARTS = [field.name for field in dataclasses.fields(Decomposition)][:4]


def parts(seed):
    made = [random(2, 3, 4, 5, seed=seed + index) for index in range(4)]
    return Decomposition(*made, gain=made[0][..., 0])


def test_every_part_of_every_block_is_a_bar_of_its_size_and_the_sum_a_line():
    blocks = [parts(0), parts(10), parts(20)]
    figure = decomposition_figure(blocks, names=["a", "b", "c"], title="stack")
    (axes,) = figure.axes
    assert figure.get_suptitle() == "stack"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["a", "b", "c"]
    for name, bars in zip(PARTS, axes.containers, strict=True):
        sizes = [float(getattr(block, name).square().sum(-1).mean().sqrt()) for block in blocks]
        assert [bar.get_height() for bar in bars] == pytest.approx(sizes)
    edges = [[bar.get_x() for bars in axes.containers for bar in bars[i : i + 1]] for i in range(3)]
    for index, left in enumerate(edges):
        # A group stands around its tick, and no bar hides another.
        assert index - 0.5 < left[0] < left[1] < left[2] < left[3] < index + 0.5
    for line, block in zip(axes.collections, blocks, strict=True):
        height = float(
            (block.field + block.coupling + block.onsager + block.coupling_function).norm(dim=-1).square().mean()
        )
        assert line.get_segments()[0][0, 1] == pytest.approx(height**0.5)
    labels = [text.get_text() for text in figure.legends[0].texts]
    assert len(labels) == 5
    assert "sum, m" in labels
    assert png(figure)[:4] == b"\x89PNG"


def test_sites_without_an_answer_are_left_out_and_blocks_are_numbered():
    block = parts(0)
    holes = {name: getattr(block, name).clone() for name in (*PARTS, "gain")}
    for hole in holes.values():
        hole[0, 1] = torch.nan
    drawn = decomposition_figure([Decomposition(**holes)]).axes[0]
    live = torch.ones(2, 3, dtype=torch.bool)
    live[0, 1] = False
    size = float(block.field[live].square().sum(-1).mean().sqrt())
    assert drawn.containers[0][0].get_height() == pytest.approx(size)
    assert [text.get_text() for text in drawn.get_xticklabels()] == ["1"]

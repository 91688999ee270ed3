"""How far one step of bare self-attention moves tokens."""

import io

import pytest
import torch

from implicit_attention import LogSumExp
from implicit_attention.plotting import step_norm_figure, step_norms


@pytest.mark.parametrize(
    ("dim", "scale", "low", "high"),
    [
        (2, 1.0, 2.8, 3.2),
        (8, 1.0, 7.5, 7.8),
        (64, 1.0, 1.7, 2.2),
        (64, 0.5, 17.1, 18.3),
        (512, 1.0, 3e-6, 6e-6),
        (512, 0.5, 0.076, 0.097),
    ],
)
def test_medians_lie_within_the_known_quartiles(dim, scale, low, high):
    # Ten times as many draws as the quartiles are of, so that the median is that of the law.
    assert low <= step_norms([dim], [scale], draws=400 if dim < 512 else 40).median() <= high


def test_few_tokens_in_many_dimensions_hardly_move_in_float64():
    # float32 rounds to 5e-6.
    assert 1e-8 < step_norms([512], [1.0], tokens=8).median() < 1e-6


def test_norms_are_those_of_attention_over_the_tokens_themselves():
    found = step_norms([5], [0.7, 1.3], tokens=4, draws=3, seed=2)
    assert found.shape == (2, 1, 3)
    generator = torch.Generator().manual_seed(2 * 1_000_003 + 5)
    x = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    for row, scale in enumerate((0.7, 1.3)):
        moved = x - LogSumExp(x, scale / 5**0.5).mean(x)
        torch.testing.assert_close(found[row, 0], torch.linalg.matrix_norm(moved))


def test_a_dimension_has_its_own_draws_whatever_the_others_are():
    together = step_norms([2, 7], [1.0, 2.0], draws=3)
    assert torch.equal(together[:, 1:], step_norms([7], [1.0, 2.0], draws=3))
    assert torch.equal(together[1:], step_norms([2, 7], [2.0], draws=3))
    assert not torch.equal(together, step_norms([2, 7], [1.0, 2.0], draws=3, seed=1))


def test_the_figure_draws_medians_by_powers_of_ten():
    dims, scales = [2, 16, 128], [0.5, 1.0, 2.0]
    norms = torch.tensor([[10.0, 1.0, 0.1], [1.0, 0.1, 1e-3], [1e-2, 1e-5, 0.0]]).double()
    # Of three draws the middle one counts.
    figure = step_norm_figure(dims, scales, norms=torch.stack([0 * norms, norms, 100 * norms], -1))
    axes, bar = figure.axes
    assert (axes.get_xlabel(), bar.get_ylabel()[:9]) == ("dimension $d$", "median of")
    assert "inverse temperature" in axes.get_ylabel()
    assert axes.get_xscale() == "log"
    assert (axes.get_xlim(), axes.get_ylim()) == ((2, 128), (0.5, 2))
    # Powers below 1e-8 are one colour.
    assert bar.get_ylim() == (-8, 1)
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    assert stream.getvalue()[:4] == b"\x89PNG"


def test_the_figure_computes_what_it_is_not_given():
    dims, scales = [2, 8], [0.5, 1.0]
    given = step_norm_figure(dims, scales, norms=step_norms(dims, scales))
    own = step_norm_figure(dims, scales)
    for a, b in zip(own.axes[0].collections, given.axes[0].collections, strict=True):
        assert [path.vertices.tolist() for path in a.get_paths()] == [path.vertices.tolist() for path in b.get_paths()]

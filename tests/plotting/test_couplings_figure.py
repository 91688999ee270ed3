import math

import pytest
import torch
from figure_files import png

from implicit_attention.plotting import couplings_figure, site_places
from implicit_attention.spins import Bonds
from implicit_attention.testing.numerics import random


def lattice(rows, columns, *, closed=False):
    """Neighbours on a square lattice, one pair at a time."""
    couplings = torch.zeros(rows * columns, rows * columns)
    for y in range(rows):
        for x in range(columns):
            for across, down in ((x + 1, y), (x, y + 1)):
                if closed or (across < columns and down < rows):
                    other = down % rows * columns + across % columns
                    couplings[y * columns + x, other] = couplings[other, y * columns + x] = 1.0
    return couplings


@pytest.mark.parametrize(("rows", "columns"), [(3, 4), (4, 3), (2, 5), (6, 6), (5, 1), (1, 5)])
@pytest.mark.parametrize("closed", [False, True])
def test_a_lattice_is_found_from_its_couplings(rows, columns, closed):
    places = site_places(lattice(rows, columns, closed=closed))
    # An open chain is one row; a closed one is drawn as a circle.
    chain = min(rows, columns) == 1
    wide = 5 if chain else columns
    wanted = [[i % wide, -(i // wide)] for i in range(rows * columns)]
    assert (places.tolist() == wanted) == (not (chain and closed))


def test_what_is_no_lattice_is_a_circle():
    diagonal = lattice(4, 4)
    diagonal[0, 5] = 1.0
    for couplings in (diagonal, torch.ones(7, 7), random(9, 9), torch.ones(3, 3, 2, 2)):
        places = site_places(couplings)
        count = len(couplings)
        torch.testing.assert_close(places.norm(dim=-1), places.new_full((count,), max(1.0, count / (2 * math.pi))))
        assert len({tuple(place) for place in places.round(decimals=6).tolist()}) == count
        assert places[0, 1] > 0


def test_places_of_a_lattice_are_in_reading_order():
    assert site_places(lattice(2, 3)).tolist() == [[0, 0], [1, 0], [2, 0], [0, -1], [1, -1], [2, -1]]
    # Diagonal couplings are of no pair.
    assert torch.equal(site_places(lattice(2, 3) + torch.eye(6)), site_places(lattice(2, 3)))
    assert site_places(torch.zeros(1, 1)).tolist() == [[0, 0]]


def lines_of(figure):
    (lines, _) = figure.axes[0].collections
    return lines


def test_lines_join_the_pairs_wide_where_strong_and_dashed_where_negative():
    couplings = torch.zeros(4, 4)
    couplings[0, 1] = couplings[1, 0] = 2.0
    couplings[2, 0] = couplings[0, 2] = -1.0
    couplings[3, 3] = 9.0
    figure = couplings_figure(couplings, places=torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 5.0], [1.0, 1.0]]))
    lines = lines_of(figure)
    # The strongest is last, above the other.
    assert [segment.tolist() for segment in lines.get_segments()] == [[[0, 0], [0, 5]], [[0, 0], [3, 0]]]
    weak, strong = lines.get_linewidths()
    assert weak < strong < 2.1 * weak
    (_, dashes), (_, solid) = lines.get_linestyles()
    assert dashes is not None
    assert solid is None
    assert len({tuple(color) for color in lines.get_colors()}) == 2
    assert figure.legends[0].texts[-1].get_text() == "widest: |J| = 2"
    assert png(figure)[:4] == b"\x89PNG"


def test_couplings_around_the_ends_of_a_lattice_are_stubs():
    open_, closed = (
        lines_of(couplings_figure(lattice(3, 4, closed=closed))).get_segments() for closed in (False, True)
    )
    # 3 x 3 + 2 x 4 pairs; four columns and three rows are closed, each by two stubs.
    assert len(open_) == 17
    assert len(closed) == 17 + 2 * 7
    assert max(math.dist(*segment) for segment in closed) == 1.0
    # The same far pair is a line where places are given.
    places = site_places(lattice(3, 4))
    assert len(lines_of(couplings_figure(lattice(3, 4, closed=True), places=places)).get_segments()) == 17 + 7


def test_matrices_count_by_their_norm_and_the_sign_of_their_trace():
    couplings = torch.zeros(2, 2, 3, 3)
    couplings[0, 1] = couplings[1, 0] = -2 * torch.eye(3)
    figure = couplings_figure(couplings)
    assert figure.legends[0].texts[-1].get_text() == f"widest: |J| = {2 * 3**0.5:.3g}"
    assert lines_of(figure).get_linestyles()[0][1] is not None


def test_of_many_pairs_the_strongest_are_drawn_and_the_title_says_so():
    couplings = torch.ones(6, 6).triu(1)
    couplings[0, 1], couplings[2, 5] = 3.0, 4.0
    figure = couplings_figure(couplings + couplings.T, strongest=2, title="six")
    assert figure.get_suptitle() == "six\nthe 2 strongest of 15 pairs"
    places = site_places(couplings).tolist()
    drawn = [[tuple(end) for end in segment.tolist()] for segment in lines_of(figure).get_segments()]
    assert drawn == [[tuple(places[0]), tuple(places[1])], [tuple(places[2]), tuple(places[5])]]
    assert "15 pairs" not in couplings_figure(couplings + couplings.T, strongest=15).get_suptitle()


def test_of_a_matrix_that_is_not_symmetric_the_symmetric_part_is_drawn():
    figure = couplings_figure(torch.tensor([[0.0, 3.0], [1.0, 0.0]]))
    assert figure.legends[0].texts[-1].get_text() == "widest: |J| = 2"
    assert "not symmetric" in figure.get_suptitle()
    assert "not symmetric" not in couplings_figure(torch.ones(2, 2)).get_suptitle()


def test_spins_colour_the_sites_and_negative_ones_have_a_dashed_rim():
    figure = couplings_figure(lattice(2, 2), spins=torch.tensor([1.0, -1.0, 0.5, torch.nan]))
    sites = figure.axes[0].collections[1]
    assert sites.get_array()[:3].tolist() == [1.0, -1.0, 0.5]
    assert [dashes is not None for _, dashes in sites.get_linestyles()] == [False, True, False, False]
    assert [text.get_text() for text in figure.axes[0].texts] == ["0", "1", "2", "3"]
    assert png(figure)


@pytest.mark.parametrize("count", [1, 2, 3, 80])
@pytest.mark.parametrize("full", [False, True])
def test_odd_systems_are_drawn(count, full):
    assert png(couplings_figure(torch.ones(count, count) if full else torch.zeros(count, count)))


def test_bonds_are_drawn_as_their_tensor():
    pairs, values = torch.tensor([[0, 1], [2, 1], [0, 2]]), torch.tensor([1.0, -0.5, 2.0])
    bonds = Bonds(pairs, values, 3)
    assert torch.equal(site_places(bonds), site_places(bonds.dense()))
    drawn, right = (couplings_figure(given).axes[0].collections[0] for given in (bonds, bonds.dense()))
    assert len(drawn.get_segments()) == 3
    assert torch.equal(torch.tensor(drawn.get_linewidths()), torch.tensor(right.get_linewidths()))
    with pytest.raises(ValueError, match="have at most 2,048 sites, got Bonds of 3,000 sites; draw fewer"):
        couplings_figure(Bonds(pairs, values, 3000))
    with pytest.raises(ValueError, match="of several samples draw one"):
        couplings_figure(Bonds(pairs, values.expand(2, 3), 3))

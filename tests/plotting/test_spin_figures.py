import pytest
import torch
from figure_files import png
from matplotlib.colors import to_hex, to_rgb

from implicit_attention.plotting import configuration_figure, phase_figure
from implicit_attention.testing.numerics import random

#: The colour behind what has no number.
NOTHING = "#F3DDC7"


def panels(figure):
    """The axes but for the colour bar."""
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>" and axes.axison]


def test_ising_spins_are_images_in_reading_order_and_nothing_is_left_blank():
    states = torch.tensor([1.0, -1.0, 0.5, torch.nan, 2.0])[None, :, None]
    figure = configuration_figure([("m", states)], radius=2.0)
    (axes,) = panels(figure)
    image = axes.images[0].get_array()
    assert image.shape == (2, 3)
    assert image[0].tolist() == [0.5, -0.5, 0.25]
    # What is not a number, and the cell beyond the last site.
    assert torch.as_tensor(image.filled(torch.nan)).isnan().tolist() == [[False] * 3, [True, False, True]]
    assert axes.images[0].get_clim() == (-1, 1)
    assert png(figure)[:4] == b"\x89PNG"


@pytest.mark.parametrize("dim", [2, 3])
def test_vectors_are_arrows_that_point_where_the_spins_do(dim):
    states = random(1, 7, dim)
    states[0, 3] = torch.nan
    figure = configuration_figure([("m", states), ("another", -states)], radius=1.5)
    for axes, sign in zip(panels(figure), (1, -1), strict=True):
        (arrows,) = axes.collections
        expected = (sign * states[0] / 1.5)[torch.arange(7) != 3]
        torch.testing.assert_close(torch.as_tensor(arrows.U), expected[:, 0])
        # Rows are counted downwards.
        torch.testing.assert_close(torch.as_tensor(arrows.V), -expected[:, 1])
        assert axes.yaxis_inverted()
        assert to_hex(axes.get_facecolor()) == NOTHING.lower()
        if dim == 3:
            torch.testing.assert_close(torch.as_tensor(arrows.get_array()), expected[:, 2])
    assert [axes.get_title() for axes in panels(figure)] == ["m", "another"]
    assert to_hex(panels(configuration_figure([("m", random(1, 7, dim))]))[0].get_facecolor()) == "#ffffff"
    assert png(figure)


def test_of_many_dimensions_the_two_are_drawn_that_hold_most():
    states = torch.zeros(1, 6, 5, dtype=torch.float64)
    states[0, :, 3], states[0, :, 1], states[0, :, 0] = 3 * random(6, seed=1), 2 * random(6, seed=2), 1e-3
    figure = configuration_figure([("m", states)])
    (arrows,) = panels(figure)[0].collections
    drawn = torch.stack([torch.as_tensor(arrows.U), torch.as_tensor(arrows.V)], -1)
    torch.testing.assert_close(drawn.norm(dim=-1), states[0].norm(dim=-1), rtol=1e-5, atol=1e-5)
    assert "5 dimensions; drawn are the two that hold 100 %" in figure.get_suptitle()


def test_a_batch_is_a_grid_with_names_headings_and_notes():
    rows = [("field", random(3, 4, 1, seed=1)), ("m", random(3, 4, 1, seed=2))]
    figure = configuration_figure(rows, columns=["a", "b", "c"], notes={"m": ["1", "2", "3"]}, title="batch")
    axes = panels(figure)
    assert [a.get_ylabel() for a in axes[::3]] == ["field", "m"]
    assert [a.get_title() for a in axes[:3]] == ["a", "b", "c"]
    assert [a.get_xlabel() for a in axes] == ["", "", "", "1", "2", "3"]
    assert figure.get_suptitle() == "batch"
    assert png(figure)


def test_single_states_are_put_side_by_side_and_wrapped():
    figure = configuration_figure([(f"m {i}", random(1, 4, 1, seed=i)) for i in range(7)])
    assert [axes.get_title() for axes in panels(figure)] == [f"m {i}" for i in range(7)]
    assert len([axes for axes in figure.axes if not axes.axison]) == 3


def test_sites_that_are_all_coupled_are_on_a_circle_and_a_lattice_keeps_its_rows():
    states = random(1, 6, 1)
    (axes,) = panels(configuration_figure([("m", states)], couplings=torch.ones(6, 6)))
    assert len(axes.images) == 0
    (discs,) = axes.collections
    torch.testing.assert_close(torch.as_tensor(discs.get_array().data), states[0, :, 0])
    at = torch.as_tensor(discs.get_offsets())
    torch.testing.assert_close(at.norm(dim=-1), torch.ones(6, dtype=torch.float64))
    # The first is on top, where y is counted downwards, and the second to the right of it.
    assert at[0].tolist() == pytest.approx([0.0, -1.0])
    assert at[1, 0] > 0 > at[1, 1]
    assert axes.yaxis_inverted()
    ladder = torch.zeros(6, 6)
    for i, j in ((0, 1), (2, 3), (4, 5), (0, 2), (2, 4), (1, 3), (3, 5)):
        ladder[i, j] = ladder[j, i] = 1.0
    (axes,) = panels(configuration_figure([("m", states)], couplings=ladder))
    assert axes.images[0].get_array().shape == (3, 2)
    # A chain is broken into lines, and too many sites for a circle are in rows.
    (axes,) = panels(configuration_figure([("m", states)], couplings=torch.diag(torch.ones(5), 1)))
    assert axes.images[0].get_array().shape == (2, 3)
    (axes,) = panels(configuration_figure([("m", random(1, 64, 1))], couplings=torch.ones(64, 64)))
    assert axes.images[0].get_array().shape == (8, 8)


@pytest.mark.parametrize("dim", [2, 3])
def test_arrows_stand_on_the_circle(dim):
    states = random(1, 12, dim)
    states[0, 5] = torch.nan
    figure = configuration_figure([("m", states)], couplings=torch.ones(12, 12))
    (arrows,) = panels(figure)[0].collections
    at = torch.as_tensor(arrows.get_offsets())
    assert len(at) == 11
    torch.testing.assert_close(at.norm(dim=-1), torch.full((11,), 12 / (2 * torch.pi), dtype=torch.float64))
    torch.testing.assert_close(torch.as_tensor(arrows.V), -states[0, torch.arange(12) != 5, 1])
    assert png(figure)


def test_negative_numbers_are_marked_as_the_palette_is_symmetric_in_grey():
    states = torch.tensor([0.9, -0.9, -0.3, torch.nan])[None, :, None]
    for couplings in (None, torch.ones(4, 4)):
        (axes,) = panels(configuration_figure([("m", states)], couplings=couplings))
        assert [line.get_marker() for line in axes.lines] == ["_", "_"]
        assert [len(line.get_xdata()) for line in axes.lines] == [1, 1]
    (axes,) = panels(configuration_figure([("m", states)], palette="gray_r"))
    assert len(axes.lines) == 0


def test_a_state_without_any_number_says_so():
    rows = [("m", random(1, 4, 1)), ("tap", torch.full((1, 4, 1), torch.nan))]
    # One number that is missing is no missing answer.
    rows[0][1][0, 2] = torch.nan
    for couplings in (None, torch.ones(4, 4)):
        first, second = panels(configuration_figure(rows, couplings=couplings))
        assert [text.get_text() for text in (*first.texts, *second.texts)] == ["no answer"]
        assert to_hex(second.get_facecolor()) == NOTHING.lower()


@pytest.mark.parametrize("shape", [(0, 4, 1), (1, 1, 1), (1, 1, 2), (2, 3, 9)])
def test_odd_shapes_are_drawn(shape):
    assert png(configuration_figure([("m", torch.zeros(shape))]))


BETAS = torch.linspace(0.1, 1.0, 5, dtype=torch.float64)
PANELS = {"m": "magnetization", "c": "heat capacity"}


def test_every_method_is_a_line_in_every_panel_and_failed_points_are_gaps_with_crosses():
    values = random(5).abs()
    holes = values.clone()
    holes[2] = torch.nan
    failed = {"naive": torch.tensor([False, False, True, False, False]), "exact": torch.zeros(5, dtype=torch.bool)}
    curves = {"naive": {"m": holes, "c": holes}, "exact": {"m": values, "c": values}}
    figure = phase_figure(BETAS, curves, panels=PANELS, failed=failed, exact=["exact"], title="sweep")
    assert [axes.get_ylabel() for axes in figure.axes] == list(PANELS.values())
    for axes in figure.axes:
        lines = {line.get_label(): line for line in axes.lines}
        naive, exact = (torch.as_tensor(lines[name].get_ydata()) for name in ("naive", "exact"))
        assert naive.isnan().tolist() == failed["naive"].tolist()
        torch.testing.assert_close(exact, values)
        crosses = [line for line in axes.lines if line.get_marker() == "x" and len(line.get_xdata())]
        assert [line.get_xdata().tolist() for line in crosses] == [[float(BETAS[2])]]
        assert crosses[0].get_color() == lines["naive"].get_color() != lines["exact"].get_color()
        assert lines["exact"].get_linewidth() > lines["naive"].get_linewidth()
    assert [text.get_text() for text in figure.legends[0].texts] == ["naive", "exact", "no answer"]
    assert png(figure)[:4] == b"\x89PNG"


def test_a_method_may_lack_a_quantity():
    figure = phase_figure(BETAS, {"a": {"m": BETAS}, "b": {"m": BETAS, "c": BETAS}}, panels=PANELS)
    assert [len(axes.lines) for axes in figure.axes] == [2, 1]


def test_methods_beyond_the_palette_differ_in_colour_or_dashes():
    curves = {str(i): {"m": BETAS} for i in range(20)}
    figure = phase_figure(BETAS, curves, panels={"m": "m"})
    assert len({(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}) == 20


def test_no_method_is_grey_as_what_is_exact_is():
    def spread(color):
        return max(to_rgb(color)) - min(to_rgb(color))

    curves = {str(i): {"m": BETAS} for i in range(8)} | {"exact": {"m": BETAS}}
    lines = phase_figure(BETAS, curves, panels={"m": "m"}, exact=["exact"]).axes[0].lines
    assert min(spread(line.get_color()) for line in lines[:-1]) > 0.2
    # In grey, dashes and marks are what is left.
    assert len({(line.get_linestyle(), line.get_marker()) for line in lines}) == 9


def test_a_point_between_two_gaps_has_a_mark():
    betas = torch.linspace(0.1, 1.0, 40, dtype=torch.float64)
    for alone in range(5, 12):
        holes = torch.full((40,), torch.nan)
        holes[alone], holes[20:] = 0.5, 1.0
        (line,) = phase_figure(betas, {"a": {"m": holes}}, panels={"m": "m"}).axes[0].lines
        assert alone in line.get_markevery()
        assert len(line.get_markevery()) < 12


def test_a_peak_does_not_flatten_the_rest():
    peak = torch.tensor([1.0, 1.0, 1000.0, 1.0, 2.0])
    assert phase_figure(BETAS, {"a": {"m": peak}}, panels={"m": "m"}).axes[0].get_yscale() == "log"
    assert phase_figure(BETAS, {"a": {"m": peak - 2}}, panels={"m": "m"}).axes[0].get_yscale() == "linear"


def test_a_sweep_without_any_answer_is_drawn():
    nothing = torch.full((5,), torch.nan)
    lost = {"a": torch.ones(5, dtype=torch.bool)}
    assert png(phase_figure(BETAS, {"a": {"m": nothing, "c": nothing}}, panels=PANELS, failed=lost))
    assert png(phase_figure(BETAS, {}, panels=PANELS))


def test_what_is_left_of_a_zero_by_rounding_is_no_peak():
    rounding = torch.tensor([1e-16, 3e-17, 1e-14, 2e-17, 1e-16])
    for curve in (rounding, torch.tensor([1e-16, 3e-17, 1e-14, 0.5, 0.9])):
        axes = phase_figure(BETAS, {"a": {"m": curve}}, panels={"m": "m"}).axes[0]
        assert axes.get_yscale() == "linear"
        assert axes.lines[0].get_ydata()[:3].tolist() == [0.0, 0.0, 0.0]
    assert float(axes.lines[0].get_ydata()[4]) == pytest.approx(0.9)

import pytest
import torch
from PIL import Image

from implicit_attention.plotting import maze_figure, save_maze_gif, sizes_figure

# Two by two cells: down from the first, and right from it and from the third.
WAYS = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 0], [1, 0, 0, 1], [0, 0, 1, 0]]).bool()
#: Pixels of a cell, and between two.
CELL, BETWEEN = 7, 2
STEP = CELL + BETWEEN


def pixels(figure):
    return figure.axes[0].images[0].get_array()


def test_cells_have_their_shade_walls_are_dark_and_open_ways_are_as_faint_as_the_fainter_cell():
    figure = maze_figure([("a", torch.tensor([1.0, 0.0, 1.0, 0.4]))], WAYS, start=0, goal=3)
    image = torch.as_tensor(pixels(figure)).double()
    assert image.shape == (2 * STEP + BETWEEN, 2 * STEP + BETWEEN, 3)
    middle = [BETWEEN + CELL // 2, BETWEEN + STEP + CELL // 2]
    on, off = image[middle[0], middle[0]], image[middle[0], middle[1]]
    assert off.tolist() == [1, 1, 1]
    assert on[0] < on[2]
    torch.testing.assert_close(image[middle[1], middle[0]], on)
    wall = image[0, 0]
    assert float(wall.max()) < 0.25
    # Between cells: right of the first (open, to an empty cell), below it (open), below the second (a wall).
    torch.testing.assert_close(image[middle[0], BETWEEN + CELL], off)
    torch.testing.assert_close(image[BETWEEN + CELL, middle[0]], on)
    torch.testing.assert_close(image[BETWEEN + CELL, middle[1]], wall)
    torch.testing.assert_close(image[middle[1], BETWEEN + CELL], image[middle[1], middle[1]])
    assert [text.get_text() for text in figure.axes[0].texts] == ["S", "G"]


def test_panels_stand_in_rows_with_their_headings():
    panels = [(f"{i}", torch.full((4,), i / 4)) for i in range(5)]
    figure = maze_figure(panels, WAYS, start=0, goal=3, columns=3, title="five")
    assert [axes.get_title() for axes in figure.axes if axes.get_visible()] == list("01234")
    assert figure.get_suptitle() == "five"


@pytest.mark.slow
@pytest.mark.parametrize(("every", "frames"), [(1, 9), (3, 4), (100, 2)])
def test_a_gif_has_the_frames_that_were_asked_for_and_rests_at_the_end(tmp_path, every, frames):
    states = [torch.full((4,), i / 9) for i in range(9)]
    residuals = [10.0**-i for i in range(9)]
    file = tmp_path / "m.gif"
    save_maze_gif(file, states, WAYS, start=0, goal=3, residuals=residuals, tolerance=1e-4, fps=10, every=every)
    with Image.open(file) as image:
        durations = []
        for index in range(image.n_frames):
            image.seek(index)
            durations.append(image.info["duration"])
    # Equal frames are one that stays: two seconds for the last.
    assert len(durations) == frames
    assert durations[:-1] == [100] * (len(durations) - 1)
    assert durations[-1] == 2000


def test_sizes_figure_draws_a_curve_with_errors_for_every_way():
    curves = {"solved": [(5, 1.0, 0.0), (9, 0.9, 0.02)], "loop": [(5, 0.8, 0.1), (9, 0.1, 0.05)]}
    figure = sizes_figure(curves, trained=5, title="sizes")
    axes = figure.axes[0]
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"solved", "loop", "trained on"}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["5 x 5", "9 x 9"]
    assert len(axes.containers) == 2

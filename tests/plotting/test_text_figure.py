"""Text whose characters have the colour of their evaluations."""

import torch
from figure_files import png

from implicit_attention.plotting import text_figure

TEXT = "def f(x):\n    return $x_1$\n"


def letters(figure):
    """(row, column) -> the letter drawn there."""
    return {(int(t.get_position()[1]), int(t.get_position()[0])): t.get_text() for t in figure.axes[0].texts}


def test_every_character_stands_in_its_cell_in_the_colour_of_its_number():
    numbers = torch.arange(len(TEXT)) % 5 + 1
    figure = text_figure(TEXT, numbers, title="some code")
    cells = figure.axes[0].images[0].get_array()
    lines = TEXT.splitlines(keepends=True)
    assert cells.shape == (2, max(map(len, lines)))
    drawn = letters(figure)
    for row, line in enumerate(lines):
        for column, letter in enumerate(line):
            assert drawn.get((row, column), " ") == (" " if letter.isspace() else letter)
            assert cells[row, column] == numbers[len("".join(lines[:row])) + column]
        assert cells.mask[row, len(line) :].all()
    assert [round(tick) for tick in figure.axes[1].get_yticks()] == [1, 2, 3, 4, 5]
    assert figure.axes[1].get_ylabel() == "evaluations of the character"
    assert png(figure)[:4] == b"\x89PNG"


def test_long_lines_are_broken_and_the_colours_have_the_name_that_is_given():
    figure = text_figure("abcdefgh", torch.ones(8), columns=3, label="steps")
    assert figure.axes[1].get_ylabel() == "steps"
    assert letters(figure) == {divmod(i, 3): letter for i, letter in enumerate("abcdefgh")}


def test_letters_are_dark_on_light_colours_and_light_on_dark_ones():
    figure = text_figure("ab", torch.tensor([1, 9]))
    assert [t.get_color() for t in figure.axes[0].texts] == ["black", "white"]


def test_many_numbers_share_colours():
    figure = text_figure("a" * 100, torch.arange(100))
    assert len(figure.axes[1].get_yticks()) == 15
    assert png(figure)[:4] == b"\x89PNG"

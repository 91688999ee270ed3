"""The animated picture of an answer whose places are the squares of a picture."""

import pytest
import torch
from PIL import Image

from implicit_attention.plotting import save_course_gif


def frames_of(file):
    """The pictures of a GIF, and how long each of them stays."""
    found = []
    with Image.open(file) as image:
        for index in range(image.n_frames):
            image.seek(index)
            found.append((image.convert("RGB"), image.info["duration"]))
    return found


def colours(image):
    return {colour for _, colour in image.getcolors(2**24)}


@pytest.mark.parametrize(("every", "count"), [(1, 5), (3, 3)])
def test_a_gif_rests_at_its_end_and_skips_what_is_not_asked_for(tmp_path, every, count):
    states = [torch.full((2, 3), i / 4) for i in range(5)]
    file = tmp_path / "a.gif"
    residuals = [10.0**-i for i in range(5)]
    save_course_gif(file, states, residuals=residuals, tolerance=1e-3, fps=5, every=every)
    durations = [duration for _, duration in frames_of(file)]
    assert durations == [200] * (count - 1) + [2000]


def test_squares_have_shades_walls_marks_and_words(tmp_path):
    state = torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])
    plain, marked, lettered = (tmp_path / name for name in ("a.gif", "b.gif", "c.gif"))
    options = {"residuals": [1e-4], "tolerance": 1e-3, "fps": 1}
    save_course_gif(plain, [state], **options)
    save_course_gif(marked, [state], marks=[(0, 0), (1, 1)], **options)
    save_course_gif(lettered, [state], texts=[[["1", "2"], ["[3]", "4"]]], **options)
    pictures = [frames_of(file)[0][0] for file in (plain, marked, lettered)]
    on, wall, start, goal = (0, 114, 178), (27, 39, 51), (0, 158, 115), (213, 94, 0)
    assert {on, wall} <= colours(pictures[0])
    assert {on, wall, start, goal} <= colours(pictures[1])
    assert goal not in colours(pictures[0])
    assert pictures[2].tobytes() != pictures[0].tobytes()

import torch

from implicit_attention.plotting import energies_figure, reconstruction_figure


def picture(axes):
    return torch.from_numpy(axes.images[0].get_array().data)


def test_images_are_shown_as_they_are_and_hidden_pixels_blank_in_the_first_column():
    images = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    hidden = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
    hidden[:, :, :2] = True
    figure = reconstruction_figure([("given", images), ("answer", 2 * images - 0.5)], hidden)
    first, second, third, _ = figure.axes
    assert (first.get_title(), second.get_title()) == ("given", "answer")
    shown = picture(first).permute(2, 0, 1)
    assert torch.equal(shown[:, 2:], images[0, :, 2:])
    assert len(shown[:, :2].flatten(1).unique(dim=1).T) == 1
    assert torch.equal(picture(second).permute(2, 0, 1), (2 * images[0] - 0.5).clamp(0, 1))
    assert torch.equal(picture(third).permute(2, 0, 1)[:, 2:], images[1, :, 2:])


def test_one_channel_is_ink_on_paper():
    image = torch.tensor([[[[0.0, 1.0], [torch.nan, 0.25]]]])
    figure = reconstruction_figure([("digit", image)], torch.zeros(1, 1, 2, 2, dtype=torch.bool))
    assert picture(figure.axes[0])[..., 0].tolist() == [[1.0, 0.0], [1.0, 0.75]]


def test_every_sample_has_a_line_in_every_panel():
    energies = torch.tensor([[0.0, 1.0], [-1.0, float("nan")], [-2.0, -3.0]])
    figure = energies_figure({"a": energies, "b": energies[:2]}, title="both")
    assert [axes.get_title() for axes in figure.axes] == ["a", "b"]
    assert [len(axes.lines) for axes in figure.axes] == [2, 2]
    assert figure.axes[0].lines[0].get_ydata().tolist() == [0.0, -1.0, -2.0]


def test_no_images_are_an_empty_figure():
    images, hidden = torch.zeros(0, 1, 4, 4), torch.zeros(0, 1, 4, 4, dtype=torch.bool)
    assert not reconstruction_figure([("a", images)], hidden).axes

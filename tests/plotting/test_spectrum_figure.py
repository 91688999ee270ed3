import pytest
import torch
from figure_files import png

from implicit_attention import AnchoredEnergy, FixedPointMap, LogSumExp, solve
from implicit_attention.diagnostics import spectral_radius
from implicit_attention.plotting import spectrum_figure
from implicit_attention.testing.numerics import random


def points(figure):
    """By their label, the eigenvalues that are drawn, and where."""
    return {
        line.get_label(): [complex(x, y) for x, y in zip(*line.get_data(), strict=True)]
        for line in figure.axes[0].lines
        if str(line.get_label()).startswith("modulus")
    }


def linear(matrices, event_ndim=1):
    return FixedPointMap(lambda z, matrices: torch.einsum("bij,bj->bi", matrices, z), matrices, event_ndim=event_ndim)


def spiral(modulus, angle):
    """Of which the eigenvalues are modulus exp(+- i angle)."""
    turn = torch.tensor(angle, dtype=torch.float64)
    return modulus * torch.stack([torch.stack([turn.cos(), -turn.sin()]), torch.stack([turn.sin(), turn.cos()])])


def test_complex_eigenvalues_are_points_beside_the_unit_circle():
    matrices = torch.stack([spiral(0.5, 1.0), spiral(1.5, 0.3)])
    figure = spectrum_figure(linear(matrices), torch.zeros(2, 2, dtype=torch.float64), title="two spirals")
    found = points(figure)
    unit = {
        sign: [
            complex(torch.polar(torch.tensor(m, dtype=torch.float64), torch.tensor(sign * a, dtype=torch.float64)))
            for m, a in ((0.5, 1.0), (1.5, 0.3))
        ]
        for sign in (1, -1)
    }
    for place, label in enumerate(("modulus below 1", "modulus 1 or more")):
        expected = sorted((unit[1][place], unit[-1][place]), key=lambda v: v.imag)
        assert sorted(found[label], key=lambda v: v.imag) == [pytest.approx(value) for value in expected]
    assert (
        figure.get_suptitle() == "two spirals\nlargest modulus: median 0.5, at most 1.5; 1 or more in 1 of 2 problems"
    )
    axes = figure.axes[0]
    (circle,) = (line for line in axes.lines if line.get_label() == "unit circle")
    torch.testing.assert_close(
        torch.tensor([abs(complex(*at)) for at in zip(*circle.get_data(), strict=True)]),
        torch.ones(181),
        rtol=1e-5,
        atol=1e-5,
    )
    assert axes.get_aspect() == 1.0
    assert axes.get_xlim()[1] > 1.5
    assert png(figure)[:4] == b"\x89PNG"


def test_real_ones_are_in_lines_of_their_problems_and_agree_with_two_other_routes():
    torch.manual_seed(0)
    keys, queries = random(9, 5, seed=1), random(6, 5, seed=2)
    energy = AnchoredEnergy(LogSumExp(keys, 1.0), queries, 0.25)
    value = solve(energy, queries).value
    found = points(spectrum_figure(energy, value))
    (drawn,) = found.values()
    assert len(drawn) == 6 * 5
    rows = {line: sorted(v.real for v in drawn if v.imag == line) for line in range(1, 7)}
    # Written out: df/dz = (1 - anchor) beta Cov(keys).
    p = (value @ keys.mT).softmax(-1)
    centred = keys - (p @ keys)[:, None]
    expected = torch.linalg.eigvalsh(0.75 * torch.einsum("qm,qmi,qmj->qij", p, centred, centred))
    order = expected[:, -1].argsort()
    torch.testing.assert_close(torch.tensor([rows[line] for line in range(1, 7)], dtype=torch.float64), expected[order])
    # And by Lanczos.
    largest = torch.tensor([max(rows[line]) for line in range(1, 7)], dtype=torch.float64)
    torch.testing.assert_close(largest, spectral_radius(energy, value).sort().values)


def test_coupled_states_and_half_precision_are_drawn():
    matrix = torch.diag(torch.tensor([0.5, -2.0, 0.25, 0.75, 0.0, 0.125]))
    problem = FixedPointMap(lambda z, m: (z.flatten(-2) @ m.mT).unflatten(-1, (2, 3)), matrix, event_ndim=2)
    for states in (torch.zeros(4, 2, 3), torch.zeros(2, 3), torch.zeros(0, 2, 3)):
        figure = spectrum_figure(problem, states)
        count = states.numel() // 6
        found = points(figure)
        assert len(found.get("modulus below 1", ())) == 5 * count
        assert [value.real for value in found.get("modulus 1 or more", ())] == [-2.0] * count
        assert png(figure)
    assert figure.get_suptitle() == "Eigenvalues of df/dz"
    small = linear((0.5 * torch.eye(3)).bfloat16().expand(2, 3, 3).contiguous())
    assert [v.real for v in points(spectrum_figure(small, torch.zeros(2, 3).bfloat16()))["modulus below 1"]] == [
        0.5
    ] * 6


def test_problems_that_are_not_finite_are_left_out_and_counted():
    matrices = 0.5 * torch.eye(2).repeat(3, 1, 1)
    matrices[1, 0, 0] = torch.nan
    figure = spectrum_figure(linear(matrices), torch.zeros(3, 2))
    assert len(points(figure)["modulus below 1"]) == 4
    assert figure.get_suptitle().splitlines()[-1] == "1 of 3 problems are not finite"

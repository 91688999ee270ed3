import re
from types import SimpleNamespace

import pytest
import torch
from figure_files import png

from implicit_attention import AnchoredEnergy, ImplicitAttention, LogSumExp, Picard, Status, solve
from implicit_attention.plotting import evaluations_figure
from implicit_attention.solution import Record, SolveReport

#: The colours of problems with and without an answer.
GOOD, BAD = ((0.0, 114 / 255, 178 / 255), (213 / 255, 94 / 255, 0.0))


def report(evaluations, failed=()):
    """Problems that took so many evaluations, those named with no answer."""
    spent = torch.tensor(evaluations)
    status = torch.full_like(spent, int(Status.CONVERGED), dtype=torch.int8)
    status[list(failed)] = int(Status.MAX_STEPS)
    like = torch.zeros(spent.shape)
    record = Record.unmeasured(like, Status.CONVERGED)
    return SolveReport(record._replace(status=status, num_evals=spent))


def bars(figure):
    """(place, height above the line of the solver, colour) of every bar."""
    return [
        (bar.get_x() + bar.get_width() / 2, round(bar.get_height(), 6), bar.get_facecolor()[:3])
        for bar in figure.axes[0].patches
    ]


def test_a_bar_for_every_number_of_evaluations_as_high_as_its_share():
    figure = evaluations_figure({"a": report([[3, 3], [5, 3]]), "b": report([7, 9])})
    found = bars(figure)
    assert [(at, tone) for at, _, tone in found] == [(at, GOOD) for at in (3.0, 5.0, 7.0, 9.0)]
    heights = [height for _, height, _ in found]
    assert heights == pytest.approx([0.8, 0.8 / 3, 0.8, 0.8], abs=1e-5)
    assert [bar.get_y() for bar in figure.axes[0].patches] == [1, 1, 0, 0]
    assert [text.get_text() for text in figure.axes[0].texts] == ["median 3, 99 % within 5", "median 7, 99 % within 9"]
    assert figure.axes[0].get_xscale() == "linear"
    assert not figure.legends
    assert png(figure)[:4] == b"\x89PNG"


def test_problems_without_an_answer_have_their_own_bars_and_crosses():
    figure = evaluations_figure({"a": report([4, 4, 4, 9], failed=[0, 3])})
    found = bars(figure)
    assert [(at, tone) for at, _, tone in found] == [(4.0, GOOD), (4.0, BAD), (9.0, BAD)]
    # The three at 4 stand on each other.
    assert [bar.get_y() for bar in figure.axes[0].patches] == pytest.approx([0, 1.6 / 3, 0])
    assert [
        line.get_xdata()[0] for line in figure.axes[0].lines if line.get_marker() == "x" and len(line.get_xdata())
    ] == [
        4,
        9,
    ]
    assert "50 % without answer" in figure.axes[0].texts[0].get_text()
    assert [text.get_text() for text in figure.legends[0].texts] == ["no answer"]


def test_a_wide_range_has_a_logarithmic_axis():
    figure = evaluations_figure({"a": report([1, 2, 2, 400], failed=[3])})
    axes = figure.axes[0]
    assert axes.get_xscale() == "log"
    low, high = axes.get_xlim()
    assert low < 1 < 400 < high
    assert [collection.get_segments()[0][0][0] for collection in axes.collections] == [1, 2, 400]
    assert png(figure)


def test_it_counts_what_solves_and_layers_report():
    torch.manual_seed(0)
    queries = torch.randn(2, 7, 4)
    solution = solve(AnchoredEnergy(LogSumExp(torch.eye(4), 1.0), queries, 0.5), queries, solver=Picard())
    layer = ImplicitAttention(8, heads=2)
    layer(torch.randn(3, 5, 8))
    figure = evaluations_figure({"solve": solution, "layer": layer.last_solve})
    at = [place for place, *_ in bars(figure)]
    first, second = (sorted(set(each.num_evals.flatten().tolist())) for each in (solution, layer.last_solve))
    assert at == [*first, *second]


def test_no_problems_are_a_row_without_bars():
    figure = evaluations_figure({"none": report([])})
    assert [text.get_text() for text in figure.axes[0].texts] == ["no problems"]
    assert png(figure)


def test_what_is_no_solution_is_refused():
    with pytest.raises(ValueError, match="`solutions` must hold at least one solution, got none"):
        evaluations_figure({})
    with pytest.raises(TypeError, match=re.escape("`solutions['a']` must be what solve returned")):
        evaluations_figure({"a": SimpleNamespace(num_evals=torch.ones(3))})

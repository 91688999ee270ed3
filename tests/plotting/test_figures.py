import json
from pathlib import Path

import pytest
import torch
from figure_files import covered, png

from implicit_attention import AnchoredEnergy, LogSumExp, Picard, solve
from implicit_attention.plotting import convergence_figure, potentials_figure, rates_figure, retrieval_figure
from implicit_attention.solution import Trace

DOCS = Path(__file__).parents[2] / "docs"


def trace_of(residual, num_evals):
    return Trace(torch.tensor(residual), None, torch.tensor(num_evals), torch.zeros(len(residual), 1, 2))


def curves(axes):
    """The lines of a panel by their names."""
    return {line.get_label(): line.get_ydata().tolist() for line in axes.lines}


def test_a_residual_holds_until_the_next_one_and_problems_that_are_not_finite_are_left_out():
    # The first of two problems spends 3 evaluations on its second step, the second one each.
    nan = float("nan")
    both = trace_of([[8.0, 4.0, nan], [2.0, 1.0, nan]], [[1, 1, 1], [4, 2, 1]])
    alone = trace_of([[8.0], [2.0]], [[1], [2]])
    first, second = map(curves, convergence_figure({"both": both, "alone": alone}).axes)
    assert first["median problem"] == [6.0, 4.5, 4.5, 1.5]
    assert first["worst problem"] == [8.0, 8.0, 8.0, 2.0]
    assert second["median problem"] == [8.0, 2.0]


def test_every_method_has_a_panel_of_its_own_with_the_others_behind_and_one_scale():
    torch.manual_seed(0)
    keys = torch.randn(9, 5)
    queries = torch.randn(2, 4, 5)
    energy = AnchoredEnergy(LogSumExp(keys, 1.0), queries, 0.5)
    traces = {f"damping {d}": solve(energy, queries, solver=Picard(damping=d), trace=True).trace for d in (0.0, 0.5)}
    figure = convergence_figure(traces, tolerance=1e-4, title="two runs")
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(traces)
    assert len({(axes.get_xlim(), axes.get_ylim()) for axes in figure.axes}) == 1
    for axes, trace in zip(figure.axes, traces.values(), strict=True):
        lines = {line.get_label(): line for line in axes.lines}
        assert set(lines) == {"_behind", "median problem", "worst problem", "tolerance"}
        assert len(lines["worst problem"].get_xdata()) == int(trace.num_evals.max())
        assert lines["worst problem"].get_ydata()[0] == pytest.approx(float(trace.residual[0].max()))
        assert lines["median problem"].get_linestyle() != lines["worst problem"].get_linestyle()
        assert axes.get_yscale() == "log"
        assert "evaluations" in axes.get_xlabel()
    behind = [next(line for line in axes.lines if line.get_label() == "_behind") for axes in figure.axes]
    assert len(behind[0].get_xdata()) == int(traces["damping 0.5"].num_evals.max())
    assert "residual" in figure.axes[0].get_ylabel()
    assert png(figure)[:4] == b"\x89PNG"


def test_a_panel_says_when_the_median_and_the_worst_keep_to_the_tolerance():
    # The median of the first is within 2 from the second evaluation on; its worst is there for a moment only.
    first = trace_of(
        [[8.0, 8.0, 8.0], [1.0, 1.0, 1.5], [1.0, 1.0, 8.0], [1.0, 1.0, 2.0]], [[k] * 3 for k in range(1, 5)]
    )
    figure = convergence_figure({"first": first, "never": trace_of([[8.0], [4.0]], [[1], [2]])}, tolerance=2.0)
    told = [axes.texts[0].get_text().splitlines()[1] for axes in figure.axes]
    assert told == ["median 2, worst 4", "median never, worst never"]
    assert [len(axes.texts) for axes in convergence_figure({"first": first}).axes] == [0]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_text_is_over_a_curve(count):
    # Residuals that stay at the top until the last evaluation come into every corner of a panel.
    high = trace_of([[8.0, 4.0], [7.0, 4.0], [6.0, 3.0], [1e-6, 1e-7]], [[1, 1], [20, 9], [150, 90], [200, 99]])
    low = trace_of([[8.0, 8.0], [1e-8, 1e-8]], [[1, 1], [2, 2]])
    traces = {f"method {index}": (high, low)[index % 2] for index in range(count)}
    for tolerance in (1e-5, None):
        assert covered(convergence_figure(traces, tolerance=tolerance, title="Residuals\nof two lines")) == []


def test_no_text_is_over_a_bound_of_potentials():
    measured = json.loads((DOCS / "potentials" / "retrieval.json").read_text())
    rows = [row for row in measured["rows"] if row["data"] == "digits" and row["curve"] == "capacity"]
    assert len(rows) > 50
    assert covered(potentials_figure({"digits": rows}, measured["bounds"])) == []


def test_panels_are_wrapped_and_empty_places_stay_empty():
    traces = {str(index): trace_of([[1.0], [0.1]], [[1], [2]]) for index in range(5)}
    axes = convergence_figure(traces).axes
    assert [each.axison for each in axes] == [True] * 5 + [False] * 3
    # The panels above an empty place have the label of the axis.
    assert [bool(each.get_xlabel()) for each in axes[:5]] == [False, True, True, True, True]


@pytest.mark.parametrize(
    "traces",
    [
        {},
        {"zero": trace_of([[0.0], [0.0]], [[1], [2]])},
        {"nan": trace_of([[float("nan")]], [[1]])},
        {"one evaluation": trace_of([[1.0]], [[1]])},
    ],
)
def test_convergence_figure_survives_odd_traces(traces):
    assert png(convergence_figure(traces, tolerance=1e-5))
    assert png(convergence_figure(traces))


@pytest.mark.parametrize("dim", [1, 9, 10])
def test_retrieval_figure_draws_images_or_curves_and_marks_success(dim):
    torch.manual_seed(0)
    states = torch.randn(3, dim)
    states[0, 0] = torch.nan
    success = torch.tensor([True, False, True])
    figure = retrieval_figure([("query", states, None), ("answer", states, success)], columns=["a", "b", "c"])
    assert len(figure.axes) == 6
    assert [len(axes.images) for axes in figure.axes] == [int(dim == 9)] * 6
    assert [axes.get_xlabel() for axes in figure.axes[3:]] == ["✓ retrieved", "✗ not", "✓ retrieved"]
    assert [axes.get_ylabel() for axes in figure.axes[::3]] == ["query", "answer"]
    assert png(figure)[:4] == b"\x89PNG"


def test_retrieval_figure_without_queries_is_empty():
    assert png(retrieval_figure([("query", torch.zeros(0, 4), None)]))


def test_rates_figure_draws_a_curve_a_star_and_a_name_for_every_method():
    betas = torch.tensor([1.0, 2.0, 4.0])
    rising, falling = (
        torch.tensor([[0.1, 0.3], [0.4, 0.4], [0.9, 0.7]]),
        torch.tensor([[0.5, 0.7], [0.4, 0.4], [0.1, 0.1]]),
    )
    curves = {task: {"rising": rising, "falling": falling} for task in ("a", "b")}
    figure = rates_figure(betas, curves, {"a": {"level": torch.tensor([0.6, 0.8])}}, title="rates")
    first, second = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["a queries", "b queries"]
    assert [text.get_text() for text in first.get_legend().get_texts()] == [
        "0.800  rising, beta 4",
        "0.700  level",
        "0.600  falling, beta 1",
    ]
    assert len(second.get_legend().get_texts()) == 2
    curve, star = first.lines[:2]
    assert torch.from_numpy(curve.get_ydata()).tolist() == pytest.approx([0.2, 0.4, 0.8])
    assert (list(star.get_xdata()), list(star.get_ydata())) == ([4.0], [pytest.approx(0.8)])
    assert png(figure)[:4] == b"\x89PNG"

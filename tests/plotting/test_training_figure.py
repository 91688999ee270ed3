import pytest
import torch
from figure_files import png

from implicit_attention import ImplicitAttention
from implicit_attention.plotting import training_figure
from implicit_attention.training import CSVFile, JSONLines, watch


def observe(layers=2, steps=4, numbered=True, backward=True, **options):
    """What a watch sees of a few steps of so many layers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[ImplicitAttention(8, heads=2, anchor=0.5) for _ in range(layers)])
    looks = []
    with watch(model, **options) as seen:
        for step in range(steps):
            output = model(torch.randn(3, 5, 8)).square().mean()
            if backward:
                output.backward()
            looks.append(seen.take(10 * step if numbered else None))
    return looks


def rows_of(looks):
    return [row for look in looks for row in look.rows()]


def drawn(figure):
    """By the title of a panel, its lines of data as lists of points."""
    return {
        axes.get_title(loc="left"): [
            list(
                zip(
                    *(
                        line.get_data()[i].tolist() if hasattr(line.get_data()[i], "tolist") else line.get_data()[i]
                        for i in (0, 1)
                    ),
                    strict=True,
                )
            )
            for line in axes.lines
            if line.get_marker() != "x" and len(line.get_xdata()) != 2
        ]
        for axes in figure.axes
        if axes.axison
    }


def test_the_points_are_those_that_were_seen():
    looks = observe()
    panels = drawn(training_figure(looks, title="two layers"))
    assert list(panels) == [
        "Forward solves",
        "Backward solves",
        "Worst residual",
        "Failures",
        "Anchor",
        "Inverse temperature beta",
    ]
    # Mean and p99 of every layer and of all.
    mean, p99, *others = panels["Forward solves"]
    assert len(others) == 4
    assert mean == [(10.0 * i, pytest.approx(look.layers[0].forward.mean)) for i, look in enumerate(looks)]
    assert p99 == [(10.0 * i, look.layers[0].forward.p99) for i, look in enumerate(looks)]
    assert panels["Backward solves"][2] == [
        (10.0 * i, pytest.approx(look.layers[1].backward.mean)) for i, look in enumerate(looks)
    ]
    assert panels["Worst residual"][5] == [(10.0 * i, look.total.backward.worst) for i, look in enumerate(looks)]
    assert panels["Inverse temperature beta"][1] == [(10.0 * i, look.layers[1].beta) for i, look in enumerate(looks)]


def test_looks_rows_and_files_give_the_same_picture(tmp_path):
    looks = observe()
    table, lines = CSVFile(tmp_path / "seen.csv"), JSONLines(tmp_path / "seen.jsonl")
    for look in looks:
        table.write(look)
        lines.write(look)
    expected = drawn(training_figure(looks))
    given = (rows_of(looks), iter(looks), table.path, str(table.path), lines.path)
    assert [drawn(training_figure(rows)) == expected for rows in given] == [True] * 5
    with pytest.raises(FileNotFoundError):
        training_figure(tmp_path / "none.csv")
    # One look is a picture, too.
    assert drawn(training_figure(looks[0])) == drawn(training_figure(looks[0].rows()))


@pytest.mark.slow
def test_a_line_that_a_killed_run_left_and_steps_that_it_saw_twice_do_no_harm(tmp_path):
    looks = observe()
    for writer, cut in (
        (CSVFile(tmp_path / "seen.csv"), "30,0,1,2"),
        (JSONLines(tmp_path / "seen.jsonl"), '{"step": 3'),
    ):
        for look in looks:
            writer.write(look)
        with writer.path.open("a") as file:
            file.write(cut)
        for look in looks[2:]:
            writer.write(look)
        assert drawn(training_figure(writer.path)) == drawn(training_figure(looks))
    # The later look counts, in the order of the steps.
    again = observe(steps=3)[2]
    assert drawn(training_figure([looks[0], looks[2], looks[1], again])) == drawn(
        training_figure([looks[0], looks[1], again])
    )


def test_looks_without_a_step_are_numbered(tmp_path):
    looks = observe(numbered=False)
    file = CSVFile(tmp_path / "seen.csv")
    for look in looks:
        file.write(look)
    for rows in (looks, file.path):
        (first, *_) = drawn(training_figure(rows))["Forward solves"]
        assert [step for step, _ in first] == [0.0, 1.0, 2.0, 3.0]


def test_failures_are_shares_and_what_is_not_finite_is_a_cross(tmp_path):
    rows = rows_of(observe())
    for row in rows:
        if row["layer"] == "1" and row["step"] == 20:
            row |= {"forward_failed": 3, "forward_worst": float("inf"), "backward_failed": 6, "backward_worst": 40.0}
    figure = training_figure(rows)
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert drawn(figure)["Failures"][2][2] == (20.0, pytest.approx(100 * 3 / 30))
    assert drawn(figure)["Failures"][3][2] == (20.0, pytest.approx(100 * 6 / 30))
    (cross,) = (line for line in panels["Worst residual"].lines if line.get_marker() == "x")
    assert list(cross.get_xdata()) == [20.0]
    assert panels["Worst residual"].get_ylim()[1] > 40
    assert not panels["Failures"].texts
    assert png(figure)[:4] == b"\x89PNG"
    # JSON lines hold null for it.
    nulls = [row | ({"forward_worst": None} if row["forward_worst"] == float("inf") else {}) for row in rows]
    assert len([line for axes in training_figure(nulls).axes for line in axes.lines if line.get_marker() == "x"]) == 1
    # Without failures the panel says so.
    quiet = {axes.get_title(loc="left"): axes for axes in training_figure(observe()).axes}
    assert [text.get_text() for text in quiet["Failures"].texts] == ["no failures"]


def test_nothing_is_drawn_of_what_was_not_solved_or_had_no_tolerance():
    figure = training_figure(observe(backward=False))
    assert "Backward solves" not in drawn(figure)
    rows = rows_of(observe())
    for row in rows:
        row["forward_worst"] = row["backward_worst"] = 0.0
    assert "Worst residual" not in drawn(training_figure(rows))
    for row in rows:
        row |= {"forward_problems": 0, "backward_problems": 0, "anchor": float("nan"), "beta": float("nan")}
    figure = training_figure(rows)
    assert [text.get_text() for text in figure.texts] == ["Solves of a training", "nothing was solved"]
    assert png(figure)


def test_one_layer_needs_no_line_of_all_and_spectral_radii_have_a_panel():
    figure = training_figure(observe(layers=1, steps=3, spectral=True))
    assert [text.get_text() for text in figure.legends[0].texts] == ["0"]
    radius = drawn(figure)["Spectral radius of df/dz"]
    assert len(radius) == 1
    assert len(figure.axes) == 8
    assert [text.get_text() for text in training_figure(observe(steps=1)).legends[0].texts] == ["0", "1", "all layers"]


@pytest.mark.slow
def test_many_layers_differ_in_tone_and_some_are_named():
    (row,) = (row for row in rows_of(observe(layers=1, steps=1)) if row["layer"] == "all")
    rows = [row | {"layer": f"block.{i}", "step": step} for step in range(3) for i in range(33)]
    figure = training_figure(rows)
    names = [text.get_text() for text in figure.legends[0].texts]
    assert (names[0], names[-1]) == ("block.0", "block.32")
    assert len(names) < 15
    assert figure.legends[0].get_title().get_text() == "some of 33 layers"
    lines = [line for line in figure.axes[4].lines]
    assert len({line.get_color() for line in lines}) == 33
    assert png(figure)


def test_an_axis_is_wide_where_nothing_moves():
    rows = rows_of(observe(layers=1))
    for row in rows:
        row["anchor"] = 0.5 + 1e-9 * row["step"]
    axes = {axes.get_title(loc="left"): axes for axes in training_figure(rows).axes}["Anchor"]
    assert axes.get_ylim() == pytest.approx((0.49, 0.51), abs=1e-6)

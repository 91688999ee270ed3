import functools
import math
import re
import runpy
from pathlib import Path

import pytest
import torch
from figure_files import covered
from scipy.optimize import minimize

from implicit_attention import AnchoredEnergy, Anderson, Potential, UnsupportedImplementation, potentials, solve
from implicit_attention.plotting import panels_figure
from implicit_attention.potentials import (
    BernoulliUnits,
    Exponential,
    HiddenUnits,
    PoissonUnits,
    ReadsOut,
    SoftcapLogSumExp,
    Tilted,
    units_potential,
)

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "potentials" / "landscapes.py"))
POTENTIALS = SCRIPT["potentials"]()
PAGE = (DOCS / "potentials.md").read_text()
COUNTS = {"one": 1, "two": 2, "three": 3, "four": 4}


@functools.cache
def found(name):
    """Energies and minima of a panel."""
    return SCRIPT["energies"](POTENTIALS[name]), SCRIPT["minima"](POTENTIALS[name])


def bowl(x, y, side=41):
    """|z - (x, y)|^2/2 on the square of reach 2."""
    line = torch.linspace(-2, 2, side, dtype=torch.float64)
    return ((line - x) ** 2 + (line[:, None] - y) ** 2) / 2


def points(axes, name):
    (line,) = [line for line in axes.lines if line.get_label() == name]
    return torch.as_tensor(line.get_xydata())


def test_keys_and_minima_are_drawn_where_they_are():
    keys, ends = torch.tensor([[1.0, 0.5], [-0.5, 1.2]]), torch.tensor([[0.5, -1.0]])
    figure = panels_figure({"bowl": (bowl(0.5, -1.0), ends), "none": (bowl(0, 0), ends[:0])}, keys, title="A bowl")
    first, second = figure.axes[:2]
    torch.testing.assert_close(points(first, "key"), keys.double())
    torch.testing.assert_close(points(first, "minimum"), ends.double())
    assert points(second, "minimum").shape == (0, 2)
    assert (first.get_xlim(), first.get_ylim()) == ((-2, 2), (-2, 2))
    assert figure.get_suptitle() == "A bowl"


def test_the_first_axis_of_energies_is_the_vertical_one():
    (axes, *_) = panels_figure({"bowl": (bowl(1.0, -1.5), torch.zeros(0, 2))}, torch.eye(2)).axes
    lowest = axes.collections[0].get_paths()[0]
    assert lowest.contains_point((1.0, -1.5))
    assert not lowest.contains_point((-1.5, 1.0))


def test_an_energy_without_bound_says_so_and_has_no_minima():
    figure = panels_figure({"hill": (-bowl(0, 0), None), "bowl": (bowl(0, 0), None)}, torch.eye(2), columns=1)
    for axes in figure.axes[:2]:
        assert [text.get_text() for text in axes.texts] == ["no lower bound"]
        assert {line.get_label() for line in axes.lines} == {"key"}


def test_no_text_is_over_a_contour():
    panels = {f"energy {index}": (-3 * bowl(0.5, index / 3), None) for index in range(4)}
    assert covered(panels_figure(panels, torch.eye(2), columns=2)) == []


def test_panels_that_are_left_over_stay_empty():
    figure = panels_figure({name: (bowl(0, 0), None) for name in "abc"}, torch.eye(2), columns=2)
    assert [axes.axison for axes in figure.axes[:4]] == [True, True, True, False]


def descended(potential, start):
    """The minimum below a state, by SciPy and the value alone."""

    def energy(z):
        z = torch.tensor(z, requires_grad=True)
        value = z.square().sum() / 2 - potential.value(z[None])[0]
        (gradient,) = torch.autograd.grad(value, z)
        return value.item(), gradient.numpy()

    return torch.from_numpy(minimize(energy, start.numpy(), jac=True, method="BFGS", options={"gtol": 1e-7}).x)


@pytest.mark.parametrize("name", POTENTIALS)
def test_minima_by_solve_are_those_below_the_lowest_places_of_the_grid(name):
    energies, minima = found(name)
    inner = energies[1:-1, 1:-1]
    shifts = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]
    around = torch.stack([energies.roll(shift, (0, 1))[1:-1, 1:-1] for shift in shifts])
    if minima is None:
        border = torch.cat((energies[0], energies[-1], energies[:, 0], energies[:, -1]))
        assert border.min() < inner.min()
        return
    y, x = torch.nonzero((inner < around).all(0)).T + 1
    line = torch.linspace(-SCRIPT["REACH"], SCRIPT["REACH"], SCRIPT["SIDE"], dtype=torch.float64)
    ends = torch.stack([descended(POTENTIALS[name], start) for start in torch.stack((line[x], line[y]), -1)])
    near = torch.cdist(minima, ends) < 1e-4
    assert near.any(0).all()
    assert near.any(1).all()


def test_what_the_page_says_of_entmax():
    keys = SCRIPT["KEYS"]
    gaps = torch.cdist(keys, found("Entmax, alpha 1.5")[1]).amin(-1)
    assert (gaps == 0).tolist() == [True, True, False, True]
    assert 0 < gaps[2] < 2e-4
    assert (torch.cdist(keys, found("Entmax, alpha 2")[1]).amin(-1) == 0).all()
    overlaps = keys @ keys.mT
    leads = keys.square().sum(-1) - overlaps.fill_diagonal_(-torch.inf).amax(-1)
    assert (leads >= 1).tolist() == [True, True, False, True]
    torch.testing.assert_close(leads[2], torch.tensor(0.99).double())


def test_what_the_page_says_of_other_temperatures():
    sharper = {name: SCRIPT["minima"](phi) for name, phi in SCRIPT["potentials"](3.0).items() if "LogSumExp" in name}
    assert len(sharper["LogSumExp"]) == 4
    assert torch.cdist(SCRIPT["KEYS"], sharper["DistanceLogSumExp"]).amin(-1).max() < 0.1
    largest = torch.linalg.eigvalsh(SCRIPT["KEYS"].mT @ SCRIPT["KEYS"])[-1]
    torch.testing.assert_close(largest, torch.tensor(2.85).double())


def test_what_the_page_says_of_the_number_of_minima():
    rows = re.findall(r"^\| (one|two|three|four|no lower bound) \| (.*) \|$", PAGE, re.MULTILINE)
    said = {name: text for text, names in rows for name in re.findall("`(.*?)`", names)}
    minima = {name: found(name)[1] for name in POTENTIALS}
    counts = {name: "no lower bound" if points is None else len(points) for name, points in minima.items()}
    assert {name: COUNTS.get(text, text) for name, text in said.items()} == counts


def bounds(potential, other):
    """What the page calls it, by asking at every scale, and at a small one; `other` is of another law or part."""
    always = [each.bounded_below(math.inf) is True for each in (potential, other)]
    if always == [True, True]:
        return {"yes"}
    if always == [True, False]:
        return {"by law", "as its part"}
    return {"small beta", "small spread"} if potential.bounded_below(1e-3) is True else {"no"}


def test_what_the_page_says_of_every_potential():
    keys, x = SCRIPT["KEYS"], torch.zeros(3, 2, dtype=torch.float64)
    # Of each the first panel.
    cases = {re.match(r"\w+", name)[0]: phi for name, phi in reversed(POTENTIALS.items())}
    cases["HiddenUnits"] = HiddenUnits(keys.mT, BernoulliUnits(0.5))
    others = {
        "HiddenUnits": HiddenUnits(keys.mT, PoissonUnits(1.0)),
        "units_potential": units_potential(PoissonUnits(1.0))(keys, 2.0),
        "Tilted": Tilted(Exponential(keys, 2.0) + SoftcapLogSumExp(keys, 2.0, cap=2.0), keys[0]),
    }
    header, _, *rows = (
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in re.search(r"\| potential \| convex.*?\n\n", PAGE, re.DOTALL)[0].strip().splitlines()
    )
    assert header == ["potential", "convex", "bounded below"]
    assert "The first three have a fused solve, the first six weights and a read-out." in PAGE
    assert {row[0] for row in rows} == set(cases)
    for place, (name, convex, bounded) in enumerate(rows):
        phi, other = cases[name], others.get(name, cases[name])
        assert isinstance(phi, ReadsOut) == (place < 6), name
        assert convex == ("as its part" if phi.convex != other.convex else "yes" if phi.convex else "no"), name
        assert bounded in bounds(phi, other), name
        # The refusal says whether there is a fused solve of the energy, or none on a CPU alone.
        with pytest.raises(UnsupportedImplementation) as refused:
            solve(AnchoredEnergy(phi, x, anchor=1.0), x, solver=Anderson(), impl="triton")
        assert ("it exists for" not in str(refused.value)) == (place < 3), name


def test_every_potential_has_a_section():
    public = {name: getattr(potentials, name) for name in potentials.__all__}
    known = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, Potential)}
    # The base, and what has a page of its own.
    known = known - {"Potential", "SelfAttention"} | {"units_potential"}
    assert known - set(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE)) == set()

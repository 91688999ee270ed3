"""INPAINT of the suite `usefulness`: contenders of equal parameters, scored on the same hidden pixels."""

import dataclasses
import math

import pytest
import torch

from benchmarks import inpainting, inpainting_tables
from benchmarks.inpainting import CONTENDERS, Contender, Plan, Reader, Trained, Untrained
from benchmarks.useful_tables import verdict

QUICK = dataclasses.replace(Plan().quick(), updates=2)


@pytest.fixture(scope="module")
def rows():
    torch.manual_seed(0)
    trained = [
        inpainting.trained_row(Trained(aim, one, QUICK)) for aim in ("inpainting", "labels") for one in CONTENDERS
    ]
    costs = inpainting.costs_row(inpainting.Costs(QUICK), repeats=1, max_seconds=0.01)
    return [inpainting.untrained_row(Untrained(QUICK)), *trained, costs]


def test_blocks_have_as_many_parameters():
    counts = {sum(p.numel() for p in Reader("inpainting", one).model.block.parameters()) for one in CONTENDERS}
    assert max(counts) <= 1.02 * min(counts)


def test_no_part_shares_an_image_with_another():
    parts = [{tuple(image.flatten().tolist()) for image in images} for images, _ in inpainting.digits(None)]
    train, validation, test = parts
    assert not train & test
    assert not train & validation


def test_scores_are_of_hidden_pixels_alone():
    reader = Reader("inpainting", Contender("explicit", steps=1)).eval()
    (images, labels), *_ = inpainting.digits(24)
    masked = inpainting.hidden_patches(24, 2)
    found = reader.model.images(reader(images[:24], masked).detach())
    pixels = inpainting.hidden_pixels(masked, 8, 2)
    expected = math.sqrt(float((found - images[:24])[pixels].square().mean()))
    assert inpainting.scored(reader, images[:24], labels[:24], 2) == pytest.approx(expected, rel=1e-5)
    changed = images[:24].where(~pixels, 9.0)
    assert torch.equal(reader(changed, masked), reader(images[:24], masked))


@pytest.mark.slow
def test_what_learns_nothing_is_told(rows):
    errors = rows[0]["errors"]
    assert set(errors) == {"visible mean", "harmonic interpolation", "mean image"}
    assert all(0.1 < error < 0.6 for error in errors.values())


@pytest.mark.slow
def test_the_table_holds_every_contender_and_its_costs(rows):
    (table,) = inpainting_tables.tables(rows, verdict)
    assert [line[0] for line in table.lines] == [one.name for one in CONTENDERS] + list(rows[0]["errors"])
    assert all(len(line) == len(table.header) for line in table.lines)
    assert all(line[-1] != "-" for line in table.lines[: len(CONTENDERS)])
    unrolled = next(line for line in table.lines if "unrolled" in line[0])
    assert unrolled[table.header.index("solved: error, accuracy %")].count(",") == 1


@pytest.mark.slow
def test_equilibria_are_trained_by_the_implicit_gradient(rows):
    equilibrium = next(row for row in rows[1:] if row["contender"]["kind"] == "equilibrium")
    assert equilibrium["evidence"]["converged"] == 1
    assert equilibrium["evidence"]["evaluations"] > 1

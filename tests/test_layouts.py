"""No public door depends on where in memory its tensors lie."""

import itertools

import layout_fuzz
import pytest
import torch
from layout_attention_doors import saddle_of
from layouts import Layouts

pytestmark = pytest.mark.cases(3)

CALLS, CHUNK = 500, 25
LEADS = ((), (1,), (2,), (1, 1), (2, 1), (1, 2), (2, 3), (2, 1, 2))


@pytest.mark.parametrize("first", range(0, CALLS, CHUNK))
def test_answers_and_gradients_do_not_depend_on_the_layout(first):
    wrong = [(seed, *found) for seed in range(first, first + CHUNK) if (found := layout_fuzz.call(seed))[-1]]
    report = "\n".join(f"seed {seed}, {door}, {used}:\n{message}" for seed, door, used, message in wrong)
    assert not wrong, f"{len(wrong)} of {CHUNK} calls differ\n{report}"


def leads_within(lead):
    """All leading axes that broadcast to `lead`: fewer ones, and those with axes of size 1."""
    found = []
    for cut in range(len(lead) + 1):
        found += itertools.product(*(sorted({1, size}) for size in lead[cut:]))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("entry", ["attention", "solve"])
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_gradients_at_a_saddle_hold_for_all_leading_axes_of_keys_and_values(lead, entry, dtype):
    choices = leads_within(lead)
    for seed, of_keys in enumerate(choices):
        # Values whose axes are those of the keys, and others.
        for of_values in {of_keys, choices[-1 - seed]} if entry == "attention" else {()}:
            saddle_of(Layouts(seed, dtype), lead, of_keys, of_values, entry)

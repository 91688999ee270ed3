"""Interrupts, damaged libraries, new processes, compilers and very many keys change no answer."""

import pytest
import surroundings_fuzz

CALLS = {"interrupted": 60, "damaged_libraries": 20, "many_keys": 20}
SLOW = {"damaged_libraries": 100, "exported": 120, "compiled": 50, "many_keys": 100}


@pytest.mark.by_name(slow=r"\[many_keys")
@pytest.mark.parametrize("kind", CALLS)
def test_what_goes_on_around_a_call_changes_no_answer(kind):
    assert surroundings_fuzz.ask(kind, 1, CALLS[kind]) == []


# Torch's inductor defines modules of torch.jit when it is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.by_name(nightly=r"\[(exported|many_keys)")
@pytest.mark.parametrize("kind", SLOW)
def test_what_goes_on_around_many_calls_changes_no_answer(kind):
    assert surroundings_fuzz.ask(kind, 2, SLOW[kind]) == []

"""What users find at the top of the package, and what importing it loads; tests/promises has the names of all parts."""

from processes import fresh

import implicit_attention


def test_the_top_is_a_short_list():
    names = implicit_attention.__all__
    assert len(names) == len(set(names)) <= 45


def test_what_attention_does_not_need_loads_when_it_is_asked_for():
    code = """
import sys
import implicit_attention as ia
parts = ("diagnostics", "integrations", "plotting", "spins", "testing")
assert set(parts) <= set(dir(ia))
assert not any(f"implicit_attention.{part}" in sys.modules for part in parts)
print(ia.spins.SpinSystem.__name__, ia.diagnostics.diagnose.__name__)
try:
    ia.nothing
except AttributeError as error:
    print(error)
"""
    assert fresh(code).splitlines() == ["SpinSystem diagnose", "module 'implicit_attention' has no attribute 'nothing'"]


def test_importing_the_package_leaves_torchdeq_as_it_is():
    code = """
import torchdeq.solver as theirs
before = dict(vars(theirs)), {n: dict(v) for n, v in vars(theirs).items() if isinstance(v, dict) and n[:2] != "__"}
import implicit_attention, implicit_attention.solvers
after = dict(vars(theirs)), {n: dict(v) for n, v in vars(theirs).items() if isinstance(v, dict) and n[:2] != "__"}
print(before == after)
"""
    assert fresh(code) == "True"

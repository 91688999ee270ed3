"""Settings of the whole suite, and which of its tests are slow."""

import re

import pytest
import torch

# The problems of the tests are small: threads would only wait for each other.
torch.set_num_threads(1)

#: What takes long and is not the only test of its subject: `pytest` leaves it out, `pytest -m slow` runs it.
SLOW = (
    # The contract of approximations: of eight outputs the fast suite differentiates three, of six twice one.
    r"spins/test_contracts.py::\w+::test_second_derivatives\[(?!magnetization)",
    r"spins/test_contracts.py::\w+::test_derivatives_of_every_output\[(?!free_energy|magnetization|correlations)",
    # Derivatives that the contract shows for other settings of the same method.
    r"spins/test_mean_field.py::test_every_output_is_differentiable_twice",
    r"spins/test_tap.py::test_derivatives_of_every_output",
    r"spins/test_tap.py::test_derivatives_for_vectors\[(?!False-gradcheck)",
    r"spins/test_transfer_matrix.py::test_derivatives_of_every_output",
    r"spins/test_dynamics.py::test_derivatives_of_every_output\[gradgradcheck-(?!Gaussian)",
    r"spins/test_kinetic_plefka.py::test_derivatives_with_the_exact_response_of_vectors",
    r"spins/test_kinetic_plefka.py::test_derivatives_with_matrices_as_couplings",
    r"spins/test_adaptive_tap.py::test_outputs_are_differentiable_twice",
    r"spins/test_saddle_point_derivatives.py::test_four_derivatives_are_those_of_the_value\[(?!numbers)",
    r"spins/test_minimum.py::test_forward_and_reverse_mode_agree_however_they_are_nested\[(?!shared\])",
    # Many random systems, or large ones; few and small ones are in the same files.
    r"spins/test_saddle_point.py::test_a_thousand_systems_are_solved_without_a_failure",
    r"spins/test_saddle_point.py::test_spherical_glass",
    r"spins/test_tap.py::test_a_spin_glass_above_the_line_is_flagged",
    r"spins/test_stability.py::test_nothing_is_reliable_beyond_the_at_line",
    r"spins/test_stability.py::test_the_at_number_of_blocks_is_that_of_numbers_in_a_field_too",
    r"spins/test_coupling_function.py::test_what_stands_where_there_is_no_site_changes_no_bit\[(?!turned)",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    matched = set()
    for item in items:
        for pattern in SLOW:
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.slow)
                matched.add(pattern)
    if config.args == config.getini("testpaths") and (stale := set(SLOW) - matched):
        raise pytest.UsageError(f"tests/conftest.py: nothing is called {sorted(stale)}")

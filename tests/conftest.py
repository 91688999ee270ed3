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
    # Of vectors the free energy is enough there, as the same methods for numbers have all three.
    r"spins/test_contracts.py::Test(TAP|AdaTAP|Chain)::test_derivatives_of_every_output\[(?!free_energy)",
    r"spins/test_contracts.py::Test(TAP|AdaTAP|Chain)::test_second_derivatives",
    # Derivatives that the contract shows for other settings of the same method.
    r"spins/test_mean_field.py::test_every_output_is_differentiable_twice",
    r"spins/test_tap.py::test_derivatives_of_every_output",
    r"spins/test_tap.py::test_derivatives_for_vectors\[(?!False-gradcheck)",
    r"spins/test_transfer_matrix.py::test_derivatives_of_every_output",
    r"spins/test_dynamics.py::test_derivatives_of_every_output\[(gradgradcheck-(?!Gaussian)|gradcheck-second)",
    r"spins/test_dynamics.py::test_a_sample_does_not_depend_on_its_company\[second order",
    r"attention/test_function.py::test_gradients_of_every_order",
    r"spins/test_kinetic_plefka.py::test_derivatives_with_the_exact_response_of_vectors",
    r"spins/test_kinetic_plefka.py::test_derivatives_with_matrices_as_couplings",
    r"spins/test_adaptive_tap.py::test_outputs_are_differentiable_twice",
    r"spins/test_saddle_point_derivatives.py::test_four_derivatives_are_those_of_the_value\[(?!numbers)",
    r"spins/test_minimum.py::test_forward_and_reverse_mode_agree_however_they_are_nested\[(?!shared\])",
    # Kernels in the interpreter: masks, ends and numbers stay in the fast suite, shapes and broken kernels do not.
    r"ops/test_triton.py::test_kernel_in_the_interpreter\[(trust|solve_shape|adjoint_shape)_",
    # Compiled models of other families than the one in the fast suite.
    r"integrations/test_transformers.py::test_a_compiled_(gemma|llama_is_one_graph\[False)",
    r"integrations/test_transformers_more.py::test_lengths_share_a_compiled_graph",
    # A run of the command trains all contenders; one by one, of other puzzles, they train in test_sudoku.py.
    r"benchmarks/test_mazes.py::test_(a_quick_run_has_every_contender|tables_and_figure_hold_what_was_measured)",
    # It waits for other processes to import torch, as those of the other tasks do in test_usefulness.py.
    r"benchmarks/test_mazes.py::test_what_is_run_side_by_side_is_what_one_process_finds",
    # A training to the end; a short one stays in the fast suite.
    r"cli/test_maze.py::test_a_block_trained_on_small_mazes_solves_larger_ones",
    # Programs by the other tracer, and larger ones in ONNX.
    r"test_export.py::test_the_strict_tracer_finds_the_same\[(?!layer|block picard)",
    r"test_export.py::test_onnx_has_the_numbers_of_eager_calls\[(multihead|solve|transformer|block|causal)",
    r"test_export.py::test_onnx_takes_other_batches_and_lengths\[llama",
    r"test_export.py::test_so_is_every_kind_of_budget\[(layer|memory)",
    # Ten kills of each training; two of each are in the fast suite.
    r"test_kill_and_resume.py::test_ten_trainings_killed_inside_end_with_the_same_bits",
    # Many random systems, or large ones; few and small ones are in the same files.
    r"spins/test_saddle_point.py::test_a_thousand_systems_are_solved_without_a_failure",
    r"spins/test_saddle_point.py::test_spherical_glass",
    r"spins/test_tap.py::test_a_spin_glass_above_the_line_is_flagged",
    r"spins/test_gaussian_closure.py::test_it_is_nearer_to_ising_chains_than_expansions_are",
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

"""Settings of the whole suite, and which of its tests are slow."""

import atexit
import collections
import functools
import gc
import re
import zlib
from collections.abc import Iterator

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
    r"spins/test_transfer_matrix.py::test_derivatives_of_every_output",
    r"spins/test_dynamics.py::test_derivatives_of_every_output\[(gradgradcheck-(?!Gaussian)|gradcheck-second)",
    r"spins/test_dynamics.py::test_a_sample_does_not_depend_on_its_company\[second order",
    r"attention/test_function.py::test_gradients_of_every_order",
    r"spins/test_kinetic_plefka.py::test_derivatives_with_the_exact_response_of_vectors",
    r"spins/test_kinetic_plefka.py::test_derivatives_with_matrices_as_couplings",
    r"spins/test_adaptive_tap.py::test_outputs_are_differentiable_twice",
    r"spins/test_saddle_point_derivatives.py::test_four_derivatives_are_those_of_the_value\[(?!numbers)",
    r"spins/test_minimum.py::test_forward_and_reverse_mode_agree_however_they_are_nested\[(?!shared\])",
    # Kernels in the interpreter: two masks, ends and numbers stay in the fast suite, shapes and broken kernels do not.
    r"ops/test_triton.py::test_kernel_in_the_interpreter\[(trust|solve_shape|adjoint_shape)_",
    r"ops/test_triton.py::test_kernel_in_the_interpreter\[(solve|adjoint)_mask_(?!per_query|bias_padding)",
    r"ops/test_triton.py::test_kernel_in_the_interpreter\[(solve|adjoint)_tiles_(?!documents)",
    r"ops/test_triton.py::test_kernel_in_the_interpreter\[solve_gathers_(bf16|fp16|shape|causal|at_the_edge)",
    r"ops/test_triton.py::test_kernel_in_the_interpreter\[solve_agrees_with_the_tiled_one_(budget|at_once)",
    r"ops/test_triton.py::test_kernel_in_the_interpreter\[adjoint_(scale_(fp16_small|bf16|fp32_tiny)|of_every_scale)",
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
    # Runs of whole suites of benchmarks, whose contenders train; those of the other suites stay in the fast suite.
    r"benchmarks/test_train_suite.py::",
    r"benchmarks/test_mazes.py::test_a_training_that_ends_with_an_error_is_told_and_stops_no_other",
    r"benchmarks/test_attention_suite.py::test_(unrolled_memory_grows_by_what_a_step_keeps|a_process_that_breaks_off)",
    r"benchmarks/test_scale_suite.py::test_every_case_has_times_of_all_processes",
    r"benchmarks/test_usefulness.py::test_processes_find_what_one_process_finds",
    # Commands run to their end by other tests of the same file, with fewer contenders.
    r"cli/test_compare.py::test_(rates_of_own_data_do_not_depend_on_their_unit|numbers_that_do_not_exist_are_null)",
    r"cli/test_maze.py::test_(plain_text_where_there_is_no_terminal|training_learns_and_leaves_the_callers)",
    r"cli/test_landscape_page.py::test_the_page_of_all_scenes_is_one_file",
    r"plotting/test_maze_pictures.py::test_a_gif_has_the_frames",
    # Derivatives of other kinds of spins than those of the contract.
    r"spins/test_low_rank.py::test_answers_are_differentiated_exactly",
    r"spins/test_adaptive_tap.py::test_derivatives_for_other_priors",
    r"spins/test_bethe.py::test_derivatives_of_every_output",
    r"spins/test_driven_calls.py::test_derivatives_through_the_steps",
    r"spins/test_contracts.py::Test(AdaTAP|TAP)::test_(magnetization_has_derivatives|derivatives_of_every_output)",
    r"spins/test_contracts.py::TestTAP::test_a_sample_does_not_depend_on_its_company",
    r"spins/test_contracts.py::TestTAPOfThirdOrder::test_(second_derivatives|derivatives_of_every_output)",
    r"spins/test_accuracy_table.py::test_a_row_is_measured_again",
    # One function through the kernels from end to end; what each kernel does is in the fast suite.
    r"ops/test_triton_end_to_end.py::test_the_function_and_the_layer_equal_the_products_written_out",
    r"ops/test_native.py::test_no_matrix_of_queries_by_keys_is_stored",
    # Samplers whose laws others of the same file know by a few moments.
    r"potentials/test_boltzmann_enumerated.py::test_samples_have_the_enumerated_law",
    # Compiled layers and solves with other potentials than the one of the fast suite.
    r"potentials/test_(distance|spherical_interface).py::test_(a_layer_compiles|compiles_without_graph_breaks)",
    r"potentials/test_softcap.py::test_gradients_of_an_equilibrium",
    # Engines one by one: of compiled models the fast suite watches one.
    r"integrations/test_transformers_watching.py::test_a_compiled_model_(has_the_graphs|with_checkpoints)",
    r"training/test_watch_engines.py::test_(the_watch_adds|a_compiled_layer_inside|watched_after|layers_compiled)",
    r"test_contributing.py::test_an_approximation_of_spins_is_one_file_and_one_line",
    # The contract of methods for numbers is asked of each method once.
    r"spins/test_contracts.py::Test\w+OfIsingSpins::test_(magnetization_has|derivatives|second|outputs_are|a_sample)",
    # Vectors with the exact response are slow: of mean field the fast suite differentiates numbers and vectors with
    # Amos' response, of AdaTAP it has the contract for numbers and Gaussian spins.
    r"spins/test_contracts.py::TestMeanField::test_(second_derivatives|derivatives_of_every_output\[(mag|cor))",
    r"spins/test_contracts.py::TestAdaTAP::test_(outputs|a_sample|autocast|susceptibility|what|the_order|parts|a_masked)",
    r"spins/test_contracts.py::Test(TAP|Chain)::test_(autocast|parts|the_order|what|susceptibility|a_sample)",
    r"spins/test_contracts.py::Test(Bethe|MeanFieldWithAmosResponse)::test_derivatives_of_every_output\[(mag|cor)",
    r"spins/test_dynamics.py::test_derivatives_of_every_output\[gradgradcheck-Gaussian field\]",
    r"spins/test_sampling.py::test_errors_are_honest\[(1|5)-",
    r"spins/test_minimum.py::test_cold_spins_in_strong_fields_are_solved\[150-",
    r"spins/test_coupling_function.py::test_what_stands_where_there_is_no_site_changes_no_bit\[turned TAP.*SphereUnits",
    r"spins/test_stability.py::test_a_curie_weiss_magnet_at_zero_field_is_known\[3",
    r"spins/test_tap.py::test_magnetizations_are_those_of_the_fixed_point\[3-response0",
    r"spins/test_dynamics.py::test_vmap_and_grad_compose\[(first order|Gaussian field)\]",
    r"layers/test_half_known.py::test_half_images_are_all_recalled\[\S+-1797",
    # `.ci/run` builds the site, too.
    r"test_site.py::test_(no_|every_plain|every_formula|every_public|every_class|the_record|nothing_is)",
    # The same claims of smaller models are in the fast suite, and of one engine or word where there are several.
    r"test_kill_and_resume.py::test_two_kills_of_a_training_change_no_bit\[llama",
    r"test_export.py::test_onnx_has_the_numbers_of_eager_calls\[(masked|memory|llama)",
    r"test_export.py::test_(a_budget_is_exported_as_plain_operations_of_any_size|a_solve_to_a_\w+_onnx)\[(llama|memory)",
    r"test_export.py::test_so_is_every_kind_of_budget\[function-anderson",
    r"test_export.py::test_the_strict_tracer_finds_the_same\[layer",
    r"test_export.py::test_half_precision_is_exported\[causal",
    r"test_export.py::test_onnx_tests_accelerated_steps",
    r"test_matrices.py::test_batches_of_large_systems_are_answered_on_two_threads\[SaddlePoint",
    r"test_failure_policy_gradients.py::test_inside_transforms\[jvp-(explicit|both)",
    r"test_failure_policy_engines.py::test_engines_give_what_the_reference_gives\[compiled-(explicit|both)",
    r"test_failure_policy_layers.py::test_a_query_that_is_nan_spoils_no_other\[True-(explicit|both)",
    r"layers/test_energy_transformer.py::test_(a_missing_token|samples_do_not_see|torch_func)\S*\[equilibrium",
    r"potentials/test_readout.py::test_first_and_second_derivatives\[64-bias",
    # Derivatives of potentials of the same kind: the fast suite has those with most arguments, or those of few.
    r"potentials/test_token_attention.py::Test(Tiled|Masked|PerHead)::test_first_and_second",
    r"potentials/test_summed_scores.py::Test(Spheres|Laplace|Constants)Masked::test_first_and_second",
    r"potentials/test_summed_scores.py::Test(Polynomial[34]\w*|\w+Shared|Signs)::test_first_and_second",
    r"potentials/test_hidden_units.py::TestSphere::test_first_and_second",
    r"potentials/test_entmax.py::Test(MaskAndBias|OrderPerEntry|Order13|Default)::test_first_and_second",
    r"potentials/test_algebra.py::TestNested::test_first_and_second",
    r"potentials/test_log_sum_exp.py::Test(Mask|Bias|TensorBeta|KeyPadding|Shared\w+)::test_first_and_second",
    r"potentials/test_(distance|softmax1|softcap|normalised_scores).py::Test(Plain|Tensor\w+|Sha\w+)::test_first_and_second",
    r"potentials/test_kernel.py::Test(Positive|EluMaskAndBias)::test_first_and_second",
    r"potentials/test_gaussian_mixture.py::Test(OnePerComponent|OneSet|Shared\w*)::test_first_and_second",
    r"potentials/test_(clamped|tilted|self_att\w+).py::Test(ClampedDistances|OneTilt|Nested)::test_first_and_second",
    # Of compiled models one stays fast: a llama in one graph.
    r"integrations/test_transformers.py::test_a_graph_serves_all_lengths",
    r"integrations/test_transformers_attach.py::test_one_graph_serves_a_model_whose_options_come_from_its_file",
    r"integrations/test_transformers_attach.py::test_a_name_stays_ours_when_an_engine_wraps_its_function\[compile",
    r"integrations/test_multihead_hosts.py::test_a_layer_compiles_without_a_graph_break\[True",
    r"ops/test_registration.py::test_a_backward_pass_without_an_answer_is_told\[compiled-ignore",
    # A run of mypy, code of the docs and two tutorials; README's code and two tutorials stay in the fast suite.
    r"test_typing.py::test_a_type_checker_knows_what_calls_return",
    r"test_readme.py::test_the_code_of_the_docs_runs",
    r"test_tutorials.py::test_a_tutorial_runs_as_its_notebook\[(ising_phase_diagram|your_own_energy)",
    r"test_surroundings.py::test_what_goes_on_around_a_call_changes_no_answer\[many_keys",
    r"test_export.py::test_onnx_takes_other_batches_and_lengths",
    r"integrations/test_transformers_policy.py::test_a_compiled_model_tells_of_each_layer_by_itself",
    r"integrations/test_transformers_evidence.py::test_a_model_that_is_compiled_in_place_is_converted",
    r"integrations/test_transformers_learned.py::test_steps_of_a_compiled_model_share_one_graph",
    # Some of these classes are asked by name in the same file.
    r"integrations/test_transformers_reach.py::test_every_class_that_attends_by_itself_is_refused_by_the_door",
    r"ops/test_triton.py::test_kernels_compile_for_hopper",
    r"spins/test_tap.py::test_derivatives_for_vectors",
    r"spins/test_stability.py::test_eigenvalues_are_those_of_the_whole_matrices\[3",
    r"potentials/test_duality.py::test_outside_the_hull_is_an_error_with_a_direction\[1e-09",
    # Commands and trainings whose claims others of the same file, or of a simpler model, make too.
    r"models/test_(image|classifier).py::test_(gradients_are_those_of_differences|a_classifier_learns)\[equilibrium",
    r"cli/test_compare.py::test_(own_data_without_reference|beta_of_the_digits_is_found)",
    r"cli/test_compare_potentials.py::test_solvers_meet_at_the_equilibrium_of_a_potential\[epan",
    r"benchmarks/test_mazes.py::test_what_is_kept_is_not_trained_again",
    r"benchmarks/test_inpainting.py::test_(what_learns_nothing|the_table_holds|equilibria_are_trained)",
    # All that needs a whole run of these suites, whose other tests are fast.
    r"benchmarks/test_spin_layers.py::test_(every_target|the_evidence|the_tables)",
    r"benchmarks/test_potentials_suite.py::test_(every_target|solves_that_are_timed|trainings_tell|the_tables)",
    r"benchmarks/test_sudoku.py::test_every_contender_answers_in_a_quick_run\[RECIPES",
    # Gradients by every linear solver are fast, and so is a graph of inference.
    r"energies/test_legendre.py::test_first_and_second_derivatives",
    r"training/test_watch_engines.py::test_a_compiled_model_is_one_graph_with_the_counts_of_eager_calls",
    # Programs, processes and whole runs: the fast suite has a shorter one of the same kind.
    r"(distributed/test_learned_anchors|benchmarks/test_scale_suite|layers/test_sharding).py::",
    r"distributed/test_sharded.py::test_they_are_those_of_one_process\[(3|4)",
    r"benchmarks/test_native_suite.py::test_(short_calls|layers_are|threads_and|an_evaluation|the_tables)",
    r"distributed/test_sharded.py::test_an_evaluation_is_one_sum_of_few_numbers\[(?!learned)",
    r"distributed/test_watch_group.py::test_counts_are_summed",
    r"test_export.py::test_(so_is_every_kind_of_budget|onnx_has_the_numbers|the_strict_tracer|a_query_without_keys)",
    r"test_export.py::test_(an_export_leaves_the_layer|a_solve_to_a_tolerance_is_refused|half_precision_is_exported)",
    r"test_imports.py::test_an_exported_program_finds_its_operation",
    r"test_kill_and_resume.py::test_two_kills_of_a_training_change_no_bit",
    r"test_contributing.py::test_a_(potential|solver)_is_one_file",
    r"test_docs_links.py::test_a_broken_link",
    r"benchmarks/test_(native_suite|benchmarks).py::test_every_metric_is_measured",
    r"benchmarks/test_(usefulness|spins).py::test_(the_command_runs|every_(model|setting)_has_its_row)",
    r"benchmarks/test_attention_suite.py::test_(every_solver_is_timed|the_figures_show|runs_on_a_gpu)",
    r"benchmarks/test_energy_transformer_suite.py::test_every_target",
    r"benchmarks/test_sudoku.py::test_(a_penalty|every_contender)",
    r"examples/test_examples.py::test_(both_models_learn|a_monitored_run_is_the_same)",
    r"examples/test_(convert_llama|spin_feed_forward|puzzles).py::",
    r"cli/test_compare_potentials.py::test_the_retrieval_suite",
    r"cli/test_compare.py::test_(patterns_that_are_not_finite|a_method_that_raises)",
    r"cli/test_magnetize.py::test_without_a_file_the_fitted_digits",
    r"cli/test_drive.py::test_(without_methods|a_field_that_is_not_finite|many_steps)",
    r"cli/test_landscape_(page|command).py::test_a_quick_(page|run)",
    r"cli/test_suite_distribution.py::test_the_suite_writes",
    r"plotting/test_landscape.py::test_without_matplotlib",
    r"plotting/test_landscape_basins.py::test_(plain_steps_end|every_start|the_figure_shows)",
    r"plotting/test_(descent_figure|driven_figure).py::test_(the_committed_scales|every_number_of_a_path|what_is_not_finite)",
    r"plotting/test_training_figure.py::test_(a_line_that|many_layers)",
    r"integrations/test_hosts.py::test_a_missing_library",
    r"ops/test_triton.py::test_asking_does_not_import",
    r"solvers/test_external.py::test_nothing_is_imported",
    r"training/test_watch_engines.py::test_(a_graph_of_inference|the_other_kinds)",
    r"integrations/test_transformers_watching.py::test_after_a_training",
    r"integrations/test_transformers_more.py::test_(a_compiled_model_that_attends|an_assistant)",
    r"integrations/test_transformers_learned.py::test_gradients_are_finite_differences",
    r"integrations/test_transformers_learned_files.py::test_a_trainer_resumes",
    r"models/test_(image|graph).py::test_(it_learns|gradients_are_those_of_differences)",
    r"layers/test_tie.py::test_a_tied_encoder",
    r"layers/test_half_known.py::test_transforms_and_compilers",
    r"layers/test_energy_transformer.py::test_programs_have",
    r"layers/test_(spin_transformer|mean_field_attention|spin).py::test_half_precision_autocast",
    r"layers/test_mean_field_attention.py::test_(a_net_learns|where_the_reaction)",
    r"layers/test_spin_transformer.py::test_(blocks_are_differentiated|a_gradient_of_a_stack|a_stack_is|the_parts_have)",
    r"layers/test_solve_in_order.py::test_gradcheck_through_the_chain",
    r"test_failure_policy_engines.py::test_(a_failed_backward_solve_in|a_compiled_call_with|what_raises_breaks)",
    r"layers/test_compiled_equilibrium.py::test_compiled_code",
    r"potentials/test_\w+.py::\w*test_(a_layer_|it_)?compiles",
    r"test_kinds_of_tensors.py::test_a_(memory|mask)\S*compiles",
    r"test_comparison.py::test_(all_methods|the_picture)",
    r"studies/test_bounds.py::test_from_the_threshold",
    # Derivatives entry by entry, and of methods for which the contracts ask for them, too.
    r"adjoints/test_adjoints.py::test_first_and_second_derivatives_entry_by_entry",
    r"energies/test_causal_tokens.py::test_gradients_through_the_solve",
    r"potentials/test_duality.py::test_(the_hull|conjugate_is_minus)",
    r"spins/test_saddle_point_derivatives.py::test_heat_capacity",
    r"spins/test_tap.py::test_derivatives_of_the_exact_response",
    # Laws of large numbers and many random systems.
    r"spins/test_(stability|guess).py::test_(the_closure_to_trust|plain_iteration|the_error_of_the_guess)",
    r"spins/test_(sampling|sampling_dynamics).py::test_(errors|effective_samples|two_wells|symmetric_couplings)",
    r"spins/test_adaptive_tap.py::test_(random_systems|it_is_exact_for_many)",
    r"spins/test_branches.py::test_(the_second_order|stability_finds|a_long_chain)",
    r"spins/test_saddle_point_samples.py::test_single_precision",
    r"spins/test_driven(_calls)?.py::test_(a_field_that_stays|derivatives_of_what)\S+\[Gaussian",
    r"layers/test_spin_cache.py::test_token_by_token.*KineticPlefka.*SphereUnits.*order=2",
)

#: Of a function with more cases the fast suite asks so many, drawn by their names, and `pytest -m slow` the others.
CASES = 8
#: Wrong arguments are each another fault, and short: all of them are fast.
WHOLE = r"::test_\w*(raise|refuse|error|wrong|bad_|argument)"
#: The same for functions whose cases are long.
FEWER = {
    r"ops/test_triton.py::test_kernel_in_the_interpreter": 4,
    r"integrations/": 3,
    r"::test_\w*(derivative|differentiated|gradcheck|grad_compose|_gradients|_its_gradients|compile)": 2,
    r"(test_layouts|test_failure_policy\w*|plotting/test_\w+).py::": 3,
    r"layers/test_(half_known|mean_field_attention|energy_transformer|spin_transformer|solve_in_order).py::": 3,
    r"energies/test_(unbounded|self_att\w+).py::": 4,
    r"potentials/test_spherical.py::test_first_and_second_derivatives_also_at_zero_field": 1,
    r"potentials/test_bessel.py::test_derivatives": 1,
    r"test_export.py::": 1,
    r"spins/test_(tap|sampling|gaussian_closure|branches|saddle_point_\w+|transfer_matrix|system).py::": 2,
}


@functools.cache
def patterns(file: str) -> list[str]:
    """The patterns of SLOW and FEWER that may match tests of a file."""
    return [p for p in (*SLOW, *FEWER) if re.search(p.partition("::")[0], file)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    matched: set[str] = set()
    cases: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    most: dict[str, int] = {}
    for item in items:
        name = item.nodeid
        function = name.partition("[")[0]
        here = {p for p in patterns(name.partition("::")[0]) if re.search(p, name)}
        matched |= here
        if here.isdisjoint(SLOW):
            cases[function].append(item)
            most[function] = min((FEWER[p] for p in here), default=len(items) if re.search(WHOLE, name) else CASES)
        else:
            item.add_marker(pytest.mark.slow)
    for function, several in cases.items():
        # In the order of a checksum, because every n-th of a product might always have the same dtype.
        for item in sorted(several, key=lambda item: zlib.crc32(item.nodeid.encode()))[most[function] :]:
            item.add_marker(pytest.mark.slow)
    if config.args == config.getini("testpaths") and (stale := {*SLOW, *FEWER} - matched):
        raise pytest.UsageError(f"tests/conftest.py: nothing is called {sorted(stale)}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from the million objects of a collection, which stay: it takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)

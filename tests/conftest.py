"""Settings of the whole suite, and which of its tests are slow."""

import atexit
import collections
import functools
import gc
import itertools
import re
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
)

#: Full products of parameters, of which the fast suite asks one case in so many, and `pytest -m slow` the others.
THINNED = {
    r"ops/test_hopfield_solve.py::test_the_course_is_that_of_the_solvers_loop\[": 10,
    r"ops/test_hopfield_adjoint.py::test_it_is_the_dense_solve_of_the_derivative\[": 8,
    r"ops/test_hopfield_adjoint.py::test_tiles_change_nothing\[": 8,
    r"potentials/test_spherical.py::test_first_and_second_derivatives_also_at_zero_field\[": 10,
    r"potentials/test_spherical.py::test_derivatives_of_inverse_and_entropy\[": 4,
    r"potentials/test_readout.py::test_first_and_second_derivatives\[": 3,
    r"potentials/test_bessel.py::test_derivatives_of_\w+\[": 4,
    r"potentials/test_kernel.py::test_gradients_reach_what_the_sum_is_made_of\[": 3,
    r"layers/test_(spin|spin_transformer|mean_field_attention).py::test_\w+_are_differentiated_exactly\[": 8,
    r"layers/test_(spin_transformer|mean_field_attention).py::test_half_precision_autocast_\w+\[": 8,
    r"layers/test_spin_transformer.py::test_(the_parts_add_up_to_the_answer_in_total|a_block_without_couplings)": 4,
    r"layers/test_spin_cache.py::test_token_by_token_is_one_call_of_all\[": 6,
    r"layers/test_half_known.py::test_gradients_are_the_derivatives\[": 4,
    r"layers/test_energy_transformer.py::test_tokens_gradients_and_energies_are_those_of_loops\[": 3,
    r"spins/test_branches.py::test_a_solution_is_its_own_start\[": 4,
    r"spins/test_thermodynamics.py::test_(first|second)_derivatives\[": 3,
    r"spins/test_gaussian_closure.py::test_where_steps_are_said_to_contract_no_state_has_a_steeper_step\[": 3,
    r"spins/test_saddle_point_derivatives.py::test_\w+_have_their_gradients\[": 3,
    r"spins/test_driven_calls.py::test_derivatives_of_what_is_asked_of_stationary_states\[": 2,
    r"spins/test_driven.py::test_a_field_that_stays_leads_to_the_stationary_state\[": 2,
    r"spins/test_support.py::test_a_method_supports_what_the_table_says\[": 3,
    r"ops/test_native.py::test_(a_query_has_the_same_bits_among_others_and_among_few|sizes)\[": 8,
    r"ops/test_hopfield_solve.py::test_what_is_returned_is_true_of_the_state\[": 8,
    r"ops/test_flash.py::test_\w+\[": 3,
    r"ops/test_registration.py::test_(vmap_is_a_loop|opcheck)\[": 3,
    r"potentials/test_query_offset.py::test_all_numbers_are_those_of_the_mask\[": 4,
    r"potentials/test_readout.py::test_(it_is_scaled_dot_product_attention_with_its_gradients|leading_axes)": 4,
    r"potentials/test_blocks_of_pairs.py::test_blocks_are_the_whole\[": 4,
    r"potentials/test_grouped_keys.py::test_keys_\w+\[": 3,
    r"energies/test_unbounded.py::test_squares_\w+\[": 3,
    r"adjoints/test_adjoints.py::test_implicit_gradient_equals_600_unrolled_steps\[": 4,
    r"solvers/test_solvers.py::test_clustered_keys_every_query_converges_and_none_on_a_saddle\[": 4,
    r"distributed/test_(sharded|learned_anchors).py::test_\w+_one_process": 3,
    r"test_nonfinite_cotangents.py::test_it_is_told_by_nothing_but_the_gradient\[": 8,
    r"test_saved_tensor_hooks.py::test_gradients_are_those_without_hooks\[": 6,
    r"test_matrices.py::test_batches_of_large_systems_are_answered_on_two_threads\[": 2,
    r"test_export.py::test_(a_budget_is_exported_as_plain_operations_of_any_size|half_precision_is_exported)": 3,
    r"spins/test_system.py::test_asymmetric_couplings_are_refused_inside_every_transform\[": 3,
    r"spins/test_stability.py::test_the_(closure_to_trust|at_number_of_free_directions)": 2,
    r"spins/test_tap.py::test_(errors_are_of_the_next_order|a_lost_sample_spoils|blocks_of|without_couplings)": 2,
    r"spins/test_tap.py::test_(masked_sites_change_nothing|the_linearization_is_the_jacobian)": 3,
    r"spins/test_sampling.py::test_chains_of_vectors\[": 2,
    r"spins/test_sampling_one_site.py::test_(moments|the_angle_has_the_exact_distribution)\[": 3,
    r"spins/test_thermodynamics.py::test_a_lost_sample_spoils_no_gradient": 2,
    r"spins/test_saddle_point_derivatives.py::test_four_derivatives_are_those_of_the_value\[numbers": 3,
    r"spins/test_sweep.py::test_a_sweep_is_the_answers_at_every_temperature\[": 3,
    r"spins/test_contracts.py::test_samples_that_are_done_are_left_out_of_the_work\[": 3,
    r"spins/test_gaussian_closure.py::test_it_is_near_to_chains_of_vectors\[": 2,
    r"spins/test_branches.py::test_thermodynamics_go_through_every_transform\[": 2,
    r"spins/test_transfer_matrix.py::test_everything_in_all_directions\[": 2,
    r"layers/test_attention.py::test_compiles_without_a_graph_break\[": 3,
    r"layers/test_attention.py::test_gradients_are_the_derivatives\[": 2,
    r"layers/test_mean_field_attention.py::test_(no_pair_of_states|the_answer_is_that_of_the_iteration|layout_of)": 3,
    r"layers/test_causal_tokens_apart.py::test_what_stands_behind_changes_no_bit\[": 3,
    r"layers/test_energy_transformer.py::test_the_layout_of_tokens_and_masks_changes_nothing\[": 3,
    r"layers/test_equilibrium_transformer.py::test_its_solution_and_gradients_are_those_of_400_steps\[": 2,
    r"layers/test_equilibrium.py::test_a_compiled_layer_gives_the_same_values\[": 3,
    r"layers/test_decoding.py::test_token_by_token_equals_one_forward\[": 4,
    r"test_computed_weights.py::test_(a_compiled_block_is_solved|gradients_through_computed_weights)": 3,
    r"test_callback.py::test_what_is_told_is_the_trace_and_changes_nothing\[": 3,
    r"test_layouts.py::test_answers_and_gradients_do_not_depend_on_the_layout\[": 3,
    r"test_kinds_of_tensors.py::test_a_mask_of_the_keys_alone_compiles\[": 2,
    r"test_failure_policy_engines.py::test_a_compiled_call_with_a_word_is_one_graph\[": 2,
    r"test_per_sample.py::test_gradients_are_those_of_a_map_that_keeps_all\[": 2,
    r"layers/test_memory.py::test_gradients_are_the_derivatives\[": 3,
    r"layers/test_solve_in_order.py::test_a_later_token_changes_no_bit\[": 2,
    r"layers/test_mean_field_attention.py::test_layers_can_be_transformed\[": 3,
    r"layers/test_spin_transformer.py::test_(a_stack_is_its_blocks_in_turn|a_missing_token_changes_no_bit)": 3,
    r"potentials/test_boltzmann.py::test_two_layers_of_neurons_end_at_the_equilibrium": 4,
    r"potentials/test_layouts_of_keys.py::test_\w+_are_those_of_contiguous_tensors\[": 3,
    r"potentials/test_kernel.py::test_a_layer_trains_a_step_without_a_warning\[": 4,
    r"potentials/test_entmax.py::test_attention_differentiates_as_an_unrolled_reference\[": 2,
    r"ops/test_hopfield_solve.py::test_(clustered_keys|a_query_that_is_not|low_precision|a_query_alone)": 4,
    r"ops/test_hopfield_adjoint.py::test_what_a_key_holds_that_nobody_attends_to_changes_not_one_bit\[": 4,
    r"ops/test_hopfield_solve_cost.py::test_a_fixed_budget_never_waits_for_an_accelerator\[": 3,
    r"ops/test_registration.py::test_gradcheck_of_the_solve\[": 4,
    r"integrations/test_multihead_hosts.py::test_an_encoder_calls_it_whether_swapped_before_or_after": 5,
    r"integrations/test_multihead_hosts.py::test_(an_encoder_layer_calls_it|a_decoder_calls_both)\[": 3,
    r"integrations/test_multihead_module.py::test_compiles_without_a_graph_break\[": 3,
    r"integrations/test_multihead.py::test_(output_and_weights_are_those|no_steps_are_torchs_module)": 3,
    r"integrations/test_transformers_architectures.py::test_generating_with_a_static_cache": 5,
    r"integrations/test_transformers_architectures.py::test_(equilibria_are|decoding_with|gradients_are|what_a_pad)": 2,
    r"potentials/test_subclasses.py::test_a_solve_answers_what_the_subclass_computes\[": 3,
    r"integrations/test_transformers_watching.py::test_no_engine_of_the_trainer_counts_twice\[": 2,
    r"integrations/test_transformers_learned.py::test_values_and_gradients_are_those_of_a_reference": 2,
    r"layers/test_solve_in_order.py::test_in_order_is_at_once\[": 3,
    r"layers/test_mean_field_attention.py::test_other_methods_couplings_and_heads_are_distilled\[": 3,
    r"training/test_watch.py::test_every_precision_and_layout\[": 3,
    r"energies/test_legendre.py::test_(default_solver_needs_no_more|energy_falls_at_every_plain_step)": 3,
    r"energies/test_sphere_energy.py::test_gradcheck_and_gradgradcheck_through_solve\[": 2,
}


@functools.cache
def patterns(file: str) -> list[tuple[str, int | None]]:
    """The patterns that may match tests of a file, each with its number in THINNED."""
    every = {**dict.fromkeys(SLOW), **THINNED}
    return [(pattern, count) for pattern, count in every.items() if re.search(pattern.partition("::")[0], file)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    matched: set[str] = set()
    places: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)
    for item in items:
        name = item.nodeid
        for pattern, count in patterns(name.partition("::")[0]):
            if re.search(pattern, name):
                matched.add(pattern)
                # Of THINNED the first of every function stays, and then one in so many.
                if count is None or next(places[name.partition("[")[0]]) % count:
                    item.add_marker(pytest.mark.slow)
    if config.args == config.getini("testpaths") and (stale := {*SLOW, *THINNED} - matched):
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

"""What users of such Trainers complain of most: each complaint has its tests."""

from pathlib import Path

# complaint → the tests that show it solved, as (file, test)
COMPLAINTS = {
    "ranks that log different names": [
        ("test_logging_on_ranks.py", "test_ranks_may_log_different_names"),
    ],
    "a rank dies": [
        ("test_failures.py", "test_a_rank_that_dies_without_a_word_ends_the_run"),
        ("test_failures.py", "test_a_rank_that_raises_is_the_one_that_is_told"),
        ("test_failures.py", "test_horovodrun_ends_the_run_too"),
    ],
    "SIGTERM": [
        (
            "test_failures.py",
            "test_sigterm_to_one_rank_stops_all_after_the_same_step_and_the_run_goes_on_from_there",
        ),
    ],
    "the Trainer and the launcher disagree": [
        ("test_launcher_mismatch.py", "test_a_mismatch_names_the_line_to_change"),
        ("test_launcher_mismatch.py", "test_nodes_without_a_launcher_are_refused"),
    ],
    "notebooks": [
        (
            "test_spawn.py",
            "test_a_notebooks_functions_and_classes_train_in_other_processes",
        ),
    ],
    "the user's order, and each sample once": [
        ("test_sharding_evaluation.py", "test_evaluation_counts_every_sample_once"),
        ("test_sharding_training.py", "test_a_users_sampler_is_dealt_out_and_not_replaced"),
        ("test_sharding_training.py", "test_shuffled_data_are_shared_anew_each_epoch"),
        ("test_sharding_training.py", "test_a_sampler_with_replacement_stays_one"),
        ("test_sharding_training.py", "test_streams_of_uneven_length_end_together"),
        ("test_collectives.py", "test_a_collective_that_would_hang_is_refused"),
    ],
    "checkpoints": [
        (
            "test_trainer_checkpoints.py",
            "test_all_ranks_save_and_rank_0_writes_under_another_name_first",
        ),
        ("test_collectives.py", "test_one_rank_that_wants_to_stop_stops_all"),
    ],
    "predictions": [
        ("test_sharding_evaluation.py", "test_predict_gives_every_batch_once_in_order"),
    ],
}


def test_every_rule_has_its_test():
    for complaint, tests in COMPLAINTS.items():
        for file, test in tests:
            text = Path(__file__).with_name(file).read_text()
            assert f"\ndef {test}(" in text, f"{complaint}: {file} has no {test}"

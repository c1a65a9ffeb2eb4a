"""The order of all GPU checks: those first that answer most, so that ten minutes on a GPU are well used.

A check that is not named here cannot be collected. `python -m pytest -m gpu tests/gpu --collect-only -q` shows the
order.
"""

SP_REPEATS = 5
"""Times that two workers share images on one GPU: the check once did not end."""

ORDER = (
    "test_published_sizes.py::test_a_model_of_published_size_is_measured",
    "test_node.py::test_a_run_computes_on_the_gpu_unless_the_job_chooses_the_cpu",
    "test_node.py::test_two_workers_share_images_on_one_gpu_even_after_a_kill",
    "test_engine.py::test_a_gpu_samples_the_same_images_as_the_cpu",
    "test_engine.py::test_low_rank_adapters_are_equal_on_a_gpu_and_use_no_gpu_random_numbers",
    "test_engine.py::test_a_model_is_moved_to_the_gpu_with_only_trained_weights_in_fp32",
    "test_engine.py::test_a_run_resumes_from_its_checkpoint_on_one_gpu",
    "test_half_parity.py::test_two_ranks_on_one_gpu_share_a_pass_in_bf16",
    "test_node.py::test_half_precision_candidates_are_tried_on_the_gpu_during_training",
    "test_node.py::test_processes_forked_by_the_node_agent_can_use_a_gpu",
    "test_node.py::test_ray_workers_compute_on_the_gpus_assigned_by_ray",
    "test_neighbour.py::test_a_joiner_copies_a_neighbours_weights_on_one_gpu",
    "test_nccl.py::test_one_rank_creates_uses_and_aborts_an_nccl_communicator",
    "test_nccl.py::test_many_nccl_communicators_of_the_same_ranks_coexist",
    "test_nccl.py::test_fifty_nccl_regroups_leave_nothing_behind",
    "test_nccl.py::test_a_death_breaks_only_the_nccl_communicators_of_its_rank",
    "test_node.py::test_two_workers_share_images_on_two_gpus_through_nccl",
    "test_half_parity.py::test_two_ranks_on_two_gpus_share_a_pass_in_bf16",
)
"""Tests of this folder, without their parameters. Parameters of a test keep their own order (measure.CHECKS)."""


class UnknownCheck(Exception):
    """A GPU check without a place in the order."""


def place(nodeid: str) -> int:
    """Return the place of a check in the order. Raises UnknownCheck for one that is not named."""
    name = nodeid.rpartition("/")[2].partition("[")[0]
    if name not in ORDER:
        raise UnknownCheck(f"{name} has no place in tests/gpu/order.py: put it where its answer is worth the time")
    return ORDER.index(name)

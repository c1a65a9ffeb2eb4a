"""Planted bugs of early groups: a wrong version, a forgotten draft, a step that does not wait, candidates first."""

from inspect import unwrap

from engine.algorithm.flow_grpo import own_means
from engine.algorithm.old_policy import OldPolicy
from engine.algorithm.transaction import Transaction
from engine.exploration.batch import BatchExploration
from engine.exploration.explorer import Explorer
from engine.queue.queue import Queue
from engine.queue.state import QueueState
from engine.trainer.checkpoints import Checkpoints
from engine.trainer.early_groups import EarlyGroups
from engine.trainer.early_rollouts import EarlyRollouts
from engine.trainer.evaluator import Evaluator
from engine.trainer.model import TrainedModel
from engine.trainer.rollouts import Rollouts
from engine.trainer.state import TrainerState
from engine.trainer.updates import BatchUpdates
from tests.mutants.faults import Fault
from tests.mutants.planted_bug import changed, everywhere

EARLY = "tests/engine/test_early_groups.py"
MERGED = "tests/engine/test_early_merged.py"
DRAFTS = "tests/engine/test_early_drafts.py"
STATE = "tests/engine/test_trainer_state.py"

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            name="an-early-group-counts-as-fresh",
            forgets="which groups are early, when it reports health",
            patches=((Rollouts, "group", changed(Rollouts.group, "number in self.early", "False")),),
            found_by=f"{EARLY}::test_half_of_the_groups_of_every_batch_but_the_first_are_early",
        ),
        Fault(
            name="early-rewards-judge-the-ranking",
            forgets="that early and stale rewards come from the same weights",
            patches=((Explorer, "judge", changed(Explorer.judge, "if number not in manifest.early", "")),),
            found_by=f"{EARLY}::test_half_of_the_groups_of_every_batch_but_the_first_are_early",
        ),
        Fault(
            name="a-draft-is-forgotten-at-restart",
            forgets="to read the draft of an earlier process",
            patches=((Checkpoints, "draft", lambda self, batch: None),),
            found_by=f"{EARLY}::test_a_restarted_trainer_keeps_its_draft_and_chooses_no_other",
        ),
        Fault(
            name="a-version-before-the-last-is-served",
            forgets="that staleness is never 2",
            patches=(
                (
                    EarlyGroups,
                    "_order_rollouts",
                    changed(EarlyGroups._order_rollouts, "version=version", "version=max(0, version - 1)"),
                ),
            ),
            found_by=f"{EARLY}::test_old_log_probs_are_those_of_the_version_that_sampled_the_group",
        ),
        Fault(
            name="the-old-policy-is-of-the-wrong-version",
            forgets="which version sampled an early group, when it needs log-probs",
            patches=(
                (
                    Rollouts,
                    "_take_early",
                    changed(
                        Rollouts._take_early,
                        "(result.score, trajectory)",
                        "(result.score, self._own_log_probs(result.request.prompt, trajectory))",
                    ),
                ),
            ),
            found_by=f"{EARLY}::test_old_log_probs_are_those_of_the_version_that_sampled_the_group",
        ),
        Fault(
            name="computed-log-probs-are-of-the-wrong-version",
            forgets="the weights of one version before, when the trainer computes log-probs",
            patches=(everywhere(own_means, changed(own_means, "early, own.before_active", "early, own.active")),),
            found_by=f"{MERGED}::test_the_gradient_compares_each_group_with_the_weights_that_made_it",
        ),
        Fault(
            name="a-checkpoint-forgets-the-weights-of-early-groups",
            forgets="that a restarted trainer needs the weights of one version before",
            patches=((OldPolicy, "restore_before", lambda self, tensors: None),),
            found_by=f"{MERGED}::test_a_killed_run_compares_early_groups_with_the_same_weights",
        ),
        Fault(
            name="a-group-made-anew-has-images-of-two-versions",
            forgets="that an earlier process of the trainer had early groups made anew",
            patches=((Rollouts, "_is_wanted", lambda self, prompt: True),),
            found_by=f"{EARLY}::test_an_early_group_that_is_whole_takes_no_image_made_anew",
        ),
        Fault(
            name="early-images-are-sampled-though-they-are-made-anew",
            forgets="that nobody trains an early image of a group that is made anew",
            patches=((QueueState, "drop_early", lambda self, request: None),),
            found_by="tests/engine/test_queue.py::test_a_training_request_replaces_the_early_request_for_its_image",
        ),
        Fault(
            name="a-poisoned-image-makes-every-early-group-anew",
            forgets="which group has the poisoned image",
            patches=(
                (
                    EarlyRollouts,
                    "take",
                    changed(EarlyRollouts.take, "not poisoned.isdisjoint(", "poisoned and all("),
                ),
            ),
            found_by=f"{EARLY}::test_a_poisoned_image_makes_no_other_group_anew",
        ),
        Fault(
            name="an-evaluation-is-charged-to-the-wrong-version",
            forgets="which version was evaluated beside a batch with early groups",
            patches=(
                (
                    Evaluator,
                    "_record",
                    changed(
                        Evaluator._record,
                        "self._state, evaluation.iteration,",
                        "self._state, evaluation.iteration + bool(self._state.next_batch.early),",
                    ),
                ),
            ),
            found_by=f"{EARLY}::test_an_evaluation_beside_early_groups_has_the_figures_of_its_own_version",
        ),
        Fault(
            name="a-step-does-not-wait-for-its-mini-batch",
            forgets="that the last group of a mini-batch is missing",
            patches=(
                (BatchUpdates, "train", changed(BatchUpdates.train, "while step.missing:", "while step.missing[1:]:")),
                (Transaction, "commit", changed(Transaction.commit, "if self.missing:", "if False:")),
            ),
            found_by=f"{EARLY}::test_every_step_trains_exactly_its_mini_batch",
        ),
        Fault(
            name="a-stored-draft-of-another-version-is-taken",
            forgets="that staleness is 0 or 1, when it takes a draft over",
            patches=(
                (
                    EarlyGroups,
                    "begin",
                    changed(EarlyGroups.begin, " and stored.version == self._state.iteration", ""),
                ),
            ),
            found_by=f"{DRAFTS}::test_a_stored_draft_of_the_open_version_is_taken_over_and_of_no_other",
        ),
        Fault(
            name="a-draft-is-durable-after-its-rollouts",
            forgets="that a trainer may die between the rollouts of a draft and its file",
            patches=(
                (
                    EarlyGroups,
                    "look",
                    changed(
                        EarlyGroups.look,
                        "self._checkpoints.put_draft(draft)",
                        "self._submit(draft); self._checkpoints.put_draft(draft)",
                    ),
                ),
            ),
            found_by=f"{DRAFTS}::test_a_draft_is_durable_before_its_rollouts_are_ordered_with_the_open_version",
        ),
        Fault(
            name="the-pause-of-early-groups-is-ignored",
            forgets="that early groups rest after a batch with too many rows outside the clip range",
            patches=(
                (
                    EarlyGroups,
                    "begin",
                    changed(
                        EarlyGroups.begin, "self._looks = batch >= self._state.early_off_until", "self._looks = True"
                    ),
                ),
            ),
            found_by=f"{DRAFTS}::test_early_groups_pause_above_the_share_of_rows_outside_the_clip_range[0.51-True]",
        ),
        Fault(
            name="the-pool-of-a-pause-is-kept",
            forgets="that a batch without early groups needs no candidates for them",
            patches=((EarlyGroups, "pool", changed(EarlyGroups.pool, " or batch < self._state.early_off_until", "")),),
            found_by=f"{DRAFTS}::test_early_groups_pause_above_the_share_of_rows_outside_the_clip_range[0.51-True]",
        ),
        Fault(
            name="early-groups-are-sampled-with-the-sampler-of-the-open-batch",
            forgets="that each batch may have another window of the sampler",
            patches=(
                (
                    EarlyGroups,
                    "_order_rollouts",
                    changed(
                        EarlyGroups._order_rollouts,
                        "batch_plan(self._config, batch,",
                        "batch_plan(self._config, batch - 1,",
                    ),
                ),
            ),
            found_by=f"{DRAFTS}::test_a_draft_is_durable_before_its_rollouts_are_ordered_with_the_open_version",
        ),
        Fault(
            name="a-draft-is-chosen-from-half-a-budget",
            forgets="that a repeated run must have the same early groups",
            patches=(
                (
                    EarlyGroups,
                    "_has_candidates",
                    changed(EarlyGroups._has_candidates, "return not collected.to_come", "return True"),
                ),
            ),
            found_by=f"{DRAFTS}::test_a_counted_budget_is_waited_for_and_has_one_more_look_at_the_end",
        ),
        Fault(
            name="candidates-keep-their-gpu",
            forgets="that exploration uses idle GPUs, when a rollout waits",
            patches=((Queue, "heartbeat", changed(Queue.heartbeat, "if gives_way(", "if False and gives_way(")),),
            found_by="tests/engine/test_queue.py::test_exploration_gives_way_to_rollouts",
        ),
        Fault(
            name="candidates-come-before-early-rollouts",
            forgets="that early groups follow once every prompt has its pool",
            patches=(
                (
                    BatchExploration,
                    "more",
                    changed(BatchExploration.more, "self._waits_for_early_rollouts()", "False"),
                ),
            ),
            found_by="tests/engine/test_exploration_batch.py::"
            "test_an_idle_time_budget_with_its_pool_waits_for_the_early_rollouts",
        ),
        Fault(
            name="only-the-last-early-group-counts-as-early",
            forgets="the early groups that became whole before",
            patches=(
                (
                    Rollouts,
                    "_take_early",
                    changed(Rollouts._take_early, "tuple(sorted((*self.early, number)))", "(number,)"),
                ),
            ),
            found_by=f"{EARLY}::test_each_early_image_is_fetched_once_and_every_whole_early_group_counts_as_early",
        ),
        Fault(
            name="early-images-are-fetched-at-every-look",
            forgets="how many early images it has",
            patches=((EarlyRollouts, "take", changed(EarlyRollouts.take, "self._received += 1", "pass")),),
            found_by=f"{EARLY}::test_each_early_image_is_fetched_once_and_every_whole_early_group_counts_as_early",
        ),
        Fault(
            name="the-trainer-waits-for-early-groups-first",
            forgets="that fresh groups arrive meanwhile",
            patches=((Rollouts, "_take", changed(Rollouts._take, " and self._waits_for_early_groups()", "")),),
            found_by=f"{EARLY}::test_the_trainer_waits_for_early_groups_once_nothing_else_is_missing",
        ),
        Fault(
            name="a-pause-ends-with-the-process",
            forgets="the pause of early groups, when it resumes",
            patches=((TrainerState, "restore", changed(TrainerState.restore, "checkpoint.early_off_until", "0")),),
            found_by=f"{STATE}::test_every_field_of_the_state_goes_through_a_checkpoint",
        ),
        Fault(
            name="weights-of-early-groups-follow-the-old-policy",
            forgets="that an averaged old policy moves on in place",
            patches=((OldPolicy, "advance", changed(unwrap(OldPolicy.advance), "if keeps_before:", "if False:")),),
            found_by="tests/engine/test_objectives.py::"
            "test_weights_of_early_groups_do_not_follow_an_averaged_old_policy",
        ),
        Fault(
            name="weights-of-early-groups-are-not-in-the-checkpoint",
            forgets="that a restarted trainer computes the log-probs of early groups",
            patches=((TrainedModel, "files", changed(TrainedModel.files, "if before is not None:", "if False:")),),
            found_by="tests/engine/test_sent_weights.py::"
            "test_the_weights_that_made_early_groups_go_through_a_checkpoint_in_fp32",
        ),
    )
}

"""Planted bugs of a trainer's ranks: another policy on another rank, and shares that do not come together."""

from inspect import unwrap
from typing import Any

from engine.algorithm.health import Health
from engine.algorithm.transaction import Transaction
from engine.node import trainer_nodes
from engine.trainer import ranks
from engine.trainer.rank_messages import TrainGroup
from tests.mutants.faults import Fault
from tests.mutants.planted_bug import changed, everywhere

THREADS = "tests/engine/test_rank_threads.py::test_"
SAME = f"{THREADS}ranks_in_threads_train_the_weights_of_one_rank_and_report_all_groups"
SAMPLING = "tests/engine/test_sampling_rank.py::test_"
NODES = "tests/engine/test_trainer_nodes.py::test_"
STEP = (
    "tests/engine/test_transaction.py::"
    "test_a_rank_trains_its_part_of_a_unit_and_a_gradient_of_all_ranks_skips_the_groups_of_all"
)
EARLY = f"{THREADS}ranks_compare_early_groups_with_the_weights_of_one_version_before"

FAULTS: dict[str, Fault] = {}


def _fault(name: str, forgets: str, found_by: str, *patches: tuple[Any, str, Any]) -> None:
    FAULTS[name] = Fault(name=name, forgets=forgets, patches=patches, found_by=found_by)


def _method(where: Any, name: str, old: str, new: str) -> tuple[Any, str, Any]:
    return where, name, changed(vars(where)[name], old, new)


_fault(
    "ranks-miss-the-weights-of-early-groups",
    "that other ranks compare early groups with the weights of one version before",
    EARLY,
    _method(ranks.Ranks, "_sent_weights", "with_before=old.before is not None", "with_before=False"),
    _method(ranks.Ranks, "_send_weights", "(trainer.old.tensors, trainer.old.before)", "(trainer.old.tensors,)"),
)
_fault(
    "health-of-other-ranks-is-lost",
    "that a step's health is of the groups of all ranks",
    f"{SAME}[2-0.5]",
    _method(ranks.Ranks, "_gather", "health.merge(share.health)", "pass"),
)
_fault(
    "a-follower-keeps-an-old-policy",
    "that the old policy of a batch is the trained weights until its first step",
    EARLY,
    _method(ranks.Follower, "_take_weights", "trainer.old.advance(0)", "pass"),
)
_fault(
    "old-policy-stays-on-rank-0",
    "to send the old policy to the other ranks",
    f"{THREADS}ranks_train_with_an_old_policy_of_its_own",
    _method(ranks.Ranks, "_sent_weights", "with_old=old.tensors is not None", "with_old=False"),
    _method(ranks.Ranks, "_send_weights", "(trainer.old.tensors, trainer.old.before)", "(trainer.old.before,)"),
)
_fault(
    "ranks-scale-by-their-own-spread",
    "that the spread of rewards is of the batch, and not of a rank's groups",
    f"{SAME}[2-0.5]",
    _method(ranks.Follower, "_begin", "std=order.std", "std=None"),
)
_fault(
    "early-groups-are-fresh-on-other-ranks",
    "to say which groups are early when they are sent",
    EARLY,
    (
        TrainGroup,
        "group",
        property(changed(TrainGroup.group.fget, "is_early=self.is_early", "is_early=False")),  # type: ignore[attr-defined]
    ),
)
_fault(
    "reference-of-a-follower-is-the-base",
    "that the reference of a run with start weights is those weights",
    f"{SAME}[2-0.5]",
    everywhere(ranks.take_start, changed(ranks.take_start, "return order.is_started", "return False")),
)
_fault(
    "a-step-without-the-groups-of-other-ranks",
    "that a step waits for the groups that other ranks train",
    f"{SAME}[2-0.5]",
    _method(ranks._SharedStep, "commit", "if self.missing:", "if self._own.missing:"),
)
_fault(
    "a-rank-without-gradient-adds-ones",
    "that a rank whose groups add nothing adds zeros",
    f"{SAME}[3-0.0]",
    everywhere(
        ranks._sum_gradients,
        changed(unwrap(ranks._sum_gradients), "torch.zeros_like(parameter)", "torch.ones_like(parameter)"),
    ),
)
_fault(
    "memory-of-another-rank-is-ignored",
    "that the passes of all ranks fit where the least memory is",
    f"{THREADS}a_rank_whose_memory_is_full_makes_the_passes_of_all_ranks_smaller[1]",
    _method(ranks.Ranks, "_gather", "self._trainer.rows_per_forward = share.rows_per_forward", "pass"),
)
_fault(
    "early-rows-outside-are-lost-in-a-merge",
    "early rows outside the clip range on other ranks",
    EARLY,
    _method(Health, "add", "self.early_outside += more.early_outside", "pass"),
)

# --- ranks that sample

_fault(
    "a-rank-samples-though-it-may-not",
    "that an evaluation or a shared image has the GPU",
    f"{SAMPLING}a_rank_that_may_not_sample_waits_and_goes_on_when_it_may",
    _method(ranks.SamplingRank, "_may_sample", "return self._let_sample", "return True"),
)
_fault(
    "a-rank-keeps-its-leases-when-its-group-ends",
    "to give its leases back before it begins again",
    f"{SAMPLING}a_rank_gives_its_leases_back_when_its_group_ends[True]",
    _method(ranks.SamplingRank, "follow", "self._sampler.end()", "pass"),
)
_fault(
    "rank-0-waits-for-a-whole-lease",
    "that all ranks wait until this one takes the weights",
    f"{SAMPLING}weights_interrupt_sampling_because_rank_0_sends_them_to_all_ranks_at_once",
    _method(ranks.Follower, "_can_wait", " and order.weights is None", ""),
)
_fault(
    "a-rank-samples-with-weights-that-it-does-not-have",
    "to take the weights before it samples with them",
    f"{SAMPLING}a_rank_samples_with_published_weights_only_once_it_has_them",
    _method(
        ranks.Follower,
        "_carry_out",
        "        with self._measure(Phase.COLLECTIVE):\n            self._take_weights(order.weights)\n"
        "        self._sampler.published(order.key, order.digest)",
        "        self._sampler.published(order.key, order.digest)\n"
        "        with self._measure(Phase.COLLECTIVE):\n            self._take_weights(order.weights)",
    ),
)
_fault(
    "times-of-a-rank-are-answered-twice",
    "which times it has answered",
    f"{SAMPLING}each_answer_has_the_times_since_the_last_one",
    _method(
        ranks.SamplingRank, "_spent_ms", "spent, self._reported_ms = total - self._reported_ms, total", "spent = total"
    ),
)

# --- nodes of the trainer

_fault(
    "a-restarted-coordinator-takes-progress-back",
    "the newest iteration that the node has heard of",
    f"{NODES}a_further_node_copies_each_meeting_until_the_run_is_over",
    everywhere(
        trainer_nodes.copy_meeting,
        changed(
            trainer_nodes.copy_meeting,
            "max(answer.meeting.iteration, meeting.iteration)",
            "answer.meeting.iteration",
        ),
    ),
)
_fault(
    "a-group-is-formed-without-a-node",
    "to wait for the nodes of the trainer",
    f"{NODES}rank_0_waits_until_every_further_node_was_heard_and_says_for_which",
    (trainer_nodes.OtherNodes, "wait", lambda self: (0, *self._numbers)),
)
_fault(
    "a-silent-node-holds-the-trainer-up",
    "that a frozen node closes no connection",
    f"{NODES}rank_0_leaves_for_a_silent_node_and_not_for_a_coordinator_that_does_not_answer",
    _method(trainer_nodes.OtherNodes, "are_silent", "return bool(lost)", "return False"),
)
_fault(
    "a-group-that-lacks-a-node-waits-for-it",
    "that the other ranks can train meanwhile",
    f"{NODES}a_trainer_that_may_lack_a_node_waits_for_it_for_less_than_a_minute",
    _method(trainer_nodes.OtherNodes, "awaited", "answer.silent_ms(number) < 1000 * AWAITED_SECONDS", "True"),
)
_fault(
    "a-node-that-came-back-never-joins",
    "to ask for nodes that the group lacks",
    f"{NODES}a_group_may_grow_when_a_node_that_it_lacks_was_heard",
    _method(trainer_nodes.OtherNodes, "have_come", "number not in self._members and", "number in self._members and"),
)
_fault(
    "a-rank-trains-a-whole-unit-alone",
    "that a unit is of the groups of all ranks",
    f"{STEP}[lora]",
    _method(
        Transaction,
        "_start",
        "math.ceil(self._manifest.unit * len(self._wanted) / len(self._step))",
        "self._manifest.unit",
    ),
)
_fault(
    "a-step-that-failed-skips-the-groups-of-rank-0-alone",
    "that the gradients of all ranks are in a step",
    f"{STEP}[lora]",
    _method(Transaction, "commit", "list(self._step)", "list(self._wanted)"),
)

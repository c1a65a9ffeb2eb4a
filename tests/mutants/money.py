"""Planted bugs of budget, ownership and time, each with the test that finds it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy.orm import Session

from engine.coordinator.judge_account import JudgeAccount
from engine.coordinator.judge_desk import JudgeDesk
from engine.coordinator.judge_turns import JudgeTurns
from engine.node.spend_guard import TimeLeft
from launcher.cleanup import removal
from launcher.cli import follow
from launcher.controller import facts_reader, run_process, spend_deadlines
from launcher.controller.bucket_sizes import BucketSizes
from launcher.controller.cloud_time import CloudTime
from launcher.controller.controller import Controller
from launcher.controller.lease import renew
from launcher.controller.recorder import Recorder
from launcher.controller.spend_deadlines import SpendDeadlines
from launcher.decide import budget_guard, node_events, point_cost, run_budget, stopping
from launcher.decide.facts import Facts, Wanted
from launcher.ledger.store import writing
from launcher.provision.sky.watch import AgentWatch
from launcher.runs import kept_plan, runs
from launcher.storage.folder_sizes import _Listing
from launcher.storage.store_lease import StoreLease
from tests.mutants.faults import Fault
from tests.mutants.planted_bug import changed, everywhere

MOVING = "tests/launcher/cluster/test_moving.py::test_"
TIME = "tests/launcher/cluster/test_cloud_time.py::test_"
TURNS = "tests/engine/test_vlm_reward.py::test_"
JUDGES = "tests/launcher/test_judges_budget.py::test_"
REMOVAL = "tests/launcher/test_removal.py::test_"
BUDGET = "tests/launcher/cluster/test_run_budget.py::test_"


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _own_limit_only(self: SpendDeadlines, facts: Facts, wanted: Wanted, now_ms: int) -> int | None:
    return budget_guard.money_deadline_ms(
        now_ms=now_ms,
        metered=facts.metered,
        max_total=wanted.limits.max_total,
        planned_hourly=run_budget.planned_hourly(facts, wanted),
    )


def _plan_only(facts: Facts, wanted: Wanted) -> int:
    return sum(slot.placement.micro_usd_per_hour for slot in wanted.slots)


def _only_later(self: SpendDeadlines, facts: Facts, wanted: Wanted, *_: Any, **__: Any) -> None:
    deadline_ms, gain_ms = self.deadline_ms(facts, wanted, facts.now_ms), spend_deadlines.REARM_MS
    for node in facts.nodes:
        armed = self._armed.get(node.name)
        if deadline_ms is not None and node.is_live and (armed is None or deadline_ms > armed + gain_ms):
            self._provisioner.rearm(node.name, deadline_ms)
            self._armed[node.name] = deadline_ms


def _no_longest(self: TimeLeft) -> tuple[str, int | None, None]:
    node, left_ms, _ = _node_order(self)
    return node, left_ms, None


_node_order = TimeLeft._node_order


@contextmanager
def _own_lease_only(self: Recorder) -> Iterator[Session]:
    with writing(self._sessions) as session:
        renew(session, self._lease)
        yield session


_ALL = (
    Fault(
        name="no_lease_over_machines",
        forgets="that another computer may control the run by now",
        patches=((StoreLease, "check", _nothing),),
        found_by=f"{MOVING}a_controller_whose_lease_another_computer_holds_does_nothing",
    ),
    Fault(
        name="lease_over_machines_between_passes_only",
        forgets="that the lease may be lost in the midst of a pass",
        patches=((Recorder, "transaction", _own_lease_only),),
        found_by=f"{MOVING}a_lease_lost_in_the_middle_of_a_pass_stops_the_purchase",
    ),
    Fault(
        name="bought_with_a_wrong_clock",
        forgets="to compare this machine's clock with the clouds'",
        patches=((CloudTime, "_judged", _nothing),),
        found_by=f"{TIME}no_node_is_bought_while_the_time_is_in_doubt_and_the_reason_is_given",
    ),
    Fault(
        name="limits_of_the_launch",
        forgets="that the limits over all runs may have changed since the launch",
        patches=((Controller, "_read_limits", _nothing),),
        found_by=f"{MOVING}limits_of_all_runs_come_from_the_current_configuration",
    ),
    Fault(
        name="no_time_from_the_ledger",
        forgets="that the ledger has newer times than this machine's clock",
        patches=((run_process, "newest_ms", lambda session, run: 0),),
        found_by=f"{TIME}a_controller_with_a_late_clock_continues_from_the_ledgers_newest_time",
    ),
    Fault(
        name="every_time_is_believed",
        forgets="that clocks of clouds and nodes may be wrong",
        patches=((node_events, "_plausible_ms", lambda earliest_ms, reported_ms, now_ms: reported_ms),),
        found_by=f"{TIME}a_fact_with_a_far_wrong_time_ends_no_run",
    ),
    Fault(
        name="no_longest_life",
        forgets="that an order may come from a controller that forgot what was spent",
        patches=((TimeLeft, "_node_order", _no_longest),),
        found_by="tests/engine/test_spend_deadline.py::test_no_order_extends_a_node_beyond_the_longest_affordable_life",
    ),
    Fault(
        name="own_limit_only_in_deadlines",
        forgets="limits over all runs in the spend deadline of a node",
        patches=((SpendDeadlines, "deadline_ms", _own_limit_only),),
        found_by=f"{MOVING}nodes_without_a_controller_end_within_the_limit_of_all_runs",
    ),
    Fault(
        name="no_reserve_of_others",
        forgets="what other runs hold in reserve",
        patches=((facts_reader, "reserved_micro_usd", lambda nodes, allowance_ms, now_ms: 0),),
        found_by=f"{MOVING}reserves_of_other_runs_count_against_the_limit_of_all_runs",
    ),
    Fault(
        name="deadline_by_the_plan_only",
        forgets="nodes that are dearer than planned in the spend deadline",
        patches=((spend_deadlines, "planned_hourly", _plan_only),),
        found_by=f"{MOVING}a_spend_deadline_comes_earlier_if_a_node_costs_more_than_planned",
    ),
    Fault(
        name="deadline_never_brought_forward",
        forgets="to send nodes an earlier spend deadline",
        patches=((SpendDeadlines, "send", _only_later),),
        found_by=f"{MOVING}a_spend_deadline_comes_earlier_if_a_node_costs_more_than_planned",
    ),
    Fault(
        name="compaction_multiplies_what_judges_spent",
        forgets="that the sum of all workers is written once",
        patches=(
            (
                JudgeAccount,
                "records",
                changed(JudgeAccount.records, "micro_usd=spent)\n        spent = 0", "micro_usd=spent)"),
            ),
        ),
        found_by="tests/engine/test_judge_money.py::test_the_spend_of_several_workers_counts_once_after_a_compaction",
    ),
    Fault(
        name="turns_of_several_askers_fall_together",
        forgets="that a turn may be taken already",
        patches=((JudgeTurns, "take", changed(JudgeTurns.take, "turn + gap_seconds", "now + gap_seconds")),),
        found_by=f"{TURNS}requests_of_all_workers_are_evenly_spaced_and_unused_turns_are_not_saved",
    ),
    Fault(
        name="all_judges_have_the_turns_of_one",
        forgets="that each judge has a limit of its own",
        patches=(
            (
                JudgeTurns,
                "take",
                changed(
                    JudgeTurns.take,
                    "self._next[judge] = turn",
                    "self._next = dict.fromkeys([*self._next, judge], turn + gap_seconds); _ = turn",
                ),
            ),
        ),
        found_by=f"{TURNS}each_judge_has_turns_of_its_own_that_all_askers_share",
    ),
    Fault(
        name="judges_start_beside_money_that_is_held",
        forgets="what other runs hold, before the judges of a run start",
        patches=(
            everywhere(
                run_budget.judges_refusal,
                changed(run_budget.judges_refusal, "others.metered + others.reserved <=", "others.metered <="),
            ),
        ),
        found_by=f"{JUDGES}judges_start_only_beside_what_other_runs_spent_and_hold[60-21-False]",
    ),
    Fault(
        name="judges_of_a_resumed_run_are_not_checked",
        forgets="that other runs no longer set the judges' budget aside once a run has ended",
        patches=(
            everywhere(
                run_budget.judges_refusal,
                changed(
                    run_budget.judges_refusal,
                    "any(node.requested_ms >= facts.planned_ms for node in facts.nodes)",
                    "bool(facts.nodes)",
                ),
            ),
        ),
        found_by=f"{JUDGES}judges_start_only_beside_what_other_runs_spent_and_hold[60-21-False]",
    ),
    Fault(
        name="a_purchase_takes_the_money_of_stuck_nodes",
        forgets="that a node which the cloud does not end is still paid",
        patches=(
            everywhere(
                run_budget.budget_refusal,
                changed(run_budget.budget_refusal, " + stuck_micro_usd(facts, wanted)", ""),
            ),
        ),
        found_by=f"{BUDGET}a_purchase_fits_beside_all_that_is_spent_held_and_stuck",
    ),
    Fault(
        name="a_purchase_takes_the_money_that_others_hold",
        forgets="what other runs hold, when it buys a node",
        patches=(
            everywhere(
                run_budget.budget_refusal,
                changed(run_budget.budget_refusal, "reserved=held + facts.others.reserved", "reserved=held"),
            ),
        ),
        found_by=f"{BUDGET}a_purchase_fits_beside_all_that_other_runs_spent_and_hold",
    ),
    Fault(
        name="a_long_launch_holds_its_minimum",
        forgets="that a launch may be billed from its request on",
        patches=(
            everywhere(
                run_budget.reserve_of,
                changed(run_budget.reserve_of, "max(node.reserved_micro_usd,", "min(node.reserved_micro_usd,"),
            ),
        ),
        found_by=f"{BUDGET}nodes_hold_the_time_of_a_stop_and_a_launch_what_it_may_be_billed",
    ),
    Fault(
        name="a_leaving_node_costs_nothing",
        forgets="that a node is billed until its end",
        patches=(
            everywhere(
                run_budget.hourly_micro_usd,
                changed(run_budget.hourly_micro_usd, "node.is_live", "node.is_live and not node.is_leaving"),
            ),
        ),
        found_by=f"{BUDGET}every_node_without_an_end_costs_its_hour",
    ),
    Fault(
        name="a_stuck_node_ends_by_what_is_spent_now",
        forgets="that a node which cannot be ended keeps the spend deadline of its order",
        patches=(
            everywhere(
                run_budget.stuck_micro_usd,
                changed(
                    run_budget.stuck_micro_usd,
                    "facts.metered_when_ordered,",
                    "dict.fromkeys(facts.metered_when_ordered, facts.metered),",
                ),
            ),
        ),
        found_by=f"{BUDGET}a_node_that_does_not_end_holds_its_cost_until_the_spend_deadline_of_its_order",
    ),
    Fault(
        name="further_trainer_nodes_are_bound_as_rollout_nodes",
        forgets="that every node of the trainer costs the trainer's price",
        patches=(
            everywhere(
                run_budget._most_hourly,
                changed(
                    run_budget._most_hourly,
                    'site.rollout if role == "rollout" else site.trainer',
                    'site.trainer if role == "trainer" else site.rollout',
                ),
            ),
        ),
        found_by=f"{BUDGET}every_node_of_a_trainer_counts_at_the_trainers_price_in_the_bound",
    ),
    Fault(
        name="a_late_bill_makes_newer_holds_unknown",
        forgets="that bills may come in another order than their holds",
        patches=(
            (
                JudgeAccount,
                "apply",
                changed(JudgeAccount.apply, "max(number, self._billed.get(record.worker, number))", "number"),
            ),
        ),
        found_by="tests/engine/test_judge_money.py::"
        "test_a_late_bill_of_an_earlier_process_leaves_the_newer_holds_known",
    ),
    Fault(
        name="money_of_the_next_process_is_spent",
        forgets="that only money of the process that died is lost",
        patches=(
            (
                JudgeAccount,
                "of_worker",
                changed(JudgeAccount.of_worker, "hold[1] < before_boot", "hold[1] <= before_boot"),
            ),
        ),
        found_by="tests/engine/test_judge_money.py::"
        "test_a_late_word_of_an_old_process_leaves_the_money_of_the_next_held",
    ),
    Fault(
        name="money_of_the_tenth_node_is_lost_with_the_first",
        forgets="that a node's name may begin with another's",
        patches=((JudgeDesk, "lost", changed(JudgeDesk.lost, "node_of(hold[0]) == node", "hold[0].startswith(node)")),),
        found_by="tests/engine/test_judge_money.py::test_money_on_a_lost_node_is_spent_and_nobody_waits_for_it",
    ),
    Fault(
        name="removed_while_it_costs",
        forgets="to look for nodes without an end before it deletes a run's files",
        patches=((removal, "still_running", lambda sessions, run_name: []),),
        found_by=f"{REMOVAL}a_run_with_a_node_that_has_no_end_on_record_is_refused",
    ),
    Fault(
        name="removed_beside_a_controller",
        forgets="that a controller may still write to the folder that is deleted",
        patches=((removal, "is_held", lambda lease: False),),
        found_by=f"{REMOVAL}a_run_whose_controller_still_writes_is_refused",
    ),
    Fault(
        name="resumed_in_half_a_folder",
        forgets="that the files of a run may have been deleted",
        patches=((runs, "check_kept", _nothing),),
        found_by=f"{REMOVAL}an_interrupted_removal_is_finished_by_the_next",
    ),
    Fault(
        name="a_kept_plan_is_bought_at_any_price",
        forgets="that prices may move only within the figures that a dry run showed",
        patches=((kept_plan, "_beyond_bounds", lambda kept, plan: iter(())),),
        found_by="tests/launcher/test_kept_plan.py::test_prices_may_move_within_the_figures_that_were_shown",
    ),
    Fault(
        name="a_changed_job_is_bought_under_its_old_plan",
        forgets="to compare the job with that of the plan's file",
        patches=(everywhere(kept_plan.job_changes, lambda kept, checked: []),),
        found_by="tests/launcher/test_kept_plan.py::"
        "test_every_changed_field_of_the_job_is_named_and_nothing_is_started",
    ),
    Fault(
        name="a_second_ctrl_c_stops_the_run",
        forgets="that a habit must not end a run of days",
        patches=(
            everywhere(
                follow.interrupted,
                changed(
                    follow.interrupted,
                    '(click.Abort, KeyboardInterrupt):\n                choice = "keep"',
                    '(click.Abort, KeyboardInterrupt):\n                choice = "down"',
                ),
            ),
        ),
        found_by="tests/launcher/test_cli.py::test_at_a_terminal_ctrl_c_asks_and_only_an_s_stops",
    ),
    Fault(
        name="a_kept_node_costs_nothing",
        forgets="that the VM of a failed node is paid while it is kept",
        patches=(
            everywhere(
                run_budget.budget_refusal, changed(run_budget.budget_refusal, "[*after, *facts.kept]", "[*after]")
            ),
        ),
        found_by="tests/launcher/cluster/test_kept_nodes.py::test_a_kept_node_ends_if_its_successor_needs_its_money",
    ),
    Fault(
        name="a_point_may_cost_anything",
        forgets="that a run may be told to end when +.01 of score costs too much",
        patches=((stopping, "_point_is_too_dear", _nothing),),
        found_by="tests/launcher/cluster/test_reconcile.py::test_a_run_whose_point_costs_too_much_finishes",
    ),
    Fault(
        name="noise_ends_a_run",
        forgets="that a score rises by chance and then stays for a while: it needs the forecast too",
        patches=((point_cost, "slope_of", lambda points: point_cost.Slope(per_micro_usd=0.0, error=0.0)),),
        found_by="tests/launcher/test_point_cost.py::test_noise_ends_no_run_whose_points_cost_half_the_limit",
    ),
    Fault(
        name="one_dear_evaluation_ends_a_run",
        forgets="that a point must cost too much at several evaluations in a row",
        patches=((point_cost, "IN_A_ROW", 1),),
        found_by="tests/launcher/test_point_cost.py::test_a_run_ends_at_the_third_evaluation_in_a_row_above_the_limit",
    ),
    Fault(
        name="every_failed_node_is_kept",
        forgets="that one failed node is kept at a time",
        patches=((AgentWatch, "_keep", changed(AgentWatch._keep, "any(peer", "all(peer")),),
        found_by="tests/launcher/cluster/test_sky_provisioner.py::test_one_failed_node_is_kept_at_a_time",
    ),
    Fault(
        name="the_end_of_a_run_waits_for_its_buckets",
        forgets="that a bucket may not answer, while the run's lease is held",
        patches=((BucketSizes, "begin", changed(BucketSizes.begin, "self._thread.start()", "self._thread.run()")),),
        found_by="tests/launcher/cluster/test_bucket_sizes.py::test_a_silent_bucket_does_not_delay_the_end_of_a_run",
    ),
    Fault(
        name="a_silent_bucket_holds_nothing",
        forgets="that a folder without an answer is not empty",
        patches=((_Listing, "end", changed(_Listing.end, "bytes=self._bytes", "bytes=self._bytes or 0")),),
        found_by="tests/launcher/cluster/test_folder_sizes.py::test_a_folder_that_cannot_be_listed_is_unknown",
    ),
    Fault(
        name="a_silent_bucket_erases_its_count",
        forgets="that the earlier count of a folder still says more than no answer",
        patches=(
            everywhere(
                removal.count_buckets,
                changed(removal.count_buckets, " if size.bytes is not None or before[size.url].bytes is None]", "]"),
            ),
        ),
        found_by="tests/launcher/test_left_in_buckets.py::test_rm_keeps_an_earlier_count_if_the_bucket_does_not_answer",
    ),
)

FAULTS = {fault.name: fault for fault in _ALL}

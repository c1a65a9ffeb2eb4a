"""Planted bugs of purchases, zones and limits, and of the blame for a preempted node."""

from collections.abc import Iterable, Sequence
from typing import Any

from engine.queue.queue import Queue
from launcher.checks import quotas
from launcher.decide import (
    budget_guard,
    failover,
    further_nodes,
    giving_back,
    launch_history,
    moving,
    placing,
    promotion,
    reconcile,
    replacing,
    run_budget,
    waiting,
)
from launcher.market import hazard
from launcher.placement import plan_cloud, requirements
from launcher.placement.requirements import Site
from launcher.replay.world import World
from tests.mutants.faults import Fault
from tests.mutants.planted_bug import changed, everywhere

DECISIONS = "tests/launcher/cluster/test_reconcile.py"
PLACES = "tests/launcher/test_moves.py"
QUEUE = "tests/engine/test_queue.py"
NODES = "tests/launcher/test_trainer_nodes_plan.py"
FURTHER = "tests/launcher/cluster/test_further_nodes.py"
SLOTS = "tests/launcher/cluster/test_trainer_slots.py"
GIVING = "tests/launcher/cluster/test_giving_back.py"
WAITING = "tests/launcher/replay/test_waiting.py"
WHOLE = "tests/launcher/cluster/test_whole_trainer.py"
PLACING = "tests/launcher/cluster/test_placing.py"
PROMOTION = "tests/launcher/cluster/test_promotion.py"
CUT_OFF = "test_a_trainer_that_its_bucket_does_not_answer_gives_its_role_to_a_node_that_is_up"

_cooled_until_ms, _next_trainer = launch_history.cooled_until_ms, failover.next_trainer
_needs_successor, _refusal = replacing.needs_successor, run_budget.budget_refusal


def never_given_back(*_: Any) -> list[Any]:
    return []


def every_refusal(answers: Iterable[tuple[int, int]], within_ms: int = 0) -> int:
    return len(list(answers))


def two_hours_at_most(refused: Sequence[Any], first_ms: int, longest_ms: int = 0) -> int:
    return _cooled_until_ms(refused, first_ms, 7_200_000)


def never_full(*_: Any) -> bool:
    return False


def whatever_trainer_leaves(slot: Any, latest: Any, held: Sequence[Any], facts: Any) -> bool:
    if slot.role == "trainer" and latest.ended_ms is None:
        return bool(latest.is_leaving)
    return _needs_successor(slot, latest, held, facts)


def trainer_forgotten(tried: launch_history.Tried, *rest: Any) -> failover.Move:
    tried.trainer = None
    return _next_trainer(tried, *rest)


def each_sees_the_whole_limit(facts: Any, wanted: Any, after: Sequence[Any], rate: int, reserve: int) -> Any:
    return _refusal(facts, wanted, [node for node in after if node in facts.nodes], rate, reserve)


def without_pending(micro_usd_per_hour: int, allowance_ms: int, pending: Iterable[int] = ()) -> int:
    return budget_guard.worst_case(micro_usd_per_hour, allowance_ms)


def nothing_beside(*_: Any) -> int:
    return 0


def blamed_when_it_comes_back(self: Queue, node: str, reason: str, *, now_ms: int) -> None:
    self.state.revoke(self.state.leases.of_node(node), node, reason, now_ms)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            name="stand-in-never-given-back",
            forgets="that a stand-in ends when its spot node works",
            patches=((giving_back, "_given_back", never_given_back),),
            found_by=f"{DECISIONS}::test_a_stand_in_works_until_its_spot_node_has_settled",
        ),
        Fault(
            name="slot-goes-back-and-forth",
            forgets="that a slot gives a stand-in back once in half an hour at most",
            patches=((replacing, "GIVE_BACK_GAP_MS", 0),),
            found_by=f"{DECISIONS}::test_after_a_give_back_the_next_stand_in_is_kept_for_half_an_hour",
        ),
        Fault(
            name="spot-node-goes-before-the-stand-in",
            forgets="that a stand-in is the dearer one of the two past the hourly limit",
            patches=(
                (
                    giving_back,
                    "nodes_above_hourly_limit",
                    changed(
                        giving_back.nodes_above_hourly_limit,
                        "(node.market is Market.ON_DEMAND,",
                        "(node.market is Market.SPOT,",
                    ),
                ),
            ),
            found_by=f"{DECISIONS}::test_over_the_hourly_limit_a_stand_in_is_released_before_a_spot_node",
        ),
        Fault(
            name="zone-is-closed-for-two-hours",
            forgets="that capacity is back within minutes most times",
            patches=(everywhere(launch_history.cooled_until_ms, two_hours_at_most),),
            found_by=f"{PLACES}::test_no_zone_cools_down_for_longer_than_half_an_hour",
        ),
        Fault(
            name="odds-count-each-refusal",
            forgets="that refusals of one moment say one thing about the odds",
            patches=((hazard, "bursts", every_refusal),),
            found_by="tests/launcher/test_hazard.py::test_a_burst_of_refusals_lowers_the_odds_like_one_refusal",
        ),
        Fault(
            name="burst-counts-each-refusal",
            forgets="that refusals of one moment say one thing",
            patches=((launch_history, "bursts", every_refusal),),
            found_by=f"{PLACES}::test_a_burst_of_refusals_cools_a_zone_down_like_one_refusal",
        ),
        Fault(
            name="full-quota-is-a-denial",
            forgets="that nodes of ours use up the quota and will end",
            patches=((launch_history, "_holds", never_full),),
            found_by=f"{DECISIONS}::test_a_spot_node_preempted_at_a_tight_quota_is_requested_again",
        ),
        Fault(
            name="second-trainer-while-the-first-leaves",
            forgets="that a trainer that is leaving still writes checkpoints",
            patches=(
                everywhere(replacing.needs_successor, whatever_trainer_leaves),
                everywhere(failover.next_trainer, trainer_forgotten),
            ),
            found_by=f"{DECISIONS}::test_a_trainer_is_not_bought_while_its_predecessor_is_still_ending",
        ),
        Fault(
            name="each-purchase-sees-the-whole-hourly-limit",
            forgets="what the same pass has bought already",
            patches=(everywhere(run_budget.budget_refusal, each_sees_the_whole_limit),),
            found_by=f"{DECISIONS}::test_purchases_of_one_pass_share_the_hourly_limit",
        ),
        Fault(
            name="guard-without-pending-launches",
            forgets="what launches under way may bill",
            patches=((budget_guard, "reserved", without_pending),),
            found_by=f"{DECISIONS}::test_a_pending_launch_keeps_its_reserve_until_it_is_billed",
        ),
        Fault(
            name="guard-without-disks-and-addresses",
            forgets="what a node costs beside its instance",
            patches=(everywhere(run_budget.beside, nothing_beside),),
            found_by=f"{DECISIONS}::test_disks_and_addresses_count_against_the_hourly_limit",
        ),
        Fault(
            name="trainer-costs-one-node",
            forgets="that every node of the trainer is paid",
            patches=((Site, "trainer_micro_usd_per_hour", property(lambda site: site.trainer.micro_usd_per_hour)),),
            found_by=f"{NODES}::test_two_nodes_cost_twice_a_node_for_the_time_of_all_ranks",
        ),
        Fault(
            name="regions-by-the-price-of-one-trainer-node",
            forgets="that all nodes of the trainer together are within the hourly limit",
            patches=(
                (
                    plan_cloud,
                    "_site_options",
                    changed(
                        plan_cloud._site_options, "site.trainer_micro_usd_per_hour", "site.trainer.micro_usd_per_hour"
                    ),
                ),
            ),
            found_by=f"{NODES}::test_regions_whose_nodes_are_together_above_the_limit_are_no_site",
        ),
        Fault(
            name="each-trainer-node-has-all-ranks",
            forgets="that the nodes of the trainer share the ranks",
            patches=((requirements, "ranks_of_each_node", lambda ranks, nodes: ranks),),
            found_by=f"{NODES}::test_a_job_looks_for_nodes_with_as_many_gpus_as_each_has_ranks",
        ),
        Fault(
            name="quotas-of-one-trainer-node",
            forgets="that every node of the trainer uses up the quota",
            patches=(
                (quotas, "quotas", changed(quotas.quotas, "trainers = len(plan.slots) - rollouts", "trainers = 1")),
            ),
            found_by=f"{NODES}::test_a_quota_for_one_node_of_two_starts_no_trainer",
        ),
        Fault(
            name="replayed-trainer-works-with-a-node-missing",
            forgets="that a trainer trains only while all of its nodes work",
            patches=((World, "_work", changed(World._work, "len(trainer) < self.trainer_nodes", "not trainer")),),
            found_by=f"{NODES}::test_a_replayed_trainer_works_only_while_all_of_its_nodes_work",
        ),
        Fault(
            name="incomplete-trainer-kept",
            forgets="that a trainer with a missing node costs money and trains nothing",
            patches=((further_nodes, "LACKING_MS", 3_600_000),),
            found_by=f"{WHOLE}::test_a_trainer_that_is_not_whole_is_given_back_within_minutes_and_bought_elsewhere",
        ),
        Fault(
            name="incomplete-trainer-is-no-refusal",
            forgets="that a zone with room for some nodes of the trainer is asked less often",
            patches=((replacing, "INCOMPLETE", "never recorded"),),
            found_by=f"{WHOLE}::test_a_trainer_that_is_not_whole_is_given_back_within_minutes_and_bought_elsewhere",
        ),
        Fault(
            name="whole-trainer-counts-as-refused",
            forgets="that a trainer that was whole shows capacity in its region",
            patches=((further_nodes, "_was_beside", lambda *_: False),),
            found_by=f"{WHOLE}::test_a_whole_trainer_whose_zone_lacks_a_successor_moves_within_its_region",
        ),
        Fault(
            name="further-node-in-any-zone",
            forgets="that all nodes of a trainer are in the zone of the first",
            patches=(
                (
                    further_nodes,
                    "offer_beside",
                    changed(further_nodes.offer_beside, "zone=near.zone", "zone=near.wanted.placement.zone[:-1] + 'a'"),
                ),
            ),
            found_by=f"{WHOLE}::test_the_further_node_is_bought_in_the_real_zone_of_the_first_and_rollouts_after_it",
        ),
        Fault(
            name="further-node-beside-a-leaving-trainer",
            forgets="that a leaving node of the trainer may still write checkpoints",
            patches=(
                everywhere(
                    further_nodes.next_trainer_node,
                    changed(further_nodes.next_trainer_node, "node.is_leaving for node", "False for node"),
                ),
            ),
            found_by=f"{FURTHER}::test_no_further_node_is_bought_while_a_node_of_the_trainer_is_leaving",
        ),
        Fault(
            name="old-refusals-count-against-a-new-trainer",
            forgets="that a zone which refused an earlier trainer may have room now",
            patches=(
                (
                    further_nodes,
                    "_refusals",
                    changed(further_nodes._refusals, " and one.requested_ms >= since_ms", ""),
                ),
            ),
            found_by=f"{FURTHER}::test_refusals_from_before_this_trainer_neither_delay_nor_give_back_a_node",
        ),
        Fault(
            name="trainer-in-two-zones-is-kept",
            forgets="that the nodes of a trainer are in one zone",
            patches=(everywhere(further_nodes.nodes_in_other_zones, never_given_back),),
            found_by=f"{FURTHER}::test_further_nodes_outside_the_zone_of_the_first_are_given_back",
        ),
        Fault(
            name="zone-of-the-oldest-further-node",
            forgets="that the zone of the first node counts, even if it is the newer one",
            patches=(
                everywhere(
                    further_nodes.offer_beside,
                    changed(
                        further_nodes.offer_beside, '(node.role == "ranks", node.requested_ms', "(node.requested_ms"
                    ),
                ),
            ),
            found_by=f"{FURTHER}::test_the_zone_of_the_first_node_counts_even_if_a_further_node_is_older",
        ),
        Fault(
            name="stand-in-that-does-not-pay",
            forgets="that a stand-in may cost more than waiting, even if the money for waiting is used up",
            patches=(
                everywhere(
                    waiting.why_stand_in,
                    changed(waiting.why_stand_in, " and pays_on_demand(work, working, prices)", ""),
                ),
            ),
            found_by=f"{WAITING}::test_used_up_money_buys_a_stand_in_only_if_the_stand_in_pays",
        ),
        Fault(
            name="a-dear-stand-in-counts-as-on-demand",
            forgets="the price of the stand-in itself",
            patches=(
                everywhere(
                    waiting.why_stand_in, changed(waiting.why_stand_in, "seen, prices, price)", "seen, prices)")
                ),
            ),
            found_by=f"{WAITING}::test_a_long_outage_or_a_low_price_buys_a_stand_in",
        ),
        Fault(
            name="a-leaving-spot-node-has-settled",
            forgets="that a spot node which leaves replaces no stand-in",
            patches=(
                everywhere(giving_back._has_settled, changed(giving_back._has_settled, " or node.is_leaving", "")),
            ),
            found_by=f"{GIVING}::test_a_stand_in_goes_once_a_spot_node_of_its_slot_has_settled_and_stays[under notice]",
        ),
        Fault(
            name="all-stand-ins-go-for-the-hourly-limit",
            forgets="that one stand-in is enough to free the money for a spot node",
            patches=(
                everywhere(
                    giving_back._given_back,
                    changed(
                        giving_back._given_back,
                        "return [stand_in]\n    return []",
                        "given_back += [stand_in]\n    return given_back",
                    ),
                ),
            ),
            found_by=f"{GIVING}::test_under_a_tight_hourly_limit_one_stand_in_goes_at_a_time",
        ),
        Fault(
            name="a-second-stand-in-goes-while-one-leaves",
            forgets="that a leaving stand-in frees the money already",
            patches=(
                everywhere(
                    giving_back._given_back,
                    changed(giving_back._given_back, "given_back or frees_budget or", "given_back or"),
                ),
            ),
            found_by=f"{GIVING}::test_no_stand_in_goes_for_the_limit_while_money_or_a_spot_node_is_on_its_way",
        ),
        Fault(
            name="the-dearest-node-stays",
            forgets="that the dearest nodes go first",
            patches=(
                everywhere(
                    giving_back.nodes_above_hourly_limit,
                    changed(giving_back.nodes_above_hourly_limit, "sheddable.pop()", "sheddable.pop(0)"),
                ),
            ),
            found_by=f"{GIVING}::test_above_the_hourly_limit_the_dearest_go_and_never_the_trainer",
        ),
        Fault(
            name="a-trainer-is-given-back-in-part",
            forgets="that a trainer without all of its nodes trains nothing",
            patches=(
                everywhere(
                    further_nodes.given_back_trainer,
                    changed(further_nodes.given_back_trainer, "for node in trainer)", "for node in trainer[:1])"),
                ),
            ),
            found_by=f"{FURTHER}::test_a_trainer_is_given_back_whole_for_refusals_of_its_own_nodes",
        ),
        Fault(
            name="a-requested-first-node-has-a-zone",
            forgets="that a cloud may put a node into another zone than the one asked for",
            patches=(
                everywhere(
                    further_nodes.offer_beside,
                    changed(further_nodes.offer_beside, 'node.role == "ranks" or "up" in node.happened', "True"),
                ),
            ),
            found_by=f"{FURTHER}::test_a_further_node_is_bought_as_the_first_really_is_and_waits_for_its_zone",
        ),
        Fault(
            name="rollouts-beside-an-incomplete-trainer",
            forgets="that rollout nodes work for a whole trainer only",
            patches=((placing, "missing_trainer_slots", lambda *_: []),),
            found_by=f"{WHOLE}::test_the_further_node_is_bought_in_the_real_zone_of_the_first_and_rollouts_after_it",
        ),
        Fault(
            name="preempted-node-blames-its-requests",
            forgets="that the cloud ended the worker, not what it worked on",
            patches=((Queue, "unreachable", blamed_when_it_comes_back),),
            found_by=f"{QUEUE}::test_a_request_is_not_blamed_for_a_node_that_was_lost_and_comes_back",
        ),
        Fault(
            name="each-trainer-node-has-the-whole-hourly-limit",
            forgets="that all nodes of the trainer together are within the hourly limit",
            patches=(everywhere(placing.place_of, changed(placing.place_of, "limit // trainer_nodes", "limit")),),
            found_by=f"{PLACING}::test_each_node_of_a_trainer_has_its_part_of_the_hourly_limit[2]",
        ),
        Fault(
            name="nodes-of-the-trainer-count-as-rollout-nodes",
            forgets="that only rollout nodes are spread over the zones",
            patches=(
                everywhere(
                    placing.place_of,
                    changed(placing.place_of, 'sum(slot.role == "rollout" for', 'sum(slot.role != "trainer" for'),
                ),
            ),
            found_by=f"{PLACING}::test_at_most_half_of_the_rollout_nodes_are_in_a_zone",
        ),
        Fault(
            name="a-stand-in-goes-before-a-tight-deadline",
            forgets="that spot may be preempted once more",
            patches=(
                everywhere(placing.place_of, changed(placing.place_of, "not may_risk_spot(facts, wanted)", "False")),
            ),
            found_by=f"{PLACING}::test_a_stand_in_is_kept_if_the_deadline_bears_no_preemption",
        ),
        Fault(
            name="purchases-of-a-pass-are-no-trainer",
            forgets="what the same pass has bought already, when it looks for the nodes of the trainer",
            patches=(
                everywhere(
                    placing.place_of,
                    changed(
                        placing.place_of,
                        "missing_trainer_slots(wanted, after)",
                        "missing_trainer_slots(wanted, facts.nodes)",
                    ),
                ),
            ),
            found_by=f"{PLACING}::test_rollout_nodes_come_after_every_node_of_the_trainer",
        ),
        Fault(
            name="waiting-idles-one-node-of-the-trainer",
            forgets="that every node of the trainer waits for spot",
            patches=(
                everywhere(
                    placing._why_stand_in,
                    changed(placing._why_stand_in, "trainer=number_of_trainer_nodes(wanted) * (", "trainer=("),
                ),
            ),
            found_by=f"{PLACING}::test_a_stand_in_is_bought_up_to_the_price_that_waiting_costs",
        ),
        Fault(
            name="a-leaving-node-counts-as-working",
            forgets="that a node under notice will not work",
            patches=(everywhere(placing._why_stand_in, changed(placing._why_stand_in, " and stays(node)", "")),),
            found_by=f"{PLACING}::test_a_stand_in_is_bought_up_to_the_price_that_waiting_costs",
        ),
        Fault(
            name="a-missing-trainer-node-is-asked-for-after-ten-minutes",
            forgets="that the other nodes of the trainer are idle and paid meanwhile",
            patches=(
                everywhere(
                    further_nodes.next_trainer_node,
                    changed(further_nodes.next_trainer_node, "AGAIN_MS, rules", "rules.cool_down_ms, rules"),
                ),
            ),
            found_by=f"{FURTHER}::test_a_refused_node_is_asked_for_again_soon_and_never_later_than_after_the_cool_down",
        ),
        Fault(
            name="a-trainer-waits-for-money-that-is-gone",
            forgets="that a trainer which never can be whole again trains nothing",
            patches=(
                everywhere(
                    reconcile._fill,
                    changed(
                        reconcile._fill,
                        'slot.role != "rollout" and refusal.for_good',
                        'slot.role == "trainer" and refusal.for_good',
                    ),
                ),
            ),
            found_by=f"{SLOTS}::test_a_run_ends_if_its_money_will_never_bear_a_lost_node_of_the_trainer_again",
        ),
        Fault(
            name="part-of-a-trainer-is-kept-without-money",
            forgets="the further nodes, when the money for one more went to other runs",
            patches=(
                everywhere(
                    reconcile._fill,
                    changed(
                        reconcile._fill,
                        'node.role != "rollout" and stays(node)',
                        'node.role == "trainer" and stays(node)',
                    ),
                ),
            ),
            found_by=f"{FURTHER}::"
            "test_all_nodes_of_the_trainer_are_given_back_if_the_money_for_the_missing_one_went_to_other_runs",
        ),
        Fault(
            name="a-whole-trainer-at-the-prices-of-the-plan",
            forgets="that prices may have risen since the plan",
            patches=(everywhere(reconcile._fill, changed(reconcile._fill, "*(rate if facts.sites else one", "*(one")),),
            found_by=f"{FURTHER}::test_the_money_for_a_whole_trainer_is_counted_at_the_prices_of_now",
        ),
        Fault(
            name="two-nodes-in-a-slot-of-the-trainer",
            forgets="that a leaving rank may still be in the trainer's group",
            patches=(
                everywhere(
                    replacing.needs_successor,
                    changed(
                        replacing.needs_successor,
                        'slot.role != "rollout" and any(node.is_live',
                        'slot.role == "trainer" and any(node.is_live',
                    ),
                ),
            ),
            found_by=f"{SLOTS}::test_a_node_of_the_trainer_has_no_successor_before_it_has_ended[releasing]",
        ),
        Fault(
            name="a-trainer-is-refused-before-it-has-ended",
            forgets="that the nodes of a trainer that is given back still run",
            patches=(
                everywhere(
                    replacing.attempt_of,
                    changed(replacing.attempt_of, "not node.is_live and INCOMPLETE", "INCOMPLETE"),
                ),
            ),
            found_by=f"{FURTHER}::"
            "test_a_node_of_a_trainer_that_never_was_whole_is_refused_once_it_has_ended[incomplete-live-True]",
        ),
        Fault(
            name="denials-of-further-nodes-are-not-told",
            forgets="why no trainer can be had, if the first node could be",
            patches=(
                (
                    launch_history.Tried,
                    "denials",
                    changed(
                        launch_history.Tried.denials,
                        'if (one.role == "rollout") is (role == "rollout")',
                        "if one.role == role",
                    ),
                ),
            ),
            found_by=f"{FURTHER}::test_the_denial_of_a_further_node_is_the_reason_why_no_trainer_can_be_had",
        ),
        Fault(
            name="a-trainer-asked-for-elsewhere-is-given-back",
            forgets="that the run has a trainer again, when it gives its home region up",
            patches=(
                everywhere(
                    failover.is_home_given_up,
                    changed(failover.is_home_given_up, "tried.trainer is None and ", ""),
                ),
            ),
            found_by=f"{GIVING}::test_without_a_trainer_in_sight_all_nodes_go_and_a_starting_trainer_stays",
        ),
        Fault(
            name="each-refusal-keeps-idle-nodes-for-longer",
            forgets="since when no trainer has been in sight",
            patches=(
                everywhere(
                    failover.no_trainer_since_ms,
                    changed(failover.no_trainer_since_ms, "tried.trainers_failed[0]", "tried.trainers_failed[-1]"),
                ),
            ),
            found_by=f"{GIVING}::test_without_a_trainer_in_sight_all_nodes_go_and_a_starting_trainer_stays",
        ),
        Fault(
            name="a-long-boot-settles-a-spot-node",
            forgets="that capacity is known from the moment at which a node is up",
            patches=(
                everywhere(
                    giving_back._has_settled,
                    changed(giving_back._has_settled, 'node.happened["up"]', "node.requested_ms"),
                ),
            ),
            found_by=f"{GIVING}::"
            "test_a_stand_in_goes_once_a_spot_node_of_its_slot_has_settled_and_stays[booted for long]",
        ),
        Fault(
            name="planned-spot-is-a-stand-in",
            forgets="the price of the plan, when spot elsewhere is cheaper",
            patches=(
                everywhere(
                    replacing._is_dear,
                    changed(
                        replacing._is_dear,
                        "facts.work is None or node.micro_usd_per_hour <= DEAR * slot.placement.micro_usd_per_hour",
                        "facts.work is None",
                    ),
                ),
            ),
            found_by=f"{GIVING}::"
            "test_spot_is_a_stand_in_if_it_is_dear_against_the_plan_and_against_the_lowest_price[as planned]",
        ),
        Fault(
            name="on-demand-comes-before-every-pool-has-refused",
            forgets="that the wait for spot begins when the last pool lacks capacity",
            patches=(
                everywhere(
                    failover._of_market,
                    changed(failover._of_market, "max(firsts, default=0)", "min(firsts, default=0)"),
                ),
            ),
            found_by=f"{PLACES}::test_the_wait_for_spot_counts_from_the_moment_at_which_every_pool_had_refused",
        ),
        Fault(
            name="a-stand-in-is-replaced-where-spot-was-just-lost",
            forgets="that a pool which has just preempted a node is likely to do it again",
            patches=(
                everywhere(
                    failover.back_to_spot,
                    changed(
                        failover.back_to_spot,
                        "and now_ms >= tried.taken_until_ms(option, rules.cool_down_ms)",
                        "",
                    ),
                ),
            ),
            found_by=f"{PLACES}::test_a_stand_in_is_not_replaced_from_a_pool_that_has_just_preempted_a_node",
        ),
        Fault(
            name="a-run-moves-whatever-the-other-region-costs",
            forgets="the price of the rest of the run there",
            patches=(
                everywhere(
                    moving.options_elsewhere, changed(moving.options_elsewhere, "if stays <= goes:", "if False:")
                ),
            ),
            found_by=f"{PROMOTION}::test_a_move_that_does_not_pay_is_not_made[price]",
        ),
        Fault(
            name="a-run-moves-whatever-it-carries-along",
            forgets="the price of traffic",
            patches=(everywhere(moving.options_elsewhere, changed(moving.options_elsewhere, "+ traffic", "")),),
            found_by=f"{PROMOTION}::test_a_move_that_does_not_pay_is_not_made[traffic]",
        ),
        Fault(
            name="a-run-leaves-at-the-first-refusal",
            forgets="that an outage of minutes is waited out",
            patches=(
                everywhere(
                    moving.options_elsewhere,
                    changed(
                        moving.options_elsewhere, "facts.now_ms < since_ms + wanted.rules.trainer_wait_ms", "False"
                    ),
                ),
            ),
            found_by=f"{PROMOTION}::test_a_run_whose_region_has_no_spot_goes_where_spot_is_with_its_checkpoint",
        ),
        Fault(
            name="home-is-not-asked-before-a-move",
            forgets="that the newest refusal may be old",
            patches=(
                everywhere(
                    failover.next_elsewhere,
                    changed(failover.next_elsewhere, "now_ms > max(refused_ms.values()) + LAST_LOOK_MS", "False"),
                ),
            ),
            found_by=f"{PROMOTION}::test_a_move_that_does_not_pay_is_not_made[spot is back]",
        ),
        Fault(
            name="a-trainer-that-may-lack-a-node-is-given-back",
            forgets="that LoRA ranks train without one of them",
            patches=(
                everywhere(
                    further_nodes.trains_without,
                    changed(further_nodes.trains_without, "if not wanted.trainer_may_lack or", "if True or"),
                ),
            ),
            found_by=f"{WHOLE}::test_a_trainer_that_may_lack_a_node_stays_and_asks_for_it_again",
        ),
        Fault(
            name="a-trainer-that-never-was-whole-stays",
            forgets="that a place may never hold the whole trainer",
            patches=(
                everywhere(
                    further_nodes.trains_without,
                    changed(
                        further_nodes.trains_without,
                        "return all(_was_beside(slot, live, nodes) for slot in missing)",
                        "return True",
                    ),
                ),
            ),
            found_by=f"{WHOLE}::test_a_trainer_that_may_lack_a_node_is_bought_whole_at_first",
        ),
        Fault(
            name="trainer-released-although-the-bucket-answers-nobody",
            forgets="that another node would not reach the bucket either",
            patches=(
                (
                    reconcile,
                    "cut_off_trainer",
                    changed(promotion.cut_off_trainer, "not facts.store_answers", "False"),
                ),
            ),
            found_by=f"{PROMOTION}::{CUT_OFF}",
        ),
        Fault(
            name="trainer-released-again-and-again-for-its-bucket",
            forgets="that a second node without the bucket says that nodes are not at fault",
            patches=(
                (
                    reconcile,
                    "cut_off_trainer",
                    changed(promotion.cut_off_trainer, "> facts.advanced_ms for", "> facts.now_ms for"),
                ),
            ),
            found_by=f"{PROMOTION}::{CUT_OFF}",
        ),
        Fault(
            name="successor-released-for-the-wait-of-the-trainer-before-it",
            forgets="that another node began to wait",
            patches=(
                (
                    reconcile,
                    "cut_off_trainer",
                    changed(promotion.cut_off_trainer, "trains_since_ms > away_ms", "False"),
                ),
            ),
            found_by=f"{PROMOTION}::test_a_successor_is_not_released_for_the_wait_of_the_trainer_before_it",
        ),
        Fault(
            name="trainer-without-successor-released-for-its-bucket",
            forgets="that nobody can take the role of this trainer",
            patches=(
                (
                    reconcile,
                    "cut_off_trainer",
                    changed(promotion.cut_off_trainer, " or not _that_can_train(facts, wanted)", ""),
                ),
            ),
            found_by=f"{PROMOTION}::test_a_trainer_that_nobody_can_follow_waits_for_its_bucket",
        ),
    )
}

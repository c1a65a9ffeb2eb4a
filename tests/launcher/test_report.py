"""The report: result, cost and preemption cost of a run, with numbers checked by hand."""

import io
import json

import pytest
from rich.console import Console

from launcher.ledger.models import STAND_IN, NodeEvent
from launcher.report.build import build_report
from launcher.report.card import model_card
from launcher.report.comparison import compare_runs
from launcher.report.exploration import exploration_words
from launcher.report.result import result_dict
from launcher.report.sharing import Sharing, sharing_words
from launcher.report.terminal import print_report
from launcher.report.values import SCHEMA
from launcher.report.weights import Pulled
from launcher.report.words import drift_words, headline, stand_in_words
from tests.launcher.made_ledger import HOUR_MS, JOB, MINUTE_MS, START_MS, a_long_run, a_run, a_session
from tests.launcher.printed import printed


@pytest.fixture
def session():
    with a_session() as opened:
        yield opened


def a_climb(made, scores, every=HOUR_MS):
    for number, score in enumerate(scores):
        made.evaluated(number, score, number * every)


def test_dollars_and_hours_run_to_the_evaluation_that_confirmed_the_target(session):
    made = a_run(session)
    made.node("trainer", market="on_demand", rate=1_000_000, on_demand=1_000_000, up=0)
    a_climb(made, [0.5, 0.8, 0.8, 0.8, 0.8, 0.8, 0.9])
    report = build_report(session, made.run, START_MS + 8 * HOUR_MS)
    target = report.target
    assert (target.reached, target.confirmed.iteration, target.confirmed.hours) == (True, 5, 5.0)
    assert target.confirmed.micro_usd == 5_000_000
    assert target.first.iteration == 1
    assert headline(report) == "exact_match 0.8 was reached at iteration 5 for $5.00 in 5.00 h."
    assert (target.factors.iterations, target.factors.seconds_per_iteration) == (5, 3600.0)
    assert target.factors.micro_usd_per_hour == 1_000_000


def test_a_missed_target_is_stated_with_the_best_score(session):
    made = a_run(session)
    made.node("trainer", rate=1_000_000, up=0)
    a_climb(made, [0.3, 0.6, 0.6, 0.6, 0.5])
    report = build_report(session, made.run, START_MS + 5 * HOUR_MS)
    assert not report.target.reached
    assert headline(report) == "exact_match 0.8: not reached. Best so far 0.600 at iteration 3, after $3.00."
    lower = build_report(session, made.run, START_MS + 5 * HOUR_MS, target_reward=0.5)
    assert lower.target.confirmed.iteration == 4  # smoothed: .3 .45 .5 .6 .567; at or above .5 from iteration 2 on
    assert lower.target.value == 0.5


def a_guarded_run(session, drifts):
    target = {"metric": "exact_match", "value": 0.8, "evaluations": 3, "guards": [{"metric": "drift", "max": 0.05}]}
    made = a_run(session, job={**JOB, "target": target})
    for number, drift in enumerate(drifts):
        made.evaluated(number, 0.9, number * HOUR_MS, more={"drift": drift})
    return build_report(session, made.run, START_MS + 9 * HOUR_MS)


def test_the_target_is_reached_only_in_evaluations_in_which_the_guard_holds(session):
    report = a_guarded_run(session, [0.0, 0.01, 0.07, 0.02, 0.03, 0.05])
    assert report.target.confirmed.iteration == 5
    assert [(one.iteration, one.guards_hold) for one in report.drift if not one.guards_hold] == [(2, False)]
    assert drift_words(report) == (
        "Drift from the base model's images: 0.050 at iteration 5. Guard drift at most 0.05 holds."
    )


def test_a_violated_guard_is_reported_and_the_target_is_not_reached(session):
    report = a_guarded_run(session, [0.0, 0.06, 0.07, 0.08])
    assert not report.target.reached
    assert drift_words(report).endswith("Guard drift at most 0.05 does not hold.")


def test_without_drift_in_the_ledger_the_report_omits_it(session):
    made = a_run(session)
    made.evaluated(0, 0.9, 0)
    assert drift_words(build_report(session, made.run, START_MS + HOUR_MS)) == ""


def test_a_run_without_evaluations_has_a_report(session):
    report = build_report(session, a_run(session).run, START_MS)
    assert headline(report) == "exact_match 0.8: not reached; nothing has been evaluated yet."
    assert report.costs.total == 0
    json.dumps(report.to_dict(), allow_nan=False)


def test_rewards_count_once_and_dollars_always_when_a_step_is_redone(session):
    made = a_run(session, target=None)
    made.node("trainer", rate=1_000_000, up=0, end=4 * HOUR_MS)
    made.started(0, iteration=0, lineage=1)
    made.evaluated(0, 0.1, HOUR_MS, lineage=1)
    made.evaluated(3, 0.9, 2 * HOUR_MS, lineage=1)  # its checkpoint was lost with the node
    made.started(3 * HOUR_MS, iteration=2, lineage=2)
    made.evaluated(3, 0.2, 4 * HOUR_MS, lineage=2)
    report = build_report(session, made.run, START_MS + 4 * HOUR_MS)
    assert [(point.iteration, point.score, point.micro_usd) for point in report.curve] == [
        (0, 0.1, 1_000_000),
        (3, 0.2, 4_000_000),
    ]
    assert report.costs.total == 4_000_000
    assert report.run.lineages == 2


# --- preemptions --------------------------------------------------------------------------------------


def test_a_preemption_costs_the_successors_cold_start_and_the_lost_steps(session):
    made = a_run(session)
    taken = made.node("spot-0", rate=3_600_000, up=0, end=HOUR_MS, seen=0)
    made.node("spot-0", 2, rate=7_200_000, up=HOUR_MS + 5 * MINUTE_MS, seen=HOUR_MS + 15 * MINUTE_MS)
    made.preempted(taken, HOUR_MS, signal="SIGSTOP", lost_steps=30)
    # 100 steps of rollouts and 100 of exploration took 1,000,000 ms: 10 s of a node each.
    made.used(taken, 0, HOUR_MS, rollout=600_000, exploration=400_000)
    made.trained(0, HOUR_MS, explored=10)
    line = build_report(session, made.run, START_MS + 2 * HOUR_MS).preemptions[0]
    assert line.cold_start_micro_usd == 1_200_000  # 10 minutes at $7.20
    assert line.lost_work_micro_usd == 150_000  # 30 x 5 s at $3.60
    assert line.micro_usd == 1_350_000
    assert (line.replaced_after_s, line.replaced_after_wall_s) == (900.0, 15.0)
    assert (line.notice, line.signal, line.lost_steps) == (False, "SIGSTOP", 30)


def test_a_preemption_without_a_successor_is_marked(session):
    made = a_run(session)
    taken = made.node("spot-0", up=0, end=HOUR_MS, seen=0)
    made.preempted(taken, HOUR_MS, noticed=HOUR_MS - 2 * MINUTE_MS)
    line = build_report(session, made.run, START_MS + 2 * HOUR_MS).preemptions[0]
    assert line.notice
    assert (line.replaced_by, line.replaced_after_s, line.micro_usd) == (None, None, 0)


def test_each_preemption_pays_the_cold_start_of_its_own_successor(session):
    made = a_run(session)
    first = made.node("spot-0", 1, rate=3_600_000, up=0, end=HOUR_MS, seen=0)
    second = made.node("spot-0", 2, rate=3_600_000, up=HOUR_MS, end=HOUR_MS + 10 * MINUTE_MS)
    made.node("spot-0", 3)  # no capacity, so the node was never up
    made.node("spot-0", 4, rate=3_600_000, up=2 * HOUR_MS, seen=2 * HOUR_MS + 20 * MINUTE_MS)
    made.preempted(first, HOUR_MS)
    made.preempted(second, HOUR_MS + 10 * MINUTE_MS)
    report = build_report(session, made.run, START_MS + 3 * HOUR_MS)
    assert [line.cold_start_micro_usd for line in report.preemptions] == [600_000, 1_200_000]
    assert [line.replaced_after_s for line in report.preemptions] == [80 * 60.0, 70 * 60.0]
    assert report.costs.by_phase["cold_start"] == 1_800_000


def test_the_report_says_when_and_why_a_node_stood_in_for_spot(session):
    made = a_run(session)
    made.node("trainer", market="on_demand", rate=1_000_000, up=0)
    node = made.node("spot-0", 3, market="on_demand", rate=9_000_000, up=2 * HOUR_MS, end=3 * HOUR_MS, seen=2 * HOUR_MS)
    assert stand_in_words(build_report(session, made.run, START_MS + 4 * HOUR_MS)) == ""
    why = "behind: with every node at work the run would be 3m early, and preemptions may take 24m"
    session.add(NodeEvent(node_id=node.id, at_ms=START_MS + 2 * HOUR_MS, kind=STAND_IN, evidence=why))
    session.flush()
    report = build_report(session, made.run, START_MS + 4 * HOUR_MS)
    (line,) = report.stand_ins
    assert (line.node, line.hours, line.paid_hours, line.micro_usd) == (node.name, 2.0, 1.0, 9_000_000)
    assert stand_in_words(report) == f"1 node stood in for missing spot, $9.00: spot-0-g3 at 2.00 h ({why})."
    console = Console(file=io.StringIO(), width=200)
    print_report(report, console)
    assert why in console.file.getvalue()


def test_lost_work_is_never_dearer_than_the_node(session):
    made = a_run(session)
    taken = made.node("spot-0", rate=3_600_000, up=0, end=MINUTE_MS, seen=0)
    made.used(taken, 0, MINUTE_MS, rollout=MINUTE_MS)
    made.trained(0, MINUTE_MS)
    made.preempted(taken, MINUTE_MS, lost_steps=10**6)
    assert build_report(session, made.run, START_MS + HOUR_MS).preemptions[0].lost_work_micro_usd == 60_000


# --- savings ------------------------------------------------------------------------------------------


def test_the_price_effect_is_the_same_node_time_on_demand(session):
    made = a_run(session)
    made.node("spot-0", rate=3_000_000, on_demand=9_000_000, up=0, end=2 * HOUR_MS)
    effect = build_report(session, made.run, START_MS + 2 * HOUR_MS).price_effect
    assert (effect.paid_micro_usd, effect.on_demand_micro_usd) == (6_000_000, 18_000_000)
    assert effect.difference_micro_usd == 12_000_000


def test_the_counterfactual_is_labelled_and_omits_preemption_cold_starts(session):
    made = a_run(session)
    taken = made.node("spot-0", rate=3_000_000, on_demand=6_000_000, up=0, end=HOUR_MS, seen=30 * MINUTE_MS)
    made.node(
        "spot-0", 2, rate=3_000_000, on_demand=6_000_000, up=HOUR_MS, end=2 * HOUR_MS, seen=HOUR_MS + 10 * MINUTE_MS
    )
    made.preempted(taken, HOUR_MS)
    saving = build_report(session, made.run, START_MS + 2 * HOUR_MS).saved[0]
    assert saving.kind == "counterfactual"
    assert "all nodes on demand" in saving.against
    assert saving.micro_usd == 12_000_000 - 1_000_000  # two hours, less the second node's 10 minutes
    assert saving.saved_micro_usd == 11_000_000 - 6_000_000


def test_savings_against_a_run_compare_the_cost_to_the_same_target(session):
    ours, theirs = a_run(session, "ours"), a_run(session, "theirs", target=0.99)
    ours.node("trainer", rate=1_000_000, up=0)
    theirs.node("trainer", rate=3_000_000, up=0)
    a_climb(ours, [0.8, 0.8, 0.8])
    a_climb(theirs, [0.1, 0.8, 0.8, 0.8, 0.8, 0.8])
    saving = build_report(session, ours.run, START_MS + 9 * HOUR_MS, against=theirs.run).saved[0]
    assert (saving.kind, saving.against) == ("run", "theirs")
    assert saving.micro_usd == 15_000_000  # confirmed at iteration 5
    assert saving.saved_micro_usd == 13_000_000
    assert (saving.ours.iterations, saving.theirs.iterations) == (2, 5)


def test_a_run_that_missed_the_target_gives_no_savings(session):
    ours, theirs = a_run(session, "ours"), a_run(session, "theirs")
    a_climb(ours, [0.8, 0.8, 0.8])
    saving = build_report(session, ours.run, START_MS + HOUR_MS, against=theirs.run).saved[0]
    assert saving.saved_micro_usd is None
    assert saving.why == "exact_match 0.8 was not reached by theirs"


# --- sources of the numbers ---------------------------------------------------------------------------


def test_prices_have_a_source_and_the_age_they_had_when_they_were_used(session):
    made = a_run(session)
    made.node("trainer", up=0)
    made.node("spot-0", up=0, price_source="aws api")
    assert [
        (price.source, price.age_days, price.nodes) for price in build_report(session, made.run, START_MS).prices
    ] == [
        ("aws api", 5.33, 1),  # observed 2025-01-10 00:00, used 2025-01-15 08:00
        ("catalogs/aws.csv", 5.33, 1),
    ]


def test_the_report_names_the_run_and_whether_its_money_is_real(session):
    report = build_report(session, a_long_run(session), START_MS + 9 * HOUR_MS)
    assert report.run.seeds == (7,)
    assert (report.run.hours, report.run.wall_seconds, report.run.clock_factor) == (4.0, 240.0, 60.0)
    assert report.money_note == "assumed: priced as named offers, nothing was bought; prices of 2025-01-10"
    assert report.run.job_digest.startswith("sha256:")


@pytest.mark.parametrize(
    ("observed_at", "words"),
    [
        ("2024-10-17T09:00:00+00:00", "prices of 2024-10-17 to 2025-01-10"),
        ("2024-10-17T07:00:00+00:00", "prices of 2024-10-17 to 2025-01-10, older than 90 days"),
        ("snapshot 2024", "prices of snapshot 2024 and 2025-01-10, perhaps older than 90 days"),
    ],
)
def test_the_dollars_name_the_dates_of_their_prices_and_old_ones(session, observed_at, words):
    """The newest node is bought at 2025-01-15 08:00, which is 90 days after 2024-10-17 08:00."""
    made = a_run(session)
    made.node("trainer", up=0, end=HOUR_MS)
    made.node("spot-0", up=0, end=HOUR_MS).price_observed_at = observed_at
    report = build_report(session, made.run, START_MS + 300 * 24 * HOUR_MS)
    assert report.money_note == f"assumed: priced as named offers, nothing was bought; {words}"


def test_a_run_without_a_node_names_no_price(session):
    report = build_report(session, a_run(session).run, START_MS)
    assert report.money_note == "assumed: priced as named offers, nothing was bought"


def test_the_json_has_a_schema_version_and_only_plain_values(session):
    report = build_report(session, a_long_run(session), START_MS + 9 * HOUR_MS)
    read = printed("report", json.dumps(report.to_dict(), allow_nan=False))
    assert read["schema"] == SCHEMA == 1
    assert set(read) == {
        "schema", "run", "money_basis", "money_note", "target", "costs", "curve", "drift", "gains",
        "micro_usd_per_hundredth", "extras", "nodes", "preemptions", "exploration", "sharing", "price_effect", "saved",
        "prices", "pictures_before", "pictures_after", "start_ms", "end_ms", "notes", "learning", "pictures",
        "job_text", "scores", "schedule", "provenance", "stand_ins", "collectives", "trainer_time", "resume_with",
        "bill", "trainer_losses", "moves", "throughput", "point", "fleets", "left_in_buckets",
    }  # fmt: skip
    splits = [read["costs"][name] for name in ("by_role", "by_market", "by_place", "by_node", "by_phase")]
    assert [sum(split.values()) for split in splits] == [read["costs"]["total"]] * 5
    assert "secret-token" not in json.dumps(read)


def test_a_report_a_comparison_and_a_model_card_have_the_job_without_its_passwords(session):
    """A report is sent around, and a card is published beside the weights."""
    secret = "hunter2-hunter2"
    logging = {"mlflow": {"tracking_uri": f"https://me:{secret}@tracking/x"}}
    runs = [a_run(session, name, job={**JOB, "seed": number}).run for number, name in enumerate("ab")]
    runs[0].job = {**runs[0].job, "logging": logging}
    runs[0].job_yaml = f"logging: {logging}"
    report = build_report(session, runs[0], START_MS + 9 * HOUR_MS)
    assert report.job_text == "logging: {'mlflow': {'tracking_uri': 'https://***@tracking/x'}}"
    pulled = Pulled(checkpoint="i000001", iteration=1, files=())
    card = model_card(report, runs[0].job, pulled, "weights", has_diffusers_files=False)
    compared = json.dumps(compare_runs(session, runs).to_dict())
    for text in (card, compared):
        assert "https://***@tracking/x" in text
        assert secret not in text


def test_the_report_of_a_cloud_run_lists_side_costs_and_unpriced_items(session):
    made = a_run(session)
    made.run.infra = "aws,gcp"
    made.node("trainer", up=0, end=HOUR_MS, seen=MINUTE_MS, market="on_demand", rate=9_000_000)
    made.node("spot-0", up=0, end=10 * MINUTE_MS)
    elsewhere = made.node("spot-1", up=0, end=HOUR_MS, seen=MINUTE_MS, zone="us-central1-a")
    elsewhere.cloud, elsewhere.region = "gcp", "us-central1"
    session.flush()
    report = build_report(session, made.run, START_MS + 2 * HOUR_MS)
    assert report.costs.by_place == {"aws us-east-1": 9_600_000, "gcp us-central1": 3_600_000}
    extras = {line.kind: line for line in report.extras}
    assert extras["failed_launches"].micro_usd == 600_000
    assert extras["disk"].micro_usd == pytest.approx(10_959 * (1 + 1 / 6) + 13_699, abs=3)
    assert extras["address"].micro_usd == pytest.approx(5_000 * (1 + 1 / 6) + 2_500, abs=3)
    assert extras["egress"].micro_usd is None
    assert [line.kind for line in report.extras if line.in_total] == ["failed_launches", "setup", "idle"]
    console = Console(file=io.StringIO(), width=140)
    print_report(report, console)
    printed = console.file.getvalue()
    assert "not priced" in printed
    assert "gcp us-central1" in printed
    assert "list price of 2025" in printed


def test_the_number_of_confirming_evaluations_comes_from_the_job(session):
    made = a_run(session, job={**JOB, "target": {"metric": "exact_match", "value": 0.8, "evaluations": 1}})
    a_climb(made, [0.1, 0.8, 0.8, 0.8])
    assert build_report(session, made.run, START_MS + HOUR_MS).target.confirmed.iteration == 3


# --- result.json --------------------------------------------------------------------------------------


def test_the_result_of_a_finished_run(session):
    run = a_long_run(session)
    result = result_dict(session, run.name, [])
    assert result["target"] == {
        "metric": "exact_match",
        "value": 0.8,
        "reached": True,
        "iteration": 42,
        "hours": pytest.approx(3.8333, abs=1e-4),
        "micro_usd": 5_180_620,
        "best": result["target"]["best"],
    }
    assert result["exact_match"] == {"before": 0.47, "after": 0.833, "prompts_before": 96, "prompts_after": 96}
    assert [line["signal"] for line in result["preemptions"]] == ["SIGKILL", "SIGSTOP", "SIGKILL"]
    amounts = result["micro_usd"]
    assert {sum(amounts[name].values()) for name in ("by_phase", "by_node", "by_market", "by_role")} == {
        amounts["total"]
    }
    assert result["sums_equal"] is True
    assert result["money_basis"] == "assumed"
    assert result["leftovers"] == {"processes": []}
    assert (result["seed"], result["iterations"], result["clock_factor"]) == (7, 42, 60.0)
    printed("result", json.dumps(result, allow_nan=False))


def test_a_node_that_is_still_billed_is_in_the_result(session):
    made = a_run(session)
    node = made.node("spot-0", up=0)
    session.add(NodeEvent(node_id=node.id, at_ms=START_MS + HOUR_MS, kind="gone"))
    result = result_dict(session, made.run.name, [17, 4])
    assert result["micro_usd"]["total"] == 3_600_000
    assert result["leftovers"] == {"processes": [4, 17]}
    assert set(result["exact_match"].values()) == {None}


def test_the_report_shows_the_gain_and_cost_of_exploration(session):
    made = a_run(session)
    node = made.node("spot-0", rate=1_000_000, up=0, end=HOUR_MS, seen=0)
    made.used(node, 0, HOUR_MS, exploration=HOUR_MS // 2, rollout=HOUR_MS // 2)
    made.trained(0, MINUTE_MS, explored=144)
    made.trained(1, 2 * MINUTE_MS, explored=100)
    made.ranked(1, 2 * MINUTE_MS)
    made.trained(2, 3 * MINUTE_MS)
    explored = build_report(session, made.run, START_MS + HOUR_MS).exploration
    assert (explored.candidates, explored.batches, explored.control) == (244, 2, 12)
    assert explored.micro_usd == 500_000
    assert exploration_words(explored) == (
        "Exploration: 244 candidates for 2 batches, $0.50 of the cost. Old weights ranked seeds with a Spearman "
        "correlation of 0.90 (0.86 to 0.93, corrected by a random control slice); the rewards that were trained "
        "differed 2.0 times as much as a random choice's (1.9 was predicted)."
    )


def test_the_report_shows_exploration_that_was_off_or_never_on(session):
    made = a_run(session)
    assert exploration_words(build_report(session, made.run, START_MS).exploration).startswith("Exploration: none")
    made.trained(0, MINUTE_MS, explored=144)
    assert "not known yet" in exploration_words(build_report(session, made.run, START_MS).exploration)
    made.ranked(1, 2 * MINUTE_MS, explores_on=False, corrected=False)
    words = exploration_words(build_report(session, made.run, START_MS).exploration)
    assert "uncorrected" in words
    assert words.endswith("It was not worth it, and was switched off.")


def test_the_report_counts_regroups_only_of_a_run_that_shared(session):
    made = a_run(session)
    assert sharing_words(build_report(session, made.run, START_MS).sharing) == ""
    first, second = made.node("spot-0"), made.node("spot-1")
    made.regrouped(first, (0, 1), (2, 3), at=MINUTE_MS)
    made.regrouped(first, (0, 1), (2,), at=2 * MINUTE_MS)
    made.regrouped(second, (0, 1, 2, 3), at=2 * MINUTE_MS)
    sharing = build_report(session, made.run, START_MS + HOUR_MS).sharing
    assert sharing == Sharing(regroups=3, nodes=2, degrees=(1, 2, 4))
    assert sharing_words(sharing) == "Shared images: 3 regroups on 2 nodes; degrees 1, 2, 4."

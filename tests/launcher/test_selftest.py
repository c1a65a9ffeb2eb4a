"""`spotrl selftest`: every step finds its planted fault, the cleanup always follows, and the file tells no secret."""

import json
import re
from dataclasses import dataclass, field, replace

import pytest

from engine.events import Market
from launcher.cli.main import run
from launcher.clouds.base import CloudUnreachable
from launcher.clouds.preempting import Order, OrderState, Progress
from launcher.exit_codes import ExitCode, Failure
from launcher.job.load import load_job
from launcher.market.offers import Offer
from launcher.selftest.conduct import Conductor
from launcher.selftest.facts import Batch, Facts, NodeFacts, Paid, Preempted, Saved, Start
from launcher.selftest.job import cheapest_gpu, job_text
from launcher.selftest.outcome import outcome_of, sendable
from launcher.selftest.steps import ALWAYS, JUDGES, Step, Verdict, judge
from tests.launcher.printed import printed

MINUTE = 60_000


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def node(slot="spot-0", generation=0, *, at=0, **more):
    known = {
        "name": f"run-{slot}-g{generation}",
        "slot": slot,
        "generation": generation,
        "role": "trainer" if slot == "trainer" else "rollout",
        "market": "on_demand" if slot == "trainer" else "spot",
        "zone": "us-east-1a",
        "instance_type": "g6.xlarge",
        "micro_usd_per_hour": 360_000,
        "requested_ms": at,
        "happened": {"up": at + MINUTE, "ready": at + 2 * MINUTE},
    }
    return NodeFacts(**{**known, **more})


LOST = node(
    happened={"up": MINUTE, "ready": 2 * MINUTE, "notice": 10 * MINUTE, "gone": 12 * MINUTE},
    ended_ms=12 * MINUTE,
    evidence="Server.SpotInstanceTermination",
    reclaimed=True,
    served_ms=3 * MINUTE,
)
OTHER = node(generation=1, at=10 * MINUTE, served_ms=14 * MINUTE)
DONE = OrderState(progress=Progress.DONE, text="completed")
ORDER = Preempted(node=LOST.name, at_ms=9 * MINUTE, means="FIS", notice_ms=2 * MINUTE, state=DONE)


def batch(iteration, at, lineage=0, **made_by):
    made = made_by or {"run-trainer-g0": 20, "run-spot-0-g0": 12}
    return Batch(iteration=iteration, lineage=lineage, at_ms=at * MINUTE, made_by=made)


WHOLE = Facts(
    cloud="aws",
    stage="running",
    reason="",
    max_total_micro_usd=5_000_000,
    batch_size=32,
    spent_micro_usd=126_000,
    beside_micro_usd=2_000,
    nodes=(node("trainer"), LOST, OTHER),
    batches=(batch(0, 5), batch(1, 6), batch(2, 13), batch(3, 30, 1)),
    starts=(Start(iteration=0, lineage=0, at_ms=MINUTE), Start(iteration=3, lineage=1, at_ms=25 * MINUTE)),
    saved=(Saved(iteration=2, name="l0000-i000002"), Saved(iteration=3, name="l0000-i000003")),
    paid=(
        Paid(
            node="run-trainer-g0",
            ms=21 * MINUTE,
            micro_usd_per_hour=360_000,
            micro_usd=126_000,
            minimum_ms=MINUTE,
            is_free=False,
            is_closed=True,
        ),
        Paid(
            node=LOST.name,
            ms=11 * MINUTE,
            micro_usd_per_hour=360_000,
            micro_usd=0,
            minimum_ms=MINUTE,
            is_free=True,
            is_closed=True,
        ),
    ),
    order=ORDER,
    stored="l0000-i000003",
    stopped_ms=20 * MINUTE,
    resumed_ms=22 * MINUTE,
    in_cloud=(),
)
"""A run in which every step passes. $0.126 for 21 minutes at $0.36/h; the preempted node is free in its first hour."""


@pytest.mark.parametrize("step", list(Step))
def test_a_step_passes_by_the_facts_of_a_good_run(step):
    found = judge(step, WHOLE)
    assert (found.verdict, bool(found.text and found.compared)) == (Verdict.PASSED, True), found.text


def with_lost(**more):
    return {"nodes": (node("trainer"), replace(LOST, **more), OTHER)}


NO_NOTICE = with_lost(happened={"up": MINUTE, "ready": 2 * MINUTE, "gone": 12 * MINUTE})
FAULTS = [
    (
        Step.BUY,
        {"nodes": (node("trainer"), node(market="on_demand"))},
        "run-spot-0-g0 is on_demand, and should be spot",
    ),
    (Step.BUY, {"nodes": (), "stage": "failed", "reason": "quota of 0"}, "the run has failed (quota of 0)"),
    (Step.TRAIN, {"batches": (batch(0, 5), batch(1, 6, a=31))}, "batch 1 has 31 rollouts, and should have 32"),
    (Step.TRAIN, {"batches": (batch(0, 5),), "stage": "stopped", "stopped_ms": None}, "1 of 2 batches are trained"),
    (Step.PUBLISH, {"batches": tuple(batch(n, 5 + n, a=32) for n in range(7))}, "none of the rollouts of 6 batches"),
    (Step.PREEMPT, {"order": replace(ORDER, state=OrderState(progress=Progress.FAILED, text="no role"))}, "no role"),
    (Step.NOTICE, NO_NOTICE, "ended without a notice, and the cloud promises 2m"),
    (Step.DRAIN, with_lost(reclaimed=False, evidence="Client.UserInitiatedShutdown"), "not by a preemption"),
    (Step.DRAIN, with_lost(lost_steps=7), "lost 7 denoising steps in spite of its notice"),
    (Step.DRAIN, {"batches": (batch(0, 5), batch(2, 13, a=33))}, "batch 2 has 33 rollouts"),
    (Step.REPLACE, {"nodes": (LOST, replace(OTHER, market="on_demand"))}, "is on_demand, and should be spot"),
    (Step.CHECKPOINT, {"stored": "l0000-i000002"}, "the bucket has l0000-i000002, and the engine saved l0000-i000003"),
    (Step.CHECKPOINT, {"stored": None}, "the bucket has no checkpoint"),
    (Step.RESUME, {"starts": (Start(iteration=0, lineage=1, at_ms=25 * MINUTE),)}, "went on at 0, and its checkpoint"),
    (Step.BILL, {"spent_micro_usd": 125_999}, "its parts add up to 126000"),
    (Step.BILL, {"paid": (replace(WHOLE.paid[0], micro_usd=126_001),)}, "costs 126001 micro-dollars, and should cost"),
    (Step.BILL, {"max_total_micro_usd": 127_999}, "more than"),
    (Step.BILL, {"paid": (replace(WHOLE.paid[0], is_closed=False),)}, "the bill of run-trainer-g0 is not closed"),
]


@pytest.mark.parametrize(("step", "fault", "words"), FAULTS, ids=[f"{one[0]}-{n}" for n, one in enumerate(FAULTS)])
def test_a_planted_fault_fails_its_step_and_is_named(step, fault, words):
    found = judge(step, replace(WHOLE, **fault))
    assert (found.verdict, words in found.text) == (Verdict.FAILED, True), found.text


def test_a_bill_that_still_grows_is_not_tested_but_held_against_the_budget():
    """The nodes and the ledger's sum are read a moment apart: a cleanup that failed made the bill fail by cents."""
    growing = replace(
        WHOLE,
        paid=(replace(WHOLE.paid[0], is_closed=False), *WHOLE.paid[1:]),
        spent_micro_usd=125_999,
        still_running=("run-trainer-g0",),
    )
    found = judge(Step.BILL, growing)
    assert (found.verdict, "run-trainer-g0 may still cost money" in found.text) == (Verdict.NOT_TESTED, True)
    assert judge(Step.BILL, replace(growing, max_total_micro_usd=1)).verdict is Verdict.FAILED


WAITS = [
    (Step.BUY, {"nodes": (node("trainer"),)}),
    (Step.TRAIN, {"batches": (batch(0, 5),)}),
    (Step.PUBLISH, {"batches": (batch(0, 5),)}),
    (Step.PREEMPT, {"order": replace(ORDER, state=OrderState(progress=Progress.RUNNING))}),
    (Step.NOTICE, with_lost(happened={"ready": 2 * MINUTE}, ended_ms=None)),
    (Step.DRAIN, with_lost(ended_ms=None)),
    (Step.REPLACE, {"nodes": (node("trainer"), LOST)}),
    (Step.REPLACE, {"nodes": (LOST, replace(OTHER, served_ms=None))}),
    (Step.CHECKPOINT, {"stopped_ms": None}),
    (Step.RESUME, {"batches": (batch(0, 5), batch(1, 6))}),
    (Step.CLEANUP, {"still_running": ("run-spot-0-g1",)}),
    (Step.CLEANUP, {"in_cloud": ("disk in us-east-1",)}),
    (Step.CLEANUP, {"in_cloud": None}),
]


@pytest.mark.parametrize(("step", "change"), WAITS, ids=[f"{one[0]}-{n}" for n, one in enumerate(WAITS)])
def test_a_step_waits_for_a_fact_that_may_still_come(step, change):
    assert judge(step, replace(WHOLE, **change)).verdict is Verdict.WAITING


def test_a_notice_that_no_cloud_promises_is_not_tested_when_it_is_missing():
    facts = replace(WHOLE, **NO_NOTICE, order=replace(ORDER, notice_ms=None))
    assert [judge(step, facts).verdict for step in (Step.NOTICE, Step.DRAIN)] == [Verdict.NOT_TESTED] * 2
    doubled = replace(facts, batches=(batch(2, 13, a=33),))
    assert judge(Step.DRAIN, doubled).verdict is Verdict.FAILED, "a rollout that is doubled is a fault all the same"


# --- conducting -----------------------------------------------------------------------------------------


@dataclass
class FakeRun:
    """A run whose facts are those of a good run, unless the test plants a fault."""

    fault: dict = field(default_factory=dict)
    raises: dict = field(default_factory=dict)
    did: list = field(default_factory=list)
    means: str = "FIS"
    notice_ms: int | None = 2 * MINUTE

    def _do(self, what):
        self.did.append(what)
        if what in self.raises:
            raise self.raises.pop(what)

    def now_ms(self):
        return {"stop": 20 * MINUTE, "resume": 22 * MINUTE}.get(self.did[-1] if self.did else "", 9 * MINUTE)

    def facts(self, seen):
        known = {"order": seen.order, "stored": seen.stored, "stopped_ms": seen.stopped_ms, "in_cloud": seen.in_cloud}
        return replace(WHOLE, **known, resumed_ms=seen.resumed_ms, **self.fault)

    def preempt(self, node):
        self._do(f"preempt {node}")
        return Order(region="us-east-1", zone="us-east-1a", id="e-1")

    def order_state(self, order):
        return DONE

    def ask_to_stop(self):
        self._do("ask to stop")

    def stop(self, seconds):
        self._do("stop")
        return ()

    def resume(self):
        self._do("resume")

    def newest_checkpoint(self):
        return "l0000-i000003"

    def left_in_cloud(self):
        self._do("look")
        return ()

    def ensure_controller(self):
        return False


def conduct(run, minutes=0.0):
    said = []
    conductor = Conductor(
        run=run,
        say=lambda step, text: said.append(f"{step}: {text}"),
        minutes=dict.fromkeys(Step, minutes),
        look_seconds=0.0,
    )
    conductor.conduct()
    return conductor, said


def test_every_step_is_taken_in_order_and_the_spot_node_is_preempted():
    conductor, said = conduct(FakeRun())
    assert [result.step for result in conductor.results] == list(Step)
    assert not conductor.failed, said
    assert conductor.exit_code(conductor.facts()) == ExitCode.OK
    assert conductor.run.did == ["preempt run-spot-0-g0", "stop", "resume", "ask to stop", "stop", "look"]


LIVE_FAULTS = {
    Step.BUY: {"nodes": (node("trainer"),)},
    Step.TRAIN: {"batches": (batch(0, 5, a=31),)},
    Step.PUBLISH: {"batches": tuple(batch(n, 5 + n, a=32) for n in range(7))},
    Step.PREEMPT: {"order": replace(ORDER, state=OrderState(progress=Progress.FAILED, text="no role"))},
    Step.NOTICE: NO_NOTICE,
    Step.DRAIN: with_lost(lost_steps=7),
    Step.REPLACE: {"nodes": (node("trainer"), LOST)},
    Step.CHECKPOINT: {"saved": (Saved(iteration=4, name="l0000-i000004"),)},
    Step.RESUME: {"starts": (Start(iteration=0, lineage=1, at_ms=25 * MINUTE),)},
    Step.CLEANUP: {"still_running": ("run-spot-0-g1",)},
    Step.BILL: {"spent_micro_usd": 1},
}


@pytest.mark.parametrize("step", list(Step))
def test_a_failed_step_is_named_in_the_file_and_the_cleanup_follows(step):
    class Faulty(FakeRun):
        def facts(self, seen):
            return replace(super().facts(seen), **LIVE_FAULTS[step])

    conductor, _ = conduct(Faulty())
    assert step in [result.step for result in conductor.failed]
    assert conductor.failed[0].step is step
    assert [result.step for result in conductor.results][-2:] == list(ALWAYS)
    assert "stop" in conductor.run.did
    facts = conductor.facts()
    left = step is Step.CLEANUP  # what may still cost money has a code of its own
    assert conductor.exit_code(facts) == (ExitCode.TEARDOWN_INCOMPLETE if left else ExitCode.FAILURE)
    outcome = outcome_of("run", facts, conductor.results, int(conductor.exit_code(facts)))
    assert (outcome.passed, outcome.failed_steps[0]) == (False, step.value)
    assert len(outcome.steps) == len(Step)


@pytest.mark.parametrize("error", [CloudUnreachable("no answer"), Failure("no"), ZeroDivisionError()])
def test_an_error_of_a_step_leads_to_the_cleanup(error):
    conductor, _ = conduct(FakeRun(raises={"preempt run-spot-0-g0": error}))
    assert conductor.run.did == ["preempt run-spot-0-g0", "ask to stop", "stop", "look"]
    assert conductor.exit_code(conductor.facts()) == ExitCode.FAILURE
    assert {result.step: result.judgement.verdict for result in conductor.results}[Step.CLEANUP] is Verdict.PASSED


def test_a_step_that_waits_too_long_fails_with_what_it_waited_for():
    conductor, _ = conduct(FakeRun(fault={"nodes": (node("trainer"),)}))
    (failed, *_) = conductor.failed
    assert failed.judgement.text == "not within 0 min: no rollout node is ready yet (none asked for)"


# --- the job and the file -------------------------------------------------------------------------------


def offer(accelerator, instance_type, market, price):
    return Offer(
        cloud="aws",
        region="us-east-1",
        zone="us-east-1a",
        instance_type=instance_type,
        accelerator=accelerator,
        gpus=1,
        market=market,
        micro_usd_per_hour=price,
        source="made up",
        observed_at="2026-11-01",
    )


OFFERS = [
    offer("T4", "g4dn.xlarge", Market.ON_DEMAND, 500_000),
    offer("L4", "g6.xlarge", Market.ON_DEMAND, 800_000),
    offer("L4", "g6.xlarge", Market.SPOT, 320_000),
    offer("A10G", "g5.xlarge", Market.ON_DEMAND, 1_000_000),
    offer("A10G", "g5.xlarge", Market.SPOT, 100_000),
]


def test_the_gpu_is_the_cheapest_that_is_sold_on_demand_and_on_spot():
    assert cheapest_gpu(OFFERS, "aws") == ("A10G", 1_000_000, 100_000)
    assert cheapest_gpu([*OFFERS, offer("T4", "g4dn.xlarge", Market.SPOT, 200_000)], "aws")[0] == "T4"
    with pytest.raises(Failure, match="spotrl catalog refresh"):
        cheapest_gpu(OFFERS[:2], "aws")


def test_the_job_has_one_node_of_each_kind_and_a_limit(tmp_path):
    (tmp_path / "job.yaml").write_text(job_text("selftest-aws", "aws", "L4", 5_000_000))
    job = load_job(tmp_path / "job.yaml").job
    assert (job.budget.max_total, job.budget.max_hourly, job.spot) == (4_500_000, 1_850_000, "only")
    assert (job.resources.rollout.num_nodes, job.resources.rollout.min_nodes) == (1, 1)


def test_a_larger_budget_is_refused_before_anything_is_asked(home, capsys):
    assert run(["selftest", "--infra", "aws", "--max-total", "$5.01", "--json"]) == ExitCode.REFUSED_BY_BUDGET
    assert "at most $5" in capsys.readouterr().err


def test_a_dry_run_prints_steps_plan_and_hard_maximum_and_starts_nothing(home, capsys):
    """The prices are those of the shipped catalog."""
    words = ["selftest", "--infra", "aws", "--store", "s3://my-bucket/spotrl", "--dry-run"]
    assert run([*words, "--json"]) == ExitCode.OK
    printed_output = capsys.readouterr()
    found = printed("selftest", printed_output.out)
    assert (found["started"], [step["step"] for step in found["steps"]]) == (False, list(Step))
    (most,) = re.findall(r"at most \$([\d.]+) and", printed_output.err)
    assert 4.5 < float(most) <= 5.0
    assert not (home / "runs").exists()


def test_a_file_that_cannot_be_written_is_found_before_anything_is_bought(home, tmp_path, capsys):
    (tmp_path / "file").touch()
    words = ["selftest", "--infra", "aws", "-y", "--to", str(tmp_path / "file" / "outcome.json")]
    assert run(words) == ExitCode.FAILURE
    assert "cannot be made for outcome.json" in capsys.readouterr().err


def test_the_file_holds_no_account_identity_bucket_or_user():
    secret = "arn:aws:sts::123456789012:assumed-role/Admin/alice@example.com of my-bucket on alice-laptop"
    conductor, _ = conduct(FakeRun(fault={"stage": "failed", "reason": secret, "nodes": ()}))
    private = ["123456789012", "my-bucket", "alice-laptop", "assumed-role/Admin"]
    outcome = outcome_of("run", conductor.facts(), conductor.results, 1)
    text = json.dumps(sendable(outcome, private))
    assert not [word for word in (*private, "alice", "210987654321") if word in text]
    assert json.loads(text)["failed_steps"][0] == "buy"
    nested = replace(outcome, still_running=["alice of alice-laptop"])
    assert sendable(nested, ["alice", "alice-laptop"])["still_running"] == ["(private) of (private)"]
    other = replace(outcome, still_running=["machine of 210987654321"])
    assert "210987654321" not in json.dumps(sendable(other, []))


def test_every_step_has_a_judge():
    assert set(JUDGES) == set(Step)

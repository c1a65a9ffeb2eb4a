"""A trainer that was given up, and goes on beside its successor, neither ends a run nor makes progress for it."""

from collections.abc import Iterator

import pytest
from sqlalchemy.orm import Session

from engine.clock import ScaledClock
from engine.events import EngineFinished
from launcher.controller.facts_reader import FactsReader
from launcher.decide.facts import Facts
from launcher.job.schema import Job
from launcher.placement.plan import Plan
from tests.launcher.made_ledger import MINUTE_MS, START_MS, MadeLedger, a_run, a_session

JOB = Job.model_validate({"name": "demo", "infra": "local", "target": None, "iterations": 50})
PLAN = Plan(region="us-east-1", slots=(), max_total_micro_usd=None, max_hourly_micro_usd=None)


@pytest.fixture
def made() -> Iterator[MadeLedger]:
    with a_session() as session:
        made = a_run(session, factor=1.0)
        made.status("planned", 0)
        made.status("running", 0)
        made.started(MINUTE_MS, iteration=0, lineage=1)
        for iteration in range(3):
            made.trained(iteration, (iteration + 2) * MINUTE_MS, lineage=1)
        yield made


def facts_of(session: Session, made: MadeLedger) -> Facts:
    session.flush()
    clock = ScaledClock(origin_ms=START_MS, factor=1.0)
    reader = FactsReader(made.run, JOB, PLAN, clock)
    return reader.facts(session, is_limited_by_all=False, trouble=None, doubt=None)


def test_a_run_ends_when_its_trainer_says_so(made: MadeLedger) -> None:
    made.record(EngineFinished(reason="target", iteration=3), 9 * MINUTE_MS, lineage=1)
    facts = facts_of(made.session, made)
    assert facts.finished is not None
    assert (facts.finished.reason, facts.finished_ms) == ("target", START_MS + 9 * MINUTE_MS)


@pytest.mark.parametrize("reason", ["target", "iterations", "unhealthy", "stopped"])
def test_the_end_of_a_trainer_whose_successor_has_started_does_not_end_the_run(made: MadeLedger, reason: str) -> None:
    made.started(6 * MINUTE_MS, iteration=2, lineage=2)
    made.record(EngineFinished(reason=reason, iteration=9), 9 * MINUTE_MS, lineage=1)
    assert facts_of(made.session, made).finished is None
    made.record(EngineFinished(reason="iterations", iteration=50), 20 * MINUTE_MS, lineage=2)
    assert facts_of(made.session, made).finished_ms == START_MS + 20 * MINUTE_MS


def test_iterations_of_a_trainer_whose_successor_has_started_are_no_progress(made: MadeLedger) -> None:
    assert facts_of(made.session, made).advanced_ms == START_MS + 4 * MINUTE_MS
    made.started(6 * MINUTE_MS, iteration=2, lineage=2)
    for iteration in (3, 4):
        made.trained(iteration, (iteration + 7) * MINUTE_MS, lineage=1)
    assert facts_of(made.session, made).advanced_ms == START_MS + 4 * MINUTE_MS
    made.trained(3, 30 * MINUTE_MS, lineage=2)
    assert facts_of(made.session, made).advanced_ms == START_MS + 30 * MINUTE_MS

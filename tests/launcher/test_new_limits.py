"""New limits of a run that continues: the same rules as those of a launch."""

import pytest

from launcher.exit_codes import ExitCode
from launcher.runs.new_limits import LimitTooLow, NewLimits
from tests.launcher.made_ledger import HOUR_MS, START_MS, a_run, a_session


@pytest.fixture
def run():
    with a_session() as session:
        yield a_run(session).run


def apply(run, **limits):
    return NewLimits(**limits).apply(None, run, START_MS)


def test_an_end_before_the_new_deadline_is_refused_as_at_a_launch(run):
    with pytest.raises(LimitTooLow, match=r"--max-runtime is 1h, less than --deadline 2h; use a longer") as refused:
        apply(run, deadline_ms=2 * HOUR_MS, max_runtime_ms=HOUR_MS)
    assert refused.value.exit_code is ExitCode.REFUSED_BY_BUDGET
    assert (run.deadline_ms, run.ends_ms) == (None, None)
    apply(run, deadline_ms=2 * HOUR_MS, max_runtime_ms=2 * HOUR_MS)
    assert run.deadline_ms == run.ends_ms == START_MS + 2 * HOUR_MS


def test_an_end_before_the_runs_own_deadline_is_refused_until_that_has_passed(run):
    run.deadline_ms = START_MS + 3 * HOUR_MS
    found = "--max-runtime is 1h, less than the time to the deadline of demo, 3h; .* a --deadline that is not later"
    with pytest.raises(LimitTooLow, match=found):
        apply(run, max_runtime_ms=HOUR_MS)
    apply(run, max_runtime_ms=HOUR_MS, deadline_ms=HOUR_MS // 2)
    assert (run.deadline_ms, run.ends_ms) == (START_MS + HOUR_MS // 2, START_MS + HOUR_MS)
    run.deadline_ms = START_MS - HOUR_MS
    apply(run, max_runtime_ms=HOUR_MS)
    assert run.ends_ms == START_MS + HOUR_MS

"""`spotrl selftest` with a planted fault in each of its steps, on both fake clouds: the step is named, nothing is left.

The selftests run at the same time, `AT_ONCE` of them; each test looks at one. One fault shows in one run.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher.exit_codes import ExitCode
from launcher.selftest.steps import ALWAYS, Step
from tests.clouds.selftest_faults import FAULTS, Fault, faults_of
from tests.clouds.selftesting import AT_ONCE, NOTICE_SECONDS, Selftest, make_role, priced_home
from tests.fakes.clouds.world import World

pytestmark = [pytest.mark.clouds, pytest.mark.timeout(3600)]

CASES = [(cloud, fault.step) for cloud in ("aws", "gcp") for fault in faults_of(cloud)]

Done = tuple[Selftest, int]


@pytest.fixture(scope="module")
def done(world: World, request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, Step], Future[Done]]]:
    """Start the selftests of the chosen tests, each with its fault."""
    world.call(make_role)
    world.notice(NOTICE_SECONDS)
    chosen = {item.callspec.params["case"] for item in request.session.items if "case" in item.fixturenames}
    planned = [
        (cloud, fault) for cloud in ("aws", "gcp") for fault in faults_of(cloud) if (cloud, fault.step) in chosen
    ]
    # Ledgers are made one after the other: the migrations of two threads would meet.
    prices = priced_home(world)
    selftests = [with_fault(world, prices, cloud, fault) for cloud, fault in planned]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            (cloud, fault.step): pool.submit(tried, selftest, fault)
            for (cloud, fault), selftest in zip(planned, selftests, strict=True)
        }
    world.notice(120)


@pytest.fixture(autouse=True)
def _no_fault_outlives_its_test() -> None:
    """Override the fixture: a fault here is of one run, and ends with it."""


def with_fault(world: World, prices: Path, cloud: str, fault: Fault) -> Selftest:
    return Selftest(
        world=world,
        prices=prices,
        cloud=cloud,
        name=f"st-{cloud}-{fault.step.value}",
        settings=fault.settings,
        minutes=fault.minutes,
    )


def tried(selftest: Selftest, fault: Fault) -> Done:
    """Run a selftest with its fault. Return the selftest and its exit status."""
    if fault.before is not None:
        fault.before(selftest)
    selftest.start()
    try:
        if fault.plant is not None:
            fault.plant(selftest)
        code = selftest.ended()
        selftest.world.clear(run=selftest.name)
    except BaseException:
        selftest.give_up()
        raise
    print(f"{selftest.name}: exit {code} after {selftest.seconds:.0f} s\n{selftest.log()[-1500:]}")
    return selftest, code


@pytest.mark.parametrize("case", CASES, ids=[f"{cloud}-{step.value}" for cloud, step in CASES])
def test_a_fault_of_a_step_is_named_and_nothing_is_left(done: dict[tuple[str, Step], Future[Done]], case) -> None:
    cloud, step = case
    (fault,) = (one for one in FAULTS if one.step is step and cloud in one.clouds)
    selftest, code = done[case].result()
    outcome = selftest.outcome()
    assert (code, outcome["failed_steps"]) == (fault.exit_code, [step.value]), selftest.log()[-3000:]
    assert outcome == selftest.answer(), "the file is what the command printed"
    assert f"Failed: {step.value}." in selftest.log()
    line = next(line for line in outcome["steps"] if line["step"] == step.value)
    assert fault.says in line["text"], line["text"]
    verdicts = {one["step"]: one["verdict"] for one in outcome["steps"]}
    earlier, later = list(Step)[: list(Step).index(step)], list(Step)[list(Step).index(step) + 1 :]
    assert {verdicts[one] for one in earlier} <= {"passed", "not tested"}
    assert {verdicts[one] for one in later if one not in ALWAYS} <= {"not reached"}
    if code == ExitCode.TEARDOWN_INCOMPLETE:
        assert f"spotrl down {selftest.name}" in selftest.log()
        assert "instance" in selftest.left()
        assert selftest.down() == ExitCode.OK, "the command that it named ends what was left"
    assert selftest.left() == {}

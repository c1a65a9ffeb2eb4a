"""`spotrl selftest` that a user, the system or its budget ends, as a process on the fake AWS: nothing is left running.

The selftests run at the same time; each test looks at one.
"""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from launcher.exit_codes import ExitCode
from launcher.selftest.steps import Step
from tests.clouds.selftesting import AT_ONCE, Selftest, make_role, priced_home
from tests.fakes.clouds.world import World

pytestmark = [pytest.mark.clouds, pytest.mark.timeout(1500)]

Ended = dict[str, Future[tuple[Selftest, int]]]


@pytest.fixture(scope="module")
def ended(world: World) -> Iterator[Ended]:
    world.call(make_role)
    prices = priced_home(world)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ways = {"killed": killed, "interrupted": interrupted_twice, "terminated": terminated}
        yield {
            name: pool.submit(ends, Selftest(world=world, prices=prices, cloud="aws", name=f"st-{name}"), way)
            for name, way in ways.items()
        }


def ends(selftest: Selftest, way: Callable[[Selftest], int]) -> tuple[Selftest, int]:
    selftest.start()
    try:
        return selftest, way(selftest)
    except BaseException:
        selftest.give_up()
        raise


def terminated(selftest: Selftest) -> int:
    """Send SIGTERM as soon as there is a machine, while the other is bought."""
    selftest.until("a machine runs", lambda: selftest.has_run() and selftest.launched.instances())
    selftest.signal(signal.SIGTERM)
    return selftest.ended()


def interrupted_twice(selftest: Selftest) -> int:
    """Press Ctrl-C while it trains, and again while it cleans up."""
    selftest.says(Step.BUY, "passed")
    selftest.signal(signal.SIGINT)
    selftest.says(Step.CLEANUP, "stopping the run")
    selftest.signal(signal.SIGINT)
    return selftest.ended()


def killed(selftest: Selftest) -> int:
    selftest.says(Step.BUY, "passed")
    selftest.signal(signal.SIGKILL)
    return selftest.ended()


def test_a_price_above_the_limit_is_refused_before_anything_is_bought(world: World) -> None:
    """An L40S costs $1.861/h on demand, and both nodes of a selftest may cost $1.85/h."""
    world.call(make_role)
    selftest = Selftest(world=world, prices=priced_home(world, "st-dear"), cloud="aws", name="st-priced", gpu="L40S")
    before = world.ask("calls").get("RunInstances", 0)
    selftest.start()
    assert selftest.ended() == ExitCode.REFUSED_BY_BUDGET, selftest.log()
    assert "A selftest keeps its limits of $5.00 and $1.85/h" in " ".join(selftest.log().split())
    assert (world.ask("calls").get("RunInstances", 0), selftest.left(), selftest.has_run()) == (before, {}, False)


def test_sigterm_in_the_middle_says_what_runs_and_ends_it(ended: Ended) -> None:
    selftest, code = ended["terminated"].result()
    assert code == ExitCode.INTERRUPTED, selftest.log()
    assert "interrupted: by SIGTERM" in selftest.log()
    assert f"stopping the run; still there: {selftest.name}-" in selftest.log()
    assert "Nothing of it runs any more." in selftest.log()
    verdicts = {step["step"]: step["verdict"] for step in selftest.outcome()["steps"]}
    assert (verdicts["buy"], verdicts["train"]) == ("interrupted", "not reached")
    assert (verdicts["cleanup"], verdicts["bill"]) == ("passed", "passed")
    assert selftest.left() == {}


def test_a_second_ctrl_c_waits_no_longer_and_names_the_command(ended: Ended) -> None:
    selftest, code = ended["interrupted"].result()
    assert code == ExitCode.TEARDOWN_INCOMPLETE, selftest.log()
    assert "interrupted: by Ctrl-C" in selftest.log()
    assert f"Stop it: spotrl down {selftest.name}" in selftest.log()
    assert selftest.outcome()["failed_steps"][:1] == ["cleanup"]
    assert selftest.down() == ExitCode.OK
    assert selftest.left() == {}


def test_the_next_selftest_ends_what_a_killed_one_left(world: World, ended: Ended) -> None:
    selftest, code = ended["killed"].result()
    assert code == -signal.SIGKILL
    assert "instance" in selftest.left(), "its run goes on"
    shown = " ".join(selftest.launched.spotrl("status", selftest.name).stdout.split())
    assert f"its selftest has ended, and left it; end it: spotrl down {selftest.name}" in shown
    other = Selftest(world=world, cloud="aws", name="st-next", home=selftest.home)
    other.denied("ec2:RunInstances", "create")  # only the end of the first one matters here
    other.start()
    try:
        assert other.ended() == ExitCode.FAILURE, other.log()
    finally:
        other.give_up()
    assert f"{selftest.name} was left by its selftest; ending it first." in other.log()
    assert f"{selftest.name} is down; nothing of it is left running." in other.log()
    assert (selftest.left(), other.left()) == ({}, {})

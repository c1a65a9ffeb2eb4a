"""The schedule: who waits for whom, small enough to check by hand; and the promises that every schedule keeps."""

import ast
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.schedule
from engine.schedule.choose import Allowed, best, predict, units_of
from engine.schedule.decide import Help, Train, Wait, next_action
from engine.schedule.simulate import NOTHING_LEFT, WAITS, World, finish, play, start
from engine.schedule.state import Image
from engine.schedule.values import Gpus, Knobs, Rates, Work, lower_bound, train_seconds
from engine.timing.figures import Figure, Source

SOURCE = Source(basis="assumed", text="a test")


def seconds(value):
    return Figure(value=value, source=SOURCE)


def rates(image=1.0, row=1.0, **more):
    return Rates(image=seconds(image), row=seconds(row), **{name: seconds(value) for name, value in more.items()})


WORK = Work(groups=4, images=2, rows_of_image=1)
ONE_AND_ONE = Gpus(trainer=1, rollout=1)


def test_the_schedule_imports_neither_torch_nor_a_clock_nor_io():
    used = set()
    for file in Path(engine.schedule.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                used.add(node.module)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("open", "print", "input"), file
    pure = {"math", "heapq", "collections", "collections.abc", "dataclasses", "itertools", "typing"}
    assert {name for name in used if not name.startswith("engine.schedule")} <= pure | {"engine.timing.figures"}


# --- by hand


def test_a_barrier_trains_after_the_last_rollout():
    timeline = predict(rates(), WORK, ONE_AND_ONE, Knobs(unit=4, rows=8))
    assert timeline.seconds == pytest.approx(8 + 8), "8 images, then 8 rows"
    assert timeline.idle == pytest.approx({WAITS: 8, NOTHING_LEFT: 8, "rollout GPU waits for weights": 0})
    assert timeline.bubble_share == pytest.approx(0.5)


def test_units_of_a_group_train_while_other_groups_are_sampled():
    timeline = predict(rates(), WORK, ONE_AND_ONE, Knobs(unit=1, rows=8))
    assert timeline.seconds == pytest.approx(8 + 2), "only the last group trains after the last rollout"


def test_help_can_make_an_iteration_longer_and_search_does_not():
    """Two rollout GPUs finish two groups at 10 s, and a third at 20 s, while the trainer trains."""
    work, gpus = Work(groups=3, images=1, rows_of_image=1, steps=10), Gpus(trainer=1, rollout=2)
    found = {
        help_: predict(rates(image=10, row=10, switch=5), work, gpus, Knobs(unit=1, rows=1, help=help_)).seconds
        for help_ in ("off", "greedy", "feedback", "search")
    }
    assert found == pytest.approx({"off": 40, "greedy": 50, "feedback": 45, "search": 40})


def test_early_groups_fill_the_rollout_gpus_while_the_trainer_trains():
    plain = predict(rates(image=1, row=1), WORK, ONE_AND_ONE, Knobs(unit=4, rows=8))
    early = predict(rates(image=1, row=1), WORK, ONE_AND_ONE, Knobs(unit=4, rows=8, early=0.5))
    assert early.seconds == pytest.approx(plain.seconds - 4), "two of four groups are there already"
    assert early.stale_share == pytest.approx(0.5)


def test_a_run_without_rollout_gpus_samples_on_the_trainer_whatever_help_says():
    for help_ in ("off", "search"):
        timeline = predict(rates(), WORK, Gpus(trainer=1, rollout=0), Knobs(unit=1, rows=8, help=help_))
        assert timeline.seconds == pytest.approx(16)


def test_packed_rows_pay_where_collectives_are_longer_than_the_computation():
    work = Work(groups=1, images=4, rows_of_image=8)
    slow = rates(row=1, gather=4)
    assert train_seconds(slow, work, 4, 1, 1) == pytest.approx(8 * 4.1)
    assert train_seconds(slow, work, 4, 1, 8) == pytest.approx(8 + 0.4)


def test_scores_are_known_later_than_images():
    late = predict(rates(score=3), WORK, ONE_AND_ONE, Knobs(unit=4, rows=8))
    assert late.seconds == pytest.approx(8 + 3 + 8)


# --- decisions


def test_the_trainer_trains_a_complete_unit_before_it_helps():
    state = replace(start(WORK, ONE_AND_ONE), done={(0, 1): 2})
    assert next_action(rates(), state, Knobs(unit=1, rows=8, help="greedy"), finish) == Train((1,))
    assert next_action(rates(), state, Knobs(unit=2, rows=8, help="greedy"), finish) == Help()
    assert next_action(rates(), state, Knobs(unit=2, rows=8), finish) == Wait()


def test_the_trainer_never_helps_with_a_group_of_the_old_weights():
    old = replace(start(WORK, ONE_AND_ONE), waiting=(Image(0, 0, is_old=True),))
    assert next_action(rates(), old, Knobs(unit=1, rows=8, help="greedy"), finish) == Wait()


def test_a_plan_of_help_is_kept_until_a_unit_trains():
    state = start(WORK, ONE_AND_ONE)
    knobs = Knobs(unit=1, rows=8, help="search")
    assert next_action(rates(), replace(state, help_left=2), knobs, finish) == Help(1)
    assert next_action(rates(), replace(state, help_left=0), knobs, finish) == Wait(0)
    assert isinstance(next_action(rates(image=9, row=0.1), state, knobs, finish), Help)


# --- rates that are absent, zero or wrong


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_rates_that_are_unusable_leave_the_first_knobs_with_a_reason(bad):
    allowed = Allowed(units=(4, 1), rows=(8,), helps=("off", "search"))
    found = best(rates(image=bad), WORK, ONE_AND_ONE, allowed)
    assert found.knobs == Knobs(unit=4, rows=8)
    assert found.timeline is None
    assert "image takes" in found.why
    with pytest.raises(ValueError, match="image takes"):
        predict(rates(image=bad), WORK, ONE_AND_ONE, Knobs(unit=1, rows=8))
    action = next_action(rates(image=bad), start(WORK, ONE_AND_ONE), Knobs(unit=1, rows=8, help="search"), finish)
    assert action == Help(), "help that stops between steps needs no rates"


class TenTimes:
    """Rollouts are ten times slower, or faster, than the rates say."""

    def __init__(self, factor):
        self.factor = factor

    def rollout(self):
        return self.factor

    def training(self):
        return 1.0


@pytest.mark.parametrize("factor", [0.1, 10.0])
@pytest.mark.parametrize("help_", ["off", "greedy", "feedback", "search"])
def test_rates_ten_times_off_end_every_batch(factor, help_):
    world = World(rates(), start(WORK, ONE_AND_ONE), Knobs(unit=1, rows=8, help=help_), TenTimes(factor))
    assert play(world, batches=4, warm=1).seconds > 0
    assert world.batch == 5


# --- promises


works = st.builds(
    Work,
    groups=st.sampled_from([2, 4, 6]),
    images=st.integers(2, 4),
    rows_of_image=st.integers(1, 4),
    updates=st.sampled_from([1, 2]),
    lease=st.integers(1, 5),
    steps=st.integers(1, 5),
)
positive = st.floats(0.1, 10)
all_rates = st.builds(
    rates,
    image=positive,
    row=positive,
    gather=st.floats(0, 5),
    switch=st.floats(0, 2),
    publish=st.floats(0, 2),
    load=st.floats(0, 2),
    score=st.floats(0, 2),
)
knobs = st.builds(
    Knobs,
    unit=st.integers(1, 6),
    rows=st.integers(1, 8),
    help=st.sampled_from(["off", "greedy", "feedback", "search"]),
    early=st.sampled_from([0.0, 0.25, 0.5]),
)
clusters = st.builds(Gpus, trainer=st.integers(1, 3), rollout=st.integers(0, 4))


@given(works, all_rates, knobs, clusters)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_image_is_sampled_once_and_every_batch_beats_no_bound(work, rate, knob, gpus):
    world = World(rate, start(work, gpus), knob)
    world.train_batch()
    play(world, batches=3, warm=0)
    wanted = {(batch, group): work.images for batch in range(4) for group in range(work.groups)}
    assert {key: count for key, count in world.sampled.items() if key[0] < 4} == wanted
    assert world.now >= 4 * lower_bound(rate, work, gpus) * (1 - 1e-9)
    assert all(wait >= 0 for wait in world.idle.values())


@given(works, all_rates, clusters)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_best_is_never_slower_than_the_first_choice(work, rate, gpus):
    allowed = Allowed(units=units_of(work), rows=(1, 4), helps=("off", "feedback"), early=(0.0, 0.5))
    first = predict(rate, work, gpus, Knobs(unit=allowed.units[0], rows=1))
    found = best(rate, work, gpus, allowed)
    assert found.timeline.seconds <= first.seconds

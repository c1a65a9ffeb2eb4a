"""Help of a waiting trainer (TAG): stops between denoising steps, loses no step, and is on only where it pays."""

import time
from collections import Counter, defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.clock import ScaledClock
from engine.config import EvaluationConfig, ExplorationConfig
from engine.entrypoints.inproc import build_inproc
from engine.protocol.messages import Notice, Outlook, UnderWay, Waiting
from engine.protocol.request import Group, Kind, Manifest
from engine.schedule.values import NOTHING, Work, pass_seconds, train_seconds
from engine.trainer.batch_forecast import BatchForecast
from engine.trainer.batch_schedule import BatchSchedule
from engine.trainer.measured_rates import MeasuredRates
from tests.engine.test_loop import TINY, Killed, brightness, manifests, newest, progress

pytestmark = pytest.mark.usefixtures("one_layer")

STEPS = 6
JOB = TINY.model_copy(
    update={
        "iterations": 2,
        "sampler": TINY.sampler.model_copy(update={"steps": STEPS}),
        # with `order: fixed`, the unit that the trainer samples itself is the next to train
        "algorithm": TINY.algorithm.model_copy(
            update={"prompts_per_batch": 4, "updates_per_batch": 1, "unit": 1, "order": "exact"}
        ),
        "exploration": ExplorationConfig(mode="none"),
        "evaluation": EvaluationConfig(prompts=3, every=9, steps=2),
    }
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Run:
    """A run in one process with a spot worker, which also works between the denoising steps of the trainer's help."""

    def __init__(self, folder, help_, *, between=lambda run, work, step: None, **runtime):
        job = JOB.model_copy(update={"runtime": JOB.runtime.model_copy(update={"help": help_, **runtime})})
        clock = ScaledClock(origin_ms=time.time_ns() // 1_000_000)
        self.one = build_inproc(job, folder, run="run", clock=clock, reward=brightness, workers=1)
        self.spot, self.own = self.one.workers[0], self.one.loop.worker
        self.steps = Counter()
        """Denoising steps by (batch, seed, step)."""
        self.by = Counter()
        self.workers = defaultdict(set)
        """Workers of each image, by seed."""
        self.spot.serve_once(wait=False)  # a live worker, as far as the coordinator knows
        for worker in (self.spot, self.own):
            worker.sampler.trace = self._trace(worker, between)

    def _trace(self, worker, between):
        def trace(work, step):
            requests = [attempt.request for attempt in work.attempts if attempt.request.kind is Kind.TRAIN]
            self.steps.update((request.batch, request.seed, step) for request in requests)
            self.by[worker.name] += len(requests)
            for request in requests:
                self.workers[request.seed].add(worker.name)
            if worker is self.own:
                between(self, work, step)

        return trace

    def finish(self):
        return self.one.loop.run()


def a_spot_worker_finishes_a_lease(run, work, step):
    """While the trainer helps, the spot worker samples a lease: a unit becomes complete."""
    if step == 2:
        run.spot.serve_once(wait=False)
        run.spot.serve_once(wait=False)


def outcome(folder):
    return dict(newest(folder).files), manifests(folder)


@pytest.fixture(scope="module")
def without_help(tmp_path_factory):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("off")
    run = Run(folder, "off")
    run.finish()
    run.schedules = [event.schedule for event in progress(folder, "iteration_done")]
    torch.set_num_threads(before)
    return run, outcome(folder)


@pytest.mark.slow
def test_help_stops_between_steps_and_another_worker_goes_on_from_there(tmp_path, without_help):
    run = Run(tmp_path, "feedback", between=a_spot_worker_finishes_a_lease)
    give_back = run.own.calls.give_back

    def taken_over(lease):
        reply = give_back(lease)
        run.spot.serve_once(wait=False)
        return reply

    run.own.calls.give_back = taken_over
    assert run.finish().reason == "iterations"
    assert set(run.steps.values()) == {1}, "no step of an image was made twice"
    assert len(run.steps) == 2 * 8 * STEPS
    figures = [event.schedule for event in progress(tmp_path, "iteration_done")]
    assert all(one["helped_seconds"] > 0 and one["seconds"] > one["helped_seconds"] for one in figures)
    assert "expected_seconds" in figures[-1]
    both = {run.own.name, run.spot.name}
    assert both in run.workers.values(), "the spot worker went on where help stopped"
    assert outcome(tmp_path) == without_help[1], "the same bits as without help"


@pytest.mark.slow
def test_greedy_help_samples_whole_leases(tmp_path, without_help):
    run = Run(tmp_path, "greedy", between=a_spot_worker_finishes_a_lease)
    run.finish()
    assert set(run.steps.values()) == {1}
    assert all(len(workers) == 1 for workers in run.workers.values())
    assert outcome(tmp_path) == without_help[1]


@pytest.mark.slow
def test_work_that_would_restart_is_not_given_back(tmp_path):
    run = Run(tmp_path, "feedback", between=a_spot_worker_finishes_a_lease, resume="restart")
    run.finish()
    assert set(run.steps.values()) == {1}, "a lease given back would begin anew"


def test_without_help_the_spot_worker_samples_everything(without_help):
    run, _ = without_help
    assert run.by[run.spot.name] == 2 * 8 * STEPS
    assert len(run.schedules) == 2
    assert all(one["helped_seconds"] == 0 < one["waited_seconds"] for one in run.schedules)
    assert run.by[run.own.name] == 0


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_trainer_killed_during_help_ends_on_the_same_bits(tmp_path, without_help, step):
    def die(run, work, now):
        if now == step and run.steps.total() > 30:
            raise Killed

    with pytest.raises(Killed):
        Run(tmp_path, "greedy", between=die).finish()
    assert Run(tmp_path, "feedback").finish().reason == "iterations"
    assert outcome(tmp_path) == without_help[1]


def test_a_trainer_frozen_during_help_loses_its_lease_and_no_image_is_finished_twice(tmp_path, without_help):
    frozen = []

    def freeze(run, work, step):
        if step == 3 and not frozen:
            frozen.append(work.lease)
            queue = run.one.coordinator.queue
            queue.unreachable("trainer", "frozen", now_ms=run.one.coordinator._clock.now_ms())
            run.spot.serve_once(wait=False)
            run.spot.serve_once(wait=False)

    run = Run(tmp_path, "feedback", between=freeze)
    assert run.finish().reason == "iterations"
    assert frozen
    assert outcome(tmp_path) == without_help[1]


# --- rates


def test_rates_that_were_not_measured_are_named_and_help_needs_none():
    rates = MeasuredRates()
    assert [text.split()[0] for text in rates.rates().problems()] == ["image", "row"]
    rates.image(0.0)
    rates.training(1.0, rows=0, passes=1)
    assert rates.rates().problems(), "zeros are no measurements"


def test_two_sizes_of_passes_give_the_seconds_of_a_row_and_of_a_launch():
    rates = MeasuredRates()
    rates.image(2.0)
    rates.training(1.0, rows=10, passes=1)
    assert rates.rates().row.value == pytest.approx(0.1)
    rates.training(3.0, rows=30, passes=1)
    rates.training(3.0, rows=30, passes=1)
    found = rates.rates()
    assert (found.row.value, found.launch.value) == pytest.approx((0.1, 0.0))
    rates.training(4 * 0.7, rows=20, passes=4)
    assert rates.rates().launch.value == pytest.approx(0.24)
    assert not rates.rates().problems()
    assert rates.rates().score == NOTHING


def test_collectives_of_a_pass_count_as_its_fixed_cost_from_the_first_measurement_on():
    """4 passes of 10 rows in 8 s, of which 6 s are collectives: .05 s a row, and 1.5 s a pass."""
    rates = MeasuredRates()
    rates.training(8.0, rows=40, passes=4, collectives=6.0)
    found = rates.rates()
    assert (found.row.value, found.launch.value) == pytest.approx((0.05, 1.5))
    work = Work(groups=8, images=10, rows_of_image=1)
    one, eight = (sum(train_seconds(found, work, 1, unit, 80) for _ in range(8 // unit)) for unit in (1, 8))
    assert one - eight == pytest.approx(7 * 1.5), "eight passes instead of one"


# --- decisions


class Coordinator:
    """Answers with an outlook: two images of the last group wait, all others are under way."""

    def __init__(self, manifest, *, step_ms, workers=1, left_ms=1000.0):
        first, last = manifest.groups[:-1], manifest.groups[-1]
        images = tuple((group.prompt, seed) for group in first for seed in group.seeds)
        lease = UnderWay(worker="spot-0/0", left_ms=left_ms, steps_left=2, images=images)
        self.outlook = Outlook(
            waiting=tuple(Waiting(prompt=last.prompt, seed=seed, step=0) for seed in last.seeds),
            leases=(lease,) if workers else (),
            idle=(),
            step_ms=step_ms,
        )

    def look_ahead(self, batch):
        return self.outlook


class Waits:
    """Rollouts of a batch of which none is there. Counts how the trainer used its time."""

    def __init__(self):
        self.helped = self.waited = 0
        self.ranks_sample = None

    def is_complete(self, number):
        return False

    def count(self, number):
        return 0

    def look(self):
        return False

    def help(self, stop):
        self.helped += 1
        return True

    def wait(self):
        self.waited += 1


def test_groups_with_equal_rewards_make_the_expected_iteration_shorter():
    """Two steps train half of the planned rows in 4 s each: the forecast of the next is 4 s of training, not 8."""
    rates = MeasuredRates()
    for _ in range(2):
        rates.training(4.0, rows=80, passes=4, planned=160)
    assert 4 * pass_seconds(rates.rates(), 40) == pytest.approx(4.0)
    for _ in range(6):
        rates.training(0.01, rows=0, passes=4, planned=160)  # every group has equal rewards
    assert 0 < 4 * pass_seconds(rates.rates(), 40) < 0.1
    assert not any("row" in problem for problem in rates.rates().problems())


def test_the_slow_first_training_of_a_run_is_forgotten_whatever_its_rows():
    """With equal rewards in some groups no two steps have the same rows, and only the first had all."""
    rates = MeasuredRates()
    rates.training(8.0, rows=160, passes=4)
    for rows in range(80, 112, 4):
        rates.training(rows * 0.01, rows=rows, passes=4)
    assert pass_seconds(rates.rates(), 40) == pytest.approx(0.4)


@pytest.mark.parametrize("help_", ["greedy", pytest.param("off", marks=pytest.mark.slow)])
def test_a_drained_trainer_takes_no_work_and_does_not_ask_in_a_loop(tmp_path, help_):
    """Its node has a preemption notice. The evaluation at the end is made by the spot worker too."""
    run = Run(tmp_path, help_)
    run.one.coordinator.handle(Notice(node="trainer", deadline_ms=10**15), {})
    pulls, pull = [], run.own.calls.pull
    run.own.calls.pull = lambda **call: pulls.append(call) or pull(**call)
    assert run.finish().reason == "iterations"
    assert run.by[run.own.name] == 0
    assert len(pulls) < 40, "each pull that is answered `drain` is followed by a wait for another worker's results"


def decided(help_="auto", *, image=None, row=None, workers=1, late=0.0):
    """Return how a trainer uses its time, and its warnings."""
    warned = []
    groups = tuple(Group(prompt=str(number), seeds=(2 * number, 2 * number + 1)) for number in range(4))
    manifest = Manifest(
        run="r", lineage=1, batch=0, version=0, sampler="", groups=groups, minibatches=((0, 1, 2, 3),), unit=1
    )
    config = JOB.model_copy(update={"runtime": JOB.runtime.model_copy(update={"help": help_})})
    coordinator = Coordinator(manifest, step_ms=0.0 if image is None else image * 1000 * 2 / STEPS, workers=workers)
    clock = ScaledClock(origin_ms=0)
    forecast = BatchForecast(
        config,
        SimpleNamespace(rows_per_forward=168, objective=SimpleNamespace(rows_per_image=lambda plan: STEPS)),
        SimpleNamespace(warn=warned.append),
        clock,
    )
    rollouts = Waits()
    schedule = BatchSchedule(
        config,
        coordinator,
        forecast,
        clock,
        own_worker="trainer/trainer",
        let_ranks_sample=lambda *, is_on: setattr(rollouts, "ranks_sample", is_on),
    )
    if row is not None:
        forecast.measured.training(row * STEPS * 8, rows=STEPS * 8, passes=4)
    schedule.begin(manifest, SimpleNamespace(steps=STEPS))
    schedule.fill_time(rollouts)
    if late:
        forecast._batch = replace(forecast.batch, begun=time.monotonic() - late)
        schedule.fill_time(rollouts)
        schedule.fill_time(rollouts)
    return rollouts, warned


def test_help_is_on_where_rollouts_are_the_longer_part_and_off_where_training_is():
    slow_rollouts, _ = decided(image=10.0, row=0.01)
    assert (slow_rollouts.helped, slow_rollouts.waited) == (1, 0)
    slow_training, _ = decided(image=0.1, row=10.0)
    assert (slow_training.helped, slow_training.waited) == (0, 1)


@pytest.mark.parametrize(("image", "row"), [(None, 1.0), (1.0, None), (None, None)])
def test_until_the_rates_are_known_help_goes_by_feedback(image, row):
    rollouts, _ = decided(image=image, row=row)
    assert (rollouts.helped, rollouts.waited) == (1, 0)


def test_a_batch_that_takes_three_times_as_long_as_expected_goes_by_feedback_and_says_so_once():
    rollouts, warned = decided("search", image=0.1, row=10.0, late=10_000.0)
    assert (rollouts.helped, rollouts.waited) == (2, 1)
    assert len(warned) == 1
    assert "was expected to take" in warned[0]


@pytest.mark.parametrize("help_", ["off", "auto", "search"])
def test_without_a_rollout_gpu_the_trainer_samples_whatever_help_says(help_):
    rollouts, _ = decided(help_, image=0.1, row=10.0, workers=0)
    assert (rollouts.helped, rollouts.waited) == (1, 0)


def test_help_off_waits_while_a_rollout_gpu_works():
    rollouts, _ = decided("off", image=10.0, row=0.01)
    assert (rollouts.helped, rollouts.waited) == (0, 1)


@pytest.mark.parametrize(("help_", "workers", "is_on"), [("off", 1, False), ("off", 0, True), ("auto", 1, True)])
def test_the_other_ranks_sample_unless_help_is_off_and_a_rollout_gpu_works(help_, workers, is_on):
    rollouts, _ = decided(help_, image=10.0, row=0.01, workers=workers)
    assert rollouts.ranks_sample is is_on

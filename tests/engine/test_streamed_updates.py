"""Units of groups, streamed in any order, train the weights of a batch that trains in one pass."""

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.algorithm.transaction import Trainer
from engine.algorithm_config import AlgorithmConfig
from engine.models.load import trainable
from engine.models.weights import get_weights
from engine.protocol.request import Group, Manifest
from tests.rank_training import PLAN, PROMPTS, Job, adapter_of, manifest_of, rolled_out

STEP = Manifest(
    run="r",
    lineage=1,
    batch=0,
    version=0,
    sampler=PLAN.signature,
    groups=manifest_of(0).groups,
    minibatches=(tuple(range(len(PROMPTS))),),
)
STEPS = 3
ORDERS_OF_ARRIVAL = ((7, 2, 5, 0, 3, 6, 1, 4), (7, 6, 5, 4, 3, 2, 1, 0))
ORDERS = ("fixed", "exact", "arrival")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Model:
    """A tiny Qwen-Image transformer with adapters, and rollouts of 8 groups made by the model itself."""

    def __init__(self, *, double: bool) -> None:
        self.adapter = adapter_of(Job(family="qwen-image", double=double, algorithm=AlgorithmConfig()))
        self.groups = rolled_out(self.adapter, Job(family="qwen-image", double=double, algorithm=AlgorithmConfig()))
        self.parameters = trainable(self.adapter)
        self._first = {name: value.detach().clone() for name, value in self.parameters.items()}

    def trained(self, arrivals, *, unit, rows, order, steps=STEPS):
        """Return the gradients before each optimiser step and the trainer after the last."""
        with torch.no_grad():
            for name, value in self.parameters.items():
                value.copy_(self._first[name])
        config = AlgorithmConfig(rows_per_forward=rows, order=order)
        trainer, gradients = Trainer(self.adapter, self.parameters, config), []
        trainer.optimizer.register_step_pre_hook(
            lambda *_: gradients.append({name: value.grad.clone() for name, value in self.parameters.items()})
        )
        for _ in range(steps):
            step = trainer.begin(replace(STEP, unit=unit), 0, PLAN)
            for number in arrivals:
                step.add(number, self.groups[number])
            step.commit()
            trainer.old.advance(0.0)
        return gradients, trainer


@pytest.fixture(scope="module")
def double():
    return Model(double=True)


@pytest.fixture(scope="module")
def single():
    return Model(double=False)


def farthest(these, those):
    return max(float((these[name].detach() - those[name]).abs().max()) for name in those)


@pytest.fixture(scope="module")
def one_shot(double):
    """Three AdamW steps, each of one pass with all groups."""
    gradients, trainer = double.trained(range(8), unit=0, rows=10_000, order="fixed")
    return gradients, {name: value.detach().clone() for name, value in trainer.parameters.items()}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("unit", "rows"), [(1, 10_000), (3, 10_000), (8, 4)])
def test_in_fp64_units_in_any_order_train_the_weights_of_one_pass(double, one_shot, order, unit, rows):
    expected, weights = one_shot
    assert max(float(value.abs().max()) for value in expected[0].values()) > 1e-3
    for arrivals in ORDERS_OF_ARRIVAL:
        gradients, trainer = double.trained(arrivals, unit=unit, rows=rows, order=order)
        assert len(gradients) == STEPS
        for found, wanted in zip(gradients, expected, strict=True):
            assert farthest(found, wanted) <= 1e-10
        assert farthest(trainer.parameters, weights) <= 1e-10


@given(
    arrivals=st.permutations(range(8)), unit=st.sampled_from([1, 2, 3, 8]), order=st.sampled_from(["fixed", "exact"])
)
@settings(max_examples=8, deadline=None, derandomize=True)
def test_in_fp32_every_order_of_arrival_gives_the_same_bits(single, arrivals, unit, order):
    _, straight = single.trained(range(8), unit=unit, rows=10_000, order=order, steps=1)
    wanted = get_weights(straight.parameters)
    _, trainer = single.trained(arrivals, unit=unit, rows=10_000, order=order, steps=1)
    assert get_weights(trainer.parameters) == wanted


@pytest.mark.parametrize("order", ORDERS)
def test_the_first_unit_trains_before_later_groups_are_there(single, order):
    trainer = Trainer(single.adapter, single.parameters, AlgorithmConfig(rows_per_forward=10_000, order=order))
    step = trainer.begin(replace(STEP, unit=2), 0, PLAN)
    seen = []
    for number in (0, 1, 2, 3):
        step.add(number, single.groups[number])
        seen.append(step.health.groups)
    step.abort()
    assert seen == [0, 2, 2, 4]


def test_a_unit_waits_for_all_of_its_groups_and_trains_in_passes_that_fit(single):
    trainer = Trainer(single.adapter, single.parameters, AlgorithmConfig(rows_per_forward=4))
    step = trainer.begin(replace(STEP, unit=2), 0, PLAN)
    step.add(0, single.groups[0])
    assert step.health.groups == 0
    step.add(1, single.groups[1])
    assert step.health.groups == 2
    step.abort()


def test_requests_come_in_the_order_of_training():
    """Idle workers take requests in this order, so the first unit is complete first."""
    groups = tuple(Group(prompt=str(number), seeds=(2 * number, 2 * number + 1)) for number in range(4))
    manifest = replace(STEP, groups=groups, minibatches=((2, 0), (3, 1)))
    assert [request.seed for request in manifest.requests()] == [4, 5, 0, 1, 6, 7, 2, 3]


def test_a_manifest_from_before_units_trains_as_many_groups_as_fit():
    old = {key: value for key, value in STEP.to_dict().items() if key != "unit"}
    assert Manifest.from_dict(old) == STEP
    assert Manifest.from_dict(replace(STEP, unit=3).to_dict()).unit == 3
    assert replace(STEP, unit=3).digest == STEP.digest


def test_rows_take_at_least_their_configured_time(single):
    trainer = Trainer(single.adapter, single.parameters, AlgorithmConfig(rows_per_forward=10_000, order="exact"))
    trainer.row_seconds = 0.1
    step = trainer.begin(replace(STEP, unit=1), 0, PLAN)
    begun = time.perf_counter()
    step.add(3, single.groups[3])
    assert time.perf_counter() - begun >= 0.1 * 2 * len(PLAN.trained_steps)
    step.abort()


def test_a_pass_takes_its_configured_time_beside_its_rows(single):
    rows = 2 * len(PLAN.trained_steps)
    trainer = Trainer(single.adapter, single.parameters, AlgorithmConfig(rows_per_forward=rows // 2, order="exact"))
    trainer.row_seconds, trainer.pass_seconds = 0.02, 0.3
    step = trainer.begin(replace(STEP, unit=1), 0, PLAN)
    begun = time.perf_counter()
    step.add(3, single.groups[3])
    assert time.perf_counter() - begun >= 0.02 * rows + 2 * 0.3
    step.abort()

"""Out of memory in training: passes are halved, and the step equals an undisturbed step of that size, bit for bit."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from diffusers import QwenImageTransformer2DModel

from engine.algorithm import transaction
from engine.algorithm.transaction import DoesNotFit, Trainer
from engine.diffusion.sampler import batch_plan
from engine.models.digits import TEXT_WIDTH, ByteText, DigitsAdapter
from engine.models.load import ReferencePolicy, freeze_but_trained, trainable
from engine.models.weights import get_weights, set_weights
from engine.storage.checkpoint import RowsThatFit
from tests.engine.test_loop import TINY, build, newest, outcome, progress
from tests.engine.test_objectives import MODELS, config_of, rolled_out

pytestmark = pytest.mark.usefixtures("one_layer")

ROWS = 12
"""Rows of a pass before any error: all rows of both groups with flow-grpo."""

FITS = 3
"""Rows that fit in these tests. 12 is halved to 6, then to 3."""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch):
    """Collecting garbage takes most of a second in a test process, and no device here runs out of memory."""
    monkeypatch.setattr(transaction, "free_memory", lambda: None)


def tiny(config):
    """digits-ocr with a single small layer of random weights."""
    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        patch_size=4,
        in_channels=16,
        out_channels=1,
        num_layers=1,
        attention_head_dim=12,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 4, 4),
    )
    adapter = DigitsAdapter(transformer, ByteText())
    freeze_but_trained(adapter, config)
    return adapter


@pytest.fixture(scope="module")
def models():
    """An adapter, its trained parameters and the bytes of the first weights, by kind of weights."""
    adapters = {name: tiny(config) for name, config in MODELS.items()}
    return {name: (one, trainable(one), get_weights(trainable(one))) for name, one in adapters.items()}


@pytest.fixture(scope="module")
def undisturbed(models):
    """Return the bits of an undisturbed step with these rows, by (weights, job, rows)."""

    @cache
    def bits(weights, name, rows):
        config = JOBS[name]
        return stepped(models[weights], config, rolled_out(models[weights], config), Room("nowhere"), rows=rows)[1]

    return bits


class Full(torch.autograd.Function):
    """Identity whose backward pass runs out of memory if there are too many rows."""

    @staticmethod
    def forward(context, x, room):
        context.room = room
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        context.room.use(len(gradient), "backward")
        return gradient, None


class Room:
    """The memory of a device: refuses passes with too many rows, at one point of the pass.

    `only`: numbers of the uses to refuse, counted from 0, whatever their rows. None: every use with too many rows.
    """

    def __init__(self, point, *, fits=FITS, only=None, error=None):
        self.point, self.fits, self.only = point, fits, only
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        self.uses, self.refused = [], 0

    def use(self, rows, point):
        if point != self.point:
            return
        self.uses.append(rows)
        full = rows > self.fits if self.only is None else len(self.uses) - 1 in self.only
        if full:
            self.refused += 1
            raise self.error


class Limited:
    """An adapter on a device with little memory."""

    def __init__(self, adapter, room):
        self._adapter, self._room = adapter, room
        self.transformer = adapter.transformer

    def __getattr__(self, name):
        return getattr(self._adapter, name)

    def velocity(self, x, sigma, conditioning, guidance):
        point = "forward" if torch.is_grad_enabled() else "without gradient"
        self._room.use(len(x), point)
        return Full.apply(self._adapter.velocity(x, sigma, conditioning, guidance), self._room)


def limit_losses(trainer, room):
    """Let the loss run out of memory after the network's pass."""
    plain = trainer.objective.losses

    def losses(adapter, plan, rows):
        found = plain(adapter, plan, rows)
        room.use(len(rows), "loss")
        return found

    trainer.objective.losses = losses


def stepped(model, config, made, room, *, rows=ROWS, order=(0, 1), between=lambda trainer: None):
    """Train one batch of two groups twice, the second time with an old policy that differs. Return all bits of both.

    `between`: called after each group.
    """
    adapter, parameters, first = model
    set_weights(parameters, first)
    algorithm = config.algorithm.model_copy(update={"rows_per_forward": rows})
    reference = ReferencePolicy.of(adapter)
    trainer = Trainer(Limited(adapter, room), parameters, algorithm, reference)
    limit_losses(trainer, room)
    manifest, groups = made
    manifest = replace(manifest, minibatches=((0, 1),))
    bits = []
    for _ in range(2):
        step = trainer.begin(manifest, 0, batch_plan(config, 0))
        for number in order:
            step.add(number, groups[number])
            between(trainer)
        bits.append({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
        health = step.commit()
        bits.append(health.summary())
        bits.append(get_weights(parameters))
    return trainer, bits


def assert_close(these, those):
    largest = max(float(value.abs().max()) for value in those.values())
    assert largest > 0
    assert all(float((these[name] - value).abs().max()) <= 1e-5 * largest for name, value in those.items())


def assert_equal(these, those):
    for one, other in zip(these, those, strict=True):
        if isinstance(one, dict) and isinstance(next(iter(one.values())), torch.Tensor):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
        else:
            assert one == other


JOBS = {
    "grpo": config_of("flow-grpo", kl_beta=0.1),
    "guard": config_of("grpo-guard"),
    "nft": config_of("diffusion-nft", diffusion_nft={"reference_weight": 0.1}),
}
GRPO = JOBS["grpo"]
CPU = RuntimeError("alloc_cpu.cpp:127 err == 0. DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")
POINTS = {
    "forward": ("lora", "grpo", Room("forward")),
    "loss": ("lora", "grpo", Room("loss")),
    "backward": ("full", "grpo", Room("backward")),
    "reference without adapters": ("lora", "grpo", Room("without gradient")),
    "reference weights": ("full", "grpo", Room("without gradient")),
    "old policy": ("lora", "nft", Room("without gradient")),
    "grpo-guard": ("lora", "guard", Room("backward")),
    "cpu": ("lora", "grpo", Room("forward", error=CPU)),
    "host": ("lora", "grpo", Room("forward", error=MemoryError())),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_step_without_memory_equals_an_undisturbed_step_of_the_rows_that_fit(models, undisturbed, point):
    weights, name, room = POINTS[point]
    trainer, found = stepped(models[weights], JOBS[name], rolled_out(models[weights], JOBS[name]), room)
    assert room.refused == 2  # 12, then 6 rows; with diffusion-nft 9, then 4
    assert trainer.rows_per_forward <= FITS
    assert_equal(found, undisturbed(weights, name, trainer.rows_per_forward))
    assert_close(found[0], undisturbed(weights, name, ROWS)[0])


@pytest.mark.parametrize("point", ["forward", "loss", "backward", "without gradient"])
@pytest.mark.parametrize("late", [1, 3, 5])
def test_an_error_late_in_the_step_neither_loses_nor_doubles_a_gradient(models, undisturbed, point, late):
    """Passes of 3 rows, 4 a step: the error comes in the second half of a group, in the last group or the next step."""
    room = Room(point, only={late})
    trainer, found = stepped(models["lora"], GRPO, rolled_out(models["lora"], GRPO), room, rows=3)
    assert (room.refused, trainer.rows_per_forward) == (1, 1)
    first, small = undisturbed("lora", "grpo", 3), undisturbed("lora", "grpo", 1)
    if late < 4:  # the disturbed step starts again whole
        assert_equal(found, small)
    else:  # a step before the error keeps its rows
        assert_equal(found[:3], first[:3])
        assert_close(found[3], first[3])


def test_in_order_of_arrival_a_disturbed_step_trains_every_group_once(models):
    config = config_of("flow-grpo", order="arrival")
    made = rolled_out(models["lora"], config)
    _, found = stepped(models["lora"], config, made, Room("backward", only={1}), rows=6, order=(1, 0))
    _, expected = stepped(models["lora"], config, made, Room("nowhere"), rows=3, order=(1, 0))
    assert_equal(found, expected)


@pytest.mark.parametrize(("error", "text"), [(None, "CUDA out of memory"), (MemoryError(), "MemoryError")])
def test_a_single_row_that_does_not_fit_is_refused_with_what_would_do(models, error, text):
    made = rolled_out(models["lora"], GRPO)
    remedy = "checkpointing: on, weights: lora, smaller images"
    with pytest.raises(DoesNotFit, match=f"one row .* does not fit .*{text}.*{remedy}"):
        stepped(models["lora"], GRPO, made, Room("forward", fits=0, error=error))


def test_other_errors_are_not_taken_for_memory(models):
    made = rolled_out(models["lora"], GRPO)
    with pytest.raises(RuntimeError, match="shapes differ"):
        stepped(models["lora"], GRPO, made, Room("forward", only={0}, error=RuntimeError("shapes differ")))


def test_log_probs_that_the_trainer_computes_again_are_halved_too(models):
    adapter, parameters, first = models["lora"]
    manifest, groups = rolled_out(models["lora"], GRPO)
    set_weights(parameters, first)
    trainer = Trainer(Limited(adapter, Room("without gradient", fits=1)), parameters, GRPO.algorithm)
    told = []
    trainer.on_fewer_rows = lambda rows, error: told.append(rows)
    trajectory = groups[0].trajectories[0]
    lost = replace(trajectory, log_probs=torch.zeros(2))
    again = trainer.with_own_log_probs(manifest.groups[0].prompt, lost, batch_plan(GRPO, 0))
    torch.testing.assert_close(again.log_probs, trajectory.log_probs, atol=1e-5, rtol=0)
    assert told == [1]


def test_a_step_starts_again_if_log_probs_did_not_fit_between_two_groups(models, undisturbed):
    """The trainer computes log-probs of late images while it waits for the second group of the step."""

    def halve(trainer):
        if trainer.rows_per_forward == 6:
            trainer.halve(6, "no room for log-probs")

    _, found = stepped(models["lora"], GRPO, rolled_out(models["lora"], GRPO), Room("nowhere"), rows=6, between=halve)
    assert_equal(found, undisturbed("lora", "grpo", 3))


# --- a whole run


def limited(run, room):
    run.loop.model.trainer.adapter = Limited(run.loop.model.trainer.adapter, room)


def test_a_run_that_runs_out_of_memory_says_so_goes_on_and_remembers_it(tmp_path):
    run = build(TINY, tmp_path / "full")
    limited(run, Room("backward", fits=2))
    assert run.loop.run().reason == "iterations"
    told = [event.text for event in progress(tmp_path / "full", "warned")]
    assert [text for text in told if "at most 2 rows from now on" in text and "rows_per_forward: 2" in text]
    assert len(told) == 1
    assert [one.health["rows_per_forward"] for one in progress(tmp_path / "full", "iteration_done")] == [2.0] * 3
    assert newest(tmp_path / "full").fits == RowsThatFit(device="cpu", rows=2)

    small = TINY.model_copy(update={"algorithm": TINY.algorithm.model_copy(update={"rows_per_forward": 2})})
    assert build(small, tmp_path / "small").loop.run().reason == "iterations"
    assert outcome(tmp_path / "full") == outcome(tmp_path / "small")

    more = build(TINY.model_copy(update={"iterations": 4}), tmp_path / "full")
    more.loop.begin()
    assert more.loop.model.trainer.rows_per_forward == 2


def test_rows_found_on_another_device_do_not_count(tmp_path):
    run = build(TINY, tmp_path)
    run.loop.state.fits = RowsThatFit(device="NVIDIA L4", rows=2)
    run.loop.memory.restore()
    assert run.loop.model.trainer.rows_per_forward == TINY.algorithm.rows_per_forward


def test_a_run_whose_single_row_does_not_fit_ends_with_the_reason(tmp_path):
    run = build(TINY, tmp_path)
    limited(run, Room("forward", fits=0))
    finished = run.loop.run()
    assert finished.reason == "unhealthy"
    assert "smaller images, or a GPU with more memory" in finished.text

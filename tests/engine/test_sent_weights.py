"""Adapters travel to workers in bfloat16 if workers merge them; the trainer and its checkpoints keep fp32."""

from copy import deepcopy

import pytest
import torch

from engine.algorithm_config import AlgorithmConfig
from engine.config import ModelConfig
from engine.models.load import freeze_but_trained, trainable
from engine.models.weights import read_tensors, set_weights
from engine.trainer.model import BEFORE, OLD, TrainedModel
from engine.trainer.outbox import Outbox
from tests.engine.test_families import FAMILIES
from tests.engine.test_merge import half, set_version


def values(adapter):
    return {name: parameter.detach().clone() for name, parameter in trainable(adapter).items()}


def rounded(tensors):
    return {name: value.to(torch.bfloat16).float() for name, value in tensors.items()}


def equal(these, those):
    """Compare bits and dtypes."""
    assert these.keys() == those.keys()
    return all(value.dtype == those[name].dtype and torch.equal(value, those[name]) for name, value in these.items())


@pytest.fixture
def adapter():
    adapter = half()
    set_version(adapter, 1)
    return adapter


@pytest.fixture
def model(adapter, tmp_path):
    return TrainedModel(adapter, AlgorithmConfig(), None, Outbox(tmp_path / "outbox", print))


def test_a_worker_gets_the_trainers_adapters_rounded_to_bfloat16(adapter, model):
    master, worker = values(adapter), deepcopy(adapter)
    set_version(worker, 2)
    sent = model.rollout_weights().open()
    assert {entry.dtype for entry in sent.entries().values()} == {"BF16"}
    set_weights(trainable(worker), sent)
    assert equal(values(worker), rounded(master))
    assert not equal(values(worker), master)
    assert equal(values(adapter), master)


def test_adapters_travel_in_half_the_bytes(adapter, model):
    count = sum(parameter.numel() for parameter in model.parameters.values())
    sent = model.rollout_weights().open()
    assert sum(entry.size for entry in sent.entries().values()) == 2 * count


def test_a_checkpoint_keeps_the_fp32_weights_and_the_fp32_old_policy(adapter, model, tmp_path):
    model.trainer.old.keep()
    old = values(adapter)
    set_version(adapter, 2)
    files = {name: file.open() for name, file in model.files(model.rollout_weights()).items()}
    assert equal(read_tensors(files["weights"]), values(adapter))
    assert equal(read_tensors(files[OLD]), old)
    assert equal(read_tensors(files["ema"]), old)
    set_version(adapter, 3)
    again = TrainedModel(adapter, AlgorithmConfig(), None, Outbox(tmp_path / "again", print))
    assert again.restore(files, 1)
    assert not equal(values(adapter), old)
    with again.old_policy():
        assert equal(values(adapter), old)


def test_the_weights_that_made_early_groups_go_through_a_checkpoint_in_fp32(adapter, model, tmp_path):
    first = values(adapter)
    model.trainer.old.keep()
    set_version(adapter, 2)
    model.follow(0, early_follows=True)
    files = {name: file.open() for name, file in model.files(model.rollout_weights()).items()}
    assert equal(read_tensors(files[BEFORE]), first)
    again = TrainedModel(adapter, AlgorithmConfig(), None, Outbox(tmp_path / "again", print))
    assert again.restore(files, 1)
    with again.trainer.old.before_active():
        assert equal(values(adapter), first)
    again.trainer.old.keep()
    again.follow(1, early_follows=False)
    assert BEFORE not in again.files(again.rollout_weights()), "the batch after it has no early group"


def test_a_checkpoint_without_an_old_policy_has_the_fp32_weights(adapter, model):
    files = model.files(model.rollout_weights())
    assert files.keys() == {"weights", "ema", "optimizer"}
    assert equal(read_tensors(files["weights"].open()), values(adapter))


def test_the_trainer_evaluates_what_workers_evaluate(adapter, model):
    master = values(adapter)
    set_version(adapter, 2)
    with model.exchanged(model.average_weights("evaluated")):
        assert equal(values(adapter), rounded(master))
    assert not equal(values(adapter), rounded(master))


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_weights_of_a_model_in_fp32_travel_as_they_are(weights, tmp_path):
    torch.manual_seed(0)
    adapter = FAMILIES["sd3"].build()
    freeze_but_trained(adapter, ModelConfig(weights=weights, lora_rank=2))
    model = TrainedModel(adapter, AlgorithmConfig(), None, Outbox(tmp_path / "outbox", print))
    sent = model.rollout_weights()
    assert equal(read_tensors(sent.open()), values(adapter))
    assert model.files(sent)["weights"] is sent
    model.trainer.old.keep()
    model.follow(0, early_follows=True)
    assert model.trainer.old.before is None, "workers compute the log-probs as the trainer does, so theirs are taken"

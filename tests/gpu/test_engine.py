"""The engine on a GPU: every family is rolled out, scored and trained there, and resumes from its checkpoint.

The same functions run on the CPU with one family. No test checks speed, because the models are tiny.
"""

import json
import time

import pytest
import torch

from engine.algorithm_config import AlgorithmConfig
from engine.clock import ScaledClock
from engine.config import (
    VIDEO,
    EngineConfig,
    EvaluationConfig,
    ExplorationConfig,
    ModelConfig,
    RuntimeConfig,
    SamplerConfig,
)
from engine.diffusion.sampler import denoise, rollout_plan
from engine.entrypoints.inproc import build_inproc
from engine.models.digits import load_digits
from engine.models.load import freeze_but_trained, load_adapter, load_family, trainable
from engine.protocol.request import Score
from tests.engine.test_families import brightness
from tests.gpu.device import needs_gpus
from tests.gpu.figures import describe_device, keep_figures
from tests.tiny_pipelines import PIPELINES, make_sd3

UPDATES = 2
"""Optimiser steps of an iteration."""
IMAGES = 48
BOUND = 1e-3
"""Tolerance of images in [-1, 1], which are stored in steps of 8e-3; both devices compute in fp32."""


SMALL = {"height": 16, "width": 16, "max_text_tokens": 20}

GUIDANCE = {"digits-ocr": 1.0} | dict.fromkeys(PIPELINES, 2.0)


def loader(family, folder):
    """Return a function that loads a family's small weights on a device like a node, but in fp32."""
    if family == "digits-ocr":
        return lambda device: load_digits(device=device)
    torch.manual_seed(0)
    PIPELINES[family]().save_pretrained(folder)
    frames = {"frames": 5} if family in VIDEO else {}
    model = ModelConfig(name=family, path=str(folder), **SMALL, **frames)
    return lambda device: load_family(model, device, torch.float32)


def score(sampled_images, prompts):
    return [Score(reward=float(value), metrics={}) for value in brightness(sampled_images)]


def run(load, guidance, weights, device, folder, iterations):
    """Do a whole run with a spot worker on one device, or its remaining iterations."""

    def make_adapter():
        adapter = load(device)
        freeze_but_trained(adapter, ModelConfig(weights=weights, lora_rank=2))
        return adapter

    config = EngineConfig(
        iterations=iterations,
        sampler=SamplerConfig(steps=3, guidance=1.0),
        algorithm=AlgorithmConfig(prompts_per_batch=2, images_per_prompt=2, updates_per_batch=UPDATES, kl_beta=0.01),
        exploration=ExplorationConfig(mode="none"),
        evaluation=EvaluationConfig(prompts=2, every=1, steps=2),
        runtime=RuntimeConfig(name="inproc", shape=2),
    )
    config = config.model_copy(update={"sampler": SamplerConfig(steps=3, guidance=guidance)})
    clock = ScaledClock(origin_ms=0)
    made = build_inproc(config, folder, run="tiny", clock=clock, reward=score, workers=1, make_adapter=make_adapter)
    finished = made.loop.run()
    assert finished.reason == "iterations", finished.text
    return made.loop


def run_and_go_on(family, weights, device, folder):
    load = loader(family, folder / "model")
    run(load, GUIDANCE[family], weights, device, folder, 1)
    loop = run(load, GUIDANCE[family], weights, device, folder, 2)
    lines = [json.loads(line) for line in (folder / "progress" / "trainer.jsonl").read_text().splitlines()]
    first, second = [line["event"]["health"] for line in lines if line["kind"] == "iteration_done"]
    for health in (first, second):
        assert health["dlogp_before_update"] < 1e-4
        assert health["skipped_groups"] == 0
        assert health["gradient_norm"] > 0
    state = loop.model.trainer.optimizer_state()
    assert {float(value) for name, value in state.items() if name.endswith("|step")} == {2.0 * UPDATES}
    assert {value.device.type for value in state.values()} == {torch.device(device).type}
    assert all(bool(parameter.isfinite().all()) for parameter in loop.model.parameters.values())


def sampled_images(device):
    """Return images of the shipped base with the same seeds on every device, and the seconds taken."""
    adapter = load_adapter(ModelConfig(), device)
    plan = rollout_plan(SamplerConfig(), run_seed=0, batch=0)
    conditioning = adapter.encode([f"{number:04d}" for number in range(IMAGES)])
    denoise(adapter, plan, conditioning, range(IMAGES))
    begun = time.perf_counter()
    made = adapter.decode(denoise(adapter, plan, conditioning, range(IMAGES))).cpu()
    return made, time.perf_counter() - begun


def test_a_run_resumes_from_its_checkpoint_on_the_cpu(tmp_path):
    run_and_go_on("qwen-image", "lora", "cpu", tmp_path)


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize("weights", ["full", "lora"])
@pytest.mark.parametrize("family", GUIDANCE)
def test_a_run_resumes_from_its_checkpoint_on_one_gpu(family, weights, tmp_path):
    run_and_go_on(family, weights, "cuda:0", tmp_path)


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize("weights", ["full", "lora"])
def test_a_model_is_moved_to_the_gpu_with_only_trained_weights_in_fp32(weights, tmp_path):
    make_sd3().save_pretrained(tmp_path)
    adapter = load_adapter(ModelConfig(name="sd3", path=str(tmp_path), weights=weights), "cuda:0")
    whole = [*adapter.transformer.parameters(), *adapter._vae.parameters(), *adapter.encode(["a cat"]).values()]
    assert {str(one.device) for one in whole} == {"cuda:0"}
    assert {parameter.dtype for parameter in trainable(adapter).values()} == {torch.float32}
    assert {parameter.dtype for parameter in adapter._vae.parameters()} == {torch.bfloat16}


@pytest.mark.gpu
@needs_gpus(1)
def test_low_rank_adapters_are_equal_on_a_gpu_and_use_no_gpu_random_numbers(tmp_path):
    load, made = loader("qwen-image", tmp_path), []
    before = torch.cuda.get_rng_state()
    for device in ("cpu", "cuda:0"):
        adapter = load(device)
        torch.cuda.set_rng_state(before)
        freeze_but_trained(adapter, ModelConfig(weights="lora", lora_rank=2))
        made.append({name: parameter.cpu() for name, parameter in trainable(adapter).items()})
    assert all(torch.equal(value, made[1][name]) for name, value in made[0].items())
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.gpu
@needs_gpus(1)
def test_a_gpu_samples_the_same_images_as_the_cpu():
    (here, cpu_seconds), (there, gpu_seconds) = sampled_images("cpu"), sampled_images("cuda:0")
    largest = float((here - there).abs().max())
    assert largest <= BOUND
    figures = {"max_diff": largest, "pictures": IMAGES, "steps": 8, "cpu_s": cpu_seconds, "gpu_s": gpu_seconds}
    keep_figures("digits-ocr pictures, CPU and GPU", figures, describe_device())

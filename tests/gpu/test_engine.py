"""The engine on a GPU: every family is rolled out, scored and trained there, and goes on from its checkpoint.

The same functions run on the CPU with one family. Nothing here asks for speed: the models are tiny.
"""

import json
import multiprocessing
import time

import pytest
import torch

from engine.clock import ScaledClock
from engine.config import (
    AlgorithmConfig,
    EngineConfig,
    EvaluationConfig,
    ExplorationConfig,
    ModelConfig,
    RuntimeConfig,
    SamplerConfig,
)
from engine.models.load import freeze_but_trained, load_adapter, trainable
from engine.models.text import EncodedText
from engine.rollout.request import Score
from engine.rollout.sampler import denoise, rollout_plan
from engine.runtime.inproc import build_inproc
from tests.engine.test_families import FAMILIES, brightness
from tests.gpu.device import describe_device, keep_figures, needs_gpus

UPDATES = 2
"""Optimiser steps of an iteration."""
PICTURES = 48
BOUND = 1e-3
"""Of pictures in [-1, 1], which are kept in steps of 8e-3; both devices compute in fp32."""


def placed(adapter, device):
    """The model on a device, with its autoencoder and its text."""
    adapter.transformer.to(device)
    for name in ("_vae", "text"):
        if hasattr(adapter, name):
            getattr(adapter, name).to(device)
    if hasattr(adapter, "_text"):
        adapter._text = Text(adapter._text, device)
    return adapter


class Text:
    """A text encoder whose answers are on a device."""

    def __init__(self, encoder, device):
        self._encoder, self._device = encoder, device

    def __call__(self, prompts):
        found = self._encoder(prompts)
        pooled = None if found.pooled is None else found.pooled.to(self._device)
        return EncodedText(found.hidden.to(self._device), found.mask.to(self._device), pooled)


def score(pictures, prompts):
    return [Score(reward=float(value), metrics={}) for value in brightness(pictures)]


def run(family, weights, device, folder, iterations):
    """A whole run with a spot worker, all on one device, or what is left of it."""

    def make_adapter():
        torch.manual_seed(0)
        adapter = placed(family.build(), device)
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
    config = config.model_copy(update={"sampler": SamplerConfig(steps=3, guidance=family.guidance)})
    clock = ScaledClock(origin_ms=0)
    made = build_inproc(config, folder, run="tiny", clock=clock, reward=score, workers=1, make_adapter=make_adapter)
    finished = made.loop.run()
    assert finished.reason == "iterations", finished.text
    return made.loop


def run_and_go_on(family, weights, device, folder):
    run(family, weights, device, folder, 1)
    loop = run(family, weights, device, folder, 2)
    told = [json.loads(line) for line in (folder / "progress" / "trainer.jsonl").read_text().splitlines()]
    first, second = [line["event"]["health"] for line in told if line["kind"] == "iteration_done"]
    for health in (first, second):
        assert health["dlogp_before_update"] < 1e-4
        assert health["skipped_groups"] == 0
        assert health["gradient_norm"] > 0
    state = loop.trainer.optimizer_state()
    assert {float(value) for name, value in state.items() if name.endswith("|step")} == {2.0 * UPDATES}
    assert {value.device.type for value in state.values()} == {torch.device(device).type}
    assert all(bool(parameter.isfinite().all()) for parameter in loop.parameters.values())


def pictures(device):
    """Pictures of the shipped base, the same seeds whatever the device; and seconds that they took."""
    adapter = placed(load_adapter(ModelConfig()), device)
    plan = rollout_plan(SamplerConfig(), run_seed=0, batch=0)
    conditioning = adapter.encode([f"{number:04d}" for number in range(PICTURES)])
    denoise(adapter, plan, conditioning, range(PICTURES))
    begun = time.perf_counter()
    made = adapter.decode(denoise(adapter, plan, conditioning, range(PICTURES))).cpu()
    return made, time.perf_counter() - begun


def test_a_run_goes_on_from_its_checkpoint_on_the_cpu(tmp_path):
    run_and_go_on(FAMILIES["qwen-image"], "lora", "cpu", tmp_path)


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize("weights", ["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_a_run_goes_on_from_its_checkpoint_on_one_gpu(family, weights, tmp_path):
    run_and_go_on(family, weights, "cuda:0", tmp_path)


@pytest.mark.gpu
@needs_gpus(1)
def test_low_rank_adapters_are_the_same_on_a_gpu_and_draw_no_number_of_its_own():
    made = []
    before = torch.cuda.get_rng_state()
    for device in ("cpu", "cuda:0"):
        torch.manual_seed(0)
        adapter = placed(FAMILIES["qwen-image"].build(), device)
        torch.cuda.set_rng_state(before)
        freeze_but_trained(adapter, ModelConfig(weights="lora", lora_rank=2))
        made.append({name: parameter.cpu() for name, parameter in trainable(adapter).items()})
    assert all(torch.equal(value, made[1][name]) for name, value in made[0].items())
    assert torch.equal(torch.cuda.get_rng_state(), before)


def sum_on(device, pipe):
    pipe.send(float(torch.ones(8, device=device).sum()))


@pytest.mark.gpu
@needs_gpus(1)
def test_what_a_node_agent_forks_can_use_a_gpu():
    """Whatever is loaded before the fork (engine/runtime/agent.py) must not have looked for one."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    program = multiprocessing.get_context("spawn").Process(target=fork_as_the_agent_does, args=(theirs,))
    program.start()
    try:
        assert ours.poll(120), "no answer"
        assert ours.recv() == 8.0
    finally:
        program.kill()


def fork_as_the_agent_does(pipe):
    """In a process of its own: a forkserver is started once, and the tests' has diffusers in it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engine.runtime.processes"])
    forked = context.Process(target=sum_on, args=("cuda:0", pipe))
    forked.start()
    forked.join()


@pytest.mark.gpu
@needs_gpus(1)
def test_a_gpu_draws_the_pictures_that_the_cpu_draws():
    (here, cpu_seconds), (there, gpu_seconds) = pictures("cpu"), pictures("cuda:0")
    largest = float((here - there).abs().max())
    assert largest <= BOUND
    figures = {"max_diff": largest, "pictures": PICTURES, "steps": 8, "cpu_s": cpu_seconds, "gpu_s": gpu_seconds}
    keep_figures("digits-ocr pictures, CPU and GPU", figures, describe_device())

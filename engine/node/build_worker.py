"""Build a worker of a node, for any transport and weight source."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import engine.rewards.ocr  # noqa: F401  preloaded
from engine.models.adapter import DiTAdapter
from engine.models.compiled import compile_blocks
from engine.models.fetch import fetched
from engine.models.load import load_adapter, trainable
from engine.models.pipeline_text import prepare_prompts
from engine.node.alone import touch
from engine.node.child import FINISHED_FILE
from engine.node.node_store import join_groups
from engine.node_spec import NodeSpec
from engine.pool.client import PoolReward
from engine.prompts import prompt_source, prompts_of_job
from engine.rewards.load import load_reward_of_job, load_student
from engine.rewards.purse import Purse
from engine.rewards.reward import Reward
from engine.timing.work import work_seconds
from engine.worker.coordinator_purse import CoordinatorPurse
from engine.worker.device import device_of
from engine.worker.scoring_call import ScoreLimits
from engine.worker.step_trace import step_trace
from engine.worker.transport import Transport
from engine.worker.weight_source import WeightSource
from engine.worker.worker import Worker

MOST_PROMPTS = 20_000
"""Prompts of the job known to the text encoders, in the order of their use."""


def make_worker(
    spec: NodeSpec, number: int, transport: Transport, source: WeightSource, draining: Callable[[], bool]
) -> Worker:
    """Return the worker with this number on its node, for any transport and weight source.

    The worker uses one torch thread.
    """
    torch.set_num_threads(1)
    adapter = load_model(spec, number)
    elastic = join_groups(spec, adapter)
    if spec.engine.model.compile == "on":
        compile_blocks(adapter.transformer)
    device = device_of(spec.engine.runtime.device, number)
    purse = CoordinatorPurse(transport, worker=f"{spec.node}/{number}", node=spec.node)
    trace = step_trace(spec, f"worker-{number}", lambda: 1 if elastic is None else elastic.degree)
    return Worker(
        name=f"{spec.node}/{number}",
        node=spec.node,
        workers_of_node=spec.workers,
        transport=transport,
        adapter=adapter,
        parameters=trainable(adapter),
        reward=reward_of_node(spec, number, purse),
        score_limits=ScoreLimits(reward=spec.engine.reward),
        scored_beside=spec.engine.reward.scored_beside,
        scores_share_core=spec.engine.reward.placed == "with_rollout",
        student=lambda: load_student(spec.engine, spec.workdir, device=device, purse=purse),
        clock=spec.clock.clock(),
        meter=spec.clock.meter(),
        seconds=work_seconds(spec.engine),
        heartbeat_seconds=spec.engine.runtime.heartbeat_seconds,
        step_seconds=spec.engine.runtime.step_seconds,
        resume=spec.engine.runtime.resume,
        source=source,
        draining=draining,
        trace=trace.stepped,
        finished=partial(touch, Path(spec.folder) / FINISHED_FILE),
        on_regroup=trace.regrouped,
        elastic=elastic,
    )


def reward_of_node(spec: NodeSpec, number: int, purse: Purse) -> Reward:
    """Return the reward for process `number` of a node: the node's scoring processes, or the scorer itself.

    `purse`: the only one of the process. The coordinator would take a second one for a restart, and count the money
    that the first holds as spent.
    """
    pool = spec.engine.reward.scoring_pool
    if pool is not None:
        return PoolReward(Path(spec.folder), processes=pool.processes, tries=pool.tries, first=number)
    device = device_of(spec.engine.runtime.device, number)
    return load_reward_of_job(spec.engine, spec.workdir, device=device, purse=purse)


def load_model(spec: NodeSpec, number: int, *, reads_later: bool = False) -> DiTAdapter:
    """Load the model on this process's device. CUDA is first used here, because the forkserver must never use CUDA.

    `reads_later`: see `load_adapter`.
    """
    device = device_of(spec.engine.runtime.device, number)
    print(f"computes on {device}", flush=True)
    model = spec.engine.model
    # Store beside the node's folder, because the machine's next node may replace the folder.
    below = Path(spec.folder).parent / "weights"
    for field, url in (("path", spec.weights), ("lora", spec.lora)):
        if url:
            model = model.model_copy(update={field: str(fetched(url, below, partial(print, flush=True)))})
    encode_first = partial(
        prepare_prompts,
        prompts=partial(_prompts, spec),
        folder=Path(spec.folder) / "prompts",
        share=number / spec.workers,
    )
    return load_adapter(model, device, reads_later=reads_later, encode_first=encode_first)


def _prompts(spec: NodeSpec) -> list[str]:
    source = prompt_source(spec.engine, spec.workdir)
    return prompts_of_job(source, spec.engine.iterations, MOST_PROMPTS)

"""Run a whole run in one process: coordinator, trainer and workers take turns.

Tests use this module, and a developer can debug a run step by step.

Workers run when the trainer waits, so a run is a fixed sequence of calls and repeats bit for bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.clock import Clock
from engine.config import EngineConfig
from engine.coordinator.coordinator import Coordinator
from engine.coordinator.open import fund_of, open_coordinator
from engine.models.adapter import DiTAdapter
from engine.models.compiled import compile_blocks
from engine.models.load import load_adapter, trainable
from engine.prompts import PromptSource, prompt_source
from engine.protocol.codec import Blobs
from engine.protocol.request import Exit
from engine.rewards.load import load_student
from engine.rewards.reward import Reward
from engine.storage.checkpoint import CheckpointStore
from engine.storage.progress import ProgressLog
from engine.trainer.context import TrainerContext
from engine.trainer.loop import Loop
from engine.trainer.metrics import MetricsLog
from engine.worker.device import device_of
from engine.worker.scoring_call import ScoreLimits
from engine.worker.transport import Answer, InprocTransport
from engine.worker.worker import Worker


class _Turns:
    """Trainer's transport to the coordinator. Instead of waiting, the trainer gives each worker a turn."""

    def __init__(self, coordinator: Coordinator, workers: list[Worker]) -> None:
        self._inner = InprocTransport(coordinator)
        self._workers = workers

    def call(self, head: Mapping[str, Any], blobs: Blobs | None = None, *, wait: bool = False) -> Answer:
        if wait:
            for worker in list(self._workers):
                if isinstance(worker.serve_once(wait=False), Exit):
                    self._workers.remove(worker)
        return self._inner.call(head, blobs)


@dataclass(kw_only=True)
class InprocRun:
    """Parts of one run. `loop.run()` runs the run."""

    coordinator: Coordinator
    loop: Loop
    workers: list[Worker]


def build_inproc(
    config: EngineConfig,
    folder: Path,
    *,
    run: str,
    clock: Clock,
    reward: Reward,
    workers: int,
    make_adapter: Callable[[], DiTAdapter] | None = None,
    prompts: PromptSource | None = None,
    judges_micro_usd: int | None = None,
) -> InprocRun:
    """Build a run with `workers` spot workers, its journal, checkpoints and progress under `folder`.

    `make_adapter` gives the trainer and every worker a separate model, all with equal weights. The default loads the
    model named by the config. `prompts`: None for the prompts named by the config.
    `judges_micro_usd`: as in a NodeSpec.
    """
    make_adapter = make_adapter or (lambda: load_adapter(config.model, device_of(config.runtime.device, 0)))
    progress = ProgressLog(folder / "progress" / "coordinator.jsonl", run=run, source="coordinator", clock=clock)
    store = (folder.absolute() / "store").as_uri()
    coordinator = open_coordinator(
        folder / "coordinator",
        clock=clock,
        runtime=config.runtime,
        progress=progress,
        fund=fund_of(config.reward, store, judges_micro_usd),
    )
    spot = []
    for number in range(workers):
        adapter = make_adapter()
        if config.model.compile == "on":
            compile_blocks(adapter.transformer)
        worker = Worker(
            name=f"spot-{number}/0",
            node=f"spot-{number}",
            workers_of_node=1,
            transport=InprocTransport(coordinator),
            adapter=adapter,
            parameters=trainable(adapter),
            reward=reward,
            score_limits=ScoreLimits(reward=config.reward),
            student=lambda: load_student(config),
            clock=clock,
            heartbeat_seconds=config.runtime.heartbeat_seconds,
            scored_beside=0,
            overlap_commits=False,
            step_seconds=config.runtime.step_seconds,
        )
        spot.append(worker)
    context = TrainerContext(
        run=run,
        node="trainer",
        workers_of_node=1,
        outbox=folder / "outbox",
        store=CheckpointStore(store, "trainer"),
        transport=_Turns(coordinator, spot),
        progress=ProgressLog(folder / "progress" / "trainer.jsonl", run=run, source="trainer", clock=clock),
        metrics=MetricsLog(folder / "metrics"),
        clock=clock,
    )
    loop = Loop(config, context, make_adapter(), reward, prompts or prompt_source(config, None))
    return InprocRun(coordinator=coordinator, loop=loop, workers=spot)

"""Resources that the trainer's process gives to the loop."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from engine.clock import Clock
from engine.protocol.request import Work
from engine.storage.checkpoint import CheckpointStore
from engine.storage.progress import ProgressLog
from engine.trainer.cadence import ON_DEMAND_HOURS
from engine.trainer.metrics import MetricsLog
from engine.work_clock import NoMeter, WorkMeter
from engine.worker.transport import Transport


@dataclass(frozen=True, kw_only=True)
class TrainerContext:
    """Names, stores, logs, clock and the transport to the coordinator.

    `outbox`: folder for files of tensors, on the coordinator's disk. `trace`: called after every denoising step of the
    trainer's own rollouts, with the number of finished steps. `watch_lineage`: called with the trainer's lineage once
    that is settled; ends this process when a newer one is claimed. `life_hours`: mean life of this node, in hours.
    """

    run: str
    node: str
    workers_of_node: int
    outbox: Path
    store: CheckpointStore
    transport: Transport
    progress: ProgressLog
    metrics: MetricsLog
    clock: Clock
    meter: WorkMeter = field(default_factory=NoMeter)
    trace: Callable[[Work, int], None] = lambda work, step: None
    watch_lineage: Callable[[int], None] = lambda lineage: None
    life_hours: float = ON_DEMAND_HOURS

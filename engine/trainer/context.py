"""Resources that the trainer's process gives to the loop."""

from dataclasses import dataclass
from pathlib import Path

from engine.clock import Clock
from engine.storage.checkpoint import CheckpointStore
from engine.storage.progress import ProgressLog
from engine.trainer.metrics import MetricsLog
from engine.worker.transport import Transport


@dataclass(frozen=True, kw_only=True)
class TrainerContext:
    """Names, stores, logs, clock and the transport to the coordinator.

    `outbox`: folder for files of tensors, on the coordinator's disk.
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

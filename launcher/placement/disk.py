"""The size of a node's boot disk, from what a run puts there. Pure.

A node's model may lie on local NVMe instead (engine/node/local_disk.py). The boot disk must hold the model all the
same, because local NVMe may be in use or fail.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.job.resolved import Resolved
from launcher.market.side_prices import DISK_GIB
from launcher.placement.plan import PlacementError

GIB = 1 << 30

IMAGE_GIB = 45
"""The machine image. SkyPilot's own on AWS has 45 GB (sky/clouds/aws.py, DEFAULT_AMI_GB); assumed for Google Cloud."""

ENVIRONMENT_GIB = 12
"""The Python environment: 3 to 5 GB of wheels in the installer's cache, and 7 GB of files."""

RUN_GIB = 10
"""Rollouts on their way, the coordinator's journal, and logs. Assumed."""

TRAINED_COPIES = 6
"""Copies of the trained weights on the trainer's disk: the live version, its predecessor and a version being published
(engine/coordinator/weight_book.py), and, on their way to the bucket, the average and the optimiser's two moments
(engine/trainer/outbox.py). Adapters that are sent in bf16 take half a copy less."""

MOST_PROMPTS = 20_000
"""Prompts that a node encodes beforehand (engine/node/build_worker.py)."""

FILES_PERCENT = 95
"""Share of a disk that holds files. ext4 keeps 5 % for the system by default."""

STEP_GIB = 10
"""A computed size is a multiple of this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BootDisk:
    """The boot disk of every node of a run. `parts`: bytes of what it must hold."""

    gib: int
    parts: Mapping[str, int]

    @property
    def needed_gib(self) -> int:
        return -(-sum(self.parts.values()) // GIB)


def boot_disk(resolved: Resolved, model_bytes: int | None, lora_bytes: int = 0) -> BootDisk:
    """Return the disk that a job's nodes get. Raises PlacementError if the job names a size that is too small.

    `model_bytes`: size of the model's files that are sent to nodes; None if the folder is not here, and the published
    model's size counts. `lora_bytes`: size of the files of `model.lora`.
    """
    job, memory = resolved.job, resolved.memory
    parts = {"machine image": IMAGE_GIB * GIB, "environment": ENVIRONMENT_GIB * GIB, "run": RUN_GIB * GIB}
    if memory is not None:
        prompts = min(job.iterations * job.algorithm.prompts_per_batch, MOST_PROMPTS)
        parts["model"] = memory.model_bytes if model_bytes is None else model_bytes
        parts["encoded prompts"] = prompts * memory.prompt_bytes
        parts["trained weights"] = TRAINED_COPIES * resolved.trained_bytes
    if lora_bytes:
        parts["LoRA"] = lora_bytes
    parts["file system"] = sum(parts.values()) * (100 - FILES_PERCENT) // FILES_PERCENT
    asked, needed = job.resources.disk_gb, BootDisk(gib=0, parts=parts).needed_gib
    if asked is not None and asked < needed:
        raise PlacementError(
            f"resources.disk_gb is {asked}, and a node of this run needs {needed} GB ({parts_text(parts)}); set "
            f"resources.disk_gb to {needed} or more, or leave it out"
        )
    computed = max(DISK_GIB, -(-needed // STEP_GIB) * STEP_GIB)
    return BootDisk(gib=computed if asked is None else asked, parts=parts)


def parts_text(parts: Mapping[str, int]) -> str:
    """Return the parts in GB, each rounded up, as `model 54, environment 12`. The largest part comes first."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {-(-count // GIB)}" for name, count in ordered)

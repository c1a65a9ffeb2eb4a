"""Train full weights of a tiny model of a published family with several ranks: real processes, gloo and FSDP2."""

import errno
import gc
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.algorithm.objective import FinishedGroup
from engine.clock import ScaledClock
from engine.models.adapter import DiTAdapter
from engine.models.load import compute_in_bfloat16
from engine.models.weights import read_tensors
from engine.parallel.communicator import join_store, serve_store
from engine.parallel.rank_group import RankGroup
from engine.parallel.sharding import whole_of
from engine.storage import tensor_files
from engine.storage.checkpoint import Checkpoint, CheckpointStore
from engine.storage.tensor_files import Stored, TensorFile
from engine.trainer.model import TrainedModel
from engine.trainer.outbox import Outbox
from engine.trainer.ranks import Ranks
from engine.trainer.shards import Shard, ShardFollower, joined_shard
from engine.worker.usage import Usage
from tests.benchmarks.sp_parity import Member
from tests.benchmarks.sp_parity import Ranks as Processes
from tests.rank_training import PLAN, Job, adapter_of, manifest_of, rolled_out


@dataclass(frozen=True, kw_only=True)
class Task:
    """A job with full weights, and where its files lie."""

    job: Job
    folder: Path
    """Files of the checkpoint that is written at the end."""
    start: Path | None = None
    """Files of a checkpoint to continue from."""
    first_batch: int = 0
    in_bfloat16: bool = False
    """Compute in bfloat16, as models from a folder do."""
    disk_fills: bool = False
    """The disk of rank 0 is full for a moment, in the middle of the files of the last checkpoint. The batch before has
    a checkpoint too."""
    bad: tuple[int, ...] = ()
    """Groups with a latent that is not finite."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Rank 0 after all batches. `sampled`: latents that rank 0 alone makes with the old policy and the average."""

    files: dict[str, dict[str, Tensor]]
    first_gradients: dict[str, Tensor]
    health: list[dict[str, float]]
    sampled: tuple[Tensor, Tensor]
    collective_ms: float
    newest: tuple[str, ...] = ()
    """Newest whole checkpoint at each message about a full disk, and at the end."""

    @property
    def bits(self) -> dict[str, bytes]:
        return {
            f"{file} {name}": value.numpy().tobytes()
            for file, tensors in self.files.items()
            for name, value in tensors.items()
        }


def with_bad(groups: list[FinishedGroup], bad: tuple[int, ...]) -> list[FinishedGroup]:
    """Return the groups, some with a latent that is not finite."""
    for number in bad:
        first, *others = groups[number].trajectories
        broken = replace(first, latents=first.latents.clone().fill_(float("nan")))
        groups[number] = replace(groups[number], trajectories=(broken, *others))
    return groups


def sampled(adapter: DiTAdapter) -> Tensor:
    """Make a pass without gradient."""
    dtype = next(adapter.transformer.parameters()).dtype
    x = torch.randn(1, *adapter.latent_shape(), generator=torch.Generator().manual_seed(7)).to(dtype)
    with torch.no_grad():
        return adapter.velocity(x, torch.tensor([0.5], dtype=dtype), adapter.encode(["a"]), 1.0)


def train(member: Member, port: int, ranks: int, task: Task) -> Trained | str:
    """Be one rank. Rank 0 returns what it trained; another rank returns how its group ended."""
    gc.collect()
    job, group = task.job, None
    adapter = adapter_of(job)
    if task.in_bfloat16:
        compute_in_bfloat16(adapter.transformer)
    made = with_bad(rolled_out(adapter, job), task.bad) if member.rank == 0 else []
    if ranks > 1:
        store = join_store(port, timeout_seconds=60.0)
        group = RankGroup.form(store, member.rank, ranks, torch.device("cpu"), limit_seconds=60.0)
    first: dict[str, Tensor] = {}
    try:
        if member.rank > 0:
            assert group is not None
            shard = joined_shard(group, adapter, job.algorithm, compiles=False)
            _keep_gradients(shard, first)
            ShardFollower(shard).follow()
        return _lead(adapter, group, task, made, first)
    except Exception as error:
        if member.rank == 0:
            raise
        return type(error).__name__
    finally:
        if group is not None:
            dist.destroy_process_group()


@contextmanager
def full_for_a_moment() -> Iterator[None]:
    """Let one write of a file of tensors find a full disk."""
    plain, writes = tensor_files.write_all, itertools.count()

    def write_all(file: Any, data: memoryview) -> None:
        if next(writes) in (100, 101):
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(file, data)

    tensor_files.write_all = write_all
    try:
        yield
    finally:
        tensor_files.write_all = plain
        assert next(writes) > 101, "the disk was never full"


def _save(model: TrainedModel, store: CheckpointStore, batch: int) -> dict[str, TensorFile]:
    """Save a checkpoint as the trainer does, and return its files."""
    files = model.files(model.rollout_weights())
    checkpoint = Checkpoint(
        iteration=batch + 1,
        lineage=1,
        next_batch=manifest_of(batch + 1),
        files={},
        evaluations=(),
        std=None,
        skipped_in_a_row=0,
        config_digest="",
        exploration={},
    )
    store.save(checkpoint, keep=2, digests=store.write_files(checkpoint.name, files))
    return files


def _name_of_newest(store: CheckpointStore) -> str:
    """Return the name of the newest whole checkpoint. Raises CheckpointDamaged if its files are not whole."""
    newest = store.newest()
    return "none" if newest is None else newest.name


def _keep_gradients(shard: Shard | TrainedModel, first: dict[str, Tensor]) -> None:
    trainer = shard.trainer

    def keep(*_: Any) -> None:
        if not first:
            first.update({name: whole_of(one.grad).clone() for name, one in trainer.parameters.items()})

    trainer.optimizer.register_step_pre_hook(keep)


def _lead(
    adapter: DiTAdapter, group: RankGroup | None, task: Task, made: list[FinishedGroup], first: dict[str, Tensor]
) -> Trained:
    job, usage = task.job, Usage(ScaledClock(origin_ms=0))
    store, newest = CheckpointStore(f"file://{task.folder}/store"), []
    outbox = Outbox(task.folder / "outbox", lambda _: newest.append(_name_of_newest(store)))
    measure = lambda: usage.measure("collective")  # noqa: E731
    model = TrainedModel(adapter, job.algorithm, None, outbox, divided_over=group, measure=measure)
    _keep_gradients(model, first)
    steps = model.ranks(Ranks(None, model.trainer, usage, is_started=False))
    if task.start is not None:
        model.restore({path.stem: Stored.of_path(path) for path in task.start.glob("*.safetensors")}, 1)
    health, seen = [], None
    for batch in range(task.first_batch, job.batches):
        manifest = manifest_of(batch)
        for minibatch, numbers in enumerate(manifest.minibatches):
            step = steps.begin(manifest, minibatch, PLAN, std=None)
            for place, number in enumerate(one for one in job.order if one in numbers):
                step.add(number, made[number])
                if place == 1:
                    with model.old_policy():  # rank 0 samples alone in the middle of a step
                        seen = sampled(adapter)
            health.append(step.commit().summary())
        model.follow(batch)
        if task.disk_fills and batch < job.batches - 1:
            _save(model, store, batch)
    with full_for_a_moment() if task.disk_fills else nullcontext():
        files = _save(model, store, job.batches - 1)
    newest.append(_name_of_newest(store))
    with model.exchanged(files["ema"]):
        averaged = sampled(adapter)
    assert seen is not None
    for name, file in files.items():
        file.path.rename(task.folder / f"{name}.safetensors")
    return Trained(
        files=read_checkpoint(task.folder),
        first_gradients=first,
        health=health,
        sampled=(seen, averaged),
        collective_ms=usage.total.get("collective", 0.0),
        newest=tuple(newest),
    )


def read_checkpoint(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a checkpoint's files."""
    return {path.stem: read_tensors(Stored.of_path(path)) for path in sorted(folder.glob("*.safetensors"))}


def largest_difference(these: Mapping[str, Tensor], those: Mapping[str, Tensor]) -> float:
    """Return the largest difference of a tensor, relative to its largest value. Tensors of zeros must be equal."""
    assert these.keys() == those.keys()
    found = 0.0
    for name, value in those.items():
        largest, apart = float(value.abs().max()), float((these[name] - value).abs().max())
        found = max(found, apart / largest if largest else (0.0 if apart == 0 else float("inf")))
    return found


class ShardTrainings:
    """Runs tasks on live processes."""

    def __init__(self, processes: int) -> None:
        self._processes = Processes(processes, (), preload=["tests.shard_training"])

    def run(self, task: Task, ranks: int) -> Trained:
        """Train with this number of ranks and return rank 0's result."""
        task.folder.mkdir(parents=True)
        store = serve_store()
        self._processes.send(range(ranks), train, store.port, ranks, task)
        trained, *others = self._processes.answers(range(ranks))
        if not isinstance(trained, Trained):
            raise trained
        assert set(others) <= {"TornGroup"}, f"the end of rank 0 is the end of its group: {others}"
        return trained

    def close(self) -> None:
        self._processes.close()

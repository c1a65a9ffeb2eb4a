"""Number of ranks of a trainer, decided in one place: the engine starts as many, and a plan counts as many. Pure.

A rank is a process of the trainer with a GPU of its own. The groups of an optimiser step are divided over the ranks,
and each rank trains whole groups, so there are never more ranks than groups. A trainer may have several nodes, with as
many ranks on each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from engine.config import EngineConfig

Asked = Literal["auto"] | int
"""Ranks that a job asks for. `auto`: a rank for each GPU of the node, up to `RankLimits.auto`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLimits:
    """Numbers of ranks that an engine can run."""

    most: int
    """Most ranks of a trainer."""
    auto: int | None = None
    """Most ranks of a trainer whose job does not name a number. None: `most`."""
    sampling: int = 1
    """Most ranks that sample rollouts while they have no group to train. The other ranks wait."""

    def ranks(self, asked: Asked, *, gpus: int, groups: int) -> int:
        """Return the ranks of a trainer.

        gpus    GPUs of all its nodes
        groups  groups of an optimiser step
        raises  ValueError: the job asks for more ranks than the engine, the GPUs or the groups allow
        """
        most = min(self.most, gpus, groups)
        if asked == "auto":
            return most if self.auto is None else min(most, self.auto)
        if asked > most:
            raise ValueError(
                f"runtime.trainer_ranks is {asked}, and at most {most} can train: the trainer has {gpus} GPUs, an "
                f"optimiser step has {groups} groups, and the engine runs {self.most} ranks at most; use {most} or auto"
            )
        return asked


ONE = RankLimits(most=1)
"""The engine trains on one GPU of the trainer's node."""

LIMITS: Mapping[Literal["lora", "full"], RankLimits] = {
    "lora": RankLimits(most=8, auto=1, sampling=8),
    "full": RankLimits(most=8, auto=1),
}
"""Numbers of ranks that this engine can run, by the weights that are trained.

A job must name the number, because ranks were only run on CPUs. `auto` is every GPU once ranks have run on two. With
full weights a rank has a part of the weights, and samples with a gathered copy of all: rank 0 does, and every rank
where the GPUs have room (`limits_of`).
"""


def limits_of(weights: Literal["lora", "full"], *, have_room: bool) -> RankLimits:
    """Return the numbers of ranks for a job. `have_room`: the GPU of every rank has room to sample (engine/memory/)."""
    limits = LIMITS[weights]
    return replace(limits, sampling=limits.most) if have_room else limits


def ranks_of(config: "EngineConfig") -> int:
    """Return the ranks that a trainer's node starts. Raises ValueError for more than the engine or the groups allow.

    The launcher compares the number with the node's GPUs. On a CPU, and on fewer GPUs, ranks share the device.
    """
    asked = config.runtime.trainer_ranks
    groups = groups_of_step(config.algorithm.prompts_per_batch, config.algorithm.updates_per_batch)
    return LIMITS[config.model.weights].ranks(asked, gpus=1 if asked == "auto" else asked, groups=groups)


def sampling_ranks(config: "EngineConfig", *, have_room: bool) -> int:
    """Return the ranks of a job's trainer that sample, from rank 0 on. `have_room`: as of `limits_of`."""
    return min(ranks_of(config), limits_of(config.model.weights, have_room=have_room).sampling)


def may_lack_ranks(config: "EngineConfig") -> bool:
    """Return True if a trainer of several nodes trains without one that was lost, and takes it back later."""
    asked = config.runtime.trainer_nodes
    return config.model.weights == "lora" if asked == "auto" else asked == "elastic"


def worker_of_rank(node: str, rank: int) -> str:
    """Return the name of the worker with which a rank on this node samples."""
    return f"{node}/trainer-rank-{rank}" if rank else f"{node}/trainer"


def is_rank(worker: str) -> bool:
    """Return True for the worker of a trainer's rank, which is no rollout GPU."""
    return worker.rpartition("/")[2].startswith("trainer")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOfTrainer:
    """A node among the nodes of a trainer. `number`: from 0, the node of rank 0."""

    number: int
    nodes: int

    def ranks(self, config: "EngineConfig") -> range:
        """Return the ranks of this node. Raises ValueError if the ranks cannot be divided over the nodes."""
        ranks_per_node = ranks_of_each_node(ranks_of(config), self.nodes)
        return range(self.number * ranks_per_node, (self.number + 1) * ranks_per_node)


def ranks_of_each_node(ranks: int, nodes: int) -> int:
    """Return the ranks of each node of a trainer. Raises ValueError if the nodes cannot have as many ranks each."""
    if ranks % nodes:
        raise ValueError(
            f"a trainer of {ranks} rank{'s' if ranks > 1 else ''} cannot be divided over {nodes} nodes; set "
            f"runtime.trainer_ranks to a multiple of {nodes}"
        )
    return ranks // nodes


def groups_of_step(prompts_per_batch: int, updates_per_batch: int) -> int:
    """Return the groups of an optimiser step. A batch has a group for each prompt."""
    return prompts_per_batch // updates_per_batch

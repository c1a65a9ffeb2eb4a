"""Train a tiny model of a published family with several ranks: real processes, real gloo, on one machine."""

import gc
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from engine.algorithm.objective import FinishedGroup
from engine.algorithm.transaction import Trainer
from engine.algorithm_config import AlgorithmConfig
from engine.clock import ScaledClock
from engine.config import ModelConfig, SamplerConfig
from engine.diffusion.sampler import Plan, advance, initial, rollout_plan
from engine.diffusion.trajectory import Trajectory
from engine.models.adapter import DiTAdapter
from engine.models.load import freeze_but_trained, trainable
from engine.parallel.communicator import join_store, serve_store
from engine.parallel.rank_group import RankGroup
from engine.protocol.request import Group, Manifest
from engine.trainer.ranks import Follower, Ranks, take_start
from engine.trainer.reference import reference_of
from engine.worker.usage import Usage
from tests.benchmarks.sp_parity import Member
from tests.benchmarks.sp_parity import Ranks as Processes
from tests.engine.test_families import FAMILIES

PROMPTS = tuple(f"{number:02d}" for number in range(8))
PLAN = rollout_plan(SamplerConfig(steps=3, noise_level=0.7), run_seed=0, batch=0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Batches of 8 groups in two optimiser steps, so that the second step has an old policy that differs."""

    family: str
    double: bool
    algorithm: AlgorithmConfig
    batches: int = 2
    weights: Literal["lora", "full"] = "lora"
    order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    """Order in which groups become complete."""
    early: tuple[int, ...] = ()
    """Early groups of every batch but the first, with bfloat16 weights under the adapters."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Rank 0 after all batches."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    first_gradients: dict[str, Tensor]
    health: list[dict[str, float]]
    collective_ms: float


def manifest_of(batch: int, early: tuple[int, ...] = ()) -> Manifest:
    groups = tuple(Group(prompt=prompt, seeds=(10 * i, 10 * i + 1)) for i, prompt in enumerate(PROMPTS))
    halves = ((0, 1, 2, 3), (4, 5, 6, 7))
    return Manifest(
        run="r",
        lineage=1,
        batch=batch,
        version=batch,
        sampler=PLAN.signature,
        groups=groups,
        minibatches=halves,
        early=early if batch else (),
    )


def adapter_of(job: Job) -> DiTAdapter:
    torch.manual_seed(0)
    adapter = FAMILIES[job.family].build()
    if job.early:
        adapter.transformer.to(torch.bfloat16)
    freeze_but_trained(adapter, ModelConfig(weights=job.weights, lora_rank=2))
    if job.double:
        adapter.transformer.double()
        adapter._text._model.double()
    return adapter


def rolled_out(adapter: DiTAdapter, job: Job, plan: Plan = PLAN) -> list[FinishedGroup]:
    """Return the groups of the batch, sampled by the model itself. Rewards are made up, one group has equal ones."""
    made = []
    for number, group in enumerate(manifest_of(0).groups):
        x = initial(group.seeds, adapter.latent_shape())
        x = x.double() if job.double else x
        found = [Trajectory.begin(row) for row in x]
        conditioning = adapter.encode([group.prompt] * len(group.seeds))
        with torch.no_grad():
            for step in range(plan.steps):
                x, log_probs = advance(adapter, plan, conditioning, group.seeds, x, step)
                found = [t.then(plan, row, p) for t, row, p in zip(found, x, log_probs, strict=True)]
        rewards = (0.5, 0.5) if number == 2 else (0.1 * number, 1.0)
        made.append(FinishedGroup(prompt=group.prompt, seeds=group.seeds, trajectories=tuple(found), rewards=rewards))
    return made


def train(member: Member, port: int, ranks: int, job: Job) -> Trained | str:
    """Be one rank. Rank 0 returns what it trained; another rank returns how its group ended."""
    gc.collect()  # an earlier job's group ends
    adapter = adapter_of(job)
    parameters = trainable(adapter)
    made = rolled_out(adapter, job)
    group = None
    if ranks > 1:
        store = join_store(port, timeout_seconds=60.0)
        group = RankGroup.form(store, member.rank, ranks, torch.device("cpu"), limit_seconds=60.0)
    if member.rank > 0:
        assert group is not None
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.zero_()  # the weights must come from rank 0
        reference = reference_of(adapter, job.algorithm, is_started=take_start(group, parameters.values()))
        try:
            Follower(group, Trainer(adapter, parameters, job.algorithm, reference)).follow()
        except Exception as error:
            return type(error).__name__
    trainer = Trainer(adapter, parameters, job.algorithm, reference_of(adapter, job.algorithm, is_started=False))
    first: dict[str, Tensor] = {}

    def keep_gradients(*_: Any) -> None:
        if not first:
            first.update({name: parameter.grad.clone() for name, parameter in parameters.items()})

    trainer.optimizer.register_step_pre_hook(keep_gradients)
    usage = Usage(ScaledClock(origin_ms=0))
    all_ranks = Ranks(group, trainer, usage, is_started=False)
    health = []
    for batch in range(job.batches):
        manifest = manifest_of(batch, job.early)
        for minibatch, numbers in enumerate(manifest.minibatches):
            step = all_ranks.begin(manifest, minibatch, PLAN, std=None)
            for number in job.order:
                if number in numbers:
                    step.add(number, replace(made[number], is_early=number in manifest.early))
            health.append(step.commit().summary())
        trainer.old.advance(0.0 if job.early else 0.5, keeps_before=bool(job.early))
    del group, all_ranks, step
    gc.collect()
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    return Trained(
        weights=weights,
        moments={name: value.clone() for name, value in trainer.optimizer_state().items()},
        first_gradients=first,
        health=health,
        collective_ms=usage.total.get("collective", 0.0),
    )


class Trainings:
    """Runs jobs on live processes."""

    def __init__(self, processes: int) -> None:
        self._processes = Processes(processes, (), preload=["tests.rank_training"])

    def run(self, job: Job, ranks: int) -> Trained:
        """Train with this number of ranks and return rank 0's result."""
        store = serve_store()
        self._processes.send(range(ranks), train, store.port, ranks, job)
        trained, *others = self._processes.answers(range(ranks))
        if not isinstance(trained, Trained):
            raise trained
        assert set(others) <= {"TornGroup"}, "the end of rank 0 is the end of its group"
        return trained

    def close(self) -> None:
        self._processes.close()

"""Ranks of a trainer as threads of this process, over real gloo: every rank trains its groups as one rank would.

test_ranks.py has the same in processes, with other families and precisions.
"""

import gc
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from math import nan
from typing import Any

import pytest
import torch

from engine.algorithm import transaction
from engine.algorithm.health import Health
from engine.algorithm.transaction import DoesNotFit, Trainer
from engine.algorithm_config import AlgorithmConfig, DiffusionNftConfig
from engine.clock import ScaledClock
from engine.models.load import trainable
from engine.models.weights import exchanged
from engine.parallel.communicator import join_store, serve_store
from engine.parallel.rank_group import RankGroup
from engine.protocol.request import WeightsKey
from engine.trainer.ranks import Follower, NoSampler, Ranks, take_start
from engine.trainer.reference import reference_of
from engine.worker.usage import Usage
from tests.engine.test_out_of_memory import Limited, Room
from tests.rank_training import PLAN, Job, adapter_of, manifest_of, rolled_out

CPU = torch.device("cpu")
BATCHES = 2
ROWS = 8
SETTINGS = {"rows_per_forward": ROWS, "order": "fixed", "learning_rate": 1e-3, "gradient_clip": 1.0}
FLOW_GRPO = AlgorithmConfig(name="flow-grpo", kl_beta=0.5, std="batch", **SETTINGS)
NFT = AlgorithmConfig(name="diffusion-nft", diffusion_nft=DiffusionNftConfig(old_policy_decay="gradual"), **SETTINGS)
EARLY = (0, 1, 4, 5)
"""Early groups of the second batch: of two ranks, each has one in each step."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(transaction, "free_memory", lambda: None)  # collecting garbage takes most of a second
    yield
    torch.set_num_threads(before)


@cache
def model_and_groups():
    """Return a model in fp64, and groups that it sampled. Each rank has a group that adds nothing to its step."""
    job = Job(family="qwen-image", double=True, algorithm=FLOW_GRPO)
    adapter = adapter_of(job)
    groups = rolled_out(adapter, job)
    groups[2] = replace(groups[2], rewards=(0.5, 0.5))
    groups[7] = replace(groups[7], rewards=(nan, 1.0))
    groups[5] = replace(groups[5], rewards=(0.25, 0.25))
    return adapter, groups


@dataclass(kw_only=True)
class Trained:
    """`told`: rank 0's calls of `on_fewer_rows`. `rows`: `rows_per_forward` of each rank, by rank."""

    weights: dict[str, torch.Tensor]
    health: list[dict[str, Any]]
    told: list[tuple[int, str]]
    rows: dict[int, int] = field(default_factory=dict)


class EvaluatingRank(NoSampler):
    """Notes the key and the weights with which a rank serves evaluations."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters, self.served = parameters, []

    def begin_evaluation(self, key: WeightsKey, digest: str) -> None:
        self.served.append((key, digest, {float(tensor.detach().abs().max()) for tensor in self.parameters.values()}))

    def end_evaluation(self) -> None:
        self.served.append("ended")


def train(
    algorithm: AlgorithmConfig,
    ranks: int,
    *,
    evaluates: bool = False,
    early: tuple[int, ...] = (),
    is_started: bool = False,
    rooms: Mapping[int, Room] = {},
) -> Trained:
    """Train two batches of two steps. `is_started`: with start weights. `rooms`: memory of the device, by rank.

    `evaluates`: before each batch the ranks, which have its weights, serve an evaluation of zeros.

    With several ranks, the first try of each step is aborted once every rank has begun to train.
    """
    adapter, groups = model_and_groups()
    store = serve_store()

    def form(rank: int) -> RankGroup:
        return RankGroup.form(join_store(store.port, timeout_seconds=60.0), rank, ranks, CPU, limit_seconds=60.0)

    def trainer_of(rank: int, own: Any, is_started: bool) -> Trainer:
        reference = reference_of(own, algorithm, is_started=is_started)
        limited = Limited(own, rooms[rank]) if rank in rooms else own
        return Trainer(limited, trainable(own), algorithm, reference, workers_compile=bool(early))

    def follow(rank: int) -> int:
        own = deepcopy(adapter)
        group = form(rank)
        follower_trainer = trainer_of(rank, own, take_start(group, trainable(own).values()))
        evaluating = EvaluatingRank(follower_trainer.parameters)
        follower = Follower(group, follower_trainer, sampler=evaluating)
        for _ in range(2 * BATCHES):
            follower.follow_step()
        keys = [WeightsKey(version=batch, average=True) for batch in range(BATCHES) if evaluates]
        assert evaluating.served == [event for key in keys for event in ((key, "zeros", {0.0}), "ended")]
        return follower_trainer.rows_per_forward

    def lead() -> Trained:
        own = deepcopy(adapter)
        if is_started:
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for parameter in trainable(own).values():
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
        group = form(0) if ranks > 1 else None
        trainer, usage = trainer_of(0, own, is_started), Usage(ScaledClock(origin_ms=0))
        all_ranks, health, told = Ranks(group, trainer, usage, is_started=is_started), [], []
        trainer.on_fewer_rows = lambda rows, error: told.append((rows, error))
        for batch in range(BATCHES):
            manifest = manifest_of(batch, early)
            if evaluates:
                all_ranks.published(WeightsKey(version=batch), "trained")
                zeros = {name: torch.zeros_like(parameter) for name, parameter in trainer.parameters.items()}
                with exchanged(trainer.parameters, zeros):
                    with all_ranks.evaluating(WeightsKey(version=batch, average=True), "zeros"):
                        pass
            for minibatch, numbers in enumerate(manifest.minibatches):
                for is_kept in (False, True) if ranks > 1 and not rooms else (True,):
                    step = all_ranks.begin(manifest, minibatch, PLAN, std=0.3 + 0.1 * batch)
                    assert step.missing == sorted(numbers, key=lambda n: (n % 4 % ranks == 0, n % 4 % ranks, n))
                    for number in numbers if is_kept else numbers[:ranks]:
                        if number == numbers[-1]:
                            with pytest.raises(ValueError, match=rf"groups \[{number}\] .*have not been added"):
                                step.commit()
                        step.add(number, replace(groups[number], is_early=number in manifest.early))
                    if is_kept:
                        health.append(figures(step.commit()))
                    else:
                        step.abort()
            trainer.old.advance(0.5 if algorithm is NFT else 0.0, keeps_before=bool(early))
        weights = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
        return Trained(weights=weights, health=health, told=told, rows={0: trainer.rows_per_forward})

    with ThreadPoolExecutor(ranks) as threads:
        followers = [threads.submit(leaving, follow, rank) for rank in range(1, ranks)]
        leader = threads.submit(leaving, lead)
        trained = leader.result()
        trained.rows |= {rank: follower.result() for rank, follower in enumerate(followers, start=1)}
    return trained


def leaving(be_rank: Callable[..., Any], *arguments: Any) -> Any:
    """Call a rank. If it raises, drop its group, so that no other rank waits for it."""
    try:
        return be_rank(*arguments)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        raise


def figures(health: Health) -> dict[str, Any]:
    """Return all that a step reports, without what depends on the order of the ranks."""
    values = asdict(health)
    sums, largest = values.pop("sums"), values.pop("largest")
    return {
        **values,
        "skipped": sorted(health.skipped),
        **sums,
        **{f"largest {name}": v for name, v in largest.items()},
    }


def assert_same(shared: Trained, alone: Trained) -> None:
    for name, value in alone.weights.items():
        torch.testing.assert_close(shared.weights[name], value, rtol=0, atol=1e-12)
    for one, other in zip(shared.health, alone.health, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            expected = pytest.approx(value, rel=1e-6, abs=1e-10) if isinstance(value, float) else value
            assert one[name] == expected, name


@pytest.mark.parametrize(("ranks", "kl_beta"), [(2, 0.5), (3, 0.5), (3, 0.0)])
def test_ranks_in_threads_train_the_weights_of_one_rank_and_report_all_groups(ranks, kl_beta):
    """Without the KL term, a rank of three has no gradient in a step."""
    algorithm = FLOW_GRPO.model_copy(update={"kl_beta": kl_beta})
    shared, alone = train(algorithm, ranks, is_started=True), train(algorithm, 1, is_started=True)
    assert_same(shared, alone)
    assert [one["groups"] for one in shared.health] == [4] * 4
    assert [one["skipped"] for one in shared.health] == [[], [7], [], [7]]
    assert [one["without_variance"] for one in shared.health] == [1, 1, 1, 1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_served_an_evaluation_train_with_their_own_weights(ranks):
    assert_same(train(FLOW_GRPO, ranks, evaluates=True), train(FLOW_GRPO, 1))


def test_ranks_compare_early_groups_with_the_weights_of_one_version_before():
    narrow = FLOW_GRPO.model_copy(update={"clip_range": 1e-6})
    shared, alone = train(narrow, 2, early=EARLY), train(narrow, 1, early=EARLY)
    assert_same(shared, alone)
    assert alone.health[3]["early_outside"] > 0
    assert [one["early_rows"] > 0 for one in shared.health] == [False, False, True, True]
    before = train(narrow, 1)
    assert before.health[2]["dlogp_abs_mean"] != pytest.approx(alone.health[2]["dlogp_abs_mean"], rel=0.1)


def test_ranks_train_with_an_old_policy_of_its_own():
    assert_same(train(NFT, 2), train(NFT, 1))


@pytest.mark.parametrize("full", [0, 1])
def test_a_rank_whose_memory_is_full_makes_the_passes_of_all_ranks_smaller(full):
    room = Room("forward", fits=2)
    shared, alone = train(FLOW_GRPO, 2, rooms={full: room}), train(FLOW_GRPO, 1)
    assert shared.rows == {0: 2, 1: 2}
    rows, text = shared.told[-1]
    assert rows == 2
    assert text.startswith("rank 1: CUDA out of memory" if full else "CUDA out of memory")
    assert [one["rows_per_forward"] for one in shared.health] == [2] * 4
    assert room.refused == 2, "8 rows, then 4"
    for name, value in alone.weights.items():
        torch.testing.assert_close(shared.weights[name], value, rtol=0, atol=1e-10)


def test_a_rank_on_which_no_row_fits_ends_the_step_with_its_name():
    with pytest.raises(DoesNotFit, match=r"^rank 1 of the trainer: one row .* does not fit"):
        train(FLOW_GRPO, 2, rooms={1: Room("forward", fits=0)})

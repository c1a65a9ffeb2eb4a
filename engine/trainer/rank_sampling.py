"""Sample rollouts on a trainer's rank while it has no order from rank 0.

With LoRA every rank has all weights. With full weights a rank samples while it keeps a gathered copy (shards.py).

    no order -> one lease, with the old policy's weights -> scored in threads -> sent
    an order -> the lease is given back at the next denoising step; unscored leases are kept by a thread meanwhile

An image's bits do not depend on the worker, so neither the weights nor the manifest depend on which rank sampled what.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from torch.nn import Parameter

from engine.clock import Clock
from engine.config import EngineConfig
from engine.models.adapter import DiTAdapter
from engine.protocol.request import Kind, WeightsKey, Work
from engine.rewards.reward import Reward
from engine.timing.work import work_seconds
from engine.trainer.rollouts import OldPolicy, torch_threads
from engine.trainer_ranks import worker_of_rank
from engine.work_clock import WorkMeter
from engine.worker.scoring_call import ScoreLimits
from engine.worker.transport import Transport
from engine.worker.worker import Worker

MOST_UNSCORED = 2
"""Leases of a rank that wait for their scores, above which the rank samples nothing new."""


class RankSampler:
    """The worker of a rank. See `engine.trainer.ranks.Sampler`."""

    def __init__(self, worker: Worker, old_policy: OldPolicy, *, may_stop: bool) -> None:
        """`worker`: on the trainer's model, without weights of its own. `old_policy`: of the rank.

        `may_stop`: False if an interrupted image begins anew (`runtime.resume: restart`): a lease is then finished.
        """
        self._worker, self._old_policy, self._may_stop = worker, old_policy, may_stop
        self._rollout_kinds, self._rollout_weights = worker.kinds, worker.holds
        self._evaluates = False

    def published(self, key: WeightsKey, digest: str) -> None:
        """Take the rank's weights as those of this key."""
        self._worker.assume(key, digest)

    def begin_evaluation(self, key: WeightsKey, digest: str) -> None:
        """Take the rank's weights as those of this key, and serve evaluations only."""
        worker = self._worker
        self._rollout_kinds, self._rollout_weights, self._evaluates = worker.kinds, worker.holds, True
        worker.kinds = (Kind.EVALUATE,)
        worker.assume(key, digest)

    def end_evaluation(self) -> None:
        """Serve rollouts again, with the weights of before."""
        self._worker.kinds, self._evaluates = self._rollout_kinds, False
        if self._rollout_weights is not None:
            self._worker.assume(*self._rollout_weights)

    def sample(self, is_called: Callable[[], bool]) -> bool:
        """Sample a lease. Returns False if there is no work: its node may drain, or too many leases are unscored."""
        worker = self._worker
        if worker.unscored >= MOST_UNSCORED:
            return False
        with torch_threads(1), nullcontext() if self._evaluates else self._old_policy():
            reply = worker.serve_once(wait=False, interrupted=is_called if self._may_stop else lambda: False)
        return isinstance(reply, Work)

    @property
    def waits_for_scores(self) -> bool:
        """Return True if a sampled lease has no scores yet."""
        return self._worker.unscored > 0

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Send scores and renew leases from a thread while the rank does other work in the context."""
        with self._worker.scores_beside():
            yield
        self._worker.usage.meter.waited()  # on a local run's clock, the next lease begins after that work

    def end(self) -> None:
        """Give the unscored leases back, and send no more."""
        self._worker.wind_up_scores()


def worker_of_trainer(
    config: EngineConfig,
    *,
    rank: int,
    node: str,
    workers_of_node: int,
    transport: Transport,
    adapter: DiTAdapter,
    parameters: dict[str, Parameter],
    reward: Reward,
    clock: Clock,
    meter: WorkMeter,
    trace: Callable[[Work, int], None],
) -> Worker:
    """Return the worker of a trainer's rank. The worker shares the rank's weights, and loads none.

    Rank 0 scores a lease before the next, so that all calls of the training loop come from one thread. Other ranks
    sample meanwhile.
    """
    return Worker(
        name=worker_of_rank(node, rank),
        node=node,
        workers_of_node=workers_of_node,
        transport=transport,
        adapter=adapter,
        parameters=parameters,
        reward=reward,
        score_limits=ScoreLimits(reward=config.reward),
        clock=clock,
        meter=meter,
        seconds=work_seconds(config),
        heartbeat_seconds=config.runtime.heartbeat_seconds,
        kinds=(Kind.TRAIN,),
        may_load=False,
        scored_beside=MOST_UNSCORED if rank else 0,
        overlap_commits=False,
        step_seconds=config.runtime.step_seconds,
        resume=config.runtime.resume,
        trace=trace,
    )

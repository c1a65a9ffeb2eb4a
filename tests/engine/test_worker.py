"""The worker keeps what it holds, however long a reward takes."""

import json
import time

import torch

from engine.clock import ScaledClock
from engine.config import ModelConfig, SamplerConfig
from engine.models.load import load_adapter, trainable
from engine.rollout.queue import Task
from engine.rollout.request import Kind, RequestId, Score, WeightsKey
from engine.rollout.sampler import plan_to_dict, rollout_plan
from engine.rollout.wire import task_to_dict, weights_to_list
from engine.runtime.worker import Worker, get_weights
from tests.engine.test_server import Front

LEASE_MS = 1500


def test_a_reward_slower_than_a_lease_loses_nothing(tmp_path):
    """Two leases, one scored beside the sampling of the other; each takes twice as long to score as a lease lasts."""
    torch.set_num_threads(1)
    clock = ScaledClock(origin_ms=time.time_ns() // 1_000_000)
    # Over HTTP, because there the coordinator looks at its leases while the worker waits.
    front = Front(tmp_path, lease_ms=LEASE_MS)
    transport, coordinator = front.transport(), front.coordinator
    adapter = load_adapter(ModelConfig())
    scored = []

    def slow(pictures, prompts):
        time.sleep(2 * LEASE_MS / 1000)
        scored.append(tuple(prompts))
        return [Score(reward=1.0, metrics={}) for _ in prompts]

    worker = Worker(
        name="spot/0",
        node="spot",
        workers_of_node=1,
        transport=transport,
        adapter=adapter,
        parameters=trainable(adapter),
        reward=slow,
        clock=clock,
        heartbeat_seconds=0.2,
    )
    plan = rollout_plan(SamplerConfig(steps=2), 0, 0)
    requests = tuple(
        RequestId(run="r", lineage=0, batch=0, prompt=f"{seed:04d}", seed=seed, kind=Kind.TRAIN) for seed in range(2)
    )
    v0 = WeightsKey(version=0)
    transport.call({"call": "publish", "weights": weights_to_list(v0)}, {"weights": get_weights(trainable(adapter))})
    sampler = json.dumps(plan_to_dict(plan))
    task = Task(requests=requests, weights=v0, sampler=sampler, steps=2, shape=1, dtype="float32")
    transport.call({"call": "submit", "task": task_to_dict(task)})
    try:
        while coordinator.queue.wanted(Kind.TRAIN) and len(scored) < 4:
            worker.serve_once(wait=False)
    finally:
        front.close()
    assert scored == [("0000",), ("0001",)]
    assert [event.KIND for event in coordinator.queue.events] == ["node_seen"]

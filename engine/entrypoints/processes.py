"""Run the processes of a node: coordinator and trainer on the on-demand node, workers on a spot node.

Importing this module loads torch and the recogniser. The node agent's forkserver imports the module once, and every
forked process starts in well under a second instead of five. The module does not import diffusers: after an import
before the fork, the forked process computes a third slower (measured with tests/benchmarks/iteration.py: 1.18 s an
iteration instead of .83). A process without its agent exits, so all processes of a node live and die together.
"""

import asyncio
import os
import threading
from contextlib import nullcontext
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path

import torch

import engine.rewards.ocr  # noqa: F401  preloaded
from engine.algorithm.transaction import Trainer
from engine.coordinator.bodies import most_call_bytes
from engine.coordinator.coordinator import Coordinator
from engine.coordinator.open import fund_of, open_coordinator
from engine.coordinator.rank_nodes import RankNodes
from engine.coordinator.rights import Rights
from engine.coordinator.server import CoordinatorServer, Front, bind
from engine.events import Market, Phase
from engine.models.load import trainable
from engine.node.build_worker import load_model, make_worker, reward_of_node
from engine.node.child import SharedHeartbeat, begin
from engine.node.lineage_watch import begin_watching
from engine.node.rank_rendezvous import forget_ranks, joined_group, leaves_torn_group, led_group
from engine.node.stuck_scorers import ends_despite_scorers
from engine.node.trainer_nodes import RankReport, copy_meeting, meeting_file
from engine.node_spec import NodeSpec
from engine.pool.server import ScoringProcess, listen
from engine.prompts import prompt_source
from engine.rewards.load import load_reward_of_job
from engine.storage.checkpoint import CheckpointStore
from engine.storage.disk import when_there_is_room
from engine.storage.progress import ProgressLog
from engine.timing.work import START_SECONDS
from engine.trainer.cadence import ON_DEMAND_HOURS
from engine.trainer.context import TrainerContext
from engine.trainer.loop import Loop
from engine.trainer.metrics import MetricsLog
from engine.trainer.rank_sampling import RankSampler, worker_of_trainer
from engine.trainer.ranks import Follower, take_start
from engine.trainer.reference import reference_of
from engine.trainer.shards import ShardFollower, joined_shard
from engine.trainer_ranks import ranks_of, worker_of_rank
from engine.worker.coordinator_purse import CoordinatorPurse
from engine.worker.device import device_of
from engine.worker.download import Download
from engine.worker.node_weights import NodeMemory, NodeWeights
from engine.worker.step_trace import step_trace
from engine.worker.transport import HttpTransport, Transport

PATIENCE_SECONDS = 60.0
"""Wall seconds a worker or trainer keeps calling a coordinator that does not answer."""


def run_coordinator(spec: NodeSpec, heartbeat: SharedHeartbeat, ready: Event) -> None:
    """Serve until the agent ends this process."""
    begin(spec, "coordinator", heartbeat)
    folder = Path(spec.folder)
    spec.clock.meter().done(START_SECONDS)

    def open_it() -> Coordinator:
        path = folder / "progress" / "coordinator.jsonl"
        progress = ProgressLog(path, run=spec.run, source="coordinator", clock=spec.clock.run_clock())
        return open_coordinator(
            folder / "coordinator",
            clock=spec.clock.clock(),
            run_clock=spec.clock.run_clock(),
            runtime=spec.engine.runtime,
            progress=progress,
            fund=fund_of(spec.engine.reward, spec.store, spec.judges_micro_usd),
        )

    coordinator = when_there_is_room(open_it, print)
    listener = bind(spec.coordinator_host, spec.coordinator_port)
    ready.set()
    ranks = RankNodes(meeting_file(spec)) if spec.trainer_nodes > 1 else None
    server = CoordinatorServer(
        Front(coordinator),
        Rights(spec.token),
        shipped=folder / "shipped",
        ranks=ranks,
        most_bytes=most_call_bytes(spec.engine),
    )
    asyncio.run(server.serve(listener))


def run_trainer(spec: NodeSpec, heartbeat: SharedHeartbeat, ready: Event) -> None:
    """Train until the run is finished. A return means the engine is finished."""
    begin(spec, "trainer", heartbeat)
    forget_ranks(spec)
    _use_threads(spec)
    folder, store = Path(spec.folder), when_there_is_room(lambda: CheckpointStore(spec.store, spec.node), print)
    context = TrainerContext(
        run=spec.run,
        node=spec.node,
        workers_of_node=_gpus_of_trainer(spec),
        outbox=folder / "outbox",
        store=store,
        transport=_transport_of_trainer(spec),
        progress=ProgressLog(
            folder / "progress" / "trainer.jsonl", run=spec.run, source="trainer", clock=spec.clock.run_clock()
        ),
        metrics=MetricsLog(folder / "metrics"),
        clock=spec.clock.clock(),
        meter=spec.clock.meter(),
        trace=step_trace(spec, "trainer", lambda: 1).stepped,
        watch_lineage=partial(begin_watching, store),
        life_hours=spec.life_hours
        or (spec.engine.runtime.hours_to_preemption if spec.market is Market.SPOT else ON_DEMAND_HOURS),
    )
    adapter = load_model(spec, 0, reads_later=_divides(spec))
    purse = CoordinatorPurse(context.transport, worker=f"{spec.node}/trainer", node=spec.node)
    reward = reward_of_node(spec, 0, purse)
    prompts = prompt_source(spec.engine, spec.workdir)
    if spec.trainer_nodes > 1:
        ready.set()  # the other nodes may be lost, and bought again at any time
    device = torch.device(device_of(spec.engine.runtime.device, 0))
    with ends_despite_scorers() as workers, leaves_torn_group(), led_group(spec, device) as group:
        loop = Loop(spec.engine, context, adapter, reward, prompts, group, sampling_ranks=spec.sampling_ranks)
        workers.append(loop.worker)
        ready.set()
        print(loop.run(), flush=True)


def run_trainer_rank(spec: NodeSpec, heartbeat: SharedHeartbeat, rank: int, ready: Event) -> None:
    """Compute the gradients of this rank's groups until the agent ends this process. Sample meanwhile, if it may."""
    begin(spec, f"trainer-rank-{rank}", heartbeat)
    _use_threads(spec)
    config, number = spec.engine, rank - spec.in_trainer.ranks(spec.engine).start  # of this node's GPU
    adapter = load_model(spec, number, reads_later=_divides(spec))
    parameters = {} if _divides(spec) else trainable(adapter)
    compiles = config.model.compile == "on"
    transport = _transport(spec)
    purse = CoordinatorPurse(transport, worker=worker_of_rank(spec.node, rank), node=spec.node)
    reward = reward_of_node(spec, number, purse) if rank < spec.sampling_ranks else None
    ready.set()
    with ends_despite_scorers() as workers, leaves_torn_group():
        group = joined_group(spec, rank, torch.device(device_of(config.runtime.device, number)))
        if reward is None:
            report = RankReport(spec, rank, of=_gpus_of_trainer(spec))
            report.send()
            measure = partial(report.usage.measure, Phase.COLLECTIVE)
            shard = joined_shard(group, adapter, config.algorithm, measure, compiles=compiles)
            ShardFollower(shard, usage=report.usage, stepped=report.send).follow()
            return
        worker = worker_of_trainer(
            config,
            rank=rank,
            node=spec.node,
            workers_of_node=_gpus_of_trainer(spec),
            transport=transport,
            adapter=adapter,
            parameters=parameters,
            reward=reward,
            clock=spec.clock.clock(),
            meter=spec.clock.meter(),
            trace=step_trace(spec, f"trainer-rank-{rank}", lambda: 1).stepped,
        )
        workers.append(worker)
        presence = (worker.name, worker.node, worker.boot)
        threading.Thread(target=_transport(spec).stay_present, args=presence, daemon=True).start()
        may_stop = config.runtime.resume != "restart"
        if _divides(spec):
            measure = partial(worker.usage.measure, Phase.COLLECTIVE)
            shard = joined_shard(group, adapter, config.algorithm, measure, compiles=compiles)
            sampler = RankSampler(worker, nullcontext, may_stop=may_stop)  # the gathered weights are the old policy's
            ShardFollower(shard, sampler=sampler, usage=worker.usage).follow()
            return
        reference = reference_of(adapter, config.algorithm, is_started=take_start(group, parameters.values()))
        trainer = Trainer(adapter, parameters, config.algorithm, reference, workers_compile=compiles)
        trainer.row_seconds, trainer.pass_seconds = config.runtime.row_seconds, config.runtime.pass_seconds
        sampler = RankSampler(worker, trainer.old.active, may_stop=may_stop)
        Follower(group, trainer, sampler=sampler, usage=worker.usage).follow()


def run_meeting(spec: NodeSpec, heartbeat: SharedHeartbeat, ready: Event) -> None:
    """Tell the ranks of a further node where ranks meet. A return means that the run needs this node no more."""
    begin(spec, "meeting", heartbeat)
    ready.set()
    copy_meeting(spec)


def _gpus_of_trainer(spec: NodeSpec) -> int:
    """Return the GPUs of a trainer's node, each with a rank or idle. On a CPU, ranks share it."""
    return max(spec.workers, len(spec.in_trainer.ranks(spec.engine)))


def _divides(spec: NodeSpec) -> bool:
    """Return True if the ranks of the trainer divide the weights."""
    return spec.engine.model.weights == "full" and ranks_of(spec.engine) > 1


def _use_threads(spec: NodeSpec) -> None:
    """Set the torch threads of a trainer's rank (runtime.trainer_threads)."""
    alone = spec.engine.exploration.mode == "none"
    cores = max(1, (os.cpu_count() or 1) // ranks_of(spec.engine))
    torch.set_num_threads(spec.engine.runtime.trainer_threads or (cores if alone else 1))


def run_worker(
    spec: NodeSpec, heartbeat: SharedHeartbeat, number: int, drain: Event, memory: NodeMemory, ready: Event
) -> None:
    """Roll out and explore until ordered to exit. `memory`: the node's memory with the single copy of the weights."""
    begin(spec, f"worker-{number}", heartbeat)
    transport = _transport(spec)
    download = Download(spec.coordinator_host, spec.coordinator_port, spec.own_token, patience_seconds=PATIENCE_SECONDS)
    source = NodeWeights(memory, download)
    worker = make_worker(spec, number, transport, source, drain.is_set)
    presence = (worker.name, worker.node, worker.boot)
    threading.Thread(target=_transport(spec).stay_present, args=presence, daemon=True).start()
    ready.set()
    with ends_despite_scorers() as workers:
        workers.append(worker)
        print("exit:", worker.serve(), flush=True)


def run_scorer(spec: NodeSpec, heartbeat: SharedHeartbeat, number: int, ready: Event) -> None:
    """Score the images of the node's workers until the agent ends this process."""
    begin(spec, f"scorer-{number}", heartbeat)
    torch.set_num_threads(1)
    pool = spec.engine.reward.scoring_pool
    assert pool is not None
    gpu = pool.gpu_of(number, is_rollout_node=spec.role == "rollout")
    device = device_of(spec.engine.runtime.device, gpu)
    print(f"scores on {device}", flush=True)
    reward = load_reward_of_job(spec.engine, spec.workdir, device=device)
    listener = listen(Path(spec.folder), number)
    ready.set()
    ScoringProcess(reward, batch=pool.batch, timeout_seconds=pool.timeout_seconds, name=spec.engine.reward.label).serve(
        listener
    )


def _transport_of_trainer(spec: NodeSpec) -> Transport:
    if spec.engine.runtime.name != "ray":
        return _transport(spec)
    # Import here only: a run without Ray needs no Ray.
    from engine.ray.cluster import connect_beside_head
    from engine.ray.coordinator import RayTransport

    connect_beside_head(spec)
    return RayTransport(spec.own_token, patience_seconds=PATIENCE_SECONDS)


def _transport(spec: NodeSpec) -> HttpTransport:
    return HttpTransport(
        spec.coordinator_host, spec.coordinator_port, spec.own_token, patience_seconds=PATIENCE_SECONDS
    )

"""Nodes of real processes on a GPU: agent, forkserver, coordinator, trainer and workers, as the launcher starts them.

Everything runs on one computer, so trainer and workers share its first GPU.
"""

import multiprocessing
import signal
import statistics
import subprocess
import time
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from engine.config import (
    CandidateBudget,
    EngineConfig,
    EvaluationConfig,
    ExplorationConfig,
    ProfileConfig,
    RuntimeConfig,
)
from tests.benchmarks.iteration import WARM_UP, engine_config
from tests.end_to_end.sharing import Sharing
from tests.engine.fleet import Fleet, newest_pid
from tests.gpu.device import needs_gpus
from tests.gpu.figures import describe_device, keep_figure, keep_figures
from tests.gpu.order import SP_REPEATS

ITERATIONS = 8
"""Number of counted iterations of each timed run."""


@contextmanager
def a_run(folder, config, *, workers=1):
    """Start a spot node, then a trainer node once the workers run. With Ray, the nodes join the trainer's cluster."""
    fleet = Fleet(folder, config)
    try:
        fleet.start("spot-0", workers=workers)
        if config.runtime.name != "ray":
            fleet.wait_for((fleet.folder / "nodes/spot-0/ready.json").exists)
        fleet.start("trainer")
        yield fleet
    finally:
        fleet.close()


def on(device, config, **runtime):
    more = {"device": device, **runtime}
    return config.model_copy(update={"runtime": RuntimeConfig.model_validate({**config.runtime.model_dump(), **more})})


def finish(fleet):
    finished = fleet.wait_until_finished(seconds=150, every=0.2)
    assert finished.reason == "iterations", f"{finished.text}\n{fleet.logs()}"


def on_gpus(fleet):
    """Return the fleet's processes with a GPU context, from the driver. A process that only looked for a GPU (like an
    import of diffusers) has no context."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    pids = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return {int(pid) for pid in pids} & {pid for node in fleet.agents for pid in fleet.pids(node)}


def trained(folder, device):
    """Return the results of a run without exploration, with both nodes in every iteration."""
    with a_run(folder, on(device, engine_config(ITERATIONS + WARM_UP, 24))) as fleet:
        fleet.wait_for_iteration(1)
        names = {fleet.pid_of("trainer", "trainer"): "trainer", fleet.pid_of("spot-0", "worker-0"): "worker"}
        on_gpu = sorted(names.get(pid, "another") for pid in on_gpus(fleet))
        finish(fleet)
        time.sleep(1.5)  # the coordinator reports usage once a second
        done = fleet.events("iteration_done")
        phases = Counter()
        for event in fleet.events("node_usage", "coordinator"):
            phases.update(event.phase_ms)
        worker = (fleet.folder / "nodes/spot-0/logs/worker-0.log").read_text()
        seconds = [event.wall_seconds for event in done][WARM_UP:]
        return {
            "trainer": fleet.events("engine_started")[-1].devices,
            "worker": worker.split("computes on ")[1].split()[0],
            "on_gpu": on_gpu,
            "median_s": statistics.median(seconds),
            "max_s": max(seconds),
            "phase_s": {name: round(ms / 1000 / len(done), 4) for name, ms in sorted(phases.items())},
            "max_dlogp": max(event.health["dlogp_before_update"] for event in done),
            "made_by_worker": sum(event.made_by.get("spot-0", 0) for event in done),
            "weights": fleet.events("checkpoint_saved")[-1].digest[:16],
        }


@pytest.mark.gpu
@needs_gpus(1)
def test_a_run_computes_on_the_gpu_unless_the_job_chooses_the_cpu(tmp_path):
    """A repeated run on the GPU ends with the same weights bit for bit."""
    runs = {
        name: trained(tmp_path / name, device) for name, device in (("gpu", "auto"), ("again", "cuda"), ("cpu", "cpu"))
    }
    figures = {**runs, "iterations": ITERATIONS}
    keep_figures("digits-ocr run of two nodes, on the GPU and on the CPU", figures, describe_device())
    for run, device in zip(runs.values(), ("cuda:0", "cuda:0", "cpu"), strict=True):
        assert (run["trainer"], run["worker"]) == (device, device)
        assert run["on_gpu"] == ([] if device == "cpu" else ["trainer", "worker"])
        assert run["made_by_worker"] > 0
        assert run["max_dlogp"] < 1e-4
    assert runs["gpu"]["weights"] == runs["again"]["weights"]


@pytest.mark.gpu
@needs_gpus(1)
def test_half_precision_candidates_are_tried_on_the_gpu_during_training(tmp_path):
    config = EngineConfig(
        iterations=5,
        exploration=ExplorationConfig(
            budget=CandidateBudget(candidates=96),
            wait="all",
            profiles=(ProfileConfig(name="half", dtype="bfloat16", scorer="student"),),
        ),
        evaluation=EvaluationConfig(prompts=16, every=2),
    )
    with a_run(tmp_path, on("cuda", config)) as fleet:
        finish(fleet)
        assert [event.explored for event in fleet.events("iteration_done")] == [96, 96, 96, 96, 0]
        assert [event.iteration for event in fleet.events("evaluated")] == [0, 2, 4, 5]


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.timeout(150)
@pytest.mark.parametrize("repeat", range(1, SP_REPEATS + 1))
def test_two_workers_share_images_on_one_gpu_even_after_a_kill(tmp_path, repeat):
    config = on("cuda", engine_config(200, 8), sp_degree=2, trace_steps=True, step_seconds=0.05)
    with a_run(tmp_path, config, workers=2) as fleet:
        sharing = Sharing(fleet.folder / "nodes", workers=2)
        sharing.wait({"spot-0": 0})
        seconds = sharing.hurt({"spot-0": (1, signal.SIGKILL)})
        fleet.wait_for_iteration(len(fleet.manifests()) + 1)
        dlogp = max(event.health["dlogp_before_update"] for event in fleet.events("iteration_done"))
        assert dlogp < config.algorithm.clip_range
        figures = {"shared_again_s": seconds, "max_dlogp": dlogp}
        keep_figure("two workers share images on one GPU", [f"repeat {repeat}"], figures, describe_device())


@pytest.mark.gpu
@needs_gpus(2)
@pytest.mark.timeout(150)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_two_workers_share_images_on_two_gpus_through_nccl(tmp_path, how):
    """The trainer shares the first GPU. A worker is lost, the other aborts their group, and a new group forms."""
    config = on("cuda", engine_config(200, 8), sp_degree=2, trace_steps=True, step_seconds=0.05)
    with a_run(tmp_path, config, workers=2) as fleet:
        sharing = Sharing(fleet.folder / "nodes", workers=2)
        sharing.wait({"spot-0": 0})
        seconds = sharing.hurt({"spot-0": (1, how)})
        fleet.wait_for_iteration(len(fleet.manifests()) + 1)
        dlogp = max(event.health["dlogp_before_update"] for event in fleet.events("iteration_done"))
        assert dlogp < config.algorithm.clip_range
        figures = {"shared_again_s": seconds, "max_dlogp": dlogp}
        keep_figure("two workers share images on two GPUs, NCCL", [how.name], figures, describe_device())


@pytest.mark.gpu
@needs_gpus(1)
def test_ray_workers_compute_on_the_gpus_assigned_by_ray(tmp_path):
    pytest.importorskip("ray")
    gpus = torch.cuda.device_count()
    # One more worker than GPUs, so two must share one.
    with a_run(tmp_path, on("cuda", engine_config(500, 24), name="ray"), workers=gpus + 1) as fleet:
        logs = [fleet.folder / f"nodes/spot-0/logs/worker-{number}.log" for number in range(gpus + 1)]
        fleet.wait_for((fleet.folder / "nodes/spot-0/ready.json").exists)
        fleet.wait_for(lambda: any("spot-0" in event.made_by for event in fleet.events("iteration_done")))
        assert fleet.events("engine_started")[-1].devices == "cuda:0"
        assert all("computes on cuda:0\n" in log.read_text() for log in logs)  # each sees only its own
        assert on_gpus(fleet) >= {newest_pid(log) for log in logs}


def sum_on(device, pipe):
    pipe.send(float(torch.ones(8, device=device).sum()))


@pytest.mark.gpu
@needs_gpus(1)
def test_processes_forked_by_the_node_agent_can_use_a_gpu():
    """No module loaded before the fork (engine/node/agent.py) may have looked for a GPU."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    program = multiprocessing.get_context("spawn").Process(target=fork_as_the_agent_does, args=(theirs,))
    program.start()
    try:
        assert ours.poll(120), "no answer"
        assert ours.recv() == 8.0
    finally:
        program.kill()


def fork_as_the_agent_does(pipe):
    """Fork in a new process, because the forkserver of the tests may already have imported diffusers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engine.entrypoints.processes"])
    forked = context.Process(target=sum_on, args=("cuda:0", pipe))
    forked.start()
    forked.join()

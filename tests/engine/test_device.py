"""The device that a process of a node computes on; CUDA is faked."""

import pytest
import torch

from engine.worker.device import device_of


def fake_gpus(monkeypatch, gpus, *, usable=True):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable and gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [
        (0, ["cpu", "cpu", "cpu", "cpu"]),
        (1, ["cuda:0", "cuda:0", "cuda:0", "cuda:0"]),
        (2, ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        (8, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
    ],
)
def test_processes_of_a_node_take_its_gpus_in_turn(monkeypatch, gpus, devices):
    fake_gpus(monkeypatch, gpus)
    assert [device_of("auto", number) for number in range(4)] == devices
    assert [device_of("cpu", number) for number in range(4)] == ["cpu"] * 4


def test_a_gpu_that_torch_cannot_use_does_not_count(monkeypatch):
    fake_gpus(monkeypatch, 1, usable=False)
    assert device_of("auto", 0) == "cpu"


def test_a_job_that_wants_a_gpu_gets_one_or_an_error_with_the_reason(monkeypatch):
    fake_gpus(monkeypatch, 2)
    assert device_of("cuda", 3) == "cuda:1"
    fake_gpus(monkeypatch, 0)
    with pytest.raises(RuntimeError, match="can use no GPU here"):
        device_of("cuda", 0)


def test_a_job_on_the_cpu_makes_no_cuda_call(monkeypatch):
    def fail():
        raise AssertionError("CUDA was called")

    monkeypatch.setattr(torch.cuda, "is_available", fail)
    monkeypatch.setattr(torch.cuda, "device_count", fail)
    assert device_of("cpu", 1) == "cpu"


@pytest.mark.parametrize(("gpus", "workers", "each"), [(8, 8, 1.0), (8, 3, 2.0), (1, 1, 1.0), (1, 2, 0.5), (2, 3, 0.5)])
def test_gpus_are_divided_evenly_between_ray_workers(gpus, workers, each):
    pytest.importorskip("ray")
    from engine.ray.supervisor import gpus_of_a_worker

    assert gpus_of_a_worker(gpus, workers) == each


def test_the_gpu_shares_of_all_ray_workers_fit_on_one_gpu():
    pytest.importorskip("ray")
    from engine.ray.supervisor import gpus_of_a_worker

    for workers in range(1, 40):
        part = round(10_000 * gpus_of_a_worker(1, workers))
        assert 0 < part * workers <= 10_000

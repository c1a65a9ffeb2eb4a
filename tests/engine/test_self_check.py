"""A node's check of itself, on made-up system files."""

import json
import subprocess
import sys
from collections import namedtuple

import pytest

from engine.node import self_check
from engine.node.self_check import CUDA_PROGRAM, unfit


class Machine:
    """System files below a folder, and the answers of the programs."""

    def __init__(self, root, gpus=2, driver="580.95.05", switches=0):
        self.root, self.asked = root, []
        self.state, self.found = "active", {"count": gpus, "version": "13.0", "wrong": {}}
        devices = [("0x10de", "0x030200")] * gpus + [("0x10de", "0x040300"), ("0x1d0f", "0x020000")]
        for number, (vendor, kind) in enumerate(devices):
            folder = root / f"sys/bus/pci/devices/0000:{number:02x}:00.0"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(f"{vendor}\n")
            (folder / "class").write_text(f"{kind}\n")
        if driver:
            (root / "proc/driver/nvidia").mkdir(parents=True)
            (root / "proc/driver/nvidia/version").write_text("NVRM version")
            (root / "sys/module/nvidia").mkdir(parents=True)
            (root / "sys/module/nvidia/version").write_text(f"{driver}\n")
        for number in range(switches):
            (root / f"proc/driver/nvidia-nvswitch/devices/{number}").mkdir(parents=True)

    def run(self, command, seconds):
        self.asked.append(command[0])
        answer = self.state if command[0] == "systemctl" else json.dumps(self.found)
        if isinstance(answer, Exception):
            raise answer
        return f"{answer}\n"

    def verdict(self, device="cuda"):
        return unfit(device, self.root, self.root, self.run)


def test_a_sound_machine_passes_and_each_gpu_is_used(tmp_path):
    machine = Machine(tmp_path, gpus=8, switches=4)
    assert machine.verdict() is None
    assert machine.asked == ["systemctl", sys.executable]


def test_a_machine_without_switches_needs_no_fabric_manager(tmp_path):
    machine = Machine(tmp_path)
    assert machine.verdict("auto") is None
    assert machine.asked == [sys.executable]


def test_a_run_on_cpus_asks_nothing(tmp_path):
    machine = Machine(tmp_path, driver="")
    assert machine.verdict("cpu") is None
    assert machine.asked == []


def test_a_machine_without_gpus_passes_unless_the_job_needs_one(tmp_path):
    machine = Machine(tmp_path, gpus=0, driver="")
    assert machine.verdict("auto") is None
    assert "no NVIDIA GPU" in machine.verdict("cuda")
    assert "another instance type" in machine.verdict("cuda")


def test_a_missing_driver_is_named(tmp_path):
    assert "2 NVIDIA GPUs and no driver" in Machine(tmp_path, driver="").verdict("auto")


@pytest.mark.parametrize("state", ["inactive", "failed", subprocess.TimeoutExpired("systemctl", 30)])
def test_switches_without_fabric_manager_name_the_package_of_the_driver(tmp_path, state):
    machine = Machine(tmp_path, gpus=8, switches=4)
    machine.state = state
    if isinstance(state, Exception):
        machine.run = lambda command, seconds: (_ for _ in ()).throw(state)
    verdict = machine.verdict()
    assert "nvidia-fabricmanager-580" in verdict
    assert "580.95.05" in verdict


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"count": 0, "version": "13.0", "wrong": {}}, "sees 0 of the machine's 2 GPUs"),
        ({"count": 1, "version": "13.0", "wrong": {}}, "sees 1 of the machine's 2 GPUs"),
        ({"count": 2, "version": "13.0", "wrong": {"1": "CUDA error 802"}}, "GPU 1: CUDA error 802"),
    ],
)
def test_a_gpu_that_does_not_compute_is_named_with_a_cure(tmp_path, found, words):
    machine = Machine(tmp_path)
    machine.found = found
    assert words in machine.verdict()
    assert "use an image whose driver fits" in machine.verdict()


def test_a_disk_without_room_is_refused(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(100 << 30, 97 << 30, 3 << 30)
    monkeypatch.setattr(self_check.shutil, "disk_usage", lambda _: usage)
    assert "3 GiB free, and a node needs 5 GiB" in Machine(tmp_path).verdict()


def test_the_program_that_asks_torch_runs_here(capsys):
    exec(CUDA_PROGRAM, {})
    assert json.loads(capsys.readouterr().out)["wrong"] == {}

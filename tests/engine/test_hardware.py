"""The hardware of a node in words, read from a made-up /sys and /proc."""

import subprocess

import pytest

from engine.node.hardware import ASK_GPUS, LONGEST, hardware


def machine(root, gpus=0, cpuinfo="model name\t: AMD EPYC 7R13\n", meminfo="MemTotal:       32505856 kB\n"):
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(cpuinfo)
    (root / "proc/meminfo").write_text(meminfo)
    for number in range(gpus):
        device = root / f"sys/bus/pci/devices/0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
    return root


def no_call(command):
    raise AssertionError(f"{command} was called on a machine without GPUs")


def test_a_machine_without_gpus_has_cores_and_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert hardware(machine(tmp_path), no_call) == "8 CPU cores (AMD EPYC 7R13), 31.0 GiB of memory"


def test_equal_gpus_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    asked = []

    def answer(command):
        asked.append(command)
        return "NVIDIA L4, 23034\nNVIDIA L4, 23034\nNVIDIA A10G, 23028\n"

    assert hardware(machine(tmp_path, gpus=3), answer).startswith(
        "2 NVIDIA L4 with 22.5 GiB, 1 NVIDIA A10G with 22.5 GiB, 1 CPU core (AMD"
    )
    assert asked == [ASK_GPUS]


@pytest.mark.parametrize(
    "failure", [OSError("no such program"), subprocess.TimeoutExpired("nvidia-smi", 10), "No devices were found\n"]
)
def test_gpus_that_cannot_be_asked_are_counted_on_the_bus(tmp_path, failure):
    def answer(command):
        if isinstance(failure, Exception):
            raise failure
        return failure

    assert hardware(machine(tmp_path, gpus=2), answer).startswith("2 NVIDIA GPUs, ")


def test_what_cannot_be_read_is_left_out_and_the_text_is_bounded(tmp_path):
    found = hardware(tmp_path, no_call)
    assert "CPU core" in found
    assert "memory" not in found
    (tmp_path / "more").mkdir()
    assert len(hardware(machine(tmp_path / "more", cpuinfo="model name: " + "x" * 999), no_call)) == LONGEST

"""Check a node before its model is fetched: disk, driver, a matrix product on every GPU, Fabric Manager.

A verdict says what was found and what would cure it. The agent then exits with EXIT_UNFIT, and the launcher counts the
instance type as denied: another node of the type would fail in the same way, after paid minutes of downloads.
GPUs are counted on the PCI bus, so a machine without GPUs passes. Standard library only; torch runs in a process of its
own, because the agent stays small.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

FREE_GIB = 5
"""Least free disk space in GiB of a node before the model. The fetch checks the room for the model itself."""

NVIDIA = "0x10de"
DISPLAY = ("0x0300", "0x0302")
"""PCI vendor, and the beginnings of the PCI classes of GPUs."""

CUDA_SECONDS = 180.0
"""Longest time of the matrix products. Importing torch from a cold disk takes up to a minute."""

CUDA_PROGRAM = """
import json, torch
found = {"count": torch.cuda.device_count(), "version": torch.version.cuda, "wrong": {}}
for number in range(found["count"]):
    try:
        a = torch.arange(256 * 256, dtype=torch.float32).reshape(256, 256) % 7
        same = torch.equal((a.to(f"cuda:{number}") @ a.T.to(f"cuda:{number}")).cpu(), a @ a.T)
        if not same:
            found["wrong"][number] = "a matrix product has a wrong result"
    except Exception as error:
        found["wrong"][number] = str(error).splitlines()[0]
print(json.dumps(found))
"""
"""Small integers: their products are exact in float32 and in TF32, so equality is the test."""

Run = Callable[[Sequence[str], float], str]
"""Runs a command for at most this many seconds and returns its output. Raises OSError or subprocess.SubprocessError."""


def unfit(device: str, folder: Path, root: Path = Path("/"), run: Run | None = None) -> str | None:
    """Return why this machine cannot be a node, with a cure, or None. `device`: the job's `runtime.device`.

    `folder`: of the node. `root`: of the system's files.
    """
    run = run or _run
    free = shutil.disk_usage(folder).free >> 30
    if free < FREE_GIB:
        return (
            f"the disk of {folder} has {free} GiB free, and a node needs {FREE_GIB} GiB beside its model; use an image "
            "with less on its disk"
        )
    if device == "cpu":
        return None
    gpus = gpus_on_the_bus(root)
    if gpus == 0 and device == "auto":
        return None
    return _driver(gpus, root) or _fabric_manager(root, run) or _cuda(gpus, run)


def gpus_on_the_bus(root: Path) -> int:
    """Count the NVIDIA GPUs on the PCI bus."""
    count = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        if _read(device / "vendor") == NVIDIA and _read(device / "class").startswith(DISPLAY):
            count += 1
    return count


def _driver(gpus: int, root: Path) -> str | None:
    if gpus == 0:
        return "the machine has no NVIDIA GPU, and the job's runtime.device needs one; use another instance type"
    if not (root / "proc/driver/nvidia/version").exists():
        return (
            f"the machine has {gpus} NVIDIA GPUs and no driver for them; use an image with NVIDIA's driver, or leave "
            "`image` out of the job for SkyPilot's own"
        )
    return None


def _fabric_manager(root: Path, run: Run) -> str | None:
    """Check the service without which CUDA reports error 802 on machines with NVSwitch."""
    switches = root / "proc/driver/nvidia-nvswitch/devices"
    if not switches.is_dir() or not any(switches.iterdir()):
        return None
    try:
        state = run(["systemctl", "is-active", "nvidia-fabricmanager"], 30.0).strip()
    except (OSError, subprocess.SubprocessError) as error:
        state = str(error)
    if state == "active":
        return None
    driver = _read(root / "sys/module/nvidia/version")
    package = f"nvidia-fabricmanager-{driver.partition('.')[0]}" if driver else "nvidia-fabricmanager"
    return (
        f"the machine has NVSwitches, and Fabric Manager is {state or 'not there'}, so CUDA does not start; use an "
        f"image that starts nvidia-fabricmanager (package {package}, of the driver's version {driver or 'unknown'})"
    )


def _cuda(gpus: int, run: Run) -> str | None:
    cure = "use an image whose driver fits, or another instance type"
    try:
        result = json.loads(run([sys.executable, "-P", "-c", CUDA_PROGRAM], CUDA_SECONDS).splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return f"torch cannot be asked about the machine's {gpus} GPUs ({error}); {cure}"
    if result["wrong"]:
        words = "; ".join(f"GPU {number}: {text}" for number, text in result["wrong"].items())
        return f"{len(result['wrong'])} of {gpus} GPUs do not compute ({words}); {cure}"
    if result["count"] != gpus:
        return (
            f"torch (CUDA {result['version']}) sees {result['count']} of the machine's {gpus} GPUs: the driver is too "
            f"old for this CUDA, or the GPUs are; {cure}"
        )
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _run(command: Sequence[str], seconds: float) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)
    if done.returncode and not done.stdout.strip():
        raise subprocess.SubprocessError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no output")
    return done.stdout

"""Keep what a node can fetch again on local NVMe: the model's folder and the encoded prompts.

    lsblk -> an unused local disk -> wipefs finds nothing on it -> ext4 -> MOUNT -> links from the node's folders

Local disks are several times faster than boot disks, are paid for with the instance, and are lost with the instance. So
only the folders `KEPT` go there. Committed work, the journal and unsent results stay on the boot disk.

A disk is formatted only if all of this holds: its model is that of a local disk, it has no partition and no other
device on it, no file system, no mount, and wipefs finds no signature. Any doubt leaves the disk alone, and the boot
disk is used. `choose` decides on the output of lsblk; `use_local_disk` acts. Standard library only.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MOUNT = Path("/mnt/spotrl")

AWS_MODEL = "Amazon EC2 NVMe Instance Storage"
"""Model of AWS's local disks. Volumes of EBS are `Amazon Elastic Block Store`."""

GOOGLE_MODEL = re.compile(r"nvme_card\d+")
"""Model of Google's local disks, with the disk's number."""

GOOGLE_NETWORK_MODEL = "nvme_card-pd"
"""Model of Google's persistent disks on NVMe."""

GOOGLE_LINKS = "dev/disk/by-id/google-local-nvme-ssd-*"
"""Links that Google's images make to local disks. Older machine types call their local disks `nvme_card`."""

COLUMNS = "PATH,TYPE,SIZE,MODEL,RO,FSTYPE,PTTYPE,MOUNTPOINT"
"""Columns of lsblk, known to util-linux 2.34 (Ubuntu 20.04) and later."""

FILES_SHARE = 0.98
"""Share of a disk that ext4 leaves for files, without a journal and without reserved blocks."""

COMMAND_SECONDS = 60.0
"""Longest time of each command. ext4 with late initialisation takes seconds for terabytes."""

KEPT = ("weights", "prompts")
"""Names of the folders on the local disk."""

Run = Callable[[Sequence[str]], str]
"""Runs a command and returns its output. Raises OSError or subprocess.SubprocessError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalDisk:
    """An unused local disk. `size`: in bytes."""

    path: str
    size: int


def choose(
    devices: Sequence[Mapping[str, object]], linked: frozenset[str], least: int
) -> tuple[LocalDisk | None, tuple[str, ...]]:
    """Return the largest unused local disk, or None, and why each other local disk cannot be used.

    `devices`: `blockdevices` of lsblk. `linked`: paths that Google's links lead to. `least`: bytes that must fit.
    Several disks are not joined: that needs mdadm, which not every image has.
    """
    unused: list[LocalDisk] = []
    reasons: list[str] = []
    for device in devices:
        if not _is_local(device, linked):
            continue
        disk = LocalDisk(path=str(device["path"]), size=int(str(device["size"])))
        if (use := _use_of(device)) is not None:
            reasons.append(f"{disk.path} {use}")
        elif disk.size * FILES_SHARE < least:
            reasons.append(f"{disk.path} has {disk.size >> 30} GiB, less than the {least >> 30} free on the boot disk")
        else:
            unused.append(disk)
    return max(unused, key=lambda disk: disk.size, default=None), tuple(reasons)


def use_local_disk(folder: Path, mount: Path = MOUNT, root: Path = Path("/"), run: Run | None = None) -> str:
    """Put the `KEPT` folders of the node in `folder` on a local disk, and return the outcome in words.

    Without a usable local disk the folders are on the boot disk. Raises nothing, because a node works without.
    """
    places = {"weights": folder.parent / "weights", "prompts": folder / "prompts"}
    try:
        outcome, is_mounted = _mounted(folder, mount, root, run or _run)
        for name in KEPT if is_mounted else ():
            _link(places[name], mount / name)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        words = next(iter(str(error).splitlines()), "") or repr(error)
        outcome = f"local NVMe is not used ({words}); the model goes to the boot disk"
    for place in places.values():
        if place.is_symlink() and not place.exists():  # the disk is gone, for example after a stop of the instance
            place.unlink(missing_ok=True)
    return outcome


def _mounted(folder: Path, mount: Path, root: Path, run: Run) -> tuple[str, bool]:
    """Mount an unused local disk. Returns the outcome in words, and whether a local disk is mounted at `mount`.

    A local disk must have at least the room that is free on the boot disk, because the boot disk was bought to fit the
    model.
    """
    if os.path.ismount(mount):
        return f"local NVMe: mounted at {mount} already", True
    if not any((root / "dev").glob("nvme*n*")):
        return "local NVMe: none", False
    devices = json.loads(run(["lsblk", "--json", "--bytes", "--output", COLUMNS]))["blockdevices"]
    linked = frozenset(str(link.resolve()) for link in root.glob(GOOGLE_LINKS))
    disk, reasons = choose(devices, linked, shutil.disk_usage(folder.parent).free)
    if disk is None:
        return f"local NVMe is not used: {'; '.join(reasons)}" if reasons else "local NVMe: none", False
    if signatures := run(["sudo", "-n", "wipefs", "--no-act", disk.path]).split():
        return f"local NVMe is not used: wipefs found a signature on {disk.path} ({' '.join(signatures)})", False
    options = ["-m", "0", "-O", "^has_journal", "-E", "nodiscard,lazy_itable_init=1"]
    run(["sudo", "-n", "mkfs.ext4", "-q", "-F", *options, disk.path])
    run(["sudo", "-n", "mkdir", "-p", str(mount)])
    run(["sudo", "-n", "mount", "-o", "noatime,nosuid,nodev", disk.path, str(mount)])
    run(["sudo", "-n", "chown", f"{os.getuid()}:{os.getgid()}", str(mount)])
    mount.chmod(0o700)
    return f"local NVMe: {disk.path}, {disk.size >> 30} GiB, formatted and mounted at {mount}", True


def _is_local(device: Mapping[str, object], linked: frozenset[str]) -> bool:
    model = str(device.get("model") or "").strip()
    if device.get("type") != "disk" or model == GOOGLE_NETWORK_MODEL:
        return False
    return model == AWS_MODEL or bool(GOOGLE_MODEL.fullmatch(model)) or device.get("path") in linked


def _use_of(device: Mapping[str, object]) -> str | None:
    """Return the use of a disk in words. None: the disk is unused."""
    below = list(_below(device))
    mounts = [str(part["mountpoint"]) for part in (device, *below) if part.get("mountpoint")]
    if mounts:
        return f"is mounted at {', '.join(mounts)}"
    if below or device.get("pttype"):
        return f"has {len(below)} partitions or other devices"
    if kind := device.get("fstype"):
        return f"has a file system ({kind})"
    return "is read-only" if device.get("ro") in (True, "1", 1) else None


def _below(device: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield the partitions, volumes and arrays on a device."""
    children = device.get("children")
    for child in children if isinstance(children, list) else ():
        yield child
        yield from _below(child)


def _link(place: Path, target: Path) -> None:
    """Make `place` a link to a folder on the local disk. A folder on the boot disk stays. Raises OSError."""
    target.mkdir(exist_ok=True)
    if place.is_symlink():
        place.unlink()
    if not place.exists():
        place.symlink_to(target)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    if done.returncode:
        last = next(reversed(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        raise subprocess.SubprocessError(f"{' '.join(command)}: {last}")
    return done.stdout

"""Local NVMe of a node: which disk is used, and how. The outputs of lsblk follow the clouds' documentation."""

import json
import os
import stat

import pytest

from engine.node import local_disk
from engine.node.local_disk import choose, use_local_disk

GB = 10**9
EBS, LOCAL = "Amazon Elastic Block Store", "Amazon EC2 NVMe Instance Storage"


def device(number, model, size=3_750 * GB, **more):
    return {
        "path": f"/dev/nvme{number}n1",
        "type": "disk",
        "size": size,
        "model": model,
        "ro": False,
        "fstype": None,
        "pttype": None,
        "mountpoint": None,
    } | more


def part(path, mountpoint=None, fstype="ext4"):
    return {"path": path, "type": "part", "size": GB, "model": None, "fstype": fstype, "mountpoint": mountpoint}


EBS_ROOT = device(
    0, EBS, 100 << 30, pttype="gpt", children=[part("/dev/nvme0n1p1", "/"), part("/dev/nvme0n1p15", "/boot/efi")]
)
GOOGLE_ROOT = device(0, "nvme_card-pd", 100 << 30, pttype="gpt", children=[part("/dev/nvme0n1p1", "/")])
P5 = [EBS_ROOT, *(device(number, LOCAL, 3_840 * GB) for number in range(1, 9))]


def path_of(devices, linked=(), least=60 * GB):
    disk, reasons = choose(devices, frozenset(linked), least)
    return disk.path if disk else None, " ".join(reasons)


def test_the_first_of_equal_local_disks_is_used():
    assert path_of(P5) == ("/dev/nvme1n1", "")


def test_the_largest_local_disk_is_used():
    assert path_of([EBS_ROOT, device(1, LOCAL, 125 * GB), device(2, LOCAL, 250 * GB)])[0] == "/dev/nvme2n1"


@pytest.mark.parametrize(
    "devices",
    [
        [],
        [EBS_ROOT],
        [EBS_ROOT, device(1, EBS)],  # a data volume, empty and not mounted
        [GOOGLE_ROOT, device(1, "nvme_card-pd")],
        [{**device(0, "PersistentDisk"), "path": "/dev/sda"}],
        [{**device(1, LOCAL), "type": "loop"}],
        [device(0, None), device(1, "Samsung SSD 980")],
    ],
    ids=["nothing", "EBS root", "EBS volume", "persistent disk", "SCSI", "no disk", "another's"],
)
def test_no_other_disk_is_ever_local(devices):
    assert path_of(devices, least=0) == (None, "")


def test_disks_of_google_are_known_by_their_number_or_by_the_links_of_the_image():
    numbered = [GOOGLE_ROOT, device(1, "nvme_card0", 402 * GB), device(2, "nvme_card1", 402 * GB)]
    assert path_of(numbered) == ("/dev/nvme1n1", "")
    old = [GOOGLE_ROOT, device(1, "nvme_card", 402 * GB)]
    assert path_of(old) == (None, "")
    assert path_of(old, linked=["/dev/nvme1n1"]) == ("/dev/nvme1n1", "")
    assert path_of([GOOGLE_ROOT], linked=["/dev/nvme0n1"]) == (None, "")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"mountpoint": "/opt/dlami/nvme", "fstype": "xfs"}, "is mounted at /opt/dlami/nvme"),
        ({"fstype": "ext4"}, "has a file system (ext4)"),
        ({"fstype": "linux_raid_member"}, "has a file system (linux_raid_member)"),
        ({"pttype": "gpt"}, "has 0 partitions"),
        ({"children": [part("/dev/nvme1n1p1")]}, "has 1 partitions"),
        ({"children": [{**part("/dev/md0", "/data"), "type": "raid0"}]}, "is mounted at /data"),
        ({"children": [{**part("/dev/vg"), "children": [part("/dev/vg/lv", "/x")]}]}, "is mounted at /x"),
        ({"ro": True}, "is read-only"),
        ({"size": 61 * GB}, "has 56 GiB, less than the 55 free"),
    ],
)
def test_a_local_disk_in_use_or_too_small_is_left_alone_and_the_reason_is_told(more, reason):
    path, reasons = path_of([EBS_ROOT, device(1, LOCAL, **more)])
    assert path is None
    assert reason in reasons
    assert path_of([EBS_ROOT, device(1, LOCAL, **more), device(2, LOCAL)])[0] == "/dev/nvme2n1"


# --- the disk is formatted, mounted and used -----------------------------------------------------------


class Machine:
    """Folders of a node, system files with NVMe, and programs that write down how they were called."""

    def __init__(self, root, monkeypatch):
        self.root, self.mount, self.folder = root / "system", root / "mnt/spotrl", root / "home/spotrl/node"
        self.calls, bin_folder = root / "calls", root / "bin"
        for made in (self.root / "dev", self.folder, bin_folder):
            made.mkdir(parents=True)
        (self.root / "dev/nvme0n1").touch()
        self.devices(EBS_ROOT, device(1, LOCAL))
        self.bin = bin_folder
        self.program("sudo", '[ "$1" = -n ] && shift && exec "$@"')
        self.program("lsblk", f"cat {root}/lsblk.json")
        for name in ("wipefs", "mkfs.ext4", "mount", "chown"):
            self.program(name, "")
        monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")

    def program(self, name, does):
        file = self.bin / name
        file.write_text(f'#!/bin/sh\necho {name} "$@" >>{self.calls}\n{does}\n')
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def devices(self, *devices):
        (self.root.parent / "lsblk.json").write_text(json.dumps({"blockdevices": devices}))

    def use(self):
        return use_local_disk(self.folder, self.mount, self.root)

    def called(self):
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [line for line in lines if not line.startswith("sudo")]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(local_disk.shutil, "disk_usage", lambda _: Free)
    return Machine(tmp_path, monkeypatch)


class Free:
    free = 60 * GB


def test_model_and_prompts_are_on_the_local_disk_and_nothing_else(machine):
    assert "/dev/nvme1n1, 3492 GiB, formatted and mounted" in machine.use()
    asked, looked, made, mounted, owned = machine.called()
    assert asked.startswith("lsblk --json")
    assert looked == "wipefs --no-act /dev/nvme1n1"
    assert made.startswith("mkfs.ext4 ")
    assert made.endswith(" /dev/nvme1n1")
    assert mounted == f"mount -o noatime,nosuid,nodev /dev/nvme1n1 {machine.mount}"
    assert owned == f"chown {os.getuid()}:{os.getgid()} {machine.mount}"
    links = {path.relative_to(machine.folder.parent) for path in machine.folder.parent.rglob("*") if path.is_symlink()}
    assert {str(link) for link in links} == {"weights", "node/prompts"}
    (machine.folder.parent / "weights" / "model").write_text("bytes")
    assert (machine.mount / "weights/model").read_text() == "bytes"


def test_the_next_agent_of_the_machine_finds_the_disk_mounted(machine, monkeypatch):
    machine.use()
    machine.calls.unlink()
    (machine.folder / "prompts").unlink()  # another node's folder
    monkeypatch.setattr(local_disk.os.path, "ismount", lambda path: path == machine.mount)
    assert "already" in machine.use()
    assert machine.called() == []
    assert (machine.folder / "prompts").resolve() == machine.mount / "prompts"


def test_a_machine_without_nvme_runs_no_program(machine):
    (machine.root / "dev/nvme0n1").unlink()
    assert machine.use() == "local NVMe: none"
    assert machine.called() == []
    assert not machine.mount.exists()


def test_a_machine_with_only_its_boot_disk_is_not_touched(machine):
    machine.devices(EBS_ROOT)
    assert machine.use() == "local NVMe: none"
    assert len(machine.called()) == 1


def test_a_signature_that_lsblk_does_not_know_leaves_the_disk_alone(machine):
    machine.program("wipefs", "echo DEVICE OFFSET TYPE; echo nvme1n1 0x218 LVM2_member")
    assert "wipefs found a signature on /dev/nvme1n1" in machine.use()
    assert not any(line.startswith(("mkfs", "mount")) for line in machine.called())


@pytest.mark.parametrize("broken", ["sudo", "lsblk", "wipefs", "mkfs.ext4", "mount", "chown"])
def test_after_a_failure_the_model_is_on_the_boot_disk_and_the_reason_is_told(machine, broken):
    machine.program(broken, f"echo '{broken}: a password is required' >&2; exit 1")
    outcome = machine.use()
    assert "a password is required" in outcome
    assert "the model goes to the boot disk" in outcome
    assert not (machine.folder.parent / "weights").exists()
    assert not (machine.folder.parent / "weights").is_symlink()
    assert not any(line.startswith("mount") for line in machine.called()) or broken in ("mount", "chown")


class Killed(BaseException):
    """The agent's process ends here."""


@pytest.mark.parametrize(("last", "outcome", "is_linked"), [
    ("lsblk", "formatted and mounted", True),
    ("wipefs", "formatted and mounted", True),
    ("mkfs.ext4", "has a file system (ext4)", False),
    ("mkdir", "has a file system (ext4)", False),
    ("mount", "already", True),
    ("chown", "already", True),
])  # fmt: skip
def test_an_agent_killed_after_any_program_leaves_a_machine_that_works(machine, monkeypatch, last, outcome, is_linked):
    def run(command):
        printed = local_disk._run(command)
        if last in command:
            raise Killed
        return printed

    with pytest.raises(Killed):
        use_local_disk(machine.folder, machine.mount, machine.root, run)
    done = ("lsblk", "wipefs", "mkfs.ext4", "mkdir", "mount", "chown").index(last)
    if done >= 2:
        machine.devices(EBS_ROOT, device(1, LOCAL) | {"fstype": "ext4"})
    monkeypatch.setattr(local_disk.os.path, "ismount", lambda path: done >= 4)
    assert outcome in machine.use()
    weights = machine.folder.parent / "weights"
    assert weights.is_symlink() == is_linked
    weights.mkdir(exist_ok=True)  # the fetch of the model
    (weights / "model").write_text("bytes")


def test_a_mount_that_the_node_cannot_write_to_is_not_used(machine, monkeypatch):
    """A killed agent mounted the disk, and did not come to chown."""
    monkeypatch.setattr(local_disk.os.path, "ismount", lambda path: True)
    machine.mount.parent.mkdir()
    machine.mount.touch()  # for root every folder is writable
    assert "the model goes to the boot disk" in machine.use()
    assert not (machine.folder.parent / "weights").is_symlink()


@pytest.mark.parametrize("frozen", ["lsblk", "mkfs.ext4", "mount"])
def test_a_program_that_freezes_is_given_up(machine, monkeypatch, frozen):
    monkeypatch.setattr(local_disk, "COMMAND_SECONDS", 0.3)
    machine.program(frozen, "kill -STOP $$")
    outcome = machine.use()
    assert "timed out" in outcome
    assert "the model goes to the boot disk" in outcome
    assert not (machine.folder.parent / "weights").is_symlink()


@pytest.mark.parametrize("answer", ["", "{}", '{"blockdevices": [{"type": "disk", "model": "nvme_card0"}]}', "[]"])
def test_an_answer_that_cannot_be_read_is_no_reason_to_fail(machine, answer):
    (machine.root.parent / "lsblk.json").write_text(answer)
    assert "the model goes to the boot disk" in machine.use()


def test_a_model_on_the_boot_disk_stays_there(machine):
    (machine.folder.parent / "weights").mkdir()
    (machine.folder.parent / "weights/model").write_text("bytes")
    machine.use()
    assert not (machine.folder.parent / "weights").is_symlink()
    assert (machine.folder.parent / "weights/model").exists()


def test_links_to_a_disk_that_is_gone_are_removed(machine):
    (machine.folder.parent / "weights").symlink_to(machine.mount / "weights")
    machine.devices(EBS_ROOT)
    machine.use()
    assert not (machine.folder.parent / "weights").is_symlink()

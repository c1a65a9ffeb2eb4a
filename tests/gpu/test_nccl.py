"""NCCL communicators: many by number over one store; the death of a rank breaks only those that contain it.

The same functions run with gloo on the CPU, and with gloo behind the watch of NCCL's groups ("watched"). NCCL needs one
GPU per rank, because it refuses two ranks on one GPU.
"""

import os
import signal
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.parallel.communicator import ON_CPU, Communicators, TornGroup, join_store, links_of
from tests.benchmarks.sp_parity import Ranks
from tests.gpu.device import needs_gpus
from tests.gpu.figures import describe_device, keep_figures

CACHED = 4
"""Number of communicators of the same two ranks."""
TIMEOUT_SECONDS = 10.0
REGROUPS, WARM_UP = 50, 3
LEFT_BYTES = 200_000
"""Most bytes of a process that a regroup may add, by the noise of the allocator: gloo adds 15 kB."""
HANGS_SECONDS = 1.0
"""Seconds that a collective with a dead rank is watched, to see that it does not end by itself."""


def begin(member, port, backend):
    store = join_store(port, timeout_seconds=120.0)
    device = torch.device(f"cuda:{member.rank}" if backend == "nccl" else "cpu")
    links = watched_gloo(member.rank) if backend == "watched" else links_of(device)
    member.kept["communicators"] = Communicators(
        store, timeout_seconds=TIMEOUT_SECONDS, patience_seconds=120.0, links=links
    )
    member.kept["device"] = device
    compute_alone(member)


def watched_gloo(rank):
    """Return links of a CPU that pretends to have a GPU: groups are watched as those of NCCL, and made by gloo."""

    def form(backend, *how):
        assert backend == "nccl"
        return ON_CPU.form("gloo", *how)

    return replace(ON_CPU, place=f"pretended GPU {rank}", form=form, mark=lambda: lambda: True)


def compute_alone(member):
    """Compute something on this rank alone."""
    ones = torch.ones(64, 64, device=member.kept["device"])
    return float((ones @ ones).sum())


def finish(member):
    if member.kept["device"].type == "cuda":
        torch.cuda.synchronize(member.kept["device"])


def free_bytes(member):
    device = member.kept["device"]
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def exchange(member, number, members):
    """Use a communicator, created if missing. Return the received values, the seconds and the bytes."""
    free, begun = free_bytes(member), time.perf_counter()
    group = member.kept["communicators"].get(number, members.index(member.rank), len(members))
    sent = torch.full((len(members), 8), float(member.rank), device=member.kept["device"])
    received = group.all_to_all(sent)
    finish(member)
    return received[:, 0].tolist(), time.perf_counter() - begun, free - free_bytes(member)


def cache(ranks):
    """Create and use CACHED communicators of two ranks, then use them again. Return the seconds and bytes of each."""
    made = [ranks.run((0, 1), exchange, number, (0, 1)) for number in range(1, CACHED + 1)]
    again = [ranks.run((0, 1), exchange, number, (0, 1)) for number in range(1, CACHED + 1)]
    assert all(one[0] == [0.0, 1.0] for found in [*made, *again] for one in found)
    return {
        "first_s": made[0][0][1],
        "later_s": [found[0][1] for found in made[1:]],
        "again_ms": 1e3 * statistics.median(found[0][1] for found in again),
        "bytes_each": [found[0][2] for found in made],
    }


def exchange_with_a_dead_rank(member, number, members, kept):
    """Use a communicator with a dead rank, then abort all but some. Return whether it hung, and the abort seconds."""
    communicators, device = member.kept["communicators"], member.kept["device"]
    group = communicators.get(number, members.index(member.rank), len(members))
    hung = False
    try:
        group.all_to_all(torch.zeros(len(members), 8, device=device))
        if device.type == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(device))
            time.sleep(HANGS_SECONDS)
            hung = not done.query()
    except TornGroup:
        pass
    begun = time.perf_counter()
    communicators.keep(kept)
    finish(member)
    return hung, time.perf_counter() - begun


def abort(ranks):
    """Rank 1 dies; its communicators with rank 0 are aborted, and rank 0 continues alone and with rank 2."""
    ranks.run((0, 1), exchange, 1, (0, 1))
    ranks.run((0, 1), exchange, 2, (0, 1))
    others = (0, 2) if len(ranks.processes) > 2 else (0,)
    if len(others) > 1:
        ranks.run(others, exchange, 3, others)
    alone = ranks.run((0,), compute_alone)
    os.kill(ranks.processes[1].pid, signal.SIGKILL)
    ranks.processes[1].join()
    ((hung, seconds),) = ranks.run((0,), exchange_with_a_dead_rank, 1, (0, 1), (3,))
    assert ranks.run((0,), compute_alone) == alone
    if len(others) > 1:
        assert [one[0] for one in ranks.run(others, exchange, 3, others)] == [[0.0, 2.0]] * 2
        assert [one[0] for one in ranks.run(others, exchange, 4, others)] == [[0.0, 2.0]] * 2
    return {"hung_until_aborted": hung, "abort_s": seconds, "others_went_on": len(others) > 1}


def regroup(member, number, members):
    """Replace all communicators by a new one and use it. Return the process's resources after that."""
    member.kept["communicators"].keep(())
    (received, _, _) = exchange(member, number, members)
    assert received == [float(one) for one in members]
    keys = member.kept["communicators"]._store.num_keys()
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count() + len(os.listdir("/proc/self/task")),
        "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "gpu_bytes": -free_bytes(member),
        "store_keys": keys,
    }


def regroup_often(ranks):
    """Regroup two ranks REGROUPS times, with a new communicator each time. Return what each rank holds more at the end.

    The first regroups are not counted: they load code and start threads once.
    """
    found = [ranks.run((0, 1), regroup, number, (0, 1)) for number in range(1, WARM_UP + REGROUPS + 1)]
    for number in range(WARM_UP + REGROUPS + 1, WARM_UP + REGROUPS + 20):
        if all(last["threads"] <= first["threads"] for first, last in zip(found[WARM_UP - 1], found[-1], strict=True)):
            break
        time.sleep(0.1)  # threads of dropped groups may still be ending
        found.append(ranks.run((0, 1), regroup, number, (0, 1)))
    return [
        {name: last[name] - first[name] for name in first}
        for first, last in zip(found[WARM_UP - 1], found[-1], strict=True)
    ]


def every_call(member, number):
    """Run each collective of a group of one twice and check the values; then abort, and continue to compute."""
    group = member.kept["communicators"].get(number, 0, 1)
    sent = torch.arange(8.0, device=member.kept["device"])[None]
    for _ in range(2):
        same = sent.clone()
        group.all_reduce(same)
        group.broadcast(same)
        for received in (group.all_to_all(sent), group.all_gather(sent), same):
            assert torch.equal(received, sent)
    finish(member)
    begun = time.perf_counter()
    member.kept["communicators"].keep(())
    finish(member)
    return time.perf_counter() - begun


def alone(ranks):
    """Check that one rank can make our calls on NCCL with a single GPU."""
    ((_, seconds, taken),) = ranks.run((0,), exchange, 1, (0,))
    before = ranks.run((0,), compute_alone)
    (abort_seconds,) = ranks.run((0,), every_call, 1)
    assert ranks.run((0,), compute_alone) == before
    ((_, again, _),) = ranks.run((0,), exchange, 2, (0,))
    return {"first_s": seconds, "bytes": taken, "abort_s": abort_seconds, "next_s": again}


def with_ranks(number, backend, check):
    ranks = Ranks(number, (), preload=[__name__], on_gpus=backend == "nccl")
    try:
        ranks.run(range(number), begin, ranks._store.port, backend)
        return check(ranks)
    finally:
        ranks.close()


def test_a_rank_is_a_group_by_itself():
    assert with_ranks(1, "gloo", alone)["bytes"] == 0


def test_many_communicators_of_the_same_ranks_coexist():
    found = with_ranks(2, "gloo", cache)
    assert len(found["later_s"]) == CACHED - 1


@pytest.mark.parametrize("backend", ["gloo", "watched"])
def test_a_death_breaks_only_the_communicators_of_its_rank(backend):
    assert with_ranks(3, backend, abort)["others_went_on"]


@pytest.mark.parametrize("backend", ["gloo", "watched"])
def test_fifty_regroups_leave_nothing_behind(backend):
    for more in with_ranks(2, backend, regroup_often):
        assert max(more["files"], more["threads"], more["store_keys"]) <= 0
        assert more["bytes"] < REGROUPS * LEFT_BYTES


@pytest.mark.gpu
@needs_gpus(1)
def test_one_rank_creates_uses_and_aborts_an_nccl_communicator():
    keep_figures("NCCL communicator, one rank", with_ranks(1, "nccl", alone), describe_device())


@pytest.mark.gpu
@needs_gpus(2)
def test_many_nccl_communicators_of_the_same_ranks_coexist():
    keep_figures("NCCL communicators, two ranks", with_ranks(2, "nccl", cache), describe_device())


@pytest.mark.gpu
@needs_gpus(2)
def test_fifty_nccl_regroups_leave_nothing_behind():
    found = with_ranks(2, "nccl", regroup_often)
    keep_figures("NCCL, 50 regroups, what a rank holds more", {"ranks": found}, describe_device())
    for more in found:
        assert max(more["files"], more["threads"], more["store_keys"]) <= 0
        assert more["gpu_bytes"] < torch.cuda.get_device_properties(0).total_memory // 100


@pytest.mark.gpu
@needs_gpus(2)
def test_a_death_breaks_only_the_nccl_communicators_of_its_rank():
    found = with_ranks(min(3, torch.cuda.device_count()), "nccl", abort)
    keep_figures("NCCL abort after a death", found, describe_device())

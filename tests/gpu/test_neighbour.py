"""A joiner copies its weights from a neighbour's GPU memory; no tensor of either changes its address."""

import multiprocessing
import time

import pytest
import torch

from engine.parallel.neighbour import copy_from, offer
from tests.gpu.device import GIB, needs_gpus
from tests.gpu.figures import describe_device, keep_figures

COPIED = {"large": (GIB // 2,), "odd": (3, 5)}
"""Shapes of the copied weights in bf16: a little over 1 GiB."""


def test_weights_that_are_not_on_a_gpu_are_refused():
    weight = torch.nn.Parameter(torch.ones(3))
    place = weight.data_ptr()
    with pytest.raises(ValueError, match=r"w is not on a GPU; use the node's shared memory"):
        offer({"w": weight})
    assert weight.data_ptr() == place
    assert not weight.is_shared()


def test_a_joiner_copies_nothing_if_a_weight_is_missing():
    weight = torch.zeros(3)
    with pytest.raises(KeyError, match=r"lack \['b'\]"):
        copy_from({"a": (torch.ones, (3,))}, {"a": weight, "b": torch.zeros(3)})
    assert torch.equal(weight, torch.zeros(3))


def weights(value):
    return {name: torch.full(shape, value, dtype=torch.bfloat16, device="cuda:0") for name, shape in COPIED.items()}


def lend(pipe):
    mine = weights(3.0)
    pipe.send(offer(mine))
    pipe.recv()  # until the joiner is done


@pytest.mark.gpu
@needs_gpus(1, gib=8)
def test_a_joiner_copies_a_neighbours_weights_on_one_gpu():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    neighbour = context.Process(target=lend, args=(theirs,), daemon=True)
    neighbour.start()
    try:
        mine = weights(0.0)
        places = {name: weight.data_ptr() for name, weight in mine.items()}
        torch.cuda.synchronize()
        assert ours.poll(120), "the neighbour offers nothing"
        offered = ours.recv()
        begun = time.perf_counter()
        copy_from(offered, mine)
        seconds = time.perf_counter() - begun
        ours.send("done")
        neighbour.join(60)
    finally:
        neighbour.kill()
    assert neighbour.exitcode == 0
    assert all(bool((weight == 3.0).all()) for weight in mine.values())
    assert {name: weight.data_ptr() for name, weight in mine.items()} == places
    keep_figures("copy from a neighbour, two processes on one GPU", {"gib": 1.0, "seconds": seconds}, describe_device())

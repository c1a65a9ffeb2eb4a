"""In bf16, two ranks that share a forward pass compute the result of one rank, within bf16's rounding.

On one GPU both ranks use it and communicate through gloo, which copies over the CPU; NCCL needs one GPU per rank.
"""

import pytest
import torch

from engine.parallel.communicator import ON_CPU, Communicators, join_store, links_of
from engine.parallel.ulysses import Ulysses
from tests.benchmarks.sp_parity import LENGTHS, Ranks, build_qwen_image, qwen_image
from tests.gpu.device import needs_gpus
from tests.gpu.figures import describe_device, keep_figures

BOUND = 2e-2
"""Tolerance relative to the largest value (bf16 resolves 4e-3 at 1)."""
PAIR = (0, 1)


def difference(member, device, backend, port):
    """Return the largest relative difference between a bf16 pass shared by two and the same pass alone, by lengths."""
    device = torch.device(device if backend == "gloo" else f"cuda:{member.rank}")
    communicators = Communicators(
        join_store(port, timeout_seconds=60.0),
        timeout_seconds=60.0,
        patience_seconds=60.0,
        links=ON_CPU if backend == "gloo" else links_of(device),
    )
    torch.manual_seed(0)
    model = build_qwen_image().eval().to(device, torch.bfloat16)
    ulysses = Ulysses(model)

    @torch.no_grad()
    def forward(lengths, masked):
        return qwen_image(Placed(model, device), LENGTHS[lengths], masked).float()

    cases = [(lengths, masked) for lengths in LENGTHS for masked in (False, True)]
    alone = {case: forward(*case) for case in cases}
    group = communicators.get(1, member.rank, 2)
    ulysses.use(group)
    found = {}
    for case in cases:
        shared = forward(*case)
        group.finish()
        found["{}{}".format(case[0], ", masked" if case[1] else "")] = float(
            (shared - alone[case]).abs().max() / alone[case].abs().max()
        )
    return found


class Placed(torch.nn.Module):
    """A model whose inputs are drawn on the CPU in fp32."""

    def __init__(self, model, device):
        super().__init__()
        self.model, self.device = model, device

    def forward(self, **inputs):
        return self.model(**{name: self._placed(value) for name, value in inputs.items()})

    def _placed(self, value):
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(self.device, torch.bfloat16 if value.is_floating_point() else value.dtype)


def largest(device, backend):
    ranks = Ranks(2, (), preload=[__name__], on_gpus=device != "cpu")
    try:
        found = ranks.run(PAIR, difference, device, backend, ranks._store.port)
    finally:
        ranks.close()
    return {case: max(one[case] for one in found) for case in found[0]}


@pytest.mark.slow
def test_two_ranks_share_a_pass_in_bf16_on_the_cpu():
    assert max(largest("cpu", "gloo").values()) <= BOUND


@pytest.mark.slow
@pytest.mark.gpu
@needs_gpus(1)
def test_two_ranks_on_one_gpu_share_a_pass_in_bf16():
    found = largest("cuda:0", "gloo")
    assert max(found.values()) <= BOUND
    keep_figures("bf16 parity at degree 2, gloo, one GPU", {"max_rel_diff": found}, describe_device())


@pytest.mark.slow
@pytest.mark.gpu
@needs_gpus(2)
def test_two_ranks_on_two_gpus_share_a_pass_in_bf16():
    found = largest("cuda", "nccl")
    assert max(found.values()) <= BOUND
    keep_figures("bf16 parity at degree 2, NCCL, two GPUs", {"max_rel_diff": found}, describe_device())

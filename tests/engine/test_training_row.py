"""Kernels and bytes of a training row: the counter, and the saving of every family with narrow models."""

import pytest
import torch

from tests.benchmarks import training_row
from tests.benchmarks.memory import MEASURED
from tests.engine.test_memory import narrow


@pytest.mark.parametrize("model", MEASURED, ids=lambda model: model.family)
def test_a_row_launches_fewer_kernels_and_moves_fewer_bytes(model):
    small = narrow(model)
    if model.family == "sd3":
        small.config["pos_embed_max_size"] = 32
    before, after = (training_row.counted(small, way, 1) for way in (training_row.before, training_row.after))
    saving = training_row.Saving(model=small, rows=1, before=before, after=after)
    assert saving.kernels >= training_row.KERNELS_OF_FEW.get(model.family, training_row.KERNELS_TARGET)
    assert saving.bytes >= training_row.BYTES_TARGET


@pytest.mark.parametrize(("operation", "kernels", "numbers"), [
    (lambda x: x + 1, 1, 2 * 32),
    (lambda x: x.add_(1), 1, 2 * 32),
    (lambda x: x.view(-1)[3:], 0, 0),
    (lambda x: x.zero_(), 1, 32),
    (lambda x: x[:1].expand(4, 8) + 1, 1, 32 + 32),
    (lambda x: torch.mul(x, 2, out=torch.empty_like(x)), 1, 2 * 32),
    (lambda x: torch._foreach_add_([x] * 100, [x] * 100), 2, 100 * 3 * 32),
    (lambda x: torch._foreach_copy_([x], [x]), 1, 2 * 32),
])  # fmt: skip
def test_an_operation_counts_its_launches_and_the_numbers_it_reads_and_writes(operation, kernels, numbers):
    x = torch.zeros(4, 8, device="meta")
    with training_row.Kernels() as counted:
        operation(x)
    assert (counted.kernels, counted.bytes) == (kernels, 4 * numbers)


def test_the_sum_of_gradients_is_the_same_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (7,), (2, 2)]
    start, gradients = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2))
    gradients[1] = None
    plain, together = ([tensor.clone() for tensor in start] for _ in range(2))
    training_row.added_one_by_one(plain, gradients)
    training_row.added(together, gradients)
    assert all(torch.equal(one, other) for one, other in zip(plain, together, strict=True))

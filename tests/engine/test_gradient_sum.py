"""The sum of gradients in fixed point: any order gives the same bits, and no overflow goes unseen."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from engine.algorithm.gradient_sum import GradientSum


def summed(addends, most=None, dtype=torch.float32):
    parameter = nn.Parameter(torch.zeros(len(addends[0]), dtype=dtype))
    total = GradientSum([parameter], most=most or len(addends))
    for addend in addends:
        total.add([torch.tensor(addend, dtype=dtype)])
    total.write()
    return parameter.grad


values = st.floats(-1000, 1000, width=32)


@given(st.lists(st.tuples(values, values, values), min_size=2, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_every_order_gives_the_same_bits(addends, random):
    shuffled = random.sample(addends, len(addends))
    assert torch.equal(summed(addends), summed(shuffled))


@given(st.lists(st.tuples(st.floats(-1000, 1000)), min_size=2, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_fp64_is_summed_to_its_last_bits_in_every_order(addends, random):
    shuffled = random.sample(addends, len(addends))
    found = summed(addends, dtype=torch.float64)
    assert torch.equal(found, summed(shuffled, dtype=torch.float64))
    exact = math.fsum(value for (value,) in addends)
    assert float(found) == pytest.approx(exact, rel=2.0**-52, abs=len(addends) * 2.0**-97)


def test_floats_in_order_of_arrival_differ_where_the_sum_does_not():
    addends = [(1e3,), (1e-4,), (-1e3,)]
    orders = list(itertools.permutations(addends))
    floats = {float(sum(torch.tensor(addend) for addend in order)) for order in orders}
    assert len(floats) > 1, "otherwise the test shows nothing"
    exact = {float(summed(order)) for order in orders}
    assert len(exact) == 1
    assert exact.pop() == pytest.approx(1e-4, rel=1e-6)


@given(st.lists(st.tuples(values), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_sum_is_the_sum_to_the_last_bits_of_the_format(addends):
    exact = sum(float(value) for (value,) in addends)
    assert float(summed(addends)) == pytest.approx(exact, rel=1e-7, abs=len(addends) * 2.0**-49)


@pytest.mark.parametrize("large", [2.0**15, 1e30, float("nan"), float("inf"), -(2.0**14)])
def test_an_addend_that_could_overflow_makes_the_sum_infinite_in_every_order(large):
    for addends in itertools.permutations([(large,), (1.0,)]):
        assert not torch.isfinite(summed(addends)).any()


def test_as_many_of_the_largest_addends_as_promised_do_not_wrap_around():
    largest = 2.0**15 / 9 - 1
    assert float(summed([(largest,)] * 8)) == pytest.approx(8 * largest)


def test_an_empty_sum_leaves_no_gradient():
    parameter = nn.Parameter(torch.zeros(2))
    GradientSum([parameter], most=1).write()
    assert parameter.grad is None

"""Half precision for ranking: results are close to full precision, and the context leaves no trace."""

import contextlib

import pytest
import torch
from diffusers.models.activations import GELU

from engine.config import ModelConfig
from engine.diffusion.sampler import initial
from engine.models.half import half_precision
from engine.models.load import load_adapter


@pytest.fixture(scope="module")
def adapter():
    return load_adapter(ModelConfig())


def approximations(adapter):
    return {one.approximate for one in adapter.transformer.modules() if isinstance(one, GELU)}


def velocity(adapter):
    x = initial(range(4), adapter.latent_shape())
    with torch.no_grad():
        return adapter.velocity(x, torch.full((4,), 0.5), adapter.encode(["12", "7", "0042", "9999"]), 1.0)


def test_half_precision_is_close_to_full_precision_and_not_equal(adapter):
    full = velocity(adapter)
    with half_precision(adapter.transformer):
        half = velocity(adapter)
    assert half.dtype == torch.float32
    assert 0 < (half - full).abs().max() < 0.03 * full.abs().max()


def test_half_precision_leaves_no_trace_after_the_context(adapter):
    before = velocity(adapter)
    with contextlib.suppress(KeyError), half_precision(adapter.transformer):
        assert approximations(adapter) == {"none"}
        raise KeyError
    assert approximations(adapter) == {"tanh"}
    assert torch.equal(velocity(adapter), before)

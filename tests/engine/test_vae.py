"""Decoding in slices gives the images of one pass; large frames are decoded in tiles."""

import pytest
import torch
from diffusers import AutoencoderKLWan

from engine.models import vae as decoding
from engine.models.vae import decode_images, decode_video
from tests.engine.test_families import tiny_vae
from tests.tiny_pipelines import video_vae


@pytest.fixture(autouse=True)
def _one_thread_one_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def recorded(vae):
    """Record the shapes of the latents of every decoder call."""
    shapes = []
    vae.decoder.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    return shapes


def test_a_batch_is_decoded_in_slices_with_the_same_images(monkeypatch):
    vae = tiny_vae()
    latents = torch.randn(5, 4, 4, 6)
    whole = decode_images(vae, latents)
    shapes = recorded(vae)
    monkeypatch.setattr(decoding, "PIXELS_AT_ONCE", 2 * 8 * 12)
    sliced = decode_images(vae, latents)
    assert [shape[0] for shape in shapes] == [2, 2, 1]
    torch.testing.assert_close(sliced, whole, atol=1e-6, rtol=0)


def test_an_image_larger_than_a_slice_is_decoded_alone(monkeypatch):
    vae = tiny_vae()
    shapes = recorded(vae)
    monkeypatch.setattr(decoding, "PIXELS_AT_ONCE", 1)
    assert decode_images(vae, torch.randn(2, 4, 4, 6)).shape == (2, 3, 8, 12)
    assert [shape[0] for shape in shapes] == [1, 1]


def test_large_images_are_decoded_in_tiles_and_later_small_ones_are_not(monkeypatch):
    vae = tiny_vae()
    vae.tile_sample_min_size, vae.tile_latent_min_size = 16, 8
    shapes = recorded(vae)
    monkeypatch.setattr(decoding, "TILED_ABOVE", 24 * 24 - 1)
    assert decode_images(vae, torch.randn(1, 4, 12, 12)).shape == (1, 3, 24, 24)
    assert max(max(shape[2:]) for shape in shapes) == 8
    shapes.clear()
    decode_images(vae, torch.randn(1, 4, 11, 12))
    assert shapes == [(1, 4, 11, 12)]


def test_large_videos_are_decoded_in_tiles(monkeypatch):
    vae = AutoencoderKLWan(**video_vae(1), scale_factor_spatial=2, scale_factor_temporal=2)
    latents = torch.randn(1, 4, 1, 6, 12)
    whole = decode_video(vae, latents)
    monkeypatch.setattr(decoding, "TILED_ABOVE", 12 * 24 - 1)
    monkeypatch.setattr(decoding, "TILE", 16)
    monkeypatch.setattr(decoding, "STRIDE", 12)
    shapes = recorded(vae)
    tiled = decode_video(vae, latents)
    assert tiled.shape == whole.shape == (1, 3, 1, 12, 24)
    assert {shape[-1] for shape in shapes} == {8, 6}  # tiles of 16 pixels at 0 and 12

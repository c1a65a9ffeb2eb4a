"""Model folders written by hand: the published configurations, and files of weights with only the first layer.

`write_model` writes a folder that spotrl accepts. Tests then change what they are about. The folders are not loaded:
tests/tiny_pipelines.py makes those that are.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.memory.published import PUBLISHED
from engine.model_parts import PIPELINES

SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}

VAE: Mapping[str, dict[str, Any]] = {
    "qwen-image": {"z_dim": 16, "temperal_downsample": [False, True, True]},
    "flux": {"latent_channels": 16, "block_out_channels": [128, 256, 512, 512]},
    "sd3": {"latent_channels": 16, "block_out_channels": [128, 256, 512, 512]},
    "wan": {"z_dim": 16, "scale_factor_spatial": 8, "scale_factor_temporal": 4},
    "hunyuan-video": {"latent_channels": 16, "spatial_compression_ratio": 8, "temporal_compression_ratio": 4},
    "flux2-klein": {"latent_channels": 32, "block_out_channels": [128, 256, 512, 512]},
    "z-image": {"latent_channels": 16, "block_out_channels": [128, 256, 512, 512]},
    "sana": {"latent_channels": 32, "encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024]},
}
"""Values of `vae/config.json` of the published models."""

TRANSFORMER: Mapping[str, dict[str, Any]] = {
    family: dict(next(one for one in PUBLISHED if one.family == family).config) for family in PIPELINES
}
"""Values of `transformer/config.json` of the published models."""

WAN_5B_TRANSFORMER = {
    "in_channels": 48,
    "out_channels": 48,
    "num_layers": 30,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "ffn_dim": 14336,
    "text_dim": 4096,
    "patch_size": [1, 2, 2],
}
WAN_5B_VAE = {"z_dim": 48, "scale_factor_spatial": 16, "scale_factor_temporal": 4, "is_residual": True}
"""Wan2.2-TI2V-5B."""


def safetensors(tensors: Mapping[str, tuple[str, list[int]]]) -> bytes:
    """Return a file of zeros. `tensors`: format and shape by name."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1, "I64": 8}[dtype]
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(at)


def weights_name(part: str) -> str:
    return "model.safetensors" if part.startswith("text_encoder") else "diffusion_pytorch_model.safetensors"


def write_json(file: Path, content: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def write_model(
    folder: Path,
    family: str,
    *,
    index: Mapping[str, Any] = {},
    transformer: Mapping[str, Any] = {},
    vae: Mapping[str, Any] = {},
    scheduler: Mapping[str, Any] | None = SCHEDULER,
) -> Path:
    """Write a folder of a family and return it. Further arguments change values; a value of None removes a key."""
    pipeline = PIPELINES[family]
    entries: dict[str, Any] = {
        "_class_name": pipeline.name,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }
    for part, kind in pipeline.parts.items():
        is_text = part.startswith("text_encoder")
        entries[part] = ["transformers" if is_text else "diffusers", kind]
        if is_text:
            tokenizer = part.replace("text_encoder", "tokenizer")
            entries[tokenizer] = ["transformers", "T5TokenizerFast"]
            write_json(folder / tokenizer / "tokenizer.json", {})
    entries |= index
    configs = {part: {} for part in pipeline.parts}
    configs["transformer"] = {"_class_name": pipeline.parts["transformer"], **TRANSFORMER[family], **transformer}
    configs["vae"] = {"_class_name": pipeline.parts["vae"], **VAE[family], **vae}
    channels = configs["transformer"].get("in_channels") or pipeline.input_channels
    for part, config in configs.items():
        write_json(folder / part / "config.json", {key: value for key, value in config.items() if value is not None})
        tensor = pipeline.input_layer if part == "transformer" else "weight"
        values = pipeline.input_values if part == "transformer" else 1
        (folder / part / weights_name(part)).write_bytes(safetensors({tensor: ("BF16", [1, channels * values])}))
    if scheduler is not None:
        write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    write_json(folder / "model_index.json", entries)
    return folder

"""Trained weights as files for diffusers: low-rank adapters, or the whole transformer.

    pipeline.load_lora_weights("weights", weight_name=LORA_FILE)                       low-rank adapters
    QwenImageTransformer2DModel.from_pretrained("weights", subfolder="transformer")    full weights; the model's class

diffusers needs the name of the file with HF_HUB_OFFLINE=1. Full weights are saved by the model's own class. The class
runs in an engine process, because the launcher must not import torch.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import ModelConfig
from launcher.engine_process import engine_command, engine_failure
from launcher.exit_codes import Failure

LORA_FILE = "pytorch_lora_weights.safetensors"
"""File name expected by `load_lora_weights` in a folder."""

FULL_FOLDER = "transformer"
"""Folder with full weights."""

SCALED = ".lora_B."
"""Part of the names of the second matrix of each adapter, which holds the factor alpha / rank."""

ADAPTER = ".default."
"""Adapter name in PEFT's parameter names. PEFT leaves the adapter name out of files."""

PREFIX = "transformer."
"""Prefix of tensor names in the file: the part of the pipeline with the adapters."""

EXPORT_SECONDS = 1800
"""Time limit of the export. Loading and saving a large model takes minutes."""


def write_for_diffusers(weights: Path, model: ModelConfig) -> Path:
    """Write files for diffusers beside `weights`, and return the path of the file or folder.

    Adapters of a run that merged somebody else's LoRA into its base are joined with that LoRA, so that they belong to
    the published base. Raises Failure if the engine is needed and is not installed on this machine, cannot load the
    model or exceeds `EXPORT_SECONDS`.
    """
    if model.weights == "lora":
        if model.lora is None or model.lora_use == "continue":
            return write_lora(weights, model.lora_alpha / model.lora_rank)
        both = weights.with_name(".joined.safetensors")
        try:
            _run_engine("engine.entrypoints.lora", "join", model.model_dump_json(), str(weights), str(both))
            return write_lora(both)
        finally:
            both.unlink(missing_ok=True)
    folder, unfinished = weights.with_name(FULL_FOLDER), weights.with_name(f"{FULL_FOLDER}.part")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed export
    try:
        _run_engine("engine.models.export", model.model_dump_json(), str(weights), str(unfinished))
    except Failure:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return folder


def _run_engine(module: str, *words: str) -> None:
    """Run a module of the engine that writes a file or folder. Raises Failure."""
    command = engine_command(module, *words)
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=EXPORT_SECONDS)
    except subprocess.TimeoutExpired:
        raise Failure(f"the engine took more than {EXPORT_SECONDS} s to save the model") from None
    if done.returncode:
        raise engine_failure(done.stderr, done.returncode)


def write_lora(weights: Path, scale: float = 1.0) -> Path:
    """Copy low-rank adapters of one rank to a file for `load_lora_weights`, and return the path of the file.

    `scale` is alpha / rank of the job, by which its adapters are scaled. The file holds that factor in the values
    of every `lora_B`, and says alpha = rank. Loaders that read the header, that read `.alpha` tensors, or that assume
    a factor of 1 therefore give the same strength. Raises Failure if the adapters are not fp32.
    """
    target = weights.with_name(LORA_FILE)
    unfinished = target.with_name(f"{LORA_FILE}.part")
    with weights.open("rb") as source, unfinished.open("wb") as file:
        header: dict[str, Any] = json.loads(source.read(int.from_bytes(source.read(8), "little")))
        header.pop("__metadata__", None)
        if others := sorted({entry["dtype"] for entry in header.values()} - {"F32"}):
            raise Failure(f"{weights} holds adapters in {others[0]}, and a run writes F32; pull the weights again")
        renamed = {f"{PREFIX}{name.replace(ADAPTER, '.')}": entry for name, entry in header.items()}
        text = json.dumps({"__metadata__": _metadata(header), **renamed}).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        # Safetensors holds the tensors one after another, in the order of their offsets.
        for name, entry in sorted(header.items(), key=lambda named: named[1]["data_offsets"][0]):
            values = np.frombuffer(source.read(entry["data_offsets"][1] - entry["data_offsets"][0]), "<f4")
            file.write((values * np.float32(scale) if SCALED in name else values).tobytes())
    os.replace(unfinished, target)
    return target


def _metadata(header: dict[str, Any]) -> dict[str, str]:
    """Return the metadata for diffusers' LoraConfig. alpha is the rank: the values are scaled already."""
    rank = next(entry["shape"][0] for name, entry in header.items() if SCALED not in name)
    config = {
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.rpartition(".lora_")[0] for name in header}),
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    return {
        "format": "pt",
        "lora_adapter_metadata": json.dumps({f"{PREFIX}{name}": value for name, value in config.items()}),
    }

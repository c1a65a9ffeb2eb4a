"""Exact match of some weights as recognisers read it that did not give the reward.

The reward reads with PP-OCRv6 small at 72 columns. The readers: the same model at 144 columns, and PP-OCRv4 mobile (the
wheel rapidocr-onnxruntime 1.4.4), a model of another generation, at 144 columns.
"""

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor
from torch.nn import functional

from engine.config import EngineConfig
from engine.models.load import load_adapter, trainable
from engine.prompts import held_out_digits
from engine.rewards.ocr import OcrReward
from engine.rollout.request import Stream, seed_of
from engine.rollout.sampler import denoise, evaluation_plan

FORWARD = 48


def exact_by_reader(weights: dict[str, Tensor] | None, held_out: int) -> dict[str, float]:
    """`weights`: of the transformer, by name; None: the base that ships."""
    config = EngineConfig()
    adapter = load_adapter(config.model)
    if weights is not None:
        with torch.no_grad():
            for name, parameter in trainable(adapter).items():
                parameter.copy_(weights[name])
    plan = evaluation_plan(config.sampler, config.evaluation.steps)
    prompts = held_out_digits()[:held_out]
    pictures = []
    for start in range(0, len(prompts), FORWARD):
        some = prompts[start : start + FORWARD]
        seeds = [seed_of(0, Stream.EVAL, 0, prompt, 0) for prompt in some]
        pictures.append(adapter.decode(denoise(adapter, plan, adapter.encode(some), seeds)))
    drawn = torch.cat(pictures)
    with ThreadPoolExecutor() as pool:  # each reads with one thread
        wide = pool.submit(OcrReward("ocr_strict", 144), drawn, prompts)
        other = pool.submit(read_v4, drawn)
        return {
            "v6 at 144 columns": float(np.mean([score.reward for score in wide.result()])),
            "v4 at 144 columns": float(np.mean([a == b for a, b in zip(other.result(), prompts, strict=True)])),
        }


def read_v4(pictures: Tensor) -> list[str]:
    """Greedy CTC reading by PP-OCRv4 mobile. pictures [B, 1 or 3, H, W] in [-1, 1]"""
    package = find_spec("rapidocr_onnxruntime")
    if package is None or package.origin is None:
        raise ImportError("the check by another recogniser needs one: make bench")
    file = Path(package.origin).parent / "models" / "ch_PP-OCRv4_rec_infer.onnx"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    alphabet = ["", *session.get_modelmeta().custom_metadata_map["character"].splitlines(), " "]
    scaled = functional.interpolate(pictures.float(), size=(48, 144), mode="bicubic").clamp(-1.0, 1.0)
    pixels = scaled.expand(-1, 3, -1, -1).contiguous().numpy()
    texts = []
    for start in range(0, len(pixels), 8):
        (classes,) = session.run(None, {session.get_inputs()[0].name: pixels[start : start + 8]})
        for row in classes.argmax(axis=2):
            merged = [int(new) for old, new in zip([0, *row], row, strict=False) if new != old]
            texts.append("".join(alphabet[index] for index in merged).replace(" ", ""))
    return texts

"""The three forms of requests and answers of the scorer `http`. Pure.

    json       {"images": [base64 of a PNG], "prompts": [...], "metadata": [{...}]}
               -> {"scores": [...], "metrics": {NAME: [...]}}; `metrics` may be missing
    verl-omni  pickled {"images": [JPEG], "prompts": [...], "metadata": {}}
               -> pickled {"scores": [...]}, or {"error": TEXT}
    flow-grpo  pickled {"images": [JPEG], "prompts": [...], "meta_datas": [{...}], "only_strict": False}
               -> pickled {"scores": [...], "rewards": [...], "strict_rewards": [...], ...} of its GenEval server, or
               {"outputs": [...]} of its other servers

Sources: verl-omni's docs/start/http_scorer.md, flow_grpo's `rewards.py` and yifan123/reward-server. A GenEval server's
`rewards` is the share of correct images by GenEval's own rule, which is the metric `accuracy` here; `strict_rewards` is
`strict_accuracy`. An answer is read with a pickle reader that creates only numbers, text, containers and numpy arrays,
because any other pickle may run code of the server on the worker.
"""

import base64
import io
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import numpy as np
from torch import Tensor

from engine.diffusion.images import as_pil
from engine.prompt_set import Metadata
from engine.protocol.request import Score
from engine.rewards.http_call import BadAnswer, shown

Protocol = Literal["json", "verl-omni", "flow-grpo"]

PICKLE_VERSION = 4
"""Written by Python 3.4 and later, so an old server can read requests."""

CREATED = {
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}
"""Classes and functions that a pickled answer may name."""

METRICS = {"rewards": "accuracy", "strict_rewards": "strict_accuracy"}
"""Metrics by their names in the answer of flow_grpo's GenEval server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """The content of a request and its type."""

    content: bytes
    content_type: str


def request_body(protocol: Protocol, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Body:
    """Return the request that asks for the scores of images [B, C, H, W] in [-1, 1]."""
    if protocol == "json":
        pngs = [base64.b64encode(encoded(image, "PNG")).decode("ascii") for image in images]
        content = {"images": pngs, "prompts": list(prompts), "metadata": [dict(entry) for entry in metadata]}
        return Body(content=json.dumps(content).encode(), content_type="application/json")
    pickled: dict[str, object] = {"images": [encoded(image, "JPEG") for image in images], "prompts": list(prompts)}
    if protocol == "verl-omni":
        pickled |= {"metadata": {}}
    else:
        pickled |= {"meta_datas": [dict(entry) for entry in metadata], "only_strict": False}
    return Body(content=pickle.dumps(pickled, protocol=PICKLE_VERSION), content_type="application/octet-stream")


def scores_of_answer(
    protocol: Protocol, content: bytes, count: int, score_range: tuple[float, float] | None
) -> list[Score]:
    """Return the scores in an answer for `count` images. Raises BadAnswer for anything but `count` scores in range."""
    answer = _from_json(content) if protocol == "json" else _from_pickle(content)
    if not isinstance(answer, dict):
        raise BadAnswer(f"an answer that is no object: {shown(content)}")
    if "error" in answer:
        raise BadAnswer(f"the error {str(answer['error'])[:300]!r}")
    name = "outputs" if protocol == "flow-grpo" and "scores" not in answer else "scores"
    rewards = _numbers(answer.get(name), name, count)
    for index, reward in enumerate(rewards):
        if score_range is not None and not score_range[0] <= reward <= score_range[1]:
            raise BadAnswer(f"the score {reward:g} of image {index}, outside {list(score_range)}")
    metrics = {metric: _numbers(values, metric, count) for metric, values in _metrics(protocol, answer).items()}
    return [
        Score(reward=reward, metrics={metric: values[index] for metric, values in metrics.items()})
        for index, reward in enumerate(rewards)
    ]


def encoded(image: Tensor, form: Literal["PNG", "JPEG"]) -> bytes:
    """Return an image [1 or 3, H, W] in [-1, 1] as a file. JPEG has PIL's own quality, as in both other projects."""
    file = io.BytesIO()
    as_pil(image).save(file, format=form)
    return file.getvalue()


def _metrics(protocol: Protocol, answer: Mapping[str, Any]) -> dict[str, Any]:
    if protocol == "flow-grpo":
        return {metric: answer[name] for name, metric in METRICS.items() if name in answer}
    metrics = answer.get("metrics", {}) if protocol == "json" else {}
    if not isinstance(metrics, dict):
        raise BadAnswer(f"metrics of the kind {type(metrics).__name__}, not an object of lists")
    return metrics


def _numbers(values: Any, name: str, count: int) -> list[float]:
    """Return finite numbers, one for each image. Raises BadAnswer."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise BadAnswer(f"no list of numbers under {name!r}")
    if len(values) != count:
        raise BadAnswer(f"{len(values)} numbers under {name!r} for {count} images")
    return [_number(value, f"{name!r} for image {index}") for index, value in enumerate(values)]


def _number(value: Any, place: str) -> float:
    try:
        if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
            number = float(value)
            if isfinite(number):
                return number
    except OverflowError:  # a whole number beyond the largest float
        pass
    raise BadAnswer(f"{str(value)[:60]!r} under {place}, which is no finite number")


def _from_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise BadAnswer(f"an answer that is no JSON: {shown(content)}") from None


def _from_pickle(content: bytes) -> Any:
    try:
        return _PlainReader(io.BytesIO(content)).load()
    except Exception as error:  # garbage makes the reader raise nearly anything
        raise BadAnswer(f"an answer that cannot be unpickled ({error}): {shown(content)}") from None


class _PlainReader(pickle.Unpickler):
    """A pickle reader that creates nothing but plain values and numpy arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in CREATED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in an answer")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)

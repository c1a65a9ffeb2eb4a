"""Requests and answers of a vision-language model in OpenAI's chat protocol. Pure.

    POST URL/chat/completions
    {"model", "messages": [{"role": "user", "content": [{image}, {text}]}], "max_tokens", "temperature": 0}
    -> {"choices": [{"message": {"content": TEXT}}], "usage": {"prompt_tokens", "completion_tokens"}}

Servers of vLLM, SGLang, llama.cpp and most paid APIs speak it. A judge's text is read strictly: a JSON object with
`score`, alone or as the last thing in the text. A number elsewhere in the text is no score, because models repeat the
numbers of the rubric.
"""

import base64
import io
import json
import re
from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal

import msgspec
from PIL import Image

from engine.prompt_set import Metadata
from engine.reward_config import VlmConfig
from engine.rewards.http_call import BadAnswer, shown

RUBRICS: Mapping[Literal["judge", "read"], str] = {
    "judge": (
        "An image was generated for this prompt:\n\n{prompt}\n\nRate how well the image shows what the prompt asks "
        "for, and how free of visible faults it is."
    ),
    "read": "Read all text in the image. Answer with that text alone.",
}
"""Instructions without `rubric`."""

ANSWER_FORM = (
    "\n\nThe worst score is {worst:g} and the best is {best:g}. Think as briefly as you can, then end your answer with "
    'one JSON object and nothing after it: {{"score": NUMBER}}'
)
"""Added to the instructions of a judge."""


class _Message(msgspec.Struct):
    content: str | None


class _Choice(msgspec.Struct):
    message: _Message


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request, as the server counted them."""

    prompt_tokens: int
    completion_tokens: int


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _Bill(msgspec.Struct):
    usage: Usage | None = None


def question(config: VlmConfig, image: Image.Image, prompt: str, metadata: Metadata) -> bytes:
    """Return the request for one image."""
    rubric = config.rubric or RUBRICS[config.task]
    values = {"{prompt}": prompt, "{metadata}": json.dumps(dict(metadata))}
    text = re.sub(r"\{prompt\}|\{metadata\}", lambda match: values[match[0]], rubric)
    if config.task == "judge":
        text += ANSWER_FORM.format(worst=config.scale[0], best=config.scale[1])
    content = [{"type": "image_url", "image_url": {"url": _data_url(config, image)}}, {"type": "text", "text": text}]
    return json.dumps(
        {
            "model": config.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": config.max_tokens,
            # An equal image should get an equal score.
            "temperature": 0,
        }
    ).encode()


def text_of(content: bytes) -> str:
    """Return the text of an answer. Raises BadAnswer for anything but an answer with text."""
    try:
        answer = msgspec.json.decode(content, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadAnswer(f"an answer that is no chat completion: {shown(content)}") from None
    text = answer.choices[0].message.content if answer.choices else None
    if text is None:
        raise BadAnswer(f"an answer without text: {shown(content)}")
    return text


def usage_of(content: bytes) -> Usage | None:
    """Return the tokens of an answer, or None if the answer does not say them."""
    try:
        usage = msgspec.json.decode(content, type=_Bill).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    counted = usage is not None and usage.prompt_tokens > 0 and usage.completion_tokens >= 0
    return usage if counted else None


def score_of(text: str, scale: tuple[float, float]) -> float:
    """Return a judge's score as its place on the scale, from 0 to 1. Raises BadAnswer for anything but one score."""
    start, end = text.rfind("{"), text.rfind("}")
    value = _score_in(text[start : end + 1]) if 0 <= start < end else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise BadAnswer(f"an answer without a score: {shown(text[-200:].encode())}")
    worst, best = scale
    if not worst <= value <= best:
        raise BadAnswer(f"the score {value:g}, outside {list(scale)}")
    return (value - worst) / (best - worst)


def _score_in(text: str) -> Any:
    try:
        return json.loads(text).get("score")
    except (ValueError, RecursionError, OverflowError):
        return None


def _data_url(config: VlmConfig, image: Image.Image) -> str:
    image = image.copy()
    image.thumbnail((config.longest_side, config.longest_side))  # never enlarges
    file = io.BytesIO()
    image.save(file, format=config.image)
    return f"data:image/{config.image};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"

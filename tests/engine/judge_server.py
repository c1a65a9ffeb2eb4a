"""A vision-language model's server on loopback that speaks OpenAI's chat protocol, with the faults of `ScorerServer`.

The judge's score is ten times the mean of the pixels in [0, 1]. A question that asks to read is answered with `reads`.
`python -m tests.engine.judge_server` prints its address and serves until its input ends. A test can stop that
process.
"""

import base64
import io
import sys

import numpy as np
from PIL import Image

from tests.engine.scorer_server import ScorerServer

TOKENS = {"prompt_tokens": 1000, "completion_tokens": 50, "total_tokens": 1050}


class JudgeServer(ScorerServer):
    """Counts its requests. `reads`: the answer to a request to read. `usage`: None leaves the tokens out."""

    def __init__(self, faults=(), reads="HELLO", usage=TOKENS):
        super().__init__("json", faults)
        self.reads, self.usage = reads, usage

    def _size(self, asked):
        return len([part for part in asked["messages"][0]["content"] if part["type"] == "image_url"])

    def _told(self, asked, fault):
        assert (asked["temperature"], asked["max_tokens"]) == (0, 512)
        picture, words = asked["messages"][0]["content"]
        head, _, data = picture["image_url"]["url"].partition(",")
        image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
        assert head == f"data:image/{image.format.lower()};base64"
        score = 10 * float(np.asarray(image.convert("RGB")).mean() / 255)
        if fault in ("nan", "range"):
            score = float("nan") if fault == "nan" else 75
        text = self.reads if "Read all" in words["text"] else f'The 10 is far. {{"score": {score}}}'
        choices = [] if fault == "short" else [{"message": {"role": "assistant", "content": text}}]
        return {"choices": choices} | ({} if self.usage is None else {"usage": self.usage})


if __name__ == "__main__":
    with JudgeServer() as server:
        print(server.url, flush=True)
        sys.stdin.read()

"""A vision-language model as judge or reader (`reward.name: vlm`), behind any OpenAI-compatible address.

One request holds one image. An image without a good answer gets the reward NaN after the last try: the trainer skips
its group, and no score is made up. The worker's log has the server's last fault.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import nan

from torch import Tensor

from engine.diffusion.images import as_pil
from engine.prompt_set import Metadata
from engine.protocol.request import Score
from engine.reward_config import VlmConfig
from engine.rewards.chat import question, score_of, text_of
from engine.rewards.http_call import HttpCall, NoAnswer
from engine.rewards.ocr import normalised, similarity, target_text
from engine.rewards.pace import EvenPace
from engine.rewards.reward import RewardError

HEADERS = {"Content-Type": "application/json"}


class VlmReward:
    """Scores by a vision-language model.

    `must_answer`: raise RewardError after one try, for the check before a launch.
    """

    def __init__(self, config: VlmConfig, *, must_answer: bool = False) -> None:
        self._config, self._must_answer = config, must_answer
        self._pace = EvenPace(config.requests_per_minute)
        self._call = HttpCall(
            f"{config.url.rstrip('/')}/chat/completions",
            key_name=config.key,
            timeout_seconds=config.timeout_seconds,
            tries=1 if must_answer else config.tries,
            connections=config.concurrency,
        )

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> list[Score]:
        """Score images [B, C, H, W] in [-1, 1]. Raises RewardError if the server refuses a request."""
        if images.dim() != 4:
            raise RewardError(f"reward vlm scores images [B, C, H, W]; it was given {list(images.shape)}; set frames")
        with ThreadPoolExecutor(self._config.concurrency, thread_name_prefix="ask-vlm") as threads:
            return list(threads.map(self._one, images, prompts, metadata))

    def _one(self, image: Tensor, prompt: str, metadata: Metadata) -> Score:
        body = question(self._config, as_pil(image), prompt, metadata)
        try:
            return self._call.post(body, HEADERS, lambda content: self._read(text_of(content), prompt), self._paced)
        except NoAnswer as error:
            if self._must_answer:
                raise RewardError(f"the model gave no score: {error}") from None
            print(f"reward vlm: an image has no score, and its group is skipped: {error}", flush=True)
            return Score(reward=nan, metrics={})

    def _read(self, text: str, prompt: str) -> Score:
        """Return the score in an answer. Raises BadAnswer for an answer without a score."""
        if self._config.task == "judge":
            return Score(reward=score_of(text, self._config.scale), metrics={})
        target, reading = target_text(prompt), normalised(text)
        metrics = {"exact_match": float(reading == target), "similarity": similarity(reading, target)}
        return Score(reward=metrics["similarity"], metrics=metrics)

    def _paced(self, send: Callable[[], bytes]) -> bytes:
        self._pace.wait()
        return send()

"""A scorer behind a URL (`reward.name: http`): batches, requests in parallel, and no made-up score.

The images of a request without a good answer get the reward NaN after the last try. The trainer skips their groups,
counts the skips, and stops the run after several in a row. The worker's log has the server's last fault.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import nan

from torch import Tensor

from engine.prompt_set import Metadata
from engine.protocol.request import Score
from engine.reward_config import HttpConfig
from engine.rewards.http_call import HttpCall, NoAnswer
from engine.rewards.http_protocols import request_body, scores_of_answer
from engine.rewards.reward import RewardError


class HttpReward:
    """Scores of a server. `must_answer`: raise RewardError after one try, for the check before a launch."""

    def __init__(self, config: HttpConfig, *, must_answer: bool = False) -> None:
        self._config, self._must_answer = config, must_answer
        self._call = HttpCall(
            config.url,
            key_name=config.key,
            timeout_seconds=config.timeout_seconds,
            tries=1 if must_answer else config.tries,
            connections=config.concurrency,
        )

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> list[Score]:
        """Score images [B, C, H, W] in [-1, 1]. Raises RewardError if the server refuses the request."""
        if images.dim() != 4:
            raise RewardError(f"reward http scores images [B, C, H, W]; it was given {list(images.shape)}; set frames")
        starts = range(0, len(prompts), self._config.batch)
        with ThreadPoolExecutor(self._config.concurrency, thread_name_prefix="ask-scorer") as threads:
            parts = threads.map(lambda start: self._part(start, images, prompts, metadata), starts)
            return [score for part in parts for score in part]

    def _part(
        self, start: int, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> Sequence[Score]:
        """Score the images of one request."""
        config, part = self._config, slice(start, start + self._config.batch)
        count = len(prompts[part])
        body = request_body(config.protocol, images[part], prompts[part], metadata[part])
        try:
            return self._call.post(
                body.content,
                {"Content-Type": body.content_type},
                lambda content: scores_of_answer(config.protocol, content, count, config.score_range),
            )
        except NoAnswer as error:
            if self._must_answer:
                raise RewardError(f"the scorer gave no score: {error}") from None
            print(f"reward http: {count} images have no score, and their groups are skipped: {error}", flush=True)
            return [Score(reward=nan, metrics={}, fault=str(error))] * count

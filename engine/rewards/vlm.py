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
from engine.protocol.messages import PaidCall
from engine.protocol.request import Score
from engine.reward_config import VlmConfig
from engine.rewards.chat import question, score_of, text_of, usage_of
from engine.rewards.http_call import Around, BadAnswer, HttpCall, NoAnswer, Unanswered
from engine.rewards.ocr import reading_metrics
from engine.rewards.pace import Pace
from engine.rewards.purse import Payment, Purse
from engine.rewards.requested_text import normalised, requested_texts
from engine.rewards.reward import RewardError

HEADERS = {"Content-Type": "application/json"}


class VlmReward:
    """Scores by a vision-language model. `purse`: pays the calls of a judge with a price.

    `must_answer`: for the check before a launch. Raise RewardError after one try. A paid judge is then asked for its
    list of models, which is free, and all scores are 0.
    """

    def __init__(self, config: VlmConfig, purse: Purse | None = None, *, must_answer: bool = False) -> None:
        if config.is_paid and purse is None and not must_answer:
            raise RewardError("reward vlm has a price, and here nothing pays; score within a run")
        self._config, self._purse, self._must_answer = config, purse, must_answer
        self._pace = Pace(purse, f"{config.url} {config.model}", config.requests_per_minute)
        self._call = self._call_to("chat/completions")

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> list[Score]:
        """Score images [B, C, H, W] in [-1, 1].

        Raises RewardError if the server refuses a request, and BudgetUsedUp if no money is left for all images.
        """
        if images.dim() != 4:
            raise RewardError(f"reward vlm scores images [B, C, H, W]; it was given {list(images.shape)}; set frames")
        if not self._config.is_paid:
            return self._scores(images, prompts, metadata, lambda send: send())
        if self._purse is None:
            return self._unpaid(len(prompts))
        with Payment(self._purse, self._config.most_micro_usd, len(prompts)) as payment:
            return self._scores(images, prompts, metadata, lambda send: self._paid(payment, send))

    def _scores(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata], around: Around
    ) -> list[Score]:
        def ask(image: Tensor, prompt: str, facts: Metadata) -> Score:
            return self._one(question(self._config, as_pil(image), prompt, facts), prompt, around)

        with ThreadPoolExecutor(self._config.concurrency, thread_name_prefix="ask-vlm") as threads:
            return list(threads.map(ask, images, prompts, metadata))

    def _one(self, body: bytes, prompt: str, around: Around) -> Score:
        def paced(send: Callable[[], bytes]) -> bytes:
            self._pace.wait()
            return around(send)

        try:
            return self._call.post(body, HEADERS, lambda content: self._read(text_of(content), prompt), paced)
        except NoAnswer as error:
            if self._must_answer:
                raise RewardError(f"the model gave no score: {error}") from None
            print(f"reward vlm: an image has no score, and its group is skipped: {error}", flush=True)
            return Score(reward=nan, metrics={}, fault=str(error))

    def _paid(self, payment: Payment, send: Callable[[], bytes]) -> bytes:
        """Make one call, and record its price. A call that the server may have worked on costs the most it can."""
        if not payment.take():
            raise NoAnswer("no money of the judges' budget is left for another try")
        most = PaidCall(input_tokens=0, output_tokens=0, micro_usd=self._config.most_micro_usd)
        try:
            content = send()
        except (BadAnswer, RewardError) as error:
            if isinstance(error, Unanswered):
                payment.made(most)
            else:
                payment.not_made()
            raise
        except BaseException:
            payment.made(most)
            raise
        usage = usage_of(content)
        if usage is None:
            payment.made(most)
        else:
            price = self._config.micro_usd(usage.prompt_tokens, usage.completion_tokens)
            payment.made(
                PaidCall(input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens, micro_usd=price)
            )
        return content

    def _read(self, text: str, prompt: str) -> Score:
        """Return the score in an answer. Raises BadAnswer for an answer without a score."""
        if self._config.task == "judge":
            return Score(reward=score_of(text, self._config.scale), metrics={})
        metrics = reading_metrics(normalised(text), requested_texts(prompt))
        return Score(reward=metrics["similarity"], metrics=metrics)

    def _unpaid(self, count: int) -> list[Score]:
        """Check address and key with a free request. Return scores of 0, which nothing may train."""
        try:
            self._call_to("models").get()
        except NoAnswer as error:
            raise RewardError(f"the model's server does not answer: {error}") from None
        metrics = {} if self._config.task == "judge" else {"exact_match": 0.0, "similarity": 0.0}
        return [Score(reward=0.0, metrics=metrics)] * count

    def _call_to(self, path: str) -> HttpCall:
        config = self._config
        return HttpCall(
            f"{config.url.rstrip('/')}/{path}",
            key_name=config.key,
            timeout_seconds=config.timeout_seconds,
            tries=1 if self._must_answer else config.tries,
            connections=config.concurrency,
        )

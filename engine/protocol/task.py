"""Tasks: the unit in which the trainer submits requests.

The promise: a task is checked when it is built, before the coordinator writes the task to the journal.
"""

from typing import get_args

import msgspec

from engine.protocol.request import Kind, RequestId, Scorer, WeightsKey, request_class


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A set of requests that share weights and sampler plan, as submitted by the trainer.

    `sampler` is the plan as JSON (engine/diffusion/sampler.py). `steps` is the plan's number of denoising steps.
    `images` is the number of leading requests whose finished image is sent back. `latents`: the final latents of
    candidates are sent back. All requests have the same kind.
    Raises ValueError if the scorer is the student and the kind is not exploration: training and reports use the reward.
    """

    requests: tuple[RequestId, ...]
    weights: WeightsKey
    sampler: str
    steps: int
    shape: int
    dtype: str
    images: int = msgspec.field(default=0, name="images")
    scorer: Scorer = "reward"
    latents: bool = False

    @property
    def request_class(self) -> str:
        return request_class(self.shape, self.dtype)

    def __post_init__(self) -> None:
        # Check here and not in `submit`: a task rejected by the queue must not be in the journal already.
        if self.scorer not in get_args(Scorer):
            raise ValueError(f"a task's scorer is {self.scorer!r}; use one of {', '.join(get_args(Scorer))}")
        other_kinds = {str(request.kind) for request in self.requests} - {str(Kind.EXPLORE)}
        if self.scorer == "student" and other_kinds:
            raise ValueError(
                f"a task of kind {', '.join(sorted(other_kinds))} names the student as its scorer; only exploration "
                "may, because a student ranks seeds and its scores are not the reward; use scorer='reward'"
            )

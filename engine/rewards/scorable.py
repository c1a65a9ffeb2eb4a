"""Score the images that can be scored. An image that is not finite gets no score, whichever scorer the job has.

Most scorers would take NaN for black and return a finite score, which then would be trained.
"""

from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor

from engine.protocol.request import Score
from engine.rewards.reward import Reward, RewardError


def scores_of(reward: Reward, images: Tensor, prompts: Sequence[str], no_score: Sequence[str] = ()) -> list[Score]:
    """Return a score per image. The reward gets only images that are finite and have no reason against a score.

    images: [B, C, H, W] or [B, C, F, H, W]. `no_score`: a reason for each image, or ""; empty: no reasons.
    """
    broken = unsound(images)
    reasons = [reason or fault for reason, fault in zip(no_score or [""] * len(prompts), broken, strict=True)]
    scored = [place for place, reason in enumerate(reasons) if not reason]
    if len(scored) == len(prompts):
        scores = list(reward(images, prompts))
    else:
        scores = list(reward(images[scored], [prompts[place] for place in scored])) if scored else []
    if len(scores) != len(scored):
        raise RewardError(f"the reward returned {len(scores)} scores for {len(scored)} images; return one each")
    by_place = dict(zip(scored, scores, strict=True))
    return [by_place.get(place, Score(reward=nan, metrics={}, fault=reason)) for place, reason in enumerate(reasons)]


def unsound(images: Tensor, latents: Tensor | None = None) -> list[str]:
    """Return for each image why it cannot be scored; "" for a sound image. `latents` [B, ...]: of the images."""
    reasons = []
    for place in range(len(images)):
        if latents is not None and not bool(torch.isfinite(latents[place]).all()):
            reasons.append("the latents of the image are not finite (NaN or infinite)")
        elif not bool(torch.isfinite(images[place]).all()):
            reasons.append("the image is not finite (NaN or infinite)")
        else:
            reasons.append("")
    return reasons

"""Inputs of the forward passes of one lease: plan, seeds and conditioning, padded to the full shape."""

import json
from dataclasses import dataclass

import torch

from engine.diffusion.sampler import Plan, plan_from_dict
from engine.models.adapter import Conditioning, DiTAdapter, rows
from engine.protocol.request import Work


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageInputs:
    """Inputs shared by all workers that sample the images of one lease."""

    plan: Plan
    filled: list[int]
    """Attempt index of each row: the full shape, padded with copies of the last attempt."""
    seeds: list[int]
    conditioning: Conditioning

    @classmethod
    def of(cls, work: Work, adapter: DiTAdapter) -> "ImageInputs":
        attempts = work.attempts
        filled = [min(i, len(attempts) - 1) for i in range(work.shape)]
        prompts = list(dict.fromkeys(attempt.request.prompt for attempt in attempts))
        place = torch.tensor([prompts.index(attempts[i].request.prompt) for i in filled])
        device = next(adapter.transformer.parameters()).device
        return cls(
            plan=plan_from_dict(json.loads(work.sampler)),
            filled=filled,
            seeds=[attempts[i].request.seed for i in filled],
            conditioning=rows(adapter.encode(prompts), place.to(device)),
        )

"""The phase of a node's usage that each kind of request counts towards."""

from engine.events import Phase
from engine.protocol.request import (
    Kind,
)

PHASE_OF = {
    Kind.TRAIN: Phase.ROLLOUT,
    Kind.EARLY: Phase.ROLLOUT,
    Kind.EVALUATE: Phase.EVALUATION,
    Kind.CONTROL: Phase.EXPLORATION,
    Kind.EXPLORE: Phase.EXPLORATION,
}

IDLE_KINDS = (Kind.CONTROL, Kind.EXPLORE)
"""Kinds of requests the trainer does not wait for during the rollout of a batch."""

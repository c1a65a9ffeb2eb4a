"""Who shared pictures with whom (sequence parallelism), from what the engine told: compactly, and in a sentence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Of a whole run."""

    regroups: int
    nodes: int
    """That ever had groups."""
    degrees: tuple[int, ...]
    """Sizes of the groups that there were, ascending; 1: a worker alone."""


def sharing_of(regrouped: Sequence[Event]) -> Sharing | None:
    """`regrouped`: Regrouped events. None when every worker always worked alone."""
    if not regrouped:
        return None
    return Sharing(
        regroups=len(regrouped),
        nodes=len({event["node"] for event in regrouped}),
        degrees=tuple(sorted({len(group) for event in regrouped for group in event["groups"]})),
    )


def sharing_words(sharing: Sharing | None) -> str:
    """A sentence; nothing of a run that never shared."""
    if sharing is None:
        return ""
    regroups = "1 regroup" if sharing.regroups == 1 else f"{sharing.regroups:,} regroups"
    nodes = "1 node" if sharing.nodes == 1 else f"{sharing.nodes} nodes"
    return f"Shared pictures: {regroups} on {nodes}; degrees {', '.join(map(str, sharing.degrees))}."


def groups_text(groups: Sequence[Sequence[str]]) -> str:
    """`0+1 2`: the workers of one node by their places, those of a group together."""
    return " ".join("+".join(worker.rpartition("/")[2] for worker in group) for group in groups)

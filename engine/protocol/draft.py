"""The draft of a batch: the groups that are sampled one version early (TCSS), before the batch's manifest exists.

    every prompt has enough candidates -> draft, durable -> its rollouts -> the manifest contains the drafted groups

The promise: a draft is durable before its first rollout and is never chosen again, so no early image is wasted. Pure.
The idea is that of DigenRL (verl-omni issue 321); the rules are our own.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import floor, isfinite
from typing import Any

from engine.protocol.request import Finished, Group, Kind, Manifest, RequestId


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """Early groups of a batch: the groups of its first prompts. `version`: of the weights that sample them."""

    run: str
    lineage: int
    batch: int
    version: int
    sampler: str
    groups: tuple[Group, ...]

    def requests(self) -> list[RequestId]:
        """Return the requests in group order."""
        return [
            RequestId(
                run=self.run, lineage=self.lineage, batch=self.batch, prompt=group.prompt, seed=seed, kind=Kind.EARLY
            )
            for group in self.groups
            for seed in group.seeds
        ]

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Draft":
        """Return a stored draft. Raises ValueError, KeyError or TypeError for bytes that are no draft."""
        raw: dict[str, Any] = json.loads(data)
        groups = tuple(Group(prompt=group["prompt"], seeds=tuple(group["seeds"])) for group in raw["groups"])
        return cls(**{**raw, "groups": groups})


def early_groups(share: float, groups: int) -> int:
    """Return the number of early groups: at most `share` of a batch."""
    return floor(share * groups)


def has_pool(results: Iterable[Finished], prompts: Sequence[str], least: int) -> bool:
    """Return True if every prompt has `least` candidates with a finite reward."""
    counts = Counter(result.request.prompt for result in results if isfinite(result.score.reward))
    return all(counts[prompt] >= least for prompt in prompts)


def with_draft(manifest: Manifest, draft: Draft) -> Manifest:
    """Return the manifest with the drafted groups in the place of its own groups of the same prompts.

    A draft that does not fit is left out: of another batch or lineage, of weights older than one version, of another
    sampler, or of other prompts because the job was changed.
    """
    number = len(draft.groups)
    fits = (
        (draft.lineage, draft.batch, draft.version) == (manifest.lineage, manifest.batch, manifest.version - 1)
        and draft.sampler == manifest.sampler
        and [group.prompt for group in draft.groups] == [group.prompt for group in manifest.groups[:number]]
    )
    if not fits:
        return manifest
    return replace(manifest, groups=(*draft.groups, *manifest.groups[number:]), early=tuple(range(number)))

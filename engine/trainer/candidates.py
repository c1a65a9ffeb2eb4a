"""Candidates that are trained as they are: the images of the next batch's candidate groups.

    collect (results with their final latents) -> choose -> checkpoint, with the manifest -> take (the batch opens)

A group of candidates is an early group of the manifest: its images were made with the weights of one version before.
The promise: a checkpoint has the images of every early group of its manifest, so a trainer that goes on from the
checkpoint trains the same bits, on any node. docs/decisions/028-candidates-are-trained.md has the reasons.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite

import torch
from safetensors.torch import load, save
from torch import Tensor

from engine.diffusion.trajectory import Trajectory
from engine.protocol.request import Finished, Kind, Manifest, RequestId, Score
from engine.storage.tensor_files import Stored

FILE = "candidates"
"""File of a checkpoint with the images of the next batch's candidate groups, if there are such groups."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CandidateImage:
    """A finished candidate. `x` [*S]: its final latent. `node`: the node that made it."""

    score: Score
    node: str
    x: Tensor


class CandidateImages:
    """Images of candidates by prompt and seed."""

    def __init__(self, images: Mapping[tuple[str, int], CandidateImage] | None = None) -> None:
        self._images = dict(images or {})

    def __len__(self) -> int:
        return len(self._images)

    @classmethod
    def of(cls, results: Sequence[Finished], latents: Mapping[str, bytes]) -> "CandidateImages":
        """Return the images of the candidates with a finite reward. `latents`: trajectories by name."""
        images = {}
        for result in results:
            if result.trajectory is not None and isfinite(result.score.reward):
                x = Trajectory.from_bytes(latents[result.trajectory]).x
                key = (result.request.prompt, result.request.seed)
                images[key] = CandidateImage(score=result.score, node=result.node, x=x)
        return cls(images)

    def with_early_groups(self, manifest: Manifest) -> Manifest:
        """Return the manifest with every group as early of which all images are here."""
        numbers = enumerate(manifest.groups)
        whole = (n for n, group in numbers if all((group.prompt, seed) in self._images for seed in group.seeds))
        return replace(manifest, early=tuple(whole))

    def only(self, manifest: Manifest) -> "CandidateImages":
        """Return the images of the manifest's early groups, in the order of the manifest."""
        keys = [(manifest.groups[n].prompt, seed) for n in manifest.early for seed in manifest.groups[n].seeds]
        return CandidateImages({key: self._images[key] for key in keys})

    def group(self, manifest: Manifest, number: int) -> list[tuple[Finished, Trajectory]]:
        """Return the results and images of a group, in the order of its seeds."""
        group = manifest.groups[number]
        images = []
        for seed in group.seeds:
            image = self._images[group.prompt, seed]
            request = RequestId(
                run=manifest.run,
                lineage=manifest.lineage,
                batch=manifest.batch,
                prompt=group.prompt,
                seed=seed,
                kind=Kind.EXPLORE,
            )
            result = Finished(request=request, score=image.score, node=image.node)
            images.append((result, Trajectory.begin(image.x)))
        return images

    def stored(self) -> Stored:
        """Return the images as a file of tensors: x [N, *S], and the rest as JSON in bytes."""
        rest = [[*key, asdict(image.score), image.node] for key, image in self._images.items()]
        tensors = {
            "x": torch.stack([image.x for image in self._images.values()]),
            "rest": torch.frombuffer(bytearray(json.dumps(rest).encode()), dtype=torch.uint8),
        }
        return Stored.of_bytes(save(tensors))

    @classmethod
    def restored(cls, file: Stored | None) -> "CandidateImages":
        """Return the images of a checkpoint's file. None: the checkpoint has none."""
        if file is None:
            return cls()
        tensors = load(file.to_bytes())
        rest = json.loads(tensors["rest"].numpy().tobytes())
        return cls(
            {
                (prompt, seed): CandidateImage(score=Score(**score), node=node, x=x)
                for (prompt, seed, score, node), x in zip(rest, tensors["x"], strict=True)
            }
        )


class CandidateRollouts:
    """The candidate groups of a manifest, as its early groups (`Rollouts`). All of them are there at once."""

    def __init__(self, manifest: Manifest, images: CandidateImages) -> None:
        self._manifest, self._images = manifest, images
        self.open = set(manifest.early)
        """Groups that were not taken yet."""

    def count(self, number: int) -> int:
        """Return the number of images of a group."""
        return len(self._manifest.groups[number].seeds)

    def take(self, *, wait: bool) -> dict[int, list[tuple[Finished, Trajectory]]]:
        """Return the images of all groups, by group number, at the first call. Never waits, whatever `wait` says."""
        taken = {number: self._images.group(self._manifest, number) for number in sorted(self.open)}
        self.open.clear()
        return taken

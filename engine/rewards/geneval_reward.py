"""GenEval as a reward: a detector finds objects, CLIP names their colours, and GenEval's rules give the verdict.

    reward    share of the prompt's clauses that hold, so that images of a group differ
    accuracy  1 if the image is correct by GenEval's published rule, else 0

Colours are named as in GenEval: the object is cut out of its box with a grey background (#999), and CLIP compares it
with three sentences for each of ten colours. The published model is ViT-L/14 of OpenAI.
"""

from collections.abc import Sequence
from typing import Protocol

from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from engine.diffusion.images import as_pil
from engine.prompt_set import Metadata
from engine.protocol.request import Score
from engine.rewards.clip_folder import ClipFolder
from engine.rewards.detector import FoundObject
from engine.rewards.geneval import MOST_OBJECTS, Detection, Request, request_of, verdict
from engine.rewards.reward import RewardError

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")

SENTENCES = ("a photo of a {colour} {label}", "a photo of a {colour}-colored {label}", "a photo of a {colour} object")

BACKGROUND = "#999"
"""Colour around a cut-out object."""


class Detector(Protocol):
    """Finds objects. `names`: the classes that the detector knows, in GenEval's words."""

    @property
    def names(self) -> frozenset[str]: ...

    def detect(self, images: Sequence[Image.Image]) -> Sequence[Sequence[FoundObject]]:
        """Return the objects of each image."""


class ColourNames:
    """Names the colours of objects by CLIP."""

    def __init__(self, clip: ClipFolder) -> None:
        self._clip = clip
        self._known: dict[str, Tensor] = {}

    def name(self, image: Image.Image, objects: Sequence[FoundObject], label: str) -> list[str]:
        """Return the colour of each object of a class."""
        if not objects:
            return []
        nearest = (
            self._clip.embeddings_of([cut_out(image, detected) for detected in objects]) @ self._colours_of(label).T
        )
        return [COLOURS[place] for place in nearest.argmax(dim=-1).tolist()]

    def _colours_of(self, label: str) -> Tensor:
        """Return an embedding [10, D] of length 1 for each colour: the mean over the sentences."""
        if label not in self._known:
            texts = [sentence.format(colour=colour, label=label) for colour in COLOURS for sentence in SENTENCES]
            embeddings = self._clip.text_embeddings(texts).unflatten(0, (len(COLOURS), len(SENTENCES)))
            self._known[label] = normalize(embeddings.mean(dim=1), dim=-1)
        return self._known[label]


class GenEvalReward:
    """Scores by GenEval's rules. `colours`: None if no prompt asks for a colour."""

    def __init__(self, detector: Detector, colours: ColourNames | None) -> None:
        self._detector, self._colours = detector, colours

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> list[Score]:
        """Score images [B, C, H, W] in [-1, 1]. Raises RewardError for a prompt that the models cannot judge."""
        pictures, requests = [as_pil(image) for image in images], [self._request(entry) for entry in metadata]
        detections = self._detector.detect(pictures)
        return [
            self._score(picture, objects, request, entry)
            for picture, objects, request, entry in zip(pictures, detections, requests, metadata, strict=True)
        ]

    def _request(self, metadata: Metadata) -> Request:
        try:
            request = request_of(metadata)
        except ValueError as error:
            raise RewardError(str(error)) from None
        asked = {clause.label for clause in request.include} | {clause.label for clause in request.exclude}
        if unknown := sorted(asked - self._detector.names):
            raise RewardError(
                f"a prompt asks for {unknown[0]!r}, which the detector does not know; leave the prompt out"
            )
        if self._colours is None and any(clause.color is not None for clause in request.include):
            raise RewardError(
                "a prompt asks for a colour, and no model names colours; add colours: {path: folder of CLIP ViT-L/14}"
            )
        return request

    def _score(
        self, picture: Image.Image, objects: Sequence[FoundObject], request: Request, metadata: Metadata
    ) -> Score:
        faults = verdict(metadata, self._detections(picture, objects, request)).faults
        clauses = max(1, len(request.include) + len(request.exclude))
        return Score(reward=1.0 - len(faults) / clauses, metrics={"accuracy": float(not faults)})

    def _detections(self, picture: Image.Image, objects: Sequence[FoundObject], request: Request) -> list[Detection]:
        """Return the objects as GenEval's rules need them, with the colours that the request asks for."""
        coloured = {clause.label for clause in request.include if clause.color is not None}
        detections = []
        for label in dict.fromkeys(detected.label for detected in objects):
            of_class = sorted(
                (detected for detected in objects if detected.label == label), key=lambda detected: -detected.confidence
            )
            named: list[str] = []
            if label in coloured and self._colours is not None:
                named = self._colours.name(picture, of_class[:MOST_OBJECTS], label)
            for place, detected in enumerate(of_class):
                colour = named[place] if place < len(named) else None
                detections.append(
                    Detection(label=label, confidence=detected.confidence, box=detected.box, colour=colour)
                )
        return detections


def cut_out(image: Image.Image, detected: FoundObject) -> Image.Image:
    """Return an object alone, in its box."""
    alone = Image.composite(image, Image.new("RGB", image.size, BACKGROUND), Image.fromarray(detected.mask))
    return alone.crop(detected.box)

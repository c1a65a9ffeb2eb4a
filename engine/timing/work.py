"""Seconds of the engine's work on the reference machine, by which the clock of a local run advances. No torch.

The reference machine is one core of the two on which the shipped models were timed. The figures need not be those of
this machine: they make the clock of a run independent of the machine (engine/work_clock.py).
"""

from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig
from engine.memory.activations import branches_of
from engine.memory.job import sized_model
from engine.model_folder import FAMILIES
from engine.timing.job import rows_of_an_image

START_SECONDS = 6.0
"""Seconds until a coordinator answers, most of them for imports."""

OPERATIONS_PER_SECOND = 25e9
"""Floating point operations per second of a core in large matrix products."""

LAUNCH_SECONDS_PER_BLOCK = 1e-3
"""Seconds of a transformer's block beside its matrix products."""

TRAINED_PASSES = 3.0
"""A trained row takes so many passes: forward, and backward for weights and inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkSeconds:
    """Seconds of one core.

    image   of an image in a forward pass      launch  of a forward pass beside its images
    row     of a training row                  score   of scoring an image by the reward
    student of scoring an image by the reward's student
    """

    image: float
    launch: float
    row: float
    score: float
    student: float = 0.0

    def scored(self, images: int, *, by_student: bool) -> float:
        """Return the seconds of scoring so many images."""
        return images * (self.student if by_student else self.score)

    def forward(self, images: int) -> float:
        """Return the seconds of a denoising step of so many images."""
        return self.launch + images * self.image

    def trained(self, config: EngineConfig, images: int) -> float:
        """Return the seconds of training so many images, all of their rows."""
        row = max(
            self.row, config.runtime.row_seconds + config.runtime.pass_seconds / config.algorithm.rows_per_forward
        )
        return images * rows_of_an_image(config) * row


NO_SECONDS = WorkSeconds(image=0.0, launch=0.0, row=0.0, score=0.0)

SHIPPED = {
    "digits-ocr": WorkSeconds(image=1.2e-3, launch=9e-3, row=4e-3, score=8e-3, student=0.5e-3),
    "shapes": WorkSeconds(image=1.2e-3, launch=12e-3, row=4e-3, score=1e-3),
}
"""Measured: `python -m tests.benchmarks.work_seconds`."""

SCORE_SECONDS = 20e-3
"""Assumed for the scores of any other model's images."""


def work_seconds(config: EngineConfig) -> WorkSeconds:
    """Return the seconds of a job's work.

    Those of another model than the shipped ones follow from the sizes of its folder, if `model.path` is one here.
    """
    if config.model.name not in FAMILIES:
        return SHIPPED.get(config.model.name, NO_SECONDS)
    sized = sized_model(config.model, None if config.model.path is None else Path(config.model.path))
    branches = branches_of(sized.architecture, is_guided=config.sampler.guidance != 1.0)
    image = branches * sized.operations / OPERATIONS_PER_SECOND
    return WorkSeconds(
        image=image,
        launch=branches * sized.blocks * LAUNCH_SECONDS_PER_BLOCK,
        row=TRAINED_PASSES * image,
        score=SCORE_SECONDS,
    )

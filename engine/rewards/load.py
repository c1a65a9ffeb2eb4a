"""Load a `Reward` by its name in the job file: a built-in scorer, or the user's own `package.module:function`."""

import difflib
from collections.abc import Mapping

from engine.config import EngineConfig, RewardConfig
from engine.prompt_set import Metadata
from engine.prompts import metadata_of_job
from engine.reward_config import LocalModelConfig, ScorerConfig
from engine.rewards.clip_folder import ClipFolder
from engine.rewards.frames import FrameMeans
from engine.rewards.purse import Purse
from engine.rewards.reward import MetadataOfPrompts, MetadataReward, Reward
from engine.rewards.reward import RewardError as RewardError
from engine.rewards.weighted_sum import Weighted, WeightedSum

BUILT_IN = (
    "ocr",
    "ocr_strict",
    "ocr_smooth",
    "shapes",
    "shapes_strict",
    "clip",
    "pickscore",
    "aesthetic",
    "hpsv3",
    "geneval",
    "http",
    "vlm",
)


def load_reward_of_job(
    config: EngineConfig,
    workdir: str | None,
    *,
    device: str = "cpu",
    purse: Purse | None = None,
    must_answer: bool = False,
) -> Reward:
    """Return the job's scorer with the metadata of the job's prompts.

    `device`: of a scorer's model. `purse`: pays a paid judge. `must_answer`: a server that does not answer is an error
    after one try, and a paid judge is not asked for a score, for the check before a launch. Raises RewardError, and
    ValueError for a prompt file that cannot be read.
    """
    metadata = metadata_of_job(config, workdir)
    return load_reward(config.reward, workdir, metadata, device=device, purse=purse, must_answer=must_answer)


def load_reward(
    config: RewardConfig,
    workdir: str | None,
    metadata: Mapping[str, Metadata] | None = None,
    *,
    device: str = "cpu",
    purse: Purse | None = None,
    must_answer: bool = False,
) -> Reward:
    """Return a scorer. `workdir`: folder of a user's own module and of models. `metadata`: metadata by prompt."""

    def load(scorer: ScorerConfig) -> Reward:
        if scorer.vlm is not None:
            from engine.rewards.vlm import VlmReward

            return MetadataOfPrompts(VlmReward(scorer.vlm, purse, must_answer=must_answer), metadata or {})
        return _load_scorer(scorer, workdir, metadata or {}, device, must_answer)

    if config.parts:
        parts = [Weighted(name=part.metric, weight=part.weight, reward=load(part)) for part in config.parts]
        reward: Reward = WeightedSum(parts)
    else:
        reward = load(config)
    return reward if config.frames is None else FrameMeans(reward, config.frames)


def _load_scorer(
    config: ScorerConfig, workdir: str | None, metadata: Mapping[str, Metadata], device: str, must_answer: bool
) -> Reward:
    if config.http is not None:
        from engine.rewards.http_reward import HttpReward

        return MetadataOfPrompts(HttpReward(config.http, must_answer=must_answer), metadata)
    if config.model is not None and config.name == "geneval":
        return MetadataOfPrompts(_geneval(config, config.model, workdir, device), metadata)
    if config.model is not None and config.name == "hpsv3":
        from engine.rewards.hpsv3 import Hpsv3Reward

        return Hpsv3Reward(config.model, workdir, device)
    if config.model is not None:
        return _reward_of_model(config.name, ClipFolder(config.model, workdir, device))
    return _reward_of_name(config, workdir, metadata)


def _geneval(config: ScorerConfig, model: LocalModelConfig, workdir: str | None, device: str) -> MetadataReward:
    from engine.rewards.detector import Mask2FormerFolder
    from engine.rewards.geneval_reward import ColourNames, GenEvalReward

    colours = None if config.colours is None else ColourNames(ClipFolder(config.colours, workdir, device))
    return GenEvalReward(Mask2FormerFolder(model, workdir, device), colours)


def _reward_of_model(name: str, clip: ClipFolder) -> Reward:
    match name:
        case "clip" | "pickscore":
            from engine.rewards.clip import ClipReward

            return ClipReward(name, clip)
        case "aesthetic":
            from engine.rewards.aesthetic import AestheticReward

            return AestheticReward(clip)
    raise RewardError(f"reward.name is {name!r}, which loads no model")


def _reward_of_name(config: ScorerConfig, workdir: str | None, metadata: Mapping[str, Metadata]) -> Reward:
    match config.name:
        case "ocr" | "ocr_strict" | "ocr_smooth":
            from engine.rewards.ocr import OcrReward

            return OcrReward(config.name)
        case "shapes" | "shapes_strict":
            from engine.rewards.shapes import ShapesReward

            return ShapesReward(config.name)
        case name if ":" in name:
            from engine.rewards.user import UserReward, import_function

            return MetadataOfPrompts(UserReward(name, import_function(name, workdir)), metadata)
        case name:
            near = difflib.get_close_matches(name, BUILT_IN, n=1, cutoff=0.0)[0]
            raise RewardError(
                f"reward.name is {name!r}, which is no reward of ours; did you mean {near!r}? "
                f"There are {', '.join(BUILT_IN)}, and `package.module:function` for your own"
            )


def load_student(
    config: EngineConfig,
    workdir: str | None = None,
    *,
    device: str = "cpu",
    purse: Purse | None = None,
    must_answer: bool = False,
) -> Reward | None:
    """Return the student, which ranks candidate seeds instead of the reward. None: no student exists.

    The job's own `reward.student`, or the shipped model. Parameters and errors are those of `load_reward_of_job`.
    """
    own = config.reward.student_reward
    if own is not None:
        metadata = metadata_of_job(config, workdir)
        return load_reward(own, workdir, metadata, device=device, purse=purse, must_answer=must_answer)
    reads_digits = config.model.name == "digits-ocr" and config.prompts == "digits"
    if config.reward.name not in ("ocr", "ocr_strict", "ocr_smooth") or not reads_digits:
        return None
    from engine.rewards.student import load_digits_student

    return load_digits_student()

"""Load a `Reward` by its name in the job file: a built-in scorer, or the user's own `package.module:function`."""

import difflib
from collections.abc import Mapping

from engine.config import EngineConfig, RewardConfig
from engine.prompt_set import Metadata
from engine.prompts import metadata_of_job
from engine.rewards.frames import FrameMeans
from engine.rewards.reward import MetadataOfPrompts, Reward
from engine.rewards.reward import RewardError as RewardError

BUILT_IN = ("ocr", "ocr_strict", "ocr_smooth", "shapes", "shapes_strict", "http")


def load_reward_of_job(config: EngineConfig, workdir: str | None, *, must_answer: bool = False) -> Reward:
    """Return the job's scorer with the metadata of the job's prompts.

    `must_answer`: a server that does not answer is an error after one try, for the check before a launch. Raises
    RewardError, and ValueError for a prompt file that cannot be read.
    """
    return load_reward(config.reward, workdir, metadata_of_job(config, workdir), must_answer=must_answer)


def load_reward(
    config: RewardConfig,
    workdir: str | None,
    metadata: Mapping[str, Metadata] | None = None,
    *,
    must_answer: bool = False,
) -> Reward:
    """Return a scorer. `workdir`: the folder of a user's own module. `metadata`: metadata by prompt."""
    reward = _reward_of_name(config, workdir, metadata or {}, must_answer)
    return reward if config.frames is None else FrameMeans(reward, config.frames)


def _reward_of_name(
    config: RewardConfig, workdir: str | None, metadata: Mapping[str, Metadata], must_answer: bool
) -> Reward:
    match config.name:
        case "ocr" | "ocr_strict" | "ocr_smooth":
            from engine.rewards.ocr import OcrReward

            return OcrReward(config.name)
        case "shapes" | "shapes_strict":
            from engine.rewards.shapes import ShapesReward

            return ShapesReward(config.name)
        case "http" if config.http is not None:
            from engine.rewards.http_reward import HttpReward

            return MetadataOfPrompts(HttpReward(config.http, must_answer=must_answer), metadata)
        case name if ":" in name:
            from engine.rewards.user import UserReward, import_function

            return MetadataOfPrompts(UserReward(name, import_function(name, workdir)), metadata)
        case name:
            near = difflib.get_close_matches(name, BUILT_IN, n=1, cutoff=0.0)[0]
            raise RewardError(
                f"reward.name is {name!r}, which is no reward of ours; did you mean {near!r}? "
                f"There are {', '.join(BUILT_IN)}, and `package.module:function` for your own"
            )


def load_student(config: EngineConfig) -> Reward | None:
    """Return the student, a small model that ranks candidate seeds instead of the reward. None: no student exists."""
    reads_digits = config.model.name == "digits-ocr" and config.prompts == "digits"
    if config.reward.name not in ("ocr", "ocr_strict", "ocr_smooth") or not reads_digits:
        return None
    from engine.rewards.student import load_digits_student

    return load_digits_student()

"""Name the prompts that the model or the OCR reader cannot take whole: `python -m engine.entrypoints.prompt_warnings`.

    CONFIG WORKDIR -> prompts of the job -> tokens of each, by the tokenizer in the model's folder
                   -> characters of the requested texts, by the OCR reader

The model is not loaded, so the command also runs on a machine that could not hold it. It prints one JSON line with the
warnings. Exit code 3: {"field", "found", "remedy"}, like the check before a launch.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import SHIPPED, EngineConfig
from engine.families import FAMILIES
from engine.model_folder import image_size
from engine.model_parts import INDEX, read_json
from engine.prompts import FilePrompts, PromptSource, prompt_source
from engine.rewards.ocr import target_text, unreadable_characters
from engine.rewards.requested_text import names_no_text, normalised, requested_texts

OCR = ("ocr", "ocr_strict", "ocr_smooth")

SHOWN = 3
"""Prompts that a warning shows."""

SHOWN_CHARACTERS = 60
"""Characters of a prompt that a warning shows."""


@dataclass(frozen=True, kw_only=True)
class TextLimit:
    """Text that a family's pipeline passes to the encoder with the longest text."""

    tokenizer: str
    end_tokens: int
    """Tokens behind the prompt that take room from it. The ends of the templates of qwen-image and hunyuan-video take
    none: they are cut before the prompt is."""
    most: int | None = None
    """Largest limit of the pipeline, whatever `model.max_text_tokens` says."""


LIMITS: Mapping[str, TextLimit] = {
    "qwen-image": TextLimit(tokenizer="tokenizer", end_tokens=0, most=1024),
    "sd3": TextLimit(tokenizer="tokenizer_3", end_tokens=1),
    "flux": TextLimit(tokenizer="tokenizer_2", end_tokens=1),
    "wan": TextLimit(tokenizer="tokenizer", end_tokens=1),
    "hunyuan-video": TextLimit(tokenizer="tokenizer", end_tokens=0),
    **{name: TextLimit(tokenizer="tokenizer", end_tokens=family.template_tokens) for name, family in FAMILIES.items()},
}
"""By family. The CLIP encoders of sd3, flux and hunyuan-video see the first 77 tokens of every prompt, as published."""


class TokenizerError(ValueError):
    """The tokenizer of a folder cannot be loaded."""


def prompt_warnings(config: EngineConfig, source: PromptSource) -> list[str]:
    """Return a sentence for each kind of prompt that cannot be taken whole. Raises TokenizerError."""
    if isinstance(source, FilePrompts):
        prompts = [*source.trained, *source.evaluated]
    else:
        prompts = [*source.batch(0), *source.held_out()]
    by_reader = any(scorer.name in OCR for scorer in config.reward.loaded)
    by_model = any(scorer.vlm is not None and scorer.vlm.task != "judge" for scorer in config.reward.loaded)
    warnings = _long_prompts(config, prompts, by_reader or by_model)
    if by_reader or by_model:
        warnings += _without_text(prompts)
    return warnings + (_unreadable(prompts) if by_reader else [])


def _long_prompts(config: EngineConfig, prompts: Sequence[str], reads: bool) -> list[str]:
    """`reads`: the reward asks for the text in a prompt's quotes."""
    if config.model.name in SHIPPED or config.model.path is None:
        return []
    limit = LIMITS[config.model.name]
    tokens = image_size(config.model).text_tokens
    most_tokens = min(tokens, limit.most or tokens) - limit.end_tokens
    # A token is at least a byte, and some tokenizers put a mark before the first.
    candidates = [prompt for prompt in prompts if len(prompt.encode()) + 1 > most_tokens]
    if not candidates:
        return []
    tokenizer = _tokenizer(Path(config.model.path), limit.tokenizer)
    cut, hidden = [], []
    for prompt in candidates:
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if len(ids) <= most_tokens:
            continue
        cut.append((prompt, f"{len(ids)} tokens"))
        whole, visible = normalised(tokenizer.decode(ids)), normalised(tokenizer.decode(ids[:most_tokens]))
        if reads and (behind := [text for text in requested_texts(prompt) if text in whole and text not in visible]):
            hidden.append((prompt, f"asks for {', '.join(behind)}"))
    warnings = []
    if cut:
        larger = "" if limit.most and tokens >= limit.most else ", or raise model.max_text_tokens"
        warnings.append(
            f"{len(cut)} of {len(prompts)} prompts are longer than the {most_tokens} tokens that the text encoder of "
            f"{config.model.name} takes, and the model never sees their ends: {_shown(cut)}; shorten them{larger}"
        )
    if hidden:
        warnings.append(
            f"{len(hidden)} of {len(prompts)} prompts ask for a text behind the {most_tokens} tokens that the model "
            f"sees, so the reward asks for what the model cannot know: {_shown(hidden)}; put the text in quotes first"
        )
    return warnings


def _tokenizer(folder: Path, part: str) -> Any:
    """Return a tokenizer of a folder, of the class that the folder's index names, as diffusers does."""
    import transformers

    entry = read_json(folder / INDEX)[part]
    try:
        return getattr(transformers, entry[1]).from_pretrained(folder / part, local_files_only=True)
    except Exception as error:  # transformers raises errors of many kinds
        kind = type(error).__name__
        raise TokenizerError(f"{folder / part} cannot be loaded as {entry[1]} ({kind}: {error})") from error


def _without_text(prompts: Sequence[str]) -> list[str]:
    silent = [prompt for prompt in prompts if names_no_text(prompt)]
    if not silent:
        return []
    asked = _shown([(prompt, f"asks for {_cut(target_text(prompt))}") for prompt in silent])
    return [
        f"{len(silent)} of {len(prompts)} prompts have no text in quotes, so the reward asks for an image that shows "
        f'the whole prompt: {asked}; put the text in quotes, as in a sign that says "OPEN"'
    ]


def _unreadable(prompts: Sequence[str]) -> list[str]:
    odd = {prompt: missing for prompt in prompts if (missing := unreadable_characters(prompt))}
    if not odd:
        return []
    characters = "".join(dict.fromkeys("".join(odd.values())))
    shown = " ".join(characters[:20]) + (f" and {len(characters) - 20} more" if len(characters) > 20 else "")
    asked = _shown([(prompt, f"asks for {target_text(prompt)}") for prompt in odd])
    return [
        f"{len(odd)} of {len(prompts)} prompts ask for characters that the OCR reader cannot read ({shown}), so no "
        f"image of theirs can score 1: {asked}; use characters of Latin, Chinese or Japanese writing, or another reward"
    ]


def _shown(prompts: Sequence[tuple[str, str]]) -> str:
    texts = [f"{_cut(prompt)!r} ({why})" for prompt, why in prompts[:SHOWN]]
    more = f", and {len(prompts) - SHOWN} more" if len(prompts) > SHOWN else ""
    return ", ".join(texts) + more


def _cut(prompt: str) -> str:
    return prompt if len(prompt) <= SHOWN_CHARACTERS else f"{prompt[: SHOWN_CHARACTERS - 3]}..."


def main() -> int:
    config, workdir = EngineConfig.model_validate_json(sys.argv[1]), sys.argv[2]
    try:
        print(json.dumps({"warnings": prompt_warnings(config, prompt_source(config, workdir))}))
    except TokenizerError as error:
        print(json.dumps({"field": "model.path", "found": str(error), "remedy": "download the model again"}))
        return 3
    except ValueError as error:
        print(json.dumps({"field": "prompts", "found": str(error), "remedy": "mend the prompts"}))
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Read prompt files: one prompt a line, or one JSON object a line with a prompt and its metadata.

    FILE          one prompt a line; blank lines and `#` comments are skipped
    FILE.jsonl    one object a line; its `prompt` is the prompt, and the whole object is the prompt's metadata
    FOLDER        a training file and a test file: `train.txt`, `train.jsonl` or `train_metadata.jsonl`, and the `test`
                  file of the same kind

The formats are those of flow_grpo's data sets (`ocr` and `pickscore`: text; `geneval`: JSONL), of GenEval's own
`evaluation_metadata.jsonl` and of T2I-CompBench (text). The module does not import torch, because the launcher reads
the files before anything is bought.

Promise: a prompt has one metadata. A score depends on image and prompt alone, so two metadata of one prompt are an
error.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

Metadata = Mapping[str, object]
"""Facts about a prompt for the scorer, such as the objects that GenEval looks for."""

NO_METADATA: Metadata = MappingProxyType({})
"""Metadata of a prompt of a text file."""

JSON_LINES = ".jsonl"

PAIRS = (("train.txt", "test.txt"), ("train.jsonl", "test.jsonl"), ("train_metadata.jsonl", "test_metadata.jsonl"))
"""Names of the training and the test file in a folder of prompts."""


class PromptFileError(ValueError):
    """A prompt file cannot be used. The message names file and line, the fault and the remedy."""


def prompt_paths(folder: Path, prompts: str, test_prompts: str | None) -> tuple[Path, Path | None]:
    """Return the training file and the test file that a job names. None: the job names no test file.

    `folder`: the job's workdir. A test file named by the job replaces the test file of a folder of prompts. Raises
    PromptFileError if a file is missing.
    """
    path, test = folder / prompts, None
    if path.is_dir():
        path, test = _pair(path)
    elif not path.is_file():
        raise PromptFileError(
            f"prompts is {prompts!r}, but there is no file {path}; give `digits`, `shapes`, or a file in the job's "
            "workdir: text with one prompt a line, or JSONL"
        )
    if test_prompts is None:
        return path, test
    test = folder / test_prompts
    if not test.is_file():
        raise PromptFileError(
            f"test_prompts is {test_prompts!r}, but there is no file {test}; give a file in the job's workdir, text "
            "with one prompt a line or JSONL, or leave it out"
        )
    return path, test


def _pair(folder: Path) -> tuple[Path, Path | None]:
    found = [(folder / train, folder / test) for train, test in PAIRS if (folder / train).is_file()]
    if len(found) != 1:
        names = " and ".join(train.name for train, _ in found) or "no training file"
        raise PromptFileError(
            f"the folder {folder} has {names}; use a folder with one of {', '.join(train for train, _ in PAIRS)}, or "
            "name the file itself"
        )
    train, test = found[0]
    return train, test if test.is_file() else None


def read_prompts(path: Path) -> dict[str, Metadata]:
    """Return the different prompts of a file with their metadata, in the file's order.

    Raises PromptFileError for an unreadable file, a line that is no prompt, and a prompt with two different metadata.
    """
    try:
        # Split at line feeds alone, as a file's `readlines` does: `splitlines` also splits at characters inside JSON.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (UnicodeDecodeError, OSError) as error:
        raise PromptFileError(f"{path} cannot be read as text ({error}); save it as UTF-8") from None
    if path.suffix != JSON_LINES:
        stripped = [line.strip() for line in lines]
        return dict.fromkeys((line for line in stripped if line and not line.startswith("#")), NO_METADATA)
    prompts: dict[str, Metadata] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            metadata = _object(path, number, line)
            _add(prompts, str(metadata["prompt"]), metadata, f"{path}, line {number}")
    return prompts


def all_metadata(folder: Path, prompts: str, test_prompts: str | None) -> dict[str, Metadata]:
    """Return the metadata of all prompts that a job names, trained and tested. Prompts without metadata are left out.

    Raises PromptFileError, also for a prompt with other metadata in the test file than in the training file.
    """
    path, test = prompt_paths(folder, prompts, test_prompts)
    found = read_prompts(path)
    for prompt, metadata in read_prompts(test).items() if test is not None else ():
        _add(found, prompt, metadata, str(test))
    return {prompt: metadata for prompt, metadata in found.items() if metadata}


def _object(path: Path, number: int, line: str) -> dict[str, object]:
    try:
        read = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptFileError(
            f'{path}, line {number} is no JSON ({error}); write one object a line, like {{"prompt": "a cat"}}'
        ) from None
    prompt = read.get("prompt") if isinstance(read, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise PromptFileError(
            f'{path}, line {number} has no text under "prompt"; write one object a line, like {{"prompt": "a cat"}}'
        )
    checked: dict[str, object] = read
    return checked


def _add(prompts: dict[str, Metadata], prompt: str, metadata: Metadata, place: str) -> None:
    known = prompts.setdefault(prompt, metadata)
    if known != metadata:
        raise PromptFileError(
            f"{place}: the prompt {prompt!r} has two different metadata, {_shown(known)} and {_shown(metadata)}; a "
            "score depends on the image and its prompt, so keep one, or change the words of a prompt"
        )


def _shown(metadata: Metadata) -> str:
    text = json.dumps(dict(metadata), ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:197]}..."

"""Read prompt files: one prompt a line, JSON, JSON Lines, CSV or TSV, told apart by the suffix in any case.

    FILE                     one prompt a line; blank lines and `#` comments are skipped
    FILE.jsonl, FILE.ndjson  one object a line; its `prompt` is the prompt, the whole object is the prompt's metadata
    FILE.json                a list of prompts or of such objects, `{"prompts": [...]}`, or one such object
    FILE.csv, FILE.tsv       a header with a column `prompt`; all columns of a row are the prompt's metadata
    FOLDER                   a training file and a test file: `train` or `train_metadata` with one of these suffixes,
                             and the `test` file of the same kind

A file of another kind (YAML, Parquet, ...), and text that is JSON, CSV, YAML or a list with marks by its content, is
refused: its lines are no prompts. The formats of text and JSON Lines are those of flow_grpo's data sets (`ocr` and
`pickscore`: text; `geneval`: JSONL), of GenEval's own `evaluation_metadata.jsonl` and of T2I-CompBench (text). The
module does not import torch, because the launcher reads the files before anything is bought.

Promise: a prompt has one metadata. A score depends on image and prompt alone, so two metadata of one prompt are an
error.
"""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from unicodedata import category

Metadata = Mapping[str, object]
"""Facts about a prompt for the scorer, such as the objects that GenEval looks for."""

NO_METADATA: Metadata = MappingProxyType({})
"""Metadata of a prompt of a text file."""

JSON_LINES = (".jsonl", ".ndjson")
TABLES = {".csv": ",", ".tsv": "\t"}
"""Suffixes of tables, and their separators. A CSV file may also have semicolons, as spreadsheets of some languages do.
"""

NOT_READ = frozenset({
    ".yaml", ".yml", ".toml", ".xml", ".html", ".htm", ".json5", ".parquet", ".arrow", ".feather", ".avro", ".orc",
    ".xlsx", ".xls", ".ods", ".numbers", ".pkl", ".pickle", ".npy", ".npz", ".pt", ".pth", ".safetensors", ".db",
    ".sqlite", ".sqlite3", ".zip", ".gz", ".bz2", ".xz", ".zst", ".7z", ".tar", ".tgz", ".pdf", ".docx", ".doc", ".odt",
    ".rtf", ".py", ".ipynb", ".md", ".rst", ".tex", ".ini", ".cfg", ".hdf5", ".h5", ".tfrecord",
})  # fmt: skip
"""Suffixes of files whose lines are no prompts."""

READ = "text with one prompt a line (.txt), JSON Lines (.jsonl, .ndjson), JSON (.json), or a table (.csv, .tsv)"

PAIRS = tuple(
    (f"train{name}{suffix}", f"test{name}{suffix}")
    for name, suffix in (
        ("", ".txt"), ("", ".jsonl"), ("_metadata", ".jsonl"), ("", ".ndjson"), ("", ".json"), ("", ".csv"),
        ("", ".tsv"),
    )
)  # fmt: skip
"""Names of the training and the test file in a folder of prompts, in small letters."""


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
            f"workdir: {READ}"
        )
    if test_prompts is None:
        return path, test
    test = folder / test_prompts
    if not test.is_file():
        raise PromptFileError(
            f"test_prompts is {test_prompts!r}, but there is no file {test}; give a file in the job's workdir, "
            f"{READ}, or leave it out"
        )
    return path, test


def _pair(folder: Path) -> tuple[Path, Path | None]:
    names = {file.name.lower(): file for file in sorted(folder.iterdir()) if file.is_file()}
    pairs = [(names[train], names.get(test)) for train, test in PAIRS if train in names]
    if len(pairs) != 1:
        listed = " and ".join(train.name for train, _ in pairs) or "no training file"
        raise PromptFileError(
            f"the folder {folder} has {listed}; use a folder with one of {', '.join(train for train, _ in PAIRS)}, or "
            "name the file itself"
        )
    return pairs[0]


def read_prompts(path: Path) -> dict[str, Metadata]:
    """Return the different prompts of a file with their metadata, in the file's order.

    Raises PromptFileError for an unreadable file, an entry that is no prompt, and a prompt with two different metadata.
    """
    suffix = path.suffix.lower()
    if suffix in NOT_READ:
        raise PromptFileError(f"{path} is a file of another kind ({path.suffix}); use {READ}")
    try:
        # As bytes, because a cell of a table may hold a carriage return.
        text = path.read_bytes().decode("utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        raise PromptFileError(f"{path} cannot be read as text ({error}); save it as UTF-8") from None
    if suffix in JSON_LINES:
        entries = _json_lines(path, text)
    elif suffix == ".json":
        entries = _json(path, text)
    elif suffix in TABLES:
        entries = _table(path, text, TABLES[suffix])
    else:
        entries = _text(path, text.replace("\r\n", "\n").replace("\r", "\n"))
    prompts: dict[str, Metadata] = {}
    for place, prompt, metadata in entries:
        _check_encodable(place, prompt, metadata)
        _add(prompts, prompt, metadata, place)
    return prompts


Entry = tuple[str, str, Metadata]
"""Place in the file, prompt and metadata."""

RENAME = {
    "JSON": "call it .json",
    "JSON Lines": "call it .jsonl",
    "a table": "call it .csv or .tsv",
    "YAML": "write one prompt a line without marks, or JSON Lines",
    "a Python list": "write one prompt a line without marks, or JSON Lines",
    "a list with marks": "write one prompt a line without numbers, marks and commas, or JSON Lines",
    "a web page": "write one prompt a line without tags, or JSON Lines",
}
"""What to do with a file of text that is of another kind."""


def _text(path: Path, text: str) -> Iterator[Entry]:
    """Yield the prompts of a text file. Raises PromptFileError if its content is of another kind."""
    lines = [line.strip() for line in text.split("\n")]
    prompts = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    if prompts and (kind := _other_kind(text, [line for _, line in prompts])):
        raise PromptFileError(f"{path} is {kind} by its content, so its lines are no prompts; {RENAME[kind]}")
    for number, line in prompts:
        yield f"{path}, line {number}", line, NO_METADATA


def _other_kind(text: str, lines: Sequence[str]) -> str | None:
    """Return the kind of a text that is not one prompt a line, or None."""
    first = lines[0]
    if first[0] in "[{":
        if first in ("[", "{") or (len(lines) > 1 and _parsed(text) is not None):
            return "JSON"
        if isinstance(_parsed(first), dict):
            return "JSON Lines"
        if isinstance(_parsed(first), list):
            return "JSON"
        if re.match(r"""\[\s*['"].*['"]\s*,?\s*\]?$""", first):
            return "a Python list"
    if re.match(r"<(!doctype|html|\?xml)\b", first, re.IGNORECASE):
        return "a web page"
    if any(cell.strip().strip('"').lower() == "prompt" for cell in re.split(r"[,;\t]", first)):
        return "a table"
    if first == "---" or re.fullmatch(r"[\w-]+:", first) or all(re.match(r"- |-$", line) for line in lines):
        return "YAML"
    if len(lines) > 1 and (
        _is_numbered(lines) or any(all(map(marks.match, lines[: max(1, len(lines) - 1)])) for marks in MARKS)
    ):
        return "a list with marks"
    return None


MARKS = (re.compile(r"[*•·–]\s"), re.compile(r"""(["']).*\1\s*,$"""))
"""What every line of a list begins with, or stands in: a bullet, or quotes and a comma. The last line may lack it."""


def _is_numbered(lines: Sequence[str]) -> bool:
    """Return True if the lines begin with their numbers: `1. a cat`, `2) a dog`."""
    return all(re.match(rf"{number}\s*[.):]\s", line) for number, line in enumerate(lines, 1))


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _json_lines(path: Path, text: str) -> Iterator[Entry]:
    # Split at line feeds alone, as a file's `readlines` does: `splitlines` also splits at characters inside JSON.
    example = 'write one object a line, like {"prompt": "a cat"}'
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                read = json.loads(line)
            except ValueError as error:
                whole = "" if _parsed(text) is None else ", while the whole file is: call it .json, or"
                raise PromptFileError(f"{place} is no JSON ({error}){whole}; {example}") from None
            yield _entry(place, read, example)


def _json(path: Path, text: str) -> Iterator[Entry]:
    example = 'write a list, like ["a cat", "a dog"] or [{"prompt": "a cat"}]'
    try:
        read = json.loads(text)
    except ValueError as error:
        lines = [line for line in text.split("\n") if line.strip()]
        if lines and all(isinstance(_parsed(line), dict) for line in lines):
            yield from _json_lines(path, text)  # JSON Lines are often called .json
            return
        raise PromptFileError(f"{path} is no JSON ({error}); {example}") from None
    if isinstance(read, dict) and isinstance(read.get("prompts"), list):
        read = read["prompts"]
    for number, entry in enumerate(read if isinstance(read, list) else [read], 1):
        yield _entry(f"{path}, entry {number}", entry, example)


def _entry(place: str, read: object, example: str) -> Entry:
    """Return a prompt that is a text, or an object with a `prompt`."""
    prompt = read.get("prompt") if isinstance(read, dict) else read
    if not isinstance(prompt, str) or not prompt.strip():
        raise PromptFileError(f'{place} has no text under "prompt"; {example}')
    return place, prompt, read if isinstance(read, dict) else NO_METADATA


def _table(path: Path, text: str, separator: str) -> Iterator[Entry]:
    example = "write a header with a column `prompt`, and prompts with a separator in them in double quotes"
    header = text.split("\n", 1)[0]
    if separator == "," and "," not in header and ";" in header:
        separator = ";"
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        columns = [name.strip() for name in next(rows, [])]
        named = [number for number, name in enumerate(columns) if name.lower() == "prompt"]
        if columns and len(named) != 1:
            raise PromptFileError(f"{path} has the columns {', '.join(columns)}, without one `prompt`; {example}")
        for row in rows:
            place = f"{path}, line {rows.line_num}"
            if not any(cell.strip() for cell in row):
                continue
            if len(row) != len(columns):
                raise PromptFileError(f"{place} has {len(row)} cells, and the header {len(columns)}; {example}")
            prompt = row[named[0]].strip()
            if not prompt:
                raise PromptFileError(f"{place} has no prompt; {example}")
            metadata = {
                name: cell for number, (name, cell) in enumerate(zip(columns, row, strict=True)) if number not in named
            }
            yield place, prompt, {"prompt": prompt, **metadata} if metadata else NO_METADATA
    except csv.Error as error:
        raise PromptFileError(f"{path}, line {rows.line_num} is no row of a table ({error}); {example}") from None


def _check_encodable(place: str, prompt: str, metadata: Metadata) -> None:
    """Refuse half of a surrogate pair, which no file, tokenizer or message can hold, and control characters."""
    control = next((letter for letter in prompt if category(letter) == "Cc" and letter not in "\t\n\r"), None)
    if control is not None:
        raise PromptFileError(
            f"{place} has a control character (\\x{ord(control):02x}), as a file has that is no text or is in another "
            "encoding; save it as UTF-8"
        )
    try:
        prompt.encode()
        if metadata:
            json.dumps(dict(metadata), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise PromptFileError(
            f"{place} has half of a character (\\u{ord(error.object[error.start]):04x}), as a cut emoji leaves it; "
            "write the whole character, or leave it out"
        ) from None


def all_metadata(folder: Path, prompts: str, test_prompts: str | None) -> dict[str, Metadata]:
    """Return the metadata of all prompts that a job names, trained and tested. Prompts without metadata are left out.

    Raises PromptFileError, also for a prompt with other metadata in the test file than in the training file.
    """
    path, test = prompt_paths(folder, prompts, test_prompts)
    entries = read_prompts(path)
    if test is not None:
        add_tested(entries, read_prompts(test), test)
    return {prompt: metadata for prompt, metadata in entries.items() if metadata}


def add_tested(prompts: dict[str, Metadata], tested: Mapping[str, Metadata], file: Path) -> None:
    """Add the prompts of a test file to those of the training file. Raises PromptFileError as `all_metadata`."""
    for prompt, metadata in tested.items():
        _add(prompts, prompt, metadata, str(file))


def _add(prompts: dict[str, Metadata], prompt: str, metadata: Metadata, place: str) -> None:
    first = prompts.setdefault(prompt, metadata)
    if first != metadata:
        raise PromptFileError(
            f"{place}: the prompt {prompt!r} has two different metadata, {_shown(first)} and {_shown(metadata)}; a "
            "score depends on the image and its prompt, so keep one, or change the words of a prompt"
        )


def _shown(metadata: Metadata) -> str:
    text = json.dumps(dict(metadata), ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:197]}..."

"""A LoRA file of another program (`model.lora`), read from its header, without torch, before a purchase.

    FILE.safetensors, or a folder with one -> find_lora -> read_lora -> LoraFile: format, rank of each module, digest

Formats: diffusers (`save_lora_weights`), PEFT (`save_pretrained`), kohya (sd-scripts) and ai-toolkit. A tensor that is
no part of a pair of low-rank factors is refused by name: a file counts completely or not at all.
`engine/models/lora.py` converts the names and compares them with the network.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model_parts import FolderError, tensors_of

PEFT_CONFIG = "adapter_config.json"
"""File of a PEFT folder with the alpha of the adapters, beside `adapter_model.safetensors`."""

PREFERRED = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
"""Names that diffusers and PEFT give their files. In a folder with one of them, other files do not count."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt")

FACTOR = re.compile(r"(?P<module>.+?)\.(?:lora_(?P<one>A|B)(?:\.default)?|lora[._](?P<way>down|up))\.weight")
"""Name of a factor: `lora_A` of diffusers, PEFT and ai-toolkit, `lora_down` of kohya, `lora.down` of older diffusers.
"""

ALPHA = ".alpha"

REFUSED: tuple[tuple[str, str], ...] = (
    (
        r"dora_scale|magnitude_vector",
        "DoRA scales, which divide each row by its norm, and spotrl adds low-rank products",
    ),
    (r"lokr_", "LoKr factors (a Kronecker product), which is no low-rank product"),
    (r"hada_", "LoHa factors (a product of two low-rank matrices by element), which is no low-rank product"),
    (
        r"^(lora_te|text_encoder)|text_model",
        "tensors of a text encoder, and spotrl trains and loads the transformer's alone",
    ),
)
"""Parts of names of tensors that are refused, and the reason."""

CHANGED_BASE = ("pissa", "olora", "corda", "loftq")
"""Values of PEFT's `init_lora_weights` that also change the base model, so the factors alone are no whole adapter."""

CONVERT = "merge it into its base with the program that made it and give that folder as model.path, or use plain LoRA"


@dataclass(frozen=True, kw_only=True)
class LoraFile:
    """The header of a LoRA file."""

    path: Path
    made_by: str
    """Program whose format the file has: diffusers, PEFT, kohya or ai-toolkit."""
    ranks: Mapping[str, int]
    """Rank of each module, by its name in the file."""
    config: Mapping[str, Any]
    """PEFT's configuration of the adapters, of `adapter_config.json` or the file's metadata. Empty: there is none."""
    sha256: str
    """Digest of the file's bytes; with an `adapter_config.json`, of the bytes of both."""

    @property
    def rank(self) -> int:
        """Return the largest rank."""
        return max(self.ranks.values())

    @property
    def text(self) -> str:
        """Return the file in words."""
        ranks = sorted(set(self.ranks.values()))
        rank = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        return f"{self.path.name} ({self.made_by}, {len(self.ranks)} modules, {rank}, sha256 {self.sha256[:12]})"


def find_lora(path: Path) -> Path:
    """Return the safetensors file of a LoRA: the path itself, or the only such file of the folder.

    Raises FolderError for a missing path, a pickled file, and a folder without one file that is meant.
    """
    if path.suffix in PICKLES or (not path.exists() and path.suffix not in ("", ".safetensors")):
        raise _error(
            f"model.lora is {path}, and only .safetensors files are read: a pickled file runs code when it is loaded",
            "save it again as safetensors (`safetensors.torch.save_file`), or ask its author for that",
        )
    if path.is_file():
        return path
    if not path.is_dir():
        raise _error(
            f"model.lora is {path}, and there is no such file or folder",
            "give a .safetensors file, or the folder of one, relative to the job file",
        )
    files = sorted(path.glob("*.safetensors"))
    named = [file for file in files if file.name in PREFERRED] or files
    if len(named) == 1:
        return named[0]
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
    found = ", ".join(file.name for file in named) or (
        f"only {', '.join(pickled)}" if pickled else "no .safetensors file"
    )
    raise _error(
        f"model.lora is {path}, a folder with {found}",
        "name one file in it" if named else "save the LoRA as safetensors; pickled files are not read",
    )


def read_lora(path: Path) -> LoraFile:
    """Read the header of a LoRA file or folder. Raises FolderError for everything that is no plain LoRA.

    Reads the whole file once for its digest: about a second a gigabyte.
    """
    file = find_lora(path)
    try:
        shapes = {name: spec.shape for name, spec in tensors_of(file).items()}
        metadata = _metadata(file)
    except (ValueError, OSError) as error:
        raise _error(f"model.lora is {file}, which {error}", "download it again") from None
    made_by = _made_by(file, shapes)
    config = _config(file, metadata, made_by)
    _check_names(file, shapes)
    _check_config(file, config)
    ranks = _ranks(file, shapes)
    _check_alphas(file, shapes, ranks, made_by)
    return LoraFile(path=file, made_by=made_by, ranks=ranks, config=config, sha256=lora_digest(file))


def files_of(file: Path) -> list[Path]:
    """Return the files that a LoRA consists of: its tensors, and PEFT's configuration if the file has one beside it."""
    config = file.with_name(PEFT_CONFIG)
    return [file, *([config] if file.name == PREFERRED[1] and config.is_file() else [])]


def lora_digest(file: Path) -> str:
    """Return the SHA-256 of the files that a LoRA consists of, in hex. Raises OSError."""
    digest = hashlib.sha256()
    for part in files_of(file):
        with part.open("rb") as opened:
            while piece := opened.read(1 << 22):
                digest.update(piece)
    return digest.hexdigest()


def check_digest(path: Path, sha256: str | None) -> None:
    """Raise FolderError if the file is not the one with which the run began. None: any file is."""
    file = find_lora(path)
    if sha256 is not None and (found := lora_digest(file)) != sha256:
        raise _error(
            f"model.lora is {file}, whose sha256 is {found[:12]}..., and model.lora_sha256 is {sha256[:12]}...: it "
            "is not the file that the run began with",
            "put that file back, or launch a new run without model.lora_sha256",
        )


def _error(found: str, remedy: str) -> FolderError:
    return FolderError("model.lora", found, remedy)


def _metadata(file: Path) -> dict[str, str]:
    """Return the texts in a header that `tensors_of` has read."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return dict(header.get("__metadata__") or {})


def _made_by(file: Path, names: Mapping[str, object]) -> str:
    if file.name == PREFERRED[1] or any(name.startswith("base_model.model.") for name in names):
        return "PEFT"
    if any(name.startswith("lora_unet_") for name in names):
        return "kohya"
    return "ai-toolkit" if any(name.startswith("diffusion_model.") for name in names) else "diffusers"


def _config(file: Path, metadata: Mapping[str, str], made_by: str) -> dict[str, Any]:
    """Return PEFT's configuration of the adapters."""
    try:
        if made_by == "PEFT":
            return dict(json.loads(file.with_name(PEFT_CONFIG).read_text("utf-8")))
        saved = json.loads(metadata.get("lora_adapter_metadata", "{}"))
        return {name.removeprefix("transformer."): value for name, value in saved.items()}
    except FileNotFoundError:
        raise _error(
            f"model.lora is {file}, a file of PEFT without {PEFT_CONFIG} beside it, which holds alpha: the adapters' "
            "strength is not known",
            f"put the {PEFT_CONFIG} of the same `save_pretrained` beside adapter_model.safetensors; give the folder",
        ) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise _error(f"model.lora is {file}, whose configuration cannot be read ({error})", "save it again") from None


def _check_names(file: Path, names: Mapping[str, object]) -> None:
    for pattern, reason in REFUSED:
        if hits := [name for name in names if re.search(pattern, name)]:
            raise _error(f"model.lora is {file}, which holds {reason}: {_some(hits)}", CONVERT)
    if hits := [name for name in names if not FACTOR.fullmatch(name) and not name.endswith(ALPHA)]:
        raise _error(
            f"model.lora is {file}, and {len(hits)} of its {len(names)} tensors are no low-rank factors: {_some(hits)}",
            "give a LoRA of diffusers, PEFT, kohya or ai-toolkit",
        )


def _check_config(file: Path, config: Mapping[str, Any]) -> None:
    kind, start = config.get("peft_type") or "LORA", str(config.get("init_lora_weights", "")).lower()
    if kind != "LORA":
        raise _error(f"model.lora is {file}, an adapter of the kind {kind}, and only LORA is read", CONVERT)
    if config.get("use_dora"):
        raise _error(f"model.lora is {file}, whose configuration says use_dora; {REFUSED[0][1]}", CONVERT)
    if start.startswith(CHANGED_BASE):
        raise _error(
            f"model.lora is {file}, whose init_lora_weights is {start}: its base model was changed with it",
            "save it with PEFT's path_initial_model_for_weight_conversion, which makes plain LoRA of it",
        )


def _ranks(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the rank of each module. Raises FolderError unless each module has both factors, of one rank."""
    pairs: dict[str, dict[bool, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if match := FACTOR.fullmatch(name):
            pairs.setdefault(match["module"], {})[is_down(match)] = shape
    if not pairs:
        raise _error(f"model.lora is {file}, which holds no low-rank factors", "give another file")
    for module, pair in pairs.items():
        down, up = pair.get(True), pair.get(False)
        if down is None or up is None:
            raise _error(f"model.lora is {file}, in which {module} has one factor of two", "download it again")
        if len(down) != 2 or len(up) != 2 or down[0] != up[1] or not down[0]:
            raise _error(
                f"model.lora is {file}, in which the factors of {module} are {list(down)} and {list(up)}, and spotrl "
                "reads [rank, in] and [out, rank], of linear layers",
                "give a LoRA without convolutions, or " + CONVERT,
            )
    return {module: pair[True][0] for module, pair in pairs.items()}


def _check_alphas(file: Path, shapes: Mapping[str, tuple[int, ...]], ranks: Mapping[str, int], made_by: str) -> None:
    alphas = {name.removesuffix(ALPHA) for name in shapes if name.endswith(ALPHA)}
    if strange := sorted(alphas - ranks.keys()):
        raise _error(
            f"model.lora is {file}, with an alpha of {_some(strange)}, which has no factors", "download it again"
        )
    lack = sorted(ranks.keys() - alphas)
    if lack and (alphas or made_by == "kohya"):
        raise _error(
            f"model.lora is {file}, in which {len(lack)} of {len(ranks)} modules have no alpha ({_some(lack)}), and "
            "kohya's programs write one for each: the adapters' strength is not known",
            "download it again, or add `MODULE.alpha` tensors; alpha = rank means a strength of 1",
        )


def is_down(match: re.Match[str]) -> bool:
    """Return True for the first factor, [rank, in], of a name that matches `FACTOR`."""
    return match["one"] == "A" or match["way"] == "down"


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

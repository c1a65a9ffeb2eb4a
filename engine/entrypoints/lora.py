"""Compare `model.lora` with the model before a purchase, or join it with trained adapters after a run.

    python -m engine.entrypoints.lora check MODEL_JSON
    python -m engine.entrypoints.lora join MODEL_JSON WEIGHTS FILE

Both read the model's configuration and no weights of a folder. `check` prints one JSON line: exit code 0 is fine, and 3
is {"field", "found", "remedy"}. `join` writes FILE, in the format of WEIGHTS with one larger rank and alpha = rank: the
adapters that somebody with the published base needs.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine.config import SHIPPED, ModelConfig
from engine.model_parts import FolderError
from engine.models.load import load_family
from engine.models.lora import joined, load_lora
from engine.models.unread import empty_transformer


def network_of(config: ModelConfig) -> nn.Module:
    """Return the model's transformer. That of a folder has no values."""
    if config.name in SHIPPED:
        return load_family(config).transformer
    assert config.path is not None, "ModelConfig refuses a family without a path"
    return empty_transformer(Path(config.path), torch.float32)


def main(words: list[str]) -> int:
    action, config = words[0], ModelConfig.model_validate_json(words[1])
    try:
        factors = load_lora(config, network_of(config))
    except FolderError as error:
        if action != "check":
            raise
        print(json.dumps({"field": error.field, "found": error.found, "remedy": error.remedy}))
        return 3
    if action == "check":
        print(json.dumps({"ok": True}))
    else:
        save_file(joined(load_file(words[2]), factors, config.lora_alpha / config.lora_rank), words[3])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

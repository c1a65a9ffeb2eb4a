"""Export full trained weights as a diffusers folder: `python -m engine.models.export MODEL_JSON WEIGHTS FOLDER`.

The command loads the base model like a run does, puts the trained weights into the transformer, and saves the
transformer with its own `save_pretrained`.
"""

import sys
from pathlib import Path

from engine.config import ModelConfig
from engine.models.load import load_adapter, trainable
from engine.models.weights import set_weights
from engine.storage.tensor_files import Stored


def export(config: ModelConfig, weights: Path, folder: Path) -> None:
    """Write the diffusers folder. Raises KeyError if the weights belong to another model."""
    adapter = load_adapter(config)
    set_weights(trainable(adapter), Stored.of_path(weights))
    adapter.transformer.save_pretrained(folder)  # type: ignore[operator]


if __name__ == "__main__":
    export(ModelConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))

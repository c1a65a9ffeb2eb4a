"""Full trained weights as a folder that diffusers loads: `python -m engine.models.export MODEL_JSON WEIGHTS FOLDER`.

Reads the base model as a run does, puts the trained weights into its transformer, and saves that with its own
`save_pretrained`.
"""

import sys
from pathlib import Path

from engine.config import ModelConfig
from engine.models.load import load_adapter, trainable
from engine.runtime.worker import set_weights


def export(config: ModelConfig, weights: Path, folder: Path) -> None:
    """Raises KeyError when the weights are those of another model."""
    adapter = load_adapter(config)
    set_weights(trainable(adapter), weights.read_bytes())
    adapter.transformer.save_pretrained(folder)  # type: ignore[operator]


if __name__ == "__main__":
    export(ModelConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))

"""A CLIP with tiny random weights, saved as the folders of published CLIP models are."""

import json

import torch
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from engine.rewards.aesthetic import HEAD

DIMENSIONS = 12


def tiny_clip(folder, seed=0):
    """Save a CLIP for images of 16 x 16 pixels, with a tokenizer of single letters."""
    letters = [chr(code) for code in range(33, 127)]
    vocabulary = {word: number for number, word in enumerate([*letters, *(f"{letter}</w>" for letter in letters)])}
    vocabulary |= {"<|startoftext|>": len(vocabulary), "<|endoftext|>": len(vocabulary) + 1}
    last = len(vocabulary) - 1
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(vocabulary), "bos_token_id": last - 1, "eos_token_id": last, "pad_token_id": last}
    torch.manual_seed(seed)
    config = CLIPConfig(
        text_config=small | text, vision_config=small | {"image_size": 16, "patch_size": 8}, projection_dim=DIMENSIONS
    )
    model = CLIPModel(config)
    for parameter in model.parameters():  # the published scale of new weights makes all images look alike
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    CLIPTokenizer(vocab=vocabulary, merges=[]).save_pretrained(folder)
    preprocessing = {
        "image_processor_type": "CLIPImageProcessor",
        **dict.fromkeys(("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"), True),
        "size": {"shortest_edge": 16},
        "crop_size": {"height": 16, "width": 16},
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessing))
    return folder


def tiny_head(folder, width=DIMENSIONS):
    """Save a random aesthetic head with the layers and the names of the published head, in smaller widths."""
    torch.manual_seed(1)
    layers = torch.nn.Sequential(
        torch.nn.Linear(width, 8),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(8, 6),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(6, 5),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(5, 4),
        torch.nn.Linear(4, 1),
    )
    torch.save({f"layers.{name}": value for name, value in layers.state_dict().items()}, folder / HEAD)
    return layers.eval()

"""An HPSv3 with tiny random weights: real Qwen2-VL classes, a byte tokenizer, and the published files and names."""

import torch
from safetensors.torch import save_file
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLImageProcessorPil, Qwen2VLModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.rewards.hpsv3 import INSTRUCTION, WEIGHTS

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]

TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The dialogue of Qwen2-VL for one user."""

QUESTION = "Rate this.\n{text_prompt}\n Give the rating: <|Reward|> END "


def tiny_hpsv3(folder, *, old_names=True):
    """Save the folder, and return Qwen2-VL and the head. `old_names`: names of weights as in the published file."""
    vocabulary = {word: number for number, word in enumerate([*sorted(bytes_to_unicode().values()), *SPECIAL])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], additional_special_tokens=SPECIAL[1:], chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil().save_pretrained(folder)
    config = Qwen2VLConfig(
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
        text_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": len(vocabulary) + 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        },
        image_token_id=vocabulary["<|image_pad|>"],
    )
    torch.manual_seed(0)
    model = Qwen2VLModel(config)
    for parameter in model.parameters():  # the published scale of new weights makes all images look alike
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    head = torch.nn.Sequential(
        torch.nn.Linear(32, 10),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.05),
        torch.nn.Linear(10, 6),
        torch.nn.ReLU(),
        torch.nn.Linear(6, 2),
    )
    # The published folder of Qwen2-VL has a larger vocabulary than the published reward weights.
    config.text_config.vocab_size += 5
    config.save_pretrained(folder)
    weights = {_published(name, old_names): value.contiguous() for name, value in model.state_dict().items()}
    weights |= {f"rm_head.{name}": value for name, value in head.state_dict().items()}
    weights["lm_head.weight"] = torch.zeros(len(vocabulary) + 1, 32)
    save_file(weights, folder / WEIGHTS)
    (folder / INSTRUCTION).write_text(QUESTION)
    return model.eval(), head.eval()


def _published(name, old_names):
    if not old_names:
        return f"model.{name}"
    return name.replace("language_model.", "model.")

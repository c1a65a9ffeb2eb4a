"""HPSv3 (arXiv 2508.03789): what people would choose, given the prompt, by a Qwen2-VL with a reward head. Uncapped.

The folder is that of Qwen/Qwen2-VL-7B-Instruct, without its weights, and with two files of the HPSv3 project:

    HPSv3.safetensors  the published weights
    instruction.txt    the published question: INSTRUCTION and prompt_with_special_token, one after the other

    image (scaled to 256 x 28 x 28 pixels), question -> Qwen2-VL -> state at `<|Reward|>` -> head -> mean, deviation

The score is the mean. Tokens have the positions 0, 1, 2, ... in all three directions of Qwen2-VL's rotary embedding,
image tokens too: the published model calls the language model with embeddings alone, and so was it trained.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear

from engine.diffusion.images import as_pil
from engine.protocol.request import Score
from engine.reward_config import LocalModelConfig
from engine.rewards.clip_folder import dtype_of
from engine.rewards.reward import RewardError

WEIGHTS, INSTRUCTION = "HPSv3.safetensors", "instruction.txt"

PIXELS = 256 * 28 * 28
"""Pixels of a scaled image."""

REWARD_TOKEN, IMAGE_TOKEN, PROMPT = "<|Reward|>", "<|image_pad|>", "{text_prompt}"

RENAMED = {"visual.": "visual.", "model.visual.": "visual.", "model.language_model.": "language_model."}
"""Prefixes of the published weights, written with several versions of transformers, and of `Qwen2VLModel`. Any other
`model.` is the language model's."""


class Hpsv3Reward:
    """Scores by HPSv3. Raises RewardError if the folder does not hold all of it."""

    def __init__(self, config: LocalModelConfig, workdir: str | None, device: str) -> None:
        self.path = Path(workdir or ".") / config.path
        self._batch, self._device = config.batch, device
        self._dtype = dtype_of(config, device)
        if not self.path.is_dir():
            raise RewardError(
                f"reward.model.path is {config.path!r}, and there is no folder {self.path}; copy it there"
            )
        try:
            self._load()
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            first = str(error).strip().partition("\n")[0]
            raise RewardError(
                f"the folder {self.path} cannot be read as HPSv3 ({first}); it needs the files of "
                f"Qwen/Qwen2-VL-7B-Instruct except the weights, {WEIGHTS}, and the published question in {INSTRUCTION}"
            ) from error

    def _load(self) -> None:
        """Load model, head, tokenizer and image processor. Raises ValueError, and any error of the loaders."""
        from transformers import AutoTokenizer, PreTrainedConfig, Qwen2VLConfig, Qwen2VLImageProcessorPil, Qwen2VLModel

        for name in ("config.json", "preprocessor_config.json", WEIGHTS, INSTRUCTION):
            if not (self.path / name).is_file():
                raise ValueError(f"there is no {name}")
        self._instruction = (self.path / INSTRUCTION).read_text()
        if any(self._instruction.count(word) != 1 for word in (PROMPT, REWARD_TOKEN)):
            raise ValueError(f"{INSTRUCTION} must contain {PROMPT} and {REWARD_TOKEN} once each")
        self._tokenizer = AutoTokenizer.from_pretrained(self.path, local_files_only=True, padding_side="right")
        self._tokenizer.add_special_tokens({"additional_special_tokens": [REWARD_TOKEN]})
        token = self._tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
        assert isinstance(token, int)
        self._reward_token = token
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(self.path, local_files_only=True)
        saved = load_file(self.path / WEIGHTS)
        self._head = _head_in(saved, self._device)
        weights = {renamed(name): value for name, value in saved.items() if not name.startswith(("rm_head", "lm_head"))}
        config = Qwen2VLConfig.from_pretrained(self.path, local_files_only=True)
        # The published weights have one row for each token of the tokenizer, fewer than the model was made with.
        rows, text_config = len(weights["language_model.embed_tokens.weight"]), config.text_config
        assert isinstance(text_config, PreTrainedConfig)
        text_config.vocab_size = rows
        if rows <= self._reward_token:
            raise ValueError(f"the weights have no row for {REWARD_TOKEN}")
        loaded: Any = Qwen2VLModel.from_pretrained(
            None, config=config, state_dict=weights, dtype=self._dtype, output_loading_info=True
        )
        model, loading_info = loaded  # transformers' type hints leave out the loading information
        if missing := sorted(loading_info["missing_keys"]):
            raise ValueError(f"its weights have no {missing[0]}, and {len(missing)} names are missing in all")
        self._model = model.eval().requires_grad_(False).to(self._device)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> list[Score]:
        """Score images [B, 1 or 3, H, W] in [-1, 1]."""
        starts = range(0, len(prompts), self._batch)
        parts = [slice(start, start + self._batch) for start in starts]
        return [score for part in parts for score in self._scores(images[part], prompts[part])]

    @torch.inference_mode()
    def _scores(self, images: Tensor, prompts: Sequence[str]) -> list[Score]:
        pictures = self._processor(
            images=[as_pil(image).convert("RGB") for image in images],
            min_pixels=PIXELS,
            max_pixels=PIXELS,
            return_tensors="pt",
        ).to(self._device)
        grid = pictures["image_grid_thw"]
        counts = (grid.prod(dim=1) // self._processor.merge_size**2).tolist()
        questions = [self._question(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
        tokens = self._tokenizer(questions, padding=True, return_tensors="pt").to(self._device)
        ids = tokens["input_ids"]  # [B, L]
        states = self._model(
            **tokens,
            pixel_values=pictures["pixel_values"].to(self._dtype),
            image_grid_thw=grid,
            position_ids=torch.arange(ids.shape[1], device=self._device).expand(3, *ids.shape),
            use_cache=False,
        ).last_hidden_state
        values = states[ids == self._reward_token].float()  # [B, width]
        for number, (weight, bias) in enumerate(self._head):
            values = linear(values.relu() if number else values, weight, bias)
        return [Score(reward=mean, metrics={}) for mean in values[:, 0].tolist()]

    def _question(self, prompt: str, image_tokens: int) -> str:
        """Return the chat with one image and the question. A prompt cannot contain special tokens."""
        text = self._instruction.replace(PROMPT, prompt.replace("<|", "< |"))
        content = [{"type": "image"}, {"type": "text", "text": text}]
        chat: list[Any] = [{"role": "user", "content": content}]  # transformers' type hints know text alone
        words = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return str(words).replace(IMAGE_TOKEN, IMAGE_TOKEN * image_tokens)


def renamed(name: str) -> str:
    """Return the name of a published weight in `Qwen2VLModel`."""
    for prefix, ours in RENAMED.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return "language_model." + name.removeprefix("model.")


def _head_in(saved: Mapping[str, Tensor], device: str) -> list[tuple[Tensor, Tensor]]:
    """Return weight and bias of the head's linear layers, in fp32 and in order. ReLUs are between the layers."""
    numbers = sorted(int(name.split(".")[1]) for name in saved if name.startswith("rm_head.") and "weight" in name)
    if not numbers:
        raise ValueError(f"{WEIGHTS} has no reward head")
    pairs = [(saved[f"rm_head.{n}.weight"], saved[f"rm_head.{n}.bias"]) for n in numbers]
    return [(weight.float().to(device), bias.float().to(device)) for weight, bias in pairs]

"""digits-ocr: a 1.4 M-parameter Qwen-Image that writes the four digits of its prompt.

The embedded default model. The model is a `QwenImageTransformer2DModel` like the large Qwen-Image, in pixel space
instead of behind a VAE: 12 x 32 grey images are cut into 4 x 4 patches, 3 x 8 = 24 tokens beside 4 text tokens. Heads,
image tokens and text tokens are all divisible by 4. Sequence parallelism of degrees 1, 2 and 4 therefore runs like on
the large model.

The promise: text is encoded byte by byte with frozen embeddings, and the conditioning depends on the prompt alone.
"""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import torch
from diffusers import QwenImageTransformer2DModel
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.models.adapter import Conditioning
from engine.models.qwen_image import QWEN_LORA_TARGETS
from engine.noise_schedule import EVEN, ModelSchedule
from engine.parallel.communicator import SPGroup

HEIGHT, WIDTH, PATCH = 12, 32, 4
ROWS, COLUMNS = HEIGHT // PATCH, WIDTH // PATCH
CHARACTERS = 4
TEXT_WIDTH = 64
EMPTY = 256
"""The text token of an empty position. Shorter prompts are padded with the token."""

BASE = Path(__file__).with_name("digits_base.safetensors")
"""The shipped base, in fp16. `python -m engine.tasks.pretrain_digits` makes the base again."""

FONT_SIZE = 13
"""Size of Pillow's built-in font: the recogniser reads every clean rendering, and no font package is needed."""


class ByteText(nn.Module):
    """Byte embedding plus learned position, a token per character."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(EMPTY + 1, TEXT_WIDTH)
        self.place = nn.Parameter(0.5 * torch.randn(CHARACTERS, TEXT_WIDTH))

    def forward(self, prompts: Sequence[str]) -> Tensor:
        """Return the text tokens [B, CHARACTERS, TEXT_WIDTH]."""
        ids = torch.tensor([_byte_ids(prompt) for prompt in prompts], device=self.place.device)
        embedded: Tensor = self.byte(ids) + self.place
        return embedded


class DigitsAdapter:
    """`DiTAdapter` of the embedded default.

    The base learned no unconditional branch, and guidance is therefore impossible.
    """

    schedule: ModelSchedule = EVEN
    doubles_guidance = False
    guidance_pair: SPGroup | None = None

    def __init__(self, transformer: nn.Module, text: ByteText) -> None:
        self.transformer = transformer
        self.text = text.eval().requires_grad_(False)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Return text [B, 4, 64]."""
        return {"text": self.text(prompts)}

    def latent_shape(self) -> tuple[int, ...]:
        """Return [24, 16]: tokens, and the 4 x 4 grey values of each token."""
        return (ROWS * COLUMNS, PATCH * PATCH)

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, guidance: float) -> Tensor:
        if guidance != 1.0:
            raise ValueError(f"guidance is {guidance}; use 1, because digits-ocr has no unconditional branch")
        return velocity(self.transformer, x, sigma, conditioning["text"])

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        """Return the images: [B, 24, 16] -> [B, 1, 12, 32]."""
        return unpatchify(x.float()).clamp(-1.0, 1.0)

    def lora_targets(self) -> Sequence[str]:
        return QWEN_LORA_TARGETS


def velocity(transformer: nn.Module, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    """Run the transformer's forward pass: x [B, 24, 16] at sigma [B] -> dx/dsigma [B, 24, 16] fp32."""
    grids = [[(1, ROWS, COLUMNS)]] * len(x)
    output = transformer(
        hidden_states=x, encoder_hidden_states=text, timestep=sigma, img_shapes=grids, return_dict=False
    )[0]
    velocity: Tensor = output.float()
    return velocity


def build_transformer() -> nn.Module:
    """Build with random weights: 4 layers, 4 heads of 24 dimensions (rope 8, 8, 8), 1.40 M parameters."""
    transformer = QwenImageTransformer2DModel(
        patch_size=PATCH,
        in_channels=PATCH * PATCH,
        out_channels=1,
        num_layers=4,
        attention_head_dim=24,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(8, 8, 8),
    )
    return cast(nn.Module, transformer)


def load_digits(path: Path = BASE, device: str = "cpu") -> DigitsAdapter:
    """Load the pre-trained base, in fp32."""
    tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
    transformer, text = build_transformer(), ByteText()
    transformer.load_state_dict(_under("transformer.", tensors))
    text.load_state_dict(_under("text.", tensors))
    return DigitsAdapter(transformer.to(device), text.to(device))


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _byte_ids(prompt: str) -> list[int]:
    raw = list(prompt.encode())
    if len(raw) > CHARACTERS:
        raise ValueError(f"prompt {prompt!r} has {len(raw)} bytes; digits-ocr writes at most {CHARACTERS}")
    return raw + [EMPTY] * (CHARACTERS - len(raw))


# --- images --------------------------------------------------------------------------------------------------


def patchify(images: Tensor) -> Tensor:
    """Cut images into tokens: [B, 1, 12, 32] -> [B, 24, 16]."""
    cut = images.reshape(-1, ROWS, PATCH, COLUMNS, PATCH)
    return cut.permute(0, 1, 3, 2, 4).reshape(-1, ROWS * COLUMNS, PATCH * PATCH)


def unpatchify(tokens: Tensor) -> Tensor:
    """Put tokens together to images: [B, 24, 16] -> [B, 1, 12, 32]."""
    cut = tokens.reshape(-1, ROWS, COLUMNS, PATCH, PATCH)
    return cut.permute(0, 1, 3, 2, 4).reshape(-1, 1, HEIGHT, WIDTH)


def render(text: str, rng: random.Random) -> NDArray[np.float32]:
    """Render clean digits, [12, 32] in [-1, 1]: dark ink, each digit in its own column, moved by at most a pixel."""
    image = Image.new("L", (WIDTH, HEIGHT), 255)
    draw = ImageDraw.Draw(image)
    ink, right, down = rng.randint(0, 60), rng.randint(-1, 1), rng.randint(-1, 1)
    pitch = WIDTH / CHARACTERS
    for place, character in enumerate(text):
        centre = (pitch * (place + 0.5) + right, HEIGHT / 2 + down)
        draw.text(centre, character, font=_font(), fill=ink, anchor="mm")
    return np.asarray(image, dtype=np.float32) / 127.5 - 1.0


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(FONT_SIZE)

"""shapes: a 1.5 M-parameter Qwen-Image that draws the coloured shapes of its prompt.

The second embedded model (`engine/shapes.py` defines the allowed prompts). The model is a
`QwenImageTransformer2DModel` like the large Qwen-Image, in pixel space instead of behind a VAE: 36 x 36 RGB images are
cut into 9 x 9 patches, 16 tokens of 243 values beside 8 text tokens. 6 x 6 patches would be 36 tokens at nearly twice
the cost, and a patch must show enough of a shape to be recognised in strong noise. Heads, image tokens and text tokens
are all divisible by 4, which allows sequence parallelism of degrees 1, 2 and 4.

Such a small network learns two facts slowly: the colour of each kind, and the position of a token. The input therefore
contains both: the text is mixed over neighbouring words before freezing, and a token carries its row, its column and
the sum of the text (like SD3's pooled vector) beside its pixels.

A token is wider than the network, and the network therefore cannot carry the noise in a velocity. The network predicts
the image instead, and the velocity follows from the image (arXiv 2511.13720).

The promise: a prompt is encoded word by word with frozen embeddings, and the conditioning depends on the prompt alone.
"""

import random
from collections.abc import Sequence
from functools import cache
from math import sqrt
from pathlib import Path
from typing import cast

import numpy as np
import torch
from diffusers import QwenImageTransformer2DModel
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.models.adapter import Conditioning
from engine.models.qwen_image import QWEN_LORA_TARGETS
from engine.noise_schedule import EVEN, ModelSchedule
from engine.parallel.communicator import SPGroup
from engine.shapes import COLOURS, IMAGE_SIDE, SHAPE, VOCABULARY, WORDS, Request, coverage

PATCH = 9
SIDE = IMAGE_SIDE // PATCH
TOKENS, CHANNELS = SIDE * SIDE, 3 * PATCH * PATCH
TEXT_WIDTH = 64
REACH = 2
"""Words on either side covered by a mixing of the text. With two mixings, a clause knows its colour and relation."""
EMPTY = len(VOCABULARY)
"""The text token of an empty position. Shorter prompts are padded with the token."""

SIGMA_FLOOR = 0.05
"""Lower limit of the divisor sigma in the velocity. No sampler here uses smaller noise levels except at the end."""

BASE = Path(__file__).with_name("shapes_base.safetensors")
"""The shipped base, in fp16. `python -m engine.tasks.pretrain_shapes` makes the base again."""


class WordText(nn.Module):
    """Word embedding plus learned position plus the content of neighbouring words; a token per word."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(EMPTY + 1, TEXT_WIDTH)
        self.place = nn.Parameter(0.5 * torch.randn(WORDS, TEXT_WIDTH))
        self.near = nn.Conv1d(TEXT_WIDTH, 2 * TEXT_WIDTH, 2 * REACH + 1, padding=REACH)
        self.far = nn.Conv1d(2 * TEXT_WIDTH, TEXT_WIDTH, 2 * REACH + 1, padding=REACH)

    def forward(self, prompts: Sequence[str]) -> Tensor:
        """Return the text tokens [B, WORDS, TEXT_WIDTH]."""
        ids = torch.tensor([_word_ids(prompt) for prompt in prompts], device=self.place.device)
        embedded: Tensor = self.word(ids) + self.place
        around: Tensor = self.far(nn.functional.gelu(self.near(embedded.mT))).mT
        return embedded + around


class ShapesAdapter:
    """`DiTAdapter` of the shapes task.

    The base learned no unconditional branch, and guidance is therefore impossible.
    """

    schedule: ModelSchedule = EVEN
    doubles_guidance = False
    guidance_pair: SPGroup | None = None

    def __init__(self, transformer: nn.Module, text: WordText) -> None:
        self.transformer = transformer
        self.text = text.eval().requires_grad_(False)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Return text [B, 8, 64]."""
        return {"text": self.text(prompts)}

    def latent_shape(self) -> tuple[int, ...]:
        """Return [16, 243]: tokens, and the 3 x 9 x 9 colour values of each token."""
        return (TOKENS, CHANNELS)

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, guidance: float) -> Tensor:
        if guidance != 1.0:
            raise ValueError(f"guidance is {guidance}; use 1, because shapes has no unconditional branch")
        return velocity(self.transformer, x, sigma, conditioning["text"])

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        """Return the images: [B, 16, 243] -> [B, 3, 36, 36]."""
        return unpatchify(x.float()).clamp(-1.0, 1.0)

    def lora_targets(self) -> Sequence[str]:
        return QWEN_LORA_TARGETS


def velocity(transformer: nn.Module, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    """Return dx/dsigma from the image predicted by the transformer: (x - image) / sigma.

    x [B, 16, 243] at sigma [B] -> [B, 16, 243] fp32
    """
    grids = [[(1, SIDE, SIDE)]] * len(x)
    pooled = (text.sum(dim=1, keepdim=True) / sqrt(WORDS)).to(x).expand(-1, TOKENS, -1)
    tokens = torch.cat([x, _places().to(x).expand(len(x), -1, -1), pooled], dim=-1)
    image = transformer(
        hidden_states=tokens, encoder_hidden_states=text, timestep=sigma, img_shapes=grids, return_dict=False
    )[0]
    velocity: Tensor = (x.float() - image.float()) / sigma.float().clamp_min(SIGMA_FLOOR)[:, None, None]
    return velocity


@cache
def _places() -> Tensor:
    """Return [16, 8]: row and column of each token, one-hot, with a mean square of 1 like the noise beside them."""
    one_hot = sqrt(SIDE) * torch.eye(SIDE)
    return torch.cat([one_hot.repeat_interleave(SIDE, dim=0), one_hot.repeat(SIDE, 1)], dim=1)


def build_transformer() -> nn.Module:
    """Build with random weights: 4 layers, 4 heads of 24 dimensions (rope 8, 8, 8), 1.41 M parameters."""
    transformer = QwenImageTransformer2DModel(
        patch_size=PATCH,
        in_channels=CHANNELS + 2 * SIDE + TEXT_WIDTH,
        out_channels=3,
        num_layers=4,
        attention_head_dim=24,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(8, 8, 8),
    )
    return cast(nn.Module, transformer)


def load_shapes(path: Path = BASE, device: str = "cpu") -> ShapesAdapter:
    """Load the pre-trained base, in fp32."""
    tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
    transformer, text = build_transformer(), WordText()
    transformer.load_state_dict(_under("transformer.", tensors))
    text.load_state_dict(_under("text.", tensors))
    return ShapesAdapter(transformer.to(device), text.to(device))


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _word_ids(prompt: str) -> list[int]:
    words = prompt.split()
    unknown = [word for word in words if word not in VOCABULARY]
    if unknown:
        raise ValueError(
            f"prompt {prompt!r} has words that shapes does not know: {', '.join(unknown)}; "
            f"it knows {', '.join(VOCABULARY)}"
        )
    if len(words) > WORDS:
        raise ValueError(f"prompt {prompt!r} has {len(words)} words; shapes reads at most {WORDS}")
    return [VOCABULARY.index(word) for word in words] + [EMPTY] * (WORDS - len(words))


# --- images --------------------------------------------------------------------------------------------------


def patchify(images: Tensor) -> Tensor:
    """Cut images into tokens: [B, 3, 36, 36] -> [B, 16, 243]."""
    cut = images.reshape(-1, 3, SIDE, PATCH, SIDE, PATCH)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(-1, TOKENS, CHANNELS)


def unpatchify(tokens: Tensor) -> Tensor:
    """Put tokens together to images: [B, 16, 243] -> [B, 3, 36, 36]."""
    cut = tokens.reshape(-1, SIDE, SIDE, 3, PATCH, PATCH)
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, IMAGE_SIDE, IMAGE_SIDE)


def render(request: Request, rng: random.Random) -> NDArray[np.float32]:
    """Return an image of exactly the requested shapes, [3, 36, 36] in [-1, 1].

    Every shape lies in the middle of its own quarter. Choices left open by the request are random: quarters that
    satisfy the relation, and a colour for each shape of a clause without colour.
    """
    quarter = IMAGE_SIDE // 2
    margin = (quarter - SHAPE) // 2
    image = np.ones((3, IMAGE_SIDE, IMAGE_SIDE), dtype=np.float32)
    quarters = iter(_quarters(request, rng))
    for clause in request.clauses:
        for _ in range(clause.count):
            row, column = next(quarters)
            top, left = row * quarter + margin, column * quarter + margin
            colour = np.array(COLOURS[clause.colour or rng.choice(list(COLOURS))], dtype=np.float32) / 127.5 - 1.0
            # White background, with the colour over the pixels covered by the shape.
            image[:, top : top + SHAPE, left : left + SHAPE] += coverage(clause.kind) * (colour[:, None, None] - 1.0)
    return image


def _quarters(request: Request, rng: random.Random) -> list[tuple[int, int]]:
    """Return (row, column) of every shape, all different. A relation may hold on a diagonal too."""
    while True:
        places = [(0, 0), (0, 1), (1, 0), (1, 1)]
        rng.shuffle(places)
        (row, column), (other_row, other_column) = places[:2]
        holds = {
            None: True,
            "left of": column < other_column,
            "right of": column > other_column,
            "above": row < other_row,
            "below": row > other_row,
        }
        if holds[request.relation]:
            return places

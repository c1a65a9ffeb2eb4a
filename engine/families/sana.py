"""SANA 1.6 B: linear attention over the image, attention to the text, convolutions as feed-forward, a VAE of factor 32.

Conventions of the transformer (diffusers 0.39 to 0.42): latents [B, 32, h, w] of which each place is a token,
timestep = 1000 sigma x `timestep_scale`, and a text mask. The pipeline encodes a prompt in lower case behind an
instruction of 170 words; it encodes the empty prompt, the other branch of guidance, without. It also draws at the
nearest of its own sizes and resizes the image (`use_resolution_binning`); a run draws at the job's size.

The published scheduler is a multistep solver without log-probs. A run takes Euler steps at that scheduler's noise
levels, the first of which is .99967 and not 1.

Sizes: Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers on the Hugging Face hub (1.60 B).
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.family import Architecture, BlockCount, Factors, Family, ImageSize, Pipeline, PublishedSizes
from engine.tally import FP32, Tally

if TYPE_CHECKING:
    from torch import Tensor, nn

TRAINING_TIMESTEPS = 1000.0


def lora_targets(transformer: "nn.Module") -> Sequence[str]:
    """Return the layers of both attentions. The feed-forward layers are convolutions."""
    return ["to_q", "to_k", "to_v", "to_out.0"]


def encode(pipeline: Any, prompts: list[str], text_tokens: int) -> "tuple[Tensor, Tensor]":
    """Return hidden [B, text_tokens, 2304] and a mask [B, text_tokens] of what is text."""
    import torch

    # The pipeline's `encode_prompt` has no instruction of its own: the pipeline passes its default.
    instruction = inspect.signature(type(pipeline).__call__).parameters["complex_human_instruction"].default
    encoded = [
        pipeline.encode_prompt(
            prompt=[prompt],
            do_classifier_free_guidance=False,
            max_sequence_length=text_tokens,
            complex_human_instruction=instruction if prompt else None,
        )[:2]
        for prompt in prompts
    ]
    return torch.cat([hidden for hidden, _ in encoded]), torch.cat([mask for _, mask in encoded])


def forward(transformer: "nn.Module", x: "Tensor", sigma: "Tensor", hidden: "Tensor", mask: "Tensor") -> "Tensor":
    """Return the velocity [B, 32, h, w] of x [B, 32, h, w] at sigma [B], with hidden [B, L, 2304] and mask [B, L]."""
    config: Any = transformer.config
    velocity: Tensor = transformer(
        x,
        encoder_hidden_states=hidden,
        encoder_attention_mask=mask,
        timestep=sigma * TRAINING_TIMESTEPS * config.timestep_scale,
        return_dict=False,
    )[0]
    return velocity


def to_decoder(vae: Any, x: "Tensor") -> "Tensor":
    """Undo the VAE's scale."""
    scaled: Tensor = x / vae.config.scaling_factor
    return scaled


# --- sizes


def factors(vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> Factors:
    blocks = vae.get("encoder_block_out_channels", (128, 256, 512, 512, 1024, 1024))
    return Factors(2 ** (len(blocks) - 1), 1, transformer.get("patch_size", 1))


def architecture(config: Mapping[str, Any]) -> Architecture:
    heads, head_width = config.get("num_attention_heads", 70), config.get("attention_head_dim", 32)
    patch = config.get("patch_size", 1) ** 2
    return Architecture(
        family="sana",
        layers=config.get("num_layers", 20),
        heads=heads,
        head_width=head_width,
        text_width=config.get("caption_channels", 2304),
        channels=patch * config.get("in_channels", 32),
        output_channels=patch * config.get("out_channels", 32),
        mlp_width=int(config.get("mlp_ratio", 2.5) * heads * head_width),
        has_head_norm=config.get("qk_norm") is not None,
    )


def convolution(t: Tally, tokens: int, inputs: int, weights: int, outputs: int, *, bias: bool = True) -> None:
    """Count a convolution over the image. Autograd keeps its input [tokens, inputs] even if its weights are frozen."""
    t.parameters += weights + outputs * bias
    t.operations += 2 * tokens * weights
    t.tensor(tokens, inputs)
    t.widest = max(t.widest, 2 * tokens * inputs * t.training.compute_bytes)


def linear_attention(t: Tally, a: Architecture, image: int) -> None:
    """Count relu(q) (relu(k)^T [v, 1]) for each head, in fp32, and the division by its last row."""
    t.tensor(image, 2 * a.width)  # both relu
    if t.training.compute_bytes != FP32:
        t.tensor(image, 2 * a.width, in_fp32=True)  # and their copies in fp32
    t.tensor(image, 2 * (a.width + a.heads), in_fp32=True)  # values with a row of ones, and the sums
    t.tensor(image, a.heads, in_fp32=True)  # what is divided by
    t.tensor(a.head_width + 1, a.width, in_fp32=True)  # a table of each head
    t.operations += 2 * 2 * image * a.width * (a.head_width + 1)


def block(t: Tally, a: Architecture, image: int, text: int) -> None:
    width = a.width
    t.parameters += 6 * width  # table of shifts, scales and gates
    t.layer_norm(image, width)
    t.scaled(image, width)
    t.linear(image, width, width, width, width, adapted=True, bias=False)
    for tokens in (image, image) if a.has_head_norm else ():
        t.head_norm("diffusers", tokens, width, 1, width)
    linear_attention(t, a, image)
    t.linear(image, width, width, adapted=True)
    t.scaled(image, width)  # gate

    t.linear(image, width, width, adapted=True)
    t.linear(text, width, width, width, adapted=True, kept_before=True)  # every block reads the same text
    for tokens in (image, text) if a.has_head_norm else ():
        t.head_norm("diffusers", tokens, width, 1, width)
    t.attention(image, text, width, a.heads)
    t.linear(image, width, width, adapted=True, kept_before=True)

    t.layer_norm(image, width)
    t.scaled(image, width)
    inner = 2 * a.mlp_width
    convolution(t, image, width, width * inner, inner)
    t.gelu(image, inner)
    convolution(t, image, inner, 9 * inner, inner)  # of each channel alone, 3 x 3
    t.tensor(image, inner)  # both halves: SiLU(gate) x
    t.tensor(image, a.mlp_width)
    convolution(t, image, a.mlp_width, a.mlp_width * width, width, bias=False)
    t.scaled(image, width)  # gate


def blocks(a: Architecture, image: int, text: int) -> Iterator[BlockCount]:
    # The text is the same tensor in every block, so it is counted outside the blocks.
    yield BlockCount(number=a.layers, input_tokens=image, count=partial(block, a=a, image=image, text=text))


def outside(t: Tally, a: Architecture, image: int, text: int) -> None:
    t.vector(256, a.width)
    t.vector(a.width, a.width)
    t.vector(a.width, 6 * a.width)
    t.linear(image, a.channels, a.width)
    t.linear(text, a.text_width, a.width)
    if t.training.is_full:
        t.gelu(text, a.width)
    t.linear(text, a.width, a.width)
    t.parameters += a.width  # norm of the text
    if t.training.is_full:
        t.head_norm("diffusers", text, a.width, 1, 0)
    t.tensor(text, a.width)  # the text, which every block reads
    t.parameters += 2 * a.width  # table of the last shift and scale
    t.layer_norm(image, a.width)
    t.scaled(image, a.width)
    t.linear(image, a.width, a.output_channels)


def is_distilled(index: Mapping[str, Any]) -> bool:
    return False  # SANA-Sprint has another pipeline


FAMILY = Family(
    name="sana",
    size=ImageSize(1024, 1024, text_tokens=300),
    spacing="even",
    guidance=4.5,
    guidance_note="",
    names_blocks=False,
    pipeline=Pipeline(
        name="SanaPipeline",
        parts={"transformer": "SanaTransformer2DModel", "vae": "AutoencoderDC", "text_encoder": "Gemma2Model"},
        input_channels=32,
        output_channels=32,
        latent_channels=32,
        input_layer="patch_embed.proj.weight",
    ),
    distilled=is_distilled,
    factors=factors,
    architecture=architecture,
    blocks=blocks,
    outside=outside,
    published=(
        PublishedSizes(
            name="SANA-1.6B",
            config={
                "in_channels": 32,
                "out_channels": 32,
                "num_layers": 20,
                "num_attention_heads": 70,
                "attention_head_dim": 32,
                "num_cross_attention_heads": 20,
                "cross_attention_head_dim": 112,
                "cross_attention_dim": 2240,
                "caption_channels": 2304,
                "mlp_ratio": 2.5,
            },
            text_encoder_parameters=2_614_341_888,
            vae_parameters=312_250_275,
            spelled=r"sana(1600m|16b)(512px|1024px)?(multiling)?(bf16)?",
            licence="NVIDIA License (text encoder: Gemma's terms)",
            vae_factor=32,
            patch=1,
            timed_like="SD3.5-medium",
        ),
    ),
    template_tokens=2,  # the first token, and the last of the instruction
    lora_targets=lora_targets,
    encode=encode,
    forward=forward,
    to_decoder=to_decoder,
)

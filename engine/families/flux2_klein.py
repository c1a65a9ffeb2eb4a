"""FLUX.2-klein-4B, base and distilled: packed tokens with 4-number positions, text of three layers of Qwen3-4B.

Conventions of the transformer (diffusers 0.39 to 0.42): tokens [B, N, 128], timestep = sigma in [0, 1], `img_ids` and
`txt_ids` for the rotary embedding, no text mask: padding is attended to, as in the pipeline. The base model guides with
two branches; the distilled model takes no guidance and needs 4 steps. `is_distilled` in model_index.json tells them
apart. The sampler sees the VAE's 32 channels in patches of 2 x 2, normalised by the VAE's batch norm.

Sizes: black-forest-labs/FLUX.2-klein-4B and -base-4B on the Hugging Face hub, checked against the published 3.88 B.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.family import Architecture, BlockCount, Factors, Family, ImageSize, Pipeline, PublishedSizes
from engine.tally import Tally

if TYPE_CHECKING:
    from torch import Tensor, nn

PATCH = 2
"""Latent values of the VAE along one side of a token."""

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
FEED_FORWARD = ("ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out")
SINGLE = ("to_qkv_mlp_proj", "to_out")


def lora_targets(transformer: "nn.Module") -> Sequence[str]:
    """Return whole names: `to_out` alone would also mean the list of the blocks with two streams."""
    config: Any = transformer.config
    double = [f"transformer_blocks.{block}" for block in range(config.num_layers)]
    single = [f"single_transformer_blocks.{block}" for block in range(config.num_single_layers)]
    return [
        *(f"{block}.attn.{layer}" for block in double for layer in ATTENTION),
        *(f"{block}.{layer}" for block in double for layer in FEED_FORWARD),
        *(f"{block}.attn.{layer}" for block in single for layer in SINGLE),
    ]


def encode(pipeline: Any, prompts: list[str], text_tokens: int) -> "tuple[Tensor, None]":
    """Return [B, text_tokens, 7680]. The padding behind a prompt is part of the input."""
    hidden, _ = pipeline.encode_prompt(prompt=prompts, max_sequence_length=text_tokens)
    return hidden, None


def forward(transformer: "nn.Module", x: "Tensor", sigma: "Tensor", hidden: "Tensor", mask: "Tensor") -> "Tensor":
    """Return the velocity [B, 128, h, w] of x [B, 128, h, w] at sigma [B], with hidden [B, L, 7680]."""
    import torch

    _, _, rows, columns = x.shape
    image = torch.zeros(rows, columns, 4, device=x.device)  # time, row, column, place in the text
    image[..., 1], image[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)
    text = torch.zeros(hidden.shape[1], 4, device=x.device)
    text[:, 3] = torch.arange(hidden.shape[1])
    tokens: Tensor = transformer(
        hidden_states=x.flatten(2).transpose(1, 2),
        encoder_hidden_states=hidden,
        timestep=sigma,
        img_ids=image.flatten(0, 1),
        txt_ids=text,
        guidance=None,
        return_dict=False,
    )[0]
    return tokens.transpose(1, 2).reshape(x.shape)


def to_decoder(vae: Any, x: "Tensor") -> "Tensor":
    """Undo the batch norm, and unpack the patches: [B, 128, h, w] -> [B, 32, 2 h, 2 w]."""
    std: Tensor = (vae.bn.running_var.to(x) + vae.config.batch_norm_eps).sqrt()
    values: Tensor = x * std.view(1, -1, 1, 1) + vae.bn.running_mean.to(x).view(1, -1, 1, 1)
    batch, channels, rows, columns = x.shape
    patches = values.reshape(batch, channels // PATCH**2, PATCH, PATCH, rows, columns).permute(0, 1, 4, 2, 5, 3)
    return patches.reshape(batch, channels // PATCH**2, PATCH * rows, PATCH * columns)


# --- sizes


def factors(vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> Factors:
    return Factors(2 ** (len(vae["block_out_channels"]) - 1), 1, PATCH)


def architecture(config: Mapping[str, Any]) -> Architecture:
    width = config["num_attention_heads"] * config["attention_head_dim"]
    mlp = int(config.get("mlp_ratio", 3.0) * width)
    return Architecture(
        family="flux2-klein",
        layers=config["num_layers"],
        single_layers=config["num_single_layers"],
        heads=config["num_attention_heads"],
        head_width=config["attention_head_dim"],
        text_width=config["joint_attention_dim"],
        channels=config["in_channels"],
        output_channels=config.get("out_channels") or config["in_channels"],
        mlp_width=mlp,
        adapted_width=3 * width + 2 * mlp,
        takes_guidance=bool(config.get("guidance_embeds")),
    )


def double_block(t: Tally, a: Architecture, image: int, text: int) -> None:
    """Count a block with a stream for the image and one for the text. All blocks share their shifts, scales and gates,
    which are counted outside."""
    for tokens in (image, text):
        t.layer_norm(tokens, a.width)
        t.scaled(tokens, a.width)
        t.linear(tokens, a.width, a.width, a.width, a.width, adapted=True, bias=False)
        for _ in ("queries", "keys"):
            t.head_norm("torch", tokens, a.width, a.heads, a.head_width)
    t.attention(image + text, image + text, a.width, a.heads)
    for tokens in (image, text):
        t.linear(tokens, a.width, a.width, adapted=True, bias=False)
        t.scaled(tokens, a.width)  # gate
        t.layer_norm(tokens, a.width)
        t.scaled(tokens, a.width)
        t.linear(tokens, a.width, 2 * a.mlp_width, adapted=True, bias=False)
        t.gated(tokens, a.mlp_width)
        t.linear(tokens, a.mlp_width, a.width, adapted=True, bias=False)
        t.scaled(tokens, a.width)  # gate


def single_block(t: Tally, a: Architecture, tokens: int) -> None:
    """Count a block over both streams: one layer for queries, keys, values and feed-forward, one after attention."""
    t.layer_norm(tokens, a.width)
    t.scaled(tokens, a.width)
    t.linear(tokens, a.width, 3 * a.width + 2 * a.mlp_width, adapted=True, bias=False)
    for _ in ("queries", "keys"):
        t.head_norm("torch", tokens, a.width, a.heads, a.head_width)
    t.attention(tokens, tokens, a.width, a.heads)
    t.gated(tokens, a.mlp_width)
    t.linear(tokens, a.width + a.mlp_width, a.width, adapted=True, bias=False)
    t.scaled(tokens, a.width)  # gate


def blocks(a: Architecture, image: int, text: int) -> Iterator[BlockCount]:
    double = partial(double_block, a=a, image=image, text=text)
    yield BlockCount(number=a.layers, input_tokens=image + text, count=double)
    single = partial(single_block, a=a, tokens=image + text)
    yield BlockCount(number=a.single_layers, input_tokens=image + text, count=single)


def outside(t: Tally, a: Architecture, image: int, text: int) -> None:
    for _ in range(1 + a.takes_guidance):
        t.vector(256, a.width, bias=False)
        t.vector(a.width, a.width, bias=False)
    t.vector(a.width, 6 * a.width, 6 * a.width, 3 * a.width, bias=False)
    t.linear(image, a.channels, a.width, bias=False)
    t.linear(text, a.text_width, a.width, bias=False)
    t.layer_norm(image, a.width)
    t.vector(a.width, 2 * a.width, bias=False)
    t.scaled(image, a.width)
    t.linear(image, a.width, a.output_channels, bias=False)


def is_distilled(index: Mapping[str, Any]) -> bool:
    return bool(index.get("is_distilled"))


FAMILY = Family(
    name="flux2-klein",
    size=ImageSize(512, 512),
    spacing="flux2",
    guidance=4.0,
    guidance_note="and sampler.steps: 4, as published, or train FLUX.2-klein-base-4B",
    shares_sequence=True,
    pipeline=Pipeline(
        name="Flux2KleinPipeline",
        parts={
            "transformer": "Flux2Transformer2DModel",
            "vae": "AutoencoderKLFlux2",
            "text_encoder": "Qwen3ForCausalLM",
        },
        input_channels=128,
        output_channels=None,
        packed=4,
        packed_output=4,
        latent_channels=32,
        input_layer="x_embedder.weight",
    ),
    distilled=is_distilled,
    factors=factors,
    packed=PATCH,
    architecture=architecture,
    blocks=blocks,
    outside=outside,
    published=tuple(
        PublishedSizes(
            name=name,
            config={
                "in_channels": 128,
                "num_layers": 5,
                "num_single_layers": 20,
                "num_attention_heads": 24,
                "attention_head_dim": 128,
                "joint_attention_dim": 7680,
                "guidance_embeds": False,
            },
            text_encoder_parameters=4_022_468_096,
            vae_parameters=84_046_115,
            spelled=spelled,
            licence="Apache-2.0",
            distilled="base" not in name,
            timed_like="FLUX.1-dev",
        )
        for name, spelled in (
            ("FLUX.2-klein-4B", r"(flux2)?klein4b"),
            ("FLUX.2-klein-base-4B", r"(flux2)?kleinbase4b"),
        )
    ),
    template_tokens=3,  # <|im_start|>, user, new line
    lora_targets=lora_targets,
    encode=encode,
    forward=forward,
    to_decoder=to_decoder,
)

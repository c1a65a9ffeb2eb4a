"""Z-Image and Z-Image-Turbo: one stream of image and caption, with two blocks that refine each before.

Conventions of the transformer (diffusers 0.39 to 0.42): lists of latents [16, 1, h, w] and of captions [L, 2560]
without padding, timestep = 1 - sigma, and the output is data minus noise: the negative velocity. The image's positions
start behind the caption, so zeros behind a caption would change the image; captions are cut to their own length here.
The pipeline's `guidance_scale` g is pos + g (pos - neg): a `sampler.guidance` of g + 1. Turbo is trained without.

Sizes: the defaults of the class, as in Tongyi-MAI/Z-Image and Z-Image-Turbo on the Hugging Face hub (6.15 B).
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

MULTIPLE = 32
"""The transformer fills up image and caption to multiples of so many tokens."""

TIME_WIDTH = 256
"""Width of the vector of the noise level."""


def lora_targets(transformer: "nn.Module") -> Sequence[str]:
    attention = ("to_q", "to_k", "to_v", "to_out.0")
    return [*(f"attention.{layer}" for layer in attention), "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]


def encode(pipeline: Any, prompts: list[str], text_tokens: int) -> "tuple[Tensor, Tensor]":
    """Return captions [B, longest, 2560], and a mask [B, longest] of what is text."""
    import torch

    # A copy of the list, because the pipeline writes its template into the list that it gets.
    captions, _ = pipeline.encode_prompt(
        prompt=list(prompts), do_classifier_free_guidance=False, max_sequence_length=text_tokens
    )
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(captions, batch_first=True), pad([caption.new_ones(len(caption)) for caption in captions], True)


def forward(transformer: "nn.Module", x: "Tensor", sigma: "Tensor", hidden: "Tensor", mask: "Tensor") -> "Tensor":
    """Return the velocity [B, 16, h, w] of x [B, 16, h, w] at sigma [B], with hidden [B, L, 2560] and mask [B, L]."""
    import torch

    latents = list(x[:, :, None].unbind())
    captions = [caption[is_text] for caption, is_text in zip(hidden, mask, strict=True)]
    outputs = transformer(latents, 1.0 - sigma, captions, return_dict=False)[0]
    return -torch.stack(outputs)[:, :, 0]


def to_decoder(vae: Any, x: "Tensor") -> "Tensor":
    """Undo the VAE's scale and shift."""
    scaled: Tensor = x / vae.config.scaling_factor + vae.config.shift_factor
    return scaled


# --- sizes


def factors(vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> Factors:
    return Factors(2 ** (len(vae["block_out_channels"]) - 1), 1, PATCH)


def architecture(config: Mapping[str, Any]) -> Architecture:
    width, channels = config.get("dim", 3840), PATCH * PATCH * config.get("in_channels", 16)
    heads = config.get("n_heads", 30)
    mlp = int(width / 3 * 8)
    return Architecture(
        family="z-image",
        layers=config.get("n_layers", 30),
        refiner_layers=config.get("n_refiner_layers", 2),
        heads=heads,
        head_width=width // heads,
        text_width=config.get("cap_feat_dim", 2560),
        channels=channels,
        output_channels=channels,
        mlp_width=mlp,
        adapted_width=mlp,
    )


def whole(tokens: int) -> int:
    return -(-tokens // MULTIPLE) * MULTIPLE


def block(t: Tally, a: Architecture, tokens: int, *, is_modulated: bool = True) -> None:
    """Count a block. `is_modulated`: it has scales and gates, which blocks that refine captions have not."""
    if is_modulated:
        t.vector(min(a.width, TIME_WIDTH), 4 * a.width)
    for layers in ("attention", "feed-forward"):
        t.head_norm("diffusers", tokens, a.width, 1, a.width)
        if is_modulated:
            t.scaled(tokens, a.width)
        if layers == "attention":
            t.linear(tokens, a.width, a.width, a.width, a.width, adapted=True, bias=False)
            for _ in ("queries", "keys"):
                t.head_norm("diffusers", tokens, a.width, a.heads, a.head_width)
            t.attention(tokens, tokens, a.width, a.heads)
            t.linear(tokens, a.width, a.width, adapted=True, kept_before=True, bias=False)
        else:
            t.linear(tokens, a.width, a.mlp_width, a.mlp_width, adapted=True, bias=False)
            t.gated(tokens, a.mlp_width)
            t.linear(tokens, a.mlp_width, a.width, adapted=True, bias=False)
        t.head_norm("diffusers", tokens, a.width, 1, a.width)
        if is_modulated:
            t.scaled(tokens, a.width)  # gate


def blocks(a: Architecture, image: int, text: int) -> Iterator[BlockCount]:
    image, text = whole(image), whole(text)
    refine_image, refine_text = partial(block, a=a, tokens=image), partial(block, a=a, tokens=text, is_modulated=False)
    yield BlockCount(number=a.refiner_layers, input_tokens=image, count=refine_image)
    yield BlockCount(number=a.refiner_layers, input_tokens=text, count=refine_text)
    yield BlockCount(number=a.layers, input_tokens=image + text, count=partial(block, a=a, tokens=image + text))


def outside(t: Tally, a: Architecture, image: int, text: int) -> None:
    image, text = whole(image), whole(text)
    time = min(a.width, TIME_WIDTH)
    t.vector(TIME_WIDTH, 1024)
    t.vector(1024, time)
    t.parameters += a.text_width  # norm of the caption
    if t.training.is_full:
        t.head_norm("diffusers", text, a.text_width, 1, 0)
    t.linear(text, a.text_width, a.width)
    t.linear(image, a.channels, a.width)
    t.parameters += 2 * a.width  # tokens that fill up image and caption
    t.layer_norm(image + text, a.width)
    t.vector(time, a.width)
    t.scaled(image + text, a.width)
    t.linear(image + text, a.width, a.output_channels)


def is_distilled(index: Mapping[str, Any]) -> bool:
    return False  # Turbo has the configuration of Z-Image; its name tells them apart


FAMILY = Family(
    name="z-image",
    size=ImageSize(512, 512),
    spacing="even",
    guidance=5.0,
    guidance_offset=1.0,
    guidance_note="and sampler.steps: 8, as published for Z-Image-Turbo",
    pipeline=Pipeline(
        name="ZImagePipeline",
        parts={"transformer": "ZImageTransformer2DModel", "vae": "AutoencoderKL", "text_encoder": "Qwen3Model"},
        input_channels=16,
        output_channels=None,
        latent_channels=4,
        input_layer="all_x_embedder.2-1.weight",
        input_values=PATCH * PATCH,
    ),
    distilled=is_distilled,
    factors=factors,
    architecture=architecture,
    blocks=blocks,
    outside=outside,
    published=tuple(
        PublishedSizes(
            name=name,
            config={"in_channels": 16, "dim": 3840, "n_layers": 30, "n_refiner_layers": 2, "n_heads": 30},
            text_encoder_parameters=4_022_468_096,
            vae_parameters=83_819_683,
            spelled=spelled,
            licence="Apache-2.0",
            distilled="Turbo" in name,
            timed_like="FLUX.1-dev",
        )
        for name, spelled in (("Z-Image", "zimage"), ("Z-Image-Turbo", "zimageturbo"))
    ),
    template_tokens=3,  # <|im_start|>, user, new line
    lora_targets=lora_targets,
    encode=encode,
    forward=forward,
    to_decoder=to_decoder,
)

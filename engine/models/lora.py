"""Somebody else's LoRA as the start of a run (`model.lora`): converted, checked as a whole, then merged or continued.

    file -> factors with alpha in B -> names of the network, by themselves or by diffusers' own converter
         -> every name and shape compared with the network -> W += B A, or the start of the trained adapters

A converter of diffusers may drop what it does not know without a word. `_converted` therefore also converts numbered
tensors, and sees which of them arrive.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.utils.other import get_pattern_key
from torch import Tensor, nn

from engine.config import SHIPPED, ModelConfig
from engine.families import FAMILIES
from engine.lora_file import ALPHA, FACTOR, LoraFile, check_digest, is_down, read_lora
from engine.model_parts import PIPELINES, FolderError
from engine.models.flux import FLUX_LORA_TARGETS
from engine.models.hunyuan_video import HUNYUAN_VIDEO_LORA_TARGETS
from engine.models.qwen_image import QWEN_LORA_TARGETS
from engine.models.sd3 import SD3_LORA_TARGETS
from engine.models.wan import WAN_LORA_TARGETS

PREFIXES = ("base_model.model.", "diffusion_model.", "transformer.")
"""What the programs put before the names of the network's modules, in this order."""

TARGETS = {
    **dict.fromkeys((*SHIPPED, "qwen-image"), QWEN_LORA_TARGETS),
    "flux": FLUX_LORA_TARGETS,
    "sd3": SD3_LORA_TARGETS,
    "wan": WAN_LORA_TARGETS,
    "hunyuan-video": HUNYUAN_VIDEO_LORA_TARGETS,
}
"""Ends of the names of a family's adapted modules, as its adapter's `lora_targets`."""


@dataclass(frozen=True)
class Factors:
    """The change of one linear layer: weight [out, in] += b a. a: [rank, in], b: [out, rank], in fp32 on the CPU."""

    a: Tensor
    b: Tensor


def load_lora(config: ModelConfig, network: nn.Module) -> dict[str, Factors]:
    """Return the factors of `config.lora` by the network's module names, all of them or none.

    `network`: without adapters of its own; its weights may have no values. Raises FolderError if the file is damaged or
    another one than `config.lora_sha256`, or if a name or shape is not the network's; with `lora_use: continue` also if
    the run's adapters have no place for a part of it.
    """
    assert config.lora is not None
    check_digest(Path(config.lora), config.lora_sha256)
    file = read_lora(Path(config.lora))
    layers = {name: layer for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
    factors = _by_module(config.name, file, layers)
    if strange := sorted(factors.keys() - layers.keys()):
        raise _error(
            f"model.lora is {file.text}, and {len(strange)} of its {len(factors)} modules are none of {config.name}'s "
            f"linear layers: {_some(strange)}",
            f"give a LoRA that was trained on this model; model.name is {config.name}",
        )
    for name, pair in factors.items():
        shape, wanted = [pair.b.shape[0], pair.a.shape[1]], list(layers[name].weight.shape)
        if shape != wanted:
            raise _error(
                f"model.lora is {file.text}, which changes {name} of {shape}, and this model's has {wanted}",
                "give a LoRA that was trained on a model of this size",
            )
    if config.lora_use == "continue":
        _check_places(config, file, factors, network)
    return factors


def merge(network: nn.Module, factors: Mapping[str, Factors]) -> None:
    """Add the factors to the network's weights, in fp32, rounded once to each weight's dtype.

    Holds one fp32 product beside the weights: less than the activations of any pass.
    """
    for name, pair in factors.items():
        layer = network.get_submodule(name)
        assert isinstance(layer, nn.Linear), "load_lora lets no other layer pass"
        weight = layer.weight.data
        weight.copy_(weight.float() + pair.b.to(weight.device) @ pair.a.to(weight.device))


def start_from(parameters: Mapping[str, nn.Parameter], factors: Mapping[str, Factors], scale: float) -> None:
    """Put the factors into the trained adapters, whose product is multiplied by `scale` (alpha / rank).

    An adapter of a larger rank keeps its random A behind the factor's rows, and zeros in B: the product is the same.
    Adapters without factors stay as they are, with zeros in B.
    """
    for name, pair in factors.items():
        rank = len(pair.a)
        a, b = (parameters[f"{name}.lora_{part}.default.weight"].data for part in "AB")
        a[:rank].copy_(pair.a)
        b[:, :rank].copy_(pair.b / scale)


def joined(mine: Mapping[str, Tensor], factors: Mapping[str, Factors], scale: float) -> dict[str, Tensor]:
    """Return the adapters for the published base: somebody else's factors and the trained ones, with their ranks added.

    `mine`: the trained adapters as in checkpoints, and the result too. `scale`: their alpha / rank; that of the result
    is 1. All modules get the largest rank, with zeros behind their own, because loaders disagree on mixed ranks.
    """
    trained = {name.rpartition(".lora_")[0] for name in mine}
    sums = dict(factors)
    for name in trained:
        a, b = mine[f"{name}.lora_A.default.weight"], mine[f"{name}.lora_B.default.weight"] * scale
        first = factors.get(name)
        sums[name] = (
            Factors(a, b) if first is None else Factors(torch.cat([first.a, a]), torch.cat([first.b, b], dim=1))
        )
    rank = max(len(pair.a) for pair in sums.values())
    tensors = {}
    for name, pair in sums.items():
        more = rank - len(pair.a)
        tensors[f"{name}.lora_A.default.weight"] = nn.functional.pad(pair.a, (0, 0, 0, more)).contiguous()
        tensors[f"{name}.lora_B.default.weight"] = nn.functional.pad(pair.b, (0, more)).contiguous()
    return tensors


def targets_of(name: str, network: nn.Module) -> list[str]:
    """Return the names of the modules to which a run of this family adds adapters."""
    ends = TARGETS[name] if name in TARGETS else FAMILIES[name].lora_targets(network)
    return [name for name, _ in network.named_modules() if any(name == end or name.endswith(f".{end}") for end in ends)]


def _by_module(name: str, file: LoraFile, layers: Mapping[str, nn.Module]) -> dict[str, Factors]:
    """Return the factors by module: the names without their program's prefix, else what diffusers makes of them."""
    tensors = _scaled(file)
    plain = {_without_prefixes(key): tensor for key, tensor in tensors.items() if not key.endswith(ALPHA)}
    if len(plain) == sum(not key.endswith(ALPHA) for key in tensors):
        factors = _pairs(plain)
        if factors.keys() <= layers.keys():
            return factors
    pipeline = "QwenImagePipeline" if name in SHIPPED else PIPELINES[name].name
    converted = _pairs(_converted(pipeline, file, tensors))
    # Without a converter for its names, diffusers gives them back unchanged: the plain ones say more in an error.
    return converted if converted.keys() & layers.keys() else _pairs(plain)


def _scaled(file: LoraFile) -> dict[str, Tensor]:
    """Return the file's tensors in fp32, with alpha / rank in each second factor, and alpha = rank."""
    from safetensors.torch import load_file

    tensors = load_file(file.path)
    scaled = {}
    for key, tensor in tensors.items():
        if match := FACTOR.fullmatch(key):
            module = match["module"]
            rank, alpha = file.ranks[module], tensors.get(f"{module}{ALPHA}")
            strength = _strength(file.config, module, rank) if alpha is None else float(alpha) / rank
            scaled[key] = tensor.float() if is_down(match) else tensor.float() * strength
        else:
            scaled[key] = torch.tensor(float(file.ranks[key.removesuffix(ALPHA)]))
    return scaled


def _strength(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return what PEFT multiplies a product with. Without a configuration, alpha is the rank."""
    patterns = config.get("alpha_pattern") or {}
    module = _without_prefixes(module)
    alpha = patterns.get(get_pattern_key(patterns, module), config.get("lora_alpha", rank))
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def _converted(pipeline: str, file: LoraFile, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by the network's names, from diffusers' converter. Raises FolderError if any is left out."""
    import diffusers

    convert = getattr(diffusers, pipeline).lora_state_dict
    modules = list(file.ranks)
    numbered = {
        key: torch.tensor(1.0 + modules.index(match["module"])).expand(tensor.shape)
        if (match := FACTOR.fullmatch(key))
        else tensor
        for key, tensor in tensors.items()
    }
    try:
        arrived = _pairs(convert(numbered))
        result: dict[str, Tensor] = convert(dict(tensors))
    except Exception as error:  # the converters raise errors of many kinds for names that they do not know
        raise _error(
            f"model.lora is {file.text}, and {pipeline} of diffusers cannot read its names "
            f"({type(error).__name__}: {str(error)[:200]})",
            "give a LoRA that was trained on this model, or save it with diffusers' `save_lora_weights`",
        ) from error
    numbers = {int(number) for pair in arrived.values() for number in pair.b.unique() if number}
    if lost := [module for number, module in enumerate(modules, 1) if number not in numbers]:
        raise _error(
            f"model.lora is {file.text}, and {pipeline} of diffusers knows no place for {len(lost)} of its modules: "
            f"{_some(lost)}",
            "give a LoRA that was trained on this model, or save it with diffusers' `save_lora_weights`",
        )
    return result


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Return the factors by module, without the prefix of the pipeline's part. Other tensors do not count."""
    pairs: dict[str, dict[bool, Tensor]] = {}
    for key, tensor in tensors.items():
        if match := FACTOR.fullmatch(key):
            pairs.setdefault(_without_prefixes(match["module"]), {})[is_down(match)] = tensor
    return {name: Factors(pair[True], pair[False]) for name, pair in pairs.items()}


def _check_places(config: ModelConfig, file: LoraFile, factors: Mapping[str, Factors], network: nn.Module) -> None:
    if file.rank > config.lora_rank:
        raise _error(
            f"model.lora is {file.text}, and model.lora_rank is {config.lora_rank}: its adapters would lose a part",
            f"use model.lora_rank: {file.rank} or more, or lora_use: merge",
        )
    if strange := sorted(factors.keys() - set(targets_of(config.name, network))):
        raise _error(
            f"model.lora is {file.text}, and {len(strange)} of its {len(factors)} modules have no adapter in a run of "
            f"{config.name}: {_some(strange)}",
            "use lora_use: merge, which takes every linear layer",
        )


def _without_prefixes(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _error(found: str, remedy: str) -> FolderError:
    return FolderError("model.lora", found, remedy)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

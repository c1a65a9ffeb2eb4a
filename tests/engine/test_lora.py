"""LoRA files of other programs: accepted as a whole and equal to their own product, or refused by the cause."""

import json
import re

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

from engine.config import ModelConfig
from engine.families import FAMILIES
from engine.lora_file import read_lora
from engine.model_parts import FolderError
from engine.models.load import ReferencePolicy, load_adapter, load_family, trainable
from engine.models.lora import TARGETS, load_lora, merge, targets_of
from launcher.report.diffusers_files import write_for_diffusers
from tests.tiny_pipelines import PIPELINES

RANK, ALPHA = 3, 6.0


@pytest.fixture(scope="module")
def networks():
    """Return the transformer of a family by its name, made once."""
    made = {}

    def network(name):
        if name not in made:
            torch.manual_seed(0)
            shipped = name == "digits-ocr"
            made[name] = load_family(ModelConfig()).transformer if shipped else PIPELINES[name](1).transformer
        return made[name]

    return network


def linear(network, *ends):
    return {
        name: layer
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear) and name.endswith(tuple(ends))
    }


def drawn(layers, rank=RANK):
    """Return random factors (a, b) by module."""
    return {
        name: (torch.randn(rank, layer.in_features), torch.randn(layer.out_features, rank))
        for name, layer in layers.items()
    }


def adapted(network, targets, **fields):
    """Return a copy of the network with PEFT's adapters, whose second factors are not zero."""
    copy = type(network).from_config(network.config)
    copy.load_state_dict(network.state_dict())
    copy.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, **fields))
    with torch.no_grad():
        for name, weight in copy.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    return copy


# Each writer saves a LoRA of a family as its program does, and returns its true products by module.


def by_diffusers(network, folder, **fields):
    from diffusers import QwenImagePipeline

    targets = ["attn.to_q", "attn.to_out.0", "img_mlp.net.2"]
    copy = adapted(network, targets, **fields)
    QwenImagePipeline.save_lora_weights(
        folder,
        transformer_lora_layers=get_peft_model_state_dict(copy),
        transformer_lora_adapter_metadata=copy.peft_config["default"].to_dict(),
    )
    return products(copy)


def by_diffusers_of_mixed_ranks(network, folder):
    return by_diffusers(network, folder, rank_pattern={"attn.to_q": 2}, alpha_pattern={"attn.to_q": 5})


def by_peft(network, folder, **fields):
    copy = type(network).from_config(network.config)
    copy.load_state_dict(network.state_dict())
    model = get_peft_model(
        copy, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["attn.to_q", "attn.add_k_proj"], **fields)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    model.save_pretrained(folder)
    return products(copy)


def by_peft_of_stable_rank(network, folder):
    return by_peft(network, folder, use_rslora=True, alpha_pattern={"add_k_proj": 1.5})


def products(copy):
    return {
        name: layer.get_delta_weight("default").detach()
        for name, layer in copy.named_modules()
        if hasattr(layer, "get_delta_weight")
    }


def by_ai_toolkit(network, folder):
    factors = drawn(linear(network, "attn.to_q", "img_mlp.net.2"))
    plain(folder, factors)
    return {name: b @ a for name, (a, b) in factors.items()}


def kohya(folder, factors, prefix="lora_unet_", separator="_"):
    tensors = {}
    for name, (a, b) in factors.items():
        module = prefix + name.replace(".", separator)
        tensors |= {
            f"{module}.lora_down.weight": a,
            f"{module}.lora_up.weight": b,
            f"{module}.alpha": torch.tensor(ALPHA),
        }
    save(folder, tensors)


def by_kohya(network, folder):
    factors = drawn(linear(network, "attn.to_q", "attn.add_q_proj", "img_mlp.net.2"))
    kohya(folder, factors)
    return {name: b @ a * ALPHA / RANK for name, (a, b) in factors.items()}


def by_comfy(network, folder):
    factors = drawn(linear(network, "attn.to_v", "txt_mlp.net.2"))
    kohya(folder, factors, "diffusion_model.", ".")
    return {name: b @ a * ALPHA / RANK for name, (a, b) in factors.items()}


def by_kohya_of_flux(network, folder):
    """FLUX.1's own names: one layer for queries, keys and values, which diffusers has apart."""
    width = network.config.num_attention_heads * network.config.attention_head_dim
    factors = {}
    a, b = torch.randn(RANK, width), torch.randn(3 * width, RANK)
    factors["double_blocks.0.img_attn.qkv"] = a, b
    parts = {
        f"transformer_blocks.0.attn.{part}": rows @ a
        for part, rows in zip(("to_q", "to_k", "to_v"), b.chunk(3), strict=True)
    }
    a, b = torch.randn(RANK, width), torch.randn(width, RANK)
    factors["double_blocks.0.img_attn.proj"] = a, b
    kohya(folder, factors)
    return {
        name: product * ALPHA / RANK for name, product in {**parts, "transformer_blocks.0.attn.to_out.0": b @ a}.items()
    }


def by_diffusers_of_flux_with_the_prefix_of_ai_toolkit(network, folder):
    """diffusers' converter gives these names back unchanged, and adds nothing."""
    factors = drawn(linear(network, "attn.to_q"))
    plain(folder, factors)
    return {name: b @ a for name, (a, b) in factors.items()}


def by_ai_toolkit_of_wan(network, folder):
    """Wan's own names."""
    names = {"self_attn.q": "attn1.to_q", "cross_attn.o": "attn2.to_out.0", "ffn.0": "ffn.net.0.proj"}
    layers = {own: network.get_submodule(f"blocks.0.{theirs}") for own, theirs in names.items()}
    factors = drawn(layers)
    plain(folder, factors, "diffusion_model.blocks.0.")
    return {f"blocks.0.{names[own]}": b @ a for own, (a, b) in factors.items()}


def by_ai_toolkit_of_z_image(network, folder):
    factors = drawn(linear(network, "attention.to_q", "feed_forward.w1"))
    plain(folder, factors)
    return {name: b @ a for name, (a, b) in factors.items()}


def by_ai_toolkit_of_klein(network, folder):
    """FLUX.2's own names."""
    width = network.config.num_attention_heads * network.config.attention_head_dim
    a, b = torch.randn(RANK, width), torch.randn(3 * width, RANK)
    plain(folder, {"double_blocks.0.img_attn.qkv": (a, b)})
    return {
        f"transformer_blocks.0.attn.{part}": rows @ a
        for part, rows in zip(("to_q", "to_k", "to_v"), b.chunk(3), strict=True)
    }


def plain(folder, factors, prefix="diffusion_model."):
    """Save factors as ai-toolkit does."""
    parts = ((name, part, pair[part == "B"]) for name, pair in factors.items() for part in "AB")
    save(folder, {f"{prefix}{name}.lora_{part}.weight": tensor for name, part, tensor in parts})


def save(folder, tensors):
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "their.safetensors")


ACCEPTED = {
    by_diffusers: "digits-ocr",
    by_diffusers_of_mixed_ranks: "digits-ocr",
    by_peft: "digits-ocr",
    by_peft_of_stable_rank: "digits-ocr",
    by_ai_toolkit: "digits-ocr",
    by_kohya: "digits-ocr",
    by_comfy: "digits-ocr",
    by_kohya_of_flux: "flux",
    by_diffusers_of_flux_with_the_prefix_of_ai_toolkit: "flux",
    by_ai_toolkit_of_wan: "wan",
    by_ai_toolkit_of_z_image: "z-image",
    by_ai_toolkit_of_klein: "flux2-klein",
}


def config_of(name, path, **fields):
    needs = {} if name == "digits-ocr" else {"path": "unread"}
    return ModelConfig(name=name, weights="lora", lora=str(path), **needs | fields)


@pytest.mark.parametrize("write", ACCEPTED, ids=lambda write: write.__name__)
def test_a_file_of_another_program_is_its_own_product(write, networks, tmp_path):
    name = ACCEPTED[write]
    network = networks(name)
    torch.manual_seed(1)
    expected = write(network, tmp_path / "lora")
    before = {module: layer.weight.clone() for module, layer in linear(network, "").items()}
    factors = load_lora(config_of(name, tmp_path / "lora"), network)
    try:
        merge(network, factors)
        for module, weight in before.items():
            change = network.get_submodule(module).weight - weight
            assert torch.allclose(change, expected.get(module, torch.zeros(1)).expand_as(weight), atol=1e-5, rtol=0), (
                module
            )
    finally:
        for module, weight in before.items():
            network.get_submodule(module).weight.data.copy_(weight)
    assert factors.keys() == expected.keys()


# --- refused


def renamed(folder, old, new):
    changed(folder, lambda tensors: {name.replace(old, new): value for name, value in tensors.items()})


def changed(folder, change):
    """Change the tensors of the file in the folder."""
    (file,) = folder.glob("*.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file)


def of_half_unknown_names(network, folder):
    by_ai_toolkit(network, folder)
    renamed(folder, "img_mlp.net.2", "img_mlp.net.7")


def of_half_unknown_names_of_kohya(network, folder):
    by_kohya(network, folder)
    renamed(folder, "blocks_0_attn_to_q", "blocks_0_attn_qq")


def of_another_family(network, folder):
    factors = {"blocks.0.self_attn.q": (torch.randn(RANK, 64), torch.randn(64, RANK))}
    plain(folder, factors)


def of_another_size(network, folder):
    by_ai_toolkit(network, folder)
    changed(
        folder, lambda tensors: {name: value[:, :-1] if "lora_A" in name else value for name, value in tensors.items()}
    )


def of_peft(network, folder, config):
    get_peft_model(type(network).from_config(network.config), config).save_pretrained(folder)


def with_dora(network, folder):
    of_peft(network, folder, LoraConfig(r=RANK, target_modules=["attn.to_q"], use_dora=True))


def with_dora_of_kohya(network, folder):
    by_kohya(network, folder)
    changed(
        folder, lambda tensors: tensors | {"lora_unet_transformer_blocks_0_attn_to_q.dora_scale": torch.ones(96, 1)}
    )


def with_lokr(network, folder):
    of_peft(network, folder, LoKrConfig(r=RANK, target_modules=["attn.to_q"]))


def with_loha(network, folder):
    of_peft(network, folder, LoHaConfig(r=RANK, target_modules=["attn.to_q"]))


def with_a_text_encoder(network, folder):
    by_kohya(network, folder)
    factors = {"text_model_encoder_layers_0_mlp_fc1": (torch.randn(RANK, 8), torch.randn(8, RANK))}
    (file,) = folder.glob("*.safetensors")
    unet = load_file(file)
    kohya(folder, factors, "lora_te1_")
    changed(folder, lambda tensors: unet | tensors)


def with_a_changed_base(network, folder):
    by_peft(network, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": "pissa_niter_4"}))


def without_the_configuration_of_peft(network, folder):
    by_peft(network, folder)
    (folder / "adapter_config.json").unlink()


def without_an_alpha(network, folder):
    by_kohya(network, folder)
    changed(folder, lambda tensors: {name: value for name, value in tensors.items() if name != min(tensors)})


def without_a_factor(network, folder):
    by_ai_toolkit(network, folder)
    changed(folder, lambda tensors: {name: value for name, value in tensors.items() if name != max(tensors)})


def with_factors_of_two_ranks(network, folder):
    by_ai_toolkit(network, folder)
    changed(folder, lambda tensors: tensors | {min(tensors): tensors[min(tensors)][:-1].clone()})


def with_a_bias(network, folder):
    by_ai_toolkit(network, folder)
    changed(folder, lambda tensors: tensors | {"diffusion_model.transformer_blocks.0.attn.to_q.diff_b": torch.ones(96)})


def cut_short(network, folder):
    by_ai_toolkit(network, folder)
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])


def no_safetensors(network, folder):
    folder.mkdir()
    (folder / "their.safetensors").write_bytes(b"no header")


def pickled(network, folder):
    folder.mkdir()
    torch.save({"a": torch.ones(1)}, folder / "pytorch_lora_weights.bin")


def of_two_files(network, folder):
    by_ai_toolkit(network, folder)
    (file,) = folder.glob("*.safetensors")
    file.with_name("second.safetensors").write_bytes(file.read_bytes())


def missing(network, folder):
    pass


REFUSED = {
    of_half_unknown_names: "4 of its 8 modules are none of digits-ocr's linear layers",
    of_half_unknown_names_of_kohya: "1 of its 12 modules are none of digits-ocr's linear layers",
    of_another_family: "1 of its 1 modules are none of digits-ocr's linear layers: blocks.0.self_attn.q",
    of_another_size: "attn.to_q of [96, 95], and this model's has [96, 96]",
    with_dora: "holds DoRA scales",
    with_dora_of_kohya: "holds DoRA scales",
    with_lokr: "holds LoKr factors",
    with_loha: "holds LoHa factors",
    with_a_text_encoder: "holds tensors of a text encoder",
    with_a_changed_base: "init_lora_weights is pissa_niter_4",
    without_the_configuration_of_peft: "without adapter_config.json beside it",
    without_an_alpha: "1 of 12 modules have no alpha",
    without_a_factor: "has one factor of two",
    with_factors_of_two_ranks: "[2, 96] and [96, 3]",
    with_a_bias: "1 of its 17 tensors are no low-rank factors: diffusion_model.transformer_blocks.0.attn.to_q.diff_b",
    cut_short: "bytes, and its header names",
    no_safetensors: "which ends in its header",
    pickled: "a folder with only pytorch_lora_weights.bin",
    of_two_files: "a folder with second.safetensors, their.safetensors",
    missing: "there is no such file or folder",
}


@pytest.mark.parametrize("write", REFUSED, ids=lambda write: write.__name__)
def test_a_file_that_is_no_whole_lora_is_refused_by_its_cause(write, networks, tmp_path):
    network = networks("digits-ocr")
    write(network, tmp_path / "lora")
    with pytest.raises(FolderError, match=re.escape(REFUSED[write])) as refused:
        load_lora(config_of("digits-ocr", tmp_path / "lora"), network)
    assert refused.value.field == "model.lora"
    assert refused.value.remedy


def test_a_pickled_file_is_refused_whether_it_is_there_or_not(tmp_path):
    for name in ("missing.pt", "there.bin"):
        (tmp_path / "there.bin").write_bytes(b"")
        with pytest.raises(FolderError, match="a pickled file runs code"):
            read_lora(tmp_path / name)


def test_names_that_a_converter_drops_without_a_word_are_refused(networks, tmp_path):
    """diffusers' converter of FLUX.2 knows no names of kohya with dots."""
    network = networks("flux2-klein")
    width = network.config.num_attention_heads * network.config.attention_head_dim
    factors = {"double_blocks.0.img_attn.qkv": (torch.randn(RANK, width), torch.randn(3 * width, RANK))}
    kohya(tmp_path / "lora", factors, "diffusion_model.", ".")
    with pytest.raises(FolderError, match=r"knows no place for 1 of its modules: diffusion_model\.double_blocks\.0"):
        load_lora(config_of("flux2-klein", tmp_path / "lora"), network)


def test_another_file_than_the_one_of_the_run_is_refused(networks, tmp_path):
    network = networks("digits-ocr")
    by_ai_toolkit(network, tmp_path / "lora")
    sha256 = read_lora(tmp_path / "lora").sha256
    config = config_of("digits-ocr", tmp_path / "lora", lora_sha256=sha256)
    assert load_lora(config, network)
    changed(tmp_path / "lora", lambda tensors: {name: value + 1 for name, value in tensors.items()})
    with pytest.raises(FolderError, match="it is not the file that the run began with"):
        load_lora(config, network)


# --- in a run


def velocity(adapter):
    with torch.no_grad():
        x = torch.randn(2, *adapter.latent_shape(), generator=torch.Generator().manual_seed(3))
        return adapter.velocity(x, torch.tensor([0.5, 0.25]), adapter.encode(["1234", "9876"]), 1.0)


def shaken(adapter):
    """Change the trained parameters from their start values."""
    with torch.no_grad():
        for parameter in trainable(adapter).values():
            parameter += 0.05 * torch.randn_like(parameter)
    return adapter


@pytest.mark.parametrize("rank", [RANK, RANK + 2])
def test_a_continued_lora_of_any_larger_rank_begins_where_a_merged_one_does(networks, tmp_path, rank):
    torch.manual_seed(1)
    by_peft(networks("digits-ocr"), tmp_path / "lora")
    fields = {"lora_rank": rank, "lora_alpha": 7}
    merged = load_adapter(config_of("digits-ocr", tmp_path / "lora", lora_use="merge", **fields))
    continued = load_adapter(config_of("digits-ocr", tmp_path / "lora", lora_use="continue", **fields))
    base = load_adapter(ModelConfig(weights="lora"))
    start = velocity(merged)
    torch.testing.assert_close(velocity(continued), start, atol=1e-5, rtol=0)
    assert float((start - velocity(base)).abs().max()) > 1e-2
    for adapter in (merged, continued):  # the KL divergence is measured from the model with the LoRA
        before, reference = velocity(adapter), ReferencePolicy.of(adapter)
        shaken(adapter)
        assert not torch.equal(velocity(adapter), before)
        with reference.active():
            assert torch.equal(velocity(adapter), before)


def of_modulation(network, folder):
    plain(folder, drawn(linear(network, "img_mod.1")))


@pytest.mark.parametrize(
    ("write", "rank", "words"),
    [(by_peft, 2, "use model.lora_rank: 3 or more"), (of_modulation, 8, "4 of its 4 modules have no adapter in a run")],
)
def test_a_lora_that_does_not_fit_into_the_adapters_is_not_continued(networks, tmp_path, write, rank, words):
    write(networks("digits-ocr"), tmp_path / "lora")
    config = config_of("digits-ocr", tmp_path / "lora", lora_use="continue", lora_rank=rank)
    with pytest.raises(FolderError, match=words):
        load_lora(config, networks("digits-ocr"))


def test_the_names_of_adapted_modules_are_those_of_peft(networks):
    for name in (*TARGETS, *FAMILIES):
        network = networks("digits-ocr" if name == "shapes" else name)
        ends = TARGETS[name] if name in TARGETS else FAMILIES[name].lora_targets(network)
        copy = type(network).from_config(network.config)
        copy.add_adapter(LoraConfig(r=1, target_modules=list(ends)))
        assert sorted(targets_of(name, network)) == sorted(products(copy)), name


def test_a_pulled_file_of_a_merged_run_has_its_effect_on_the_published_base(networks, tmp_path, forked_engine):
    from diffusers import QwenImagePipeline

    torch.manual_seed(1)
    by_ai_toolkit(networks("digits-ocr"), tmp_path / "lora")
    config = config_of("digits-ocr", tmp_path / "lora", lora_rank=2, lora_alpha=5)
    adapter = shaken(load_adapter(config))
    save_file({name: weight.detach() for name, weight in trainable(adapter).items()}, tmp_path / "ema.safetensors")
    file = write_for_diffusers(tmp_path / "ema.safetensors", config)
    assert {pair.shape[0] for name, pair in load_file(file).items() if "lora_A" in name} == {RANK + 2}
    published = load_family(ModelConfig())
    needed = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer"))
    pipeline = QwenImagePipeline(**needed, transformer=published.transformer)
    pipeline.load_lora_weights(load_file(file))
    torch.testing.assert_close(velocity(published), velocity(adapter), atol=1e-5, rtol=1e-5)
    assert not (tmp_path / ".joined.safetensors").exists()

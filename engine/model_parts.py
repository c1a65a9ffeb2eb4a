"""The parts of a model's diffusers folder: their classes, channels and files. No torch.

    model_index.json -> class of the pipeline -> classes of the parts -> channels of transformer and VAE
    -> the files of weights that diffusers loads -> each is here, whole, and not quantised

A folder that passes is one that the family's adapter loads and trains. The launcher checks it before a purchase, and
sends only the files that `needed_files` names.
"""

import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.families import FAMILIES
from engine.family import Pipeline

INDEX = "model_index.json"


class FolderError(ValueError):
    """A model folder that does not fit the job. `field` is the job's field, `remedy` the correction."""

    def __init__(self, field: str, found: str, remedy: str) -> None:
        super().__init__(f"{found}; {remedy}")
        self.field, self.found, self.remedy = field, found, remedy


@dataclass(frozen=True)
class TensorSpec:
    """Format and shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]


CLIP, CLIP_PROJECTED, T5 = "CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel"

PIPELINES: Mapping[str, Pipeline] = {
    "qwen-image": Pipeline(
        name="QwenImagePipeline",
        parts={
            "transformer": "QwenImageTransformer2DModel",
            "vae": "AutoencoderKLQwenImage",
            "text_encoder": "Qwen2_5_VLForConditionalGeneration",
        },
        input_channels=64,
        output_channels=16,
        packed=4,
        latent_key="z_dim",
        input_layer="img_in.weight",
    ),
    "sd3": Pipeline(
        name="StableDiffusion3Pipeline",
        parts={
            "transformer": "SD3Transformer2DModel",
            "vae": "AutoencoderKL",
            "text_encoder": CLIP_PROJECTED,
            "text_encoder_2": CLIP_PROJECTED,
            "text_encoder_3": T5,
        },
        optional=("image_encoder", "feature_extractor"),
        input_channels=16,
        output_channels=16,
        latent_channels=4,
        input_layer="pos_embed.proj.weight",
    ),
    "flux": Pipeline(
        name="FluxPipeline",
        parts={
            "transformer": "FluxTransformer2DModel",
            "vae": "AutoencoderKL",
            "text_encoder": CLIP,
            "text_encoder_2": T5,
        },
        optional=("image_encoder", "feature_extractor"),
        input_channels=64,
        output_channels=None,
        packed=4,
        packed_output=4,
        latent_channels=4,
        input_layer="x_embedder.weight",
    ),
    "wan": Pipeline(
        name="WanPipeline",
        parts={"transformer": "WanTransformer3DModel", "vae": "AutoencoderKLWan", "text_encoder": "UMT5EncoderModel"},
        input_channels=16,
        output_channels=16,
        latent_key="z_dim",
        input_layer="patch_embedding.weight",
    ),
    "hunyuan-video": Pipeline(
        name="HunyuanVideoPipeline",
        parts={
            "transformer": "HunyuanVideoTransformer3DModel",
            "vae": "AutoencoderKLHunyuanVideo",
            "text_encoder": "LlamaModel",
            "text_encoder_2": CLIP,
        },
        input_channels=16,
        output_channels=16,
        input_layer="x_embedder.proj.weight",
    ),
    **{name: family.pipeline for name, family in FAMILIES.items()},
}
"""By family. The defaults are those of diffusers 0.39."""

OTHER_USES = (
    ("ControlNet", "follows a control image"),
    ("Control", "follows a control image"),
    ("Layered", "makes an image of layers"),
    ("Edit", "edits a given image"),
    ("Kontext", "edits a given image"),
    ("Fill", "fills masked parts of a given image"),
    ("Inpaint", "fills masked parts of a given image"),
    ("Img2Img", "changes a given image"),
    ("ImageToImage", "changes a given image"),
    ("ImageToVideo", "makes a video from a given image"),
    ("VideoToVideo", "changes a given video"),
    ("VACE", "edits a given video"),
    ("Animate", "animates a given image"),
    ("Framepack", "makes a video from a given image"),
)
"""Words in the classes of pipelines that do not make images or videos from a prompt alone, and what those do."""

NOT_TEXT_ALONE = {
    "qwen-image": {
        "zero_cond_t": "edits a given image (Qwen-Image-Edit-2511)",
        "use_additional_t_cond": "makes an image of layers (Qwen-Image-Layered)",
        "use_layer3d_rope": "makes an image of layers (Qwen-Image-Layered)",
    },
    "wan": {
        "image_dim": "makes a video from a given image",
        "added_kv_proj_dim": "makes a video from a given image",
        "pos_embed_seq_len": "makes a video from a given image",
    },
    "hunyuan-video": {"image_condition_type": "makes a video from a given image"},
}
"""Keys of a transformer's configuration that only models with another input set, and what those models do."""

SAFETENSORS, PICKLED = ".safetensors", ".bin"

WEIGHT_SUFFIXES = (SAFETENSORS, PICKLED, ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".ot", ".onnx", ".onnx_data",
                   ".gguf", ".pb", ".tflite")  # fmt: skip
"""Suffixes of files of weights. Of those, only the files that diffusers loads are needed."""

VARIANT = re.compile(r"(?:diffusion_pytorch_model|pytorch_model|model)\.([\w-]+?)(?:-\d+-of-\d+)?\.(?:safetensors|bin)")
"""Name of a file of a variant, like `diffusion_pytorch_model.fp16.safetensors`."""

VOCABULARIES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
)
BYTES_TOKENIZER = "ByT5Tokenizer"
"""A tokenizer of bytes, which has no vocabulary."""

PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
COUNTS = ("I64", "I32", "BOOL")
"""Formats of tensors that are not weights, such as the positions of a CLIP model."""

LFS_POINTER = b"version https://git-lfs.github.com/spec/"

AGAIN = "download it again, like `hf download OWNER/MODEL --local-dir FOLDER`"


def check_parts(family: str, path: Path) -> None:
    """Check the classes of a folder's parts, and the channels between them. Reads JSON only. Raises FolderError."""
    pipeline, index = PIPELINES[family], read_json(path / INDEX)
    _check_class(family, path, index.get("_class_name"))
    if _is_part(index.get("transformer_2")):
        raise _refused(
            path,
            "has two transformers, each for a range of noise levels (transformer_2, as in Wan2.2-A14B), and spotrl "
            "trains one",
            "use a model with one transformer, such as Wan2.1-T2V or Wan2.2-TI2V-5B",
        )
    for part, class_name in pipeline.parts.items():
        entry = index.get(part)
        if not _is_part(entry):
            raise _refused(
                path,
                f"has no {part} in {INDEX} ({json.dumps(entry)}), and {family} needs {class_name} there",
                "give the whole folder that the model was published as",
            )
        _check_part_class(path, part, str(entry[1]), class_name)  # type: ignore[index]
        if part.startswith("text_encoder") and not _is_part(index.get(tokenizer := _tokenizer_of(part))):
            raise _refused(
                path,
                f"has no {tokenizer} in {INDEX} ({json.dumps(index.get(tokenizer))}), and {part} needs it",
                "give the whole folder that the model was published as",
            )
    known_parts = {*_parts_with_files(family), "scheduler", *pipeline.optional}
    if strange := [name for name, entry in index.items() if _is_part(entry) and name not in known_parts]:
        raise _refused(
            path,
            f"has the part {strange[0]} ({'.'.join(map(str, index[strange[0]]))}), which {pipeline.name} of {family} "
            "does not have",
            f"give a folder that {pipeline.name}.save_pretrained writes",
        )
    configs = {part: read_json(path / part / "config.json") for part in pipeline.parts}
    for part, config in configs.items():
        _check_config(path, family, part, config)
    _check_channels(path, family, configs["transformer"], configs["vae"])


def _check_class(family: str, path: Path, class_name: object) -> None:
    pipeline = PIPELINES[family]
    if class_name == pipeline.name:
        return
    supported = ", ".join(f"{other_pipeline.name} ({name})" for name, other_pipeline in PIPELINES.items())
    if not isinstance(class_name, str):
        raise _refused(
            path,
            f"has no _class_name in {INDEX}, so its kind is not known, and spotrl trains {supported}",
            "give the whole folder that the model was published as",
        )
    if ours := next((name for name, other_pipeline in PIPELINES.items() if other_pipeline.name == class_name), None):
        raise FolderError(
            "model.name",
            f"model.name is {family}, and model.path is {path}, a folder of {class_name}",
            f"use model.name: {ours}, or give a folder of {pipeline.name}",
        )
    use = next((f", which {use}" for word, use in OTHER_USES if word in class_name), "")
    raise _refused(
        path,
        f"is a folder of {class_name}{use}, and spotrl trains models that need a prompt alone: {supported}",
        f"give a folder of {pipeline.name}",
    )


def _check_part_class(path: Path, part: str, class_name: str, needed_class: str) -> None:
    if class_name != needed_class:
        raise _refused(
            path,
            f"has a {part} of class {class_name}, and spotrl trains with {needed_class}",
            f"give a folder whose {part} is a {needed_class}",
        )


def _check_config(path: Path, family: str, part: str, config: Mapping[str, Any]) -> None:
    """Check a part's own configuration: its class, no quantisation, no other input than a prompt."""
    if isinstance(class_name := config.get("_class_name"), str):
        _check_part_class(path, part, class_name, PIPELINES[family].parts[part])
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        bits = _bits(quantised) if isinstance(quantised, dict) else ""
        raise _refused(
            path,
            f"has a quantised {part} ({' '.join(filter(None, (str(method or 'quantization_config'), bits)))}), and "
            "spotrl trains unquantised weights",
            "give the folder of the unquantised model",
        )
    if part == "transformer":
        for key, use in NOT_TEXT_ALONE.get(family, {}).items():
            if config.get(key):
                raise _refused(
                    path,
                    f"has {key}: {json.dumps(config[key])} in transformer/config.json: it {use}, and spotrl trains "
                    "models that need a prompt alone",
                    f"give a folder of a text-to-{'video' if family != 'qwen-image' else 'image'} model",
                )


def _bits(quantised: Mapping[str, Any]) -> str:
    if kind := quantised.get("bnb_4bit_quant_type"):
        return str(kind)
    if quantised.get("load_in_4bit") or quantised.get("load_in_8bit"):
        return "4 bits" if quantised.get("load_in_4bit") else "8 bits"
    bits = quantised.get("bits") or quantised.get("weights_dtype") or quantised.get("quant_type")
    return str(bits) if isinstance(bits, (str, int)) else ""


def _check_channels(path: Path, family: str, transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> None:
    pipeline = PIPELINES[family]
    entering = _channels(path, transformer, "transformer", "in_channels", pipeline.input_channels)
    leaving = _channels(path, transformer, "transformer", "out_channels", pipeline.output_channels or entering)
    latent = _channels(path, vae, "vae", pipeline.latent_key, pipeline.latent_channels)
    if leaving != latent * pipeline.packed_output or entering != latent * pipeline.packed:
        text = f"{pipeline.packed * latent} and {pipeline.packed_output * latent}"
        raise _refused(
            path,
            f"has a transformer of {entering} input and {leaving} output channels, and a VAE of {latent}: a text-to-"
            f"image or text-to-video {pipeline.parts['transformer']} has {text} with this VAE. More input channels "
            "belong to models with a mask, a control image or a first frame (such as Fill, Canny, Depth, I2V)",
            f"give a folder of {pipeline.name} without such an input",
        )


def _channels(path: Path, config: Mapping[str, Any], part: str, key: str, default: int) -> int:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refused(path, f"has {key}: {json.dumps(value)} in {part}/config.json, and a number is needed", AGAIN)
    return value


def check_files(family: str, path: Path) -> None:
    """Check that each file that a run loads is here and whole. Reads headers, not weights. Raises FolderError.

    Call after `check_parts`.
    """
    pipeline, index = PIPELINES[family], read_json(path / INDEX)
    for part in (*pipeline.parts, *(part for part in pipeline.optional if _is_part(index.get(part)))):
        if part == "feature_extractor":
            continue
        if part.startswith("text_encoder"):
            _check_tokenizer(path, _tokenizer_of(part))
        entries = _check_weights(path, part)
        if part == "transformer" and entries is not None:
            _check_input_layer(path, family, entries)
    for name in needed_files(path):
        _check_no_pointer(path, name)


def _check_tokenizer(path: Path, tokenizer: str) -> None:
    folder = path / tokenizer
    if not folder.is_dir():
        raise _refused(path, f"has no folder {tokenizer}, which {INDEX} names", AGAIN)
    (_, kind) = read_json(path / INDEX)[tokenizer]
    if kind != BYTES_TOKENIZER and not any((folder / name).exists() for name in VOCABULARIES):
        raise _refused(path, f"has no vocabulary in {tokenizer} (one of {', '.join(VOCABULARIES)})", AGAIN)


def _check_weights(path: Path, part: str) -> dict[str, TensorSpec] | None:
    """Check the files of a part's weights. Return their tensors by name; None if the files are pickled."""
    files = weight_files(path, part)
    if not files:
        raise _without_weights(path, part)
    tensors: dict[str, TensorSpec] = {}
    for name in files:
        file = path / part / name
        if file.is_symlink() and not file.exists():
            raise _refused(path, f"has {part}/{name} as a link to a file that is not there", AGAIN)
        if not file.is_file():
            raise _refused(path, f"lacks {part}/{name}, which the index of {part} names", AGAIN)
        _check_no_pointer(path, f"{part}/{name}")
        if name.endswith(SAFETENSORS):
            try:
                tensors |= tensors_of(file)
            except ValueError as error:
                raise _refused(path, f"has {part}/{name}, which {error}", AGAIN) from None
        elif name.endswith(PICKLED):
            _check_pickled(path, f"{part}/{name}", file)
    if any(name.endswith(PICKLED) for name in files):
        return None
    if missing := sorted(_indexed(path, part).keys() - tensors.keys()):
        raise _refused(
            path, f"has an index of {part} with {missing[0]}, and no file of {part} holds that tensor", AGAIN
        )
    odd = sorted({tensor.dtype for tensor in tensors.values()} - {*PLAIN_DTYPES, *COUNTS})
    if odd:
        raise _refused(
            path,
            f"has weights of {part} in the format {odd[0]}: they are quantised, and spotrl trains unquantised weights",
            "give the folder of the unquantised model",
        )
    return tensors


def tensors_of(file: Path) -> dict[str, TensorSpec]:
    """Return the tensors of a safetensors file by name. Raises ValueError unless the size is what the header says.

    engine/storage/tensor_files.py describes the format.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or 8 + length > size:
            raise ValueError(f"ends in its header: it has {size:,} bytes")
        raw = opened.read(length)
    try:
        entries = {name: entry for name, entry in json.loads(raw).items() if name != "__metadata__"}
        tensors = {name: TensorSpec(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
        whole = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise ValueError("is no file of safetensors") from None
    if size != whole:
        raise ValueError(f"has {size:,} bytes, and its header names {whole:,}")
    if not tensors:
        raise ValueError("holds no tensor")
    return tensors


def _check_input_layer(path: Path, family: str, tensors: Mapping[str, TensorSpec]) -> None:
    """Check that the transformer's weights are those of its configuration, by the first layer."""
    pipeline = PIPELINES[family]
    config = read_json(path / "transformer" / "config.json")
    channels = _channels(path, config, "transformer", "in_channels", pipeline.input_channels)
    layer = tensors.get(pipeline.input_layer)
    if layer is None:
        raise _refused(
            path,
            f"has weights of the transformer without {pipeline.input_layer}, a tensor of every "
            f"{pipeline.parts['transformer']} (the first tensor is {min(tensors, default='none')})",
            AGAIN,
        )
    if len(layer.shape) < 2 or layer.shape[1] != channels * pipeline.input_values:
        raise _refused(
            path,
            f"has {pipeline.input_layer} of shape {list(layer.shape)} in the transformer's weights, and in_channels "
            f"{channels} in its config.json",
            "give the weights and the configuration of one model",
        )


def weight_files(path: Path, part: str) -> list[str]:
    """Return the files that diffusers or transformers loads for a part, an index first. Empty: there are none.

    A file that an index names is returned even if it is not here.
    """
    is_text = part.startswith(("text_encoder", "image_encoder"))
    stem, pickled = ("model", "pytorch_model") if is_text else ("diffusion_pytorch_model",) * 2
    single, index = f"{stem}{SAFETENSORS}", f"{stem}{SAFETENSORS}.index.json"
    # transformers takes the single file first, diffusers the index. diffusers reads no index of pickled files.
    order = [single, index] if is_text else [index, single]
    order += [f"{pickled}{PICKLED}"] + ([f"{pickled}{PICKLED}.index.json"] if is_text else [])
    name = next((name for name in order if (path / part / name).is_symlink() or (path / part / name).exists()), None)
    if name is None:
        return []
    return [name, *sorted(set(_weight_map(path, part, name).values()))] if name.endswith(".json") else [name]


def _weight_map(path: Path, part: str, index: str) -> dict[str, str]:
    content = read_json(path / part / index).get("weight_map")
    if not isinstance(content, dict) or not content or not all(isinstance(name, str) for name in content.values()):
        raise _refused(path, f"has {part}/{index} without a weight_map", AGAIN)
    return content


def _indexed(path: Path, part: str) -> dict[str, str]:
    """Return the file of each tensor that the part's index names. Empty: the weights are one file."""
    files = weight_files(path, part)
    return _weight_map(path, part, files[0]) if files[0].endswith(".json") else {}


def _without_weights(path: Path, part: str) -> FolderError:
    """Return the error for a part without loadable weights, with what lies there instead."""
    folder = path / part
    if not folder.is_dir():
        return _refused(path, f"has no folder {part}, which {INDEX} names", AGAIN)
    names = sorted(file.name for file in folder.iterdir() if file.suffix in WEIGHT_SUFFIXES)
    variants = [(match[1], name) for name in names if (match := VARIANT.fullmatch(name))]
    numbered = [name for name in names if re.search(r"-\d+-of-\d+\.", name)]
    if variants and not (numbered and not VARIANT.fullmatch(numbered[0])):
        variant, name = variants[0]
        return _refused(
            path,
            f"has weights of {part} as the variant {variant} only ({name}), and a run loads files without a variant",
            "download the files without a variant, or rewrite the folder: "
            f'`DiffusionPipeline.from_pretrained(FOLDER, variant="{variant}").save_pretrained(NEW_FOLDER)`',
        )
    if numbered:
        return _refused(path, f"has {part}/{numbered[0]} without the index of the numbered files (.index.json)", AGAIN)
    content = f"only {', '.join(names[:3])}" if names else "no file of weights"
    needed_file = "model.safetensors" if part.startswith("text_encoder") else "diffusion_pytorch_model.safetensors"
    return _refused(path, f"has {content} in {part}, and {needed_file} or its index is needed", AGAIN)


def _check_no_pointer(path: Path, name: str) -> None:
    file = path / name
    try:
        with file.open("rb") as opened:
            head = opened.read(len(LFS_POINTER))
    except OSError as error:
        raise _refused(path, f"has {name}, which cannot be read ({error.strerror})", AGAIN) from None
    if head == LFS_POINTER:
        raise _refused(
            path,
            f"has a pointer of git-lfs in the place of {name}: the clone was made without git-lfs",
            "run `git lfs pull` in the folder, or " + AGAIN,
        )


def _check_pickled(path: Path, name: str, file: Path) -> None:
    """Check that a pickled file is a whole archive, or of the format before torch 1.6."""
    with file.open("rb") as opened:
        head = opened.read(2)
    if head == b"PK" and not zipfile.is_zipfile(file):
        raise _refused(path, f"has {name}, which ends early: its archive has no end", AGAIN)
    if head not in (b"PK", b"\x80\x02"):
        raise _refused(path, f"has {name}, which is no file of torch", AGAIN)


def needed_files(path: Path) -> dict[str, int]:
    """Return the bytes of each file that a run loads from a diffusers folder, by name, in order of the names.

    Files of weights that diffusers does not load (variants, other formats, whole models as single files) are left out.
    """
    index = read_json(path / INDEX)
    parts = [name for name, entry in index.items() if _is_part(entry)]
    sizes = {INDEX: (path / INDEX).stat().st_size}
    for part in parts:
        loaded = weight_files(path, part)
        for file in sorted((path / part).rglob("*")):
            name = file.relative_to(path / part).as_posix()
            is_index = name.endswith(".index.json")
            is_weight = file.suffix in WEIGHT_SUFFIXES or is_index or re.search(r"\.index\.[\w-]+\.json$", name)
            is_hidden = any(place.startswith(".") for place in Path(name).parts)
            if file.is_file() and not is_hidden and (name in loaded or not is_weight):
                sizes[f"{part}/{name}"] = file.stat().st_size
    return dict(sorted(sizes.items()))


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises FolderError."""
    try:
        raw = file.read_bytes()
        if raw.startswith(LFS_POINTER):
            raise FolderError(
                "model.path",
                f"{file} is a pointer of git-lfs: the clone was made without git-lfs",
                f"run `git lfs pull` in the folder, or {AGAIN}",
            )
        content = json.loads(raw.decode("utf-8"))
    except FolderError:
        raise
    except (OSError, ValueError) as error:
        raise FolderError(
            "model.path",
            f"{file} cannot be read ({error})",
            "give the whole diffusers folder that the model was published as",
        ) from None
    if not isinstance(content, dict):
        raise FolderError("model.path", f"{file} holds no JSON object", "download the model again")
    return content


def _is_part(entry: object) -> bool:
    """Return whether an entry of the index names a part: `[LIBRARY, CLASS]`, neither null."""
    return isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2 and all(entry)


def _tokenizer_of(text_encoder: str) -> str:
    return text_encoder.replace("text_encoder", "tokenizer")


def _parts_with_files(family: str) -> Iterator[str]:
    for part in PIPELINES[family].parts:
        yield part
        if part.startswith("text_encoder"):
            yield _tokenizer_of(part)


def _refused(path: Path, fault: str, remedy: str) -> FolderError:
    return FolderError("model.path", f"model.path is {path}, which {fault}", remedy)

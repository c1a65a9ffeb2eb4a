"""Which code made a number: our version and those of the libraries that decide results."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

DECISIVE = ("spotrl", "torch", "diffusers", "transformers", "peft", "ray", "rapidocr", "onnxruntime", "numpy")


@cache
def installed_versions() -> dict[str, str]:
    """Versions by package; what is not installed is left out."""
    found = {}
    for name in DECISIVE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

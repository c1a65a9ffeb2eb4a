"""List the versions behind a result: spotrl and the libraries that influence results."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

DECISIVE = ("spotrl", "torch", "diffusers", "transformers", "peft", "ray", "rapidocr", "onnxruntime", "numpy")


@cache
def installed_versions() -> dict[str, str]:
    """Return versions by package. A package not installed is left out."""
    versions = {}
    for name in DECISIVE:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions

"""The model families that are one file each. A file in this folder with a `FAMILY` is a family; there is no other list.

The older families (qwen-image, sd3, flux, wan, hunyuan-video) have their rows in the tables that read this one.
"""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from engine.family import Family

_ROWS: list[Family] = [import_module(f"{__name__}.{module.name}").FAMILY for module in iter_modules(__path__)]

FAMILIES: Mapping[str, Family] = {family.name: family for family in _ROWS}
"""By `model.name`, in the order of their files."""

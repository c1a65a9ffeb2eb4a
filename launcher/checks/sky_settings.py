"""The user's own SkyPilot configuration: files, read and never written, and the address of the API server."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ENDPOINT = "SKYPILOT_API_SERVER_ENDPOINT"

HERE = ("127.0.0.1", "localhost", "0.0.0.0", "::1")


def configuration_files(environ: Mapping[str, str], folder: Path) -> list[Path]:
    """Return the configuration files that exist: the user's, then the folder's."""
    home = Path(environ.get("HOME", "~")).expanduser()
    files = [
        Path(environ.get("SKYPILOT_GLOBAL_CONFIG", "") or home / ".sky" / "config.yaml"),
        Path(environ.get("SKYPILOT_PROJECT_CONFIG", "") or folder / ".sky.yaml"),
    ]
    return [path.expanduser() for path in files if path.expanduser().is_file()]


def read_configuration(path: Path) -> Any:
    """Return the file as plain Python. Raises YAMLError, OSError or UnicodeDecodeError."""
    from ruamel.yaml import YAML

    return YAML(typ="safe").load(path)


def value_at(values: Any, key: Sequence[str]) -> Any:
    """Return the value at a nested key; None if the key is missing."""
    for part in key:
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def remote_api_server(environ: Mapping[str, str], folder: Path) -> str | None:
    """Return the address of SkyPilot's API server if on another machine, else None. Unreadable files count as empty."""
    from ruamel.yaml.error import YAMLError

    named = environ.get(ENDPOINT, "")
    for path in configuration_files(environ, folder) if not named else ():
        try:
            named = str(value_at(read_configuration(path), ("api_server", "endpoint")) or named)
        except (YAMLError, OSError, UnicodeDecodeError):
            continue
    return named if named and urlsplit(named).hostname not in HERE else None

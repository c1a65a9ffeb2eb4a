"""Models of the Hugging Face hub, in its cache on this machine.

A job may name a model by its hub id (`OWNER/MODEL`) instead of a folder. `launch` downloads the files that diffusers
loads, and the run keeps the folder of that commit in the cache. All other commands only look into the cache.
"""

import json
import re
from pathlib import Path

from launcher.exit_codes import Failure

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_SNAPSHOT = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)/snapshots/(?P<commit>[^/]+)$")

INDEX = "model_index.json"
"""File of a diffusers model that names its parts."""

SECOND_COPIES = "*.fp16.*"
"""Files with the weights of a part again, in half precision: diffusers loads them only if told to."""


class NotFromHub(Failure):
    """The hub or its cache cannot give the model. The message is the reason alone."""


def hub_id(path: str) -> str | None:
    """Return the path if it can be a model's name on the hub: one `/`, and neither `.` nor `/` at its start."""
    return path if _ID.fullmatch(path) else None


def download_command(model: str) -> str:
    """Return the command that downloads a model of the hub into a folder of its own name."""
    return f"hf download {model} --local-dir {model.partition('/')[2]}"


def hub_name(folder: str) -> tuple[str, str] | None:
    """Return the hub id and the commit of a folder of the hub's cache; None for any other folder."""
    match = _SNAPSHOT.search(folder)
    return None if match is None else (f"{match['owner']}/{match['name']}", match["commit"])


def cached_model(model: str) -> Path | None:
    """Return the folder of a model in the hub's cache, without asking the hub."""
    try:
        from huggingface_hub import snapshot_download  # of the extras `engine` and `sky`

        return Path(snapshot_download(model, local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None


def download_model(model: str) -> Path:
    """Download what diffusers loads of a model, unless it is in the cache, and return its folder. Raises NotFromHub."""
    try:
        from huggingface_hub import hf_hub_download, snapshot_download  # of the extras `engine` and `sky`
        from huggingface_hub.errors import GatedRepoError, RemoteEntryNotFoundError, RepositoryNotFoundError
    except ImportError:
        raise NotFromHub("huggingface_hub is not installed here") from None
    try:
        parts = json.loads(Path(hf_hub_download(model, INDEX)).read_text("utf-8"))
        folders = [f"{name}/*" for name, kind in parts.items() if isinstance(kind, list) and all(kind)]
        return Path(snapshot_download(model, allow_patterns=[INDEX, *folders], ignore_patterns=SECOND_COPIES))
    except GatedRepoError:
        raise NotFromHub("the hub asks for an account that has accepted the model's licence: `hf auth login`") from None
    except RepositoryNotFoundError:
        raise NotFromHub("the hub shows no such model to you; if it is private: `hf auth login`") from None
    except RemoteEntryNotFoundError:
        raise NotFromHub(f"the model has no {INDEX}, so diffusers cannot load it") from None
    # RuntimeError: the client of the hub, when it asks again after a lost connection.
    except (OSError, ValueError, RuntimeError) as error:
        raise NotFromHub(f"the hub cannot be reached ({type(error).__name__})") from None

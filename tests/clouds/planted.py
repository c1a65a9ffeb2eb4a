"""Planted secrets: credentials of the client that no host, log, table or report may ever hold.

Each credential gets a unique value. The tests search for it byte by byte: on every host in each file written since its
boot, and here in all files of a run.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from tests.fakes.clouds.world import World

HUGGING_FACE = ".cache/huggingface/token"

SEARCH = r"""
printf '%s\n' "$@" > /run/planted
find / -xdev -type f -newer /etc/hostname -not -path /run/planted -size -200M -print0 2>/dev/null \
  | xargs -0 -r grep -lFf /run/planted 2>/dev/null
grep -lFf /run/planted /proc/[0-9]*/environ 2>/dev/null
rm -f /run/planted
"""
"""Program that prints every file written since boot and every process environment that contains an argument."""


def plant(world: World) -> dict[str, str]:
    """Plant the secrets and return them by location. Credentials still work: the fake clouds check no signature."""
    home = world.folder / "home"
    key, hugging_face = f"PLANTED{secrets.token_hex(12)}", f"hf_{secrets.token_hex(17)}"
    (home / ".aws/credentials").write_text(f"[default]\naws_access_key_id = AKIAFAKE\naws_secret_access_key = {key}\n")
    token = home / HUGGING_FACE
    token.parent.mkdir(parents=True, exist_ok=True)
    token.write_text(hugging_face)
    private = json.loads((home / "gcp-key.json").read_text())["private_key"].splitlines()
    return {"aws credentials": key, "hugging face token": hugging_face, "google key": private[len(private) // 2]}


def planted_in(world: World) -> list[Path]:
    """Return the places where the secrets are allowed."""
    home = world.folder / "home"
    return [home / ".aws/credentials", home / HUGGING_FACE, home / "gcp-key.json"]


def on_host(world: World, node: str, planted: Iterable[str]) -> list[str]:
    """Return the files written since boot and the process environments of a host that contain a secret."""
    return world.on(node, ["sh", "-c", SEARCH, "sh", *planted], root=True, check=False).split()


def holds_token(world: World, node: str, token: str) -> bool:
    """Return whether a file of spotrl on a host, or the environment of one of its processes, has a run's token."""
    search = 'grep -rlsF -- "$1" /home/ubuntu/spotrl /proc/[0-9]*/environ'
    return bool(world.on(node, ["sh", "-c", search, "sh", token], root=True, check=False).strip())


def below(folder: Path, planted: Iterable[str], but: Iterable[Path] = ()) -> list[str]:
    """Return the files below a folder that contain a secret. `but`: files and folders that are not searched."""
    looked_for, left_out = [one.encode() for one in planted], set(but)
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if Path(parent) / name not in left_out]
        for name in names:
            path = Path(parent) / name
            if path in left_out or path.is_symlink():
                continue
            with contextlib.suppress(OSError):  # a socket, or deleted during the search
                content = path.read_bytes()
                found += [str(path) for one in looked_for if one in content]
    return found

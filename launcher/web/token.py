"""The token in the address of `spotrl ui`. It is kept, so that an open page comes back when the server is restarted."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

LENGTH = 32
"""Characters of a token: 24 random bytes in base64."""


def kept_token(path: Path) -> str:
    """Return the token in the file `path`, which only its owner may read. Writes a new one if there is none.

    A file that others may read, or that holds no whole token, is replaced.
    """
    with suppress(OSError):
        if (
            path.stat().st_mode & 0o077 == 0
            and len(kept := path.read_text(encoding="ascii", errors="replace")) == LENGTH
        ):
            return kept
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with open(os.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
        file.write(token := secrets.token_urlsafe(24))
    os.replace(unfinished, path)
    return token

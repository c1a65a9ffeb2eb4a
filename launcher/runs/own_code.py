"""A copy of spotrl itself, from which a controller and all its local child processes run.

    SPOTRL_HOME/code/DIGEST/{catalogs,engine,launcher,sky_yamls,spotrl-VERSION.dist-info}

An upgrade of the package replaces files under a running process. Later imports of the process, and every agent started
by the process, would then have a different version. So a controller keeps the version of its start. The next
controller, started by `spotrl resume`, has the version of the `resume` command. Nodes on clouds run from the run's
bundle.
A copy is named after its contents and is never changed. old_code.py removes the copies that nothing uses any more.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from launcher.provision.sky.bundle import PACKAGES

CODE = "code"


def copies_in(home: Path) -> list[Path]:
    """Return the folders of the whole copies."""
    folder = home / CODE
    return [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.exists() else []


def keep_code(home: Path) -> Path:
    """Return the folder with a copy of the running code, and create the copy if missing. Raises OSError.

    May be killed, and run twice at once.
    """
    folder = home / CODE / _digest()
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent))
    try:
        for package in PACKAGES:
            # Compiled files stay valid because times are copied, so the first start compiles nothing again.
            shutil.copytree(_source(package), part / package)
        info = part / f"spotrl-{version('spotrl')}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: spotrl\nVersion: {version('spotrl')}\n")
        try:
            part.rename(folder)
        except OSError:  # another process was quicker
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def environment_for(code: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which Python finds this copy before the installed package."""
    other_paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != code]
    return {**environ, "PYTHONPATH": os.pathsep.join([str(code), *other_paths])}


def _source(package: str) -> Path:
    return Path(str(files(package)))


def _digest() -> str:
    """Return a digest of the names and contents of all files except compiled files."""
    digest = hashlib.blake2b(version("spotrl").encode(), digest_size=8)
    for package in PACKAGES:
        root = _source(package)
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                content = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
                digest.update(f"{package}/{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()

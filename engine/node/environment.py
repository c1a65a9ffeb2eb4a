"""Keep a node's Python environment in the run's bucket: the first node builds the environment, later nodes fetch it.

    STORE/environments/KEY/.manifest.json    {"parts": {NAME: BYTES}}, written last
    STORE/environments/KEY/NAME              files of the environment (packed_files.py), NAME is the part's digest

    python -m engine.node.environment fetch STORE ENV DIGEST    called by set_up_node.sh, with the bundle's wheel
    python -m engine.node.environment send STORE ENV DIGEST     called by the agent of a node that built

KEY covers the bundle's environment (exact versions, our code), the Python version, the platform and the folder's path,
because scripts in an environment contain the path. Bytecode is included, so that the first import compiles nothing.
The archive lies in the run's own folder of the bucket: nodes of another run can neither read nor replace it.

An archive without a manifest does not count. An archive with a missing or changed part is removed, and the node builds.
Two nodes that send at once are harmless: parts are named by their content, and the first manifest stays.
"""

import contextlib
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from engine.storage.bucket import open_store
from engine.storage.packed_files import Damaged, Unpacking, packed

if TYPE_CHECKING:
    from obstore.store import ObjectStore, RetryConfig

MANIFEST = ".manifest.json"

FORMAT = "1"
"""Version of the archive's format. Another format is another key."""

BUILT = ".built"
"""File in an environment that was built on this machine and not fetched. Such a node sends the environment."""

AT_ONCE = max(2, min(8, 2 * (os.cpu_count() or 1)))
"""Parts fetched in parallel. Each takes up to 150 MB of memory."""

FETCH_SECONDS = 180
"""Longest time of a fetch. Building an environment takes 1 to 4 minutes."""

RETRIES: "RetryConfig" = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}
"""A bucket that does not answer is given up within a minute, and the node builds."""

CODE = ("catalogs", "engine", "launcher", "sky_yamls")
"""Our own packages. All of their modules are compiled before the environment is sent."""


class NoArchive(Exception):
    """The bucket has no usable archive of this environment. The message says why."""


def environment_key(env: Path, digest: str) -> str:
    """Return the name of an environment's archive. `digest`: of the bundle's wheel, lock and set-up (bundle.py)."""
    facts = [FORMAT, digest, str(env), sys.version, sysconfig.get_platform(), *platform.libc_ver()]
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()


def fetch(store_url: str, env: Path, digest: str) -> str:
    """Fill a new environment from its archive, and return the amount in words.

    Files that exist stay. Raises NoArchive; the environment may then be half full. Other errors of the bucket and the
    disk are raised too, with the same meaning.
    """
    import obstore

    began = time.monotonic()
    store = open_store(_place(store_url, env, digest), RETRIES)
    keep = {
        (Path(root) / name).relative_to(env).as_posix()
        for root, folders, files in os.walk(env)
        for name in (*folders, *files)
    }
    try:
        parts = _parts(bytes(obstore.get(store, MANIFEST).bytes()))
    except FileNotFoundError:
        raise NoArchive("the bucket has no archive of this environment yet") from None
    except Damaged as damage:
        _remove(store, MANIFEST)
        raise NoArchive(f"its manifest is damaged ({damage}) and was removed") from None
    unpacking = Unpacking(env, keep)

    def bring(name: str) -> int:
        content = bytes(obstore.get(store, name).bytes())
        if _digest(content) != name:
            _remove(store, name)
            raise Damaged(f"part {name} has another content")
        unpacking.add(content)
        return len(content)

    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            size = sum(pool.map(bring, parts))
    except (Damaged, FileNotFoundError) as damage:
        _remove(store, MANIFEST)
        raise NoArchive(f"the archive is damaged ({damage}) and was removed") from None
    try:
        count = unpacking.finish()
    except FileNotFoundError as error:
        raise NoArchive(f"the archive is of another machine image: {error}") from None
    return f"{count} files, {size >> 20} MiB, {time.monotonic() - began:.1f} s"


def send(store_url: str, env: Path, digest: str) -> str:
    """Put the environment into the run's bucket, unless an archive is there, and return the outcome in words.

    May be killed anywhere, and run on several nodes at once. Raises the bucket's errors, and OSError.
    """
    import obstore
    from obstore.exceptions import AlreadyExistsError

    began = time.monotonic()
    store = open_store(_place(store_url, env, digest), RETRIES)
    if _exists(store, MANIFEST):
        return "the bucket has it already"
    _compile_our_code(env)
    parts: dict[str, int] = {}
    for part in packed(env, _is_of_this_machine):
        name = _digest(part)
        parts[name] = len(part)
        if not _exists(store, name):
            obstore.put(store, name, part)
    try:
        obstore.put(store, MANIFEST, json.dumps({"parts": parts}).encode(), mode="create")
    except AlreadyExistsError:
        return "another node was quicker"
    return f"{sum(parts.values()) >> 20} MiB in {len(parts)} parts, {time.monotonic() - began:.1f} s"


def begin_sending(store_url: str) -> "subprocess.Popen[bytes] | None":
    """Send this machine's environment in a process of low priority, if it was built here. Returns the process."""
    env = Path(sys.prefix)
    try:
        if not (env / BUILT).exists():
            return None
        digest = (env / ".environment").read_text()
        command = [sys.executable, "-P", "-m", "engine.node.environment", "send", store_url, str(env), digest]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"the environment is not sent to the bucket: {error}", flush=True)
        return None


def _place(store_url: str, env: Path, digest: str) -> str:
    return f"{store_url.rstrip('/')}/environments/{environment_key(env, digest)}"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _parts(manifest: bytes) -> Mapping[str, int]:
    try:
        return dict(json.loads(manifest)["parts"])
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged(repr(error)) from None


def _exists(store: "ObjectStore", name: str) -> bool:
    import obstore

    try:
        obstore.head(store, name)
    except FileNotFoundError:
        return False
    return True


def _remove(store: "ObjectStore", name: str) -> None:
    """Remove a damaged object, so that the next node that builds sends another. Errors are ignored."""
    import obstore
    from obstore.exceptions import BaseError

    with contextlib.suppress(BaseError, OSError):
        obstore.delete(store, name)


def _is_of_this_machine(name: str) -> bool:
    """Return whether a name directly in the environment belongs to this machine: settings of the interpreter, marks."""
    return name == "pyvenv.cfg" or name.startswith(".")


def _compile_our_code(env: Path) -> None:
    for site in env.glob("lib/python*/site-packages"):
        folders = [str(site / name) for name in CODE if (site / name).is_dir()]
        subprocess.run([str(env / "bin/python"), "-m", "compileall", "-q", *folders], check=False)


def main() -> int:
    """Fetch or send. Exit code 1: the archive is not there, or was not sent; the output says why."""
    action, store_url, env, digest = sys.argv[1:]
    runs: Callable[[str, Path, str], str] = {"fetch": fetch, "send": send}[action]
    if action == "fetch":
        signal.alarm(FETCH_SECONDS)
    else:
        os.nice(19)
    try:
        print(f"environment: {action}: {runs(store_url, Path(env), digest)}", flush=True)
    except Exception as error:  # whatever it is, the node builds, or works without an archive
        print(f"environment: no {action}: {next(iter(str(error).splitlines()), repr(error))}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Build the bundle sent to every node: our own code as a wheel, its exact package versions, and the job's files.

    TO/DIGEST/  spotrl-VERSION-py3-none-any.whl  node.lock  set_up_node.sh  work/  environment  digest

The digest covers everything, so equal inputs give one bundle on any machine and in any year, and a node set up from a
different bundle is detected. The wheel holds exactly the files that run here, installed or in a checkout.
No secret is sent: names with a leading dot are not sent (credentials, environments and caches live there), and a file
with a private key is refused.
"""

import base64
import hashlib
import io
import os
import shlex
import shutil
import tempfile
import zipfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

from launcher.exit_codes import ExitCode, Failure

REMOTE_BUNDLE = "~/spotrl/bundle"
"""Path of `Bundle.folder` on the node, required before `Bundle.setup` is run."""

PACKAGES = ("catalogs", "engine", "launcher", "sky_yamls")

MOST_BYTES = 200_000_000
"""Largest total size of a job's files. The files are copied to every new node, over the controller's own connection."""

KEY_BYTES = 65_536
"""Largest size in bytes of a file searched for a key: no key is larger."""

LOCK_VARIABLE = "SPOTRL_NODE_LOCK"
"""Environment variable with the path of another node.lock, for an index with other builds than PyPI's (torch without
CUDA, for example)."""

NOT_SENT = frozenset({"__pycache__", "node_modules"})


class WorkdirRefused(Failure):
    """What the user wants to send to nodes cannot be sent: the job's folder, or a lock."""

    exit_code: ClassVar[ExitCode] = ExitCode.INVALID_JOB


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A bundle on this machine.

    `setup` is the shell command that turns a VM with `folder` at REMOTE_BUNDLE into a node.
    """

    folder: Path
    digest: str
    setup: str = f"sh {REMOTE_BUNDLE}/set_up_node.sh"

    def setup_with(self, store: str) -> str:
        """Return the shell command for a node whose run has this bucket (obstore URL)."""
        return f"SPOTRL_STORE={shlex.quote(store)} {self.setup}"


def make_bundle(to: Path, workdir: Path | None, *, sent: Sequence[Path] = (), lock: str | None = None) -> Bundle:
    """Build a bundle below `to`, unless the bundle exists. Safe to be killed, and to be run twice at once.

    `sent`: files and folders to leave out, because nodes get them from the bucket (weights.py). `lock`: text of the
    exact versions with hashes, by default that of `LOCK_VARIABLE` or else of the package. Raises WorkdirRefused.
    """
    to.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=to))
    try:
        work = part / "work"
        work.mkdir()
        if workdir is not None:
            _copy_work(workdir, work, sent)
        (part / _wheel_name()).write_bytes(_wheel())
        (part / "node.lock").write_text(lock or _lock())
        (part / "set_up_node.sh").write_text(files("launcher.provision.sky").joinpath("set_up_node.sh").read_text())
        # The environment has its own digest, so that another prompt file does not reinstall torch.
        environment = _digest(part, part.iterdir())
        digest = _digest(work, work.rglob("*"), environment)
        (part / "environment").write_text(environment)
        (part / "digest").write_text(digest)
        folder = to / digest
        if not folder.exists():
            try:
                part.rename(folder)
            except OSError:  # another process was quicker
                if not folder.exists():
                    raise
        return Bundle(folder=folder, digest=digest)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _lock() -> str:
    path = os.environ.get(LOCK_VARIABLE)
    if path is None:
        return files("engine").joinpath("node.lock").read_text()
    try:
        lock = Path(path).read_text()
    except (OSError, ValueError) as error:
        raise WorkdirRefused(f"{LOCK_VARIABLE} names {path}, which cannot be read: {error}") from None
    for line in lock.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#") and not ("==" in line and "--hash=sha256:" in line):
            raise WorkdirRefused(
                f"{path}, which {LOCK_VARIABLE} names, has `{line.strip()[:80]}`; each package needs an exact version "
                "and a hash, as `uv pip compile --generate-hashes` writes them"
            )
    return lock


def _digest(root: Path, paths: Iterable[Path], *more: str) -> str:
    """Return a digest of the names and contents of the files among `paths`, independent of order, dates and `root`."""
    entries = []
    for path in paths:
        if path.is_file():
            content = hashlib.blake2b(path.read_bytes()).hexdigest()
            entries.append(f"{path.relative_to(root).as_posix()} {path.stat().st_mode & 0o100} {content}")
    return hashlib.blake2b("\n".join([*sorted(entries), *more]).encode(), digest_size=16).hexdigest()


# --- our own wheel --------------------------------------------------------------------------------


def _wheel_name() -> str:
    return f"spotrl-{version('spotrl')}-py3-none-any.whl"


def _wheel() -> bytes:
    """Return the running code as a wheel. Neither a build tool nor a network nor the checkout is needed.

    The wheel declares no dependencies, because node.lock is more exact. The bytes are always the same.
    """
    info = f"spotrl-{version('spotrl')}.dist-info"
    members = dict(_our_files())
    members[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: spotrl\nVersion: {version('spotrl')}\n".encode()
    members[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: spotrl\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = [f"{name},sha256={_record_hash(content)},{len(content)}" for name, content in members.items()]
    members[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for name, content in members.items():
            # Store the file uncompressed, with zip's earliest date: the digest must not depend on the zlib version or
            # the day.
            archive.writestr(zipfile.ZipInfo(name), content)
    return whole.getvalue()


def _our_files() -> Iterator[tuple[str, bytes]]:
    for package in PACKAGES:
        root = Path(str(files(package)))
        for path in sorted(root.rglob("*")):
            inside = path.relative_to(root)
            if path.is_file() and not any(part in NOT_SENT or part.startswith(".") for part in inside.parts):
                yield f"{package}/{inside.as_posix()}", path.read_bytes()


def _record_hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


# --- the job's files ------------------------------------------------------------------------------


def _copy_work(workdir: Path, to: Path, sent: Sequence[Path]) -> None:
    """Copy the job's files. Everything is checked before the first copy."""
    workdir = workdir.resolve()
    if Path.home().resolve().is_relative_to(workdir):
        raise WorkdirRefused(
            f"the job's folder is {workdir}, which holds your whole home folder; all files beside a job are sent to "
            "its nodes: put the job file into a folder of its own, with its prompts and its reward module"
        )
    sizes: dict[str, int] = {}
    paths = list(_work_files(workdir, {path.resolve() for path in sent}))
    for path in paths:
        size = path.stat().st_size
        top = path.relative_to(workdir).parts[0]
        sizes[top] = sizes.get(top, 0) + size
        if size <= KEY_BYTES and b"PRIVATE KEY-----" in path.read_bytes():
            raise WorkdirRefused(
                f"{path} holds a private key, and all files beside a job are sent to its nodes; "
                f"move it out of {workdir}"
            )
    if sum(sizes.values()) > MOST_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise WorkdirRefused(
            f"the job's folder {workdir} has {sum(sizes.values()) / 1e6:,.0f} MB, most of it in {largest} "
            f"({sizes[largest] / 1e6:,.0f} MB), and at most {MOST_BYTES / 1e6:,.0f} MB are sent to every node; "
            "move it elsewhere, or put it into a bucket that the job reads"
        )
    for path in paths:
        target = to / path.relative_to(workdir)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        target.chmod(0o700 if os.access(path, os.X_OK) else 0o600)


def _work_files(folder: Path, sent: Collection[Path]) -> Iterator[Path]:
    """Yield regular files. A link to a file counts as a file. Raises WorkdirRefused for a link to a folder.

    A link to a folder could lead anywhere, even back here.
    """
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry.name in NOT_SENT or entry.resolve() in sent:
            continue
        if entry.is_dir():
            if entry.is_symlink():
                raise WorkdirRefused(
                    f"{entry} is a link to the folder {entry.resolve()}; copy what the job needs of it, or move the "
                    "link out of the job's folder"
                )
            if not (entry / "pyvenv.cfg").exists():  # an environment is created anew on the node
                yield from _work_files(entry, sent)
        elif entry.is_file():
            yield entry

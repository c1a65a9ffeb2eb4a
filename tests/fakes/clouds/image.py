"""The hosts' image and their wheels: built once, kept in a cache folder, and found by a digest of the inputs.

wheels-<digest>/  every package of engine/node.lock, as pip would fetch it for a node, and a node.lock with the hashes
                  of these files (torch is built without CUDA here); mounted read-only on hosts
image-<digest>/   an overlay layer: login users, sshd's settings, SkyPilot's own runtime, the wheels as uv unpacks them,
                  pip and uv that use them

The promise: every folder with such a name is complete. Each is built beside its place and renamed, under a lock, so a
killed build leaves nothing that a later one would use.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from packaging.utils import parse_wheel_filename

from tests.launcher.node_lock import pins_in

CHECKOUT = Path(__file__).resolve().parents[3]
HOST = Path(__file__).resolve().parent / "host"
SYSTEM_PYTHON = Path("/usr/bin/python3")
"""The interpreter of hosts. Their login user cannot read an interpreter in a user's home folder."""

EXTRA_WHEELS = ("uv", "pip", "setuptools", "wheel")
"""Packages that a setup may need beside the lock: uv goes into the image, the others are for `venv --seed`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """The folders of the image and its wheels."""

    layer: Path
    wheels: Path


def cache_folder() -> Path:
    return Path(os.environ.get("FAKE_CLOUDS_CACHE") or Path.home() / ".cache" / "spotrl-fake-clouds")


def baked(cache: Path, log: Callable[[str], None] = lambda _: None) -> Image:
    """Return the image, built if missing (this takes minutes and a package index)."""
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(cache / "lock"):
        _sweep(cache)
        wheels = _made(cache, "wheels", _wheels_key(), lambda to: _make_wheels(to, log))
        layer = _made(cache, "image", _image_key(), lambda to: _make_layer(to, wheels, cache, log))
    return Image(layer=layer, wheels=wheels)


def node_requirements() -> list[str]:
    """Return the requirements of the extra `node`, with those of the package itself."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def requirements(extra: str) -> Iterator[str]:
        for requirement in extras[extra]:
            if requirement.startswith("spotrl["):
                for inner in requirement[len("spotrl[") : -1].split(","):
                    yield from requirements(inner)
            else:
                yield requirement

    return sorted({*project["dependencies"], *requirements("node")})


def _wheels_key() -> str:
    return _digest(*_pins(), *node_requirements(), *EXTRA_WHEELS, _python())


def _pins() -> list[str]:
    return pins_in((CHECKOUT / "engine" / "node.lock").read_text())


def _image_key() -> str:
    scripts = [(HOST / name).read_text() for name in ("assemble.sh", "bake.sh", "keep_bytecode.py")]
    return _digest(*scripts, version("skypilot"), _wheels_key(), _python())


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()


def _python() -> str:
    return subprocess.run([SYSTEM_PYTHON, "-V"], check=True, capture_output=True, text=True).stdout.strip()


def _made(cache: Path, kind: str, key: str, make: Callable[[Path], None]) -> Path:
    place = cache / f"{kind}-{key}"
    if not place.exists():
        part = cache / f"{kind}-{key}.part"
        part.mkdir()
        make(part)
        part.rename(place)
    return place


def _sweep(cache: Path) -> None:
    """Delete the remains of a killed build. The lock is held, so no other build is running."""
    for part in cache.glob("*.part"):
        shutil.rmtree(part)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_wheels(to: Path, log: Callable[[str], None]) -> None:
    log("fetching the wheels of a node")
    with tempfile.TemporaryDirectory() as work:
        requirements = Path(work, "requirements.txt")
        requirements.write_text("\n".join([*node_requirements(), *EXTRA_WHEELS]))
        constraints = Path(work, "constraints.txt")
        constraints.write_text("\n".join(_pins()))
        # `wheel`, not `download`: a node has no compiler, so source archives become wheels here.
        _run(
            [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", to, "-c", constraints, "-r", requirements],
            cwd=work,
        )
    locked = {pin.partition("==")[0] for pin in _pins()}
    with (to / "node.lock").open("w") as lock:
        for wheel in sorted(to.glob("*.whl")):
            name, version_built = parse_wheel_filename(wheel.name)[:2]
            if name in locked:
                digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
                lock.write(f"{name}=={version_built} --hash=sha256:{digest}\n")


def _make_layer(to: Path, wheels: Path, cache: Path, log: Callable[[str], None]) -> None:
    log("baking the hosts' image")
    with tempfile.TemporaryDirectory(dir=cache) as work:
        home = Path(work, "home")
        home.mkdir()
        # The hash in the wheel's name is the same in every build of one installed version, so it can be baked in.
        build = "from sky.backends import wheel_utils; wheel_utils.build_sky_wheel()"
        _run([sys.executable, "-c", build], cwd=work, env=os.environ | {"HOME": str(home)})
        uv = Path(work, "uv")
        with zipfile.ZipFile(next(wheels.glob("uv-*.whl"))) as archive:
            uv.write_bytes(archive.read(next(name for name in archive.namelist() if name.endswith("scripts/uv"))))
        _run(
            ["unshare", "--mount", "bash", HOST / "bake.sh", to, uv, home / ".sky" / "wheels", wheels, CHECKOUT],
            cwd=work,
        )
    shutil.rmtree(to / ".work", ignore_errors=True)


def _run(command: list[str | Path], cwd: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        [str(one) for one in command], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        raise RuntimeError(f"`{' '.join(map(str, command))}` failed:\n{done.stdout.decode(errors='replace')[-4000:]}")

"""The build steps of `Containerfile` work in a clean Debian, without a container engine.

debootstrap makes the root that stands for the base image. Each step runs in it, in mount and process namespaces of its
own, with no variable and no file of this machine but its network settings.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]

BASE = "debian:bookworm-slim"
"""The base image for which `debootstrap --variant=minbase` makes a root."""

NETWORK = (
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/apt/sources.list",
    "/etc/apt/sources.list.d",
    "/etc/apt/apt.conf.d",
    "/etc/ssl/certs/ca-certificates.crt",
    "/usr/local/share/ca-certificates",
    "/etc/pip.conf",
    "/etc/xdg/pip",
)
"""Files of this machine by which it reaches packages."""

MOUNTS = (
    'mount --bind "$0" "$0" && mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" "$@"'
)


def steps(text: str) -> list[tuple[str, str]]:
    """Return instructions and their arguments, without comments. A line that ends with a backslash goes on."""
    joined = text.replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


class Built:
    """A clean root and the state of the build: variables, folder and the program that a container starts."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self.program = root, "/", []
        self.variables = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}

    def follow(self, instruction: str, argument: str) -> None:
        """Carry out one instruction. Raises ValueError for one that this test does not know."""
        match instruction:
            case "FROM":
                assert argument == BASE
            case "RUN":
                done = self.run("sh", "-c", argument)
                assert done.returncode == 0, done.stdout[-4000:]
            case "COPY":
                *sources, target = argument.split()
                (self.root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
                for pattern in sources:
                    files = list(ROOT.glob(pattern))
                    assert files, f"no file is called {pattern}"
                    for file in files:
                        shutil.copy(file, self.root / target.lstrip("/"))
            case "ENV":
                name, _, value = argument.partition("=")
                self.variables[name] = value
            case "WORKDIR":
                self.folder = argument
                (self.root / argument.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "ENTRYPOINT":
                self.program = shlex.split(argument.strip("[]").replace(",", " "))
            case _:
                raise ValueError(
                    f"Containerfile has {instruction}; teach tests/end_to_end/test_container.py to follow it"
                )

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        network = {
            name: value for name, value in os.environ.items() if name.startswith("PIP_") or "proxy" in name.lower()
        }
        inside = [
            "env",
            "-i",
            f"--chdir={self.folder}",
            *(f"{k}={v}" for k, v in {**network, **self.variables}.items()),
        ]
        return subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "sh", "-c", MOUNTS, str(self.root), *inside, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """Build the wheel, then follow the whole file in a clean root."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("a clean root needs root's rights and debootstrap; install it: apt-get install debootstrap")
    root = tmp_path_factory.mktemp("container") / "root"
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(root)], check=True, stdout=subprocess.DEVNULL)
    for name in NETWORK:
        here, there = Path(name), root / name.lstrip("/")
        there.parent.mkdir(parents=True, exist_ok=True)
        if here.is_dir():
            shutil.copytree(here, there, dirs_exist_ok=True)
        elif here.exists():
            shutil.copy(here, there)
    for wheel in (ROOT / "dist").glob("*.whl"):
        wheel.unlink()
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(ROOT / "dist"), str(ROOT)], check=True)
    image = Built(root)
    for instruction, argument in steps((ROOT / "Containerfile").read_text()):
        image.follow(instruction, argument)
    yield image
    shutil.rmtree(root)


def test_the_image_starts_spotrl_and_trains(built):
    (built.root / "work" / "job.yaml").write_text(
        "name: tiny\ninfra: local\nmodel: shapes\nprompts: shapes\nreward: shapes\niterations: 1\n"
        "algorithm: {prompts_per_batch: 2, images_per_prompt: 2}\nevaluation: {prompts: 4}\nbudget: {max_total: $5}\n"
    )
    done = built.run(*built.program, "launch", "job.yaml", "--yes", "--on-exit", "down")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "tiny finished (iterations)" in done.stdout


def test_the_image_has_what_clouds_and_the_web_view_need(built):
    done = built.run("python", "-c", "import sky, boto3, uvicorn; print('all')")
    assert done.stdout.splitlines()[-1:] == ["all"], done.stdout[-4000:]


def test_instructions_that_go_on_in_the_next_line_are_one():
    assert steps("# a\nRUN a \\\n  b\n\nENV A=b c\n") == [("RUN", "a    b"), ("ENV", "A=b c")]

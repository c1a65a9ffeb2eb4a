"""The bundle that is sent to nodes, and its setup in a temporary home folder."""

import hashlib
import os
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from importlib.metadata import files, version
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from engine.node.environment import environment_key
from launcher.provision.sky import bundle as bundles
from launcher.provision.sky.bundle import Bundle, WorkdirRefused, make_bundle
from tests.launcher.node_lock import node_pins, pins_in

ROOT = Path(__file__).parents[3]

UV = """#!/bin/sh
# A uv of ours: what the set-up asks of it, done with pip.
pip="$REAL_PYTHON -m pip --quiet --python"
case "$1 $2" in
"venv --quiet") for env; do :; done; exec "$REAL_PYTHON" -m venv --without-pip "$env" ;;
"pip install") [ "$3 $4" = "--quiet --python" ] || exit 9; on=$5; shift 5; exec $pip "$on" install "$@" ;;
esac
exit 9
"""


class Instance:
    """An instance: a home folder, and small wheels in place of those in node.lock. No network, no torch."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        self.bin = folder / "bin"
        self.bin.mkdir()
        for program in ("sh", "cat", "date", "mkdir", "mv", "rm", "cp", "flock"):
            (self.bin / program).symlink_to(str(shutil.which(program)))
        (self.home / "spotrl").mkdir()
        self.pinned = self.write_wheel("pinned", "1.0")

    def write_wheel(self, name: str, version: str) -> str:
        """Write a wheel, and return its line of a lock."""
        info = f"{name}-{version}.dist-info"
        path = self.wheels / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"{name}.py", f"version = {version!r}\n")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        return f"{name}=={version} {hash_of(path)}\n"

    def has_python(self) -> "Instance":
        # A script, because a link to an environment's interpreter is not that environment.
        python = self.bin / "python3.11"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return self

    def has_uv(self) -> "Instance":
        uv = self.home / ".local/bin/uv"
        uv.parent.mkdir(parents=True)
        uv.write_text(UV)
        uv.chmod(0o755)
        return self

    def send(self, bundle: Bundle) -> None:
        shutil.copytree(bundle.folder, self.home / "spotrl/bundle", dirs_exist_ok=True)

    def write_obstore(self) -> str:
        """Pack the installed obstore into a wheel, and return its line of a lock."""
        path = self.wheels / f"obstore-{version('obstore')}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            for file in files("obstore") or ():
                if file.suffix != ".pyc":
                    content = file.locate().read_bytes()
                    if file.name == "METADATA":  # typing-extensions is needed by type checkers only
                        content = b"".join(row for row in content.splitlines(True) if b"Requires-Dist" not in row)
                    wheel.writestr(file.as_posix(), content)
        return f"obstore=={version('obstore')} \\\n    {hash_of(path)}\n"

    def start(self, bundle: Bundle, store: str = "") -> "subprocess.Popen[str]":
        environment = {
            "HOME": str(self.home),
            "PATH": str(self.bin),
            "REAL_PYTHON": sys.executable,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
        }
        return subprocess.Popen(
            ["/bin/sh", "-c", bundle.setup_with(store)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def set_up(self, bundle: Bundle, exit_code: int = 0, store: str = "") -> str:
        self.send(bundle)
        process = self.start(bundle, store)
        out = process.communicate(timeout=240)[0]
        assert process.returncode == exit_code, out
        return out

    @property
    def env(self) -> Path:
        return self.home / "spotrl/env"

    def send_environment(self, bundle: Bundle, store: str) -> str:
        """Send the environment to the bucket, like the agent of a node that built."""
        digest = (bundle.folder / "environment").read_text()
        command = [str(self.env / "bin/python"), "-m", "engine.node.environment", "send", store, str(self.env), digest]
        return subprocess.run(command, cwd=self.home, check=True, capture_output=True, text=True).stdout

    def python(self, code: str) -> str:
        command = [str(self.env / "bin/python"), "-c", code]
        return subprocess.run(command, cwd=self.home, check=True, capture_output=True, text=True).stdout.strip()


def hash_of(wheel: Path) -> str:
    """Return the option of a lock that names a file's hash."""
    return f"--hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    return Instance(tmp_path)


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    (folder / "mine").mkdir(parents=True)
    (folder / "job.yaml").write_text("name: x\n")
    (folder / "prompts.txt").write_text("1234\n")
    (folder / "mine/reward.py").write_text("def score(pictures, prompts): ...\n")
    return folder


def bundle_of(tmp_path: Path, workdir: Path | None, lock: str = "pinned==1.0\n") -> Bundle:
    return make_bundle(tmp_path / "bundles", workdir, lock=lock)


def sent(bundle: Bundle) -> set[str]:
    work = bundle.folder / "work"
    return {path.relative_to(work).as_posix() for path in work.rglob("*") if path.is_file()}


# --- the lock -------------------------------------------------------------------------------------


def test_node_lock_is_what_the_tests_run_with():
    """Beside it are only what torch needs for CUDA, and what Windows needs."""
    locked, pins = pins_in((ROOT / "engine/node.lock").read_text()), node_pins()
    assert [pin for pin in locked if pin in pins] == pins, "python -m tests.launcher.node_lock > engine/node.lock"
    for_cuda = tuple(f"{name}==" for name in ("colorama", "cuda-bindings", "cuda-pathfinder", "cuda-toolkit", "triton"))
    assert not [pin for pin in locked if pin not in pins and not pin.startswith(("nvidia-", *for_cuda))]


def test_every_package_of_node_lock_has_hashes():
    requirements = (ROOT / "engine/node.lock").read_text().replace("\\\n", " ").splitlines()[2:]
    assert len(requirements) == len(pins_in("\n".join(requirements))) > 80
    assert all(" --hash=sha256:" in requirement for requirement in requirements)


def test_node_lock_is_a_part_of_versions_lock():
    everything = {canonical(pin) for pin in pins_in((ROOT / "engine/versions.lock").read_text())}
    left = {
        pin for pin in node_pins() if pin not in everything and not pin.startswith("setuptools==")
    }  # pip lists it not
    assert not left
    assert {"torch==2.13.0", "ray==2.60.0"} <= set(node_pins())


def canonical(pin: str) -> str:
    name, _, version = pin.partition("==")
    return f"{canonicalize_name(name)}=={version}"


def test_a_node_gets_neither_a_cloud_sdk_nor_skypilot():
    names = {pin.partition("==")[0] for pin in pins_in((ROOT / "engine/node.lock").read_text())}
    assert not names & {"boto3", "botocore", "google-cloud-compute", "google-auth", "skypilot", "pytest", "moto"}


def test_a_variable_names_another_lock(tmp_path, monkeypatch):
    lock = tmp_path / "cpu.lock"
    monkeypatch.setenv("SPOTRL_NODE_LOCK", str(lock))
    lock.write_text(f"# ours\ntorch==2.13.0+cpu \\\n    --hash=sha256:{'0' * 64}\n")
    assert (make_bundle(tmp_path / "bundles", None).folder / "node.lock").read_text() == lock.read_text()


@pytest.mark.parametrize(
    "line", ["torch==2.13.0", f"torch --hash=sha256:{'0' * 64}", "--index-url https://example.org"]
)
def test_another_lock_without_version_or_hash_is_refused(tmp_path, monkeypatch, line):
    lock = tmp_path / "cpu.lock"
    lock.write_text(f"six==1.17.0 --hash=sha256:{'0' * 64}\n{line}\n")
    monkeypatch.setenv("SPOTRL_NODE_LOCK", str(lock))
    with pytest.raises(WorkdirRefused, match="each package needs an exact version and a hash") as refused:
        make_bundle(tmp_path / "bundles", None)
    assert f"`{line[:80]}`" in str(refused.value)


def test_another_lock_that_is_missing_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTRL_NODE_LOCK", str(tmp_path / "none.lock"))
    with pytest.raises(WorkdirRefused, match=r"SPOTRL_NODE_LOCK names .*none.lock, which cannot be read"):
        make_bundle(tmp_path / "bundles", None)


# --- the bundle -----------------------------------------------------------------------------------


def test_a_model_beside_the_job_is_not_bundled(tmp_path, workdir):
    before = bundle_of(tmp_path, workdir)
    (workdir / "models" / "large").mkdir(parents=True)
    (workdir / "models" / "large" / "model.safetensors").write_bytes(b"x")
    (workdir / "models" / "notes.txt").write_text("ours")
    with_model = make_bundle(tmp_path / "bundles", workdir, sent=[workdir / "models" / "large"], lock="pinned==1.0\n")
    assert sent(with_model) == sent(before) | {"models/notes.txt"}


def test_equal_inputs_give_the_same_bundle(tmp_path, workdir):
    one = bundle_of(tmp_path, workdir)
    os.utime(workdir / "prompts.txt", (0, 0))
    assert bundle_of(tmp_path, workdir) == one
    assert make_bundle(tmp_path / "elsewhere", workdir, lock="pinned==1.0\n").digest == one.digest
    assert [path.name for path in (tmp_path / "bundles").iterdir()] == [one.digest]


@pytest.mark.parametrize("change", ["content", "name", "folder", "mode", "lock"])
def test_any_change_gives_another_bundle(tmp_path, workdir, change):
    one, lock = bundle_of(tmp_path, workdir), "pinned==1.0\n"
    match change:
        case "content":
            (workdir / "prompts.txt").write_text("1235\n")
        case "name":
            (workdir / "prompts.txt").rename(workdir / "texts.txt")
        case "folder":
            (workdir / "mine").rename(workdir / "yours")
        case "mode":
            (workdir / "prompts.txt").chmod(0o755)
        case "lock":
            lock = "pinned==1.1\n"
    assert bundle_of(tmp_path, workdir, lock).digest != one.digest


def test_our_wheel_is_intact_and_holds_the_needed_files(tmp_path):
    (wheel,) = bundle_of(tmp_path, None).folder.glob("spotrl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert archive.testzip() is None
        assert archive.read("engine/node.lock") == (ROOT / "engine/node.lock").read_bytes()
    assert {"engine/node/agent.py", "engine/node/remote_console.py", "launcher/provision/sky/set_up_node.sh"} <= set(
        names
    )
    assert any(name.endswith(".safetensors") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]


def test_our_wheel_has_all_our_packages():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    # Nodes and controllers do not use the public interface.
    assert sorted([*bundles.PACKAGES, "spotrl"]) == sorted(pattern.rstrip("*") for pattern in patterns)


def test_dotfiles_are_not_bundled(tmp_path, workdir):
    for name in (".env", ".aws/credentials", ".git/config", ".venv/x.py", "mine/__pycache__/reward.pyc"):
        (workdir / name).parent.mkdir(exist_ok=True)
        (workdir / name).write_text("secret")
    (workdir / "environment/lib").mkdir(parents=True)
    (workdir / "environment/pyvenv.cfg").write_text("")
    (workdir / "environment/lib/torch.py").write_text("")
    assert sent(bundle_of(tmp_path, workdir)) == {"job.yaml", "prompts.txt", "mine/reward.py"}


def test_only_its_owner_can_read_the_bundle(tmp_path, workdir):
    bundle = bundle_of(tmp_path, workdir)
    assert (tmp_path / "bundles").stat().st_mode & 0o077 == 0
    assert (bundle.folder / "work/prompts.txt").stat().st_mode & 0o077 == 0


def test_a_link_to_a_file_is_bundled_as_the_file(tmp_path, workdir):
    (tmp_path / "far.txt").write_text("far")
    (workdir / "near.txt").symlink_to(tmp_path / "far.txt")
    copied = bundle_of(tmp_path, workdir).folder / "work/near.txt"
    assert copied.read_text() == "far"
    assert not copied.is_symlink()


def test_a_link_to_a_folder_is_refused_by_name(tmp_path, workdir):
    (workdir / "loop").symlink_to(workdir)
    with pytest.raises(WorkdirRefused, match="loop is a link"):
        bundle_of(tmp_path, workdir)
    assert not list((tmp_path / "bundles").iterdir())


@pytest.mark.parametrize("before", [0, 4000])
def test_a_private_key_is_refused_by_name(tmp_path, workdir, before):
    text = '{"private_key": "-----BEGIN PRIVATE KEY-----\\nMII"}'
    (workdir / "robot.json").write_text(" " * before + text)
    with pytest.raises(WorkdirRefused, match=r"robot\.json holds a private key"):
        bundle_of(tmp_path, workdir)


def test_a_home_folder_is_refused(tmp_path, workdir, monkeypatch):
    monkeypatch.setenv("HOME", str(workdir / "mine"))
    with pytest.raises(WorkdirRefused, match="whole home folder"):
        bundle_of(tmp_path, workdir)


def test_a_large_folder_is_refused_by_name(tmp_path, workdir):
    (workdir / "pictures").mkdir()
    with (workdir / "pictures/all.bin").open("wb") as file:
        file.truncate(bundles.MOST_BYTES + 1)  # a sparse file takes no disk space
    with pytest.raises(WorkdirRefused, match=r"most of it in pictures \(200 MB\).*at most 200 MB"):
        bundle_of(tmp_path, workdir)


@pytest.mark.slow
def test_an_installed_wheel_and_its_checkout_make_the_same_bundle(tmp_path):
    """A user without a checkout launches the same code."""
    bundle = bundle_of(tmp_path, None)
    (wheel,) = bundle.folder.glob("spotrl-*.whl")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(wheel)], check=True)
    code = f"""
import launcher
from pathlib import Path
from launcher.provision.sky.bundle import make_bundle
print(launcher.__file__, make_bundle(Path({str(tmp_path / "theirs")!r}), None, lock="pinned==1.0\\n").digest)
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-P", "-c", code]
    out = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout
    assert out.split() == [str(tmp_path / "site/launcher/__init__.py"), bundle.digest]


# --- the setup ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_setup_makes_a_node_and_its_second_run_does_nothing(tmp_path, instance, workdir):
    bundle = bundle_of(tmp_path, workdir, instance.pinned)
    instance.has_python().set_up(bundle)
    assert (instance.env / ".digest").read_text() == bundle.digest
    assert instance.python("import pinned, engine.clock; print(pinned.version)") == "1.0"
    assert (instance.home / "spotrl/work/mine/reward.py").exists()
    (instance.env / "witness").touch()
    assert "there already" in instance.set_up(bundle)
    assert (instance.env / "witness").exists()


@pytest.mark.slow
def test_another_prompt_file_causes_no_new_installation(tmp_path, instance, workdir):
    instance.has_uv().set_up(bundle_of(tmp_path, workdir, instance.pinned))
    (instance.env / "witness").touch()
    (workdir / "prompts.txt").write_text("9876\n")
    bundle = bundle_of(tmp_path, workdir, instance.pinned)
    assert "the environment is there already" in instance.set_up(bundle)
    assert (instance.env / "witness").exists()
    assert (instance.home / "spotrl/work/prompts.txt").read_text() == "9876\n"
    assert (instance.env / ".digest").read_text() == bundle.digest


@pytest.mark.slow
def test_an_existing_uv_is_used_and_another_lock_makes_a_new_environment(tmp_path, instance):
    instance.has_uv().set_up(bundle_of(tmp_path, None, instance.pinned))
    assert instance.python("import pinned; print(pinned.version)") == "1.0"
    pinned = instance.write_wheel("pinned", "2.0")
    (instance.env / "witness").touch()
    instance.set_up(bundle_of(tmp_path, None, pinned))
    assert instance.python("import pinned; print(pinned.version)") == "2.0"
    assert not (instance.env / "witness").exists()


@pytest.mark.slow
def test_a_killed_setup_is_repeated_and_two_at_once_install_once(tmp_path, instance):
    bundle = bundle_of(tmp_path, None, instance.pinned)
    instance.has_python().send(bundle)
    first = instance.start(bundle)
    until = time.monotonic() + 120
    while not (instance.env / "bin").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    os.killpg(first.pid, 9)
    first.communicate()
    assert not (instance.env / ".digest").exists()
    two = [instance.start(bundle), instance.start(bundle)]
    last_lines = sorted(process.communicate(timeout=240)[0].splitlines()[-1] for process in two)
    assert [process.returncode for process in two] == [0, 0], last_lines
    assert "done" in last_lines[0] + last_lines[1]
    assert sum("there already" in line for line in last_lines) == 1
    assert instance.python("import pinned; print(pinned.version)") == "1.0"


@pytest.mark.slow
def test_a_lock_that_cannot_be_installed_fails_clearly_and_leaves_no_digest(tmp_path, instance):
    out = instance.has_uv().set_up(bundle_of(tmp_path, None, instance.pinned.replace("1.0", "7.7")), exit_code=1)
    assert "No matching distribution found for pinned==7.7" in out
    assert "while what node.lock names was installed" in out.splitlines()[-1]
    assert not (instance.env / ".digest").exists()


@pytest.mark.parametrize("has", [Instance.has_uv, Instance.has_python])
@pytest.mark.slow
def test_a_file_with_another_hash_than_the_locks_is_not_installed(tmp_path, instance, has):
    locked = instance.pinned
    with zipfile.ZipFile(instance.wheels / "pinned-1.0-py3-none-any.whl", "a") as wheel:
        wheel.writestr("pinned.pth", "import os")
    out = has(instance).set_up(bundle_of(tmp_path, None, locked), exit_code=1)
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in out
    assert not list(instance.env.glob("lib/python*/site-packages/pinned*"))
    assert not (instance.env / ".digest").exists()


@pytest.mark.slow
def test_the_client_of_buckets_is_fetched_with_its_hash(tmp_path, instance):
    lock = instance.pinned + instance.write_obstore()
    with zipfile.ZipFile(next(instance.wheels.glob("obstore-*")), "a") as wheel:
        wheel.writestr("obstore.pth", "import os")
    store = (tmp_path / "bucket").as_uri()
    out = instance.has_uv().set_up(bundle_of(tmp_path, None, lock), store=store, exit_code=1)
    assert out.count("THESE PACKAGES DO NOT MATCH THE HASHES") == 2, "in the fetch, and when the environment is built"


@pytest.mark.slow
def test_the_first_node_builds_the_environment_and_the_second_fetches_it(tmp_path, instance):
    store = (tmp_path / "bucket").as_uri()
    bundle = bundle_of(tmp_path, None, instance.pinned + instance.write_obstore())
    out = instance.has_uv().set_up(bundle, store=store)
    assert "no archive of this environment yet" in out
    assert "installing what node.lock names" in out
    assert (instance.env / ".built").exists()
    assert "environment: send: " in instance.send_environment(bundle, store)
    shutil.rmtree(instance.env)
    (instance.wheels / "pinned-1.0-py3-none-any.whl").unlink()
    out = instance.set_up(bundle, store=store)
    assert f"the environment was fetched from {store}" in out
    assert not (instance.env / ".built").exists()
    assert instance.python("import pinned, engine.clock; print(pinned.version)") == "1.0"
    ours = next(instance.env.glob("lib/python*/site-packages/engine/__pycache__"))
    assert any(path.name.startswith("config.") for path in ours.iterdir()), "our code is compiled"


@pytest.mark.slow
def test_a_node_builds_if_the_archive_is_damaged(tmp_path, instance):
    bundle = bundle_of(tmp_path, None, instance.pinned + instance.write_obstore())
    key = environment_key(instance.env, (bundle.folder / "environment").read_text())
    manifest = tmp_path / "bucket/environments" / key / ".manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"parts": {"0123')
    out = instance.has_uv().set_up(bundle, store=(tmp_path / "bucket").as_uri())
    assert "manifest is damaged" in out
    assert "installing what node.lock names" in out
    assert instance.python("import pinned; print(pinned.version)") == "1.0"
    assert not manifest.exists()


def test_an_image_without_python_is_refused_with_what_is_missing(tmp_path, instance):
    out = instance.set_up(bundle_of(tmp_path, None), exit_code=1)
    assert "neither uv nor Python 3.11" in out.splitlines()[-1]


def test_the_digest_of_a_bundle_does_not_depend_on_its_zip(tmp_path):
    """The wheel stores its files uncompressed with a fixed date, so its bytes depend only on the code."""
    (one,) = bundle_of(tmp_path / "a", None).folder.glob("*.whl")
    (two,) = bundle_of(tmp_path / "b", None).folder.glob("*.whl")
    assert hashlib.sha256(one.read_bytes()).digest() == hashlib.sha256(two.read_bytes()).digest()

"""Reading the setup of an instance through a real sshd on loopback."""

import os
import pwd
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from launcher.provision.sky.set_up import InstanceUnreachable, ask_set_up, begin_set_up
from tests.engine.fleet import free_port
from tests.launcher.cluster.sshd import Sshd, through_proxy, why_no_sshd

pytestmark = pytest.mark.skipif(why_no_sshd() is not None, reason=str(why_no_sshd()))


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("machine") / "sshd")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def set_up_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sshd, Path]]:
    """Start an instance with an environment in its home folder."""
    home = tmp_path_factory.mktemp("home")
    (home / "spotrl" / "env").mkdir(parents=True)
    (home / "spotrl" / "env" / ".digest").write_text("0123abcd\n")
    server = Sshd(tmp_path_factory.mktemp("machine") / "sshd", environment={"HOME": str(home)})
    yield server, home
    server.stop()


def test_an_instance_without_a_setup_reports_only_its_home_folder(sshd):
    found = ask_set_up(sshd.login)
    assert found.home == pwd.getpwuid(os.getuid()).pw_dir
    assert found.digest == ""


def test_an_instance_reports_the_digest_of_its_setup(set_up_home):
    server, home = set_up_home
    found = ask_set_up(server.login)
    assert (found.home, found.digest) == (str(home), "0123abcd")


def test_a_setup_is_started_in_the_background_and_its_end_is_read(tmp_path):
    home = tmp_path / "home"
    (home / "spotrl/bundle/old").mkdir(parents=True)
    (tmp_path / "bundle/work").mkdir(parents=True)
    (tmp_path / "bundle/work/prompts.txt").write_text("1234")
    server = Sshd(tmp_path / "sshd", environment={"HOME": str(home)})
    begin = partial(begin_set_up, server.login, tmp_path / "bundle")
    try:
        begin("echo started; while [ ! -e go ]; do sleep 0.02; done; echo 'no space left'; (exit 3)")
        waiting = until(lambda: ask_set_up(server.login), lambda found: found.log == "started")
        assert (waiting.exit_code, waiting.digest) == (None, "")
        (home / "spotrl/go").touch()
        ended = until(lambda: ask_set_up(server.login), lambda found: found.exit_code is not None)
        assert (ended.exit_code, ended.log) == (3, "started\nno space left")
        assert (home / "spotrl/bundle/work/prompts.txt").read_text() == "1234"
        assert not (home / "spotrl/bundle/old").exists()
        begin("mkdir -p env; printf abc >env/.digest")
        ended = until(lambda: ask_set_up(server.login), lambda found: found.exit_code == 0)
        assert (ended.digest, ended.log) == ("abc", "")
    finally:
        server.stop()


def until(look, holds, seconds=120.0):
    end = time.monotonic() + seconds
    while not holds(found := look()):
        assert time.monotonic() < end, found
    return found


def test_an_instance_behind_a_proxy_is_read_through_the_proxy(set_up_home, tmp_path):
    server, _ = set_up_home
    login, log = through_proxy(server.login, tmp_path)
    assert ask_set_up(login).digest == "0123abcd"
    assert log.read_text() == "node.invalid 22\n"


def test_an_unreachable_instance_is_reported_with_the_error_of_ssh(sshd):
    with pytest.raises(InstanceUnreachable, match="refused"):
        ask_set_up(replace(sshd.login, port=free_port()))


def test_a_wrong_key_is_refused(sshd, set_up_home):
    wrong_login = replace(sshd.login, key=set_up_home[0].login.key)
    with pytest.raises(InstanceUnreachable, match="Permission denied"):
        ask_set_up(wrong_login)

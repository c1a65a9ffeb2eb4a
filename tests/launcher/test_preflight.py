from pathlib import Path

import pytest

from launcher.checks import preflight as preflight_module
from launcher.checks.preflight import check_disk, check_platform, check_secrets, preflight
from launcher.cli.main import run
from launcher.exit_codes import ExitCode, Failure
from launcher.job.checked import JobError
from launcher.job.load import load_job
from launcher.settings import config_path, home, ledger_path

ANSWER = '{"field": "reward", "found": "it raised", "remedy": "mend it"}'


def test_a_secret_that_is_not_set_here_is_reported_before_the_launch(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("seed: 1\nsecrets: [HF_TOKEN]\n")
    checked = load_job(path)
    check_secrets(checked, {"HF_TOKEN": "x"})
    with pytest.raises(JobError, match=r"line 2: secrets names HF_TOKEN, which is not set here; export HF_TOKEN"):
        check_secrets(checked, {"HF_TOKEN": ""})


def test_a_local_run_on_another_system_than_linux_is_refused():
    check_platform("linux")
    with pytest.raises(
        Failure, match=r"needs Linux, and this is darwin: .*memfd_create.*; use a Linux machine, or clouds"
    ):
        check_platform("darwin")


def test_a_full_disk_is_noticed_before_the_first_checkpoint(tmp_path, monkeypatch):
    check_disk(tmp_path / "not" / "made" / "yet")
    monkeypatch.setattr(preflight_module, "FREE_BYTES", 1 << 60)
    with pytest.raises(Failure, match="SPOTRL_HOME"):
        check_disk(tmp_path)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f"print('noise'); print({ANSWER!r}); exit(3)", "mend it"),
        ("import sys; print('a last word', file=sys.stderr); exit(1)", "a last word"),
        ("print('no json')", "could not check the job"),
    ],
)
def test_every_bad_answer_of_the_engine_is_one_clear_error(tmp_path, monkeypatch, script, words):
    path = tmp_path / "job.yaml"
    path.write_text("reward: my_reward:score\n")
    fake = tmp_path / "python"
    fake.write_text(f"#!/usr/bin/env python3\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(preflight_module.sys, "executable", str(fake))
    with pytest.raises(Failure) as caught:
        preflight(load_job(path), tmp_path)
    assert words in str(caught.value)


def engine_that_runs(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a script in place of the engine's process."""
    fake = tmp_path / "python"
    fake.write_text(f"#!/usr/bin/env python3\nimport json, time\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(preflight_module.sys, "executable", str(fake))


def test_the_engine_tells_what_it_is_doing_while_it_checks(tmp_path, monkeypatch):
    script = "print(json.dumps({'progress': 'loading'})); print('of a reward'); print(json.dumps({'ok': True}))"
    engine_that_runs(script, tmp_path, monkeypatch)
    path = tmp_path / "job.yaml"
    path.write_text("seed: 1\n")
    news = []
    assert preflight(load_job(path), tmp_path, say=news.append) == {"ok": True}
    assert news == ["loading"]


def test_an_engine_that_does_not_answer_is_ended(tmp_path, monkeypatch):
    engine_that_runs("time.sleep(60)", tmp_path, monkeypatch)
    monkeypatch.setattr(preflight_module, "ENGINE_SECONDS", 0.2)
    path = tmp_path / "job.yaml"
    path.write_text("seed: 1\n")
    with pytest.raises(JobError, match=r"the engine took more than 0\.2 s"):
        preflight(load_job(path), tmp_path)


def test_a_reward_that_raises_ends_with_code_3_and_names_its_line(tmp_path, monkeypatch, capsys, forked_engine):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "none.yaml"))
    (tmp_path / "my_reward.py").write_text("def score(pictures, prompts):\n    return [1 / 0]\n")
    (tmp_path / "job.yaml").write_text("name: mine\nreward: my_reward:score\n")
    assert run(["launch", str(tmp_path / "job.yaml"), "-y"]) == ExitCode.INVALID_JOB
    error = capsys.readouterr().err
    assert "job.yaml, line 2:" in error
    assert "ZeroDivisionError" in error
    assert not (tmp_path / "home" / "runs").exists()


@pytest.mark.parametrize(("returned", "words"), [("float('nan')", "not finite"), ("exit(3)", "called sys.exit(3)")])
def test_a_reward_that_returns_no_number_is_refused(tmp_path, monkeypatch, capsys, forked_engine, returned, words):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "none.yaml"))
    (tmp_path / "no_number.py").write_text(f"def score(pictures, prompts):\n    return [{returned}]\n")
    (tmp_path / "job.yaml").write_text("name: mine\nreward: no_number:score\n")
    assert run(["launch", str(tmp_path / "job.yaml"), "-y"]) == ExitCode.INVALID_JOB
    assert words in capsys.readouterr().err


def test_spotrl_home_sets_the_folder_of_all_files(monkeypatch, tmp_path):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "here"))
    monkeypatch.setenv("SPOTRL_CONFIG", "relative.yaml")
    assert home() == tmp_path / "here"
    assert ledger_path().parent == home()
    assert config_path() == Path.cwd() / "relative.yaml"
    for name in ("SPOTRL_HOME", "SPOTRL_CONFIG"):  # of a script whose variable is not set
        monkeypatch.setenv(name, "")
    assert home() != Path.cwd()
    assert config_path().name == "config.yaml"


def test_a_run_of_a_lost_ledger_is_not_continued_by_a_new_ledger(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "none.yaml"))
    (tmp_path / "job.yaml").write_text("name: mine\n")
    (tmp_path / "home" / "runs" / "mine" / "store" / "checkpoints").mkdir(parents=True)
    assert run(["launch", str(tmp_path / "job.yaml"), "-y"]) == ExitCode.INVALID_JOB
    error = capsys.readouterr().err
    assert "holds checkpoints of an earlier run called mine" in error
    assert "--name mine-2" in error

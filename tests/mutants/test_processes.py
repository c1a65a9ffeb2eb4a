"""Bugs are planted in processes by one variable of the environment, and in no process without it."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.mutants.process_plugin import VARIABLE, planted_in, without_bugs
from tests.mutants.process_runs import ROOT
from tests.mutants.processes import BUGS, PROCESSES

PRODUCT = ("engine", "launcher", "spotrl", "catalogs", "sky_yamls")

CHEAPEST = ("two_guards_of_a_folder", "console_outlives_a_silent_launcher", "on_demand_node_polls_for_a_notice")

SAY_MODULE = "import engine.node.alone as alone; print(alone.LAST_CONTACT, flush=True)"


@pytest.fixture
def planted(tmp_path):
    """Return the environment that plants a bug into `engine.node.alone`."""
    bugs = tmp_path / "bugs.json"
    edit = {"module": "engine.node.alone", "old": 'LAST_CONTACT = "heard"', "new": 'LAST_CONTACT = "planted"'}
    bugs.write_text(json.dumps([edit]))
    return planted_in(os.environ, bugs)


def say(environment, code=SAY_MODULE, *words):
    done = subprocess.run(
        [sys.executable, *words, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_the_catalogue_has_bugs_of_every_process():
    assert len(BUGS) >= 25
    assert {bug.process for bug in BUGS.values()} <= set(PROCESSES)
    assert len({bug.process for bug in BUGS.values()}) >= 8
    assert sum(bug.chosen_by_reader for bug in BUGS.values()) >= 5


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_changes_one_place_and_the_module_still_compiles(name):
    bug = BUGS[name]
    source = bug.file.read_text()
    assert source.count(bug.old) == 1
    assert bug.new != bug.old
    compile(source.replace(bug.old, bug.new), str(bug.file), "exec")


@pytest.mark.parametrize("name", BUGS)
def test_the_tests_of_a_bug_exist(name):
    bug = BUGS[name]
    for test in bug.found_by:
        file, _, case = test.partition("::")
        assert f"def {case.partition('[')[0]}(" in (ROOT / file).read_text()
    assert bug.missed_in_process_by
    assert all((ROOT / file).exists() for file in bug.missed_in_process_by)


def test_a_function_has_at_most_three_bugs():
    assert max(Counter(_function_of(bug) for bug in BUGS.values()).values()) <= 3


def _function_of(bug):
    before = bug.file.read_text().partition(bug.old)[0].splitlines()
    return bug.module, next((line.strip() for line in reversed(before) if line.lstrip().startswith("def ")), "")


def test_a_process_with_the_variable_has_the_bug(planted):
    assert say(planted) == ["planted"]
    assert say(planted, SAY_MODULE, "-P") == ["planted"]


def test_a_process_without_the_variable_has_no_bug(planted):
    assert say({name: value for name, value in planted.items() if name != VARIABLE}) == ["heard"]
    assert say(without_bugs(planted)) == ["heard"]


def test_a_forked_process_has_the_bug_of_its_parent(planted):
    code = f"import os; import engine.node.alone; pid = os.fork(); pid and os.waitpid(pid, 0)\n{SAY_MODULE}"
    assert say(planted, code) == ["planted", "planted"]


def test_no_bytecode_of_a_planted_bug_is_kept(planted, tmp_path):
    where = {"PYTHONPYCACHEPREFIX": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": ""}
    for environment, text in ((planted, "planted"), (os.environ, "heard"), (planted, "planted")):
        assert say({**environment, **where}) == [text]
    assert [file.stem.partition(".")[0] for file in (tmp_path / "cache").rglob("alone.*.pyc")] == ["alone"]


def test_a_change_that_fits_twice_is_refused(tmp_path):
    bugs = tmp_path / "bugs.json"
    bugs.write_text(json.dumps([{"module": "engine.node.alone", "old": "import", "new": "import"}]))
    with pytest.raises(subprocess.CalledProcessError) as error:
        say(planted_in(os.environ, bugs))
    assert "times and not once" in error.value.stderr


def test_the_product_does_not_know_the_variable():
    files = [file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    assert [file for file in files if VARIABLE in file.read_text() or "sitecustomize" in file.read_text()] == []


CHILD_AND_OWN = """
import subprocess, sys
import engine.node.alone as alone

def test_which():
    said = subprocess.run([sys.executable, "-c", {code!r}], capture_output=True, text=True, check=True).stdout.split()
    assert [alone.LAST_CONTACT, *said] == {wanted!r}
"""


@pytest.mark.parametrize(("where", "wanted"), [("children", ["heard", "planted"]), ("own", ["planted", "heard"])])
def test_a_bug_is_in_the_chosen_processes_of_a_test_run(planted, tmp_path, where, wanted):
    test = tmp_path / "test_which.py"
    test.write_text(CHILD_AND_OWN.format(code=SAY_MODULE, wanted=wanted))
    outcomes = tmp_path / "outcomes"
    options = ["--bugs", planted[VARIABLE], "--where", where, "--outcomes", str(outcomes)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants.process_plugin"]
    done = subprocess.run(
        [*command, *options, "--rootdir", str(ROOT), str(test)],
        cwd=ROOT,
        env=planted if where == "own" else without_bugs(os.environ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    lines = [json.loads(line) for line in outcomes.read_text().splitlines()]
    assert [(phase, outcome) for _, phase, outcome, _ in lines][-2:] == [("teardown", "passed"), ("end", "")]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEAPEST)
def test_the_named_tests_find_the_planted_bug(name):
    command = [sys.executable, "-m", "tests.mutants.processes", name, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["bugs"], result["found"]) == (1, 1), done.stdout
    assert set(BUGS[name].found_by) & set(result["by_bug"][name]["found_by"])

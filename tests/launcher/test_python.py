"""`import spotrl`: plan, runs, events and reports from Python, also beside a user's own engine.py."""

import ast
import json
import linecache
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import spotrl
from launcher.ledger.models import NodeEvent
from launcher.ledger.store import open_ledger
from spotrl import interface
from spotrl.display import Table
from spotrl.own_packages import take_own
from tests.launcher.made_ledger import HOUR_MS, JOB, START_MS, a_run

ROOT = Path(__file__).parents[2]
QUICKSTART = Path(str(files("sky_yamls") / "quickstart.yaml"))


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    """Make a ledger with a finished run `done`, in a temporary home."""
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "config.yaml"))
    with open_ledger(tmp_path / "ledger.sqlite")() as session, session.begin():
        for name in ("older", "done"):
            made = a_run(session, name, job={**JOB, "iterations": 10}, folder=str(tmp_path / name))
            made.status("running", 0)
            node = made.node("trainer", market="on_demand", rate=1_000_000, up=0, end=HOUR_MS)
            session.add(NodeEvent(node_id=node.id, at_ms=START_MS + HOUR_MS, kind="released"))
            made.trained(0, HOUR_MS // 2)
            made.evaluated(0, 0.5, HOUR_MS // 2)
            made.status("finished", HOUR_MS, "iterations")
    return tmp_path


def test_a_local_job_is_planned_with_settings_in_place_of_the_files(ledger):
    plan = spotrl.plan(QUICKSTART, budget__max_total="$7")
    assert isinstance(plan, spotrl.Plan)
    assert plan.max_total_micro_usd == 7_000_000
    assert [slot.name for slot in plan.slots] == ["trainer", "spot-0", "spot-1"]


def test_launch_takes_the_values_that_plan_takes(ledger, monkeypatch):
    """`plan` takes a value as it is, and ignores None."""
    typed = []
    monkeypatch.setattr(interface, "_command", lambda *words: typed.extend(words) or {"name": "done"})
    settings = {"budget__max_total": None, "early": {"share": 0.5}, "model__path": Path("here"), "name": "done"}
    spotrl.launch(QUICKSTART, **settings)
    assert typed[2:-3] == ["--set", 'early={"share": 0.5}', "--set", "model.path=here", "--set", "name=done"]


def test_a_dictionary_is_a_job_with_paths_of_the_working_folder(ledger, monkeypatch):
    (ledger / "strings.txt").write_text("a\nb\n")
    monkeypatch.chdir(ledger)
    job = {"name": "mine", "model": "digits-ocr", "prompts": Path("strings.txt"), "reward": "ocr"}
    assert spotrl.plan(job, budget__max_total="$7").slots[0].name == "trainer"
    assert spotrl.plan(ledger / "mine.job.yaml", budget__max_total="$7") == spotrl.plan(job, budget__max_total="$7")
    with pytest.raises(spotrl.Failure, match=r"mine.job.yaml, line 5: .*strings.text"):
        spotrl.plan(job | {"prompts": "strings.text"})
    with pytest.raises(spotrl.Failure, match="of type bytes"):
        spotrl.plan(job | {"seed": b"1"})


def test_a_file_that_a_person_wrote_is_never_replaced(ledger, monkeypatch):
    monkeypatch.chdir(ledger)
    own = ledger / "mine.job.yaml"
    own.write_text("model: shapes\n")
    with pytest.raises(spotrl.Failure, match="spotrl did not write it"):
        spotrl.plan({"name": "mine", "model": "digits-ocr"})
    assert own.read_text() == "model: shapes\n"


def test_launch_names_a_reward_that_is_a_function(ledger, monkeypatch):
    typed = []
    monkeypatch.setattr(interface, "_command", lambda *words: typed.extend(words) or {"name": "done"})
    monkeypatch.chdir(ledger)

    def score(images, prompts):
        return [1.0 for _ in prompts]

    spotrl.launch({"name": "mine", "reward": score})
    (module,) = ledger.glob("reward_*.py")
    assert json.loads((ledger / "mine.job.yaml").read_text().partition("\n")[2])["reward"] == f"{module.stem}:score"
    (ledger / "jobs").mkdir()
    (ledger / "jobs" / "job.yaml").write_text("model: digits-ocr\n")
    spotrl.launch("jobs/job.yaml", reward__name=score)
    assert f"reward.name={module.stem}:score" in typed
    assert (ledger / "jobs" / module.name).exists()


def test_a_job_on_clouds_is_planned_with_cost_and_time(ledger):
    plan = spotrl.plan(QUICKSTART.with_name("sd3_5.yaml"))
    assert isinstance(plan, spotrl.CloudPlan)
    assert 0 < plan.cost.low < plan.cost.expected < plan.cost.high


def test_a_run_is_read_by_its_name(ledger):
    assert [run.name for run in spotrl.runs()] == ["done", "older"]
    run = spotrl.run("done")
    assert (run.status().status, run.status().iteration) == ("finished", 1)
    assert {"evaluated", "finished", "released"} <= {event.kind for event in run.events()}
    assert run.report().costs.total == 1_000_000
    assert run.report(target_reward=0.4).target.value == 0.4
    with pytest.raises(LookupError, match="did you mean done"):
        spotrl.run("dune")


def test_runs_are_compared_by_name_or_as_runs(ledger):
    found = spotrl.compare("older", spotrl.run("done"))
    (group,) = found.groups
    assert (group.runs, group.spent_micro_usd.mean) == (("older", "done"), 1_000_000)
    assert [group.name for group in spotrl.compare("older", "done", group_by=["iterations"]).groups] == [
        "iterations=10"
    ]
    with pytest.raises(spotrl.Failure, match="two runs or more"):
        spotrl.compare("done")


def test_waiting_for_a_run_returns_its_state_with_a_line_of_progress(ledger, capsys):
    assert spotrl.run("done").wait().status == "finished"
    assert capsys.readouterr().out == "done  finished  iteration 1/10  exact_match 0.500  $1.00  0 nodes\n"
    spotrl.run("done").wait(progress=False)
    assert capsys.readouterr().out == ""


def test_waiting_for_a_run_without_a_controller_ends_with_the_remedy(ledger, monkeypatch):
    monkeypatch.setattr(interface, "WITHOUT_CONTROLLER_SECONDS", 0.0)
    with open_ledger(ledger / "ledger.sqlite")() as session, session.begin():
        made = a_run(session, "lonely", job={**JOB, "iterations": 10}, folder=str(ledger / "lonely"))
        made.status("running", 0)
        made.node("trainer", market="on_demand", rate=1_000_000, up=0)
    with pytest.raises(spotrl.Failure, match="lonely has no controller"):
        spotrl.run("lonely").wait(progress=False)


def test_metrics_are_a_row_per_iteration_that_a_notebook_draws(ledger):
    (row,) = table = spotrl.run("done").metrics()
    assert list(row)[:4] == ["iteration", "hours", "cost/dollars", "reward/mean"]
    assert (row["iteration"], row["hours"], row["cost/dollars"]) == (0, 0.5, 0.5)
    assert (row["reward/mean"], row["evaluation/exact_match"]) == (0.5, 0.5)
    assert "<th>evaluation/exact_match</th>" in table._repr_html_()


def test_a_long_table_shows_its_newest_rows_and_no_markup_of_names():
    drawn = Table({"n": n, "<b>": 0.123456} for n in range(100))._repr_html_()
    assert "the last 60 of 100 rows" in drawn
    assert "<td>39</td>" not in drawn
    assert "<td>40</td>" in drawn
    assert "<td>0.1235</td>" in drawn
    assert "<b>" not in drawn


def test_a_run_is_drawn_with_its_state(ledger):
    drawn = spotrl.run("done")._repr_html_()
    assert "<td>finished (iterations)</td>" in drawn
    assert "<td>$1.00</td>" in drawn
    assert "<th>exact_match</th><td>0.500</td>" in drawn


def test_images_are_the_first_and_newest_sheet_unless_named(ledger):
    with open_ledger(ledger / "ledger.sqlite")() as session, session.begin():
        made = a_run(session, "drawn", job={**JOB, "iterations": 10}, folder=str(ledger / "drawn"))
        made.status("running", 0)
        for iteration in (0, 3, 6):
            file = ledger / "drawn" / "store" / f"{iteration}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"\x89PNG%d" % iteration)
            made.evaluated(iteration, 0.5, 100 + iteration, pictures=file.name)
    run = spotrl.run("drawn")
    assert [(image.title, image.png) for image in run.images()] == [
        ("iteration 0, exact_match 0.500", b"\x89PNG0"),
        ("iteration 6, exact_match 0.500", b"\x89PNG6"),
    ]
    assert [image.png for image in run.images(3)] == [b"\x89PNG3"]
    assert run.images()._repr_html_().count("data:image/png;base64,") == 2
    with pytest.raises(LookupError, match="iteration 4; it has: 0, 3, 6"):
        run.images(4)
    assert spotrl.run("done").images() == []


def test_sample_and_resume_give_their_words_to_the_command(ledger, monkeypatch):
    typed = []
    (ledger / "a.png").write_bytes(b"png")
    answer = {"pictures": [{"prompt": "--77", "seed": 4, "file": str(ledger / "a.png")}]}
    monkeypatch.setattr(interface, "_command", lambda *words: typed.append(words) or answer)
    (image,) = spotrl.run("done").sample("--77", seed=4, base=True, to="out")
    assert (image.title, image.png, image.path) == ("--77, seed 4", b"png", ledger / "a.png")
    assert typed == [("sample", "--count=1", "--seed=4", "--to=out", "--base", "--json", "--", "done", "--77")]
    assert spotrl.run("done").resume(max_total="$60", deadline="6h").name == "done"
    assert typed[1] == ("resume", "done", "--max-total=$60", "--deadline=6h", "--json")


def test_following_a_run_that_is_over_ends(ledger):
    assert list(spotrl.run("done").events(follow=True)) == list(spotrl.run("done").events())


@pytest.mark.slow
def test_what_a_command_refuses_is_a_failure_with_its_sentence(ledger):
    with pytest.raises(spotrl.Failure, match="a run called done exists already"):
        spotrl.launch(QUICKSTART, name="done")
    with pytest.raises(spotrl.Failure, match="checkpoint"):
        spotrl.run("done").weights(ledger / "weights")
    with pytest.raises(spotrl.Failure, match="done is finished"):
        spotrl.run("done").resume()


def run_beside(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code like a notebook in `folder` does: the folder is the first place where Python looks."""
    environ = {**os.environ, "SPOTRL_HOME": str(folder / "home"), "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environ, capture_output=True, text=True, timeout=60
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["engine", "launcher"])
def test_a_users_own_file_of_the_same_name_does_not_break_it(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one was imported')\n")
    done = run_beside(tmp_path, "import spotrl; print([run.name for run in spotrl.runs()])")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_users_own_file_that_was_imported_first_is_named(tmp_path):
    (tmp_path / "engine.py").write_text("")
    done = run_beside(tmp_path, "import engine, spotrl")
    assert "was imported as `engine` before spotrl" in done.stderr


def test_half_an_installation_is_told(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "engine")
    with pytest.raises(ImportError, match="not installed whole"):
        take_own(tmp_path)


def test_the_package_holds_the_public_interface_and_loads_no_torch(tmp_path):
    assert all(hasattr(spotrl, name) for name in spotrl.__all__)
    done = run_beside(tmp_path, "import sys, spotrl; print({'torch', 'ray', 'sky'} & set(sys.modules))")
    assert done.stdout.strip() == "set()"


def test_the_example_of_the_page_runs(ledger, monkeypatch):
    page = (ROOT / "docs" / "python.md").read_text("utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(ledger)
    (ledger / "job.yaml").write_text(QUICKSTART.read_text("utf-8"))
    exec(compile(code, "docs/python.md", "exec"), {})


REWARDS = {"your-own-run.md": ["brightness"], "rewards.md": ["score"]}
"""Pages with a reward of the user as an example, and the functions."""


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_of_the_pages_scores_images(name):
    import torch

    (code,) = python_blocks(ROOT / "docs" / name)
    defined: dict = {}
    exec(compile(code, name, "exec"), defined)
    (function,) = (defined[word] for word in REWARDS[name])
    images, more = torch.full((2, 3, 4, 4), 0.25), [[{}, {}]] if "metadata" in code.partition(":")[0] else []
    assert function(images, ["1234", "5678"], *more) == [0.25, 0.25]


def test_every_python_example_of_the_docs_is_run_by_a_test():
    pages = {page.name for page in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")] if python_blocks(page)}
    assert pages == {*REWARDS, "python.md"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs(tmp_path, monkeypatch, forked_engine):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "config.yaml"))
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path / "docs")
    drawn = []
    names: dict = {"__name__": "__main__"}
    try:
        for cell in json.loads((ROOT / "docs" / "python.ipynb").read_text("utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                assert cell["outputs"] == [], "outputs of a notebook grow old: clear them"
                # A notebook keeps the source of a cell where Python looks for it.
                linecache.cache[cell["id"]] = (1, None, cell["source"], cell["id"])
                code = ast.parse("".join(cell["source"]))
                shown = code.body.pop() if isinstance(code.body[-1], ast.Expr) else None
                exec(compile(code, cell["id"], "exec"), names)
                if shown is not None:
                    value = eval(compile(ast.Expression(shown.value), cell["id"], "eval"), names)
                    drawn.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
    finally:
        left = [run.stop() for run in spotrl.runs()]
    assert left == [[], []]
    assert [run.status().status for run in spotrl.runs()] == ["finished", "finished"]
    assert names["group"].runs == ("notebook-1", "notebook-2")
    assert names["group"].best.low <= names["group"].best.mean <= names["group"].best.high
    assert names["report"].costs.total > 0
    run_shown, table, sheets, samples = (text for text in drawn if text.startswith("<"))
    assert "finished" in run_shown
    assert "<th>evaluation/reward</th>" in table
    assert (sheets.count("<img"), samples.count("<img")) == (2, 2)

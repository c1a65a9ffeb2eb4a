"""A reward as a function: its module on disk scores like the function, and what cannot be written is refused."""

import importlib
import linecache
import os
import subprocess
import sys
from types import FunctionType

import pytest

import spotrl
from engine.rewards.user import import_function
from spotrl.functions import importable_name, with_names_of_functions


def notebook(text: str) -> dict:
    """Run the text of a notebook's cells as a notebook does, and return its names. Each text has its own file name."""
    name = f"<cell {hash(text)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), names)
    return names


def scores(function: FunctionType, folder) -> list[float]:
    """Write the function's module, and score two prompts in a process that has nothing but the module."""
    module, _, name = importable_name(function, folder).partition(":")
    code = f"from {module} import {name}; print({name}([], ['a', 'bcd']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, env=os.environ, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)


def test_a_function_goes_with_the_constants_imports_and_functions_it_uses(tmp_path):
    text = """
import math as maths
from collections import Counter
from os.path import basename

SCALE = {"by": 2.5}
images = object()  # of the notebook; the parameter has the same name

def length(prompt):
    return maths.floor(len(basename(prompt))) if prompt else other(prompt)

def other(prompt):
    return length(prompt)

def reward(images, prompts, scale=SCALE):
    return [scale["by"] * length(prompt) + Counter(prompt)["a"] for prompt in prompts]
"""
    assert scores(notebook(text)["reward"], tmp_path) == [3.5, 7.5]


def test_a_function_made_by_a_function_keeps_its_values(tmp_path):
    text = """
def weighted(weight):
    def reward(images, prompts):
        return [weight * len(prompt) for prompt in prompts]
    return reward
"""
    assert scores(notebook(text)["weighted"](3), tmp_path) == [3, 9]


def test_a_changed_function_has_a_module_of_its_own(tmp_path):
    text = "def reward(images, prompts):\n    return [{} for _ in prompts]\n"
    first, second, again = [importable_name(notebook(text.format(n))["reward"], tmp_path) for n in (1, 2, 1)]
    assert first == again != second
    assert import_function(first, str(tmp_path))([], ["x"]) == [1]
    assert import_function(second, str(tmp_path))([], ["x"]) == [2]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("reward = lambda images, prompts: prompts\n", "that `def` defines"),
        ("reward = len\n", "that `def` defines"),
        ("file = open('/dev/null')\ndef reward(images, prompts):\n    return file\n", "uses file, of type TextIO"),
        ("one = lambda x: x\ndef reward(images, prompts):\n    return one\n", "uses one, of type function"),
    ],
)
def test_a_function_that_cannot_be_written_is_refused(tmp_path, text, sentence):
    with pytest.raises(spotrl.Failure, match=sentence):
        importable_name(notebook(text)["reward"], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_function_without_a_source_is_refused(tmp_path):
    names: dict = {"__name__": "__main__"}
    exec("def reward(images, prompts):\n    return prompts\n", names)
    with pytest.raises(spotrl.Failure, match="source is nowhere"):
        importable_name(names["reward"], tmp_path)


def test_a_function_of_a_module_beside_the_job_is_imported_from_there(tmp_path, monkeypatch):
    (tmp_path / "beside_the_job.py").write_text("def score(images, prompts):\n    return [0 for _ in prompts]\n")
    monkeypatch.syspath_prepend(tmp_path)
    score = importlib.import_module("beside_the_job").score
    assert importable_name(score, tmp_path) == "beside_the_job:score"
    assert [path.name for path in tmp_path.glob("*.py")] == ["beside_the_job.py"]


def test_functions_are_named_anywhere_in_a_reward(tmp_path):
    reward = notebook("def look(images, prompts):\n    return [1 for _ in prompts]\n")["look"]
    named = with_names_of_functions([{"name": "ocr", "weight": 1}, {"name": reward, "weight": 0.5}], tmp_path)
    assert named[0] == {"name": "ocr", "weight": 1}
    assert named[1]["name"].startswith("reward_")
    assert named[1]["name"].endswith(":look")

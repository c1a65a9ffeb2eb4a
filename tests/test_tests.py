"""Tests can fail: rules against tests that pass whatever the product does.

Ruff keeps more of them away: several statements under `pytest.raises` (PT012), two tests of one name (F811), an
assertion of a tuple (F631). pytest fails where a test has no parameters (`empty_parameter_set_mark` in pyproject.toml).
`tests/mutants/safety.py` shows for each promise that its test fails without the code.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.test_architecture import ROOT, python_files

FAILING_CALLS = {"raises", "warns", "fail", "assert_close", "assert_allclose"}
"""Functions of pytest, torch and numpy that fail by themselves, or whose block does."""

BROAD = {
    "AssertionError",
    "AttributeError",
    "BaseException",
    "Exception",
    "IndexError",
    "IntegrityError",
    "KeyError",
    "OSError",
    "RuntimeError",
    "TypeError",
    "ValidationError",
    "ValueError",
}
"""Errors that a mistake in the test itself may raise too."""

THE_CALL_IS_THE_CHECK = {
    "clouds/test_faults.py::test_an_api_outage_begins": "begins the outage that the next tests look at",
    "clouds/test_faults.py::test_logs_of_every_node_reach_a_bucket_in_another_region": "until fails after its time",
    "launcher/test_endings.py::test_the_launcher_uses_its_own_engine": "check_engine_is_ours raises Failure",
    "launcher/test_python.py::test_the_example_of_the_page_runs": "the page's code raises an error if it is wrong",
    "launcher/test_trainer_ranks.py::test_ranks_that_can_train_are_accepted": "check_ranks raises JobError",
    "launcher/web/test_server.py::test_a_writer_is_never_kept_waiting_by_open_pages": "sqlite3 refuses a locked file",
    "test_docs.py::test_a_json_example_of_the_pages_parses": "json.loads raises ValueError",
}
"""Tests without an assertion, and why they can fail."""


@dataclass(frozen=True, eq=False, slots=True)
class Function:
    """A function of the tests. `fails`: its body has an assertion, or another statement that can fail the test.

    `calls`: names of called functions. `methods`: names of called methods, and of functions of a called module.
    """

    file: str
    name: str
    line: int
    is_collected: bool
    calls: frozenset[str]
    methods: frozenset[str]
    fails: bool


@cache
def modules() -> Mapping[str, ast.Module]:
    """Return the syntax trees of the tests' files. Benchmarks have no tests."""
    files = [file for file in python_files("tests") if "benchmarks" not in file.parts]
    return {str(file.relative_to(ROOT / "tests")): ast.parse(file.read_text("utf-8")) for file in files}


@cache
def nodes() -> Sequence[tuple[str, ast.AST]]:
    return [(file, node) for file, tree in modules().items() for node in ast.walk(tree)]


@cache
def functions() -> Sequence[Function]:
    found = []
    for file, node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = list(ast.walk(node))
            calls = [one.func for one in inside if isinstance(one, ast.Call)]
            found.append(
                Function(
                    file=file,
                    name=node.name,
                    line=node.lineno,
                    is_collected=node in modules()[file].body and Path(file).name.startswith("test_"),
                    calls=frozenset(one.id for one in calls if isinstance(one, ast.Name)),
                    methods=frozenset(one.attr for one in calls if isinstance(one, ast.Attribute)),
                    # A test may raise an error in a fake, which the product is to catch.
                    fails=any(fails(one, is_test=node.name.startswith("test_")) for one in inside),
                )
            )
    return found


@cache
def imported(file: str) -> frozenset[str]:
    """Return the names that a file of the tests imports from others."""
    froms = [node for node in modules()[file].body if isinstance(node, ast.ImportFrom)]
    ours = [node for node in froms if str(node.module).partition(".")[0] == "tests"]
    return frozenset(alias.name for node in ours for alias in node.names)


def name_of(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def fails(node: ast.AST, *, is_test: bool) -> bool:
    match node:
        case ast.Assert():
            return True
        case ast.Raise():
            return not is_test
        case ast.Call(keywords=options):
            is_checked = any(one.arg == "check" and getattr(one.value, "value", False) is True for one in options)
            return is_checked or name_of(node) in FAILING_CALLS
    return False


def functions_that_can_fail() -> set[Function]:
    """Return the functions that fail by themselves or call a function of the tests that does.

    A called method counts by its name, unless a function of the product has that name too.
    """
    of_product = {
        name
        for half in ("engine", "launcher", "spotrl")
        for file in python_files(half)
        for name in re.findall(r"def (\w+)\(", file.read_text("utf-8"))
    }
    able = {one for one in functions() if one.fails}
    while True:
        methods = {one.name for one in able} - of_product
        names = {(one.file, one.name) for one in able}
        anywhere = {one.name for one in able}
        more = {
            one
            for one in functions()
            if one not in able
            and (
                not one.methods.isdisjoint(methods)
                or any((one.file, name) in names for name in one.calls)
                or not (one.calls & anywhere).isdisjoint(imported(one.file))
            )
        }
        if not more:
            return able
        able |= more


def test_every_test_has_something_that_can_fail():
    able = functions_that_can_fail()
    tests = [one for one in functions() if one.is_collected and one.name.startswith("test_")]
    without = {f"{one.file}::{one.name}" for one in tests if one not in able}
    assert without == THE_CALL_IS_THE_CHECK.keys()


def test_an_expected_error_that_may_come_from_anywhere_is_described():
    """`pytest.raises(ValueError)` alone passes for a typing error in the test, too."""
    vague = []
    for file, node in nodes():
        for item in node.items if isinstance(node, ast.With) else ():
            call = item.context_expr
            if isinstance(call, ast.Call) and name_of(call) == "raises" and item.optional_vars is None:
                kinds = {one.id for one in ast.walk(call.args[0]) if isinstance(one, ast.Name)}
                if kinds & BROAD and not call.keywords:
                    vague.append(f"{file}:{item.context_expr.lineno} {ast.unparse(call)}")
    assert not vague


def test_no_test_uses_an_object_that_accepts_every_call():
    used = [
        f"{file}:{node.lineno}"
        for file, node in nodes()
        if isinstance(node, ast.ImportFrom)
        and node.module == "unittest.mock"
        and any("Mock" in alias.name or alias.name == "create_autospec" for alias in node.names)
    ]
    assert not used


def test_no_test_is_skipped_for_a_lack_of_the_product():
    """A module or a method that has moved would otherwise take its tests along in silence."""
    skipping = [
        f"{file}:{node.lineno} {ast.unparse(node)}"
        for file, node in nodes()
        if isinstance(node, ast.Call) and name_of(node) in ("importorskip", "skipif")
    ]
    ours = re.compile(r"importorskip\(['\"](engine|launcher|spotrl|tests)\b|hasattr\(")
    assert len(skipping) > 10
    assert not [one for one in skipping if ours.search(one)]


def test_every_test_function_is_where_pytest_looks_for_it():
    lost = [one for one in functions() if one.name.startswith("test_") and not one.is_collected]
    assert not lost

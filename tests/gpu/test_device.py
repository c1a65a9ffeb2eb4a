"""Figures of GPU checks are kept line by line, whichever computer measured them, and checks have an order."""

import json
from types import SimpleNamespace

import pytest
import torch

from tests.benchmarks.page import ROOT
from tests.gpu import figures
from tests.gpu.device import needs_gpus
from tests.gpu.figures import folded, keep_error, keep_figure, keep_figures
from tests.gpu.order import ORDER, UnknownCheck, place


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """The file of the lines, and a function that reads them."""
    file = tmp_path / "folder" / "lines.jsonl"
    monkeypatch.setenv(figures.LINES_VARIABLE, str(file))
    monkeypatch.setenv(figures.COMMIT_VARIABLE, "abc1234")
    figures.commit.cache_clear()
    yield lambda: [json.loads(line) for line in file.read_text().splitlines()]
    figures.commit.cache_clear()


def test_every_figure_is_a_line_with_its_origin_at_once(lines):
    keep_figure("step", ["512 px", "rows 1"], {"s_a_row": 2.0}, {"device": "A", "torch": "2.11"})
    assert len(lines()) == 1
    keep_figure("step", ["512 px", "rows 2"], "out of memory", {"device": "A", "torch": "2.11"})
    first, second = lines()
    assert (first["case"], first["value"]) == (["512 px", "rows 1"], {"s_a_row": 2.0})
    assert (second["value"], second["commit"], second["device"], second["torch"]) == (
        "out of memory",
        "abc1234",
        "A",
        "2.11",
    )
    assert second["date"]


def test_the_device_is_described_without_a_gpu_too():
    assert {"device", "torch", "versions"} <= figures.describe_device().keys()


def test_lines_of_a_check_replace_all_its_earlier_figures_and_no_others(lines):
    keep_figures("copy", {"seconds": 2.0}, {"device": "A"})
    keep_figures("abort", {"seconds": 3.0}, {"device": "B"})
    earlier = folded(lines(), {})
    keep_figure("copy", ["small", "s"], 1.0, {"device": "C"})
    keep_figure("copy", ["large", "s"], 4.0, {"device": "C"})
    keep_error("copy", "exit code 1", {"device": "C"})
    found = folded(lines()[2:], earlier)
    assert found["abort"] == earlier["abort"]
    assert "seconds" not in found["copy"]
    assert (found["copy"]["small"], found["copy"]["large"]) == ({"s": 1.0}, {"s": 4.0})
    assert (found["copy"]["error"], found["copy"]["device"], found["copy"]["commit"]) == ("exit code 1", "C", "abc1234")


def test_lines_are_put_into_the_file_of_all_figures(lines, tmp_path):
    keep_figures("copy", {"seconds": 2.0}, {"device": "A"})
    file = tmp_path / "gpu.json"
    assert figures.main([], file) == 0
    assert json.loads(file.read_text())["copy"]["seconds"] == 2.0


def test_a_check_without_its_gpus_reports_needed_and_existing_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    mark = needs_gpus(2)
    assert (mark.name, mark.kwargs["reason"]) == ("skip", "needs 2 CUDA GPUs, found 1")


class Collected:
    """A plugin that keeps the collected tests."""

    def pytest_collection_finish(self, session):
        self.names = [item.nodeid for item in session.items]


def test_pytest_collects_the_checks_in_the_explicit_order(capsys):
    found = Collected()
    arguments = ["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(ROOT / "tests" / "gpu")]
    assert pytest.main(arguments, plugins=[found]) == 0
    capsys.readouterr()
    tests = [name.rpartition("/")[2].partition("[")[0] for name in found.names]
    assert list(dict.fromkeys(tests)) == list(ORDER), "each test once, with all its parameters side by side"
    assert "[20 B engine step, 512 px]" in found.names[0]
    assert sum("test_two_workers_share" in name for name in found.names) == 7


def test_a_check_without_a_place_in_the_order_is_refused():
    item = SimpleNamespace(nodeid="tests/gpu/test_new.py::test_something[1]")
    with pytest.raises(UnknownCheck, match=r"test_new\.py::test_something has no place in tests/gpu/order\.py"):
        place(item.nodeid)

"""Figures of checks on GPUs are kept side by side, whichever machine made them."""

import json

import torch

from tests.gpu.device import keep_figures, needs_gpus


def sections(page):
    return {one.split("\n", 1)[0]: json.loads(one.split("```")[1][4:]) for one in page.read_text().split("\n## ")[1:]}


def test_a_check_that_ran_again_replaces_its_own_figures_and_no_others(tmp_path):
    page = tmp_path / "gpu.md"
    keep_figures("copy", {"seconds": 2.0}, {"device": "A"}, page)
    keep_figures("abort", {"seconds": 3.0}, {"device": "B"}, page)
    keep_figures("copy", {"seconds": 1.0}, {"device": "C"}, page)
    found = sections(page)
    assert {name: (one["seconds"], one["device"]) for name, one in found.items()} == {
        "abort": (3.0, "B"),
        "copy": (1.0, "C"),
    }


def test_what_stands_before_the_first_section_of_the_page_stays(tmp_path):
    page = tmp_path / "gpu.md"
    page.write_text("# gpu: a question\n\nBy hand.\n")
    keep_figures("copy", {"seconds": 2.0}, {"device": "A"}, page)
    keep_figures("copy", {"seconds": 1.0}, {"device": "A"}, page)
    assert page.read_text().startswith("# gpu: a question\n\nBy hand.\n\n## copy\n")
    assert sections(page)["copy"]["seconds"] == 1.0


def test_a_check_without_its_gpus_says_how_many_it_needs_and_how_many_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    mark = needs_gpus(2)
    assert (mark.name, mark.kwargs["reason"]) == ("skip", "needs 2 CUDA GPUs, found 1")

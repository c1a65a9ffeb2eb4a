"""Figures of GPU checks are stored side by side, whichever computer measured them."""

import json

import torch

from tests.gpu.device import keep_figures, needs_gpus


def test_a_repeated_check_replaces_only_its_own_figures(tmp_path):
    file = tmp_path / "gpu.json"
    keep_figures("copy", {"seconds": 2.0}, {"device": "A"}, file)
    keep_figures("abort", {"seconds": 3.0}, {"device": "B"}, file)
    keep_figures("copy", {"seconds": 1.0}, {"device": "C"}, file)
    found = json.loads(file.read_text())
    assert {name: (one["seconds"], one["device"]) for name, one in found.items()} == {
        "abort": (3.0, "B"),
        "copy": (1.0, "C"),
    }


def test_a_check_without_its_gpus_reports_needed_and_existing_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    mark = needs_gpus(2)
    assert (mark.name, mark.kwargs["reason"]) == ("skip", "needs 2 CUDA GPUs, found 1")

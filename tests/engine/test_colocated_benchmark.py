"""The colocated benchmark: seconds of a run whose GPUs all sample, then all train, calculated by hand."""

import pytest

from engine.schedule.values import Rates, Work
from tests.benchmarks.colocated import colocated_seconds, says
from tests.benchmarks.ladder_cells import Setting, assumed


def test_a_fair_run_packs_rows_and_scores_while_it_samples():
    """Two GPUs, 8 images of 2 rows: each GPU samples 4 images of 3 s, and trains 8 rows of 1 s."""
    rates = Rates(
        image=assumed(3, "-"),
        row=assumed(1, "-"),
        gather=assumed(2, "-"),
        switch=assumed(0.5, "-"),
        publish=assumed(0.25, "-"),
        score=assumed(0.1, "-"),
    )
    setting = Setting(name="two", rates=rates, work=Work(groups=2, images=4, rows_of_image=2), number=2, rows=4)
    packed = 2 * (4 + 0.1 * 2)  # two passes of 4 rows, which hide nine tenths of 2 s of collectives
    single = 8 * (2 + 0.1 * 1)  # eight passes of a row, which 2 s of collectives hide
    assert colocated_seconds(setting, is_fair=True) == pytest.approx(12 + 0.1 + packed + 1 + 0.25)
    assert colocated_seconds(setting, is_fair=False) == pytest.approx(12 + 0.4 + single + 1 + 0.25)


def test_the_page_names_the_cells_where_a_split_loses():
    rows = [
        {"cell": "video", "over fair": 1.01, "without help": 0.9},
        {"cell": "image", "over fair": 1.2, "without help": 1.1},
    ]
    text = says(rows)
    assert "Slower than fair without help: video 0.90." in text
    assert "Slower than fair with the whole pipeline: none." in text

"""Pages of benchmarks: short, with their raw figures beside them."""

import json
import re
from pathlib import Path

import pytest

from tests.benchmarks.page import PAGE_LINES, fitted

RESULTS = Path(__file__).parent / "benchmarks" / "results"
PAGES = sorted(RESULTS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_and_names_its_raw_figures(page):
    text = page.read_text()
    assert len(text.splitlines()) <= PAGE_LINES
    assert not re.search(r"```json", text)
    assert f"[{page.stem}.json]({page.stem}.json)" in text
    assert json.loads(page.with_suffix(".json").read_text())


def test_every_raw_file_has_its_page():
    assert {file.stem for file in RESULTS.glob("*.json")} == {page.stem for page in PAGES}
    assert len(PAGES) >= 20


def test_sections_that_do_not_fit_are_kept_beside_the_page():
    sections = {f"section {i}": "line\n" * 30 for i in range(4)}
    text = "# name: question\n\ntable\n\n" + "\n\n".join(f"## {head}\n\n{body}" for head, body in sections.items())
    page, later = fitted(text, "name")
    assert len(page.splitlines()) <= PAGE_LINES
    assert list(later) == ["section 2", "section 3"]
    assert "with the sections section 2, section 3" in page


def test_a_page_whose_beginning_is_too_long_is_refused():
    with pytest.raises(ValueError, match="show fewer rows"):
        fitted("# name: question\n" + "line\n" * 90, "name")

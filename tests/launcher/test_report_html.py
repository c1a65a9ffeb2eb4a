"""The report page is one file: it loads nothing from elsewhere, and no text of a run becomes markup."""

import re
from functools import partial
from html.parser import HTMLParser

import pytest

from engine.events import Evaluated
from launcher.ledger.models import Removal
from launcher.report.build import build_report
from launcher.report.html import PNG, render_html
from launcher.storage.stores import open_store, read_object
from tests.launcher.made_ledger import HOUR_MS, JOB, START_MS, a_long_run, a_run, a_session

HOSTILE = '<script>alert("x")</script><img src=https://evil.test/a.png>{{ 7 * 7 }}'


class Page(HTMLParser):
    """Collects tags, and every attribute that could load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data", "srcset")]


@pytest.fixture
def session():
    with a_session() as opened:
        yield opened


def a_page(session, run, store, hours=9):
    return render_html(
        build_report(session, run, START_MS + hours * HOUR_MS), partial(read_object, [open_store(store.as_uri())])
    )


def test_the_page_works_offline(session, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG + b"before")
    (tmp_path / "b.png").write_bytes(PNG + b"after")
    text = a_page(session, a_long_run(session, pictures=["a.png", "b.png"]), tmp_path)
    page = Page(text)
    assert len(page.loads) == 2
    assert all(load.startswith("data:image/png;base64,") for load in page.loads)
    assert "script" not in page.tags
    assert not re.search(r"url\(\s*['\"]?(?!#)|@import", text)
    assert "default-src 'none'" in text
    assert page.tags.count("figure") == 5


def test_ids_on_the_page_are_unique_and_references_resolve(session, tmp_path):
    text = a_page(session, a_long_run(session), tmp_path)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)


def test_a_hostile_run_name_stays_text(session, tmp_path):
    run = a_long_run(session, name=HOSTILE)
    text = a_page(session, run, tmp_path)
    page = Page(text)
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert "alert(" in text  # the name is shown as text
    assert "{{ 7 * 7 }}" in text


def test_a_hostile_slot_and_zone_stay_text_in_charts_and_legends(session, tmp_path):
    made = a_run(session)
    node = made.node(HOSTILE, up=0, end=HOUR_MS, zone=HOSTILE, price_source=HOSTILE)
    made.preempted(node, HOUR_MS, signal=HOSTILE)
    text = a_page(session, made.run, tmp_path)
    page = Page(text)
    assert "alert(" in text  # the names are shown as text
    assert not {"script", "img"} & set(page.tags)


def test_images_come_only_from_inside_the_store(session, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    (tmp_path / "secret.png").write_bytes(PNG)
    (store / "text.png").write_text("not a picture")
    made = a_run(session)
    made.evaluated(0, 0.1, 0, pictures="../secret.png")
    made.evaluated(1, 0.2, HOUR_MS, pictures="text.png")
    assert "<img" not in a_page(session, made.run, store)


def test_a_run_without_any_event_has_a_page(session, tmp_path):
    text = a_page(session, a_run(session).run, tmp_path)
    assert "Nothing has been evaluated yet" in text
    assert "No node was preempted" in text


def test_the_page_of_a_stopped_run_shows_the_command_that_goes_on_with_it(session, tmp_path):
    made = a_run(session)
    made.run.max_total_micro_usd = 2_000_000
    made.status("running", 0)
    assert "spotrl resume" not in a_page(session, made.run, tmp_path)
    made.status("stopped", HOUR_MS, "budget")
    more = '<p>Go on with more money: <code class="command">spotrl resume demo --max-total 4</code></p>'
    assert more in a_page(session, made.run, tmp_path)
    made.status("stopped", 2 * HOUR_MS, "asked for by a person")
    assert '<p>Go on with it: <code class="command">spotrl resume demo</code></p>' in a_page(
        session, made.run, tmp_path
    )
    session.add(Removal(run_id=made.run.id, at_wall_ms=0))
    assert "spotrl resume" not in a_page(session, made.run, tmp_path)


def test_one_evaluation_at_no_cost_can_be_drawn(session, tmp_path):
    made = a_run(session)
    made.evaluated(0, 0.5, 0)
    assert "<svg" in a_page(session, made.run, tmp_path)


def test_the_page_shows_if_money_is_real_and_what_savings_compare_to(session, tmp_path):
    text = a_page(session, a_long_run(session), tmp_path)
    assert "nothing was bought" in text
    assert "a counterfactual: all nodes on demand, no preemption cold starts" in " ".join(text.split())
    assert "5 days old" in text


def test_each_of_several_rewards_has_a_panel_and_its_name_stays_text(session, tmp_path):
    parts = [{"name": "ocr", "weight": 1.0}, {"name": "mine:look", "label": HOSTILE, "weight": 0.5}]
    made = a_run(session, job={**JOB, "reward": {"name": "sum", "parts": parts}})
    made.node("trainer", up=0, end=HOUR_MS)
    for number, (text_score, look) in enumerate([(0.1, 30.0), (0.5, 20.0), (0.4, 60.0)]):
        metrics = {"exact_match": 0.1, "ocr": text_score, HOSTILE: look}
        made.record(Evaluated(iteration=number, metrics=metrics, prompts=8), number * HOUR_MS // 3)
    report = build_report(session, made.run, START_MS + HOUR_MS)
    assert [(point.name, point.score) for point in report.scores][:3] == [("ocr", 0.1), ("ocr", 0.5), ("ocr", 0.4)]
    assert [point.micro_usd for point in report.scores[:3]] == [0, 1_200_000, 2_400_000]
    text = a_page(session, made.run, tmp_path)
    assert "Each of the rewards against dollars" in text
    assert "alert(" in text
    assert not {"script", "img"} & set(Page(text).tags)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_one_reward_has_no_chart_of_scores(session, tmp_path):
    assert "Each of the rewards" not in a_page(session, a_long_run(session), tmp_path)

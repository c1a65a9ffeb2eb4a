"""The fleets that a plan chose from, as a chart with a table: values, labels and marks, and the pages with them."""

import re
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations

import pytest
from pydantic import TypeAdapter

from launcher.placement.plan import Plan, front_from
from launcher.report.build import build_report
from launcher.report.front_chart import BOTTOM, CHARACTER, LEFT, LINE, RIGHT, front_chart, front_html, ticks
from launcher.report.html import render_html
from launcher.report.simulation import simulation_page
from launcher.storage.stores import open_store, read_object
from launcher.web.reader import run_page
from launcher.web.simulations import keep, simulations
from tests.launcher.a_front import FLEETS, a_fleet, a_front
from tests.launcher.made_ledger import HOUR_MS, START_MS, a_run, a_session
from tests.launcher.web.served import NASTY, a_simulation, two_runs


def value_at(pixels, ticks):
    """Return the hours or dollars at a place of an axis, by its first and its last tick."""
    (first, low), (last, high) = [(place, float(re.sub(r"[$,]", "", text))) for place, text in (ticks[0], ticks[-1])]
    return low + (pixels - first) / (last - first) * (high - low)


def box_of(label):
    width = CHARACTER * len(label.text)
    left = label.x - {"start": 0, "middle": width / 2, "end": width}[label.anchor]
    return left, label.y - 4 - LINE / 2, left + width, label.y - 4 + LINE / 2


# --- values ---------------------------------------------------------------------------------------------


def test_a_point_is_at_the_hours_and_dollars_of_its_fleet():
    chart = front_chart(a_front())
    for fleet, point in zip(FLEETS, chart.points, strict=True):
        assert value_at(point.x, chart.hours) == pytest.approx(fleet.hours, abs=0.1)
        for pixels, usd in ((point.y, fleet.usd), (point.low_y, fleet.usd_low), (point.high_y, fleet.usd_high)):
            assert value_at(pixels, chart.dollars) == pytest.approx(usd, abs=2)


def test_a_label_has_number_and_nodes_and_the_chosen_and_the_late_are_marked():
    points = front_chart(a_front()).points
    assert [point.label.text for point in points] == [
        "1 H100:8 on spot alone",
        "2 H100:8 on spot alone, chosen",
        "3 B200:8 on spot + 4 x B200:8",
    ]
    assert [(point.is_chosen, point.is_late) for point in points] == [(False, True), (True, False), (False, False)]
    assert points[0].title == "1 H100:8 on spot alone, aws us-east-2: $200.00 ($140.00 to $260.00), 1d 6h"


def test_deadline_and_budget_are_lines_unless_they_are_far_beyond_the_points():
    chart = front_chart(a_front())
    assert (chart.deadline[1], chart.budget[1], chart.beyond) == ("deadline 1d", "budget $800", "")
    assert value_at(chart.deadline[0], chart.hours) == pytest.approx(24, abs=0.1)
    assert value_at(chart.budget[0], chart.dollars) == pytest.approx(800, abs=2)
    far = front_chart(a_front(deadline_hours=72.0, budget_usd=4000.5))
    assert (far.deadline, far.budget) == (None, None)
    assert far.beyond == "Beyond the chart: deadline 3d and budget $4,000.50."
    none = front_chart(a_front(deadline_hours=None, budget_usd=None))
    assert (none.deadline, none.budget, none.beyond) == (None, None, "")


def test_labels_of_close_points_lie_in_the_plot_and_on_no_other_label():
    fleets = [a_fleet(number, 300 + number, 20 - number / 100, nodes=f"{'H100:8 ' * 8}, x") for number in range(1, 6)]
    labels = [point.label for point in front_chart(a_front(fleets)).points]
    for left, top, right, bottom in map(box_of, labels):
        assert LEFT < left < right < RIGHT
        assert 0 < top < bottom < BOTTOM
    for one, other in combinations(map(box_of, labels), 2):
        assert one[1] >= other[3] or other[1] >= one[3] or one[0] >= other[2] or other[0] >= one[2]
    assert sum(label.link is None for label in labels) == 1, "one is beside its point, and lines lead to the others"


def test_one_point_is_drawn_with_its_label_beside_it():
    front = a_front(FLEETS[1:2], usd_per_hour_saved=None, deadline_hours=None)
    (point,) = front_chart(front).points
    assert LEFT < point.x < RIGHT
    assert point.label.link is None
    assert "Dollars and hours of 1 plan;" in front_html(front)


def test_a_label_wider_than_the_plot_is_cut():
    (point,) = front_chart(a_front([a_fleet(1, 300, 20, nodes="H100:8 " * 30)])).points
    assert point.label.text.endswith(" ...")


def test_ticks_are_round_and_within_the_axis():
    assert ticks(22.8, 8) == [0, 5, 10, 15, 20]
    assert ticks(1018, 5) == [0, 250, 500, 750, 1000]
    assert ticks(0.09, 5)[1] == pytest.approx(0.02)


# --- pages ----------------------------------------------------------------------------------------------


def test_the_table_says_what_the_chart_shows():
    page = front_html(a_front())
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(<td.*?)</tr>", page)]
    assert cells == [
        [
            "1: cheapest",
            "H100:8 on spot alone, aws us-east-2",
            "$200.00 ($140.00 to $260.00)",
            "1d 6h",
            "3 of 10 replays",
            "past the deadline of 1d (3 of 10 replays meet it)",
        ],
        [
            "2: chosen, cheapest in time",
            "H100:8 on spot alone, aws us-east-2",
            "$300.00 ($210.00 to $390.00)",
            "20h",
            "10 of 10 replays",
            "",
        ],
        [
            "3: quickest",
            "B200:8 on spot + 4 x B200:8, aws us-east-2",
            "$600.00 ($420.00 to $780.00)",
            "10h",
            "10 of 10 replays",
            "",
        ],
    ]
    assert "prices of 2026-07-20, older than 90 days" in page
    assert "An hour saved costs $30.00" in page


def test_text_of_a_front_is_escaped():
    page = front_html(a_front([a_fleet(1, 300, 20, nodes=NASTY, place=NASTY, why_not=NASTY)], prices=NASTY))
    assert NASTY not in page


def test_a_simulation_shows_the_front_if_its_plan_was_chosen(tmp_path):
    found = a_simulation()
    chosen = simulation_page(found.result, "ocr", "prices of 2026-07-20", a_front())
    assert "2 H100:8 on spot alone, chosen" in chosen
    named = simulation_page(found.result, "ocr", "prices of 2026-07-20")
    assert 'class="front"' not in named
    assert "prices of 2026-07-20" in named
    keep(tmp_path, replace(found, fleets=a_front()))
    assert simulations(tmp_path)[0].fleets == a_front()


def test_a_simulation_without_rollout_nodes_draws_none():
    result = a_simulation().result
    assert "The fleet of the first start" in simulation_page(replace(result, example=((0, 1, 0),)), "ocr", "")
    assert "The fleet of the first start" not in simulation_page(replace(result, example=((0, 0, 0),)), "ocr", "")


def test_a_simulation_of_an_older_version_is_read(tmp_path):
    file = keep(tmp_path, a_simulation())
    file.write_text(re.sub(r',"prices":.*\}$', "}", file.read_text()))
    (old,) = simulations(tmp_path)
    assert (old.prices, old.fleets) == ("", None)


def test_a_run_keeps_the_front_with_its_plan_and_its_pages_show_it(tmp_path):
    with a_session() as session:
        made = a_run(session, "live")
        plan = Plan(region="r", slots=(), max_total_micro_usd=None, max_hourly_micro_usd=None, fleets=a_front())
        made.run.plan = TypeAdapter(Plan).dump_python(plan, mode="json")
        report = build_report(session, made.run, START_MS + HOUR_MS)
        page = render_html(report, partial(read_object, [open_store(tmp_path.as_uri())]))
    assert report.fleets == a_front()
    assert "The plans it was chosen from" in page
    assert "2 H100:8 on spot alone, chosen" in page


def test_an_older_run_and_one_that_names_its_nodes_have_no_front(tmp_path):
    assert front_from({"slots": []}) is None
    assert front_from({"slots": [], "fleets": None}) is None
    with a_session() as session:
        report = build_report(session, a_run(session).run, START_MS + HOUR_MS)
        page = render_html(report, partial(read_object, [open_store(tmp_path.as_uri())]))
    assert report.fleets is None
    assert "The plans it was chosen from" not in page


def test_the_page_of_a_run_has_the_front_it_was_chosen_from(tmp_path):
    _, sessions = two_runs(tmp_path)
    assert run_page(sessions, "done")["fleets"] is None
    assert "2 H100:8 on spot alone, chosen" in run_page(sessions, "live")["fleets"]


def test_the_front_of_a_run_is_in_the_json_of_its_report():
    with a_session() as session:
        made = a_run(session)
        made.run.plan = {"slots": [], "fleets": asdict(a_front())}
        report = build_report(session, made.run, START_MS + HOUR_MS)
    assert [fleet["number"] for fleet in report.to_dict()["fleets"]["front"]] == [1, 2, 3]

"""`spotrl compare`: runs side by side."""

import json
from collections.abc import Iterator
from pathlib import Path

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.layout import print_table, print_text
from launcher.cli.number import Number
from launcher.cli.run_argument import names_of_runs
from launcher.ledger.store import find_run
from launcher.money import MICRO, dollars
from launcher.report.comparison import ComparedRun, Comparison, compare_runs, score_at
from launcher.report.comparison_html import render_comparison, spread
from launcher.whole_file import whole_file

STEPS = 5
"""Rows of the table of scores: so many equal parts of the longest run."""

AXES = {"dollars": "micro_usd", "hours": "hours", "iterations": "iteration"}


LONGEST = 28
"""Characters of a value in the table of differences. One longer value would break every row of the table in two."""


@click.command()
@click.argument("run_names", metavar="RUN RUN...", nargs=-1, required=True, shell_complete=names_of_runs)
@click.option(
    "--group-by",
    metavar="FIELD",
    multiple=True,
    help="Runs with equal values of this field of the job are one group. Repeatable. Default: runs that differ in the "
    "seed alone.",
)
@click.option("--over", type=click.Choice(list(AXES)), default="dollars", show_default=True, help="Axis of the scores.")
@click.option("--target-reward", type=Number(), help="Target score (default: the target of the first run).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the comparison to this file, as one HTML page that works offline.",
)
@click.pass_obj
def compare(
    sessions: sessionmaker[Session],
    run_names: tuple[str, ...],
    group_by: tuple[str, ...],
    over: str,
    target_reward: float | None,
    as_json: bool,
    html: Path | None,
) -> None:
    """Compare two or more runs: dollars, hours, scores and jobs.

    Runs of one job with several seeds are a group, with means and 95 % intervals over the seeds.

    \b
    Example:
      spotrl compare flow-grpo diffusion-nft
      spotrl compare a1 a2 a3 b1 b2 b3 --group-by algorithm.name --html compare.html
    """
    if len(set(run_names)) < 2:
        raise click.UsageError("name two different runs or more; `spotrl ls` lists them")
    with sessions() as session:
        runs = [find_run(session, name) for name in dict.fromkeys(run_names)]
        found = compare_runs(session, runs, group_by, target_reward)
    if html is not None:
        page = render_comparison(found)
        with whole_file(html) as file:
            file.write(page)
        click.echo(f"wrote {html}", err=True)
    if as_json:
        click.echo(json.dumps(found.to_dict(), allow_nan=False))
        return
    _print(found, over)


def _print(found: Comparison, over: str) -> None:
    goal = f"to {found.metric} {found.target:g}" if found.target is not None else f"{found.metric}, without a target"
    click.echo(f"{len(found.runs)} runs {goal}\n")
    heads = ("run", "seed", "to the target", "hours", "iteration", "best", "spent")
    rows = [heads, *(_row(run) for run in found.runs)]
    if any(run.billed_micro_usd is not None for run in found.runs):
        billed = [run.billed_micro_usd for run in found.runs]
        cells = ["billed", *("-" if cost is None else dollars(cost) for cost in billed)]
        rows = [(*row, cell) for row, cell in zip(rows, cells, strict=True)]
    print_table(rows, numbers=rows[0][1:])
    groups = [group for group in found.groups if len(group.runs) > 1]
    if groups:
        click.echo()
        titles = ("group", "reached", "dollars to the target", "hours", "best")
        rows = [
            (
                group.name,
                f"{group.reached} of {len(group.runs)}",
                spread(group.micro_usd, "dollars"),
                spread(group.hours, ".2f"),
                spread(group.best, ".3f"),
            )
            for group in groups
        ]
        print_table([titles, *rows], numbers=titles[1:])
    names = tuple(run.name for run in found.runs)
    click.echo()
    print_table([(over, *names), *_scores(found, over)], numbers=(over, *names))
    if found.differences:
        click.echo()
        short = [one for one in found.differences if max(map(len, map(one.shown, names))) <= LONGEST]
        if short:
            fields = [(one.field, *(one.shown(name) for name in names)) for one in short]
            print_table([("in the job", *names), *fields])
        for one in (one for one in found.differences if one not in short):
            print_text(f"{one.field} of {name}: {one.shown(name)}" for name in names)
    click.echo()
    print_table([("dollars", *names), *_phases(found)], numbers=names)
    if found.notes:
        click.echo()
        print_text(f"{note[0].upper()}{note[1:]}." for note in found.notes)


def _row(run: ComparedRun) -> tuple[str, ...]:
    there, best = run.confirmed, f"{run.best.smoothed:.3f}" if run.best else "-"
    reached = (
        (dollars(there.micro_usd), f"{there.hours:.2f}", str(there.iteration))
        if there is not None
        else ("not reached", "-", "-")
    )
    return (run.name, str(run.seed), *reached, best, dollars(run.micro_usd))


def _scores(found: Comparison, over: str) -> Iterator[tuple[str, ...]]:
    """Yield the smoothed scores at equal steps of the axis. A dash: before the run's first, or after its last score."""
    axis = AXES[over]
    last = max((getattr(point, axis) for run in found.runs for point in run.curve), default=0)
    for step in range(1, STEPS + 1):
        at = last * step / STEPS
        scores = (score_at(run, axis, at) for run in found.runs)
        where = f"${at / MICRO:,.2f}" if over == "dollars" else f"{at:.2f}" if over == "hours" else f"{at:.0f}"
        yield (where, *("-" if score is None else f"{score:.3f}" for score in scores))


def _phases(found: Comparison) -> Iterator[tuple[str, ...]]:
    phases = dict.fromkeys(phase for run in found.runs for phase, amount in run.by_phase.items() if amount)
    for phase in phases:
        yield (phase.replace("_", " "), *(dollars(run.by_phase.get(phase, 0)) for run in found.runs))
    yield ("all", *(dollars(run.micro_usd) for run in found.runs))
    yield ("of it on spot", *(dollars(run.by_market.get("spot", 0)) for run in found.runs))

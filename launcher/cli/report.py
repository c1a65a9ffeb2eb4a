"""`spotrl report`: what a run reached, and what that cost."""

import json
import os
from pathlib import Path

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.ledger.store import find_run
from launcher.report.build import build_report, clock_of
from launcher.report.terminal import a_console, print_report


@click.command()
@click.argument("run_name", metavar="RUN")
@click.option("--target-reward", type=float, help="Score to reach; without it, the target of the job.")
@click.option("--against", metavar="RUN2", help="Another run, to say what was saved against it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; its `schema` says which fields there are.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Also write one file that works offline.")
@click.pass_obj
def report(
    sessions: sessionmaker[Session],
    run_name: str,
    target_reward: float | None,
    against: str | None,
    as_json: bool,
    html: Path | None,
) -> None:
    """Show the dollars and hours that RUN took to its target, and where they went.

    \b
    Example:
      spotrl report digits-ocr --target-reward 0.8 --html report.html
    """
    with sessions() as session:
        run = find_run(session, run_name)
        other = find_run(session, against) if against else None
        built = build_report(session, run, clock_of(run).now_ms(), target_reward, other)
        store = Path(run.folder) / "store"
    if html is not None:
        from launcher.report.html import render_html  # The charts' libraries take a second to load.

        unfinished = html.with_name(f"{html.name}.part")
        unfinished.write_text(render_html(built, store), encoding="utf-8")
        os.replace(unfinished, html)
        click.echo(f"wrote {html}", err=True)
    if as_json:
        click.echo(json.dumps(built.to_dict(), indent=2, allow_nan=False))
    else:
        print_report(built, a_console())

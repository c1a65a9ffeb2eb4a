"""The report as tables for a terminal. A pipe gets plain text without colour."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from launcher.money import dollars, hourly
from launcher.report.bill import WHY, by_kind
from launcher.report.exploration import exploration_words
from launcher.report.provenance import Provenance, hardware_by_nodes
from launcher.report.ranks import collectives_words
from launcher.report.schedule import schedule_words
from launcher.report.sharing import sharing_words
from launcher.report.throughput import throughput_words
from launcher.report.values import Factors, Report, Saving
from launcher.report.words import (
    age,
    bill_words,
    bucket_words,
    drift_words,
    headline,
    learning_words,
    moment,
    move_words,
    phase_name,
    point_words,
    saving_words,
    score,
    seconds,
    short_node,
    span_words,
    stand_in_words,
    trainer_loss_words,
    trainer_time_words,
)

PIPED_WIDTH = 80


def a_console() -> Console:
    """Return the console for reports. Names come from users and clouds, so markup is off."""
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return console


def print_report(report: Report, console: Console) -> None:
    """Print the report without blanks at the ends of its lines, which rich's tables have."""
    with console.capture() as captured:
        _print(report, console)
    console.file.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _print(report: Report, console: Console) -> None:
    run, target = report.run, report.target
    console.print(f"{run.name}  {run.infra}, {run.status}{f': {run.reason}' if run.reason else ''}", style="bold")
    console.print(headline(report), style="green" if target.reached else "yellow" if target.value is not None else "")
    console.print(f"Money is {report.money_note}")
    if learning := learning_words(report):
        console.print(learning, style="yellow")
    if saved := saving_words(report):
        console.print(saved)
    if point := point_words(report.point, target.metric):
        console.print(point)
    if drifted := drift_words(report):
        console.print(drifted)
    if target.first is not None and target.first != target.confirmed:
        console.print(
            f"First reached by a single evaluation at iteration {target.first.iteration}, "
            f"{dollars(target.first.micro_usd)}; it counts when the mean of 3 held for {target.hold} evaluations."
        )
    if target.factors is not None:
        console.print(f"{_factors(target.factors)} = {dollars(target.factors.micro_usd)}")
    console.print(
        f"{run.iterations} iterations, {run.hours:.2f} h on the run's clock, {seconds(run.wall_seconds)} of wall time"
        + (f" (simulated: clock x{run.clock_factor:g})" if run.clock_factor != 1 else "")
    )
    _splits(report, console)
    _extras(report, console)
    _bill(report, console)
    for line in bucket_words(report):
        console.print(line)
    _gains(report, console)
    _preemptions(report, console)
    if lost := trainer_loss_words(report):
        console.print(lost)
    if moved := move_words(report):
        console.print(moved)
    if stood := stand_in_words(report):
        console.print(stood)
    console.print(exploration_words(report.exploration))
    if report.schedule is not None:
        console.print(schedule_words(report.schedule))
    if report.collectives is not None:
        console.print(collectives_words(report.collectives))
    if report.trainer_time is not None:
        console.print(trainer_time_words(report.trainer_time))
    if report.throughput is not None:
        console.print(throughput_words(report.throughput))
    if report.sharing is not None:
        console.print(sharing_words(report.sharing))
    _compared(report, console)
    _provenance(report, console)


def _table(title: str, *columns: str, words: int = 1) -> Table:
    """Return an empty table. The first `words` columns hold text, the remaining columns numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < words else "right", overflow="fold")
    return table


def _splits(report: Report, console: Console) -> None:
    costs = report.costs
    ways = "five" if report.extras else "four"
    table = _table(f"Cost: {dollars(costs.total)}, split {ways} ways", "by", "", "dollars", "share", words=2)
    splits: Sequence[tuple[str, Mapping[str, int]]] = (
        ("role", costs.by_role),
        ("market", costs.by_market),
        *((("place", costs.by_place),) if report.extras else ()),
        ("phase", costs.by_phase),
        ("node", costs.by_node),
    )
    for name, split in splits:
        paid = sorted(((key, amount) for key, amount in split.items() if amount), key=lambda item: -item[1])
        for number, (key, amount) in enumerate(paid):
            share = f"{100 * amount / costs.total:.1f} %"
            shown = short_node(key, report.run.name) if name == "node" else phase_name(key)
            table.add_row(
                name if number == 0 else "", shown, dollars(amount), share, end_section=number + 1 == len(paid)
            )
    if costs.total:
        console.print(table)


def _extras(report: Report, console: Console) -> None:
    """Print the bill lines of a real cloud. A line of unknown price says `not priced`."""
    if not report.extras:
        return
    table = _table("Also on the bill", "what", "", "", "dollars", words=3)
    for line in report.extras:
        paid = "not priced" if line.micro_usd is None else dollars(line.micro_usd)
        where = "in the total" if line.in_total else "beside it"
        table.add_row(phase_name(line.kind), line.amount, where, paid)
    console.print(table)
    for source in dict.fromkeys(line.source for line in report.extras if not line.in_total):
        console.print(f"Beside it: {source}", style="dim")


def _bill(report: Report, console: Console) -> None:
    """Print what the clouds billed, and each reason why it differs from what was metered."""
    bill = report.bill
    if bill is None:
        return
    difference = bill.billed_micro_usd - bill.metered_micro_usd
    table = _table(f"Billed: {dollars(bill.billed_micro_usd)}", "why it differs", "dollars")
    table.add_row("metered: nodes, disks and addresses", dollars(bill.metered_micro_usd), end_section=True)
    for kind, micro_usd in by_kind(bill.differences).items():
        table.add_row(WHY[kind], dollars(micro_usd))
    table.add_row("billed minus metered", dollars(difference))
    console.print(table)
    for line in bill_words(report):
        console.print(line)


def _gains(report: Report, console: Console) -> None:
    if not report.gains:
        return
    table = _table(f"Dollars per +0.01 {report.target.metric}", "iterations", "smoothed", "spent", "per +0.01")
    for gain in report.gains:
        table.add_row(
            f"{gain.from_iteration} to {gain.to_iteration}",
            f"{score(gain.from_score)} to {score(gain.to_score)}",
            dollars(gain.micro_usd),
            dollars(gain.micro_usd_per_hundredth),
        )
    console.print(table)


def _preemptions(report: Report, console: Console) -> None:
    if not report.preemptions:
        console.print("No node was preempted.")
        return
    lines = report.preemptions
    title = f"{len(lines)} preemptions cost {dollars(sum(line.micro_usd for line in lines))}"
    where = _table(title, "node", "zone", "how", "hour", words=3)
    lost = _table("What each cost", "node", "steps lost", "replaced after", "cold start", "lost work")
    for line in lines:
        node = short_node(line.node, report.run.name)
        how = f"{'trainer, ' if line.role == 'trainer' else ''}{'with' if line.notice else 'without'} notice"
        where.add_row(node, line.zone, how, f"{line.hours:.2f}")
        lost.add_row(
            node,
            str(line.lost_steps),
            seconds(line.replaced_after_s) + _wall(report, line.replaced_after_wall_s),
            dollars(line.cold_start_micro_usd),
            dollars(line.lost_work_micro_usd),
        )
    console.print(where)
    console.print(lost)


def _wall(report: Report, wall_seconds: float | None) -> str:
    """Return the wall-clock seconds in brackets, if the run's clock runs at another speed."""
    return "" if wall_seconds is None or report.run.clock_factor == 1 else f" ({seconds(wall_seconds)} wall)"


def _compared(report: Report, console: Console) -> None:
    effect = report.price_effect
    console.print(
        f"Price effect: the same node-time costs {dollars(effect.on_demand_micro_usd)} on demand, "
        f"{dollars(effect.difference_micro_usd)} more than was paid."
        if effect.difference_micro_usd >= 0
        else f"Price effect: the same node-time costs {dollars(effect.on_demand_micro_usd)} on demand, "
        f"{dollars(-effect.difference_micro_usd)} less than was paid."
    )
    for saving in report.saved:
        _saving(saving, console)


def _saving(saving: Saving, console: Console) -> None:
    named = saving.against if saving.kind == "run" else f"the counterfactual {saving.against!r}"
    if saving.saved_micro_usd is None or saving.micro_usd is None:
        console.print(f"Saved against {named}: cannot be told; {saving.why}.")
        return
    console.print(
        f"Saved against {named}: {dollars(saving.saved_micro_usd)} of {dollars(saving.micro_usd)}; {saving.why}."
    )
    if saving.ours is not None and saving.theirs is not None:
        console.print(f"  here {_factors(saving.ours)}; there {_factors(saving.theirs)}")


def _factors(factors: Factors) -> str:
    return (
        f"{factors.iterations} iterations x {factors.seconds_per_iteration:.1f} s "
        f"x {hourly(factors.micro_usd_per_hour)}"
    )


def _provenance(report: Report, console: Console) -> None:
    for price in report.prices:
        console.print(f"Prices: {price.source}, observed {moment(price.observed_at)}, {age(price.age_days)} when used")
    run = report.run
    console.print(f"Job {run.job_digest}, code {run.code_version}, lock {run.lock_digest}")
    if run.started_from:
        console.print(f"Started from {run.started_from}")
    _origin(report.provenance, run.name, console)
    console.print(f"Seeds {', '.join(map(str, run.seeds))}")
    console.print(span_words(report))
    for note in report.notes:
        console.print(note, style="dim")


def _origin(origin: Provenance, run_name: str, console: Console) -> None:
    """Print the commands, commits, hardware and versions."""
    for one in origin.commands:
        console.print(f"{moment(one.at)}: {one.command or 'started by a program'}")
        for name, commit in (("spotrl", one.code_commit), ("job's folder", one.workdir_commit)):
            if commit:
                console.print(f"  {name} at git {commit}")
    for hardware, nodes in hardware_by_nodes(origin).items():
        console.print(f"{', '.join(short_node(node, run_name) for node in nodes)}: {hardware}")
    if origin.versions:
        console.print(", ".join(f"{name} {version}" for name, version in origin.versions.items()))

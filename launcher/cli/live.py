"""The display of a live run: a panel on a terminal, plain lines in a pipe or log. Pure functions of a `RunView`."""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from launcher.money import dollars, duration, hourly
from launcher.report.sharing import groups_text
from launcher.runs.views import NodeView, RunView, short_name

BARS = "▁▂▃▄▅▆▇█"

ENDED = ("finished", "stopped", "failed")
OVER = ("gone", "reclaimed", "released", "denied", "no_capacity")
"""Node states without further cost."""


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return the last `width` values as bars, scaled from the lowest to the highest value."""
    values = list(values)[-width:]
    if not values:
        return ""
    low, high = min(values), max(values)
    if high == low:
        return BARS[0] * len(values)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in values)


def still_running(view: RunView) -> list[NodeView]:
    """Return the nodes that may cost money now."""
    return [node for node in view.nodes if node.status not in OVER]


def score_text(view: RunView) -> str:
    """Return the score, like `exact_match 0.710 (best 0.720, target 0.78)`."""
    if view.score is None:
        return "not evaluated yet"
    details = [f"best {view.best_score:.3f}"] if view.best_score is not None else []
    details += [f"target {view.target:g}"] if view.target is not None else []
    return f"{view.metric} {view.score:.3f}" + (f" ({', '.join(details)})" if details else "")


def money_text(view: RunView) -> str:
    """Return the spending and the rate, like `$1.20 of at most $10.00, $2.49/h`."""
    limit = f" of at most {dollars(view.max_total_micro_usd)}" if view.max_total_micro_usd is not None else ""
    return f"{dollars(view.spent_micro_usd)}{limit}, {hourly(view.micro_usd_per_hour)}"


def time_text(view: RunView) -> str:
    """Return the time, like `1h 5m (1m 5s here, clock x60), about 40s left`. The remaining time is wall time."""
    here = duration(round(view.wall_seconds) * 1000) if view.wall_seconds >= 1 else "0s"
    clock = f" ({here} here, clock x{view.clock_factor:g})" if view.clock_factor != 1 else ""
    left = (
        f", about {duration(round(view.eta_seconds) * 1000)} left" if view.eta_seconds and view.eta_seconds >= 1 else ""
    )
    return f"{duration(view.elapsed_ms - view.elapsed_ms % 1000)}{clock}{left}"


def plain_line(view: RunView) -> str:
    """Return the run's state as one log line."""
    reward = f"reward {view.reward:.3f}" if view.reward is not None else "no reward yet"
    return (
        f"{view.name}: {view.status}, iteration {view.iteration}/{view.iterations}, {reward}, {score_text(view)}, "
        f"{money_text(view)}, {len(still_running(view))} nodes, {time_text(view)}"
        f"{f' | {view.last_event}' if view.last_event else ''}"
    )


def panel(view: RunView, rewards: Sequence[float], header: str) -> RenderableType:
    """Return the run's state as a panel for a terminal."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    reward = f"{view.reward:.3f}  " if view.reward is not None else "-"
    facts.add_row("iteration", f"{view.iteration}/{view.iterations}")
    facts.add_row("reward", Text(reward) + Text(sparkline(rewards), style="green"))
    facts.add_row("score", score_text(view))
    facts.add_row("money", money_text(view))
    facts.add_row("time", time_text(view))
    facts.add_row("last", Text(view.last_event or "-"))

    nodes = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shares = any(node.groups for node in view.nodes)
    for column in ("node", "market", "zone", "state", "age", "price", *(["groups"] if shares else [])):
        nodes.add_column(column, justify="right" if column in ("age", "price") else "left")
    for node in still_running(view) or view.nodes[-3:]:
        age = duration(node.age_ms - node.age_ms % 1000) if node.age_ms and node.age_ms >= 1000 else "-"
        price = hourly(node.micro_usd_per_hour)
        groups = [groups_text(node.groups)] if shares else []
        name = short_name(view.name, node.name)
        nodes.add_row(name, node.market, node.zone, node.status, age, price, *groups)
    title = Text(f"{view.name}: {view.status}{f' ({view.reason})' if view.reason else ''}")
    return Panel(Group(facts, "", nodes), title=title, subtitle=Text(header), box=box.ROUNDED)

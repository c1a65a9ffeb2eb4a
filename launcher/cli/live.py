"""The display of a live run: one screen on a terminal, plain lines in a pipe or log. Pure functions of a `RunView`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from launcher.money import dollars, duration, hourly
from launcher.report.sharing import groups_text
from launcher.runs.views import NodeView, RunView, short_name

BARS = "▁▂▃▄▅▆▇█"

ENDED = ("finished", "stopped", "failed")

STATE_STYLES = {
    "ready": "green",
    "starting": "yellow",
    "draining": "magenta",
    "stopping": "magenta",
    "kept": "magenta",
    "lost": "red",
}
"""Colour of a node's state. The state is also written, for terminals and people without colours."""

EVENTS, ROOM_FOR_BOTH = 5, 12
"""Events that nodes leave room for, on screens with at least so many lines for both."""

KEYS_LINE = "q leave  s stop  l logs  ? help"


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
    return [node for node in view.nodes if node.is_live]


def score_text(view: RunView) -> str:
    """Return the score, like `exact_match 0.710 (best 0.720, target 0.78)`.

    Before the first evaluation, the mean reward of the newest batch stands for the score.
    """
    if view.score is None and view.reward is not None:
        return f"reward {view.reward:.3f} in training, not evaluated yet"
    if view.score is None:
        return "not evaluated yet"
    details = [f"best {view.best_score:.3f}"] if view.best_score is not None else []
    details += [f"target {view.target:g}"] if view.target is not None else []
    return f"{view.metric} {view.score:.3f}" + (f" ({', '.join(details)})" if details else "")


def _evaluated(view: RunView) -> str:
    """Return the name of the score on a line that has the reward of the newest batch too."""
    return "evaluated" if view.metric == "reward" else view.metric


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
    """Return the run's state as one short log line; the line of a run of usual names fits 100 columns."""
    nodes = len(still_running(view))
    parts = [
        f"{view.name}: {view.status}",
        f"iteration {view.iteration}/{view.iterations}",
        *([f"reward {view.reward:.3f}"] if view.reward is not None else []),
        *([f"{_evaluated(view)} {view.score:.3f}"] if view.score is not None else []),
        *(["learns nothing"] if view.learning else []),
        f"{dollars(view.spent_micro_usd)} at {hourly(view.micro_usd_per_hour)}",
        f"{nodes} node{'s' if nodes != 1 else ''}",
    ]
    return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What a terminal shows of a run beside its view.

    `rewards`: mean reward of each iteration so far. `events`: the newest events, as lines. `header`: where the nodes
    are. `note`: the text in place of nodes and events, for help, logs and questions; empty for none.
    """

    view: RunView
    rewards: Sequence[float] = ()
    events: Sequence[str] = ()
    header: str = ""
    note: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw at most the height of the terminal, so that nothing scrolls and a resize tears nothing."""
        width, height = console.size
        facts = list(_facts(self.view, self.rewards))
        room = max(0, height - len(facts) - 2)
        body = _page(self.note, room) if self.note else _body(self.view, self.events, room)
        title = Text(f"{self.view.name}: {self.view.status}", style="bold")
        title.append(f" ({self.view.reason})" if self.view.reason else "")
        foot = Text(f"{KEYS_LINE}   {self.header}", style="dim")
        for line in [title, *facts, *body, foot][:height]:
            line.truncate(width, overflow="ellipsis")
            yield line


def _page(note: Sequence[str], room: int) -> list[Text]:
    """Return the first line, and as many of the last lines as fit."""
    fitting = note if len(note) <= room else [note[0], *note[len(note) - max(0, room - 1) :]][:room]
    return [Text(line) for line in fitting]


def _facts(view: RunView, rewards: Sequence[float]) -> Iterator[Text]:
    def row(name: str, value: str | Text) -> Text:
        return Text.assemble((f"{name:<10}", "bold"), value)

    yield row("iteration", f"{view.iteration}/{view.iterations}{_progress_text(view)}")
    reward = f"{view.reward:.3f}  " if view.reward is not None else "-"
    yield row("reward", Text.assemble(reward, (sparkline(rewards), "green")))
    yield row("score", score_text(view))
    if view.trainer:
        yield row("trainer", f"{short_name(view.name, view.trainer)} for {_whole_seconds(view.trainer_ms)}")
    if view.learning:
        yield row("learning", Text(view.learning, "yellow"))
    yield row("money", money_text(view) + savings_text(view))
    yield row("time", time_text(view))
    yield row("lost", f"{view.preemptions} preemption{'s' if view.preemptions != 1 else ''} so far")


def _progress_text(view: RunView) -> str:
    """Return how far the iteration is, judged by the time of the last ones: `  ▰▰▰▱▱▱▱▱▱▱ 40s of about 2m`."""
    if view.usual_iteration_ms is None or view.status in ENDED:
        return ""
    done = min(1.0, view.iteration_ms / max(1, view.usual_iteration_ms))
    bar = "▰" * round(done * 10) + "▱" * (10 - round(done * 10))
    return f"  {bar} {_whole_seconds(view.iteration_ms)} of about {_whole_seconds(view.usual_iteration_ms)}"


def _whole_seconds(ms: int) -> str:
    return duration(ms - ms % 1000) if ms >= 1000 else "0s"


def savings_text(view: RunView) -> str:
    """Return the money saved by spot prices so far, or "" for none."""
    saved = view.on_demand_micro_usd - view.spent_micro_usd
    return f"; {dollars(saved)} less than on demand" if saved > 0 else ""


def _body(view: RunView, events: Sequence[str], room: int) -> list[Text]:
    """Return nodes and events in `room` lines. Many nodes leave the events their lines if there is room for both."""
    nodes = list(_node_lines(view))
    kept = min(len(events), EVENTS) + 1 if events and room >= ROOM_FOR_BOTH else 0
    most_nodes = max(0, room - 1 - kept)
    if len(nodes) > most_nodes:
        hidden = len(nodes) - max(0, most_nodes - 1)
        nodes = [*nodes[: max(0, most_nodes - 1)], Text(f"... and {hidden} more nodes", style="dim")]
    lines = [Text(""), *nodes]
    left = room - len(lines) - 1
    if left > 0 and events:
        lines += [Text(""), *(Text(event) for event in events[-left:])]
    return lines[:room]


def _node_lines(view: RunView) -> Iterator[Text]:
    shown = [node for node in view.nodes if node.is_live or node.status == "lost"] or view.nodes[-3:]
    shares = any(node.groups for node in shown)
    rows = [("node", "market", "zone", "state", "age", "price", *(["groups"] if shares else []))]
    for node in shown:
        groups = [groups_text(node.groups)] if shares else []
        age, price = _whole_seconds(node.age_ms) if node.age_ms else "-", hourly(node.micro_usd_per_hour)
        rows.append((short_name(view.name, node.name), node.market, node.zone, node.status, age, price, *groups))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        line = Text(style="bold" if number == 0 else "")
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            text = cell.rjust(width) if column in (4, 5) else cell.ljust(width)
            line.append(text + "  ", style=STATE_STYLES.get(cell, "") if number and column == 3 else "")
        line.rstrip()
        yield line


HELP = (
    "",
    "q  leave the view; the run goes on (spotrl attach comes back)",
    "s  stop the run: asks first, keeps the last checkpoint, ends every node",
    "l  logs: the end of the log that changed last; l again for the view",
    "?  this help; ? again for the view",
    "Ctrl-C  asks: d detach, c continue, s stop; Ctrl-C again detaches",
)

"""Sentences and number formats of the report, shared by the terminal and the HTML page."""

from launcher.decide.point_cost import PointCost
from launcher.learning import learns_nothing
from launcher.ledger.left_in_buckets import left_words
from launcher.money import dollars, duration
from launcher.report.ranks import TrainerTime
from launcher.report.resume_command import plain_resume
from launcher.report.values import Report


def headline(report: Report) -> str:
    """Return one sentence with the cost of the reached target, or with the best score if the target was not reached."""
    target = report.target
    name = target.metric
    if target.value is None:
        reached = f"No target was set; best {name} so far {score(target.best.smoothed)}." if target.best else ""
        return reached or "No target was set, and nothing has been evaluated yet."
    if target.confirmed is not None:
        there = target.confirmed
        return (
            f"{name} {target.value:g} was reached at iteration {there.iteration} "
            f"for {dollars(there.micro_usd)} in {hours(there.hours)}."
        )
    if target.best is None:
        return f"{name} {target.value:g}: not reached; nothing has been evaluated yet."
    return (
        f"{name} {target.value:g}: not reached. Best so far {score(target.best.smoothed)} "
        f"at iteration {target.best.iteration}, after {dollars(target.best.micro_usd)}."
    )


ROUNDED_MICRO_USD = 50
"""Amounts up to this many micro-dollars read as $0.0000, and are no news."""


def bill_words(report: Report) -> list[str]:
    """Return what a reader must know of the clouds' bill beside its table; empty without a bill."""
    if report.bill is None:
        return []
    lines = []
    for one in report.bill.differences:
        if one.kind in ("unknown", "other") and abs(one.micro_usd) > ROUNDED_MICRO_USD:
            where = "" if one.node is None else f"{short_node(one.node, report.run.name)}: "
            lines.append(f"{where}{one.why}, {dollars(one.micro_usd)}.")
    missing = [short_node(node.node, report.run.name) for node in report.bill.nodes if node.basis != "billed"]
    if missing:
        lines.append(f"The imported bill does not cover the whole life of {', '.join(missing)}.")
    return lines


def bucket_words(report: Report) -> list[str]:
    """Return a line for each folder that the run left in a bucket, then the sources of their prices."""
    left = [folder for folder in report.left_in_buckets if folder.bytes != 0]
    lines = [f"Left in buckets: {left_words(folder)}." for folder in left]
    sources = dict.fromkeys(folder.price_source for folder in left if folder.bytes is not None)
    return [*lines, *(f"Storage is priced at the {source}." for source in sources)]


def point_words(point: PointCost, metric: str) -> str:
    """Return a sentence on the cost of the last point and the forecast for the next; empty before an evaluation."""
    if not point.evaluations:
        return ""
    last = f"The last +.01 of {metric}"
    since = dollars(point.since_gain_micro_usd or 0)
    if point.last_micro_usd is not None:
        last += f" cost {dollars(point.last_micro_usd)}"
        last += f", of it {since} since the best score" if point.since_gain_micro_usd else ""
    else:
        last += f": -, {point.why_no_last}"
        last += f", {since} since the best score" if point.since_gain_micro_usd else ""
    if point.next_micro_usd is None:
        return f"{last}." if point.why_no_next == point.why_no_last else f"{last}; the next: -, {point.why_no_next}."
    low, high = dollars(point.next_low_micro_usd or 0), point.next_high_micro_usd
    spread = f"{low} or more" if high is None else f"{low} to {dollars(high)}"
    return f"{last}; the next: about {dollars(point.next_micro_usd)} ({spread})."


def learning_words(report: Report) -> str:
    """Return a sentence if the last batches of the run taught nothing; empty if they did."""
    found = learns_nothing(report.learning[-1].health) if report.learning else ""
    return f"{found[0].upper()}{found[1:]}." if found else ""


def saving_words(report: Report) -> str:
    """Return one sentence with the saving against the same nodes on demand; empty without a cost."""
    saving = next((one for one in report.saved if one.kind == "counterfactual"), None)
    percent = saved_percent(report)
    if saving is None or saving.saved_micro_usd is None or percent is None:
        return ""
    word = "less" if saving.saved_micro_usd >= 0 else "more"
    return f"{dollars(abs(saving.saved_micro_usd))} ({abs(percent):.0f} %) {word} than the same nodes on demand."


def saved_percent(report: Report) -> float | None:
    """Return the share of the on-demand cost that was saved, in percent; None without a cost."""
    saving = next((one for one in report.saved if one.kind == "counterfactual"), None)
    if saving is None or saving.saved_micro_usd is None or not saving.micro_usd:
        return None
    return 100 * saving.saved_micro_usd / saving.micro_usd


def how_lost(notice: bool) -> str:
    return "preemption with notice" if notice else "preemption without notice"


STAND_INS_SHOWN = 5


def stand_in_words(report: Report) -> str:
    """Return a sentence on the nodes that replaced missing spot: when, for how much and why; empty without any."""
    lines = report.stand_ins
    if not lines:
        return ""
    shown = [
        f"{short_node(line.node, report.run.name)} at {line.hours:.2f} h ({line.why})"
        for line in lines[:STAND_INS_SHOWN]
    ]
    if len(lines) > STAND_INS_SHOWN:
        shown.append(f"{len(lines) - STAND_INS_SHOWN} more (--json)")
    count = f"{len(lines)} node{'s' if len(lines) > 1 else ''} stood in for missing spot"
    return f"{count}, {dollars(sum(line.micro_usd for line in lines))}: {'; '.join(shown)}."


def trainer_loss_words(report: Report) -> str:
    """Return a sentence on the losses of the trainer and what they cost; empty without any."""
    lost = report.trainer_losses
    if lost is None:
        return ""
    times = "once" if lost.losses == 1 else f"{lost.losses} times"
    again = f"{duration(round(1000 * lost.made_again_seconds))} made again ({dollars(lost.made_again_micro_usd)})"
    without = duration(round(1000 * lost.without_trainer_seconds))
    return f"The trainer was lost {times}: {again}, {without} without one ({dollars(lost.without_trainer_micro_usd)})."


def move_words(report: Report) -> str:
    """Return a sentence for each move to another region; empty without any."""
    return " ".join(f"After {line.hours:.2f} h: {line.why}; it took {line.minutes:.0f} min." for line in report.moves)


def resume_label(report: Report) -> str:
    """Return the words before the command that continues the run."""
    return "Go on with it" if report.resume_with == plain_resume(report.run.name) else "Go on with more money"


def drift_words(report: Report) -> str:
    """Return sentences on the newest drift from the base model and on each guard; empty without drift and guards."""
    words = []
    if report.drift:
        newest = report.drift[-1]
        words.append(f"Drift from the base model's images: {score(newest.drift)} at iteration {newest.iteration}.")
    for guard in report.target.guards:
        stands = "holds" if guard.holds else "is not reported" if guard.value is None else "does not hold"
        words.append(f"Guard {guard.metric} at most {guard.max:g} {stands}.")
    return " ".join(words)


def score(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def hours(value: float) -> str:
    return f"{value:.2f} h"


def age(days: float | None) -> str:
    """Return the age of a price at its use, as text."""
    if days is None:
        return "unknown age"
    return duration(max(0, round(days * 86_400_000))) + " old" if days < 1 else f"{days:.0f} days old"


def moment(iso: str) -> str:
    """Return an ISO time in UTC as `2027-01-15 08:00 UTC`; a date, or another text, as it is."""
    return f"{iso[:10]} {iso[11:16]} UTC" if iso[10:11] == "T" else iso


def span_words(report: Report) -> str:
    """Return the begin and the end of the run as a sentence, by the wall clock: the run's clock may run faster."""
    began, ended = report.provenance.started_at, report.provenance.ended_at
    named = " by the wall clock" if report.run.clock_factor != 1 else ""
    if not ended:
        return f"Since {moment(began)}{named}; not over."
    return f"From {began[:10]} {began[11:16]} to {moment(ended).removeprefix(began[:10]).strip()}{named}."


def clock_words(factor: float) -> str:
    """Return a sentence on the clock of hours, ages and times of events; empty if it is the wall clock.

    `factor`: seconds of the run's clock for a second of work on the reference machine.
    """
    if factor == 1:
        return ""
    return f"Hours, ages and times of events are on the run's clock, {factor:g} s for each second of work."


def phase_name(name: str) -> str:
    return name.replace("_", " ")


def short_node(node: str, run: str) -> str:
    """Return a node's name without the run's name: the whole report is about one run."""
    return node.removeprefix(f"{run}-")


def seconds(value: float | None) -> str:
    return "never" if value is None else duration(round(value * 1000))


def trainer_time_words(time: TrainerTime | None) -> str:
    """Return a sentence on the time of the trainer's GPUs; empty if none was seen."""
    if time is None:
        return ""
    shares = ", ".join(f"{phase_name(phase)} {share:.0%}" for phase, share in time.share.items() if share >= 0.005)
    return f"Time of every GPU of the trainer, after its start: {shares}."

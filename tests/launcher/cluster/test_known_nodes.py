"""Nodes of a run, indexed as they end: equal to a full rebuild, and decisions do not see a difference."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.events import Market
from launcher.decide.budget_guard import NO_LIMITS
from launcher.decide.facts import Facts, NodeRecord, Stage, Wanted
from launcher.decide.failover import LaunchRate
from launcher.decide.known_nodes import KnownNodes
from launcher.decide.launch_history import AGAIN_MS, Tried
from launcher.decide.reconcile import decide
from launcher.decide.replacing import attempt_of
from launcher.placement.options import Option
from tests.launcher.replay.markets import plan

MINUTE = 60_000
PLAN = plan("abc", 4)
[SITE] = PLAN.sites
OPTIONS = SITE.rollout
QUOTA = "VcpuLimitExceeded: limit of 64"
ENDS = ("no_capacity", "denied", "gone", "released")
WANTED = Wanted(
    run="demo",
    slots=PLAN.slots,
    limits=NO_LIMITS,
    deadline_ms=None,
    allowance_ms=0,
    settle_ms=0,
    launch_rate=LaunchRate(),
)


def requested(number: int, slot: str, generation: int, option: Option, at_ms: int) -> NodeRecord:
    return NodeRecord(
        name=f"demo-{slot}-g{generation}-{number}",
        slot=slot,
        generation=generation,
        role="trainer" if slot == "trainer" else "rollout",
        market=option.placement.market,
        micro_usd_per_hour=option.placement.micro_usd_per_hour,
        requested_ms=at_ms,
        reserved_micro_usd=0,
        happened={"requested": at_ms},
        wanted=option,
        zone=option.placement.zone,
    )


def next_state(node: NodeRecord, now_ms: int, random: Random) -> NodeRecord:
    """Return the node after something happened to it: it came up, is being released, or ended in one of four ways."""
    if "up" not in node.happened and random.random() < 0.5:
        return replace(node, happened={**node.happened, "up": now_ms, "ready": now_ms})
    if random.random() < 0.2:
        return replace(node, happened={**node.happened, "releasing": now_ms})
    end = random.choice(ENDS[2:] if "up" in node.happened else ENDS)
    evidence = QUOTA if end == "denied" and random.random() < 0.7 else random.choice(("", "broken"))
    ended_ms = max(node.requested_ms, now_ms - random.choice((0, 0, 7 * MINUTE)))  # the cloud may report an end late
    return replace(
        node,
        happened={**node.happened, end: ended_ms},
        evidence=evidence,
        reclaimed=end == "gone" and node.market is Market.SPOT,
    )


def answers(tried: Tried, now_ms: int) -> list[object]:
    """Return every answer that decisions read from the attempts."""
    known = [tried.trainer, tried.home, tried.out_since_ms, tried.denials("trainer"), tried.denials("rollout")]
    known.append(sorted(attempt.name for attempt in tried.trainers_refused))
    for option in OPTIONS:
        known += [
            sorted(attempt.name for attempt in tried.refused(option)),
            tried.cools_until_ms(option, AGAIN_MS),
            tried.taken_until_ms(option, AGAIN_MS),
            tried.there_since_ms(option),
            tried.is_on_trial(option, now_ms),
            tried.is_denied(option),
            tried.live_in(option.placement.zone),
        ]
    return known


def facts_of(nodes, now_ms: int, planned_ms: int) -> Facts:
    return Facts(
        now_ms=now_ms,
        stage=Stage.RUNNING,
        reason="",
        stage_ms=0,
        planned_ms=planned_ms,
        nodes=nodes,
        metered=0,
        sites=PLAN.sites,
    )


@pytest.mark.slow
@given(seed=st.integers(0, 10**6), steps=st.integers(1, 60), resumed=st.booleans())
@settings(max_examples=150, deadline=None)
def test_known_nodes_equal_a_full_rebuild_after_every_change(seed, steps, resumed):
    random, known, nodes, now_ms = Random(seed), KnownNodes(), {}, 0
    for step in range(steps):
        now_ms += random.choice((0, 1, 20)) * MINUTE
        live = [node for node in nodes.values() if node.is_live]
        if live and random.random() < 0.6:
            changed = next_state(random.choice(live), now_ms, random)
        else:
            slot = random.choice(PLAN.slots).name
            option = SITE.trainer[0] if slot == "trainer" else random.choice(OPTIONS)
            generation = sum(node.slot == slot for node in nodes.values())
            changed = requested(step, slot, generation, option, now_ms)
        nodes[changed.name] = changed
        known.update([changed])
        planned_ms = 15 * MINUTE if resumed and step > steps // 2 else 0
        whole = list(nodes.values())
        assert list(known) == whole
        assert known.live == [node for node in whole if node.is_live]
        assert answers(known.tried(planned_ms), now_ms) == answers(Tried(map(attempt_of, whole), planned_ms), now_ms)
        given_all, given_known = facts_of(whole, now_ms, planned_ms), facts_of(known, now_ms, planned_ms)
        assert decide(given_all, WANTED) == decide(given_known, WANTED)


def test_the_order_in_which_attempts_end_does_not_matter():
    random = Random(4)
    nodes = [requested(n, f"spot-{n % 4}", n // 4, random.choice(OPTIONS), n * MINUTE) for n in range(200)]
    ended = [next_state(node, node.requested_ms + MINUTE, random) for node in nodes]
    shuffled = random.sample(ended, len(ended))
    one, other = KnownNodes(ended), KnownNodes(shuffled)
    assert answers(one.tried(0), 10**8) == answers(other.tried(0), 10**8)


def test_a_corrected_record_of_an_ended_node_is_taken_over():
    node = requested(0, "spot-0", 0, OPTIONS[0], 0)
    refused = replace(node, happened={"requested": 0, "no_capacity": MINUTE})
    known = KnownNodes([refused])
    assert known.tried(0).refused(OPTIONS[0])
    known.update([replace(node, happened={"requested": 0, "released": MINUTE})])
    assert not known.tried(0).refused(OPTIONS[0])

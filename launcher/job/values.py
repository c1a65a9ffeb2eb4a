"""Values as people write them in a job file: amounts, rates, durations, names, addresses."""

import ipaddress
import re
from typing import Annotated

from pydantic import (
    AfterValidator,
    BeforeValidator,
    PlainSerializer,
    WithJsonSchema,
)

from launcher.market.offers import CLOUDS
from launcher.money import dollars, exact_dollars, exact_duration, parse_duration, parse_hourly, parse_money


def _some_money(micro_usd: int) -> int:
    if micro_usd <= 0:
        raise ValueError(
            f"{dollars(micro_usd)} is not a budget; use more than $0 (in a shell, quote it: '$40', or write 40)"
        )
    return micro_usd


def _some_price(micro_usd: int) -> int:
    if micro_usd <= 0:
        raise ValueError(f"{dollars(micro_usd)}/h is no price; use more than $0/h")
    return micro_usd


def _some_money_per_point(micro_usd: int) -> int:
    if micro_usd <= 0:
        raise ValueError(f"{dollars(micro_usd)} for a point (+.01 of score) ends every run; use more than $0, like $50")
    return micro_usd


def _some_time(ms: int) -> int:
    if ms <= 0:
        raise ValueError("0s is no time at all; use a second or more")
    return ms


def _written_as(types: list[str], example: str) -> WithJsonSchema:
    """Return the JSON schema of the text in a file, for editors. The code holds an integer."""
    return WithJsonSchema({"type": types if len(types) > 1 else types[0], "examples": [example]})


MicroUsd = Annotated[
    int,
    BeforeValidator(lambda value: parse_money(str(value))),
    AfterValidator(_some_money),
    PlainSerializer(exact_dollars),
    _written_as(["string", "number"], "$40"),
]
"""An amount, written `$40`. Micro-dollars (integer) in the code, and `$40` again in the ledger's copy of the job."""

MicroUsdPerHour = Annotated[
    int,
    BeforeValidator(lambda value: parse_hourly(str(value))),
    AfterValidator(_some_price),
    PlainSerializer(lambda micro_usd: f"{exact_dollars(micro_usd)}/h"),
    _written_as(["string", "number"], "$1.25/h"),
]
"""A rate, written `$40/h`. Micro-dollars per hour (integer) in the code."""

MicroUsdPerPoint = Annotated[
    int,
    BeforeValidator(lambda value: parse_money(str(value))),
    AfterValidator(_some_money_per_point),
    PlainSerializer(exact_dollars),
    _written_as(["string", "number"], "$50"),
]
"""An amount for +.01 of score, written `$50`. Micro-dollars (integer) in the code."""

DurationMs = Annotated[
    int,
    BeforeValidator(lambda value: parse_duration(str(value))),
    AfterValidator(_some_time),
    PlainSerializer(exact_duration),
    _written_as(["string"], "12h30m"),
]
"""A duration, written `12h30m`. Milliseconds (integer) in the code."""


SLOTS_IN_NAMES = ("-trainer-g", "-spot-")
"""Text after the run's name in the names of nodes: `digits-trainer-g0`, `digits-spot-3-g1`."""


def _fits_every_cloud(value: str) -> str:
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", value):
        raise ValueError(
            f"name is {value!r}; use up to 40 of a-z, 0-9 and -, beginning with a letter, "
            "because it becomes part of the names of nodes"
        )
    if slot := next((part for part in SLOTS_IN_NAMES if part in f"{value}-"), None):
        raise ValueError(
            f"name is {value!r}; leave {slot!r} out, because nodes are called NAME{slot}..., and another run's "
            "nodes could be taken for this run's"
        )
    return value


def _known_infra(value: str) -> str:
    names = [name.strip() for name in value.split(",")]
    if "/" in value:
        raise ValueError(
            f"infra is {value!r}; name clouds only ({', '.join(CLOUDS)}), and say regions under "
            "resources.trainer.infra and resources.rollout.infra"
        )
    if names != ["local"] and (not set(names) <= set(CLOUDS) or len(set(names)) < len(names)):
        raise ValueError(
            f"infra is {value!r}; use local (this machine, nothing is bought), or clouds: {', '.join(CLOUDS)} or "
            f"{','.join(CLOUDS)}"
        )
    return ",".join(names)


def _cidr(value: str) -> str:
    try:
        network = ipaddress.ip_network(value)
    except ValueError:
        raise ValueError(f"ssh_from is {value!r}; write addresses as CIDR, like 203.0.113.7/32") from None
    if network.prefixlen == 0:
        raise ValueError(f"ssh_from is {value!r}, the whole internet; name your own addresses, like 203.0.113.7/32")
    return str(network)


def _variable_names(value: tuple[str, ...]) -> tuple[str, ...]:
    if not all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) for name in value):
        raise ValueError(
            "secrets has an entry that is no name of an environment variable; "
            "write names only, like [HF_TOKEN], and export the values where you run spotrl"
        )
    return value


def _variable_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError(
            "webhook is no name of an environment variable; write the name only, like SLACK_WEBHOOK, and export the "
            "URL where you run spotrl, because the URL of a webhook is its password"
        )
    return value


def _key_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError(
            "key is no name of an environment variable; write the name only, like WANDB_API_KEY, and export the key "
            "where you run spotrl"
        )
    return value


RunName = Annotated[str, AfterValidator(_fits_every_cloud)]
Infra = Annotated[str, AfterValidator(_known_infra)]
Cidr = Annotated[str, AfterValidator(_cidr)]
VariableName = Annotated[str, AfterValidator(_variable_name)]
KeyName = Annotated[str, AfterValidator(_key_name)]
VariableNames = Annotated[tuple[str, ...], AfterValidator(_variable_names)]

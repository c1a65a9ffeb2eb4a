"""The fake clouds from a shell.

python -m tests.fakes.clouds --up DIR [--cache DIR]            a world at DIR, which stays until --down
python -m tests.fakes.clouds --in DIR [-- COMMAND...]          a command (or a shell) inside, as a client
python -m tests.fakes.clouds --on DIR NODE [-- COMMAND...]     a command on a host
python -m tests.fakes.clouds --ask DIR hosts|machines|inventory|leftovers|calls|faults
python -m tests.fakes.clouds --do DIR reclaim NODE [seconds=30] [notice=true]     or freeze, thaw, fault, clear, ...
python -m tests.fakes.clouds --down DIR
python -m tests.fakes.clouds --bake [--cache DIR]
"""

import json
import os
import sys
from pathlib import Path

from tests.fakes.clouds.image import baked, cache_folder
from tests.fakes.clouds.world import World, why_not


def main(arguments: list[str]) -> int:
    cache = cache_folder()
    if "--cache" in arguments:
        at = arguments.index("--cache")
        cache = Path(arguments[at + 1])
        arguments = arguments[:at] + arguments[at + 2 :]
    match arguments:
        case ["--bake"]:
            print(baked(cache, print))
        case ["--why-not"]:
            print(why_not() or "it can")
        case ["--up", folder]:
            World(Path(folder), cache).up(attached=False)
            print(f"up: {folder}")
        case ["--in", folder, *command]:
            world = World.at(Path(folder).absolute())
            inside = world.entering(command[1:] or ["bash"])
            os.execvpe(inside[0], inside, world.environment())
        case ["--on", folder, node, *command]:
            print(World.at(Path(folder).absolute()).on(node, command[1:] or ["ps", "aux"]), end="")
        case ["--ask", folder, what]:
            world = World.at(Path(folder).absolute())
            orders = {"hosts": "all_hosts", "faults": "told_faults"}
            answer = world.leftovers() if what == "leftovers" else world.ask(orders.get(what, what))
            print(json.dumps(answer, indent=2))
        case ["--do", folder, order, *rest]:
            named = dict(one.split("=", 1) for one in rest if "=" in one)
            args = [_value(one) for one in rest if "=" not in one]
            more = {key: _value(value) for key, value in named.items()}
            print(json.dumps(World.at(Path(folder).absolute()).ask(order, *args, **more)))
        case ["--bury", folder, *remove]:
            sys.stdin.read()  # until the owner of the world ends for any reason
            World.at(Path(folder)).down(keep=not remove)
        case ["--down", folder]:
            World.at(Path(folder).absolute()).down(keep=True)
            (Path(folder) / "world.json").unlink(missing_ok=True)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

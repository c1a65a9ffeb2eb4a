"""A fake `systemctl --user` that restarts one unit's command like `Restart=on-failure`.

A test copies it to FOLDER/bin/systemctl and puts that on PATH. Each call is appended to FOLDER/calls; the pid of the
supervisor is in FOLDER/pid. If FOLDER/broken exists, it answers as if the user had no session.
"""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

folder = Path(__file__).parent.parent
units = Path(os.environ["XDG_CONFIG_HOME"]) / "systemd" / "user"


def supervise(unit: str) -> None:
    """Run the unit's command until it ends with exit code 0. Like systemd, do not pass on the caller's environment."""
    lines = [line.partition("=") for line in (units / unit).read_text().splitlines()]
    words = {name: [value for key, _, value in lines if key == name] for name, _, _ in lines}
    environ = dict(shlex.split(value)[0].replace("%%", "%").split("=", 1) for value in words["Environment"])
    command = shlex.split(words["ExecStart"][0].replace("%%", "%").replace("$$", "$"))
    with Path(words["StandardOutput"][0].removeprefix("append:")).open("ab") as log:
        while subprocess.run(command, env=environ, stdout=log, stderr=log).returncode != 0:
            time.sleep(0.1)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["supervise"]:
        supervise(arguments[1])
        return 0
    with (folder / "calls").open("a") as calls:
        calls.write(" ".join(arguments) + "\n")
    if (folder / "broken").exists():
        print("Failed to connect to bus: No medium found", file=sys.stderr)
        return 1
    if arguments[:3] == ["--user", "enable", "--now"]:
        child = subprocess.Popen(
            [sys.executable, __file__, "supervise", arguments[3]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        (folder / "pid").write_text(str(child.pid))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

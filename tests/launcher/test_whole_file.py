"""A file that the user named is replaced whole, or left as it was."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from launcher.whole_file import whole_file


def test_a_file_is_replaced_and_a_link_leads_to_it_as_before(tmp_path):
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to(tmp_path / "real.csv")
    with whole_file(tmp_path / "link.csv") as file:
        file.write("né\n")
        assert (tmp_path / "real.csv").read_text() == "old"
    assert (tmp_path / "real.csv").read_text("utf-8") == "né\n"
    assert (tmp_path / "link.csv").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.csv", "real.csv"]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt(), ArithmeticError("a sum")])
def test_an_error_leaves_the_old_file_and_no_other(tmp_path, error):
    path = tmp_path / "costs.csv"
    path.write_text("old")

    def write():
        with whole_file(path) as file:
            file.write("half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("costs.csv", "old")]


WRITER = """
import sys, time
from pathlib import Path
from launcher.whole_file import whole_file
with whole_file(Path(sys.argv[1])) as file:
    file.write("new")
    file.flush()
    print("half", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_writer_that_is_killed_or_frozen_leaves_the_old_file_and_the_next_write_works(tmp_path, how):
    path = tmp_path / "costs.csv"
    path.write_text("old")
    writer = subprocess.Popen([sys.executable, "-c", WRITER, path, "60"], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout.readline() == "half\n"
        writer.send_signal(how)
        time.sleep(0.1)
        assert path.read_text() == "old"
        with whole_file(path) as file:
            file.write("second")
        assert path.read_text() == "second"
    finally:
        writer.kill()
        writer.communicate()
    assert path.read_text() == "second"


def test_a_pipe_is_written_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with whole_file(pipe) as file:
        file.write("rows")
    reader.join(30)
    assert read == ["rows"]
    assert pipe.is_fifo()


LIMITED = """
import resource, signal, sys
from pathlib import Path
from launcher.whole_file import whole_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
with whole_file(Path(sys.argv[1])) as file:
    file.write("x" * 100_000)
"""


def test_a_disk_without_room_leaves_the_old_file_and_no_other(tmp_path):
    """A limit of a file's size stands for the full disk: the write fails half way."""
    path = tmp_path / "costs.csv"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", LIMITED, path], capture_output=True, text=True)
    assert "OSError: [Errno 27]" in done.stderr
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("costs.csv", "old")]

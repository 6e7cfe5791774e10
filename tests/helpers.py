"""What several test files use."""

import contextlib
import csv
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def wait_until(condition, seconds=300):
    """Returns whether the condition was met in time. Patience costs nothing when it is, and machines are busy."""
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return met


def processes_with(marker):
    """The live processes with this variable in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:  # it ended meanwhile, or is not ours
            continue
    return found


def engines(marker):
    """The live Doom engines started by a process with this variable in its environment."""
    found = []
    for pid in processes_with(marker):
        try:
            if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].endswith(b"vizdoom"):  # not its launcher
                found.append(pid)
        except OSError:
            continue
    return found


def kill_all(marker):
    """Kills the processes with this variable in their environment."""
    for pid in processes_with(marker):
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(pid, signal.SIGKILL)


def parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return -1


def gradients(module):
    return [p.grad for p in module.parameters() if p.grad is not None and p.grad.abs().sum() > 0]


def call(script, monkeypatch, *arguments):
    """Calls a script's main function with these arguments, without the seconds that a new process takes to start."""
    monkeypatch.setattr(sys, "argv", ["script.py", *map(str, arguments)])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        script.main()
    finally:
        for file in Path("/proc/self/fd").iterdir():  # the lock of a refused run, which would end with its process
            if file.is_dir() and "/runs/" in os.readlink(file):
                os.close(int(file.name))
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_in_process(script, folder, monkeypatch, *arguments):
    """Trains in a folder of its own. Returns the run folder and the checkpoint."""
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    call(script, monkeypatch, *arguments)
    (run_folder,) = Path("runs").resolve().iterdir()
    return run_folder, torch.load(run_folder / "checkpoint.pt")


def answer_of(script, monkeypatch, *arguments):
    """The one or two lines with which a script refuses these arguments."""
    try:
        call(script, monkeypatch, *arguments)
    except SystemExit as answer:
        assert len(str(answer).splitlines()) <= 2
        return str(answer)
    raise AssertionError(f"{arguments} were accepted")


class Run:
    """A run of a script, or of a module, in a folder of its own, and all processes that it started."""

    def __init__(self, folder, script, *arguments, **options):
        self.folder, self.marker = folder, f"GACE_TEST={uuid.uuid4()}"
        environment = {**os.environ, "GACE_TEST": self.marker.split("=")[1], "PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        program = [str(ROOT / script)] if str(script).endswith(".py") else ["-m", script]
        command = [sys.executable, *program, *map(str, arguments)]
        self.process = subprocess.Popen(command, cwd=folder, env=environment, **(pipes | options))

    def wait(self, seconds=900):
        self.output = self.process.communicate(timeout=seconds)[0]
        return self.process.returncode

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        kill_all(self.marker)
        self.process.communicate()

    def descendants(self):
        return [pid for pid in processes_with(self.marker) if pid != self.process.pid]

    @property
    def run_folder(self):
        (folder,) = (self.folder / "runs").iterdir()
        return folder

    def checkpoint(self):
        return torch.load(self.run_folder / "checkpoint.pt")

    def updates(self):
        try:
            return self.checkpoint()["counters"]["updates"]
        except (ValueError, FileNotFoundError):
            return -1

    def rows(self):
        with open(self.run_folder / "metrics.csv") as file:
            return list(csv.DictReader(file))

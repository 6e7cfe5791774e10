"""Trains while engines, workers and the main process are killed, stopped and resumed at random.

    python -m tools.soak                        # ten minutes of each script
    python -m tools.soak --minutes 2 --scripts a3c_gace_vizdoom.py

It ends with a table of what was done and survived. It fails if anything hung, was lost or was left behind.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

ROOT = Path(__file__).parent.parent
SMALL = (
    "--total-updates 1000000 --eval-every 40 --episodes 4 --accuracy-states 4 --checkpoint-every 1 --no-cuda".split()
)
SMALL_OF = {
    "a3c_gace_vizdoom.py": ["--gdan", "--warmup", "4", "--num-workers", "2", "--num-envs", "6"],
    "sac_gace_ur5.py": ["--gdan", "--warmup", "400", "--batch-size", "16", "--goal-batch-size", "16"],
}
PATIENCE = 60  # seconds without a new update: it hangs


@dataclass
class Args:
    minutes: float = 10.0
    """time to spend on each script"""
    scripts: tuple[str, ...] = tuple(SMALL_OF)
    """the scripts to train"""
    seed: int = 1
    """seed of what is killed when"""


class Soak:
    """One run in a folder of its own, started again whenever it ends."""

    def __init__(self, script, folder):
        self.script, self.folder, self.marker = script, folder, str(uuid.uuid4())
        self.process, self.run_folder, self.done = None, None, Counter()

    def start(self):
        arguments = ["--resume", self.run_folder] if self.run_folder else [*SMALL, *SMALL_OF[self.script]]
        environment = {**os.environ, "GACE_SOAK": self.marker, "TMPDIR": str(self.folder)}
        with open(self.folder / "output.txt", "w") as output:
            command = [sys.executable, str(ROOT / self.script), *map(str, arguments)]
            self.process = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=output, stderr=output)

    def processes(self):
        """The live processes of the run by kind."""
        found = {"main": [], "worker": [], "engine": [], "other": []}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.marker.encode() not in (path / "environ").read_bytes():
                    continue
                command = (path / "cmdline").read_bytes()
            except OSError:
                continue
            if path.name == str(self.process.pid):
                found["main"].append(int(path.name))
            elif command.split(b"\0")[0].endswith(b"vizdoom"):
                found["engine"].append(int(path.name))
            elif b"spawn_main" in command:
                found["worker"].append(int(path.name))
            else:  # launchers of engines, and multiprocessing's own
                found["other"].append(int(path.name))
        return found

    def checkpoint(self):
        for path in self.folder.glob("runs/*/checkpoint.pt"):
            self.run_folder = path.parent
            return torch.load(path)
        return None

    def wait_for_progress(self):
        """Waits for updates that were not there before; starts the run again if it has ended."""
        before = self.checkpoint()
        updates = before["counters"]["updates"] if before else 0
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            time.sleep(0.2)
            if self.process.poll() is not None:
                output = (self.folder / "output.txt").read_text()
                if "Traceback" in output or (self.process.returncode > 0 and "--resume" not in output):
                    raise SystemExit(f"{self.script} ended without a clear line:\n{output[-2000:]}")
                self.done["resumed"] += 1
                self.start()
            after = self.checkpoint()
            if after and after["counters"]["updates"] > updates:
                rows = [row["update"] for row in after["rows"]]
                if rows != sorted(set(rows)) or (before and len(rows) < len(before["rows"])):
                    raise SystemExit(f"{self.script} lost rows: {rows}")
                return
        raise SystemExit(f"{self.script} hangs at update {updates} after {dict(self.done)}")

    def disturb(self, rng):
        processes = {kind: pids for kind, pids in self.processes().items() if pids and kind != "other"}
        if not processes:  # it has just ended
            return
        kind = rng.choice(list(processes))
        victim, how = rng.choice(processes[kind]), rng.choice(["SIGKILL", "SIGSTOP", "SIGINT"])
        if kind != "main" and how == "SIGINT":
            how = "SIGKILL"
        self.done[f"{kind} {how}"] += 1
        try:
            os.kill(victim, getattr(signal, how))
            if how == "SIGSTOP":
                time.sleep(rng.uniform(0.1, 3))
                os.kill(victim, signal.SIGCONT)
        except ProcessLookupError:  # it has just ended
            pass

    def end(self):
        """Ends the run as Ctrl-C does; nothing may be left."""
        self.process.send_signal(signal.SIGINT)
        end = time.monotonic() + 20
        while any(self.processes().values()) and time.monotonic() < end:
            self.process.poll()
            time.sleep(0.1)
        left = [str(path) for path in self.folder.iterdir() if path.name not in ("runs", "output.txt")]
        left += [f"{kind} {pid}" for kind, pids in self.processes().items() for pid in pids]
        # The next engine to start sweeps the first; the second is PyTorch's own.
        if left := [name for name in left if "gace-doom" not in name and "torchinductor" not in name]:
            raise SystemExit(f"{self.script} left behind: {', '.join(left)}")


def main():
    args = tyro.cli(Args, description=__doc__)
    rng, rows = random.Random(args.seed), []
    for script in args.scripts:
        if script not in SMALL_OF:
            raise SystemExit(f"unknown script {script!r}; use {' or '.join(SMALL_OF)}")
        with tempfile.TemporaryDirectory(prefix="gace-soak-") as folder:
            soak = Soak(script, Path(folder))
            soak.start()
            try:
                end = time.monotonic() + 60 * args.minutes
                soak.wait_for_progress()
                while time.monotonic() < end:
                    soak.disturb(rng)
                    soak.wait_for_progress()
                soak.end()
            finally:
                for pids in soak.processes().values():
                    for pid in pids:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                soak.process.wait()
            updates = soak.checkpoint()["counters"]["updates"]
        rows += [(script, what, number) for what, number in sorted(soak.done.items())]
        rows.append((script, "updates made", updates))
    print("| script | what was done | times |\n| --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()

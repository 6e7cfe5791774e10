"""Trains while engines, workers and the main process are killed, stopped and resumed at random.

    python -m tools.soak                        # ten minutes of each script
    python -m tools.soak --minutes 2 --scripts a3c_gace_vizdoom.py

It ends with a table of what was done and survived. It fails if anything hung, was lost or was left behind.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from helpers import Run, engines, processes_with, wait_until

SMALL = "--gdan --total-updates 1000000 --eval-every 40 --episodes 4 --accuracy-states 4 --checkpoint-every 1 "
FLAGS = {
    "a3c_gace_vizdoom.py": SMALL + "--warmup 4 --num-workers 2 --num-envs 6",
    "sac_gace_ur5.py": SMALL + "--warmup 400 --batch-size 16 --goal-batch-size 16 --no-cuda",
}


@dataclass
class Args:
    minutes: float = 10.0  # time to spend on each script
    scripts: tuple[str, ...] = tuple(FLAGS)  # the scripts to train
    seed: int = 1  # seed of what is killed when


def start(script, folder):
    """Starts the run of a folder, or goes on with it."""
    runs = list(folder.glob("runs/*/checkpoint.pt"))
    arguments = ["--resume", runs[0].parent] if runs else FLAGS[script].split()
    with open(folder / "output.txt", "w") as output:
        options = {"stdout": output, "stderr": output}
        return Run(folder, script, *arguments, **options)


def has_ended(run):
    """Whether the main process has ended. A traceback, or an error that does not say how to go on, is a failure."""
    if run.process.poll() is None:
        return False
    output = (run.folder / "output.txt").read_text()
    if "Traceback" in output or (run.process.returncode > 0 and "--resume" not in output):
        raise SystemExit(f"the run ended without a clear line:\n{output[-2000:]}")
    return True


def disturb(run, rng):
    """Kills or stops one of the run's processes. Returns what was done."""
    workers = []
    for pid in run.descendants():
        with suppress(OSError):
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                workers.append(pid)
    kinds = {"main": [run.process.pid], "worker": workers, "engine": engines(run.marker)}
    kind = rng.choice([kind for kind, pids in kinds.items() if pids])
    how = rng.choice(["SIGKILL", "SIGSTOP", "SIGINT"] if kind == "main" else ["SIGKILL", "SIGSTOP"])
    victim = rng.choice(kinds[kind])
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(victim, getattr(signal, how))
        if how == "SIGSTOP":
            time.sleep(rng.uniform(0.1, 3))
            os.kill(victim, signal.SIGCONT)
    return f"{kind} {how}"


def soak(script, folder, seconds, rng):
    """Trains and disturbs. Returns how often each thing was done."""
    done, rows, end = Counter(), [], time.monotonic() + seconds
    run = start(script, folder)
    try:
        while True:
            updates, patience = run.updates(), time.monotonic() + 60
            while run.updates() <= updates:
                if time.monotonic() > patience:
                    raise SystemExit(f"{script} hangs at update {updates} after {dict(done)}")
                if has_ended(run):
                    run.__exit__()
                    done["resumed"] += 1
                    run = start(script, folder)
                time.sleep(0.2)
            before, rows = rows, [row["update"] for row in run.checkpoint()["rows"]]
            if rows[: len(before)] != before:
                raise SystemExit(f"{script} lost rows: it had {before}, now {rows}")
            if time.monotonic() > end:
                break
            done[disturb(run, rng)] += 1
        run.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(60)
        wait_until(lambda: not processes_with(run.marker), 20)
        left = [f"process {pid}" for pid in processes_with(run.marker)]
        # The next engine to start removes a killed one's folder; torchinductor's is PyTorch's own.
        known = ("runs", "output.txt", "gace-doom", "torchinductor")
        left += [path.name for path in folder.iterdir() if not path.name.startswith(known)]
        if left:
            raise SystemExit(f"{script} left behind: {', '.join(left)}")
        return done | {"updates made": run.updates()}
    finally:
        run.__exit__()


def main():
    args = tyro.cli(Args, description=__doc__)
    rng = random.Random(args.seed)
    if unknown := set(args.scripts) - FLAGS.keys():
        raise SystemExit(f"unknown script {min(unknown)!r}; use {' or '.join(FLAGS)}")
    rows = []
    for script in args.scripts:
        with tempfile.TemporaryDirectory(prefix="gace-soak-") as folder:
            os.environ["TMPDIR"] = folder  # so that temporary files of the run are seen if they stay
            done = soak(script, Path(folder), 60 * args.minutes, rng)
        rows += [f"| {script} | {what} | {number} |" for what, number in sorted(done.items())]
    print("| script | what was done | times |\n| --- | --- | --- |", *rows, sep="\n")


if __name__ == "__main__":
    main()

"""Trains every combination of tasks, algorithms and seeds, on this machine or on a Ray cluster.

    python -m tools.grid --tasks v1 r1 --algorithms a3c a3c+gace+gdan sac sac+gace --seeds 2 3 4
    python -m tools.grid --tasks r1 --algorithms sac+gace+gdan+concat sac+gace+red -- --total-updates 10000
    python -m tools.grid --tasks v1 --algorithms a3c+gace+paper --dry-run        # what would run, and for how long
    python -m tools.grid --tasks v1 --algorithms a3c --address auto --runs /shared/runs

An algorithm is named as its run is: a3c or sac, then gace, vae, rad, ae or curl, then gdan, frozenN, concat, gaussian,
a goal or paper. Everything after `--` goes to the scripts. A second call goes on where the first one stopped. On a
cluster, all machines must see the folder --runs.
"""

import csv
import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

import a3c_gace_vizdoom
import envs
import sac_gace_ur5
from tools.report import MAY_DIFFER

ROOT = Path(__file__).resolve().parent.parent
SECONDS_PER_UPDATE = {"v": 1 / 28, "r": 1 / 8}  # on 2 cores, for the estimate of a run that has not begun
VARIANTS = {
    "gdan": ["--gdan"],
    "concat": ["--concat-query"],
    "gaussian": ["--policy", "gaussian"],
    "paper": ["--paper"],
}


@dataclass
class Args:
    tasks: tuple[str, ...]  # tasks: v1 to v4, r1 to r3
    algorithms: tuple[str, ...]  # algorithms: those of A3C train on V tasks, those of SAC on R tasks
    seeds: tuple[int, ...] = (2, 3, 4)  # seeds
    runs: Path = Path("runs")  # folder for the runs, their logs and the report
    address: str | None = None
    """address of a Ray cluster: auto, host:port or ray://host:port; by default Ray starts inside this process"""
    cpus_per_run: int = 2  # cores of a run: workers of A3C, threads of SAC
    gpus_per_run: float = 0  # GPUs of a run
    retries: int = 1  # how often a run that fails is tried again
    dry_run: bool = False  # only print the plan, with an estimate of hours


@dataclass
class Run:
    """One combination. It is sent to the machine that trains it."""

    name: str
    """task__algorithm__seed, as its folder begins"""
    script: str
    flags: list[str]
    settings: dict
    """what the settings of a run to resume must be"""
    total_updates: int
    runs: Path
    failure: str | None = None
    state: str = "waiting"

    def folder(self):
        """The newest run folder with a checkpoint, or None."""
        found = sorted(self.runs.glob(f"{self.name}__*/checkpoint.pt"), key=lambda path: path.stat().st_mtime)
        return found[-1].parent if found else None

    def evaluations(self):
        """The rows of metrics.csv."""
        path = self.folder() and self.folder() / "metrics.csv"
        if not path or not path.exists():
            return []
        with open(path) as file:
            return [row for row in csv.DictReader(file) if (row["update"] or "").isdecimal()]

    def updates(self):
        """The last evaluated update."""
        return max((int(row["update"]) for row in self.evaluations()), default=0)

    def log(self):
        return self.runs / f"{self.name}.log"


# ---------------------------------------------------------------------------------------------------------------- plan


def flags_of(algorithm):
    """The script of an algorithm and the flags that make it."""
    base, *parts = algorithm.split("+")
    script = {"a3c": a3c_gace_vizdoom, "sac": sac_gace_ur5}.get(base)
    flags, aux = [], "none"
    for part in parts:
        if part in ("gace", "vae", "rad", "ae", "curl") and aux == "none":
            aux = part
        elif part in VARIANTS:
            flags += VARIANTS[part]
        elif part.startswith("frozen"):
            flags += ["--freeze-discriminator-at", part.removeprefix("frozen")]
        elif part in envs.goals_of("r3"):
            flags += ["--fixed-goal", part]
        else:
            script = None
    if script is None:
        raise SystemExit(f"unknown algorithm {algorithm!r}; use for example a3c+gace+gdan or sac+curl (see --help)")
    return script, ["--aux", aux, *flags]


def make_plan(args, extra):
    """One Run for each combination that exists. The scripts' own checks refuse what they cannot train."""
    plan = {}
    for algorithm in args.algorithms:
        script, flags = flags_of(algorithm)
        for task in args.tasks:
            if task not in (*envs.V_TASKS, *envs.R_TASKS):
                raise SystemExit(f"unknown task {task!r}; use any of {' '.join((*envs.V_TASKS, *envs.R_TASKS))}")
            if (task in envs.V_TASKS) != (script is a3c_gace_vizdoom):
                continue
            if "--fixed-goal" in flags and flags[flags.index("--fixed-goal") + 1] not in envs.goals_of(task):
                continue
            for seed in args.seeds:
                flags_of_run = ["--task", task, "--seed", str(seed), *flags, *extra]
                defaults = script.Args(**(script.PAPER if "--paper" in flags_of_run else {}))
                settings = tyro.cli(script.Args, args=flags_of_run, default=defaults)
                name = f"{settings.task}__{script.algorithm(settings)}__{settings.seed}"
                if name in plan:
                    raise SystemExit(f"two runs would be called {name}")
                fixed = {k: v for k, v in asdict(settings).items() if k not in (*MAY_DIFFER, "total_updates")}
                path = f"{script.__name__}.py"
                plan[name] = Run(name, path, flags_of_run, fixed, settings.total_updates, args.runs.resolve())
    if not plan:
        raise SystemExit("no algorithm fits a task: those of A3C train on V tasks, those of SAC on R tasks")
    return list(plan.values())


def hours_left(run, cpus):
    """An estimate. A3C makes use of every core, SAC of hardly more than two."""
    seconds = SECONDS_PER_UPDATE[run.name[0]] * 2 / (cpus if run.name[0] == "v" else min(cpus, 2))
    return max(0, run.total_updates - run.updates()) * seconds / 3600


def in_words(hours):
    return f"{int(hours)} h {int(hours * 60) % 60:02} min"


# --------------------------------------------------------------------------------------- one run, on whichever machine


def train(run, root, cpus, gpus, retries):
    """Trains a run to its end, from its checkpoint if it has one. Returns None, or the last lines of its log."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(cpus)}
    if not gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    run.runs.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, retries + 2):
        folder = run.folder()
        if folder:
            other = different_settings(run, folder)
            if other or run.updates() >= run.total_updates:
                return other
            wait_for_lock(folder)
        flags = ["--resume", str(folder)] if folder else [*run.flags, "--runs", str(run.runs)]
        flags += ["--total-updates", str(run.total_updates)]
        if run.name[0] == "v" and not folder:
            flags += ["--num-workers", str(cpus)]
        with open(run.log(), "a") as log:
            print(f"\nattempt {attempt} on {socket.gethostname()}", file=log, flush=True)
            process = subprocess.Popen(
                [sys.executable, str(Path(root or os.getcwd(), run.script)), *flags],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C reaches this process's parent, which passes it on
                preexec_fn=end_with_parent,
            )
            try:
                while process.poll() is None:
                    time.sleep(0.2)  # Ray cancels a task between two lines of Python
            finally:
                process.terminate()  # not SIGINT, which Ray blocks in its processes and their children
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
    return None if run.updates() >= run.total_updates else last_lines(run.log())


def different_settings(run, folder):
    """Says in one line which setting of a run on disk is not the one asked for, if any."""
    if not (folder / "args.json").exists():
        return None
    trained = json.loads((folder / "args.json").read_text())
    for name, value in run.settings.items():
        if name in trained and trained[name] != value:
            return f"{folder} was trained with {name} {trained[name]}, not {value}: use another --runs or --exp-name"
    return None


def wait_for_lock(folder, seconds=60):
    """Waits while a process whose machine was lost to Ray still saves the run."""
    file = os.open(folder, os.O_RDONLY)
    for _ in range(seconds):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(1)
    os.close(file)


def end_with_parent():
    """The run saves and ends when the process that started it dies (on Linux)."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def last_lines(path, number=5, characters=4000):
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - characters))
        lines = file.read().decode(errors="replace").replace("\r", "\n").replace("\x1b[A", "").splitlines()
    return "\n".join([line for line in lines if line.strip()][-number:])


# ------------------------------------------------------------------------------------------------- what a person sees


def state_of(run):
    """The state of a run that has not ended, from its files. Also returns the hours left, if they are known."""
    if not run.log().exists() or last_lines(run.log(), 1) == "waiting":  # a line of this tool
        return "waiting", None
    rows = run.evaluations()
    if not rows:
        return "training, no evaluation yet" if run.folder() else "starting", None
    update, seconds = int(rows[-1]["update"]), float(rows[-1]["seconds"])
    hours = max(0, run.total_updates - update) * seconds / update / 3600
    success = f"success {float(rows[-1]['success_ratio']):.1%}"
    return f"training, {success} at {update:,} of {run.total_updates:,}, {in_words(hours)} left", hours


def show(plan, slots, cpus, lines_before):
    """Prints one line a run, over those printed before in a terminal. Returns how many lines it printed."""
    hours, width = [], max(len(run.name) for run in plan)
    for run in plan:
        left = None
        if run.state not in ("finished", "failed"):
            run.state, left = state_of(run)
            hours.append(hours_left(run, cpus) if left is None else left)
    columns, height = shutil.get_terminal_size() if sys.stdout.isatty() else (1000, 1000)
    height -= 2
    shown = sorted(plan, key=lambda run: not run.state.startswith(("failed", "training", "starting")))
    lines = [f"{run.name:{width}}  {run.state}" for run in (plan if len(plan) <= height else shown[: height - 1])]
    if len(lines) < len(plan):
        lines.append(f"... and {len(plan) - len(lines)} more")
    done = sum(run.state == "finished" for run in plan)
    left = max(sum(hours) / slots, max(hours, default=0))
    lines.append(f"{done} of {len(plan)} finished, about {in_words(left)} left")
    if lines_before:
        print(f"\x1b[{lines_before}A", end="")
    clear = "\x1b[K" if sys.stdout.isatty() else ""
    print("\n".join(line[: columns - 1] + clear for line in lines), flush=True)
    return len(lines) if sys.stdout.isatty() else 0


# ---------------------------------------------------------------------------------------------------------------- main


def connect(args):
    """Starts Ray, or joins a cluster. Returns how many runs can go on at once."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    try:
        import ray
    except ImportError:
        raise SystemExit("tools.grid needs Ray: pip install -r tests/requirements.txt") from None
    options = {"address": "local", "include_dashboard": False}
    if args.address:  # send the scripts along
        excludes = [".git", "runs", "results", "docs", "videos", "report", str(args.runs)]
        runtime = {"working_dir": str(ROOT), "excludes": excludes}
        options = {"address": args.address, "runtime_env": runtime}
    try:
        if args.address and ":" in args.address:  # Ray itself would try for minutes
            host, port = args.address.removeprefix("ray://").rsplit(":", 1)
            socket.create_connection((host, int(port)), timeout=5).close()
        ray.init(log_to_driver=False, logging_level="ERROR", **options)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise SystemExit(f"cannot join the Ray cluster at {args.address}: {reason}") from None
    slots = 0
    for node in ray.nodes():
        if node["Alive"]:
            slots_of_node = node["Resources"].get("CPU", 0) // args.cpus_per_run
            if args.gpus_per_run:
                slots_of_node = min(slots_of_node, node["Resources"].get("GPU", 0) // args.gpus_per_run)
            slots += int(slots_of_node)
    if not slots:
        ray.shutdown()
        raise SystemExit("no machine has as many cores and GPUs as --cpus-per-run and --gpus-per-run ask for")
    return ray, slots


def main():
    arguments, extra = sys.argv[1:], []
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, extra = arguments[:cut], arguments[cut + 1 :]
    args = tyro.cli(Args, args=arguments, description=__doc__)
    if args.cpus_per_run < 1 or args.gpus_per_run < 0 or args.retries < 0:
        raise SystemExit("--cpus-per-run must be at least 1, --gpus-per-run and --retries at least 0")
    plan = make_plan(args, extra)
    if args.dry_run:
        for run in plan:
            hours = in_words(hours_left(run, args.cpus_per_run))
            state = f"{run.updates():,} of {run.total_updates:,} updates, about {hours} left"
            print(f"{run.name}  {'finished' if run.updates() >= run.total_updates else state}")
        total = sum(hours_left(run, args.cpus_per_run) for run in plan)
        print(f"{len(plan)} runs, about {total:.0f} hours in all, one after another with {args.cpus_per_run} cores")
        return

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell switches it off for a command ended by &
    ray, slots = connect(args)
    for run in plan:
        if run.log().exists():  # of an earlier call
            with open(run.log(), "a") as log:
                print("\nwaiting", file=log)
    # Ray tries a run again whose machine dies.
    options = {"num_cpus": args.cpus_per_run, "num_gpus": args.gpus_per_run, "max_retries": 20}
    task = ray.remote(train).options(**options)
    root = None if args.address else str(ROOT)
    pending = {task.remote(run, root, args.cpus_per_run, args.gpus_per_run, args.retries): run for run in plan}
    lines, printed = 0, -60.0
    try:
        while pending:
            done, _ = ray.wait(list(pending), timeout=1)
            for reference in done:
                run = pending.pop(reference)
                try:
                    run.failure = ray.get(reference)
                except ray.exceptions.RayError as error:
                    run.failure = str(error)
                run.state = "failed" if run.failure else "finished"
            if sys.stdout.isatty() or time.monotonic() - printed > 60 or not pending:
                lines, printed = show(plan, slots, args.cpus_per_run, lines), time.monotonic()
    except KeyboardInterrupt:
        print("stopping: every run saves a checkpoint; the same command goes on from there", flush=True)
        for reference in pending:
            ray.cancel(reference)
        if pending:
            ray.wait(list(pending), num_returns=len(pending), timeout=90)
        raise SystemExit(130) from None
    finally:
        ray.shutdown()
    failed = [run for run in plan if run.failure]
    for run in failed:
        print(f"\n{run.name} failed; the end of {run.log()}:\n{run.failure}")
    if failed:
        raise SystemExit(f"{len(failed)} of {len(plan)} runs failed")
    runs = args.runs.resolve()
    command = [sys.executable, "-m", "tools.report", str(runs), "--out", str(runs / "report")]
    raise SystemExit(subprocess.run(command, cwd=ROOT).returncode)


if __name__ == "__main__":
    main()

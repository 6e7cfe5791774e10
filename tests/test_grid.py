"""tools.grid with a real Ray: on this machine, and on a cluster of two nodes. One of the nodes dies."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from helpers import ROOT, Run, kill_all, parent, processes_with, wait_until

from tools import grid

TINY = "--warmup 120 --total-updates 6 --eval-every 3 --episodes 2 --batch-size 8 --no-cuda --replay-size 5000".split()
TINY += ["--checkpoint-every", "1"]


class Grid(Run):
    """A call of tools.grid."""

    def __init__(self, runs, *arguments, extra=TINY):
        super().__init__(runs, "tools.grid", "--runs", runs, "--cpus-per-run", 1, *arguments, "--", *extra)


def trainings(marker):
    """The processes of the scripts, without a child that has not yet become another program."""
    found = [pid for pid in processes_with(marker) if b"sac_gace_ur5.py" in command_of(pid)]
    return [pid for pid in found if parent(pid) not in (-1, *found)]


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def updates(runs, name):
    checkpoints = list(runs.glob(f"{name}__*/checkpoint.pt"))
    return torch.load(checkpoints[0])["counters"]["updates"] if checkpoints else 0


# ------------------------------------------------------------------------------------------------------------- the plan


def plan_of(*arguments, extra=()):
    arguments = {"tasks": ("v1", "r1"), "algorithms": ("a3c",), "seeds": (2,)} | dict(*arguments)
    return grid.make_plan(grid.Args(**arguments), list(extra))


@pytest.mark.parametrize(
    "algorithm",
    "a3c a3c+vae a3c+rad a3c+gace a3c+gace+gdan a3c+gace+frozen10000 a3c+gace+gdan+paper sac sac+ae sac+curl sac+gace "
    "sac+gace+gdan+concat sac+gace+red sac+gaussian sac+paper".split(),
)
def test_every_algorithm_gets_the_name_it_was_asked_for_by(algorithm):
    (run,) = plan_of({"algorithms": (algorithm,)})
    assert run.name == f"{'v1' if algorithm.startswith('a3c') else 'r1'}__{algorithm}__2"


def test_plan_is_every_combination_that_exists():
    plan = plan_of(
        {"tasks": ("v1", "v2", "r1"), "algorithms": ("a3c", "sac"), "seeds": (2, 3)}, extra=["--gamma", "0.9"]
    )
    assert [run.name for run in plan] == [f"{t}__{s}" for t in ("v1__a3c", "v2__a3c", "r1__sac") for s in (2, 3)]
    assert all("--gamma" in run.flags for run in plan)
    assert [run.total_updates for run in plan] == [200_000] * 4 + [10_000] * 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"algorithms": ("a3c+magic",)}, "unknown algorithm"),
        ({"algorithms": ("ppo",)}, "unknown algorithm"),
        ({"tasks": ("v9",)}, "unknown task"),
        ({"tasks": ("r1",)}, "no algorithm fits a task"),
        ({"seeds": (2, 2)}, "two runs would be called v1__a3c__2"),
        ({"seeds": (-1,)}, "--seed must be 0 or more"),
        ({"algorithms": ("a3c+gdan",)}, "--gdan needs --aux gace"),
        ({"algorithms": ("a3c+gace+vae",)}, "unknown algorithm"),
    ],
)
def test_bad_plans_are_refused_in_a_line(arguments, expected):
    with pytest.raises(SystemExit, match=expected):
        plan_of(arguments)


def test_state_is_read_from_the_files_of_a_run(tmp_path):
    run = grid.Run("v1__a3c__2", "a3c_gace_vizdoom.py", [], {}, 200_000, tmp_path)
    assert grid.state_of(run)[0] == "waiting"
    run.log().write_text("attempt 1 on host\n")
    assert grid.state_of(run)[0] == "starting"
    folder = tmp_path / "v1__a3c__2__1"
    folder.mkdir()
    (folder / "checkpoint.pt").touch()
    (folder / "metrics.csv").write_text("update,seconds,success_ratio\n")
    assert grid.state_of(run)[0] == "training, no evaluation yet"
    (folder / "metrics.csv").write_text("update,seconds,success_ratio\n10000,200,0.1\n50000,1800,0.612\n")
    state, hours = grid.state_of(run)
    assert state == "training, success 61.2% at 50,000 of 200,000, 1 h 30 min left" and hours == pytest.approx(1.5)
    run.log().write_text("attempt 1 on host\n\nwaiting\n")  # a second call
    assert grid.state_of(run)[0] == "waiting"


def test_grid_without_ray_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit, match="pip install -r tests/requirements.txt"):
        grid.connect(grid.Args(tasks=(), algorithms=()))


def test_cluster_that_is_not_there_is_named_in_a_line(tmp_path):
    with Grid(tmp_path, "--tasks", "r1", "--algorithms", "sac", "--address", "127.0.0.1:1") as run:
        assert run.wait() == 1 and "cannot join the Ray cluster at 127.0.0.1:1" in run.output.splitlines()[-1]


# ------------------------------------------------------------------------------------------------------------ real runs


@pytest.mark.slow
def test_two_runs_at_a_time_one_that_fails_and_a_second_call(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"CPU": 2}')  # however many cores this machine has
    damaged = tmp_path / "r1__sac__4__1"
    damaged.mkdir()
    (damaged / "checkpoint.pt").write_bytes(b"garbage")
    asked = ["--tasks", "r1", "--algorithms", "sac", "--seeds"]
    with Grid(tmp_path, *asked, "2", "3", "4") as run:
        at_once = set()
        wait_until(lambda: at_once.add(len(trainings(run.marker))) or run.process.poll() is not None, 600)
        assert run.wait() == 1, run.output
        assert max(at_once) == 2
        assert wait_until(lambda: not processes_with(run.marker))
    assert "r1__sac__4 failed" in run.output and "UnpicklingError" in run.output
    assert (tmp_path / "r1__sac__4.log").read_text().count("attempt") == 2
    assert [updates(tmp_path, f"r1__sac__{seed}") for seed in (2, 3)] == [6, 6]
    before = {path: path.stat().st_mtime for path in tmp_path.glob("*/checkpoint.pt")}
    with Grid(tmp_path, *asked, "2", "3") as run:
        assert run.wait() == 0, run.output
    assert "2 of 2 finished" in run.output and "wrote" in run.output.splitlines()[-1]
    assert before == {path: path.stat().st_mtime for path in tmp_path.glob("*/checkpoint.pt")}
    with Grid(tmp_path, *asked, "2", "3", "--dry-run", extra=[*TINY, "--total-updates", "9"]) as run:
        assert run.wait() == 0
    assert run.output.splitlines()[0].startswith("r1__sac__2  6 of 9 updates, about 0 h 00 min left")
    (longer,) = plan_of(
        {"tasks": ("r1",), "algorithms": ("sac",), "runs": tmp_path}, extra=[*TINY, "--total-updates", "9"]
    )
    assert grid.train(longer, str(ROOT), 1, 0, 0) is None and updates(tmp_path, "r1__sac__2") == 9
    (other,) = plan_of({"tasks": ("r1",), "algorithms": ("sac",), "runs": tmp_path}, extra=[*TINY, "--gamma", "0.5"])
    assert "was trained with gamma 0.99, not 0.5" in grid.train(other, str(ROOT), 1, 0, 0)


@pytest.mark.slow
def test_ctrl_c_ends_every_run_with_a_checkpoint(tmp_path):
    endless = [*TINY, "--total-updates", "100000", "--eval-every", "100000"]
    with Grid(tmp_path, "--tasks", "r1", "--algorithms", "sac", "--seeds", "2", extra=endless) as run:
        assert wait_until(lambda: updates(tmp_path, "r1__sac__2") > 5, 300)
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
        assert run.wait() == 130, run.output
        assert wait_until(lambda: not processes_with(run.marker))
    assert "the same command goes on" in run.output
    assert "--resume" in (tmp_path / "r1__sac__2.log").read_text().splitlines()[-1]


CLUSTER = """
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
for _ in range(2):
    cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
input()
cluster.shutdown()
"""


@pytest.mark.slow
def test_run_of_a_node_that_dies_goes_on_on_the_other(tmp_path):
    marker = f"GACE_TEST={uuid.uuid4()}"
    environment = {**os.environ, "GACE_TEST": marker.split("=")[1], "RAY_USAGE_STATS_ENABLED": "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    cluster = subprocess.Popen([sys.executable, "-c", CLUSTER], env=environment, **pipes)
    try:
        address = cluster.stdout.readline().strip()
        long = [*TINY, "--total-updates", "100", "--eval-every", "100"]
        asked = ["--tasks", "r1", "--algorithms", "sac", "--seeds", "2", "--address", address]
        with Grid(tmp_path, *asked, extra=long) as run:
            assert wait_until(lambda: updates(tmp_path, "r1__sac__2") > 5, 300)
            (training,) = trainings(marker)
            worker = parent(training)
            raylet = parent(worker)
            assert b"raylet" in command_of(raylet)
            for number in (signal.SIGSTOP, signal.SIGKILL):  # as a machine that dies: all at once
                for pid in (training, worker, raylet):
                    os.kill(pid, number)
            killed_at = updates(tmp_path, "r1__sac__2")
            assert run.wait(600) == 0, run.output
        log = (tmp_path / "r1__sac__2.log").read_text()
        assert log.count("attempt 1 on") == 2 and log.count("Training sac on r1") == 2
        assert updates(tmp_path, "r1__sac__2") == 100 and killed_at < 100
        assert len(list(tmp_path.glob("r1__sac__2__*"))) == 1
    finally:
        try:
            cluster.communicate("\n", timeout=300)
        finally:
            cluster.kill()
            cluster.wait()
            kill_all(marker)

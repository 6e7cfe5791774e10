"""report.py: its formulas against the paper's own tables, and the script on files good and bad."""

import itertools
import json
import os
import re
import subprocess
import sys
import types

import gymnasium as gym
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from helpers import ROOT, call

import a3c_gace_vizdoom as a3c
import envs
import sac_gace_ur5 as sac
from tools import enjoy, publish, report

HEADER = ",".join(report.METRICS) + "\n"


def write(path, curve, split="seen", every=10_000):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [f"{every * (i + 1)},{i},1.0,{split},{ratio},{ratio / 2},20,1\n" for i, ratio in enumerate(curve)]
    path.write_text(HEADER + "".join(rows))


def run(folder, *arguments):
    command = [sys.executable, "-m", "tools.report", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


# The paper's tables of sample efficiency: updates, SRR and SEI of each algorithm.
PAPER = {
    2_000_000: [(810_086, 40.50, 146.89), (703_574, 35.18, 184.26), (163_602, 8.18, 1122.48), (110_930, 5.55, 1702.94)],
    314_797: [(230_339, 73.17, 36.67), (142_480, 45.26, 120.94), (53_774, 17.08, 485.41), (63_140, 20.06, 398.57)],
}


@pytest.mark.parametrize("reference", PAPER)
def test_srr_and_sei_give_the_papers_tables(reference):
    for updates, srr, sei in PAPER[reference]:
        assert report.srr(updates, reference) == pytest.approx(srr, abs=0.006)
        assert report.sei(updates, reference) == pytest.approx(sei, abs=0.006)
    assert report.PAPER_UPDATES["v1"][1][1:] == tuple(row[0] for row in PAPER[2_000_000])
    assert report.PAPER_UPDATES["r1"][1][1:] == tuple(row[0] for row in PAPER[314_797])


def test_reaching_a_ratio_is_interpolated():
    updates, ratios = np.array([10.0, 20.0, 30.0, 40.0]), np.array([5.0, 25.0, 20.0, 60.0])
    assert report.first_reached(updates, ratios, 15) == pytest.approx(15)
    assert report.first_reached(updates, ratios, 25) == pytest.approx(20)
    assert report.first_reached(updates, ratios, 40) == pytest.approx(35)
    assert report.first_reached(updates, ratios, 5) == 10
    assert report.first_reached(updates, ratios, 61) is None


def test_mean_and_deviation_over_seeds():
    steps, none = [100, 200, 300], [np.nan] * 3
    seeds = {
        "1": np.array([[10, 20, 30], [1, 2, 3], none, steps]),
        "2": np.array([[10, 20], [3, 6], none[:2], steps[:2]]),
    }
    updates, mean, deviation = report.over_seeds(seeds, report.RATIO)
    assert updates.tolist() == [10, 20] and mean.tolist() == [2, 4]  # no further than the shorter run
    assert deviation.tolist() == pytest.approx([2**0.5, 8**0.5])
    assert report.over_seeds(seeds, report.RATIO, report.STEPS)[0].tolist() == [100, 200]
    updates, mean, deviation = report.over_seeds({"1": seeds["1"]}, report.RATIO)
    assert len(updates) == 3 and np.isnan(deviation).all()  # one seed is one seed
    assert not len(report.over_seeds(seeds, report.ACCURACY)[0])


def test_interquartile_mean_is_that_of_the_middle_half():
    assert report.interquartile_mean(np.array([100.0, 1, 2, 3, 4, 5, 6, -50])) == pytest.approx(3.5)
    assert report.interquartile_mean(np.array([[1.0, 2, 9], [0, 0, 3]])).tolist() == [4, 1]


def test_bootstrap_interval_holds_the_mean_of_normal_seeds_in_95_of_100_cases():
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        low, high = report.confidence_interval([rng.normal(50, 10, 20), rng.normal(70, 10, 20)], resamples=500)
        held += low <= 60 <= high
    assert 0.85 < held / 200 < 0.995
    strata = [np.array([1.0, 1, 1, 1]), np.array([9.0, 9, 9, 9])]  # drawn within their task, nothing can vary
    assert report.confidence_interval(strata).tolist() == [5, 5]


def test_probability_of_improvement():
    assert report.probability_of_improvement([3, 4], [1, 2]) == 1
    assert report.probability_of_improvement([1, 2, 3], [1, 2, 3]) == 0.5
    assert report.probability_of_improvement([1, 5], [2, 3]) == 0.5


def test_report_of_five_seeds_shows_intervals_and_improvement(tmp_path):
    rng = np.random.default_rng(0)
    for task, (name, ratio), seed in itertools.product(
        ("r1", "r3"), {"sac": 0.3, "sac+gace": 0.7, "sac+gace+gdan": 0.8}.items(), range(1, 6)
    ):
        write(tmp_path / f"results/{task}__{name}__{seed}.csv", np.linspace(0, ratio, 5) + rng.uniform(0, 0.05))
    for goal, seed in itertools.product(("red", "green", "blue"), (1, 2)):
        write(tmp_path / f"results/r1__sac+gace+{goal}__{seed}.csv", [0.5, 0.9])
    for frozen in ("", "+frozen10000", "+frozen20000"):
        write(tmp_path / f"results/v2__a3c+gace{frozen}__1.csv", [0.5, 0.9])
    written = run(tmp_path, "results").stdout
    rows = {line.split(" | ")[0]: line for line in written.split("## R1: sample")[0].splitlines() if "| SAC" in line}
    assert re.match(
        r"\| SAC\+GACE \| 7\d\.\d ± \d\.\d \| 7\d\.\d \(7\d\.\d to 7\d\.\d\) \| 1\.00 \|", rows["| SAC+GACE"]
    )
    assert "## R1, R3 together" in written
    for figure in ("r1_success", "r1_single_targets", "v2_seen_frozen", "all_tasks"):
        assert (tmp_path / f"report/{figure}.png").stat().st_size > 5000


def test_report_of_good_and_bad_files(tmp_path):
    write(tmp_path / "runs/v1__a3c__1__100/metrics.csv", [0.1, 0.2, 0.4])
    write(tmp_path / "runs/v1__a3c__2__100/metrics.csv", [0.1, 0.4, 0.6])
    write(tmp_path / "runs/v1__a3c__2__99/metrics.csv", [0.9])  # a shorter run of the same seed
    write(tmp_path / "results/v1__a3c+gace+gdan__1.csv", [0.4, 0.6, 0.9])
    write(tmp_path / "results/v1__a3c+gace+gdan+frozen__1.csv", [0.3, 0.45, 0.55])  # a variant, shown beside it
    write(tmp_path / "results/v1__a3c+rad__1.csv", [0.1, 0.1])
    write(tmp_path / "results/v2__a3c+gace__1.csv", [0.3], split="unseen")
    bad = {
        "results/v1__a3c__3.csv": "",
        "results/v1__a3c__4.csv": HEADER + "10000,5,1.0,seen,0.5",
        "results/v1__a3c__5.csv": "step,success\n1,0.5\n",
        "results/v1__a3c__6.csv": HEADER + "10000,5,1.0,seen\n",
        "results/v1__a3c__7.csv": HEADER + "10000,5,1.0,seen,x,0.5,20,1\n",
        "results/notes.csv": HEADER,
        "results/v9__a3c__1.csv": HEADER + "10000,5,1.0,seen,0.5,0.5,20,1\n",
        "results/v1__sac__1.csv": HEADER + "10000,5,1.0,seen,0.5,0.5,20,1\n",
    }
    for name, text in bad.items():
        (tmp_path / name).write_text(text)
    result = run(tmp_path, "runs", "results")
    assert result.returncode == 0, result.stderr
    skipped = [line for line in result.stdout.splitlines() if line.startswith("skipped")]
    bad["runs/v1__a3c__2__99"] = "there is a longer run of seed 2"
    assert len(skipped) == len(bad) and all(any(name in line for line in skipped) for name in bad)

    written = (tmp_path / "report/report.md").read_text()
    assert written in result.stdout
    assert "| A3C | 50.0 ± 14.1 | - | - | 50.0 | 2 | 30,000 | 2 | 56.55 ± 13.75 |" in written
    assert "| A3C+GACE&GDAN | 90.0 | - | - | 90.0 | 1 | 30,000 | 2 | 95.63 ± 0.64 |" in written
    assert "| A3C+GACE&GDAN, frozen | 55.0 | - | - | 55.0 | 1 | 30,000 | 2 | - |" in written
    assert "| A3C+GACE&GDAN, frozen | 25,000 | 1 | 83.33 | 20.00 | - | - | - |" in written
    assert "Reference: 50.00 % (the best of A3C)" in written
    assert "| A3C | 30,000 | 2 | 100.00 | 0.00 | 2,000,000 | 100.00 | 0.00 |" in written
    assert "| A3C+GACE&GDAN | 15,000 | 0 | 50.00 | 100.00 | 110,930 | 5.55 | 1702.94 |" in written
    assert "| A3C+RAD | not reached in 20,000 | - | - | - | 703,574 | 35.18 | 184.26 |" in written
    assert "## V2 unseen: success ratio" in written
    for figure in ("v1_success", "v1_discriminator", "v1_frozen", "v2_unseen_success", "all_tasks"):
        assert (tmp_path / f"report/{figure}.png").stat().st_size > 5000
        assert "<svg" in (tmp_path / f"report/{figure}.svg").read_text()

    asked = run(tmp_path, "runs", "results", "--reference-ratio", "85", "--out", "other")
    assert "Reference: 85.00 %" in asked.stdout and "| A3C | not reached in 30,000 |" in asked.stdout
    assert (tmp_path / "other/report.md").exists()


def test_longest_run_of_a_seed_is_the_one_with_the_last_update(tmp_path):
    write(tmp_path / "runs/v1__a3c__1__1/metrics.csv", np.full(100, 0.1), every=100)  # more rows, but shorter
    write(tmp_path / "runs/v1__a3c__1__2/metrics.csv", [0.5, 0.7], every=100_000)
    assert "| A3C | 70.0 | - | - | 70.0 | 1 | 200,000 |" in run(tmp_path, "runs").stdout


def test_steps_to_a_ratio_are_those_of_its_update(tmp_path):
    for seed, factor in ((1, 10), (2, 30)):
        rows = [f"{u},{u * factor},1.0,seen,{r},nan,20,1\n" for u, r in ((100, 0.1), (200, 0.5), (300, 0.2))]
        (tmp_path / f"v1__a3c__{seed}.csv").write_text(HEADER + "".join(rows))
    assert "| A3C | 200 | 4,000 | 100.00 | 0.00 |" in run(tmp_path, ".").stdout


def test_what_the_first_evaluation_has_reached_is_a_bound(tmp_path):
    write(tmp_path / "r1__sac__1.csv", [0.2, 0.4])
    write(tmp_path / "r1__sac+gace__1.csv", [0.5, 0.9])
    written = run(tmp_path, ".").stdout
    assert "| SAC | 20,000 | 1 | 100.00 | 0.00 |" in written
    assert "| SAC+GACE | ≤ 10,000 | ≤ 0 | ≤ 50.00 | ≥ 100.00 |" in written
    written = run(tmp_path, ".", "--reference-ratio", "15").stdout  # the baseline is there too: no ratio is known
    assert "| SAC | ≤ 10,000 | ≤ 0 | 100.00 | 0.00 |" in written
    assert "| SAC+GACE | ≤ 10,000 | ≤ 0 | - | - |" in written


def test_seeds_without_a_common_update_and_damaged_settings(tmp_path):
    for seed, update in ((1, 100), (2, 200)):
        (tmp_path / f"v1__a3c__{seed}.csv").write_text(HEADER + f"{update},5,1.0,seen,0.5,nan,20,1\n")
    (tmp_path / "v1__a3c__3.csv").write_text(HEADER + "nan,5,1.0,seen,0.5,nan,20,1\n")
    (tmp_path / "v1__a3c__4.csv").mkdir()
    write(tmp_path / "v1__a3c__5.csv", [0.5])
    (tmp_path / "v1__a3c__5.json").write_text("[]")
    result = run(tmp_path, ".")
    assert result.returncode == 0, result.stderr
    assert all(f"skipped v1__a3c__{seed}.csv" in result.stdout for seed in (3, 4, 5))


def test_curves_and_the_papers_ends_are_drawn():
    figure, axes = plt.subplots()
    seeds = {"1": np.array([[10.0, 20], [30, 40], [1, 2], [100, 200]])}
    report.plot(axes, {"a3c": seeds, "a3c+gace": seeds}, report.RATIO, report.STEPS, {"a3c": 56.55})
    ends = [line for line in axes.lines if line.get_linestyle() == "--"]
    curves = [line for line in axes.lines if line.get_linestyle() == "-"]
    assert [line.get_ydata()[0] for line in ends] == [56.55] and ends[0].get_color() == curves[0].get_color()
    assert len(curves) == 2 and curves[0].get_xdata().tolist() == [100, 200]
    assert axes.get_xlabel() == "environment steps"
    plt.close(figure)


def test_single_targets_need_every_target():
    seeds = {"1": np.array([[10.0, 20], [30, 60], [1, 2], [100, 200]])}
    singles = {f"sac+gace+{goal}": seeds for goal in ("red", "green")} | {"sac+gace": seeds}
    assert report.single_targets("r1", singles) == {}
    blue = {"1": np.array([[10.0, 20], [60, 90], [1, 2], [100, 200]])}
    chosen = report.single_targets("r1", singles | {"sac+gace+blue": blue})
    assert chosen["sac+gace+single targets"]["1"][report.RATIO].tolist() == [40, 70]


def test_runs_with_different_settings_are_not_merged(tmp_path):
    for seed, rate, ratio in ((1, 1e-4, 0.2), (2, 1e-4, 0.4), (3, 2e-4, 0.9)):
        folder = tmp_path / f"runs/v1__a3c__{seed}__100"
        write(folder / "metrics.csv", [ratio] * (4 - seed))
        settings = {"seed": seed, "learning_rate": rate, "num_workers": seed, "anneal_lr": False, "total_updates": seed}
        (folder / "args.json").write_text(json.dumps(settings))
    result = run(tmp_path, "runs")
    (skipped,) = [line for line in result.stdout.splitlines() if line.startswith("skipped")]
    assert "v1__a3c__3__100" in skipped and "learning_rate is 0.0002, but 0.0001" in skipped and "--exp-name" in skipped
    assert "| A3C | 30.0 ± 14.1 | - | - | 30.0 | 2 |" in result.stdout


def test_nothing_to_report(tmp_path):
    for arguments, expected in [(["nowhere"], "nowhere does not exist"), ([str(tmp_path)], "train something first")]:
        result = run(tmp_path, *arguments)
        assert result.returncode != 0 and expected in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("script", [a3c, sac], ids=["a3c", "sac"])
def test_published_run_is_reported_and_its_agent_loads(script, tmp_path, monkeypatch):
    args = script.Args(runs=str(tmp_path))
    name = f"{args.task}__{script.algorithm(args)}__1"
    folder, checkpoint = tmp_path / f"{name}__100", script.new_run(args)
    folder.mkdir()
    script.save_run(folder, checkpoint)
    with pytest.raises(SystemExit, match="no evaluation yet"):
        call(publish, monkeypatch, folder)
    checkpoint["rows"] = [dict(zip(report.METRICS, (300, 9, 1.0, "seen", 0.25, 0.5, 20.0, 1.0), strict=True))]
    script.save_run(folder, checkpoint)
    call(publish, monkeypatch, folder, "--agent", "--out", tmp_path / "results")
    results = {path.name: path for path in (tmp_path / "results").iterdir()}
    call(publish, monkeypatch, folder, "--out", tmp_path / "results")  # again, as the run goes on
    checkpoint["rows"][0]["success_ratio"] = 0.5
    script.save_run(folder, checkpoint)
    with pytest.raises(SystemExit, match="holds another run"):
        call(publish, monkeypatch, folder, "--out", tmp_path / "results")
    assert set(results) == {f"{name}.csv", f"{name}.json", f"{name}.pt"}
    assert report.read(results[f"{name}.csv"])["seen"][report.RATIO].tolist() == [25]
    assert str(tmp_path) not in results[f"{name}.json"].read_text()  # no path of this machine
    trained_by, _, trained, agent = enjoy.load_agent(results[f"{name}.pt"])
    assert trained_by is script and trained.runs == "runs"
    for key, weight in checkpoint["agent"].items():
        assert torch.equal(
            agent.state_dict()[key], weight.half().to(weight.dtype) if weight.is_floating_point() else weight
        )


ENDINGS = [("reached", True, True), ("wrong object", False, True), ("out of time", False, False)]
PLACES = [
    ("v1", (420, 569), "0 to 150 units away"),
    ("v2", (272, 220), "150 to 250 units away"),  # 249 away
    ("v1", (420, 771), "350 to 550 units away"),
    ("v1", (796, 796), "350 to 550 units away"),
    ("v3", (335, 293), "153 units away"),
]


@pytest.mark.parametrize("task, goal_at, place", PLACES)
def test_ending_of_an_episode_in_doom(task, goal_at, place):
    env = gym.make(f"gace/{task.upper()}-v0")
    env.reset(seed=1, options={"goal": "Skull"})
    env.unwrapped.objects[2] = goal_at
    for outcome, success, terminated in ENDINGS:
        episode = types.SimpleNamespace(env=env, info={"is_success": success}, terminated=terminated)
        assert enjoy.ending_of(episode) == ("Skull", place, outcome)
    env.close()


def test_ending_of_an_episode_on_the_arm():
    env = gym.make("gace/R1-v0")
    places = set()
    for seed in range(6):
        env.reset(seed=seed, options={"goal": "green"})
        colours = env.unwrapped.model.geom_rgba[env.unwrapped.boxes]  # left, front, right
        place = ("left", "front", "right")[int(np.isclose(colours, envs.BOX_COLOURS["green"]).all(1).argmax())]
        episode = types.SimpleNamespace(env=env, info={"is_success": True}, terminated=True)
        assert enjoy.ending_of(episode) == ("green", place, "reached")
        places.add(place)
    assert len(places) == 3
    env.close()


@pytest.mark.slow
def test_500_runs_are_read_and_drawn(tmp_path):
    rng = np.random.default_rng(0)
    for index in range(500):
        task = ("v1", "v2", "v3", "v4", "r1", "r2", "r3")[index % 7]
        names = report.algorithms_of(task)
        name = f"{task}__{names[index // 7 % 5]}__{index // 35}__1"
        path = tmp_path / "runs" / name / "metrics.csv"
        if task in ("v2", "v4", "r2"):
            write(path, rng.uniform(size=200))
            unseen = tmp_path / "unseen.csv"
            write(unseen, rng.uniform(size=200), split="unseen")
            path.write_text(path.read_text() + unseen.read_text().removeprefix(HEADER))
            unseen.unlink()
        else:
            write(path, rng.uniform(size=400))
    result = run(tmp_path, "runs")
    assert result.returncode == 0, result.stderr
    assert len(list((tmp_path / "report").glob("*.png"))) == 18  # 10 of success, 7 of accuracy, and all tasks in one

"""report.py: its formulas against the paper's own tables, and the script on files good and bad."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT

from tools import report

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
    seeds = {"1": np.array([[10, 20, 30], [1, 2, 3], [0, 0, 0]]), "2": np.array([[10, 20], [3, 6], [0, 0]])}
    updates, mean, deviation = report.over_seeds(seeds, 1)
    assert updates.tolist() == [10, 20, 30] and mean.tolist() == [2, 4, 3]
    assert deviation[:2].tolist() == [1, 2] and np.isnan(deviation[2])  # one seed is one seed


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
    assert "| A3C | 50.0 ± 10.0 | 50.0 | 2 | 30,000 | 56.55 ± 13.75 |" in written
    assert "| A3C+GACE&GDAN | 90.0 | 90.0 | 1 | 30,000 | 95.63 ± 0.64 |" in written
    assert "| A3C+GACE&GDAN, frozen | 55.0 | 55.0 | 1 | 30,000 | - |" in written
    assert "| A3C+GACE&GDAN, frozen | 25,000 | 83.33 | 20.00 | - | - | - |" in written
    assert "Reference: 50.00 % (the best of A3C)" in written
    assert "| A3C | 30,000 | 100.00 | 0.00 | 2,000,000 | 100.00 | 0.00 |" in written
    assert "| A3C+GACE&GDAN | 15,000 | 50.00 | 100.00 | 110,930 | 5.55 | 1702.94 |" in written
    assert "| A3C+RAD | not reached in 20,000 | - | - | 703,574 | 35.18 | 184.26 |" in written
    assert "## V2 unseen: success ratio" in written
    for figure in ("v1_success", "v1_discriminator", "v2_unseen_success"):
        assert (tmp_path / f"report/{figure}.png").stat().st_size > 5000
        assert "<svg" in (tmp_path / f"report/{figure}.svg").read_text()

    asked = run(tmp_path, "runs", "results", "--reference-ratio", "85", "--out", "other")
    assert "Reference: 85.00 %" in asked.stdout and "| A3C | not reached in 30,000 |" in asked.stdout
    assert (tmp_path / "other/report.md").exists()


def test_runs_with_different_settings_are_not_merged(tmp_path):
    for seed, rate, ratio in ((1, 1e-4, 0.2), (2, 1e-4, 0.4), (3, 2e-4, 0.9)):
        folder = tmp_path / f"runs/v1__a3c__{seed}__100"
        write(folder / "metrics.csv", [ratio] * (4 - seed))
        settings = {"seed": seed, "learning_rate": rate, "num_workers": seed, "anneal_lr": False, "total_updates": seed}
        (folder / "args.json").write_text(json.dumps(settings))
    result = run(tmp_path, "runs")
    (skipped,) = [line for line in result.stdout.splitlines() if line.startswith("skipped")]
    assert "v1__a3c__3__100" in skipped and "learning_rate is 0.0002, but 0.0001" in skipped and "--exp-name" in skipped
    assert "| A3C | 30.0 ± 10.0 | 30.0 | 2 |" in result.stdout


def test_nothing_to_report(tmp_path):
    for arguments, expected in [(["nowhere"], "nowhere does not exist"), ([str(tmp_path)], "train something first")]:
        result = run(tmp_path, *arguments)
        assert result.returncode != 0 and expected in result.stderr and len(result.stderr.splitlines()) == 1


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
    assert len(list((tmp_path / "report").glob("*.png"))) == 20

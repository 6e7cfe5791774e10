"""report.py: its formulas against the paper's own tables and simulated seeds, and the script on files good and bad."""

import itertools
import json
import os
import re
import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
from helpers import ROOT

from tools import report

HEADER = ",".join(report.METRICS) + "\n"


def write(path, curve, split="seen", every=10_000, settings=None):
    """A run whose environment steps are ten times its updates."""
    path.parent.mkdir(parents=True, exist_ok=True)
    updates = [every * (i + 1) for i in range(len(curve))]
    accuracy = 0.5 if "gace" in path.name else float("nan")
    rows = [f"{u},{10 * u},1.0,{split},{r},{r * accuracy},20,1\n" for u, r in zip(updates, curve, strict=True)]
    path.write_text(HEADER + "".join(rows))
    if settings:
        path.with_suffix(".json").write_text(json.dumps(settings))


def run(folder, *arguments):
    command = [sys.executable, "-m", "tools.report", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def columns(updates, ratios):
    return np.array([updates, ratios, np.full(len(updates), np.nan), 10 * np.array(updates)], float)


# ---------------------------------------------------------------------------------------------------------- statistics

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
    task = "v1" if reference == 2_000_000 else "r1"
    assert report.PAPER_UPDATES[task] == (reference, *(row[0] for row in PAPER[reference]))


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_students_interval_covers_the_mean_in_95_of_100_cases(seeds):
    rng, cases = np.random.default_rng(seeds), 4000
    drawn = rng.normal(50, 10, (cases, seeds))
    covered = np.mean([abs(values.mean() - 50) <= report.student_interval(values) for values in drawn])
    print(f"{seeds} seeds: the interval holds the mean in {covered:.1%}")
    assert 0.94 < covered < 0.96
    assert np.isnan(report.student_interval(drawn[0, :2]))


@pytest.mark.parametrize(("seeds", "coverage"), [(3, 0.84), (10, 0.93)])
def test_coverage_of_the_interval_over_two_tasks(seeds, coverage):
    """docs/tools.md gives these figures. Within a task, nothing varies but the seeds."""
    rng, covered = np.random.default_rng(1), 0
    for _ in range(400):
        low, high = report.bootstrap_interval([rng.normal(50, 10, seeds), rng.normal(50, 10, seeds)], resamples=500)
        covered += low <= 50 <= high
    print(f"{seeds} seeds on two tasks: the interval holds the middle in {covered / 400:.1%}")
    assert covered / 400 == pytest.approx(coverage, abs=0.05)


def test_interval_over_several_tasks_draws_again_within_a_task():
    strata = [np.array([1.0, 1, 1, 1]), np.array([9.0, 9, 9, 9])]  # drawn within their task, nothing can vary
    assert report.bootstrap_interval(strata).tolist() == [5, 5]


def test_interquartile_mean_is_that_of_the_middle_half():
    assert report.interquartile_mean(np.array([100.0, 1, 2, 3, 4, 5, 6, -50])) == pytest.approx(3.5)
    assert report.interquartile_mean(np.array([[1.0, 2, 9], [0, 0, 3]])).tolist() == [4, 1]


def test_probability_of_improvement():
    assert report.probability_of_improvement([3, 4], [1, 2]) == 1
    assert report.probability_of_improvement([1, 2, 3], [1, 2, 3]) == 0.5
    assert report.probability_of_improvement([1, 5], [2, 3]) == 0.5


def test_a_ratio_is_reached_by_two_evaluations_in_a_row():
    curve = columns([10, 20, 30, 40, 50, 60], [5, 25, 20, 60, 70, 10])
    assert report.first_reached(curve, 15) == (pytest.approx(15), False)
    assert report.first_reached(curve, 25) == (pytest.approx(30 + 10 * 5 / 40), False)  # not by the single 25
    assert report.first_reached(curve, 65) == (None, False)  # not by the single 70
    assert report.first_reached(curve, 5) == (10, True)  # a bound: it may have been there before


def test_a_run_that_ends_early_does_not_cut_the_others():
    seeds = {str(seed): columns([10, 20, 30], [seed, 2 * seed, 3 * seed]) for seed in (1, 2, 3)}
    seeds["4"] = columns([10], [10])
    points, mean, half = report.over_seeds(seeds, report.RATIO, report.STEPS)
    assert points.tolist() == [100, 200, 300] and mean.tolist() == [4, 4, 6]
    assert half[1] == pytest.approx(4.303 * 2 / 3**0.5) and half[0] == pytest.approx(
        3.182 * np.std([1, 2, 3, 10], ddof=1) / 2
    )
    assert np.isnan(report.over_seeds({"1": seeds["1"]}, report.RATIO, report.UPDATES)[2]).all()  # one seed is one seed
    assert not len(report.over_seeds(seeds, report.ACCURACY, report.UPDATES)[0])


def test_runs_of_as_many_updates_end_together():
    """In environment steps too, although one has made more of them: the mean does not jump to one run at its end."""
    seeds = {"1": columns([10, 20], [20, 40]), "2": columns([10, 20], [40, 80])}
    seeds["2"][report.STEPS] = 140, 260
    points, mean, _ = report.over_seeds(seeds, report.RATIO, report.STEPS)
    assert points.tolist() == [120, 230] and mean.tolist() == [30, 60]


def test_single_targets_are_averaged_and_their_updates_summed():
    low, high = {"1": columns([10, 20], [30, 60])}, {"1": columns([10, 20], [60, 90])}
    runs = {"sac": low, "sac+red": low, "sac+green": low}
    assert report.single_targets("r1", runs) == {}  # blue is missing
    (single,) = report.single_targets("r1", runs | {"sac+blue": high})["sac+single targets"].values()
    assert single[report.RATIO].tolist() == [40, 70] and single[report.UPDATES].tolist() == [30, 60]


# -------------------------------------------------------------------------------------------------- tables and figures


def test_report_of_three_seeds(tmp_path):
    """Every seed, the mean with Student's interval, and all tasks together."""
    ratios = {"sac": (0.60, 0.62, 0.64), "sac+gace": (0.7, 0.8, 0.9), "sac+gace+gdan": (0.8, 0.85, 0.9)}
    for task, (name, lasts), seed in itertools.product(("r1", "r3"), ratios.items(), (2, 3, 4)):
        write(tmp_path / f"results/{task}__{name}__{seed}.csv", [0.1, lasts[seed - 2], lasts[seed - 2]])
    for goal in ("red", "green", "blue"):
        write(tmp_path / f"results/r1__sac+{goal}__2.csv", [0.3, 0.5])
    write(tmp_path / "results/r1__sac+gace+gdan+concat__2.csv", [0.3, 0.5])
    for frozen in ("", "+frozen10000", "+frozen20000"):
        write(tmp_path / f"results/v2__a3c+gace{frozen}__2.csv", [0.5, 0.9])
    for algorithm in ("a3c", "a3c+gace+gdan"):
        write(tmp_path / f"results/v2__{algorithm}__2.csv", [0.9, 0.9], split="unseen")
    written = run(tmp_path, "results").stdout
    half = 4.303 * 10 / 3**0.5
    each = "70.0 (2), 80.0 (3), 90.0 (4)"
    assert f"| SAC+GACE | **80.0** ± {half:.1f} | {each} | 30,000 | 300,000 | 1 | 84.7 ± 10.0 |" in written
    assert "| SAC+GACE&GDAN, concat | **50.0** | 50.0 (2) | 20,000 | 200,000 | 1 | 81.5 ± 10.0 |" in written
    assert "| SAC, single targets | **50.0** | 50.0 (2) | 60,000 | 600,000 | 1 | 47 ± 11 |" in written
    assert "SAC, red" not in written
    assert "Sample efficiency at 63.1 %, the paper's SAC:" in written
    # of the baseline, one seed of three reaches 63.1 %: the others need more than their 30,000 updates
    assert "| SAC | 1 of 3 |" in written and "| SAC+GACE | 3 of 3 |" in written and "| ≤ " in written
    assert "### R1, R3 together" in written and "| SAC+GACE&GDAN | 85.0 (" in written
    assert "| V2 unseen | A3C+GACE&GDAN | **45.0** | 1 | 89.15 ± 3.44 |" in written
    assert "Not merged" not in written
    for figure in ("r1_success", "v2_seen_frozen", "v2_discriminator", "all_tasks"):
        assert (tmp_path / f"report/{figure}.png").stat().st_size > 5000
        pixels = plt.imread(tmp_path / f"report/{figure}.png")
        assert (pixels[:, [0, -1]] == 1).all() and (pixels[[0, -1]] == 1).all()  # nothing is cut off
    # The legend follows the paper's order, although the first panel has no plain A3C.
    assert "<!-- A3C -->" not in (tmp_path / "report/v2_discriminator.svg").read_text()  # it has no discriminator
    legend = re.findall("<!-- ((?:A3C|SAC).*) -->", (tmp_path / "report/all_tasks.svg").read_text())
    methods = ("", "+GACE", "+GACE&amp;GDAN")
    assert legend == [base + method for base in ("A3C", "SAC") for method in methods]


def test_efficiency_with_its_spread_over_seeds(tmp_path):
    for seed, reached in ((1, 20_000), (2, 30_000)):
        updates = [10_000 * i for i in range(1, 8)]
        write(tmp_path / f"v1__a3c__{seed}.csv", [0.0 if u < 60_000 else 0.5655 for u in updates])
        write(tmp_path / f"v1__a3c+gace__{seed}.csv", [0.0 if u < reached else 0.5655 for u in updates])
        write(tmp_path / f"v1__a3c+rad__{seed}.csv", [0.6] * 3)
    written = run(tmp_path, ".").stdout
    assert "| A3C | 2 of 2 | 60,000 ± 0 | 600,000 | - | - | 2,000,000 | 100.00 | 0.00 |" in written
    theirs = "163,602 | 8.18 | 1122.48"
    assert f"| A3C+GACE | 2 of 2 | 25,000 ± 7,071 | 250,000 | 41.7 ± 11.8 | 150 ± 71 | {theirs} |" in written
    assert "| A3C+RAD | 2 of 2 | ≤ 10,000 ± 0 | ≤ 100,000 | ≤ 16.7 ± 0.0 | ≥ 500 ± 0 |" in written


def test_only_runs_of_one_version_with_the_same_settings_are_merged(tmp_path):
    """What is left out is listed, with the reason."""
    for seed, version, rate in ((1, 2, 1e-4), (2, 2, 1e-4), (3, 2, 2e-4), (4, 1, 1e-4)):
        settings = {"version": version, "learning_rate": rate, "seed": seed, "num_workers": seed, "total_updates": seed}
        write(tmp_path / f"v1__a3c__{seed}.csv", [0.1 * seed] * (8 if version == 1 else 3), settings=settings)
    write(tmp_path / "v1__a3c__5.csv", [0.9] * 9)  # without settings: of version 1
    written = run(tmp_path, ".").stdout
    assert "| A3C | **15.0** | 10.0 (1), 20.0 (2) | 30,000 | 300,000 | 2 |" in written
    apart = written.split("### Not merged")[1]
    assert "- v1__a3c__3.csv: its learning_rate is 0.0002, that of the others 0.0001" in apart
    assert "- v1__a3c__4.csv: its version is 1, that of the others 2" in apart and "- v1__a3c__5.csv" in apart


def test_bad_files_are_listed_and_the_longest_run_of_a_seed_counts(tmp_path):
    write(tmp_path / "runs/v1__a3c__2__100/metrics.csv", [0.1, 0.4, 0.6])
    write(tmp_path / "runs/v1__a3c__2__99/metrics.csv", np.full(100, 0.9), every=100)  # more rows, but shorter
    bad = {
        "results/v1__a3c__3.csv": "",
        "results/v1__a3c__4.csv": HEADER + "10000,5,1.0,seen,0.5",
        "results/v1__a3c__5.csv": "step,success\n1,0.5\n",
        "results/v1__a3c__6.csv": HEADER + "10000,5,1.0,seen\n",
        "results/v1__a3c__7.csv": HEADER + "10000,5,1.0,seen,x,0.5,20,1\n",
        "results/v1__a3c__8.csv": HEADER + "nan,5,1.0,seen,0.5,0.5,20,1\n",
        "results/notes.csv": HEADER,
        "results/v9__a3c__1.csv": HEADER + "10000,5,1.0,seen,0.5,0.5,20,1\n",
        "results/v1__sac__1.csv": HEADER + "10000,5,1.0,seen,0.5,0.5,20,1\n",
    }
    (tmp_path / "results").mkdir()
    for name, text in bad.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "results/v1__a3c__9.csv").mkdir()
    write(tmp_path / "results/v1__a3c__10.csv", [0.5], settings=[1])
    result = run(tmp_path, "runs", "results")
    assert result.returncode == 0, result.stderr
    assert "| A3C | **60.0** | 60.0 (2) | 30,000 |" in result.stdout
    apart = result.stdout.split("### Not merged")[1]
    for name in (*bad, "runs/v1__a3c__2__99", "results/v1__a3c__9.csv", "results/v1__a3c__10.csv"):
        assert f"- {name}" in apart
    assert (tmp_path / "report/report.md").read_text() in result.stdout


def test_nothing_to_report(tmp_path):
    for arguments, expected in [(["nowhere"], "nowhere does not exist"), ([str(tmp_path)], "train something first")]:
        result = run(tmp_path, *arguments)
        assert result.returncode != 0 and expected in result.stderr and len(result.stderr.splitlines()) == 1


def test_tables_are_written_between_the_marks_of_a_page(tmp_path):
    write(tmp_path / "results/v1__a3c__2.csv", [0.1, 0.4])
    page = "# Results\n\n<!-- report -->\nold\n<!-- end of report -->\n\nWords.\n"
    (tmp_path / "results/README.md").write_text(page)
    run(tmp_path, "results")
    written = (tmp_path / "results/README.md").read_text()
    before, after = written.split((tmp_path / "report/report.md").read_text())
    assert before == "# Results\n\n<!-- report -->\n\n" and after == "\n<!-- end of report -->\n\nWords.\n"
    run(tmp_path, "results")
    assert (tmp_path / "results/README.md").read_text() == written


def test_curves_seeds_and_the_papers_ends_are_drawn():
    figure, axes = plt.subplots()
    seeds = {str(seed): columns([10, 20], [30 + seed, 40]) for seed in (1, 2, 3)}
    report.plot(axes, {"a3c": seeds, "a3c+gace": seeds}, report.RATIO, report.STEPS, {"a3c": 56.55, "a3c+gace": 94.97})
    ends = [line for line in axes.lines if line.get_linestyle() == "--"]
    means = [line for line in axes.lines if line.get_linestyle() == "-"]
    dots = [line for line in axes.lines if line.get_marker() == "."]
    assert [line.get_ydata()[0] for line in ends] == [56.55, 94.97] and ends[0].get_color() == means[0].get_color()
    assert len(means) == 2 and means[0].get_ydata().tolist() == [32, 40] and len(dots) == 6
    assert axes.get_xlabel() == "environment steps"
    plt.close(figure)


@pytest.mark.slow
def test_500_runs_are_read_and_drawn(tmp_path):
    rng = np.random.default_rng(0)
    for index in range(500):
        task = ("v1", "v2", "v3", "v4", "r1", "r2", "r3")[index % 7]
        path = tmp_path / f"{task}__{report.algorithms_of(task)[index // 7 % 5]}__{index // 35}.csv"
        write(path, rng.uniform(size=200))
        if task in ("v2", "v4", "r2"):
            unseen = tmp_path / "unseen.csv"
            write(unseen, rng.uniform(size=200), split="unseen")
            path.write_text(path.read_text() + unseen.read_text().removeprefix(HEADER))
            unseen.unlink()
    result = run(tmp_path, ".")
    assert result.returncode == 0, result.stderr
    assert len(list((tmp_path / "report").glob("*.png"))) == 18  # 10 of success, 7 of accuracy, and all tasks in one

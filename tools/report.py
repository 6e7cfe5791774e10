"""The paper's learning curves and tables, from run folders and committed results.

    python -m tools.report results/          # writes report/ and prints its tables
    python -m tools.report runs/ results/    # with your own runs

It reads every `runs/{task}__{algorithm}__{seed}__{time}/metrics.csv` and every `{task}__{algorithm}__{seed}.csv`, with
the settings beside it (`args.json`, `{task}__{algorithm}__{seed}.json`). Only runs of one version with the same
settings are averaged; the report ends with a list of the others. If a folder has a README.md with the lines
`<!-- report -->` and `<!-- end of report -->`, the tables are also written between them.
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import tyro

import envs

matplotlib.use("agg")
import matplotlib.pyplot as plt

plt.rcParams |= {"font.size": 13, "axes.titlesize": "medium"}  # the front page shows a figure at half its size


@dataclass
class Args:
    paths: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"), Path("results"))
    """folders to search, and single files"""
    out: Path = Path("report")  # folder to write into


UPDATES, RATIO, ACCURACY, STEPS = range(4)  # the rows of a run's columns
AXES = {UPDATES: "updates", STEPS: "environment steps"}
METRICS = "update env_steps seconds split success_ratio discriminator_accuracy episode_length episode_return".split()
NAMES = {  # in the paper's order, with the colours of its figures
    "a3c": ("A3C", "tab:gray"),
    "a3c+vae": ("A3C+VAE", "tab:green"),
    "a3c+rad": ("A3C+RAD", "tab:blue"),
    "a3c+gace": ("A3C+GACE", "tab:orange"),
    "a3c+gace+gdan": ("A3C+GACE&GDAN", "tab:red"),
    "sac": ("SAC", "tab:gray"),
    "sac+ae": ("SAC+AE", "tab:green"),
    "sac+curl": ("SAC+CURL", "tab:blue"),
    "sac+gace": ("SAC+GACE", "tab:orange"),
    "sac+gace+gdan": ("SAC+GACE&GDAN", "tab:red"),
}
# The paper's success ratios in percent, mean and standard deviation over five seeds, in the order of NAMES.
PAPER_RATIOS = {
    ("v1", "seen"): "56.55 ± 13.75, 67.89 ± 3.50, 82.14 ± 2.34, 94.97 ± 0.70, 95.63 ± 0.64".split(", "),
    ("v2", "seen"): "4.00 ± 3.16, 30.03 ± 4.96, 7.75 ± 2.25, 79.52 ± 0.83, 86.62 ± 1.48".split(", "),
    ("v2", "unseen"): "3.99 ± 2.30, 19.79 ± 3.06, 3.87 ± 2.78, 69.79 ± 1.66, 76.36 ± 1.53".split(", "),
    ("v3", "seen"): "33.45 ± 4.72, 26.26 ± 2.17, 27.91 ± 3.48, 52.58 ± 4.09, 78.21 ± 2.45".split(", "),
    ("v4", "seen"): "3.13 ± 4.43, 31.96 ± 2.66, 4.64 ± 5.92, 41.26 ± 3.05, 54.87 ± 1.75".split(", "),
    ("v4", "unseen"): "4.40 ± 6.22, 28.18 ± 0.27, 9.98 ± 7.65, 37.96 ± 1.61, 48.52 ± 1.62".split(", "),
    ("r1", "seen"): "63.1 ± 6.9, 67.2 ± 5.0, 67.9 ± 7.3, 84.7 ± 10.0, 89.3 ± 4.2".split(", "),
    ("r2", "seen"): "60.5 ± 5.7, 72.8 ± 5.9, 74.5 ± 9.2, 75.0 ± 8.9, 78.2 ± 8.7".split(", "),
    ("r2", "unseen"): "53.4 ± 6.9, 59.4 ± 5.5, 36.6 ± 3.4, 63.0 ± 9.0, 73.3 ± 5.8".split(", "),
    ("r3", "seen"): "61.7 ± 5.4, 62.3 ± 5.1, 64.7 ± 4.0, 79.3 ± 8.9, 79.6 ± 8.4".split(", "),
}
RANDOM_RATIOS = {"v2": 5.9, "v4": 7.9}  # ours; the paper's A3C ends below them
PAPER_ABLATIONS = {("r1", "sac+gace+gdan+concat"): "81.5 ± 10.0", ("r1", "sac+single targets"): "47 ± 11"}
PAPER_ACCURACY = {("v2", "seen"): "99.32 ± 0.62", ("v2", "unseen"): "89.15 ± 3.44"}  # after 200,000 updates
# The updates that it took each algorithm to reach the reference ratio, the plain baseline's of the same task.
PAPER_UPDATES = {
    "v1": (2_000_000, 810_086, 703_574, 163_602, 110_930),
    "r1": (314_797, 230_339, 142_480, 53_774, 63_140),
}
# Quantiles of Student's distribution for a 95 % interval, for 1 to 10 degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
MAY_DIFFER = "seed exp_name runs resume track cuda num_workers eval_every episodes accuracy_states".split()
MAY_DIFFER += ["checkpoint_every", "wandb_project_name", "wandb_entity"]


def algorithms_of(task):
    return [name for name in NAMES if name.startswith("a3c" if task[0] == "v" else "sac")]


def base_of(algorithm):
    """The method that this is a variant of, such as a3c+gace for a3c+gace+frozen10000, or None."""
    return max((name for name in NAMES if f"{algorithm}+".startswith(f"{name}+")), key=len, default=None)


def title_of(algorithm):
    base = base_of(algorithm)
    return NAMES[base][0] + algorithm[len(base) :].replace("+", ", ")


def in_order(names):
    """The methods in the paper's order, each followed by its variants."""
    return sorted(names, key=lambda name: (list(NAMES).index(base_of(name)), name))


# ------------------------------------------------------------------------------------------------------------- reading


def read(path):
    """One run as {split: columns}: update, success ratio, accuracy, environment steps. Raises ValueError if unfit."""
    text = path.read_text()
    if not text.endswith("\n"):
        raise ValueError("it is empty, or cut off in the middle of a row")
    header, *rows = csv.reader(text.splitlines())
    if header[: len(METRICS)] != METRICS:  # further columns are not read
        raise ValueError(f"its columns are not {', '.join(METRICS)}")
    if not rows:
        raise ValueError("it has no evaluation yet")
    if any(len(row) != len(header) for row in rows):
        raise ValueError("it has a row with missing columns")
    if not all(np.isfinite([float(row[0]), float(row[1]), float(row[4])]).all() for row in rows):
        raise ValueError("it has a row with numbers that are not finite")
    run = {}
    for row in rows:
        run.setdefault(row[3], []).append((float(row[0]), 100 * float(row[4]), 100 * float(row[5]), float(row[1])))
    return {split: np.array(sorted(columns)).T for split, columns in run.items()}


def read_settings(path):
    """The arguments of a run, from the file beside its metrics."""
    path = path.with_name("args.json") if path.name == "metrics.csv" else path.with_suffix(".json")
    settings = json.loads(path.read_text()) if path.exists() else {}
    if not isinstance(settings, dict):
        raise ValueError(f"{path.name} holds no settings")
    if not settings.get("anneal_lr"):
        settings.pop("total_updates", None)  # then the length of a run does not change its beginning
    settings = {"version": 1} | settings  # of runs before there were versions
    return {name: value for name, value in settings.items() if name not in MAY_DIFFER}


def read_all(paths):
    """Returns {(task, split): {algorithm: {seed: columns}}}, the settings of each, and why other files are left out."""
    found, left_out, files = {}, [], []
    for path in paths:
        if not path.exists():
            raise SystemExit(f"{path} does not exist")
        files += sorted(path.rglob("*.csv")) if path.is_dir() else [path]
    for path in files:
        parts = (path.parent.name if path.name == "metrics.csv" else path.stem).split("__")
        try:
            if len(parts) not in (3, 4):
                raise ValueError("its name is not task__algorithm__seed")
            if (parts[0], "seen") not in PAPER_RATIOS or base_of(parts[1]) not in algorithms_of(parts[0]):
                raise ValueError(f"{parts[0]} with {parts[1]} is no task with an algorithm of ours")
            run, settings = read(path), read_settings(path)
        except (ValueError, OSError, csv.Error) as error:
            left_out.append(f"{path}: {error}")
            continue
        group = found.setdefault(tuple(parts[:2]), {}).setdefault(json.dumps(settings, sort_keys=True), [])
        group.append((max(columns[UPDATES, -1] for columns in run.values()), path, parts[2], run))
    runs, settings_of = {}, {}
    for (task, algorithm), groups in found.items():
        # Of several groups, the newest version, then the one with most seeds, then the longest
        order = sorted(groups, key=lambda key: (json.loads(key)["version"], len(groups[key]), max(groups[key])[0]))
        chosen = settings_of[task, algorithm] = json.loads(order[-1])
        for key in order[:-1]:
            other = json.loads(key)
            name = min((n for n in chosen | other if chosen.get(n) != other.get(n)), key=lambda n: n != "version")
            reason = f"its {name} is {other.get(name)}, that of the others {chosen.get(name)}"
            left_out += [f"{path}: {reason}" for _, path, _, _ in groups[key]]
        for _, path, seed, run in sorted(groups[order[-1]], key=lambda run: -run[0]):  # the longest first
            for split, columns in run.items():
                seeds = runs.setdefault((task, split), {}).setdefault(algorithm, {})
                if seed in seeds:
                    left_out.append(f"{path}: there is a longer run of seed {seed}")
                    break
                seeds[seed] = columns
    return runs, settings_of, left_out


# ---------------------------------------------------------------------------------------------------------- statistics


def srr(updates, reference_updates):
    """Sample Requirement Ratio n_B / n_A, in percent: lower is better."""
    return 100 * updates / reference_updates


def sei(updates, reference_updates):
    """Sample Efficiency Improvement (n_A - n_B) / n_B, in percent: higher is better."""
    return 100 * (reference_updates - updates) / updates


def student_interval(values):
    """Half the width of the 95 % interval of the mean; nan with fewer than three values."""
    if len(values) < 3:
        return np.nan
    return STUDENT[min(len(values) - 2, len(STUDENT) - 1)] * np.std(values, ddof=1) / len(values) ** 0.5


def over_seeds(seeds, column, axis):
    """The axis, mean and half interval over the seeds that have come as far. No run is extended past its end."""
    runs = [columns for columns in seeds.values() if not np.isnan(columns[column]).all()]
    # Point by point in updates: runs of as many updates end at different environment steps, and a mean of only those
    # that are left would jump there.
    updates = np.unique(np.concatenate([columns[UPDATES] for columns in runs] or [np.empty(0)]))

    def there(row):
        values = [np.interp(updates, c[UPDATES], c[row], left=np.nan, right=np.nan) for c in runs]
        return [[v[i] for v in values if not np.isnan(v[i])] for i in range(len(updates))]

    points, values = there(axis), there(column)
    means = (np.array([np.mean(v) for v in row]) for row in (points, values))
    return *means, np.array([student_interval(v) for v in values])


def interquartile_mean(values):
    """The mean of the middle half, along the last axis."""
    cut = values.shape[-1] // 4
    return np.sort(values, -1)[..., cut : values.shape[-1] - cut].mean(-1)


def bootstrap_interval(strata, resamples=5000):
    """95 % interval of the interquartile mean over several tasks; seeds are drawn again within each task."""
    rng = np.random.default_rng(0)
    drawn = [stratum[rng.integers(len(stratum), size=(resamples, len(stratum)))] for stratum in strata]
    return np.percentile(interquartile_mean(np.concatenate(drawn, -1)), [2.5, 97.5])


def probability_of_improvement(ours, theirs):
    """The probability that a seed of ours is better than one of theirs; equal ones count half."""
    difference = np.subtract.outer(ours, theirs)
    return float((difference > 0).mean() + (difference == 0).mean() / 2)


def first_reached(columns, ratio):
    """The update at which a run first reaches a ratio and keeps it at the next evaluation, and whether that is a bound.

    Between two evaluations, the curve is a straight line. The first evaluation gives a bound only."""
    above = columns[RATIO] >= ratio
    both = np.flatnonzero(above[:-1] & above[1:])
    if not len(both):
        return None, False
    i = both[0]
    if i == 0:
        return float(columns[UPDATES, 0]), True
    low, high = columns[RATIO, i - 1 : i + 1]
    share = (ratio - low) / (high - low)
    return float(np.interp(share, [0, 1], columns[UPDATES, i - 1 : i + 1])), False


# ------------------------------------------------------------------------------------------------------------- figures


def plot(axes, runs, column, axis, paper):
    """Each algorithm's mean with its interval, a dot for every evaluation of every seed, and where the paper's ends."""
    for algorithm in in_order(runs):
        seeds, colour = runs[algorithm], NAMES[base_of(algorithm)][1]
        points, mean, half = over_seeds(seeds, column, axis)
        variants = [name for name in in_order(runs) if base_of(name) == base_of(algorithm) and name not in NAMES]
        line = "-" if algorithm in NAMES else (":", "-.", (0, (4, 1)))[variants.index(algorithm) % 3]
        axes.plot(points, mean, linestyle=line, color=colour, label=title_of(algorithm))
        axes.fill_between(points, mean - half, mean + half, color=colour, alpha=0.2, linewidth=0)
        for columns in seeds.values() if len(seeds) > 1 else ():
            axes.plot(columns[axis], columns[column], ".", color=colour, markersize=3, alpha=0.6)
        if algorithm in paper:
            axes.axhline(paper[algorithm], color=colour, linestyle="--", linewidth=1, alpha=0.7)
    axes.set(ylim=(0, 102), xlim=(0, None), xlabel=AXES[axis])
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value < 1e6 else f"{value / 1e6:g}M")
    axes.spines[["top", "right"]].set_visible(False)


def draw(panels, path):
    """One figure with a panel for each (title, ylabel, runs, column, axis, paper) that has a curve."""
    panels = [p for p in panels if any(not np.isnan(c[p[3]]).all() for seeds in p[2].values() for c in seeds.values())]
    if not panels:
        return
    columns = min(len(panels), min((4, 3), key=lambda number: -len(panels) % number))  # few empty places
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(rows, columns, layout="constrained", squeeze=False)
    legend = {}
    for axes, panel in zip(grid.flat, [*panels, *[None] * (grid.size - len(panels))], strict=True):
        axes.set_visible(panel is not None)
        if panel is None:
            continue
        title, ylabel, runs, column, axis, paper = panel
        plot(axes, runs, column, axis, paper)
        counts = sorted({len(seeds) for seeds in runs.values()})
        seeds = f"{' or '.join(map(str, counts))} seed{'s' * (counts != [1])}"
        axes.set(title=f"{title}, {seeds}", ylabel=ylabel)
        legend |= {line.get_label(): line for line in axes.get_lines() if not np.isnan(line.get_ydata()).all()}
    titles = map(title_of, in_order({algorithm for panel in panels for algorithm in panel[2]}))
    legend = {title: legend[title] for title in titles if title in legend}
    if any(panel[5] for panel in panels):
        legend["where the paper's ends"] = plt.Line2D([], [], color="black", linestyle="--", linewidth=1)
    for count in (4, 3, 2, 1):  # as many columns as fit
        figure.set_size_inches(3.6 * columns, 3 * rows + 0.3 + 0.25 * -(-len(legend) // count))
        below = figure.legend(legend.values(), legend, loc="outside lower center", ncols=count, frameon=False)
        if count == 1 or below.get_window_extent().width < figure.bbox.width:
            break
        below.remove()
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=120)
    plt.close(figure)


# -------------------------------------------------------------------------------------------------------------- tables


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "| --- " * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def last_values(seeds, column=RATIO):
    return np.array([columns[column, -1] for _, columns in sorted(seeds.items())])


def mean_and_interval(values):
    half = student_interval(values)
    return f"**{np.mean(values):.1f}**" + ("" if np.isnan(half) else f" ± {half:.1f}")


def in_range(values):
    low, high = int(min(values)), int(max(values))
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def single_targets(task, runs):
    """Policies for one target each, as one algorithm: the mean over the targets, with the updates of all summed."""
    singles = {}
    for base in runs.keys() & NAMES.keys():
        found = [runs.get(f"{base}+{goal.lower()}", {}) for goal in envs.goals_of(task)]
        for seed in set.intersection(*map(set, found)):
            curves = [single[seed] for single in found]
            points = min((columns[UPDATES] for columns in curves), key=lambda updates: updates[-1])
            rows = [[np.interp(points, c[UPDATES], c[row]) for c in curves] for row in range(4)]
            merged = [np.sum(r, 0) if row in (UPDATES, STEPS) else np.mean(r, 0) for row, r in enumerate(rows)]
            singles.setdefault(f"{base}+single targets", {})[seed] = np.array(merged)
    return singles


def without_single_targets(task, runs):
    goals = [goal.lower() for goal in envs.goals_of(task)]
    return {algorithm: seeds for algorithm, seeds in runs.items() if algorithm.split("+")[-1] not in goals}


def ratio_table(task, runs, settings, paper):
    """The last evaluation of every seed, its mean with Student's interval, and the paper's figure."""
    rows = []
    for algorithm in in_order(runs):
        columns, values = runs[algorithm].values(), last_values(runs[algorithm])
        lengths = [in_range([c[axis, -1] for c in columns]) for axis in (UPDATES, STEPS)]
        version = settings.get((task, algorithm), settings.get((task, base_of(algorithm)), {})).get("version", "-")
        each = ", ".join(f"{c[RATIO, -1]:.1f} ({seed})" for seed, c in sorted(runs[algorithm].items()))
        theirs = paper.get(algorithm) or PAPER_ABLATIONS.get((task, algorithm), "-")
        rows.append([title_of(algorithm), mean_and_interval(values), each, *lengths, str(version), theirs])
    header = ["algorithm", "mean, %", "each run (seed)", "updates", "environment steps", "version"]
    return table([*header, "paper, % (5 seeds)"], rows)


def efficiency_table(task, runs, algorithms, ratio):
    """Updates and environment steps to the paper's reference ratio, SRR and SEI, with the spread over the seeds."""
    paper_updates = dict(zip(algorithms, PAPER_UPDATES.get(task, ()), strict=False))
    reached = {name: [first_reached(columns, ratio) for columns in seeds.values()] for name, seeds in runs.items()}
    found = {name: [update for update, _ in each if update is not None] for name, each in reached.items()}
    baseline, reference = algorithms[0], None
    if baseline in runs and not any(is_bound for _, is_bound in reached[baseline]):
        lasts = [columns[UPDATES, -1] for columns in runs[baseline].values()]
        all_there = len(found[baseline]) == len(lasts)  # else the baseline needs more updates than it made
        reference = np.mean(found[baseline]) if all_there else np.mean(lasts)
    rows = []
    for algorithm in in_order(runs):
        seeds, updates = runs[algorithm], found[algorithm]
        cells = [f"{len(updates)} of {len(seeds)}", "-", "-", "-", "-"]
        if updates:
            bound = "≤ " if any(is_bound for _, is_bound in reached[algorithm]) else ""
            pairs = [(u, c) for (u, _), c in zip(reached[algorithm], seeds.values(), strict=True) if u is not None]
            steps = [np.interp(u, c[UPDATES], c[STEPS]) for u, c in pairs]
            cells[1:3] = [f"{bound}{spread(updates, ',.0f')}", f"{bound}{np.mean(steps):,.0f}"]
            if reference is not None and algorithm != baseline and len(updates) == len(seeds):
                less, more = ("≤ ", "≥ ") if bound or not all_there else ("", "")
                cells[3] = f"{less}{spread([srr(u, reference) for u in updates], '.1f')}"
                cells[4] = f"{more}{spread([sei(u, reference) for u in updates], '.0f')}"
        paper = paper_updates.get(algorithm)
        theirs = ["-"] * 3
        if paper:
            first = paper_updates[baseline]
            theirs = [f"{paper:,}", f"{srr(paper, first):.2f}", f"{sei(paper, first):.2f}"]
        rows.append([title_of(algorithm), *cells, *(theirs if paper_updates else [])])
    header = ["algorithm", "seeds that reach it", "updates", "environment steps", "SRR, %", "SEI, %"]
    header += ["paper: updates", "paper: SRR, %", "paper: SEI, %"] if paper_updates else []
    return table(header, rows)


def spread(values, form):
    """Mean and standard deviation over seeds."""
    return f"{np.mean(values):{form}}" + (f" ± {np.std(values, ddof=1):{form}}" if len(values) > 1 else "")


def accuracy_table(runs):
    """The goal-discriminator's accuracy at the last evaluation."""
    rows = []
    for (task, split), here in runs.items():
        for algorithm in in_order(without_single_targets(task, here)):
            values = last_values(here[algorithm], ACCURACY)
            if not np.isnan(values).any():
                name = f"{task.upper()} {split}" if (task, "unseen") in PAPER_RATIOS else task.upper()
                theirs = PAPER_ACCURACY.get((task, split), "-") if algorithm == "a3c+gace+gdan" else "-"
                rows.append([name, title_of(algorithm), mean_and_interval(values), str(len(values)), theirs])
    return [table(["task", "algorithm", "accuracy, %", "seeds", "paper, %"], rows)] if rows else []


def summary_table(runs, family):
    """All tasks on which every method of a family has three seeds or more, taken together."""
    here = {key[0]: {a: s for a, s in r.items() if a in NAMES} for key, r in runs.items() if key[1] == "seen"}
    here = {task: r for task, r in here.items() if task[0] == family and min(map(len, r.values()), default=0) > 2}
    names = set().union(*here.values())
    tasks = [task for task, methods in here.items() if methods.keys() == names]
    if len(tasks) < 2 or len(names) < 2:
        return []
    strata = {name: [last_values(here[task][name]) for task in tasks] for name in names}
    baseline = algorithms_of(tasks[0])[0]
    rows = []
    for name in in_order(names):
        low, high = bootstrap_interval(strata[name])
        middle = interquartile_mean(np.concatenate(strata[name]))
        better = "-"
        if baseline in names and name != baseline:
            pairs = zip(strata[name], strata[baseline], strict=True)
            better = f"{np.mean([probability_of_improvement(*pair) for pair in pairs]):.2f}"
        rows.append([title_of(name), f"{middle:.1f} ({low:.1f} to {high:.1f})", better])
    header = ["algorithm", "interquartile mean (bootstrap interval)", f"P(better than {NAMES[baseline][0]})"]
    return [f"### {', '.join(task.upper() for task in tasks)} together", table(header, rows)]


NOTE = """Success ratio at the last evaluation: every seed, the mean, and from three seeds on Student's 95 % interval of
the mean. A ratio counts as reached when two evaluations in a row reach it."""


def make_report(runs, settings, left_out, out):
    """Draws the figures into a folder and returns the tables as Markdown."""
    sections, panels, accuracies = [NOTE], {}, {}
    for (task, split), paper in PAPER_RATIOS.items():
        if (task, split) not in runs:
            continue
        here, algorithms = runs[task, split], algorithms_of(task)
        two_splits = (task, "unseen") in PAPER_RATIOS
        title = f"{task.upper()} {split}" if two_splits else task.upper()
        name = f"{task}_{split}" if two_splits else task
        theirs = dict(zip(algorithms, paper, strict=True))
        ends = {algorithm: float(figure.split()[0]) for algorithm, figure in theirs.items()}
        shown = without_single_targets(task, here) | single_targets(task, here)
        frozen = {a: seeds for a, seeds in here.items() if "+frozen" in a}
        methods = {a: seeds for a, seeds in here.items() if a in NAMES}
        success, accuracy = "success ratio, %", "discriminator accuracy, %"
        curves = {a: seeds for a, seeds in shown.items() if a not in frozen}
        draw([(title, success, curves, RATIO, axis, ends) for axis in (UPDATES, STEPS)], out / f"{name}_success")
        panels[title] = (title, success, methods, RATIO, STEPS, ends)
        accuracies.setdefault(task, []).append((title, accuracy, shown, ACCURACY, UPDATES, {}))
        if frozen:  # Figure 4: beside the unfrozen method and the plain baseline
            beside = frozen | {a: here[a] for a in (algorithms[0], *map(base_of, frozen)) if a in here}
            kinds = ((success, RATIO), (accuracy, ACCURACY))
            draw([(title, label, beside, column, UPDATES, {}) for label, column in kinds], out / f"{name}_frozen")
        sections += [f"### {title}", ratio_table(task, shown, settings, theirs)]
        reference, baseline = f"{paper[0].split()[0]} %", NAMES[algorithms[0]][0]
        if split == "seen" and ends[algorithms[0]] < RANDOM_RATIOS.get(task, 0):
            random = f"a random policy's {RANDOM_RATIOS[task]} %"
            sections.append(f"Sample efficiency: none, because the paper's {baseline}, {reference}, is below {random}.")
        elif split == "seen":
            sections.append(f"Sample efficiency at {reference}, the paper's {baseline}:")
            sections.append(efficiency_table(task, shown, algorithms, ends[algorithms[0]]))
    for family in ("v", "r"):
        sections += summary_table(runs, family)
    if rows := accuracy_table({key: runs[key] for key in PAPER_RATIOS if key in runs}):
        sections += ["### Accuracy of the goal-discriminator at the last evaluation", *rows]
    if left_out:
        sections += ["### Not merged", "\n".join(f"- {line}" for line in left_out)]
    draw(list(panels.values()), out / "all_tasks")
    for task, panel in accuracies.items():
        draw(panel, out / f"{task}_discriminator")
    return "\n\n".join(sections) + "\n"


def include(report, readme):
    """Writes the report between the two marker lines of a page."""
    first, last = "<!-- report -->\n", "<!-- end of report -->"
    before, rest = readme.read_text().split(first)
    after = rest.split(last)[1]
    readme.write_text(f"{before}{first}\n{report}\n{last}{after}")


def main():
    args = tyro.cli(Args, description=__doc__)
    runs, settings, left_out = read_all(args.paths)
    if not runs:
        reasons = "".join(f"\n{line}" for line in left_out[:1])
        raise SystemExit(f"no metrics in {', '.join(map(str, args.paths))}: train something first{reasons}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        report = make_report(runs, settings, left_out, args.out)
        (args.out / "report.md").write_text(report)
    except OSError as error:
        raise SystemExit(f"cannot write into {args.out}: {error.strerror}") from None
    print(report)
    print(f"wrote {args.out}/report.md and its figures")
    for readme in (path / "README.md" for path in args.paths if path.is_dir()):
        if readme.exists() and "<!-- report -->\n" in readme.read_text():
            include(report, readme)
            print(f"wrote the tables into {readme}")


if __name__ == "__main__":
    main()

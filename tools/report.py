"""The paper's learning curves and tables, from run folders and committed results.

    python -m tools.report runs/ results/                            # writes report/ and prints its tables
    python -m tools.report runs/ --reference-ratio 50 --out v1_report

It reads every `runs/{task}__{algorithm}__{seed}__{time}/metrics.csv` and every `{task}__{algorithm}__{seed}.csv`, with
the settings beside it (`args.json`, `{task}__{algorithm}__{seed}.json`). Seeds are averaged if their settings agree.
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


@dataclass
class Args:
    paths: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"), Path("results"))
    """folders to search, and single files"""
    out: Path = Path("report")
    """folder to write into"""
    reference_algorithm: str | None = None
    """sample efficiency is measured against this one; by default the plain baseline, a3c or sac"""
    reference_ratio: float | None = None
    """sample efficiency is measured at this success ratio, in percent; by default the reference algorithm's best"""


UPDATES, RATIO, ACCURACY, STEPS = range(4)  # the rows of a run's columns
AXES = {UPDATES: "updates", STEPS: "environment steps"}
NOTE = """Mean ± standard deviation over seeds. IQM: interquartile mean (with three seeds, the mean) with a 95 %
bootstrap interval, from three seeds on. Dashed lines are where the paper's algorithms end. By default, an update of our
A3C follows an episode and one of our SAC 32 environment steps; the paper does not say how many steps an update of its
SAC follows."""
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


def algorithms_of(task):
    return [name for name in NAMES if name.startswith("a3c" if task[0] == "v" else "sac")]


# The paper's success ratios, in percent: mean and standard deviation over five seeds, in the order of NAMES.
PAPER_RATIOS = {
    ("v1", "seen"): ((56.55, 13.75), (67.89, 3.50), (82.14, 2.34), (94.97, 0.70), (95.63, 0.64)),
    ("v2", "seen"): ((4.00, 3.16), (30.03, 4.96), (7.75, 2.25), (79.52, 0.83), (86.62, 1.48)),
    ("v2", "unseen"): ((3.99, 2.30), (19.79, 3.06), (3.87, 2.78), (69.79, 1.66), (76.36, 1.53)),
    ("v3", "seen"): ((33.45, 4.72), (26.26, 2.17), (27.91, 3.48), (52.58, 4.09), (78.21, 2.45)),
    ("v4", "seen"): ((3.13, 4.43), (31.96, 2.66), (4.64, 5.92), (41.26, 3.05), (54.87, 1.75)),
    ("v4", "unseen"): ((4.40, 6.22), (28.18, 0.27), (9.98, 7.65), (37.96, 1.61), (48.52, 1.62)),
    ("r1", "seen"): ((63.1, 6.9), (67.2, 5.0), (67.9, 7.3), (84.7, 10.0), (89.3, 4.2)),
    ("r2", "seen"): ((60.5, 5.7), (72.8, 5.9), (74.5, 9.2), (75.0, 8.9), (78.2, 8.7)),
    ("r2", "unseen"): ((53.4, 6.9), (59.4, 5.5), (36.6, 3.4), (63.0, 9.0), (73.3, 5.8)),
    ("r3", "seen"): ((61.7, 5.4), (62.3, 5.1), (64.7, 4.0), (79.3, 8.9), (79.6, 8.4)),
}
# Its reference ratio, and the updates it took each algorithm to get there.
PAPER_UPDATES = {
    "v1": (56.55, (2_000_000, 810_086, 703_574, 163_602, 110_930)),
    "r1": (63.1, (314_797, 230_339, 142_480, 53_774, 63_140)),
}


def base_of(algorithm):
    """The method that this is a variant of, such as a3c+gace for a3c+gace+frozen10000, or None."""
    return max((name for name in NAMES if f"{algorithm}+".startswith(f"{name}+")), key=len, default=None)


def title_of(algorithm):
    base = base_of(algorithm)
    return NAMES[base][0] + algorithm[len(base) :].replace("+", ", ")


def in_order(names):
    """The methods in the paper's order, each followed by its variants."""
    return sorted(names, key=lambda name: (list(NAMES).index(base_of(name)), name))


def srr(updates, reference_updates):
    """Sample Requirement Ratio n_B / n_A, in percent: lower is better."""
    return 100 * updates / reference_updates


def sei(updates, reference_updates):
    """Sample Efficiency Improvement (n_A - n_B) / n_B, in percent: higher is better."""
    return 100 * (reference_updates - updates) / updates


# ------------------------------------------------------------------------------------------------------------- reading


def find_files(paths):
    for path in paths:
        if path.is_file():
            yield path
        elif path.is_dir():
            yield from sorted(path.rglob("*.csv"))
        else:
            raise SystemExit(f"{path} does not exist")


def read(path):
    """One run as {split: columns}: update, success ratio, accuracy, environment steps. Raises ValueError if unfit."""
    text = path.read_text()
    if not text:
        raise ValueError("it is empty")
    if not text.endswith("\n"):
        raise ValueError("it is cut off in the middle of a row")
    header, *rows = csv.reader(text.splitlines())
    if header != METRICS:
        raise ValueError(f"its columns are not {', '.join(METRICS)}")
    if not rows:
        raise ValueError("it has no evaluation yet")
    if any(len(row) != len(METRICS) for row in rows):
        raise ValueError("it has a row with missing columns")
    run = {}
    if not all(np.isfinite([float(row[0]), float(row[1]), float(row[4])]).all() for row in rows):
        raise ValueError("it has a row with numbers that are not finite")
    for row in rows:
        run.setdefault(row[3], []).append((float(row[0]), 100 * float(row[4]), 100 * float(row[5]), float(row[1])))
    return {split: np.array(sorted(columns)).T for split, columns in run.items()}


MAY_DIFFER = "seed exp_name runs resume track cuda num_workers eval_every episodes accuracy_states".split()
MAY_DIFFER += ["checkpoint_every", "wandb_project_name", "wandb_entity"]


def read_settings(path):
    """The arguments of a run, from the file beside its metrics; nothing if there is none."""
    path = path.with_name("args.json") if path.name == "metrics.csv" else path.with_suffix(".json")
    settings = json.loads(path.read_text()) if path.exists() else {}
    if not isinstance(settings, dict):
        raise ValueError(f"{path.name} holds no settings")
    if not settings.get("anneal_lr"):
        settings.pop("total_updates", None)  # then the length of a run does not change its beginning
    return {name: value for name, value in settings.items() if name not in MAY_DIFFER}


def read_all(paths):
    """Returns {(task, split): {algorithm: {seed: columns}}}, and a line about every file that was skipped."""
    runs, skipped, first, found = {}, [], {}, []
    for path in find_files(paths):
        name = path.parent.name if path.name == "metrics.csv" else path.stem
        parts = name.split("__")
        if len(parts) not in (3, 4):
            skipped.append(f"{path}: its name is not task__algorithm__seed")
            continue
        if (parts[0], "seen") not in PAPER_RATIOS or base_of(parts[1]) not in algorithms_of(parts[0]):
            skipped.append(f"{path}: {parts[0]} with {parts[1]} is no task with an algorithm of ours")
            continue
        try:
            run, settings = read(path), read_settings(path)
        except (ValueError, OSError, csv.Error) as error:
            skipped.append(f"{path}: {error}")
            continue
        found.append((-max(columns[UPDATES, -1] for columns in run.values()), path, parts[:3], run, settings))
    for _, path, (task, algorithm, seed), run, settings in sorted(found, key=lambda run: run[:2]):  # the longest first
        other_path, others = first.setdefault((task, algorithm), (path, settings))
        differing = [name for name in settings if name in others and settings[name] != others[name]]
        if differing:
            name = differing[0]
            skipped.append(
                f"{path}: its {name} is {settings[name]}, but {others[name]} in {other_path}; "
                "give one of the two another name with --exp-name"
            )
            continue
        for split, columns in run.items():
            seeds = runs.setdefault((task, split), {}).setdefault(algorithm, {})
            if seed in seeds:
                skipped.append(f"{path}: there is a longer run of seed {seed}")
                break
            seeds[seed] = columns
    return runs, skipped


def over_seeds(seeds, column, axis=UPDATES):
    """The axis, mean and standard deviation over the seeds, as far as all seeds go: a run that ends makes no jump."""
    runs = [columns for columns in seeds.values() if not np.isnan(columns[column]).all()]
    points = np.unique(np.concatenate([columns[axis] for columns in runs] or [np.empty(0)]))
    points = points[[all(columns[axis, 0] <= x <= columns[axis, -1] for columns in runs) for x in points]]
    values = np.array([np.interp(points, columns[axis], columns[column]) for columns in runs])
    if not len(points):
        return points, points, points
    return points, values.mean(0), values.std(0, ddof=1) if len(runs) > 1 else np.full(len(points), np.nan)


def interquartile_mean(values):
    """The mean of the middle half, along the last axis."""
    cut = values.shape[-1] // 4
    return np.sort(values, -1)[..., cut : values.shape[-1] - cut].mean(-1)


def confidence_interval(strata, resamples=5000):
    """95 % bootstrap interval of the interquartile mean; seeds are drawn again within each stratum (a task)."""
    rng = np.random.default_rng(0)
    drawn = [stratum[rng.integers(len(stratum), size=(resamples, len(stratum)))] for stratum in strata]
    return np.percentile(interquartile_mean(np.concatenate(drawn, -1)), [2.5, 97.5])


def probability_of_improvement(ours, theirs):
    """The probability that a seed of ours is better than one of theirs; equal ones count half."""
    difference = np.subtract.outer(ours, theirs)
    return float((difference > 0).mean() + (difference == 0).mean() / 2)


def first_reached(updates, ratios, reference):
    """The number of updates at which the curve first reaches the reference, between two evaluations by a straight line;
    None if it does not."""
    above = np.flatnonzero(np.asarray(ratios) >= reference)
    if not len(above):
        return None
    i = above[0]
    if i == 0:
        return float(updates[0])
    share = (reference - ratios[i - 1]) / (ratios[i] - ratios[i - 1])
    return float(updates[i - 1] + share * (updates[i] - updates[i - 1]))


# -------------------------------------------------------------------------------------------------- figures and tables


def plot(axes, runs, column, axis, paper):
    """One curve an algorithm, a shade of one standard deviation, and a dashed line where the paper's algorithm ends."""
    for algorithm in in_order(runs):
        seeds, colour = runs[algorithm], NAMES[base_of(algorithm)][1]
        points, mean, deviation = over_seeds(seeds, column, axis)
        if not len(points):
            continue
        count = f"{len(seeds)} seeds" if len(seeds) > 1 else "1 seed"
        variants = [name for name in in_order(runs) if base_of(name) == base_of(algorithm) and name not in NAMES]
        marker = "." if len(points) < 30 else None
        line = "-" if algorithm in NAMES else (":", "-.", (0, (4, 1)))[variants.index(algorithm) % 3]
        label = f"{title_of(algorithm)} ({count})"
        axes.plot(points, mean, linestyle=line, color=colour, label=label, marker=marker)
        axes.fill_between(points, mean - deviation, mean + deviation, color=colour, alpha=0.2, linewidth=0)
        if algorithm in paper:
            axes.axhline(paper[algorithm], color=colour, linestyle="--", linewidth=0.8, alpha=0.7)
    axes.set(ylim=(0, 102), xlim=(0, None), xlabel=AXES[axis])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value < 1e6 else f"{value / 1e6:g}M")
    axes.spines[["top", "right"]].set_visible(False)


def save(figure, path):
    figure.savefig(path.with_suffix(".png"), dpi=150)
    figure.savefig(path.with_suffix(".svg"))
    plt.close(figure)


def draw(panels, path):
    """One figure with a panel for each (title, ylabel, runs, column, axis, paper) that has a curve."""
    panels = [p for p in panels if any(len(over_seeds(seeds, p[3])[0]) for seeds in p[2].values())]
    if not panels:
        return
    rows = 1 if len(panels) < 4 else 2
    columns = -(-len(panels) // rows)
    figure, grid = plt.subplots(rows, columns, figsize=(0.6 + 4.4 * columns, 3.6 * rows), layout="constrained")
    grid = np.atleast_1d(grid).ravel()
    for axes, (title, ylabel, runs, column, axis, paper) in zip(grid, panels, strict=False):
        plot(axes, runs, column, axis, paper)
        axes.set(title=title, ylabel=ylabel)
        axes.legend(loc="lower right", framealpha=0.8, edgecolor="none", fontsize="small")
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    save(figure, path)


def frozen_and_unfrozen(runs):
    """The algorithms of the ablation that freezes the discriminator, or nothing."""
    frozen = {name for name in runs if "+frozen" in name}
    return {name: runs[name] for name in {*frozen, *(base_of(name) for name in frozen)} & runs.keys()}


def ablation_panels(runs):
    kinds = (("success ratio, %", RATIO), ("goal-discriminator accuracy, %", ACCURACY))
    return [(ylabel, runs, column, UPDATES, {}) for ylabel, column in kinds]


def single_targets(task, runs):
    """Single-target policies, averaged over their targets for each seed, beside the agent of all targets."""
    chosen = {}
    for base in runs.keys() & NAMES.keys():
        singles = [runs.get(f"{base}+{goal.lower()}", {}) for goal in envs.goals_of(task)]
        for seed in set.intersection(*map(set, singles)):
            curves = [single[seed] for single in singles]
            points = min((columns[UPDATES] for columns in curves), key=lambda updates: updates[-1])
            mean = [np.mean([np.interp(points, c[UPDATES], c[row]) for c in curves], 0) for row in range(4)]
            chosen |= {base: runs[base]}
            chosen.setdefault(f"{base}+single targets", {})[seed] = np.array(mean)
    return chosen


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "| --- " * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def last_ratios(seeds):
    return np.array([columns[RATIO, -1] for columns in seeds.values()])


def spread(values):
    return f"{np.mean(values):.1f}" + (f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else "")


def robust(strata):
    """The interquartile mean with its interval, if every stratum has three seeds or more."""
    if min(len(stratum) for stratum in strata) < 3:
        return "-"
    low, high = confidence_interval(strata)
    return f"{interquartile_mean(np.concatenate(strata)):.1f} ({low:.1f} to {high:.1f})"


def improvement(ours, theirs):
    """The probability of improvement on the baseline, averaged over the tasks, if all have three seeds or more."""
    if min(map(len, (*ours, *theirs))) < 3:
        return "-"
    pairs = zip(ours, theirs, strict=True)
    return f"{np.mean([probability_of_improvement(*pair) for pair in pairs]):.2f}"


def in_range(values):
    low, high = int(min(values)), int(max(values))
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def ratio_table(runs, paper, algorithms):
    """The last evaluation of every seed, beside the paper's figure."""
    rows = []
    figures = {name: f"{mean} ± {deviation}" for name, (mean, deviation) in zip(algorithms, paper, strict=True)}
    for algorithm in in_order({*algorithms, *runs}):
        cells = ["-"] * 7
        if algorithm in runs:
            last, all_columns = last_ratios(runs[algorithm]), runs[algorithm].values()
            better = improvement([last], [last_ratios(runs[algorithms[0]])]) if algorithms[0] in runs else "-"
            best = f"{np.mean([columns[RATIO].max() for columns in all_columns]):.1f}"
            lengths = [in_range([columns[axis, -1] for columns in all_columns]) for axis in (UPDATES, STEPS)]
            better = "-" if algorithm == algorithms[0] else better
            cells = [spread(last), robust([last]), better, best, str(len(last)), *lengths]
        rows.append([title_of(algorithm), *cells, figures.get(algorithm, "-")])
    header = ["algorithm", "last evaluation, %", "IQM (95 %)", f"P(better than {NAMES[algorithms[0]][0]})", "best, %"]
    return table([*header, "seeds", "updates", "environment steps", "paper, % (5 seeds)"], rows)


def summary_table(runs, family):
    """All tasks on which every algorithm of a family has runs, taken together."""
    seen = {key: algorithms for key, algorithms in runs.items() if key[0][0] == family and key[1] == "seen"}
    here = {key: {a: seeds for a, seeds in r.items() if a in NAMES} for key, r in seen.items()}
    names = set().union(*here.values())
    common = [key for key, algorithms in here.items() if algorithms.keys() == names]
    if len(common) < 2 or len(names) < 2:
        return []
    strata = {name: [last_ratios(here[key][name]) for key in common] for name in names}
    baseline = algorithms_of(common[0][0])[0]
    rows = []
    for name in in_order(names):
        better = improvement(strata[name], strata[baseline]) if baseline in names and name != baseline else "-"
        mean = np.mean([stratum.mean() for stratum in strata[name]])
        seeds = in_range([len(stratum) for stratum in strata[name]])
        rows.append([title_of(name), f"{mean:.1f}", robust(strata[name]), better, seeds])
    title = ", ".join(task.upper() for task, _ in common)
    header = ["algorithm", "mean, %", "IQM (95 %)", f"P(better than {NAMES[baseline][0]})", "seeds of a task"]
    return [f"## {title} together", table(header, rows)]


def efficiency_table(args, task, runs, algorithms):
    """Updates to the reference ratio, SRR and SEI, beside the paper's."""
    reference = args.reference_algorithm if args.reference_algorithm in algorithms else algorithms[0]
    curves = {name: over_seeds(seeds, RATIO)[:2] for name, seeds in runs.items()}
    paper_ratio, paper_updates = PAPER_UPDATES.get(task, (None, (None,) * 5))
    ratio = args.reference_ratio
    note = "as asked for"
    if ratio is None and reference in curves and len(curves[reference][0]):
        ratio, note = curves[reference][1].max(), f"the best of {NAMES[reference][0]}"
    if ratio is None:
        ratio, note = paper_ratio, f"the paper's, because there is no run of {NAMES[reference][0]}"
    if ratio is None:
        return None
    needed = {name: first_reached(*curve, ratio) for name, curve in curves.items()}
    reference_updates, paper_reference = needed.get(reference), paper_updates[algorithms.index(reference)]
    # Reached by the first evaluation: the true number of updates may be smaller.
    early = {name for name, (updates, _) in curves.items() if len(updates) and needed[name] == updates[0]}
    rows = []
    for algorithm in in_order({*algorithms, *runs}):
        paper = dict(zip(algorithms, paper_updates, strict=True)).get(algorithm)
        ours = [""] * 4
        if algorithm in curves and len(curves[algorithm][0]):
            count = needed[algorithm]
            at_most, at_least = ("≤ ", "≥ ") if algorithm in early else ("", "")
            ours[0] = f"not reached in {curves[algorithm][0][-1]:,.0f}"
            if count is not None:
                steps = [np.interp(count, columns[UPDATES], columns[STEPS]) for columns in runs[algorithm].values()]
                ours[:2] = [f"{at_most}{count:,.0f}", f"{at_most}{np.mean(steps):,.0f}"]
                if algorithm == reference:
                    ours[2:] = ["100.00", "0.00"]
                elif reference_updates is not None and reference not in early:
                    ours[2] = f"{at_most}{srr(count, reference_updates):.2f}"
                    ours[3] = f"{at_least}{sei(count, reference_updates):.2f}"
        theirs = ["-"] * 3 if paper_reference else []
        if paper:
            theirs = [f"{paper:,}", f"{srr(paper, paper_reference):.2f}", f"{sei(paper, paper_reference):.2f}"]
        rows.append([title_of(algorithm), *(cell or "-" for cell in ours), *theirs])
    header = ["algorithm", "updates", "environment steps", "SRR, %", "SEI, %"]
    if paper_reference:
        header += [f"paper: updates to {paper_ratio} %", "paper: SRR, %", "paper: SEI, %"]
    return f"Reference: {ratio:.2f} % ({note}).\n\n" + table(header, rows)


def main():
    args = tyro.cli(Args, description=__doc__)
    if args.reference_algorithm and args.reference_algorithm not in NAMES:
        raise SystemExit(f"unknown algorithm {args.reference_algorithm!r}; use one of {', '.join(NAMES)}")
    runs, skipped = read_all(args.paths)
    for line in skipped:
        print(f"skipped {line}")
    if not runs:
        raise SystemExit(f"no metrics in {', '.join(map(str, args.paths))}: train something first")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"cannot write into {args.out}: {error.strerror}") from None
    sections, panels, accuracies = ["# Report", NOTE], {}, {}
    for (task, split), paper in PAPER_RATIOS.items():
        if (task, split) not in runs:
            continue
        here = runs[task, split]
        algorithms = algorithms_of(task)
        two_splits = (task, "unseen") in PAPER_RATIOS
        title = f"{task.upper()} {split}" if two_splits else task.upper()
        name = f"{task}_{split}" if two_splits else task
        ends = {name: mean for name, (mean, _) in zip(algorithms, paper, strict=True)}
        success = "success ratio, %"
        # Ablations of the discriminator and single targets have figures of their own.
        apart = {a for a in here if "+frozen" in a or a.split("+")[-1] in envs.goals_of("r3")}
        curves = {algorithm: seeds for algorithm, seeds in here.items() if algorithm not in apart}
        draw([(title, success, curves, RATIO, axis, ends) for axis in (UPDATES, STEPS)], args.out / f"{name}_success")
        methods = {algorithm: seeds for algorithm, seeds in here.items() if algorithm in NAMES}
        panels[title] = (title, success, methods, RATIO, UPDATES, ends)
        accuracies.setdefault(task, []).append((title, "goal-discriminator accuracy, %", here, ACCURACY, UPDATES, {}))
        ablation = frozen_and_unfrozen(here)
        draw([(title, *rest) for rest in ablation_panels(ablation)], args.out / f"{name}_frozen")
        draw([(title, success, single_targets(task, here), RATIO, UPDATES, {})], args.out / f"{name}_single_targets")
        sections += [f"## {title}: success ratio", ratio_table(here, paper, algorithms)]
        efficiency = efficiency_table(args, task, here, algorithms) if split == "seen" else None
        if efficiency:
            sections += [f"## {title}: sample efficiency", efficiency]
    for family in ("v", "r"):
        sections += summary_table(runs, family)
    draw(list(panels.values()), args.out / "all_tasks")
    for task, panel in accuracies.items():
        draw(panel, args.out / f"{task}_discriminator")
    report = "\n\n".join(sections) + "\n"
    (args.out / "report.md").write_text(report)
    print(report)
    print(f"wrote {args.out}/report.md and its figures")


if __name__ == "__main__":
    main()

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
    """One run as {split: columns}, where columns are update, success ratio and accuracy. Raises ValueError if unfit."""
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
    for row in rows:
        run.setdefault(row[3], []).append((float(row[0]), 100 * float(row[4]), 100 * float(row[5])))
    return {split: np.array(sorted(columns)).T for split, columns in run.items()}


MAY_DIFFER = "seed exp_name runs resume track cuda num_workers eval_every episodes accuracy_states".split()
MAY_DIFFER += ["checkpoint_every"]


def read_settings(path):
    """The arguments of a run, from the file beside its metrics; nothing if there is none."""
    path = path.with_name("args.json") if path.name == "metrics.csv" else path.with_suffix(".json")
    settings = json.loads(path.read_text()) if path.exists() else {}
    if not settings.get("anneal_lr"):
        settings.pop("total_updates", None)  # then the length of a run does not change its beginning
    return {name: value for name, value in settings.items() if name not in MAY_DIFFER}


def read_all(paths):
    """Returns {(task, split): {algorithm: {seed: columns}}}, and a line about every file that was skipped."""
    runs, skipped, first = {}, [], {}
    for path in sorted(find_files(paths), key=lambda path: -path.stat().st_size):  # the longest run of a seed first
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
        except (ValueError, UnicodeDecodeError, csv.Error) as error:
            skipped.append(f"{path}: {error}")
            continue
        task, algorithm, seed = parts[:3]
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


def over_seeds(seeds, column):
    """Updates, mean and standard deviation over the seeds, which are interpolated to the updates of them all."""
    updates = np.unique(np.concatenate([columns[0] for columns in seeds.values()]))
    values = np.array(
        [np.interp(updates, columns[0], columns[column], left=np.nan, right=np.nan) for columns in seeds.values()]
    )
    known = ~np.isnan(values)
    count = known.sum(0)
    filled = np.where(known, values, 0)
    mean = filled.sum(0) / np.maximum(count, 1)
    deviation = np.sqrt((np.where(known, values - mean, 0) ** 2).sum(0) / np.maximum(count, 1))
    keep = count > 0
    return updates[keep], mean[keep], np.where(count > 1, deviation, np.nan)[keep]


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


def draw(runs, column, ylabel, path):
    """One curve an algorithm, with a shade of one standard deviation where there are several seeds."""
    figure, axes = plt.subplots(figsize=(5, 3.6), layout="constrained")
    drawn = False
    for algorithm in in_order(runs):
        seeds, label, colour = runs[algorithm], title_of(algorithm), NAMES[base_of(algorithm)][1]
        updates, mean, deviation = over_seeds(seeds, column)
        if not len(updates):
            continue
        drawn = True
        count = f"{len(seeds)} seeds" if len(seeds) > 1 else "1 seed"
        marker, line = "." if len(updates) < 30 else None, "-" if algorithm in NAMES else "--"
        axes.plot(updates, mean, line, color=colour, label=f"{label} ({count})", marker=marker)
        axes.fill_between(updates, mean - deviation, mean + deviation, color=colour, alpha=0.2, linewidth=0)
    if drawn:
        axes.set(xlabel="updates", ylabel=ylabel, ylim=(0, 100), xlim=(0, None))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
        axes.set_title(path.name.split("_")[0].upper() + (" unseen" if "unseen" in path.name else ""))
        figure.savefig(path.with_suffix(".png"), dpi=150)
        figure.savefig(path.with_suffix(".svg"))
    plt.close(figure)


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "| --- " * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def ratio_table(runs, paper, algorithms):
    """The last evaluation of every seed, beside the paper's figure."""
    rows = []
    figures = {name: f"{mean} ± {deviation}" for name, (mean, deviation) in zip(algorithms, paper, strict=True)}
    for algorithm in in_order({*algorithms, *runs}):
        ours, best, seeds, updates = "-", "-", "-", "-"
        if algorithm in runs:
            last = [columns[1, -1] for columns in runs[algorithm].values()]
            ours = f"{np.mean(last):.1f}" + (f" ± {np.std(last):.1f}" if len(last) > 1 else "")
            best = f"{np.mean([columns[1].max() for columns in runs[algorithm].values()]):.1f}"
            seeds = str(len(last))
            lengths = sorted({int(columns[0, -1]) for columns in runs[algorithm].values()})
            updates = f"{lengths[0]:,}" + (f" to {lengths[-1]:,}" if len(lengths) > 1 else "")
        rows.append([title_of(algorithm), ours, best, seeds, updates, figures.get(algorithm, "-")])
    return table(["algorithm", "last evaluation, %", "best, %", "seeds", "updates", "paper, % (5 seeds)"], rows)


def efficiency_table(args, task, runs, algorithms):
    """Updates to the reference ratio, SRR and SEI, beside the paper's."""
    reference = args.reference_algorithm if args.reference_algorithm in algorithms else algorithms[0]
    curves = {name: over_seeds(seeds, 1)[:2] for name, seeds in runs.items()}
    paper_ratio, paper_updates = PAPER_UPDATES.get(task, (None, (None,) * 5))
    ratio = args.reference_ratio
    note = "as asked for"
    if ratio is None and reference in curves:
        ratio, note = curves[reference][1].max(), f"the best of {NAMES[reference][0]}"
    if ratio is None:
        ratio, note = paper_ratio, f"the paper's, because there is no run of {NAMES[reference][0]}"
    if ratio is None:
        return None
    needed = {name: first_reached(*curve, ratio) for name, curve in curves.items()}
    reference_updates, paper_reference = needed.get(reference), paper_updates[algorithms.index(reference)]
    rows = []
    for algorithm in in_order({*algorithms, *runs}):
        paper = dict(zip(algorithms, paper_updates, strict=True)).get(algorithm)
        ours = [""] * 3
        if algorithm in curves:
            count = needed[algorithm]
            ours[0] = f"{count:,.0f}" if count is not None else f"not reached in {curves[algorithm][0][-1]:,.0f}"
            if count is not None and reference_updates is not None:
                ours[1:] = [f"{srr(count, reference_updates):.2f}", f"{sei(count, reference_updates):.2f}"]
        theirs = ["-"] * 3 if paper_reference else []
        if paper:
            theirs = [f"{paper:,}", f"{srr(paper, paper_reference):.2f}", f"{sei(paper, paper_reference):.2f}"]
        rows.append([title_of(algorithm), *(cell or "-" for cell in ours), *theirs])
    header = ["algorithm", "updates", "SRR, %", "SEI, %"]
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
    sections = ["# Report"]
    for (task, split), paper in PAPER_RATIOS.items():
        if (task, split) not in runs:
            continue
        here = runs[task, split]
        algorithms = algorithms_of(task)
        two_splits = (task, "unseen") in PAPER_RATIOS
        title = f"{task.upper()} {split}" if two_splits else task.upper()
        name = f"{task}_{split}" if two_splits else task
        draw(here, 1, "success ratio, %", args.out / f"{name}_success")
        draw(here, 2, "goal-discriminator accuracy, %", args.out / f"{name}_discriminator")
        sections += [f"## {title}: success ratio", ratio_table(here, paper, algorithms)]
        efficiency = efficiency_table(args, task, here, algorithms) if split == "seen" else None
        if efficiency:
            sections += [f"## {title}: sample efficiency", efficiency]
    report = "\n\n".join(sections) + "\n"
    (args.out / "report.md").write_text(report)
    print(report)
    print(f"wrote {args.out}/report.md and its figures")


if __name__ == "__main__":
    main()

"""Copies a run to results/: its evaluations, its settings and, with --agent, its agent at 16 bits.

    python -m tools.publish runs/v1__a3c+gace__2__1700000000 --agent

It may be called again while the run goes on: the files in results/ are then those of its last checkpoint.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from tools.enjoy import load_agent


@dataclass
class Args:
    run: tyro.conf.Positional[Path]  # the run folder
    agent: bool = False  # also write the agent, for tools.enjoy
    out: Path = Path("results")  # folder to write into


def main():
    args = tyro.cli(Args, description=__doc__)
    script, checkpoint, trained, agent = load_agent(args.run / "checkpoint.pt")
    if not checkpoint.get("rows"):
        raise SystemExit(f"{args.run} has no evaluation yet")
    name = f"{trained.task}__{script.algorithm(trained)}__{trained.seed}"
    old, new = args.out / f"{name}.csv", args.run / "metrics.csv"
    if old.exists() and not new.read_text().startswith(old.read_text()):
        raise SystemExit(f"{old} holds another run: rename it, or train with another --exp-name")
    settings = checkpoint["args"] | {"runs": "runs"}  # the folder on this machine concerns nobody else
    args.out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(new, old)
    (args.out / f"{name}.json").write_text(json.dumps(settings, indent=1) + "\n")
    if args.agent:
        small = {"args": settings, "agent": agent.half().state_dict(), "counters": checkpoint["counters"]}
        torch.save(small, args.out / f"{name}.pt")
    last = checkpoint["rows"][-1]
    success = f"success {last['success_ratio']:.1%} ({last['split']})"
    print(f"wrote {args.out}/{name}: {trained.task}, update {last['update']:,}, {success}")


if __name__ == "__main__":
    main()

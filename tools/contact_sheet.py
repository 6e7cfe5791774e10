"""Draws docs/tasks.png: every task and split as a person and as the agent sees it, on the way to the goal.

python -m tools.contact_sheet
"""

from pathlib import Path

import gymnasium as gym
import matplotlib.pyplot as plt

import envs
from tools.scripted import Walker, reach_action

SPLITS = [("v1", "seen"), ("v2", "seen"), ("v2", "unseen"), ("v3", "seen"), ("v4", "seen"), ("v4", "unseen")]
SPLITS += [("r1", "seen"), ("r2", "seen"), ("r2", "unseen"), ("r3", "seen")]


def main():
    figure, axes = plt.subplots(len(SPLITS), 4, figsize=(14, 22))
    for row, (task, split) in zip(axes, SPLITS, strict=True):
        env = gym.make(f"gace/{task.upper()}-v0", split=split, render_mode="rgb_array")
        bare = env.unwrapped
        for goal, axis in enumerate(row):
            _, info = env.reset(seed=goal, options={"goal": goal % len(bare.names)})
            walker = Walker(bare) if isinstance(bare, envs.DoomEnv) else None
            for _ in range(7 if walker else 2):
                action = walker.action() if walker else reach_action(bare)
                if any(env.step(action)[2:4]):
                    break
            axis.imshow(env.render())
            axis.set_title(info["instruction"], fontsize=9)
            axis.set_xticks([])
            axis.set_yticks([])
        row[0].set_ylabel(f"{task.upper()} {split}" if task in ("v2", "v4", "r2") else task.upper(), fontsize=12)
        env.close()
    figure.tight_layout()
    figure.savefig(Path(__file__).parent.parent / "docs" / "tasks.png", dpi=70)


if __name__ == "__main__":
    main()

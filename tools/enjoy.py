"""Evaluates a trained agent of either script, or films it.

python -m tools.enjoy runs/RUN/checkpoint.pt
python -m tools.enjoy "results/v1__a3c+gace+gdan__1.pt" --goal Bonus --episodes 50
python -m tools.enjoy "results/r1__sac+gace__1.pt" --video
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import gymnasium as gym
import torch
import tyro
from PIL import Image, ImageDraw
from tqdm import tqdm

import a3c_gace_vizdoom
import envs
import sac_gace_ur5


@dataclass
class Args:
    checkpoint: tyro.conf.Positional[Path]
    """a checkpoint of a3c_gace_vizdoom.py or sac_gace_ur5.py"""
    split: Literal["seen", "unseen"] | None = None
    """play this split only"""
    goal: str | None = None
    """play this goal only, by name"""
    episodes: int | None = None
    """episodes to play; by default those of the script's own evaluation, or 3 for a video"""
    video: bool = False
    """write videos/NAME_SPLIT.gif instead of printing the success ratio"""


def load_agent(path):
    """Returns the script that trained an agent, its checkpoint, its Args and the agent."""
    reasons = []
    for script in (a3c_gace_vizdoom, sac_gace_ur5):
        try:
            return script, *script.load_checkpoint(path)
        except SystemExit as error:
            reasons.append(str(error))
    raise SystemExit("\n".join(dict.fromkeys(reasons)))


def check_choice(task, split, goal):
    """Says in one line which splits and goals a task has, if the choice is not among them."""
    if split not in (None, *envs.splits_of(task)):
        raise SystemExit(f"{task} has no {split} split")
    if goal and goal.lower() not in [name.lower() for name in envs.goals_of(task)]:
        raise SystemExit(f"unknown goal {goal!r}; use one of {', '.join(envs.goals_of(task))}")


class Player:
    """Chooses the most likely action in one environment, with the agent of either script."""

    def __init__(self, trained, agent):
        self.trained, self.agent = trained, agent

    def begin(self):
        self.memory = torch.zeros(2, 1, 256)

    def act(self, observation):
        """Returns the action and its name."""
        image, goal = observation["image"][None], [int(observation["goal"])]
        if self.trained.task in envs.R_TASKS:
            action = self.agent.act(image, goal, explore=False)[0]
            return action, " ".join(f"{speed:+.1f}" for speed in action)
        image = torch.from_numpy(a3c_gace_vizdoom.crop(image) if self.trained.aux == "rad" else image)
        logits, _, self.memory = self.agent.act(image, torch.tensor(goal), self.memory)
        action = int(logits.argmax())
        return action, ("forward", "left", "right")[action]


def film(trained, agent, split, goal, episodes):
    """Returns the pictures of some episodes."""
    env = gym.make(f"gace/{trained.task.upper()}-v0", split=split, render_mode="rgb_array")
    player, frames = Player(trained, agent), []
    for seed in range(1, episodes + 1):
        observation, info = env.reset(seed=seed, options={"goal": goal} if goal else None)
        player.begin()
        over = False
        while not over:
            action, name = player.act(observation)
            frames.append(caption(env.render(), f"{info['instruction']}   {name}"))
            observation, _, terminated, truncated, result = env.step(action)
            over = terminated or truncated
        outcome = "reached" if result["is_success"] else "another object" if terminated else "out of time"
        frames.append(caption(env.render(), f"{info['instruction']}   {outcome}"))
    env.close()
    return frames


def caption(picture, text):
    frame = Image.fromarray(picture)
    ImageDraw.Draw(frame).text((12, 8), text, fill="white", font_size=22, stroke_width=2, stroke_fill="black")
    return frame


def main():
    args = tyro.cli(Args, description=__doc__)
    if args.episodes is not None and not 1 <= args.episodes <= 10**6:
        raise SystemExit("--episodes must be between 1 and 1000000")
    script, checkpoint, trained, agent = load_agent(args.checkpoint)
    check_choice(trained.task, args.split, args.goal)
    goal = args.goal or getattr(trained, "fixed_goal", None)
    for split in [args.split] if args.split else envs.splits_of(trained.task):
        if args.video:
            folder = args.checkpoint.parent.name if args.checkpoint.stem == "checkpoint" else args.checkpoint.stem
            path = Path("videos", f"{folder}_{split}.gif")
            path.parent.mkdir(exist_ok=True)
            frames = film(trained, agent, split, goal, args.episodes or 3)
            frames[0].save(path, save_all=True, append_images=frames[1:], duration=150, loop=0)
            print(f"wrote {path}")
            continue
        settings = replace(trained, episodes=args.episodes or trained.episodes)
        with tqdm(desc=f"{trained.task} {split}", unit=" steps") as bar:
            row = script.evaluate(settings, agent, split, {}, goal=goal, on_step=bar.update)
        print(
            f"update {checkpoint['counters']['updates']:,}, {split}: success {row['success_ratio']:.1%}, "
            f"length {row['episode_length']:.1f}, return {row['episode_return']:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

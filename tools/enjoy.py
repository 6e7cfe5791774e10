"""Evaluates a trained agent of either script, or films it.

python -m tools.enjoy runs/RUN/checkpoint.pt
python -m tools.enjoy "results/v1__a3c+gace__2.pt" --goal Bonus --episodes 50
python -m tools.enjoy "results/v1__a3c+gace__2.pt" --details  # success by goal and by distance
python -m tools.enjoy "results/v1__a3c+gace__2.pt" --video
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from PIL import Image, ImageDraw, ImageOps
from tqdm import tqdm

import a3c_gace_vizdoom
import envs
import sac_gace_ur5


@dataclass
class Args:
    checkpoint: tyro.conf.Positional[Path]
    """a checkpoint of a3c_gace_vizdoom.py or sac_gace_ur5.py, or the folder of its run"""
    split: Literal["seen", "unseen"] | None = None  # play this split only
    goal: str | None = None  # play this goal only, by name
    episodes: int | None = None
    """episodes to play; by default those of the script's own evaluation, or one of each goal for a video"""
    details: bool = False  # also print how the episodes end, by goal and by the place of the goal
    video: bool = False  # write videos/NAME_SPLIT.gif instead of printing the success ratio


def load_agent(path):
    """Returns the script that trained an agent, its checkpoint, its Args and the agent."""
    path = path / "checkpoint.pt" if path.is_dir() else path
    if not path.is_file():
        raise SystemExit(f"{path} does not exist")
    task = torch.load(path, map_location="cpu", weights_only=True)["args"]["task"]
    script = a3c_gace_vizdoom if task in envs.V_TASKS else sac_gace_ur5
    return script, *script.load_checkpoint(path)


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

    @torch.no_grad()
    def act(self, observation):
        """Returns the action and its name."""
        image, goal = observation["image"][None], [int(observation["goal"])]
        if self.trained.task in envs.R_TASKS:
            return self.agent.act(image, goal, explore=False)[0], ""
        image = torch.from_numpy(a3c_gace_vizdoom.crop(image) if self.trained.aux == "rad" else image)
        logits, _, self.memory, _ = self.agent(image, torch.tensor(goal), self.memory)
        action = int(logits.argmax())
        return action, ("forward", "left", "right")[action]


OUTCOMES = {"reached": "limegreen", "wrong object": "red", "out of time": "orange"}  # and the colour of the border


def outcome_of(info, terminated):
    return "reached" if info["is_success"] else "wrong object" if terminated else "out of time"


def ending_of(episode):
    """The goal of an episode, the goal's place, and the outcome."""
    env = episode.env.unwrapped
    if env.task in envs.R_TASKS:
        place = ("left", "front", "right")[env.box_classes.tolist().index(env.goal)]
    else:
        distance = math.dist(envs.START, env.objects[env.goal])
        if env.picture is envs.MAZE:  # it has four places
            place = f"{distance:.0f} units away"
        else:
            ranges = [(0, 150), (150, 250), (250, 350), (350, 550)]  # 550: a corner of the room
            place = next(f"{low} to {high} units away" for low, high in ranges if distance <= high)
    return env.names[env.goal], place, outcome_of(episode.info, episode.terminated)


def evaluate(script, settings, agent, split, goal):
    """Plays the episodes of the script's own evaluation. Returns success, length and return, and all endings."""
    results, endings = [], []
    episodes = script.evaluation_episodes(settings, agent, split, goal)
    for episode in tqdm(episodes, f"evaluating {split}", settings.episodes, leave=False, **script.BAR):
        results.append((episode.info["is_success"], len(episode.rewards), sum(episode.rewards)))
        endings.append(ending_of(episode))
    return np.mean(results, 0).tolist(), endings


def details_of(endings):
    """A table of how episodes end, by goal, then by place."""
    lines = [f"{'':25}{'episodes':>10}" + "".join(f"{outcome:>15}" for outcome in OUTCOMES)]
    for column in (0, 1):
        for group in sorted({ending[column] for ending in endings}):
            found = [ending[2] for ending in endings if ending[column] == group]
            shares = "".join(f"{found.count(outcome) / len(found):>15.0%}" for outcome in OUTCOMES)
            lines.append(f"{group:25}{len(found):>10}{shares}")
    return "\n".join(lines)


def film(trained, agent, split, goal, episodes):
    """Returns the pictures of episodes with seeds 1, 2 ..., a goal after the other, and how many milliseconds each is
    shown."""
    env = gym.make(f"gace/{trained.task.upper()}-v0", split=split, render_mode="rgb_array")
    player, frames, durations = Player(trained, agent), [], []
    for seed in range(1, episodes + 1):
        goals = [goal] if goal else env.unwrapped.names
        observation, info = env.reset(seed=seed, options={"goal": goals[(seed - 1) % len(goals)]})
        target = picture_of_goal(env.unwrapped, seed) if trained.task in envs.V_TASKS else None
        player.begin()
        over = False
        while not over:
            action, name = player.act(observation)
            picture = env.render()
            frames.append(caption(picture, f"{info['instruction']}   {name}", target))
            observation, _, terminated, truncated, result = env.step(action)
            over = terminated or truncated
        outcome = outcome_of(result, terminated)
        if trained.task in envs.R_TASKS:
            picture = env.render()  # in Doom, an object that was reached is gone, and one would see a wall
        last = caption(picture, f"{info['instruction']}   {outcome}", target)
        frames.append(ImageOps.expand(ImageOps.crop(last, 8), 8, OUTCOMES[outcome]))
        durations += [150 if trained.task in envs.V_TASKS else 300] * (len(frames) - len(durations) - 1) + [1000]
    env.close()
    return frames, durations


def picture_of_goal(env, seed):
    """The goal of an episode, seen from near by: on the way it is a few pixels wide."""
    near = envs.DoomEnv(env.task, env.split)
    away = np.array([(100, 100), (740, 100), (100, 740), (740, 740)], float)
    angle = np.deg2rad(env.heading)
    away[env.goal] = np.array(envs.START) + 80 * np.array([np.cos(angle), np.sin(angle)])
    near.place_objects = lambda: away
    near.reset(seed=seed, options={"goal": env.goal})
    screen = near.frame[:3].astype(np.uint8).transpose(1, 2, 0)
    near.close()
    return Image.fromarray(screen[55:110, 52:107]).resize((120, 120), Image.Resampling.NEAREST)


def caption(picture, text, target=None):
    """A brighter picture with a text, and the picture of the goal in its corner."""
    frame = Image.fromarray(picture).point([round(255 * (level / 255) ** 0.7) for level in range(256)] * 3)
    if target:
        frame.paste(ImageOps.expand(target, 3, "white"), (12, frame.height - 138))
    ImageDraw.Draw(frame).text((12, 8), text, fill="white", font_size=22, stroke_width=2, stroke_fill="black")
    return frame


def main():
    args = tyro.cli(Args, description=__doc__)
    if args.episodes is not None and not 1 <= args.episodes <= 10**6:
        raise SystemExit("--episodes must be between 1 and 1000000")
    if args.video and args.details:
        raise SystemExit("--details is for an evaluation: leave out --video")
    script, checkpoint, trained, agent = load_agent(args.checkpoint)
    check_choice(trained.task, args.split, args.goal)
    goal = args.goal or getattr(trained, "fixed_goal", None)
    for split in [args.split] if args.split else envs.splits_of(trained.task):
        if args.video:
            run = args.checkpoint.parent if args.checkpoint.stem == "checkpoint" else args.checkpoint
            path = Path("videos", f"{run.resolve().name.removesuffix('.pt')}_{split}.gif")
            path.parent.mkdir(exist_ok=True)
            number = args.episodes or (1 if goal else len(envs.goals_of(trained.task)))
            frames, durations = film(trained, agent, split, goal, number)
            frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0)
            print(f"wrote {path}")
            continue
        settings = replace(trained, episodes=args.episodes or trained.episodes)
        (success, length, total), endings = evaluate(script, settings, agent, split, goal)
        update = int(checkpoint["counters"]["updates"])
        print(f"update {update:,}, {split}: success {success:.1%}, length {length:.1f}, return {total:.2f}", flush=True)
        if args.details:
            print(details_of(endings), flush=True)


if __name__ == "__main__":
    main()

"""What a trained agent looks at: perturbation saliency (Greydanus et al., 2018), as in the paper's figure.

    python -m tools.saliency runs/RUN/checkpoint.pt                       # the task it was trained on
    python -m tools.saliency runs/RUN/checkpoint.pt --task v2 --split unseen --goal Bonus
    python -m tools.saliency A3C.pt GACE.pt GDAN.pt --split unseen        # several agents in the same episodes

A small patch of the frame is blurred, and how far the policy and the value move is the saliency of that patch: policy
in blue, value in red, both in purple. The goal is circled in yellow, the other objects in green. Writes a sheet of
frames (PNG) and the episodes (GIF) into videos/.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from PIL import Image, ImageDraw
from tqdm import tqdm

import a3c_gace_vizdoom
import envs
import sac_gace_ur5
from tools.enjoy import check_choice, load_agent, outcome_of


@dataclass
class Args:
    checkpoints: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """of a3c_gace_vizdoom.py or sac_gace_ur5.py; several agents play the same episodes and are shown together"""
    task: Literal["v1", "v2", "v3", "v4", "r1", "r2", "r3"] | None = None
    """task to play; by default the one that the first agent was trained on"""
    split: Literal["seen", "unseen"] = "seen"  # split of v2, v4 and r2
    goal: str | None = None  # this goal only, by name
    episodes: int = 3  # episodes to play: each agent has one row of the sheet for each
    frames: int = 5  # frames of each row
    seed: int = 1  # seed of the first episode
    out: Path | None = None
    """file name without its ending; by default videos/ and the name of the first run with _saliency_ and the split"""


# ------------------------------------------------------------------------------------------------------------ saliency


def gaussian(size, sigma):
    kernel = torch.exp(-0.5 * ((torch.arange(size) - size // 2) / sigma) ** 2)
    return kernel / kernel.sum()


def blurred(image, sigma):
    """(channels, height, width), blurred by a Gaussian."""
    size = 4 * round(sigma) + 1
    kernel = gaussian(size, sigma)
    x = F.pad(image[:, None], [size // 2] * 4, mode="replicate")
    return F.conv2d(F.conv2d(x, kernel.view(1, 1, 1, -1)), kernel.view(1, 1, -1, 1))[:, 0]


def saliency_maps(network, image, patches=14):
    """How far policy and value move when a patch of the image is blurred: two maps, (patches, patches).

    `network` takes images (batch, channels, side, side) to a policy (batch, n) and a value (batch,)."""
    image = torch.as_tensor(image).float()
    side = image.shape[-1]
    centres = (torch.arange(patches) + 0.5) * side / patches - 0.5
    bumps = torch.exp(-0.5 * ((torch.arange(side) - centres[:, None]) / (side / 16)) ** 2)  # (patches, side)
    masks = (bumps[:, None, :, None] * bumps[None, :, None, :]).reshape(-1, 1, side, side)
    perturbed = image + masks * (blurred(image, side / 14) - image)  # all copies of the frame, in one batch
    policies, values = network(torch.cat([image[None], perturbed]))
    policy_map = 0.5 * (policies[1:] - policies[0]).square().sum(-1)  # as in the paper that introduced them
    value_map = 0.5 * (values[1:] - values[0]).square()
    return policy_map.view(patches, patches).numpy(), value_map.view(patches, patches).numpy()


# ------------------------------------------------------------------------------------- where the objects are on screen
DEPTH_LEVEL = 7.2  # map units of one level of the engine's depth, measured


def doom_objects(env):
    """(x, y, radius) of every object on the 160x120 screen, or None where it is out of view, by class."""
    angle, found = np.radians(env.angle), []
    forward, right = np.array([np.cos(angle), np.sin(angle)]), np.array([np.sin(angle), -np.cos(angle)])
    for place in np.array(env.objects):
        offset = place - (env.x, env.y)
        depth = max(offset @ forward, 1)
        x = 80 + 80 * (offset @ right) / depth  # the field of view is 90 degrees
        y = min(60 + 96 * (41 - 10) / depth, 118)  # the eye is 41 above the floor, pixels are 1.2 times as high as wide
        hidden = depth < 8 or not 0 <= x < 160
        hidden = hidden or DEPTH_LEVEL * env.frame[3, int(y), int(x)] < depth - 48  # a wall is nearer
        found.append(None if hidden else (x, y, max(5, 80 * 20 / depth)))
    return found


def ur5_objects(env):
    """(x, y, radius) of every box on the 480x480 picture, by class; None for a colour that is not there."""
    camera = env.data.camera("front")
    focal = 240 / np.tan(np.radians(env.model.camera("front").fovy[0]) / 2)
    found = [None] * len(env.names)
    for place, index in zip(env.box_positions, env.box_classes, strict=True):
        x, y, z = camera.xmat.reshape(3, 3).T @ (place - camera.xpos)  # the camera looks along -z
        found[index] = (240 - focal * x / z, 240 + focal * y / z, 0.075 * focal / -z)
    return found


# ------------------------------------------------------------------------------------------------------------- playing


class DoomAgent:
    """A navigation agent with the memory of its episode."""

    picture_size, actions = (480, 360), ("forward", "left", "right")

    def __init__(self, trained, agent):
        self.rad, self.agent = trained.aux == "rad", agent

    def begin(self):
        self.memory = torch.zeros(2, 1, 256)

    @torch.no_grad()
    def look(self, observation):
        """The action, its name, and both maps."""
        image, goal = observation["image"], torch.tensor([int(observation["goal"])])

        def network(images):
            memory = self.memory.expand(-1, len(images), -1)
            images = a3c_gace_vizdoom.crop(images) if self.rad else images
            return self.agent(images, goal.expand(len(images)), memory)[:3]

        maps = saliency_maps(lambda images: network(images)[:2], image)
        logits, _, self.memory = network(torch.from_numpy(image)[None])
        action = int(logits.argmax())
        return action, self.actions[action], maps

    def picture(self, env):
        return Image.fromarray(env.frame[:3].astype(np.uint8).transpose(1, 2, 0)).resize(self.picture_size)

    def objects(self, env):
        return [place and tuple(3 * number for number in place) for place in doom_objects(env)]


class UR5Agent:
    """A manipulation agent. Its policy is the action, its value the critics' value of that action."""

    picture_size = (480, 480)

    def __init__(self, trained, agent):
        self.agent = agent

    def begin(self):
        pass

    @torch.no_grad()
    def look(self, observation):
        image, goal = torch.from_numpy(observation["image"]), torch.tensor([int(observation["goal"])])
        action = torch.from_numpy(self.agent.act(image[None].numpy(), goal, explore=False))

        def network(images):
            goals = goal.expand(len(images))
            images = sac_gace_ur5.crop(images) if self.agent.curl else images
            features = self.agent.feature_extractor(images.contiguous(memory_format=torch.channels_last))
            query = self.agent.goal_discriminator[:2](features)
            actions = self.agent.actor(features, query, goals, explore=False)[0]
            values = self.agent.critic(features, query, goals, action.expand(len(images), -1))
            return actions, values.min(0).values

        maps = saliency_maps(network, image)
        return action[0].numpy(), "", maps

    def picture(self, env):
        return Image.fromarray(env.render()[:, :480])

    objects = staticmethod(ur5_objects)


def draw(picture, maps, scales, objects, goal, caption):
    """The frame with both maps over it, the objects circled, and a caption."""
    overlay = []
    for saliency, scale in zip(maps, scales, strict=True):
        strength = np.clip(saliency / scale, 0, 1) * 255
        smooth = Image.fromarray(strength.astype(np.uint8)).resize(picture.size, Image.Resampling.BICUBIC)
        overlay.append(np.asarray(smooth, np.float32) / 255)
    policy, value = overlay
    pixels = np.asarray(picture, np.float32) * (1 - 0.75 * np.maximum(policy, value))[..., None]
    pixels[..., 2] += 0.75 * 255 * policy
    pixels[..., 0] += 0.75 * 255 * value
    drawn = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(drawn)
    for index, place in enumerate(objects):
        if place:
            x, y, radius = place
            colour = "yellow" if index == goal else "lime"
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), outline=colour, width=4)
    pen.text((10, 6), caption, fill="white", font_size=22, stroke_width=2, stroke_fill="black")
    return drawn


def play(args, path, script, trained, agent):
    """Plays the episodes with one agent. Returns its drawn frames, a list for each episode."""
    player = (DoomAgent if script is a3c_gace_vizdoom else UR5Agent)(trained, agent)
    env = gym.make(f"gace/{args.task.upper()}-v0", split=args.split, render_mode="rgb_array").unwrapped
    options = {"goal": args.goal} if args.goal else None
    name = f"{script.algorithm(trained)}\n" if len(args.checkpoints) > 1 else ""
    episodes = []
    for index in tqdm(range(args.episodes), path.name, unit=" episodes"):
        observation, info = env.reset(seed=args.seed + index, options=options)
        player.begin()
        over, steps = False, []
        while not over:
            picture, objects = player.picture(env), player.objects(env)
            action, what, maps = player.look(observation)
            steps.append((picture, maps, objects, int(observation["goal"]), f"{name}{info['instruction']}   {what}"))
            observation, _, terminated, truncated, result = env.step(action)
            over = terminated or truncated
        *last, words = steps[-1]
        steps[-1] = (*last, f"{words}   {outcome_of(result, terminated)}")
        episodes.append(steps)
    env.close()
    # One scale for all frames of an agent, so that what moves it little looks like little.
    scales = [
        np.quantile([step[1][kind].max() for steps in episodes for step in steps], 0.9) + 1e-12 for kind in (0, 1)
    ]
    return [[draw(picture, maps, scales, *rest) for picture, maps, *rest in steps] for steps in episodes]


def paste(rows):
    """One picture of rows of pictures, with gaps between them."""
    (width, height), gap = rows[0][0].size, 4
    columns = max(len(row) for row in rows)
    sheet = Image.new("RGB", (columns * (width + gap) - gap, len(rows) * (height + gap) - gap), "white")
    for r, row in enumerate(rows):
        for c, picture in enumerate(row):
            sheet.paste(picture, (c * (width + gap), r * (height + gap)))
    return sheet


def main():
    args = tyro.cli(Args, description=__doc__)
    if not args.checkpoints:
        raise SystemExit("give one checkpoint or more, for example runs/RUN/checkpoint.pt")
    agents = [load_agent(path) for path in args.checkpoints]
    args.task = args.task or agents[0][2].task
    args.goal = args.goal or getattr(agents[0][2], "fixed_goal", None)
    for _, _, trained, _ in agents:
        if args.task[0] != trained.task[0]:
            family = ", ".join(envs.V_TASKS if trained.task in envs.V_TASKS else envs.R_TASKS)
            raise SystemExit(f"an agent of {trained.task} cannot play {args.task}: use one of {family}")
        if len(envs.goals_of(args.task)) > len(envs.goals_of(trained.task)):
            raise SystemExit(f"an agent of {trained.task} does not know the goals of {args.task}")
    check_choice(args.task, args.split, args.goal)
    if min(args.episodes, args.frames) < 1:
        raise SystemExit("--episodes and --frames must be at least 1")

    played = [
        play(args, path, script, trained, agent)
        for path, (script, _, trained, agent) in zip(args.checkpoints, agents, strict=True)
    ]
    rows, film = [], []
    for side_by_side in zip(*played, strict=True):  # the same episode, by every agent
        for frames in side_by_side:
            shown = np.unique(np.linspace(0, len(frames) - 1, args.frames).round().astype(int))
            rows.append([frames[index] for index in shown])
        for index in range(max(map(len, side_by_side))):  # an agent that is done shows its last frame
            film.append(paste([[frames[min(index, len(frames) - 1)] for frames in side_by_side]]))
    first = args.checkpoints[0]
    run = first.parent.name if first.stem == "checkpoint" else first.stem
    out = args.out or Path("videos", f"{run}_saliency_{args.split}")
    png, gif = out.with_name(out.name + ".png"), out.with_name(out.name + ".gif")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        paste(rows).save(png)
        film[0].save(gif, save_all=True, append_images=film[1:], duration=250, loop=0)
    except OSError as error:
        raise SystemExit(f"cannot write {png} and {gif}: {error.strerror}") from None
    print(f"wrote {png} and {gif}")


if __name__ == "__main__":
    main()

"""SAC with goal-aware cross-entropy (GACE) and goal-discriminative attention networks (GDAN) on R1 to R3.

Paper: "Goal-Aware Cross-Entropy for Multi-Target Reinforcement Learning" (NeurIPS 2021), Algorithm 1.

    python sac_gace_ur5.py --task r2 --gdan               # train SAC+GACE&GDAN
    python sac_gace_ur5.py --task r1 --aux none           # train a baseline: none, ae or curl
    python sac_gace_ur5.py --resume runs/RUN              # go on after Ctrl-C or a crash
    python -m tools.enjoy runs/RUN/checkpoint.pt --video  # evaluate and film a trained agent

One process steps the environments in turn, stores every frame once in a file, and learns from random batches.
"""

import copy
import ctypes
import fcntl
import functools
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import envs

VERSION = 5  # raised by every change that alters what is learned; runs of two versions are never averaged


@dataclass
class Args:  # the defaults are ours; where the paper or SAC has another value, it stands in brackets
    # Task and method
    task: Literal["r1", "r2", "r3"] = "r1"  # three boxes (r1), random checkered backgrounds (r2), five colours (r3)
    gdan: bool = False  # use the goal-discriminative attention networks (needs --aux gace)
    aux: Literal["gace", "ae", "curl", "none"] = "gace"  # auxiliary task; ae: autoencoder; none: plain SAC
    seed: int = 1  # seed of the initial parameters and of all episodes
    total_updates: int = 10_000  # updates
    paper: bool = False  # use the settings in PAPER; single flags still override them
    exp_name: str | None = None  # algorithm in the run's name, for example sac+gace+mine; default: from the flags
    # The paper's hyperparameters
    warmup: int = 50_000  # environment steps with a random policy before the first update (paper: 10,000)
    epsilon_n: float = 0.05  # probability of storing the last state of an episode that timed out, as a negative
    tau: float = 0.005  # target smoothing coefficient
    batch_size: int = 128  # transitions in one SAC loss
    goal_batch_size: int = 128  # goal states in one GACE loss
    hidden_size: int = 256  # features of the encoder, and units of every hidden layer (an even number)
    target_update_interval: int = 1  # updates between two soft updates of the target networks
    replay_size: int = 300_000  # frames to keep, on disk, 21 KB each; the oldest are overwritten (paper: 1,000,000)
    goal_storage_size: int = 500_000  # goal states to keep, on disk; the oldest are overwritten first
    eta: float = 0.02  # coefficient of the GACE loss (Eq. 9); at first, its gradient is about the critic's (paper: 0.5)
    gamma: float = 0.99  # discount
    learning_rate: float = 3e-4  # learning rate of Adam (paper: 7e-5)
    entropy_coef: float = 0.01  # temperature of the gaussian policy
    # What the paper leaves out
    policy: Literal["deterministic", "gaussian"] = "deterministic"  # tanh(mean) plus clipped noise; or SAC's gaussian
    exploration_noise: float = 0.1  # standard deviation of the first environment's noise; the last one has 8 times it
    action_penalty: float = 1e-3  # penalty on squared actions before the tanh (SAC: 0, with which actions saturate)
    n_step: int = 10  # rewards summed in the critic's target before bootstrapping (SAC: 1)
    num_envs: int = 8  # environments that act in one batch (Algorithm 1: 1)
    env_steps_per_update: int = 32  # environment steps per update, at least --num-envs (SAC: 1)
    ae_coef: float = 100.0  # coefficient of the AE loss; its gradient on the encoder is about the critic loss's
    curl_coef: float = 0.02  # coefficient of the CURL loss, chosen in the same way
    augment: bool = True  # mirror and shift goal states at random (paper: no)
    concat_query: bool = False  # ablation: concatenate GDAN's query with the features, no attention (needs --gdan)
    fixed_goal: str | None = None  # ablation: a single-target policy, for this goal only: red, green, blue ...
    # Evaluation, logging, resuming
    eval_every: int = 2_500  # updates between two evaluations
    episodes: int = 100  # episodes of an evaluation, on each split
    accuracy_states: int = 100  # states of a random policy, per split, to measure the discriminator's accuracy on
    checkpoint_every: float = 60.0  # seconds between two checkpoints
    runs: str = "runs"  # parent folder of the run folder
    resume: Path | None = None  # go on with the run in this folder; only --total-updates may be given with it
    track: bool = False  # also log to Weights and Biases (needs `pip install wandb`)
    wandb_project_name: str = "gace"  # project in Weights and Biases
    wandb_entity: str | None = None  # team or user in Weights and Biases
    cuda: bool = True  # use a GPU if there is one
    version: tyro.conf.Suppress[int] = VERSION  # stored with the settings

    def __post_init__(self):
        for name, value in vars(self).items():
            low = 0 if isinstance(value, float) or name == "seed" else 1
            if type(value) in (int, float) and not low <= value < math.inf:
                raise SystemExit(f"--{name.replace('_', '-')} must be {low} or more, not {value}")
        if (self.gdan and self.aux != "gace") or (self.concat_query and not self.gdan):
            raise SystemExit("--gdan needs --aux gace, and --concat-query needs --gdan")
        if self.fixed_goal not in (None, *(goals := envs.goals_of(self.task))):
            raise SystemExit(f"unknown --fixed-goal {self.fixed_goal}; use one of {', '.join(goals)}")
        self.env_steps_per_update = max(self.env_steps_per_update, self.num_envs)


PAPER = {"paper": True, "warmup": 10_000, "replay_size": 1_000_000, "learning_rate": 7e-5, "n_step": 1}
PAPER |= {"eta": 0.5, "action_penalty": 0.0, "augment": False, "num_envs": 1, "env_steps_per_update": 1}


def make_env(task, split="seen"):
    """Makes the environment. To train on another one, see "Copying a script" in the README."""
    return gym.make(f"gace/{task.upper()}-v0", split=split)


@functools.cache
def sizes(task):
    """Returns the shape of an image, the number of goals and the length of an action."""
    env = make_env(task)
    return env.observation_space["image"].shape, int(env.observation_space["goal"].n), env.action_space.shape[0]


# ------------------------------------------------------------------------------------------------------------ networks
class FeatureExtractor(nn.Module):
    """sigma: encodes an image as e (Eq. 1 and 6), with the convolutions of the navigation model."""

    def __init__(self, image_shape, hidden_size):
        super().__init__()
        layers = []
        for i, o in itertools.pairwise((image_shape[0], 32, 32, 64, 64)):
            # without biases: the normalisation would take them away again
            layers += [nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]
        height, width = (math.ceil(side / 16) for side in image_shape[1:])  # after four strides of 2
        # SAC+AE has LayerNorm and tanh here too. Without them, the features drown out the action in the critic.
        layers += [nn.Flatten(), nn.Linear(64 * height * width, hidden_size), nn.LayerNorm(hidden_size), nn.Tanh()]
        self.layers = nn.Sequential(*layers)

    def forward(self, images):
        # Centred: otherwise Adam moves the means of the first layer faster than the running statistics follow.
        return self.layers(images / 255 - 0.5)  # (batch, 3, 84, 84) to (batch, 256)


class GoalConditioning(nn.Module):
    """The first part of f (Eq. 2): gated attention and GDAN. Actor and critic each have their own."""

    def __init__(self, args, goals):
        super().__init__()
        self.concat_query, self.attention = args.concat_query, args.gdan and not args.concat_query
        size, width = args.hidden_size, args.hidden_size * (2 if args.concat_query else 1)
        self.embedding = nn.Embedding(goals, 25)
        self.instruction = nn.Linear(25, width)
        self.linear = nn.Linear(2 * width, size)
        if self.attention:
            self.w_q = nn.Linear(size, size // 2, bias=False)
            self.w_k = nn.Linear(size // 2, size // 2, bias=False)
        # Not in the paper. With this layer, the critic's heads read 256 features beside the action, not 512 or more.
        self.combine = nn.Linear(width + size + (size // 2 if self.attention else 0), size)

    def forward(self, features, query, goals):
        if self.concat_query:
            features = torch.cat([features, query], -1)  # [e_t, q], the paper's ablation
        gate = torch.sigmoid(self.instruction(self.embedding(goals)))
        gated = features * gate  # M: the instruction selects features
        encoding = F.relu(self.linear(torch.cat([gated, gate], -1)))  # e^1: the navigation model has an LSTM here
        x = torch.cat([gated, encoding], -1)
        if self.attention:
            key, value = encoding.chunk(2, -1)
            attention = torch.tanh(self.w_q(query) + self.w_k(key))  # u (Eq. 10)
            attended = value * attention  # h (Eq. 11)
            # Section 3.4 concatenates h with M, Appendix B.4 with e^1. We use both.
            x = torch.cat([x, attended], -1)
        return F.relu(self.combine(x))  # (batch, 256)


def mlp(inputs, size, outputs):
    return nn.Sequential(nn.Linear(inputs, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, outputs))


class Actor(nn.Module):
    """The policy: tanh(mean) plus noise ("deterministic", as we read the paper) or SAC's squashed Gaussian."""

    def __init__(self, args, goals, actions):
        super().__init__()
        self.gaussian, self.actions = args.policy == "gaussian", actions
        self.conditioning = GoalConditioning(args, goals)
        self.head = mlp(args.hidden_size, args.hidden_size, actions * (2 if self.gaussian else 1))

    def forward(self, features, query, goals, explore=True, noise=0.0):
        """Returns actions (batch, 6), log-probabilities (0 if deterministic), and the means before the tanh."""
        mean, *log_std = self.head(self.conditioning(features, query, goals)).split(self.actions, -1)
        if not explore or not self.gaussian:
            # clipped at 2.5 standard deviations, as in TD3 (noise 0.2, clipped at 0.5)
            added = noise * torch.randn_like(mean).clamp(-2.5, 2.5) if explore else 0.0
            return (torch.tanh(mean) + added).clamp(-1, 1), torch.zeros_like(mean[:, 0]), mean
        normal = torch.distributions.Normal(mean, log_std[0].clamp(-10, 2).exp())
        before_tanh = normal.rsample()
        log_probs = normal.log_prob(before_tanh) - 2 * (np.log(2) - before_tanh - F.softplus(-2 * before_tanh))
        return torch.tanh(before_tanh), log_probs.sum(-1), mean


class Critic(nn.Module):
    """Two Q-functions with a common first part (SAC: two networks). SAC uses the smaller value."""

    def __init__(self, args, goals, actions):
        super().__init__()
        self.conditioning = GoalConditioning(args, goals)
        self.heads = nn.ModuleList(mlp(args.hidden_size + actions, args.hidden_size, 1) for _ in range(2))

    def forward(self, features, query, goals, actions):
        x = torch.cat([self.conditioning(features, query, goals), actions], -1)
        return torch.stack([head(x).squeeze(-1) for head in self.heads])  # (2, batch)


def make_decoder(image_shape, hidden_size):
    """The head of the SAC+AE baseline: decodes features to an image, whose sides are multiples of 16."""
    small = 64, math.ceil(image_shape[1] / 16), math.ceil(image_shape[2] / 16)
    layers = [nn.Linear(hidden_size, math.prod(small)), nn.Unflatten(1, small)]
    for i, o in itertools.pairwise((64, 64, 32, 32, image_shape[0])):  # each layer doubles the size
        layers += [nn.ReLU(), nn.ConvTranspose2d(i, o, 3, 2, 1, output_padding=1)]
    return nn.Sequential(*layers)


class Agent(nn.Module):
    """The feature extractor sigma, the goal-discriminator d and the actor-critic f."""

    def __init__(self, args):
        super().__init__()
        size, (image_shape, goals, actions) = args.hidden_size, sizes(args.task)
        self.curl, self.noise = args.aux == "curl", args.exploration_noise
        seen_shape = crop(torch.zeros(image_shape)).shape if self.curl else image_shape
        self.feature_extractor = FeatureExtractor(seen_shape, size)
        self.goal_discriminator = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, goals + 1))
        self.actor, self.critic = Actor(args, goals, actions), Critic(args, goals, actions)
        self.decoder = make_decoder(image_shape, size) if args.aux == "ae" else None
        # CURL starts from torch.rand with 50 features. Ours are more, so we scale it to keep the logits as large.
        self.contrast = nn.Parameter(torch.rand(size, size) * 50 / size) if self.curl else None
        self.to(memory_format=torch.channels_last)  # twice as fast on a CPU

    @torch.no_grad()
    def act(self, images, goals, explore):
        """Chooses actions from NumPy images (envs, 3, 84, 84) and goals (envs,)."""
        device = self.goal_discriminator[0].weight.device
        images = torch.from_numpy(images).to(device, memory_format=torch.channels_last)
        features = self.feature_extractor(crop(images) if self.curl else images)
        goals = torch.as_tensor(goals, device=device)
        # Each environment has its own noise: large noise finds other boxes, small noise stays close to the policy.
        noise = self.noise * torch.logspace(0, 3, len(images), base=2, device=device)[:, None]
        return self.actor(features, self.goal_discriminator[:2](features), goals, explore, noise)[0].cpu().numpy()


# ------------------------------------------------------------------------------------- replay buffer and goal storage
def disk_array(path, dtype, length, count):
    """Returns an array in a file. It grows if a resumed run goes on for more updates, and the ring is not full yet."""
    size = length * np.dtype(dtype).itemsize
    with open(path, "r+b" if count else "wb") as file:
        old_size = file.seek(0, os.SEEK_END)
        if size - old_size > shutil.disk_usage(path.parent).free:  # posix_fallocate fills the disk before it fails
            raise SystemExit(f"no room for {path} ({size / 1e9:.1f} GB): use a smaller --replay-size or goal storage")
        if old_size < size and count * np.dtype(dtype).itemsize <= old_size:
            os.posix_fallocate(file.fileno(), 0, size)
    return np.memmap(path, dtype, "r+")


class ReplayBuffer:
    """Frames and steps of the environments, which take turns: the next frame of a step is `num_envs` places later.

    Every frame is stored once. The last frame of an episode has no usable step."""

    def __init__(self, folder, image_shape, actions, capacity, num_envs, count=0):
        channels, height, width = image_shape
        frame = ("u1", (height, width, channels))  # channels last, as the encoder reads it
        step = [("action", "f4", actions), ("reward", "f4"), ("goal", "u1"), ("terminal", "?"), ("usable", "?")]
        length = max(capacity // num_envs, 4) * num_envs
        self.frames = disk_array(folder / "replay_frames.bin", frame, length, count)
        self.steps = disk_array(folder / "replay_steps.bin", step, length, count)
        self.capacity, self.num_envs, self.count = len(self.steps), num_envs, count  # count: frames ever added

    def add(self, images, steps):
        """Adds one frame (3, 84, 84) and one step of each environment."""
        slots = slice(self.count % self.capacity, self.count % self.capacity + self.num_envs)
        self.frames[slots], self.steps[slots] = images.transpose(0, 2, 3, 1), steps
        self.count += self.num_envs

    def sample(self, batch_size, rng, n_step, gamma):
        """Draws random steps. Returns images, actions, n-step returns, the images after them, discounts and goals."""
        chosen = np.empty(0, np.int64)
        end = self.count - self.num_envs  # the newest frames have no next frame yet
        while len(chosen) < batch_size:
            drawn = rng.integers(max(0, self.count - self.capacity), end, 2 * batch_size)
            chosen = np.concatenate([chosen, drawn[self.steps["usable"][drawn % self.capacity]]])
        chosen = chosen[:batch_size]
        following, returns, discounts = chosen.copy(), np.zeros(batch_size, "f4"), np.ones(batch_size, "f4")
        for _ in range(n_step):  # or fewer, where the episode ends
            steps = self.steps[following % self.capacity]
            goes_on = steps["usable"] & (following < end)
            returns += np.where(goes_on, discounts * steps["reward"], 0)
            discounts *= np.where(goes_on, gamma * ~steps["terminal"], 1)  # a time-out is bootstrapped
            following += goes_on * self.num_envs
        steps = self.steps[chosen % self.capacity]
        images, next_images = (self.frames[i % self.capacity].transpose(0, 3, 1, 2) for i in (chosen, following))
        batch = images, steps["action"].copy(), returns, next_images, discounts, steps["goal"].astype("i8")
        return [torch.from_numpy(array) for array in batch]


class GoalStorage:  # goal states and their labels
    def __init__(self, folder, image_shape, capacity, count=0):
        channels, height, width = image_shape
        record = [("image", "u1", (height, width, channels)), ("label", "u1")]
        self.records = disk_array(folder / "goal_states.bin", record, capacity, count)
        self.count = count  # goal states ever added

    def add(self, image, label):
        self.records[self.count % len(self.records)] = image.transpose(1, 2, 0), label
        self.count += 1

    def sample(self, batch_size, rng):
        records = self.records[rng.integers(min(self.count, len(self.records)), size=batch_size)]
        return torch.from_numpy(records["image"].transpose(0, 3, 1, 2)), torch.from_numpy(records["label"].astype("i8"))


def augmented(images, rng, shift=4):
    """Mirrors images left to right with probability 0.5 and shifts them by up to 4 pixels; the edges are repeated."""
    old = images.permute(0, 2, 3, 1).numpy()
    padded, new = np.pad(old, ((0, 0), (shift, shift), (shift, shift), (0, 0)), "edge"), np.empty_like(old)
    height, width = old.shape[1:3]
    for i, mirrored in enumerate(rng.random(len(old)) < 0.5):
        y, x = rng.integers(2 * shift + 1, size=2)
        new[i] = padded[i, y : y + height, x : x + width][:, :: -1 if mirrored else 1]
    return torch.from_numpy(new).permute(0, 3, 1, 2)


# -------------------------------------------------------------------------------------------------------------- losses
def critic_target(returns, discounts, next_values, next_log_probs, entropy_coef):
    """n-step return plus the discounted soft value of the state after it."""
    return returns + discounts * (next_values - entropy_coef * next_log_probs)


def critic_loss(values, targets):
    """L_RL: the squared error of both Q-functions (2, batch). (Eq. 3 to 5 are the losses of A3C.)"""
    return (values - targets).square().mean(-1).sum()


def actor_loss(values, log_probs, means, entropy_coef, action_penalty):
    """Maximises the smaller Q-value. The penalty on the means before the tanh keeps actions off their limits."""
    return (entropy_coef * log_probs - values.min(0).values + action_penalty * means.square().sum(-1)).mean()


def gace_loss(goal_logits, goal_labels):
    """Goal-aware cross-entropy (Eq. 8), as a mean over the batch; the paper writes a sum, the authors use a mean."""
    return F.cross_entropy(goal_logits, goal_labels)


def ae_loss(decoded, images, features):
    """The SAC+AE baseline: reconstruction error and a small penalty on the features."""
    decoded = decoded[..., : images.shape[-2], : images.shape[-1]]
    return F.mse_loss(decoded, images / 255) + 1e-6 * 0.5 * features.square().sum(-1).mean()


def curl_loss(anchors, keys, contrast):
    """The SAC+CURL baseline: each crop must recognise the other crop of its own image within the batch."""
    return F.cross_entropy(anchors @ contrast @ keys.T, torch.arange(len(keys), device=keys.device))


def crop(images, rng=None):
    """Crops 6/7 of height and width (CURL: 84 of 100 pixels), at random places, or without `rng` in the middle."""
    (height, width), (h, w) = images.shape[-2:], (side * 6 // 7 for side in images.shape[-2:])
    if rng is None:
        return images[..., (height - h) // 2 :, (width - w) // 2 :][..., :h, :w]
    corners = rng.integers((height - h + 1, width - w + 1), size=(len(images), 2)).tolist()
    return torch.stack([i[:, y : y + h, x : x + w] for i, (y, x) in zip(images, corners, strict=True)])


# ------------------------------------------------------------------------------------------------------------- playing
class Player:
    """One environment and its current episode."""

    def __init__(self, args, split="seen"):
        self.env, self.fixed_goal = make_env(args.task, split), args.fixed_goal
        _, self.num_goals, self.num_actions = sizes(args.task)

    def begin(self, seed, goal=None, blind=False, actions=()):
        """Begins an episode and replays these actions."""
        self.seed, goal = seed, self.fixed_goal if goal is None else goal
        observation, _ = self.env.reset(seed=seed, options={"goal": goal, "blind": blind})
        self.image, self.goal = observation["image"], int(observation["goal"])
        self.actions, self.rewards, self.terminated, self.over = [], [], False, False
        for action in actions:
            self.step(np.array(action, np.float32))

    def step(self, action):
        observation, reward, self.terminated, truncated, self.info = self.env.step(action)
        self.image, self.over = observation["image"], self.terminated or truncated
        self.actions.append(action.tolist())
        self.rewards.append(reward)

    def goal_state(self):
        """Auto-labelling: returns the state to store and its label, or None if the episode ended on another box."""
        # This is the state in which the goal is reached, as in Section 3.2. Algorithm 1 stores the state before it.
        if self.info["is_success"]:
            return self.image, self.goal  # labelled with its instruction
        return None if self.terminated else (self.image, self.num_goals)  # a time-out is a negative (Appendix B.1)


# ------------------------------------------------------------------------------------------------------------ learning
def learn(args, agent, target, critic_optimizer, actor_optimizer, replay, storage, rng):
    """One update of critic, encoder and discriminator (Eq. 9), then one of the actor. Returns the scalars to log."""
    device = agent.goal_discriminator[0].weight.device
    batch = [tensor.to(device) for tensor in replay.sample(args.batch_size, rng, args.n_step, args.gamma)]
    images, actions, returns, next_images, discounts, goals = batch
    if args.aux == "curl":
        other_images, images, next_images = crop(images, rng), crop(images, rng), crop(next_images, rng)

    with torch.no_grad():
        next_features = target.feature_extractor(next_images)
        next_query = target.goal_discriminator[:2](next_features)
        # Unlike in SAC, the next action comes from a target actor, which reads the target encoder's features. So the
        # next images pass through one encoder only. Noise on the next action smooths the target, as in TD3.
        next_actions, next_log_probs, _ = target.actor(next_features, next_query, goals, noise=0.2)
        next_values = target.critic(next_features, next_query, goals, next_actions).min(0).values
        targets = critic_target(returns, discounts, next_values, next_log_probs, args.entropy_coef)

    inputs = images  # one pass of the encoder, and one batch normalisation, for both batches
    if args.aux == "gace":
        goal_images, goal_labels = storage.sample(args.goal_batch_size, rng)
        goal_images = (augmented(goal_images, rng) if args.augment else goal_images).to(device)
        inputs, goal_labels = torch.cat([images, goal_images]), goal_labels.to(device)
    agent.train()
    encoded = agent.feature_extractor(inputs)
    agent.eval()
    features, goal_features = encoded[: args.batch_size], encoded[args.batch_size :]
    # Not detached: the critic loss trains it too, as in the authors' code. Section 3.3 can be read otherwise.
    query = agent.goal_discriminator[:2](features)
    values = agent.critic(features, query, goals, actions)
    loss = critic_loss(values, targets)
    report = {"critic_loss": loss, "values": values.mean()}
    if args.aux == "gace":
        goal_logits = agent.goal_discriminator(goal_features)  # Eq. 7
        report["gace_loss"] = gace_loss(goal_logits, goal_labels)
        report["batch_accuracy"] = (goal_logits.argmax(-1) == goal_labels).float().mean()
        loss = loss + args.eta * report["gace_loss"]  # Eq. 9
    elif args.aux == "ae":
        report["ae_loss"] = ae_loss(agent.decoder(features), images, features)
        loss = loss + args.ae_coef * report["ae_loss"]
    elif args.aux == "curl":
        report["curl_loss"] = curl_loss(features, target.feature_extractor(other_images), agent.contrast)
        loss = loss + args.curl_coef * report["curl_loss"]
    critic_optimizer.zero_grad()
    loss.backward()
    critic_optimizer.step()

    features, query = features.detach(), query.detach()  # the actor loss trains neither encoder nor discriminator ...
    agent.critic.requires_grad_(False)  # ... nor the critic
    new_actions, log_probs, means = agent.actor(features, query, goals, explore=args.policy == "gaussian")
    new_values = agent.critic(features, query, goals, new_actions)
    loss = actor_loss(new_values, log_probs, means, args.entropy_coef, args.action_penalty)
    actor_optimizer.zero_grad()
    loss.backward()
    actor_optimizer.step()
    agent.critic.requires_grad_(True)
    if not torch.isfinite(sum(tensor.sum() for tensor in agent.state_dict().values())):
        raise FloatingPointError("a parameter is not finite")
    report |= {"actor_loss": loss, "action_size": new_actions.abs().mean()}
    return {f"losses/{name}": float(number.detach()) for name, number in report.items()}


@torch.no_grad()
def soft_update(target, agent, tau):
    """Moves the target's parameters towards the agent's, and copies its batch statistics, as Stable-Baselines3 does."""
    for old, new in zip(target.parameters(), agent.parameters(), strict=True):
        old.lerp_(new, tau)
    for old, new in zip(target.buffers(), agent.buffers(), strict=True):
        old.copy_(new)


# ---------------------------------------------------------------------------------------------------------- evaluation
METRICS = "update env_steps seconds split success_ratio discriminator_accuracy episode_length episode_return".split()
METRICS += ["training_success_ratio"]
CHARTS = "success_ratio nongoal_ratio episodic_length episodic_return env_steps SPS".split()
BAR = {"dynamic_ncols": True, "mininterval": 0.5}


def evaluation_episodes(args, agent, split, goal=None):
    """Plays `args.episodes` episodes without exploration noise, the same ones every time. Yields each at its end."""
    player = Player(args, split)
    for index in range(args.episodes):
        player.begin(2**32 * args.seed + 2**31 + index, goal)  # training counts its seeds from 2**32 * args.seed
        while not player.over:
            player.step(agent.act(player.image[None], [player.goal], explore=False)[0])
        yield player
    player.env.close()


@torch.no_grad()
def evaluate(args, agent, split, goal_states):
    """Returns the metrics of one split."""
    episodes = evaluation_episodes(args, agent, split)
    bar = tqdm(episodes, f"evaluating {split}", args.episodes, unit=" episodes", leave=False, **BAR)
    results = [(player.info["is_success"], len(player.rewards), sum(player.rewards)) for player in bar]
    success, length, total = np.mean(results, 0).tolist()
    accuracy = math.nan
    if goal_states:
        states, labels = (tensor.to(agent.goal_discriminator[0].weight.device) for tensor in goal_states[split])
        logits = agent.goal_discriminator(agent.feature_extractor(states))
        accuracy = (logits.argmax(-1) == labels).float().mean().item()
    return dict(zip(METRICS[3:8], (split, success, accuracy, length, total), strict=True))


def collect_goal_states(args, split):
    """States of a random policy, equally many of each class, negatives included. They are the same in every run."""
    player, seeds, states = Player(args, split), itertools.count(3 * 2**30), []
    labels = torch.arange(args.accuracy_states) % (player.num_goals + 1)
    for label in tqdm(labels.tolist(), f"states for the accuracy, {split}", leave=False, **BAR):
        found = None
        while not found or found[1] != label:
            rng = np.random.default_rng(seed := next(seeds))
            player.begin(seed, label % player.num_goals, blind=True)
            while not player.over:
                player.step(rng.uniform(-1, 1, player.num_actions).astype(np.float32))
            found = player.goal_state()
        player.begin(seed, player.goal, actions=player.actions)  # again, with images
        states.append(player.image)
    player.env.close()
    return torch.from_numpy(np.stack(states)), labels


# ------------------------------------------------------------------------------------------------------------ training
def algorithm(args):
    parts = ["sac", args.aux != "none" and args.aux, args.gdan and "gdan", args.concat_query and "concat"]
    parts += [args.fixed_goal, args.policy == "gaussian" and "gaussian", args.paper and "paper"]
    return args.exp_name or "+".join(filter(None, parts))


def load_checkpoint(path):
    """Returns a checkpoint, its Args and its agent."""
    if not Path(path).is_file():
        raise SystemExit(f"{path} is not a file")
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    args = Args(**({"version": 1} | checkpoint["args"]))
    agent = Agent(args).eval()
    agent.load_state_dict(checkpoint["agent"])  # converts the 16-bit agents in results/
    return checkpoint, args, agent


def train(args, run_folder, agent, run):
    """Algorithm 1, until the updates are done or a signal comes. `run` is the checkpoint of a resumed run, or empty."""
    agent.to("cuda" if args.cuda and torch.cuda.is_available() else "cpu").eval()
    target, rng = copy.deepcopy(agent).requires_grad_(False), np.random.default_rng(args.seed)
    # One Adam for the actor, one for everything else. (The authors of SAC+AE and CURL have a third for their loss.)
    groups = [{"params": [p for name, p in agent.named_parameters() if not name.startswith(("actor.", "decoder."))]}]
    if agent.decoder:
        groups.append({"params": agent.decoder.parameters(), "weight_decay": 1e-7})  # as in SAC+AE
    critic_optimizer = torch.optim.Adam(groups, args.learning_rate, fused=True)
    actor_optimizer = torch.optim.Adam(agent.actor.parameters(), args.learning_rate, fused=True)
    parts = {"target": target, "critic_optimizer": critic_optimizer, "actor_optimizer": actor_optimizer, "agent": agent}
    if run:
        for name, part in parts.items():
            part.load_state_dict(run[name])
        rng.bit_generator.state = json.loads(run["numpy_random"])
        torch.set_rng_state(run["torch_random"])
    else:
        run = {"counters": {"updates": 0, "env_steps": 0, "episodes": args.num_envs, "replay": 0, "goals": 0}}
        run["under_way"] = [(2**32 * args.seed + i, []) for i in range(args.num_envs)]  # seed and actions
        run |= {"recent": [], "goal_states": {}, "rows": [], "seconds": 0.0}
    counters, rows, splits = run["counters"], run["rows"], envs.splits_of(args.task)  # rows of metrics.csv
    started, recent = time.monotonic() - run["seconds"], deque(run["recent"], maxlen=200)  # the last episodes

    # Room for all frames and goal states, if episodes have three steps or more on average (one more frame each)
    image_shape, _, num_actions = sizes(args.task)
    steps = args.warmup + args.total_updates * args.env_steps_per_update
    frames, goal_states = min(args.replay_size, steps * 4 // 3), min(args.goal_storage_size, 1 + steps // 3)
    replay = ReplayBuffer(run_folder, image_shape, num_actions, frames, args.num_envs, counters["replay"])
    storage = GoalStorage(run_folder, image_shape, goal_states if args.aux == "gace" else 1, counters["goals"])
    players = [Player(args) for _ in range(args.num_envs)]
    for player, (seed, actions) in zip(players, run["under_way"], strict=True):
        player.begin(seed, actions=actions)
    writer = SummaryWriter(run_folder, purge_step=counters["updates"] + 1)
    writer.add_text("hyperparameters", "|name|value|\n|-|-|\n" + "".join(f"|{k}|{v}|\n" for k, v in vars(args).items()))

    def save():
        """Writes checkpoint.pt, which is replaced as a whole or not at all, and metrics.csv."""
        counters.update(replay=replay.count, goals=storage.count)
        run.update({name: part.state_dict() for name, part in parts.items()}, args=asdict(args), recent=list(recent))
        run.update(numpy_random=json.dumps(rng.bit_generator.state), torch_random=torch.get_rng_state())
        run.update(under_way=[(p.seed, p.actions) for p in players], seconds=time.monotonic() - started)
        torch.save(run, run_folder / "checkpoint.tmp")
        os.replace(run_folder / "checkpoint.tmp", run_folder / "checkpoint.pt")
        lines = [METRICS, *([row[name] for name in METRICS] for row in rows)]
        (run_folder / "metrics.csv").write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
        return time.monotonic()

    last_save, signals = save(), []
    if args.aux == "gace" and not run["goal_states"]:  # to measure the discriminator's accuracy, by split
        run["goal_states"] = {split: collect_goal_states(args, split) for split in splits}
    for number in (signal.SIGINT, signal.SIGTERM):  # the loop stops between two updates, so that it resumes exactly
        signal.signal(number, lambda received, frame: signals.append(received))
    bar = tqdm(total=args.total_updates, initial=counters["updates"], unit=" updates", **BAR)
    while counters["updates"] < args.total_updates and not signals:
        # Act and store. The paper's warm-up of 10,000 has no unit; we count steps: 10,000 goal states take 5 million.
        warming_up = counters["env_steps"] < args.warmup or (args.aux == "gace" and not storage.count)
        images, goals = np.stack([player.image for player in players]), [player.goal for player in players]
        if warming_up:
            actions = rng.uniform(-1, 1, (args.num_envs, num_actions)).astype(np.float32)
        else:
            actions = agent.act(images, goals, explore=True)
        if not np.isfinite(actions).all():
            raise FloatingPointError("an action is not finite")
        steps = np.zeros(args.num_envs, replay.steps.dtype)
        steps["action"], steps["goal"] = actions, goals
        env_steps_before = counters["env_steps"]
        for player, action, step in zip(players, actions, steps, strict=True):
            if player.over:  # its last frame has no step
                player.begin(2**32 * args.seed + counters["episodes"])
                counters["episodes"] += 1
                continue
            player.step(action)
            counters["env_steps"] += 1
            step["reward"], step["terminal"], step["usable"] = player.rewards[-1], player.terminated, True
        replay.add(images, steps)

        # Label
        for player in [player for player in players if player.over]:
            success = player.info["is_success"]
            recent.append((success, player.terminated and not success, len(player.rewards), sum(player.rewards)))
            # As in Algorithm 1. Appendix B.1 can be read as if the warm-up stored every time-out: then 95 % of its goal
            # states are negatives, and the agent learns more slowly.
            if args.aux == "gace" and (found := player.goal_state()) and (success or rng.random() < args.epsilon_n):
                storage.add(*found)

        # Learn, after every --env-steps-per-update steps
        update, k = counters["updates"], args.env_steps_per_update
        means = np.mean(recent or [[math.nan] * 4], 0).tolist()
        if not warming_up and counters["env_steps"] // k > env_steps_before // k:
            report = learn(args, agent, target, critic_optimizer, actor_optimizer, replay, storage, rng)
            counters["updates"] = update = update + 1
            if update % args.target_update_interval == 0:
                soft_update(target, agent, args.tau)
            # Log
            if update % 100 == 0 and recent:
                charts = *means, counters["env_steps"], counters["env_steps"] / (time.monotonic() - started)
                report |= {f"charts/{name}": number for name, number in zip(CHARTS, charts, strict=True)}
                for name, number in report.items():
                    writer.add_scalar(name, number, update)
            # Evaluate
            if update % args.eval_every == 0 or update == args.total_updates:
                point = {"update": update, "env_steps": counters["env_steps"], "training_success_ratio": means[0]}
                point["seconds"] = round(time.monotonic() - started, 1)
                for split in splits:
                    rows.append(row := point | evaluate(args, agent, split, run["goal_states"]))
                    tqdm.write(f"update {update:,}, {split}: success {row['success_ratio']:.1%}", sys.stdout)
                    for name in METRICS[4:8]:
                        writer.add_scalar(f"evaluation/{split}_{name}", row[name], update)

        # Show the progress and save
        warmup = f"warm-up: {counters['env_steps']:,} of {args.warmup:,} steps"
        bar.set_postfix_str(warmup if warming_up else f"success {means[0]:.1%}", refresh=False)
        bar.update(update - bar.n)
        if time.monotonic() - last_save > args.checkpoint_every:
            last_save = save()
    save()
    bar.close()
    writer.close()


def main():
    args = tyro.cli(Args, description=__doc__, default=Args(**PAPER) if "--paper" in sys.argv else Args())
    run_folder = args.resume or Path(args.runs, f"{args.task}__{algorithm(args)}__{args.seed}__{int(time.time())}")
    torch.manual_seed(args.seed)
    saved, agent = {}, Agent(args)
    if args.resume:
        if {word.split("=")[0] for word in sys.argv if word.startswith("--")} - {"--resume", "--total-updates"}:
            raise SystemExit("a resumed run keeps its arguments: only --total-updates may be given with --resume")
        saved, saved_args, agent = load_checkpoint(run_folder / "checkpoint.pt")
        if saved_args.version != VERSION:
            raise SystemExit(f"{run_folder} is of version {saved_args.version}, this script of version {VERSION}")
        args = replace(tyro.cli(Args, default=saved_args), resume=None)
    for option, size in ((-1, 2**30), (-3, 2**29)) if sys.platform == "linux" else ():  # M_TRIM_ and M_MMAP_THRESHOLD
        ctypes.CDLL(None).mallopt(option, size)  # keep freed memory: new pages would take as long as the arithmetic
    resume = f"python {sys.argv[0]} --resume {run_folder}"
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGTERM acts as Ctrl-C, also if a shell has switched that off
        signal.signal(number, signal.default_int_handler)
    try:
        run_folder.mkdir(parents=True, exist_ok=bool(saved))
        fcntl.flock(os.open(run_folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
        (run_folder / "args.json").write_text(json.dumps(asdict(args), indent=1))
        if args.track:
            import wandb

            account = {"project": args.wandb_project_name, "entity": args.wandb_entity, "config": vars(args)}
            wandb.init(name=run_folder.name, id=run_folder.name, resume="allow", sync_tensorboard=True, **account)
        print(f"Training {algorithm(args)} on {args.task}, seed {args.seed}, in {run_folder}. Ctrl-C saves and stops.")
        train(args, run_folder, agent, saved)
        print(f"evaluations: {run_folder}/metrics.csv; go on with: {resume} --total-updates N")
    except KeyboardInterrupt:
        print(f"stopped; go on with: {resume}")
    except BlockingIOError:
        raise SystemExit(f"{run_folder} is being trained by another process") from None
    except (OSError, FloatingPointError, gym.error.Error) as error:  # the last checkpoint stays
        raise SystemExit(f"{error}\nThe run stopped; go on with: {resume}") from None


if __name__ == "__main__":
    main()

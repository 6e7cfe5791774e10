"""SAC with goal-aware cross-entropy (GACE) and goal-discriminative attention networks (GDAN) on R1 to R3.

Paper: "Goal-Aware Cross-Entropy for Multi-Target Reinforcement Learning" (NeurIPS 2021), Algorithm 1.

    python sac_gace_ur5.py --task r2 --gdan               # train SAC+GACE&GDAN
    python sac_gace_ur5.py --task r1 --aux none           # train a baseline: none, ae or curl
    python -m tools.enjoy runs/RUN/checkpoint.pt --video  # evaluate and film a trained agent

One process steps the environments in turn, stores every frame once in a file, and learns from random batches.
"""

import argparse
import copy
import ctypes
import fcntl
import functools
import importlib.util
import io
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import envs

# Limits of numbers, checked in Args.__post_init__
Count = Annotated[int, (1, 10**9)]
Weight = Annotated[float, (0, 10**6)]
Ratio = Annotated[float, (0, 1)]


@dataclass
class Method:
    """Task and method."""

    task: Literal["r1", "r2", "r3"] = "r1"
    """three boxes (r1), with random checkered backgrounds (r2); three boxes of five colours (r3)"""
    gdan: bool = False
    """use the goal-discriminative attention networks (needs --aux gace)"""
    aux: Literal["gace", "ae", "curl", "none"] = "gace"
    """auxiliary task: gace (the paper's), ae (autoencoder), curl (contrastive crops), or none (plain SAC)"""
    seed: Annotated[int, (0, 2**31 - 1)] = 1
    """seed of the initial parameters and of all episodes"""
    total_updates: Count = 20_000
    """updates"""
    paper: bool = False
    """use the paper's settings where it gives them, and plain SAC's elsewhere: --warmup 10000 --learning-rate 7e-5
    --n-step 1 --action-penalty 0 --no-augment --num-envs 1 --env-steps-per-update 1"""
    exp_name: str | None = None
    """name of the algorithm in the run's name, for example sac+gace+mine; by default built from the flags"""


@dataclass
class Hyperparameters:
    """The paper's hyperparameters."""

    warmup: Count = 50_000
    """environment steps with a random policy before the first update (paper: 10,000)"""
    epsilon_n: Ratio = 0.05
    """probability of storing the last state of an episode that timed out as a negative"""
    tau: Ratio = 0.005
    """target smoothing coefficient"""
    batch_size: Count = 128
    """transitions in one SAC loss"""
    goal_batch_size: Count = 128
    """goal states in one GACE loss"""
    hidden_size: Annotated[int, (1, 10**4)] = 256
    """features of the encoder, and units of every hidden layer"""
    target_update_interval: Count = 1
    """updates between two soft updates of the target networks"""
    replay_size: Count = 1_000_000
    """frames to keep, on disk (21 KB each); the oldest are overwritten first"""
    goal_storage_size: Count = 500_000
    """goal states to keep, on disk; the oldest are overwritten first"""
    eta: Weight = 0.5
    """coefficient of the GACE loss (Eq. 9); the paper recommends 0.3 to 0.5"""
    gamma: Ratio = 0.99
    """discount"""
    learning_rate: Weight = 3e-4
    """learning rate of Adam (paper: 7e-5)"""
    entropy_coef: Weight = 0.01
    """temperature of the gaussian policy"""


@dataclass
class LeftOut:
    """What the paper leaves out."""

    policy: Literal["deterministic", "gaussian"] = "deterministic"
    """deterministic: tanh(mean) plus clipped Gaussian noise, no entropy term (as we read the paper); gaussian: SAC's"""
    exploration_noise: Weight = 0.2
    """standard deviation of the deterministic policy's noise"""
    action_penalty: Weight = 1e-3
    """coefficient of the penalty on squared actions before the tanh (SAC: 0, with which actions saturate)"""
    n_step: Annotated[int, (1, 50)] = 5
    """rewards summed in the critic's target before bootstrapping (SAC: 1)"""
    num_envs: Count = 8
    """environments that act in one batch (Algorithm 1: 1)"""
    env_steps_per_update: Count = 32
    """environment steps per update (Algorithm 1 does not say; SAC: 1)"""
    ae_coef: Weight = 100.0
    """coefficient of the AE loss; its gradient on the encoder is then about as large as the critic loss's"""
    curl_coef: Weight = 0.02
    """coefficient of the CURL loss, chosen in the same way"""
    augment: bool = True
    """mirror and shift goal states at random (paper: no)"""
    concat_query: bool = False
    """ablation: concatenate the query of GDAN with the features, without attention (needs --gdan)"""
    fixed_goal: str | None = None
    """ablation: a single-target policy, for this goal only: red, green, blue ... (the paper's: --aux none)"""


@dataclass
class Logging:
    """Evaluation, logging, resuming."""

    eval_every: Count = 5_000
    """updates between two evaluations"""
    episodes: Count = 100
    """episodes of an evaluation, on each split"""
    accuracy_states: Count = 100
    """states per split to measure the discriminator's accuracy on; a random policy collects them"""
    checkpoint_every: Weight = 60.0
    """seconds between two checkpoints"""
    runs: str = "runs"
    """parent folder of the run folder"""
    resume: Path | None = None
    """resume the run in this folder with its saved arguments; new arguments replace them"""
    track: bool = False
    """also log to Weights and Biases (needs `pip install wandb`)"""
    wandb_project_name: str = "gace"
    """project in Weights and Biases"""
    wandb_entity: str | None = None
    """team or user in Weights and Biases"""
    cuda: bool = True
    """use a GPU if there is one"""


@dataclass
class Args(Logging, LeftOut, Hyperparameters, Method):
    """All flags. Each base class is a group in --help."""

    def __post_init__(self):
        for name, kind in get_type_hints(Args, include_extras=True).items():
            value = getattr(self, name)
            if get_origin(kind) is Literal and value not in get_args(kind):
                raise SystemExit(f"{flag(name)} must be one of {', '.join(get_args(kind))}, not {value}")
            for low, high in getattr(kind, "__metadata__", ()):
                if value is not None and not low <= value <= high:
                    raise SystemExit(f"{flag(name)} must be between {low} and {high}, not {value}")
        if self.exp_name and ("/" in self.exp_name or "__" in self.exp_name):
            raise SystemExit("--exp-name must not contain / or __")
        goals, self.fixed_goal = envs.goals_of(self.task), self.fixed_goal and self.fixed_goal.lower()
        if self.fixed_goal not in (None, *goals):
            raise SystemExit(f"unknown goal {self.fixed_goal!r}; use one of {', '.join(goals)}")
        if self.num_envs > self.env_steps_per_update:
            raise SystemExit(f"{self.num_envs} environments need --env-steps-per-update {self.num_envs} or more")
        smallest = 4 * self.num_envs  # of two consecutive steps of an environment, at least one is usable
        if self.replay_size < smallest:
            raise SystemExit(f"{self.num_envs} environments need a --replay-size of at least {smallest}")


PAPER = dict(warmup=10_000, learning_rate=7e-5, n_step=1, action_penalty=0.0, augment=False, num_envs=1)
PAPER["env_steps_per_update"] = 1

NEEDS = [  # a flag, its value, and the flags that have no effect with another value
    ("aux", "gace", "gdan goal_batch_size eta epsilon_n augment goal_storage_size accuracy_states"),
    ("aux", "ae", "ae_coef"),
    ("aux", "curl", "curl_coef"),
    ("policy", "deterministic", "exploration_noise"),
    ("policy", "gaussian", "entropy_coef"),
    ("gdan", True, "concat_query"),
    ("track", True, "wandb_project_name wandb_entity"),
]


def flag(name):
    return "--" + name.replace("_", "-")


def make_env(task, split="seen"):
    """Makes the environment. To train on another one, see "Copying a script" in the README."""
    return gym.make(f"gace/{task.upper()}-v0", split=split)


@functools.cache
def sizes(task):
    """Returns the shape of an image, the number of goals and the length of an action."""
    try:
        env = make_env(task)
    except gym.error.Error as error:  # for example, there is no renderer
        raise SystemExit(str(error)) from None
    return env.observation_space["image"].shape, int(env.observation_space["goal"].n), env.action_space.shape[0]


# ------------------------------------------------------------------------------------------------------------ networks


class FeatureExtractor(nn.Module):
    """sigma: encodes an image as e (Eq. 1), with the convolutions of the navigation model."""

    def __init__(self, image_shape, hidden_size):
        super().__init__()
        channels = (image_shape[0], 32, 32, 64, 64)
        self.convs = nn.ModuleList(  # without biases: the normalisation would take them away again
            nn.Conv2d(i, o, 3, 2, 1, bias=False) for i, o in zip(channels[:-1], channels[1:], strict=True)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for o in channels[1:])
        height, width = (math.ceil(side / 16) for side in image_shape[1:])  # after four strides of 2
        self.linear = nn.Linear(64 * height * width, hidden_size)
        self.layer_norm = nn.LayerNorm(hidden_size)

    def forward(self, images):
        x = images / 255  # (batch, 3, 84, 84)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu_(norm(conv(x)))
        # SAC+AE has LayerNorm and tanh here too. Without them, the features drown out the action in the critic.
        return torch.tanh(self.layer_norm(self.linear(x.flatten(1))))  # (batch, 256)


class GoalDiscriminator(nn.Module):
    """d: predicts the goal that an encoding belongs to, or none (Eq. 7). Its hidden layer is the query of GDAN."""

    def __init__(self, hidden_size, classes):
        super().__init__()
        self.hidden = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, classes)

    def query(self, features):
        return F.relu(self.hidden(features))

    def forward(self, features):
        return self.output(self.query(features))  # (batch, classes)


class GoalConditioning(nn.Module):
    """The first part of f: gated attention and GDAN. Actor and critic each have their own."""

    def __init__(self, args, goals):
        super().__init__()
        size = args.hidden_size
        self.concat_query = args.concat_query
        self.attention = args.gdan and not args.concat_query
        width = 2 * size if self.concat_query else size
        self.embedding = nn.Embedding(goals, 25)
        self.instruction = nn.Linear(25, width)
        self.linear = nn.Linear(2 * width, size)
        self.out_features = size if self.attention else width + size
        if self.attention:
            self.key_value = nn.Linear(2 * size, 2 * size)
            self.w_q = nn.Linear(size, size)
            self.w_k = nn.Linear(size, size)
            self.combine = nn.Linear(2 * size, size)

    def forward(self, features, query, goals):
        if self.concat_query:
            features = torch.cat([features, query], -1)  # [e_t, q], the paper's ablation
        gate = torch.sigmoid(self.instruction(self.embedding(goals)))
        gated = features * gate  # M
        encoding = F.relu(self.linear(torch.cat([gated, gate], -1)))  # e^1: the navigation model has an LSTM here
        if not self.attention:
            return torch.cat([gated, encoding], -1)
        # This layer and the ReLUs are those of the authors' navigation code. In the paper, e^1 itself is split into key
        # and value, and Eq. 10 has no ReLU. h is concatenated with e^1 (Appendix B.4; Section 3.4: with M).
        key, value = F.relu(self.key_value(torch.cat([gated, encoding], -1))).chunk(2, -1)
        attention = torch.tanh(F.relu(self.w_q(query)) + F.relu(self.w_k(key)))  # u (Eq. 10)
        attended = value * attention  # h (Eq. 11)
        return F.relu(self.combine(torch.cat([attended, encoding], -1)))


def mlp(inputs, hidden, outputs):
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


class Actor(nn.Module):
    """The policy."""

    def __init__(self, args, goals, actions):
        super().__init__()
        self.conditioning = GoalConditioning(args, goals)
        self.gaussian, self.actions = args.policy == "gaussian", actions
        self.noise = args.exploration_noise
        self.head = mlp(self.conditioning.out_features, args.hidden_size, actions * (2 if self.gaussian else 1))

    def forward(self, features, query, goals, explore=True):
        """Returns actions (batch, 6), log-probabilities (0 if deterministic), and the means before the tanh."""
        mean, *log_std = self.head(self.conditioning(features, query, goals)).split(self.actions, -1)
        if not explore or not self.gaussian:
            # clipped at 2.5 standard deviations, as TD3 clips its target noise (0.2, at 0.5)
            noise = (self.noise * torch.randn_like(mean)).clamp(-2.5 * self.noise, 2.5 * self.noise) if explore else 0.0
            return (torch.tanh(mean) + noise).clamp(-1, 1), torch.zeros_like(mean[:, 0]), mean
        normal = torch.distributions.Normal(mean, log_std[0].clamp(-10, 2).exp())
        before_tanh = normal.rsample()
        log_probs = normal.log_prob(before_tanh) - 2 * (np.log(2) - before_tanh - F.softplus(-2 * before_tanh))
        return torch.tanh(before_tanh), log_probs.sum(-1), mean


class Critic(nn.Module):
    """Two Q-functions with a common first part (SAC: two networks). SAC uses the smaller value."""

    def __init__(self, args, goals, actions):
        super().__init__()
        self.conditioning = GoalConditioning(args, goals)
        self.heads = nn.ModuleList(mlp(self.conditioning.out_features + actions, args.hidden_size, 1) for _ in range(2))

    def forward(self, features, query, goals, actions):
        x = torch.cat([self.conditioning(features, query, goals), actions], -1)
        return torch.stack([head(x).squeeze(-1) for head in self.heads])  # (2, batch)


class Decoder(nn.Module):
    """The head of the SAC+AE baseline: decodes features to an image."""

    def __init__(self, image_shape, hidden_size):
        super().__init__()
        channels, self.height, self.width = image_shape
        small = 64, math.ceil(self.height / 16), math.ceil(self.width / 16)
        self.linear = nn.Sequential(nn.Linear(hidden_size, math.prod(small)), nn.Unflatten(1, small))
        self.deconvs = nn.ModuleList(
            nn.ConvTranspose2d(i, o, 3, 2, 1, output_padding=1)  # doubles the size
            for i, o in ((64, 64), (64, 32), (32, 32), (32, channels))
        )

    def forward(self, features):
        images = self.linear(features)
        for deconv in self.deconvs:
            images = deconv(F.relu(images))
        return images[..., : self.height, : self.width]


class Agent(nn.Module):
    """All networks of one agent."""

    def __init__(self, args):
        super().__init__()
        size, (image_shape, goals, actions) = args.hidden_size, sizes(args.task)
        self.curl = args.aux == "curl"
        seen_shape = crop(torch.zeros(image_shape)).shape if self.curl else image_shape
        self.feature_extractor = FeatureExtractor(seen_shape, size)
        self.goal_discriminator = GoalDiscriminator(size, goals + 1)
        self.actor = Actor(args, goals, actions)
        self.critic = Critic(args, goals, actions)
        self.decoder = Decoder(image_shape, size) if args.aux == "ae" else None
        # CURL starts from torch.rand with 50 features. Ours are more, so we scale it to keep the logits as large.
        self.contrast = nn.Parameter(torch.rand(size, size) * 50 / size) if self.curl else None
        self.to(memory_format=torch.channels_last)  # twice as fast on a CPU

    @torch.no_grad()
    def act(self, images, goals, explore):
        """Chooses actions from NumPy images (envs, 3, 84, 84) and goals (envs,)."""
        device = self.feature_extractor.linear.weight.device
        images = torch.from_numpy(images).to(device, memory_format=torch.channels_last)
        features = self.feature_extractor(crop(images) if self.curl else images)
        goals = torch.as_tensor(goals, device=device)
        return self.actor(features, self.goal_discriminator.query(features), goals, explore)[0].cpu().numpy()


# ----------------------------------------------------------------------------------------------- replay, goal storage


class RingFile:
    """A ring buffer of records of equal size, in a file that grows as it fills."""

    def __init__(self, path, dtype, capacity, count):
        self.file = os.open(path, os.O_RDWR | os.O_CREAT)
        self.dtype, self.capacity = np.dtype(dtype), capacity
        if os.fstat(self.file).st_size < min(count, capacity) * self.dtype.itemsize:
            raise SystemExit(f"{path} is damaged or lost: the run cannot be resumed")
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead

    def write(self, index, records):
        data = records.tobytes()
        if os.pwrite(self.file, data, index % self.capacity * self.dtype.itemsize) < len(data):
            raise OSError("the disk is full")

    def read(self, indices):
        offsets = (indices % self.capacity * self.dtype.itemsize).tolist()
        if hasattr(os, "posix_fadvise"):
            for offset in offsets:  # prefetch all records at once
                os.posix_fadvise(self.file, offset, self.dtype.itemsize, os.POSIX_FADV_WILLNEED)
        records = np.empty((len(offsets), self.dtype.itemsize), np.uint8)
        for record, offset in zip(records, offsets, strict=True):
            os.preadv(self.file, [record], offset)
        return records.view(self.dtype)[:, 0]


class ReplayBuffer:
    """Frames and steps of all environments. Every frame is stored once.

    The environments take turns, so the next frame of a step is `num_envs` places later. The last frame of an episode
    has no usable step."""

    def __init__(self, folder, image_shape, actions, capacity, num_envs, count=0):
        channels, height, width = image_shape
        self.frame = np.dtype([("image", "u1", (height, width, channels))])  # channels last, as the encoder reads it
        numbers = [("action", "f4", actions), ("reward", "f4"), ("goal", "u1")]
        self.step = np.dtype([*numbers, ("terminal", "?"), ("usable", "?")])
        self.capacity, self.num_envs = capacity - capacity % num_envs, num_envs
        self.count = count  # frames ever added
        self.frames = RingFile(folder / "replay_frames.bin", self.frame, self.capacity, count)
        self.steps_file = RingFile(folder / "replay_steps.bin", self.step, self.capacity, count)
        self.steps = np.zeros(self.capacity, self.step)  # in memory too, 31 bytes each
        stored = min(count, self.capacity)
        self.steps[:stored] = np.fromfile(folder / "replay_steps.bin", self.step, stored)

    def add(self, images, steps):
        """Adds one frame (3, 84, 84) and one step of each environment."""
        self.frames.write(self.count, images.transpose(0, 2, 3, 1))
        self.steps_file.write(self.count, steps)
        slot = self.count % self.capacity
        self.steps[slot : slot + self.num_envs] = steps
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
            discounts *= np.where(goes_on, gamma * ~steps["terminal"], 1)
            following += goes_on * self.num_envs
        steps = self.steps[chosen % self.capacity]
        images, next_images = (
            torch.from_numpy(self.frames.read(indices)["image"]).permute(0, 3, 1, 2) for indices in (chosen, following)
        )
        actions, goals = torch.from_numpy(steps["action"].copy()), torch.from_numpy(steps["goal"].astype("i8"))
        return images, actions, torch.from_numpy(returns), next_images, torch.from_numpy(discounts), goals


class GoalStorage:
    """Goal states and their labels."""

    def __init__(self, folder, image_shape, capacity, count=0):
        channels, height, width = image_shape
        self.record = np.dtype([("image", "u1", (height, width, channels)), ("label", "u1")])
        self.records = RingFile(folder / "goal_states.bin", self.record, capacity, count)
        self.count = count  # goal states ever added

    def __len__(self):
        return min(self.count, self.records.capacity)

    def add(self, image, label):
        self.records.write(self.count, np.array([(image.transpose(1, 2, 0), label)], self.record))
        self.count += 1

    def sample(self, batch_size, rng):
        records = self.records.read(rng.integers(len(self), size=batch_size))
        images = torch.from_numpy(np.ascontiguousarray(records["image"])).permute(0, 3, 1, 2)
        return images, torch.from_numpy(records["label"].astype("i8"))


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
    """n-step return plus the discounted soft value of the state after it. A time-out is bootstrapped."""
    return returns + discounts * (next_values - entropy_coef * next_log_probs)


def critic_loss(values, targets):
    """Squared error of both Q-functions (2, batch)."""
    return (values - targets).square().mean(-1).sum()


def actor_loss(values, log_probs, means, entropy_coef, action_penalty):
    """Maximises the smaller Q-value. The penalty on the means before the tanh keeps actions off their limits."""
    return (entropy_coef * log_probs - values.min(0).values + action_penalty * means.square().sum(-1)).mean()


def gace_loss(goal_logits, goal_labels):
    """Goal-aware cross-entropy (Eq. 8), as a mean over the batch; the paper writes a sum, the authors use a mean."""
    return F.cross_entropy(goal_logits, goal_labels)


def ae_loss(decoder, features, images):
    """The SAC+AE baseline: reconstruction error and a small penalty on the features."""
    reconstruction = F.mse_loss(decoder(features), images.float() / 255)
    return reconstruction + 1e-6 * 0.5 * features.square().sum(-1).mean()


def curl_loss(anchors, keys, contrast):
    """The SAC+CURL baseline: each crop must recognise the other crop of its own image within the batch."""
    logits = anchors @ contrast @ keys.T
    return F.cross_entropy(logits, torch.arange(len(anchors), device=anchors.device))


def crop(images, rng=None):
    """Crops 6/7 of height and width (CURL: 84 of 100 pixels), at random places, or without `rng` in the middle."""
    (height, width), (h, w) = images.shape[-2:], (side * 6 // 7 for side in images.shape[-2:])
    if rng is None:
        y, x = (height - h) // 2, (width - w) // 2
        return images[..., y : y + h, x : x + w]
    corners = rng.integers((height - h + 1, width - w + 1), size=(len(images), 2)).tolist()
    return torch.stack([i[:, y : y + h, x : x + w] for i, (y, x) in zip(images, corners, strict=True)])


# ------------------------------------------------------------------------------------------------------------- playing


class Player:
    """One environment and its current episode."""

    def __init__(self, args, split="seen"):
        self.env, self.fixed_goal = make_env(args.task, split), args.fixed_goal
        _, self.num_goals, self.num_actions = sizes(args.task)

    def begin(self, seed, goal=None, blind=False):
        self.seed, goal = seed, self.fixed_goal if goal is None else goal
        observation, _ = self.env.reset(seed=seed, options={"goal": goal, "blind": blind})
        self.image, self.goal = observation["image"], int(observation["goal"])
        self.actions, self.rewards, self.terminated, self.over = [], [], False, False

    def step(self, action):
        observation, reward, self.terminated, truncated, self.info = self.env.step(action)
        self.image, self.over = observation["image"], self.terminated or truncated
        self.actions.append(action.tolist())
        self.rewards.append(reward)

    def replay(self, seed, actions, goal=None):
        """Plays recorded actions again, with images."""
        self.begin(seed, goal)
        for action in actions:
            self.step(np.array(action, np.float32))

    def goal_state(self):
        """Auto-labelling: returns the state to store and its label, or None if the episode ended on another box.

        A success is labelled with its instruction, a time-out is a negative (Appendix B.1). This is the state in which
        the goal is reached, as in Section 3.2. Algorithm 1 stores the state before it."""
        if self.info["is_success"]:
            return self.image, self.goal
        return None if self.terminated else (self.image, self.num_goals)


def episode_seed(args, episode):
    return int(np.random.SeedSequence([args.seed, episode]).generate_state(1)[0])


def evaluate(args, agent, split, goal_states, goal=None, on_step=lambda: None, on_end=lambda player: None):
    """Plays the same `args.episodes` episodes every time, without exploration noise. Returns a row of metrics."""
    player, results = Player(args, split), []
    for index in tqdm(range(args.episodes), f"evaluating {split}", leave=False, unit=" episodes", **BAR):
        player.begin(2**30 + index, goal)
        while not player.over:
            on_step()
            player.step(agent.act(player.image[None], [player.goal], explore=False)[0])
        results.append((player.info["is_success"], len(player.rewards), sum(player.rewards)))
        on_end(player)
    player.env.close()
    row = dict(zip(("success_ratio", "episode_length", "episode_return"), np.mean(results, 0).tolist(), strict=True))
    accuracy = discriminator_accuracy(agent, *goal_states[split]) if goal_states else float("nan")
    return {"split": split, "discriminator_accuracy": accuracy, **row}


def collect_goal_states(args, split, on_step):
    """States of a random policy, equally many of each class, negatives included. They are the same in every run."""
    player, states, labels = Player(args, split), [], []
    bar = tqdm(desc=f"states to measure the discriminator ({split})", total=args.accuracy_states, **BAR)
    for seed in itertools.count(2**29):
        label = len(labels) % (player.num_goals + 1)
        player.begin(seed, label % player.num_goals, blind=True)
        rng = np.random.default_rng(seed)
        while not player.over:
            on_step()
            player.step(rng.uniform(-1, 1, player.num_actions).astype(np.float32))
        found = player.goal_state()
        if found and found[1] == label:
            player.replay(seed, player.actions, player.goal)
            states.append(player.image)
            labels.append(label)
            bar.update()
        if len(labels) == args.accuracy_states:
            bar.close()
            player.env.close()
            return torch.from_numpy(np.stack(states)), torch.tensor(labels)


@torch.no_grad()
def discriminator_accuracy(agent, states, labels):
    """Share of states that the discriminator classifies correctly."""
    device = agent.feature_extractor.linear.weight.device
    features = agent.feature_extractor(states.to(device, memory_format=torch.channels_last))
    return (agent.goal_discriminator(features).argmax(-1).cpu() == labels).float().mean().item()


# ------------------------------------------------------------------------------------------------------------ learning


def make_optimizers(args, agent):
    """One Adam for the actor, one for everything else. (The authors of SAC+AE and CURL have a third for their loss.)"""
    rest = [p for name, p in agent.named_parameters() if not name.startswith(("actor.", "decoder."))]
    groups = [{"params": rest}]
    if agent.decoder:
        groups.append({"params": agent.decoder.parameters(), "weight_decay": 1e-7})  # as in SAC+AE
    critic = torch.optim.Adam(groups, args.learning_rate, fused=True)
    return critic, torch.optim.Adam(agent.actor.parameters(), args.learning_rate, fused=True)


def learn(args, agent, target, optimizers, replay, storage, rng, device):
    """One update of critic, encoder and discriminator (Eq. 9), then one of the actor. Returns the scalars to log."""
    critic_optimizer, actor_optimizer = optimizers
    batch = [tensor.to(device) for tensor in replay.sample(args.batch_size, rng, args.n_step, args.gamma)]
    images, actions, returns, next_images, discounts, goals = batch
    if args.aux == "curl":
        other_images, images, next_images = crop(images, rng), crop(images, rng), crop(next_images, rng)

    with torch.no_grad():
        next_features = target.feature_extractor(next_images)
        next_query = target.goal_discriminator.query(next_features)
        # Unlike in SAC, the next action comes from a target actor, which reads the target encoder's features. So the
        # next images pass through one encoder only.
        # The deterministic policy's noise smooths the target, as in TD3.
        next_actions, next_log_probs, _ = target.actor(next_features, next_query, goals)
        next_values = target.critic(next_features, next_query, goals, next_actions).min(0).values
        targets = critic_target(returns, discounts, next_values, next_log_probs, args.entropy_coef)

    agent.train()  # batch normalisation with the statistics of the batch
    if args.aux == "gace":
        goal_images, goal_labels = storage.sample(args.goal_batch_size, rng)
        goal_images = (augmented(goal_images, rng) if args.augment else goal_images).to(device)
        goal_labels = goal_labels.to(device)
        encoded = agent.feature_extractor(torch.cat([images, goal_images]))
        features, goal_features = encoded[: args.batch_size], encoded[args.batch_size :]
    else:
        features = agent.feature_extractor(images)
    agent.eval()
    # Not detached: the critic loss trains the query too, as the RL loss does in the authors' navigation code. Section
    # 3.3 can be read otherwise.
    query = agent.goal_discriminator.query(features)
    values = agent.critic(features, query, goals, actions)
    loss = loss_critic = critic_loss(values, targets)
    report = {"losses/critic_loss": loss_critic, "losses/values": values.mean()}
    if args.aux == "gace":
        goal_logits = agent.goal_discriminator(goal_features)
        if goal_labels.max() >= goal_logits.shape[-1]:
            raise OSError("goal_states.bin is damaged: it contains an unknown label")
        report["losses/gace_loss"] = gace_loss(goal_logits, goal_labels)
        report["losses/batch_accuracy"] = (goal_logits.argmax(-1) == goal_labels).float().mean()
        loss = loss + args.eta * report["losses/gace_loss"]  # Eq. 9
    elif args.aux == "ae":
        report["losses/ae_loss"] = ae_loss(agent.decoder, features, images)
        loss = loss + args.ae_coef * report["losses/ae_loss"]
    elif args.aux == "curl":
        with torch.no_grad():
            keys = target.feature_extractor(other_images)
        report["losses/curl_loss"] = curl_loss(features, keys, agent.contrast)
        loss = loss + args.curl_coef * report["losses/curl_loss"]
    critic_optimizer.zero_grad()
    loss.backward()
    critic_optimizer.step()

    features, query = features.detach(), query.detach()  # the actor loss trains neither encoder nor discriminator ...
    agent.critic.requires_grad_(False)  # ... nor the critic
    new_actions, log_probs, means = agent.actor(features, query, goals, explore=args.policy == "gaussian")
    new_values = agent.critic(features, query, goals, new_actions)
    loss_actor = actor_loss(new_values, log_probs, means, args.entropy_coef, args.action_penalty)
    actor_optimizer.zero_grad()
    loss_actor.backward()
    actor_optimizer.step()
    agent.critic.requires_grad_(True)
    with torch.no_grad():
        if not torch.isfinite(loss + loss_actor + sum(tensor.sum() for tensor in agent.state_dict().values())):
            raise FloatingPointError("a loss or a parameter is not finite")
    report |= {"losses/actor_loss": loss_actor, "losses/action_size": new_actions.abs().mean()}
    return {name: float(number.detach()) for name, number in report.items()}


def soft_update(target, agent, tau):
    """Moves the target networks and their batch statistics towards the agent."""
    for old, new in zip(target.state_dict().values(), agent.state_dict().values(), strict=True):
        if old.is_floating_point():
            old.lerp_(new, tau)


# ------------------------------------------------------------------------------------------------------------ training

BAR = {"dynamic_ncols": True, "mininterval": 0.5}
METRICS = "update env_steps seconds split success_ratio discriminator_accuracy episode_length episode_return".split()


def algorithm(args):
    parts = ["sac", args.aux != "none" and args.aux, args.gdan and "gdan", args.concat_query and "concat"]
    parts += [args.fixed_goal, args.policy == "gaussian" and "gaussian", args.paper and "paper"]
    return args.exp_name or "+".join(filter(None, parts))


def save_run(run_folder, checkpoint):
    """Writes checkpoint.pt, and args.json and metrics.csv from it. Each file is replaced as a whole or not at all."""
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    lines = [METRICS, *([row[name] for name in METRICS] for row in checkpoint["rows"])]
    contents = {
        "checkpoint.pt": buffer.getbuffer(),
        "args.json": json.dumps(checkpoint["args"], indent=1).encode(),
        "metrics.csv": "".join(",".join(map(str, line)) + "\n" for line in lines).encode(),
    }
    temporary = run_folder / "save.tmp"
    try:
        for name, content in contents.items():
            temporary.write_bytes(content)
            os.replace(temporary, run_folder / name)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path):
    """Returns a checkpoint, its Args and its agent, or exits with a line that says what is wrong with it."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        known = {field.name for field in fields(Args)}
        args = Args(**{name: value for name, value in checkpoint["args"].items() if name in known})
        agent = Agent(args).eval()
        agent.load_state_dict(checkpoint["agent"])  # converts the 16-bit agents in results/
        return checkpoint, args, agent
    except FileNotFoundError:
        raise SystemExit(f"{path} does not exist") from None
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise SystemExit(f"{path} is not a whole checkpoint of {Path(__file__).name}: {reason}") from None


def new_run(args):
    """Returns the initial checkpoint of a run."""
    torch.manual_seed(args.seed)
    agent = Agent(args)
    return {
        "args": asdict(args),
        "agent": agent.state_dict(),
        "target": agent.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in make_optimizers(args, agent)],
        "counters": {"updates": 0, "env_steps": 0, "replay": 0, "goals": 0, "episodes": args.num_envs},
        "under_way": [(episode_seed(args, i), []) for i in range(args.num_envs)],  # seed and actions by environment
        "numpy_random": json.dumps(np.random.default_rng(args.seed).bit_generator.state),
        "torch_random": torch.get_rng_state(),
        "seconds": 0.0,
        "rows": [],  # of metrics.csv
        "goal_states": {},  # to measure the discriminator's accuracy, by split
    }


def check_form(content, form, path):
    """Refuses a checkpoint that lacks a part of a run, as the agents in results/ do."""
    for name, value in form.items():
        if not isinstance(content.get(name), type(value)):
            raise SystemExit(f"{path} has no {name!r}: it is not the checkpoint of a run")
        if isinstance(value, dict) and name != "args":
            check_form(content[name], value, path)


def keep_freed_memory():
    """Lets the C library keep freed memory. Without this, new memory pages take as long as the arithmetic."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2**29)  # M_MMAP_THRESHOLD


def train(args, run_folder, run):
    """Trains until the updates are done or a signal comes. Returns True if all updates are done."""
    keep_freed_memory()
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    agent = Agent(args).to(device).eval()
    agent.load_state_dict(run["agent"])
    target = copy.deepcopy(agent).requires_grad_(False)
    target.load_state_dict(run["target"])
    optimizers = make_optimizers(args, agent)
    for optimizer, state in zip(optimizers, run["optimizers"], strict=True):
        optimizer.load_state_dict(state)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate  # the user may have given a new one
    rng = np.random.default_rng()
    rng.bit_generator.state = json.loads(run["numpy_random"])
    torch.set_rng_state(run["torch_random"])
    counters, rows, splits = run["counters"], run["rows"], envs.splits_of(args.task)
    started = time.monotonic() - run["seconds"]
    image_shape, _, num_actions = sizes(args.task)
    replay = ReplayBuffer(run_folder, image_shape, num_actions, args.replay_size, args.num_envs, counters["replay"])
    storage = GoalStorage(run_folder, image_shape, args.goal_storage_size, counters["goals"])
    signals = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: signals.append(received))
    writer = SummaryWriter(run_folder, purge_step=counters["updates"] + 1)
    writer.add_text("hyperparameters", "|name|value|\n|-|-|\n" + "".join(f"|{k}|{v}|\n" for k, v in vars(args).items()))
    players = [Player(args) for _ in range(args.num_envs)]
    recent, bar, saved = deque(maxlen=200), None, -np.inf  # recent episodes

    def save():
        nonlocal saved
        counters.update(replay=replay.count, goals=storage.count)
        run.update(
            args=asdict(replace(args, resume=None)),
            agent=agent.state_dict(),
            target=target.state_dict(),
            optimizers=[optimizer.state_dict() for optimizer in optimizers],
            under_way=[(player.seed, player.actions) for player in players],
            numpy_random=json.dumps(rng.bit_generator.state),
            torch_random=torch.get_rng_state(),
            seconds=time.monotonic() - started,
        )
        save_run(run_folder, run)
        saved = time.monotonic()

    def check_signals():
        if signals:
            raise KeyboardInterrupt

    try:
        for player, under_way in zip(players, run["under_way"], strict=True):
            player.replay(*under_way)
        if args.aux == "gace" and not run["goal_states"]:
            run["goal_states"] = {split: collect_goal_states(args, split, check_signals) for split in splits}
        while True:
            check_signals()
            update = counters["updates"]

            # Evaluate. This comes first, because a resumed run may have been interrupted in it.
            due = update and (update % args.eval_every == 0 or update >= args.total_updates)
            if due and (not rows or rows[-1]["update"] < update):
                point = {"update": update, "env_steps": counters["env_steps"]}
                point["seconds"] = round(time.monotonic() - started, 1)
                new = [
                    point | evaluate(args, agent, split, run["goal_states"], on_step=check_signals) for split in splits
                ]
                for row in new:
                    tqdm.write(f"update {update:,}, {row['split']}: success {row['success_ratio']:.1%}", sys.stdout)
                    for name in METRICS[4:]:
                        writer.add_scalar(f"evaluation/{row['split']}_{name}", row[name], update)
                rows += new
                save()
            if update >= args.total_updates:
                return True

            # Act
            # The paper's warm-up of 10,000 has no unit. We count steps: 10,000 goal states would take 5 million.
            warming_up = counters["env_steps"] < args.warmup or (args.aux == "gace" and not len(storage))
            images, goals = np.stack([player.image for player in players]), [player.goal for player in players]
            if warming_up:
                actions = rng.uniform(-1, 1, (args.num_envs, num_actions)).astype(np.float32)
            else:
                actions = agent.act(images, goals, explore=True)
            if not np.isfinite(actions).all():
                raise FloatingPointError("an action is not finite")
            steps = np.zeros(args.num_envs, replay.step)
            steps["action"], steps["goal"] = actions, goals
            env_steps_before = counters["env_steps"]
            for player, action, step in zip(players, actions, steps, strict=True):
                if player.over:  # its last frame has no step
                    player.begin(episode_seed(args, counters["episodes"]))
                    counters["episodes"] += 1
                    continue
                player.step(action)
                counters["env_steps"] += 1
                step["reward"], step["terminal"], step["usable"] = player.rewards[-1], player.terminated, True

            # Store
            replay.add(images, steps)

            # Label
            for player in players:
                if not player.over:
                    continue
                success = player.info["is_success"]
                recent.append((success, player.terminated and not success, len(player.rewards), sum(player.rewards)))
                if args.aux == "gace" and (found := player.goal_state()):
                    # As in Algorithm 1. Appendix B.1 can be read as if the warm-up stored every time-out: then 95 % of
                    # its goal states are negatives, and the agent learns more slowly.
                    if success or rng.random() < args.epsilon_n:
                        storage.add(*found)

            # Learn, after every --env-steps-per-update steps
            k = args.env_steps_per_update
            if not warming_up and counters["env_steps"] // k > env_steps_before // k:
                report = learn(args, agent, target, optimizers, replay, storage, rng, device)
                counters["updates"] = update = update + 1
                if update % args.target_update_interval == 0:
                    soft_update(target, agent, args.tau)
                if update % 100 == 0 and recent:
                    names = "success_ratio nongoal_ratio episodic_length episodic_return".split()
                    report |= {f"charts/{name}": x for name, x in zip(names, np.mean(recent, 0), strict=True)}
                    report["charts/env_steps"] = counters["env_steps"]
                    report["charts/SPS"] = counters["env_steps"] / (time.monotonic() - started)
                    for name, number in report.items():
                        writer.add_scalar(name, number, update)

            # Show the progress and save
            done, total, unit = update, args.total_updates, " updates"
            if warming_up:
                done, total, unit = counters["env_steps"], args.warmup, " steps"
            if not bar or bar.unit != unit:
                if bar:
                    bar.close()
                bar = tqdm(total=total, initial=done, unit=unit, **BAR)
            if recent:
                bar.set_postfix_str(f"success {np.mean(recent, 0)[0]:.1%}", refresh=False)
            bar.update(min(done, total) - bar.n)
            if time.monotonic() - saved > args.checkpoint_every:
                save()
    except KeyboardInterrupt:
        tqdm.write("stopping ...", file=sys.stdout)
        save()
        return False
    finally:
        if bar:
            bar.close()
        writer.close()
        for player in players:
            player.env.close()


FIXED = """
    task gdan aux seed hidden_size replay_size goal_storage_size num_envs policy concat_query fixed_goal accuracy_states
    exp_name paper runs
""".split()  # flags that a resumed run cannot change


def open_run(run_folder, new):
    """Makes or opens a run folder, and locks it until this process ends, so that only one process trains a run."""
    try:
        if new:
            run_folder.mkdir(parents=True)
        fcntl.flock(os.open(run_folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"{run_folder} is being trained by another process") from None
    except OSError as error:
        raise SystemExit(f"cannot use the run folder {run_folder}: {error.strerror}") from None


def read_flags(defaults, arguments=None):
    """Reads the command line. Refuses a flag that has no effect."""
    groups = Args.__bases__[::-1]
    flags = make_dataclass("Flags", [(kind.__name__, kind) for kind in groups])
    given = flags(*(kind(**{f.name: getattr(defaults, f.name) for f in fields(kind)}) for kind in groups))
    given = tyro.cli(flags, args=arguments, description=__doc__, default=given, config=(tyro.conf.OmitArgPrefixes,))
    args = Args(**{name: value for group in vars(given).values() for name, value in vars(group).items()})
    if args.track and not importlib.util.find_spec("wandb"):
        raise SystemExit("--track needs Weights and Biases: pip install wandb")
    for other, value, names in NEEDS:
        for name in names.split():
            if getattr(args, other) != value and getattr(args, name) != getattr(defaults, name):
                raise SystemExit(f"{flag(name)} needs {flag(other)}" + ("" if value is True else f" {value}"))
    return args


def main():
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # these two change the defaults of the others
    early.add_argument("--resume", type=Path)
    early.add_argument("--paper", action="store_true")
    early, _ = early.parse_known_args()
    run_folder, defaults = early.resume, Args(paper=early.paper, **(PAPER if early.paper else {}))
    if run_folder:
        open_run(run_folder, new=False)
        run, defaults, _ = load_checkpoint(run_folder / "checkpoint.pt")
        check_form(run, new_run(defaults), run_folder / "checkpoint.pt")
    args = read_flags(defaults)
    if run_folder:
        for name in FIXED:
            if getattr(args, name) != getattr(defaults, name):
                raise SystemExit(f"a resumed run cannot change {flag(name)}: it is {getattr(defaults, name)}")
    else:
        run = new_run(args)
        run_folder = Path(args.runs, f"{args.task}__{algorithm(args)}__{args.seed}__{int(time.time())}")
        steps = args.warmup + args.total_updates * args.env_steps_per_update
        frames = min(args.replay_size, steps * 4 // 3)  # with the last frame of each episode, which has no step
        disk = next(folder for folder in (run_folder, *run_folder.resolve().parents) if folder.exists())
        room = shutil.disk_usage(disk).free // math.prod(sizes(args.task)[0])
        if frames > room:
            raise SystemExit(f"the disk has room for {room} of {frames} frames: use a smaller --replay-size")
        open_run(run_folder, new=True)
    if args.track:
        import wandb

        name = run_folder.name
        account = {"project": args.wandb_project_name, "entity": args.wandb_entity}
        wandb.init(**account, name=name, id=name, resume="allow", sync_tensorboard=True, config=vars(args))
    print(f"Training {algorithm(args)} on {args.task}, seed {args.seed}. Ctrl-C saves and stops.")
    print("The bar counts updates, and shows the time left.")
    if not run["counters"]["updates"]:
        print(f"The warm-up comes first: {args.warmup:,} steps of a random policy.")
    print(f"run folder: {run_folder} (curves: tensorboard --logdir {run_folder.parent})")
    resume = f"python {sys.argv[0]} --resume {run_folder}"
    try:
        finished = train(args, run_folder, run)
    except (OSError, FloatingPointError, gym.error.Error) as error:  # the last checkpoint stays
        raise SystemExit(f"{error}\nThe run stopped. Resume with: {resume}") from None
    results = f"results: {run_folder}/metrics.csv\nwatch the agent: python -m tools.enjoy {run_folder}/checkpoint.pt"
    print(results if finished else f"resume: {resume}")


if __name__ == "__main__":
    main()

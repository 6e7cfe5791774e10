"""A3C with goal-aware cross-entropy (GACE) and goal-discriminative attention networks (GDAN) on V1 to V4.

Paper: "Goal-Aware Cross-Entropy for Multi-Target Reinforcement Learning" (NeurIPS 2021).

    python a3c_gace_vizdoom.py --task v1 --gdan           # train A3C+GACE&GDAN
    python a3c_gace_vizdoom.py --task v2 --aux none       # train a baseline: none, vae or rad
    python -m tools.enjoy runs/RUN/checkpoint.pt --video  # evaluate and film a trained agent

Worker processes play and learn. After each episode, a worker updates the shared parameters without waiting for the
other workers. The main process logs, evaluates and saves.
"""

import argparse
import ctypes
import fcntl
import functools
import importlib.util
import io
import itertools
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import gymnasium as gym
import numpy as np
import torch
import torch.multiprocessing as mp
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

    task: Literal["v1", "v2", "v3", "v4"] = "v1"
    """a room (v1), with random textures (v2); a maze (v3), with random textures (v4)"""
    gdan: bool = False
    """use the goal-discriminative attention networks (needs --aux gace)"""
    aux: Literal["gace", "vae", "rad", "none"] = "gace"
    """auxiliary task: gace (the paper's), vae, rad (random crops), or none (plain A3C)"""
    seed: Annotated[int, (0, 2**31 - 1)] = 1
    """seed of the initial parameters and of all episodes"""
    total_updates: Count = 200_000
    """updates, summed over the workers; one update per episode"""
    paper: bool = False
    """use the settings of the paper and of its authors' code: --learning-rate 7e-5 --no-anneal-lr --max-grad-norm 10
    --entropy-coef 0.01 --value-coef 0.5 --learning-rate-warmup 0 --adam-epsilon 1e-3 --reward-scale 1 --gae-lambda 1
    --goal-batch-size 50 --goal-batch-norm --no-augment --gate-gain 1"""
    exp_name: str | None = None
    """name of the algorithm in the run's name, for example a3c+gace+mine; by default built from the flags"""


@dataclass
class Hyperparameters:
    """The paper's hyperparameters."""

    warmup: Count = 2_000
    """goal states to collect with a random policy before the first update"""
    goal_batch_size: Count = 16
    """goal states in one GACE loss (paper: 50)"""
    eta: Weight = 0.5
    """coefficient of the GACE loss (Eq. 9); the paper recommends 0.3 to 0.5"""
    epsilon_n: Ratio = 0.0
    """probability of storing the last state acted in of an episode that timed out, as a negative"""
    gamma: Ratio = 0.99
    """discount"""
    learning_rate: Weight = 2e-4
    """learning rate of Adam with AMSGrad (paper: 7e-5)"""
    max_grad_norm: Weight = 40.0
    """clip the gradient at this norm (paper: 10, for rewards ten times as large)"""
    entropy_coef: Weight = 0.007
    """coefficient of the entropy, Eq. 3 (paper: 0.01, for rewards ten times as large)"""
    value_coef: Weight = 0.2
    """coefficient of the value loss, Eq. 5 (paper: 0.5, for rewards ten times as large)"""
    num_envs: Count = 20
    """environments, divided among the workers (paper: 20 workers with one each)"""


@dataclass
class LeftOut:
    """What the paper leaves out."""

    num_workers: Count = min(20, os.cpu_count() or 1)
    """worker processes; by default one per core, at most 20"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0 over --total-updates (paper: constant)"""
    learning_rate_warmup: Annotated[int, (0, 10**9)] = 1_000
    """updates of linear learning-rate warm-up (authors: 0)"""
    adam_epsilon: Weight = 1e-4
    """Adam's epsilon (authors: 1e-3, added before the bias correction; --paper does so too)"""
    reward_scale: Weight = 0.1
    """multiply rewards by this in the losses (authors: 1)"""
    gae_lambda: Ratio = 0.9
    """lambda of the generalised advantage estimate (authors: 1, the advantage of Eq. 3)"""
    goal_batch_norm: bool = False
    """normalise goal states over the batch, as the authors do; by default, each alone, as in acting"""
    augment: bool = True
    """mirror and shift goal states at random (authors: no); without it, the discriminator memorises them"""
    gate_gain: Weight = 4.0
    """multiply the instruction layer's initial weights by this (authors: about 1; all gates then begin nearly equal)"""
    vae_coef: Weight = 1e-3
    """coefficient of the VAE loss; its gradient on the encoder is then about as large as the RL loss's"""
    goal_storage_size: Count = 100_000
    """goal states to keep, on disk; the oldest are overwritten first"""
    freeze_discriminator_at: Annotated[int | None, (1, 10**9)] = None
    """ablation: no GACE loss and fixed discriminator weights after this many updates"""


@dataclass
class Logging:
    """Evaluation, logging, resuming."""

    eval_every: Count = 10_000
    """updates between two evaluations"""
    episodes: Count = 500
    """episodes of an evaluation, on each split"""
    accuracy_states: Count = 100
    """goal states per split to measure the discriminator's accuracy on; a random policy collects them"""
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
        self.num_workers = min(self.num_workers, self.num_envs)


PAPER = {"learning_rate": 7e-5, "anneal_lr": False, "max_grad_norm": 10.0, "entropy_coef": 0.01, "value_coef": 0.5}
PAPER |= {"learning_rate_warmup": 0, "adam_epsilon": 1e-3, "reward_scale": 1.0, "gae_lambda": 1.0}
PAPER |= {"goal_batch_size": 50, "goal_batch_norm": True, "augment": False, "gate_gain": 1.0}

NEEDS = [  # a flag, its value, and the flags that have no effect with another value
    ("aux", "gace", "gdan warmup goal_batch_size eta epsilon_n goal_batch_norm augment goal_storage_size"),
    ("aux", "gace", "accuracy_states freeze_discriminator_at"),
    ("aux", "vae", "vae_coef"),
    ("track", True, "wandb_project_name wandb_entity"),
]


def flag(name):
    return "--" + name.replace("_", "-")


def make_env(task, split="seen"):
    """Makes the environment. To train on another one, see "Copying a script" in the README."""
    return gym.make(f"gace/{task.upper()}-v0", split=split)


@functools.cache
def sizes(task):
    """Returns the shape of an image, the number of goals and the number of actions."""
    try:
        env = make_env(task)
    except gym.error.Error as error:  # for example, there is no renderer
        raise SystemExit(str(error)) from None
    return env.observation_space["image"].shape, int(env.observation_space["goal"].n), int(env.action_space.n)


# ------------------------------------------------------------------------------------------------------------ networks


class FeatureExtractor(nn.Module):
    """sigma: encodes an image as e (Eq. 1)."""

    def __init__(self, image_shape):
        super().__init__()
        channels = (image_shape[0], 32, 32, 64, 64)
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, 2, 1) for i, o in zip(channels[:-1], channels[1:], strict=True))
        self.norms = nn.ModuleList(nn.BatchNorm2d(o, track_running_stats=False) for o in channels[1:])
        height, width = (math.ceil(side / 16) for side in image_shape[1:])  # after four strides of 2
        self.linear = nn.Linear(64 * height * width, 256)

    def forward(self, images, per_frame):
        """Encodes images (batch, 16, 42, 42); each is normalised by itself if `per_frame`, else over the batch."""
        # The authors' batch normalisation keeps no running statistics, and sees one frame at a time, except for goal
        # states. group_norm with one group per channel does the same for many frames at once.
        layout = torch.contiguous_format if per_frame else torch.channels_last  # the faster one for each norm
        x = images.to(memory_format=layout) / 255
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = conv(x)
            x = F.group_norm(x, x.shape[1], norm.weight, norm.bias, norm.eps) if per_frame else norm(x)
            x = F.relu_(x)
        return F.relu(self.linear(x.flatten(1)))  # (batch, 256)


class GoalDiscriminator(nn.Module):
    """d: predicts the goal that an encoding belongs to (Eq. 7). Its hidden layer is the query of GDAN."""

    def __init__(self, classes):
        super().__init__()
        self.hidden = nn.Linear(256, 256)
        self.output = nn.Linear(256, classes)

    def query(self, features):
        return F.relu(self.hidden(features))

    def forward(self, features):
        return self.output(self.query(features))  # (batch, classes)


class ActorCritic(nn.Module):
    """f: computes policy and value from an encoding and an instruction (Eq. 2)."""

    def __init__(self, goals, actions, gdan):
        super().__init__()
        self.embedding = nn.Embedding(goals, 25)
        self.instruction = nn.Linear(25, 256)
        self.lstm = nn.LSTM(512, 256)
        self.gdan = gdan
        if gdan:
            self.key_value = nn.Linear(512, 512)
            self.w_q = nn.Linear(256, 256)
            self.w_k = nn.Linear(256, 256)
            self.combine = nn.Linear(512, 256)
        width = 256 if gdan else 512
        self.policy = nn.Sequential(
            nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, actions)
        )
        self.value = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def gated(self, features, goals):
        """Gated attention: the instruction selects features. Returns M and the gate."""
        gate = torch.sigmoid(self.instruction(self.embedding(goals)))
        return features * gate, gate

    def heads(self, gated, lstm_output, query):
        """Computes policy and value from M, the LSTM's output and the query of the goal-discriminator."""
        x = torch.cat([gated, lstm_output], -1)
        if self.gdan:
            # This layer and the ReLUs are in the authors' code. In the paper, the LSTM's output is split into key and
            # value, and Eq. 10 has no ReLU. h is concatenated with the LSTM's output, as in Appendix B.2 (Section 3.4:
            # with M).
            key, value = F.relu(self.key_value(x)).chunk(2, -1)
            attention = torch.tanh(F.relu(self.w_q(query)) + F.relu(self.w_k(key)))  # u (Eq. 10)
            attended = value * attention  # h (Eq. 11)
            x = F.relu(self.combine(torch.cat([attended, lstm_output], -1)))
        return self.policy(x), self.value(x).squeeze(-1)


class VAE(nn.Module):
    """The head of the A3C+VAE baseline: maps an encoding to a Gaussian latent and decodes it to an image."""

    def __init__(self, image_shape, latent=64):
        super().__init__()
        channels, self.height, self.width = image_shape
        self.gaussian = nn.Linear(256, 2 * latent)
        small = 64, math.ceil(self.height / 16), math.ceil(self.width / 16)
        self.linear = nn.Sequential(nn.Linear(latent, math.prod(small)), nn.Unflatten(1, small))
        self.deconvs = nn.ModuleList(
            nn.ConvTranspose2d(i, o, 3, 2, 1, output_padding=1)  # doubles the size
            for i, o in ((64, 64), (64, 32), (32, 32), (32, channels))
        )

    def forward(self, features):
        mean, log_variance = self.gaussian(features).chunk(2, -1)
        latent = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        images = self.linear(latent)
        for deconv in self.deconvs:
            images = deconv(F.relu(images))
        return images[..., : self.height, : self.width], mean, log_variance


class Agent(nn.Module):
    """All networks of one agent."""

    def __init__(self, args):
        super().__init__()
        image_shape, goals, actions = sizes(args.task)
        if args.aux == "rad":
            image_shape = crop(np.zeros(image_shape)).shape
        self.feature_extractor = FeatureExtractor(image_shape)
        self.goal_discriminator = GoalDiscriminator(goals + (args.epsilon_n > 0))  # with a class for negatives
        self.actor_critic = ActorCritic(goals, actions, args.gdan)
        self.goal_batch_norm = args.goal_batch_norm
        self.vae = VAE(image_shape) if args.aux == "vae" else None
        # Orthogonal weights and no biases, also with --paper. The authors use PyTorch's initialisation, with which the
        # policy hardly depends on the state.
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and "embedding" not in name:
                nn.init.orthogonal_(parameter, 1 if "lstm" in name else 2**0.5)
            elif "norm" not in name and "embedding" not in name:
                nn.init.zeros_(parameter)
        self.actor_critic.instruction.weight.data *= args.gate_gain
        nn.init.orthogonal_(self.actor_critic.policy[-1].weight, 0.1)
        nn.init.orthogonal_(self.actor_critic.value[-1].weight, 0.1)

    @torch.no_grad()
    def act(self, images, goals, lstm_state):
        """One step in several environments: images (envs, 16, 42, 42), goals (envs,), LSTM state (2, envs, 256)."""
        features = self.feature_extractor(images, per_frame=True)
        gated, gate = self.actor_critic.gated(features, goals)
        weights = self.actor_critic.lstm.all_weights[0]
        lstm_state = torch.stack(torch.lstm_cell(torch.cat([gated, gate], -1), tuple(lstm_state), *weights))
        logits, value = self.actor_critic.heads(gated, lstm_state[0], self.goal_discriminator.query(features))
        return logits, value, lstm_state

    def forward(self, images, goals):
        """A whole episode: images (steps, 16, 42, 42), goals (steps,). Returns logits, values and features."""
        features = self.feature_extractor(images, per_frame=True)
        gated, gate = self.actor_critic.gated(features, goals)
        lstm_output = self.actor_critic.lstm(torch.cat([gated, gate], -1)[:, None])[0][:, 0]
        # Not detached: the RL loss trains it too, as in the authors' code. Section 3.3 can be read otherwise.
        query = self.goal_discriminator.query(features)
        return *self.actor_critic.heads(gated, lstm_output, query), features

    def classify(self, images):
        """Returns the logits of the goals that goal states belong to (Eq. 6 and 7)."""
        return self.goal_discriminator(self.feature_extractor(images, per_frame=not self.goal_batch_norm))


# -------------------------------------------------------------------------------------------------------- goal storage


class GoalStorage:
    """A ring of goal states and their labels in a file, shared by all workers."""

    def __init__(self, path, image_shape, capacity, count, lock):
        self.file = os.open(path, os.O_RDWR | os.O_CREAT)
        self.image_shape = image_shape
        self.record_bytes = math.prod(image_shape) + 1  # a state and its label
        self.capacity, self.lock = capacity, lock
        self.count = count  # goal states ever added: a shared tensor

    def __len__(self):
        return min(int(self.count), self.capacity)

    def add(self, state, label):
        with self.lock:
            slot = int(self.count) % self.capacity
            record = state.tobytes() + bytes([label])
            if os.pwrite(self.file, record, slot * self.record_bytes) < self.record_bytes:
                raise OSError("the disk is full")
            self.count += 1

    def sample(self, batch_size, rng):
        records = np.empty((batch_size, self.record_bytes), np.uint8)
        for record, slot in zip(records, rng.integers(len(self), size=batch_size).tolist(), strict=True):
            os.preadv(self.file, [record], slot * self.record_bytes)
        return records[:, :-1].reshape(-1, *self.image_shape), records[:, -1].astype(np.int64)


def augmented(states, rng, shift=3):
    """Mirrors states left to right with probability 0.5 and shifts them by up to 3 pixels; the edges are repeated."""
    padded = np.pad(states, ((0, 0), (0, 0), (shift, shift), (shift, shift)), "edge")
    changed = np.empty_like(states)
    height, width = states.shape[2:]
    for new, old, mirrored in zip(changed, padded, rng.random(len(states)) < 0.5, strict=True):
        y, x = rng.integers(2 * shift + 1, size=2)
        new[:] = old[:, y : y + height, x : x + width][..., :: -1 if mirrored else 1]
    return changed


# -------------------------------------------------------------------------------------------------------------- losses


def discounted_sums(rewards, gamma):
    """R_t = r_t + gamma R_{t+1}, for every step of an episode."""
    sums, following = torch.empty(len(rewards)), 0.0
    for t in reversed(range(len(rewards))):
        sums[t] = following = rewards[t] + gamma * following
    return sums


def estimate_advantages(rewards, values, gamma, gae_lambda):
    """Generalised advantage estimate; with lambda 1 it is R_t - V(s_t), the advantage of Eq. 3."""
    # A time-out is not bootstrapped, as in the authors' code.
    deltas = [r + gamma * v2 - v for r, v, v2 in zip(rewards, values, [*values[1:], 0.0], strict=True)]
    return discounted_sums(deltas, gamma * gae_lambda)


def policy_loss(logits, actions, advantages, entropy_coef):
    """Eq. 3 as a loss to minimise, summed over the steps, as in the authors' code. Also returns the mean entropy."""
    log_probs = F.log_softmax(logits, -1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    taken = log_probs.gather(-1, actions[:, None])[:, 0]
    return -(taken * advantages).sum() - entropy_coef * entropies.sum(), entropies.mean()


def value_loss(values, returns):
    """Eq. 4, summed over the steps of the episode."""
    return (returns - values).square().sum()


def gace_loss(goal_logits, goal_labels):
    """Goal-aware cross-entropy (Eq. 8), as a mean over the batch; the paper writes a sum, the authors use a mean."""
    return F.cross_entropy(goal_logits, goal_labels)


def vae_loss(vae, features, images):
    """The A3C+VAE baseline: reconstruction error of every state of the episode, plus the latent's KL divergence."""
    decoded, mean, log_variance = vae(features)  # World Models trains its VAE alone; here it shares the encoder
    reconstruction = F.mse_loss(decoded, images.float() / 255, reduction="none").sum((1, 2, 3))
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1)
    return (reconstruction + divergence).mean()


# ------------------------------------------------------------------------------------------------------------- playing


def crop(image, place=(0.5, 0.5)):
    """Crops 6/7 of height and width (RAD: 84 of 100 pixels). (0, 0) is the upper left, (0.5, 0.5) the middle."""
    height, width = image.shape[-2:]
    y, x = (int(share * (side - side * 6 // 7 + 1)) for share, side in zip(place, (height, width), strict=True))
    return image[..., y : y + height * 6 // 7, x : x + width * 6 // 7]


class Episode:
    """One environment and its current episode."""

    def __init__(self, args, split="seen"):
        self.rad, self.env = args.aux == "rad", make_env(args.task, split)
        _, self.num_goals, self.num_actions = sizes(args.task)

    def begin(self, seed, goal=None, center_crop=False, blind=False):
        self.seed, self.rng = seed, np.random.default_rng(seed)
        self.images, self.actions, self.rewards = [], [], []
        # RAD: one crop per episode, because the LSTM compares the frames of an episode.
        self.place = (0.5, 0.5) if center_crop else self.rng.random(2)
        options = {"goal": goal, "blind": blind}
        observation, _ = self.env.reset(seed=int(self.rng.integers(2**31)), options=options)
        self.goal, self.image, self.over = int(observation["goal"]), self.view(observation), False

    def view(self, observation):
        return crop(observation["image"], self.place) if self.rad else observation["image"]

    def step(self, action):
        observation, reward, self.terminated, truncated, self.info = self.env.step(action)
        self.images.append(self.image)
        self.actions.append(action)
        self.rewards.append(reward)
        self.image, self.over = self.view(observation), self.terminated or truncated

    def goal_state(self):
        """Auto-labelling: returns the state to store and its label, or None.

        A success is labelled with its instruction. A time-out is a negative. An episode that ends on another target is
        not stored (Appendix B.1). Section 3.2 stores the state in which the goal is reached, Algorithm 1 the last state
        acted in. The authors' code stores the state before that one, because in the last state acted in the goal is
        often out of view. We follow the code."""
        if len(self.rewards) == 1:  # the authors skip episodes of one step
            return None
        if self.info["is_success"]:
            return self.images[-2], self.goal
        return None if self.terminated else (self.images[-1], self.num_goals)


def play(agent, episodes, policy, device="cpu", on_step=lambda: None):
    """Plays all episodes to their end, acting in one batch. `policy` is "random", "sampled" or "greedy"."""
    lstm_state = torch.zeros(2, len(episodes), 256, device=device)
    while episodes:
        on_step()
        logits, noise = 0.0, 0.0
        if policy != "random":
            images = torch.from_numpy(np.stack([episode.image for episode in episodes])).to(device)
            goals = torch.tensor([episode.goal for episode in episodes], device=device)
            logits, _, lstm_state = agent.act(images, goals, lstm_state)
            logits = logits.cpu().numpy()
        if policy != "greedy":  # adding Gumbel noise and taking the maximum draws from the softmax
            noise = np.stack([episode.rng.gumbel(size=episode.num_actions) for episode in episodes])
        for episode, action in zip(episodes, np.argmax(logits + noise, -1).tolist(), strict=True):
            episode.step(action)
        if any(episode.over for episode in episodes):
            lstm_state = lstm_state[:, [not episode.over for episode in episodes]]
            episodes = [episode for episode in episodes if not episode.over]


def evaluate(args, agent, split, goal_states, goal=None, on_step=lambda: None, on_end=lambda episode: None, num_envs=8):
    """Plays the same `args.episodes` episodes every time, with the most likely action. Returns a row of metrics."""
    episodes = [Episode(args, split) for _ in range(min(num_envs, args.episodes))]
    results, bar = [], tqdm(desc=f"evaluating {split}", total=args.episodes, unit=" episodes", **BAR, leave=False)
    while len(results) < args.episodes:
        batch = episodes[: args.episodes - len(results)]
        for seed, episode in enumerate(batch, len(results)):
            episode.begin([2**31, seed], goal, center_crop=True)
        play(agent, batch, "greedy", on_step=on_step)
        for episode in batch:
            results.append((episode.info["is_success"], len(episode.rewards), sum(episode.rewards)))
            on_end(episode)
        bar.update(len(batch))
    bar.close()
    for episode in episodes:
        episode.env.close()
    row = dict(zip(("success_ratio", "episode_length", "episode_return"), np.mean(results, 0).tolist(), strict=True))
    accuracy = discriminator_accuracy(args, agent, *goal_states[split]) if goal_states else float("nan")
    return {"split": split, "discriminator_accuracy": accuracy, **row}


def collect_goal_states(args, split, on_step):
    """Goal states of a random policy, equally many of each class. They are the same in every run."""
    episode, states, labels = Episode(args, split), [], []
    for seed in itertools.count():
        label = len(labels) % (episode.num_goals + (args.epsilon_n > 0))
        episode.begin([2**31 + 1, seed], goal=label % episode.num_goals, blind=True)
        play(None, [episode], "random", on_step=on_step)
        found = episode.goal_state()
        if found and found[1] == label:  # play it again with images
            episode.begin([2**31 + 1, seed], goal=episode.goal)
            play(None, [episode], "random")
            states.append(episode.goal_state()[0])
            labels.append(label)
        if len(labels) == args.accuracy_states:
            episode.env.close()
            return torch.from_numpy(np.stack(states)), torch.tensor(labels)


@torch.no_grad()
def discriminator_accuracy(args, agent, states, labels):
    """Share of goal states that the discriminator classifies correctly."""
    # In batches of the training size: --goal-batch-norm depends on the batch.
    guesses = torch.cat([agent.classify(batch).argmax(-1) for batch in states.split(args.goal_batch_size)])
    return (guesses == labels).float().mean().item()


# ------------------------------------------------------------------------------------------------------------ learning


def flatten(agent):
    """Moves all parameters into one vector and all gradients into another. Returns both vectors.

    One vector is faster to share, to clip and to step than forty tensors."""
    vector = nn.utils.parameters_to_vector(agent.parameters()).detach()
    gradient = torch.zeros_like(vector)
    offset = 0
    for parameter in agent.parameters():
        part = slice(offset, offset + parameter.numel())
        parameter.data = vector[part].view_as(parameter)
        parameter.grad = gradient[part].view_as(parameter)
        offset += parameter.numel()
    return vector, gradient


def learn(args, agent, gradient, episode, storage, frozen, device):
    """Computes the clipped gradient of the overall loss (Eq. 9) for one episode. Returns the scalars to log."""
    images = torch.from_numpy(np.stack(episode.images)).to(device)  # (steps, 16, 42, 42)
    actions = torch.tensor(episode.actions, device=device)
    rewards = [reward * args.reward_scale for reward in episode.rewards]
    returns = discounted_sums(rewards, args.gamma).to(device)

    agent.goal_discriminator.requires_grad_(not frozen)
    logits, values, features = agent(images, torch.full_like(actions, episode.goal))
    advantages = estimate_advantages(rewards, values.tolist(), args.gamma, args.gae_lambda).to(device)
    loss_p, entropy = policy_loss(logits, actions, advantages, args.entropy_coef)
    loss_v = value_loss(values, returns)
    loss = loss_p + args.value_coef * loss_v  # Eq. 5
    report = {
        "losses/policy_loss": loss_p,
        "losses/value_loss": loss_v,
        "losses/entropy": entropy,
        "losses/values": values.mean(),
    }
    if args.aux == "gace":
        states, labels = storage.sample(args.goal_batch_size, episode.rng)
        states = augmented(states, episode.rng) if args.augment else states
        states, labels = torch.from_numpy(states).to(device), torch.from_numpy(labels).to(device)
        goal_logits = agent.classify(states)
        if labels.max() >= goal_logits.shape[-1]:
            raise OSError("goals.bin is damaged: it contains an unknown label")
        report["losses/gace_loss"] = gace_loss(goal_logits, labels)
        report["losses/batch_accuracy"] = (goal_logits.argmax(-1) == labels).float().mean()
        if not frozen:
            loss = loss + args.eta * report["losses/gace_loss"]  # Eq. 9
    elif args.aux == "vae":
        report["losses/vae_loss"] = vae_loss(agent.vae, features, images)
        loss = loss + args.vae_coef * report["losses/vae_loss"]

    gradient.zero_()
    loss.backward()
    norm = gradient.norm()
    if not torch.isfinite(norm):
        raise FloatingPointError(f"the loss is not finite: {loss.item()}")
    if norm > args.max_grad_norm:
        gradient.mul_(args.max_grad_norm / norm)
    report["losses/gradient_norm"] = norm
    return {name: float(number.detach()) for name, number in report.items()}


def learning_rate(args, update):
    """Rises over the first updates, then falls linearly to 0 if --anneal-lr."""
    rise = min(1, update / max(1, args.learning_rate_warmup))
    return args.learning_rate * rise * (max(0, 1 - (update - 1) / args.total_updates) if args.anneal_lr else 1)


def adam_epsilon(args, update):
    """With --paper, larger at first: the authors' Adam adds epsilon before the bias correction."""
    return args.adam_epsilon / (math.sqrt(1 - 0.999**update) if args.paper else 1)


def worker(index, args, run_folder, adam, counters, totals, snapshot, lock):
    """Plays and learns until the updates are done. All arguments from `adam` on are in shared memory."""
    follow_main_process()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed * 1000 + index)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    agent = Agent(args).to(device)
    local, gradient = flatten(agent)
    (parameters,) = adam.param_groups[0]["params"]
    discriminator_start = agent.goal_discriminator.hidden.weight.storage_offset()
    discriminator_end = discriminator_start + sum(p.numel() for p in agent.goal_discriminator.parameters())
    image_shape = sizes(args.task)[0]
    storage = GoalStorage(run_folder / "goals.bin", image_shape, args.goal_storage_size, counters["goals"], lock)
    episodes = [Episode(args) for _ in range(index, args.num_envs, args.num_workers)]

    while not counters["stop"] and counters["updates"] < args.total_updates:
        # One episode in each environment. The gradient is that of the parameters that played the episode, as with one
        # worker per environment.
        local.copy_(parameters.detach())
        warming_up = args.aux == "gace" and counters["successes"] < args.warmup
        for episode in episodes:
            with lock:
                counters["episodes"] += 1
                number = int(counters["episodes"])
            episode.begin([args.seed, number], blind=warming_up)
        play(agent, episodes, "random" if warming_up else "sampled", device)
        if warming_up:  # replay the episodes that may be stored, this time with images
            again = [episode for episode in episodes if episode.info["is_success"] or args.epsilon_n]
            for episode in again:
                episode.begin(episode.seed)
            play(agent, again, "random")
        for episode in episodes:
            success, labelled = episode.info["is_success"], None
            if args.aux == "gace" and (success or episode.rng.random() < args.epsilon_n):
                labelled = episode.goal_state()
            if labelled:
                storage.add(*labelled)
            with lock:
                if counters["stop"]:
                    break
                counters["env_steps"] += len(episode.rewards)
                counters["successes"] += bool(success and labelled)
                learning = not warming_up and bool(counters["updates"] < args.total_updates)
                learning &= len(episode.rewards) > 1
                counters["updates"] += learning
                update = int(counters["updates"])
            report = {
                "charts/success_ratio": success,
                "charts/nongoal_ratio": episode.terminated and not success,
                "charts/episodic_length": len(episode.rewards),
                "charts/episodic_return": sum(episode.rewards),
            }
            if learning:
                frozen = args.freeze_discriminator_at is not None and update > args.freeze_discriminator_at
                report |= learn(args, agent, gradient, episode, storage, frozen, device)
                if frozen:  # otherwise Adam's momentum would still change the discriminator
                    adam.state[parameters]["exp_avg"][discriminator_start:discriminator_end] = 0
                parameters.grad = gradient.to("cpu")
                group = adam.param_groups[0]
                report["charts/learning_rate"] = group["lr"] = learning_rate(args, update)
                group["eps"] = adam_epsilon(args, update)
                adam.step()
                if update % args.eval_every == 0 and update < args.total_updates:
                    snapshot.copy_(parameters.detach())
                    counters["snapshot"].fill_(update)
            for name, number in report.items():
                totals[index, REPORTED.index(name)] += torch.tensor([number, 1.0])
    for episode in episodes:
        episode.env.close()


def follow_main_process():
    """If the main process dies, the kernel kills this worker (on Linux)."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != mp.parent_process().pid:  # it died before prctl
        os._exit(1)


# ------------------------------------------------------------------------------------------------------------ training

METRICS = "update env_steps seconds split success_ratio discriminator_accuracy episode_length episode_return".split()
COUNTERS = "updates env_steps episodes goals successes".split()
BAR = {"dynamic_ncols": True, "mininterval": 0.5}
REPORTED = """
    charts/success_ratio charts/nongoal_ratio charts/episodic_length charts/episodic_return charts/learning_rate
    losses/policy_loss losses/value_loss losses/entropy losses/values losses/gace_loss losses/batch_accuracy
    losses/vae_loss losses/gradient_norm
""".split()


def algorithm(args):
    frozen = args.freeze_discriminator_at and f"frozen{args.freeze_discriminator_at}"
    parts = ["a3c", args.aux != "none" and args.aux, args.gdan and "gdan", frozen, args.paper and "paper"]
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
        agent = Agent(args)
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
    size = sum(parameter.numel() for parameter in agent.parameters())
    moments = {name: torch.zeros(size) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
    return {
        "args": asdict(args),
        "agent": agent.state_dict(),
        "adam": {"step": torch.tensor(0.0), **moments},
        "counters": dict.fromkeys(COUNTERS, 0),
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


def train(args, run_folder, run):
    """Starts the workers, then logs, evaluates and saves. Returns True if all updates are done."""
    torch.set_num_threads(1)
    agent = Agent(args)
    agent.load_state_dict(run["agent"])
    rows, started = run["rows"], time.monotonic() - run["seconds"]

    # Shared with the workers. The checkpoint holds the same tensors.
    parameters = nn.Parameter(flatten(agent)[0].share_memory_())
    adam = torch.optim.Adam([parameters], amsgrad=True, fused=True)  # workers set learning rate and epsilon
    adam.state[parameters] = run["adam"] = {name: moment.share_memory_() for name, moment in run["adam"].items()}
    run |= {"args": asdict(replace(args, resume=None)), "agent": agent.state_dict()}
    names = *COUNTERS, "stop", "snapshot"
    counters = {name: torch.tensor(run["counters"].get(name, 0)).share_memory_() for name in names}
    totals = torch.zeros(args.num_workers, len(REPORTED), 2, dtype=torch.float64).share_memory_()  # sum and number
    snapshot = parameters.detach().clone().share_memory_()  # the parameters at update counters["snapshot"], to evaluate
    lock = mp.get_context("spawn").Lock()

    splits, evaluated = envs.splits_of(args.task), rows[-1]["update"] if rows else 0
    if counters["updates"] // args.eval_every > evaluated // args.eval_every:  # an evaluation was interrupted
        counters["snapshot"].copy_(counters["updates"])
    signals = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: signals.append(received))
    writer = SummaryWriter(run_folder, purge_step=int(counters["updates"]) + 1)
    writer.add_text("hyperparameters", "|name|value|\n|-|-|\n" + "".join(f"|{k}|{v}|\n" for k, v in vars(args).items()))
    bar, means, logged, saved = None, {}, totals.sum(0), -np.inf

    def save():
        nonlocal saved
        run["counters"] = {name: int(counters[name]) for name in COUNTERS}
        run["seconds"] = time.monotonic() - started
        save_run(run_folder, run)
        saved = time.monotonic()

    def log():
        """Shows the progress, logs and saves. Raises the error of a worker, and KeyboardInterrupt after a signal."""
        nonlocal bar, means, logged
        if signals:
            raise KeyboardInterrupt
        if any(process.exitcode for process in workers.processes):
            counters["stop"].fill_(1)
            workers.join(grace_period=5)
        update, sums = int(counters["updates"]), totals.sum(0)
        if sums[0, 1] - logged[0, 1] >= 500:  # episodes
            means = {k: total / n for k, (total, n) in zip(REPORTED, (sums - logged).tolist(), strict=True) if n}
            logged, steps = sums, int(counters["env_steps"])
            means |= {"charts/env_steps": steps, "charts/SPS": steps / (time.monotonic() - started)}
            for name, number in means.items() if update else ():
                writer.add_scalar(name, number, update)
        done, total, unit = update, args.total_updates, " updates"
        if args.aux == "gace" and not update:  # the warm-up
            done, total, unit = int(counters["successes"]), args.warmup, " goal states"
        if not bar or bar.unit != unit:
            if bar:
                bar.close()
            bar = tqdm(total=total, initial=done, unit=unit, **BAR)
        if means:
            bar.set_postfix_str(f"success {means['charts/success_ratio']:.1%}", refresh=False)
        bar.update(min(done, total) - bar.n)
        if time.monotonic() - saved > args.checkpoint_every:
            save()

    # Workers keep freed memory. Otherwise, new memory pages take a seventh of an update.
    os.environ |= {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**29)}
    # Only the main process handles signals: the workers inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    workers = mp.spawn(worker, (args, run_folder, adam, counters, totals, snapshot, lock), args.num_workers, join=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    finished = False
    try:
        if args.aux == "gace" and not run["goal_states"]:
            run["goal_states"] = {split: collect_goal_states(args, split, log) for split in splits}
        while not finished:
            time.sleep(0.05)
            log()
            ended = not any(process.is_alive() for process in workers.processes)
            if ended and counters["snapshot"] <= evaluated:
                snapshot.copy_(parameters.detach())
                counters["snapshot"].copy_(counters["updates"])
            if counters["snapshot"] > evaluated:
                evaluated = int(counters["snapshot"])
                point = {"update": evaluated, "env_steps": int(counters["env_steps"])}
                point["seconds"] = round(time.monotonic() - started, 1)
                evaluated_agent = Agent(args)  # the workers keep training
                flatten(evaluated_agent)[0].copy_(snapshot)
                new = [
                    point | evaluate(args, evaluated_agent, split, run["goal_states"], on_step=log) for split in splits
                ]
                for row in new:
                    tqdm.write(f"update {evaluated:,}, {row['split']}: success {row['success_ratio']:.1%}", sys.stdout)
                    for name in METRICS[4:]:
                        writer.add_scalar(f"evaluation/{row['split']}_{name}", row[name], evaluated)
                rows += new
                save()
            finished = ended and evaluated >= counters["updates"]
    except KeyboardInterrupt:
        tqdm.write("stopping ...", file=sys.stdout)
    finally:
        counters["stop"].fill_(1)
        deadline = time.monotonic() + 5
        for process in workers.processes:
            process.join(timeout=max(0, deadline - time.monotonic()))
            process.kill()
        for path in workers.error_files:
            Path(path).unlink(missing_ok=True)
        if bar:
            bar.close()
        writer.close()
    save()
    return finished


FIXED = """
    task gdan aux seed epsilon_n goal_storage_size accuracy_states gate_gain freeze_discriminator_at exp_name paper runs
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
        goals = run_folder / "goals.bin"
        stored = min(run["counters"]["goals"], defaults.goal_storage_size) * (math.prod(sizes(defaults.task)[0]) + 1)
        if (goals.stat().st_size if goals.exists() else 0) < stored:
            raise SystemExit(f"{run_folder}/goals.bin has lost goal states: the run cannot be resumed")
    args = read_flags(defaults)
    if run_folder:
        for name in FIXED:
            if getattr(args, name) != getattr(defaults, name):
                raise SystemExit(f"a resumed run cannot change {flag(name)}: it is {getattr(defaults, name)}")
    else:
        run = new_run(args)
        run_folder = Path(args.runs, f"{args.task}__{algorithm(args)}__{args.seed}__{int(time.time())}")
        open_run(run_folder, new=True)
    if args.track:
        import wandb

        name = run_folder.name
        account = {"project": args.wandb_project_name, "entity": args.wandb_entity}
        wandb.init(**account, name=name, id=name, resume="allow", sync_tensorboard=True, config=vars(args))
    print(f"Training {algorithm(args)} on {args.task}, seed {args.seed}. Ctrl-C saves and stops.")
    print("The bar counts updates, one per episode, and shows the time left.")
    if args.aux == "gace" and not run["counters"]["updates"]:
        print(f"The warm-up comes first: a random policy collects {args.warmup:,} goal states.")
    print(f"run folder: {run_folder} (curves: tensorboard --logdir {run_folder.parent})")
    resume = f"python {sys.argv[0]} --resume {run_folder}"
    expected = OSError, FloatingPointError, gym.error.Error
    try:
        finished = train(args, run_folder, run)
    except (mp.ProcessRaisedException, mp.ProcessExitedException, *expected) as error:  # the last checkpoint stays
        problem = str(error).strip()
        last = problem.splitlines()[-1]
        if last.split(":")[0].split(".")[-1] in [kind.__name__ for kind in expected]:
            problem = last  # the traceback adds nothing
        raise SystemExit(f"{problem}\nThe run stopped. Resume with: {resume}") from None
    results = f"results: {run_folder}/metrics.csv\nwatch the agent: python -m tools.enjoy {run_folder}/checkpoint.pt"
    print(results if finished else f"resume: {resume}")


if __name__ == "__main__":
    main()

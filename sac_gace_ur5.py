"""SAC with goal-aware cross-entropy (GACE) and goal-discriminative attention networks (GDAN) on R1 to R3.

Paper: "Goal-Aware Cross-Entropy for Multi-Target Reinforcement Learning" (NeurIPS 2021), Algorithm 1.

    python sac_gace_ur5.py --task r2 --gdan                       # train SAC+GACE&GDAN
    python sac_gace_ur5.py --task r1 --aux none                   # train a baseline: none, ae or curl
    python sac_gace_ur5.py --evaluate runs/RUN/checkpoint.pt --capture-video

One process: it steps the environments in turn, stores every frame once in a file, and learns from random batches.
"""

import copy
import csv
import ctypes
import json
import mmap
import os
import shutil
import signal
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from PIL import Image, ImageDraw
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import envs


@dataclass
class Args:
    task: Literal["r1", "r2", "r3"] = "r1"
    """the task: three boxes (r1), on random checkered backgrounds (r2); three boxes of five colours (r3)"""
    gdan: bool = False
    """use the goal-discriminative attention networks (needs --aux gace)"""
    aux: Literal["gace", "ae", "curl", "none"] = "gace"
    """what is learned beside the RL loss: gace (the paper's), ae (autoencoder), curl (contrastive crops), or none"""
    seed: int = 1
    """seed of the parameters and of every episode"""
    total_updates: int = 200_000
    """number of updates"""

    # The paper's table of hyperparameters
    warmup: int = 50_000
    """environment steps with a random policy before the first update (paper: 10,000, about 4 successes a box)"""
    epsilon_n: float = 0.05
    """probability to store the last state of an episode that reached nothing, as a class of its own (warm-up: 1)"""
    tau: float = 0.005
    """how far the target networks move in one update of them"""
    batch_size: int = 128
    """transitions in one SAC loss"""
    goal_batch_size: int = 128
    """goal states in one GACE loss"""
    hidden_size: int = 256
    """features of the encoder, and units of every hidden layer"""
    target_update_interval: int = 1
    """updates between two updates of the target networks"""
    replay_size: int = 1_000_000
    """frames kept, on disk (21 KB each, 21 GB when full); the oldest go first"""
    goal_storage_size: int = 500_000
    """goal states kept, on disk; the oldest go first"""
    eta: float = 0.5
    """coefficient of the GACE loss (Eq. 9), or of the loss of ae or curl; the paper recommends 0.3 to 0.5"""
    gamma: float = 0.99
    """discount"""
    learning_rate: float = 3e-4
    """of Adam (paper: 7e-5)"""
    entropy_coef: float = 0.01
    """coefficient of the entropy, of the gaussian policy only"""

    # What the paper leaves out
    policy: Literal["deterministic", "gaussian"] = "deterministic"
    """deterministic: tanh(mean) with clipped Gaussian noise, no entropy term (the paper's); gaussian: drawn, with it"""
    exploration_noise: float = 0.2
    """standard deviation of the deterministic policy's noise"""
    action_penalty: float = 1e-3
    """weight of the squared action before the tanh in the actor's loss; without it actions stick to their limits"""
    n_step: int = 5
    """rewards summed in the critic's target before it asks for the next value (SAC: 1)"""
    num_envs: int = 8
    """environments that act in one batch, at most --env-steps-per-update"""
    env_steps_per_update: int = 32
    """environment steps between two updates; what there is to learn from is rare, and steps are cheap"""
    concat_query: bool = False
    """ablation: the actor-critic concatenates the query of GDAN instead of attending with it (needs --gdan)"""
    fixed_goal: str | None = None
    """ablation: a single-target policy, for this goal only: red, green, blue ..."""

    # Evaluation, logging, resuming
    eval_every: int = 5_000
    """updates between two evaluations"""
    episodes: int = 100
    """episodes of an evaluation, on each split"""
    checkpoint_every: float = 60.0
    """seconds between two checkpoints"""
    resume: Path | None = None
    """go on with the run in this folder, with its own arguments but for those given now, such as --total-updates"""
    evaluate: Path | None = None
    """evaluate this checkpoint instead of training"""
    split: Literal["seen", "unseen"] | None = None
    """with --evaluate: this split only"""
    goal: str | None = None
    """with --evaluate: this goal only, by name"""
    capture_video: bool = False
    """with --evaluate: write a video of a few episodes beside the checkpoint"""
    track: bool = False
    """log to Weights and Biases as well (needs `pip install wandb`)"""
    cuda: bool = field(default_factory=torch.cuda.is_available)
    """compute on a GPU; by default where there is one"""


# ------------------------------------------------------------------------------------------------------------ networks

SIDE = 84  # of an image
CROP = 72  # of 84, about the proportion of CURL's 84 of 100


class FeatureExtractor(nn.Module):
    """sigma: an image to its encoding e (Eq. 1). That of the navigation model: batch normalisation follows every
    convolution, by the batch in learning and by running statistics in acting and in the target. Only its end is that of
    pixel SAC's usual encoder (SAC+AE, CURL): without the normalisation and the tanh, the encoding grows until the
    critic hardly hears the six numbers of the action beside it."""

    def __init__(self, side, hidden_size):
        super().__init__()
        channels = (3, 32, 32, 64, 64)
        self.convs = nn.ModuleList(  # without biases: the normalisation would take them away again
            nn.Conv2d(i, o, 3, 2, 1, bias=False) for i, o in zip(channels[:-1], channels[1:], strict=True)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for o in channels[1:])
        for _ in self.convs:
            side = (side + 1) // 2
        self.linear = nn.Linear(64 * side * side, hidden_size)
        self.layer_norm = nn.LayerNorm(hidden_size)

    def forward(self, images):
        x = images.float()  # (batch, 3, 84, 84)
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            weight = conv.weight / 255 if i == 0 else conv.weight  # states within [0, 1]
            x = F.relu_(norm(F.conv2d(x, weight, stride=2, padding=1)))
        return torch.tanh(self.layer_norm(self.linear(x.flatten(1))))  # (batch, 256)


class GoalDiscriminator(nn.Module):
    """d: an encoding to the goal it belongs to (Eq. 7), or to none. Its hidden layer is the query of GDAN."""

    def __init__(self, hidden_size, classes):
        super().__init__()
        self.hidden = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, classes)

    def query(self, features):
        return F.relu(self.hidden(features))

    def forward(self, features):
        return self.output(self.query(features))  # (batch, classes)


class GoalConditioning(nn.Module):
    """The part of f that actor and critic each have of their own: gated attention by the instruction, one linear layer
    in place of the navigation model's LSTM, and GDAN."""

    def __init__(self, args, goals):
        super().__init__()
        size = args.hidden_size
        self.embedding = nn.Embedding(goals, 25)
        self.instruction = nn.Linear(25, size)
        self.linear = nn.Linear(2 * size, size)
        self.gdan, self.concat_query = args.gdan, args.concat_query
        self.out_features = size if args.gdan else 2 * size
        if self.gdan:
            if not self.concat_query:
                self.key_value = nn.Linear(2 * size, 2 * size)
                self.w_q = nn.Linear(size, size)
                self.w_k = nn.Linear(size, size)
            self.combine = nn.Linear(2 * size, size)

    def forward(self, features, query, goals):
        gate = torch.sigmoid(self.instruction(self.embedding(goals)))
        gated = features * gate  # M
        memory = F.relu(self.linear(torch.cat([gated, gate], -1)))  # e^1, where the navigation model has the LSTM
        if not self.gdan:
            return torch.cat([gated, memory], -1)
        if self.concat_query:
            return F.relu(self.combine(torch.cat([query, memory], -1)))
        key, value = F.relu(self.key_value(torch.cat([gated, memory], -1))).chunk(2, -1)
        # The ReLUs are those of the authors' navigation code; the paper's Eq. 10 has none.
        attention = torch.tanh(F.relu(self.w_q(query)) + F.relu(self.w_k(key)))  # u (Eq. 10)
        attended = value * attention  # h (Eq. 11)
        return F.relu(self.combine(torch.cat([attended, memory], -1)))


def mlp(inputs, hidden, outputs):
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


class Actor(nn.Module):
    def __init__(self, args, goals, actions):
        super().__init__()
        self.conditioning = GoalConditioning(args, goals)
        self.gaussian, self.actions = args.policy == "gaussian", actions
        self.noise = args.exploration_noise
        self.head = mlp(self.conditioning.out_features, args.hidden_size, actions * (2 if self.gaussian else 1))

    def forward(self, features, query, goals, explore=True):
        """Actions (batch, 6), their log-probabilities (batch,), which are 0 for the deterministic policy, and the mean
        before the tanh (batch, 6)."""
        mean, *log_std = self.head(self.conditioning(features, query, goals)).split(self.actions, -1)
        if not explore:
            return torch.tanh(mean), torch.zeros_like(mean[:, 0]), mean
        if not self.gaussian:
            noise = (self.noise * torch.randn_like(mean)).clamp(-2.5 * self.noise, 2.5 * self.noise)
            return (torch.tanh(mean) + noise).clamp(-1, 1), torch.zeros_like(mean[:, 0]), mean
        normal = torch.distributions.Normal(mean, log_std[0].clamp(-10, 2).exp())
        before_tanh = normal.rsample()
        log_probs = normal.log_prob(before_tanh) - 2 * (np.log(2) - before_tanh - F.softplus(-2 * before_tanh))
        return torch.tanh(before_tanh), log_probs.sum(-1), mean


class Critic(nn.Module):
    """Two Q-functions, of which the smaller counts."""

    def __init__(self, args, goals, actions):
        super().__init__()
        self.conditioning = GoalConditioning(args, goals)
        self.heads = nn.ModuleList(mlp(self.conditioning.out_features + actions, args.hidden_size, 1) for _ in range(2))

    def forward(self, features, query, goals, actions):
        x = torch.cat([self.conditioning(features, query, goals), actions], -1)
        return torch.stack([head(x).squeeze(-1) for head in self.heads])  # (2, batch)


class Decoder(nn.Module):
    """The baseline SAC+AE: encodings back to the image."""

    def __init__(self, hidden_size):
        super().__init__()
        self.linear = nn.Linear(hidden_size, 64 * 6 * 6)
        self.deconvs = nn.Sequential(
            nn.ConvTranspose2d(64, 64, 3, 2, 1),  # 6 to 11
            nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 3, 2, 1),  # 11 to 21
            nn.ReLU(),
            nn.ConvTranspose2d(32, 32, 3, 2, 1, output_padding=1),  # 21 to 42
            nn.ReLU(),
            nn.ConvTranspose2d(32, 3, 3, 2, 1, output_padding=1),  # 42 to 84
        )

    def forward(self, features):
        return self.deconvs(F.relu(self.linear(features)).view(-1, 64, 6, 6))


class Agent(nn.Module):
    def __init__(self, args, goals, actions=6):
        super().__init__()
        size = args.hidden_size
        self.feature_extractor = FeatureExtractor(CROP if args.aux == "curl" else SIDE, size)
        self.goal_discriminator = GoalDiscriminator(size, goals + 1)
        self.actor = Actor(args, goals, actions)
        self.critic = Critic(args, goals, actions)
        self.decoder = Decoder(size) if args.aux == "ae" else None
        self.contrast = nn.Parameter(torch.rand(size, size) / size) if args.aux == "curl" else None
        self.to(memory_format=torch.channels_last)  # twice as fast on a CPU

    def query(self, features):
        return self.goal_discriminator.query(features) if self.actor.conditioning.gdan else None

    def act(self, images, goals, explore):
        features = self.feature_extractor(images)
        return self.actor(features, self.query(features), goals, explore)[0]


# ----------------------------------------------------------------------------------------------- replay, goal storage


class ReplayBuffer:
    """Every frame once, in memory-mapped files: they may outgrow the memory, take up disk only as they fill, and stay
    when the process is killed (but what a full ring overwrote since the last checkpoint is overwritten). The
    environments take turns, so that a step's next frame is as many records on as there are environments; an episode
    ends in a frame without one."""

    step = np.dtype([("action", "f4", 6), ("reward", "f4"), ("goal", "u1"), ("terminal", "?"), ("usable", "?")])

    def __init__(self, folder, capacity, num_envs, count=0):
        def open_file(name, dtype, *shape):
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            with open(folder / name, "a+b") as file:
                file.truncate(size)
                memory = mmap.mmap(file.fileno(), size)
            if hasattr(memory, "madvise"):  # not to read megabytes of neighbours with every frame
                memory.madvise(mmap.MADV_RANDOM)
            return memory, np.frombuffer(memory, dtype).reshape(shape)

        self.memory, self.frames = open_file("replay_frames.bin", np.uint8, capacity, SIDE, SIDE, 3)
        _, self.steps = open_file("replay_steps.bin", self.step, capacity)
        self.capacity, self.num_envs = capacity, num_envs
        self.count = count  # how many frames were ever added

    def add(self, image, action=0.0, reward=0.0, goal=0, terminal=False, usable=True):
        slot = self.count % self.capacity
        self.frames[slot] = image.transpose(1, 2, 0)
        self.steps[slot] = (action, reward, goal, terminal, usable)
        self.count += 1

    def sample(self, batch_size, rng, n_step, gamma):
        """Random steps, each with the discounted rewards of the n that begin with it, or of as many as there are, the
        image after them, and the discount of its value: 0 where the episode ended by reaching a box."""
        chosen = np.empty(0, np.int64)
        end = self.count - self.num_envs  # the newest frames have no next one yet
        while len(chosen) < batch_size:
            drawn = rng.integers(max(0, self.count - self.capacity), end, 2 * batch_size)
            chosen = np.concatenate([chosen, drawn[self.steps["usable"][drawn % self.capacity]]])
        chosen = chosen[:batch_size]
        following, returns, discounts = chosen.copy(), np.zeros(batch_size, "f4"), np.ones(batch_size, "f4")
        for _ in range(n_step):
            steps = self.steps[following % self.capacity]
            goes_on = steps["usable"] & (following < end)
            returns += np.where(goes_on, discounts * steps["reward"], 0)
            discounts *= np.where(goes_on, gamma * ~steps["terminal"], 1)
            following += goes_on * self.num_envs
        steps = self.steps[chosen % self.capacity]
        images, next_images = (self.images_of(indices % self.capacity) for indices in (chosen, following))
        actions, goals = torch.from_numpy(steps["action"].copy()), torch.from_numpy(steps["goal"].astype("i8"))
        return images, actions, torch.from_numpy(returns), next_images, torch.from_numpy(discounts), goals

    def images_of(self, slots):
        if hasattr(self.memory, "madvise"):  # has the disk look for all of them at once
            frame = self.frames[0].nbytes
            for start in (slots * frame // mmap.PAGESIZE * mmap.PAGESIZE).tolist():
                self.memory.madvise(mmap.MADV_WILLNEED, start, min(2 * frame, len(self.memory) - start))
        return torch.from_numpy(self.frames[slots]).permute(0, 3, 1, 2)  # channels last, as stored


class GoalStorage:
    """Goal states with their automatic labels: a ring of fixed records in a file."""

    record_bytes = SIDE * SIDE * 3 + 1  # a state, channels last, and its label

    def __init__(self, path, capacity, count=0):
        self.file = os.open(path, os.O_RDWR | os.O_CREAT)
        self.capacity = capacity
        self.count = count  # how many were ever added

    def __len__(self):
        return min(self.count, self.capacity)

    def add(self, image, label):
        slot = self.count % self.capacity
        os.pwrite(self.file, image.transpose(1, 2, 0).tobytes() + bytes([label]), slot * self.record_bytes)
        self.count += 1

    def sample(self, batch_size, rng):
        slots = rng.integers(len(self), size=batch_size)
        records = bytearray().join(
            os.pread(self.file, self.record_bytes, slot * self.record_bytes) for slot in slots.tolist()
        )
        records = torch.frombuffer(records, dtype=torch.uint8).view(batch_size, self.record_bytes)
        return records[:, :-1].view(-1, SIDE, SIDE, 3).permute(0, 3, 1, 2), records[:, -1].long()


# -------------------------------------------------------------------------------------------------------------- losses


def critic_target(returns, discounts, next_values, next_log_probs, entropy_coef):
    """What both Q-functions should say: the rewards of the next steps and the discounted soft value of the state after
    them. With one step, as in SAC, the value of a goal state comes back by one step in the 200 updates that the
    target networks take to follow, and an arm that hovers beside a box is told as slowly that it gets nothing there.
    Running out of time does not end the sum at 0: the state says nothing of the time that is left. Of the gaussian
    policy's entropy, that of the last state counts, not that of the steps between."""
    return returns + discounts * (next_values - entropy_coef * next_log_probs)


def critic_loss(values, targets):
    """Of both Q-functions, (2, batch)."""
    return (values - targets).square().mean(-1).sum()


def actor_loss(values, log_probs, means, entropy_coef, action_penalty):
    """The policy takes what the more pessimistic Q-function likes best; only the gaussian one has an entropy term. The
    penalty on the means before the tanh is that of the first SAC: without it, what the Q-functions say before they know
    anything drives every action to its limit, the same in every state, and the arm explores no more."""
    return (entropy_coef * log_probs - values.min(0).values + action_penalty * means.square().sum(-1)).mean()


def gace_loss(goal_logits, goal_labels):
    """Goal-aware cross-entropy (Eq. 8): how well the encoded goal states tell the goals apart. A mean over the batch as
    in the authors' navigation code, where the paper writes a sum."""
    return F.cross_entropy(goal_logits, goal_labels)


def ae_loss(decoder, features, images):
    """The baseline SAC+AE: reconstruction, with a small penalty on the encoding. (Its weight decay on the decoder is in
    the optimiser.)"""
    reconstruction = F.mse_loss(decoder(features), images.float() / 255)
    return reconstruction + 1e-6 * 0.5 * features.square().sum(-1).mean()


def curl_loss(anchors, keys, contrast):
    """The baseline SAC+CURL: each crop should recognise the other crop of its image among those of the batch."""
    logits = anchors @ contrast @ keys.T
    return F.cross_entropy(logits, torch.arange(len(anchors), device=anchors.device))


def crop(images, rng=None):
    """A random crop of each image; without a generator, the middle."""
    if rng is None:
        corner = (SIDE - CROP) // 2
        return images[..., corner : corner + CROP, corner : corner + CROP]
    corners = torch.from_numpy(rng.integers(SIDE - CROP + 1, size=(len(images), 2)))
    return torch.stack([i[:, y : y + CROP, x : x + CROP] for i, (y, x) in zip(images, corners.tolist(), strict=True)])


# ------------------------------------------------------------------------------------------------------------ learning


def learn(args, agent, target, optimizers, replay, storage, rng, device):
    """One update of critic, encoder and auxiliary networks, and one of the actor. The encoder sees states and goal
    states in one batch, and its output serves all three losses."""
    entropy_coef = args.entropy_coef if args.policy == "gaussian" else 0.0
    batch = [tensor.to(device) for tensor in replay.sample(args.batch_size, rng, args.n_step, args.gamma)]
    images, actions, returns, next_images, discounts, goals = batch
    if args.aux == "curl":
        other_images, images, next_images = crop(images, rng), crop(images, rng), crop(next_images, rng)

    with torch.no_grad():
        next_features = target.feature_extractor(next_images)
        next_query = target.query(next_features)
        # The target has an actor of its own, which knows the target's features: no second pass of the encoder.
        next_actions, next_log_probs, _ = target.actor(next_features, next_query, goals)
        next_values = target.critic(next_features, next_query, goals, next_actions).min(0).values
        targets = critic_target(returns, discounts, next_values, next_log_probs, entropy_coef)

    agent.train()  # batch normalisation by the batch
    if args.aux == "gace":
        goal_images, goal_labels = (tensor.to(device) for tensor in storage.sample(args.goal_batch_size, rng))
        features, goal_features = agent.feature_extractor(torch.cat([images, goal_images])).split(
            [args.batch_size, args.goal_batch_size]
        )
    else:
        features = agent.feature_extractor(images)
    agent.eval()
    query = agent.query(features)
    values = agent.critic(features, query, goals, actions)
    loss = critic = critic_loss(values, targets)
    report = {"losses/critic": critic, "charts/value": values.mean()}
    if args.aux == "gace":
        goal_logits = agent.goal_discriminator(goal_features)
        report["losses/gace"] = auxiliary = gace_loss(goal_logits, goal_labels)
        report["charts/discriminator_accuracy"] = (goal_logits.argmax(-1) == goal_labels).float().mean()
    elif args.aux == "ae":
        report["losses/ae"] = auxiliary = ae_loss(agent.decoder, features, images)
    elif args.aux == "curl":
        with torch.no_grad():
            keys = target.feature_extractor(other_images)
        report["losses/curl"] = auxiliary = curl_loss(features, keys, agent.contrast)
    if args.aux != "none":
        loss = loss + args.eta * auxiliary  # Eq. 9
    optimizers["critic"].zero_grad()
    loss.backward()
    optimizers["critic"].step()

    features = features.detach()  # the actor loss trains neither encoder nor discriminator ...
    query = query.detach() if args.gdan else None
    agent.critic.requires_grad_(False)  # ... nor the critic
    new_actions, log_probs, means = agent.actor(features, query, goals, explore=args.policy == "gaussian")
    new_values = agent.critic(features, query, goals, new_actions)
    actor = actor_loss(new_values, log_probs, means, entropy_coef, args.action_penalty)
    optimizers["actor"].zero_grad()
    actor.backward()
    optimizers["actor"].step()
    agent.critic.requires_grad_(True)
    with torch.no_grad():
        if not torch.isfinite(loss + actor + sum(parameter.sum() for parameter in agent.parameters())):
            raise FloatingPointError("a loss or a parameter is not finite")
    report |= {"losses/actor": actor, "charts/action_size": new_actions.abs().mean()}
    return {name: float(number.detach()) for name, number in report.items()}


@torch.no_grad()
def follow(target, agent, tau):
    """Moves the target networks, and their normalisation, a step towards the agent."""
    for mine, theirs in ((target.parameters(), agent.parameters()), (target.buffers(), agent.buffers())):
        pairs = [(m, t) for m, t in zip(mine, theirs, strict=True) if m.is_floating_point()]
        torch._foreach_lerp_(*map(list, zip(*pairs, strict=True)), tau)


# -------------------------------------------------------------------------------------------------- acting, evaluation


@torch.no_grad()
def choose_actions(args, agent, observations, device, explore):
    images = torch.from_numpy(np.stack([o["image"] for o in observations]))
    images = images.to(device, memory_format=torch.channels_last)
    goals = torch.tensor([int(o["goal"]) for o in observations], device=device)
    return agent.act(crop(images) if args.aux == "curl" else images, goals, explore).cpu().numpy()


def evaluate(args, agent, split, device, goal=None, keep_going=lambda: True, on_step=None, episodes=None):
    """Success ratio, length and return without exploration noise, and the accuracy of the goal-discriminator on the
    goal states reached. The same episodes every time."""
    env = gym.make(f"gace/{args.task.upper()}-v0", split=split, render_mode="rgb_array" if on_step else None)
    options = {"goal": goal or args.fixed_goal} if goal or args.fixed_goal else None
    successes, lengths, returns, states, labels = [], [], [], [], []
    for index in range(episodes or args.episodes):
        observation, info = env.reset(seed=2**30 + index, options=options)
        over, length, total = False, 0, 0.0
        while not over:
            if not keep_going():
                env.close()
                return None
            action = choose_actions(args, agent, [observation], device, explore=False)[0]
            if on_step:
                on_step(env, info)
            observation, reward, terminated, truncated, step_info = env.step(action)
            over, length, total = terminated or truncated, length + 1, total + reward
        if on_step:
            on_step(env, info)
        successes.append(step_info["is_success"])
        lengths.append(length)
        returns.append(total)
        if successes[-1]:
            states.append(observation["image"])
            labels.append(int(observation["goal"]))
    env.close()
    accuracy = float("nan")
    if states and args.aux == "gace":
        with torch.no_grad():
            images = torch.from_numpy(np.stack(states)).to(device, memory_format=torch.channels_last)
            guesses = agent.goal_discriminator(agent.feature_extractor(images)).argmax(-1).cpu()
        accuracy = (guesses == torch.tensor(labels)).float().mean().item()
    return {
        "split": split,
        "success_ratio": float(np.mean(successes)),
        "discriminator_accuracy": accuracy,
        "episode_length": float(np.mean(lengths)),
        "episode_return": float(np.mean(returns)),
    }


# ------------------------------------------------------------------------------------------------------------ training

METRICS = "update env_steps seconds split success_ratio discriminator_accuracy episode_length episode_return".split()


def splits_of(task):
    return ["seen", "unseen"] if task == "r2" else ["seen"]


def goals_of(task):
    return list(envs.BOX_COLOURS)[: 5 if task == "r3" else 3]


def algorithm(args):
    name = "sac" + ("" if args.aux == "none" else f"+{args.aux}") + ("+gdan" if args.gdan else "")
    for variant in (args.concat_query and "concat", args.fixed_goal, args.policy == "gaussian" and "gaussian"):
        name += f"+{variant}" if variant else ""  # an ablation is not the method
    return name


def save_atomically(path, content):
    temporary = path.with_suffix(".tmp")
    torch.save(content, temporary)
    os.replace(temporary, path)


def load_checkpoint(path):
    """The checkpoint, its Args and its agent, or one line that says what is wrong with it."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        known = {f.name for f in fields(Args)}
        args = Args(**{k: v for k, v in checkpoint["args"].items() if k in known})
        agent = Agent(args, len(goals_of(args.task))).eval()
        agent.load_state_dict(checkpoint["agent"])  # those in results/ are 16-bit
        return checkpoint, args, agent
    except FileNotFoundError:
        raise SystemExit(f"{path} does not exist") from None
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise SystemExit(f"{path} is not a whole checkpoint of this script: {reason}") from None


def check_disk(args, run_folder):
    """Says at the start that the disk is too small: when it is full, writing to a memory-mapped file kills."""
    frame = SIDE * SIDE * 3
    steps = args.warmup + args.total_updates * args.env_steps_per_update
    goals = min(args.goal_storage_size, steps / 10) * frame if args.aux == "gace" else 0
    needed = min(args.replay_size, steps * 1.1) * frame + goals
    there = next(path for path in (run_folder, *run_folder.parents) if path.exists())
    room = shutil.disk_usage(there).free + sum(path.stat().st_blocks * 512 for path in run_folder.glob("*.bin"))
    if needed > room:
        raise SystemExit(
            f"replay buffer and goal storage need {needed / 1e9:.1f} GB in {run_folder}, where there is room for "
            f"{room / 1e9:.1f} GB: use a --replay-size of at most {max(0, int((room - goals) * 0.9 / frame))}"
        )


def keep_freed_memory():
    """Has the C library keep what is freed. Otherwise it returns the activations of every update to the system and gets
    them back page by page, which takes as long as the arithmetic."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
        libc.mallopt(M_TRIM_THRESHOLD, 2**30)
        libc.mallopt(M_MMAP_THRESHOLD, 2**29)


class Log:
    """A run's metrics.csv, TensorBoard and progress bar. A resumed run drops what came after its checkpoint."""

    def __init__(self, args, run_folder, updates, seconds):
        self.started = time.monotonic() - seconds
        self.path = run_folder / "metrics.csv"
        self.rows = []
        if self.path.exists():
            with open(self.path) as file:
                self.rows = [row for row in csv.DictReader(file) if int(row["update"]) <= updates]
        with open(self.path, "w", newline="") as file:
            csv.writer(file).writerows([METRICS, *([row[name] for name in METRICS] for row in self.rows)])
        self.writer = SummaryWriter(run_folder, purge_step=updates + 1)
        table = "".join(f"|{name}|{value}|\n" for name, value in asdict(args).items())
        self.writer.add_text("hyperparameters", f"|name|value|\n|-|-|\n{table}")
        self.phase, self.bar = None, tqdm(disable=True)

    def seconds(self):
        return time.monotonic() - self.started

    def evaluation(self, row):
        row["seconds"] = round(self.seconds(), 1)
        with open(self.path, "a", newline="") as file:
            csv.writer(file).writerow([row[name] for name in METRICS])
        self.scalars({f"evaluation/{row['split']}_{name}": row[name] for name in METRICS[4:]}, row["update"])
        tqdm.write(describe(row), file=sys.stdout)

    def scalars(self, numbers, update):
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, update)

    def progress(self, phase, unit, done, total, success, accuracy):
        if phase != self.phase:
            self.bar.close()
            self.phase, self.bar = phase, tqdm(desc=phase, total=total, initial=done, unit=unit, dynamic_ncols=True)
        self.bar.set_postfix_str(f"success {success:.1%}{percent(', discriminator', accuracy)}", refresh=False)
        self.bar.update(done - self.bar.n)

    def close(self):
        self.bar.close()
        self.writer.close()


def describe(row):
    return (
        f"update {row['update']:,}, {row['split']}: success {row['success_ratio']:.1%}"
        f"{percent(', discriminator accuracy', row['discriminator_accuracy'])}, length {row['episode_length']:.1f}, "
        f"return {row['episode_return']:.2f}"
    )


def percent(name, number):
    return "" if np.isnan(number) else f"{name} {number:.1%}"  # there may be no discriminator, or no success to name


class Player:
    """One of the environments that fill the replay buffer, and the episode it is in."""

    def __init__(self, args):
        self.args, self.env = args, gym.make(f"gace/{args.task.upper()}-v0")

    def begin(self, episode):
        self.episode, self.steps, self.over = episode, 0, False
        seed = np.random.SeedSequence([self.args.seed, episode]).generate_state(1)[0]
        options = {"goal": self.args.fixed_goal} if self.args.fixed_goal else None
        self.observation, _ = self.env.reset(seed=int(seed), options=options)

    def step(self, action):
        self.observation, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        self.over = terminated or truncated
        return reward, terminated, truncated, info


def train(args, run_folder, checkpoint=None):
    keep_freed_memory()
    device = torch.device("cuda" if args.cuda else "cpu")
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    agent = Agent(args, len(goals_of(args.task))).to(device).eval()
    target = copy.deepcopy(agent).requires_grad_(False)
    rest = [p for name, p in agent.named_parameters() if not name.startswith(("actor.", "decoder."))]
    groups = [{"params": rest}]
    if agent.decoder:
        groups.append({"params": agent.decoder.parameters(), "weight_decay": 1e-7})
    optimizers = {
        "critic": torch.optim.Adam(groups, args.learning_rate, fused=True),
        "actor": torch.optim.Adam(agent.actor.parameters(), args.learning_rate, fused=True),
    }
    counters = dict.fromkeys("updates env_steps replay goals".split(), 0) | {"episodes": args.num_envs}
    counters |= {"episode": list(range(args.num_envs)), "episode_steps": [0] * args.num_envs}  # what each player is in
    if checkpoint:
        counters |= checkpoint["counters"]
        agent.load_state_dict(checkpoint["agent"])
        target.load_state_dict(checkpoint["target"])
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(checkpoint["optimizers"][name])
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate  # which may have been given anew
        rng.bit_generator.state = json.loads(checkpoint["numpy_random"])
        torch.set_rng_state(checkpoint["torch_random"])
    replay = ReplayBuffer(run_folder, args.replay_size, args.num_envs, counters["replay"])
    storage = GoalStorage(run_folder / "goal_states.bin", args.goal_storage_size, counters["goals"])
    log = Log(args, run_folder, counters["updates"], checkpoint["seconds"] if checkpoint else 0)
    signals = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: signals.append(received))

    def save():
        counters.update(replay=replay.count, goals=storage.count)
        counters.update(episode=[p.episode for p in players], episode_steps=[p.steps for p in players])
        content = {
            "args": asdict(replace(args, resume=None)),
            "counters": counters,
            "seconds": log.seconds(),
            "agent": agent.state_dict(),
            "target": target.state_dict(),
            "optimizers": {name: optimizer.state_dict() for name, optimizer in optimizers.items()},
            "numpy_random": json.dumps(rng.bit_generator.state),
            "torch_random": torch.get_rng_state(),
        }
        save_atomically(run_folder / "checkpoint.pt", content)

    evaluated = {(int(row["update"]), row["split"]) for row in log.rows}

    def evaluate_if_due():
        update = counters["updates"]
        if update == 0 or (update % args.eval_every and update != args.total_updates):
            return
        for split in splits_of(args.task):
            if (update, split) in evaluated:
                continue
            row = evaluate(args, agent, split, device, keep_going=lambda: not signals)
            if row is None:  # interrupted: the resumed run makes up for it
                return
            evaluated.add((update, split))
            log.evaluation({"update": update, "env_steps": counters["env_steps"], **row})

    players = [Player(args) for _ in range(args.num_envs)]
    saved = shown = time.monotonic()
    window, reports, report, recent = [], [], {}, deque(maxlen=200)
    try:
        for i, player in enumerate(players):  # in a resumed run, the steps under way are played again
            player.begin(counters["episode"][i])
            first = replay.count + i - counters["episode_steps"][i] * args.num_envs
            for record in range(first, replay.count, args.num_envs):
                player.step(replay.steps["action"][record % args.replay_size])
        save()
        evaluate_if_due()
        while counters["updates"] < args.total_updates and not signals:
            # The paper gives no unit; 10,000 goal states, as navigation counts, would be half a million random steps.
            warming_up = counters["env_steps"] < args.warmup or (args.aux == "gace" and not len(storage))
            if warming_up:
                actions = rng.uniform(-1, 1, (args.num_envs, 6)).astype(np.float32)
            else:
                actions = choose_actions(args, agent, [p.observation for p in players], device, explore=True)
            steps_before = counters["env_steps"]
            for player, action in zip(players, actions, strict=True):
                image, goal = player.observation["image"], int(player.observation["goal"])
                if player.over:  # takes its turn to store the last frame and to begin anew
                    replay.add(image, usable=False)
                    player.begin(counters["episodes"])
                    counters["episodes"] += 1
                    continue
                reward, terminated, truncated, info = player.step(action)
                replay.add(image, action, reward, goal, terminated)
                counters["env_steps"] += 1
                if not player.over:
                    continue
                # Auto-labelling: the instruction names the goal that was reached, or it was none, the negative class.
                label = goal if info["is_success"] else len(goals_of(args.task))
                kept = info["is_success"] or (truncated and (warming_up or rng.random() < args.epsilon_n))
                if kept and args.aux == "gace":
                    storage.add(player.observation["image"], label)
                episode = {
                    "charts/success_ratio": info["is_success"],
                    "charts/nongoal_ratio": info["reached"] >= 0 and not info["is_success"],
                    "charts/episode_length": player.steps,
                }
                recent.append(episode)
                if not warming_up:
                    window.append(episode)

            k = args.env_steps_per_update
            if not warming_up and counters["env_steps"] // k > steps_before // k:
                report = learn(args, agent, target, optimizers, replay, storage, rng, device)
                reports.append(report)
                counters["updates"] += 1
                if counters["updates"] % args.target_update_interval == 0:
                    follow(target, agent, args.tau)
                if counters["updates"] % 100 == 0:
                    log.scalars({name: np.mean([r[name] for r in reports]) for name in report}, counters["updates"])
                    reports.clear()
                    if len(window) >= 100:
                        means = {name: np.mean([e[name] for e in window]) for name in window[0]}
                        log.scalars(means, counters["updates"])
                        window.clear()
                evaluate_if_due()

            now = time.monotonic()
            if now - shown > 0.5 and recent:
                shown, success = now, np.mean([e["charts/success_ratio"] for e in recent])
                accuracy = report.get("charts/discriminator_accuracy", np.nan)
                if warming_up:
                    log.progress("warm-up", " steps", counters["env_steps"], args.warmup, success, accuracy)
                else:
                    log.progress("training", " updates", counters["updates"], args.total_updates, success, accuracy)
            if now - saved > args.checkpoint_every:
                save()
                saved = now
        save()
    except FloatingPointError as error:  # the last good checkpoint stays
        raise SystemExit(f"{error} at update {counters['updates'] + 1}") from None
    finally:
        log.close()
        for player in players:
            player.env.close()


def evaluate_checkpoint(args):
    """`--evaluate`: prints the results of a checkpoint; with `--capture-video`, writes a video of three episodes."""
    checkpoint, trained, agent = load_checkpoint(args.evaluate)
    splits, goals = splits_of(trained.task), goals_of(trained.task)
    if args.split and args.split not in splits:
        raise SystemExit(f"{trained.task} has no {args.split} split")
    if args.goal and args.goal.lower() not in goals:
        raise SystemExit(f"unknown goal {args.goal!r}; use one of {', '.join(goals)}")
    goal = args.goal.lower() if args.goal else None
    device = torch.device("cuda" if args.cuda else "cpu")
    agent = agent.to(device)
    for split in [args.split] if args.split else splits:
        row = evaluate(trained, agent, split, device, goal, episodes=args.episodes)
        print(describe({"update": checkpoint["counters"]["updates"], **row}), flush=True)
        if args.capture_video:
            path = args.evaluate.with_name(f"{args.evaluate.stem}_{split}.gif")
            write_video(trained, agent, split, device, goal, path)
            print(f"wrote {path}")


def write_video(args, agent, split, device, goal, path):
    frames = []

    def film(env, info):
        frame = Image.fromarray(env.render())
        drawing = ImageDraw.Draw(frame)
        drawing.text((12, 8), info["instruction"], fill="white", font_size=22, stroke_width=2, stroke_fill="black")
        frames.append(frame)

    evaluate(args, agent, split, device, goal, on_step=film, episodes=3)
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=120, loop=0)


AT_LEAST_1 = (
    "warmup batch_size goal_batch_size hidden_size target_update_interval replay_size goal_storage_size "
    "n_step num_envs env_steps_per_update episodes eval_every"
).split()
STORED = ("replay_frames.bin", "replay_steps.bin", "goal_states.bin")
FIXED = "task gdan aux seed hidden_size replay_size goal_storage_size num_envs policy concat_query fixed_goal".split()


def main():
    args = tyro.cli(Args, description=__doc__)
    checkpoint, run_folder = None, args.resume
    if run_folder:  # with the run's own arguments, but for those given now
        checkpoint, own, _ = load_checkpoint(run_folder / "checkpoint.pt")
        args = tyro.cli(Args, description=__doc__, default=own)
        for name in FIXED:
            if getattr(args, name) != getattr(own, name):
                raise SystemExit(f"a resumed run keeps its --{name.replace('_', '-')}: {getattr(own, name)}")
    if args.gdan and args.aux != "gace":
        raise SystemExit(f"--gdan needs the goal-discriminator, which --aux {args.aux} does not train: use --aux gace")
    if args.concat_query and not args.gdan:
        raise SystemExit("--concat-query replaces the attention of GDAN: add --gdan")
    args.fixed_goal = args.fixed_goal and args.fixed_goal.lower()
    if args.fixed_goal and args.fixed_goal not in goals_of(args.task):
        raise SystemExit(f"unknown goal {args.fixed_goal!r}; use one of {', '.join(goals_of(args.task))}")
    for name in AT_LEAST_1:
        if getattr(args, name) < 1:
            raise SystemExit(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("seed", "learning_rate", "exploration_noise"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise SystemExit(f"--{name.replace('_', '-')} must be a number of at least 0")
    if args.num_envs > args.env_steps_per_update:
        raise SystemExit(f"{args.num_envs} environments need an --env-steps-per-update of at least {args.num_envs}")
    episodes_under_way = args.num_envs * (envs.UR5Env.max_steps + 1)
    if args.replay_size < episodes_under_way:
        raise SystemExit(f"{args.num_envs} environments need a --replay-size of at least {episodes_under_way}")
    if args.cuda and not torch.cuda.is_available():
        raise SystemExit("--cuda: PyTorch sees no GPU here; use --no-cuda")
    if args.track:
        try:
            import wandb
        except ImportError:
            raise SystemExit("--track needs Weights and Biases: pip install wandb") from None
    if args.evaluate:
        return evaluate_checkpoint(args)

    if not checkpoint:
        run_folder = Path("runs", f"{args.task}__{algorithm(args)}__{args.seed}__{int(time.time())}")
    check_disk(args, run_folder)
    for name in STORED if checkpoint else ():
        if not (run_folder / name).exists():
            raise SystemExit(f"{run_folder} has lost its {name}, without which the run cannot go on")
    try:
        run_folder.mkdir(parents=True, exist_ok=bool(checkpoint))
        (run_folder / "goal_states.bin").touch()
    except OSError as error:
        raise SystemExit(f"cannot write into the run folder {run_folder}: {error.strerror}") from None
    if args.track:
        name = run_folder.name
        wandb.init(project="gace", name=name, id=name, resume="allow", sync_tensorboard=True, config=vars(args))
    print(f"run folder: {run_folder}")
    train(args, run_folder, checkpoint)


if __name__ == "__main__":
    main()

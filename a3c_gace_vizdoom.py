"""A3C with goal-aware cross-entropy (GACE) and goal-discriminative attention networks (GDAN) on V1 to V4.

Paper: "Goal-Aware Cross-Entropy for Multi-Target Reinforcement Learning" (NeurIPS 2021).

    python a3c_gace_vizdoom.py --task v1 --gdan           # train A3C+GACE&GDAN
    python a3c_gace_vizdoom.py --task v2 --aux none       # train a baseline: none, vae or rad
    python a3c_gace_vizdoom.py --resume runs/RUN          # go on after Ctrl-C or a crash
    python -m tools.enjoy runs/RUN/checkpoint.pt --video  # evaluate and film a trained agent

Worker processes play and learn. After each episode, a worker updates the shared parameters without waiting for the
other workers. The main process logs, evaluates and saves.
"""

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

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

VERSION = 2  # raised by every change that alters what is learned; runs of two versions are never averaged


@dataclass
class Args:  # the defaults are ours; where the paper or the authors' code has another value, it stands in brackets
    # Task and method
    task: Literal["v1", "v2", "v3", "v4"] = "v1"  # a room (v1, v2) or a maze (v3, v4); v2 and v4 have random textures
    gdan: bool = False  # use the goal-discriminative attention networks (needs --aux gace)
    aux: Literal["gace", "vae", "rad", "none"] = "gace"  # auxiliary task; rad: random crops; none: plain A3C
    seed: int = 1  # seed of the initial parameters and of all episodes
    total_updates: int = 200_000  # updates, summed over the workers; one update per episode
    paper: bool = False  # use the settings in PAPER; single flags still override them
    exp_name: str | None = None  # algorithm in the run's name, for example a3c+gace+mine; default: from the flags
    # The paper's hyperparameters
    warmup: int = 2_000  # goal states to collect with a random policy before the first update
    goal_batch_size: int = 16  # goal states in one GACE loss (paper: 50)
    eta: float = 0.5  # coefficient of the GACE loss (Eq. 9); the paper recommends 0.3 to 0.5
    epsilon_n: float = 0.0  # probability of storing a state of an episode that timed out, as a negative
    gamma: float = 0.99  # discount
    learning_rate: float = 2e-4  # learning rate of Adam with AMSGrad (paper: 7e-5)
    max_grad_norm: float = 40.0  # clip the gradient at this norm (paper: 10, for rewards ten times as large)
    entropy_coef: float = 0.007  # coefficient of the entropy, Eq. 3 (paper: 0.01, for rewards ten times as large)
    value_coef: float = 0.2  # coefficient of the value loss, Eq. 5 (paper: 0.5, for rewards ten times as large)
    num_envs: int = 20  # environments, divided among the workers (paper: 20 workers with one each)
    # What the paper leaves out
    num_workers: int = min(20, os.cpu_count() or 1)  # worker processes; by default one per core, at most 20
    anneal_lr: bool = True  # let the learning rate fall linearly to 0 over --total-updates (paper: constant)
    learning_rate_warmup: int = 1_000  # updates of linear learning-rate warm-up (authors: 0)
    adam_epsilon: float = 1e-4  # Adam's epsilon (authors: 1e-3, added before the bias correction; --paper does so too)
    reward_scale: float = 0.1  # multiply rewards by this in the losses (authors: 1)
    gae_lambda: float = 0.9  # lambda of the generalised advantage estimate (authors: 1, the advantage of Eq. 3)
    goal_batch_norm: bool = False  # normalise goal states over the batch (authors: yes), not each alone as in acting
    augment: bool = True  # mirror and shift goal states at random (authors: no); else the discriminator memorises them
    gate_gain: float = 4.0  # factor on the instruction layer's initial weights (authors: 1; all gates begin alike)
    vae_coef: float = 1e-3  # coefficient of the VAE loss; its gradient on the encoder is about the RL loss's
    goal_storage_size: int = 100_000  # goal states to keep, on disk; the oldest are overwritten first
    freeze_discriminator_at: int | None = None  # ablation: stop training the discriminator after this many updates
    # Evaluation, logging, resuming
    eval_every: int = 10_000  # updates between two evaluations
    episodes: int = 500  # episodes of an evaluation, on each split
    accuracy_states: int = 100  # goal states of a random policy, per split, to measure the discriminator's accuracy on
    checkpoint_every: float = 60.0  # seconds between two checkpoints
    runs: str = "runs"  # parent folder of the run folder
    resume: Path | None = None  # go on with the run in this folder; only --total-updates may be given with it
    track: bool = False  # also log to Weights and Biases (needs `pip install wandb`)
    wandb_project_name: str = "gace"  # project in Weights and Biases
    wandb_entity: str | None = None  # team or user in Weights and Biases
    cuda: bool = False  # use a GPU in the workers, with a context for each; nobody has tried it
    version: tyro.conf.Suppress[int] = VERSION  # stored with the settings

    def __post_init__(self):
        for name, value in vars(self).items():
            low = 0 if isinstance(value, float) or name in ("seed", "learning_rate_warmup") else 1
            if type(value) in (int, float) and not low <= value < math.inf:
                raise SystemExit(f"--{name.replace('_', '-')} must be {low} or more, not {value}")
        if self.gdan and self.aux != "gace":
            raise SystemExit("--gdan needs --aux gace")
        self.num_workers = min(self.num_workers, self.num_envs)


PAPER = {"paper": True, "goal_batch_size": 50, "learning_rate": 7e-5, "max_grad_norm": 10.0, "entropy_coef": 0.01}
PAPER |= {"value_coef": 0.5, "anneal_lr": False, "learning_rate_warmup": 0, "adam_epsilon": 1e-3, "reward_scale": 1.0}
PAPER |= {"gae_lambda": 1.0, "goal_batch_norm": True, "augment": False, "gate_gain": 1.0}


def make_env(task, split="seen"):
    """Makes the environment. To train on another one, see "Copying a script" in the README."""
    return gym.make(f"gace/{task.upper()}-v0", split=split)


@functools.cache
def sizes(task):
    """Returns the shape of an image, the number of goals and the number of actions."""
    env = make_env(task)
    return env.observation_space["image"].shape, int(env.observation_space["goal"].n), int(env.action_space.n)


# ------------------------------------------------------------------------------------------------------------ networks
class FeatureExtractor(nn.Module):
    """sigma: encodes an image as e (Eq. 1 and 6)."""

    def __init__(self, image_shape):
        super().__init__()
        channels = (image_shape[0], 32, 32, 64, 64)
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, 2, 1) for i, o in itertools.pairwise(channels))
        self.norms = nn.ModuleList(nn.BatchNorm2d(o, track_running_stats=False) for o in channels[1:])
        height, width = (math.ceil(side / 16) for side in image_shape[1:])  # after four strides of 2
        self.linear = nn.Linear(64 * height * width, 256)

    def forward(self, images, per_frame=True):
        # The authors' batch normalisation keeps no running statistics, and sees one frame at a time, except for goal
        # states. group_norm with one group per channel does the same for many frames at once.
        layout = torch.contiguous_format if per_frame else torch.channels_last  # the faster one for each norm
        x = images.to(memory_format=layout) / 255  # (batch, 16, 42, 42)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = conv(x)
            x = F.group_norm(x, x.shape[1], norm.weight, norm.bias, norm.eps) if per_frame else norm(x)
            x = F.relu_(x)
        return F.relu(self.linear(x.flatten(1)))  # (batch, 256)


class VAE(nn.Module):
    """The head of the A3C+VAE baseline: maps an encoding to a Gaussian latent and decodes it to an image."""

    def __init__(self, image_shape, latent=64):
        super().__init__()
        channels, self.height, self.width = image_shape
        small = 64, math.ceil(self.height / 16), math.ceil(self.width / 16)
        self.gaussian = nn.Linear(256, 2 * latent)
        self.decoder = nn.Sequential(nn.Linear(latent, math.prod(small)), nn.Unflatten(1, small))
        for i, o in itertools.pairwise((64, 64, 32, 32, channels)):  # each layer doubles the size
            self.decoder.extend([nn.ReLU(), nn.ConvTranspose2d(i, o, 3, 2, 1, output_padding=1)])

    def forward(self, features):
        mean, log_variance = self.gaussian(features).chunk(2, -1)
        latent = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.decoder(latent)[..., : self.height, : self.width], mean, log_variance


class Agent(nn.Module):
    """The feature extractor sigma, the goal-discriminator d and the actor-critic f."""

    def __init__(self, args):
        super().__init__()
        image_shape, goals, actions = sizes(args.task)
        image_shape = crop(np.zeros(image_shape)).shape if args.aux == "rad" else image_shape
        self.gdan, self.goal_batch_norm = args.gdan, args.goal_batch_norm
        self.feature_extractor = FeatureExtractor(image_shape)
        classes = goals + (args.epsilon_n > 0)  # with a class for negatives
        self.goal_discriminator = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, classes))
        self.vae = VAE(image_shape) if args.aux == "vae" else None
        # The actor-critic
        self.embedding = nn.Embedding(goals, 25)
        self.instruction = nn.Linear(25, 256)
        self.lstm = nn.LSTM(512, 256)
        if args.gdan:
            self.w_q = nn.Linear(256, 128, bias=False)
            self.w_k = nn.Linear(128, 128, bias=False)
        width = 640 if args.gdan else 512
        self.policy = nn.Sequential(
            nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, actions)
        )
        self.value = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

        # Orthogonal weights and no biases, also with --paper. The authors use PyTorch's initialisation, with which the
        # policy hardly depends on the state.
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and "embedding" not in name:
                nn.init.orthogonal_(parameter, 1 if "lstm" in name else 2**0.5)
            elif "norm" not in name and "embedding" not in name:
                nn.init.zeros_(parameter)
        self.instruction.weight.data *= args.gate_gain
        nn.init.orthogonal_(self.policy[-1].weight, 0.1)
        nn.init.orthogonal_(self.value[-1].weight, 0.1)

    def forward(self, images, goals, lstm_state=None):
        """Returns logits and values (Eq. 2), the next LSTM state and the features of a batch.

        The batch is one step of several environments or, without an LSTM state, all steps of an episode."""
        features = self.feature_extractor(images)  # e (Eq. 1), (batch, 256)
        gate = torch.sigmoid(self.instruction(self.embedding(goals)))  # (batch, 256)
        gated = features * gate  # M: the instruction selects features
        x = torch.cat([gated, gate], -1)
        if lstm_state is None:
            output = self.lstm(x[:, None])[0][:, 0]  # e^1, (batch, 256)
        else:  # for one step, the cell is faster than nn.LSTM
            lstm_state = torch.stack(torch.lstm_cell(x, tuple(lstm_state), *self.lstm.all_weights[0]))
            output = lstm_state[0]
        x = torch.cat([gated, output], -1)
        if self.gdan:
            # Not detached: the RL loss trains it too, as in the authors' code. Section 3.3 can be read otherwise.
            query = self.goal_discriminator[:2](features)
            key, value = output.chunk(2, -1)
            attention = torch.tanh(self.w_q(query) + self.w_k(key))  # u (Eq. 10)
            attended = value * attention  # h (Eq. 11)
            # Section 3.4 concatenates h with M, Appendix B.2 with e^1. We use both.
            x = torch.cat([x, attended], -1)
        return self.policy(x), self.value(x).squeeze(-1), lstm_state, features

    def classify(self, images):
        """Returns the logits of the goals that goal states belong to (Eq. 6 and 7)."""
        return self.goal_discriminator(self.feature_extractor(images, per_frame=not self.goal_batch_norm))


# -------------------------------------------------------------------------------------------------------- goal storage
class GoalStorage:
    """A ring of goal states and their labels in a memory-mapped file, shared by all workers."""

    def __init__(self, path, args, count, lock):
        record = np.dtype([("state", np.uint8, sizes(args.task)[0]), ("label", np.uint8)])
        size = min(args.goal_storage_size, args.warmup + args.total_updates) * record.itemsize
        with open(path, "ab") as file:
            old_size = file.tell()
            if size - old_size > shutil.disk_usage(path.parent).free:  # posix_fallocate fills the disk before it fails
                raise SystemExit(f"no room for {path} ({size / 1e9:.1f} GB): use a smaller --goal-storage-size")
            if old_size < size:  # a new run, or one that goes on for more updates
                os.posix_fallocate(file.fileno(), 0, size)
                count.clamp_(max=old_size // record.itemsize)
        self.records = np.memmap(path, record, "r+")
        self.count, self.lock = count, lock  # count: goal states ever added, a shared tensor

    def add(self, state, label):
        with self.lock:
            self.records[int(self.count) % len(self.records)] = state, label
            self.count += 1

    def sample(self, batch_size, rng):
        batch = self.records[rng.integers(min(int(self.count), len(self.records)), size=batch_size)]
        return batch["state"], batch["label"].astype(np.int64)


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


def vae_loss(decoded, images, mean, log_variance):
    """The A3C+VAE baseline: reconstruction error of every state of the episode, plus the latent's KL divergence."""
    reconstruction = (decoded - images / 255).square().sum((1, 2, 3))
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
        observation, _ = self.env.reset(seed=int(self.rng.integers(2**31)), options={"goal": goal, "blind": blind})
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

        A success is labelled with its instruction. Section 3.2 stores the state in which the goal is reached. We store
        the one two steps before, as the authors' code does: one step before, the goal is often out of view."""
        if len(self.rewards) == 1:  # the authors skip episodes of one step
            return None
        if self.info["is_success"]:
            return self.images[-2], self.goal
        # Appendix B.1: a time-out is a negative, and an episode that ends on another target is not stored.
        return None if self.terminated else (self.images[-1], self.num_goals)


@torch.no_grad()
def play(agent, episodes, policy, device="cpu"):
    """Plays all episodes to their end, acting in one batch. `policy` is "random", "sampled" or "greedy"."""
    lstm_state = torch.zeros(2, len(episodes), 256, device=device)
    while episodes:
        logits, noise = 0.0, 0.0
        if policy != "random":
            images = torch.from_numpy(np.stack([episode.image for episode in episodes])).to(device)
            goals = torch.tensor([episode.goal for episode in episodes], device=device)
            logits, _, lstm_state, _ = agent(images, goals, lstm_state)
            logits = logits.cpu().numpy()
        if policy != "greedy":  # adding Gumbel noise and taking the maximum draws from the softmax
            noise = np.stack([episode.rng.gumbel(size=episode.num_actions) for episode in episodes])
        for episode, action in zip(episodes, np.argmax(logits + noise, -1).tolist(), strict=True):
            episode.step(action)
        lstm_state = lstm_state[:, [not episode.over for episode in episodes]]
        episodes = [episode for episode in episodes if not episode.over]


def play_with_images(episodes):
    """Plays blind random episodes again, with images. Playing all of them blind first is three times as fast."""
    for episode in episodes:
        episode.begin(episode.seed, episode.goal)
    play(None, episodes, "random")


# ------------------------------------------------------------------------------------------------------------ learning
def flatten(agent):
    """Moves all parameters into one vector and all gradients into another: faster to share, to clip and to step."""
    parameters = list(agent.parameters())
    vector = nn.utils.parameters_to_vector(parameters).detach()
    gradient = torch.zeros_like(vector)
    nn.utils.vector_to_parameters(vector, parameters)  # each parameter is now a part of the vector
    for parameter, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return vector, gradient


def learn(args, agent, gradient, episode, storage, frozen, device):
    """Computes the clipped gradient of the overall loss (Eq. 9) for one episode. Returns the scalars to log."""
    images = torch.from_numpy(np.stack(episode.images)).to(device)  # (steps, 16, 42, 42)
    actions = torch.tensor(episode.actions, device=device)
    rewards = [reward * args.reward_scale for reward in episode.rewards]
    returns = discounted_sums(rewards, args.gamma).to(device)

    agent.goal_discriminator.requires_grad_(not frozen)
    logits, values, _, features = agent(images, torch.full_like(actions, episode.goal))
    advantages = estimate_advantages(rewards, values.tolist(), args.gamma, args.gae_lambda).to(device)
    loss_p, entropy = policy_loss(logits, actions, advantages, args.entropy_coef)
    loss_v = value_loss(values, returns)
    loss = loss_p + args.value_coef * loss_v  # Eq. 5
    report = {"policy_loss": loss_p, "value_loss": loss_v, "entropy": entropy, "values": values.mean()}
    if args.aux == "gace":
        states, labels = storage.sample(args.goal_batch_size, episode.rng)
        states = augmented(states, episode.rng) if args.augment else states
        states, labels = torch.from_numpy(states).to(device), torch.from_numpy(labels).to(device)
        goal_logits = agent.classify(states)
        report["gace_loss"] = gace_loss(goal_logits, labels)
        report["batch_accuracy"] = (goal_logits.argmax(-1) == labels).float().mean()
        if not frozen:
            loss = loss + args.eta * report["gace_loss"]  # Eq. 9
    elif args.aux == "vae":  # World Models trains its VAE alone; here it shares the encoder
        decoded, mean, log_variance = agent.vae(features)
        report["vae_loss"] = vae_loss(decoded, images, mean, log_variance)
        loss = loss + args.vae_coef * report["vae_loss"]

    gradient.zero_()
    loss.backward()
    report["gradient_norm"] = norm = gradient.norm()
    if not torch.isfinite(norm):
        raise FloatingPointError(f"the loss is not finite: {loss.item()}")
    if norm > args.max_grad_norm:
        gradient.mul_(args.max_grad_norm / norm)
    return {f"losses/{name}": float(number.detach()) for name, number in report.items()}


def adam_settings(args, update):
    """The learning rate rises over the first updates, then falls linearly to 0 if --anneal-lr."""
    rate = args.learning_rate * min(1, update / max(1, args.learning_rate_warmup))
    if args.anneal_lr:
        rate *= max(0, 1 - (update - 1) / args.total_updates)
    # With --paper, epsilon is larger at first: the authors' Adam adds it before the bias correction.
    return {"lr": rate, "eps": args.adam_epsilon / (math.sqrt(1 - 0.999**update) if args.paper else 1)}


CHARTS = "success_ratio nongoal_ratio episodic_length episodic_return learning_rate".split()
LOSSES = "policy_loss value_loss entropy values gace_loss batch_accuracy vae_loss gradient_norm".split()
REPORTED = [f"charts/{name}" for name in CHARTS] + [f"losses/{name}" for name in LOSSES]


def worker(index, args, run_folder, adam, counters, snapshot, recent, lock):
    """Plays and learns until the updates are done or the main process is gone."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed * 1000 + index)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    agent = Agent(args).to(device)
    local, gradient = flatten(agent)
    (parameters,) = adam.param_groups[0]["params"]
    start = agent.goal_discriminator[0].weight.storage_offset()
    discriminator = slice(start, start + sum(p.numel() for p in agent.goal_discriminator.parameters()))
    storage = GoalStorage(run_folder / "goals.bin", args, counters["goals"], lock) if args.aux == "gace" else None
    episodes = [Episode(args) for _ in range(index, args.num_envs, args.num_workers)]

    while counters["updates"] < args.total_updates and mp.parent_process().is_alive():
        # Act: one episode in each environment. The parameters that played an episode also give its gradient.
        local.copy_(parameters.detach())
        warming_up = args.aux == "gace" and bool(counters["successes"] < args.warmup)
        for episode in episodes:
            with lock:
                episode.number = int(counters["episodes"].add_(1))
            episode.begin([args.seed, episode.number], blind=warming_up)
        play(agent, episodes, "random" if warming_up else "sampled", device)
        if warming_up:
            play_with_images([episode for episode in episodes if episode.info["is_success"] or args.epsilon_n])

        for episode in episodes:
            # Label and store
            success, steps, labelled = episode.info["is_success"], len(episode.rewards), None
            if args.aux == "gace" and (success or episode.rng.random() < args.epsilon_n):
                labelled = episode.goal_state()
            if labelled:
                storage.add(*labelled)

            # Learn
            with lock:
                counters["env_steps"] += steps
                counters["successes"] += bool(success and labelled)
                learning = not warming_up and steps > 1 and bool(counters["updates"] < args.total_updates)
                counters["updates"] += learning
                update = int(counters["updates"])
            outcome = success, episode.terminated and not success, steps, sum(episode.rewards)
            report = dict(zip(REPORTED, outcome, strict=False))
            if learning:
                frozen = args.freeze_discriminator_at is not None and update > args.freeze_discriminator_at
                report |= learn(args, agent, gradient, episode, storage, frozen, device)
                if frozen:  # otherwise Adam's momentum would still change the discriminator
                    adam.state[parameters]["exp_avg"][discriminator] = 0
                parameters.grad = gradient.to("cpu")
                adam.param_groups[0] |= adam_settings(args, update)
                adam.step()
                report["charts/learning_rate"] = adam.param_groups[0]["lr"]
                if update % args.eval_every == 0 and update < args.total_updates:
                    snapshot.copy_(parameters.detach())
                    counters["snapshot"].fill_(update)
            # Without a lock: the main process must not wait for a worker that was killed.
            recent[episode.number % len(recent)] = torch.tensor([report.get(name, math.nan) for name in REPORTED])


# ---------------------------------------------------------------------------------------------------------- evaluation

METRICS = "update env_steps seconds split success_ratio discriminator_accuracy episode_length episode_return".split()
METRICS += ["training_success_ratio"]
BAR = {"dynamic_ncols": True, "mininterval": 0.5}


def evaluation_episodes(args, agent, split, goal=None, num_envs=8):
    """Plays `args.episodes` episodes with the most likely action, the same ones every time. Yields each at its end."""
    episodes = [Episode(args, split) for _ in range(min(num_envs, args.episodes))]
    for first in range(0, args.episodes, num_envs):
        batch = episodes[: args.episodes - first]
        for number, episode in enumerate(batch, first):
            episode.begin([2**31, args.seed, number], goal, center_crop=True)
        play(agent, batch, "greedy")
        yield from batch
    for episode in episodes:
        episode.env.close()


@torch.no_grad()
def evaluate(args, agent, split, goal_states):
    """Returns the metrics of one split."""
    episodes = evaluation_episodes(args, agent, split)
    bar = tqdm(episodes, f"evaluating {split}", args.episodes, unit=" episodes", leave=False, **BAR)
    results = [(episode.info["is_success"], len(episode.rewards), sum(episode.rewards)) for episode in bar]
    success, length, total = np.mean(results, 0).tolist()
    accuracy = math.nan
    if goal_states:
        states, labels = goal_states[split]
        # In batches of the training size: --goal-batch-norm depends on the batch.
        guesses = [agent.classify(batch).argmax(-1) for batch in states.split(args.goal_batch_size)]
        accuracy = (torch.cat(guesses) == labels).float().mean().item()
    return dict(zip(METRICS[3:8], (split, success, accuracy, length, total), strict=True))


def collect_goal_states(args, split):
    """Goal states of a random policy, equally many of each class. They are the same in every run."""
    episode, seeds, states = Episode(args, split), itertools.count(), []
    labels = torch.arange(args.accuracy_states) % (episode.num_goals + (args.epsilon_n > 0))
    for label in tqdm(labels.tolist(), f"goal states for the accuracy, {split}", leave=False, **BAR):
        found = None
        while not found or found[1] != label:
            episode.begin([2**31 + 1, next(seeds)], label % episode.num_goals, blind=True)
            play(None, [episode], "random")
            found = episode.goal_state()
        play_with_images([episode])
        states.append(episode.goal_state()[0])
    episode.env.close()
    return torch.from_numpy(np.stack(states)), labels


# ------------------------------------------------------------------------------------------------------------ training
def algorithm(args):
    frozen = args.freeze_discriminator_at and f"frozen{args.freeze_discriminator_at}"
    parts = ["a3c", args.aux != "none" and args.aux, args.gdan and "gdan", frozen, args.paper and "paper"]
    return args.exp_name or "+".join(filter(None, parts))


def load_checkpoint(path):
    """Returns a checkpoint, its Args and its agent."""
    if not Path(path).is_file():
        raise SystemExit(f"{path} is not a file")
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    args = Args(**({"version": 1} | checkpoint["args"]))
    agent = Agent(args)
    agent.load_state_dict(checkpoint["agent"])  # converts the 16-bit agents in results/
    return checkpoint, args, agent


def train(args, run_folder, agent, saved):
    """Starts the workers, then logs, evaluates and saves. `saved` is the checkpoint of a resumed run, else empty."""
    torch.set_num_threads(1)
    parameters = nn.Parameter(flatten(agent)[0].share_memory_())
    run = {
        "adam": {name: torch.zeros(len(parameters)) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")},
        "counters": {name: torch.tensor(0) for name in "updates env_steps episodes goals successes snapshot".split()},
        "snapshot": torch.zeros(len(parameters)),  # the parameters at update counters["snapshot"], to be evaluated
        "recent": torch.full((500, len(REPORTED)), math.nan),  # what to log of the last 500 episodes
        "goal_states": {},  # to measure the discriminator's accuracy, by split
        "rows": [],  # of metrics.csv
        "seconds": 0.0,
    }
    run["adam"]["step"] = torch.tensor(0.0)
    run |= saved | {"args": asdict(args), "agent": agent.state_dict()}
    counters, snapshot, recent = run["counters"], run["snapshot"], run["recent"]
    for tensor in (snapshot, recent, *counters.values(), *run["adam"].values()):
        tensor.share_memory_()  # with the workers; the checkpoint holds the same tensors
    adam = torch.optim.Adam([parameters], amsgrad=True, fused=True)  # workers set learning rate and epsilon
    adam.state[parameters] = run["adam"]
    context = mp.get_context("spawn")
    lock, started, splits = context.Lock(), time.monotonic() - run["seconds"], envs.splits_of(args.task)
    if args.aux == "gace":
        GoalStorage(run_folder / "goals.bin", args, counters["goals"], lock)  # takes its disk space now
        counters["successes"].clamp_(max=counters["goals"])  # if goals.bin was lost, the warm-up begins anew

    def save():
        """Writes checkpoint.pt, which is replaced as a whole or not at all, and metrics.csv."""
        run["seconds"] = time.monotonic() - started
        torch.save(run, run_folder / "checkpoint.tmp")
        os.replace(run_folder / "checkpoint.tmp", run_folder / "checkpoint.pt")
        lines = [METRICS, *([row[name] for name in METRICS] for row in run["rows"])]
        (run_folder / "metrics.csv").write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
        return time.monotonic()

    last_save, logged = save(), int(counters["updates"])
    writer = SummaryWriter(run_folder, purge_step=logged + 1)
    writer.add_text("hyperparameters", "|name|value|\n|-|-|\n" + "".join(f"|{k}|{v}|\n" for k, v in vars(args).items()))
    arguments = args, run_folder, adam, counters, snapshot, recent, lock
    workers = [context.Process(target=worker, args=(i, *arguments), daemon=True) for i in range(args.num_workers)]
    # Workers keep freed memory. Otherwise, new memory pages take a seventh of an update.
    os.environ |= {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**29)}
    bar = tqdm(total=args.total_updates, initial=int(counters["updates"]), unit=" updates", **BAR)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers inherit it: Ctrl-C is for the main process
        for process in workers:
            process.start()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if args.aux == "gace" and not run["goal_states"]:
            run["goal_states"] = {split: collect_goal_states(args, split) for split in splits}
        evaluated = run["rows"][-1]["update"] if run["rows"] else 0
        while evaluated < args.total_updates:
            time.sleep(0.5)
            if any(process.exitcode for process in workers):
                raise ChildProcessError("a worker died: its error stands above, unless another program killed it")
            ended = not any(process.is_alive() for process in workers)
            update, steps, seconds = int(counters["updates"]), int(counters["env_steps"]), time.monotonic() - started
            means = dict(zip(REPORTED, recent.nanmean(0).tolist(), strict=True))
            bar.update(update - bar.n)
            warmup = f"warm-up: {int(counters['successes']):,} of {args.warmup:,} goal states"
            success = f"success {means['charts/success_ratio']:.1%}"
            bar.set_postfix_str(warmup if args.aux == "gace" and not update else success)

            # Log
            if update - logged >= len(recent):
                logged = update
                for name, number in (means | {"charts/env_steps": steps, "charts/SPS": steps / seconds}).items():
                    if not math.isnan(number):
                        writer.add_scalar(name, number, update)

            # Evaluate, while the workers keep training
            if ended and counters["snapshot"] <= evaluated:  # only the last evaluation is missing
                snapshot.copy_(parameters.detach())
                counters["snapshot"].fill_(update)
            if counters["snapshot"] > evaluated:
                evaluated = int(counters["snapshot"])
                point = {"update": evaluated, "env_steps": steps, "seconds": round(seconds, 1)}
                point["training_success_ratio"] = means["charts/success_ratio"]
                fixed_agent = Agent(args)
                nn.utils.vector_to_parameters(snapshot.clone(), fixed_agent.parameters())
                rows = [point | evaluate(args, fixed_agent, split, run["goal_states"]) for split in splits]
                for row in rows:
                    tqdm.write(f"update {evaluated:,}, {row['split']}: success {row['success_ratio']:.1%}", sys.stdout)
                    for name in METRICS[4:8]:
                        writer.add_scalar(f"evaluation/{row['split']}_{name}", row[name], evaluated)
                run["rows"] += rows
                last_save = save()
            if time.monotonic() - last_save > args.checkpoint_every:
                last_save = save()
    finally:
        bar.close()
        for process in mp.active_children():
            process.kill()
            process.join()
        save()
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
    resume = f"python {sys.argv[0]} --resume {run_folder}"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
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
        print(f"done: {run_folder}/metrics.csv")
    except KeyboardInterrupt:
        print(f"stopped; go on with: {resume}")
    except BlockingIOError:
        raise SystemExit(f"{run_folder} is being trained by another process") from None
    except (OSError, gym.error.Error) as error:
        raise SystemExit(f"{error}\nThe run stopped; go on with: {resume}") from None


if __name__ == "__main__":
    main()

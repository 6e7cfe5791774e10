"""A3C with goal-aware cross-entropy (GACE) and goal-discriminative attention networks (GDAN) on V1 to V4.

Paper: "Goal-Aware Cross-Entropy for Multi-Target Reinforcement Learning" (NeurIPS 2021).

    python a3c_gace_vizdoom.py --task v1 --gdan                       # train A3C+GACE&GDAN
    python a3c_gace_vizdoom.py --task v2 --aux none                   # train a baseline: none, vae or rad
    python a3c_gace_vizdoom.py --evaluate runs/RUN/checkpoint.pt --capture-video

Workers are processes. Each plays a few environments, acting in one batch; for every episode it back-propagates through
the whole of it and updates the shared parameters without waiting for anybody.

The paper's settings: --learning-rate 7e-5 --max-grad-norm 10 --entropy-coef 0.01 --adam-epsilon 1e-3 --reward-scale 1
    --value-coef 0.5 --gae-lambda 1 --learning-rate-warmup 0 --goal-batch-norm (the initialisation stays ours), and on a
    machine with 20 cores --num-workers 20 --envs-per-worker 1
"""

import csv
import ctypes
import os
import queue
import signal
import sys
import time
import traceback
from collections import deque
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
import tyro
from PIL import Image, ImageDraw
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import envs


@dataclass
class Args:
    task: Literal["v1", "v2", "v3", "v4"] = "v1"
    """the task: a room (v1), with random textures (v2); a maze (v3), with random textures (v4)"""
    gdan: bool = False
    """use the goal-discriminative attention networks (needs --aux gace)"""
    aux: Literal["gace", "vae", "rad", "none"] = "gace"
    """what is learned beside the RL loss: gace (the paper's), vae, rad (random crops), or none (plain A3C)"""
    seed: int = 1
    """seed of the parameters and of every episode"""
    total_updates: int = 200_000
    """number of updates, summed over the workers; one per finished episode"""

    # The paper's hyperparameters
    warmup: int = 2_000
    """goal states to collect with a random policy before the first update"""
    goal_batch_size: int = 50
    """goal states in one GACE loss"""
    eta: float = 0.5
    """coefficient of the GACE loss (Eq. 9), or of the VAE loss; the paper recommends 0.3 to 0.5"""
    epsilon_n: float = 0.0
    """probability to store the last state acted in, of an episode that reached nothing, as a class of its own"""
    gamma: float = 0.99
    """discount"""
    learning_rate: float = 2e-4
    """of Adam with AMSGrad, whose moments the workers share (paper: 7e-5)"""
    max_grad_norm: float = 40.0
    """the gradient is clipped at this norm (paper: 10, for rewards ten times as large: that silences success)"""
    entropy_coef: float = 0.007
    """coefficient of the entropy bonus, Eq. 3 (paper: 0.01, for rewards ten times as large)"""
    value_coef: float = 0.2
    """coefficient of the value loss, Eq. 5 (paper: 0.5, for rewards ten times as large)"""
    num_workers: int = field(default_factory=lambda: min(20, os.cpu_count() or 1))
    """worker processes; by default one per core, at most the paper's 20"""

    # What the paper leaves out
    learning_rate_warmup: int = 1_000
    """updates over which the learning rate rises (authors: 0; AMSGrad never forgets the gradients of a rough start)"""
    final_learning_rate: float = 7e-5
    """learning rate of the last part of a run; the paper's is constant"""
    final_learning_rate_from: int = 130_000
    """updates after which it takes over: the first one learns faster, but leaves the policy swinging"""
    adam_epsilon: float = 1e-4
    """Adam's epsilon (authors: 1e-3)"""
    reward_scale: float = 0.1
    """rewards are multiplied by this in the losses (paper: 1)"""
    gae_lambda: float = 0.9
    """lambda of the generalised advantage estimate (authors: 1, which is the advantage of Eq. 3)"""
    goal_batch_norm: bool = False
    """normalise goal states as a batch, as the authors do; by default each by itself, as in acting"""
    goal_storage_size: int = 100_000
    """goal states kept, on disk; the oldest go first"""
    freeze_discriminator_at: int | None = None
    """ablation: the GACE loss contributes nothing after this many updates"""
    envs_per_worker: int = 10
    """environments that a worker plays at once, each as if it had a worker of its own (paper: 1, with 20 workers)"""

    # Evaluation, logging, resuming
    eval_every: int = 10_000
    """updates between two evaluations"""
    episodes: int = 500
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


class FeatureExtractor(nn.Module):
    """sigma: an image to its encoding e (Eq. 1)."""

    def __init__(self):
        super().__init__()
        channels = (16, 32, 32, 64, 64)
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, 2, 1) for i, o in zip(channels[:-1], channels[1:], strict=True))
        self.norms = nn.ModuleList(nn.BatchNorm2d(o, track_running_stats=False) for o in channels[1:])
        self.linear = nn.Linear(64 * 3 * 3, 256)

    def forward(self, images, per_frame):
        """The authors' batch normalisation keeps no running statistics. Acting, it sees one frame, and so it normalises
        `per_frame`. Goal states they normalise as a batch; here that is --goal-batch-norm."""
        layout = torch.contiguous_format if per_frame else torch.channels_last  # the faster one for each norm
        x = images.float().contiguous(memory_format=layout)
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            weight = conv.weight.contiguous(memory_format=layout)
            x = F.conv2d(x, weight / 255 if i == 0 else weight, conv.bias, stride=2, padding=1)  # states within [0, 1]
            x = F.group_norm(x, x.shape[1], norm.weight, norm.bias, norm.eps) if per_frame else norm(x)
            x = F.relu(x)
        return F.relu(self.linear(x.flatten(1)))  # (batch, 256)


class GoalDiscriminator(nn.Module):
    """d: an encoding to the goal it belongs to (Eq. 7). Its hidden layer is the query of GDAN."""

    def __init__(self, classes):
        super().__init__()
        self.hidden = nn.Linear(256, 256)
        self.output = nn.Linear(256, classes)

    def query(self, features):
        return F.relu(self.hidden(features))

    def forward(self, features):
        return self.output(self.query(features))  # (batch, classes)


class ActorCritic(nn.Module):
    """f: an encoding and an instruction to policy and value (Eq. 2)."""

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
        """Gated attention: the instruction chooses among the features."""
        gate = torch.sigmoid(self.instruction(self.embedding(goals)))
        return features * gate, gate

    def heads(self, gated, memory, query):
        """From gated features M, the LSTM's output and the query of the goal-discriminator to policy and value."""
        x = torch.cat([gated, memory], -1)
        if self.gdan:
            # This layer and the ReLUs are the authors'. In the paper, key and value are halves of the LSTM's output,
            # and Eq. 10 has no ReLU.
            key, value = F.relu(self.key_value(x)).chunk(2, -1)
            attention = torch.tanh(F.relu(self.w_q(query)) + F.relu(self.w_k(key)))  # u (Eq. 10)
            attended = value * attention  # h (Eq. 11)
            x = F.relu(self.combine(torch.cat([attended, memory], -1)))
        return self.policy(x), self.value(x).squeeze(-1)


class VAE(nn.Module):
    """The baseline's head: encodings to a Gaussian latent, and back to the image through the encoder's sizes."""

    def __init__(self, latent=64):
        super().__init__()
        self.gaussian = nn.Linear(256, 2 * latent)
        self.linear = nn.Linear(latent, 64 * 3 * 3)
        self.deconvs = nn.Sequential(
            nn.ConvTranspose2d(64, 64, 3, 2, 1, output_padding=1),  # 3 to 6
            nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 3, 2, 1),  # 6 to 11
            nn.ReLU(),
            nn.ConvTranspose2d(32, 32, 3, 2, 1),  # 11 to 21
            nn.ReLU(),
            nn.ConvTranspose2d(32, 16, 3, 2, 1, output_padding=1),  # 21 to 42
        )

    def forward(self, features):
        mean, log_variance = self.gaussian(features).chunk(2, -1)
        latent = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        images = self.deconvs(F.relu(self.linear(latent)).view(-1, 64, 3, 3))
        return images, mean, log_variance


class Agent(nn.Module):
    def __init__(self, args, goals=4, actions=3):
        super().__init__()
        self.feature_extractor = FeatureExtractor()
        self.goal_discriminator = GoalDiscriminator(goals + (args.epsilon_n > 0))
        self.actor_critic = ActorCritic(goals, actions, args.gdan)
        self.goal_batch_norm = args.goal_batch_norm
        self.vae = VAE() if args.aux == "vae" else None
        # PyTorch's own initialisation shrinks what differs between states in every layer and adds biases that do not
        # differ: in the policy's last hidden layer 2 % is left of the state, here 49 %.
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and "embedding" not in name:
                nn.init.orthogonal_(parameter, 1 if "lstm" in name else 2**0.5)
            elif "norm" not in name and "embedding" not in name:
                nn.init.zeros_(parameter)
        nn.init.orthogonal_(self.actor_critic.policy[-1].weight, 0.1)
        nn.init.orthogonal_(self.actor_critic.value[-1].weight, 0.1)

    def query(self, features):
        # The RL loss trains the discriminator's hidden layer through the query, as in the authors' code.
        return self.goal_discriminator.query(features) if self.actor_critic.gdan else None

    @torch.no_grad()
    def act(self, images, goals, memory):
        """One step of several environments: (envs, 16, 42, 42), (envs,) and the LSTM's state, (2, envs, 256)."""
        features = self.feature_extractor(images, per_frame=True)
        gated, gate = self.actor_critic.gated(features, goals)
        weights = self.actor_critic.lstm.all_weights[0]
        memory = torch.stack(torch.lstm_cell(torch.cat([gated, gate], -1), tuple(memory), *weights))
        logits, value = self.actor_critic.heads(gated, memory[0], self.query(features))
        return logits, value, memory

    def forward(self, images, goals):
        """A whole episode: (steps, 16, 42, 42), (steps,) to logits (steps, actions), values (steps,) and features."""
        features = self.feature_extractor(images, per_frame=True)
        gated, gate = self.actor_critic.gated(features, goals)
        memory = self.actor_critic.lstm(torch.cat([gated, gate], -1)[:, None])[0][:, 0]
        return *self.actor_critic.heads(gated, memory, self.query(features)), features

    def classify(self, images):
        """Goal states to the logits of their goals (Eq. 6 and 7)."""
        return self.goal_discriminator(self.feature_extractor(images, per_frame=not self.goal_batch_norm))


# -------------------------------------------------------------------------------------------------------- goal storage


class GoalStorage:
    """Goal states with their automatic labels, shared by all workers: a ring of fixed records in a file, so that it
    costs a worker no memory, grows on disk only as it fills, and survives with the run."""

    record_bytes = 16 * 42 * 42 + 1  # a state and its label

    def __init__(self, path, capacity, count):
        self.file = os.open(path, os.O_RDWR | os.O_CREAT)
        self.capacity = capacity
        self.count = count  # how many were ever added: a shared integer

    def __len__(self):
        return min(self.count.value, self.capacity)

    def add(self, state, label):
        with self.count.get_lock():
            slot = self.count.value % self.capacity
            os.pwrite(self.file, state.tobytes() + bytes([label]), slot * self.record_bytes)
            self.count.value += 1

    def sample(self, batch_size, rng):
        slots = rng.integers(len(self), size=batch_size)
        records = bytearray().join(
            os.pread(self.file, self.record_bytes, slot * self.record_bytes) for slot in slots.tolist()
        )
        records = torch.frombuffer(records, dtype=torch.uint8).view(batch_size, self.record_bytes)
        return records[:, :-1].view(-1, 16, 42, 42), records[:, -1].long()


# -------------------------------------------------------------------------------------------------------------- losses


def discounted_returns(rewards, gamma):
    """R_t, the discounted sum of the rewards from step t to the end of the episode."""
    returns = torch.empty(len(rewards))
    following = 0.0
    for t in reversed(range(len(rewards))):
        returns[t] = following = rewards[t] + gamma * following
    return returns


def estimate_advantages(rewards, values, gamma, gae_lambda):
    """R_t - V(s_t) of Eq. 3 for lambda 1. A smaller lambda gives the credit to the last steps and to those after which
    the value rose: with 0.9, the policy's gradient needs 118 episodes to stand out of its noise, with 1 it needs 272
    (V1, after 4,000 updates)."""
    following = torch.cat([values[1:], values.new_zeros(1)])
    surprises = torch.tensor(rewards, device=values.device) + gamma * following - values
    return discounted_returns(surprises.tolist(), gamma * gae_lambda).to(values.device)


def policy_loss(logits, actions, advantages, entropy_coef):
    """Eq. 3, summed over the steps of the episode as the authors do. Also returns the mean entropy."""
    log_probs = F.log_softmax(logits, -1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    taken = log_probs.gather(-1, actions[:, None])[:, 0]
    return -(taken * advantages).sum() - entropy_coef * entropies.sum(), entropies.mean()


def value_loss(values, returns):
    """Eq. 4, summed over the steps of the episode."""
    return (returns - values).square().sum()


def gace_loss(goal_logits, goal_labels):
    """Goal-aware cross-entropy (Eq. 8): how well the encoded goal states tell the goals apart. The authors' mean over
    the batch, where the paper writes a sum."""
    return F.cross_entropy(goal_logits, goal_labels)


def vae_loss(vae, features, images):
    """The baseline A3C+VAE: reconstruction of every state of the episode, and the divergence of its latent."""
    decoded, mean, log_variance = vae(features)
    reconstruction = F.mse_loss(decoded, images.float() / 255, reduction="none").sum((1, 2, 3))
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1)
    return (reconstruction + divergence).mean()


# ------------------------------------------------------------------------------------------------------------- workers


def flatten(agent):
    """Lays all parameters, and all gradients, out in one vector each, so that sharing, clipping, the optimiser's step
    and the checkpoint are one operation. Returns both vectors; the agent's parameters become views of the first."""
    vector = nn.utils.parameters_to_vector(agent.parameters()).detach()
    gradient = torch.zeros_like(vector)
    offset = 0
    for parameter in agent.parameters():
        part = slice(offset, offset + parameter.numel())
        parameter.data = vector[part].view_as(parameter)
        parameter.grad = gradient[part].view_as(parameter)
        offset += parameter.numel()
    return vector, gradient


class Shared:
    """What the workers share: parameters, Adam's moments, counters, and the goal storage's count."""

    def __init__(self, agent, num_workers, context):
        self.parameters = nn.utils.parameters_to_vector(agent.parameters()).detach()
        zeros = torch.zeros_like(self.parameters)
        self.adam = {"exp_avg": zeros, "exp_avg_sq": zeros.clone(), "max_exp_avg_sq": zeros.clone()}
        self.adam["step"] = torch.tensor(0.0)
        self.episodes = torch.zeros(num_workers, dtype=torch.int64)  # begun by each worker: seeds of all that is random
        for tensor in (self.parameters, self.episodes, *self.adam.values()):
            tensor.share_memory_()
        self.updates, self.env_steps, self.goal_count = (context.Value("q", 0) for _ in range(3))
        self.stop, self.abort = context.Event(), context.Event()  # of the workers, and of an evaluation under way

    def state(self):
        return {
            "parameters": self.parameters.clone(),
            "adam": {name: tensor.clone() for name, tensor in self.adam.items()},
            "episodes": self.episodes.clone(),
            "updates": self.updates.value,
            "env_steps": self.env_steps.value,
            "goal_count": self.goal_count.value,
        }

    def load(self, state):
        self.parameters.copy_(state["parameters"])
        for name, tensor in self.adam.items():
            tensor.copy_(state["adam"][name])
        self.episodes[: len(state["episodes"])] = state["episodes"][: len(self.episodes)]
        for name in ("updates", "env_steps", "goal_count"):
            getattr(self, name).value = state[name]


CROP = 36  # of 42, the proportion of RAD's 84 of 100


class Episode:
    """One environment of a worker and the episode it is in."""

    def __init__(self, args, split="seen", render_mode=None):
        self.args = args
        self.env = gym.make(f"gace/{args.task.upper()}-v0", split=split, render_mode=render_mode)

    def begin(self, seed, options=None, center_crop=False):
        self.rng = np.random.default_rng(seed)
        self.images, self.actions, self.rewards = [], [], []
        self.corner = self.rng.integers(42 - CROP + 1, size=2) if not center_crop else [(42 - CROP) // 2] * 2
        observation, info = self.env.reset(seed=int(self.rng.integers(2**31)), options=options)
        self.goal, self.instruction = int(observation["goal"]), info["instruction"]
        self.see(observation)

    def see(self, observation):
        image = observation["image"]
        if self.args.aux == "rad":  # one crop an episode, so that the LSTM sees a steady world
            y, x = self.corner
            image = image[:, y : y + CROP, x : x + CROP]
        self.image = image

    def step(self, action):
        observation, reward, terminated, truncated, self.info = self.env.step(action)
        self.images.append(self.image)
        self.actions.append(action)
        self.rewards.append(reward)
        self.see(observation)
        self.over = terminated or truncated
        return self.over

    @property
    def goal_state(self):
        """One step before the state from which the goal was reached, as in the authors' code: in the last one, which
        the paper names, it has often left the view."""
        return self.images[-2]


def store_goal_state(args, storage, episode):
    """Auto-labelling: the instruction names the goal that was reached. Some of the episodes that reached nothing are
    kept as the negative class."""
    if episode.info["is_success"]:
        storage.add(episode.goal_state, episode.goal)
    elif episode.info["reached"] < 0 and episode.rng.random() < args.epsilon_n:
        storage.add(episode.images[-1], len(envs.ITEMS))


def act(agent, episodes, memory, device, how):
    """Actions for several environments in one batch. `memory` is the LSTM's state, (2, envs, 256)."""
    if how == "random":
        return [int(episode.rng.integers(3)) for episode in episodes], memory
    images = torch.from_numpy(np.stack([episode.image for episode in episodes])).to(device)
    goals = torch.tensor([episode.goal for episode in episodes], device=device)
    logits, _, memory = agent.act(images, goals, memory)
    if how == "greedy":
        return logits.argmax(-1).tolist(), memory
    cumulative = F.softmax(logits, -1).cumsum(-1).tolist()
    draws = [episode.rng.random() for episode in episodes]
    actions = [sum(draw > p for p in steps[:-1]) for draw, steps in zip(draws, cumulative, strict=True)]
    return actions, memory


def play(agent, episodes, device, how, keep_going, on_step=None):
    """Each environment's episode to its end, those still under way acting in one batch. Returns whether all ended."""
    playing, memory = episodes, torch.zeros(2, len(episodes), 256, device=device)
    while playing and keep_going():
        actions, memory = act(agent, playing, memory, device, how)
        if on_step:
            on_step(playing[0], actions[0])
        over = [episode.step(action) for episode, action in zip(playing, actions, strict=True)]
        if any(over):
            memory = memory[:, [not o for o in over]]
            playing = [episode for episode in playing if not episode.over]
    return not playing


def learn(args, agent, gradient, episode, storage, updates, device):
    """The gradient of the overall loss (Eq. 9) for one episode, clipped; returns what one debugs the method by."""
    images = torch.from_numpy(np.stack(episode.images)).to(device)  # (steps, 16, 42, 42)
    actions = torch.tensor(episode.actions, device=device)
    goals = torch.full_like(actions, episode.goal)
    rewards = [reward * args.reward_scale for reward in episode.rewards]
    returns = discounted_returns(rewards, args.gamma).to(device)

    logits, values, features = agent(images, goals)
    advantages = estimate_advantages(rewards, values.detach(), args.gamma, args.gae_lambda)
    policy, entropy = policy_loss(logits, actions, advantages, args.entropy_coef)
    value = value_loss(values, returns)
    loss = policy + args.value_coef * value  # Eq. 5
    report = {"losses/policy": policy, "losses/value": value, "losses/entropy": entropy, "charts/value": values.mean()}

    if args.aux == "gace":
        frozen = args.freeze_discriminator_at is not None and updates > args.freeze_discriminator_at
        with torch.set_grad_enabled(not frozen):
            states, labels = (t.to(device) for t in storage.sample(args.goal_batch_size, episode.rng))
            goal_logits = agent.classify(states)
            gace = gace_loss(goal_logits, labels)
        report["losses/gace"] = gace
        report["charts/discriminator_accuracy"] = (goal_logits.argmax(-1) == labels).float().mean()
        loss = loss + args.eta * gace  # Eq. 9; frozen, it has no gradient
    elif args.aux == "vae":
        report["losses/vae"] = vae = vae_loss(agent.vae, features, images)
        loss = loss + args.eta * vae

    gradient.zero_()
    loss.backward()
    norm = gradient.norm()
    if not torch.isfinite(norm):
        raise FloatingPointError(f"the loss is not finite at update {updates}: {loss.item()}")
    gradient.mul_((args.max_grad_norm / norm).clamp(max=1))
    report["losses/gradient_norm"] = norm
    return {name: float(number.detach()) for name, number in report.items()}


def learning_rate(args, update):
    """Rises over the first updates, and is the final one in the last."""
    if update > args.final_learning_rate_from:
        return args.final_learning_rate
    return args.learning_rate * min(1, update / max(1, args.learning_rate_warmup))


def keep_freed_memory():
    """Has the C library keep what is freed. Otherwise it returns the activations of every update to the system and gets
    them back page by page: a seventh of the time of an update."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
        libc.mallopt(M_TRIM_THRESHOLD, 2**30)
        libc.mallopt(M_MMAP_THRESHOLD, 2**29)


def obey_main_process():
    """Ctrl-C in a terminal, or a batch system's SIGTERM, reaches every process of the run: the main one decides. Once
    that is gone, nobody reads the reports: then the kernel kills this process too."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != mp.parent_process().pid:  # it was gone before that
        os._exit(1)


def worker(index, args, run_folder, shared, reports, evaluations):
    """Plays and learns until the updates are done; reports every episode, and a failure as its traceback."""
    obey_main_process()
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(args.seed * 1000 + index)
    device = torch.device("cuda" if args.cuda else "cpu")
    episodes = []
    try:
        agent = Agent(args).to(device)
        local, gradient = flatten(agent)
        parameters = nn.Parameter(shared.parameters)
        adam = torch.optim.Adam([parameters], args.learning_rate, eps=args.adam_epsilon, amsgrad=True, fused=True)
        adam.state[parameters] = shared.adam
        storage = GoalStorage(run_folder / "goals.bin", args.goal_storage_size, shared.goal_count)

        episodes = [Episode(args) for _ in range(args.envs_per_worker)]
        while not shared.stop.is_set():
            # A round: one episode in every environment, all by the same parameters, so that each is learned from by the
            # parameters that played it, as if every environment had a worker of its own.
            local.copy_(shared.parameters)
            warming_up = args.aux == "gace" and len(storage) < args.warmup
            for episode in episodes:
                shared.episodes[index] += 1
                episode.begin([args.seed, index, int(shared.episodes[index])])
            play(agent, episodes, device, "random" if warming_up else "sampled", lambda: not shared.stop.is_set())

            for episode in episodes:
                if shared.stop.is_set():
                    break
                report = {
                    "charts/success_ratio": episode.info["is_success"],
                    "charts/nongoal_ratio": episode.info["reached"] >= 0 and not episode.info["is_success"],
                    "charts/episode_length": len(episode.rewards),
                    "charts/episode_return": sum(episode.rewards),
                }
                # The authors do not train on episodes of one step, nor store their goal states.
                usable = len(episode.rewards) > 1 and not episode.info.get("engine_died", False)
                if args.aux == "gace" and usable:
                    store_goal_state(args, storage, episode)
                if usable and not warming_up:
                    with shared.updates.get_lock():
                        if shared.updates.value >= args.total_updates:
                            shared.stop.set()
                            break
                        shared.updates.value += 1
                        update = shared.updates.value
                    report |= learn(args, agent, gradient, episode, storage, update, device)
                    parameters.grad = gradient.to("cpu")
                    report["charts/learning_rate"] = adam.param_groups[0]["lr"] = learning_rate(args, update)
                    adam.step()
                    if update % args.eval_every == 0:
                        evaluations.put(evaluation_job(shared, update, splits_of(args.task)))
                with shared.env_steps.get_lock():
                    shared.env_steps.value += len(episode.rewards)
                reports.put(report)
    except BaseException:
        reports.put({"error": f"worker {index} failed:\n{traceback.format_exc()}"})
    finally:
        for episode in episodes:
            episode.env.close()


# ---------------------------------------------------------------------------------------------------------- evaluation


def evaluate(args, agent, split, device="cpu", goal=None, keep_going=lambda: True, num_envs=8, on_step=None):
    """Success ratio, length and return over `args.episodes` episodes with the most likely action, and the accuracy of
    the goal-discriminator on the goal states reached in them. The same episodes every time."""
    render_mode = "rgb_array" if on_step else None
    episodes = [Episode(args, split, render_mode) for _ in range(min(num_envs, args.episodes))]
    options = {"goal": goal} if goal else None
    successes, lengths, returns, states, labels = [], [], [], [], []
    for first in range(0, args.episodes, len(episodes)):
        played = episodes[: args.episodes - first]
        for seed, episode in enumerate(played, first):
            episode.begin([2**31, seed], options, center_crop=True)
        if not play(agent, played, device, "greedy", keep_going, on_step):
            break
        for episode in played:
            successes.append(episode.info["is_success"])
            lengths.append(len(episode.rewards))
            returns.append(sum(episode.rewards))
            if successes[-1] and len(episode.images) > 1:
                states.append(episode.goal_state)
                labels.append(episode.goal)
    for episode in episodes:
        episode.env.close()
    if len(successes) < args.episodes:
        return None
    accuracy = float("nan")
    if states and args.aux == "gace":
        with torch.no_grad():  # in batches like those of training, which matters with --goal-batch-norm
            batches = np.array_split(np.stack(states), max(1, len(states) // args.goal_batch_size))
            guesses = torch.cat([agent.classify(torch.from_numpy(batch).to(device)).argmax(-1) for batch in batches])
        accuracy = (guesses.cpu() == torch.tensor(labels)).float().mean().item()
    return {
        "split": split,
        "success_ratio": float(np.mean(successes)),
        "discriminator_accuracy": accuracy,
        "episode_length": float(np.mean(lengths)),
        "episode_return": float(np.mean(returns)),
    }


def evaluation_job(shared, update, splits):
    """What the evaluator needs: copying the parameters is all that a worker stops for."""
    return update, shared.env_steps.value, shared.parameters.numpy().copy(), splits


def evaluator(args, shared, reports, evaluations):
    """Evaluates copies of the parameters while the workers go on."""
    obey_main_process()
    torch.set_num_threads(1)
    try:
        agent = Agent(args)
        local, _ = flatten(agent)
        while not shared.abort.is_set():
            try:
                job = evaluations.get(timeout=0.2)
            except queue.Empty:
                continue
            if job is None:
                break
            update, env_steps, parameters, splits = job
            local.copy_(torch.from_numpy(parameters))
            for split in splits:
                result = evaluate(args, agent, split, keep_going=lambda: not shared.abort.is_set())
                if result is None:
                    break
                reports.put({"evaluation": {"update": update, "env_steps": env_steps, **result}})
    except BaseException:
        reports.put({"error": f"the evaluator failed:\n{traceback.format_exc()}"})


# ------------------------------------------------------------------------------------------------------------ training

METRICS = "update env_steps seconds split success_ratio discriminator_accuracy episode_length episode_return".split()


def splits_of(task):
    return ["seen", "unseen"] if task in ("v2", "v4") else ["seen"]


def algorithm(args):
    name = "a3c" + ("" if args.aux == "none" else f"+{args.aux}") + ("+gdan" if args.gdan else "")
    return name + ("" if args.freeze_discriminator_at is None else "+frozen")  # the ablation is not the method


def save_atomically(path, content):
    temporary = path.with_suffix(".tmp")
    torch.save(content, temporary)
    os.replace(temporary, path)


def load_checkpoint(path):
    """The checkpoint and its Args, or one line that says what is wrong with it."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        known = {f.name for f in fields(Args)}
        args = Args(**{k: v for k, v in checkpoint["args"].items() if k in known})
        expected = nn.utils.parameters_to_vector(Agent(args).parameters()).shape
        if checkpoint["parameters"].shape != expected:
            raise ValueError("its parameters are those of another network")
        checkpoint["parameters"] = checkpoint["parameters"].float()  # those in results/ are 16-bit
        return checkpoint, args
    except FileNotFoundError:
        raise SystemExit(f"{path} does not exist") from None
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise SystemExit(f"{path} is not a whole checkpoint of this script: {reason}") from None


def summarise(reports):
    """Means over the reports of episodes; those that were not learned from have no losses."""
    names = dict.fromkeys(name for report in reports for name in report)
    return {name: np.mean([report[name] for report in reports if name in report]) for name in names}


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


def lost_evaluations(args, updates, rows):
    """The splits whose last evaluation an interruption has cost the run."""
    due = updates if updates == args.total_updates else updates - updates % args.eval_every
    evaluated = {row["split"] for row in rows if int(row["update"]) >= due}
    return [split for split in splits_of(args.task) if due and split not in evaluated]


def train(args, run_folder, checkpoint=None):
    context = mp.get_context("spawn")
    torch.manual_seed(args.seed)
    shared = Shared(Agent(args), args.num_workers, context)
    if checkpoint:
        shared.load(checkpoint)
    updates_before = shared.updates.value
    log = Log(args, run_folder, updates_before, checkpoint["seconds"] if checkpoint else 0)

    def save():
        content = {**shared.state(), "seconds": log.seconds(), "args": asdict(replace(args, resume=None))}
        save_atomically(run_folder / "checkpoint.pt", content)

    signals = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: signals.append(received))
    reports, evaluations = context.Queue(), context.Queue()
    workers = [
        context.Process(target=worker, args=(index, args, run_folder, shared, reports, evaluations), daemon=True)
        for index in range(args.num_workers)
    ]
    evaluating = context.Process(target=evaluator, args=(args, shared, reports, evaluations), daemon=True)
    if lost := lost_evaluations(args, updates_before, log.rows):
        evaluations.put(evaluation_job(shared, updates_before, lost))
    for process in (*workers, evaluating):
        process.start()

    saved = shown = time.monotonic()
    window, recent, error, finished = [], deque(maxlen=500), None, False
    try:
        save()
        while not signals and not error:
            try:
                report = reports.get(timeout=0.2)
            except queue.Empty:
                report = {}
                if not finished and not any(process.is_alive() for process in workers):
                    if updates_before < args.total_updates and args.total_updates % args.eval_every:
                        evaluations.put(evaluation_job(shared, shared.updates.value, splits_of(args.task)))
                    evaluations.put(None)  # the evaluator ends after the evaluations it still has
                    finished = True
                if finished and not evaluating.is_alive():
                    break
            killed = [process for process in (*workers, evaluating) if process.exitcode not in (None, 0)]
            if "error" in report:
                error = report["error"]
            elif killed and not signals:
                error = f"{killed[0].name} was killed (exit code {killed[0].exitcode})"
            elif "evaluation" in report:
                log.evaluation(report["evaluation"])
            elif report:
                window.append(report)
                recent.append(report)
            if len(window) == 1000:
                log.scalars(summarise(window), shared.updates.value)
                window.clear()

            now = time.monotonic()
            if now - shown > 0.5 and recent:
                shown, means = now, summarise(recent)
                success, accuracy = means["charts/success_ratio"], means.get("charts/discriminator_accuracy", np.nan)
                if args.aux == "gace" and not shared.updates.value:
                    collected = min(shared.goal_count.value, args.warmup)
                    log.progress("warm-up", " goal states", collected, args.warmup, success, accuracy)
                else:
                    log.progress("training", " updates", shared.updates.value, args.total_updates, success, accuracy)
            if now - saved > args.checkpoint_every:
                save()
                saved = now
    finally:
        shared.stop.set()
        shared.abort.set()
        deadline = time.monotonic() + 5
        for process in (*workers, evaluating):
            process.join(timeout=max(0, deadline - time.monotonic()))
            process.kill()
        evaluations.cancel_join_thread()  # nobody is left to take what is still queued
        if not error:  # after an error, the last good checkpoint stays
            save()
        if window:
            log.scalars(summarise(window), shared.updates.value)
        log.close()
    if error:
        raise SystemExit(error)


def evaluate_checkpoint(args):
    """`--evaluate`: prints the results of a checkpoint; with `--capture-video`, writes a video of three episodes."""
    checkpoint, trained = load_checkpoint(args.evaluate)
    splits = splits_of(trained.task)
    if args.split and args.split not in splits:
        raise SystemExit(f"{trained.task} has no {args.split} split")
    goals = {name.lower(): name for name in envs.ITEMS}
    if args.goal and args.goal.lower() not in goals:
        raise SystemExit(f"unknown goal {args.goal!r}; use one of {', '.join(goals.values())}")
    device = torch.device("cuda" if args.cuda else "cpu")
    agent = Agent(trained).to(device)
    flatten(agent)[0].copy_(checkpoint["parameters"])
    trained.episodes = args.episodes
    for split in [args.split] if args.split else splits:
        row = evaluate(trained, agent, split, device, args.goal)
        print(describe({"update": checkpoint["updates"], **row}), flush=True)
        if args.capture_video:
            path = args.evaluate.with_name(f"{args.evaluate.stem}_{split}.gif")
            write_video(trained, agent, split, device, args.goal, path)
            print(f"wrote {path}")


def write_video(args, agent, split, device, goal, path):
    frames = []

    def film(episode, action):
        frame = Image.fromarray(episode.env.render())
        caption = f"{episode.instruction}   {('forward', 'left', 'right')[action]}"
        ImageDraw.Draw(frame).text((12, 8), caption, fill="white", font_size=22, stroke_width=2, stroke_fill="black")
        frames.append(frame)

    args = replace(args, episodes=3)
    evaluate(args, agent, split, device, goal, num_envs=1, on_step=film)
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=120, loop=0)


AT_LEAST_1 = "warmup goal_batch_size goal_storage_size num_workers envs_per_worker episodes eval_every".split()
FIXED = "task gdan aux seed epsilon_n goal_storage_size".split()


def main():
    args = tyro.cli(Args, description=__doc__)
    checkpoint, run_folder = None, args.resume
    if run_folder:  # with the run's own arguments, but for those given now
        checkpoint, own = load_checkpoint(run_folder / "checkpoint.pt")
        args = tyro.cli(Args, description=__doc__, default=own)
        for name in FIXED:
            if getattr(args, name) != getattr(own, name):
                raise SystemExit(f"a resumed run keeps its --{name.replace('_', '-')}: {getattr(own, name)}")
    if args.gdan and args.aux != "gace":
        raise SystemExit(f"--gdan needs the goal-discriminator, which --aux {args.aux} does not train: use --aux gace")
    for name in AT_LEAST_1:
        if getattr(args, name) < 1:
            raise SystemExit(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("seed", "learning_rate", "final_learning_rate"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise SystemExit(f"--{name.replace('_', '-')} must be a number of at least 0")
    if args.aux == "gace" and args.goal_storage_size < args.warmup:
        raise SystemExit(f"the warm-up collects {args.warmup} goal states: use a --goal-storage-size of at least that")
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
    try:
        run_folder.mkdir(parents=True, exist_ok=bool(checkpoint))
        (run_folder / "goals.bin").touch()
    except OSError as error:
        raise SystemExit(f"cannot write into the run folder {run_folder}: {error.strerror}") from None
    if checkpoint and checkpoint["goal_count"] and not (run_folder / "goals.bin").stat().st_size:
        raise SystemExit(f"{run_folder} has lost its goals.bin, without which the run cannot go on")
    if args.track:
        name = run_folder.name
        wandb.init(project="gace", name=name, id=name, resume="allow", sync_tensorboard=True, config=vars(args))
    print(f"run folder: {run_folder}")
    train(args, run_folder, checkpoint)


if __name__ == "__main__":
    main()

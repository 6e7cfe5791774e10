"""The equations of a3c_gace_vizdoom.py against references written out here, and the script run as a user runs it."""

import itertools
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import types
import uuid
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, Run, answer_of, call, engines, gradients, parent, run_in_process, wait_until

import a3c_gace_vizdoom as a3c
from tools import enjoy
from tools.scripted import Walker

RECORD_BYTES = 16 * 42 * 42 + 1


def random_images(*shape):
    return torch.randint(0, 256, (*shape, 16, 42, 42), dtype=torch.uint8)


def make_agent(**kwargs):
    torch.manual_seed(0)
    return a3c.Agent(a3c.Args(**kwargs))


def make_storage(path, capacity):
    return a3c.GoalStorage(
        path, (16, 42, 42), capacity, torch.tensor(0).share_memory_(), multiprocessing.get_context("fork").Lock()
    )


# ----------------------------------------------------------------------------------------------------------- equations


def test_returns_are_discounted_sums():
    rewards = [-0.01, -0.01, 9.9925]
    expected = [-0.01 + 0.9 * (-0.01 + 0.9 * 9.9925), -0.01 + 0.9 * 9.9925, 9.9925]
    assert a3c.discounted_sums(rewards, 0.9).tolist() == pytest.approx(expected)


def test_advantages_are_those_of_equation_3_for_lambda_1_and_of_one_step_for_lambda_0():
    rewards, values = [-0.1, 0.2, 1.0], [0.3, 0.5, 0.4]
    returns = a3c.discounted_sums(rewards, 0.9)
    assert torch.allclose(a3c.estimate_advantages(rewards, values, 0.9, 1.0), returns - torch.tensor(values))
    one_step = [-0.1 + 0.9 * 0.5 - 0.3, 0.2 + 0.9 * 0.4 - 0.5, 1.0 - 0.4]
    assert a3c.estimate_advantages(rewards, values, 0.9, 0.0).tolist() == pytest.approx(one_step)
    between = [one_step[0] + 0.45 * (one_step[1] + 0.45 * one_step[2]), one_step[1] + 0.45 * one_step[2], one_step[2]]
    assert a3c.estimate_advantages(rewards, values, 0.9, 0.5).tolist() == pytest.approx(between)


def test_policy_and_value_loss_are_equations_3_and_4():
    torch.manual_seed(0)
    logits, advantages, actions = torch.randn(5, 3), torch.randn(5), torch.tensor([0, 2, 1, 1, 0])
    loss = entropy = 0.0
    for t in range(5):
        p = logits[t].exp() / logits[t].exp().sum()
        h = -sum(p[a] * p[a].log() for a in range(3))
        loss -= p[actions[t]].log() * advantages[t] + 0.01 * h
        entropy += h / 5
    result = a3c.policy_loss(logits, actions, advantages, 0.01)
    assert result[0].item() == pytest.approx(loss.item(), rel=1e-5)
    assert result[1].item() == pytest.approx(entropy.item(), rel=1e-5)
    values, returns = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.5])
    assert a3c.value_loss(values, returns).item() == pytest.approx(4.25)


def test_gace_loss_is_equation_8():
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 3, 1])
    g = logits.exp() / logits.exp().sum(-1, keepdim=True)
    expected = -(torch.eye(4)[labels] * g.log()).sum() / 6
    assert a3c.gace_loss(logits, labels).item() == pytest.approx(expected.item(), rel=1e-5)


def test_attention_is_equations_10_and_11():
    actor_critic = make_agent(gdan=True).actor_critic
    gated, memory, query = torch.rand(3, 256), torch.rand(3, 256), torch.rand(3, 256)
    kv = torch.relu(torch.cat([gated, memory], 1) @ actor_critic.key_value.weight.T + actor_critic.key_value.bias)
    k, v = kv[:, :256], kv[:, 256:]
    u = torch.tanh(torch.relu(actor_critic.w_q(query)) + torch.relu(actor_critic.w_k(k)))
    x = torch.relu(actor_critic.combine(torch.cat([v * u, memory], 1)))
    logits, values = actor_critic.heads(gated, memory, query)
    assert torch.allclose(logits, actor_critic.policy(x), atol=1e-6)
    assert torch.allclose(values, actor_critic.value(x)[:, 0], atol=1e-6)


@pytest.mark.parametrize("gdan", [False, True])
def test_acting_step_by_step_equals_the_pass_over_the_episode(gdan):
    agent = make_agent(gdan=gdan)
    images, goals = random_images(6), torch.tensor([2] * 6)
    logits, values, _ = agent(images, goals)
    memory = torch.zeros(2, 1, 256)
    for t in range(6):
        step_logits, step_value, memory = agent.act(images[t : t + 1], goals[:1], memory)
        assert torch.allclose(step_logits[0], logits[t], atol=1e-5)
        assert torch.allclose(step_value[0], values[t], atol=1e-5)


def test_normalisation_is_per_frame_and_on_demand_per_batch_for_goal_states():
    agent = make_agent()
    extractor = agent.feature_extractor
    one, other, another = random_images(3)
    pairs = torch.stack([one, other]), torch.stack([one, another // 4])
    frames = [extractor(pair, per_frame=True)[0] for pair in pairs]
    assert torch.allclose(frames[0], frames[1], atol=1e-6)
    batches = [extractor(pair, per_frame=False)[0] for pair in pairs]
    assert not torch.allclose(batches[0], batches[1], atol=1e-3)
    alone = [extractor(one[None], per_frame=per_frame) for per_frame in (True, False)]
    assert torch.allclose(*alone, atol=1e-5)  # a batch of one frame is a frame
    as_in_acting = agent.goal_discriminator(extractor(pairs[0], per_frame=True))
    assert torch.allclose(agent.classify(pairs[0]), as_in_acting, atol=1e-6)
    agent.goal_batch_norm = True
    assert not torch.allclose(agent.classify(pairs[0]), as_in_acting, atol=1e-3)


# ----------------------------------------------------------------------------------------------- which loss trains what


@pytest.mark.parametrize("gdan", [False, True])
def test_gace_loss_reaches_extractor_and_discriminator_only(gdan):
    agent = make_agent(gdan=gdan)
    a3c.gace_loss(agent.classify(random_images(8)), torch.arange(8) % 4).backward()
    assert len(gradients(agent.feature_extractor)) == len(list(agent.feature_extractor.parameters()))
    assert len(gradients(agent.goal_discriminator)) == 4
    assert not gradients(agent.actor_critic)


@pytest.mark.parametrize("gdan", [False, True])
def test_query_is_the_discriminators_first_layer(gdan):
    agent = make_agent(gdan=gdan)
    images, goals = random_images(4), torch.zeros(4, dtype=torch.long)
    before = agent(images, goals)[0]
    before.square().sum().backward()
    assert bool(gradients(agent.goal_discriminator.hidden)) == gdan
    assert not gradients(agent.goal_discriminator.output)
    with torch.no_grad():
        agent.goal_discriminator.output.weight.add_(1)
        assert torch.allclose(agent(images, goals)[0], before, atol=1e-6)
        agent.goal_discriminator.hidden.weight.mul_(-1)
        assert torch.allclose(agent(images, goals)[0], before, atol=1e-6) != gdan


def fake_episode(goal=1, steps=6):
    episode = types.SimpleNamespace(goal=goal, rng=np.random.default_rng(0))
    episode.images = [image.numpy() for image in random_images(steps)]
    episode.actions, episode.rewards = [0, 1, 2] * (steps // 3), [-0.01] * (steps - 1) + [10.0]
    return episode


@pytest.fixture
def storage(tmp_path):
    storage = make_storage(tmp_path / "goals.bin", 1000)
    for i in range(60):
        storage.add(random_images(1)[0].numpy(), i % 4)
    return storage


@pytest.mark.parametrize("gdan", [False, True])
def test_frozen_discriminator_gets_no_gradient_but_is_still_measured(gdan, storage):
    """With --gdan the RL loss reaches its hidden layer, and must not move it either."""
    for frozen in (False, True):
        args = a3c.Args(gdan=gdan)
        agent = make_agent(gdan=gdan)
        _, gradient = a3c.flatten(agent)
        report = a3c.learn(args, agent, gradient, fake_episode(), storage, frozen, "cpu")
        assert bool(gradients(agent.goal_discriminator)) != frozen
        assert gradients(agent.feature_extractor) and gradients(agent.actor_critic)
        assert 0 <= report["losses/batch_accuracy"] <= 1 and report["losses/gace_loss"] > 0


def test_learn_is_equation_9_and_clips(storage):
    """The gradient of the script against the gradient of the total loss, written out."""
    args = a3c.Args(gdan=True, max_grad_norm=1e6, reward_scale=0.5, entropy_coef=0.02, eta=0.4, goal_batch_size=50)
    args.value_coef, args.gae_lambda = 0.5, 1.0  # the paper's
    agent = make_agent(gdan=True)
    episode = fake_episode()
    _, gradient = a3c.flatten(agent)
    a3c.learn(args, agent, gradient, episode, storage, False, "cpu")
    found = gradient.clone()

    images, actions = torch.from_numpy(np.stack(episode.images)), torch.tensor(episode.actions)
    logits, values, _ = agent(images, torch.ones(6, dtype=torch.long))
    loss, following = 0, 0
    for t in reversed(range(6)):
        following = episode.rewards[t] * 0.5 + 0.99 * following
        log_p = torch.log_softmax(logits[t], 0)
        loss = loss - log_p[actions[t]] * (following - values[t].detach()) + 0.02 * (log_p.exp() * log_p).sum()
        loss = loss + 0.5 * (following - values[t]) ** 2
    rng = np.random.default_rng(0)
    states, labels = storage.sample(50, rng)
    goal_logits = agent.classify(torch.from_numpy(a3c.augmented(states, rng)))
    loss = loss - 0.4 * torch.log_softmax(goal_logits, -1)[range(50), labels].mean()
    gradient.zero_()
    loss.backward()
    assert torch.allclose(found, gradient, rtol=1e-3, atol=1e-4)

    args.max_grad_norm = 1.0
    episode.rng = np.random.default_rng(0)
    report = a3c.learn(args, agent, gradient, episode, storage, False, "cpu")
    assert gradient.norm().item() == pytest.approx(1, rel=1e-4)
    assert report["losses/gradient_norm"] == pytest.approx(found.norm().item(), rel=1e-3)


def test_label_out_of_range_is_an_error(storage):
    agent = make_agent()
    _, gradient = a3c.flatten(agent)
    for _ in range(100):
        storage.add(random_images(1)[0].numpy(), 77)
    with pytest.raises(OSError, match="goals.bin is damaged"):
        a3c.learn(a3c.Args(), agent, gradient, fake_episode(), storage, False, "cpu")


def test_loss_that_is_not_finite_is_an_error(storage):
    agent = make_agent()
    _, gradient = a3c.flatten(agent)
    episode = fake_episode()
    episode.rewards[-1] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        a3c.learn(a3c.Args(), agent, gradient, episode, storage, False, "cpu")


class FakeRun:
    """Learns from real episodes in this process, without workers."""

    def __init__(self, args):
        self.args, self.updates = args, 0
        self.agent = make_agent(aux=args.aux)
        vector, self.gradient = a3c.flatten(self.agent)
        self.parameters = torch.nn.Parameter(vector)
        self.adam = torch.optim.Adam([self.parameters], eps=args.adam_epsilon, amsgrad=True, fused=True)
        self.episodes = [a3c.Episode(args) for _ in range(10)]

    def play(self):
        for index, episode in enumerate(self.episodes):
            episode.begin([self.updates, index])
        a3c.play(self.agent, self.episodes, "sampled")

    def train(self, updates):
        while self.updates < updates:
            self.play()
            for episode in self.episodes:
                self.updates += 1
                a3c.learn(self.args, self.agent, self.gradient, episode, None, False, "cpu")
                self.parameters.grad = self.gradient
                self.adam.param_groups[0]["lr"] = a3c.learning_rate(self.args, self.updates)
                self.adam.step()

    def encoder_norms(self):
        """Mean norm of the encoder's gradient by the RL loss, and by the auxiliary loss, over ten episodes."""
        size = sum(p.numel() for p in self.agent.feature_extractor.parameters())
        self.play()
        norms = []
        for episode in self.episodes:
            found = []
            for coef in (0.0, self.args.vae_coef):
                torch.manual_seed(0)  # the latent's noise
                args = replace(self.args, vae_coef=coef, max_grad_norm=1e6)
                a3c.learn(args, self.agent, self.gradient, episode, None, False, "cpu")
                found.append(self.gradient[:size].clone())
            norms.append((found[0].norm().item(), (found[1] - found[0]).norm().item()))
        return np.mean(norms, 0)


@pytest.mark.slow
def test_vae_loss_weighs_as_much_as_the_rl_loss():
    """On the encoder, within a factor of 10, at the start and after 200 updates."""
    run = FakeRun(a3c.Args(aux="vae"))
    for updates in (0, 200):
        run.train(updates)
        rl, vae = run.encoder_norms()
        print(f"gradient on the encoder after {updates} updates: RL {rl:.3g}, VAE {vae:.3g}")
        assert 0.1 < vae / rl < 10
    for episode in run.episodes:
        episode.env.close()


def test_vae_and_rad_shapes():
    agent = make_agent(aux="vae")
    images = random_images(3)
    loss = a3c.vae_loss(agent.vae, agent(images, torch.zeros(3, dtype=torch.long))[2], images)
    loss.backward()
    assert loss > 0 and gradients(agent.feature_extractor) and not gradients(agent.actor_critic)
    cropped = images[..., 3:39, 1:37]
    assert make_agent(aux="rad")(cropped, torch.zeros(3, dtype=torch.long))[0].shape == (3, 3)


# -------------------------------------------------------------------------------------------------------- goal storage


def add_many(storage, label, number):
    for i in range(number):
        storage.add(np.full((16, 42, 42), label * 10 + i % 10, np.uint8), label)


def test_goal_storage_is_shared_bounded_and_keeps_labels(tmp_path):
    storage = make_storage(tmp_path / "goals.bin", 100)
    workers = [multiprocessing.get_context("fork").Process(target=add_many, args=(storage, i, 40)) for i in range(4)]
    for process in workers:
        process.start()
    for process in workers:
        process.join()
    assert len(storage) == 100 and storage.count == 160
    states, labels = storage.sample(500, np.random.default_rng(0))
    assert states.shape == (500, 16, 42, 42) and states.dtype == np.uint8 and labels.shape == (500,)
    assert (states[:, 0, 0, 0] // 10 == labels).all() and (states == states[:, :1, :1, :1]).all()
    assert (tmp_path / "goals.bin").stat().st_size == 100 * RECORD_BYTES


def test_goal_storage_keeps_the_state_as_it_was(tmp_path):
    storage = make_storage(tmp_path / "goals.bin", 10)
    state = random_images(1)[0]
    storage.add(state.numpy(), 3)
    states, labels = storage.sample(2, np.random.default_rng(0))
    assert np.array_equal(states[1], state) and labels.tolist() == [3, 3]


def test_augmented_states_are_mirrored_and_shifted():
    state = random_images(1)[0].numpy()
    rows, columns = np.mgrid[:42, :42]
    expected = {}
    for mirrored, y, x in itertools.product((False, True), range(-3, 4), range(-3, 4)):
        seen = columns if not mirrored else 41 - columns
        moved = state[:, np.clip(rows + y, 0, 41), np.clip(seen + x, 0, 41)]
        expected[moved.tobytes()] = mirrored
    found = a3c.augmented(np.repeat(state[None], 2000, 0), np.random.default_rng(0))
    counts = [expected[image.tobytes()] for image in found]  # a KeyError is any other change
    assert len({image.tobytes() for image in found}) == 98 and 900 < sum(counts) < 1100


def test_auto_labelling():
    """Successes by their goal, one step before the last state acted in; time-outs as negatives; other objects not."""

    def play(seed, policy):
        episode.begin([seed])
        choose, seen = policy(episode.env.unwrapped), []
        while not episode.over:
            seen.append(episode.image)
            episode.step(choose())
        return seen

    episode = a3c.Episode(a3c.Args())
    goals, outcomes = set(), set()
    for seed in range(3, 9):
        seen = play(seed, lambda env: Walker(env).action)
        state, label = episode.goal_state()
        assert episode.info["is_success"] and label == episode.goal
        assert np.array_equal(state, seen[-2]) and not np.array_equal(state, seen[-1])
        goals.add(episode.goal)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        seen = play(seed, lambda env, rng=rng: lambda: int(rng.integers(3)))
        if not episode.info["is_success"]:
            outcomes.add(episode.info["reached"] < 0)
            found = episode.goal_state()
            if episode.info["reached"] < 0:
                assert found[1] == 4 and np.array_equal(found[0], seen[-1])
            else:
                assert found is None
    assert len(goals) > 1 and outcomes == {True, False}
    episode.rewards = episode.rewards[:1]
    assert episode.goal_state() is None  # the authors store nothing of episodes of one step
    episode.env.close()


def test_sampled_actions_follow_the_policy():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    agent = types.SimpleNamespace(act=lambda images, goals, memory: (logits, None, memory))
    counts, rng = np.zeros(3), np.random.default_rng(0)

    class Once:
        goal, image, over, num_actions = 0, np.zeros((16, 42, 42), np.uint8), False, 3

        def __init__(self):
            self.rng = rng

        def step(self, action):
            counts[action] += 1
            self.over = True

    for _ in range(3000):
        a3c.play(agent, [Once()], "sampled")
    assert np.abs(counts / 3000 - logits.softmax(-1).numpy()[0]).max() < 0.03
    a3c.play(agent, [Once()], "greedy")
    assert counts.sum() == 3001


def test_accuracy_is_measured_on_the_same_states_in_every_run():
    args = a3c.Args(task="v2", accuracy_states=5, seed=7)
    states, labels = a3c.collect_goal_states(args, "unseen", lambda: None)
    again, _ = a3c.collect_goal_states(replace(args, seed=8, gdan=True), "unseen", lambda: None)
    assert labels.tolist() == [0, 1, 2, 3, 0] and torch.equal(states, again)
    agent = make_agent()
    with torch.no_grad():
        guesses = agent.classify(states).argmax(-1)
    assert a3c.discriminator_accuracy(args, agent, states, guesses) == 1.0
    assert a3c.discriminator_accuracy(args, agent, states, (guesses + 1) % 4) == 0.0


# ------------------------------------------------------------------------------------------------------- as a user does

SCRIPT = "a3c_gace_vizdoom.py"
BASELINE = "--total-updates 6 --num-workers 1 --num-envs 2 --eval-every 3 --episodes 4 --no-cuda".split()
TINY = [*BASELINE, "--warmup", "2", "--accuracy-states", "1"]
MODES = {
    "a3c": ["--aux", "none"],
    "a3c+vae": ["--aux", "vae"],
    "a3c+rad": ["--aux", "rad"],
    "a3c+gace": ["--task", "v2"],
    "a3c+gace+gdan": ["--gdan", "--epsilon-n", "0.5", "--num-workers", "2"],
}


@pytest.mark.parametrize("algorithm", MODES)
def test_every_mode_trains_evaluates_and_is_evaluated_again(algorithm, tmp_path, monkeypatch, capsys):
    run = Run(tmp_path, SCRIPT, *(TINY if "gace" in algorithm else BASELINE), *MODES[algorithm])
    assert run.wait() == 0, run.output
    task = "v2" if algorithm == "a3c+gace" else "v1"
    assert run.run_folder.name.startswith(f"{task}__{algorithm}__1__")
    splits = ["seen", "unseen"] if task == "v2" else ["seen"]
    assert [(row["update"], row["split"]) for row in run.rows()] == [(u, s) for u in ("3", "6") for s in splits]
    assert list(run.rows()[0]) == a3c.METRICS
    assert all(0 <= float(row["success_ratio"]) <= 1 and int(row["env_steps"]) > 0 for row in run.rows())
    measured = [float(row["discriminator_accuracy"]) for row in run.rows()]
    assert all(0 <= accuracy <= 1 for accuracy in measured) if "gace" in algorithm else all(np.isnan(measured))
    assert run.updates() == 6 and not run.descendants()
    call(enjoy, monkeypatch, run.run_folder / "checkpoint.pt", "--episodes", "4")
    shown = capsys.readouterr().out.splitlines()
    last = [float(row["success_ratio"]) for row in run.rows()][-len(splits) :]
    assert [f"success {ratio:.1%}" in line for ratio, line in zip(last, shown, strict=True)] == [True] * len(splits)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("finished"), SCRIPT, *BASELINE, "--aux", "none", "--total-updates", "4")
    assert run.wait() == 0, run.output
    return run.run_folder


def copy_of(finished, tmp_path):
    """A copy of the finished run, for tests that resume it."""
    return Path(shutil.copytree(finished, tmp_path / "runs" / finished.name))


def test_names_of_the_algorithms():
    names = [a3c.algorithm(a3c.Args(aux=aux)) for aux in ("none", "vae", "rad", "gace")]
    assert names == ["a3c", "a3c+vae", "a3c+rad", "a3c+gace"]
    assert a3c.algorithm(a3c.Args(gdan=True)) == "a3c+gace+gdan"
    frozen = [a3c.algorithm(a3c.Args(freeze_discriminator_at=update)) for update in (10_000, 20_000)]
    assert frozen == ["a3c+gace+frozen10000", "a3c+gace+frozen20000"]
    assert a3c.algorithm(a3c.Args(gdan=True, paper=True)) == "a3c+gace+gdan+paper"
    assert a3c.algorithm(a3c.Args(exp_name="mine")) == "mine"


def test_paper_sets_what_its_help_says():
    args = a3c.Args(paper=True, **a3c.PAPER)
    said = next(field for field in re.findall(r'paper: bool = False\n    """(.*?)"""', source(), re.DOTALL))
    flags = dict(re.findall(r"--((?!no-)[a-z-]+) (\S+)", said)) | {
        name: str(not name.startswith("no-")) for name in re.findall(r"--([a-z-]+)(?=\s--|$)", said)
    }
    told = {name.removeprefix("no-").replace("-", "_"): value for name, value in flags.items()}
    assert set(told) == set(a3c.PAPER)
    for name, value in a3c.PAPER.items():
        assert getattr(args, name) == value and (told[name] == str(value) or float(told[name]) == value)
        assert value != getattr(a3c.Args, name)


@pytest.mark.slow
def test_paper_and_resume_change_the_defaults_and_flags_win(tmp_path, monkeypatch):
    given = [*TINY, "--paper", "--total-updates", "1", "--gae-lambda", "0.9"]
    run_folder, first = run_in_process(a3c, tmp_path, monkeypatch, *given)
    assert "__a3c+gace+paper__" in run_folder.name
    args = first["args"]
    assert {name: args[name] for name in a3c.PAPER} == a3c.PAPER | {"gae_lambda": 0.9}
    before, after = (
        torch.cat([tensor.flatten() for tensor in run["agent"].values()])
        for run in (a3c.new_run(a3c.Args(**args)), first)
    )
    gradient = first["adam"]["exp_avg"] / 0.1
    step = 7e-5 * 0.001**0.5 * gradient / (0.001**0.5 * gradient.abs() + 1e-3)  # the authors' Adam, at update 1
    torch.testing.assert_close(before - after, step, rtol=0, atol=1e-6)
    for flag, new, old in [
        ("--task", "v2", "v1"),
        ("--gate-gain", "9", "1.0"),  # of the initial weights, which a resumed run has no more
        ("--freeze-discriminator-at", "5", "None"),  # it is part of the run's name
        ("--runs", "elsewhere", "runs"),
    ]:
        answer = answer_of(a3c, monkeypatch, "--resume", run_folder, flag, new)
        assert answer == f"a resumed run cannot change {flag}: it is {old}"
    given = ["--resume", run_folder, "--total-updates", "2", "--learning-rate", "1e-5"]
    _, resumed = run_in_process(a3c, tmp_path, monkeypatch, *given)
    assert resumed["args"] == args | {"total_updates": 2, "learning_rate": 1e-5}


@pytest.mark.slow
def test_ctrl_c_in_the_first_seconds(tmp_path):
    """While the main process collects goal states and the workers warm up."""
    with Run(tmp_path, SCRIPT, *TINY, "--accuracy-states", "500", "--warmup", "2000") as run:
        assert wait_until(lambda: len(engines(run.marker)) >= 3, 60)
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.wait(15) == 0 and "Traceback" not in run.output, run.output
        assert "--resume" in run.output.splitlines()[-1] and wait_until(lambda: not run.descendants(), 5)


def source():
    return (ROOT / SCRIPT).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_as_many_environments_whatever_the_machine(workers, tmp_path):
    endless = ["--num-workers", workers, "--num-envs", "5", "--total-updates", "100000", "--aux", "none"]
    with Run(tmp_path, SCRIPT, *BASELINE, *endless) as run:
        assert wait_until(lambda: len(engines(run.marker)) == 5, 60)
    assert a3c.Args(num_workers=9, num_envs=4).num_workers == 4


@pytest.mark.slow
def test_frozen_discriminator_stands_still_in_a_run(tmp_path, monkeypatch):
    """Not even Adam's momentum moves it, while the rest learns on."""
    given = [*TINY, "--gdan", "--freeze-discriminator-at", "6", "--learning-rate", "1e-3"]
    run_folder, before = run_in_process(a3c, tmp_path, monkeypatch, *given)
    _, after = run_in_process(a3c, tmp_path, monkeypatch, "--resume", run_folder, "--total-updates", "12")
    assert before["adam"]["exp_avg"].abs().sum() > 0
    moved = {name for name in after["agent"] if not torch.equal(after["agent"][name], before["agent"][name])}
    assert any(name.startswith("feature_extractor") for name in moved)
    assert not any(name.startswith("goal_discriminator") for name in moved)


@pytest.mark.slow
def test_warm_up_stores_the_goal_states_of_a_random_policy(tmp_path, monkeypatch):
    """It plays blind and draws only the successes: not a byte may differ from playing with images."""
    run_folder, _ = run_in_process(a3c, tmp_path, monkeypatch, *TINY, "--warmup", "6", "--total-updates", "1")
    found = np.fromfile(run_folder / "goals.bin", np.uint8).reshape(-1, RECORD_BYTES)
    episode, expected = a3c.Episode(a3c.Args()), []
    for number in itertools.count(1):
        episode.begin([1, number])
        a3c.play(None, [episode], "random")
        if (state := episode.goal_state()) and episode.info["is_success"]:
            expected.append(np.append(state[0].ravel(), np.uint8(state[1])))
        if len(expected) == 6:
            break
    episode.env.close()
    assert np.array_equal(found[:6], expected)


@pytest.mark.slow
def test_negatives_do_not_count_towards_the_warm_up(tmp_path, monkeypatch):
    given = [*TINY, "--epsilon-n", "1", "--total-updates", "1", "--warmup", "3", "--num-envs", "1"]
    run_folder, checkpoint = run_in_process(a3c, tmp_path, monkeypatch, *given)
    counters = checkpoint["counters"]
    labels = np.fromfile(run_folder / "goals.bin", np.uint8).reshape(-1, RECORD_BYTES)[:, -1]
    assert counters["goals"] == len(labels) and counters["successes"] == (labels < 4).sum() >= 3
    assert (labels == 4).sum() > 3


@pytest.mark.slow
def test_committed_agent_is_evaluated_out_of_the_box():
    """By the command of results/README.md, for one goal; a random policy succeeds in 6.6 %."""
    command = [sys.executable, "-m", "tools.enjoy", "results/v1__a3c+gace+gdan__2.pt", "--goal", "armor"]
    shown = subprocess.run([*command, "--episodes", "40"], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert float(shown.stdout.split("success ")[1].split("%")[0]) > 25


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_interrupted_run_leaves_nothing_behind_and_goes_on(how, tmp_path):
    endless = ["--total-updates", "100000", "--eval-every", "10", "--checkpoint-every", "1"]
    with Run(tmp_path, SCRIPT, *TINY, "--gdan", "--num-workers", "2", *endless) as run:
        assert wait_until(lambda: run.updates() >= 12, 60)
        assert engines(run.marker)
        if how == "SIGKILL":
            run.process.kill()
        else:
            os.killpg(run.process.pid, getattr(signal, how))  # as a terminal does, or a batch system
        run.wait(10)
        assert wait_until(lambda: not run.descendants(), 5)
    if how != "SIGKILL":
        assert f"--resume {run.run_folder.relative_to(tmp_path)}" in run.output.splitlines()[-1]
    before = run.checkpoint()
    updates = before["counters"]["updates"]
    goes_on = ["--total-updates", updates + 3, "--num-workers", "1"]
    resumed = Run(tmp_path, SCRIPT, "--resume", run.run_folder, *goes_on)
    assert resumed.wait() == 0, resumed.output
    after = run.checkpoint()
    assert after["counters"]["updates"] == updates + 3
    assert after["counters"]["env_steps"] > before["counters"]["env_steps"]
    assert abs(after["adam"]["step"] - updates - 3) <= 2  # workers may count a step of the shared Adam at once
    assert after["counters"]["goals"] >= before["counters"]["goals"]
    assert all(
        torch.equal(a, b) for a, b in zip(before["goal_states"]["seen"], after["goal_states"]["seen"], strict=True)
    )
    evaluated = [int(row["update"]) for row in run.rows()]
    assert evaluated == sorted(set(evaluated)) and evaluated[-1] == updates + 3


def test_learning_rate_rises_and_falls_to_zero():
    args = a3c.Args(learning_rate=4e-4, learning_rate_warmup=4, total_updates=8)
    rates = [a3c.learning_rate(args, update) for update in range(1, 10)]
    rises = [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]
    falls = [1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0]
    assert rates == pytest.approx([4e-4 * rise * fall for rise, fall in zip(rises, falls, strict=True)])
    constant = a3c.Args(learning_rate=4e-4, learning_rate_warmup=0, anneal_lr=False)
    assert a3c.learning_rate(constant, 1) == a3c.learning_rate(constant, 150_000) == 4e-4


def test_adam_with_paper_adds_epsilon_before_the_bias_correction():
    args = a3c.Args(paper=True, adam_epsilon=1e-3)
    torch.manual_seed(0)
    gradients = 1e-3 * torch.randn(20, 5)
    parameter = torch.nn.Parameter(torch.zeros(5))
    adam = torch.optim.Adam([parameter], 0.1, amsgrad=True, fused=True)
    expected, mean, square, largest = (torch.zeros(5) for _ in range(4))
    for update, gradient in enumerate(gradients, 1):
        parameter.grad = gradient.clone()
        adam.param_groups[0]["eps"] = a3c.adam_epsilon(args, update)
        adam.step()
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        largest = torch.maximum(largest, square)
        rate = 0.1 * (1 - 0.999**update) ** 0.5 / (1 - 0.9**update)
        expected = expected - rate * mean / (largest.sqrt() + 1e-3)
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-7)
    assert a3c.adam_epsilon(a3c.Args(adam_epsilon=1e-3), 1) == 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_interrupted_while_its_processes_start(how, finished, tmp_path):
    """When the run owes an evaluation, and no child has looked at its parent yet."""
    run_folder = copy_of(finished, tmp_path)
    torch.save(torch.load(run_folder / "checkpoint.pt") | {"rows": []}, run_folder / "checkpoint.pt")
    with Run(tmp_path, SCRIPT, "--resume", run_folder, "--total-updates", 10**6) as resumed:
        assert wait_until(lambda: len(resumed.descendants()) >= 2, 30)  # a worker, and multiprocessing's own
        resumed.process.send_signal(getattr(signal, how))
        resumed.wait(10)
        assert wait_until(lambda: not resumed.descendants(), 10)


@pytest.mark.slow
def test_an_evaluation_that_an_interruption_cost_is_made_up_for(finished, tmp_path, monkeypatch):
    run_folder = copy_of(finished, tmp_path)
    checkpoint = torch.load(run_folder / "checkpoint.pt")
    assert [row["update"] for row in checkpoint["rows"]] == [3, 4]
    torch.save(checkpoint | {"rows": []}, run_folder / "checkpoint.pt")
    _, resumed = run_in_process(a3c, tmp_path, monkeypatch, "--resume", run_folder)
    assert [row["update"] for row in resumed["rows"]] == [4]


@pytest.mark.slow
def test_dead_engine_costs_nothing_and_a_dead_worker_the_run(tmp_path):
    endless = ["--total-updates", "100000", "--eval-every", "100000", "--checkpoint-every", "1"]
    with Run(tmp_path, SCRIPT, *TINY, "--num-workers", "2", "--num-envs", "4", *endless) as run:
        assert wait_until(lambda: run.updates() >= 3, 60)
        before = run.updates()
        os.kill(engines(run.marker)[0], signal.SIGKILL)
        assert wait_until(lambda: run.updates() > before + 30, 60)
        assert wait_until(lambda: len(engines(run.marker)) == 4)  # it was replaced
        os.kill(parent(parent(engines(run.marker)[0])), signal.SIGKILL)  # between them is the engine's launcher
        assert run.wait(15) != 0
        assert "terminated with signal SIGKILL" in run.output.splitlines()[-2] and "--resume" in run.output
        assert wait_until(lambda: not run.descendants(), 5)


def test_engine_that_dies_in_an_evaluation_costs_no_episode(monkeypatch):
    monkeypatch.setenv("GACE_TEST", str(uuid.uuid4()))
    args, agent, steps = a3c.Args(episodes=6), make_agent(), itertools.count()

    def kill_one():
        if next(steps) == 5:
            os.kill(engines(f"GACE_TEST={os.environ['GACE_TEST']}")[0], signal.SIGKILL)

    disturbed = a3c.evaluate(args, agent, "seen", {}, on_step=kill_one, num_envs=3)
    undisturbed = a3c.evaluate(args, agent, "seen", {}, num_envs=3)
    del disturbed["discriminator_accuracy"], undisturbed["discriminator_accuracy"]  # nan
    assert disturbed == pytest.approx(undisturbed)


@pytest.mark.slow
def test_full_disk_keeps_the_last_checkpoint_and_one_process_trains_a_run(finished, tmp_path):
    run_folder = copy_of(finished, tmp_path)
    before = (run_folder / "checkpoint.pt").read_bytes()
    small = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10**7, 10**7))}  # no file may grow larger
    full = Run(tmp_path, SCRIPT, "--resume", run_folder, "--total-updates", "100000", **small)
    assert full.wait(60) != 0 and "File too large" in full.output, full.output
    assert "--resume" in full.output.splitlines()[-1] and "Traceback" not in full.output
    assert (run_folder / "checkpoint.pt").read_bytes() == before and not list(run_folder.glob("*.tmp"))
    assert wait_until(lambda: not full.descendants(), 5)

    with Run(tmp_path, SCRIPT, "--resume", run_folder, "--total-updates", "100000") as first:
        assert wait_until(lambda: len(first.descendants()) >= 2, 30)
        second = Run(tmp_path, SCRIPT, "--resume", run_folder)
        assert second.wait(30) != 0 and "is being trained by another process" in second.output.splitlines()[-1]


@pytest.mark.slow
def test_worker_that_raises_ends_the_run_with_its_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "broken.py").write_text(
        "import a3c_gace_vizdoom as a3c\n"
        "def broken(*args):\n    raise RuntimeError('broken on purpose')\n"
        "a3c.policy_loss = broken\n"
        "if __name__ == '__main__':\n    a3c.main()\n"
    )
    run = Run(tmp_path, tmp_path / "broken.py", *TINY)
    assert run.wait() != 0
    assert "broken on purpose" in run.output and "Traceback" in run.output and "--resume" in run.output
    assert wait_until(lambda: not run.descendants(), 5)
    assert not list(tmp_path.glob("pytorch-errorfile*"))


@pytest.mark.slow
def test_loss_that_is_not_finite_keeps_the_last_checkpoint(tmp_path):
    run = Run(tmp_path, SCRIPT, *TINY, "--learning-rate", "1e6", "--learning-rate-warmup", "0", "--total-updates", "60")
    assert run.wait() != 0 and "the loss is not finite" in run.output.splitlines()[-2]
    assert all(torch.isfinite(tensor).all() for tensor in run.checkpoint()["agent"].values())


def test_every_number_has_limits():
    for field in fields(a3c.Args):
        if field.type in ("int", "float") or field.type in (int, float):
            raise AssertionError(f"{field.name} has no limits")
    for name in ("eta", "gamma", "learning_rate", "max_grad_norm", "checkpoint_every", "reward_scale", "vae_coef"):
        for value in (float("nan"), float("inf"), -1.0):
            with pytest.raises(SystemExit, match=f"--{name.replace('_', '-')} must be between"):
                a3c.Args(**{name: value})


def test_bad_input_is_answered_in_a_line_or_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("damaged").mkdir()
    Path("damaged/checkpoint.pt").write_bytes(b"PK\x03\x04 cut off")
    Path("foreign").mkdir()
    torch.save({"model": torch.zeros(3)}, "foreign/checkpoint.pt")
    Path("agent").mkdir()
    agent = {"args": asdict(a3c.Args()), "agent": make_agent().state_dict(), "counters": {"updates": 1, "goals": 0}}
    torch.save(agent, "agent/checkpoint.pt")
    Path("lost").mkdir()
    moments = dict.fromkeys(("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"), torch.zeros(()))
    run = agent | {"adam": moments, "seconds": 1.0, "rows": [], "goal_states": {}}
    run["counters"] = dict.fromkeys(a3c.COUNTERS, 9)
    torch.save(run, "lost/checkpoint.pt")
    for name, change in {
        "no_counter": {"counters": {"updates": 1}},
        "wrong_type": {"seconds": "long"},
        "wrong_task": {"args": run["args"] | {"task": "v9"}},
        "wrong_number": {"args": run["args"] | {"eta": "much"}},
    }.items():
        Path(name).mkdir()
        torch.save(run | change, f"{name}/checkpoint.pt")
    for arguments, expected in [
        (["--gdan", "--aux", "vae"], "--gdan needs --aux gace"),
        (["--resume", "nowhere"], "nowhere: No such file or directory"),
        (["--resume", "."], "checkpoint.pt does not exist"),
        (["--resume", "damaged"], "damaged/checkpoint.pt is not a whole checkpoint of a3c_gace_vizdoom.py"),
        (["--resume", "foreign"], "foreign/checkpoint.pt is not a whole checkpoint"),
        (["--resume", "agent"], "agent/checkpoint.pt has no 'adam'"),
        (["--resume", "lost"], "goals.bin has lost goal states"),
        (["--resume", "no_counter"], "no_counter/checkpoint.pt has no 'env_steps'"),
        (["--resume", "wrong_type"], "wrong_type/checkpoint.pt has no 'seconds'"),
        (["--resume", "wrong_task"], "--task must be one of v1, v2, v3, v4, not v9"),
        (["--resume", "wrong_number"], "wrong_number/checkpoint.pt is not a whole checkpoint"),
        (["--num-workers", "0"], "--num-workers must be between 1 and"),
        (["--exp-name", "../mine"], "--exp-name must not contain"),
        (["--freeze-discriminator-at", "9", "--aux", "none"], "--freeze-discriminator-at needs --aux gace"),
        (["--eta", "0.3", "--aux", "none", "--paper"], "--eta needs --aux gace"),
        (["--no-augment", "--aux", "none"], "--augment needs --aux gace"),
        (["--vae-coef", "1"], "--vae-coef needs --aux vae"),
        (["--wandb-entity", "us"], "--wandb-entity needs --track"),
        (["--warmup", "0"], "--warmup must be between 1 and"),
        (["--seed", "-1"], "--seed must be between 0 and"),
    ]:
        assert expected in answer_of(a3c, monkeypatch, *arguments)
    assert not Path("runs").exists()
    Path("runs").write_text("in the way")
    run = Run(tmp_path, SCRIPT, *TINY)
    assert run.wait() != 0 and "cannot use the run folder" in run.output
    assert len(run.output.strip().splitlines()) <= 2, run.output

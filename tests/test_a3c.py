"""The equations of a3c_gace_vizdoom.py against references written out here, its workers, and what only it does.

What both scripts promise in the same words is in test_scripts.py."""

import itertools
import math
import multiprocessing
import os
import signal
import types

import numpy as np
import pytest
import torch
from helpers import Run, engines, parent, run_in_process, wait_until
from script_helpers import ENDLESS, TINY, assert_same, linear

import a3c_gace_vizdoom as a3c
from tools.scripted import Walker

SCRIPT = "a3c_gace_vizdoom.py"
RECORD = np.dtype([("state", np.uint8, (16, 42, 42)), ("label", np.uint8)])  # of goals.bin


def random_images(number):
    return torch.randint(0, 256, (number, 16, 42, 42), dtype=torch.uint8)


def make_agent(**settings):
    torch.manual_seed(0)
    return a3c.Agent(a3c.Args(**settings))


# ------------------------------------------------------------------------------------------------------------- losses


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


def test_policy_value_and_gace_loss_are_equations_3_4_and_8():
    torch.manual_seed(0)
    logits, advantages, actions = torch.randn(5, 3), torch.randn(5), [0, 2, 1, 1, 0]
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    entropies = -(p * p.log()).sum(-1)
    loss, entropy = a3c.policy_loss(logits, torch.tensor(actions), advantages, 0.01)
    expected = sum(-p[t, actions[t]].log() * advantages[t] - 0.01 * entropies[t] for t in range(5))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert entropy.item() == pytest.approx(entropies.mean().item(), rel=1e-5)
    assert a3c.value_loss(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.5])).item() == pytest.approx(4.25)
    expected = -(torch.eye(3)[actions] * p.log()).sum() / 5
    assert a3c.gace_loss(logits, torch.tensor(actions)).item() == pytest.approx(expected.item(), rel=1e-5)


def test_vae():
    """The reconstruction error of each image, plus KL(N(m, s^2) || N(0, 1)) = (m^2 + s^2 - 1) / 2 - ln s."""
    images = torch.tensor([[[[0, 255]]], [[[51, 0]]]], dtype=torch.uint8)
    decoded = torch.tensor([[[[0.5, 0.0]]], [[[0.2, 3.0]]]])
    mean, deviation = torch.tensor([[1.0, -2.0], [0.0, 0.5]]), torch.tensor([[1.0, 2.0], [1.0, 0.5]])
    first = 0.5**2 + 1 + (1 + 1 - 1) / 2 - 0 + (4 + 4 - 1) / 2 - math.log(2)
    second = 3**2 + 0 + (0.25 + 0.25 - 1) / 2 - math.log(0.5)
    loss = a3c.vae_loss(decoded, images, mean, 2 * deviation.log())
    assert loss.item() == pytest.approx((first + second) / 2)

    torch.manual_seed(0)
    vae = a3c.VAE((1, 8, 8))
    vae.decoder = torch.nn.Unflatten(1, (1, 8, 8))
    with torch.no_grad():
        vae.gaussian.bias[:64], vae.gaussian.bias[64:] = 3.0, math.log(4)
        latent, *_ = vae(torch.zeros(2000, 256))
    assert abs(latent.mean() - 3) < 0.1 and abs(latent.std() - 2) < 0.1


# ------------------------------------------------------------------------------------------------------- the networks


def mlp(layers, x):
    """Linear layers with ReLUs between them."""
    *hidden, last = layers[::2]
    for layer in hidden:
        x = linear(layer, x).clamp(min=0)
    return linear(last, x)


def encode(extractor, images, over=(2, 3)):
    """Appendix B.2, normalised over these dimensions: each frame alone, or with 0 all frames together."""
    x = images / 255
    for conv, norm in zip(extractor.convs, extractor.norms, strict=True):
        x = torch.nn.functional.conv2d(x, conv.weight, conv.bias, stride=2, padding=1)
        variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
        x = (x - mean) / (variance + 1e-5).sqrt() * norm.weight[:, None, None] + norm.bias[:, None, None]
        x = x.clamp(min=0)
    return linear(extractor.linear, x.flatten(1)).clamp(min=0)


@pytest.mark.parametrize("gdan", [False, True])
def test_forward_pass_is_the_papers(gdan, double):
    """Section 3.4 and Appendix B.2, from the images of an episode to policy and value, with their gradients."""
    agent = make_agent(gdan=gdan)
    for parameter in agent.parameters():
        torch.nn.init.normal_(parameter.data, std=0.1)  # also biases and normalisation
    images, goals = random_images(7), torch.tensor([2] * 7)
    e = encode(agent.feature_extractor, images)
    gate = 1 / (1 + torch.exp(-linear(agent.instruction, agent.embedding.weight[goals])))
    m = e * gate
    weight_x, weight_h, bias_x, bias_h = agent.lstm.all_weights[0]
    hidden, cell, e1 = torch.zeros(256), torch.zeros(256), []
    for step in torch.cat([m, gate], 1):
        parts = weight_x @ step + bias_x + weight_h @ hidden + bias_h
        i, f, o = (parts[256 * k : 256 * (k + 1)].sigmoid() for k in (0, 1, 3))
        cell = f * cell + i * parts[512:768].tanh()
        hidden = o * cell.tanh()
        e1.append(hidden)
    e1 = torch.stack(e1)
    heads = [m, e1]
    if gdan:
        q = linear(agent.goal_discriminator[0], e).clamp(min=0)
        k, v = e1[:, :128], e1[:, 128:]
        u = torch.tanh(q @ agent.w_q.weight.T + k @ agent.w_k.weight.T)  # Eq. 10
        heads.append(v * u)  # Eq. 11
    heads = torch.cat(heads, 1)
    expected = mlp(agent.policy, heads), mlp(agent.value, heads)[:, 0], mlp(agent.goal_discriminator, e)  # and Eq. 7

    logits, values, *_ = agent(images, goals)
    found, parameters = (logits, values, agent.classify(images)), list(agent.parameters())
    assert_same(found, expected)
    for pair in zip(found, expected, strict=True):  # no gradient stops on the way, and none goes elsewhere
        gradients = (
            torch.autograd.grad(x.square().sum(), parameters, retain_graph=True, materialize_grads=True) for x in pair
        )
        assert_same(*gradients)

    lstm_state = torch.zeros(2, 1, 256)  # acting step by step equals the pass over the episode
    for t in range(7):
        step_logits, step_value, lstm_state, _ = agent(images[t : t + 1], goals[:1], lstm_state)
        assert_same((step_logits[0], step_value[0]), (logits[t], values[t]))
    agent.goal_batch_norm = True
    assert_same(
        agent.classify(images), mlp(agent.goal_discriminator, encode(agent.feature_extractor, images, (0, 2, 3)))
    )


# ----------------------------------------------------------------------------------------------------------- learning


def make_storage(folder, capacity):
    lock = multiprocessing.get_context("fork").Lock()
    return a3c.GoalStorage(folder / "goals.bin", a3c.Args(goal_storage_size=capacity), torch.tensor(0), lock)


@pytest.mark.parametrize(
    ("algorithm", "gae_lambda"), [("none", 0.8), ("gace", 1.0), ("gdan", 1.0), ("frozen", 1.0), ("vae", 1.0)]
)
def test_learn_is_equation_9_and_clips(algorithm, gae_lambda, tmp_path, double):
    """The gradient of the script against the gradient of the total loss, written out."""
    aux, gdan, frozen = algorithm, algorithm in ("gdan", "frozen"), algorithm == "frozen"
    aux = "gace" if gdan else aux
    args = a3c.Args(aux=aux, gdan=gdan, gae_lambda=gae_lambda, eta=0.4, goal_batch_size=5, vae_coef=0.3)
    args.max_grad_norm, args.reward_scale, args.entropy_coef, args.value_coef = 1e6, 0.5, 0.02, 0.6
    agent, storage = make_agent(aux=aux, gdan=gdan), make_storage(tmp_path, 20)
    images, actions, rewards = random_images(6), [0, 1, 2, 2, 1, 0], [-0.01] * 5 + [10.0]
    for label in range(20):
        storage.add(random_images(1)[0].numpy(), label % 4)
    episode = types.SimpleNamespace(images=list(images.numpy()), actions=actions, rewards=rewards, goal=1)
    _, gradient = a3c.flatten(agent)

    def learn():
        torch.manual_seed(1)
        episode.rng = np.random.default_rng(0)
        return a3c.learn(args, agent, gradient, episode, storage, frozen, "cpu")

    report, found = learn(), gradient.clone()
    agent.requires_grad_(True)
    logits, values, _, features = agent(images, torch.ones(6, dtype=torch.long))
    loss = following = advantage = next_value = 0
    for t in reversed(range(6)):
        reward, value = rewards[t] * 0.5, values[t].item()
        following = reward + 0.99 * following  # R_t
        advantage = reward + 0.99 * next_value - value + 0.99 * gae_lambda * advantage
        next_value = value
        assert gae_lambda < 1 or advantage == pytest.approx(following - value)
        log_p = torch.log_softmax(logits[t], 0)
        loss = loss - log_p[actions[t]] * advantage + 0.02 * (log_p.exp() * log_p).sum()  # Eq. 3
        loss = loss + 0.6 * (following - values[t]) ** 2  # Eq. 4 and 5
    if aux == "gace":
        rng = np.random.default_rng(0)
        states, labels = storage.sample(5, rng)
        log_g = torch.log_softmax(agent.classify(torch.from_numpy(a3c.augmented(states, rng))), -1)
        gace_loss = -log_g[range(5), labels].mean()  # Eq. 8
        assert report["losses/gace_loss"] == pytest.approx(gace_loss.item())  # also measured when frozen
        loss = loss + (0 if frozen else 0.4) * gace_loss  # Eq. 9
    elif aux == "vae":
        torch.manual_seed(1)
        loss = loss + 0.3 * a3c.vae_loss((vae := agent.vae(features))[0], images, *vae[1:])
    gradient.zero_()
    loss.backward()
    for parameter in agent.goal_discriminator.parameters() if frozen else ():
        parameter.grad.zero_()  # with GDAN, the RL loss reaches the first layer
    assert_same(found, gradient)
    assert report["losses/gradient_norm"] == pytest.approx(found.norm().item())
    args.max_grad_norm = 1.0
    learn()
    assert_same(gradient, found / found.norm())


def test_learning_rate_rises_and_falls_to_zero():
    args = a3c.Args(learning_rate=4e-4, learning_rate_warmup=4, total_updates=8)
    rates = [a3c.adam_settings(args, update)["lr"] for update in range(1, 10)]
    rises = [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]
    falls = [1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0]
    assert rates == pytest.approx([4e-4 * rise * fall for rise, fall in zip(rises, falls, strict=True)])
    constant = a3c.Args(learning_rate=4e-4, learning_rate_warmup=0, anneal_lr=False)
    assert a3c.adam_settings(constant, 1)["lr"] == a3c.adam_settings(constant, 150_000)["lr"] == 4e-4


def test_adam_with_paper_adds_epsilon_before_the_bias_correction():
    args, parameter = a3c.Args(**a3c.PAPER), torch.nn.Parameter(torch.zeros(5))
    adam = torch.optim.Adam([parameter], amsgrad=True, fused=True)
    expected, mean, square, largest = (torch.zeros(5) for _ in range(4))
    torch.manual_seed(0)
    for update, gradient in enumerate(1e-3 * torch.randn(20, 5), 1):
        parameter.grad = gradient.clone()
        adam.param_groups[0] |= a3c.adam_settings(args, update)
        adam.step()
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        largest = torch.maximum(largest, square)
        rate = 7e-5 * (1 - 0.999**update) ** 0.5 / (1 - 0.9**update)
        expected = expected - rate * mean / (largest.sqrt() + 1e-3)
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-9)
    assert a3c.adam_settings(a3c.Args(adam_epsilon=1e-3), 1)["eps"] == 1e-3


# ------------------------------------------------------------------------------------------------------------ playing


def add_many(storage, label, number):
    for i in range(number):
        storage.add(np.full((16, 42, 42), label * 10 + i % 10, np.uint8), label)


def test_goal_storage_is_shared_by_processes(tmp_path):
    storage = make_storage(tmp_path, 100)
    storage.count.share_memory_()
    workers = [multiprocessing.get_context("fork").Process(target=add_many, args=(storage, i, 40)) for i in range(4)]
    for process in workers:
        process.start()
    for process in workers:
        process.join()
    states, labels = storage.sample(500, np.random.default_rng(0))
    assert storage.count == 160 and len(set(labels.tolist())) > 2
    assert (states[:, 0, 0, 0] // 10 == labels).all() and (states == states[:, :1, :1, :1]).all()


def test_auto_labelling():
    """A success is stored with its goal, as it was two steps before; a time-out as a negative; nothing else."""
    episode, outcomes = a3c.Episode(a3c.Args()), []
    for seed, scripted in [(3, True), (4, True), *((seed, False) for seed in range(20))]:
        episode.begin([seed])
        choose, seen = Walker(episode.env.unwrapped).action if scripted else lambda: int(episode.rng.integers(3)), []
        while not episode.over:
            seen.append(episode.image)
            episode.step(choose())
        found, reached = episode.goal_state(), episode.info["reached"]
        outcomes.append("success" if reached == episode.goal else "time-out" if reached < 0 else "another")
        if outcomes[-1] == "another" or len(seen) == 1:  # the authors store nothing of episodes of one step
            assert found is None
        else:
            state, label = (seen[-2], episode.goal) if reached >= 0 else (seen[-1], 4)
            assert found[1] == label and np.array_equal(found[0], state)
    assert set(outcomes) == {"success", "time-out", "another"}
    episode.env.close()


def test_playing_remembers_each_episode():
    """Episodes of different lengths in one batch take the actions that the pass over each of them prefers."""
    agent, episodes = make_agent(gdan=True), [a3c.Episode(a3c.Args()) for _ in range(5)]
    for parameter in agent.parameters():
        torch.nn.init.normal_(parameter.data, std=0.1)
    for seed, episode in enumerate(episodes):
        episode.begin([seed])
    a3c.play(agent, episodes, "greedy")
    for episode in episodes:
        goals = torch.full((len(episode.actions),), episode.goal)
        assert agent(torch.from_numpy(np.stack(episode.images)), goals)[0].argmax(-1).tolist() == episode.actions
        episode.env.close()
    assert len({len(episode.actions) for episode in episodes}) > 1


class LongEpisode:
    """An episode of 3,000 steps without an environment."""

    goal, num_actions, over, image = 0, 3, False, np.zeros((16, 42, 42), np.uint8)

    def __init__(self):
        self.rng, self.counts = np.random.default_rng(0), np.zeros(3)

    def step(self, action):
        self.counts[action] += 1
        self.over = self.counts.sum() == 3000


def test_sampled_actions_follow_the_policy():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    for policy, expected in (
        ("sampled", logits[0].softmax(0).tolist()),
        ("random", [1 / 3] * 3),
        ("greedy", [0, 0, 1]),
    ):
        a3c.play(lambda images, goals, lstm_state: (logits, None, lstm_state, None), [episode := LongEpisode()], policy)
        assert np.abs(episode.counts / 3000 - np.array(expected)).max() < 0.03


def test_crops_of_rad_are_random_in_training_and_central_in_evaluation():
    args = a3c.Args(aux="rad", episodes=2)
    episode, places = a3c.Episode(args), []
    for seed in range(8):
        episode.begin([seed])
        seen = set()
        while not episode.over:
            windows = np.lib.stride_tricks.sliding_window_view(episode.env.unwrapped.image, (36, 36), (1, 2))
            ((y, x),) = np.argwhere((windows == episode.image[:, None, None]).all((0, 3, 4))).tolist()
            seen.add((y, x))
            episode.step(0)
        places += seen
    assert len(places) == 8 and len(set(places)) > 4  # one crop for a whole episode
    episode.env.close()
    for episode in a3c.evaluation_episodes(args, make_agent(aux="rad"), "seen"):
        assert np.array_equal(episode.image, episode.env.unwrapped.image[:, 3:39, 3:39])


# ------------------------------------------------------------------------------------------------------ as a user does


@pytest.mark.slow
def test_warm_up_stores_the_goal_states_of_a_random_policy(tmp_path, monkeypatch):
    """It plays blind and draws only the successes: not a byte may differ from playing with images."""
    given = [*TINY[a3c], "--warmup", "6", "--total-updates", "1", "--learning-rate", "0.01"]
    run_folder, run = run_in_process(a3c, tmp_path, monkeypatch, *given, "--learning-rate-warmup", "0")
    episode, expected, numbers = a3c.Episode(a3c.Args()), [], itertools.count(1)
    while len(expected) < 6:
        episode.begin([1, next(numbers)])
        a3c.play(None, [episode], "random")
        if episode.info["is_success"] and (labelled := episode.goal_state()):
            expected.append(labelled)
    episode.env.close()
    assert np.array_equal(np.fromfile(run_folder / "goals.bin", RECORD)[:6], np.array(expected, RECORD))
    # Then comes the first update, a step of Adam.
    torch.manual_seed(1)
    start = torch.nn.utils.parameters_to_vector(a3c.Agent(a3c.Args()).parameters()).detach()
    end = torch.cat([tensor.flatten() for tensor in run["agent"].values()])
    gradient = run["adam"]["exp_avg"] / 0.1
    assert gradient.any()
    torch.testing.assert_close(start - end, 0.01 * gradient / (gradient.abs() + 1e-4), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_negatives_do_not_count_towards_the_warm_up(tmp_path):
    flags = ["--epsilon-n", "1", "--warmup", "3", "--num-envs", "1", *ENDLESS]
    with Run(tmp_path, SCRIPT, *TINY[a3c], *flags) as run:
        assert wait_until(lambda: run.updates() >= 1, 600)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 0, run.output
    counters = run.checkpoint()["counters"]
    labels = np.fromfile(run.run_folder / "goals.bin", RECORD)["label"][: counters["goals"]]
    assert counters["successes"] == (labels < 4).sum() >= 3 and (labels == 4).sum() > 3


@pytest.mark.slow
def test_frozen_discriminator_stands_still_in_a_run(tmp_path, monkeypatch):
    """Not even Adam's momentum changes it, while the rest learns on."""
    given = [*TINY[a3c], "--gdan", "--freeze-discriminator-at", "4", "--learning-rate", "1e-3"]
    run_folder, before = run_in_process(a3c, tmp_path, monkeypatch, *given)
    _, after = run_in_process(a3c, tmp_path, monkeypatch, "--resume", run_folder, "--total-updates", "8")
    moved = {name.split(".")[0] for name, old in before["agent"].items() if not torch.equal(after["agent"][name], old)}
    assert "feature_extractor" in moved and "w_q" in moved and "goal_discriminator" not in moved


@pytest.mark.slow
def test_an_evaluation_that_an_interruption_cost_is_made_up_for(tmp_path, monkeypatch):
    run_folder, run = run_in_process(a3c, tmp_path, monkeypatch, *TINY[a3c], "--aux", "none")
    assert [row["update"] for row in run["rows"]] == [2, 4]
    torch.save(run | {"rows": run["rows"][:1]}, run_folder / "checkpoint.pt")
    _, resumed = run_in_process(a3c, tmp_path, monkeypatch, "--resume", run_folder)
    assert [row["update"] for row in resumed["rows"]] == [2, 4]


@pytest.mark.slow
def test_dead_engine_costs_nothing_and_a_dead_worker_the_run(tmp_path):
    with Run(tmp_path, SCRIPT, *TINY[a3c], *ENDLESS, "--num-workers", "2", "--num-envs", "3") as run:
        assert wait_until(lambda: run.updates() >= 3 and len(engines(run.marker)) == 3, 600)
        before = run.updates()
        os.kill(engines(run.marker)[0], signal.SIGKILL)
        assert wait_until(lambda: run.updates() > before + 30, 600)
        assert wait_until(lambda: len(engines(run.marker)) == 3)  # it was replaced
        os.kill(parent(parent(engines(run.marker)[0])), signal.SIGKILL)  # between them is the engine's launcher
        assert run.wait() != 0
        first, last = run.output.splitlines()[-2:]
        assert "a worker died" in first and f"--resume {run.run_folder.relative_to(tmp_path)}" in last
        assert "Traceback" not in run.output and wait_until(lambda: not run.descendants())


def test_interrupted_before_its_second_worker_starts(tmp_path, monkeypatch, capsys):
    start, starts = multiprocessing.context.SpawnProcess.start, itertools.count(1)

    def interrupt(process):
        if next(starts) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        start(process)

    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", interrupt)
    run_in_process(a3c, tmp_path, monkeypatch, *TINY[a3c], "--aux", "none", "--num-workers", "2")
    assert "stopped; go on with" in capsys.readouterr().out and not multiprocessing.active_children()

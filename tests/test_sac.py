"""The update of sac_gace_ur5.py against a reference written out here, its replay buffer, and what only it does.

What both scripts promise in the same words is in test_scripts.py."""

import copy
import itertools
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import Run, run_in_process
from script_helpers import TINY, assert_same, linear

import sac_gace_ur5 as sac
from tools.scripted import reach_action

SHAPE = (3, 84, 84)


def make_agent(seed=0, **settings):
    torch.manual_seed(seed)
    return sac.Agent(sac.Args(**settings)).eval()


def new_replay(folder, *arguments):
    return sac.ReplayBuffer(folder, SHAPE, 6, *arguments)


# ------------------------------------------------------------------------------------------------------- the networks


@pytest.mark.parametrize("learning", [True, False])
def test_feature_extractor_centres_and_normalises(learning, double):
    """Statistics of the batch in learning, running ones in acting."""
    extractor = make_agent().feature_extractor.train(learning)
    for tensor in extractor.state_dict().values():
        if tensor.is_floating_point():
            tensor += 0.1 * torch.rand_like(tensor)  # so that scales, offsets and running statistics count
    layers, images = list(extractor.layers), torch.randint(0, 256, (3, *SHAPE), dtype=torch.uint8)
    x = images / 255 - 0.5
    for conv, norm in zip(layers[0:12:3], layers[1:12:3], strict=True):
        x = torch.nn.functional.conv2d(x, conv.weight, stride=2, padding=1)
        mean, variance = norm.running_mean, norm.running_var
        if learning:
            mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        mean, variance, scale, offset = (v[:, None, None] for v in (mean, variance, norm.weight, norm.bias))
        x = ((x - mean) / (variance + 1e-5).sqrt() * scale + offset).clamp(min=0)
    x = linear(layers[13], x.flatten(1))
    x = (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    expected = torch.tanh(x * layers[14].weight + layers[14].bias)
    assert_same(extractor(images), expected)


@pytest.mark.parametrize("part", ["actor", "critic"])
@pytest.mark.parametrize("form", ["gace", "gdan", "concat"])
def test_goal_conditioning_is_gated_attention_and_equations_10_and_11(form, part, double):
    conditioning = getattr(make_agent(gdan=form != "gace", concat_query=form == "concat"), part).conditioning
    e, query, goals = torch.randn(5, 256).tanh(), torch.randn(5, 256).relu(), torch.tensor([0, 2, 1, 1, 0])
    features = torch.cat([e, query], 1) if form == "concat" else e  # the paper's ablation: [e_t, q], no attention
    gate = 1 / (1 + torch.exp(-linear(conditioning.instruction, conditioning.embedding.weight[goals])))
    gated = features * gate  # M
    encoding = linear(conditioning.linear, torch.cat([gated, gate], 1)).clamp(min=0)  # e^1
    expected = [gated, encoding]
    if form == "gdan":
        key, value = encoding[:, :128], encoding[:, 128:]
        u = torch.tanh(query @ conditioning.w_q.weight.T + key @ conditioning.w_k.weight.T)  # Eq. 10
        expected.append(value * u)  # Eq. 11
    expected = linear(conditioning.combine, torch.cat(expected, 1)).clamp(min=0)  # ours, before the heads
    assert_same(conditioning(e, query, goals), expected)


def test_policies():
    features, query, goals = torch.randn(64, 256).tanh(), torch.randn(64, 256), torch.zeros(64, dtype=torch.long)
    actor = make_agent().actor
    quiet, *_, mean = actor(features, query, goals, explore=False)
    noisy, log_probs, _ = actor(features, query, goals, noise=0.2)
    assert torch.equal(quiet, torch.tanh(mean)) and (noisy.abs() <= 1).all() and (log_probs == 0).all()
    difference = (noisy - quiet).abs()
    assert 0.45 < difference.max() <= 0.5 + 1e-6  # clipped at 2.5 standard deviations

    actor = make_agent(policy="gaussian").actor
    torch.manual_seed(1)
    actions, log_probs, _ = actor(features, query, goals)
    mean, log_std = actor.head(actor.conditioning(features, query, goals)).chunk(2, -1)
    before = torch.atanh(actions.double())
    normal = -0.5 * ((before - mean) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
    expected = (normal - torch.log(1 - actions.double() ** 2)).sum(-1)
    assert torch.allclose(log_probs.double(), expected, atol=1e-2)
    assert torch.equal(actor(features, query, goals, explore=False)[0], torch.tanh(mean))


def test_each_environment_explores_with_noise_of_its_own():
    agent, images, goals = make_agent(exploration_noise=0.02), np.zeros((8, *SHAPE), np.uint8), [0] * 8
    quiet = agent.act(images, goals, explore=False)
    differences = np.stack([agent.act(images, goals, explore=True) for _ in range(300)]) - quiet
    expected = [0.02 * 8 ** (i / 7) for i in range(8)]
    assert differences.std((0, 2)) == pytest.approx(expected, rel=0.08)
    alone = np.stack([agent.act(images[:1], goals[:1], explore=True) for _ in range(300)]) - quiet[:1]
    assert alone.std() == pytest.approx(0.02, rel=0.08)


def test_losses_of_the_baselines():
    images = torch.tensor([[[[0, 255], [51, 0]]]], dtype=torch.uint8)
    decoded = torch.tensor([[[[0.5, 1.0, 7.0], [0.0, 0.1, 7.0], [7.0, 7.0, 7.0]]]])  # larger than the image
    expected = (0.5**2 + 0 + 0.2**2 + 0.1**2) / 4 + 1e-6 * (300**2 + 400**2) / 2
    assert sac.ae_loss(decoded, images, torch.tensor([[300.0, 400.0]])).item() == pytest.approx(expected)

    anchors, contrast = torch.eye(2), torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    keys = torch.tensor([[1.0, 0.0], [1.0, 1.0]])  # logits: 1 and 3 for the first anchor, 0 and 1 for the second
    expected = (math.log(math.e + math.e**3) - 1 + math.log(1 + math.e) - 1) / 2
    assert sac.curl_loss(anchors, keys, contrast).item() == pytest.approx(expected)


def test_crops_of_curl_are_random_in_learning_and_central_in_acting():
    images, places = torch.randint(0, 256, (20, *SHAPE), dtype=torch.uint8), set()
    windows = images.unfold(2, 72, 1).unfold(3, 72, 1)  # all crops there are: (20, 3, 13, 13, 72, 72)
    for image, crop in zip(windows, sac.crop(images, np.random.default_rng(0)), strict=True):
        ((y, x),) = (image == crop[:, None, None]).all(dim=(0, 3, 4)).nonzero().tolist()
        places.add((y, x))
    assert len(places) > 10
    agent, goals = make_agent(aux="curl", hidden_size=16), torch.zeros(20, dtype=torch.long)
    with torch.no_grad():
        expected = torch.tanh(agent.actor(agent.feature_extractor(images[..., 6:78, 6:78]), None, goals)[2])
    assert torch.allclose(torch.from_numpy(agent.act(images.numpy(), goals, explore=False)), expected, atol=1e-5)


# --------------------------------------------------------------------------------------------------------- the update


@pytest.fixture
def stored(tmp_path):
    """A replay buffer with episodes of 6 steps, of which every other ends on a box, and goal states."""
    rng = np.random.default_rng(0)
    replay, storage = new_replay(tmp_path, 200, 1), sac.GoalStorage(tmp_path, SHAPE, 100)
    for i in range(60):
        image, step = rng.integers(256, size=(1, *SHAPE), dtype=np.uint8), np.zeros(1, replay.steps.dtype)
        step["action"], step["reward"], step["goal"] = rng.uniform(-1, 1, 6), rng.normal(), i % 3
        step["terminal"], step["usable"] = i % 14 == 5, i % 7 != 6
        replay.add(image, step)
        storage.add(image[0], i % 4)
    return replay, storage


@pytest.mark.parametrize("policy", ["deterministic", "gaussian"])
@pytest.mark.parametrize("algorithm", ["none", "gace", "gdan", "ae", "curl"])
def test_learn_is_the_update_written_here(algorithm, policy, stored, double):
    """With plain gradient descent, all parameters, gradients and batch statistics after one update are known."""
    aux = "gace" if algorithm == "gdan" else algorithm
    settings = {"aux": aux, "gdan": algorithm == "gdan", "policy": policy, "hidden_size": 16}
    args = sac.Args(**settings, batch_size=6, goal_batch_size=5, n_step=3, gamma=0.9, eta=0.4)
    args.entropy_coef, args.action_penalty, args.ae_coef, args.curl_coef = 0.3, 0.2, 0.6, 0.7
    agent, target = make_agent(0, **settings), make_agent(1, **settings).requires_grad_(False)
    expected, old_target = copy.deepcopy(agent), copy.deepcopy(target)

    def parts(agent):
        rest = [p for name, p in agent.named_parameters() if not name.startswith("actor.")]
        return rest, list(agent.actor.parameters())

    optimizers = [torch.optim.SGD(part, 0.1) for part in parts(agent)]
    torch.manual_seed(2)
    report = sac.learn(args, agent, target, *optimizers, *stored, np.random.default_rng(3))

    torch.manual_seed(2)
    rng = np.random.default_rng(3)
    images, actions, returns, next_images, discounts, goals = stored[0].sample(6, rng, 3, 0.9)
    if aux == "curl":
        other_images, images, next_images = sac.crop(images, rng), sac.crop(images, rng), sac.crop(next_images, rng)
    inputs = images
    if aux == "gace":
        goal_images, labels = stored[1].sample(5, rng)
        inputs = torch.cat([images, sac.augmented(goal_images, rng)])

    # The critic's target: the n-step return, then the smaller value of the two target critics
    next_features = target.feature_extractor(next_images)
    next_query = linear(target.goal_discriminator[0], next_features).clamp(min=0)
    next_actions, next_log_probs, _ = target.actor(next_features, next_query, goals, noise=0.2)
    one, other = target.critic(next_features, next_query, goals, next_actions)
    y = returns + discounts * (torch.minimum(one, other) - 0.3 * next_log_probs)

    # Eq. 9 for critic, encoder and discriminator. Batch normalisation sees both batches together.
    encoded = expected.feature_extractor.train()(inputs)
    hidden, _, output = expected.goal_discriminator
    features, query = encoded[:6], linear(hidden, encoded).clamp(min=0)
    one, other = expected.critic(features, query[:6], goals, actions)
    loss = critic_loss = ((one - y) ** 2).mean() + ((other - y) ** 2).mean()
    if aux == "gace":
        log_g = torch.log_softmax(linear(output, query[6:]), -1)
        loss = loss - 0.4 * sum(log_g[i, label] for i, label in enumerate(labels)) / 5  # Eq. 8
    elif aux == "ae":
        errors = expected.decoder(features)[..., :84, :84] - images / 255
        loss = loss + 0.6 * ((errors**2).mean() + 1e-6 * (features**2).sum() / 12)
    elif aux == "curl":
        log_p = torch.log_softmax(features @ expected.contrast @ target.feature_extractor(other_images).T, -1)
        loss = loss - 0.7 * log_p.diag().mean()

    def step(loss, parameters):
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.1 * gradient
        return gradients

    rest, actor = parts(expected)
    gradients = step(loss, rest)

    # Then the actor's loss, with the new critic
    features, query = features.detach(), query[:6].detach()
    new_actions, log_probs, means = expected.actor(features, query, goals, explore=policy == "gaussian")
    one, other = expected.critic(features, query, goals, new_actions)
    actor_loss = (0.3 * log_probs - torch.minimum(one, other) + 0.2 * (means**2).sum(1)).mean()
    gradients += step(actor_loss, actor)

    assert_same(agent.state_dict(), expected.state_dict())
    for parameter, gradient in zip(sum(parts(agent), []), gradients, strict=True):
        assert_same(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad, gradient)
    assert report["losses/critic_loss"] == pytest.approx(critic_loss.item())
    assert report["losses/actor_loss"] == pytest.approx(actor_loss.item())
    assert_same(target.state_dict(), old_target.state_dict())
    assert all(p.requires_grad for p in agent.parameters()) and not agent.training


def test_target_follows_parameters_by_tau_and_copies_batch_statistics():
    agent, target = make_agent(0), make_agent(1)
    for buffer in agent.buffers():
        buffer += 3
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    sac.soft_update(target, agent, 0.25)
    for name, parameter in target.named_parameters():
        assert torch.allclose(parameter, 0.75 * before[name] + 0.25 * agent.state_dict()[name], atol=1e-6)
    assert all(torch.equal(buffer, agent.state_dict()[name]) for name, buffer in target.named_buffers())


def test_first_updates_of_a_run_move_every_part_and_the_target(tmp_path, monkeypatch):
    """The first step of Adam is as long as the learning rate in every direction that has a gradient."""
    given = [*TINY[sac], "--gdan", "--learning-rate", "1e-3", "--tau", "0.25", "--target-update-interval", "2"]
    folder, first = run_in_process(sac, tmp_path, monkeypatch, *given, "--total-updates", "1")
    torch.manual_seed(1)
    start = sac.Agent(sac.Args(**first["args"])).requires_grad_(False)
    for part in ("feature_extractor", "goal_discriminator", "actor", "critic"):
        moved = [first["agent"][f"{part}.{name}"] - p for name, p in getattr(start, part).named_parameters()]
        assert max(change.abs().max().item() for change in moved) == pytest.approx(1e-3, rel=1e-2)
        assert all(change.any() for change in moved)
    assert all(torch.equal(first["target"][name], tensor) for name, tensor in start.state_dict().items())
    _, second = run_in_process(sac, tmp_path, monkeypatch, "--resume", folder, "--total-updates", "2")
    for name, parameter in start.named_parameters():
        assert torch.allclose(second["target"][name], torch.lerp(parameter, second["agent"][name], 0.25), atol=1e-6)


# ------------------------------------------------------------------------------------------------------ replay buffer


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("capacity", [200, 50])  # the second goes round the ring
@pytest.mark.parametrize("n_step", [1, 3, 10])
def test_replay_gives_n_step_returns_and_the_frame_after_them(n_step, capacity, num_envs, tmp_path):
    replay, rng = new_replay(tmp_path, capacity, num_envs), np.random.default_rng(0)
    streams = []  # of each environment, (reward, terminal, usable) of its frames
    for _ in range(num_envs):
        stream = []
        for episode in range(20):
            length = int(rng.integers(1, 7))  # one in three times out, the others reach a box
            stream += [(rng.normal(), t == length - 1 and episode % 3 > 0, True) for t in range(length)]
            stream.append((0.0, False, False))
        streams.append(stream[:60])
    for i in range(60):
        images, steps = np.full((num_envs, *SHAPE), i, np.uint8), np.zeros(num_envs, replay.steps.dtype)
        steps["action"], steps["goal"] = i / 100, i % 3
        for env, stream in enumerate(streams):
            images[env, 1] = env
            steps["reward"][env], steps["terminal"][env], steps["usable"][env] = stream[i]
        replay.add(images, steps)

    batch = replay.sample(300, np.random.default_rng(1), n_step, 0.9)
    images, actions, returns, next_images, discounts, goals = batch
    for image, next_image, total, discount in zip(images, next_images, returns, discounts, strict=True):
        first, env = image[:2, 0, 0].tolist()
        expected, factor, i = 0.0, 1.0, first
        while i < first + n_step and streams[env][i][2] and i < 59:
            expected += factor * streams[env][i][0]
            factor *= 0.0 if streams[env][i][1] else 0.9
            i += 1
        assert streams[env][first][2] and i > first and next_image[:2, 0, 0].tolist() == [i, env]
        assert (total.item(), discount.item()) == (pytest.approx(expected, abs=1e-5), pytest.approx(factor))
    frames = images[:, 0, 0, 0]
    assert frames.max() == 58 and frames.min() == (0 if capacity == 200 else 60 - capacity // num_envs)
    assert torch.allclose(actions, frames[:, None] / 100) and torch.equal(goals, frames.long() % 3)
    assert images.is_contiguous(memory_format=torch.channels_last)
    resumed = new_replay(tmp_path, capacity, num_envs, replay.count).sample(300, np.random.default_rng(1), n_step, 0.9)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(batch, resumed, strict=True))


# ------------------------------------------------------------------------------------------------------ auto-labelling


def test_last_state_of_a_success_has_its_goal_and_of_a_time_out_the_negative_label():
    player = sac.Player(sac.Args(task="r3"))
    env = player.env.unwrapped
    for seed, reach in itertools.product(range(2), ("goal", "other box", "nothing")):
        player.begin(seed)
        while not player.over:
            env.goal = next(c for c in env.box_classes if (c == player.goal) == (reach == "goal"))  # where the arm goes
            action = reach_action(env) * (reach != "nothing")
            env.goal = player.goal
            player.step(action)
        found = player.goal_state()
        assert (found is None) == (reach == "other box")
        if found:
            assert found[1] == (player.goal if reach == "goal" else 5) and np.array_equal(found[0], env.camera_image())
    player.env.close()


@pytest.mark.slow
@pytest.mark.parametrize("epsilon_n", (0, 1))
def test_run_stores_all_successes_and_some_time_outs(tmp_path, monkeypatch, epsilon_n):
    """Time-outs are stored with probability epsilon_n, and nothing of an episode that ended on another box."""
    given = [*TINY[sac], "--warmup", 2500, "--replay-size", 5000, "--fixed-goal", "green", "--epsilon-n", epsilon_n]
    run_folder, run = run_in_process(sac, tmp_path, monkeypatch, *given, "--total-updates", 1)
    steps = new_replay(run_folder, 8, 8, run["counters"]["replay"]).steps[: run["counters"]["replay"]]
    ends = steps[steps["usable"] & (steps["terminal"] | (steps["reward"] < -0.05))]  # the last steps of episodes
    successes, time_outs = ends["reward"] > 0.5, ~ends["terminal"]
    assert (steps["goal"] == 1).all() and successes.sum() > 1 and (~successes & ~time_outs).sum() > 1
    expected = np.where(successes, 1, 3)[successes | (time_outs & bool(epsilon_n))]
    storage = sac.GoalStorage(run_folder, SHAPE, 8, run["counters"]["goals"])
    assert storage.records["label"][: storage.count].tolist() == expected.tolist()


# ------------------------------------------------------------------------------------------------------ as a user does


def test_fixed_goal_is_the_goal_of_every_episode():
    args = sac.Args(fixed_goal="green", episodes=3, hidden_size=16)
    assert [player.goal for player in sac.evaluation_episodes(args, make_agent(hidden_size=16), "seen")] == [1] * 3


ROUND = "--num-envs 3 --env-steps-per-update 6 --replay-size 150"  # the replay buffer is full before the end
ALL_OVER = "--aux none --warmup 147 --num-envs 3 --env-steps-per-update 3"  # all episodes time out before an update


@pytest.mark.parametrize(
    ("function", "number", "flags"),
    [("learn", 3, f"--gdan {ROUND}"), ("evaluate", 1, f"--task r2 {ROUND}"), ("learn", 1, ALL_OVER)],
)
def test_resumed_run_is_the_same_as_an_uninterrupted_one(function, number, flags, tmp_path, monkeypatch):
    """SIGTERM comes in a call of a function of the script."""
    flags = [*TINY[sac], *flags.split()]
    whole_folder, whole = run_in_process(sac, tmp_path / "whole", monkeypatch, *flags)
    original, calls = getattr(sac, function), itertools.count(1)

    def interrupt(*args, **kwargs):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    monkeypatch.setattr(sac, function, interrupt)
    run_folder, stopped = run_in_process(sac, tmp_path / "interrupted", monkeypatch, *flags)
    _, run = run_in_process(sac, tmp_path / "interrupted", monkeypatch, "--resume", run_folder)
    assert 0 < stopped["counters"]["updates"] < whole["counters"]["updates"] == 4
    for name in ("counters", "under_way", "recent", "numpy_random", "args"):
        assert run[name] == whole[name]
    for name in ("agent", "target", "critic_optimizer", "actor_optimizer", "torch_random"):
        torch.testing.assert_close(run[name], whole[name], rtol=0, atol=0)
    for path in whole_folder.glob("*.bin"):
        assert path.read_bytes() == (run_folder / path.name).read_bytes()
    for row, expected in zip(run["rows"], whole["rows"], strict=True):
        assert str(row | {"seconds": 0}) == str(expected | {"seconds": 0})  # nan is not equal to nan


@pytest.mark.slow
def test_missing_renderer_is_a_line_or_two(tmp_path, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "disabled")
    run = Run(tmp_path, Path(sac.__file__).name, *TINY[sac])
    assert run.wait() != 0 and "MuJoCo cannot render with MUJOCO_GL=disabled" in run.output, run.output
    assert "Traceback" not in run.output

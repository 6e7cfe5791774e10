"""The equations of sac_gace_ur5.py against references written out here, and the script run as a user runs it."""

import copy
import itertools
import math
import os
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, Run, answer_of, call, gradients, run_in_process, wait_until

import envs
import sac_gace_ur5 as sac
from tools import enjoy

SCRIPT = "sac_gace_ur5.py"
SHAPE = (3, 84, 84)


def new_replay(folder, *arguments):
    return sac.ReplayBuffer(folder, SHAPE, 6, *arguments)


def random_images(number):
    return torch.randint(0, 256, (number, 3, 84, 84), dtype=torch.uint8)


def make_agent(**kwargs):
    torch.manual_seed(0)
    return sac.Agent(sac.Args(**kwargs)).eval()


# ----------------------------------------------------------------------------------------------------------- equations


def test_critic_and_actor_loss():
    returns, discounts = torch.tensor([-0.01, 1.0]), torch.tensor([0.9, 0.0])
    targets = sac.critic_target(returns, discounts, torch.tensor([0.5, 0.7]), torch.tensor([-2.0, 3.0]), 0.01)
    assert targets.tolist() == pytest.approx([-0.01 + 0.9 * (0.5 + 0.02), 1.0])
    values = torch.tensor([[0.1, 0.2], [0.3, 0.0]])
    expected = ((0.1 - 1) ** 2 + (0.2 - 2) ** 2) / 2 + ((0.3 - 1) ** 2 + (0.0 - 2) ** 2) / 2
    assert sac.critic_loss(values, torch.tensor([1.0, 2.0])).item() == pytest.approx(expected)
    means = torch.tensor([[1.0, 2.0], [0.0, -3.0]])
    loss = sac.actor_loss(values, torch.tensor([-2.0, 3.0]), means, 0.01, 0.1)
    assert loss.item() == pytest.approx((-0.02 - 0.1 + 0.03 - 0.0) / 2 + 0.1 * (1 + 4 + 9) / 2)


def test_gace_loss_is_equation_8():
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 3, 0])
    expected = -sum(math.log(logits[i].exp()[labels[i]] / logits[i].exp().sum()) for i in range(6)) / 6
    assert sac.gace_loss(logits, labels).item() == pytest.approx(expected, rel=1e-5)


def test_attention_is_equations_10_and_11():
    conditioning = make_agent(gdan=True).actor.conditioning
    features, query, goals = torch.randn(2, 256).tanh(), torch.randn(2, 256).relu(), torch.tensor([0, 2])

    def linear(layer, x):
        return x @ layer.weight.T + layer.bias

    gate = 1 / (1 + torch.exp(-linear(conditioning.instruction, conditioning.embedding.weight[goals])))
    gated = features * gate
    memory = linear(conditioning.linear, torch.cat([gated, gate], 1)).relu()
    key_value = linear(conditioning.key_value, torch.cat([gated, memory], 1)).relu()
    key, value = key_value[:, :256], key_value[:, 256:]
    attention = torch.tanh(linear(conditioning.w_q, query).relu() + linear(conditioning.w_k, key).relu())
    expected = linear(conditioning.combine, torch.cat([value * attention, memory], 1)).relu()
    assert torch.allclose(conditioning(features, query, goals), expected, atol=1e-5)


def test_concatenated_query_is_a_feature_beside_the_encoding():
    """The paper's ablation: [e_t, q] takes the place of e_t, and there is no attention."""
    conditioning = make_agent(gdan=True, concat_query=True).critic.conditioning
    features, query, goals = torch.randn(2, 256).tanh(), torch.randn(2, 256).relu(), torch.tensor([0, 2])
    gate = torch.sigmoid(conditioning.instruction(conditioning.embedding(goals)))
    gated = torch.cat([features, query], 1) * gate
    encoding = torch.relu(conditioning.linear(torch.cat([gated, gate], 1)))
    assert torch.allclose(conditioning(features, query, goals), torch.cat([gated, encoding], 1), atol=1e-6)
    assert gated.shape == (2, 512) and not hasattr(conditioning, "w_q")


def test_policies():
    features, query, goals = torch.randn(64, 256).tanh(), torch.randn(64, 256), torch.zeros(64, dtype=torch.long)
    actor = make_agent(exploration_noise=0.2).actor
    quiet, *_ = actor(features, query, goals, explore=False)
    noisy, log_probs, _ = actor(features, query, goals)
    assert (quiet.abs() <= 1).all() and (noisy.abs() <= 1).all() and (log_probs == 0).all()
    difference = (noisy - quiet).abs()
    assert difference.max() <= 0.5 + 1e-6 and difference.std() > 0.05  # clipped at 2.5 standard deviations

    actor = make_agent(policy="gaussian").actor
    torch.manual_seed(1)
    actions, log_probs, _ = actor(features, query, goals)
    mean, log_std = actor.head(actor.conditioning(features, query, goals)).chunk(2, -1)
    before = torch.atanh(actions.double())
    normal = -0.5 * ((before - mean) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
    expected = (normal - torch.log(1 - actions.double() ** 2)).sum(-1)
    assert torch.allclose(log_probs.double(), expected, atol=1e-2)
    assert torch.equal(actor(features, query, goals, explore=False)[0], torch.tanh(mean))


def test_curl_loss_asks_for_the_other_crop():
    anchors, contrast = torch.eye(4, 8), torch.eye(8)
    assert sac.curl_loss(10 * anchors, anchors, contrast) < 0.01
    assert sac.curl_loss(10 * anchors, anchors.flip(0), contrast) > 1
    images = random_images(4)
    cropped = sac.crop(images, np.random.default_rng(0))
    assert cropped.shape == (4, 3, 72, 72)
    windows = images.unfold(2, 72, 1).unfold(3, 72, 1)  # all crops there are
    assert all((windows[i] == cropped[i][:, None, None]).all(dim=(0, 3, 4)).sum() == 1 for i in range(4))


def test_ae_loss_sees_the_image():
    agent = make_agent(aux="ae")
    images = random_images(2)
    loss = sac.ae_loss(agent.decoder, agent.feature_extractor(images), images)
    loss.backward()
    assert loss > 0 and gradients(agent.feature_extractor) and gradients(agent.decoder) and not gradients(agent.critic)


# ----------------------------------------------------------------------------------------------- which loss trains what


def add(replay, image, action=0.0, reward=0.0, goal=0, terminal=False, usable=True):
    """Adds a frame of one environment."""
    step = np.zeros(1, replay.step)
    step["action"], step["reward"], step["goal"], step["terminal"], step["usable"] = (
        action,
        reward,
        goal,
        terminal,
        usable,
    )
    replay.add(image[None], step)


@pytest.fixture
def stored(tmp_path):
    rng = np.random.default_rng(0)
    replay, storage = new_replay(tmp_path, 200, 1), sac.GoalStorage(tmp_path, SHAPE, 100)
    for i in range(60):
        image = rng.integers(256, size=(3, 84, 84), dtype=np.uint8)
        add(replay, image, rng.uniform(-1, 1, 6), 0.1, i % 3, i % 7 == 5, i % 7 != 6)
        storage.add(image, i % 4)
    return replay, storage


@pytest.mark.parametrize("gdan", [False, True])
def test_each_loss_trains_what_it_should(gdan, stored):
    """GACE: extractor and discriminator. Critic: extractor, critic and, through the query, the discriminator's hidden
    layer. Actor: the actor alone."""
    agent = make_agent(gdan=gdan)
    images, goals = random_images(4), torch.tensor([0, 1, 2, 0])
    features = agent.feature_extractor(images)
    sac.gace_loss(agent.goal_discriminator(features), goals).backward()
    assert len(gradients(agent.feature_extractor)) == len(list(agent.feature_extractor.parameters()))
    assert len(gradients(agent.goal_discriminator)) == 4
    assert not gradients(agent.actor) and not gradients(agent.critic)

    agent.zero_grad(set_to_none=True)
    features = agent.feature_extractor(images)
    query = agent.goal_discriminator.query(features)
    sac.critic_loss(agent.critic(features, query, goals, torch.zeros(4, 6)), torch.ones(4)).backward()
    assert gradients(agent.feature_extractor) and gradients(agent.critic) and not gradients(agent.actor)
    assert bool(gradients(agent.goal_discriminator.hidden)) == gdan
    assert not gradients(agent.goal_discriminator.output)

    # In the script itself: with the critic's optimiser standing still, only the actor moves, and the other way round.
    for moving in ("critic", "actor"):
        args = sac.Args(gdan=gdan, batch_size=8, goal_batch_size=8)
        agent = make_agent(gdan=gdan)
        target = make_agent(gdan=gdan).requires_grad_(False)
        actor = list(agent.actor.parameters())
        rest = [p for p in agent.parameters() if all(p is not a for a in actor)]
        rates = {"critic": 1e-3 * (moving == "critic"), "actor": 1e-3 * (moving == "actor")}
        optimizers = torch.optim.SGD(rest, rates["critic"]), torch.optim.SGD(actor, rates["actor"])
        before = {name: p.detach().clone() for name, p in agent.named_parameters()}
        sac.learn(args, agent, target, optimizers, *stored, np.random.default_rng(0), "cpu")
        moved = {name.split(".")[0] for name, p in agent.named_parameters() if not torch.equal(p, before[name])}
        expected = {"actor"} if moving == "actor" else {"feature_extractor", "goal_discriminator", "critic"}
        assert moved == expected
        assert all(p.requires_grad for p in agent.parameters())


def test_target_follows_parameters_and_normalisation():
    agent, target = make_agent(), make_agent().requires_grad_(False)
    with torch.no_grad():
        for tensor in (*agent.parameters(), *agent.buffers()):
            tensor.add_(1)
    before = [t.clone() for t in (*target.parameters(), *target.buffers()) if t.is_floating_point()]
    sac.soft_update(target, agent, 0.25)
    after = [t for t in (*target.parameters(), *target.buffers()) if t.is_floating_point()]
    assert all(torch.allclose(new - old, torch.tensor(0.25), atol=1e-5) for new, old in zip(after, before, strict=True))


def test_label_out_of_range_is_an_error(stored):
    agent, target = make_agent(), make_agent().requires_grad_(False)
    for _ in range(100):
        stored[1].add(np.zeros((3, 84, 84), np.uint8), 77)
    with pytest.raises(OSError, match="goal_states.bin is damaged"):
        sac.learn(sac.Args(), agent, target, (None, None), *stored, np.random.default_rng(0), "cpu")


def test_parameters_that_are_not_finite_stop_the_run(stored):
    agent, target = make_agent(), make_agent().requires_grad_(False)
    critic = torch.optim.Adam(agent.critic.parameters(), 1e-4)
    optimizers = critic, torch.optim.Adam(agent.actor.parameters(), float("inf"))  # after a loss that is finite
    with pytest.raises(FloatingPointError, match="parameter is not finite"):
        sac.learn(sac.Args(), agent, target, optimizers, *stored, np.random.default_rng(0), "cpu")


# -------------------------------------------------------------------------------------------------------------- storage


def fill(replay, episodes, length=5):
    """Episodes whose frames tell which they are: frame t of episode e is all 10 e + t."""
    for episode in range(episodes):
        for t in range(length):
            image = np.full((3, 84, 84), (10 * episode + t) % 256, np.uint8)
            add(replay, image, np.full(6, t / 10), float(episode), episode % 3, t == length - 1)
        add(replay, np.full((3, 84, 84), (10 * episode + length) % 256, np.uint8), usable=False)


@pytest.mark.parametrize("episodes", [3, 20])  # the second goes round the ring three times
def test_replay_gives_each_step_with_its_own_next_frame(episodes, tmp_path):
    replay = new_replay(tmp_path, 40, 1)
    fill(replay, episodes)
    images, actions, rewards, next_images, discounts, goals = replay.sample(500, np.random.default_rng(0), 1, 0.9)
    frame, following = images[:, 0, 0, 0].int(), next_images[:, 0, 0, 0].int()
    assert (following == (frame + 1) % 256).all() and (frame % 10 < 5).all()
    assert torch.allclose(actions[:, 0], (frame % 10) / 10)
    assert (rewards.int() == frame // 10).all() and (goals == rewards.int() % 3).all()
    assert torch.allclose(discounts, torch.where(frame % 10 == 4, 0.0, 0.9))
    assert images.is_contiguous(memory_format=torch.channels_last)
    oldest = max(0, replay.count - 40) // 6
    assert set(rewards.int().tolist()) == set(range(oldest if episodes == 20 else 0, episodes))


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("capacity", [200, 50])  # the second goes round the ring
@pytest.mark.parametrize("n_step", [1, 3, 5])
def test_replay_sums_the_rewards_of_n_steps(n_step, capacity, num_envs, tmp_path):
    replay, rng = new_replay(tmp_path, capacity, num_envs), np.random.default_rng(0)
    streams = []  # of each environment, (reward, terminal, usable) of its frames
    for _ in range(num_envs):
        stream = []
        for episode in range(20):
            length = int(rng.integers(1, 7))  # one in three runs out of time, the others reach a box
            stream += [(rng.normal(), t == length - 1 and episode % 3 > 0, True) for t in range(length)]
            stream.append((0.0, False, False))
        streams.append(stream[:60])
    for i in range(60):
        images, steps = np.full((num_envs, 3, 84, 84), i, np.uint8), np.zeros(num_envs, replay.step)
        for env, stream in enumerate(streams):
            images[env, 1] = env
            steps["reward"][env], steps["terminal"][env], steps["usable"][env] = stream[i]
        replay.add(images, steps)

    images, _, returns, next_images, discounts, _ = replay.sample(300, rng, n_step, 0.9)
    for image, next_image, total, discount in zip(images, next_images, returns, discounts, strict=True):
        first, env = image[:2, 0, 0].tolist()
        expected, factor, i = 0.0, 1.0, first
        while i < first + n_step and streams[env][i][2] and i < 59:
            expected += factor * streams[env][i][0]
            factor *= 0.0 if streams[env][i][1] else 0.9
            i += 1
        assert streams[env][first][2] and i > first and next_image[:2, 0, 0].tolist() == [i, env]
        assert (total.item(), discount.item()) == (pytest.approx(expected, abs=1e-5), pytest.approx(factor))


def test_replay_takes_disk_only_as_it_fills_and_survives(tmp_path):
    replay = new_replay(tmp_path, 100_000, 1)
    fill(replay, 4)
    frames = tmp_path / "replay_frames.bin"
    assert frames.stat().st_size == 24 * 84 * 84 * 3
    again = new_replay(tmp_path, 100_000, 1, replay.count)
    ours, theirs = (buffer.sample(50, np.random.default_rng(0), 5, 0.99) for buffer in (replay, again))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_goal_storage_is_bounded_and_keeps_states_and_labels(tmp_path):
    storage = sac.GoalStorage(tmp_path, SHAPE, 10)
    images = random_images(25)
    for i, image in enumerate(images):
        storage.add(image.numpy(), i)
    assert len(storage) == 10
    states, labels = storage.sample(100, np.random.default_rng(0))
    assert set(labels.tolist()) == set(range(15, 25))
    assert torch.equal(states, images[labels])


def test_augmented_images_are_mirrored_and_shifted():
    image = random_images(1)[0]
    rows, columns = np.mgrid[:84, :84]
    expected = {}
    for mirrored, y, x in itertools.product((False, True), range(-4, 5), range(-4, 5)):
        seen = columns if not mirrored else 83 - columns
        moved = image[:, np.clip(rows + y, 0, 83), np.clip(seen + x, 0, 83)]
        expected[moved.numpy().tobytes()] = mirrored
    found = sac.augmented(image.expand(2000, -1, -1, -1), np.random.default_rng(0))
    counts = [expected[image.numpy().tobytes()] for image in found]  # a KeyError is any other change
    assert len({image.numpy().tobytes() for image in found}) == 162 and 900 < sum(counts) < 1100


# ------------------------------------------------------------------------------------------------------- as a user does


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.pt")), ids=lambda path: path.stem)
def test_committed_agents_play(path, monkeypatch, capsys):
    """The details of an evaluation add up to its success ratio, by goal and by place, on every split."""
    monkeypatch.setattr("sys.argv", ["enjoy", str(path), "--episodes", "4", "--details"])
    enjoy.main()
    parts = capsys.readouterr().out.split("update ")[1:]
    assert len(parts) == len(envs.splits_of(path.stem[:2]))
    for part in parts:
        summary, _, *lines = part.splitlines()
        success = float(summary.split("success ")[1].split("%")[0]) / 100
        goals = [line for line in lines if line.split()[0] in envs.goals_of(path.stem[:2])]
        for group in (goals, [line for line in lines if line not in goals]):
            numbers = np.array([line.replace("%", "").split()[-4:] for line in group], float)
            episodes, shares = numbers[:, 0], numbers[:, 1:] / 100
            assert episodes.sum() == 4 and np.allclose(shares.sum(1), 1, atol=0.02)
            assert np.isclose((episodes * shares[:, 0]).sum() / 4, success, atol=0.01)


def test_a_disk_must_have_room_for_the_last_frames_of_episodes_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame, steps = 3 * 84 * 84, 1000 + 100 * 32
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=steps * frame * 6 // 5))
    answer = answer_of(sac, monkeypatch, "--warmup", 1000, "--total-updates", 100)
    assert f"of {steps * 4 // 3} frames" in answer and not Path("runs").exists()


@pytest.mark.parametrize("backend", ["disabled", "wrong"])
def test_missing_renderer_is_a_line_or_two(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", backend)
    run = Run(tmp_path, SCRIPT, "--replay-size", "5000")  # fits on any disk
    assert run.wait() != 0 and f"MuJoCo cannot render with MUJOCO_GL={backend}" in run.output, run.output
    assert "Traceback" not in run.output


BASELINE = (
    "--warmup 120 --total-updates 6 --eval-every 3 --episodes 2 --batch-size 8 --no-cuda --replay-size 5000".split()
)
TINY = [*BASELINE, "--goal-batch-size", "8", "--accuracy-states", "1"]
MODES = {
    "sac+gaussian": ["--aux", "none", "--policy", "gaussian"],
    "sac+ae": ["--aux", "ae"],
    "sac+curl": ["--aux", "curl", "--task", "r3"],
    "sac+gace": ["--task", "r2"],
    "sac+gace+gdan+concat+green": ["--gdan", "--concat-query", "--fixed-goal", "green"],
}


def test_names_of_the_algorithms():
    names = [sac.algorithm(sac.Args(aux=aux)) for aux in ("none", "ae", "curl", "gace")]
    assert names == ["sac", "sac+ae", "sac+curl", "sac+gace"]
    assert sac.algorithm(sac.Args(gdan=True)) == "sac+gace+gdan"


@pytest.mark.parametrize("algorithm", MODES)
def test_every_mode_trains_evaluates_and_is_evaluated_again(algorithm, tmp_path, monkeypatch, capsys):
    run = Run(tmp_path, SCRIPT, *(TINY if "gace" in algorithm else BASELINE), *MODES[algorithm])
    assert run.wait() == 0, run.output
    task = {"sac+gace": "r2", "sac+curl": "r3"}.get(algorithm, "r1")
    assert run.run_folder.name.startswith(f"{task}__{algorithm}__1__")
    splits = ["seen", "unseen"] if task == "r2" else ["seen"]
    assert [(row["update"], row["split"]) for row in run.rows()] == [(u, s) for u in ("3", "6") for s in splits]
    assert list(run.rows()[0]) == sac.METRICS
    assert all(0 <= float(row["success_ratio"]) <= 1 for row in run.rows())
    measured = [float(row["discriminator_accuracy"]) for row in run.rows()]
    assert all(0 <= accuracy <= 1 for accuracy in measured) if "gace" in algorithm else all(np.isnan(measured))
    assert run.updates() == 6
    call(enjoy, monkeypatch, run.run_folder / "checkpoint.pt", "--episodes", "2")
    for row, line in zip(run.rows()[-len(splits) :], capsys.readouterr().out.splitlines(), strict=True):
        assert f"success {float(row['success_ratio']):.1%}" in line
        assert f"return {float(row['episode_return']):.2f}" in line


def test_accuracy_is_measured_on_the_same_states_in_every_run():
    args = sac.Args(task="r2", accuracy_states=5, seed=7)
    states, labels = sac.collect_goal_states(args, "unseen", lambda: None)
    again, _ = sac.collect_goal_states(replace(args, seed=8, gdan=True), "unseen", lambda: None)
    assert labels.tolist() == [0, 1, 2, 3, 0] and torch.equal(states, again)  # 3 is the negative class
    agent = make_agent()
    with torch.no_grad():
        features = agent.feature_extractor(states.contiguous(memory_format=torch.channels_last))
        guesses = agent.goal_discriminator(features).argmax(-1)
    assert sac.discriminator_accuracy(agent, states, guesses) == 1.0
    assert sac.discriminator_accuracy(agent, states, (guesses + 1) % 4) == 0.0


class FakeRun:
    """SAC with an auxiliary loss in this process, with small batches."""

    def __init__(self, folder, aux):
        self.args = sac.Args(aux=aux, batch_size=16)
        self.coef, self.rng, self.updates = f"{aux}_coef", np.random.default_rng(0), 0
        self.agent, self.target = make_agent(aux=aux), make_agent(aux=aux).requires_grad_(False)
        self.optimizers = sac.make_optimizers(self.args, self.agent)
        self.replay = new_replay(folder, 20_000, 8)
        self.players, self.seeds = [sac.Player(self.args) for _ in range(8)], itertools.count()
        for player in self.players:
            player.begin(next(self.seeds))
        for _ in range(250):
            self.turn(self.rng.uniform(-1, 1, (8, 6)).astype(np.float32))

    def turn(self, actions=None):
        images, goals = np.stack([p.image for p in self.players]), [p.goal for p in self.players]
        actions = self.agent.act(images, goals, explore=True) if actions is None else actions
        steps = np.zeros(8, self.replay.step)
        steps["action"], steps["goal"] = actions, goals
        for player, action, step in zip(self.players, actions, steps, strict=True):
            if player.over:
                player.begin(next(self.seeds))
                continue
            player.step(action)
            step["reward"], step["terminal"], step["usable"] = player.rewards[-1], player.terminated, True
        self.replay.add(images, steps)

    def train(self, updates):
        while self.updates < updates:
            self.turn()
            sac.learn(self.args, self.agent, self.target, self.optimizers, self.replay, None, self.rng, "cpu")
            sac.soft_update(self.target, self.agent, self.args.tau)
            self.updates += 1

    def encoder_norms(self):
        """Mean norm of the encoder's gradient by the critic loss, and by the auxiliary loss, over five batches."""
        norms = []
        for seed in range(5):
            found = []
            for coef in (0.0, getattr(self.args, self.coef)):
                agent = copy.deepcopy(self.agent)
                rest = [p for name, p in agent.named_parameters() if not name.startswith("actor.")]
                still = torch.optim.SGD(rest, 0.0), torch.optim.SGD(agent.actor.parameters(), 0.0)
                torch.manual_seed(0)
                args, rng = replace(self.args, **{self.coef: coef}), np.random.default_rng(seed)
                sac.learn(args, agent, self.target, still, self.replay, None, rng, "cpu")
                found.append(torch.cat([p.grad.flatten() for p in agent.feature_extractor.parameters()]))
            norms.append((found[0].norm().item(), (found[1] - found[0]).norm().item()))
        return np.mean(norms, 0)


@pytest.mark.slow
@pytest.mark.parametrize("aux", ["ae", "curl"])
def test_auxiliary_loss_weighs_as_much_as_the_critic_loss(aux, tmp_path):
    """On the encoder, within a factor of 10, at the start and after 200 updates."""
    run = FakeRun(tmp_path, aux)
    for updates in (0, 200):
        run.train(updates)
        rl, auxiliary = run.encoder_norms()
        print(f"gradient on the encoder after {updates} updates: critic {rl:.3g}, {aux} {auxiliary:.3g}")
        assert 0.1 < auxiliary / rl < 10
    for player in run.players:
        player.env.close()


@pytest.mark.parametrize("epsilon_n", (0, 1))
def test_auto_labelling(tmp_path, monkeypatch, epsilon_n):
    """Every stored state is the last of an episode: of a success, by its goal, or of a time-out, as the negative class,
    with a probability of epsilon_n. Nothing of an episode that ended on another box; nothing else is left out."""
    monkeypatch.chdir(tmp_path)
    given = ["--warmup", 2500, "--total-updates", 1, "--fixed-goal", "green", "--epsilon-n", epsilon_n]
    call(sac, monkeypatch, *TINY, *given)
    (run_folder,) = Path("runs").iterdir()
    counters = torch.load(run_folder / "checkpoint.pt")["counters"]
    replay = new_replay(run_folder, 5000, 8, counters["replay"])
    records = np.fromfile(run_folder / "goal_states.bin", [("image", "u1", (84, 84, 3)), ("label", "u1")])
    expected, outcomes = [], []  # label and frame; an episode that has just ended has not had its turn to store a frame
    for end in range(8, replay.count + 8):
        before = replay.steps[end - 8]
        frame = replay.frames.read(np.array([end]))["image"][0] if end < replay.count else None
        if not before["usable"] or not (before["terminal"] or before["reward"] < -0.05):  # goes on
            continue
        assert before["goal"] == 1 and (frame is None or not replay.steps["usable"][end])
        outcomes.append("success" if before["reward"] > 0.5 else "other box" if before["terminal"] else "time-out")
        if outcomes[-1] == "success" or (outcomes[-1] == "time-out" and epsilon_n):
            expected.append((1 if outcomes[-1] == "success" else 3, frame))
    assert len(outcomes) >= (~replay.steps["usable"][: replay.count]).sum()
    assert set(outcomes) == {"success", "other box", "time-out"}
    assert len(records) == len(expected) > (40 if epsilon_n else 0)
    for record, (label, frame) in zip(records, expected, strict=True):
        assert record["label"] == label and (frame is None or np.array_equal(record["image"], frame))


def same_run(ours, theirs):
    assert ours["counters"] == theirs["counters"] and ours["under_way"] == theirs["under_way"]
    for part in ("agent", "target"):
        assert all(torch.equal(ours[part][name], theirs[part][name]) for name in ours[part])
    keep = ("update", "env_steps", "split", "success_ratio", "discriminator_accuracy", "episode_return")
    rows = [[[repr(row[name]) for name in keep] for row in run["rows"]] for run in (ours, theirs)]  # nan equals nan
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_resumed_run_is_the_same_as_an_uninterrupted_one(tmp_path):
    arguments = [*TINY, "--gdan", "--total-updates", "40", "--eval-every", "15", "--checkpoint-every", "0.2"]
    arguments += ["--num-envs", "3", "--env-steps-per-update", "6", "--replay-size", "160"]  # goes round twice
    folders = [tmp_path / name for name in ("whole", "interrupted")]
    for folder in folders:
        folder.mkdir()
    whole = Run(folders[0], SCRIPT, *arguments)
    assert whole.wait() == 0, whole.output
    with Run(folders[1], SCRIPT, *arguments) as interrupted:
        assert wait_until(lambda: interrupted.updates() >= 5, 60)
        interrupted.process.send_signal(signal.SIGTERM)
        interrupted.wait(10)
        assert 5 <= interrupted.updates() < 40
    resumed = Run(folders[1], SCRIPT, "--resume", interrupted.run_folder)
    assert resumed.wait() == 0, resumed.output
    same_run(interrupted.checkpoint(), whole.checkpoint())


def interrupted_in(monkeypatch, name, folder, *arguments):
    """A run that gets SIGTERM in the first call of one of the script's functions, and the run resumed."""
    function = getattr(sac, name)

    def interrupt(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return function(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(sac, name, interrupt)
        run_folder, stopped = run_in_process(sac, folder, monkeypatch, *arguments)
    return stopped, run_in_process(sac, folder, monkeypatch, "--resume", run_folder)[1]


def test_resumed_between_the_end_of_an_episode_and_its_last_frame(tmp_path, monkeypatch):
    arguments = [*BASELINE, "--aux", "none", "--warmup", 147, "--num-envs", 3, "--env-steps-per-update", 3]
    _, whole = run_in_process(sac, tmp_path / "whole", monkeypatch, *arguments)
    stopped, resumed = interrupted_in(monkeypatch, "learn", tmp_path / "interrupted", *arguments)
    assert stopped["counters"]["updates"] == 1 and stopped["counters"]["replay"] == 150
    assert [len(actions) for _, actions in stopped["under_way"]] == [50] * 3
    same_run(whole, resumed)
    assert whole["counters"]["updates"] == 6


def test_settings_given_on_resuming_take_effect(tmp_path, monkeypatch):
    run_folder, _ = run_in_process(sac, tmp_path, monkeypatch, *BASELINE, "--aux", "none", "--total-updates", 1)
    made, Actor = [], sac.Actor
    monkeypatch.setattr(sac, "Actor", lambda *args: made.append(Actor(*args)) or made[-1])
    call(sac, monkeypatch, "--resume", run_folder, "--total-updates", 2, "--exploration-noise", 0.01)
    assert made[-1].noise == 0.01


@pytest.mark.slow
def test_100th_update_before_the_first_episode_ends(tmp_path, monkeypatch):
    arguments = [*BASELINE, "--aux", "none", "--paper", "--warmup", 1, "--total-updates", 101, "--eval-every", 1000]
    run_folder, _ = run_in_process(sac, tmp_path, monkeypatch, *arguments, "--batch-size", 1, "--total-updates", 99)
    run_in_process(sac, tmp_path, monkeypatch, "--resume", run_folder, "--total-updates", 101)


def test_resumed_in_an_evaluation(tmp_path, monkeypatch):
    arguments = [*BASELINE, "--aux", "none", "--task", "r2"]
    _, whole = run_in_process(sac, tmp_path / "whole", monkeypatch, *arguments)
    stopped, resumed = interrupted_in(monkeypatch, "evaluate", tmp_path / "interrupted", *arguments)
    assert stopped["counters"]["updates"] == 3 and stopped["rows"] == []
    assert [(row["update"], row["split"]) for row in resumed["rows"]][:2] == [(3, "seen"), (3, "unseen")]
    same_run(whole, resumed)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_interrupted_run_goes_on(how, tmp_path):
    with Run(tmp_path, SCRIPT, *TINY, "--total-updates", "100000", "--checkpoint-every", "0.2") as run:
        assert wait_until(lambda: run.updates() >= 4, 60)
        os.killpg(run.process.pid, getattr(signal, how))
        run.wait(10)
    if how == "SIGINT":
        assert f"--resume {run.run_folder.relative_to(tmp_path)}" in run.output.splitlines()[-1]
    before = run.updates()
    resumed = Run(
        tmp_path, SCRIPT, "--resume", run.run_folder, "--total-updates", before + 3, "--learning-rate", "1e-5"
    )
    assert resumed.wait() == 0, resumed.output
    assert run.updates() == before + 3
    groups = [group for optimizer in run.checkpoint()["optimizers"] for group in optimizer["param_groups"]]
    assert all(group["lr"] == 1e-5 for group in groups)
    assert not list(run.run_folder.glob("*.tmp"))


@pytest.mark.slow
def test_full_disk_keeps_the_last_checkpoint(tmp_path):
    small = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 10**7, 4 * 10**7))}
    endless = ["--total-updates", "100000", "--eval-every", "100000", "--checkpoint-every", "1"]
    full = Run(tmp_path, SCRIPT, *TINY, *endless, **small)  # until the frames fill 40 MB
    assert full.wait() != 0 and "the disk is full" in full.output.splitlines()[-2], full.output
    assert "--resume" in full.output.splitlines()[-1] and "Traceback" not in full.output
    assert not list(full.run_folder.glob("*.tmp"))
    before = full.updates()
    resumed = Run(tmp_path, SCRIPT, "--resume", full.run_folder, "--total-updates", before + 2)
    assert resumed.wait() == 0 and full.updates() == before + 2, resumed.output


def test_loss_that_is_not_finite_keeps_the_last_checkpoint(tmp_path):
    run = Run(tmp_path, SCRIPT, *TINY, "--learning-rate", "1e4", "--total-updates", "100", "--eval-every", "1000")
    assert run.wait() != 0 and "is not finite" in run.output.splitlines()[-2], run.output
    assert "--resume" in run.output.splitlines()[-1]
    assert all(torch.isfinite(tensor).all() for tensor in run.checkpoint()["agent"].values())


def test_bad_input_is_answered_in_a_line_or_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("damaged").mkdir()
    Path("damaged/checkpoint.pt").write_bytes(b"PK\x03\x04 cut off")
    Path("foreign").mkdir()
    torch.save({"model": torch.zeros(3)}, "foreign/checkpoint.pt")
    for arguments, expected in [
        (["--gdan", "--aux", "ae"], "--gdan needs --aux gace"),
        (["--concat-query"], "--concat-query needs --gdan"),
        (["--ae-coef", "1"], "--ae-coef needs --aux ae"),
        (["--entropy-coef", "1"], "--entropy-coef needs --policy gaussian"),
        (["--exploration-noise", "1", "--policy", "gaussian"], "--exploration-noise needs --policy deterministic"),
        (["--fixed-goal", "pink"], "use one of red, green, blue"),
        (["--resume", "nowhere"], "nowhere: No such file or directory"),
        (["--resume", "damaged"], "damaged/checkpoint.pt is not a whole checkpoint of sac_gace_ur5.py"),
        (["--resume", "foreign"], "foreign/checkpoint.pt is not a whole checkpoint"),
        (["--goal-batch-size", "0"], "--goal-batch-size must be between 1 and"),
        (["--env-steps-per-update", "4"], "8 environments need --env-steps-per-update 8 or more"),
        (["--replay-size", "31"], "8 environments need a --replay-size of at least 32"),
        (["--n-step", "1000000000"], "--n-step must be between 1 and 50"),
        (["--seed", "-1"], "--seed must be between 0 and"),
        (["--gamma", "nan"], "--gamma must be between 0 and 1"),
        (["--exploration-noise", "nan"], "--exploration-noise must be between"),
        (["--replay-size", "1000000000", "--total-updates", "1000000000"], "use a smaller --replay-size"),
    ]:
        assert expected in answer_of(sac, monkeypatch, *arguments)
    assert not Path("runs").exists()
    call(sac, monkeypatch, *TINY, "--total-updates", 1)
    (run_folder,) = Path("runs").iterdir()
    assert "cannot change --task: it is r1" in answer_of(sac, monkeypatch, "--resume", run_folder, "--task", "r2")
    for name in ("replay_steps.bin", "replay_frames.bin", "goal_states.bin"):
        whole = (run_folder / name).read_bytes()
        for damage in (lambda path: path.write_bytes(b""), Path.unlink):
            damage(run_folder / name)
            assert f"{name} is damaged or lost" in answer_of(sac, monkeypatch, "--resume", run_folder)
        (run_folder / name).write_bytes(whole)
    checkpoint = torch.load(run_folder / "checkpoint.pt")
    torch.save({name: checkpoint[name] for name in ("args", "agent", "counters")}, run_folder / "checkpoint.pt")
    assert "has no 'target'" in answer_of(sac, monkeypatch, "--resume", run_folder)
    run = Run(tmp_path, SCRIPT, "--gdan", "--aux", "none")
    assert run.wait() != 0 and len(run.output.strip().splitlines()) <= 2, run.output

"""The equations of a3c_gace_vizdoom.py against references written out here, and the script run as a user runs it."""

import csv
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
import uuid
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from agents import Walker
from PIL import Image
from test_envs import engines, wait_until

import a3c_gace_vizdoom as a3c

ROOT = Path(__file__).parent.parent


def random_images(*shape):
    return torch.randint(0, 256, (*shape, 16, 42, 42), dtype=torch.uint8)


def make_agent(**kwargs):
    torch.manual_seed(0)
    return a3c.Agent(a3c.Args(cuda=False, **kwargs))


def gradients(module):
    return [p.grad for p in module.parameters() if p.grad is not None and p.grad.abs().sum() > 0]


# ----------------------------------------------------------------------------------------------------------- equations


def test_returns_are_discounted_sums():
    rewards = [-0.01, -0.01, 9.9925]
    expected = [-0.01 + 0.9 * (-0.01 + 0.9 * 9.9925), -0.01 + 0.9 * 9.9925, 9.9925]
    assert a3c.discounted_returns(rewards, 0.9).tolist() == pytest.approx(expected)


def test_advantages_are_those_of_equation_3_for_lambda_1_and_of_one_step_for_lambda_0():
    rewards, values = [-0.1, 0.2, 1.0], torch.tensor([0.3, 0.5, 0.4])
    returns = a3c.discounted_returns(rewards, 0.9)
    assert torch.allclose(a3c.estimate_advantages(rewards, values, 0.9, 1.0), returns - values)
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
    storage = a3c.GoalStorage(tmp_path / "goals.bin", 1000, multiprocessing.Value("q", 0))
    for i in range(60):
        storage.add(random_images(1)[0].numpy(), i % 4)
    return storage


def test_frozen_discriminator_gets_no_gradient_but_is_still_measured(storage):
    for update, frozen in ((10, False), (11, True)):
        args = a3c.Args(cuda=False, freeze_discriminator_at=10, max_grad_norm=1e9)
        agent = make_agent()
        _, gradient = a3c.flatten(agent)
        report = a3c.learn(args, agent, gradient, fake_episode(), storage, update, "cpu")
        assert bool(gradients(agent.goal_discriminator)) != frozen
        assert 0 <= report["charts/discriminator_accuracy"] <= 1 and report["losses/gace"] > 0


def test_learn_is_equation_9_and_clips(storage):
    """The gradient of the script against the gradient of the total loss, written out."""
    args = a3c.Args(cuda=False, gdan=True, max_grad_norm=1e9, reward_scale=0.5, entropy_coef=0.02, eta=0.4)
    args.value_coef, args.gae_lambda = 0.5, 1.0  # the paper's
    agent = make_agent(gdan=True)
    episode = fake_episode()
    _, gradient = a3c.flatten(agent)
    a3c.learn(args, agent, gradient, episode, storage, 1, "cpu")
    found = gradient.clone()

    images, actions = torch.from_numpy(np.stack(episode.images)), torch.tensor(episode.actions)
    logits, values, _ = agent(images, torch.ones(6, dtype=torch.long))
    loss, following = 0, 0
    for t in reversed(range(6)):
        following = episode.rewards[t] * 0.5 + 0.99 * following
        log_p = torch.log_softmax(logits[t], 0)
        loss = loss - log_p[actions[t]] * (following - values[t].detach()) + 0.02 * (log_p.exp() * log_p).sum()
        loss = loss + 0.5 * (following - values[t]) ** 2
    states, labels = storage.sample(50, np.random.default_rng(0))
    loss = loss - 0.4 * torch.log_softmax(agent.classify(states), -1)[range(50), labels].mean()
    gradient.zero_()
    loss.backward()
    assert torch.allclose(found, gradient, rtol=1e-3, atol=1e-4)

    args.max_grad_norm = 1.0
    episode.rng = np.random.default_rng(0)
    report = a3c.learn(args, agent, gradient, episode, storage, 1, "cpu")
    assert gradient.norm().item() == pytest.approx(1, rel=1e-4)
    assert report["losses/gradient_norm"] == pytest.approx(found.norm().item(), rel=1e-3)


def test_loss_that_is_not_finite_is_an_error(storage):
    agent = make_agent()
    _, gradient = a3c.flatten(agent)
    episode = fake_episode()
    episode.rewards[-1] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite at update 3"):
        a3c.learn(a3c.Args(cuda=False), agent, gradient, episode, storage, 3, "cpu")


def test_vae_and_rad_shapes():
    agent = make_agent(aux="vae")
    images = random_images(3)
    loss = a3c.vae_loss(agent.vae, agent(images, torch.zeros(3, dtype=torch.long))[2], images)
    loss.backward()
    assert loss > 0 and gradients(agent.feature_extractor) and not gradients(agent.actor_critic)
    cropped = images[..., 3 : 3 + a3c.CROP, 1 : 1 + a3c.CROP]
    assert make_agent(aux="rad")(cropped, torch.zeros(3, dtype=torch.long))[0].shape == (3, 3)


# -------------------------------------------------------------------------------------------------------- goal storage


def add_many(storage, label, number):
    for i in range(number):
        storage.add(np.full((16, 42, 42), label * 10 + i % 10, np.uint8), label)


def test_goal_storage_is_shared_bounded_and_keeps_labels(tmp_path):
    storage = a3c.GoalStorage(tmp_path / "goals.bin", 100, multiprocessing.Value("q", 0))
    workers = [multiprocessing.get_context("fork").Process(target=add_many, args=(storage, i, 40)) for i in range(4)]
    for process in workers:
        process.start()
    for process in workers:
        process.join()
    assert len(storage) == 100 and storage.count.value == 160
    states, labels = storage.sample(500, np.random.default_rng(0))
    assert states.shape == (500, 16, 42, 42) and states.dtype == torch.uint8 and labels.shape == (500,)
    assert (states[:, 0, 0, 0] // 10 == labels).all() and (states == states[:, :1, :1, :1]).all()
    assert (tmp_path / "goals.bin").stat().st_size == 100 * a3c.GoalStorage.record_bytes


def test_goal_storage_keeps_the_state_as_it_was(tmp_path):
    storage = a3c.GoalStorage(tmp_path / "goals.bin", 10, multiprocessing.Value("q", 0))
    state = random_images(1)[0]
    storage.add(state.numpy(), 3)
    states, labels = storage.sample(2, np.random.default_rng(0))
    assert torch.equal(states[1], state) and labels.tolist() == [3, 3]


def test_auto_labelling(tmp_path):
    """Successes by their goal, one step before the last state; time-outs as the negative class; other objects not."""

    def play(seed, policy, epsilon_n):
        storage = a3c.GoalStorage(tmp_path / uuid.uuid4().hex, 10, multiprocessing.Value("q", 0))
        episode.begin([seed])
        choose, seen, over = policy(episode.env.unwrapped), [], False
        while not over:
            seen.append(episode.image)
            over = episode.step(choose())
        a3c.store_goal_state(a3c.Args(epsilon_n=epsilon_n), storage, episode)
        states, labels = storage.sample(1, np.random.default_rng(0)) if len(storage) else ([None], [None])
        return episode, seen, states[0], labels[0]

    episode = a3c.Episode(a3c.Args())
    goals, outcomes = set(), []
    for seed in range(6):
        _, seen, state, label = play(seed, lambda env: Walker(env).action, 0)
        assert episode.info["is_success"] and label == episode.goal
        assert np.array_equal(state, seen[-2]) and not np.array_equal(state, seen[-1])
        goals.add(episode.goal)
    for seed in range(40):
        epsilon_n = seed % 2
        rng = np.random.default_rng(seed)
        _, seen, state, label = play(seed, lambda env, rng=rng: lambda: int(rng.integers(3)), epsilon_n)
        if not episode.info["is_success"]:
            timeout = episode.info["reached"] < 0
            outcomes.append(timeout)
            assert (label == 4 and np.array_equal(state, seen[-1])) if timeout and epsilon_n else label is None
    assert len(goals) > 1 and set(outcomes) == {True, False}
    episode.env.close()


def test_goal_storage_costs_the_same_full_as_empty(tmp_path):
    """The time to sample does not grow with what it holds (the system has read the files before)."""

    def sample_seconds(stored):
        storage = a3c.GoalStorage(tmp_path / f"{stored}.bin", 100_000, multiprocessing.Value("q", stored))
        (tmp_path / f"{stored}.bin").write_bytes(bytes(stored * storage.record_bytes))
        rng = np.random.default_rng(0)
        times = []
        for _ in range(50):
            start = time.perf_counter()
            storage.sample(50, rng)
            times.append(time.perf_counter() - start)
        return np.median(times)

    small, large = sample_seconds(100), sample_seconds(8_000)
    assert large < 3 * small + 1e-3


# ------------------------------------------------------------------------------------------------------- as a user does

SCRIPT = str(ROOT / "a3c_gace_vizdoom.py")
TINY = "--warmup 4 --total-updates 6 --num-workers 1 --envs-per-worker 2 --eval-every 3 --episodes 4 --no-cuda".split()


def call(script, monkeypatch, *arguments):
    """The script's main function with these arguments, without the seconds that a new process takes to import torch."""
    monkeypatch.setattr(sys, "argv", ["script.py", *map(str, arguments)])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        script.main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Run:
    """A run of the script in a folder of its own, and all processes that it started."""

    def __init__(self, folder, *arguments, script=SCRIPT):
        self.folder, self.marker = folder, f"GACE_TEST={uuid.uuid4()}"
        environment = {**os.environ, "GACE_TEST": self.marker.split("=")[1], "PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        self.process = subprocess.Popen([sys.executable, script, *arguments], cwd=folder, env=environment, **pipes)

    def wait(self, seconds=120):
        self.output = self.process.communicate(timeout=seconds)[0]
        return self.process.returncode

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in (self.process.pid, *self.descendants()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.communicate()

    def descendants(self):
        return [pid for pid in processes_with(self.marker) if pid != self.process.pid]

    @property
    def run_folder(self):
        (folder,) = (self.folder / "runs").iterdir()
        return folder

    def updates(self):
        try:
            return torch.load(self.run_folder / "checkpoint.pt")["updates"]
        except (ValueError, FileNotFoundError):
            return -1

    def rows(self):
        with open(self.run_folder / "metrics.csv") as file:
            return list(csv.DictReader(file))


def processes_with(marker):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


MODES = {
    "a3c": ["--aux", "none"],
    "a3c+vae": ["--aux", "vae"],
    "a3c+rad": ["--aux", "rad"],
    "a3c+gace": ["--task", "v2"],
    "a3c+gace+gdan": ["--gdan", "--epsilon-n", "0.5", "--num-workers", "2"],
}


@pytest.mark.parametrize("algorithm", MODES)
def test_every_mode_trains_evaluates_and_is_evaluated_again(algorithm, tmp_path, monkeypatch, capsys):
    run = Run(tmp_path, *TINY, *MODES[algorithm])
    assert run.wait() == 0, run.output
    task = "v2" if algorithm == "a3c+gace" else "v1"
    assert run.run_folder.name.startswith(f"{task}__{algorithm}__1__")
    splits = ["seen", "unseen"] if task == "v2" else ["seen"]
    assert [(row["update"], row["split"]) for row in run.rows()] == [(u, s) for u in ("3", "6") for s in splits]
    assert list(run.rows()[0]) == a3c.METRICS
    assert all(0 <= float(row["success_ratio"]) <= 1 and int(row["env_steps"]) > 0 for row in run.rows())
    assert run.updates() == 6 and not run.descendants()

    checkpoint = run.run_folder / "checkpoint.pt"
    video = ["--capture-video"] if algorithm == "a3c+gace+gdan" else []
    call(a3c, monkeypatch, "--evaluate", checkpoint, "--episodes", 4, "--no-cuda", *video)
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("update 6")]
    last = [float(row["success_ratio"]) for row in run.rows()][-len(splits) :]
    assert [f"success {ratio:.1%}" in line for ratio, line in zip(last, shown, strict=True)] == [True] * len(splits)
    if video:
        with Image.open(run.run_folder / "checkpoint_seen.gif") as gif:
            assert gif.n_frames > 20 and gif.size[0] >= 320


def test_committed_agent_is_evaluated_out_of_the_box(tmp_path):
    """By the command of results/README.md, for one goal; a random policy succeeds in 6.6 %."""
    checkpoint = ROOT / "results" / "v1__a3c+gace+gdan__1.pt"
    run = Run(tmp_path, "--evaluate", str(checkpoint), "--goal", "armor", "--episodes", "40", "--no-cuda")
    assert run.wait() == 0, run.output
    assert float(run.output.split("success ")[1].split("%")[0]) > 25


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_interrupted_run_leaves_nothing_behind_and_goes_on(how, tmp_path):
    endless = ["--total-updates", "100000", "--eval-every", "10", "--checkpoint-every", "1"]
    with Run(tmp_path, *TINY, "--gdan", "--num-workers", "2", *endless) as run:
        assert wait_until(lambda: run.updates() >= 12, 60)
        assert engines(run.marker)
        if how == "SIGKILL":
            run.process.kill()
        else:
            os.killpg(run.process.pid, getattr(signal, how))  # as a terminal does, or a batch system
        run.wait(10)
        assert wait_until(lambda: not run.descendants(), 5)
    before = run.updates()
    assert before >= 12
    checkpoint = torch.load(run.run_folder / "checkpoint.pt")
    resumed = Run(tmp_path, "--resume", str(run.run_folder), "--total-updates", str(before + 3))
    assert resumed.wait() == 0, resumed.output
    after = torch.load(run.run_folder / "checkpoint.pt")
    assert after["updates"] == before + 3 and after["env_steps"] > checkpoint["env_steps"]
    assert abs(after["adam"]["step"] - after["updates"]) <= 2  # workers may count a step of the shared Adam at once
    assert after["goal_count"] >= checkpoint["goal_count"]
    updates = [int(row["update"]) for row in run.rows()]
    assert updates == sorted(set(updates)) and updates[-1] == before + 3


def test_learning_rate_rises_and_ends_low():
    args = a3c.Args(learning_rate=4e-4, learning_rate_warmup=4, final_learning_rate=1e-5, final_learning_rate_from=7)
    rates = [a3c.learning_rate(args, update) for update in range(1, 10)]
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 4e-4, 4e-4, 4e-4, 1e-5, 1e-5])
    assert a3c.learning_rate(a3c.Args(learning_rate_warmup=0), 1) == a3c.Args().learning_rate


def test_evaluations_that_an_interruption_cost():
    args = a3c.Args(task="v2", eval_every=10, total_updates=25)
    rows = [{"split": "seen", "update": "10"}, {"split": "unseen", "update": "10"}, {"split": "seen", "update": "20"}]
    assert a3c.lost_evaluations(args, 9, []) == []
    assert a3c.lost_evaluations(args, 12, []) == ["seen", "unseen"]
    assert a3c.lost_evaluations(args, 19, rows[:2]) == []
    assert a3c.lost_evaluations(args, 24, rows) == ["unseen"]
    assert a3c.lost_evaluations(args, 25, rows) == ["seen", "unseen"]


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_interrupted_while_its_processes_start(how, tmp_path):
    """When nobody has yet taken the evaluation that the run owes, and no child has looked at its parent."""
    args = a3c.Args(aux="none", num_workers=1, envs_per_worker=2, eval_every=3, episodes=4, cuda=False)
    state = a3c.Shared(a3c.Agent(args), 1, multiprocessing.get_context("spawn")).state()
    torch.save({**state, "updates": 4, "seconds": 1.0, "args": asdict(args)}, tmp_path / "checkpoint.pt")
    with Run(tmp_path, "--resume", str(tmp_path)) as run:
        assert wait_until(lambda: len(run.descendants()) >= 3, 30)  # worker, evaluator, multiprocessing's own
        run.process.send_signal(getattr(signal, how))
        run.wait(10)
        assert wait_until(lambda: not run.descendants(), 10)


def test_dead_engine_costs_an_episode_and_a_dead_worker_the_run(tmp_path):
    endless = ["--total-updates", "100000", "--eval-every", "100000", "--checkpoint-every", "1"]
    with Run(tmp_path, *TINY, "--num-workers", "2", *endless) as run:
        assert wait_until(lambda: run.updates() >= 3, 60)
        before = run.updates()
        os.kill(engines(run.marker)[0], signal.SIGKILL)
        assert wait_until(lambda: run.updates() > before + 30, 60)
        assert wait_until(lambda: len(engines(run.marker)) == 4)  # it was replaced
        os.kill(parent(engines(run.marker)[0]), signal.SIGKILL)
        assert run.wait(15) != 0 and "was killed" in run.output.splitlines()[-1]
        assert wait_until(lambda: not run.descendants(), 5)


def parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return -1


def test_worker_that_raises_ends_the_run_with_its_traceback(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(
        "import a3c_gace_vizdoom as a3c\n"
        "def broken(*args):\n    raise RuntimeError('broken on purpose')\n"
        "a3c.policy_loss = broken\n"
        "if __name__ == '__main__':\n    a3c.main()\n"
    )
    run = Run(tmp_path, *TINY, script=str(script))
    assert run.wait() != 0
    assert "broken on purpose" in run.output and "Traceback" in run.output
    assert wait_until(lambda: not run.descendants(), 5)


def test_loss_that_is_not_finite_keeps_the_last_checkpoint(tmp_path):
    run = Run(tmp_path, *TINY, "--reward-scale", "nan")
    assert run.wait() != 0 and "the loss is not finite" in run.output
    assert torch.isfinite(torch.load(run.run_folder / "checkpoint.pt")["parameters"]).all()


def test_bad_input_is_answered_in_a_line_or_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("damaged.pt").write_bytes(b"PK\x03\x04 cut off")
    torch.save({"model": torch.zeros(3)}, "foreign.pt")
    for arguments, expected in [
        (["--gdan", "--aux", "vae"], "use --aux gace"),
        (["--evaluate", "missing.pt"], "missing.pt does not exist"),
        (["--evaluate", "damaged.pt"], "damaged.pt is not a whole checkpoint"),
        (["--evaluate", "foreign.pt"], "foreign.pt is not a whole checkpoint"),
        (["--resume", "nowhere"], "nowhere/checkpoint.pt does not exist"),
        (["--num-workers", "0"], "--num-workers must be at least 1"),
        (["--warmup", "0"], "--warmup must be at least 1"),
        (["--seed", "-1"], "--seed must be"),
        (["--goal-storage-size", "100"], "use a --goal-storage-size of at least that"),
    ]:
        with pytest.raises(SystemExit, match=expected) as answer:
            call(a3c, monkeypatch, *arguments)
        assert len(str(answer.value).splitlines()) <= 2
    assert not Path("runs").exists()
    Path("runs").write_text("in the way")
    run = Run(tmp_path, *TINY)
    assert run.wait() != 0 and "cannot write into the run folder" in run.output
    assert len(run.output.strip().splitlines()) <= 2, run.output

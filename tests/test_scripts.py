"""What both scripts promise in the same words: one test for both."""

import csv
import fcntl
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import types
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import Run, answer_of, call, engines, gradients, run_in_process, wait_until
from script_helpers import BOTH, ENDLESS, TINY
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_copy import A3C_CHANGES, SAC_CHANGES, GridWorld, copied

import a3c_gace_vizdoom as a3c
import sac_gace_ur5 as sac

TASK, TASK_WITH_TWO_SPLITS = {a3c: "v1", sac: "r1"}, {a3c: "v2", sac: "r2"}
METRICS = "update,env_steps,seconds,split,success_ratio,discriminator_accuracy,episode_length,episode_return"
METRICS = f"{METRICS},training_success_ratio".split(",")


def make_agent(script, **settings):
    torch.manual_seed(0)
    return script.Agent(script.Args(**settings)).eval()


def random_images(script, number):
    return torch.randint(0, 256, (number, *script.sizes(TASK[script])[0]), dtype=torch.uint8)


def classify(script, agent, images):
    return agent.classify(images) if script is a3c else agent.goal_discriminator(agent.feature_extractor(images))


# -------------------------------------------------------------------------------------------------- flags and refusals


@BOTH
def test_names_of_the_algorithms(script):
    base, *baselines = {a3c: ("a3c", "vae", "rad"), sac: ("sac", "ae", "curl")}[script]
    names = {f"{base}+{aux}": {"aux": aux} for aux in baselines}
    names |= {
        base: {"aux": "none"},
        f"{base}+gace": {},
        f"{base}+gace+gdan": {"gdan": True},
        "mine": {"exp_name": "mine"},
    }
    names |= {f"{base}+gace+gdan+paper": {"gdan": True, "paper": True}}
    if script is a3c:
        names |= {"a3c+gace+frozen10000": {"freeze_discriminator_at": 10_000}}
    else:
        names |= {"sac+gace+gdan+concat": {"gdan": True, "concat_query": True}}
        names |= {"sac+red+gaussian": {"aux": "none", "fixed_goal": "red", "policy": "gaussian"}}
    assert {script.algorithm(script.Args(**settings)): settings for settings in names.values()} == names


@BOTH
def test_help_mentions_every_flag(script, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        call(script, monkeypatch, "--help")
    shown, source = re.sub(r"[\s│]+", "", capsys.readouterr().out), Path(script.__file__).read_text()
    for field in fields(script.Args):
        if field.name != "version":
            (comment,) = re.findall(rf"^    {field.name}: .*?  # (.*)$", source, re.MULTILINE)
            assert f"--{field.name.replace('_', '-')}" in shown and comment.replace(" ", "") in shown


PAPER = {  # the paper's two tables of hyperparameters
    a3c: {"warmup": 2000, "goal_batch_size": 50, "eta": 0.5, "epsilon_n": 0, "gamma": 0.99, "learning_rate": 7e-5}
    | {"max_grad_norm": 10, "entropy_coef": 0.01, "num_envs": 20}
    | {"value_coef": 0.5},  # Eq. 5
    sac: {"warmup": 10_000, "epsilon_n": 0.05, "tau": 0.005, "batch_size": 128, "goal_batch_size": 128}
    | {"hidden_size": 256, "target_update_interval": 1, "replay_size": 1_000_000, "goal_storage_size": 500_000}
    | {"eta": 0.5, "gamma": 0.99, "learning_rate": 7e-5, "entropy_coef": 0.01}
    | {"n_step": 1, "num_envs": 1, "env_steps_per_update": 1, "augment": False},  # Algorithm 1
}


@BOTH
@pytest.mark.parametrize("flags", [["--paper"], ["--eta", "0.3", "--paper", "--gamma=0.9"]])
def test_paper_sets_the_papers_hyperparameters_and_single_flags_override_it(script, flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "train", lambda *arguments: None)
    call(script, monkeypatch, *flags)
    (run_folder,) = Path("runs").iterdir()
    assert run_folder.name.startswith(f"{TASK[script]}__{script.algorithm(script.Args())}+paper__1__")
    found = json.loads((run_folder / "args.json").read_text())
    expected = PAPER[script] | ({"eta": 0.3, "gamma": 0.9} if len(flags) > 1 else {})
    assert {name: found[name] for name in expected} == expected and found["version"] == script.VERSION


@BOTH
def test_weights_and_biases_get_the_name_the_settings_and_tensorboard(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "train", lambda *arguments: None)
    account = {}
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=account.update))
    call(script, monkeypatch, "--track", "--wandb-project-name", "mine", "--wandb-entity", "us", "--seed", 3)
    (run_folder,) = Path("runs").iterdir()
    assert account["name"] == account["id"] == run_folder.name and account["resume"] == "allow"
    assert (account["project"], account["entity"], account["sync_tensorboard"]) == ("mine", "us", True)
    assert account["config"]["seed"] == 3


@BOTH
def test_every_number_has_a_limit(script):
    for field in fields(script.Args):
        for value in {int: [-1, 0], float: [-1.0, math.nan, math.inf]}.get(field.type, []):
            if value == 0 and field.name in ("seed", "learning_rate_warmup"):
                continue
            with pytest.raises(SystemExit, match=f"--{field.name.replace('_', '-')} must be . or more, not {value}"):
                script.Args(**{field.name: value})


@BOTH
def test_bad_input_is_answered_in_a_line(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder/checkpoint.pt").mkdir(parents=True)
    cases = {
        "--gamma nan": "--gamma must be 0 or more, not nan",
        "--paper --total-updates=0": "--total-updates must be 1 or more, not 0",
        "--gdan --aux none": "--gdan needs --aux gace",
        "--resume nowhere": "nowhere/checkpoint.pt is not a file",
        "--resume folder": "folder/checkpoint.pt is not a file",
        "--resume nowhere --seed 2": "only --total-updates may be given with --resume",
    }
    if script is sac:
        cases |= {
            "--concat-query": "--concat-query needs --gdan",
            "--fixed-goal pink": "unknown --fixed-goal pink; use one of red, green, blue",
        }
    for flags, expected in cases.items():
        answer = answer_of(script, monkeypatch, *flags.split())
        assert expected in answer and "\n" not in answer
    assert not Path("runs").exists()
    Path("runs").write_text("in the way")
    assert "runs" in answer_of(script, monkeypatch, *TINY[script])


@BOTH
def test_no_room_on_the_disk_is_one_error_at_the_start(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=50_000))
    answer = answer_of(script, monkeypatch, *TINY[script])
    flag = "--goal-storage-size" if script is a3c else "--replay-size or goal storage"
    assert re.fullmatch(rf"no room for runs/.*\.bin \(0\.0 GB\): use a smaller {flag}", answer)
    assert sum(path.stat().st_size for path in Path("runs").rglob("*.bin")) == 0


# ------------------------------------------------------------------------------------------- goal states and evaluation


@BOTH
@pytest.mark.parametrize("gdan", [False, True])
def test_gace_loss_trains_extractor_and_discriminator_and_nothing_else(script, gdan):
    agent = make_agent(script, gdan=gdan)
    script.gace_loss(classify(script, agent, random_images(script, 8)), torch.arange(8) % 4).backward()
    for name, module in agent.named_children():
        trained = name in ("feature_extractor", "goal_discriminator")
        assert len(gradients(module)) == (len(list(module.parameters())) if trained else 0)


@BOTH
def test_goal_storage_is_bounded_and_keeps_states_and_labels(script, tmp_path):
    images = random_images(script, 25).numpy()
    if script is a3c:
        args, lock = a3c.Args(goal_storage_size=10), a3c.mp.Lock()
        storage = a3c.GoalStorage(tmp_path / "goals.bin", args, torch.tensor(0), lock)
    else:
        storage = sac.GoalStorage(tmp_path, images.shape[1:], 10)
    for count, oldest in ((7, 0), (25, 15)):
        for label in range(int(storage.count), count):
            storage.add(images[label], label)
        states, labels = map(np.asarray, storage.sample(100, np.random.default_rng(0)))
        assert set(labels.tolist()) == set(range(oldest, count)) and labels.dtype == np.int64
        assert np.array_equal(states, images[labels])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 10 * (images[0].size + 1)


@BOTH
def test_augmented_states_are_mirrored_and_shifted(script):
    shift, size = {a3c: (3, 42), sac: (4, 84)}[script]
    state, (rows, columns) = random_images(script, 1), np.mgrid[:size, :size]
    expected, offsets = {}, range(-shift, shift + 1)
    for mirrored, y, x in itertools.product((False, True), offsets, offsets):
        seen = size - 1 - columns if mirrored else columns
        moved = state[0, :, np.clip(rows + y, 0, size - 1), np.clip(seen + x, 0, size - 1)]
        expected[moved.numpy().tobytes()] = mirrored
    states = state.repeat(1500, 1, 1, 1)
    found = script.augmented(states.numpy() if script is a3c else states, np.random.default_rng(0))
    found = [np.asarray(image).tobytes() for image in found]
    assert set(found) == set(expected) and 650 < sum(expected[image] for image in found) < 850


@BOTH
def test_accuracy_is_measured_on_the_same_states_in_every_run(script):
    args = script.Args(task=TASK_WITH_TWO_SPLITS[script], accuracy_states=5, seed=7, episodes=1)
    states, labels = script.collect_goal_states(args, "unseen")
    again, _ = script.collect_goal_states(replace(args, seed=8, gdan=True), "unseen")
    assert labels.tolist() == [0, 1, 2, 3, 0] and torch.equal(states, again)  # on the arm, 3 is the negatives' class
    assert len({state.numpy().tobytes() for state in states}) == 5
    agent = make_agent(script)
    with torch.no_grad():
        guesses = classify(script, agent, states).argmax(-1)
    for right in (5, 2, 0):
        labels = torch.where(torch.arange(5) < right, guesses, (guesses + 1) % 4)
        row = script.evaluate(args, agent, "unseen", {"unseen": (states, labels)})
        assert row["discriminator_accuracy"] == pytest.approx(right / 5)


@BOTH
def test_evaluation_episodes_depend_on_the_seed(script):
    def play(seed):
        args, agent = script.Args(seed=seed, episodes=3), make_agent(script)
        episodes = script.evaluation_episodes(args, agent, "seen")
        return [(episode.goal, tuple(episode.rewards), episode.image.tobytes()) for episode in episodes]

    first = play(1)
    assert len(set(first)) == 3 and play(1) == first and not set(play(2)) & set(first)


# ---------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="session", params=[a3c, sac], ids=["a3c", "sac"])
def finished(request, tmp_path_factory):
    """A script and its finished run. Tests change copies only."""
    script = request.param
    with pytest.MonkeyPatch.context() as patch:
        run_folder, _ = run_in_process(script, tmp_path_factory.mktemp("finished"), patch, *TINY[script], "--gdan")
    return script, run_folder


def copy_of(run_folder, tmp_path):
    return Path(shutil.copytree(run_folder, tmp_path / "runs" / run_folder.name))


def rows_of(run_folder):
    with open(run_folder / "metrics.csv") as file:
        return list(csv.DictReader(file))


def check_run(script, run_folder, algorithm, task):
    """Checks what a finished run of four updates leaves."""
    assert run_folder.name.startswith(f"{task}__{algorithm}__1__")
    run, args, agent = script.load_checkpoint(run_folder / "checkpoint.pt")
    assert int(run["counters"]["updates"]) == 4 and run["args"]["version"] == script.VERSION
    assert json.loads((run_folder / "args.json").read_text()) == run["args"]
    rows, splits = rows_of(run_folder), ["seen", "unseen"] if task == TASK_WITH_TWO_SPLITS[script] else ["seen"]
    assert list(rows[0]) == METRICS
    assert [(row["update"], row["split"]) for row in rows] == [(u, s) for u in ("2", "4") for s in splits]
    successes = torch.as_tensor(run["recent"]).double()[:, 0]  # of the last episodes, or nan
    assert float(rows[-1]["training_success_ratio"]) == pytest.approx(successes.nanmean().item())
    for row in rows[-len(splits) :]:  # the agent in the checkpoint is the one that was evaluated
        again = script.evaluate(args, agent, row["split"], run["goal_states"])
        assert {name: str(number) for name, number in again.items()} == {name: row[name] for name in again}
        assert (row["discriminator_accuracy"] == "nan") == ("gace" not in algorithm)


def test_finished_run(finished):
    script, run_folder = finished
    check_run(script, run_folder, script.algorithm(script.Args(gdan=True)), TASK[script])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "algorithm", "flags"),
    [
        (a3c, "a3c", "--aux none"),
        (a3c, "a3c+vae", "--aux vae"),
        (a3c, "a3c+rad", "--aux rad"),
        (a3c, "a3c+gace", "--task v2 --epsilon-n 0.5 --goal-batch-norm"),
        (sac, "sac+gaussian", "--aux none --policy gaussian"),
        (sac, "sac+ae", "--aux ae"),
        (sac, "sac+curl", "--aux curl --task r3"),
        (sac, "sac+gace", "--task r2"),
        (sac, "sac+gace+gdan+concat+green", "--gdan --concat-query --fixed-goal green"),
    ],
)
def test_every_algorithm_trains_and_is_evaluated(script, algorithm, flags, tmp_path, monkeypatch):
    run_folder, run = run_in_process(script, tmp_path, monkeypatch, *TINY[script], *flags.split())
    check_run(script, run_folder, algorithm, run["args"]["task"])


def test_resumed_run_keeps_its_arguments(finished, tmp_path, monkeypatch):
    script, run_folder = finished
    run_folder = copy_of(run_folder, tmp_path)
    before, rows = torch.load(run_folder / "checkpoint.pt"), rows_of(run_folder)
    sizes = {path: path.stat().st_size for path in run_folder.glob("*.bin")}
    for flags in ("--eta 0.3", "--total-updates 6 --no-gdan", "--paper", "--runs=elsewhere"):
        answer = answer_of(script, monkeypatch, "--resume", run_folder, *flags.split())
        assert answer == "a resumed run keeps its arguments: only --total-updates may be given with --resume"

    call(script, monkeypatch, "--resume", run_folder, "--total-updates", "6")
    after = torch.load(run_folder / "checkpoint.pt")
    assert after["args"] == before["args"] | {"total_updates": 6} == json.loads((run_folder / "args.json").read_text())
    assert after["counters"]["updates"] == 6 and after["counters"]["env_steps"] > before["counters"]["env_steps"]
    assert rows_of(run_folder)[: len(rows)] == rows and rows_of(run_folder)[-1]["update"] == "6"
    assert all(map(torch.equal, before["goal_states"]["seen"], after["goal_states"]["seen"]))
    for path, size in sizes.items():  # there is room for what the longer run can fill
        assert path.stat().st_size > size


def test_run_of_another_version_or_of_another_process_is_refused(finished, tmp_path, monkeypatch):
    script, run_folder = finished
    run_folder = copy_of(run_folder, tmp_path)
    lock = os.open(run_folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # until `call` closes it
    assert answer_of(script, monkeypatch, "--resume", run_folder) == f"{run_folder} is being trained by another process"
    monkeypatch.setattr(script, "VERSION", 99)
    answer = answer_of(script, monkeypatch, "--resume", run_folder)
    assert answer == f"{run_folder} is of version {script.Args().version}, this script of version 99"


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_interrupted_run_leaves_nothing_behind_and_goes_on(script, how, tmp_path, monkeypatch):
    several = ["--num-workers", "2"] if script is a3c else []
    with Run(tmp_path, Path(script.__file__).name, *TINY[script], "--gdan", *several, *ENDLESS) as run:
        assert wait_until(lambda: run.updates() >= 4, 600)
        assert script is sac or engines(run.marker)
        if how == "SIGKILL":
            run.process.kill()
        else:
            os.killpg(run.process.pid, getattr(signal, how))  # as a terminal does, or a batch system
        status = run.wait()
        assert wait_until(lambda: not run.descendants())
    if how != "SIGKILL":
        assert status == 0 and "Traceback" not in run.output, run.output
        assert f"--resume {run.run_folder.relative_to(tmp_path)}" in run.output
    before = run.checkpoint()["counters"]
    call(script, monkeypatch, "--resume", run.run_folder, "--total-updates", int(before["updates"]) + 3)
    after = run.checkpoint()["counters"]
    assert after["updates"] == before["updates"] + 3 and after["env_steps"] > before["env_steps"]
    assert after["goals"] >= before["goals"] and run.rows()[-1]["update"] == str(int(after["updates"]))
    assert not list(run.run_folder.glob("*.tmp"))


@pytest.mark.slow
@BOTH
def test_ctrl_c_in_the_first_seconds(script, tmp_path):
    """The script is collecting the states to measure the accuracy on."""
    with Run(tmp_path, Path(script.__file__).name, *TINY[script], *ENDLESS, "--accuracy-states", "100000") as run:
        assert wait_until(lambda: run.updates() == 0 and len(engines(run.marker)) >= (2 if script is a3c else 0), 600)
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.wait() == 0 and "Traceback" not in run.output, run.output
        assert "--resume" in run.output and wait_until(lambda: not run.descendants())


@pytest.mark.slow
@BOTH
def test_loss_that_is_not_finite_keeps_the_last_checkpoint(script, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    flags = ["--aux", "none", "--eval-every", "1000", "--total-updates", "1000", "--learning-rate", "1e6"]
    flags += ["--learning-rate-warmup", "0"] if script is a3c else []
    answer = answer_of(script, monkeypatch, *TINY[script], *flags)
    expected = {a3c: "a worker died: its error stands above", sac: "is not finite"}[script]
    assert expected in answer and "go on with: python script.py --resume runs/" in answer
    assert ("FloatingPointError: the loss is not finite" in capfd.readouterr().err) == (script is a3c)
    assert not a3c.mp.active_children()
    (path,) = Path("runs").glob("*/checkpoint.pt")
    assert all(torch.isfinite(tensor).all() for tensor in torch.load(path)["agent"].values())


UNSEEN_IS_WHITE = """
import gymnasium as gym
import numpy as np
import torch
import {script} as script

class White(gym.ObservationWrapper):
    def observation(self, observation):
        return observation | {{"image": np.full_like(observation["image"], 255)}}

def make_white_env(task, split="seen", make_env=script.make_env):
    return White(make_env(task, split)) if split == "unseen" else make_env(task, split)

def encode(self, images, forward=script.FeatureExtractor.forward, **options):
    if (images.flatten(1) == 255).all(1).any():
        assert not torch.is_grad_enabled(), "learned from an unseen image"
        open("evaluated", "w").close()
    return forward(self, images, **options)

script.make_env, script.FeatureExtractor.forward = make_white_env, encode
if __name__ == "__main__":
    script.main()
"""


@pytest.mark.slow
@BOTH
def test_training_never_sees_the_unseen_split(script, tmp_path):
    """All images of the unseen split are white here. Evaluation sees them; training and its files do not."""
    (tmp_path / "white.py").write_text(UNSEEN_IS_WHITE.format(script=script.__name__))
    flags = ["--task", TASK_WITH_TWO_SPLITS[script], "--total-updates", "20", "--eval-every", "10"]
    with Run(tmp_path, tmp_path / "white.py", *TINY[script], *flags) as run:
        assert run.wait() == 0, run.output
    assert (tmp_path / "evaluated").exists() and [row["split"] for row in run.rows()] == ["seen", "unseen"] * 2
    for path in run.run_folder.glob("*.bin"):
        assert b"\xff" * 20_000 not in path.read_bytes()


# ------------------------------------------------------------------------------------------------------------ learning

LEARNING = {
    a3c: "--warmup 50 --num-workers 1 --num-envs 4 --total-updates 1000 --learning-rate-warmup 100 --reward-scale 1",
    sac: "--warmup 1000 --batch-size 32 --hidden-size 64 --total-updates 1200 --tau 0.02 --no-cuda",
}
CHARTS = "success_ratio nongoal_ratio episodic_length episodic_return env_steps SPS".split()


def random_success(continuous, episodes=300):
    """The success ratio of a random policy in the grid world."""
    env, successes = GridWorld(continuous), 0
    env.action_space.seed(0)
    for seed in range(episodes):
        env.reset(seed=seed)
        over = False
        while not over:
            *_, terminated, truncated, info = env.step(env.action_space.sample())
            over = terminated or truncated
        successes += info["is_success"]
    return successes / episodes


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("aux", ["gace", "none"])
def test_script_learns_a_grid_world_from_scratch(script, aux, tmp_path):
    """A copy of the script as in test_copy.py, in a run with one worker or process: it is the same every time."""
    path = copied(tmp_path, Path(script.__file__).name, A3C_CHANGES if script is a3c else SAC_CHANGES, script is sac)
    flags = f"{LEARNING[script]} --aux {aux} --seed 2 --learning-rate 1e-3 --goal-batch-size 16 --eval-every 500"
    with Run(tmp_path, path, *flags.split(), "--episodes", "30", "--accuracy-states", "9") as run:
        assert run.wait(600) == 0, run.output
    row, chance = run.rows()[-1], random_success(script is sac)
    assert 0.1 < chance < 0.2
    assert float(row["training_success_ratio"]) > 3 * chance and float(row["success_ratio"]) > 3 * chance
    assert aux == "none" or float(row["discriminator_accuracy"]) > 0.6  # chance: 0.33 or, with negatives, 0.25

    tags = set(EventAccumulator(str(run.run_folder)).Reload().Tags()["scalars"])
    losses = "policy_loss value_loss entropy gradient_norm" if script is a3c else "critic_loss actor_loss action_size"
    expected = {f"losses/{name}" for name in f"{losses} values".split()} | {f"charts/{name}" for name in CHARTS}
    assert tags >= expected | {f"evaluation/seen_{name}" for name in METRICS[4:8]}
    assert ("losses/gace_loss" in tags) == ("losses/batch_accuracy" in tags) == (aux == "gace")
    assert {tag.split("/")[0] for tag in tags} == {"charts", "losses", "evaluation"}

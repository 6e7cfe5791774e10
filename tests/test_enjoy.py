"""publish.py and enjoy.py: a run's way into results/ and onto the screen."""

import types
from dataclasses import asdict, replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import ROOT, call
from PIL import Image

import a3c_gace_vizdoom as a3c
import envs
import sac_gace_ur5 as sac
from tools import enjoy, publish, report


def save_run(script, folder, **settings):
    """The checkpoint and metrics.csv of a run with one evaluation of each split."""
    torch.manual_seed(0)
    args = script.Args(runs=str(folder), **settings)
    splits = envs.splits_of(args.task)
    rows = [dict(zip(script.METRICS, (300, 9, 1.0, split, 0.25, 0.5, 20.0, 1.0, 0.3), strict=True)) for split in splits]
    run = {"args": asdict(args), "agent": script.Agent(args).state_dict(), "counters": {"updates": 300}, "rows": rows}
    folder = folder / f"{args.task}__{script.algorithm(args)}__{args.seed}__100"
    folder.mkdir()
    torch.save(run, folder / "checkpoint.pt")
    lines = [script.METRICS, *(row.values() for row in rows)]
    (folder / "metrics.csv").write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    return folder, run


@pytest.mark.parametrize("script", [a3c, sac], ids=["a3c", "sac"])
def test_published_run_is_reported_and_its_agent_loads(script, tmp_path, monkeypatch):
    folder, run = save_run(script, tmp_path, gdan=True)
    results = tmp_path / "results"
    for arguments in ([], ["--agent"]):  # again, as the run goes on
        call(publish, monkeypatch, folder, *arguments, "--out", results)
    name = folder.name.removesuffix("__100")
    assert {path.name for path in results.iterdir()} == {f"{name}.csv", f"{name}.json", f"{name}.pt"}
    assert report.read(results / f"{name}.csv")["seen"][report.RATIO].tolist() == [25]
    assert report.read_settings(results / f"{name}.csv")["version"] == script.VERSION
    assert str(tmp_path) not in (results / f"{name}.json").read_text()  # no path of this machine
    trained_by, _, trained, agent = enjoy.load_agent(results / f"{name}.pt")
    assert trained_by is script and trained.runs == "runs"
    for key, weight in run["agent"].items():
        expected = weight.half().to(weight.dtype) if weight.is_floating_point() else weight
        assert torch.equal(agent.state_dict()[key], expected)
    (folder / "metrics.csv").write_text((folder / "metrics.csv").read_text().replace("0.25", "0.5"))
    with pytest.raises(SystemExit, match="holds another run"):
        call(publish, monkeypatch, folder, "--out", results)
    torch.save(run | {"rows": []}, folder / "checkpoint.pt")
    with pytest.raises(SystemExit, match="no evaluation yet"):
        call(publish, monkeypatch, folder)


@pytest.mark.parametrize("script", [a3c, sac], ids=["a3c", "sac"])
def test_enjoy_plays_the_episodes_of_the_evaluation(script, tmp_path, monkeypatch, capsys):
    folder, _ = save_run(script, tmp_path)
    call(enjoy, monkeypatch, folder, "--episodes", "2", "--details")  # a folder will do
    _, args, agent = script.load_checkpoint(folder / "checkpoint.pt")
    row = script.evaluate(replace(args, episodes=2), agent, "seen", {})
    shown = capsys.readouterr().out
    assert f"success {row['success_ratio']:.1%}, length {row['episode_length']:.1f}" in shown
    assert "out of time" in shown and "2" in shown


@pytest.mark.slow
@pytest.mark.parametrize("script", [a3c, sac], ids=["a3c", "sac"])
def test_enjoy_films_an_agent(script, tmp_path, monkeypatch):
    folder, _ = save_run(script, tmp_path)
    monkeypatch.chdir(tmp_path)
    call(enjoy, monkeypatch, folder / "checkpoint.pt", "--episodes", "1", "--video")
    with Image.open(tmp_path / f"videos/{folder.name}_seen.gif") as film:
        assert film.n_frames > 5 and film.width > 400


def test_enjoy_refuses_in_a_line(tmp_path, monkeypatch):
    folder, _ = save_run(sac, tmp_path)
    for arguments, expected in [
        ([tmp_path / "nowhere.pt"], "nowhere.pt does not exist"),
        ([folder, "--split", "unseen"], "r1 has no unseen split"),
        ([folder, "--goal", "pink"], "use one of red, green, blue"),
        ([folder, "--episodes", "0"], "--episodes must be between 1 and"),
        ([folder, "--video", "--details"], "leave out --video"),
    ]:
        with pytest.raises(SystemExit, match=expected) as answer:
            call(enjoy, monkeypatch, *arguments)
        assert len(str(answer.value).splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(ROOT.glob("results/*.pt")), ids=lambda path: path.stem)
def test_committed_agents_play_as_their_tables_say(path):
    """50 episodes of every split: three standard errors are 20 points."""
    script, _, trained, agent = enjoy.load_agent(path)
    for split, columns in report.read(path.with_suffix(".csv")).items():
        (success, *_), endings = enjoy.evaluate(script, replace(trained, episodes=50), agent, split, None)
        assert 100 * success > columns[report.RATIO, -1] - 20
        assert [outcome for *_, outcome in endings].count("reached") == round(50 * success)


ENDINGS = [("reached", True, True), ("wrong object", False, True), ("out of time", False, False)]
PLACES = [
    ("v1", (420, 569), "0 to 150 units away"),
    ("v2", (272, 220), "150 to 250 units away"),  # 249 away
    ("v1", (420, 771), "350 to 550 units away"),
    ("v1", (796, 796), "350 to 550 units away"),
    ("v3", (309, 266), "190 units away"),
]


@pytest.mark.parametrize("task, goal_at, place", PLACES)
def test_ending_of_an_episode_in_doom(task, goal_at, place):
    env = gym.make(f"gace/{task.upper()}-v0")
    env.reset(seed=1, options={"goal": "Skull"})
    env.unwrapped.objects[2] = goal_at
    for outcome, success, terminated in ENDINGS:
        episode = types.SimpleNamespace(env=env, info={"is_success": success}, terminated=terminated)
        assert enjoy.ending_of(episode) == ("Skull", place, outcome)
    env.close()


def test_ending_of_an_episode_on_the_arm():
    env = gym.make("gace/R1-v0")
    places = set()
    for seed in range(6):
        env.reset(seed=seed, options={"goal": "green"})
        colours = env.unwrapped.model.geom_rgba[env.unwrapped.boxes]  # left, front, right
        place = ("left", "front", "right")[int(np.isclose(colours, envs.BOX_COLOURS["green"]).all(1).argmax())]
        episode = types.SimpleNamespace(env=env, info={"is_success": True}, terminated=True)
        assert enjoy.ending_of(episode) == ("green", place, "reached")
        places.add(place)
    assert len(places) == 3
    env.close()

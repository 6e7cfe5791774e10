"""Each script, copied and changed as the README says, trains on a grid world that it has never seen."""

import importlib.util
import inspect
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import ROOT, Run


class GridWorld(gym.Env):
    """Three coloured targets on a field of 9 x 7, each a square of 4 x 4 pixels. The agent is white."""

    targets = np.array([(0, 0), (8, 0), (4, 6)])

    def __init__(self, continuous):
        self.continuous = continuous
        self.observation_space = gym.spaces.Dict(
            image=gym.spaces.Box(0, 255, (3, 28, 36), np.uint8), goal=gym.spaces.Discrete(3)
        )
        self.action_space = gym.spaces.Box(-1, 1, (2,), np.float32) if continuous else gym.spaces.Discrete(4)

    def observation(self):
        field = np.zeros((3, 7, 9), np.uint8)
        for colour, (x, y) in enumerate(self.targets):
            field[colour, y, x] = 255
        x, y = self.position.round().astype(int)
        field[:, y, x] = 255
        return {"image": field.repeat(4, 1).repeat(4, 2), "goal": self.goal}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal, self.steps, self.position = self.np_random.integers(3), 0, np.array([4.0, 3.0])
        return self.observation(), {}

    def step(self, action):
        moves = [(1, 0), (-1, 0), (0, 1), (0, -1)]
        self.position = (self.position + (action if self.continuous else moves[action])).clip(0, [8, 6])
        self.steps += 1
        near = np.abs(self.targets - self.position).max(-1) < 1
        success = bool(near[self.goal])
        return self.observation(), float(success), bool(near.any()), self.steps == 30, {"is_success": success}


CHANGES = {  # the lines that the README names
    "import envs\n": "import gridworld\n",
    'return gym.make(f"gace/{task.upper()}-v0", split=split)': "return gridworld.GridWorld({continuous})",
    "envs.splits_of(args.task)": '["seen"]',
}
A3C_CHANGES = {'task: Literal["v1", "v2", "v3", "v4"] = "v1"': 'task: Literal["grid"] = "grid"'}
SAC_CHANGES = {
    'task: Literal["r1", "r2", "r3"] = "r1"': 'task: Literal["grid"] = "grid"',
    "envs.goals_of(self.task)": '["red", "green", "blue"]',
}


def copied(folder, script, changes, continuous):
    """Copies a script, with the grid world in place of its environment."""
    text = (ROOT / script).read_text()
    for old, new in (CHANGES | changes).items():
        assert text.count(old) == 1, old
        text = text.replace(old, new.format(continuous=continuous))
    assert "envs." not in text.replace("gridworld.", "")
    (folder / script).write_text(text)
    (folder / "gridworld.py").write_text(
        "import gymnasium as gym\nimport numpy as np\n\n\n" + inspect.getsource(GridWorld)
    )
    return folder / script


TINY = "--total-updates 6 --eval-every 3 --episodes 3 --accuracy-states 1 --goal-batch-size 4 --gdan --no-cuda".split()


@pytest.mark.parametrize(
    ("script", "changes", "flags"),
    [
        ("a3c_gace_vizdoom.py", A3C_CHANGES, "--warmup 5 --num-workers 1 --num-envs 4"),
        ("sac_gace_ur5.py", SAC_CHANGES, "--warmup 300 --batch-size 8 --replay-size 32"),
    ],
)
def test_copied_script_trains_on_another_environment(script, changes, flags, tmp_path, monkeypatch):
    path = copied(tmp_path, script, changes, script.startswith("sac"))
    with Run(tmp_path, path, *TINY, *flags.split()) as run:
        assert run.wait() == 0, run.output
    rows = run.rows()
    assert [row["update"] for row in rows] == ["3", "6"] and all(0 <= float(row["success_ratio"]) <= 1 for row in rows)
    with Run(tmp_path, path, "--resume", run.run_folder, "--total-updates", "7") as resumed:
        assert resumed.wait() == 0 and resumed.rows()[-1]["update"] == "7", resumed.output

    monkeypatch.syspath_prepend(tmp_path)  # the baselines, whose decoders and crops have the image's size
    spec = importlib.util.spec_from_file_location("copied_script", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "copied_script", module)
    spec.loader.exec_module(module)
    images, goals = torch.zeros(2, 3, 28, 36, dtype=torch.uint8), torch.tensor([0, 2])
    if script.startswith("a3c"):
        agent = module.Agent(module.Args(aux="vae"))
        assert agent.vae(agent(images, goals)[3])[0].shape == images.shape
        assert module.Agent(module.Args(aux="rad"))(module.crop(images), goals)[0].shape == (2, 4)
    else:
        agent = module.Agent(module.Args(aux="ae")).eval()
        features = agent.feature_extractor(images)
        assert module.ae_loss(agent.decoder(features), images, features).isfinite()
        assert module.Agent(module.Args(aux="curl")).eval().act(images.numpy(), goals, False).shape == (2, 2)

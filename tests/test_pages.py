"""What the pages say can be done, is there, and is what a command printed."""

import re
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import ROOT

PAGES = [ROOT / "README.md", ROOT / "results/README.md", *sorted(ROOT.glob("docs/*.md"))]


def snippets(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_gace_in_a_few_lines_teaches_an_encoder_to_tell_goals_apart():
    """The snippet of the front page, on goal states that differ in one pixel of noise."""
    (snippet,) = [text for text in snippets(PAGES[0]) if "goal_states" in text]
    assert len(snippet.splitlines()) <= 25
    torch.manual_seed(0)
    encoder = torch.nn.Sequential(torch.nn.Linear(20, 256), torch.nn.ReLU())
    optimizer = torch.optim.Adam(encoder.parameters(), 1e-3)
    names = {"encoder": encoder, "optimizer": optimizer, "num_goals": 3}
    exec(snippet, names)
    names["random"].seed(0)
    for episode in range(90):
        goal = episode % 3
        state = torch.randn(20)
        state[goal] += 3
        names["after_episode"](state, goal, success=episode < 60)
    assert len(names["goal_states"]) == 60
    losses = []
    for _ in range(100):
        loss = names["total_loss"](torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 < 0.4 < losses[0]
    assert all(p.grad.abs().sum() > 0 for p in (*encoder.parameters(), *names["discriminator"].parameters()))


def test_gymnasium_in_a_few_lines():
    (snippet,) = [text for text in snippets(PAGES[0]) if "gym.make" in text]
    shown = subprocess.run([sys.executable, "-c", snippet], cwd=ROOT, capture_output=True, text=True)
    assert shown.stdout.strip() == snippet.split("# ")[-1].strip(), shown.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere_and_every_agent_that_is_named_is_there(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target
    for agent in re.findall(r"results/[\w+]+\.pt", text):
        assert (ROOT / agent).exists(), agent
    for module in re.findall(r"python -m (tools\.\w+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    for name in re.findall(r"`(\w+\.goal_state|Agent\.\w+|GoalConditioning\.\w+)`", text):
        assert any(
            f"def {name.split('.')[1]}(" in script.read_text() or f"self.{name.split('.')[1]} =" in script.read_text()
            for script in (ROOT / "a3c_gace_vizdoom.py", ROOT / "sac_gace_ur5.py")
        ), name


def test_pages_and_scripts_are_short():
    lines = {
        path: len((ROOT / path).read_text().splitlines()) for path in ("README.md", "results/README.md", "envs.py")
    }
    assert lines["README.md"] <= 220 and lines["results/README.md"] <= 180 and lines["envs.py"] <= 770
    assert all(
        len((ROOT / f"{name}.py").read_text().splitlines()) <= 700 for name in ("a3c_gace_vizdoom", "sac_gace_ur5")
    )


def test_tables_of_the_results_are_those_of_the_report(tmp_path):
    shutil.copytree(ROOT / "results", tmp_path / "results")
    command = [sys.executable, "-m", "tools.report", "results"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    made = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "results/README.md").read_text() == (ROOT / "results/README.md").read_text()

"""saliency.py: the maps of networks that are known to look at one patch, and the script on real checkpoints."""

from dataclasses import asdict
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import call
from PIL import Image

import a3c_gace_vizdoom as a3c
import sac_gace_ur5 as sac
from tools import saliency


class Patch:
    """A policy that looks at one patch of the image, and a value that looks at another."""

    def __init__(self, policy_at, value_at, size=6):
        self.policy_at, self.value_at, self.size = policy_at, value_at, size

    def __call__(self, images):
        def look(place):
            y, x = place
            return images[:, :3, y : y + self.size, x : x + self.size].std(dim=(1, 2, 3))

        seen = look(self.policy_at)
        return torch.stack([seen, -seen, 0 * seen], 1), look(self.value_at)


@pytest.mark.parametrize("side", [42, 84])
def test_map_lights_up_where_the_network_looks_and_nowhere_else(side):
    image = np.random.default_rng(0).integers(256, size=(16, side, side), dtype=np.uint8)
    scale = side // 42
    places = (6 * scale, 27 * scale), (30 * scale, 9 * scale)
    maps = saliency.saliency_maps(Patch(*places, size=6 * scale), image)
    for (y, x), found in zip(places, maps, strict=True):
        assert found.shape == (14, 14) and found.min() >= 0
        centre = np.array([y, x]) / side * 14 + 1  # of the patch, in units of the map
        rows, columns = np.indices(found.shape) + 0.5
        away = np.hypot(rows - centre[0], columns - centre[1])
        assert away[np.unravel_index(found.argmax(), found.shape)] < 1.5
        assert found[away > 5].max() < 0.01 * found.max()


def test_unperturbed_copy_moves_nothing():
    maps = saliency.saliency_maps(Patch((0, 0), (10, 10)), np.full((16, 42, 42), 7, np.uint8))
    assert np.abs(maps).max() < 1e-6  # blurring a flat image changes nothing


@pytest.mark.parametrize("task", ["V1", "V3"])
def test_circles_lie_on_the_objects(task):
    """Where an object is said to be, the screen changes when the object is taken away."""
    env = gym.make(f"gace/{task}-v0").unwrapped
    seen = 0
    for seed in range(12):
        env.reset(seed=seed)
        with_objects, places = env.frame.copy(), saliency.doom_objects(env)
        objects = [list(place) for place in env.objects]
        env.place_objects = lambda: np.full((4, 2), 60.0)  # all in a corner
        env.reset(seed=seed)
        del env.place_objects
        env.objects = objects
        changed = np.abs(env.frame[:3] - with_objects[:3]).max(0) > 8
        for place in places:
            if place and 15 < place[0] < 145 and place[2] < 40:
                x, y, radius = (round(number) for number in place)
                inside = changed[max(0, y - radius) : y + radius, max(0, x - radius) : x + radius]
                assert inside.any(), (seed, place)
                seen += 1
    env.close()
    assert seen > 5


def test_circles_lie_on_the_boxes():
    env = gym.make("gace/R1-v0", render_mode="rgb_array").unwrapped
    env.reset(seed=0)
    picture = env.render()[:, :480].astype(int)
    for name, (x, y, radius) in zip(env.names, saliency.ur5_objects(env), strict=True):
        red, green, blue = picture[round(y), round(x)]
        strongest = ("red", "green", "blue")[int(np.argmax([red, green, blue]))]
        assert strongest == name and 10 < radius < 60
    env.close()


def checkpoints(folder):
    torch.manual_seed(0)
    for script, name, args in ((a3c, "v1", a3c.Args(gdan=True)), (sac, "r1", sac.Args())):
        content = {"args": asdict(args), "agent": script.Agent(args).state_dict(), "counters": {"updates": 0}}
        torch.save(content, folder / f"{name}.pt")


@pytest.mark.slow
def test_sheet_and_video_of_both_kinds_of_agent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints(tmp_path)
    for arguments, sheet, film in [
        # two agents: one above the other, and side by side
        (["v1.pt", "v1.pt", "--task", "v2", "--split", "unseen"], (964, 724), (964, 360)),
        (["r1.pt", "--goal", "green"], (964, 480), (480, 480)),
    ]:
        call(saliency, monkeypatch, *arguments, "--episodes", "1", "--frames", "2")
        name = "videos/" + Path(arguments[0]).stem + ("_saliency_unseen" if "unseen" in arguments else "_saliency_seen")
        with Image.open(tmp_path / f"{name}.png") as png:
            assert png.size == sheet
        with Image.open(tmp_path / f"{name}.gif") as gif:
            assert gif.n_frames > 1 and gif.size == film
    for arguments, expected in [
        (["v1.pt", "--task", "r1"], "cannot play r1"),
        (["r1.pt", "--task", "r3"], "an agent of r1 does not know the goals of r3"),
        (["v1.pt", "--split", "unseen"], "v1 has no unseen split"),
        (["r1.pt", "--goal", "pink"], "use one of red, green, blue"),
        (["missing.pt"], "missing.pt does not exist"),
        (["v1.pt", "r1.pt"], "an agent of r1 cannot play v1"),
        ([], "give one checkpoint or more"),
    ]:
        with pytest.raises(SystemExit, match=expected) as answer:
            call(saliency, monkeypatch, *arguments)
        assert len(str(answer.value).splitlines()) == 1

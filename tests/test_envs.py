"""Every rule of the seven tasks, with the real engine and the real simulator."""

import contextlib
import hashlib
import itertools
import math
import multiprocessing
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import vizdoom
from gymnasium.utils.env_checker import check_env
from helpers import ROOT, engines, kill_all, processes_with, wait_until

import envs
from tools.scripted import Walker, reach_action, wall_segments

V_TASKS, R_TASKS = list(envs.V_TASKS), list(envs.R_TASKS)
SPLITS = [(task, "seen") for task in V_TASKS + R_TASKS] + [(task, "unseen") for task in ("v2", "v4", "r2")]


def make(task, split="seen", **kwargs):
    return gym.make(f"gace/{task.upper()}-v0", split=split, **kwargs)


@pytest.fixture
def v1():
    env = envs.DoomEnv("v1")
    yield env
    env.close()


@pytest.fixture
def r1():
    env = envs.UR5Env("r1")
    yield env
    env.close()


def play(env, policy):
    """Plays the episode that was just reset; returns its rewards and the last step's results."""
    rewards, over = [], False
    while not over:
        observation, reward, terminated, truncated, info = env.step(policy())
        rewards.append(reward)
        over = terminated or truncated
    return rewards, observation, terminated, truncated, info


# -------------------------------------------------------------------------------------------------------- the interface


@pytest.mark.parametrize(("task", "split"), SPLITS)
def test_gymnasium_finds_nothing_wrong(task, split):
    env = make(task, split, render_mode="rgb_array")
    env.action_space.seed(0)
    check_env(env.unwrapped)  # warnings are errors: see pyproject.toml
    env.close()


@pytest.mark.parametrize("task", V_TASKS + R_TASKS)
def test_spaces_instruction_and_picture(task):
    env = make(task, render_mode="rgb_array")
    targets = {"v": 4, "r": 5 if task == "r3" else 3}[task[0]]
    shape = (16, 42, 42) if task[0] == "v" else (3, 84, 84)
    assert env.observation_space["image"] == gym.spaces.Box(0, 255, shape, np.uint8)
    assert env.observation_space["goal"] == gym.spaces.Discrete(targets)
    assert env.action_space == (gym.spaces.Discrete(3) if task[0] == "v" else gym.spaces.Box(-1, 1, (6,)))
    observation, info = env.reset(seed=3)
    name = env.unwrapped.names[observation["goal"]]
    assert info["instruction"] == (f"Get the {name}" if task[0] == "v" else f"Reach the {name.title()} Box")
    picture = env.render()
    assert picture.dtype == np.uint8 and picture.shape[0] >= 240 and picture.shape[1] >= 320 and picture.shape[2] == 3
    assert picture.std() > 10
    env.close()


@pytest.mark.parametrize(("task", "steps"), [("v1", 25), ("v4", 50), ("r2", 50)])
def test_wrappers_that_cut_an_episode_lose_nothing(task, steps):
    assert gym.spec(f"gace/{task.upper()}-v0").max_episode_steps == steps
    env = make(task, max_episode_steps=3)
    env.reset(seed=1)
    env.action_space.seed(1)
    for step in (1, 2, 3):
        _, _, terminated, truncated, info = env.step(env.action_space.sample())
        assert info == {"is_success": False, "reached": -1} and not terminated and truncated == (step == 3)
    env.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("task", ["v1", "r1"])
def test_vector_environments_play_the_same_episodes(task, mode):
    vector, alone = gym.make_vec(f"gace/{task.upper()}-v0", num_envs=2, vectorization_mode=mode), make(task)
    vector.action_space.seed(0)
    images, actions = [vector.reset(seed=[7, 8])[0]["image"]], []
    for _ in range(4):
        actions.append(vector.action_space.sample())
        observation, _, _, _, info = vector.step(actions[-1])
        images.append(observation["image"])
        assert not info["is_success"].any()
    vector.close()
    for index, seed in enumerate((7, 8)):
        assert np.array_equal(alone.reset(seed=seed)[0]["image"], images[0][index])
        for action, image in zip(actions, images[1:], strict=True):
            action = int(action[index]) if task == "v1" else action[index]
            assert np.array_equal(alone.step(action)[0]["image"], image[index])
    alone.close()


HUMAN = """
import gymnasium as gym, pygame
import envs
for task in ("V1", "R1"):
    env = gym.make(f"gace/{task}-v0", render_mode="human")
    env.reset(seed=1)
    env.action_space.seed(1)
    env.step(env.action_space.sample())
    window = pygame.display.get_surface()
    print(pygame.display.get_driver(), *window.get_size(), pygame.surfarray.array3d(window).std() > 10)
    env.close()
"""


def test_human_render_mode_opens_a_window():
    """On a virtual screen if there is one, else with SDL's own dummy."""
    environment, driver, screen = {**os.environ, "SDL_VIDEODRIVER": "dummy"}, "dummy", None
    if shutil.which("Xvfb"):
        read, write = os.pipe()
        screen = subprocess.Popen(["Xvfb", "-displayfd", str(write)], pass_fds=[write], stderr=subprocess.DEVNULL)
        os.close(write)  # so that reading ends if Xvfb does
        environment, driver = {**os.environ, "DISPLAY": f":{os.read(read, 9).decode().strip()}"}, "x11"
    try:
        shown = subprocess.run([sys.executable, "-c", HUMAN], env=environment, cwd=ROOT, capture_output=True, text=True)
    finally:
        if screen:
            screen.kill()
            screen.wait()
    assert shown.stdout.splitlines()[-2:] == [f"{driver} 660 360 True", f"{driver} 960 480 True"], shown.stderr


@pytest.mark.parametrize("task", ["v1", "v3", "r1", "r3"])
def test_tasks_without_an_unseen_split_say_so(task):
    with pytest.raises(ValueError, match="only V2, V4 and R2 have an unseen split"):
        make(task, "unseen")


def test_unknown_split_names_the_known_ones():
    with pytest.raises(ValueError, match='"seen" or "unseen"'):
        make("v2", "test")


@pytest.mark.parametrize(("task", "name", "index"), [("v1", "Bonus", 3), ("v1", "card", 0), ("r1", "green", 1)])
def test_goal_can_be_fixed_by_name_or_index(task, name, index):
    env = make(task)
    for goal in (name, index, np.int64(index)):
        for seed in range(3):
            assert env.reset(seed=seed, options={"goal": goal})[0]["goal"] == index
    for wrong in ("Key", -1, 9, 1.0, True):
        with pytest.raises(ValueError, match=env.unwrapped.names[0] + ", " + env.unwrapped.names[1]):
            env.reset(options={"goal": wrong})
    env.close()


def test_a_fixed_goal_changes_nothing_else():
    env = envs.DoomEnv("v4")
    images = [env.reset(seed=5, options=options)[0]["image"] for options in (None, {"goal": 0}, {"goal": 3})]
    assert (images[0] == images[1]).all() and (images[0] == images[2]).all()
    env.close()


def test_fixed_goal_of_r3_lies_on_the_plane():
    env = envs.UR5Env("r3")
    for seed in range(20):
        env.reset(seed=seed, options={"goal": "purple"})
        assert 4 in env.box_classes and len(set(env.box_classes)) == 3
    env.close()


@pytest.mark.parametrize("task", ["v1", "r1"])
def test_goals_are_drawn_evenly(task):
    env = make(task)
    env.reset(seed=0)
    goals = np.bincount([env.reset()[0]["goal"] for _ in range(600)])
    assert goals.min() > 0.75 * 600 / len(goals)
    env.close()


@pytest.mark.parametrize("action", [3, -1, 1.0, np.nan, None, [1], "left", np.array([0, 1])])
def test_doom_rejects_wrong_actions(v1, action):
    v1.reset(seed=0)
    with pytest.raises(ValueError, match="0 .forward., 1 .left., 2 .right."):
        v1.step(action)
    assert v1.step(0)[1] == pytest.approx(-0.01)  # the episode goes on


@pytest.mark.parametrize("action", [[0] * 5, [0] * 7, [[0] * 6], 0.5, [1.1] + [0] * 5, [math.nan] * 6, [math.inf] * 6])
def test_ur5_rejects_wrong_actions(r1, action):
    r1.reset(seed=0)
    with pytest.raises(ValueError, match="6 joint velocities within"):
        r1.step(action)
    assert r1.step([0] * 6)[1] == pytest.approx(-0.01)


@pytest.mark.parametrize("env_class", [envs.DoomEnv, envs.UR5Env])
def test_no_step_without_an_episode(env_class):
    env = env_class()
    action = env.action_space.sample()
    with pytest.raises(gym.error.ResetNeeded, match="call reset"):
        env.step(action)
    env.reset(seed=0)
    play(env, lambda: 1 if env_class is envs.DoomEnv else np.zeros(6))
    with pytest.raises(gym.error.ResetNeeded, match="call reset"):
        env.step(action)
    env.close()


# ------------------------------------------------------------------------------------------------- rewards and outcomes


@pytest.mark.parametrize("task", V_TASKS)
def test_doom_time_limit(task):
    env = envs.DoomEnv(task)
    env.reset(seed=0)
    rewards, _, terminated, truncated, info = play(env, lambda: 1)
    assert not terminated and truncated and info == {"is_success": False, "reached": -1}
    steps = 25 if task in ("v1", "v2") else 50
    assert rewards == pytest.approx([-0.01] * (steps - 1) + [-0.11])
    env.close()


@pytest.mark.parametrize(("task", "success", "nongoal"), [("v1", 10, -1), ("r1", 1, -0.3)])
def test_reaching_pays_in_place_of_the_cost(task, success, nongoal):
    env = make(task).unwrapped
    lasts = {True: set(), False: set()}
    for seed, goal in itertools.product(range(6), range(3)):
        env.reset(seed=seed, options={"goal": goal})
        walker = Walker(env) if task == "v1" else None
        told, env.goal = env.goal, (goal + seed % 2) % 3  # every other time, score the agent for another goal
        rewards, _, terminated, truncated, info = play(
            env, walker.action if walker else lambda told=told: lead(env, told)
        )
        if not terminated:
            continue
        assert not truncated and info == {"is_success": env.goal == told, "reached": told}
        assert rewards[:-1] == pytest.approx([-0.01] * (len(rewards) - 1))
        lasts[info["is_success"]].add(round(rewards[-1], 4))
    tics = [0, 0.0025, 0.005, 0.0075] if task == "v1" else [0]  # what the tics before the last one cost
    assert lasts[True] and lasts[True] <= {round(success - cost, 4) for cost in tics}
    assert lasts[False] and lasts[False] <= {round(nongoal - cost, 4) for cost in tics}
    env.close()


def lead(env, told):
    scored, env.goal = env.goal, told
    action = reach_action(env)
    env.goal = scored
    return action


def test_doom_object_is_reached_when_the_boxes_overlap(v1):
    """The episode ends on the first tic with |dx| and |dy| below 36, and the frames after it repeat the last."""
    for seed in range(8):
        v1.reset(seed=seed)
        x, y = v1.objects[v1.goal]
        _, observation, terminated, _, info = play(v1, Walker(v1).action)
        if terminated and info["is_success"]:
            assert abs(v1.x - x) < 36 and abs(v1.y - y) < 36
            assert max(abs(v1.x - x), abs(v1.y - y)) > 36 - 17  # no tic moves further than 17
            return
    raise AssertionError("the scripted agent reached nothing")


def test_ur5_time_limit_and_reach_distance(r1):
    r1.reset(seed=0)
    rewards, *_, info = play(r1, lambda: np.zeros(6))
    assert rewards == pytest.approx([-0.01] * 49 + [-0.11]) and info["reached"] == -1
    r1.reset(seed=0)
    *_, info = play(r1, lambda: reach_action(r1))
    distances = np.linalg.norm(r1.box_positions - r1.data.site("tip").xpos, axis=1)
    assert info["is_success"] and distances.min() <= envs.REACH_DISTANCE


# -------------------------------------------------------------------------------------------------- what the agent sees


def test_frames_are_averaged_by_area():
    rng = np.random.default_rng(0)
    frame = rng.integers(0, 256, (4, 120, 160))
    fine = frame.repeat(7, 1).repeat(21, 2)  # 840 = 42 * 20 rows, 3360 = 42 * 80 columns
    expected = fine.reshape(4, 42, 20, 42, 80).mean((2, 4))
    assert np.abs(envs.shrink(frame.astype(np.float32)) - expected).max() <= 0.5 + 1e-4


def test_the_stack_holds_the_frames_of_the_step(v1):
    image = v1.reset(seed=0)[0]["image"]
    assert all((image[4 * tic : 4 * tic + 4] == image[:4]).all() for tic in range(4))
    for _ in range(2):
        v1.step(1)  # the engine ignores the first tics
    image = v1.step(1)[0]["image"]  # turning: each tic shows another frame
    assert len({image[4 * tic : 4 * tic + 4].tobytes() for tic in range(4)}) == 4
    assert (image[12:] == envs.shrink(v1.frame)).all()


def test_objects_lie_where_they_should():
    room, maze = envs.DoomEnv("v2"), envs.DoomEnv("v4")
    rng = np.random.default_rng(0)
    room.np_random = maze.np_random = rng
    room.goal = 0
    places = np.array([room.place_objects() for _ in range(2000)])  # (2000, 4, 2)
    assert places.min() >= 68 and places.max() <= 796
    assert (np.histogram(places, bins=8, range=(68, 796))[0] > 0.9 * places.size / 8).all()  # the whole room, evenly
    goals, others = places[:, :1], places[:, 1:]
    assert np.abs(others - goals).max(-1).min() >= 72 and np.abs(others - 420).max(-1).min() >= 36
    orders = {tuple(map(tuple, maze.place_objects())) for _ in range(500)}
    assert orders == set(itertools.permutations(envs.MAZE_PLACES))


def look(env, heading, things, textures=None):
    """The RGB-D frame at the start of the environment's map, with these items only."""
    env.textmap = envs.map_text(env.picture, heading, textures or env.textures, things)
    env.engine_seed = 0
    env.load_map()
    return env.frame.copy()


def test_items_are_where_the_map_says(v1):
    """Facing an object, the depth and the colour change when it is taken away: the engine really put it there."""
    v1.reset(seed=0)
    for kind in itertools.chain(*envs.ITEMS.values()):
        changed = (look(v1, 270, [(420, 300, kind)]) != look(v1, 270, [])).any(0)
        assert changed.sum() > 40, kind
        columns = np.argwhere(changed)[:, 1]
        assert 60 < columns.mean() < 100  # in the middle of the screen


def inner_walls():
    """Both sides of every inner wall of the maze: the wall's middle, and the heading of an agent that faces it."""
    for x1, y1, x2, y2 in wall_segments(envs.MAZE):
        if x1 == x2 and 48 < x1 < 1008:
            headings = (0, 180)
        elif y1 == y2 and 48 < y1 < 1008:
            headings = (90, 270)
        else:
            continue
        for heading in headings:
            yield np.array([x1 + x2, y1 + y2]) / 2, heading


@pytest.mark.parametrize("task", ["v3", "v4"])
def test_walls_hide_what_is_behind_them(task, monkeypatch):
    """An item behind a wall changes no byte of any channel. In front of the wall, it changes colours and depth."""
    env = envs.DoomEnv(task)
    env.reset(seed=0)
    kinds = itertools.cycle(itertools.chain(*envs.ITEMS.values()))
    walls = itertools.cycle(envs.SEEN_TEXTURES + envs.UNSEEN_TEXTURES if task == "v4" else [env.textures[0]])
    views = list(itertools.product(inner_walls(), (-30, 0, 30)))
    for (middle, heading), turn in views:
        ahead = np.array([math.cos(math.radians(heading)), math.sin(math.radians(heading))]).round()
        monkeypatch.setattr(envs, "START", (middle - 110 * ahead).tolist())
        kind, textures = next(kinds), (next(walls), *env.textures[1:])
        empty = look(env, heading + turn, [], textures)
        for distance in (-50, 25, 70):  # from the wall
            frame = look(env, heading + turn, [(*(middle + distance * ahead), kind)], textures)
            assert [env.x, env.y] == envs.START
            changed = (frame != empty).reshape(4, -1).sum(1)
            assert (changed > 40).all() if distance < 0 else not changed.any(), (middle, heading, turn, distance)
            same = (envs.shrink(frame) == envs.shrink(empty)).all()
            assert same == (distance > 0)
    assert len(views) == 2 * 22 * 3
    env.close()


@pytest.mark.parametrize(("task", "depth"), [("v1", 52), ("v3", 25), ("v4", 24)])
def test_depth_at_the_start_is_that_of_the_authors_maps(task, depth):
    env = envs.DoomEnv(task)
    env.reset(seed=0)
    assert abs(look(env, env.heading, [])[3, 60, 80] - depth) <= 1  # in the centre of the screen
    env.close()


# Actions on the authors' own maps, and where the agent was after some of them.
AUTHORS = [
    ("v3", "0120200200020200", {4: (413.3, 407.5), 8: (350.8, 310.4), 10: (304.9, 256.0), 15: (259.1, 256.0)}),
    ("v4", "0010110000220000", {4: (396.1, 418.3), 8: (313.0, 385.8), 12: (256.1, 286.9), 15: (256.1, 256.8)}),
    ("v4", "0020220200010120", {4: (396.1, 421.7), 8: (324.3, 445.6), 12: (260.7, 549.9), 15: (256.4, 615.0)}),
]


@pytest.mark.parametrize(("task", "actions", "positions"), AUTHORS)
def test_agent_moves_as_on_the_authors_maps(task, actions, positions):
    """Also where it slides along the walls at x = 240 and y = 240."""
    env = envs.DoomEnv(task)
    env.reset(seed=0)
    look(env, env.heading, [])
    env.objects = [(9999, 9999)]  # nothing to reach, so that the episode goes on
    for step, action in enumerate(actions):
        if step in positions:
            assert (env.x, env.y) == pytest.approx(positions[step], abs=1.5), step
        env.advance(int(action))
    env.close()


def iwad_textures():
    data = Path(vizdoom.root_path, "freedoom2.wad").read_bytes()
    count, directory = struct.unpack_from("<ii", data, 4)
    for entry in range(directory, directory + 16 * count, 16):
        offset, _, name = struct.unpack_from("<ii8s", data, entry)
        if name.startswith(b"TEXTURE"):
            for i in range(struct.unpack_from("<i", data, offset)[0]):
                start = offset + struct.unpack_from("<i", data, offset + 4 + 4 * i)[0]
                yield data[start : start + 8].rstrip(b"\0").decode()


def test_texture_pools():
    seen, unseen = set(envs.SEEN_TEXTURES), set(envs.UNSEEN_TEXTURES)
    assert len(envs.SEEN_TEXTURES) == len(seen) == 40 and len(envs.UNSEEN_TEXTURES) == len(unseen) == 10
    assert not seen & unseen
    assert seen | unseen <= set(iwad_textures())


@pytest.mark.parametrize(("task", "split"), [("v2", "seen"), ("v2", "unseen"), ("v4", "seen"), ("v4", "unseen")])
def test_textures_are_drawn_independently(task, split):
    env = envs.DoomEnv(task, split)
    env.reset(seed=0)
    draws = []
    for _ in range(300):
        env.reset()
        draws.append(env.textures)
    pool = set(envs.SEEN_TEXTURES if split == "seen" else envs.UNSEEN_TEXTURES)
    for surface in zip(*draws, strict=True):  # wall, floor, ceiling
        assert set(surface) == pool
    assert sum(len(set(draw)) == 1 for draw in draws) < 15
    env.close()


def test_plain_tasks_have_one_texture_set():
    for task in ("v1", "v3"):
        env = envs.DoomEnv(task)
        for seed in range(3):
            env.reset(seed=seed)
            assert env.textures == ("STONE2", "CEIL5_2", "CEIL5_1")
        env.close()


def test_ur5_has_its_true_lengths_masses_and_limits(r1):
    """The flange's position against the DH product, for random joint angles."""
    d, a = [0.089159, 0, 0, 0.10915, 0.09465, 0.0823], [0, -0.425, -0.39225, 0, 0, 0]
    alpha = [np.pi / 2, 0, 0, np.pi / 2, -np.pi / 2, 0]
    rng = np.random.default_rng(0)
    for _ in range(20):
        angles = rng.uniform(-3, 3, 6)
        pose = np.diag([-1.0, -1.0, 1.0, 1.0])  # the controller's base frame is turned by half a circle
        for i in range(6):
            c, s, ca, sa = np.cos(angles[i]), np.sin(angles[i]), np.cos(alpha[i]), np.sin(alpha[i])
            row = [[c, -s * ca, s * sa, a[i] * c], [s, c * ca, -c * sa, a[i] * s], [0, sa, ca, d[i]], [0, 0, 0, 1]]
            pose = pose @ np.array(row)
        r1.data.qpos[:] = angles
        r1.mujoco.mj_kinematics(r1.model, r1.data)
        wrist = r1.data.body("wrist_3")
        flange = wrist.xpos + wrist.xmat.reshape(3, 3) @ [0, 0.0823, 0]
        assert flange == pytest.approx(pose[:3, 3], abs=1e-6)
    masses = [r1.model.body(name).mass[0] for name in ("shoulder", "upper_arm", "forearm", "wrist_1", "wrist_2")]
    assert masses == pytest.approx([3.7, 8.393, 2.33, 1.219, 1.219])
    assert r1.model.jnt_range[:3] == pytest.approx(np.array([[-3.14, 3.14]] * 3), abs=0.01)
    assert r1.model.jnt_range[3:] == pytest.approx(np.array([[-5, 5]] * 3), abs=0.01)
    assert (r1.joint_speed <= np.pi).all()


def test_ur5_action_is_a_joint_velocity_held_for_16_physics_steps(r1):
    r1.reset(seed=0)
    before, time_before = r1.data.qpos.copy(), r1.data.time
    action = np.array([0.5, -0.3, 0.2, 0.8, -0.6, 0.4])
    for _ in range(3):
        r1.step(action)
    seconds = r1.data.time - time_before
    assert seconds == pytest.approx(3 * 16 * r1.model.opt.timestep)
    assert (r1.data.qpos - before) / seconds == pytest.approx(action * r1.joint_speed, abs=0.12)


@pytest.mark.parametrize("turn", [0, 90, 180, -90])
def test_ur5_does_not_sink_into_the_plane(r1, turn):
    """In front of the arm, at its sides and behind it."""
    r1.reset(seed=0)
    r1.box_positions[:] = 9  # nothing to reach, so that the episode goes on
    r1.data.joint("shoulder_pan").qpos += np.radians(turn)
    heights = []
    for _ in range(30):
        r1.step(np.array([0, 1, 0, 0, 0, 0]))  # the whole arm downwards
        heights.append(r1.tip[2])
    assert -0.03 < min(heights) < 0.03


def pixels_of(env, geoms):
    """The pixels that change when these geoms are hidden, (84, 84)."""
    image, colours = env.camera_image(), env.model.geom_rgba.copy()
    env.model.geom_rgba[geoms, 3] = 0
    without = env.camera_image()
    env.model.geom_rgba[:] = colours
    return (image != without).any(0)


def arm_of(env):
    return [g for g in range(env.model.ngeom) if g not in env.boxes and g != env.model.geom("background").id]


def set_background(env, index):
    env.model.geom("background").matid = env.model.material(f"background{index}").id


@pytest.mark.parametrize(("task", "split"), [s for s in SPLITS if s[0] in R_TASKS])
def test_ur5_shows_all_boxes_and_the_arm(task, split):
    env = envs.UR5Env(task, split)
    for seed in range(12):
        env.reset(seed=seed)
        for geoms, size in (*(([box], 20) for box in env.boxes), (arm_of(env), 200)):
            changed = np.argwhere(pixels_of(env, geoms))
            assert len(changed) > size
            assert changed.min() > 0 and changed.max() < 83  # whole: not cut off by the border
    env.close()


def chromaticity(colours):
    """The shares of red, green and blue in a colour. They do not depend on the light."""
    return colours / np.maximum(np.sum(colours, -1, keepdims=True), 1e-9)


@pytest.mark.parametrize(("task", "split"), [s for s in SPLITS if s[0] in R_TASKS])
def test_boxes_are_told_by_their_colours(task, split):
    """With every background, the pixels close to the colour of a box are those of the box, and no others."""
    env = envs.UR5Env(task, split)
    colours = {name: chromaticity(np.array(envs.BOX_COLOURS[name][:3])) for name in env.names}
    rng = np.random.default_rng(0)
    for seed, background in itertools.product(range(6), range(len(env.backgrounds))):
        env.reset(seed=seed, options={"goal": seed % len(env.names), "blind": True})
        set_background(env, background)
        for _ in range(2):  # at the start, and with the arm elsewhere
            shares = chromaticity(env.camera_image().transpose(1, 2, 0).astype(float))
            for index, name in enumerate(env.names):
                close = np.abs(shares - colours[name]).max(-1) < 0.1
                boxes = [box for box, c in zip(env.boxes, env.box_classes, strict=True) if c == index]
                assert (close == pixels_of(env, boxes)).all(), (seed, background, name)
            while env.running and env.steps < 10:
                env.step(rng.uniform(-1, 1, 6))
    env.close()


def test_one_plane_carries_the_arm_and_the_boxes():
    env = envs.UR5Env("r2")
    env.reset(seed=0)
    plane, kinds = env.model.geom("background"), env.mujoco.mjtGeom
    assert plane.type == kinds.mjGEOM_PLANE and plane.pos.tolist() == [0, 0, 0]
    assert [env.model.geom(g).name for g in arm_of(env)] == [""] * 9  # there is no table
    boxes = [env.model.geom(box) for box in env.boxes]
    (base,) = [env.model.geom(g) for g in arm_of(env) if env.model.geom(g).type == kinds.mjGEOM_CYLINDER]
    lowest = [*(box.pos[2] - box.size[2] for box in boxes), base.pos[2] - base.size[1]]
    assert lowest == pytest.approx([0] * 4)
    images = []
    for background in (0, 1):
        set_background(env, background)
        images.append(env.camera_image())
    bodies = pixels_of(env, [*env.boxes, *arm_of(env)])
    assert ((images[0] != images[1]).any(0) == ~bodies).all()  # the background is all around the boxes
    env.close()


@pytest.mark.parametrize("split", ["seen", "unseen"])
def test_squares_of_a_background_are_one_to_two_boxes_wide(split):
    env = envs.UR5Env("r2", split)
    env.reset(seed=0)
    env.model.geom_rgba[[*env.boxes, *arm_of(env)], 3] = 0
    camera = env.mujoco.MjvCamera()  # from above
    camera.lookat[:], camera.distance, camera.elevation = (0.4, 0, 0), 1, -90
    pixel = 2 * math.tan(math.radians(env.model.vis.global_.fovy / 2)) / 84  # in metres
    for background in range(len(env.backgrounds)):
        set_background(env, background)
        env.renderer.update_scene(env.data, camera)
        brightness = env.renderer.render().sum(-1)
        bright = brightness > brightness.mean()
        for lines in (bright, bright.T):
            widths = [np.diff(np.flatnonzero(np.diff(line))) * pixel for line in lines]
            assert 0.08 <= np.median(np.concatenate(widths)) <= 0.16
    env.close()


def test_r2_backgrounds():
    pairs = {split: {tuple(sorted(pair)) for pair in envs.CHECKERS[split]} for split in ("seen", "unseen")}
    assert len(pairs["seen"]) == len(pairs["unseen"]) == 5 and not pairs["seen"] & pairs["unseen"]
    corners = {}
    for split in ("seen", "unseen"):
        env = envs.UR5Env("r2", split)
        env.reset(seed=0)
        corners[split] = {env.reset()[0]["image"][:, :12, :12].tobytes() for _ in range(60)}
        assert len(corners[split]) == 5
        env.close()
    assert not corners["seen"] & corners["unseen"]


@pytest.mark.parametrize("task", ["r1", "r3"])
def test_background_of_r1_and_r3_is_one_grey(task):
    env = envs.UR5Env(task)
    env.reset(seed=0)
    background = ~pixels_of(env, [*env.boxes, *arm_of(env)])
    for _ in range(20):
        image = env.reset()[0]["image"]
        assert 120 < image[:, background].min() == image[:, background].max() < 135
    env.close()


@pytest.mark.parametrize("task", V_TASKS + R_TASKS)
def test_blind_episodes_are_the_same_without_images(task):
    env = envs.DoomEnv(task) if task in V_TASKS else envs.UR5Env(task)
    ends = set()
    for seed in range(30):
        outcomes = []
        for blind in (False, True):
            observation = env.reset(seed=seed, options={"blind": blind})[0]
            assert observation["image"].any() != blind
            rng = np.random.default_rng(seed)
            steps = []
            while env.running:
                action = int(rng.integers(3)) if task in V_TASKS else rng.uniform(-1, 1, 6)
                observation, *rest = env.step(action)
                assert observation["image"].any() != blind
                steps.append(rest)
            outcomes.append(steps)
        assert outcomes[0] == outcomes[1]
        ends.add(steps[-1][-1]["reached"])
    env.close()
    assert len(ends) > 1  # some episodes reached an object


# ------------------------------------------------------------------------------------------------------ is it the task?


@pytest.mark.slow
@pytest.mark.parametrize("task", V_TASKS + R_TASKS)
def test_random_policy(task):
    env = envs.DoomEnv(task) if task in V_TASKS else envs.UR5Env(task)
    rng = np.random.default_rng(0)
    counts = np.zeros(2, int)
    for seed in range(1000):
        env.reset(seed=seed, options={"blind": True})
        policy = (lambda: rng.integers(3)) if task in V_TASKS else (lambda: rng.uniform(-1, 1, 6))
        *_, info = play(env, policy)
        counts += [info["is_success"], info["reached"] >= 0 and not info["is_success"]]
    env.close()
    success, nongoal = counts / 1000
    print(f"{task}: random policy succeeds in {success:.1%}, ends on a non-goal object in {nongoal:.1%}")
    # On the authors' maps: 5 to 7 % and about 20 % (V1, V2), 8 to 12 % and 25 to 40 % (V3, V4). Two standard errors of
    # 1,000 episodes are 2 and 3 %. The arm is ours: about 5 %, and twice that for the two other boxes.
    room, maze, arm = ((0.05, 0.085), (0.15, 0.25)), ((0.07, 0.13), (0.22, 0.43)), ((0.035, 0.065), (0.07, 0.13))
    bounds = {"v1": room, "v2": room, "v3": maze, "v4": maze}.get(task, arm)
    assert bounds[0][0] <= success <= bounds[0][1] and bounds[1][0] <= nongoal <= bounds[1][1]


@pytest.mark.slow
def test_scripted_agent_wins_v1():
    env = envs.DoomEnv("v1")
    wins = 0
    for seed in range(200):
        env.reset(seed=seed)
        wins += play(env, Walker(env).action)[-1]["is_success"]
    env.close()
    print(f"v1: the scripted agent wins {wins} of 200")
    assert wins >= 194


@pytest.mark.slow
@pytest.mark.parametrize("task", ["v3", "v4"])
def test_every_object_of_the_maze_can_be_reached(task):
    env = envs.DoomEnv(task)
    lengths = []
    for order, goal in itertools.product(itertools.permutations(envs.MAZE_PLACES), range(4)):
        env.place_objects = lambda order=order: np.array(order)
        env.reset(seed=0, options={"goal": goal})
        assert play(env, Walker(env).action)[-1]["is_success"], (order, goal)
        lengths.append(env.steps)
    env.close()
    print(f"{task}: the scripted agent wins all {len(lengths)}, in at most {max(lengths)} steps")
    assert len(lengths) == 96


@pytest.mark.parametrize("task", R_TASKS)
def test_every_box_can_be_reached(task):
    env = envs.UR5Env(task)
    env.camera_image = lambda: env.image
    wins, where = 0, set()
    for seed in range(300):
        env.reset(seed=seed)
        where.add((list(env.box_classes).index(env.goal), env.goal))
        wins += play(env, lambda: reach_action(env))[-1]["is_success"]
    print(f"{task}: the inverse-kinematics agent wins {wins} of 300")
    assert wins == 300 and len(where) == 3 * len(env.names)
    env.close()


# ----------------------------------------------------------------------------------------------------- pure in its seed


def fingerprint(task, split, seed, pause=0.0, before=0):
    """A digest of everything that an episode with fixed actions shows, after the beginning of `before` others."""
    env = make(task, split)
    rng = np.random.default_rng(seed + 1)
    for other in range(before):
        env.reset(seed=1000 + other)
        while env.unwrapped.running and env.unwrapped.steps < 7:
            env.step(int(rng.integers(3)) if task in V_TASKS else rng.uniform(-1, 1, 6))
    rng = np.random.default_rng(seed)
    observation, info = env.reset(seed=seed)
    digest = hashlib.sha256(observation["image"].tobytes() + info["instruction"].encode())
    over = False
    while not over:
        time.sleep(pause)
        action = int(rng.integers(3)) if task in V_TASKS else rng.uniform(-1, 1, 6)
        observation, reward, terminated, truncated, info = env.step(action)
        digest.update(observation["image"].tobytes() + repr((observation["goal"], reward, info)).encode())
        over = terminated or truncated
    env.close()
    return digest.hexdigest()


@pytest.fixture(scope="module")
def another_process():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize(("task", "split"), SPLITS)
def test_an_episode_is_a_function_of_its_seed(task, split, another_process):
    two = another_process.apply_async(fingerprint, (task, split, 7, 0.02, 3))
    one, two, other = fingerprint(task, split, 7), two.get(), fingerprint(task, split, 8)
    assert one == two != other


# -------------------------------------------------------------------------------------------------------- hard to break


OWNER = """
import gc, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs deaf to Ctrl-C
sys.path.insert(0, {root!r})
import envs
env = envs.DoomEnv("v2")
env.reset(seed=1)
env.step(0)
print("ready", flush=True)
sys.stdin.readline()
{ending}
"""
ENDINGS = {
    "close": "env.close(); print('closed', flush=True); time.sleep(600)",
    "garbage collection": "del env; gc.collect(); print('closed', flush=True); time.sleep(600)",
    "normal exit": "",
    "exception": "raise RuntimeError('on purpose')",
    "SIGINT": "while True: env.step(1) if env.running else env.reset()",
    "SIGTERM": "while True: env.step(1) if env.running else env.reset()",
    "SIGKILL": "while True: env.step(1) if env.running else env.reset()",
    "SIGTERM asleep": "time.sleep(600)",
    "SIGKILL asleep": "time.sleep(600)",
}


def shared_memory(instance):
    """What an engine and its owner have left in shared memory. Another program may use ViZDoom at the same time."""
    return list(Path("/dev/shm").glob(f"ViZDoom*{instance}"))


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_no_engine_outlives_its_owner(ending, tmp_path):
    marker = f"GACE_TEST={uuid.uuid4()}"
    folder, temporary = tmp_path / "folder", tmp_path / "temporary"
    folder.mkdir()
    temporary.mkdir()
    environment = {**os.environ, "GACE_TEST": marker.split("=")[1], "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", OWNER.format(root=str(ROOT), ending=ENDINGS[ending])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    owner = subprocess.Popen(command, cwd=folder, env=environment, **pipes)
    try:
        assert owner.stdout.readline() == b"ready\n"
        (engine,) = engines(marker)
        arguments = Path(f"/proc/{engine}/cmdline").read_text().split("\0")
        instance = arguments[arguments.index("+viz_instance_id") + 1]
        owner.stdin.write(b"\n")
        owner.stdin.flush()
        if ending.startswith("SIG"):
            time.sleep(0.3)
            owner.send_signal(getattr(signal, ending.split()[0]))
        elif ENDINGS[ending].startswith(("env", "del")):
            assert owner.stdout.readline() == b"closed\n"
        else:
            owner.wait(300)
        assert wait_until(lambda: not engines(marker))
        assert not list(folder.iterdir()) and not list(temporary.iterdir())
        assert not shared_memory(instance)
    finally:
        owner.kill()
        kill_all(marker)
        owner.communicate()


STARTER = """
import sys
sys.path.insert(0, {root!r})
import envs
envs.vizdoom.exe_path = {engine!r}
env = envs.DoomEnv("v1")
print("starting", flush=True)
env.reset(seed=0)
print(env.step(0)[1], flush=True)
sys.stdin.read()
env.close()
"""


def start(folder, engine=vizdoom.exe_path, before=()):
    """A process that starts an engine, plays a step, and ends when its stdin is closed; and the marker of its engine.

    `before` goes before its command. An `engine` that is a list is a shell script in the engine's place."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    if isinstance(engine, list):
        script = folder / f"{uuid.uuid4()}.sh"
        script.write_text("\n".join(["#!/bin/sh", *engine]))
        script.chmod(0o700)
        engine = script
    environment = {**os.environ, "GACE_TEST": str(uuid.uuid4()), "TMPDIR": str(temporary)}
    command = [*before, sys.executable, "-c", STARTER.format(root=str(ROOT), engine=str(engine))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    starter = subprocess.Popen(command, env=environment, **pipes)
    assert starter.stdout.readline() == "starting\n"
    return starter, f"GACE_TEST={environment['GACE_TEST']}"


def test_an_engine_that_dies_while_it_starts_is_started_again(tmp_path):
    engine = [
        f"if mkdir '{tmp_path}/first' 2>/dev/null; then",
        f"    '{vizdoom.exe_path}' \"$@\" &",
        "    sleep 0.05",
        "    kill -9 $!",
        "    exit 1",
        "fi",
        f"exec '{vizdoom.exe_path}' \"$@\"",
    ]
    output, errors = start(tmp_path, engine)[0].communicate()
    assert float(output) == pytest.approx(-0.01), errors
    assert (tmp_path / "first").exists()


def test_an_engine_that_cannot_start_is_named(tmp_path):
    starter, _ = start(tmp_path, "/bin/false")
    errors = starter.communicate()[1]
    assert starter.returncode and "The Doom engine does not start: /bin/false" in errors


@pytest.mark.slow
def test_what_a_killed_start_leaves_is_swept_by_the_next(tmp_path):
    """The starts are killed at any moment; the last one certainly before the engine is up."""
    instances = set()
    for seconds in (0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, None):
        starter, marker = start(tmp_path, ["exec sleep 600"]) if seconds is None else start(tmp_path)
        if seconds is None:
            assert wait_until(lambda: list(tmp_path.glob("temporary/*/instance")))
        else:
            time.sleep(seconds)
        starter.send_signal(signal.SIGSTOP)
        os.waitpid(starter.pid, os.WUNTRACED)
        instances |= set(re.findall(r"/dev/shm/ViZDoomMQCtr(\w+)", Path(f"/proc/{starter.pid}/maps").read_text()))
        starter.kill()
        starter.communicate()
        assert wait_until(lambda marker=marker: not processes_with(marker))
    left = [list((tmp_path / "temporary").iterdir()), list(itertools.chain(*map(shared_memory, instances)))]
    assert left[0] and left[1]
    for path in itertools.chain(*left):
        with contextlib.suppress(FileNotFoundError):  # another process may have swept it
            os.utime(path, (0, 0))  # the sweep spares what is younger than a minute: it may belong to another machine
    starter, _ = start(tmp_path)
    errors = starter.communicate()[1]
    assert starter.returncode == 0, errors
    left = list((tmp_path / "temporary").iterdir()), list(itertools.chain(*map(shared_memory, instances)))
    for path in left[1]:  # if the sweep failed
        path.unlink(missing_ok=True)
    assert left == ([], [])


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="only root can mount")
def test_tmpdir_that_runs_no_programs_is_named(tmp_path):
    """The folder is mounted for the process alone, so nothing has to be undone."""
    mount = 'mount -t tmpfs -o noexec tmpfs "$0" && exec "$@"'
    before = ["unshare", "--mount", "sh", "-c", mount, str(tmp_path / "temporary")]
    (tmp_path / "temporary").mkdir()
    if subprocess.run([*before, "true"], capture_output=True).returncode:
        pytest.skip("cannot mount here")
    starter, _ = start(tmp_path, before=before)
    errors = starter.communicate()[1]
    assert starter.returncode == 1 and "set TMPDIR to a folder not mounted noexec" in errors.splitlines()[-1]


def engine_of_this_process():
    return [p for p in engines(f"GACE_SELF={os.environ['GACE_SELF']}")]


@pytest.mark.parametrize("blind", [False, True])
def test_a_dead_engine_costs_nothing(blind, monkeypatch, v1):
    """A new engine plays the episode again, up to the step in which the old one died."""
    monkeypatch.setenv("GACE_SELF", str(uuid.uuid4()))
    digests = []
    for killed_at in ([], [0, 3], [9]):
        observation, _ = v1.reset(seed=4, options={"blind": blind})
        digest = hashlib.sha256(observation["image"].tobytes())
        for step in itertools.count():
            if step in killed_at:
                os.kill(*engine_of_this_process(), signal.SIGKILL)
            observation, *outcome = v1.step((0, 1, 0, 2)[step % 4])
            digest.update(observation["image"].tobytes() + repr(outcome).encode())
            if outcome[1] or outcome[2]:
                break
        assert step > 9
        digests.append(digest.hexdigest())
    assert digests[0] == digests[1] == digests[2]
    v1.reset(seed=4)
    os.kill(*engine_of_this_process(), signal.SIGKILL)  # between two episodes
    first = v1.reset(seed=4)[0]["image"]
    assert (first == v1.reset(seed=4)[0]["image"]).all()
    assert v1.step(0)[1] == pytest.approx(-0.01)


def test_an_engine_that_dies_twice_is_an_error(monkeypatch, v1):
    monkeypatch.setenv("GACE_SELF", str(uuid.uuid4()))
    v1.reset(seed=4)
    v1.step(0)
    advance = v1.advance

    def killed(action):
        os.kill(*engine_of_this_process(), signal.SIGKILL)
        return advance(action)

    with monkeypatch.context() as patch:
        patch.setattr(v1, "advance", killed)
        with pytest.raises(gym.error.Error, match="the Doom engine died twice in a row"):
            v1.step(0)
    with pytest.raises(gym.error.ResetNeeded):
        v1.step(0)
    v1.reset(seed=4)
    assert v1.step(0)[1] == pytest.approx(-0.01)


@pytest.mark.slow
def test_engines_killed_inside_a_step_never_hang_it(monkeypatch, v1):
    """About one in thirty dies with a lock held, for which the library would wait for ever."""
    monkeypatch.setenv("GACE_SELF", str(uuid.uuid4()))
    rng = np.random.default_rng(0)
    for _ in range(60):
        v1.reset(seed=0)
        (engine,) = engine_of_this_process()
        killer = threading.Timer(rng.uniform(0.01, 0.08), os.kill, (engine, signal.SIGKILL))
        killer.start()
        while engine in engine_of_this_process() or killer.is_alive():
            started = time.monotonic()
            v1.step(int(rng.integers(3))) if v1.running else v1.reset()
            assert time.monotonic() - started < 60  # most of it is the start of the next engine
        killer.join()


def test_guard_unlocks_a_mutex_of_the_engine_and_nothing_else(tmp_path):
    """A counter of the queue passes the number of the engine's thread sooner or later: it is no mutex."""
    engine = subprocess.Popen(["sleep", "600"])
    queue = tmp_path / "queue"
    words = np.zeros(128, np.int32)
    words[12:17] = 1, 0, engine.pid, 1, 128  # as boost's queue lies in memory: lock, count, owner, users, kind
    words[22], words[24], words[52] = engine.pid, engine.pid, engine.pid  # counters and an offset
    queue.write_bytes(words.tobytes())
    guard = envs.EngineGuard(engine.pid, [queue], 30)
    guard.close()
    engine.wait()
    expected = words.copy()
    expected[12:17] = 0, 0, 0, 0, 128
    assert np.fromfile(queue, np.int32).tolist() == expected.tolist()


def test_frozen_engine_is_killed(monkeypatch):
    monkeypatch.setenv("GACE_SELF", str(uuid.uuid4()))
    env = envs.DoomEnv("v1", engine_timeout=3)  # a busy machine may take a second for a step
    first = env.reset(seed=4)[0]["image"]
    second = env.step(0)[0]["image"]
    env.reset(seed=4)
    os.kill(*engine_of_this_process(), signal.SIGSTOP)
    assert np.array_equal(env.step(0)[0]["image"], second)  # by a new engine
    env.reset(seed=3)
    os.kill(*engine_of_this_process(), signal.SIGSTOP)
    assert np.array_equal(env.reset(seed=4)[0]["image"], first)  # by a new engine
    os.kill(*engine_of_this_process(), signal.SIGSTOP)
    env.close()
    assert wait_until(lambda: not engine_of_this_process())


def test_ctrl_c_in_a_step_leaves_an_environment_that_works(v1):
    v1.reset(seed=0)
    expected = v1.step(0)[0]["image"]
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            while True:
                v1.step(1) if v1.running else v1.reset()
    finally:
        signal.signal(signal.SIGALRM, previous)
    v1.reset(seed=0)
    assert (v1.step(0)[0]["image"] == expected).all()


def make_task(task):
    return lambda: make(task)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["v1", "r1"])
def test_twenty_environments_at_once(task):
    mine = make(task)  # an environment of the parent, alive across the fork
    mine.reset(seed=0)
    vector = gym.vector.AsyncVectorEnv([make_task(task)] * 20)
    vector.action_space.seed(0)
    images = vector.reset(seed=list(range(20)))[0]["image"].copy()
    assert len({image.tobytes() for image in images}) > (10 if task == "v1" else 5)
    for _ in range(30):
        vector.step(vector.action_space.sample())
    vector.close()
    assert (mine.reset(seed=0)[0]["image"] == images[0]).all()
    mine.close()


def test_engines_of_copies_are_independent_of_the_parent(v1):
    """A forked child that ends does not take the parent's engine with it."""
    v1.reset(seed=0)
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()
    assert v1.step(0)[1] == pytest.approx(-0.01)


def resident_kilobytes(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["v2", "r2"])
def test_ten_thousand_resets_leak_nothing(task, monkeypatch):
    monkeypatch.setenv("GACE_SELF", str(uuid.uuid4()))
    env = make(task)
    env.reset(seed=0)
    processes = [os.getpid(), *engine_of_this_process()]

    def usage():
        return [(resident_kilobytes(pid), len(os.listdir(f"/proc/{pid}/fd"))) for pid in processes]

    for _ in range(2000):  # every texture has been loaded by then
        env.reset()
    before = usage()
    for _ in range(8000):
        env.reset()
    for (memory, files), (memory_before, files_before) in zip(usage(), before, strict=True):
        assert memory < memory_before + 8000 and files <= files_before  # 1 KB a reset
    env.close()


@pytest.mark.parametrize("task", ["v1", "r1"])
def test_rendering_and_closing_changes_no_observation(task):
    env = make(task, render_mode="rgb_array")
    before = env.reset(seed=0)[0]["image"].copy()
    env.render()
    env.close()
    assert np.array_equal(env.reset(seed=0)[0]["image"], before)
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["v1", "r1"])
def test_making_and_closing_leaks_nothing(task):
    def files():
        return len(os.listdir("/proc/self/fd"))

    for index in range(15):
        env = make(task, render_mode="rgb_array")
        env.reset(seed=0)
        env.render()
        env.close()
        if index == 2:
            before = files()
    assert wait_until(lambda: files() <= before)  # a guard's thread may close its file a little later


# ------------------------------------------------------------------------------------------------ rendering and scripts

RENDER = "import gymnasium as gym, envs, os; gym.make('gace/R1-v0').reset(); print(os.environ['MUJOCO_GL'])"


def render_with(**variables):
    environment = {k: v for k, v in os.environ.items() if k not in ("MUJOCO_GL", "PYOPENGL_PLATFORM", "DISPLAY")}
    command = [sys.executable, "-c", RENDER]
    return subprocess.run(command, cwd=ROOT, env={**environment, **variables}, capture_output=True, text=True)


def test_rendering_backend_is_found_without_help():
    assert render_with().stdout.strip() in ("egl", "osmesa")


def test_rendering_backend_that_fails_names_the_packages():
    no_backend = render_with(__EGL_VENDOR_LIBRARY_FILENAMES="/nonexistent", OSMESA_LIBRARY="/nonexistent")
    if no_backend.returncode:  # OSMesa may be installed
        assert "libegl1" in no_backend.stderr.splitlines()[-1] and "libosmesa6" in no_backend.stderr.splitlines()[-1]
    else:
        assert no_backend.stdout.strip() == "osmesa"
    disabled = render_with(MUJOCO_GL="disabled")
    assert disabled.returncode and "MUJOCO_GL=disabled" in disabled.stderr.splitlines()[-1]


@pytest.mark.slow
def test_bench_prints_a_table():
    command = [sys.executable, "-m", "tools.bench", "--tasks", "v1", "r1", "--seconds", "1"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[1] for line in lines[2:]] == ["V1", "R1"]
    for line in lines[2:]:  # the bars, 70 and 85 %, are for a quiet machine
        limit, speed, share = (float(cell.strip(" %")) for cell in line.split("|")[2:5])
        assert speed > 0 and abs(share / 100 * limit - speed) < 0.01 * limit + 2  # all three are rounded
    wrong = subprocess.run([*command[:4], "v9"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode and wrong.stderr.strip() == "unknown task 'v9'; use any of v1 v2 v3 v4 r1 r2 r3"

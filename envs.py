"""The seven multi-target tasks of "Goal-Aware Cross-Entropy for Multi-Target Reinforcement Learning" (NeurIPS 2021).

    import gymnasium as gym
    import envs

    env = gym.make("gace/V2-v0", split="unseen")  # V1 to V4: find one of four objects in Doom
    env = gym.make("gace/R1-v0")                  # R1 to R3: reach one of three boxes with a UR5 arm
    observation, info = env.reset(seed=1, options={"goal": "Bonus"})

An observation is {"image": uint8 (channels, height, width), "goal": index}. Reaching the goal or another target ends
the episode. The `info` of a step says `is_success` and `reached` (a class index, or -1). An episode is a pure function
of its seed and its actions: nothing in it comes from a clock or from the engine's own random numbers.
"""

import contextlib
import ctypes
import functools
import importlib
import itertools
import mmap
import os
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import vizdoom


def splits_of(task):
    """The splits of a task. Only V2, V4 and R2 have unseen backgrounds."""
    return ["seen", "unseen"] if task in ("v2", "v4", "r2") else ["seen"]


def goals_of(task):
    """The names of a task's goals by class index."""
    return list(ITEMS) if task in V_TASKS else list(BOX_COLOURS)[: 5 if task == "r3" else 3]


class MultiTargetEnv(gym.Env):
    """What both domains share: the splits, the goal of an episode, its rewards and its end."""

    names: list[str]  # the targets by class index
    max_steps: int
    rewards: dict[str, float]  # success, nongoal, timeout, step

    def __init__(self, task, tasks, split, image_shape, render_mode):
        if task not in tasks:
            raise ValueError(f"unknown task {task!r}; use one of {', '.join(tasks)}")
        if split not in splits_of(task):
            one = '"seen": only V2, V4 and R2 have an unseen split'
            known = one if len(splits_of(task)) == 1 else '"seen" or "unseen"'
            raise ValueError(f"{task.upper()} has no split {split!r}; use {known}")
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"unknown render_mode {render_mode!r}; use None or 'rgb_array', and 'human' with gym.make")
        self.task, self.split, self.render_mode = task, split, render_mode
        self.observation_space = gym.spaces.Dict(
            image=gym.spaces.Box(0, 255, image_shape, np.uint8), goal=gym.spaces.Discrete(len(self.names))
        )
        self.image = np.zeros(image_shape, np.uint8)
        self.running = False  # between a reset and the end of its episode

    def read_options(self, options):
        """Sets the goal: the one that `options` ask for, by name or index, or a random one.

        With `options={"blind": True}` all images are black, and an episode of Doom runs three times as fast."""
        options = options or {}
        self.blind = bool(options.get("blind"))
        # Drawn in either case: asking for a goal does not shift the random numbers of the rest of the episode.
        drawn = int(self.np_random.integers(len(self.names)))
        goal = drawn if options.get("goal") is None else options["goal"]
        lower = [name.lower() for name in self.names]
        if isinstance(goal, str) and goal.lower() in lower:
            goal = lower.index(goal.lower())
        if isinstance(goal, (int, np.integer)) and not isinstance(goal, bool) and 0 <= goal < len(self.names):
            self.goal = int(goal)
            return
        raise ValueError(f"unknown goal {goal!r}; use one of {', '.join(self.names)}, or 0 to {len(self.names) - 1}")

    def check_running(self):
        if not self.running:
            raise gym.error.ResetNeeded("no episode is running: call reset() first")

    def observation(self):
        return {"image": np.zeros_like(self.image) if self.blind else self.image, "goal": np.int64(self.goal)}

    def outcome(self, reached, step_cost):
        """What `step` returns, given the class index of the target that was reached (-1 for none)."""
        terminated = reached >= 0
        truncated = not terminated and self.steps >= self.max_steps
        if terminated:
            step_cost += self.rewards["success" if reached == self.goal else "nongoal"]
        elif truncated:
            step_cost += self.rewards["timeout"]
        self.running = not (terminated or truncated)
        info = {"is_success": reached == self.goal, "reached": reached}
        return self.observation(), step_cost, terminated, truncated, info


def enlarge(image, height):
    """A (channels, h, w) image as a (height, width, 3) picture a person can look at; one channel turns grey."""
    image = np.broadcast_to(image, (3, *image.shape[1:])).transpose(1, 2, 0)
    rows = np.arange(height) * image.shape[0] // height
    columns = np.arange(height * image.shape[1] // image.shape[0]) * image.shape[0] // height
    return image[rows[:, None], columns]


# ---------------------------------------------------------------------------------------------- V1 to V4: navigation

# A map is a picture of points 96 units apart, the first at (48, 48). Neighbouring "#" are joined by a wall, and the
# outermost ring is the boundary.
ROOM = "\n#########\n" + "#       #\n" * 7 + "#########\n"
MAZE = """
###########
#         #
# ####### #
# #     # #
# #   # # #
# #   #   #
# # ###   #
# # #     #
# # # ### #
#         #
###########
"""
MAZE_PLACES = [(295, 907), (309, 266), (542, 185), (763, 647)]
START = (420, 420)

# Each class has two items, here by the engine's thing number; one of the two lies in the map.
ITEMS = {
    "Card": (13, 5),  # RedCard, BlueCard
    "Armor": (2018, 2019),  # GreenArmor, BlueArmor
    "Skull": (39, 40),  # YellowSkull, BlueSkull
    "Bonus": (2014, 2015),  # HealthBonus, ArmorBonus
}

PLAIN = ("STONE2", "CEIL5_2", "CEIL5_1")  # wall, floor, ceiling of V1 and V3
# The authors' seen pool runs from ASHWALL2 to BROWN1. We leave out BFALL1 to 4, which the engine animates by the clock
# (an episode would no longer be a function of its seed), and take the next of their list instead.
SEEN_TEXTURES = """
    ASHWALL2 ASHWALL3 ASHWALL4 ASHWALL6 ASHWALL7 BIGBRIK1 BIGBRIK2 BIGBRIK3 BIGDOOR2 BIGDOOR3 BIGDOOR4 BIGDOOR5 BLAKWAL1
    BLAKWAL2 BRICK1 BRICK2 BRICK3 BRICK4 BRICK5 BRICK6 BRICK7 BRICK8 BRICK9 BRICK10 BRICK11 BRICK12 BRICKLIT BRONZE1
    BRONZE2 BRONZE3 BRONZE4 BROVINE2 BROWN1 BROWN144 BROWN96 BROWNGRN BROWNHUG BROWNPIP BRWINDOW BSTONE1
""".split()
UNSEEN_TEXTURES = "PIPE1 PIPE2 PIPE4 STONE WOOD1 WOOD3 WOOD5 ZZZFACE7 ZZZFACE8 ZZZFACE9".split()

# The map, the heading at the start in degrees, the steps of an episode. V2 and V4 draw their textures at random.
V_TASKS = {"v1": (ROOM, 259, 25), "v2": (ROOM, 259, 25), "v3": (MAZE, 263, 50), "v4": (MAZE, 180, 50)}

TICS = 4  # action repeat; the frames of these tics are the stack
REACH = 36  # agent radius 16 + item radius 20: the boxes overlap when |dx| and |dy| are both smaller than this
ITEM_RADIUS = 20
BUTTONS = [getattr(vizdoom.Button, name) for name in ("MOVE_FORWARD", "TURN_LEFT", "TURN_RIGHT")]
VARIABLES = [getattr(vizdoom.GameVariable, name) for name in ("POSITION_X", "POSITION_Y", "ANGLE")]
FASTEST = 18  # more units than the agent can move in a tic
TEXTMAP_BYTES = 32768  # room for the longest map; the engine takes the padding for white space


@functools.cache
def map_walls(picture):
    """The points and walls of a picture in UDMF, the text form of a Doom map, and how many lines the walls have."""
    rows = picture.strip("\n").split("\n")
    size = len(rows)
    points = list(itertools.product(range(size), repeat=2))
    joined = [(r, c) for r, c in points if rows[r][c] == "#"]
    lines = []
    for (r, c), (r2, c2) in itertools.product(joined, repeat=2):
        if (r2 - r, c2 - c) not in [(0, 1), (1, 0)]:
            continue
        # A line is a wall on its right side only. So an inner wall is two lines back to back, and the boundary is the
        # line that faces the inside. (One line with two sides hides colours, but the depth shows what is behind it.)
        v1, v2 = r * size + c, r2 * size + c2
        if not (r == r2 == 0 or c == c2 == size - 1):
            lines.append((v1, v2))
        if not (r == r2 == size - 1 or c == c2 == 0):
            lines.append((v2, v1))
        if 0 < c == c2 < size - 1:
            # The authors' agent loses less speed on the east side of such a wall. So does ours, with an invisible line
            # (seen from its back) half a unit in front of the wall.
            lines.append((v2 + size**2, v1 + size**2))
    text = [f"vertex{{x={48 + gap + 96 * c};y={48 + 96 * r};}}" for gap in (0, 0.5) for r, c in points]
    text += [f"linedef{{v1={v1};v2={v2};sidefront={i};blocking=true;}}" for i, (v1, v2) in enumerate(lines)]
    return "".join(text), len(lines)


def map_text(picture, heading, textures, things):
    """A map of the picture with the start and the items, (x, y, thing number). The engine builds its nodes itself."""
    walls, lines = map_walls(picture)
    wall, floor, ceiling = textures
    text = f'namespace="zdoom";{walls}' + f'sidedef{{sector=0;texturemiddle="{wall}";}}' * lines
    text += f'sector{{heightceiling=128;lightlevel=240;texturefloor="{floor}";textureceiling="{ceiling}";}}'
    for x, y, kind, angle in [(*START, 1, heading), *((*thing, 0) for thing in things)]:  # 1 is the player
        text += f"thing{{x={x};y={y};type={kind};angle={angle};skill3=true;single=true;}}"
    return text.encode().ljust(TEXTMAP_BYTES)


def wad_bytes(textmap):
    """A WAD file with one map. Its TEXTMAP begins at byte 12, right behind the header."""
    lumps = [(b"MAP01", 0), (b"TEXTMAP", len(textmap)), (b"ENDMAP", 0)]
    directory = b"".join(struct.pack("<ii8s", 12, size, name) for name, size in lumps)
    return struct.pack("<4sii", b"PWAD", len(lumps), 12 + len(textmap)) + textmap + directory


def area_weights(size, new_size):
    """The matrix that averages `size` pixels down to `new_size` by area."""
    edges = np.arange(new_size + 1) * size / new_size
    pixels = np.arange(size)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return (overlap.clip(0) * new_size / size).astype(np.float32)


# 120 rows to 42 repeats every 20 rows to 7, 160 columns to 42 every 80 to 21. Products of these small blocks take a
# third of the full matrices' time, and each is too small for BLAS to start threads, which would slow other workers.
ROWS, COLUMNS = area_weights(20, 7), np.ascontiguousarray(area_weights(80, 21).T)


def shrink(frame):
    """One RGB-D frame, averaged by area from float (4, 120, 160) to uint8 (4, 42, 42)."""
    half = ROWS @ frame.reshape(24, 20, 160)  # (24, 7, 160)
    return np.rint(half.reshape(4, 84, 80) @ COLUMNS).astype(np.uint8).reshape(4, 42, 42)


class DoomEnv(MultiTargetEnv):
    """V1 to V4: get one of four objects, seen from the inside of a room (V1, V2) or a maze (V3, V4)."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 35 / TICS}
    names = list(ITEMS)
    rewards = {"success": 10.0, "nongoal": -1.0, "timeout": -0.1, "step": -0.01}
    game = None  # the engine starts with the first reset: an environment nobody plays costs nothing

    def __init__(self, task="v1", split="seen", render_mode=None, engine_timeout=30.0):
        """A step or a reset that takes longer than `engine_timeout` seconds kills the engine."""
        super().__init__(task, V_TASKS, split, (4 * TICS, 42, 42), render_mode)
        self.picture, self.heading, self.max_steps = V_TASKS[task]
        self.action_space = gym.spaces.Discrete(3)  # forward, left, right
        self.engine_timeout = engine_timeout
        self.buttons = np.eye(3, dtype=int).tolist()
        self.frame = np.zeros((4, 120, 160), np.float32)  # the last RGB-D frame at the engine's size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.read_options(options)
        variants = self.np_random.integers(2, size=len(ITEMS))
        self.textures = PLAIN
        if self.task in ("v2", "v4"):
            pool = SEEN_TEXTURES if self.split == "seen" else UNSEEN_TEXTURES
            self.textures = tuple(pool[i] for i in self.np_random.integers(len(pool), size=3))
        self.objects = self.place_objects().tolist()  # (x, y) by class
        things = [(x, y, kinds[v]) for (x, y), kinds, v in zip(self.objects, ITEMS.values(), variants, strict=True)]
        self.textmap = map_text(self.picture, self.heading, self.textures, things)
        self.engine_seed = int(self.np_random.integers(2**31))
        self.actions = []
        try:
            self.load_map()
        except ENGINE_DIED:
            self.play_again()
        self.steps, self.running = 0, True
        self.image = np.tile(shrink(self.frame), (TICS, 1, 1))
        return self.observation(), {"instruction": f"Get the {self.names[self.goal]}"}

    def place_objects(self):
        """Draws the places of the objects: a permutation of four places in the maze, uniform in the room."""
        # Unlike the authors, we draw again if a non-goal object lies on the start, or so close to the goal that the
        # agent cannot reach one without the other.
        if self.picture is MAZE:
            return self.np_random.permutation(MAZE_PLACES)
        while True:
            objects = self.np_random.uniform(48 + ITEM_RADIUS, 816 - ITEM_RADIUS, (len(ITEMS), 2))
            others = np.delete(objects, self.goal, axis=0)
            to_goal, to_start = (np.abs(others - point).max(-1).min() for point in (objects[self.goal], START))
            if to_goal >= 2 * REACH and to_start >= REACH:
                return objects

    def load_map(self):
        if self.game is None:
            self.start_engine()
        # The engine reads a map's lumps from its open WAD file at every map load.
        self.wad.seek(12)
        self.wad.write(self.textmap)
        self.safe_tics = 0
        with self.guard:
            self.game.set_seed(self.engine_seed)
            self.game.new_episode()
            self.read_frame()

    def play_again(self):
        """Plays the episode up to here with a new engine, after the old one died. Returns the last action's outcome."""
        self.close()
        try:
            self.load_map()
            outcomes = [self.advance(action) for action in self.actions]
            return outcomes[-1] if outcomes else None
        except ENGINE_DIED as error:
            self.close()
            raise gym.error.Error(f"the Doom engine died twice in a row: {error}") from None

    def read_frame(self):
        state = self.game.get_state()
        self.frame[:3], self.frame[3] = state.screen_buffer, state.depth_buffer
        self.x, self.y, self.angle = state.game_variables.tolist()

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"action {action!r} is not one of 0 (forward), 1 (left), 2 (right)")
        self.check_running()
        self.actions.append(int(action))
        try:
            reached, cost = self.advance(action)
        except ENGINE_DIED:
            reached, cost = self.play_again()
        self.steps += 1
        return self.outcome(reached, cost)

    def advance(self, action):
        """Advances the engine by one step. Returns the class index of the object reached (-1 for none) and the cost."""
        frames, reached, cost = [], -1, 0.0
        with self.guard:
            for _ in range(TICS):
                self.tic(action)
                if not self.blind:
                    frames.append(shrink(self.frame))
                for index, (x, y) in enumerate(self.objects):
                    if abs(x - self.x) < REACH and abs(y - self.y) < REACH:
                        reached = index
                if reached >= 0:
                    break  # on this very tic, which pays the reward in place of its cost
                cost += self.rewards["step"] / TICS
        if not self.blind:
            self.image = np.concatenate(frames + frames[-1:] * (TICS - len(frames)))
        return reached, cost

    def tic(self, action):
        """Advances the engine by one tic and looks where the agent is."""
        self.game.set_action(self.buttons[action])
        if not self.blind:
            self.game.advance_action(1)
            self.read_frame()
        elif self.safe_tics > 0:  # no object can have been reached; a look would cost an image
            self.game.advance_action(1, False)
            self.safe_tics -= 1
        else:
            self.game.advance_action(1)
            self.x, self.y, self.angle = map(self.game.get_game_variable, VARIABLES)
            nearest = min(max(abs(x - self.x), abs(y - self.y)) for x, y in self.objects)
            self.safe_tics = (nearest - REACH) // FASTEST

    def render(self):
        """The engine's screen, and beside it what the agent sees: colour and depth at 42x42."""
        panel = np.concatenate([enlarge(self.image[-4:-1], 180), enlarge(self.image[-1:], 180)])
        return np.concatenate([enlarge(self.frame[:3].astype(np.uint8), 360), panel], axis=1)

    def start_engine(self):
        # Engine and environment keep the WAD open, so the folder is removed at once and no crash leaves it behind.
        if sys.platform == "linux":
            sweep()
        with tempfile.TemporaryDirectory(prefix=f"gace-doom-{os.getpid()}-") as folder:
            wad, launcher = Path(folder, "map.wad"), Path(folder, "launcher")
            wad.write_bytes(wad_bytes(self.textmap))
            quoted = {"folder": shlex.quote(folder), "engine": shlex.quote(vizdoom.exe_path)}
            launcher.write_text(LAUNCHER.format(parent=os.getpid(), follow=FOLLOW, **quoted))
            launcher.chmod(0o700)

            game = vizdoom.DoomGame()
            game.set_vizdoom_path(str(launcher))
            game.set_doom_scenario_path(str(wad))
            game.set_doom_config_path(os.devnull)
            game.set_doom_map("map01")
            game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
            game.set_screen_format(vizdoom.ScreenFormat.CRCGCB)
            game.set_depth_buffer_enabled(True)
            unwanted = "hud weapon crosshair decals particles effects_sprites messages screen_flashes"
            for thing in unwanted.split():
                getattr(game, f"set_render_{thing}")(False)
            game.set_window_visible(False)
            game.set_sound_enabled(False)
            game.set_available_buttons(BUTTONS)
            game.set_available_game_variables(VARIABLES)
            game.add_game_args("+cl_run 1")
            game.set_episode_timeout(0)  # the steps are counted here
            if not os.access(launcher, os.X_OK):  # the library would crash
                raise gym.error.Error(f"no program can run in {folder}: set TMPDIR to a folder not mounted noexec")
            game.init()
            self.game, self.wad = game, open(wad, "r+b", buffering=0)
            pid, *arguments = Path(folder, "instance").read_text().split()
            name = arguments[arguments.index("+viz_instance_id") + 1]
            memory, *queues = (Path(f"/dev/shm/ViZDoom{kind}{name}") for kind in ("SM", "MQCtr", "MQDoom"))
            self.guard = contextlib.nullcontext()
            if hasattr(os, "pidfd_open"):
                self.guard = EngineGuard(int(pid), queues, self.engine_timeout)
            # Both sides have opened the shared memory. Without a name, the kernel frees it when both end.
            for path in (memory, *queues):
                path.unlink(missing_ok=True)

    def close(self):
        self.running = False
        if self.game is not None:
            game, self.game = self.game, None
            if hasattr(os, "pidfd_open"):
                self.guard.close()
            game.close()
            self.wad.close()

    __del__ = close


# -------------------------------------------------------------------------------------- V1 to V4: the engine's process

ENGINE_DIED = tuple(getattr(vizdoom, f"ViZDoom{kind}Exception") for kind in ("Error", "IsNotRunning", "UnexpectedExit"))

# Starts the engine in its folder. If it dies during its start, the library would crash, so it is started once more.
# setpriv lets the kernel kill the shell with the Python process, and the engine with the shell, however they die.
# setsid keeps a terminal's Ctrl-C from the engine: it is for the Python process, which closes the engine.
FOLLOW = "setsid setpriv --pdeathsig KILL" if shutil.which("setpriv") else ""
LAUNCHER = """#!/usr/bin/env -S {follow} sh
[ $PPID = {parent} ] || exit 1  # the Python process has died already
cd {folder}
for attempt in 1 2; do
    {follow} sh -c '[ $PPID = '$$' ] && exec "$0" "$@"' {engine} "$@" &
    echo "$! $*" > instance
    wait $! 2> /dev/null
    [ -e {folder} ] || exit 1  # the environment removes it after a complete start
done
echo "The Doom engine does not start: {engine}" >&2
"""


def sweep():
    """Removes files of processes that were killed while an engine started, more than a minute ago."""
    for folder in filter(is_old, Path(tempfile.gettempdir()).glob("gace-doom-*")):
        if not Path("/proc", folder.name.split("-")[2]).exists():  # the owner's process
            shutil.rmtree(folder, ignore_errors=True)
    if memories := list(filter(is_old, Path("/dev/shm").glob("ViZDoom*"))):
        mapped = ""  # by living processes; an engine that has started keeps its shared memory without a name
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):  # another user's process, or one that has just ended
                mapped += maps.read_text()
        for path in memories:
            if str(path) not in mapped:
                path.unlink(missing_ok=True)


def is_old(path):
    try:
        return path.stat().st_uid == os.getuid() and time.time() - path.stat().st_mtime > 60
    except OSError:  # it has just gone
        return False


class EngineGuard(threading.Thread):
    """Frees a call that waits for a dead engine, and kills an engine that does not answer (on Linux).

    `with guard:` surrounds the calls of an engine. An engine that dies inside a call may hold the lock of the message
    queue in shared memory. Then the library waits for the lock for ever, and so does its own thread that would report
    the death."""

    def __init__(self, pid, queues, timeout):
        super().__init__(daemon=True)
        self.pidfd, self.timeout = os.pidfd_open(pid), timeout
        self.threads = [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
        self.memories = []
        for queue in queues:
            with open(queue, "r+b") as file:
                self.memories.append(mmap.mmap(file.fileno(), 0))
        self.since = None  # when the call under way began
        self.unlocking = threading.Lock()  # held by this thread, or by the one that closes
        self.closed = False
        self.start()

    def __enter__(self):
        self.since = time.monotonic()

    def __exit__(self, *_):
        self.since = None

    def run(self):
        while not self.closed:
            dead = self.is_dead(min(1, self.timeout / 4))
            since = self.since
            waited = time.monotonic() - since if since else 0
            if dead and waited > 0.05:
                self.unlock()
            elif not dead and waited > self.timeout:
                self.kill()
            if dead:
                time.sleep(0.02)
        os.close(self.pidfd)

    def is_dead(self, seconds):
        """Waits for the engine's death for some seconds at most."""
        return bool(select.select([self.pidfd], [], [], seconds)[0])

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def unlock(self):
        """Unlocks every mutex that a thread of the dead engine owns."""
        # A pthread_mutex_t is (lock, count, owner, users, kind, ...). A counter in the queue can have the value of a
        # thread, so lock and kind (128: shared by processes) are checked too.
        for memory, start in itertools.product(self.memories, range(60)):
            with self.unlocking:
                lock, _, owner, _, kind = np.frombuffer(memory, np.int32, 5, 4 * start).tolist()
                if lock and owner in self.threads and kind == 128:
                    mutex = ctypes.c_char.from_buffer(memory, 4 * start)
                    ctypes.CDLL(None).pthread_mutex_unlock(ctypes.byref(mutex))

    def close(self):
        """Kills the engine, so that the library does not wait for it."""
        self.kill()
        if self.is_dead(5):
            self.unlock()
        self.closed = True
        self.join(1)


# ---------------------------------------------------------------------------------------------- R1 to R3: manipulation

BOX_COLOURS = {
    "red": (0.90, 0.10, 0.10, 1),
    "green": (0.10, 0.75, 0.15, 1),
    "blue": (0.10, 0.25, 0.95, 1),
    "yellow": (0.95, 0.85, 0.10, 1),
    "purple": (0.60, 0.15, 0.75, 1),
}

# The two colours of each checkered background of R2. The paper shows samples but no list: these are ours, and duller
# than any box. A square is 0.12 m wide, one and a half times a box.
GREY = "0.62 0.62 0.62"  # R1, R3
CHECKERS = {
    "seen": [
        ("0.90 0.90 0.90", "0.25 0.25 0.28"),
        ("0.55 0.75 0.90", "0.20 0.30 0.45"),
        ("0.85 0.70 0.50", "0.45 0.30 0.20"),
        ("0.65 0.80 0.60", "0.25 0.40 0.30"),
        ("0.90 0.65 0.70", "0.50 0.25 0.35"),
    ],
    "unseen": [
        ("0.75 0.65 0.90", "0.35 0.25 0.50"),
        ("0.60 0.85 0.85", "0.15 0.40 0.42"),
        ("0.95 0.80 0.60", "0.55 0.40 0.25"),
        ("0.80 0.80 0.55", "0.40 0.40 0.20"),
        ("0.70 0.70 0.75", "0.12 0.12 0.25"),
    ],
}

# Link lengths, masses and torque limits are Universal Robots' figures; a link's mass is spread over its shapes. The
# joint ranges are the paper's, within the robot's own 2 pi; the speed of 2 rad/s is below its limit of 180 degrees/s.
# There are no shadows, no multisampling and no fine meshes: they cost time and do not show at 84x84.
UR5_XML = """
<mujoco model="ur5">
  <compiler angle="degree"/>
  <option timestep="0.004" integrator="implicitfast"/>
  <statistic extent="1"/>
  <visual>
    <global offwidth="480" offheight="480"/>
    <quality shadowsize="0" offsamples="0" numslices="12" numstacks="4" numquads="1"/>
    <headlight ambient="0.45 0.45 0.45" diffuse="0.55 0.55 0.55" specular="0 0 0"/>
    <map znear="0.1" zfar="12"/>
  </visual>
  <asset>
    {backgrounds}
  </asset>
  <default>
    <geom contype="0" conaffinity="0" rgba="0.78 0.8 0.83 1"/>
    <joint axis="0 1 0" range="-180 180" armature="0.1"/>
    <velocity kv="200" forcerange="-150 150" ctrlrange="-2 2"/>
    <default class="link"> <!-- what the plane stops -->
      <geom type="capsule" contype="1"/>
    </default>
    <default class="wrist">
      <joint range="-286 286"/> <!-- 5 rad -->
      <velocity kv="40" forcerange="-28 28"/>
    </default>
    <default class="box">
      <geom type="box" size="0.04 0.04 0.04"/>
    </default>
  </default>
  <worldbody>
    <camera name="front" pos="1.5 0 1.15" xyaxes="0 1 0 -0.648 0 0.762" fovy="44"/>
    <!-- 10 m fill the picture. The software renderer draws an infinite plane seven times as slowly. -->
    <geom name="background" type="plane" size="5 5 1" material="background0" rgba="1 1 1 1" conaffinity="1"
          solref="0.01 1"/>
    <geom name="box_left" class="box" pos="0.42 -0.29 0.04"/>
    <geom name="box_front" class="box" pos="0.65 0 0.04"/>
    <geom name="box_right" class="box" pos="0.42 0.29 0.04"/>
    <geom type="cylinder" fromto="0 0 0 0 0 0.089159" size="0.065" rgba="0.3 0.3 0.32 1"/>
    <body name="shoulder" pos="0 0 0.089159" gravcomp="1">
      <joint name="shoulder_pan" axis="0 0 1"/>
      <geom type="capsule" fromto="0 0 0 0 0.13585 0" size="0.06" mass="3.7" rgba="0.35 0.6 0.8 1"/>
      <body name="upper_arm" pos="0 0.13585 0" euler="0 90 0" gravcomp="1">
        <joint name="shoulder_lift"/>
        <geom class="link" fromto="0 0 0 0 0 0.425" size="0.055" mass="6.8"/>
        <geom class="link" fromto="0 0 0.425 0 -0.1197 0.425" size="0.05" mass="1.593" rgba="0.35 0.6 0.8 1"/>
        <body name="forearm" pos="0 -0.1197 0.425" gravcomp="1">
          <joint name="elbow"/>
          <geom class="link" fromto="0 0 0 0 0 0.39225" size="0.042" mass="2.33"/>
          <body name="wrist_1" pos="0 0 0.39225" euler="0 90 0" gravcomp="1">
            <joint name="wrist_1" class="wrist"/>
            <geom class="link" fromto="0 0 0 0 0.093 0" size="0.038" mass="1.219" rgba="0.35 0.6 0.8 1"/>
            <body name="wrist_2" pos="0 0.093 0" gravcomp="1">
              <joint name="wrist_2" axis="0 0 1" class="wrist"/>
              <geom class="link" fromto="0 0 0 0 0 0.09465" size="0.038" mass="1.219"/>
              <body name="wrist_3" pos="0 0 0.09465" gravcomp="1">
                <joint name="wrist_3" class="wrist"/>
                <geom class="link" fromto="0 0 0 0 0.0823 0" size="0.032" mass="0.1879" rgba="0.35 0.6 0.8 1"/>
                <geom class="link" fromto="0 0.0823 0 0 0.16 0" size="0.015" mass="0.05" rgba="0.1 0.1 0.1 1"/>
                <site name="tip" pos="0 0.175 0"/>
              </body>
            </body>
          </body>
        </body>
      </body>
    </body>
  </worldbody>
  <actuator>
    <velocity joint="shoulder_pan"/>
    <velocity joint="shoulder_lift"/>
    <velocity joint="elbow"/>
    <velocity joint="wrist_1" class="wrist"/>
    <velocity joint="wrist_2" class="wrist"/>
    <velocity joint="wrist_3" class="wrist"/>
  </actuator>
  <keyframe> <!-- the tool points down, 0.25 m above the plane, amid the three boxes -->
    <key name="start" qpos="-0.22 -1.544 1.773 -1.8 -1.571 0"/>
  </keyframe>
</mujoco>
"""

R_TASKS = ("r1", "r2", "r3")
PHYSICS_STEPS = 16  # the paper repeats each action 16 times
# From the tool tip to a box's centre, after the 16 physics steps. With the joint speed, the start pose and the places
# of the boxes above, a random policy succeeds in about 5 % of episodes, equally often at each box.
REACH_DISTANCE = 0.082

GL_HELP = (
    "MuJoCo cannot render{}. On Debian or Ubuntu: apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri "
    "(MUJOCO_GL=egl), or: apt-get install libosmesa6 (MUJOCO_GL=osmesa); then leave MUJOCO_GL unset."
)


def load_mujoco():
    """Imports MuJoCo with a rendering backend that works here. It reads MUJOCO_GL once, when it is imported."""
    # Mesa's software renderer hangs after a fork unless it renders without threads, which at 84x84 is faster anyway.
    os.environ.setdefault("LP_NUM_THREADS", "0")
    # Pygame's window (render_mode="human") must not use OpenGL beside MuJoCo: the X server would end the process.
    os.environ.setdefault("SDL_FRAMEBUFFER_ACCELERATION", "0")
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.platform == "linux" and not display and not os.environ.get("MUJOCO_GL"):
        for backend in ("egl", "osmesa"):
            # In a process of its own, because a failed attempt leaves PyOpenGL unable to try another backend.
            attempt = [sys.executable, "-c", "import mujoco; mujoco.GLContext(84, 84)"]
            if not subprocess.run(attempt, env={**os.environ, "MUJOCO_GL": backend}, capture_output=True).returncode:
                os.environ["MUJOCO_GL"] = backend
                break
        else:
            raise gym.error.DependencyNotInstalled(GL_HELP.format(": neither EGL nor OSMesa works here"))
        if "mujoco" in sys.modules:  # the user's import came before the choice
            importlib.reload(sys.modules["mujoco.rendering.classic.gl_context"])
    try:
        import mujoco
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        raise gym.error.DependencyNotInstalled(
            GL_HELP.format(f" with MUJOCO_GL={os.environ.get('MUJOCO_GL')}: {error}")
        ) from None
    return mujoco


class UR5Env(MultiTargetEnv):
    """R1 to R3: reach the box of the instructed colour with the tip of a UR5's tool, and no other box."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 16}
    max_steps = 50
    rewards = {"success": 1.0, "nongoal": -0.3, "timeout": -0.1, "step": -0.01}
    renderer = large_renderer = None

    def __init__(self, task="r1", split="seen", render_mode=None):
        self.names = goals_of(task)
        super().__init__(task, R_TASKS, split, (3, 84, 84), render_mode)
        self.action_space = gym.spaces.Box(-1, 1, (6,), np.float32)
        self.mujoco = load_mujoco()
        self.backgrounds = CHECKERS[split] if task == "r2" else [(GREY, GREY)]
        backgrounds = "".join(
            f'<texture name="background{i}" type="2d" builtin="checker" rgb1="{a}" rgb2="{b}" width="64" height="64"/>'
            f'<material name="background{i}" texture="background{i}" texuniform="true" texrepeat="8.4 8.4"/>'
            for i, (a, b) in enumerate(self.backgrounds)
        )
        self.model = self.mujoco.MjModel.from_xml_string(UR5_XML.format(backgrounds=backgrounds))
        self.data = self.mujoco.MjData(self.model)
        self.boxes = [self.model.geom(f"box_{place}").id for place in ("left", "front", "right")]
        self.box_positions = self.model.geom_pos[self.boxes]  # (3, 3)
        self.tip = self.data.site("tip").xpos  # a view: it follows the simulation
        self.joint_speed = self.model.actuator_ctrlrange[:, 1]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.read_options(options)
        others = [c for c in range(len(self.names)) if c != self.goal]
        present = [self.goal, *self.np_random.permutation(others)[:2]]
        self.box_classes = self.np_random.permutation(present)  # the class of the box at each position
        background = f"background{self.np_random.integers(len(self.backgrounds))}"

        self.model.geom_rgba[self.boxes] = [BOX_COLOURS[self.names[c]] for c in self.box_classes]
        self.model.geom("background").matid = self.model.material(background).id
        self.mujoco.mj_resetDataKeyframe(self.model, self.data, 0)
        self.mujoco.mj_forward(self.model, self.data)
        self.steps, self.running = 0, True
        self.image = self.camera_image()
        return self.observation(), {"instruction": f"Reach the {self.names[self.goal].title()} Box"}

    def step(self, action):
        action = np.asarray(action, dtype=np.float64)
        if action.shape != (6,) or not (np.abs(action) <= 1).all():  # NaN fails the comparison too
            raise ValueError(f"action {action.tolist()} is not 6 joint velocities within [-1, 1]")
        self.check_running()
        self.data.ctrl[:] = action * self.joint_speed
        self.mujoco.mj_step(self.model, self.data, nstep=PHYSICS_STEPS)
        self.mujoco.mj_kinematics(self.model, self.data)  # mj_step leaves positions one physics step behind the joints
        near = np.linalg.norm(self.box_positions - self.tip, axis=1) <= REACH_DISTANCE
        reached = int(self.box_classes[near.argmax()]) if near.any() else -1
        self.steps += 1
        if not self.blind:
            self.image = self.camera_image()
        # As in Doom, reaching a box pays its reward in place of the step cost.
        return self.outcome(reached, 0.0 if reached >= 0 else self.rewards["step"])

    def camera_image(self):
        if self.renderer is None:
            self.renderer = self.new_renderer(84)
        self.renderer.update_scene(self.data, "front")
        return np.ascontiguousarray(self.renderer.render().transpose(2, 0, 1))

    def render(self):
        """The camera's view, and beside it what the agent sees of it at 84x84."""
        if self.large_renderer is None:
            quality = self.model.vis.quality
            small = quality.numslices, quality.numstacks, quality.offsamples
            quality.numslices, quality.numstacks, quality.offsamples = 32, 16, 4
            self.large_renderer = self.new_renderer(480)
            quality.numslices, quality.numstacks, quality.offsamples = small  # for the next renderer of observations
        self.large_renderer.update_scene(self.data, "front")
        return np.concatenate([self.large_renderer.render(), enlarge(self.image, 480)], axis=1)

    def new_renderer(self, size):
        try:
            return self.mujoco.Renderer(self.model, size, size, max_geom=100)
        except Exception as error:  # each backend fails in its own way
            raise gym.error.DependencyNotInstalled(
                GL_HELP.format(f" with MUJOCO_GL={os.environ.get('MUJOCO_GL')}: {error}")
            ) from None

    def close(self):
        self.running = False
        for renderer in (self.renderer, self.large_renderer):
            if renderer is not None:
                renderer.close()
        self.renderer = self.large_renderer = None


for task in (*V_TASKS, *R_TASKS):
    entry_point, steps = ("DoomEnv", V_TASKS[task][2]) if task in V_TASKS else ("UR5Env", UR5Env.max_steps)
    gym.register(f"gace/{task.upper()}-v0", f"{__name__}:{entry_point}", max_episode_steps=steps, kwargs={"task": task})

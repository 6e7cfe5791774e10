"""How close the environments come to the limit they cannot beat. Both sides are measured in one run, so that the ratio
holds on a machine that other programs slow down.

    python -m tools.bench                       # every task
    python -m tools.bench --tasks v1 r1 --seconds 20

The limit of a V task is its engine alone: 4 tics, each followed by reading screen and depth. That of an R task is 16
physics steps and one 84x84 image. The last column compares `reset()` with the engine's `new_episode()`.
"""

import statistics
import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import tyro

import envs


@dataclass
class Args:
    tasks: tuple[str, ...] = ("v1", "v2", "v3", "v4", "r1", "r2", "r3")  # the tasks to measure
    seconds: float = 10.0  # time to spend on each measurement


def seconds_per_call(function, calls):
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def bench_environment(task, seconds):
    """Returns the steps/s of the limit and of the environment, and how many `new_episode()` a reset costs (V only)."""
    env = gym.make(f"gace/{task.upper()}-v0")
    env.reset(seed=1)
    bare = env.unwrapped
    rng = np.random.default_rng(1)

    def engine_step():
        button = bare.buttons[rng.integers(3)]
        for _ in range(envs.TICS):
            bare.game.make_action(button, 1)
            bare.game.get_state()

    image = np.empty((84, 84, 3), np.uint8)

    def simulator_step():
        bare.data.ctrl[:] = rng.uniform(-1, 1, 6)
        bare.mujoco.mj_step(bare.model, bare.data, nstep=envs.PHYSICS_STEPS)
        bare.renderer.update_scene(bare.data, "front")
        bare.renderer.render(out=image)

    def limit():
        env.reset()
        return seconds_per_call(engine_step if task in envs.V_TASKS else simulator_step, bare.max_steps)

    def environment():
        env.reset()
        actions = iter([env.action_space.sample() for _ in range(bare.max_steps)])
        steps, start, running = 0, time.perf_counter(), True
        while running:
            *_, terminated, truncated, _ = env.step(next(actions))
            steps, running = steps + 1, not (terminated or truncated)
        return (time.perf_counter() - start) / steps

    limits, environments, resets = [], [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        limits.append(limit())
        environments.append(environment())
        if task in envs.V_TASKS:
            resets.append(seconds_per_call(env.reset, 5) / seconds_per_call(bare.game.new_episode, 5))
    env.close()
    reset = f"{statistics.median(resets):.2f}" if resets else "-"
    return 1 / statistics.median(limits), 1 / statistics.median(environments), reset


def main():
    args = tyro.cli(Args, description=__doc__)
    if unknown := set(args.tasks) - {*envs.V_TASKS, *envs.R_TASKS}:
        raise SystemExit(f"unknown task {min(unknown)!r}; use any of {' '.join([*envs.V_TASKS, *envs.R_TASKS])}")
    print("| task | limit, steps/s | environment, steps/s | share of the limit | reset / new_episode() |")
    print("| --- | --- | --- | --- | --- |")
    for task in args.tasks:
        limit, speed, reset = bench_environment(task, args.seconds)
        print(f"| {task.upper()} | {limit:.1f} | {speed:.1f} | {speed / limit:.0%} | {reset} |", flush=True)


if __name__ == "__main__":
    main()

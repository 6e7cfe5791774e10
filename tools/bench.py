"""How close environments and training come to the limit they cannot beat. Both sides are measured in one run, so that
the ratio holds on a machine that other programs slow down.

    python -m tools.bench                       # the environments of every task
    python -m tools.bench --tasks v1 r1 --seconds 20
    python -m tools.bench --training --tasks v1 r1 --seconds 60

The limit of a V task is its engine alone: 4 tics, each followed by reading screen and depth. That of an R task is 16
physics steps and one 84x84 image. The last column compares `reset()` with the engine's `new_episode()`.
The limit of training is, for A3C, the engine's time for the steps of an episode and the arithmetic of the convolutions;
for SAC, that arithmetic alone, at the rate of one large matrix product.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro

import a3c_gace_vizdoom as a3c
import envs
import sac_gace_ur5 as sac


@dataclass
class Args:
    tasks: tuple[str, ...] = ("v1", "v2", "v3", "v4", "r1", "r2", "r3")  # the tasks to measure
    seconds: float = 10.0  # time to spend on each measurement
    training: bool = False
    """measure the training of A3C+GACE&GDAN or SAC+GACE&GDAN on the tasks instead of the environments"""


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


def convolution_flops(convs, side, backward):
    """Of one image through a feature extractor. The gradient of the first layer's input is not needed."""
    flops = 0
    for index, conv in enumerate(convs):
        side = (side + 1) // 2
        products = 3 if backward and index else 2 if backward else 1
        flops += 2 * products * side * side * conv.weight.numel()
    return flops


def matrix_product_rate(threads, size=2048):
    """Floating-point operations a second in one large matrix product."""
    torch.set_num_threads(threads)
    matrix = torch.randn(size, size)
    return 2 * size**3 / min(seconds_per_call(lambda: matrix @ matrix, 1) for _ in range(8))


def run_training(script, arguments, folder, seconds):
    """Trains as a user does, for some seconds after the warm-up. Returns updates/s and the last checkpoint."""
    command = [sys.executable, str(Path(script).resolve()), *arguments]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seen = []  # (updates, seconds) of the checkpoints
    try:
        while len(seen) < 2 or seen[-1][1] - seen[0][1] < seconds:
            time.sleep(0.5)
            if process.poll() is not None:
                raise SystemExit(f"{script} ended by itself: {' '.join(command)}")
            for path in Path(folder, "runs").glob("*/checkpoint.pt"):
                checkpoint = torch.load(path)
                point = int(checkpoint["counters"]["updates"]), checkpoint["seconds"]
                if point[0] > 20 and point not in seen:  # the first updates are slower
                    seen.append(point)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
    (first, start), (last, end) = seen[0], seen[-1]
    return (last - first) / (end - start), checkpoint


def bench_training(task, seconds):
    """Returns the updates/s of the limit and of the script."""
    navigation = task in envs.V_TASKS
    script = "a3c_gace_vizdoom.py" if navigation else "sac_gace_ur5.py"
    flags = ["--task", task, "--gdan", "--total-updates", "30000", "--eval-every", "30000", "--checkpoint-every", "3"]
    flags += ["--no-cuda", "--accuracy-states", "4", "--warmup", "60" if navigation else "1000"]
    with tempfile.TemporaryDirectory(prefix="gace-bench-") as folder:
        speed, checkpoint = run_training(script, flags, folder, seconds)
    settings = (a3c if navigation else sac).Args(task=task, gdan=True)
    agent = (a3c if navigation else sac).Agent(settings)
    convs = [layer for layer in agent.feature_extractor.modules() if isinstance(layer, torch.nn.Conv2d)]
    if not navigation:
        flops = (settings.batch_size + settings.goal_batch_size) * convolution_flops(convs, 84, True)
        flops += settings.batch_size * convolution_flops(convs, 84, False)
        return matrix_product_rate(os.cpu_count() or 1) / flops, speed
    steps = int(checkpoint["counters"]["env_steps"]) / int(checkpoint["counters"]["episodes"])
    flops = (steps + settings.goal_batch_size) * convolution_flops(convs, 42, True)
    flops += steps * convolution_flops(convs, 42, False)
    engine = steps / bench_environment(task, 5)[0]
    return (os.cpu_count() or 1) / (engine + flops / matrix_product_rate(1)), speed


def main():
    args = tyro.cli(Args, description=__doc__)
    if unknown := set(args.tasks) - {*envs.V_TASKS, *envs.R_TASKS}:
        raise SystemExit(f"unknown task {min(unknown)!r}; use any of {' '.join([*envs.V_TASKS, *envs.R_TASKS])}")
    unit = "updates/s" if args.training else "steps/s"
    print(f"| task | limit, {unit} | measured, {unit} | share of the limit | reset / new_episode() |")
    print("| --- | --- | --- | --- | --- |")
    for task in args.tasks:
        bench = bench_training if args.training else bench_environment
        limit, speed, *reset = bench(task, args.seconds)
        cells = task.upper(), f"{limit:.1f}", f"{speed:.1f}", f"{speed / limit:.0%}", *(reset or "-")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

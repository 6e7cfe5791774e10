"""Scripted agents that see the coordinates. They show that the tasks can be won."""

import heapq
import itertools
import math

import numpy as np
import vizdoom

import envs

CELL = 12  # of the walker's grid, in map units
PLANS = np.array(list(itertools.product(range(3), repeat=5)))  # every sequence of 5 actions


def wall_segments(picture):
    rows = picture.strip("\n").split("\n")
    solid = {(c, r) for r, row in enumerate(rows) for c, mark in enumerate(row) if mark == "#"}
    for c, r in solid:
        for c2, r2 in ((c + 1, r), (c, r + 1)):
            if (c2, r2) in solid:
                yield 48 + 96 * c, 48 + 96 * r, 48 + 96 * c2, 48 + 96 * r2


class Walker:
    """V1 to V4: walks down the shortest-path distance to the goal, around walls and other objects. Each step it plays
    every sequence of 5 actions in an exact model of the engine's movement and takes the first action of the best."""

    def __init__(self, env):
        self.env, self.tics, self.held = env, 0, 0
        size = 1056 // CELL
        x, y = np.meshgrid(*[(np.arange(size) + 0.5) * CELL] * 2, indexing="ij")
        solid, tight, avoid = np.zeros((3, size, size), bool)
        end = 48 + 96 * (len(env.picture.split("\n")) - 3)
        solid |= (x < 48) | (y < 48) | (x > end) | (y > end)
        for x1, y1, x2, y2 in wall_segments(env.picture):
            for grid, margin in ((solid, 13), (tight, 22)):  # where no agent can be, and where it may get stuck
                grid |= (x > x1 - margin) & (x < x2 + margin) & (y > y1 - margin) & (y < y2 + margin)
        for index, (object_x, object_y) in enumerate(env.objects):
            near = np.maximum(abs(x - object_x), abs(y - object_y))
            if index == env.goal:
                goal = near < envs.REACH - 4
            else:
                avoid |= near < envs.REACH + 2
        self.solid, self.avoid = solid, avoid
        self.distance = np.where(goal & ~avoid & ~solid, 0, 9999.0)
        self.heading = np.zeros((size, size))  # of the shortest path, in radians
        queue = [(0.0, i, j) for i, j in np.argwhere(self.distance == 0).tolist()]
        best, cost = self.distance.tolist(), np.where(solid | avoid, np.inf, np.where(tight, 5, 1)).tolist()
        steps = [(i, j, CELL * math.hypot(i, j)) for i, j in itertools.product((-1, 0, 1), repeat=2) if i or j]
        while queue:
            distance, i, j = heapq.heappop(queue)
            for di, dj, length in steps:
                longer = distance + length * cost[i + di][j + dj]
                if longer < best[i + di][j + dj]:
                    best[i + di][j + dj] = longer
                    self.heading[i + di, j + dj] = math.atan2(-dj, -di)
                    heapq.heappush(queue, (longer, i + di, j + dj))
        self.distance = np.array(best)

    def cell(self, position):
        return tuple((position // CELL).astype(int).clip(0, len(self.solid) - 1).T)

    def move(self, position, velocity, angle, held, tics, actions):
        """One tic of the engine: it ignores the first 7, turns slowly in the first 5 of a turn, and has friction."""
        forward = actions == 0
        held = np.where(forward, 0, held + 1)
        if tics < 7:
            return position, velocity, angle, held
        turn = np.where(held <= 5, 1.7578125, 7.03125) * np.select([actions == 1, actions == 2], [1, -1], 0)
        angle = angle + np.radians(turn)
        thrust = np.where(forward, 1.5625, 0)[:, None] * np.stack([np.cos(angle), np.sin(angle)], -1)
        velocity = velocity * 0.90625 + thrust
        return position + velocity, velocity, angle, held

    def action(self):
        read = self.env.game.get_game_variable
        speed = [read(vizdoom.GameVariable.VELOCITY_X), read(vizdoom.GameVariable.VELOCITY_Y)]
        start = ([self.env.x, self.env.y], speed, np.radians(self.env.angle), self.held)
        position, velocity, angle, held = (np.repeat([value], len(PLANS), 0) for value in start)
        hit, won, score = (np.zeros(len(PLANS), bool), np.zeros(len(PLANS), bool), np.zeros(len(PLANS)))
        for step, tic in itertools.product(range(PLANS.shape[1]), range(envs.TICS)):
            state = (position, velocity, angle, held, self.tics + step * envs.TICS + tic, PLANS[:, step])
            position, velocity, angle, held = self.move(*state)
            stuck = self.solid[self.cell(position)][:, None]
            position, velocity = np.where(stuck, state[0], position), np.where(stuck, 0, velocity)
            cell = self.cell(position)
            won |= ~hit & (self.distance[cell] == 0)
            hit |= ~won & self.avoid[cell]
            score -= won  # sooner is better
        off_course = abs((angle - self.heading[cell] + np.pi) % (2 * np.pi) - np.pi)
        score += np.where(won, -1000, self.distance[cell] + 40 * off_course + 5000 * hit)
        action = int(PLANS[score.argmin(), 0])
        self.held = 0 if action == 0 else self.held + envs.TICS
        self.tics += envs.TICS
        return action


def reach_action(env):
    """R1 to R3: damped least squares on the tip's Jacobian, to the goal's box from above so as to pass over others."""
    target = env.box_positions[list(env.box_classes).index(env.goal)].copy()
    if np.linalg.norm(target[:2] - env.tip[:2]) > 0.06:
        target[2] += 0.2
    jacobian = np.zeros((3, env.model.nv))
    env.mujoco.mj_jacSite(env.model, env.data, jacobian, None, env.model.site("tip").id)
    joints = jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + 0.01 * np.eye(3), target - env.tip)
    action = joints / (envs.PHYSICS_STEPS * env.model.opt.timestep * env.joint_speed)
    return (action / max(1, np.abs(action).max())).astype(np.float32)

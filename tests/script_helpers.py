"""What the tests of the two training scripts share."""

import pytest
import torch

import a3c_gace_vizdoom as a3c
import sac_gace_ur5 as sac

BOTH = pytest.mark.parametrize("script", [a3c, sac], ids=["a3c", "sac"])
TINY = "--total-updates 4 --eval-every 2 --episodes 2 --accuracy-states 1 --goal-batch-size 4 --goal-storage-size 500"
TINY = {  # flags of a run of a few seconds
    a3c: f"{TINY} --num-workers 1 --num-envs 2 --warmup 2".split(),
    sac: f"{TINY} --warmup 420 --epsilon-n 1 --batch-size 4 --hidden-size 16 --replay-size 2000 --no-cuda".split(),
}
ENDLESS = ["--total-updates", "100000", "--eval-every", "100000", "--checkpoint-every", "0.5"]


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10, check_dtype=False)


def linear(layer, x):
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)

"""Two test processes share two cores (pytest -n 2), so every process computes with one thread."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

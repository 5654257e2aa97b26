"""The data of elastic_worker.py: each row is a number, the gradient of a parameter is the mean of the rows."""

from __future__ import annotations

import numpy as np

ROWS, BATCH, RATE = 60, 10, 0.25
STEPS = ROWS // BATCH
X = (np.arange(ROWS, dtype="f4")[:, np.newaxis] % 17 + 1) / 8

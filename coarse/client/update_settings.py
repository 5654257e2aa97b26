"""A worker's update settings for each parameter: the records in TensorGroup.settings()."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from coarse.kernels import _native


class Rule(IntEnum):
    """How a parameter is updated: UpdateRule of update.hpp, which names the states of each rule."""

    NONE = 0
    SGD = 1
    SGD_MOMENTUM = 2
    SGD_NESTEROV = 3
    ADAM = 4
    ADAGRAD = 5
    LION = 6
    AMSGRAD = 7


SETTINGS_DTYPE = np.dtype(
    {
        "names": [
            "rule",
            "gradient_scale",
            "gradient_decay",
            "parameter_scale",
            "step_size",
            "first_decay",
            "first_weight",
            "momentum",
            "second_decay",
            "second_weight",
            "second_scale",
            "epsilon",
            "update_number",
            "written",
            "has_gradient",
        ],
        "formats": ["u4", *["f4"] * 11, "u4", "u4", "u4"],
        "itemsize": _native.UPDATE_SETTINGS_BYTES,
    }
)
"""One tensor's settings: UpdateSettings of kernels/include/coarse/reduce/update.hpp, which states the formulas."""

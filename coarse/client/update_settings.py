"""How a worker tells memory devices to update a parameter: the records in TensorGroup.settings()."""

from __future__ import annotations

import numpy as np

from coarse.kernels import _native

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
            "has_gradient",
        ],
        "formats": ["u4", *["f4"] * 11, "u4", "u4"],
        "itemsize": _native.UPDATE_SETTINGS_BYTES,
    }
)
"""One tensor's settings: UpdateSettings of coarse/kernels/include/coarse/update.hpp, which has the formulas."""

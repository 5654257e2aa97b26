"""Entry point of `import torch` where COARSE is installed: registers the backend "coarse" with torch.distributed."""

from __future__ import annotations

import contextlib
from typing import Any

NAME = "coarse"


def register() -> None:
    """Registers the backend for tensors on cpu and cuda; never raises, and imports nothing of COARSE. Idempotent.

    The entry point of group `torch.backends`. Whatever goes wrong here would make `import torch` fail, so that it
    must not; who asks for the backend then hears from torch that it is unknown.
    """
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, _backend_options: Any) -> Any:
    from coarse.torch.backend import create_backend

    return create_backend(options)

"""Arguments that several commands share, and their argparse types."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from coarse.env import MOST_WORKERS_OF_A_NODE


def add_job(parser: argparse.ArgumentParser) -> None:
    """Adds JOB, the running job that a command is about."""
    parser.add_argument(
        "job",
        metavar="JOB",
        nargs="?",
        default="",
        help="id of the job, or its beginning (default: the only one)",
    )


def add_nodes(parser: argparse.ArgumentParser) -> None:
    """Adds --metrics, the other nodes of a job that a command shows, as `nodes`."""
    parser.add_argument(
        "--metrics",
        dest="nodes",
        type=_endpoint,
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="also show the node whose metrics are served there (COARSE_METRICS_PORT); may be repeated",
    )


def whole_number(text: str, what: str, low: int, high: float) -> int:
    """Reads a whole number from `low` to `high`.

    Raises:
        argparse.ArgumentTypeError: If it is not `what`.
    """
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def num_workers(text: str) -> int:
    """Reads the number of workers of a node.

    Raises:
        argparse.ArgumentTypeError: If the number is not possible for a node.
    """
    most = MOST_WORKERS_OF_A_NODE
    return whole_number(text, f"a number of workers of one node, from 1 to {most}", 1, most)


def seconds(text: str) -> float:
    """Reads a time in seconds, at least 0.

    Raises:
        argparse.ArgumentTypeError: If `text` is not such a time.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds")
    return value


def _endpoint(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or set(host) & set("/?#@ "):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return f"{host}:{port_number(port)}"


def file_to_write(text: str) -> Path:
    """Reads the path of a result file, and checks it before any work begins.

    Raises:
        argparse.ArgumentTypeError: If no file can be written there.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: is a folder; name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: cannot be written")
    return path


def file_of_new_folder(text: str) -> Path:
    """As file_to_write(), for a file whose folder is created later if necessary."""
    path = Path(text)
    if not path.parent.exists():
        folder_to_write(os.fspath(path.parent))
        return path
    return file_to_write(text)


def folder_to_write(text: str) -> Path:
    """Reads the path of a folder for results, which is created later if necessary.

    Raises:
        argparse.ArgumentTypeError: If the folder is not writable.
    """
    path = Path(text)
    there_is = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not there_is.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: {there_is} is no folder")
    if not os.access(there_is, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text}: {there_is} cannot be written to")
    return path


def port_number(text: str) -> int:
    """Reads a port.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    return whole_number(text, "a port from 1 to 65535", 1, 65535)

"""`coarse checkpoint`: lists, shows, verifies, exports, pins and removes checkpoints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coarse.cli.display.tables import TABLE_WIDTH
from coarse.errors import CheckpointError, FolderClaimedError

if TYPE_CHECKING:  # `coarse --help` must not load these
    from coarse.checkpoint.catalogue import Listed
    from coarse.checkpoint.folder import Folder
    from coarse.checkpoint.names import CheckpointName
    from coarse.checkpoint.reader import Checkpoint

_EXIT_DAMAGED = 1
_FORMATS = ("safetensors", "torch", "dcp")


def add_parser(subparsers: Any) -> None:
    """Adds `checkpoint` to the `coarse` command."""
    parser = subparsers.add_parser(
        "checkpoint", help="list, show, verify, export, pin and remove checkpoints", description=__doc__
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listing = _action(actions, "list", run_list, "list all checkpoints of a folder")
    show = _action(actions, "show", run_show, "show the contents of a checkpoint")
    show.add_argument("--tensors", action="store_true", help="also list every tensor")
    verify = _action(actions, "verify", run_verify, "read every byte and compare its checksums")
    export = _action(actions, "export", run_export, "write a checkpoint in another format")
    prune = _action(actions, "prune", run_prune, "remove all except the newest and the pinned ones")
    pin = _action(actions, "pin", run_pin, "keep a checkpoint regardless of its age")

    for action in (show, export):
        _add_checkpoint(action, nargs="?", default=None, text="default: the newest complete one")
    verify.add_argument("checkpoints", nargs="*", metavar="CHECKPOINT", help="default: all")
    _add_checkpoint(pin, text="step-N, or N")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="PATH", help="new file or folder")
    export.add_argument(
        "--format",
        choices=_FORMATS,
        default="safetensors",
        help="safetensors: the model's state dict in one file; torch: a file for torch.load with model and "
        "optimizer; dcp: a folder for torch.distributed.checkpoint with both; default: %(default)s",
    )
    prune.add_argument(
        "--keep", type=int, required=True, metavar="K", help="number of newest checkpoints to keep"
    )
    prune.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    prune.add_argument(
        "--unfinished",
        action="store_true",
        help="also remove files of killed saves; no job may be saving there",
    )
    pin.add_argument("--undo", action="store_true", help="unpin the checkpoint")
    for action in (listing, show, verify, prune):
        action.add_argument("--json", action="store_true", help="print JSON")


def run_list(arguments: argparse.Namespace) -> int:
    """Prints all checkpoints of a folder, and incomplete ones with the reason; returns 0."""
    from coarse.checkpoint.catalogue import list_checkpoints, read_hint, unfinished_in

    with _open(arguments) as folder:
        listed = list_checkpoints(folder)
        unfinished, hint = unfinished_in(folder), read_hint(folder)
    if arguments.json:
        latest = str(hint) if hint else None
        print(_json({"checkpoints": list(map(_summary, listed)), "unfinished": unfinished, "latest": latest}))
        return 0
    _print_table(
        str(arguments.folder),
        ("checkpoint", "saved (UTC)", "size", "tensors", "workers", "pinned", "state"),
        [_row(each) for each in listed],
    )
    for name in unfinished:
        print(f"{name}: being written, or left by a save that was killed")
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Prints the contents of one checkpoint; returns 0."""
    with _open(arguments) as folder, _open_checkpoint(folder, arguments.checkpoint) as checkpoint:
        if arguments.json:
            print(_json(_details(checkpoint, with_tensors=arguments.tensors)))
        else:
            _show(checkpoint, with_tensors=arguments.tensors)
    return 0


def run_verify(arguments: argparse.Namespace) -> int:
    """Reads every byte; returns 1 if one is wrong.

    Raises:
        CheckpointError: If there is no checkpoint.
    """
    from coarse.checkpoint.catalogue import names_of, open_verified
    from coarse.checkpoint.progress import SaveProgress

    results = []
    with _open(arguments) as folder:
        names = [_name(text) for text in arguments.checkpoints] or names_of(folder)
        if not names:
            raise CheckpointError(f"{arguments.folder} contains no checkpoints")
        for name in names:
            reason, by = "", "CRC32C"
            try:
                with (
                    SaveProgress(f"verify {name}") as progress,
                    open_verified(folder, name, progress, digests=True) as checkpoint,
                ):
                    by += " and SHA-256" * checkpoint.manifest.has_digests
            except (CheckpointError, OSError) as error:
                reason = str(error)
            results.append({"checkpoint": str(name), "whole": not reason, "reason": reason})
            if not arguments.json:
                print(f"{name}: {reason or f'every byte is right by {by}'}")
    if arguments.json:
        print(_json(results))
    return 0 if all(result["whole"] for result in results) else _EXIT_DAMAGED


def run_export(arguments: argparse.Namespace) -> int:
    """Writes a checkpoint in another format; returns 0."""
    from coarse.checkpoint.progress import SaveProgress

    with (
        _open(arguments) as folder,
        _open_checkpoint(folder, arguments.checkpoint) as checkpoint,
        SaveProgress("export") as progress,
    ):
        if arguments.format == "safetensors":
            from coarse.checkpoint.export import export_safetensors as export
        elif arguments.format == "torch":
            from coarse.torch.checkpoint.export import export_torch as export
        else:
            from coarse.torch.checkpoint.export import export_dcp as export
        export(checkpoint, arguments.output, progress)
        print(f"{checkpoint.path.name} as {arguments.format}: {arguments.output}")
    return 0


def run_prune(arguments: argparse.Namespace) -> int:
    """Removes old checkpoints; returns 0."""
    from coarse.checkpoint.catalogue import prune, remove_unfinished, superseded, unfinished_in
    from coarse.checkpoint.claim import Claim

    if arguments.keep < 1:
        raise CheckpointError(f"--keep {arguments.keep}: at least one checkpoint is kept")
    with _open(arguments) as folder:
        look = arguments.dry_run
        claim = Claim(folder)
        if arguments.unfinished and not look and not claim.take():
            raise FolderClaimedError(f"a job saves to {folder.path}, so unfinished saves may be its own")
        gone = [str(n) for n in (superseded if look else prune)(folder, keep=arguments.keep)]
        if arguments.unfinished:
            gone += (unfinished_in if look else remove_unfinished)(folder)
        claim.release()
    if arguments.json:
        print(_json({"removed": [] if look else gone, "removable": gone if look else []}))
    else:
        for name in gone:
            print(f"{'would remove' if look else 'removed'} {name}")
    return 0


def run_pin(arguments: argparse.Namespace) -> int:
    """Pins or unpins a checkpoint; returns 0."""
    from coarse.checkpoint.catalogue import pin, unpin

    with _open(arguments) as folder:
        (unpin if arguments.undo else pin)(folder, _name(arguments.checkpoint))
    return 0


def _action(actions: Any, name: str, handler: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of a job's checkpoints")
    parser.set_defaults(handler=handler)
    return parser


def _add_checkpoint(parser: argparse.ArgumentParser, *, text: str, **options: Any) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=text, **options)


def _open(arguments: argparse.Namespace) -> Folder:
    from coarse.checkpoint.folder import Folder

    return Folder.open(arguments.folder)


def _open_checkpoint(folder: Folder, name: str | None) -> Checkpoint:
    from coarse.checkpoint.catalogue import list_checkpoints
    from coarse.checkpoint.reader import open_checkpoint

    if name is not None:
        return open_checkpoint(folder, _name(name))
    whole = [each.name for each in list_checkpoints(folder) if each.manifest is not None]
    if not whole:
        raise CheckpointError(f"{folder.path} has no complete checkpoint; see `coarse checkpoint list`")
    return open_checkpoint(folder, whole[-1])


def _name(text: str) -> CheckpointName:
    from coarse.checkpoint.names import CheckpointName

    name = CheckpointName.parse(text) or CheckpointName.parse(f"step-{text}")
    if name is None:
        raise CheckpointError(f"{text!r} is not the name of a checkpoint; write step-N, or N")
    return name


def _summary(listed: Listed) -> dict[str, Any]:
    manifest = listed.manifest
    return {
        "checkpoint": str(listed.name),
        "step": listed.name.step,
        "whole": manifest is not None,
        "reason": listed.reason,
        "pinned": listed.is_pinned,
        "created": manifest.created if manifest else None,
        "bytes": manifest.num_bytes if manifest else None,
        "tensors": manifest.num_tensors if manifest else None,
        "workers": manifest.world_size if manifest else None,
    }


def _row(listed: Listed) -> tuple[str, ...]:
    pinned = "yes" if listed.is_pinned else ""
    manifest = listed.manifest
    if manifest is None:
        return (str(listed.name), "", "", "", "", pinned, listed.reason)
    return (
        str(listed.name),
        manifest.created.removesuffix("+00:00").replace("T", " "),
        _size(manifest.num_bytes),
        str(manifest.num_tensors),
        str(manifest.world_size),
        pinned,
        "whole",
    )


def _details(checkpoint: Checkpoint, *, with_tensors: bool) -> dict[str, Any]:
    manifest = checkpoint.manifest
    details = {
        "checkpoint": checkpoint.path.name,
        "step": manifest.step,
        "created": manifest.created,
        "coarse_version": manifest.coarse_version,
        "workers": manifest.world_size,
        "tensors": manifest.num_tensors,
        "schema_sha256": manifest.schema_sha256,
        "optimizer": manifest.optimizer,
        "files": [{"name": f.name, "bytes": f.num_bytes, "sha256": f.sha256} for f in manifest.files],
    }
    if with_tensors:
        details["tensor_list"] = [
            {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
            for tensor in checkpoint.tensors
        ]
    return details


def _show(checkpoint: Checkpoint, *, with_tensors: bool) -> None:
    manifest = checkpoint.manifest
    optimizer = manifest.optimizer or {}
    rows = [
        ("step", str(manifest.step)),
        ("saved (UTC)", manifest.created),
        ("by coarse", manifest.coarse_version),
        ("workers", str(manifest.world_size)),
        ("tensors", f"{manifest.num_tensors}, {_size(manifest.num_bytes)}"),
        ("optimizer", f"{optimizer['class']}" if optimizer else "none"),
        ("workers' own state", "yes" if manifest.state_files else "none"),
    ]
    for index, group in enumerate(optimizer.get("param_groups", ())):
        settings = ", ".join(f"{key}={value}" for key, value in group.items() if key != "params")
        rows.append((f"group {index}", f"{len(group['params'])} parameters; {settings}"))
    _print_table(checkpoint.path.name, ("what", "value"), rows)
    _print_table(
        "Files",
        ("name", "size", "SHA-256"),
        [(file.name, _size(file.num_bytes), file.sha256 or "not taken") for file in manifest.files],
    )
    if with_tensors:
        tensors = [(t.name, t.dtype, str(list(t.shape)), _size(t.nbytes)) for t in checkpoint.tensors]
        _print_table("Tensors", ("name", "dtype", "shape", "size"), tensors)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 1 << 20 else f"{num_bytes} B"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2)


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:  # avoids truncated tables in files
        console.width = TABLE_WIDTH
    drawn = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        is_number = column in ("size", "tensors", "workers")
        drawn.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*map(escape, row))
    console.print(drawn)

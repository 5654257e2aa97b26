"""Examples of each command, which end its help text."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

EXAMPLES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "coarse": {
            "coarse doctor": "what this machine has and lacks",
            "coarse run -n 2 train.py": "two workers and two memory devices",
            "coarse run --help": "the options of a command",
        },
        "coarse run": {
            "coarse run -n 2 train.py --epochs 3": "a script and its arguments",
            "coarse run -n 2 -m package.train": "a module",
            "coarse run -n 2 --dashboard train.py": "watch the job in the browser",
            "coarse run -n 2 --timeline trace.json.gz train.py": "record a trace for Perfetto",
            "coarse run -n 2 --max-restarts 3 --keep-devices 60 train.py": "continue after a crash",
            "coarse run -n 4 --min-workers 2 train.py": "continue with fewer workers",
            "coarse run -n 1 --join": "add a worker to that job",
            "coarse run --nnodes 2 --master-addr node0 --master-port 29500 train.py": "the first of two nodes",
        },
        "coarse status": {
            "coarse status": "the only job of this node",
            "coarse status 7ce4 --stacks": "one of several, with all Python stacks",
        },
        "coarse top": {
            "coarse top": "the only job of this node",
            "coarse top 7ce4 --every 5": "one of several, every five seconds",
            "coarse top --once | less": "one reading, as plain text",
            "coarse top --metrics node1:9400": "with another node's metrics",
        },
        "coarse dashboard": {
            "coarse dashboard": "the only job of this node",
            "coarse dashboard --metrics node1:9400": "with another node's metrics",
            "coarse dashboard --record job.jsonl": "keep what the page shows",
            "coarse dashboard --open job.jsonl": "show it again",
        },
        "coarse doctor": {
            "coarse doctor": "a table with advice",
            "coarse doctor --json > doctor.json": "for a report",
        },
        "coarse bench": {
            "coarse bench sync --against gloo": "an all-reduce beside gloo's",
            "coarse bench train-step --help": "the options of a benchmark",
        },
        "coarse bench sync": {
            "coarse bench sync --sizes 64KiB,25MiB --against gloo": "two sizes, one peer",
            "coarse bench sync --workers 4 --json sync.jsonl": "keep the records",
        },
        "coarse bench train-step": {
            "coarse bench train-step --model bert-small": "COARSE and torch DDP",
            "coarse bench train-step --offload-optimizer --against ddp": "with the optimizer in memory devices",
        },
        "coarse bench replay": {
            "coarse bench replay --machine aws-p3": "all schemes, BERT-large",
            "coarse bench replay --machine aws-p3 --schemes coarse,allreduce": "two of them",
        },
        "coarse bench checkpoint": {
            "coarse bench checkpoint --model bert-small": "saves to the temporary folder",
            "coarse bench checkpoint --folder saves --against torch": "to a disk, one peer",
        },
        "coarse bench memory": {
            "coarse bench memory --model bert-small --no-limits": "peaks alone",
            "coarse bench memory --batch 4 --against ddp": "one peer",
        },
        "coarse machine": {
            "coarse machine list": "the machines that can be emulated",
            "coarse machine show --here": "this machine",
        },
        "coarse machine list": {"coarse machine list": "names and descriptions"},
        "coarse machine show": {
            "coarse machine show aws-p3": "figures with their sources",
            "coarse machine show --here": "this machine",
        },
        "coarse machine check": {"coarse machine check mine.toml": "before a run uses it"},
        "coarse profile": {
            "coarse profile": "this machine's links",
            "coarse profile --workers 4 --json links.json": "keep them for `coarse plan`",
            "coarse profile --machine aws-p3": "emulated links",
        },
        "coarse plan": {
            "coarse plan --model bert-large": "from this machine's last profile",
            "coarse plan --machine aws-p3 --show-routing": "from another machine's links",
            "coarse plan --model bert-base --what-if cxl2-x8": "a step here and there",
        },
        "coarse simulate": {
            "coarse simulate --machine aws-p3": "BERT-large under three schemes",
            "coarse simulate --machine cxl-pool --workers 64": "a generated machine",
            "coarse simulate --machine cxl2-x8 --straggler 3=1.5": "a slow worker",
            "coarse simulate --list": "studies of documents",
        },
        "coarse checkpoint": {
            "coarse checkpoint list saves": "all checkpoints of a folder",
            "coarse checkpoint export saves -o model.safetensors": "the newest one's model",
        },
        "coarse checkpoint list": {"coarse checkpoint list saves": "with sizes and states"},
        "coarse checkpoint show": {
            "coarse checkpoint show saves": "the newest one",
            "coarse checkpoint show saves step-200 --tensors": "another one, with its tensors",
        },
        "coarse checkpoint verify": {
            "coarse checkpoint verify saves": "all checkpoints",
            "coarse checkpoint verify saves step-100 step-200": "two of them",
        },
        "coarse checkpoint export": {
            "coarse checkpoint export saves -o model.safetensors": "the newest one's model",
            "coarse checkpoint export saves step-200 --format torch -o all.pt": "model and optimizer",
        },
        "coarse checkpoint prune": {
            "coarse checkpoint prune saves --keep 3 --dry-run": "what would be removed",
            "coarse checkpoint prune saves --keep 3": "remove it",
        },
        "coarse checkpoint pin": {
            "coarse checkpoint pin saves step-200": "never remove it",
            "coarse checkpoint pin saves step-200 --undo": "remove it with the others",
        },
        "coarse completion": {
            "coarse completion bash > ~/.local/share/bash-completion/completions/coarse": "",
            "coarse completion zsh > ~/.zfunc/_coarse": "if ~/.zfunc is in $fpath",
        },
        "coarse timeline": {"coarse timeline merge trace.json.gz": "after a job of torchrun"},
        "coarse timeline merge": {
            "coarse timeline merge trace.json.gz": "after a job of torchrun",
            "coarse timeline merge trace.json.gz --keep-parts": "to merge them again",
        },
    }
)
"""Commands and their purposes by `prog` of the parser. `coarse device` has none: sessions start it."""

_WIDTH, _GAP = 80, 2


def examples_of(prog: str) -> str:
    """The examples of a command as text of at most 80 columns; "" if it has none."""
    examples = EXAMPLES.get(prog)
    if not examples:
        return ""
    widest = _WIDTH - _GAP - max(map(len, examples.values()))
    lines = [f"  {command}" for command in examples]
    column = max((len(line) for line in lines if len(line) <= widest), default=4) + _GAP
    described: list[str] = []
    for line, purpose in zip(lines, examples.values(), strict=True):
        if len(line) > widest:
            described.append(line)
            line = ""
        described.append(f"{line:<{column}}{purpose}".rstrip())
    return "\n".join(["", "examples:", *filter(None, described), ""])

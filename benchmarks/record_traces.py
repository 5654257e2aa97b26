"""Measures the compute traces that COARSE ships, on this machine. It ran once; its results are committed.

python benchmarks/record_traces.py --model bert-large --batch 2 --sequence 384
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from coarse.bench.models import MODELS, build_workload
from coarse.bench.provenance import BenchMachine
from coarse.bench.replay.trace import record_trace

_TRACES = Path(__file__).parents[1] / "coarse" / "bench" / "replay" / "traces"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--sequence", type=int, default=0, help="tokens of a sample; 0 for images")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    workload = build_workload(arguments.model, batch=arguments.batch, sequence=arguments.sequence, rank=0)
    workload.module.train()
    trace = record_trace(
        workload.module,
        lambda: workload.loss(workload.module, workload.batches[0]),
        model=arguments.model,
        batch=arguments.batch,
        sequence=arguments.sequence,
        source=f"measured on {BenchMachine.here()}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        "float32",
        repeats=arguments.repeats,
    )
    (_TRACES / f"{arguments.model}.json").write_text(trace.to_json(), encoding="utf-8")
    print(
        f"{trace.model}: {len(trace.events)} gradients of {trace.nbytes / 1e6:.0f} MB, "
        f"forward {trace.forward_s:.2f} s, backward {trace.backward_s:.2f} s, {trace.flops / 1e12:.2f} Tflop"
    )


if __name__ == "__main__":
    main()

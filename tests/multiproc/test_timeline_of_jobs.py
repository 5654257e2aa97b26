"""`coarse run --timeline`: one trace of real workers and memory devices, on one clock, however the job ends."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from chrome_trace import read_trace
from run_harness import LIMIT_S, coarse_run, environment, spawned

from coarse.cli.main import main
from coarse.tuning.first_steps import TIMED_STEPS

pytest.importorskip("torch", reason="coarse.torch needs PyTorch")

SCRIPT = Path(__file__).with_name("timeline_script.py")
TENSORS = {"0.weight": 64 * 256, "0.bias": 256, "2.weight": 256 * 8, "2.bias": 8}
DEVICES = ("memory device md0", "memory device md1")
WORKERS = ("worker 0", "worker 1")
STEPS = 4


def run_job(target, *arguments, flags=(), **variables):
    done = coarse_run(
        "-n",
        "2",
        "--timeline",
        target,
        "--shard-bytes",
        "16KiB",
        "--gather-bytes",
        "4KiB",
        *flags,
        SCRIPT,
        "--steps",
        STEPS,
        *arguments,
        variables=variables,
    )
    assert done.returncode == 0, done.stderr
    return read_trace(target), done


def of_tensor(slices, tensor):
    return [each for each in slices if tensor in each.name.split()]


@pytest.fixture(scope="module")
def averaging(tmp_path_factory):
    """The trace of a job whose memory devices average gradients, with its output."""
    return run_job(tmp_path_factory.mktemp("timeline") / "trace.json.gz")


def test_all_processes_and_their_threads_have_names(averaging):
    trace, _ = averaging
    assert set(trace.processes.values()) == {*WORKERS, *DEVICES}
    threads = {(trace.processes[pid], name) for (pid, _), name in trace.threads.items()}
    assert {(worker, "main thread") for worker in WORKERS} <= threads
    assert {(device, "sync core 0") for device in DEVICES} & threads


def test_the_launcher_says_where_the_trace_is_and_leaves_no_parts(averaging):
    _, done = averaging
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("coarse run: timeline")]
    assert "trace.json.gz: " in said
    assert "events of 4 processes; open it in https://ui.perfetto.dev" in said
    folder = Path(said.split(": ")[2]).parent
    assert [each.name for each in folder.iterdir()] == ["trace.json.gz"]


def test_each_gradient_is_ready_and_then_pushed_once_in_each_step(averaging):
    trace, _ = averaging
    for worker, tensor in itertools.product(WORKERS, TENSORS):
        ready = [each for each in trace.moments if (each.process, each.name) == (worker, f"ready {tensor}")]
        pushes = trace.named(f"push {tensor}", worker)
        assert [each.arguments["step"] for each in pushes] == [1, 2, 3, 4]
        assert len(ready) == STEPS
        for moment, push in zip(ready, pushes, strict=True):
            assert moment.begin_ns <= push.begin_ns
            assert push.arguments["bytes"] == 4 * TENSORS[tensor]


def test_every_shard_is_reduced_after_all_pushes_and_before_the_pulls_end(averaging):
    """The times are those of four processes."""
    trace, _ = averaging
    for tensor, step in itertools.product(TENSORS, range(1, STEPS + 1)):
        pushes = [each for each in trace.named(f"push {tensor}") if each.arguments["step"] == step]
        reductions = [
            each
            for each in of_tensor(trace.named("reduce"), tensor)
            if each.process in DEVICES and each.arguments["step"] == step
        ]
        assert sum(each.arguments["bytes"] for each in reductions) == 4 * TENSORS[tensor]
        assert len(pushes) == 2
        for reduction, push in itertools.product(reductions, pushes):
            assert push.begin_ns <= reduction.begin_ns
        for worker in WORKERS:
            pulls = [each for each in trace.named("pull all of", worker) if len(each.name.split()) == 4]
            ends = [each.end_ns for each in pulls if each.end_ns >= max(r.end_ns for r in reductions)]
            assert len(ends) >= STEPS + 1 - step


def test_a_large_tensor_is_reduced_in_shards_that_are_numbered(averaging):
    trace, _ = averaging
    names = {each.name for each in of_tensor(trace.named("reduce"), "0.weight")}
    assert names == {f"reduce 0.weight [{number}/4]" for number in range(1, 5)}


def test_arrows_lead_from_each_push_to_the_reduction_and_to_the_pull(averaging):
    trace, _ = averaging
    arrows = [arrow for arrow in trace.arrows if of_tensor(arrow[:1], "0.weight")]
    assert len(arrows) == 2 * STEPS
    for push, reduction, pull in arrows:
        assert push.process in WORKERS
        assert reduction.process in DEVICES
        assert reduction.name == "reduce 0.weight [1/4]"
        assert pull.process == push.process
        assert pull.name.startswith(("pull", "wait for"))
        assert push.begin_ns <= reduction.begin_ns <= pull.end_ns


def test_a_step_is_forward_and_backward_and_the_optimizer_in_this_order(averaging):
    trace, _ = averaging
    for worker in WORKERS:
        forward, backward, step = (trace.named(name, worker) for name in ("forward", "backward", "step SGD"))
        assert len(forward) == len(backward) == len(step) == STEPS
        for first, second, third in zip(forward, backward, step, strict=True):
            assert first.end_ns <= second.begin_ns < second.end_ns <= third.begin_ns
        pushes = [each for tensor in TENSORS for each in trace.named(f"push {tensor}", worker)]
        for push in pushes:
            assert any(each.begin_ns <= push.begin_ns <= push.end_ns <= each.end_ns for each in backward)


def test_waits_lie_in_pulls_and_say_for_whom(averaging):
    trace, _ = averaging
    other = dict(zip(WORKERS, WORKERS[::-1], strict=True))
    waits = [each for each in trace.named("wait for") if each.category == "wait"]
    assert waits
    for wait in waits:
        assert wait.process in WORKERS
        assert wait.name in {f"wait for {other[wait.process]}", "wait for memory devices"}
        around = [*trace.named("pull", wait.process), *trace.named("all-reduce of", wait.process)]
        assert any(each.begin_ns <= wait.begin_ns and wait.end_ns <= each.end_ns for each in around)


def test_traffic_is_counted(averaging):
    trace, _ = averaging
    assert {(worker, "link traffic (GB/s)") for worker in WORKERS} <= trace.counters


def test_updates_snapshots_and_checkpoints_are_in_the_trace(tmp_path):
    trace, _ = run_job(tmp_path / "trace.json", "--offload", "--save-to", tmp_path / "saved")
    assert len(trace.named("step DistributedOptimizer", "worker 1")) == STEPS
    for tensor in TENSORS:
        updates = of_tensor(trace.named("update"), tensor)
        assert {each.process for each in updates} <= set(DEVICES)
        assert {each.arguments["step"] for each in updates}
    (write, *_) = trace.named("write checkpoint", "worker 0")
    (take, *_) = trace.named("take the checkpoint's state", "worker 0")
    assert take.begin_ns <= write.begin_ns


def test_direct_all_reduce_is_in_the_trace(tmp_path):
    steps = TIMED_STEPS + 3
    flags = ("--dual-sync", "0", "--profile", "off")
    trace, _ = run_job(tmp_path / "trace.json", "--steps", steps, flags=flags)
    for worker in WORKERS:
        reductions = trace.named("reduce own pieces", worker)
        copies = trace.named("copy pieces of others", worker)
        assert len(reductions) == len(copies)
        assert 1 < len(reductions) <= 3
        for reduction, copy in zip(reductions, copies, strict=True):
            assert reduction.end_ns <= copy.begin_ns


def test_emulated_links_carry_transfers(tmp_path):
    trace, _ = run_job(tmp_path / "trace.json", flags=("--machine", "aws-p3"))
    names = {each.name for each in trace.transfers}
    assert {"worker 0 to md0", "md0 to worker 0"} <= names


def test_torchs_profiler_shows_the_operations_by_name(tmp_path):
    _, done = run_job(tmp_path / "trace.json", "--profile")
    said = {line.removeprefix("[w1] ") for line in done.stdout.splitlines() if line.startswith("[w1]")}
    assert said == {
        "coarse::forward",
        "coarse::pull",
        "coarse::deliver averages",
        *(f"coarse::push {tensor}" for tensor in TENSORS),
    }


def test_a_job_that_fails_has_a_trace_up_to_its_end(tmp_path):
    target = tmp_path / "trace.json"
    done = coarse_run("-n", "2", "--timeline", target, SCRIPT, "--kill", "1")
    assert done.returncode != 0
    trace = read_trace(target)
    assert set(trace.processes.values()) == {*WORKERS, *DEVICES}
    assert len(trace.named("step SGD", "worker 1")) == STEPS


def test_a_job_that_is_interrupted_has_a_trace(tmp_path):
    target = tmp_path / "trace.json"
    with spawned(
        "-n", "2", "--timeline", str(target), str(SCRIPT), "--wait", stdout=PIPE, stderr=PIPE
    ) as launcher:
        for _ in WORKERS:
            assert b"waiting" in launcher.stdout.readline()
        launcher.send_signal(signal.SIGINT)
        _, stderr = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 128 + signal.SIGINT
    assert b"events of 4 processes" in stderr
    assert len(read_trace(target).named("forward", "worker 0")) == STEPS


def test_torchrun_leaves_parts_which_the_command_merges(tmp_path):
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(SCRIPT),
    ]
    merging = [sys.executable, "-m", "coarse", "timeline", "merge", "trace.json"]
    for command in (torchrun, merging):
        subprocess.run(
            command,
            env=environment(COARSE_TIMELINE="trace.json"),
            cwd=tmp_path,
            check=True,
            timeout=LIMIT_S,
        )
    assert set(read_trace(tmp_path / "trace.json").processes.values()) == {*WORKERS, *DEVICES}
    assert os.listdir(tmp_path) == ["trace.json"]


def test_nodes_leave_parts_which_the_command_merges(tmp_path):
    target = tmp_path / "trace.json"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    place = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    with contextlib.ExitStack() as stack:
        launchers = [
            stack.enter_context(
                spawned(
                    *("-n", "1", *place, "--node-rank", node, "--timeline", str(target), str(SCRIPT)),
                    stderr=PIPE,
                    COARSE_NODE=f"node{node}",
                )
            )
            for node in "01"
        ]
        for launcher in launchers:
            _, stderr = launcher.communicate(timeout=LIMIT_S)
            assert f"run `coarse timeline merge {target}`" in stderr.decode()
            assert launcher.returncode == 0
    assert main(["timeline", "merge", str(target)]) == 0
    trace = read_trace(target)
    assert set(trace.processes.values()) == {
        "worker 0",
        "worker 1 of node 1",
        "memory device md0",
        "memory device md0 of node 1",
    }
    assert trace.notes["clock"] == "monotonic"  # the nodes are one machine
    for tensor in TENSORS:
        assert len(trace.named(f"reduce {tensor}")) >= STEPS
    names = {each.name for each in trace.transfers}
    assert {"to node 1: 2.bias", "from node 0: 2.bias"} <= names or {
        "to node 0: 2.bias",
        "from node 1: 2.bias",
    } <= names


def test_a_folder_that_does_not_exist_is_refused_before_anything_starts(tmp_path):
    done = coarse_run("-n", "2", "--timeline", tmp_path / "missing" / "trace.json", SCRIPT)
    assert done.returncode == 2
    assert "there is no folder" in done.stderr


def test_without_the_setting_nothing_is_recorded(tmp_path):
    done = coarse_run("-n", "2", SCRIPT, "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert "timeline" not in done.stderr

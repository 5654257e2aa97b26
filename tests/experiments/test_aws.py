"""The scripts for AWS: the commands that they run there, and the same runs here with small models."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from experiments.aws.campaign import TRAIN, Nodes, Run, command_of, plan, table_of
from experiments.aws.instances import INSTANCES
from experiments.aws.run import RunError, check, main, table

P3, G5, CPU = INSTANCES["p3.16xlarge"], INSTANCES["g5.48xlarge"], INSTANCES["cpu"]


def result(*, moved=1.0, step_ms=10.0, error=0.0):
    parameters = {"before": [0.0, 0.0], "parameters": [moved + error, -moved]}
    return {**parameters, "step_ms": [step_ms] * 3, "workers": 2}


def test_every_batch_of_both_models_runs_at_every_ratio():
    runs = list(plan(P3, ("ddp", "coarse", "coarse-offload")))
    assert runs == [
        Run(system=system, ratio=ratio, memory=memory, model=model, batch=batch)
        for model, batch in (
            ("resnet50", 64),
            ("resnet50", 128),
            ("bert-large", 2),
            ("bert-large", 4),
            ("bert-large", 8),
        )
        for system, ratio, memory in (
            ("ddp", "", ""),
            ("coarse", "1:1", "host"),
            ("coarse", "2:1", "host"),
            ("coarse", "1:1", "cuda"),
            ("coarse", "2:1", "cuda"),
            ("coarse-offload", "1:1", "host"),
            ("coarse-offload", "2:1", "host"),
            ("coarse-offload", "1:1", "cuda"),
            ("coarse-offload", "2:1", "cuda"),
        )
    ]


@pytest.mark.parametrize("name", sorted(set(INSTANCES) - {"cpu"}))
def test_workers_and_memory_devices_share_no_gpu(name):
    instance = INSTANCES[name]
    for ratio in instance.ratios:
        placed = table_of(instance, ratio)
        workers, devices = map(int, ratio.split(":"))
        assert placed.num_workers == instance.num_workers == len(instance.gpus)
        assert placed.num_workers * devices == placed.num_devices * workers
        assert placed.num_devices == instance.num_devices(ratio)
        used = {*placed.memories, *(f"cuda:{gpu}" for gpu in instance.gpus)}
        assert len(used) == placed.num_devices + placed.num_workers
        assert used <= {f"cuda:{gpu}" for gpu in range(instance.num_gpus)}


def test_a_memory_device_is_beside_the_first_of_its_workers():
    assert table_of(G5, "1:1").memories == ("cuda:1", "cuda:3", "cuda:5", "cuda:7")
    assert [(str(each.memory), each.workers) for each in table_of(G5, "2:1").devices] == [
        ("cuda:1", (0, 1)),
        ("cuda:5", (2, 3)),
    ]


def test_the_paper_s_ring_follows_nvlink_on_v100():
    assert [(str(each.memory), each.workers) for each in table_of(P3, "1:1").devices] == [
        ("cuda:1", (0,)),
        ("cuda:3", (1,)),
        ("cuda:7", (3,)),
        ("cuda:5", (2,)),
    ]


def test_every_system_has_its_launcher(tmp_path):
    def command(system, ratio="", memory="", instance=P3):
        run = Run(system=system, ratio=ratio, memory=memory, model="bert-large", batch=2)
        return " ".join(command_of(run, instance, warm_up=5, steps=50, result=tmp_path / "r"))

    assert command("ddp").startswith(f"{sys.executable} -m coarse run -n 4 {TRAIN} --system ddp ")
    assert "horovodrun --gloo -np 4 " in command("horovod")
    assert "coarse run -n 4 --partition-table " in command("coarse", "1:1", "cuda")
    assert "p3-1to1.toml" in command("coarse", "1:1", "cuda")
    assert "coarse run -n 4 --memory-devices cuda:1,cuda:5 " in command("coarse", "2:1", "cuda")
    assert "coarse run -n 4 --memory-devices cuda:1,cuda:3,cuda:5,cuda:7 " in command(
        "coarse", "1:1", "cuda", G5
    )
    assert "coarse run -n 4 --memory-devices 2 " in command("coarse", "2:1", "host")
    assert "--device cuda --gpus 0,2,4,6 " in command("none")


def test_each_run_of_several_instances_has_a_port_of_its_own(tmp_path):
    nodes = Nodes(number=2, rank=1, master_addr="10.0.0.1", master_port=4000)
    run = Run(system="coarse", ratio="1:1", memory="cuda", model="bert-large", batch=2)
    for number, port in ((0, 4000), (3, 4003)):
        command = command_of(run, P3, nodes.flags(number), warm_up=5, steps=50, result=tmp_path / "r")
        expected = f"coarse run --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port {port} -n 4 --partition"
        assert expected in " ".join(command)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_two_instances_train_together(tmp_path):
    """Both instances are this machine, which COARSE_NODE divides into two nodes."""
    port = free_port()
    shared = ["--instance", "cpu", "--model", "digits", "--steps", "2", "--warm-up", "1"]
    shared += ["--system", "ddp", "--system", "coarse", "--nnodes", "2", "--master-addr", "127.0.0.1"]
    instances = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "experiments.aws.run", *shared),
                *("--node-rank", str(rank), "--master-port", str(port)),
                *("--results", str(tmp_path / str(rank))),
            ],
            cwd=TRAIN.parents[2],
            env=os.environ | {"COARSE_NODE": f"instance {rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    told = [instance.communicate(timeout=300)[0] for instance in instances]
    assert [instance.returncode for instance in instances] == [0, 0], told
    records = [json.loads(line) for line in (tmp_path / "0" / "runs.jsonl").read_text().splitlines()]
    assert [(each["system"], each["ratio"], each["workers"], each["nodes"]) for each in records] == [
        ("ddp", "", 4, 2),
        ("coarse", "1:1", 4, 2),
        ("coarse", "2:1", 4, 2),
    ]
    assert all(
        each["is_checked"] is (None if each["system"] in ("none", "ddp") else True) for each in records
    )
    assert not (tmp_path / "1" / "runs.jsonl").exists()
    assert "| digits | 64 | coarse | 2:1 | host |" in told[0]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--nnodes", "2"], "--nnodes 2 needs --master-addr"),
        (["--nnodes", "2", "--node-rank", "2"], "--node-rank 2 must be from 0 to 1"),
        (["--nnodes", "2", "--master-addr", "a", "--system", "horovod"], "horovod runs on one instance"),
    ],
)
def test_instances_that_cannot_train_together_are_refused(flags, told, capsys):
    with pytest.raises(SystemExit):
        main(["--instance", "cpu", *flags])
    assert told in capsys.readouterr().err


def test_a_model_that_the_instance_does_not_train_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--instance", "cpu", "--model", "resnet"])
    assert "--instance cpu --model resnet: it trains bert-tiny, digits" in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_a_run_that_failed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("experiments.aws.campaign.find_program", lambda name: None)
    arguments = ["--instance", "cpu", "--model", "digits", "--system", "horovod", "--results", str(tmp_path)]
    assert main(arguments) == 1
    assert "FAILED: digits, batch 64, horovod: could not be started: " in capsys.readouterr().err


def test_results_that_differ_are_told():
    none, ddp, coarse = (
        Run(system=system, ratio="", memory="", model="m", batch=1) for system in ("none", "ddp", "coarse")
    )
    done = [(none, result(moved=5.0)), (ddp, result())]
    assert check(coarse, result(error=0.01), done)
    for wrong in (result(moved=0.5), result(moved=float("nan"))):
        with pytest.raises(RunError, match="from AllReduce's, which training has moved by 1"):
            check(coarse, wrong, done)
    assert not check(coarse, result(moved=0.5), done[:1])


def test_results_are_compared_at_the_same_batch_and_with_fsdp_where_ddp_did_not_fit():
    def run(system, batch):
        return Run(system=system, ratio="", memory="", model="m", batch=batch)

    done = [(run("ddp", 2), result(moved=5.0)), (run("fsdp", 8), result())]
    assert check(run("coarse", 8), result(error=0.01), done)
    with pytest.raises(RunError, match="from AllReduce's"):
        check(run("coarse", 8), result(moved=5.0), done)
    assert check(run("coarse", 4), result(), done) is False


def test_results_that_differ_are_not_recorded(tmp_path, capsys, monkeypatch):
    came_to = iter([result(), result(moved=0.5), result()])
    known = {"workers": 2, "losses": [], "peak_device_bytes": 0, "decisions": [], "versions": {}}
    monkeypatch.setattr("experiments.aws.run.execute", lambda *_, **__: known | next(came_to))
    arguments = ["--instance", "cpu", "--model", "digits", "--system", "ddp", "--system", "coarse"]
    assert main([*arguments, "--results", str(tmp_path)]) == 1
    records = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [(each["system"], each["ratio"]) for each in records] == [("ddp", ""), ("coarse", "2:1")]
    assert "FAILED: digits, batch 64, coarse 1:1 on host: parameters are 0.5 from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--instance", "cpu", "--steps", "0"], "nothing to time without --steps of 1"),
        (["--instance", "cpu", "--results", "/dev/null/x"], "--results /dev/null/x: Not a directory"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(arguments, told, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert told in capsys.readouterr().err


def test_another_machine_than_the_instance_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("coarse.kernels._native.cuda_unavailable_reason", lambda: "")
    monkeypatch.setattr("coarse.kernels._native.cuda_num_devices", lambda: 1)
    with pytest.raises(SystemExit):
        main(["--instance", "p3.16xlarge"])
    assert "--instance p3.16xlarge needs 8 GPUs, and CUDA finds 1" in capsys.readouterr().err


def test_blocked_time_is_that_of_the_same_step_without_communication():
    runs = [
        (Run(system=system, ratio=ratio, memory=memory, model="m", batch=batch), result(step_ms=step_ms))
        for system, batch, ratio, memory, step_ms in (
            ("none", 64, "", "", 10),
            ("ddp", 64, "", "", 20),
            ("coarse", 64, "2:1", "cuda", 14),
            ("coarse", 128, "2:1", "cuda", 32),
        )
    ]
    assert table(runs).splitlines()[2:] == [
        "| m | 64 | none |  |  | 10.0 |  |  | 2.00x | 12800.0 | 2.00x |",
        "| m | 64 | ddp |  |  | 20.0 | 10.0 | 100 % | 1.00x | 6400.0 | 1.00x |",
        "| m | 64 | coarse | 2:1 | cuda | 14.0 | 4.0 | 40 % | 1.43x | 9142.9 | 1.43x |",
        "| m | 128 | coarse | 2:1 | cuda | 32.0 |  |  |  | 8000.0 | 1.25x |",
    ]


@pytest.mark.slow
def test_small_models_really_train_and_come_to_the_same(tmp_path, capsys):
    pytest.importorskip("torch")
    systems = [word for system in ("none", "ddp", "fsdp", "coarse") for word in ("--system", system)]
    arguments = ["--instance", "cpu", "--model", "digits", *systems, "--warm-up", "1", "--steps", "4"]
    assert main([*arguments, "--results", str(tmp_path)]) == 0
    records = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [(each["system"], each["ratio"]) for each in records] == [
        ("none", ""),
        ("ddp", ""),
        ("fsdp", ""),
        ("coarse", "1:1"),
        ("coarse", "2:1"),
    ]
    assert [each["is_checked"] for each in records] == [None, None, True, True, True]
    assert all(len(each["step_ms"]) == 4 and len(each["losses"]) == 5 for each in records)
    assert {each["kind"] for each in records} == {"measured"}
    assert all(each["versions"]["torch"] for each in records)
    assert ["coarse" if any("routes" in line for line in each["decisions"]) else "" for each in records] == [
        "coarse" if each["system"] == "coarse" else "" for each in records
    ]
    logs = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert logs == [
        f"digits-64-{run}.log" for run in ("coarse-1to1-host", "coarse-2to1-host", "ddp", "fsdp", "none")
    ]
    assert "| digits | 64 | coarse | 2:1 | host |" in capsys.readouterr().out
    assert "| digits | 64 | coarse | 2:1 | host |" in (tmp_path / "table.md").read_text()


def test_a_run_that_fails_is_told_with_its_last_lines(tmp_path, capsys, monkeypatch):
    broken = tmp_path / "train.py"
    broken.write_text("raise SystemExit('no GPU today')\n")
    monkeypatch.setattr("experiments.aws.campaign.TRAIN", broken)
    arguments = ["--instance", "cpu", "--model", "digits", "--system", "coarse", "--results", str(tmp_path)]
    assert main(arguments) == 1
    told = capsys.readouterr().err
    assert f"FAILED: digits, batch 64, coarse 1:1 on host: ended with exit code 1, see {tmp_path}" in told
    assert "no GPU today" in told
    assert not (tmp_path / "runs.jsonl").exists()

"""A campaign's plan: what runs where, for how long, and what is refused before anything starts."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from coarse.bench.models import build_workload
from experiments.aws.campaign import fitting, known_systems, select
from experiments.aws.estimates import COSTS, memory_bytes, step_s
from experiments.aws.instances import INSTANCES
from experiments.aws.run import main

README = Path(__file__).resolve().parents[2] / "experiments" / "aws" / "README.md"


def planned(capsys, *flags):
    assert main(["--plan", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", sorted(INSTANCES))
def test_every_instance_has_a_plan_without_a_gpu(name, capsys):
    plan = planned(capsys, "--instance", name)
    assert plan["instance"]["name"] == name
    assert {run["system"] for run in plan["runs"]} >= {"none", "ddp", "fsdp", "coarse", "coarse-offload"}
    assert all(run["command"] for run in plan["runs"])
    if name == "cpu":
        assert "hours" not in plan
    else:
        assert math.isclose(
            3600 * plan["hours"], plan["assumptions"]["setup_s"] + sum(run["run_s"] for run in plan["runs"])
        )


def test_a_plan_as_text_names_placement_hours_and_results(capsys):
    assert main(["--plan", "--instance", "g5.12xlarge", "--results", "elsewhere"]) == 0
    told = capsys.readouterr().out
    assert "4 A10G of 22.4 GiB on PCIe 4.0, 31.5 TFLOPS in float32, 35 in TF32, 40 Gbit/s" in told
    assert (
        "1:1 on cuda: workers on cuda:0, cuda:2; memory devices cuda:1 (workers [0]), cuda:3 (workers [1])"
        in told
    )
    assert "InstanceType=g5.12xlarge NumInstances=1 Bucket=$BUCKET" in told
    assert "hours, " in told
    assert " USD (estimated), assuming:" in told
    assert "elsewhere/runs.jsonl: a line for each run" in told


def test_instances_that_are_gone_are_marked_and_not_started(capsys):
    assert main(["--plan", "--instance", "p3.16xlarge"]) == 0
    told = capsys.readouterr().out
    assert "NO LONGER OFFERED" in told
    assert "cloudformation" not in told


def test_two_instances_train_over_their_network_and_without_horovod(capsys):
    one, two = (planned(capsys, "--instance", "g5.12xlarge", "--nnodes", str(number)) for number in (1, 2))
    assert "horovod" in one["compared"]
    assert "horovod" not in two["compared"]
    ddp = [next(run for run in plan["runs"] if run["system"] == "ddp") for plan in (one, two)]
    assert "--nnodes 2 --node-rank 0 " in ddp[1]["command"]
    assert ddp[1]["step_s"] > ddp[0]["step_s"]


def test_the_largest_batch_fits_only_without_the_optimizer(capsys):
    """Figure 16e, by the numbers of a GPU with 16 GiB."""
    plan = planned(capsys, "--instance", "g4dn.metal", "--model", "bert-large", "--batch", "8")
    assert {run["system"] for run in plan["runs"]} == {"fsdp", "coarse-offload"}
    assert {each["run"].split(",")[2].split()[0] for each in plan["left_out"]} == {
        "none",
        "ddp",
        "horovod",
        "coarse",
    }
    assert all(each["reason"] == "needs 16.1 GiB of a T4's 16.0 GiB" for each in plan["left_out"])


def test_memory_is_parameters_gradients_moments_and_activations():
    parameters, saved, context = 334_094_338 * 4, 2 * 1_363_829_776, 1 << 30
    assert memory_bytes("bert-large", 2, "ddp", 4) == 4 * parameters + saved + context
    assert memory_bytes("bert-large", 2, "coarse-offload", 4) == 2 * parameters + saved + context
    assert memory_bytes("bert-large", 2, "fsdp", 4) == parameters + saved + context


def test_a_step_is_computation_and_a_ring():
    g4dn = INSTANCES["g4dn.12xlarge"]
    computing_s = 2 * 6 * 334_094_338 * 384 / (0.35 * 8.1e12)
    assert step_s("bert-large", 2, "none", g4dn, 1) == pytest.approx(computing_s)
    ring_s = 2 * (1 / 2) * 4 * 334_094_338 / 5e9
    assert step_s("bert-large", 2, "ddp", g4dn, 1) == pytest.approx(computing_s + ring_s)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--instance", "p2.xlarge"], "--instance p2.xlarge is none of g4dn.12xlarge, g4dn.metal, "),
        (
            ["--instance", "g5.12xlarge", "--workers", "3"],
            "--workers 3: it has 4 GPUs; 3 workers with a memory device each need 6. Take --workers 2 or fewer",
        ),
        (
            ["--instance", "g4dn.metal", "--batch", "64", "--model", "bert-large"],
            "bert-large at batch 64 fits under no system: coarse-offload needs 84.8 GiB of a T4's 16.0 GiB",
        ),
        (["--instance", "g5.12xlarge", "--batch", "0"], "--workers and --batch must be 1 or more"),
    ],
)
def test_what_cannot_run_on_an_instance_is_refused(flags, told, capsys):
    for more in (["--plan"], []):
        with pytest.raises(SystemExit):
            main([*flags, *more])
        assert told in capsys.readouterr().err


def test_the_table_of_instances_is_that_of_the_plans(capsys):
    rows = re.findall(
        r"^\| ([\w.]+)( \\\*)? \| (\d) (\w+) \|.*\| (\d+) \| ([\d.]*) \| ([\d.]+) \|$",
        README.read_text(),
        re.MULTILINE,
    )
    assert {row[0] for row in rows} == {name for name, each in INSTANCES.items() if each.gpu}
    for name, star, num_gpus, gpu, network, usd, hours in rows:
        plan, each = planned(capsys, "--instance", name), INSTANCES[name]
        assert (bool(star), int(num_gpus), int(network)) == (
            not each.is_offered,
            each.num_gpus,
            each.network_gbits_per_s,
        )
        assert each.gpu.name.startswith(gpu)
        assert usd == ("" if each.usd_per_hour is None else f"{each.usd_per_hour:.2f}")
        assert hours == f"{plan['hours']:.1f}"


def test_json_without_a_plan_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--instance", "cpu", "--json"])
    assert "--json prints the plan as JSON; add --plan" in capsys.readouterr().err


def test_other_numbers_of_workers_take_the_first_gpus():
    small = select(INSTANCES["p3.16xlarge"], workers=1, models=["resnet50"], batches=[32])
    runs, misfits = fitting(small, known_systems(1, has_horovod=False))
    assert not misfits
    assert {(run.model, run.batch, run.ratio) for run in runs} == {
        ("resnet50", 32, ""),
        ("resnet50", 32, "1:1"),
    }
    assert (small.gpus, small.device_gpus("1:1")) == ((0,), (1,))


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(COSTS))
def test_activations_are_those_that_forward_saves(model):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")

    def saved_bytes(batch):
        workload = build_workload(model, batch=batch, sequence=384, rank=0)
        own = {
            value.untyped_storage().data_ptr()
            for value in (*workload.module.parameters(), *workload.module.buffers())
        }
        saved = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            workload.loss(workload.module, workload.batches[0])
        return sum(nbytes for nbytes, _ in saved.values())

    assert saved_bytes(2) - saved_bytes(1) == pytest.approx(COSTS[model].activation_bytes, rel=0.02)

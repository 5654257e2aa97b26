"""`coarse run`: the command and environment of each worker."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import fields

import pytest

from coarse.cli.main import build_parser
from coarse.cli.run import UsageError, command_of, threads_per_worker
from coarse.cli.run import environments_of as environments_with_port
from coarse.cli.workers.supervisor import JobPlan
from coarse.settings import Settings

TWO_NODES = ("--nnodes", "2", "--master-addr", "10.0.0.1", "--master-port", "1234")


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser(["run"]).parse_args(["run", *arguments])


def environments_of(arguments: argparse.Namespace, inherited: dict[str, str]) -> tuple[dict[str, str], ...]:
    return environments_with_port(arguments, inherited, 1234)


def test_each_worker_learns_who_it_is():
    environments = environments_of(parse("-n", "3", "-m", "train"), {"HOME": "/root"})
    assert [env["RANK"] for env in environments] == ["0", "1", "2"]
    assert [env["LOCAL_RANK"] for env in environments] == ["0", "1", "2"]
    assert (
        {env["WORLD_SIZE"] for env in environments}
        == {env["LOCAL_WORLD_SIZE"] for env in environments}
        == {"3"}
    )
    assert {env["HOME"] for env in environments} == {"/root"}


def test_workers_that_may_join_have_identities_too():
    arguments = parse("-n", "2", "--min-workers", "1", "--max-workers", "4", "-m", "train")
    environments = environments_of(arguments, {})
    assert [env["RANK"] for env in environments] == ["0", "1", "2", "3"]
    assert [env["LOCAL_RANK"] for env in environments] == ["0", "1", "2", "3"]
    assert [env["WORLD_SIZE"] for env in environments] == ["2", "2", "4", "4"]
    assert [env["LOCAL_WORLD_SIZE"] for env in environments] == ["2", "2", "4", "4"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("-n", "3", "--min-workers", "1", "--max-workers", "2"), "starts with 3 workers; raise it"),
        (("-n", "1", "--min-workers", "1", "--max-workers", "2"), "no other worker can join it"),
        (("-n", "2", "--max-workers", "3"), "needs COARSE_MIN_WORKERS"),
        (
            ("-n", "2", "--min-workers", "2", "--on-loss", "restart", "--max-workers", "3"),
            "needs COARSE_MIN_WORKERS",
        ),
    ],
)
def test_places_that_nobody_could_take_are_refused(arguments, reason):
    with pytest.raises(UsageError, match=reason):
        environments_of(parse(*arguments, "-m", "train"), {})


def test_nodes_number_their_workers_as_torchrun_does():
    nodes = (
        "--nnodes",
        "3:3",
        "--master-addr",
        "10.0.0.1",
        "--master-port",
        "1234",
        "-n",
        "2",
        "-m",
        "train",
    )
    environments = [env for node in "012" for env in environments_of(parse("--node-rank", node, *nodes), {})]
    assert [env["RANK"] for env in environments] == ["0", "1", "2", "3", "4", "5"]
    assert [env["LOCAL_RANK"] for env in environments] == ["0", "1"] * 3
    assert {env["WORLD_SIZE"] for env in environments} == {"6"}
    assert {env["LOCAL_WORLD_SIZE"] for env in environments} == {"2"}
    assert {(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in environments} == {("10.0.0.1", "1234")}


def test_the_address_can_be_given():
    environment = environments_of(parse("--master-addr", "::1", "--master_port", "1234", "-m", "train"), {})[
        0
    ]
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("::1", "1234")


@pytest.mark.parametrize(
    ("flag", "text", "variable"),
    [
        ("--memory-devices", "4", "COARSE_MEMORY_DEVICES"),
        ("--sync-cores", "2", "COARSE_SYNC_CORES"),
        ("--shard-bytes", "4MiB", "COARSE_SHARD_BYTES"),
        ("--gather-bytes", "8KiB", "COARSE_GATHER_BYTES"),
        ("--routing-threshold-bytes", "1MB", "COARSE_ROUTING_THRESHOLD_BYTES"),
        ("--spin-us", "50", "COARSE_SPIN_US"),
        ("--algorithm", "ring", "COARSE_ALGORITHM"),
        ("--scheduling", "fcfs", "COARSE_SCHEDULING"),
        ("--timeout", "2.5", "COARSE_TIMEOUT_S"),
    ],
)
def test_session_flags_beat_the_environment(flag, text, variable):
    environment = environments_of(parse(flag, text, "-m", "train"), {variable: "inherited"})[0]
    assert environment[variable] == text


def test_a_flag_beats_what_the_environment_says_in_another_way(tmp_path):
    table = tmp_path / "table.toml"
    table.write_text("[[memory_device]]\nworkers = [0]\n")
    by_table = environments_of(
        parse("--partition-table", str(table), "-m", "train"), {"COARSE_MEMORY_DEVICES": "2"}
    )
    assert "COARSE_MEMORY_DEVICES" not in by_table[0]
    by_number = environments_of(
        parse("--memory-devices", "2", "-m", "train"), {"COARSE_PARTITION_TABLE": str(table)}
    )
    assert "COARSE_PARTITION_TABLE" not in by_number[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--memory-devices", "numa:9999"), "there is no NUMA node 9999 on this machine"),
        (("--memory-devices", "host,dax:/dev/null"), "is a character device, but no DAX device"),
        (
            ("--partition-table", "aws-p3"),
            "partition table aws-p3 is for 4 workers, but this job has 2 on this node",
        ),
        (("--partition-table", "nowhere"), "no partition table is named .nowhere."),
        (
            ("--partition-table", "aws-p3", "--memory-devices", "2"),
            "COARSE_MEMORY_DEVICES cannot be combined with",
        ),
        (("--algorithm", "nccl"), "COARSE_ALGORITHM=nccl: memory devices are in host, host"),
        (("--keep-devices", "9", "--replicas", "1", "--memory-devices", "1"), "there is only one; start two"),
        (("--algorithm", "ring", *TWO_NODES), "'ring' works only within one node, but this job has 2"),
        (("--keep-devices", "9", *TWO_NODES), "memory devices are kept within one node"),
        (
            ("--node-ports", "20000-20001", *TWO_NODES),
            r"a node of 2 worker\(s\) needs 6: ",
        ),
        (("--machine", "cxl2-x8", *TWO_NODES), "cxl2-x8 describes no network, but this job has 2 nodes"),
        (
            ("--machine", "aws-p3", "--memory-devices", "cuda:0", *TWO_NODES),
            "links between nodes are emulated for tensors in host memory",
        ),
        (
            ("--memory-devices", "cuda:0", "--routing", "profile", *TWO_NODES),
            "COARSE_ROUTING=profile works only within one node",
        ),
        (
            ("--memory-devices", "cuda:0", "--routing", "profile", "--keep-devices", "9"),
            "COARSE_ROUTING=profile cannot be combined with COARSE_KEEP_DEVICES and memory devices on GPUs",
        ),
        (("--memory-devices", "cuda:0", "--profile", "refresh"), "whose links are measured when"),
        (
            ("--memory-devices", "cuda:0", "--min-workers", "1"),
            "only if its memory devices use the memory of the host",
        ),
    ],
)
def test_memory_devices_that_cannot_be_are_refused_before_anything_starts(flags, message):
    with pytest.raises(UsageError, match=message):
        environments_of(parse("-n", "2", *flags, "-m", "train"), {})


def run_with_stand_ins(folder, code, *arguments, **environment):
    """Runs Python that finds CUDA's driver, and other libraries, in `folder` first."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"LD_LIBRARY_PATH": str(folder)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_memory_of_a_gpu_whose_kernels_nothing_compiles_is_refused_before_anything_starts(cuda_stand_ins):
    code = (
        "import sys; from coarse.kernels import nvrtc; nvrtc._SONAMES = (); "
        "from coarse.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    ended = run_with_stand_ins(
        cuda_stand_ins, code, "run", "-n", "2", "--memory-devices", "cuda:0", "-m", "train"
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        "coarse run: error: GPU memory devices need NVRTC, which was not found: pip install 'coarse-train[cuda]'; a "
        "PyTorch for CUDA brings it too (see `coarse run --help`)\n"
    )


def test_looking_at_gpus_makes_no_context_in_the_launcher(cuda_stand_ins):
    code = (
        "from coarse.startup.device_checks import check_node; from coarse.settings import Settings; "
        "from coarse.kernels import _native; "
        "check_node(Settings.from_environment(), num_workers=2, num_nodes=1); print('checked'); "
        "_native.CudaContext(0)"
    )
    ended = run_with_stand_ins(
        cuda_stand_ins,
        code,
        COARSE_MEMORY_DEVICES="cuda:0,cuda:1",
        STAND_IN_GPUS="2",
        STAND_IN_REFUSES="cuDevicePrimaryCtxRetain:1:46",
    )
    assert ended.stdout == "checked\n", ended.stderr
    assert "CudaError: cuDevicePrimaryCtxRetain" in ended.stderr


def test_what_needs_several_workers_is_no_error_in_a_job_of_one():
    environments_of(parse("--keep-devices", "9", "--replicas", "1", "-m", "train"), {})


def test_every_setting_has_a_flag():
    flags = {name for name in vars(parse("-m", "train")) if name.startswith("COARSE_")}
    assert flags == {f"COARSE_{field.name.upper()}" for field in fields(Settings)}


def test_session_variables_are_inherited_where_no_flag_is_given():
    assert environments_of(parse("-m", "train"), {"COARSE_SYNC_CORES": "3"})[0]["COARSE_SYNC_CORES"] == "3"


def test_a_torchrun_around_the_launcher_is_forgotten():
    environment = environments_of(parse("-m", "train"), {"TORCHELASTIC_USE_AGENT_STORE": "True"})[0]
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environment


@pytest.mark.parametrize(
    ("num_cores", "num_workers", "num_threads"), [(2, 1, 2), (2, 2, 1), (2, 8, 1), (16, 3, 5)]
)
def test_workers_share_the_cores(num_cores, num_workers, num_threads):
    assert threads_per_worker(num_cores, num_workers) == num_threads


def test_a_thread_count_that_is_set_stays():
    assert environments_of(parse("-m", "train"), {"OMP_NUM_THREADS": "7"})[0]["OMP_NUM_THREADS"] == "7"


def test_tensorflow_tells_of_its_start_on_worker_0_alone_unless_asked():
    workers = environments_of(parse("-n", "2", "-m", "train"), {})
    assert [worker.get("TF_CPP_MIN_LOG_LEVEL") for worker in workers] == [None, "1"]
    asked = environments_of(parse("-n", "2", "-m", "train"), {"TF_CPP_MIN_LOG_LEVEL": "0"})
    assert [worker["TF_CPP_MIN_LOG_LEVEL"] for worker in asked] == ["0", "0"]


@pytest.mark.parametrize("flag", ["-n", "--nproc-per-node", "--nproc_per_node"])
def test_the_number_of_workers_has_torchruns_names(flag):
    assert parse(flag, "2", "-m", "train").num_workers == 2


def test_options_behind_the_script_are_the_scripts():
    arguments = parse("--standalone", "-n", "2", "-m", "train", "--lr", "3", "-n", "9", "--help")
    assert arguments.num_workers == 2
    assert command_of(arguments) == (sys.executable, "-u", "-m", "train", "--lr", "3", "-n", "9", "--help")


def test_a_script_is_run_by_the_same_python(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    assert command_of(parse(str(script), "x")) == (sys.executable, "-u", str(script), "x")


@pytest.mark.parametrize(
    "wrong",
    [
        {"command": ()},
        {"environments": ()},
        {"console_streams": frozenset({"stderr"})},
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(wrong):
    with pytest.raises(ValueError, match="needs"):
        JobPlan(**{"command": ("true",), "environments": ({},), "shutdown_timeout_s": 1.0, **wrong})

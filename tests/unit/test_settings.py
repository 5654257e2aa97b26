"""Settings: read from the environment and checked; refusals contain the variable's name."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.settings import Settings, declarations, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("65536", 65536),
        ("1B", 1),
        ("4MB", 4_000_000),
        ("4MiB", 4 << 20),
        ("4 kib", 4 << 10),
        (" 2GB ", 2_000_000_000),
        ("2GiB", 2 << 30),
        ("3KB", 3_000),
    ],
)
def test_sizes_mean_what_they_say(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "MB", "4.5MB", "-1", "4M", "4 M B", "1e6", "0x10", "4MB/s"])
def test_anything_else_is_no_size(text):
    with pytest.raises(ValueError, match="is not a size; write a number with B, KB, MB, GB, KiB, MiB or GiB"):
        parse_bytes(text)


@given(st.text())
def test_a_text_is_a_size_or_refused(text):
    with contextlib.suppress(ValueError):
        assert parse_bytes(text) >= 0


def test_the_environment_gives_every_setting():
    settings = Settings.from_environment(
        {
            "COARSE_PARTITION_TABLE": "table.toml",
            "COARSE_SYNC_CORES": "2",
            "COARSE_SHARD_BYTES": "4MB",
            "COARSE_GATHER_BYTES": "1KiB",
            "COARSE_ROUTING_THRESHOLD_BYTES": "64KiB",
            "COARSE_ALGORITHM": "ring",
            "COARSE_SCHEDULING": "fcfs",
            "COARSE_TIMEOUT_S": "2.5",
            "COARSE_SPIN_US": "7",
            "HOME": "/",
        }
    )
    assert settings == Settings(
        partition_table="table.toml",
        sync_cores=2,
        shard_bytes=4_000_000,
        gather_bytes=1024,
        routing_threshold_bytes=65536,
        algorithm="ring",
        scheduling="fcfs",
        timeout_s=2.5,
        spin_us=7,
    )


def test_without_variables_the_defaults_hold():
    assert Settings.from_environment({"PATH": "/bin"}) == Settings()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("COARSE_MEMORY_DEVICES", "many"),
        ("COARSE_MEMORY_DEVICES", "-1"),
        ("COARSE_MEMORY_DEVICES", "65"),
        ("COARSE_MEMORY_DEVICES", "host,tape"),
        ("COARSE_MEMORY_DEVICES", ",".join(["host"] * 65)),
        ("COARSE_SYNC_CORES", "1.5"),
        ("COARSE_SHARD_BYTES", "4M"),
        ("COARSE_SHARD_BYTES", "63"),
        ("COARSE_SHARD_BYTES", "5GiB"),
        ("COARSE_GATHER_BYTES", "-4"),
        ("COARSE_ROUTING_THRESHOLD_BYTES", ""),
        ("COARSE_ALGORITHM", "fastest"),
        ("COARSE_SCHEDULING", "QUEUES"),
        ("COARSE_NODE_COMPRESSION", "int4"),
        ("COARSE_TIMEOUT_S", "soon"),
        ("COARSE_TIMEOUT_S", "0"),
        ("COARSE_TIMEOUT_S", "nan"),
        ("COARSE_TIMEOUT_S", "inf"),
        ("COARSE_SPIN_US", "10s"),
        ("COARSE_TIME_DILATION", "0"),
        ("COARSE_TIME_DILATION", "2"),  # of which machine?
        ("COARSE_ROUTING", "spread"),  # over the links of which one?
    ],
)
def test_a_value_that_cannot_be_is_refused_by_the_name_of_its_variable(name, text):
    with pytest.raises(ValueError, match=name):
        Settings.from_environment({name: text})


def test_memory_devices_are_said_once():
    environ = {"COARSE_MEMORY_DEVICES": "2", "COARSE_PARTITION_TABLE": "aws-p3"}
    with pytest.raises(
        ValueError, match="COARSE_MEMORY_DEVICES cannot be combined with COARSE_PARTITION_TABLE=aws-p3"
    ):
        Settings.from_environment(environ)
    assert Settings.from_environment({**environ, "COARSE_MEMORY_DEVICES": "0"}).partition_table == "aws-p3"


def test_a_machine_is_emulated_by_exchange_unless_set():
    environ = {"COARSE_MACHINE": "aws-p3", "COARSE_TIME_DILATION": "20"}
    settings = Settings.from_environment(environ)
    assert (settings.machine, settings.time_dilation, settings.sync_algorithm) == ("aws-p3", 20.0, "exchange")


@pytest.mark.parametrize("algorithm", ["exchange", "ring", "direct"])
def test_a_machine_takes_the_algorithms_whose_transfers_are_paced(algorithm):
    assert Settings(machine="aws-p3", algorithm=algorithm).sync_algorithm == algorithm


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"algorithm": "gather"},
            "COARSE_ALGORITHM=gather cannot be .* COARSE_MACHINE: .* Choose exchange, ring or direct",
        ),
        (
            {"algorithm": "nccl"},
            "COARSE_ALGORITHM=nccl cannot be combined with COARSE_MACHINE: NCCL sends over",
        ),
        (
            {"keep_devices": 60.0, "algorithm": "direct"},
            "COARSE_KEEP_DEVICES cannot be combined with COARSE_MACHINE",
        ),
        (
            {"node_compression": "int8"},
            "COARSE_NODE_COMPRESSION=int8 cannot be combined with COARSE_MACHINE",
        ),
        (
            {"routing": "spread", "algorithm": "ring"},
            "COARSE_ROUTING=spread cannot be .* COARSE_ALGORITHM=ring",
        ),
    ],
)
def test_a_machine_refuses_what_it_cannot_pace(settings, message):
    with pytest.raises(ValueError, match=message):
        Settings(machine="aws-p3", **settings)


def test_a_misspelt_variable_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"COARSE_SHARD_SIZE is set, but .* COARSE_SHARD_BYTES"):
        Settings.from_environment({"COARSE_SHARD_SIZE": "4MB"})


def test_a_variable_that_resembles_none_is_refused_with_where_they_are_listed():
    with pytest.raises(
        ValueError, match=r"COARSE_TORCH_BACKEND is set, but .* docs/settings\.md and coarse run"
    ):
        Settings.from_environment({"COARSE_TORCH_BACKEND": "native"})


def test_what_only_the_build_reads_is_no_misspelling():
    assert Settings.from_environment({"COARSE_BUILD_JOBS": "2"}) == Settings()


@pytest.mark.parametrize("declaration", declarations(), ids=lambda each: each.name)
def test_a_default_is_what_users_may_write_themselves(declaration):
    settings = Settings.from_environment({declaration.variable: declaration.default_text})
    assert settings == Settings()


@pytest.mark.parametrize(
    ("min_workers", "on_loss", "least"),
    [
        (0, "auto", 0),
        (2, "auto", 2),
        (2, "continue", 2),
        (0, "continue", 1),
        (0, "replace", 1),
        (2, "replace", 2),
        (2, "restart", 0),
        (0, "restart", 0),
    ],
)
def test_a_job_goes_on_after_a_loss_if_the_settings_say_so(min_workers, on_loss, least):
    assert Settings(min_workers=min_workers, on_loss=on_loss).least_workers == least


@pytest.mark.parametrize(
    "needs_all",
    [
        {"machine": "dgx1"},
        {"scheduling": "fcfs"},
        {"algorithm": "ring"},
        {"algorithm": "exchange"},
        {"algorithm": "nccl"},
        {"dual_sync": "1MB"},
        {"replan_steps": 100},
        {"gpu_transfers": "wait"},
        {"keep_devices": 60.0},
    ],
    ids=lambda settings: "=".join(map(str, *settings.items())),
)
def test_what_needs_all_workers_is_refused_if_a_job_goes_on_without_lost_ones(needs_all):
    Settings(min_workers=2, on_loss="restart", **needs_all)
    (name,) = needs_all
    for on_loss in ("continue", "replace"):
        with pytest.raises(
            ValueError, match=rf"a job cannot go on without lost workers if .*COARSE_{name.upper()}.*; "
        ):
            Settings(min_workers=2, on_loss=on_loss, **needs_all)

"""init_process_group("coarse"), without any import of COARSE, gives the same bits as gloo.

Each scenario runs with the same seeds in two ranks under both backends. With two ranks a sum has one order of
additions, so results must be bitwise equal.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
from collective_scenarios import COLLECTIVES
from ranks import RankPool, environment
from training_scenarios import TRAINING

from coarse.torch.backend import building

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


pytestmark = pytest.mark.timeout(600)  # the first test starts the ranks, and may have to compile the backend


@pytest.mark.parametrize("name", [*COLLECTIVES, *TRAINING])
def test_gives_the_bits_of_gloo(name: str, gloo: RankPool, coarse: RankPool) -> None:
    assert coarse.run(name) == gloo.run(name)


def test_an_example_that_imports_nothing_of_coarse_runs_to_its_end(coarse: RankPool, site: Path) -> None:
    pytest.importorskip("sklearn", reason="the example's digits are scikit-learn's")
    coarse.run("sub_groups")  # whose start compiles the backend
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            str(EXAMPLES / "process_group_coarse.py"),
        ],
        env=environment(site),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1].rstrip("%")) > 90


def test_a_group_can_be_made_again_where_the_launcher_keeps_its_store(
    coarse: RankPool, site: Path, tmp_path: Path
) -> None:
    coarse.run("sub_groups")  # whose start compiles the backend
    script = tmp_path / "thrice.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "for _ in range(3):\n"
        "    dist.init_process_group('coarse')\n"
        "    tensor = torch.ones(2)\n"
        "    dist.all_reduce(tensor)\n"
        "    print(tensor.tolist())\n"
        "    dist.destroy_process_group()\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            str(script),
        ],
        env=environment(site),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[2.0, 2.0]") == 6


def test_mismatches_name_rank_and_sequence_number_and_the_group_goes_on(coarse: RankPool) -> None:
    for rank, (errors, after) in enumerate(coarse.run("mismatches_are_told_and_survived")):
        for what, (kind, text) in errors.items():
            assert kind == "DistBackendError", (what, text)
            assert f"rank {rank}, sequence number" in text, what
        assert "rank 0 is at" in errors["shape"][1]
        assert "[3]" in errors["shape"][1]
        assert "[4]" in errors["shape"][1]
        assert "float32" in errors["dtype"][1]
        assert "float64" in errors["dtype"][1]
        assert "broadcast" in errors["operation"][1]
        assert "root 1" in errors["root"][1]
        assert "max" in errors["operator"][1]
        assert after == [3.0] * 4


def test_wrong_arguments_are_refused_at_once(coarse: RankPool) -> None:
    for errors in coarse.run("wrong_arguments_are_refused"):
        assert "float32 cannot be reduced" in errors["op"][1]
        assert "meta" in errors["device"][1]
        assert "one per rank" in errors["outputs"][1]
        assert "one per rank" in errors["gathered"][1]
        assert "root 2 is none of the 2 ranks" in errors["root"][1]
        assert "2 times" in errors["flat"][1]
        assert "2 is none of the 2 ranks" in errors["send"][1]
        assert "2 is none of the 2 ranks" in errors["recv"][1]


def test_forks_take_no_part(coarse: RankPool) -> None:
    for errors, code, after in coarse.run("forks_take_no_part"):
        assert errors.pop("destroy") == ["", ""]
        for what, (kind, text) in errors.items():
            assert kind == "DistBackendError", (what, text)
            assert "spawn" in text, what
        assert code == 0
        assert after == [2.0] * 3


def test_late_ranks_are_named(coarse: RankPool) -> None:
    found = coarse.run("late_ranks_are_named")[0]
    late, after, message = (text for _, text in found)
    assert "Timed out waiting for rank(s) 1" in late
    assert "all_reduce of float32 [3], sum" in late
    assert re.search(r" after \d+\.\d+ s$", late.splitlines()[0])  # what was waited, not what might have been
    assert "the group is broken since" in after
    assert "recv from rank 1" in message
    assert "Timed out" in message


def test_messages_that_do_not_fit_are_refused(coarse: RankPool) -> None:
    size, dtype, after = coarse.run("messages_that_do_not_fit_are_refused")[1]
    assert "rank 0 sent 12 bytes of float32, expected were 16" in size[1]
    assert "expected were 12 of int32" in dtype[1]
    assert after == [1.0] * 3


def test_a_rank_that_leaves_is_named(coarse: RankPool) -> None:
    kind, text = coarse.run("a_rank_leaves_its_group")[0]
    assert kind == "DistBackendError"
    assert "rank 1 has left the group" in text


def test_ddp_is_told_that_a_rank_has_left(coarse: RankPool) -> None:
    """In C++, where it waits."""
    kind, text = coarse.run("ddp_in_a_group_that_a_rank_leaves")[0]
    assert kind in ("DistBackendError", "RuntimeError")  # the latter where the error has come from Python
    assert "rank 1 has left the group" in text


def test_works_that_take_too_long_or_come_too_late_say_so(coarse: RankPool) -> None:
    slow, late = (text for _, text in coarse.run("works_that_take_too_long_or_come_too_late")[0])
    assert "Operation timed out" in slow
    assert "the process group was destroyed" in late


def test_a_group_can_be_destroyed_while_a_thread_waits_in_it(
    coarse: RankPool,
) -> None:
    kind, text = coarse.run("a_group_is_destroyed_while_a_thread_waits_in_it")[0]
    assert kind == "DistBackendError"
    assert "the group was closed" in text


def test_a_group_can_be_destroyed_while_a_receive_waits_in_it(coarse: RankPool) -> None:
    _, text = coarse.run("a_group_is_destroyed_while_a_receive_waits_in_it")[0]
    assert "the group was closed" in text


@pytest.mark.parametrize(
    "name",
    ["all_reduce_sums_every_dtype", "object_collectives", "messages_by_tag_in_any_order", "ddp", "fsdp2"],
)
def test_works_where_torch_checks_every_call(name: str, coarse: RankPool, checked: RankPool) -> None:
    assert checked.run(name) == coarse.run(name)


def test_a_rank_that_ends_by_an_error_leaves_the_groups_it_has_not_destroyed(
    site: Path, tmp_path: Path
) -> None:
    """Although it waits for others, which wait for it."""
    script = tmp_path / "ends.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('coarse')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 0:\n"
        "    work = dist.all_reduce(torch.ones(2), async_op=True)\n"
        "    raise SystemExit('enough')\n"
        "try:\n"
        "    dist.recv(torch.ones(2), 0)\n"
        "except dist.DistBackendError as error:\n"
        "    print(error)\n"
    )
    store = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=environment(site, RANK=str(rank), **store),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert "rank 0 has left the group" in printed[1]


@pytest.mark.parametrize("nodes", [("a", "a"), ("a", "b")])
def test_a_rank_without_a_compiler_is_named_on_all(
    nodes: tuple[str, str], coarse: RankPool, site: Path, tmp_path: Path
) -> None:
    coarse.run("sub_groups")  # whose start compiles the backend
    script = tmp_path / "script.py"
    script.write_text("import torch, torch.distributed as dist\ndist.init_process_group('coarse')\n")
    no_compiler = {"PATH": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path)}
    for printed, error in run_two_ranks(script, site, nodes, {}, no_compiler):
        assert printed == ""
        assert "BackendBuildError: rank 1 cannot compile the torch backend: there is no C++ compiler" in error
        assert "(apt install g++, or set CXX)" in error


def test_what_killed_compilers_left_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")  # a compiler that fails at once
    target = building.cache_folder() / f"_coarse_c10d-{building.build_key()}{EXTENSION_SUFFIXES[0]}"
    left, other = (target.parent / f"{name}-build-x" for name in (target.stem, "_coarse_c10d-other"))
    for folder in (left, other):
        folder.mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(building.BuildError, match="false cannot compile it"):
            building.build()
    assert [path.name for path in target.parent.glob("*-build-*")] == [other.name]


def test_the_wheels_backend_is_loaded_if_it_is_for_this_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(building, "_PREBUILT", tmp_path)
    own = building.prebuilt_path(EXTENSION_SUFFIXES[0])
    own.with_name(own.name.replace("-torch2", "-torch1")).write_text("not looked at")
    assert building.prebuilt() is None
    assert not caplog.messages
    own.write_text("no library")
    assert building.prebuilt() is None
    assert "is compiled here, because that of the wheel does not load" in caplog.text
    own.unlink()
    shutil.copy(building.build(), own)
    assert building.prebuilt().__file__ == str(own)


def test_without_a_compiler_an_error_names_the_torch_of_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_PREBUILT", tmp_path)
    (tmp_path / "_coarse_c10d-torch2.6.0-0123456789ab-cxx11abi1.so").touch()
    for name, value in {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/nonexistent", "CXX": "g++"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        building.BuildError, match=r"no C\+\+ compiler .* the torch backend for torch 2\.6\.0"
    ):
        building.build()


def run_two_ranks(
    script: Path, site: Path, nodes: tuple[str, str], *variables: dict[str, str]
) -> list[tuple[str, str]]:
    """What each rank printed, and what it said on standard error."""
    store = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=environment(site, RANK=str(rank), COARSE_NODE=nodes[rank], **store, **variables[rank]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def test_others_hear_of_a_death_at_once(coarse: RankPool) -> None:
    """The last test of this pool: one of its ranks is gone afterwards."""
    coarse.submit("a_rank_dies")
    for kind, text in coarse.collect([0])[0]:
        assert kind == "DistBackendError"
        assert "rank 1 died" in text
    coarse.close()

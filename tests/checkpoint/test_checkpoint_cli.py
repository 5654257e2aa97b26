"""`coarse checkpoint`: tables and the equivalent JSON, exit codes; files to keep are not removed."""

from __future__ import annotations

import json

import pytest
from saved_states import TENSORS, content, save

from coarse.checkpoint.manifest import MANIFEST_NAME
from coarse.cli.main import main


@pytest.fixture
def folder(tmp_path):
    """Three checkpoints, the newest one torn, and the remains of a killed save."""
    place = tmp_path / "job"
    save(place, 1, 2, 3)
    (place / "step-3" / MANIFEST_NAME).unlink()
    (place / "step-4.tmp").mkdir()
    return place


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def run(capsys, *arguments):
    """Exit code and output of a command."""
    code = main(["checkpoint", *map(str, arguments)])
    return code, capsys.readouterr().out


def run_json(capsys, *arguments):
    code, output = run(capsys, *arguments, "--json")
    return code, json.loads(output)


def test_list(folder, capsys):
    code, found = run_json(capsys, "list", folder)
    assert code == 0
    assert [(each["checkpoint"], each["whole"]) for each in found["checkpoints"]] == [
        ("step-1", True),
        ("step-2", True),
        ("step-3", False),
    ]
    assert found["checkpoints"][0]["tensors"] == len(TENSORS)
    assert found["unfinished"] == ["step-4.tmp"]
    code, output = run(capsys, "list", folder)
    assert code == 0
    assert "did not finish" in output
    assert "step-4.tmp: being written, or left by a save that was killed" in output


def test_show(folder, capsys):
    code, found = run_json(capsys, "show", folder, "--tensors")
    assert code == 0
    assert found["step"] == 2  # the newest complete one
    assert {tensor["name"] for tensor in found["tensor_list"]} == {tensor.name for tensor in TENSORS}
    code, output = run(capsys, "show", folder, "1", "--tensors")
    assert code == 0
    assert "model.weight" in output
    assert "step-1" in output


@pytest.mark.parametrize("which", ["3", "step-7", "../job"])
def test_show_of_what_is_not_whole(folder, capsys, which):
    assert main(["checkpoint", "show", str(folder), which]) == 1
    assert "CheckpointError" in capsys.readouterr().err


def test_nothing_to_verify_is_an_error(tmp_path, capsys):
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert f"{tmp_path} contains no checkpoints" in capsys.readouterr().err


def test_verify(folder, capsys):
    code, found = run_json(capsys, "verify", folder, "step-1", "2")
    assert (code, [each["whole"] for each in found]) == (0, [True, True])
    flip(folder / "step-2" / "tensors-00001.safetensors")
    code, found = run_json(capsys, "verify", folder)
    assert (code, [each["whole"] for each in found]) == (1, [True, False, False])
    assert "CRC32C" in found[1]["reason"]
    code, output = run(capsys, "verify", folder, "1")
    assert (code, output) == (0, "step-1: every byte is right by CRC32C\n")


def test_prune_and_pin(folder, capsys):
    assert run(capsys, "pin", folder, "1")[0] == 0
    save(folder, 5)
    assert run_json(capsys, "prune", folder, "--keep", "1", "--dry-run")[1]["removable"] == ["step-2"]
    assert (folder / "step-2").exists()
    assert run_json(capsys, "prune", folder, "--keep", "1")[1]["removed"] == ["step-2"]
    assert run(capsys, "pin", folder, "1", "--undo")[0] == 0
    code, output = run(capsys, "prune", folder, "--keep", "1", "--unfinished")
    assert (code, output) == (0, "removed step-1\nremoved step-4.tmp\n")
    assert {path.name for path in folder.iterdir()} == {"saving.lock", "step-3", "step-5"}


def test_prune_keeps_at_least_one(folder, capsys):
    assert main(["checkpoint", "prune", str(folder), "--keep", "0"]) == 1
    assert "at least one" in capsys.readouterr().err


def test_nothing_goes_while_the_newest_is_torn(folder, capsys):
    assert main(["checkpoint", "prune", str(folder), "--keep", "1"]) == 1
    assert "step-3" in capsys.readouterr().err
    assert (folder / "step-1").exists()


def test_export_is_a_plain_state_dict(folder, tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors")
    output = tmp_path / "out" / "model.safetensors"
    assert run(capsys, "export", folder, "-o", output)[0] == 0
    found = {
        name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        for name, entry in safetensors.deserialize(output.read_bytes())
    }
    assert found == {
        tensor.name.removeprefix("model."): (tensor.dtype, tensor.shape, content(tensor, 2))
        for tensor in TENSORS
        if tensor.name.startswith("model.")
    }
    assert main(["checkpoint", "export", str(folder), "-o", str(output)]) == 1
    assert "not overwritten" in capsys.readouterr().err


def test_export_of_a_damaged_one_leaves_nothing(folder, tmp_path, capsys):
    flip(folder / "step-1" / "tensors-00001.safetensors")
    output = tmp_path / "out" / "model.safetensors"
    assert main(["checkpoint", "export", str(folder), "step-1", "-o", str(output)]) == 1
    assert "damaged" in capsys.readouterr().err
    assert list(output.parent.iterdir()) == []

"""Accelerate, transformers.Trainer, Lightning, Ray Train and mpirun train with COARSE, through the examples."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LIMIT_S = 400
DIGITS = ("--epochs", "16")  # enough for 97 %


def needs(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install coarse-train[trainers]")


def run(*command: str) -> str:
    """What the command printed; it must end well."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        cwd=EXAMPLES,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def check_accuracy(printed: str) -> None:
    (accuracy,) = set(re.findall(r"test accuracy (\d+\.\d+)%", printed))  # one worker speaks for all
    assert float(accuracy) >= 97.0


def test_accelerate_launch():
    needs("accelerate")
    module = (sys.executable, "-m", "accelerate.commands.launch")
    flags = ("--cpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0")
    unused = ("--mixed_precision", "no", "--dynamo_backend", "no")  # or it asks for a file of defaults
    check_accuracy(run(*module, *flags, *unused, "accelerate_digits.py", *DIGITS))


def test_lightning_knows_the_strategy_for_unused_parameters_by_name():
    needs("lightning")
    import lightning

    import coarse.lightning

    for name, finds, offloads in (
        ("coarse", False, False),
        ("coarse_find_unused_parameters_true", True, False),
        ("coarse_offload", False, True),
        ("coarse_offload_find_unused_parameters_true", True, True),
    ):
        trainer = lightning.Trainer(strategy=name, accelerator="cpu", logger=False)
        fabric = lightning.Fabric(strategy=name, accelerator="cpu")
        assert type(trainer.strategy) is coarse.lightning.CoarseStrategy
        assert type(fabric.strategy) is coarse.lightning.CoarseFabricStrategy
        for strategy in (trainer.strategy, fabric.strategy):
            assert strategy._ddp_kwargs.get("find_unused_parameters", False) is finds
            assert strategy._offloading.is_wanted is offloads


def test_an_optimizer_is_not_offloaded_where_another_way_shards_it():
    needs("accelerate")
    from accelerate.utils import DistributedType

    from coarse.accelerate import Accelerator

    class Sharding(Accelerator):
        distributed_type = DistributedType.FSDP

    with pytest.raises(ValueError, match="offload_optimizer cannot be combined with FSDP"):
        Sharding(cpu=True, offload_optimizer=True)


@pytest.mark.slow
def test_lightning_starts_its_own_workers():
    needs("lightning")
    check_accuracy(run(sys.executable, "lightning_digits.py", *DIGITS))


@pytest.mark.slow
def test_ray_train(tmp_path):
    needs("ray")
    check_accuracy(run(sys.executable, "ray_digits.py", *DIGITS, "--results", str(tmp_path)))


@pytest.mark.slow
def test_ray_train_goes_on_from_a_checkpoint_after_a_worker_is_lost(tmp_path):
    needs("ray")
    script = ("ray_preemptible_digits.py", "--epochs", "20", "--every", "20")
    folders = ("--checkpoints", str(tmp_path / "checkpoints"), "--results", str(tmp_path / "ray"))
    with subprocess.Popen(
        [sys.executable, "-u", *script, *folders],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=EXAMPLES,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
    ) as job:
        assert job.stdout is not None
        begun, printed, is_lost = [], "", False
        for line in job.stdout:
            printed += line
            if found := re.search(r"RayTrainWorker pid=(\d+)\).* begins at step (\d+)", line):
                begun.append(int(found[2]))
                victim = int(found[1])
            if " saved step-" in line and not is_lost:
                os.kill(victim, signal.SIGKILL)
                is_lost = True
        assert job.wait() == 0, printed
    assert begun[0] == 0, printed
    assert begun[-1] >= 20, printed
    assert "test accuracy" in printed


@pytest.mark.slow
def test_mpirun():
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("no mpirun: pip install mpich")
    check_accuracy(run(mpirun, "-n", "2", sys.executable, "torch_digits.py", *DIGITS))


@pytest.mark.parametrize(
    "launcher", ["coarse", pytest.param("torch.distributed.run", marks=pytest.mark.slow)]
)
def test_what_they_train_is_wrapped_by_coarse(launcher):
    needs("accelerate", "lightning")
    script = str(Path(__file__).with_name("wrapping_script.py"))
    flags = ("run", "-n", "2") if launcher == "coarse" else ("--standalone", "--nproc-per-node", "2")
    printed = run(sys.executable, "-m", launcher, *flags, script)
    assert printed.count("all as promised") == 2, printed


@pytest.mark.parametrize("launcher", [(), ("-m", "coarse", "run", "-n", "2")], ids=["alone", "two workers"])
def test_options_of_optimizers_hold_with_and_without_a_launcher(launcher):
    needs("accelerate", "lightning")
    script = str(Path(__file__).with_name("options_script.py"))
    assert "all as promised" in run(sys.executable, *launcher, script)

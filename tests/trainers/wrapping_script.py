"""A worker that wraps a small model with each trainer and checks the result; started by test_trainers.py."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from transformers import TrainingArguments

import coarse.torch
from coarse.accelerate import Accelerator
from coarse.lightning import CoarseFabricStrategy, CoarseStrategy
from coarse.torch import DistributedOptimizer
from coarse.torch.checkpoint import Checkpointer
from coarse.torch.session import session_of_group
from coarse.transformers import Trainer

SAMPLES = 8


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        assert isinstance(self.trainer.strategy.model, coarse.torch.DistributedDataParallel)
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StepsByHand(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self(batch).square().mean())
        optimizer.step()


class Failure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(inputs).square().mean()}


def check_agreement(module: nn.Module, what: str) -> None:
    """That all workers have the same parameters, and that these have moved from zero."""
    values = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    total = values.clone()
    dist.all_reduce(total)
    np.testing.assert_array_equal((total / dist.get_world_size()).numpy(), values.numpy(), err_msg=what)


def check_rounding(module: nn.Module) -> None:
    """That averages have come in bfloat16."""
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, parameter.grad.bfloat16().float())


def data(rank: int) -> torch.Tensor:
    return torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(rank))


def num_counted() -> float:
    metrics = session_of_group(dist.group.WORLD).session.metrics()
    return metrics.total("coarse_samples_total", worker=str(dist.get_rank()))


@contextlib.contextmanager
def counting(num_samples: int) -> Iterator[None]:
    """That this worker counts so many samples within the block."""
    before = num_counted()
    yield
    assert num_counted() - before == num_samples


def with_accelerate() -> None:
    handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler], gradient_accumulation_steps=2)
    torch.manual_seed(accelerator.process_index)
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert type(model) is coarse.torch.DistributedDataParallel
    assert model.find_unused_parameters
    assert not model.gradient_as_bucket_view  # as the handler says
    check_saved_state(accelerator, model)
    assert accelerator.prepare(model) is model
    with counting(SAMPLES):
        for inputs in data(accelerator.process_index).split(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            model(inputs)
        model.eval()(inputs)
        model.train()
    check_agreement(model, "Accelerate")
    rounding = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[rounding])
    rounded = accelerator.prepare(nn.Linear(4, 1))
    rounded(data(accelerator.process_index)).square().mean().backward()
    check_rounding(rounded)
    join_with(accelerator)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert accelerator.prepare_model(frozen) is frozen
    assert type(accelerator.unwrap_model(model)) is nn.Linear
    model.close()


def check_saved_state(accelerator: Accelerator, model: nn.Module) -> None:
    """That what accelerate saves, and hands to hooks, is the model as it was before it was wrapped."""
    handed: list[nn.Module] = []
    hook = accelerator.register_save_state_pre_hook(lambda models, *_: handed.extend(models))
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        if accelerator.is_main_process:
            assert sorted(load_file(f"{folder}/model.safetensors")) == ["bias", "weight"]
    hook.remove()
    assert handed == [model.module]


def join_with(accelerator: Accelerator) -> None:
    """Batches of which one worker has two, and the other one."""
    batches = torch.utils.data.DataLoader(data(0)[:3], batch_size=1)
    model, batches = accelerator.prepare(nn.Linear(4, 1), batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        num_batches = 0
        for inputs in batches:
            model(inputs).square().mean().backward()
            optimizer.step()
            num_batches += 1
    assert num_batches == 2 - accelerator.process_index
    check_agreement(model, "Accelerate's join")
    assert len(list(batches)) == 2  # even again


def with_transformers() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    module = Failure()
    rows: list[int] = []
    module.register_forward_pre_hook(
        lambda _, unnamed, named: rows.append(len(named["inputs"])), with_kwargs=True
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, max_steps=2, save_strategy="no", report_to="none", disable_tqdm=True
        )
        samples = [{"inputs": row} for row in data(0)]
        trainer = Trainer(module, arguments, train_dataset=samples)
        before = num_counted()
        trainer.train()
    assert type(trainer.model_wrapped) is coarse.torch.DistributedDataParallel
    assert trainer.model_wrapped.gradient_as_bucket_view
    check_agreement(module, "transformers")
    assert num_counted() - before == sum(rows) > 0
    trainer.model_wrapped.close()


def with_lightning() -> None:
    torch.manual_seed(dist.get_rank())
    module = Regression()
    flags = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(strategy="coarse", accelerator="cpu", devices=2, max_steps=3, **flags)
    with counting(3 * 2):
        trainer.fit(module, torch.utils.data.DataLoader(data(0), batch_size=2))
    check_agreement(module, "Lightning")
    strategy = CoarseStrategy(ddp_comm_hook=default_hooks.bf16_compress_hook)
    trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=3, **flags)
    trainer.fit(module, torch.utils.data.DataLoader(data(0), batch_size=2))
    check_agreement(module, "Lightning")
    check_rounding(module)
    module = StepsByHand()
    strategy = CoarseStrategy(static_graph=True)
    trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=3, **flags)
    trainer.fit(module, torch.utils.data.DataLoader(data(0), batch_size=2))
    check_agreement(module, "Lightning by hand")
    strategy = CoarseStrategy(
        ddp_comm_hook=default_hooks.allreduce_hook, ddp_comm_wrapper=default_hooks.fp16_compress_wrapper
    )
    trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=3, **flags)
    trainer.fit(Regression(), torch.utils.data.DataLoader(data(0), batch_size=2))
    check_agreement(trainer.lightning_module, "Lightning's wrapper of a hook")


def accelerated(offload_optimizer: bool) -> nn.Module:
    accelerator = Accelerator(cpu=True, offload_optimizer=offload_optimizer)
    model = nn.Linear(4, 1)
    bare = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(bare, 0.9)
    if offload_optimizer:
        with pytest.raises(ValueError, match="no parameters of a model that was set up"):
            accelerator.prepare(bare)
    model, optimizer, schedule = accelerator.prepare(model, bare, schedule)
    assert isinstance(optimizer.optimizer, DistributedOptimizer) is offload_optimizer
    for inputs in data(accelerator.process_index).split(2):
        optimizer.zero_grad()
        accelerator.backward(model(inputs).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
    return model.module


def trained_by_transformers(offload_optimizer: bool) -> nn.Module:
    module = Failure()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, max_steps=4, save_strategy="no", report_to="none", disable_tqdm=True
        )
        samples = [{"inputs": row} for row in data(0)]
        trainer = Trainer(module, arguments, train_dataset=samples, offload_optimizer=offload_optimizer)
        trainer.train()
    assert isinstance(trainer.optimizer.optimizer, DistributedOptimizer) is offload_optimizer
    return module


class WithAdamW(Regression):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def trained_by_lightning(offload_optimizer: bool) -> nn.Module:
    module = WithAdamW()
    trainer = lightning.Trainer(
        strategy="coarse_offload" if offload_optimizer else "coarse",
        accelerator="cpu",
        devices=2,
        max_steps=3,
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data(0), batch_size=2))
    assert isinstance(trainer.optimizers[0], DistributedOptimizer) is offload_optimizer
    return module


def trained_by_fabric(offload_optimizer: bool) -> nn.Module:
    strategy = "coarse_offload" if offload_optimizer else "coarse"
    fabric = lightning.Fabric(strategy=strategy, accelerator="cpu", devices=2)
    fabric.launch()
    module = nn.Linear(4, 1)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.1))
    assert isinstance(optimizer.optimizer, DistributedOptimizer) is offload_optimizer
    with counting(SAMPLES):
        for step, inputs in enumerate(data(fabric.global_rank).split(2)):
            with fabric.no_backward_sync(model, enabled=step == 2):
                fabric.backward(model(inputs).square().mean())
            if step != 2:
                fabric.clip_gradients(model, optimizer, max_norm=0.1)
                optimizer.step()
                optimizer.zero_grad()
    return module


def with_offloaded_optimizers() -> None:
    """Trainers have them where memory is when they are asked to, with the results of optimizers on the workers."""
    for train in (accelerated, trained_by_transformers, trained_by_lightning, trained_by_fabric):
        ends = []
        for offload_optimizer in (False, True):
            torch.manual_seed(3)
            module = train(offload_optimizer)
            ends.append([parameter.detach().clone() for parameter in module.parameters()])
            dist.barrier()
        for ours, theirs in zip(*ends, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


OVERLAP = {"overlap": True}
cannot_clip = functools.partial(pytest.raises, ValueError)


def with_overlapping_optimizers() -> None:
    """What is updated during backward cannot be clipped after it, and nobody goes on as if it were."""
    overlapping_in_accelerate()
    overlapping_in_transformers()
    overlapping_in_lightning()
    overlapping_in_fabric()


def overlapping_in_accelerate() -> None:
    accelerator = Accelerator(cpu=True, offload_optimizer=OVERLAP)
    module, other = nn.Linear(4, 1), nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    accelerator.backward(model(data(accelerator.process_index)).square().mean())
    with cannot_clip(match=r"clip_grad_norm_\(\) cannot be combined with an optimizer that has overlap=True"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with cannot_clip(match=r"clip_grad_value_\(\) cannot be combined with"):
        accelerator.clip_grad_value_(module.weight, 1.0)
    optimizer.step()
    check_agreement(module, "overlap in Accelerate")
    other(torch.ones(1, 4)).sum().backward()  # whose optimizer is another one
    assert accelerator.clip_grad_norm_(other.parameters(), 1.0) == pytest.approx(5**0.5)
    accelerator.clip_grad_value_(other.weight, 0.1)
    assert other.weight.grad.max() <= 0.1


def overlapping_in_transformers() -> None:
    module = Failure()
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": 1}
        make = functools.partial(TrainingArguments, folder, use_cpu=True, max_steps=2, **quiet)
        samples = [{"inputs": row} for row in data(0)]
        with cannot_clip(
            match=r"TrainingArguments\(max_grad_norm=1.0\), where 0 clips nothing, cannot be combined"
        ):
            Trainer(module, make(), train_dataset=samples, offload_optimizer=OVERLAP)
        trainer = Trainer(module, make(max_grad_norm=0), train_dataset=samples, offload_optimizer=OVERLAP)
        trainer.train()
        assert trainer.optimizer.optimizer.overlaps
        assert not any("grad_norm" in logged for logged in trainer.state.log_history)
        trainer.args.max_grad_norm = 1.0
        with cannot_clip(match=r"clip_grad_norm_\(\) cannot be combined with"):
            trainer.train()
    check_agreement(module, "overlap in transformers")


class ClipsByHand(StepsByHand):
    def training_step(self, batch: torch.Tensor, index: int) -> None:
        self.manual_backward(self(batch).square().mean())
        self.clip_gradients(self.optimizers(), gradient_clip_val=0.5, gradient_clip_algorithm="norm")


def overlapping_in_lightning() -> None:
    def fit(module: Regression, **clipping: float) -> None:
        flags = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 2}
        strategy = CoarseStrategy(offload_optimizer=OVERLAP)
        trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", devices=2, **flags, **clipping)
        trainer.fit(module, torch.utils.data.DataLoader(data(0), batch_size=2))
        assert trainer.optimizers[0].overlaps

    with cannot_clip(match=r"Trainer\(gradient_clip_val=0.1\) cannot be combined with"):
        fit(Regression(), gradient_clip_val=0.1)
    with cannot_clip(match=r"clip_gradients\(\) cannot be combined with"):
        fit(ClipsByHand())
    module = Regression()
    fit(module)
    check_agreement(module, "overlap in Lightning")


def overlapping_in_fabric() -> None:
    strategy = CoarseFabricStrategy(offload_optimizer=OVERLAP)
    fabric = lightning.Fabric(strategy=strategy, accelerator="cpu", devices=2)
    fabric.launch()
    module = nn.Linear(4, 1)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    fabric.backward(model(data(fabric.global_rank)).square().mean())
    for clipping in ({"max_norm": 0.1}, {"clip_val": 0.1}):
        with cannot_clip(match=r"clip_gradients\(\) cannot be combined with"):
            fabric.clip_gradients(model, optimizer, **clipping)
    optimizer.step()
    check_agreement(module, "overlap in Fabric")


def with_checkpoints() -> None:
    """What trainers make of an optimizer is saved, restored and recovered as the optimizer in it."""
    for offload_optimizer in (False, True):
        accelerator = Accelerator(cpu=True, offload_optimizer=offload_optimizer)
        fabric = lightning.Fabric(
            strategy=CoarseFabricStrategy(offload_optimizer=offload_optimizer), accelerator="cpu", devices=2
        )
        fabric.launch()
        for prepare, backward in (
            (accelerator.prepare, accelerator.backward),
            (fabric.setup, fabric.backward),
        ):
            check_checkpoints(prepare, backward, offload_optimizer=offload_optimizer)


def check_checkpoints(
    prepare: Callable[..., Any], backward: Callable[[torch.Tensor], None], *, offload_optimizer: bool
) -> None:
    def made() -> tuple[nn.Module, nn.Module, Any]:
        module = nn.Linear(4, 1)
        return module, *prepare(module, torch.optim.AdamW(module.parameters(), lr=0.1))

    def train(model: nn.Module, optimizer: Any, checkpointer: Checkpointer) -> None:
        for inputs in data(dist.get_rank()).split(4):
            optimizer.zero_grad()
            backward(model(inputs).square().mean())
            optimizer.step()
            checkpointer.step()

    with tempfile.TemporaryDirectory() as own_folder:
        folders = [own_folder]
        dist.broadcast_object_list(folders)
        module, model, optimizer = made()
        with Checkpointer(folders[0], module, optimizer) as checkpointer:
            train(model, optimizer, checkpointer)
            checkpointer.save()
        other, its_model, its_optimizer = made()
        with Checkpointer(folders[0], other, its_optimizer) as checkpointer:
            assert checkpointer.restore() == 2
            if offload_optimizer:
                sampler = coarse.torch.ElasticSampler(data(0), its_model, batch_size=4)
                recovery = coarse.torch.Recovery(its_model, its_optimizer, state={"sampler": sampler})
            train(its_model, its_optimizer, checkpointer)
            if offload_optimizer:
                assert recovery.state_dict()["step"] == 2
        with Checkpointer(folders[0], module, optimizer, first_step=2) as checkpointer:
            train(model, optimizer, checkpointer)
        dist.barrier()
    torch.testing.assert_close(module.state_dict(), other.state_dict(), rtol=0, atol=0)


with_accelerate()
with_transformers()
with_lightning()
with_offloaded_optimizers()
with_overlapping_optimizers()
with_checkpoints()
print("all as promised", flush=True)

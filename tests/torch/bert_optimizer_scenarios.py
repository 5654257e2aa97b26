"""Scenarios that train a small BERT with each optimizer of the memory devices, in each dtype."""

from __future__ import annotations

import copy
import functools

import torch
from narrow_optimizer_scenarios import NARROW, MasterWeights, narrow_optimizer
from optimizer_scenarios import STEPS, Make, norm_of, offload
from scenario import Context, Scenario, assert_equal_on_all_workers
from torch import nn

from coarse.torch.optim import Lion

BERT_SCENARIOS: dict[str, Scenario] = {}

BERT_OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.005, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=3e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-4, weight_decay=0.1),
    # A power of two: torch's Adagrad begins with it in the dtype of the parameter, and so in 16 bits.
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=3e-3, initial_accumulator_value=2**-7),
    "lion": lambda p: Lion(p, lr=3e-5, weight_decay=0.1),
}

# How far apart two runs of 200 steps may end, over how far they moved. Lion takes signs: a rounding that turns one
# moves an element by twice the learning rate.
BERT_TOLERANCE = {
    "float32": dict.fromkeys(BERT_OPTIMIZERS, 1e-3) | {"lion": 3e-2},
    "bfloat16": dict.fromkeys(BERT_OPTIMIZERS, 0.1),
    "float16": dict.fromkeys(BERT_OPTIMIZERS, 0.1),
}


def small_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def average_in_float32(_, bucket):  # torch does not know annotations that are text
    """Averages in float32, as memory devices do.

    Torch's own class halves gradients before it adds them, which rounds subnormal float16 gradients. This alone
    makes 200 steps of Lion end apart by 0.24 of their way.
    """
    total = torch.distributed.all_reduce(bucket.buffer().float(), async_op=True).get_future()
    num_workers = torch.distributed.get_world_size()
    return total.then(lambda done: done.value()[0].div_(num_workers).to(bucket.buffer().dtype))


def run_bert(context: Context, make: Make, dtype: torch.dtype, *, overlap: bool) -> dict[str, torch.Tensor]:
    """The losses, and the total change of all parameters."""
    module = small_bert().to(dtype)
    model = context.wrap(module)
    if not context.is_coarse and dtype is not torch.float32:
        model.register_comm_hook(None, average_in_float32)
    before = torch.cat([p.detach().float().flatten() for p in module.parameters()])
    if dtype is torch.float32:
        optimizer = offload(context, make(model.parameters()), model, overlap=overlap)
    else:
        optimizer = narrow_optimizer(context, make, model, overlap=overlap)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * context.rank + step)
        tokens = torch.randint(0, 200, (4, 8), generator=generator)
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens[:, 0] % 2).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert_equal_on_all_workers(context, [p.detach().float() for p in module.parameters()])
    after = torch.cat([p.detach().float().flatten() for p in module.parameters()])
    return {"losses": torch.tensor(losses), "moved": after - before}


for _name, _make in BERT_OPTIMIZERS.items():
    for _dtype, _overlap in (("float32", False), ("bfloat16", True), ("float16", False)):
        BERT_SCENARIOS[f"bert_{_name}_{_dtype}"] = Scenario(
            functools.partial(
                run_bert,
                make=_make,
                dtype=NARROW.get(_dtype, torch.float32),
                overlap=_overlap,
            ),
            True,
            BERT_TOLERANCE[_dtype][_name],
        )


# A float32 weight is rounded once a step, and torch's fused operations round elsewhere: 200 steps are 8e-7 of the
# weights (2**-24 times the root of 200), over how far they moved. Where Lion's sign turns, it is twice a step.
SAME_GRADIENTS_TOLERANCE = dict.fromkeys(BERT_OPTIMIZERS, 2e-5) | {"lion": 1e-3}


def narrow_bert_on_the_same_gradients(context: Context, name: str, dtype: torch.dtype) -> None:
    """Compares with torch's updates of the worker's float32 weights by the same gradients as in the memory devices.

    Separate runs drift apart: a 16-bit parameter that is rounded differently has different gradients from then on.
    With the same gradients 200 updates are as exact as float32.
    """
    make, module = BERT_OPTIMIZERS[name], small_bert().to(dtype)
    twin = copy.deepcopy(module)
    reference = MasterWeights(make, twin.parameters())
    started = [master.detach().clone() for master in reference.masters]
    model = context.wrap(module)
    optimizer = offload(context, make(model.parameters()), model)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * context.rank + step)
        tokens = torch.randint(0, 200, (4, 8), generator=generator)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens[:, 0] % 2).loss.backward()
        for parameter, mine in zip(module.parameters(), twin.parameters(), strict=True):
            mine.grad = None if parameter.grad is None else parameter.grad.clone()
        reference.step()
        optimizer.step()
    kept = optimizer.state_dict()["state"]
    masters = [kept[number]["master"] for number in range(len(started))]
    apart = [ours - theirs.detach() for ours, theirs in zip(masters, reference.masters, strict=True)]
    moved = [theirs.detach() - start for theirs, start in zip(reference.masters, started, strict=True)]
    distance = float(norm_of(apart) / norm_of(moved))
    assert distance < SAME_GRADIENTS_TOLERANCE[name], f"weights are {distance:.1e} of the way apart"
    for parameter, master in zip(module.parameters(), masters, strict=True):
        assert torch.equal(parameter, master.to(dtype)), "a parameter is the rounding of its weights"


SAME_GRADIENTS_SCENARIOS: dict[str, Scenario] = {}

for _name in BERT_OPTIMIZERS:
    for _dtype in NARROW:
        SAME_GRADIENTS_SCENARIOS[f"bert_{_name}_{_dtype}_on_the_same_gradients"] = Scenario(
            functools.partial(narrow_bert_on_the_same_gradients, name=_name, dtype=NARROW[_dtype]), False, 0.0
        )

"""Worker 0 loads a model from a folder, worker 1 builds it without weights, as large models are loaded in practice.

Run by a launcher, with two workers.
"""

from __future__ import annotations

import os
import tempfile

import torch
from accelerate import init_empty_weights
from transformers import GPT2Config, GPT2LMHeadModel

import coarse.torch

RANK = int(os.environ["RANK"])
CONFIG = GPT2Config(
    n_layer=2,
    n_embd=32,
    n_head=2,
    vocab_size=101,
    n_positions=16,
    bos_token_id=0,
    eos_token_id=0,
    resid_pdrop=0,
    embd_pdrop=0,
    attn_pdrop=0,
)


def load() -> GPT2LMHeadModel:
    """On worker 1 all parameters are on the meta device, and buffers are not."""
    if RANK == 1:
        with init_empty_weights():
            module = GPT2LMHeadModel(CONFIG)
        module.tie_weights()  # init_empty_weights() makes two of what was one
        return module
    torch.manual_seed(7)
    with tempfile.TemporaryDirectory() as folder:
        GPT2LMHeadModel(CONFIG).save_pretrained(folder)
        return GPT2LMHeadModel.from_pretrained(folder)


def train(optimize: bool) -> list[torch.Tensor]:
    module = load()
    assert any(each.is_meta for each in module.parameters()) == (RANK == 1)
    model = coarse.torch.DistributedDataParallel(module)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    if optimize:
        optimizer = coarse.torch.DistributedOptimizer(optimizer, model)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + RANK)
        tokens = torch.randint(0, CONFIG.vocab_size, (2, 8), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert module.lm_head.weight is module.transformer.wte.weight
    trained = [each.detach().clone() for each in module.parameters()]
    for each in trained:
        both = [torch.empty_like(each) for _ in range(2)]
        torch.distributed.all_gather(both, each)
        assert torch.equal(*both)
    model.close()
    return trained


for optimize in (True, False):
    trained = train(optimize)
    if RANK == 0:
        assert not any(map(torch.equal, trained, load().parameters())), "nothing was trained"
print("as worker 0", flush=True)

"""On a GPU: its allocator holds what plans promise, for models that are large enough for its blocks not to show."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import slimgrad as sg
from slimgrad.profiler.meter import measured_step
from tests.planner.models import FAST_GROUPS, FAST_OPS, SPEEDS, Case

pytestmark = pytest.mark.gpu

WIDE: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}


def built(name: str) -> Case:
    import transformers as hf

    torch.manual_seed(0)
    ids = torch.randint(0, 4096, (16, 512))
    text = {"input_ids": ids, "labels": ids}
    if name == "gpt2":
        config = hf.GPT2Config(n_layer=4, n_embd=512, n_head=8, vocab_size=4096, use_cache=False)
        return hf.GPT2LMHeadModel(config), text
    if name == "llama":
        config = hf.LlamaConfig(intermediate_size=1408, num_key_value_heads=8, vocab_size=4096, use_cache=False, **WIDE)
        return hf.LlamaForCausalLM(config), text
    if name == "bert":
        config = hf.BertConfig(intermediate_size=2048, vocab_size=4096, **WIDE)
        return hf.BertForSequenceClassification(config), {"input_ids": ids, "labels": ids[:, 0] % 2}
    config = hf.ViTConfig(intermediate_size=2048, image_size=224, **WIDE)
    pictures = {"pixel_values": torch.randn(64, 3, 224, 224), "labels": torch.arange(64) % 2}
    return hf.ViTForImageClassification(config), pictures


def there(name: str) -> Case:
    model, batch = built(name)
    return model.cuda(), {key: value.cuda() for key, value in batch.items()}


def step(model: nn.Module, batch: dict[str, torch.Tensor], held: list[int] | None = None) -> None:
    torch.manual_seed(1)  # of dropout
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(**batch).loss
    if held is not None:
        held.append(torch.cuda.memory_allocated())
    loss.backward()


@pytest.mark.parametrize("speeds", [SPEEDS, FAST_OPS, FAST_GROUPS], ids=["", "fused", "grouped"])
@pytest.mark.parametrize("budget", ["2x", "5x"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_the_allocator_holds_what_was_promised(name: str, budget: str, speeds: sg.Calibration) -> None:
    model, batch = there(name)
    with torch.autocast("cuda", torch.bfloat16):
        plan = sg.plan(sg.profile(model, batch, fake=True), budget, calibration=speeds)
        sg.apply(model, plan, batch=batch)
    step(model, batch)  # compiles kernels, compares what is derived, and has the workspaces of products
    model.zero_grad(set_to_none=True)
    gc.collect()
    before, held = torch.cuda.memory_allocated(), []
    peak = measured_step(lambda: step(model, batch, held), "cuda").peak
    assert plan.peak_bytes is not None
    kept, promised = held[0] - before, plan.peak_bytes - plan.fixed_bytes
    assert abs(kept / plan.kept_bytes - 1) <= 0.02, (kept, plan.kept_bytes)
    assert 0.92 * promised <= peak <= 1.03 * promised, (peak, promised)


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_a_budget_in_bytes_is_met_and_gradients_are_near(name: str) -> None:
    """By `fit`, with what this device was measured to take."""
    model, batch = there(name)
    step(model, batch)
    exact = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    untouched = torch.cuda.memory_allocated() + measured_step(lambda: step(model, batch), "cuda").peak
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16):
        fitted = sg.fit(model, batch, int(0.6 * untouched))
    assert fitted.measured <= 0.6 * untouched
    step(model, batch)
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    off = torch.stack([(one - other).norm() for one, other in zip(found, exact, strict=True)]).norm()
    assert off <= 0.5 * torch.stack([gradient.norm() for gradient in exact]).norm()

"""Small models whose activations dominate, and a device that was not measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import slimgrad as sg
from slimgrad.planner.calibration import Rate

FUSED = Rate(call=1.0, pack=4e-9, unpack=4e-9, pack_scratch=1.0, unpack_scratch=2.25)
"""Too slow for any plan, but its temporaries are those of a CPU."""
FAST = replace(FUSED, call=1e-6, pack=1e-10, unpack=1e-10)
GROUPED = replace(FUSED, pack_scratch=0.64, unpack_scratch=2.0)
"""The same of an op that packs what it is given."""
SPEEDS = sg.Calibration(
    device="test",
    torch="",
    copy=2e9,
    flops={"float32": 2e10},
    launch=3e-6,
    rates={"fused": FUSED, "grouped": GROUPED},
)
"""Made up, so that nothing is measured in tests and plans are the same everywhere."""
FAST_OPS = replace(SPEEDS, rates={"fused": FAST, "grouped": GROUPED})
FAST_GROUPS = replace(SPEEDS, rates={"fused": FUSED, "grouped": replace(GROUPED, call=1e-6, pack=1e-10, unpack=1e-10)})
"""The same, where fused ops are faster than what they stand in for."""

Case = tuple[nn.Module, dict[str, Any]]


def gpt2(batch: int = 8) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=64, n_head=2, vocab_size=100, n_positions=128))
    model.config.use_cache = False  # a cache is an output that keeps keys and values alive
    ids = torch.randint(0, 100, (batch, 128))
    return model, {"input_ids": ids, "labels": ids}


def bert() -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 2, "num_hidden_layers": 3}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, **sizes))
    return model, {"input_ids": torch.randint(0, 100, (8, 128)), "labels": torch.randint(0, 2, (8,))}


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 2, "num_hidden_layers": 3}
    model = ViTForImageClassification(ViTConfig(image_size=64, patch_size=8, **sizes))
    return model, {"pixel_values": torch.randn(16, 3, 64, 64), "labels": torch.randint(0, 2, (16,))}


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 2, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, vocab_size=100, **sizes))
    model.config.use_cache = False
    ids = torch.randint(0, 100, (8, 128))
    return model, {"input_ids": ids, "labels": ids}


def resnet() -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(depths=[3, 4, 3], embedding_size=16, hidden_sizes=[64, 128, 256]))
    return model, {"pixel_values": torch.randn(16, 3, 64, 64), "labels": torch.randint(0, 2, (16,))}


MODELS: dict[str, Callable[[], Case]] = {f.__name__: f for f in (gpt2, bert, vit, llama, resnet)}


def made(name: str) -> Case:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    return model, batch

"""Profiles and reports made by hand, small enough to check every figure by head."""

from __future__ import annotations

from typing import Any

import pytest

from slimgrad.spec import Need, Profile, Report, Site, SiteReport, Storage

MIB = 1 << 20


def site(path: str, node: str, slot: str, need: Need, storage: int, size: int, **more: Any) -> Site:
    defaults = {"module": "Conv2d", "call": 0, "index": 0, "shape": (32, 64, 56, 56), "dtype": "float32"}
    return Site(path=path, node=node, slot=slot, need=need, storage=storage, bytes=size, **{**defaults, **more})


@pytest.fixture
def profile() -> Profile:
    """A ReLU output kept twice, a batch-norm input, a mask, a weight, an input."""
    sites = (
        site(
            "layer1.0.relu",
            "ReluBackward0",
            "result",
            Need.MASK,
            0,
            24 * MIB,
            module="ReLU",
            fn="relu",
            producer="ReluBackward0",
        ),
        site("layer1.0.conv2", "ConvolutionBackward0", "input", Need.OPERAND, 0, 24 * MIB, producer="ReluBackward0"),
        site(
            "layer1.0.bn1",
            "NativeBatchNormBackward0",
            "input",
            Need.VALUES,
            1,
            12 * MIB,
            module="BatchNorm2d",
            producer="ConvolutionBackward0",
        ),
        site(
            "pool",
            "MaxPool2DWithIndicesBackward0",
            "result1",
            Need.INDEX,
            2,
            4 * MIB,
            module="MaxPool2d",
            dtype="int64",
        ),
        site(
            "layer1.0.conv2",
            "ConvolutionBackward0",
            "weight",
            Need.WEIGHT,
            3,
            MIB,
            index=1,
            parameter="layer1.0.conv2.weight",
        ),
        site("", "ConvolutionBackward0", "input", Need.OPERAND, 4, 2 * MIB, module="Net"),
    )
    storages = (
        Storage(bytes=24 * MIB, kind="activation", savers=(0, 1)),
        Storage(bytes=12 * MIB, kind="activation", savers=(2,)),
        Storage(bytes=4 * MIB, kind="activation", savers=(3,)),
        Storage(bytes=MIB, kind="parameter", savers=(4,)),
        Storage(bytes=2 * MIB, kind="input", savers=(5,)),
    )
    return Profile(sites=sites, storages=storages, meta={"model": "Net", "device": "cpu", "fake": False})


def transformer(layers: int = 24) -> Profile:
    """A profile as long as a real one: ten storages a layer, with paths as Hugging Face spells them."""
    kinds = (
        ("input_layernorm", "LlamaRMSNorm", "MulBackward0", "self", Need.VALUES, 8, "ToCopyBackward0"),
        ("self_attn.q_proj", "Linear", "MmBackward0", "self", Need.OPERAND, 4, "MulBackward0"),
        (
            "self_attn",
            "LlamaSdpaAttention",
            "ScaledDotProductFlashAttentionBackward0",
            "query",
            Need.VALUES,
            4,
            "AddBackward0",
        ),
        (
            "self_attn",
            "LlamaSdpaAttention",
            "ScaledDotProductFlashAttentionBackward0",
            "logsumexp",
            Need.EXACT,
            1,
            None,
        ),
        ("self_attn.o_proj", "Linear", "MmBackward0", "self", Need.OPERAND, 4, "ViewBackward0"),
        ("mlp.act_fn", "SiLU", "SiluBackward0", "self", Need.DERIVATIVE, 11, "MmBackward0"),
        ("mlp.gate_proj", "Linear", "MmBackward0", "mat2", Need.WEIGHT, 22, "TBackward0"),
        ("mlp.dropout", "Dropout", "NativeDropoutBackward0", "result1", Need.MASK, 2, "NativeDropoutBackward0"),
        ("mlp.down_proj", "Linear", "MmBackward0", "self", Need.OPERAND, 11, "MulBackward0"),
    )
    sites, storages = [], []
    for layer in range(layers):
        for place, module, node, slot, need, size, producer in kinds:
            storages.append(Storage(bytes=size * MIB, kind="activation", savers=(len(sites),)))
            sites.append(
                site(
                    f"model.layers.{layer}.{place}",
                    node,
                    slot,
                    need,
                    len(storages) - 1,
                    size * MIB,
                    module=module,
                    shape=(2, 32, 1024, 2048),
                    dtype="bfloat16",
                    producer=producer,
                )
            )
    return Profile(sites=tuple(sites), storages=tuple(storages), meta={"model": "LlamaForCausalLM", "device": "cuda:0"})


@pytest.fixture
def long_profile() -> Profile:
    return transformer()


@pytest.fixture
def report(profile: Profile) -> Report:
    relu, conv = profile.sites[:2]
    treated = (
        SiteReport(site=relu, codec="Lossless()", before=24 * MIB, promised=MIB, after=MIB),
        SiteReport(site=conv, codec="TopK(keep=0.1)", before=24 * MIB, promised=5 * MIB, after=5 * MIB),
    )
    return Report(
        kept_before=120 * MIB,
        kept_after=40 * MIB,
        promised=39 * MIB,
        sites=treated,
        reasons=("layer1.0.bn1 needs the VALUES of its input (12.0 MiB), which nothing exact can shrink.",),
        notes=("The last step had a batch of 32.",),
    )

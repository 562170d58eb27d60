"""What the lossless tier buys: kept bytes from the allocator beside the report's and the profile's, and step time.

    python benchmarks/lossless.py [--json out.json] [--small]

kept = bytes the allocator holds at the end of forward above those before it, outputs dropped, the loss kept.
Every workload is random-weight, built from a transformers config; `--small` shrinks them all for a smoke test on CPU,
where there is no allocator to ask and kept is the ledger's figure.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from workloads import Built, bert, gpt2, hf_resnet, hf_vit, llama

import slimgrad as sg


@dataclass(frozen=True)
class Row:
    workload: str
    untouched_mib: float
    lossless_mib: float
    freed_mib: float
    ratio: float
    report_mib: float
    profile_error: float
    fake_error: float
    time_ratio: float


def resnet_through_frozen(small: bool) -> Built:
    """A frozen body between a trained stem and a trained head: gradients flow through, weights do not change."""
    built = hf_resnet(small)
    built.model.resnet.encoder.requires_grad_(False)
    built.model.train()
    built.model.resnet.encoder.eval()
    return built


def resnet_head(small: bool) -> Built:
    return _head_only(hf_resnet(small))


def vit_head(small: bool) -> Built:
    return _head_only(hf_vit(small))


def _head_only(built: Built) -> Built:
    built.model.requires_grad_(False)
    built.model.classifier.requires_grad_(True)
    return built


WORKLOADS: dict[str, Callable[[bool], Built]] = {
    "Llama-like 1.1B, 4x2048": llama,
    "GPT-2 medium, 8x1024": gpt2,
    "BERT-base, 64x256": bert,
    "ViT-B/16, 128x224": hf_vit,
    "ResNet-50, 256x224": hf_resnet,
    "ResNet-50, frozen body, trained stem and head": resnet_through_frozen,
    "ResNet-50, head only": resnet_head,
    "ViT-B/16, head only": vit_head,
}


def forward(model: nn.Module, batch: dict[str, torch.Tensor], device: str) -> torch.Tensor:
    with torch.autocast(device, torch.bfloat16):
        return model(**batch).loss


def kept_bytes(model: nn.Module, batch: dict[str, torch.Tensor], device: str) -> int:
    """The allocator's figure, after two warm steps (cuDNN and cuBLAS take their workspaces in the first)."""
    for _ in range(2):
        forward(model, batch, device).backward()
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = forward(model, batch, device)
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    model.zero_grad()
    return held


def step_ms(model: nn.Module, batch: dict[str, torch.Tensor], device: str, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        forward(model, batch, device).backward()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
        model.zero_grad()
    return statistics.median(times)


def measure(name: str, build: Callable[[bool], Built], device: str, small: bool) -> Row:
    torch.manual_seed(0)
    built = build(small)
    model = built.model.to(device)
    batch = {key: value.to(device) for key, value in built.batch.items()}
    with torch.autocast(device, torch.bfloat16):
        profile = sg.profile(model, batch)
        fake = sg.profile(model, batch, fake=True)
    rounds = 3 if small else 10
    on_gpu = device == "cuda"
    untouched = kept_bytes(model, batch, device) if on_gpu else profile.kept_bytes
    plain_ms = step_ms(model, batch, device, rounds)
    run = sg.apply(model, sg.Lossless())
    forward(model, batch, device).backward()
    model.zero_grad()
    report = run.report()
    slim = kept_bytes(model, batch, device) if on_gpu else report.kept_after
    slim_ms = step_ms(model, batch, device, rounds)
    mib = 2.0**20
    return Row(
        workload=name,
        untouched_mib=untouched / mib,
        lossless_mib=slim / mib,
        freed_mib=(untouched - slim) / mib,
        ratio=untouched / max(slim, 1),
        report_mib=report.kept_after / mib,
        profile_error=profile.kept_bytes / max(untouched, 1) - 1,
        fake_error=fake.kept_bytes / max(untouched, 1) - 1,
        time_ratio=slim_ms / plain_ms,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", help="workloads whose name contains this")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    rows = []
    for name, build in WORKLOADS.items():
        if args.only is None or args.only.lower() in name.lower():
            rows.append(measure(name, build, args.device, args.small or args.device == "cpu"))
            gc.collect()
            torch.cuda.empty_cache() if args.device == "cuda" else None
    print(f"torch {torch.__version__} on {args.device}, bf16 autocast, kept MiB at the end of forward")
    print("| workload | untouched | lossless | freed | ratio | report says | profile | fake profile | step time |")
    print("|---|---|---|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r.workload} | {r.untouched_mib:.1f} | {r.lossless_mib:.1f} | {r.freed_mib:.1f} | {r.ratio:.2f}x | "
            f"{r.report_mib:.1f} | {r.profile_error:+.2%} | {r.fake_error:+.2%} | {r.time_ratio:.3f}x |"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()

"""What plans promise beside what a step takes: kept, peak and time, and per-block checkpointing at the same kept bytes.

    python benchmarks/planned.py --small                                    # a CPU, minutes
    python benchmarks/planned.py vit_b16 resnet50 gpt2 --budgets 2x 4x 8x checkpoint

The budget "checkpoint" is what checkpointing each repeated block keeps, measured in the same run. Promised and measured
bytes count what comes on top of parameters, gradients that are there, and the optimizer's state; both are those of a
forward and backward. Times are medians of steps that take turns with the untouched model's and with checkpointing's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from frontier_systems import Bench, checkpointed, prepared
from workloads import WORKLOADS, Built, Workload, labelled_pictures, tokens

import slimgrad as sg
from slimgrad.profiler.meter import measured_step

CHECKPOINT = "checkpoint"
MIB = 2**20


def small(kind: str, block: str, **sizes: Any) -> Workload:
    """An architecture of transformers, large enough that activations dominate, small enough for a CPU."""

    def build(_: bool) -> Built:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**sizes)
        name = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Bert": "BertForSequenceClassification"}
        model = getattr(transformers, name.get(kind, f"{kind}ForImageClassification"))(config)
        if kind in ("GPT2", "Llama"):
            model.config.use_cache = False  # it is an output, and keeps keys and values alive
            return Built(model, tokens(16, 128, 100), block)
        if kind == "Bert":
            ids = torch.randint(0, 100, (16, 128))
            return Built(model, {"input_ids": ids, "labels": torch.randint(0, 2, (16,))}, block)
        return Built(model, labelled_pictures(16, 64), block)

    return Workload(kind, "", build, bf16=False)


WIDE: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL: dict[str, Workload] = {
    "gpt2": small("GPT2", "GPT2Block", n_layer=4, n_embd=128, n_head=4, vocab_size=100, n_positions=256),
    "bert": small("Bert", "BertLayer", intermediate_size=512, vocab_size=100, **WIDE),
    "vit_b16": small("ViT", "ViTLayer", intermediate_size=512, image_size=64, patch_size=8, **WIDE),
    "llama": small("Llama", "LlamaDecoderLayer", intermediate_size=344, num_key_value_heads=4, vocab_size=100, **WIDE),
    "resnet50": small(
        "ResNet", "ResNetBottleNeckLayer", depths=[3, 4, 6, 3], embedding_size=16, hidden_sizes=[64, 128, 256, 512]
    ),
}
"""For `--small`: the small sizes of the other benchmarks are smaller than what their losses take."""


def main() -> None:
    args = arguments()
    rows: list[dict[str, Any]] = []
    for name in args.workloads:
        for row in rows_of((SMALL if args.small else WORKLOADS)[name], args):
            rows.append(row)
            print(line(row), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["resnet50", "vit_b16", "gpt2", "llama", "bert"])
    parser.add_argument("--budgets", nargs="+", default=["2x", "4x", CHECKPOINT], help="as sg.plan takes them")
    parser.add_argument("--allow", default=None, help="'exact', or names with commas between")
    parser.add_argument("--small", action="store_true", help="small models, for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each")
    parser.add_argument("--min-bytes", type=int, default=None, help="storages below are left alone")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file")
    args = parser.parse_args()
    known = SMALL if args.small else WORKLOADS
    unknown = [name for name in args.workloads if name not in known]
    if unknown:
        parser.error(f"unknown workloads {unknown}; known are {', '.join(known)}")
    return args


def rows_of(workload: Workload, args: argparse.Namespace) -> list[dict[str, Any]]:
    bench = prepared(workload, args.small, args.device)
    with bench.autocast():
        profile = sg.profile(bench.built.model, bench.built.batch, bench.built.loss, fake=True)
        plain, checkpoint = (kept_under(bench, system) for system in (nullcontext, lambda: checkpointed(bench)))
    found = [{"model": workload.title(args.small), "budget": CHECKPOINT, "kept": checkpoint, "kept_before": plain}]
    found[0] |= taken(bench, lambda: checkpointed(bench), args.rounds)
    for budget in args.budgets:
        asked = checkpoint / profile.kept_bytes if budget == CHECKPOINT else budget
        found.append(planned(bench, profile, budget, asked, args) | {"model": workload.title(args.small)})
    bench.rest()
    return found


def planned(bench: Bench, profile: sg.Profile, budget: str, asked: Any, args: argparse.Namespace) -> dict[str, Any]:
    allow = args.allow.split(",") if args.allow and "," in args.allow else args.allow
    start = time.perf_counter()
    try:
        plan = sg.plan(profile, asked, allow=allow, min_bytes=args.min_bytes)
    except sg.BudgetError as error:
        return {"budget": f"plan at {budget}", "error": str(error)}
    seconds = time.perf_counter() - start
    runs: list[sg.Run] = []

    def applied() -> AbstractContextManager[sg.Run]:
        with bench.autocast():  # taught by a batch, even the first step is as promised
            runs.append(sg.apply(bench.built.model, plan, batch=bench.built.batch))
        return removing(runs[-1])

    with applied():
        bench.step(bench.built.model)
    return {
        "budget": f"plan at {budget}",
        "plan_seconds": seconds,
        "kept_before": plan.kept_before,
        "kept_promised": plan.kept_bytes,
        "kept": runs[0].report().kept_after,
        "peak_promised": plan.peak_bytes - plan.fixed_bytes,
        "time_promised": plan.slowdown,
        "gradient_error": plan.error,
        "again": len(plan.recompute),
        **taken(bench, applied, args.rounds),
    }


class removing(AbstractContextManager[sg.Run]):  # noqa: N801 - it reads as what it does
    """The run, until the block ends; `with run:` would extend it over the loss."""

    def __init__(self, run: sg.Run) -> None:
        self.run = run

    def __exit__(self, *_: object) -> None:
        self.run.remove()


def kept_under(bench: Bench, system: Callable[[], AbstractContextManager[Any]]) -> int:
    with system():
        return sg.profile(bench.built.model, bench.built.batch, bench.built.loss, fake=True, timeline=False).kept_bytes


def taken(bench: Bench, system: Callable[[], AbstractContextManager[Any]], rounds: int) -> dict[str, Any]:
    """Peak and time under the system, beside the untouched model's."""
    model = bench.built.model

    def step() -> None:
        bench.forward(model).backward()

    def peak() -> int:
        step()
        bench.optimizer.zero_grad(set_to_none=True)
        found = measured_step(step, bench.device).peak
        bench.optimizer.zero_grad(set_to_none=True)
        return found

    before = peak()
    with system():
        after = peak()
        bench.timed(model, 1)
        treated = bench.timed(model, rounds)
    untouched = bench.timed(model, rounds)
    with system():
        treated += bench.timed(model, rounds)
    ratio = statistics.median(treated) / statistics.median(untouched)
    return {"peak_before": before, "peak": after, "time": ratio}


def line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['model']} | {row['budget']} | {row['error']} |"
    cells = [row["model"], row["budget"], f"{row['kept'] / MIB:.0f}", f"{row['kept_before'] / row['kept']:.1f}"]
    cells += [f"{row['peak'] / MIB:.0f}", f"{row['peak_before'] / row['peak']:.1f}", f"{row['time']:.2f}"]
    if "kept_promised" in row:
        cells += [f"{row['kept'] / row['kept_promised']:.3f}", f"{row['peak'] / row['peak_promised']:.3f}"]
        cells += [f"{row['time_promised']:.2f}", f"{row['gradient_error']:.3f}", str(row["again"])]
        cells += [f"{row['plan_seconds']:.1f}"]
    return "| " + " | ".join(cells) + " |"


HEAD: Sequence[str] = (
    "model", "system", "kept MiB", "÷", "peak MiB", "÷", "time ×", "kept / promised", "peak / promised",
    "time promised", "gradient error", "modules again", "planned in s",
)  # fmt: skip

if __name__ == "__main__":
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
    main()

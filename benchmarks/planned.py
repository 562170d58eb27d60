"""What plans promise beside what a step takes: kept, peak and time, beside checkpointing and others at the same task.

    python benchmarks/planned.py --small                                    # a CPU, minutes
    python benchmarks/planned.py vit_b16 resnet50 gpt2 --budgets 2x 4x 8x checkpoint --json out/planned.json
    python benchmarks/planned.py vit_b16 --systems naive_int8 save_on_cpu "derive()" --plot out/planned.png

The budget "checkpoint" is what checkpointing each repeated block keeps, measured in the same run. Kept bytes are the
allocator's at the end of forward on a GPU, and slimgrad's count elsewhere; peaks are those of a forward and backward,
above parameters and the optimizer's state; both without gradients from before. A system is timed between two phases of
the untouched model. Every row is written to --json as soon as it is there.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from frontier_rows import Row
from frontier_systems import TREATMENTS, Bench, Treated, Treatment, prepared, slimmed, untouched
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
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|", flush=True)
    for name in args.workloads:
        for row in rows_of((SMALL if args.small else WORKLOADS)[name], args):
            rows.append(row)
            print(line(row), flush=True)
            if args.json:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    if args.plot:
        from frontier_plot import plotted

        plotted([drawn(row) for row in rows if "kept" in row], args.plot)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["resnet50", "vit_b16", "gpt2", "llama", "bert"])
    parser.add_argument("--budgets", nargs="*", default=["2x", "4x", CHECKPOINT], help="as sg.plan takes them")
    parser.add_argument("--systems", nargs="*", default=[], help=f"besides: {', '.join(TREATMENTS)}; texts for apply")
    parser.add_argument("--allow", default=None, help="'exact', or names with commas between")
    parser.add_argument("--small", action="store_true", help="small models, for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=8, help="timed steps of each")
    parser.add_argument("--min-bytes", type=int, default=None, help="storages below are left alone")
    parser.add_argument("--json", type=Path, default=None, help="rows, written one by one")
    parser.add_argument("--plot", type=Path, default=None, help="kept bytes and step times, as a picture")
    parser.add_argument("--plans", type=Path, default=None, help="a folder for the plans, as JSON")
    args = parser.parse_args()
    known = SMALL if args.small else WORKLOADS
    unknown = [name for name in args.workloads if name not in known]
    if unknown:
        parser.error(f"unknown workloads {unknown}; known are {', '.join(known)}")
    return args


# --- rows -------------------------------------------------------------------------------------------------------------


def rows_of(workload: Workload, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    bench, title = prepared(workload, args.small, args.device), workload.title(args.small)
    with bench.autocast():
        profile = sg.profile(bench.built.model, bench.built.batch, bench.built.loss, fake=True)
    plain = measured(bench, untouched, args.rounds)
    before = {"workload": title, "kept_before": plain["kept"], "peak_before": plain["peak"]}
    yield {**before, "system": "untouched", **plain}
    checkpoint = measured(bench, TREATMENTS[CHECKPOINT], args.rounds)
    yield {**before, "system": CHECKPOINT, **checkpoint}
    for system in args.systems:
        treat = TREATMENTS.get(system) or partial(slimmed, text=system)
        yield {**before, "system": system, **measured(bench, treat, args.rounds)}
    for budget in args.budgets:
        asked = checkpoint["kept"] / plain["kept"] if budget == CHECKPOINT else budget
        yield {**before, "system": f"plan({budget})", **planned(bench, profile, asked, args, f"{title} {budget}")}
    bench.rest()


def planned(bench: Bench, profile: sg.Profile, budget: Any, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """A plan: what it promises, and what a step takes."""
    allow = args.allow.split(",") if args.allow and "," in args.allow else args.allow
    sg.calibrate(bench.device, profile=profile)
    start = time.perf_counter()
    try:
        plan = sg.plan(profile, budget, allow=allow, min_bytes=args.min_bytes)
    except sg.BudgetError as error:
        return {"error": str(error)}
    seconds = time.perf_counter() - start
    if args.plans:
        args.plans.mkdir(parents=True, exist_ok=True)
        (args.plans / f"{''.join(c if c.isalnum() else '_' for c in name)}.json").write_text(plan.to_json())
    return {
        "plan_seconds": seconds,
        "kept_promised": plan.kept_bytes,
        "peak_promised": plan.peak_bytes - plan.fixed_bytes,
        "time_promised": plan.slowdown,
        "step_promised": plan.step_seconds * 1e3,
        "gradient_error": plan.error,
        "again": len(plan.recompute),
        **measured(bench, partial(following, plan=plan), args.rounds),
    }


@contextmanager
def following(bench: Bench, plan: sg.Plan) -> Iterator[Treated]:
    with bench.autocast():  # taught by a batch, even the first step is as promised
        run = sg.apply(bench.built.model, plan, batch=bench.built.batch)
    yield Treated(bench.built.model, lambda: run.report().kept_after)
    run.remove()


def measured(bench: Bench, treat: Treatment, rounds: int) -> dict[str, Any]:
    """Kept, peak and time under a system."""
    model, half = bench.built.model, (rounds + 1) // 2
    beside = bench.timed(model, half)
    with treat(bench) as treated:
        times = bench.timed(treated.call, rounds)
        kept, peak = memory(bench, treated)
    beside += bench.timed(model, half)
    ms, plain = statistics.median(times), statistics.median(beside)
    return {"kept": kept, "peak": peak, "ms": ms, "untouched_ms": plain, "time": ms / plain}


def memory(bench: Bench, treated: Treated) -> tuple[int, int]:
    """(kept, peak) of a forward and backward."""

    def step() -> None:
        loss = bench.forward(treated.call)
        if bench.device == "cuda":
            held.append(torch.cuda.memory_allocated())
        loss.backward()

    held: list[int] = []
    bench.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    before = torch.cuda.memory_allocated() if bench.device == "cuda" else 0
    peak = measured_step(step, bench.device).peak
    bench.optimizer.zero_grad(set_to_none=True)
    if held:
        return held[0] - before, peak
    assert treated.counted is not None  # what it needs CUDA for says so itself
    return treated.counted(), peak


# --- shown ------------------------------------------------------------------------------------------------------------


def drawn(row: dict[str, Any]) -> Row:
    return Row(workload=row["workload"], system=row["system"], kept=row["kept"], time_ratio=row["time"])


def line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['workload']} | {row['system']} | {row['error']} |"
    cells = [row["workload"], row["system"], f"{row['kept'] / MIB:.0f}", ratio(row["kept_before"], row["kept"])]
    cells += [f"{row['peak'] / MIB:.0f}", ratio(row["peak_before"], row["peak"]), f"{row['ms']:.1f}"]
    cells += [f"{row['time']:.3f}"]
    if "kept_promised" in row:
        cells += [f"{row['kept'] / row['kept_promised']:.3f}", f"{row['peak'] / row['peak_promised']:.3f}"]
        cells += [f"{row['time_promised']:.2f}", f"{row['step_promised']:.1f}", f"{row['gradient_error']:.3f}"]
        cells += [str(row["again"]), f"{row['plan_seconds']:.1f}"]
    return "| " + " | ".join(cells) + " |"


def ratio(before: int, after: int) -> str:
    return f"{before / after:.1f}" if after > before / 1000 else "–"


HEAD: Sequence[str] = (
    "model", "system", "kept MiB", "÷", "peak MiB", "÷", "ms", "time ×", "kept / promised", "peak / promised",
    "time promised", "untouched ms promised", "gradient error", "modules again", "planned in s",
)  # fmt: skip

if __name__ == "__main__":
    main()

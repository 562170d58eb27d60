"""Fine-tune a pretrained text encoder under a memory budget: question classification (TREC) with MiniLM.

    python examples/finetune_minilm.py --data DIR
    python examples/finetune_minilm.py --data DIR --epochs 6 --budget 16MiB --ways head budget
    python examples/finetune_minilm.py --small                 # a tiny random encoder, made sentences: does it run?

DIR has minilm/ (config.json, tokenizer.json, model.fp16.safetensors) and text/TREC.train.all, text/TREC.test.all.

What attention, LayerNorm and GELU keep for the gradient that flows on is no part of TraDy's budget and does not shrink
with it, so it is kept in 4 bits here (`rest=`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transfer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import slimgrad as sg
from slimgrad.report.human import human_bytes

LENGTH = 32
CLASSES = 6
PADDING = 0

WAYS: dict[str, Callable[[str], Any]] = {
    "full": lambda budget: None,
    "full, 4 bits": lambda budget: sg.Quant(bits=4),
    "head": lambda budget: sg.trady(0),
    "budget": lambda budget: sg.trady(budget, rest=sg.Quant(bits=4)),
    "budget, static": lambda budget: sg.trady(budget, rest=sg.Quant(bits=4), mode="static"),
}


@dataclass(frozen=True, eq=False)
class Sentences:
    """Token numbers, padded to one length, and classes."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def steps(self, size: int) -> int:
        return len(self.train[0]) // size

    def batches(self, seed: int, epoch: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed((seed << 20) + epoch)
        for chosen in torch.randperm(len(self.train[0]), generator=generator).split(size)[: self.steps(size)]:
            yield self.train[0][chosen], self.train[1][chosen]

    def tests(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.test[0].split(size), self.test[1].split(size), strict=True)


class Encoder(nn.Module):
    """A BERT, the mean of its outputs over the tokens that are no padding, and a linear layer."""

    def __init__(self, bert: nn.Module, classes: int) -> None:
        super().__init__()
        self.bert = bert
        self.classifier = nn.Linear(bert.config.hidden_size, classes)

    def forward(self, ids: Tensor) -> Tensor:
        real = ids != PADDING
        tokens = self.bert.encoder(self.bert.embeddings(input_ids=ids), attention_mask=real[:, None, None, :])[0]
        weights = real.unsqueeze(2).to(tokens.dtype)
        return self.classifier((tokens * weights).sum(1) / weights.sum(1))


def minilm(folder: Path) -> Encoder:
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    settings = json.loads((folder / "minilm/config.json").read_text(encoding="utf-8"))
    bert = BertModel(BertConfig.from_dict(settings, attn_implementation="sdpa"), add_pooling_layer=False)
    state = load_file(folder / "minilm/model.fp16.safetensors")
    bert.load_state_dict(
        {name: value.float() for name, value in state.items() if not name.startswith("pooler.")}, strict=False
    )
    return Encoder(bert, CLASSES)


def trec(folder: Path) -> Sentences:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "minilm/tokenizer.json"), pad_token="[PAD]")

    def read(name: str) -> tuple[Tensor, Tensor]:
        lines = (folder / "text" / name).read_text(encoding="latin-1").splitlines()
        labels, texts = zip(*(line.split(" ", 1) for line in lines if line), strict=True)
        how = {"padding": "max_length", "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
        return tokenizer(list(texts), **how)["input_ids"], torch.tensor([int(label) for label in labels])

    return Sentences(read("TREC.train.all"), read("TREC.test.all"))


def tiny() -> tuple[Encoder, Sentences]:
    """Random weights, and sentences whose class is their first token."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    bert = BertModel(BertConfig(vocab_size=64, attn_implementation="sdpa", **sizes), add_pooling_layer=False)
    ids = torch.randint(1, 64, (96, LENGTH), generator=torch.Generator().manual_seed(0))
    ids[:, 20:] = PADDING
    labels = ids[:, 0] % CLASSES
    return Encoder(bert, CLASSES), Sentences((ids[:64], labels[:64]), (ids[64:], labels[64:]))


def fine_tuned(model: Encoder, data: Sentences, what: Any, args: argparse.Namespace) -> tuple[transfer.Fitted, int]:
    """Train one way: how it ended, and the bytes kept by the last forward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    run = None if what is None else sg.apply(model, what, optimizer=optimizer)

    def each_epoch(epoch: int) -> None:
        if run is not None and epoch:
            run.epoch()

    fitted = transfer.fit(model, data, optimizer, args.epochs, args.batch, args.seed, clip=1.0, each_epoch=each_epoch)
    if run is not None:
        kept = run.report().kept_after
        run.remove()
    else:
        batch = tuple(part.to(args.device) for part in next(data.batches(0, 0, args.batch)))
        kept = sg.profile(model.train(), batch, F.cross_entropy).kept_bytes
    return fitted, kept


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SLIMGRAD_DATA", "data"))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY")
    parser.add_argument("--budget", default="8MiB", help="bytes for a batch, the head's included")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-4, help="at the peak; AdamW")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="no files; one epoch")
    args = parser.parse_args()
    if args.small:
        args.epochs, args.batch, args.budget = 1, 16, "256KiB"
    return args


def main() -> None:
    args = arguments()
    if not args.small and not (args.data / "minilm").is_dir():
        raise SystemExit(f"there is no folder minilm in {args.data}: --data DIR (see --help), or --small")
    table = Table(title=f"TREC, {args.epochs} epochs, {args.budget}", title_justify="left", box=box.SIMPLE_HEAD)
    for header in ("", "accuracy", "kept", "step"):
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    data = None if args.small else trec(args.data)
    for way in args.ways:
        torch.manual_seed(args.seed)
        model, used = (minilm(args.data), data) if data is not None else tiny()
        fitted, kept = fine_tuned(model.to(args.device), used, WAYS[way](args.budget), args)
        table.add_row(way, f"{100 * fitted.accuracy:.1f} %", human_bytes(kept), f"{1e3 * fitted.step_seconds:.0f} ms")
    Console(width=None if sys.stdout.isatty() else 100).print(table)


if __name__ == "__main__":
    main()

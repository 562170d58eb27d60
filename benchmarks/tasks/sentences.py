"""Sentence classification: SST-2 and TREC, with a pretrained MiniLM under a mean pool and a linear head."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from tasks.base import Batch, Places, Source, epochs_of

CONFIG_FILE = "minilm/config.json"
TOKENIZER_FILE = "minilm/tokenizer.json"
WEIGHTS_FILE = "minilm/model.fp16.safetensors"
MINILM_FILES = (CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE)

SST2_FILES = ("text/sst2/train.tsv", "text/sst2/test.tsv")
SST2_CLASSES = 2
SST2_LENGTH = 48
TREC_FILES = ("text/TREC.train.all", "text/TREC.test.all")
TREC_CLASSES = 6
TREC_LENGTH = 32

Examples = Sequence[tuple[str, int]]
Encode = Callable[[list[str]], tuple[Tensor, Tensor]]
"""From texts to token numbers, and which of them are no padding."""


class Sentences:
    """Sentences as token numbers, padded to one length."""

    def __init__(self, train: Examples, test: Examples, encode: Encode, device: torch.device) -> None:
        self.device = device
        self.train, self.test = (
            tuple(part.to(device) for part in (*encode([text for text, _ in examples]), labels_of(examples)))
            for examples in (train, test)
        )

    @property
    def examples(self) -> int:
        return len(self.train[0])

    def batches(self, seed: int, steps: int, size: int) -> Iterator[Batch]:
        ids, real, labels = self.train
        generator = torch.Generator().manual_seed(seed)
        for chosen in epochs_of(len(ids), generator, steps, size).to(self.device):
            yield (ids[chosen], real[chosen]), labels[chosen]

    def tests(self, size: int) -> Iterator[Batch]:
        for ids, real, labels in zip(*(part.split(size) for part in self.test), strict=True):
            yield (ids, real), labels


def labels_of(examples: Examples) -> Tensor:
    return torch.tensor([label for _, label in examples])


def read_sst2(path: Path) -> Examples:
    """`text<TAB>label` per line."""
    lines = (line.rsplit("\t", 1) for line in path.read_text(encoding="utf-8").splitlines() if line)
    return [(text, int(label)) for text, label in lines]


def read_trec(path: Path) -> Examples:
    """`label text` per line, in Latin-1."""
    lines = (line.split(" ", 1) for line in path.read_text(encoding="latin-1").splitlines() if line)
    return [(text, int(label)) for label, text in lines]


def encoder(tokenizer_file: Path, length: int) -> Encode:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), pad_token="[PAD]")

    def encode(texts: list[str]) -> tuple[Tensor, Tensor]:
        found = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        return found["input_ids"], found["attention_mask"].bool()

    return encode


def load_sst2(places: Places, device: torch.device) -> Sentences:
    train, test = (read_sst2(places.data / name) for name in SST2_FILES)
    return Sentences(train, test, encoder(places.data / TOKENIZER_FILE, SST2_LENGTH), device)


def load_trec(places: Places, device: torch.device) -> Sentences:
    train, test = (read_trec(places.data / name) for name in TREC_FILES)
    return Sentences(train, test, encoder(places.data / TOKENIZER_FILE, TREC_LENGTH), device)


class Classifier(nn.Module):
    """A BertModel, the mean of its outputs over the real tokens, and a linear head."""

    def __init__(self, bert: nn.Module, classes: int) -> None:
        super().__init__()
        self.bert = bert
        self.head = nn.Linear(bert.config.hidden_size, classes)

    def forward(self, ids: Tensor, real: Tensor) -> Tensor:
        # BertModel.forward would ask whether anything is padded, which makes the host wait for the device in every
        # step. The mask is made here, so its parts are called one by one.
        embedded = self.bert.embeddings(input_ids=ids)
        tokens = self.bert.encoder(embedded, attention_mask=real[:, None, None, :])[0]
        weights = real.unsqueeze(2).to(tokens.dtype)
        return self.head((tokens * weights).sum(1) / weights.sum(1))


@cache
def pretrained(path: Path) -> dict[str, Tensor]:
    """MiniLM's weights in single precision, without the pooler, which the mean replaces."""
    from safetensors.torch import load_file

    return {name: value.float() for name, value in load_file(path).items() if not name.startswith("pooler.")}


def minilm(places: Places, classes: int) -> nn.Module:
    from transformers import BertConfig, BertModel

    settings = json.loads((places.data / CONFIG_FILE).read_text(encoding="utf-8"))
    # Other implementations of attention would take the mask of Classifier for something to be added.
    bert = BertModel(BertConfig.from_dict(settings, attn_implementation="sdpa"), add_pooling_layer=False)
    found = bert.load_state_dict(pretrained(places.data / WEIGHTS_FILE), strict=False)
    if found.missing_keys:
        raise ValueError(f"{WEIGHTS_FILE} has no {', '.join(found.missing_keys)}")
    return Classifier(bert, classes)


def minilm_for_sst2(places: Places) -> nn.Module:
    return minilm(places, SST2_CLASSES)


def minilm_for_trec(places: Places) -> nn.Module:
    return minilm(places, TREC_CLASSES)


SST2 = Source("SST-2", (*SST2_FILES, *MINILM_FILES), load_sst2)
TREC = Source("TREC", (*TREC_FILES, *MINILM_FILES), load_trec)

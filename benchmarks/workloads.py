"""The workloads that the benchmarks measure: stock architectures with random weights, nothing is downloaded.

Each has its full size, for a GPU, and a small one that takes a CPU a few seconds. ResNet-50, VGG-16, MobileNetV2 and
the detectors are those of torchvision, ViT-B/16 and ResMLP those of timm, the others those of transformers. Where
torchvision or timm is missing, the small size takes the architecture from transformers, or else the workload says what
it lacks.

What is built lies on torch's default device: `with torch.device("cuda"): workload.build(False)` initialises there.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MissingLibraryError(Exception):
    """The workload needs a library that is not installed."""


@dataclass(frozen=True)
class Built:
    """A model, one batch for it, and what its repeated blocks are."""

    model: nn.Module
    batch: dict[str, Any]
    """The model's keyword arguments."""
    block: str
    """Class name of the repeated blocks: it stays the same over versions of a library while module paths change."""
    target: Tensor | None = None
    """Classes for the cross entropy of a model that returns logits; None if its output carries the loss, or losses."""

    def loss(self, output: Any) -> Tensor:
        if self.target is not None:
            return F.cross_entropy(output, self.target)
        return output.loss if hasattr(output, "loss") else torch.stack(list(output.values())).sum()

    def blocks(self) -> list[nn.Module]:
        """The repeated blocks, in order: what is checkpointed one by one, and what regional compilation compiles."""
        found = [module for module in self.model.modules() if type(module).__name__ == self.block]
        if not found:
            raise LookupError(f"{type(self.model).__name__} has no module of class {self.block}")
        return found


@dataclass(frozen=True)
class Workload:
    """One line of the tables."""

    model: str
    size: str
    build: Callable[[bool], Built]
    bf16: bool = True
    """Under bf16 autocast; otherwise fp32."""
    small: str = "small"
    """What the small size is called."""

    def title(self, small: bool) -> str:
        return ", ".join((self.model, self.small if small else self.size, *(() if self.bf16 else ("fp32",))))


def tokens(batch: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    ids = torch.randint(0, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids}


def labelled_pictures(batch: int, size: int) -> dict[str, Tensor]:
    """For the models of transformers, which compute their loss themselves."""
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, 2, (batch,))}


def classifier(model: nn.Module, block: str, batch: int, size: int) -> Built:
    """A model of torchvision or timm: pictures in, logits of 1000 classes out."""
    return Built(model, {"x": torch.randn(batch, 3, size, size)}, block, torch.randint(0, 1000, (batch,)))


def installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def needed(library: str) -> Any:
    """The library, imported only when a workload of it is built: each worker pays for its own imports alone."""
    if not installed(library):
        raise MissingLibraryError(f"It needs {library}, which is not installed.")
    return importlib.import_module(library)


def llama(small: bool) -> Built:
    """The shape of a 1.1B Llama: 22 layers, width 2048, 32 heads, 4 key-value heads, sequences of 2048."""
    hf = needed("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} if small else {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22
    }  # fmt: skip
    config = hf.LlamaConfig(vocab_size=32000, num_attention_heads=32, num_key_value_heads=4, use_cache=False, **sizes)
    batch = tokens(1, 64, 32000) if small else tokens(4, 2048, 32000)
    return Built(hf.LlamaForCausalLM(config), batch, "LlamaDecoderLayer")


def gpt2(small: bool) -> Built:
    hf = needed("transformers")
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4} if small else {"n_layer": 24, "n_embd": 1024, "n_head": 16}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False, **sizes))
    return Built(model, tokens(1, 64, 50257) if small else tokens(8, 1024, 50257), "GPT2Block")


def bert(small: bool, batch: int = 64) -> Built:
    hf = needed("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 96} if small else {}
    model = hf.BertForSequenceClassification(hf.BertConfig(**sizes))
    ids = torch.randint(0, 30000, (batch // 32, 32) if small else (batch, 256))
    return Built(model, {"input_ids": ids, "labels": torch.randint(0, 2, (len(ids),))}, "BertLayer")


def hf_vit(small: bool) -> Built:
    hf = needed("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 192} if small else {}
    model = hf.ViTForImageClassification(hf.ViTConfig(**sizes))
    return Built(model, labelled_pictures(2 if small else 128, 224), "ViTLayer")


def hf_resnet(small: bool) -> Built:
    hf = needed("transformers")
    model = hf.ResNetForImageClassification(hf.ResNetConfig())
    return Built(model, labelled_pictures(2 if small else 256, 64 if small else 224), "ResNetBottleNeckLayer")


def hf_mobilenet_v2(small: bool) -> Built:
    hf = needed("transformers")
    model = hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config())
    batch = labelled_pictures(2 if small else 256, 64 if small else 224)
    return Built(model, batch, "MobileNetV2InvertedResidual")


def resnet50(small: bool) -> Built:
    if small and not installed("torchvision"):
        return hf_resnet(small)
    model = needed("torchvision").models.resnet50(weights=None)
    return classifier(model, "Bottleneck", *((2, 64) if small else (256, 224)))


def vit_b16(small: bool) -> Built:
    if small and not installed("timm"):
        return hf_vit(small)
    model = needed("timm").create_model("vit_tiny_patch16_224" if small else "vit_base_patch16_224")
    return classifier(model, "Block", 2 if small else 128, 224)


def resmlp(small: bool) -> Built:
    model = needed("timm").create_model("resmlp_12_224" if small else "resmlp_24_224")
    return classifier(model, "ResBlock", 2 if small else 256, 224)


class Stage(nn.Sequential):
    """The layers of VGG from one pool to the next."""


def vgg16(small: bool) -> Built:
    """torchvision's, its flat list of layers grouped into stages: the same operations, with blocks to speak of."""
    model = needed("torchvision").models.vgg16(weights=None)
    stages: list[list[nn.Module]] = [[]]
    for layer in model.features:
        stages[-1].append(layer)
        if isinstance(layer, nn.MaxPool2d):
            stages.append([])
    model.features = nn.Sequential(*(Stage(*layers) for layers in stages if layers))
    return classifier(model, "Stage", *((2, 64) if small else (128, 224)))


def mobilenet_v2(small: bool) -> Built:
    if small and not installed("torchvision"):
        return hf_mobilenet_v2(small)
    model = needed("torchvision").models.mobilenet_v2(weights=None)
    return classifier(model, "InvertedResidual", *((2, 64) if small else (256, 224)))


def detector(small: bool, name: str) -> Built:
    """torchvision's, with a ResNet-50 and a feature pyramid, all layers trained; on pictures of noise with 8 boxes."""
    build = getattr(needed("torchvision").models.detection, name)
    pictures, height, width = (1, 64, 96) if small else (8, 800, 1088)
    corner = torch.rand(pictures, 8, 2) * torch.tensor([width / 2, height / 2])
    size = 16 + torch.rand(pictures, 8, 2) * torch.tensor([width / 2 - 16, height / 2 - 16])
    targets = [
        {
            "boxes": torch.cat([corner[number], corner[number] + size[number]], 1),
            "labels": torch.randint(1, 91, (8,)),
            "masks": torch.randint(0, 2, (8, height, width), dtype=torch.uint8),
        }
        for number in range(pictures)
    ]
    sizes = {"min_size": height, "max_size": width}
    model = build(weights=None, weights_backbone=None, **sizes)
    images = [torch.rand(3, height, width) for _ in range(pictures)]
    return Built(model, {"images": images, "targets": targets}, "Bottleneck")


WORKLOADS: dict[str, Workload] = {
    "resnet50": Workload("ResNet-50", "256x224²", resnet50),
    "resnet50_fp32": Workload("ResNet-50", "256x224²", resnet50, bf16=False),
    "vit_b16": Workload("ViT-B/16", "128x224²", vit_b16),
    "resmlp": Workload("ResMLP-S24", "256x224²", resmlp),
    "gpt2": Workload("GPT-2 medium", "8x1024", gpt2),
    "llama": Workload("Llama-like 1.1B", "4x2048", llama),
    "bert": Workload("BERT-base", "64x256", bert),
    "bert_128": Workload("BERT-base", "128x256", partial(bert, batch=128), small="small, twice the batch"),
    "vgg16": Workload("VGG-16", "128x224²", vgg16, bf16=False),
    "mobilenet_v2": Workload("MobileNetV2", "256x224²", mobilenet_v2, bf16=False),
    "faster_rcnn": Workload(
        "Faster R-CNN", "8x800x1088", partial(detector, name="fasterrcnn_resnet50_fpn"), bf16=False
    ),
    "mask_rcnn": Workload("Mask R-CNN", "8x800x1088", partial(detector, name="maskrcnn_resnet50_fpn"), bf16=False),
}
"""By the name that is typed on the command line. BERT twice: the host sets the pace of 64 sequences, the GPU of 128."""

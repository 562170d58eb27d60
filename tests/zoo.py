"""Small real architectures, for tests that compare the gradients of an untouched model with those of a treated one.

`ZOO` is the table; every entry builds a tiny model with random weights, a batch and a loss, all deterministic, so that
two runs of `gradients` with the same seed agree bit for bit (`test_zoo.py` proves it). Nothing touches the network.

On a GPU some backward kernels add with atomics, in any order. `gradients` therefore asks torch for deterministic
algorithms, and where torch has none (3d pools, adaptive pools) the models below use windows that do not overlap.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import slimgrad as sg

Device = torch.device | str


@dataclass(frozen=True)
class Entry:
    """One architecture. `loss` turns whatever the model returns into a scalar."""

    name: str
    build: Callable[[], nn.Module]  # deterministic given torch.manual_seed before; in training mode
    batch: Callable[[Device], Any]  # dict -> model(**batch), tuple -> model(*batch), else model(batch)
    loss: Callable[[Any], Tensor]
    autocast: bool = True  # runs under bf16 autocast on CPU

    def __str__(self) -> str:
        return self.name


# ---- Convolutional nets ----------------------------------------------------------------------------------------


class _ResidualBlock(nn.Module):
    def __init__(self, inp: int, out: int, stride: int, inplace: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inp, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=inplace)
        self.down: nn.Module = nn.Identity()
        if stride != 1 or inp != out:
            self.down = nn.Sequential(nn.Conv2d(inp, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.inplace:
            y += self.down(x)
        else:
            y = y + self.down(x)
        out: Tensor = self.relu(y)
        return out


class _ResNet(nn.Module):
    """Conv-BN-ReLU with max-pool and residuals, as in torchvision."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.Sequential(_ResidualBlock(16, 16, 1, inplace), _ResidualBlock(16, 32, 2, inplace))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        out: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return out


def _vgg() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Dropout2d(0.1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 64),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(64, 64),
        nn.Dropout(0.5, inplace=True),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class _InvertedResidual(nn.Module):
    def __init__(self, inp: int, out: int, stride: int, expand: int) -> None:
        super().__init__()
        mid = inp * expand
        self.body = nn.Sequential(
            nn.Conv2d(inp, mid, 1, bias=False),
            nn.BatchNorm2d(mid),
            nn.ReLU6(inplace=True),
            nn.Conv2d(mid, mid, 3, stride, 1, groups=mid, bias=False),
            nn.BatchNorm2d(mid),
            nn.ReLU6(inplace=True),
            nn.Conv2d(mid, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.skip = stride == 1 and inp == out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.skip else y


def _mobilenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU6(inplace=True),
        _InvertedResidual(8, 8, 1, 4),
        _InvertedResidual(8, 16, 2, 4),
        _InvertedResidual(16, 16, 1, 4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16, 10),
    )


def _double_conv(inp: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inp, out, 3, padding=1),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
        nn.Conv2d(out, out, 3, padding=1),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
    )


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = _double_conv(3, 8)
        self.down2 = _double_conv(8, 16)
        self.bottom = _double_conv(16, 32)
        self.up2 = nn.ConvTranspose2d(32, 16, 2, 2)
        self.dec2 = _double_conv(32, 16)
        self.up1 = nn.Upsample(scale_factor=2, mode="nearest")
        self.dec1 = _double_conv(24, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        b = self.dec2(torch.cat([b, self.up2(c)], 1))
        out: Tensor = self.head(self.dec1(torch.cat([a, self.up1(b)], 1)))
        return out


class _Detector(nn.Module):
    """A feature pyramid whose two heads run on every level: several outputs, in a dict of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.LeakyReLU(0.1, inplace=True))
        self.c1 = nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.SiLU())
        self.c2 = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.GroupNorm(4, 32), nn.SiLU(inplace=True))
        self.lateral1 = nn.Conv2d(16, 16, 1)
        self.lateral2 = nn.Conv2d(32, 16, 1)
        self.tower = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.LeakyReLU(0.1))
        self.classes = nn.Conv2d(16, 6, 3, 1, 1)
        self.boxes = nn.Conv2d(16, 4, 3, 1, 1)

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        c1 = self.c1(self.stem(x))
        p2 = self.lateral2(self.c2(c1))
        p1 = self.lateral1(c1) + F.interpolate(p2, scale_factor=2.0, mode="nearest")
        levels = [self.tower(p) for p in (p1, p2)]
        return {
            "features": [p1, p2],
            "classes": [self.classes(t).sigmoid() for t in levels],
            "boxes": [F.softplus(self.boxes(t)) for t in levels],
        }


class _Frozen(nn.Module):
    """Fine-tuning: trainable stem and head around a frozen backbone whose BatchNorm stays in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.ReLU(inplace=True))
        self.backbone = nn.Sequential(
            nn.Conv2d(16, 16, 3, 1, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, 1, 1),
            nn.GELU(),
        )
        self.middle = nn.Linear(32, 32)  # weight frozen, bias trained
        self.head = nn.Linear(32, 10)
        self.backbone.requires_grad_(False)
        self.middle.weight.requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> _Frozen:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.backbone(self.stem(x)).flatten(2).transpose(1, 2)
        out: Tensor = self.head(torch.tanh(self.middle(x)).mean(1))
        return out


# ---- Attention, recurrence, sharing, recomputation ---------------------------------------------------------------


class _Encoder(nn.Module):
    """nn.TransformerEncoder: one layer post-norm with ReLU, one pre-norm with GELU; padded keys, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layers = [
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, activation=act, batch_first=True, norm_first=first)
            for act, first in (("relu", False), ("gelu", True))
        ]
        self.first = nn.TransformerEncoder(layers[0], 1, enable_nested_tensor=False)
        self.second = nn.TransformerEncoder(layers[1], 1, norm=nn.LayerNorm(32), enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        x = self.first(self.embed(ids), src_key_padding_mask=padding)
        x = self.second(x, src_key_padding_mask=padding)
        out: Tensor = self.head(x.masked_fill(padding[..., None], 0.0).mean(1))
        return out


class _LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 32, num_layers=2, batch_first=True, dropout=0.1, bidirectional=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        out: Tensor = self.head(y.mean(1))
        return out


class _UnrolledLSTM(nn.Module):
    """The same cell called once per time step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(32, 128)
        self.read = nn.Sequential(nn.Linear(128, 32), nn.Tanh())
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        state: tuple[Tensor, Tensor] | None = None
        seen: list[Tensor] = []
        for step in x.unbind(1):
            h, c = self.cell(step, state)
            state = h, c
            seen.append(self.read(h))
        out: Tensor = self.head(torch.stack(seen, 1).mean(1))
        return out


class _Shared(nn.Module):
    """One Linear called thrice, and a decoder whose weight is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.mix = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.decode = nn.Linear(64, 50, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for act in (F.relu, F.gelu, torch.sigmoid):
            x = x + act(self.mix(self.norm(x)))
        out: Tensor = self.decode(x).flatten(0, 1)
        return out


class _Checkpointed(nn.Module):
    """Three blocks, the middle one and the last one recomputed in backward; dropout inside must draw the same bits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64))
            for _ in range(3)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for i, block in enumerate(self.blocks):
            x = x + (checkpoint(block, x, use_reentrant=False) if i else block(x))
        out: Tensor = self.head(x.mean(1))
        return out


# ---- Every pointwise nonlinearity and pool ------------------------------------------------------------------------

_POINTWISE: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.ReLU(),
    lambda: nn.ReLU6(),
    lambda: nn.LeakyReLU(0.2),
    lambda: nn.RReLU(),  # random slopes in training
    lambda: nn.ELU(),
    lambda: nn.SELU(inplace=True),
    lambda: nn.CELU(),
    lambda: nn.GELU(),
    lambda: nn.GELU(approximate="tanh"),
    lambda: nn.SiLU(),
    lambda: nn.Mish(),
    lambda: nn.Softplus(),
    lambda: nn.Softsign(),
    lambda: nn.Tanh(),
    lambda: nn.Tanhshrink(),
    lambda: nn.Sigmoid(),
    lambda: nn.LogSigmoid(),
    lambda: nn.Hardtanh(),
    lambda: nn.Hardtanh(-0.5, 0.7, inplace=True),
    lambda: nn.Hardsigmoid(),
    lambda: nn.Hardswish(),
    lambda: nn.Softshrink(0.3),
    lambda: nn.Hardshrink(0.3),
    lambda: nn.Threshold(0.1, -0.2),
    lambda: nn.PReLU(8),
    lambda: nn.PReLU(),
    lambda: nn.AlphaDropout(0.1),
    lambda: nn.FeatureAlphaDropout(0.1),
)


class _Medley(nn.Module):
    """Nonlinearities one by one on an image, then 1d and 3d branches with the other convolutions and pools."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.acts = nn.ModuleList(make() for make in _POINTWISE)
        self.mixes = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in self.acts)
        self.norm = nn.InstanceNorm2d(8, affine=True)
        self.flat = nn.Sequential(
            nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.GLU(1), nn.LocalResponseNorm(2), nn.AvgPool2d(2), nn.LPPool2d(2, 2)
        )
        self.line = nn.Sequential(
            nn.Conv1d(8, 8, 5, padding=2), nn.ReLU(), nn.MaxPool1d(3, 2, 1), nn.Conv1d(8, 4, 3, dilation=2, groups=2),
            nn.Softmax(1), nn.AvgPool1d(2), nn.ConvTranspose1d(4, 4, 3, 2), nn.AdaptiveAvgPool1d(5),
        )  # fmt: skip
        self.cube = nn.Sequential(
            nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2),
            nn.ConvTranspose3d(4, 4, 2, 2), nn.LogSoftmax(1), nn.AvgPool3d(2), nn.AdaptiveAvgPool3d(2),
        )  # fmt: skip

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.stem(x))
        for mix, act in zip(self.mixes, self.acts, strict=True):
            x = x + act(mix(x))
            x = x / x.square().mean((1, 2, 3), keepdim=True).add(1e-5).sqrt()
        return {
            "max": F.adaptive_max_pool2d(x, 4),
            "avg": F.adaptive_avg_pool2d(x, 2),
            "flat": self.flat(x),
            "line": self.line(x.flatten(2)),
            "cube": self.cube(x.unsqueeze(1)),
        }


# ---- Hugging Face -------------------------------------------------------------------------------------------------


def _hf(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A transformers model from its config alone; the library is imported only when the model is built."""

    def build() -> nn.Module:
        import transformers

        cls = getattr(transformers, name)
        model: nn.Module = cls(cls.config_class(**options))
        return model.train()

    return build


_SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


# ---- Batches and losses -------------------------------------------------------------------------------------------


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(20)


def _images(device: Device) -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=_generator()).to(device)


def _sequences(device: Device) -> Tensor:
    return torch.randn(4, 24, 32, generator=_generator()).to(device)


def _wide_sequences(device: Device) -> Tensor:
    """Few steps of many rows, so that what one step keeps is not tiny."""
    return torch.randn(16, 8, 32, generator=_generator()).to(device)


def _ids(device: Device) -> Tensor:
    return torch.randint(0, 50, (4, 32), generator=_generator()).to(device)


def _padded_ids(device: Device) -> tuple[Tensor, Tensor]:
    """Token ids and True where they are padding; rows of 32, 20, 27 and 9 tokens."""
    lengths = torch.tensor([32, 20, 27, 9])
    return _ids(device), (torch.arange(32) >= lengths[:, None]).to(device)


def _labels(device: Device) -> Tensor:
    return torch.tensor([1, 0, 2, 1], device=device)


def _labelled_images(device: Device) -> dict[str, Tensor]:
    return {"pixel_values": _images(device), "labels": _labels(device)}


def _labelled_text(device: Device) -> dict[str, Tensor]:
    ids, padding = _padded_ids(device)
    return {"input_ids": ids, "attention_mask": (~padding).long(), "labels": _labels(device)}


def _next_token(device: Device) -> dict[str, Tensor]:
    ids = _ids(device)
    return {"input_ids": ids, "labels": ids.clone()}


def _translation(device: Device) -> dict[str, Tensor]:
    ids, padding = _padded_ids(device)
    labels = ids[:, 4:24].flip(1).contiguous()
    return {"input_ids": ids, "attention_mask": (~padding).long(), "labels": labels}


def _own_loss(out: Any) -> Tensor:
    """The loss a Hugging Face model computes itself when given labels."""
    loss: Tensor = out.loss
    return loss


def _cross_entropy(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device) % logits.shape[1])


def _regression(out: Any) -> Tensor:
    """Squared distance of every tensor in `out` from a fixed ramp (a plain mean would give BatchNorm no gradient)."""
    losses = [F.mse_loss(t.float(), torch.linspace(-1, 1, t.numel()).to(t.device).view_as(t)) for _, t in leaves(out)]
    return torch.stack(losses).sum()


# ---- The table ----------------------------------------------------------------------------------------------------

# fmt: off
ZOO: tuple[Entry, ...] = (
    Entry("resnet", lambda: _ResNet(inplace=False), _images, _cross_entropy),
    Entry("resnet-inplace", lambda: _ResNet(inplace=True), _images, _cross_entropy),
    Entry("vgg", _vgg, _images, _cross_entropy),
    Entry("mobilenet", _mobilenet, _images, _cross_entropy),
    Entry("unet", _UNet, _images, _regression),
    Entry("detector", _Detector, _images, _regression),
    Entry("frozen", _Frozen, _images, _cross_entropy),
    Entry("medley", _Medley, _images, _regression),
    Entry("transformer-encoder", _Encoder, _padded_ids, _cross_entropy),
    Entry("lstm", _LSTM, _sequences, _cross_entropy),
    Entry("lstm-unrolled", _UnrolledLSTM, _wide_sequences, _cross_entropy),
    Entry("shared", _Shared, _ids, _cross_entropy),
    Entry("checkpointed", _Checkpointed, _sequences, _cross_entropy),
    Entry("hf-resnet", _hf("ResNetForImageClassification", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1],
                           num_labels=3), _labelled_images, _own_loss),
    Entry("hf-vit", _hf("ViTForImageClassification", **_SIZE, image_size=32, patch_size=4, num_labels=3),
          _labelled_images, _own_loss),
    Entry("hf-swin", _hf("SwinForImageClassification", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2],
                         num_heads=[2, 4], window_size=4, num_labels=3), _labelled_images, _own_loss),
    Entry("hf-bert", _hf("BertForSequenceClassification", **_SIZE, vocab_size=64, max_position_embeddings=32,
                         num_labels=3), _labelled_text, _own_loss),
    # Eager attention here, so that softmax and dropout are nodes of their own; scaled_dot_product_attention elsewhere.
    Entry("hf-gpt2", _hf("GPT2LMHeadModel", vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4,
                         bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM", attn_implementation="eager"),
          _next_token, _own_loss),
    Entry("hf-llama", _hf("LlamaForCausalLM", **_SIZE, vocab_size=64, num_key_value_heads=2,
                          max_position_embeddings=32), _next_token, _own_loss),
    Entry("hf-t5", _hf("T5ForConditionalGeneration", vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2,
                       num_heads=4, decoder_start_token_id=0), _translation, _own_loss),
    Entry("hf-mamba", _hf("MambaForCausalLM", vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=2,
                          use_mambapy=False), _next_token, _own_loss),
)
# fmt: on


# ---- Running one, and comparing -----------------------------------------------------------------------------------


def fresh(entry: Entry, device: Device = "cpu", *, seed: int = 0) -> nn.Module:
    """The entry's model, always with the same weights for the same seed."""
    torch.manual_seed(seed)
    return entry.build().to(device)


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested dicts, lists and tuples, with its path."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from leaves(item, f"{name}.{i}" if name else str(i))


def call(model: nn.Module, batch: Any) -> Any:
    """`model` on `batch`, spread as its type says."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


@contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic kernels where torch has them; no benchmarking of convolutions; the old settings afterwards."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark


def gradients(
    entry: Entry, model: nn.Module, device: Device, *, autocast: torch.dtype | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """One training step of `model`, which lives on `device`: the gradient of every parameter and every float input.

    As PyTorch's documentation advises, forward and loss run under autocast (if a dtype is given) and backward outside.
    Input gradients are named `input:<path>`. A parameter that got no gradient is absent. `.grad` is left empty.
    """
    model.zero_grad(set_to_none=True)
    batch = entry.batch(device)
    inputs = [(f"input:{name}", t) for name, t in leaves(batch) if t.is_floating_point()]
    for _, tensor in inputs:
        tensor.requires_grad_()
    torch.manual_seed(seed)  # every device's generator
    with deterministic():
        with torch.autocast(torch.device(device).type, dtype=autocast, enabled=autocast is not None):
            loss = entry.loss(call(model, batch))
        torch.autograd.backward(loss)
    found = [*model.named_parameters(), *inputs]
    grads = {name: t.grad for name, t in found if t.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def relative_error(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    """How far off all gradients together are, against their own norm."""
    norm = torch.stack([gradient.double().norm() for gradient in expected.values()]).norm()
    error = torch.stack([(expected[name] - found[name]).double().norm() for name in expected]).norm()
    return float(error / norm)


def assert_same_gradients(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    """Same names, shapes, dtypes, devices and bits. A NaN equals any NaN; 0.0 and -0.0 differ."""
    problems = [f"{name}: only on the {'left' if name in a else 'right'}" for name in sorted(a.keys() ^ b.keys())]
    for name in a.keys() & b.keys():
        problem = _difference(a[name], b[name])
        if problem:
            problems.append(f"{name}: {problem}")
    if problems:
        more = [f"... and {len(problems) - 5} more"] if len(problems) > 5 else []
        raise AssertionError(
            "\n  ".join([f"{len(problems)} of {len(a.keys() | b.keys())} gradients differ", *problems[:5], *more])
        )


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _difference(x: Tensor, y: Tensor) -> str | None:
    """How two gradients differ, in words; None if they are the same."""
    for what in ("shape", "dtype", "device"):
        if getattr(x, what) != getattr(y, what):
            return f"{what} {getattr(x, what)} != {getattr(y, what)}"
    bits = _BITS[x.element_size()]
    differs = (x.contiguous().view(bits) != y.contiguous().view(bits)) & ~(x.isnan() & y.isnan())
    count = int(differs.sum())
    if not count:
        return None
    largest = (x.double() - y.double()).abs()[differs].max().item()
    note = " (signs of zeros)" if largest == 0 else ""
    size = x.abs().max().item()
    return f"{count} of {x.numel()} elements differ, by {largest:.3g} at most{note}; the largest is {size:.3g}"


def assert_only_weights_of_products_differ(
    entry: Entry, what: Any, device: Device, autocast: torch.dtype | None
) -> None:
    """Under a codec for what products read: all gradients of biases, norms and inputs are equal bit for bit."""
    plain = fresh(entry, device)
    treated = copy.deepcopy(plain)
    run = sg.apply(treated, what, min_bytes=1024)
    for seed in range(3):
        expected = gradients(entry, plain, device, autocast=autocast, seed=seed)
        found = gradients(entry, treated, device, autocast=autocast, seed=seed)
        exact = {name for name in expected if expected[name].dim() < 2 or name.startswith("input:")}
        assert_same_gradients({n: expected[n] for n in exact}, {n: found[n] for n in exact})
        assert all(grad.isfinite().all() for grad in found.values())
    assert run.report().kept_after <= run.report().promised

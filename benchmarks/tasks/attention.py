"""The two transformers written out here: a ViT and a character GPT, of the same blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.base import Places
from tasks.images import CLASSES, SIDE
from tasks.resmlp import Patches

INITIAL_STD = 0.02


@dataclass(frozen=True)
class Shape:
    width: int
    depth: int
    heads: int
    dropout: float = 0.0


VIT = Shape(width=192, depth=6, heads=3)
VIT_PATCH = 4
GPT = Shape(width=256, depth=4, heads=4, dropout=0.1)


class Attention(nn.Module):
    def __init__(self, shape: Shape, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = shape.heads, causal
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, shape: Shape, causal: bool) -> None:
        super().__init__()
        width = shape.width
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(shape, causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop_attention, self.drop_mlp = nn.Dropout(shape.dropout), nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_attention(self.attention(self.norm_attention(x)))
        return x + self.drop_mlp(self.mlp(self.norm_mlp(x)))


def blocks(shape: Shape, *, causal: bool) -> nn.Sequential:
    return nn.Sequential(*(Block(shape, causal) for _ in range(shape.depth)))


def with_small_weights(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=INITIAL_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model


class ViT(nn.Module):
    """Patches, learnt positions, blocks; the mean over patches is classified."""

    def __init__(self, shape: Shape, patch: int) -> None:
        super().__init__()
        self.patches = Patches(patch, shape.width)
        self.positions = nn.Parameter(INITIAL_STD * torch.randn((SIDE // patch) ** 2, shape.width))
        self.blocks = blocks(shape, causal=False)
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patches(images) + self.positions)).mean(1))


class CharacterGPT(nn.Module):
    """Token and position embeddings, causal blocks, and a head that is the token embedding again."""

    def __init__(self, shape: Shape, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, shape.width)
        self.positions = nn.Embedding(context, shape.width)
        self.drop = nn.Dropout(shape.dropout)
        self.blocks = blocks(shape, causal=True)
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(self.drop(x))))


def vit(places: Places) -> nn.Module:
    return with_small_weights(ViT(VIT, VIT_PATCH))


def character_gpt(vocabulary: int, context: int) -> nn.Module:
    return with_small_weights(CharacterGPT(GPT, vocabulary, context))

"""The trainings of accuracy.py in one explicit table: model, data, sizes.

Short on purpose: with the default configurations and seeds the whole table is meant for ten minutes on one large GPU.
5 or 6 epochs of CIFAR-10 (ResNet-20: three quarters of one), 2 of SST-2, 3 of TREC, 500 steps of TinyShakespeare.
"""

from __future__ import annotations

from tasks.attention import vit
from tasks.base import NATS_PER_CHARACTER, Recipe, Task
from tasks.characters import SHAKESPEARE, gpt_for_shakespeare
from tasks.images import CIFAR10, DIGITS
from tasks.resmlp import resmlp
from tasks.resnet import resnet18, resnet20
from tasks.sentences import SST2, TREC, minilm_for_sst2, minilm_for_trec
from tasks.vgg import vgg16

TASKS: dict[str, Task] = {
    "resnet18": Task(
        model="ResNet-18",
        sources=(CIFAR10, DIGITS),
        build=resnet18,
        recipe=Recipe(steps=485, batch=512, optimizer="sgd", lr=0.3, weight_decay=5e-4, warmup=0.25),
    ),
    "resnet20": Task(  # small enough for one thread of a CPU: under one epoch, in minutes
        model="ResNet-20",
        sources=(CIFAR10, DIGITS),
        build=resnet20,
        recipe=Recipe(steps=300, batch=128, optimizer="sgd", lr=0.2, weight_decay=5e-4, warmup=0.25),
    ),
    "vit": Task(
        model="ViT",
        sources=(CIFAR10, DIGITS),
        build=vit,
        recipe=Recipe(steps=582, batch=512, optimizer="adamw", lr=1e-3, weight_decay=0.05, warmup=0.15, clip=1.0),
    ),
    "resmlp": Task(
        model="ResMLP",
        sources=(CIFAR10, DIGITS),
        build=resmlp,
        recipe=Recipe(steps=582, batch=512, optimizer="adamw", lr=2e-3, weight_decay=0.05, warmup=0.15, clip=1.0),
    ),
    "sst2": Task(
        model="MiniLM",
        sources=(SST2,),
        build=minilm_for_sst2,
        recipe=Recipe(steps=216, batch=64, optimizer="adamw", lr=1e-4, weight_decay=0.01, warmup=0.1, clip=1.0),
    ),
    "trec": Task(
        model="MiniLM",
        sources=(TREC,),
        build=minilm_for_trec,
        recipe=Recipe(steps=255, batch=64, optimizer="adamw", lr=1e-4, weight_decay=0.01, warmup=0.1, clip=1.0),
    ),
    "shakespeare": Task(
        model="character GPT",
        sources=(SHAKESPEARE,),
        build=gpt_for_shakespeare,
        recipe=Recipe(steps=500, batch=128, optimizer="adamw", lr=2e-3, weight_decay=0.1, warmup=0.1, clip=1.0),
        metric=NATS_PER_CHARACTER,
    ),
}

ALL_TASKS: dict[str, Task] = TASKS | {
    "vgg16": Task(
        model="VGG-16",
        sources=(CIFAR10, DIGITS),
        build=vgg16,
        recipe=Recipe(steps=485, batch=512, optimizer="sgd", lr=0.1, weight_decay=5e-4, warmup=0.25),
    ),
}
"""With those that accuracy.py does not train: bounded.py and comet_ratio.py do."""

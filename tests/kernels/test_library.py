"""The kernels as registered ops: torch's own checks, and a compiler that sees codecs whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import slimgrad as sg
from slimgrad.codecs import Codec, Demand
from slimgrad.kernels import Grid, Groups, Windows, library
from slimgrad.spec import Need
from tests.kernels.cases import buckets, same_bits, sample

RULE = (0.0, 1.0, True, False, False)
POOL = Windows((8, 8), (2, 2), (2, 2), (0, 0), (1, 1))


def indices() -> Tensor:
    return F.max_pool2d(torch.rand(2, 3, 8, 8), 2, return_indices=True)[1]


def packed_groups(how: Groups) -> Tensor:
    return library.pack_groups(torch.randn(5, 300), *how)


TABLE = library.flat_buckets(buckets(3))
PICKED = library.pick_largest(torch.randn(999), 99, True)
GRID = Grid.of((200, 7), 0.4, (32, 16), "bsr", "l1")
MEANS = GRID._replace(group=8)
FORMATS = [Groups(4, 128), Groups(3, 64, zeros=True), Groups(8, 1024, stochastic=True, seed=3)]

CALLS = {
    "pack_bits": lambda: (library.pack_bits, (torch.randn(1001), *RULE)),
    "unpack_bits": lambda: (
        library.unpack_bits,
        (library.pack_bits(torch.randn(1001), *RULE), 1001, 1.0, 0.0, torch.bfloat16),
    ),
    **{f"pack_groups {how}": lambda how=how: (library.pack_groups, (torch.randn(7, 200).t(), *how)) for how in FORMATS},
    **{
        f"unpack_groups {how}": lambda how=how: (
            library.unpack_groups,
            (packed_groups(how), (5, 300), (1, 5), *how, torch.float16),
        )
        for how in FORMATS
    },
    "pack_codes": lambda: (library.pack_codes, (torch.randn(7, 200).t(), *library.flat_buckets(buckets(3)))),
    "unpack_codes": lambda: (
        library.unpack_codes,
        (library.pack_codes(torch.randn(999), *TABLE), (27, 37), (1, 27), *TABLE, torch.float16),
    ),
    "pick_largest": lambda: (library.pick_largest, (torch.randn(7, 200).t(), 140, False)),
    "pick_largest, signed": lambda: (library.pick_largest, (torch.randn(7, 200).t(), 140, True)),
    "put_back": lambda: (library.put_back, (*PICKED[:2], (27, 37), (1, 27), None)),
    "put_back, signed": lambda: (library.put_back, (*PICKED[:2], (27, 37), (1, 27), PICKED[2])),
    "keep_blocks": lambda: (library.keep_blocks, (torch.randn(7, 200).t(), *GRID)),
    "put_blocks_back": lambda: (
        library.put_blocks_back,
        (*library.keep_blocks(torch.randn(200, 7), *GRID)[:2], None, (200, 7), (1, 200), *GRID),
    ),
    "keep_blocks, means": lambda: (library.keep_blocks, (torch.randn(7, 200).t(), *MEANS)),
    "put_blocks_back, means": lambda: (
        library.put_blocks_back,
        (*library.keep_blocks(torch.randn(200, 7), *MEANS), (200, 7), (1, 200), *MEANS),
    ),
    "pack_window": lambda: (library.pack_window, (indices(), *POOL)),
    "unpack_window": lambda: (library.unpack_window, (library.pack_window(indices(), *POOL), *POOL)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_every_op_passes_torchs_own_checks_of_schema_and_fake(call) -> None:
    op, arguments = call()
    torch.library.opcheck(op, arguments)


def round_trip(codec: Codec, demand: Demand):
    return lambda x: codec.unpack(codec.pack(x * 2, demand)) + 1


CODECS: dict[str, tuple[Codec, Demand]] = {
    "quant": (sg.Quant(bits=4), Demand(need=Need.OPERAND)),
    "quant with zeros": (sg.Quant(bits=3), Demand(need=Need.OPERAND, zeros=True)),
    "relu mask": (sg.Lossless(), Demand(need=Need.MASK, fn="relu")),
    "largest": (sg.TopK(keep=0.1), Demand(need=Need.OPERAND)),
    "largest, and signs": (sg.TopK(keep=0.1, signs=True), Demand(need=Need.OPERAND)),
    "blocks": (sg.Blocks(keep=0.1, block=(16, 32)), Demand(need=Need.OPERAND)),
    "blocks, and means": (sg.Blocks(keep=0.1, block=(16, 32), means=8), Demand(need=Need.OPERAND)),
    "largest, 8 bits": (sg.TopK(keep=0.1, values=8), Demand(need=Need.OPERAND)),
}


@pytest.mark.parametrize(("codec", "demand"), CODECS.values(), ids=CODECS.keys())
def test_a_compiler_takes_a_codec_whole_and_gives_the_same_bits(codec: Codec, demand: Demand) -> None:
    x = sample(3000, torch.float32).nan_to_num(0.5).clamp(-9, 9).view(3, 1000)
    x = x.relu() if demand.zeros else x
    run = round_trip(codec, demand)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(x), run(x))

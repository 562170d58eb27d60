"""The contract every codec keeps, over the cases in tests/settings.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import slimgrad as sg
from slimgrad.codecs import CODECS, Codec, codec_from_dict
from tests.settings import CASES, Case, normal

SHAPES: dict[str, tuple[int, ...]] = {
    "0-d": (),
    "empty": (0,),
    "empty 3-d": (2, 0, 3),
    "one": (1,),
    "odd": (3, 5, 7),
    "prime": (10007,),
    "image": (2, 3, 9, 11),
    "volume": (1, 2, 3, 4, 5),
}


def every_dtype() -> pytest.MarkDecorator:
    params = [
        pytest.param(case, dtype, id=f"{case}-{dtype}".replace("torch.", "")) for case in CASES for dtype in case.dtypes
    ]
    return pytest.mark.parametrize(("case", "dtype"), params)


def round_trip(case: Case, tensor: Tensor) -> Tensor:
    packed = case.codec.pack(tensor, case.demand)
    assert packed.nbytes == case.codec.promised(tensor.shape, tensor.dtype, case.demand) or not case.codec.sized
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in packed.payload}
    assert packed.nbytes == sum(held.values())
    return case.codec.unpack(packed)


def check(case: Case, tensor: Tensor) -> None:
    before = tensor.clone()
    after = round_trip(case, tensor)
    assert after.shape == tensor.shape and after.dtype == tensor.dtype and after.device == tensor.device
    assert case.delivers(before, after)


@every_dtype()
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_shape_dtype_and_value_survive_and_bytes_are_as_promised(
    case: Case, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    check(case, normal(shape, dtype))


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1),
    "permuted": lambda t: t.permute(2, 0, 3, 1),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "offset": lambda t: t[1:],
}


@every_dtype()
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_dense_strides_survive(case: Case, dtype: torch.dtype, layout) -> None:
    tensor = layout(normal((4, 3, 6, 5), dtype))
    assert round_trip(case, tensor).stride() == tensor.stride()
    check(case, tensor)


@every_dtype()
def test_strided_and_expanded_tensors_come_back_with_their_values(case: Case, dtype: torch.dtype) -> None:
    check(case, normal((6, 10), dtype)[:, ::2])
    check(case, normal((6, 1), dtype).expand(6, 9))
    check(case, normal((8, 8), dtype)[2:5, 1:6])


@every_dtype()
def test_packing_copies_so_that_later_changes_do_no_harm(case: Case, dtype: torch.dtype) -> None:
    tensor = normal((64, 3), dtype)
    before, packed = tensor.clone(), case.codec.pack(tensor, case.demand)
    tensor.zero_()
    assert case.delivers(before, case.codec.unpack(packed))


@every_dtype()
def test_nan_and_infinity_survive_as_far_as_the_demand_reads_them(case: Case, dtype: torch.dtype) -> None:
    tensor = normal((5, 9), dtype)
    if dtype.is_floating_point:
        tensor[0, 0], tensor[1, 1], tensor[2, 2], tensor[3, 3] = float("nan"), float("inf"), -float("inf"), -0.0
    check(case, tensor)


@every_dtype()
def test_the_same_input_gives_the_same_bits(case: Case, dtype: torch.dtype) -> None:
    first, second = (case.codec.pack(normal((333,), dtype), case.demand).payload for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("codec", [kind() for kind in CODECS.values()], ids=repr)
def test_codecs_print_as_typed_and_round_trip_through_json(codec: Codec) -> None:
    assert eval(repr(codec), vars(sg)) == codec
    assert type(codec).from_json(codec.to_json()) == codec == codec_from_dict(codec.to_dict())


def test_every_codec_in_the_table_has_a_case() -> None:
    assert {type(case.codec) for case in CASES} == set(CODECS.values())


def test_an_unknown_codec_is_refused_with_the_known_ones() -> None:
    with pytest.raises(sg.SpecError, match="unknown codec 'Magic'; known are Keep, Lossless, Quant, FewBit"):
        codec_from_dict({"type": "Magic", "version": 1})


def test_json_of_another_version_is_refused() -> None:
    with pytest.raises(sg.SpecError, match="reads version 1, the text has 99"):
        sg.Lossless.from_json('{"type": "Lossless", "version": 99}')

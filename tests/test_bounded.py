"""Bounded: every element within the bound, whatever the data; and buffers whose size is known too late."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import slimgrad as sg
from slimgrad.codecs import Bounded, Demand, Packed, bounded
from slimgrad.kernels.bounds import Extent

OPERAND, WITH_MASK = Demand(need=sg.Need.OPERAND), Demand(need=sg.Need.OPERAND, zeros=True)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any size up to three tiles, any magnitude from subnormal to huge, constant, sparse, smooth, or with a NaN."""
    n = draw(st.integers(0, 6000))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    kind = draw(st.sampled_from(["white", "relu", "constant", "zero", "smooth", "spread", "integers"]))
    if kind == "relu":
        x = x.relu()
    elif kind == "constant":
        x = torch.ones(n, dtype=torch.float64)
    elif kind == "zero":
        x = torch.zeros(n, dtype=torch.float64)
    elif kind == "smooth":
        x = x.cumsum(0) / 10
    elif kind == "spread":
        x = x * torch.exp(torch.randn(n, generator=generator, dtype=torch.float64) * 5)
    elif kind == "integers":
        x = x.mul(3).round()
    x = (x * 10.0 ** draw(st.integers(-42, 38))).to(draw(st.sampled_from(DTYPES)))
    if n and draw(st.booleans()):
        x[draw(st.integers(0, n - 1))] = draw(st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0]))
    return x


@settings(max_examples=300, deadline=None)
@given(
    x=tensors(),
    exponent=st.integers(-36, 36),
    predict=st.sampled_from(["none", "lorenzo", "auto"]),
    dither=st.booleans(),
    demand=st.sampled_from([OPERAND, WITH_MASK]),
)
def test_every_element_is_within_the_bound(
    x: Tensor, exponent: int, predict: str, dither: bool, demand: Demand
) -> None:
    codec = Bounded(bound=10.0**exponent, predict=predict, dither=dither)
    packed = codec.pack(x, demand)
    found = codec.unpack(packed)
    finite = x.isfinite()
    assert ((x.double() - found.double())[finite].abs() <= codec.bound).all()
    assert torch.equal(x[~finite].nan_to_num(7.0), found[~finite].nan_to_num(7.0))
    assert (found[x == 0] == 0).all()
    if demand.zeros:
        assert torch.equal(x[finite].sign(), found[finite].sign())
    again = codec.pack(x, demand)
    assert all(torch.equal(a, b) for a, b in zip(packed.payload, again.payload, strict=True))
    assert packed.nbytes <= x.nbytes * (1 + 2.0**-6) + Extent(2048, 4).nbytes(1024 * x.element_size())


@pytest.mark.parametrize("demand", [OPERAND, WITH_MASK], ids=["values", "values and mask"])
@pytest.mark.parametrize("dither", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bound_near_the_largest_number_makes_nothing_infinite(
    dtype: torch.dtype, dither: bool, demand: Demand
) -> None:
    most = torch.finfo(dtype).max
    x = torch.randn(500, generator=torch.Generator().manual_seed(0)).to(dtype)
    for part in (0.4, 0.6, 0.99):
        codec = Bounded(bound=part * most, dither=dither)
        assert codec.unpack(codec.pack(x, demand)).isfinite().all()


def correlated(n: int, keep: float) -> Tensor:
    """x_t = keep x_(t-1) + noise, of variance 1."""
    noise = torch.randn(n, generator=torch.Generator().manual_seed(0)).double() * math.sqrt(1 - keep**2)
    steps = torch.arange(n // 64)
    powers = keep ** (steps[:, None] - steps[None, :]).clamp(min=0).double() * (steps[:, None] >= steps[None, :])
    return (powers @ noise.view(64, -1).t()).t().flatten().float()


def ratio(x: Tensor, codec: Bounded, demand: Demand = OPERAND) -> float:
    return x.nbytes / codec.pack(x, demand).nbytes


def test_ratios_come_near_the_limit_of_entropy() -> None:
    """Limits at a tenth of the standard deviation: 12.7x for white noise after a ReLU, 13.8x for x_t = 0.9 x_(t-1)."""
    white = torch.randn(2**19, generator=torch.Generator().manual_seed(0)).relu()
    smooth = correlated(2**16, 0.9).relu()
    assert ratio(white, Bounded(bound=0.1)) > 10.4
    assert ratio(smooth, Bounded(bound=0.1, predict="lorenzo")) > 10.5
    assert ratio(white, Bounded(bound=0.1), WITH_MASK) > 9.8
    assert ratio(white.bfloat16(), Bounded(bound=0.1)) > 5.1
    assert ratio(torch.zeros(2**16), Bounded()) > 200
    assert ratio(white, Bounded(bound=1e-7)) > 0.98  # nothing to gain, next to nothing lost


def test_prediction_is_for_smooth_maps_and_auto_knows() -> None:
    smooth = torch.sin(torch.arange(2**14) / 100)
    white = torch.randn(2**14, generator=torch.Generator().manual_seed(0))
    kinds = {
        kind: (ratio(smooth, b), ratio(white, b))
        for kind in ("none", "lorenzo", "auto")
        if (b := Bounded(predict=kind))
    }
    assert kinds["lorenzo"][0] > 2 * kinds["none"][0] and kinds["lorenzo"][1] < kinds["none"][1]
    assert kinds["auto"][0] >= kinds["lorenzo"][0] and kinds["auto"][1] >= kinds["none"][1]


# --- sizes that are known later; on a CPU it is played that they are ---


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of a layout are remembered with the codec, so each test takes another bound."""
    monkeypatch.setattr(bounded, "knows_later", lambda device: True)


@pytest.mark.usefixtures("later")
def test_what_does_not_fit_is_packed_again_and_never_coarser() -> None:
    codec = Bounded(bound=0.101)
    rooms = []
    for scale in (0.2, 0.2, 50.0, 0.2):
        x = torch.randn(2**16) * scale
        packed = codec.start(x, OPERAND)
        found = codec.unpack(packed)
        assert (x - found).abs().max() <= codec.bound
        assert packed.pending is None
        rooms.append(len(packed.payload[0]) - int(packed.payload[2][-1]))
    assert packed.extra.misfits == 1
    assert rooms[0] == rooms[2] == 0, "what was packed twice, or with room for anything, has what it takes"
    assert 0 < rooms[1] < 2**16 and rooms[3] == 0


@pytest.mark.usefixtures("later")
def test_until_it_is_known_the_tensor_itself_is_held_and_counted() -> None:
    codec = Bounded(bound=0.102)
    codec.pack(torch.randn(2**16), OPERAND)
    x = torch.randn(2**16)
    packed = codec.start(x, OPERAND)
    assert packed.nbytes > x.nbytes
    packed.settle()
    assert packed.nbytes < x.nbytes / 4


@pytest.mark.usefixtures("later")
def test_a_change_in_place_is_noticed_where_it_matters() -> None:
    codec = Bounded(bound=0.103)
    codec.pack(torch.zeros(2**16), OPERAND)
    x = torch.randn(2**16)
    fits, misfits = codec.start(x * 0, OPERAND), codec.start(x, OPERAND)
    x.add_(1)
    assert not codec.unpack(fits).any()
    with pytest.raises(sg.SavedTensorModifiedError, match="was changed in place while it was packed"):
        misfits.settle()


@pytest.mark.usefixtures("later")
def test_a_training_holds_no_more_than_two_tensors_that_are_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))
    starts: list[Packed] = []
    monkeypatch.setattr(bounded._Pending, "ready", property(lambda pending: False))
    start = Bounded.start
    monkeypatch.setattr(Bounded, "start", lambda *what: (starts.append(start(*what)), starts[-1])[1])
    run = sg.apply(model, Bounded(bound=0.0104), min_bytes=0)
    for _ in range(4):
        starts.clear()
        loss = model(torch.randn(128, 64)).square().mean()
        assert sum(packed.pending is not None for packed in starts) <= 2
        loss.backward()
        assert all(packed.pending is None for packed in starts)
    assert len(starts) == 5, "of the last ReLU a mask is enough"
    assert run.report().kept_after < run.report().kept_before / 2


def test_one_packed_serves_a_convolution_and_the_relu_before_it() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    treated = nn.Sequential(*plain)
    x = torch.randn(4, 3, 20, 20, requires_grad=True)
    plain(x).square().sum().backward()
    exact = {name: p.grad.clone() for name, p in plain.named_parameters()}
    dx, x.grad = x.grad, None
    run = sg.apply(treated, Bounded(bound=1e-3), min_bytes=0)
    for _ in range(3):
        treated.zero_grad()
        x.grad = None
        treated(x).square().sum().backward()
        assert torch.equal(x.grad, dx), "masks are exact, and a convolution's input is nothing to dX"
        for name, p in treated.named_parameters():
            assert torch.equal(p.grad, exact[name]) is (name not in ("2.weight", "4.weight"))
            assert torch.allclose(p.grad, exact[name], rtol=1e-2, atol=1e-2 * float(exact[name].abs().max()))
    assert all("Bounded" in site.codec for site in run.report().sites)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"bound": 0.0}, "bound must be a positive number that float32 can hold, found 0.0"),
        ({"bound": -1}, "bound must be a positive number"),
        ({"bound": 1e-60}, "that float32 can hold, found 1e-60"),
        ({"bound": math.nan}, "found nan"),
        ({"bound": True}, "found True"),
        ({"relative": 1}, "relative must be True or False, found 1"),
        ({"dither": None}, "dither must be True or False, found None"),
        ({"predict": "spline"}, "predict must be one of none, lorenzo, auto; found 'spline'"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(sg.SpecError, match=message):
        Bounded(**kwargs)

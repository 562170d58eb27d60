"""Block pruning: forward and dX exact, dW from the strongest blocks alone, and never from the tensor put together."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import slimgrad as sg
from slimgrad.codecs import Blocks, Demand
from slimgrad.kernels.reference_blocks import places
from slimgrad.ops import block_size
from slimgrad.ops.block_operand import BlockOperand
from slimgrad.rules import AnyOf, Rule
from tests.models import PRODUCTS, Behind, Projections, mlp, one_backward, read_by, step
from tests.zoo import ZOO, Entry, assert_only_weights_of_products_differ

OPERAND = Demand(need=sg.Need.OPERAND)
SMALL = (16, 16)


@pytest.fixture
def put_together(monkeypatch: pytest.MonkeyPatch) -> list[BlockOperand]:
    """The operands whose tensor was needed after all."""
    seen: list[BlockOperand] = []
    whole = BlockOperand.whole
    monkeypatch.setattr(BlockOperand, "whole", lambda operand: (seen.append(operand), whole(operand))[1])
    return seen


def strongest(x: Tensor, features: int, keep: float, block: tuple[int, int], layout: str) -> Tensor:
    """The same in another way: block after block, in loops."""
    moved = x.movedim(features, -1)
    rows = moved.reshape(-1, moved.shape[-1])
    pieces = [list(strip.split(block[1], 1)) for strip in rows.split(block[0], 0)]
    norms = [[float(piece.abs().double().sum()) for piece in line] for line in pieces]
    down, across = len(norms), len(norms[0])
    count = lambda n: -int(-round(keep * n, 6) // 1)  # noqa: E731
    places = [(i, j) for i in range(down) for j in range(across)]
    order = sorted(places, key=lambda at: -norms[at[0]][at[1]])
    columns = [[at for at in order if at[1] == j][: count(down)] for j in range(across)]
    kept = {at for column in columns for at in column} if layout == "balanced" else set(order[: count(down * across)])
    lines = [[p if (i, j) in kept else p * 0 for j, p in enumerate(line)] for i, line in enumerate(pieces)]
    found = torch.cat([torch.cat(line, 1) for line in lines], 0)
    return found.view(moved.shape).movedim(-1, features)


ONES = {
    "conv2d, 1x1": (lambda: nn.Conv2d(24, 40, 1), (4, 24, 12, 12)),
    "conv2d, 1x1, channels_last": (lambda: nn.Conv2d(24, 40, 1).to(memory_format=torch.channels_last), (4, 24, 9, 9)),
    "conv3d, 1x1": (lambda: nn.Conv3d(24, 8, 1, bias=False), (2, 24, 4, 5, 6)),
    "conv2d, 1x1, stride": (lambda: nn.Conv2d(24, 40, 1, stride=2), (4, 24, 12, 12)),
}
SHORTCUT = ("linear", "conv2d, 1x1", "conv3d, 1x1", "Conv1D of transformers")
"""Names of layers whose dW is a product with blocks; `stride` is not."""


LAYERS = {**PRODUCTS, **ONES}
NARROW = ("conv3d", "conv_transpose3d")
"""Three channels fill no block: more would be kept than there is."""


@pytest.mark.parametrize("layout", ["balanced", "bsr"])
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in NARROW])
def test_dw_sees_the_strongest_blocks_and_dx_everything(
    name: str, layout: str, put_together: list[BlockOperand]
) -> None:
    build, shape = LAYERS[name]
    torch.manual_seed(0)
    plain = Behind(build())
    treated = copy.deepcopy(plain)
    run = sg.apply(treated, Blocks(keep=0.3, block=SMALL, layout=layout), min_bytes=0)
    x = torch.randn(shape)
    features = 1 if isinstance(plain.layer, nn.modules.conv._ConvNd) and x.dim() >= 4 else x.dim() - 1
    x = x.to(memory_format=torch.channels_last) if "channels_last" in name else x
    for _ in range(3):  # watched, counted, worked
        (y, dx, dy), (treated_y, treated_dx, _) = one_backward(plain, x), one_backward(treated, x)
        assert torch.equal(y, treated_y), "forward"
        assert torch.equal(dx, treated_dx), "dX"
        assert dx.stride() == treated_dx.stride()
        alone, read = read_by(plain.layer, x * 1.5)
        alone(strongest(read, features, 0.3, SMALL, layout)).backward(dy)
        assert torch.allclose(treated.layer.weight.grad, alone.weight.grad, atol=1e-5, rtol=1e-4)
        assert treated.layer.weight.grad.stride() == plain.layer.weight.grad.stride()
        if plain.layer.bias is not None:
            assert torch.equal(treated.layer.bias.grad, plain.layer.bias.grad)
    assert bool(put_together) is not (name.startswith(SHORTCUT) and "stride" not in name)
    report = run.report()
    padding = ["Lossless()"] if "reflect" in name else []  # which saves its own input, for its shape
    assert [site.codec for site in report.sites] == [*padding, repr(Blocks(keep=0.3, block=SMALL, layout=layout))]
    assert report.kept_after == report.promised < report.kept_before


@pytest.mark.parametrize("name", NARROW)
def test_what_fills_no_block_is_left_alone(name: str) -> None:
    build, shape = LAYERS[name]
    model = Behind(build())
    run = sg.apply(model, Blocks(keep=0.3, block=SMALL), min_bytes=0)
    for _ in range(2):
        one_backward(model, torch.randn(shape))
    assert not run.report().sites


@pytest.mark.parametrize("group", [2, 16])
def test_what_is_dropped_may_be_told_by_its_means(group: int, put_together: list[BlockOperand]) -> None:
    torch.manual_seed(0)
    x = torch.randn(90, 40) + torch.linspace(-2, 2, 40)
    codec = Blocks(keep=0.4, block=SMALL, means=group)
    packed = codec.pack(x, OPERAND)
    means = torch.cat([rows.mean(0, keepdim=True).expand_as(rows) for rows in x.split(group)])
    # The blocks that means tell least of are kept.
    kept = strongest(x - means, 1, 0.4, SMALL, "balanced") != 0
    expected = torch.where(kept, x, means)
    assert torch.allclose(codec.unpack(packed), expected, atol=1e-6)
    assert torch.equal(codec.unpack(packed)[kept], x[kept])
    assert packed.nbytes == Blocks(keep=0.4, block=SMALL).promised(x.shape, x.dtype) + -(-90 // group) * 40 * 4
    dy = torch.randn(90, 24)
    assert torch.allclose(torch.mm(dy.t(), BlockOperand(codec, packed)), dy.t() @ expected, atol=1e-4)
    assert not put_together


def test_norms_may_be_taken_from_some_rows() -> None:
    x = torch.randn(64, 32)
    x[1::2] *= 100  # rows that are not looked at
    x[16:32] *= 2
    packed = Blocks(keep=0.25, block=SMALL, sample=2).pack(x, OPERAND)
    assert packed.payload[1].tolist() == [1, 1]
    assert torch.equal(packed.payload[0][0, 0], x[16:32, :16])


@pytest.mark.parametrize("means", [0, 4])
@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("layout", ["balanced", "bsr"])
def test_drawn_blocks_are_the_tensor_on_average(layout: str, norm: str, means: int) -> None:
    """Each of 500 draws comes from other norms in the first column, all else being the same."""
    torch.manual_seed(0)
    x = torch.randn(160, 48) * torch.linspace(0.5, 3, 160)[:, None]
    codec = Blocks(keep=0.3, block=SMALL, layout=layout, norm=norm, means=means, unbiased=True)
    total, square = torch.zeros(160, 32), torch.zeros(160, 32)
    for _ in range(500):
        x[-16:, :16] = torch.randn(16, 16)
        packed = codec.pack(x, OPERAND)
        assert packed.nbytes == codec.promised(x.shape, x.dtype)
        found = codec.unpack(packed)[:, 16:]
        total, square = total + found, square + found**2
    mean = total / 500
    error = ((square / 500 - mean**2).clamp(min=0) / 500).sqrt()
    assert ((mean - x[:, 16:]).abs() <= 5 * error + 1e-2 * x[:, 16:].abs()).all()
    assert (mean - x[:, 16:]).square().mean() < 2 * error.square().mean()


def test_a_draw_takes_each_block_once_and_certain_ones_as_they_are() -> None:
    x = torch.rand(320, 32) + 0.5
    x[64:80] *= 100
    codec = Blocks(keep=0.25, block=SMALL, unbiased=True)
    for number in range(50):
        x[0] = number
        values, index = codec.pack(x, OPERAND).payload
        for column, rows in enumerate(index.view(2, 5).tolist()):
            assert sorted(set(rows)) == rows
            assert torch.allclose(values[column, rows.index(4)], x[64:80, 16 * column : 16 * column + 16], rtol=1e-4)


@pytest.mark.parametrize("means", [0, 4])
@pytest.mark.parametrize("layout", ["balanced", "bsr"])
@pytest.mark.parametrize("part", [0.0, 0.2, 0.5, 0.7])
def test_where_fewer_blocks_than_are_kept_have_anything_in_them_all_are_kept_as_they_are(
    part: float, layout: str, means: int
) -> None:
    """As in batches that are filled up with zeros. Chances are rounded up to a 65536th."""
    x = torch.zeros(320, 48)
    x[: int(part * 320)] = torch.randn(int(part * 320), 48)
    codec = Blocks(keep=0.7, block=SMALL, layout=layout, means=means, unbiased=True)
    packed = codec.pack(x, OPERAND)
    grid = packed.extra.grid
    drawn = places(packed.payload[1], grid)
    assert len(set(zip(drawn.across.tolist(), drawn.down.tolist(), strict=True))) == grid.blocks
    assert torch.allclose(codec.unpack(packed), x, rtol=1e-3, atol=1e-3)
    dy = torch.randn(320, 24)
    assert torch.allclose(torch.mm(dy.t(), BlockOperand(codec, packed)), dy.t() @ x, rtol=1e-3, atol=1e-2)


def test_convolutions_over_samples_of_zeros_get_the_whole_gradient() -> None:
    """They read the tensor put together, where a block that was drawn twice would stand once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3, bias=False), nn.ReLU(), nn.Conv2d(32, 32, 3))
    images = torch.zeros(16, 3, 12, 12)
    images[:4] = torch.randn(4, 3, 12, 12)
    plain = copy.deepcopy(model)
    sg.apply(model, sg.block_pruning(keep=0.5, block=SMALL, skip=()), min_bytes=0)
    for _ in range(2):
        for each in (model, plain):
            each.zero_grad()
            each(images).square().sum().backward()
        assert torch.allclose(model[2].weight.grad, plain[2].weight.grad, rtol=1e-3, atol=1e-4)


def test_drawn_products_multiply_the_blocks(put_together: list[BlockOperand]) -> None:
    x, dy = torch.randn(90, 40), torch.randn(90, 24)
    for codec in (Blocks(keep=0.4, block=SMALL, unbiased=True), Blocks(keep=0.4, block=SMALL, means=4, unbiased=True)):
        packed = codec.pack(x, OPERAND)
        expected = dy.t() @ codec.unpack(packed)
        assert torch.allclose(torch.mm(dy.t(), BlockOperand(codec, packed)), expected, atol=1e-4)
    assert not put_together


@pytest.mark.parametrize("strange", [0.0, 1e-38, float("nan"), float("inf")])
def test_a_draw_among_strange_norms(strange: float) -> None:
    x = torch.full((160, 16), strange)
    assert torch.equal(
        Blocks(keep=1.0, block=SMALL, unbiased=True).pack(x, OPERAND).payload[0].view(160, 16).isnan(), x.isnan()
    )
    x[:144] = 1.0
    index = Blocks(keep=0.2, block=SMALL, unbiased=True).pack(x, OPERAND).payload[1].tolist()
    assert len(set(index)) == 2
    assert (9 in index) == (not strange < 1)


def test_all_blocks_give_the_dense_product() -> None:
    layer = nn.Linear(96, 40).double()
    x, dy = torch.randn(500, 96).double(), torch.randn(500, 40).double()
    for layout, unbiased in itertools.product(("balanced", "bsr"), (False, True)):
        codec = Blocks(keep=1.0, block=SMALL, layout=layout, unbiased=unbiased)
        dw = torch.mm(dy.t(), BlockOperand(codec, codec.pack(x, OPERAND)))
        assert torch.allclose(dw, dy.t() @ x, rtol=1e-12, atol=1e-12)
    assert layer.weight.shape == dw.shape


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("entry", ZOO, ids=str)
def test_over_the_zoo_only_weights_of_products_see_a_difference(
    entry: Entry, autocast: torch.dtype | None, device: torch.device
) -> None:
    assert_only_weights_of_products_differ(entry, sg.block_pruning(0.25, SMALL, skip=()), device, autocast)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["balanced", "bsr"])
def test_bytes_are_those_of_the_formula(layout: str, dtype: torch.dtype) -> None:
    x = torch.randn(1280, 512).to(dtype)
    packed = Blocks(keep=0.1, block=(64, 128), layout=layout).pack(x, OPERAND)
    blocks = 8
    starts = 0 if layout == "balanced" else 1280 // 64 + 1
    assert packed.nbytes == blocks * 64 * 128 * dtype.itemsize + 4 * (blocks + starts)
    assert packed.nbytes == sum(part.untyped_storage().nbytes() for part in packed.payload)
    assert x.nbytes / packed.nbytes > 9.9


def test_the_standard_layout_goes_to_torch_sparse_and_comes_back() -> None:
    codec = Blocks(keep=0.4, block=(16, 32), layout="bsr")
    x = torch.randn(64, 96)
    packed = codec.pack(x, OPERAND)
    sparse = codec.to_sparse_bsr(packed)
    assert sparse.layout is torch.sparse_bsr and torch.equal(sparse.to_dense(), codec.unpack(packed))
    assert sparse.values().data_ptr() == packed.payload[0].data_ptr()
    back = codec.from_sparse_bsr(sparse)
    assert all(torch.equal(a, b) for a, b in zip(back.payload, packed.payload, strict=True))
    assert torch.equal(codec.unpack(back), codec.unpack(packed))
    with pytest.raises(sg.SpecError, match="only layout='bsr', without means"):
        Blocks().to_sparse_bsr(Blocks().pack(x, OPERAND))
    with pytest.raises(sg.SpecError, match=r"expected a torch.sparse_bsr tensor, found torch.strided"):
        codec.from_sparse_bsr(x)
    with pytest.raises(sg.SpecError, match=r"blocks of \(64, 64\), found values of"):
        Blocks(layout="bsr").from_sparse_bsr(sparse)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16 copies"])
def test_products_that_read_one_tensor_share_what_is_kept(autocast: bool) -> None:
    model = Projections()
    run = sg.apply(model, sg.block_pruning(0.25, SMALL, skip=()), min_bytes=0)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(torch.randn(64, 64, requires_grad=True))
        y.float().sum().backward()
    pruned = [site for site in run.report().sites if "Blocks" in site.codec]
    dtype = torch.bfloat16 if autocast else torch.float32
    assert len(pruned) == 3
    assert sum(site.after for site in pruned) == Blocks(keep=0.25, block=SMALL).promised((64, 64), dtype, OPERAND)


def test_nothing_is_dropped_while_it_warms_up() -> None:
    plain, treated = mlp(), mlp()
    run = sg.apply(treated, sg.block_pruning(0.25, SMALL, warmup=2))
    for number in range(4):
        same = all(torch.equal(a, b) for a, b in zip(step(plain), step(treated), strict=True))
        assert same is (number < 2)
    assert any("Blocks" in site.codec for site in run.report().sites)


def test_a_relu_lets_go_and_weights_are_cast_again_only_with_a_rest() -> None:
    (alone,), (with_rest,) = (sg.block_pruning(rest=rest).stages(mlp()).values() for rest in (None, sg.Quant(bits=4)))
    assert alone[-1] == Rule(AnyOf((sg.Need.NOTHING, sg.Need.MASK, sg.Need.INDEX)), sg.Lossless())
    assert with_rest[-1] == Rule("*", sg.Lossless())
    assert all(Rule.from_json(rule.to_json()) == rule for rule in (*alone, *with_rest))
    model = mlp()
    run = sg.apply(model, sg.block_pruning(0.25, SMALL), min_bytes=0)
    for _ in range(2):
        step(model)
    codecs = {site.site.name: site.codec for site in run.report().sites}
    assert any("Relu" in name and codec == "Lossless()" for name, codec in codecs.items())


def test_too_few_rows_are_left_alone() -> None:
    """A tenth of eight blocks would be one of them: whole samples would be dropped."""
    model = mlp()
    run = sg.apply(model, sg.block_pruning(0.1, SMALL, skip=()), min_bytes=0)
    for rows in (128, 128, 160, 160):
        model(torch.randn(rows, 32)).sum().backward()
    assert not [site for site in run.report().sites if "Blocks" in site.codec]
    run.remove()
    run = sg.apply(model, sg.block_pruning(0.1, SMALL, skip=()), min_bytes=0)
    for _ in range(2):
        model(torch.randn(160, 32)).sum().backward()
    assert [site for site in run.report().sites if "Blocks" in site.codec]


def test_no_mask_to_keep_is_no_mistake() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    run = sg.apply(model, sg.block_pruning(0.25, SMALL), min_bytes=0)
    step(model)
    assert run.active


def test_auto_takes_the_quickest_block_of_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(x: Tensor, dy: Tensor, codec: Blocks) -> float:
        wide = codec.block == (64, 128)
        return (2.0 if wide else 1.0) if dy.shape[1] == 10 else (1.0 if wide else 2.0)

    monkeypatch.setattr(block_size, "_seconds", seconds)
    block_size._quickest.cache_clear()
    (rules,) = sg.block_pruning(block="auto", skip=()).stages(mlp()).values()
    block_size._quickest.cache_clear()
    found = {}
    for path in ("0", "2", "4"):
        site = site_at(path)
        found[path] = next(rule.codec.block for rule in rules if rule.selects(site, None))
    assert found == {"0": (64, 128), "2": (64, 128), "4": (64, 64)}


def site_at(path: str) -> sg.Site:
    return sg.Site(
        path=path, module="Linear", call=0, index=0, node="AddmmBackward0", slot="mat1", need=sg.Need.OPERAND, fn=None,
        detail={}, shape=(1024, 64), dtype="float32", bytes=262144, storage=0,
    )  # fmt: skip


def test_a_real_measurement_names_a_block() -> None:
    for layer in (nn.Linear(64, 32), nn.Conv2d(32, 64, 1), nn.Conv2d(4, 4, 3), nn.ReLU()):
        found = block_size.quickest_block(layer, Blocks(keep=0.1))
        assert found in block_size.CANDIDATES
    assert found == (64, 64)


def test_second_order_gradients_are_refused() -> None:
    model = mlp()
    sg.apply(model, sg.block_pruning(0.25, SMALL, skip=()), min_bytes=0)
    x = torch.randn(64, 32, requires_grad=True)
    for _ in range(2):
        loss = model(x).square().mean()
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    with pytest.raises(sg.DoubleBackwardError):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_what_a_product_is_handed_can_be_looked_at() -> None:
    codec = Blocks(keep=0.5, block=SMALL)
    x = torch.randn(64, 32)
    operand = BlockOperand(codec, codec.pack(x, OPERAND))
    dense = codec.unpack(operand.packed)
    assert torch.equal(operand + 0, dense) and torch.equal(operand.t() + 0, dense.t())
    assert torch.equal(operand.detach().sum(), dense.sum())
    dy = torch.randn(64, 8)
    assert torch.allclose(operand.t() @ dy, dense.t() @ dy, atol=1e-5)
    assert torch.allclose(operand @ torch.ones(32, 2), dense @ torch.ones(32, 2), atol=1e-5)
    assert repr(operand).startswith("BlockOperand(Blocks(keep=0.5")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0}, "keep must be a number above 0 and at most 1, found 0"),
        ({"block": (64,)}, r"block must be rows and columns, each one of 16, 32, 64, 128; found \(64,\)"),
        ({"block": (48, 64)}, r"each one of 16, 32, 64, 128; found \(48, 64\)"),
        ({"block": "quick"}, "block must be rows and columns or 'auto', found 'quick'"),
        ({"norm": "max"}, "norm must be one of l1, l2; found 'max'"),
        ({"layout": "coo"}, "layout must be one of balanced, bsr; found 'coo'"),
        (
            {"means": 3},
            "means must be 0 or rows, one of 2, 4, 8, 16, 32, 64, 128 and no more than a block has; found 3",
        ),
        ({"means": 128}, "no more than a block has; found 128"),
        ({"sample": 3}, "sample must be one of 1, 2, 4, 8; found 3"),
        ({"sample": 2, "means": 4}, "means are those of all rows"),
        ({"unbiased": 1}, "unbiased must be True or False, found 1"),
        ({"warmup": -1}, "warmup must be a number of steps"),
        ({"warmup": 5, "keep": {0: 0.1}}, "and keep a single part with it"),
        ({"rest": "quant"}, "block_pruning: rest must be a codec such as"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(sg.SpecError, match=message):
        sg.block_pruning(**settings)


RECIPES: dict[str, Callable[[], sg.BlockPruning]] = {
    "plain": sg.block_pruning,
    "auto": lambda: sg.block_pruning(0.2, "auto", norm="l2"),
    "all": lambda: sg.block_pruning(
        0.2, (32, 64), sg.Quant(bits=4), warmup=9, layers={"head": 0.5}, layout="bsr", means=8, unbiased=True
    ),
}


@pytest.mark.parametrize("make", RECIPES.values(), ids=RECIPES.keys())
def test_recipes_print_as_typed_and_round_trip_through_json(make: Callable[[], sg.BlockPruning]) -> None:
    recipe = make()
    assert eval(repr(recipe), vars(sg)) == recipe
    assert sg.BlockPruning.from_json(recipe.to_json()) == recipe

"""DropIT: forward and dX exact, dW from the largest elements; over every kind of product, and over whole models."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import slimgrad as sg
from slimgrad.codecs import Demand, TopK
from slimgrad.recipes import recipe_from
from slimgrad.rules import Rule
from tests.models import PRODUCTS, Behind, Projections, mlp, one_backward, read_by, step
from tests.zoo import (
    ZOO,
    Entry,
    assert_only_weights_of_products_differ,
    assert_same_gradients,
    fresh,
    gradients,
)

OPERAND = Demand(need=sg.Need.OPERAND)


def sparsified(x: Tensor, keep: float, signs: bool = False) -> Tensor:
    """The largest elements, found in another way: by a stable sort. With signs, the others as the mean of 1024."""
    flat = x.flatten()
    count = math.ceil(round(keep * flat.numel(), 6))
    order = flat.abs().sort(descending=True, stable=True).indices
    kept, others = order[:count], order[count:]
    under = torch.zeros_like(flat)
    for span in range(-(-flat.numel() // 1024)) if signs else ():
        here = others[others // 1024 == span]
        smaller = flat[here].abs()
        under[here] = smaller[smaller < flat[kept].abs().min()].mean() * flat[here].sign()
    return under.index_put_((kept,), flat[kept]).view(x.shape)


@pytest.mark.parametrize("signs", [False, True], ids=["zeros", "signs"])
@pytest.mark.parametrize("keep", [0.1, 0.4])
@pytest.mark.parametrize(("build", "shape"), PRODUCTS.values(), ids=PRODUCTS.keys())
def test_dw_sees_the_largest_elements_and_dx_all_of_them(
    build: Callable[[], nn.Module], shape: tuple[int, ...], keep: float, signs: bool
) -> None:
    torch.manual_seed(0)
    plain = Behind(build())
    treated = copy.deepcopy(plain)
    run = sg.apply(treated, sg.dropit(keep=keep, skip=(), signs=signs), min_bytes=0)
    x = torch.randn(shape)
    for _ in range(3):  # watched, counted, worked
        (y, dx, dy), (treated_y, treated_dx, _) = one_backward(plain, x), one_backward(treated, x)
        assert torch.equal(y, treated_y), "forward"
        assert torch.equal(dx, treated_dx), "dX"
        alone, read = read_by(plain.layer, x * 1.5)
        alone(sparsified(read, keep, signs)).backward(dy)
        assert torch.allclose(treated.layer.weight.grad, alone.weight.grad, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(treated.layer.weight.grad, plain.layer.weight.grad, atol=1e-5, rtol=1e-4)
        if plain.layer.bias is not None:
            assert torch.equal(treated.layer.bias.grad, plain.layer.bias.grad)
    assert all("TopK" in site.codec for site in run.report().sites if site.site.need is sg.Need.OPERAND)
    assert run.report().kept_after < run.report().kept_before


def test_the_projection_inside_multihead_attention_is_a_product_too() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(64), nn.MultiheadAttention(64, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            return self.attention(x, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    plain = Attends()
    treated = copy.deepcopy(plain)
    run = sg.apply(treated, sg.dropit(keep=0.1, skip=()), min_bytes=0)
    x = torch.randn(8, 50, 64, requires_grad=True)
    for _ in range(2):
        grads = [torch.autograd.grad(m(x).square().sum(), [x, *m.parameters()]) for m in (plain, treated)]
    names = ["x", *(name for name, _ in plain.named_parameters())]
    same = {name: torch.equal(a, b) for name, a, b in zip(names, *grads, strict=True)}
    assert not same["attention.in_proj_weight"] and same["x"] and same["norm.weight"] and same["attention.in_proj_bias"]
    assert any(site.site.path == "attention" and "TopK" in site.codec for site in run.report().sites)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("entry", ZOO, ids=str)
def test_over_the_zoo_only_weights_of_products_see_a_difference(
    entry: Entry, autocast: torch.dtype | None, device: torch.device
) -> None:
    assert_only_weights_of_products_differ(entry, sg.dropit(keep=0.1, skip=()), device, autocast)


@pytest.mark.parametrize("entry", ZOO, ids=str)
def test_to_keep_all_is_to_change_nothing(entry: Entry, device: torch.device) -> None:
    plain = fresh(entry, device)
    treated = copy.deepcopy(plain)
    sg.apply(treated, sg.dropit(keep=1.0), min_bytes=1024)
    for seed in range(3):
        assert_same_gradients(gradients(entry, plain, device, seed=seed), gradients(entry, treated, device, seed=seed))


@pytest.mark.parametrize(
    ("codec", "dtype", "times"),
    [
        (TopK(keep=0.1), torch.bfloat16, 6.0),
        (TopK(keep=0.1), torch.float32, 7.5),
        (TopK(keep=0.1, values=8), torch.bfloat16, 8.5),
        (TopK(keep=0.05, signs=True), torch.bfloat16, 6.7),
        (TopK(keep=0.02, signs=True), torch.bfloat16, 9.8),
    ],
    ids=str,
)
def test_bytes_that_are_really_held(codec: TopK, dtype: torch.dtype, times: float) -> None:
    x = torch.randn(512, 1024).to(dtype)
    packed = codec.pack(x, OPERAND)
    assert packed.nbytes == sum(part.untyped_storage().nbytes() for part in packed.payload)
    assert x.nbytes / packed.nbytes >= times


def test_a_relu_before_a_convolution_lets_go_of_its_result() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(32, 32, 3, padding=1), nn.Flatten(), nn.Linear(32 * 256, 10),
    )  # fmt: skip
    run = sg.apply(model, sg.dropit(keep=0.1))
    for _ in range(2):
        model(torch.randn(8, 3, 16, 16)).sum().backward()
    relu = 8 * 32 * 256 * 4
    left = run.report().kept_after - 8 * 32 * 256 * 4  # the head's input is not dropped
    assert left <= 2 * relu * (1 / 7.5 + 1 / 32), run.report()


def test_products_that_read_one_tensor_share_what_is_kept() -> None:
    model = Projections()
    run = sg.apply(model, sg.dropit(keep=0.1, skip=()), min_bytes=0)
    for _ in range(2):
        model(torch.randn(32, 64, requires_grad=True)).sum().backward()
    dropped = [site for site in run.report().sites if "TopK" in site.codec]
    assert len(dropped) == 3
    assert sum(site.after for site in dropped) == TopK(keep=0.1).promised((32, 64), torch.float32, OPERAND)


def test_frozen_weights_keep_nothing() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model[2].requires_grad_(False)
    run = sg.apply(model, sg.dropit(keep=0.1, skip=()), min_bytes=0)
    for _ in range(2):
        model(torch.randn(128, 64)).sum().backward()
    assert not [site for site in run.report().sites if site.site.path == "2"]
    assert model[2].weight.grad is None and model[4].weight.grad is not None


def test_a_schedule_changes_what_is_kept_from_the_step_it_names() -> None:
    plain, treated = mlp(), mlp()
    run = sg.apply(treated, sg.dropit(keep={0: 1.0, 2: 0.3, 4: 0.1}))
    kept = []
    for number in range(6):
        same = all(torch.equal(a, b) for a, b in zip(step(plain), step(treated), strict=True))
        assert same is (number < 2)
        kept.append(run.report().kept_after)
    assert kept[0] == kept[1] > kept[2] == kept[3] > kept[4] == kept[5]


def test_a_schedule_follows_the_optimizer_if_it_is_given() -> None:
    plain, treated = mlp(), mlp()
    optimizer = torch.optim.SGD(treated.parameters(), lr=0.0)
    run = sg.apply(treated, sg.dropit(keep={0: 1.0, 1: 0.1}), optimizer=optimizer)
    expected = step(plain)
    for _ in range(3):  # accumulated: no step yet
        assert all(torch.equal(a, b) for a, b in zip(expected, step(treated), strict=True))
    optimizer.step()
    assert not all(torch.equal(a, b) for a, b in zip(expected, step(treated), strict=True))
    run.remove()
    assert not optimizer._optimizer_step_post_hooks


def test_a_later_stage_that_fits_nothing_is_refused_at_once() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))  # a first layer and a head, nothing between
    run = sg.apply(model, sg.dropit(keep={0: 1.0, 2: 0.1}), min_bytes=0)
    with pytest.raises(sg.RuleError, match="matches nothing that is kept for backward"):
        model(torch.randn(64, 64))
    assert not run.active


def test_steps_count_on_between_blocks_and_what_is_outside_the_model_follows() -> None:
    torch.manual_seed(0)
    model, head = mlp(), nn.Linear(10, 10)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.0)
    run = sg.apply(model, sg.dropit(keep={0: 1.0, 2: 0.1}, skip=()), optimizer=optimizer, min_bytes=0)
    x = torch.randn(256, 32)
    grads = []
    for _ in range(4):
        optimizer.zero_grad()
        with run:
            loss = head(model(x)).square().mean()
        loss.backward()
        grads.append([layer.weight.grad.clone() for layer in (model[2], head)])
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(grads[0], grads[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(grads[0], grads[3], strict=True))
    run.remove()
    assert not optimizer._optimizer_step_post_hooks


def dropped_at(model: nn.Module, recipe: sg.DropIT, batch: Tensor) -> dict[str, str]:
    run = sg.apply(model, recipe, min_bytes=0)
    for _ in range(2):
        model(batch).sum().backward()
    return {site.site.path: site.codec for site in run.report().sites if "TopK" in site.codec}


def test_the_first_layer_and_the_head_are_left_out_and_others_by_name() -> None:
    batch = torch.randn(64, 32)
    assert set(dropped_at(Behind(mlp()), sg.dropit(), batch)) == {"layer.2"}
    assert set(dropped_at(Behind(mlp()), sg.dropit(skip=("head",)), batch)) == {"layer.0", "layer.2"}
    assert set(dropped_at(Behind(mlp()), sg.dropit(skip=("layer.2",)), batch)) == {"layer.0", "layer.4"}
    with pytest.raises(sg.RuleError, match=r"skip='conv\.\*' is no linear layer or convolution"):
        sg.apply(mlp(), sg.dropit(skip=("conv.*",)))


def test_layers_have_parts_of_their_own() -> None:
    found = dropped_at(mlp(), sg.dropit(keep=0.1, skip=(), layers={"2": 0.3}), torch.randn(64, 32))
    assert "keep=0.3" in found["2"] and "keep=0.1" in found["4"]


def test_the_rest_is_treated_by_its_own_codec() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 8))
    run = sg.apply(model, sg.dropit(rest=sg.Quant(bits=4)), min_bytes=0)
    for _ in range(2):
        model(torch.randn(64, 32)).sum().backward()
    codecs = {site.site.path: site.codec for site in run.report().sites}
    assert "Quant" in codecs["1"] and "Quant" in codecs["2"] and "TopK" in codecs["3"] and "Quant" in codecs["4"]


def test_what_another_holds_anyway_serves_a_product_too() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            return self.outer(x) + x * x  # the product with itself reads the values

    model = Gated()
    run = sg.apply(model, sg.dropit(skip=(), rest=sg.Quant(bits=4)), min_bytes=0)
    for _ in range(2):
        model(torch.randn(64, 64) * 1.5).sum().backward()
    codecs = {site.site.path: site.codec for site in run.report().sites}
    assert "Quant" in codecs["outer"] and "Quant" in codecs[""]
    assert run.report().kept_after == sg.Quant(bits=4).promised((64, 64), torch.float32)


def test_random_elements_are_right_on_average_and_channels_are_whole() -> None:
    x = torch.randn(64, 4096)
    random = TopK(keep=0.25, select="random")
    found = random.unpack(random.pack(x, OPERAND))
    assert int((found != 0).sum()) == x.numel() // 4
    assert torch.equal(found[found != 0], 4 * x[found != 0])
    assert abs(found.mean() - x.mean()) < 5 * 2 / x.numel() ** 0.5
    other = random.unpack(random.pack(x + 1, OPERAND)) != 0
    assert 0.2 < (other & (found != 0)).float().mean() / 0.25 < 0.3  # drawn anew, as independent draws would be
    channels = TopK(keep=0.25, select="channels")
    image = torch.randn(4, 8, 5, 5) * torch.arange(1, 9).view(8, 1, 1)
    back = channels.unpack(channels.pack(image, OPERAND))
    assert torch.equal(back[:, 6:], image[:, 6:]) and not back[:, :6].any()


@pytest.mark.parametrize("scope", ["sample", "row"])
def test_samples_and_rows_keep_their_own_largest(scope: str) -> None:
    x = torch.randn(6, 5, 40) * torch.logspace(-3, 3, 6).view(6, 1, 1)
    codec = TopK(keep=0.2, scope=scope)
    kept = codec.unpack(codec.pack(x, OPERAND)) != 0
    lines = kept.view(6, -1) if scope == "sample" else kept.view(30, -1)
    assert (lines.sum(1) == lines.shape[1] // 5).all()


def test_under_autocast_channels_last_and_accumulation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3))
    model = model.to(memory_format=torch.channels_last)
    run = sg.apply(model, sg.dropit(keep=0.2))
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = (
                model(torch.randn(8, 3, 20, 20).contiguous(memory_format=torch.channels_last)).float().square().mean()
            )
        loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert any("TopK" in site.codec for site in run.report().sites)


def test_second_order_gradients_are_refused() -> None:
    model = mlp()
    sg.apply(model, sg.dropit(keep=0.1, skip=()), min_bytes=0)
    x = torch.randn(64, 32, requires_grad=True)
    for _ in range(2):
        loss = model(x).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    with pytest.raises(sg.DoubleBackwardError):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    assert grads


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0}, "keep must be a number above 0 and at most 1, found 0"),
        ({"keep": 1.5}, "keep must be a number above 0 and at most 1, found 1.5"),
        ({"keep": {5: 0.1}}, "a schedule maps steps to parts, from step 0 on"),
        ({"rest": "quant"}, "rest must be a codec such as"),
        ({"skip": (3,)}, r"skip must name layers, or be 'first' or 'head'; found \(3,\)"),
        ({"scope": "channel"}, "scope must be one of tensor, sample, row"),
        ({"values": 4}, "values must be 'same' or 8, found 4"),
        ({"select": "smallest"}, "select must be one of largest, random, channels"),
        ({"signs": 1}, "signs must be True or False, found 1"),
        ({"signs": True, "scope": "row"}, "signs go with the largest elements of a whole tensor"),
        ({"layers": {"0": 2.0}}, "keep must be a number above 0 and at most 1, found 2.0"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(sg.SpecError, match=message):
        sg.dropit(**settings)


def test_recipes_may_be_given_as_text() -> None:
    text = "dropit(keep=0.2, skip=('head',), rest=quant(bits=4), signs=True)"
    assert recipe_from(text) == sg.dropit(keep=0.2, skip=("head",), rest=sg.Quant(bits=4), signs=True)
    assert recipe_from("quant(bits=4)") is None
    assert any("keep=0.2" in repr(rule) for rule in sg.apply(mlp(), text).rules)
    for wrong, message in {
        "dropit(bits=3)": "bits",
        "dropit(0.1)": "keyword arguments",
        "dropit(": "cannot read",
    }.items():
        with pytest.raises(sg.RuleError, match=message):
            sg.apply(mlp(), wrong)


def test_recipes_print_as_typed_and_round_trip_through_json() -> None:
    recipe = sg.dropit(keep={0: 1.0, 100: 0.1}, rest=sg.Quant(bits=4), layers={"head.*": 0.5}, values=8)
    assert eval(repr(recipe), vars(sg)) == recipe
    assert sg.DropIT.from_json(recipe.to_json()) == recipe
    (rules,) = sg.dropit().stages(mlp()).values()
    assert all(Rule.from_json(rule.to_json()) == rule for rule in rules)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fasterrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn"])
def test_detectors_of_torchvision_train_and_keep_less(name: str) -> None:
    """Steps have other numbers of boxes each, and layers that run on several levels of a pyramid."""
    build = getattr(pytest.importorskip("torchvision").models.detection, name)
    torch.manual_seed(0)
    model = build(weights=None, weights_backbone=None, num_classes=5, min_size=192, max_size=256).cuda().train()
    images = [torch.rand(3, 192, 256, device="cuda") for _ in range(2)]
    box = torch.tensor([[10.0, 20, 100, 120], [60, 30, 200, 180]], device="cuda")
    masks = torch.zeros(2, 192, 256, dtype=torch.uint8, device="cuda")
    masks[:, 30:100, 60:100] = 1
    targets = [{"boxes": box, "labels": torch.tensor([1, 3], device="cuda"), "masks": masks} for _ in images]
    untouched = copy.deepcopy(model)
    run = sg.apply(model, sg.dropit(keep=0.1), min_bytes=4096)
    for seed in range(3):
        losses = []
        for each in (untouched, model):
            torch.manual_seed(seed)
            each.zero_grad()
            each.load_state_dict(untouched.state_dict())
            losses.append(each(images, targets))
            sum(losses[-1].values()).backward()
        assert all(torch.allclose(losses[0][key], losses[1][key], rtol=1e-3, atol=1e-5) for key in losses[0])
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    report = run.report()
    assert report.kept_after < 0.8 * report.kept_before

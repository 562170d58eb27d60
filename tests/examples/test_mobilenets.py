"""The example's networks are the published ones: torchvision's names and numbers, element counts of TraDy's paper."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))  # a script sees the modules beside it

import mobilenets
import transfer_data
from mobilenets import Elements, MobileNetV2, elements, mobilenet_v2, on_device


def real(name: str) -> Path:
    file = Path(os.environ.get("SLIMGRAD_DATA", "data")) / name
    if not file.is_file():
        pytest.skip(f"needs {name} in the folder that the variable SLIMGRAD_DATA names")
    return file


def convolutions(model: nn.Module) -> list[nn.Conv2d]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


# --- MobileNetV2 ------------------------------------------------------------------------------------------------------


def test_mobilenet_v2_has_the_parameters_and_the_names_of_torchvisions() -> None:
    with torch.device("meta"):
        model = MobileNetV2(1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 3_504_872
    names = list(model.state_dict())
    assert len(names) == 314
    assert names[0] == "features.0.0.weight" and names[-2:] == ["classifier.1.weight", "classifier.1.bias"]
    assert {"features.1.conv.1.weight", "features.2.conv.0.1.running_var", "features.17.conv.3.bias"} <= {*names}


def test_a_narrow_mobilenet_v2_has_multiples_of_eight_channels_and_wide_features() -> None:
    with torch.device("meta"):
        model = MobileNetV2(4, width=0.35)
    assert {conv.out_channels % 8 for conv in convolutions(model)} == {0}
    assert model.classifier[1].in_features == 1280


def test_weights_in_a_file_are_taken_but_for_the_classifier(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained = MobileNetV2(1000)
    torch.save(trained.state_dict(), tmp_path / "weights.pth")
    model = mobilenet_v2(tmp_path / "weights.pth", classes=5).eval()
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(model.features(images), trained.eval().features(images))
    assert model(images).shape == (2, 5)


def test_published_weights_fit_in_every_name() -> None:
    model = mobilenet_v2(real("mobilenet_v2_imagenet.pth"), classes=37)
    assert elements(model) == Elements(convolutions=52, weights=2_189_760, activations=2_209_280)


# --- networks for microcontrollers ------------------------------------------------------------------------------------


def layer(role: str, block: int, channels: tuple[int, int], groups: int = 1, stride: int = 1) -> dict[str, Any]:
    """An entry as files have it; all but narrowing layers have an activation."""
    kernel = 1 if role.startswith("pointwise") or role == "classifier" else 3
    shape = {"kernel": kernel, "stride": stride, "padding": kernel // 2, "groups": groups}
    clamp = [-9.0, 9.0] if role in ("pointwise2", "classifier") else [0.0, 4.5]
    return {
        "role": role,
        "block": block,
        "in_channels": channels[0],
        "out_channels": channels[1],
        "clamp": clamp,
    } | shape


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A file of a network with one block that narrows and one with a residual connection."""
    layers = [
        layer("first", -1, (3, 16), stride=2),
        layer("depthwise", 0, (16, 16), groups=16),
        layer("pointwise2", 0, (16, 8)),
        layer("pointwise1", 1, (8, 24)),
        layer("depthwise", 1, (24, 24), groups=24),
        layer("pointwise2", 1, (24, 8)),
        layer("classifier", 3, (8, 1000)),
    ]
    generator = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "meta": np.frombuffer(json.dumps({"residual": [False, True], "layers": layers}).encode(), np.uint8)
    }
    for number, made in enumerate(layers):
        shape = (made["out_channels"], made["in_channels"] // made["groups"], made["kernel"], made["kernel"])
        arrays[f"w{number}"] = generator.normal(size=shape).astype(np.float32)
        arrays[f"b{number}"] = generator.normal(size=shape[0]).astype(np.float32)
    np.savez(tmp_path / "small.npz", **arrays)
    return tmp_path / "small.npz"


def test_a_network_is_built_as_its_file_says(small: Path) -> None:
    model = on_device(small, classes=4)
    kinds = (nn.Conv2d, nn.ReLU6, nn.Linear)
    found = "".join(type(module).__name__[0] for module in model.modules() if isinstance(module, kinds))
    assert found == "CR" + "CRC" + "CRCRC" + "L"
    arrays = dict(np.load(small))
    for number, conv in enumerate(convolutions(model)):
        assert np.array_equal(conv.weight.detach(), arrays[f"w{number}"])
        assert np.array_equal(conv.bias.detach(), arrays[f"b{number}"])


def test_a_residual_connection_goes_around_its_block_only(small: Path) -> None:
    _, narrowing, residual = on_device(small, classes=4).features
    images = torch.randn(2, 16, 8, 8)
    narrow = narrowing(images)
    assert torch.equal(narrow, narrowing.conv(images))
    assert torch.equal(residual(narrow), narrow + residual.conv(narrow))


def test_the_last_convolution_of_the_paper_can_be_added(small: Path) -> None:
    model = on_device(small, classes=4, last_conv=True)
    assert convolutions(model)[-1].weight.shape == (32, 8, 1, 1)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 4)


def test_elements_are_those_of_weights_and_of_inputs_of_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1), nn.Flatten())
    before = model[1].num_batches_tracked.clone()
    assert elements(model, side=16) == Elements(2, 3 * 8 * 9 + 8 * 4, 3 * 16 * 16 + 8 * 8 * 8)
    assert model.training and torch.equal(model[1].num_batches_tracked, before)


@pytest.mark.parametrize(
    ("name", "last_conv", "count"),
    [
        ("mbv2-w0.35.npz", True, Elements(52, 288_864, 963_456)),
        ("mbv2-w0.35.npz", False, Elements(51, 238_688, 961_664)),
        ("proxyless-w0.3.npz", True, Elements(61, 357_680, 804_352)),
        ("proxyless-w0.3.npz", False, Elements(60, 320_816, 802_816)),
    ],
)
def test_networks_of_the_paper_have_its_elements(name: str, last_conv: bool, count: Elements) -> None:
    assert elements(on_device(real(name), classes=10, last_conv=last_conv)) == count
    published = {"mbv2-w0.35.npz": 1_252_320, "proxyless-w0.3.npz": 1_162_032}
    assert not last_conv or count.total == published[name]


@pytest.mark.parametrize("name", ["mbv2-w0.35.npz", "proxyless-w0.3.npz"])
def test_ranges_that_are_left_out_are_hardly_reached(name: str) -> None:
    """All of them together move the features of real pictures by about one percent; five are for drawn ones."""
    file = real(name)
    images = transfer_data.shapes(mobilenets.CENTRED, train=1, test=64, side=mobilenets.SIDE)
    inputs, _ = next(images.tests(64))
    free, ranged = on_device(file, classes=2), on_device(file, classes=2)
    layers = json.loads(np.load(file)["meta"].tobytes())["layers"]
    for conv, described in zip(convolutions(ranged), layers[:-1], strict=True):
        conv.register_forward_hook(lambda _, __, y, ends=described["clamp"]: y.clamp(*ends))
    with torch.no_grad():
        a, b = free.features(inputs).mean((2, 3)), ranged.features(inputs).mean((2, 3))
    assert (a - b).norm() < 0.05 * a.norm()

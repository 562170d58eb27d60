"""What can be done to storages: which offers there are, what they hold, and which modules may run again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import slimgrad as sg
from slimgrad.planner.calibration import Rate
from slimgrad.planner.costs import Costs
from slimgrad.planner.offers import ALLOWED, Desk, Offer, items_of
from slimgrad.planner.regions import regions_of
from slimgrad.planner.sensitivity import kind_of
from tests.planner.models import SPEEDS, made


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


@pytest.fixture
def profile() -> sg.Profile:
    torch.manual_seed(0)
    return sg.profile(nn.Sequential(nn.Linear(64, 64), Block(), Block()), torch.randn(128, 64), fake=True)


def offers_for(profile: sg.Profile, path: str, slot: str, allow: tuple[str, ...] = ALLOWED) -> dict[str, Offer]:
    """By what they hold and how."""
    number = next(n for n, s in enumerate(profile.sites) if s.path == path and s.slot == slot)
    item = next(item for item in items_of(profile, 0) if number in item.sites)
    found = Desk(profile, allow).offers(item)
    return {repr(offer.codecs[0]) if offer.codecs else "keep": offer for offer in found}


def test_an_operand_behind_a_norm_can_be_derived_or_packed(profile: sg.Profile) -> None:
    found = offers_for(profile, "1.up", "mat1")
    assert set(found) == {"keep", repr(sg.Derive()), repr(sg.Quant(bits=8)), repr(sg.Quant(bits=4))}
    assert found[repr(sg.Derive())].held == 0
    assert found[repr(sg.Quant(bits=4))].held == sg.Quant(bits=4).promised((128 * 64,), torch.float32)


def test_the_input_of_an_activation_can_be_a_few_bits(profile: sg.Profile) -> None:
    found = offers_for(profile, "1.act", "self")
    assert found[repr(sg.FewBit(bits=3))].held == sg.FewBit(bits=3).promised((128, 256), torch.float32)
    assert repr(sg.Derive()) not in found  # a product made it


def test_only_what_is_allowed_is_offered(profile: sg.Profile) -> None:
    assert set(offers_for(profile, "1.up", "mat1", ("lossless",))) == {"keep"}
    assert repr(sg.Quant(bits=2)) in offers_for(profile, "1.up", "mat1", ("quant-low",))
    assert repr(sg.TopK(keep=0.1)) in offers_for(profile, "1.up", "mat1", ("topk",))


def test_copies_of_one_tensor_are_decided_together() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.heads = nn.LayerNorm(64), nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            return sum(head(x) for head in self.heads)

    with torch.autocast("cpu", torch.bfloat16):
        profile = sg.profile(Heads(), torch.randn(128, 64), fake=True)
    numbers = {
        site.storage for site in profile.sites if site.path.startswith("heads") and site.slot in ("mat1", "self")
    }
    assert len(numbers) == 3  # autocast casts once for each head
    together = [item for item in items_of(profile, 0) if numbers & set(item.storages)]
    assert len(together) == 1 and set(together[0].storages) == numbers
    packed = next(o for o in Desk(profile, ("quant",)).offers(together[0]) if o.codecs)
    assert packed.held == packed.codecs[0].promised((128 * 64,), torch.bfloat16)


def test_small_storages_are_left_alone(profile: sg.Profile) -> None:
    assert all(profile.storages[number].bytes >= 4096 for item in items_of(profile, 4096) for number in item.storages)


def test_fewer_bits_and_earlier_values_cost_more_error(profile: sg.Profile) -> None:
    costs = Costs(profile, SPEEDS)
    items = {profile.sites[item.sites[0]].path: item for item in items_of(profile, 0)}

    def error(path: str, bits: int) -> float:
        desk = Desk(profile, ("quant", "quant-low"))
        offers = {o.codecs[0].bits: o for o in desk.offers(items[path]) if o.codecs}
        return costs.error(items[path], offers[bits])

    assert error("2.act", 8) < error("2.act", 4) < error("2.act", 2)
    assert error("1.act", 4) < error("2.act", 4)  # more weights come before it
    assert costs.error(items["2.act"], Offer(())) == 0


def test_sensitivity_measures_kinds_and_is_used() -> None:
    model, batch = made("gpt2")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    found = sg.sensitivity(model, batch)
    assert sg.Sensitivity.from_json(found.to_json()) == found
    profile = sg.profile(model, batch, fake=True)
    kinds = {kind_of(site) for site in profile.sites}
    assert set(found.errors) <= kinds and max(found.errors.values()) > 0
    settings = {"allow": ["quant", "lossless"], "max_error": 5.0, "calibration": SPEEDS}
    plan = sg.plan(profile, "5x", sensitivity=found, **settings)
    measured = sg.grad_error(model, batch, plan).relative
    assert measured / 3 < plan.error < 3 * measured


def test_blocks_may_run_again_not_their_list() -> None:
    model, batch = made("gpt2")
    paths = [region.path for region in regions_of(sg.profile(model, batch, fake=True))]
    assert paths == [f"transformer.h.{number}" for number in range(3)]


def test_of_stages_and_blocks_those_are_taken_that_leave_less() -> None:
    model, batch = made("resnet")
    found = regions_of(sg.profile(model, batch, fake=True))
    paths = [region.path for region in found]
    assert "resnet.encoder.stages.0.layers.0" in paths
    assert all(one is other or not one.path.startswith(f"{other.path}.") for one in found for other in found)


def test_temporaries_are_as_large_for_half_as_many_bytes_in_each_element() -> None:
    rate = Rate(call=0.0, pack=0.0, unpack=0.0, pack_scratch=1.5, unpack_scratch=1.25)
    speeds = replace(SPEEDS, rates={"Quant(8)": rate})
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(dtype)
        profile = sg.profile(model, torch.randn(256, 64, dtype=dtype), torch.sum, fake=True)
        (item,) = items_of(profile, 4096)
        pack = next(offer.packs[0] for offer in Desk(profile, ["quant"]).offers(item) if offer.packs)
        assert Costs(profile, speeds).scratch(pack) == (1.5 * 4 * 256 * 64, 1.25 * 4 * 256 * 64)

"""Costs: the seconds that an offer takes, and the error it adds, by a calibration and by what is known of codecs."""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from slimgrad.codecs import Blocks, Bounded, Codec, FewBit, Offload, Quant, TopK
from slimgrad.planner.calibration import Calibration
from slimgrad.planner.fusing import Fusible
from slimgrad.planner.offers import Item, Offer, Pack
from slimgrad.planner.sensitivity import PROBE, Sensitivity, lead_of
from slimgrad.spec import Need, Profile
from slimgrad.spec.timeline import Region

NOISE: dict[str, float] = {
    "Quant(8)": 4e-5,
    "Quant(4)": 1.1e-2,
    "Quant(3)": 5e-2,
    "Quant(2)": 2.8e-1,
    "FewBit(3)": 4e-3,
    "TopK(0.3)": 2.4e-1,
    "TopK(0.1)": 5.6e-1,
    "Bounded(0.01)": 3.6e-3,
    "Blocks(0.7)": 3.7e-1,
    "Blocks(0.5)": 9.4e-1,
}
"""The squared relative error of what a codec gives back, for normal values: a group of 128 spans 5.5 deviations, of
which rounding to n steps loses (5.5 / n)**2 / 12; the largest tenth of the values holds 44 % of the square. What bounds
and drawn blocks lose was measured on 4096 x 768 of them."""

FLOWS_ON = 0.1
"""How much of the error in a value shows in each gradient that flows on from there: residual branches and norms carry
most of a gradient past. With this, predictions for 8 and 4 bits are 0.4 to 8 times what grad_error measures on five
small models (docs/planner.md); `sensitivity` measures instead."""


@dataclass(frozen=True)
class Costs:
    """Of one profile on one device."""

    profile: Profile
    calibration: Calibration
    sensitivity: Sensitivity | None = None
    """Measured; without it, what is known of codecs in general."""

    @cached_property
    def dtype(self) -> str:
        """In which the products are computed, by most bytes of what they read."""
        sizes: dict[str, int] = {}
        for site in self.profile.sites:
            if site.need is Need.OPERAND:
                sizes[site.dtype] = sizes.get(site.dtype, 0) + site.bytes
        return max(sizes, key=lambda name: sizes[name], default="float32")

    @cached_property
    def products(self) -> tuple[int, ...]:
        """Sites that serve the gradient of a weight, in the order of the forward."""
        return tuple(n for n, site in enumerate(self.profile.sites) if site.need is Need.OPERAND)

    @cached_property
    def events(self) -> list[float]:
        """Of each event of an untouched step: as it was timed, or else by what limits it."""
        timeline = self.profile.timeline
        if timeline is None:
            return []
        timed = [self.calibration.operators.get(text) for text in timeline.operators]
        each = zip(timeline.kinds, timeline.flops, timeline.moved, strict=True)
        return [
            self.calibration.op_seconds(flops, moved, self.dtype) if cost is None else cost.seconds
            for cost, flops, moved in ((timed[kind], flops, moved) for kind, flops, moved in each)
        ]

    @cached_property
    def workspaces(self) -> list[int]:
        """Of each event: bytes that its operator takes for itself, as far as it was run."""
        timeline = self.profile.timeline
        if timeline is None:
            return []
        timed = [self.calibration.operators.get(text) for text in timeline.operators]
        return [0 if (cost := timed[kind]) is None else cost.scratch for kind in timeline.kinds]

    def not_yet(self, event: int) -> int:
        """What an event makes and takes for itself, which is not there when what it needs is saved, or read."""
        timeline = self.profile.timeline
        made = timeline.made if timeline is not None else ()
        return (made[event] if made else 0) + self.workspaces[event]

    @cached_property
    def step_seconds(self) -> float:
        """An untouched step."""
        return math.fsum(self.events)

    @cached_property
    def forward_seconds(self) -> float:
        timeline = self.profile.timeline
        return 0.0 if timeline is None else self._events(0, timeline.backward)

    @cached_property
    def _begins(self) -> list[float]:
        """When each event of an untouched step begins."""
        return list(accumulate(self.events, initial=0.0))

    def later(self, event: int, seconds: float) -> int:
        """The event that is under way so many seconds after an event has begun, or before."""
        return max(0, bisect(self._begins, self._begins[event] + seconds) - 1)

    def region_seconds(self, region: Region) -> float:
        """Its forward once more."""
        return self._events(region.start, region.stop)

    def _events(self, start: int, stop: int) -> float:
        return math.fsum(self.events[start:stop])

    def link_seconds(self, offer: Offer) -> float:
        """For which the link is busy in forward, which is shorter than backward."""
        gone = [pack for pack in offer.packs if isinstance(pack.codec, Offload)]
        return math.fsum(pack.dense * self.calibration.rate(pack.codec, pack.need).pack for pack in gone)

    def seconds(self, offer: Offer) -> float:
        """To pack and to unpack; what is made again is told by making.py."""
        return sum(self._pack_seconds(pack) for pack in offer.packs)

    def _pack_seconds(self, pack: Pack) -> float:
        timeline = self.profile.timeline
        reads = {pack.savers[0]} if timeline is None else {timeline.read[s] for s in pack.savers}
        if isinstance(pack.codec, Offload):  # the copies themselves run beside what is computed
            return self.calibration.rate(pack.codec, pack.need).seconds(0, len(reads))
        if not pack.bytes and pack.need is not Need.INDEX:
            return self.calibration.launch  # a shape, or a reference to a parameter
        return self.calibration.rate(pack.codec, pack.need).seconds(pack.dense, len(reads))

    def fused_seconds(self, fusible: Fusible, op: Codec) -> float:
        """Forward and backward of the op, in all calls."""
        rate = self.calibration.op_rate(op)
        return rate.seconds(fusible.dense, 1) + 2 * (len(fusible.calls) - 1) * rate.call

    def unfused_seconds(self, fusible: Fusible) -> float:
        """Of the module's own operators."""
        return math.fsum(self._events(*events) for events in (*fusible.forward, *fusible.backward))

    def fused_error(self, fusible: Fusible, op: Codec) -> float:
        return self.site_error(op, fusible.sites[0], Need.DERIVATIVE)

    def pass_seconds(self, moved: int) -> float:
        """Of an op that reads and writes so many bytes."""
        return self.calibration.op_seconds(0, moved, self.dtype)

    def product_seconds(self, flops: int, moved: int) -> float:
        return self.calibration.op_seconds(flops, moved, self.dtype)

    def unpack_seconds(self, codec: Codec, need: Need, size: int) -> float:
        rate = self.calibration.rate(codec, need)
        return rate.call + size * rate.unpack

    def chain_seconds(self, size: int) -> float:
        """Of a kernel that makes so many bytes of a tensor in groups."""
        rate = self.calibration.chained
        return rate.call + size * rate.unpack

    def scratch(self, pack: Pack) -> tuple[int, int]:
        """Temporaries of packing and of unpacking. They are of float32, in which rates were measured, where a tensor is
        of less.
        """
        rate = self.calibration.rate(pack.codec, pack.need)
        dtype = getattr(torch, self.profile.sites[pack.savers[0]].dtype)
        size = pack.dense * max(1, torch.float32.itemsize // dtype.itemsize)
        return int(rate.pack_scratch * size), int(rate.unpack_scratch * size)

    def error(self, item: Item, offer: Offer) -> float:
        """The squared relative error of all gradients together that comes of it.

        A product's operand spoils the gradient of its own weight; a value spoils, in part, those of all weights before
        it. Where nothing was measured, every product is taken to have the same share of the gradient.
        """
        measured = None if self.sensitivity is None else self.sensitivity.error(lead_of(self.profile, item))
        if measured is not None:
            noise = max((NOISE.get(noise_key(pack.codec), 0.0) for pack in offer.packs), default=0.0)
            return measured * noise / NOISE[noise_key(PROBE)]
        sites = self.profile.sites
        return sum(self.site_error(pack.codec, n, sites[n].need) for pack in offer.packs for n in pack.savers)

    def site_error(self, codec: Codec, number: int, need: Need) -> float:
        noise, products = NOISE.get(noise_key(codec), 0.0), max(1, len(self.products))
        if need not in (Need.OPERAND, Need.VALUES, Need.DERIVATIVE):
            return 0.0
        if need is Need.OPERAND:
            return noise / products
        before = sum(1 for product in self.products if product < number)
        return FLOWS_ON * noise * max(1, before) / products  # before all of them there may be an embedding, or a norm


def noise_key(codec: Codec) -> str:
    if isinstance(codec, (Quant, FewBit)):
        return f"{type(codec).__name__}({codec.bits})"
    if isinstance(codec, (TopK, Blocks)):
        return f"{type(codec).__name__}({codec.keep})"
    if isinstance(codec, Bounded):
        return f"Bounded({codec.bound})"
    return type(codec).__name__

"""Picking elements in plain torch: what the Triton twin must equal bit for bit. See picks.py for the format."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slimgrad.kernels import reference
from slimgrad.kernels.geometry import PATTERNS, check_dense
from slimgrad.kernels.picks import SPAN, TILE, Kind, Picks, check_picks
from slimgrad.kernels.predicate import Interval

NON_ZERO = Interval(0.0, 0.0, closed=True, outside=True, nan=True)


def pick_largest(x: Tensor, picks: Picks) -> tuple[Tensor, ...]:
    """The k elements of the dense tensor `x` that are largest in magnitude, in memory order, and their places; and the
    signs of the others, if the picks are signed.
    """
    check_dense("pick_largest", x)
    flat = x.detach().as_strided((x.numel(),), (1,))
    found = pick(flat, largest(flat[None], picks.k).flatten(), picks)
    return (*found, signs_of(flat, found[0], picks)) if picks.signed else found


def pick(flat: Tensor, picked: Tensor, picks: Picks) -> tuple[Tensor, Tensor]:
    """The picked elements (k of these bools are true), and their places. Asks the device for nothing."""
    index = torch.nonzero_static(picked, size=picks.k).flatten()
    places = torch.empty(picks.nbytes, dtype=torch.uint8, device=flat.device)
    starts = places[: picks.places_at].view(torch.int32)
    edges = torch.arange(picks.blocks + 1, device=flat.device) * picks.kind.block
    torch.searchsorted(index, edges, out_int32=True, out=starts)
    written = places[picks.places_at :]
    if picks.kind is Kind.BITS:
        bits = reference.pack_bits(picked, NON_ZERO)
        written[: len(bits)] = bits
        written[len(bits) :] = 0
    elif picks.kind is Kind.BYTES:
        written.copy_(index % picks.kind.block)
    else:
        written.view(torch.int16).copy_(index % picks.kind.block)
    return flat[index], places


def signs_of(flat: Tensor, values: Tensor, picks: Picks) -> Tensor:
    """A bit for each element, and the mean magnitudes of those that are smaller than all values."""
    sizes = magnitudes(flat)
    least = magnitudes(values).amin() if picks.k else torch.iinfo(sizes.dtype).max
    negative, other = padded((flat.signbit()) & (sizes > 0), picks), padded(sizes > 0, picks)
    has_sign = negative.any(1, keepdim=True)
    counted = padded(sizes < least, picks) & (has_sign | other)
    size = torch.where(counted, padded(flat.abs(), picks), 0).to(torch.promote_types(flat.dtype, torch.float32))
    means = size.sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)
    signs = torch.empty(picks.sign_bytes(flat.itemsize), dtype=torch.uint8, device=flat.device)
    signs[: picks.bit_bytes] = reference.pack_bits(torch.where(has_sign, negative, other).flatten(), NON_ZERO)
    signs[picks.bit_bytes :].view(flat.dtype).copy_(torch.where(has_sign, means, -means).flatten())
    return signs


def padded(flat: Tensor, picks: Picks) -> Tensor:
    """In rows of SPAN, zeros at the end."""
    return torch.nn.functional.pad(flat, (0, picks.tiles * TILE - picks.n)).view(-1, SPAN)


def backdrop(signs: Tensor, dtype: torch.dtype, picks: Picks) -> Tensor:
    """Every element as the mean magnitude of its span, with its own sign or, where all are positive, as zero."""
    bits = reference.unpack_bits(signs[: picks.bit_bytes], picks.tiles * TILE, 1.0, 0.0, dtype).view(-1, SPAN)
    means = signs[picks.bit_bytes :].view(dtype)[:, None]
    return torch.where(means.signbit(), bits * means.abs(), (1 - 2 * bits) * means).flatten()[: picks.n]


def put_back(
    values: Tensor,
    places: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    picks: Picks,
    signs: Tensor | None = None,
) -> Tensor:
    """A tensor of that dense layout with the picked elements where they were; elsewhere zeros, or by the signs."""
    check_picks(values, places, picks, signs)
    if signs is None:
        out = torch.zeros(math.prod(shape), dtype=values.dtype, device=values.device)
    else:
        out = backdrop(signs, values.dtype, picks)
    out[where(places, picks)] = values
    return out.as_strided(tuple(shape), tuple(stride))


def where(places: Tensor, picks: Picks) -> Tensor:
    """The places of the picked elements, in order."""
    written = places[picks.places_at :]
    if picks.kind is Kind.BITS:
        bits = reference.unpack_bits(written, TILE * (len(written) * 8 // TILE), 1.0, 0.0, torch.bool)
        return torch.nonzero_static(bits, size=picks.k).flatten()
    starts = places[: picks.places_at].view(torch.int32)
    blocks = torch.searchsorted(starts[1:].long(), torch.arange(picks.k, device=places.device), right=True)
    inside = written if picks.kind is Kind.BYTES else written.view(torch.int16)
    return blocks * picks.kind.block + inside


def largest(rows: Tensor, k: int) -> Tensor:
    """Which are the k largest in magnitude of each row, the first ones among equals. See the NOTE in picks.py."""
    if k == rows.shape[1]:
        return torch.ones_like(rows, dtype=torch.bool)
    if k == 0:
        return torch.zeros_like(rows, dtype=torch.bool)
    sizes = magnitudes(rows)
    least = sizes.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = sizes > least, sizes == least
    missing = k - above.sum(1, keepdim=True)
    return above | (equal & (equal.cumsum(1) <= missing))


def magnitudes(x: Tensor) -> Tensor:
    """|x| by its bits, as an integer: it orders as |x| does, and every NaN above."""
    integer = PATTERNS[x.dtype.itemsize]
    return x.view(integer) & torch.iinfo(integer).max

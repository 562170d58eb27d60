"""Two ranks under slimgrad: DDP and FSDP2, each compared with the same training untouched or in one process."""

from __future__ import annotations

import copy
import gc
import importlib.util
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import slimgrad as sg
from slimgrad.runtime.tickets import Kept, Sealed
from tests.codecs.halved import Halved
from tests.distributed.workers import (
    RANKS,
    Net,
    Outcomes,
    backward,
    batch,
    equal,
    gradients_of,
    loss_of,
    mean_of_shards,
    on_two_ranks,
    outcomes_of,
    pieces,
    sharded,
    trained,
)
from tests.models import cnn, hook_count, images

CODECS: dict[str, Any] = {
    "lossless": sg.Lossless(),
    "derive": sg.Derive(),
    "halved": Halved(),
    "quant": sg.Quant(bits=8),
    "blocks": sg.Blocks(keep=0.3, block=(16, 16), means=16),
}

LOSSY = [name for name in CODECS if name not in ("lossless", "derive")]
"""These serve what they can, and Lossless the rest."""

WHERE = ("inside", "around")
"""Whether apply gets the model or the DDP wrapper."""

ORDER = ("before", "after")
"""Whether apply comes before fully_shard or after it."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "two_ranks"
    cases = [item.callspec.params["case"] for item in request.session.items if "outcomes" in item.fixturenames]
    return outcomes_of(cases, __name__, folder)


# --- DDP ------------------------------------------------------------------------------------------------------------


def ddp(model: nn.Module, where: str, what: Any, **options: Any) -> tuple[DistributedDataParallel, sg.Run]:
    if where == "inside":
        run = sg.apply(model, what)
        return DistributedDataParallel(model, **options), run
    wrapper = DistributedDataParallel(model, **options)
    return wrapper, sg.apply(wrapper, what)


OPTIONS: dict[str, dict[str, bool]] = {
    "plain": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
}


@on_two_ranks(where=WHERE, options=OPTIONS)
def test_ddp_averages_the_very_gradients_of_the_untouched_run(where: str, options: str) -> None:
    expected = trained(DistributedDataParallel(Net(), **OPTIONS[options]))
    model, run = ddp(Net(), where, sg.Lossless(), **OPTIONS[options])
    assert equal(expected, trained(model))
    assert len(run.report().sites) == 4  # a ReLU and a dropout mask in each block


@on_two_ranks(where=WHERE, codec=CODECS)
def test_ddp_gives_the_mean_of_the_shards_gradients_bit_for_bit(where: str, codec: str) -> None:
    alone = Net()
    sg.apply(alone, CODECS[codec])
    model, run = ddp(Net(), where, CODECS[codec])
    assert equal(mean_of_shards(alone), trained(model))
    assert run.report().ratio > 1.5


@on_two_ranks(codec=LOSSY)
def test_a_lossy_codec_really_changes_what_the_ranks_average(codec: str) -> None:
    """Otherwise the test before this one could not fail."""
    model, _ = ddp(Net(), "inside", CODECS[codec])
    assert not equal(mean_of_shards(Net()), trained(model))


@on_two_ranks(where=WHERE)
def test_ddp_agrees_with_one_process_on_the_whole_batch(where: str) -> None:
    """Up to the order of additions; without dropout and batch norm, for which the whole batch is not its parts."""
    layers = [layer for layer in cnn() if not isinstance(layer, (nn.Dropout, nn.BatchNorm2d))]
    alone = copy.deepcopy(nn.Sequential(*layers))
    model, run = ddp(nn.Sequential(*layers), where, sg.Lossless())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (alone, model)]
    for step in range(3):
        shards = [images(8, seed=RANKS * step + rank) for rank in range(RANKS)]
        for one, x, share in ((alone, torch.cat(shards), RANKS), (model, shards[distributed.get_rank()], 1)):
            one.zero_grad()
            (loss_of(one, x) / share).backward()
        assert_close(gradients_of([*model.parameters()]), gradients_of([*alone.parameters()]))
        [optimizer.step() for optimizer in optimizers]
    assert run.report().ratio > 1.5


@on_two_ranks(where=WHERE)
def test_ddp_keeps_the_buffers_of_batch_norm_in_step(where: str) -> None:
    results = []
    for treat in (False, True):
        model = cnn()
        wrapper, run = ddp(model, where, sg.Lossless()) if treat else (DistributedDataParallel(model), None)
        for step in range(3):
            torch.manual_seed(step)
            wrapper(images(8, seed=2 * step + distributed.get_rank())).sum().backward()
        results.append([[parameter.grad for parameter in model.parameters()], list(model.buffers())])
        assert run is None or run.report().ratio > 2
    assert equal(*results)


@on_two_ranks(where=WHERE, codec=LOSSY)
def test_ddp_accumulates_over_parts_without_averaging_each(where: str, codec: str) -> None:
    def sync(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else model.no_sync()

    alone = Net()
    sg.apply(alone, CODECS[codec])
    model, _ = ddp(Net(), where, CODECS[codec])
    assert equal(mean_of_shards(alone, parts=3), trained(model, parts=3, sync=sync))


@on_two_ranks(where=WHERE)
def test_ddp_with_a_frozen_block_leaves_it_without_gradients(where: str) -> None:
    expected = trained(DistributedDataParallel(Net(frozen=1)))
    model, run = ddp(Net(frozen=1), where, sg.Lossless())
    found = trained(model)
    assert equal(expected, found) and sum(gradient is None for gradient in found[-1]) == 6
    assert run.report().sites


@on_two_ranks(where=WHERE)
def test_ddp_under_autocast_lets_go_of_the_weight_copies(where: str) -> None:
    expected = trained(DistributedDataParallel(Net()), autocast=True)
    model, run = ddp(Net(), where, sg.Lossless())
    assert equal(expected, trained(model, autocast=True))
    assert sum(site.site.need is sg.Need.WEIGHT for site in run.report().sites) == 4


@on_two_ranks(where=WHERE)
def test_ddp_with_checkpointed_blocks_packs_what_they_recompute_from(where: str) -> None:
    alone = Net(checkpointed=True)
    sg.apply(alone, CODECS["halved"])
    model, run = ddp(Net(checkpointed=True), where, CODECS["halved"])
    assert equal(mean_of_shards(alone), trained(model))
    assert [site.site.node for site in run.report().sites].count("checkpoint") == 2


@on_two_ranks(where=WHERE)
def test_ranks_may_take_different_paths(where: str) -> None:
    """The other rank's path is never learnt here, and a path not learnt is kept as it is."""

    def wandering() -> Net:
        net = Net()
        net.short = cycle([True, False] if distributed.get_rank() else [False, True])
        return net

    expected = trained(DistributedDataParallel(wandering(), find_unused_parameters=True), steps=5)
    model, run = ddp(wandering(), where, sg.Lossless(), find_unused_parameters=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sg.SlimgradWarning)
        assert equal(expected, trained(model, steps=5))
    assert run.report().sites


@on_two_ranks(where=WHERE)
def test_ddp_can_be_learnt_ahead(where: str) -> None:
    expected = trained(DistributedDataParallel(Net()))
    net, x = Net(), batch(distributed.get_rank())
    run = sg.apply(net, sg.Lossless(), batch=x) if where == "inside" else None
    model = DistributedDataParallel(net)
    run = run or sg.apply(model, sg.Lossless(), batch=x)
    assert equal(expected, trained(model))
    assert len(run.report().sites) == 4 and list(run._gate.lessons.values()) == [1]


@on_two_ranks(codec=CODECS)
def test_every_rank_reports_what_its_own_batch_keeps(codec: str) -> None:
    alone, rank = Net(), distributed.get_rank()
    expected = sg.apply(alone, CODECS[codec])
    backward(alone, rank, 0)
    model, run = ddp(Net(), "inside", CODECS[codec])
    backward(model, rank, 0)
    assert run.report() == expected.report()
    kept: list[Any] = [None] * RANKS
    distributed.all_gather_object(kept, run.report().kept_before)
    assert kept[0] > kept[1]  # its batch is larger


@on_two_ranks(where=WHERE)
def test_remove_leaves_an_untouched_ddp_model_with_the_same_state(where: str) -> None:
    untouched = DistributedDataParallel(Net())
    model, run = ddp(Net(), where, sg.Lossless())
    assert equal(trained(untouched), trained(model))
    run.remove()
    assert hook_count(model) == hook_count(untouched) and not run.active
    assert list(model.state_dict()) == list(untouched.state_dict())
    assert equal(trained(untouched), trained(model))


def gelu_net(**how: Any) -> Net:
    """With activations that an op of slimgrad computes."""
    net = Net(**how)
    for block in net.blocks:
        block.act = nn.GELU()
    return net


@on_two_ranks(checkpointed=("whole", "checkpointed"))
def test_ddp_averages_what_fused_ops_give(checkpointed: str) -> None:
    how = {"checkpointed": checkpointed == "checkpointed"}
    alone, net, x = gelu_net(**how), gelu_net(**how), batch(distributed.get_rank())
    for one in (alone, net):
        sg.apply(one, sg.FewBit(bits=3), batch=x)  # both then have the ops in the first forward
    expected = mean_of_shards(alone)
    assert equal(expected, trained(DistributedDataParallel(net)))
    assert not equal(expected, mean_of_shards(gelu_net(**how)))


# --- FSDP2 ----------------------------------------------------------------------------------------------------------


@on_two_ranks(reshard=("reshard", "keep"))
def test_fsdp2_averages_what_fused_ops_give(reshard: str) -> None:
    alone, net, x = gelu_net(), gelu_net(), batch(distributed.get_rank())
    for one in (alone, net):
        run = sg.apply(one, sg.FewBit(bits=3), batch=x)
    expected = pieces(mean_of_shards(alone))
    found = trained(sharded(net, reshard=reshard == "reshard"))
    assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert sum("FewBit" in site.codec for site in run.report().sites) == 2


def fsdp(order: str, what: Any, net: Net | None = None, **how: Any) -> tuple[Net, sg.Run]:
    net = net or Net()
    if order == "before":
        run = sg.apply(net, what)
        return sharded(net, **how), run
    return sharded(net, **how), sg.apply(net, what)


@on_two_ranks(order=ORDER, policy=("fp32", "bf16"), reshard=(True, False, None))
def test_fsdp_gives_the_very_gradients_of_the_untouched_run(order: str, policy: str, reshard: bool | None) -> None:
    how = {"bf16": policy == "bf16", "reshard": reshard}
    expected = trained(sharded(Net(), **how))
    model, run = fsdp(order, sg.Lossless(), **how)
    assert equal(expected, trained(model))
    assert len(run.report().sites) == 4 and list(run._gate.lessons.values()) == [1]


@on_two_ranks(order=ORDER, codec=CODECS)
def test_fsdp_gives_the_mean_of_the_shards_gradients_bit_for_bit(order: str, codec: str) -> None:
    alone = Net()
    sg.apply(alone, CODECS[codec])
    model, run = fsdp(order, CODECS[codec])
    assert equal(pieces(mean_of_shards(alone)), trained(model))
    assert run.report().ratio > 1.5


def watch_weights(model: nn.Module) -> list[torch.UntypedStorage]:
    """The storages of the parameters that forward really uses: the gathered ones."""
    storages: list[torch.UntypedStorage] = []

    def note(module: nn.Module, args: Any) -> None:
        storages.extend(parameter.untyped_storage() for parameter in module.parameters(recurse=False))

    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.register_forward_pre_hook(note)
    return storages


def bytes_in_tickets() -> int:
    """What the gate holds now: storages by the size they really have, and everything packed."""
    tickets = [thing for thing in gc.get_objects() if type(thing) in (Kept, Sealed)]
    storages = [ticket.tensor.untyped_storage() for ticket in tickets if isinstance(ticket, Kept)]
    packed = {id(ticket.packed): ticket.packed.nbytes for ticket in tickets if isinstance(ticket, Sealed)}
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values()) + sum(packed.values())


@on_two_ranks(order=ORDER, policy=("fp32", "bf16"), codec=LOSSY)
def test_gathered_parameters_are_freed_after_forward_and_never_packed(order: str, policy: str, codec: str) -> None:
    gc.collect()  # tickets that other cases left
    x = batch(distributed.get_rank())
    model, run = fsdp(order, CODECS[codec], bf16=policy == "bf16")
    storages = watch_weights(model)
    held = 0
    for step in range(3):
        loss = loss_of(model, x)
        held = held if step else bytes_in_tickets()
        assert len(storages) == 16 and {storage.nbytes() for storage in storages} == {0}
        loss.backward()
        assert {storage.nbytes() for storage in storages} == {0}
        storages.clear()
    report, profile = run.report(), run._gate.last.structure.profile
    assert {site.site.parameter for site in report.sites} == {None}
    seen = [profile.storages[site.storage].kind for site in profile.sites if site.parameter]
    assert len(seen) >= 4 and set(seen) == {"parameter"}
    # Every saved tensor has a ticket in the first forward, which is watched. Inputs are not counted as kept, but the
    # gate that opens before FSDP2 casts them takes the cast for an activation.
    inputs = 0 if (order, policy) == ("after", "bf16") else x.numel() * (2 if policy == "bf16" else 4)
    assert held == report.kept_after + inputs


@on_two_ranks(order=ORDER, policy=("fp32", "bf16"))
def test_fsdp_reports_what_one_process_keeps(order: str, policy: str) -> None:
    """To the byte, so no parameter is among what is kept; except that FSDP2's cast of the input comes on top."""
    alone, x = Net(), batch(distributed.get_rank())
    model, run = fsdp(order, sg.Lossless(), bf16=policy == "bf16")
    backward(model, distributed.get_rank(), 0)
    if policy == "bf16":
        alone, x = alone.bfloat16(), x.bfloat16()
    expected = sg.apply(alone, sg.Lossless())
    alone(x).sum().backward()
    cast = x.nbytes if policy == "bf16" and order == "after" else 0
    assert run.report().kept_before == expected.report().kept_before + cast
    assert run.report().kept_after == run.report().promised == expected.report().kept_after + cast
    assert [site.site.name for site in run.report().sites] == [site.site.name for site in expected.report().sites]


@on_two_ranks(order=ORDER)
def test_fsdp_with_checkpointed_blocks_packs_what_they_recompute_from(order: str) -> None:
    alone = Net(checkpointed=True)
    sg.apply(alone, CODECS["halved"])
    model, run = fsdp(order, CODECS["halved"], Net(checkpointed=True))
    assert equal(pieces(mean_of_shards(alone)), trained(model))
    assert [site.site.node for site in run.report().sites].count("checkpoint") == 2


@on_two_ranks(order=ORDER, codec=LOSSY)
def test_fsdp_accumulates_over_parts_without_averaging_each(order: str, codec: str) -> None:
    def sync(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        model.set_requires_gradient_sync(last)
        return nullcontext()

    alone = Net()
    sg.apply(alone, CODECS[codec])
    model, _ = fsdp(order, CODECS[codec])
    assert equal(pieces(mean_of_shards(alone, parts=3)), trained(model, parts=3, sync=sync))


@on_two_ranks(order=ORDER)
def test_fsdp_under_autocast_lets_go_of_the_weight_copies(order: str) -> None:
    expected = trained(sharded(Net()), autocast=True)
    model, run = fsdp(order, sg.Lossless())
    assert equal(expected, trained(model, autocast=True))
    assert sum(site.site.need is sg.Need.WEIGHT for site in run.report().sites) == 4


@on_two_ranks(order=ORDER)
def test_fsdp_that_keeps_gathered_parameters_is_learnt_once_under_autocast(order: str) -> None:
    model, run = fsdp(order, sg.Lossless(), reshard=False)
    trained(model, autocast=True)
    assert list(run._gate.lessons.values()) == [1]


@on_two_ranks(order=ORDER)
def test_fsdp_with_a_frozen_block_gives_the_untouched_gradients(order: str) -> None:
    expected = trained(sharded(Net(frozen=1)))
    model, run = fsdp(order, sg.Lossless(), Net(frozen=1))
    assert equal(expected, trained(model))
    assert run.report().sites


@on_two_ranks(order=ORDER, policy=("fp32", "bf16"), reshard=(True, False))
def test_frozen_gathered_parameters_are_never_packed(order: str, policy: str, reshard: bool) -> None:
    how = {"bf16": policy == "bf16", "reshard": reshard}
    alone = Net(frozen=1)
    sg.apply(alone, CODECS["halved"])
    expected = trained(sharded(Net(frozen=1), **how)) if policy == "bf16" else pieces(mean_of_shards(alone))
    model, run = fsdp(order, CODECS["halved"], Net(frozen=1), **how)  # which halves float32 only
    assert equal(expected, trained(model))
    profile = run._gate.last.structure.profile
    weights = [site for site in profile.sites if site.path.startswith("blocks.1") and site.slot in ("mat2", "weight")]
    assert [profile.storages[site.storage].kind for site in weights] == ["parameter"] * 3


@on_two_ranks(order=ORDER)
def test_fsdp_with_a_frozen_block_under_autocast_gives_the_untouched_gradients(order: str) -> None:
    expected = trained(sharded(Net(frozen=1)), autocast=True)
    model, run = fsdp(order, sg.Lossless(), Net(frozen=1))
    assert equal(expected, trained(model, autocast=True))
    assert run.report().sites


@on_two_ranks(order=ORDER)
def test_freezing_and_unfreezing_sharded_parameters_is_noticed(order: str) -> None:
    results = []
    for treat in (False, True):
        model = fsdp(order, sg.Lossless(), Net(frozen=1))[0] if treat else sharded(Net(frozen=1))
        found = []
        for step, frozen in enumerate((1, 1, 0, 0, None)):
            for number, block in enumerate(model.blocks):
                block.requires_grad_(number != frozen)
            model.zero_grad()
            backward(model, distributed.get_rank(), step)
            found.append(gradients_of([*model.parameters()]))
        results.append(found)
    assert equal(*results)


@on_two_ranks()
def test_fsdp_can_be_learnt_ahead_before_it_is_sharded() -> None:
    expected = trained(sharded(Net()))
    net = Net()
    run = sg.apply(net, sg.Lossless(), batch=batch(distributed.get_rank()))
    assert equal(expected, trained(sharded(net)))
    assert len(run.report().sites) == 4 and list(run._gate.lessons.values()) == [1]


@on_two_ranks()
def test_learning_ahead_is_refused_once_the_model_is_sharded() -> None:
    with pytest.raises(sg.UnsupportedModelError, match=r"sharded.*before fully_shard"):
        sg.apply(sharded(Net()), sg.Lossless(), batch=batch(distributed.get_rank()))


@on_two_ranks(order=ORDER, policy=("fp32", "bf16"))
def test_remove_leaves_an_untouched_fsdp_model_with_the_same_state(order: str, policy: str) -> None:
    untouched = sharded(Net(), bf16=policy == "bf16")
    model, run = fsdp(order, sg.Lossless(), bf16=policy == "bf16")
    assert equal(trained(untouched), trained(model))
    run.remove()
    assert hook_count(model) == hook_count(untouched) and not run.active
    assert list(model.state_dict()) == list(untouched.state_dict()) == list(Net().state_dict())
    assert equal(trained(untouched), trained(model))


@on_two_ranks(order=ORDER, momentum=(0.0, 0.9))
def test_bounds_of_sharded_layers_follow_what_each_rank_has_of_them(order: str, momentum: float) -> None:
    """Before it is sharded, a model has no optimizer yet that could be given."""
    net, one = Net(), Net()
    run = sg.apply(net, sg.comet(), min_bytes=0) if order == "before" else None
    sharded(net)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=momentum) for each in (net, one)]
    run = run or sg.apply(net, sg.comet(), optimizer=optimizers[0], min_bytes=0)
    alone = sg.apply(one, sg.comet(), optimizer=None if order == "before" else optimizers[1], min_bytes=0)
    for step in range(6):
        for model, optimizer in zip((net, one), optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, distributed.get_rank(), step)
            optimizer.step()
    found, expected = run.controller.bounds, alone.controller.bounds
    assert found.keys() == expected.keys() and len(found) == 6
    assert all(0.25 < found[path] / bound < 4 for path, bound in expected.items())


# --- the example ----------------------------------------------------------------------------------------------------


def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "ddp.py"
    spec = importlib.util.spec_from_file_location("ddp_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@on_two_ranks()
def test_the_example_reaches_the_untouched_weights_with_less() -> None:
    assert example().compare(steps=2).ratio > 1.5


@on_two_ranks()
def test_fsdp_gathers_no_biases_for_what_was_learnt_ahead_to_be_made_again() -> None:
    """Each module by itself: the norm's bias is gone when the activation behind it reads what it made."""
    results = []
    for treat in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv1d(8, 8, 3))
        x = torch.randn(4, 3, 64)
        if treat:
            sg.apply(model, sg.Derive(), batch=x, min_bytes=0)
        mesh = distributed.init_device_mesh("cpu", (RANKS,))
        for module in (*model[:2], model[3], model):
            fully_shard(module, mesh=mesh)
        for _ in range(2):
            model.zero_grad()
            model(x).square().mean().backward()
        results.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))

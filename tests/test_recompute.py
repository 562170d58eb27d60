"""Recompute: whole modules run again in backward, their inputs packed by whatever rule fits."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import slimgrad as sg
from tests.models import hook_count
from tests.zoo import ZOO, assert_same_gradients, fresh, gradients


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + scale * self.drop(self.down(self.act(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


@pytest.fixture
def model() -> Stack:
    torch.manual_seed(0)
    return Stack()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(128, 64, generator=torch.Generator().manual_seed(0))


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


INPUT = 128 * 64 * 4


def test_only_the_inputs_of_blocks_are_kept_and_gradients_are_bit_equal(model: Stack, x: Tensor) -> None:
    plain = copy.deepcopy(model)
    run = sg.apply(model, [sg.Rule("blocks.*", sg.Recompute())])
    for _ in range(3):
        for one, two in zip(step(model, x), step(plain, x), strict=True):
            assert torch.equal(one, two)
    # the inputs of four blocks, of which the first is the model's own, and of the head
    assert run.report().kept_after == 4 * INPUT


def test_the_inputs_may_be_packed(model: Stack, x: Tensor) -> None:
    run = sg.apply(model, "blocks.*: recompute(); quant(bits=8)")
    step(model, x)
    step(model, x)
    report = run.report()
    assert report.kept_after == report.promised < 4 * INPUT * 0.3
    assert [site.site.node for site in report.sites].count("checkpoint") == 3


def test_what_a_batch_teaches_is_what_runs(model: Stack, x: Tensor) -> None:
    what = "blocks.*: recompute(); quant(bits=8)"
    run = sg.apply(model, what, batch=x)
    step(model, x)
    assert [site.site.node for site in run.report().sites].count("checkpoint") == 3
    assert "forward" in model.blocks[0].__dict__


def test_a_class_selects_modules_too_and_an_inner_one_goes_with_the_outer(model: Stack, x: Tensor) -> None:
    by_class = sg.apply(model, [sg.Rule(Block, sg.Recompute()), sg.Rule(nn.Linear, sg.Recompute())])
    step(model, x)
    assert "forward" in model.blocks[0].__dict__ and "forward" not in model.blocks[0].up.__dict__
    assert "forward" in model.head.__dict__
    by_class.remove()


def test_removing_leaves_no_trace(model: Stack, x: Tensor) -> None:
    run = sg.apply(model, [sg.Rule("blocks.*", sg.Recompute())])
    step(model, x)
    run.remove()
    assert not any("forward" in module.__dict__ for module in model.modules()) and hook_count(model) == 0


def test_a_copy_is_untouched(model: Stack, x: Tensor) -> None:
    sg.apply(model, [sg.Rule("blocks.*", sg.Recompute())])
    step(model, x)
    other = copy.deepcopy(model)
    run = sg.apply(other, sg.Lossless())
    step(other, x)
    assert run.report().kept_after > 10 * INPUT


def test_evaluation_runs_nothing_twice(model: Stack, x: Tensor) -> None:
    sg.apply(model, [sg.Rule("blocks.*", sg.Recompute())])
    calls = []
    model.blocks[0].norm.register_forward_hook(lambda *_: calls.append(1))
    model.eval()
    with torch.no_grad():
        model(x)
    assert len(calls) == 1
    model.train()
    step(model, x)
    assert len(calls) == 3


def test_a_need_selects_no_module(model: Stack) -> None:
    with pytest.raises(sg.RuleError, match="by a path or a class"):
        sg.apply(model, [sg.Rule(sg.Need.OPERAND, sg.Recompute())])
    assert hook_count(model) == 0


def test_a_forward_that_others_replaced_is_refused(model: Stack) -> None:
    model.blocks[1].forward = lambda x, scale: x
    with pytest.raises(sg.RuleError, match=r"blocks\.1 has a forward"):
        sg.apply(model, [sg.Rule("blocks.*", sg.Recompute())])
    assert hook_count(model) == 0


def test_inputs_of_regions_may_be_derived_from_what_is_packed(model: Stack, x: Tensor) -> None:
    """The input of each region is a norm's output here, and the norm's input is in eight bits."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for norm, block in zip(self.norms, self.blocks, strict=True):
                x = block(norm(x))
            return x

    model, exact = Normed().eval(), []
    for p in (0, 1):
        run = sg.apply(model, f"blocks.*: recompute(); derive(); {('quant(bits=8)', 'keep()')[p]}; lossless()")
        step(model, x)
        exact.append(step(model, x))
        assert [s.codec for s in run.report().sites if s.site.node == "checkpoint"] == [repr(sg.Derive())] * 3
        run.remove()
    for one, two in zip(*exact, strict=True):
        assert (one - two).norm() < 0.05 * two.norm()


class Rectified(nn.Module):
    """Ends in a ReLU, whose node is the newest when the next block's input is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.linear(x))


@pytest.mark.parametrize("how", ["recompute", "torch"])
def test_the_input_of_a_block_behind_a_relu_is_no_mask(x: Tensor, how: str) -> None:
    blocks = nn.Sequential(*(Rectified() for _ in range(4)))
    plain = copy.deepcopy(blocks)
    if how == "torch":
        for block in (*blocks, *plain):
            block.forward = partial(checkpoint, partial(Rectified.forward, block), use_reentrant=False)
        run = sg.apply(blocks, sg.Lossless())
    else:
        run = sg.apply(blocks, [sg.Rule(Rectified, sg.Recompute()), sg.Rule("*", sg.Lossless())])
    for _ in range(3):
        for one, two in zip(step(blocks, x), step(plain, x), strict=True):
            assert torch.equal(one, two)
    assert not run.report().sites


@pytest.mark.parametrize(("name", "where"), [("hf-gpt2", "transformer.h.*"), ("hf-bert", "bert.encoder.layer.*")])
def test_layers_of_transformers_are_bit_equal_when_they_run_again(name: str, where: str) -> None:
    entry = next(entry for entry in ZOO if entry.name == name)
    plain = fresh(entry)
    plain.config.use_cache = False  # a cache lays keys out in other memory, where attention rounds in another order
    treated = copy.deepcopy(plain)
    run = sg.apply(treated, [sg.Rule(where, sg.Recompute()), sg.Rule("*", sg.Derive()), sg.Rule("*", sg.Lossless())])
    for seed in range(3):
        assert_same_gradients(gradients(entry, plain, "cpu", seed=seed), gradients(entry, treated, "cpu", seed=seed))
    assert run.report().kept_after == run.report().promised


class Convolutions(nn.Module):
    """A block with statistics that its forward changes."""

    def __init__(self, spectral: bool = False) -> None:
        super().__init__()
        conv: nn.Module = nn.Conv2d(8, 8, 3, padding=1)
        self.conv = nn.utils.spectral_norm(conv) if spectral else conv
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


@pytest.mark.parametrize("spectral", [False, True])
@pytest.mark.parametrize("twice", [False, True], ids=["", "two forwards before backward"])
def test_running_statistics_move_once_a_step_and_the_second_run_begins_with_the_old_ones(
    spectral: bool, twice: bool
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Convolutions(spectral) for _ in range(3)), nn.Flatten(), nn.Linear(8 * 64, 4))
    treated = copy.deepcopy(plain)
    with sg.apply(treated, "0: recompute(); 1: recompute(); lossless()"):
        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randn(4, 8, 8, 8)
            for model in (plain, treated):
                model.zero_grad()
                loss = model(x).square().mean()
                if twice:
                    loss = loss + model(x + 1).square().mean()
                loss.backward(retain_graph=True)
                loss.backward()
            for (name, one), two in zip(plain.named_parameters(), treated.parameters(), strict=True):
                assert torch.equal(one.grad, two.grad), name
            for (name, one), two in zip(plain.named_buffers(), treated.buffers(), strict=True):
                assert torch.equal(one, two), name


def test_statistics_that_were_frozen_at_first_move_once_a_step_later() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Convolutions() for _ in range(2)), nn.Flatten(), nn.Linear(8 * 64, 4))
    treated, x = copy.deepcopy(plain), torch.randn(4, 8, 8, 8)
    sg.apply(treated, "0: recompute(); 1: recompute(); lossless()")
    for training in (False, True, True):
        for model in (plain, treated):
            for block in model[:2]:
                block.norm.train(training)
            model(x).square().mean().backward()
        for one, two in zip(plain.buffers(), treated.buffers(), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("still", ["a momentum of zero", "a batch of zeros"])
def test_statistics_that_stayed_in_the_first_forward_move_once_a_step_later(still: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.GELU()), nn.Flatten())
    treated, x = copy.deepcopy(plain), torch.randn(4, 8, 8, 8)
    sg.apply(treated, "0: recompute(); lossless()")
    for step in range(4):
        for model in (plain, treated):
            if "momentum" in still:
                model[0][1].momentum = 0.1 if step else 0.0
            model(x if step or "momentum" in still else x * 0).square().mean().backward()
        for one, two in zip(plain.buffers(), treated.buffers(), strict=True):
            assert torch.equal(one, two)


class Averaged(nn.Module):
    """Begins to average what it makes when it is told to."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place, self.averages = nn.Linear(64, 64), in_place, False
        self.average: Tensor
        self.register_buffer("average", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.averages:
            now = self.average * 0.9 + x.detach().mean(0) * 0.1
            self.average = self.average.copy_(now) if self.in_place else now
        return torch.sigmoid(x) * (1 + self.average)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_buffer_that_begins_to_change_later_is_noticed(in_place: bool, x: Tensor) -> None:
    """Replaced, it is there as it was; changed in place it is not, and from the next step on a copy of it is."""
    plain = nn.Sequential(Averaged(in_place=in_place), nn.Linear(64, 8))
    treated = copy.deepcopy(plain)
    sg.apply(treated, "0: recompute(); lossless()", min_bytes=0)
    for step in range(5):
        for model in (plain, treated):
            model[0].averages = step > 1
            model.zero_grad()
            loss = model(x).square().mean()
            if in_place and step == 2 and model is treated:
                with pytest.raises(sg.SavedTensorModifiedError, match="the buffer 'average' was changed in place"):
                    loss.backward()
            else:
                loss.backward()
        for one, two in zip(plain.parameters(), treated.parameters(), strict=True):
            assert (step == 2 and in_place) or torch.equal(one.grad, two.grad)
        for one, two in zip(plain.buffers(), treated.buffers(), strict=True):
            assert torch.equal(one, two)


def test_a_cache_that_somebody_will_read_is_filled() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    off = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=64, **off)
    plain = GPT2LMHeadModel(config)
    treated, ids = copy.deepcopy(plain), torch.randint(0, 50, (2, 16))
    run = sg.apply(treated, "transformer.h.*: recompute(); lossless()")
    for model in (plain, treated):
        model.train()(input_ids=ids, labels=ids, use_cache=True).loss.backward()
    for one, two in zip(plain.parameters(), treated.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
    caches = [model.eval()(input_ids=ids, use_cache=True).past_key_values for model in (plain, treated)]
    assert [cache.get_seq_length() for cache in caches] == [16, 16]
    logits = []
    for model, cache in zip((plain, treated), caches, strict=True):
        model.train().zero_grad()  # a filled cache is part of what is computed, as with a trained prefix
        logits.append(model(input_ids=ids[:, :4], past_key_values=cache).logits)
        logits[-1].square().sum().backward()
    assert torch.equal(*logits)
    for one, two in zip(plain.parameters(), treated.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
    run.remove()


def test_a_cache_that_earlier_modules_fill_in_training_does_not_keep_one_from_running_again() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=64, n_head=2, vocab_size=50, n_positions=64)).train()
    ids = torch.randint(0, 50, (8, 64))
    kept = []
    for use_cache in (False, True):
        run = sg.apply(model, "transformer.h.2: recompute()")
        model(input_ids=ids, labels=ids, use_cache=use_cache).loss.backward()
        kept.append(run.report().kept_after)
        assert not [site for site in run.report().sites if site.path.startswith("transformer.h.2.")]
        run.remove()
    assert kept[1] == pytest.approx(kept[0], rel=0.02)


@pytest.mark.parametrize("taught", [False, True])
def test_the_report_counts_what_modules_that_run_again_would_have_kept(model: Stack, x: Tensor, taught: bool) -> None:
    untouched = sg.profile(model, x).kept_bytes
    run = sg.apply(model, "blocks.*: recompute(); lossless()", batch=x if taught else None)
    for _ in range(2):
        step(model, x)
        report = run.report()
        assert (report.kept_before == untouched) is taught and report.kept_after < untouched / 4
        told = "4 modules run again in backward (blocks.0, blocks.1, blocks.2, …)"
        (note,) = [note for note in report.notes if note.startswith(told)]
        assert ("is not known" in note) is not taught

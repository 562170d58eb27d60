"""apply, report, remove and `with run:`, and what they do with bad input."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import slimgrad as sg
from slimgrad.runtime.tickets import Held, Kept, Sealed
from tests.codecs.halved import Halved
from tests.models import cnn, gradients, hook_count, images, pair, same


def test_a_report_needs_a_step() -> None:
    with pytest.raises(sg.SlimgradError, match="Run one training step first"):
        sg.apply(cnn(), sg.Lossless()).report()


def test_the_report_shows_promised_and_measured_bytes_side_by_side() -> None:
    _, treated, run = pair(cnn())
    gradients(treated, lambda m: m(images()))
    report = run.report()
    assert report.kept_after == report.promised < report.kept_before
    assert report.kept_before == sg.profile(cnn(), images()).kept_bytes
    by_path = {site.site.path: site for site in report.sites if site.site.slot != "self"}
    assert by_path["2"].after == by_path["2"].promised == by_path["2"].before // 32
    assert by_path["3"].after == by_path["3"].before // 8
    assert "x less" in str(report) and sg.Report.from_json(report.to_json()) == report


def test_the_report_says_who_still_keeps_a_storage() -> None:
    _, treated, run = pair(cnn())
    gradients(treated, lambda m: m(images()))
    assert any("1:NativeBatchNormBackward0.input (VALUES) keeps it" in reason for reason in run.report().reasons)


def test_a_storage_that_an_output_still_holds_is_counted_as_not_freed() -> None:
    class Leaky(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = F.relu(x * 2)
            return F.avg_pool2d(y, 2), y

    model = Leaky()
    run = sg.apply(model, sg.Lossless())
    pooled, held = model(images(8).requires_grad_())
    pooled.sum().backward()
    report = run.report()
    assert report.kept_after > report.kept_before  # the mask comes on top of what the output holds
    assert any("something outside autograd holds it" in reason for reason in report.reasons)
    assert held is not None


def test_applying_twice_is_refused_until_the_first_is_removed() -> None:
    model = cnn()
    run = sg.apply(model, sg.Lossless())
    with pytest.raises(sg.SlimgradError, match=r"already under a run .* call its remove\(\) first"):
        sg.apply(model, sg.Lossless())
    run.remove()
    sg.apply(model, sg.Lossless())


def test_only_modules_can_be_treated() -> None:
    with pytest.raises(sg.UnsupportedModelError, match=r"expected an nn\.Module, found function"):
        sg.apply(lambda x: x, sg.Lossless())


def test_a_model_on_the_meta_device_is_refused_with_what_to_do() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(sg.UnsupportedModelError, match=r"'weight' is on the meta device.*to_empty"):
        sg.apply(model, sg.Lossless())


def test_complex_and_sparse_tensors_pass_untouched() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))
            self.dense = nn.Parameter(torch.randn(64, 32))
            indices = torch.arange(64).repeat(2, 1)
            self.adjacency = torch.sparse_coo_tensor(indices, torch.ones(64), (64, 64), is_coalesced=True)

        def forward(self, x: Tensor) -> Tensor:
            spectrum = torch.fft.fft(x) @ self.weight
            return F.relu(spectrum.abs()).sum() + F.relu(torch.sparse.mm(self.adjacency, self.dense)).sum()

    plain, treated, _ = pair(Odd())
    for _ in range(3):
        left, right = (gradients(m, lambda m: m(torch.ones(64, 64))) for m in (plain, treated))
        assert same(left, right)


def test_a_batch_the_model_does_not_take_is_refused_before_anything_changes() -> None:
    model = cnn()
    with pytest.raises(sg.BatchError, match="the model does not take this batch"):
        sg.apply(model, sg.Lossless(), batch={"pixels": images()})
    assert hook_count(model) == 0


def test_an_optimizer_must_be_one() -> None:
    with pytest.raises(sg.SlimgradError, match=r"torch\.optim\.Optimizer, found str"):
        sg.apply(cnn(), sg.Lossless(), optimizer="adam")


def test_buffers_and_random_state_are_untouched_by_learning_ahead() -> None:
    model = cnn()
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    sg.apply(model, sg.Lossless(), batch=images())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())


# --- with run: ------------------------------------------------------------------------------------------------------


def test_a_block_applies_inside_and_leaves_no_trace_outside() -> None:
    model = cnn()
    with sg.apply(model, sg.Lossless()) as run:
        model(images()).sum().backward()
        assert run.active and hook_count(model) > 0
    assert not run.active and hook_count(model) == 0
    assert run.report().ratio > 1
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_block_extends_the_gate_over_a_loss_computed_outside() -> None:
    plain, treated, run = pair(nn.Linear(64, 64), [sg.Rule(sg.Need.VALUES, Halved()), sg.Rule("*", sg.Lossless())])
    x, target = torch.randn(128, 64), torch.randint(0, 64, (128,))
    exact = gradients(plain, lambda m: F.cross_entropy(m(x), target))
    for _ in range(3):
        treated.zero_grad()
        with run:
            loss = F.cross_entropy(treated(x), target)
        loss.backward()
        found = [p.grad for p in treated.parameters()]
        assert not same(exact, found)  # the log-softmax is kept in bfloat16
        assert all(torch.allclose(a, b, rtol=0.02, atol=1e-3) for a, b in zip(exact, found, strict=True))
    assert "<outside>" in {path for path, _ in run._gate.outside._learnt.calls}


def test_a_block_around_a_whole_training_loop_is_exact_under_lossless() -> None:
    plain, treated, run = pair(cnn())
    with run:
        for seed in range(4):
            loss = lambda m, s=seed: m(images(seed=s)).square().mean()  # noqa: E731
            assert same(gradients(plain, loss, seed=seed), gradients(treated, loss, seed=seed))


def test_a_block_that_holds_backward_too_says_that_the_loss_is_kept_as_it_is() -> None:
    model, x, target = nn.Linear(64, 64), torch.randn(128, 64), torch.randint(0, 64, (128,))
    run = sg.apply(model, sg.Quant(bits=4))
    with pytest.warns(sg.SlimgradWarning, match="End the block where the loss is computed"), run:
        F.cross_entropy(model(x), target).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        with run:
            F.cross_entropy(model(x), target).backward()


def test_backward_after_remove_still_works() -> None:
    plain, treated, run = pair(cnn())
    torch.manual_seed(0)
    loss = treated(images()).sum()
    run.remove()
    loss.backward()
    assert same(gradients(plain, lambda m: m(images())), [p.grad for p in treated.parameters()])


# --- no leaks -------------------------------------------------------------------------------------------------------


def live_tickets_and_tensors() -> int:
    """By type, not isinstance: some objects are proxies of things that are gone."""
    return sum(issubclass(type(thing), (Tensor, Held, Kept, Sealed)) for thing in gc.get_objects())


def test_a_forward_without_backward_frees_everything() -> None:
    _, treated, _ = pair(cnn())
    for _ in range(3):
        refs: list[StorageWeakRef] = []
        handle = treated[5].register_forward_pre_hook(
            lambda m, a, refs=refs: refs.append(StorageWeakRef(a[0].untyped_storage()))
        )
        output = treated(images())
        handle.remove()
        assert not refs[0].expired()
        del output
        assert all(ref.expired() for ref in refs)


def test_two_hundred_steps_leave_no_tickets_and_no_tensors_behind() -> None:
    _, treated, _ = pair(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 8)))
    x = torch.randn(64, 64)
    gc.disable()  # so that a reference cycle would show
    try:
        counts = []
        for step in range(200):
            treated(x).sum().backward()
            if step in (10, 199):
                counts.append(live_tickets_and_tensors())
    finally:
        gc.enable()
    assert counts[0] == counts[1]


def test_a_run_does_not_keep_its_model_alive_after_both_are_dropped() -> None:
    model = cnn()
    run = sg.apply(model, sg.Lossless())
    model(images()).sum().backward()
    ref = weakref.ref(model)
    del model, run
    gc.collect()
    assert ref() is None


@pytest.mark.gpu
def test_two_hundred_steps_on_the_gpu_hold_a_stable_number_of_bytes() -> None:
    model = cnn().cuda()
    run = sg.apply(model, sg.Lossless(), min_bytes=4096)
    figures = []
    for step in range(200):
        model(images().cuda()).sum().backward()
        if step in (10, 199):
            gc.collect()  # what other tests left in cycles is not ours
            figures.append(torch.cuda.memory_allocated())
    assert figures[0] == figures[1] and run.report().ratio > 2


@pytest.mark.gpu
def test_what_the_report_says_is_freed_is_freed_in_the_allocator() -> None:
    def kept(model: nn.Module) -> int:
        x = images(64).cuda()
        before = torch.cuda.memory_allocated()
        output = model(x).sum()
        allocated = torch.cuda.memory_allocated() - before
        output.backward()
        return allocated

    plain, treated, run = (m.cuda() if isinstance(m, nn.Module) else m for m in pair(cnn()))
    for _ in range(3):
        untouched, slim = kept(plain), kept(treated)
    report = run.report()
    freed = report.kept_before - report.kept_after
    assert report.ratio > 2
    assert abs((untouched - slim) - freed) <= 0.02 * freed + 32 * 512  # blocks of 512 bytes

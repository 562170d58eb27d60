"""The gate under everything users do to a model: each test compares with the untouched model, bit for bit."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import slimgrad as sg
from tests.codecs.halved import Halved
from tests.models import Projections, cnn, gradients, hook_count, images, pair, same


def test_every_step_gives_the_untouched_gradients_from_the_first_on() -> None:
    plain, treated, _ = pair(cnn())
    for seed in range(4):
        x = images(seed=seed)
        assert same(gradients(plain, lambda m: m(x), seed=seed), gradients(treated, lambda m: m(x), seed=seed))


def test_what_fake_tensors_call_a_view_and_real_ones_an_alias_is_recognised() -> None:
    """Attention in plain products, as dropout has it on a CPU, reshapes what it multiplies."""
    model, x = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.1, batch_first=True), torch.randn(4, 32, 64)
    run = sg.apply(model, sg.Quant(bits=4), batch=x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).sum().backward()
    first = run.report().kept_after
    model(x).sum().backward()
    assert run.report().kept_after == first


def test_batch_and_image_sizes_may_change_from_step_to_step() -> None:
    plain, treated, run = pair(nn.Sequential(*list(cnn())[:8]))
    seen = set()
    for seed, (batch, size) in enumerate([(4, 16), (3, 16), (1, 24), (4, 16), (2, 32)]):
        x = images(batch, seed=seed, size=size)
        assert same(gradients(plain, lambda m: m(x), seed=seed), gradients(treated, lambda m: m(x), seed=seed))
        seen.add(run.report().kept_before)
    assert len(seen) == 4  # the report follows the shape of the last step


def test_the_report_of_a_shape_seen_before_is_that_shapes_report() -> None:
    _, treated, run = pair(nn.Sequential(*list(cnn())[:8]))
    figures = []
    for batch in (4, 2, 4):
        gradients(treated, lambda m, n=batch: m(images(n)))
        figures.append(run.report().kept_after)
    assert figures[0] == figures[2] != figures[1]


def test_several_forwards_may_precede_one_backward() -> None:
    plain, treated, _ = pair(cnn())
    first, second = images(seed=1), images(2, seed=2)
    for seed in range(3):
        both = [gradients(m, lambda m: m(first).sum() * m(second).sum(), seed=seed) for m in (plain, treated)]
        assert same(*both)


def test_gradients_accumulate_over_micro_batches() -> None:
    plain, treated, _ = pair(cnn())
    for model in (plain, treated):
        torch.manual_seed(0)
        for seed in range(4):
            (model(images(seed=seed)).sum() / 4).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), treated.parameters(), strict=True))


def test_retain_graph_allows_a_second_backward() -> None:
    plain, treated, _ = pair(cnn())
    results = []
    for model in (plain, treated):
        for _ in range(2):
            torch.manual_seed(0)
            model.zero_grad()
            loss = model(images()).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert same(*results)


def test_channels_last_models_keep_their_gradients_and_their_layout() -> None:
    plain, treated, run = pair(cnn().to(memory_format=torch.channels_last))
    x = images().contiguous(memory_format=torch.channels_last)
    for seed in range(3):
        assert same(gradients(plain, lambda m: m(x), seed=seed), gradients(treated, lambda m: m(x), seed=seed))
    assert run.report().ratio > 2


@pytest.mark.parametrize("inplace", [False, True])
def test_nan_and_inf_activations_give_the_same_nan_gradients(inplace: bool) -> None:
    plain, treated, _ = pair(cnn(inplace=inplace))
    x = images()
    x[0, 0, 0, 0], x[1, 1, 1, 1], x[2, 2, 2, 2] = float("nan"), float("inf"), -float("inf")
    for seed in range(2):
        left, right = (gradients(m, lambda m: m(x), seed=seed) for m in (plain, treated))
        assert all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(left, right, strict=True))


def test_fp16_autocast_with_a_grad_scaler_gives_the_same_scaled_gradients() -> None:
    plain, treated, _ = pair(cnn())
    results = []
    for model in (plain, treated):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for seed in range(2):
            model.zero_grad()
            torch.manual_seed(seed)
            with torch.autocast("cpu", torch.float16):
                loss = model(images()).float().square().mean()
            scaler.scale(loss).backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert same(*results)


# --- modes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_graph_nothing_is_watched_or_kept(mode: type) -> None:
    _, treated, run = pair(cnn())
    with mode():
        treated(images())
    with pytest.raises(sg.SlimgradError, match="nothing to report yet"):
        run.report()
    assert hook_count(treated) == 2


def test_switching_between_train_and_eval_learns_each_mode() -> None:
    plain, treated, _ = pair(cnn())
    for seed in range(6):
        plain.train(seed % 2 == 0), treated.train(seed % 2 == 0)
        assert same(
            gradients(plain, lambda m: m(images(seed=seed)), seed=seed),
            gradients(treated, lambda m: m(images(seed=seed)), seed=seed),
        )


def test_unfreezing_a_layer_between_steps_is_noticed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU())
    model[2].requires_grad_(False)
    plain, treated, run = pair(model)
    for step in range(4):
        if step == 2:
            plain[2].requires_grad_(True), treated[2].requires_grad_(True)
        assert same(gradients(plain, lambda m: m(images())), gradients(treated, lambda m: m(images())))
    assert not any(site.site.path == "2" for site in run.report().sites)


# --- copies, threads, two models ------------------------------------------------------------------------------------


def test_a_deep_copy_is_an_untouched_model_that_can_be_treated_itself() -> None:
    plain, treated, _ = pair(cnn())
    gradients(treated, lambda m: m(images()))
    clone = copy.deepcopy(treated)
    expected = gradients(plain, lambda m: m(images()))
    assert same(expected, gradients(clone, lambda m: m(images())))
    run = sg.apply(clone, sg.Lossless())
    assert same(expected, gradients(clone, lambda m: m(images())))
    run.remove()
    assert hook_count(clone) == 0
    assert not any(m._forward_pre_hooks_with_kwargs or m._forward_hooks_always_called for m in clone.modules())


def test_a_treated_model_can_be_pickled() -> None:
    _, treated, _ = pair(cnn())
    gradients(treated, lambda m: m(images()))
    loaded = pickle.loads(pickle.dumps(treated))
    assert same(gradients(treated, lambda m: m(images())), gradients(loaded, lambda m: m(images())))


def test_two_treated_models_can_feed_each_other() -> None:
    generator, critic = nn.Sequential(nn.Linear(64, 768), nn.ReLU(), nn.Unflatten(1, (3, 16, 16))), cnn()
    z = torch.randn(8, 64)
    expected = gradients(nn.Sequential(generator, critic), lambda m: m(z))
    sg.apply(generator, sg.Lossless()), sg.apply(critic, sg.Lossless())
    for _ in range(3):
        critic.load_state_dict(cnn().state_dict())
        assert same(expected, gradients(nn.Sequential(generator, critic), lambda m: m(z)))


def test_a_treated_submodule_of_a_treated_model_is_refused() -> None:
    model = cnn()
    run = sg.apply(model[5], sg.Lossless())
    with pytest.raises(sg.SlimgradError, match="5 is already under a run"):
        sg.apply(model, sg.Lossless())
    run.remove()
    sg.apply(model, sg.Lossless()).remove()


def test_threads_may_share_a_treated_model() -> None:
    plain, treated, _ = pair(nn.Sequential(*[m for m in cnn() if not isinstance(m, (nn.Dropout, nn.BatchNorm2d))]))
    expected = [torch.autograd.grad(plain(images(n + 1)).sum(), list(plain.parameters())) for n in range(4)]
    found: dict[int, tuple[Tensor, ...]] = {}

    def work(number: int) -> None:
        for _ in range(5):
            loss = treated(images(number + 1)).sum()
            found[number] = torch.autograd.grad(loss, list(treated.parameters()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert all(same(list(expected[number]), list(found[number])) for number in range(4))


# --- checkpointing --------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.reentrant = reentrant
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._body, self.stem(x), use_reentrant=self.reentrant)

    def _body(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.body(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside_the_model_still_recomputes_and_keeps_only_its_inputs(reentrant: bool) -> None:
    plain, treated, run = pair(Checkpointed(reentrant=reentrant))
    for _ in range(3):
        assert same(gradients(plain, lambda m: m(images())), gradients(treated, lambda m: m(images())))
    assert treated.runs == plain.runs == 6
    profile = run._gate.last.structure.profile
    assert not any(site.path.startswith("body") for site in profile.sites)


def test_the_inputs_of_a_checkpoint_are_values_that_a_codec_may_pack() -> None:
    model = Checkpointed(reentrant=False)
    profile = sg.profile(model, images())
    boundary = [site for site in profile.sites if site.node == "checkpoint"]
    assert [site.need for site in boundary if site.bytes > 4096] == [sg.Need.VALUES]
    run = sg.apply(model, [sg.Rule(sg.Need.VALUES, Halved()), sg.Rule("*", sg.Lossless())])
    gradients(model, lambda m: m(images()))
    assert run.report().ratio > 1.5


def test_a_model_inside_a_checkpoint_is_left_alone() -> None:
    plain, treated, run = pair(cnn())
    for seed in range(2):
        left, right = (
            gradients(m, lambda m: checkpoint(m, images().requires_grad_(), use_reentrant=False), seed=seed)
            for m in (plain, treated)
        )
        assert same(left, right)
    with pytest.raises(sg.SlimgradError, match="nothing to report"):
        run.report()


# --- things that go wrong -------------------------------------------------------------------------------------------


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = cnn()
        self.error: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.net[:3](x)
        if self.error is not None:
            raise self.error("inside forward")
        return self.net[3:](y)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["first forward", "later forward"])
def test_an_exception_in_forward_leaves_a_model_that_works(error: type[BaseException], when: str) -> None:
    plain, treated, _ = pair(Fragile())
    if when == "later forward":
        gradients(treated, lambda m: m(images())), gradients(plain, lambda m: m(images()))
    treated.error = error
    with pytest.raises(error):
        treated(images())
    treated.error = None
    for seed in range(3):
        assert same(
            gradients(plain, lambda m: m(images()), seed=seed), gradients(treated, lambda m: m(images()), seed=seed)
        )
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_an_in_place_change_of_a_kept_tensor_is_reported_as_autograd_would() -> None:
    class Spoiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x)
            z = self.two(y)
            y.mul_(2)
            return z

    model = Spoiled()
    sg.apply(model, sg.Lossless())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(4, 8)).sum().backward()


def test_a_forward_that_takes_another_path_keeps_what_it_does_not_know_and_says_so_once() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deep = True

        def forward(self, x: Tensor) -> Tensor:
            if self.deep:
                x = F.gelu(x * 2)
            return F.max_pool2d(F.relu(x * 3), 2)

    plain, treated, _ = pair(Branching())
    x = images(8).requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(8):
            plain.deep = treated.deep = step % 4 < 2
            left, right = (torch.autograd.grad(m(x).square().sum(), x)[0] for m in (plain, treated))
            assert torch.equal(left, right)
    assert len([w for w in caught if w.category is sg.SlimgradWarning]) == 1


def test_a_site_whose_constants_changed_raises_instead_of_giving_a_wrong_gradient() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Hardtanh(-1.0, 1.0), nn.AvgPool2d(2))
    model[0].requires_grad_(False)
    x = images(8).requires_grad_()
    sg.apply(model, sg.Lossless())
    for _ in range(2):
        model(x).sum().backward()
    model[1].max_val = 0.5
    with pytest.raises(sg.SiteChangedError, match=r"1:HardtanhBackward0\.self.*Keep\(\)"):
        model(x).sum().backward()


def test_somebody_elses_hooks_around_the_model_are_respected_with_a_warning() -> None:
    plain, treated, run = pair(cnn())
    with pytest.warns(sg.SlimgradWarning, match="other saved-tensor hooks"), torch.autograd.graph.save_on_cpu():
        found = gradients(treated, lambda m: m(images()))
    assert same(gradients(plain, lambda m: m(images())), found)
    assert same(gradients(plain, lambda m: m(images())), gradients(treated, lambda m: m(images())))
    assert any("other saved-tensor hooks" in note for note in run.report().notes)


def test_functional_transforms_run_without_the_gate() -> None:
    plain, treated, _ = pair(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    x = torch.randn(32, 64)

    def loss(model: nn.Module) -> dict[str, Tensor]:
        return torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(
            dict(model.named_parameters())
        )

    left, right = loss(plain), loss(treated)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_compiled_model_gives_the_gradients_of_the_compiled_untouched_one() -> None:
    plain, treated, _ = pair(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    x = torch.randn(32, 64)
    left, right = (gradients(torch.compile(m, backend="aot_eager"), lambda m: m(x)) for m in (plain, treated))
    assert same(left, right)


def test_gradient_penalties_go_through_lossless_sites_exactly() -> None:
    plain, treated, _ = pair(cnn())
    results = []
    for model in (plain, treated):
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(0)
            x = images().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            slope.square().sum().backward()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert same(*results)


def test_gradient_penalties_through_a_lossy_site_are_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    sg.apply(model, [sg.Rule(nn.Linear, Halved())])
    x = torch.randn(64, 64, requires_grad=True)
    with pytest.raises(sg.DoubleBackwardError, match=r"2:AddmmBackward0\.mat1.*Keep\(\)"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


# --- sharing --------------------------------------------------------------------------------------------------------


def test_an_input_shared_by_three_projections_is_packed_once() -> None:
    model = Projections()
    run = sg.apply(model, [sg.Rule(nn.Linear, Halved())])
    for _ in range(2):
        model(torch.randn(128, 64)).sum().backward()
    sites = run.report().sites
    assert [site.site.path for site in sites] == ["q", "k", "v"]
    assert sum(site.after for site in sites) == 128 * 64 * 2


def test_a_storage_is_packed_only_if_every_saver_lets_go() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    run = sg.apply(model, sg.Lossless())
    model(images()).sum().backward()
    report = run.report()
    assert report.sites == () and report.kept_after == report.kept_before
    assert any("2:ConvolutionBackward0.input (OPERAND) keeps it" in reason for reason in report.reasons)
    run.remove()
    run = sg.apply(model, [sg.Rule(nn.Conv2d, Halved()), sg.Rule("*", sg.Lossless())])
    model(images()).sum().backward()
    assert {site.site.path for site in run.report().sites} == {"1", "2"}


def test_a_parameter_replaced_by_another_one_is_noticed() -> None:
    plain, treated, run = pair(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    x = torch.randn(32, 64)
    for step in range(4):
        if step == 2:
            fresh = torch.randn(64, 64)
            plain[1].weight, treated[1].weight = nn.Parameter(fresh.clone()), nn.Parameter(fresh.clone())
        with torch.autocast("cpu", torch.bfloat16):
            assert same(gradients(plain, lambda m: m(x)), gradients(treated, lambda m: m(x)))
    assert {site.site.slot for site in run.report().sites} == {"mat2"}


def test_the_autocast_copy_of_a_frozen_weight_is_made_again_too() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].requires_grad_(False)
    plain, treated, run = pair(model)
    x = torch.randn(32, 64)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            assert same(gradients(plain, lambda m: m(x)), gradients(treated, lambda m: m(x)))
    assert [(site.site.path, site.site.parameter, site.after) for site in run.report().sites] == [("1", "1.weight", 0)]


def test_a_module_replaced_by_another_one_is_noticed() -> None:
    """As when adapters are injected after `apply`."""
    plain, treated, run = pair(cnn())
    for step in range(4):
        if step == 2:
            layer = nn.Sequential(nn.Conv2d(16, 16, 1), nn.ReLU(), nn.AvgPool2d(1))
            plain[6], treated[6] = layer, copy.deepcopy(layer)
        assert same(gradients(plain, lambda m: m(images())), gradients(treated, lambda m: m(images())))
    assert {"6.1", "6.2"} <= {site.site.path for site in run.report().sites}
    run.remove()
    assert hook_count(treated) == 0


def test_a_frozen_prelu_is_packed_but_not_for_second_order() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.PReLU(), nn.AvgPool2d(2))
    model[1].requires_grad_(False)
    plain, treated, _ = pair(model)
    assert same(gradients(plain, lambda m: m(images())), gradients(treated, lambda m: m(images())))
    x = images().requires_grad_()
    with pytest.raises(sg.DoubleBackwardError, match=r"1:PreluKernelBackward0\.self"):
        torch.autograd.grad(treated(x).sum(), x, create_graph=True)


def test_two_masks_of_one_storage_with_other_bounds_are_not_taken_for_one() -> None:
    class Clamps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 16, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            return F.hardtanh(x, -1.0, 1.0) + F.hardtanh(x, -0.25, 0.5) + x.clamp(min=0.0)

    plain, treated, run = pair(Clamps())
    for _ in range(3):
        assert same(gradients(plain, lambda m: m(images(8))), gradients(treated, lambda m: m(images(8))))
    assert [site.after for site in run.report().sites] == [8 * 16 * 14 * 14 // 8] * 3


def test_storages_below_the_threshold_are_left_alone() -> None:
    _, treated, run = pair(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2)))
    gradients(treated, lambda m: m(images(1, size=8)))
    report = run.report()
    assert report.sites == () and any("smaller than 4096 bytes" in reason for reason in report.reasons)


def test_distributed_data_parallel_gives_the_same_gradients(tmp_path) -> None:
    plain, treated, run = pair(cnn())
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(treated)
        for seed in range(3):
            expected = gradients(plain, lambda m: m(images()), seed=seed)
            gradients(wrapped, lambda m: m(images()), seed=seed)
            assert same(expected, [p.grad for p in treated.parameters()])
    finally:
        # The wrapper first: if it is the last to hold the group, its end waits for gloo's threads with the GIL held,
        # and now and then they wait for the GIL.
        wrapped = None
        gc.collect()
        torch.distributed.destroy_process_group()
    assert run.report().ratio > 2


def test_the_threshold_can_be_set_and_must_be_a_number_of_bytes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2))
    run = sg.apply(model, sg.Lossless(), min_bytes=0)
    gradients(model, lambda m: m(images(1, size=8)))
    assert run.report().sites
    run.remove()
    with pytest.raises(sg.SpecError, match="min_bytes must be a number of bytes, 0 or more; found '1KiB'"):
        sg.apply(model, sg.Lossless(), min_bytes="1KiB")
    assert hook_count(model) == 0

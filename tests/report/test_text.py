from __future__ import annotations

from dataclasses import replace

from slimgrad.report.human import WIDTH
from slimgrad.spec import Profile, Report


def test_the_headline_says_how_much_is_kept_and_what_is_not_counted(profile: Profile) -> None:
    head = profile.table().split("\n\n")[0]
    assert "Net on cpu: autograd keeps 40.0 MiB in 3 storages" in head
    assert "inputs 2.0 MiB, parameters 1.0 MiB" in head
    assert "fake" not in head
    assert "allocator" not in head


def test_the_headline_says_when_tensors_were_fake_and_what_the_allocator_held(profile: Profile) -> None:
    table = replace(profile, meta={"fake": True, "allocated_bytes": 41 << 20}).table()
    assert "the model: autograd keeps" in table
    assert "fake tensors" in table
    assert "the allocator's own figure: 41.0 MiB" in table


def test_a_storage_kept_twice_has_one_row_led_by_its_strongest_need(profile: Profile) -> None:
    rows = [line for line in profile.table().splitlines() if "24.0 MiB" in line and "float32" in line]
    assert len(rows) == 1
    assert "60.0%  OPERAND  layer1.0.conv2 Convolution.input +1 saver  float32[32,64,56,56]  Relu" in rows[0]


def test_storages_come_by_falling_bytes_and_uncounted_ones_not_at_all(profile: Profile) -> None:
    table = profile.table()
    places = [table.index(name) for name in ("layer1.0.conv2 ", "layer1.0.bn1 ", "pool ")]
    assert places == sorted(places)
    assert "(model)" not in table


def test_totals_are_given_by_need_and_by_module_type(profile: Profile) -> None:
    totals = profile.table().split("\n\n")[-1]
    assert "by need" in totals
    assert "by module type" in totals
    assert "BatchNorm2d" in totals
    assert "█" in totals


def test_the_limit_leaves_a_line_for_the_rest(profile: Profile) -> None:
    table = profile.table(limit=1)
    assert "… and 2 more storages, with 16.0 MiB" in table
    assert "pool " not in table


def test_repeated_layers_share_a_row_when_there_are_too_many(long_profile: Profile) -> None:
    table = long_profile.table()
    assert "528.0 MiB     24  32.8%  WEIGHT      model.layers.*.mlp.gate_proj Mm.mat2" in table
    assert "more storages" not in table


def test_without_a_limit_every_storage_has_its_row(long_profile: Profile) -> None:
    table = long_profile.table(limit=None)
    assert sum("bfloat16[" in line for line in table.splitlines()) == len(long_profile.storages)
    assert "model.layers.23.mlp.gate_proj Mm.mat2" in table


def test_no_line_is_wider_than_the_page_nor_carries_colours(profile: Profile, long_profile: Profile) -> None:
    for table in (profile.table(), long_profile.table(), long_profile.table(limit=None)):
        assert max(map(len, table.splitlines())) <= WIDTH
        assert "\x1b" not in table


def test_a_profile_of_nothing_is_a_headline_alone() -> None:
    table = Profile(sites=(), storages=()).table()
    assert table == "the model: autograd keeps 0 B in 0 storages between forward and backward"


def test_a_report_says_what_was_kept_is_kept_and_was_promised(report: Report) -> None:
    assert str(report).splitlines()[0] == "kept 120.0 MiB -> 40.0 MiB (3.0x less), promised 39.0 MiB"


def test_a_report_lists_the_sites_that_saved_most_first(report: Report) -> None:
    text = str(report)
    assert text.index("layer1.0.relu Relu.result") < text.index("layer1.0.conv2 Convolution.input")
    assert "TopK(keep=0.1)" in text
    assert "Some of these sites share a storage" in text


def test_a_report_gives_reasons_and_notes_as_sentences(report: Report) -> None:
    text = str(report)
    assert "What did not shrink, and why:\n  - layer1.0.bn1 needs the VALUES" in text
    assert "Notes:\n  - The last step had a batch of 32." in text


def test_calls_of_one_slot_are_added_up(report: Report) -> None:
    first = report.sites[0]
    again = replace(first, site=replace(first.site, call=1, storage=9))
    text = str(replace(report, sites=(first, again)))
    assert "46.0 MiB  48.0 MiB  2.0 MiB   2.0 MiB  layer1.0.relu Relu.result (x2)" in text
    assert "share a storage" not in text


def test_a_long_report_stops_after_twenty_sites(report: Report) -> None:
    first = report.sites[0]
    sites = tuple(replace(first, site=replace(first.site, path=f"layer{i}", storage=i)) for i in range(25))
    text = str(replace(report, sites=sites, reasons=(), notes=()))
    assert "… and 5 more sites, saving 115.0 MiB" in text
    assert "Notes" not in text
    assert "why" not in text


def test_no_module_name_is_taken_for_markup(profile: Profile, report: Report) -> None:
    """rich would raise on the first of them, and leave out the second or draw the third."""
    for name in ("blocks[/b]", "x[red]", ":smile:"):
        sites = tuple(replace(site, path=name) for site in profile.sites)
        assert name in replace(profile, sites=sites).table()
        treated = tuple(replace(each, site=replace(each.site, path=name)) for each in report.sites)
        assert name in str(replace(report, sites=treated, reasons=(), notes=()))


def test_a_long_codec_is_cut_at_its_end_for_what_tells_it_apart_comes_first(report: Report) -> None:
    codec = "Quant(bits=4, group=128, rounding='nearest', seed=0)"
    told = str(replace(report, sites=(replace(report.sites[0], codec=codec),)))
    assert "Quant(bits=4, group=128, …" in told


def test_a_report_on_no_treated_site_says_so(report: Report) -> None:
    assert "No site was packed." in str(replace(report, sites=()))

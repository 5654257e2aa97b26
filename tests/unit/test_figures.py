"""Pictures of profiles: they show the profile's data, and name its kind and machine."""

from __future__ import annotations

import pytest
from planning import key_of, profile_of

from coarse.machine.catalogue import load_machine
from coarse.machine.partition_table import PartitionTable
from coarse.machine.wiring import link_table
from coarse.profiler.alpha_beta import AlphaBeta
from coarse.profiler.curve import Curve, CurvePoint
from coarse.profiler.figures import (
    Transfer,
    busy_fraction,
    describe,
    draw_bandwidth_matrix,
    draw_by_size,
    draw_crossings,
    draw_normalised,
    draw_timeline,
    format_size,
    save_figure,
    widest_remote,
)
from coarse.profiler.linked import profile_from_links
from coarse.profiler.profile import EMULATED
from coarse.profiler.routing import plan_routing

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def machine_profile(name):
    table = PartitionTable.load(name)
    local_devices = [table.local_device(worker) for worker in range(table.num_workers)]
    return profile_from_links(link_table(load_machine(name), table), local_devices)


def texts(axes):
    return [text.get_text() for text in axes.texts]


def labels(axes):
    return [line.get_label() for line in axes.get_lines()]


def carry(link, tensor, start_us, end_us):
    return Transfer(link=link, tensor=tensor, nbytes=1000, start_us=start_us, end_us=end_us)


# ---- Figure 8 ----


def test_the_matrix_shows_both_directions_in_sum_and_marks_local_pairs():
    figure = draw_bandwidth_matrix(machine_profile("aws-p3"))
    cells = texts(figure.axes[0])
    assert len(cells) == 4 * 4
    assert cells[0] == "8.99\nlocal"
    assert cells[1] == "16"
    assert [cell.endswith("local") for cell in cells] == [i % 5 == 0 for i in range(16)]
    assert figure.axes[0].get_ylabel() == "worker"
    assert figure.axes[1].get_ylabel() == "GB/s, both directions"


@pytest.mark.parametrize("kind", ["measured", "emulated", "simulated"])
def test_titles_name_machine_and_kind(kind):
    profile = profile_of(kind=kind)
    assert describe(profile) == f"host, 2 workers, 2 memory devices ({kind})"
    for figure in (draw_bandwidth_matrix(profile), draw_by_size(profile)):
        assert describe(profile) in figure.get_suptitle()
    column = draw_normalised([profile], plan_routing(profile)[:1]).axes[0]
    assert column.get_title() == f"host ({kind})"


# ---- Figures 14 and 15 ----


def test_local_and_remote_are_marked_and_others_grey():
    profile = machine_profile("aws-p3")
    figure = draw_by_size(profile, worker=1, kinds=("both",))
    named = [label for label in labels(figure.axes[0]) if not label.startswith("_")]
    assert named == ["md0 (remote)", "md1 (local)"]
    assert len(figure.axes[0].get_lines()) == 4
    assert figure.axes[0].get_xscale() == "log"


def test_threshold_and_shard_size_are_lines():
    profile = profile_of(local=(5, 10), remote=(20, 40))
    table = plan_routing(profile)[0]
    figure = draw_by_size(profile, table=table, shard_bytes=2 << 20, kinds=("push", "both"))
    for axes in figure.axes:
        threshold, shard = axes.get_lines()[-2:]
        assert threshold.get_label() == f"S = {format_size(table.threshold_bytes)}"
        assert threshold.get_xdata()[0] == table.threshold_bytes
        assert shard.get_label() == "S' = 2 MiB"
        assert shard.get_xdata()[0] == 2 << 20


def test_one_proxy_for_all_sizes_has_no_threshold():
    profile = machine_profile("sdsc-p100")
    figure = draw_by_size(profile, table=plan_routing(profile)[0])
    assert not any(label.startswith("S ") for axes in figure.axes for label in labels(axes))


def test_the_local_device_is_the_unit():
    profile = profile_of(local=(5, 10), remote=(20, 40))
    figure = draw_normalised([profile], plan_routing(profile)[:1])
    time, bandwidth = figure.axes
    for axes in (time, bandwidth):
        local, remote = axes.get_lines()[:2]
        assert set(local.get_ydata()) == {1.0}
        assert axes.get_ylim()[0] == 0
        assert axes.get_ylim()[1] > max(remote.get_ydata())
    # 4 KiB are latency, 64 MiB bandwidth.
    smallest, largest = (time.get_lines()[1].get_ydata()[i] for i in (0, -1))
    assert smallest == pytest.approx((20 + 4.096 / 40) / (5 + 4.096 / 10))
    assert largest == pytest.approx(10 / 40, rel=0.02)
    assert bandwidth.get_lines()[1].get_ydata()[0] == pytest.approx(1 / smallest)


def test_without_a_remote_device_there_is_nothing_to_compare():
    profile = profile_of(key_of(local_devices=(0, 0), num_devices=1))
    assert widest_remote(profile, 0) is None
    with pytest.raises(ValueError, match="worker 0 has no remote memory device"):
        draw_normalised([profile], plan_routing(profile)[:1])


def test_of_equally_wide_remote_devices_the_nearest_counts():
    """On aws-p3 all remote ones carry 16 GB/s, and only the first is under the same socket."""
    profile = machine_profile("aws-p3")
    assert [widest_remote(profile, worker) for worker in range(4)] == [1, 0, 3, 2]


# ---- Figure 9 ----


def test_crossings_have_measured_points_on_predicted_lines():
    models = {
        "near": AlphaBeta(alpha_us=1, beta_gbytes_per_s=1),
        "wide": AlphaBeta(alpha_us=5, beta_gbytes_per_s=9),
    }
    points = {
        name: Curve(points=tuple(CurvePoint(nbytes=n, time_us=model.time_us(n) + 1) for n in (4096, 8192)))
        for name, model in models.items()
    }
    figure = draw_crossings(points, models, whereof="there (emulated)")
    (axes,) = figure.axes
    assert "there (emulated)" in figure.get_suptitle()
    lines = axes.get_lines()
    for name, line, marks in zip(models, lines[::2], lines[1::2], strict=True):
        assert marks.get_label() == name
        assert list(marks.get_ydata() - line.get_ydata()) == pytest.approx([1, 1])


def test_a_timeline_has_a_row_for_each_link_and_a_bar_for_each_shard():
    timelines = {
        "whole": [carry("w0 > md0", 0, 0, 2000), carry("md0 > w0", 0, 2000, 4000)],
        "shards": [carry("w0 > md0", 0, 0, 1000), carry("w0 > md0", 1, 1000, 2000)],
    }
    figure = draw_timeline(timelines, machine="aws-p3", kind=EMULATED)
    whole, shards = figure.axes
    assert "aws-p3 (emulated)" in figure.get_suptitle()
    assert [tick.get_text() for tick in whole.get_yticklabels()] == ["w0 > md0", "md0 > w0"]
    assert [tick.get_text() for tick in shards.get_yticklabels()] == ["w0 > md0"]
    assert [(bar.get_x(), bar.get_width()) for bar in shards.patches] == [(0, 1), (1, 1)]
    assert shards.patches[0].get_facecolor() != shards.patches[1].get_facecolor()
    assert texts(shards) == ["0", "1"]
    assert whole.get_title(loc="left") == "whole: 4 ms"
    assert whole.get_xlim() == shards.get_xlim()


def test_a_timeline_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one transfer"):
        draw_timeline({"empty": []}, machine="aws-p3", kind=EMULATED)
    with pytest.raises(ValueError, match="kind 'guessed'"):
        draw_timeline({"one": [carry("w0 > md0", 0, 0, 1)]}, machine="aws-p3", kind="guessed")
    with pytest.raises(ValueError, match="ends after it starts"):
        carry("w0 > md0", 0, 2, 1)


def test_a_link_is_busy_while_any_shard_is_on_it():
    transfers = [
        carry("push", 0, 0, 40),
        carry("push", 1, 20, 60),  # two at once count once
        carry("push", 2, 90, 100),
        carry("pull", 0, 50, 75),
    ]
    assert busy_fraction(transfers) == pytest.approx({"push": 0.7, "pull": 0.25})
    assert busy_fraction([]) == {}


# ---- files ----


def test_the_same_figure_gives_the_same_png_and_svg(tmp_path):
    files = [save_figure(draw_by_size(profile_of()), tmp_path / run / "by.size") for run in ("a", "b")]
    for first, second in zip(*files, strict=True):
        assert first.read_bytes() == second.read_bytes()
    png, svg = files[0]
    assert png.name == "by.size.png"
    assert png.read_bytes().startswith(PNG_SIGNATURE)
    assert "md0 (local)" in svg.read_text()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(1, "1 B"), (4096, "4 KiB"), (1.5 * 2**20, "1.5 MiB"), (102858, "100 KiB"), (1 << 30, "1 GiB")],
)
def test_sizes_read_as_people_write_them(nbytes, text):
    assert format_size(nbytes) == text

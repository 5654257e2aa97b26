"""The simulator's pages: their examples work as printed, their links lead to what they name."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from small_jobs import ELEMENTS, small_setup

from coarse.simulator import setup
from coarse.simulator.events.engine import simulate
from coarse.simulator.machines import generated
from coarse.simulator.training_step import simulate_step

PAGES = Path(__file__).parents[2] / "docs" / "simulator"
NBYTES = 4 * sum(ELEMENTS)


def blocks(page, language):
    """The code of a page's blocks of one language, without their indentation."""
    text = (PAGES / page).read_text()
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text, flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for _, code in found]


def names_of(code):
    names = {}
    exec(compile(code, "<page>", "exec", dont_inherit=True), names)
    return names


def test_the_machine_of_the_page_simulates_a_step(tmp_path):
    (toml,) = blocks("add-a-machine.md", "toml")
    file = tmp_path / "two-switches.toml"
    file.write_text(toml)
    result = simulate_step(small_setup(str(file), num_workers=2), "coarse")
    assert result.step_s > result.compute_s
    assert result.links["switch 0 uplink up"].nbytes == result.links["switch 1 uplink up"].nbytes > 0


def test_the_generated_machine_of_the_page_simulates_a_step(monkeypatch):
    (code,) = blocks("add-a-machine.md", "python")
    kinds = {**generated.KINDS, "slow-pool": names_of(code)["SLOW_POOL"]}
    monkeypatch.setattr(generated, "KINDS", kinds)
    monkeypatch.setattr(setup, "KINDS", kinds)
    slow, fast = (simulate_step(small_setup(kind), "offload") for kind in ("slow-pool", "cxl-pool"))
    assert slow.step_s > fast.step_s > fast.compute_s


@pytest.mark.parametrize("num_workers", [4, 8])
def test_the_scheme_of_the_page_moves_each_workers_bytes_once_each_way(num_workers):
    (code,) = blocks("add-a-scheme.md", "python")
    step = names_of(code)["central_step"](small_setup(num_workers=num_workers).job())
    outcome = simulate(step.tasks, step.network.capacities, channels=step.channels)
    for way in ("up", "down"):
        assert outcome.bucket_bytes[f"md0 {way}"] == pytest.approx(num_workers * NBYTES)
        assert outcome.bucket_bytes[f"md1 {way}"] == 0
        assert outcome.bucket_bytes[f"worker 3 {way}"] == pytest.approx(NBYTES)
    assert step.memory.device_bytes == NBYTES


def test_the_protocol_of_the_page_is_consistent_and_its_planted_error_is_not(capsys):
    names = names_of("\n".join(blocks("add-a-protocol.md", "python")))
    assert names["violations"] == 0
    assert names["found"] > 0
    assert names["outcome"].ns > 0
    assert "accesses to memory" in capsys.readouterr().out


LINKING = [PAGES.parent / "simulator.md", *sorted(PAGES.glob("*.md"))]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert not [target for target in targets if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_files_have_the_names_that_links_say_they_have(page):
    named = re.findall(r"`(\w+)` (?:in|of) \[[^]]+\]\(([^)#:]+)\)", page.read_text())
    assert not [(name, file) for name, file in named if name not in (page.parent / file).read_text()]


@pytest.mark.parametrize("page", ["carve.md", "distributed-gpus.md", "gpu-networking.md", "mgcc.md"])
def test_mechanisms_of_the_runtime_link_code_tests_and_simulation(page):
    text = (PAGES / page).read_text()
    for folder in ("coarse", "tests", "coarse/simulator/studies"):
        assert f"](../../{folder}/" in text

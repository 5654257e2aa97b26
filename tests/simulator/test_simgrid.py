"""The engine and SimGrid agree within 2% where both model plain max-min sharing."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest

from coarse.simulator.events.engine import simulate
from coarse.simulator.events.tasks import Task

PYTHON = "/usr/bin/python3"  # Debian's, for which python3-simgrid is built
SCRIPT = Path(__file__).with_name("simgrid_flows.py")
LATENCY_S = 1e-5
MIB = 1 << 20


def has_simgrid():
    try:
        return not subprocess.run(
            [PYTHON, "-c", "import simgrid"], capture_output=True, timeout=60
        ).returncode
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not has_simgrid(), reason="needs SimGrid: apt install python3-simgrid")


def flow(name, nbytes, *links, ready_s=0.0):
    return {"name": name, "nbytes": nbytes, "links": list(links), "ready_s": ready_s}


def ring(num=8):
    """Each end sends to the next; every second link is slower."""
    links = {f"up{end}": 10e9 / (1 + end % 2) for end in range(num)} | {
        f"down{end}": 10e9 for end in range(num)
    }
    return links, [flow(f"f{end}", 64 * MIB, f"up{end}", f"down{(end + 1) % num}") for end in range(num)]


def all_to_all(num=6):
    """Each end sends to all others, end 0 over a slower lane."""
    links = {f"{way}{end}": 12e9 if end else 5e9 for end in range(num) for way in ("up", "down")}
    pairs = [(one, other) for one in range(num) for other in range(num) if one != other]
    return links, [flow(f"f{one}-{other}", 8 * MIB, f"up{one}", f"down{other}") for one, other in pairs]


def incast(num=16):
    links = {f"up{end}": 10e9 for end in range(num)} | {"down": 12e9}
    return links, [flow(f"f{end}", 16 * MIB, f"up{end}", "down", ready_s=end * 1e-3) for end in range(num)]


def shared_uplinks(num=8):
    """Two switches; half of the flows cross an uplink with a quarter of the lanes' bandwidth."""
    links = {f"up{end}": 10e9 for end in range(num)} | {f"down{end}": 10e9 for end in range(num)}
    links |= {"uplink": 10e9, "downlink": 10e9}
    flows = []
    for end in range(num):
        target = (end + (1 if end % 2 else num // 2)) % num
        crossing = () if end // 4 == target // 4 else ("uplink", "downlink")
        flows.append(flow(f"f{end}", (end + 1) * 8 * MIB, f"up{end}", *crossing, f"down{target}"))
    return links, flows


def mixed_sizes(num=40):
    chance = random.Random(7)
    links = {f"l{link}": chance.uniform(1e9, 20e9) for link in range(10)}
    return links, [
        flow(
            f"f{number}",
            1 << chance.randint(16, 28),
            *chance.sample(sorted(links), chance.randint(1, 4)),
            ready_s=chance.uniform(0, 0.05),
        )
        for number in range(num)
    ]


def under_simgrid(links, flows):
    asked = json.dumps({"links": links, "flows": flows, "latency_s": LATENCY_S})
    done = subprocess.run(
        [PYTHON, str(SCRIPT)], input=asked, capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout)


def under_engine(links, flows):
    tasks = [
        Task(
            name=each["name"],
            ready_s=each["ready_s"],
            nbytes=each["nbytes"],
            usage=tuple((link, 1.0) for link in each["links"]),
            latency_s=LATENCY_S,
        )
        for each in flows
    ]
    return {name: times.finished_s for name, times in simulate(tasks, links).times.items()}


@pytest.mark.parametrize("pattern", [ring, all_to_all, incast, shared_uplinks, mixed_sizes])
def test_agrees_with_simgrid(pattern):
    links, flows = pattern()
    theirs, ours = under_simgrid(links, flows), under_engine(links, flows)
    assert ours.keys() == theirs.keys()
    for each in flows:
        name, ready_s = each["name"], each["ready_s"]
        assert ours[name] - ready_s == pytest.approx(theirs[name] - ready_s, rel=0.02), name

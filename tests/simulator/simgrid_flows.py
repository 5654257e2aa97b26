"""Runs flows under SimGrid; not a test: /usr/bin/python3 runs it, which has Debian's python3-simgrid.

Standard input is JSON: `links` (bytes per second by name), `latency_s` of every flow, and `flows`, each with `name`,
`ready_s`, `nbytes` and `links`. Standard output is JSON: the end of each flow in seconds, by its name.
"""

import json
import sys

from simgrid import Actor, Comm, Engine, Host, LinkInRoute, NetZone, this_actor

# Plain max-min: no correction of bandwidth or latency, no preference of links, no window, no cross traffic.
PLAIN = (
    "network/model:CM02",
    "network/bandwidth-factor:1",
    "network/latency-factor:1",
    "network/weight-S:0",
    "network/TCP-gamma:0",
    "network/crosstraffic:0",
    "network/optim:Full",
)


def main() -> None:
    asked = json.load(sys.stdin)
    engine = Engine(["flows", *(f"--cfg={option}" for option in PLAIN), "--log=root.thres:error"])
    zone = NetZone.create_full_zone("zone")
    links = {name: zone.create_link(name, rate).seal() for name, rate in asked["links"].items()}
    ends: dict[str, float] = {}
    actors = []
    for flow in asked["flows"]:
        name = flow["name"]
        source, target = (zone.create_host(f"{name} {end}", 1e9).seal() for end in ("source", "target"))
        # A link of its own gives each flow the same latency, and takes no part in the sharing.
        own = zone.create_link(f"{name} latency", 1e18).set_latency(asked["latency_s"]).seal()
        route = [LinkInRoute(link) for link in (own, *(links[link] for link in flow["links"]))]
        zone.add_route(source.netpoint, target.netpoint, None, None, route, False)
        actors.append((name, source, send, flow, source, target, ends))
    zone.seal()
    for actor in actors:
        Actor.create(*actor)
    engine.run()
    json.dump(ends, sys.stdout)


def send(flow: dict, source: Host, target: Host, ends: dict) -> None:
    this_actor.sleep_until(flow["ready_s"])
    Comm.sendto_async(source, target, flow["nbytes"]).wait()
    ends[flow["name"]] = Engine.clock


if __name__ == "__main__":
    main()

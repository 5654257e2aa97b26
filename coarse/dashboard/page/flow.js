/* Workers at the left, memory devices at the right, and the links between them as wide as their traffic. */

import { keep, say, set, svg } from "./dom.js";
import * as format from "./format.js";

const MOST_HEIGHT = 720;
const PITCH = { most: 52, least: 12 };
const FULL = 0.9;
const MOST_LABELS = 12;
const FEW = 4; // labels of more links that cross would cover each other
const WIDEST = 11;
const RATE_ABOVE = 13;
const OTHER_NODES = "other nodes";

let selected = "";

export function drawFlow(figure, detail, sample) {
  const layout = place(figure, sample);
  const [links, rates, nodes] = layers(figure);
  const most = Math.max(1, ...sample.links.map((link) => link.bytes_per_s));
  const drawn = sample.links.filter((link) => layout.has(link.source) && layout.has(link.target));
  keep(links, drawn, keyOf, () => svg("path"), (path, link) => drawLink(path, link, layout, most));
  const hasRoom = (link) => link.target !== OTHER_NODES;
  const isPlain = (link) => layout.get(link.source).y === layout.get(link.target).y || drawn.length <= FEW;
  const labelled = drawn.filter((link) => isSelected(link) || (drawn.length <= MOST_LABELS && hasRoom(link) && isPlain(link)));
  keep(rates, labelled, keyOf, () => svg("text"), (text, link) => drawRate(text, link, layout));
  keep(nodes, [...layout.values()], (node) => node.name, (node) => makeNode(node, figure, detail), drawNode);
  if (selected && !layout.has(selected)) selected = "";
  showSelected(figure, detail, sample);
}

const keyOf = (link) => `${link.source} ${link.target}`;
const isSelected = (link) => link.source === selected || link.target === selected;

/** Nodes with their places, by name. */
function place(figure, sample) {
  const width = figure.clientWidth || 860;
  const rows = Math.max(sample.workers.length, sample.devices.length, 1);
  const pitch = Math.max(PITCH.least, Math.min(PITCH.most, MOST_HEIGHT / rows));
  const height = rows * pitch + 8;
  set(figure, { viewBox: `0 0 ${width} ${height}`, height });
  const hasOthers = sample.links.some((link) => link.target === OTHER_NODES);
  const box = { width: Math.min(230, width * 0.27), height: Math.max(10, Math.min(40, pitch - 4)), size: Math.min(14, pitch - 2) };
  const right = width - box.width - (hasOthers ? 130 : 1);
  const nodes = new Map();
  const column = (items, x, describe) => {
    const space = (rows * pitch) / Math.max(1, items.length);
    items.forEach((item, index) => {
      const node = { ...box, x, y: 4 + (index + 0.5) * space - box.height / 2, ...describe(item) };
      nodes.set(node.name, node);
    });
  };
  column(sample.workers, 1, (worker) => describeWorker(worker, sample));
  column(sample.devices, right, describeDevice);
  if (hasOthers) column([OTHER_NODES], width - 110, () => ({ name: OTHER_NODES, width: 108, text: OTHER_NODES, minor: "", state: "trains", busy: 0, about: OTHER_NODES }));
  return nodes;
}

function describeWorker(worker, sample) {
  const name = `worker ${worker.rank}`;
  const blocked = worker.step_s ? worker.blocked_s / worker.step_s : 0;
  return {
    name,
    text: name,
    minor: worker.state === "trains" ? `step ${worker.step}` : worker.state === "waits" ? `waits ${Math.round(worker.waits_s)} s` : worker.state === "silent" ? "no answer" : "starts",
    state: worker.state + (worker.rank === sample.slowest ? " slowest" : ""),
    busy: 0,
    about: `${name}${format.process(worker.pid)}, step ${worker.step}, ${format.percent(blocked)} of a step blocked; ${worker.doing}`,
  };
}

function describeDevice(device) {
  const name = format.deviceName(device);
  const memory = device.memory ? ` in ${device.memory}` : "";
  const node = device.node ? `${format.shortened(device.node)}, ` : "";
  const serves = device.serves.length ? `, serves workers ${device.serves.join(", ")}` : "";
  return {
    name,
    text: `md${device.number}`,
    minor: device.is_silent ? "no answer" : `${node}${format.percent(device.busy)} busy`,
    state: device.is_silent ? "silent" : "trains",
    busy: device.busy,
    about: `${name}${memory}${format.process(device.pid)}${serves}; sync cores ${format.percent(device.busy)} busy, ${device.queue_shards} shards in queues`,
  };
}

function layers(figure) {
  if (!figure.children.length) figure.append(svg("g"), svg("g"), svg("g"));
  return figure.children;
}

function ends(link, layout) {
  const from = layout.get(link.source);
  const to = layout.get(link.target);
  return { x1: from.x + from.width, y1: from.y + from.height / 2, x2: to.x, y2: to.y + to.height / 2 };
}

function drawLink(path, link, layout, most) {
  const { x1, y1, x2, y2 } = ends(link, layout);
  const middle = (x1 + x2) / 2;
  const use = link.limit_bytes_per_s ? link.bytes_per_s / link.limit_bytes_per_s : 0;
  const kinds = ["link", link.bytes_per_s ? "" : "idle", use >= FULL ? "full" : "", isSelected(link) ? "selected" : ""];
  const room = layout.get(link.source).height;
  set(path, {
    class: kinds.filter(Boolean).join(" "),
    d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`,
    "stroke-width": 1 + Math.min(WIDEST, room - 2) * (link.bytes_per_s / most),
  });
}

function drawRate(text, link, layout) {
  const { x1, y1, x2, y2 } = ends(link, layout);
  const crosses = y1 !== y2;
  const at = crosses ? 0.3 : 0.5; // labels of crossing links would meet in the middle
  const bend = at * at * (3 - 2 * at);
  set(text, { class: `rate ${isSelected(link) ? "selected" : ""}`, x: x1 + at * (x2 - x1), y: y1 + bend * (y2 - y1) - RATE_ABOVE });
  say(text, carried(link));
}

function carried(link) {
  const limit = link.limit_bytes_per_s ? ` of ${format.rate(link.limit_bytes_per_s)}` : "";
  return `${format.rate(link.bytes_per_s)}${limit}`;
}

function makeNode(node, figure, detail) {
  const group = svg("g", { tabindex: "-1", role: "img" });
  group.append(svg("rect", { class: "box", rx: 4 }), svg("rect", { class: "busy", rx: 4 }), svg("rect", { class: "mark", rx: 2 }));
  group.append(svg("text"), svg("text", { class: "minor", "text-anchor": "end" }));
  const select = (name) => {
    selected = name;
    figure.dispatchEvent(new CustomEvent("select"));
  };
  group.addEventListener("focus", () => select(node.name));
  group.addEventListener("blur", () => select(""));
  group.addEventListener("pointerenter", () => select(node.name));
  group.addEventListener("pointerleave", () => select(""));
  group.addEventListener("keydown", (event) => move(event, group));
  return group;
}

function drawNode(group, node, index) {
  const [box, busy, mark, text, minor] = group.children;
  const isFocusable = group.parentNode?.querySelector('[tabindex="0"]') ?? null;
  if (isFocusable === null && index === 0) group.setAttribute("tabindex", "0");
  set(group, { class: `node ${node.state}`, transform: `translate(${node.x} ${node.y})`, "aria-label": node.about });
  set(box, { width: node.width, height: node.height });
  set(busy, { width: node.width * node.busy, height: node.height });
  set(mark, { width: 4, height: node.height });
  set(text, { x: 12, y: node.height / 2, "font-size": node.size });
  set(minor, { x: node.width - 8, y: node.height / 2, "font-size": Math.min(12, node.size) });
  say(text, node.text);
  say(minor, node.minor);
}

/** Arrow keys move the focus: up and down within a column, left and right between columns. */
function move(event, group) {
  const all = [...group.parentNode.children];
  const left = (each) => Number(/translate\(([\d.]+)/.exec(each.getAttribute("transform"))[1]);
  const own = all.filter((each) => left(each) === left(group));
  const place = own.indexOf(group);
  const others = all.filter((each) => (event.key === "ArrowRight" ? left(each) > left(group) : left(each) < left(group)));
  const next = {
    ArrowDown: own[place + 1],
    ArrowUp: own[place - 1],
    ArrowRight: others[Math.min(place, others.length - 1)],
    ArrowLeft: others[Math.min(place, others.length - 1)],
    Home: all[0],
    End: all[all.length - 1],
  }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  group.setAttribute("tabindex", "-1");
  next.setAttribute("tabindex", "0");
  next.focus();
}

function showSelected(figure, detail, sample) {
  figure.classList.toggle("selecting", selected !== "");
  const node = [...figure.children[2].children].find((each) => each.dataset.key === selected);
  if (node === undefined) {
    say(detail, "");
    return;
  }
  const links = sample.links.filter(isSelected).filter((link) => link.bytes_per_s);
  const said = links.map((link) => `${link.source} to ${link.target}: ${carried(link)}`);
  say(detail, [node.getAttribute("aria-label"), ...said.slice(0, 8), said.length > 8 ? `and ${said.length - 8} more links` : ""].filter(Boolean).join(". "));
}

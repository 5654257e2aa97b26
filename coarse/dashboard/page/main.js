/* Fetches samples from the server that has sent this page, and draws the newest one or the one that is chosen. */

import { drawBars, drawLegend } from "./bars.js";
import { drawChart } from "./charts.js";
import { html, keep, say } from "./dom.js";
import { drawFlow } from "./flow.js";
import * as format from "./format.js";

const INTERVAL_MS = 1000;
const MOST_SAMPLES = 1200;
const MOST_EVENTS = 500;
const PHASES = { awaited: "starting", runs: "running", over: "ended" };
const PARTS = [["compute", "compute"], ["optimizer", "optimizer"], ["blocked", "blocked: waits for others"]];
const USES = ["private", "gradients", "parameters", "states", "copies", "snapshots", "other"];
const CAUSES = { results: "results", all_reduce: "an all-reduce", queue: "room in a queue", probe: "measuring links", request: "answers of memory devices" };

const at = (id) => document.getElementById(id);
let samples = [];
let events = []; // with the numbers of their samples, and ids
let chosen = Infinity; // number of the shown sample; Infinity for the newest
let isLive = true;
let isLost = false;

async function poll() {
  try {
    if (samples.length > MOST_SAMPLES) samples = events = [];
    const last = samples.length ? samples[samples.length - 1].number : 0;
    const answer = await fetch(`samples?after=${last}`);
    if (!answer.ok) throw new Error(answer.statusText);
    const found = await answer.json();
    samples = [...samples, ...found.samples];
    events = [...events, ...found.events];
    isLive = found.is_live;
    isLost = false;
  } catch {
    isLost = true;
  }
  const isOver = isLost && newest()?.phase === "over";
  if (isLive && !isOver) setTimeout(poll, INTERVAL_MS);
  draw();
}

const newest = () => samples[samples.length - 1];

/** Place of the chosen sample, or of the one before it if the server has dropped it. */
function placeShown() {
  const later = samples.findIndex((sample) => sample.number > chosen);
  return later < 0 ? samples.length - 1 : Math.max(0, later - 1);
}

function draw() {
  const shown = placeShown();
  if (shown < 0) {
    drawNotice();
    return;
  }
  const sample = withWorkers(shown);
  drawHead(sample, shown);
  drawNotice();
  drawFigures(sample);
  drawFlow(at("flow"), at("flow-detail"), sample);
  drawLinks(sample);
  drawSteps(sample);
  drawHistory(shown);
  drawDevices(sample);
  drawMemory(sample);
  drawCheckpoints(sample.checkpoints);
  drawRoutes(sample);
  drawEvents(shown);
}

/** The sample at a place; without processes, with those that were last seen. */
function withWorkers(place) {
  const sample = samples[place];
  if (sample.workers.length || sample.phase !== "over") return sample;
  const before = samples.slice(0, place).reverse().find((each) => each.workers.length);
  if (before === undefined) return sample;
  const { number, time_s, phase, checkpoints } = sample;
  const links = before.links.map((link) => ({ ...link, bytes_per_s: 0 }));
  return { ...before, number, time_s, phase, checkpoints, links };
}

function drawHead(sample, shown) {
  say(at("program"), sample.program || "COARSE");
  const parts = [sample.job ? `job ${sample.job}` : "", sample.machine ? `emulates ${sample.machine}` : ""];
  say(at("job"), parts.filter(Boolean).join(", "));
  document.title = `${sample.program || "COARSE"}: step ${sample.step}`;
  const phase = at("phase");
  phase.className = `pill ${isLost && newest().phase !== "over" ? "lost" : sample.phase}`;
  say(phase, isLive ? PHASES[sample.phase] : `recorded, ${PHASES[sample.phase]}`);
  const slider = at("moment");
  slider.max = samples.length - 1;
  slider.value = shown;
  slider.setAttribute("aria-valuetext", format.clock(sample.time_s));
  say(at("moment-text"), format.clock(sample.time_s));
  at("live").setAttribute("aria-pressed", String(chosen === Infinity));
  say(at("live"), isLive ? "Live" : "Newest");
}

function drawNotice() {
  const last = newest();
  const isOver = last?.phase === "over";
  at("notice").hidden = !isLost || isOver;
  if (isLost && !isOver) {
    const since = last ? ` The page shows the job at ${format.clock(last.time_s)}.` : "";
    say(at("notice"), `coarse dashboard does not answer; it may have ended.${since}`);
  }
  at("slow").hidden = true;
}

function drawFigures(sample) {
  const trained = sample.workers.filter((worker) => worker.step_s);
  const mean = (of) => trained.reduce((sum, worker) => sum + of(worker), 0) / (trained.length || 1);
  const memory = sample.memory.reduce((sum, each) => sum + each.num_bytes, 0);
  const carried = sample.links.reduce((sum, link) => sum + link.bytes_per_s, 0);
  const elsewhere = sample.world_size > sample.workers.length ? ` of ${sample.world_size}` : "";
  const figures = [
    ["Step", String(sample.step), ""],
    ["Step time", format.duration(mean((worker) => worker.step_s)), sample.steps_per_s ? `${format.digits(sample.steps_per_s)}/s` : ""],
    ["Blocked", trained.length ? format.percent(mean((worker) => worker.blocked_s / worker.step_s)) : "–", "of a step"],
    ["Samples", sample.samples_per_s ? format.digits(sample.samples_per_s) : "–", "per second"],
    ["Links carry", format.rate(carried), ""],
    ["Memory", format.size(memory), ""],
    ["Workers", `${sample.workers.length}${elsewhere}`, sample.restarts ? `restart ${sample.restarts}` : ""],
    ["Memory devices", String(sample.devices.length), ""],
  ];
  keep(at("figures"), figures, ([name]) => name, ([name]) => {
    const box = html("div");
    const value = html("dd");
    value.append(html("span"), " ", html("small"));
    box.append(html("dt", "", name), value);
    return box;
  }, (box, [, value, minor]) => {
    say(box.children[1].children[0], value);
    say(box.children[1].children[1], minor);
  });
  at("slow").hidden = !sample.why_slow || sample.phase !== "runs";
  say(at("slow"), sample.why_slow ? `Slow: ${sample.why_slow}.` : "");
}

function drawLinks(sample) {
  const hasLimits = sample.links.some((link) => link.limit_bytes_per_s);
  say(at("flow-scale"), hasLimits || !sample.links.length ? "" : "What links can carry is not known: coarse profile measures it.");
  const cells = (link) => {
    const limit = link.limit_bytes_per_s;
    return [
      `${link.source} to ${link.target}`,
      format.rate(link.bytes_per_s),
      limit ? `${format.rate(limit)} (${link.limit_kind})` : "not measured",
      limit ? format.percent(link.bytes_per_s / limit) : "–",
      link.algorithms.join(", "),
    ];
  };
  drawTable(at("links"), sample.links, (link) => `${link.source} ${link.target}`, cells, [1, 2, 3]);
}

function drawTable(body, items, keyOf, cellsOf, numbers) {
  keep(body, items, keyOf, (item) => {
    const row = html("tr");
    cellsOf(item).forEach((_, place) => row.append(html("td", numbers.includes(place) ? "number" : "")));
    return row;
  }, (row, item) => cellsOf(item).forEach((text, place) => say(row.children[place], text)));
}

function drawSteps(sample) {
  const longest = Math.max(...sample.workers.map((worker) => worker.step_s), 0);
  drawLegend(at("steps-legend"), PARTS);
  drawBars(at("steps"), sample.workers.map((worker) => stepRow(worker, sample)), longest);
  const cells = (worker) => [`worker ${worker.rank}`, worker.pid ? String(worker.pid) : "–", worker.state, String(worker.step), worker.doing];
  drawTable(at("doing"), sample.workers, (worker) => worker.rank, cells, [1, 3]);
}

function stepRow(worker, sample) {
  const isSlowest = worker.rank === sample.slowest;
  const blocked = worker.step_s ? worker.blocked_s / worker.step_s : 0;
  const waits = worker.state === "waits" ? `${worker.doing} (${Math.round(worker.waits_s)} s)` : worker.doing;
  return {
    key: worker.rank,
    name: `worker ${worker.rank}`,
    parts: PARTS.map(([kind]) => ({ kind, value: worker[`${kind}_s`], title: partTitle(kind, worker) })),
    value: format.duration(worker.step_s),
    minor: isSlowest ? "slowest" : `${format.percent(blocked)} blocked`,
    note: worker.state === "trains" ? "" : waits,
    classes: worker.state === "silent" ? "bad" : isSlowest ? "marked" : "",
  };
}

function partTitle(kind, worker) {
  const causes = Object.entries(worker.blocked_by).map(([cause, seconds]) => `${format.duration(seconds)} for ${CAUSES[cause] ?? cause}`);
  const why = kind === "blocked" && causes.length ? ` (${causes.join(", ")})` : "";
  return `${kind}: ${format.duration(worker[`${kind}_s`])}${why}`;
}

function drawHistory(place) {
  const begun = samples.findIndex((sample) => sample.phase !== "awaited");
  const since = begun < 0 ? samples : samples.slice(begun);
  const shown = Math.max(0, place - Math.max(0, begun));
  const times = since.map((sample) => sample.time_s);
  const meanOf = (name) => since.map((sample) => {
    const trained = sample.workers.filter((worker) => worker.step_s);
    return trained.reduce((sum, worker) => sum + worker[name], 0) / (trained.length || 1);
  });
  const faults = events.filter((event) => event.kind === "fault").map((event) => event.time_s);
  const within = faults.filter((time) => time >= times[0] && time <= times[times.length - 1]);
  const series = PARTS.map(([kind]) => ({ kind, values: meanOf(`${kind}_s`) }));
  drawChart(at("step-chart"), { times, series, shown, faults: within, label: format.duration, name: "Mean step of the workers" });
  const carried = since.map((sample) => sample.links.reduce((sum, link) => sum + link.bytes_per_s, 0));
  drawChart(at("rate-chart"), { times, series: [{ kind: "curve", values: carried }], shown, faults: within, label: format.rate, name: "All links together" });
}

function drawDevices(sample) {
  drawLegend(at("devices-legend"), [["busy", "share of the sync cores' time in which they work"]]);
  const isMany = sample.devices.length > 16;
  const rows = sample.devices.map((device) => ({
    key: format.deviceName(device),
    name: `md${device.number}`,
    parts: [{ kind: "busy", value: device.busy, title: `${format.deviceName(device)}: ${format.percent(device.busy)} of ${device.sync_cores} sync cores' time; reduces ${format.rate(device.reduced_bytes_per_s)}` }],
    value: format.percent(device.busy),
    minor: `${device.queue_shards} queued`,
    note: device.is_silent ? device.doing : isMany ? "" : describeDevice(device),
    classes: device.is_silent ? "bad" : "",
  }));
  drawBars(at("devices"), rows, 1);
}

function describeDevice(device) {
  const pool = device.pool_limit_bytes ? `, snapshots ${format.size(device.pool_bytes)} of ${format.size(device.pool_limit_bytes)}` : "";
  const memory = device.node || device.memory ? `${device.node || device.memory}, ` : "";
  return `${memory}${device.sync_cores} sync core${device.sync_cores === 1 ? "" : "s"}, reduces ${format.rate(device.reduced_bytes_per_s)}, ${format.size(device.reserved_bytes)} reserved${pool}`;
}

function drawMemory(sample) {
  const owners = new Map();
  for (const each of sample.memory) owners.set(each.owner, [...(owners.get(each.owner) ?? []), each]);
  const total = (parts) => parts.reduce((sum, part) => sum + part.num_bytes, 0);
  const full = Math.max(...[...owners.values()].map(total), 0);
  const used = USES.filter((use) => sample.memory.some((each) => each.what === use && each.num_bytes));
  drawLegend(at("memory-legend"), used.map((use) => [use, use === "private" ? "private to the process" : use]));
  const rows = [...owners].map(([owner, parts]) => ({
    key: owner,
    name: owner,
    parts: USES.flatMap((use) => parts.filter((part) => part.what === use)).map((part) => ({ kind: part.what, value: part.num_bytes, title: `${part.what}: ${format.size(part.num_bytes)}` })),
    value: format.size(total(parts)),
  }));
  drawBars(at("memory"), rows, full);
}

function drawCheckpoints(checkpoints) {
  const pairs = [
    ["saved", String(checkpoints.saved)],
    ["failed", String(checkpoints.failed)],
    ["skipped", String(checkpoints.skipped)],
    ["written", format.size(checkpoints.written_bytes)],
    ["mean time of a save", format.duration(checkpoints.save_s)],
  ];
  keep(at("checkpoints"), pairs, ([name]) => name, ([name]) => {
    const box = html("div");
    box.append(html("dt", "", name), html("dd"));
    return box;
  }, (box, [, value]) => say(box.children[1], value));
}

function drawRoutes(sample) {
  const lines = sample.decisions.length ? sample.decisions : ["nothing has been decided yet"];
  keep(at("routes"), lines, (line, place) => `${place} ${line}`, (line) => {
    const item = html("li");
    const [subject, ...rest] = line.split(": ");
    item.append(html("b", "", rest.length ? `${subject}: ` : ""), rest.length ? rest.join(": ") : subject);
    return item;
  }, () => {});
}

function drawEvents(shown) {
  const told = events.filter((event) => event.number <= samples[shown].number);
  const items = told.reverse().slice(0, MOST_EVENTS);
  keep(at("events"), items, (event) => event.id, (event) => {
    const item = html("li", event.kind);
    const text = html("span");
    text.append(html("b", "", `${event.kind}: `), event.text);
    item.append(html("time", "", format.clock(event.time_s)), text);
    return item;
  }, () => {});
}

function choose(place) {
  chosen = samples[place]?.number ?? Infinity;
  if (chosen === newest()?.number) chosen = Infinity;
  draw();
}

at("moment").addEventListener("input", (event) => choose(Number(event.target.value)));
at("live").addEventListener("click", () => choose(Infinity));
at("flow").addEventListener("select", draw);
document.addEventListener("keydown", (event) => {
  if ((event.key === "l" || event.key === "L") && !event.ctrlKey && !event.metaKey && !event.altKey) choose(Infinity);
});
new ResizeObserver(() => draw()).observe(at("flow-panel"));
poll();

/* Curves over the time of the job. */

import { set, svg } from "./dom.js";
import * as format from "./format.js";

const MARGIN = { left: 62, right: 8, top: 8, bottom: 18 };

/**
 * Draws stacked areas [{ kind, values }], or one curve if `kind` is "curve", over times; marks the shown moment and
 * the times of faults.
 */
export function drawChart(chart, { times, series, shown, faults, label, name }) {
  const width = chart.clientWidth || 600;
  const height = chart.clientHeight || 150;
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  const first = times[0] ?? 0;
  const span = Math.max(1, (times[times.length - 1] ?? 1) - first);
  const sums = times.map((_, place) => series.reduce((sum, each) => sum + each.values[place], 0));
  const most = Math.max(...sums, 0) * 1.08 || 1;
  const x = (time) => MARGIN.left + (inner.width * (time - first)) / span;
  const y = (value) => MARGIN.top + inner.height * (1 - value / most);
  set(chart, { viewBox: `0 0 ${width} ${height}`, "aria-label": `${name}: now ${label(sums[shown] ?? 0)}, at most ${label(Math.max(...sums, 0))}` });
  chart.replaceChildren(...grid(most, y, width, label), ...clock(first, span, x, height));
  let below = times.map(() => 0);
  for (const each of series) {
    const above = each.values.map((value, place) => below[place] + value);
    chart.append(each.kind === "curve" ? curve(times, above, x, y) : area(each.kind, times, below, above, x, y));
    below = above;
  }
  for (const time of faults) chart.append(upright("fault", x(time), height));
  if (times.length) chart.append(upright("moment", x(times[shown]), height));
}

function grid(most, y, width, label) {
  return [0, 0.5, 1].flatMap((share) => {
    const value = (most / 1.08) * share;
    const text = svg("text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" });
    text.textContent = share ? label(value) : "0";
    return [svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }), text];
  });
}

function clock(first, span, x, height) {
  return [0, 1].map((end) => {
    const text = svg("text", { x: x(first + end * span), y: height - 4, "text-anchor": end ? "end" : "start" });
    text.textContent = format.clock(first + end * span);
    return text;
  });
}

const points = (times, values, x, y) => times.map((time, place) => `${x(time).toFixed(1)} ${y(values[place]).toFixed(1)}`);

function area(kind, times, below, above, x, y) {
  const there = points(times, above, x, y);
  const back = points(times, below, x, y).reverse();
  return svg("path", { class: `area ${kind}`, d: times.length ? `M${there.join("L")}L${back.join("L")}Z` : "" });
}

function curve(times, values, x, y) {
  return svg("path", { class: "curve", d: times.length ? `M${points(times, values, x, y).join("L")}` : "" });
}

const upright = (kind, x, height) => svg("line", { class: kind, x1: x, x2: x, y1: MARGIN.top, y2: height - MARGIN.bottom });

/* Stacked bars, one row for each worker, memory device or owner of memory. */

import { html, keep, say } from "./dom.js";

const MANY = 16;

/**
 * Draws rows { key, name, parts: [{ kind, value, title }], value, minor, note, classes } of one scale.
 */
export function drawBars(container, rows, full) {
  container.classList.toggle("many", rows.length > MANY);
  keep(container, rows, (row) => row.key, makeRow, (element, row) => updateRow(element, row, full));
}

function makeRow() {
  const row = html("div", "bar");
  row.setAttribute("role", "listitem");
  row.append(html("span", "name"), html("span", "track"), html("span", "value"), html("span", "note"));
  row.children[2].append(html("span"), " ", html("small"));
  return row;
}

function updateRow(element, row, full) {
  const [name, track, value, note] = element.children;
  element.className = `bar ${row.classes ?? ""}`;
  element.title = row.parts.map((part) => part.title).join("\n");
  say(name, row.name);
  keep(track, row.parts, (part) => part.kind, (part) => html("span", `part ${part.kind}`), (part, values) => {
    part.style.width = full > 0 ? `${(100 * values.value) / full}%` : "0";
  });
  say(value.children[0], row.value);
  say(value.children[1], row.minor ?? "");
  say(note, row.note ?? "");
  note.hidden = !row.note;
}

/** Draws the names of the kinds of parts. */
export function drawLegend(list, kinds) {
  keep(list, kinds, ([kind]) => kind, ([kind, name]) => {
    const item = html("li");
    item.append(html("i", kind), name);
    return item;
  }, () => {});
}

/* Figures in words. */

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB"];
const RATES = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"];

function scaled(value, base, units) {
  let place = 0;
  while (value >= base && place < units.length - 1) {
    value /= base;
    place += 1;
  }
  return `${digits(value)} ${units[place]}`;
}

/** A number with three significant digits. */
export function digits(value) {
  if (value >= 100 || value === 0) return value.toFixed(0);
  return value >= 10 ? value.toFixed(1) : value.toPrecision(3);
}

export const size = (bytes) => scaled(bytes, 1024, SIZES);
export const rate = (bytesPerSecond) => scaled(bytesPerSecond, 1000, RATES);
export const percent = (share) => `${Math.round(100 * share)} %`;

export function duration(seconds) {
  if (!seconds) return "–";
  if (seconds < 1e-3) return `${digits(seconds * 1e6)} µs`;
  return seconds < 1 ? `${digits(seconds * 1e3)} ms` : `${digits(seconds)} s`;
}

export const clock = (seconds) =>
  new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

/** A memory device's name, with the address of its node if that is another one. */
export const deviceName = (device) => `${device.node} md${device.number}`.trim();

/** A process in words; nothing for one of another node. */
export const process = (pid) => (pid ? `, process ${pid}` : "");

/** The beginning of a text that may be too long for a label. */
export const shortened = (text) => (text.length > 18 ? `${text.slice(0, 17)}…` : text);

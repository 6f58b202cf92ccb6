// How figures are written: few digits, a bound never too low, times in the reader's own zone.

const spaced = (value, unit) => `${value}\u00a0${unit}`;

export const number = (value) => value.toLocaleString("en");

export const percent = (share, digits = 1) =>
  share === null || share === undefined ? "–" : spaced((100 * share).toFixed(digits), "%");

// A bound, rounded up, but for a relative 1e-12, by which a sum of doubles may be off.
export function upwards(value, digits = 3) {
  if (value === null || value === undefined) return "no bound";
  const scale = 10 ** digits;
  return (Math.ceil(value * (1 - 1e-12) * scale) / scale).toFixed(digits);
}

// What is left of a bound, rounded down likewise.
export function downwards(value, digits = 3) {
  if (value === null || value === undefined) return "no bound";
  const scale = 10 ** digits;
  return (Math.floor(value * (1 + 1e-12) * scale) / scale).toFixed(digits);
}

export const figure = (value, digits = 3) =>
  value === null || value === undefined ? "–" : Number(value.toPrecision(digits)).toString();

// A small number in one way, whatever its size: 1e-5.
export const exponent = (value) => (value && value < 0.001 ? value.toExponential() : String(value));

export const counted = (value, noun, plural = `${noun}s`) => `${number(value)} ${value === 1 ? noun : plural}`;

const SIZES = ["B", "kB", "MB", "GB", "TB"];
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let at = 0;
  while (value >= 999.5 && at < SIZES.length - 1) { value /= 1000; at += 1; }
  return spaced(at ? value.toPrecision(3) : value, SIZES[at]);
}

export function lasting(seconds) {
  const s = Math.max(0, seconds);
  if (s < 9.95) return spaced(s.toFixed(1), "s");
  if (s < 90) return spaced(Math.round(s), "s");
  if (s < 5400) return spaced(Math.round(s / 60), "min");
  if (s < 129600) return spaced((s / 3600).toFixed(1), "h");
  return counted(Math.round(s / 86400), "day");
}

const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
export const moment = (unix) => (unix ? DAY.format(new Date(1000 * unix)) : "–");
export const iso = (unix) => new Date(1000 * unix).toISOString();

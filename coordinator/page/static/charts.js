// Line charts as SVG, drawn to the width that there is, and the table behind each.

import { drawn, made, scrollable, table } from "/static/dom.js";

const HEIGHT = 176, LEFT = 46, RIGHT = 12, TOP = 12, BOTTOM = 24;

// chart({ id, title, now, x, series: [{ name, colour, values, area }], references: [{ name, value }], format, from, to,
//         caption, rounds }): a figure with its head, its keys and its table.
export function chart(wanted) {
  const place = made("div", { class: "chart", id: `chart-${wanted.id}` });
  const readout = made("span", { class: "now" }, wanted.now);
  const keys = wanted.series.length + wanted.references.length > 1
    ? made("ul", { class: "keys" },
        ...wanted.series.map((each) => made("li", { "--key": `var(--${each.colour})` }, each.name)),
        ...wanted.references.map((each) => made("li", { "--key": "var(--quiet)" }, `${each.name}: ${wanted.format(each.value)}`)))
    : null;
  const draw = () => place.replaceChildren(picture(wanted, Math.max(260, place.clientWidth), readout));
  new ResizeObserver(draw).observe(place);
  const rows = wanted.x.map((round, at) => [String(round), ...wanted.series.map(({ values }) =>
    values[at] === null ? "–" : wanted.format(values[at]))]).reverse();
  return made("figure", { class: "card", id: `figure-${wanted.id}`, "aria-labelledby": `title-${wanted.id}` },
    made("div", { class: "head" }, made("h2", { id: `title-${wanted.id}` }, wanted.title), readout),
    place, keys,
    made("figcaption", {}, wanted.caption ?? "",
      made("details", { id: `table-${wanted.id}` }, made("summary", {}, "As a table"),
        scrollable(`scroll-${wanted.id}`, wanted.title,
          table(wanted.title, [["Round"], ...wanted.series.map((each) => [each.name])], rows)))));
}

function picture(wanted, width, readout) {
  const { x, series, references } = wanted;
  const known = [...series.flatMap(({ values }) => values), ...references.map(({ value }) => value)].filter((each) => each !== null);
  const ticks = steps(wanted.from ?? Math.min(...known), wanted.to ?? Math.max(...known));
  const low = ticks[0], high = ticks[ticks.length - 1];
  const last = Math.max(wanted.rounds ?? 0, x[x.length - 1], x[0] + 1);
  const across = (round) => LEFT + ((width - LEFT - RIGHT) * (round - x[0])) / (last - x[0]);
  const up = (value) => HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * (value - low)) / (high - low);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": summary(wanted), preserveAspectRatio: "none" });
  for (const each of ticks) {
    svg.append(
      drawn("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: up(each), y2: up(each) }),
      drawn("text", { x: LEFT - 8, y: up(each) + 4, "text-anchor": "end" }, wanted.tick ? wanted.tick(each) : wanted.format(each)));
  }
  for (const each of steps(x[0], last, Math.max(2, Math.floor(width / 110))).filter((tick) => Number.isInteger(tick) && tick >= x[0] && tick <= last)) {
    svg.append(drawn("text", { x: across(each), y: HEIGHT - 6, "text-anchor": "middle" }, String(each)));
  }
  for (const { value } of references) {
    svg.append(drawn("line", { class: "reference", x1: LEFT, x2: width - RIGHT, y1: up(value), y2: up(value) }));
  }
  for (const { values, colour, area } of series) {
    const points = x.map((round, at) => [across(round), values[at]]).filter(([, value]) => value !== null).map(([at, value]) => [at, up(value)]);
    if (!points.length) continue;
    const path = points.map(([at, value]) => `${at.toFixed(1)},${value.toFixed(1)}`).join("L");
    if (area && points.length > 1) {
      svg.append(drawn("path", { class: `area fill-${colour}`, d: `M${points[0][0].toFixed(1)},${up(low)}L${path}L${points[points.length - 1][0].toFixed(1)},${up(low)}Z` }));
    }
    svg.append(drawn("path", { class: `line ${colour}`, d: `M${path}` }));
    const end = points[points.length - 1];
    svg.append(drawn("circle", { class: `fill-${colour}`, cx: end[0], cy: end[1], r: 3.5 }));
  }
  const cursor = drawn("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const round = x[0] + ((event.clientX - box.left - LEFT) / (width - LEFT - RIGHT)) * (last - x[0]);
    const at = nearest(x, round);
    cursor.setAttribute("x1", across(x[at]));
    cursor.setAttribute("x2", across(x[at]));
    cursor.style.visibility = "visible";
    readout.textContent = `Round ${x[at]}: ` + series.map(({ name, values }) =>
      (series.length > 1 ? `${name} ` : "") + (values[at] === null ? "–" : wanted.format(values[at]))).join(", ");
  });
  svg.addEventListener("pointerleave", () => {
    cursor.style.visibility = "hidden";
    readout.textContent = wanted.now;
  });
  return svg;
}

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1; else high = middle;
  }
  return low > 0 && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
}

function summary({ title, x, series, references, format }) {
  const parts = series.map(({ name, values }) => {
    const known = values.filter((each) => each !== null);
    return known.length ? `${name} from ${format(known[0])} to ${format(known[known.length - 1])}` : `${name} not measured`;
  });
  parts.push(...references.map(({ name, value }) => `${name} ${format(value)}`));
  return `${title}, round ${x[0]} to ${x[x.length - 1]}: ${parts.join("; ")}`;
}

// Round numbers from at or below the least to at or above the most.
function steps(least, most, wanted = 4) {
  if (!(most > least)) most = least + (Math.abs(least) || 1) * 0.1;
  const raw = (most - least) / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= raw - 1e-12);
  const first = Math.floor(least / step + 1e-9), last = Math.ceil(most / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, at) => Number(((first + at) * step).toPrecision(10)));
}

/** Charts of one request: its course over time, and the parts of its TTFT. */

import { h } from "../dom.js";
import { duration, percent } from "../format.js";
import { PHASES, roundUp } from "../phases.js";

const TICKS = 6;
const MARKS = { lost: "✕", failed: "✕", event: "▲" };
/** Names of the parts of the TTFT, as on the terminal. */
const PARTS = { ...PHASES, decode: "network and first decode step" };

/**
 * options: `shownUs`: the chosen moment, in microseconds since the
 *   submission; null for the live state
 */
export function courseChart(/** @type {import("../request_lanes.js").Course} */ course, { shownUs, isActive }) {
  const { lanes, totalUs, firstTokenUs } = course;
  const share = (us) => Math.min(1, us / totalUs).toFixed(5);
  const lines = [];
  if (firstTokenUs !== null) lines.push(line("first", share(firstTokenUs), `first token ${duration(firstTokenUs)}`));
  if (shownUs !== null && shownUs > 0 && shownUs < totalUs) lines.push(line("shown", share(shownUs), "shown moment"));
  // Rows are explicit, because the lines of the moments share their column.
  const rows = lanes.map((lane, at) => [
    h("span", { class: "lane-name", style: { "grid-row": at + 1 } }, lane.name),
    h(
      "div",
      { class: "lane", style: { "grid-row": at + 1 } },
      lane.spans.map((span) => bar(span, share)),
      lane.marks.map((mark) =>
        h("span", { class: "mark", "data-kind": mark.kind, title: mark.label, style: { "--from": share(mark.atUs) } }, MARKS[mark.kind]),
      ),
    ),
  ]);
  const axis = ticks(totalUs).map((us) =>
    h("span", { class: "tick", style: { "--from": share(us) } }, us === 0 ? "0" : duration(us)),
  );
  return h(
    "div",
    { class: "course card", role: "img", "aria-label": spoken(course, isActive) },
    rows,
    h("div", { class: "axis", style: { "grid-row": lanes.length + 1 } }, axis),
    h("div", { class: "course-lines", style: { "grid-row": `1 / span ${lanes.length}` } }, lines),
  );
}

export function ttftParts(/** @type {Record<string, number>} */ partsUs) {
  const parts = Object.entries(partsUs);
  const total = parts.reduce((sum, [, us]) => sum + us, 0) || 1;
  return h(
    "div",
    { class: "ttft" },
    h(
      "div",
      { class: "stack", "aria-hidden": "true" },
      parts.map(([part, us]) => h("i", { "data-phase": part, style: { "--share": (us / total).toFixed(5) } })),
    ),
    h(
      "ul",
      { class: "legend" },
      parts.map(([part, us]) =>
        h(
          "li",
          { "data-phase": part },
          h("i", { "aria-hidden": "true" }),
          PARTS[part] ?? part,
          h("b", {}, ` ${duration(us)}`),
          h("span", { class: "soft" }, ` ${percent(us / total)}`),
        ),
      ),
    ),
  );
}

function bar(span, share) {
  const title = `${span.label}: ${duration(span.toUs - span.fromUs)}`;
  const style = { "--from": share(span.fromUs), "--share": share(span.toUs - span.fromUs) };
  return h("span", { class: "bar-span", "data-phase": span.phase, title, style }, h("span", {}, span.label));
}

function line(kind, from, label) {
  const side = Number(from) > 0.6 ? "left" : "right";
  return h("span", { class: "course-line", "data-kind": kind, "data-side": side, style: { "--from": from } }, h("span", {}, label));
}

function ticks(totalUs) {
  const step = roundUp(totalUs / TICKS);
  return Array.from({ length: Math.floor(totalUs / step) + 1 }, (_, at) => at * step).filter((us) => us <= 0.97 * totalUs);
}

function spoken(/** @type {import("../request_lanes.js").Course} */ { lanes, totalUs, firstTokenUs }, isActive) {
  const parts = lanes.flatMap((lane) =>
    lane.spans.map((span) => ({
      fromUs: span.fromUs,
      text: `${span.label} at ${lane.name} from ${duration(span.fromUs)} to ${duration(span.toUs)}`,
    })),
  );
  parts.sort((a, b) => a.fromUs - b.fromUs);
  const first = firstTokenUs === null ? "" : ` First token after ${duration(firstTokenUs)}.`;
  const total = `${isActive ? "So far" : "In total"} ${duration(totalUs)}.`;
  return `Course of the request: ${parts.map((one) => one.text).join("; ")}.${first} ${total}`;
}

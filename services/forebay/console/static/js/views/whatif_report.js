/** The result of a comparison: a DiffReport, in the words of `forebay replay diff`. */

import { LineChart } from "../charts.js";
import { h } from "../dom.js";
import { counted, dateTime, number, percent, whole } from "../format.js";
import { linkTo } from "../moment.js";
import { section } from "../parts.js";
import { Table } from "../table.js";

const EXACT = new Intl.NumberFormat("en-US", { maximumFractionDigits: 4 });

/** atUs: the chosen moment, which links keep */
export function reportElement(/** @type {Server.DiffReport} */ report, atUs) {
  if (report.divergence) {
    const { offset, reason } = report.divergence;
    return h("p", { class: "problem" }, `History diverges at journal offset ${whole(offset)}: ${reason}`);
  }
  const size = `${counted(report.history.decisions, "decision")} about ${counted(report.requests, "request")} in ${number(report.span_s)} s`;
  return h(
    "section",
    { class: "whatif-result" },
    h("h2", { class: "result-title" }, titleOf(report)),
    h("p", { class: "soft" }, `${report.alternative}: ${size}, verified against the journal.`),
    report.idle.map((one) => h("p", {}, `No change by ${one}: equal to the recorded configuration.`)),
    Object.entries(report.unverified).map(([name, count]) => h("p", {}, `Not verified: ${count} ${name}.`)),
    !report.identical && h("p", {}, overlapText(report.overlap)),
    figureTable(figuresOf(report)),
    report.fork && forkCards(report.fork, report.before_fork, atUs),
    charts(report),
    report.most.length > 0 && section("Moved requests with the largest change of overlap", movedTable(report.most, atUs)),
    report.ranks.length > 0 && section("Workers", rankTable(report.ranks)),
    report.notes.length > 0 && h("div", { class: "notes" }, h("ul", {}, report.notes.map((one) => h("li", {}, one)))),
  );
}

function titleOf(/** @type {Server.DiffReport} */ { identical, moved, history }) {
  if (!history.decisions) return "There are no decisions in this span.";
  if (identical) return "All decisions are equal.";
  const share = moved.compared ? ` (${percent(moved.moved / moved.compared)})` : "";
  return `${whole(moved.moved)} of ${counted(moved.compared, "request")}${share} would have gone to another worker.`;
}

function overlapText(/** @type {Server.OverlapChange} */ { won, lost, later_won }) {
  const host = won.host || lost.host ? `, ${whole(won.host)} and ${whole(lost.host)} in host memory` : "";
  const disk = won.disk || lost.disk ? `, ${whole(won.disk)} and ${whole(lost.disk)} on disk` : "";
  const store = won.store || lost.store ? `, ${whole(won.store)} and ${whole(lost.store)} in shared stores` : "";
  const later = later_won ? ` Of those won, ${whole(later_won)} are because the request was sent later.` : "";
  return `Overlap: ${whole(won.device)} blocks won and ${whole(lost.device)} lost on devices${host}${disk}${store}.${later}`;
}

/** @typedef {{ name: string, history: any, alternative: any, format: (value: any) => string, better: number }} Figure */

function figuresOf(/** @type {Server.DiffReport} */ { history, other }) {
  /** @type {Figure[]} */ const figures = [];
  const add = (
    name,
    /** @type {(side: Server.WorldSummary) => number | null} */ value,
    better,
    /** @type {(value: any) => string} */ format = whole,
  ) => figures.push({ name, history: value(history), alternative: value(other), format, better });
  const either = (/** @type {(side: Server.WorldSummary) => unknown} */ value) => value(history) || value(other);
  add("Attempts sent to workers", (side) => side.routed, 0);
  add("Prefix reuse, predicted", (side) => side.reuse, 1, percent);
  add("Prompt tokens to compute", (side) => side.prompt_tokens - side.cached_tokens, -1);
  add("Busiest worker over the mean", (side) => side.max_over_mean, -1, number);
  add("Overlap on devices, blocks", (side) => side.overlap.device, 1);
  if (either((side) => side.overlap.host)) add("Overlap in host memory, blocks", (side) => side.overlap.host, 0);
  if (either((side) => side.overlap.disk)) add("Overlap on disk, blocks", (side) => side.overlap.disk, 0);
  if (either((side) => side.overlap.store)) add("Overlap in shared stores, blocks", (side) => side.overlap.store, 0);
  if (either((side) => side.held)) {
    add("Held in the queue", (side) => side.held, -1);
    for (const of of ["p50", "p99", "max"]) {
      add(`Time in the queue, ${of}`, (side) => side.wait_ms[of] ?? null, -1, (value) => (value === null ? "–" : `${number(value)} ms`));
    }
  }
  if (either((side) => side.still_held)) add("Still held at the end", (side) => side.still_held, -1);
  for (const kind of /** @type {Array<keyof Pick<Server.WorldSummary, "rejected" | "aborted">>} */ (["rejected", "aborted"])) {
    const reasons = [...new Set([...Object.keys(history[kind]), ...Object.keys(other[kind])])].sort();
    for (const reason of reasons) {
      add(`${kind[0].toUpperCase()}${kind.slice(1)}: ${reason.replaceAll("_", " ")}`, (side) => side[kind][reason] ?? 0, -1);
    }
  }
  add("Prompt blocks cached where they were sent", (side) => side.landed, 0, percent);
  return figures;
}

function figureTable(/** @type {Figure[]} */ figures) {
  const rows = figures.map((figure) => {
    const [text, tone] = changeOf(figure);
    return h(
      "tr",
      { "data-changed": text ? "true" : null },
      h("th", { scope: "row", class: "t" }, figure.name),
      h("td", {}, figure.format(figure.history)),
      h("td", {}, h("b", {}, figure.format(figure.alternative))),
      h("td", { class: "t", "data-tone": tone }, text || "equal"),
    );
  });
  const headings = ["Figure", "History", "Alternative", "Change"];
  const head = headings.map((name, at) => h("th", { scope: "col", class: at === 0 || at === 3 ? "t" : null }, name));
  const table = h("table", { class: "figures" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows));
  return h("div", { class: "scroll", role: "region", "aria-label": "Figures side by side", tabindex: 0 }, table);
}

function changeOf(/** @type {Figure} */ { history, alternative, format, better }) {
  if (history === alternative || history === null || alternative === null) return ["", null];
  const sign = Math.sign(alternative - history);
  const change = Math.abs(alternative - history);
  const size = format === percent ? `${number(100 * change)} points` : history ? percent(change / history) : EXACT.format(change);
  const text = `${sign > 0 ? "▲" : "▼"} ${size} ${sign > 0 ? "more" : "less"}`;
  if (!better) return [text, null];
  return sign === better ? [`${text}, better`, "good"] : [`${text}, worse`, "bad"];
}

function forkCards(/** @type {Server.Fork} */ fork, before_fork, atUs) {
  const there = fork.alternative.there;
  const before = percent(before_fork);
  const place = placeOf(fork.history);
  return section(
    "The first decision that differs",
    h(
      "p",
      {},
      h("a", { href: linkToId(fork.request_id, atUs) }, fork.request_id),
      ` at ${dateTime(fork.at_us)} UTC, journal offset ${whole(fork.offset)}. ${before} of the decisions come before it and are exact.`,
    ),
    h(
      "div",
      { class: "pair sides" },
      h("div", { class: "card" }, h("h3", {}, "History"), outcome(fork.history)),
      h("div", { class: "card" }, h("h3", {}, "Alternative"), outcome(fork.alternative)),
    ),
    there && h("p", { class: "soft" }, `In the alternative's cost table ${place} has ${termsText(there)}.`),
  );
}

/** Return the rank of an outcome, whose fields at their default are left out. */
function placeOf(/** @type {Server.DecisionOutcome} */ { worker_id, rank = 0 }) {
  return `${worker_id}/${rank}`;
}

function outcome(/** @type {Server.DecisionOutcome} */ found) {
  const words = {
    routed: [`Sent to ${placeOf(found)}`, found.terms ? termsText(found.terms) : ""],
    held: [`Held in queue class ${found.reason}`, ""],
    nothing: ["No decision at this event", ""],
    rejected: ["Rejected", found.reason],
    aborted: ["Aborted", found.reason],
  };
  const [title, text] = words[found.decision] ?? [found.decision, ""];
  return [h("p", { class: "outcome" }, title), text && h("p", { class: "soft" }, text)];
}

function termsText(/** @type {Server.CostTerms} */ { cost, prefill_blocks = 0, overlap_credit = 0, decode_blocks = 0, active_requests = 0, eviction_cost = 0, ...overlap }) {
  const { device_overlap = 0, host_overlap = 0, disk_overlap = 0, store_overlap = 0 } = overlap;
  const parts = [
    `prefill ${EXACT.format(prefill_blocks)}`,
    `credit ${EXACT.format(overlap_credit)}`,
    ...(eviction_cost ? [`eviction ${EXACT.format(eviction_cost)}`] : []),
    `decode ${EXACT.format(decode_blocks)}`,
    `${active_requests} active`,
  ];
  const more = host_overlap || disk_overlap ? `, ${host_overlap} in host memory, ${disk_overlap} on disk` : "";
  const store = store_overlap ? `, ${store_overlap} in the shared store` : "";
  return `cost ${EXACT.format(cost)}: ${parts.join(", ")}; ${device_overlap} cached blocks on the device${more}${store}`;
}

function charts(/** @type {Server.DiffReport} */ { series, interval_s, fork }) {
  if (!fork || series.length < 2) return null;
  const sides = [{ name: "history", colour: 0 }, { name: "alternative", colour: 1, isDashed: true }];
  const fromUs = fork.at_us - fork.after_s * 1e6 + series[0].after_s * 1e6;
  const chart = (title, format, /** @type {Array<(one: Server.Interval) => number | null>} */ ...valuesOf) => {
    const made = new LineChart({ title, series: sides, format });
    made.update({ fromUs, intervalUs: interval_s * 1e6, values: valuesOf.map((valueOf) => series.map(valueOf)) });
    return made.element;
  };
  return section(
    "Over time",
    h(
      "div",
      { class: "charts" },
      chart("Prefix reuse, predicted", percent, (one) => one.reuse, (one) => one.other_reuse),
      chart("Busiest worker over the mean", number, (one) => one.max_over_mean, (one) => one.other_max_over_mean),
    ),
  );
}

function movedTable(/** @type {Server.MovedRequest[]} */ moved, atUs) {
  const gain = (/** @type {Server.MovedRequest} */ one) => one.other_overlap - one.overlap;
  const table = new Table({
    label: "Moved requests with the largest change of overlap",
    key: (one) => one.request_id,
    columns: [
      {
        id: "request",
        label: "Request",
        isText: true,
        fill: (cell, one) => cell.firstChild || cell.append(h("a", { href: linkToId(one.request_id, atUs) }, one.request_id)),
      },
      { id: "history", label: "History", isText: true, text: (one) => `${one.worker_id}/${one.rank}` },
      { id: "alternative", label: "Alternative", isText: true, text: (one) => `${one.other_worker_id}/${one.other_rank}` },
      { id: "blocks", label: "Prompt blocks", text: (one) => whole(one.blocks), order: (one) => one.blocks },
      { id: "overlap", label: "Overlap", text: (one) => whole(one.overlap), order: (one) => one.overlap },
      { id: "other", label: "In the alternative", text: (one) => whole(one.other_overlap), order: (one) => one.other_overlap },
      {
        id: "gain",
        label: "Change",
        text: (one) => `${gain(one) > 0 ? "▲ +" : gain(one) < 0 ? "▼ " : ""}${whole(gain(one))}`,
        order: gain,
        isDescendingFirst: true,
      },
      { id: "why", label: "Cause", isText: true, text: (one) => (one.by_choice ? "other choice" : "other state") },
    ],
  });
  table.update(moved);
  return table.element;
}

function rankTable(/** @type {Server.RankComparison[]} */ ranks) {
  const table = new Table({
    label: "Attempts per worker",
    key: (/** @type {Server.RankComparison} */ one) => `${one.worker_id}/${one.rank}`,
    sortedBy: "worker",
    columns: [
      { id: "worker", label: "Worker", isText: true, text: (one) => `${one.worker_id}/${one.rank}`, order: (one) => `${one.worker_id}/${one.rank}` },
      { id: "requests", label: "Requests", text: (one) => whole(one.history.requests), order: (one) => one.history.requests },
      { id: "other", label: "In the alternative", text: (one) => whole(one.alternative.requests), order: (one) => one.alternative.requests },
      { id: "tokens", label: "Tokens to compute", text: (one) => whole(one.history.computed_tokens), order: (one) => one.history.computed_tokens },
      {
        id: "other_tokens",
        label: "In the alternative ",
        text: (one) => whole(one.alternative.computed_tokens),
        order: (one) => one.alternative.computed_tokens,
      },
    ],
  });
  table.update(ranks);
  return table.element;
}

function linkToId(id, atUs) {
  return linkTo("requests", "by-id", { id }, atUs);
}

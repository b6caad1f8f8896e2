/**
 * One routing decision: the reason in words, the cost of each candidate as bars and as a table, the excluded ranks, and
 * what would have changed the selection.
 */

import { h, replace } from "../dom.js";
import { counted, duration, percent, sentence, whole } from "../format.js";
import { selectedName } from "../request_lanes.js";
import { Table } from "../table.js";
import { recordButton } from "./record_dialog.js";
import { valueText } from "./request_words.js";

const CANDIDATES_SHOWN = 10;
const NAMES_SHOWN = 6; // excluded ranks per reason
const SENT = { encode: "Encode sent to", prefill: "Prefill sent to", decode: "Decode sent to", aggregated: "Sent to" };
const BLOCKS = new Intl.NumberFormat("en-US", { maximumFractionDigits: 2 });

export function routingSection(/** @type {Server.Routing} */ routing, /** @type {Context["api"]} */ api) {
  const measure = measureOf(routing);
  const order = orderOf(routing);
  const bars = h("div", { class: "cost-bars" });
  const show = (count) => replace(bars, measure && costBars(routing, order, measure, count, show));
  show(CANDIDATES_SHOWN);
  return h(
    "section",
    { class: "routing card" },
    h("div", { class: "view-head" }, h("h3", {}, titleOf(routing)), recordButton(api, "decisions", routing.offset)),
    h("p", { class: "why" }, sentence(routing.why)),
    routing.would_wait && h("p", {}, "A request like this query would be held in the queue first."),
    bars,
    excluded(routing.left_out),
    h("details", {}, h("summary", {}, `All terms of ${counted(order.length, "candidate")}`), termsTable(routing, order)),
    settings(routing),
  );
}

/**
 * Create the list of changes that would have changed a selection.
 * isTitled: whether the list names its decision, because the request has several
 */
export function changeList(/** @type {Server.Routing} */ { changes, notes, candidates, winner, stage, attempt }, isTitled) {
  const { worker_id, rank } = candidates[winner].seen;
  const selected = `${worker_id}/${rank}`;
  const item = (/** @type {Server.SelectionChange} */ one) => {
    const isSame = one.selected === selected;
    return h(
      "li",
      { "data-same": isSame ? "true" : null },
      h("span", { class: "to" }, isSame ? "same worker" : `→ ${one.selected}`),
      h("span", {}, sentence(one.text)),
    );
  };
  return h(
    "div",
    {},
    isTitled && h("h3", {}, `${stage} on ${selected}, attempt ${attempt}`),
    changes.length ? h("ul", { class: "changes" }, changes.map(item)) : h("p", {}, "No single change selects another worker."),
    notes.map((note) => h("p", { class: "soft" }, note)),
  );
}

/** Create the list of ranks that were not candidates, grouped by reason; null if there are none. */
export function excluded(/** @type {Server.ExcludedRank[]} */ ranks) {
  if (!ranks.length) return null;
  const byText = new Map();
  for (const { seen, text } of ranks) byText.set(text, [...(byText.get(text) ?? []), `${seen.worker_id}/${seen.rank}`]);
  const items = [...byText].map(([text, names]) => {
    const more = names.length > NAMES_SHOWN ? ` and ${whole(names.length - NAMES_SHOWN)} more` : "";
    return h("li", {}, h("b", {}, names.slice(0, NAMES_SHOWN).join(", "), more), ": ", text);
  });
  return h("div", { class: "excluded" }, h("h4", {}, "Excluded ranks"), h("ul", {}, items));
}

function titleOf(/** @type {Server.Routing} */ routing) {
  const name = selectedName(routing);
  if (!routing.attempt) return `Would be routed to ${name}`;
  const waited = routing.waited_us ? ` after ${duration(routing.waited_us)} in the queue` : "";
  const attempt = routing.attempt > 1 ? `Attempt ${routing.attempt}: ` : "";
  const sent = SENT[routing.stage] ?? "Sent to";
  return `${attempt}${attempt ? sent[0].toLowerCase() + sent.slice(1) : sent} ${name}${waited}`;
}

/** count: number of candidates to show */
function costBars(/** @type {Server.Routing} */ routing, /** @type {number[]} */ order, /** @type {Measure} */ measure, count, show) {
  const { candidates, winner, runner_up } = routing;
  const first = order.slice(0, count);
  const shown = first.includes(winner) ? first : [...first.slice(0, -1), winner];
  const total = (/** @type {Server.CandidateCost} */ one) => sum(measure.partsOf(one));
  const most = Math.max(...shown.map((at) => total(candidates[at]) + measure.creditOf(candidates[at])), 1e-9);
  const rows = shown.map((at) => {
    const one = candidates[at];
    const credit = measure.creditOf(one);
    const parts = measure.partsOf(one);
    const mark = at === winner ? "★ selected" : at === runner_up ? "runner-up" : "";
    const terms = parts.map((part) => `${BLOCKS.format(part.value)} ${PART_NAMES[part.kind]}`);
    if (credit) terms.push(`${BLOCKS.format(credit)} less for cached blocks`);
    const share = (value) => ({ "--share": (value / most).toFixed(5) });
    return h(
      "tr",
      { class: at === winner ? "winner" : null },
      h("th", { scope: "row", class: "t" }, nameOf(routing, at)),
      h("td", { class: "t soft" }, mark),
      h(
        "td",
        { class: "cost-track" },
        h(
          "div",
          { class: "stack", role: "img", "aria-label": terms.join(", ") || "0", title: terms.join(", ") },
          parts.map((part) => h("i", { "data-part": part.kind, style: share(part.value) })),
          credit ? h("i", { "data-part": "credit", style: share(credit) }) : null,
        ),
      ),
      h("td", {}, h("b", {}, BLOCKS.format(total(one)))),
      one.probability === null ? null : h("td", { class: "soft" }, percent(one.probability)),
    );
  });
  const kinds = [...new Set(shown.flatMap((at) => measure.partsOf(candidates[at]).map((part) => part.kind)))];
  const hasCredit = shown.some((at) => measure.creditOf(candidates[at]));
  return [
    h("p", { class: "soft cost-title" }, measure.title, candidates[winner].probability === null ? "" : ", and its probability"),
    h("table", { class: "costs", "aria-label": measure.title }, h("tbody", {}, rows)),
    h(
      "ul",
      { class: "legend" },
      kinds.map((kind) => h("li", { "data-part": kind }, h("i", { "aria-hidden": "true" }), PART_NAMES[kind])),
      hasCredit && h("li", { "data-part": "credit" }, h("i", { "aria-hidden": "true" }), "credit for cached blocks, not part of the cost"),
    ),
    shown.length < order.length &&
      h(
        "button",
        { type: "button", class: "button", onclick: () => show(order.length) },
        `Show all ${whole(order.length)} candidates, with costs up to ${BLOCKS.format(candidates[order[order.length - 1]].cost)}`,
      ),
  ];
}

function sum(/** @type {Part[]} */ parts) {
  return parts.reduce((total, part) => total + part.value, 0);
}

function nameOf(/** @type {Server.Routing} */ { candidates }, at) {
  const { worker_id, rank } = candidates[at].seen;
  return candidates.some((one) => one.seen.rank) ? `${worker_id}/${rank}` : worker_id;
}

/** Create the table of all cost terms. Terms that are zero for all candidates are left out. */
function termsTable(/** @type {Server.Routing} */ routing, /** @type {number[]} */ order) {
  const { candidates, winner, runner_up } = routing;
  const has = (/** @type {(one: Server.CandidateCost) => unknown} */ value) => candidates.some((one) => value(one));
  /** @type {Array<[id: string, label: string, value: (one: Server.CandidateCost) => number, format?: typeof percent]>} */
  const columns = [
    ["cost", "Cost", (one) => one.cost],
    ["prefill", "Prefill", (one) => one.prefill_blocks],
    ["credit", "Credit", (one) => one.overlap_credit],
    ["decode", "Decode", (one) => one.decode_blocks],
    ["active", "Active", (one) => one.active_requests],
  ];
  if (has((one) => one.probability !== null)) columns.splice(1, 0, ["probability", "Probability", (one) => one.probability ?? 0, percent]);
  if (has((one) => one.eviction_cost)) columns.push(["eviction", "Eviction", (one) => one.eviction_cost]);
  if (has((one) => one.taint_factor !== 1)) columns.push(["taints", "Taint factor", (one) => one.taint_factor]);
  columns.push(["cached", "Cached", (one) => one.seen.device_overlap]);
  if (has((one) => one.seen.assumed_overlap)) columns.push(["assumed", "Assumed", (one) => one.seen.assumed_overlap]);
  if (has((one) => one.seen.host_overlap)) columns.push(["host", "On host", (one) => one.seen.host_overlap]);
  if (has((one) => one.seen.disk_overlap)) columns.push(["disk", "On disk", (one) => one.seen.disk_overlap]);
  if (has((one) => one.seen.store_overlap)) columns.push(["store", "In store", (one) => one.seen.store_overlap]);
  columns.push(
    ["size", "Cache size", ({ seen }) => seen.device_blocks + seen.host_blocks + seen.disk_blocks],
    ["waiting", "Waiting tokens", (one) => one.seen.waiting_tokens],
    ["computed", "Computed tokens", (one) => one.seen.computed_tokens],
  );
  const table = new Table({
    label: "Cost terms of the candidates, in KV blocks",
    key: (at) => at,
    columns: [
      { id: "name", label: "Candidate", isText: true, text: (at) => nameOf(routing, at), order: (at) => nameOf(routing, at) },
      { id: "mark", label: "", isText: true, text: (at) => (at === winner ? "★ selected" : at === runner_up ? "runner-up" : "") },
      ...columns.map(([id, label, value, format]) => ({
        id,
        label,
        text: (at) => (format ?? BLOCKS.format)(value(candidates[at])),
        order: (at) => value(candidates[at]),
      })),
    ],
  });
  table.update(order);
  return table.element;
}

function settings(/** @type {Server.Routing} */ { mode, config, overridden }) {
  const names = Object.keys(config);
  const overrides = overridden.length ? `, of which the request overrode ${overridden.join(", ")}` : "";
  return h(
    "details",
    {},
    h("summary", {}, `Policy ${mode}: ${counted(names.length, "setting")}${overrides}`),
    h("dl", {}, names.map((name) => [h("dt", {}, h("code", {}, name)), h("dd", {}, valueText(config[name]))])),
  );
}

/**
 * @typedef {{ kind: keyof PART_NAMES, value: number }} Part
 * @typedef {object} Measure
 * @property {string} title what the bars show
 * @property {(one: Server.CandidateCost) => Part[]} partsOf parts of a candidate's bar, which add up to its cost
 * @property {(one: Server.CandidateCost) => number} creditOf blocks by which cached blocks reduced the cost
 */

const PART_NAMES = {
  prefill: "blocks to prefill",
  decode: "decode blocks",
  active: "active requests",
  eviction: "evicted blocks",
  product: "blocks to prefill, times decode blocks plus 1",
  requests: "active requests",
};

const BY_REQUESTS = new Set(["least-loaded", "power-of-two"]);
const BY_TURN = new Set(["round-robin", "random"]);

/** @returns {Measure | null} the measure of a routing decision; null if the policy compares nothing */
function measureOf(/** @type {Server.Routing} */ { mode, config }) {
  if (BY_TURN.has(mode)) return null;
  if (BY_REQUESTS.has(mode)) {
    return {
      title: "Active requests per candidate",
      partsOf: (one) => [{ kind: "requests", value: one.active_requests }],
      creditOf: () => 0,
    };
  }
  const title = "Cost per candidate, in KV blocks; the lowest is best";
  if (config.selection_policy === "lmetric") {
    return { title, partsOf: (one) => [{ kind: "product", value: one.cost }], creditOf: () => 0 };
  }
  return { title, partsOf: (one) => partsOf(config, one), creditOf: (one) => creditOf(config, one) };
}

/** config: settings of the policy */
function partsOf(config, /** @type {Server.CandidateCost} */ { prefill_blocks, overlap_credit, decode_blocks, active_requests, taint_factor, eviction_cost }) {
  const weight = (config.decode_active_request_weight ?? 0) * taint_factor;
  const isCreditedToDecode = creditsDecode(config);
  const scale = (config.prefill_load_scale ?? 1) * taint_factor;
  const prefill = scale * Math.max(prefill_blocks - overlap_credit, 0);
  const decode = (isCreditedToDecode ? Math.max(decode_blocks - overlap_credit, 0) : decode_blocks) * taint_factor;
  /** @type {Part[]} */
  const parts = [
    { kind: "prefill", value: isCreditedToDecode ? 0 : prefill },
    { kind: "decode", value: decode },
    { kind: "active", value: weight * active_requests },
    { kind: "eviction", value: (isCreditedToDecode ? taint_factor : scale) * (eviction_cost ?? 0) },
  ];
  return parts.filter((part) => part.value > 0);
}

function creditOf(config, /** @type {Server.CandidateCost} */ { prefill_blocks, overlap_credit, decode_blocks, taint_factor }) {
  const isCreditedToDecode = creditsDecode(config);
  const most = isCreditedToDecode ? decode_blocks : prefill_blocks;
  const scale = isCreditedToDecode ? 1 : (config.prefill_load_scale ?? 1);
  return scale * Math.min(overlap_credit, most) * taint_factor;
}

/** Return whether cached blocks reduce the decode blocks, because the policy does not count blocks to prefill. */
function creditsDecode(config) {
  return config.track_prefill_tokens === false && Boolean(config.overlap_score_credit);
}

/**
 * Return the candidates in the order of their costs, the cheapest first, and the selected one before others of its cost.
 */
function orderOf(/** @type {Server.Routing} */ { candidates, winner }) {
  const place = (at) => (at === winner ? -1 : at);
  return candidates
    .map((_, at) => at)
    .sort((a, b) => candidates[a].cost - candidates[b].cost || place(a) - place(b));
}

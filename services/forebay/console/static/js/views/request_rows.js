/** Rows of the list of requests. */

import { h, printable, put, reconcile, setStyle, setText } from "../dom.js";
import { clock, dateTime, duration, percent, whole } from "../format.js";
import { linkTo } from "../moment.js";
import { badge, updateBadge } from "../parts.js";
import { hasEnded, phasesOfRow, roundUp } from "../phases.js";

/**
 * @typedef {object} RowView
 * @property {Context["moment"]} moment
 * @property {string} group model of the group, which is not repeated in each row
 * @property {number} endUs time until which active requests are shown
 * @property {number} scaleUs duration that fills the width of the last column
 * @property {Set<number>} departed rows that no longer match the filters
 */

const ID_CHARS_MAX = 34;
const ID_HEAD = 12; // characters before the omitted middle

export const COLUMNS = [
  { id: "when", label: "Submitted", isText: true, title: "When the owner applied the submission, UTC" },
  { id: "request", label: "Request", isText: true },
  { id: "tenant", label: "Tenant", isText: true, title: "Tenant of the API key" },
  { id: "phase", label: "State", isText: true },
  { id: "where", label: "Worker", isText: true },
  { id: "prompt", label: "Prompt", title: "Prompt tokens, and the share that the engine found in its cache" },
  { id: "ttft", label: "TTFT", title: "Time from the submission to the first token" },
  { id: "output", label: "Output", title: "Output tokens" },
  { id: "itl", label: "ITL", title: "Mean time between two output tokens" },
  { id: "total", label: "Duration", title: "Time from the submission to the end, or until now" },
  { id: "life", label: "Phases", isText: true, title: "Queue (hatched), prefill, decode. All bars have the same scale." },
];

/** Return the duration that fills the width of the bars: a round number that is at least the longest duration. */
export function scaleOf(/** @type {Server.RequestRow[]} */ rows, /** @type {number} */ endUs) {
  return roundUp(Math.max(1_000, ...rows.map((row) => (row.ended_us ?? endUs) - row.submitted_us)));
}

export function createRow() {
  const cells = COLUMNS.map((column) => h("td", { role: "cell", class: `${column.id}${column.isText ? " t" : ""}`, "data-label": column.label }));
  const [, request, , phase, , prompt, , , , , life] = cells;
  request.append(h("a", { class: "request-id" }), " ", h("span", { class: "soft" }));
  phase.append(badge(), " ", h("span", { class: "soft reason" }));
  prompt.append(h("span"), h("span", { class: "soft share" }));
  life.append(h("span", { class: "life", "aria-hidden": "true" }));
  return h("tr", { role: "row" }, cells);
}

export function updateRow(element, /** @type {Server.RequestRow} */ row, /** @type {RowView} */ { moment, group, endUs, scaleUs, departed }) {
  const [when, request, tenant, phase, where, prompt, ttft, output, itl, total, life] = element.children;
  const isDeparted = departed.has(row.number);
  put(element, "class", isDeparted ? "departed" : null);
  setText(when, clock(row.submitted_us));
  put(when, "title", `${dateTime(row.submitted_us)} UTC`);
  const link = request.children[0];
  setText(link, abbreviated(row.request_id));
  put(link, "title", row.request_id);
  put(link, "href", linkTo("requests", row.number, { id: row.request_id }, moment.atUs));
  setText(request.children[1], detailsOf(row, group));
  setText(tenant, row.tenant || "–");
  put(tenant, "title", row.tenant || null);
  updateBadge(phase.children[0], row.state);
  setText(phase.children[1], isDeparted ? "no longer matches" : reasonOf(row));
  setText(where, row.worker_id && row.rank ? `${row.worker_id}/${row.rank}` : row.worker_id || "–");
  setText(prompt.children[0], whole(row.prompt_tokens));
  setText(prompt.children[1], row.cached_tokens === null ? "" : `${percent(row.cached_tokens / (row.prompt_tokens || 1))} cached`);
  setText(ttft, duration(row.ttft_us));
  setText(output, whole(row.output_tokens));
  setText(itl, duration(row.itl_us));
  setText(total, duration((row.ended_us ?? endUs) - row.submitted_us));
  updateLife(life.children[0], row, endUs, scaleUs);
}

/** Return an ID whose middle is left out if it is long. IDs of one client often differ only at their end. */
function abbreviated(id) {
  const shown = printable(id);
  return shown.length <= ID_CHARS_MAX ? shown : `${shown.slice(0, ID_HEAD)}…${shown.slice(ID_HEAD + 1 - ID_CHARS_MAX)}`;
}

function detailsOf(/** @type {Server.RequestRow} */ row, group) {
  const found = [];
  if (row.model !== group) found.push(row.model);
  if (row.lora_name) found.push(`adapter ${row.lora_name}`);
  if (row.attempt > 1) found.push(`attempt ${row.attempt}`);
  return found.join(", ");
}

function reasonOf(/** @type {Server.RequestRow} */ row) {
  return row.state === "finished" && row.reason === "stop" ? "" : row.reason;
}

function updateLife(life, /** @type {Server.RequestRow} */ row, endUs, scaleUs) {
  put(life, "data-open", hasEnded(row.state) ? null : "true");
  reconcile(
    life,
    phasesOfRow(row, endUs),
    (span) => span.phase,
    (span) => h("i", { "data-phase": span.phase }),
    (element, span) => setStyle(element, "--share", ((span.toUs - span.fromUs) / scaleUs).toFixed(4)),
  );
}

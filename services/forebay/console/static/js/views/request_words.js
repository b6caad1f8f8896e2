/** Sentences about one request, in the words of `forebay explain`. */

import { h } from "../dom.js";
import { counted, dateTime, duration, whole } from "../format.js";
import { selectedName } from "../request_lanes.js";

const STATES = {
  submitted: "Submitted, and not applied by an owner yet",
  queued: "In the router's queue",
  encode: "Its images and videos are being encoded",
  remote_prefill: "Its prompt is being computed by a prefill worker",
  transfer: "Its KV is being fetched",
  prefill: "Its prompt is being computed",
  decode: "Its response is being generated",
  waiting: "Waiting for a worker",
  unknown: "Unknown after a divergence",
};

/**
 * Return what happened to a request, where, and how long it took.
 * nowUs: the newest time of the log
 */
export function headline(/** @type {Server.Explanation} */ explanation, /** @type {number} */ nowUs) {
  const { ending } = explanation;
  const last = explanation.routings.at(-1);
  const where = last ? ` on ${selectedName(last)}` : "";
  if (!ending) {
    const sinceUs = explanation.submitted?.now_us;
    const age = sinceUs ? `, ${duration(Math.max(0, nowUs - sinceUs))} after the submission` : "";
    const tokens = explanation.output_tokens ? `, ${counted(explanation.output_tokens, "output token")} so far` : "";
    const known = STATES[explanation.state] ?? explanation.state;
    return `${known}${last && explanation.state !== "waiting" ? where : ""}${age}${tokens}.`;
  }
  if (ending.state === "answered") return `Route query: would be routed to ${last ? selectedName(last) : "no worker"}.`;
  const after = ending.duration_us === null ? "" : ` after ${duration(ending.duration_us)}`;
  const attempts = ending.attempt > 1 ? `, at attempt ${ending.attempt}` : "";
  if (ending.state === "finished") return `Finished${where}${after}${attempts}${results(ending, explanation.first_token)}.`;
  const reason = ending.reason ? ` (${ending.reason.replaceAll("_", " ")})` : "";
  const place = ending.state === "rejected" ? "" : where;
  const text = ending.text ? `: ${ending.text}` : "";
  const name = ending.state[0].toUpperCase() + ending.state.slice(1);
  return `${name}${reason}${place}${after}${attempts}${text}`;
}

function results(/** @type {Server.Ending} */ ending, /** @type {Server.FirstTokenTiming | null} */ first_token) {
  const tokens = ending.output_tokens === null ? "" : `: ${counted(ending.output_tokens, "output token")}`;
  const us = first_token?.ttft_us;
  if (us === null || us === undefined) return tokens;
  return `${tokens}${tokens ? "," : ":"} the first after ${duration(us)}`;
}

/**
 * Return facts about the submission as names and values.
 * row: null if it is unknown
 * traceUrl: address of a trace with `{trace_id}`; empty for none
 */
export function submissionFacts(
  /** @type {Server.Explanation} */ explanation,
  /** @type {Server.RequestRow | null} */ row,
  /** @type {string} */ traceUrl,
) {
  const { submitted, first_token } = explanation;
  if (!submitted) return [];
  /** @type {[string, string | Element][]} */
  const facts = [["Model", submitted.model]];
  const pools = new Set(explanation.routings.map((one) => one.pool));
  if (submitted.lora_name) facts.push(["Adapter", submitted.lora_name]);
  if (pools.size) facts.push([pools.size === 1 ? "Pool" : "Pools", [...pools].join(", ")]);
  facts.push(["Prompt", `${counted(submitted.prompt_tokens, "token")} in ${counted(submitted.full_blocks, "full block")}`]);
  if (submitted.anonymised) facts.push(["Content", "anonymised"]);
  if (first_token) facts.push(["Cached", cachedText(first_token)]);
  if (first_token && Object.keys(first_token.loads_us).length) facts.push(["Loaded", loadedText(first_token)]);
  if (submitted.max_tokens !== null) facts.push(["Output", `at most ${counted(submitted.max_tokens, "token")}`]);
  if (row?.itl_us) facts.push(["ITL", `${duration(row.itl_us)} on average`]);
  if (submitted.timeout_us !== null) facts.push(["Deadline", `after ${duration(submitted.timeout_us)}`]);
  if (submitted.now_us !== null) facts.push(["Submitted", `${dateTime(submitted.now_us)} UTC`]);
  if (submitted.tenant) facts.push(["Tenant", submitted.tenant]);
  if (submitted.key_id) facts.push(["API key", submitted.key_id]);
  if (submitted.traceparent) facts.push(["Trace context", submitted.traceparent]);
  if (submitted.trace_id && traceUrl) {
    const href = traceUrl.replaceAll("{trace_id}", submitted.trace_id);
    facts.push(["Trace", h("a", { href, target: "_blank", rel: "noreferrer" }, submitted.trace_id)]);
  }
  const hints = Object.entries(submitted.hints).map(([name, value]) => `${name} ${valueText(value)}`);
  if (hints.length) facts.push(["Hints", hints.join(", ")]);
  facts.push(["Tie seed", submitted.tie_seed]);
  return facts;
}

function cachedText(/** @type {Server.FirstTokenTiming} */ { cached_tokens, predicted_tokens, transferred_bytes }) {
  if (transferred_bytes) return `${whole(cached_tokens)} prompt tokens not computed on the decode worker`;
  const expected = predicted_tokens === null ? "" : `; the router expected ${whole(predicted_tokens)}`;
  return `${counted(cached_tokens, "prompt token")} at the engine${expected}`;
}

const PLACES = { host: "host memory", disk: "disk", store: "the shared store" };

function loadedText(/** @type {Server.FirstTokenTiming} */ { sources, loads_us, saved_us }) {
  const loads = Object.entries(loads_us).map(([tier, us]) => {
    const place = PLACES[tier];
    return `${counted(sources[tier] ?? 0, "token")} from ${place} in ${duration(us)}`;
  });
  if (saved_us === null) return loads.join(", ");
  const compared = saved_us < 0 ? "later" : "sooner";
  return `${loads.join(", ")}; ${duration(Math.abs(saved_us))} ${compared} than by computing them`;
}

/** Return a setting or a hint as text. */
export function valueText(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Return sentences about how far the explanation can be trusted. */
export function trustNotes(/** @type {Server.Explanation} */ { divergence, derived_from, derived_to, timeline, unverified }) {
  const skipped = Object.entries(unverified).map(([name, count]) => `Not verified: ${count} ${name}.`);
  if (divergence) {
    const where = timeline.length ? "during this request" : "before this request";
    return [
      `Divergence at journal offset ${whole(divergence.offset)}, ${where}: ${divergence.reason}`,
      "Later events cannot be explained. forebay verify shows the divergence in detail.",
      ...skipped,
    ];
  }
  if (derived_to <= derived_from) return skipped;
  const offsets = `journal offsets ${whole(derived_from)} to ${whole(derived_to - 1)}`;
  return [`Verified: ${offsets} derived again, every record equal.`, ...skipped];
}

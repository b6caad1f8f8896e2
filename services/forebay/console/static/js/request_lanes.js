/** The course of a request as lanes: one for the router, and one per worker, with the phases that it spent there. */

import { PHASES } from "./phases.js";

/**
 * Times count from the submission. The name of a lane is `router` or a worker rank.
 * @typedef {{ phase: string, fromUs: number, toUs: number, label: string }} Span
 * @typedef {{ atUs: number, kind: string, label: string }} Mark
 * @typedef {{ name: string, spans: Span[], marks: Mark[] }} Lane
 * @typedef {{ lanes: Lane[], totalUs: number, firstTokenUs: number | null }} Course
 */

const PHASE_OF_STAGE = { encode: "encode", prefill: "prefill", decode: "transfer", aggregated: "prefill" };
const FAILURES = { worker_lost: "lost", not_encoded: "failed", not_prefilled: "failed", not_transferred: "failed" };
const ENDS_STAGE = new Set(["encoded", "prefilled", ...Object.keys(FAILURES)]);
const ENDS_REQUEST = new Set(["finished", "failed", "aborted", "rejected", "answered"]);
const EVENTS = new Set(["worker_suspect", "worker_recovered", "worker_draining", "holder_lost", "cancel_requested"]);

/** Return the name of the selected rank of a routing decision. */
export function selectedName(/** @type {Server.Routing} */ routing) {
  const { worker_id, rank } = routing.candidates[routing.winner].seen;
  return routing.candidates.some((one) => one.seen.rank) ? `${worker_id}/${rank}` : worker_id;
}

class Follower {
  /** @type {Map<string, Lane>} */ lanes = new Map();
  /** @type {{ lane: Lane, phase: string, fromUs: number } | null} */ #open = null;

  lane(/** @type {string} */ name) {
    const found = this.lanes.get(name) ?? { name, spans: [], marks: [] };
    this.lanes.set(name, found);
    return found;
  }

  get current() {
    return this.#open?.lane ?? null;
  }

  get phase() {
    return this.#open?.phase ?? null;
  }

  get fromUs() {
    return this.#open?.fromUs ?? 0;
  }

  enter(lane, phase, atUs) {
    this.leave(atUs);
    this.#open = { lane: this.lane(lane), phase, fromUs: atUs };
  }

  leave(atUs) {
    if (this.#open && atUs > this.#open.fromUs) {
      const { lane, phase, fromUs } = this.#open;
      lane.spans.push({ phase, fromUs, toUs: atUs, label: PHASES[phase] });
    }
    this.#open = null;
  }
}

/**
 * Return the course of a request.
 * nowUs: time until which an active request is shown, on the owner's clock
 */
export function courseOf(/** @type {Server.Explanation} */ explanation, nowUs) {
  const follower = new Follower();
  const routings = new Map(explanation.routings.map((one) => [one.offset, one]));
  const entries = explanation.timeline.filter((one) => one.counted && one.after_us !== null);
  let firstTokenUs = null;
  let totalUs = 0;
  for (const entry of entries) {
    totalUs = Math.max(totalUs, entry.after_us ?? 0);
    if (entry.what === "first_token") firstTokenUs ??= entry.after_us;
    follow(follower, entry, routings.get(entry.offset), explanation.first_token);
  }
  const zeroUs = entries.length ? (entries[0].now_us ?? nowUs) - (entries[0].after_us ?? 0) : nowUs;
  if (!explanation.ending && explanation.state !== "unknown") totalUs = Math.max(totalUs, nowUs - zeroUs);
  follower.leave(totalUs);
  const lanes = [...follower.lanes.values()].filter((lane) => lane.spans.length || lane.marks.length);
  return { lanes, totalUs, firstTokenUs };
}

function follow(/** @type {Follower} */ follower, /** @type {Server.TimelineEntry} */ entry, /** @type {Server.Routing | undefined} */ routing, first) {
  const atUs = entry.after_us;
  if (entry.what === "submitted") follower.enter("router", "queue", atUs);
  else if (entry.what === "routed" && routing) follower.enter(selectedName(routing), PHASE_OF_STAGE[routing.stage], atUs);
  else if (entry.what === "first_token") reachFirstToken(follower, atUs, first);
  else if (ENDS_STAGE.has(entry.what)) {
    if (FAILURES[entry.what]) mark(follower, FAILURES[entry.what], entry);
    follower.enter("router", "wait", atUs);
  } else if (ENDS_REQUEST.has(entry.what)) {
    if (entry.what === "failed" || entry.what === "aborted") mark(follower, "failed", entry);
    follower.leave(atUs);
  } else if (EVENTS.has(entry.what)) mark(follower, "event", entry);
}

/** Divide the time until the first token of a decode worker, which fetches the KV first. */
function reachFirstToken(/** @type {Follower} */ follower, atUs, /** @type {Server.FirstTokenTiming | null} */ first) {
  const lane = follower.current;
  if (!lane) return;
  if (follower.phase === "transfer" && first?.transfer_us) {
    follower.enter(lane.name, "decode", Math.min(atUs, follower.fromUs + first.transfer_us));
  }
  follower.enter(lane.name, "decode", atUs);
}

function mark(/** @type {Follower} */ follower, kind, /** @type {Server.TimelineEntry} */ entry) {
  const lane = follower.current ?? follower.lane("router");
  lane.marks.push({ atUs: entry.after_us ?? 0, kind, label: entry.text });
}

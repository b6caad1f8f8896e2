/** Phases of a request: their names, and the time that a request spent in each. */

export const PHASES = {
  queue: "in the queue",
  encode: "encode",
  prefill: "prefill",
  wait: "waiting for a worker",
  transfer: "KV transfer",
  decode: "decode",
};

const ENDED = new Set(["finished", "failed", "rejected", "repeated", "aborted", "cancelled", "answered"]);

export function hasEnded(state) {
  return ENDED.has(state);
}

/**
 * Return the phases of a request in a list. A list has no stages, so everything between the routing decision and the
 * first token counts as prefill.
 * nowUs: time until which an active request is shown
 */
export function phasesOfRow(/** @type {Server.RequestRow} */ row, /** @type {number} */ nowUs) {
  const begin = row.submitted_us;
  const end = Math.max(begin, row.ended_us ?? nowUs);
  const routed = Math.min(end, row.routed_us ?? end);
  const first = Math.min(end, row.first_token_us ?? end);
  /** @type {Array<[keyof PHASES, number, number]>} */ const found = [
    ["queue", begin, routed],
    ["prefill", routed, first],
    ["decode", first, end],
  ];
  return found
    .filter(([, from, to]) => to > from)
    .map(([phase, from, to]) => ({ phase, fromUs: from - begin, toUs: to - begin, label: PHASES[phase] }));
}

/** Return a round number of microseconds that is at least `us`: 1, 2 or 5 times a power of ten. */
export function roundUp(us) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, us)));
  return power * ([1, 2, 5].find((step) => step * power >= us) ?? 10);
}

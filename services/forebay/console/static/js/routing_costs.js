/** The measure by which a routing decision compared its candidates, in parts that can be drawn. */

/**
 * CostPart
 * Measure
 * - title: what the bars show
 * - partsOf: parts of a candidate's bar, which add up to its cost
 * - creditOf: blocks by which cached blocks reduced the cost
 */

export const PART_NAMES = {
  prefill: "blocks to prefill",
  decode: "decode blocks",
  active: "active requests",
  eviction: "evicted blocks",
  product: "blocks to prefill, times decode blocks plus 1",
  requests: "active requests",
};

const BY_REQUESTS = new Set(["least-loaded", "power-of-two"]);
const BY_TURN = new Set(["round-robin", "random"]);

/** Return the measure of a routing decision; null if the policy compares nothing. */
export function measureOf({ mode, config }) {
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
function partsOf(config, { prefill_blocks, overlap_credit, decode_blocks, active_requests, taint_factor, eviction_cost }) {
  const weight = (config.decode_active_request_weight ?? 0) * taint_factor;
  const isCreditedToDecode = creditsDecode(config);
  const scale = (config.prefill_load_scale ?? 1) * taint_factor;
  const prefill = scale * Math.max(prefill_blocks - overlap_credit, 0);
  const decode = (isCreditedToDecode ? Math.max(decode_blocks - overlap_credit, 0) : decode_blocks) * taint_factor;
  const parts = [
    { kind: "prefill", value: isCreditedToDecode ? 0 : prefill },
    { kind: "decode", value: decode },
    { kind: "active", value: weight * active_requests },
    { kind: "eviction", value: (isCreditedToDecode ? taint_factor : scale) * (eviction_cost ?? 0) },
  ];
  return parts.filter((part) => part.value > 0);
}

function creditOf(config, { prefill_blocks, overlap_credit, decode_blocks, taint_factor }) {
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
 * Returns indexes of the candidates
 */
export function orderOf({ candidates, winner }) {
  const place = (at) => (at === winner ? -1 : at);
  return candidates
    .map((_, at) => at)
    .sort((a, b) => candidates[a].cost - candidates[b].cost || place(a) - place(b));
}

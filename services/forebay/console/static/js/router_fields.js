/**
 * Fields of a pool's configuration that a comparison can change.
 *
 * @module router_fields
 */

/** Paths of the fields, as `forebay replay diff --set` accepts them. */
export const FIELDS = [
  "mode",
  "selection_policy",
  "overlap_score_credit",
  "overlap_score_credit_decay",
  "prefill_load_scale",
  "host_cache_hit_weight",
  "disk_cache_hit_weight",
  "decode_active_request_weight",
  "temperature",
  "track_prefill_tokens",
  "track_active_blocks",
  "track_output_blocks",
  "assume_kv_reuse",
  "use_kv_events",
  "ttl_s",
  "approximate_blocks_max",
  "predicted_ttl_s",
  "session_ttl_s",
  "session_mode",
  "busy.active_decode_blocks_threshold",
  "busy.active_prefill_tokens_threshold",
  "busy.active_prefill_tokens_threshold_frac",
  "queue.threshold",
  "queue.policy",
  "queue.classes",
  "queue.run_ahead",
  "queue.depth",
  "queue.timeout_s",
  "disagg.policy",
  "disagg.max_local_prefill_length",
  "disagg.max_prefill_queue_size",
  "disagg.eff_isl_threshold",
  "disagg.eff_isl_ratio_threshold",
  "disagg.prefill_busy_threshold",
  "disagg.decode_busy_threshold",
  "disagg.enforce",
  "shared_cache_hit_weight",
  "tier_credit",
  "eviction_weight",
  "attempts_max",
];

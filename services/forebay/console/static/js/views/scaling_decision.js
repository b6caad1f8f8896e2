/** One decision of the planner, in words. */

import { h, put, reconcile, replace, setText } from "../dom.js";
import { dateTime, whole } from "../format.js";
import { recordButton } from "./record_dialog.js";

/** What became of a decision, with its tone. */
const OUTCOMES = {
  applied: ["good", "applied", "All pools reached the sizes of the decision."],
  partly_applied: ["warn", "partly applied", "Some pools did not reach the sizes of the decision."],
  refused: ["bad", "refused", "Nothing was changed."],
  open: ["run", "open", "At least one pool has no reply of its actuator yet."],
  no_reply: ["bad", "no reply", "At least one pool had no reply of an actuator in time, so the planner decided again."],
  advisory: ["soft", "advisory", "The planner only records its decisions."],
  stale: ["soft", "stale", "A record that the planner did not know came before the decision, so it has no effect."],
  unchanged: ["soft", "unchanged", "The decision keeps all sizes."],
};

/** Why a pool has its size. */
const REASONS = {
  scale_up: "The method proposes more workers.",
  scale_down: "The method proposes fewer workers.",
  hold: "The method proposes the present size.",
  manual: "An operator has set the size.",
  paused: "An operator has paused the planner.",
  no_observation: "The newest observation does not have the pool.",
  no_demand: "There is no forecast that knows the newest observation, or it has no usable numbers.",
  no_profile: "The pool has no profile of the stage that it computes.",
  profile_exceeded: "The forecast lies outside of the profile, so the nearest measured point was used.",
  target_unattainable: "One request alone misses a target, or too many requests do with each simulated size.",
  insufficient_data: "The workers have not reported enough load and latency yet.",
  in_progress: "The last change of the pool has no reply yet.",
  starting: "Workers of the previous decision still start.",
  cooldown: "The size would change in the opposite direction too soon after the last change.",
  consolidation_refused: "With one worker less, the estimated latency or KV would miss its limit.",
  limited: "The proposal exceeds the largest change, or the smallest or largest size.",
  gpu_budget: "The sizes of all pools together exceed or fall short of the GPU budget.",
  budget_below_minimum: "The GPU budget does not suffice for the smallest sizes of all pools.",
};

export function decisionItem() {
  return h(
    "li",
    { class: "decision" },
    h("span", { class: "num when" }),
    h("span", { class: "state outcome" }),
    h("ul", { class: "choices" }),
    h("span"),
  );
}

/**
 * Show a decision in an item.
 * decision: a DecisionEntry
 */
export function updateDecision(item, decision, api) {
  const [when, outcome, choices, record] = item.children;
  const [tone, name, text] = OUTCOMES[decision.outcome] ?? ["soft", decision.outcome, ""];
  const isDifferent = decision.verification === "different";
  setText(when, dateTime(decision.at_us));
  put(outcome, "data-tone", isDifferent ? "bad" : tone);
  put(outcome, "title", text);
  setText(outcome, isDifferent ? `${name}, does not follow from the records` : name);
  const replies = decision.replies.filter((one) => one.message);
  reconcile(
    choices,
    [...decision.pools, ...replies],
    (one) => (one.pool ? `${one.group}/${one.pool}` : `${one.actuator} ${one.at_us}`),
    () => h("li"),
    (element, one) => replace(element, one.pool ? choice(one) : `${one.actuator}: ${one.message}`),
  );
  if (!record.firstChild) record.append(recordButton(api, "scaling", decision.offset));
}

function choice({ group, pool, from_size, to_size, proposed, reason, reached }) {
  const isChanged = from_size !== to_size;
  const size = isChanged ? `${whole(from_size)} → ${whole(to_size)}` : `stays at ${whole(to_size)}`;
  const arrow = isChanged ? (to_size > from_size ? "▲ " : "▼ ") : "";
  const notes = [
    ...(proposed === to_size ? [] : [`proposed ${whole(proposed)}`]),
    ...(reached === null || reached === to_size ? [] : [`reached ${whole(reached)}`]),
  ];
  const more = notes.length ? ` (${notes.join(", ")})` : "";
  const why = REASONS[reason] ?? reason;
  return [h("b", {}, `${arrow}${group}/${pool} ${size}`), `${more}: `, h("span", { class: "soft" }, why)];
}

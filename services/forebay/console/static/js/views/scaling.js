/**
 * The planner at the chosen moment: its state, the sizes of the pools, observed and expected load, and its decisions.
 */

import { LineChart } from "../charts.js";
import { h, put, reconcile, replace, setText } from "../dom.js";
import { counted, dateTime, duration, number, percent, whole } from "../format.js";
import { emptyBox, factList, section } from "../parts.js";
import { recordButton } from "./record_dialog.js";

const READ_EVERY_MS = 2_000; // a planner decides every few seconds at most
const DECISIONS_SHOWN = 50;
const POINTS = 200; // of a chart

export class View {
  #context;
  #title = h("h1", {}, "Scaling");
  #about = h("p", { class: "soft" });
  #problems = h("div", { class: "notes", hidden: true });
  #facts = h("div", { class: "facts" });
  #open = section("Open changes");
  #pools = h("div", { class: "pools" });
  #decisions = h("ol", { class: "decisions" });
  #more = h("button", { type: "button", class: "button", onclick: () => this.#showAll() }, "Show all decisions");
  #empty = h("div");
  #body;
  /** @type {Server.ScalingView | null} */ #view = null;
  #limit = DECISIONS_SHOWN;
  #shown = "";
  #readMs = -Infinity;

  constructor(/** @type {Context} */ context) {
    this.#context = context;
    this.#body = h(
      "div",
      { hidden: true },
      this.#problems,
      this.#facts,
      section("Pools", this.#pools),
      this.#open,
      section("Decisions", this.#decisions, this.#more),
    );
    this.element = h("div", { class: "view scaling-view" }, this.#title, this.#about, this.#empty, this.#body);
  }

  async refresh(/** @type {AbortSignal} */ signal) {
    const { api, moment } = this.#context;
    const wanted = String(moment.atUs);
    const isDue = moment.atUs === null && performance.now() - this.#readMs >= READ_EVERY_MS;
    if (wanted === this.#shown && !isDue) return;
    this.#view = await api.get("v1/console/scaling", { at_us: moment.atUs }, signal);
    this.#shown = wanted;
    this.#readMs = performance.now();
    this.#show();
  }

  #showAll() {
    this.#limit = Infinity;
    this.#show();
  }

  #show() {
    if (!this.#view) return;
    const { status, decisions, history } = this.#view;
    put(this.#body, "hidden", !status);
    replace(this.#empty, !status && noPlanner());
    if (!status) {
      setText(this.#title, "Scaling");
      setText(this.#about, "");
      return;
    }
    setText(this.#title, titleOf(status));
    setText(this.#about, `Planner ${status.planner_id} since ${dateTime(status.since_us)} UTC, newest record ${dateTime(status.newest_us)} UTC.`);
    put(this.#problems, "hidden", status.problems.length === 0);
    replace(this.#problems, h("ul", {}, status.problems.map((one) => h("li", {}, one))));
    replace(this.#facts, factList(factsOf(status)));
    reconcile(
      this.#pools,
      status.pools,
      (pool) => `${pool.group}/${pool.pool}`,
      (pool) => new PoolCard(pool).element,
      (element, pool) => cards.get(element)?.update(pool, history[`${pool.group}/${pool.pool}`] ?? []),
    );
    put(this.#open, "hidden", status.open.length === 0);
    replace(this.#open, this.#open.firstElementChild, h("ul", {}, status.open.map(openItem)));
    const first = decisions.slice(0, this.#limit);
    reconcile(this.#decisions, first, (one) => one.offset, () => decisionItem(), (element, one) => updateDecision(element, one, this.#context.api));
    put(this.#more, "hidden", first.length === decisions.length);
    setText(this.#more, `Show all ${whole(decisions.length)} decisions`);
  }
}

/** @type {WeakMap<Element, PoolCard>} */
const cards = new WeakMap();

/** A pool: its size, its demand, and charts of both. */
class PoolCard {
  #size = h("b");
  #sizeText = h("span");
  #facts = h("div");
  #sizes = new LineChart({
    title: "Workers",
    format: whole,
    series: [{ name: "decided", colour: 0, isStepped: true }, { name: "ready", colour: 2, isStepped: true, isDashed: true }],
  });
  #load = new LineChart({
    title: "Requests per second",
    series: [{ name: "observed", colour: 0 }, { name: "forecast", colour: 1, isDashed: true }],
  });

  constructor(/** @type {Server.ScaledPoolStatus} */ { group, pool, role }) {
    const name = h("h3", {}, pool, h("span", { class: "soft" }, ` ${role} pool of ${group}`));
    const size = h("div", { class: "pool-size" }, this.#size, this.#sizeText);
    this.element = h(
      "section",
      { class: "card pool" },
      h("div", {}, name, size, this.#facts),
      h("div", { class: "charts" }, this.#sizes.element, this.#load.element),
    );
    cards.set(this.element, this);
  }

  update(/** @type {Server.ScaledPoolStatus} */ pool, /** @type {Server.PoolPoint[]} */ points) {
    setText(this.#size, pool.size === null ? "–" : counted(pool.size, "worker"));
    const manual = pool.manual_size === null ? "" : `; ${pool.manual_by} has set ${whole(pool.manual_size)}`;
    setText(this.#sizeText, `between ${whole(pool.min_size)} and ${whole(pool.max_size)}${manual}`);
    replace(this.#facts, factList(poolFacts(pool)));
    const { fromUs, intervalUs, at } = resampled(points);
    const values = (/** @type {keyof Server.PoolPoint} */ field) => at.map((one) => (one < 0 ? null : points[one][field]));
    this.#sizes.update({ fromUs, intervalUs, values: [values("size"), values("ready")] });
    this.#load.update({ fromUs, intervalUs, values: [values("requests_per_s"), values("forecast_per_s")] });
  }
}

/**
 * Return equal intervals over the time of points, each with the number of its newest point. A value lasts until the
 * next point.
 */
function resampled(/** @type {Server.PoolPoint[]} */ points) {
  if (!points.length) return { fromUs: 0, intervalUs: 1, at: [] };
  const fromUs = points[0].at_us;
  const count = Math.min(POINTS, Math.max(2, 2 * points.length));
  const intervalUs = Math.max(1, (points[points.length - 1].at_us - fromUs) / (count - 1));
  let newest = 0;
  const at = Array.from({ length: count }, (_, interval) => {
    while (newest + 1 < points.length && points[newest + 1].at_us <= fromUs + interval * intervalUs + 1) newest += 1;
    return newest;
  });
  return { fromUs, intervalUs, at };
}

function noPlanner() {
  return emptyBox(
    "No planner has written to this log.",
    h("p", { class: "soft" }, "A planner observes the load of the pools and decides how many workers each of them has. To start one in advisory mode, which only records its decisions:"),
    h("pre", { class: "command" }, "forebay planner run --kafka HOST:PORT --config planner.toml"),
  );
}

function titleOf(/** @type {Server.PlannerStatus} */ status) {
  const pools = counted(status.pools.length, "pool");
  if (status.stopped_us !== null) return `The planner has stopped. It scaled ${pools}.`;
  if (status.paused) return `${status.paused_by} has paused the planner. It scales ${pools}.`;
  if (status.advisory) return `The planner is advisory: it only records decisions about ${pools}.`;
  return `The planner is active. It scales ${pools}.`;
}

function factsOf(/** @type {Server.PlannerStatus} */ status) {
  const method = status.method === "throughput" ? `${status.method}, equations ${status.equations}` : status.method;
  const facts = [
    ["Method", method],
    ["Predictor", status.predictor],
    ["Targets", `TTFT ${number(status.ttft_ms)} ms, ITL ${number(status.itl_ms)} ms`],
    ["Interval", duration(status.interval_s * 1e6)],
    ["GPUs", status.gpu_budget ? `${whole(status.gpus)} of ${whole(status.gpu_budget)}` : whole(status.gpus)],
    ["Decisions", whole(status.decisions)],
  ];
  if (status.paused) facts.push(["Paused", `by ${status.paused_by} at ${dateTime(status.paused_us)} UTC`]);
  if (status.stopped_us !== null) facts.push(["Stopped", `${dateTime(status.stopped_us)} UTC`]);
  if (status.undecodable) facts.push(["Undecodable", counted(status.undecodable, "record")]);
  return facts;
}

function poolFacts(/** @type {Server.ScaledPoolStatus} */ pool) {
  const facts = [];
  if (pool.ready !== null) {
    facts.push(["Now", `${whole(pool.ready)} ready${pool.draining ? `, ${whole(pool.draining)} draining` : ""}, ${whole(pool.queued)} queued`]);
  }
  if (pool.observed) facts.push(["Observed", demandText(pool.observed)]);
  if (pool.forecast) facts.push(["Forecast", demandText(pool.forecast)]);
  if (pool.ttft_ms !== null || pool.itl_ms !== null) {
    facts.push(["Latency", `TTFT ${duration(us(pool.ttft_ms))}, ITL ${duration(us(pool.itl_ms))} on average`]);
  }
  return facts;
}

function us(ms) {
  return ms === null ? null : ms * 1_000;
}

function demandText(/** @type {Server.ObservedDemand} */ { requests_per_s, isl, osl, kv_hit_rate }) {
  const lengths = isl === null ? "" : `, ${whole(isl)} prompt and ${whole(osl)} output tokens`;
  const cached = kv_hit_rate === null ? "" : `, ${percent(kv_hit_rate)} cached`;
  return `${number(requests_per_s)} requests/s${lengths}${cached}`;
}

function openItem(/** @type {Server.OpenAction} */ { pool, size, decision, since_us, overdue }) {
  const late = overdue ? h("span", { "data-tone": "bad" }, " ▲ overdue") : "";
  return h("li", {}, `${pool} shall have ${counted(size, "worker")} since ${dateTime(since_us)} UTC (decision ${decision})`, late);
}

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

function decisionItem() {
  return h(
    "li",
    { class: "decision" },
    h("span", { class: "num when" }),
    h("span", { class: "state outcome" }),
    h("ul", { class: "choices" }),
    h("span"),
  );
}

function updateDecision(item, /** @type {Server.DecisionEntry} */ decision, api) {
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
    (one) => ("pool" in one ? `${one.group}/${one.pool}` : `${one.actuator} ${one.at_us}`),
    () => h("li"),
    (element, one) => replace(element, "pool" in one ? choice(one) : `${one.actuator}: ${one.message}`),
  );
  if (!record.firstChild) record.append(recordButton(api, "scaling", decision.offset));
}

function choice(/** @type {Server.PoolEntry} */ { group, pool, from_size, to_size, proposed, reason, reached }) {
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

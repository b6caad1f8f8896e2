/** The fleet at the chosen moment: problems, metrics, pools, workers, the owner and its input topics. */

import { LineChart } from "../charts.js";
import { h, put, reconcile, replace, setText } from "../dom.js";
import { compact, counted, dateTime, duration, number, percent, sentence, whole } from "../format.js";
import { commandLine, emptyBox, section } from "../parts.js";
import { createPools, createTopics } from "./fleet_tables.js";
import { WorkerTable } from "./fleet_workers.js";

const MINUTE_US = 60_000_000;
const WINDOWS = [5, 15]; // minutes
const POINTS = 100;
const LIVE_INTERVAL_MS = 1_000; // an interval of the charts takes at least three seconds
const PROBLEMS_MAX = 8; // the rest can be opened

export class View {
  #context;
  #headline = h("h1");
  #problems = h("ul");
  #furtherProblems = h("ul");
  #further = h("details", {}, h("summary"), this.#furtherProblems);
  #notes = h("div", { class: "notes", hidden: true }, this.#problems, this.#further);
  #hint = h("div");
  #hintKey = "";
  #summary = h("div", { class: "summary" });
  #owner = h("p");
  #charts;
  #pools;
  #workers;
  #topics = createTopics();
  #details; // empty before the first decision

  constructor(/** @type {Context} */ context) {
    this.#context = context;
    this.#charts = new FleetCharts(context);
    this.#pools = createPools();
    this.#workers = new WorkerTable(context);
    this.#details = [this.#summary, this.#charts.element, section("Pools", this.#pools.element), this.#workers.element];
    this.element = h(
      "div",
      { class: "fleet" },
      this.#headline,
      this.#notes,
      this.#hint,
      this.#details,
      section("Owner and input topics", this.#owner, this.#topics.element),
    );
  }

  async refresh(/** @type {AbortSignal} */ signal) {
    const { api, moment } = this.#context;
    const [fleet] = await Promise.all([
      api.get("v1/console/fleet", { at_us: moment.atUs }, signal),
      this.#charts.refresh(signal),
    ]);
    if (signal.aborted) return;
    const { status, workers, problems } = fleet;
    setText(this.#headline, headline(status, problems));
    this.#showProblems(problems);
    this.#showHint(status);
    this.#showSummary(status, workers);
    setText(this.#owner, ownerSentence(status));
    this.#pools.update(status.pools);
    this.#workers.update(status, workers);
    this.#topics.update(status.topics);
  }

  dispose() {
    this.#workers.dispose();
  }

  #showProblems(problems) {
    put(this.#notes, "hidden", !problems.length);
    const show = (list, texts) =>
      reconcile(list, texts, (text) => text, (text) => h("li", {}, sentence(text)));
    show(this.#problems, problems.slice(0, PROBLEMS_MAX));
    show(this.#furtherProblems, problems.slice(PROBLEMS_MAX));
    put(this.#further, "hidden", problems.length <= PROBLEMS_MAX);
    setText(this.#further.children[0], counted(problems.length - PROBLEMS_MAX, "further problem"));
  }

  #showHint(/** @type {Server.GroupStatus} */ status) {
    const routed = status.pools.reduce((sum, pool) => sum + pool.routed, 0);
    const key = status.owner.epoch < 0 ? "no owner" : routed + status.requests.in_flight ? "" : "no request";
    if (key === this.#hintKey) return;
    this.#hintKey = key;
    for (const part of this.#details) put(part, "hidden", key === "no owner");
    replace(this.#hint, key === "no owner" ? hintToServe(this.#context.info) : key && hintToSend());
  }

  #showSummary(/** @type {Server.GroupStatus} */ status, /** @type {Server.WorkerActivity[]} */ activities) {
    const ranks = status.workers.flatMap((worker) => worker.ranks);
    const total = (/** @type {keyof Server.RankStatus} */ name) =>
      ranks.reduce((sum, rank) => sum + (rank[name] ?? 0), 0);
    const used = total("kv_blocks_used");
    const blocks = total("kv_blocks_total");
    const phases = Object.entries(status.requests.by_phase).map(([phase, count]) => `${whole(Number(count))} ${phase}`);
    const known = activities.filter((one) => one.hit_rate !== null && one.first_tokens);
    const tokens = known.reduce((sum, one) => sum + one.first_tokens, 0);
    const tiles = [
      ["workers", whole(status.workers.length), workerStates(status.workers)],
      ["requests in flight", whole(status.requests.in_flight), phases.join(", ") || "none"],
      ["tokens to prefill", compact(total("prefill_tokens")), `${compact(total("decode_blocks"))} decode blocks`],
      ["KV blocks in use", blocks ? percent(used / blocks) : "–", `${compact(used)} of ${compact(blocks)}`],
      ["first tokens in the last minute", whole(activities.reduce((sum, one) => sum + one.first_tokens, 0)), hitRate(known, tokens)],
    ];
    const build = () => h("div", { class: "card" }, h("span"), h("b"), h("span", { class: "detail" }));
    reconcile(this.#summary, tiles, ([name]) => name, build, (tile, texts) =>
      texts.forEach((text, at) => setText(tile.children[at], text)),
    );
  }
}

function headline(/** @type {Server.GroupStatus} */ status, /** @type {string[]} */ problems) {
  const found = problems.length ? `, ${counted(problems.length, "problem")}` : "";
  if (!status.ready) return `Not ready for requests${found}.`;
  const ready = status.workers.filter((worker) => worker.state === "ready").length;
  const workers = ready === status.workers.length ? counted(ready, "worker") : `${whole(ready)} of ${counted(status.workers.length, "worker")}`;
  return `Ready: ${workers}, ${counted(status.requests.in_flight, "request")} in flight${found || ", no problems"}.`;
}

function ownerSentence(/** @type {Server.GroupStatus} */ { owner, group }) {
  if (owner.epoch < 0) return `No router has owned group ${group} yet.`;
  const since = owner.since_us === null ? "" : ` since ${dateTime(owner.since_us)} UTC`;
  const name = owner.owner_id || "A router whose claim is no longer on the log";
  const alive = {
    true: owner.heartbeat_age_s === null ? "It runs." : `Its newest heartbeat is ${duration(owner.heartbeat_age_s * 1e6)} old.`,
    false: "It sends no heartbeats any more.",
    null: "A log does not show whether it still runs.",
  }[String(owner.alive)];
  const names = owner.standbys?.join(", ");
  const standbys = owner.standbys === null ? "" : names ? ` Standbys: ${names}.` : " It has no standby.";
  return `${name} owns group ${group} in epoch ${whole(owner.epoch)}${since}. ${alive}${standbys}`;
}

function workerStates(/** @type {Server.WorkerStatus[]} */ workers) {
  const counts = new Map();
  for (const { state } of workers) counts.set(state, (counts.get(state) ?? 0) + 1);
  return [...counts].map(([state, count]) => `${whole(count)} ${state}`).join(", ") || "none";
}

/** tokens: number of their first tokens */
function hitRate(/** @type {Server.WorkerActivity[]} */ activities, tokens) {
  if (!tokens) return "no hit rate";
  return `${percent(activities.reduce((sum, one) => sum + (one.hit_rate ?? 0) * one.first_tokens, 0) / tokens)} mean hit rate`;
}

function hintToServe(/** @type {Server.ConsoleInfo} */ { kind, source }) {
  const start =
    kind === "kafka"
      ? [h("p", {}, "Start a router, a worker and an ingress on the same Kafka. The page shows them as soon as they join.")]
      : kind === "file"
        ? [h("p", {}, "Serve with this log. The page follows it:"), commandLine(`forebay up --workers 2 --log ${quoted(source)}`)]
        : [];
  return emptyBox("The log has no decisions yet.", start, kind !== "recording" && sendCommand());
}

function hintToSend() {
  return emptyBox("No request was routed so far.", sendCommand());
}

function sendCommand() {
  return [h("p", {}, "Send first requests:"), commandLine("forebay trace 'synthetic:requests=60,rate=6'")];
}

function quoted(path) {
  return /^[\w@%+=:,./-]+$/.test(path) ? path : `'${path.replaceAll("'", `'\\''`)}'`;
}

class FleetCharts {
  #context;
  #minutes = WINDOWS[0];
  #buttons;
  /** @type {Array<{ names: Array<Exclude<keyof Server.MetricSeries, "from_us" | "interval_us">>, chart: LineChart }>} */
  #charts;
  #shown = ""; // moment and window of the values in the charts
  #shownMs = 0;

  constructor(/** @type {Context} */ context) {
    this.#context = context;
    const perSecond = (value) => (value === null ? number(null) : `${number(value)}/s`);
    const percentiles = [{ name: "p50", colour: 0 }, { name: "p95", colour: 1, isDashed: true }];
    this.#charts = [
      { names: ["requests_per_s"], chart: new LineChart({ title: "Requests", format: perSecond, series: [{ name: "submitted", colour: 0 }] }) },
      { names: ["ttft_p50_us", "ttft_p95_us"], chart: new LineChart({ title: "Time to first token", format: duration, series: percentiles }) },
      { names: ["itl_p50_us", "itl_p95_us"], chart: new LineChart({ title: "Inter-token latency", format: duration, series: percentiles }) },
      {
        names: ["failed_per_s"],
        chart: new LineChart({ title: "Rejected, aborted and failed", format: perSecond, series: [{ name: "failed", colour: 1 }] }),
      },
    ];
    this.#buttons = WINDOWS.map((minutes) =>
      h("button", { type: "button", class: "button", onclick: () => this.#choose(minutes) }, `${minutes} min`),
    );
    this.#markChosen();
    this.element = h(
      "section",
      { class: "part" },
      h(
        "div",
        { class: "head" },
        h("h2", {}, "Load and latency"),
        h("div", { class: "row", role: "group", "aria-label": "Length of the charts" }, this.#buttons),
      ),
      h("div", { class: "charts" }, this.#charts.map(({ chart }) => chart.element)),
    );
  }

  /** Show the minutes before the chosen moment. While the page is live, read them once per second. */
  async refresh(/** @type {AbortSignal | undefined} */ signal = undefined) {
    const { api, moment, state } = this.#context;
    const key = `${moment.atUs} ${this.#minutes}`;
    const age = performance.now() - this.#shownMs;
    if (key === this.#shown && (moment.atUs !== null || age < LIVE_INTERVAL_MS)) return;
    const range = chartRange(state(), moment.atUs, this.#minutes * MINUTE_US);
    const series = await api.get("v1/console/series", { ...range, points: POINTS }, signal);
    if (signal?.aborted) return;
    this.#shown = key;
    this.#shownMs = performance.now();
    for (const { names, chart } of this.#charts) {
      chart.update({ fromUs: series.from_us, intervalUs: series.interval_us, values: names.map((name) => series[name]) });
    }
  }

  #choose(minutes) {
    this.#minutes = minutes;
    this.#markChosen();
    this.refresh().catch(() => {}); // the next refresh of the view reports the error
  }

  #markChosen() {
    WINDOWS.forEach((minutes, at) => put(this.#buttons[at], "aria-pressed", String(minutes === this.#minutes)));
  }
}

/**
 * Return the span of the charts. It ends at the moment, and ends at a whole interval, so that the last value is complete.
 */
function chartRange(/** @type {Server.CatalogState} */ { begin_us, end_us }, atUs, windowUs) {
  const end = atUs ?? end_us;
  const span = Math.max(1, Math.min(windowUs, end - begin_us));
  if (span < windowUs) return { from_us: begin_us, to_us: Math.max(end, begin_us + 1) };
  const interval = windowUs / POINTS;
  const to = Math.floor(end / interval) * interval;
  return { from_us: to - windowUs, to_us: to };
}

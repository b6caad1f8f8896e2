/** Charts of the minutes before the chosen moment. */

import { LineChart } from "../charts.js";
import { h, put } from "../dom.js";
import { duration, number } from "../format.js";

const MINUTE_US = 60_000_000;
const WINDOWS = [5, 15]; // minutes
const POINTS = 100;
const LIVE_INTERVAL_MS = 1_000; // an interval of the charts takes at least three seconds

export class FleetCharts {
  element;
  #context;
  #minutes = WINDOWS[0];
  #buttons;
  #charts;
  #shown = ""; // moment and window of the values in the charts
  #shownMs = 0;

  constructor(context) {
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
  async refresh(signal) {
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
 * state: CatalogState
 */
function chartRange({ begin_us, end_us }, atUs, windowUs) {
  const end = atUs ?? end_us;
  const span = Math.max(1, Math.min(windowUs, end - begin_us));
  if (span < windowUs) return { from_us: begin_us, to_us: Math.max(end, begin_us + 1) };
  const interval = windowUs / POINTS;
  const to = Math.floor(end / interval) * interval;
  return { from_us: to - windowUs, to_us: to };
}

/** Small line charts, drawn by uPlot, with their newest values in words. */

import { h, put, setText } from "./dom.js";
import { clock, dateTime, number } from "./format.js";

const HEIGHT = 92;
const FONT = "11px system-ui, sans-serif";
const DASHES = [4, 3];
const charts = new WeakMap(); // by element

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const element of document.querySelectorAll(".line-chart")) charts.get(element)?.draw();
});

/**
 * A line chart with a title, the newest values, and the values under the pointer or the keyboard's cursor.
 * series: name, colour (number of a curve colour), isDashed, and isStepped for a value that lasts until the next one
 * format: returns the text for a value with its unit
 */
export class LineChart {
  #title;
  #series;
  #format;
  /** @type {{ fromUs: number, intervalUs: number, values: Array<Array<number | null>> }} */
  #data = { fromUs: 0, intervalUs: 1, values: [] };
  /** @type {number | null} */ #cursor = null; // number of an interval
  #values;
  #time = h("span", { class: "chart-time" });
  #from = h("span");
  #to = h("span");
  #readout;
  #box;
  /** @type {uPlot | null} */ #plot = null;

  constructor({ title, series, format = number }) {
    this.#title = title;
    this.#series = series;
    this.#format = format;
    this.#values = series.map(() => h("b"));
    const legend = series.map((one, at) =>
      h("span", { class: "chart-value" }, series.length > 1 && [legendLine(one), `${one.name} `], this.#values[at]),
    );
    this.#readout = h("div", { class: "chart-readout" }, legend, this.#time);
    this.#box = h("div", { class: "chart-picture", role: "img" });
    const plot = h("div", { class: "chart-plot", tabindex: 0, role: "group", "aria-label": `${title}: arrow keys show values` }, this.#box);
    plot.addEventListener("keydown", (event) => this.#step(event));
    plot.addEventListener("blur", () => this.#moveTo(null));
    this.element = h(
      "figure",
      { class: "card line-chart" },
      h("figcaption", {}, title),
      this.#readout,
      plot,
      h("div", { class: "axis-x" }, this.#from, this.#to),
    );
    new ResizeObserver(() => this.#resize()).observe(this.#box);
    charts.set(this.element, this);
  }

  /**
   * fromUs: beginning of the first interval
   * values: a list per series, with a value per interval; null for an interval without one
   */
  update(/** @type {{ fromUs: number, intervalUs: number, values: Array<Array<number | null>> }} */ { fromUs, intervalUs, values }) {
    this.#data = { fromUs, intervalUs, values };
    const endUs = fromUs + this.#length * intervalUs;
    setText(this.#from, clock(fromUs).slice(0, 8));
    setText(this.#to, clock(endUs).slice(0, 8));
    put(this.#box, "aria-label", this.#alternative(endUs));
    this.#plot?.setData(this.#table());
    this.#showValues();
  }

  get #length() {
    return this.#data.values[0]?.length ?? 0;
  }

  /** Return the values as uPlot expects them. The end of the last interval is a point of its own. */
  #table() {
    const columns = this.#series.map((_, at) => this.#data.values[at] ?? []);
    return [Array.from({ length: this.#length + 1 }, (_, at) => at), ...columns.map((list) => [...list, list.at(-1) ?? null])];
  }

  #resize() {
    const width = this.#box.clientWidth;
    if (!width) return;
    if (this.#plot) this.#plot.setSize({ width, height: HEIGHT });
    else this.draw();
  }

  /** Draw the chart in the colours of the scheme. */
  draw() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const axis = { stroke: colour("soft"), font: FONT, ticks: { show: false }, grid: { stroke: colour("line"), width: 1 } };
    const series = this.#series.map((one, at) => ({
      stroke: colour(`curve-${one.colour}`),
      width: 1.6,
      dash: one.isDashed ? DASHES : undefined,
      fill: at === 0 ? `${colour(`curve-${one.colour}`)}24` : undefined,
      paths: one.isStepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
    }));
    const options = {
      width: this.#box.clientWidth,
      height: HEIGHT,
      padding: [8, 0, 4, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: false, range: () => [0, Math.max(1, this.#length)] }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.05 : 1] } },
      axes: [{ show: false }, { ...axis, size: 52, space: 26, values: (_, splits) => splits.map((one) => this.#format(one)) }],
      series: [{}, ...series],
      hooks: { setCursor: [(plot) => this.#follow(plot.cursor)] },
    };
    this.#plot?.destroy();
    this.#plot = new uPlot(options, this.#table(), this.#box);
  }

  /** Show the values under the pointer. uPlot also reports a cursor that the keyboard has moved. */
  #follow({ left, idx }) {
    const at = left < 0 || idx === null ? null : Math.min(idx, this.#length - 1);
    if (at === this.#cursor) return;
    this.#cursor = at;
    this.#showValues();
  }

  #step(event) {
    const last = this.#length - 1;
    const now = this.#cursor ?? last;
    const keys = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last, PageUp: now - 10, PageDown: now + 10 };
    if (event.key === "Escape") this.#moveTo(null);
    if (!(event.key in keys) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    put(this.#readout, "aria-live", "polite"); // only a user's step is read aloud, not each new value
    this.#moveTo(keys[event.key]);
  }

  #moveTo(cursor) {
    this.#cursor = cursor === null ? null : Math.max(0, Math.min(this.#length - 1, cursor));
    if (cursor === null) put(this.#readout, "aria-live", null);
    const left = this.#cursor === null ? -10 : (this.#plot?.valToPos(this.#cursor, "x") ?? -10);
    this.#plot?.setCursor({ left, top: cursor === null ? -10 : 0 }, false);
    this.#showValues();
  }

  #showValues() {
    const { values, fromUs, intervalUs } = this.#data;
    const at = this.#length ? Math.min(this.#cursor ?? newest(values), this.#length - 1) : -1;
    values.forEach((list, one) => setText(this.#values[one], this.#format(list[at] ?? null)));
    setText(this.#time, this.#cursor === null || at < 0 ? "" : clock(fromUs + at * intervalUs).slice(0, 8));
  }

  #alternative(endUs) {
    const { values, fromUs } = this.#data;
    const parts = values.map((list, at) => {
      const known = list.filter((value) => value !== null);
      const name = this.#series.length > 1 ? `${this.#series[at].name} ` : "";
      if (!known.length) return `${name}no data`;
      return `${name}from ${this.#format(Math.min(...known))} to ${this.#format(Math.max(...known))}`;
    });
    return `${this.#title} from ${dateTime(fromUs)} to ${dateTime(endUs)} UTC: ${parts.join("; ")}`;
  }
}

function legendLine({ colour, isDashed }) {
  return h("i", { class: `legend-line curve-${colour}${isDashed ? " dashed" : ""}`, "aria-hidden": "true" });
}

/** Return the number of the newest interval with a value. */
function newest(values) {
  return Math.max(...values.map((list) => list.findLastIndex((value) => value !== null)));
}

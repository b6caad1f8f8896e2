/**
 * Small line charts.
 *
 * @module charts
 */

import { h, put, setText, svg } from "./dom.js";
import { clock, dateTime, number } from "./format.js";

const WIDTH = 1_000; // units of the SVG, which is stretched to the width of its card
const HEIGHT = 100;
const STEPS = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10]; // maxima of the value axis, times a power of ten

/**
 * @typedef {object} ChartSeries
 * @property {string} name
 * @property {number} colour number of one of the curve colours
 * @property {boolean} [isDashed] whether a dashed line tells the series apart without colour
 * @property {boolean} [isStepped] whether a value lasts until the next one, for example a size
 */

/**
 * @typedef {object} ChartData
 * @property {number} fromUs beginning of the first interval
 * @property {number} intervalUs
 * @property {(number|null)[][]} values a list per series, with a value per interval; null for an interval without one
 */

/** A line chart with a title, the newest values, and the values under the pointer or the keyboard's cursor. */
export class LineChart {
  /** @type {HTMLElement} */ element;
  /** @type {ChartSeries[]} */ #series;
  /** @type {(value: number|null) => string} */ #format;
  /** @type {ChartData} */ #data = { fromUs: 0, intervalUs: 1, values: [] };
  /** @type {number|null} */ #cursor = null; // number of an interval
  #title;
  #paths;
  #areas;
  #values;
  #time = h("span", { class: "chart-time" });
  #line = svg("line", { class: "chart-cursor", y1: 0, y2: HEIGHT });
  #top = h("span", { class: "axis-top" });
  #from = h("span");
  #to = h("span");
  #picture;
  #readout;

  /**
   * @param {object} options
   * @param {string} options.title
   * @param {ChartSeries[]} options.series
   * @param {(value: number|null) => string} [options.format] text for a value with its unit
   */
  constructor({ title, series, format = number }) {
    this.#title = title;
    this.#series = series;
    this.#format = format;
    this.#paths = series.map((one) => svg("path", { class: `chart-line curve-${one.colour}${one.isDashed ? " dashed" : ""}` }));
    this.#areas = series.map((one) => svg("path", { class: `chart-area curve-${one.colour}` }));
    this.#values = series.map(() => h("b"));
    const grid = [0, 0.5, 1].map((at) => svg("line", { class: "chart-grid", x1: 0, x2: WIDTH, y1: at * HEIGHT, y2: at * HEIGHT }));
    this.#picture = svg(
      "svg",
      { role: "img", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" },
      ...[...grid, this.#areas[0], ...this.#paths, this.#line],
    );
    const legend = series.map((one, at) =>
      h("span", { class: "chart-value" }, series.length > 1 && [legendLine(one), `${one.name} `], this.#values[at]),
    );
    this.#readout = h("div", { class: "chart-readout" }, legend, this.#time);
    const plot = h("div", { class: "chart-plot", tabindex: 0, role: "group", "aria-label": `${title}: arrow keys show values` });
    plot.append(this.#top, this.#picture);
    plot.addEventListener("pointermove", (event) => this.#point(event));
    plot.addEventListener("pointerleave", () => this.#moveTo(null));
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
  }

  /**
   * Show other values.
   *
   * @param {ChartData} data
   */
  update(data) {
    this.#data = data;
    const all = data.values.flat().filter((value) => value !== null);
    const top = niceMaximum(Math.max(0, ...all));
    data.values.forEach((values, at) => {
      const { line, area } = pathOf(values, top, Boolean(this.#series[at].isStepped));
      put(this.#paths[at], "d", line);
      if (at === 0) put(this.#areas[at], "d", area);
    });
    const end = data.fromUs + this.#length * data.intervalUs;
    setText(this.#top, all.length ? this.#format(top) : "no data");
    setText(this.#from, clock(data.fromUs).slice(0, 8));
    setText(this.#to, clock(end).slice(0, 8));
    put(this.#picture, "aria-label", this.#alternative(end));
    this.#showValues();
  }

  /** @returns {number} number of intervals */
  get #length() {
    return this.#data.values[0]?.length ?? 0;
  }

  /** @param {PointerEvent} event */
  #point(event) {
    const box = this.#picture.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    this.#moveTo(Math.floor(share * this.#length));
  }

  /** @param {KeyboardEvent} event */
  #step(event) {
    const last = this.#length - 1;
    const now = this.#cursor ?? last;
    const keys = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last, PageUp: now - 10, PageDown: now + 10 };
    if (event.key === "Escape") this.#moveTo(null);
    if (!(event.key in keys) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    put(this.#readout, "aria-live", "polite"); // only a user's step is read aloud, not each new value
    this.#moveTo(keys[/** @type {keyof keys} */ (event.key)]);
  }

  /** @param {number|null} cursor */
  #moveTo(cursor) {
    this.#cursor = cursor === null ? null : Math.max(0, Math.min(this.#length - 1, cursor));
    if (cursor === null) put(this.#readout, "aria-live", null);
    this.#showValues();
  }

  #showValues() {
    const { values, fromUs, intervalUs } = this.#data;
    const at = this.#length ? (this.#cursor === null ? newest(values) : Math.min(this.#cursor, this.#length - 1)) : -1;
    values.forEach((list, one) => setText(this.#values[one], this.#format(list[at] ?? null)));
    setText(this.#time, this.#cursor === null || at < 0 ? "" : clock(fromUs + at * intervalUs).slice(0, 8));
    put(this.#line, "visibility", this.#cursor === null ? "hidden" : "visible");
    const x = ((at + 0.5) / Math.max(1, this.#length)) * WIDTH;
    put(this.#line, "x1", x.toFixed(1));
    put(this.#line, "x2", x.toFixed(1));
  }

  /**
   * Return the chart in words.
   *
   * @param {number} endUs
   */
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

/** @param {ChartSeries} series */
function legendLine({ colour, isDashed }) {
  const line = svg("line", { class: `chart-line curve-${colour}${isDashed ? " dashed" : ""}`, x1: 0, x2: 16, y1: 4, y2: 4 });
  return svg("svg", { class: "legend-line", width: 16, height: 8, "aria-hidden": "true" }, line);
}

/**
 * Return the number of the newest interval with a value.
 *
 * @param {(number|null)[][]} values
 */
function newest(values) {
  return Math.max(...values.map((list) => list.findLastIndex((value) => value !== null)));
}

/**
 * Return the path of a line, interrupted where a value is missing, and of the area below the line.
 *
 * @param {(number|null)[]} values
 * @param {number} top
 * @param {boolean} isStepped
 */
function pathOf(values, top, isStepped) {
  const step = WIDTH / Math.max(1, values.length);
  let line = "";
  let area = "";
  let begin = 0;
  values.forEach((value, at) => {
    if (value === null) return;
    const x = ((isStepped ? at : at + 0.5) * step).toFixed(1);
    const y = (HEIGHT * (1 - Math.max(0, value) / top)).toFixed(2);
    const isFirst = at === 0 || values[at - 1] === null;
    const isLast = at === values.length - 1 || values[at + 1] === null;
    if (isFirst) begin = line.length;
    line += isFirst ? `M${x} ${y}` : isStepped ? `H${x}V${y}` : `L${x} ${y}`;
    if (isStepped) line += `h${step.toFixed(1)}`;
    else if (isFirst && isLast) line += `m${(-step / 2).toFixed(1)} 0h${step.toFixed(1)}`; // a line as long as the interval
    if (isLast) area += `${line.slice(begin)}V${HEIGHT}H${line.slice(begin + 1).split(" ", 1)[0]}Z`;
  });
  return { line, area };
}

/**
 * Return the smallest round number that is not below a value.
 *
 * @param {number} value
 */
function niceMaximum(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return (STEPS.find((step) => step * power >= value) ?? 10) * power;
}

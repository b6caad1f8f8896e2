/** The markers above the time slider. */

import { h, put, reconcile, replace, setStyle, setText } from "./dom.js";
import { clock, counted } from "./format.js";
import { clusters, KINDS, kindOf, shapeOf, textOf } from "./markers.js";

const MARKER_PX = 18; // width of a marker with its margin
const TEXTS_MAX = 6; // of a merged marker
const LEAVE_MS = 200; // for moving the pointer from the marker to its text

/** A row of markers. It is one stop of the Tab key; arrow keys move between markers. */
export class MarkerTrack {
  #onChoose;
  #onResize;
  #row = h("div", { class: "track-row" });
  #outages = h("div", { class: "track-row", "aria-hidden": "true" });
  #bubble = h("div", { class: "track-bubble card", role: "tooltip", id: "marker-text", hidden: true });
  #leaving;
  /** @type {import("./markers.js").Cluster[]} */ #clusters = [];
  #width = 0;
  #pin = h("span", { class: "track-pin", hidden: true, title: "First moment of the comparison" }, "A");

  constructor(onChoose, onResize) {
    this.#onChoose = onChoose;
    this.#onResize = onResize;
    this.element = h("div", { class: "track", role: "group", "aria-label": "Markers" }, this.#outages, this.#row, this.#pin, this.#bubble);
    this.element.addEventListener("keydown", (event) => this.#onKey(event));
    this.element.addEventListener("pointerleave", () => this.#leave());
    new ResizeObserver(([entry]) => this.#resize(entry.contentRect.width)).observe(this.element);
    this.#bubble.addEventListener("pointerenter", () => clearTimeout(this.#leaving));
  }

  /** pinUs: first moment of a comparison */
  update(/** @type {Server.Marker[]} */ markers, beginUs, endUs, pinUs) {
    const places = Math.max(1, this.#width / MARKER_PX);
    this.#clusters = clusters(markers, beginUs, endUs, places);
    const key = (one) => `${one.markers[0].topic} ${one.markers[0].offset}`;
    reconcile(this.#row, this.#clusters, key, () => this.#create(), (button, cluster) => fill(button, cluster));
    const span = Math.max(1, endUs - beginUs);
    const outages = markers.filter((one) => one.outage_us > 0);
    reconcile(this.#outages, outages, (one) => String(one.offset), () => h("span", { class: "outage" }), (band, one) => {
      setStyle(band, "--share", ((one.at_us - one.outage_us - beginUs) / span).toFixed(5));
      setStyle(band, "--length", (one.outage_us / span).toFixed(5));
    });
    this.#setTabStop();
    put(this.#pin, "hidden", pinUs === null);
    if (pinUs !== null) setStyle(this.#pin, "--share", ((pinUs - beginUs) / span).toFixed(5));
  }

  #resize(width) {
    this.#width = width;
    this.#onResize();
  }

  #create() {
    const button = h("button", { type: "button", class: "marker", tabindex: -1 }, h("span"), h("span", { class: "count" }));
    const cluster = () => this.#clusters[[...this.#row.children].indexOf(button)];
    button.addEventListener("click", () => this.#onChoose(cluster().markers[0].at_us));
    button.addEventListener("pointerenter", () => this.#describe(button, cluster()));
    button.addEventListener("pointerleave", () => this.#leave());
    button.addEventListener("focus", () => {
      this.#setTabStop(button);
      this.#describe(button, cluster());
    });
    button.addEventListener("blur", () => this.#leave());
    return button;
  }

  /** wanted: the only marker that the Tab key reaches */
  #setTabStop(wanted) {
    const buttons = [...this.#row.children];
    const stop = wanted ?? buttons.find((button) => button.getAttribute("tabindex") === "0") ?? buttons[0];
    for (const button of buttons) put(button, "tabindex", button === stop ? "0" : "-1");
  }

  #onKey(event) {
    if (event.key === "Escape") put(this.#bubble, "hidden", true);
    const buttons = /** @type {HTMLElement[]} */ ([...this.#row.children]);
    const at = buttons.findIndex((one) => one === document.activeElement);
    const keys = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: buttons.length - 1 };
    if (at < 0 || !(event.key in keys)) return;
    event.preventDefault();
    buttons[keys[event.key]]?.focus();
  }

  #describe(button, /** @type {import("./markers.js").Cluster} */ { markers, share }) {
    clearTimeout(this.#leaving);
    const rest = markers.length - TEXTS_MAX;
    const lines = markers.slice(0, TEXTS_MAX).map((marker) =>
      h("p", {}, shapeOf(marker.kind), h("b", {}, `${clock(marker.at_us)} `), textOf(marker)),
    );
    replace(this.#bubble, lines, rest > 0 && h("p", { class: "soft" }, `and ${counted(rest, "further marker")}`));
    put(this.#bubble, "hidden", false);
    setStyle(this.#bubble, "--share", share.toFixed(4));
  }

  #leave() {
    clearTimeout(this.#leaving);
    this.#leaving = setTimeout(() => put(this.#bubble, "hidden", true), LEAVE_MS);
  }
}

export function createLegend() {
  const items = Object.keys(KINDS).map((kind) => h("li", {}, shapeOf(kind), KINDS[kind].label));
  return h("ul", { class: "marker-legend", "aria-label": "Shapes of the markers" }, items);
}

function fill(button, /** @type {import("./markers.js").Cluster} */ { markers, kind, share }) {
  setStyle(button, "--share", share.toFixed(5));
  if (button.getAttribute("data-kind") !== kind) {
    put(button, "data-kind", kind);
    replace(button.children[0], shapeOf(kind));
  }
  setText(button.children[1], markers.length > 1 ? String(markers.length) : "");
  const first = `${clock(markers[0].at_us)}: ${kindOf(kind).label}`;
  put(button, "aria-label", markers.length > 1 ? `${counted(markers.length, "marker")} from ${first}` : `${first}, ${textOf(markers[0])}`);
}

/** The time axis: markers as a table, and the comparison of two moments. */

import { h, put, reconcile, setText } from "../dom.js";
import { counted, dateTime, whole } from "../format.js";
import { createLegend } from "../marker_track.js";
import { kindOf, shapeOf, textOf } from "../markers.js";
import { linkTo } from "../moment.js";
import { section } from "../parts.js";
import { Table } from "../table.js";
import { Comparison } from "./comparison.js";

const MARKERS_MAX = 500;
const LIVE_INTERVAL_MS = 2_000;

export function create(context) {
  return new Time(context);
}

class Time {
  element;
  #markers = [];
  #context;
  #comparison;
  #kind = h("select", { onchange: () => this.#show() });
  #search = h("input", { type: "search", placeholder: "words of the text", oninput: () => this.#show() });
  #count = h("span", { class: "soft", role: "status" });
  #table;
  #readMs = -LIVE_INTERVAL_MS;

  constructor(context) {
    this.#context = context;
    this.#comparison = new Comparison(context);
    this.#table = new Table({
      label: "Markers",
      key: (marker) => `${marker.topic} ${marker.offset}`,
      sortedBy: "time",
      isDescending: true,
      columns: [
        { id: "time", label: "time (UTC)", isText: true, order: (marker) => marker.at_us, fill: (cell, marker) => this.#fillTime(cell, marker) },
        { id: "kind", label: "kind", isText: true, order: (marker) => kindOf(marker.kind).label, fill: fillKind },
        { id: "text", label: "event", isText: true, text: textOf },
        { id: "topic", label: "record", isText: true, text: (marker) => `${marker.topic} ${whole(marker.offset)}` },
      ],
    });
    this.element = h(
      "div",
      { class: "time" },
      h("h1", {}, "Time"),
      this.#comparison.element,
      section(
        "Markers",
        createLegend(),
        h("div", { class: "filters" }, h("label", {}, "Kind", this.#kind), h("label", {}, "Find", this.#search), this.#count),
        this.#table.element,
      ),
    );
  }

  async refresh(signal) {
    await Promise.all([this.#refreshMarkers(signal), this.#comparison.refresh(signal)]);
  }

  dispose() {}

  async #refreshMarkers(signal) {
    const { api, state } = this.#context;
    const { end_us } = state();
    if (performance.now() - this.#readMs >= LIVE_INTERVAL_MS) {
      const range = { from_us: 0, to_us: end_us + 1, limit: MARKERS_MAX };
      const { markers } = await api.get("v1/console/markers", range, signal);
      this.#markers = markers;
      this.#readMs = performance.now();
    }
    this.#show();
  }

  #show() {
    const kinds = ["", ...new Set(this.#markers.map(({ kind }) => kind))];
    const kind = this.#kind.value;
    if (kind && !kinds.includes(kind)) kinds.push(kind);
    reconcile(this.#kind, kinds, (one) => one, (one) => h("option", { value: one }, one ? kindOf(one).label : "all"));
    const wanted = this.#search.value.trim().toLowerCase();
    const shown = this.#markers.filter((one) => (!kind || one.kind === kind) && one.text.toLowerCase().includes(wanted));
    const all = this.#markers.length;
    setText(this.#count, shown.length === all ? counted(all, "marker") : `${whole(shown.length)} of ${counted(all, "marker")}`);
    this.#table.update(shown);
  }

  #fillTime(cell, marker) {
    if (!cell.firstElementChild) cell.append(h("a", { class: "num" }));
    const link = cell.firstElementChild;
    const { moment, state } = this.#context;
    const { view, argument, params } = moment.route;
    const atUs = Math.max(marker.at_us, state().begin_us); // the oldest moment that can be shown
    setText(link, dateTime(marker.at_us));
    put(link, "href", linkTo(view, argument, params, atUs));
    put(link, "aria-current", moment.atUs === atUs ? "time" : null);
  }
}

function fillKind(cell, { kind }) {
  if (cell.getAttribute("data-kind") === kind) return;
  put(cell, "data-kind", kind);
  cell.replaceChildren(h("span", { class: "state" }, shapeOf(kind), kindOf(kind).label));
}

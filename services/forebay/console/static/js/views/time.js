/** The time axis: markers as a table, and the comparison of two moments. */

import { h, put, reconcile, setText } from "../dom.js";
import { clock, counted, date, dateTime, duration, number, parseTime, whole } from "../format.js";
import { createLegend } from "../marker_track.js";
import { kindOf, shapeOf, textOf } from "../markers.js";
import { linkTo } from "../moment.js";
import { section } from "../parts.js";
import { Table } from "../table.js";

const LIVE_INTERVAL_MS = 2_000; // the state of two moments takes up to a second to derive
const MARKERS_MAX = 500;

export class View {
  /** @type {Server.Marker[]} */ #markers = [];
  #context;
  #comparison;
  #kind = h("select", { onchange: () => this.#show() });
  #search = h("input", { type: "search", placeholder: "words of the text", oninput: () => this.#show() });
  #count = h("span", { class: "soft", role: "status" });
  #table;
  #readMs = -LIVE_INTERVAL_MS;

  constructor(/** @type {Context} */ context) {
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

  async refresh(/** @type {AbortSignal} */ signal) {
    await Promise.all([this.#refreshMarkers(signal), this.#comparison.refresh(signal)]);
  }

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

  #fillTime(cell, /** @type {Server.Marker} */ marker) {
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

function fillKind(cell, /** @type {Server.Marker} */ { kind }) {
  if (cell.getAttribute("data-kind") === kind) return;
  put(cell, "data-kind", kind);
  cell.replaceChildren(h("span", { class: "state" }, shapeOf(kind), kindOf(kind).label));
}

/** @type {Array<[keyof Server.MomentSummary, string]>} */
const TOTALS = [
  ["workers", "workers"],
  ["ready", "ready workers"],
  ["active_requests", "active requests"],
  ["queued_requests", "queued requests"],
  ["prefill_tokens", "tokens to prefill"],
  ["decode_blocks", "KV blocks of active requests"],
  ["device_blocks", "blocks cached on devices"],
];

/** Two moments, their totals, and their differences in sentences. */
class Comparison {
  #context;
  #a;
  #b;
  #problem = h("p", { class: "entry-problem", role: "alert", hidden: true });
  #summary = h("p");
  #result = h("div", { class: "pair comparison", hidden: true });
  #totals;
  #changes;
  #readMs = -LIVE_INTERVAL_MS;
  #shown = "";

  constructor(/** @type {Context} */ context) {
    this.#context = context;
    this.#a = createInput("first moment");
    this.#b = createInput("the moment of the time slider");
    this.#totals = new Table({
      label: "Totals at both moments",
      key: (row) => row.label,
      columns: [
        { id: "label", label: "total", isText: true, text: (row) => row.label },
        { id: "before", label: "earlier", text: (row) => row.before },
        { id: "after", label: "later", text: (row) => row.after },
      ],
    });
    this.#changes = new Table({
      label: "Changes",
      key: (/** @type {Server.MomentChange & { key: number }} */ change) => change.key,
      columns: [
        { id: "kind", label: "kind", isText: true, text: (change) => change.kind, order: (change) => change.kind },
        { id: "subject", label: "change", isText: true, text: (change) => change.subject },
        { id: "before", label: "earlier", isText: true, text: (change) => change.before },
        { id: "after", label: "later", isText: true, text: (change) => change.after },
      ],
    });
    this.#result.append(this.#totals.element, this.#changes.element);
    const form = h(
      "form",
      { class: "filters", onsubmit: (event) => this.#submit(event) },
      h("label", {}, "From", this.#a, h("button", { type: "button", class: "button", onclick: () => this.#take("a") }, "Shown moment")),
      h("label", {}, "To", this.#b, h("button", { type: "button", class: "button", onclick: () => this.#take("b") }, "Shown moment")),
      h("button", { type: "submit", class: "button primary" }, "Compare"),
    );
    this.element = section("Compare two moments", form, this.#problem, this.#summary, this.#result);
  }

  async refresh(/** @type {AbortSignal} */ signal) {
    const { api, moment, state } = this.#context;
    const a = timeOf(moment.route.params.a);
    const b = timeOf(moment.route.params.b);
    const key = `${a} ${b} ${moment.atUs}`;
    if (key !== this.#shown) this.#showTimes(a, b);
    if (a === null) {
      put(this.#result, "hidden", true);
      this.#shown = key;
      setText(this.#summary, "Choose the first moment, then a second one with the time slider.");
      return;
    }
    const isLive = b === null && moment.atUs === null;
    const isDue = performance.now() - this.#readMs >= LIVE_INTERVAL_MS;
    if (key === this.#shown && !(isLive && isDue)) return;
    if (key !== this.#shown) setText(this.#summary, "Comparing …");
    const other = b ?? moment.atUs ?? state().end_us;
    const found = await api.get("v1/console/compare", { a_us: a, b_us: other }, signal);
    if (signal.aborted) return;
    this.#shown = key;
    this.#readMs = performance.now();
    put(this.#result, "hidden", false);
    this.#showResult(found, a, other, b === null);
  }

  /** isFollowing: whether the second moment is the one of the time slider */
  #showResult(/** @type {Server.MomentComparison} */ { a: earlier, b: later, changes, omitted }, a, b, isFollowing) {
    const [from, to] = a <= b ? [a, b] : [b, a];
    const format = date(from) === date(to) ? clock : dateTime;
    const count = changes.length ? counted(changes.length, "change") : "No changes";
    const more = Object.entries(omitted ?? {}).map(([kind, hidden]) => `${whole(Number(hidden))} of kind ${kind}`);
    const further = more.length ? ` Not listed: ${more.join(", ")}.` : "";
    const hint = isFollowing ? " Move the time slider to compare with another moment." : "";
    const span = `${duration(to - from)}, from ${format(from)} to ${format(to)} UTC`;
    setText(this.#summary, `${count} in ${span}.${further}${hint}`);
    const owner = (/** @type {Server.MomentSummary} */ one) => `${one.owner_id || "unknown"}, epoch ${whole(one.owner_epoch)}`;
    this.#totals.update([
      { label: "owner", before: owner(earlier), after: owner(later) },
      ...TOTALS.map(([name, label]) => ({ label, before: number(earlier[name]), after: number(later[name]) })),
    ]);
    this.#changes.update(changes.map((change, at) => ({ ...change, key: at })));
  }

  #showTimes(a, b) {
    put(this.#a, "value", a === null ? "" : dateTime(a));
    put(this.#b, "value", b === null ? "" : dateTime(b));
  }

  /** Use the moment that the page shows as one of the two moments. */
  #take(which) {
    const { moment, state, navigate } = this.#context;
    navigate("time", "", { ...moment.route.params, [which]: moment.atUs ?? state().end_us });
  }

  #submit(event) {
    event.preventDefault();
    const { moment, state, navigate } = this.#context;
    const nearUs = moment.atUs ?? state().end_us;
    const typed = [this.#a, this.#b].map((input) => input.value.trim());
    const [a, b] = typed.map((value) => (value ? parseTime(value, nearUs) : null));
    const wrong = typed.find((value, at) => value && [a, b][at] === null) ?? (typed[0] ? undefined : "");
    put(this.#problem, "hidden", wrong === undefined);
    if (wrong === undefined) navigate("time", "", { a, b });
    else setText(this.#problem, wrong ? `"${wrong}" is not a time. Enter for example 14:03:07 or -5m.` : "Enter the first moment.");
  }
}

function createInput(placeholder) {
  return h("input", { type: "text", class: "moment-entry", placeholder, autocomplete: "off", spellcheck: "false" });
}

function timeOf(param) {
  return /^\d{1,16}$/.test(param ?? "") ? Number(param) : null;
}

/**
 * The comparison of two moments. The first one is parameter `a` of the fragment. The second one is parameter `b`, or the
 * moment of the time slider without it.
 */

import { h, put, setText } from "../dom.js";
import { clock, counted, date, dateTime, duration, number, parseTime, whole } from "../format.js";
import { section } from "../parts.js";
import { Table } from "../table.js";

const LIVE_INTERVAL_MS = 2_000; // the state of two moments takes up to a second to derive

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
export class Comparison {
  element;
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

  constructor(context) {
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
      key: (change) => change.key,
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

  async refresh(signal) {
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

  /**
   * found: MomentComparison
   * isFollowing: whether the second moment is the one of the time slider
   */
  #showResult({ a: earlier, b: later, changes, omitted }, a, b, isFollowing) {
    const [from, to] = a <= b ? [a, b] : [b, a];
    const format = date(from) === date(to) ? clock : dateTime;
    const count = changes.length ? counted(changes.length, "change") : "No changes";
    const more = Object.entries(omitted ?? {}).map(([kind, hidden]) => `${whole(Number(hidden))} of kind ${kind}`);
    const further = more.length ? ` Not listed: ${more.join(", ")}.` : "";
    const hint = isFollowing ? " Move the time slider to compare with another moment." : "";
    const span = `${duration(to - from)}, from ${format(from)} to ${format(to)} UTC`;
    setText(this.#summary, `${count} in ${span}.${further}${hint}`);
    const owner = (one) => `${one.owner_id || "unknown"}, epoch ${whole(one.owner_epoch)}`;
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

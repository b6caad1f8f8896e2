/**
 * The list of requests at the chosen moment, newest first. While a user points at the list, has focus in it, has
 * scrolled down or has paused it, no row moves: rows are updated in place, and a button shows how many are new.
 */

import { h, put, replace, setText } from "../dom.js";
import { clock, counted, sentence } from "../format.js";
import { emptyBox } from "../parts.js";
import { hasEnded } from "../phases.js";
import { VisibleRows } from "../visible_rows.js";
import { createFilters, FILTERS } from "./request_filters.js";
import { COLUMNS, createRow, scaleOf, updateRow } from "./request_rows.js";

const PAGE = 50; // rows of a page, all of which may be new four times per second
const ROWS_MAX = 500; // as many as the server returns at once, to update all of them
const ANNOUNCE_MS = 15_000; // a screen reader would otherwise speak all the time

export class View {
  #context;
  #filters;
  #body = h("tbody", { role: "rowgroup" });
  #box;
  #visible;
  #more = h("button", { type: "button", class: "button", onclick: () => this.#loadOlder() }, "Older requests");
  #fresh = h("button", { type: "button", class: "button primary fresh", hidden: true, onclick: () => this.#showNewest() });
  #pause = h("button", { type: "button", class: "button", "aria-pressed": "false", onclick: () => this.#togglePause() }, "Pause");
  #summary = h("p", { class: "soft list-summary" });
  #spoken = h("p", { class: "unseen", role: "status" });
  #problem = h("p", { class: "problem", role: "alert", hidden: true });
  #top = h("div");
  #observer;
  /** @type {Server.RequestRow[]} */ #rows = [];
  #departed = new Set(); // rows on the page that no longer match the filters
  /** @type {number | null} */ #nextBefore = null;
  #shown = ""; // filters and moment of the rows
  #isPaused = false;
  #isPointedAt = false;
  #isScrolled = false;
  #hasOlder = false; // whether the list begins or continues with rows beyond the newest page
  #isLoading = false;
  #announcedMs = 0;

  constructor(/** @type {Context} */ context) {
    this.#context = context;
    this.#filters = createFilters(context);
    const headings = COLUMNS.map((column) =>
      h("th", { role: "columnheader", scope: "col", class: column.isText ? "t" : null, title: column.title }, column.label),
    );
    const head = h("thead", { role: "rowgroup" }, h("tr", { role: "row", "aria-rowindex": 1 }, headings));
    const table = h("table", { class: "requests rows", role: "table", "aria-label": "Requests" }, head, this.#body);
    this.#visible = new VisibleRows({ table, body: this.#body, key: (row) => row.number, create: createRow });
    this.#box = h("div", { class: "scroll", role: "region", "aria-label": "Requests", tabindex: 0 }, table);
    this.#body.addEventListener("pointerenter", (event) => (this.#isPointedAt = event.pointerType === "mouse"));
    this.#body.addEventListener("pointerleave", () => (this.#isPointedAt = false));
    this.#body.addEventListener("keydown", (event) => moveFocus(this.#body, event));
    this.#observer = new IntersectionObserver((entries) => {
      const { isIntersecting, boundingClientRect } = entries[entries.length - 1];
      this.#isScrolled = !isIntersecting && boundingClientRect.top < innerHeight / 2;
    });
    this.#observer.observe(this.#top);
    this.element = h(
      "div",
      { class: "view requests-view" },
      h("div", { class: "view-head" }, h("h1", {}, "Requests"), this.#pause),
      this.#filters.element,
      this.#problem,
      this.#top,
      h("div", { class: "fresh-line" }, this.#fresh),
      this.#box,
      h("div", { class: "pages" }, this.#more, this.#summary),
      this.#spoken,
    );
  }

  async refresh(/** @type {AbortSignal} */ signal) {
    const { atUs, route } = this.#context.moment;
    const wanted = JSON.stringify([atUs, FILTERS.map((name) => route.params[name] ?? "")]);
    this.#filters.update();
    put(this.#pause, "hidden", atUs !== null || !this.#context.info.is_live);
    if (wanted === this.#shown && atUs !== null) return;
    if (wanted !== this.#shown || !this.#isHeld) await this.#readNewest(wanted, signal);
    else await this.#readUpdates(signal);
    put(this.#problem, "hidden", true);
  }

  dispose() {
    this.#observer.disconnect();
    this.#visible.dispose();
    this.#filters.dispose();
  }

  get #isHeld() {
    return (
      this.#isPaused || this.#isPointedAt || this.#hasOlder || this.#isScrolled || this.#body.contains(document.activeElement)
    );
  }

  /** @param {object} params @param {AbortSignal} [signal] */
  #read(params, signal) {
    const { atUs, route } = this.#context.moment;
    const filters = Object.fromEntries(FILTERS.map((name) => [name, route.params[name]]));
    return this.#context.api.get("v1/console/requests", { limit: PAGE, at_us: atUs, ...filters, ...params }, signal);
  }

  /** @param {string} wanted @param {AbortSignal} [signal] */
  async #readNewest(wanted, signal) {
    const page = await this.#read({}, signal);
    this.#shown = wanted;
    this.#rows = page.requests;
    this.#nextBefore = page.next_before;
    this.#hasOlder = false;
    this.#departed.clear();
    this.#showCount(0, false);
    this.#render();
  }

  async #readUpdates(signal) {
    const page = await this.#read({}, signal);
    const first = this.#rows[0]?.number ?? -1;
    const fresh = page.requests.filter((row) => row.number > first).length;
    const known = new Map(page.requests.map((row) => [row.number, row]));
    if (this.#rows.some((row) => !hasEnded(row.state) && !known.has(row.number))) {
      const same = await this.#read({ before: first + 1, limit: Math.min(ROWS_MAX, this.#rows.length) }, signal);
      for (const row of same.requests) known.set(row.number, row);
      const oldest = same.requests.at(-1)?.number ?? first;
      for (const { number } of this.#rows) if (number >= oldest && !known.has(number)) this.#departed.add(number);
    }
    this.#rows = this.#rows.map((row) => known.get(row.number) ?? row);
    this.#showCount(fresh, fresh === page.requests.length && page.next_before !== null);
    this.#render();
  }

  async #loadOlder() {
    if (this.#isLoading || this.#nextBefore === null) return;
    this.#isLoading = true;
    put(this.#more, "aria-busy", "true");
    const wanted = this.#shown;
    try {
      const page = await this.#read({ before: this.#nextBefore });
      if (wanted !== this.#shown) return; // the filters have changed meanwhile
      this.#rows = [...this.#rows, ...page.requests].slice(-ROWS_MAX);
      this.#nextBefore = page.next_before;
      this.#hasOlder = true;
      this.#render();
      put(this.#problem, "hidden", true);
    } catch (error) {
      this.#report(error);
    } finally {
      this.#isLoading = false;
      put(this.#more, "aria-busy", null);
    }
  }

  async #showNewest() {
    this.#box.focus({ preventScroll: true });
    scrollTo({ top: 0 });
    try {
      await this.#readNewest(this.#shown);
    } catch (error) {
      this.#report(error);
    }
  }

  #togglePause() {
    this.#isPaused = !this.#isPaused;
    put(this.#pause, "aria-pressed", String(this.#isPaused));
    setText(this.#pause, this.#isPaused ? "Paused" : "Pause");
  }

  /** isMore: whether there are more than `count` */
  #showCount(count, isMore) {
    put(this.#fresh, "hidden", count === 0);
    if (count === 0) return;
    const label = isMore ? `More than ${counted(count, "new request")}` : counted(count, "new request");
    setText(this.#fresh, `↑ ${label}`);
    const nowMs = performance.now();
    if (nowMs - this.#announcedMs < ANNOUNCE_MS) return;
    this.#announcedMs = nowMs;
    setText(this.#spoken, label);
  }

  #render() {
    const { info, moment, state } = this.#context;
    // The rows may be newer than the newest state.
    const endUs = moment.atUs ?? Math.max(state().end_us, ...this.#rows.map((row) => row.submitted_us));
    const view = { moment, group: info.group, endUs, scaleUs: scaleOf(this.#rows, endUs), departed: this.#departed };
    const rows = this.#rows;
    this.#visible.show(rows, (element, row) => updateRow(element, row, view));
    this.#filters.suggestWorkers(rows.map((row) => row.worker_id).filter(Boolean));
    const isEmpty = rows.length === 0;
    put(this.#box, "hidden", isEmpty);
    put(this.#more, "hidden", this.#nextBefore === null);
    if (isEmpty) replace(this.#summary, this.#emptyText());
    else setText(this.#summary, summaryOf(rows, this.#nextBefore === null));
  }

  #emptyText() {
    if (this.#filters.isActive) {
      return emptyBox("No request matches the filters at this moment.", this.#filters.createReset());
    }
    return emptyBox(
      this.#context.moment.atUs === null ? "There are no requests yet." : "There were no requests before this moment.",
      h("p", { class: "soft" }, "A request appears here when a client sends it to an ingress."),
    );
  }

  #report(error) {
    setText(this.#problem, sentence(error instanceof Error ? error.message : String(error)));
    put(this.#problem, "hidden", false);
  }
}

function summaryOf(/** @type {Server.RequestRow[]} */ rows, isLast) {
  const span = `submitted from ${clock(rows[rows.length - 1].submitted_us)} to ${clock(rows[0].submitted_us)} UTC`;
  return `${counted(rows.length, "request")}, ${span}${isLast ? "; there are no older ones" : ""}`;
}

function moveFocus(body, event) {
  const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
  const row = document.activeElement?.closest("tr");
  if (!step || !row || !body.contains(row) || event.altKey || event.ctrlKey || event.metaKey) return;
  const other = row[step];
  if (!other) return;
  event.preventDefault();
  other.querySelector("a").focus();
}

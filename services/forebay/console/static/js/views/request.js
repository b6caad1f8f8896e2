/** One request: what happened to it, when, where and why. */

import { ApiError, isAbort } from "../api.js";
import { h, put, reconcile, replace, setText } from "../dom.js";
import { duration } from "../format.js";
import { linkTo } from "../moment.js";
import { badge, emptyBox, factList, section, updateBadge } from "../parts.js";
import { courseOf } from "../request_lanes.js";
import { recordButton } from "./record_dialog.js";
import { courseChart, ttftParts } from "./request_chart.js";
import { headline, submissionFacts, trustNotes } from "./request_words.js";
import { changeList, excluded, routingSection } from "./routing.js";

const OTHERS_SHOWN = 5;
const EXPLAIN_EVERY_MS = 1_000; // an explanation derives the request again, which costs more than a row of a list

export class View {
  #context;
  #back = h("a", {}, "← All requests");
  #badge = badge();
  #id = h("code", { class: "request-id" });
  #title = h("h1", {});
  #notes = h("div", { class: "notes", hidden: true });
  #facts = h("div", { class: "facts" });
  #chart = h("div");
  #ttft = section("Parts of the TTFT");
  #queue = section("Queue");
  #pools = section("Choices of pools");
  #routings = h("div", { class: "routings" });
  #decisions = section("Routing decisions", this.#routings);
  #ending = section("Why no rank was eligible");
  #entries = h("ol", { class: "entries" });
  #what = h("div", { "aria-live": "polite" });
  #changes = section("What would have changed the selection", this.#what);
  #trust = h("div", { class: "soft trust" });
  /** @type {Server.Explanation | null} */ #explanation = null;
  /** @type {Server.RequestRow | null} */ #row = null;
  #body;
  #explainedMs = -Infinity;
  #isCompared = false; // whether the changes were read
  #shownFor = "";

  constructor(/** @type {Context} */ context) {
    this.#context = context;
    this.#body = h(
      "div",
      { hidden: true },
      this.#notes,
      this.#chart,
      this.#facts,
      this.#ttft,
      this.#queue,
      this.#pools,
      this.#decisions,
      this.#ending,
      this.#changes,
      section("Timeline", this.#entries),
      this.#trust,
    );
    this.element = h(
      "div",
      { class: "view request-view" },
      h("div", { class: "crumbs" }, this.#back),
      h("div", { class: "request-name" }, this.#id, this.#badge),
      this.#title,
      this.#body,
    );
  }

  async refresh(/** @type {AbortSignal} */ signal) {
    const { api, moment, state } = this.#context;
    const { argument, params } = moment.route;
    put(this.#back, "href", linkTo("requests", "", {}, moment.atUs));
    const isDone = this.#explanation?.ending && !this.#explanation.divergence;
    if (!isDone && performance.now() - this.#explainedMs >= EXPLAIN_EVERY_MS) {
      this.#explainedMs = performance.now();
      const id = params.id ?? (await api.get(`v1/console/requests/${argument}`, {}, signal)).request_id;
      try {
        this.#explanation = await this.#explain(id, {}, signal);
      } catch (error) {
        if (!(error instanceof ApiError) || error.status !== 404) throw error;
        this.#showMissing(id, error.message);
        return;
      }
      const { submitted } = this.#explanation;
      const isOfOtherModel = submitted && submitted.model !== this.#context.info.group;
      put(this.element, "data-other-model", isOfOtherModel ? "true" : null); // the console has no records of its group
      this.#row = isOfOtherModel ? null : await this.#readRow(submitted?.offset ?? this.#number, signal);
    }
    const shown = `${moment.atUs} ${isDone ? "" : state().end_us}`;
    if (this.#explanation && shown !== this.#shownFor) {
      this.#shownFor = shown;
      this.#show(this.#explanation);
    }
    if (!this.#isCompared && this.#explanation?.routings.length) await this.#compare(this.#explanation.request_id, signal);
  }

  /** The number of the request; null for a link by ID alone. */
  get #number() {
    const { argument } = this.#context.moment.route;
    return /^\d+$/.test(argument) ? argument : null;
  }

  #explain(/** @type {string} */ id, query, signal) {
    return this.#context.api.get(`v1/requests/${encodeURIComponent(id)}/explain`, { number: this.#number, ...query }, signal);
  }

  async #readRow(/** @type {string | number | null} */ number, signal) {
    try {
      return number === null ? null : await this.#context.api.get(`v1/console/requests/${number}`, {}, signal);
    } catch (error) {
      if (isAbort(error)) throw error;
      return null; // the catalog has not reached the request yet
    }
  }

  async #compare(/** @type {string} */ id, /** @type {AbortSignal} */ signal) {
    if (!this.#what.firstChild) setText(this.#what, "Evaluating other settings…");
    try {
      const { routings } = await this.#explain(id, { changes: true }, signal);
      replace(this.#what, routings.map((one) => changeList(one, routings.length > 1)));
    } catch (error) {
      if (signal.aborted || isAbort(error)) return;
      replace(this.#what, h("p", { class: "problem" }, error instanceof Error ? error.message : String(error)));
    }
    this.#isCompared = true;
  }

  #showMissing(id, message) {
    setText(this.#id, id);
    setText(this.#title, "This request cannot be explained.");
    put(this.#badge, "hidden", true);
    put(this.#body, "hidden", false);
    replace(this.#body, emptyBox(message, h("p", { class: "soft" }, "Retention may have removed its records, or no owner has applied it yet.")));
  }

  #show(/** @type {Server.Explanation} */ explanation) {
    const { moment, state } = this.#context;
    const endUs = state().end_us;
    put(this.#body, "hidden", false);
    setText(this.#id, explanation.request_id);
    updateBadge(this.#badge, explanation.state.replaceAll("_", " "));
    setText(this.#title, headline(explanation, endUs));
    this.#showNotes(explanation);
    replace(this.#facts, factList(submissionFacts(explanation, this.#row, this.#context.info.trace_url)));
    this.#showCourse(explanation, endUs, moment.atUs);
    const parts = explanation.first_token?.parts_us;
    show(this.#ttft, parts && Object.keys(parts).length > 1 ? ttftParts(parts) : null);
    show(this.#queue, entryList(explanation, "held"));
    show(this.#pools, entryList(explanation, "pool_chosen"));
    put(this.#decisions, "hidden", explanation.routings.length === 0);
    reconcile(this.#routings, explanation.routings, (one) => one.offset, (one) => routingSection(one, this.#context.api));
    show(this.#ending, excluded(explanation.ending?.left_out ?? []));
    put(this.#changes, "hidden", explanation.routings.length === 0);
    this.#showEntries(explanation, moment.atUs);
    replace(this.#trust, trustNotes(explanation).map((note) => h("p", {}, note)));
  }

  #showNotes(/** @type {Server.Explanation} */ { request_id, earlier_uses, others, divergence }) {
    const notes = [];
    const { atUs } = this.#context.moment;
    if (divergence) notes.push("The journal does not follow from the events. See the end of this page.");
    if (earlier_uses) {
      const times = earlier_uses === 1 ? "once" : `${earlier_uses} times`;
      const link = h("a", { href: linkTo("requests", "", { q: request_id }, atUs) }, "Show all of them");
      notes.push(h("span", {}, `The ID was used ${times} before. `, link));
    }
    if (others?.length) {
      const count = others.length === 1 ? "Another request has" : `${others.length} other requests have`;
      const links = others.slice(0, OTHERS_SHOWN).map((id, at) => [
        at ? ", " : "",
        h("a", { href: linkTo("requests", "", { q: id }, atUs) }, id),
      ]);
      notes.push(h("span", {}, `${count} this ID, too: `, links));
    }
    put(this.#notes, "hidden", notes.length === 0);
    replace(this.#notes, h("ul", {}, notes.map((note) => h("li", {}, note))));
  }

  #showCourse(/** @type {Server.Explanation} */ explanation, endUs, atUs) {
    const course = courseOf(explanation, endUs);
    const sinceUs = explanation.submitted?.now_us;
    const shownUs = atUs === null || !sinceUs ? null : atUs - sinceUs;
    const isActive = !explanation.ending;
    if (course.totalUs > 0 && course.lanes.length) replace(this.#chart, courseChart(course, { shownUs, isActive }));
    else replace(this.#chart);
  }

  #showEntries(/** @type {Server.Explanation} */ explanation, atUs) {
    const isLater = (/** @type {Server.TimelineEntry} */ entry) => atUs !== null && (entry.now_us === null || entry.now_us > atUs);
    reconcile(
      this.#entries,
      explanation.timeline,
      (entry) => `${entry.what} ${entry.topic}@${entry.offset} ${entry.text}`,
      (entry) =>
        h(
          "li",
          {},
          h("span", { class: "after" }, entry.after_us === null ? "" : `${entry.after_us < 0 ? "" : "+"}${duration(entry.after_us)}`),
          h("span", { class: "entry-text" }, entryText(entry, explanation)),
          recordButton(this.#context.api, entry.topic, entry.offset),
        ),
      (element, entry) => put(element, "class", isLater(entry) ? "later" : entry.counted ? null : "uncounted"),
    );
  }
}

/**
 * Show a section with this content, or hide it without content.
 * element: a section whose first child is its heading
 */
function show(element, content) {
  put(element, "hidden", !content);
  if (content) replace(element, element.firstElementChild, content);
}

function entryList(/** @type {Server.Explanation} */ { timeline }, what) {
  const found = timeline.filter((entry) => entry.what === what);
  return found.length ? h("ul", {}, found.map((entry) => h("li", {}, entry.text))) : null;
}

function entryText(/** @type {Server.TimelineEntry} */ entry, /** @type {Server.Explanation} */ explanation) {
  const isPending = entry.now_us === null && explanation.state !== "submitted";
  return `${entry.text}${isPending ? " (on the log, not in the journal yet)" : ""}${entry.counted ? "" : " (no effect)"}`;
}

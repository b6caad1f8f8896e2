/** The time bar: the chosen moment, the slider over the whole log with its markers, and the way back to live. */

import { h, put, setText } from "./dom.js";
import { clock, date, dateTime, duration, parseTime } from "./format.js";
import { MarkerTrack } from "./marker_track.js";
import { MarkerList } from "./markers.js";

const COMMIT_MS = 250; // at most four moments per second are read while the slider moves
const PATIENCE_MS = 1_000; // a moment that takes longer is abandoned for the next one
const POLL_MS = 50;
const STEP_US = 1_000_000;
const SHORT_US = 30_000_000; // the ends of a shorter log are shown with milliseconds
const MARKERS_MS = 1_000; // markers move slowly while the log grows

export class TimeBar {
  /** shown above the view while the moment is in the past */ strip;
  #moment;
  #isBusy;
  /** @type {Pick<Server.ConsoleInfo, "is_live">} */ #info = { is_live: true };
  /** @type {Pick<Server.CatalogState, "begin_us" | "end_us">} */ #state = { begin_us: 0, end_us: 0 };
  /** @type {number | null} */ #pendingUs = null; // chosen with the slider, but not shown yet
  #timer;
  #committedMs = 0;
  #isLoading = false;
  #markedMs = 0;
  #markers;
  #track;
  #slider = h("input", { type: "range", min: 0, step: 1, "aria-label": "Moment" });
  #live = h("button", { type: "button", class: "button live", onclick: () => this.#moment.live() });
  #back = h("button", { type: "button", class: "button primary", onclick: () => this.#moment.live() });
  #shown = h("span", { class: "shown" });
  #begin = h("span");
  #end = h("span");
  #sentence = h("span");
  #spoken = h("span", { class: "unseen", role: "status" }); // the visible sentence changes while the log grows
  #problem = h("p", { class: "entry-problem", role: "alert", hidden: true });
  #entry;

  /** options.isBusy: whether the view still reads the previous moment */
  constructor(/** @type {Pick<Context, "api" | "moment"> & { isBusy: () => boolean }} */ { api, moment, isBusy }) {
    this.#moment = moment;
    this.#isBusy = isBusy;
    this.#markers = new MarkerList(api, () => this.#showMarkers());
    this.#track = new MarkerTrack(
      (atUs) => this.#moment.set(atUs, { isNew: true }),
      () => this.#showMarkers(),
    );
    this.#slider.addEventListener("input", () => this.#choose(this.#sliderUs));
    this.#slider.addEventListener("keydown", (event) => this.#onKey(event));
    this.#entry = h("input", {
      type: "text",
      class: "entry",
      placeholder: "14:03:07 or -5m",
      "aria-label": "Time to show, in UTC",
      autocomplete: "off",
      spellcheck: "false",
    });
    this.strip = h("div", { class: "strip", hidden: true }, this.#sentence, this.#back);
    this.element = h(
      "section",
      { class: "time-bar", "aria-label": "Time", hidden: true },
      this.#spoken,
      h("div", { class: "time-controls" }, this.#live, this.#shown, this.#stepButtons(), this.#createForm(), this.#compareButton()),
      h(
        "div",
        { class: "time-axis" },
        this.#track.element,
        this.#slider,
        h("div", { class: "time-ends" }, this.#begin, this.#problem, this.#end),
      ),
    );
  }

  setInfo(/** @type {Server.ConsoleInfo} */ info) {
    this.#info = info;
  }

  setState(/** @type {Server.CatalogState} */ state) {
    this.#state = state;
    put(this.element, "hidden", state.end_us === 0);
    this.show();
    this.#markers.update(state);
  }

  setMoment() {
    const { atUs } = this.#moment;
    this.#showProblem("");
    setText(this.#spoken, atUs === null ? `Showing the ${this.#info.is_live ? "live" : "newest"} state.` : `Showing ${dateTime(atUs)} UTC.`);
    this.show();
    this.#showMarkers();
  }

  /** isLoading: whether the view still shows another moment */
  setLoading(isLoading) {
    this.#isLoading = isLoading;
    this.show();
  }

  show() {
    if (!this.#state.end_us) return;
    const { begin_us, end_us } = this.#state;
    const chosen = this.#moment.atUs;
    const atUs = this.#pendingUs ?? chosen ?? end_us;
    const days = date(begin_us) === date(end_us) ? clock : dateTime;
    put(this.#slider, "max", String(this.#length));
    const value = String(Math.round((atUs - begin_us) / 1_000));
    if (this.#slider.value !== value) this.#slider.value = value;
    put(this.#slider, "aria-valuetext", `${dateTime(atUs)} UTC${chosen === null ? ", newest state" : ""}`);
    const isPast = chosen !== null || this.#pendingUs !== null;
    put(this.element, "data-past", isPast);
    put(this.#live, "aria-pressed", String(!isPast));
    setText(this.#live, this.#info.is_live ? "Live" : "Newest");
    setText(this.#back, this.#info.is_live ? "Back to live" : "Back to the newest state");
    setText(this.#shown, days(atUs));
    const ends = (us) => (end_us - begin_us < SHORT_US ? days(us) : days(us).slice(0, -4));
    setText(this.#begin, ends(begin_us));
    setText(this.#end, `${ends(end_us)} UTC`);
    put(this.strip, "hidden", !isPast);
    setText(this.#sentence, isPast ? this.#describe(atUs, days) : "");
    if (performance.now() - this.#markedMs >= MARKERS_MS) this.#showMarkers();
  }

  get #length() {
    return Math.max(1, Math.ceil((this.#state.end_us - this.#state.begin_us) / 1_000));
  }

  get #sliderUs() {
    return Math.min(this.#state.end_us, this.#state.begin_us + Number(this.#slider.value) * 1_000);
  }

  #describe(atUs, format) {
    const { begin_us, end_us } = this.#state;
    const age = end_us - atUs;
    const distance = age > 0 ? `${duration(age)} before the newest event` : age < 0 ? `${duration(-age)} after the newest event` : "at the newest event";
    const verb = this.#isLoading || this.#pendingUs !== null ? "Loading" : "Showing";
    return `${verb} ${format(atUs)} UTC, ${atUs < begin_us ? "before the beginning of the log" : distance}.`;
  }

  /** Choose a moment with the slider. It is shown as soon as the view has shown the previous one. */
  #choose(atUs) {
    this.#pendingUs = Math.round(Math.min(this.#state.end_us, Math.max(this.#state.begin_us, atUs)));
    this.show();
    if (this.#timer === undefined) this.#commit();
  }

  #commit() {
    const age = performance.now() - this.#committedMs;
    const isDue = age >= COMMIT_MS && (!this.#isBusy() || age >= PATIENCE_MS);
    this.#timer = isDue ? undefined : setTimeout(() => this.#commit(), Math.max(POLL_MS, COMMIT_MS - age));
    if (!isDue || this.#pendingUs === null) return;
    this.#committedMs = performance.now();
    const atUs = this.#pendingUs;
    this.#pendingUs = null;
    this.#moment.set(atUs, { isNew: this.#moment.atUs === null });
  }

  #onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const { begin_us, end_us } = this.#state;
    const now = this.#pendingUs ?? this.#moment.atUs ?? end_us;
    const step = Math.min(STEP_US, Math.max(1_000, (end_us - begin_us) / 200)) * (event.shiftKey ? 10 : 1);
    const page = (end_us - begin_us) / 20;
    const keys = {
      ArrowLeft: now - step,
      ArrowDown: now - step,
      ArrowRight: now + step,
      ArrowUp: now + step,
      PageDown: now - page,
      PageUp: now + page,
      Home: begin_us,
      End: end_us,
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    this.#choose(keys[event.key]);
  }

  #stepButtons() {
    const step = (direction) => {
      const from = this.#moment.atUs ?? this.#state.end_us + 1;
      const marker = this.#markers[direction](from);
      if (marker) this.#moment.set(marker.at_us, { isNew: true });
      else this.#showProblem(direction === "before" ? "There is no earlier marker." : "There is no later marker.");
    };
    const create = (direction, arrow, label) =>
      h("button", { type: "button", class: "button", title: label, "aria-label": label, onclick: () => step(direction) }, arrow);
    return h("span", { class: "steps" }, create("before", "⇤", "Previous marker"), create("after", "⇥", "Next marker"));
  }

  #createForm() {
    const entry = this.#entry;
    const submit = (event) => {
      event.preventDefault();
      const { begin_us, end_us } = this.#state;
      const atUs = parseTime(entry.value, this.#moment.atUs ?? end_us);
      if (atUs === null) this.#showProblem(`"${entry.value}" is not a time. Enter for example 14:03:07 or -5m.`);
      else if (atUs < begin_us || atUs > end_us) this.#showProblem(`${dateTime(atUs)} is outside of the log, which covers ${dateTime(begin_us)} to ${dateTime(end_us)}.`);
      else {
        entry.value = "";
        this.#moment.set(atUs, { isNew: true });
      }
    };
    return h("form", { class: "time-entry", onsubmit: submit, oninput: () => this.#showProblem("") }, entry);
  }

  #compareButton() {
    const compare = () => {
      this.#moment.navigate("time", "", { a: this.#moment.atUs ?? this.#state.end_us });
      scrollTo(0, 0);
    };
    return h("button", { type: "button", class: "button compare", onclick: compare }, "Compare with …");
  }

  /** message: "" hides the previous one */
  #showProblem(message) {
    put(this.#problem, "hidden", !message);
    setText(this.#problem, message);
  }

  #showMarkers() {
    if (!this.#state.end_us) return;
    const { view, params } = this.#moment.route;
    const pin = view === "time" && /^\d+$/.test(params.a ?? "") ? Number(params.a) : null;
    this.#markedMs = performance.now();
    this.#track.update(this.#markers.markers, this.#state.begin_us, this.#state.end_us, pin);
  }
}

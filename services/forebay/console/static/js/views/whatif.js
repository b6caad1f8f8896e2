/**
 * What if: the recorded history compared with another policy or other settings, by the code of `forebay replay diff`.
 */

import { isAbort } from "../api.js";
import { h, put, replace, setText } from "../dom.js";
import { counted, dateTime, parseTime, percent, sentence } from "../format.js";
import { reportElement } from "./whatif_report.js";

const MINUTES_US = 5 * 60_000_000;
const POLL_MS = 400;
const SETTINGS_MAX = 16;
const SEPARATOR = "; "; // between settings in the address

/** The newest comparison. It continues while another view is shown. */
/** @type {{ job: string, status: Server.Job | null } | null} */
let newest = null;

export class View {
  #context;
  #from;
  #to;
  #policy;
  #settings = h("div", { class: "settings" });
  #start = h("button", { type: "submit", class: "button primary" }, "Compare");
  #problem = h("p", { class: "problem", role: "alert", hidden: true });
  #bar = h("progress", { "aria-label": "Progress of the comparison" });
  #done = h("span", { class: "num", role: "status" });
  #progress;
  #result = h("div", { "aria-live": "polite" });
  #timer;
  #isDisposed = false;

  constructor(/** @type {Context} */ context) {
    this.#context = context;
    const { params } = context.moment.route;
    const [fromUs, toUs] = this.#lastMinutes();
    this.#from = h("input", { type: "text", name: "from", value: params.from ?? dateTime(fromUs), spellcheck: "false" });
    this.#to = h("input", { type: "text", name: "to", value: params.to ?? dateTime(toUs), spellcheck: "false" });
    const policies = context.info.policies.map((one) => h("option", { value: one }, one));
    const props = { name: "policy", value: params.policy ?? "" };
    this.#policy = h("select", props, h("option", { value: "" }, "as recorded"), policies);
    for (const one of (params.set ?? "").split(SEPARATOR).filter(Boolean)) this.#addSetting(one);
    const cancel = h("button", { type: "button", class: "button", onclick: () => this.#cancel() }, "Cancel");
    this.#progress = h("div", { class: "row", hidden: true }, this.#bar, this.#done, cancel);
    this.element = h(
      "div",
      { class: "view whatif-view" },
      h("h1", {}, "What if"),
      h(
        "p",
        { class: "soft" },
        "Compare the recorded decisions with those of another policy or other settings. Arrival and progress of the requests stay as recorded.",
      ),
      this.#form(),
      this.#progress,
      this.#result,
    );
    if (newest) this.#follow(newest.job);
  }

  dispose() {
    this.#isDisposed = true;
    clearTimeout(this.#timer);
  }

  #form() {
    const button = (label, onclick) =>
      h("button", { type: "button", class: "button", onclick }, label);
    const onsubmit = (event) => {
      event.preventDefault();
      this.#run();
    };
    return h(
      "form",
      { class: "card whatif-form", onsubmit, "aria-label": "Comparison" },
      h(
        "fieldset",
        {},
        h("legend", {}, "Span, in UTC"),
        h("label", {}, "From ", this.#from),
        h("label", {}, "To ", this.#to),
        button("Last 5 minutes", () => this.#setSpan(this.#lastMinutes())),
        button("Whole log", () => this.#setSpan([this.#context.state().begin_us, this.#context.state().end_us])),
      ),
      h(
        "fieldset",
        {},
        h("legend", {}, "Alternative"),
        h("label", {}, "Policy ", this.#policy),
        this.#settings,
        button("Add a setting", () => this.#addSetting("").querySelector("input")?.focus()),
        h("datalist", { id: "router-fields" }, this.#context.info.fields.map((one) => h("option", { value: one }))),
      ),
      this.#problem,
      h("div", { class: "row" }, this.#start),
    );
  }

  /** @returns {[number, number]} the five minutes before the chosen moment */
  #lastMinutes() {
    const { begin_us, end_us } = this.#context.state();
    const toUs = this.#context.moment.atUs ?? end_us;
    return [Math.max(begin_us, toUs - MINUTES_US), toUs];
  }

  #setSpan([fromUs, toUs]) {
    put(this.#from, "value", dateTime(fromUs));
    put(this.#to, "value", dateTime(toUs));
  }

  #addSetting(given) {
    const at = given.indexOf("=");
    const [path, value] = at < 0 ? [given, ""] : [given.slice(0, at), given.slice(at + 1)];
    const props = { type: "text", spellcheck: "false", autocomplete: "off" };
    const row = h(
      "div",
      { class: "setting" },
      h("input", { ...props, "aria-label": "Setting", placeholder: "temperature", list: "router-fields", value: path }),
      h("span", { "aria-hidden": "true" }, "="),
      h("input", { ...props, "aria-label": "Value", placeholder: "0.2", value }),
      h("button", { type: "button", class: "button", "aria-label": "Remove the setting", onclick: () => row.remove() }, "✕"),
    );
    if (this.#settings.childElementCount < SETTINGS_MAX) this.#settings.append(row);
    return row;
  }

  #sets() {
    return [...this.#settings.children]
      .map((row) => [...row.querySelectorAll("input")].map((input) => input.value.trim()))
      .filter(([path, value]) => path || value)
      .map(([path, value]) => `${path}=${value}`);
  }

  async #run() {
    const { api, moment, state } = this.#context;
    const { begin_us, end_us } = state();
    const [from, to] = [this.#from, this.#to].map((input) => input.value);
    const policy = this.#policy.value;
    const sets = this.#sets();
    const [fromUs, toUs] = [parseTime(from, end_us), parseTime(to, end_us)];
    if (fromUs === null || toUs === null) {
      const wrong = fromUs === null ? from : to;
      this.#report(`“${wrong}” is not a time. Write 14:03:07, 2026-11-23 14:03:07.250 or -5m, in UTC.`);
      return;
    }
    if (!policy && !sets.length) {
      this.#report("Nothing is changed. Choose another policy, or add a setting.");
      return;
    }
    moment.navigate("what-if", "", { from, to, policy, set: sets.join(SEPARATOR) }, { isNew: false });
    put(this.#problem, "hidden", true);
    put(this.#start, "disabled", true);
    // Times are shown in milliseconds, so the end of the log is cut off without this millisecond.
    const body = { from_us: fromUs <= begin_us ? null : fromUs, to_us: toUs + 1_000 > end_us ? null : toUs, policy, sets };
    try {
      const /** @type {Server.Job} */ { job } = await api.post("v1/console/what-if", body);
      newest = { job, status: null };
      replace(this.#result);
      this.#follow(job);
    } catch (error) {
      put(this.#start, "disabled", false);
      this.#report(messageOf(error));
    }
  }

  async #follow(/** @type {string} */ job) {
    clearTimeout(this.#timer);
    try {
      const known = newest?.job === job && newest.status?.state !== "running" ? newest.status : null;
      const status = known ?? (await this.#context.api.get(`v1/console/what-if/${job}`));
      if (newest?.job === job) newest = { job, status };
      if (this.#isDisposed) return;
      this.#showStatus(status);
      if (status.state === "running") this.#timer = setTimeout(() => this.#follow(job), POLL_MS);
    } catch (error) {
      if (isAbort(error) || this.#isDisposed) return;
      this.#showStatus({ state: "failed", error: messageOf(error) });
    }
  }

  #showStatus(/** @type {Partial<Server.Job>} */ { state, done = 0, total = 0, report, error }) {
    const isRunning = state === "running";
    put(this.#progress, "hidden", !isRunning);
    put(this.#start, "disabled", isRunning);
    if (isRunning) {
      if (total) this.#bar.value = done / total;
      else this.#bar.removeAttribute("value");
      const share = total ? `${percent(done / total)} of ${counted(total, "journal record")}` : "starting";
      setText(this.#done, share);
    } else if (state === "cancelled") this.#report("The comparison was cancelled.");
    else if (report) replace(this.#result, reportElement(report, this.#context.moment.atUs));
    else this.#report(error || "The comparison failed without a message. See the console's log.");
  }

  async #cancel() {
    if (!newest) return;
    try {
      await this.#context.api.remove(`v1/console/what-if/${newest.job}`);
      this.#follow(newest.job);
    } catch (error) {
      this.#report(messageOf(error));
    }
  }

  #report(message) {
    setText(this.#problem, sentence(message));
    put(this.#problem, "hidden", false);
  }
}

function messageOf(error) {
  return error instanceof Error ? error.message : String(error);
}

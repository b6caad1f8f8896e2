/** The frame around a view: navigation, connection, lag, the chosen moment, messages and the form for the token. */

import { h, put, setText } from "./dom.js";
import { counted, number, sentence } from "./format.js";
import { linkTo } from "./moment.js";
import { VIEWS } from "./views.js";

const LAG_MAX_S = 5; // a larger lag is a problem
const LAG_SHOWN_S = 0.3; // a smaller lag is the interval at which the console reads the log

export class Frame {
  constructor({ moment, timeBar, onToken, onRetry }) {
    this.moment = moment;
    this.timeBar = timeBar;
    this.main = h("main", { id: "main", tabindex: -1 });
    this.links = VIEWS.map((view) => h("a", {}, view.title));
    this.source = h("span", { class: "source" });
    this.tools = h("span", { class: "tools" });
    this.lag = h("span", { class: "lag" });
    this.progress = h("progress", { "aria-label": "Indexing of the log", max: 1, hidden: true });
    this.connection = h("div", { class: "banner bad", role: "alert", hidden: true });
    this.message = h("span");
    const retry = h("button", { type: "button", class: "button", onclick: onRetry }, "Try again");
    this.error = h("div", { class: "banner bad", role: "alert", hidden: true }, this.message, retry);
    this.tokenForm = createTokenForm(onToken);
    const skip = h("button", { type: "button", class: "skip", onclick: () => this.main.focus() }, "Skip to content");
    const header = h(
      "header",
      { class: "top" },
      h("div", { class: "brand" }, h("b", {}, "forebay"), this.source),
      h("nav", { "aria-label": "Views" }, this.links),
      h("div", { class: "follow" }, this.progress, this.lag, this.tools),
      timeBar.strip,
    );
    document.body.append(skip, header, this.connection, this.error, this.main, this.tokenForm, timeBar.element);
    this.showMoment();
  }

  showInfo(/** @type {Server.ConsoleInfo} */ info) {
    const { source, group, kind, version } = info;
    this.isLive = info.is_live;
    this.timeBar.setInfo(info);
    const kinds = { file: "log", recording: "recording", kafka: "Kafka" };
    setText(this.source, `${kinds[kind] ?? kind} ${source}, group ${group}`);
    put(this.source, "title", `forebay ${version}`);
    put(this.tokenForm, "hidden", true);
  }

  showState(/** @type {Server.CatalogState} */ state) {
    this.timeBar.setState(state);
    this.#showProgress(state);
  }

  #showProgress(/** @type {Server.CatalogState} */ { begin_offset, end_offset, log_end_offset, behind_s, is_complete, error }) {
    const share = (end_offset - begin_offset) / Math.max(1, log_end_offset - begin_offset);
    put(this.progress, "hidden", is_complete);
    put(this.progress, "value", share);
    put(this.lag, "data-tone", error ? "bad" : !is_complete || behind_s >= LAG_MAX_S ? "warn" : null);
    if (error) setText(this.lag, `cannot follow the log: ${error}`);
    else if (!is_complete) setText(this.lag, `indexing the log, ${Math.floor(100 * share)}%`);
    else if (behind_s >= LAG_SHOWN_S) setText(this.lag, `${number(behind_s)} s behind`);
    else setText(this.lag, this.isLive ? "up to date" : "complete");
    put(this.lag, "title", `${counted(log_end_offset - end_offset, "journal record")} not read yet`);
  }

  showConnection(isConnected) {
    put(this.connection, "hidden", isConnected);
    setText(this.connection, isConnected ? "" : "Connection to the console lost, trying again. The page shows older data.");
    if (!isConnected) setText(this.lag, "not connected");
  }

  showError(message) {
    put(this.error, "hidden", false);
    setText(this.message, sentence(message));
  }

  hideError() {
    put(this.error, "hidden", true);
  }

  /** Let the links of the navigation keep the chosen moment. */
  showMoment() {
    this.timeBar.setMoment();
    VIEWS.forEach((view, at) => put(this.links[at], "href", linkTo(view.name, "", {}, this.moment.atUs)));
  }

  showRoute(shown) {
    VIEWS.forEach((view, at) => put(this.links[at], "aria-current", view === shown ? "page" : null));
  }

  /** isBusy: whether the view shows another moment than the chosen one */
  setBusy(isBusy) {
    put(this.main, "aria-busy", isBusy ? "true" : null);
    this.timeBar.setLoading(isBusy);
  }

  /** isMissing: whether the view could not be read for the chosen moment, so that it must not be shown */
  setMissing(isMissing) {
    put(this.main, "data-missing", isMissing);
  }

  requestToken(isWrong) {
    put(this.tokenForm, "hidden", false);
    const hint = "The console printed a token when it started. Enter it, or open the printed address.";
    setText(this.tokenForm.children[1], isWrong ? `The console rejected this token. ${hint}` : hint);
    this.tokenForm.querySelector("input")?.focus();
  }
}

function createTokenForm(onToken) {
  const input = h("input", { type: "password", id: "token", autocomplete: "off", required: true, spellcheck: "false" });
  const submit = (event) => {
    event.preventDefault();
    onToken(input.value.trim());
  };
  return h(
    "form",
    { class: "token card", hidden: true, onsubmit: submit },
    h("label", { for: "token" }, "Token"),
    h("p", { class: "soft", role: "status" }),
    h("div", { class: "row" }, input, h("button", { type: "submit", class: "button" }, "Connect")),
  );
}

/**
 * A dialog with which an operator changes the running system. It shows the event that will be written, requires the
 * operator's name, the admin token and a confirmation, and shows the outcome. The token is never stored.
 */

import { h, put, replace, setText } from "../dom.js";
import { sentence } from "../format.js";
import { ACTIONS, outcomeOf } from "./action_kinds.js";

export function actionButton(/** @type {Context} */ context) {
  const onclick = () => new ActionDialog(context).open();
  return h("button", { type: "button", class: "button", "aria-haspopup": "dialog", onclick }, "Actions");
}

/** Name that the operator entered last, until the page is closed. */
let lastOperator = "";

class ActionDialog {
  #context;
  #dialog;
  #kind;
  #fields = h("div", { class: "action-fields" });
  #about = h("p", { class: "soft" });
  #operator;
  #token;
  #problem = h("p", { class: "problem", role: "alert", hidden: true });
  #enter;
  #review;
  #event = h("div", { class: "card event-preview" });
  #write = h("button", { type: "button", class: "button primary", onclick: () => this.#execute() }, "Write this event");
  #back = h("button", { type: "button", class: "button", onclick: () => this.#show(this.#enter) }, "Back");
  #outcome = h("div", { role: "status" });
  /** @type {Server.GroupStatus | null} */ #status = null;
  /** @type {import("./action_kinds.js").ActionForm | null} */ #form = null;
  #closed = new AbortController();

  constructor(/** @type {Context} */ context) {
    this.#context = context;
    const options = ACTIONS.map((one) => h("option", { value: one.name }, one.title));
    const onchange = () => this.#showFields();
    this.#kind = h("select", { id: "action-kind", onchange }, options);
    const props = { type: "text", required: true, spellcheck: "false", maxlength: 256 };
    this.#operator = h("input", { ...props, id: "action-operator", autocomplete: "name", value: lastOperator });
    const secret = { type: "password", required: true, autocomplete: "off", pattern: "[!-~]+", maxlength: 4096 };
    this.#token = h("input", { ...secret, id: "action-token", title: "visible ASCII characters without spaces" });
    const onsubmit = (event) => {
      event.preventDefault();
      this.#confirm();
    };
    const close = () => h("button", { type: "button", class: "button", onclick: () => this.#dialog.close() }, "Close");
    this.#enter = h(
      "form",
      { class: "action-form", onsubmit },
      field("Action", this.#kind),
      this.#about,
      this.#fields,
      field("Your name", this.#operator, "It is written to the log with the event."),
      field("Admin token", this.#token, "Token of the ingress's admin API. The page does not store it."),
      h("div", { class: "row" }, h("button", { type: "submit", class: "button primary" }, "Review"), close()),
    );
    const past = context.moment.atUs !== null && "You are looking at a past moment. The action changes the running system now.";
    this.#review = h(
      "div",
      { hidden: true },
      h("p", {}, "This event will be written to the log:"),
      this.#event,
      past && h("p", { class: "notes" }, past),
      h("div", { class: "row" }, this.#write, this.#back),
    );
    this.#dialog = (
      h(
        "dialog",
        { class: "actions", "aria-labelledby": "actions-title", onclose: () => this.#onClose() },
        h("h2", { id: "actions-title" }, "Change the running system"),
        this.#problem,
        this.#enter,
        this.#review,
        this.#outcome,
      )
    );
  }

  async open() {
    document.body.append(this.#dialog);
    this.#dialog.showModal();
    try {
      this.#status = await this.#context.api.get("v1/status", {}, this.#closed.signal);
      this.#showFields();
    } catch (error) {
      if (!this.#closed.signal.aborted) this.#report(messageOf(error));
    }
  }

  #onClose() {
    this.#closed.abort();
    this.#token.value = "";
    this.#dialog.remove();
  }

  get #action() {
    const name = this.#kind.value;
    return ACTIONS.find((one) => one.name === name) ?? ACTIONS[0];
  }

  #showFields() {
    setText(this.#about, this.#action.about);
    if (this.#status === null) return; // the fields are shown once the status of the system is known
    this.#form = this.#action.createForm({ status: this.#status, info: this.#context.info });
    replace(this.#fields, this.#form.fields.map((one) => field(one.label, one.input, one.hint)));
    put(this.#problem, "hidden", true);
  }

  #confirm() {
    const operator = this.#operator.value.trim();
    const { body = null, problem = "The status of the system is not known yet." } = this.#form?.read() ?? {};
    if (!body || !operator) {
      this.#report(body ? "Enter your name. It is written to the log with the event." : problem);
      return;
    }
    lastOperator = operator;
    const { topic, type, text } = this.#action.event(body, this.#context.info.group);
    replace(
      this.#event,
      h("p", { class: "event-text" }, `${text}, by ${operator}`),
      h("p", { class: "soft" }, h("code", {}, type), " on topic ", h("code", {}, topic)),
    );
    this.#show(this.#review);
    this.#back.focus(); // Enter alone must not write the event
  }

  async #execute() {
    const { body } = this.#form?.read() ?? {};
    const headers = { "x-forebay-admin-token": this.#token.value };
    put(this.#write, "disabled", true);
    put(this.#back, "disabled", true);
    setText(this.#outcome, "Waiting for the effect…");
    try {
      const path = `v1/console/actions/${this.#action.name}`;
      const result = await this.#context.api.post(path, { operator: lastOperator, ...body }, headers);
      if (this.#closed.signal.aborted) return;
      this.#show(null);
      const close = h("button", { type: "button", class: "button", onclick: () => this.#dialog.close() }, "Close");
      const lines = outcomeOf(result).map((line) => h("li", {}, line));
      replace(this.#outcome, h("p", { class: "done", "data-tone": "good" }, "● Done"), h("ul", {}, lines), close);
      close.focus();
    } catch (error) {
      setText(this.#outcome, "");
      this.#show(this.#enter);
      this.#report(messageOf(error));
    } finally {
      put(this.#write, "disabled", false);
      put(this.#back, "disabled", false);
    }
  }

  /** step: the form, the review, or neither */
  #show(step) {
    put(this.#enter, "hidden", step !== this.#enter);
    put(this.#review, "hidden", step !== this.#review);
    put(this.#problem, "hidden", true);
    setText(this.#outcome, "");
    if (step === this.#enter) this.#kind.focus();
  }

  #report(message) {
    setText(this.#problem, sentence(message));
    put(this.#problem, "hidden", false);
  }
}

/** input: an element with an ID */
function field(label, input, hint) {
  return h("div", { class: "field" }, h("label", { for: input.id }, label), input, hint && h("span", { class: "soft" }, hint));
}

function messageOf(error) {
  return error instanceof Error ? error.message : String(error);
}

/** Filters of the list of requests. They are kept in the address. */

import { h, put, reconcile } from "../dom.js";

/** Names of the filters, in the address and in requests to the server. */
export const FILTERS = ["q", "model", "tenant", "worker", "state", "slow_ms", "failed"];

const STATES = ["submitted", "queued", "encode", "prefill", "decode", "waiting", "finished", "failed", "rejected", "aborted", "cancelled"];
const SUGGESTIONS_MAX = 500;
const TYPING_MS = 300; // a filter applies after a pause in typing

export function createFilters(/** @type {Context} */ context) {
  let timer;
  const known = new Set();
  const workers = h("datalist", { id: "request-workers" });
  const fields = {
    q: h("input", { type: "search", name: "q", placeholder: "part of the ID", autocomplete: "off", spellcheck: "false" }),
    model: h("input", { type: "search", name: "model", placeholder: context.info.group, autocomplete: "off" }),
    tenant: h("input", { type: "search", name: "tenant", placeholder: "any", autocomplete: "off" }),
    worker: h("input", { type: "search", name: "worker", placeholder: "any", list: "request-workers", autocomplete: "off" }),
    state: h("select", { name: "state" }, h("option", { value: "" }, "any"), STATES.map((one) => h("option", { value: one }, one))),
    slow_ms: h("input", { type: "number", name: "slow_ms", min: 0, step: "any", placeholder: "any", inputmode: "decimal" }),
    failed: h("input", { type: "checkbox", name: "failed" }),
  };
  const reset = () => h("button", { type: "button", class: "button", onclick: clear }, "Clear the filters");
  const clearing = reset();
  const element = h(
    "form",
    { class: "filters", role: "search", "aria-label": "Filter requests", onsubmit, oninput, onchange: apply },
    h("label", {}, "ID ", fields.q),
    h("label", {}, "Model ", fields.model),
    h("label", {}, "Tenant ", fields.tenant),
    h("label", {}, "Worker ", fields.worker),
    h("label", {}, "State ", fields.state),
    h("label", {}, "TTFT over ", fields.slow_ms, " ms"),
    h("label", { class: "check" }, fields.failed, " failed, rejected or aborted"),
    clearing,
    workers,
  );

  function onsubmit(event) {
    event.preventDefault();
    apply();
  }

  function oninput() {
    clearTimeout(timer);
    timer = setTimeout(apply, TYPING_MS);
  }

  function apply() {
    clearTimeout(timer);
    const { q, model, tenant, worker, state, slow_ms, failed } = fields;
    const params = {
      q: q.value.trim(),
      model: model.value.trim(),
      tenant: tenant.value.trim(),
      worker: worker.value.trim(),
      state: state.value,
      slow_ms: slow_ms.value,
      failed: failed.checked ? "true" : "",
    };
    context.moment.navigate("requests", "", params, { isNew: false });
  }

  function clear() {
    element.reset();
    context.moment.navigate("requests", "", {}, { isNew: false });
    fields.q.focus();
  }

  const isActive = () => FILTERS.some((name) => context.moment.route.params[name]);

  return {
    element,
    createReset: reset,

    get isActive() {
      return isActive();
    },

    /** Show the filters of the address, except in a field that the user edits. */
    update() {
      const { params } = context.moment.route;
      for (const [name, field] of Object.entries(fields)) {
        if (field === document.activeElement) continue;
        if (name === "failed") put(field, "checked", params.failed === "true");
        else put(field, "value", params[name] ?? "");
      }
      put(clearing, "hidden", !isActive());
    },

    suggestWorkers(names) {
      if (known.size < SUGGESTIONS_MAX) for (const name of names) known.add(name);
      reconcile(workers, [...known].sort(), (name) => name, (name) => h("option", { value: name }));
    },

    dispose() {
      clearTimeout(timer);
    },
  };
}

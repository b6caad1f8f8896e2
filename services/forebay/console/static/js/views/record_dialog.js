/** A dialog with one decoded record of the log. */

import { h, put, setText } from "../dom.js";
import { isAbort } from "../api.js";

export function recordButton(/** @type {Context["api"]} */ api, /** @type {string} */ topic, /** @type {number} */ offset) {
  const label = `Record ${offset} of topic ${topic}`;
  return h(
    "button",
    { type: "button", class: "record-link", title: label, onclick: () => showRecord(api, topic, offset) },
    `${topic}@${offset}`,
  );
}

async function showRecord(/** @type {Context["api"]} */ api, topic, offset) {
  const closed = new AbortController();
  const content = h("pre", { tabindex: 0, "aria-label": "Record" }, "Reading the record…");
  const close = h("button", { type: "button", class: "button", onclick: () => dialog.close() }, "Close");
  const dialog = (
    h(
      "dialog",
      { class: "record", "aria-labelledby": "record-title", onclose: () => closed.abort() },
      h("div", { class: "view-head" }, h("h2", { id: "record-title" }, `${topic}@${offset}`), close),
      content,
    )
  );
  document.body.append(dialog);
  closed.signal.addEventListener("abort", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // a click beside the dialog
  dialog.showModal();
  try {
    const record = await api.get("v1/console/records", { topic, offset }, closed.signal);
    setText(content, JSON.stringify(record, null, 2));
  } catch (error) {
    if (isAbort(error)) return;
    put(content, "class", "problem");
    setText(content, error instanceof Error ? error.message : String(error));
  }
}

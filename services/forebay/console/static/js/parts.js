/** Small components that several views share. */

import { h, put, setStyle, setText } from "./dom.js";

/** Tone and shape of a state. The shape carries the state without colour. */
const STATES = {
  ready: ["good", "●"],
  finished: ["good", "●"],
  suspect: ["warn", "▲"],
  draining: ["warn", "◐"],
  drained: ["warn", "◐"],
  queued: ["wait", "◔"],
  waiting: ["wait", "◔"],
  submitted: ["wait", "○"],
  encode: ["run", "◇"],
  prefill: ["run", "◆"],
  decode: ["run", "▶"],
  lost: ["bad", "✕"],
  failed: ["bad", "✕"],
  rejected: ["bad", "⊘"],
  aborted: ["bad", "✕"],
  cancelled: ["soft", "⊖"],
};

export function badge(state) {
  const element = h("span", { class: "state" }, h("span", { class: "shape", "aria-hidden": "true" }), h("span"));
  if (state !== undefined) updateBadge(element, state);
  return element;
}

export function updateBadge(element, state, label = state) {
  const [tone, shape] = STATES[state] ?? ["soft", "○"];
  put(element, "data-tone", tone);
  setText(element.children[0], shape);
  setText(element.children[1], label);
}

/** Create a small horizontal bar with its numbers beside it. */
export function meter() {
  return h("span", { class: "meter" }, h("span", { class: "meter-bar", "aria-hidden": "true" }), h("span"));
}

/** Show another value in a bar that `meter` created. */
export function updateMeter(element, share, label) {
  const bounded = Math.min(1, Math.max(0, share || 0));
  setStyle(element.children[0], "background-size", `${(100 * bounded).toFixed(1)}% 100%`);
  put(element, "data-tone", bounded >= 0.95 ? "bad" : bounded >= 0.85 ? "warn" : null);
  setText(element.children[1], label);
}

export function section(title, ...children) {
  return h("section", { class: "part" }, h("h2", {}, title), ...children);
}

/** Create a box that says why there is nothing to show, and what to do. */
export function emptyBox(title, ...children) {
  return h("div", { class: "empty card" }, h("p", { class: "empty-title" }, title), ...children);
}

export function commandLine(command) {
  return h("pre", { class: "command" }, command);
}

export function factList(facts) {
  return h("dl", {}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

/**
 * Stacked horizontal bars.
 *
 * @module bars
 */

import { h, put, reconcile, setStyle, setText } from "./dom.js";
import { number } from "./format.js";

/**
 * @typedef {object} BarRow
 * @property {string} key identifies the row across updates
 * @property {string} label
 * @property {string} total text after the bar
 * @property {boolean} [isStrong] whether the row is emphasised
 * @property {{name: string, value: number, colour: number}[]} parts a negative part is a credit: it is hatched at the
 *   end of the bar, and the plain rest is the total
 */

/** Stacked horizontal bars on a common scale. */
export class StackedBars {
  /** @type {HTMLElement} */ element;
  #rows = h("ul", { class: "bars" });
  #legend = h("ul", { class: "bars-legend" });

  /** @param {string} label accessible name */
  constructor(label) {
    put(this.#rows, "aria-label", label);
    this.element = h("div", {}, this.#legend, this.#rows);
  }

  /**
   * Show other bars.
   *
   * @param {BarRow[]} rows
   */
  update(rows) {
    const longest = Math.max(...rows.map((row) => sum(row, 1)), Number.MIN_VALUE);
    const create = () => h("li", {}, h("span", { class: "bar-label" }), h("span", { class: "bar-track" }), h("b"));
    reconcile(this.#rows, rows, (row) => row.key, create, (element, row) => {
      put(element, "class", row.isStrong ? "strong" : null);
      setText(element.children[0], row.label);
      setText(element.children[2], row.total);
      put(element, "title", row.parts.map((part) => `${part.name} ${number(part.value)}`).join(", "));
      fillBar(element.children[1], row, longest);
    });
    const names = new Map(rows.flatMap((row) => row.parts.map((part) => [part.name, part])));
    reconcile(this.#legend, [...names.values()], (part) => part.name, () => h("li", {}, h("i"), h("span")), (element, part) => {
      put(element.children[0], "class", `curve-${part.colour}${part.value < 0 ? " credit" : ""}`);
      setText(element.children[1], part.name);
    });
  }
}

/**
 * @param {Element} track
 * @param {BarRow} row
 * @param {number} longest
 */
function fillBar(track, row, longest) {
  const credit = Math.min(sum(row, -1), sum(row, 1));
  const parts = row.parts.filter((part) => part.value > 0);
  reconcile(track, parts, (part) => part.name, () => h("i"), (element, part) => {
    put(element, "class", `curve-${part.colour}`);
    setStyle(element, "--share", (part.value / longest).toFixed(4));
  });
  setStyle(track, "--gross", (sum(row, 1) / longest).toFixed(4));
  setStyle(track, "--credit", (credit / longest).toFixed(4));
}

/**
 * Return the sum of the parts with one sign, as a positive number.
 *
 * @param {BarRow} row
 * @param {1|-1} sign
 */
function sum(row, sign) {
  return row.parts.reduce((total, part) => total + Math.max(0, sign * part.value), 0);
}

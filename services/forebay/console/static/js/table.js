/** A table that can be sorted, and that updates only the cells that changed. */

import { h, put, reconcile, setText } from "./dom.js";
import { counted } from "./format.js";
import { VisibleRows } from "./visible_rows.js";

const ROWS_MAX = 500; // more rows would take over 50 ms to lay out, unless only visible ones are elements

/** @template T */
export class Table {
  #columns;
  #key;
  #body;
  #more;
  #headings;
  /** @type {VisibleRows<T> | null} */ #visible = null; // for a table that may have many rows
  /** @type {T[]} */ #items = [];
  #sortedBy;
  #isDescending;

  /**
   * @param {object} options
   * @param {string} options.label
   * @param {Column<T>[]} options.columns
   * @param {(item: T) => unknown} options.key identifies a row across updates
   * @param {string} [options.sortedBy] ID of the column that sorts the rows at first; otherwise they keep their order
   * @param {string} [options.longClass] for a table that may have many rows: a CSS class that sets `--tracks`, the grid
   *   tracks of its columns. Only visible rows are elements then.
   * @param {boolean} [options.isDescending] whether this column sorts the largest values first
   */
  constructor({ label, columns, key, sortedBy, longClass, isDescending = false }) {
    this.#columns = columns;
    this.#key = key;
    this.#sortedBy = sortedBy ?? null;
    this.#isDescending = isDescending;
    this.#body = h("tbody", { role: "rowgroup" });
    this.#more = h("p", { class: "soft more", hidden: true });
    this.#headings = columns.map((column) => this.#heading(column));
    const head = h("thead", { role: "rowgroup" }, h("tr", { role: "row", "aria-rowindex": longClass ? 1 : null }, this.#headings));
    const props = { role: "table", "aria-label": label, class: longClass && `rows ${longClass}` };
    const table = h("table", props, head, this.#body);
    if (longClass) this.#visible = new VisibleRows({ table, body: this.#body, key, create: () => this.#createRow() });
    const box = h("div", { class: "scroll", role: "region", "aria-label": label, tabindex: 0 }, table);
    this.element = h("div", { class: "table" }, box, this.#more);
  }

  update(/** @type {T[]} */ items) {
    this.#items = items;
    const rows = this.#sorted(items);
    const update = (row, item) =>
      this.#columns.forEach((column, at) => fill(column, (row.children[at]), item));
    if (this.#visible) {
      this.#visible.show(rows, update);
      return;
    }
    reconcile(this.#body, rows.slice(0, ROWS_MAX), this.#key, () => this.#createRow(), update);
    put(this.#more, "hidden", rows.length <= ROWS_MAX);
    setText(this.#more, `${counted(rows.length - ROWS_MAX, "more row")} not shown. Use a filter to see other rows.`);
  }

  /** Stop following the visible part. Only a table with `longClass` needs it. */
  dispose() {
    this.#visible?.dispose();
  }

  #createRow() {
    const cells = this.#columns.map((column) => h("td", { role: "cell", class: column.isText ? "t" : null }));
    return h("tr", { role: "row" }, cells);
  }

  #heading(/** @type {Column<T>} */ column) {
    const props = { role: "columnheader", scope: "col", class: column.isText ? "t" : null, title: column.title };
    if (!column.order) return h("th", props, column.label);
    const button = h("button", { type: "button", class: "sort", onclick: () => this.#sortBy(column) }, column.label);
    return h("th", { ...props, "aria-sort": this.#direction(column) }, button);
  }

  #sortBy(/** @type {Column<T>} */ column) {
    this.#isDescending = this.#sortedBy === column.id ? !this.#isDescending : Boolean(column.isDescendingFirst);
    this.#sortedBy = column.id;
    this.#columns.forEach((one, at) => put(this.#headings[at], "aria-sort", one.order ? this.#direction(one) : null));
    this.update(this.#items);
  }

  #direction(/** @type {Column<T>} */ column) {
    if (this.#sortedBy !== column.id) return "none";
    return this.#isDescending ? "descending" : "ascending";
  }

  #sorted(/** @type {T[]} */ items) {
    const order = this.#columns.find((column) => column.id === this.#sortedBy)?.order;
    if (!order) return items;
    const sign = this.#isDescending ? -1 : 1;
    return items
      .map((item) => ({ item, value: order(item) }))
      .sort((a, b) => compare(a.value, b.value, sign))
      .map(({ item }) => item);
  }
}

const COLLATOR = new Intl.Collator("en", { numeric: true });

function compare(a, b, sign) {
  if (a === null || b === null) return Number(a === null) - Number(b === null);
  if (typeof a === "string" || typeof b === "string") return sign * COLLATOR.compare(String(a), String(b));
  return sign * (a - b);
}

/** @template T @param {Column<T>} column @param {HTMLElement} cell @param {T} item */
function fill(column, cell, item) {
  if (column.fill) column.fill(cell, item);
  else setText(cell, column.text?.(item) ?? "");
}

/**
 * The rows of a long table. Only rows in or near the visible part of the page are elements, because each update of a row
 * takes time for layout and painting. Padding takes the place of the other rows.
 */

import { put, reconcile, setStyle } from "./dom.js";

const MARGIN_PX = 100; // height above and below the visible part in which rows are elements, so that Tab finds a next row
const ROWS_MIN = 10; // also of a table outside of the visible part, so that the keyboard and screen readers get into it
const SHORT_ROWS = 40; // a table with at most so many rows has an element for each
const ROW_PX = 28; // height of a row before one was measured

/** @template T */
export class VisibleRows {
  #table;
  #body;
  #key;
  #create;
  /** @type {(row: any, item: T) => void} */ #update = () => {};
  #keys = new WeakMap(); // key of the item of each row
  /** @type {T[]} */ #items = [];
  #first = 0; // index of the first item with an element
  #last = 0; // index after the last one
  #rowPx = ROW_PX;
  #isPrinting = false;
  #listening = new AbortController();

  /**
   * @param {object} options
   * @param {HTMLElement} options.table
   * @param {HTMLElement} options.body `tbody` of the table, of `display: block`
   * @param {(item: T) => unknown} options.key identifies an item across updates; no two items have the same key
   * @param {(item: T) => Element} options.create
   */
  constructor({ table, body, key, create }) {
    this.#table = table;
    this.#body = body;
    this.#key = key;
    this.#create = create;
    const { signal } = this.#listening;
    for (const name of ["scroll", "resize"]) addEventListener(name, () => this.#move(), { signal, passive: true });
    addEventListener("beforeprint", () => this.#print(true), { signal });
    addEventListener("afterprint", () => this.#print(false), { signal });
  }

  /** update: fills a row, also one that is scrolled into view later */
  show(/** @type {T[]} */ items, /** @type {(row: any, item: T) => void} */ update) {
    this.#items = items;
    this.#update = update;
    put(this.#table, "aria-rowcount", items.length + 1); // with the row of headings
    this.#render(this.#range());
  }

  dispose() {
    this.#listening.abort();
  }

  #move() {
    const range = this.#range();
    if (range[0] !== this.#first || range[1] !== this.#last) this.#render(range);
  }

  #print(isPrinting) {
    this.#isPrinting = isPrinting;
    this.#move();
  }

  /** @returns {[number, number]} */
  #range() {
    const count = this.#items.length;
    if (this.#isPrinting || count <= SHORT_ROWS) return [0, count];
    const elements = this.#body.children;
    if (elements.length) {
      const heightPx = elements[elements.length - 1].getBoundingClientRect().bottom - elements[0].getBoundingClientRect().top;
      this.#rowPx = heightPx / elements.length || ROW_PX; // a hidden table has no height
    }
    const topPx = this.#body.getBoundingClientRect().top;
    const first = Math.floor(Math.min(count - ROWS_MIN, Math.max(0, (-MARGIN_PX - topPx) / this.#rowPx)));
    const last = Math.ceil(Math.min(count, Math.max(first + ROWS_MIN, (innerHeight + MARGIN_PX - topPx) / this.#rowPx)));
    const focused = this.#focusedIndex();
    return focused < 0 ? [first, last] : [Math.min(first, focused), Math.max(last, focused + 1)];
  }

  /** Returns index of the item whose row contains the focus, which must remain an element; otherwise -1 */
  #focusedIndex() {
    const row = document.activeElement?.closest("tr");
    const key = row && this.#keys.get(row);
    return key === undefined || key === null ? -1 : this.#items.findIndex((item) => this.#key(item) === key);
  }

  #render([first, last]) {
    this.#first = first;
    this.#last = last;
    let index = first;
    reconcile(this.#body, this.#items.slice(first, last), this.#key, this.#create, (row, item) => {
      this.#keys.set(row, this.#key(item));
      put(row, "aria-rowindex", ++index + 1);
      this.#update(row, item);
    });
    setStyle(this.#body, "padding-top", `${Math.round(first * this.#rowPx)}px`);
    setStyle(this.#body, "padding-bottom", `${Math.round((this.#items.length - last) * this.#rowPx)}px`);
  }
}

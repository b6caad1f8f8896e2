/** The table of workers and ranks, with a filter. */

import { h, printable, put, reconcile, setText } from "../dom.js";
import { compact, counted, duration, percent, whole } from "../format.js";
import { linkTo } from "../moment.js";
import { meter, updateMeter } from "../parts.js";
import { Table } from "../table.js";
import { fillBadge } from "./fleet_tables.js";

/**
 * @typedef {Pick<Server.WorkerActivity, "hit_rate" | "ttft_p50_us">} Activity
 * @typedef {{ key: string, name: string, worker: Server.WorkerStatus, rank: Server.RankStatus, activity: Activity }} Row
 */

export class WorkerTable {
  /** @type {Row[]} */ #rows = [];
  /** @type {number | null} */ #atUs = null; // moment of the rows
  #context;
  #table;
  #search;
  #state = h("select", { onchange: () => this.#show() });
  #count = h("span", { class: "soft", role: "status" });

  constructor(/** @type {Context} */ context) {
    this.#context = context;
    this.#search = h("input", { type: "search", placeholder: "name, pool, role or engine", oninput: () => this.#show() });
    this.#table = new Table({ label: "Workers and ranks", key: (row) => row.key, columns: this.#columns(), longClass: "workers" });
    this.element = h(
      "section",
      { class: "part" },
      h("h2", {}, "Workers"),
      h("div", { class: "filters" }, h("label", {}, "Find", this.#search), h("label", {}, "State", this.#state), this.#count),
      this.#table.element,
    );
  }

  update(/** @type {Server.GroupStatus} */ status, /** @type {Server.WorkerActivity[]} */ activities) {
    this.#atUs = this.#context.moment.atUs;
    const activity = new Map(activities.map((one) => [one.worker_id, one]));
    this.#rows = status.workers.flatMap((worker) =>
      worker.ranks.map((rank) => ({
        key: `${worker.worker_id}/${rank.rank}`,
        name: worker.ranks.length > 1 ? `${worker.worker_id}/${rank.rank}` : worker.worker_id,
        worker,
        rank,
        activity: activity.get(worker.worker_id) ?? { hit_rate: null, ttft_p50_us: null },
      })),
    );
    const states = ["", ...new Set(status.workers.map((worker) => worker.state))];
    const chosen = this.#state.value;
    if (chosen && !states.includes(chosen)) states.push(chosen);
    reconcile(this.#state, states, (state) => state, (state) => h("option", { value: state }, state || "all"));
    this.#show();
  }

  #show() {
    const wanted = this.#search.value.trim().toLowerCase();
    const state = this.#state.value;
    const shown = this.#rows.filter(({ name, worker }) => {
      const texts = [printable(name), worker.pool, worker.role, worker.engine, ...worker.loras];
      return (!state || worker.state === state) && texts.some((text) => text.toLowerCase().includes(wanted));
    });
    const all = this.#rows.length;
    setText(this.#count, shown.length === all ? counted(all, "rank") : `${whole(shown.length)} of ${counted(all, "rank")}`);
    this.#table.update(shown);
  }

  dispose() {
    this.#table.dispose();
  }

  /** @returns {Column<Row>[]} */
  #columns() {
    const numeric = (id, label, title, /** @type {(row: Row) => number | null} */ value, text = whole) => ({
      id,
      label,
      title,
      text: (/** @type {Row} */ row) => text(value(row)),
      order: value,
      isDescendingFirst: true,
    });
    const textual = (id, /** @type {(row: Row) => string} */ value) => ({ id, label: id, isText: true, text: value, order: value });
    return [
      { ...textual("worker", ({ name }) => name), fill: (cell, row) => this.#fillName(cell, row) },
      { ...textual("state", ({ worker }) => worker.state), fill: (cell, { worker }) => fillBadge(cell, worker.state) },
      textual("role", ({ worker }) => worker.role),
      textual("pool", ({ worker }) => worker.pool),
      numeric("active", "active", "requests sent to the rank that have not ended", ({ rank }) => rank.active_requests),
      numeric("running", "running", "requests in the engine's batch", ({ rank }) => rank.running),
      numeric("waiting", "waiting", "requests in the engine's queue", ({ rank }) => rank.waiting),
      numeric("prefill", "to prefill", "uncached prompt tokens of requests that wait for their first token", ({ rank }) => rank.prefill_tokens),
      { ...numeric("kv", "KV in use", "KV blocks in use, of all KV blocks of the rank", occupancy), fill: fillOccupancy },
      numeric("cached", "cached", "blocks in the rank's cache on the device", ({ rank }) => rank.cached_blocks),
      numeric("hits", "hit rate", "prompt tokens found in the worker's cache, in the last minute", ({ activity }) => activity.hit_rate, percent),
      numeric("ttft", "TTFT p50", "median TTFT of the worker in the last minute", ({ activity }) => activity.ttft_p50_us, duration),
      numeric("epoch", "epoch", "epoch of the worker, which is higher after each restart", ({ worker }) => worker.epoch),
    ];
  }

  #fillName(cell, /** @type {Row} */ { name, worker }) {
    if (!cell.firstElementChild) cell.append(h("a", { class: "name" }));
    const link = cell.firstElementChild;
    setText(link, name);
    put(link, "href", linkTo("requests", "", { worker: worker.worker_id }, this.#atUs));
    put(link, "title", `Requests of ${worker.worker_id}, engine ${worker.engine || "unknown"}${loras(worker)}`);
  }
}

function loras(/** @type {Server.WorkerStatus} */ { loras: names }) {
  return names.length ? `, LoRA adapters ${names.join(", ")}` : "";
}

function occupancy(/** @type {Row} */ { rank }) {
  return rank.kv_blocks_used === null || !rank.kv_blocks_total ? null : rank.kv_blocks_used / rank.kv_blocks_total;
}

function fillOccupancy(cell, /** @type {Row} */ row) {
  if (!cell.firstElementChild) cell.append(meter());
  const { kv_blocks_used: used, kv_blocks_total: total } = row.rank;
  const label = `${used === null ? "unknown" : compact(used)} of ${compact(total)}`;
  updateMeter(cell.firstElementChild, occupancy(row) ?? 0, label);
  put(cell, "title", `${used === null ? "unknown" : whole(used)} of ${whole(total)} KV blocks`);
}

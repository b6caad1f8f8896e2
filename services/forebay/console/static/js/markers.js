/** Events of interest on the time axis: their kinds, shapes and texts. */

import { svg } from "./dom.js";
import { counted } from "./format.js";

const MARKERS_MAX = 500; // the server merges more into these; a wide screen has room for 100
const RELOAD_MS = 3_000;

/** Kinds of markers, most important first. Of several markers at one place, the most important kind is drawn. */
export const KINDS = {
  worker_lost: { label: "worker lost", tone: "bad", path: "M2 0L6 4L10 0L12 2L8 6L12 10L10 12L6 8L2 12L0 10L4 6L0 2Z" },
  takeover: { label: "takeover", tone: "run", path: "M6 0L12 6L6 12L0 6Z" },
  failures: { label: "failures", tone: "bad", path: "M3.5 0H8.5L12 3.5V8.5L8.5 12H3.5L0 8.5V3.5ZM5 2.5V7H7V2.5ZM5 8V9.8H7V8Z" },
  rejections: { label: "rejections", tone: "bad", path: "M6 0a6 6 0 1 0 0 12a6 6 0 1 0 0-12ZM2 5V7H10V5Z" },
  worker_suspect: { label: "worker suspect", tone: "warn", path: "M6 0.5L12 11.5H0ZM6 4.6L3.4 9.6H8.6Z" },
  scaling: { label: "scaling", tone: "run", path: "M6 0L10.5 5H1.5ZM6 12L1.5 7H10.5Z" },
  configuration: { label: "configuration", tone: "soft", path: "M1 1H11V11H1Z" },
  command: { label: "command", tone: "soft", path: "M1 1H11V11H1ZM3 3V9H9V3Z" },
  worker_draining: { label: "worker draining", tone: "warn", path: "M6 0a6 6 0 1 0 0 12a6 6 0 1 0 0-12ZM6 1.8a4.2 4.2 0 0 1 0 8.4Z" },
  worker_joined: { label: "worker joined", tone: "good", path: "M6 0.5L12 11.5H0Z" },
};
const UNKNOWN = { label: "other", tone: "soft", path: "M4 4H8V8H4Z" };
const ORDER = Object.keys(KINDS);

export function kindOf(kind) {
  return KINDS[kind] ?? { ...UNKNOWN, label: kind };
}

export function shapeOf(kind) {
  const { tone, path } = kindOf(kind);
  const props = { class: "shape", viewBox: "0 0 12 12", width: 12, height: 12, "aria-hidden": "true", "data-tone": tone };
  return svg("svg", props, svg("path", { d: path, "fill-rule": "evenodd" }));
}

/** Return a marker in words, with the number of its events unless the text contains it. */
export function textOf(/** @type {Server.Marker} */ marker) {
  return marker.count > 1 && !marker.text.includes(String(marker.count)) ? `${marker.text} (${counted(marker.count, "event")})` : marker.text;
}

/**
 * @typedef {object} Cluster
 * @property {Server.Marker[]} markers in order of time, at least one
 * @property {Server.Marker["kind"]} kind the most important kind
 * @property {number} share place on the axis, from 0 to 1
 */

/** Merge markers that would overlap. */
export function clusters(/** @type {Server.Marker[]} */ markers, beginUs, endUs, places) {
  const span = Math.max(1, endUs - beginUs);
  /** @type {Cluster[]} */ const found = [];
  for (const marker of markers) {
    const share = Math.min(1, Math.max(0, (marker.at_us - beginUs) / span));
    const last = found.at(-1);
    if (last && share - last.share < 1 / places) {
      last.markers.push(marker);
      if (rank(marker.kind) < rank(last.kind)) last.kind = marker.kind;
    } else found.push({ markers: [marker], kind: marker.kind, share });
  }
  return found;
}

/** The markers of the whole log, which are read again while it grows. */
export class MarkerList {
  /** @type {Server.Marker[]} */ markers = [];
  #api;
  #onChange;
  #shownEndUs = -1;
  #readMs = -RELOAD_MS;
  #isReading = false;

  constructor(/** @type {Context["api"]} */ api, onChange) {
    this.#api = api;
    this.#onChange = onChange;
  }

  /** Read the markers if the log has grown since they were read. */
  async update(/** @type {Server.CatalogState} */ { begin_us, end_us }) {
    const isDue = performance.now() - this.#readMs >= RELOAD_MS;
    if (this.#isReading || !isDue || end_us === this.#shownEndUs || end_us === 0) return;
    this.#isReading = true;
    try {
      const params = { from_us: 0, to_us: end_us + 1, limit: MARKERS_MAX };
      const { markers } = await this.#api.get("v1/console/markers", params);
      // Events before the first decision have no moment that can be shown.
      this.markers = markers.map((one) => ({ ...one, at_us: Math.max(begin_us, one.at_us) }));
      this.#shownEndUs = end_us;
      this.#onChange();
    } catch {
      // The page reports a lost connection, and the next state leads to another attempt.
    } finally {
      this.#readMs = performance.now();
      this.#isReading = false;
    }
  }

  before(atUs) {
    return this.markers.findLast((marker) => marker.at_us < atUs);
  }

  after(atUs) {
    return this.markers.find((marker) => marker.at_us > atUs);
  }
}

function rank(kind) {
  const at = ORDER.indexOf(kind);
  return at < 0 ? ORDER.length : at;
}

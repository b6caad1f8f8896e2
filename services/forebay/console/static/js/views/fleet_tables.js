/** Tables of pools and input topics. */

import { put } from "../dom.js";
import { percent, whole } from "../format.js";
import { badge, updateBadge } from "../parts.js";
import { Table } from "../table.js";

/** @returns {Table<Server.PoolStatus>} the table of pools */
export function createPools() {
  return new Table({
    label: "Pools",
    key: (pool) => pool.pool,
    columns: [
      { id: "pool", label: "pool", isText: true, text: (pool) => pool.pool, order: (pool) => pool.pool },
      { id: "model", label: "model", isText: true, text: (pool) => pool.model, order: (pool) => pool.model },
      { id: "role", label: "role", isText: true, text: (pool) => pool.role, order: (pool) => pool.role },
      { id: "policy", label: "policy", isText: true, text: (pool) => pool.policy, order: (pool) => pool.policy },
      {
        id: "state",
        label: "state",
        isText: true,
        fill: (cell, pool) => fillBadge(cell, pool.drained ? "drained" : "ready", pool.drained ? "drained" : "takes requests"),
      },
      { id: "canary", label: "canary", isText: true, text: canary },
      { id: "routed", label: "routed", text: (pool) => whole(pool.routed), order: (pool) => pool.routed, isDescendingFirst: true },
      { id: "queued", label: "queued", text: (pool) => whole(pool.queued), order: (pool) => pool.queued, isDescendingFirst: true },
    ],
  });
}

/** @returns {Table<Server.TopicStatus>} the table of the owner's input topics */
export function createTopics() {
  return new Table({
    label: "Input topics of the owner",
    key: (topic) => `${topic.topic}/${topic.partition}`,
    columns: [
      { id: "topic", label: "topic", isText: true, text: (topic) => topic.topic, order: (topic) => topic.topic },
      { id: "partition", label: "partition", text: (topic) => whole(topic.partition) },
      { id: "applied", label: "applied", title: "offset of the first record not applied yet", text: (topic) => whole(topic.applied) },
      { id: "end", label: "end", title: "offset after the newest record", text: (topic) => whole(topic.end) },
      {
        id: "lag",
        label: "lag",
        title: "records that the owner has not applied yet",
        text: (topic) => whole(topic.lag),
        order: (topic) => topic.lag,
        isDescendingFirst: true,
      },
    ],
  });
}

export function fillBadge(cell, state, label = state) {
  if (!cell.firstElementChild) cell.append(badge());
  updateBadge(cell.firstElementChild, state, label);
  put(cell, "data-state", state);
}

function canary(/** @type {Server.PoolStatus} */ { canary_of, canary_share }) {
  return canary_of === null ? "" : `${percent(canary_share)} of ${canary_of}`;
}

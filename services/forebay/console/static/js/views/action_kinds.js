/** The actions of an operator: their fields, and the event that each of them writes, in words. */

import { h } from "../dom.js";
import { counted } from "../format.js";

/**
 * @typedef {object} ActionForm
 * @property {Array<{ label: string, input: HTMLElement, hint?: string }>} fields
 * @property {() => { body?: Record<string, any>, problem?: string }} read returns the body of the request, or what is wrong
 * @typedef {object} ActionKind
 * @property {string} name name in the address of the endpoint
 * @property {string} title
 * @property {string} about the effect, in words
 * @property {(system: { status: Server.GroupStatus, info: Server.ConsoleInfo }) => ActionForm} createForm
 * @property {(body: any, group: string) => { topic: string, type: string, text: string }} event
 */

const THRESHOLDS = {
  active_decode_blocks_threshold: ["KV blocks in use", "share of a rank's blocks, from 0 to 1"],
  active_prefill_tokens_threshold: ["Queued prefill", "tokens"],
  active_prefill_tokens_threshold_frac: ["Queued prefill, in engine steps", "multiple of the largest step"],
};
const OFF = "off";

/** @type {ActionKind[]} */
export const ACTIONS = [
  {
    name: "drain-worker",
    title: "Drain a worker",
    about: "The worker gets no new requests, finishes those that it has, and leaves. It does not come back by itself.",
    createForm({ status }) {
      const workers = status.workers.filter((one) => one.state !== "draining");
      const busy = (/** @type {Server.WorkerStatus} */ one) => one.ranks.reduce((sum, rank) => sum + rank.active_requests, 0);
      const label = (/** @type {Server.WorkerStatus} */ one) => `${one.worker_id}: ${one.state}, pool ${one.pool}, ${counted(busy(one), "active request")}`;
      const input = select("worker", workers.map((one) => [one.worker_id, label(one)]));
      return {
        fields: [{ label: "Worker", input }],
        read: () => (input.value ? { body: { worker_ids: [input.value] } } : { problem: "There is no worker to drain." }),
      };
    },
    event: ({ worker_ids }, group) => ({
      topic: "control",
      type: "control.worker_commanded",
      text: `command drain, sent to worker ${worker_ids[0]} of ${group}`,
    }),
  },
  {
    name: "policy",
    title: "Change the policy of a pool",
    about: "The policy selects the worker of each request. The change is valid until the next change or a new configuration of the pool.",
    createForm({ status, info }) {
      const input = poolSelect(status);
      const policy = select("policy", info.policies.map((one) => [one, one]));
      return {
        fields: [
          { label: "Pool", input },
          { label: "Policy", input: policy },
        ],
        read() {
          const now = status.pools.find((one) => one.pool === input.value)?.policy;
          if (now === policy.value) return { problem: `The pool ${input.value} already routes by ${now}. Choose another policy.` };
          return { body: { pool: input.value, mode: policy.value } };
        },
      };
    },
    event: ({ pool, mode }, group) => ({
      topic: "control",
      type: "control.policy_set",
      text: `the pool ${pool} of ${group} routes by ${mode}`,
    }),
  },
  {
    name: "busy-threshold",
    title: "Change busy thresholds",
    about: "A rank above one of its thresholds counts as busy. Requests are rejected while all workers are busy. Applies to all pools of the model.",
    createForm() {
      const inputs = Object.entries(THRESHOLDS).map(([name, [label, unit]]) => ({
        name,
        label,
        input: field({ type: "text", inputmode: "decimal", id: `action-${name}`, placeholder: "unchanged" }),
        hint: `${unit}, or ${OFF}. Empty: unchanged.`,
      }));
      return { fields: inputs, read: () => readThresholds(inputs) };
    },
    event: ({ ...changes }, group) => ({
      topic: "control",
      type: "control.busy_thresholds_set",
      text: `busy thresholds of ${group}: ${Object.entries(changes)
        .map(([name, value]) => `${name} ${value ?? OFF}`)
        .join(", ")}`,
    }),
  },
  {
    name: "drain-pool",
    title: "Drain a pool, or end its drain",
    about: "A drained pool gets no new requests. Requests that its workers have finish there.",
    createForm({ status }) {
      const input = poolSelect(status);
      const isDrained = (name) => status.pools.find((one) => one.pool === name)?.drained;
      const drained = select("drained", [["true", "drain: no new requests"], ["false", "end the drain: requests again"]]);
      const suggest = () => (drained.value = String(!isDrained(input.value)));
      input.addEventListener("change", suggest);
      suggest();
      return {
        fields: [
          { label: "Pool", input },
          { label: "Change", input: drained },
        ],
        read: () => ({ body: { pool: input.value, drained: drained.value === "true" } }),
      };
    },
    event: ({ pool, drained }, group) => ({
      topic: "control",
      type: "control.pool_drain_set",
      text: `the pool ${pool} of ${group} gets ${drained ? "no new requests" : "requests again"}`,
    }),
  },
];

export function outcomeOf({ outcomes, pools, ...settings }) {
  if (outcomes) {
    return outcomes.map((one) => {
      const message = one.message ? `: ${one.message}` : "";
      return `${one.worker_id}: ${one.status.replaceAll("_", " ")}${message}`;
    });
  }
  if (pools) {
    return pools.map((one) => `pool ${one.pool}: policy ${one.policy}${one.drained ? ", drained" : ", gets new requests"}`);
  }
  return Object.entries(settings).map(([name, value]) => `${name}: ${value ?? OFF}`);
}

function readThresholds(inputs) {
  const body = {};
  for (const { name, label, input } of inputs) {
    const given = input.value.trim();
    if (!given) continue;
    const value = given === OFF ? null : Number(given);
    if (value !== null && !(value >= 0)) return { problem: `${label}: “${given}” is not a number. Write a number, or ${OFF}.` };
    body[name] = value;
  }
  return Object.keys(body).length ? { body } : { problem: "Nothing is changed. Enter at least one threshold." };
}

function poolSelect(/** @type {Server.GroupStatus} */ status) {
  const label = (/** @type {Server.PoolStatus} */ one) => `${one.pool}: ${one.role}, policy ${one.policy}${one.drained ? ", drained" : ""}`;
  return select("pool", status.pools.map((one) => [one.pool, label(one)]));
}

function select(name, options) {
  return h("select", { id: `action-${name}` }, options.map(([one, label]) => h("option", { value: one }, label)));
}

function field(props) {
  return h("input", { autocomplete: "off", spellcheck: "false", ...props });
}

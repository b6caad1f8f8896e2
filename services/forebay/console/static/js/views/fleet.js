/**
 * The fleet at the chosen moment.
 *
 * @module views/fleet
 */

import { h, setText } from "../dom.js";

/**
 * Create the view.
 *
 * @param {import("../views.js").Context} context
 * @returns {import("../views.js").View}
 */
export function create({ api, moment }) {
  const sentence = h("h1");
  return {
    element: h("div", { class: "fleet" }, sentence),
    async refresh(signal) {
      const { status } = await api.get("v1/console/fleet", { at_us: moment.atUs }, signal);
      setText(sentence, status.ready ? "Ready for requests." : "Not ready for requests.");
    },
    dispose() {},
  };
}

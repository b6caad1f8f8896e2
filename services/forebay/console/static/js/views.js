/**
 * The views of the console, in the order of the navigation.
 *
 * A module of a view exports `create(context)`, which returns a `View`.
 *
 * @module views
 */

/**
 * @typedef {object} Context
 * @property {import("./api.js").Api} api
 * @property {import("./moment.js").Moment} moment the chosen moment and the route
 * @property {object} info the ConsoleInfo of the console
 * @property {() => object} state returns the newest CatalogState
 * @property {(view: string, argument?: string, params?: object) => void} navigate shows another view at the same moment
 */

/**
 * @typedef {object} View
 * @property {HTMLElement} element
 * @property {(signal: AbortSignal) => Promise<void>} refresh reads and shows the data of the chosen moment. It runs at
 *   most four times per second and never twice at once. The signal is aborted if another moment is chosen meanwhile.
 * @property {() => void} dispose stops timers and running work
 */

/**
 * @typedef {object} ViewEntry
 * @property {string} name first part of the fragment
 * @property {string} title name in the navigation
 * @property {() => Promise<{create: (context: Context) => View}>} load
 * @property {() => Promise<{create: (context: Context) => View}>} [loadOne] for a fragment with an argument, for example
 *   `#/requests/17`
 */

/** @type {ViewEntry[]} */
export const VIEWS = [
  { name: "fleet", title: "Fleet", load: () => import("./views/fleet.js") },
  {
    name: "requests",
    title: "Requests",
    load: () => import("./views/requests.js"),
    loadOne: () => import("./views/request.js"),
  },
  { name: "time", title: "Time", load: () => import("./views/time.js") },
  { name: "what-if", title: "What if", load: () => import("./views/whatif.js") },
  { name: "scaling", title: "Scaling", load: () => import("./views/scaling.js") },
];

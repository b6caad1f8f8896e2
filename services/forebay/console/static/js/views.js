/**
 * The views of the console, in the order of the navigation.
 *
 * A module of a view exports `create(context)`, which returns a `View`.
 */

/**
 * Context
 * - moment: the chosen moment and the route
 * - info: the ConsoleInfo of the console
 * - state: returns the newest CatalogState
 * - navigate: shows another view at the same moment
 */

/**
 * View
 * - refresh: reads and shows the data of the chosen moment. It runs at
 *   most four times per second and never twice at once. The signal is aborted if another moment is chosen meanwhile.
 * - dispose: stops timers and running work
 */

/**
 * ViewEntry
 * - name: first part of the fragment
 * - title: name in the navigation
 * - loadOne: for a fragment with an argument, for example
 *   `#/requests/17`
 */

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

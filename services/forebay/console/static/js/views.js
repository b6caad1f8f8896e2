/**
 * The views of the console, in the order of the navigation.
 *
 * A module of a view exports a class `View`. Its constructor receives `api`, `moment` (the chosen moment and the route),
 * `info` (ConsoleInfo), `state` (returns the newest CatalogState) and `navigate`. Its field `element` is shown.
 * `refresh(signal)` reads and shows the data of the chosen moment. It runs at most four times per second and never twice
 * at once, and its signal is aborted if another moment is chosen meanwhile. `dispose()` stops timers and running work.
 */

export const VIEWS = [
  { name: "fleet", title: "Fleet", load: () => import("./views/fleet.js") },
  {
    name: "requests",
    title: "Requests",
    load: () => import("./views/requests.js"),
    loadOne: () => import("./views/request.js"), // with an argument, as in #/requests/17
  },
  { name: "time", title: "Time", load: () => import("./views/time.js") },
  { name: "what-if", title: "What if", load: () => import("./views/whatif.js") },
  { name: "scaling", title: "Scaling", load: () => import("./views/scaling.js") },
];

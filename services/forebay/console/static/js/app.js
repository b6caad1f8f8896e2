/** The console's page: connects to the console, shows the view of the route, and keeps the view up to date. */

import { Api, ApiError, isAbort } from "./api.js";
import { replace } from "./dom.js";
import { clock } from "./format.js";
import { Frame } from "./frame.js";
import { linkTo, Moment, takeToken } from "./moment.js";
import { TimeBar } from "./time_bar.js";
import { VIEWS } from "./views.js";

const INTERVAL_MS = 250; // at most four runs per second, which is as often as the server reports a new state
const RETRY_MS = 2_000;

/** Runs an asynchronous function, never twice at once, and not before `INTERVAL_MS` have passed since its last start. */
class Pacer {
  #run;
  /** @type {AbortController | null} */ #running = null;
  #timer;
  #isRequested = false;
  #startedMs = -INTERVAL_MS;

  /** run: must not throw, and should stop when the signal is aborted */
  constructor(/** @type {(signal: AbortSignal) => Promise<void>} */ run) {
    this.#run = run;
  }

  /** Returns whether a run is in progress or due */
  get isBusy() {
    return this.#running !== null || this.#timer !== undefined;
  }

  /** Run after the run in progress, if any. Several requests lead to one run. */
  request() {
    this.#isRequested = true;
    if (!this.#running) this.#schedule(INTERVAL_MS - (performance.now() - this.#startedMs));
  }

  /** Abort the run in progress, if any, and run again at once, because its result is not needed any more. */
  restart() {
    this.#running?.abort();
    this.#isRequested = true;
    this.#schedule(0);
  }

  #schedule(waitMs) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#start(), Math.max(0, waitMs));
  }

  async #start() {
    this.#timer = undefined;
    if (!this.#isRequested) return;
    const running = new AbortController();
    this.#running = running;
    this.#isRequested = false;
    this.#startedMs = performance.now();
    await this.#run(running.signal);
    if (this.#running !== running) return; // another run has replaced this one
    this.#running = null;
    if (this.#isRequested) this.request();
  }
}

class App {
  /** @type {View | null} */ #view = null;
  #shown = ""; // view and argument of #view
  /** @type {Server.ConsoleInfo | null} */ #info = null;
  /** @type {Server.CatalogState | null} */ #state = null;
  /** @type {number | null} */ #atUs = null;
  #isConnected = true;

  constructor() {
    const token = takeToken();
    this.moment = new Moment();
    this.api = new Api((isWrong) => this.frame.requestToken(isWrong));
    if (token) this.api.setToken(token);
    this.pacer = new Pacer((signal) => this.#refresh(signal));
    this.frame = new Frame({
      moment: this.moment,
      timeBar: new TimeBar({ api: this.api, moment: this.moment, isBusy: () => this.pacer.isBusy }),
      onToken: (entered) => {
        this.api.setToken(entered);
        this.start();
      },
      onRetry: () => this.pacer.restart(),
    });
    this.moment.subscribe(() => this.#onMoment());
    document.addEventListener("visibilitychange", () => document.hidden || this.pacer.request());
  }

  /** Connect, and follow the log until the page is closed or the console rejects the token. */
  async start() {
    this.following?.abort();
    const following = new AbortController();
    this.following = following;
    while (!following.signal.aborted && !(await this.#loadInfo())) {
      await new Promise((done) => setTimeout(done, RETRY_MS));
    }
    if (following.signal.aborted || !this.#info) return;
    await Promise.all([this.#show(), this.#showActions()]);
    await this.api.events(
      (state) => this.#onState(state),
      (isConnected) => this.#onConnection(isConnected),
      following.signal,
    );
  }

  /** Returns whether the console replied */
  async #loadInfo() {
    const previous = this.#info;
    try {
      this.#info = await this.api.get("v1/console");
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401) {
        this.following?.abort();
        return false;
      }
      this.frame.showError(error.message);
      return false;
    }
    this.frame.hideError();
    this.frame.showInfo(this.#info);
    if (previous?.source !== this.#info.source || previous?.group !== this.#info.group) this.#shown = "";
    this.#onState(this.#info.state);
    return true;
  }

  #onState(/** @type {Server.CatalogState} */ state) {
    this.#state = state;
    this.frame.showState(state);
    if (this.moment.atUs === null && !document.hidden) this.pacer.request();
  }

  #onConnection(isConnected) {
    if (isConnected === this.#isConnected) return;
    this.#isConnected = isConnected;
    this.frame.showConnection(isConnected);
    // A console that was started again may read another log.
    if (isConnected) this.#loadInfo().then(() => this.#info && this.#show());
  }

  #onError(/** @type {ApiError} */ { status, message }) {
    if (status === 0) this.#onConnection(false);
    else if (status !== 401) this.frame.showError(message);
  }

  #onMoment() {
    this.frame.showMoment();
    if (this.#info) this.#show();
  }

  async #show() {
    const { view, argument } = this.moment.route;
    const entry = VIEWS.find((one) => one.name === view);
    if (!entry) {
      this.moment.navigate(VIEWS[0].name, "", {}, { isNew: false });
      return;
    }
    this.frame.showRoute(entry);
    const shown = linkTo(view, argument);
    this.frame.setBusy(shown !== this.#shown || this.#atUs !== this.moment.atUs);
    if (shown !== this.#shown) {
      this.#shown = shown;
      await this.#create(entry, argument !== "" && entry.loadOne ? entry.loadOne : entry.load, shown);
    }
    this.pacer.restart();
  }

  async #create(entry, load, shown) {
    this.#view?.dispose?.();
    this.#view = null;
    const { View } = await load();
    if (shown !== this.#shown) return; // another view was chosen meanwhile
    const created = new View(this.#context);
    this.#view = created;
    this.frame.hideError();
    replace(this.frame.main, created.element);
    scrollTo(0, 0);
    this.#atUs = NaN; // nothing is shown yet
    document.title = `${entry.title} · forebay`;
  }

  get #context() {
    const { api, moment } = this;
    const context = { api, moment, navigate: moment.navigate.bind(moment), info: this.#info, state: () => this.#state };
    return /** @type {Context} */ (context); // views are created once the console has replied
  }

  /** Offer actions in the header if the console can execute them. */
  async #showActions() {
    if (!this.#info?.can_act) return;
    const { actionButton } = await import("./views/actions.js");
    replace(this.frame.tools, actionButton(this.#context));
  }

  async #refresh(signal) {
    const view = this.#view;
    const atUs = this.moment.atUs;
    if (!view) return;
    try {
      await view.refresh?.(signal);
      if (signal.aborted) return;
      this.frame.hideError();
      this.frame.setMissing(false);
    } catch (error) {
      if (signal.aborted || isAbort(error)) return;
      if (!(error instanceof ApiError)) throw error;
      this.#onError(error);
      if (this.#atUs !== atUs) this.frame.setMissing(true);
    }
    this.#atUs = atUs;
    this.frame.setBusy(false);
    const title = VIEWS.find((one) => one.name === this.moment.route.view)?.title;
    document.title = `${atUs === null ? "" : `${clock(atUs)} · `}${title} · forebay`;
  }
}

new App().start();

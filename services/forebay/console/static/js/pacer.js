/** Limit how often and how many times at once a function runs. */

const INTERVAL_MS = 250; // at most four runs per second, which is as often as the server reports a new state

/** Runs an asynchronous function, never twice at once, and not before `INTERVAL_MS` have passed since its last start. */
export class Pacer {
  #run;
  #running = null;
  #timer;
  #isRequested = false;
  #isStopped = false;
  #startedMs = -INTERVAL_MS;

  /** run: must not throw, and should stop when the signal is aborted */
  constructor(run) {
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

  /** Abort the run in progress and ignore later requests. */
  stop() {
    this.#isStopped = true;
    this.#running?.abort();
    clearTimeout(this.#timer);
    this.#timer = undefined;
  }

  #schedule(waitMs) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#start(), Math.max(0, waitMs));
  }

  async #start() {
    this.#timer = undefined;
    if (this.#isStopped || !this.#isRequested) return;
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

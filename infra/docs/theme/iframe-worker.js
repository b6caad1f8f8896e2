// Browsers start no workers from files, so the search runs in a hidden frame when the site is opened from a disk.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    const inner = (this.inner = frame.contentWindow);
    inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    inner.importScripts = async (...urls) => {
      for (const one of urls) await load(inner.document, one);
    };
    this.ready = load(inner.document, url);
  }

  async postMessage(data) {
    await this.ready;
    this.inner.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
  }
}

function load(page, url) {
  return new Promise((loaded) => {
    const script = page.createElement("script");
    script.src = url;
    script.onload = loaded;
    page.body.append(script);
  });
}

if (location.protocol === "file:") window.Worker = FrameWorker;

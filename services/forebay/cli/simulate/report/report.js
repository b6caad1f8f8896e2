// Controls of the report: visible runs, SLO limits and the kind of load in the heat maps.
const count = new Intl.NumberFormat("en"), NONE = -1;

function duration(ms) {
  const digits = (value, unit) => `${Number(value.toPrecision(3))} ${unit}`;
  if (ms < 0.9995) return ms ? digits(ms * 1e3, "µs") : "0 ms";
  if (ms < 999.5) return digits(ms, "ms");
  if (ms < 6e5) return digits(ms / 1e3, "s");
  return ms < 7.2e6 ? digits(ms / 6e4, "min") : `${(ms / 3.6e6).toFixed(1)} h`;
}

function share(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(1)}%` : "-";
}

// Create an element with attributes and children. Strings become text nodes, never markup.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

async function unpacked() {
  const packed = atob(document.getElementById("data").textContent);
  const bytes = Uint8Array.from(packed, (one) => one.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}

function showRuns() {
  for (const chip of document.querySelectorAll(".chip")) {
    chip.addEventListener("click", () => {
      const shown = chip.getAttribute("aria-pressed") !== "true";
      chip.setAttribute("aria-pressed", shown);
      for (const [id, figure] of Object.entries(figures)) {
        const own = figure.data.filter((trace) => trace.legendgroup === `r${chip.dataset.run}`);
        for (const trace of own) trace.visible = shown;
        if (own.length) draw(id);
      }
    });
  }
}

function showLimits(limits) {
  const rows = [...document.querySelectorAll(".attainment-row")];
  if (!rows.length) return;
  const inputs = { ttft: document.getElementById("ttft-limit"), itl: document.getElementById("itl-limit") };
  if (limits.e2e) document.getElementById("slo-e2e").textContent = `, and E2E ≤ ${limits.e2e}`;

  function update() {
    for (const [name, input] of Object.entries(inputs)) {
      const text = duration(limits[name][input.valueAsNumber]);
      document.getElementById(`${name}-value`).textContent = text;
      input.setAttribute("aria-valuetext", text);
    }
    rows.forEach((row, run) => {
      let attained = 0;
      for (const [ttft, itl, requests] of limits.kept[run]) {
        if (ttft <= inputs.ttft.valueAsNumber && itl <= inputs.itl.valueAsNumber) attained += requests;
      }
      const rate = limits.span_s[run] ? attained / limits.span_s[run] : 0;
      row.querySelector(".bar i").style.width = limits.requests[run] ? `${(100 * attained) / limits.requests[run]}%` : 0;
      row.querySelector("b").textContent = share(attained, limits.requests[run]);
      row.querySelector(".rate").textContent = `${Number(rate.toPrecision(3))} requests/s`;
    });
  }

  function drawLine(name) {
    const at = limits[name][inputs[name].valueAsNumber], id = `${name}-slo`;
    for (const shape of figures[id].layout.shapes) Object.assign(shape, { x0: at, x1: at });
    return draw(id);
  }

  for (const [name, input] of Object.entries(inputs)) {
    input.max = limits[name].length - 1;
    input.value = limits[`${name}_at`];
    for (const shape of figures[`${name}-slo`].layout.shapes) shape.x0 = shape.x1 = limits[name][input.valueAsNumber];
    input.addEventListener("input", () => {
      update();
      drawLine(name);
    });
  }
  update();
}

function showHeat(heat) {
  const kind = document.getElementById("heat-kind");
  kind?.addEventListener("change", () => {
    heat.forEach((of, at) => (figures.load.data[at].z = of[kind.value]));
    figures.load.layout.coloraxis.cmax = Math.max(1, ...heat.flatMap((of) => of[kind.value].flat()));
    draw("load");
  });
}

async function begin() {
  const data = await unpacked();
  showRuns();
  showLimits(data.limits);
  showHeat(data.heat);
  showRequests(data);
  await drawAll();
}

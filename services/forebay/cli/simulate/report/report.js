// Controls of the report: visible runs and SLO limits.

function share(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(1)}%` : "-";
}

function showRuns() {
  for (const chip of document.querySelectorAll(".chip")) {
    chip.addEventListener("click", () => {
      const isShown = chip.getAttribute("aria-pressed") !== "true";
      chip.setAttribute("aria-pressed", isShown);
      if (isShown) hidden.delete(`r${chip.dataset.run}`);
      else hidden.add(`r${chip.dataset.run}`);
      drawAll();
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

  for (const [name, input] of Object.entries(inputs)) {
    input.max = limits[name].length - 1;
    input.value = limits[`${name}_at`];
    charts[name].mark = limits[name][input.valueAsNumber];
    input.addEventListener("input", () => {
      update();
      charts[name].mark = limits[name][input.valueAsNumber];
      for (const plot of plots[name]) plot.redraw();
    });
  }
  update();
}

async function begin(data) {
  showRuns();
  showLimits(data.limits);
  await drawAll();
}

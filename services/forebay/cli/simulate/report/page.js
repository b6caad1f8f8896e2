// Draw the charts of the report with uPlot in the colours of the scheme, and save them as pictures.
const count = new Intl.NumberFormat("en");
const charts = {}, plots = {}; // by ID: descriptions of charts, and a plot per panel
const hidden = new Set(); // groups of curves that are not shown
const TITLE_PX = 64; // of a picture, for the title and the names of the curves
const AXIS_PX = 40; // below the last panel
const FONT = "12px system-ui, sans-serif";
const formats = {
  number: (value) => (Math.abs(value) >= 1e3 ? count.format(Math.round(value)) : count.format(Number(value.toPrecision(3)))),
  ms: duration,
  share: (value) => `${count.format(Number((100 * value).toFixed(1)))}%`,
};

function duration(ms) {
  const digits = (value, unit) => `${Number(value.toPrecision(3))} ${unit}`;
  if (ms < 0.9995) return ms ? digits(ms * 1e3, "µs") : "0 ms";
  if (ms < 999.5) return digits(ms, "ms");
  if (ms < 6e5) return digits(ms / 1e3, "s");
  return ms < 7.2e6 ? digits(ms / 6e4, "min") : `${(ms / 3.6e6).toFixed(1)} h`;
}

// Create an element with attributes and children. Strings become text nodes, never markup.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

async function unpacked() {
  const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), (one) => one.charCodeAt(0));
  const data = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
  Object.assign(charts, data.charts);
  return data;
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

// One after another, so that the page answers meanwhile.
async function drawAll() {
  for (const id of Object.keys(charts)) {
    draw(id);
    await new Promise((done) => setTimeout(done));
  }
  document.documentElement.dataset.drawn = "all";
}

function draw(id) {
  const box = document.getElementById(id), { panels, x } = charts[id];
  for (const plot of plots[id] ?? []) plot.destroy();
  box.replaceChildren();
  plots[id] = panels.map((panel, at) => drawPanel(box, panel, x, at === panels.length - 1, id));
}

function drawPanel(box, { title = "", colour = "", curves = [], y = {}, heat, height = 280 }, x, isLast, id) {
  const shown = curves.filter((one) => !hidden.has(one.group));
  const values = shown.map((one) => element("b"));
  const names = shown.map((one, at) => element("span", { style: `--own: var(--${one.colour})` }, one.name, " ", values[at]));
  const place = element("span", { class: "place" });
  const head = element("div", { class: "panel-head" }, element("b", colour ? { style: `color: var(--${colour})` } : {}, title), ...names, place);
  box.append(head);
  const data = heat ? [heat.values[0].map((_, at) => (at + 0.5) * heat.width), heat.values[0].map(() => 0)]
    : shown.length ? uPlot.join(shown.map((one) => [one.x, one.y])) : [[0, 1]];
  const show = (axis, value) => formats[axis.unit ?? "number"](value);
  const readout = (plot) => {
    const { idx, idxs, top } = plot.cursor, isOver = idx !== null && idx !== undefined;
    values.forEach((value, at) => {
      const one = isOver ? plot.data[at + 1][idxs[at + 1] ?? idx] : null;
      value.textContent = one === null || one === undefined ? "" : show(y, one);
    });
    place.textContent = isOver ? `${show(x, plot.data[0][idx])} ${x.unit ? "" : x.title ?? ""}` : "";
    const row = heat && isOver ? Math.min(heat.rows.length - 1, Math.floor((top / plot.over.clientHeight) * heat.rows.length)) : -1;
    if (row >= 0) place.textContent += `, ${heat.rows[row]}: ${show(y, heat.values[row][idx])}`;
  };
  const axis = { stroke: css("soft"), font: FONT, grid: { stroke: css("line"), width: 1 }, ticks: { show: false } };
  const labels = (of) => (plot, splits) => splits.map((one) => (one === null ? "" : formats[of.unit ?? "number"](one)));
  const options = {
    width: box.clientWidth, height: height + (isLast ? AXIS_PX : 0), padding: [8, 18, isLast ? 0 : 6, 0], legend: { show: false },
    cursor: { sync: { key: id }, y: Boolean(heat), points: { size: 7 }, dataIdx: newestValue },
    scales: { x: scaleOf(x, true), y: heat ? { range: [0, heat.rows.length], dir: -1 } : scaleOf(y, false) },
    axes: [
      { ...axis, show: isLast, label: x.title, labelFont: FONT, labelSize: 18, size: 34, values: labels(x), ...ticksOf(x) },
      { ...axis, label: y.title, labelFont: FONT, labelSize: 18, size: heat ? 110 : 62, values: labels(y), ...(heat ? rowLabels(heat) : {}) },
    ],
    series: [{}, ...(heat ? [{ paths: () => null, points: { show: false } }] : shown.map(seriesOf))],
    hooks: {
      setCursor: [readout],
      ...(heat && { drawClear: [(plot) => drawHeat(plot, heat)] }),
      draw: [(plot) => charts[id].mark !== undefined && drawMark(plot, charts[id].mark)],
    },
  };
  return new uPlot(options, data, box);
}

// Return the newest place up to `at` at which a curve has a value. Curves of one panel may have different places.
function newestValue(plot, series, at) {
  if (series === 0) return at;
  while (at > 0 && plot.data[series][at] === undefined) at -= 1;
  return at;
}

function scaleOf({ log, end }, isX) {
  if (log) return { time: false, distr: 3, log: 10, ...(isX ? { range: (plot, low, high) => [low * 0.9, high * 1.1] } : {}) };
  return { time: false, range: isX ? (plot, low, high) => [low, Math.max(end ?? high, low + 1e-9)] : (plot, low, high) => [Math.min(0, low), end ?? (Math.max(0, high) * 1.06 || 1)] };
}

function ticksOf({ log }) {
  return log ? { splits: (plot, axis, low, high) => ticks(low, high), filter: (plot, splits) => splits } : { space: 70 };
}

// Return round numbers on a logarithmic axis: 1, 2 and 5 times the powers of ten, or only these if there are many.
function ticks(low, high) {
  const steps = high / low > 500 ? [1] : [1, 2, 5], found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    found.push(...steps.map((step) => Number(`${step}e${power}`)).filter((one) => one >= low && one <= high));
  }
  return found;
}

function rowLabels({ rows }) {
  const step = Math.ceil(rows.length / 8);
  return {
    splits: () => rows.map((_, at) => at + 0.5).filter((_, at) => at % step === 0),
    values: (plot, splits) => splits.map((at) => (rows[at - 0.5].length > 16 ? `${rows[at - 0.5].slice(0, 7)}…${rows[at - 0.5].slice(-8)}` : rows[at - 0.5])),
    grid: { show: false },
  };
}

function seriesOf({ name, colour, is_step }) {
  return { label: name, stroke: css(colour), width: 1.7, paths: is_step ? uPlot.paths.stepped({ align: 1 }) : undefined, points: { size: 6 } };
}

function drawMark(plot, at) {
  const { ctx, bbox } = plot, x = plot.valToPos(at, "x", true);
  if (!(x >= bbox.left && x <= bbox.left + bbox.width)) return;
  ctx.save();
  Object.assign(ctx, { strokeStyle: css("ink"), lineWidth: 1.5 * devicePixelRatio });
  ctx.setLineDash([5, 4]);
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.restore();
}

function drawHeat(plot, { rows, values, width, max }) {
  const { ctx } = plot, scale = css("heat").split(" ");
  ctx.save();
  ctx.beginPath();
  ctx.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
  ctx.clip();
  values.forEach((row, at) => {
    const top = plot.valToPos(at, "y", true), bottom = plot.valToPos(at + 1, "y", true);
    row.forEach((value, column) => {
      const left = plot.valToPos(column * width, "x", true), right = plot.valToPos((column + 1) * width, "x", true);
      const place = Math.min(1, value / (max || 1)) * (scale.length - 1), low = Math.min(scale.length - 2, Math.floor(place));
      ctx.fillStyle = mixed(scale[low], scale[low + 1], place - low);
      ctx.fillRect(left, top, Math.ceil(right - left), Math.ceil(bottom - top));
    });
  });
  ctx.restore();
}

function mixed(from, to, share) {
  const part = (at) => Math.round(parseInt(from.slice(at, at + 2), 16) * (1 - share) + parseInt(to.slice(at, at + 2), 16) * share);
  return `rgb(${part(1)} ${part(3)} ${part(5)})`;
}

function savePicture(id) {
  const { title, panels } = charts[id], width = plots[id][0].width, scale = devicePixelRatio;
  const heights = plots[id].map((plot, at) => plot.height + 22), picture = document.createElement("canvas");
  picture.width = width * scale;
  picture.height = (TITLE_PX + heights.reduce((sum, one) => sum + one, 0)) * scale;
  const ctx = picture.getContext("2d");
  const write = (text, x, y, colour, font = FONT) => {
    Object.assign(ctx, { fillStyle: css(colour), font });
    ctx.fillText(text, x, y);
    return x + ctx.measureText(text).width + 16;
  };
  ctx.scale(scale, scale);
  ctx.fillStyle = css("card");
  ctx.fillRect(0, 0, picture.width, picture.height);
  write(title, 12, 24, "ink", `600 16px ${FONT.slice(5)}`);
  const names = new Map(panels.flatMap(({ curves = [] }) => curves.filter((one) => one.name && !hidden.has(one.group)).map((one) => [one.name, one.colour])));
  let x = 12, y = TITLE_PX;
  for (const [name, colour] of names) x = write(`— ${name}`, x, 48, colour);
  plots[id].forEach((plot, at) => {
    write(panels[at].title ?? "", 12, y + 12, panels[at].colour || "ink");
    ctx.drawImage(plot.ctx.canvas, 0, y + 18, plot.width, plot.height);
    y += heights[at];
  });
  const link = element("a", { href: picture.toDataURL("image/png"), download: `${id}.png` });
  link.click();
}

for (const button of document.querySelectorAll("[data-png]")) button.addEventListener("click", () => savePicture(button.dataset.png));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
addEventListener("resize", () => {
  for (const [id, panels] of Object.entries(plots)) {
    for (const plot of panels) plot.setSize({ width: document.getElementById(id).clientWidth, height: plot.height });
  }
});

// What every page does: draw its figures in the colours of the scheme, and save them as pictures.
// A trace's `meta`, a shape's or a label's `name` is the name of a colour of the page's style.
const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const TITLE_HEIGHT = 76; // of a picture, above what the page shows

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function coloured(figure) {
  const copy = structuredClone(figure), ink = css("ink"), line = css("line");
  for (const trace of copy.data) {
    const colour = css(trace.meta || "soft");
    if (trace.marker) trace.marker.color = colour;
    if (trace.line) trace.line.color = colour;
    if (trace.error_y) trace.error_y.color = colour;
    if (trace.fill) trace.fillcolor = colour + "40";
  }
  const layout = copy.layout;
  Object.assign(layout, { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", uirevision: "page" });
  layout.font = { color: ink, family: "system-ui, sans-serif", size: 12 };
  layout.hoverlabel = { bgcolor: css("card"), bordercolor: line, font: { color: ink } };
  for (const key of Object.keys(layout)) {
    if (/^[xy]axis/.test(key)) Object.assign(layout[key], { gridcolor: line, linecolor: line, zerolinecolor: line });
    if (/^coloraxis/.test(key)) layout[key].colorscale = css("heat").split(" ").map((one, at, all) => [at / (all.length - 1), one]);
  }
  for (const shape of layout.shapes || []) if (shape.name) shape.line.color = css(shape.name);
  for (const label of layout.annotations || []) if (label.name) label.font = { ...label.font, color: css(label.name) };
  return copy;
}

function draw(id) {
  const { data, layout } = coloured(figures[id]);
  return Plotly.react(id, data, layout, { responsive: true, displayModeBar: false });
}

// One after another, so that the page answers meanwhile.
async function drawAll() {
  for (const id of Object.keys(figures)) {
    await draw(id);
    await new Promise((done) => setTimeout(done));
  }
  document.documentElement.dataset.drawn = "all";
}

function savePicture(button) {
  const shown = document.getElementById(button.dataset.png), { width, height } = shown.getBoundingClientRect();
  const title = button.closest("section").querySelector("h2").textContent;
  const layout = structuredClone(shown.layout);
  const top = ((layout.margin || {}).t || 0) + TITLE_HEIGHT;
  Object.assign(layout, { paper_bgcolor: css("card"), width, height: height + TITLE_HEIGHT, autosize: false });
  layout.margin = { ...layout.margin, t: top };
  layout.title = { text: title.replaceAll("&", "&amp;").replaceAll("<", "&lt;"), x: 0, xref: "paper", y: 1, yref: "container", yanchor: "top", pad: { t: 14 } };
  layout.showlegend = shown.data.some((trace) => trace.name && trace.showlegend !== false);
  layout.legend = { ...layout.legend, orientation: "h", x: 0, y: 1, yref: "container", yanchor: "top" };
  return Plotly.downloadImage(
    { data: shown.data, layout }, { format: "png", scale: 2, width, height: height + TITLE_HEIGHT, filename: button.dataset.png },
  );
}

for (const button of document.querySelectorAll("[data-png]")) button.addEventListener("click", () => savePicture(button));
dark.addEventListener("change", drawAll);

// Request explorer: a table with search, sorting, filters and pages. Each row opens the details of a request.
const PAGE_ROWS = 25;

function showRequests({ labels, colours, explained, explorer }) {
  const { rows, prompt, output, runs } = explorer;
  const control = (id) => document.getElementById(id);
  const head = document.querySelector("#requests thead tr"), body = document.querySelector("#requests tbody");
  const number = (id) => Number(control(id)?.value ?? 0);
  const run = () => runs[number("run")], against = () => runs[number("against")];
  const failed = (of, at) => String(at) in of.failures;
  const reason = (of, at) => of.failures[at];
  const worker = (of, at) => of.workers[of.worker[at]] ?? "-";
  const prefiller = (of, at) => of.workers[of.prefiller[at]];
  const there = (of, at) => of.attempts[at] !== NONE;
  const itl = (of, at) => (of.first[at] === NONE || output[at] < 2 ? NONE : (of.last[at] - of.first[at]) / (output[at] - 1));
  const slower = (at) => (run().first[at] === NONE || against().first[at] === NONE ? null : run().first[at] - against().first[at]);
  const time = (us) => (us === NONE ? "-" : duration(us / 1e3));
  const cached = (of, at) => (of.cached_tokens[at] === NONE || !prompt[at] ? 0 : of.cached_tokens[at] / prompt[at]);
  const waited = (of, at) => of.routed[at]?.[3] ?? 0;
  const many = runs.length > 1;

  // Name, whether it is text, sort key and formatted value of each column.
  const columns = [
    ["request", true, (at) => rows[at], (at) => count.format(rows[at] + 1)],
    ["arrived", false, (at) => run().arrived_us[at], (at) => (there(run(), at) ? `${(run().arrived_us[at] / 1e6).toFixed(3)} s` : "-")],
    ["prompt", false, (at) => prompt[at], (at) => count.format(prompt[at])],
    ["output", false, (at) => output[at], (at) => count.format(output[at])],
    ["worker", true, (at) => run().worker[at], (at) => worker(run(), at)],
    ["cached", false, (at) => cached(run(), at), (at) => (failed(run(), at) ? "-" : share(run().cached_tokens[at], prompt[at]))],
    ["TTFT", false, (at) => run().first[at], (at) => (failed(run(), at) ? "failed" : time(run().first[at]))],
    ["ITL", false, (at) => itl(run(), at), (at) => time(itl(run(), at))],
    ["E2E", false, (at) => run().last[at], (at) => time(run().last[at])],
    ["attempts", false, (at) => run().attempts[at], (at) => (there(run(), at) ? count.format(run().attempts[at]) : "-")],
  ];
  if (many) columns.push(["TTFT difference", false, (at) => slower(at) ?? -Infinity, difference]);
  const sorted = { by: 6, down: true };
  let found = [], first = 0;

  function difference(at) {
    const us = slower(at);
    if (us === null) return "-";
    return element("span", { class: us > 0 ? "more" : us < 0 ? "less" : "" }, us ? `${us > 0 ? "+" : "−"}${time(Math.abs(us))}` : "same");
  }

  const filters = {
    answered: (at) => run().first[at] !== NONE,
    failed: (at) => failed(run(), at),
    again: (at) => run().attempts[at] > 1,
    held: (at) => waited(run(), at) > 0,
    elsewhere: (at) => run().worker[at] !== against().worker[at],
  };

  function matches(at, words) {
    const text = `${rows[at] + 1} ${worker(run(), at)} ${failed(run(), at) ? reason(run(), at) : ""}`.toLowerCase();
    return words.every((word) => (/^\d+$/.test(word) ? String(rows[at] + 1) === word : text.includes(word)));
  }

  function find() {
    const words = control("search").value.toLowerCase().replaceAll(",", "").split(/\s+/).filter(Boolean);
    const only = filters[control("only").value] ?? (() => true), least = (control("least").valueAsNumber || 0) * 1e3;
    const key = columns[sorted.by][2], sign = sorted.down ? -1 : 1;
    found = [];
    for (let at = 0; at < rows.length; at++) {
      if (only(at) && (!least || run().first[at] >= least) && (!words.length || matches(at, words))) found.push(at);
    }
    const keys = new Map(found.map((at) => [at, key(at)]));
    found.sort((one, other) => sign * (keys.get(one) - keys.get(other) || 0) || one - other);
    first = 0;
    show();
  }

  function show() {
    head.replaceChildren(...columns.map(([name], by) => heading(name, by)));
    body.replaceChildren(...found.slice(first, first + PAGE_ROWS).map(row));
    const last = Math.min(first + PAGE_ROWS, found.length);
    control("where").textContent = found.length
      ? `${count.format(first + 1)} to ${count.format(last)} of ${count.format(found.length)}`
      : "no matching requests";
    control("before").disabled = first === 0;
    control("after").disabled = last === found.length;
  }

  function heading(name, by) {
    const button = element("button", { type: "button" }, by === columns.length - 1 && many ? `TTFT minus ${labels[number("against")]}` : name);
    button.addEventListener("click", () => {
      Object.assign(sorted, { down: sorted.by === by ? !sorted.down : !columns[by][1], by });
      find();
      head.children[by].firstChild.focus();
    });
    const th = element("th", { scope: "col", class: columns[by][1] ? "t" : "" }, button);
    if (sorted.by === by) th.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
    return th;
  }

  function row(at) {
    const open = element("button", { type: "button", class: "open", "aria-expanded": "false" }, columns[0][3](at));
    const cells = columns.slice(1).map(([, text, , format]) => element("td", { class: text ? "t" : "" }, format(at)));
    const tr = element("tr", { class: "row" }, element("td", { class: "t" }, open), ...cells);
    tr.addEventListener("click", () => {
      const opens = open.getAttribute("aria-expanded") === "false";
      open.setAttribute("aria-expanded", opens);
      if (opens) tr.after(element("tr", {}, element("td", { class: "details", colspan: columns.length }, details(at))));
      else tr.nextSibling.remove();
    });
    return tr;
  }

  function details(at) {
    const longest = Math.max(1, ...runs.map((of) => of.last[at]));
    const sides = element("div", { class: "sides" }, ...runs.map((of, which) => side(of, which, at, longest)));
    return element("div", {}, sides);
  }

  function side(of, which, at, longest) {
    const box = element("div", { class: "side", style: `--own: var(--${colours[which]})` }, element("h3", {}, labels[which]));
    if (!there(of, at)) {
      box.append(element("p", {}, "It never arrived, because a request that it depends on failed."));
      return box;
    }
    if (failed(of, at)) box.append(element("p", { class: "failed" }, reason(of, at)));
    else box.append(...life(of, at, longest));
    const attempts = of.attempts[at] > 1 ? `, after ${count.format(of.attempts[at])} attempts` : "";
    box.append(element("p", {}, `${prefiller(of, at) ? `${prefiller(of, at)}, then ` : ""}${worker(of, at)}${attempts}, ${count.format(Math.max(0, of.cached_tokens[at]))} of ${count.format(prompt[at])} prompt tokens cached.`));
    box.append(element("p", {}, why(of, at)));
    if (of.routed[at]?.length > 5) box.append(terms(of, at));
    return box;
  }

  // Bar of the time in the router's queue, to the first token and to the last token; all runs on one scale.
  function life(of, at, longest) {
    const held = Math.min(waited(of, at), of.first[at]);
    const parts = [["held", held], ["first", of.first[at] - held], ["rest", of.last[at] - of.first[at]]];
    const bar = parts.map(([kind, us]) => element("i", { class: kind, style: `width:${(100 * us) / longest}%` }));
    const queued = held ? `queued ${time(held)}, ` : "";
    const pace = itl(of, at) === NONE ? "" : `, ITL ${time(itl(of, at))}`;
    return [
      element("div", { class: "timeline", "aria-hidden": "true" }, ...bar),
      element("p", {}, `${queued}TTFT ${time(of.first[at])}${pace}, E2E ${time(of.last[at])}`),
    ];
  }

  function why(of, at) {
    if (of.routed[at] === null) return at in of.failures ? "" : `Decisions are stored for the first ${count.format(explained)} requests only.`;
    const [mode, candidates, ties, , [mine], other, theirs] = of.routed[at], of_all = count.format(candidates);
    if (candidates === 1) return "It was the only candidate.";
    switch (mode) {
      case "kv":
        if (other && theirs[0] < mine) return `Sampled with the temperature: its cost is ${mine}, that of ${other} is ${theirs[0]}.`;
        if (ties > 1) return `${count.format(ties)} of ${of_all} have the lowest cost, ${mine}. The tie was broken by the fewest computed tokens, then by the seed.`;
        return `Lowest cost of ${of_all}: ${mine}${other ? `, which is ${Number((theirs[0] - mine).toFixed(2))} less than that of ${other}` : ""}.`;
      case "round-robin":
        return `Next in round-robin order of ${of_all}.`;
      case "random":
        return `Sampled uniformly from ${of_all}, with the seed.`;
      case "power-of-two":
        return `Less loaded of two workers sampled from ${of_all}.`;
      case "least-loaded":
        return `Fewest requests in flight of ${of_all}.`;
      default:
        return `Selected from ${of_all} by ${mode}.`;
    }
  }

  function terms(of, at) {
    const names = ["cost", "to prefill", "credit for cached blocks", "cost of evictions", "decode blocks", "requests in flight (count)", "blocks cached on the device"];
    const [, , , , mine, other, theirs] = of.routed[at];
    const top = element("tr", {}, element("th", { class: "t" }, "KV blocks"), element("th", {}, worker(of, at)), element("th", {}, other));
    const lines = names.map((label, place) => element("tr", {}, element("td", { class: "t" }, label),
      ...[mine, theirs].map((of_rank) => element("td", {}, count.format(of_rank[place])))));
    return element("table", {}, top, ...lines);
  }

  for (const id of ["search", "least"]) control(id).addEventListener("input", find);
  for (const id of ["run", "against", "only"]) control(id)?.addEventListener("change", find);
  document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault());
  control("before").addEventListener("click", () => { first -= PAGE_ROWS; show(); });
  control("after").addEventListener("click", () => { first += PAGE_ROWS; show(); });
  find();
}

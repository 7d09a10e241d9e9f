// Draws the charts of a page when they come into view. Data and specifications are JSON in #chart-data; text in them
// becomes text only. window.charts is for a page's own script:
//   charts.names          names of all charts
//   charts.view(name)     Vega's view of a drawn chart, or undefined
//   charts.draw(name)     draws a chart that is not in view yet; a promise
//   charts.set(options)   changes options (see below) and draws again
//   charts.replace(name, columns)   replaces a data set wherever it is shown
//   charts.zooms()        what every zoomed chart shows; charts.zoom(zooms) shows it again, also on a page loaded anew
"use strict";
window.charts = (() => {
  const store = JSON.parse(document.getElementById("chart-data").textContent);
  const options = { axis: "step", smooth: 0, log_x: false, log_y: null }; // log_y null: as the specification has it
  const drawn = new Map(); // name -> {view, result, version}
  const cache = new Map(); // data set -> rows
  const zooms = new Map(); // name -> {axis, limits} of charts that do not show all; it outlives their views
  let version = 0;

  const plot = (name) => document.querySelector(`[data-chart="${name}"]`);

  function expand(column) {
    if (column[0] !== "repeat" || !Array.isArray(column[1])) return column;
    return column[1].flatMap(([value, count]) => new Array(count).fill(value));
  }

  function rows(name) {
    if (!cache.has(name)) {
      const columns = Object.entries(store.data[name]).map(([key, column]) => [key, expand(column)]);
      const count = columns.length ? columns[0][1].length : 0;
      const made = new Array(count);
      for (let i = 0; i < count; i++) {
        const row = {};
        for (const [key, column] of columns) row[key] = column[i];
        made[i] = row;
      }
      cache.set(name, made);
    }
    return cache.get(name);
  }

  // --- colours and specifications ------------------------------------------------------------------------------------

  function theme(place) {
    const ink = getComputedStyle(document.body).color;
    const config = JSON.parse(JSON.stringify(store.theme).replaceAll("#INK", ink));
    config.legend.columns = Math.max(1, Math.floor(place.clientWidth / 240));
    config.legend.labelLimit = Math.min(280, place.clientWidth - 60);
    return config;
  }

  const AXES = { step: "step", tokens: "tokens", hours: "hours of training" };

  // Of many curves, the first chart alone has the legend: the colours are the same in all.
  const MAX_LEGENDS = 4;
  const first = Object.keys(store.charts).find((name) => store.charts[name].curve);

  function specification(name) {
    const chart = store.charts[name];
    const spec = structuredClone(chart.spec);
    spec.datasets = {};
    for (const each of chart.data) spec.datasets[each] = rows(each);
    if (chart.curve) {
      for (const param of spec.params) {
        if (param.name === "axis") param.value = options.axis;
        if (param.name === "smooth") param.value = options.smooth;
        if (param.name === "log_x") param.value = options.log_x;
        if (param.name === "log_y" && options.log_y !== null) param.value = options.log_y;
      }
      const value = (param) => spec.params.find((each) => each.name === param).value;
      const { x, y, color } = spec.layer[0].encoding; // which its layers inherit
      if (name !== first && color.scale.domain.length > MAX_LEGENDS) color.legend = null;
      x.title = AXES[options.axis];
      x.scale.type = value("log_x") ? "log" : "linear";
      y.scale.type = value("log_y") ? "log" : "linear";
      y.scale.nice = !value("log_y");
      if (value("log_y")) delete y.scale.zero;
      if (value("log_x")) delete x.scale.zero;
    }
    return spec;
  }

  // --- drawing -------------------------------------------------------------------------------------------------------

  async function draw(name) {
    const place = plot(name);
    const now = version;
    if (!place || drawn.get(name)?.version === now) return;
    const old = drawn.get(name);
    const axis = axisOf(name);
    keepZoom(name);
    drawn.set(name, { version: now });
    old?.result?.finalize();
    try {
      const result = await vegaEmbed(place, specification(name), {
        ast: true, // expressions are interpreted: the page's policy forbids eval
        actions: false,
        defaultStyle: false,
        config: theme(place),
        renderer: store.charts[name].renderer,
        tooltip: { theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light" },
      });
      if (drawn.get(name).version !== now) return result.finalize();
      drawn.set(name, { version: now, result, view: result.view, axis });
      follow(name, result.view, place);
      await showZoom(name);
      place.dataset.state = "drawn";
      performance.mark(`drawn-${name}`);
    } catch (error) {
      place.dataset.state = "failed";
      place.textContent = `This chart could not be drawn: ${error.message}`;
      console.error(error);
    }
  }

  const seen = new Set();
  const observer = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        const name = target.dataset.chart;
        if (isIntersecting) seen.add(name);
        else seen.delete(name);
        if (isIntersecting) draw(name);
      }
    },
    { rootMargin: "300px" },
  );

  function redraw() {
    version += 1;
    for (const name of seen) draw(name);
  }

  // --- cursor: values at a point, by mouse and by arrow keys -----------------------------------------------------------

  const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });
  const format = (value) =>
    value === null || value === undefined ? "-" : typeof value === "number" ? number.format(value) : String(value);

  function points(name) {
    const [x, y, series, group] = store.charts[name].readout;
    const field = store.charts[name].curve && x === "x" ? options.axis : x;
    const found = new Map();
    for (const row of rows(store.charts[name].data[0])) {
      if (row[y] === null || row[field] === null) continue;
      if (!found.has(row[series])) found.set(row[series], []);
      found.get(row[series]).push([row[field], row[y], row[group]]);
    }
    return found;
  }

  function nearest(list, x) {
    let best = null;
    for (const point of list) if (best === null || Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
    return best;
  }

  function show(name, x) {
    const view = drawn.get(name)?.view;
    const output = document.querySelector(`[data-readout="${name}"]`);
    if (!view || !output) return;
    output.replaceChildren();
    if (x === null) return view.signal("at", null).runAsync();
    const lines = [...points(name)].map(([series, list]) => [series, nearest(list, x)]).filter(([, point]) => point);
    if (!lines.length) return undefined;
    const at = lines.map(([, point]) => point[0]).reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a));
    const head = document.createElement("span");
    head.textContent = `${store.charts[name].curve ? AXES[options.axis] : store.charts[name].readout[0]} ${format(at)}`;
    output.append(head);
    const colour = scale(view, "color");
    for (const [series, point] of lines) {
      const line = document.createElement("span");
      const mark = document.createElement("i");
      mark.style.background = colour ? colour(point[2]) : "currentColor";
      line.append(mark, `${series}: ${format(point[1])}`);
      output.append(line);
    }
    return view.signal("at", at).runAsync();
  }

  function scale(view, name) {
    try {
      return view.scale(name);
    } catch {
      return null; // the chart has none
    }
  }

  function domain(view) {
    const limits = view.scale("x").domain();
    return [Number(limits[0]), Number(limits[limits.length - 1])];
  }

  function follow(name, view, place) {
    if (!store.charts[name].readout) return;
    view.addEventListener("pointermove", (event) => {
      const box = place.querySelector("svg, canvas").getBoundingClientRect();
      const x = event.clientX - box.left - view.origin()[0];
      if (x >= 0 && x <= view.width()) show(name, view.scale("x").invert(x));
    });
    view.addEventListener("pointerout", () => show(name, null));
  }

  function move(name, direction) {
    const view = drawn.get(name)?.view;
    if (!view || !store.charts[name].readout) return;
    const [low, high] = domain(view);
    const places = [...new Set([...points(name).values()].flat().map((point) => point[0]))]
      .filter((x) => x >= low && x <= high)
      .sort((a, b) => a - b);
    const current = view.signal("at");
    let next;
    if (current === null) next = direction > 0 ? places[0] : places[places.length - 1];
    else if (direction > 0) next = places.find((x) => x > current);
    else next = places.findLast((x) => x < current);
    if (next !== undefined) show(name, next);
  }

  // --- zoom: by wheel and drag (Vega's own), by buttons and keys -----------------------------------------------------

  function zoom(name, action) {
    const view = drawn.get(name)?.view;
    if (!canZoom(view)) return;
    if (action === "all") return void view.signal("zoom_x", null).runAsync();
    const scale = view.scale("x");
    const width = view.width();
    const current = view.getState().signals.at;
    const middle = typeof current === "number" ? scale(current) : width / 2;
    const share = { in: 0.5, out: 2, left: 1, right: 1 }[action];
    const shift = { left: -width / 4, right: width / 4 }[action] ?? 0;
    const ends = [middle - middle * share + shift, middle + (width - middle) * share + shift];
    view.signal("zoom_x", ends.map((each) => scale.invert(each))).runAsync();
  }

  const axisOf = (name) => (store.charts[name].curve ? options.axis : "");
  const canZoom = (view) => view && "zoom_x" in view.getState().signals;

  function keepZoom(name) {
    const { view, axis } = drawn.get(name) ?? {};
    if (!canZoom(view)) return;
    const limits = view.signal("zoom_x");
    if (limits) zooms.set(name, { axis, limits: Array.from(limits, Number) });
    else if (zooms.get(name)?.axis === axis) zooms.delete(name);
  }

  // Limits in steps say nothing about tokens: a zoom is shown on the axis that it was made on.
  async function showZoom(name) {
    const { view, axis } = drawn.get(name) ?? {};
    const kept = zooms.get(name);
    if (kept && kept.axis === axis && canZoom(view)) await view.signal("zoom_x", kept.limits).runAsync();
  }

  function keys(event) {
    const name = event.target.dataset?.chart;
    if (!name || event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      "+": () => zoom(name, "in"),
      "=": () => zoom(name, "in"),
      "-": () => zoom(name, "out"),
      0: () => zoom(name, "all"),
      Escape: () => show(name, null),
      ArrowLeft: () => (event.shiftKey ? zoom(name, "left") : move(name, -1)),
      ArrowRight: () => (event.shiftKey ? zoom(name, "right") : move(name, 1)),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  document.addEventListener("keydown", keys);
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("[data-zoom]");
    if (button) zoom(button.closest("figure").querySelector("[data-chart]").dataset.chart, button.dataset.zoom);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => Object.keys(store.charts).forEach(draw));
  for (const place of document.querySelectorAll("[data-chart]")) observer.observe(place);
  if (Object.keys(store.charts).length) draw(Object.keys(store.charts)[0]); // the first one in any case

  return {
    zooms() {
      for (const name of drawn.keys()) keepZoom(name);
      return Object.fromEntries(zooms);
    },
    zoom(saved) {
      for (const [name, { axis, limits }] of Object.entries(saved)) {
        if (!(name in store.charts)) continue;
        zooms.set(name, { axis, limits });
        showZoom(name);
      }
    },
    names: Object.keys(store.charts),
    live: store.live,
    draw,
    options,
    rows,
    view: (name) => drawn.get(name)?.view,
    set(changes) {
      const changed = Object.keys(changes).filter((key) => changes[key] !== options[key]);
      if (!changed.length) return undefined;
      const only = changed.every((key) => key === "smooth");
      Object.assign(options, changes);
      if (!only) return redraw();
      for (const [name, { view }] of drawn) {
        if (store.charts[name].curve) view?.signal("smooth", options.smooth).runAsync();
      }
      return undefined;
    },
    replace(name, columns) {
      store.data[name] = columns;
      cache.delete(name);
      for (const [chart, { view }] of drawn) {
        if (!view || !store.charts[chart].data.includes(name)) continue;
        view.data(name, structuredClone(rows(name))).runAsync();
      }
    },
  };
})();

// The attention explorer. What was computed is JSON in #explorer-data; all text of it is shown by textContent.
// window.explorer is for tests: {state, data, choose(changes)}.
"use strict";
window.explorer = (() => {
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const at = (name) => document.querySelector(`#explorer [data-x="${name}"]`);
  const state = { sentence: 0, kind: 0, layer: 0, head: 0, view: "probabilities", query: null, reading: null, step: 0, position: -1, pattern: "", part: "residual" };
  const PATTERNS = ["previous", "first", "diagonal", "induction"];
  const VIEWS = { probabilities: "probabilities", gradients: "gradient × attention", mean: "mean of the layer's heads", rollout: "rollout up to the layer" };

  const PARTS = { residual: "residual stream at a token", attention: "attention output at a token", mlp: "feed-forward output at a token", heads: "output of a head, all tokens" };

  // --- helpers -------------------------------------------------------------------------------------------------------

  function make(tag, properties = {}, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(properties)) {
      if (key.startsWith("aria") || key === "role") element.setAttribute(key, value);
      else element[key] = value;
    }
    element.append(...children);
    return element;
  }

  function drawing(tag, attributes = {}, text = null) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== null) element.textContent = text;
    return element;
  }

  const decoded = new WeakMap(); // array of the data -> {shape, values}
  function numbers(array) {
    if (!decoded.has(array)) {
      const bytes = Uint8Array.from(atob(array.data), (letter) => letter.charCodeAt(0));
      decoded.set(array, { shape: array.shape, values: new Float32Array(bytes.buffer) });
    }
    return decoded.get(array);
  }

  // The last two axes of an array at some leading indices, as rows.
  function matrix(array, ...index) {
    const { shape, values } = numbers(array);
    const [rows, columns] = shape.slice(-2);
    let start = 0;
    index.forEach((each, axis) => (start = start * shape[axis] + each));
    start *= rows * columns;
    return Array.from({ length: rows }, (_, t) => values.subarray(start + t * columns, start + (t + 1) * columns));
  }

  const percent = (p) => (p >= 0.0005 ? `${(100 * p).toFixed(1)} %` : "< 0.1 %");
  const unsigned = (number) => (Number(number) === 0 ? number.replace("-", "") : number); // not "-0.0"
  const shown = (value, digits = 2) => (value === null ? "-" : value.toFixed(digits));
  const sentence = () => data.sentences[state.sentence];
  const kind = () => sentence().kinds[state.kind];
  const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

  function fill(select, names, chosen) {
    select.replaceChildren(...names.map(([value, name]) => make("option", { value, textContent: name })));
    select.value = chosen;
  }

  function bars(list, rows, taken = -1, press = null) {
    list.replaceChildren(
      ...rows.map(([name, share], rank) => {
        const word = press
          ? make("button", { type: "button", className: "word", textContent: name, onclick: () => press(rank), title: `go on with ${name}` })
          : make("span", { className: "word", textContent: name });
        const bar = make("i");
        bar.style.width = `${100 * share}%`;
        const item = make("li", {}, word, make("span", { className: "bar-box" }, bar), make("span", { className: "share", textContent: percent(share) }));
        if (rank === taken) item.className = "taken";
        return item;
      }),
    );
  }

  // --- the chosen map ------------------------------------------------------------------------------------------------

  function chosenMap() {
    const { maps, gradients, rollout } = kind();
    if (state.view === "rollout" && rollout) return matrix(rollout, state.layer);
    if (state.view === "gradients" && gradients) return matrix(gradients, state.layer, state.head);
    if (state.view !== "mean") return matrix(maps, state.layer, state.head);
    const heads = Array.from({ length: maps.shape[1] }, (_, head) => matrix(maps, state.layer, head));
    return heads[0].map((row, t) => row.map((_, s) => heads.reduce((sum, head) => sum + head[t][s], 0) / heads.length));
  }

  function cells(name, map, rows, columns, largest) {
    const table = { column: [], row: [], sign: [], strength: [], value: [] };
    map.forEach((line, t) =>
      line.forEach((value, s) => {
        const known = Number.isFinite(value);
        table.row.push(rows[t]);
        table.column.push(columns[s]);
        table.sign.push(value < 0 ? "less" : "more");
        table.strength.push(known && largest ? Math.min(Math.abs(value) / largest, 1) : 0);
        table.value.push(known ? value : null);
      }),
    );
    window.charts.replace(name, table);
  }

  const largestOf = (map) => Math.max(...map.map((row) => Math.max(...Array.from(row, (x) => (Number.isFinite(x) ? Math.abs(x) : 0)))));
  const numbered = (names) => names.map((name, index) => `${index} ${name}`); // tokens may occur twice
  const scaleOf = (map) => (state.view === "gradients" ? largestOf(map) : 1);

  // --- heads ---------------------------------------------------------------------------------------------------------

  function picture(canvas, map, largest) {
    canvas.height = map.length;
    canvas.width = map[0].length;
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    map.forEach((row, t) =>
      row.forEach((value, s) => image.data.set([47, 129, 216, Math.round(255 * Math.min(value / (largest || 1), 1))], 4 * (t * row.length + s))),
    );
    context.putImageData(image, 0, 0);
  }

  function headWords(layer, head) {
    const { name, scores, patterns } = kind();
    const marks = patterns[layer][head];
    const words = `${name} layer ${layer} head ${head}: entropy ${shown(scores.entropy[layer][head])} nats, mean distance ${shown(scores.distance[layer][head])}`;
    return marks.length ? `${words}, ${marks.join(", ")}` : words;
  }

  function showHeads() {
    const { maps } = kind();
    const [layers, heads] = maps.shape;
    const grid = at("heads");
    grid.style.gridTemplateColumns = `max-content repeat(${heads}, 54px)`;
    const items = [];
    for (let layer = 0; layer < layers; layer++) {
      const row = make("div", { role: "row" }, make("span", { role: "rowheader", className: "name", textContent: `layer ${layer}` }));
      for (let head = 0; head < heads; head++) {
        const canvas = make("canvas");
        picture(canvas, matrix(maps, layer, head), 1);
        const button = make("button", { type: "button", role: "gridcell", "aria-label": headWords(layer, head), title: headWords(layer, head) }, canvas);
        button.dataset.layer = layer;
        button.dataset.head = head;
        row.append(button);
      }
      items.push(row);
    }
    grid.replaceChildren(...items);
  }

  function markHead() {
    const { patterns } = kind();
    for (const button of at("heads").querySelectorAll("button")) {
      const [layer, head] = [Number(button.dataset.layer), Number(button.dataset.head)];
      const chosen = layer === state.layer && head === state.head;
      button.setAttribute("aria-selected", chosen);
      button.tabIndex = chosen ? 0 : -1; // one stop of the Tab key; arrows move within
      button.classList.toggle("marked", patterns[layer][head].includes(state.pattern));
    }
    at("head").textContent = headWords(state.layer, state.head);
  }

  at("heads").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) choose({ layer: Number(button.dataset.layer), head: Number(button.dataset.head) });
  });
  at("heads").addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const [layers, heads] = kind().maps.shape;
    if (!move && event.key !== "Home" && event.key !== "End") return;
    event.preventDefault();
    const next = event.key === "Home" ? [0, 0] : event.key === "End" ? [layers - 1, heads - 1] : [state.layer + move[0], state.head + move[1]];
    if (next[0] < 0 || next[0] >= layers || next[1] < 0 || next[1] >= heads) return;
    choose({ layer: next[0], head: next[1] });
    at("heads").querySelector("[aria-selected=true]").focus();
  });

  function showTable() {
    const { scores, patterns, maps, name } = kind();
    const random = name === "decoder" ? data.induction : null;
    const names = [...Object.keys(scores), ...(random ? ["random"] : [])];
    const table = make("table", { className: "heads-table" });
    table.append(make("tr", {}, ...["layer", "head", ...names, "pattern"].map((text) => make("th", { textContent: text }))));
    for (let layer = 0; layer < maps.shape[0]; layer++)
      for (let head = 0; head < maps.shape[1]; head++) {
        const values = names.map((each) => shown(each === "random" ? random[layer][head] : scores[each][layer][head]));
        table.append(make("tr", {}, ...[layer, head, ...values, patterns[layer][head].join(", ")].map((text) => make("td", { textContent: text }))));
      }
    at("table").replaceChildren(table);
  }

  // --- tokens and lines ------------------------------------------------------------------------------------------------

  function showLines() {
    const map = chosenMap();
    const { tokens } = sentence();
    const [queries, keys] = [tokens[kind().queries], tokens[kind().keys]];
    const side = (names, press) =>
      make("div", { className: "side" }, ...names.map((name, index) => make("button", { type: "button", textContent: name, title: `${index} ${name}`, ...press(index) })));
    const left = side(queries, (t) => ({ onmouseenter: () => point(t), onfocus: () => point(t), onclick: () => point(t), "aria-pressed": "false" }));
    const right = side(keys, () => ({ tabIndex: -1 }));
    const height = 24 * Math.max(queries.length, keys.length);
    const svg = drawing("svg", { viewBox: `0 0 160 ${height}`, height, preserveAspectRatio: "none", "aria-hidden": "true" });
    const largest = scaleOf(map) || 1;
    map.forEach((row, t) => {
      const limit = [...row].sort((a, b) => b - a)[Math.min(4, row.length - 1)]; // without a chosen query the strongest of each
      row.forEach((value, s) => {
        if (value / largest < 0.02) return;
        const line = drawing("path", { d: `M0 ${24 * t + 12}L160 ${24 * s + 12}`, "stroke-opacity": Math.min(value / largest, 1), "vector-effect": "non-scaling-stroke" });
        line.dataset.query = t;
        line.dataset.strong = value >= limit;
        svg.append(line);
      });
    });
    svg.style.height = `${height}px`;
    const box = at("lines");
    box.onmouseleave = () => point(null);
    box.replaceChildren(left, svg, right);
    markQuery();
  }

  function markQuery() {
    for (const line of at("lines").querySelectorAll("path")) {
      const visible = state.query === null ? line.dataset.strong === "true" : Number(line.dataset.query) === state.query;
      line.style.display = visible ? "" : "none";
    }
    at("lines").querySelectorAll(".side:first-child button").forEach((button, t) => button.setAttribute("aria-pressed", t === state.query));
  }

  function point(query) {
    state.query = query;
    markQuery();
    const { lens, tokens } = sentence();
    const own = kind().queries === (tokens.target ? "target" : "source"); // only the side below the head predicts
    if (lens && own) predict(lens.tokens.length === 1 ? 0 : query, lens.outputs.length - 1);
  }

  function predict(position, row) {
    const { lens } = sentence();
    if (!lens) return;
    const t = position === null || position === undefined ? lens.tokens.length - 1 : position;
    const layer = row === lens.outputs.length - 1 ? "" : row === 0 ? " from the input" : ` from layer ${row - 1}`;
    at("next-title").textContent = lens.next.some((name) => name) ? `Next token after “${lens.tokens[t]}”${layer}` : `Output at “${lens.tokens[t]}”${layer}`;
    const probs = matrix(lens.probs, row)[t];
    bars(at("next"), lens.outputs[row][t].map((name, rank) => [name, probs[rank]]), lens.outputs[row][t].indexOf(lens.next[t]));
  }

  function showMap() {
    const map = chosenMap();
    const { tokens } = sentence();
    cells("explore-map", map, numbered(tokens[kind().queries]), numbered(tokens[kind().keys]), scaleOf(map));
  }

  // --- relevance and layers ----------------------------------------------------------------------------------------------

  function tinted(name, strength, className = "") {
    const word = make("span", { textContent: name, className });
    word.style.background = `rgba(47, 129, 216, ${strength})`;
    return word;
  }

  function showRelevance() {
    const { relevance, tokens } = sentence();
    at("relevance-part").hidden = !relevance;
    if (!relevance) return;
    at("relevance-note").textContent = `How much each token matters for “${relevance.output}”, by gradient × attention through all layers (Chefer et al. 2021); darker is more, the largest of each text is full. The 1 that every slot starts with is left out.`;
    const last = tokens.target ? "target" : "source";
    const parts = Object.entries(relevance.values).map(([side, values]) => {
      const own = values.map((value, index) => (side === last && index === relevance.position ? value - 1 : value));
      const largest = Math.max(...own) || 1;
      const words = own.map((value, index) => Object.assign(tinted(tokens[side][index], Math.max(value, 0) / largest), { title: value.toFixed(4) }));
      return make("span", { className: "line" }, `${side}: `, ...words, make("br"));
    });
    at("relevance").replaceChildren(...parts);
  }

  function showLens() {
    const { lens } = sentence();
    at("lens-part").hidden = !lens;
    at("next-title").hidden = !lens;
    at("next").replaceChildren();
    if (!lens) return;
    const table = make("table", { className: "lens" });
    table.append(make("tr", {}, make("th"), ...lens.tokens.map((name) => make("th", { textContent: name }))));
    lens.outputs.forEach((row, layer) => {
      const probs = matrix(lens.probs, layer);
      const line = make("tr", {}, make("th", { textContent: layer === 0 ? "input" : `layer ${layer - 1}` }));
      row.forEach((names, t) => {
        const button = make("button", { type: "button", textContent: names[0], title: `${names[0]} ${percent(probs[t][0])}`, onfocus: () => predict(t, layer), onmouseenter: () => predict(t, layer), tabIndex: layer === lens.outputs.length - 1 ? 0 : -1 });
        const cell = make("td", {}, button);
        cell.style.background = `rgba(47, 129, 216, ${0.75 * probs[t][0]})`;
        line.append(cell);
      });
      table.append(line);
    });
    at("lens").replaceChildren(table);
    predict(null, lens.outputs.length - 1);
  }

  // --- writing ---------------------------------------------------------------------------------------------------------

  function showSteps() {
    const { steps, beam } = sentence();
    at("steps-part").hidden = !steps;
    if (!steps) return;
    const press = data.serve ? ". Choose an alternative to go on from it" : "";
    at("steps-note").textContent = `The model's output by ${{ beam: "beam search", sample: "sampling" }[steps.method] ?? "greedy search"}, with the likeliest tokens at each step${press}.`;
    const slider = at("step");
    slider.max = Math.max(steps.tokens.length - 1, 0);
    slider.value = state.step;
    at("step-name").textContent = steps.tokens.length ? `token ${state.step + 1} of ${steps.tokens.length}` : "no token";
    at("written").replaceChildren(
      ...steps.prompt.map((name) => make("span", { className: "prompt", textContent: name })),
      ...steps.tokens.slice(0, state.step + 1).map((name, index) => make("span", { textContent: name, className: index === state.step ? "now" : "" })),
    );
    if (!steps.tokens.length) return at("alternatives").replaceChildren();
    const probs = matrix(steps.probs)[state.step];
    const names = steps.alternatives[state.step];
    const ids = steps.alternative_ids[state.step];
    const go = data.serve ? (rank) => ask("sentence", { line: sentence().text, forced: [...steps.ids.slice(0, state.step), ids[rank]] }, take) : null;
    bars(at("alternatives"), names.map((name, rank) => [name, probs[rank]]), ids.indexOf(steps.ids[state.step]), go);
    showBeam(beam);
  }

  function showBeam(nodes) {
    at("beam-part").hidden = !nodes;
    if (!nodes || at("beam").shown === nodes) return;
    const count = [];
    const places = nodes.map((node) => [node.step, (count[node.step] = (count[node.step] ?? -1) + 1)]);
    const [width, height] = [136, 26];
    const svg = drawing("svg", { class: "beam", width: width * (count.length - 1) + 20, height: height * (Math.max(...count.filter((n) => n !== undefined)) + 1) + 12, role: "img", "aria-label": `beam search with ${nodes.length} hypotheses` });
    nodes.forEach((node, index) => {
      const [x, y] = [width * (places[index][0] - 1) + 8, height * places[index][1] + 20];
      if (node.parent >= 0) {
        const [fromX, fromY] = [width * (places[node.parent][0] - 1) + 104, height * places[node.parent][1] + 16];
        svg.append(drawing("path", { d: `M${fromX} ${fromY}L${x - 4} ${y - 4}`, class: node.is_best ? "best" : "" }));
      }
      const group = drawing("g", { class: node.is_best ? "best" : "" });
      const name = node.token.length > 9 ? `${node.token.slice(0, 8)}…` : node.token;
      const score = node.score === null ? unsigned(node.log_prob.toFixed(1)) : unsigned(node.score.toFixed(2));
      if (node.score !== null) group.append(drawing("rect", { x: x - 4, y: y - 15, width: 108, height: 20, rx: 3 }));
      group.append(drawing("text", { x, y }, `${name} ${score}`));
      group.append(drawing("title", {}, `${node.token}: log-probability ${node.log_prob.toFixed(3)}${node.score === null ? "" : `, score ${node.score.toFixed(3)}`}`));
      svg.append(group);
    });
    at("beam").shown = nodes;
    at("beam").replaceChildren(svg);
  }

  // --- parts removed and activations patched -----------------------------------------------------------------------------

  function showAblation() {
    const { ablation, kinds } = sentence();
    at("ablation-part").hidden = !ablation;
    if (!ablation) return;
    at("ablation-chart").hidden = !ablation.heads;
    if (!ablation.heads) {
      at("ablation-note").textContent = `The model has ${plural(ablation.parts, "part")}, too many to remove each in turn here; ${data.serve ? "remove single ones below" : "model.ablate([...], heads=[...]) removes chosen ones"}.`;
      return;
    }
    at("ablation-note").textContent = "The output of a head or of a feed-forward layer counts as 0 (Michel et al. 2019), and the log-probability of the text's next tokens, or of the model's own outputs, is measured again.";
    const names = [["-1", "all positions, mean"], ...ablation.references.map((name, t) => [String(t), `${t} ${ablation.tokens[t]} → ${name}`])];
    fill(at("position"), names, String(state.position));
    const value = (row) => (state.position < 0 ? row.reduce((sum, x) => sum + x, 0) / row.length : row[state.position]);
    const rows = [];
    const map = [];
    const heads = Math.max(...Object.values(ablation.heads).map((array) => array.shape[1]));
    for (const each of kinds) {
      const array = ablation.heads[each.name];
      const mlps = ablation.mlps[each.name];
      for (let layer = 0; layer < array.shape[0]; layer++) {
        const line = matrix(array, layer).map((row) => value(row));
        while (line.length < heads) line.push(NaN);
        line.push(mlps ? value(matrix(mlps)[layer]) : NaN);
        rows.push(`${each.name} ${layer}`);
        map.push(line);
      }
    }
    const columns = [...Array.from({ length: heads }, (_, head) => `head ${head}`), "feed-forward"];
    cells("explore-ablation", map, rows, columns, largestOf(map));
  }

  function showPatching() {
    const found = data.patching;
    at("patching-part").hidden = !found && !(data.serve && data.edits);
    at("patching-chart").hidden = !found || found.refused !== null;
    if (!found) return;
    if (found.refused !== null) {
      at("patching-note").textContent = `“${found.clean}” and “${found.corrupted}” were not patched: ${found.refused}`;
      return;
    }
    const gap = found.clean_log_prob - found.corrupted_log_prob;
    at("patching-note").textContent = `Activations of “${found.clean}” put into “${found.corrupted}” (Meng et al. 2022). The answer “${found.answer}” has log-probability ${found.clean_log_prob.toFixed(3)} in the first and ${found.corrupted_log_prob.toFixed(3)} in the second.`;
    const parts = found.parts ?? { residual: found.log_probs }; // values of earlier versions
    const known = Object.keys(PARTS).filter((name) => parts[name] || data.serve);
    if (!known.includes(state.part)) state.part = known[0];
    fill(at("part"), known.map((name) => [name, PARTS[name]]), state.part);
    if (!parts[state.part]) state.part = Object.keys(parts)[0];
    const map = matrix(parts[state.part]).map((row) => Array.from(row, (value) => (gap ? (value - found.corrupted_log_prob) / gap : NaN)));
    const first = state.part === "residual" ? 0 : 1;
    const rows = map.map((_, row) => (row + first === 0 ? "input" : `layer ${row + first - 1}`));
    const tokens = found.corrupted_tokens.map((name, t) => `${t} ${name === found.clean_tokens[t] ? name : `${name} ← ${found.clean_tokens[t]}`}`);
    const names = state.part === "heads" ? map[0].map((_, head) => `head ${head}`) : tokens;
    at("part").value = state.part;
    cells("explore-patching", map, rows, names, 1);
  }

  // --- a server that answers ---------------------------------------------------------------------------------------------

  async function ask(what, question, use) {
    at("message").textContent = "The model reads …";
    try {
      const answer = await fetch(`/api/${what}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(question) });
      const value = await answer.json();
      if (value.error) throw new Error(value.error);
      at("message").textContent = "";
      use(value);
    } catch (error) {
      at("message").textContent = error.message;
    }
  }

  function take(value) {
    const known = data.sentences.findIndex((each) => each.text === value.text && each.target === value.target);
    if (known >= 0) data.sentences[known] = value;
    else data.sentences.push(value);
    const index = known >= 0 ? known : data.sentences.length - 1;
    showSentences();
    choose({ sentence: index, kind: state.kind, layer: state.layer, head: state.head, step: Math.max((value.steps?.tokens.length ?? 1) - 1, 0) });
  }

  function remove(part) {
    const layer = state.layer;
    const side = kind().name === "encoder" ? "encoder" : "decoder";
    const parts = part === "head" ? { heads: [[kind().name, layer, state.head]], mlps: [] } : { heads: [], mlps: [[side, layer]] };
    ask("ablation", { line: sentence().text, ...parts }, (found) => {
      const [before, after] = [numbers(found.before).values, numbers(found.after).values];
      const table = make("table", {}, make("caption", { textContent: `Without ${found.removed.join(", ")}` }));
      const head = ["token", "measured output", "log-probability", "without", "change", "best output", "without"];
      table.append(make("tr", {}, ...head.map((text) => make("th", { textContent: text }))));
      found.tokens.forEach((name, t) => {
        const values = [name, found.references[t], shown(before[t], 3), shown(after[t], 3), shown(after[t] - before[t], 3), found.best_before[t], found.best_after[t]];
        table.append(make("tr", {}, ...values.map((text) => make("td", { textContent: text }))));
      });
      at("removed").replaceChildren(table);
    });
  }

  function patch(clean, corrupted, part) {
    ask("patching", { clean, corrupted, part }, (found) => {
      const same = data.patching && data.patching.clean === clean && data.patching.corrupted === corrupted;
      if (same && found.refused === null) found.parts = { ...data.patching.parts, ...found.parts };
      data.patching = found;
      if (found.refused === null) state.part = part;
      showPatching();
    });
  }

  // --- choices -------------------------------------------------------------------------------------------------------------

  function showSentences() {
    fill(at("sentence"), data.sentences.map((each, index) => [String(index), each.target ? `${each.text} → ${each.target}` : each.text]), String(state.sentence));
  }

  function choose(changes) {
    const fresh = "sentence" in changes;
    Object.assign(state, changes);
    if (fresh) Object.assign(state, { query: null, position: -1, step: Math.max(0, Math.min(state.step, (sentence().steps?.tokens.length ?? 1) - 1)) });
    if (fresh || "kind" in changes) {
      state.kind = Math.min(state.kind, sentence().kinds.length - 1);
      const [layers, heads] = kind().maps.shape;
      Object.assign(state, { layer: Math.min(state.layer, layers - 1), head: Math.min(state.head, heads - 1) });
      fill(at("kind"), sentence().kinds.map((each, index) => [String(index), each.name]), String(state.kind));
      const has = { probabilities: true, mean: true, gradients: kind().gradients, rollout: kind().rollout };
      if (!has[state.view]) state.view = "probabilities";
      fill(at("view"), Object.entries(VIEWS).filter(([name]) => has[name]), state.view);
      showHeads();
      showTable();
    }
    if (fresh) {
      at("sentence").value = String(state.sentence);
      if (data.serve) at("line").value = sentence().text;
      showLens();
      showRelevance();
      showAblation();
      at("removed")?.replaceChildren();
      const { cut } = sentence();
      at("message").textContent = cut ? `The last ${plural(cut, "token")} of this sentence were not read: the model's length ends there.` : "";
    }
    if (fresh || "step" in changes) showSteps();
    if (!("step" in changes) || fresh) {
      markHead();
      showLines();
      showMap();
    }
  }

  at("sentence").onchange = (event) => choose({ sentence: Number(event.target.value) });
  at("kind").onchange = (event) => choose({ kind: Number(event.target.value), query: null });
  at("view").onchange = (event) => choose({ view: event.target.value });
  at("pattern").onchange = (event) => choose({ pattern: event.target.value });
  at("step").oninput = (event) => choose({ step: Number(event.target.value) });
  at("back").onclick = () => choose({ step: Math.max(state.step - 1, 0) });
  at("forward").onclick = () => choose({ step: Math.min(state.step + 1, Number(at("step").max)) });
  at("position").onchange = (event) => {
    state.position = Number(event.target.value);
    showAblation();
  };
  at("part").onchange = (event) => {
    const part = event.target.value;
    const { clean, corrupted, parts } = data.patching;
    if (data.serve && !parts[part]) return patch(clean, corrupted, part);
    state.part = part;
    showPatching();
  };
  if (data.serve) {
    const submit = (form, action) =>
      at(form).addEventListener("submit", (event) => {
        event.preventDefault();
        action();
      });
    const seq2seq = "encoder" in data.sides && "decoder" in data.sides;
    at("target-label").hidden = !seq2seq;
    submit("edit", () => ask("sentence", { line: at("line").value, target: at("target").value || null }, take));
    submit("patch", () => patch(at("clean").value, at("corrupted").value, state.part));
    at("remove-head").onclick = () => remove("head");
    at("remove-mlp").onclick = () => remove("mlp");
    at("restore").onclick = () => at("removed").replaceChildren();
    at("clean").value = data.patching?.clean ?? "";
    at("corrupted").value = data.patching?.corrupted ?? "";
  }

  const sides = Object.entries(data.sides).map(([side, [layers, heads, width]]) => `${side} of ${plural(layers, "layer")}, ${plural(heads, "head")}, width ${width}`);
  at("model").textContent = [`${data.name}: ${data.task}`, plural(data.parameters, "parameter"), ...sides].join("; ");
  fill(at("pattern"), [["", "no pattern"], ...PATTERNS.map((name) => [name, name])], "");
  showSentences();
  const cross = sentence().kinds.findIndex((each) => each.name === "cross");
  choose({ sentence: 0, step: Infinity, kind: Math.max(cross, 0) });
  showPatching();
  document.getElementById("explorer").dataset.state = "ready";
  return { state, data, choose, numbers };
})();

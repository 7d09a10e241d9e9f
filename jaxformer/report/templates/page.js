// The controls of the curves, and a live page's questions to its server.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);

  function apply() {
    const smooth = Number($("smooth").value);
    $("smooth-value").textContent = smooth ? `${2 * smooth + 1} points` : "none";
    $("smooth").setAttribute("aria-valuetext", $("smooth-value").textContent);
    const log = $("log-y").value;
    return { axis: $("axis").value, smooth, log_x: $("log-x").checked, log_y: log === "" ? null : log === "1" };
  }

  // --- a live page that is loaded again ------------------------------------------------------------------------------

  // It loads itself again when there is more than points to show, and then looks as before: what was chosen, zoomed and
  // opened, and where the reader was. The tab keeps it; a place that has gone is left out.
  const KEPT = "jaxformer report";
  const fields = () => [...$("controls").elements].filter((each) => each.id);
  const section = (each) => each.closest("section[id], figure[id]")?.id ?? "";
  const opened = () => [...document.querySelectorAll("details")].map((each) => [`${section(each)} ${each.querySelector("summary").textContent}`, each]);

  function save() {
    const values = $("controls") ? fields().map((each) => [each.id, each.type === "checkbox" ? each.checked : each.value]) : [];
    const open = opened().map(([name, each]) => [name, each.open]);
    const focus = document.activeElement?.dataset.chart ?? null;
    sessionStorage.setItem(KEPT, JSON.stringify({ values, open, focus, zooms: charts.zooms(), scroll: scrollY }));
  }

  function saved() {
    try {
      return JSON.parse(sessionStorage.getItem(KEPT)) ?? {};
    } catch {
      return {}; // storage is off, or holds something else
    }
  }

  function restoreForm() {
    for (const [id, value] of saved().values ?? []) {
      const field = fields().find((each) => each.id === id);
      if (field) field[field.type === "checkbox" ? "checked" : "value"] = value;
    }
  }

  function restorePage() {
    const { open = [], focus, zooms = {}, scroll = 0 } = saved();
    const known = new Map(open);
    for (const [name, each] of opened()) if (known.has(name)) each.open = known.get(name);
    charts.zoom(zooms);
    if (focus && charts.names.includes(focus)) document.querySelector(`[data-chart="${focus}"]`).focus({ preventScroll: true });
    scrollTo(0, scroll);
    addEventListener("pagehide", save);
  }

  if ($("controls")) {
    $("controls").addEventListener("submit", (event) => event.preventDefault());
    $("smooth").addEventListener("input", () => charts.set({ smooth: apply().smooth }));
    for (const id of ["axis", "log-y", "log-x"]) $(id).addEventListener("change", () => charts.set(apply()));
    if (charts.live) restoreForm();
    charts.set(apply());
    addEventListener("pageshow", () => charts.set(apply())); // a browser that goes back restores the form
  }

  // --- live ----------------------------------------------------------------------------------------------------------

  // Each answer holds whole data sets. The page never joins old points with new ones, so that a run that was cut back
  // to a checkpoint shows no point twice and none that no longer exists.
  const SECONDS = 2;
  let version = "";

  async function ask() {
    try {
      const answer = await fetch(`data?version=${encodeURIComponent(version)}`, { cache: "no-store" });
      return answer.ok ? await answer.json() : null;
    } catch {
      return null;
    }
  }

  async function poll() {
    const news = await ask();
    if (news === null) {
      $("status").textContent = "The server does not answer; what is shown may be old. Trying again.";
      version = "";
    } else if (news.page !== charts.live) {
      location.reload(); // other charts: a measure, a sample or an evaluation has been added
      return;
    } else if (news.version !== version) {
      version = news.version;
      for (const [name, columns] of Object.entries(news.data)) charts.replace(name, columns);
      $("status").textContent = news.status;
      const results = new DOMParser().parseFromString(news.results, "text/html"); // escaped by the server, runs nothing
      $("results").querySelector("div").replaceChildren(...results.body.childNodes);
    }
    setTimeout(poll, SECONDS * 1000);
  }

  if (charts.live) {
    history.scrollRestoration = "manual";
    restorePage();
    poll();
  }
})();

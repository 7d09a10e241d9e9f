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

  if ($("controls")) {
    $("controls").addEventListener("submit", (event) => event.preventDefault());
    $("smooth").addEventListener("input", () => charts.set({ smooth: apply().smooth }));
    for (const id of ["axis", "log-y", "log-x"]) $(id).addEventListener("change", () => charts.set(apply()));
    const form = [...$("controls").elements].filter((each) => each.id);
    if (charts.live) {
      // A live page loads itself again when there is more than points to show.
      for (const each of form) {
        const saved = sessionStorage.getItem(each.id);
        if (saved !== null) each.type === "checkbox" ? (each.checked = saved === "true") : (each.value = saved);
      }
      $("controls").addEventListener("input", () => {
        for (const each of form) sessionStorage.setItem(each.id, each.type === "checkbox" ? each.checked : each.value);
      });
    }
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

  if (charts.live) poll();
})();

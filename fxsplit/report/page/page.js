"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const nodes = data.nodes;
  const SHOWN = 200; // nodes in one list, before a button for more
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children); // text stays text: names of a model are data
    return element;
  };
  const formatMs = (ms) => {
    if (ms >= 1000) return `${(ms / 1000).toPrecision(3)} s`;
    return ms > 0 ? `${ms.toFixed(Math.min(6, Math.max(0, 2 - Math.floor(Math.log10(ms)))))} ms` : "0 ms";
  };
  const formatBytes = (count) => {
    for (const unit of ["B", "KiB", "MiB"]) {
      if (count < 1024) return unit === "B" ? `${count} B` : `${count.toFixed(1)} ${unit}`;
      count /= 1024;
    }
    return `${count.toFixed(1)} GiB`;
  };
  const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

  // Theme: as the system, light or dark.
  const THEMES = ["as the system", "light", "dark"];
  let theme = 0;
  const setTheme = (number) => {
    theme = number;
    if (theme) document.documentElement.dataset.theme = THEMES[theme];
    else delete document.documentElement.dataset.theme;
    byId("theme").textContent = `Theme: ${THEMES[theme]}`;
    try { localStorage.setItem("fxsplit-theme", theme); } catch { /* files may not store */ }
  };
  try { setTheme(Number(localStorage.getItem("fxsplit-theme")) % 3 || 0); } catch { setTheme(0); }
  byId("theme").addEventListener("click", () => setTheme((theme + 1) % 3));

  // Fold and unfold.
  const sections = [...document.querySelectorAll("details.section")];
  byId("fold-all").addEventListener("click", () => {
    const open = sections.every((section) => !section.open);
    for (const section of sections) section.open = open;
    byId("fold-all").textContent = open ? "Fold all sections" : "Unfold all sections";
    byId("fold-all").setAttribute("aria-expanded", open);
  });
  const reveal = (id) => {
    const target = id && byId(id);
    const section = target && target.closest("details.section");
    if (section) section.open = true;
  };
  addEventListener("hashchange", () => reveal(location.hash.slice(1)));
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#"]');
    if (link) reveal(link.getAttribute("href").slice(1));
  });

  // Hints: what the pointer is on. Native hints are taken out, so that there are not two.
  const hints = new WeakMap();
  for (const title of document.querySelectorAll("svg > rect > title, svg > path > title")) {
    hints.set(title.parentElement, title.textContent);
    title.parentElement.setAttribute("aria-label", title.textContent);
    title.remove();
  }
  const findSpan = (key) => {
    const [kind, timeline, row, place] = key.split(" ");
    if (kind !== "span" || !data.timelines[timeline]) return null;
    const here = data.timelines[timeline].rows[row];
    return { timeline: data.timelines[timeline], row: here, span: here.spans[place] };
  };
  const describeSpan = (found) => {
    const [stage, op, microbatch, begin, end] = found.span;
    const what = data.operations[op] || op.toLowerCase().replace("_", " ");
    const of = microbatch >= 0 ? ` of microbatch ${microbatch}` : "";
    const place = data.stages[stage] ? ` (${data.stages[stage].place})` : "";
    return `${found.row.name}: ${what}${of} in stage ${stage}${place}, ` +
      `from ${formatMs(begin)} to ${formatMs(end)}, ${formatMs(end - begin)} long. ${found.timeline.title}.`;
  };
  const describe = (element) => {
    const key = element.dataset.key || "";
    const found = findSpan(key);
    return found ? describeSpan(found) : hints.get(element) || "";
  };
  const tip = byId("tip");
  document.addEventListener("pointermove", (event) => {
    const text = event.target.closest && event.target.closest("svg") ? describe(event.target) : "";
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10}px`;
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") { tip.hidden = true; byId("results").replaceChildren(); }
    if (event.key === "/" && !/^(input|textarea)$/i.test(document.activeElement.tagName)) {
      event.preventDefault();
      byId("search").focus();
    }
  });

  // Timeline: the block that is chosen, by pointer or by arrow keys.
  let at = [0, 0, 0];
  const chooseSpan = (timeline, row, place) => {
    const rows = (data.timelines[timeline] || { rows: [] }).rows;
    if (!rows[row] || !rows[row].spans.length) return;
    at = [timeline, row, Math.max(0, Math.min(place, rows[row].spans.length - 1))];
    const key = `span ${at.join(" ")}`;
    for (const old of document.querySelectorAll(".chosen-span")) old.classList.remove("chosen-span");
    const element = document.querySelector(`[data-key="${key}"]`);
    if (element) element.classList.add("chosen-span");
    byId("span").textContent = describeSpan(findSpan(key));
  };
  const moveSpan = (event) => {
    const [timeline, row, place] = at;
    const rows = data.timelines.length ? data.timelines[timeline].rows : [];
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step || !rows.length) return;
    event.preventDefault();
    if (step[1]) return chooseSpan(timeline, row, place + step[1]);
    const next = row + step[0];
    if (next >= 0 && next < rows.length) chooseSpan(timeline, next, place);
    else if (step[0] > 0) chooseSpan(timeline + 1, 0, place);
    else if (timeline) chooseSpan(timeline - 1, data.timelines[timeline - 1].rows.length - 1, place);
  };
  if (byId("span")) byId("span").addEventListener("keydown", moveSpan);

  document.addEventListener("click", (event) => {
    const element = event.target.closest && event.target.closest("[data-key]");
    if (!element) return;
    const [kind, ...numbers] = element.dataset.key.split(" ");
    if (kind === "span") chooseSpan(...numbers.map(Number));
    if (kind === "fold" && data.folds) chooseFold(Number(numbers[0]), element);
  });

  // Save the plan.
  byId("save").addEventListener("click", () => {
    const text = JSON.stringify(JSON.parse(byId("plan-json").textContent), null, 1);
    const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: "plan.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });

  // The graph: a tree of stages, modules and nodes, and what is chosen in it.
  const chooseFold = (number, element) => {
    for (const old of document.querySelectorAll(".chosen-fold")) old.classList.remove("chosen-fold");
    element.classList.add("chosen-fold");
    inspectNodes(hints.get(element) || "", data.folds[number]);
    byId("inspect").scrollIntoView({ block: "nearest" });
  };
  const word = (column, node) => nodes.words[nodes[column][node]];
  const time = (node) => nodes.forward[node] + nodes.backward[node];
  const sum = (list, value) => list.reduce((total, node) => total + value(node), 0);
  const nameOf = (node) => nodes.name[node] || nodes.inputs[node - nodes.name.length];
  let readers = null;
  const findReaders = (node) => {
    if (!readers) {
      readers = nodes.name.map(() => []);
      nodes.reads.forEach((list, reader) => list.forEach((made) => readers[made] && readers[made].push(reader)));
    }
    return readers[node];
  };
  const makeRow = (node) => {
    const row = make("button", { type: "button", class: "row", "data-node": node },
      make("span", { class: "name mono" }, nodes.name[node]),
      make("span", { class: "time" }, formatMs(time(node))));
    row.addEventListener("click", () => inspectNode(node, row));
    return row;
  };
  const listRows = (list) => {
    const box = make("div");
    const add = (from) => {
      box.append(...list.slice(from, from + SHOWN).map(makeRow));
      if (list.length <= from + SHOWN) return;
      const more = make("button", { type: "button" }, `Show more: ${list.length - from - SHOWN} are left`);
      more.addEventListener("click", () => { more.remove(); add(from + SHOWN); });
      box.append(more);
    };
    add(0);
    return box;
  };
  const links = (list) => {
    const found = list.slice(0, 12).map((node) => {
      if (node >= nodes.name.length) return make("span", { class: "mono" }, `${nameOf(node)} (input) `);
      const link = make("button", { type: "button", class: "mono" }, nameOf(node));
      link.addEventListener("click", () => inspectNode(node));
      return link;
    });
    return [...found, list.length > 12 ? ` and ${list.length - 12} more` : list.length ? "" : "nothing"];
  };
  const tell = (title, entries) => {
    const list = make("dl");
    for (const [name, ...value] of entries) list.append(make("dt", {}, name), make("dd", {}, ...value));
    byId("inspect").replaceChildren(make("h3", { class: "mono" }, title), list);
  };
  const inspectNode = (node, row) => {
    for (const old of document.querySelectorAll(".row.chosen")) old.classList.remove("chosen");
    const here = row || document.querySelector(`#tree [data-node="${node}"]`);
    if (here) here.classList.add("chosen");
    const note = word("note", node).split(/ ?@ (?=[^@]*$)/);
    const kept = nodes.together[node] < 0 ? [] :
      nodes.together.map((set, other) => (set === nodes.together[node] ? other : -1)).filter((n) => n >= 0 && n !== node);
    tell(nodes.name[node], [
      ["runs in", `stage ${nodes.stage[node]}, on ${data.stages[nodes.stage[node]].devices}`],
      ["module", word("module", node) || "the model's own forward()"],
      ["operation", word("op", node)],
      ...(note[0] ? [["layer", note[0]]] : []),
      ...(note[1] ? [["source", note[1]]] : []),
      ["result", word("made", node) || "not known"],
      ["time", `${formatMs(nodes.forward[node])} forward, ${formatMs(nodes.backward[node])} backward, for a microbatch`],
      ["bytes", `${formatBytes(nodes.output[node])} result, ${formatBytes(nodes.kept[node])} kept for backward, ` +
        `${formatBytes(nodes.parameters[node])} parameters`],
      ["reads", ...links(nodes.reads[node])],
      ["is read by", ...links(findReaders(node))],
      ...(kept.length ? [["never cut from", ...links(kept)]] : []),
    ]);
  };
  const inspectNodes = (title, list) => {
    tell(title, [
      ["nodes", String(list.length)],
      ["time", `${formatMs(sum(list, (n) => nodes.forward[n]))} forward, ${formatMs(sum(list, (n) => nodes.backward[n]))} backward`],
      ["bytes", `${formatBytes(sum(list, (n) => nodes.kept[n]))} kept for backward, ${formatBytes(sum(list, (n) => nodes.parameters[n]))} parameters`],
    ]);
    byId("inspect").append(listRows(list));
  };
  // A branch of the tree makes its children when it is first unfolded: thousands of nodes would take seconds.
  const makeBranch = (title, path, list) => {
    const branch = make("details", { "data-path": path });
    const label = make("span", { class: "row" }, make("span", { class: "name mono" }, title),
      make("span", { class: "time" }, `${plural(list.length, "node")}, ${formatMs(sum(list, time))}`));
    branch.append(make("summary", {}, label));
    let full = false;
    branch.fill = () => {
      if (full) return;
      full = true;
      branch.append(...makeChildren(path, list));
    };
    branch.addEventListener("toggle", () => branch.open && branch.fill());
    label.addEventListener("click", () => inspectNodes(title, list));
    return branch;
  };
  const makeChildren = (path, list) => {
    const prefix = path.slice(path.indexOf(":") + 1);
    const depth = prefix ? prefix.split(".").length : 0;
    const parts = new Map();
    for (const node of list) {
      const owner = word("module", node);
      const part = owner === prefix || !owner ? "" : owner.split(".").slice(0, depth + 1).join(".");
      if (!parts.has(part)) parts.set(part, []);
      parts.get(part).push(node);
    }
    const stage = path.slice(0, path.indexOf(":") + 1);
    return [...parts].map(([part, held]) => (part ? makeBranch(part, stage + part, held) : listRows(held)));
  };
  const findInTree = (node) => {
    const stage = nodes.stage[node];
    const parts = word("module", node) ? word("module", node).split(".") : [];
    let branch = byId("tree").querySelector(`[data-path="${stage}:"]`);
    for (let depth = 0; branch; depth += 1) {
      branch.fill();
      branch.open = true;
      if (depth >= parts.length) break;
      const path = CSS.escape(`${stage}:${parts.slice(0, depth + 1).join(".")}`);
      const next = branch.querySelector(`:scope > [data-path="${path}"]`);
      if (!next) break;
      branch = next;
    }
    return byId("tree").querySelector(`[data-node="${node}"]`);
  };
  if (nodes && byId("tree")) {
    byId("tree").replaceChildren();
    const held = data.stages.map(() => []);
    nodes.stage.forEach((stage, node) => held[stage].push(node));
    held.forEach((list, stage) => byId("tree").append(makeBranch(`stage ${stage} on ${data.stages[stage].devices}`, `${stage}:`, list)));
  }

  // Search: names, modules and operations.
  const search = () => {
    const text = byId("search").value.trim().toLowerCase();
    const results = byId("results");
    if (!text) return results.replaceChildren();
    if (!nodes) return results.replaceChildren("The page has no nodes: the plan was read without its profile.");
    const found = [];
    for (let node = 0; node < nodes.name.length; node += 1) {
      const where = `${nodes.name[node]}\n${word("module", node)}\n${word("op", node)}`.toLowerCase();
      if (where.includes(text)) found.push(node);
    }
    const rows = found.slice(0, SHOWN).map((node) => {
      const row = make("button", { type: "button", class: "row" },
        make("span", { class: "name mono" }, `${nodes.name[node]}  ${word("module", node)}`),
        make("span", { class: "time" }, `stage ${nodes.stage[node]}, ${formatMs(time(node))}`));
      row.addEventListener("click", () => {
        byId("graph").open = true;
        const here = findInTree(node);
        inspectNode(node, here);
        if (here) { here.scrollIntoView({ block: "center" }); here.focus(); }
      });
      return row;
    });
    const count = `${plural(found.length, "node")} found${found.length > SHOWN ? `, the first ${SHOWN} are listed` : ""}`;
    return results.replaceChildren(make("p", { class: "muted" }, count), ...rows);
  };
  byId("search").addEventListener("input", search);
  reveal(location.hash.slice(1));
})();

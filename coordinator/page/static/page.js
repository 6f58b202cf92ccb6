// The page: what the server says changed, shown; and orders, sent.

import { chart } from "/static/charts.js";
import { byId, fill, made, prose, scrollable, table } from "/static/dom.js";
import { bytes, counted, downwards, exponent, figure, iso, lasting, moment, number, percent, upwards } from "/static/notation.js";

let me = { name: "", may_order: false, order_key: "" };
let state = null; // the server's last one
let detail = null; // of the job that is shown, with all of its rounds
let heardAt = 0; // of the server, by this machine's clock
let skew = 0; // the server's clock less this one's, in seconds
let loading = null;

const now = () => Date.now() / 1000 + skew;
const chosen = () => {
  const name = decodeURIComponent(location.hash.match(/^#\/job\/(.+)$/)?.[1] ?? "");
  return state.jobs.some((each) => each.name === name) ? name : state.current;
};
const path = (name, rest = "") => `/api/jobs/${encodeURIComponent(name)}${rest}`;

// Talking to the server.

async function asked(address, options) {
  const answer = await fetch(address, options);
  if (answer.status === 401) location.replace("/login");
  const values = await answer.json();
  if (!answer.ok) throw new Error(values.error);
  return values;
}

const order = (address, body = {}) =>
  asked(address, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Dpagent-Order": me.order_key },
    body: JSON.stringify(body),
  });

function listen() {
  const stream = new EventSource("/api/events");
  stream.addEventListener("state", (event) => {
    state = JSON.parse(event.data);
    skew = state.at - Date.now() / 1000;
    heardAt = Date.now();
    show();
  });
  stream.addEventListener("open", () => { heardAt = Date.now(); live("live", "Live"); });
  stream.addEventListener("error", () => {
    live("lost", heardAt ? `Not live since ${moment(heardAt / 1000)}` : "Not live");
    // Where the session has ended, this leads to the sign-in.
    asked("/api/me").then((values) => { me = values; }).catch(() => {});
    if (stream.readyState === EventSource.CLOSED) {
      stream.close();
      setTimeout(listen, 3000);
    }
    if (state) banners();
  });
}

function live(kind, words) {
  const place = byId("live");
  if (place.dataset.state === kind && place.textContent === words) return;
  place.dataset.state = kind;
  place.textContent = words;
}

function announce(words) {
  byId("announcer").textContent = words;
}

function say(words) {
  const place = byId("said");
  place.replaceChildren(...prose(words));
  place.hidden = false;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { place.hidden = true; }, 12000);
}

// What is shown.

function show() {
  live("live", "Live");
  byId("fleet").textContent = state.fleet;
  const name = chosen();
  document.title = title(name);
  banners();
  queue();
  orders();
  workers();
  health();
  if (name === null) {
    nothingYet();
    return;
  }
  if (detail?.name === name) job();
  load(name);
}

function title(name) {
  const shown = state.jobs.find((each) => each.name === name);
  const trouble = state.problem || state.coordinator.verdict === "problem" ? "⚠ " : "";
  return shown ? `${trouble}${shown.name}: ${shown.closed} of ${shown.rounds} · ${state.fleet}` : `${trouble}${state.fleet}`;
}

function banners() {
  const found = [];
  if (byId("live").dataset.state === "lost") {
    found.push(["problem", `This page has lost its server. What it shows is of ${moment(state.at)}; it tries again by itself.`]);
  }
  if (state.problem) found.push(["problem", state.problem]);
  if (state.coordinator.verdict !== "ok") found.push([state.coordinator.verdict, state.coordinator.words]);
  if (state.open?.participation?.dead_end) found.push(["problem", `${state.open.participation.dead_end}.`]);
  if (state.open && state.workers && !state.workers.some((each) => each.counts)) {
    found.push(["problem", "No worker counts fragments: start `dpagent coordinator worker`, on any machine. Rounds stay open until then."]);
  }
  for (const each of state.jobs.filter((known) => known.trouble && (!known.is_over || known.name === state.current))) {
    found.push(["problem", `${each.state.startsWith("fail") ? `Job ${each.name} has failed` : `The coordinator has paused job ${each.name}`}: ${each.trouble}`]);
  }
  for (const each of state.health.filter((known) => known.verdict !== "ok")) {
    found.push([each.verdict, `${each.check}: ${each.text}. ${each.remedy}`]);
  }
  fill(byId("banners"), found, () => found.map(([kind, words]) => made("div", { class: `banner ${kind}`, role: "alert" }, made("span", {}, ...prose(words)))));
}

function nothingYet() {
  detail = null;
  fill(byId("job-title"), "none", () => "No job yet");
  byId("job-lede").textContent = "A job is what the fleet is to train: a model, a method, a privacy target, a number of rounds.";
  fill(byId("job-actions"), [], () => []);
  fill(byId("job-body"), me.may_order, () => made("div", { class: "card" },
    made("p", {}, "The first figures come here when a job has begun and boards take part."),
    me.may_order ? made("p", {}, made("a", { href: "#adding" }, "Add a job"), " below, or on the coordinator’s machine:") : null,
    made("p", {}, made("code", {}, "dpagent coordinator job add FILE"))));
}

// The job's own figures come with the rounds that are new.
async function load(name) {
  const summary = state.jobs.find((each) => each.name === name);
  const mark = JSON.stringify(summary);
  if (loading || (detail?.name === name && detail.mark === mark)) return;
  loading = name;
  try {
    const same = detail?.name === name && detail.id === summary.id ? detail : null;
    const after = same ? same.rows.number.at(-1) ?? 0 : 0;
    const found = await asked(path(name, `?after=${after}`));
    if (same) {
      for (const [key, values] of Object.entries(found.rows)) found.rows[key] = [...same.rows[key], ...values];
      const last = found.rows.number.at(-1) ?? 0;
      if (last > after) announceRound(found);
    }
    detail = { ...found, mark };
  } catch (error) {
    if (state) announce(error.message);
    return;
  } finally {
    loading = null;
  }
  if (chosen() === name) job(); else show();
}

function announceRound(found) {
  const { number: rounds, accuracy, closed_at: closed } = found.rows;
  if (closed.at(-1) === null) {
    announce(`Round ${rounds.at(-1)} of ${found.rounds} is given up.`);
    return;
  }
  const reached = accuracy.at(-1) === null ? "" : `: accuracy ${percent(accuracy.at(-1))}`;
  announce(`Round ${rounds.at(-1)} of ${found.rounds} is over${reached}.`);
}

// One job.

const CHIPS = { waiting: "", running: "running", cancelling: "cancelled", finished: "ended", cancelled: "cancelled", failing: "cancelled", failed: "cancelled" };
const chip = (each) => made("span", { class: `chip ${each.paused && !each.is_over ? "held" : CHIPS[each.state]}` }, each.words);

function job() {
  const summary = state.jobs.find((each) => each.name === detail.name);
  if (!summary) return;
  fill(byId("job-title"), [summary.name, summary.words, summary.paused], () => [document.createTextNode(summary.name), chip(summary)]);
  byId("job-lede").textContent = lede(summary);
  fill(byId("job-actions"), [summary.may, summary.begun_at === null, me.may_order, summary.name], () => actions(summary));
  const open = state.open?.job === summary.name ? state.open : null;
  const parts = sections();
  fill(parts.figures, [summary, detail.rows.number.length, detail.columns, open?.round], () => figures(summary));
  fill(parts.open, [open, summary.state], () => openRound(open, summary));
  fill(parts.charts, [detail.name, detail.rows.number.length, summary.state], () => charts(summary));
  fill(parts.classes, [detail.name, detail.classes], () => classes());
  fill(parts.counters, [detail.name, open?.counters ?? detail.counters, detail.out_of_range], () => counters(open?.counters ?? detail.counters));
  fill(parts.guarantee, [detail.name, detail.columns, detail.guarantee], () => guarantee());
  fill(parts.rest, [detail.name, detail.downloads, detail.settings], () => rest(summary));
}

// The places of a job's parts, in their order.
function sections() {
  const body = byId("job-body");
  if (body.dataset.for !== "job") {
    body.dataset.for = "job";
    body.replaceChildren(...["figures", "open", "charts", "classes", "counters", "guarantee", "rest"].map((each) => made("div", { id: `part-${each}` })));
  }
  return Object.fromEntries([...body.children].map((each) => [each.id.slice(5), each]));
}

function lede(summary) {
  const parts = [`${summary.method_in_words} (${summary.method}), model ${summary.model}.`];
  if (summary.begun_at) parts.push(`Began ${moment(summary.begun_at)}`, summary.ended_at ? `and ended ${moment(summary.ended_at)}.` : ".");
  else parts.push(`In the queue since ${moment(summary.added_at)}.`);
  return parts.join(" ").replace(" .", ".");
}

function actions(summary) {
  if (!me.may_order) return summary.is_over ? [] : made("p", { class: "detail" }, "You may look, and give no orders.");
  const buttons = [];
  const give = (id, words, act, kind = null) => buttons.push(made("button", { id, class: kind, type: "button", onclick: act }, words));
  if (summary.may.resume) give("resume", summary.begun_at ? "Resume" : "Start", () => ordered(path(summary.name, "/resume")), "primary");
  if (summary.may.pause) give("pause", "Pause", () => ordered(path(summary.name, "/pause")));
  if (summary.may.cancel) give("cancel", "Cancel…", () => askToCancel(summary.name), "danger");
  return buttons;
}

async function ordered(address, body) {
  try {
    say((await order(address, body)).words);
  } catch (error) {
    say(`That was not done. ${error.message}`);
  }
}

function askToCancel(name) {
  const dialog = byId("cancelling");
  byId("cancelling-words").textContent = `Job ${name} is over for good then.`;
  byId("cancel-model").checked = false;
  dialog.onclose = () => {
    if (dialog.returnValue === "cancel") ordered(path(name, "/cancel"), { with_model: byId("cancel-model").checked });
    dialog.returnValue = "";
  };
  dialog.showModal();
}

function tile(label, value, detailWords, share = null, kind = "") {
  return made("div", { class: "card" }, made("dt", {}, label), made("dd", { class: "value" }, ...[value].flat()),
    share === null ? null : made("dd", { class: `meter ${kind}`, "aria-hidden": "true", "--share": String(100 * Math.min(1, share)) }, made("i")),
    made("dd", { class: "detail" }, detailWords));
}

const small = (words) => made("small", {}, words);

function figures(summary) {
  const { rows, columns } = detail, own = columns[0];
  const accuracy = rows.accuracy.findLast((each) => each !== null) ?? null;
  // Of the same moment as the rows: the summary may know of a round whose figures are still on their way.
  const closes = rows.closed_at.some((at) => at !== null);
  const majority = detail.majority_class_accuracy;
  const least = rows.least.findLast((each, at) => rows.closed_at[at] !== null) ?? null;
  const share = own?.target ? (own.spent ?? own.target) / own.target : null;
  return made("dl", { class: "figures" },
    tile("Test accuracy", percent(accuracy), accuracy === null
      ? (closes ? "not measured: the job names no test data" : summary.is_over ? "no round closed" : "measured when a round closes")
      : `always answering the commonest class: ${percent(majority)}`),
    own?.is_guarantee === false
      ? tile("Privacy", "no guarantee", "this job runs without a proof")
      : tile(`Privacy spent in rounds that are over, for each ${own.unit}`, [`ε\u00a0=\u00a0${upwards(own.spent)}`, " ", small(`of ${upwards(own.target)}`)],
          `δ = ${exponent(own.delta)}; ${summary.is_over ? `boards keep ${upwards(own.target)} reserved` : `${downwards(own.left)} is left for the others`}`, share, share > 0.9 ? "budget nearly" : "budget"),
    tile("Rounds", [number(summary.closed), " ", small(`of ${number(summary.rounds)}`)], pace(summary), summary.closed / summary.rounds),
    tile("Boards in the last round", least === null ? "–" : [number(least), " ", small(`of ${number(state.devices)}`)],
      least === null ? (summary.is_over ? "no round closed" : "known when a round closes") : "at least, in every block of the update"));
}

function pace(summary) {
  const { opened_at: opened, closed_at: closed } = detail.rows;
  const times = closed.map((at, index) => at && at - opened[index]).filter(Boolean).slice(-20).sort((a, b) => a - b);
  if (!times.length) return summary.is_over ? "none closed" : "none has closed yet";
  const typical = times[Math.floor(times.length / 2)], left = summary.rounds - summary.over;
  const words = `${lasting(typical)} each (median)`;
  return summary.is_over || !left ? words : `${words}; about ${lasting(typical * left)} more`;
}

function openRound(open, summary) {
  if (!open) {
    const words = summary.is_over ? null : summary.state === "waiting"
      ? (summary.paused ? "It has not begun, and waits until it is started." : "It has not begun: its turn comes after the jobs before it.")
      : summary.paused ? "No round is open while the job is paused." : "No round is open.";
    return words && made("div", { class: "card" }, made("p", { class: "empty" }, words));
  }
  const share = open.expected ? open.counted / open.expected : 0;
  return made("div", { class: "card", id: "open-round" },
    made("div", { class: "round" },
      made("div", {}, made("h2", { id: "open-title" }, `Round ${open.round} of ${open.rounds} is open`),
        made("p", { class: "detail" }, made("span", { id: "deadline", "data-at": open.deadline }, deadline(open.deadline)),
          open.announced_at ? "" : "; not announced yet, as the broker is away")),
      made("div", {},
        made("div", { class: "meter", role: "progressbar", "aria-labelledby": "open-title", "aria-valuemin": "0", "aria-valuemax": String(open.expected),
          "aria-valuenow": String(Math.min(open.counted, open.expected)), "aria-valuetext": `${open.counted} of ${open.expected} fragments`, "--share": String(100 * Math.min(1, share)) }, made("i")),
        made("p", { class: "detail" }, `${number(open.counted)} of ${counted(open.expected, "fragment")}. `,
          open.participation ? `${open.participation.words}.`
            : `${counted(open.least, "board")} or more in every block, of ${number(open.devices)}; the round closes at its deadline with ${number(detail.minimum_devices)} or more.`))),
    made("p", { class: "hint" }, open.participation
      ? "Members are counted by the tokens that they asked for; nobody can tell which fragments are whose."
      : "Fragments carry no sender: who takes part is not known, only how many fragments came."));
}

const deadline = (at) => (at > now() ? `closes in ${lasting(at - now())} at the latest` : "its deadline is over");

function charts(summary) {
  const { rows } = detail;
  const closed = rows.number.map((_, at) => at).filter((at) => rows.closed_at[at] !== null);
  if (!closed.length) {
    return made("div", { class: "card" }, made("p", { class: "empty" }, summary.is_over
      ? "No round of this job closed, so it has no figures by round."
      : summary.begun_at
      ? "No round has closed yet. Accuracy, loss and budget by round come here when one has."
      : "Accuracy, loss and budget by round come here once the job has begun."));
  }
  const take = (key) => closed.map((at) => rows[key][at]);
  const shared = { x: take("number"), rounds: summary.rounds, references: [] };
  const last = (values) => values.findLast((each) => each !== null);
  const made_ = [];
  const accuracy = take("accuracy"), loss = take("loss");
  // Rounds that were given up have cost it, too.
  const paid = rows.number.map((_, at) => at).filter((at) => rows.epsilon[at] !== null), epsilon = paid.map((at) => rows.epsilon[at]);
  if (accuracy.some((each) => each !== null)) {
    made_.push(chart({ ...shared, id: "accuracy", title: "Test accuracy", now: percent(last(accuracy)), from: 0, format: (each) => percent(each),
      tick: (each) => percent(each, 0), series: [{ name: "accuracy", colour: "blue", values: accuracy }],
      references: [{ name: "commonest class", value: detail.majority_class_accuracy }],
      caption: "Share of public test records that the model of each round classifies rightly." }));
  }
  if (loss.some((each) => each !== null)) {
    made_.push(chart({ ...shared, id: "loss", title: "Test loss", now: figure(last(loss)), from: 0, format: (each) => figure(each),
      series: [{ name: "loss", colour: "purple", values: loss }], caption: "Mean cross-entropy on the test records, in nats." }));
  }
  if (epsilon.length) {
    const target = detail.columns[0].target;
    made_.push(chart({ ...shared, x: paid.map((at) => rows.number[at]), id: "epsilon", title: `Privacy spent, for each ${detail.columns[0].unit}`, now: `ε = ${upwards(last(epsilon))}`, from: 0,
      format: (each) => upwards(each), tick: (each) => figure(each), series: [{ name: "ε so far", colour: "green", values: epsilon, area: true }],
      references: target === null ? [] : [{ name: "target", value: target }],
      caption: "What the rounds so far cost whoever took part in all of them. A job that ends early because of its results has cost the target." }));
  }
  const received = take("received"), published = take("published");
  if (received.some(Boolean) || published.some(Boolean)) {
    made_.push(chart({ ...shared, id: "bytes", title: "Traffic of the coordinator", now: `${bytes(last(received))} in, ${bytes(last(published))} out`, from: 0,
      format: (each) => bytes(each), series: [{ name: "received", colour: "blue", values: received }, { name: "published", colour: "orange", values: published }],
      caption: "Payloads and topics in each round, repeats included. What passed before a restart in a round is missing." }));
  }
  return made("div", { class: "grid" }, ...made_);
}

function classes() {
  const found = detail.classes;
  if (!found) return null;
  const rows = found.names.map((name, at) => made("tr", {},
    made("th", { scope: "row", class: "words" }, name),
    made("td", { class: "bar" }, made("div", { class: "meter", "aria-hidden": "true", "--share": String(found.records[at] ? (100 * found.right[at]) / found.records[at] : 0) }, made("i"))),
    made("td", {}, found.records[at] ? percent(found.right[at] / found.records[at]) : "–"),
    made("td", {}, number(found.records[at]))));
  const recall = made("div", { class: "card" }, made("h2", {}, "Recall by class"),
    made("p", { class: "detail" }, `After round ${found.round}: how many test records of each class the model finds.`),
    scrollable("scroll-recall", "Recall by class", table("Recall by class", [["Class", true], [made("span", { class: "unseen" }, "As a bar")], ["Recall"], ["Records"]], rows, { class: "recall" })));
  return made("div", { class: "grid" }, recall, confusion(found));
}

function confusion(found) {
  if (!found.confusion) {
    return made("div", { class: "card" }, made("h2", {}, "Confusion matrix"), made("p", { class: "empty" }, `It is kept for up to 100 classes; this model has ${number(found.names.length)}.`));
  }
  const rows = found.confusion.map((row, at) => made("tr", {}, made("th", { scope: "row" }, found.names[at]),
    ...row.map((value, to) => made("td", { class: at === to ? "right" : value ? null : "none", "--share": String(found.records[at] ? value / found.records[at] : 0) }, number(value)))));
  return made("div", { class: "card" }, made("h2", {}, "Confusion matrix"),
    made("p", { class: "detail" }, "Rows: what a record is. Columns: what the model answers."),
    scrollable("scroll-confusion", "Confusion matrix",
      table("Confusion matrix", [["Class"], ...found.names.map((name) => [name])], rows, { class: "heat" })));
}

function counters(found) {
  const bounds = found.rejected.filter((each) => each.is_bound), others = found.rejected.filter((each) => !each.is_bound);
  const listed = (id, label, rows) => scrollable(id, label, table(label, [["Reason", true], ["Messages"], ["In words", true]], rows.map((each) => [each.reason, number(each.count), each.meaning])));
  return made("div", { class: "grid" },
    made("div", { class: "card" }, made("h2", {}, "Bounds against false updates"),
      bounds.length ? listed("scroll-bounds", "Bounds against false updates", bounds) : made("p", { class: "empty" }, "No message has hit one."),
      detail.out_of_range.length ? made("p", { class: "detail" }, `On the boards, changes of ${detail.out_of_range.join(", ")} lay at the ends of their ranges, and were cut.`) : null),
    made("div", { class: "card" }, made("h2", {}, "Other messages that did not count"),
      others.length + found.others.length ? listed("scroll-others", "Other messages that did not count", [...others, ...found.others]) : made("p", { class: "empty" }, "Every message so far counted.")));
}

function guarantee() {
  const columns = detail.columns.map((each) => [`${each.unit}, ${each.adjacency}`, each.trust, each.is_guarantee ? upwards(each.spent) : "no bound",
    each.target === null ? "–" : upwards(each.target), each.left === null || detail.is_over ? "–" : downwards(each.left), each.delta === null ? "–" : exponent(each.delta)]);
  return made("div", { class: "card", id: "guarantee" }, made("h2", {}, "The guarantee in plain words"),
    made("div", { class: "words-pair" }, ...detail.guarantee.map((each) => made("div", {}, made("h3", {}, each.title), made("ul", { class: "plain" }, ...each.paragraphs.map((words) => made("li", {}, words)))))),
    scrollable("scroll-columns", "Privacy by column", table("Privacy by column", [["For each", true], ["Trusted", true], ["ε, rounds over"], ["ε of the job"], ["left"], ["δ"]], columns.map((row) => made("tr", {},
      made("th", { scope: "row", class: "words" }, row[0]), made("td", { class: "words" }, row[1]), ...row.slice(2).map((cell) => made("td", {}, cell)))))),
    detail.is_over ? made("p", { class: "hint" }, "Boards that took part keep all of the job’s ε reserved, whatever it has spent.") : null,
    columns.length > 1 ? made("p", { class: "hint" }, "These are never added up: each holds for another unit, or trusts other parties.") : null,
    made("p", { class: "hint" }, `Linkability ${detail.linkability}: ${detail.linkability_in_words}.`));
}

function rest(summary) {
  const { downloads } = detail;
  const link = (id, address, words) => made("a", { id, class: "button", href: address, download: "" }, words);
  const links = [
    downloads.model && link("download-model", path(summary.name, "/model"), `Model (${downloads.model})`),
    downloads.report && link("download-report", path(summary.name, "/report"), "Report (HTML)"),
    downloads.audit && me.may_order && link("download-audit", "/api/audit", "Audit export (JSON)"),
  ].filter(Boolean);
  return made("div", { class: "grid" },
    made("div", { class: "card" }, made("h2", {}, "Downloads"),
      links.length ? made("p", { class: "actions" }, ...links) : made("p", { class: "empty" }, "The model and the report come when a round has closed."),
      downloads.audit ? null : made("p", { class: "hint" }, "The audit export comes with members of the fleet and their tokens (linkability: fragment).")),
    made("div", { class: "card" }, made("h2", {}, "Settings"),
      made("details", { id: "job-settings" }, made("summary", {}, counted(detail.settings.length, "setting")),
        scrollable("scroll-settings", "Settings of the job", table("Settings of the job", [["Key", true], ["Value", true]], detail.settings)))));
}

// The queue, the log, the machine.

function queue() {
  const name = chosen();
  byId("adding").hidden = !me.may_order;
  fill(byId("queue-body"), [state.jobs, name], () => {
    if (!state.jobs.length) return made("div", { class: "card" }, made("p", { class: "empty" }, "The queue is empty."));
    const rows = [...state.jobs].reverse().map((each) => made("tr", { "aria-current": each.name === name ? "true" : null },
      made("th", { scope: "row", class: "words" }, made("a", { id: `to-${each.name}`, href: `#/job/${encodeURIComponent(each.name)}` }, each.name)),
      made("td", { class: "words" }, chip(each)),
      made("td", {}, `${number(each.closed)} of ${number(each.rounds)}`),
      made("td", {}, percent(each.accuracy)),
      made("td", {}, upwards(each.epsilon_spent)),
      made("td", {}, each.epsilon_target === null ? "no bound" : upwards(each.epsilon_target)),
      made("td", {}, made("time", { datetime: iso(each.added_at) }, moment(each.added_at)))));
    return made("div", { class: "card" }, scrollable("scroll-queue", "Queue of jobs",
      table("Queue of jobs, the last one first", [["Job", true], ["State", true], ["Rounds"], ["Accuracy"], ["ε, rounds over"], ["ε at most"], ["Added"]], rows)));
  });
}

const KINDS = { add: "added", pause: "paused", resume: "resumed", cancel: "cancelled", deadline: "changed the deadline of", minimum: "changed the least number of boards of" };

function orders() {
  fill(byId("orders-body"), state.orders, () => {
    if (!state.orders.length) return made("div", { class: "card" }, made("p", { class: "empty" }, "Nobody has given an order yet."));
    const rows = state.orders.map((each) => made("tr", {},
      made("th", { scope: "row", class: "words" }, made("time", { datetime: iso(each.at) }, moment(each.at))),
      made("td", { class: "words" }, each.by), made("td", { class: "words" }, `${KINDS[each.kind]} job ${each.job}${each.detail ? ` (${each.detail})` : ""}`)));
    return made("div", { class: "card" }, scrollable("scroll-orders", "Log of orders",
      table("Log of orders, the last one first", [["When", true], ["Who", true], ["Order", true]], rows)));
  });
}

function workers() {
  byId("workers").hidden = byId("to-workers").hidden = !state.workers;
  if (!state.workers) return;
  fill(byId("workers-body"), state.workers, () => {
    if (!state.workers.length) return made("div", { class: "card" }, made("p", { class: "empty" }, "No worker was here within the last hour."));
    const rows = state.workers.map((each) => made("tr", {},
      made("th", { scope: "row", class: "words" }, each.name),
      made("td", { class: "words" }, made("span", { class: each.counts ? "chip running" : "chip" }, each.counts ? "counts" : "ended")),
      made("td", {}, number(each.fragments)),
      made("td", {}, each.counts ? "now" : `${lasting(each.seen_s)} ago`),
      made("td", {}, lasting(each.began_s)),
      made("td", { class: "words" }, each.version)));
    return made("div", { class: "card" }, scrollable("scroll-workers", "Table of workers",
      table("Workers, the last seen first", [["Worker", true], ["State", true], ["Fragments counted"], ["Last seen"], ["Since its start"], ["Version", true]], rows)));
  });
}

function health() {
  const daemon = state.coordinator;
  const words = { ok: "fine", warning: "warning", problem: "problem" };
  const found = [{ verdict: daemon.verdict, text: daemon.words, remedy: daemon.runs && daemon.activity ? `Now: ${daemon.activity}.` : "" }, ...state.health];
  fill(byId("health-body"), [found, daemon.received, daemon.published], () => made("div", { class: "card" },
    made("ul", { class: "findings" }, ...found.map((each) => made("li", { class: "finding" }, made("b", { class: each.verdict }, words[each.verdict] ?? each.verdict), made("span", {}, ...prose(each.remedy ? `${each.text} ${each.remedy}` : each.text))))),
    daemon.received === undefined ? null : made("p", { class: "hint" }, `Since its start: ${bytes(daemon.received)} received, ${bytes(daemon.published)} published.`)));
}

// Forms.

byId("add-file").addEventListener("change", async (event) => {
  const file = event.target.files[0];
  if (!file) return;
  byId("add-text").value = await file.text();
  if (!byId("add-name").value) byId("add-name").value = file.name.replace(/\.ya?ml$/, "");
});

byId("add").addEventListener("submit", async (event) => {
  event.preventDefault();
  const error = byId("add-error"), button = byId("add-submit");
  error.hidden = true;
  button.disabled = true;
  button.textContent = "Planning its rounds…";
  try {
    const answer = await order("/api/jobs", { name: byId("add-name").value, text: byId("add-text").value, start_later: byId("add-later").checked });
    say(answer.words);
    event.target.reset();
    byId("adding").open = false;
    byId("queue").scrollIntoView();
  } catch (problem) {
    error.replaceChildren(...prose(problem.message));
    error.hidden = false;
  }
  button.disabled = false;
  button.textContent = "Add the job";
});

byId("logout").addEventListener("click", async () => {
  await order("/api/logout").catch(() => {});
  location.replace("/login");
});

addEventListener("hashchange", () => {
  if (!state) return;
  if (location.hash.startsWith("#/job/")) {
    byId("job-title").scrollIntoView({ block: "center" });
    announce(`Job ${chosen()}`);
  }
  if (location.hash === "#adding") byId("adding").open = true;
  show();
});

setInterval(() => {
  const place = byId("deadline");
  if (place) place.textContent = deadline(Number(place.dataset.at));
}, 1000);

asked("/api/me").then((values) => {
  me = values;
  byId("visitor").textContent = `${me.name}${me.may_order ? "" : " (may look)"}`;
  byId("logout").hidden = !me.has_session;
  listen();
}).catch((error) => { live("lost", "Not live"); say(error.message); });

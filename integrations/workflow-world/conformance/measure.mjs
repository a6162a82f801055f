// Figures of the World as Node sees it, with HTTP: prints one line of JSON.
import { createServer } from 'node:http';
import { Readable } from 'node:stream';

import { monotonicFactory } from 'ulid';

import { createWorld } from '../dist/index.js';

const ulid = monotonicFactory();
const world = createWorld();
const bytes = new Uint8Array(200).fill(120);
const SECONDS = Number(process.env.MEASURE_SECONDS ?? 5);

async function newRun() {
  const runId = `wrun_${ulid()}`;
  const eventData = { deploymentId: 'dpl_1', workflowName: 'wf', input: bytes };
  await world.events.create(runId, { eventType: 'run_created', specVersion: 5, eventData });
  await world.events.create(runId, { eventType: 'run_started', specVersion: 5 });
  return runId;
}

/** Steps one after another, as a serial workflow has them: two events each. Returns how many events. */
async function steps(until) {
  const runId = await newRun();
  let events = 2;
  for (let at = 0; performance.now() < until; at++) {
    const step = { correlationId: `step_${at}`, specVersion: 5 };
    await world.events.create(runId, { ...step, eventType: 'step_started', eventData: { stepName: 's', input: bytes } });
    await world.events.create(runId, { ...step, eventType: 'step_completed', eventData: { stepName: 's', result: bytes } });
    events += 2;
  }
  await world.events.create(runId, { eventType: 'run_completed', specVersion: 5, eventData: { output: bytes } });
  return events + 1;
}

async function perSecond(runs) {
  const began = performance.now();
  const counts = await Promise.all(Array.from({ length: runs }, () => steps(began + SECONDS * 1000)));
  return Math.round((counts.reduce((sum, count) => sum + count) / (performance.now() - began)) * 1000);
}

/** Milliseconds from `queue` to the handler, one message after another. */
async function deliveries() {
  const prefix = '__wkf_workflow_';
  const waiting = new Map();
  const handle = world.createQueueHandler(prefix, async (message) => waiting.get(message.number)(performance.now()));
  const server = createServer(async (incoming, outgoing) => {
    const init = { method: 'POST', headers: incoming.headers, body: Readable.toWeb(incoming), duplex: 'half' };
    const response = await handle(new Request('http://localhost/', init));
    outgoing.writeHead(response.status).end(await response.text());
  });
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  process.env.PORT = String(server.address().port);
  await world.start();
  const times = [];
  for (let number = 0; number < 200; number++) {
    const arrived = new Promise((resolve) => waiting.set(number, resolve));
    const began = performance.now();
    await world.queue(`${prefix}wf`, { runId: `wrun_${ulid()}`, number });
    times.push((await arrived) - began);
  }
  await new Promise((resolve) => server.close(resolve)); // after the last answer
  times.sort((one, other) => one - other);
  return { p50: times[100], p99: times[197] };
}

await newRun(); // the server starts
const serial = await perSecond(1);
const parallel = await perSecond(20);
const { p50, p99 } = await deliveries();
console.log(JSON.stringify({ serial, parallel, p50, p99 }));
await world.close();
